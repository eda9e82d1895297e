//! The engine: a model, its KV pages, its sessions and the requests in flight. A synchronous value without
//! threads or channels: tests call it directly, and `thread` gives it a thread.
//!
//! Invariants: a refused request leaves no trace. The bytes promised to running requests and to step-wise
//! sessions never exceed the pool; the pages of idle named sessions are promised to none and are evicted on
//! demand. So a request that has started never runs out of pages. When a request ends, its pages are free or
//! belong to its session, and its last event is delivered in that step. A failed step fails the requests in
//! it and resets their sessions, and affects no others.

mod disk;
mod encode;
mod generation;
#[cfg(test)]
mod image_tests;
mod queue;
mod schedule;
mod sessions;
mod speculate;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::request::{Finish, Request, Reuse, ReuseReason};
use crate::sequence::{Resumed, Sequence};
use crate::session::{CheckedOut, SessionTable};
use crate::spec::{EngineConfig, EngineSpec, ServingCapacity};
use crate::step::{Executor, FedRows, SequenceFeed};
use llmctl_base::error::{Error, Result};
use llmctl_models::adapters::by_default;
use llmctl_models::kv::{PageName, PagePool};
use llmctl_models::model::{Model, STEP_TOKENS};
use llmctl_models::text::Vocabulary;
use llmctl_models::vision::Tower;

pub use crate::session::{DecodeOutcome, SessionId, SessionInfo, SessionState, StopHandle};
use disk::KvDisk;
use encode::ImageEncoder;
pub use generation::RequestId;
use generation::{EngineEvents, Generation, NextRows};
use queue::RequestQueue;
pub use schedule::MAX_BYPASSES;
use schedule::{Budget, RunningRequest, StepPlan};
pub use sessions::SessionDetail;
use speculate::{AssistantDrafter, DraftModel, Speculator, wall_clock};

/// Runs requests and sessions on one model.
pub struct Engine {
    executor: Executor,
    vocabulary: Arc<dyn Vocabulary>,
    pool: PagePool,
    sessions: SessionTable,
    queue: RequestQueue,
    running: Vec<Generation>,
    disk: Option<KvDisk>,
    encoder: Option<ImageEncoder>,
    speculator: Speculator,
    events: EngineEvents,
    num_submitted: u64,
    schedule_clock: u64,
}

/// Returns an empty pool.
fn new_pool(spec: &EngineSpec) -> PagePool {
    // Skip the prefix index when it could never hit: reuse is off, or the model keeps state outside pages.
    let has_index = spec.config.warm_resume && spec.model.can_rewind;
    let pool = if has_index { PagePool::new } else { PagePool::without_index };
    pool(&spec.model.groups, spec.kv_memory)
}

/// Requests in flight, and KV memory in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineLoad {
    pub num_waiting: usize,
    pub num_running: usize,
    pub num_sessions: usize,
    /// Free, counting cached pages, which are reclaimed on demand.
    pub kv_free: usize,
    pub kv_capacity: usize,
    /// Backed by memory, cached pages included.
    pub kv_allocated: usize,
    /// Prompts whose KV `llmctl warm` keeps on disk, as of the last request, and bytes of that KV.
    pub warm_prompts: usize,
    pub warm_bytes: usize,
    /// Requests that began with one of them.
    pub warm_hits: usize,
}

impl Engine {
    /// Checks `config` against the model. If an assistant was loaded with it, it drafts.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`], naming the field that the model cannot serve.
    pub fn new(model: Box<dyn Model>, vocabulary: Arc<dyn Vocabulary>, config: EngineConfig) -> Result<Self> {
        let spec = EngineSpec::new(model.spec().clone(), config)?;
        let mut speculator = Speculator::new(spec.speculation());
        if model.hidden_width().is_some() {
            speculator.set_computing(AssistantDrafter::new(wall_clock()));
        }
        let pool = new_pool(&spec);
        let mut executor = Executor::new(model, spec);
        executor.set_vocabulary(vocabulary.clone());
        Ok(Self {
            pool,
            speculator,
            executor,
            vocabulary,
            sessions: SessionTable::default(),
            queue: RequestQueue::default(),
            running: Vec::new(),
            disk: None,
            encoder: None,
            events: Vec::new(),
            num_submitted: 0,
            schedule_clock: 0,
        })
    }

