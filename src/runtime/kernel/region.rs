//! The protocol by which the caller of a parallel region and its workers meet, without the work itself.
//!
//! ```text
//! worker's state:  Idle --caller calls--> Called --worker joins--> Joined --worker leaves--> Idle
//!                                         Called --caller withdraws--> Idle
//! ```
//!
//! Invariants: only the caller moves a worker from `Idle`, so a worker that is `Idle` reads nothing of the
//! caller's. A region ends when all its workers are `Idle`; the caller may withdraw the call of a worker that
//! has not joined, so that it never waits for a thread that the system has not scheduled. Who waits sets a
//! flag before it sleeps and checks again; who ends the wait changes the state before it checks the flag; a
//! fence on both sides makes one of them see the other. Waiting costs a bounded time of processor
//! ([`Threading::pass_time`]), then nothing.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

const IDLE: usize = 0;
const CALLED: usize = 1;
const JOINED: usize = 2;
const STOPPED: usize = 3;

/// Time that a waiting thread keeps its processor to itself.
const SPIN: Duration = Duration::from_micros(20);

/// Time after which a waiting thread sleeps: longer than the serial work between two regions of a decode step, too
/// short to matter otherwise.
pub const PATIENCE: Duration = Duration::from_micros(100);

/// Times that a waiting thread offers its processor to others before it sleeps, if threads exceed processors: what it
/// waits for needs that processor.
const CROWDED_YIELDS: usize = 4;

/// Operations of threads: the system's, or those of a test that tries many orders of them.
pub trait Threading {
    type Word: RegionWord;
    type Thread: Clone;

    /// Sleeps until [`Self::wake`] was called for this thread, possibly before or without it.
    fn sleep();

    fn wake(thread: &Self::Thread);

    /// Orders everything before it against everything after it, for all threads.
    fn fence();

    /// Waits awake for a bounded time. Returns whether `done` was seen.
    fn pass_time(is_crowded: bool, done: impl Fn() -> bool) -> bool;
}

/// A number that threads share.
pub trait RegionWord: Default {
    fn load(&self) -> usize;
    fn store(&self, value: usize);
    /// Replaces `from` by `to`. Returns false if the value was another one.
    fn replace(&self, from: usize, to: usize) -> bool;
}

/// Threads of the system.
pub struct SystemThreading;

impl Threading for SystemThreading {
    type Word = AtomicUsize;
    type Thread = Thread;

    fn sleep() {
        std::thread::park();
    }

    fn wake(thread: &Thread) {
        thread.unpark();
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }

    fn pass_time(is_crowded: bool, done: impl Fn() -> bool) -> bool {
        if is_crowded {
            return (0..CROWDED_YIELDS).any(|_| {
                std::thread::yield_now();
                done()
            });
        }
        let spin = || {
            (0..128).any(|_| {
                std::hint::spin_loop();
                done()
            })
        };
        // The clock is read only during longer waits: reading it costs as much as a short wait.
        if spin() {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < SPIN {
            if spin() {
                return true;
            }
        }
        while start.elapsed() < PATIENCE {
            std::thread::yield_now();
            if done() {
                return true;
            }
        }
        false
    }
}

impl RegionWord for AtomicUsize {
    fn load(&self) -> usize {
        self.load(Ordering::Acquire)
    }

    fn store(&self, value: usize) {
        self.store(value, Ordering::Release);
    }

    fn replace(&self, from: usize, to: usize) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// A worker's state, on its own cache line: its worker polls it.
#[repr(align(64))]
struct WorkerSlot<T: Threading> {
    state: T::Word,
    sleeps: T::Word,
}

/// Meeting point of a caller and its workers, region after region.
pub struct Region<T: Threading> {
    slots: Vec<WorkerSlot<T>>,
    /// 1 while more threads take part than there are processors.
    is_crowded: T::Word,
    /// Set by the caller when it sleeps until all workers are idle.
    caller_sleeps: T::Word,
    /// Read only if it sleeps: counting references to it would bounce its cache line between cores.
    caller: Mutex<Option<T::Thread>>,
}

impl<T: Threading> Region<T> {
    pub fn new(workers: usize) -> Self {
        let slot = || WorkerSlot { state: T::Word::default(), sleeps: T::Word::default() };
        Self {
            slots: std::iter::repeat_with(slot).take(workers).collect(),
            is_crowded: T::Word::default(),
            caller_sleeps: T::Word::default(),
            caller: Mutex::new(None),
        }
    }

