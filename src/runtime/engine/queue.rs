//! Requests before and during admission: waiting, bypassed, informed of their position, overdue.
//!
//! Invariants: a request that leaves the queue without starting leaves no trace, not even the session it
//! would have created. A queue position never gets worse. A waiting request can start whenever nothing runs,
//! so an engine with a waiting request can make progress.

use std::collections::VecDeque;
use std::time::Instant;

use super::Engine;
use super::generation::{EngineEvents, Generation};
use super::schedule::WaitingRequest;
use crate::request::{EngineSessionName, Event, Finish};
use llmctl_base::error::{Error, Result};

/// Waiting requests in order of arrival.
#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    entries: VecDeque<QueuedRequest>,
}

/// A waiting request.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    pub generation: Generation,
    /// True if its session was created for it.
    pub begins_session: bool,
    num_bypassed: usize,
    /// Position sent last, counted from 1; 0 before the first.
    announced: usize,
}

impl RequestQueue {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn generations(&self) -> impl Iterator<Item = &Generation> {
        self.entries.iter().map(|entry| &entry.generation)
    }

    pub fn push(&mut self, generation: Generation, begins_session: bool) {
        self.entries.push_back(QueuedRequest { generation, begins_session, num_bypassed: 0, announced: 0 });
    }

    fn remove_first(&mut self, is_wanted: impl Fn(&Generation) -> bool) -> Option<QueuedRequest> {
        let index = self.generations().position(is_wanted)?;
        self.entries.remove(index)
    }

    /// Converts the queue for the scheduler. `bytes` returns the memory of a request at its longest.
    pub fn waiting(&self, bytes: impl Fn(&Generation) -> usize) -> Vec<WaitingRequest> {
        let waiting = |entry: &QueuedRequest| WaitingRequest {
            prompt_left: entry.generation.prompt_left(),
            bytes: bytes(&entry.generation),
            num_bypassed: entry.num_bypassed,
        };
        self.entries.iter().map(waiting).collect()
    }

    /// Removes the requests at the ascending indices `admitted`, and counts the requests that they bypass.
    pub fn take(&mut self, admitted: &[usize]) -> Vec<QueuedRequest> {
        let mut taken = Vec::with_capacity(admitted.len());
        let mut staying = VecDeque::with_capacity(self.entries.len());
        for (index, mut entry) in self.entries.drain(..).enumerate() {
            if admitted.get(taken.len()) == Some(&index) {
                taken.push(entry);
            } else {
                entry.num_bypassed += admitted.len() - taken.len(); // those not taken yet come after it
                staying.push_back(entry);
            }
        }
        self.entries = staying;
        taken
    }

    /// Sends each request its position, if it has changed.
    pub fn announce(&mut self, events: &mut EngineEvents) {
        for (index, entry) in self.entries.iter_mut().enumerate() {
            let position = index + 1;
            if entry.announced != position {
                entry.announced = position;
                events.push((entry.generation.id(), Event::Queued { position }));
            }
        }
    }
}

impl Engine {
    /// Checks that one more request may wait.
    ///
    /// # Errors
    /// [`Error::QueueFull`].
    pub(super) fn check_queue(&self) -> Result<()> {
        let config = &self.spec().config;
        let (admitted, waiting) = (self.num_admitted(), self.queue.len());
        if admitted + waiting < config.max_running.saturating_add(config.max_waiting) {
            return Ok(());
        }
        // Requests that start in the next step do not count as waiting.
        let starting = config.max_running.saturating_sub(admitted);
        Err(Error::QueueFull { waiting: waiting.saturating_sub(starting) })
    }

    /// Ends requests whose deadline has passed, before more work goes into them.
    pub(super) fn end_overdue(&mut self, now: Instant) {
        let is_overdue = |generation: &Generation| generation.is_overdue(now);
        while let Some(mut entry) = self.remove_waiting(is_overdue) {
            let deadline = entry.generation.deadline().unwrap_or_default();
            entry.generation.fail(Error::DeadlineExceeded { deadline }, &mut self.events);
            self.turn_away(&entry);
        }
        while let Some(index) = self.running.iter().position(is_overdue) {
            self.end_running(index, Finish::Deadline);
        }
    }

    /// Ends a running request at once, freeing its pages or returning them to its session.
    pub(super) fn end_running(&mut self, index: usize, finish: Finish) {
        let mut generation = self.running.remove(index);
        generation.finish(finish, &mut self.events);
        self.retire(generation);
    }

    /// Restores its session to the state before the request.
    pub(super) fn turn_away(&mut self, entry: &QueuedRequest) {
        let Some(name) = entry.generation.session() else { return };
        self.sessions.set_waiting(name, false);
        if entry.begins_session
            && let Ok(id) = self.sessions.find(name)
        {
            self.sessions.remove(id);
        }
    }

    /// Starts admitted requests. Those with pages on disk start once these are read.
    pub(super) fn start(&mut self, admitted: &[usize]) {
        for entry in self.queue.take(admitted) {
            if let Some(entry) = self.restore(entry) {
                self.begin(entry.generation, None);
            }
        }
    }

    /// Starts a request from its resumable prefix. Pages beyond `num_indexed` tokens came from disk.
    pub(super) fn begin(&mut self, mut generation: Generation, num_indexed: Option<usize>) {
        let resumed = self.resume(&generation, num_indexed);
        if !generation.session().is_some_and(EngineSessionName::is_ahead) {
            self.count_warm_hit(&resumed);
        }
        self.note_kept_otherwise(generation.prompt(), resumed.reuse.reason);
        generation.start(resumed, &mut self.events);
        let last_scheduled = self.tick();
        generation.set_last_scheduled(last_scheduled);
        self.running.push(generation);
    }

    /// Removes a request that has not started from the queue or the disk's waiting list.
    pub(super) fn remove_waiting(
        &mut self,
        is_wanted: impl Fn(&Generation) -> bool,
    ) -> Option<QueuedRequest> {
        let entry = self.queue.remove_first(&is_wanted);
        entry.or_else(|| self.disk.as_mut()?.remove(is_wanted))
    }

    /// Marks the requests with rows in this step as scheduled last. They keep their relative order.
    pub(super) fn note_scheduled(&mut self, rows: &[usize]) {
        let with_rows = (0..rows.len()).filter(|&index| rows[index] > 0);
        let mut order: Vec<usize> = with_rows.collect();
        order.sort_by_key(|&index| self.running[index].last_scheduled());
        for index in order {
            let last_scheduled = self.tick();
            self.running[index].set_last_scheduled(last_scheduled);
        }
    }

    fn tick(&mut self) -> u64 {
        self.schedule_clock += 1;
        self.schedule_clock
    }

    /// Returns the memory of the largest waiting request, in bytes.
    pub(super) fn largest_waiting(&self) -> usize {
        self.queue.generations().map(|generation| self.bytes(generation)).max().unwrap_or(0)
    }
}
