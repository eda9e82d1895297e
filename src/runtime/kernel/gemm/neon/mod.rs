//! NEON, with and without dot products (`sdot`).
//!
//! `sdot` multiplies 16 signed codes of four weight rows with four activation codes, which it takes from a
//! lane. Without it, `smlal` multiplies bytes and adds products in 16 bits, of as many groups as fit (see
//! `dots.rs`); the lanes of a row are added in pairs at the end. The integers are exact in every case, and
//! the f32 part follows [`gemm`](super)'s order.
//!
//! Codes are signed wherever it costs nothing: tables hold values without their zero point, panels of the
//! panel path are unpacked without it. Elsewhere it is subtracted as a multiple of the activations' sum.

mod dots;
pub mod i8mm;
mod units;

use std::arch::aarch64::*;
use std::ops::Range;

use super::activation::{ActivationBlock, Activations};
use super::format::{GROUPS, QuantFormat, ROWS};
use super::{GemmInput, Kernels, Panels, SumsPtr, WeightPanel};
use dots::dots;
use units::{codes, is_signed, scales};

/// Rows of one register of i32 or f32.
pub const SIDE: usize = 4;

/// Registers for the rows of a panel.
pub const SIDES: usize = ROWS / SIDE;

/// Registers of weight rows that the panel path multiplies together.
const PANEL_SIDES: usize = 2;

/// Number of activation rows up to which the direct path takes fewer instructions, by its inner loop.
pub const MAX_DIRECT: usize = 8;

/// Requires NEON, which every aarch64 target has; with `DOT` also dotprod.
pub struct Neon<const DOT: bool>;

impl<const DOT: bool> Kernels for Neon<DOT> {
    const WIDTH: usize = 1;
    const DIRECT_ROWS: usize = if DOT { 4 } else { 2 };
    const PANEL_ROWS: usize = if DOT { 6 } else { 4 };

