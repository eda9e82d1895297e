//! Rows of F16 or BF16 as a file has them, and their conversion to codes.
//!
//! The exponent of a block's scale follows from its largest magnitude and takes a byte. It is found once, at
//! the first use; what is left for later ones is a multiplication per value and a transposition, which take
//! about the time of reading the rows from memory.
//!
//! Invariant: codes and exponents depend on the block alone, and every instruction set computes the same
//! ones.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ops::Range;

use super::convert::{ROUND, TINY};
use super::{BLOCK, FixedRow, ROWS, TILE, Variant};
use crate::Dtype;
use crate::isa::{Isa, dispatch};

/// Bytes of a block in the file.
const BLOCK_BYTES: usize = 2 * BLOCK;

/// Blocks along K between the converted one and the one that is prefetched.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8;

/// Bytes between the scanned block and the one that is prefetched.
#[cfg(target_arch = "x86_64")]
const SCAN_AHEAD: usize = 4096;

/// The exponent of a block with an infinity or NaN: its scale is infinite and its codes are 0, so that products are NaN.
const BROKEN: u8 = 255;

/// The 1 to 16 rows of a panel, `cols` numbers of 2 bytes each.
#[derive(Clone, Copy)]
pub struct HalfRows<'a> {
    is_bf16: bool,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> HalfRows<'a> {
    /// `None` for types other than F16 and BF16. Panics unless these are 1 to 16 whole rows.
    pub fn new(dtype: Dtype, cols: usize, bytes: &'a [u8]) -> Option<HalfRows<'a>> {
        let is_bf16 = match dtype {
            Dtype::F16 => false,
            Dtype::Bf16 => true,
            _ => return None,
        };
        let rows = HalfRows { is_bf16, cols, bytes };
        let whole = bytes.len() == rows.count() * rows.row_bytes();
        assert!(whole && (1..=ROWS).contains(&rows.count()), "whole rows of a panel");
        Some(rows)
    }

    fn row_bytes(self) -> usize {
        2 * self.cols
    }

    fn count(self) -> usize {
        self.bytes.len() / self.row_bytes()
    }

    fn widen(self, bits: u16) -> f32 {
        if self.is_bf16 { from_bf16(bits) } else { from_f16(bits) }
    }

    /// Dequantises a row, with the rounding of its codes; `exponents` are the panel's.
    pub fn unpack(self, row: usize, exponents: &[u8], out: &mut [f32]) {
        let bytes = &self.bytes[row * self.row_bytes()..][..self.row_bytes()];
        for (block, (bytes, out)) in bytes.chunks(BLOCK_BYTES).zip(out.chunks_mut(BLOCK)).enumerate() {
            let exponent = exponents[block * ROWS + row];
            for (half, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
                let code = code(self.widen(u16::from_le_bytes(*half)), exponent);
                *out = f32::from(code) * f32::from_bits(u32::from(exponent) << 23);
            }
        }
    }
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

/// Returns the exponent of a block's scale: 12 below that of its largest magnitude, so that the largest code has 13 bits.
#[inline(always)]
fn exponent(largest: f32) -> u8 {
    match largest {
        tiny if tiny < TINY => 0,
        finite if finite < f32::INFINITY => ((finite.to_bits() >> 23) - 12) as u8,
        _ => BROKEN,
    }
}

#[inline(always)]
fn code(value: f32, exponent: u8) -> i16 {
    match exponent {
        0 | BROKEN => 0,
        _ => value.mul_add(inverse(exponent), ROUND).to_bits() as i16,
    }
}

/// Returns the inverse of the scale of an exponent other than 0 and [`BROKEN`].
#[inline(always)]
fn inverse(exponent: u8) -> f32 {
    f32::from_bits((254 - u32::from(exponent)) << 23)
}

/// Bits of magnitudes are ordered like the magnitudes, NaN after infinity.
#[inline(always)]
fn largest(block: &[u8]) -> u16 {
    let mut max = 0;
    for half in block.as_chunks::<2>().0 {
        max = max.max(u16::from_le_bytes(*half) & 0x7fff);
    }
    max
}

/// In loops: closures given to iterators would be compiled for the least instruction set.
#[inline(always)]
fn scan_body(rows: HalfRows<'_>, magnitudes: &mut [u16], exponents: &mut [u8]) {
    for (row, bytes) in rows.bytes.chunks_exact(rows.row_bytes()).enumerate() {
        let (whole, tail) = bytes.as_chunks::<BLOCK_BYTES>();
        for (block, bytes) in whole.iter().enumerate() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: every x86-64 has the instruction, and it faults nowhere.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(SCAN_AHEAD).cast());
            }
            magnitudes[block * ROWS + row] = largest(bytes);
        }
        if !tail.is_empty() {
            magnitudes[whole.len() * ROWS + row] = largest(tail);
        }
    }
    for (to, magnitude) in exponents.iter_mut().zip(magnitudes) {
        *to = exponent(if rows.is_bf16 { from_bf16(*magnitude) } else { from_f16(*magnitude) });
    }
}

