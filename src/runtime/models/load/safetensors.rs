//! Safetensors files, single or sharded by an index: tensors over mapped bytes.
//!
//! The `safetensors` crate checks each header (offsets gapless, sizes equal to shape times type); this file
//! checks the header against the file's length with overflow-safe arithmetic, and the index against the
//! shards. The format does not promise alignment: a tensor at an odd address is copied when it is read (see
//! [`HostTensor::new`]), all others stay mapped. Knows nothing of architectures or tensor names. Weights in
//! MXFP4 (gpt-oss) are two tensors of bytes in a file, `NAME_blocks` and `NAME_scales`; here they are one,
//! `NAME`. Other quantised forms are read by `packed`. Format: <https://github.com/huggingface/safetensors>;
//! index: transformers' `model.safetensors.index.json`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use safetensors::Dtype as FileDtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::hf;
use super::metadata::{malformed_tensor, shortened};
use crate::tensor::{HostTensor, SharedBytes, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The format's own limit on its JSON header, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// An open safetensors model.
#[derive(Debug)]
pub struct Safetensors {
    shards: Vec<SafetensorsShard>,
    tensors: Vec<SafeTensor>,
    by_name: HashMap<Box<str>, usize>,
}

/// One mapped file of a model.
#[derive(Debug)]
struct SafetensorsShard {
    path: PathBuf,
    bytes: SharedBytes,
    header_len: usize,
}

/// Location of a tensor in its shard, checked.
#[derive(Debug)]
struct SafeTensor {
    name: Box<str>,
    dtype: FileDtype,
    shape: Vec<usize>,
    shard: usize,
    start: usize,
    len: usize,
}

/// A tensor as it is stored, of any type.
#[derive(Debug)]
pub(super) struct RawTensor<'a> {
    pub dtype: FileDtype,
    pub shape: &'a [usize],
    pub bytes: SharedBytes,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Returns whether a folder has weights in one file, which are read, and an index of other files.
///
/// # Errors
/// [`LoadError::Malformed`] for a damaged index.
pub fn has_unused_shards(folder: &Path) -> LoadResult<bool> {
    let index = folder.join(INDEX);
    if !folder.join(SINGLE).is_file() || !index.is_file() {
        return Ok(false);
    }
    Ok(read_index(&index)?.weight_map.values().any(|file| file != SINGLE))
}

impl Safetensors {
    /// Maps a model: a folder (its `model.safetensors`, else its index), one file, or an index file.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] naming the file or the missing shard, [`LoadError::Malformed`] naming the tensor or the
    /// part of the file at fault.
    pub fn open(path: impl AsRef<Path>) -> LoadResult<Safetensors> {
        let path = path.as_ref();
        if path.is_dir() {
            let index = path.join(INDEX);
            let single = path.join(SINGLE);
            return if index.is_file() && !single.is_file() {
                Safetensors::open_sharded(&index)
            } else {
                Safetensors::open_single(&single)
            };
        }
        match path.extension() {
            Some(extension) if extension == "json" => Safetensors::open_sharded(path),
            _ => Safetensors::open_single(path),
        }
    }

    /// Reads one safetensors file from memory; errors name it `path`.
    ///
    /// # Errors
    /// [`LoadError::Malformed`] as for [`Safetensors::open`].
    pub fn from_bytes(path: impl AsRef<Path>, bytes: impl Into<SharedBytes>) -> LoadResult<Safetensors> {
        let mut model = Safetensors { shards: vec![], tensors: vec![], by_name: HashMap::new() };
        model.add_shard(path.as_ref(), bytes.into())?;
        Ok(model)
    }

    /// Returns the weight files, in the order in which they were first named.
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

    fn open_single(path: &Path) -> LoadResult<Safetensors> {
        Safetensors::from_bytes(path, SharedBytes::map_file(path)?)
    }

    fn open_sharded(index_path: &Path) -> LoadResult<Safetensors> {
        let index = read_index(index_path)?;
        let folder = index_path.parent().unwrap_or(Path::new(""));
        let mut model = Safetensors { shards: vec![], tensors: vec![], by_name: HashMap::new() };
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        for (tensor, file) in &index.weight_map {
            if numbers.contains_key(file.as_str()) {
                continue;
            }
            if !is_plain_name(file) {
                let message = format!("shard {:?} is not a plain file name", shortened(file));
                return Err(malformed_tensor(index_path, tensor, message));
            }
            numbers.insert(file, model.shards.len());
            let path = folder.join(file);
            model.add_shard(&path, SharedBytes::map_file(&path)?)?;
        }
        model.check_against(index_path, &index, &numbers)?;
        Ok(model)
    }

    fn add_shard(&mut self, path: &Path, bytes: SharedBytes) -> LoadResult<()> {
        let (metadata, data_start) = read_header(path, &bytes)?;
        for name in metadata.offset_keys() {
            // `offset_keys` lists the keys of the map that `info` reads.
            let Some(info) = metadata.info(&name) else { continue };
            let (start, end) = info.data_offsets;
            let entry = SafeTensor {
                name: name.into(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                shard: self.shards.len(),
                start: data_start + start,
                len: end - start,
            };
            if self.by_name.insert(entry.name.clone(), self.tensors.len()).is_some() {
                return Err(malformed_tensor(path, &entry.name, "is in two shards".into()));
            }
            self.tensors.push(entry);
        }
        self.shards.push(SafetensorsShard { path: path.into(), bytes, header_len: data_start });
        Ok(())
    }

    /// Checks that the index names exactly the tensors of the shards, each in its shard.
    fn check_against(&self, path: &Path, index: &Index, numbers: &BTreeMap<&str, usize>) -> LoadResult<()> {
        for (tensor, file) in &index.weight_map {
            let found = self.by_name.get(tensor.as_str()).map(|&at| self.tensors[at].shard);
            if found != numbers.get(file.as_str()).copied() {
                let message =
                    format!("the index says it is in {:?}, which does not have it", shortened(file));
                return Err(malformed_tensor(path, tensor, message));
            }
        }
        match self.tensors.iter().find(|entry| !index.weight_map.contains_key(&*entry.name)) {
            Some(entry) => {
                let message =
                    format!("is in {} but not in the index", self.shards[entry.shard].path.display());
                Err(malformed_tensor(path, &entry.name, message))
            }
            None => Ok(()),
        }
    }
}

const MXFP4_BLOCKS: &str = "_blocks";
const MXFP4_SCALES: &str = "_scales";

impl Safetensors {
    fn entry(&self, name: &str) -> Option<&SafeTensor> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// Returns a tensor as it is stored; `None` if there is none of that name.
    pub(super) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let entry = self.entry(name)?;
        Some(RawTensor { dtype: entry.dtype, shape: &entry.shape, bytes: self.bytes(entry) })
    }

    fn bytes(&self, entry: &SafeTensor) -> SharedBytes {
        self.shards[entry.shard].bytes.slice(entry.start, entry.len)
    }

    /// Finds the two tensors of a matrix in MXFP4: blocks `[.., blocks, 16]` with two values per byte, and scales
    /// `[.., blocks]`.
    fn mxfp4(&self, name: &str) -> Option<[&SafeTensor; 2]> {
        let [blocks, scales] = [MXFP4_BLOCKS, MXFP4_SCALES].map(|part| self.entry(&format!("{name}{part}")));
        let pair = [blocks?, scales?];
        let [blocks, scales] = pair;
        let fits = blocks.shape.split_last() == Some((&16, &scales.shape[..])) && !scales.shape.is_empty();
        (fits && pair.iter().all(|entry| entry.dtype == FileDtype::U8)).then_some(pair)
    }

    /// Returns the shape of such a matrix, in values.
    fn mxfp4_shape(scales: &SafeTensor) -> Option<Vec<usize>> {
        let mut shape = scales.shape.clone();
        let cols = shape.last_mut()?;
        *cols = cols.checked_mul(Dtype::Mxfp4.block_len())?;
        Some(shape)
    }

    /// Builds the matrix in ggml's order: a block's scale, then bytes whose low nibbles are the block's first half.
    fn mxfp4_tensor(&self, [blocks, scales]: [&SafeTensor; 2]) -> Result<HostTensor, String> {
        let shape = Self::mxfp4_shape(scales).ok_or("is too large")?;
        let (blocks, scales) = (self.bytes(blocks), self.bytes(scales));
        let mut bytes = Vec::with_capacity(blocks.len() + scales.len());
        for (block, &scale) in blocks.as_chunks::<16>().0.iter().zip(&*scales) {
            bytes.push(scale);
            let value = |at: usize| block[at / 2] >> (at % 2 * 4) & 15;
            bytes.extend((0..16).map(|at| value(at) | value(at + 16) << 4));
        }
        HostTensor::new(Dtype::Mxfp4, shape, bytes.into())
    }
}

impl TensorSource for Safetensors {
    fn tensor(&self, name: &str) -> LoadResult<Option<HostTensor>> {
        let Some(&index) = self.by_name.get(name) else {
            let tensor = self.mxfp4(name).map(|pair| self.mxfp4_tensor(pair)).transpose();
            return tensor.map_err(|message| LoadError::Tensor { tensor: name.into(), message });
        };
        let entry = &self.tensors[index];
        let error = |message| LoadError::Tensor { tensor: name.into(), message };
        let dtype = dtype(entry.dtype).ok_or_else(|| {
            error(format!("is of type {}, which is not supported (F32, F16, BF16 are)", entry.dtype))
        })?;
        HostTensor::new(dtype, entry.shape.clone(), self.bytes(entry)).map(Some).map_err(error)
    }

    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        match self.entry(name) {
            Some(entry) => Some((entry.shape.clone(), dtype(entry.dtype)?)),
            None => Some((Self::mxfp4_shape(self.mxfp4(name)?[1])?, Dtype::Mxfp4)),
        }
    }

    fn names(&self) -> Vec<Cow<'_, str>> {
        let shown = |entry: &SafeTensor| -> String {
            let whole = entry.name.strip_suffix(MXFP4_BLOCKS).filter(|name| self.mxfp4(name).is_some());
            whole.unwrap_or(&entry.name).to_owned()
        };
        let is_scales = |entry: &&SafeTensor| {
            entry.name.strip_suffix(MXFP4_SCALES).is_some_and(|name| self.mxfp4(name).is_some())
        };
        self.tensors.iter().filter(|entry| !is_scales(entry)).map(|entry| Cow::Owned(shown(entry))).collect()
    }
}

