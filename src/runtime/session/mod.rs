//! Sessions: sequences that outlive a request. Unnamed ones are driven token by token (`prefill`, `decode_one`, `seek`,
//! `reset`); named ones lend their sequence to one request at a time and, while idle, may lose their pages, and their slot
//! to another.
//!
//! Invariants: a call that is refused leaves the session untouched; one that fails after it began poisons it until
//! `reset`. A token that ends the generation is returned but never resident. `stop` takes effect at a token boundary and
//! lasts until the next `prefill` or `reset`. Knows no request, queue or thread; [`SessionTable`] counts, and the engine
//! decides who is admitted.

pub mod difference;
mod expiry;
pub mod prefill;
pub mod store;
pub mod transcript;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::kv::{PAGE_TOKENS, PagePool, PageTable};
use super::request::{Difference, Reuse, Sampling, validate_prompt};
use super::sample::draw_seed;
use super::sequence::{Resumed, Sequence, TurnStart};
use super::spec::EngineSpec;
use super::step::{Executor, FeedInput, SequenceFeed};
use super::text::Vocabulary;
use prefill::{Known, PrefillPlan, common_prefix, plan_prefill};

/// Names a session of one engine; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u64);

/// Asks a generation to stop at the next token boundary; clones share the wish, from any thread.
#[derive(Clone, Default)]
pub struct StopHandle(Arc<StopState>);

#[derive(Default)]
struct StopState {
    is_stopped: AtomicBool,
    /// Told of the wish, where the generation runs elsewhere and does not see it.
    callback: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl StopHandle {
    pub fn stop(&self) {
        let is_news = !self.0.is_stopped.swap(true, Ordering::SeqCst);
        if let Some(callback) = self.0.callback.get().filter(|_| is_news) {
            callback();
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.0.is_stopped.load(Ordering::SeqCst)
    }

    /// Calls `callback` when it is stopped; at once when it is already. Only the first herald counts, and it may be called twice.
    pub fn on_stop(&self, callback: impl Fn() + Send + Sync + 'static) {
        let callback = self.0.callback.get_or_init(|| Box::new(callback));
        if self.is_stopped() {
            callback();
        }
    }

    fn clear(&self) {
        self.0.is_stopped.store(false, Ordering::SeqCst);
    }
}

impl fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopHandle").field(&self.is_stopped()).finish()
    }
}

/// What one decode step gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodeOutcome {
    /// A token, resident now. `piece` may be part of a character, and is empty for control tokens.
    Token { id: u32, piece: Vec<u8> },
    /// A token that ends the generation: not forwarded, not resident.
    Eos { id: u32 },
    /// The session was asked to stop: no token, the position has not moved.
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

    /// Whether the decode loop ends here: end of generation, or stopped.
    pub fn is_terminal(&self) -> bool {
        !matches!(self, DecodeOutcome::Token { .. })
    }
}

/// One conversation's state.
#[derive(Debug)]
pub struct Session {
    /// Lent out while a request runs in it, with an empty one in its place.
    sequence: Sequence,
    stop: StopHandle,
    state: SessionState,
    /// Tokens whose pages have been given to others; then the sequence is empty.
    evicted: Vec<u32>,
    /// A step failed under the last request.
    dirty: bool,
    last_used: u64,
    /// Nothing when it has been used since the time was last told.
    idle_since: Option<Instant>,
}

/// What a named session is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    Idle,
    /// Its request waits for admission.
    Waiting,
    Running,
}

/// A named session as others see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub name: String,
    pub state: SessionState,
    pub num_tokens: usize,
    /// Tokens whose KV is there: all of them, or none after the pages were given to others.
    pub num_resident: usize,
}

/// What a session brings to a request.
#[derive(Debug)]
pub struct CheckedOut {
    sequence: Sequence,
    evicted: Vec<u32>,
    dirty: bool,
}

