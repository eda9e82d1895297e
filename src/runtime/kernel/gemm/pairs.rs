//! Activations of many rows in pairs of rows, for [`i8mm`](super::neon::i8mm).

use super::activation::ActivationBlock;
use super::format::BLOCK;
use super::groups::ActivationGroup;

/// Activation rows that one register holds together.
pub const PAIR: usize = 2;

/// Codes of one row in a register.
const STEP: usize = 8;

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

impl ActivationGroup for ActivationPair {
    const ROWS: usize = PAIR;
    const EMPTY: ActivationPair = ActivationPair {
        codes: [[0; PAIR * STEP]; BLOCK / STEP],
        scales: [0.0; 2 * PAIR],
        scaled_sums: [0.0; 2 * PAIR],
        half_scaled_sums: [[0.0; 2 * PAIR]; 2],
    };

    fn set(&mut self, row: usize, from: &ActivationBlock) {
        let numbers = PAIR * row..PAIR * (row + 1);
        for (to, codes) in self.codes.iter_mut().zip(from.codes.as_chunks::<STEP>().0) {
            to[STEP * row..][..STEP].copy_from_slice(codes);
        }
        self.scales[numbers.clone()].fill(from.scale);
        self.scaled_sums[numbers.clone()].fill(from.scaled_sum);
        for (to, sum) in self.half_scaled_sums.iter_mut().zip(from.half_scaled_sums) {
            to[numbers.clone()].fill(sum);
        }
    }
}
