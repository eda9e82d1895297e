//! Products of quantised weights with quantised activations: integer dot products, f32 sums.
//!
//! Invariant, the definition of every output `w . x`, independent of the number of rows, threads, tiles and
//! the instruction set:
//!
//! ```text
//! sum = 0
//! for each block of 32 along K, in ascending order (for each half of it, where the format has a scale for each 16):
//!     dot = sum of (code - zero) * x_code           exact, in i32
//!     sum = fma(dot as f32, scale * x_scale, sum)
//!     sum = fma(min, x_scale * sum of x_codes, sum)  only in formats that have a minimum
//! ```
//!
//! Few activation rows use the *direct* path, which unpacks weights in registers; many use panels of weights
//! that are unpacked into the cache once and multiplied with all rows. Both follow the order above.

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod fixed;
mod format;
mod gated;
mod groups;
#[cfg(all(test, unix))]
mod guarded;
mod low_rank;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
#[cfg(target_arch = "aarch64")]
mod pairs;
pub mod plain;
mod scalar;
mod scatter;
#[cfg(target_arch = "x86_64")]
mod strips;
#[cfg(test)]
mod tests;
#[cfg(not(target_arch = "aarch64"))]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod transpose;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};

pub use activation::Activations;
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::TileConfig;
pub use format::BLOCK;
use format::{GROUP_BYTES, GROUPS, QuantFormat, ROWS, with_format};
pub use gated::{GatedSums, gated};
use groups::Grouped;
pub use low_rank::{LowRankSum, LowRankUp};
pub use pack::{MatrixSource, PANEL_LAYOUT, Packed, packed_bytes};
#[cfg(target_arch = "aarch64")]
use pairs::ActivationPair as Tile;
pub use scatter::{WeightedRows, add_matmul};
#[cfg(target_arch = "x86_64")]
use strips::StripBlock;
#[cfg(not(target_arch = "aarch64"))]
use tiles::ActivationTile as Tile;

pub use super::blocks::MAX_MXFP4_EXPONENT;
use super::isa::Isa;
use super::pool::Pool;

/// Most activation rows of one call of the direct path.
const MAX_DIRECT_ROWS: usize = 8;

/// Number of rows up to which the direct path is faster without tiles, measured; beyond, both are equal until the
/// rows exceed the second-level cache.
const MAX_DIRECT: usize = 96;

/// Most activation rows of one call of the panel path.
const MAX_PANEL_ROWS: usize = 16;

/// Most unpacked panels that the activation rows pass in turn.
const MAX_PANELS: usize = 4;

/// Most packed panels (of 16 rows) that are unpacked together.
const MAX_WIDTH: usize = 2;

/// Least number of weight bytes that one task of the direct path reads.
const TASK_BYTES: usize = 32 << 10;

/// Number of tasks per thread and product, so that the tasks of a delayed thread can go to others.
const MIN_TASKS: usize = 4;

/// Most products of the same activations in one parallel region.
const MAX_TOGETHER: usize = 4;

/// Number of multiplications below which a product on several threads does not pay.
const SERIAL_LIMIT: usize = 1 << 17;

/// Packed panels that are unpacked together.
type Panels<'a> = [&'a [u8]; MAX_WIDTH];

/// The kernels of one instruction set.
trait Kernels {
    /// Packed panels that the panel path takes at a time; 0 without a panel path.
    const WIDTH: usize;

    /// Activation rows of one call of [`Self::direct`], at most [`MAX_DIRECT_ROWS`].
    const DIRECT_ROWS: usize;

    /// Returns the number of activation rows up to which the direct path is faster.
    fn max_direct() -> usize {
        MAX_DIRECT
    }

    /// Activation rows of one call of [`Self::multiply`], at most [`MAX_PANEL_ROWS`].
    const PANEL_ROWS: usize;

    /// Blocks along K that are unpacked together: 4,096 values, so that a panel stays in the second-level cache.
    const PANEL_BLOCKS: usize = 128;

    /// Unpacked panels that every call's rows pass in turn, at most [`MAX_PANELS`]: more if loading rows is slow.
    const TOGETHER: usize = 1;

