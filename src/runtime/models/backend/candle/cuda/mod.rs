//! Operations for which candle has no kernel, or launches several: CUDA C++ in this folder, which the build script compiles to
//! PTX.
//!
//! Each is a candle operation. Its CUDA part launches the kernel; its CPU part is a plain reference that the kernel is compared
//! with, on each GPU before the first model (`check`) and thoroughly by examples/device. Elsewhere than on CUDA devices the
//! backend uses candle's own operations. A row's product by `FusedProduct`, norm and rotation have the same bits beside any
//! other rows; the parts of its attention depend on how many rows there are.

mod check;
#[cfg(feature = "cuda")]
mod launch;

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use half::f16;

pub use check::{Kernel, KernelFault, faults, is_used};
#[cfg(feature = "cuda")]
pub use launch::{memory, open};

use super::{KvShape, RowSpan};
use crate::backend::NO_PAGE;
use llmctl_kernel::attention::{PAGE_TOKENS, ScoreRule, visible};
use llmctl_kernel::{Dtype, dequantize_row};

/// The largest number of rows of a call: of `x` for products, of one span for attention. More are work for matrix units.
const MOST_ROWS: usize = 8;

/// Rows from which a matrix is unpacked to f16 for cuBLAS, where candle's product of int8 is not faster yet (docs/gpu.md has the
/// estimate), and the most bytes of a part that is unpacked at once.
pub const WIDE_ROWS: usize = 256;
pub const WIDENED_BYTES: usize = 64 << 20;

/// The types that the kernels unpack.
const PRODUCTS: [(GgmlDType, Dtype); 7] = [
    (GgmlDType::Q4_0, Dtype::Q4_0),
    (GgmlDType::Q8_0, Dtype::Q8_0),
    (GgmlDType::Q2K, Dtype::Q2K),
    (GgmlDType::Q3K, Dtype::Q3K),
    (GgmlDType::Q4K, Dtype::Q4K),
    (GgmlDType::Q5K, Dtype::Q5K),
    (GgmlDType::Q6K, Dtype::Q6K),
];

/// Returns the type of a matrix that the kernels unpack.
fn unpacked(weight: &QTensor) -> Option<Dtype> {
    PRODUCTS.into_iter().find(|(stored, _)| *stored == weight.dtype()).map(|(_, dtype)| dtype)
}

/// `x . weight^T` of one to eight rows `[rows, in]`, in f32; the weight `[out, in]` is unpacked as it is read. Unlike candle's
/// product it does not round `x`.
#[derive(Debug)]
pub struct FusedProduct<'a> {
    weight: &'a QTensor,
    dtype: Dtype,
}

impl<'a> FusedProduct<'a> {
    /// Returns the product; `None` for other types and numbers of rows than the kernel's.
    pub fn new(weight: &'a QTensor, x: &Tensor) -> Option<Self> {
        let rows = x.dims2().map_or(0, |(rows, _)| rows);
        (1..=MOST_ROWS).contains(&rows).then_some(Self { weight, dtype: unpacked(weight)? })
    }

    /// Returns the kernel of this type.
    pub fn kernel(&self) -> Kernel {
        Kernel::Product(self.dtype)
    }

    /// Computes the product.
    ///
    /// # Errors
    /// Reports widths that differ.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        if x.dim(1)? != self.weight.shape().dims2()?.1 {
            bail!("a product of rows {:?} with a matrix {:?}", x.shape(), self.weight.shape());
        }
        // The kernel reads four values at a time; a column range of a single row may begin anywhere.
        let is_aligned = x.is_contiguous() && x.layout().start_offset().is_multiple_of(4);
        if is_aligned { x.apply_op1_no_bwd(self) } else { x.force_contiguous()?.apply_op1_no_bwd(self) }
    }
}

impl CustomOp1 for FusedProduct<'_> {
    fn name(&self) -> &'static str {
        "fused-product"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, (num_rows, width)) = (floats(storage, layout)?, layout.shape().dims2()?);
        let (num_outs, bytes) = (self.weight.shape().dims2()?.0, self.weight.data()?);
        let mut out = vec![0.0; num_rows * num_outs];
        let mut weights = vec![0.0; width];
        for (index, row) in bytes.chunks_exact(bytes.len() / num_outs).enumerate() {
            dequantize_row(self.dtype, row, &mut weights);
            for (m, x) in x.chunks_exact(width).enumerate() {
                out[m * num_outs + index] = dot(x, &weights);
            }
        }
        Ok((CpuStorage::F32(out), Shape::from((num_rows, num_outs))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        launch::product(self, storage, layout)
    }
}

/// Rows of a matrix as f16, `[rows, in]`, for products with many rows.
#[derive(Debug)]
pub struct Widened<'a> {
    weight: &'a QTensor,
    dtype: Dtype,
    rows: Range<usize>,
}

