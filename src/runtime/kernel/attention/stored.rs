//! Layout of a KV head's rows in a page, and conversion of rows to it.
//!
//! Keys are `[head_dim][PAGE_TOKENS]`, so that a register holds one coordinate of many tokens and a score
//! needs no sum across lanes; values are `[PAGE_TOKENS][head_dim]`, and so are keys that hold the values. In
//! [`KvType::Q8_0`] both are signed bytes, followed by the scales in f16, `[block][PAGE_TOKENS]`: a token's
//! row is cut into blocks of [`BLOCK`] values, the last of which may be shorter. Rows of five and six bits are [`packed`], and
//! unpacked to that.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::lanes::VectorLanes;
use super::packed::{self, PackedForm, Unpacked};
use super::page::{BLOCK, KvPart, PAGE_TOKENS};
use crate::isa::dispatch;

/// Storage type of KV rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    F32,
    #[default]
    F16,
    /// Signed bytes with an f16 scale for each 32 values.
    Q8_0,
    /// Six bits for a value and an f16 scale for each 32, of rotated rows.
    Q6_0,
    /// Five bits for a value, an f16 scale and a zero point of a byte for each 32, of rotated rows.
    Q5_1,
}

impl KvType {
    /// All types.
    pub const ALL: [KvType; 5] = [KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q6_0, KvType::Q5_1];

    /// Returns the bytes of one head's keys or values of one token.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvType::F32 => 4 * head_dim,
            KvType::F16 => 2 * head_dim,
            KvType::Q8_0 => head_dim + 2 * head_dim.div_ceil(BLOCK),
            KvType::Q6_0 => PackedForm::SIX.row_bytes(head_dim),
            KvType::Q5_1 => PackedForm::FIVE.row_bytes(head_dim),
        }
    }

    /// Returns whether values are rounded to codes with a scale for each 32.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, KvType::F32 | KvType::F16)
    }

    /// Returns whether a head can have keys and values of these widths: values in packed keys must be whole parts of the rotation.
    pub fn fits(self, head_dim: usize, values: KvValues) -> bool {
        match values {
            KvValues::InKeys(dim) if self.packed().is_some() => {
                dim.is_multiple_of(packed::part_len(head_dim))
            }
            _ => true,
        }
    }

    /// Returns the form of [`packed`] rows.
    pub const fn packed(self) -> Option<PackedForm> {
        match self {
            KvType::Q6_0 => Some(PackedForm::SIX),
            KvType::Q5_1 => Some(PackedForm::FIVE),
            KvType::F32 | KvType::F16 | KvType::Q8_0 => None,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Q8_0 => "q8_0",
            KvType::Q6_0 => "q6_0",
            KvType::Q5_1 => "q5_1",
        }
    }
}

/// Place of a KV head's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvValues {
    /// In rows of their own, as wide as the keys.
    Own,
    /// In rows of their own, this many, fewer than a key has (MiMo V2).
    Narrow(usize),
    /// The first values of each key, this many (latent attention).
    InKeys(usize),
    /// Keys alone, those of an indexer.
    None,
}

impl KvValues {
    /// Returns the number of values of a head with keys of `head_dim`.
    pub const fn dim(self, head_dim: usize) -> usize {
        match self {
            KvValues::Own => head_dim,
            KvValues::Narrow(dim) | KvValues::InKeys(dim) => dim,
            KvValues::None => 0,
        }
    }

    /// Returns the length of the rows that hold the values.
    pub const fn row_dim(self, head_dim: usize) -> usize {
        match self {
            KvValues::Narrow(dim) => dim,
            KvValues::Own | KvValues::InKeys(_) | KvValues::None => head_dim,
        }
    }

    /// Returns the bytes of one head's keys and values of one token.
    pub const fn bytes(self, kv_type: KvType, head_dim: usize) -> usize {
        let keys = kv_type.row_bytes(head_dim);
        if self.num_rows() == 1 { keys } else { keys + kv_type.row_bytes(self.row_dim(head_dim)) }
    }

    /// Returns the number of rows of a token and head: a key and a value, or one for both.
    pub const fn num_rows(self) -> usize {
        match self {
            KvValues::Own | KvValues::Narrow(_) => 2,
            KvValues::InKeys(_) | KvValues::None => 1,
        }
    }

    /// Returns the layout of the keys: that of values if they hold the values.
    pub const fn key_layout(self) -> KvPart {
        match self {
            KvValues::InKeys(_) => KvPart::Values,
            KvValues::Own | KvValues::Narrow(_) | KvValues::None => KvPart::Keys,
        }
    }
}

