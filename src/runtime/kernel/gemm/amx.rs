//! AMX: `tdpbssd` multiplies a tile of 16 activation rows with one of 16 weight rows, a block of 32 values
//! (or half of one) at a time. The vector units scale the results from memory, as [`gemm`](super) defines.
//!
//! Few rows use AVX-512. Panels are two packed ones, one after the other, of signed codes (minus their zero
//! point).
//!
//! The compiler does not know tile registers, so their contents never outlive a piece of assembly; only their
//! shape does. It is set once per thread and kind of panel. [`Kernels::leave`] sets the one that others have left,
//! because candle's kernels set theirs once per thread and rely on it.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::mem::{MaybeUninit, offset_of};
use std::ops::Range;

use super::activation::Activations;
use super::avx512::{self, Avx512Vnni};
use super::format::{BLOCK, GROUP_BYTES, GROUPS, QuantFormat, ROWS};
use super::tiles::{ActivationTile, TOKENS};
use super::{CodeLine, GemmInput, Kernels, MAX_WIDTH, Panels, SumsPtr, WeightPanel};

/// Number of activation rows up to which AVX-512 is faster; measured.
pub const MAX_DIRECT: usize = 24;

/// Requires amx-tile, amx-int8, permission to use them, and the features of [`Avx512Vnni`].
pub struct Amx;

impl Kernels for Amx {
    const WIDTH: usize = 2;
    const DIRECT_ROWS: usize = Avx512Vnni::DIRECT_ROWS;
    const PANEL_ROWS: usize = TOKENS;
    const PANEL_BLOCKS: usize = 128;
    const TOGETHER: usize = 4;

    fn max_direct() -> usize {
        MAX_DIRECT
    }

    unsafe fn direct<F: QuantFormat>(panel: &[u8], x: &Activations, first: usize, out: &mut [[f32; ROWS]]) {
        // SAFETY: by this function's contract.
        unsafe { Avx512Vnni::direct::<F>(panel, x, first, out) }
    }

    unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
        // SAFETY: by this function's contract.
        unsafe { unpack::<F>(panels, blocks, out) }
    }

    unsafe fn multiply<F: QuantFormat>(
        panel: &WeightPanel,
        x: GemmInput<'_>,
        [first, start]: [usize; 2],
        sums: SumsPtr,
    ) {
        let x = &x.tiles.rows(first)[start..];
        assert!(panel.blocks <= x.len(), "rows of one length");
        assert!(panel.blocks > 0 && panel.blocks.is_multiple_of(2), "whole units");
        // SAFETY: the features by this function's contract; the lengths by the assertions.
        unsafe {
            match (F::SCALES.per_tile(), F::SCALES.has_min()) {
                (1, false) => multiply(1, add_blocks, panel, x, start, sums),
                (1, true) => multiply(1, add_blocks_with_min, panel, x, start, sums),
                (_, false) => multiply(2, add_halves, panel, x, start, sums),
                (_, true) => multiply(2, add_halves_with_min, panel, x, start, sums),
            }
        }
    }

    /// Whole tiles.
    fn rows_of_call(rows: usize, call: usize, _: usize) -> (usize, usize) {
        (call * TOKENS, rows.min((call + 1) * TOKENS))
    }

    fn leave() {
        if SHAPE.replace(0) != 0 {
            // SAFETY: tiles were configured, so the processor has them; this configuration was in force.
            unsafe { OTHERS.get().load() };
        }
    }
}

/// `[panel][block][group]` codes, `[panel][block][part][16]` scales and minima.
///
/// # Safety
/// The features of AVX-512 and its VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<F: QuantFormat>(panels: Panels<'_>, blocks: Range<usize>, out: &mut WeightPanel) {
    let zero = _mm512_set1_epi8(F::ZERO as i8);
    let (per_tile, count) = (F::SCALES.per_tile(), blocks.len());
    for (side, panel) in panels.iter().enumerate() {
        for (at, block) in blocks.clone().enumerate() {
            let (index, tile) = (block / F::TILES, block % F::TILES);
            let unit = panel[index * F::UNIT_BYTES..][..F::UNIT_BYTES].as_ptr();
            let at = side * count + at;
            // SAFETY: a tile of a unit of the panel.
            let codes = unsafe { avx512::codes::<F>(unit, tile) };
            for (line, codes) in out.codes[at * GROUPS..][..GROUPS].iter_mut().zip(codes) {
                // SAFETY: a line is 64 bytes at an address divisible by 64.
                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), _mm512_sub_epi8(codes, zero)) };
            }
            for part in 0..per_tile {
                let place = (at * per_tile + part) * ROWS;
                // SAFETY: as above; the slices are 16 numbers long.
                unsafe {
                    let [scale, min] = avx512::scales::<F>(unit, tile, part);
                    _mm512_storeu_ps(out.scales[place..][..ROWS].as_mut_ptr(), scale);
                    if F::SCALES.has_min() {
                        _mm512_storeu_ps(out.mins[place..][..ROWS].as_mut_ptr(), min);
                    }
                }
            }
        }
    }
}

