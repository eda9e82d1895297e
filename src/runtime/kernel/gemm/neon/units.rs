//! Loads of packed units into NEON registers: codes of four rows and a group, scales of 16 rows.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::format::{QuantFormat, Scales};
use super::SIDES;

/// Returns whether the direct path's codes have no zero point: those of tables, and 8-bit ones, whose sign bit is
/// [`INVERTED`](QuantFormat::INVERTED) in memory.
pub const fn is_signed<F: QuantFormat>() -> bool {
    F::BOOK.is_some() || F::LOW == 8
}

/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn load(from: *const u8) -> uint8x16_t {
    // SAFETY: by this function's contract.
    unsafe { vld1q_u8(from) }
}

/// Converts four halves, the lower ones of a register.
#[inline]
#[target_feature(enable = "neon")]
fn widen_low(halves: uint16x8_t) -> float32x4_t {
    let wide;
    // SAFETY: reads and writes registers only.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Converts four halves, the upper ones of a register.
#[inline]
#[target_feature(enable = "neon")]
fn widen_high(halves: uint16x8_t) -> float32x4_t {
    let wide;
    // SAFETY: reads and writes registers only.
    unsafe {
        asm!("fcvtl2 {0:v}.4s, {1:v}.8h", out(vreg) wide, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Loads 16 halves.
///
/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_f16(from: *const u8) -> [float32x4_t; SIDES] {
    // SAFETY: by this function's contract.
    let [a, b] = unsafe { [vreinterpretq_u16_u8(load(from)), vreinterpretq_u16_u8(load(from.add(16)))] };
    [widen_low(a), widen_high(a), widen_low(b), widen_high(b)]
}

/// Loads 16 numbers.
///
/// # Safety
/// 64 bytes can be read.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn load_wide(from: *const u8) -> [float32x4_t; SIDES] {
    // SAFETY: by this function's contract.
    [0, 1, 2, 3].map(|side| unsafe { vld1q_f32(from.add(16 * side).cast()) })
}

/// Converts 16 unsigned bytes.
#[inline]
#[target_feature(enable = "neon")]
fn floats(bytes: uint8x16_t) -> [float32x4_t; SIDES] {
    let [low, high] = [vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)];
    [
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
        vcvtq_f32_u32(vmovl_high_u16(low)),
        vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
        vcvtq_f32_u32(vmovl_high_u16(high)),
    ]
}

/// Converts 16 signed bytes.
#[inline]
#[target_feature(enable = "neon")]
fn signed_floats(bytes: uint8x16_t) -> [float32x4_t; SIDES] {
    let bytes = vreinterpretq_s8_u8(bytes);
    let [low, high] = [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)];
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_high_s16(low)),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_high_s16(high)),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
fn times(a: [float32x4_t; SIDES], b: [float32x4_t; SIDES]) -> [float32x4_t; SIDES] {
    std::array::from_fn(|side| vmulq_f32(a[side], b[side]))
}

/// Scales and minima of a tile's rows, or of half a tile.
type TileScales = [[float32x4_t; SIDES]; 2];

/// Loads scales and minima of a tile's rows, with the values of [`scale_and_min`](super::pack::scale_and_min).
///
/// # Safety
/// `unit` points at a unit of `F`, `tile` is below `F::TILES`, `part` below its scales per tile.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn scales<F: QuantFormat>(unit: *const u8, tile: usize, part: usize) -> TileScales {
    let zero = [vdupq_n_f32(0.0); SIDES];
    let sub = 64 + 16 * (2 * tile + part);
    // SAFETY: all within the unit's scales.
    unsafe {
        match F::SCALES {
            Scales::Block => [load_f16(unit.add(32 * tile)), zero],
            Scales::BlockMin => [load_f16(unit.add(32 * tile)), load_f16(unit.add(64 + 32 * tile))],
            Scales::Super32 => {
                let [scale, min] = [load(unit.add(64 + 16 * tile)), load(unit.add(192 + 16 * tile))];
                [times(load_f16(unit), floats(scale)), times(load_f16(unit.add(32)), floats(min))]
            }
            Scales::Super16Min => {
                let both = load(unit.add(sub));
                let [scale, min] = [vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)];
                [times(load_f16(unit), floats(scale)), times(load_f16(unit.add(32)), floats(min))]
            }
            Scales::Shared => [load_wide(unit), zero],
            Scales::Signed32 | Scales::Signed16 => {
                let at = if F::SCALES.per_tile() == 1 { 64 + 16 * tile } else { sub };
                [times(load_wide(unit), signed_floats(load(unit.add(at)))), zero]
            }
            Scales::Float16 => {
                let bytes = load(unit.add(sub));
                let [low, high] = [vshll_n_u8::<7>(vget_low_u8(bytes)), vshll_high_n_u8::<7>(bytes)];
                let scale = [widen_low(low), widen_high(low), widen_low(high), widen_high(high)];
                [times(load_wide(unit), scale), zero]
            }
        }
    }
}

/// Shifts every byte right by `by`, or left if it is negative.
#[inline]
#[target_feature(enable = "neon")]
fn shift(v: uint8x16_t, by: isize) -> uint8x16_t {
    match by {
        -4 => vshlq_n_u8::<4>(v),
        -3 => vshlq_n_u8::<3>(v),
        -2 => vshlq_n_u8::<2>(v),
        -1 => vshlq_n_u8::<1>(v),
        1 => vshrq_n_u8::<1>(v),
        2 => vshrq_n_u8::<2>(v),
        3 => vshrq_n_u8::<3>(v),
        4 => vshrq_n_u8::<4>(v),
        5 => vshrq_n_u8::<5>(v),
        6 => vshrq_n_u8::<6>(v),
        7 => vshrq_n_u8::<7>(v),
        _ => v,
    }
}

/// Loads the codes of group `group` of rows `4 * side..` of a tile; signed ones if [`is_signed`].
///
/// # Safety
/// `unit` points at a unit of `F`; `tile`, `group` and `side` exist.
#[inline]
#[target_feature(enable = "neon")]
pub unsafe fn codes<F: QuantFormat>(unit: *const u8, tile: usize, group: usize, side: usize) -> int8x16_t {
    let per_byte = 8 / F::LOW;
    // SAFETY: within the unit's low part.
    let bytes = unsafe { load(unit.add(F::low_at(tile) + 64 * (group / per_byte) + 16 * side)) };
    let mut codes = shift(bytes, (F::LOW * (group % per_byte)) as isize);
    if group % per_byte + 1 < per_byte {
        codes = vandq_u8(codes, vdupq_n_u8((0xff >> (8 - F::LOW)) as u8));
    }
    if let Some(per_byte) = 8usize.checked_div(F::HIGH) {
        // SAFETY: within the unit's high part.
        let bytes = unsafe { load(unit.add(F::high_at(tile) + 64 * (group / per_byte) + 16 * side)) };
        let moved = shift(bytes, (F::HIGH * (group % per_byte)) as isize - F::LOW as isize);
        codes = vorrq_u8(codes, vandq_u8(moved, vdupq_n_u8((((1 << F::HIGH) - 1) << F::LOW) as u8)));
    }
    if let Some(book) = F::BOOK {
        let book = book.map(|code| code.wrapping_sub(F::ZERO as u8));
        // SAFETY: 16 bytes.
        codes = vqtbl1q_u8(unsafe { load(book.as_ptr()) }, codes);
    }
    vreinterpretq_s8_u8(codes)
}
