//! Products of f32 weights with many activation rows, bit for bit those of [`dot`](crate::dot).
//!
//! An output is the sum of 16 lanes, each the sum of every 16th product. A tile of outputs takes one lane at
//! a time: a register then holds that lane's sums of 16 weight rows, nothing is added across a register, and
//! the lanes come in the order in which the tree of `sum_lanes` adds them. Weights and activations are
//! rearranged to `[lane][block][row]` for it, weights panel by panel, so that the file's own pages stay their
//! only copy.

use std::cell::RefCell;
use std::ops::Range;

use super::{MIN_TASKS, OutputMatrix, SERIAL_LIMIT};
use crate::Isa;
use crate::pool::Pool;
use crate::wide::{LANES, Wide};

/// Weight rows of a panel.
const ROWS: usize = LANES;

/// Panels of a task.
const WIDTH: usize = 2;

/// Activation rows of a tile: the sums of one panel and one tile fit 16 registers of 8 numbers, and of two each 32 of 16.
const TILE: usize = 6;

/// Numbers of a tile's line, of which the last two are not used.
const TILE_LINE: usize = SIDE;

/// Rows and columns that are transposed together.
const SIDE: usize = 8;

/// Most tiles that are multiplied together.
const TILES: usize = 2;

/// Least tiles for which a task rearranges its panels.
const TILES_PER_TASK: usize = 16;

/// Sums under way: those of 1, 2, 4 and 8 lanes that wait for their like, and those of all 16.
const LEVELS: usize = LANES.ilog2() as usize + 1;

/// Least number of activation rows for which rearranging the weights pays; for fewer, [`matmul::block`](crate::matmul::block).
pub const LEAST_ROWS: usize = 32;

/// Activation rows `[rows, cols]` in tiles of `[lane][block][row]`; keeps its memory between calls.
#[derive(Debug, Default)]
pub struct PlainActivations {
    rows: usize,
    cols: usize,
    tiles: Vec<[f32; TILE_LINE]>,
}

impl PlainActivations {
    /// Takes the rows of `x`, `[rows, cols]`; `cols` must not be 0.
    pub fn fill(&mut self, isa: Isa, x: &[f32], cols: usize, pool: &Pool) {
        (self.rows, self.cols) = (x.len() / cols, cols);
        let blocks = cols.div_ceil(LANES);
        let (rows, per_tile) = (self.rows, LANES * blocks);
        self.tiles.resize(rows.div_ceil(TILE) * per_tile, [0.0; TILE_LINE]);
        pool.chunks_mut(&mut self.tiles, per_tile, |index, tile| {
            let x = &x[index * TILE * cols..rows.min((index + 1) * TILE) * cols];
            rearrange::<1>(isa, x, cols, |lane, block, _, line| tile[lane * blocks + block] = line);
        });
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    fn tile(&self, index: usize) -> &[[f32; TILE_LINE]] {
        let per_tile = self.tiles.len() / self.tiles();
        &self.tiles[index * per_tile..][..per_tile]
    }
}

/// Rearranges rows of `cols` values, at most `G` groups of 8: calls `set(lane, block, group, line)` with the group's values of each lane
/// and block, zeros for missing rows.
#[inline(always)]
fn rearrange<const G: usize>(
    isa: Isa,
    rows: &[f32],
    cols: usize,
    set: impl FnMut(usize, usize, usize, Side),
) {
    assert!(isa.is_available(), "instruction set not available");
    match isa {
        // SAFETY: the assertion above: this processor has the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { rearrange_avx2::<G>(rows, cols, set) },
        _ => rearrange_by::<G>(rows, cols, set, |square| {
            std::array::from_fn(|column| std::array::from_fn(|row| square[row][column]))
        }),
    }
}

/// # Safety
/// The features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn rearrange_avx2<const G: usize>(
    rows: &[f32],
    cols: usize,
    set: impl FnMut(usize, usize, usize, Side),
) {
    // SAFETY: by this function's contract.
    rearrange_by::<G>(rows, cols, set, |square| unsafe { transpose_avx2(&square) });
}

/// Eight numbers.
type Side = [f32; SIDE];

