//! I8MM: `smmla` multiplies two activation rows of eight codes with two weight rows and adds the four
//! products.
//!
//! Sums keep the instruction's order throughout a panel: a register holds
//! `[row t with w, t with w + 1, t + 1 with w, t + 1 with w + 1]`. Activations are in pairs of rows in the
//! same order ([`ActivationPair`]). Few rows use `sdot`.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::super::activation::Activations;
use super::super::format::{GROUPS, QuantFormat, ROWS};
use super::super::pairs::{ActivationPair, PAIR};
use super::super::{CodeLine, GemmInput, Kernels, Panels, SumsPtr, WeightPanel};
use super::units::{codes, is_signed};
use super::{Neon, unpack_scales};

/// Number of activation rows up to which the direct path takes fewer instructions, by its inner loop.
pub const MAX_DIRECT: usize = 4;

/// Pairs of weight rows that are multiplied together: half a panel.
const COLUMNS: usize = 4;

/// Most pairs of activation rows of one call.
const MAX_PAIRS: usize = 3;

/// Requires dotprod and i8mm.
pub struct I8mm;

impl Kernels for I8mm {
    const WIDTH: usize = 1;
    const DIRECT_ROWS: usize = Neon::<true>::DIRECT_ROWS;
    const PANEL_ROWS: usize = MAX_PAIRS * PAIR;

    fn max_direct() -> usize {
        MAX_DIRECT
    }

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        // SAFETY: by this function's contract.
        unsafe { Neon::<true>::direct::<F>(panel, x, first, out) }
    }

    unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
        // SAFETY: every aarch64 target has the feature.
        unsafe { unpack::<F>(panels[0], blocks, out) }
    }

    unsafe fn multiply<F: QuantFormat>(
        panel: &WeightPanel,
        x: GemmInput<'_>,
        [first, start]: [usize; 2],
        sums: SumsPtr,
    ) {
        let pairs = |at: usize| &x.tiles.rows(first + PAIR * at)[start..];
        assert!(panel.blocks <= pairs(0).len(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion and `Grouped::rows`.
        unsafe {
            match sums.rows.div_ceil(PAIR) {
                1 => multiply::<F, 1>(panel, [pairs(0).as_ptr()], start, sums),
                2 => multiply::<F, 2>(panel, [0, 1].map(|at| pairs(at).as_ptr()), start, sums),
                _ => multiply::<F, 3>(panel, [0, 1, 2].map(|at| pairs(at).as_ptr()), start, sums),
            }
        }
    }

    /// Whole pairs.
    fn rows_of_call(rows: usize, call: usize, calls: usize) -> (usize, usize) {
        let pairs = rows.div_ceil(PAIR);
        (PAIR * (call * pairs / calls), rows.min(PAIR * ((call + 1) * pairs / calls)))
    }
}

/// Codes `[block][half of the rows][two groups][pair of rows][2][8]` without their zero point; scales as
/// [`unpack_scales`].
///
/// # Safety
/// None beyond the feature.
#[target_feature(enable = "neon")]
unsafe fn unpack<F: QuantFormat>(panel: &[u8], blocks: Range<usize>, out: &mut WeightPanel) {
    let zero = vdupq_n_s8(if is_signed::<F>() { 0 } else { F::ZERO as i8 });
    for (at, block) in blocks.enumerate() {
        let (index, tile) = (block / F::TILES, block % F::TILES);
        let unit = panel[index * F::UNIT_BYTES..][..F::UNIT_BYTES].as_ptr();
        let lines: &mut [CodeLine] = &mut out.codes[at * GROUPS..(at + 1) * GROUPS];
        for step in 0..GROUPS / 2 {
            for side in 0..4 {
                let to = lines[side / 2 * (GROUPS / 2) + step].0[side % 2 * 32..][..32].as_mut_ptr().cast();
                // SAFETY: a tile of a unit of the panel; 32 bytes of a line.
                unsafe {
                    let [a, b] = [0, 1].map(|group| {
                        let codes = codes::<F>(unit, tile, 2 * step + group, side);
                        vreinterpretq_s32_s8(vsubq_s8(codes, zero))
                    });
                    vst1q_s32(to, vzip1q_s32(a, b));
                    vst1q_s32(to.add(4), vzip2q_s32(a, b));
                }
            }
        }
        // SAFETY: as above.
        unsafe { unpack_scales::<F>(unit, tile, at, out) };
    }
}

/// Adds the products of two rows of eight activation codes with two weight rows.
///
/// # Safety
/// The processor has i8mm, for which the caller is compiled.
#[inline(always)]
unsafe fn smmla(sums: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: reads and writes registers only; the feature by this function's contract.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {x:v}.16b, {w:v}.16b",
            sums = inout(vreg) sums,
            x = in(vreg) x,
            w = in(vreg) w,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Sums of `P` pairs of activation rows with half a panel.
type PairSums<const P: usize> = [[float32x4_t; COLUMNS]; P];

/// # Safety
/// The features; `x` are `sums.rows` rows, rounded up to `P` pairs, of `panel.blocks` blocks; the sums are 16 wide.
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn multiply<F: QuantFormat, const P: usize>(
    panel: &WeightPanel,
    x: [*const ActivationPair; P],
    start: usize,
    sums: SumsPtr,
) {
    for half in 0..2 {
        let mut acc = [[vdupq_n_f32(0.0); COLUMNS]; P];
        // SAFETY: the features and the lengths by this function's contract.
        unsafe {
            if start > 0 {
                load(sums, half, &mut acc);
            }
            for at in 0..panel.blocks {
                let x = x.map(|x| x.add(at));
                add_part::<F, P>(panel, at, 0, half, x, &mut acc);
                if F::SCALES.per_tile() == 2 {
                    add_part::<F, P>(panel, at, 1, half, x, &mut acc);
                }
            }
            store(sums, half, &acc);
        }
    }
}

/// Loads sums into the order of the registers; those of a missing last row are zero.
///
/// # Safety
/// The sums are 16 wide.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const P: usize>(sums: SumsPtr, half: usize, acc: &mut PairSums<P>) {
    for (pair, acc) in acc.iter_mut().enumerate() {
        for (column, acc) in acc.iter_mut().enumerate() {
            // SAFETY: by this function's contract.
            let two = |row: usize| unsafe {
                match row < sums.rows {
                    true => vld1_f32(sums.row(row).add(8 * half + 2 * column)),
                    false => vdup_n_f32(0.0),
                }
            };
            *acc = vcombine_f32(two(PAIR * pair), two(PAIR * pair + 1));
        }
    }
}

/// Stores what [`load`] loads.
///
/// # Safety
/// The sums are 16 wide.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store<const P: usize>(sums: SumsPtr, half: usize, acc: &PairSums<P>) {
    for (pair, acc) in acc.iter().enumerate() {
        for (column, acc) in acc.iter().enumerate() {
            for (row, two) in [vget_low_f32(*acc), vget_high_f32(*acc)].into_iter().enumerate() {
                if PAIR * pair + row < sums.rows {
                    // SAFETY: by this function's contract.
                    unsafe { vst1_f32(sums.row(PAIR * pair + row).add(8 * half + 2 * column), two) };
                }
            }
        }
    }
}