thread_local! {
    /// Scales per block of the panels for which this thread's tiles are configured; 0 for none.
    static SHAPE: Cell<usize> = const { Cell::new(0) };

    /// The configuration of this thread before that.
    static OTHERS: Cell<TileConfig> = const { Cell::new(TileConfig::NONE) };
}

/// The operand of `ldtilecfg` and `sttilecfg`. Source: Intel's instruction set reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TileConfig {
    /// The number of the palette and zeros.
    palette: [u8; 16],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Loading it releases the tiles.
    pub const NONE: Self = TileConfig { palette: [0; 16], row_bytes: [0; 16], rows: [0; 16] };

    /// Returns the configuration of the first tiles, with at most 16 rows of at most 64 bytes each.
    pub fn of(shapes: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut config = Self::NONE;
        config.palette[0] = 1;
        for (tile, (rows, bytes)) in shapes.into_iter().enumerate() {
            (config.rows[tile], config.row_bytes[tile]) = (rows as u8, bytes as u16);
        }
        config
    }

    /// Returns this thread's.
    ///
    /// # Safety
    /// amx-tile, and permission to use it.
    pub unsafe fn current() -> Self {
        let mut config = Self::NONE;
        // SAFETY: writes the 64 bytes of the configuration.
        unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut config, options(nostack, preserves_flags)) };
        config
    }

    /// # Safety
    /// As of [`TileConfig::current`]; the configuration is valid.
    pub unsafe fn load(&self) {
        // SAFETY: reads the 64 bytes of the configuration.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const *self, options(nostack, readonly, preserves_flags))
        };
    }
}

/// Configures tiles 0 and 1 for products, 2 and 3 for activations, 4 and 5 for weights.
///
/// # Safety
/// The features.
unsafe fn configure(parts: usize) {
    let before = SHAPE.replace(parts);
    if before == parts {
        return;
    }
    let shapes = [(TOKENS, GROUP_BYTES), (TOKENS, BLOCK / parts), (GROUPS / parts, GROUP_BYTES)];
    // SAFETY: by this function's contract; the shapes are valid.
    unsafe {
        if before == 0 {
            OTHERS.set(TileConfig::current());
        }
        TileConfig::of(shapes.into_iter().flat_map(|shape| [shape; 2])).load();
    }
}

/// Sums of 16 activation rows with a panel.
type Acc = [__m512; TOKENS];

/// Operands: one side of a [`WeightPanel`] and the activations.
#[derive(Clone, Copy)]
struct Operands {
    codes: *const CodeLine,
    scales: *const f32,
    mins: *const f32,
    x: *const ActivationTile,
    /// Pairs of steps; a step has one scale: it is a block or half of one.
    pairs: usize,
}

/// # Safety
/// As [`Kernels::multiply`]; `add` is for panels of `parts` scales per block, and `x` has the panel's blocks.
#[target_feature(enable = "avx512f")]
unsafe fn multiply(
    parts: usize,
    add: unsafe fn(Operands, &mut Acc),
    panel: &WeightPanel,
    x: &[ActivationTile],
    start: usize,
    sums: SumsPtr,
) {
    // SAFETY: the features by this function's contract.
    unsafe { configure(parts) };
    let blocks = panel.blocks;
    for side in 0..MAX_WIDTH {
        let at = |row: usize| sums.row(row).wrapping_add(side * ROWS);
        let mut acc = [_mm512_setzero_ps(); TOKENS];
        if start > 0 {
            for (row, acc) in acc[..sums.rows].iter_mut().enumerate() {
                // SAFETY: 16 numbers.
                *acc = unsafe { _mm512_loadu_ps(at(row)) };
            }
        }
        let scales = side * blocks * parts * ROWS;
        let operands = Operands {
            codes: panel.codes.as_ptr().wrapping_add(side * blocks * GROUPS),
            scales: panel.scales.as_ptr().wrapping_add(scales),
            mins: panel.mins.as_ptr().wrapping_add(scales),
            x: x.as_ptr(),
            pairs: blocks * parts / 2,
        };
        // SAFETY: tiles have the shape for it; panel and rows have the blocks.
        unsafe { add(operands, &mut acc) };
        for (row, acc) in acc[..sums.rows].iter().enumerate() {
            // SAFETY: 16 numbers.
            unsafe { _mm512_storeu_ps(at(row), *acc) };
        }
    }
}

