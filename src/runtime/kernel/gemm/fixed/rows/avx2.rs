//! AVX2: a row's block is four registers of f32; transpositions of 8 x 8 pairs make the quarters of the tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::convert::ROUND;
use super::{BLOCK_BYTES, HalfRows, ROWS, TILE, inverse, line_ahead};
use crate::gemm::transpose;

/// Rows that are transposed together.
const SIDE: usize = 8;

/// Converts whole blocks of 16 rows.
///
/// # Safety
/// The processor has the features, rows and exponents have the blocks, no exponent is [`BROKEN`](super::BROKEN), and there is a tile for each block.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn tiles(rows: HalfRows<'_>, blocks: Range<usize>, exponents: &[u8], codes: &mut [i16]) {
    // SAFETY: by this function's contract.
    unsafe {
        match rows.is_bf16 {
            true => convert::<true>(rows, blocks, exponents, codes),
            false => convert::<false>(rows, blocks, exponents, codes),
        }
    }
}

/// # Safety
/// As [`tiles`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn convert<const BF16: bool>(
    rows: HalfRows<'_>,
    blocks: Range<usize>,
    exponents: &[u8],
    codes: &mut [i16],
) {
    let stride = rows.row_bytes();
    let tiles = codes.as_chunks_mut::<TILE>().0.iter_mut();
    for ((block, tile), exponents) in blocks.zip(tiles).zip(exponents.as_chunks::<ROWS>().0) {
        let ahead = line_ahead(rows, block);
        for first in [0, SIDE] {
            let mut lines = [[_mm256_setzero_si256(); SIDE]; 2];
            for row in 0..SIDE {
                // SAFETY: the row has this block, by this function's contract. A prefetch faults nowhere.
                let codes = unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add((first + row) * stride).cast());
                    let at = rows.bytes.as_ptr().add((first + row) * stride + block * BLOCK_BYTES);
                    row_codes::<BF16>(at, exponents[first + row])
                };
                (lines[0][row], lines[1][row]) = (codes[0], codes[1]);
            }
            let lines = [transpose::eight(lines[0]), transpose::eight(lines[1])];
            for (line, to) in lines.as_flattened().iter().zip(tile.as_chunks_mut::<{ 2 * ROWS }>().0) {
                let to = &mut to[2 * first..][..2 * SIDE];
                // SAFETY: 32 bytes.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), *line) };
            }
        }
    }
}

/// Returns the codes of a row's block in pairs, value `k` beside value `k + 16`: the first eight pairs and the others.
///
/// # Safety
/// 64 bytes at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn row_codes<const BF16: bool>(at: *const u8, exponent: u8) -> [__m256i; 2] {
    let inverse = _mm256_set1_ps(if exponent == 0 { 0.0 } else { inverse(exponent) });
    let [a, b, c, d] = [0, 1, 2, 3].map(|quarter| {
        // SAFETY: by this function's contract.
        let halves = unsafe { _mm_loadu_si128(at.add(quarter * BLOCK_BYTES / 4).cast()) };
        let values = match BF16 {
            true => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves))),
            false => _mm256_cvtph_ps(halves),
        };
        _mm256_castps_si256(_mm256_fmadd_ps(values, inverse, _mm256_set1_ps(ROUND)))
    });
    [(a, c), (b, d)].map(|(low, high)| _mm256_blend_epi16::<0xaa>(low, _mm256_slli_epi32::<16>(high)))
}
