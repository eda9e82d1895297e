//! KV rows of five and six bits per value: rotated, then rounded in blocks of 32.
//!
//! A row is cut into parts of [`part_len`] values, each of which is multiplied by a Hadamard matrix of that size divided by its
//! root: the rotation spreads a large value over its part, so that the rounding loses less. Queries are rotated alike, which
//! changes no score, and mixed values are rotated back, because the matrix is its own inverse. What the types cost in accuracy is
//! in docs/numbers.md.
//!
//! A head's block of a page has the codes of all elements, in the order of the other types, then for each block of 32 values
//! of a row a scale for each token in f16, `[block][PAGE_TOKENS]`, and in q5_1 as many zero points, signed bytes. Unpacked, with
//! the zero points added, it is a block of [`super::KvType::Q8_0`].
//!
//! ```text
//! value = (code - 32) * scale            q6_0, codes of 6 bits
//! value = (code + zero) * scale          q5_1, codes of 5 bits
//! N codes: N / 2 bytes of low bits, code j < N / 2 in the low half of byte j, code N / 2 + j in its high half; then
//!          N / 4 bytes (q6_0) with the two high bits of code q * N / 4 + j at bit 2 * q of byte j,
//!          N / 8 bytes (q5_1) with the high bit of code q * N / 8 + j at bit q of byte j
//! ```
//!
//! A block that no f16 can scale has the scale NaN, so that a broken model is noticed.

use half::f16;

use super::page::{BLOCK, KvPart, PAGE_TOKENS};

/// Most values that are rotated together.
const MOST_ROTATED: usize = 256;

/// Memory of unpacked codes, kept between calls.
pub type Unpacked = Vec<i8>;

/// The bits of a type.
#[derive(Clone, Copy)]
pub struct PackedForm {
    /// Bits of a code above the low four.
    high_bits: usize,
    /// True if zero points are stored; else they are -32.
    has_zeros: bool,
}

impl PackedForm {
    pub const SIX: PackedForm = PackedForm { high_bits: 2, has_zeros: false };
    pub const FIVE: PackedForm = PackedForm { high_bits: 1, has_zeros: true };

    /// Bytes of the codes of a head's block of a page.
    pub const fn code_bytes(self, head_dim: usize) -> usize {
        PAGE_TOKENS * head_dim / 8 * (4 + self.high_bits)
    }

    /// Bytes of a token's share of a head's block, rounded up where its codes are no whole bytes.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        let numbers = if self.has_zeros { 3 } else { 2 };
        self.code_bytes(head_dim).div_ceil(PAGE_TOKENS) + numbers * head_dim.div_ceil(BLOCK)
    }

    const fn most(self) -> f32 {
        ((16 << self.high_bits) - 1) as f32
    }

    /// Returns the places of one of `count` codes: byte and bit of its low and of its high bits.
    #[inline(always)]
    fn place(self, count: usize, index: usize) -> [(usize, usize); 2] {
        let (half, part) = (count / 2, count / 8 * self.high_bits);
        [(index % half, index / half * 4), (half + index % part, index / part * self.high_bits)]
    }

    /// Writes a row's codes, `step` apart from the code at `first` on.
    #[inline(always)]
    pub fn set_codes(self, block: &mut [u8], (first, step): (usize, usize), row: impl Iterator<Item = u8>) {
        let count = self.count(block);
        let (half, part) = (count / 2, count / 8 * self.high_bits);
        let [mut low, mut high] = self.place(count, first);
        for code in row {
            block[low.0] = block[low.0] & !(15 << low.1) | (code & 15) << low.1;
            block[high.0] = block[high.0] & !(self.high_mask() << high.1) | (code >> 4) << high.1;
            (low.0, high.0) = (low.0 + step, high.0 + step);
            if low.0 >= half {
                low = (low.0 - half, low.1 + 4);
            }
            while high.0 >= half + part {
                high = (high.0 - part, high.1 + self.high_bits);
            }
        }
    }

    /// Returns a code of a block's.
    #[inline(always)]
    pub fn code(self, codes: &[u8], index: usize) -> u8 {
        let [low, high] = self.place(self.count(codes), index);
        codes[low.0] >> low.1 & 15 | (codes[high.0] >> high.1 & self.high_mask()) << 4
    }

    /// Returns the number of codes in all of a block's bytes of codes.
    fn count(self, codes: &[u8]) -> usize {
        codes.len() / (4 + self.high_bits) * 8
    }

    const fn high_mask(self) -> u8 {
        (1 << self.high_bits) - 1
    }

    /// Unpacks a head's block of a page to the codes and scales of [`super::KvType::Q8_0`], still rotated.
    #[inline(always)]
    pub fn unpack<'a>(
        self,
        part: KvPart,
        block: &'a [u8],
        dim: usize,
        unpacked: &'a mut Unpacked,
    ) -> (&'a [i8], &'a [f16]) {
        let (packed, numbers) = block.split_at(self.code_bytes(dim));
        let (scales, zeros) = numbers.split_at(size_of::<f16>() * PAGE_TOKENS * dim.div_ceil(BLOCK));
        let (low, high) = packed.split_at(PAGE_TOKENS * dim / 2);
        unpacked.resize(PAGE_TOKENS * dim, 0);
        macro_rules! join_parts {
            ($bits:literal, $zero:literal: $($part:literal)*) => {
                $(join::<$bits, $part>(low, high, $zero, unpacked);)*
            };
        }
        if self.has_zeros {
            join_parts!(1, 0: 0 1 2 3 4 5 6 7);
            add_zeros(part, bytemuck::cast_slice(zeros), dim, unpacked);
        } else {
            join_parts!(2, -32: 0 1 2 3);
        }
        (unpacked, bytemuck::cast_slice(scales))
    }
}