/// Products of two alternating steps that tiles leave for the vector code: 16 numbers per line.
type Dots = [[CodeLine; TOKENS]; 2];

/// Multiplies the tiles of step `$step` (0 or 1) of the pair at `{next_x}` and `{next_w}`.
macro_rules! multiply_tiles {
    ($step:literal, $product:literal, $x:literal, $w:literal) => {
        concat!(
            "tileloadd ",
            $x,
            ", [{next_x} + {x_row} + {x_step} * ",
            $step,
            "]\n",
            "tilezero ",
            $product,
            "\n",
            "tileloadd ",
            $w,
            ", [{next_w} + {line} + {w_step} * ",
            $step,
            "]\n",
            "tdpbssd ",
            $product,
            ", ",
            $x,
            ", ",
            $w,
            "\n",
        )
    };
}

/// Adds step `$step` of row number `$at` to its sums. A dot product is converted to a float by adding it to the low
/// bits of 1.5 * 2^23 (zmm7): while tiles are in use a processor has half the throughput for conversions and
/// multiplications, but the full one for additions.
macro_rules! add_row {
    ($step:literal, $at:literal, $acc:literal, $dot:literal, $scale:literal, $min:tt) => {
        concat!(
            "vmulps ",
            $scale,
            ", zmm0, dword ptr [{x} + {scale} + {scale_step} * ",
            $step,
            " + 4 * ",
            $at,
            "]{{1to16}}\n",
            "vpaddd ",
            $dot,
            ", zmm7, zmmword ptr [{dots} + 1024 * ",
            $step,
            " + 64 * ",
            $at,
            "]\n",
            "vsubps ",
            $dot,
            ", ",
            $dot,
            ", zmm7\n",
            "vfmadd231ps ",
            $acc,
            ", ",
            $dot,
            ", ",
            $scale,
            "\n",
            add_min!($step, $at, $acc, $min),
        )
    };
}

macro_rules! add_min {
    ($step:literal, $at:literal, $acc:literal, without) => {
        ""
    };
    ($step:literal, $at:literal, $acc:literal, with) => {
        concat!(
            "vfmadd231ps ",
            $acc,
            ", zmm8, dword ptr [{x} + {sum} + {sum_step} * ",
            $step,
            " + 4 * ",
            $at,
            "]{{1to16}}\n"
        )
    };
}

/// Adds a step to the sums of all rows.
macro_rules! add_rows {
    ($step:literal, $min:tt) => {
        concat!(
            "vmovups zmm0, zmmword ptr [{scales} + 64 * ",
            $step,
            "]\n",
            load_min!($step, $min),
            add_row!($step, "0", "zmm16", "zmm1", "zmm4", $min),
            add_row!($step, "1", "zmm17", "zmm2", "zmm5", $min),
            add_row!($step, "2", "zmm18", "zmm3", "zmm6", $min),
            add_row!($step, "3", "zmm19", "zmm1", "zmm4", $min),
            add_row!($step, "4", "zmm20", "zmm2", "zmm5", $min),
            add_row!($step, "5", "zmm21", "zmm3", "zmm6", $min),
            add_row!($step, "6", "zmm22", "zmm1", "zmm4", $min),
            add_row!($step, "7", "zmm23", "zmm2", "zmm5", $min),
            add_row!($step, "8", "zmm24", "zmm3", "zmm6", $min),
            add_row!($step, "9", "zmm25", "zmm1", "zmm4", $min),
            add_row!($step, "10", "zmm26", "zmm2", "zmm5", $min),
            add_row!($step, "11", "zmm27", "zmm3", "zmm6", $min),
            add_row!($step, "12", "zmm28", "zmm1", "zmm4", $min),
            add_row!($step, "13", "zmm29", "zmm2", "zmm5", $min),
            add_row!($step, "14", "zmm30", "zmm3", "zmm6", $min),
            add_row!($step, "15", "zmm31", "zmm1", "zmm4", $min),
        )
    };
}

macro_rules! load_min {
    ($step:literal, without) => {
        ""
    };
    ($step:literal, with) => {
        concat!("vmovups zmm8, zmmword ptr [{mins} + 64 * ", $step, "]\n")
    };
}

