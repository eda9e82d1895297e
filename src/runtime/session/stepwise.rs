//! Sessions driven token by token: `prefill`, `decode_one` and `seek`.
//!
//! Invariants: a call that is refused leaves the session untouched; one that fails after it began poisons it
//! until `reset`. A token that ends the generation is returned but never resident.

use std::borrow::Cow;

use super::Session;
use crate::request::validate_prompt;
use crate::sample::draw_seed;
use crate::sequence::TurnStart;
use crate::spec::EngineSpec;
use crate::step::{Executor, FeedInput, SequenceFeed};
use llmctl_base::Sampling;
use llmctl_base::error::{Error, Result};
use llmctl_models::text::Vocabulary;

/// Result of one decode step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodeOutcome {
    /// A token, now resident. `piece` may be part of a character and is empty for control tokens.
    Token { id: u32, piece: Vec<u8> },
    /// An end-of-generation token: neither computed nor resident.
    Eos { id: u32 },
    /// The session was stopped; no token, and the position is unchanged.
    Stopped,
}

impl DecodeOutcome {
    pub fn token(&self) -> Option<u32> {
        match *self {
            DecodeOutcome::Token { id, .. } | DecodeOutcome::Eos { id } => Some(id),
            DecodeOutcome::Stopped => None,
        }
    }

    pub fn is_eos(&self) -> bool {
        matches!(self, DecodeOutcome::Eos { .. })
    }

    /// Returns whether the decode loop ends here.
    pub fn is_terminal(&self) -> bool {
        !matches!(self, DecodeOutcome::Token { .. })
    }
}

impl Session {
    /// Appends `tokens` in chunks of the engine's step size and samples the token after the last one.
    ///
    /// # Errors
    /// Session unchanged: [`Error::Poisoned`], [`Error::PromptEmpty`], [`Error::InvalidParameter`], and
    /// [`Error::PromptTooLong`] if no room is left for an answer. Session poisoned: [`Error::Backend`].
    pub fn prefill(&mut self, executor: &mut Executor, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        self.check_prefill(executor.spec(), tokens, sampling)?;
        self.stop.clear();
        let seed = sampling.seed.unwrap_or_else(draw_seed);
        let generated_from = self.position() + tokens.len();
        self.sequence.begin_turn(TurnStart { generated_from, seed, ..TurnStart::default() });
        let mut chunks = tokens.chunks(executor.spec().config.step_tokens).peekable();
        while let Some(chunk) = chunks.next() {
            let is_last = chunks.peek().is_none();
            let input = if is_last { FeedInput::LastChunk(chunk) } else { FeedInput::Chunk(chunk) };
            if let Err(error) = self.step(executor, input, sampling) {
                self.sequence.poison(); // an earlier chunk may be the only change
                return Err(error);
            }
        }
        Ok(())
    }

    /// Validates the arguments of `prefill`.
    ///
    /// # Errors
    /// Those of `prefill` that leave the session unchanged.
    pub fn check_prefill(&self, spec: &EngineSpec, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        self.check_healthy()?;
        validate_prompt(tokens, spec.vocab_size())?;
        sampling.validate(spec.vocab_size())?;
        let prompt_tokens = self.position() + tokens.len();
        if prompt_tokens >= spec.context_length() {
            return Err(Error::PromptTooLong { prompt_tokens, context_tokens: spec.context_length() });
        }
        Ok(())
    }

    /// Returns the pending token, makes it resident and samples the next one. The order of checks is part of
    /// the contract: stop, end of generation, full context. Uses the seed given to `prefill`.
    ///
    /// # Errors
    /// Session unchanged: [`Error::Poisoned`], [`Error::InvalidParameter`], and [`Error::InvalidState`]
    /// without a pending token or with a full context. Session poisoned: [`Error::Backend`].
    pub fn decode_one(
        &mut self,
        executor: &mut Executor,
        vocabulary: &dyn Vocabulary,
        sampling: &Sampling,
    ) -> Result<DecodeOutcome> {
        self.check_healthy()?;
        sampling.validate(executor.spec().vocab_size())?;
        let pending =
            self.sequence.pending().ok_or(Error::InvalidState("no pending token: prefill first"))?;
        let id = pending.id;
        if self.stop.is_stopped() {
            return Ok(DecodeOutcome::Stopped);
        }
        if executor.spec().ends_generation(id) {
            self.sequence.clear_pending();
            return Ok(DecodeOutcome::Eos { id });
        }
        if self.position() >= executor.spec().context_length() {
            return Err(Error::InvalidState("the context is full"));
        }
        self.step(executor, FeedInput::Pending, sampling)?;
        let bytes = if vocabulary.is_special(id) { None } else { vocabulary.token_bytes(id) };
        Ok(DecodeOutcome::Token { id, piece: bytes.map(Cow::into_owned).unwrap_or_default() })
    }

    /// Returns whether a token is sampled and not resident yet.
    pub fn has_pending(&self) -> bool {
        self.sequence.pending().is_some()
    }

    fn step(&mut self, executor: &mut Executor, input: FeedInput<'_>, sampling: &Sampling) -> Result<()> {
        let mut feeds = [SequenceFeed::new(&mut self.sequence, input, sampling)];
        executor.step(&mut feeds).pop().expect("one result per feed").map(drop)
    }

    /// Rewinds to `position` resident tokens and drops the pending one.
    ///
    /// # Errors
    /// All leave the session unchanged: [`Error::Poisoned`]; [`Error::InvalidParameter`] beyond the resident
    /// tokens; [`Error::NotSupported`] if the model cannot rewind: reset and prefill instead.
    pub fn seek(&mut self, spec: &EngineSpec, position: usize) -> Result<()> {
        self.check_healthy()?;
        if position > self.position() {
            let message = format!("{position} is beyond the {} resident tokens", self.position());
            return Err(Error::InvalidParameter { name: "position", message });
        }
        if !spec.model.can_rewind {
            return Err(Error::NotSupported("rewinding a session"));
        }
        if !self.sequence.truncate(position) {
            return Err(Error::NotSupported(
                "rewinding to where a window or a recurrent state has left no trace",
            ));
        }
        Ok(())
    }

    fn check_healthy(&self) -> Result<()> {
        if self.sequence.is_poisoned() { Err(Error::Poisoned) } else { Ok(()) }
    }
}
