//! The stored tensors of one packed matrix: checks of their types and sizes, and the values that they stand
//! for.
//!
//! Invariant: nothing is read before [`MatrixParts::checked`] has compared all parts, so that what reads them
//! may index.

use safetensors::Dtype as FileDtype;

use super::super::safetensors::RawTensor;
use super::values::{BLOCK, FP4, PackedValues, fp8, unpack};
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_kernel::{Dtype, dequantize_row};

/// Columns of the eight numbers in a word of AutoAWQ.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Columns that share a scale in NVFP4.
const NVFP4_GROUP: usize = 16;

const WORDS: &[FileDtype] = &[FileDtype::I32, FileDtype::U32];
const FLOATS: &[FileDtype] = &[FileDtype::F32, FileDtype::F16, FileDtype::BF16];
const FP8: &[FileDtype] = &[FileDtype::F8_E4M3];
const INTEGERS: &[FileDtype] = &[FileDtype::I8, FileDtype::I32, FileDtype::I64];

/// The stored tensors of one matrix.
pub(super) enum MatrixParts<'a> {
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

/// The sizes of a packed matrix, which its parts agree on. None is 0, and `rows * cols` does not overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackedShape {
    rows: usize,
    cols: usize,
    /// Rows and columns that share a scale.
    height: usize,
    width: usize,
    /// Scales beside each other.
    groups: usize,
}

