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
pub(super) struct MatrixParts<'a> {
    /// Packed numbers, numbers of a byte, or codes.
    pub words: RawTensor<'a>,
    pub scales: RawTensor<'a>,
    /// Zero points, of forms of integers that may have them.
    pub zeros: Option<RawTensor<'a>>,
    pub form: PartsForm<'a>,
}

/// The form of a packed matrix, with the parts and numbers that only this form has.
pub(super) enum PartsForm<'a> {
    /// Blocks of scales begin anew in each of so many parts of the rows.
    Fp8 { block: Option<[usize; 2]>, parts: usize },
    /// NVFP4, with a factor of the whole matrix.
    Nvfp4 { global: RawTensor<'a> },
    /// A signed byte for each value.
    Bytes,
    /// compressed-tensors: numbers of few bits side by side in words.
    Packed { order: Option<RawTensor<'a>>, shape: RawTensor<'a>, bits: u32 },
    /// AWQ: eight numbers of four bits in a word, in an order of their own.
    Awq { group: usize },
    /// GPTQ: numbers of few bits down the columns.
    Gptq { order: Option<RawTensor<'a>>, bits: u32, zero_offset: i16 },
    /// MLX: numbers of few bits with a minimum for each group.
    Mlx { mins: RawTensor<'a>, group: usize, bits: u32 },
}

/// The sizes of a packed matrix, which its parts agree on. None is 0, and `rows * cols` does not overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PackedShape {
    rows: usize,
    cols: usize,
    /// Rows of a part in which rows of scales begin anew; all rows of most.
    part_rows: usize,
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
        let has_halves = self.scales.dtype != FileDtype::F32;
        let is_whole = has_halves && cols.is_multiple_of(BLOCK) && self.has_whole_blocks();
        let dtype = match (&self.form, &self.zeros) {
            _ if !is_whole => Dtype::F32,
            (PartsForm::Packed { bits: 4, .. }, None) => Dtype::Q4_0,
            (PartsForm::Packed { bits: 4, .. } | PartsForm::Awq { .. }, _) => Dtype::Q5_0,
            (PartsForm::Gptq { bits: 2..=4, .. }, _) => Dtype::Q5_0,
            (PartsForm::Packed { bits: 8, .. } | PartsForm::Gptq { bits: 8, .. }, _) => Dtype::Q8_0,
            (PartsForm::Bytes, None) => Dtype::Q8_0,
            (PartsForm::Mlx { bits: 2..=4, .. }, _) => Dtype::Q4_1,
            (PartsForm::Mlx { bits: 5, .. }, _) => Dtype::Q5_1,
            _ => Dtype::F32,
        };
        Some((vec![rows, cols], dtype))
    }

    /// Returns whether the columns of each block share a group.
    fn has_whole_blocks(&self) -> bool {
        let order = self.order().and_then(|order| order.integers()).unwrap_or_default();
        order.chunks(BLOCK).all(|groups| groups.iter().all(|group| *group == groups[0]))
    }

    /// Returns rows and columns if they can be those of a matrix.
    fn shape(&self) -> Option<[usize; 2]> {
        let matrix = |raw: &RawTensor<'_>| <[usize; 2]>::try_from(raw.shape).ok();
        let numbers = |words: usize, bits: u32| Some(words.checked_mul(32)? / bits as usize);
        let stored = matrix(&self.words)?;
        let [rows, cols] = match &self.form {
            PartsForm::Fp8 { .. } | PartsForm::Bytes => stored,
            PartsForm::Nvfp4 { .. } => [stored[0], stored[1].checked_mul(2)?],
            PartsForm::Packed { shape, bits, .. } => {
                let shape: Vec<usize> = shape.integers()?.into_iter().map(|dim| dim as usize).collect();
                let shape = <[usize; 2]>::try_from(shape).ok()?;
                ([shape[0], shape[1].div_ceil(32 / *bits as usize)] == stored).then_some(shape)?
            }
            PartsForm::Awq { .. } => [stored[1].checked_mul(8)?, stored[0]],
            PartsForm::Gptq { bits, .. } => [stored[1], numbers(stored[0], *bits)?],
            PartsForm::Mlx { bits, .. } => [stored[0], numbers(stored[1], *bits)?],
        };
        rows.checked_mul(cols).filter(|values| *values > 0).map(|_| [rows, cols])
    }

    /// Compares the types and sizes of all parts, from the headers alone.
    pub fn checked(&self) -> Result<PackedShape, String> {
        let [rows, cols] = self.shape().ok_or("has parts of impossible shapes")?;
        let count = self.scales.len();
        let [height, width] = match &self.form {
            PartsForm::Fp8 { .. } | PartsForm::Bytes | PartsForm::Packed { .. } if count == 1 => [rows, cols],
            PartsForm::Fp8 { block: Some(block), .. } => *block,
            PartsForm::Nvfp4 { .. } => [1, NVFP4_GROUP],
            PartsForm::Awq { group } | PartsForm::Mlx { group, .. } => [1, *group],
            _ => [1, cols.div_ceil((count / rows).max(1))],
        };
        let must_fill = matches!(self.form, PartsForm::Nvfp4 { .. } | PartsForm::Mlx { .. });
        if width == 0 || must_fill && !cols.is_multiple_of(width) {
            return Err(format!("has {cols} columns in groups of {width}"));
        }
        let groups = cols.div_ceil(width);
        let parts = match self.form {
            PartsForm::Fp8 { block: Some(_), parts } if count > 1 => parts,
            _ => 1,
        };
        let part_rows = rows / parts;
        if part_rows * parts != rows {
            return Err(format!("has {rows} rows in {parts} parts"));
        }
        if count != parts * part_rows.div_ceil(height) * groups {
            return Err(format!(
                "has {count} scales for {rows} rows with {groups} groups of {width} columns"
            ));
        }
        let shape = PackedShape { rows, cols, part_rows, height, width, groups };
        self.check_parts(&shape)?;
        Ok(shape)
    }

    fn check_parts(&self, shape: &PackedShape) -> Result<(), String> {
        let PackedShape { rows, groups, .. } = *shape;
        let Self { words, scales, zeros, form } = self;
        scales.has_type("scales", if let PartsForm::Nvfp4 { .. } = form { FP8 } else { FLOATS })?;
        let check_words = |num_zeros: usize| {
            words.has_type("words", WORDS)?;
            check(zeros.as_ref(), "words of zero points", WORDS, num_zeros)?;
            self.order().map_or(Ok(()), |order| order.has_type("groups of columns", INTEGERS))
        };
        match form {
            PartsForm::Fp8 { .. } => Ok(()),
            PartsForm::Nvfp4 { global } => {
                words.has_type("codes", &[FileDtype::U8])?;
                global.has_type("global scales", FLOATS)?;
                if global.len() == 0 { Err("has no global scale".to_owned()) } else { Ok(()) }
            }
            PartsForm::Bytes => match zeros {
                Some(zeros) if zeros.len() == 1 => zeros.has_type("zero points", INTEGERS),
                _ => check(zeros.as_ref(), "zero points", INTEGERS, rows * groups),
            },
            PartsForm::Packed { bits, .. } => check_words(rows.div_ceil(32 / *bits as usize) * groups),
            PartsForm::Awq { .. } => check_words(groups * rows / 8),
            PartsForm::Gptq { bits, .. } => {
                let line_bits = rows * *bits as usize;
                if zeros.is_some() && !line_bits.is_multiple_of(32) {
                    words.has_type("words", WORDS)?;
                    return Err(format!("has zero points for {rows} rows, which fill no words"));
                }
                check_words(groups * (line_bits / 32))
            }
            PartsForm::Mlx { mins, .. } => check(Some(mins), "minimums", FLOATS, rows * groups),
        }
    }

    /// Returns the group of each column, of forms that may store it.
    fn order(&self) -> Option<&RawTensor<'_>> {
        match &self.form {
            PartsForm::Packed { order, .. } | PartsForm::Gptq { order, .. } => order.as_ref(),
            _ => None,
        }
    }

    pub fn read(&self) -> Result<HostTensor, String> {
        let shape = self.checked()?;
        match &self.form {
            PartsForm::Fp8 { .. } => self.read_fp8(&shape),
            PartsForm::Nvfp4 { global } => self.read_nvfp4(global, &shape),
            _ => self.read_integers(&shape),
        }
    }

    fn read_fp8(&self, shape: &PackedShape) -> Result<HostTensor, String> {
        let PackedShape { cols, part_rows, height, width, groups, .. } = *shape;
        let scales = &self.scales.values();
        let table: &Vec<f32> = &(0..=255).map(fp8).collect();
        let rows = self.words.bytes.chunks_exact(cols).enumerate();
        let values = rows.flat_map(|(row, codes)| {
            let block = row / part_rows * part_rows.div_ceil(height) + row % part_rows / height;
            let scales = &scales[block * groups..];
            codes.iter().enumerate().map(move |(col, code)| table[usize::from(*code)] * scales[col / width])
        });
        floats(values, shape)
    }

    /// Reads NVFP4: the scale of a group is a float of 8 bits, divided by the global one.
    fn read_nvfp4(&self, global: &RawTensor<'_>, shape: &PackedShape) -> Result<HostTensor, String> {
        let global = global.values()[0];
        let numbers = unpack(&self.words.bytes, 4, shape.rows * shape.cols);
        let value = |(at, code): (usize, i16)| {
            FP4[code as usize] * (fp8(self.scales.bytes[at / NVFP4_GROUP]) / global)
        };
        floats(numbers.enumerate().map(value), shape)
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
        let stored = self.scales.values();
        let scales = match self.form {
            PartsForm::Awq { .. } | PartsForm::Gptq { .. } => transposed(&stored, num_groups, rows),
            _ if stored.len() == 1 => vec![stored[0]; rows],
            _ => stored,
        };
        let mins = if let PartsForm::Mlx { mins, .. } = &self.form { Some(mins.values()) } else { None };
        PackedValues { rows, cols, numbers, scales, mins, groups }.into_tensor()
    }

    /// Returns the numbers as stored, `[rows, cols]`.
    fn numbers(&self, shape: &PackedShape) -> Vec<i16> {
        let PackedShape { rows, cols, .. } = *shape;
        let bytes = &self.words.bytes;
        match &self.form {
            PartsForm::Packed { bits, .. } | PartsForm::Mlx { bits, .. } => {
                let lines = bytes.chunks_exact(bytes.len() / rows);
                lines.flat_map(|line| unpack(line, *bits, cols)).collect()
            }
            PartsForm::Awq { .. } => awq_numbers(bytes, cols, rows),
            PartsForm::Gptq { bits, .. } => {
                // Word `w` of row `r` holds columns of that row.
                let words = bytes.as_chunks::<4>().0;
                let line =
                    |row: usize| words[row..].iter().step_by(rows).flatten().copied().collect::<Vec<u8>>();
                let mut numbers = Vec::with_capacity(rows * cols);
                (0..rows).for_each(|row| numbers.extend(unpack(&line(row), *bits, cols)));
                numbers
            }
            PartsForm::Bytes => bytes.iter().map(|&byte| i16::from(byte as i8)).collect(),
            PartsForm::Fp8 { .. } | PartsForm::Nvfp4 { .. } => Vec::new(),
        }
    }

    /// Returns what is subtracted from the numbers, `[rows, groups]`; `None` for nothing. Packed numbers without zero points
    /// are centred.
    fn zeros(&self, shape: &PackedShape) -> Result<Option<Vec<i16>>, String> {
        let PackedShape { rows, groups, .. } = *shape;
        let zeros = match (&self.form, &self.zeros) {
            (PartsForm::Bytes, Some(zeros)) => {
                let zero = |zero: i64| i8::try_from(zero).map_err(|_| format!("has a zero point of {zero}"));
                let zeros: Vec<i16> = zeros
                    .integers()
                    .into_iter()
                    .flatten()
                    .map(|it| zero(it).map(i16::from))
                    .collect::<Result<_, _>>()?;
                if zeros.len() == 1 { vec![zeros[0]; rows * groups] } else { zeros }
            }
            (PartsForm::Packed { bits, .. }, Some(zeros)) => packed_zeros(&zeros.bytes, *bits, rows, groups),
            (PartsForm::Awq { .. }, Some(zeros)) => awq_numbers(&zeros.bytes, groups, rows),
            (PartsForm::Gptq { bits, zero_offset, .. }, Some(zeros)) => {
                let lines = zeros.bytes.chunks_exact(rows * *bits as usize / 8);
                let stored: Vec<i16> = lines.flat_map(|line| unpack(line, *bits, rows)).collect();
                transposed(&stored, groups, rows).into_iter().map(|zero| zero + zero_offset).collect()
            }
            (PartsForm::Packed { bits, .. } | PartsForm::Gptq { bits, .. }, None) => {
                vec![1 << (bits - 1); rows * groups]
            }
            (PartsForm::Awq { .. }, None) => vec![8; rows * groups],
            _ => return Ok(None),
        };
        Ok(Some(zeros))
    }

    /// Returns the group of each column: as stored, or neighbours in groups of equal size.
    fn group_of_columns(&self, shape: &PackedShape) -> Result<Vec<u32>, String> {
        // compressed-tensors fills an unused order with -1.
        let stored = self.order().and_then(|order| order.integers()).filter(|all| !all.contains(&-1));
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
