//! Converts weights on load: `--dtype` and `--quantize`.
//!
//! [`converted_dtype`] chooses the type of a tensor (so that memory can be computed before loading),
//! [`convert`] converts it, in parallel over rows. Only matrices are converted: norms and biases are small
//! and sensitive. `blocks` does the arithmetic of the block types. Values that the target type cannot hold
//! are an error, never an infinity that appears later.

use half::{bf16, f16};
use rayon::prelude::*;

use super::blocks;
use crate::tensor::{HostTensor, SharedBytes, byte_len};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::{Dtype, dequantize_row};

/// Values that a thread converts at a time: enough to outweigh the bookkeeping, few enough for its cache.
const CHUNK_VALUES: usize = 1 << 16;

/// Returns the type that [`convert`] gives a tensor of this shape and type for the requested `target`.
///
/// Vectors keep their type. Rows that are not a whole number of the target's blocks become Q8_0 if their length
/// allows it, and else keep their type; weights that are already quantised are never converted to that substitute.
pub fn converted_dtype(shape: &[usize], source: Dtype, target: Dtype) -> Dtype {
    let fits = |dtype: Dtype| shape.last().is_some_and(|cols| cols.is_multiple_of(dtype.block_len()));
    match shape.len() {
        0 | 1 => source,
        _ if fits(target) => target,
        _ if fits(Dtype::Q8_0) && !source.is_quantized() => Dtype::Q8_0,
        _ => source,
    }
}

/// Converts the tensor to the type that [`converted_dtype`] returns; shares the bytes if it has that type already.
///
/// `name` is for errors only. To detect a substitute, compare the result's type with `target`.
///
/// # Errors
/// [`LoadError::Tensor`] if a value is not finite or too large for the target, or the target cannot be written.
pub fn convert(name: &str, tensor: &HostTensor, target: Dtype) -> LoadResult<HostTensor> {
    convert_exactly(name, tensor, converted_dtype(&tensor.shape, tensor.dtype, target), None)
}

/// Converts the tensor to exactly `dtype`; shares the bytes if it has that type already. `importance` weights the
/// errors of block types: one number per column.
///
/// # Errors
/// [`LoadError::Tensor`] if rows are not whole blocks, a value is not finite or too large for the type, the type cannot
/// be written, or `importance` has another length.
pub fn convert_exactly(
    name: &str,
    tensor: &HostTensor,
    dtype: Dtype,
    importance: Option<&[f32]>,
) -> LoadResult<HostTensor> {
    if dtype == tensor.dtype {
        return Ok(tensor.clone());
    }
    let error = |message: String| LoadError::Tensor { tensor: name.into(), message };
    let mut out = vec![0; byte_len(dtype, &tensor.shape).map_err(error)?];
    let (_, cols) = tensor.rows_cols();
    if let Some(other) = importance.map(<[f32]>::len).filter(|len| *len != cols) {
        return Err(error(format!("has {cols} columns, but the importance matrix has {other}")));
    }
    let row_bytes =
        |dtype: Dtype| dtype.row_bytes(cols).ok_or_else(|| error("rows are not whole blocks".into()));
    let rows_at_once = (CHUNK_VALUES / cols).max(1);
    let from = rows_at_once * row_bytes(tensor.dtype)?;
    let to = rows_at_once * row_bytes(dtype)?;
    tensor
        .bytes
        .par_chunks(from)
        .zip(out.par_chunks_mut(to))
        .try_for_each_init(Vec::new, |values, (bytes, out)| {
            let count = bytes.len() / tensor.dtype.block_bytes() * tensor.dtype.block_len();
            values.resize(count, 0.0);
            dequantize_row(tensor.dtype, bytes, values);
            write_values(dtype, values, importance, out)
        })
        .map_err(error)?;
    HostTensor::new(dtype, tensor.shape.clone(), SharedBytes::from(out)).map_err(error)
}

/// Stores values as `dtype`; `out` must have exactly their bytes.
fn write_values(
    dtype: Dtype,
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), String> {
    match dtype {
        Dtype::F32 => write_floats(values, out, f32::to_le_bytes),
        Dtype::Bf16 => write_floats(values, out, |value| bf16::from_f32(value).to_le_bytes()),
        Dtype::F16 => {
            check_range(dtype, values.iter().filter(|value| value.is_finite()))?;
            write_floats(values, out, |value| f16::from_f32(value).to_le_bytes());
        }
        _ => {
            check_range(dtype, values.iter())?;
            blocks::quantize(dtype, values, importance, out)?;
        }
    }
    Ok(())
}

fn write_floats<const BYTES: usize>(values: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; BYTES]) {
    for (out, &value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = bytes(value);
    }
}

