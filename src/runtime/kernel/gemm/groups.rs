//! Activations of many rows in groups of rows, in the layout of a kernel.

use super::activation::{ActivationBlock, Activations};
use crate::pool::Pool;

/// Blocks for which another thread pays.
const BLOCKS_PER_TASK: usize = 1 << 10;

/// A block of some activation rows side by side.
pub trait ActivationGroup: Copy + Send {
    /// Activation rows of a group.
    const ROWS: usize;

    /// All rows zero.
    const EMPTY: Self;

    /// Sets a row to the values of its block.
    fn set(&mut self, row: usize, from: &ActivationBlock);
}

/// [`Activations`] in groups, `[rows / G::ROWS][blocks]`; rows past the last one are zero. Groups are consecutive in memory,
/// so that the processor prefetches them by itself.
pub struct Grouped<G> {
    blocks_per_row: usize,
    groups: Vec<G>,
}

impl<G> Default for Grouped<G> {
    fn default() -> Self {
        Grouped { blocks_per_row: 0, groups: Vec::new() }
    }
}

impl<G: ActivationGroup> Grouped<G> {
    pub fn fill(&mut self, x: &Activations, pool: &Pool) {
        let per_row = x.blocks_per_row();
        self.blocks_per_row = per_row;
        self.groups.resize(x.rows().div_ceil(G::ROWS) * per_row, G::EMPTY);
        let per_task = BLOCKS_PER_TASK.div_ceil(G::ROWS * per_row);
        pool.chunks_mut(&mut self.groups, per_task * per_row, |task, groups| {
            for (at, groups) in groups.chunks_exact_mut(per_row).enumerate() {
                fill_rows(x, (task * per_task + at) * G::ROWS, groups);
            }
        });
    }

    /// Returns the blocks of the rows from `first`, a multiple of `G::ROWS`, on.
    pub fn rows(&self, first: usize) -> &[G] {
        &self.groups[first / G::ROWS * self.blocks_per_row..][..self.blocks_per_row]
    }
}

fn fill_rows<G: ActivationGroup>(x: &Activations, first: usize, groups: &mut [G]) {
    let rows = G::ROWS.min(x.rows() - first);
    if rows < G::ROWS {
        groups.fill(G::EMPTY);
    }
    for (at, group) in groups.iter_mut().enumerate() {
        (0..rows).for_each(|row| group.set(row, &x.row(first + row)[at]));
    }
}