/// Declares a function that adds the products of `pairs` pairs of steps to sums. While the vector units process one
/// step, the next step's products are stored and the tiles of the one after it multiplied; at the end there are none
/// left, and the second-to-last step's activations are multiplied with any readable memory.
macro_rules! adder {
    ($name:ident, $parts:literal, $min:tt, { $($operand:tt)* }) => {
        /// # Safety
        /// The processor has AMX and AVX-512, tiles are shaped for this many parts of a block, and everything that the operands
        /// name can be read.
        #[target_feature(enable = "avx512f")]
        unsafe fn $name(operands: Operands, acc: &mut Acc) {
            let Operands { codes, scales, mins, x, pairs } = operands;
            let mut dots = MaybeUninit::<Dots>::uninit();
            // SAFETY: by this function's contract; `dots` is as large as two tiles.
            unsafe {
                asm!(
                    multiply_tiles!("0", "tmm0", "tmm2", "tmm4"),
                    "tilestored [{dots} + {line}], tmm0",
                    multiply_tiles!("1", "tmm1", "tmm3", "tmm5"),
                    "add {next_x}, {x_pair}",
                    "add {next_w}, {w_pair}",
                    "cmp {pairs}, 2",
                    "cmovb {next_x}, {x}",
                    "cmovb {next_w}, {dots}",
                    multiply_tiles!("0", "tmm0", "tmm2", "tmm4"),
                    "2:",
                    "tilestored [{dots} + {line} + 1024], tmm1",
                    multiply_tiles!("1", "tmm1", "tmm3", "tmm5"),
                    add_rows!("0", $min),
                    "tilestored [{dots} + {line}], tmm0",
                    "add {next_x}, {x_pair}",
                    "add {next_w}, {w_pair}",
                    "cmp {pairs}, 3",
                    "cmovb {next_x}, {x}",
                    "cmovb {next_w}, {dots}",
                    multiply_tiles!("0", "tmm0", "tmm2", "tmm4"),
                    add_rows!("1", $min),
                    "add {x}, {x_pair}",
                    "add {scales}, 128",
                    "add {mins}, 128",
                    "dec {pairs}",
                    "jnz 2b",
                    x = inout(reg) x => _,
                    next_x = inout(reg) x => _,
                    next_w = inout(reg) codes => _,
                    scales = inout(reg) scales => _,
                    mins = inout(reg) mins => _,
                    pairs = inout(reg) pairs => _,
                    line = in(reg) GROUP_BYTES,
                    x_row = in(reg) BLOCK,
                    dots = in(reg) dots.as_mut_ptr(),
                    scale = const offset_of!(ActivationTile, scales),
                    scale_step = const if $parts == 1 { size_of::<ActivationTile>() } else { 0 },
                    x_pair = const 2 * size_of::<ActivationTile>() / $parts,
                    x_step = const if $parts == 1 { size_of::<ActivationTile>() } else { BLOCK / 2 },
                    w_pair = const 2 * GROUPS * GROUP_BYTES / $parts,
                    w_step = const GROUPS * GROUP_BYTES / $parts,
                    $($operand)*
                    in("zmm7") _mm512_set1_ps(MAGIC),
                    inout("zmm16") acc[0], inout("zmm17") acc[1], inout("zmm18") acc[2], inout("zmm19") acc[3],
                    inout("zmm20") acc[4], inout("zmm21") acc[5], inout("zmm22") acc[6], inout("zmm23") acc[7],
                    inout("zmm24") acc[8], inout("zmm25") acc[9], inout("zmm26") acc[10], inout("zmm27") acc[11],
                    inout("zmm28") acc[12], inout("zmm29") acc[13], inout("zmm30") acc[14], inout("zmm31") acc[15],
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm8") _, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _,
                    options(nostack),
                );
            }
        }
    };
}

/// 1.5 * 2^23: adding an integer within 2^22 to its bits adds it to the number.
const MAGIC: f32 = 12_582_912.0;

adder!(add_blocks, 1, without, {});
adder!(add_blocks_with_min, 1, with, {
    sum = const offset_of!(ActivationTile, scaled_sums),
    sum_step = const size_of::<ActivationTile>(),
});
adder!(add_halves, 2, without, {});
adder!(add_halves_with_min, 2, with, {
    sum = const offset_of!(ActivationTile, half_scaled_sums),
    sum_step = const size_of::<[f32; TOKENS]>(),
});
