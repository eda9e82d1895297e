//! Conversion of floats to 14-bit codes: weights once, at load, activations at every step.
//!
//! Every block is converted separately and by the same operations on every instruction set.

use super::{BLOCK, FixedBlock, LARGEST, ROWS, TILE};
use crate::Dtype;
use crate::isa::{Isa, dispatch};
use crate::quant::dequantize_row;

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

/// Packs a row of floats as number `row` of a panel of `codes` and `exponents`.
#[inline(always)]
fn pack_body(x: &[f32], row: usize, codes: &mut [u8], exponents: &mut [u8]) {
    let (mut wide, mut packed) = ([0.0; BLOCK], [0; BLOCK]);
    let tiles = codes.chunks_exact_mut(TILE * 2).zip(exponents.chunks_exact_mut(ROWS));
    for (x, (tile, exponents)) in x.chunks(BLOCK).zip(tiles) {
        wide[..x.len()].copy_from_slice(x);
        wide[x.len()..].fill(0.0);
        exponents[row] = weight_block(&wide, &mut packed);
        for (pair, out) in packed.as_chunks::<2>().0.iter().zip(tile.chunks_exact_mut(4 * ROWS)) {
            out[4 * row..][..4].copy_from_slice(bytemuck::bytes_of(pair));
        }
    }
}

dispatch! {
    fn pack_row(x: &[f32], row: usize, codes: &mut [u8], exponents: &mut [u8]) = pack_body
}

/// Packs up to 16 rows of `cols` values each into a zeroed panel.
pub fn pack_panel(isa: Isa, dtype: Dtype, source: &[u8], cols: usize, panel: &mut [u8]) {
    let (codes, exponents) = panel.split_at_mut(cols.div_ceil(BLOCK) * TILE * 2);
    let mut x = vec![0.0; cols];
    for (row, bytes) in source.chunks_exact(2 * cols).enumerate() {
        dequantize_row(dtype, bytes, &mut x);
        pack_row(isa, &x, row, codes, exponents);
    }
}
