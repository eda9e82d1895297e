//! Products of F16 and BF16 weights: both sides are 14-bit integers with one scale for each 32 values along
//! K.
//!
//! Integers have advantages over `vdpbf16ps`: twice the rate of f32 arithmetic, the same bits on every
//! processor, and a smaller error, because bf16 would leave 8 significant bits of every activation. A
//! weight's scale is a power of two, so that weights not much smaller than the largest of their block are
//! exact: down to a quarter of it for F16, to a 32nd for BF16. Rounded values are off by at most 1/16,382 of
//! their block's largest value.
//!
//! Invariant, the definition of every output `w . x`, independent of the number of rows, threads, tiles and
//! the instruction set:
//!
//! ```text
//! sum = 0
//! for each block of 32 along K, in ascending order:
//!     dot = sum of w_code * x_code                  exact: 32 * 8191 * 8191 fits an i32
//!     sum = fma(dot as f32, w_scale * x_scale, sum)
//! ```

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod convert;
#[cfg(target_arch = "aarch64")]
mod neon;
mod rows;
mod scalar;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use rows::HalfRows;

use super::{MAX_TOGETHER, MIN_TASKS, MatrixSource, OutputMatrix, Variant};
use crate::memory::{Arena, PanelMemory};
use crate::pool::Pool;
use crate::{Dtype, Isa};

/// Values along K that share a scale.
const BLOCK: usize = 32;

/// Rows of a panel.
const ROWS: usize = 16;

/// Panels that are multiplied together.
const WIDTH: usize = 2;

/// Codes of a panel's block: for each pair of values along K, the pairs of all rows. Value `k` is paired with value `k + 16`.
const TILE: usize = BLOCK * ROWS;

/// The largest code.
const LARGEST: f32 = 8191.0;

/// Most activation rows of one kernel call.
const MAX_ROWS: usize = 6;

/// Blocks along K that are multiplied with all activation rows before the next ones: 256 KiB of codes, for the
/// second-level cache. Fewer, for the first-level cache, was slower when measured.
const PASS_BLOCKS: usize = 128;

/// Panels and blocks along K of rows in a file that are converted together for one call of the kernels: as many rows as processors
/// prefetch streams, and 8 KiB of codes, for the first-level cache.
const IN_PLACE_TOGETHER: [usize; 2] = [1, 16];

/// Least activation rows for which a task reads panels that another task reads too.
const ROWS_PER_SHARE: usize = 48;

/// Least number of values that one task converts.
const VALUES_PER_TASK: usize = 32 << 10;

/// Number of multiplications below which a product on several threads does not pay.
const SERIAL_LIMIT: usize = 1 << 16;

/// Returns whether rows are multiplied where they are about as fast as packed ones.
pub fn is_fast_in_place(isa: Isa) -> bool {
    rows::are_converted_fast(Variant::best(isa))
}

/// The rows of a matrix as they are stored. Clones share them.
pub type StoredBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// An F16 or BF16 matrix `[rows, cols]`. Rows past the last one and values past the end of K are zero.
pub struct FixedWeights {
    rows: usize,
    cols: usize,
    storage: FixedStorage,
}

enum FixedStorage {
    /// Panels of 16 rows, each with all its codes and then the exponents of its scales.
    Packed(PanelMemory),
    /// The rows as the file has them, converted each time they are multiplied.
    InPlace {
        isa: Isa,
        dtype: Dtype,
        bytes: StoredBytes,
        /// The exponents `[block][row]` of each panel, found when it is first used: the load reads no weights.
        exponents: Box<[OnceLock<Box<[u8]>>]>,
    },
}

/// Blocks along K of one panel: codes `[block][pair][row][2]` and scales `[block][row]`; a scale is 2 to the power of `exponent -
/// 127`, 0 for exponent 0, and infinite for exponent 255, which makes a product NaN.
#[derive(Clone, Copy, Default)]
struct FixedPanel<'a> {
    codes: &'a [i16],
    exponents: &'a [u8],
}

