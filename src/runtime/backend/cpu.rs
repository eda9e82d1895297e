//! The CPU backend: our kernels over f32 activations, on a pool of threads.
//!
//! Quantised matrices are packed once, when they are loaded, and multiplied with activations quantised to 8 bits;
//! plain floats stay as they lie in the file and are widened row by row, in f32 arithmetic throughout.
//! Work is split over outputs, never inside a reduction, so the number of threads does not show in the result.

use std::cell::RefCell;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::{Activation, AttentionSpec, Backend, KvLayout, KvShape, KvType, LayerKv, Span};
use super::{PAGE_TOKENS, PageId};
use crate::runtime::error::{Error, LoadError, Result};
use crate::runtime::kernel::gemm::{self, Activations, Packed};
use crate::runtime::kernel::matmul::{self, Shape};
use crate::runtime::kernel::pool::Pool;
use crate::runtime::kernel::{Dtype, Isa, attention, dot, isa, math, norm, quant};
use crate::runtime::tensor::HostTensor;

/// Weight rows that one task widens and multiplies: small enough for the second-level cache.
const ROWS_PER_TASK: usize = 16;

/// Below this many multiplications a product is not worth waking other threads for.
const SERIAL_LIMIT: usize = 1 << 15;

/// The CPU backend with its own threads.
pub struct Cpu {
    isa: Isa,
    pool: Pool,
    scratch: RefCell<Scratch>,
}

/// Memory of operations, kept from step to step.
#[derive(Default)]
struct Scratch {
    quantized: Activations,
    /// Results in the order in which tasks write them.
    reordered: Vec<f32>,
}

impl Cpu {
    /// A backend that computes on `num_threads` threads, the calling one included.
    ///
    /// # Errors
    /// [`Error::Backend`] when the threads cannot be started.
    pub fn new(num_threads: usize) -> Result<Self> {
        let pool = Pool::new(num_threads).map_err(|error| Error::Backend(error.to_string()))?;
        Ok(Self { isa: isa::isa(), pool, scratch: RefCell::default() })
    }

    /// Runs `task` on every chunk of `out`, on all threads when the work is worth it.
    fn for_chunks(
        &self,
        out: &mut [f32],
        chunk: usize,
        work: usize,
        task: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        if work < SERIAL_LIMIT {
            out.chunks_mut(chunk).enumerate().for_each(|(index, out)| task(index, out));
        } else {
            self.pool.chunks_mut(out, chunk, task);
        }
    }

    /// `out = x . weight^T` in f32.
    fn matmul_plain(&self, x: &CpuBuffer, weight: &HostTensor, out: &mut [f32]) {
        let ((n, k), m, isa) = (weight.rows_cols(), x.num_rows(), self.isa);
        let task = |index: usize, out: &mut [f32]| {
            let rows = out.len() / m;
            weight_block(isa, weight, index * ROWS_PER_TASK, rows, Shape { k, m }, &x.values, out);
        };
        if m == 1 {
            return self.for_chunks(out, ROWS_PER_TASK, n * k, task);
        }
        let transposed = &mut self.scratch.borrow_mut().reordered;
        transposed.resize(n * m, 0.0);
        self.for_chunks(transposed, ROWS_PER_TASK * m, n * k * m, task);
        transpose(transposed, m, out);
    }
}

/// A matrix `[out, in]`.
pub enum CpuWeight {
    /// Floats, or a table that only serves lookups: as in the file, mapped.
    Plain(HostTensor),
    /// Quantised, in the kernels' own layout; the file's bytes are not kept.
    Packed(Packed),
}

impl CpuWeight {
    /// Rows (outputs) and columns (inputs).
    fn rows_cols(&self) -> (usize, usize) {
        match self {
            CpuWeight::Plain(tensor) => tensor.rows_cols(),
            CpuWeight::Packed(packed) => (packed.rows(), packed.cols()),
        }
    }
}

/// `[rows, width]` activations, row-major.
#[derive(Debug, Clone, Default)]
pub struct CpuBuffer {
    values: Vec<f32>,
    width: usize,
}

