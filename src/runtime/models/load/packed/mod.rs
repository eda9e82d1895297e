//! Quantised safetensors folders as a [`TensorSource`]: each packed matrix appears under its plain name,
//! `X.weight`.
//!
//! Integers become the block type that holds them exactly (see `values`); floats of 8 and 4 bits become f32,
//! so that nothing is rounded here. The tensors of scales and zero points are not listed. Which parts a
//! matrix has is decided by the tensors' names, so that layers that a folder leaves unquantised are read as
//! they are.

mod scheme;
mod values;

use std::borrow::Cow;
use std::path::Path;

use safetensors::Dtype as FileDtype;
use serde_json::Value;

use super::safetensors::{RawTensor, Safetensors};
use crate::tensor::{HostTensor, SharedBytes, TensorSource, byte_len};
use llmctl_base::error::LoadError;
use llmctl_kernel::{Dtype, dequantize_row};
use scheme::Scheme;
use values::{BLOCK, FP4, PackedValues, fp8, unpack};

/// A quantised folder's tensors.
pub struct PackedTensors {
    files: Safetensors,
    scheme: Scheme,
}

/// The packed matrices of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedFacts {
    /// Name of the form.
    pub form: &'static str,
    pub count: usize,
    /// Values that no block type holds exactly, so that they are read as f32.
    pub floats: u64,
    /// Bytes of the others in their block types.
    pub bytes: u64,
}

/// Columns of the eight numbers in a word of AutoAWQ.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Columns that share a scale in NVFP4.
const NVFP4_GROUP: usize = 16;

/// Endings of the tensors that belong to a packed matrix, and those that only other programs use.
const PARTS: [&str; 19] = [
    ".qweight",
    ".qzeros",
    ".scales",
    ".biases",
    ".g_idx",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".activation_scale",
];

impl PackedTensors {
    /// Takes a folder's files, or gives them back if config.json does not call them quantised.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming a form that is not read, and those that are.
    pub fn of(
        config_path: &Path,
        config: &Value,
        files: Safetensors,
    ) -> Result<Result<Self, Safetensors>, LoadError> {
        let Some(scheme) = Scheme::of(config_path, config)? else { return Ok(Err(files)) };
        if matches!(scheme, Scheme::Mlx { .. })
            && files.names().iter().any(|name| name.contains(".switch_mlp."))
        {
            let message = "MLX stacks the experts of this model, which llmctl does not read; a GGUF file or the \
                           unquantised folder works";
            return Err(LoadError::Unsupported { path: config_path.into(), message: message.to_owned() });
        }
        Ok(Ok(Self { files, scheme }))
    }

    pub fn files(&self) -> &Safetensors {
        &self.files
    }

    /// Sums up the packed matrices, from the headers alone.
    pub fn facts(&self) -> PackedFacts {
        let mut facts = PackedFacts { form: self.scheme.name(), count: 0, floats: 0, bytes: 0 };
        for name in self.names() {
            let parts = name.strip_suffix(".weight").and_then(|stem| self.parts(stem));
            let Some((shape, dtype)) = parts.and_then(|parts| parts.describe()) else { continue };
            let values = shape.iter().product::<usize>() as u64;
            facts.count += 1;
            match dtype {
                Dtype::F32 => facts.floats += values,
                _ => facts.bytes += byte_len(dtype, &shape).unwrap_or(0) as u64,
            }
        }
        facts
    }

