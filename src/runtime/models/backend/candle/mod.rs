//! The candle backend: buffers, weights and KV are candle tensors, so one code path serves CUDA, Metal and,
//! for tests, the CPU.
//!
//! Invariant: the tensor in a buffer is `[rows, width]`, f32 and contiguous, as candle's fused kernels
//! require. Differs from the CPU backend in two ways, both due to candle. Rows agree between batches and
//! chunks to rounding, not bit for bit, because its products choose their order of summation by size; and a
//! product with a quantised matrix also rounds its input to 8 bits per block. Knows nothing of models;
//! candle's errors become [`Error::Backend`].

mod attention;
pub mod cuda;
mod heads;
mod kv;
mod latent;
mod ops;
mod recurrent;
mod step;
mod weight;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Tensor};

use super::{
    Activation, AttentionSpec, Backend, ConvSpec, DeltaShape, DeltaSpec, IndexerSpec, KvLayout, KvShape,
    KvType, LowRankChange, PageId, Product, Reach, Recurrence, RowSpan, SelectedKeys, SsmShape, SsmSpec,
    TextHeads,
};
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_base::error::{Error, LoadError, Result};

pub use kv::CandleKv;
pub use step::GROUP_VALUES;
pub use weight::{CandleWeight, f16_product, is_widened};

/// The device of a [`Candle`] backend; the number distinguishes several of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Cuda(usize),
    Metal(usize),
}

/// Opens a device, once for all of a process: candle keeps scratch memory for each device that was ever opened.
///
/// # Errors
/// [`Error::InvalidParameter`] if this build does not support the kind; [`Error::Backend`] if there is no such
/// device.
pub fn open_device(kind: DeviceKind) -> Result<Device> {
    static OPENED: Mutex<Vec<(DeviceKind, Device)>> = Mutex::new(Vec::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = opened.iter().find(|(known, _)| *known == kind) {
        return Ok(device.clone());
    }
    let device = open(kind)?;
    opened.push((kind, device.clone()));
    Ok(device)
}

fn open(kind: DeviceKind) -> Result<Device> {
    let missing =
        |message: &str| Err(Error::InvalidParameter { name: "device", message: message.to_owned() });
    match kind {
        DeviceKind::Cpu => Ok(Device::Cpu),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda(index) => cuda::open(index).map_err(backend_error),
        #[cfg(not(feature = "cuda"))]
        DeviceKind::Cuda(_) => missing("this build has no CUDA support; build it with `--features cuda`"),
        DeviceKind::Metal(_) if !cfg!(feature = "metal") => {
            missing("this build has no Metal support; build it with `--features metal`")
        }
        DeviceKind::Metal(index) => Device::new_metal(index).map_err(backend_error),
    }
}

/// Returns the bytes of a GPU's own memory and how many of them are free; on Metal, of the memory that the system recommends to
/// use. `None` for a device that computes in the host's.
///
/// # Errors
/// [`Error::Backend`] with the driver's reason.
pub fn device_memory(device: &Device) -> Result<Option<[u64; 2]>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::memory(device).map(Some).map_err(backend_error),
        #[cfg(feature = "metal")]
        Device::Metal(device) => {
            let device = device.metal_device();
            let (total, used) = (device.recommended_max_working_set_size(), device.current_allocated_size());
            Ok(Some([total as u64, total.saturating_sub(used) as u64]))
        }
        _ => Ok(None),
    }
}

fn backend_error(error: candle_core::Error) -> Error {
    Error::Backend(error.to_string())
}

/// The candle backend on one device.
#[derive(Debug, Clone)]
pub struct Candle {
    device: Device,
    halves: bool,
}

impl Candle {
    /// Creates a backend on `device`.
    ///
    /// # Errors
    /// [`Error::Backend`] if the device fails a trivial operation.
    pub fn new(device: Device) -> Result<Self> {
        // Probes the device: a GPU that the driver lists but cannot use fails here, before gigabytes are uploaded to
        // it.
        let probe = Tensor::zeros(1, candle_core::DType::F32, &device).and_then(|zero| zero.to_vec1::<f32>());
        probe.map_err(backend_error)?;
        cuda::faults(&device);
        let halves = !device.is_cpu();
        Ok(Self { device, halves })
    }

