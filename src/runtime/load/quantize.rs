//! Conversion of weights on load: `--dtype` and `--quantize`.
//!
//! [`converted_dtype`] decides what becomes of a tensor (memory can be computed from it before anything is loaded),
//! [`convert`] does it, in parallel over rows. Only matrices are converted: norms and biases are small and sensitive.
//! candle's quantisers do the arithmetic of the block types. Values that the target cannot hold are an error, never
//! an infinity that shows up later.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::runtime::error::LoadError;
use crate::runtime::kernel::{Dtype, dequantize_row};
use crate::runtime::tensor::{Bytes, HostTensor, byte_len};

/// Values converted at a time by one thread: enough to outweigh the bookkeeping, few enough to stay in its cache.
const CHUNK_VALUES: usize = 1 << 16;

/// The type that [`convert`] gives a tensor of this shape and type when asked for `target`.
///
/// Vectors keep their type. Rows that are no whole number of the target's blocks become Q8_0 instead if their length
/// allows it, and else keep their type; weights that are quantised already are never brought to that substitute.
pub fn converted_dtype(shape: &[usize], source: Dtype, target: Dtype) -> Dtype {
    let fits = |dtype: Dtype| shape.last().is_some_and(|cols| cols.is_multiple_of(dtype.block_len()));
    match shape.len() {
        0 | 1 => source,
        _ if fits(target) => target,
        _ if fits(Dtype::Q8_0) && !source.is_quantized() => Dtype::Q8_0,
        _ => source,
    }
}

/// The tensor in the type that [`converted_dtype`] names; shares the bytes when that is the type it has.
///
/// `name` is only for errors. Compare the result's type with `target` to learn of a substitute.
///
/// # Errors
/// [`LoadError::Tensor`] when a value is not finite or too large for the target, or candle cannot quantise to it.
pub fn convert(name: &str, tensor: &HostTensor, target: Dtype) -> Result<HostTensor, LoadError> {
    let dtype = converted_dtype(&tensor.shape, tensor.dtype, target);
    if dtype == tensor.dtype {
        return Ok(tensor.clone());
    }
    let error = |message: String| LoadError::Tensor { tensor: name.into(), message };
    let mut out = vec![0; byte_len(dtype, &tensor.shape).map_err(error)?];
    let (_, cols) = tensor.rows_cols();
    let row_bytes =
        |dtype: Dtype| dtype.row_bytes(cols).ok_or_else(|| error("rows are no whole blocks".into()));
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
            write_values(dtype, values, out)
        })
        .map_err(error)?;
    HostTensor::new(dtype, tensor.shape.clone(), Bytes::from(out)).map_err(error)
}

/// Stores values as `dtype`; `out` has exactly the bytes they take.
fn write_values(dtype: Dtype, values: &[f32], out: &mut [u8]) -> Result<(), String> {
    match dtype {
        Dtype::F32 => write_floats(values, out, f32::to_le_bytes),
        Dtype::Bf16 => write_floats(values, out, |value| bf16::from_f32(value).to_le_bytes()),
        Dtype::F16 => {
            check_range(dtype, values.iter().filter(|value| value.is_finite()))?;
            write_floats(values, out, |value| f16::from_f32(value).to_le_bytes());
        }
        _ => {
            check_range(dtype, values.iter())?;
            quantize(dtype, values, out)?;
        }
    }
    Ok(())
}

fn write_floats<const BYTES: usize>(values: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; BYTES]) {
    for (out, &value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = bytes(value);
    }
}

/// Scales of block types are half-precision, so their range is that of f16.
fn check_range<'a>(dtype: Dtype, mut values: impl Iterator<Item = &'a f32>) -> Result<(), String> {
    match values.find(|value| !(value.abs() <= f16::MAX.to_f32())) {
        Some(value) => Err(format!("the value {value} cannot be stored as {}", dtype.name())),
        None => Ok(()),
    }
}

fn quantize(dtype: Dtype, values: &[f32], out: &mut [u8]) -> Result<(), String> {
    let name = ggml_dtype(dtype).ok_or_else(|| format!("weights cannot be converted to {}", dtype.name()))?;
    let blocks = Tensor::from_slice(values, values.len(), &Device::Cpu)
        .and_then(|tensor| QTensor::quantize(&tensor, name))
        .map_err(|error| error.to_string())?;
    let bytes = blocks.data().map_err(|error| error.to_string())?;
    if bytes.len() != out.len() {
        return Err(format!("{} blocks took {} bytes instead of {}", dtype.name(), bytes.len(), out.len()));
    }
    out.copy_from_slice(&bytes);
    Ok(())
}

fn ggml_dtype(dtype: Dtype) -> Option<GgmlDType> {
    Some(match dtype {
        Dtype::Q4_0 => GgmlDType::Q4_0,
        Dtype::Q4_1 => GgmlDType::Q4_1,
        Dtype::Q5_0 => GgmlDType::Q5_0,
        Dtype::Q5_1 => GgmlDType::Q5_1,
        Dtype::Q8_0 => GgmlDType::Q8_0,
        Dtype::Q2K => GgmlDType::Q2K,
        Dtype::Q3K => GgmlDType::Q3K,
        Dtype::Q4K => GgmlDType::Q4K,
        Dtype::Q5K => GgmlDType::Q5K,
        Dtype::Q6K => GgmlDType::Q6K,
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => return None,
    })
}
