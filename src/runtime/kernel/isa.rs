//! Selection of the kernels' instruction set: detected once, at run time, so that one portable binary is
//! fast.
//!
//! A kernel is one safe, `#[inline(always)]` body in plain Rust; [`dispatch!`](crate::isa) compiles it once
//! per instruction set and selects one by [`isa`]. The bodies fix the order of every reduction and use
//! `mul_add` throughout, so all variants give the same bits and differ in speed only.

use std::sync::OnceLock;

/// Instruction sets that the kernels are compiled for, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The build target's own instructions; always available.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL beside AVX2.
    Avx512,
    /// AMX byte tiles beside AVX-512 and its VNNI, for integer products of many rows.
    Amx,
    /// NEON of aarch64: the build target's own instructions, with kernels written for them.
    Neon,
    /// Dot products of four bytes (`sdot`) beside NEON.
    Dotprod,
    /// Products of 2 x 8 byte matrices (`smmla`) beside `sdot`.
    I8mm,
}

impl Isa {
    /// Every instruction set of every processor, slowest first within an architecture.
    pub const ALL: [Isa; 7] =
        [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx, Isa::Neon, Isa::Dotprod, Isa::I8mm];

    /// Returns the best instruction set of this processor.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                let amx = is_x86_feature_detected!("avx512vnni") && has_amx();
                return if amx { Isa::Amx } else { Isa::Avx512 };
            }
            if avx2 {
                return Isa::Avx2;
            }
            Isa::Scalar
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            match (is_aarch64_feature_detected!("dotprod"), is_aarch64_feature_detected!("i8mm")) {
                (true, true) => Isa::I8mm,
                (true, false) => Isa::Dotprod,
                (false, _) => Isa::Neon,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Isa::Scalar
    }

    /// Returns the instruction sets of this processor, slowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|set| set.is_available())
    }

    /// Returns whether this processor has the instruction set.
    #[inline(always)]
    pub fn is_available(self) -> bool {
        let here = match self {
            Isa::Scalar => true,
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => cfg!(target_arch = "x86_64"),
            Isa::Neon | Isa::Dotprod | Isa::I8mm => cfg!(target_arch = "aarch64"),
        };
        here && self <= isa()
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
            Isa::Dotprod => "dotprod",
            Isa::I8mm => "i8mm",
        }
    }
}

/// Returns whether the processor has byte tiles and the system lets this process use them: Linux grants the tile
/// registers on request only, because they make every saved thread state 8 KiB larger.
///
/// Source: Intel's instruction set reference (leaf 7 of `cpuid`), the kernel's Documentation/arch/x86/xstate.rst.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    let both = AMX_TILE | AMX_INT8;
    let has_leaf = std::arch::x86_64::__cpuid(0).eax >= 7;
    has_leaf
        && std::arch::x86_64::__cpuid_count(7, 0).edx & both == both
        // SAFETY: no memory is passed.
        && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn has_amx() -> bool {
    false
}

/// Returns whether Intel made the processor: the best prefetching differs by vendor.
#[cfg(target_arch = "x86_64")]
pub fn is_intel() -> bool {
    static IS_INTEL: OnceLock<bool> = OnceLock::new();
    *IS_INTEL.get_or_init(|| {
        let leaf = std::arch::x86_64::__cpuid(0);
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"GenuineIntel"
    })
}

/// Returns the best instruction set, detected once; the default of a backend.
pub fn isa() -> Isa {
    static DETECTED: OnceLock<Isa> = OnceLock::new();
    *DETECTED.get_or_init(Isa::detect)
}

/// Declares `pub fn $name(isa, args...)`, which runs `$body` compiled for `isa`.
///
/// `$body` must be `#[inline(always)]`, so that it gets the features of the function it is inlined into.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                use $crate::Isa;
                assert!(isa.is_available(), "instruction set not available");
                match isa {
                    // SAFETY: the assertion above: this processor has the features that the function enables.
                    Isa::Avx512 | Isa::Amx => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    // On aarch64 the body is compiled with NEON, which every such target has.
                    Isa::Scalar | Isa::Neon | Isa::Dotprod | Isa::I8mm => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
pub(crate) use dispatch;

/// Lists the instruction sets that can be tested on this machine.
#[cfg(test)]
pub fn available() -> Vec<Isa> {
    Isa::available().collect()
}
