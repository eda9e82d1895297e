//! The CPU backend: our kernels over f32 activations, on a pool of threads.
//!
//! Quantised matrices are packed once, at load, and multiplied with activations quantised to 8 bits. F16 and
//! BF16 stay where a mapped file has them, and are multiplied with activations of 14 bits. F32 stays there
//! too, with f32 arithmetic throughout. Work is split over outputs, never inside a reduction, so the result
//! does not depend on the number of threads.

mod attention;
mod buffer;
mod drafted;
mod heads;
mod indexer;
mod kv;
mod late;
mod low_rank;
mod recurrent;
mod texts;
mod whole;

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

pub use buffer::CpuBuffer;
pub use indexer::HELD_SCORES;
pub use kv::CpuKv;
use late::LatePacked;
pub use low_rank::CpuLowRank;
use low_rank::LowRankScratch;
pub use whole::WholeSpan;

use super::{
    Activation, AttentionSpec, Backend, GatedNetwork, IndexerSpec, KvLayout, KvShape, KvType, PageId,
    Product, Recurrence, RowSpan, SelectedKeys, StoreShape, TextHeads, WeightedRows,
    add_feed_forward_in_steps, feed_forward_in_steps,
};
use crate::panels::{LoadedPanels, PanelStore};
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_base::error::{Error, LoadError, Result};
use llmctl_kernel::gemm::{Activations, GatedSums, MatrixSource, Packed, fixed, plain};
use llmctl_kernel::matmul::MatmulShape;
use llmctl_kernel::memory::{Arena, MemoryNodes};
use llmctl_kernel::pool::Pool;
use llmctl_kernel::{Dtype, Isa, dot, gemm, isa, math, matmul, norm, quant};

/// Weight rows that a task widens and multiplies: few enough for the second-level cache.
const ROWS_PER_TASK: usize = 16;

/// Number of multiplications below which a product on several threads does not pay.
const SERIAL_LIMIT: usize = 1 << 15;

/// Values per task of an element-wise operation.
const VALUES_PER_TASK: usize = 8 << 10;

/// Rows from which a step counts as a batch, limited by arithmetic instead of memory.
pub const BATCH_ROWS: usize = 32;

/// Threads and instruction set of the CPU backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads of a step of few rows, including the calling thread.
    pub threads: usize,
    /// Threads of a step of [`BATCH_ROWS`] rows and more: prompts, many sequences.
    pub threads_batch: usize,
    /// Instruction set; the processor must support it.
    pub isa: Isa,
    /// Memory nodes over which packed weights are spread; none leaves the choice to the system.
    pub nodes: MemoryNodes,
}

impl CpuOptions {
    /// Uses the same number of threads for every step, and the best instruction set.
    pub fn new(threads: usize) -> Self {
        Self { threads, threads_batch: threads, isa: isa::isa(), nodes: MemoryNodes::default() }
    }
}

/// Threads that backends share: a model's, and those of its draft model. One region runs at a time, so models that take
/// turns need no more threads than one of them.
#[derive(Clone)]
pub struct CpuThreads(Arc<Mutex<Pool>>);

impl CpuThreads {
    /// Starts threads, of which the calling thread is one.
    ///
    /// # Errors
    /// [`Error::Backend`] if they cannot be started.
    pub fn new(options: &CpuOptions) -> Result<Self> {
        let pool = Pool::new(options.threads.max(options.threads_batch));
        let pool = pool.map_err(|error| Error::Backend(error.to_string()))?;
        Ok(Self(Arc::new(Mutex::new(pool))))
    }
}

/// The CPU backend.
pub struct Cpu {
    isa: Isa,
    threads: [usize; 2],
    workers: CpuThreads,
    scratch: RefCell<CpuScratch>,
    /// Input and output of one head's product.
    head: RefCell<[CpuBuffer; 2]>,
    low_rank: RefCell<LowRankScratch>,
    /// Memory of packed weights.
    weights: Arena,
    /// Packed weights are spread over several memory nodes; pages of a file never are.
    is_spread: bool,
    /// Packed weights on disk.
    panels: Option<Arc<PanelStore>>,
    /// True if any weights are in the packed form of quantised ones.
    has_packed: Cell<bool>,
}

/// Temporary memory of operations, kept between steps.
#[derive(Default)]
struct CpuScratch {
    quantized: Activations,
    /// Result of the first half of a feed-forward network.
    gated: Activations,
    fixed: fixed::FixedActivations,
    plain: plain::PlainActivations,
    /// Results in the order in which tasks write them.
    reordered: Vec<f32>,
    attention: attention::AttentionPlan,
    index: indexer::IndexPlan,
}

impl Cpu {
    /// Creates a backend with `num_threads` threads, including the calling thread.
    ///
    /// # Errors
    /// [`Error::Backend`] if the threads cannot be started.
    pub fn new(num_threads: usize) -> Result<Self> {
        Self::with(CpuOptions::new(num_threads))
    }

    /// Creates a backend with these options and threads of its own.
    ///
    /// # Errors
    /// [`Error::Backend`] if the threads cannot be started or the processor lacks the instruction set.
    pub fn with(options: CpuOptions) -> Result<Self> {
        Self::sharing(options, CpuThreads::new(&options)?)
    }