impl<'a> Widened<'a> {
    /// Returns all rows in parts of at most so many bytes, or of one row; `None` for other types than the kernel's.
    pub fn parts(weight: &'a QTensor, most_bytes: usize) -> Option<Vec<Self>> {
        let ((num_rows, width), dtype) = (weight.shape().dims2().ok()?, unpacked(weight)?);
        let num_parts = num_rows.div_ceil((most_bytes / 2 / width).max(1));
        let part = |part| num_rows * part / num_parts..num_rows * (part + 1) / num_parts;
        Some((0..num_parts).map(|index| Self { weight, dtype, rows: part(index) }).collect())
    }

    /// Returns the kernel of this type.
    pub fn kernel(&self) -> Kernel {
        Kernel::Widen(self.dtype)
    }

    /// Unpacks the rows, on the device of `x`.
    ///
    /// # Errors
    /// Reports a device without memory.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1_no_bwd(self)
    }

    /// Returns where the rows lie in the matrix, in bytes.
    fn bytes(&self) -> Result<Range<usize>> {
        let row_bytes = self.weight.storage_size_in_bytes() / self.weight.shape().dims2()?.0;
        Ok(self.rows.start * row_bytes..self.rows.end * row_bytes)
    }

    fn shape(&self) -> Result<Shape> {
        Ok(Shape::from((self.rows.len(), self.weight.shape().dims2()?.1)))
    }
}

impl CustomOp1 for Widened<'_> {
    fn name(&self) -> &'static str {
        "widen"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = self.shape()?;
        let mut values = vec![0.0; shape.elem_count()];
        dequantize_row(self.dtype, &self.weight.data()?[self.bytes()?], &mut values);
        Ok((CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        launch::widen(self, storage)
    }
}

/// Heads normalised by their root mean square and turned by their positions' angles, or turned only.
#[derive(Debug)]
pub struct NormRope<'a> {
    /// `[head_dim]`, and what is added to the mean square.
    norm: Option<(&'a Tensor, f32)>,
    head_dim: usize,
    /// Cosines and sines, `[rows, half]`: values i and i + half of a head are a pair.
    angles: &'a [Tensor; 2],
}

impl<'a> NormRope<'a> {
    /// Computes `rope(rms_norm(x))` of all heads of `[rows, heads * head_dim]`.
    ///
    /// # Errors
    /// Reports shapes that do not fit together.
    pub fn apply(
        x: &Tensor,
        norm: Option<(&'a Tensor, f32)>,
        head_dim: usize,
        angles: &'a [Tensor; 2],
    ) -> Result<Tensor> {
        let ((rows, width), (angle_rows, half)) = (x.dims2()?, angles[0].dims2()?);
        let fits =
            head_dim > 0 && width.is_multiple_of(head_dim) && 2 * half <= head_dim && rows == angle_rows;
        if !fits || norm.is_some_and(|(weight, _)| weight.dims() != [head_dim]) {
            bail!("rotation of {:?} with angles {:?}, heads of {head_dim}", x.shape(), angles[0].shape());
        }
        x.contiguous()?.apply_op1_no_bwd(&Self { norm, head_dim, angles })
    }
}

impl CustomOp1 for NormRope<'_> {
    fn name(&self) -> &'static str {
        "norm-rope"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let mut out = floats(storage, layout)?.to_vec();
        let (_, width) = layout.shape().dims2()?;
        let [cosines, sines] = [values(&self.angles[0])?, values(&self.angles[1])?];
        let half = self.angles[0].dim(1)?;
        if let Some((weight, eps)) = self.norm {
            let weight = values(weight)?;
            for head in out.chunks_exact_mut(self.head_dim) {
                let scale = 1.0 / (dot(head, head) / self.head_dim as f32 + eps).sqrt();
                head.iter_mut().zip(&weight).for_each(|(value, weight)| *value *= scale * weight);
            }
        }
        for (row, heads) in out.chunks_exact_mut(width).enumerate() {
            for head in heads.chunks_exact_mut(self.head_dim) {
                for i in 0..half {
                    let (a, b, angle) = (head[i], head[i + half], row * half + i);
                    head[i] = a * cosines[angle] - b * sines[angle];
                    head[i + half] = a * sines[angle] + b * cosines[angle];
                }
            }
        }
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        launch::norm_rope(self, storage, layout)
    }
}

/// The pages and positions that the rows of a step see.
#[derive(Debug)]
pub struct DecodeTable {
    /// The layers' window, and whether rows see those of their image.
    pub seen_by: (Option<usize>, bool),
    /// `[rows, most pages of a span]`; unused ones are `NO_PAGE`.
    pages: Tensor,
    /// First position and end, `[rows, 2]`.
    ranges: Tensor,
    /// The largest number of positions of a row.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "sets the grid of a CUDA kernel"))]
    longest: usize,
}