impl CheckedOut {
    /// For a request without a session.
    pub fn nothing(pool: &PagePool) -> Self {
        Self { sequence: Sequence::new(pool), evicted: Vec::new(), dirty: false }
    }

    /// A sequence that holds as much of the prompt as is to be had, from the session's rows or from indexed pages; of
    /// those, all beyond the first `without_disk` tokens came from disk, when that is given.
    pub fn resume(
        self,
        pool: &PagePool,
        spec: &EngineSpec,
        prompt: &[u32],
        without_disk: Option<usize>,
    ) -> Resumed {
        if !spec.config.warm_resume {
            let (sequence, reuse) = (Sequence::new(pool), Reuse::default());
            return Resumed { sequence, reuse, states_at: Vec::new(), difference: None };
        }
        let most = prompt.len() - 1;
        // State that cannot be cut back does not lie in pages alone.
        let indexable = if spec.model.can_rewind { prompt } else { &[] };
        let (indexed, num_known) = PageTable::from_index(pool, indexable, most);
        let num_resident = self.sequence.position();
        let own = self.sequence.resident().tokens();
        let tokens = if num_resident > 0 { own } else { &self.evicted };
        let known = Known {
            tokens,
            num_resident,
            num_kept: self.num_kept(spec, common_prefix(tokens, prompt).min(most)),
            num_indexed: indexed.len(),
            num_restored: without_disk.map_or(0, |without| indexed.len().saturating_sub(without)),
            dirty: self.dirty,
        };
        let plan = plan_prefill(known, prompt);
        let difference = Difference::between(tokens, prompt);
        let sequence = self.cut_to(plan, indexed, prompt);
        // Only for what needs states: a prompt's chunks end there, and the fewer there are the faster.
        let has_state = sequence.resident().table().has_state();
        let states_at = if has_state { states_at(num_known, most, plan.keep) } else { Vec::new() };
        Resumed { sequence, reuse: plan.reuse(), states_at, difference }
    }

    /// How many of the `common` tokens the session's rows can be cut back to.
    fn num_kept(&self, spec: &EngineSpec, common: usize) -> usize {
        let num_resident = self.sequence.position();
        match common.min(num_resident) {
            all if all == num_resident => all,
            part if spec.model.can_rewind => self.sequence.resident().resumable(part),
            _ => 0,
        }
    }

    fn cut_to(mut self, plan: PrefillPlan, mut indexed: PageTable, prompt: &[u32]) -> Sequence {
        if plan.from_index {
            debug_assert_eq!(indexed.len(), plan.keep, "no more was asked of the index than may be kept");
            indexed.truncate(prompt, plan.keep);
            return Sequence::resume(&prompt[..plan.keep], indexed);
        }
        if !self.sequence.truncate(plan.keep) {
            self.sequence.reset();
        }
        self.sequence
    }
}

/// Where recurrent layers leave states for later prompts: at the end of this prompt, which the next turn begins with, and
/// where it parts from what others have asked, which they had no state for.
fn states_at(num_known: usize, most: usize, keep: usize) -> Vec<usize> {
    let [branch, end] = [num_known, most].map(|len| len / PAGE_TOKENS * PAGE_TOKENS);
    let mut lens: Vec<usize> = [branch, end].into_iter().filter(|&len| len > keep).collect();
    lens.dedup();
    lens
}

impl Session {
    fn new(sequence: Sequence) -> Self {
        Self {
            sequence,
            stop: StopHandle::default(),
            state: SessionState::Idle,
            evicted: Vec::new(),
            dirty: false,
            last_used: 0,
            idle_since: None,
        }
    }

    /// The page table of its rows; empty while they are lent out.
    pub fn table(&self) -> &PageTable {
        self.sequence.resident().table()
    }

    pub fn state(&self) -> SessionState {
        self.state
    }

    fn is_idle(&self) -> bool {
        self.state == SessionState::Idle
    }

    /// All tokens it stands for, resident or not; empty while they are lent out.
    pub fn known_tokens(&self) -> &[u32] {
        if self.position() > 0 { self.tokens() } else { &self.evicted }
    }

