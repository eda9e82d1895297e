//! Exact dot products of weight codes in NEON registers with activation blocks.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::super::activation::ActivationBlock;
use super::super::format::{GROUPS, QuantFormat};

/// Returns the largest magnitude of a code as the kernels multiply it: without its zero point if `signed`.
const fn largest<F: QuantFormat>(signed: bool) -> usize {
    let Some(book) = F::BOOK else {
        let largest = (1 << (F::LOW + F::HIGH)) - 1;
        return match signed {
            true if F::ZERO as usize > largest / 2 => F::ZERO as usize,
            true => largest - F::ZERO as usize,
            false => largest,
        };
    };
    let (mut largest, mut at) = (0, 0);
    while at < book.len() {
        let magnitude = (book[at] as i32 - F::ZERO).unsigned_abs() as usize;
        if magnitude > largest {
            largest = magnitude;
        }
        at += 1;
    }
    largest
}

/// Returns the number of groups whose products fit into 16 bits: one product each, of a code and at most 127.
const fn fits<F: QuantFormat>(signed: bool) -> usize {
    let groups = i16::MAX as usize / (127 * largest::<F>(signed));
    if groups < GROUPS { groups } else { GROUPS }
}

/// Adds to the sums of four rows the products of 16 weight codes with the four activation codes of a lane.
///
/// # Safety
/// The processor has dotprod, for which the caller is compiled.
#[inline(always)]
unsafe fn sdot<const LANE: i32>(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: reads and writes registers only; the feature by this function's contract.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            w = in(vreg) w,
            x = in(vreg) x,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Dot products of `R` activation rows with `4 * S` weight rows.
pub type LaneDots<const S: usize, const R: usize> = [[int32x4_t; S]; R];

/// Computes exact dot products with a block, or the `PART`-th half of it if the format has a scale for each half;
/// `codes(group, side)` returns the codes, without a zero point if `signed`.
///
/// # Safety
/// The features of [`Neon`]; the blocks can be read.
#[inline(always)]
pub unsafe fn dots<F: QuantFormat, const DOT: bool, const S: usize, const R: usize>(
    codes: impl Fn(usize, usize) -> int8x16_t,
    signed: bool,
    x: [*const ActivationBlock; R],
    part: usize,
) -> LaneDots<S, R> {
    let groups = GROUPS / F::SCALES.per_tile();
    let groups = part * groups..(part + 1) * groups;
    // SAFETY: the features and the blocks by this function's contract.
    unsafe {
        let zero = x.map(|x| match signed {
            true => 0,
            false => F::ZERO * minus_sum::<F>(&*x, part),
        });
        match DOT {
            true => dots_by_lanes(codes, zero, x, groups),
            false if signed => dots_by_pairs::<S, R>(codes, fits::<F>(true), zero, x, groups),
            false => dots_by_pairs::<S, R>(codes, fits::<F>(false), zero, x, groups),
        }
    }
}

/// Computes [`dots`] with `sdot`.
///
/// # Safety
/// As [`dots`], with dotprod; `groups` starts and ends at a multiple of 4.
#[inline(always)]
unsafe fn dots_by_lanes<const S: usize, const R: usize>(
    codes: impl Fn(usize, usize) -> int8x16_t,
    zero: [i32; R],
    x: [*const ActivationBlock; R],
    groups: Range<usize>,
) -> LaneDots<S, R> {
    // SAFETY: by this function's contract; a block holds 32 codes.
    unsafe {
        let mut dots = zero.map(|zero| [vdupq_n_s32(zero); S]);
        let mut group = groups.start;
        while group < groups.end {
            let x = x.map(|x| vld1q_s8((*x).codes.as_ptr().add(4 * group)));
            add_group::<0, S, R>(&codes, group, x, &mut dots);
            add_group::<1, S, R>(&codes, group + 1, x, &mut dots);
            add_group::<2, S, R>(&codes, group + 2, x, &mut dots);
            add_group::<3, S, R>(&codes, group + 3, x, &mut dots);
            group += 4;
        }
        dots
    }
}

/// Adds the products of group `group`, whose activation codes are in lane `LANE`.
///
/// # Safety
/// As [`sdot`].
#[inline(always)]
unsafe fn add_group<const LANE: i32, const S: usize, const R: usize>(
    codes: &impl Fn(usize, usize) -> int8x16_t,
    group: usize,
    x: [int8x16_t; R],
    dots: &mut LaneDots<S, R>,
) {
    for side in 0..S {
        let codes = codes(group, side);
        for row in 0..R {
            // SAFETY: by this function's contract.
            dots[row][side] = unsafe { sdot::<LANE>(dots[row][side], codes, x[row]) };
        }
    }
}

/// Computes [`dots`] with multiplications of bytes; the products of `fits` groups are added in 16 bits.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn dots_by_pairs<const S: usize, const R: usize>(
    codes: impl Fn(usize, usize) -> int8x16_t,
    fits: usize,
    zero: [i32; R],
    x: [*const ActivationBlock; R],
    groups: Range<usize>,
) -> LaneDots<S, R> {
    // SAFETY: by this function's contract; a block holds 32 codes.
    unsafe {
        // Sums of two rows each, of two lanes each.
        let mut sums = [[[vdupq_n_s32(0); 2]; S]; R];
        let mut start = groups.start;
        while start < groups.end {
            let end = groups.end.min(start + fits);
            let mut pairs = [[[vdupq_n_s16(0); 2]; S]; R];
            for group in start..end {
                let x = x.map(|x| {
                    let four = (*x).codes.as_ptr().add(4 * group).cast::<i32>().read_unaligned();
                    vreinterpretq_s8_s32(vdupq_n_s32(four))
                });
                for side in 0..S {
                    let w = codes(group, side);
                    for row in 0..R {
                        let [low, high] = &mut pairs[row][side];
                        *low = vmlal_s8(*low, vget_low_s8(w), vget_low_s8(x[row]));
                        *high = vmlal_high_s8(*high, w, x[row]);
                    }
                }
            }
            for (sums, pairs) in sums.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
                *sums = [vpadalq_s16(sums[0], pairs[0]), vpadalq_s16(sums[1], pairs[1])];
            }
            start = end;
        }
        std::array::from_fn(|row| {
            sums[row].map(|[low, high]| vaddq_s32(vpaddq_s32(low, high), vdupq_n_s32(zero[row])))
        })
    }
}

#[inline(always)]
fn minus_sum<F: QuantFormat>(block: &ActivationBlock, part: usize) -> i32 {
    match F::SCALES.per_tile() {
        1 => block.minus_sum,
        _ => block.half_minus_sums[part],
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::format::with_format;
    use super::super::units::is_signed;
    use super::*;
    use crate::Dtype;

    #[test]
    fn sums_of_products_fit_sixteen_bits() {
        let groups = |dtype, signed| with_format!(dtype, F => fits::<F>(signed), unreachable!());
        for (dtype, direct, panel) in [
            (Dtype::Q4_0, 8, 8),
            (Dtype::Q5K, 8, 8),
            (Dtype::Q6K, 4, 8),
            (Dtype::Iq4Xs, 2, 2),
            (Dtype::Iq3Xxs, 4, 4),
        ] {
            assert_eq!(
                (groups(dtype, is_signed_of(dtype)), groups(dtype, true)),
                (direct, panel),
                "{dtype:?}"
            );
        }
        assert_eq!(groups(Dtype::Q8_0, true), 2);
    }

    fn is_signed_of(dtype: Dtype) -> bool {
        with_format!(dtype, F => is_signed::<F>(), unreachable!())
    }
}