    fn max_direct() -> usize {
        MAX_DIRECT
    }

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        assert!(panel.len() / F::UNIT_BYTES * F::TILES <= x.blocks_per_row(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion and `Activations::row`.
        unsafe {
            match (DOT, out.len()) {
                (true, 1) => direct_dot::<F, 1>(panel, x, first, out),
                (true, 2) => direct_dot::<F, 2>(panel, x, first, out),
                (true, 3) => direct_dot::<F, 3>(panel, x, first, out),
                (true, _) => direct_dot::<F, 4>(panel, x, first, out),
                (false, 1) => direct_plain::<F, 1>(panel, x, first, out),
                (false, _) => direct_plain::<F, 2>(panel, x, first, out),
            }
        }
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
        let x = x.rows;
        assert!(start + panel.blocks <= x.blocks_per_row(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion.
        unsafe {
            match (DOT, sums.rows) {
                (true, ..=2) => multiply_dot::<F, 2>(panel, x, [first, start], sums),
                (true, 3..=4) => multiply_dot::<F, 4>(panel, x, [first, start], sums),
                (true, 5) => multiply_dot::<F, 5>(panel, x, [first, start], sums),
                (true, _) => multiply_dot::<F, 6>(panel, x, [first, start], sums),
                (false, ..=2) => multiply_plain::<F, 2>(panel, x, [first, start], sums),
                (false, _) => multiply_plain::<F, 4>(panel, x, [first, start], sums),
            }
        }
    }
}

/// Computes the f32 part of [`gemm`](super)'s definition, for one scale of a tile.
#[inline]
#[target_feature(enable = "neon")]
fn add<F: QuantFormat>(
    sums: float32x4_t,
    dots: int32x4_t,
    block: &ActivationBlock,
    part: usize,
    [scale, min]: [float32x4_t; 2],
) -> float32x4_t {
    let sums = vfmaq_f32(sums, vcvtq_f32_s32(dots), vmulq_n_f32(scale, block.scale));
    if !F::SCALES.has_min() {
        return sums;
    }
    let scaled_sum = match F::SCALES.per_tile() {
        1 => block.scaled_sum,
        _ => block.half_scaled_sums[part],
    };
    vfmaq_n_f32(sums, min, scaled_sum)
}

/// Declares two functions that run `$body::<F, R, DOT>`, compiled without and with dot products.
macro_rules! compiled_twice {
    ($plain:ident, $dot:ident, $body:ident($($arg:ident: $ty:ty),*)) => {
        /// # Safety
        /// That of the body.
        #[target_feature(enable = "neon")]
        unsafe fn $plain<F: QuantFormat, const R: usize>($($arg: $ty),*) {
            // SAFETY: by this function's contract.
            unsafe { $body::<F, R, false>($($arg),*) }
        }

        /// # Safety
        /// That of the body, and dotprod.
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $dot<F: QuantFormat, const R: usize>($($arg: $ty),*) {
            // SAFETY: by this function's contract.
            unsafe { $body::<F, R, true>($($arg),*) }
        }
    };
}

compiled_twice!(direct_plain, direct_dot, direct_body(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]));
compiled_twice!(multiply_plain, multiply_dot, multiply_body(panel: &WeightPanel, x: &Activations, first: [usize; 2], sums: SumsPtr));

/// # Safety
/// The features of [`Neon`]; `out` has `R` rows and `x` as many from `first` on, each with the panel's blocks.
#[inline(always)]
unsafe fn direct_body<F: QuantFormat, const R: usize, const DOT: bool>(
    panel: &[u8],
    x: &Activations,
    first: usize,
    out: &mut [[f32; ROWS]],
) {
    let rows: [*const ActivationBlock; R] = std::array::from_fn(|row| x.row(first + row).as_ptr());
    // SAFETY: the features by this function's contract; tiles of units of the panel, and as many blocks of each row.
    unsafe {
        let mut sums = [[vdupq_n_f32(0.0); SIDES]; R];
        for index in 0..panel.len() / F::UNIT_BYTES {
            let unit = panel.as_ptr().add(index * F::UNIT_BYTES);
            for tile in 0..F::TILES {
                let blocks = rows.map(|row| row.add(index * F::TILES + tile));
                add_tile::<F, R, DOT>(unit, tile, 0, blocks, &mut sums);
                if F::SCALES.per_tile() == 2 {
                    add_tile::<F, R, DOT>(unit, tile, 1, blocks, &mut sums);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (side, sums) in sums.into_iter().enumerate() {
                vst1q_f32(out[SIDE * side..][..SIDE].as_mut_ptr(), sums);
            }
        }
    }
}

/// Adds the products for one scale of a tile.
///
/// # Safety
/// As [`scales`], and the features of [`Neon`]; the blocks can be read.
#[inline(always)]
unsafe fn add_tile<F: QuantFormat, const R: usize, const DOT: bool>(
    unit: *const u8,
    tile: usize,
    part: usize,
    blocks: [*const ActivationBlock; R],
    sums: &mut [[float32x4_t; SIDES]; R],
) {
    // SAFETY: by this function's contract.
    unsafe {
        let codes = |group: usize, side: usize| codes::<F>(unit, tile, group, side);
        let dots = dots::<F, DOT, SIDES, R>(codes, is_signed::<F>(), blocks, part);
        let [scale, min] = scales::<F>(unit, tile, part);
        for row in 0..R {
            for side in 0..SIDES {
                let factors = [scale[side], min[side]];
                sums[row][side] = add::<F>(sums[row][side], dots[row][side], &*blocks[row], part, factors);
            }
        }
    }
}

/// Codes `[block][group]` without their zero point, scales and minima `[block][part][16]`.
///
/// # Safety
/// None beyond the feature.
#[target_feature(enable = "neon")]
unsafe fn unpack<F: QuantFormat>(panel: &[u8], blocks: Range<usize>, out: &mut WeightPanel) {
    let zero = vdupq_n_s8(if is_signed::<F>() { 0 } else { F::ZERO as i8 });
    for (at, block) in blocks.enumerate() {
        let (index, tile) = (block / F::TILES, block % F::TILES);
        let unit = panel[index * F::UNIT_BYTES..][..F::UNIT_BYTES].as_ptr();
        let lines = &mut out.codes[at * GROUPS..(at + 1) * GROUPS];
        for (group, line) in lines.iter_mut().enumerate() {
            for side in 0..SIDES {
                // SAFETY: a tile of a unit of the panel; a line is 64 bytes.
                unsafe {
                    let codes = vsubq_s8(codes::<F>(unit, tile, group, side), zero);
                    vst1q_s8(line.0.as_mut_ptr().add(16 * side).cast(), codes);
                }
            }
        }
        // SAFETY: as above.
        unsafe { unpack_scales::<F>(unit, tile, at, out) };
    }
}

/// Stores scales and minima of a tile as those of block `at`.
///
/// # Safety
/// As [`scales`].
#[inline]
#[target_feature(enable = "neon")]
unsafe fn unpack_scales<F: QuantFormat>(unit: *const u8, tile: usize, at: usize, out: &mut WeightPanel) {
    for part in 0..F::SCALES.per_tile() {
        // SAFETY: by this function's contract.
        let [scale, min] = unsafe { scales::<F>(unit, tile, part) };
        let place = (at * F::SCALES.per_tile() + part) * ROWS;
        for side in 0..SIDES {
            let range = place + SIDE * side..place + SIDE * (side + 1);
            // SAFETY: the slices are 4 numbers long.
            unsafe {
                vst1q_f32(out.scales[range.clone()].as_mut_ptr(), scale[side]);
                if F::SCALES.has_min() {
                    vst1q_f32(out.mins[range].as_mut_ptr(), min[side]);
                }
            }
        }
    }
}

/// Rows past the last of `sums` repeat the last one, and are not stored.
///
/// # Safety
/// The features of [`Neon`]; `x` has `sums.rows` rows, 1 to `R`, from `first` on, each with `panel.blocks` blocks from
/// `start` on; the sums are 16 wide.
#[inline(always)]
unsafe fn multiply_body<F: QuantFormat, const R: usize, const DOT: bool>(
    panel: &WeightPanel,
    x: &Activations,
    [first, start]: [usize; 2],
    sums: SumsPtr,
) {
    let last = sums.rows - 1;
    let rows: [*const ActivationBlock; R] =
        std::array::from_fn(|row| x.row(first + row.min(last))[start..].as_ptr());
    for column in (0..ROWS).step_by(PANEL_SIDES * SIDE) {
        // SAFETY: the features and the lengths by this function's contract.
        unsafe {
            let mut acc = [[vdupq_n_f32(0.0); PANEL_SIDES]; R];
            if start > 0 {
                for (row, acc) in acc.iter_mut().enumerate().take(sums.rows) {
                    *acc = [0, 1].map(|side| vld1q_f32(sums.row(row).add(column + SIDE * side)));
                }
            }
            for at in 0..panel.blocks {
                let blocks = rows.map(|row| row.add(at));
                add_part::<F, R, DOT>(panel, at, 0, column, blocks, &mut acc);
                if F::SCALES.per_tile() == 2 {
                    add_part::<F, R, DOT>(panel, at, 1, column, blocks, &mut acc);
                }
            }
            for (row, acc) in acc.into_iter().enumerate().take(sums.rows) {
                for (side, acc) in acc.into_iter().enumerate() {
                    vst1q_f32(sums.row(row).add(column + SIDE * side), acc);
                }
            }
        }
    }
}

/// Adds the products of eight weight rows from `column` on, for one scale of block `at`.
///
/// # Safety
/// The features of [`Neon`]; the panel has the block, and the activation blocks can be read.
#[inline(always)]
unsafe fn add_part<F: QuantFormat, const R: usize, const DOT: bool>(
    panel: &WeightPanel,
    at: usize,
    part: usize,
    column: usize,
    blocks: [*const ActivationBlock; R],
    acc: &mut [[float32x4_t; PANEL_SIDES]; R],
) {
    // SAFETY: by this function's contract; a panel has a line for every group, and 16 scales for every part.
    unsafe {
        let lines = panel.codes.as_ptr().add(at * GROUPS).cast::<i8>().add(SIDE * column);
        let codes = |group: usize, side: usize| vld1q_s8(lines.add(ROWS * SIDE * group + 16 * side));
        let dots = dots::<F, DOT, PANEL_SIDES, R>(codes, true, blocks, part);
        let place = (at * F::SCALES.per_tile() + part) * ROWS + column;
        for side in 0..PANEL_SIDES {
            let scale = vld1q_f32(panel.scales.as_ptr().add(place + SIDE * side));
            let min = match F::SCALES.has_min() {
                true => vld1q_f32(panel.mins.as_ptr().add(place + SIDE * side)),
                false => vdupq_n_f32(0.0),
            };
            for row in 0..R {
                acc[row][side] = add::<F>(acc[row][side], dots[row][side], &*blocks[row], part, [scale, min]);
            }
        }
    }
}