    fn part(&self, stem: &str, part: &str) -> Option<RawTensor<'_>> {
        self.files.raw(&format!("{stem}.{part}"))
    }

    /// Finds the parts of a packed matrix; `None` for one that is stored plainly.
    fn parts(&self, stem: &str) -> Option<MatrixParts<'_>> {
        let part = |name| self.part(stem, name);
        let is_word = |raw: &RawTensor<'_>| matches!(raw.dtype, FileDtype::I32 | FileDtype::U32);
        let parts = match &self.scheme {
            Scheme::Awq { group } => MatrixParts::Awq {
                words: part("qweight")?,
                zeros: part("qzeros"),
                scales: part("scales")?,
                group: *group,
            },
            Scheme::Gptq { bits, zero_offset } => MatrixParts::Gptq {
                words: part("qweight")?,
                zeros: part("qzeros"),
                scales: part("scales")?,
                order: part("g_idx"),
                bits: *bits,
                zero_offset: *zero_offset,
            },
            Scheme::Mlx { group, bits } => MatrixParts::Mlx {
                words: part("weight").filter(is_word)?,
                scales: part("scales")?,
                mins: part("biases")?,
                group: *group,
                bits: *bits,
            },
            Scheme::Fp8 { block } => self.fp8_parts(stem, *block)?,
            Scheme::Compressed { bits } => self.compressed_parts(stem, *bits)?,
        };
        Some(parts)
    }

    fn fp8_parts(&self, stem: &str, block: Option<[usize; 2]>) -> Option<MatrixParts<'_>> {
        let codes = self.part(stem, "weight").filter(|raw| raw.dtype == FileDtype::F8_E4M3)?;
        let scales = self.part(stem, "weight_scale_inv").or_else(|| self.part(stem, "weight_scale"))?;
        Some(MatrixParts::Fp8 { codes, scales, block })
    }

    fn compressed_parts(&self, stem: &str, bits: u32) -> Option<MatrixParts<'_>> {
        let part = |name| self.part(stem, name);
        if let Some(words) = part("weight_packed") {
            let scales = part("weight_scale")?;
            if let Some(global) = part("weight_global_scale") {
                return Some(MatrixParts::Nvfp4 { codes: words, scales, global });
            }
            let (zeros, order) = (part("weight_zero_point"), part("weight_g_idx"));
            return Some(MatrixParts::Packed {
                words,
                scales,
                zeros,
                order,
                shape: part("weight_shape")?,
                bits,
            });
        }
        let numbers = part("weight").filter(|raw| raw.dtype == FileDtype::I8);
        match numbers {
            Some(numbers) => {
                let (scales, zeros) = (part("weight_scale")?, part("weight_zero_point"));
                Some(MatrixParts::Bytes { numbers, scales, zeros })
            }
            None => self.fp8_parts(stem, None),
        }
    }
}

impl TensorSource for PackedTensors {
    fn tensor(&self, name: &str) -> Result<Option<HostTensor>, LoadError> {
        match name.strip_suffix(".weight").and_then(|stem| self.parts(stem)) {
            None => self.files.tensor(name),
            Some(parts) => parts
                .read()
                .map(Some)
                .map_err(|message| LoadError::Tensor { tensor: name.to_owned(), message }),
        }
    }

    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        match name.strip_suffix(".weight").and_then(|stem| self.parts(stem)) {
            None => self.files.describe(name),
            Some(parts) => parts.describe(),
        }
    }

    fn names(&self) -> Vec<Cow<'_, str>> {
        let mut names = Vec::new();
        for name in self.files.names() {
            let is_matrix = [".qweight", ".weight_packed"].iter().find_map(|end| name.strip_suffix(end));
            match is_matrix {
                Some(stem) => names.push(Cow::Owned(format!("{stem}.weight"))),
                None if PARTS.iter().any(|part| name.ends_with(part)) => {}
                None => names.push(name),
            }
        }
        names
    }
}

/// The stored tensors of one matrix.
enum MatrixParts<'a> {
    Fp8 {
        codes: RawTensor<'a>,
        scales: RawTensor<'a>,
        block: Option<[usize; 2]>,
    },
    Nvfp4 {
        codes: RawTensor<'a>,
        scales: RawTensor<'a>,
        global: RawTensor<'a>,
    },
    Bytes {
        numbers: RawTensor<'a>,
        scales: RawTensor<'a>,
        zeros: Option<RawTensor<'a>>,
    },
    Packed {
        words: RawTensor<'a>,
        scales: RawTensor<'a>,
        zeros: Option<RawTensor<'a>>,
        order: Option<RawTensor<'a>>,
        shape: RawTensor<'a>,
        bits: u32,
    },
    Awq {
        words: RawTensor<'a>,
        zeros: Option<RawTensor<'a>>,
        scales: RawTensor<'a>,
        group: usize,
    },
    Gptq {
        words: RawTensor<'a>,
        zeros: Option<RawTensor<'a>>,
        scales: RawTensor<'a>,
        order: Option<RawTensor<'a>>,
        bits: u32,
        zero_offset: i16,
    },
    Mlx {
        words: RawTensor<'a>,
        scales: RawTensor<'a>,
        mins: RawTensor<'a>,
        group: usize,
        bits: u32,
    },
}