impl MatrixParts<'_> {
    /// Returns the matrix's shape, and the type that it usually becomes.
    pub fn describe(&self) -> Option<(Vec<usize>, Dtype)> {
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

    /// Returns rows and columns if they can be those of a matrix.
    fn shape(&self) -> Option<[usize; 2]> {
        let matrix = |raw: &RawTensor<'_>| <[usize; 2]>::try_from(raw.shape).ok();
        let numbers = |words: usize, bits: u32| Some(words.checked_mul(32)? / bits as usize);
        let [rows, cols] = match self {
            MatrixParts::Fp8 { codes, .. } => matrix(codes)?,
            MatrixParts::Bytes { numbers, .. } => matrix(numbers)?,
            MatrixParts::Nvfp4 { codes, .. } => {
                let [rows, bytes] = matrix(codes)?;
                [rows, bytes.checked_mul(2)?]
            }
            MatrixParts::Packed { shape, words, bits, .. } => {
                let stored: Vec<usize> = shape.integers()?.into_iter().map(|dim| dim as usize).collect();
                let (shape, [rows, num_words]) = (<[usize; 2]>::try_from(stored).ok()?, matrix(words)?);
                let fits = shape[0] == rows && shape[1].div_ceil(32 / *bits as usize) == num_words;
                fits.then_some(shape)?
            }
            MatrixParts::Awq { words, .. } => {
                let [cols, num_words] = matrix(words)?;
                [num_words.checked_mul(8)?, cols]
            }
            MatrixParts::Gptq { words, bits, .. } => {
                let [num_words, rows] = matrix(words)?;
                [rows, numbers(num_words, *bits)?]
            }
            MatrixParts::Mlx { words, bits, .. } => {
                let [rows, num_words] = matrix(words)?;
                [rows, numbers(num_words, *bits)?]
            }
        };
        rows.checked_mul(cols).filter(|values| *values > 0).map(|_| [rows, cols])
    }

    /// Compares the types and sizes of all parts, from the headers alone.
    pub fn checked(&self) -> Result<PackedShape, String> {
        let [rows, cols] = self.shape().ok_or("has parts of impossible shapes")?;
        let count = self.scales().len();
        let [height, width] = match self {
            MatrixParts::Fp8 { .. } | MatrixParts::Bytes { .. } | MatrixParts::Packed { .. }
                if count == 1 =>
            {
                [rows, cols]
            }
            MatrixParts::Fp8 { block: Some(block), .. } => *block,
            MatrixParts::Nvfp4 { .. } => [1, NVFP4_GROUP],
            MatrixParts::Awq { group, .. } | MatrixParts::Mlx { group, .. } => [1, *group],
            _ => [1, cols.div_ceil((count / rows).max(1))],
        };
        let must_fill = matches!(self, MatrixParts::Nvfp4 { .. } | MatrixParts::Mlx { .. });
        if width == 0 || must_fill && !cols.is_multiple_of(width) {
            return Err(format!("has {cols} columns in groups of {width}"));
        }
        let groups = cols.div_ceil(width);
        if count != rows.div_ceil(height) * groups {
            return Err(format!(
                "has {count} scales for {rows} rows with {groups} groups of {width} columns"
            ));
        }
        let shape = PackedShape { rows, cols, height, width, groups };
        self.check_parts(&shape)?;
        Ok(shape)
    }

    fn check_parts(&self, shape: &PackedShape) -> Result<(), String> {
        let PackedShape { rows, groups, .. } = *shape;
        self.scales().has_type("scales", if let MatrixParts::Nvfp4 { .. } = self { FP8 } else { FLOATS })?;
        match self {
            MatrixParts::Fp8 { .. } => Ok(()),
            MatrixParts::Nvfp4 { codes, global, .. } => {
                codes.has_type("codes", &[FileDtype::U8])?;
                global.has_type("global scales", FLOATS)?;
                if global.len() == 0 { Err("has no global scale".to_owned()) } else { Ok(()) }
            }
            MatrixParts::Bytes { zeros, .. } => match zeros {
                Some(zeros) if zeros.len() == 1 => zeros.has_type("zero points", INTEGERS),
                _ => check(zeros.as_ref(), "zero points", INTEGERS, rows * groups),
            },
            MatrixParts::Packed { words, zeros, order, bits, .. } => {
                words.has_type("words", WORDS)?;
                check(
                    zeros.as_ref(),
                    "words of zero points",
                    WORDS,
                    rows.div_ceil(32 / *bits as usize) * groups,
                )?;
                order.as_ref().map_or(Ok(()), |order| order.has_type("groups of columns", INTEGERS))
            }
            MatrixParts::Awq { words, zeros, .. } => {
                words.has_type("words", WORDS)?;
                check(zeros.as_ref(), "words of zero points", WORDS, groups * rows / 8)
            }
            MatrixParts::Gptq { words, zeros, order, bits, .. } => {
                words.has_type("words", WORDS)?;
                let line_bits = rows * *bits as usize;
                if zeros.is_some() && !line_bits.is_multiple_of(32) {
                    return Err(format!("has zero points for {rows} rows, which fill no words"));
                }
                check(zeros.as_ref(), "words of zero points", WORDS, groups * (line_bits / 32))?;
                order.as_ref().map_or(Ok(()), |order| order.has_type("groups of columns", INTEGERS))
            }
            MatrixParts::Mlx { mins, .. } => check(Some(mins), "minimums", FLOATS, rows * groups),
        }
    }

    fn scales(&self) -> &RawTensor<'_> {
        match self {
            MatrixParts::Fp8 { scales, .. }
            | MatrixParts::Nvfp4 { scales, .. }
            | MatrixParts::Bytes { scales, .. }
            | MatrixParts::Packed { scales, .. }
            | MatrixParts::Awq { scales, .. }
            | MatrixParts::Gptq { scales, .. }
            | MatrixParts::Mlx { scales, .. } => scales,
        }
    }

    pub fn read(&self) -> Result<HostTensor, String> {
        let shape = self.checked()?;
        match self {
            MatrixParts::Fp8 { codes, scales, .. } => read_fp8(codes, scales, &shape),
            MatrixParts::Nvfp4 { codes, scales, global } => read_nvfp4(codes, scales, global, &shape),
            _ => self.read_integers(&shape),
        }
    }

    fn read_integers(&self, shape: &PackedShape) -> Result<HostTensor, String> {
        let PackedShape { rows, cols, groups: num_groups, .. } = *shape;
        let groups = self.group_of_columns(shape)?;
        let mut numbers = self.numbers(shape);
        if let Some(zeros) = self.zeros(shape)? {
            for (line, zeros) in numbers.chunks_exact_mut(cols).zip(zeros.chunks_exact(num_groups)) {
                line.iter_mut().zip(&groups).for_each(|(number, group)| *number -= zeros[*group as usize]);
            }
        }
        let stored = self.scales().values();
        let scales = match self {
            MatrixParts::Awq { .. } | MatrixParts::Gptq { .. } => transposed(&stored, num_groups, rows),
            _ if stored.len() == 1 => vec![stored[0]; rows],
            _ => stored,
        };
        let mins = if let MatrixParts::Mlx { mins, .. } = self { Some(mins.values()) } else { None };
        PackedValues { rows, cols, numbers, scales, mins, groups }.into_tensor()
    }

    /// Returns the numbers as stored, `[rows, cols]`.
    fn numbers(&self, shape: &PackedShape) -> Vec<i16> {
        let PackedShape { rows, cols, .. } = *shape;
        match self {
            MatrixParts::Packed { words, bits, .. } | MatrixParts::Mlx { words, bits, .. } => {
                let lines = words.bytes.chunks_exact(words.bytes.len() / rows);
                lines.flat_map(|line| unpack(line, *bits, cols)).collect()
            }
            MatrixParts::Awq { words, .. } => awq_numbers(&words.bytes, cols, rows),
            MatrixParts::Gptq { words, bits, .. } => {
                // Word `w` of row `r` holds columns of that row.
                let words = words.bytes.as_chunks::<4>().0;
                let line =
                    |row: usize| words[row..].iter().step_by(rows).flatten().copied().collect::<Vec<u8>>();
                let mut numbers = Vec::with_capacity(rows * cols);
                (0..rows).for_each(|row| numbers.extend(unpack(&line(row), *bits, cols)));
                numbers
            }
            MatrixParts::Bytes { numbers, .. } => {
                numbers.bytes.iter().map(|&byte| i16::from(byte as i8)).collect()
            }
            MatrixParts::Fp8 { .. } | MatrixParts::Nvfp4 { .. } => Vec::new(),
        }
    }

    /// Returns what is subtracted from the numbers, `[rows, groups]`; `None` for nothing. Packed numbers without zero points
    /// are centred.
    fn zeros(&self, shape: &PackedShape) -> Result<Option<Vec<i16>>, String> {
        let PackedShape { rows, groups, .. } = *shape;
        let zeros = match self {
            MatrixParts::Bytes { zeros: Some(zeros), .. } => {
                let zero = |zero: i64| i8::try_from(zero).map_err(|_| format!("has a zero point of {zero}"));
                let zeros: Vec<i16> = zeros
                    .integers()
                    .into_iter()
                    .flatten()
                    .map(|it| zero(it).map(i16::from))
                    .collect::<Result<_, _>>()?;
                if zeros.len() == 1 { vec![zeros[0]; rows * groups] } else { zeros }
            }
            MatrixParts::Packed { zeros: Some(zeros), bits, .. } => {
                packed_zeros(&zeros.bytes, *bits, rows, groups)
            }
            MatrixParts::Awq { zeros: Some(zeros), .. } => awq_numbers(&zeros.bytes, groups, rows),
            MatrixParts::Gptq { zeros: Some(zeros), bits, zero_offset, .. } => {
                let lines = zeros.bytes.chunks_exact(rows * *bits as usize / 8);
                let stored: Vec<i16> = lines.flat_map(|line| unpack(line, *bits, rows)).collect();
                transposed(&stored, groups, rows).into_iter().map(|zero| zero + zero_offset).collect()
            }
            MatrixParts::Packed { bits, .. } | MatrixParts::Gptq { bits, .. } => {
                vec![1 << (bits - 1); rows * groups]
            }
            MatrixParts::Awq { .. } => vec![8; rows * groups],
            _ => return Ok(None),
        };
        Ok(Some(zeros))
    }

    /// Returns the group of each column: as stored, or neighbours in groups of equal size.
    fn group_of_columns(&self, shape: &PackedShape) -> Result<Vec<u32>, String> {
        let order = match self {
            MatrixParts::Packed { order, .. } | MatrixParts::Gptq { order, .. } => order.as_ref(),
            _ => None,
        };
        // compressed-tensors fills an unused order with -1.
        let stored = order.and_then(|order| order.integers()).filter(|all| !all.contains(&-1));
        let Some(stored) = stored else {
            return Ok((0..shape.cols).map(|col| (col / shape.width) as u32).collect());
        };
        check_len(stored.len(), shape.cols, "groups of columns")?;
        let group = |group: i64| u32::try_from(group).ok().filter(|group| (*group as usize) < shape.groups);
        stored.into_iter().map(|of| group(of).ok_or_else(|| format!("has no group {of}"))).collect()
    }
}

