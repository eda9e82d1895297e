//! AVX2, with and without VNNI instructions for 256-bit registers.
//!
//! Without VNNI, `vpmaddubsw` multiplies unsigned codes with signed ones and adds pairs in 16 bits. That
//! saturates, so only as many products are summed as fit: all eight groups of 4-bit codes, one of codes
//! near 256. Few rows convert those to magnitudes (see [`fits`]), many rows multiply their nibbles separately
//! (see [`bias`]). The integers are exact in every case, and the f32 part follows [`gemm`](super)'s order.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activation::{ActivationBlock, Activations};
use super::format::{GROUPS, QuantFormat, ROWS, Scales};
use super::strips::{StripBlock, TOKENS};
use super::{FetchAhead, GemmInput, Kernels, Panels, SumsPtr, WeightPanel};

/// Rows of one register of i32 or f32.
const SIDE: usize = 8;

/// Requires avx2, fma, f16c; with `VNNI` also avxvnni.
pub struct Avx2<const VNNI: bool>;

impl<const VNNI: bool> Kernels for Avx2<VNNI> {
    const WIDTH: usize = 1;
    const DIRECT_ROWS: usize = 4;
    const PANEL_ROWS: usize = TOKENS;

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        assert!(panel.len() / F::UNIT_BYTES * F::TILES <= x.blocks_per_row(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion and `Activations::row`.
        unsafe {
            match (VNNI, out.len()) {
                (true, 1) => direct_vnni::<F, 1>(panel, x, first, out),
                (true, 2) => direct_vnni::<F, 2>(panel, x, first, out),
                (true, 3) => direct_vnni::<F, 3>(panel, x, first, out),
                (true, _) => direct_vnni::<F, 4>(panel, x, first, out),
                (false, 1) => direct_plain::<F, 1>(panel, x, first, out),
                (false, 2) => direct_plain::<F, 2>(panel, x, first, out),
                (false, 3) => direct_plain::<F, 3>(panel, x, first, out),
                (false, _) => direct_plain::<F, 4>(panel, x, first, out),
            }
        }
    }

    unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
        // SAFETY: the features by this function's contract.
        unsafe { unpack::<F>(panels[0], blocks, out) }
    }

    unsafe fn multiply<F: QuantFormat>(
        panel: &WeightPanel,
        x: GemmInput<'_>,
        [first, start]: [usize; 2],
        sums: SumsPtr,
    ) {
        let x = &x.strips.rows(first)[start..];
        assert!(panel.blocks <= x.len(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion.
        unsafe {
            match (VNNI, sums.rows) {
                (true, ..=2) => multiply_vnni::<F, 2>(panel, x, start, sums),
                (true, 3..=4) => multiply_vnni::<F, 4>(panel, x, start, sums),
                (true, _) => multiply_vnni::<F, TOKENS>(panel, x, start, sums),
                (false, ..=2) => multiply_plain::<F, 2>(panel, x, start, sums),
                (false, 3..=4) => multiply_plain::<F, 4>(panel, x, start, sums),
                (false, _) => multiply_plain::<F, TOKENS>(panel, x, start, sums),
            }
        }
    }

    /// Calls take whole strips.
    fn rows_of_call(rows: usize, call: usize, _: usize) -> (usize, usize) {
        (call * TOKENS, rows.min((call + 1) * TOKENS))
    }
}

/// Returns the largest code.
const fn largest<F: QuantFormat>() -> usize {
    let Some(book) = F::BOOK else { return (1 << (F::LOW + F::HIGH)) - 1 };
    let (mut largest, mut at) = (0, 0);
    while at < book.len() {
        if book[at] as usize > largest {
            largest = book[at] as usize;
        }
        at += 1;
    }
    largest
}

/// Returns the number of groups whose products fit into the sum of one `vpmaddubsw` lane: two products each, of a
/// code and at most 127.
const fn fits<F: QuantFormat>() -> usize {
    let largest = if signed::<F, false>() { 128 } else { largest::<F>() };
    let groups = i16::MAX as usize / (2 * 127 * largest);
    if groups < GROUPS { groups } else { GROUPS }
}

/// Returns whether codes are kept as signed numbers without a zero point: those of which `vpmaddubsw` could not add even
/// two products.
const fn signed<F: QuantFormat, const VNNI: bool>() -> bool {
    2 * 127 * largest::<F>() > i16::MAX as usize && !VNNI
}

/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(from: *const u8) -> __m256i {
    // SAFETY: by this function's contract.
    unsafe { _mm256_loadu_si256(from.cast()) }
}

/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_f16(from: *const u8) -> __m256 {
    // SAFETY: by this function's contract.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
}

/// Loads the f32 scales of rows `8 * side..` at the start of a unit.
///
/// # Safety
/// `unit` points at a unit that begins with 16 numbers, `side` is below 2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_wide(unit: *const u8, side: usize) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe { _mm256_loadu_ps(unit.add(32 * side).cast()) }
}

/// # Safety
/// 8 bytes can be read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_8(from: *const u8) -> __m128i {
    // SAFETY: by this function's contract.
    unsafe { _mm_loadl_epi64(from.cast()) }
}