    /// Sets whether f16 and bf16 matrices keep their type (the default on a GPU) or are widened to f32 at load (on
    /// the CPU, where candle has no products of bf16 and slow ones of f16).
    ///
    /// A product with a matrix of two-byte floats rounds its input and its result to that type and accumulates in f32.
    pub fn keep_halves(self, halves: bool) -> Self {
        Self { halves, ..self }
    }

    fn row_numbers(&self, rows: impl Iterator<Item = usize>) -> candle_core::Result<Tensor> {
        let rows: Vec<u32> = rows.map(|row| row as u32).collect(); // a step has fewer than 2^32 rows
        Tensor::new(rows, &self.device)
    }
}

/// `[rows, width]` activations; `None` before the first operation that writes them.
#[derive(Debug, Clone, Default)]
pub struct CandleBuffer(Option<Tensor>);

impl CandleBuffer {
    fn get(&self) -> candle_core::Result<&Tensor> {
        self.0.as_ref().ok_or_else(|| candle_core::Error::msg("a buffer is read before it is written"))
    }

    fn fill(&mut self, tensor: candle_core::Result<Tensor>) -> Result<()> {
        self.0 = Some(tensor.map_err(backend_error)?);
        Ok(())
    }

    fn change(&mut self, made: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>) -> Result<()> {
        let tensor = self.get().and_then(made);
        self.fill(tensor)
    }
}

/// Cosines and sines of a step, `[rows, dim / 2]` each; `None` before the first step.
#[derive(Debug, Default)]
pub struct CandleAngles(Option<[Tensor; 2]>);

impl CandleAngles {
    fn get(&self) -> candle_core::Result<&[Tensor; 2]> {
        self.0.as_ref().ok_or_else(|| candle_core::Error::msg("angles are read before they are uploaded"))
    }
}

impl Backend for Candle {
    type Buffer = CandleBuffer;
    type Weight = CandleWeight;
    type HeadWeights = CandleWeight;
    type LowRank = ([CandleWeight; 2], f32);
    type Vector = Tensor;
    type Angles = CandleAngles;
    type Kv = CandleKv;

    fn weight(&self, tensor: &HostTensor) -> Result<CandleWeight, LoadError> {
        CandleWeight::upload(tensor, &self.device, self.halves)
    }

    fn head_weights(&self, weights: Vec<CandleWeight>) -> Result<CandleWeight, LoadError> {
        CandleWeight::of_heads(&weights, self.halves).map_err(|error| LoadError::Device(error.to_string()))
    }

    fn low_rank(&self, [down, up]: [&HostTensor; 2], factor: f32) -> Result<Self::LowRank, LoadError> {
        Ok(([self.weight(down)?, self.weight(up)?], factor))
    }

    fn vector(&self, values: Vec<f32>) -> Result<Tensor, LoadError> {
        let len = values.len();
        Tensor::from_vec(values, len, &self.device).map_err(|error| LoadError::Tensor {
            tensor: format!("vector of {len}"),
            message: error.to_string(),
        })
    }

    fn kv(&self, layout: &KvLayout, kv_type: KvType) -> Result<CandleKv, LoadError> {
        CandleKv::new(&self.device, layout, kv_type).map_err(|error| LoadError::Device(error.to_string()))
    }

    fn buffer(&self) -> CandleBuffer {
        CandleBuffer::default()
    }

    fn embed(&self, table: &CandleWeight, tokens: &[u32], scale: f32, out: &mut CandleBuffer) -> Result<()> {
        // Checked here, because a GPU reads past the end of the table.
        if let Some(token) = tokens.iter().find(|token| **token as usize >= table.num_rows()) {
            return Err(Error::Backend(format!("token id {token} has no embedding")));
        }
        let rows = Tensor::new(tokens, &self.device).and_then(|tokens| table.rows(&tokens));
        out.fill(rows.and_then(|rows| ops::scaled(&rows, scale)))
    }

