//! KV rows of five and six bits per value: rotated, then rounded in blocks of 32.
//!
//! A row is cut into parts of [`part_len`] values, each of which is multiplied by a Hadamard matrix of that size divided by its
//! root: the rotation spreads a large value over its part, so that the rounding loses less. Queries are rotated alike, which
//! changes no score, and mixed values are rotated back, because the matrix is its own inverse. What the types cost in accuracy is
//! in docs/numbers.md.
//!
//! A head's block of a page has the codes of all elements, in the order of the other types, and then for each block of 32 values
//! of a row a number for each token in f16, `[block][PAGE_TOKENS]`: the scales, and in q5_1 as many least values.
//!
//! ```text
//! value = (code - 32) * scale            q6_0, codes of 6 bits
//! value = code * scale + least           q5_1, codes of 5 bits
//! 32 codes: 16 bytes of low bits, code j < 16 in the low half of byte j, code 16 + j in its high half;
//!           8 bytes (q6_0) with the two high bits of code j at bit 2 * (j / 8) of byte j % 8,
//!           4 bytes (q5_1) with the high bit of code j at bit j / 4 of byte j % 4
//! ```
//!
//! A block that no f16 can scale has the scale NaN or infinity and no value is a number, so that a broken model is noticed.

use std::ops::Range;

use half::f16;

use super::lanes::VectorLanes;
use super::page::{BLOCK, KvPart, PAGE_TOKENS};
use crate::wide::LANES;

/// Most values that are rotated together.
const MOST_ROTATED: usize = 256;

/// Codes that are stored together.
const GROUP: usize = 32;
/// Bytes of their low bits.
const LOW_BYTES: usize = GROUP / 2;

/// The bits of a type.
#[derive(Clone, Copy)]
pub struct PackedForm {
    /// Bits of a code above the low four.
    high_bits: usize,
    /// True if the least value is stored; else code 32 is zero.
    has_least: bool,
}

impl PackedForm {
    pub const SIX: PackedForm = PackedForm { high_bits: 2, has_least: false };
    pub const FIVE: PackedForm = PackedForm { high_bits: 1, has_least: true };

    /// Bytes of 32 codes.
    const fn group_bytes(self) -> usize {
        LOW_BYTES + GROUP / 8 * self.high_bits
    }

    /// Bytes of the codes of a head's block of a page.
    pub const fn code_bytes(self, head_dim: usize) -> usize {
        PAGE_TOKENS * head_dim / GROUP * self.group_bytes()
    }

    /// Arrays of numbers behind the codes.
    pub const fn num_arrays(self) -> usize {
        if self.has_least { 2 } else { 1 }
    }

    /// Bytes of a token's share of a head's block, rounded up where its codes are no whole bytes.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        self.code_bytes(head_dim).div_ceil(PAGE_TOKENS) + 2 * self.num_arrays() * head_dim.div_ceil(BLOCK)
    }

    const fn most(self) -> f32 {
        ((16 << self.high_bits) - 1) as f32
    }

    /// Returns the scale and the value of code 0 of a block of a token's row; `numbers` are those behind the codes.
    #[inline(always)]
    fn scale_and_least(self, numbers: &[u16], num_blocks: usize, block: usize, token: usize) -> [f32; 2] {
        let number = |at: usize| f16::from_bits(numbers[at * PAGE_TOKENS + token]).to_f32();
        let scale = number(block);
        [scale, if self.has_least { number(num_blocks + block) } else { -32.0 * scale }]
    }

    /// Returns the places of a code: byte and bit of its low and of its high bits.
    #[inline(always)]
    fn place(self, index: usize) -> [(usize, usize); 2] {
        let (first, code) = (index / GROUP * self.group_bytes(), index % GROUP);
        let bytes = GROUP / 8 * self.high_bits;
        [
            (first + code % LOW_BYTES, code / LOW_BYTES * 4),
            (first + LOW_BYTES + code % bytes, code / bytes * self.high_bits),
        ]
    }

    #[inline(always)]
    pub fn code(self, codes: &[u8], index: usize) -> u8 {
        let [low, high] = self.place(index);
        codes[low.0] >> low.1 & 15 | (codes[high.0] >> high.1 & ((1 << self.high_bits) - 1)) << 4
    }

    #[inline(always)]
    pub fn set_code(self, codes: &mut [u8], index: usize, code: u8) {
        let [low, high] = self.place(index);
        let high_mask = (1 << self.high_bits) - 1;
        codes[low.0] = codes[low.0] & !(15 << low.1) | (code & 15) << low.1;
        codes[high.0] = codes[high.0] & !(high_mask << high.1) | (code >> 4) << high.1;
    }
}

