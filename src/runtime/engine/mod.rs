//! The engine: the model, its pages, its sessions and the requests in flight. A synchronous value without threads or
//! channels; tests call it directly, `thread` gives it a thread of its own.
//!
//! Invariants: a request that is refused has cost nothing; bytes promised to running requests and to sessions driven by hand
//! never exceed the pool, and what named sessions hold while idle is promised to nobody and goes when needed, so nothing
//! that has started runs out of pages; whatever ends a request, its pages are free or its session's, and its last event is
//! out by the end of that step. A failed step fails the requests in it, resets their sessions, and touches no others.

mod disk;
mod generation;
mod queue;
mod schedule;
mod sessions;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::runtime::error::{Error, Result};
use crate::runtime::kv::{PageName, PagePool};
use crate::runtime::model::Model;
use crate::runtime::request::{Finish, Request, Reuse, ReuseReason};
use crate::runtime::sequence::{Resumed, Sequence};
use crate::runtime::session::{CheckedOut, SessionTable};
use crate::runtime::spec::{EngineConfig, EngineSpec, ServingCapacity};
use crate::runtime::step::{Executor, SequenceFeed};
use crate::runtime::text::Vocabulary;

pub use crate::runtime::session::{DecodeOutcome, SessionId, SessionInfo, SessionState, StopHandle};
use disk::KvDisk;
pub use generation::RequestId;
use generation::{EngineEvents, Generation};
use queue::RequestQueue;
pub use schedule::MAX_BYPASSES;
use schedule::{Budget, RunningRequest, StepPlan};
pub use sessions::SessionDetail;

/// Runs requests and sessions on one model.
pub struct Engine {
    executor: Executor,
    vocabulary: Arc<dyn Vocabulary>,
    pool: PagePool,
    sessions: SessionTable,
    queue: RequestQueue,
    running: Vec<Generation>,
    disk: Option<KvDisk>,
    events: EngineEvents,
    num_submitted: u64,
    schedule_clock: u64,
}

/// Requests in flight and KV in use, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineLoad {
    pub num_waiting: usize,
    pub num_running: usize,
    pub num_sessions: usize,
    /// Held by nobody; what is cached there is used again when it is needed.
    pub kv_free: usize,
    pub kv_capacity: usize,
    /// With memory behind it, cached pages included.
    pub kv_allocated: usize,
}

impl Engine {
    /// # Errors
    /// [`Error::InvalidParameter`] when the model cannot serve what `config` asks, naming the field.
    pub fn new(model: Box<dyn Model>, vocabulary: Arc<dyn Vocabulary>, config: EngineConfig) -> Result<Self> {
        let spec = EngineSpec::new(model.spec().clone(), config)?;
        // Without reuse, or with state beyond the pages, nobody would look for what the index names.
        let has_index = spec.config.warm_resume && spec.model.can_rewind;
        let pool = if has_index { PagePool::new } else { PagePool::without_index };
        Ok(Self {
            pool: pool(&spec.model.groups, spec.kv_memory),
            executor: Executor::new(model, spec),
            vocabulary,
            sessions: SessionTable::default(),
            queue: RequestQueue::default(),
            running: Vec::new(),
            disk: None,
            events: Vec::new(),
            num_submitted: 0,
            schedule_clock: 0,
        })
    }

    pub fn spec(&self) -> &EngineSpec {
        self.executor.spec()
    }

    pub fn serving_capacity(&self) -> ServingCapacity {
        self.spec().serving_capacity()
    }

    pub fn load(&self) -> EngineLoad {
        EngineLoad {
            num_waiting: self.queue.len(),
            num_running: self.num_admitted(),
            num_sessions: self.sessions.len(),
            kv_free: self.pool.free_bytes(),
            kv_capacity: self.pool.capacity(),
            kv_allocated: self.pool.allocated_bytes(),
        }
    }

