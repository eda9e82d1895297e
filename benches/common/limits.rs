//! The machine's limits as rates, timed as the benchmark at hand is. Shared by the benchmarks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use llmctl_kernel::limits;
use llmctl_kernel::pool::Pool;

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

/// Work per second, in units of 10^9.
fn rate(work: impl FnOnce() -> usize) -> f64 {
    let mut done = 0;
    let time = seconds(|| done = work());
    done as f64 / time / 1e9
}

/// Bytes read per second by all threads, in GB.
pub fn read_bandwidth(pool: &Pool, buffer: &[u64]) -> f64 {
    rate(|| limits::read_pass(pool, buffer))
}

/// Integer operations per second by all threads, in G; 0 where the instruction is missing.
pub fn int8_peak(pool: &Pool) -> f64 {
    rate(|| limits::int8_pass(pool).unwrap_or(0))
}

/// f32 operations per second by all threads, in G; 0 where the instruction is missing.
pub fn f32_peak(pool: &Pool) -> f64 {
    rate(|| limits::f32_pass(pool).unwrap_or(0))
}
