//! Transpositions of squares in registers: pairs of lines, pairs of pairs, then 128-bit parts.

use std::arch::x86_64::*;

/// Transposes 8 x 8 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
pub fn eight(lines: [__m256i; 8]) -> [__m256i; 8] {
    let mut pairs = lines;
    for at in (0..8).step_by(2) {
        pairs[at] = _mm256_unpacklo_epi32(lines[at], lines[at + 1]);
        pairs[at + 1] = _mm256_unpackhi_epi32(lines[at], lines[at + 1]);
    }
    let mut fours = lines;
    for at in (0..8).step_by(4) {
        for half in 0..2 {
            fours[at + 2 * half] = _mm256_unpacklo_epi64(pairs[at + half], pairs[at + half + 2]);
            fours[at + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[at + half], pairs[at + half + 2]);
        }
    }
    let mut out = lines;
    for j in 0..4 {
        out[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
        out[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
    }
    out
}

/// Transposes 16 x 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn sixteen(lines: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = lines;
    for at in (0..16).step_by(2) {
        pairs[at] = _mm512_unpacklo_epi32(lines[at], lines[at + 1]);
        pairs[at + 1] = _mm512_unpackhi_epi32(lines[at], lines[at + 1]);
    }
    // Register `4 * i + j` has, in its 128-bit lane `l`, number `4 * l + j` of lines `4 * i` to `4 * i + 3`.
    let mut fours = lines;
    for at in (0..16).step_by(4) {
        for half in 0..2 {
            fours[at + 2 * half] = _mm512_unpacklo_epi64(pairs[at + half], pairs[at + half + 2]);
            fours[at + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[at + half], pairs[at + half + 2]);
        }
    }
    let mut out = lines;
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let even = [_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0x88>(c, d)];
        let odd = [_mm512_shuffle_i32x4::<0xdd>(a, b), _mm512_shuffle_i32x4::<0xdd>(c, d)];
        out[j] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    out
}