    /// Computes `out[t][row]` = product of the panel's row with activation row `first + t`; at most
    /// [`Self::DIRECT_ROWS`].
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]);

    /// Unpacks `blocks.len()` blocks of each of [`Self::WIDTH`] panels.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel);

    /// Computes products of the panel's blocks, which start at block `start` of a row, with activation rows from
    /// `first` on. Sets `sums` if `start` is 0, adds to them otherwise.
    ///
    /// # Safety
    /// The processor has the instruction set; the panel was filled by this one's [`Self::unpack`] for `F`; `sums` are
    /// [`Self::WIDTH`] panels wide.
    unsafe fn multiply<F: QuantFormat>(
        panel: &WeightPanel,
        x: GemmInput<'_>,
        first: [usize; 2],
        sums: SumsPtr,
    );

    /// Returns the first row of call number `call` of `calls` for `rows` rows, and the row after its last: spread
    /// evenly, because a call with few rows wastes the panel's bandwidth.
    fn rows_of_call(rows: usize, call: usize, calls: usize) -> (usize, usize) {
        (call * rows / calls, (call + 1) * rows / calls)
    }

    /// Resets thread state that [`Self::multiply`] has changed.
    fn leave() {}
}

/// Prefetching of weights in the direct path.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct FetchAhead {
    /// Bytes from the read position to the prefetched one; 0 for no prefetching.
    distance: usize,
    /// True to fetch into the first-level cache; false for the second-level one, which has more outstanding
    /// lines.
    near: bool,
}

#[cfg(target_arch = "x86_64")]
impl FetchAhead {
    /// Chooses the method for `rows` activation rows; `needed` is the kernel's own for more than two. All figures were measured.
    ///
    /// Processors prefetch one or two streams by themselves, but not far enough where a page of memory ends, and not the
    /// scales, low and high bits of long units. With prefetching Q4_K is read a third faster by Intel's cores, and as much by AMD's
    /// Zen 5, which wants it further ahead and in the first-level cache; the latter reads whole bytes better without.
    #[inline(always)]
    fn new<F: QuantFormat>(rows: usize, needed: FetchAhead) -> FetchAhead {
        match rows {
            ..=2 if super::isa::is_intel() => FetchAhead { distance: 3072, near: false },
            ..=2 => FetchAhead { distance: if F::LOW == 8 { 0 } else { 4096 }, near: true },
            _ => needed,
        }
    }

    /// Prefetches this tile's part. Harmless past the end of the weights.
    #[inline(always)]
    fn fetch<F: QuantFormat>(self, unit: *const u8, tile: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if self.distance == 0 {
            return;
        }
        let per_tile = F::UNIT_BYTES.div_ceil(64 * F::TILES);
        for line in 0..per_tile {
            let ahead = unit.wrapping_add(self.distance + 64 * (tile * per_tile + line)).cast();
            // SAFETY: every x86-64 has the instruction, and it faults nowhere.
            unsafe {
                match self.near {
                    true => _mm_prefetch::<_MM_HINT_T0>(ahead),
                    false => _mm_prefetch::<_MM_HINT_T1>(ahead),
                }
            }
        }
    }
}

/// Activations in the layouts of the kernels.
#[derive(Clone, Copy)]
struct GemmInput<'a> {
    rows: &'a Activations,
    /// The same in tiles or pairs of rows, for kernels that use them.
    tiles: &'a Grouped<Tile>,
    /// The same in strips, for kernels that use them.
    #[cfg(target_arch = "x86_64")]
    strips: &'a Grouped<StripBlock>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CodeLine([u8; GROUP_BYTES]);

/// Unpacked weights of `width * 16` rows: codes `[block][group][width]` as in a tile, scales and minima
/// `[block][part][width][16]` with a part for each scale of a tile.
#[derive(Default)]
struct WeightPanel {
    blocks: usize,
    codes: Vec<CodeLine>,
    scales: Vec<f32>,
    mins: Vec<f32>,
}

impl WeightPanel {
    fn resize<F: QuantFormat>(&mut self, width: usize, blocks: usize) {
        let scales = blocks * F::SCALES.per_tile() * width * ROWS;
        self.blocks = blocks;
        self.codes.resize(blocks * GROUPS * width, CodeLine([0; GROUP_BYTES]));
        self.scales.resize(scales, 0.0);
        self.mins.resize(if F::SCALES.has_min() { scales } else { 0 }, 0.0);
    }
}