impl FixedPanel<'_> {
    fn scale(self, block: usize, row: usize) -> f32 {
        f32::from_bits(u32::from(self.exponents[block * ROWS + row]) << 23)
    }
}

impl FixedWeights {
    /// Packs rows in the file's layout. `None` for types other than F16 and BF16.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn pack(
        isa: Isa,
        source: &MatrixSource<'_>,
        arena: &Arena,
        pool: &Pool,
    ) -> io::Result<Option<FixedWeights>> {
        let (dtype, [rows, cols]) = (source.dtype, source.shape);
        if !matches!(dtype, Dtype::F16 | Dtype::Bf16) {
            return Ok(None);
        }
        let panel_bytes = panel_bytes(cols);
        let mut memory = arena.zeroed(rows.div_ceil(ROWS) * panel_bytes)?;
        source.fill(&mut memory, panel_bytes, pool, |rows, panel| {
            let rows = HalfRows::new(dtype, cols, rows).expect("one of these types");
            let blocks = cols.div_ceil(BLOCK);
            let (codes, exponents) = panel.split_at_mut(blocks * TILE * 2);
            exponents[..blocks * ROWS].copy_from_slice(&rows::scan(isa, rows));
            rows::tiles(Variant::best(isa), rows, 0..blocks, exponents, bytemuck::cast_slice_mut(codes));
        });
        Ok(Some(FixedWeights { rows, cols, storage: FixedStorage::Packed(memory.into()) }))
    }

    /// Takes rows in the file's layout and leaves them there; see [`is_fast_in_place`]. `None` for types other than F16 and BF16. Panics unless `bytes` are
    /// `rows` rows of `cols` numbers.
    pub fn in_place(
        isa: Isa,
        dtype: Dtype,
        [rows, cols]: [usize; 2],
        bytes: StoredBytes,
    ) -> Option<FixedWeights> {
        if !matches!(dtype, Dtype::F16 | Dtype::Bf16) {
            return None;
        }
        assert_eq!((*bytes).as_ref().len(), rows * cols * 2, "rows as the shape says");
        let exponents = (0..rows.div_ceil(ROWS)).map(|_| OnceLock::new()).collect();
        Some(FixedWeights { rows, cols, storage: FixedStorage::InPlace { isa, dtype, bytes, exponents } })
    }

    /// Takes panels that [`Self::pack`] made of a matrix of this shape, under the same [`PANEL_LAYOUT`](super::PANEL_LAYOUT).
    /// `None` if they cannot be: another length, or not at a cache line.
    pub fn of([rows, cols]: [usize; 2], memory: PanelMemory) -> Option<FixedWeights> {
        let whole = memory.holds(rows.div_ceil(ROWS) * panel_bytes(cols));
        whole.then_some(FixedWeights { rows, cols, storage: FixedStorage::Packed(memory) })
    }

    /// Returns the panels; `None` if the rows are used where the file has them.
    pub fn memory(&self) -> Option<&PanelMemory> {
        match &self.storage {
            FixedStorage::Packed(memory) => Some(memory),
            FixedStorage::InPlace { .. } => None,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Unpacks one row as floats, with the codes' rounding, into `out` of `cols` values: the look-up of an embedding.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let (index, row) = (row / ROWS, row % ROWS);
        match &self.storage {
            FixedStorage::Packed(memory) => {
                let panel = self.packed_panel(memory, index, 0..self.blocks());
                for (block, out) in out.chunks_mut(BLOCK).enumerate() {
                    let (scale, tile) = (panel.scale(block, row), &panel.codes[block * TILE..][..TILE]);
                    for (k, out) in out.iter_mut().enumerate() {
                        let [pair, side] = [k % (BLOCK / 2), k / (BLOCK / 2)];
                        *out = f32::from(tile[2 * (pair * ROWS + row) + side]) * scale;
                    }
                }
            }
            FixedStorage::InPlace { .. } => {
                let (rows, exponents) = self.rows_at(index);
                rows.unpack(row, exponents, out);
            }
        }
    }

    fn panels(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    fn blocks(&self) -> usize {
        self.cols.div_ceil(BLOCK)
    }

    fn packed_panel<'a>(&self, memory: &'a [u8], index: usize, blocks: Range<usize>) -> FixedPanel<'a> {
        let bytes = panel_bytes(self.cols);
        let (codes, exponents) = memory[index * bytes..][..bytes].split_at(self.blocks() * TILE * 2);
        FixedPanel {
            codes: &bytemuck::cast_slice(codes)[blocks.start * TILE..blocks.end * TILE],
            exponents: &exponents[blocks.start * ROWS..blocks.end * ROWS],
        }
    }

    /// Returns the rows of a panel in the file, and their exponents `[block][row]`. Panics if the rows are packed.
    fn rows_at(&self, index: usize) -> (HalfRows<'_>, &[u8]) {
        let FixedStorage::InPlace { isa, dtype, bytes, exponents } = &self.storage else {
            unreachable!("packed rows")
        };
        let (bytes, row_bytes) = ((**bytes).as_ref(), self.cols * 2);
        let bytes = &bytes[index * ROWS * row_bytes..self.rows.min((index + 1) * ROWS) * row_bytes];
        let rows = HalfRows::new(*dtype, self.cols, bytes).expect("the constructor saw the type");
        (rows, exponents[index].get_or_init(|| rows::scan(*isa, rows)))
    }

    /// Returns the panels that are multiplied together, and how many of their blocks along K before the next ones, for so many
    /// calls of the kernels.
    fn together(&self, calls: usize) -> [usize; 2] {
        match (&self.storage, calls) {
            (FixedStorage::Packed(_), 1) => [WIDTH, self.blocks().max(1)],
            (FixedStorage::InPlace { .. }, 1) => IN_PLACE_TOGETHER,
            _ => [WIDTH, PASS_BLOCKS],
        }
    }

    /// Returns blocks of a panel, converted into `codes` if necessary.
    fn panel_at<'a>(
        &'a self,
        variant: Variant,
        index: usize,
        blocks: Range<usize>,
        codes: &'a mut ConvertedCodes,
    ) -> FixedPanel<'a> {
        match &self.storage {
            FixedStorage::Packed(memory) => self.packed_panel(memory, index, blocks),
            FixedStorage::InPlace { .. } => {
                let (rows, exponents) = self.rows_at(index);
                let codes = codes.of_len(blocks.len() * TILE);
                rows::tiles(variant, rows, blocks.clone(), exponents, codes);
                FixedPanel { codes, exponents: &exponents[blocks.start * ROWS..blocks.end * ROWS] }
            }
        }
    }
}