/// Returns the number of values that are rotated together in rows of `dim`: the largest power of two that divides it, at most 256.
pub fn part_len(dim: usize) -> usize {
    1 << dim.trailing_zeros().min(MOST_ROTATED.ilog2())
}

/// Multiplies each `part` values by a Hadamard matrix divided by its root; `part` is a power of two. Twice is the identity, but
/// for rounding.
#[inline(always)]
pub fn rotate(values: &mut [f32], part: usize) {
    let factor = 1.0 / (part as f32).sqrt();
    for values in values.chunks_exact_mut(part) {
        // The short distances as constants, so that they become shuffles of registers.
        pass(values, 1);
        pass(values, 2);
        pass(values, 4);
        pass(values, 8);
        let mut distance = 16;
        while distance < part {
            pass(values, distance);
            distance *= 2;
        }
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

/// Replaces values `distance` apart by their sum and their difference; nothing if there are none.
#[inline(always)]
fn pass(values: &mut [f32], distance: usize) {
    for pair in values.chunks_exact_mut(2 * distance) {
        let (low, high) = pair.split_at_mut(distance);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// Writes a token's row into a head's block of a page.
pub fn write(form: PackedForm, part: KvPart, block: &mut [u8], token: usize, row: &[f32]) {
    let head_dim = row.len();
    let (codes, numbers) = block.split_at_mut(form.code_bytes(head_dim));
    let numbers: &mut [u16] = bytemuck::cast_slice_mut(numbers);
    let (num_blocks, rotated_together) = (head_dim.div_ceil(BLOCK), part_len(head_dim));
    let mut rotated = [0.0; MOST_ROTATED];
    let mut dim = 0;
    for row in row.chunks(rotated_together.max(BLOCK)) {
        let rotated = &mut rotated[..row.len()];
        rotated.copy_from_slice(row);
        rotate(rotated, rotated_together);
        for values in rotated.chunks(BLOCK) {
            let [scale, least] = scale_and_least_of(form, values);
            numbers[dim / BLOCK * PAGE_TOKENS + token] = scale.to_bits();
            if form.has_least {
                numbers[(num_blocks + dim / BLOCK) * PAGE_TOKENS + token] = least.to_bits();
            }
            let [scale, least] = form.scale_and_least(numbers, num_blocks, dim / BLOCK, token);
            for value in values {
                let code = ((value - least) / scale).round_ties_even().clamp(0.0, form.most()) as u8;
                form.set_code(codes, part.index(head_dim, token, dim), code);
                dim += 1;
            }
        }
    }
}

/// Returns the numbers of a block of up to 32 values; the second one is used if it is stored. A NaN stays.
fn scale_and_least_of(form: PackedForm, values: &[f32]) -> [f16; 2] {
    let extreme = |is_beyond: fn(f32, f32) -> bool| {
        let further = |a: f32, b: f32| if is_beyond(b, a) || b.is_nan() { b } else { a };
        values.iter().copied().reduce(further).unwrap_or_default()
    };
    if !form.has_least {
        return [f16::from_f32(extreme(|b, a| b.abs() > a.abs()) / -32.0), f16::ZERO];
    }
    let least = f16::from_f32(extreme(|b, a| b < a));
    [f16::from_f32((extreme(|b, a| b > a) - least.to_f32()) / form.most()), least]
}

/// Memory of [`read_page`], kept between calls.
#[derive(Debug, Default)]
pub struct PageRows {
    codes: Vec<[u64; GROUP / 8]>,
    pub values: Vec<f32>,
}

/// Reads a head's block of a page in the layout of f32, still rotated. Products are exact in f32, so that a fused addition would
/// give the same bits.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
pub unsafe fn read_page<V: VectorLanes>(
    form: PackedForm,
    part: KvPart,
    block: &[u8],
    dim: usize,
    rows: &mut PageRows,
) {
    let (codes, numbers) = block.split_at(form.code_bytes(dim));
    let num_blocks = dim.div_ceil(BLOCK);
    let arrays: &[[f16; PAGE_TOKENS]] = bytemuck::cast_slice::<_, f16>(numbers).as_chunks().0;
    rows.codes.resize(dim, [0; GROUP / 8]);
    rows.values.resize(PAGE_TOKENS * dim, 0.0);
    match form.high_bits {
        2 => unpack::<6>(codes, &mut rows.codes, |[low, high], eight| {
            (u64::from(low) | u64::from(high) << 32) >> (2 * eight) & 0x0303_0303_0303_0303
        }),
        _ => unpack::<5>(codes, &mut rows.codes, |[bits, _], eight| {
            let [low, high] = [0, 1].map(|at| u64::from(bits >> (2 * eight + at) & 0x0101_0101));
            low | high << 32
        }),
    }
    let codes: &[u8] = bytemuck::cast_slice(&rows.codes);
    for block in 0..num_blocks {
        // SAFETY: by this function's contract.
        let wide = |numbers| unsafe { widened::<V>(numbers) };
        let scales = &wide(&arrays[block]);
        let leasts = &match form.has_least {
            true => wide(&arrays[num_blocks + block]),
            false => scales.map(|scale| -32.0 * scale),
        };
        let dims = block * BLOCK..dim.min((block + 1) * BLOCK);
        // SAFETY: by this function's contract.
        unsafe {
            match part {
                KvPart::Keys => widen_keys::<V>(codes, [scales, leasts], dims, &mut rows.values),
                KvPart::Values => widen_values::<V>(codes, [scales, leasts], dims, dim, &mut rows.values),
            }
        }
    }
}

/// Computes the values of some dimensions' codes from scale and least value of each token.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn widen_keys<V: VectorLanes>(
    codes: &[u8],
    [scales, leasts]: [&[f32; PAGE_TOKENS]; 2],
    dims: Range<usize>,
    values: &mut [f32],
) {
    for at in dims.map(|dim| dim * PAGE_TOKENS) {
        let (codes, values) = (&codes[at..][..PAGE_TOKENS], &mut values[at..][..PAGE_TOKENS]);
        for lane in (0..PAGE_TOKENS).step_by(LANES) {
            // SAFETY: by this function's contract; 16 numbers each.
            unsafe {
                let [scale, least] = [scales, leasts].map(|facts| V::load_f32(facts[lane..].as_ptr()));
                let codes = V::load_i8(codes[lane..].as_ptr().cast());
                least.fma(codes, scale).store(values[lane..].as_mut_ptr());
            }
        }
    }
}

/// Computes them in rows of `dim` values.
///
/// # Safety
/// As [`widen_keys`].
#[inline(always)]
unsafe fn widen_values<V: VectorLanes>(
    codes: &[u8],
    [scales, leasts]: [&[f32; PAGE_TOKENS]; 2],
    dims: Range<usize>,
    dim: usize,
    values: &mut [f32],
) {
    for token in 0..PAGE_TOKENS {
        let range = token * dim + dims.start..token * dim + dims.end;
        let (codes, codes_left) = codes[range.clone()].as_chunks::<LANES>();
        let (values, values_left) = values[range].as_chunks_mut::<LANES>();
        for (values, codes) in values.iter_mut().zip(codes) {
            // SAFETY: by this function's contract; 16 numbers each.
            unsafe {
                let (codes, least) = (V::load_i8(codes.as_ptr().cast()), V::splat(leasts[token]));
                least.fma(codes, V::splat(scales[token])).store(values.as_mut_ptr());
            }
        }
        for (value, code) in values_left.iter_mut().zip(codes_left) {
            *value = f32::from(*code) * scales[token] + leasts[token];
        }
    }
}

/// Unpacks groups of codes of `WORDS` 4-byte words, 8 codes to a number; `high` returns the high bits of eight of them, each at the bottom
/// of its byte, from the words behind the low bits.
#[inline(always)]
fn unpack<const WORDS: usize>(
    codes: &[u8],
    out: &mut [[u64; GROUP / 8]],
    high: impl Fn([u32; 2], usize) -> u64,
) {
    let words: &[[u8; 4]] = codes.as_chunks().0;
    for (group, out) in words.as_chunks::<WORDS>().0.iter().zip(out) {
        let group = group.map(u32::from_le_bytes);
        let low = [0, 2].map(|at| u64::from(group[at]) | u64::from(group[at + 1]) << 32);
        let high_words = [group[4], group[WORDS - 1]];
        for (eight, out) in out.iter_mut().enumerate() {
            let low = low[eight % 2] >> (4 * (eight / 2)) & 0x0f0f_0f0f_0f0f_0f0f;
            *out = low | high(high_words, eight) << 4;
        }
    }
}

/// Widens the numbers of a page's tokens.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn widened<V: VectorLanes>(numbers: &[f16; PAGE_TOKENS]) -> [f32; PAGE_TOKENS] {
    let mut wide = [0.0; PAGE_TOKENS];
    for lane in (0..PAGE_TOKENS).step_by(LANES) {
        // SAFETY: by this function's contract; 16 numbers on both sides.
        unsafe { V::load_f16(numbers[lane..].as_ptr()).store(wide[lane..].as_mut_ptr()) };
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [PackedForm; 2] = [PackedForm::SIX, PackedForm::FIVE];

    fn written(form: PackedForm, part: KvPart, row: &[f32], token: usize) -> Vec<u8> {
        let mut block = vec![0u64; (PAGE_TOKENS * form.row_bytes(row.len())).div_ceil(8)];
        let block =
            &mut bytemuck::cast_slice_mut::<_, u8>(&mut block)[..PAGE_TOKENS * form.row_bytes(row.len())];
        write(form, part, block, token, row);
        block.to_vec()
    }

    #[test]
    fn groups_and_numbers_have_their_documented_places() {
        // Rows of an odd number of values are not rotated. Steps of 2 from -32 to 30 have the codes 0, 2, .., 62 or 0 to 31.
        let row: Vec<f32> = (0..33).map(|i| if i < 32 { (2 * i - 32) as f32 } else { 7.0 }).collect();
        let six = written(PackedForm::SIX, KvPart::Values, &row, 0);
        // 33 values of 6 bits are 24.75 bytes, of 5 bits 20.625.
        assert_eq!(six.len(), PAGE_TOKENS * (25 + 2 * 2));
        // Codes 1 and 17 are 2 and 34: low bits 2 and 2; the high bits of codes 0, 8, 16 and 24 are 0, 1, 2 and 3.
        assert_eq!((six[1], six[16]), (0x22, 0b11_10_01_00));
        assert_eq!(f16::from_le_bytes([six[33 * 24], six[33 * 24 + 1]]), f16::ONE);
        let five = written(PackedForm::FIVE, KvPart::Values, &row, 0);
        assert_eq!(five.len(), PAGE_TOKENS * (21 + 2 * 4));
        assert_eq!((five[1], five[16]), (0x11, 0b1111_0000));
        let number =
            |at: usize| f16::from_le_bytes([five[33 * 20 + 2 * at], five[33 * 20 + 2 * at + 1]]).to_f32();
        assert_eq!([number(0), number(2 * PAGE_TOKENS), number(3 * PAGE_TOKENS)], [2.0, -32.0, 7.0]);
    }

    #[test]
    fn a_page_reads_as_its_codes_say() {
        for form in FORMS {
            for (part, dim) in
                [KvPart::Keys, KvPart::Values].into_iter().flat_map(|part| [8, 33, 64].map(|dim| (part, dim)))
            {
                let row: Vec<f32> = (0..dim).map(|i| (i as f32 * 1.7).sin()).collect();
                let mut rotated = row.clone();
                rotate(&mut rotated, part_len(dim));
                let (block, mut rows) = (written(form, part, &row, 5), PageRows::default());
                // SAFETY: every processor has plain arrays.
                unsafe { read_page::<[f32; LANES]>(form, part, &block, dim, &mut rows) };
                for (at, value) in rotated.iter().enumerate() {
                    let read = rows.values[part.index(dim, 5, at)];
                    assert!(
                        (read - value).abs() < 0.6 * 2.0 * 3.0 / form.most(),
                        "{dim} {at}: {read}, not {value}"
                    );
                }
            }
        }
    }

    #[test]
    fn rotations_are_their_own_inverse_and_keep_products() {
        assert_eq!([32, 33, 40, 64, 96, 128, 512, 576].map(part_len), [32, 1, 8, 64, 32, 128, 256, 64]);
        let [a, b] = [3, 7].map(|step| (0..128).map(|i| ((i * step) as f32).sin()).collect::<Vec<f32>>());
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for part in [1, 2, 32, 128] {
            let rotated = [&a, &b].map(|values| {
                let mut values = values.clone();
                rotate(&mut values, part);
                values
            });
            assert!((dot(&rotated[0], &rotated[1]) - dot(&a, &b)).abs() < 1e-4, "{part}");
            let mut back = rotated[0].clone();
            rotate(&mut back, part);
            assert!(back.iter().zip(&a).all(|(back, a)| (back - a).abs() < 1e-6), "{part}");
        }
        let mut one = vec![0.0; 4];
        one[2] = 1.0;
        rotate(&mut one, 4);
        assert_eq!(one, [0.5, 0.5, -0.5, -0.5]);
    }
}
