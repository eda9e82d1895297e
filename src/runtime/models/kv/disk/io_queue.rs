//! The queue between the engine's thread and the I/O thread: requests and answers as plain data behind one
//! lock.
//!
//! Invariants: the lock is never held during disk I/O, so waiting for it takes no longer than a map
//! operation. A page that waits to be written counts as saved, and is read from memory. Each requested page
//! is answered once, even if the I/O thread has ended. This file performs no I/O.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{DiskEvent, DiskPageKey, DiskStats, MissingReason, PageLabel, PageUse, Saving};
use crate::tensor::SharedBytes;
use llmctl_base::notice::Notice;

#[derive(Debug)]
pub struct IoQueue {
    /// No code panics while it holds the lock; after a panic counts might be off, which is harmless.
    state: Mutex<IoState>,
    /// Signals the I/O thread that there is work.
    work: Condvar,
    /// Signals waiting callers that work was finished.
    done: Condvar,
    stop: AtomicBool,
    limit_bytes: u64,
}

/// The next action of the I/O thread.
#[derive(Debug)]
pub enum IoJob {
    /// Read a page.
    Read(ReadJob),
    /// Write a page.
    Write(Arc<WriteJob>),
    /// Record that a page was used.
    Touch { key: DiskPageKey, page_use: PageUse },
    /// Remove leftovers and pages over the limit, because nothing else is queued.
    Tidy,
    /// End the thread.
    Stop,
}

#[derive(Debug)]
pub struct ReadJob {
    pub label: PageLabel,
    pub num_bytes: usize,
    /// The page, if it still waits to be written.
    pub in_memory: Option<Arc<WriteJob>>,
}

#[derive(Debug)]
pub struct WriteJob {
    pub label: PageLabel,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Default)]
struct IoState {
    /// Keys of pages on disk.
    index: HashSet<DiskPageKey>,
    /// Keys of files that could not be read. Saving a page again removes its key.
    unreadable: HashSet<DiskPageKey>,
    reads: VecDeque<ReadJob>,
    /// Pages to be written, including the one being written.
    writes: HashMap<DiskPageKey, Arc<WriteJob>>,
    write_order: VecDeque<DiskPageKey>,
    write_bytes: u64,
    touches: HashMap<DiskPageKey, PageUse>,
    events: VecDeque<DiskEvent>,
    event_bytes: u64,
    /// Requested pages whose answers have not been polled.
    num_loading: usize,
    /// The page being read.
    reading: Option<DiskPageKey>,
    is_tidy: bool,
    is_saving_off: bool,
    is_worker_gone: bool,
    stats: DiskStats,
}

