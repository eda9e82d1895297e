//! NEON: `smlal` multiplies 16-bit codes and adds the products to 32-bit sums; the two of a pair are added at
//! the end.

use super::{BLOCK, FixedPanel, FixedRow, MAX_ROWS, ROWS, RowSums, TILE};
use std::arch::aarch64::*;

/// Rows of one register of i32 or f32.
const SIDE: usize = 4;

/// # Safety
/// Panels and rows have the blocks.
#[target_feature(enable = "neon")]
pub unsafe fn multiply(
    w: &[FixedPanel<'_>],
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
) {
    for (at, w) in w.iter().copied().enumerate() {
        // SAFETY: by this function's contract.
        unsafe {
            match sums.len() {
                1 => tiles::<4, 1, 0>(w, x, blocks, sums, at * ROWS),
                2 => tiles::<4, 2, 0>(w, x, blocks, sums, at * ROWS),
                3 => tiles::<2, 3, 0>(w, x, blocks, sums, at * ROWS),
                4 => tiles::<2, 4, 0>(w, x, blocks, sums, at * ROWS),
                _ => {
                    tiles::<2, 3, 0>(w, x, blocks, sums, at * ROWS);
                    tiles::<2, 3, 3>(w, x, blocks, sums, at * ROWS);
                }
            }
        }
    }
}

/// Multiplies a panel, `4 * S` weight rows at a time, with `R` activation rows from `FIRST` on; rows past the last of
/// `sums` are not stored.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "neon")]
unsafe fn tiles<const S: usize, const R: usize, const FIRST: usize>(
    w: FixedPanel<'_>,
    x: [FixedRow<'_>; MAX_ROWS],
    blocks: usize,
    sums: &mut [RowSums],
    place: usize,
) {
    let x: [FixedRow<'_>; R] = std::array::from_fn(|row| x[FIRST + row]);
    for column in (0..ROWS).step_by(SIDE * S) {
        let sums = &mut sums[FIRST..];
        // SAFETY: the lengths by this function's contract.
        unsafe {
            let mut acc = [[vdupq_n_f32(0.0); S]; R];
            for (acc, sums) in acc.iter_mut().zip(sums.iter()) {
                let sums = &sums[place + column..][..SIDE * S];
                *acc = std::array::from_fn(|side| vld1q_f32(sums[SIDE * side..].as_ptr()));
            }
            for block in 0..blocks {
                add_block(w, block, column, x.map(|x| x.as_ptr().add(block)), &mut acc);
            }
            for (sums, acc) in sums.iter_mut().zip(acc) {
                let sums = &mut sums[place + column..][..SIDE * S];
                for (side, acc) in acc.into_iter().enumerate() {
                    vst1q_f32(sums[SIDE * side..].as_mut_ptr(), acc);
                }
            }
        }
    }
}

/// Adds the products of a block.
///
/// # Safety
/// Panel and rows have the block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add_block<const S: usize, const R: usize>(
    w: FixedPanel<'_>,
    block: usize,
    column: usize,
    x: [*const super::FixedBlock; R],
    acc: &mut [[float32x4_t; S]; R],
) {
    // SAFETY: by this function's contract.
    unsafe {
        // Products of one row's pairs are in neighbouring lanes.
        let mut pairs = [[[vdupq_n_s32(0); 2]; S]; R];
        for pair in 0..BLOCK / 2 {
            let line = w.codes.as_ptr().add(block * TILE + 2 * (pair * ROWS + column));
            let x = x.map(|x| {
                let two = (*x).codes.as_ptr().cast::<i32>().add(pair).read_unaligned();
                vreinterpretq_s16_s32(vdupq_n_s32(two))
            });
            for side in 0..S {
                let w = vld1q_s16(line.add(2 * SIDE * side));
                for row in 0..R {
                    let [low, high] = &mut pairs[row][side];
                    *low = vmlal_s16(*low, vget_low_s16(w), vget_low_s16(x[row]));
                    *high = vmlal_high_s16(*high, w, x[row]);
                }
            }
        }
        for side in 0..S {
            let exponents = w.exponents.as_ptr().add(block * ROWS + column + SIDE * side);
            let exponents = vreinterpret_u8_u32(vdup_n_u32(exponents.cast::<u32>().read_unaligned()));
            let exponents = vmovl_u16(vget_low_u16(vmovl_u8(exponents)));
            let scale = vreinterpretq_f32_u32(vshlq_n_u32::<23>(exponents));
            for row in 0..R {
                let [low, high] = pairs[row][side];
                let dots = vcvtq_f32_s32(vpaddq_s32(low, high));
                acc[row][side] = vfmaq_f32(acc[row][side], dots, vmulq_n_f32(scale, (*x[row]).scale));
            }
        }
    }
}
