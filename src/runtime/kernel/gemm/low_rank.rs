//! The second half of a product of low rank, in one region: adds `x . up^T`, where rows of `x` have few values, to some rows of
//! the output.
//!
//! Invariant, the definition of every output, independent of the number of rows, threads and the instruction set: for each
//! value `r` of a row of `x`, in ascending order, `out = fma(weight * factor * x[r], up[r], out)`.

use std::ops::Range;

use half::f16;

use super::{OutputMatrix, WeightedRows};
use crate::attention::VectorLanes;
use crate::pool::Pool;
use crate::quant::dequantize_row;
use crate::wide::{LANES, dispatch_wide};
use crate::{Dtype, Isa};

/// Outputs that are computed together: the columns of a task of [`gated`](super::gated).
pub(super) const COLUMNS: usize = 2 * LANES;

/// Rows that are computed together.
const TILE: usize = 4;

/// Blocks of outputs, and rows, of a task.
const BLOCKS_PER_TASK: usize = 8;
const ROWS_PER_TASK: usize = 64;

/// Number of multiplications below which several threads do not pay.
const SERIAL_LIMIT: usize = 1 << 15;

/// A matrix `[outputs, rank]` of floats, as `[block of outputs][rank][COLUMNS]`; outputs past the last one are zero.
pub struct LowRankUp {
    outputs: usize,
    rank: usize,
    lines: UpLines,
}

enum UpLines {
    F32(Vec<[f32; COLUMNS]>),
    F16(Vec<[f16; COLUMNS]>),
}

/// A number of a matrix.
trait UpValue: Copy {
    /// Loads numbers as f32.
    ///
    /// # Safety
    /// The processor has `V`'s instruction set; [`LANES`] numbers can be read.
    unsafe fn load<V: VectorLanes>(from: *const Self) -> V;
}

impl UpValue for f32 {
    #[inline(always)]
    unsafe fn load<V: VectorLanes>(from: *const f32) -> V {
        // SAFETY: by the trait's contract.
        unsafe { V::load_f32(from) }
    }
}

impl UpValue for f16 {
    #[inline(always)]
    unsafe fn load<V: VectorLanes>(from: *const f16) -> V {
        // SAFETY: by the trait's contract.
        unsafe { V::load_f16(from) }
    }
}

impl LowRankUp {
    /// Rearranges rows of a float type. Panics unless `rows` are `outputs` rows of `rank` values.
    pub fn new(dtype: Dtype, [outputs, rank]: [usize; 2], rows: &[u8]) -> LowRankUp {
        let mut values = vec![0.0; outputs * rank];
        dequantize_row(dtype, rows, &mut values);
        let line = |line: usize| {
            let (first, r) = (line / rank * COLUMNS, line % rank);
            let value = |output| values.get((first + output) * rank + r).copied().unwrap_or_default();
            std::array::from_fn::<f32, COLUMNS, _>(value)
        };
        let lines = (0..outputs.div_ceil(COLUMNS) * rank).map(line);
        let lines = match dtype {
            Dtype::F16 => UpLines::F16(lines.map(|line| line.map(f16::from_f32)).collect()),
            _ => UpLines::F32(lines.collect()),
        };
        LowRankUp { outputs, rank, lines }
    }
}

/// A sum that an adapter adds to a product: `out[rows[i]] += weights[i] * factor * (x[i] . up^T)`, with `x` `[i, rank]`. Rows ascend.
#[derive(Clone, Copy)]
pub struct LowRankSum<'a> {
    pub up: &'a LowRankUp,
    pub x: &'a [f32],
    pub to: WeightedRows<'a>,
    pub factor: f32,
}

impl LowRankSum<'_> {
    /// Adds to `out`, `[any, outputs]`. Panics if the shapes disagree.
    pub fn add(&self, isa: Isa, out: &mut [f32], pool: &Pool) {
        self.check(isa, self.up.outputs);
        let blocks = self.up.outputs.div_ceil(COLUMNS);
        let (parts, rows) = (blocks.div_ceil(BLOCKS_PER_TASK), self.to.rows.len());
        let parallel = self.up.outputs * self.x.len() >= SERIAL_LIMIT;
        let out = OutputMatrix::new(out, self.up.outputs);
        pool.for_each_of(&[parts * rows.div_ceil(ROWS_PER_TASK)], parallel, |_, task| {
            let (first, row) = (task % parts * BLOCKS_PER_TASK, task / parts * ROWS_PER_TASK);
            for block in first..blocks.min(first + BLOCKS_PER_TASK) {
                self.add_block(isa, block, row..rows.min(row + ROWS_PER_TASK), (&out, block * COLUMNS));
            }
        });
    }

    /// Panics unless this can be added to `outputs` columns with the instruction set.
    pub(super) fn check(&self, isa: Isa, outputs: usize) {
        let WeightedRows { rows, weights } = self.to;
        assert!(isa.is_available(), "instruction set not available");
        assert_eq!(self.up.outputs, outputs, "an output for each column");
        assert_eq!([self.x.len(), weights.len()], [rows.len() * self.up.rank, rows.len()], "weights of rows");
        assert!(rows.is_sorted_by(|a, b| a < b), "no row twice");
    }

    /// Adds a block's outputs of some of the rows to the columns of `out` from `column` on, which no other task uses for these rows.
    /// [`Self::check`] must have passed.
    pub(super) fn add_block(
        &self,
        isa: Isa,
        block: usize,
        mut rows: Range<usize>,
        (out, column): (&OutputMatrix, usize),
    ) {
        let kept = COLUMNS.min(self.up.outputs - block * COLUMNS);
        let lines = block * self.up.rank..(block + 1) * self.up.rank;
        while !rows.is_empty() {
            let tile = rows.start..rows.end.min(rows.start + TILE);
            let (mut sums, mut factors) = ([[0.0; COLUMNS]; TILE], [0.0; TILE]);
            // Rows past the last repeat the last one.
            let x = std::array::from_fn(|row| {
                let row = tile.start + row.min(tile.len() - 1);
                &self.x[row * self.up.rank..][..self.up.rank]
            });
            for ((row, sums), factor) in tile.clone().zip(&mut sums).zip(&mut factors) {
                out.load(self.to.rows[row], column, &mut sums[..kept]);
                *factor = self.to.weights[row] * self.factor;
            }
            add_tile(isa, factors, x, (&self.up.lines, lines.clone()), &mut sums);
            for (row, sums) in tile.zip(&sums) {
                out.store(self.to.rows[row], column, &sums[..kept]);
            }
            rows.start = rows.end.min(rows.start + TILE);
        }
    }
}

