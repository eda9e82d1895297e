//! Matrices on the device: floats as tensors, ggml's blocks in the file's layout.
//!
//! Blocks are never expanded as a whole: products and row look-ups read them directly. (On x86 and ARM CPUs
//! candle itself keeps a second, interleaved copy of some types.) No copy stays on the host.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{D, DType, Device, Result, Tensor};
use half::{bf16, f16};

use super::cuda::{FusedProduct, WIDE_ROWS, WIDENED_BYTES, Widened, is_used};
use crate::tensor::{HostTensor, byte_len};
use llmctl_base::error::LoadError;
use llmctl_kernel::{Dtype, dequantize_row};

/// A matrix `[out, in]`.
#[derive(Debug)]
pub struct CandleWeight {
    num_rows: usize,
    form: WeightTensor,
}

#[derive(Debug)]
enum WeightTensor {
    /// f32, f16 or bf16.
    Floats(Tensor),
    Blocks(QTensor),
}

/// candle's two kinds of types.
enum CandleType {
    Floats(DType),
    Blocks(GgmlDType),
}

fn kind(dtype: Dtype) -> CandleType {
    match dtype {
        Dtype::F32 => CandleType::Floats(DType::F32),
        Dtype::F16 => CandleType::Floats(DType::F16),
        Dtype::Bf16 => CandleType::Floats(DType::BF16),
        Dtype::Q4_0 => CandleType::Blocks(GgmlDType::Q4_0),
        Dtype::Q4_1 => CandleType::Blocks(GgmlDType::Q4_1),
        Dtype::Q5_0 => CandleType::Blocks(GgmlDType::Q5_0),
        Dtype::Q5_1 => CandleType::Blocks(GgmlDType::Q5_1),
        Dtype::Q8_0 => CandleType::Blocks(GgmlDType::Q8_0),
        Dtype::Q2K => CandleType::Blocks(GgmlDType::Q2K),
        Dtype::Q3K => CandleType::Blocks(GgmlDType::Q3K),
        Dtype::Q4K => CandleType::Blocks(GgmlDType::Q4K),
        Dtype::Q5K => CandleType::Blocks(GgmlDType::Q5K),
        Dtype::Q6K => CandleType::Blocks(GgmlDType::Q6K),
        // candle lacks these blocks; `upload` converts their values, those of MXFP4 exactly.
        Dtype::Mxfp4 => CandleType::Floats(DType::BF16),
        Dtype::Nvfp4 | Dtype::Iq4Nl | Dtype::Iq4Xs | Dtype::Iq3S | Dtype::Iq3Xxs => {
            CandleType::Floats(DType::F16)
        }
        Dtype::Iq2S | Dtype::Iq2Xs | Dtype::Iq2Xxs | Dtype::Iq1M | Dtype::Iq1S => {
            CandleType::Floats(DType::F16)
        }
        Dtype::Tq2_0 | Dtype::Tq1_0 | Dtype::Q2_0 | Dtype::Q1_0 => CandleType::Floats(DType::F16),
    }
}

/// Returns whether candle lacks a quantised type, so that its weights are kept as f16 or bf16.
pub fn is_widened(dtype: Dtype) -> bool {
    dtype.is_quantized() && matches!(kind(dtype), CandleType::Floats(_))
}

impl CandleWeight {
    /// Copies a matrix to the device. f16 and bf16 keep their type if `halves`, else they become f32.
    pub fn upload(
        tensor: &HostTensor,
        device: &Device,
        halves: bool,
    ) -> std::result::Result<CandleWeight, LoadError> {
        let refused = |message: String| LoadError::Tensor {
            tensor: format!("{} matrix {:?}", tensor.dtype.name(), tensor.shape),
            message,
        };
        // candle would panic on a mismatch.
        let wanted = byte_len(tensor.dtype, &tensor.shape).map_err(refused)?;
        if wanted != tensor.bytes.len() {
            return Err(refused(format!("takes {wanted} bytes, not {}", tensor.bytes.len())));
        }
        let widened;
        let tensor = if is_widened(tensor.dtype) {
            widened = widen(tensor).map_err(refused)?;
            &widened
        } else {
            tensor
        };
        let form = match kind(tensor.dtype) {
            CandleType::Floats(dtype) => floats(tensor, dtype, device, halves).map(WeightTensor::Floats),
            CandleType::Blocks(dtype) => blocks(tensor, dtype, device).map(WeightTensor::Blocks),
        };
        let form = form.map_err(|error| refused(error.to_string()))?;
        Ok(CandleWeight { num_rows: tensor.rows_cols().0, form })
    }

