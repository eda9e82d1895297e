//! Activations for the integer kernels: signed bytes with one scale for each 32 values.
//!
//! `code = round(x * (127 / max|x|))`, ties to even, `scale = max|x| / 127` rounded to 11 bits, as in
//! llama.cpp, which keeps the scale in f16. Every block is converted separately, by the same operations on
//! every instruction set. A block with an infinity or NaN gets the scale NaN, so that a broken model is
//! noticed; a block below [`TINY`] becomes zero, because its scale could not be inverted.

use super::format::BLOCK;
use crate::isa::Isa;
use crate::pool::Pool;

/// Smallest magnitude m for which 127 / m is surely finite.
const TINY: f32 = 1e-30;

/// Rows are padded with zero blocks to a multiple of this: a unit of the formats with blocks of 32.
const PADDING_BLOCKS: usize = 2;

const BLOCKS_PER_PAGE: usize = 4096 / size_of::<ActivationBlock>();

/// Values for which another thread pays.
const VALUES_PER_TASK: usize = 32 << 10;

/// Values for which another thread pays if they have to be computed first.
const MADE_PER_TASK: usize = 8 << 10;

/// Blocks that one task copies: 64 KiB.
const SELECTED_PER_TASK: usize = 1 << 10;

/// 32 quantised values with all sums that a kernel needs, in one cache line. Sums are over codes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C, align(64))]
pub struct ActivationBlock {
    /// Within -127..=127.
    pub codes: [i8; BLOCK],
    pub scale: f32,
    /// Minus the sum, for formats whose codes have a zero point; below, the same for each half.
    pub minus_sum: i32,
    pub half_minus_sums: [i32; 2],
    /// `scale * sum`, for formats with a minimum; below, the same for each half.
    pub scaled_sum: f32,
    pub half_scaled_sums: [f32; 2],
}

/// Rows of a step in quantised form; keeps its memory between calls.
#[derive(Debug, Clone, Default)]
pub struct Activations {
    rows: usize,
    blocks_per_row: usize,
    blocks: Vec<ActivationBlock>,
}

impl Activations {
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the blocks per row, including padding.
    pub fn blocks_per_row(&self) -> usize {
        self.blocks_per_row
    }

    /// Returns the blocks of a row.
    pub fn row(&self, index: usize) -> &[ActivationBlock] {
        &self.blocks[index * self.blocks_per_row..][..self.blocks_per_row]
    }

    /// Quantises the rows of `x`, `[rows, cols]`; `cols` must be a multiple of 32 and not 0.
    pub fn quantize(&mut self, isa: Isa, x: &[f32], cols: usize, pool: &Pool) {
        let blocks = self.reset(x.len() / cols, cols);
        let per_row = row_blocks(cols);
        let rows_per_task = VALUES_PER_TASK.div_ceil(cols);
        pool.chunks_mut(blocks, rows_per_task * per_row, |task, blocks| {
            let x = x[task * rows_per_task * cols..].chunks_exact(cols);
            for (blocks, x) in blocks.chunks_exact_mut(per_row).zip(x) {
                quantize_row(isa, x, &mut blocks[..cols / BLOCK]);
            }
        });
    }

    /// Quantises as [`Self::quantize`] rows that the same tasks compute: `make(row, out)` writes row number `row` of
    /// `x`.
    pub fn quantize_made(
        &mut self,
        isa: Isa,
        x: &mut [f32],
        cols: usize,
        pool: &Pool,
        make: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let blocks = self.reset(x.len() / cols, cols);
        let per_row = row_blocks(cols);
        let rows_per_task = MADE_PER_TASK.div_ceil(cols);
        let chunks = [rows_per_task * cols, rows_per_task * per_row];
        pool.zip_chunks_mut(x, blocks, chunks, |task, x, blocks| {
            let rows = x.chunks_exact_mut(cols).zip(blocks.chunks_exact_mut(per_row));
            for (at, (x, blocks)) in rows.enumerate() {
                make(task * rows_per_task + at, x);
                quantize_row(isa, x, &mut blocks[..cols / BLOCK]);
            }
        });
    }