fn check_len(found: usize, wanted: usize, what: &str) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("has {found} {what} instead of {wanted}")) }
}

/// Checks the type and length of a part; one that is absent is fine.
fn check(part: Option<&RawTensor<'_>>, what: &str, types: &[FileDtype], len: usize) -> Result<(), String> {
    let Some(part) = part else { return Ok(()) };
    part.has_type(what, types)?;
    check_len(part.len(), len, what)
}

/// Turns `[groups, rows]` to `[rows, groups]`.
fn transposed<T: Copy>(values: &[T], num_groups: usize, rows: usize) -> Vec<T> {
    (0..rows * num_groups).map(|at| values[at % num_groups * rows + at / num_groups]).collect()
}

/// Reads zero points that are packed along the rows, `[rows / numbers per word, groups]`, as `[rows, groups]`.
fn packed_zeros(bytes: &[u8], bits: u32, rows: usize, num_groups: usize) -> Vec<i16> {
    let per_word = 32 / bits as usize;
    let zero = |at: usize| {
        let (row, group) = (at / num_groups, at % num_groups);
        let word = &bytes[4 * (row / per_word * num_groups + group)..][..4];
        unpack(word, bits, per_word).nth(row % per_word).unwrap_or(0)
    };
    (0..rows * num_groups).map(zero).collect()
}