    /// Stacks the matrices of heads, which are all of one shape: `[heads, out, in]`. Blocks become f16 if `halves`, else f32,
    /// since candle has no batched products with them.
    pub fn of_heads(weights: &[CandleWeight], halves: bool) -> Result<CandleWeight> {
        let floats = |weight: &CandleWeight| match &weight.form {
            WeightTensor::Floats(weight) => Ok(weight.clone()),
            WeightTensor::Blocks(weight) if halves => weight.dequantize_f16(&weight.device()),
            WeightTensor::Blocks(weight) => weight.dequantize(&weight.device()),
        };
        let heads = weights.iter().map(floats).collect::<Result<Vec<_>>>()?;
        let num_rows = weights.iter().map(CandleWeight::num_rows).sum();
        Ok(CandleWeight { num_rows, form: WeightTensor::Floats(Tensor::stack(&heads, 0)?) })
    }

    /// Returns the number of matrices that [`Self::of_heads`] has stacked.
    pub fn num_heads(&self) -> Result<usize> {
        match &self.form {
            WeightTensor::Floats(stacked) => Ok(stacked.dims3()?.0),
            WeightTensor::Blocks(_) => candle_core::bail!("a single matrix"),
        }
    }

    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Returns the rows with these `indices`, in f32.
    pub fn rows(&self, indices: &Tensor) -> Result<Tensor> {
        match &self.form {
            WeightTensor::Floats(table) => table.index_select(indices, 0)?.to_dtype(DType::F32),
            WeightTensor::Blocks(table) => table.embedding(indices),
        }
    }

    /// Computes `x . self^T` in f32; for matrices of heads, `x` is `[heads, rows, in]`.
    pub fn product(&self, x: &Tensor) -> Result<Tensor> {
        match &self.form {
            WeightTensor::Floats(weight) => match weight.dtype() {
                DType::F32 => x.matmul(&weight.t()?),
                DType::F16 => f16_product(x, [Ok(weight.clone())]),
                dtype => x.to_dtype(dtype)?.matmul(&weight.t()?)?.to_dtype(DType::F32),
            },
            WeightTensor::Blocks(weight) => block_product(weight, x),
        }
    }
}

/// Computes a product by the kernels for few or for many rows, else by candle.
fn block_product(weight: &QTensor, x: &Tensor) -> Result<Tensor> {
    if let Some(product) = FusedProduct::new(weight, x).filter(|product| is_used(product.kernel(), x)) {
        return product.apply(x);
    }
    let parts = if x.dim(0)? >= WIDE_ROWS { Widened::parts(weight, WIDENED_BYTES) } else { None };
    match parts {
        Some(parts) if parts.first().is_some_and(|part| is_used(part.kernel(), x)) => {
            f16_product(x, parts.iter().map(|part| part.apply(x)))
        }
        // Bypasses candle's QMatMul, which chooses its method by environment variables.
        _ => x.apply_op1_no_bwd(weight),
    }
}

/// Converts a type that candle lacks to halves.
fn widen(tensor: &HostTensor) -> std::result::Result<HostTensor, String> {
    let mut values = vec![0.0; tensor.shape.iter().product()];
    dequantize_row(tensor.dtype, &tensor.bytes, &mut values);
    if tensor.dtype == Dtype::Mxfp4 {
        let bytes: Vec<u8> = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        return Ok(HostTensor { dtype: Dtype::Bf16, shape: tensor.shape.clone(), bytes: bytes.into() });
    }
    if let Some(value) = values.iter().find(|value| value.abs() > f16::MAX.to_f32()) {
        return Err(format!(
            "the value {value} cannot be kept as f16, which candle needs; the CPU backend can"
        ));
    }
    let bytes: Vec<u8> = values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
    Ok(HostTensor { dtype: Dtype::F16, shape: tensor.shape.clone(), bytes: bytes.into() })
}

fn floats(tensor: &HostTensor, dtype: DType, device: &Device, halves: bool) -> Result<Tensor> {
    let stored = Tensor::from_raw_buffer(&tensor.bytes, dtype, &tensor.shape, device)?;
    if halves { Ok(stored) } else { stored.to_dtype(DType::F32) }
}