    /// Takes images, with the model's vision tower. Comes before everything else.
    pub fn set_tower(&mut self, tower: Box<dyn Tower>) {
        self.executor.set_vision(tower.spec());
        self.pool = new_pool(self.executor.spec());
        if self.spec().has_whole_images() {
            self.pool.keep_images_whole();
        }
        self.encoder = Some(ImageEncoder::new(tower));
    }

    /// Drafts with another model of the same vocabulary, which is loaded beside the engine's own.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if it cannot drop rows; [`Error::Backend`] if it computes nothing.
    pub fn set_draft_model(&mut self, model: Box<dyn Model>) -> Result<()> {
        let model = DraftModel::new(model, self.spec(), wall_clock())?;
        self.speculator.set_computing(model);
        Ok(())
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
            ..self.warm_load()
        }
    }

    /// Queues a request. `step` returns its events.
    ///
    /// # Errors
    /// All before any work: those of [`Request::validate`]; [`Error::SessionsFull`] if step-wise sessions
    /// leave too few pages for it ever to run, or no slot is left for its session; [`Error::SessionBusy`] if
    /// its session has a request; [`Error::QueueFull`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.submit_at(request, Instant::now())
    }

    /// Queues a request as of `now`, from which its deadline counts.
    ///
    /// # Errors
    /// Those of `submit`.
    pub fn submit_at(&mut self, mut request: Request, now: Instant) -> Result<RequestId> {
        let room = request.validate(self.spec())?;
        request.adapters.get_or_insert_with(|| by_default(&self.executor.spec().model.adapters));
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

    /// Ends a request at once, freeing its pages or returning them to its session. The next `step` returns
    /// `Done` with [`Finish::Cancelled`]. Returns false if the request is not in flight.
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

    /// Returns whether no request is in flight and no event is undelivered.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.num_admitted() == 0 && self.events.is_empty()
    }

    /// Returns when an idle engine needs its next `step`; `None` if only a new request gives it work.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let expiry = self.spec().config.session_ttl.and_then(|ttl| self.sessions.next_expiry(ttl));
        [expiry, self.disk_wakeup()].into_iter().flatten().min()
    }

    /// Makes memory ready for a page of KV, if not enough is. An idle engine has the time, a step has not.
    pub fn prepare_page(&mut self) -> bool {
        self.executor.prepare_page(&self.pool)
    }

    /// Computes one step and returns its events in order.
    pub fn step(&mut self) -> EngineEvents {
        self.step_at(Instant::now())
    }

    /// Computes one step as of `now`, which deadlines and idle sessions are measured by. `now` must not go
    /// back.
    pub fn step_at(&mut self, now: Instant) -> EngineEvents {
        self.end_overdue(now);
        self.advance_disk();
        self.running.iter_mut().for_each(Generation::catch_up);
        self.supply_images();
        self.plan_slice();
        let mut plan = self.plan();
        if !plan.admitted.is_empty() {
            self.start(&plan.admitted);
            self.supply_images();
            plan = self.plan_running(); // the resumed prefixes are known only now
        }
        debug_assert!(
            self.queue.is_empty() || self.num_admitted() > 0,
            "a waiting request could have started"
        );
        self.queue.announce(&mut self.events);
        self.note_scheduled(&plan.rows);
        self.compute(&plan);
        self.encode_slice();
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
        let generates = self.running.iter().any(|generation| generation.rows_left() == 0);
        let is_slice = generates && self.encoder.as_ref().is_some_and(ImageEncoder::has_turn);
        let running = |(index, generation): (usize, &Generation)| {
            let NextRows { most, whole, waits } = generation.next_rows();
            let is_computed = pages[index].is_some_and(|page| prefill_owners[&page] != index);
            RunningRequest {
                prompt_left: most + usize::from(waits),
                last_scheduled: generation.last_scheduled(),
                deferred: is_computed || waits || is_slice,
                whole,
            }
        };
        self.running.iter().enumerate().map(running).collect()
    }

    /// Maps each page that several prompts would fill next to the prompt that is furthest along. It computes
    /// the page; the others wait and take it over.
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
            beside: STEP_TOKENS.max(config.step_tokens / 2),
            running: config.max_running - (self.num_admitted() - self.running.len()),
            bytes: self.pool.capacity() - promised,
        }
    }

    /// Returns what a request can resume from: its session or the prefix index.
    fn resume(&mut self, generation: &Generation, num_indexed: Option<usize>) -> Resumed {
        if generation.scores_prompt() {
            let reuse = Reuse { reason: ReuseReason::PromptLogprobs, ..Reuse::default() };
            let mut sequence = Sequence::new(&self.pool);
            sequence.adapt(generation.prompt().adapters);
            return Resumed { sequence, reuse, states_at: Vec::new(), difference: None, num_shared: 0 };
        }
        let checked_out = match generation.session() {
            Some(name) => self.sessions.check_out(name, &self.pool),
            None => CheckedOut::nothing(&self.pool),
        };
        checked_out.resume(&self.pool, self.executor.spec(), generation.prompt(), num_indexed)
    }

    /// Drafts, runs the model and delivers.
    fn compute(&mut self, plan: &StepPlan) {
        let (num_rows, most_rows) = (plan.rows.iter().sum(), self.spec().config.step_tokens);
        let fed = self.running.iter_mut().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        let mut generating: Vec<&mut Generation> = fed
            .filter(|(generation, rows)| generation.samples(**rows))
            .map(|(generation, _)| generation)
            .collect();
        let has_prompts = generating.len() < plan.rows.iter().filter(|&&rows| rows > 0).count();
        let num_drafted = self.speculator.draft(&mut self.executor, &mut generating, (num_rows, most_rows));
        let begun = Instant::now();
        let results = self.forward(plan);
        let took = begun.elapsed();
        let num_accepted = self.deliver(plan, results);
        let took = took + self.executor.ending_drafts();
        if has_prompts {
            self.speculator.learn_prompts(took);
        } else if num_rows > 0 {
            self.speculator.learn(num_rows, num_drafted, num_accepted, took);
        }
    }

    fn forward(&mut self, plan: &StepPlan) -> Vec<Result<FedRows>> {
        let fed = self.running.iter().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        self.make_room(fed.map(|(generation, &rows)| generation.bytes_needed(rows)).sum());
        let fed = self.running.iter_mut().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        let mut feeds: Vec<SequenceFeed<'_>> = fed.map(|(generation, &rows)| generation.feed(rows)).collect();
        self.executor.step(&mut feeds)
    }

    /// Evicts idle named sessions, least recently used first, until `num_bytes` are free.
    fn make_room(&mut self, num_bytes: usize) {
        while self.pool.free_bytes() < num_bytes && self.sessions.evict_oldest() {}
    }

    /// Delivers what a step computed. Returns the number of drafted tokens that were accepted.
    fn deliver(&mut self, plan: &StepPlan, results: Vec<Result<FedRows>>) -> usize {
        let (mut results, mut num_accepted) = (results.into_iter(), 0);
        let stepped = std::mem::take(&mut self.running);
        for (mut generation, &rows) in stepped.into_iter().zip(&plan.rows) {
            let result = if rows == 0 { None } else { results.next() };
            let (_, accepted_before) = generation.draft_totals();
            let ended = match result {
                None => false,
                Some(Ok(fed)) => {
                    generation.advance(&mut self.executor, fed, &*self.vocabulary, &mut self.events)
                }
                Some(Err(error)) => {
                    generation.fail(error, &mut self.events);
                    true
                }
            };
            num_accepted += generation.draft_totals().1 - accepted_before;
            if ended {
                self.retire(generation);
            } else {
                self.running.push(generation);
            }
        }
        num_accepted
    }

    /// Returns the sequence of an ended request to its session, if it has one.
    fn retire(&mut self, generation: Generation) {
        if let Some(name) = generation.session().cloned() {
            if !name.is_memory_only() {
                self.save_session(&generation);
            }
            let can_rewind = self.spec().model.can_rewind;
            self.sessions.check_in(&name, generation.into_sequence(can_rewind));
        }
    }

    /// Returns the bytes promised to step-wise sessions, each of which may fill its context.
    fn session_bytes(&self) -> usize {
        self.sessions.num_unnamed() * self.spec().sequence_bytes(self.spec().context_length())
    }

    fn running_bytes(&self) -> usize {
        let restoring = self.disk.iter().flat_map(KvDisk::generations);
        self.running.iter().chain(restoring).map(|generation| self.bytes(generation)).sum()
    }

    /// Returns the number of admitted requests: running, or waiting for pages from disk.
    fn num_admitted(&self) -> usize {
        self.running.len() + self.disk.as_ref().map_or(0, KvDisk::num_restoring)
    }

    /// Returns the bytes promised to a request: the most that its limits allow.
    fn bytes(&self, generation: &Generation) -> usize {
        let image_rows = if self.spec().has_whole_images() { generation.longest_image() } else { 0 };
        self.spec().request_bytes(generation.longest(), image_rows)
    }
}
