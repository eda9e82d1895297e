//! Comparison of each kernel with its reference on the GPU that will run it, before the first model: where a kernel is wrong,
//! candle's operations take its place.

use std::fmt;
use std::sync::OnceLock;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor};

use super::{DecodeTable, FusedProduct, MOST_ROWS, NormRope, PRODUCTS, PagedAttention, RowSpan, Widened};
use llmctl_base::notice::Notice;
use llmctl_kernel::Dtype;
use llmctl_kernel::attention::{PAGE_TOKENS, ScoreRule};

/// The largest difference, relative to the largest value: twice the rounding to f16, and far more than that of sums.
const MOST_DIFFERENCE: f32 = 1e-3;

static FAULTS: OnceLock<Vec<KernelFault>> = OnceLock::new();

/// A kernel in its forms for one type or width of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    Product(Dtype),
    Widen(Dtype),
    NormRope,
    Attention(DType, usize),
}

impl fmt::Display for Kernel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Product(dtype) => write!(out, "product_{}", dtype.name()),
            Self::Widen(dtype) => write!(out, "widen_{}", dtype.name()),
            Self::NormRope => write!(out, "norm_rope"),
            Self::Attention(dtype, width) => write!(out, "attend_{}_{width}", dtype.as_str()),
        }
    }
}

/// A kernel that is not used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFault {
    pub kernel: Kernel,
    pub reason: String,
}

impl KernelFault {
    pub fn notice(&self) -> Notice {
        Notice::UnusedKernel { kernel: self.kernel.to_string(), reason: self.reason.clone() }
    }
}

/// Returns whether the device of `x` runs a kernel.
pub fn is_used(kernel: Kernel, x: &Tensor) -> bool {
    let is_right = |faults: &Vec<KernelFault>| faults.iter().all(|fault| fault.kernel != kernel);
    x.device().is_cuda() && FAULTS.get().is_none_or(is_right)
}

/// Compares all kernels on a GPU, once for the process; on other devices there are none.
pub fn faults(device: &Device) -> &'static [KernelFault] {
    if device.is_cuda() { FAULTS.get_or_init(|| compare(device, |_, got| Ok(got))) } else { &[] }
}

/// Returns the kernels whose results on the device differ from the CPU's. `received` sees each result before it is compared.
fn compare(device: &Device, received: impl Fn(Kernel, Tensor) -> Result<Tensor>) -> Vec<KernelFault> {
    let mut faults: Vec<KernelFault> = Vec::new();
    for (kernel, run) in cases() {
        let compared = run(device).and_then(|got| difference(&received(kernel, got)?, &run(&Device::Cpu)?));
        let reason = match compared {
            Ok(found) if found <= MOST_DIFFERENCE => continue,
            Ok(found) => format!("it differs from its reference by {found:.1e} of the largest value"),
            // A backtrace may follow.
            Err(error) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        if faults.iter().all(|fault| fault.kernel != kernel) {
            faults.push(KernelFault { kernel, reason });
        }
    }
    faults
}

type KernelCase = (Kernel, Box<dyn Fn(&Device) -> Result<Tensor>>);

/// Returns a case for each kernel of the folder.
fn cases() -> Vec<KernelCase> {
    let mut cases: Vec<KernelCase> = Vec::new();
    for (stored, dtype) in PRODUCTS {
        for rows in [1, 2, 4, MOST_ROWS] {
            cases.push((Kernel::Product(dtype), Box::new(move |device| product(device, stored, rows))));
        }
        cases.push((Kernel::Widen(dtype), Box::new(move |device| widened(device, stored))));
    }
    for has_norm in [true, false] {
        cases.push((Kernel::NormRope, Box::new(move |device| norm_rope(device, has_norm))));
    }
    for dtype in [DType::F16, DType::F32] {
        for width in [64, 128, 256] {
            let kernel = Kernel::Attention(dtype, width);
            cases.push((kernel, Box::new(move |device| attention(device, dtype, width))));
        }
    }
    cases
}

/// Returns the largest difference relative to the largest expected value; not a number if one is.
fn difference(got: &Tensor, expected: &Tensor) -> Result<f32> {
    let values = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (got, expected) = (values(got)?, values(expected)?);
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let differences = got.iter().zip(&expected).map(|(got, expected)| (got - expected).abs());
    let worse = |worst: f32, one| if one <= worst || worst.is_nan() { worst } else { one };
    Ok(differences.fold(0.0, worse) / largest)
}

/// Returns values between -1 and 1.
fn arbitrary<const N: usize>(shape: [usize; N], device: &Device) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|at| (at * 7919 % 1009) as f32 / 504.0 - 1.0).collect();
    Tensor::from_vec(values, &shape[..], device)
}

