//! Requests on their way through the engine in time: waiting for admission, overtaken, told their place, overdue.
//!
//! Invariants: whoever leaves the queue without having started has cost nothing and leaves no trace: not even the session
//! that would have begun with it. A place only ever gets better. A waiting request can start whenever nothing runs, so
//! an engine with a waiting request has something to do.

use std::collections::VecDeque;
use std::time::Instant;

use super::Engine;
use super::generation::{EngineEvents, Generation};
use super::schedule::WaitingRequest;
use crate::runtime::error::{Error, Result};
use crate::runtime::request::{Event, Finish};

/// The waiting requests in order of arrival.
#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    entries: VecDeque<QueuedRequest>,
}

/// A waiting request.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    pub generation: Generation,
    /// Whether its session was begun for it.
    pub begins_session: bool,
    num_bypassed: usize,
    /// The place that was announced last, from 1; 0 before the first.
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

    /// As the schedule sees them; `bytes` is what a request takes at its longest.
    pub fn waiting(&self, bytes: impl Fn(&Generation) -> usize) -> Vec<WaitingRequest> {
        let waiting = |entry: &QueuedRequest| WaitingRequest {
            prompt_left: entry.generation.prompt_left(),
            bytes: bytes(&entry.generation),
            num_bypassed: entry.num_bypassed,
        };
        self.entries.iter().map(waiting).collect()
    }

    /// Takes out those at the `admitted` indices, which ascend, and notes whom they have overtaken.
    pub fn take(&mut self, admitted: &[usize]) -> Vec<QueuedRequest> {
        let mut taken = Vec::with_capacity(admitted.len());
        let mut staying = VecDeque::with_capacity(self.entries.len());
        for (index, mut entry) in self.entries.drain(..).enumerate() {
            if admitted.get(taken.len()) == Some(&index) {
                taken.push(entry);
            } else {
                entry.num_bypassed += admitted.len() - taken.len(); // those still to come are behind it
                staying.push_back(entry);
            }
        }
        self.entries = staying;
        taken
    }

    /// Tells each its place, where that is news.
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
    /// # Errors
    /// [`Error::QueueFull`].
    pub(super) fn check_queue(&self) -> Result<()> {
        let config = &self.spec().config;
        let (admitted, waiting) = (self.num_admitted(), self.queue.len());
        if admitted + waiting < config.max_running.saturating_add(config.max_waiting) {
            return Ok(());
        }
        // Those for whom there is room run from the next step on.
        let starting = config.max_running.saturating_sub(admitted);
        Err(Error::QueueFull { waiting: waiting.saturating_sub(starting) })
    }

    /// Ends what has reached its deadline, before any more work is put into it.
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

    /// Ends a running request now: its memory is free, or its session's, on return.
    pub(super) fn end_running(&mut self, index: usize, finish: Finish) {
        let mut generation = self.running.remove(index);
        generation.finish(finish, &mut self.events);
        self.retire(generation);
    }

    /// Leaves its session as if the request had never come.
    pub(super) fn turn_away(&mut self, entry: &QueuedRequest) {
        let Some(name) = entry.generation.session() else { return };
        self.sessions.set_waiting(name, false);
        if entry.begins_session
            && let Ok(id) = self.sessions.find(name)
        {
            self.sessions.remove(id);
        }
    }

    /// Admits these of the queue; those for whom the disk has something start when that is there.
    pub(super) fn start(&mut self, admitted: &[usize]) {
        for entry in self.queue.take(admitted) {
            if let Some(entry) = self.restore(entry) {
                self.begin(entry.generation, None);
            }
        }
    }

    /// Starts a request with what of its prompt is computed already; all beyond `num_indexed` came from disk.
    pub(super) fn begin(&mut self, mut generation: Generation, num_indexed: Option<usize>) {
        let resumed = self.resume(&generation, num_indexed);
        generation.start(resumed, &mut self.events);
        let last_scheduled = self.tick();
        generation.set_last_scheduled(last_scheduled);
        self.running.push(generation);
    }

    /// Takes a request that has not started out of wherever it waits.
    pub(super) fn remove_waiting(
        &mut self,
        is_wanted: impl Fn(&Generation) -> bool,
    ) -> Option<QueuedRequest> {
        let entry = self.queue.remove_first(&is_wanted);
        entry.or_else(|| self.disk.as_mut()?.remove(is_wanted))
    }

    /// Notes who gets rows in this step: they come after everybody who does not, in the order that they had.
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

    /// The largest amount of memory that a waiting request will ask for.
    pub(super) fn largest_waiting(&self) -> usize {
        self.queue.generations().map(|generation| self.bytes(generation)).max().unwrap_or(0)
    }
}