thread_local! {
    static UNPACKED: RefCell<[WeightPanel; MAX_PANELS]> = RefCell::default();
    static TILES: RefCell<Grouped<Tile>> = RefCell::default();
    #[cfg(target_arch = "x86_64")]
    static STRIPS: RefCell<Grouped<StripBlock>> = RefCell::default();
}

/// Runs `compute` with activations in the layout of `variant`.
#[cfg(target_arch = "x86_64")]
fn with_input(variant: Variant, x: &Activations, pool: &Pool, compute: impl FnOnce(GemmInput<'_>)) {
    TILES.with_borrow_mut(|tiles| {
        STRIPS.with_borrow_mut(|strips| {
            match variant {
                Variant::Amx if !is_direct::<amx::Amx>(x) => tiles.fill(x, pool),
                Variant::Avx2 if !is_direct::<avx2::Avx2<false>>(x) => strips.fill(x, pool),
                Variant::Avx2Vnni if !is_direct::<avx2::Avx2<true>>(x) => strips.fill(x, pool),
                _ => {}
            }
            compute(GemmInput { rows: x, tiles, strips });
        });
    });
}

/// Runs `compute` with activations in the layout of `variant`.
#[cfg(not(target_arch = "x86_64"))]
fn with_input(variant: Variant, x: &Activations, pool: &Pool, compute: impl FnOnce(GemmInput<'_>)) {
    TILES.with_borrow_mut(|tiles| {
        let tiled = match variant {
            #[cfg(target_arch = "aarch64")]
            Variant::I8mm => !is_direct::<neon::i8mm::I8mm>(x),
            _ => false,
        };
        if tiled {
            tiles.fill(x, pool);
        }
        compute(GemmInput { rows: x, tiles });
    });
}

/// The existing variants; an instruction set selects the best one within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    #[cfg(target_arch = "aarch64")]
    I8mm,
}

impl Variant {
    /// Returns all variants within an instruction set, the best one last. Panics if this processor lacks the set.
    fn within(isa: Isa) -> impl Iterator<Item = Variant> {
        assert!(isa.is_available(), "instruction set not available");
        #[cfg(target_arch = "x86_64")]
        let more = [
            (isa >= Isa::Avx2, Variant::Avx2),
            (isa >= Isa::Avx2 && is_x86_feature_detected!("avxvnni"), Variant::Avx2Vnni),
            (isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni"), Variant::Avx512Vnni),
            (isa >= Isa::Amx, Variant::Amx),
        ];
        #[cfg(target_arch = "aarch64")]
        let more = [
            (isa >= Isa::Neon, Variant::Neon),
            (isa >= Isa::Dotprod, Variant::Dotprod),
            (isa >= Isa::I8mm, Variant::I8mm),
        ];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let more = [];
        let more = more.into_iter().filter(|(available, _)| *available).map(|(_, variant)| variant);
        std::iter::once(Variant::Scalar).chain(more)
    }

    fn best(isa: Isa) -> Variant {
        Variant::within(isa).last().expect("the scalar one at least")
    }

    const fn name(self) -> &'static str {
        match self {
            Variant::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2Vnni => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Variant::Amx => "amx-int8",
            #[cfg(target_arch = "aarch64")]
            Variant::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Variant::Dotprod => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Variant::I8mm => "neon-i8mm",
        }
    }
}

/// Evaluates `$body` with `$kernels` as the kernels of a variant.
macro_rules! with_kernels {
    ($variant:expr, $kernels:ident => $body:expr) => {{
        use $crate::gemm as g;
        macro_rules! arm {
            ($type:ty) => {{
                type $kernels = $type;
                $body
            }};
        }
        match $variant {
            g::Variant::Scalar => arm!(g::scalar::Scalar),
            #[cfg(target_arch = "x86_64")]
            g::Variant::Avx2 => arm!(g::avx2::Avx2<false>),
            #[cfg(target_arch = "x86_64")]
            g::Variant::Avx2Vnni => arm!(g::avx2::Avx2<true>),
            #[cfg(target_arch = "x86_64")]
            g::Variant::Avx512Vnni => arm!(g::avx512::Avx512Vnni),
            #[cfg(target_arch = "x86_64")]
            g::Variant::Amx => arm!(g::amx::Amx),
            #[cfg(target_arch = "aarch64")]
            g::Variant::Neon => arm!(g::neon::Neon<false>),
            #[cfg(target_arch = "aarch64")]
            g::Variant::Dotprod => arm!(g::neon::Neon<true>),
            #[cfg(target_arch = "aarch64")]
            g::Variant::I8mm => arm!(g::neon::i8mm::I8mm),
        }
    }};
}
use with_kernels;

/// Returns the name of the integer kernels that an instruction set uses on this machine: `scalar`, `avx2`,
/// `avx2-vnni`, `avx512-vnni`, `amx-int8`, `neon`, `neon-dotprod`,
/// `neon-i8mm`.
pub fn kernels_name(isa: Isa) -> &'static str {
    Variant::best(isa).name()
}

