//! AVX-512: a row's block is two registers of f32, and a transposition of 16 x 16 pairs makes the tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::convert::ROUND;
use super::{BLOCK_BYTES, BROKEN, HalfRows, ROWS, TILE, line_ahead};
use crate::gemm::transpose;

/// Converts whole blocks of 16 rows. Returns whether it did: false if one of them has an infinity or NaN. Panics if the processor lacks
/// the instructions, or something is shorter than the blocks say.
pub fn tiles(rows: HalfRows<'_>, blocks: Range<usize>, exponents: &[u8], codes: &mut [i16]) -> bool {
    if blocks.is_empty() {
        return true;
    }
    assert!(crate::Isa::Avx512.is_available(), "instruction set not available");
    assert!(rows.bytes.len() == ROWS * rows.row_bytes() && blocks.end * BLOCK_BYTES <= rows.row_bytes());
    assert!(codes.len() == blocks.len() * TILE);
    let exponents = &exponents[blocks.start * ROWS..blocks.end * ROWS];
    // SAFETY: the processor has the features, and all lengths are as asserted.
    unsafe {
        if has_broken(exponents) {
            return false;
        }
        match rows.is_bf16 {
            true => convert::<true>(rows, blocks, exponents, codes),
            false => convert::<false>(rows, blocks, exponents, codes),
        }
    }
    true
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn has_broken(exponents: &[u8]) -> bool {
    let is_broken = |exponents: &[u8; ROWS]| {
        // SAFETY: 16 bytes.
        let exponents = unsafe { _mm_loadu_si128(exponents.as_ptr().cast()) };
        _mm_cmpeq_epi8_mask(exponents, _mm_set1_epi8(BROKEN.cast_signed())) != 0
    };
    exponents.as_chunks().0.iter().any(is_broken)
}

/// # Safety
/// The lengths that [`tiles`] asserts.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
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
        let inverses = inverses(exponents);
        let mut lines = [_mm512_setzero_si512(); ROWS];
        for (row, line) in lines.iter_mut().enumerate() {
            // SAFETY: the row has this block, by this function's contract. A prefetch faults nowhere.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(row * stride).cast());
                let at = rows.bytes.as_ptr().add(row * stride + block * BLOCK_BYTES);
                *line = row_codes::<BF16>(at, inverses[row]);
            }
        }
        for (line, to) in transpose::sixteen(lines).into_iter().zip(tile.as_chunks_mut::<{ 2 * ROWS }>().0) {
            // SAFETY: 64 bytes.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) };
        }
    }
}

/// Returns the inverse of every scale, 0 where it is 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn inverses(exponents: &[u8; ROWS]) -> [f32; ROWS] {
    // SAFETY: 16 bytes.
    let exponents = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(exponents.as_ptr().cast()) });
    let inverse = _mm512_slli_epi32::<23>(_mm512_sub_epi32(_mm512_set1_epi32(254), exponents));
    let inverse = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(exponents, exponents), inverse);
    let mut out = [0.0; ROWS];
    // SAFETY: 16 numbers.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_castsi512_ps(inverse)) };
    out
}

/// Returns the codes of a row's block in pairs: value `k` beside value `k + 16`.
///
/// # Safety
/// 64 bytes at `at`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn row_codes<const BF16: bool>(at: *const u8, inverse: f32) -> __m512i {
    let [low, high] = [0, BLOCK_BYTES / 2].map(|offset| {
        // SAFETY: by this function's contract.
        let halves = unsafe { _mm256_loadu_si256(at.add(offset).cast()) };
        let values = match BF16 {
            true => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))),
            false => _mm512_cvtph_ps(halves),
        };
        _mm512_castps_si512(_mm512_fmadd_ps(values, _mm512_set1_ps(inverse), _mm512_set1_ps(ROUND)))
    });
    _mm512_mask_blend_epi16(0xaaaa_aaaa, low, _mm512_slli_epi32::<16>(high))
}
