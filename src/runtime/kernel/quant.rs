//! Dequantisation of whole rows for every storage type: the scalar reference for all other readers of
//! weights.
//!
//! Block layouts and formulas: ggml's `ggml-common.h` and `dequantize_row_*` in `ggml-quants.c`; results
//! equal candle's to the bit. Each function converts one block of fixed size to a fixed number of values, so
//! that the compiler knows every bound and can vectorise. Blocks need no alignment. [`blocks`] decodes
//! codebook types. No `unsafe`.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::Dtype;
use super::blocks::{self, Codebook};

/// Dequantises a row, or several whole rows.
///
/// # Panics
/// If `bytes` is not exactly as long as `out.len()` values of this type.
pub fn dequantize_row(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "{} row of {} values", dtype.name(), out.len());
    match dtype {
        Dtype::F32 => each_block(bytes, out, |block, [value]| *value = f32::from_le_bytes(*block)),
        Dtype::F16 => f16_values(bytes, out),
        Dtype::Bf16 => each_block(bytes, out, bf16_value),
        Dtype::Q4_0 => each_block(bytes, out, q4_0),
        Dtype::Q4_1 => each_block(bytes, out, q4_1),
        Dtype::Q5_0 => each_block(bytes, out, q5_0),
        Dtype::Q5_1 => each_block(bytes, out, q5_1),
        Dtype::Q8_0 => each_block(bytes, out, q8_0),
        Dtype::Q2K => each_block(bytes, out, q2_k),
        Dtype::Q3K => each_block(bytes, out, q3_k),
        Dtype::Q4K => each_block(bytes, out, q4_k),
        Dtype::Q5K => each_block(bytes, out, q5_k),
        Dtype::Q6K => each_block(bytes, out, q6_k),
        Dtype::Mxfp4 => coded(dtype, &blocks::MXFP4, bytes, out),
        Dtype::Nvfp4 => coded(dtype, &blocks::NVFP4, bytes, out),
        Dtype::Iq4Nl => coded(dtype, &blocks::IQ4_NL, bytes, out),
        Dtype::Iq4Xs => coded(dtype, &blocks::IQ4_XS, bytes, out),
        Dtype::Iq3S => coded(dtype, &blocks::IQ3_S, bytes, out),
        Dtype::Iq3Xxs => coded(dtype, &blocks::IQ3_XXS, bytes, out),
        Dtype::Iq2S => coded(dtype, &blocks::IQ2_S, bytes, out),
        Dtype::Iq2Xs => coded(dtype, &blocks::IQ2_XS, bytes, out),
        Dtype::Iq2Xxs => coded(dtype, &blocks::IQ2_XXS, bytes, out),
        Dtype::Iq1M => coded(dtype, &blocks::IQ1_M, bytes, out),
        Dtype::Iq1S => coded(dtype, &blocks::IQ1_S, bytes, out),
        Dtype::Tq2_0 => coded(dtype, &blocks::TQ2_0, bytes, out),
        Dtype::Tq1_0 => coded(dtype, &blocks::TQ1_0, bytes, out),
        Dtype::Q2_0 => coded(dtype, &blocks::Q2_0, bytes, out),
        Dtype::Q1_0 => coded(dtype, &blocks::Q1_0, bytes, out),
    }
}

fn coded(dtype: Dtype, codebook: &Codebook, bytes: &[u8], out: &mut [f32]) {
    codebook.dequantize(bytes, dtype.block_bytes(), out, dtype.block_len());
}

/// Calls `block` for the bytes and the output of each block.
#[inline(always)]
fn each_block<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; VALUES]),
) {
    for (bytes, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(bytes, out);
    }
}

/// Reads the half-precision number at a byte offset of a block.
#[inline(always)]
fn half_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Converts in groups, because `half` selects the instruction set once per slice, not per value.
fn f16_values(bytes: &[u8], out: &mut [f32]) {
    const GROUP: usize = 64;
    let mut halves = [f16::ZERO; GROUP];
    for (bytes, out) in bytes.chunks(2 * GROUP).zip(out.chunks_mut(GROUP)) {
        for (half, &raw) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(raw);
        }
        halves[..out.len()].convert_to_f32_slice(out);
    }
}