/// Computes `out[m, n] = x[m, k] . w[n, k]^T`. Panics if the shapes disagree.
pub fn matmul(isa: Isa, w: &Packed, x: &Activations, out: &mut [f32], pool: &Pool) {
    matmul_each(isa, x, [(w, out)], pool);
}

/// Computes [`matmul`] for several weights and the same activations, [`MAX_TOGETHER`] of them in one parallel region.
pub fn matmul_each<'a>(
    isa: Isa,
    x: &Activations,
    products: impl IntoIterator<Item = (&'a Packed, &'a mut [f32])>,
    pool: &Pool,
) {
    matmul_by(Variant::best(isa), x, products, pool);
}

/// `variant` comes from [`Variant::within`], so the processor has its instructions.
fn matmul_by<'a>(
    variant: Variant,
    x: &Activations,
    products: impl IntoIterator<Item = (&'a Packed, &'a mut [f32])>,
    pool: &Pool,
) {
    with_input(variant, x, pool, |x| {
        let product = |(w, out): (&'a Packed, &'a mut [f32])| {
            assert_eq!(out.len(), x.rows.rows() * w.rows(), "an output for every pair of rows");
            assert!(x.rows.blocks_per_row() * BLOCK >= w.cols(), "rows of one length");
            PackedProduct { w, x, out: OutputMatrix::new(out, w.rows()), threads: pool.threads() }
        };
        let mut products = products.into_iter().map(product).fuse();
        loop {
            let together: [_; MAX_TOGETHER] = std::array::from_fn(|_| products.next());
            if together[0].is_none() {
                return;
            }
            with_kernels!(variant, K => compute::<K>(&together, pool));
        }
    });
}

/// One product and its output.
struct PackedProduct<'a> {
    w: &'a Packed,
    x: GemmInput<'a>,
    out: OutputMatrix,
    /// Threads that share its tasks.
    threads: usize,
}

/// Computes products in one region, with their tasks in one list.
fn compute<K: Kernels>(products: &[Option<PackedProduct<'_>>; MAX_TOGETHER], pool: &Pool) {
    let tasks = products.each_ref().map(|product| product.as_ref().map_or(0, PackedProduct::tasks::<K>));
    let work: usize = products.iter().flatten().map(PackedProduct::work).sum();
    let task = |product: usize, task: usize| {
        products[product].iter().for_each(|product| product.compute::<K>(task));
    };
    pool.for_each_of(&tasks, work >= SERIAL_LIMIT, task);
}

impl PackedProduct<'_> {
    /// Returns the number of multiplications.
    fn work(&self) -> usize {
        self.w.rows() * self.w.cols() * self.x.rows.rows()
    }

    /// Returns the panels per task.
    fn panels_per_task<K: Kernels>(&self) -> usize {
        if is_direct::<K>(self.x.rows) {
            TASK_BYTES.div_ceil(self.w.panel_bytes())
        } else {
            let per_thread = self.w.panels() / K::WIDTH / self.threads;
            K::WIDTH * K::TOGETHER.min(per_thread / MIN_TASKS).max(1)
        }
    }

    fn tasks<K: Kernels>(&self) -> usize {
        self.w.panels().div_ceil(self.panels_per_task::<K>())
    }

    fn compute<K: Kernels>(&self, task: usize) {
        with_format!(self.w.dtype(), F => self.compute_format::<K, F>(task), unreachable!());
    }

    fn compute_format<K: Kernels, F: QuantFormat>(&self, task: usize) {
        let panels = self.panels_of_task::<K>(task);
        compute_panels::<K, F>(self.w, self.x, panels.clone(), &self.out, panels.start * ROWS);
    }

    fn panels_of_task<K: Kernels>(&self, task: usize) -> Range<usize> {
        let per_task = self.panels_per_task::<K>();
        task * per_task..self.w.panels().min((task + 1) * per_task)
    }
}

