//! Activations of many rows in tiles of 16 rows, for [`amx`](super::amx).

use super::activation::Activations;
use super::format::BLOCK;
use crate::pool::Pool;

/// Activation rows per tile; a processor takes as long for fewer.
pub const TOKENS: usize = 16;

/// Blocks for which another thread pays.
const BLOCKS_PER_TASK: usize = 1 << 10;

/// A block of 16 activation rows, the counterpart of [`ActivationBlock`](super::activation::ActivationBlock) for one
/// row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ActivationTile {
    pub codes: [[i8; BLOCK]; TOKENS],
    pub scales: [f32; TOKENS],
    pub scaled_sums: [f32; TOKENS],
    pub half_scaled_sums: [[f32; TOKENS]; 2],
}

const EMPTY_TILE: ActivationTile = ActivationTile {
    codes: [[0; BLOCK]; TOKENS],
    scales: [0.0; TOKENS],
    scaled_sums: [0.0; TOKENS],
    half_scaled_sums: [[0.0; TOKENS]; 2],
};

/// [`Activations`] in tiles, `[rows / 16][blocks]`; rows past the last one are zero. Tiles are consecutive in memory,
/// so that the processor prefetches them by itself.
#[derive(Default)]
pub struct Tiles {
    blocks_per_row: usize,
    tiles: Vec<ActivationTile>,
}

impl Tiles {
    pub fn fill(&mut self, x: &Activations, pool: &Pool) {
        let per_row = x.blocks_per_row();
        self.blocks_per_row = per_row;
        self.tiles.resize(x.rows().div_ceil(TOKENS) * per_row, EMPTY_TILE);
        let groups_per_task = BLOCKS_PER_TASK.div_ceil(TOKENS * per_row);
        pool.chunks_mut(&mut self.tiles, groups_per_task * per_row, |task, tiles| {
            for (at, tiles) in tiles.chunks_exact_mut(per_row).enumerate() {
                let first = (task * groups_per_task + at) * TOKENS;
                fill_group(x, first, tiles);
            }
        });
    }

    /// Returns the tiles of the rows from `first`, a multiple of 16, on.
    pub fn group(&self, first: usize) -> &[ActivationTile] {
        &self.tiles[first / TOKENS * self.blocks_per_row..][..self.blocks_per_row]
    }
}

fn fill_group(x: &Activations, first: usize, tiles: &mut [ActivationTile]) {
    let rows = TOKENS.min(x.rows() - first);
    if rows < TOKENS {
        tiles.fill(EMPTY_TILE);
    }
    for (at, tile) in tiles.iter_mut().enumerate() {
        for row in 0..rows {
            let block = &x.row(first + row)[at];
            tile.codes[row] = block.codes;
            tile.scales[row] = block.scale;
            tile.scaled_sums[row] = block.scaled_sum;
            tile.half_scaled_sums[0][row] = block.half_scaled_sums[0];
            tile.half_scaled_sums[1][row] = block.half_scaled_sums[1];
        }
    }
}
