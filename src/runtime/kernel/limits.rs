//! Limits of the machine: bytes read from memory and arithmetic operations per second.
//!
//! Benchmarks report them beside their rates, because the same machine's speed varies from minute to minute.
//! A pass does a known amount of work on all threads of a pool and returns the amount; the caller measures
//! the time.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::isa::{Isa, isa};
use super::pool::Pool;
use super::wide::{LANES, MAX_SUMS, Wide, dispatch_wide};

/// Size of the buffer of a bandwidth pass in bytes: larger than any cache.
pub const BUFFER_BYTES: usize = 256 << 20;

/// A machine's limits with a number of threads, in units of 10^9 per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineLimits {
    /// Gigabytes read from memory.
    pub read_gb: f64,
    /// 8-bit integer operations, counting a multiplication and an addition as two; `None` if the processor has no
    /// known instruction for them.
    pub int8_gop: Option<f64>,
    /// Operations on f32, counted in the same way.
    pub f32_gop: Option<f64>,
}

/// Measures for about `time`: half of it memory, the rest arithmetic. Each figure is a median over passes.
///
/// # Errors
/// If the system cannot start the threads.
pub fn probe(threads: usize, time: Duration) -> io::Result<MachineLimits> {
    let pool = Pool::new(threads)?;
    let read_gb = {
        let buffer = vec![1u64; BUFFER_BYTES / 8];
        rate(time / 2, || Some(read_pass(&pool, &buffer)))
    };
    let int8_gop = rate(time / 4, || int8_pass(&pool));
    let f32_gop = rate(time / 4, || f32_pass(&pool));
    Ok(MachineLimits { read_gb: read_gb.unwrap_or(0.0), int8_gop, f32_gop })
}

/// Returns the work per second in units of 10^9: the median over the passes that fit into `time`, at least three.
fn rate(time: Duration, pass: impl Fn() -> Option<usize>) -> Option<f64> {
    let start = Instant::now();
    let mut rates = Vec::new();
    while rates.len() < 3 || start.elapsed() < time {
        let begun = Instant::now();
        let work = pass()?;
        rates.push(work as f64 / begun.elapsed().as_secs_f64() / 1e9);
    }
    rates.sort_by(f64::total_cmp);
    Some(rates[rates.len() / 2])
}

/// Reads the buffer once with all threads. Returns the bytes read.
pub fn read_pass(pool: &Pool, buffer: &[u64]) -> usize {
    let parts = pool.threads() * 8;
    let part = buffer.len() / parts;
    pool.for_each(parts, |index| {
        let mut sums = [0u64; 32];
        for line in buffer[index * part..][..part].as_chunks::<32>().0 {
            for (sum, value) in sums.iter_mut().zip(line) {
                *sum |= value;
            }
        }
        black_box(sums);
    });
    parts * part * 8
}

/// Multiplies and adds 8-bit integers with all threads. Returns the operations; `None` if the instruction is missing.
pub fn int8_pass(pool: &Pool) -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if isa() == Isa::Amx {
        const ITERATIONS: usize = 1_000_000;
        pool.run(&|_| {
            // SAFETY: the processor has tiles and this process may use them.
            unsafe { peak::amx(ITERATIONS) };
        });
        return Some(pool.threads() * ITERATIONS * 4 * 2 * 16 * 16 * 64);
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512vnni") {
        const ITERATIONS: usize = 4_000_000;
        pool.run(&|_| {
            // SAFETY: the feature was detected.
            black_box(unsafe { peak::vnni(ITERATIONS) });
        });
        return Some(pool.threads() * ITERATIONS * 16 * 128);
    }
    #[cfg(target_arch = "aarch64")]
    {
        const ITERATIONS: usize = 1_000_000;
        if Isa::I8mm.is_available() {
            // SAFETY: the processor has the instruction.
            pool.run(&|_| unsafe { peak_aarch64::smmla(ITERATIONS) });
            return Some(pool.threads() * ITERATIONS * peak_aarch64::CHAINS * 64);
        }
        if Isa::Dotprod.is_available() {
            // SAFETY: the processor has the instruction.
            pool.run(&|_| unsafe { peak_aarch64::sdot(ITERATIONS) });
            return Some(pool.threads() * ITERATIONS * peak_aarch64::CHAINS * 32);
        }
    }
    let _ = pool;
    None
}

/// Multiplies and adds f32 with all threads. Returns the operations; `None` without vector registers.
pub fn f32_pass(pool: &Pool) -> Option<usize> {
    const ITERATIONS: usize = 1_000_000;
    let operations = AtomicUsize::new(0);
    pool.run(&|_| {
        let mut done = 0;
        fma_chains(isa(), ITERATIONS, &mut done);
        operations.fetch_add(done, Ordering::Relaxed);
    });
    (isa() != Isa::Scalar).then_some(operations.into_inner())
}

dispatch_wide! {
    /// Runs independent chains of multiplications and additions; adds the number of operations to the second argument.
    fn fma_chains(iterations: usize, operations: &mut usize) = fma_chains_body
}

