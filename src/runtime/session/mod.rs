//! Sessions: sequences that outlive a request.
//!
//! An unnamed session is driven token by token (`stepwise`). A named one hands its sequence to one request at
//! a time (`checkout`); while idle it may lose its pages, and its slot to another session (`table`).
//!
//! Invariants: a refused call leaves the session untouched; a call that fails after it began poisons the
//! session until `reset`. This module knows no request, queue or thread: [`SessionTable`] counts, and the
//! engine decides who is admitted.

mod checkout;
pub mod difference;
pub mod prefill;
mod stepwise;
mod stop;
pub mod store;
mod table;
pub mod transcript;

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::sequence::Sequence;
use crate::request::EngineSessionName;
use llmctl_models::kv::{PageTable, TokenBuf, Tokens};

pub use checkout::CheckedOut;
pub use stepwise::DecodeOutcome;
pub use stop::StopHandle;
pub use table::SessionTable;

/// Identifier of a session within one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u64);

/// Sequence of one session, and what is known of it while its pages are elsewhere.
#[derive(Debug)]
pub struct Session {
    /// Empty while a request has checked it out.
    sequence: Sequence,
    stop: StopHandle,
    state: SessionState,
    /// Tokens whose pages were evicted. Non-empty only while `sequence` is empty.
    evicted: TokenBuf,
    /// Set when a step failed under the last request.
    dirty: bool,
    /// Value of the table's clock at the last use.
    last_used: u64,
    /// `None` if the session was used after the last call of `expire`.
    idle_since: Option<Instant>,
}

/// State of a named session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    Idle,
    /// Its request waits for admission.
    Waiting,
    Running,
}

/// Description of a named session, for listings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub name: EngineSessionName,
    pub state: SessionState,
    pub num_tokens: usize,
    /// Tokens with KV in memory: all of them, or 0 after the pages were evicted.
    pub num_resident: usize,
}

impl Session {
    fn new(sequence: Sequence) -> Self {
        Self {
            sequence,
            stop: StopHandle::default(),
            state: SessionState::Idle,
            evicted: TokenBuf::default(),
            dirty: false,
            last_used: 0,
            idle_since: None,
        }
    }

    /// Returns the page table of its rows; empty while a request has checked them out.
    pub fn table(&self) -> &PageTable {
        self.sequence.resident().table()
    }

    pub fn state(&self) -> SessionState {
        self.state
    }

    fn is_idle(&self) -> bool {
        self.state == SessionState::Idle
    }

    /// Returns all tokens of the session, resident or evicted; empty while a request has checked them out.
    pub fn known_tokens(&self) -> &[u32] {
        if self.position() > 0 { self.tokens() } else { &self.evicted.ids }
    }

    /// Replaces the content by `tokens`, without KV, as if the pages had been evicted.
    pub fn remember(&mut self, tokens: TokenBuf) {
        self.reset();
        self.evicted = tokens;
    }

    /// Frees the pages and keeps the tokens.
    fn evict(&mut self) {
        self.evicted = self.content().into();
        self.sequence.reset();
    }

    /// Returns the number of resident tokens.
    pub fn position(&self) -> usize {
        self.sequence.position()
    }

    /// Returns the resident tokens.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.resident().tokens()
    }

    /// Returns the resident tokens with the images among them.
    pub fn content(&self) -> Tokens<'_> {
        self.sequence.resident().content()
    }

    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Empties the session. Legal in every state.
    pub fn reset(&mut self) {
        self.sequence.reset();
        self.stop.clear();
        self.evicted = TokenBuf::default();
        self.dirty = false;
    }
}
