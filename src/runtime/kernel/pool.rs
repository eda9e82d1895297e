//! Persistent threads for parallel regions: one closure, called by every worker, including the caller.
//!
//! Invariants: a region ends when no worker is in it, so the closure may borrow from the caller's stack; a
//! panic in a worker is then raised again on the caller. Starting a region allocates nothing. Idle workers
//! wait for [`PATIENCE`](super::region::PATIENCE), then sleep: an idle pool costs no processor time, and
//! neither do workers excluded by a smaller number of threads. One region runs at a time: the pool is not
//! `Sync`, so a closure cannot start another. The meeting of caller and workers is in
//! [`region`](super::region).

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, ThreadId};

use super::region::{Region, SystemThreading};

type RegionTask<'a> = dyn Fn(usize) + Sync + 'a;

/// A fixed number of threads that share the work of a region.
pub struct Pool {
    shared: Arc<PoolShared>,
    handles: Vec<JoinHandle<()>>,
    /// Workers of the next region, without the caller.
    active: Cell<usize>,
    /// Processors that this process may use.
    processors: usize,
    /// The thread whose handle `shared` holds; also keeps the pool from being `Sync`.
    caller: Cell<Option<ThreadId>>,
}

struct PoolShared {
    /// The region's closure; written by the caller between regions, read by workers within.
    task: UnsafeCell<Option<&'static RegionTask<'static>>>,
    region: Region<SystemThreading>,
    /// For every worker, including the caller, the next index of its part of a [`Pool::for_each`].
    parts: Vec<TaskCounter>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Workers that a region needs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attendance {
    /// Every worker has a part of its own.
    All,
    /// The work is done when the caller has found no more of it: workers that have not begun by then stay away.
    Optional,
}

/// Counter on its own cache line, since its worker writes to it for every task.
#[derive(Default)]
#[repr(align(64))]
struct TaskCounter(AtomicUsize);

// SAFETY: `task` is written by the caller only while all workers are idle, and read by workers only after they have
// joined a region. The closure itself is `Sync`.
unsafe impl Sync for PoolShared {}

impl PoolShared {
    fn work(&self, worker: usize) {
        while self.region.join(worker - 1) {
            // SAFETY: the caller wrote `task` before it called this worker and leaves it until this worker has left.
            let task = unsafe { *self.task.get() }.expect("a region has a task");
            self.call(task, worker);
            self.region.leave(worker - 1);
        }
    }