dispatch! {
    /// Writes one token's row into a head's block of a page, `PAGE_TOKENS * row_bytes` bytes.
    pub fn write_row(kv_type: KvType, part: KvPart, block: &mut [u8], token: usize, row: &[f32]) = write_body
}

#[inline(always)]
fn write_body(kv_type: KvType, part: KvPart, block: &mut [u8], token: usize, row: &[f32]) {
    assert_eq!(block.len(), PAGE_TOKENS * kv_type.row_bytes(row.len()), "the block of a head");
    if let Some(form) = kv_type.packed() {
        return packed::write(form, part, block, token, row);
    }
    let at = |dim: usize| part.index(row.len(), token, dim);
    match kv_type {
        KvType::F32 => {
            let values: &mut [f32] = bytemuck::cast_slice_mut(block);
            row.iter().enumerate().for_each(|(dim, value)| values[at(dim)] = *value);
        }
        KvType::F16 => {
            let values: &mut [u16] = bytemuck::cast_slice_mut(block);
            let mut halves = [f16::ZERO; BLOCK];
            for (index, row) in row.chunks(BLOCK).enumerate() {
                let halves = &mut halves[..row.len()];
                halves.convert_from_f32_slice(row);
                for (offset, half) in halves.iter().enumerate() {
                    values[at(index * BLOCK + offset)] = half.to_bits();
                }
            }
        }
        _ => {
            let (codes, scales) = block.split_at_mut(PAGE_TOKENS * row.len());
            let (codes, scales): (&mut [i8], &mut [u16]) =
                (bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(scales));
            for (index, row) in row.chunks(BLOCK).enumerate() {
                let (scale, quantized) = quantize(row);
                scales[index * PAGE_TOKENS + token] = scale.to_bits();
                for (offset, code) in quantized[..row.len()].iter().enumerate() {
                    codes[at(index * BLOCK + offset)] = *code;
                }
            }
        }
    }
}

