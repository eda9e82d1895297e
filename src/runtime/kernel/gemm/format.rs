//! The quantised formats in the kernels' layout: unsigned codes of a few bits, with scales.
//!
//! Every value is `scale * (code - ZERO) + min`. In codebook formats memory holds indices, and a code is what
//! the table [`QuantFormat::BOOK`] has at the index: one shuffle of bytes. A *tile* is 16 rows of 32
//! consecutive values, a *unit* the smallest run of tiles along K that holds whole file blocks and whole
//! cache lines. A unit lies in memory as
//!
//! ```text
//! scales | low bits, tile by tile | high bits, tile by tile
//! ```
//!
//! Codes of a tile are in 8 groups of 4 values of K: byte `4 * row + j` of group `g` is the code of value
//! `4 * g + j`. Its low `LOW` bits lie in byte `4 * row + j` of vector `g / (8 / LOW)`, at bit
//! `LOW * (g % (8 / LOW))`; the high bits likewise. `vpdpbusd` takes them in this order, and the layout takes
//! as many bytes as the file.
//!
//! Source of the file formats: ggml's `ggml-common.h` (structs block_q4_0 ... block_q6_K) and the layouts
//! that its `dequantize_row_*` functions define; for codebook formats see [`blocks`].

use half::f16;

use crate::Dtype;
use crate::blocks::{self, Codebook, RowBlock, read_nibbles, read_pairs_of_bits};

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
    /// Eight tiles: `d f16[16]`, `-dmin f16[16]`, `scale | min << 4` as `u8[16][16]`: one for every 16 values.
    Super16Min,
    /// The tiles of a file block: `d f32[16]`.
    Shared,
    /// Eight tiles: `d f32[16]`, `scale i8[8][16]`.
    Signed32,
    /// Eight tiles: `d f32[16]`, `scale i8[16][16]`: one for every 16 values.
    Signed16,
    /// Two tiles: `d f32[16]`, `scale u8[4][16]`: an 8-bit float for every 16 values (see [`blocks::e4m3`]).
    Float16,
}

impl Scales {
    /// Returns the tiles per unit of a format with this many values per file block.
    pub const fn tiles(self, block_len: usize) -> usize {
        match self {
            Scales::Block | Scales::BlockMin | Scales::Float16 => 2,
            Scales::Super32 | Scales::Super16Min | Scales::Signed32 | Scales::Signed16 => 8,
            Scales::Shared => block_len / BLOCK,
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Scales::Block | Scales::Shared => 64,
            Scales::BlockMin | Scales::Float16 => 128,
            Scales::Signed32 => 192,
            Scales::Super32 | Scales::Super16Min | Scales::Signed16 => 320,
        }
    }

    pub const fn has_min(self) -> bool {
        matches!(self, Scales::BlockMin | Scales::Super32 | Scales::Super16Min)
    }

    /// Returns the scales per row of a tile: one for its 32 values, or one for each half.
    pub const fn per_tile(self) -> usize {
        match self {
            Scales::Block | Scales::BlockMin | Scales::Super32 | Scales::Shared | Scales::Signed32 => 1,
            Scales::Super16Min | Scales::Signed16 | Scales::Float16 => 2,
        }
    }
}

/// A quantised format.
pub trait QuantFormat: Copy + Send + Sync + 'static {
    const DTYPE: Dtype;
    /// Bits of a code in the low part: 1, 2, 4 or 8.
    const LOW: usize;
    /// Bits of a code in the high part: 0, 1 or 2.
    const HIGH: usize;
    /// The code of zero, a power of two; 0 for formats with a minimum.
    const ZERO: i32;
    const SCALES: Scales;
    /// Codes by stored index; `None` if codes are stored themselves.
    const BOOK: Option<[u8; 16]> = None;
    /// Bits of stored 8-bit codes that are inverted: aarch64 multiplies signed bytes, and finds them without their zero
    /// point in memory.
    const INVERTED: u8 = match Self::BOOK {
        None if Self::LOW == 8 && cfg!(target_arch = "aarch64") => Self::ZERO as u8,
        _ => 0,
    };

    /// Tiles per unit.
    const TILES: usize = Self::SCALES.tiles(Self::DTYPE.block_len());
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
            Dtype::Nvfp4 => arm!(Nvfp4),
            Dtype::Iq4Nl => arm!(Iq4Nl),
            Dtype::Iq4Xs => arm!(Iq4Xs),
            Dtype::Iq3S => arm!(Iq3S),
            Dtype::Iq3Xxs => arm!(Iq3Xxs),
            Dtype::Iq2S => arm!(Iq2S),
            Dtype::Iq2Xs => arm!(Iq2Xs),
            Dtype::Iq2Xxs => arm!(Iq2Xxs),
            Dtype::Iq1M => arm!(Iq1M),
            Dtype::Iq1S => arm!(Iq1S),
            Dtype::Tq2_0 => arm!(Tq2_0),
            Dtype::Tq1_0 => arm!(Tq1_0),
            Dtype::Q2_0 => arm!(Q2_0),
            Dtype::Q1_0 => arm!(Q1_0),
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
    read_nibbles::<16>(&block[2..], &mut row.codes);
});

format!(Q4_1, Q4_1, 4 + 0 bits, zero 0, BlockMin, |block, row| {
    row.d = u16_at(block, 0);
    row.min = u16_at(block, 2);
    read_nibbles::<16>(&block[4..], &mut row.codes);
});