    fn rms_norm(&self, x: &CandleBuffer, weight: &Tensor, eps: f32, out: &mut CandleBuffer) -> Result<()> {
        out.fill(x.get().and_then(|x| ops::rms_norm(x, weight, eps)))
    }

    fn rms_norm_groups(
        &self,
        x: &CandleBuffer,
        weight: &Tensor,
        groups: usize,
        eps: f32,
        out: &mut CandleBuffer,
    ) -> Result<()> {
        let normed = |x: &Tensor| {
            let ones = Tensor::ones(x.dim(1)? / groups, candle_core::DType::F32, &self.device)?;
            ops::rms_norm(x, &ones, eps)?.broadcast_mul(weight)
        };
        out.fill(x.get().and_then(normed))
    }

    fn matmul_heads(&self, x: &CandleBuffer, weights: &CandleWeight, out: &mut CandleBuffer) -> Result<()> {
        out.fill(x.get().and_then(|x| latent::product_by_head(x, weights)))
    }

    fn join_heads(&self, parts: &[&CandleBuffer], num_heads: usize, out: &mut CandleBuffer) -> Result<()> {
        let parts: candle_core::Result<Vec<_>> = parts.iter().map(|part| part.get()).collect();
        out.fill(parts.and_then(|parts| latent::join_heads(&parts, num_heads)))
    }

    fn gate_groups(&self, [x, y]: [&CandleBuffer; 2], groups: usize, out: &mut CandleBuffer) -> Result<()> {
        out.fill(x.get().and_then(|x| ops::gate_groups(x, y.get()?, groups)))
    }

