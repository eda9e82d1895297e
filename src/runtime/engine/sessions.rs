//! Operations on the engine's sessions: step-wise ones token by token, named ones between requests.
//!
//! Invariants: a session with a request in it is not changed from here. A refused call changes nothing. A new
//! named session takes the slot of the least recently used idle one, which the engine then forgets.

use serde::{Deserialize, Serialize};

use super::Engine;
use crate::request::EngineSessionName;
use crate::sequence::Sequence;
use crate::session::{DecodeOutcome, SessionId, SessionInfo, SessionState, StopHandle};
use llmctl_base::Sampling;
use llmctl_base::error::{Error, Result};
use llmctl_models::adapters::by_default;
use llmctl_models::kv::TokenBuf;

/// A named session with its tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDetail {
    #[serde(flatten)]
    pub info: SessionInfo,
    /// Prompt and generated tokens, without the end-of-generation token.
    pub tokens: Vec<u32>,
}

/// Named sessions. At most one request uses a session at a time.
impl Engine {
    /// Finds or creates the session of a request. Returns true if it was created.
    pub(super) fn enter_session(&mut self, name: &EngineSessionName) -> Result<bool> {
        let begins = match self.sessions.find_idle(name) {
            Ok(_) => false,
            Err(Error::SessionNotFound(_)) => {
                self.make_place(None)?;
                self.sessions.open(name, None, &self.pool)?;
                true
            }
            Err(busy) => return Err(busy),
        };
        self.sessions.set_waiting(name, true);
        Ok(begins)
    }

    /// Frees a slot if all are taken, by removing the least recently used idle named session other than
    /// `kept`. Its full pages stay in the index until they are reclaimed.
    ///
    /// # Errors
    /// [`Error::SessionsFull`] if every slot is step-wise or has a request.
    fn make_place(&mut self, kept: Option<SessionId>) -> Result<()> {
        let capacity = self.spec().config.max_sessions;
        if self.sessions.len() < capacity || (capacity > 0 && self.sessions.remove_oldest(kept)) {
            return Ok(());
        }
        Err(Error::SessionsFull { capacity })
    }

    /// Lists all named sessions in order of name.
    pub fn list_sessions(&self) -> Vec<SessionInfo> {
        self.sessions.names().filter_map(|name| self.look_at(name).ok()).map(|(info, _)| info).collect()
    }

    /// Returns a session with its tokens.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        let (info, tokens) = self.look_at(name)?;
        Ok(SessionDetail { info, tokens: tokens.to_vec() })
    }

    /// Returns a session's description and its tokens.
    fn look_at(&self, name: &EngineSessionName) -> Result<(SessionInfo, &[u32])> {
        let session = self.sessions.get(self.sessions.find(name)?)?;
        let running = self.running.iter().find(|generation| generation.session() == Some(name));
        let (tokens, num_resident) = match (session.state(), running) {
            (SessionState::Running, Some(generation)) => {
                let sequence = generation.sequence();
                (sequence.resident().tokens(), sequence.position())
            }
            _ => (session.known_tokens(), session.position()),
        };
        let info = SessionInfo {
            name: name.clone(),
            state: session.state(),
            num_tokens: tokens.len(),
            num_resident,
        };
        Ok((info, tokens))
    }

    /// Creates a session with `tokens` and without KV in memory, e.g. one that an earlier process saved.
    ///
    /// # Errors
    /// [`Error::SessionsFull`]; [`Error::InvalidParameter`] if the name is in use.
    pub fn restore_session(&mut self, name: &EngineSessionName, tokens: impl Into<TokenBuf>) -> Result<()> {
        self.check_new_name(name)?;
        self.make_place(None)?;
        self.sessions.open(name, None, &self.pool)?;
        let id = self.sessions.find(name)?;
        self.sessions.get_mut(id)?.remember(tokens.into());
        Ok(())
    }

    fn check_new_name(&self, name: &EngineSessionName) -> Result<()> {
        if self.sessions.find(name).is_ok() {
            let message = format!("a new session needs a new name, not {:?}", name.as_str());
            return Err(Error::InvalidParameter { name: "session", message });
        }
        Ok(())
    }

    /// Empties a session, which stays open.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn reset_session(&mut self, name: &EngineSessionName) -> Result<()> {
        let id = self.sessions.find_idle(name)?;
        self.reset(id)
    }

    /// Removes a session and frees its slot. Its full pages stay in the index until they are reclaimed.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn close_session(&mut self, name: &EngineSessionName) -> Result<()> {
        let id = self.sessions.find_idle(name)?;
        self.sessions.remove(id);
        Ok(())
    }

    /// Creates session `to` with the content of `from`. They share pages up to where they part.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] and [`Error::SessionBusy`] for `from`; [`Error::SessionsFull`];
    /// [`Error::InvalidParameter`] if `to` exists; [`Error::NotSupported`] if the
    /// model keeps state outside pages.
    pub fn fork_session(&mut self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        let original = self.sessions.find_idle(from)?;
        self.check_new_name(to)?;
        self.check_fork()?;
        self.make_place(Some(original))?;
        self.sessions.open(to, Some(original), &self.pool)
    }

    fn check_fork(&self) -> Result<()> {
        match self.spec().model.can_rewind {
            true => Ok(()),
            false => Err(Error::NotSupported("forking a session")),
        }
    }
}

