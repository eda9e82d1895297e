//! The quantised formats in the kernels' layout: unsigned codes of a few bits, with scales.
//!
//! Every value is `scale * (code - ZERO) + min`. A *tile* is 16 rows of 32 consecutive values, a *unit* the smallest run
//! of tiles along K that holds whole file blocks and whole cache lines. A unit lies in memory as
//!
//! ```text
//! scales | low bits, tile by tile | high bits, tile by tile
//! ```
//!
//! Codes of a tile are in 8 groups of 4 values of K: byte `4 * row + j` of group `g` is the code of value `4 * g +
//! j`. Its low `LOW` bits lie in byte `4 * row + j` of vector `g / (8 / LOW)`, at bit `LOW * (g % (8 / LOW))`; the
//! high bits likewise. `vpdpbusd` takes them in this order, and the layout takes as many bytes as the file.
//!
//! Source of the file formats: ggml's `ggml-common.h` (structs block_q4_0 ... block_q6_K) and the layouts that its
//! `dequantize_row_*` functions define.

use half::f16;

use crate::Dtype;
use crate::quant::{MXFP4_CODES, mxfp4_scale};

/// Rows of a tile and of a packed panel.
pub const ROWS: usize = 16;

/// Values of K per tile, and per activation scale.
pub const BLOCK: usize = 32;

/// Groups of four values per tile.
pub const GROUPS: usize = BLOCK / 4;

/// Bytes of one group of a tile: four codes for each row.
pub const GROUP_BYTES: usize = ROWS * 4;

/// Codes of one tile, one byte each.
pub type CodeTile = [[u8; GROUP_BYTES]; GROUPS];

pub const EMPTY_TILE: CodeTile = [[0; GROUP_BYTES]; GROUPS];

/// Layout of a unit's scales. `f16[16]` is one number per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// Two tiles: `d f16[16]` each.
    Block,
    /// Two tiles: `d f16[16]` each, then `min f16[16]` each.
    BlockMin,
    /// Eight tiles: `d f16[16]`, `-dmin f16[16]`, `scale u8[8][16]`, `min u8[8][16]`.
    Super32,
    /// Eight tiles: `d f16[16]`, 32 bytes unused, `scale i8[16][16]`: one for every 16 values.
    Super16,
    /// Eight tiles: `d f16[16]`, `-dmin f16[16]`, `scale | min << 4` as `u8[16][16]`: one for every 16 values.
    Super16Min,
}

impl Scales {
    pub const fn tiles(self) -> usize {
        match self {
            Scales::Block | Scales::BlockMin => 2,
            Scales::Super32 | Scales::Super16 | Scales::Super16Min => 8,
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Scales::Block => 64,
            Scales::BlockMin => 128,
            Scales::Super32 | Scales::Super16 | Scales::Super16Min => 320,
        }
    }

    pub const fn has_min(self) -> bool {
        matches!(self, Scales::BlockMin | Scales::Super32 | Scales::Super16Min)
    }

    /// Returns the scales per row of a tile: one for its 32 values, or one for each half.
    pub const fn per_tile(self) -> usize {
        match self {
            Scales::Block | Scales::BlockMin | Scales::Super32 => 1,
            Scales::Super16 | Scales::Super16Min => 2,
        }
    }
}

/// One file block of one row, decoded.
#[derive(Debug, Clone, Copy)]
pub struct RowBlock {
    /// Codes in the order of K; the first [`Dtype::block_len`] are used.
    pub codes: [u8; 256],
    /// Bits of the f16 scale.
    pub d: u16,
    /// Bits of the f16 minimum; K-quants subtract it, so its sign is inverted here.
    pub min: u16,
    pub sub_scales: [u8; 16],
    pub sub_mins: [u8; 16],
}

impl Default for RowBlock {
    fn default() -> Self {
        RowBlock { codes: [0; 256], d: 0, min: 0, sub_scales: [0; 16], sub_mins: [0; 16] }
    }
}

/// A quantised format.
pub trait QuantFormat: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;
    /// Bits of a code in the low part: 2, 4 or 8.
    const LOW: usize;
    /// Bits of a code in the high part: 0, 1 or 2.
    const HIGH: usize;
    /// The code of zero, a power of two; 0 for formats with a minimum.
    const ZERO: i32;
    const SCALES: Scales;

    /// Tiles per unit.
    const TILES: usize = Self::SCALES.tiles();
    const LOW_BYTES: usize = GROUP_BYTES * Self::LOW;
    const HIGH_BYTES: usize = GROUP_BYTES * Self::HIGH;
    const UNIT_BYTES: usize = Self::SCALES.bytes() + Self::TILES * (Self::LOW_BYTES + Self::HIGH_BYTES);

    /// Decodes a file block of [`Dtype::block_bytes`] bytes.
    fn read(block: &[u8], row: &mut RowBlock);

    /// Returns the offset of the low bits of tile `tile` in a unit.
    fn low_at(tile: usize) -> usize {
        Self::SCALES.bytes() + tile * Self::LOW_BYTES
    }

    /// Returns the offset of the high bits of tile `tile` in a unit.
    fn high_at(tile: usize) -> usize {
        Self::SCALES.bytes() + Self::TILES * Self::LOW_BYTES + tile * Self::HIGH_BYTES
    }
}