/// Loads four activation codes into every 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast_group(block: &ActivationBlock, group: usize) -> __m256i {
    let codes = &block.codes[4 * group..4 * group + 4];
    _mm256_set1_epi32(i32::from_le_bytes([codes[0] as u8, codes[1] as u8, codes[2] as u8, codes[3] as u8]))
}

/// Shifts the bits of every byte right (or left) by `by`; bits of the neighbouring byte come in and must be masked.
#[inline]
#[target_feature(enable = "avx2")]
fn shift(v: __m256i, by: isize) -> __m256i {
    let count = _mm_cvtsi32_si128(by.unsigned_abs() as i32);
    if by >= 0 { _mm256_srl_epi16(v, count) } else { _mm256_sll_epi16(v, count) }
}

/// Loads the codes of rows `8 * side..` of a tile.
///
/// # Safety
/// `unit` points at a unit of `F`, `tile` is below `F::TILES`, `side` below 2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn codes<F: QuantFormat, const VNNI: bool>(
    unit: *const u8,
    tile: usize,
    side: usize,
) -> [__m256i; GROUPS] {
    let (low_per_byte, low_mask) = (8 / F::LOW, _mm256_set1_epi8((0xff >> (8 - F::LOW)) as i8));
    let mut codes = [_mm256_setzero_si256(); GROUPS];
    for group in 0..GROUPS {
        // SAFETY: within the unit's low part.
        let bytes = unsafe { load(unit.add(F::low_at(tile) + 64 * (group / low_per_byte) + 32 * side)) };
        let moved = shift(bytes, (F::LOW * (group % low_per_byte)) as isize);
        codes[group] = if F::LOW == 8 { bytes } else { _mm256_and_si256(moved, low_mask) };
    }
    if let Some(per_byte) = 8usize.checked_div(F::HIGH) {
        let mask = _mm256_set1_epi8((((1 << F::HIGH) - 1) << F::LOW) as i8);
        for group in 0..GROUPS {
            // SAFETY: within the unit's high part.
            let bytes = unsafe { load(unit.add(F::high_at(tile) + 64 * (group / per_byte) + 32 * side)) };
            let moved = shift(bytes, (F::HIGH * (group % per_byte)) as isize - F::LOW as isize);
            codes[group] = _mm256_or_si256(codes[group], _mm256_and_si256(moved, mask));
        }
    }
    let sign = _mm256_set1_epi8(if signed::<F, VNNI>() { F::ZERO as u8 as i8 } else { 0 });
    match F::BOOK {
        Some(book) => {
            // SAFETY: 16 bytes.
            let book = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(book.as_ptr().cast()) });
            let book = _mm256_xor_si256(book, sign);
            codes.map(|codes| _mm256_shuffle_epi8(book, codes))
        }
        None if signed::<F, VNNI>() => codes.map(|codes| _mm256_xor_si256(codes, sign)),
        None => codes,
    }
}

