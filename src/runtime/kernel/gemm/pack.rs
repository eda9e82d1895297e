//! Weights packed once, at load: panels of 16 rows in the layout of [`format`](super::format).
//!
//! Rows past the last one have zero scales, and so have values past the end of K: they add an exact zero to
//! the sums of real outputs, and their own outputs are not stored.

use std::io;
use std::ops::Range;

use half::f16;

use super::format::{BLOCK, CodeTile, GROUP_BYTES, QuantFormat, ROWS, Scales, with_format};
use crate::Dtype;
use crate::blocks::{RowBlock, e4m3};
use crate::memory::{Arena, ArenaMemory, PanelMemory};
use crate::pool::Pool;

/// Least number of bytes that one task packs.
const TASK_BYTES: usize = 256 << 10;

/// Least number of bytes that are packed before the file's bytes are released.
const PORTION_BYTES: usize = 16 << 20;

/// Names the layout of panels; changes whenever panels of the same weights get other bytes, or others of them are kept, of these or of
/// [`fixed`](super::fixed). Little-endian machines that invert no codes, for one, share a layout whatever their instruction set.
pub const PANEL_LAYOUT: &str = match (cfg!(target_endian = "little"), cfg!(target_arch = "aarch64")) {
    (true, false) => "3",
    (true, true) => "3 inverted",
    (false, _) => "3 big-endian",
};

/// The rows of a matrix in the file's layout.
pub struct MatrixSource<'a> {
    pub(super) dtype: Dtype,
    /// Rows and columns.
    pub(super) shape: [usize; 2],
    bytes: &'a [u8],
    done: &'a dyn Fn(Range<usize>),
}

