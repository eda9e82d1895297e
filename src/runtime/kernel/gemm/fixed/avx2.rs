//! AVX2: `vpmaddwd` multiplies 16 pairs of 16-bit codes and adds them in twos; with VNNI `vpdpwssd` also adds
//! them to the sums.

use super::{BLOCK, FixedPanel, FixedRow, MAX_ROWS, ROWS, RowSums, TILE};
use std::arch::x86_64::*;

/// Rows of one register of i32 or f32.
const SIDE: usize = 8;

/// # Safety
/// avx2, fma; panels and rows have the blocks.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn multiply(
    w: &[FixedPanel<'_>],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    // SAFETY: by this function's contract.
    unsafe { sized::<false>(w, x, blocks, sums) }
}

/// # Safety
/// As [`multiply`], and avxvnni.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub unsafe fn multiply_vnni(
    w: &[FixedPanel<'_>],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    // SAFETY: by this function's contract.
    unsafe { sized::<true>(w, x, blocks, sums) }
}

/// # Safety
/// As [`multiply`], with `VNNI` as [`multiply_vnni`].
#[inline(always)]
unsafe fn sized<const VNNI: bool>(
    w: &[FixedPanel<'_>],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    for (at, w) in w.iter().copied().enumerate() {
        for side in 0..2 {
            let place = at * ROWS + side * SIDE;
            // SAFETY: by this function's contract; `place` is a multiple of 8 below 32.
            unsafe {
                match sums.len() {
                    1 => tile::<1, VNNI>(w, side, x, blocks, sums, place),
                    2 => tile::<2, VNNI>(w, side, x, blocks, sums, place),
                    3 | 4 => tile::<4, VNNI>(w, side, x, blocks, sums, place),
                    _ => tile::<MAX_ROWS, VNNI>(w, side, x, blocks, sums, place),
                }
            }
        }
    }
}

/// Multiplies eight weight rows with `R` activation rows; rows past the last of `sums` are not stored.
///
/// # Safety
/// As [`sized`].
#[inline(always)]
unsafe fn tile<const R: usize, const VNNI: bool>(
    w: FixedPanel<'_>,
    side: usize,
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
    place: usize,
) {
    // SAFETY: the features and the lengths by this function's contract.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); R];
        for (acc, sums) in acc.iter_mut().zip(sums.iter()) {
            *acc = _mm256_loadu_ps(sums[place..][..SIDE].as_ptr());
        }
        for block in 0..blocks {
            let mut dots = [_mm256_setzero_si256(); R];
            for pair in 0..BLOCK / 2 {
                let at = block * TILE + 2 * (pair * ROWS + side * SIDE);
                let codes = _mm256_loadu_si256(w.codes.as_ptr().add(at).cast());
                for row in 0..R {
                    let x =
                        (*x[row].as_ptr().add(block)).codes.as_ptr().cast::<i32>().add(pair).read_unaligned();
                    let x = _mm256_set1_epi32(x);
                    dots[row] = match VNNI {
                        true => _mm256_dpwssd_avx_epi32(dots[row], codes, x),
                        false => _mm256_add_epi32(dots[row], _mm256_madd_epi16(codes, x)),
                    };
                }
            }
            let exponents = _mm_loadl_epi64(w.exponents.as_ptr().add(block * ROWS + side * SIDE).cast());
            let scale = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(exponents)));
            for row in 0..R {
                let scale = _mm256_mul_ps(scale, _mm256_set1_ps((*x[row].as_ptr().add(block)).scale));
                acc[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[row]), scale, acc[row]);
            }
        }
        for (sums, acc) in sums.iter_mut().zip(acc) {
            _mm256_storeu_ps(sums[place..][..SIDE].as_mut_ptr(), acc);
        }
    }
}