    fn matmul_each(&self, x: &CandleBuffer, products: &mut [Product<'_, Self>]) -> Result<()> {
        for Product { weight, bias, changes, out } in products {
            let product = x.get().and_then(|x| weight.product(x));
            out.fill(product.and_then(|product| match bias {
                Some(bias) => product.broadcast_add(bias),
                None => Ok(product),
            }))?;
            for LowRankChange { matrices: ([down, up], factor), to } in changes {
                let rows = self.row_numbers(to.rows.iter().copied());
                let change = rows.and_then(|rows| {
                    let inner = down.product(&x.get()?.index_select(&rows, 0)?)?;
                    ops::scaled(&up.product(&inner)?, *factor)
                });
                let change = CandleBuffer(Some(change.map_err(backend_error)?));
                self.add_rows(out, &change, to.rows, to.weights)?;
            }
        }
        Ok(())
    }

    fn angles(&self, cos: &[f32], sin: &[f32], rows: usize, out: &mut CandleAngles) -> Result<()> {
        let half = cos.len().checked_div(rows).unwrap_or(0);
        let upload = |values: &[f32]| Tensor::from_slice(values, (rows, half), &self.device);
        let pair = upload(cos).and_then(|cos| Ok([cos, upload(sin)?]));
        out.0 = Some(pair.map_err(backend_error)?);
        Ok(())
    }

    fn rope(&self, x: &mut CandleBuffer, head_dim: usize, angles: &CandleAngles) -> Result<()> {
        x.change(|x| angles.get().and_then(|angles| ops::rope(x, head_dim, angles)))
    }

    fn norm_rope(
        &self,
        x: &CandleBuffer,
        (weight, eps): (&Tensor, f32),
        head_dim: usize,
        angles: &CandleAngles,
        out: &mut CandleBuffer,
    ) -> Result<()> {
        let pair = x.get().and_then(|x| Ok((x, angles.get()?)));
        out.fill(pair.and_then(|(x, angles)| ops::norm_rope(x, (weight, eps), head_dim, angles)))
    }

    fn store_kv(
        &self,
        kv: &mut CandleKv,
        store: usize,
        k: &CandleBuffer,
        v: &CandleBuffer,
        spans: &[RowSpan],
    ) -> Result<()> {
        let stored = k.get().and_then(|k| kv.write(store, [k, v.get()?], spans));
        stored.map_err(backend_error)
    }

    fn copy_page(&self, kv: &mut CandleKv, group: usize, from: PageId, to: PageId) -> Result<()> {
        kv.copy_page(group, from, to).map_err(backend_error)
    }

    /// Keeps the memory for the page's next owner: pages are parts of one tensor per layer.
    fn free_page(&self, _: &mut CandleKv, _: usize, _: PageId) {}

    fn export_page(&self, kv: &CandleKv, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        kv.export_page(group, page, out).map_err(backend_error)
    }

    fn import_page(&self, kv: &mut CandleKv, group: usize, page: PageId, bytes: SharedBytes) -> Result<()> {
        kv.import_page(group, page, &bytes).map_err(backend_error)
    }

    fn attend(
        &self,
        kv: &CandleKv,
        spec: &AttentionSpec<'_, Tensor>,
        q: &CandleBuffer,
        spans: &[RowSpan],
        out: &mut CandleBuffer,
    ) -> Result<()> {
        out.fill(q.get().and_then(|q| attention::attend(kv, spec, q, spans)))
    }

    fn keep_drafted(&self, kv: &mut CandleKv, group: usize, page: PageId, count: usize) -> Result<()> {
        recurrent::keep_drafted(kv, group, page, count).map_err(backend_error)
    }

    fn select_keys(
        &self,
        kv: &CandleKv,
        spec: &IndexerSpec,
        [q, weights]: [&CandleBuffer; 2],
        spans: &[RowSpan],
        out: &mut SelectedKeys,
    ) -> Result<()> {
        let weights = if spec.is_per_head { q } else { weights };
        let inputs = q.get().and_then(|q| Ok([q, weights.get()?]));
        inputs.and_then(|inputs| latent::select_keys(kv, *spec, inputs, spans, out)).map_err(backend_error)
    }

    fn recur(
        &self,
        kv: &mut CandleKv,
        recurrence: &Recurrence<'_, Self>,
        spans: &[RowSpan],
        out: &mut CandleBuffer,
    ) -> Result<()> {
        out.fill(recurrent::recur(kv, recurrence, spans))
    }

    fn gated(&self, activation: Activation, gate: &mut CandleBuffer, up: &CandleBuffer) -> Result<()> {
        gate.change(|gate| ops::gated(activation, gate, up.get()?))
    }

    fn activate(&self, activation: Activation, x: &mut CandleBuffer) -> Result<()> {
        x.change(|x| ops::activated(activation, x))
    }

    fn add_scaled(&self, x: &mut CandleBuffer, y: &CandleBuffer, scale: f32) -> Result<()> {
        x.change(|x| x + ops::scaled(y.get()?, scale)?)
    }

    fn scale(&self, x: &mut CandleBuffer, scale: f32) -> Result<()> {
        x.change(|x| ops::scaled(x, scale))
    }

    fn scale_rows(&self, x: &mut CandleBuffer, factors: &[f32]) -> Result<()> {
        x.change(|x| x.broadcast_mul(&Tensor::new(factors, &self.device)?.unsqueeze(1)?))
    }

    fn scale_heads(&self, x: &mut CandleBuffer, factors: &CandleBuffer) -> Result<()> {
        x.change(|x| {
            let ((rows, width), factors) = (x.dims2()?, factors.get()?);
            let heads = factors.dim(1)?;
            x.reshape((rows, heads, width / heads))?
                .broadcast_mul(&factors.unsqueeze(2)?)?
                .reshape((rows, width))
        })
    }

    fn layer_norm(
        &self,
        x: &CandleBuffer,
        [weight, bias]: [&Tensor; 2],
        eps: f32,
        out: &mut CandleBuffer,
    ) -> Result<()> {
        out.fill(x.get().and_then(|x| candle_nn::ops::layer_norm(x, weight, bias, eps)))
    }

    fn attend_texts(
        &self,
        heads: &TextHeads,
        [q, k, v]: [&CandleBuffer; 3],
        texts: &[Range<usize>],
        out: &mut CandleBuffer,
    ) -> Result<()> {
        let qkv = q.get().and_then(|q| Ok([q, k.get()?, v.get()?]));
        out.fill(qkv.and_then(|qkv| attention::attend_texts(heads, qkv, texts)))
    }

    fn multiply(&self, x: &mut CandleBuffer, vector: &Tensor) -> Result<()> {
        x.change(|x| x.broadcast_mul(vector))
    }

    fn match_magnitude(&self, x: &mut CandleBuffer, reference: &CandleBuffer, least: f32) -> Result<()> {
        x.change(|x| ops::match_magnitude(x, reference.get()?, least))
    }

    fn cut_off(&self, x: &mut CandleBuffer, deviations: f32) -> Result<()> {
        x.change(|x| ops::cut_off(x, deviations))
    }

    fn select_columns(&self, x: &CandleBuffer, columns: Range<usize>, out: &mut CandleBuffer) -> Result<()> {
        out.fill(x.get().and_then(|x| x.narrow(1, columns.start, columns.len())?.contiguous()))
    }

    fn select_rows(&self, x: &CandleBuffer, rows: &[usize], out: &mut CandleBuffer) -> Result<()> {
        let rows = self.row_numbers(rows.iter().copied());
        out.fill(x.get().and_then(|x| x.index_select(&rows?, 0)))
    }

    fn zeros(&self, rows: usize, width: usize, out: &mut CandleBuffer) -> Result<()> {
        out.fill(Tensor::zeros((rows, width), candle_core::DType::F32, &self.device))
    }

    fn add_rows(
        &self,
        x: &mut CandleBuffer,
        y: &CandleBuffer,
        rows: &[usize],
        weights: &[f32],
    ) -> Result<()> {
        x.change(|x| {
            let weights = Tensor::new(weights, &self.device)?.unsqueeze(1)?;
            x.index_add(&self.row_numbers(rows.iter().copied())?, &y.get()?.broadcast_mul(&weights)?, 0)
        })
    }

    fn read(&self, x: &mut CandleBuffer, out: &mut Vec<f32>) -> Result<()> {
        let values = x.get().and_then(|x| x.flatten_all()?.to_vec1());
        *out = values.map_err(backend_error)?;
        Ok(())
    }

    fn write(&self, values: &[f32], width: usize, out: &mut CandleBuffer) -> Result<()> {
        out.fill(Tensor::from_slice(values, (values.len() / width, width), &self.device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_the_build_lacks_is_refused_with_the_feature_that_adds_it() {
        assert!(open_device(DeviceKind::Cpu).unwrap().is_cpu());
        for (kind, feature, built) in [
            (DeviceKind::Cuda(0), "--features cuda", cfg!(feature = "cuda")),
            (DeviceKind::Metal(0), "--features metal", cfg!(feature = "metal")),
        ] {
            if !built {
                let error = open_device(kind).unwrap_err().to_string();
                assert!(error.contains(feature), "{error}");
            }
        }
    }

    #[test]
    fn what_cannot_be_computed_is_an_error() {
        let candle = Candle::new(Device::Cpu).unwrap();
        let (mut unwritten, mut out) = (candle.buffer(), candle.buffer());
        let mut read = Vec::new();
        assert!(candle.read(&mut unwritten, &mut read).is_err());
        let bytes: Vec<u8> = [1.0f32; 8].iter().flat_map(|value| value.to_le_bytes()).collect();
        let table = HostTensor::new(llmctl_kernel::Dtype::F32, vec![2, 4], bytes.into()).unwrap();
        let table = candle.weight(&table).unwrap();
        assert!(candle.embed(&table, &[2], 1.0, &mut out).is_err());
        candle.embed(&table, &[1], 2.0, &mut out).unwrap();
        candle.read(&mut out, &mut read).unwrap();
        assert_eq!(read, [2.0; 4]);
        let too_long = candle.vector(vec![1.0; 3]).unwrap();
        assert!(candle.rms_norm(&out, &too_long, 1e-6, &mut candle.buffer()).is_err());
        let mut angles = CandleAngles::default();
        assert!(candle.rope(&mut out, 4, &angles).is_err());
        candle.angles(&[1.0; 3], &[0.0; 3], 1, &mut angles).unwrap();
        assert!(candle.rope(&mut out, 4, &angles).is_err());
    }
}