/// Returns whether this many activation rows unpack weights in registers: work that they share is then best done step
/// by step.
pub fn is_few(isa: Isa, rows: usize) -> bool {
    with_kernels!(Variant::best(isa), K => rows <= K::max_direct())
}

fn is_direct<K: Kernels>(x: &Activations) -> bool {
    K::WIDTH == 0 || x.rows() <= K::max_direct()
}

/// Multiplies all activation rows with some panels, into columns of `out` from `column` on.
fn compute_panels<K: Kernels, F: QuantFormat>(
    w: &Packed,
    x: GemmInput<'_>,
    panels: Range<usize>,
    out: &OutputMatrix,
    column: usize,
) {
    if is_direct::<K>(x.rows) {
        for (at, index) in panels.enumerate() {
            direct::<K, F>(w, x.rows, index, out, column + at * ROWS);
        }
        return;
    }
    let step = K::WIDTH * K::TOGETHER;
    for (at, index) in panels.clone().step_by(step).enumerate() {
        let panels = index..panels.end.min(index + step);
        UNPACKED.with_borrow_mut(|unpacked| {
            by_panel::<K, F>(w, x, panels, unpacked, out, column + at * step * ROWS);
        });
    }
    K::leave();
}

/// Multiplies all activation rows with one packed panel, unpacked in registers.
fn direct<K: Kernels, F: QuantFormat>(
    w: &Packed,
    x: &Activations,
    index: usize,
    out: &OutputMatrix,
    column: usize,
) {
    let panel = w.panel(index);
    let mut sums = [[0.0; ROWS]; MAX_DIRECT_ROWS];
    let kept = (w.rows() - index * ROWS).min(ROWS);
    let calls = x.rows().div_ceil(K::DIRECT_ROWS);
    for call in 0..calls {
        let (first, last) = (call * x.rows() / calls, (call + 1) * x.rows() / calls);
        let sums = &mut sums[..last - first];
        // SAFETY: `Variant::within` saw that the processor has the instruction set of `K`.
        unsafe { K::direct::<F>(panel, x, first, sums) };
        for (token, sums) in sums.iter().enumerate() {
            out.store(first + token, column, &sums[..kept]);
        }
    }
}

/// Multiplies all activation rows with some packed panels, at most `K::TOGETHER` times `K::WIDTH`, unpacked into
/// `unpacked`.
fn by_panel<K: Kernels, F: QuantFormat>(
    w: &Packed,
    x: GemmInput<'_>,
    panels: Range<usize>,
    unpacked: &mut [WeightPanel; MAX_PANELS],
    out: &OutputMatrix,
    column: usize,
) {
    let blocks = w.panel_bytes() / F::UNIT_BYTES * F::TILES;
    let rows = x.rows.rows();
    let calls = rows.div_ceil(K::PANEL_ROWS);
    for start in (0..blocks).step_by(K::PANEL_BLOCKS) {
        let end = blocks.min(start + K::PANEL_BLOCKS);
        let firsts = panels.clone().step_by(K::WIDTH);
        for (index, panel) in firsts.clone().zip(&mut *unpacked) {
            // A missing second panel is replaced by the first; its sums are not stored.
            let packed = std::array::from_fn(|at| w.panel((index + at).min(w.panels() - 1)));
            panel.resize::<F>(K::WIDTH, end - start);
            // SAFETY: `Variant::within` saw that the processor has the instruction set of `K`.
            unsafe { K::unpack::<F>(packed, start..end, panel) };
        }
        for call in 0..calls {
            let (first, last) = K::rows_of_call(rows, call, calls);
            for ((at, index), panel) in firsts.clone().enumerate().zip(&*unpacked) {
                let width = K::WIDTH * ROWS;
                let kept = (w.rows() - index * ROWS).min(width);
                out.with_sums(first..last, column + at * width, [kept, width], |sums| {
                    // SAFETY: as above, and `panel` was unpacked for `K` and `F`.
                    unsafe { K::multiply::<F>(panel, x, [first, start], sums) }
                });
            }
        }
    }
}