/// Runs `$body` with `$format` bound to the [`QuantFormat`] of a dtype; `$other` for plain floats.
macro_rules! with_format {
    ($dtype:expr, $format:ident => $body:expr, $other:expr) => {{
        use $crate::Dtype;
        use $crate::gemm::format as f;
        macro_rules! arm {
            ($name:ident) => {{
                type $format = f::$name;
                $body
            }};
        }
        match $dtype {
            Dtype::Q4_0 => arm!(Q4_0),
            Dtype::Q4_1 => arm!(Q4_1),
            Dtype::Q5_0 => arm!(Q5_0),
            Dtype::Q5_1 => arm!(Q5_1),
            Dtype::Q8_0 => arm!(Q8_0),
            Dtype::Q2K => arm!(Q2K),
            Dtype::Q3K => arm!(Q3K),
            Dtype::Q4K => arm!(Q4K),
            Dtype::Q5K => arm!(Q5K),
            Dtype::Q6K => arm!(Q6K),
            Dtype::Mxfp4 => arm!(Mxfp4),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => $other,
        }
    }};
}
pub(super) use with_format;

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Inverts the sign of an f16.
const fn negated(bits: u16) -> u16 {
    bits ^ 0x8000
}

/// Decodes 16 bytes of nibbles: the low ones are values 0..16, the high ones 16..32.
fn read_nibbles(bytes: &[u8], codes: &mut [u8; 256]) {
    for (j, byte) in bytes[..16].iter().enumerate() {
        codes[j] = byte & 15;
        codes[j + 16] = byte >> 4;
    }
}

/// Adds 32 bits, one per value, above the nibbles.
fn add_fifth_bits(bytes: &[u8], codes: &mut [u8; 256]) {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (j, code) in codes[..32].iter_mut().enumerate() {
        *code |= ((bits >> j & 1) as u8) << 4;
    }
}

/// Decodes the 6-bit scales and minima of Q4_K and Q5_K, packed into 12 bytes.
fn read_scales_6bit(bytes: &[u8], row: &mut RowBlock) {
    for j in 0..4 {
        row.sub_scales[j] = bytes[j] & 63;
        row.sub_mins[j] = bytes[j + 4] & 63;
        row.sub_scales[j + 4] = bytes[j + 8] & 15 | bytes[j] >> 6 << 4;
        row.sub_mins[j + 4] = bytes[j + 8] >> 4 | bytes[j + 4] >> 6 << 4;
    }
}

/// Decodes 128 bytes of nibbles: in each run of 32 bytes the low ones are 32 values, the high ones the next 32.
fn read_super_nibbles(bytes: &[u8], codes: &mut [u8; 256]) {
    for (bytes, codes) in bytes[..128].chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        let (low, high) = codes.split_at_mut(32);
        for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}

/// Decodes 64 bytes of four 2-bit values: bits `2 * j` of byte `l` of a run of 32 are value `32 * j + l`.
fn read_pairs_of_bits(bytes: &[u8], codes: &mut [u8; 256]) {
    for (bytes, codes) in bytes[..64].chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (j, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (byte, code) in bytes.iter().zip(codes) {
                *code = byte >> (2 * j) & 3;
            }
        }
    }
}

macro_rules! format {
    ($(#[$meta:meta])* $name:ident, $dtype:ident, $low:literal + $high:literal bits, zero $zero:literal, $scales:ident,
     |$block:ident, $row:ident| $read:block) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl QuantFormat for $name {
            const DTYPE: Dtype = Dtype::$dtype;
            const LOW: usize = $low;
            const HIGH: usize = $high;
            const ZERO: i32 = $zero;
            const SCALES: Scales = Scales::$scales;

            #[inline(never)]
            fn read($block: &[u8], $row: &mut RowBlock) $read
        }
    };
}

format!(Q4_0, Q4_0, 4 + 0 bits, zero 8, Block, |block, row| {
    row.d = u16_at(block, 0);
    read_nibbles(&block[2..], &mut row.codes);
});

format!(Q4_1, Q4_1, 4 + 0 bits, zero 0, BlockMin, |block, row| {
    row.d = u16_at(block, 0);
    row.min = u16_at(block, 2);
    read_nibbles(&block[4..], &mut row.codes);
});

format!(Q5_0, Q5_0, 4 + 1 bits, zero 16, Block, |block, row| {
    row.d = u16_at(block, 0);
    read_nibbles(&block[6..], &mut row.codes);
    add_fifth_bits(&block[2..], &mut row.codes);
});