/// Methods for the engine's thread.
impl IoQueue {
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
            stop: AtomicBool::new(false),
            limit_bytes,
        }
    }

    pub fn contains(&self, key: DiskPageKey) -> bool {
        self.state.lock().contains(key)
    }

    /// Adds a page that another process has saved. Returns false if its file could not be read before.
    pub fn learn(&self, key: DiskPageKey) -> bool {
        let mut state = self.state.lock();
        let is_readable = !state.unreadable.contains(&key);
        if is_readable {
            state.index.insert(key);
        }
        is_readable
    }

    pub fn is_unreadable(&self, key: DiskPageKey) -> bool {
        self.state.lock().unreadable.contains(&key)
    }

    /// Records a use of a page that is saved or queued. Returns false if it is neither.
    pub fn touch(&self, key: DiskPageKey, page_use: PageUse) -> bool {
        let mut state = self.state.lock();
        let is_known = state.contains(key);
        if is_known {
            state.touches.entry(key).or_insert(page_use).is_shared |= page_use.is_shared;
            self.work.notify_one();
        }
        is_known
    }

    pub fn save(&self, label: PageLabel, bytes: Vec<u8>) -> Saving {
        if self.touch(label.key, PageUse { depth: label.depth, is_shared: false }) {
            return Saving::Known;
        }
        let mut state = self.state.lock();
        let num_bytes = bytes.len() as u64;
        let fits = state.writes.is_empty() || state.write_bytes + num_bytes <= self.limit_bytes;
        if state.is_saving_off || !fits {
            state.stats.dropped_pages += 1;
            return Saving::Dropped;
        }
        state.write_bytes += num_bytes;
        state.write_order.push_back(label.key);
        state.writes.insert(label.key, Arc::new(WriteJob { label, bytes }));
        self.work.notify_one();
        Saving::Queued
    }

    /// Counts a page that was rejected before queueing.
    pub fn drop_page(&self) -> Saving {
        self.state.lock().stats.dropped_pages += 1;
        Saving::Dropped
    }

    /// Returns whether [`save`](Self::save) would queue a page of this size now.
    pub fn takes(&self, num_bytes: u64) -> bool {
        let state = self.state.lock();
        let fits = state.writes.is_empty() || state.write_bytes + num_bytes <= self.limit_bytes;
        !state.is_saving_off && fits
    }

    pub fn is_saving(&self) -> bool {
        !self.state.lock().is_saving_off
    }

    /// Queues a read. If there is no I/O thread, answers `Missing` with `Absent` at once.
    pub fn load(&self, label: PageLabel, num_bytes: usize, has_worker: bool) {
        let mut state = self.state.lock();
        let key = label.key;
        state.num_loading += 1;
        let is_hopeless = state.unreadable.contains(&key) && !state.writes.contains_key(&key);
        if has_worker && !state.is_worker_gone && !is_hopeless {
            state.reads.push_back(ReadJob { label, num_bytes, in_memory: None });
            self.work.notify_one();
        } else {
            state.answer(key, Err(MissingReason::Absent));
            self.done.notify_all();
        }
    }

    pub fn poll(&self) -> Vec<DiskEvent> {
        let mut state = self.state.lock();
        state.event_bytes = 0;
        let events: Vec<DiskEvent> = state.events.drain(..).collect();
        state.num_loading -= events.iter().filter(|event| !matches!(event, DiskEvent::Notice(_))).count();
        self.work.notify_one(); // reading may have paused
        events
    }

    pub fn wait(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |state| !state.events.is_empty())
    }

    pub fn flush(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |state| state.writes.is_empty() && state.touches.is_empty())
    }

    pub fn is_loading(&self) -> bool {
        self.state.lock().num_loading > 0
    }

    pub fn is_busy(&self) -> bool {
        let state = self.state.lock();
        state.num_loading > 0 || !state.writes.is_empty() || !state.events.is_empty()
    }

    pub fn stats(&self) -> DiskStats {
        self.state.lock().stats
    }

    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.state.lock()); // the lock ensures that a thread that checked `stop` is waiting
        self.work.notify_all();
    }

    fn wait_until(&self, timeout: Duration, is_done: impl Fn(&IoState) -> bool) -> bool {
        let mut state = self.state.lock();
        // It may be done just when the time is over.
        self.done.wait_while_for(&mut state, |state| !is_done(state), timeout);
        is_done(&state)
    }
}

/// Methods for the I/O thread.
impl IoQueue {
    /// Flag that is set when the thread must end.
    pub fn stop_flag(&self) -> &AtomicBool {
        &self.stop
    }

    /// Waits for the next action.
    pub fn next_job(&self) -> IoJob {
        let mut state = self.state.lock();
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return IoJob::Stop;
            }
            if let Some(job) = state.next_job(self.limit_bytes) {
                return job;
            }
            self.work.wait(&mut state);
        }
    }

    pub fn finish_read(&self, key: DiskPageKey, result: Result<SharedBytes, MissingReason>) {
        let mut state = self.state.lock();
        state.reading = None;
        match &result {
            Ok(_) => {}
            Err(MissingReason::Io(_)) => {
                state.index.remove(&key);
                state.unreadable.insert(key);
            }
            Err(_) => drop(state.index.remove(&key)),
        }
        state.answer(key, result);
        self.done.notify_all();
    }

    /// Excludes a damaged file that cannot be removed.
    pub fn ignore(&self, key: DiskPageKey) {
        self.state.lock().unreadable.insert(key);
    }

    pub fn finish_write(&self, key: DiskPageKey, is_saved: bool) {
        let mut state = self.state.lock();
        let Some(write) = state.writes.remove(&key) else { return };
        let num_bytes = write.bytes.len() as u64;
        state.write_bytes -= num_bytes;
        if is_saved {
            state.index.insert(key);
            state.unreadable.remove(&key);
            state.stats.saved_pages += 1;
            state.stats.saved_bytes += num_bytes;
        } else {
            state.stats.dropped_pages += 1;
        }
        self.done.notify_all();
    }

    pub fn finish_touch(&self, key: DiskPageKey) {
        self.state.lock().touches.remove(&key);
        self.done.notify_all();
    }

    /// Drops queued writes, and reports once why saving is off.
    pub fn stop_saving(&self, reason: &str) {
        let mut state = self.state.lock();
        if !state.is_saving_off {
            state.is_saving_off = true;
            state.events.push_back(DiskEvent::Notice(Notice::KvSavingOff(reason.to_owned())));
        }
        state.drop_writes();
        self.done.notify_all();
    }

    /// Reports a fact to the user.
    pub fn note(&self, notice: Notice) {
        self.state.lock().events.push_back(DiskEvent::Notice(notice));
        self.done.notify_all();
    }

    pub fn replace_index(&self, keys: impl Iterator<Item = DiskPageKey>) {
        let mut state = self.state.lock();
        let IoState { index, unreadable, .. } = &mut *state;
        *index = keys.filter(|key| !unreadable.contains(key)).collect();
    }

    /// Counts a page removed to make room; `key` is `Some` for a page of this fingerprint.
    pub fn count_removed(&self, key: Option<DiskPageKey>) {
        let mut state = self.state.lock();
        state.stats.removed_pages += 1;
        key.map(|key| state.index.remove(&key));
    }

    /// Answers all open reads, since the thread that served them has ended.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.is_worker_gone = true;
        state.is_saving_off = true;
        state.drop_writes();
        state.touches.clear();
        let left: Vec<DiskPageKey> = state.reads.drain(..).map(|read| read.label.key).collect();
        for key in state.reading.take().into_iter().chain(left) {
            state.answer(key, Err(MissingReason::Io("the I/O thread has ended".to_owned())));
        }
        self.done.notify_all();
    }
}

