//! Activations of many rows in pairs of rows, for [`i8mm`](super::neon::i8mm).

use super::activation::Activations;
use super::format::BLOCK;
use crate::pool::Pool;

/// Activation rows that one register holds together.
pub const PAIR: usize = 2;

/// Codes of one row in a register.
const STEP: usize = 8;

/// Blocks for which another thread pays.
const BLOCKS_PER_TASK: usize = 1 << 10;

/// A block of two activation rows: eight codes of the first, the same eight of the second, then the next eight; of
/// each number two copies for the first row and two for the second.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ActivationPair {
    pub codes: [[i8; PAIR * STEP]; BLOCK / STEP],
    pub scales: [f32; 2 * PAIR],
    pub scaled_sums: [f32; 2 * PAIR],
    pub half_scaled_sums: [[f32; 2 * PAIR]; 2],
}

const EMPTY_PAIR: ActivationPair = ActivationPair {
    codes: [[0; PAIR * STEP]; BLOCK / STEP],
    scales: [0.0; 2 * PAIR],
    scaled_sums: [0.0; 2 * PAIR],
    half_scaled_sums: [[0.0; 2 * PAIR]; 2],
};

/// [`Activations`] in pairs, `[rows / 2][blocks]`; a missing last row is zero.
#[derive(Default)]
pub struct ActivationPairs {
    blocks_per_row: usize,
    blocks: Vec<ActivationPair>,
}

impl ActivationPairs {
    pub fn fill(&mut self, x: &Activations, pool: &Pool) {
        let per_row = x.blocks_per_row();
        self.blocks_per_row = per_row;
        self.blocks.resize(x.rows().div_ceil(PAIR) * per_row, EMPTY_PAIR);
        let pairs_per_task = BLOCKS_PER_TASK.div_ceil(PAIR * per_row);
        pool.chunks_mut(&mut self.blocks, pairs_per_task * per_row, |task, blocks| {
            for (at, blocks) in blocks.chunks_exact_mut(per_row).enumerate() {
                fill_pair(x, (task * pairs_per_task + at) * PAIR, blocks);
            }
        });
    }

    /// Returns the blocks of the two rows from `first`, an even number, on.
    pub fn row(&self, first: usize) -> &[ActivationPair] {
        &self.blocks[first / PAIR * self.blocks_per_row..][..self.blocks_per_row]
    }
}

fn fill_pair(x: &Activations, first: usize, blocks: &mut [ActivationPair]) {
    let rows = PAIR.min(x.rows() - first);
    if rows < PAIR {
        blocks.fill(EMPTY_PAIR);
    }
    for row in 0..rows {
        let numbers = PAIR * row..PAIR * (row + 1);
        for (out, block) in blocks.iter_mut().zip(x.row(first + row)) {
            for (out, codes) in out.codes.iter_mut().zip(block.codes.as_chunks::<STEP>().0) {
                out[STEP * row..][..STEP].copy_from_slice(codes);
            }
            out.scales[numbers.clone()].fill(block.scale);
            out.scaled_sums[numbers.clone()].fill(block.scaled_sum);
            for (out, sum) in out.half_scaled_sums.iter_mut().zip(block.half_scaled_sums) {
                out[numbers.clone()].fill(sum);
            }
        }
    }
}
