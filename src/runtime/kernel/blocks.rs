//! File blocks of the types whose codes are indices of a table of values: llama.cpp's IQ, ternary, one-bit
//! and FP4 types.
//!
//! Every value is `scale * table[code]` with an f32 scale, and both factors and their product are exact. So a
//! decoded block holds what the file says, and the kernels multiply with it in integers (see
//! [`gemm`](super::gemm)).
//!
//! Source of the layouts: ggml's `ggml-common.h` (structs block_iq2_xxs ... block_nvfp4) and
//! `dequantize_row_*` in `ggml-quants.c`; OCP Microscaling Formats 1.0 for the values of FP4.

use half::f16;

use super::grids;

/// One file block of one row, decoded.
#[derive(Debug, Clone, Copy)]
pub struct RowBlock {
    /// Codes in the order of K; the first [`Dtype::block_len`](super::Dtype::block_len) are used.
    pub codes: [u8; 256],
    /// Bits of the f16 scale.
    pub d: u16,
    /// Bits of the f16 minimum; K-quants subtract it, so its sign is inverted here.
    pub min: u16,
    /// The scale for layouts that keep it as f32.
    pub wide: f32,
    pub sub_scales: [u8; 16],
    pub sub_mins: [u8; 16],
}

impl Default for RowBlock {
    fn default() -> Self {
        RowBlock { codes: [0; 256], d: 0, min: 0, wide: 0.0, sub_scales: [0; 16], sub_mins: [0; 16] }
    }
}

/// The scales within a block, in [`RowBlock::sub_scales`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubScales {
    /// None: the block's scale is that of all its values.
    None,
    /// A signed byte for every 32 values.
    Signed32,
    /// A signed byte for every 16 values.
    Signed16,
    /// An 8-bit float (E4M3 without a sign) for every 16 values.
    Float16,
}

/// A type whose codes are indices of a table.
pub struct Codebook {
    /// Decodes a file block: codes, `wide`, and the scales within the block; also `d` without these.
    pub read: fn(&[u8], &mut RowBlock),
    /// Values by code. A code that no block has stands for 0.
    pub values: [i8; 16],
    pub sub_scales: SubScales,
}

impl Codebook {
    /// Returns the least power of two that makes all values positive when it is added.
    pub const fn zero(&self) -> i32 {
        let (mut least, mut at) = (0, 0);
        while at < self.values.len() {
            if self.values[at] < least {
                least = self.values[at];
            }
            at += 1;
        }
        least.unsigned_abs().next_power_of_two() as i32
    }

    /// Returns the values plus [`Self::zero`]; `None` if they are the codes of `bits` bits themselves.
    pub const fn offset_values(&self, bits: usize) -> Option<[u8; 16]> {
        let (mut values, mut at, mut same) = ([0; 16], 0, true);
        while at < values.len() {
            values[at] = (self.values[at] as i32 + self.zero()) as u8;
            same = same && (values[at] as usize == at || at >= 1 << bits);
            at += 1;
        }
        if same { None } else { Some(values) }
    }

    /// Dequantises whole blocks of `block_bytes` bytes to `block_len` values each.
    pub fn dequantize(&self, bytes: &[u8], block_bytes: usize, out: &mut [f32], block_len: usize) {
        const GROUP: usize = 16;
        let mut row = RowBlock::default();
        for (bytes, out) in bytes.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
            (self.read)(bytes, &mut row);
            let groups = out.chunks_exact_mut(GROUP).zip(row.codes.chunks_exact(GROUP));
            for (index, (out, codes)) in groups.enumerate() {
                let scale = match self.sub_scales {
                    SubScales::None => row.wide,
                    SubScales::Signed32 => row.wide * f32::from(row.sub_scales[index / 2].cast_signed()),
                    SubScales::Signed16 => row.wide * f32::from(row.sub_scales[index].cast_signed()),
                    SubScales::Float16 => row.wide * e4m3(row.sub_scales[index]),
                };
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = scale * f32::from(self.values[usize::from(code & 15)]);
                }
            }
        }
    }
}

/// Returns an 8-bit float without a sign, divided by 256: its bits are those of the f16 that is 256 times as small.
pub fn e4m3(bits: u8) -> f32 {
    f16::from_bits(u16::from(bits) << 7).to_f32()
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}

/// Reads the scale at an offset, and multiplies it by a power of two for [`RowBlock::wide`].
fn read_scale(block: &[u8], at: usize, factor: f32, row: &mut RowBlock) {
    row.d = u16_at(block, at);
    row.wide = f16::from_bits(row.d).to_f32() * factor;
}

