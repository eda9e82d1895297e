//! Activations of many rows in strips of 6 rows, for the panels of [`avx2`](super::avx2): what a kernel
//! broadcasts is consecutive in memory, so one address serves all rows.

use super::activation::{ActivationBlock, Activations};
use super::format::{BLOCK, GROUPS};
use crate::pool::Pool;

/// Activation rows per strip: their sums with 16 weight rows fill 12 registers of 8 numbers.
pub const TOKENS: usize = 6;

/// Blocks for which another thread pays.
const BLOCKS_PER_TASK: usize = 1 << 10;

/// A block of 6 activation rows. `[3]` is the whole block, its first half and its second half.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct StripBlock {
    /// Groups of four codes.
    pub codes: [[[i8; 4]; TOKENS]; GROUPS],
    pub scales: [f32; TOKENS],
    pub scaled_sums: [[f32; TOKENS]; 3],
    /// Minus the sums of the codes at even pairs of places (0, 1, 4, 5, ...) and at odd ones: what the two 16-bit
    /// lanes of a weight row add.
    pub minus_pair_sums: [[[i16; 2]; TOKENS]; 3],
}

const EMPTY_BLOCK: StripBlock = StripBlock {
    codes: [[[0; 4]; TOKENS]; GROUPS],
    scales: [0.0; TOKENS],
    scaled_sums: [[0.0; TOKENS]; 3],
    minus_pair_sums: [[[0; 2]; TOKENS]; 3],
};

/// [`Activations`] in strips, `[rows / 6][blocks]`; rows past the last one are zero.
#[derive(Default)]
pub struct Strips {
    blocks_per_row: usize,
    blocks: Vec<StripBlock>,
}

impl Strips {
    pub fn fill(&mut self, x: &Activations, pool: &Pool) {
        let per_row = x.blocks_per_row();
        self.blocks_per_row = per_row;
        self.blocks.resize(x.rows().div_ceil(TOKENS) * per_row, EMPTY_BLOCK);
        let strips_per_task = BLOCKS_PER_TASK.div_ceil(TOKENS * per_row);
        pool.chunks_mut(&mut self.blocks, strips_per_task * per_row, |task, blocks| {
            for (at, blocks) in blocks.chunks_exact_mut(per_row).enumerate() {
                fill_strip(x, (task * strips_per_task + at) * TOKENS, blocks);
            }
        });
    }

    /// Returns the blocks of the rows from `first`, a multiple of 6, on.
    pub fn strip(&self, first: usize) -> &[StripBlock] {
        &self.blocks[first / TOKENS * self.blocks_per_row..][..self.blocks_per_row]
    }
}

fn fill_strip(x: &Activations, first: usize, blocks: &mut [StripBlock]) {
    let rows = TOKENS.min(x.rows() - first);
    if rows < TOKENS {
        blocks.fill(EMPTY_BLOCK);
    }
    for row in 0..rows {
        for (from, to) in x.row(first + row).iter().zip(&mut *blocks) {
            fill_block(from, row, to);
        }
    }
}

fn fill_block(from: &ActivationBlock, row: usize, to: &mut StripBlock) {
    let groups = from.codes.as_chunks::<4>().0;
    for (to, group) in to.codes.iter_mut().zip(groups) {
        to[row] = *group;
    }
    to.scales[row] = from.scale;
    let [first, second] = from.half_scaled_sums;
    let scaled_sums = [from.scaled_sum, first, second];
    let half = |groups: &[[i8; 4]]| {
        groups.iter().fold([0i16; 2], |sum, group| {
            let [a, b, c, d] = group.map(i16::from);
            [sum[0] - a - b, sum[1] - c - d]
        })
    };
    let (first, second) = groups.split_at(BLOCK / 8);
    let (first, second) = (half(first), half(second));
    let pair_sums = [[first[0] + second[0], first[1] + second[1]], first, second];
    for part in 0..3 {
        to.scaled_sums[part][row] = scaled_sums[part];
        to.minus_pair_sums[part][row] = pair_sums[part];
    }
}