/// Checks the range of values: scales of block types are half-precision, so their range is that of f16.
fn check_range<'a>(dtype: Dtype, mut values: impl Iterator<Item = &'a f32>) -> Result<(), String> {
    let range = f16::MIN.to_f32()..=f16::MAX.to_f32();
    match values.find(|value| !range.contains(*value)) {
        Some(value) => Err(format!("the value {value} cannot be stored as {}", dtype.name())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    use super::*;

    /// Generates values distributed like weights: a sum of uniform numbers, scaled to a standard deviation of about
    /// 0.02.
    fn weights(count: usize) -> Vec<f32> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| (0..6).map(|_| uniform()).sum::<f32>() * 0.028).collect()
    }

    fn tensor(dtype: Dtype, shape: &[usize], values: &[f32]) -> HostTensor {
        let bytes = match dtype {
            Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>(),
            Dtype::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Dtype::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            other => panic!("no writer for {}", other.name()),
        };
        HostTensor::new(dtype, shape.to_vec(), SharedBytes::from(bytes)).unwrap()
    }

    fn values(tensor: &HostTensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
        values
    }

    fn relative_error(before: &[f32], after: &[f32]) -> f32 {
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>();
        let difference = square(&mut before.iter().zip(after).map(|(a, b)| a - b));
        (difference / square(&mut before.iter().copied())).sqrt()
    }

    #[test]
    fn each_type_loses_no_more_than_its_bits_allow() {
        let before = weights(301 * 512);
        let source = tensor(Dtype::F32, &[301, 512], &before);
        for (target, bound) in [
            (Dtype::F32, 0.0),
            (Dtype::Bf16, 0.002),
            (Dtype::F16, 0.0003),
            (Dtype::Q8_0, 0.006),
            (Dtype::Q6K, 0.02),
            (Dtype::Q5K, 0.04),
            (Dtype::Q5_1, 0.05),
            (Dtype::Q5_0, 0.05),
            (Dtype::Q4K, 0.08),
            (Dtype::Q4_1, 0.1),
            (Dtype::Q4_0, 0.1),
            (Dtype::Q3K, 0.18),
            (Dtype::Q2K, 0.32),
        ] {
            let converted = convert("w", &source, target).unwrap();
            assert_eq!((converted.dtype, &converted.shape), (target, &source.shape));
            let error = relative_error(&before, &values(&converted));
            assert!(error <= bound, "{}: {error} > {bound}", target.name());
            assert!(
                error > bound / 10.0 || bound == 0.0,
                "{}: {error} is too good to be true",
                target.name()
            );
        }
    }

    #[test]
    fn widening_is_exact_and_the_same_type_shares_its_bytes() {
        for source in [Dtype::Bf16, Dtype::F16] {
            let narrow = tensor(source, &[3, 40], &weights(120));
            let wide = convert("w", &narrow, Dtype::F32).unwrap();
            assert_eq!(wide.dtype, Dtype::F32);
            assert_eq!(values(&wide), values(&narrow));
            let same = convert("w", &narrow, source).unwrap();
            assert!(std::ptr::eq(same.bytes.as_ptr(), narrow.bytes.as_ptr()));
        }
    }

    #[test]
    fn the_result_does_not_depend_on_the_chunks_it_is_made_in() {
        let before = weights(700 * 256);
        let whole = convert("w", &tensor(Dtype::F32, &[700, 256], &before), Dtype::Q4K).unwrap();
        for row in [0, 255, 256, 257, 699] {
            let alone = tensor(Dtype::F32, &[1, 256], &before[row * 256..(row + 1) * 256]);
            let alone = convert("w", &alone, Dtype::Q4K).unwrap();
            assert_eq!(*alone.bytes, *whole.slice_rows(row, row + 1).bytes, "row {row}");
        }
    }

    #[test]
    fn what_does_not_fit_the_blocks_gets_a_substitute_or_stays() {
        let bf16 = Dtype::Bf16;
        for (shape, source, target, expected) in [
            (&[4, 512][..], bf16, Dtype::Q4K, Dtype::Q4K),
            (&[4, 96], bf16, Dtype::Q4K, Dtype::Q8_0),
            (&[4, 96], bf16, Dtype::Q6K, Dtype::Q8_0),
            (&[4, 96], Dtype::Q4_0, Dtype::Q6K, Dtype::Q4_0),
            (&[4, 40], bf16, Dtype::Q4K, bf16),
            (&[4, 40], bf16, Dtype::Q4_0, bf16),
            (&[512], bf16, Dtype::Q8_0, bf16),
            (&[512], bf16, Dtype::F32, bf16),
            (&[2, 4, 256], bf16, Dtype::Q4K, Dtype::Q4K),
            (&[4, 40], bf16, Dtype::F16, Dtype::F16),
        ] {
            assert_eq!(converted_dtype(shape, source, target), expected, "{shape:?} {}", target.name());
            if source == bf16 {
                let source = tensor(bf16, shape, &weights(shape.iter().product()));
                assert_eq!(convert("w", &source, target).unwrap().dtype, expected);
            }
        }
    }

    #[test]
    fn values_that_a_type_cannot_hold_are_refused_by_name() {
        for (bad, target) in [
            (f32::NAN, Dtype::Q8_0),
            (f32::INFINITY, Dtype::Q4K),
            (1e6, Dtype::Q6K),
            (-1e6, Dtype::F16),
            (1e6, Dtype::Q4_0),
        ] {
            let mut before = weights(512);
            before[300] = bad;
            let error = convert("blk.0.ffn_up", &tensor(Dtype::F32, &[2, 256], &before), target)
                .unwrap_err()
                .to_string();
            assert!(error.contains("blk.0.ffn_up") && error.contains(target.name()), "{error}");
        }
    }

    #[test]
    fn rows_of_zeros_stay_zeros() {
        for (target, _) in BLOCK_TYPES {
            let zeros = convert("w", &tensor(Dtype::F32, &[2, 256], &[0.0; 512]), target).unwrap();
            assert!(values(&zeros).iter().all(|&value| value == 0.0), "{}", target.name());
        }
    }

    const BLOCK_TYPES: [(Dtype, GgmlDType); 10] = [
        (Dtype::Q4_0, GgmlDType::Q4_0),
        (Dtype::Q4_1, GgmlDType::Q4_1),
        (Dtype::Q5_0, GgmlDType::Q5_0),
        (Dtype::Q5_1, GgmlDType::Q5_1),
        (Dtype::Q8_0, GgmlDType::Q8_0),
        (Dtype::Q2K, GgmlDType::Q2K),
        (Dtype::Q3K, GgmlDType::Q3K),
        (Dtype::Q4K, GgmlDType::Q4K),
        (Dtype::Q5K, GgmlDType::Q5K),
        (Dtype::Q6K, GgmlDType::Q6K),
    ];

    #[test]
    fn our_quantisers_are_no_worse_than_candles() {
        let before = weights(64 * 256);
        let source = tensor(Dtype::F32, &[64, 256], &before);
        for (dtype, name) in BLOCK_TYPES {
            let ours = convert("w", &source, dtype).unwrap();
            let candle = Tensor::from_slice(&before, before.len(), &Device::Cpu).unwrap();
            let candle = QTensor::quantize(&candle, name).unwrap();
            if dtype.block_len() == 32 {
                assert_eq!(*ours.bytes, *candle.data().unwrap(), "{}: ggml's reference", dtype.name());
            }
            let candle: Vec<f32> = candle.dequantize(&Device::Cpu).unwrap().to_vec1().unwrap();
            let (ours, candle) = (relative_error(&before, &values(&ours)), relative_error(&before, &candle));
            assert!(ours <= candle * 1.001, "{}: {ours} against {candle}", dtype.name());
        }
    }

    #[test]
    fn importance_lowers_the_error_of_important_columns() {
        let before = weights(64 * 256);
        let source = tensor(Dtype::F32, &[64, 256], &before);
        let importance: Vec<f32> = (0..256).map(|col| if col % 5 == 0 { 40.0 } else { 0.5 }).collect();
        let weighted = |after: &[f32]| -> f32 {
            let squares = before.iter().zip(after).enumerate();
            squares.map(|(at, (a, b))| importance[at % 256] * (a - b) * (a - b)).sum()
        };
        for (dtype, _) in BLOCK_TYPES {
            let plain = weighted(&values(&convert("w", &source, dtype).unwrap()));
            let aware = convert_exactly("w", &source, dtype, Some(&importance)).unwrap();
            let aware = weighted(&values(&aware));
            let most = if dtype == Dtype::Q8_0 { 1.0 } else { 0.97 };
            assert!(aware <= plain * most, "{}: {aware} against {plain}", dtype.name());
        }
        let error = convert_exactly("w", &source, Dtype::Q4K, Some(&importance[..32])).unwrap_err();
        assert!(error.to_string().contains("256 columns, but the importance matrix has 32"), "{error}");
    }

    /// Regression: candle 0.11 turns a constant group of 32 into zeros.
    #[test]
    fn constant_blocks_keep_their_value() {
        for (target, _) in BLOCK_TYPES {
            for constant in [0.5, -0.25, 0.02, 6e4] {
                let same = convert("w", &tensor(Dtype::F32, &[1, 256], &[constant; 256]), target).unwrap();
                let error = relative_error(&[constant; 256], &values(&same));
                assert!(error < 0.02, "{} {constant}: {:?}", target.name(), &values(&same)[..2]);
            }
        }
    }
}