#[inline(always)]
fn bf16_value(block: &[u8; 2], [value]: &mut [f32; 1]) {
    *value = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
}

/// Block layout: scale, 16 bytes with value `i` in the low nibble of byte `i`, value `i + 16` in the high one.
#[inline(always)]
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (i32::from(q & 15) - 8) as f32 * scale;
        *high = (i32::from(q >> 4) - 8) as f32 * scale;
    }
}

/// Block layout of Q4_0, with a minimum after the scale.
#[inline(always)]
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = f32::from(q & 15) * scale + min;
        *high = f32::from(q >> 4) * scale + min;
    }
}

/// Returns the five-bit numbers of a Q5 block: nibbles as in Q4_0, the fifth bit of value `i` is bit `i` of
/// `high_bits`.
#[inline(always)]
fn five_bits(high_bits: &[u8; 4], nibbles: &[u8; 16]) -> [i32; 32] {
    let high_bits = u32::from_le_bytes(*high_bits);
    let mut values = [0; 32];
    for i in 0..16 {
        let high = |bit: usize| (((high_bits >> bit) & 1) << 4) as i32;
        values[i] = i32::from(nibbles[i] & 15) | high(i);
        values[i + 16] = i32::from(nibbles[i] >> 4) | high(i + 16);
    }
    values
}

/// Block layout: scale, fifth bits, nibbles.
#[inline(always)]
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, q) in out.iter_mut().zip(five_bits(part(block, 2), part(block, 6))) {
        *out = (q - 16) as f32 * scale;
    }
}

/// Block layout: scale, minimum, fifth bits, nibbles.
#[inline(always)]
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (out, q) in out.iter_mut().zip(five_bits(part(block, 4), part(block, 8))) {
        *out = q as f32 * scale + min;
    }
}

/// Block layout: scale, 32 signed bytes.
#[inline(always)]
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q as i8) * scale;
    }
}

/// Returns the `LEN` bytes at an offset, which is constant or bounded in all callers.
#[inline(always)]
fn part<const LEN: usize>(block: &[u8], at: usize) -> &[u8; LEN] {
    block[at..].first_chunk().expect("the part lies within the block")
}

/// Block layout: 16 groups of 16 values: a byte each of 4-bit scale and 4-bit minimum, 64 bytes of 2-bit numbers,
/// then the scales of scales and of minimums.
#[inline(always)]
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, min) = (half_at(block, 80), half_at(block, 82));
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (quants, shift) = two_bit_group(&block[16..80], group);
        let scale = scale * f32::from(block[group] & 15);
        let min = min * f32::from(block[group] >> 4);
        for (out, q) in out.iter_mut().zip(quants) {
            *out = scale * f32::from((q >> shift) & 3) - min;
        }
    }
}

/// Returns the position of the 2-bit numbers of a group of 16: 32 bytes hold 128 values, two bits of each byte at a
/// time.
#[inline(always)]
fn two_bit_group(quants: &[u8], group: usize) -> (&[u8; 16], usize) {
    let (half, pair, side) = (group / 8, group / 2 % 4, group % 2);
    (part(quants, 32 * half + 16 * side), 2 * pair)
}

/// Block layout of Q2_K, with a third bit per value in a mask (clear means minus 4), 6-bit scales and no minimum.
#[inline(always)]
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scales = q3_k_scales(part(block, 96));
    let scale = half_at(block, 108);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (quants, shift) = two_bit_group(&block[32..96], group);
        let mask: &[u8; 16] = part(block, 16 * (group % 2));
        let bit = group / 2;
        let scale = scale * f32::from(scales[group]);
        for ((out, q), mask) in out.iter_mut().zip(quants).zip(mask) {
            let high = i32::from((mask >> bit) & 1) * 4;
            *out = scale * (i32::from((q >> shift) & 3) + high - 4) as f32;
        }
    }
}

