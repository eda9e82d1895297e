//! Sessions: sequences that outlive a request, driven token by token (`prefill`, `decode_one`, `seek`, `reset`).
//!
//! Invariants: a call that is refused leaves the session untouched; one that fails after it began poisons it until
//! `reset`. A token that ends the generation is returned but never resident. `stop` takes effect at a token boundary and
//! lasts until the next `prefill` or `reset`. Knows no request, queue or thread; [`SessionTable`] counts, and the engine
//! decides who is admitted.

pub mod store;
pub mod transcript;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{Error, Result};
use super::kv::PagePool;
use super::request::{Sampling, validate_prompt};
use super::sample::draw_seed;
use super::sequence::{Sequence, TurnStart};
use super::spec::EngineSpec;
use super::step::{Executor, Feed, Input};
use super::text::Vocabulary;

/// Names a session of one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u64);

/// Asks a generation to stop at the next token boundary; clones share the flag, from any thread.
#[derive(Debug, Clone, Default)]
pub struct StopHandle(Arc<AtomicBool>);

impl StopHandle {
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// What one decode step gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decoded {
    /// A token, resident now. `piece` may be part of a character, and is empty for control tokens.
    Token { id: u32, piece: Vec<u8> },
    /// A token that ends the generation: not forwarded, not resident.
    Eos { id: u32 },
    /// The session was asked to stop: no token, the position has not moved.
    Stopped,
}

impl Decoded {
    pub fn token(&self) -> Option<u32> {
        match *self {
            Decoded::Token { id, .. } | Decoded::Eos { id } => Some(id),
            Decoded::Stopped => None,
        }
    }

    pub fn is_eos(&self) -> bool {
        matches!(self, Decoded::Eos { .. })
    }

    /// Whether the decode loop ends here: end of generation, or stopped.
    pub fn is_terminal(&self) -> bool {
        !matches!(self, Decoded::Token { .. })
    }
}

/// One conversation's state.
#[derive(Debug)]
pub struct Session {
    sequence: Sequence,
    stop: StopHandle,
}

impl Session {
    fn new(pool: &PagePool) -> Self {
        Self { sequence: Sequence::new(pool), stop: StopHandle::default() }
    }

    /// Tokens resident.
    pub fn position(&self) -> usize {
        self.sequence.position()
    }

