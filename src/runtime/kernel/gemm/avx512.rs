//! AVX-512 with VNNI: `vpdpbusd` multiplies 64 unsigned codes with 64 signed ones and adds groups of four.
//!
//! Panels are 32 rows wide; 32 rows times 6 activation rows fill the registers. Follows the order that
//! [`gemm`](super) defines. Every function here requires the features in [`Avx512Vnni`]'s contract.

use std::arch::x86_64::*;
use std::ops::Range;

use super::activation::{ActivationBlock, Activations};
use super::format::{GROUPS, QuantFormat, ROWS, Scales};
use super::{CodeLine, FetchAhead, GemmInput, Kernels, MAX_DIRECT, MAX_WIDTH, Panels, SumsPtr, WeightPanel};
use crate::isa::is_intel;

/// Requires avx512f, avx512bw, avx512dq, avx512vl, avx512vnni, and avx2, fma and f16c.
pub struct Avx512Vnni;

impl Kernels for Avx512Vnni {
    const WIDTH: usize = 2;
    const DIRECT_ROWS: usize = 8;
    const PANEL_ROWS: usize = 6;

    /// With Intel's cores panels are faster from 24 rows on (Q6_K by a fifth at 32 rows, Q4_K by a seventh at 64), with AMD's not
    /// before [`MAX_DIRECT`].
    fn max_direct() -> usize {
        if is_intel() { 23 } else { MAX_DIRECT }
    }

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        assert!(panel.len() / F::UNIT_BYTES * F::TILES <= x.blocks_per_row(), "rows of one length");
        // SAFETY: the features by this function's contract; the lengths by the assertion and `Activations::row`.
        unsafe {
            match out.len() {
                1 => direct::<F, 1>(panel, x, first, out),
                2 => direct::<F, 2>(panel, x, first, out),
                3 => direct::<F, 3>(panel, x, first, out),
                4 => direct::<F, 4>(panel, x, first, out),
                5 => direct::<F, 5>(panel, x, first, out),
                6 => direct::<F, 6>(panel, x, first, out),
                7 => direct::<F, 7>(panel, x, first, out),
                _ => direct::<F, 8>(panel, x, first, out),
            }
        }
    }

    unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
        // SAFETY: the features by this function's contract.
        unsafe { unpack::<F>(panels, blocks, out) }
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
            match (F::SCALES.per_tile(), F::SCALES.has_min()) {
                (1, false) => multiply_any::<1, false>(F::ZERO, panel, x, [first, start], sums),
                (1, true) => multiply_any::<1, true>(F::ZERO, panel, x, [first, start], sums),
                (_, false) => multiply_any::<2, false>(F::ZERO, panel, x, [first, start], sums),
                (_, true) => multiply_any::<2, true>(F::ZERO, panel, x, [first, start], sums),
            }
        }
    }
}

/// Loads four activation codes into every 32 bits.
///
/// # Safety
/// `group` is below 8.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn broadcast_group(block: &ActivationBlock, group: usize) -> __m512i {
    // SAFETY: a block has 8 groups of 4 codes.
    _mm512_set1_epi32(unsafe { block.codes.as_ptr().add(4 * group).cast::<i32>().read_unaligned() })
}

/// # Safety
/// 64 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load(from: *const u8) -> __m512i {
    // SAFETY: by this function's contract.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// # Safety
/// 32 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_f16(from: *const u8) -> __m512 {
    // SAFETY: by this function's contract.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
}

/// Loads the f32 scales at the start of a unit.
///
/// # Safety
/// `unit` points at a unit that begins with 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_wide(unit: *const u8) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_loadu_ps(unit.cast()) }
}

/// # Safety
/// 16 bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_16(from: *const u8) -> __m128i {
    // SAFETY: by this function's contract.
    unsafe { _mm_loadu_si128(from.cast()) }
}

/// Shifts the bits of every byte right (or left) by `by`; bits of the neighbouring byte come in and must be masked.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shift(v: __m512i, by: isize) -> __m512i {
    let count = _mm_cvtsi32_si128(by.unsigned_abs() as i32);
    if by >= 0 { _mm512_srl_epi16(v, count) } else { _mm512_sll_epi16(v, count) }
}