/// Decodes `BYTES` bytes of nibbles: the low ones are the first half of the values, the high ones the second.
pub fn read_nibbles<const BYTES: usize>(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes[..2 * BYTES].split_at_mut(BYTES);
    for ((byte, low), high) in bytes[..BYTES].iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Decodes 64 bytes of four 2-bit values: bits `2 * j` of byte `l` of a run of 32 are value `32 * j + l`.
pub fn read_pairs_of_bits(bytes: &[u8], codes: &mut [u8; 256]) {
    for (bytes, codes) in bytes[..64].chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (byte, code) in bytes.iter().zip(codes) {
                *code = byte >> (2 * j) & 3;
            }
        }
    }
}

const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Block layout: scale, 16 bytes with value `i` in the low nibble of byte `i`, value `i + 16` in the high one.
pub const IQ4_NL: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 1.0, row);
        read_nibbles::<16>(&block[2..], &mut row.codes);
    },
    values: IQ4_VALUES,
    sub_scales: SubScales::None,
};

/// Block layout: scale, upper two bits of eight scales in two bytes, their low nibbles in four, then eight times the
/// nibbles of [`IQ4_NL`]. A scale counts from -32.
pub const IQ4_XS: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 1.0, row);
        let high = u16_at(block, 2);
        for (sub, scale) in row.sub_scales[..8].iter_mut().enumerate() {
            let low = block[4 + sub / 2] >> (4 * (sub % 2)) & 15;
            *scale = (low | ((high >> (2 * sub) & 3) as u8) << 4).wrapping_sub(32); // as i8
        }
        for (bytes, codes) in block[8..136].chunks_exact(16).zip(row.codes.chunks_exact_mut(32)) {
            read_nibbles::<16>(bytes, codes);
        }
    },
    values: IQ4_VALUES,
    sub_scales: SubScales::Signed32,
};

/// Stores eight codes: two bits from a grid, and a third one from `third_bits`, which is a sign in most types.
fn put_eight(grid: u16, third_bits: u8, codes: &mut [u8]) {
    for (at, code) in codes[..8].iter_mut().enumerate() {
        *code = (grid >> (2 * at) & 3) as u8 | (third_bits >> at & 1) << 2;
    }
}

/// Stores four codes: three bits from a grid, and the sign.
fn put_four(grid: u16, signs: u8, codes: &mut [u8]) {
    for (at, code) in codes[..4].iter_mut().enumerate() {
        *code = (grid >> (3 * at) & 7) as u8 | (signs >> at & 1) << 3;
    }
}

/// Returns eight signs of which seven are stored: the number of negative ones is even.
fn eight_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// Returns the odd scale `2 * number + 1`.
fn odd(number: u8) -> u8 {
    2 * number + 1
}

const IQ2_VALUES: [i8; 16] = [8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Block layout: scale; for each 32 values four indices of a byte, then 32 bits: four times seven signs, and a scale.
pub const IQ2_XXS: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 0.125, row);
        for (sub, codes) in row.codes.chunks_exact_mut(32).enumerate() {
            let at = 2 + 8 * sub;
            let signs = u32_at(block, at + 4);
            row.sub_scales[sub] = odd((signs >> 28) as u8);
            for (eight, codes) in codes.chunks_exact_mut(8).enumerate() {
                let grid = grids::IQ2_XXS[usize::from(block[at + eight])];
                put_eight(grid, eight_signs(signs >> (7 * eight)), codes);
            }
        }
    },
    values: IQ2_VALUES,
    sub_scales: SubScales::Signed32,
};

/// Decodes 8 bytes of nibbles, two scales for each 32 values.
fn read_odd_scales(bytes: &[u8], row: &mut RowBlock) {
    for (byte, scales) in bytes[..8].iter().zip(row.sub_scales.as_chunks_mut::<2>().0) {
        *scales = [odd(byte & 15), odd(byte >> 4)];
    }
}

/// Block layout: scale; for each 8 values 16 bits: index of nine, seven signs; eight bytes of scales.
pub const IQ2_XS: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 0.125, row);
        read_odd_scales(&block[66..], row);
        for (eight, codes) in row.codes.chunks_exact_mut(8).enumerate() {
            let both = u16_at(block, 2 + 2 * eight);
            put_eight(grids::IQ2_XS[usize::from(both & 511)], eight_signs(u32::from(both >> 9)), codes);
        }
    },
    values: IQ2_VALUES,
    sub_scales: SubScales::Signed16,
};

