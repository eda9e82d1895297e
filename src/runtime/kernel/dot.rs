//! Inner products of f32 rows, the one reduction of matrix products and attention scores.
//!
//! Order, the same for every tile shape and instruction set: element `k` goes to lane `k % LANES` by fused
//! multiply-add, in ascending `k`; lanes are then summed in a fixed tree. A row's product is therefore the
//! same bits whether it is computed alone, in a tile with others, or on another processor.

use super::isa::dispatch;
use super::wide::LANES; // partial sums per inner product

type LaneSums = [f32; LANES];

#[inline(always)]
pub(super) fn sum_lanes(lanes: LaneSums) -> f32 {
    let mut width = LANES / 2;
    let mut sums = lanes;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

#[inline(always)]
fn fma_lanes(sums: &mut LaneSums, a: &LaneSums, b: &LaneSums) {
    for lane in 0..LANES {
        sums[lane] = a[lane].mul_add(b[lane], sums[lane]);
    }
}

#[inline(always)]
pub(super) fn dot_body(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_blocks, a_tail) = a.as_chunks::<LANES>();
    let (b_blocks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        fma_lanes(&mut sums, a, b);
    }
    for (lane, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        sums[lane] = a.mul_add(*b, sums[lane]);
    }
    sum_lanes(sums)
}

dispatch! {
    /// Computes the inner product of two rows of equal length.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 = dot_body
}

#[inline(always)]
pub(super) fn axpy_body(factor: f32, x: &[f32], sum: &mut [f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum = x.mul_add(factor, *sum);
    }
}

dispatch! {
    /// Computes `sum += factor * x`, element by element.
    pub fn axpy(factor: f32, x: &[f32], sum: &mut [f32]) = axpy_body
}

#[inline(always)]
pub(super) fn sum_body(x: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            sums[lane] += block[lane];
        }
    }
    for (lane, x) in tail.iter().enumerate() {
        sums[lane] += x;
    }
    sum_lanes(sums)
}

dispatch! {
    /// Sums a row, in the order of [`dot`].
    pub fn sum(x: &[f32]) -> f32 = sum_body
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, available};
    use super::*;

    fn row(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        for len in [0, 1, 15, 16, 17, 31, 33, 64, 96, 100, 256, 1000] {
            let (a, b) = (row(len, 1), row(len, 77));
            let scalar = dot(Isa::Scalar, &a, &b);
            for isa in available() {
                assert_eq!(dot(isa, &a, &b).to_bits(), scalar.to_bits(), "{isa:?}, len {len}");
            }
        }
    }

    #[test]
    fn dot_agrees_with_double_precision() {
        let (a, b) = (row(777, 1), row(777, 2));
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((f64::from(dot(Isa::Scalar, &a, &b)) - exact).abs() < 1e-4);
        let exact: f64 = a.iter().copied().map(f64::from).sum();
        assert!((f64::from(sum(Isa::Scalar, &a)) - exact).abs() < 1e-4);
    }
}
