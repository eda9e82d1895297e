//! Products of F16 and BF16 weights: both sides are 14-bit integers with one scale for each 32 values along K.
//!
//! Integers have advantages over `vdpbf16ps`: twice the rate of f32 arithmetic, the same bits on every processor, and
//! a smaller error, because bf16 would leave 8 significant bits of every activation. A weight's scale is a power of
//! two, so that weights not much smaller than the largest of their block are exact: down to a quarter of it for F16,
//! to a 32nd for BF16. Rounded values are off by at most 1/16,382 of their block's largest value.
//!
//! Invariant, the definition of every output `w . x`, independent of the number of rows, threads, tiles and the
//! instruction set:
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
mod scalar;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;

use super::{MAX_TOGETHER, MatrixSource, OutputMatrix, Variant};
use crate::memory::{Arena, PanelMemory};
use crate::pool::Pool;
use crate::{Dtype, Isa};

/// Values along K that share a scale.
const BLOCK: usize = 32;

/// Rows of a panel.
const ROWS: usize = 16;

/// Panels that are multiplied together.
const WIDTH: usize = 2;

/// Codes of a panel's block: for each pair of values along K, the pairs of all rows.
const TILE: usize = BLOCK * ROWS;

/// The largest code.
const LARGEST: f32 = 8191.0;

/// Most activation rows of one kernel call.
const MAX_ROWS: usize = 6;

/// Blocks along K that are multiplied with all activation rows before the next ones: 256 KiB of codes, for the
/// second-level cache. Fewer, for the first-level cache, was slower when measured.
const PASS_BLOCKS: usize = 128;

/// Least number of values that one task converts.
const VALUES_PER_TASK: usize = 32 << 10;

/// Number of multiplications below which a product on several threads does not pay.
const SERIAL_LIMIT: usize = 1 << 16;

/// An F16 or BF16 matrix `[rows, cols]` in the kernels' layout: panels of 16 rows, each with all its codes and then
/// the exponents of its scales. Rows past the last one and values past the end of K are zero.
pub struct FixedWeights {
    rows: usize,
    cols: usize,
    memory: PanelMemory,
}

/// One panel's codes `[block][pair][row][2]` and scales `[block][row]`; a scale is 2 to the power of `exponent -
/// 127`, 0 for exponent 0, and infinite for exponent 255, which makes a product NaN.
#[derive(Clone, Copy)]
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
            convert::pack_panel(isa, dtype, rows, cols, panel);
        });
        Ok(Some(FixedWeights { rows, cols, memory: memory.into() }))
    }

    /// Takes panels that [`Self::pack`] made of a matrix of this shape, under the same [`PANEL_LAYOUT`](super::PANEL_LAYOUT).
    /// `None` if they cannot be: another length, or not at a cache line.
    pub fn of([rows, cols]: [usize; 2], memory: PanelMemory) -> Option<FixedWeights> {
        let whole = memory.holds(rows.div_ceil(ROWS) * panel_bytes(cols));
        whole.then_some(FixedWeights { rows, cols, memory })
    }

    pub fn memory(&self) -> &PanelMemory {
        &self.memory
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the bytes of memory.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Unpacks one row as floats, with the codes' rounding, into `out` of `cols` values: the look-up of an embedding.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let panel = self.panel(row / ROWS);
        let row = row % ROWS;
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let scale = panel.scale(block, row);
            let tile = &panel.codes[block * TILE..][..TILE];
            for (k, out) in out.iter_mut().enumerate() {
                *out = f32::from(tile[k / 2 * 2 * ROWS + 2 * row + k % 2]) * scale;
            }
        }
    }

    fn panels(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    fn panel(&self, index: usize) -> FixedPanel<'_> {
        let bytes = panel_bytes(self.cols);
        let blocks = self.cols.div_ceil(BLOCK);
        let (codes, exponents) = self.memory[index * bytes..][..bytes].split_at(blocks * TILE * 2);
        FixedPanel { codes: bytemuck::cast_slice(codes), exponents: &exponents[..blocks * ROWS] }
    }
}

/// Returns the bytes of a panel of rows of `cols` values: whole cache lines.
fn panel_bytes(cols: usize) -> usize {
    let blocks = cols.div_ceil(BLOCK);
    blocks * TILE * 2 + (blocks * ROWS).next_multiple_of(64)
}

/// 32 activations.
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

/// One activation row.
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
        let tasks = together.each_ref().map(|product| {
            let (w, _) = product.as_ref()?;
            Some(w.panels().div_ceil(WIDTH))
        });
        let work: usize = together.iter().flatten().map(|(w, _)| w.rows * w.cols * x.rows).sum();
        pool.for_each_of(&tasks.map(Option::unwrap_or_default), work >= SERIAL_LIMIT, |product, task| {
            together[product].iter().for_each(|(w, out)| panels(variant, w, x, task * WIDTH, out));
        });
    }
}

/// Multiplies all activation rows with the panels from `index` on.
fn panels(variant: Variant, w: &FixedWeights, x: &FixedActivations, index: usize, out: &OutputMatrix) {
    // A missing second panel is replaced by the first; its sums are not stored.
    let panels = std::array::from_fn(|at| w.panel((index + at).min(w.panels() - 1)));
    let kept = (w.rows - index * ROWS).min(WIDTH * ROWS);
    let calls = x.rows.div_ceil(MAX_ROWS);
    let pass = if calls > 1 { PASS_BLOCKS } else { x.blocks_per_row };
    for start in (0..x.blocks_per_row).step_by(pass) {
        let blocks = start..x.blocks_per_row.min(start + pass);
        for call in 0..calls {
            // Rows are spread evenly over the calls: one with few rows would waste the panels' bandwidth.
            let (first, last) = (call * x.rows / calls, (call + 1) * x.rows / calls);
            let mut sums = [[0.0; WIDTH * ROWS]; MAX_ROWS];
            let sums = &mut sums[..last - first];
            (first..last).for_each(|row| out.prepare(row, index * ROWS, kept));
            if start > 0 {
                for (row, sums) in sums.iter_mut().enumerate() {
                    out.load(first + row, index * ROWS, &mut sums[..kept]);
                }
            }
            multiply(variant, panels, x, first, blocks.clone(), sums);
            for (row, sums) in sums.iter().enumerate() {
                out.store(first + row, index * ROWS, &sums[..kept]);
            }
        }
    }
}

/// Adds the products of some blocks of the panels with activation rows `first..first + sums.len()`.
fn multiply(
    variant: Variant,
    w: [FixedPanel<'_>; WIDTH],
    x: &FixedActivations,
    first: usize,
    blocks: Range<usize>,
    sums: &mut [RowSums],
) {
    // Rows past the last repeat the last one, so that kernels may read MAX_ROWS of them.
    let rows = std::array::from_fn(|row| x.row(first + row.min(sums.len() - 1)));
    assert!(blocks.end * TILE <= w[0].codes.len().min(w[1].codes.len()), "panels have these blocks");
    assert!(blocks.end <= x.blocks_per_row, "rows have these blocks");
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