/// Memory for codes, kept between products.
#[derive(Default)]
struct ConvertedCodes(Vec<i16>);

impl ConvertedCodes {
    /// Returns memory from a cache line on, with any contents.
    fn of_len(&mut self, len: usize) -> &mut [i16] {
        let spare = 64 / size_of::<i16>();
        if self.0.len() < len + spare {
            self.0.resize(len + spare, 0);
        }
        let start = self.0.as_ptr().align_offset(64).min(spare);
        &mut self.0[start..][..len]
    }
}

thread_local! {
    static CONVERTED: RefCell<[ConvertedCodes; WIDTH]> = RefCell::default();
}

/// Returns the bytes of a panel of rows of `cols` values: whole cache lines.
fn panel_bytes(cols: usize) -> usize {
    let blocks = cols.div_ceil(BLOCK);
    blocks * TILE * 2 + (blocks * ROWS).next_multiple_of(64)
}

/// 32 activations in the pairs of [`TILE`]: value 0, value 16, value 1, ...
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
struct FixedBlock {
    codes: [i16; BLOCK],
    scale: f32,
}

/// Rows of a step as 14-bit codes; keeps its memory between calls.
#[derive(Debug, Default)]
pub struct FixedActivations {
    rows: usize,
    blocks_per_row: usize,
    blocks: Vec<FixedBlock>,
}

