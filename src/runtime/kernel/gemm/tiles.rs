//! Activations of many rows in tiles of 16 rows, for [`amx`](super::amx).

use super::activation::ActivationBlock;
use super::format::BLOCK;
use super::groups::ActivationGroup;

/// Activation rows per tile; a processor takes as long for fewer.
pub const TOKENS: usize = 16;

/// A block of 16 activation rows, the counterpart of [`ActivationBlock`] for one row.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct ActivationTile {
    pub codes: [[i8; BLOCK]; TOKENS],
    pub scales: [f32; TOKENS],
    pub scaled_sums: [f32; TOKENS],
    pub half_scaled_sums: [[f32; TOKENS]; 2],
}

impl ActivationGroup for ActivationTile {
    const ROWS: usize = TOKENS;
    const EMPTY: ActivationTile = ActivationTile {
        codes: [[0; BLOCK]; TOKENS],
        scales: [0.0; TOKENS],
        scaled_sums: [0.0; TOKENS],
        half_scaled_sums: [[0.0; TOKENS]; 2],
    };

    fn set(&mut self, row: usize, from: &ActivationBlock) {
        self.codes[row] = from.codes;
        self.scales[row] = from.scale;
        self.scaled_sums[row] = from.scaled_sum;
        self.half_scaled_sums[0][row] = from.half_scaled_sums[0];
        self.half_scaled_sums[1][row] = from.half_scaled_sums[1];
    }
}