    fn call(&self, task: &RegionTask<'_>, worker: usize) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(worker))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
    }
}

impl Pool {
    /// Creates a pool of `threads` workers, at least one; the caller of a region is one of them.
    ///
    /// # Errors
    /// If the system cannot start the threads.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let others = threads.max(1) - 1;
        let shared = Arc::new(PoolShared {
            task: UnsafeCell::new(None),
            region: Region::new(others),
            parts: (0..=others).map(|_| TaskCounter::default()).collect(),
            panic: Mutex::new(None),
        });
        // Built first, so that an error below drops it and ends the threads that have started.
        let mut pool = Pool {
            shared,
            handles: Vec::with_capacity(others),
            active: Cell::new(others),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            caller: Cell::new(None),
        };
        for worker in 1..=others {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("cpu-{worker}"));
            pool.handles.push(builder.spawn(move || shared.work(worker))?);
        }
        pool.use_threads(threads);
        Ok(pool)
    }

    /// Returns the number of workers of the next region.
    pub fn threads(&self) -> usize {
        self.active.get() + 1
    }

    /// Sets the number of workers of later regions: at least one, at most the pool's size. The others sleep.
    pub fn use_threads(&self, threads: usize) {
        let threads = threads.clamp(1, self.handles.len() + 1);
        self.active.set(threads - 1);
        self.shared.region.set_crowded(threads > self.processors);
    }

    /// Calls `task(worker)` once for every worker `0..threads()`, the caller being worker 0, and returns when all
    /// have finished.
    ///
    /// # Panics
    /// With the panic of a worker.
    pub fn run(&self, task: &(dyn Fn(usize) + Sync)) {
        self.run_with(Attendance::All, task);
    }

    fn run_with(&self, attendance: Attendance, task: &(dyn Fn(usize) + Sync)) {
        let active = self.active.get();
        if active == 0 {
            return task(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes; `task` outlives the region, because this function does not return or
        // unwind before all workers are idle, and idle workers do not touch it.
        let task_static =
            unsafe { std::mem::transmute::<&RegionTask<'_>, &'static RegionTask<'static>>(task) };
        // SAFETY: no region is running: the pool is not `Sync` and the last region was waited for.
        unsafe { *shared.task.get() = Some(task_static) };
        self.remember_caller();
        shared.region.call(active, |worker| self.handles[worker].thread());
        shared.call(task, 0);
        if attendance == Attendance::Optional {
            shared.region.withdraw(active);
        }
        shared.region.wait(active);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Stores a handle of the calling thread for workers to wake; replaces that of another thread.
    fn remember_caller(&self) {
        let current = std::thread::current();
        if self.caller.replace(Some(current.id())) != Some(current.id()) {
            self.shared.region.set_caller(current);
        }
    }

    /// Calls `task` for every index below `count`, each on some worker; a result that depends on the index only does
    /// not depend on the worker.
    ///
    /// Every worker begins with its own part and then helps the others with theirs. Neighbouring indices are mostly
    /// computed by one worker in order, which makes reading weights a quarter faster.
    pub fn for_each(&self, count: usize, task: impl Fn(usize) + Sync) {
        let workers = self.threads();
        if workers == 1 || count < 2 {
            return (0..count).for_each(task);
        }
        let parts = &self.shared.parts[..workers];
        let start = |part: usize| count * part / workers;
        for (part, TaskCounter(next)) in parts.iter().enumerate() {
            next.store(start(part), Ordering::Relaxed);
        }
        self.run_with(Attendance::Optional, &|worker| {
            for part in (worker..workers).chain(0..worker) {
                loop {
                    let index = parts[part].0.fetch_add(1, Ordering::Relaxed);
                    if index >= start(part + 1) {
                        break;
                    }
                    task(index);
                }
            }
        });
    }

    /// Calls `task(list, index)` for every index below `counts[list]`, all lists in one region; on this thread alone
    /// unless `parallel`.
    pub fn for_each_of(&self, counts: &[usize], parallel: bool, task: impl Fn(usize, usize) + Sync) {
        let at = |mut index: usize| {
            for (list, &count) in counts.iter().enumerate() {
                if index < count {
                    return task(list, index);
                }
                index -= count;
            }
        };
        let count = counts.iter().sum();
        if parallel { self.for_each(count, at) } else { (0..count).for_each(at) }
    }

    /// Calls `task(index, chunk)` for every chunk of `values`, cut as by [`slice::chunks_mut`].
    pub fn chunks_mut<T: Send>(&self, values: &mut [T], chunk: usize, task: impl Fn(usize, &mut [T]) + Sync) {
        let chunks = SliceChunks::new(values, chunk);
        self.for_each(chunks.count(), |index| {
            // SAFETY: `values` is borrowed mutably until the region ends; every index is given out once.
            task(index, unsafe { chunks.get(index) });
        });
    }

    /// Calls `task(index, chunk, other_chunk)` for every two chunks of the same index, with `chunks` elements each.
    ///
    /// # Panics
    /// If the numbers of chunks differ.
    pub fn zip_chunks_mut<T: Send, U: Send>(
        &self,
        values: &mut [T],
        others: &mut [U],
        chunks: [usize; 2],
        task: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        let (values, others) = (SliceChunks::new(values, chunks[0]), SliceChunks::new(others, chunks[1]));
        assert_eq!(values.count(), others.count(), "as many chunks of both");
        self.for_each(values.count(), |index| {
            // SAFETY: both are borrowed mutably until the region ends; every index is given out once.
            unsafe { task(index, values.get(index), others.get(index)) };
        });
    }
}

/// The chunks of a slice, for tasks that take one each.
struct SliceChunks<T> {
    base: AtomicPtr<T>,
    len: usize,
    chunk: usize,
}

impl<T: Send> SliceChunks<T> {
    fn new(values: &mut [T], chunk: usize) -> Self {
        Self { base: AtomicPtr::new(values.as_mut_ptr()), len: values.len(), chunk }
    }

    fn count(&self) -> usize {
        self.len.div_ceil(self.chunk)
    }

    /// # Safety
    /// The slice is still borrowed, `index` is below the count, and no other task has this chunk.
    #[allow(clippy::mut_from_ref, reason = "each chunk is given out once")]
    unsafe fn get(&self, index: usize) -> &mut [T] {
        let start = index * self.chunk;
        let count = self.chunk.min(self.len - start);
        // SAFETY: within the slice; chunks do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.base.load(Ordering::Relaxed).add(start), count) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let idle = |worker: usize| self.handles[worker].thread();
        self.shared.region.stop(self.handles.len(), idle);
        for handle in self.handles.drain(..) {
            // A worker catches the panics of its tasks, so the thread itself does not panic.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::region::PATIENCE;

    #[test]
    fn every_worker_is_called_once_per_region() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            let regions = if cfg!(miri) { 5 } else { 300 };
            for _ in 0..regions {
                pool.run(&|worker| {
                    calls[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == regions));
        }
    }

    #[test]
    fn sleeping_workers_are_woken_and_a_sleeping_caller_too() {
        let pool = Pool::new(3).unwrap();
        for _ in 0..3 {
            std::thread::sleep(PATIENCE * 20);
            let sum = AtomicUsize::new(0);
            pool.run(&|worker| {
                if worker > 0 {
                    std::thread::sleep(PATIENCE * 20);
                }
                sum.fetch_add(worker, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 3);
        }
    }

    #[test]
    fn a_smaller_number_of_threads_leaves_the_others_asleep() {
        let pool = Pool::new(4).unwrap();
        for (asked, expected) in [(2, 2), (4, 4), (0, 1), (9, 4), (3, 3), (1, 1), (4, 4)] {
            pool.use_threads(asked);
            assert_eq!(pool.threads(), expected);
            let calls: [AtomicUsize; 4] = std::array::from_fn(|_| AtomicUsize::new(0));
            for _ in 0..50 {
                pool.run(&|worker| {
                    calls[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            for (worker, calls) in calls.into_iter().enumerate() {
                assert_eq!(calls.into_inner(), if worker < expected { 50 } else { 0 }, "{asked} {worker}");
            }
        }
    }

    #[test]
    fn every_index_of_every_list_is_called_once() {
        let pool = Pool::new(3).unwrap();
        let counts = [3, 0, 1, 40];
        for parallel in [false, true] {
            let calls = counts.map(|count| (0..count).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
            pool.for_each_of(&counts, parallel, |list, index| {
                calls[list][index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(calls.iter().flatten().all(|calls| calls.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn more_threads_than_processors_compute_the_same() {
        let expected: Vec<f32> = (0..500).map(|index| (index as f32).sqrt().sin()).collect();
        for threads in [2, 4, 8, 16, 64] {
            let pool = Pool::new(threads).unwrap();
            for _ in 0..if cfg!(miri) { 1 } else { 20 } {
                let mut values = vec![0.0; expected.len()];
                pool.chunks_mut(&mut values, 1, |index, value| value[0] += (index as f32).sqrt().sin());
                assert!(values == expected, "{threads} threads");
                let calls = AtomicUsize::new(0);
                pool.run(&|worker| {
                    calls.fetch_add(worker + 1, Ordering::Relaxed);
                });
                assert_eq!(calls.into_inner(), threads * (threads + 1) / 2);
            }
        }
    }

    #[test]
    fn others_take_over_what_a_slow_worker_has_left() {
        let pool = Pool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        pool.for_each(9, |index| {
            let patience = Instant::now();
            while index == 0 && done.load(Ordering::Relaxed) < 8 && patience.elapsed() < PATIENCE * 300_000 {
                std::thread::yield_now();
            }
            assert!(index > 0 || done.load(Ordering::Relaxed) == 8, "its part waits behind it");
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 9);
    }

    #[test]
    fn chunks_cover_the_slice_without_overlap() {
        let pool = Pool::new(3).unwrap();
        for (len, chunk) in [(0, 4), (1, 4), (4, 4), (103, 10), (64, 1)] {
            let mut values = vec![0usize; len];
            pool.chunks_mut(&mut values, chunk, |index, values| {
                for (at, value) in values.iter_mut().enumerate() {
                    *value += index * chunk + at + 1;
                }
            });
            assert!(values.iter().enumerate().all(|(at, value)| *value == at + 1), "{len} {chunk}");
        }
    }

    #[test]
    fn chunks_of_two_slices_go_together() {
        let pool = Pool::new(3).unwrap();
        let (mut values, mut others) = (vec![0; 103], vec![0u8; 21]);
        pool.zip_chunks_mut(&mut values, &mut others, [10, 2], |index, values, others| {
            values.fill(index);
            others.fill(index as u8);
        });
        assert!(values.iter().enumerate().all(|(at, value)| *value == at / 10));
        assert!(others.iter().enumerate().all(|(at, value)| usize::from(*value) == at / 2));
    }

    #[test]
    #[should_panic(expected = "as many chunks of both")]
    fn slices_of_different_numbers_of_chunks_do_not_go_together() {
        Pool::new(1).unwrap().zip_chunks_mut(&mut [0; 9], &mut [0; 9], [3, 5], |_, _, _| ());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for guilty in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| assert!(worker != guilty, "worker {worker}"));
            }));
            let message = *caught.unwrap_err().downcast::<String>().unwrap();
            assert_eq!(message, format!("worker {guilty}"));
        }
        let count = AtomicUsize::new(0);
        pool.for_each(10, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 10);
    }
}