#[inline(always)]
fn rearrange_by<const G: usize>(
    rows: &[f32],
    cols: usize,
    mut set: impl FnMut(usize, usize, usize, Side),
    transpose: impl Fn([Side; SIDE]) -> [Side; SIDE],
) {
    let count = rows.len() / cols;
    for column in (0..cols).step_by(SIDE) {
        for group in 0..G {
            let mut square = [[0.0; SIDE]; SIDE];
            let present = group * SIDE..count.clamp(group * SIDE, (group + 1) * SIDE);
            for (side, row) in square.iter_mut().zip(present) {
                let row = &rows[row * cols + column..(row + 1) * cols];
                match row.first_chunk::<SIDE>() {
                    Some(row) => *side = *row,
                    None => side[..row.len()].copy_from_slice(row),
                }
            }
            for (at, line) in transpose(square).into_iter().enumerate() {
                set(column % LANES + at, column / LANES, group, line);
            }
        }
    }
}

/// # Safety
/// The features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn transpose_avx2(square: &[Side; SIDE]) -> [Side; SIDE] {
    use std::arch::x86_64::*;
    let mut lines = [_mm256_setzero_si256(); SIDE];
    for (line, row) in lines.iter_mut().zip(square) {
        // SAFETY: 8 numbers.
        *line = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
    }
    let mut columns = [[0.0; SIDE]; SIDE];
    for (column, line) in columns.iter_mut().zip(super::transpose::eight(lines)) {
        // SAFETY: 8 numbers.
        unsafe { _mm256_storeu_si256(column.as_mut_ptr().cast(), line) };
    }
    columns
}

/// A cache line, which a load of 16 numbers should not leave.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct PanelLine([f32; ROWS]);

/// 16 weight rows as `[lane][block][row]`.
#[derive(Default)]
struct PlainPanel {
    blocks: usize,
    lines: Vec<PanelLine>,
}

impl PlainPanel {
    /// Takes rows of `cols` values, at most 16; missing ones are zero.
    fn fill(&mut self, isa: Isa, rows: &[f32], cols: usize) {
        self.blocks = cols.div_ceil(LANES);
        let stride = self.stride();
        self.lines.resize(LANES * stride, PanelLine([0.0; ROWS]));
        let lines = &mut self.lines;
        rearrange::<{ ROWS / SIDE }>(isa, rows, cols, |lane, block, group, line| {
            lines[lane * stride + block].0[group * SIDE..][..SIDE].copy_from_slice(&line);
        });
    }

    /// Returns the distance of two lanes: odd, so that the lanes of a block are in different sets of the cache.
    fn stride(&self) -> usize {
        self.blocks | 1
    }

    fn lane(&self, lane: usize, len: usize) -> &[PanelLine] {
        &self.lines[lane * self.stride()..][..len]
    }
}

/// Sums of two panels and two tiles.
type TileSums = [[[[f32; ROWS]; TILE]; TILES]; WIDTH];

/// Memory of one thread, kept between products: rearranged weights, and sums under way.
#[derive(Default)]
struct PlainScratch {
    panels: [PlainPanel; WIDTH],
    levels: [TileSums; LEVELS],
}

thread_local! {
    static SCRATCH: RefCell<PlainScratch> = RefCell::default();
}

/// Computes `out[m, rows] = x[m, k] . w[rows, k]^T`. `read` calls its second argument with a range of the rows of `w`, as f32.
/// Panics if the shapes disagree.
pub fn matmul(
    isa: Isa,
    rows: usize,
    read: impl Fn(Range<usize>, &mut dyn FnMut(&[f32])) + Sync,
    x: &PlainActivations,
    out: &mut [f32],
    pool: &Pool,
) {
    assert!(isa.is_available(), "instruction set not available");
    assert_eq!(out.len(), x.rows * rows, "an output for every pair of rows");
    let out = OutputMatrix::new(out, rows);
    let parts = rows.div_ceil(WIDTH * ROWS);
    // Few panels are shared by rearranging them more than once.
    let shares = (pool.threads() * MIN_TASKS).div_ceil(parts).min(x.tiles() / TILES_PER_TASK).max(1);
    let parallel = rows * x.cols * x.rows >= SERIAL_LIMIT;
    pool.for_each_of(&[parts * shares], parallel, |_, task| {
        let (part, share) = (task / shares, task % shares);
        let tiles = share * x.tiles() / shares..(share + 1) * x.tiles() / shares;
        let first = part * WIDTH * ROWS;
        let kept = first..rows.min(first + WIDTH * ROWS);
        read(kept.clone(), &mut |w| {
            assert_eq!(w.len(), kept.len() * x.cols, "the rows that were asked for");
            SCRATCH.with_borrow_mut(|scratch| multiply(isa, w, x, tiles.clone(), scratch, &out, first));
        });
    });
}

