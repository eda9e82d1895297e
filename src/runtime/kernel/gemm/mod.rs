//! Products of quantised weights with quantised activations: integer dot products, f32 sums.
//!
//! Invariant, the definition of every output `w . x`, whatever the number of rows, threads, tiles or the instruction set:
//!
//! ```text
//! sum = 0
//! for each block of 32 along K, in ascending order (for each half of it, where the format has a scale for each 16):
//!     dot = sum of (code - zero) * x_code           exact, in i32
//!     sum = fma(dot as f32, scale * x_scale, sum)
//!     sum = fma(min, x_scale * sum of x_codes, sum)  only in formats that have a minimum
//! ```
//!
//! Few activation rows take the *direct* path, which unpacks weights in registers; many take panels of weights that are
//! unpacked once into the cache and multiplied with all rows. Both follow the order above.

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
#[cfg(all(test, unix))]
mod guarded;
mod pack;
mod scalar;
#[cfg(test)]
mod tests;
mod tiles;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};

pub use activation::Activations;
pub use format::BLOCK;
pub use format::MAX_MXFP4_EXPONENT;
use format::{Format, GROUP_BYTES, GROUPS, ROWS, with_format};
pub use gated::gated;
pub use pack::{Packed, Source};
use tiles::Tiles;

use super::isa::{self, Isa};
use super::pool::Pool;

/// Activation rows of one call of the direct path, at most.
const MAX_DIRECT_ROWS: usize = 8;

/// Where the direct path ends to be the faster one without tiles, as measured: from there on both are the same until the rows
/// outgrow the second-level cache.
const MAX_DIRECT: usize = 96;

/// Activation rows of one call of the panel path, at most.
const MAX_PANEL_ROWS: usize = 16;

/// Unpacked panels that all activation rows pass by turns, at most.
const MAX_PANELS: usize = 4;

/// Packed panels (of 16 rows) that are unpacked together, at most.
const MAX_WIDTH: usize = 2;

/// Weight bytes that one task of the direct path reads, at least.
const TASK_BYTES: usize = 32 << 10;

/// Tasks that every thread should get of a product, so that one that is held up leaves its own to others.
const MIN_TASKS: usize = 4;

/// Products of the same activations that share a parallel region, at most.
const MAX_TOGETHER: usize = 4;

/// Below this many multiplications a product is not worth waking other threads for.
const SERIAL_LIMIT: usize = 1 << 17;

/// The kernels of one instruction set.
trait Kernels {
    /// Packed panels that the panel path takes at a time; 0 where there is no panel path.
    const WIDTH: usize;

    /// Activation rows of one call of [`Self::direct`], at most [`MAX_DIRECT_ROWS`].
    const DIRECT_ROWS: usize;

    /// Up to this many activation rows the direct path is the faster one.
    const MAX_DIRECT: usize = MAX_DIRECT;

    /// Activation rows of one call of [`Self::multiply`], at most [`MAX_PANEL_ROWS`].
    const PANEL_ROWS: usize;

    /// Blocks along K that are unpacked together: 4,096 values, so that a panel stays in the second-level cache.
    const PANEL_BLOCKS: usize = 128;

    /// Unpacked panels that every call's rows pass by turns, at most [`MAX_PANELS`]: more where rows are slow to come.
    const TOGETHER: usize = 1;

    /// `out[t][row]` = product of the panel's row with activation row `first + t`; at most [`Self::DIRECT_ROWS`].
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn direct<F: Format>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]);

    /// Unpacks `blocks.len()` blocks of each of [`Self::WIDTH`] panels.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn unpack<F: Format>(panels: [&[u8]; MAX_WIDTH], blocks: Range<usize>, out: &mut Panel);

    /// Products of the panel's blocks, number `start` of a row and those after it, with activation rows from `first` on. Where
    /// `start` is 0 that is what `sums` become, otherwise it is added to them.
    ///
    /// # Safety
    /// The processor has the instruction set; the panel was filled by this one's [`Self::unpack`] for `F`; `sums` are
    /// [`Self::WIDTH`] panels wide.
    unsafe fn multiply<F: Format>(panel: &Panel, x: Input<'_>, first: [usize; 2], sums: Sums);

    /// The first row of call number `call` of `calls` for `rows` rows, and the one after its last: spread evenly, because a call
    /// with few of them wastes the panel's bandwidth.
    fn rows_of_call(rows: usize, call: usize, calls: usize) -> (usize, usize) {
        (call * rows / calls, (call + 1) * rows / calls)
    }

    /// Undoes what [`Self::multiply`] changed about this thread.
    fn leave() {}
}

/// How the direct path fetches weights before it reads them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct FetchAhead {
    /// Bytes from what is read to what is fetched; 0 fetches nothing.
    distance: usize,
    /// Into the first-level cache, or only the second-level one, which waits for more lines at a time.
    near: bool,
}