/// Joins low and high bits of the codes whose `BITS` high ones are the ones numbered `PART` of their bytes, and adds `zero`. The
/// shifts are constants, so that compilers make vectors of the loop.
#[inline(always)]
fn join<const BITS: usize, const PART: usize>(low: &[u8], high: &[u8], zero: i8, out: &mut [i8]) {
    let (len, per_half) = (high.len(), 4 / BITS);
    let low = &low[PART % per_half * len..][..len];
    for ((out, low), high) in out[PART * len..][..len].iter_mut().zip(low).zip(high) {
        let low = low >> (PART / per_half * 4) & 15;
        *out = (low | (high >> (BITS * PART) & ((1 << BITS) - 1)) << 4).wrapping_add_signed(zero) as i8;
    }
}

/// Adds each token's zero points, `[block][PAGE_TOKENS]`.
#[inline(always)]
fn add_zeros(part: KvPart, zeros: &[i8], dim: usize, codes: &mut [i8]) {
    let add = |(code, zero): (&mut i8, &i8)| *code = code.wrapping_add(*zero);
    match part {
        KvPart::Keys => {
            let blocks = codes.chunks_mut(BLOCK * PAGE_TOKENS).zip(zeros.as_chunks::<PAGE_TOKENS>().0);
            for (codes, zeros) in blocks {
                // Long enough that compilers make vectors of the loop.
                let zeros = [*zeros; 4];
                for codes in codes.chunks_mut(4 * PAGE_TOKENS) {
                    codes.iter_mut().zip(zeros.as_flattened()).for_each(add);
                }
            }
        }
        KvPart::Values => {
            for (token, codes) in codes.chunks_exact_mut(dim).enumerate() {
                let (whole, rest) = codes.as_chunks_mut::<BLOCK>();
                for (block, codes) in whole.iter_mut().enumerate() {
                    let zero = zeros[block * PAGE_TOKENS + token];
                    codes.iter_mut().for_each(|code| *code = code.wrapping_add(zero));
                }
                if !rest.is_empty() {
                    let zero = zeros[dim / BLOCK * PAGE_TOKENS + token];
                    rest.iter_mut().for_each(|code| *code = code.wrapping_add(zero));
                }
            }
        }
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
#[inline(always)]
pub fn write(form: PackedForm, part: KvPart, block: &mut [u8], token: usize, row: &[f32]) {
    let head_dim = row.len();
    let (codes, numbers) = block.split_at_mut(form.code_bytes(head_dim));
    let (scales, zeros) = numbers.split_at_mut(size_of::<f16>() * PAGE_TOKENS * head_dim.div_ceil(BLOCK));
    let (scales, zeros): (&mut [f16], &mut [i8]) =
        (bytemuck::cast_slice_mut(scales), bytemuck::cast_slice_mut(zeros));
    let rotated_together = part_len(head_dim);
    let mut rotated = [0.0; MOST_ROTATED];
    let mut dim = 0;
    for row in row.chunks(rotated_together.max(BLOCK)) {
        let rotated = &mut rotated[..row.len()];
        rotated.copy_from_slice(row);
        rotate(rotated, rotated_together);
        for values in rotated.chunks(BLOCK) {
            let (scale, zero) = scale_and_zero(form, values);
            let at = dim / BLOCK * PAGE_TOKENS + token;
            scales[at] = scale;
            if form.has_zeros {
                zeros[at] = zero;
            }
            let inverse = inverse_of(scale);
            let first = part.index(head_dim, token, dim);
            let step = part.index(head_dim, token, dim + 1) - first;
            let (mut row, zero) = ([0; BLOCK], f32::from(zero));
            for (code, value) in row.iter_mut().zip(values) {
                *code = ((value * inverse).round_ties_even() - zero).clamp(0.0, form.most()) as u8;
            }
            form.set_codes(codes, (first, step), row[..values.len()].iter().copied());
            dim += values.len();
        }
    }
}

#[inline(always)]
fn inverse_of(scale: f16) -> f32 {
    if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() }
}

/// Returns the scale and the zero point of a block of up to 32 values.
#[inline(always)]
fn scale_and_zero(form: PackedForm, values: &[f32]) -> (f16, i8) {
    let extreme = |is_beyond: fn(f32, f32) -> bool| {
        let further = |a: f32, b: f32| if is_beyond(b, a) || b.is_nan() { b } else { a };
        values.iter().copied().reduce(further).unwrap_or_default()
    };
    let finite =
        |scale: f32| Some(f16::from_f32(scale)).filter(|scale| scale.is_finite()).unwrap_or(f16::NAN);
    if !form.has_zeros {
        return (finite(extreme(|b, a| b.abs() > a.abs()) / -32.0), -32);
    }
    let [least, most] = [extreme(|b, a| b < a), extreme(|b, a| b > a)];
    let range = most - least;
    // Values far from zero get a coarser scale, so that code and zero point together are within a byte.
    if !range.is_finite() {
        return (f16::NAN, 0);
    }
    // The finest scale whose codes reach both ends, of values on both sides of zero; of others less than a step is lost at the end
    // near to it. Code and zero point together are within a byte.
    let exact = (least * form.most() / range).clamp(-128.0, 127.0 - form.most());
    let half_step = range / form.most() / 2.0;
    let candidates = [exact.floor(), exact.ceil()].map(|zero| {
        let low = if least < -half_step { least / zero } else { 0.0 };
        let high = if most > half_step { most / (zero + form.most()) } else { 0.0 };
        (low.abs().max(high), zero)
    });
    let (scale, zero) = if candidates[1].0 < candidates[0].0 { candidates[1] } else { candidates[0] };
    (finite(scale), zero as i8)
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
        // Of 32 * 33 codes, those at 1 and 17 are 2 and 34: low bits 2 and 2, high bits 0 and 2.
        assert_eq!((six[1] & 15, six[17] & 15), (2, 2));
        assert_eq!((six[16 * 33 + 1] & 3, six[16 * 33 + 17] & 3), (0, 2));
        let number = |row: &[u8], at: usize| f16::from_le_bytes([row[at], row[at + 1]]).to_f32();
        assert_eq!(number(&six, 33 * 24), 1.0);
        let five = written(PackedForm::FIVE, KvPart::Values, &row, 0);
        assert_eq!(five.len(), PAGE_TOKENS * (21 + 3 * 2));
        assert_eq!((five[1] & 15, five[17] & 15), (1, 1));
        assert_eq!((five[16 * 33 + 1] & 1, five[16 * 33 + 17] & 1), (0, 1));
        // The last token's codes 0 and 31 are at 1023 and 1054: in the second half and in the last eighth.
        let last = written(PackedForm::FIVE, KvPart::Values, &row, 31);
        assert_eq!((last[1023 - 528] >> 4, last[528 + 1023 - 7 * 132] >> 7), (0, 0));
        assert_eq!((last[1054 - 528] >> 4, last[528 + 1054 - 7 * 132] >> 7), (15, 1));
        let (scales, zeros) = (33 * 20, 33 * 20 + 2 * 2 * PAGE_TOKENS);
        assert_eq!((number(&five, scales), five[zeros] as i8), (2.0, -16));
        // A value alone is far from zero: code 31 and zero point 96 are 127 of its scale.
        let alone = (number(&five, scales + 2 * PAGE_TOKENS), five[zeros + PAGE_TOKENS] as i8);
        assert_eq!(alone, (f16::from_f32(7.0 / 127.0).to_f32(), 96));
    }

    #[test]
    fn a_page_reads_as_its_codes_say() {
        for form in FORMS {
            for (part, dim) in
                [KvPart::Keys, KvPart::Values].into_iter().flat_map(|part| [8, 33, 64].map(|dim| (part, dim)))
            {
                for shift in [0.0, 3.0, -90.0] {
                    let row: Vec<f32> = (0..dim).map(|i| (i as f32 * 1.7).sin() + shift).collect();
                    let mut rotated = row.clone();
                    rotate(&mut rotated, part_len(dim));
                    let (block, mut unpacked) = (written(form, part, &row, 5), Unpacked::new());
                    let (codes, scales) = form.unpack(part, &block, dim, &mut unpacked);
                    for (index, values) in rotated.chunks(BLOCK).enumerate() {
                        let scale = scales[index * PAGE_TOKENS + 5].to_f32();
                        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                        let range = values
                            .iter()
                            .fold(0f32, |range, a| values.iter().fold(range, |r, b| r.max(a - b)));
                        let step =
                            if form.has_zeros { (range / 31.0).max(largest / 127.0) } else { largest / 32.0 };
                        assert!(scale.abs() < 1.06 * step, "{scale} of {step}");
                        for (at, value) in values.iter().enumerate() {
                            let code = codes[part.index(dim, 5, index * BLOCK + at)];
                            let difference = (f32::from(code) * scale - value).abs();
                            assert!(difference < 1.1 * step, "{dim} {at}: {difference}, steps of {step}");
                        }
                    }
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