impl MatrixParts<'_> {
    /// Returns the matrix's shape, and the type that it usually becomes.
    fn describe(&self) -> Option<(Vec<usize>, Dtype)> {
        let [rows, cols] = self.shape()?;
        let is_half = |scales: &RawTensor<'_>| {
            scales.dtype != FileDtype::F32 && cols.is_multiple_of(BLOCK) && self.has_whole_blocks()
        };
        let dtype = match self {
            MatrixParts::Fp8 { .. } | MatrixParts::Nvfp4 { .. } => Dtype::F32,
            MatrixParts::Bytes { scales, zeros: None, .. } if is_half(scales) => Dtype::Q8_0,
            MatrixParts::Packed { scales, zeros: None, bits: 4, .. } if is_half(scales) => Dtype::Q4_0,
            MatrixParts::Packed { scales, bits: 4, .. } | MatrixParts::Awq { scales, .. }
                if is_half(scales) =>
            {
                Dtype::Q5_0
            }
            MatrixParts::Packed { scales, bits: 8, .. } if is_half(scales) => Dtype::Q8_0,
            MatrixParts::Gptq { scales, bits: 2..=4, .. } if is_half(scales) => Dtype::Q5_0,
            MatrixParts::Gptq { scales, bits: 8, .. } if is_half(scales) => Dtype::Q8_0,
            MatrixParts::Mlx { scales, bits: 2..=4, .. } if is_half(scales) => Dtype::Q4_1,
            MatrixParts::Mlx { scales, bits: 5, .. } if is_half(scales) => Dtype::Q5_1,
            _ => Dtype::F32,
        };
        Some((vec![rows, cols], dtype))
    }

    /// Returns whether the columns of each block share a group.
    fn has_whole_blocks(&self) -> bool {
        let (MatrixParts::Packed { order, .. } | MatrixParts::Gptq { order, .. }) = self else { return true };
        let order = order.as_ref().and_then(|order| order.integers()).unwrap_or_default();
        order.chunks(BLOCK).all(|groups| groups.iter().all(|group| *group == groups[0]))
    }

    fn shape(&self) -> Option<[usize; 2]> {
        let matrix = |raw: &RawTensor<'_>| <[usize; 2]>::try_from(raw.shape).ok();
        let per_word = |bits: u32| 32 / bits as usize;
        match self {
            MatrixParts::Fp8 { codes, .. } => matrix(codes),
            MatrixParts::Bytes { numbers, .. } => matrix(numbers),
            MatrixParts::Nvfp4 { codes, .. } => {
                let [rows, bytes] = matrix(codes)?;
                Some([rows, bytes.checked_mul(2)?])
            }
            MatrixParts::Packed { shape, words, bits, .. } => {
                let stored: Vec<usize> = shape.integers()?.into_iter().map(|dim| dim as usize).collect();
                let (shape, [rows, num_words]) = (<[usize; 2]>::try_from(stored).ok()?, matrix(words)?);
                (shape[0] == rows && shape[1].div_ceil(per_word(*bits)) == num_words).then_some(shape)
            }
            MatrixParts::Awq { words, .. } => {
                let [cols, num_words] = matrix(words)?;
                Some([num_words.checked_mul(8)?, cols])
            }
            MatrixParts::Gptq { words, bits, .. } => {
                let [num_words, rows] = matrix(words)?;
                Some([rows, num_words.checked_mul(32)? / *bits as usize])
            }
            MatrixParts::Mlx { words, bits, .. } => {
                let [rows, num_words] = matrix(words)?;
                Some([rows, num_words.checked_mul(32)? / *bits as usize])
            }
        }
    }

    fn read(&self) -> Result<HostTensor, String> {
        let [rows, cols] = self.shape().ok_or("has parts of impossible shapes")?;
        match self {
            MatrixParts::Fp8 { codes, scales, block } => read_fp8(codes, scales, *block, [rows, cols]),
            MatrixParts::Nvfp4 { codes, scales, global } => read_nvfp4(codes, scales, global, [rows, cols]),
            MatrixParts::Bytes { numbers, scales, zeros } => {
                let numbers = numbers.bytes.iter().map(|&byte| i16::from(byte as i8)).collect();
                let zeros =
                    zeros.as_ref().map(|zeros| zeros.integers().ok_or("has zero points of no integer type"));
                let zeros = zeros.transpose()?.map(|all| all.into_iter().map(|zero| zero as i16).collect());
                grouped(numbers, scales, zeros, None, [rows, cols])
            }
            MatrixParts::Packed { words, scales, zeros, order, bits, .. } => {
                let row_bytes = words.bytes.len() / rows;
                let offset = 1i16 << (bits - 1);
                let rows_of_words = words.bytes.chunks_exact(row_bytes);
                let numbers = rows_of_words
                    .flat_map(|row| unpack(row, *bits, cols))
                    .map(|number| number - offset)
                    .collect();
                let num_groups = scales.values()?.len() / rows;
                let zeros = zeros.as_ref().map(|zeros| packed_zeros(zeros, *bits, [rows, num_groups]));
                grouped(numbers, scales, zeros.transpose()?, order.as_ref(), [rows, cols])
            }
            MatrixParts::Awq { words, zeros, scales, group } => {
                read_awq(words, zeros.as_ref(), scales, *group, [rows, cols])
            }
            MatrixParts::Gptq { .. } => self.read_gptq([rows, cols]),
            MatrixParts::Mlx { words, scales, mins, group, bits } => {
                let row_bytes = words.bytes.len() / rows;
                let numbers =
                    words.bytes.chunks_exact(row_bytes).flat_map(|row| unpack(row, *bits, cols)).collect();
                let (scales, mins) = (scales.values()?, mins.values()?);
                check_len(scales.len(), rows * cols / group, "scales")?;
                check_len(mins.len(), scales.len(), "minimums")?;
                let groups = (0..cols).map(|col| (col / group) as u32).collect();
                PackedValues { rows, cols, numbers, scales, mins: Some(mins), groups }.into_tensor()
            }
        }
    }

    fn read_gptq(&self, [rows, cols]: [usize; 2]) -> Result<HostTensor, String> {
        let MatrixParts::Gptq { words, zeros, scales, order, bits, zero_offset } = self else {
            return Err("is not in the form of GPTQ".to_owned());
        };
        let (stored, num_groups) = by_group(scales, rows)?;
        let groups = group_of_columns(order.as_ref(), cols, num_groups)?;
        let zeros: Vec<i16> = match zeros {
            None => vec![1 << (bits - 1); rows * num_groups],
            Some(zeros) => {
                let row_bytes = rows * *bits as usize / 8;
                check_len(zeros.bytes.len(), num_groups * row_bytes, "bytes of zero points")?;
                let lines = zeros.bytes.chunks_exact(row_bytes);
                lines.flat_map(|line| unpack(line, *bits, rows)).map(|zero| zero + zero_offset).collect()
            }
        };
        // Word `w` of row `r` holds columns of that row.
        let num_words = words.bytes.len() / 4 / rows;
        let mut numbers = Vec::with_capacity(rows * cols);
        let mut line = vec![0; 4 * num_words];
        for row in 0..rows {
            for (word, out) in line.chunks_exact_mut(4).enumerate() {
                out.copy_from_slice(&words.bytes[4 * (word * rows + row)..][..4]);
            }
            let line = unpack(&line, *bits, cols).zip(&groups);
            numbers.extend(line.map(|(number, &group)| number - zeros[group as usize * rows + row]));
        }
        let scales = transposed(&stored, num_groups, rows);
        PackedValues { rows, cols, numbers, scales, mins: None, groups }.into_tensor()
    }
}