/// Returns sixteen 6-bit scales, less 32: low nibbles in bytes 0 to 7 (first eight low, last eight high), and the
/// upper two bits of scale `i` in byte `8 + i % 4`, at bit `i / 4 * 2`.
#[inline(always)]
fn q3_k_scales(packed: &[u8; 12]) -> [i8; 16] {
    let mut scales = [0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = (packed[i % 8] >> (i / 8 * 4)) & 15;
        let high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    scales
}

/// Returns the 6-bit scale and minimum of group `j` of 8, packed into 12 bytes.
#[inline(always)]
fn scale_min(j: usize, packed: &[u8; 12]) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// Block layout: scale of scales, scale of minimums, packed scales, 128 bytes of which 32 hold 64 values, low nibbles
/// first.
#[inline(always)]
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (group_scale, group_min) = scale_min(group, part(block, 4));
        let (scale, min) = (scale * group_scale, min * group_min);
        let quants: &[u8; 32] = part(block, 16 + group / 2 * 32);
        let shift = group % 2 * 4;
        for (out, q) in out.iter_mut().zip(quants) {
            *out = scale * f32::from((q >> shift) & 15) - min;
        }
    }
}

/// Block layout of Q4_K, with the fifth bit of value `i` of group `g` at bit `g` of byte `i` of 32.
#[inline(always)]
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scale, min) = (half_at(block, 0), half_at(block, 2));
    let high: &[u8; 32] = part(block, 16);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (group_scale, group_min) = scale_min(group, part(block, 4));
        let (scale, min) = (scale * group_scale, min * group_min);
        let quants: &[u8; 32] = part(block, 48 + group / 2 * 32);
        let shift = group % 2 * 4;
        for ((out, q), high) in out.iter_mut().zip(quants).zip(high) {
            let q = (q >> shift) & 15 | ((high >> group) & 1) << 4;
            *out = scale * f32::from(q) - min;
        }
    }
}