dispatch! {
    fn scan_into(rows: HalfRows<'_>, magnitudes: &mut [u16], exponents: &mut [u8]) = scan_body
}

/// Returns the exponents `[block][row]` of a panel; those of missing rows are 0.
pub fn scan(isa: Isa, rows: HalfRows<'_>) -> Box<[u8]> {
    let len = rows.cols.div_ceil(BLOCK) * ROWS;
    let (mut magnitudes, mut exponents) = (vec![0; len], vec![0; len].into_boxed_slice());
    scan_into(isa, rows, &mut magnitudes, &mut exponents);
    exponents
}

/// Converts blocks of a panel whose exponents are known to tiles `[pair][row][2]`: all of `codes` is written.
pub fn tiles(
    variant: Variant,
    rows: HalfRows<'_>,
    blocks: Range<usize>,
    exponents: &[u8],
    codes: &mut [i16],
) {
    assert_eq!(codes.len(), blocks.len() * TILE, "a tile for every block");
    let whole = if rows.count() == ROWS { rows.cols / BLOCK } else { 0 };
    let fast = blocks.start..blocks.end.min(whole).max(blocks.start);
    let (to, rest) = codes.split_at_mut(fast.len() * TILE);
    let known = &exponents[fast.start * ROWS..fast.end * ROWS];
    match variant {
        _ if !are_finite(known) => plain_tiles(rows, fast.clone(), exponents, to),
        // SAFETY: `Variant::within` saw that the processor has the features; these are blocks of 16 whole rows.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512Vnni | Variant::Amx => unsafe { avx512::tiles(rows, fast.clone(), known, to) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2 | Variant::Avx2Vnni => unsafe { avx2::tiles(rows, fast.clone(), known, to) },
        _ => plain_tiles(rows, fast.clone(), exponents, to),
    }
    plain_tiles(rows, fast.end..blocks.end, exponents, rest);
}

/// Returns whether no block has an infinity or NaN: such ones are for the twin. A fold, which compilers vectorise.
fn are_finite(exponents: &[u8]) -> bool {
    exponents.iter().fold(true, |finite, exponent| finite & (*exponent != BROKEN))
}

/// Multiplies all rows with one activation row, in the order that [`fixed`](super) defines, without tiles; `None` if that has no kernel, or
/// a weight is infinite or NaN.
pub fn multiply_one(
    variant: Variant,
    rows: HalfRows<'_>,
    exponents: &[u8],
    x: FixedRow<'_>,
) -> Option<[f32; ROWS]> {
    let whole = rows.count() == ROWS && x.len() * BLOCK == rows.cols && exponents.len() == x.len() * ROWS;
    match variant {
        _ if !whole => None,
        // SAFETY: `Variant::within` saw that the processor has the features; the lengths are compared above.
        #[cfg(target_arch = "x86_64")]
        Variant::Avx512Vnni | Variant::Amx if are_finite(exponents) => unsafe {
            Some(avx512::multiply_one(rows, exponents, x))
        },
        _ => None,
    }
}

/// The twin that every other variant must equal.
fn plain_tiles(rows: HalfRows<'_>, blocks: Range<usize>, exponents: &[u8], codes: &mut [i16]) {
    for (block, tile) in blocks.zip(codes.as_chunks_mut::<TILE>().0) {
        if rows.count() < ROWS {
            tile.fill(0);
        }
        for (row, bytes) in rows.bytes.chunks_exact(rows.row_bytes()).enumerate() {
            let bytes = &bytes[block * BLOCK_BYTES..bytes.len().min((block + 1) * BLOCK_BYTES)];
            let pairs = block_pairs(rows.is_bf16, bytes, exponents[block * ROWS + row]);
            for (pair, to) in pairs.iter().zip(tile.as_chunks_mut::<{ 2 * ROWS }>().0) {
                to[2 * row..2 * row + 2].copy_from_slice(pair);
            }
        }
    }
}

/// Returns the codes of a row's block, in loops that compilers vectorise; `bytes` are fewer than a block's at the end of a row.
fn block_pairs(is_bf16: bool, bytes: &[u8], exponent: u8) -> [[i16; 2]; BLOCK / 2] {
    let mut pairs = [[0; 2]; BLOCK / 2];
    if exponent == 0 || exponent == BROKEN {
        return pairs;
    }
    let (mut halves, mut values) = ([0u16; BLOCK], [0.0; BLOCK]);
    for (to, half) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *to = u16::from_le_bytes(*half);
    }
    match is_bf16 {
        true => values.iter_mut().zip(halves).for_each(|(to, half)| *to = from_bf16(half)),
        false => values.iter_mut().zip(halves).for_each(|(to, half)| *to = from_f16(half)),
    }
    let (low, high) = values.split_at(BLOCK / 2);
    for ((pair, low), high) in pairs.iter_mut().zip(low).zip(high) {
        *pair = [low, high].map(|value| value.mul_add(inverse(exponent), ROUND).to_bits() as i16);
    }
    pairs
}

/// Returns whether the rows are converted about as fast as memory delivers them, so that they need no packing.
pub fn are_converted_fast(variant: Variant) -> bool {
    match variant {
        #[cfg(target_arch = "x86_64")]
        Variant::Avx2 | Variant::Avx2Vnni | Variant::Avx512Vnni | Variant::Amx => true,
        _ => false,
    }
}

/// Returns the line of the first row to prefetch while `block` is converted: that of the block [`AHEAD`] blocks later, in the next panel
/// if the row ends before.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn line_ahead(rows: HalfRows<'_>, block: usize) -> *const u8 {
    let ahead = (block + AHEAD) * BLOCK_BYTES;
    let start = match ahead < rows.row_bytes() {
        true => ahead,
        false => rows.bytes.len() + ahead - rows.row_bytes(),
    };
    rows.bytes.as_ptr().wrapping_add(start)
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