    /// Takes copies of some rows of `x`.
    pub fn select(&mut self, x: &Activations, rows: &[usize], pool: &Pool) {
        (self.rows, self.blocks_per_row) = (rows.len(), x.blocks_per_row);
        self.blocks.resize(rows.len() * x.blocks_per_row, ActivationBlock::default());
        let rows_per_task = SELECTED_PER_TASK.div_ceil(x.blocks_per_row);
        pool.chunks_mut(&mut self.blocks, rows_per_task * x.blocks_per_row, |task, blocks| {
            let rows = &rows[task * rows_per_task..];
            for (to, &row) in blocks.chunks_exact_mut(x.blocks_per_row).zip(rows) {
                to.copy_from_slice(x.row(row));
            }
        });
    }

    /// Makes room for `rows` rows, with zero padding; the caller fills the other blocks.
    pub(super) fn reset(&mut self, rows: usize, cols: usize) -> &mut [ActivationBlock] {
        assert!(cols > 0 && cols.is_multiple_of(BLOCK), "quantised rows are whole blocks");
        (self.rows, self.blocks_per_row) = (rows, row_blocks(cols));
        self.blocks.resize(rows * self.blocks_per_row, ActivationBlock::default());
        for row in self.blocks.chunks_exact_mut(self.blocks_per_row) {
            row[cols / BLOCK..].fill(ActivationBlock::default());
        }
        &mut self.blocks
    }
}

/// Returns the blocks of a row, including padding. Rows of whole pages get one more: rows that are multiplied together would share
/// places of the first-level cache.
fn row_blocks(cols: usize) -> usize {
    let blocks = (cols / BLOCK).next_multiple_of(PADDING_BLOCKS);
    blocks + usize::from(blocks.is_multiple_of(BLOCKS_PER_PAGE))
}

/// Rounds to 11 significant bits, ties to even: f16's precision with f32's range.
#[inline(always)]
fn round_to_11_bits(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0xfff + (bits >> 13 & 1)) & !0x1fff)
}

/// Quantises a row of `32 * blocks.len()` values.
pub fn quantize_row(isa: Isa, x: &[f32], blocks: &mut [ActivationBlock]) {
    assert!(isa.is_available(), "instruction set not available");
    let x = x.as_chunks::<BLOCK>().0.iter().zip(blocks);
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the assertion above: this processor has the features, which AVX-512 includes. Its own registers were no faster.
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unsafe { avx2::quantize_row(x) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: every aarch64 target has the feature.
        Isa::Neon | Isa::Dotprod | Isa::I8mm => unsafe { neon::quantize_row(x) },
        _ => x.for_each(|(x, block)| quantize_block(x, block)),
    }
}

/// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits as two's complement.
const ROUND: f32 = 12_582_912.0;

fn quantize_block(x: &[f32; BLOCK], block: &mut ActivationBlock) {
    let max_bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().expect("32 values");
    let (inverse, scale) = inverse_and_scale(max_bits);
    for (code, x) in block.codes.iter_mut().zip(x) {
        *code = x.mul_add(inverse, ROUND).to_bits() as i8;
    }
    let (first, second) = block.codes.split_at(BLOCK / 2);
    let sums = [first, second].map(|codes| codes.iter().map(|code| i32::from(*code)).sum());
    block.describe(scale, sums);
}

/// Returns the factor for values and the scale of the codes. The bits of magnitudes are ordered like the magnitudes,
/// with NaN above infinity.
#[inline(always)]
fn inverse_and_scale(max_bits: u32) -> (f32, f32) {
    let max = f32::from_bits(max_bits);
    if max < TINY {
        (0.0, 0.0)
    } else if max < f32::INFINITY {
        (127.0 / max, round_to_11_bits(max / 127.0))
    } else {
        (0.0, f32::NAN)
    }
}

impl ActivationBlock {
    /// Sets the sums from the codes' `sums` of each half.
    #[inline(always)]
    fn describe(&mut self, scale: f32, sums: [i32; 2]) {
        self.scale = scale;
        self.minus_sum = -(sums[0] + sums[1]);
        self.half_minus_sums = sums.map(|sum| -sum);
        self.scaled_sum = scale * (sums[0] + sums[1]) as f32;
        self.half_scaled_sums = sums.map(|sum| scale * sum as f32);
    }
}

