//! AVX-512 VNNI: `vpdpwssd` multiplies 32 pairs of 16-bit codes and adds them in twos.

use super::{BLOCK, FixedPanel, FixedRow, MAX_ROWS, ROWS, RowSums, TILE};
use std::arch::x86_64::*;

/// # Safety
/// The features; panels and rows have the blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn multiply(
    w: &[FixedPanel<'_>],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    // SAFETY: by this function's contract.
    unsafe {
        match w {
            [first, second] => sized([*first, *second], x, blocks, sums),
            _ => w.iter().for_each(|w| sized([*w], x, blocks, sums)),
        }
    }
}

/// Returns the scales of a block's rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn scales(exponents: &[u8; ROWS]) -> __m512 {
    // SAFETY: 16 bytes.
    let exponents = unsafe { _mm_loadu_si128(exponents.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(exponents)))
}

/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sized<const W: usize>(
    w: [FixedPanel<'_>; W],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    // SAFETY: by this function's contract.
    unsafe {
        match sums.len() {
            1 => tile::<W, 1>(w, x, blocks, sums),
            2 => tile::<W, 2>(w, x, blocks, sums),
            3 => tile::<W, 3>(w, x, blocks, sums),
            4 => tile::<W, 4>(w, x, blocks, sums),
            5 => tile::<W, 5>(w, x, blocks, sums),
            _ => tile::<W, 6>(w, x, blocks, sums),
        }
    }
}

/// Multiplies `16 * W` weight rows with `R` activation rows.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const W: usize, const R: usize>(
    w: [FixedPanel<'_>; W],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    let sums = &mut sums[..R];
    let mut acc = [[_mm512_setzero_ps(); W]; R];
    for (acc, sums) in acc.iter_mut().zip(sums.iter()) {
        for (acc, sums) in acc.iter_mut().zip(sums.as_chunks::<ROWS>().0) {
            // SAFETY: 16 numbers.
            *acc = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
        }
    }
    for block in 0..blocks {
        let mut dots = [[_mm512_setzero_si512(); W]; R];
        for pair in 0..BLOCK / 2 {
            let at = block * TILE + pair * 2 * ROWS;
            let codes = w.map(|w| {
                // SAFETY: the panel has this block. Nothing is fetched ahead: the processor does, and better.
                unsafe { _mm512_loadu_si512(w.codes.as_ptr().add(at).cast()) }
            });
            for row in 0..R {
                // SAFETY: the row has this block.
                let x = unsafe {
                    (*x[row].as_ptr().add(block)).codes.as_ptr().cast::<i32>().add(pair).read_unaligned()
                };
                let x = _mm512_set1_epi32(x);
                for side in 0..W {
                    dots[row][side] = _mm512_dpwssd_epi32(dots[row][side], codes[side], x);
                }
            }
        }
        for side in 0..W {
            // SAFETY: the panel has this block.
            let scale = scales(unsafe { &*w[side].exponents.as_ptr().add(block * ROWS).cast() });
            for row in 0..R {
                // SAFETY: the row has this block.
                let x_scale = _mm512_set1_ps(unsafe { (*x[row].as_ptr().add(block)).scale });
                let dots = _mm512_cvtepi32_ps(dots[row][side]);
                acc[row][side] = _mm512_fmadd_ps(dots, _mm512_mul_ps(scale, x_scale), acc[row][side]);
            }
        }
    }
    for (sums, acc) in sums.iter_mut().zip(acc) {
        for (sums, acc) in sums.as_chunks_mut::<ROWS>().0.iter_mut().zip(acc) {
            // SAFETY: 16 numbers.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), acc) };
        }
    }
}