/// Loads scales and minima of rows `8 * side..` of a tile.
///
/// # Safety
/// As [`codes`]; `part` is below the scales per tile.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn scales<F: QuantFormat>(unit: *const u8, tile: usize, part: usize, side: usize) -> [__m256; 2] {
    let (halves, bytes) = (16 * side, 8 * side);
    let sub = 64 + 16 * (2 * tile + part) + bytes;
    // SAFETY: all within the unit's scales.
    unsafe {
        match F::SCALES {
            Scales::Block => [load_f16(unit.add(32 * tile + halves)), _mm256_setzero_ps()],
            Scales::BlockMin => {
                [load_f16(unit.add(32 * tile + halves)), load_f16(unit.add(64 + 32 * tile + halves))]
            }
            Scales::Super32 => {
                let scale = _mm256_cvtepu8_epi32(load_8(unit.add(64 + 16 * tile + bytes)));
                let min = _mm256_cvtepu8_epi32(load_8(unit.add(192 + 16 * tile + bytes)));
                times_f16(unit.add(halves), scale, min)
            }
            Scales::Super16Min => {
                let both = _mm256_cvtepu8_epi32(load_8(unit.add(sub)));
                let scale = _mm256_and_si256(both, _mm256_set1_epi32(15));
                times_f16(unit.add(halves), scale, _mm256_srli_epi32::<4>(both))
            }
            Scales::Shared => [load_wide(unit, side), _mm256_setzero_ps()],
            Scales::Signed32 | Scales::Signed16 => {
                let at = if F::SCALES.per_tile() == 1 { 64 + 16 * tile + bytes } else { sub };
                let scale = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(unit.add(at))));
                [_mm256_mul_ps(load_wide(unit, side), scale), _mm256_setzero_ps()]
            }
            Scales::Float16 => {
                let scale = _mm_slli_epi16::<7>(_mm_cvtepu8_epi16(load_8(unit.add(sub))));
                [_mm256_mul_ps(load_wide(unit, side), _mm256_cvtph_ps(scale)), _mm256_setzero_ps()]
            }
        }
    }
}

/// Multiplies the f16 vectors at `d` and 32 bytes later with two vectors of integers.
///
/// # Safety
/// 48 bytes can be read from `d`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn times_f16(d: *const u8, scale: __m256i, min: __m256i) -> [__m256; 2] {
    // SAFETY: by this function's contract.
    let [d, dmin] = unsafe { [load_f16(d), load_f16(d.add(32))] };
    [_mm256_mul_ps(d, _mm256_cvtepi32_ps(scale)), _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(min))]
}

