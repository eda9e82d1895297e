//! Conversion of floats to 14-bit codes: weights once, at load, activations at every step.
//!
//! Every block is converted separately and by the same operations on every instruction set.

use super::{BLOCK, FixedBlock, LARGEST, ROWS, TILE};
use crate::Dtype;
use crate::isa::{Isa, dispatch};

/// Blocks whose largest value is smaller become zero: their scales, or the inverse, are not normal numbers.
const TINY: f32 = 1e-30;

/// Adding it (1.5 * 2^23) rounds to an integer, ties to even, and leaves that in the low bits as two's complement.
const ROUND: f32 = 12_582_912.0;

/// Returns the largest magnitude; NaN counts as larger than infinity. Bits of magnitudes are ordered like the
/// magnitudes.
#[inline(always)]
fn magnitude(x: &[f32; BLOCK]) -> f32 {
    f32::from_bits(x.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)))
}

#[inline(always)]
fn round_all(x: &[f32; BLOCK], inverse: f32, codes: &mut [i16; BLOCK]) {
    for (code, x) in codes.iter_mut().zip(x) {
        *code = x.mul_add(inverse, ROUND).to_bits() as i16;
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

/// Computes codes of weights; returns the exponent of their scale: 12 below that of the largest one, so that it gets
/// 13 bits.
#[inline(always)]
fn weight_block(x: &[f32; BLOCK], codes: &mut [i16; BLOCK]) -> u8 {
    let max = magnitude(x);
    if max < TINY {
        codes.fill(0);
        return 0;
    }
    if !max.is_finite() {
        codes.fill(0);
        return 255;
    }
    let exponent = (max.to_bits() >> 23) - 12;
    round_all(x, f32::from_bits((254 - exponent) << 23), codes);
    exponent as u8
}

/// Widens the bits of an F16 exactly, in operations that compilers vectorise.
#[inline(always)]
fn from_f16(bits: u16) -> f32 {
    /// Moves the exponent's bias from 15 to 127.
    const BIAS: u32 = 112 << 23;
    /// The smallest normal F16, which the bits of a subnormal one are counted from.
    const LEAST: u32 = 113 << 23;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let normal = magnitude + BIAS;
    let subnormal = (f32::from_bits(magnitude + LEAST) - f32::from_bits(LEAST)).to_bits();
    let widened = match bits & 0x7c00 {
        0 => subnormal,
        0x7c00 => normal + BIAS, // infinite or NaN
        _ => normal,
    };
    f32::from_bits(widened | u32::from(bits & 0x8000) << 16)
}

#[inline(always)]
fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Packs up to 16 rows of `cols` numbers of 2 bytes each into the codes and exponents of a zeroed panel, block by block, so that
/// the tile that is written stays in the first-level cache.
#[inline(always)]
fn pack_body(widen: impl Fn(u16) -> f32, source: &[u8], cols: usize, codes: &mut [u8], exponents: &mut [u8]) {
    let (mut wide, mut packed) = ([0.0; BLOCK], [0; BLOCK]);
    let tiles = codes.as_chunks_mut::<{ TILE * 2 }>().0.iter_mut();
    for (block, (tile, exponents)) in tiles.zip(exponents.as_chunks_mut::<ROWS>().0).enumerate() {
        let (tile, _) = tile.as_chunks_mut::<{ 4 * ROWS }>();
        let bytes = block * BLOCK * 2..(cols * 2).min((block + 1) * BLOCK * 2);
        for (row, source) in source.chunks_exact(cols * 2).enumerate() {
            let mut halves = [[0; 2]; BLOCK];
            halves.as_flattened_mut()[..bytes.len()].copy_from_slice(&source[bytes.clone()]);
            for (wide, half) in wide.iter_mut().zip(halves) {
                *wide = widen(u16::from_le_bytes(half));
            }
            exponents[row] = weight_block(&wide, &mut packed);
            for (pair, out) in packed.as_chunks::<2>().0.iter().zip(&mut *tile) {
                out[4 * row..][..4].copy_from_slice(bytemuck::bytes_of(pair));
            }
        }
    }
}

#[inline(always)]
fn pack_f16_body(source: &[u8], cols: usize, codes: &mut [u8], exponents: &mut [u8]) {
    pack_body(from_f16, source, cols, codes, exponents);
}

#[inline(always)]
fn pack_bf16_body(source: &[u8], cols: usize, codes: &mut [u8], exponents: &mut [u8]) {
    pack_body(from_bf16, source, cols, codes, exponents);
}

dispatch! {
    fn pack_f16(source: &[u8], cols: usize, codes: &mut [u8], exponents: &mut [u8]) = pack_f16_body
}

dispatch! {
    fn pack_bf16(source: &[u8], cols: usize, codes: &mut [u8], exponents: &mut [u8]) = pack_bf16_body
}

/// Packs up to 16 rows of `cols` values each, F16 or BF16, into a zeroed panel.
pub fn pack_panel(isa: Isa, dtype: Dtype, source: &[u8], cols: usize, panel: &mut [u8]) {
    let (codes, exponents) = panel.split_at_mut(cols.div_ceil(BLOCK) * TILE * 2);
    match dtype {
        Dtype::F16 => pack_f16(isa, source, cols, codes, exponents),
        Dtype::Bf16 => pack_bf16(isa, source, cols, codes, exponents),
        other => unreachable!("{} has another packed form", other.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, expected) = (from_f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan(),
                "{bits:#06x}"
            );
        }
    }
}
