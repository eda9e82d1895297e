//! The engine: the model, its pages, its sessions and the requests in flight. A synchronous value without threads or
//! channels; tests call it directly, `thread` gives it a thread of its own.
//!
//! Invariants: a request that is refused has cost nothing; pages promised to running requests and to sessions driven by hand
//! never exceed the pool, and what named sessions hold while idle is promised to nobody and goes when needed, so nothing
//! that has started runs out of pages; whatever ends a request, its pages are free or its session's, and its last event is
//! out by the end of that step. A failed step fails the requests in it, resets their sessions, and touches no others.

mod sessions;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::runtime::error::{Error, Result};
use crate::runtime::generation::{Events, Generation};
use crate::runtime::kv::{PAGE_TOKENS, PagePool};
use crate::runtime::model::Model;
use crate::runtime::request::{Finish, Request};
use crate::runtime::schedule::{self, Budget, Running, StepPlan, Waiting};
use crate::runtime::session::{Lent, SessionTable};
use crate::runtime::spec::{EngineConfig, EngineSpec, ServingCapacity};
use crate::runtime::step::{Executor, Feed};
use crate::runtime::text::Vocabulary;

pub use crate::runtime::generation::RequestId;
pub use crate::runtime::session::{Decoded, SessionId, SessionInfo, SessionState, StopHandle};
pub use sessions::SessionDetail;

/// Runs requests and sessions on one model.
pub struct Engine {
    executor: Executor,
    vocabulary: Arc<dyn Vocabulary>,
    pool: PagePool,
    sessions: SessionTable,
    waiting: VecDeque<Generation>,
    running: Vec<Generation>,
    events: Events,
    num_submitted: u64,
}

/// Requests in flight and pages in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    pub num_waiting: usize,
    pub num_running: usize,
    pub num_sessions: usize,
    pub free_pages: usize,
    pub num_pages: usize,
}

impl Engine {
    /// # Errors
    /// [`Error::InvalidParameter`] when the model cannot serve what `config` asks, naming the field.
    pub fn new(model: Box<dyn Model>, vocabulary: Arc<dyn Vocabulary>, config: EngineConfig) -> Result<Self> {
        let spec = EngineSpec::new(model.spec().clone(), config)?;
        let num_pages = spec.config.num_pages;
        // Without reuse, or with state beyond the pages, nobody would look for what the index names.
        let has_index = spec.config.warm_resume && spec.model.can_rewind;
        Ok(Self {
            pool: if has_index { PagePool::new(num_pages) } else { PagePool::without_index(num_pages) },
            executor: Executor::new(model, spec),
            vocabulary,
            sessions: SessionTable::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            events: Vec::new(),
            num_submitted: 0,
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
            num_waiting: self.waiting.len(),
            num_running: self.running.len(),
            num_sessions: self.sessions.len(),
            free_pages: self.pool.num_free(),
            num_pages: self.pool.capacity(),
        }
    }

    /// Queues a request. Its events come out of `step`.
    ///
    /// # Errors
    /// Before any work: those of [`Request::validate`]; [`Error::SessionsFull`] when the sessions leave too few pages
    /// for it ever to run, or there is no place for the session that it would begin; [`Error::SessionBusy`] when another
    /// request is in its session.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let max_tokens = request.validate(self.spec().vocab_size(), self.spec().context_length())?;
        let id = RequestId(self.num_submitted);
        let generation = Generation::new(id, request, max_tokens, &self.pool);
        if pages(&generation) + self.session_pages() > self.pool.capacity() {
            return Err(Error::SessionsFull { capacity: self.serving_capacity().sessions });
        }
        if let Some(name) = generation.session() {
            self.enter_session(name)?;
        }
        self.num_submitted += 1;
        self.waiting.push_back(generation);
        Ok(id)
    }

