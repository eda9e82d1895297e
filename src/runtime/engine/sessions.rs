//! What can be asked of the engine's sessions: unnamed ones token by token, named ones between their requests.
//!
//! Invariants: a session that a request is in is not touched from here; a refused call changes nothing. Slots are no
//! limit for names: a new session takes the slot of the idle one used longest ago, which is then not known any more.

use serde::{Deserialize, Serialize};

use super::Engine;
use crate::runtime::error::{Error, Result};
use crate::runtime::request::Sampling;
use crate::runtime::sequence::Sequence;
use crate::runtime::session::{DecodeOutcome, SessionId, SessionInfo, SessionState, StopHandle};

/// A named session with its tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionDetail {
    #[serde(flatten)]
    pub info: SessionInfo,
    /// Prompt and generated tokens, an end of generation excluded.
    pub tokens: Vec<u32>,
}

/// Named sessions: a request begins them, and keeps them to itself while it lasts.
impl Engine {
    /// Finds or begins the session of a request; true when it begins with it.
    pub(super) fn enter_session(&mut self, name: &str) -> Result<bool> {
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

    /// Sees to a slot for one more session. Where all are taken, the idle named session used longest ago goes, `kept`
    /// excepted; its full pages stay findable until they are reused.
    ///
    /// # Errors
    /// [`Error::SessionsFull`] when every slot has a request in it or is driven by hand.
    fn make_place(&mut self, kept: Option<SessionId>) -> Result<()> {
        let capacity = self.spec().config.max_sessions;
        if self.sessions.len() < capacity || (capacity > 0 && self.sessions.remove_oldest(kept)) {
            return Ok(());
        }
        Err(Error::SessionsFull { capacity })
    }

    /// All named sessions, by name.
    pub fn list_sessions(&self) -> Vec<SessionInfo> {
        self.sessions.names().filter_map(|name| self.look_at(name).ok()).map(|(info, _)| info).collect()
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn inspect_session(&self, name: &str) -> Result<SessionDetail> {
        let (info, tokens) = self.look_at(name)?;
        Ok(SessionDetail { info, tokens: tokens.to_vec() })
    }

    /// A session and its tokens.
    fn look_at(&self, name: &str) -> Result<(SessionInfo, &[u32])> {
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
            name: name.to_owned(),
            state: session.state(),
            num_tokens: tokens.len(),
            num_resident,
        };
        Ok((info, tokens))
    }

    /// Begins a session that stands for `tokens`, of which nothing is in memory: one that another process has kept.
    ///
    /// # Errors
    /// [`Error::SessionsFull`]; [`Error::InvalidParameter`] when there is one of that name.
    pub fn restore_session(&mut self, name: &str, tokens: Vec<u32>) -> Result<()> {
        self.check_new_name(name)?;
        self.make_place(None)?;
        self.sessions.open(name, None, &self.pool)?;
        let id = self.sessions.find(name)?;
        self.sessions.get_mut(id)?.remember(tokens);
        Ok(())
    }

    fn check_new_name(&self, name: &str) -> Result<()> {
        if name.is_empty() || self.sessions.find(name).is_ok() {
            let message = format!("a new session needs a new name, not {name:?}");
            return Err(Error::InvalidParameter { name: "session", message });
        }
        Ok(())
    }

    /// Empties a session; it stays open.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn reset_session(&mut self, name: &str) -> Result<()> {
        let id = self.sessions.find_idle(name)?;
        self.reset(id)
    }

    /// Ends a session and frees its place. Its full pages stay findable until they are reused.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn close_session(&mut self, name: &str) -> Result<()> {
        let id = self.sessions.find_idle(name)?;
        self.sessions.remove(id);
        Ok(())
    }

    /// Begins session `to` with all that `from` holds; their pages are shared until they part.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] and [`Error::SessionBusy`] for `from`; [`Error::SessionsFull`];
    /// [`Error::InvalidParameter`] when `to` exists or is no name; [`Error::NotSupported`] when the model's state does not
    /// lie in pages alone.
    pub fn fork_session(&mut self, from: &str, to: &str) -> Result<()> {
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

/// Sessions driven directly, token by token; see [`crate::runtime::session`] for the contract of each call.
impl Engine {
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
        Ok(self.sessions.create(Sequence::new(&self.pool)))
    }

    /// # Errors
    /// Those of [`crate::runtime::session::Session::prefill`], and [`Error::SessionNotFound`].
    pub fn prefill_tokens(&mut self, id: SessionId, tokens: &[u32], sampling: &Sampling) -> Result<()> {
        let session = self.sessions.get(id)?;
        session.check_prefill(self.spec(), tokens, sampling)?; // a refused call takes no one's pages
        self.make_room(session.table().bytes_needed(tokens.len()));
        self.sessions.get_mut(id)?.prefill(&mut self.executor, tokens, sampling)
    }

    /// # Errors
    /// Those of [`crate::runtime::session::Session::decode_one`], and [`Error::SessionNotFound`].
    pub fn decode_one(&mut self, id: SessionId, sampling: &Sampling) -> Result<DecodeOutcome> {
        let session = self.sessions.get(id)?;
        if session.has_pending() {
            self.make_room(session.table().bytes_needed(1));
        }
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