/// Multiplies at most [`WIDTH`] panels' rows with some tiles, into columns of `out` from `column` on.
fn multiply(
    isa: Isa,
    w: &[f32],
    x: &PlainActivations,
    mut tiles: Range<usize>,
    PlainScratch { panels, levels }: &mut PlainScratch,
    out: &OutputMatrix,
    column: usize,
) {
    let used = w.len().div_ceil(ROWS * x.cols);
    for (panel, rows) in panels.iter_mut().zip(w.chunks(ROWS * x.cols)) {
        panel.fill(isa, rows, x.cols);
    }
    let panels = &panels[..used];
    while !tiles.is_empty() {
        let together = tiles.start..tiles.end.min(tiles.start + TILES);
        // SAFETY: `matmul` saw that the processor has the instruction set.
        unsafe { multiply_tiles(isa, panels, x, together.clone(), levels) };
        for (tile, index) in together.clone().enumerate() {
            for row in index * TILE..x.rows.min((index + 1) * TILE) {
                for (panel, column) in (column..).step_by(ROWS).enumerate().take(used) {
                    let kept = ROWS.min(out.cols - column);
                    out.store(row, column, &levels[LEVELS - 1][panel][tile][row % TILE][..kept]);
                }
            }
        }
        tiles.start = together.end;
    }
}

/// Multiplies some panels with some tiles, in the shapes of the instruction set; the sums are in the last of `levels`.
///
/// # Safety
/// The processor has the instruction set.
unsafe fn multiply_tiles(
    isa: Isa,
    panels: &[PlainPanel],
    x: &PlainActivations,
    tiles: Range<usize>,
    levels: &mut [TileSums; LEVELS],
) {
    // SAFETY: by this function's contract.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            return multiply_avx512(panels, x, tiles, levels);
        }
        for panel in 0..panels.len() {
            for (at, tile) in tiles.clone().enumerate() {
                let (panels, tiles) = ([&panels[panel]], [x.tile(tile)]);
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => multiply_avx2(panels, tiles, x.cols, levels, [panel, at]),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon | Isa::Dotprod | Isa::I8mm => {
                        use std::arch::aarch64::float32x4_t;
                        by_lane::<[float32x4_t; 4], 1, 1>(panels, tiles, x.cols, levels, [panel, at]);
                    }
                    _ => by_lane::<[f32; LANES], 1, 1>(panels, tiles, x.cols, levels, [panel, at]),
                }
            }
        }
    }
}

/// # Safety
/// The features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn multiply_avx2(
    panels: [&PlainPanel; 1],
    tiles: [&[[f32; TILE_LINE]]; 1],
    cols: usize,
    levels: &mut [TileSums; LEVELS],
    at: [usize; 2],
) {
    // SAFETY: by this function's contract.
    unsafe { by_lane::<[std::arch::x86_64::__m256; 2], 1, 1>(panels, tiles, cols, levels, at) }
}

/// # Safety
/// The features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn multiply_avx512(
    panels: &[PlainPanel],
    x: &PlainActivations,
    tiles: Range<usize>,
    levels: &mut [TileSums; LEVELS],
) {
    use std::arch::x86_64::__m512;
    let (cols, tile) = (x.cols, |at| x.tile(tiles.start + at));
    // SAFETY: by this function's contract.
    unsafe {
        match (panels, tiles.len()) {
            ([a, b], 2) => by_lane::<__m512, 2, 2>([a, b], [tile(0), tile(1)], cols, levels, [0, 0]),
            ([a, b], _) => by_lane::<__m512, 2, 1>([a, b], [tile(0)], cols, levels, [0, 0]),
            ([a], 2) => by_lane::<__m512, 1, 2>([a], [tile(0), tile(1)], cols, levels, [0, 0]),
            (panels, _) => by_lane::<__m512, 1, 1>([&panels[0]], [tile(0)], cols, levels, [0, 0]),
        }
    }
}