    /// Sets whether more threads take part than there are processors.
    pub fn set_crowded(&self, is_crowded: bool) {
        self.is_crowded.store(usize::from(is_crowded));
    }

    /// Stores the thread that [`Self::wait`]s, for workers to wake.
    pub fn set_caller(&self, caller: T::Thread) {
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(caller);
    }

    /// Calls the first `count` workers, which must be idle; `thread(worker)` is a worker's thread.
    pub fn call<'a>(&self, count: usize, thread: impl Fn(usize) -> &'a T::Thread)
    where
        T::Thread: 'a,
    {
        self.change(count, CALLED, thread);
    }

    /// Ends the threads of the first `count` workers, which must be idle.
    pub fn stop<'a>(&self, count: usize, thread: impl Fn(usize) -> &'a T::Thread)
    where
        T::Thread: 'a,
    {
        self.change(count, STOPPED, thread);
    }

    fn change<'a>(&self, count: usize, state: usize, thread: impl Fn(usize) -> &'a T::Thread)
    where
        T::Thread: 'a,
    {
        // One fence for all stores, so that they proceed side by side.
        self.slots[..count].iter().for_each(|slot| slot.state.store(state));
        T::fence();
        for (worker, slot) in self.slots[..count].iter().enumerate() {
            if slot.sleeps.load() == 1 {
                T::wake(thread(worker));
            }
        }
    }

    /// Withdraws the calls of those of the first `count` workers that have not joined.
    pub fn withdraw(&self, count: usize) {
        for slot in &self.slots[..count] {
            slot.state.replace(CALLED, IDLE);
        }
    }

    /// Waits until the first `count` workers are idle.
    pub fn wait(&self, count: usize) {
        self.wait_until(&self.caller_sleeps, || self.are_idle(count));
    }

    fn are_idle(&self, count: usize) -> bool {
        self.slots[..count].iter().all(|slot| slot.state.load() == IDLE)
    }

    /// Waits for a call of `worker` and joins. Returns false if the thread should end.
    pub fn join(&self, worker: usize) -> bool {
        let slot = &self.slots[worker];
        loop {
            self.wait_until(&slot.sleeps, || slot.state.load() != IDLE);
            if slot.state.replace(CALLED, JOINED) {
                return true;
            }
            if slot.state.load() == STOPPED {
                return false;
            }
        }
    }

    /// Leaves the region; the last worker to leave wakes a sleeping caller.
    pub fn leave(&self, worker: usize) {
        self.slots[worker].state.store(IDLE);
        T::fence();
        if self.caller_sleeps.load() == 1 && self.are_idle(self.slots.len()) {
            // The caller cannot be replaced while it sleeps; waking another thread is harmless.
            let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner).clone();
            caller.iter().for_each(T::wake);
        }
    }

    fn wait_until(&self, sleeps: &T::Word, done: impl Fn() -> bool) {
        if done() || T::pass_time(self.is_crowded.load() == 1, &done) {
            return;
        }
        sleeps.store(1);
        T::fence();
        while !done() {
            T::sleep();
        }
        sleeps.store(0);
    }
}

#[cfg(test)]
mod tests {
    //! A caller and its workers in thousands of orders of the steps above.

    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use shuttle::sync::Arc;
    use shuttle::sync::atomic::AtomicUsize as ModelWord;
    use shuttle::thread;

    use super::*;

    impl RegionWord for ModelWord {
        fn load(&self) -> usize {
            self.load(Ordering::SeqCst)
        }

        fn store(&self, value: usize) {
            self.store(value, Ordering::SeqCst);
        }

        fn replace(&self, from: usize, to: usize) -> bool {
            self.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        }
    }

    /// Threads that sleep at once; without `WAKES` nothing wakes them.
    struct ModelThreading<const WAKES: bool>;

    impl<const WAKES: bool> Threading for ModelThreading<WAKES> {
        type Word = ModelWord;
        type Thread = thread::Thread;

        fn sleep() {
            thread::park();
        }

        fn wake(thread: &thread::Thread) {
            if WAKES {
                thread.unpark();
            }
        }

        fn fence() {}

        fn pass_time(_: bool, _: impl Fn() -> bool) -> bool {
            false
        }
    }