/// Block layout: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, scale of scales. In each
/// half of 128 values, group `g` of 32 has its nibbles in bytes `g % 2 * 32..` (upper ones for `g >= 2`), its pairs
/// at bit `2g`.
#[inline(always)]
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (half, quarter, side) = (group / 8, group / 2 % 4, group % 2);
        let low: &[u8; 16] = part(block, 64 * half + 32 * (quarter % 2) + 16 * side);
        let high: &[u8; 16] = part(block, 128 + 32 * half + 16 * side);
        let scale = scale * f32::from(block[192 + group] as i8);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            let q = (low >> (quarter / 2 * 4)) & 15 | ((high >> (quarter * 2)) & 3) << 4;
            *out = scale * (i32::from(q) - 32) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use candle_core::Device;
    use candle_core::quantized::{GgmlDType, QStorage, QTensor};
    use proptest::prelude::*;

    use super::*;
    use crate::blocks::mxfp4_scale;

    /// Each type, candle's name for it, and the offsets of the half-precision numbers in its block.
    const TYPES: [(Dtype, GgmlDType, &[usize]); 13] = [
        (Dtype::F32, GgmlDType::F32, &[]),
        (Dtype::F16, GgmlDType::F16, &[0]),
        (Dtype::Bf16, GgmlDType::BF16, &[]),
        (Dtype::Q4_0, GgmlDType::Q4_0, &[0]),
        (Dtype::Q4_1, GgmlDType::Q4_1, &[0, 2]),
        (Dtype::Q5_0, GgmlDType::Q5_0, &[0]),
        (Dtype::Q5_1, GgmlDType::Q5_1, &[0, 2]),
        (Dtype::Q8_0, GgmlDType::Q8_0, &[0]),
        (Dtype::Q2K, GgmlDType::Q2K, &[80, 82]),
        (Dtype::Q3K, GgmlDType::Q3K, &[108]),
        (Dtype::Q4K, GgmlDType::Q4K, &[0, 2]),
        (Dtype::Q5K, GgmlDType::Q5K, &[0, 2]),
        (Dtype::Q6K, GgmlDType::Q6K, &[208]),
    ];

    fn candle_values(dtype: GgmlDType, bytes: &[u8], len: usize) -> Vec<f32> {
        let storage = QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype).unwrap();
        let tensor = QTensor::new(storage, (1, len)).unwrap().dequantize(&Device::Cpu).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Clears the exponent's top bit, so that a number and its products are finite.
    fn tame(bytes: &mut [u8], dtype: Dtype, halves: &[usize]) {
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            for &half in halves {
                block[half + 1] &= 0b1011_1111;
            }
            if let (Dtype::F32 | Dtype::Bf16, Some(last)) = (dtype, block.last_mut()) {
                *last &= 0b1011_1111;
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn equals_candle_to_the_bit(seed in prop::collection::vec(any::<u8>(), 3 * 1024)) {
            for (dtype, name, halves) in TYPES {
                let mut bytes = seed[..3 * 256 / dtype.block_len() * dtype.block_bytes()].to_vec();
                tame(&mut bytes, dtype, halves);
                let mut values = vec![f32::NAN; 3 * 256];
                dequantize_row(dtype, &bytes, &mut values);
                let expected = candle_values(name, &bytes, 3 * 256);
                let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&values), bits(&expected), "{}", dtype.name());
            }
        }
    }

    /// Hashes (FNV-1a) of the bits of eight blocks of random bytes, as llama.cpp 0.3.36's `to_float` dequantises them, and the
    /// first value. `tests/quant_types/make.py golden` prints the table.
    const GOLDEN: [(Dtype, u64, f32); 15] = [
        (Dtype::Iq4Xs, 0xa3a6_319f_5cdf_6393, 298.73047),
        (Dtype::Iq4Nl, 0x6f00_c35d_42cb_2a0a, -0.280_761_72),
        (Dtype::Iq3S, 0x7c27_6511_1fd6_f663, 17.687_988),
        (Dtype::Iq3Xxs, 0x220f_4053_8f69_bbd9, 33.410_645),
        (Dtype::Iq2S, 0xa955_3a87_12a4_d877, 4.211_426),
        (Dtype::Iq2Xs, 0x97f6_ccfa_53a7_a2ef, -22.636_414),
        (Dtype::Iq2Xxs, 0x5c78_afae_a08d_18e7, 6.457_519_5),
        (Dtype::Iq1M, 0xa5f8_a75e_f4be_061b, -0.000_970_959_66),
        (Dtype::Iq1S, 0x4f2a_21d6_c382_1e25, 3.193_664_6),
        (Dtype::Tq2_0, 0x8d27_8752_2b38_b85e, 0.006_275_177),
        (Dtype::Tq1_0, 0x2927_626a_c580_ed95, 0.0),
        (Dtype::Q2_0, 0x5a76_9357_1ebe_f973, 0.280_761_72),
        (Dtype::Q1_0, 0x40f1_3fd3_2aef_2a25, 0.280_761_72),
        (Dtype::Nvfp4, 0xf2ec_a98a_01d0_ca75, 896.0),
        (Dtype::Mxfp4, 0xbc9d_ba64_48be_7ab1, 1.0),
    ];

    /// Returns bytes of a linear congruential generator, and its state.
    fn random_bytes(state: u64) -> impl Iterator<Item = u8> {
        std::iter::successors(Some(state), |state| {
            Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407))
        })
        .skip(1)
        .map(|state| (state >> 56) as u8)
    }

    #[test]
    fn codebook_types_equal_llama_cpp_to_the_bit() {
        for (dtype, hash, first) in GOLDEN {
            // The factor of NVFP4 is not in llama.cpp's block.
            let (prefix, scale_at) = match dtype {
                Dtype::Nvfp4 => (4, None),
                Dtype::Mxfp4 => (0, None),
                Dtype::Tq2_0 => (0, Some(64)),
                Dtype::Tq1_0 => (0, Some(52)),
                Dtype::Iq1M => (0, Some(54)),
                _ => (0, Some(0)),
            };
            let mut random = random_bytes(7);
            let mut bytes = Vec::new();
            for _ in 0..8 {
                let start = bytes.len();
                bytes.extend(&1f32.to_le_bytes()[..prefix]);
                bytes.extend(random.by_ref().take(dtype.block_bytes() - prefix));
                if let Some(at) = scale_at {
                    bytes[start + at + 1] &= 0xbf;
                }
            }
            let mut values = vec![f32::NAN; 8 * dtype.block_len()];
            dequantize_row(dtype, &bytes, &mut values);
            assert_eq!(values[0], first, "{}", dtype.name());
            let bits = values.iter().flat_map(|value| value.to_le_bytes());
            let got = bits.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
            assert_eq!(got, hash, "{}: {values:?}", dtype.name());
        }
    }

    /// A scale that is no number makes its values so; every other block is finite, whatever its bytes.
    #[test]
    fn random_blocks_of_codebook_types_are_finite_unless_their_scale_is_not() {
        for (dtype, ..) in GOLDEN {
            let bytes: Vec<u8> = random_bytes(99).take(2000 * dtype.block_bytes()).collect();
            let mut values = vec![0.0; 2000 * dtype.block_len()];
            dequantize_row(dtype, &bytes, &mut values);
            let blocks = values.chunks(dtype.block_len()).zip(bytes.chunks(dtype.block_bytes()));
            let f16_at = |block: &[u8], at: usize| f16::from_le_bytes([block[at], block[at + 1]]).is_finite();
            let mut broken = 0;
            for (values, block) in blocks {
                let is_finite = match dtype {
                    Dtype::Mxfp4 => block[0] < 252,
                    Dtype::Nvfp4 => f32::from_le_bytes(*block.first_chunk().unwrap()).abs() < 1e34,
                    Dtype::Tq2_0 => f16_at(block, 64),
                    Dtype::Tq1_0 => f16_at(block, 52),
                    Dtype::Iq1M => block[55] & 0x70 != 0x70 || block[53] & 0xc0 != 0xc0,
                    _ => f16_at(block, 0),
                };
                broken += usize::from(!is_finite);
                assert!(
                    !is_finite || values.iter().all(|value| value.is_finite()),
                    "{} {block:?}",
                    dtype.name()
                );
            }
            assert!(broken < 2000 / 8, "{}", dtype.name());
        }
    }

    #[test]
    fn a_row_need_not_fill_a_group_and_its_bytes_need_no_alignment() {
        let values: Vec<f32> = (0..67).map(|i| i as f32 / 8.0 - 4.0).collect();
        let mut bytes = vec![0];
        bytes.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()));
        let mut out = vec![0.0; 67];
        dequantize_row(Dtype::F16, &bytes[1..], &mut out);
        assert_eq!(out, values);
    }

    #[test]
    fn special_values_of_plain_floats_survive() {
        let mut out = [0.0; 3];
        let bits = [f16::INFINITY, f16::NAN, f16::NEG_ZERO].map(|half| half.to_le_bytes()).concat();
        dequantize_row(Dtype::F16, &bits, &mut out);
        assert!(out[0] == f32::INFINITY && out[1].is_nan() && out[2].to_bits() == (-0.0f32).to_bits());
    }

    #[test]
    fn mxfp4_has_the_values_of_its_specification() {
        // Exponent 127 is 1; codes 0 to 15 in the low nibbles, and in reverse order in the high ones.
        let mut block = vec![127];
        block.extend((0..16u8).map(|code| code | (15 - code) << 4));
        let mut out = [f32::NAN; 32];
        dequantize_row(Dtype::Mxfp4, &block, &mut out);
        let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, value) in positive.into_iter().enumerate() {
            assert_eq!(
                [out[code], out[code + 8], out[31 - code], out[23 - code]],
                [value, -value, value, -value]
            );
        }
        block[0] = 120;
        dequantize_row(Dtype::Mxfp4, &block, &mut out);
        assert_eq!(out[7], 6.0 / 128.0);
        assert_eq!((mxfp4_scale(0), mxfp4_scale(254)), (f32::from_bits(1 << 21), 2f32.powi(126)));
    }

    #[test]
    #[should_panic(expected = "q4_0 row of 32 values")]
    fn a_row_of_another_length_is_a_bug_of_the_caller() {
        dequantize_row(Dtype::Q4_0, &[0; 17], &mut [0.0; 32]);
    }
}
