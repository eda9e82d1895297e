//! What the machine can do at most: bytes read and integer operations per second. Shared by the benchmarks.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use llmctl::runtime::kernel::pool::Pool;

/// Time of the calling thread alone: with `threads=1`, what other processes do shows only through caches and memory.
pub static PROCESSOR_TIME: AtomicBool = AtomicBool::new(false);

fn processor_time() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub fn seconds(work: impl FnOnce()) -> f64 {
    let (start, processor_start) = (Instant::now(), processor_time());
    work();
    if PROCESSOR_TIME.load(Ordering::Relaxed) {
        processor_time() - processor_start
    } else {
        start.elapsed().as_secs_f64()
    }
}

/// Bytes read per second by all threads, in GB.
pub fn read_bandwidth(pool: &Pool, buffer: &[u64]) -> f64 {
    let parts = pool.threads() * 8;
    let part = buffer.len() / parts;
    let time = seconds(|| {
        pool.for_each(parts, |index| {
            let mut sums = [0u64; 32];
            for line in buffer[index * part..][..part].as_chunks::<32>().0 {
                for (sum, value) in sums.iter_mut().zip(line) {
                    *sum |= value;
                }
            }
            black_box(sums);
        });
    });
    (parts * part * 8) as f64 / time / 1e9
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;

    /// 16 independent chains of `vfmadd231ps`.
    #[target_feature(enable = "avx512f")]
    pub fn fma(iterations: usize) -> f32 {
        let mut sums = [_mm512_setzero_ps(); 16];
        let (a, b) = (_mm512_set1_ps(0.5), _mm512_set1_ps(std::hint::black_box(0.25)));
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
            std::hint::black_box(());
        }
        sums.iter().map(|sum| _mm512_reduce_add_ps(*sum)).sum()
    }

    /// 16 independent chains of `vpdpbusd`.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn vnni(iterations: usize) -> i32 {
        let mut sums = [_mm512_setzero_si512(); 16];
        let (a, b) = (_mm512_set1_epi8(3), _mm512_set1_epi8(std::hint::black_box(5)));
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
            std::hint::black_box(());
        }
        sums.iter().map(|sum| _mm512_reduce_add_epi32(*sum)).fold(0, i32::wrapping_add)
    }
}

/// Integer operations per second by all threads, in G; 0 where the instruction is missing.
pub fn int8_peak(pool: &Pool) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512vnni") {
        const ITERATIONS: usize = 4_000_000;
        let time = seconds(|| {
            pool.run(&|_| {
                // SAFETY: the feature was detected.
                black_box(unsafe { peak::vnni(ITERATIONS) });
            });
        });
        return (pool.threads() * ITERATIONS * 16 * 128) as f64 / time / 1e9;
    }
    let _ = pool;
    0.0
}

/// f32 operations per second by all threads, in G; 0 where the instruction is missing.
pub fn f32_peak(pool: &Pool) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        const ITERATIONS: usize = 1_000_000;
        let time = seconds(|| {
            pool.run(&|_| {
                // SAFETY: the feature was detected.
                black_box(unsafe { peak::fma(ITERATIONS) });
            });
        });
        return (pool.threads() * ITERATIONS * 16 * 32) as f64 / time / 1e9;
    }
    let _ = pool;
    0.0
}