impl CpuBuffer {
    fn num_rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.width..(index + 1) * self.width]
    }

    fn resize(&mut self, rows: usize, width: usize) {
        self.width = width;
        self.values.resize(rows * width, 0.0);
    }
}

/// Cosines and sines of a step, `[rows, half]` each.
#[derive(Debug)]
pub struct CpuAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

/// Pages by group; a page's memory is made when it is first written and stays for its next owner, unless it is freed.
#[derive(Debug)]
pub struct CpuKv {
    kv_type: KvType,
    layers: Vec<LayerPlace>,
    groups: Vec<GroupKv>,
}

/// Pages of one group.
#[derive(Debug, Default)]
struct GroupKv {
    /// Values per page.
    page_len: usize,
    pages: Vec<Page>,
}

/// Where a layer's keys begin in a page of its group; its values follow. Both are `[kv_head][token][head_dim]`.
#[derive(Debug, Clone, Copy)]
struct LayerPlace {
    group: usize,
    offset: usize,
    shape: KvShape,
}

#[derive(Debug, Clone, Default)]
enum Page {
    #[default]
    Unused,
    F32(Box<[f32]>),
    F16(Box<[f16]>),
}

/// Which half of a layer's place.
#[derive(Debug, Clone, Copy)]
enum Part {
    Keys,
    Values,
}

impl CpuKv {
    fn page_mut(&mut self, group: usize, id: PageId) -> &mut Page {
        let GroupKv { page_len, pages } = &mut self.groups[group];
        let index = id as usize;
        if index >= pages.len() {
            pages.resize(index + 1, Page::Unused);
        }
        let page = &mut pages[index];
        if matches!(page, Page::Unused) {
            *page = match self.kv_type {
                KvType::F32 => Page::F32(vec![0.0; *page_len].into()),
                KvType::F16 => Page::F16(vec![f16::ZERO; *page_len].into()),
            };
        }
        page
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.page_mut(group, from.max(to));
        let pair = self.groups[group].pages.get_disjoint_mut([from as usize, to as usize]);
        let [from, to] = pair.expect("two different pages, both below the larger");
        match (&*from, &mut *to) {
            (Page::F32(from), Page::F32(to)) => to.copy_from_slice(from),
            (Page::F16(from), Page::F16(to)) => to.copy_from_slice(from),
            _ => *to = from.clone(), // the memory of one of them is not made yet
        }
    }

    fn offset(&self, layer: usize, part: Part, head: usize, token: usize) -> usize {
        let LayerPlace { offset, shape, .. } = self.layers[layer];
        let part = match part {
            Part::Keys => 0,
            Part::Values => shape.num_kv_heads,
        };
        offset + ((part + head) * PAGE_TOKENS + token) * shape.head_dim
    }

    fn write(&mut self, layer: usize, part: Part, slot: (PageId, usize), row: &[f32]) {
        let LayerPlace { group, shape: KvShape { head_dim, .. }, .. } = self.layers[layer];
        for (head, values) in row.chunks_exact(head_dim).enumerate() {
            let at = self.offset(layer, part, head, slot.1);
            match self.page_mut(group, slot.0) {
                Page::F32(page) => page[at..at + head_dim].copy_from_slice(values),
                Page::F16(page) => page[at..at + head_dim].convert_from_f32_slice(values),
                Page::Unused => unreachable!("page_mut makes the memory"),
            }
        }
    }

    /// Appends one head's rows of tokens `from..to` of a sequence to `out`, as f32.
    fn gather(&self, place: (usize, Part, usize), span: &Span, from: usize, to: usize, out: &mut Vec<f32>) {
        let (layer, part, head) = place;
        let LayerPlace { group, shape: KvShape { head_dim, .. }, .. } = self.layers[layer];
        let mut position = from;
        while position < to {
            let (id, token) = span.slot(position);
            let count = (PAGE_TOKENS - token).min(to - position);
            let at = self.offset(layer, part, head, token);
            let range = at..at + count * head_dim;
            match &self.groups[group].pages[id as usize] {
                Page::F32(page) => out.extend_from_slice(&page[range]),
                Page::F16(page) => {
                    let start = out.len();
                    out.resize(start + count * head_dim, 0.0);
                    page[range].convert_to_f32_slice(&mut out[start..]);
                }
                Page::Unused => unreachable!("a covered position has been written"),
            }
            position += count;
        }
    }
}