impl FixedActivations {
    /// Quantises the rows of `x`, `[rows, cols]`; `cols` must not be 0.
    pub fn quantize(&mut self, isa: Isa, x: &[f32], cols: usize, pool: &Pool) {
        self.rows = x.len() / cols;
        self.blocks_per_row = cols.div_ceil(BLOCK);
        let per_row = self.blocks_per_row;
        self.blocks.resize(self.rows * per_row, FixedBlock::default());
        let rows_per_task = VALUES_PER_TASK.div_ceil(cols);
        pool.chunks_mut(&mut self.blocks, rows_per_task * per_row, |task, blocks| {
            let x = x[task * rows_per_task * cols..].chunks_exact(cols);
            for (blocks, x) in blocks.chunks_exact_mut(per_row).zip(x) {
                convert::quantize_row(isa, x, blocks);
            }
        });
    }

    fn row(&self, index: usize) -> &[FixedBlock] {
        &self.blocks[index * self.blocks_per_row..][..self.blocks_per_row]
    }
}

/// Blocks of one activation row.
type FixedRow<'a> = &'a [FixedBlock];

/// Sums of one activation row with the rows of [`WIDTH`] panels.
type RowSums = [f32; WIDTH * ROWS];

/// Computes `out[m, n] = x[m, k] . w[n, k]^T`. Panics if the shapes disagree.
pub fn matmul(isa: Isa, w: &FixedWeights, x: &FixedActivations, out: &mut [f32], pool: &Pool) {
    matmul_each(isa, x, [(w, out)], pool);
}

/// Computes [`matmul`] for several weights and the same activations, [`MAX_TOGETHER`] of them in one parallel region.
pub fn matmul_each<'a>(
    isa: Isa,
    x: &FixedActivations,
    products: impl IntoIterator<Item = (&'a FixedWeights, &'a mut [f32])>,
    pool: &Pool,
) {
    matmul_by(Variant::best(isa), x, products, pool);
}

/// `variant` comes from [`Variant::within`], so the processor has its instructions.
fn matmul_by<'a>(
    variant: Variant,
    x: &FixedActivations,
    products: impl IntoIterator<Item = (&'a FixedWeights, &'a mut [f32])>,
    pool: &Pool,
) {
    let product = |(w, out): (&'a FixedWeights, &'a mut [f32])| {
        assert_eq!(out.len(), x.rows * w.rows, "an output for every pair of rows");
        assert_eq!(x.blocks_per_row, w.cols.div_ceil(BLOCK), "rows of one length");
        (w, OutputMatrix::new(out, w.rows))
    };
    let mut products = products.into_iter().map(product).fuse();
    loop {
        let together: [_; MAX_TOGETHER] = std::array::from_fn(|_| products.next());
        if together[0].is_none() {
            return;
        }
        let tasks = together
            .each_ref()
            .map(|product| product.as_ref().map_or(0, |(w, _)| w.panels().div_ceil(WIDTH)));
        // Few panels are shared by reading them more than once.
        let shares = (pool.threads() * MIN_TASKS).div_ceil(tasks.iter().sum());
        let shares = shares.min(x.rows / ROWS_PER_SHARE).max(1);
        let work: usize = together.iter().flatten().map(|(w, _)| w.rows * w.cols * x.rows).sum();
        pool.for_each_of(&tasks.map(|tasks| tasks * shares), work >= SERIAL_LIMIT, |product, task| {
            let (first, share) = (task / shares * WIDTH, task % shares);
            let rows = share * x.rows / shares..(share + 1) * x.rows / shares;
            together[product].iter().for_each(|(w, out)| panels(variant, w, (x, rows.clone()), first, out));
        });
    }
}