    /// Stands for these tokens, as if its pages had been given to others.
    pub fn remember(&mut self, tokens: Vec<u32>) {
        self.reset();
        self.evicted = tokens;
    }

    /// Gives its pages to others and remembers its tokens.
    fn evict(&mut self) {
        self.evicted = self.sequence.resident().tokens().to_vec();
        self.sequence.reset();
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
        self.sequence.begin_turn(TurnStart { generated_from, seed, ..TurnStart::default() });
        let mut chunks = tokens.chunks(executor.spec().config.step_tokens).peekable();
        while let Some(chunk) = chunks.next() {
            let is_last = chunks.peek().is_none();
            let input = if is_last { FeedInput::LastChunk(chunk) } else { FeedInput::Chunk(chunk) };
            if let Err(error) = self.step(executor, input, sampling) {
                self.sequence.poison(); // also when an earlier chunk is all that has changed
                return Err(error);
            }
        }
        Ok(())
    }

    /// What `prefill` refuses, without doing anything.
    ///
    /// # Errors
    /// Those of `prefill` that leave the session untouched.
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

    /// Whether a token has been sampled that is not resident yet.
    pub fn has_pending(&self) -> bool {
        self.sequence.pending().is_some()
    }

    fn step(&mut self, executor: &mut Executor, input: FeedInput<'_>, sampling: &Sampling) -> Result<()> {
        let mut feeds =
            [SequenceFeed { sequence: &mut self.sequence, input, sampling, grammar: None, scores: None }];
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
        if !self.sequence.truncate(position) {
            return Err(Error::NotSupported(
                "rewinding to where a window or a recurrent state has left no trace",
            ));
        }
        Ok(())
    }

    /// Empties the session; legal in every state.
    pub fn reset(&mut self) {
        self.sequence.reset();
        self.stop.clear();
        self.evicted.clear();
        self.dirty = false;
    }

    fn check_healthy(&self) -> Result<()> {
        if self.sequence.is_poisoned() { Err(Error::Poisoned) } else { Ok(()) }
    }
}

/// The sessions of an engine.
#[derive(Debug, Default)]
pub struct SessionTable {
    sessions: BTreeMap<SessionId, Session>,
    /// Ids of the named ones.
    names: BTreeMap<String, SessionId>,
    num_created: u64,
    clock: u64,
}

impl SessionTable {
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Sessions driven by hand: they keep their pages, named ones only while nobody else needs them.
    pub fn num_unnamed(&self) -> usize {
        self.sessions.len() - self.names.len()
    }

    /// Page tables of all sessions.
    pub fn tables(&self) -> impl Iterator<Item = &PageTable> {
        self.sessions.values().map(Session::table)
    }

    /// An unnamed session that holds `sequence`.
    pub fn create(&mut self, sequence: Sequence) -> SessionId {
        self.num_created += 1;
        let id = SessionId(self.num_created);
        self.sessions.insert(id, Session::new(sequence));
        id
    }

    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get(&self, id: SessionId) -> Result<&Session> {
        self.sessions.get(&id).ok_or_else(|| Error::SessionNotFound(id.0.to_string()))
    }

    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get_mut(&mut self, id: SessionId) -> Result<&mut Session> {
        self.sessions.get_mut(&id).ok_or_else(|| Error::SessionNotFound(id.0.to_string()))
    }

    /// Frees the session's pages and place; false when there is none of that id.
    pub fn remove(&mut self, id: SessionId) -> bool {
        self.names.retain(|_, named| *named != id);
        self.sessions.remove(&id).is_some()
    }
}

/// Named sessions.
impl SessionTable {
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn find(&self, name: &str) -> Result<SessionId> {
        self.names.get(name).copied().ok_or_else(|| Error::SessionNotFound(name.to_owned()))
    }