/// Scratch of one attention task.
#[derive(Default)]
struct AttentionScratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
}

thread_local! {
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static ATTENTION: RefCell<AttentionScratch> = RefCell::default();
}

impl Backend for Cpu {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type Vector = Vec<f32>;
    type Angles = CpuAngles;
    type Kv = CpuKv;

    fn weight(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        let (rows, cols) = tensor.rows_cols();
        match Packed::pack(tensor.dtype, [rows, cols], &tensor.bytes, &self.pool) {
            Ok(Some(packed)) => Ok(CpuWeight::Packed(packed)),
            Ok(None) => Ok(CpuWeight::Plain(tensor.clone())),
            Err(error) => Err(LoadError::Tensor {
                tensor: format!("{} {:?}", tensor.dtype.name(), tensor.shape),
                message: format!("no memory to pack it: {error}"),
            }),
        }
    }

    fn table(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        Ok(CpuWeight::Plain(tensor.clone()))
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, LoadError> {
        Ok(values)
    }

    fn kv(&self, layout: &KvLayout, kv_type: KvType) -> CpuKv {
        let mut groups: Vec<_> = (0..layout.num_groups).map(|_| GroupKv::default()).collect();
        let place = |&LayerKv { shape, group }: &LayerKv| {
            let page_len = &mut groups[group].page_len;
            let place = LayerPlace { group, offset: *page_len, shape };
            *page_len += 2 * shape.num_kv_heads * shape.head_dim * PAGE_TOKENS;
            place
        };
        let layers = layout.layers.iter().map(place).collect();
        CpuKv { kv_type, layers, groups }
    }

    fn buffer(&self) -> CpuBuffer {
        CpuBuffer::default()
    }

    fn embed(&self, table: &CpuWeight, tokens: &[u32], scale: f32, out: &mut CpuBuffer) -> Result<()> {
        let (rows, width) = table.rows_cols();
        out.resize(tokens.len(), width);
        for (out, &token) in out.values.chunks_exact_mut(width).zip(tokens) {
            if token as usize >= rows {
                return Err(Error::Backend(format!("token id {token} has no embedding")));
            }
            match table {
                CpuWeight::Plain(table) => {
                    quant::dequantize_row(table.dtype, row_bytes(table, token as usize, 1), out);
                }
                CpuWeight::Packed(table) => table.unpack_row(token as usize, out),
            }
            if scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }

    fn rms_norm(&self, x: &CpuBuffer, weight: &Vec<f32>, eps: f32, out: &mut CpuBuffer) -> Result<()> {
        out.resize(x.num_rows(), x.width);
        let (len, isa) = (weight.len(), self.isa);
        self.for_chunks(&mut out.values, x.width, x.values.len(), |row, out| {
            for (x, out) in x.row(row).chunks_exact(len).zip(out.chunks_exact_mut(len)) {
                norm::rms_norm(isa, x, weight, eps, out);
            }
        });
        Ok(())
    }

    fn matmul(
        &self,
        x: &CpuBuffer,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let (n, k) = weight.rows_cols();
        let m = x.num_rows();
        if x.width != k {
            return Err(Error::Backend(format!("product of rows of {} with rows of {k}", x.width)));
        }
        out.resize(m, n);
        match weight {
            CpuWeight::Plain(weight) => self.matmul_plain(x, weight, &mut out.values),
            CpuWeight::Packed(weight) => {
                let quantized = &mut self.scratch.borrow_mut().quantized;
                quantized.quantize(self.isa, &x.values, k, &self.pool);
                gemm::matmul(self.isa, weight, quantized, &mut out.values, &self.pool);
            }
        }
        if let Some(bias) = bias {
            for row in out.values.chunks_exact_mut(n) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
        Ok(())
    }

    fn angles(&self, cos: &[f32], sin: &[f32], rows: usize) -> Result<CpuAngles> {
        Ok(CpuAngles { cos: cos.to_vec(), sin: sin.to_vec(), half: cos.len() / rows.max(1) })
    }

    fn rope(&self, x: &mut CpuBuffer, head_dim: usize, angles: &CpuAngles) -> Result<()> {
        let (width, half) = (x.width, angles.half);
        for (row, values) in x.values.chunks_exact_mut(width).enumerate() {
            let range = row * half..(row + 1) * half;
            let (cos, sin) = (&angles.cos[range.clone()], &angles.sin[range]);
            for head in values.chunks_exact_mut(head_dim) {
                let (low, high) = head[..2 * half].split_at_mut(half);
                norm::rotate(self.isa, low, high, cos, sin);
            }
        }
        Ok(())
    }

    fn store_kv(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        k: &CpuBuffer,
        v: &CpuBuffer,
        spans: &[Span],
    ) -> Result<()> {
        for span in spans {
            for (index, row) in span.rows.clone().enumerate() {
                let slot = span.slot(span.start + index);
                kv.write(layer, Part::Keys, slot, k.row(row));
                kv.write(layer, Part::Values, slot, v.row(row));
            }
        }
        Ok(())
    }

    fn copy_page(&self, kv: &mut CpuKv, group: usize, from: PageId, to: PageId) -> Result<()> {
        kv.copy_page(group, from, to);
        Ok(())
    }

    fn free_page(&self, kv: &mut CpuKv, group: usize, page: PageId) {
        if let Some(page) = kv.groups[group].pages.get_mut(page as usize) {
            *page = Page::Unused;
        }
    }

    fn export_page(&self, kv: &CpuKv, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        match kv.groups[group].pages.get(page as usize) {
            Some(Page::F32(page)) => out.extend_from_slice(bytemuck::cast_slice(page)),
            Some(Page::F16(page)) => out.extend_from_slice(bytemuck::cast_slice(page.reinterpret_cast())),
            Some(Page::Unused) | None => {
                return Err(Error::Backend(format!("page {page} was never written")));
            }
        }
        Ok(())
    }

    fn import_page(&self, kv: &mut CpuKv, group: usize, page: PageId, bytes: &[u8]) -> Result<()> {
        let place: &mut [u8] = match kv.page_mut(group, page) {
            Page::F32(page) => bytemuck::cast_slice_mut(page),
            Page::F16(page) => bytemuck::cast_slice_mut(page.reinterpret_cast_mut()),
            Page::Unused => unreachable!("page_mut makes the memory"),
        };
        if place.len() != bytes.len() {
            let message = format!("a page of {} bytes, not {}", place.len(), bytes.len());
            return Err(Error::Backend(message));
        }
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn attend(
        &self,
        kv: &CpuKv,
        spec: &AttentionSpec,
        q: &CpuBuffer,
        spans: &[Span],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let rows = q.num_rows();
        out.resize(rows, q.width);
        let KvShape { num_kv_heads, head_dim } = kv.layers[spec.layer].shape;
        let (group, isa) = (spec.num_heads / num_kv_heads, self.isa);
        // Tasks write [kv_head][row][group * head_dim], which is then put in row order.
        let by_head = &mut self.scratch.borrow_mut().reordered;
        by_head.resize(rows * q.width, 0.0);
        let visible: usize = spans.iter().map(|span| (span.start + span.rows.len()) * span.rows.len()).sum();
        self.for_chunks(by_head, rows * group * head_dim, visible * q.width, |kv_head, out| {
            for span in spans {
                let place = HeadPlace { kv_head, group, head_dim };
                attend_span(isa, kv, spec, place, q, span, out);
            }
        });
        let piece = group * head_dim;
        for (index, values) in by_head.chunks_exact(piece).enumerate() {
            let (kv_head, row) = (index / rows, index % rows);
            let at = row * q.width + kv_head * piece;
            out.values[at..at + piece].copy_from_slice(values);
        }
        Ok(())
    }

    fn gated(&self, activation: Activation, gate: &mut CpuBuffer, up: &CpuBuffer) -> Result<()> {
        let (width, work, isa) = (gate.width, gate.values.len() * 8, self.isa);
        self.for_chunks(&mut gate.values, width, work, |row, gate| match activation {
            Activation::Silu => math::silu_mul(isa, gate, up.row(row)),
            Activation::GeluTanh => math::gelu_mul(isa, gate, up.row(row)),
        });
        Ok(())
    }

    fn add_scaled(&self, x: &mut CpuBuffer, y: &CpuBuffer, scale: f32) -> Result<()> {
        dot::axpy(self.isa, scale, &y.values, &mut x.values);
        Ok(())
    }

    fn select_rows(&self, x: &CpuBuffer, rows: &[usize], out: &mut CpuBuffer) -> Result<()> {
        out.resize(rows.len(), x.width);
        for (out, &row) in out.values.chunks_exact_mut(x.width).zip(rows) {
            out.copy_from_slice(x.row(row));
        }
        Ok(())
    }

    fn read(&self, x: &CpuBuffer) -> Result<Vec<f32>> {
        Ok(x.values.clone())
    }
}

/// Bytes of `count` rows of a matrix from `start`.
fn row_bytes(tensor: &HostTensor, start: usize, count: usize) -> &[u8] {
    let (_, cols) = tensor.rows_cols();
    let bytes = tensor.dtype.row_bytes(cols).expect("the loader checked that rows are whole blocks");
    &tensor.bytes[start * bytes..(start + count) * bytes]
}

/// `out[rows, m]` of weight rows from `start`, widened to f32 unless they are f32 already.
fn weight_block(
    isa: Isa,
    weight: &HostTensor,
    start: usize,
    rows: usize,
    shape: Shape,
    x: &[f32],
    out: &mut [f32],
) {
    let bytes = row_bytes(weight, start, rows);
    if weight.dtype == Dtype::F32
        && let Ok(values) = bytemuck::try_cast_slice(bytes)
    {
        return matmul::block(isa, shape, values, x, out);
    }
    WIDENED.with_borrow_mut(|scratch| {
        scratch.resize(rows * shape.k, 0.0);
        quant::dequantize_row(weight.dtype, bytes, scratch);
        matmul::block(isa, shape, scratch, x, out);
    });
}

/// `out[m, n]` from `values[n, m]`.
fn transpose(values: &[f32], m: usize, out: &mut [f32]) {
    let n = values.len() / m;
    for (row, values) in values.chunks_exact(m).enumerate() {
        for (column, value) in values.iter().enumerate() {
            out[column * n + row] = *value;
        }
    }
}

/// One KV head and the query heads that share it.
#[derive(Clone, Copy)]
struct HeadPlace {
    kv_head: usize,
    group: usize,
    head_dim: usize,
}

/// Attention of a span's rows for the query heads of one KV head, which is read once for all of them.
fn attend_span(
    isa: Isa,
    kv: &CpuKv,
    spec: &AttentionSpec,
    place: HeadPlace,
    q: &CpuBuffer,
    span: &Span,
    out: &mut [f32],
) {
    let HeadPlace { kv_head, group, head_dim } = place;
    let first_visible =
        |position: usize| spec.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let (from, to) = (first_visible(span.start), span.start + span.rows.len());
    ATTENTION.with_borrow_mut(|scratch| {
        scratch.keys.clear();
        scratch.values.clear();
        kv.gather((spec.layer, Part::Keys, kv_head), span, from, to, &mut scratch.keys);
        kv.gather((spec.layer, Part::Values, kv_head), span, from, to, &mut scratch.values);
        for (index, row) in span.rows.clone().enumerate() {
            let position = span.start + index;
            let first = first_visible(position);
            let visible = (first - from) * head_dim..(position + 1 - from) * head_dim;
            scratch.scores.resize(position + 1 - first, 0.0);
            let heads = &q.row(row)[kv_head * group * head_dim..(kv_head + 1) * group * head_dim];
            let outs = &mut out[row * group * head_dim..(row + 1) * group * head_dim];
            for (head, out) in heads.chunks_exact(head_dim).zip(outs.chunks_exact_mut(head_dim)) {
                let keys_values = [&scratch.keys[visible.clone()], &scratch.values[visible.clone()]];
                attention::attend(isa, spec.rule, head, keys_values, &mut scratch.scores, out);
            }
        }
    });
}