fn check_len(found: usize, wanted: usize, what: &str) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("has {found} {what} instead of {wanted}")) }
}

/// Reads scales that are stored as `[groups, rows]`, with the number of groups.
fn by_group(scales: &RawTensor<'_>, rows: usize) -> Result<(Vec<f32>, usize), String> {
    let values = scales.values()?;
    let num_groups = values.len() / rows;
    check_len(values.len(), num_groups * rows, "scales")?;
    if num_groups == 0 { Err("has no scales".to_owned()) } else { Ok((values, num_groups)) }
}

/// Turns `[groups, rows]` to `[rows, groups]`.
fn transposed(values: &[f32], num_groups: usize, rows: usize) -> Vec<f32> {
    (0..rows * num_groups).map(|at| values[at % num_groups * rows + at / num_groups]).collect()
}

/// Returns the group of each column: as stored, or neighbours in groups of equal size.
fn group_of_columns(
    order: Option<&RawTensor<'_>>,
    cols: usize,
    num_groups: usize,
) -> Result<Vec<u32>, String> {
    let size = cols.div_ceil(num_groups.max(1));
    // compressed-tensors fills an unused order with -1.
    let stored = order.and_then(|order| order.integers()).filter(|all| !all.contains(&-1));
    let Some(stored) = stored else { return Ok((0..cols).map(|col| (col / size) as u32).collect()) };
    check_len(stored.len(), cols, "groups of columns")?;
    let group = |group: i64| u32::try_from(group).ok().filter(|group| (*group as usize) < num_groups);
    stored.into_iter().map(|of| group(of).ok_or_else(|| format!("has no group {of}"))).collect()
}