    /// Creates a backend that computes with `workers`.
    ///
    /// # Errors
    /// [`Error::Backend`] if the processor lacks the instruction set.
    pub fn sharing(options: CpuOptions, workers: CpuThreads) -> Result<Self> {
        let CpuOptions { threads, threads_batch, isa, nodes } = options;
        if isa > isa::isa() {
            return Err(Error::Backend(format!("this processor has no {}", isa.name())));
        }
        Ok(Self {
            isa,
            threads: [threads, threads_batch],
            workers,
            scratch: RefCell::default(),
            head: RefCell::default(),
            low_rank: RefCell::default(),
            weights: Arena::over(nodes),
            is_spread: nodes.are_several(),
            panels: None,
            has_packed: Cell::new(false),
        })
    }

    /// Takes weights from `panels` where it has them, and tells it of all.
    #[must_use]
    pub fn keeping(self, panels: Option<Arc<PanelStore>>) -> Self {
        Self { panels, ..self }
    }

    /// Returns a matrix whose panels are kept on disk.
    fn kept(&self, tensor: &HostTensor) -> Option<CpuWeight> {
        let (rows, cols) = tensor.rows_cols();
        let (dtype, shape) = (tensor.dtype, [rows, cols]);
        let kept = || self.panels.as_ref()?.next(dtype, shape, &self.weights, &self.pool());
        let weight = match dtype {
            Dtype::F32 => None,
            Dtype::F16 | Dtype::Bf16 => fixed::FixedWeights::of(shape, kept()?).map(CpuWeight::Fixed),
            _ => Packed::of(dtype, shape, kept()?).map(CpuWeight::Packed),
        }?;
        // The fingerprint has read samples of the file's bytes.
        tensor.bytes.release(0..tensor.bytes.len());
        Some(weight)
    }

    /// Returns a matrix that is multiplied where it is, in a mapped file or in memory. `None` for types and processors that another
    /// layout serves better, and if weights are to be spread over memory nodes.
    fn in_place(&self, tensor: &HostTensor) -> Option<CpuWeight> {
        if self.is_spread || !fixed::is_fast_in_place(self.isa) {
            return None;
        }
        let (shape, bytes) = (tensor.rows_cols().into(), Arc::new(tensor.bytes.clone()));
        fixed::FixedWeights::in_place(self.isa, tensor.dtype, shape, bytes).map(CpuWeight::Fixed)
    }

    /// Packs a matrix in the file's layout; plain floats stay there.
    fn packed(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        check_exponents(tensor)?;
        let release = |packed| tensor.bytes.release(packed);
        let source = MatrixSource::new(tensor.dtype, tensor.rows_cols().into(), &tensor.bytes);
        let source = source.telling(&release);
        let packed = match tensor.dtype {
            Dtype::F32 => Ok(None),
            Dtype::F16 | Dtype::Bf16 => {
                fixed::FixedWeights::pack(self.isa, &source, &self.weights, &self.pool())
                    .map(|weights| weights.map(CpuWeight::Fixed))
            }
            _ => {
                Packed::pack(&source, &self.weights, &self.pool()).map(|packed| packed.map(CpuWeight::Packed))
            }
        };
        let packed = packed.map_err(|error| no_memory(tensor, &error))?;
        Ok(packed.unwrap_or_else(|| CpuWeight::Plain(tensor.clone())))
    }

    /// Leaves a matrix in a mapped file, the model's or that of its panels, until it is used. `None` if it is not in one, or has no
    /// packed form.
    fn late(&self, tensor: &HostTensor) -> Result<Option<CpuWeight>, LoadError> {
        if !tensor.bytes.is_mapped() || !tensor.dtype.is_quantized() {
            return Ok(None);
        }
        let shape = tensor.rows_cols().into();
        let kept =
            self.panels.as_ref().and_then(|panels| panels.next_in_place(tensor.dtype, shape, &self.pool()));
        let late = match kept {
            Some(panels) => LatePacked::of_panels(tensor, panels, &self.weights),
            None => {
                check_exponents(tensor)?;
                LatePacked::of_rows(tensor, &self.weights)
            }
        };
        let late = late.map_err(|error| no_memory(tensor, &error))?;
        Ok(late.map(|late| CpuWeight::Late(Arc::new(late))))
    }

    /// Takes note of a matrix whose panels are to be kept.
    fn note(&self, tensor: &HostTensor, weight: &CpuWeight) {
        self.has_packed
            .set(self.has_packed.get() || matches!(weight, CpuWeight::Packed(_) | CpuWeight::Late(_)));
        if let (Some(panels), Some(loaded)) = (&self.panels, weight.panels()) {
            panels.loaded(tensor.dtype, weight.rows_cols().into(), loaded);
        }
    }