/// Quantises a block with intrinsics: three times as fast as the compiled [`quantize_block`].
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{ActivationBlock, BLOCK, ROUND, inverse_and_scale};

    /// # Safety
    /// The features.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn quantize_row<'a>(rows: impl Iterator<Item = (&'a [f32; BLOCK], &'a mut ActivationBlock)>) {
        for (x, block) in rows {
            // SAFETY: 8 numbers each.
            let x = [0, 8, 16, 24].map(|at| unsafe { _mm256_loadu_ps(x[at..at + 8].as_ptr()) });
            let (inverse, scale) = inverse_and_scale(largest(x));
            let codes = codes(x, inverse);
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(block.codes.as_mut_ptr().cast(), codes) };
            block.describe(scale, half_sums(codes));
        }
    }

    /// Returns the bits of the largest magnitude.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn largest(x: [__m256; 4]) -> u32 {
        let magnitude = _mm256_set1_epi32(0x7fff_ffff);
        let [a, b, c, d] = x.map(|x| _mm256_and_si256(_mm256_castps_si256(x), magnitude));
        let max = _mm256_max_epu32(_mm256_max_epu32(a, b), _mm256_max_epu32(c, d));
        let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b1110>(max));
        _mm_cvtsi128_si32(_mm_max_epu32(max, _mm_shuffle_epi32::<0b01>(max))).cast_unsigned()
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn codes(x: [__m256; 4], inverse: f32) -> __m256i {
        let (inverse, round) = (_mm256_set1_ps(inverse), _mm256_set1_ps(ROUND));
        // Keeps the low byte with its sign, so that packing does not saturate.
        let [a, b, c, d] = x.map(|x| {
            let bits = _mm256_castps_si256(_mm256_fmadd_ps(x, inverse, round));
            _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(bits))
        });
        let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    }

    /// Sums the first and the last 16 codes: as unsigned bytes, larger by 128, which `vpsadbw` adds.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn half_sums(codes: __m256i) -> [i32; 2] {
        let offset = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
        let eights = _mm256_sad_epu8(offset, _mm256_setzero_si256());
        let halves = _mm256_add_epi64(eights, _mm256_unpackhi_epi64(eights, eights));
        [_mm256_extract_epi32::<0>(halves) - 16 * 128, _mm256_extract_epi32::<4>(halves) - 16 * 128]
    }
}

/// Quantises a block with intrinsics, as [`avx2`] does.
#[cfg(target_arch = "aarch64")]
mod neon {
    use std::arch::aarch64::*;

    use super::{ActivationBlock, BLOCK, ROUND, inverse_and_scale};