impl IoState {
    fn contains(&self, key: DiskPageKey) -> bool {
        self.index.contains(&key) || self.writes.contains_key(&key)
    }

    fn next_job(&mut self, limit_bytes: u64) -> Option<IoJob> {
        if let Some(read) = self.next_read(limit_bytes) {
            return Some(IoJob::Read(read));
        }
        while let Some(key) = self.write_order.pop_front() {
            if let Some(write) = self.writes.get(&key) {
                return Some(IoJob::Write(Arc::clone(write)));
            }
        }
        if let Some((&key, &page_use)) = self.touches.iter().next() {
            return Some(IoJob::Touch { key, page_use });
        }
        let is_untidy = !std::mem::replace(&mut self.is_tidy, true);
        is_untidy.then_some(IoJob::Tidy)
    }

    /// Returns the next read, or `None` while too many bytes wait to be polled.
    fn next_read(&mut self, limit_bytes: u64) -> Option<ReadJob> {
        let num_bytes = self.reads.front()?.num_bytes as u64;
        if self.event_bytes > 0 && self.event_bytes + num_bytes > limit_bytes {
            return None;
        }
        let mut read = self.reads.pop_front()?;
        read.in_memory = self.writes.get(&read.label.key).cloned();
        self.reading = Some(read.label.key);
        Some(read)
    }

    fn drop_writes(&mut self) {
        self.stats.dropped_pages += self.writes.len() as u64;
        self.writes.clear();
        self.write_order.clear();
        self.write_bytes = 0;
    }