#[cfg(target_arch = "x86_64")]
impl FetchAhead {
    /// For `rows` activation rows, where `needed` is the kernel's own way; all measured.
    ///
    /// Most processors follow one or two streams by themselves, and further ahead; not the scales, low and high bits of long
    /// units, nor when they compute long at each line. Intel's follow even single streams less far: so they read Q4_K a third
    /// faster.
    #[inline(always)]
    fn new<F: Format>(rows: usize, needed: FetchAhead) -> FetchAhead {
        match rows > 2 || (F::HIGH > 0 && F::TILES > 2) {
            _ if rows <= 2 && isa::is_intel() => FetchAhead { distance: 3072, near: false },
            true => needed,
            false => FetchAhead { distance: 0, near: false },
        }
    }

    /// Fetches this tile's part. Past the end of the weights it does no harm.
    #[inline(always)]
    fn fetch<F: Format>(self, unit: *const u8, tile: usize) {
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

/// Activations as the kernels take them.
#[derive(Clone, Copy)]
struct Input<'a> {
    rows: &'a Activations,
    /// The same by tiles, for kernels that want them.
    tiles: &'a Tiles,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; GROUP_BYTES]);

/// Unpacked weights of `width * 16` rows: codes `[block][group][width]` as in a tile, scales and minima
/// `[block][part][width][16]` with a part for each scale of a tile.
#[derive(Default)]
struct Panel {
    blocks: usize,
    codes: Vec<Line>,
    scales: Vec<f32>,
    mins: Vec<f32>,
}

impl Panel {
    fn resize<F: Format>(&mut self, width: usize, blocks: usize) {
        let scales = blocks * F::SCALES.per_tile() * width * ROWS;
        self.blocks = blocks;
        self.codes.resize(blocks * GROUPS * width, Line([0; GROUP_BYTES]));
        self.scales.resize(scales, 0.0);
        self.mins.resize(if F::SCALES.has_min() { scales } else { 0 }, 0.0);
    }
}

thread_local! {
    static UNPACKED: RefCell<[Panel; MAX_PANELS]> = RefCell::default();
    static TILES: RefCell<Tiles> = RefCell::default();
}

/// Runs `compute` with activations as `variant` takes them.
fn with_input(variant: Variant, x: &Activations, pool: &Pool, compute: impl FnOnce(Input<'_>)) {
    TILES.with_borrow_mut(|tiles| {
        #[cfg(target_arch = "x86_64")]
        if variant == Variant::Amx && !is_direct::<amx::Amx>(x) {
            tiles.fill(x, pool);
        }
        compute(Input { rows: x, tiles });
    });
}

/// The variants that exist; an instruction set decides the best one of those within it.
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
}

impl Variant {
    /// All variants within an instruction set, the best one last. Panics when this processor does not have the set.
    fn within(isa: Isa) -> impl Iterator<Item = Variant> {
        assert!(isa <= isa::isa(), "instruction set not available");
        #[cfg(target_arch = "x86_64")]
        let more = [
            (isa >= Isa::Avx2, Variant::Avx2),
            (isa >= Isa::Avx2 && is_x86_feature_detected!("avxvnni"), Variant::Avx2Vnni),
            (isa >= Isa::Avx512 && is_x86_feature_detected!("avx512vnni"), Variant::Avx512Vnni),
            (isa >= Isa::Amx, Variant::Amx),
        ];
        #[cfg(not(target_arch = "x86_64"))]
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
        }
    }
}

/// The integer kernels that an instruction set uses on this machine: `scalar`, `avx2`, `avx2-vnni`, `avx512-vnni`, `amx-int8`.
pub fn kernels_name(isa: Isa) -> &'static str {
    Variant::best(isa).name()
}

/// `out[m, n] = x[m, k] . w[n, k]^T`. Panics when the shapes disagree.
pub fn matmul(isa: Isa, w: &Packed, x: &Activations, out: &mut [f32], pool: &Pool) {
    matmul_each(isa, x, [(w, out)], pool);
}

/// As [`matmul`] for several weights and the same activations, [`MAX_TOGETHER`] of them in one parallel region.
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
            Product { w, x, out: Output::new(out, w.rows()), threads: pool.threads() }
        };
        let mut products = products.into_iter().map(product).fuse();
        loop {
            let together: [_; MAX_TOGETHER] = std::array::from_fn(|_| products.next());
            if together[0].is_none() {
                return;
            }
            match variant {
                Variant::Scalar => compute::<scalar::Scalar>(&together, pool),
                #[cfg(target_arch = "x86_64")]
                Variant::Avx2 => compute::<avx2::Avx2<false>>(&together, pool),
                #[cfg(target_arch = "x86_64")]
                Variant::Avx2Vnni => compute::<avx2::Avx2<true>>(&together, pool),
                #[cfg(target_arch = "x86_64")]
                Variant::Avx512Vnni => compute::<avx512::Avx512Vnni>(&together, pool),
                #[cfg(target_arch = "x86_64")]
                Variant::Amx => compute::<amx::Amx>(&together, pool),
            }
        }
    });
}

/// One product and where it goes.
struct Product<'a> {
    w: &'a Packed,
    x: Input<'a>,
    out: Output,
    /// Threads that share its tasks.
    threads: usize,
}