impl<'a> MatrixSource<'a> {
    /// `bytes` must hold `rows` rows of `dtype.row_bytes(cols)` bytes; panics otherwise.
    pub fn new(dtype: Dtype, [rows, cols]: [usize; 2], bytes: &'a [u8]) -> MatrixSource<'a> {
        let row_bytes = dtype.row_bytes(cols).expect("the loader checked that rows are whole blocks");
        assert_eq!(bytes.len(), rows * row_bytes, "rows as the shape says");
        MatrixSource { dtype, shape: [rows, cols], bytes, done: &|_| () }
    }

    /// Sets a callback that receives the ranges of bytes that are packed and will not be read again.
    pub fn telling(self, done: &'a dyn Fn(Range<usize>)) -> MatrixSource<'a> {
        MatrixSource { done, ..self }
    }

    /// Fills zeroed panels: `pack` receives up to 16 rows and their panel.
    pub(super) fn fill(
        &self,
        panels: &mut [u8],
        panel_bytes: usize,
        pool: &Pool,
        pack: impl Fn(&[u8], &mut [u8]) + Sync,
    ) {
        let rows_bytes = self.bytes.len() / self.shape[0].max(1) * ROWS;
        let [per_task, per_portion] = [TASK_BYTES, PORTION_BYTES].map(|bytes| bytes.div_ceil(panel_bytes));
        let portions = panels.chunks_mut(per_portion * panel_bytes);
        for (portion, panels) in portions.enumerate() {
            let start = portion * per_portion * rows_bytes;
            let bytes = &self.bytes[start..self.bytes.len().min(start + per_portion * rows_bytes)];
            pool.chunks_mut(panels, per_task * panel_bytes, |task, panels| {
                let rows = bytes[task * per_task * rows_bytes..].chunks(rows_bytes);
                rows.zip(panels.chunks_exact_mut(panel_bytes)).for_each(|(rows, panel)| pack(rows, panel));
            });
            (self.done)(start..start + bytes.len());
        }
    }
}

/// A quantised matrix `[rows, cols]` in the kernels' layout.
pub struct Packed {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    memory: PanelMemory,
}

impl Packed {
    /// Packs rows in the file's layout. `None` for plain floats, which have no packed form.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn pack(source: &MatrixSource<'_>, arena: &Arena, pool: &Pool) -> io::Result<Option<Packed>> {
        let Some(bytes) = packed_bytes(source.dtype, source.shape) else { return Ok(None) };
        Ok(Some(Packed::pack_into(source, arena.zeroed(bytes)?, pool)))
    }

    /// Packs rows into zeroed memory of [`packed_bytes`] bytes. Panics if there are others, or if the rows are plain floats.
    pub fn pack_into(source: &MatrixSource<'_>, mut memory: ArenaMemory, pool: &Pool) -> Packed {
        let (dtype, [rows, cols]) = (source.dtype, source.shape);
        assert_eq!(Some(memory.len()), packed_bytes(dtype, source.shape), "memory for the panels");
        let panel_bytes = with_format!(dtype, F => panel_bytes::<F>(cols), unreachable!());
        let row_bytes = dtype.row_bytes(cols).expect("as the source saw");
        source.fill(&mut memory, panel_bytes, pool, |rows, panel| {
            with_format!(dtype, F => pack_panel::<F>(rows, row_bytes, panel), unreachable!());
        });
        Packed { dtype, rows, cols, panel_bytes, memory: memory.into() }
    }

    /// Takes panels that [`Self::pack`] made of a matrix of this type and shape, under the same [`PANEL_LAYOUT`]. `None` if
    /// they cannot be: plain floats, another length, or not at a cache line.
    pub fn of(dtype: Dtype, [rows, cols]: [usize; 2], memory: PanelMemory) -> Option<Packed> {
        let panel_bytes = with_format!(dtype, F => panel_bytes::<F>(cols), return None);
        let whole = memory.holds(packed_bytes(dtype, [rows, cols])?);
        whole.then_some(Packed { dtype, rows, cols, panel_bytes, memory })
    }

    pub fn memory(&self) -> &PanelMemory {
        &self.memory
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the bytes of memory.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Returns the number of panels; the last may hold fewer than 16 rows.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Returns the units of 16 rows, in the order of K.
    pub fn panel(&self, index: usize) -> &[u8] {
        &self.memory[index * self.panel_bytes..(index + 1) * self.panel_bytes]
    }

    /// Dequantises one row into `out` of `cols` values: the look-up of an embedding.
    pub fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let panel = self.panel(row / ROWS);
        with_format!(self.dtype, F => unpack_row::<F>(panel, row % ROWS, out), unreachable!());
    }
}

/// Returns the bytes of a matrix `[rows, cols]` in the kernels' layout; `None` for plain floats.
pub fn packed_bytes(dtype: Dtype, [rows, cols]: [usize; 2]) -> Option<usize> {
    let panel_bytes = with_format!(dtype, F => panel_bytes::<F>(cols), return None);
    Some(rows.div_ceil(ROWS).saturating_mul(panel_bytes))
}

/// Returns the bytes of a panel of rows of `cols` values.
fn panel_bytes<F: QuantFormat>(cols: usize) -> usize {
    cols.div_ceil(F::TILES * BLOCK) * F::UNIT_BYTES
}

/// Packs up to 16 rows of `row_bytes` each into a zeroed panel.
fn pack_panel<F: QuantFormat>(source: &[u8], row_bytes: usize, panel: &mut [u8]) {
    let block_bytes = F::DTYPE.block_bytes();
    let tiles_per_block = F::DTYPE.block_len() / BLOCK;
    let mut row_block = RowBlock::default();
    for (index, unit) in panel.chunks_exact_mut(F::UNIT_BYTES).enumerate() {
        if F::INVERTED != 0 {
            unit[F::low_at(0)..].fill(F::INVERTED); // the codes of missing rows and blocks
        }
        for (row, bytes) in source.chunks_exact(row_bytes).enumerate() {
            for first in (0..F::TILES).step_by(tiles_per_block) {
                let at = (index * F::TILES + first) / tiles_per_block * block_bytes;
                let Some(block) = bytes.get(at..at + block_bytes) else { break };
                F::read(block, &mut row_block);
                store_scales(F::SCALES, &row_block, first, row, unit);
                let codes = row_block.codes.as_chunks::<BLOCK>().0;
                for (tile, codes) in (first..first + tiles_per_block).zip(codes) {
                    store_codes::<F>(codes, row, tile, unit);
                }
            }
        }
    }
}

/// Stores the codes of one row of a tile in its unit. [`QuantFormat::read`] must not be inlined: the compiler would merge both
/// into a computation of single bytes, several times as slow.
fn store_codes<F: QuantFormat>(codes: &[u8; BLOCK], row: usize, tile: usize, unit: &mut [u8]) {
    let low = &mut unit[F::low_at(tile)..][..F::LOW_BYTES];
    store_bits(codes, 0, F::LOW, row, low);
    if F::INVERTED != 0 {
        let words = low.as_chunks_mut::<4>().0.iter_mut().skip(row).step_by(ROWS);
        words.for_each(|word| *word = word.map(|code| code ^ F::INVERTED));
    }
    store_bits(codes, F::LOW, F::HIGH, row, &mut unit[F::high_at(tile)..][..F::HIGH_BYTES]);
}

/// Stores `bits` bits of every code of a row, from bit `from`, in the layout of [`format`](super::format): four codes at a time,
/// as the bytes of a word. It overwrites: reading new memory first would fault it in twice.
#[inline(always)]
fn store_bits(codes: &[u8; BLOCK], from: usize, bits: usize, row: usize, out: &mut [u8]) {
    if bits == 0 {
        return;
    }
    let mask = u32::from_ne_bytes([(255u16 >> (8 - bits)) as u8; 4]);
    let groups = codes.as_chunks::<4>().0.chunks_exact(8 / bits);
    for (groups, out) in groups.zip(out.as_chunks_mut::<GROUP_BYTES>().0) {
        let mut word = 0;
        for (index, group) in groups.iter().enumerate() {
            word |= (u32::from_ne_bytes(*group) >> from & mask) << (bits * index);
        }
        out.as_chunks_mut::<4>().0[row] = word.to_ne_bytes();
    }
}

/// Stores the scales of one row's block in its unit; `tile` is the block's first tile.
fn store_scales(scales: Scales, block: &RowBlock, tile: usize, row: usize, unit: &mut [u8]) {
    let put_f16 = |unit: &mut [u8], at: usize, bits: u16| {
        unit[at + 2 * row..at + 2 * row + 2].copy_from_slice(&bits.to_le_bytes());
    };
    let put_bytes = |unit: &mut [u8], at: usize, bytes: &[u8]| {
        for (sub, byte) in bytes.iter().enumerate() {
            unit[at + 16 * sub + row] = *byte;
        }
    };
    match scales {
        Scales::Block => put_f16(unit, 32 * tile, block.d),
        Scales::BlockMin => {
            put_f16(unit, 32 * tile, block.d);
            put_f16(unit, 64 + 32 * tile, block.min);
        }
        Scales::Super32 => {
            put_f16(unit, 0, block.d);
            put_f16(unit, 32, block.min);
            put_bytes(unit, 64, &block.sub_scales[..8]);
            put_bytes(unit, 192, &block.sub_mins[..8]);
        }
        Scales::Super16Min => {
            put_f16(unit, 0, block.d);
            put_f16(unit, 32, block.min);
            let both = |sub: usize| block.sub_scales[sub] | block.sub_mins[sub] << 4;
            put_bytes(unit, 64, &std::array::from_fn::<u8, 16, _>(both));
        }
        Scales::Shared | Scales::Signed32 | Scales::Signed16 | Scales::Float16 => {
            unit[4 * row..4 * row + 4].copy_from_slice(&block.wide.to_le_bytes());
            put_bytes(unit, 64, &block.sub_scales[..(scales.bytes() - 64) / ROWS]);
        }
    }
}

fn f16_at(unit: &[u8], at: usize, row: usize) -> f32 {
    f16::from_le_bytes([unit[at + 2 * row], unit[at + 2 * row + 1]]).to_f32()
}

fn wide_at(unit: &[u8], row: usize) -> f32 {
    f32::from_le_bytes(*unit[4 * row..].first_chunk().expect("a unit begins with 16 numbers"))
}

/// Returns scale and minimum of a row of a tile; `half` is 0 unless the format has a scale for each half. Without a
/// minimum it is -0, which changes no sum.
pub fn scale_and_min(scales: Scales, unit: &[u8], tile: usize, half: usize, row: usize) -> [f32; 2] {
    let whole = |at: usize| unit[at + 16 * tile + row];
    let halves = || unit[64 + 16 * (2 * tile + half) + row];
    match scales {
        Scales::Block => [f16_at(unit, 32 * tile, row), -0.0],
        Scales::BlockMin => [f16_at(unit, 32 * tile, row), f16_at(unit, 64 + 32 * tile, row)],
        Scales::Super32 => {
            let [scale, min] = [64, 192].map(|at| f32::from(whole(at)));
            [f16_at(unit, 0, row) * scale, f16_at(unit, 32, row) * min]
        }
        Scales::Super16Min => {
            let [scale, min] = [halves() & 15, halves() >> 4].map(f32::from);
            [f16_at(unit, 0, row) * scale, f16_at(unit, 32, row) * min]
        }
        Scales::Shared => [wide_at(unit, row), -0.0],
        Scales::Signed32 => [wide_at(unit, row) * f32::from(whole(64).cast_signed()), -0.0],
        Scales::Signed16 => [wide_at(unit, row) * f32::from(halves().cast_signed()), -0.0],
        Scales::Float16 => [wide_at(unit, row) * e4m3(halves()), -0.0],
    }
}

/// Unpacks the codes of one tile of a unit, one byte each.
pub fn unpack_tile<F: QuantFormat>(unit: &[u8], tile: usize, out: &mut CodeTile) {
    let low = &unit[F::low_at(tile)..][..F::LOW_BYTES];
    let high = &unit[F::high_at(tile)..][..F::HIGH_BYTES];
    load_bits(low, F::LOW, 0, out);
    load_bits(high, F::HIGH, F::LOW, out);
    if F::INVERTED != 0 {
        out.as_flattened_mut().iter_mut().for_each(|code| *code ^= F::INVERTED);
    }
    if let Some(book) = F::BOOK {
        out.as_flattened_mut().iter_mut().for_each(|code| *code = book[usize::from(*code)]);
    }
}

/// Undoes [`store_bits`]; the first part of a code overwrites, the second is added.
fn load_bits(bytes: &[u8], bits: usize, to: usize, out: &mut CodeTile) {
    if bits == 0 {
        return;
    }
    let mask = (255u16 >> (8 - bits)) as u8;
    let per_byte = 8 / bits;
    let vectors = bytes.chunks_exact(out[0].len());
    for (groups, bytes) in out.chunks_exact_mut(per_byte).zip(vectors) {
        for (index, group) in groups.iter_mut().enumerate() {
            for (code, byte) in group.iter_mut().zip(bytes) {
                let part = (byte >> (bits * index) & mask) << to;
                *code = if to == 0 { part } else { *code | part };
            }
        }
    }
}

/// Reads this row's bits only: a look-up reads a sixteenth of the panel's codes.
fn unpack_row<F: QuantFormat>(panel: &[u8], row: usize, out: &mut [f32]) {
    let code = |unit: &[u8], tile: usize, k: usize| {
        let part = |at: usize, bits: usize| {
            let (group, per_byte) = (k / 4, 8 / bits);
            let byte = unit[at + group / per_byte * (4 * ROWS) + 4 * row + k % 4];
            byte >> (bits * (group % per_byte)) & (255u16 >> (8 - bits)) as u8
        };
        let low = part(F::low_at(tile), F::LOW);
        let code = if F::HIGH == 0 { low } else { low | part(F::high_at(tile), F::HIGH) << F::LOW };
        F::BOOK.map_or(code ^ F::INVERTED, |book| book[usize::from(code)])
    };
    let half_len = BLOCK / F::SCALES.per_tile();
    let units = panel.chunks_exact(F::UNIT_BYTES);
    for (unit, out) in units.zip(out.chunks_mut(F::TILES * BLOCK)) {
        for (index, out) in out.chunks_mut(half_len).enumerate() {
            let (tile, half) = (index * half_len / BLOCK, index % F::SCALES.per_tile());
            let [scale, min] = scale_and_min(F::SCALES, unit, tile, half, row);
            for (k, out) in out.iter_mut().enumerate() {
                let value = i32::from(code(unit, tile, half * half_len + k)) - F::ZERO;
                *out = scale * value as f32 + min;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::ALL;
    use super::super::tests::random_weights;
    use super::*;
    use crate::quant::dequantize_row;

    #[test]
    fn a_row_comes_back_as_the_file_has_it() {
        let pool = Pool::new(2).unwrap();
        for dtype in ALL {
            let blocks: &[usize] = if dtype.block_len() == 32 { &[1, 2, 3] } else { &[1, 2] };
            for cols in blocks.iter().map(|blocks| blocks * dtype.block_len()) {
                for rows in [1, 15, 16, 17, 35] {
                    let bytes = random_weights(dtype, rows * cols, rows as u64);
                    let packed = Packed::pack(
                        &MatrixSource::new(dtype, [rows, cols], &bytes),
                        &Arena::default(),
                        &pool,
                    )
                    .unwrap()
                    .unwrap();
                    assert_eq!(Some(packed.bytes()), packed_bytes(dtype, [rows, cols]));
                    let row_bytes = dtype.row_bytes(cols).unwrap();
                    for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
                        let (mut got, mut expected) = (vec![0.0; cols], vec![0.0; cols]);
                        packed.unpack_row(row, &mut got);
                        dequantize_row(dtype, bytes, &mut expected);
                        let same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{dtype:?} {rows} x {cols}, row {row}: {got:?} {expected:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_source_is_told_of_every_byte_once_and_in_order() {
        let cols = 4096;
        let rows = if cfg!(miri) { 40 } else { 2 * PORTION_BYTES / cols + 5 };
        let bytes = vec![0; rows * Dtype::Q8_0.row_bytes(cols).unwrap()];
        let told = std::cell::RefCell::new(Vec::new());
        let tell = |part| told.borrow_mut().push(part);
        let source = MatrixSource::new(Dtype::Q8_0, [rows, cols], &bytes).telling(&tell);
        Packed::pack(&source, &Arena::default(), &Pool::new(2).unwrap()).unwrap().unwrap();
        let told = told.into_inner();
        assert!(told.len() == 3 || cfg!(miri), "{told:?}");
        assert_eq!((told[0].start, told[told.len() - 1].end), (0, bytes.len()));
        assert!(told.windows(2).all(|pair| pair[0].end == pair[1].start), "{told:?}");
    }

    #[test]
    fn floats_have_no_packed_form_and_packing_ignores_the_number_of_threads() {
        let pools = [1, 3].map(|threads| Pool::new(threads).unwrap());
        assert!(
            Packed::pack(&MatrixSource::new(Dtype::F32, [1, 1], &[0; 4]), &Arena::default(), &pools[0])
                .unwrap()
                .is_none()
        );
        let (rows, cols) = (if cfg!(miri) { 40 } else { 4000 }, 256);
        let bytes = random_weights(Dtype::Q5K, rows * cols, 3);
        let [one, three] = pools.map(|pool| {
            Packed::pack(&MatrixSource::new(Dtype::Q5K, [rows, cols], &bytes), &Arena::default(), &pool)
                .unwrap()
                .unwrap()
        });
        assert!(*one.memory == *three.memory);
    }
}
