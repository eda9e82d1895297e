//! Conversion of activations to 14-bit codes. Every block is converted separately and by the same operations
//! on every instruction set.

use super::{BLOCK, FixedBlock, LARGEST};
use crate::isa::dispatch;

/// Blocks whose largest value is smaller become zero: their scales, or the inverse, are not normal numbers.
pub const TINY: f32 = 1e-30;

/// Adding it (1.5 * 2^23) rounds to an integer, ties to even, and leaves that in the low bits as two's complement.
pub const ROUND: f32 = 12_582_912.0;

/// Returns the largest magnitude; NaN counts as larger than infinity. Bits of magnitudes are ordered like the
/// magnitudes.
#[inline(always)]
fn magnitude(x: &[f32; BLOCK]) -> f32 {
    f32::from_bits(x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)))
}

/// Rounds to codes in the order of [`FixedBlock`].
#[inline(always)]
fn round_all(x: &[f32; BLOCK], inverse: f32, codes: &mut [i16; BLOCK]) {
    let (low, high) = x.split_at(BLOCK / 2);
    for ((pair, low), high) in codes.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
        *pair = [low, high].map(|x| x.mul_add(inverse, ROUND).to_bits() as i16);
    }
}

/// Computes `code = round(x * (8191 / max|x|))`; returns the scale `max|x| / 8191`, NaN for a block with an infinity
/// or NaN.
#[inline(always)]
fn activation_block(x: &[f32; BLOCK], codes: &mut [i16; BLOCK]) -> f32 {
    let max = magnitude(x);
    let (inverse, scale) = if max < TINY {
        (0.0, 0.0)
    } else if max < f32::INFINITY {
        (LARGEST / max, max / LARGEST)
    } else {
        (0.0, f32::NAN)
    };
    round_all(x, inverse, codes);
    if scale.is_nan() {
        codes.fill(0);
    }
    scale
}

#[inline(always)]
fn quantize_body(x: &[f32], blocks: &mut [FixedBlock]) {
    let (whole, tail) = x.as_chunks::<BLOCK>();
    let mut last = [0.0; BLOCK];
    last[..tail.len()].copy_from_slice(tail);
    for (x, block) in whole.iter().chain([&last]).zip(blocks) {
        block.scale = activation_block(x, &mut block.codes);
    }
}

dispatch! {
    /// Converts a row; the last block is padded with zeros.
    pub fn quantize_row(x: &[f32], blocks: &mut [FixedBlock]) = quantize_body
}