/// Loads the codes of a tile, in the order of [`unpack_tile`](super::pack::unpack_tile).
///
/// # Safety
/// `unit` points at a unit of `F`, `tile` is below `F::TILES`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn codes<F: QuantFormat>(unit: *const u8, tile: usize) -> [__m512i; GROUPS] {
    let (low_per_byte, low_mask) = (8 / F::LOW, _mm512_set1_epi8((0xff >> (8 - F::LOW)) as i8));
    let mut codes = [_mm512_setzero_si512(); GROUPS];
    for group in 0..GROUPS {
        // SAFETY: within the unit's low part.
        let bytes = unsafe { load(unit.add(F::low_at(tile) + 64 * (group / low_per_byte))) };
        let moved = shift(bytes, (F::LOW * (group % low_per_byte)) as isize);
        codes[group] = if F::LOW == 8 { bytes } else { _mm512_and_si512(moved, low_mask) };
    }
    if let Some(per_byte) = 8usize.checked_div(F::HIGH) {
        let mask = _mm512_set1_epi8((((1 << F::HIGH) - 1) << F::LOW) as i8);
        for group in 0..GROUPS {
            // SAFETY: within the unit's high part.
            let bytes = unsafe { load(unit.add(F::high_at(tile) + 64 * (group / per_byte))) };
            let moved = shift(bytes, (F::HIGH * (group % per_byte)) as isize - F::LOW as isize);
            codes[group] = _mm512_or_si512(codes[group], _mm512_and_si512(moved, mask));
        }
    }
    let Some(book) = F::BOOK else { return codes };
    // SAFETY: 16 bytes.
    let book = _mm512_broadcast_i32x4(unsafe { load_16(book.as_ptr()) });
    codes.map(|codes| _mm512_shuffle_epi8(book, codes))
}

/// Loads scales and minima of a tile's rows, with the values of [`scale_and_min`](super::pack::scale_and_min).
///
/// # Safety
/// `unit` points at a unit of `F`, `tile` is below `F::TILES`, `part` below its scales per tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx2")]
pub unsafe fn scales<F: QuantFormat>(unit: *const u8, tile: usize, part: usize) -> [__m512; 2] {
    let sub = 64 + 16 * (2 * tile + part);
    // SAFETY: all within the unit's scales.
    unsafe {
        match F::SCALES {
            Scales::Block => [load_f16(unit.add(32 * tile)), _mm512_setzero_ps()],
            Scales::BlockMin => [load_f16(unit.add(32 * tile)), load_f16(unit.add(64 + 32 * tile))],
            Scales::Super32 => {
                let scale = _mm512_cvtepu8_epi32(load_16(unit.add(64 + 16 * tile)));
                let min = _mm512_cvtepu8_epi32(load_16(unit.add(192 + 16 * tile)));
                times_f16(unit, scale, min)
            }
            Scales::Super16Min => {
                let both = _mm512_cvtepu8_epi32(load_16(unit.add(sub)));
                let scale = _mm512_and_si512(both, _mm512_set1_epi32(15));
                times_f16(unit, scale, _mm512_srli_epi32::<4>(both))
            }
            Scales::Shared => [load_wide(unit), _mm512_setzero_ps()],
            Scales::Signed32 | Scales::Signed16 => {
                let at = if F::SCALES.per_tile() == 1 { 64 + 16 * tile } else { sub };
                let scale = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(unit.add(at))));
                [_mm512_mul_ps(load_wide(unit), scale), _mm512_setzero_ps()]
            }
            Scales::Float16 => {
                let scale = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(load_16(unit.add(sub))));
                [_mm512_mul_ps(load_wide(unit), _mm512_cvtph_ps(scale)), _mm512_setzero_ps()]
            }
        }
    }
}

/// Multiplies the two f16 vectors at the start of a unit with two vectors of integers.
///
/// # Safety
/// 64 bytes can be read from `unit`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn times_f16(unit: *const u8, scale: __m512i, min: __m512i) -> [__m512; 2] {
    // SAFETY: by this function's contract.
    let [d, dmin] = unsafe { [load_f16(unit), load_f16(unit.add(32))] };
    [_mm512_mul_ps(d, _mm512_cvtepi32_ps(scale)), _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(min))]
}