format!(Q5_1, Q5_1, 4 + 1 bits, zero 0, BlockMin, |block, row| {
    row.d = u16_at(block, 0);
    row.min = u16_at(block, 2);
    read_nibbles(&block[8..], &mut row.codes);
    add_fifth_bits(&block[4..], &mut row.codes);
});

format!(Q8_0, Q8_0, 8 + 0 bits, zero 128, Block, |block, row| {
    row.d = u16_at(block, 0);
    for (code, byte) in row.codes.iter_mut().zip(&block[2..34]) {
        *code = byte ^ 0x80; // signed to offset
    }
});

format!(Q4K, Q4K, 4 + 0 bits, zero 0, Super32, |block, row| {
    row.d = u16_at(block, 0);
    row.min = negated(u16_at(block, 2));
    read_scales_6bit(&block[4..16], row);
    read_super_nibbles(&block[16..], &mut row.codes);
});

format!(Q5K, Q5K, 4 + 1 bits, zero 0, Super32, |block, row| {
    row.d = u16_at(block, 0);
    row.min = negated(u16_at(block, 2));
    read_scales_6bit(&block[4..16], row);
    read_super_nibbles(&block[48..], &mut row.codes);
    for (j, codes) in row.codes.chunks_exact_mut(32).enumerate() {
        for (code, bits) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (bits >> j & 1) << 4;
        }
    }
});

format!(Q6K, Q6K, 4 + 2 bits, zero 32, Super16, |block, row| {
    let (low, high) = (&block[..128], &block[128..192]);
    row.sub_scales.copy_from_slice(&block[192..208]);
    row.d = u16_at(block, 208);
    for (n, codes) in row.codes.chunks_exact_mut(128).enumerate() {
        let (low, high) = (&low[64 * n..][..64], &high[32 * n..][..32]);
        for l in 0..32 {
            codes[l] = low[l] & 15 | (high[l] & 3) << 4;
            codes[l + 32] = low[l + 32] & 15 | (high[l] >> 2 & 3) << 4;
            codes[l + 64] = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
            codes[l + 96] = low[l + 32] >> 4 | high[l] >> 6 << 4;
        }
    }
});

format!(Q3K, Q3K, 2 + 1 bits, zero 4, Super16, |block, row| {
    read_pairs_of_bits(&block[32..96], &mut row.codes);
    for (j, codes) in row.codes.chunks_exact_mut(32).enumerate() {
        for (code, bits) in codes.iter_mut().zip(&block[..32]) {
            *code |= (bits >> j & 1) << 2;
        }
    }
    let packed = &block[96..108];
    for (i, scale) in row.sub_scales.iter_mut().enumerate() {
        let low = packed[i % 8] >> (i / 8 * 4) & 15;
        let high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
        *scale = (low | high << 4).wrapping_sub(32); // as i8
    }
    row.d = u16_at(block, 108);
});

format!(Q2K, Q2K, 2 + 0 bits, zero 0, Super16Min, |block, row| {
    for (i, byte) in block[..16].iter().enumerate() {
        row.sub_scales[i] = byte & 15;
        row.sub_mins[i] = byte >> 4;
    }
    read_pairs_of_bits(&block[16..80], &mut row.codes);
    row.d = u16_at(block, 80);
    row.min = negated(u16_at(block, 82));
});

// Twice a 4-bit float is a whole number within 12, so five bits hold it and no kernel needs a table. A scale below
// f16's range becomes 0: its values are below 2^-20.
format!(Mxfp4, Mxfp4, 4 + 1 bits, zero 16, Block, |block, row| {
    row.d = f16::from_f32(mxfp4_scale(block[0])).to_bits();
    read_nibbles(&block[1..], &mut row.codes);
    for code in &mut row.codes[..BLOCK] {
        *code = (16 + MXFP4_CODES[usize::from(*code)]) as u8;
    }
});

/// Largest exponent of an MXFP4 block whose scale f16 can hold.
pub const MAX_MXFP4_EXPONENT: u8 = 128 + 15;

/// The quantised types, for tests.
#[cfg(test)]
pub const ALL: [Dtype; 11] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q2K,
    Dtype::Q3K,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
    Dtype::Mxfp4,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_whole_cache_lines_and_hardly_larger_than_the_file() {
        for dtype in ALL {
            let (unit, tiles) = with_format!(dtype, F => (F::UNIT_BYTES, F::TILES), unreachable!());
            assert_eq!(unit % 64, 0, "{dtype:?}");
            let file = dtype.row_bytes(tiles * BLOCK).unwrap() * ROWS;
            let most = if dtype == Dtype::Mxfp4 { 130 } else { 106 }; // a fifth bit, and two bytes of scale
            assert!(unit >= file && unit * 100 <= file * most, "{dtype:?}: {unit} for {file}");
        }
    }
}