    /// The resident tokens.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.resident().tokens()
    }

    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Appends `tokens` in chunks of the engine's step size and samples the first generated token after the last one.
    ///
    /// # Errors
    /// Untouched: [`Error::Poisoned`], [`Error::PromptEmpty`], [`Error::InvalidParameter`], and
    /// [`Error::PromptTooLong`] when no place is left for an answer. Poisoned: [`Error::Backend`].
    pub fn prefill(&mut self, executor: &mut Executor, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        self.check_prefill(executor.spec(), tokens, sampling)?;
        self.stop.clear();
        let seed = sampling.seed.unwrap_or_else(draw_seed);
        let generated_from = self.position() + tokens.len();
        self.sequence.begin_turn(TurnStart { generated_from, seed, logprobs: None });
        let mut chunks = tokens.chunks(executor.spec().config.step_tokens).peekable();
        while let Some(chunk) = chunks.next() {
            let is_last = chunks.peek().is_none();
            let input = if is_last { Input::LastChunk(chunk) } else { Input::Chunk(chunk) };
            if let Err(error) = self.step(executor, input, sampling) {
                self.sequence.poison(); // also when an earlier chunk is all that has changed
                return Err(error);
            }
        }
        Ok(())
    }

    fn check_prefill(&self, spec: &EngineSpec, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        self.check_healthy()?;
        validate_prompt(tokens, spec.vocab_size())?;
        sampling.validate(spec.vocab_size())?;
        let prompt_tokens = self.position() + tokens.len();
        if prompt_tokens >= spec.context_length() {
            return Err(Error::PromptTooLong { prompt_tokens, context_tokens: spec.context_length() });
        }
        Ok(())
    }

    /// Returns the pending token, makes it resident and samples the next. The order of checks is part of the contract:
    /// a stop comes before an end of generation, and that before a full context, so that it is seen there too.
    /// The seed in force is the one that `prefill` was given.
    ///
    /// # Errors
    /// Untouched: [`Error::Poisoned`], [`Error::InvalidParameter`], [`Error::InvalidState`] without a pending token or
    /// with a full context. Poisoned: [`Error::Backend`].
    pub fn decode_one(
        &mut self,
        executor: &mut Executor,
        vocabulary: &dyn Vocabulary,
        sampling: &Sampling,
    ) -> Result<Decoded> {
        self.check_healthy()?;
        sampling.validate(executor.spec().vocab_size())?;
        let pending =
            self.sequence.pending().ok_or(Error::InvalidState("no pending token: prefill first"))?;
        let id = pending.id;
        if self.stop.is_stopped() {
            return Ok(Decoded::Stopped);
        }
        if executor.spec().ends_generation(id) {
            self.sequence.clear_pending();
            return Ok(Decoded::Eos { id });
        }
        if self.position() >= executor.spec().context_length() {
            return Err(Error::InvalidState("the context is full"));
        }
        self.step(executor, Input::Pending, sampling)?;
        let bytes = if vocabulary.is_special(id) { None } else { vocabulary.token_bytes(id) };
        Ok(Decoded::Token { id, piece: bytes.map(Cow::into_owned).unwrap_or_default() })
    }

    fn step(&mut self, executor: &mut Executor, input: Input<'_>, sampling: &Sampling) -> Result<()> {
        let mut feeds = [Feed { sequence: &mut self.sequence, input, sampling }];
        executor.step(&mut feeds).pop().expect("one result per feed")
    }

    /// Rewinds to `position` resident tokens and forgets the pending one.
    ///
    /// # Errors
    /// All leave the session untouched: [`Error::Poisoned`]; [`Error::InvalidParameter`] beyond the resident tokens;
    /// [`Error::NotSupported`] when the model cannot rewind: reset and prefill instead.
    pub fn seek(&mut self, spec: &EngineSpec, position: usize) -> Result<()> {
        self.check_healthy()?;
        if position > self.position() {
            let message = format!("{position} is beyond the {} resident tokens", self.position());
            return Err(Error::InvalidParameter { name: "position", message });
        }
        if !spec.model.can_rewind {
            return Err(Error::NotSupported("rewinding a session"));
        }
        self.sequence.truncate(position);
        Ok(())
    }

    /// Empties the session; legal in every state.
    pub fn reset(&mut self) {
        self.sequence.reset();
        self.stop.clear();
    }

    fn check_healthy(&self) -> Result<()> {
        if self.sequence.is_poisoned() { Err(Error::Poisoned) } else { Ok(()) }
    }
}

/// The sessions of an engine.
#[derive(Debug, Default)]
pub struct SessionTable {
    sessions: BTreeMap<SessionId, Session>,
    num_created: u64,
}

impl SessionTable {
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    pub fn create(&mut self, pool: &PagePool) -> SessionId {
        self.num_created += 1;
        let id = SessionId(self.num_created);
        self.sessions.insert(id, Session::new(pool));
        id
    }

    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get(&self, id: SessionId) -> Result<&Session> {
        self.sessions.get(&id).ok_or_else(|| not_found(id))
    }

    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get_mut(&mut self, id: SessionId) -> Result<&mut Session> {
        self.sessions.get_mut(&id).ok_or_else(|| not_found(id))
    }

    /// Frees the session's pages and place; false when there is none of that id.
    pub fn remove(&mut self, id: SessionId) -> bool {
        self.sessions.remove(&id).is_some()
    }
}

fn not_found(id: SessionId) -> Error {
    Error::SessionNotFound(id.0.to_string())
}