fn matrix(device: &Device, dtype: GgmlDType) -> Result<QTensor> {
    let shape = [34, 512];
    let bytes = QTensor::quantize(&arbitrary(shape, &Device::Cpu)?, dtype)?.data()?.into_owned();
    QTensor::new(QStorage::from_data(bytes.into(), device, dtype)?, &shape[..])
}

fn product(device: &Device, dtype: GgmlDType, rows: usize) -> Result<Tensor> {
    let (weight, x) = (matrix(device, dtype)?, arbitrary([rows, 512], device)?);
    match FusedProduct::new(&weight, &x) {
        Some(product) => product.apply(&x),
        None => candle_core::bail!("no product of {dtype:?}"),
    }
}

fn widened(device: &Device, dtype: GgmlDType) -> Result<Tensor> {
    let (weight, x) = (matrix(device, dtype)?, arbitrary([1, 1], device)?);
    let parts = Widened::parts(&weight, 2 * 512 * 9).unwrap_or_default(); // four, of eight and nine rows
    Tensor::cat(&parts.iter().map(|part| part.apply(&x)).collect::<Result<Vec<_>>>()?, 0)
}

fn norm_rope(device: &Device, has_norm: bool) -> Result<Tensor> {
    let (x, weight) = (arbitrary([5, 3 * 64], device)?, arbitrary([64], device)?);
    let angles = [arbitrary([5, 16], device)?, (arbitrary([5, 16], device)? + 0.3)?];
    NormRope::apply(&x, has_norm.then_some((&weight, 1e-6)), 64, &angles)
}

/// Two sequences whose pages are not in order, the first with enough tokens for several parts.
fn attention(device: &Device, dtype: DType, width: usize) -> Result<Tensor> {
    let (pages, num_heads) = (10, 4);
    let span = |rows, start, pages| RowSpan { rows, start, num_drafted: 0, pages, seen_besides: Vec::new() };
    let spans = [span(0..1, 290, (0..pages).rev().collect()), span(1..3, 5, vec![3])];
    let store = |device| arbitrary([2, pages as usize * PAGE_TOKENS, width], device)?.to_dtype(dtype);
    let (keys, values) = (store(device)?, (store(device)? * 0.5)?);
    let table = DecodeTable::new(&spans, None, false, device)?;
    let rule = ScoreRule { scale: 0.125, softcap: None };
    let op = PagedAttention { stores: [&keys, &values], table: &table, num_heads, rule, sinks: None };
    op.apply(&arbitrary([3, num_heads * width], device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_is_wrong_or_fails_is_found_and_no_other() {
        assert_eq!(compare(&Device::Cpu, |_, got| Ok(got)), []);
        let broken = |kernel, got: Tensor| match kernel {
            Kernel::Widen(Dtype::Q4K) => got * 1.5,
            Kernel::Attention(DType::F16, 64) => {
                Tensor::cat(&[(got.narrow(0, 0, 1)? * f64::NAN)?, got.narrow(0, 1, 2)?], 0)
            }
            Kernel::NormRope => candle_core::bail!("no kernel image"),
            _ => Ok(got),
        };
        let found: Vec<String> = compare(&Device::Cpu, broken)
            .iter()
            .map(|KernelFault { kernel, reason }| format!("{kernel}: {reason}"))
            .collect();
        assert_eq!(
            found,
            [
                "widen_q4_k: it differs from its reference by 5.0e-1 of the largest value",
                "norm_rope: no kernel image",
                "attend_f16_64: it differs from its reference by NaN of the largest value",
            ]
        );
    }
}
