//! Sixteen f32 side by side in the instruction set's form: one register, two, four, or an array.
//!
//! Every operation acts on each lane separately, so kernels over [`Wide`] give the same bits with all of
//! them. Used where plain loops over arrays are too slow: with many sums at once the compiler splits arrays
//! into single numbers.

/// Lanes of a [`Wide`].
pub const LANES: usize = 16;

/// The largest [`Wide::SUMS`].
pub const MAX_SUMS: usize = 16;

/// Defines a function whose body is generic over [`Wide`], for each instruction set: the first argument chooses it. Panics if the
/// processor lacks it.
macro_rules! dispatch_wide {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::Isa, $($arg: $ty),*) {
            /// # Safety
            /// The features.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: by this function's contract.
                unsafe { $body::<[std::arch::x86_64::__m256; 2]>($($arg),*) }
            }
            /// # Safety
            /// The features.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: by this function's contract.
                unsafe { $body::<std::arch::x86_64::__m512>($($arg),*) }
            }
            use $crate::Isa;
            assert!(isa.is_available(), "instruction set not available");
            // SAFETY: the assertion above: this processor has the features that each function enables.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon | Isa::Dotprod | Isa::I8mm => {
                        $body::<[std::arch::aarch64::float32x4_t; 4]>($($arg),*)
                    }
                    _ => $body::<[f32; $crate::wide::LANES]>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use dispatch_wide;

/// Sixteen f32. The functions require the instruction set of the implementing type.
pub trait Wide: Copy {
    /// Number of sums that fit into the registers beside their operands.
    const SUMS: usize;

    /// # Safety
    /// The processor has the instruction set.
    unsafe fn zero() -> Self;

    /// # Safety
    /// The processor has the instruction set.
    unsafe fn load(from: &[f32; LANES]) -> Self;

    /// # Safety
    /// The processor has the instruction set.
    unsafe fn splat(value: f32) -> Self;

    /// # Safety
    /// The processor has the instruction set.
    unsafe fn add(self, other: Self) -> Self;

    /// Computes `self + a * b` with one rounding.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn fma(self, a: Self, b: Self) -> Self;

    /// # Safety
    /// The processor has the instruction set.
    unsafe fn lanes(self) -> [f32; LANES];
}

impl Wide for [f32; LANES] {
    const SUMS: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> Self {
        *from
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        [value; LANES]
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] + other[lane])
    }

    #[inline(always)]
    unsafe fn fma(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], self[lane]))
    }

    #[inline(always)]
    unsafe fn lanes(self) -> [f32; LANES] {
        self
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, MAX_SUMS, Wide};

    /// AVX2 and FMA.
    impl Wide for [__m256; 2] {
        const SUMS: usize = 4;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_setzero_ps(); 2] }
        }

        #[inline(always)]
        unsafe fn load(from: &[f32; LANES]) -> Self {
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_set1_ps(value); 2] }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_add_ps(self[0], other[0]), _mm256_add_ps(self[1], other[1])] }
        }

        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { [_mm256_fmadd_ps(a[0], b[0], self[0]), _mm256_fmadd_ps(a[1], b[1], self[1])] }
        }

        #[inline(always)]
        unsafe fn lanes(self) -> [f32; LANES] {
            let mut lanes = [0.0; LANES];
            // SAFETY: by the trait's contract; two times 8 numbers.
            unsafe {
                _mm256_storeu_ps(lanes.as_mut_ptr(), self[0]);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), self[1]);
            }
            lanes
        }
    }

    /// AVX-512 F.
    impl Wide for __m512 {
        const SUMS: usize = MAX_SUMS;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn load(from: &[f32; LANES]) -> Self {
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe { _mm512_loadu_ps(from.as_ptr()) }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_add_ps(self, other) }
        }

        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: by the trait's contract.
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }

        #[inline(always)]
        unsafe fn lanes(self) -> [f32; LANES] {
            let mut lanes = [0.0; LANES];
            // SAFETY: by the trait's contract; 16 numbers.
            unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), self) };
            lanes
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::aarch64::*;

    use super::{LANES, Wide};

    /// NEON, which every aarch64 target has.
    impl Wide for [float32x4_t; 4] {
        const SUMS: usize = 4;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: every aarch64 has the instruction.
            unsafe { [vdupq_n_f32(0.0); 4] }
        }

        #[inline(always)]
        unsafe fn load(from: &[f32; LANES]) -> Self {
            // SAFETY: four times 4 numbers.
            std::array::from_fn(|at| unsafe { vld1q_f32(from.as_ptr().add(4 * at)) })
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: every aarch64 has the instruction.
            unsafe { [vdupq_n_f32(value); 4] }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: every aarch64 has the instruction.
            std::array::from_fn(|at| unsafe { vaddq_f32(self[at], other[at]) })
        }

        #[inline(always)]
        unsafe fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: every aarch64 has the instruction.
            std::array::from_fn(|at| unsafe { vfmaq_f32(self[at], a[at], b[at]) })
        }

        #[inline(always)]
        unsafe fn lanes(self) -> [f32; LANES] {
            let mut lanes = [0.0; LANES];
            for (at, four) in self.into_iter().enumerate() {
                // SAFETY: four times 4 numbers.
                unsafe { vst1q_f32(lanes.as_mut_ptr().add(4 * at), four) };
            }
            lanes
        }
    }
}