/// Quantises a row: `code = round(x / scale)`, ties to even, `scale = max|x| / 127` rounded to f16. Values that no
/// f16 can scale (infinities, NaN, magnitudes above eight million) get the scale NaN, so that a broken model is
/// noticed.
#[inline(always)]
fn quantize(row: &[f32]) -> (f16, [i8; BLOCK]) {
    let largest_bits = row.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    let scale = f16::from_f32(f32::from_bits(largest_bits) / 127.0);
    let mut codes = [0; BLOCK];
    if !scale.is_finite() {
        return (f16::NAN, codes);
    }
    if scale != f16::ZERO {
        let inverse = 1.0 / scale.to_f32();
        for (code, x) in codes.iter_mut().zip(row) {
            // If the scale was rounded down or has few bits, the largest code would exceed a byte.
            *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
    }
    (scale, codes)
}

/// Reads one token's row back.
pub fn read_row(kv_type: KvType, part: KvPart, block: &[u8], token: usize, row: &mut [f32]) {
    let head_dim = row.len();
    assert_eq!(block.len(), PAGE_TOKENS * kv_type.row_bytes(head_dim), "the block of a head");
    let mut unpacked = Unpacked::new();
    let (codes, scales) = match kv_type.packed() {
        Some(form) => form.unpack(part, block, head_dim, &mut unpacked),
        None if kv_type == KvType::Q8_0 => {
            let (codes, scales) = block.split_at(PAGE_TOKENS * head_dim);
            (bytemuck::cast_slice(codes), bytemuck::cast_slice(scales))
        }
        None => Default::default(),
    };
    for (dim, value) in row.iter_mut().enumerate() {
        let at = part.index(head_dim, token, dim);
        *value = match kv_type {
            KvType::F32 => bytemuck::cast_slice::<_, f32>(block)[at],
            KvType::F16 => bytemuck::cast_slice::<_, f16>(block)[at].to_f32(),
            _ => f32::from(codes[at]) * scales[dim / BLOCK * PAGE_TOKENS + token].to_f32(),
        };
    }
    if kv_type.packed().is_some() {
        packed::rotate(row, packed::part_len(head_dim));
    }
}

/// Copies the rows of `count` consecutive tokens from one head's block to another: block and first token of each.
///
/// # Panics
/// If a block is none of `head_dim`, or has fewer tokens.
pub fn copy_rows(
    kv_type: KvType,
    (part, head_dim): (KvPart, usize),
    from: (&[u8], usize),
    to: (&mut [u8], usize),
    count: usize,
) {
    let len = PAGE_TOKENS * kv_type.row_bytes(head_dim);
    assert!(from.0.len() == len && to.0.len() == len, "blocks of a head");
    assert!(from.1.max(to.1) + count <= PAGE_TOKENS, "tokens of a page");
    let element = match kv_type {
        KvType::F32 => size_of::<f32>(),
        KvType::F16 => size_of::<f16>(),
        _ => size_of::<i8>(),
    };
    let mut copy = |at: &dyn Fn(usize) -> usize, len: usize| {
        to.0[at(to.1)..][..len].copy_from_slice(&from.0[at(from.1)..][..len]);
    };
    // Numbers of blocks, `[block][PAGE_TOKENS]`; returns the place behind them.
    let mut copy_numbers = |start: usize, number: usize| {
        let end = start + PAGE_TOKENS * number * head_dim.div_ceil(BLOCK);
        for first in (start..end).step_by(PAGE_TOKENS * number) {
            copy(&|token| first + number * token, number * count);
        }
        end
    };
    if let Some(form) = kv_type.packed() {
        let codes = form.code_bytes(head_dim);
        let zeros = copy_numbers(codes, size_of::<f16>());
        if zeros < len {
            copy_numbers(zeros, size_of::<i8>());
        }
        for (dim, token) in (0..head_dim).flat_map(|dim| (0..count).map(move |token| (dim, token))) {
            let [source, target] = [from.1, to.1].map(|first| part.index(head_dim, first + token, dim));
            let code = form.code(&from.0[..codes], source);
            form.set_codes(&mut to.0[..codes], (target, 1), std::iter::once(code));
        }
        return;
    }
    if kv_type == KvType::Q8_0 {
        copy_numbers(PAGE_TOKENS * head_dim, size_of::<f16>());
    }
    match part {
        KvPart::Values => copy(&|token| token * head_dim * element, count * head_dim * element),
        KvPart::Keys => (0..head_dim)
            .for_each(|dim| copy(&|token| (dim * PAGE_TOKENS + token) * element, count * element)),
    }
}

/// A stored type for the kernels.
pub trait Stored {
    type Element: Copy + Default;
    /// True if each block of a row has a scale.
    const SCALED: bool;

    /// # Safety
    /// The processor has `V`'s instruction set; 16 elements can be read.
    unsafe fn load<V: VectorLanes>(from: *const Self::Element) -> V;
}

pub struct F32;
pub struct F16;
pub struct Q8;

impl Stored for F32 {
    type Element = f32;
    const SCALED: bool = false;

    #[inline(always)]
    unsafe fn load<V: VectorLanes>(from: *const f32) -> V {
        // SAFETY: by the trait's contract.
        unsafe { V::load_f32(from) }
    }
}

impl Stored for F16 {
    type Element = f16;
    const SCALED: bool = false;

    #[inline(always)]
    unsafe fn load<V: VectorLanes>(from: *const f16) -> V {
        // SAFETY: by the trait's contract.
        unsafe { V::load_f16(from) }
    }
}

impl Stored for Q8 {
    type Element = i8;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<V: VectorLanes>(from: *const i8) -> V {
        // SAFETY: by the trait's contract.
        unsafe { V::load_i8(from) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::isa::available;

    fn round_trip(kv_type: KvType, part: KvPart, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let len = PAGE_TOKENS * kv_type.row_bytes(rows[0].len());
        let mut memory = vec![0u64; len.div_ceil(8)];
        let block = &mut bytemuck::cast_slice_mut::<_, u8>(&mut memory)[..len];
        for (token, row) in rows.iter().enumerate() {
            write_row(Isa::Scalar, kv_type, part, block, token, row);
        }
        let read = |token: usize| {
            let mut row = vec![0.0; rows[0].len()];
            read_row(kv_type, part, block, token, &mut row);
            row
        };
        (0..rows.len()).map(read).collect()
    }

    #[test]
    fn rows_come_back_to_the_precision_of_their_type() {
        for head_dim in [4, 31, 32, 40, 80, 128] {
            let row = |token: usize| {
                (0..head_dim).map(|dim| ((token * 31 + dim * 7) as f32).sin() * (1 + token) as f32).collect()
            };
            let rows: Vec<Vec<f32>> = (0..PAGE_TOKENS).map(row).collect();
            for part in [KvPart::Keys, KvPart::Values] {
                assert_eq!(round_trip(KvType::F32, part, &rows), rows);
                let halves = round_trip(KvType::F16, part, &rows);
                let bytes = round_trip(KvType::Q8_0, part, &rows);
                for ((row, halves), bytes) in rows.iter().zip(halves).zip(bytes) {
                    for dim in 0..head_dim {
                        assert_eq!(halves[dim], f16::from_f32(row[dim]).to_f32());
                        let block = &row[dim / BLOCK * BLOCK..head_dim.min((dim / BLOCK + 1) * BLOCK)];
                        let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                        assert!((bytes[dim] - row[dim]).abs() <= largest / 127.0 * 0.51, "{head_dim} {dim}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_writes_the_same_bytes() {
        for (kv_type, dim) in KvType::ALL.into_iter().flat_map(|kind| [8, 40, 128].map(|dim| (kind, dim))) {
            for part in [KvPart::Keys, KvPart::Values] {
                let written = |isa: Isa| {
                    let mut memory =
                        vec![0x5555_5555_5555_5555u64; (PAGE_TOKENS * kv_type.row_bytes(dim)).div_ceil(8)];
                    let block = &mut bytemuck::cast_slice_mut::<_, u8>(&mut memory)
                        [..PAGE_TOKENS * kv_type.row_bytes(dim)];
                    for token in 0..PAGE_TOKENS {
                        // Halves of steps among them: 127 is the largest of the first block.
                        let value = |at: usize| ((token * 31 + at * 7) % 255) as f32 * 0.5 - 63.5;
                        let row: Vec<f32> =
                            (0..dim).map(|at| if at == 0 { 127.0 } else { value(at) }).collect();
                        write_row(isa, kv_type, part, block, token, &row);
                    }
                    memory
                };
                let expected = written(Isa::Scalar);
                for isa in available() {
                    assert!(written(isa) == expected, "{} {dim} {part:?} {isa:?}", kv_type.name());
                }
            }
        }
    }

    #[test]
    fn tiny_and_broken_rows_have_a_defined_result() {
        for tiny in [0.0, -0.0, 1e-9, 1e-45] {
            assert_eq!(round_trip(KvType::Q8_0, KvPart::Keys, &[vec![tiny; 33]])[0], [0.0; 33]);
        }
        // Scales with few bits: codes stay within a byte.
        let small = round_trip(KvType::Q8_0, KvPart::Values, &[vec![1.1e-5, -1.1e-5]]);
        assert!(small[0].iter().all(|x| x.abs() > 5e-6 && x.abs() < 2e-5), "{small:?}");
        for broken in [f32::NAN, f32::INFINITY, 1e7] {
            for kv_type in [KvType::Q8_0, KvType::Q6_0, KvType::Q5_1] {
                let row = &round_trip(kv_type, KvPart::Keys, &[vec![1.0, broken]])[0];
                assert!(row.iter().all(|x| x.is_nan()), "{} {broken}", kv_type.name());
            }
        }
    }

    #[test]
    fn copied_rows_read_as_the_originals() {
        for (kv_type, head_dim) in
            KvType::ALL.into_iter().flat_map(|kind| [8, 40, 576].map(|dim| (kind, dim)))
        {
            for part in [KvPart::Keys, KvPart::Values] {
                let len = PAGE_TOKENS * kv_type.row_bytes(head_dim);
                let mut memory = [vec![0u64; len.div_ceil(8)], vec![0u64; len.div_ceil(8)]];
                let [from, to] = &mut memory;
                let [from, to] = [from, to].map(|words| &mut bytemuck::cast_slice_mut::<_, u8>(words)[..len]);
                for token in 0..PAGE_TOKENS {
                    let row: Vec<f32> = (0..head_dim).map(|dim| ((token * 37 + dim) as f32).cos()).collect();
                    write_row(Isa::Scalar, kv_type, part, from, token, &row);
                }
                let read = |block: &[u8], token| {
                    let mut row = vec![0.0; head_dim];
                    read_row(kv_type, part, block, token, &mut row);
                    row
                };
                let copies = [(31, 0, 1), (0, 31, 1), (7, 7, 2), (12, 20, 4)];
                for (token, place, count) in copies {
                    copy_rows(kv_type, (part, head_dim), (from, token), (to, place), count);
                }
                for (token, place, count) in copies {
                    for index in 0..count {
                        let name = kv_type.name();
                        assert_eq!(read(to, place + index), read(from, token + index), "{name} {head_dim}");
                    }
                }
                assert_eq!(read(to, 1), vec![0.0; head_dim], "other rows stay");
            }
        }
    }

    #[test]
    fn row_bytes_count_scales_of_short_blocks() {
        assert_eq!([32, 33, 80, 128].map(|dim| KvType::Q8_0.row_bytes(dim)), [34, 37, 86, 136]);
    }
}
