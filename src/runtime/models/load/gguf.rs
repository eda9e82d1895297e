//! GGUF files, single or split: a table of metadata and a table of tensors over mapped bytes.
//!
//! Invariants: every count, length, offset and extent is checked against the file's actual size before it is
//! used to allocate or slice; tensors are aligned, inside the file and do not overlap. This file does not
//! interpret the values (architectures, tokenizers). Format: the GGUF specification (ggml's docs/gguf.md),
//! versions 2 and 3, and llama.cpp's gguf-split for shards.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::gguf_types::{self, dtype, kind_name};
use super::metadata::{Cursor, Metadata, malformed_tensor, shortened};
use crate::tensor::{HostTensor, SharedBytes, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Most dimensions of a ggml tensor.
const MAX_DIMS: u32 = 4;
/// Least bytes of a tensor entry: name length, dimension count, type, offset.
const MIN_TENSOR_ENTRY: usize = 8 + 4 + 4 + 8;
/// Least bytes of a metadata entry: key length, type, one byte of value.
const MIN_METADATA_ENTRY: usize = 8 + 4 + 1;

/// An open GGUF model.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    shards: Vec<GgufShard>,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<Box<str>, usize>,
}

/// One mapped file of a model.
#[derive(Debug)]
struct GgufShard {
    path: PathBuf,
    bytes: SharedBytes,
    header_len: usize,
}

/// Location of a tensor, checked unless its type is not supported.
#[derive(Debug)]
struct GgufTensor {
    name: Box<str>,
    shape: Vec<usize>,
    kind: u32,
    shard: usize,
    start: usize,
}

impl GgufTensor {
    /// Returns the bytes of the tensor, or `None` for an unsupported type, whose layout is unknown.
    fn byte_len(&self) -> Result<Option<usize>, String> {
        gguf_types::file_len(self.kind, &self.shape)
    }
}

impl Gguf {
    /// Maps a GGUF file. For a split model, any shard opens all of them.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] naming the file or the missing shard, [`LoadError::Malformed`] naming the key, tensor
    /// or field at fault, [`LoadError::Unsupported`] for other versions and for big-endian files.
    pub fn open(path: impl AsRef<Path>) -> LoadResult<Gguf> {
        let path = path.as_ref();
        let opened = ParsedGguf::parse(path, SharedBytes::map_file(path)?)?;
        match Split::of(&opened)? {
            Some(split) if split.count > 1 => split.open_all(opened),
            _ => Gguf::assemble(vec![opened]),
        }
    }