/// Multiplies `P` panels with `T` tiles; their sums are from `at` on (panel, tile) in each of `levels`.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn by_lane<V: Wide, const P: usize, const T: usize>(
    panels: [&PlainPanel; P],
    tiles: [&[[f32; TILE_LINE]]; T],
    cols: usize,
    levels: &mut [TileSums; LEVELS],
    [first_panel, first_tile]: [usize; 2],
) {
    let blocks = cols.div_ceil(LANES);
    for step in 0..LANES {
        // Lanes whose sums are added to each other follow each other: 0, 8, 4, 12 and so on.
        let lane = step.reverse_bits() >> (usize::BITS - LANES.ilog2());
        let len = cols / LANES + usize::from(lane < cols % LANES);
        let mut w: [&[PanelLine]; P] = [&[]; P];
        for panel in 0..P {
            w[panel] = panels[panel].lane(lane, len);
        }
        let mut x: [&[[f32; TILE_LINE]]; T] = [&[]; T];
        for tile in 0..T {
            x[tile] = &tiles[tile][lane * blocks..][..len];
        }
        // SAFETY: by this function's contract.
        unsafe {
            let mut sums = lane_sums::<V, P, T>(w, x, len);
            let waiting = step.trailing_ones() as usize;
            for level in &levels[..waiting] {
                for panel in 0..P {
                    for tile in 0..T {
                        for row in 0..TILE {
                            let other = V::load(&level[first_panel + panel][first_tile + tile][row]);
                            sums[panel][tile][row] = other.add(sums[panel][tile][row]);
                        }
                    }
                }
            }
            let level = &mut levels[waiting];
            for panel in 0..P {
                for tile in 0..T {
                    for row in 0..TILE {
                        level[first_panel + panel][first_tile + tile][row] = sums[panel][tile][row].lanes();
                    }
                }
            }
        }
    }
}

/// Returns one lane's sums over `len` blocks.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn lane_sums<V: Wide, const P: usize, const T: usize>(
    w: [&[PanelLine]; P],
    x: [&[[f32; TILE_LINE]]; T],
    len: usize,
) -> [[[V; TILE]; T]; P] {
    assert!(w.iter().all(|w| w.len() == len) && x.iter().all(|x| x.len() == len), "one length");
    // SAFETY: by this function's contract.
    unsafe {
        let mut sums = [[[V::zero(); TILE]; T]; P];
        for block in 0..len {
            let mut weights = [V::zero(); P];
            for panel in 0..P {
                weights[panel] = V::load(&w[panel][block].0);
            }
            for tile in 0..T {
                for row in 0..TILE {
                    let x = V::splat(x[tile][block][row]);
                    for panel in 0..P {
                        sums[panel][tile][row] = sums[panel][tile][row].fma(weights[panel], x);
                    }
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dot::dot;
    use crate::isa::available;

    fn values(len: usize, step: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * step % 101) as f32 - 50.0) / 13.0).collect()
    }

    #[test]
    fn every_output_is_the_inner_product_of_its_rows_bit_for_bit() {
        let pool = Pool::new(2).expect("a thread");
        for (n, m, k) in
            [(1, 1, 1), (16, 6, 16), (17, 7, 33), (32, 12, 64), (33, 13, 100), (70, 25, 31), (40, 200, 257)]
        {
            let (w, x) = (values(n * k, 37), values(m * k, 53));
            let read =
                |rows: Range<usize>, take: &mut dyn FnMut(&[f32])| take(&w[rows.start * k..rows.end * k]);
            for isa in available() {
                let (mut rows, mut out) = (PlainActivations::default(), vec![f32::NAN; n * m]);
                rows.fill(isa, &x, k, &pool);
                matmul(isa, n, read, &rows, &mut out, &pool);
                for (at, out) in out.iter().enumerate() {
                    let (token, row) = (at / n, at % n);
                    let expected = dot(Isa::Scalar, &w[row * k..][..k], &x[token * k..][..k]);
                    assert_eq!(out.to_bits(), expected.to_bits(), "{isa:?} {n} {m} {k}: {token}, {row}");
                }
            }
        }
    }

    #[test]
    fn values_of_earlier_products_leave_nothing_behind() {
        let (isa, pool) = (crate::isa::isa(), Pool::new(1).expect("a pool without threads"));
        let mut rows = PlainActivations::default();
        for ([n, m, k], value) in [([32, 12, 48], f32::INFINITY), ([3, 2, 20], 1.0)] {
            let (w, mut out) = (vec![value; n * k], vec![0.0; n * m]);
            rows.fill(isa, &vec![value; m * k], k, &pool);
            let read =
                |rows: Range<usize>, take: &mut dyn FnMut(&[f32])| take(&w[rows.start * k..rows.end * k]);
            matmul(isa, n, read, &rows, &mut out, &pool);
            let expected = value * k as f32;
            assert!(out.iter().all(|out| out.to_bits() == expected.to_bits()), "{n} {m} {k}: {out:?}");
        }
    }
}