/// Adds the products of half the panel's rows, for one scale of block `at`.
///
/// # Safety
/// The features of [`I8mm`]; the panel has the block, and the activation blocks can be read.
#[inline(always)]
unsafe fn add_part<F: QuantFormat, const P: usize>(
    panel: &WeightPanel,
    at: usize,
    part: usize,
    half: usize,
    x: [*const ActivationPair; P],
    acc: &mut PairSums<P>,
) {
    let per_tile = F::SCALES.per_tile();
    // SAFETY: by this function's contract; a panel has a line for every group, and 16 scales for every part.
    unsafe {
        let lines = panel.codes.as_ptr().add(at * GROUPS + half * GROUPS / 2);
        let mut dots = [[vdupq_n_s32(0); COLUMNS]; P];
        for step in part * GROUPS / 2 / per_tile..(part + 1) * GROUPS / 2 / per_tile {
            let codes = x.map(|x| vld1q_s8((*x).codes[step].as_ptr()));
            for column in 0..COLUMNS {
                let w = vld1q_s8(lines.add(step).cast::<i8>().add(16 * column));
                for pair in 0..P {
                    dots[pair][column] = smmla(dots[pair][column], codes[pair], w);
                }
            }
        }
        let place = (at * per_tile + part) * ROWS + half * ROWS / 2;
        let scales = twice(panel.scales.as_ptr().add(place));
        for pair in 0..P {
            let x_scale = vld1q_f32((*x[pair]).scales.as_ptr());
            for column in 0..COLUMNS {
                let dots = vcvtq_f32_s32(dots[pair][column]);
                acc[pair][column] = vfmaq_f32(acc[pair][column], dots, vmulq_f32(scales[column], x_scale));
            }
        }
        if F::SCALES.has_min() {
            let mins = twice(panel.mins.as_ptr().add(place));
            for pair in 0..P {
                let sum = match per_tile {
                    1 => vld1q_f32((*x[pair]).scaled_sums.as_ptr()),
                    _ => vld1q_f32((*x[pair]).half_scaled_sums[part].as_ptr()),
                };
                for column in 0..COLUMNS {
                    acc[pair][column] = vfmaq_f32(acc[pair][column], mins[column], sum);
                }
            }
        }
    }
}

/// Loads eight numbers, and repeats each two of them.
///
/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn twice(from: *const f32) -> [float32x4_t; COLUMNS] {
    // SAFETY: by this function's contract.
    let [a, b] = unsafe { [vld1q_f32(from), vld1q_f32(from.add(4))] };
    [
        vcombine_f32(vget_low_f32(a), vget_low_f32(a)),
        vcombine_f32(vget_high_f32(a), vget_high_f32(a)),
        vcombine_f32(vget_low_f32(b), vget_low_f32(b)),
        vcombine_f32(vget_high_f32(b), vget_high_f32(b)),
    ]
}