    /// Reads an unsplit GGUF file from memory; errors name it `path`.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn from_bytes(path: impl AsRef<Path>, bytes: impl Into<SharedBytes>) -> LoadResult<Gguf> {
        Gguf::assemble(vec![ParsedGguf::parse(path.as_ref(), bytes.into())?])
    }

    /// Returns the key-value section, for a split model that of the first shard.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the files of the model, in shard order.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Returns the file of a tensor; `None` unless the model has several.
    pub fn file_of(&self, tensor: &str) -> Option<&Path> {
        let index = self.by_name.get(tensor).filter(|_| self.shards.len() > 1)?;
        Some(&self.shards[self.tensors[*index].shard].path)
    }

    /// Returns the files, their bytes, and the length of each header in bytes.
    pub fn contents(&self) -> impl Iterator<Item = (&Path, &[u8], usize)> {
        self.shards.iter().map(|shard| (&*shard.path, &*shard.bytes, shard.header_len))
    }

    /// Finds the tensor with the factors of a matrix in NVFP4.
    ///
    /// Gemma 4 has a tensor of this name for its experts whatever their type, and applies it itself.
    fn factors_of(&self, matrix: &GgufTensor) -> Option<&GgufTensor> {
        let is_gemma4 = self.metadata.get("general.architecture").ok().flatten() == Some("gemma4");
        let stem = matrix.name.strip_suffix(".weight").filter(|_| matrix.kind == gguf_types::NVFP4)?;
        let index = self.by_name.get(&*format!("{stem}.scale"))?;
        (!is_gemma4 || !stem.ends_with("ffn_down_exps")).then(|| &self.tensors[*index])
    }

    /// Returns whether a tensor is part of a matrix in NVFP4: its factors, or the scale of 4-bit activations.
    fn is_beside_nvfp4(&self, entry: &GgufTensor) -> bool {
        let scale = entry.name.strip_suffix(".scale");
        let Some(stem) = scale.or_else(|| entry.name.strip_suffix(".input_scale")) else { return false };
        let matrix = self.by_name.get(&*format!("{stem}.weight")).map(|index| &self.tensors[*index]);
        matrix.is_some_and(|matrix| match scale {
            Some(_) => self.factors_of(matrix).is_some(),
            None => matrix.kind == gguf_types::NVFP4,
        })
    }

    /// Returns the factors of a matrix in NVFP4: one, or one for each expert.
    fn factors(&self, matrix: &GgufTensor) -> LoadResult<Vec<f32>> {
        let Some(entry) = self.factors_of(matrix) else { return Ok(vec![1.0]) };
        let error = |message| LoadError::Tensor { tensor: entry.name.to_string(), message };
        let count: usize = entry.shape.iter().product();
        if entry.kind != gguf_types::F32
            || !(count == 1 || matrix.shape.len() == 3 && count == matrix.shape[0])
        {
            let message = format!(
                "is of type {} and has {count} values; F32 is expected, one value or one for each part of {:?}",
                kind_name(entry.kind),
                matrix.name
            );
            return Err(error(message));
        }
        let bytes = self.shards[entry.shard].bytes.slice(entry.start, 4 * count);
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(error(format!("has the value {value}, which cannot scale a matrix"))),
            None => Ok(values),
        }
    }

    fn assemble(files: Vec<ParsedGguf>) -> LoadResult<Gguf> {
        let metadata = files[0].metadata.clone();
        let mut gguf = Gguf { metadata, shards: vec![], tensors: vec![], by_name: HashMap::new() };
        for file in files {
            for mut entry in file.tensors {
                entry.shard = gguf.shards.len();
                if gguf.by_name.insert(entry.name.clone(), gguf.tensors.len()).is_some() {
                    return Err(malformed_tensor(&file.path, &entry.name, "the name appears twice".into()));
                }
                gguf.tensors.push(entry);
            }
            gguf.shards.push(GgufShard { path: file.path, bytes: file.bytes, header_len: file.header_len });
        }
        Ok(gguf)
    }
}

impl TensorSource for Gguf {
    fn tensor(&self, name: &str) -> LoadResult<Option<HostTensor>> {
        let Some(&index) = self.by_name.get(name) else { return Ok(None) };
        let entry = &self.tensors[index];
        let error = |message| LoadError::Tensor { tensor: name.into(), message };
        let unsupported = || error(format!("is of type {}, which is not supported", kind_name(entry.kind)));
        let dtype = dtype(entry.kind).ok_or_else(unsupported)?;
        let len = entry.byte_len().map_err(error)?.ok_or_else(unsupported)?;
        let bytes = self.shards[entry.shard].bytes.slice(entry.start, len);
        let bytes = match entry.kind {
            gguf_types::NVFP4 => gguf_types::nvfp4_with_factors(&bytes, &self.factors(entry)?).into(),
            _ => bytes,
        };
        HostTensor::new(dtype, entry.shape.clone(), bytes).map(Some).map_err(error)
    }

    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        let entry = &self.tensors[*self.by_name.get(name)?];
        Some((entry.shape.clone(), dtype(entry.kind)?))
    }

    fn names(&self) -> Vec<Cow<'_, str>> {
        let named = self.tensors.iter().filter(|entry| !self.is_beside_nvfp4(entry));
        named.map(|entry| Cow::Borrowed(&*entry.name)).collect()
    }
}

/// One file, parsed and checked on its own.
struct ParsedGguf {
    path: PathBuf,
    bytes: SharedBytes,
    metadata: Metadata,
    tensors: Vec<GgufTensor>,
    header_len: usize,
}

