//! AVX-512: a row's block is two registers of f32, and a transposition of 16 x 16 pairs makes the tile.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::FixedRow;
use super::super::avx512::scales;
use super::super::convert::ROUND;
use super::{BLOCK_BYTES, HalfRows, ROWS, TILE, line_ahead};
use crate::gemm::transpose;

/// Converts whole blocks of 16 rows.
///
/// # Safety
/// The processor has the features, rows and exponents have the blocks, no exponent is [`BROKEN`](super::BROKEN), and there is a tile for each block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
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

/// Bytes from a block to the prefetched one; measured.
const FAR: usize = 6144;

/// Multiplies 16 rows with one activation row in the order that [`fixed`](super::super) defines.
///
/// # Safety
/// As [`tiles`], for all blocks of the rows; `x` has as many.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub unsafe fn multiply_one(rows: HalfRows<'_>, exponents: &[u8], x: FixedRow<'_>) -> [f32; ROWS] {
    let exponents = exponents.as_chunks().0;
    // SAFETY: by this function's contract.
    unsafe {
        match (rows.is_bf16, x.len() <= 4 * ROWS) {
            (true, true) => one::<true, 4>(rows, exponents, x),
            (true, false) => one::<true, 16>(rows, exponents, x),
            (false, true) => one::<false, 4>(rows, exponents, x),
            (false, false) => one::<false, 16>(rows, exponents, x),
        }
    }
}

/// Takes `16 * GROUPS` blocks of a row before those of the next row: whole rows if they are not long, which processors prefetch best. One
/// block each of 16 rows would be 16 streams, and with rows of whole pages 16 lines for the same places in the first-level cache.
///
/// # Safety
/// As [`multiply_one`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn one<const BF16: bool, const GROUPS: usize>(
    rows: HalfRows<'_>,
    exponents: &[[u8; ROWS]],
    x: FixedRow<'_>,
) -> [f32; ROWS] {
    let mut sums = _mm512_setzero_ps();
    for (run, (x, exponents)) in x.chunks(GROUPS * ROWS).zip(exponents.chunks(GROUPS * ROWS)).enumerate() {
        let mut inverse = [[[0.0; ROWS]; ROWS]; GROUPS];
        let of_blocks = inverse.as_flattened_mut().iter_mut().zip(exponents);
        of_blocks.for_each(|(to, exponents)| *to = inverses(exponents));
        // `[group of 16 blocks][row]`, each register with the products of the blocks.
        let mut dots = [[_mm512_setzero_si512(); ROWS]; GROUPS];
        for row in 0..ROWS {
            let from =
                rows.bytes.as_ptr().wrapping_add(row * rows.row_bytes() + run * GROUPS * ROWS * BLOCK_BYTES);
            for (at, (x, inverse)) in x.chunks(ROWS).zip(&inverse).enumerate() {
                let mut lines = [_mm512_setzero_si512(); ROWS];
                for (block, ((line, x), inverse)) in lines.iter_mut().zip(x).zip(inverse).enumerate() {
                    let from = from.wrapping_add((at * ROWS + block) * BLOCK_BYTES);
                    // SAFETY: the row has this block, which is 64 bytes, as the codes are. A prefetch faults nowhere.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(FAR).cast());
                        let x = _mm512_loadu_si512(x.codes.as_ptr().cast());
                        *line = _mm512_madd_epi16(row_codes::<BF16>(from, inverse[row]), x);
                    }
                }
                dots[at][row] = sum_each(lines);
            }
        }
        for ((dots, exponents), x) in dots.into_iter().zip(exponents.chunks(ROWS)).zip(x.chunks(ROWS)) {
            for ((dots, exponents), x) in transpose::sixteen(dots).into_iter().zip(exponents).zip(x) {
                let scale = _mm512_mul_ps(scales(exponents), _mm512_set1_ps(x.scale));
                sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, sums);
            }
        }
    }
    let mut out = [0.0; ROWS];
    // SAFETY: 16 numbers.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

/// Returns the sum of each register.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_each(lines: [__m512i; ROWS]) -> __m512i {
    let twos: [__m512i; 8] = std::array::from_fn(|at| {
        let [a, b] = [lines[2 * at], lines[2 * at + 1]];
        _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    });
    let fours: [__m512i; 4] = std::array::from_fn(|at| {
        let [a, b] = [twos[2 * at], twos[2 * at + 1]];
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    });
    let join =
        |a, b| _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
    join(join(fours[0], fours[1]), join(fours[2], fours[3]))
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