/// Reads zero points that are packed along the rows, `[rows / numbers per word, groups]`, as `[rows, groups]`.
fn packed_zeros(
    zeros: &RawTensor<'_>,
    bits: u32,
    [rows, num_groups]: [usize; 2],
) -> Result<Vec<i16>, String> {
    let per_word = 32 / bits as usize;
    check_len(zeros.bytes.len(), 4 * rows.div_ceil(per_word) * num_groups, "bytes of zero points")?;
    let zero = |at: usize| {
        let (row, group) = (at / num_groups, at % num_groups);
        let word = &zeros.bytes[4 * (row / per_word * num_groups + group)..][..4];
        unpack(word, bits, per_word).nth(row % per_word).unwrap_or(0) - (1 << (bits - 1))
    };
    Ok((0..rows * num_groups).map(zero).collect())
}

/// Combines signed numbers with scales and zero points, `[rows, groups]`; one scale may serve all rows.
fn grouped(
    mut numbers: Vec<i16>,
    scales: &RawTensor<'_>,
    zeros: Option<Vec<i16>>,
    order: Option<&RawTensor<'_>>,
    [rows, cols]: [usize; 2],
) -> Result<HostTensor, String> {
    let mut scales = scales.values()?;
    if scales.len() == 1 {
        scales = vec![scales[0]; rows];
    }
    let num_groups = scales.len() / rows;
    check_len(scales.len(), num_groups * rows, "scales")?;
    let groups = group_of_columns(order, cols, num_groups)?;
    if let Some(zeros) = zeros {
        let zeros = if zeros.len() == 1 { vec![zeros[0]; rows * num_groups] } else { zeros };
        check_len(zeros.len(), rows * num_groups, "zero points")?;
        for (at, number) in numbers.iter_mut().enumerate() {
            *number -= zeros[at / cols * num_groups + groups[at % cols] as usize];
        }
    }
    PackedValues { rows, cols, numbers, scales, mins: None, groups }.into_tensor()
}