    fn answer(&mut self, key: DiskPageKey, result: Result<SharedBytes, MissingReason>) {
        self.events.push_back(match result {
            Ok(bytes) => {
                self.event_bytes += bytes.len() as u64;
                self.stats.loaded_pages += 1;
                self.stats.loaded_bytes += bytes.len() as u64;
                DiskEvent::Loaded { key, bytes }
            }
            Err(reason) => {
                self.stats.missing_pages += 1;
                DiskEvent::Missing { key, reason }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::PageName;
    use super::*;

    fn label(n: u8) -> PageLabel {
        let key = DiskPageKey { name: PageName([n; 32]), group: 0 };
        PageLabel { key, parent: None, tokens: [u32::from(n)].into(), depth: u32::from(n) }
    }

    fn save(queue: &IoQueue, n: u8, num_bytes: usize) -> Saving {
        queue.save(label(n), vec![n; num_bytes])
    }

    /// Returns the thread's next action as a word and the page's number.
    fn next(queue: &IoQueue) -> (&'static str, u8) {
        match queue.next_job() {
            IoJob::Read(read) => ("read", read.label.key.name.0[0]),
            IoJob::Write(write) => ("write", write.label.key.name.0[0]),
            IoJob::Touch { key, .. } => ("touch", key.name.0[0]),
            IoJob::Tidy => ("tidy", 0),
            IoJob::Stop => ("stop", 0),
        }
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_until_it_is_written() {
        let queue = IoQueue::new(100);
        assert!(queue.takes(100) && queue.is_saving());
        assert_eq!(
            [save(&queue, 1, 60), save(&queue, 2, 41), save(&queue, 3, 40)],
            [Saving::Queued, Saving::Dropped, Saving::Queued]
        );
        assert_eq!((queue.takes(1), queue.stats().dropped_pages), (false, 1));
        assert_eq!(next(&queue), ("write", 1));
        assert_eq!(save(&queue, 2, 41), Saving::Dropped, "what is being written still takes memory");
        assert!(!queue.flush(Duration::ZERO) && queue.is_busy());
        queue.finish_write(label(1).key, true);
        assert_eq!((save(&queue, 2, 41), queue.takes(19), queue.takes(20)), (Saving::Queued, true, false));
        queue.finish_write(label(2).key, true);
        queue.finish_write(label(3).key, false);
        assert!(queue.flush(Duration::ZERO) && !queue.is_busy());
        let there = [1, 2, 3].map(|n| queue.contains(label(n).key));
        assert_eq!((there, queue.takes(100)), ([true, true, false], true));
        assert_eq!(save(&queue, 4, 1000), Saving::Queued, "one page is taken when nothing waits");
    }

    #[test]
    fn reads_come_first_and_tidying_last() {
        let queue = IoQueue::new(100);
        queue.replace_index([label(9).key].into_iter());
        assert_eq!(save(&queue, 1, 10), Saving::Queued);
        assert_eq!(save(&queue, 9, 10), Saving::Known);
        queue.load(label(2), 10, true);
        queue.load(label(3), 10, true);
        for expected in [("read", 2), ("read", 3), ("write", 1), ("touch", 9)] {
            assert_eq!(next(&queue), expected);
        }
        assert!(!queue.flush(Duration::ZERO), "neither written nor touched yet");
        queue.finish_write(label(1).key, true);
        queue.finish_touch(label(9).key);
        assert!(queue.flush(Duration::ZERO));
        assert_eq!(next(&queue), ("tidy", 0));
        queue.stop();
        assert_eq!(next(&queue), ("stop", 0));
    }

    #[test]
    fn a_page_that_waits_to_be_written_is_read_from_memory() {
        let queue = IoQueue::new(100);
        save(&queue, 1, 10);
        assert!(queue.contains(label(1).key));
        queue.load(label(1), 10, true);
        let IoJob::Read(read) = queue.next_job() else { panic!("reads come first") };
        assert_eq!(read.in_memory.expect("it waits").bytes, vec![1; 10]);
    }

    #[test]
    fn reading_pauses_while_too_much_waits_to_be_polled() {
        let queue = IoQueue::new(100);
        (1..=3).for_each(|n| queue.load(label(n), 60, true));
        save(&queue, 7, 10);
        assert_eq!(next(&queue), ("read", 1));
        queue.finish_read(label(1).key, Ok(vec![1; 60].into()));
        assert_eq!(next(&queue), ("write", 7), "120 bytes would wait");
        assert_eq!(queue.poll(), [DiskEvent::Loaded { key: label(1).key, bytes: vec![1; 60].into() }]);
        assert_eq!(next(&queue), ("read", 2));
        assert!(queue.is_loading());
    }

    #[test]
    fn every_load_is_answered_once_whatever_happens_to_the_worker() {
        let queue = IoQueue::new(100);
        (1..=3).for_each(|n| queue.load(label(n), 10, true));
        assert_eq!(next(&queue), ("read", 1));
        queue.finish_read(label(1).key, Err(MissingReason::Absent));
        assert_eq!(next(&queue), ("read", 2));
        save(&queue, 5, 10);
        queue.close(); // while page 2 is being read
        queue.load(label(4), 10, true);
        let events = queue.poll();
        let missing = |event: &DiskEvent| match event {
            DiskEvent::Missing { key, .. } => key.name.0[0],
            other => panic!("{other:?}"),
        };
        assert_eq!(events.iter().map(missing).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert!(!queue.is_busy() && queue.flush(Duration::ZERO));
        assert_eq!((save(&queue, 6, 10), queue.stats().dropped_pages), (Saving::Dropped, 2));
    }

    #[test]
    fn what_could_not_be_read_is_not_asked_for_again_until_it_is_saved_anew() {
        let queue = IoQueue::new(100);
        queue.replace_index([label(1).key].into_iter());
        queue.load(label(1), 10, true);
        assert_eq!(next(&queue), ("read", 1));
        queue.finish_read(label(1).key, Err(MissingReason::Io("no luck".to_owned())));
        queue.replace_index([label(1).key].into_iter());
        assert!(!queue.contains(label(1).key));
        queue.load(label(1), 10, true);
        assert_eq!(queue.poll().len(), 2, "answered without asking the disk");
        assert_eq!(save(&queue, 1, 10), Saving::Queued);
        queue.finish_write(label(1).key, true);
        queue.load(label(1), 10, true);
        assert_eq!(next(&queue), ("read", 1));
    }

    #[test]
    fn why_nothing_is_saved_is_said_once() {
        let queue = IoQueue::new(100);
        save(&queue, 1, 10);
        queue.stop_saving("the disk is full");
        queue.stop_saving("the disk is full");
        let notice = Notice::KvSavingOff("the disk is full".to_owned());
        assert_eq!(queue.poll(), [DiskEvent::Notice(notice)]);
        assert!(queue.flush(Duration::ZERO) && !queue.contains(label(1).key));
        assert_eq!((save(&queue, 1, 10), queue.is_saving()), (Saving::Dropped, false));
        assert!(!queue.is_loading(), "a notice is no answer");
    }
}
