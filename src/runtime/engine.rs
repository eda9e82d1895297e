//! The engine: the model, its pages, its sessions and the requests in flight. A synchronous value without threads or
//! channels; tests call it directly, `thread` gives it a thread of its own.
//!
//! Invariants: a request that is refused has cost nothing; pages promised to requests and sessions never exceed the pool,
//! so nothing that has started runs out of them; whatever ends a request, its pages are free and its last event is out
//! by the end of that step. A failed step fails the requests in it and no others.

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::{Error, Result};
use super::generation::{Events, Generation};
use super::kv::{PAGE_TOKENS, PagePool};
use super::model::Model;
use super::request::{Finish, Request, Sampling};
use super::schedule::{self, Budget, Running, StepPlan, Waiting};
use super::session::SessionTable;
use super::spec::{EngineConfig, EngineSpec, ServingCapacity};
use super::step::{Executor, Feed};
use super::text::Vocabulary;

pub use super::generation::RequestId;
pub use super::session::{Decoded, SessionId, StopHandle};

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
        Ok(Self {
            pool: PagePool::new(spec.config.num_pages),
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
    /// for it ever to run.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let max_tokens = request.validate(self.spec().vocab_size(), self.spec().context_length())?;
        let id = RequestId(self.num_submitted);
        let generation = Generation::new(id, request, max_tokens, &self.pool);
        if pages(&generation) + self.session_pages() > self.pool.capacity() {
            return Err(Error::SessionsFull { capacity: self.serving_capacity().sessions });
        }
        self.num_submitted += 1;
        self.waiting.push_back(generation);
        Ok(id)
    }

    /// Ends a request now: its pages are free on return and `Done` with [`Finish::Cancelled`] comes out of the next
    /// `step`. False when it is not in flight (any more).
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let waiting = self.waiting.iter().position(|generation| generation.id() == id);
        let running = self.running.iter().position(|generation| generation.id() == id);
        let generation = match (waiting, running) {
            (Some(index), _) => self.waiting.remove(index),
            (None, Some(index)) => Some(self.running.remove(index)),
            (None, None) => None,
        };
        let Some(mut generation) = generation else { return false };
        generation.finish(Finish::Cancelled, &mut self.events);
        true
    }

    /// Whether there is nothing to do and nothing to report.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.events.is_empty()
    }

    /// Computes one step and returns what happened, in order.
    pub fn step(&mut self) -> Events {
        let plan = self.plan();
        self.start(plan.num_admitted);
        let results = self.forward(&plan);
        self.deliver(&plan, results);
        debug_assert!(
            !self.running.is_empty()
                || !self.sessions.is_empty()
                || self.pool.num_free() == self.pool.capacity(),
            "pages are held by nobody"
        );
        std::mem::take(&mut self.events)
    }

    fn plan(&self) -> StepPlan {
        let waiting = |generation: &Generation| Waiting {
            prompt_left: generation.prompt_left(),
            pages: pages(generation),
        };
        let waiting: Vec<_> = self.waiting.iter().map(waiting).collect();
        let running = |generation: &Generation| Running { prompt_left: generation.prompt_left() };
        let running: Vec<_> = self.running.iter().map(running).collect();
        let config = &self.spec().config;
        let promised = self.session_pages() + self.running_pages();
        let budget = Budget {
            tokens: config.step_tokens,
            running: config.max_running,
            pages: self.pool.capacity() - promised,
        };
        schedule::plan_step(&waiting, &running, budget)
    }

    fn start(&mut self, count: usize) {
        for mut generation in self.waiting.drain(..count) {
            generation.start(&mut self.events);
            self.running.push(generation);
        }
    }

    fn forward(&mut self, plan: &StepPlan) -> Vec<Result<()>> {
        let fed = self.running.iter_mut().zip(&plan.rows).filter(|(_, rows)| **rows > 0);
        let mut feeds: Vec<Feed<'_>> = fed.map(|(generation, &rows)| generation.feed(rows)).collect();
        self.executor.step(&mut feeds)
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
            if !ended {
                self.running.push(generation);
            }
        }
    }

    /// Pages promised to sessions: each may fill its context.
    fn session_pages(&self) -> usize {
        self.sessions.len() * self.spec().pages_per_context()
    }

    fn running_pages(&self) -> usize {
        self.running.iter().map(pages).sum()
    }
}

/// Sessions driven directly, token by token; see [`super::session`] for the contract of each call.
impl Engine {
    /// # Errors
    /// [`Error::SessionsFull`] at [`Engine::serving_capacity`], or while requests in flight need the pages.
    pub fn create_session(&mut self) -> Result<SessionId> {
        let capacity = self.serving_capacity().sessions;
        let largest_waiting = self.waiting.iter().map(pages).max().unwrap_or(0);
        let requested = self.running_pages().max(largest_waiting);
        let needed = self.session_pages() + self.spec().pages_per_context() + requested;
        if self.sessions.len() >= capacity || needed > self.pool.capacity() {
            return Err(Error::SessionsFull { capacity });
        }
        Ok(self.sessions.create(&self.pool))
    }

    /// # Errors
    /// Those of [`super::session::Session::prefill`], and [`Error::SessionNotFound`].
    pub fn prefill_tokens(&mut self, id: SessionId, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        self.sessions.get_mut(id)?.prefill(&mut self.executor, tokens, sampling)
    }

    /// # Errors
    /// Those of [`super::session::Session::decode_one`], and [`Error::SessionNotFound`].
    pub fn decode_one(&mut self, id: SessionId, sampling: &Sampling) -> Result<Decoded> {
        self.sessions.get_mut(id)?.decode_one(&mut self.executor, &*self.vocabulary, sampling)
    }

    /// Tokens resident.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn position(&self, id: SessionId) -> Result<usize> {
        Ok(self.sessions.get(id)?.position())
    }

    /// The resident tokens.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn session_tokens(&self, id: SessionId) -> Result<&[u32]> {
        Ok(self.sessions.get(id)?.tokens())
    }

    /// # Errors
    /// Those of [`super::session::Session::seek`], and [`Error::SessionNotFound`].
    pub fn seek(&mut self, id: SessionId, position: usize) -> Result<()> {
        self.sessions.get_mut(id)?.seek(self.executor.spec(), position)
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn reset(&mut self, id: SessionId) -> Result<()> {
        self.sessions.get_mut(id)?.reset();
        Ok(())
    }

    /// The session's stop flag, for any thread.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn stop_handle(&self, id: SessionId) -> Result<StopHandle> {
        Ok(self.sessions.get(id)?.stop_handle())
    }

    /// Ends a session and frees its pages; false when there is none.
    pub fn close(&mut self, id: SessionId) -> bool {
        self.sessions.remove(id)
    }
}

/// Pages promised to a request: it may use all that its limits allow.
fn pages(generation: &Generation) -> usize {
    generation.longest().div_ceil(PAGE_TOKENS)
}