/// # Safety
/// The processor has the instruction set of `W`.
#[inline(always)]
unsafe fn fma_chains_body<W: Wide>(iterations: usize, operations: &mut usize) {
    // SAFETY: by this function's contract.
    unsafe {
        let mut sums = [W::zero(); MAX_SUMS];
        let (a, b) = (W::splat(0.5), W::splat(black_box(0.25)));
        for _ in 0..iterations {
            for sum in &mut sums[..W::SUMS] {
                *sum = sum.fma(a, b);
            }
            black_box(());
        }
        sums[..W::SUMS].iter().for_each(|sum| _ = black_box(sum.lanes()));
    }
    *operations += iterations * W::SUMS * LANES * 2;
}

/// Chains of one instruction, enough of them to hide its latency.
#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use crate::gemm::TileConfig;

    /// Runs four independent chains of `tdpbssd`, on tiles of 16 rows of 64 bytes.
    ///
    /// # Safety
    /// The processor has AMX for integers, and this process may use it.
    pub unsafe fn amx(iterations: usize) {
        // SAFETY: by this function's contract; the configuration is valid, and the one in force is loaded again.
        unsafe {
            let others = TileConfig::current();
            TileConfig::of([(16, 64); 6]).load();
            asm!(
                "2:",
                "tdpbssd tmm0, tmm4, tmm5",
                "tdpbssd tmm1, tmm4, tmm5",
                "tdpbssd tmm2, tmm4, tmm5",
                "tdpbssd tmm3, tmm4, tmm5",
                "dec {iterations}",
                "jnz 2b",
                iterations = inout(reg) iterations => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack, nomem),
            );
            others.load();
        }
    }

    /// Runs 16 independent chains of `vpdpbusd`.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn vnni(iterations: usize) -> i32 {
        let mut sums = [_mm512_setzero_si512(); 16];
        let (a, b) = (_mm512_set1_epi8(3), _mm512_set1_epi8(black_box(5)));
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
            black_box(());
        }
        sums.iter().map(|sum| _mm512_reduce_add_epi32(*sum)).fold(0, i32::wrapping_add)
    }
}

/// Chains of one instruction on aarch64. Sixteen hide a latency of four cycles on four units. The instructions of `asm!`
/// have no stable intrinsics.
#[cfg(target_arch = "aarch64")]
mod peak_aarch64 {
    use std::arch::asm;

    /// Independent chains of each loop.
    pub const CHAINS: usize = 16;

    /// Defines a loop of one instruction over 16 sums. The factors are 0, so that sums keep
    /// their values.
    macro_rules! chains {
        ($iterations:expr, $directive:literal, $start:literal, $end:literal) => {
            asm!(
                $directive,
                "movi v16.2d, #0",
                "movi v17.2d, #0",
                "2:",
                ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 18, 19, 20, 21, 22, 23, 24, 25",
                concat!($start, "\\n\\()", $end),
                ".endr",
                "subs {iterations}, {iterations}, #1",
                "b.ne 2b",
                iterations = inout(reg) $iterations => _,
                out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _, out("v6") _,
                out("v7") _, out("v16") _, out("v17") _, out("v18") _, out("v19") _, out("v20") _, out("v21") _,
                out("v22") _, out("v23") _, out("v24") _, out("v25") _,
                options(nostack, nomem),
            )
        };
    }

    /// # Safety
    /// The processor has i8mm.
    pub unsafe fn smmla(iterations: usize) {
        // SAFETY: by this function's contract; no memory is used.
        unsafe { chains!(iterations, ".arch_extension i8mm", "smmla v", ".4s, v16.16b, v17.16b") };
    }

    /// # Safety
    /// The processor has dotprod.
    pub unsafe fn sdot(iterations: usize) {
        // SAFETY: by this function's contract; no memory is used.
        unsafe { chains!(iterations, ".arch_extension dotprod", "sdot v", ".4s, v16.16b, v17.16b") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_says_how_much_it_did() {
        let pool = Pool::new(2).expect("threads");
        let buffer = vec![0; 16 * 32 * 3];
        assert_eq!(read_pass(&pool, &buffer), buffer.len() * 8);
        assert_eq!(rate(Duration::ZERO, || None), None);
        assert!(rate(Duration::ZERO, || Some(1)).is_some_and(|rate| rate > 0.0));
    }

    #[test]
    #[cfg(target_arch = "aarch64")]
    fn every_aarch64_has_a_limit_for_f32_and_those_with_sdot_one_for_int8() {
        let pool = Pool::new(1).expect("threads");
        assert_eq!(f32_pass(&pool), Some(1_000_000 * 16 * 8));
        let per_instruction = match isa() {
            Isa::I8mm => Some(64),
            Isa::Dotprod => Some(32),
            _ => None,
        };
        assert_eq!(int8_pass(&pool), per_instruction.map(|operations| 1_000_000 * 16 * operations));
    }
}
