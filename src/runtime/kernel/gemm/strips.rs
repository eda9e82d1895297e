//! Activations of many rows in strips of 6 rows, for the panels of [`avx2`](super::avx2): what a kernel
//! broadcasts is consecutive in memory, so one address serves all rows.

use super::activation::ActivationBlock;
use super::format::{BLOCK, GROUPS};
use super::groups::ActivationGroup;

/// Activation rows per strip: their sums with 16 weight rows fill 12 registers of 8 numbers.
pub const TOKENS: usize = 6;

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

impl ActivationGroup for StripBlock {
    const ROWS: usize = TOKENS;
    const EMPTY: StripBlock = StripBlock {
        codes: [[[0; 4]; TOKENS]; GROUPS],
        scales: [0.0; TOKENS],
        scaled_sums: [[0.0; TOKENS]; 3],
        minus_pair_sums: [[[0; 2]; TOKENS]; 3],
    };

    fn set(&mut self, row: usize, from: &ActivationBlock) {
        let groups = from.codes.as_chunks::<4>().0;
        for (to, group) in self.codes.iter_mut().zip(groups) {
            to[row] = *group;
        }
        self.scales[row] = from.scale;
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
            self.scaled_sums[part][row] = scaled_sums[part];
            self.minus_pair_sums[part][row] = pair_sums[part];
        }
    }
}