format!(Q5_0, Q5_0, 4 + 1 bits, zero 16, Block, |block, row| {
    row.d = u16_at(block, 0);
    read_nibbles::<16>(&block[6..], &mut row.codes);
    add_fifth_bits(&block[2..], &mut row.codes);
});

format!(Q5_1, Q5_1, 4 + 1 bits, zero 0, BlockMin, |block, row| {
    row.d = u16_at(block, 0);
    row.min = u16_at(block, 2);
    read_nibbles::<16>(&block[8..], &mut row.codes);
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

format!(Q6K, Q6K, 4 + 2 bits, zero 32, Signed16, |block, row| {
    let (low, high) = (&block[..128], &block[128..192]);
    row.sub_scales.copy_from_slice(&block[192..208]);
    row.wide = f16::from_bits(u16_at(block, 208)).to_f32();
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

format!(Q3K, Q3K, 2 + 1 bits, zero 4, Signed16, |block, row| {
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
    row.wide = f16::from_bits(u16_at(block, 108)).to_f32();
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

macro_rules! codebook_format {
    ($name:ident, $low:literal + $high:literal bits, $scales:ident, $codebook:ident) => {
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl $name {
            const CODEBOOK: Codebook = blocks::$codebook;
        }

        impl QuantFormat for $name {
            const DTYPE: Dtype = Dtype::$name;
            const LOW: usize = $low;
            const HIGH: usize = $high;
            const ZERO: i32 = Self::CODEBOOK.zero();
            const SCALES: Scales = Scales::$scales;
            const BOOK: Option<[u8; 16]> = Self::CODEBOOK.offset_values($low + $high);

            #[inline(never)]
            fn read(block: &[u8], row: &mut RowBlock) {
                (Self::CODEBOOK.read)(block, row);
            }
        }
    };
}

codebook_format!(Iq4Nl, 4 + 0 bits, Block, IQ4_NL);
codebook_format!(Mxfp4, 4 + 0 bits, Block, MXFP4);
codebook_format!(Nvfp4, 4 + 0 bits, Float16, NVFP4);
codebook_format!(Iq4Xs, 4 + 0 bits, Signed32, IQ4_XS);
codebook_format!(Iq3S, 4 + 0 bits, Signed32, IQ3_S);
codebook_format!(Iq3Xxs, 4 + 0 bits, Signed32, IQ3_XXS);
codebook_format!(Iq2S, 2 + 1 bits, Signed16, IQ2_S);
codebook_format!(Iq2Xs, 2 + 1 bits, Signed16, IQ2_XS);
codebook_format!(Iq2Xxs, 2 + 1 bits, Signed32, IQ2_XXS);
codebook_format!(Iq1M, 2 + 1 bits, Signed16, IQ1_M);
codebook_format!(Iq1S, 2 + 1 bits, Signed32, IQ1_S);
codebook_format!(Tq2_0, 2 + 0 bits, Shared, TQ2_0);
codebook_format!(Tq1_0, 2 + 0 bits, Shared, TQ1_0);
codebook_format!(Q2_0, 2 + 0 bits, Shared, Q2_0);
codebook_format!(Q1_0, 1 + 0 bits, Shared, Q1_0);

/// The quantised types, for tests.
#[cfg(test)]
pub const ALL: [Dtype; 25] = [
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
    Dtype::Nvfp4,
    Dtype::Iq4Nl,
    Dtype::Iq4Xs,
    Dtype::Iq3S,
    Dtype::Iq3Xxs,
    Dtype::Iq2S,
    Dtype::Iq2Xs,
    Dtype::Iq2Xxs,
    Dtype::Iq1M,
    Dtype::Iq1S,
    Dtype::Tq2_0,
    Dtype::Tq1_0,
    Dtype::Q2_0,
    Dtype::Q1_0,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_whole_cache_lines_and_as_large_as_documented() {
        for dtype in ALL {
            let (unit, tiles) = with_format!(dtype, F => (F::UNIT_BYTES, F::TILES), unreachable!());
            assert_eq!(unit % 64, 0, "{dtype:?}");
            let file = dtype.row_bytes(tiles * BLOCK).unwrap() * ROWS;
            // Groups of values that share an index become one code each.
            let most = match dtype {
                Dtype::Iq1S | Dtype::Iq1M => 217,
                Dtype::Iq2Xxs | Dtype::Iq2Xs | Dtype::Iq2S => 164,
                Dtype::Iq3Xxs | Dtype::Iq3S => 143,
                Dtype::Tq1_0 => 126,
                Dtype::Q1_0 | Dtype::Q2_0 => 112, // the scale in f32
                _ => 106,
            };
            assert!(unit >= file && unit * 100 <= file * most, "{dtype:?}: {unit} for {file}");
        }
    }

    #[test]
    fn codes_of_a_table_are_its_values_above_a_power_of_two() {
        for dtype in ALL {
            with_format!(dtype, F => {
                let Some(book) = F::BOOK else { continue };
                assert!(F::ZERO.count_ones() == 1 && F::LOW + F::HIGH <= 4, "{dtype:?}");
                assert!(book.iter().any(|code| i32::from(*code) > F::ZERO), "{dtype:?}");
            }, unreachable!());
        }
        assert_eq!((Iq4Xs::ZERO, Iq3Xxs::ZERO, Iq3S::ZERO, Q1_0::ZERO), (128, 64, 16, 1));
        assert_eq!(Iq4Xs::BOOK.map(|book| (book[0], book[15])), Some((1, 241)));
        assert_eq!((Tq2_0::BOOK, Q4_0::BOOK), (None, None));
    }
}