fn blocks(tensor: &HostTensor, dtype: GgmlDType, device: &Device) -> Result<QTensor> {
    let bytes = tensor.bytes.clone().aligned_to(2); // for the blocks' f16 scales; candle asserts it
    let storage = QStorage::from_data((&*bytes).into(), device, dtype)?;
    QTensor::new(storage, tensor.shape.as_slice())
}

/// Computes a product in f16 with a matrix given in parts of its rows, of which one is kept at a time. Since activations of some
/// models exceed the largest f16, 65504, each row is scaled to at most 1 and back.
pub fn f16_product(x: &Tensor, parts: impl IntoIterator<Item = Result<Tensor>>) -> Result<Tensor> {
    let largest = x.abs()?.max_keepdim(D::Minus1)?.maximum(f32::MIN_POSITIVE)?;
    let unit = x.broadcast_div(&largest)?.to_dtype(DType::F16)?;
    let product =
        |part: Result<Tensor>| unit.matmul(&part?.t()?)?.to_dtype(DType::F32)?.broadcast_mul(&largest);
    match parts.into_iter().map(product).collect::<Result<Vec<_>>>()?.as_slice() {
        [whole] => Ok(whole.clone()),
        products => Tensor::cat(products, D::Minus1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> HostTensor {
        HostTensor { dtype, shape: shape.to_vec(), bytes: bytes.into() }
    }

    #[test]
    fn bytes_that_do_not_fit_the_shape_are_refused() {
        for (dtype, shape, len) in [
            (Dtype::Q8_0, [2, 32], 67),
            (Dtype::Q8_0, [2, 33], 68),
            (Dtype::F32, [2, 2], 12),
            (Dtype::F32, [0, 2], 0),
        ] {
            let refused = CandleWeight::upload(&tensor(dtype, &shape, vec![0; len]), &Device::Cpu, false);
            assert!(matches!(refused, Err(LoadError::Tensor { .. })), "{dtype:?} {shape:?}");
        }
    }

    #[test]
    fn mxfp4_is_its_values_exactly() {
        // Exponent 126 is one half; codes 2 and 9 are 1 and -0.5.
        let block: Vec<u8> = std::iter::once(126).chain([2 | 9 << 4; 16]).collect();
        let weight = CandleWeight::upload(&tensor(Dtype::Mxfp4, &[1, 32], block), &Device::Cpu, false);
        let row = weight.unwrap().rows(&Tensor::new(&[0u32], &Device::Cpu).unwrap()).unwrap();
        assert_eq!(row.to_vec2::<f32>().unwrap(), [[[0.5; 16], [-0.25; 16]].concat()]);
    }

    #[test]
    fn types_that_candle_lacks_are_kept_in_halves_or_refused() {
        // Code 0 stands for -127, code 15 for 113.
        let block = |scale: f32| [&f16::from_f32(scale).to_le_bytes()[..], &[0xf0; 16]].concat();
        let upload =
            |scale| CandleWeight::upload(&tensor(Dtype::Iq4Nl, &[1, 32], block(scale)), &Device::Cpu, true);
        let row = upload(0.5).unwrap().rows(&Tensor::new(&[0u32], &Device::Cpu).unwrap()).unwrap();
        assert_eq!(row.to_vec2::<f32>().unwrap(), [[[-63.5; 16], [56.5; 16]].concat()]);
        let refused = upload(1000.0).unwrap_err().to_string();
        assert!(refused.contains("iq4_nl") && refused.contains("-127000"), "{refused}");
    }

    #[test]
    fn products_in_f16_survive_values_beyond_its_range() {
        let ones: Vec<u8> = (0..2 * 4).flat_map(|_| f16::ONE.to_le_bytes()).collect();
        let weight = CandleWeight::upload(&tensor(Dtype::F16, &[2, 4], ones), &Device::Cpu, true).unwrap();
        let x =
            Tensor::new(&[[1e6f32, -2e5, 3e4, 0.0], [0.0; 4], [1e-3, 1e-3, 0.0, 0.0]], &Device::Cpu).unwrap();
        let product = weight.product(&x).unwrap().to_vec2::<f32>().unwrap();
        for (row, exact) in product.iter().zip([8.3e5, 0.0, 2e-3]) {
            assert!(row.iter().all(|value| (value - exact).abs() <= exact * 1e-3), "{row:?} against {exact}");
        }
    }
}