/// Multiplies some activation rows with at most [`WIDTH`] panels from `index` on.
fn panels(
    variant: Variant,
    w: &FixedWeights,
    (x, of): (&FixedActivations, Range<usize>),
    index: usize,
    out: &OutputMatrix,
) {
    let end = w.panels().min(index + WIDTH);
    if of.len() == 1
        && (index..end).all(|index| multiply_one(variant, w, x.row(of.start), index, (of.start, out)))
    {
        return;
    }
    let calls = of.len().div_ceil(MAX_ROWS);
    let [width, pass] = w.together(calls);
    for first in (index..end).step_by(width) {
        let indices = first..end.min(first + width);
        for start in (0..x.blocks_per_row).step_by(pass) {
            let blocks = start..x.blocks_per_row.min(start + pass);
            CONVERTED.with_borrow_mut(|codes| {
                let mut panels = [FixedPanel::default(); WIDTH];
                for ((panel, codes), index) in panels.iter_mut().zip(codes).zip(indices.clone()) {
                    *panel = w.panel_at(variant, index, blocks.clone(), codes);
                }
                for call in 0..calls {
                    // Rows are spread evenly over the calls: one with few rows would waste the panels' bandwidth.
                    let [start, end] = [call, call + 1].map(|call| of.start + call * of.len() / calls);
                    let rows = start..end;
                    let columns = first * ROWS..w.rows.min(indices.end * ROWS);
                    add_blocks(variant, &panels[..indices.len()], x, rows, blocks.clone(), columns, out);
                }
            });
        }
    }
}

/// Multiplies one activation row with a panel of rows that are used where the file has them, and stores the sums in `row` of `out`.
/// Returns whether it did.
fn multiply_one(
    variant: Variant,
    w: &FixedWeights,
    x: FixedRow<'_>,
    index: usize,
    (row, out): (usize, &OutputMatrix),
) -> bool {
    let FixedStorage::InPlace { .. } = w.storage else { return false };
    let (rows, exponents) = w.rows_at(index);
    let sums = rows::multiply_one(variant, rows, exponents, x);
    sums.iter().for_each(|sums| out.store(row, index * ROWS, &sums[..ROWS.min(w.rows - index * ROWS)]));
    sums.is_some()
}

/// Adds the products of some blocks of the panels with some activation rows to `columns` of `out`.
fn add_blocks(
    variant: Variant,
    panels: &[FixedPanel<'_>],
    x: &FixedActivations,
    rows: Range<usize>,
    blocks: Range<usize>,
    columns: Range<usize>,
    out: &OutputMatrix,
) {
    let (column, kept) = (columns.start, columns.len());
    let mut sums = [[0.0; WIDTH * ROWS]; MAX_ROWS];
    let sums = &mut sums[..rows.len()];
    rows.clone().for_each(|row| out.prepare(row, column, kept));
    if blocks.start > 0 {
        for (row, sums) in rows.clone().zip(&mut *sums) {
            out.load(row, column, &mut sums[..kept]);
        }
    }
    // Rows past the last repeat the last one, so that kernels may read MAX_ROWS of them.
    let x = std::array::from_fn(|row| &x.row(rows.start + row.min(rows.len() - 1))[blocks.clone()]);
    multiply(variant, panels, x, sums);
    for (row, sums) in rows.zip(&*sums) {
        out.store(row, column, &sums[..kept]);
    }
}

/// Adds the products of the panels' blocks with the same blocks of the first `sums.len()` activation rows.
fn multiply(variant: Variant, w: &[FixedPanel<'_>], rows: [FixedRow<'_>; MAX_ROWS], sums: &mut [RowSums]) {
    let blocks = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == blocks), "rows of one length");
    let fits = |w: &FixedPanel<'_>| blocks * TILE <= w.codes.len() && blocks * ROWS <= w.exponents.len();
    assert!(w.iter().all(fits), "panels have these blocks");
    match variant {
        Variant::Scalar => scalar::multiply(w, rows, blocks, sums),
        // SAFETY: `Variant::within` saw that the processor has the features; the lengths by the assertions above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2 => unsafe { avx2::multiply(w, rows, blocks, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2Vnni => unsafe { avx2::multiply_vnni(w, rows, blocks, sums) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512Vnni | Variant::Amx => unsafe { avx512::multiply(w, rows, blocks, sums) },
        // SAFETY: as above; NEON has the instructions.
        #[cfg(target_arch = "aarch64")]
        Variant::Neon | Variant::Dotprod | Variant::I8mm => unsafe { neon::multiply(w, rows, blocks, sums) },
    }
}