/// Computes exact dot products with a block, or the `PART`-th half of it if the format has a scale for each half;
/// `codes(group)` returns the codes. `PART` is a constant, because codes at variable indices would leave the
/// registers.
///
/// # Safety
/// The features of [`Avx2`].
#[inline(always)]
unsafe fn dot<F: QuantFormat, const VNNI: bool, const PART: usize>(
    codes: impl Fn(usize) -> __m256i,
    block: &ActivationBlock,
) -> __m256i {
    let groups = GROUPS / F::SCALES.per_tile();
    let groups = PART * groups..(PART + 1) * groups;
    // SAFETY: the features by this function's contract.
    unsafe {
        let zero = if signed::<F, VNNI>() { 0 } else { F::ZERO * minus_sum::<F>(block, PART) };
        let mut sum = _mm256_set1_epi32(zero);
        if VNNI {
            for group in groups {
                sum = _mm256_dpbusd_avx_epi32(sum, codes(group), broadcast_group(block, group));
            }
            return sum;
        }
        let mut start = groups.start;
        while start < groups.end {
            let end = groups.end.min(start + fits::<F>());
            let mut pairs = _mm256_setzero_si256();
            for group in start..end {
                let (w, x) = (codes(group), broadcast_group(block, group));
                let product = match signed::<F, VNNI>() {
                    true => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
                    false => _mm256_maddubs_epi16(w, x),
                };
                pairs = _mm256_add_epi16(pairs, product);
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            start = end;
        }
        sum
    }
}

/// Computes the f32 part of [`gemm`](super)'s definition, for one scale of a tile.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add<F: QuantFormat>(
    sums: __m256,
    dots: __m256i,
    block: &ActivationBlock,
    part: usize,
    [scale, min]: [__m256; 2],
) -> __m256 {
    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(block.scale));
    let sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sums);
    if !F::SCALES.has_min() {
        return sums;
    }
    let scaled_sum = match F::SCALES.per_tile() {
        1 => block.scaled_sum,
        _ => block.half_scaled_sums[part],
    };
    _mm256_fmadd_ps(min, _mm256_set1_ps(scaled_sum), sums)
}

#[inline(always)]
fn minus_sum<F: QuantFormat>(block: &ActivationBlock, part: usize) -> i32 {
    match F::SCALES.per_tile() {
        1 => block.minus_sum,
        _ => block.half_minus_sums[part],
    }
}

/// Declares two functions that run `$body::<F, R, VNNI>`, compiled with and without VNNI instructions.
macro_rules! compiled_twice {
    ($plain:ident, $vnni:ident, $body:ident($($arg:ident: $ty:ty),*)) => {
        /// # Safety
        /// That of the body, and avx2, fma, f16c.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $plain<F: QuantFormat, const R: usize>($($arg: $ty),*) {
            // SAFETY: by this function's contract.
            unsafe { $body::<F, R, false>($($arg),*) }
        }

        /// # Safety
        /// That of the body, and avx2, fma, f16c, avxvnni.
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        unsafe fn $vnni<F: QuantFormat, const R: usize>($($arg: $ty),*) {
            // SAFETY: by this function's contract.
            unsafe { $body::<F, R, true>($($arg),*) }
        }
    };
}

compiled_twice!(direct_plain, direct_vnni, direct_body(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]));
compiled_twice!(multiply_plain, multiply_vnni, multiply_body(panel: &WeightPanel, x: &[StripBlock], start: usize, sums: SumsPtr));

/// # Safety
/// The features of [`Avx2`]; `out` has `R` rows and `x` as many from `first` on, each with the panel's blocks.
#[inline(always)]
unsafe fn direct_body<F: QuantFormat, const R: usize, const VNNI: bool>(
    panel: &[u8],
    x: &Activations,
    first: usize,
    out: &mut [[f32; ROWS]],
) {
    let rows: [&[ActivationBlock]; R] = std::array::from_fn(|row| x.row(first + row));
    let ahead = FetchAhead::new::<F>(R, FetchAhead { distance: 2048, near: true });
    for side in 0..2 {
        // SAFETY: the features by this function's contract; tiles of units of the panel.
        unsafe {
            let mut sums = [_mm256_setzero_ps(); R];
            for (index, unit) in panel.chunks_exact(F::UNIT_BYTES).enumerate() {
                for tile in 0..F::TILES {
                    if side == 0 {
                        ahead.fetch::<F>(unit.as_ptr(), tile);
                    }
                    let codes = codes::<F, VNNI>(unit.as_ptr(), tile, side);
                    let first = scales::<F>(unit.as_ptr(), tile, 0, side);
                    let second = match F::SCALES.per_tile() {
                        1 => first,
                        _ => scales::<F>(unit.as_ptr(), tile, 1, side),
                    };
                    for row in 0..R {
                        let block = &rows[row][index * F::TILES + tile];
                        let dots = dot::<F, VNNI, 0>(|group| codes[group], block);
                        sums[row] = add::<F>(sums[row], dots, block, 0, first);
                        if F::SCALES.per_tile() == 2 {
                            let dots = dot::<F, VNNI, 1>(|group| codes[group], block);
                            sums[row] = add::<F>(sums[row], dots, block, 1, second);
                        }
                    }
                }
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                _mm256_storeu_ps(out[SIDE * side..].as_mut_ptr(), sums);
            }
        }
    }
}