    /// Packs those of the products' weights that no step has used yet.
    fn prepare<'a>(&self, products: impl IntoIterator<Item = &'a Product<'a, Self>>) {
        for product in products {
            if let CpuWeight::Late(late) = product.weight
                && late.get().is_none()
            {
                late.packed(&self.pool());
            }
        }
    }

    /// Returns the threads, exclusively until the guard is dropped.
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.workers.0.lock()
    }

    /// Runs `task` on every chunk of `out`, on all threads if there is enough work.
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
            self.pool().chunks_mut(out, chunk, task);
        }
    }

    /// Changes each row of `x`; `work` is that of a value.
    fn change_rows(&self, x: &mut CpuBuffer, work: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        let (width, work) = (x.width(), x.values().len() * work);
        self.for_rows(x.values_mut(), width, work, task);
    }

    /// Makes each row of `out` from that of `x`.
    fn make_rows(&self, x: &CpuBuffer, out: &mut CpuBuffer, task: impl Fn(&[f32], &mut [f32]) + Sync) {
        out.resize(x.num_rows(), x.width());
        self.change_rows(out, 1, |row, out| task(x.row(row), out));
    }

    /// Runs `task` on every row of `out`, as [`Self::for_chunks`] with a suitable number of rows per chunk.
    fn for_rows(&self, out: &mut [f32], width: usize, work: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = (VALUES_PER_TASK / width).max(1);
        self.for_chunks(out, rows * width, work, |index, out| {
            for (at, out) in out.chunks_exact_mut(width).enumerate() {
                task(index * rows + at, out);
            }
        });
    }

    /// Returns the quantised form of `x`: its own, or one computed into `scratch`.
    fn quantized<'a>(&self, x: &'a CpuBuffer, scratch: &'a mut Activations) -> &'a Activations {
        x.quantized().unwrap_or_else(|| {
            scratch.quantize(self.isa, x.values(), x.width(), &self.pool());
            scratch
        })
    }

    /// Computes those of the products with quantised weights, in one parallel region.
    fn matmul_packed(&self, x: &CpuBuffer, products: &mut [Product<'_, Self>]) {
        let packed = products
            .iter_mut()
            .filter_map(|product| Some((product.weight.packed()?, product.out.values_mut())));
        let mut packed = packed.peekable();
        if packed.peek().is_some() {
            let scratch = &mut self.scratch.borrow_mut().quantized;
            gemm::matmul_each(self.isa, self.quantized(x, scratch), packed, &self.pool());
        }
    }

    /// Computes those of the products with F16 or BF16 weights, in one parallel region.
    fn matmul_fixed(&self, x: &CpuBuffer, products: &mut [Product<'_, Self>]) {
        let fixed = products.iter_mut().filter_map(|product| match product.weight {
            CpuWeight::Fixed(weight) => Some((weight, product.out.values_mut())),
            _ => None,
        });
        let mut fixed = fixed.peekable();
        if fixed.peek().is_some() {
            let rows = &mut self.scratch.borrow_mut().fixed;
            rows.quantize(self.isa, x.values(), x.width(), &self.pool());
            fixed::matmul_each(self.isa, rows, fixed, &self.pool());
        }
    }

    fn add_bias(&self, Product { bias, out, .. }: &mut Product<'_, Self>) {
        if let Some(bias) = bias {
            self.change_rows(out, 1, |_, row| {
                row.iter_mut().zip(bias.iter()).for_each(|(value, bias)| *value += bias);
            });
        }
    }

    /// Computes those of the products with weights in the file's layout, in f32.
    fn matmul_plain(&self, x: &CpuBuffer, products: &mut [Product<'_, Self>]) {
        let plain = products.iter_mut().filter_map(|product| match product.weight {
            CpuWeight::Plain(weight) => Some((weight, product.out.values_mut())),
            _ => None,
        });
        let mut plain = plain.peekable();
        let CpuScratch { plain: rows, reordered, .. } = &mut *self.scratch.borrow_mut();
        let are_many = x.num_rows() >= plain::LEAST_ROWS;
        if are_many && plain.peek().is_some() {
            rows.fill(self.isa, x.values(), x.width(), &self.pool());
        }
        for (weight, out) in plain {
            match are_many {
                true => self.matmul_plain_many(rows, weight, out),
                false => self.matmul_plain_few(x, weight, reordered, out),
            }
        }
    }

    fn matmul_plain_many(&self, x: &plain::PlainActivations, weight: &HostTensor, out: &mut [f32]) {
        let read = |rows: Range<usize>, compute: &mut dyn FnMut(&[f32])| with_rows(weight, rows, compute);
        plain::matmul(self.isa, weight.rows_cols().0, read, x, out, &self.pool());
    }

    fn matmul_plain_few(
        &self,
        x: &CpuBuffer,
        weight: &HostTensor,
        reordered: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let ((n, k), m, isa) = (weight.rows_cols(), x.num_rows(), self.isa);
        let task = |index: usize, out: &mut [f32]| {
            let first = index * ROWS_PER_TASK;
            with_rows(weight, first..first + out.len() / m, |rows| {
                matmul::block(isa, MatmulShape { k, m }, rows, x.values(), out);
            });
        };
        if m == 1 {
            return self.for_chunks(out, ROWS_PER_TASK, n * k, task);
        }
        reordered.resize(n * m, 0.0);
        self.for_chunks(reordered, ROWS_PER_TASK * m, n * k * m, task);
        transpose(reordered, m, out);
    }
}

/// A matrix `[out, in]`.
pub enum CpuWeight {
    /// Floats, or a table that is only used for look-ups: mapped, in the file's layout.
    Plain(HostTensor),
    /// Quantised, in the kernels' own layout; the file's bytes are not kept.
    Packed(Packed),
    /// Quantised, and packed when it is first used.
    Late(Arc<LatePacked>),
    /// F16 or BF16, where the file has them or in the kernels' own layout.
    Fixed(fixed::FixedWeights),
}

impl CpuWeight {
    /// Returns rows (outputs) and columns (inputs).
    fn rows_cols(&self) -> (usize, usize) {
        match self {
            CpuWeight::Plain(tensor) => tensor.rows_cols(),
            CpuWeight::Packed(packed) => (packed.rows(), packed.cols()),
            CpuWeight::Late(late) => late.rows_cols(),
            CpuWeight::Fixed(fixed) => (fixed.rows(), fixed.cols()),
        }
    }

    /// Returns the quantised matrix in the kernels' layout; one that is packed late must have been prepared.
    fn packed(&self) -> Option<&Packed> {
        match self {
            CpuWeight::Packed(packed) => Some(packed),
            CpuWeight::Late(late) => Some(late.get().expect("prepared")),
            CpuWeight::Plain(_) | CpuWeight::Fixed(_) => None,
        }
    }

    /// Returns what may be kept on disk.
    fn panels(&self) -> Option<LoadedPanels> {
        match self {
            CpuWeight::Plain(_) => None,
            CpuWeight::Packed(packed) => Some(LoadedPanels::Ready(packed.memory().clone())),
            CpuWeight::Late(late) => {
                let (len, late) = (late.bytes(), Arc::clone(late));
                Some(LoadedPanels::Late { len, get: Box::new(move || late.panels()) })
            }
            CpuWeight::Fixed(fixed) => fixed.memory().cloned().map(LoadedPanels::Ready),
        }
    }
}

/// # Errors
/// [`LoadError::Tensor`] if MXFP4 blocks have exponents beyond the kernels' limit.
fn check_exponents(tensor: &HostTensor) -> Result<(), LoadError> {
    let is_too_large = |block: &[u8]| block[0] > gemm::MAX_MXFP4_EXPONENT;
    let mut blocks = tensor.bytes.chunks_exact(tensor.dtype.block_bytes());
    match tensor.dtype == Dtype::Mxfp4 && blocks.any(is_too_large) {
        true => Err(unusable(tensor, "has values above 2^18, the limit for weights".to_owned())),
        false => Ok(()),
    }
}

fn no_memory(tensor: &HostTensor, error: &io::Error) -> LoadError {
    unusable(tensor, format!("no memory to pack it: {error}"))
}

fn unusable(tensor: &HostTensor, message: String) -> LoadError {
    LoadError::Tensor { tensor: format!("{} {:?}", tensor.dtype.name(), tensor.shape), message }
}

/// Cosines and sines of a step, `[rows, half]` each.
#[derive(Debug, Default)]
pub struct CpuAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

thread_local! {
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Backend for Cpu {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type HeadWeights = Vec<CpuWeight>;
    type LowRank = CpuLowRank;
    type Vector = Vec<f32>;
    type Angles = CpuAngles;
    type Kv = CpuKv;

    fn weight(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        if let Some(weight) = self.in_place(tensor) {
            return Ok(weight);
        }
        let weight = self.kept(tensor).map_or_else(|| self.packed(tensor), Ok)?;
        self.note(tensor, &weight);
        Ok(weight)
    }

    fn expert(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        let Some(weight) = self.late(tensor)? else { return self.weight(tensor) };
        self.note(tensor, &weight);
        Ok(weight)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CpuWeight, LoadError> {
        Ok(CpuWeight::Plain(tensor.clone()))
    }

    fn head_weights(&self, weights: Vec<CpuWeight>) -> Result<Vec<CpuWeight>, LoadError> {
        Ok(weights)
    }

    fn low_rank(&self, down_up: [&HostTensor; 2], factor: f32) -> Result<CpuLowRank, LoadError> {
        self.upload_low_rank(down_up, factor)
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, LoadError> {
        Ok(values)
    }

    fn kv(&self, layout: &KvLayout, kv_type: KvType) -> Result<CpuKv, LoadError> {
        for store in &layout.stores {
            if let StoreShape::Rows(KvShape { head_dim, values, .. }) = store.shape
                && !kv_type.fits(head_dim, values)
            {
                let (kv_type, dim) = (kv_type.name(), values.dim(head_dim));
                return Err(LoadError::Device(format!(
                    "KV of type {kv_type} takes no keys of {head_dim} numbers of which {dim} are the values (q8_0 does)"
                )));
            }
        }
        Ok(CpuKv::new(layout, kv_type))
    }

    fn buffer(&self) -> CpuBuffer {
        CpuBuffer::default()
    }

    fn embed(&self, table: &CpuWeight, tokens: &[u32], scale: f32, out: &mut CpuBuffer) -> Result<()> {
        // Every step starts here, so the number of threads is chosen here.
        self.begin_rows(tokens.len());
        let (rows, width) = table.rows_cols();
        out.resize(tokens.len(), width);
        for (out, &token) in out.values_mut().chunks_exact_mut(width).zip(tokens) {
            if token as usize >= rows {
                return Err(Error::Backend(format!("token id {token} has no embedding")));
            }
            match table {
                CpuWeight::Plain(table) => {
                    quant::dequantize_row(table.dtype, row_bytes(table, token as usize, 1), out);
                }
                CpuWeight::Packed(table) => table.unpack_row(token as usize, out),
                CpuWeight::Late(table) => table.packed(&self.pool()).unpack_row(token as usize, out),
                CpuWeight::Fixed(table) => table.unpack_row(token as usize, out),
            }
            if scale != 1.0 {
                out.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }

    /// If the products have quantised weights, each task also quantises the rows it has just computed.
    fn rms_norm_into_products(
        &self,
        x: &CpuBuffer,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        if !self.has_packed.get() || !x.width().is_multiple_of(gemm::BLOCK) {
            return self.rms_norm(x, weight, eps, out);
        }
        out.resize(x.num_rows(), x.width());
        let (len, isa) = (weight.len(), self.isa);
        let (values, quantized) = out.both_mut();
        quantized.quantize_made(isa, values, x.width(), &self.pool(), |row, out| {
            for (x, out) in x.row(row).chunks_exact(len).zip(out.chunks_exact_mut(len)) {
                norm::rms_norm(isa, x, weight, eps, out);
            }
        });
        Ok(())
    }

    fn rms_norm(&self, x: &CpuBuffer, weight: &Vec<f32>, eps: f32, out: &mut CpuBuffer) -> Result<()> {
        let (len, isa) = (weight.len(), self.isa);
        self.make_rows(x, out, |x, out| {
            for (x, out) in x.chunks_exact(len).zip(out.chunks_exact_mut(len)) {
                norm::rms_norm(isa, x, weight, eps, out);
            }
        });
        Ok(())
    }

    fn layer_norm(
        &self,
        x: &CpuBuffer,
        [weight, bias]: [&Vec<f32>; 2],
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let isa = self.isa;
        self.make_rows(x, out, |x, out| norm::layer_norm(isa, x, [weight, bias], eps, out));
        Ok(())
    }

    fn attend_texts(
        &self,
        heads: &TextHeads,
        qkv: [&CpuBuffer; 3],
        texts: &[Range<usize>],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        out.resize(qkv[0].num_rows(), qkv[0].width());
        self.attend_text_rows(heads, qkv, texts, out);
        Ok(())
    }

    fn rms_norm_groups(
        &self,
        x: &CpuBuffer,
        weight: &Vec<f32>,
        groups: usize,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<()> {
        let (len, isa) = (x.width() / groups, self.isa);
        self.make_rows(x, out, |x, out| {
            let runs = x.chunks_exact(len).zip(weight.chunks_exact(len));
            for ((x, weight), out) in runs.zip(out.chunks_exact_mut(len)) {
                norm::rms_norm(isa, x, weight, eps, out);
            }
        });
        Ok(())
    }

    fn matmul_each(&self, x: &CpuBuffer, products: &mut [Product<'_, Self>]) -> Result<()> {
        for Product { weight, out, .. } in products.iter_mut() {
            let (n, k) = weight.rows_cols();
            if x.width() != k {
                return Err(Error::Backend(format!("product of rows of {} with rows of {k}", x.width())));
            }
            out.resize(x.num_rows(), n);
        }
        self.prepare(&*products);
        self.matmul_packed(x, products);
        self.matmul_fixed(x, products);
        self.matmul_plain(x, products);
        products.iter_mut().for_each(|product| self.add_bias(product));
        self.change_each(x, products)
    }

    fn feed_forward(&self, x: &CpuBuffer, network: GatedNetwork<'_, Self>) -> Result<()> {
        self.prepare(network.inner.iter().chain([&network.down]));
        let weights = packed_weights(x.width(), &network);
        let Some([gate, up, last]) = weights.filter(|_| !gemm::is_few(self.isa, x.num_rows())) else {
            return feed_forward_in_steps(self, x, network);
        };
        let GatedNetwork { activation, inner: [to_gate, to_up], mut down } = network;
        down.out.resize(x.num_rows(), last.rows());
        // Adapters of the last product read its input in f32.
        let values = to_gate.out;
        values.resize(if down.changes.is_empty() { 0 } else { x.num_rows() }, last.cols());
        let changes: Vec<_> = to_gate.changes.iter().chain(&to_up.changes).collect();
        self.with_sums(x, &changes, |sums| {
            let (of_gate, of_up) = sums.split_at(to_gate.changes.len());
            let sums = GatedSums { sums: [of_gate, of_up], values: values.values_mut() };
            let CpuScratch { quantized, gated, .. } = &mut *self.scratch.borrow_mut();
            let x = self.quantized(x, quantized);
            gemm::gated(self.isa, x, [gate, up], activation, (sums, gated), &self.pool());
            gemm::matmul(self.isa, last, gated, down.out.values_mut(), &self.pool());
        })?;
        self.add_bias(&mut down);
        self.change_each(values, &mut [down])
    }

    fn add_feed_forward(
        &self,
        x: &CpuBuffer,
        to: WeightedRows<'_>,
        network: GatedNetwork<'_, Self>,
        [selected, out]: [&mut CpuBuffer; 2],
    ) -> Result<()> {
        self.prepare(network.inner.iter().chain([&network.down]));
        let weights = packed_weights(x.width(), &network).filter(|_| network.down.bias.is_none());
        let weights = weights.filter(|_| !network.is_changed());
        let weights = weights.filter(|_| !gemm::is_few(self.isa, to.rows.len()));
        let (Some([gate, up, last]), Some(quantized)) = (weights, x.quantized()) else {
            return add_feed_forward_in_steps(self, x, to, network, [selected, out]);
        };
        let CpuScratch { quantized: rows, gated, .. } = &mut *self.scratch.borrow_mut();
        rows.select(quantized, to.rows, &self.pool());
        let sums = GatedSums::default();
        gemm::gated(self.isa, rows, [gate, up], network.activation, (sums, gated), &self.pool());
        gemm::add_matmul(self.isa, last, gated, to, out.values_mut(), &self.pool());
        Ok(())
    }

    fn matmul_heads(&self, x: &CpuBuffer, weights: &Vec<CpuWeight>, out: &mut CpuBuffer) -> Result<()> {
        self.multiply_heads(x, weights, out)
    }

    fn join_heads(&self, parts: &[&CpuBuffer], num_heads: usize, out: &mut CpuBuffer) -> Result<()> {
        heads::join(parts, num_heads, out);
        Ok(())
    }

    fn gate_groups(&self, [x, y]: [&CpuBuffer; 2], groups: usize, out: &mut CpuBuffer) -> Result<()> {
        out.resize(x.num_rows(), groups);
        let len = x.width() / groups;
        let pairs = x.values().chunks_exact(len).zip(y.values().chunks_exact(len));
        out.values_mut().iter_mut().zip(pairs).for_each(|(out, (x, y))| *out = heads::gate_of(x, y));
        Ok(())
    }

    fn angles(&self, cos: &[f32], sin: &[f32], rows: usize, out: &mut CpuAngles) -> Result<()> {
        out.cos.clear();
        out.cos.extend_from_slice(cos);
        out.sin.clear();
        out.sin.extend_from_slice(sin);
        out.half = cos.len() / rows.max(1);
        Ok(())
    }

    fn rope(&self, x: &mut CpuBuffer, head_dim: usize, angles: &CpuAngles) -> Result<()> {
        let (half, isa) = (angles.half, self.isa);
        self.change_rows(x, 1, |row, values| {
            let range = row * half..(row + 1) * half;
            let (cos, sin) = (&angles.cos[range.clone()], &angles.sin[range]);
            for head in values.chunks_exact_mut(head_dim) {
                let (low, high) = head[..2 * half].split_at_mut(half);
                norm::rotate(isa, low, high, cos, sin);
            }
        });
        Ok(())
    }

    fn store_kv(
        &self,
        kv: &mut CpuKv,
        store: usize,
        k: &CpuBuffer,
        v: &CpuBuffer,
        spans: &[RowSpan],
    ) -> Result<()> {
        kv.write(store, [k.values(), v.values()], spans, (self.isa, &self.pool()))
    }

    fn copy_page(&self, kv: &mut CpuKv, group: usize, from: PageId, to: PageId) -> Result<()> {
        kv.copy_page(group, from, to)
    }

    fn free_page(&self, kv: &mut CpuKv, group: usize, page: PageId) {
        kv.free_page(group, page);
    }

    fn prepare_page(&self, kv: &mut CpuKv, most: usize) -> bool {
        // With several memory nodes the thread that writes a page first decides where it lies. The step that needs it reports errors.
        !self.is_spread && kv.prepare_page(most).unwrap_or(false)
    }

    fn export_page(&self, kv: &CpuKv, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        kv.export_page(group, page, out)
    }

    fn import_page(&self, kv: &mut CpuKv, group: usize, page: PageId, bytes: SharedBytes) -> Result<()> {
        kv.import_page(group, page, bytes)
    }

    fn keep_drafted(&self, kv: &mut CpuKv, group: usize, page: PageId, count: usize) -> Result<()> {
        self.take_in_drafted(kv, group, page, count)
    }

    fn attend(
        &self,
        kv: &CpuKv,
        spec: &AttentionSpec<'_, Vec<f32>>,
        q: &CpuBuffer,
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        out.resize(q.num_rows(), spec.num_heads * kv.shape(spec.store).value_dim());
        self.attend_rows(kv, spec, q, spans, out);
        Ok(())
    }

    fn select_keys(
        &self,
        kv: &CpuKv,
        spec: &IndexerSpec,
        inputs: [&CpuBuffer; 2],
        spans: &[RowSpan],
        out: &mut SelectedKeys,
    ) -> Result<()> {
        self.choose_keys(kv, *spec, inputs, spans, out);
        Ok(())
    }

    fn recur(
        &self,
        kv: &mut CpuKv,
        recurrence: &Recurrence<'_, Self>,
        spans: &[RowSpan],
        out: &mut CpuBuffer,
    ) -> Result<()> {
        match recurrence {
            Recurrence::Convolution(spec, x) => self.convolve(kv, spec, x, spans, out),
            Recurrence::Delta(spec, inputs) => self.apply_delta_rule(kv, spec, *inputs, spans, out),
            Recurrence::Ssm(spec, inputs) => self.scan(kv, spec, *inputs, spans, out),
        }
    }

    fn gated(&self, activation: Activation, gate: &mut CpuBuffer, up: &CpuBuffer) -> Result<()> {
        let isa = self.isa;
        self.change_rows(gate, 8, |row, gate| math::activate(isa, activation, gate, up.row(row)));
        Ok(())
    }

    fn activate(&self, activation: Activation, x: &mut CpuBuffer) -> Result<()> {
        let (work, isa) = (x.values().len() * 8, self.isa);
        self.for_chunks(x.values_mut(), VALUES_PER_TASK, work, |_, x| {
            math::activate_alone(isa, activation, x);
        });
        Ok(())
    }

    fn add_scaled(&self, x: &mut CpuBuffer, y: &CpuBuffer, scale: f32) -> Result<()> {
        let (work, isa) = (x.values().len(), self.isa);
        self.for_chunks(x.values_mut(), VALUES_PER_TASK, work, |index, x| {
            dot::axpy(isa, scale, &y.values()[index * VALUES_PER_TASK..][..x.len()], x);
        });
        Ok(())
    }

    fn scale(&self, x: &mut CpuBuffer, scale: f32) -> Result<()> {
        x.values_mut().iter_mut().for_each(|value| *value *= scale);
        Ok(())
    }

    fn scale_rows(&self, x: &mut CpuBuffer, factors: &[f32]) -> Result<()> {
        let width = x.width();
        for (row, factor) in x.values_mut().chunks_exact_mut(width).zip(factors) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(())
    }

    fn scale_heads(&self, x: &mut CpuBuffer, factors: &CpuBuffer) -> Result<()> {
        let dim = x.width() / factors.width();
        self.change_rows(x, 1, |row, x| {
            for (head, factor) in x.chunks_exact_mut(dim).zip(factors.row(row)) {
                head.iter_mut().for_each(|value| *value *= factor);
            }
        });
        Ok(())
    }

    fn multiply(&self, x: &mut CpuBuffer, vector: &Vec<f32>) -> Result<()> {
        self.change_rows(x, 1, |_, row| {
            row.iter_mut().zip(vector).for_each(|(value, factor)| *value *= factor);
        });
        Ok(())
    }

    fn match_magnitude(&self, x: &mut CpuBuffer, reference: &CpuBuffer, least: f32) -> Result<()> {
        let isa = self.isa;
        let mean_square = |row: &[f32]| dot::dot(isa, row, row) / row.len() as f32;
        self.change_rows(x, 1, |index, row| {
            let factor = mean_square(reference.row(index)).sqrt() / mean_square(row).max(least).sqrt();
            row.iter_mut().for_each(|value| *value *= factor);
        });
        Ok(())
    }

    fn cut_off(&self, x: &mut CpuBuffer, deviations: f32) -> Result<()> {
        let isa = self.isa;
        self.change_rows(x, 1, |_, row| {
            let mean = dot::sum(isa, row) / row.len() as f32;
            row.iter_mut().for_each(|value| *value -= mean);
            let cutoff = (dot::dot(isa, row, row) / row.len() as f32).sqrt() * deviations;
            row.iter_mut().for_each(|value| *value = (*value - cutoff).max(0.0));
        });
        Ok(())
    }

    fn select_columns(&self, x: &CpuBuffer, columns: Range<usize>, out: &mut CpuBuffer) -> Result<()> {
        out.resize(x.num_rows(), columns.len());
        for (row, out) in out.values_mut().chunks_exact_mut(columns.len()).enumerate() {
            out.copy_from_slice(&x.row(row)[columns.clone()]);
        }
        Ok(())
    }

    fn select_rows(&self, x: &CpuBuffer, rows: &[usize], out: &mut CpuBuffer) -> Result<()> {
        out.resize(rows.len(), x.width());
        for (out, &row) in out.values_mut().chunks_exact_mut(x.width()).zip(rows) {
            out.copy_from_slice(x.row(row));
        }
        if let Some(quantized) = x.quantized() {
            out.both_mut().1.select(quantized, rows, &self.pool());
        }
        Ok(())
    }

    fn zeros(&self, rows: usize, width: usize, out: &mut CpuBuffer) -> Result<()> {
        out.resize(rows, width);
        out.values_mut().fill(0.0);
        Ok(())
    }

    fn add_rows(&self, x: &mut CpuBuffer, y: &CpuBuffer, rows: &[usize], weights: &[f32]) -> Result<()> {
        let width = x.width();
        for (index, (&row, &weight)) in rows.iter().zip(weights).enumerate() {
            dot::axpy(self.isa, weight, y.row(index), &mut x.values_mut()[row * width..][..width]);
        }
        Ok(())
    }

    fn read(&self, x: &mut CpuBuffer, out: &mut Vec<f32>) -> Result<()> {
        x.swap(out);
        Ok(())
    }

    fn write(&self, values: &[f32], width: usize, out: &mut CpuBuffer) -> Result<()> {
        out.resize(values.len() / width, width);
        out.values_mut().copy_from_slice(values);
        Ok(())
    }
}

/// Returns gate, up and down of a network for rows of `width` values if all are quantised and the first two have no bias. They must
/// have been prepared.
fn packed_weights<'a>(width: usize, network: &GatedNetwork<'a, Cpu>) -> Option<[&'a Packed; 3]> {
    let GatedNetwork { inner, down, .. } = network;
    let weights = [inner[0].weight.packed()?, inner[1].weight.packed()?, down.weight.packed()?];
    let fits = weights[..2].iter().all(|w| w.cols() == width && w.rows() == weights[2].cols());
    (fits && inner.iter().all(|product| product.bias.is_none())).then_some(weights)
}

/// Returns the bytes of `count` rows of a matrix from `start`.
fn row_bytes(tensor: &HostTensor, start: usize, count: usize) -> &[u8] {
    let (_, cols) = tensor.rows_cols();
    let bytes = tensor.dtype.row_bytes(cols).expect("the loader checked that rows are whole blocks");
    &tensor.bytes[start * bytes..(start + count) * bytes]
}

/// Calls `compute` with some rows of a matrix, widened to f32 if necessary.
fn with_rows(weight: &HostTensor, rows: Range<usize>, compute: impl FnOnce(&[f32])) {
    let bytes = row_bytes(weight, rows.start, rows.len());
    if weight.dtype == Dtype::F32
        && let Ok(values) = bytemuck::try_cast_slice(bytes)
    {
        return compute(values);
    }
    WIDENED.with_borrow_mut(|scratch| {
        scratch.resize(rows.len() * weight.rows_cols().1, 0.0);
        quant::dequantize_row(weight.dtype, bytes, scratch);
        compute(scratch);
    });
}

/// Transposes `values[n, m]` into `out[m, n]`.
fn transpose(values: &[f32], m: usize, out: &mut [f32]) {
    let n = values.len() / m;
    for (row, values) in values.chunks_exact(m).enumerate() {
        for (column, value) in values.iter().enumerate() {
            out[column * n + row] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a matrix of Q8_0: blocks of a half-precision 1 and 32 codes.
    fn weight(cpu: &Cpu, [rows, cols]: [usize; 2]) -> CpuWeight {
        let row = |n: usize| {
            (0..cols / 32).flat_map(move |block| {
                let codes = (0..32).map(move |at| (n * 7 + block * 5 + at * 3) as u8);
                [0x00, 0x3c].into_iter().chain(codes)
            })
        };
        let bytes: Vec<u8> = (0..rows).flat_map(row).collect();
        cpu.weight(&HostTensor::new(Dtype::Q8_0, vec![rows, cols], bytes.into()).unwrap()).unwrap()
    }

    #[test]
    fn experts_add_the_bits_of_their_steps() {
        const COLS: usize = 96;
        let cpu = Cpu::new(2).unwrap();
        let [gate, up, down] = [[64, COLS], [64, COLS], [COLS, 64]].map(|shape| weight(&cpu, shape));
        let mut x = cpu.buffer();
        x.resize(300, COLS);
        x.values_mut().iter_mut().enumerate().for_each(|(at, x)| *x = (at as f32 * 0.37).sin());
        let mut normed = cpu.buffer();
        cpu.rms_norm_into_products(&x, &vec![1.0; COLS], 1e-6, &mut normed).unwrap();
        let add = |count: usize, bias: Option<&Vec<f32>>, in_steps: bool| {
            let rows: Vec<usize> = (0..count).map(|row| row * 300 / count).collect();
            let weights: Vec<f32> = rows.iter().map(|row| 0.1 + *row as f32 / 64.0).collect();
            let to = WeightedRows { rows: &rows, weights: &weights };
            let [mut a, mut b, mut result, mut selected] = [(); 4].map(|()| cpu.buffer());
            let inner = [(&gate, &mut a), (&up, &mut b)];
            let inner = inner.map(|(weight, out)| Product::new(weight, None, out));
            let down = Product::new(&down, bias, &mut result);
            let network = GatedNetwork { activation: Activation::Silu, inner, down };
            let mut out = x.clone();
            match in_steps {
                true => add_feed_forward_in_steps(&cpu, &normed, to, network, [&mut selected, &mut out]),
                false => cpu.add_feed_forward(&normed, to, network, [&mut selected, &mut out]),
            }
            .unwrap();
            assert!(out.quantized().is_none());
            out.values().to_vec()
        };
        let bias = vec![0.5; COLS];
        for (count, bias) in [(1, None), (40, None), (300, None), (300, Some(&bias))] {
            let (expected, got) = (add(count, bias, true), add(count, bias, false));
            assert!(expected != x.values(), "it adds something");
            assert!(expected.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{count} rows");
        }
    }

    #[test]
    fn selected_rows_keep_their_quantised_form() {
        let cpu = Cpu::new(2).unwrap();
        let weight = weight(&cpu, [32, 64]);
        let (mut x, mut normed) = (cpu.buffer(), cpu.buffer());
        x.resize(5, 64);
        x.values_mut().iter_mut().enumerate().for_each(|(at, x)| *x = (at as f32 * 0.37).sin());
        cpu.rms_norm_into_products(&x, &vec![1.0; 64], 1e-6, &mut normed).unwrap();
        let [mut some, mut product, mut all] = [(); 3].map(|()| cpu.buffer());
        cpu.select_rows(&normed, &[4, 1], &mut some).unwrap();
        assert_eq!(some.quantized().map(Activations::rows), Some(2));
        cpu.matmul(&some, &weight, None, &mut product).unwrap();
        cpu.matmul(&normed, &weight, None, &mut all).unwrap();
        assert_eq!([product.row(0), product.row(1)], [all.row(4), all.row(1)]);
        cpu.select_rows(&x, &[0], &mut some).unwrap();
        assert!(some.quantized().is_none());
    }

    #[test]
    fn norms_into_products_give_the_bits_of_norms_and_products() {
        const COLS: usize = 96;
        let cpu = Cpu::new(2).unwrap();
        let weight = weight(&cpu, [20, COLS]);
        let norm: Vec<f32> = (0..COLS).map(|at| 0.5 + at as f32 / 64.0).collect();
        for rows in [1, 7, 300] {
            let mut x = cpu.buffer();
            x.resize(rows, COLS);
            x.values_mut().iter_mut().enumerate().for_each(|(at, x)| *x = (at as f32 * 0.37).sin());
            let (mut apart, mut together) = (cpu.buffer(), cpu.buffer());
            cpu.rms_norm(&x, &norm, 1e-6, &mut apart).unwrap();
            cpu.rms_norm_into_products(&x, &norm, 1e-6, &mut together).unwrap();
            assert!(apart.quantized().is_none() && together.quantized().is_some());
            for _ in 0..2 {
                let [expected, got] = [&apart, &together].map(|x| {
                    let mut out = cpu.buffer();
                    cpu.matmul(x, &weight, None, &mut out).unwrap();
                    out
                });
                assert!(
                    apart.values() == together.values() && expected.values() == got.values(),
                    "{rows} rows"
                );
                // Later changes of the values must show in the products.
                [&mut apart, &mut together].into_iter().for_each(|x| cpu.scale(x, 1.7).unwrap());
            }
        }
    }
}