impl ParsedGguf {
    fn parse(path: &Path, bytes: SharedBytes) -> LoadResult<ParsedGguf> {
        let mut cursor = Cursor::new(&bytes);
        check_version(path, &mut cursor)?;
        let header = |message| LoadError::malformed(path, "header", message);
        let tensor_count = cursor.count(MIN_TENSOR_ENTRY).map_err(|m| header(format!("tensor count {m}")))?;
        let metadata_count =
            cursor.count(MIN_METADATA_ENTRY).map_err(|m| header(format!("metadata count {m}")))?;
        let metadata = Metadata::parse(path.into(), &bytes, &mut cursor, metadata_count)?;
        let alignment = alignment(path, &metadata)?;
        let mut tensors = (0..tensor_count)
            .map(|index| read_entry(path, &mut cursor, (index, tensor_count), alignment))
            .collect::<Result<Vec<_>, _>>()?;
        let header_len = cursor.position();
        let data_start = header_len.next_multiple_of(alignment);
        place_tensors(path, &mut tensors, data_start, bytes.len())?;
        check_layout(path, &tensors, data_start, bytes.len(), alignment)?;
        Ok(ParsedGguf { path: path.into(), bytes, metadata, tensors, header_len })
    }
}

fn check_version(path: &Path, cursor: &mut Cursor<'_>) -> LoadResult<()> {
    let header = |message| LoadError::malformed(path, "header", message);
    let unsupported = |message| Err(LoadError::Unsupported { path: path.into(), message });
    if cursor.u32().map_err(header)? != u32::from_le_bytes(*MAGIC) {
        return Err(LoadError::malformed(path, "header", "is not a GGUF file (the magic bytes are missing)"));
    }
    match cursor.u32().map_err(header)? {
        2 | 3 => Ok(()),
        // A big-endian file has the same magic, but all its numbers are byte-swapped.
        version if matches!(version.swap_bytes(), 1..=3) => {
            unsupported("is a big-endian GGUF file; only little-endian ones can be read".into())
        }
        version => unsupported(format!("is GGUF version {version}; only versions 2 and 3 can be read")),
    }
}

fn alignment(path: &Path, metadata: &Metadata) -> LoadResult<usize> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.get::<u64>(KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    // The upper bound keeps the rounding of offsets from overflowing; pages are smaller on every machine.
    if alignment.is_power_of_two() && alignment <= 1 << 30 {
        return Ok(alignment as usize);
    }
    Err(LoadError::malformed(path, format!("key {KEY:?}"), format!("{alignment} is not a valid alignment")))
}

/// Reads one tensor entry; `start` is relative to the data section until [`place_tensors`].
fn read_entry(
    path: &Path,
    cursor: &mut Cursor<'_>,
    (index, count): (usize, usize),
    alignment: usize,
) -> LoadResult<GgufTensor> {
    let name = cursor.name().map_err(|message| {
        LoadError::malformed(path, format!("tensor entry {} of {count}", index + 1), message)
    })?;
    read_entry_body(name, cursor, alignment).map_err(|message| malformed_tensor(path, name, message))
}

fn read_entry_body(name: &str, cursor: &mut Cursor<'_>, alignment: usize) -> Result<GgufTensor, String> {
    let dims = cursor.u32()?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(format!("has {dims} dimensions; 1 to {MAX_DIMS} are possible"));
    }
    let mut shape = vec![0; dims as usize];
    for dim in shape.iter_mut().rev() {
        let value = cursor.u64()?;
        *dim = usize::try_from(value).map_err(|_| format!("a dimension of {value} is too large"))?;
    }
    if shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim)).is_none() {
        return Err(format!("shape {shape:?} has too many values"));
    }
    let kind = cursor.u32()?;
    let offset = cursor.u64()?;
    let start = usize::try_from(offset).map_err(|_| format!("offset {offset} is outside the file"))?;
    if !start.is_multiple_of(alignment) {
        return Err(format!("offset {offset} is not aligned to {alignment} bytes"));
    }
    Ok(GgufTensor { name: name.into(), shape, kind, shard: 0, start })
}

/// Converts relative offsets to offsets in the file, and checks that tensors lie inside it.
fn place_tensors(
    path: &Path,
    tensors: &mut [GgufTensor],
    data_start: usize,
    file_len: usize,
) -> LoadResult<()> {
    for entry in tensors {
        let error = |message| malformed_tensor(path, &entry.name, message);
        let len = entry.byte_len().map_err(error)?.unwrap_or(0);
        let start = entry.start.checked_add(data_start);
        match start.and_then(|start| start.checked_add(len)) {
            Some(end) if end <= file_len => entry.start += data_start,
            _ => {
                let message = format!(
                    "takes {len} bytes from offset {} of the data, but the file has only {} (is it truncated?)",
                    entry.start,
                    file_len.saturating_sub(data_start)
                );
                return Err(error(message));
            }
        }
    }
    Ok(())
}