/// # Safety
/// Only the features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<F: QuantFormat>(panel: &[u8], blocks: Range<usize>, out: &mut WeightPanel) {
    let per_tile = F::SCALES.per_tile();
    for (at, block) in blocks.enumerate() {
        let (index, tile) = (block / F::TILES, block % F::TILES);
        let unit = panel[index * F::UNIT_BYTES..][..F::UNIT_BYTES].as_ptr();
        for side in 0..2 {
            // SAFETY: a tile of a unit of the panel.
            let codes = unsafe { codes::<F, true>(unit, tile, side) };
            for (group, codes) in codes.into_iter().enumerate() {
                let half_line = &mut out.codes[at * GROUPS + group].0[32 * side..32 * side + 32];
                // SAFETY: 32 bytes.
                unsafe { _mm256_storeu_si256(half_line.as_mut_ptr().cast(), codes) };
            }
            for part in 0..per_tile {
                // SAFETY: as above.
                let [scale, min] = unsafe { scales::<F>(unit, tile, part, side) };
                let place = (at * per_tile + part) * ROWS + SIDE * side;
                // SAFETY: the slices are 8 numbers long.
                unsafe {
                    _mm256_storeu_ps(out.scales[place..][..SIDE].as_mut_ptr(), scale);
                    if F::SCALES.has_min() {
                        _mm256_storeu_ps(out.mins[place..][..SIDE].as_mut_ptr(), min);
                    }
                }
            }
        }
    }
}

/// Returns a number b for which the sums of a whole part fit 16 bits, `code - b` in place of codes: intermediate sums may
/// then wrap around. It is the zero point, or the middle of the codes of a format without one; `None` if neither fits.
const fn bias<F: QuantFormat>() -> Option<i32> {
    let (largest, pairs) = (largest::<F>(), GROUPS / F::SCALES.per_tile());
    let candidates = [F::ZERO as usize, largest.div_ceil(2)];
    let mut at = 0;
    while at < candidates.len() {
        let bias = candidates[at];
        let magnitude = if bias > largest - bias { bias } else { largest - bias };
        if pairs * 2 * 127 * magnitude <= i16::MAX as usize {
            return Some(bias as i32);
        }
        at += 1;
    }
    None
}

/// Returns whether codes take 8 bits, so that no pair of products fits 16: their nibbles are multiplied separately.
const fn by_nibbles<F: QuantFormat>() -> bool {
    signed::<F, false>()
}

/// Sums of some activation rows with 16 weight rows.
type SumTile<T, const R: usize> = [[T; 2]; R];

/// Loads four codes of one activation row, or two 16-bit sums, into every 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn broadcast<T: bytemuck::NoUninit>(value: &T) -> __m256i {
    _mm256_set1_epi32(bytemuck::cast(*value))
}

/// # Safety
/// 16 numbers can be read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_two(from: *const f32) -> [__m256; 2] {
    // SAFETY: by this function's contract.
    unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(SIDE))] }
}