/// Reads AutoAWQ's words, `[lines, rows / 8]`, as `[rows, lines]`.
fn awq_numbers(bytes: &[u8], lines: usize, rows: usize) -> Vec<i16> {
    let mut numbers = Vec::with_capacity(rows * lines);
    for row in 0..rows {
        let nibble = AWQ_ORDER.iter().position(|&place| place == row % 8).unwrap_or(0);
        let bytes = bytes[(row / 8 * 8 + nibble) / 2..].iter().step_by(rows / 2);
        numbers.extend(bytes.map(|byte| i16::from(byte >> (nibble % 2 * 4) & 15)));
    }
    numbers
}

/// Multiplies 8-bit floats with the scale of their block.
fn read_fp8(
    codes: &RawTensor<'_>,
    scales: &RawTensor<'_>,
    shape: &PackedShape,
) -> Result<HostTensor, String> {
    let PackedShape { cols, height, width, groups, .. } = *shape;
    let scales = scales.values();
    let table: Vec<f32> = (0..=255).map(fp8).collect();
    let value = |(at, &code): (usize, &u8)| {
        table[usize::from(code)] * scales[at / cols / height * groups + at % cols / width]
    };
    floats(codes.bytes.iter().enumerate().map(value), shape)
}

/// Multiplies 4-bit floats with an 8-bit scale for 16 columns, divided by the scale of the matrix.
fn read_nvfp4(
    codes: &RawTensor<'_>,
    scales: &RawTensor<'_>,
    global: &RawTensor<'_>,
    shape: &PackedShape,
) -> Result<HostTensor, String> {
    let global = global.values()[0];
    let numbers = unpack(&codes.bytes, 4, shape.rows * shape.cols);
    let value =
        |(at, code): (usize, i16)| FP4[code as usize] * (fp8(scales.bytes[at / NVFP4_GROUP]) / global);
    floats(numbers.enumerate().map(value), shape)
}

fn floats(values: impl Iterator<Item = f32>, shape: &PackedShape) -> Result<HostTensor, String> {
    let mut bytes = Vec::with_capacity(4 * shape.rows * shape.cols);
    values.for_each(|value| bytes.extend(value.to_le_bytes()));
    HostTensor::new(Dtype::F32, vec![shape.rows, shape.cols], SharedBytes::from(bytes))
}

impl RawTensor<'_> {
    fn len(&self) -> usize {
        self.shape.iter().product() // the header's reader has checked it
    }

    fn has_type(&self, what: &str, types: &[FileDtype]) -> Result<(), String> {
        match types.contains(&self.dtype) {
            true => Ok(()),
            false => Err(format!("has {what} of type {}, which is not supported", self.dtype)),
        }
    }

    /// Returns the values of a float tensor, whose type has been checked.
    fn values(&self) -> Vec<f32> {
        let dtype = match self.dtype {
            FileDtype::F16 => Dtype::F16,
            FileDtype::BF16 => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let mut values = vec![0.0; self.bytes.len() / dtype.block_bytes()];
        dequantize_row(dtype, &self.bytes, &mut values);
        values
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