/// Step-wise sessions, driven token by token; [`crate::runtime::session`] has the contract of each call.
impl Engine {
    /// Creates a step-wise session.
    ///
    /// # Errors
    /// [`Error::SessionsFull`] at [`Engine::serving_capacity`], or while requests in flight need the memory.
    pub fn create_session(&mut self) -> Result<SessionId> {
        let requested = self.running_bytes().max(self.largest_waiting());
        let per_context = self.spec().sequence_bytes(self.spec().context_length());
        let needed = self.session_bytes() + per_context + requested;
        if needed > self.pool.capacity() {
            return Err(Error::SessionsFull { capacity: self.serving_capacity().sessions });
        }
        self.make_place(None)?;
        let mut sequence = Sequence::new(&self.pool);
        sequence.adapt(&by_default(&self.spec().model.adapters));
        Ok(self.sessions.create(sequence))
    }

    /// Appends a prompt and samples the next token.
    ///
    /// # Errors
    /// Those of [`crate::runtime::session::Session::prefill`], and [`Error::SessionNotFound`].
    pub fn prefill_tokens(&mut self, id: SessionId, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        let session = self.sessions.get(id)?;
        session.check_prefill(self.spec(), tokens, sampling)?; // a refused call must not evict pages
        self.make_room(session.table().bytes_needed(tokens.len()));
        self.sessions.get_mut(id)?.prefill(&mut self.executor, tokens, sampling)
    }

    /// Generates one token.
    ///
    /// # Errors
    /// Those of [`crate::runtime::session::Session::decode_one`], and [`Error::SessionNotFound`].
    pub fn decode_one(&mut self, id: SessionId, sampling: &Sampling) -> Result<DecodeOutcome> {
        let session = self.sessions.get(id)?;
        if session.has_pending() {
            self.make_room(session.table().bytes_needed(1));
        }
        self.sessions.get_mut(id)?.decode_one(&mut self.executor, &*self.vocabulary, sampling)
    }

    /// Returns the number of resident tokens.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn position(&self, id: SessionId) -> Result<usize> {
        Ok(self.sessions.get(id)?.position())
    }

    /// Returns the resident tokens.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn session_tokens(&self, id: SessionId) -> Result<&[u32]> {
        Ok(self.sessions.get(id)?.tokens())
    }

    /// Rewinds to `position` tokens.
    ///
    /// # Errors
    /// Those of [`crate::runtime::session::Session::seek`], and [`Error::SessionNotFound`].
    pub fn seek(&mut self, id: SessionId, position: usize) -> Result<()> {
        self.sessions.get_mut(id)?.seek(self.executor.spec(), position)
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn reset(&mut self, id: SessionId) -> Result<()> {
        self.sessions.get_mut(id)?.reset();
        Ok(())
    }

    /// Returns the session's stop flag, for any thread.
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