    /// The session of that name when no request is in it.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn find_idle(&self, name: &str) -> Result<SessionId> {
        let id = self.find(name)?;
        match self.get(id)?.state {
            SessionState::Idle => Ok(id),
            SessionState::Waiting | SessionState::Running => Err(Error::SessionBusy(name.to_owned())),
        }
    }

    /// A named session that holds what `original` does, or nothing. The name must be free.
    pub fn open(&mut self, name: &str, original: Option<SessionId>, pool: &PagePool) -> Result<()> {
        let mut session = Session::new(Sequence::new(pool));
        if let Some(original) = original {
            let original = self.get(original)?;
            session.sequence = original.sequence.fork();
            session.evicted.clone_from(&original.evicted);
            session.dirty = original.dirty;
        }
        let id = self.create(Sequence::new(pool));
        self.sessions.insert(id, session);
        self.names.insert(name.to_owned(), id);
        self.touch(id);
        Ok(())
    }

    /// A request waits for this idle session, or does not any more. Unknown names change nothing, here and below: a
    /// session with a request in it cannot be closed.
    pub fn set_waiting(&mut self, name: &str, waiting: bool) {
        if let Some(session) = self.named_mut(name) {
            session.state = if waiting { SessionState::Waiting } else { SessionState::Idle };
        }
    }

    /// Hands the session's rows to the request that starts in it.
    pub fn check_out(&mut self, name: &str, pool: &PagePool) -> CheckedOut {
        let mut checked_out = CheckedOut::nothing(pool);
        if let Some(session) = self.named_mut(name) {
            session.state = SessionState::Running;
            std::mem::swap(&mut checked_out.sequence, &mut session.sequence);
            checked_out.evicted.clone_from(&session.evicted);
            checked_out.dirty = std::mem::take(&mut session.dirty);
        }
        checked_out
    }

    /// Takes back what the request left. After a failed step that is nothing; a request that was stopped before it had computed
    /// again what had been given to others leaves the session as it was.
    pub fn check_in(&mut self, name: &str, mut sequence: Sequence) {
        let Ok(id) = self.find(name) else { return };
        self.touch(id);
        if let Some(session) = self.named_mut(name) {
            session.state = SessionState::Idle;
            session.dirty = sequence.is_poisoned();
            let tokens = sequence.resident().tokens();
            let stopped_short = tokens.len() < session.evicted.len() && session.evicted.starts_with(tokens);
            if session.dirty || !stopped_short {
                session.evicted.clear();
            }
            // What is resident of tokens that it still stands for is found in the index.
            if session.dirty || stopped_short {
                sequence.reset();
            }
            session.sequence = sequence;
        }
    }

    /// Takes the pages of the named session used longest ago, those that a request waits for last; false when none has any.
    pub fn evict_oldest(&mut self) -> bool {
        let named = self.names.values().filter_map(|id| Some((*id, self.sessions.get(id)?)));
        let holding = named.filter(|(_, session)| session.position() > 0);
        let oldest = holding.min_by_key(|(_, session)| (session.state, session.last_used));
        let Some(id) = oldest.map(|(id, _)| id) else { return false };
        self.sessions.get_mut(&id).map(Session::evict).is_some()
    }

    /// Removes the idle named session used longest ago, `kept` excepted; false when there is none.
    pub fn remove_oldest(&mut self, kept: Option<SessionId>) -> bool {
        let named = self.names.values().filter_map(|id| Some((*id, self.sessions.get(id)?)));
        let idle = named.filter(|(id, session)| session.is_idle() && Some(*id) != kept);
        let oldest = idle.min_by_key(|(_, session)| session.last_used).map(|(id, _)| id);
        oldest.is_some_and(|id| self.remove(id))
    }

    fn named_mut(&mut self, name: &str) -> Option<&mut Session> {
        self.sessions.get_mut(self.names.get(name)?)
    }

    fn touch(&mut self, id: SessionId) {
        self.clock += 1;
        if let Some(session) = self.sessions.get_mut(&id) {
            session.last_used = self.clock;
            session.idle_since = None;
        }
    }
}