/// Multiplies `R` rows of a strip, from `first` on, with a panel's block, or the `PART`-th half of it.
///
/// # Safety
/// The features of [`Avx2`]; `codes` points at a block of a panel for `F`.
#[inline(always)]
unsafe fn strip_dots<F: QuantFormat, const R: usize, const VNNI: bool, const PART: usize>(
    codes: *const u8,
    x: &StripBlock,
    first: usize,
) -> SumTile<__m256i, R> {
    let per_tile = F::SCALES.per_tile();
    let sums = &x.minus_pair_sums[if per_tile == 1 { 0 } else { 1 + PART }];
    let groups = PART * GROUPS / per_tile..(PART + 1) * GROUPS / per_tile;
    // SAFETY: by this function's contract.
    unsafe {
        let w = |group: usize| [load(codes.add(64 * group)), load(codes.add(64 * group + 32))];
        let mut dots = [[_mm256_setzero_si256(); 2]; R];
        if !VNNI && let Some(bias) = bias::<F>() {
            biased_dots::<F, R>(w, x, first, sums, groups, bias, &mut dots);
            return dots;
        }
        if !VNNI && by_nibbles::<F>() {
            for side in 0..2 {
                nibble_dots::<F, R>(|group| w(group)[side], x, first, sums, groups.clone(), side, &mut dots);
            }
            return dots;
        }
        if F::ZERO > 0 {
            for row in 0..R {
                let zero = _mm256_set1_epi16(F::ZERO as i16);
                dots[row] = [_mm256_madd_epi16(broadcast(&sums[first + row]), zero); 2];
            }
        }
        if VNNI {
            for group in groups {
                let w = w(group);
                for row in 0..R {
                    let x = broadcast(&x.codes[group][first + row]);
                    for side in 0..2 {
                        dots[row][side] = _mm256_dpbusd_avx_epi32(dots[row][side], w[side], x);
                    }
                }
            }
        } else {
            let mut start = groups.start;
            while start < groups.end {
                let end = groups.end.min(start + fits::<F>());
                let mut pairs = [[_mm256_setzero_si256(); 2]; R];
                add_pairs::<R>(w, x, first, start..end, &mut pairs);
                for row in 0..R {
                    for side in 0..2 {
                        let sums = _mm256_madd_epi16(pairs[row][side], _mm256_set1_epi16(1));
                        dots[row][side] = _mm256_add_epi32(dots[row][side], sums);
                    }
                }
                start = end;
            }
        }
        dots
    }
}

/// Computes the products of codes whose sums fit 16 bits around `bias` (see [`bias`]); `dots` are 0 before.
///
/// # Safety
/// The features of [`Avx2`].
#[inline(always)]
unsafe fn biased_dots<F: QuantFormat, const R: usize>(
    w: impl Fn(usize) -> [__m256i; 2],
    x: &StripBlock,
    first: usize,
    sums: &[[i16; 2]; TOKENS],
    groups: Range<usize>,
    bias: i32,
    dots: &mut SumTile<__m256i, R>,
) {
    // SAFETY: by this function's contract.
    unsafe {
        if bias > 0 {
            for row in 0..R {
                let bias = _mm256_set1_epi16(bias as i16);
                dots[row] = [_mm256_mullo_epi16(broadcast(&sums[first + row]), bias); 2];
            }
        }
        add_pairs::<R>(w, x, first, groups, dots);
        // Loops, not closures: those would not be compiled with the features.
        for pairs in dots.as_flattened_mut() {
            *pairs = _mm256_madd_epi16(*pairs, _mm256_set1_epi16(1));
        }
        if bias != F::ZERO {
            let excess = _mm256_set1_epi16((F::ZERO - bias) as i16);
            for row in 0..R {
                let excess = _mm256_madd_epi16(broadcast(&sums[first + row]), excess);
                for dots in &mut dots[row] {
                    *dots = _mm256_add_epi32(*dots, excess);
                }
            }
        }
    }
}