/// Block layout: scale; for each 8 values a byte, the low bits of an index; as many bytes of signs; for each 32 values a
/// byte with the two high bits of four indices; eight bytes of scales.
pub const IQ2_S: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 0.125, row);
        read_odd_scales(&block[74..], row);
        for (eight, codes) in row.codes.chunks_exact_mut(8).enumerate() {
            let high = usize::from(block[66 + eight / 4] >> (2 * (eight % 4)) & 3);
            let index = usize::from(block[2 + eight]) | high << 8;
            put_eight(grids::IQ2_S[index], block[34 + eight], codes);
        }
    },
    values: IQ2_VALUES,
    sub_scales: SubScales::Signed16,
};

/// Block layout: scale; for each 4 values a byte, the index; for each 32 values 32 bits as in [`IQ2_XXS`].
pub const IQ3_XXS: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 0.25, row);
        for (sub, codes) in row.codes.chunks_exact_mut(32).enumerate() {
            let signs = u32_at(block, 66 + 4 * sub);
            row.sub_scales[sub] = odd((signs >> 28) as u8);
            for (four, codes) in codes.chunks_exact_mut(4).enumerate() {
                let eight = eight_signs(signs >> (7 * (four / 2)));
                let grid = grids::IQ3_XXS[usize::from(block[2 + 8 * sub + four])];
                put_four(grid, eight >> (4 * (four % 2)), codes);
            }
        }
    },
    values: [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62],
    sub_scales: SubScales::Signed32,
};

/// Block layout: scale; for each 4 values a byte, the low bits of an index; for each 32 values a byte with the ninth bits;
/// for each 8 values a byte of signs; four bytes with a scale of four bits for each 32 values.
pub const IQ3_S: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 1.0, row);
        for (sub, codes) in row.codes.chunks_exact_mut(32).enumerate() {
            row.sub_scales[sub] = odd(block[106 + sub / 2] >> (4 * (sub % 2)) & 15);
            for (four, codes) in codes.chunks_exact_mut(4).enumerate() {
                let ninth = usize::from(block[66 + sub] >> four & 1);
                let grid = grids::IQ3_S[usize::from(block[2 + 8 * sub + four]) | ninth << 8];
                put_four(grid, block[74 + 4 * sub + four / 2] >> (4 * (four % 2)), codes);
            }
        }
    },
    values: [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15],
    sub_scales: SubScales::Signed32,
};

/// Eight times -1, 0 and 1, plus 1 or, with the third bit, minus 1.
const IQ1_VALUES: [i8; 16] = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Returns the third bits of eight codes that are all shifted down, or none.
fn shifted_down(is_set: bool) -> u8 {
    if is_set { 0xff } else { 0 }
}

/// Block layout: scale; for each 8 values a byte, the low bits of an index; for each 32 values 16 bits: four times three
/// high bits, a scale of three, and the direction of the shift.
pub const IQ1_S: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 0.125, row);
        for (sub, codes) in row.codes.chunks_exact_mut(32).enumerate() {
            let high = u16_at(block, 34 + 2 * sub);
            row.sub_scales[sub] = odd((high >> 12 & 7) as u8);
            for (eight, codes) in codes.chunks_exact_mut(8).enumerate() {
                let index =
                    usize::from(block[2 + 4 * sub + eight]) | usize::from(high >> (3 * eight) & 7) << 8;
                put_eight(grids::IQ1[index], shifted_down(high & 0x8000 != 0), codes);
            }
        }
    },
    values: IQ1_VALUES,
    sub_scales: SubScales::Signed32,
};

/// Block layout: for each 8 values a byte, the low bits of an index, then a nibble: three high bits, and the direction of
/// the shift; four times 16 bits: four scales of three bits, and a nibble of the block's scale, the lowest first.
pub const IQ1_M: Codebook = Codebook {
    read: |block, row| {
        let packed: [u16; 4] = std::array::from_fn(|at| u16_at(block, 48 + 2 * at));
        row.d = packed.iter().rev().fold(0, |bits, packed| bits << 4 | packed >> 12);
        row.wide = f16::from_bits(row.d).to_f32() * 0.125;
        for (sub, scale) in row.sub_scales.iter_mut().enumerate() {
            *scale = odd((packed[sub / 4] >> (3 * (sub % 4)) & 7) as u8);
        }
        for (eight, codes) in row.codes.chunks_exact_mut(8).enumerate() {
            let high = block[32 + eight / 2] >> (4 * (eight % 2));
            let index = usize::from(block[eight]) | usize::from(high & 7) << 8;
            put_eight(grids::IQ1[index], shifted_down(high & 8 != 0), codes);
        }
    },
    values: IQ1_VALUES,
    sub_scales: SubScales::Signed16,
};

