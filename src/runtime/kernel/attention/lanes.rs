//! [`Wide`] extended by the operations of attention: loads that widen numbers, and stores of sums.

use half::f16;

use crate::wide::{LANES, Wide};

/// Sixteen f32 with the conversions that pages need. The functions require the instruction set of the implementing
/// type.
pub trait VectorLanes: Wide {
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn mul(self, other: Self) -> Self;

    /// Returns the larger one of each lane; `other` unless they compare.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn max(self, other: Self) -> Self;

    /// # Safety
    /// The processor has the instruction set; 16 numbers can be read.
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: by this function's contract.
        unsafe { Self::load(&*from.cast()) }
    }

    /// # Safety
    /// As [`VectorLanes::load_f32`].
    unsafe fn load_f16(from: *const f16) -> Self;

    /// # Safety
    /// As [`VectorLanes::load_f32`].
    unsafe fn load_i8(from: *const i8) -> Self;

    /// # Safety
    /// The processor has the instruction set; 16 numbers can be written.
    unsafe fn store(self, to: *mut f32);
}

impl VectorLanes for [f32; LANES] {
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * other[lane])
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        std::array::from_fn(|lane| if self[lane] > other[lane] { self[lane] } else { other[lane] })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: by the trait's contract; the pointer comes from a slice of f16.
        let halves = unsafe { *from.cast::<[f16; LANES]>() };
        halves.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: by the trait's contract.
        let codes = unsafe { *from.cast::<[i8; LANES]>() };
        codes.map(f32::from)
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: by the trait's contract; the pointer comes from a slice of f32.
        unsafe { *to.cast() = self };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

    use super::VectorLanes;

    /// AVX2, FMA and F16C.
    impl VectorLanes for [__m256; 2] {
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_mul_ps(self[0], other[0]), _mm256_mul_ps(self[1], other[1])] }
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_max_ps(self[0], other[0]), _mm256_max_ps(self[1], other[1])] }
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe {
                let halves = |at| _mm_loadu_si128(from.add(at).cast());
                [_mm256_cvtph_ps(halves(0)), _mm256_cvtph_ps(halves(8))]
            }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe {
                let codes = |at| _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(at).cast()));
                [_mm256_cvtepi32_ps(codes(0)), _mm256_cvtepi32_ps(codes(8))]
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe {
                _mm256_storeu_ps(to, self[0]);
                _mm256_storeu_ps(to.add(8), self[1]);
            }
        }
    }

    /// AVX-512 F.
    impl VectorLanes for __m512 {
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_mul_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_max_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe { _mm512_storeu_ps(to, self) };
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::aarch64::*;

    use half::f16;

    use super::VectorLanes;

    /// NEON, which every aarch64 target has.
    impl VectorLanes for [float32x4_t; 4] {
        /// Of 32 registers: 16 for sums, 8 for the keys of a page, the rest for queries and conversions.
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: every aarch64 has the instruction.
            std::array::from_fn(|at| unsafe { vmulq_f32(self[at], other[at]) })
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: every aarch64 has the instructions.
            std::array::from_fn(|at| unsafe {
                vbslq_f32(vcgtq_f32(self[at], other[at]), self[at], other[at])
            })
        }

        #[inline(always)]
        unsafe fn load_f16(from: *const f16) -> Self {
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe {
                let [low, high] = [0, 8].map(|at| vreinterpretq_f16_u16(vld1q_u16(from.add(at).cast())));
                [
                    vcvt_f32_f16(vget_low_f16(low)),
                    vcvt_high_f32_f16(low),
                    vcvt_f32_f16(vget_low_f16(high)),
                    vcvt_high_f32_f16(high),
                ]
            }
        }

        #[inline(always)]
        unsafe fn load_i8(from: *const i8) -> Self {
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe {
                let codes = vld1q_s8(from);
                let (low, high) = (vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes));
                [
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                    vcvtq_f32_s32(vmovl_high_s16(low)),
                    vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                    vcvtq_f32_s32(vmovl_high_s16(high)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            for (at, four) in self.into_iter().enumerate() {
                // SAFETY: by the trait's contract; four times 4 numbers.
                unsafe { vst1q_f32(to.add(4 * at), four) };
            }
        }
    }
}