/// # Safety
/// `out` has `R` rows and `x` as many from `first` on, each with at least the panel's blocks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn direct<F: QuantFormat, const R: usize>(
    panel: &[u8],
    x: &Activations,
    first: usize,
    out: &mut [[f32; ROWS]],
) {
    let rows: [*const ActivationBlock; R] = std::array::from_fn(|row| x.row(first + row).as_ptr());
    let mut sums = [_mm512_setzero_ps(); R];
    let units = panel.len() / F::UNIT_BYTES;
    // With many rows the bottleneck is arithmetic, not the second-level cache.
    let ahead = FetchAhead::new::<F>(R, FetchAhead { distance: 8192, near: false });
    for index in 0..units {
        let unit = panel.as_ptr().wrapping_add(index * F::UNIT_BYTES);
        for tile in 0..F::TILES {
            ahead.fetch::<F>(unit, tile);
            // SAFETY: a tile of a unit of the panel.
            let codes = unsafe { codes::<F>(unit, tile) };
            for part in 0..F::SCALES.per_tile() {
                // SAFETY: as above.
                let [scale, min] = unsafe { scales::<F>(unit, tile, part) };
                for row in 0..R {
                    // SAFETY: the row has as many blocks as the panel.
                    let block = unsafe { &*rows[row].add(index * F::TILES + tile) };
                    let facts = BlockTerms::of(block, F::SCALES.per_tile(), part);
                    let dots = dot_tile::<F>(&codes, block, facts.minus_sum, part);
                    sums[row] = add(sums[row], dots, facts, [scale, min], F::SCALES.has_min());
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        // SAFETY: 16 numbers.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
    }
}

/// Values of an activation block for one scale of a tile: the whole block, or half of it.
#[derive(Clone, Copy)]
struct BlockTerms {
    scale: f32,
    minus_sum: i32,
    scaled_sum: f32,
}

impl BlockTerms {
    #[inline(always)]
    fn of(block: &ActivationBlock, per_tile: usize, part: usize) -> BlockTerms {
        let (minus_sum, scaled_sum) = match per_tile {
            1 => (block.minus_sum, block.scaled_sum),
            _ => (block.half_minus_sums[part], block.half_scaled_sums[part]),
        };
        BlockTerms { scale: block.scale, minus_sum, scaled_sum }
    }
}

/// Computes exact dot products of a tile, or one half of it, with a block. Two chains hide the instruction's latency, also with
/// eight rows that are computed together: one chain is faster in the cache and slower from memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn dot_tile<F: QuantFormat>(
    codes: &[__m512i; GROUPS],
    block: &ActivationBlock,
    minus_sum: i32,
    part: usize,
) -> __m512i {
    let groups = GROUPS / F::SCALES.per_tile();
    let mut even = _mm512_mullo_epi32(_mm512_set1_epi32(minus_sum), _mm512_set1_epi32(F::ZERO));
    let mut odd = _mm512_setzero_si512();
    for pair in 0..groups / 2 {
        let group = part * groups + 2 * pair;
        // SAFETY: below 8.
        let x = unsafe { [broadcast_group(block, group), broadcast_group(block, group + 1)] };
        even = _mm512_dpbusd_epi32(even, codes[group], x[0]);
        odd = _mm512_dpbusd_epi32(odd, codes[group + 1], x[1]);
    }
    _mm512_add_epi32(even, odd)
}

/// Computes the f32 part of [`gemm`](super)'s definition.
#[inline]
#[target_feature(enable = "avx512f,fma")]
fn add(sums: __m512, dots: __m512i, facts: BlockTerms, [scale, min]: [__m512; 2], has_min: bool) -> __m512 {
    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(facts.scale));
    let sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, sums);
    if has_min { _mm512_fmadd_ps(min, _mm512_set1_ps(facts.scaled_sum), sums) } else { sums }
}

/// # Safety
/// Only the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
    let per_tile = F::SCALES.per_tile();
    for (at, block) in blocks.enumerate() {
        let (index, tile) = (block / F::TILES, block % F::TILES);
        for (side, panel) in panels.iter().enumerate() {
            let unit = panel[index * F::UNIT_BYTES..][..F::UNIT_BYTES].as_ptr();
            // SAFETY: a tile of a unit of the panel.
            let codes = unsafe { codes::<F>(unit, tile) };
            for (group, codes) in codes.into_iter().enumerate() {
                let line: &mut CodeLine = &mut out.codes[(at * GROUPS + group) * MAX_WIDTH + side];
                // SAFETY: a line is 64 bytes at an address divisible by 64.
                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), codes) };
            }
            for part in 0..per_tile {
                // SAFETY: as above.
                let [scale, min] = unsafe { scales::<F>(unit, tile, part) };
                let place = ((at * per_tile + part) * MAX_WIDTH + side) * ROWS;
                // SAFETY: the slices are 16 numbers long.
                unsafe {
                    _mm512_storeu_ps(out.scales[place..][..ROWS].as_mut_ptr(), scale);
                    if F::SCALES.has_min() {
                        _mm512_storeu_ps(out.mins[place..][..ROWS].as_mut_ptr(), min);
                    }
                }
            }
        }
    }
}