/// Adds products of unsigned codes in 16 bits.
///
/// # Safety
/// The features of [`Avx2`].
#[inline(always)]
unsafe fn add_pairs<const R: usize>(
    w: impl Fn(usize) -> [__m256i; 2],
    x: &StripBlock,
    first: usize,
    groups: Range<usize>,
    pairs: &mut SumTile<__m256i, R>,
) {
    for group in groups {
        let w = w(group);
        for row in 0..R {
            // SAFETY: by this function's contract.
            unsafe {
                let x = broadcast(&x.codes[group][first + row]);
                for side in 0..2 {
                    let products = _mm256_maddubs_epi16(w[side], x);
                    pairs[row][side] = _mm256_add_epi16(pairs[row][side], products);
                }
            }
        }
    }
}

/// Computes the products of 8-bit codes, whose nibbles are summed separately in 16 bits: `code - ZERO` is 16 times
/// `high - ZERO / 16`, and `low`.
///
/// # Safety
/// The features of [`Avx2`].
#[inline(always)]
unsafe fn nibble_dots<F: QuantFormat, const R: usize>(
    w: impl Fn(usize) -> __m256i,
    x: &StripBlock,
    first: usize,
    sums: &[[i16; 2]; TOKENS],
    groups: Range<usize>,
    side: usize,
    dots: &mut SumTile<__m256i, R>,
) {
    // SAFETY: by this function's contract.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let mut low = [_mm256_setzero_si256(); R];
        let mut high = [_mm256_setzero_si256(); R];
        for row in 0..R {
            let zero = _mm256_set1_epi16((F::ZERO / 16) as i16);
            high[row] = _mm256_mullo_epi16(broadcast(&sums[first + row]), zero);
        }
        for group in groups {
            let w = w(group);
            let nibbles = [_mm256_and_si256(w, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(w), mask)];
            for row in 0..R {
                let x = broadcast(&x.codes[group][first + row]);
                low[row] = _mm256_add_epi16(low[row], _mm256_maddubs_epi16(nibbles[0], x));
                high[row] = _mm256_add_epi16(high[row], _mm256_maddubs_epi16(nibbles[1], x));
            }
        }
        for row in 0..R {
            let low = _mm256_madd_epi16(low[row], _mm256_set1_epi16(1));
            dots[row][side] = _mm256_add_epi32(_mm256_madd_epi16(high[row], _mm256_set1_epi16(16)), low);
        }
    }
}

/// Adds the products of one part of a block to the sums of `R` rows from `first` on.
///
/// # Safety
/// The features of [`Avx2`]; the panel has block `at`.
#[inline(always)]
unsafe fn add_strip<F: QuantFormat, const R: usize, const VNNI: bool, const PART: usize>(
    panel: &WeightPanel,
    at: usize,
    x: &StripBlock,
    first: usize,
    acc: &mut [[__m256; 2]],
) {
    let per_tile = F::SCALES.per_tile();
    // SAFETY: by this function's contract: a panel has 8 lines of codes for each block, and 16 scales for each part.
    unsafe {
        let dots = strip_dots::<F, R, VNNI, PART>(panel.codes.as_ptr().add(at * GROUPS).cast(), x, first);
        let place = (at * per_tile + PART) * ROWS;
        let scales = load_two(panel.scales.as_ptr().add(place));
        for row in 0..R {
            let x_scale = _mm256_set1_ps(x.scales[first + row]);
            for side in 0..2 {
                let scale = _mm256_mul_ps(scales[side], x_scale);
                let dots = _mm256_cvtepi32_ps(dots[row][side]);
                acc[first + row][side] = _mm256_fmadd_ps(dots, scale, acc[first + row][side]);
            }
        }
        if F::SCALES.has_min() {
            let mins = load_two(panel.mins.as_ptr().add(place));
            let sums = &x.scaled_sums[if per_tile == 1 { 0 } else { 1 + PART }];
            for row in 0..R {
                let sum = _mm256_set1_ps(sums[first + row]);
                for side in 0..2 {
                    acc[first + row][side] = _mm256_fmadd_ps(mins[side], sum, acc[first + row][side]);
                }
            }
        }
    }
}