    /// Ends a request now: its pages are free, or its session's, on return and `Done` with [`Finish::Cancelled`] comes out of the next
    /// `step`. False when it is not in flight (any more).
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let has_id = |generation: &Generation| generation.id() == id;
        if let Some(index) = self.running.iter().position(has_id) {
            let mut generation = self.running.remove(index);
            generation.finish(Finish::Cancelled, &mut self.events);
            self.retire(generation);
            return true;
        }
        let waiting = self.waiting.iter().position(has_id).and_then(|index| self.waiting.remove(index));
        let Some(mut generation) = waiting else { return false };
        generation.finish(Finish::Cancelled, &mut self.events);
        if let Some(name) = generation.session() {
            self.sessions.set_waiting(name, false);
        }
        true
    }

    /// Whether there is nothing to do and nothing to report.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.events.is_empty()
    }

    /// Computes one step and returns what happened, in order.
    pub fn step(&mut self) -> Events {
        let mut plan = self.plan();
        if plan.num_admitted > 0 {
            self.start(plan.num_admitted);
            plan = self.plan_running(); // what they need not compute is known only now
        }
        let results = self.forward(&plan);
        self.deliver(&plan, results);
        if cfg!(debug_assertions) && self.running.is_empty() {
            self.pool.check(self.sessions.tables()).expect("idle sessions hold all pages that are held");
        }
        std::mem::take(&mut self.events)
    }

    fn plan(&self) -> StepPlan {
        let waiting = |generation: &Generation| Waiting {
            prompt_left: generation.prompt_left(),
            pages: pages(generation),
        };
        let waiting: Vec<_> = self.waiting.iter().map(waiting).collect();
        schedule::plan_step(&waiting, &self.running_rows(), self.budget())
    }

    fn plan_running(&self) -> StepPlan {
        schedule::plan_step(&[], &self.running_rows(), self.budget())
    }

    fn running_rows(&self) -> Vec<Running> {
        let running = |generation: &Generation| Running { prompt_left: generation.prompt_left() };
        self.running.iter().map(running).collect()
    }

    fn budget(&self) -> Budget {
        let config = &self.spec().config;
        let promised = self.session_pages() + self.running_pages();
        Budget {
            tokens: config.step_tokens,
            running: config.max_running,
            pages: self.pool.capacity() - promised,
        }
    }

    /// Admits the first of the queue, each with what of its prompt is computed already.
    fn start(&mut self, count: usize) {
        for mut generation in self.waiting.drain(..count) {
            let lent = match generation.session() {
                Some(name) => self.sessions.lend(name, &self.pool),
                None => Lent::nothing(&self.pool),
            };
            let difference = lent.difference(self.executor.spec(), generation.prompt());
            let (sequence, reuse) = lent.resume(&self.pool, self.executor.spec(), generation.prompt());
            generation.start(sequence, reuse, difference, &mut self.events);
            self.running.push(generation);
        }
    }

    fn forward(&mut self, plan: &StepPlan) -> Vec<Result<()>> {
        let fed = self.running.iter().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        self.make_room(fed.map(|(generation, &rows)| generation.num_pages_needed(rows)).sum());
        let fed = self.running.iter_mut().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        let mut feeds: Vec<Feed<'_>> = fed.map(|(generation, &rows)| generation.feed(rows)).collect();
        self.executor.step(&mut feeds)
    }

    /// Takes pages from idle named sessions, the longest unused first, until `num_pages` are free.
    fn make_room(&mut self, num_pages: usize) {
        while self.pool.num_free() < num_pages && self.sessions.evict_oldest() {}
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
            let can_rewind = self.spec().model.can_rewind;
            self.sessions.give_back(&name, generation.into_sequence(can_rewind));
        }
    }

    /// Pages promised to sessions driven by hand: each may fill its context.
    fn session_pages(&self) -> usize {
        self.sessions.num_unnamed() * self.spec().pages_per_context()
    }

    fn running_pages(&self) -> usize {
        self.running.iter().map(pages).sum()
    }
}

/// Pages promised to a request: it may use all that its limits allow.
fn pages(generation: &Generation) -> usize {
    generation.longest().div_ceil(PAGE_TOKENS)
}