impl DecodeTable {
    /// Uploads the table of a step whose layers look back `window` positions, and see the rows of their image if `is_two_way`.
    pub fn new(spans: &[RowSpan], window: Option<usize>, is_two_way: bool, device: &Device) -> Result<Self> {
        let most = spans.iter().map(|span| span.pages.len()).max().unwrap_or(0);
        let (mut pages, mut ranges, mut longest) = (Vec::new(), Vec::new(), 0);
        for span in spans {
            for position in span.start..span.start + span.rows.len() {
                let seen = visible(position, window, span.seen_besides(position).filter(|_| is_two_way));
                pages.extend_from_slice(&span.pages);
                pages.resize(pages.len() + most - span.pages.len(), NO_PAGE);
                ranges.extend([seen.start as u32, seen.end as u32]); // positions of pages, whose numbers are u32
                longest = longest.max(seen.len());
            }
        }
        let rows = ranges.len() / 2;
        let pages = Tensor::from_vec(pages, (rows, most), device)?;
        let ranges = Tensor::from_vec(ranges, (rows, 2), device)?;
        Ok(Self { seen_by: (window, is_two_way), pages, ranges, longest })
    }
}

/// Attention of few rows of each sequence, `[rows, num_heads * head_dim]`, over pages where they lie.
#[derive(Debug)]
pub struct PagedAttention<'a> {
    /// Keys and values, `[kv_heads, slots, head_dim]`, f16 or f32.
    pub stores: [&'a Tensor; 2],
    pub table: &'a DecodeTable,
    pub num_heads: usize,
    pub rule: ScoreRule,
    /// Scores without a value, `[num_heads]`.
    pub sinks: Option<&'a Tensor>,
}

impl PagedAttention<'_> {
    /// Returns whether the kernel has these heads and numbers of rows.
    pub fn takes(shape: KvShape, spans: &[RowSpan]) -> bool {
        matches!(shape.head_dim, 64 | 128 | 256)
            && shape.value_dim() == shape.head_dim
            && spans.iter().all(|span| span.rows.len() <= MOST_ROWS)
    }

    /// Computes the attention of the rows of the table.
    ///
    /// # Errors
    /// Reports shapes that do not fit together.
    pub fn apply(&self, q: &Tensor) -> Result<Tensor> {
        let (kv_heads, _, head_dim) = self.stores[0].dims3()?;
        let is_shared = kv_heads > 0 && self.num_heads.is_multiple_of(kv_heads);
        let fits = q.dims2()? == (self.table.ranges.dim(0)?, self.num_heads * head_dim);
        if !is_shared || !fits || self.stores[1].dims() != self.stores[0].dims() {
            bail!("attention of rows {:?} over keys {:?}", q.shape(), self.stores[0].shape());
        }
        q.force_contiguous()?.apply_op1_no_bwd(self)
    }

    /// Computes one head of one row, whose visible slots are given.
    fn head(
        &self,
        query: &[f32],
        slots: &[usize],
        [keys, values]: [&[f32]; 2],
        sink: Option<f32>,
    ) -> Vec<f32> {
        let head_dim = query.len();
        let of = |all: &'_ [f32], slot: usize| all[slot * head_dim..][..head_dim].to_vec();
        let score = |slot: &usize| {
            let score = dot(query, &of(keys, *slot)) * self.rule.scale;
            self.rule.softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f32> = slots.iter().map(score).collect();
        let most = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
        let total: f32 = scores.iter().copied().chain(sink).map(|score| (score - most).exp()).sum();
        let mut mixed = vec![0.0; head_dim];
        for (slot, score) in slots.iter().zip(scores) {
            let weight = (score - most).exp() / total;
            mixed.iter_mut().zip(of(values, *slot)).for_each(|(sum, value)| *sum += weight * value);
        }
        mixed
    }
}

impl CustomOp1 for PagedAttention<'_> {
    fn name(&self) -> &'static str {
        "paged-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (kv_heads, num_slots, head_dim) = self.stores[0].dims3()?;
        let [keys, mixed] = [values(self.stores[0])?, values(self.stores[1])?];
        let pages = self.table.pages.to_vec2::<u32>()?;
        let ranges = self.table.ranges.to_vec2::<u32>()?;
        let sinks = self.sinks.map(values).transpose()?;
        let mut out = Vec::with_capacity(layout.shape().elem_count());
        for (index, query) in floats(storage, layout)?.chunks_exact(head_dim).enumerate() {
            let (row, head) = (index / self.num_heads, index % self.num_heads);
            let slot = |position: u32| {
                let position = position as usize;
                pages[row][position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
            };
            let slots: Vec<usize> = (ranges[row][0]..ranges[row][1]).map(slot).collect();
            let start = head / (self.num_heads / kv_heads) * num_slots * head_dim;
            let sink = sinks.as_ref().map(|sinks| sinks[head]);
            out.extend(self.head(query, &slots, [&keys[start..], &mixed[start..]], sink));
        }
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        launch::attention(self, storage, layout)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns the values of a contiguous part of a storage.
fn floats<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => bail!("an operation on values that are not contiguous"),
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