/// Adds the products of a panel with the first `R` rows of a strip; the rows of `sums` are among them, the others are
/// not stored.
///
/// # Safety
/// The features of [`Avx2`]; `sums.rows` is at most `R`; `x` has `panel.blocks` blocks; the sums are 16 wide.
#[inline(always)]
unsafe fn multiply_body<F: QuantFormat, const R: usize, const VNNI: bool>(
    panel: &WeightPanel,
    x: &[StripBlock],
    start: usize,
    sums: SumsPtr,
) {
    // SAFETY: the features by this function's contract; the slices are as long as what is read from them.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; R];
        if start > 0 {
            for (row, acc) in acc.iter_mut().enumerate().take(sums.rows) {
                *acc = load_two(sums.row(row));
            }
        }
        for (at, x) in x.iter().enumerate().take(panel.blocks) {
            add_block::<F, R, VNNI, 0>(panel, at, x, &mut acc);
            if F::SCALES.per_tile() == 2 {
                add_block::<F, R, VNNI, 1>(panel, at, x, &mut acc);
            }
        }
        for (row, acc) in acc.into_iter().enumerate().take(sums.rows) {
            _mm256_storeu_ps(sums.row(row), acc[0]);
            _mm256_storeu_ps(sums.row(row).add(SIDE), acc[1]);
        }
    }
}

/// Adds the products of one part of a block: of all rows together if their sums fit the registers, which sums of pairs
/// beside sums of fours do for three rows only.
///
/// # Safety
/// As [`add_strip`].
#[inline(always)]
unsafe fn add_block<F: QuantFormat, const R: usize, const VNNI: bool, const PART: usize>(
    panel: &WeightPanel,
    at: usize,
    x: &StripBlock,
    acc: &mut SumTile<__m256, R>,
) {
    // SAFETY: by this function's contract.
    unsafe {
        if VNNI || bias::<F>().is_some() || by_nibbles::<F>() || R < TOKENS {
            return add_strip::<F, R, VNNI, PART>(panel, at, x, 0, acc);
        }
        add_strip::<F, 3, VNNI, PART>(panel, at, x, 0, acc);
        add_strip::<F, 3, VNNI, PART>(panel, at, x, 3, acc);
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::with_format;
    use super::*;
    use crate::Dtype;

    #[test]
    fn sums_of_pairs_fit_sixteen_bits() {
        let groups = |dtype| with_format!(dtype, F => fits::<F>(), unreachable!());
        for (dtype, expected) in [
            (Dtype::Q4_0, 8),
            (Dtype::Q5_1, 4),
            (Dtype::Q6K, 2),
            (Dtype::Q8_0, 1),
            (Dtype::Iq4Xs, 1),
            (Dtype::Iq3Xxs, 1),
            (Dtype::Iq3S, 4),
            (Dtype::Iq1M, 5),
            (Dtype::Mxfp4, 4),
        ] {
            assert_eq!(groups(dtype), expected, "{dtype:?}");
            let signed = with_format!(dtype, F => signed::<F, false>(), unreachable!());
            assert_eq!(signed, matches!(dtype, Dtype::Q8_0 | Dtype::Iq4Xs), "{dtype:?}");
        }
    }

    #[test]
    fn sums_of_a_whole_block_fit_sixteen_bits_around_the_middle_of_the_codes() {
        let bias = |dtype| with_format!(dtype, F => bias::<F>(), unreachable!());
        for (dtype, expected) in [
            (Dtype::Q4K, Some(0)),
            (Dtype::Q4_0, Some(8)),
            (Dtype::Q5K, Some(16)),
            (Dtype::Q5_1, Some(16)),
            (Dtype::Q6K, Some(32)),
            (Dtype::Iq2S, None),
            (Dtype::Q8_0, None),
        ] {
            assert_eq!(bias(dtype), expected, "{dtype:?}");
        }
    }
}