    /// # Safety
    /// Only the feature.
    #[target_feature(enable = "neon")]
    pub unsafe fn quantize_row<'a>(rows: impl Iterator<Item = (&'a [f32; BLOCK], &'a mut ActivationBlock)>) {
        for (x, block) in rows {
            let x: [float32x4_t; BLOCK / 4] =
                // SAFETY: 4 numbers each.
                std::array::from_fn(|at| unsafe { vld1q_f32(x[4 * at..4 * at + 4].as_ptr()) });
            let (inverse, scale) = inverse_and_scale(largest(x));
            let halves = codes(x, inverse);
            for (out, codes) in block.codes.as_chunks_mut::<{ BLOCK / 2 }>().0.iter_mut().zip(halves) {
                // SAFETY: 16 bytes.
                unsafe { vst1q_s8(out.as_mut_ptr(), codes) };
            }
            block.describe(scale, halves.map(|codes| i32::from(vaddlvq_s8(codes))));
        }
    }

    /// Returns the bits of the largest magnitude.
    #[inline]
    #[target_feature(enable = "neon")]
    fn largest(x: [float32x4_t; BLOCK / 4]) -> u32 {
        let [a, b, c, d, e, f, g, h] = x.map(|x| vreinterpretq_u32_f32(vabsq_f32(x)));
        let [a, b] =
            [vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)), vmaxq_u32(vmaxq_u32(e, f), vmaxq_u32(g, h))];
        vmaxvq_u32(vmaxq_u32(a, b))
    }

    /// Returns the first and the last 16 codes.
    #[inline]
    #[target_feature(enable = "neon")]
    fn codes(x: [float32x4_t; BLOCK / 4], inverse: f32) -> [int8x16_t; 2] {
        let round = vdupq_n_f32(ROUND);
        let [a, b, c, d, e, f, g, h] = x.map(|x| vreinterpretq_s16_f32(vfmaq_n_f32(round, x, inverse)));
        // The low halves, then the low bytes of them.
        let halves = [[vuzp1q_s16(a, b), vuzp1q_s16(c, d)], [vuzp1q_s16(e, f), vuzp1q_s16(g, h)]];
        halves.map(|[a, b]| vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::available;

    fn quantized(isa: Isa, x: &[f32]) -> Vec<ActivationBlock> {
        let mut blocks = vec![ActivationBlock::default(); x.len() / BLOCK];
        quantize_row(isa, x, &mut blocks);
        blocks
    }

    #[test]
    fn codes_are_the_nearest_and_sums_are_theirs() {
        let x: Vec<f32> = (0..96).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.031).collect();
        for isa in available() {
            for (block, x) in quantized(isa, &x).iter().zip(x.chunks(BLOCK)) {
                for (code, x) in block.codes.iter().zip(x) {
                    assert!((f32::from(*code) * block.scale - x).abs() <= block.scale * 0.54);
                }
                let sum: i32 = block.codes.iter().map(|code| i32::from(*code)).sum();
                assert_eq!(block.minus_sum, -sum);
                assert_eq!(block.half_minus_sums.iter().sum::<i32>(), -sum);
                assert_eq!(block.scaled_sum, block.scale * sum as f32);
            }
            assert_eq!(quantized(isa, &x), quantized(Isa::Scalar, &x), "{isa:?}");
        }
    }

    #[test]
    fn scales_are_those_of_half_precision_where_it_reaches() {
        for i in 0..5000 {
            let max = 0.02 + i as f32 * 0.0137;
            let mut x = [0.0; BLOCK];
            x[i % BLOCK] = -max;
            for isa in available() {
                let scale = quantized(isa, &x)[0].scale;
                assert_eq!(scale, half::f16::from_f32(max / 127.0).to_f32(), "{max}");
            }
        }
    }

    #[test]
    fn ties_go_to_even_and_the_largest_is_127() {
        let mut x = [0.0; BLOCK];
        x[..5].copy_from_slice(&[127.0, 0.5, 1.5, -2.5, -127.0]);
        for isa in available() {
            assert_eq!(quantized(isa, &x)[0].codes[..5], [127, 0, 2, -2, -127], "{isa:?}");
        }
    }

    #[test]
    fn zeros_tiny_and_broken_values_have_a_defined_result() {
        for isa in available() {
            for tiny in [0.0, -0.0, 1e-31, f32::MIN_POSITIVE, 1e-45] {
                let block = quantized(isa, &[tiny; BLOCK])[0];
                assert_eq!(
                    block,
                    ActivationBlock { scaled_sum: 0.0, ..ActivationBlock::default() },
                    "{tiny}"
                );
            }
            for broken in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut x = [1.0; BLOCK];
                x[7] = broken;
                assert!(quantized(isa, &x)[0].scale.is_nan(), "{broken}");
            }
            let huge = quantized(isa, &[f32::MAX; BLOCK])[0];
            assert!(huge.scale.is_finite() && huge.codes == [127; BLOCK]);
        }
    }

    #[test]
    fn selected_rows_are_copies() {
        let x: Vec<f32> = (0..40 * 96).map(|i| (i as f32 * 0.61).sin()).collect();
        let rows: Vec<usize> = (0..40).rev().chain([7, 7]).collect();
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let (mut all, mut some) = <[Activations; 2]>::default().into();
            all.quantize(Isa::Scalar, &x, 96, &pool);
            some.quantize(Isa::Scalar, &[1.0; 640], 64, &pool); // left by another call
            some.select(&all, &rows, &pool);
            assert_eq!((some.rows(), some.blocks_per_row()), (42, 4));
            assert!(rows.iter().enumerate().all(|(at, &row)| some.row(at) == all.row(row)), "{threads}");
        }
    }

    #[test]
    fn rows_are_padded_and_do_not_depend_on_threads() {
        let (rows, cols) = (if cfg!(miri) { 3 } else { 700 }, 96);
        let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut kept = Vec::new();
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let mut activations = Activations::default();
            activations.quantize(Isa::Scalar, &x, cols, &pool);
            assert_eq!((activations.rows(), activations.blocks_per_row()), (rows, 4));
            assert_eq!(activations.row(2)[3], ActivationBlock::default());
            assert_eq!(activations.row(2)[..3], quantized(Isa::Scalar, &x[2 * cols..3 * cols]));
            let mut made = Activations::default();
            let mut values = vec![f32::NAN; x.len()];
            made.quantize_made(Isa::Scalar, &mut values, cols, &pool, |row, out| {
                out.copy_from_slice(&x[row * cols..][..cols]);
            });
            assert!(values == x && made.blocks == activations.blocks && made.rows() == rows);
            kept.push(activations.blocks);
        }
        assert!(kept[0] == kept[1]);
    }
}
