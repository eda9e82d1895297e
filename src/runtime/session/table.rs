//! All sessions of an engine, by id and by name, and when idle ones give their pages or their slots away.
//!
//! Invariants: a session with a request in it is never removed or evicted from here. The table reads no
//! clock: a session that was used counts as idle from the next `expire` on. It only counts; the engine
//! decides which request is admitted.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::checkout::CheckedOut;
use super::{Session, SessionId, SessionState};
use crate::request::EngineSessionName;
use crate::sequence::Sequence;
use llmctl_base::error::{Error, Result};
use llmctl_models::kv::{PagePool, PageTable, TokenBuf};

/// The sessions of an engine.
#[derive(Debug, Default)]
pub struct SessionTable {
    sessions: BTreeMap<SessionId, Session>,
    /// Ids of the named sessions.
    names: BTreeMap<EngineSessionName, SessionId>,
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

    /// Returns the number of step-wise sessions, which keep their pages. Named ones keep them only until they
    /// are needed.
    pub fn num_unnamed(&self) -> usize {
        self.sessions.len() - self.names.len()
    }

    /// Returns the page tables of all sessions.
    pub fn tables(&self) -> impl Iterator<Item = &PageTable> {
        self.sessions.values().map(Session::table)
    }

    /// Creates an unnamed session that holds `sequence`.
    pub fn create(&mut self, sequence: Sequence) -> SessionId {
        self.num_created += 1;
        let id = SessionId(self.num_created);
        self.sessions.insert(id, Session::new(sequence));
        id
    }

    /// Returns a session.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get(&self, id: SessionId) -> Result<&Session> {
        self.sessions.get(&id).ok_or_else(|| Error::SessionNotFound(id.0.to_string()))
    }

    /// Returns a session for changes.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] after `remove`.
    pub fn get_mut(&mut self, id: SessionId) -> Result<&mut Session> {
        self.sessions.get_mut(&id).ok_or_else(|| Error::SessionNotFound(id.0.to_string()))
    }

    /// Removes a session and frees its pages. Returns false if there is none of that id.
    pub fn remove(&mut self, id: SessionId) -> bool {
        self.names.retain(|_, named| *named != id);
        self.sessions.remove(&id).is_some()
    }
}

/// Named sessions.
impl SessionTable {
    pub fn names(&self) -> impl Iterator<Item = &EngineSessionName> {
        self.names.keys()
    }

    /// Returns the id of a named session.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn find(&self, name: &EngineSessionName) -> Result<SessionId> {
        self.names.get(name).copied().ok_or_else(|| Error::SessionNotFound(name.to_string()))
    }

    /// Returns the id of a named session that has no request.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn find_idle(&self, name: &EngineSessionName) -> Result<SessionId> {
        let id = self.find(name)?;
        match self.get(id)?.state {
            SessionState::Idle => Ok(id),
            SessionState::Waiting | SessionState::Running => Err(Error::SessionBusy(name.to_string())),
        }
    }

    /// Creates a named session, a copy of `original` if given. The name must be free.
    pub fn open(
        &mut self,
        name: &EngineSessionName,
        original: Option<SessionId>,
        pool: &PagePool,
    ) -> Result<()> {
        let mut session = Session::new(Sequence::new(pool));
        if let Some(original) = original {
            let original = self.get(original)?;
            session.sequence = original.sequence.fork();
            session.evicted.clone_from(&original.evicted);
            session.dirty = original.dirty;
        }
        let id = self.create(Sequence::new(pool));
        self.sessions.insert(id, session);
        self.names.insert(name.clone(), id);
        self.touch(id);
        Ok(())
    }

    /// Sets whether a request waits for the session. Here and below, unknown names change nothing: a session
    /// with a request in it cannot be closed.
    pub fn set_waiting(&mut self, name: &EngineSessionName, waiting: bool) {
        if let Some(session) = self.named_mut(name) {
            session.state = if waiting { SessionState::Waiting } else { SessionState::Idle };
        }
    }

    /// Hands the session's sequence to the request that starts in it.
    pub fn check_out(&mut self, name: &EngineSessionName, pool: &PagePool) -> CheckedOut {
        let mut checked_out = CheckedOut::nothing(pool);
        if let Some(session) = self.named_mut(name) {
            session.state = SessionState::Running;
            std::mem::swap(&mut checked_out.sequence, &mut session.sequence);
            checked_out.evicted.clone_from(&session.evicted);
            checked_out.dirty = std::mem::take(&mut session.dirty);
        }
        checked_out
    }

    /// Takes the sequence back from an ended request. A poisoned one is emptied. If the request stopped
    /// before it had recomputed the evicted tokens, the session stays evicted.
    pub fn check_in(&mut self, name: &EngineSessionName, mut sequence: Sequence) {
        let Ok(id) = self.find(name) else { return };
        self.touch(id);
        if let Some(session) = self.named_mut(name) {
            session.state = SessionState::Idle;
            session.dirty = sequence.is_poisoned();
            let (tokens, evicted) = (sequence.resident().content(), session.evicted.as_tokens());
            let stopped_short = tokens.len() < evicted.len() && tokens.common_prefix(evicted) == tokens.len();
            if session.dirty || !stopped_short {
                session.evicted = TokenBuf::default();
            }
            // Resident pages of evicted tokens stay findable in the index.
            if session.dirty || stopped_short {
                sequence.reset();
            }
            session.sequence = sequence;
        }
    }

    /// Evicts the least recently used named session, sessions with a waiting request last. Returns false if
    /// none holds pages.
    pub fn evict_oldest(&mut self) -> bool {
        let named = self.names.values().filter_map(|id| Some((*id, self.sessions.get(id)?)));
        let holding = named.filter(|(_, session)| session.position() > 0);
        let oldest = holding.min_by_key(|(_, session)| (session.state, session.last_used));
        let Some(id) = oldest.map(|(id, _)| id) else { return false };
        self.sessions.get_mut(&id).map(Session::evict).is_some()
    }

    /// Removes the least recently used idle named session other than `kept`. Returns false if there is none.
    pub fn remove_oldest(&mut self, kept: Option<SessionId>) -> bool {
        let named = self.names.values().filter_map(|id| Some((*id, self.sessions.get(id)?)));
        let idle = named.filter(|(id, session)| session.is_idle() && Some(*id) != kept);
        let oldest = idle.min_by_key(|(_, session)| session.last_used).map(|(id, _)| id);
        oldest.is_some_and(|id| self.remove(id))
    }

    fn named_mut(&mut self, name: &EngineSessionName) -> Option<&mut Session> {
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

/// Expiry: idle named sessions give their slots and memory back after a time.
impl SessionTable {
    /// Removes named sessions that have been idle for at least `ttl`.
    pub fn expire(&mut self, now: Instant, ttl: Duration) {
        let ids: Vec<SessionId> = self.names.values().copied().collect();
        for id in ids {
            let Some(session) = self.sessions.get_mut(&id).filter(|session| session.is_idle()) else {
                continue;
            };
            let since = *session.idle_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= ttl {
                self.remove(id);
            }
        }
    }

    /// Returns when `expire` has work next: at once if a session was used after its last call.
    pub fn next_expiry(&self, ttl: Duration) -> Option<Instant> {
        let named = self.names.values().filter_map(|id| self.sessions.get(id));
        let expiry = |session: &Session| match session.idle_since {
            Some(since) => since.checked_add(ttl), // `None`: beyond the clock's range
            None => Some(Instant::now()),
        };
        named.filter(|session| session.is_idle()).filter_map(expiry).min()
    }
}