    /// Queues a request. Its events come out of `step`.
    ///
    /// # Errors
    /// Before any work: those of [`Request::validate`]; [`Error::SessionsFull`] when the sessions leave too few pages
    /// for it ever to run, or there is no place for the session that it would begin; [`Error::SessionBusy`] when another
    /// request is in its session; [`Error::QueueFull`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.submit_at(request, Instant::now())
    }

    /// As `submit`, at a time of the caller's choosing: deadlines count from it.
    ///
    /// # Errors
    /// Those of `submit`.
    pub fn submit_at(&mut self, request: Request, now: Instant) -> Result<RequestId> {
        let room = request.validate(self.spec().vocab_size(), self.spec().context_length())?;
        let id = RequestId(self.num_submitted);
        let usual = self.spec().config.answer_tokens.filter(|_| request.limits.is_open());
        let generation = Generation::new(id, request, room, &self.pool, now).limited_to(usual);
        if self.bytes(&generation) + self.session_bytes() > self.pool.capacity() {
            return Err(Error::SessionsFull { capacity: self.serving_capacity().sessions });
        }
        self.check_queue()?;
        let begins_session = match generation.session() {
            Some(name) => self.enter_session(name)?,
            None => false,
        };
        self.num_submitted += 1;
        self.queue.push(generation, begins_session);
        Ok(id)
    }

    /// Ends a request now: its pages are free, or its session's, on return and `Done` with [`Finish::Cancelled`] comes out of the next
    /// `step`. False when it is not in flight (any more).
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let has_id = |generation: &Generation| generation.id() == id;
        if let Some(index) = self.running.iter().position(has_id) {
            self.end_running(index, Finish::Cancelled);
            return true;
        }
        let Some(mut entry) = self.remove_waiting(has_id) else { return false };
        entry.generation.finish(Finish::Cancelled, &mut self.events);
        self.turn_away(&entry);
        true
    }

    /// Whether there is nothing to do and nothing to report.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.num_admitted() == 0 && self.events.is_empty()
    }

    /// When an idle engine wants its next `step`; nothing: not before something is submitted.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let expiry = self.spec().config.session_ttl.and_then(|ttl| self.sessions.next_expiry(ttl));
        [expiry, self.disk_wakeup()].into_iter().flatten().min()
    }

    /// Computes one step and returns what happened, in order.
    pub fn step(&mut self) -> EngineEvents {
        self.step_at(Instant::now())
    }

    /// As `step`, at a time of the caller's choosing: deadlines and idle sessions go by it. It must not go back.
    pub fn step_at(&mut self, now: Instant) -> EngineEvents {
        self.end_overdue(now);
        self.advance_disk();
        self.running.iter_mut().for_each(Generation::catch_up);
        let mut plan = self.plan();
        if !plan.admitted.is_empty() {
            self.start(&plan.admitted);
            plan = self.plan_running(); // what they need not compute is known only now
        }
        debug_assert!(
            self.queue.is_empty() || self.num_admitted() > 0,
            "a waiting request could have started"
        );
        self.queue.announce(&mut self.events);
        self.note_scheduled(&plan.rows);
        let results = self.forward(&plan);
        self.deliver(&plan, results);
        if let Some(ttl) = self.spec().config.session_ttl {
            self.sessions.expire(now, ttl);
        }
        if cfg!(debug_assertions) && self.num_admitted() == 0 {
            self.pool.check(self.sessions.tables()).expect("idle sessions hold all pages that are held");
        }
        std::mem::take(&mut self.events)
    }

    fn plan(&self) -> StepPlan {
        let waiting = self.queue.waiting(|generation| self.bytes(generation));
        schedule::plan_step(&waiting, &self.running_rows(), self.budget())
    }

    fn plan_running(&self) -> StepPlan {
        schedule::plan_step(&[], &self.running_rows(), self.budget())
    }

    fn running_rows(&self) -> Vec<RunningRequest> {
        let pages: Vec<_> = self.running.iter().map(Generation::next_page).collect();
        let prefill_owners = self.prefill_owners(&pages);
        let running = |(index, generation): (usize, &Generation)| RunningRequest {
            prompt_left: generation.rows_left(),
            last_scheduled: generation.last_scheduled(),
            deferred: pages[index].is_some_and(|page| prefill_owners[&page] != index),
        };
        self.running.iter().enumerate().map(running).collect()
    }

    /// Of the prompts that fill the same page next, the one that is furthest: it computes what the others take over.
    fn prefill_owners(&self, pages: &[Option<PageName>]) -> HashMap<PageName, usize> {
        let mut prefill_owners: HashMap<PageName, usize> = HashMap::new();
        for (index, page) in pages.iter().enumerate() {
            let Some(page) = page else { continue };
            let owner = prefill_owners.entry(*page).or_insert(index);
            if self.running[index].sequence().position() > self.running[*owner].sequence().position() {
                *owner = index;
            }
        }
        prefill_owners
    }

    fn budget(&self) -> Budget {
        let config = &self.spec().config;
        let promised = self.session_bytes() + self.running_bytes();
        Budget {
            tokens: config.step_tokens,
            running: config.max_running - (self.num_admitted() - self.running.len()),
            bytes: self.pool.capacity() - promised,
        }
    }

    /// What there is to begin a request with, from its session or the index.
    fn resume(&mut self, generation: &Generation, num_indexed: Option<usize>) -> Resumed {
        if generation.scores_prompt() {
            let reuse = Reuse { reason: ReuseReason::PromptLogprobs, ..Reuse::default() };
            let sequence = Sequence::new(&self.pool);
            return Resumed { sequence, reuse, states_at: Vec::new(), difference: None };
        }
        let checked_out = match generation.session() {
            Some(name) => self.sessions.check_out(name, &self.pool),
            None => CheckedOut::nothing(&self.pool),
        };
        checked_out.resume(&self.pool, self.executor.spec(), generation.prompt(), num_indexed)
    }

    fn forward(&mut self, plan: &StepPlan) -> Vec<Result<()>> {
        let fed = self.running.iter().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        self.make_room(fed.map(|(generation, &rows)| generation.bytes_needed(rows)).sum());
        let fed = self.running.iter_mut().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        let mut feeds: Vec<SequenceFeed<'_>> = fed.map(|(generation, &rows)| generation.feed(rows)).collect();
        self.executor.step(&mut feeds)
    }

    /// Takes pages from idle named sessions, the longest unused first, until `num_bytes` are free.
    fn make_room(&mut self, num_bytes: usize) {
        while self.pool.free_bytes() < num_bytes && self.sessions.evict_oldest() {}
    }

    fn deliver(&mut self, plan: &StepPlan, results: Vec<Result<()>>) {
        let mut results = results.into_iter();
        let stepped = std::mem::take(&mut self.running);
        for (mut generation, &rows) in stepped.into_iter().zip(&plan.rows) {
            let result = if rows == 0 { None } else { results.next() };
            let ended = match result {
                None => false,
                Some(Ok(())) => generation.advance(self.executor.spec(), &*self.vocabulary, &mut self.events),
                Some(Err(error)) => {
                    generation.fail(error, &mut self.events);
                    true
                }
            };
            if ended {
                self.retire(generation);
            } else {
                self.running.push(generation);
            }
        }
    }

    /// Gives a session back what its request leaves.
    fn retire(&mut self, generation: Generation) {
        if let Some(name) = generation.session().map(str::to_owned) {
            self.save_session(&generation);
            let can_rewind = self.spec().model.can_rewind;
            self.sessions.check_in(&name, generation.into_sequence(can_rewind));
        }
    }

    /// Bytes promised to sessions driven by hand: each may fill its context.
    fn session_bytes(&self) -> usize {
        self.sessions.num_unnamed() * self.spec().sequence_bytes(self.spec().context_length())
    }

    fn running_bytes(&self) -> usize {
        let restoring = self.disk.iter().flat_map(KvDisk::generations);
        self.running.iter().chain(restoring).map(|generation| self.bytes(generation)).sum()
    }

    /// Requests out of the queue: running, or about to when the disk has answered.
    fn num_admitted(&self) -> usize {
        self.running.len() + self.disk.as_ref().map_or(0, KvDisk::num_restoring)
    }

    /// Bytes promised to a request: it may use all that its limits allow.
    fn bytes(&self, generation: &Generation) -> usize {
        self.spec().sequence_bytes(generation.longest())
    }
}