/// Values of two bits; three bits' worth of codes is never reached by ternary blocks, but a block may hold it.
const FROM_MINUS_ONE: [i8; 16] = [-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Block layout: 128 signs, lowest bit first, after the scale.
pub const Q1_0: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 1.0, row);
        for (byte, codes) in block[2..18].iter().zip(row.codes.chunks_exact_mut(8)) {
            for (bit, code) in codes.iter_mut().enumerate() {
                *code = byte >> bit & 1;
            }
        }
    },
    values: [-1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    sub_scales: SubScales::None,
};

/// Block layout: 64 numbers of two bits, lowest bits first, after the scale.
pub const Q2_0: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 0, 1.0, row);
        for (byte, codes) in block[2..18].iter().zip(row.codes.chunks_exact_mut(4)) {
            for (at, code) in codes.iter_mut().enumerate() {
                *code = byte >> (2 * at) & 3;
            }
        }
    },
    values: FROM_MINUS_ONE,
    sub_scales: SubScales::None,
};

/// Decodes digits of base 3: a byte is a fraction of 256, and its first digit what exceeds 256 when it is tripled. Digit
/// `n` of byte `i` is value `n * bytes.len() + i`.
fn read_ternary(bytes: &[u8], codes: &mut [u8]) {
    for (n, codes) in codes.chunks_exact_mut(bytes.len()).enumerate() {
        for (byte, code) in bytes.iter().zip(codes) {
            let rest = byte.wrapping_mul([1, 3, 9, 27, 81][n]);
            *code = ((u16::from(rest) * 3) >> 8) as u8;
        }
    }
}

/// Block layout: 48 bytes of five ternary digits, in runs of 32 and 16, four bytes of four digits, scale.
pub const TQ1_0: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 52, 1.0, row);
        read_ternary(&block[..32], &mut row.codes[..160]);
        read_ternary(&block[32..48], &mut row.codes[160..240]);
        read_ternary(&block[48..52], &mut row.codes[240..]);
    },
    values: FROM_MINUS_ONE,
    sub_scales: SubScales::None,
};

/// Block layout: 64 bytes of four 2-bit numbers as in Q2_K, scale.
pub const TQ2_0: Codebook = Codebook {
    read: |block, row| {
        read_scale(block, 64, 1.0, row);
        read_pairs_of_bits(block, &mut row.codes);
    },
    values: FROM_MINUS_ONE,
    sub_scales: SubScales::None,
};

/// Twice the values of 4-bit floats, which have a sign, two bits of exponent and one of mantissa.
pub const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Returns the factor of [`FP4_VALUES`]: half of the power of two with this biased exponent.
pub fn mxfp4_scale(exponent: u8) -> f32 {
    2f64.powi(i32::from(exponent) - 128) as f32
}

/// Block layout: exponent, nibbles as in [`IQ4_NL`]. The kernels keep the scale in f16: below its range it becomes 0,
/// whose values are then below 2^-20.
pub const MXFP4: Codebook = Codebook {
    read: |block, row| {
        row.wide = mxfp4_scale(block[0]);
        row.d = f16::from_f32(row.wide).to_bits();
        read_nibbles::<16>(&block[1..], &mut row.codes);
    },
    values: FP4_VALUES,
    sub_scales: SubScales::None,
};

/// Largest exponent of an MXFP4 block whose scale f16 can hold.
pub const MAX_MXFP4_EXPONENT: u8 = 128 + 15;

/// Block layout: f32 factor of the tensor (which GGUF has in a tensor of its own), four scales of 16 values, 32 bytes of
/// nibbles, of which 8 hold 16 values as in [`IQ4_NL`]. Only the scale 0x7f is not a number; ggml takes it as 0, and
/// ignores the sign.
pub const NVFP4: Codebook = Codebook {
    read: |block, row| {
        // Half of the value, because the table has twice the values, and 256 times what `e4m3` returns.
        row.wide = f32::from_bits(u32_at(block, 0)) * 128.0;
        for (scale, byte) in row.sub_scales.iter_mut().zip(&block[4..8]) {
            *scale = if *byte == 0x7f { 0 } else { byte & 0x7f };
        }
        for (bytes, codes) in block[8..40].chunks_exact(8).zip(row.codes.chunks_exact_mut(16)) {
            read_nibbles::<8>(bytes, codes);
        }
    },
    values: FP4_VALUES,
    sub_scales: SubScales::Float16,
};