/// Checks that tensors do not overlap, and that only padding follows the last one.
fn check_layout(
    path: &Path,
    tensors: &[GgufTensor],
    data_start: usize,
    file_len: usize,
    alignment: usize,
) -> LoadResult<()> {
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_unstable_by_key(|entry| entry.start);
    let mut end = data_start;
    let mut before = "";
    let mut all_known = true;
    for entry in order {
        let len = entry.byte_len().map_err(|message| malformed_tensor(path, &entry.name, message))?;
        if entry.start < end {
            let message = format!("overlaps tensor {:?}", shortened(before));
            return Err(malformed_tensor(path, &entry.name, message));
        }
        all_known &= len.is_some();
        end = entry.start + len.unwrap_or(0);
        before = &entry.name;
    }
    if all_known && file_len > end.next_multiple_of(alignment) {
        let message = format!("{} bytes follow the data that the header describes", file_len - end);
        return Err(LoadError::malformed(path, "end of file", message));
    }
    Ok(())
}

/// A shard's metadata about its split.
struct Split {
    /// Zero-based number of the shard.
    number: usize,
    count: usize,
    /// Number of tensors in all shards.
    tensors: Option<usize>,
}

impl Split {
    fn of(file: &ParsedGguf) -> LoadResult<Option<Split>> {
        let metadata = &file.metadata;
        let Some(count) = metadata.get("split.count")? else { return Ok(None) };
        let number = metadata.require("split.no")?;
        if number >= count {
            let message = format!("shard {number} of {count} is out of range (shards count from 0)");
            return Err(LoadError::malformed(&file.path, "key \"split.no\"", message));
        }
        Ok(Some(Split { number, count, tensors: metadata.get("split.tensors.count")? }))
    }

    /// Opens the other shards beside `opened` and combines them.
    fn open_all(&self, opened: ParsedGguf) -> LoadResult<Gguf> {
        let (directory, prefix) = self.stem(&opened.path)?;
        let mut opened = Some(opened);
        let mut files = Vec::new();
        for number in 0..self.count {
            if number == self.number {
                files.extend(opened.take());
                continue;
            }
            let path = directory.join(format!("{prefix}{}", shard_suffix(number, self.count)));
            let file = ParsedGguf::parse(&path, SharedBytes::map_file(&path)?)?;
            self.check_sibling(&file, number)?;
            files.push(file);
        }
        self.check_total(&files)?;
        Gguf::assemble(files)
    }

    /// Returns the folder, and the file name without `-00001-of-0000N.gguf`.
    fn stem(&self, path: &Path) -> LoadResult<(PathBuf, String)> {
        let suffix = shard_suffix(self.number, self.count);
        let name = path.file_name().and_then(|name| name.to_str());
        match name.and_then(|name| name.strip_suffix(&suffix)) {
            Some(prefix) => Ok((path.parent().unwrap_or(Path::new("")).into(), prefix.into())),
            None => {
                let message = format!(
                    "is shard {} of {}, so its name must end in {suffix} for the others to be found",
                    self.number + 1,
                    self.count
                );
                Err(LoadError::malformed(path, "key \"split.count\"", message))
            }
        }
    }

    fn check_sibling(&self, file: &ParsedGguf, number: usize) -> LoadResult<()> {
        match Split::of(file)? {
            Some(split) if split.number == number && split.count == self.count => Ok(()),
            _ => {
                let message =
                    format!("the file does not say that it is shard {} of {}", number + 1, self.count);
                Err(LoadError::malformed(&file.path, "key \"split.no\"", message))
            }
        }
    }

    fn check_total(&self, files: &[ParsedGguf]) -> LoadResult<()> {
        let found: usize = files.iter().map(|file| file.tensors.len()).sum();
        match self.tensors {
            Some(claimed) if claimed != found => {
                let message = format!("claims {claimed} tensors, but the shards have {found}");
                Err(LoadError::malformed(&files[self.number].path, "key \"split.tensors.count\"", message))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the name's ending for a zero-based shard, as llama.cpp's gguf-split writes it.
fn shard_suffix(number: usize, count: usize) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}