/// Pointer to the sums of some activation rows with the rows of the panels that are multiplied together: in the
/// output itself, or in a copy if the last panel extends past it. The sums live, and are the kernel's alone, during
/// the call that receives them.
#[derive(Clone, Copy)]
struct SumsPtr {
    first: *mut f32,
    /// Distance from one row's sums to the next row's.
    stride: usize,
    rows: usize,
}

impl SumsPtr {
    #[inline(always)]
    fn row(self, row: usize) -> *mut f32 {
        debug_assert!(row < self.rows);
        self.first.wrapping_add(row * self.stride)
    }
}

/// The output matrix, written by many threads: every task has its own columns.
struct OutputMatrix {
    values: AtomicPtr<f32>,
    len: usize,
    cols: usize,
}

impl OutputMatrix {
    /// The pointer is valid as long as `values` stays borrowed: a [`PackedProduct`] lives within [`matmul_by`] only.
    fn new(values: &mut [f32], cols: usize) -> OutputMatrix {
        OutputMatrix { values: AtomicPtr::new(values.as_mut_ptr()), len: values.len(), cols }
    }

    fn at(&self, row: usize, col: usize, count: usize) -> *mut f32 {
        let start = row * self.cols + col;
        assert!(col + count <= self.cols && start + count <= self.len, "within the output");
        self.values.load(Ordering::Relaxed).wrapping_add(start)
    }

    /// Prefetches the destination of a later [`Self::store`]: a step's outputs exceed the caches, and stores that
    /// missed them took a fifth of the time of a prompt's products.
    fn prepare(&self, row: usize, col: usize, count: usize) {
        let at = self.at(row, col, count);
        #[cfg(target_arch = "x86_64")]
        for line in (0..count).step_by(ROWS).chain([count - 1]) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // SAFETY: every x86-64 has the instruction, and it faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.wrapping_add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    fn store(&self, row: usize, col: usize, from: &[f32]) {
        let to = self.at(row, col, from.len());
        // SAFETY: in bounds by the assertion in `at`; `from` is a local array, and no other task has these columns.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// Lets `change` change `count` values of a row, which no other task uses.
    fn update(&self, row: usize, col: usize, count: usize, change: impl FnOnce(&mut [f32])) {
        let at = self.at(row, col, count);
        // SAFETY: in bounds by the assertion in `at`; no other task has these columns, and `change` gets them once.
        change(unsafe { std::slice::from_raw_parts_mut(at, count) });
    }

    /// Lets `compute` continue the sums of `rows` from column `col` on: `width` of them, of which `kept` are in the
    /// output.
    fn with_sums(
        &self,
        rows: Range<usize>,
        col: usize,
        [kept, width]: [usize; 2],
        compute: impl FnOnce(SumsPtr),
    ) {
        rows.clone().for_each(|row| self.prepare(row, col, kept));
        if kept == width {
            return compute(SumsPtr {
                first: self.at(rows.start, col, width),
                stride: self.cols,
                rows: rows.len(),
            });
        }
        let mut edge = [[0.0; MAX_WIDTH * ROWS]; MAX_PANEL_ROWS];
        for (row, edge) in rows.clone().zip(&mut edge) {
            self.load(row, col, &mut edge[..kept]);
        }
        compute(SumsPtr { first: edge.as_mut_ptr().cast(), stride: MAX_WIDTH * ROWS, rows: rows.len() });
        for (row, edge) in rows.zip(&edge) {
            self.store(row, col, &edge[..kept]);
        }
    }

    fn load(&self, row: usize, col: usize, to: &mut [f32]) {
        let from = self.at(row, col, to.len());
        // SAFETY: as in `store`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }
}