/// # Safety
/// The features; `x` has `sums.rows` rows from `first` on, each with `panel.blocks` blocks from `start` on; the sums are 32
/// wide.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_any<const PARTS: usize, const MIN: bool>(
    zero: i32,
    panel: &WeightPanel,
    x: &Activations,
    first: [usize; 2],
    sums: SumsPtr,
) {
    // SAFETY: by this function's contract.
    unsafe {
        match sums.rows {
            1 => multiply::<1, PARTS, MIN>(zero, panel, x, first, sums),
            2 => multiply::<2, PARTS, MIN>(zero, panel, x, first, sums),
            3 => multiply::<3, PARTS, MIN>(zero, panel, x, first, sums),
            4 => multiply::<4, PARTS, MIN>(zero, panel, x, first, sums),
            5 => multiply::<5, PARTS, MIN>(zero, panel, x, first, sums),
            _ => multiply::<6, PARTS, MIN>(zero, panel, x, first, sums),
        }
    }
}

/// # Safety
/// As [`multiply_any`], with `R` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<const R: usize, const PARTS: usize, const MIN: bool>(
    zero: i32,
    panel: &WeightPanel,
    x: &Activations,
    [first, start]: [usize; 2],
    sums: SumsPtr,
) {
    let rows: [*const ActivationBlock; R] = std::array::from_fn(|row| x.row(first + row)[start..].as_ptr());
    let zero = _mm_cvtsi32_si128(zero.checked_ilog2().unwrap_or(0) as i32);
    let mut acc = [[_mm512_setzero_ps(); 2]; R];
    if start > 0 {
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: 32 numbers.
            *acc = unsafe { [_mm512_loadu_ps(sums.row(row)), _mm512_loadu_ps(sums.row(row).add(ROWS))] };
        }
    }
    for block in 0..panel.blocks {
        // SAFETY: the rows and the panel have this many blocks. A part's number is a constant: where it is not, the compiler
        // runs out of registers for addresses, and then loads all activations first.
        unsafe {
            add_part::<R, PARTS, MIN, 0>(zero, panel, &rows, block, &mut acc);
            if PARTS == 2 {
                add_part::<R, PARTS, MIN, 1>(zero, panel, &rows, block, &mut acc);
            }
        }
    }
    for (row, acc) in acc.into_iter().enumerate() {
        // SAFETY: 32 numbers.
        unsafe {
            _mm512_storeu_ps(sums.row(row), acc[0]);
            _mm512_storeu_ps(sums.row(row).add(ROWS), acc[1]);
        }
    }
}

/// Adds the products for one scale of a block.
///
/// # Safety
/// The features; panel and rows have the block, `PART` is below `PARTS`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,fma")]
unsafe fn add_part<const R: usize, const PARTS: usize, const MIN: bool, const PART: usize>(
    zero: __m128i,
    panel: &WeightPanel,
    rows: &[*const ActivationBlock; R],
    block: usize,
    acc: &mut [[__m512; 2]; R],
) {
    let mut dots = [[_mm512_setzero_si512(); 2]; R];
    // SAFETY: by this function's contract.
    let x_block = |row: usize| unsafe { &*rows[row].add(block) };
    let facts = |row: usize| BlockTerms::of(x_block(row), PARTS, PART);
    if !MIN {
        for row in 0..R {
            dots[row] = [_mm512_sll_epi32(_mm512_set1_epi32(facts(row).minus_sum), zero); 2];
        }
    }
    for group in PART * GROUPS / PARTS..(PART + 1) * GROUPS / PARTS {
        let line = 2 * (block * GROUPS + group);
        // SAFETY: a panel has `blocks * GROUPS` pairs of lines.
        let w = [0, 1].map(|side| unsafe { load(panel.codes.as_ptr().add(line + side).cast()) });
        for row in 0..R {
            // SAFETY: below 8.
            let x = unsafe { broadcast_group(x_block(row), group) };
            dots[row][0] = _mm512_dpbusd_epi32(dots[row][0], w[0], x);
            dots[row][1] = _mm512_dpbusd_epi32(dots[row][1], w[1], x);
        }
    }
    for side in 0..2 {
        let place = (2 * (block * PARTS + PART) + side) * ROWS;
        // SAFETY: a panel has `blocks * PARTS` pairs of 16 scales, and of minima when there are any.
        let scale = unsafe { _mm512_loadu_ps(panel.scales.as_ptr().add(place)) };
        let min = match MIN {
            // SAFETY: as above.
            true => unsafe { _mm512_loadu_ps(panel.mins.as_ptr().add(place)) },
            false => _mm512_setzero_ps(),
        };
        for row in 0..R {
            acc[row][side] = add(acc[row][side], dots[row][side], facts(row), [scale, min], MIN);
        }
    }
}