/// Sums of the rows of a tile.
type TileOfSums = [[f32; COLUMNS]; TILE];

dispatch_wide! {
    /// Adds products with lines of a block to the sums.
    fn add_tile(
        factors: [f32; TILE],
        x: [&[f32]; TILE],
        up: (&UpLines, Range<usize>),
        sums: &mut TileOfSums,
    ) = add_any
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn add_any<V: VectorLanes>(
    factors: [f32; TILE],
    x: [&[f32]; TILE],
    (up, lines): (&UpLines, Range<usize>),
    sums: &mut TileOfSums,
) {
    // SAFETY: by this function's contract.
    unsafe {
        match up {
            UpLines::F32(up) => add_body::<V, f32>(factors, x, &up[lines], sums),
            UpLines::F16(up) => add_body::<V, f16>(factors, x, &up[lines], sums),
        }
    }
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn add_body<V: VectorLanes, T: UpValue>(
    factors: [f32; TILE],
    x: [&[f32]; TILE],
    up: &[[T; COLUMNS]],
    sums: &mut TileOfSums,
) {
    let x = x.map(|x| &x[..up.len()]);
    // SAFETY: by this function's contract; a line has twice LANES numbers, and so have sums.
    unsafe {
        let mut wide = [[V::zero(); 2]; TILE];
        for (wide, sums) in wide.iter_mut().zip(&*sums) {
            *wide = [V::load_f32(sums.as_ptr()), V::load_f32(sums.as_ptr().add(LANES))];
        }
        for (r, up) in up.iter().enumerate() {
            let up = [T::load::<V>(up.as_ptr()), T::load::<V>(up.as_ptr().add(LANES))];
            for row in 0..TILE {
                let x = V::splat(factors[row] * x[row][r]);
                wide[row] = [wide[row][0].fma(x, up[0]), wide[row][1].fma(x, up[1])];
            }
        }
        for ([low, high], sums) in wide.into_iter().zip(sums) {
            low.store(sums.as_mut_ptr());
            high.store(sums.as_mut_ptr().add(LANES));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::GemmRandom;
    use super::*;
    use crate::isa::available;

    fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
        let half = |value: &f32| f16::from_f32(*value).to_le_bytes();
        match dtype {
            Dtype::F16 => values.iter().flat_map(half).collect(),
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    #[test]
    fn sums_have_the_defined_bits_with_every_instruction_set_and_number_of_threads() {
        let mut random = GemmRandom(7);
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        let shapes: &[[usize; 3]] = match cfg!(miri) {
            true => &[[70, 3, 2]],
            false => &[[64, 1, 1], [70, 3, 2], [1000, 16, 1], [330, 17, 150]],
        };
        for (&[outputs, rank, count], dtype) in shapes.iter().flat_map(|s| [(s, Dtype::F16), (s, Dtype::F32)])
        {
            let (x, before) = (random.values(count * rank), random.values(2 * count * outputs));
            let up: Vec<f32> = (0..outputs * rank).map(|_| random.below(512) as f32 / 64.0 - 4.0).collect();
            let rows: Vec<usize> = (0..count).map(|row| 2 * row + row % 2).collect();
            let weights: Vec<f32> = (0..count).map(|row| 0.3 + row as f32).collect();
            let mut expected = before.clone();
            for (at, row) in rows.iter().enumerate() {
                for output in 0..outputs {
                    let sum = &mut expected[row * outputs + output];
                    for r in 0..rank {
                        *sum = up[output * rank + r].mul_add(weights[at] * 0.7 * x[at * rank + r], *sum);
                    }
                }
            }
            let up = &LowRankUp::new(dtype, [outputs, rank], &bytes_of(dtype, &up));
            let sum =
                LowRankSum { up, x: &x, to: WeightedRows { rows: &rows, weights: &weights }, factor: 0.7 };
            for (isa, pool) in
                available().into_iter().flat_map(|isa| pools.iter().map(move |pool| (isa, pool)))
            {
                let mut out = before.clone();
                sum.add(isa, &mut out, pool);
                let equal = out.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(equal, "{isa:?} {outputs} {rank} {count} {dtype:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "no row twice")]
    fn a_row_cannot_be_given_twice() {
        let up = &LowRankUp::new(Dtype::F32, [1, 1], &[0; 4]);
        let to = WeightedRows { rows: &[0, 0], weights: &[1.0; 2] };
        LowRankSum { up, x: &[1.0; 2], to, factor: 1.0 }.add(Isa::Scalar, &mut [0.0], &Pool::new(1).unwrap());
    }
}