/// Parses the header and checks that the tensors' bytes are exactly the rest of the file. Returns their offset.
fn read_header(path: &Path, bytes: &[u8]) -> LoadResult<(Metadata, usize)> {
    const LENGTH_BYTES: usize = 8;
    let error = |message: String| LoadError::malformed(path, "header", message);
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>().map(|raw| u64::from_le_bytes(*raw)) else {
        return Err(error(format!("a file of {} bytes is too short", bytes.len())));
    };
    let most = (bytes.len() - LENGTH_BYTES) as u64;
    if length > most.min(MAX_HEADER_BYTES) {
        return Err(error(format!("claims {length} bytes, but only {most} follow")));
    }
    let data_start = LENGTH_BYTES + length as usize;
    let metadata: Metadata = serde_json::from_slice(&bytes[LENGTH_BYTES..data_start])
        .map_err(|json_error| error(format!("is damaged: {json_error}")))?;
    // Offsets are gapless from 0, so the last one bounds them all. Compared by subtraction, since a sum could
    // overflow.
    let (described, present) = (metadata.data_len(), bytes.len() - data_start);
    if described == present {
        return Ok((metadata, data_start));
    }
    if described < present {
        let message = format!("{} bytes follow the data that the header describes", present - described);
        return Err(LoadError::malformed(path, "end of file", message));
    }
    let outside = metadata
        .offset_keys()
        .into_iter()
        .find(|name| metadata.info(name).is_some_and(|info| info.data_offsets.1 > present));
    let message =
        format!("ends at byte {described} of the data, but only {present} follow (is the file truncated?)");
    Err(malformed_tensor(path, &outside.unwrap_or_default(), message))
}

fn read_index(path: &Path) -> LoadResult<Index> {
    let value = hf::require_json(path)?;
    let index: Index = serde_json::from_value(value)
        .map_err(|error| LoadError::malformed(path, "key \"weight_map\"", error.to_string()))?;
    if index.weight_map.is_empty() {
        return Err(LoadError::malformed(path, "key \"weight_map\"", "names no tensors"));
    }
    Ok(index)
}

/// Returns whether a shard's name stays inside the folder it is joined to.
fn is_plain_name(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(name)), None) if name == file)
}

fn dtype(dtype: FileDtype) -> Option<Dtype> {
    match dtype {
        FileDtype::F32 => Some(Dtype::F32),
        FileDtype::F16 => Some(Dtype::F16),
        FileDtype::BF16 => Some(Dtype::Bf16),
        _ => None,
    }
}