fn read_awq(
    words: &RawTensor<'_>,
    zeros: Option<&RawTensor<'_>>,
    scales: &RawTensor<'_>,
    group: usize,
    [rows, cols]: [usize; 2],
) -> Result<HostTensor, String> {
    let (stored, num_groups) = by_group(scales, rows)?;
    check_len(num_groups, cols.div_ceil(group.max(1)), "groups")?;
    let number = |bytes: &[u8], line: usize, row: usize| {
        let nibble = AWQ_ORDER.iter().position(|&place| place == row % 8).unwrap_or(0);
        let byte = bytes[(line * rows + row / 8 * 8) / 2 + nibble / 2];
        i16::from(byte >> (nibble % 2 * 4) & 15)
    };
    if let Some(zeros) = zeros {
        check_len(zeros.bytes.len(), num_groups * rows / 2, "bytes of zero points")?;
    }
    let mut numbers = Vec::with_capacity(rows * cols);
    for row in 0..rows {
        for col in 0..cols {
            let zero = zeros.map_or(8, |zeros| number(&zeros.bytes, col / group, row));
            numbers.push(number(&words.bytes, col, row) - zero);
        }
    }
    let groups = (0..cols).map(|col| (col / group) as u32).collect();
    let scales = transposed(&stored, num_groups, rows);
    PackedValues { rows, cols, numbers, scales, mins: None, groups }.into_tensor()
}

/// Multiplies 8-bit floats with the scale of all, of their row, or of their block.
fn read_fp8(
    codes: &RawTensor<'_>,
    scales: &RawTensor<'_>,
    block: Option<[usize; 2]>,
    [rows, cols]: [usize; 2],
) -> Result<HostTensor, String> {
    let values = scales.values()?;
    let (height, width) = match (values.len(), block) {
        (1, _) => (rows, cols),
        (_, Some([height, width])) => (height, width),
        (len, None) if len == rows => (1, cols),
        (len, None) => {
            let groups = len / rows;
            check_len(len, groups * rows, "scales")?;
            (1, cols.div_ceil(groups))
        }
    };
    let across = cols.div_ceil(width);
    check_len(values.len(), rows.div_ceil(height) * across, "scales")?;
    let table: Vec<f32> = (0..=255).map(fp8).collect();
    let value = |(at, &code): (usize, &u8)| {
        let scale = values[at / cols / height * across + at % cols / width];
        table[usize::from(code)] * scale
    };
    floats(codes.bytes.iter().enumerate().map(value), [rows, cols])
}

/// Multiplies 4-bit floats with an 8-bit scale for 16 columns, divided by the scale of the matrix.
fn read_nvfp4(
    codes: &RawTensor<'_>,
    scales: &RawTensor<'_>,
    global: &RawTensor<'_>,
    [rows, cols]: [usize; 2],
) -> Result<HostTensor, String> {
    let global = *global.values()?.first().ok_or("has no global scale")?;
    check_len(scales.bytes.len(), rows * cols / NVFP4_GROUP, "scales")?;
    let numbers = unpack(&codes.bytes, 4, rows * cols);
    let value =
        |(at, code): (usize, i16)| FP4[code as usize] * (fp8(scales.bytes[at / NVFP4_GROUP]) / global);
    floats(numbers.enumerate().map(value), [rows, cols])
}

fn floats(values: impl Iterator<Item = f32>, [rows, cols]: [usize; 2]) -> Result<HostTensor, String> {
    let mut bytes = Vec::with_capacity(4 * rows * cols);
    values.for_each(|value| bytes.extend(value.to_le_bytes()));
    HostTensor::new(Dtype::F32, vec![rows, cols], SharedBytes::from(bytes))
}

impl RawTensor<'_> {
    /// Returns the values of a float tensor.
    fn values(&self) -> Result<Vec<f32>, String> {
        let dtype = match self.dtype {
            FileDtype::F32 => Dtype::F32,
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::Bf16,
            other => return Err(format!("has scales of type {other}, which is not supported")),
        };
        let mut values = vec![0.0; self.bytes.len() / dtype.block_bytes()];
        dequantize_row(dtype, &self.bytes, &mut values);
        Ok(values)
    }

    /// Returns the values of an integer tensor; `None` for another type.
    fn integers(&self) -> Option<Vec<i64>> {
        let all = match self.dtype {
            FileDtype::I8 => self.bytes.iter().map(|&byte| i64::from(byte as i8)).collect(),
            FileDtype::I32 => {
                self.bytes.as_chunks().0.iter().map(|raw| i32::from_le_bytes(*raw).into()).collect()
            }
            FileDtype::I64 => self.bytes.as_chunks().0.iter().map(|raw| i64::from_le_bytes(*raw)).collect(),
            _ => return None,
        };
        Some(all)
    }
}