    /// Runs regions of changing numbers of workers, every second of which the caller closes when its own part is done.
    fn regions<const WAKES: bool>(workers: usize, regions: usize) {
        let region = Arc::new(Region::<ModelThreading<WAKES>>::new(workers));
        let joined = Arc::new((0..workers).map(|_| ModelWord::new(0)).collect::<Vec<_>>());
        let start = |worker: usize| {
            let (region, joined) = (Arc::clone(&region), Arc::clone(&joined));
            thread::spawn(move || {
                while region.join(worker) {
                    joined[worker].fetch_add(1, Ordering::SeqCst);
                    region.leave(worker);
                }
            })
        };
        let handles: Vec<_> = (0..workers).map(start).collect();
        region.set_caller(thread::current());
        for round in 0..regions {
            let (count, closes) = (workers - round % workers, round % 2 == 1);
            let before: Vec<usize> = joined.iter().map(|joined| joined.load(Ordering::SeqCst)).collect();
            region.call(count, |worker| handles[worker].thread());
            if closes {
                region.withdraw(count);
            }
            region.wait(count);
            for (worker, before) in before.into_iter().enumerate() {
                let joined = joined[worker].load(Ordering::SeqCst) - before;
                let least = usize::from(!closes && worker < count);
                assert!(
                    (least..=usize::from(worker < count)).contains(&joined),
                    "worker {worker} joined {joined} times"
                );
            }
        }
        region.stop(workers, |worker| handles[worker].thread());
        handles.into_iter().for_each(|handle| handle.join().expect("no panic"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "a model checker")]
    fn in_every_order_all_called_workers_join_and_all_threads_end() {
        for workers in [1, 2, 3] {
            shuttle::check_random(move || regions::<true>(workers, 4), 2_000);
            shuttle::check_pct(move || regions::<true>(workers, 4), 2_000, 3);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a model checker")]
    fn the_model_finds_a_wake_that_is_missing() {
        let lost = || shuttle::check_random(|| regions::<false>(2, 4), 2_000);
        catch_unwind(AssertUnwindSafe(lost)).expect_err("a thread sleeps forever in some order");
    }

    #[test]
    fn a_worker_that_never_comes_is_not_waited_for() {
        let region = Region::<SystemThreading>::new(2);
        let caller = std::thread::current();
        for _ in 0..3 {
            region.call(2, |_| &caller);
            region.withdraw(2);
            region.wait(2);
        }
    }

    /// The system's threads, with counts of their waits.
    struct CountedThreading;

    static WAITS_AWAKE: AtomicUsize = AtomicUsize::new(0);
    static SLEEPS: AtomicUsize = AtomicUsize::new(0);

    impl Threading for CountedThreading {
        type Word = AtomicUsize;
        type Thread = Thread;

        fn sleep() {
            SLEEPS.fetch_add(1, Ordering::SeqCst);
            SystemThreading::sleep();
        }

        fn wake(thread: &Thread) {
            SystemThreading::wake(thread);
        }

        fn fence() {
            SystemThreading::fence();
        }

        fn pass_time(is_crowded: bool, done: impl Fn() -> bool) -> bool {
            WAITS_AWAKE.fetch_add(1, Ordering::SeqCst);
            SystemThreading::pass_time(is_crowded, done)
        }
    }

    /// So an idle pool costs no processor time, but for one bounded wait of each worker.
    #[test]
    fn an_idle_worker_waits_awake_once_and_then_only_sleeps() {
        let region = Region::<CountedThreading>::new(1);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| region.join(0));
            for sleeps in 1..=20 {
                while SLEEPS.load(Ordering::SeqCst) < sleeps {
                    std::thread::yield_now();
                }
                worker.thread().unpark(); // without a call: it sleeps again
            }
            assert_eq!(WAITS_AWAKE.load(Ordering::SeqCst), 1);
            region.stop(1, |_| worker.thread());
            assert!(!worker.join().expect("no panic"));
        });
    }

    #[test]
    fn a_wait_is_bounded_by_a_count_if_threads_exceed_processors_and_by_time_otherwise() {
        let checks = Cell::new(0);
        let done = || {
            checks.set(checks.get() + 1);
            false
        };
        assert!(!SystemThreading::pass_time(true, done));
        assert_eq!(checks.get(), CROWDED_YIELDS);
        assert!(!SystemThreading::pass_time(false, done), "it gives up");
        for at in 1..=CROWDED_YIELDS {
            checks.set(0);
            let seen = || {
                checks.set(checks.get() + 1);
                checks.get() == at
            };
            assert!(SystemThreading::pass_time(true, seen));
        }
    }
}