/// Products in one region, their tasks in one list.
fn compute<K: Kernels>(products: &[Option<Product<'_>>; MAX_TOGETHER], pool: &Pool) {
    let tasks = products.each_ref().map(|product| product.as_ref().map_or(0, Product::tasks::<K>));
    let work: usize = products.iter().flatten().map(Product::work).sum();
    let task = |product: usize, task: usize| {
        products[product].iter().for_each(|product| product.compute::<K>(task));
    };
    pool.for_each_of(&tasks, work >= SERIAL_LIMIT, task);
}

impl Product<'_> {
    /// Multiplications.
    fn work(&self) -> usize {
        self.w.rows() * self.w.cols() * self.x.rows.rows()
    }

    /// Panels that a task takes.
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

    fn compute_format<K: Kernels, F: Format>(&self, task: usize) {
        let per_task = self.panels_per_task::<K>();
        let panels = task * per_task..self.w.panels().min((task + 1) * per_task);
        compute_panels::<K, F>(self.w, self.x, panels.clone(), &self.out, panels.start * ROWS);
    }
}

/// Whether so many activation rows unpack weights in registers: what they share beyond a row is then best done step by step.
pub fn is_few(isa: Isa, rows: usize) -> bool {
    match Variant::best(isa) {
        #[cfg(target_arch = "x86_64")]
        Variant::Amx => rows <= amx::MAX_DIRECT,
        _ => rows <= MAX_DIRECT,
    }
}

fn is_direct<K: Kernels>(x: &Activations) -> bool {
    K::WIDTH == 0 || x.rows() <= K::MAX_DIRECT
}

/// All activation rows with some panels, to columns of `out` from `column` on.
fn compute_panels<K: Kernels, F: Format>(
    w: &Packed,
    x: Input<'_>,
    panels: Range<usize>,
    out: &Output,
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

/// All activation rows with one packed panel, unpacked in registers.
fn direct<K: Kernels, F: Format>(w: &Packed, x: &Activations, index: usize, out: &Output, column: usize) {
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

/// All activation rows with some packed panels, at most `K::TOGETHER` times `K::WIDTH`, unpacked into `unpacked`.
fn by_panel<K: Kernels, F: Format>(
    w: &Packed,
    x: Input<'_>,
    panels: Range<usize>,
    unpacked: &mut [Panel; MAX_PANELS],
    out: &Output,
    column: usize,
) {
    let blocks = w.panel_bytes() / F::UNIT_BYTES * F::TILES;
    let rows = x.rows.rows();
    let calls = rows.div_ceil(K::PANEL_ROWS);
    for start in (0..blocks).step_by(K::PANEL_BLOCKS) {
        let end = blocks.min(start + K::PANEL_BLOCKS);
        let firsts = panels.clone().step_by(K::WIDTH);
        for (index, panel) in firsts.clone().zip(&mut *unpacked) {
            // A second panel that does not exist is the first one again; its sums are not kept.
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

/// Sums of some activation rows with the rows of the panels that are multiplied together: in the output itself, or in a copy
/// where the last panel reaches past it. They live, and are the kernel's alone, as long as the call that they are given to.
#[derive(Clone, Copy)]
struct Sums {
    first: *mut f32,
    /// From one row's sums to the next row's.
    stride: usize,
    rows: usize,
}

impl Sums {
    #[inline(always)]
    fn row(self, row: usize) -> *mut f32 {
        debug_assert!(row < self.rows);
        self.first.wrapping_add(row * self.stride)
    }
}

/// The output matrix, written by many threads: every task has columns of its own.
struct Output {
    values: AtomicPtr<f32>,
    len: usize,
    cols: usize,
}

impl Output {
    /// The pointer is valid as long as `values` stays borrowed: a [`Product`] lives within [`matmul_by`] only.
    fn new(values: &mut [f32], cols: usize) -> Output {
        Output { values: AtomicPtr::new(values.as_mut_ptr()), len: values.len(), cols }
    }

    fn at(&self, row: usize, col: usize, count: usize) -> *mut f32 {
        let start = row * self.cols + col;
        assert!(col + count <= self.cols && start + count <= self.len, "within the output");
        self.values.load(Ordering::Relaxed).wrapping_add(start)
    }

    /// Fetches the place of a later [`Self::store`]: a step's outputs are larger than the caches, and storing to what is not
    /// in them was a fifth of the time of a prompt's products.
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

    /// Has `compute` continue sums of `rows` from column `col` on: `width` of them, of which `kept` are in the output.
    fn with_sums(
        &self,
        rows: Range<usize>,
        col: usize,
        [kept, width]: [usize; 2],
        compute: impl FnOnce(Sums),
    ) {
        rows.clone().for_each(|row| self.prepare(row, col, kept));
        if kept == width {
            return compute(Sums {
                first: self.at(rows.start, col, width),
                stride: self.cols,
                rows: rows.len(),
            });
        }
        let mut edge = [[0.0; MAX_WIDTH * ROWS]; MAX_PANEL_ROWS];
        for (row, edge) in rows.clone().zip(&mut edge) {
            self.load(row, col, &mut edge[..kept]);
        }
        compute(Sums { first: edge.as_mut_ptr().cast(), stride: MAX_WIDTH * ROWS, rows: rows.len() });
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
