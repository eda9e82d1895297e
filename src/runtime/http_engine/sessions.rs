//! Named sessions of remote engines: their tokens, by which differences are explained. The KV is where the
//! engine is.
//!
//! Invariants: at most one request uses a session; a new session takes the place of the idle one used longest
//! ago.

use std::collections::BTreeMap;

use crate::engine::{SessionDetail, SessionInfo, SessionState};
use crate::request::EngineSessionName;
use llmctl_base::error::{Error, Result};

/// All sessions of one client of remote engines.
#[derive(Debug)]
pub struct RemoteSessions {
    capacity: usize,
    by_name: BTreeMap<EngineSessionName, RemoteSession>,
    num_uses: u64,
}

#[derive(Debug, Default, Clone)]
struct RemoteSession {
    tokens: Vec<u32>,
    is_running: bool,
    last_use: u64,
}

impl RemoteSessions {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, by_name: BTreeMap::new(), num_uses: 0 }
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Gives the session to a request, and returns its tokens; `None` if it is new.
    ///
    /// # Errors
    /// [`Error::SessionBusy`]; [`Error::SessionsFull`].
    pub fn enter(&mut self, name: &EngineSessionName) -> Result<Option<Vec<u32>>> {
        let known = match self.idle(name) {
            Ok(session) => Some(session.tokens.clone()),
            Err(Error::SessionNotFound(_)) => {
                self.add(name, Vec::new())?;
                None
            }
            Err(error) => return Err(error),
        };
        self.num_uses += 1;
        let session = self.by_name.get_mut(name).expect("found or added above");
        (session.is_running, session.last_use) = (true, self.num_uses);
        Ok(known)
    }

    /// Takes the session back with its new tokens; `None` leaves those that it had.
    pub fn leave(&mut self, name: &EngineSessionName, tokens: Option<Vec<u32>>) {
        let Some(session) = self.by_name.get_mut(name) else { return };
        session.is_running = false;
        session.tokens = tokens.unwrap_or(std::mem::take(&mut session.tokens));
    }

    /// Adds a session with these tokens.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the name is in use; [`Error::SessionsFull`].
    pub fn restore(&mut self, name: &EngineSessionName, tokens: Vec<u32>) -> Result<()> {
        if self.by_name.contains_key(name) {
            let message = format!("a new session needs a new name, not {:?}", name.as_str());
            return Err(Error::InvalidParameter { name: "session", message });
        }
        self.add(name, tokens)
    }

    /// Adds a copy of a session.
    ///
    /// # Errors
    /// Those of [`Self::restore`]; [`Error::SessionNotFound`] and [`Error::SessionBusy`] for `from`.
    pub fn fork(&mut self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        let tokens = self.idle(from)?.tokens.clone();
        self.restore(to, tokens)
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn reset(&mut self, name: &EngineSessionName) -> Result<()> {
        self.idle(name)?.tokens.clear();
        Ok(())
    }

    /// # Errors
    /// As [`Self::reset`].
    pub fn close(&mut self, name: &EngineSessionName) -> Result<()> {
        self.idle(name)?;
        self.by_name.remove(name);
        Ok(())
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn inspect(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        let session = self.by_name.get(name).ok_or_else(|| Error::SessionNotFound(name.to_string()))?;
        Ok(SessionDetail { info: session.info(name), tokens: session.tokens.clone() })
    }

    /// Lists all sessions in order of name.
    pub fn list(&self) -> Vec<SessionInfo> {
        self.by_name.iter().map(|(name, session)| session.info(name)).collect()
    }

    fn idle(&mut self, name: &EngineSessionName) -> Result<&mut RemoteSession> {
        match self.by_name.get_mut(name) {
            None => Err(Error::SessionNotFound(name.to_string())),
            Some(session) if session.is_running => Err(Error::SessionBusy(name.to_string())),
            Some(session) => Ok(session),
        }
    }

    fn add(&mut self, name: &EngineSessionName, tokens: Vec<u32>) -> Result<()> {
        if self.by_name.len() >= self.capacity {
            let idle = self.by_name.iter().filter(|(_, session)| !session.is_running);
            let oldest = idle.min_by_key(|(_, session)| session.last_use).map(|(name, _)| name.clone());
            let oldest = oldest.ok_or(Error::SessionsFull { capacity: self.capacity })?;
            self.by_name.remove(&oldest);
        }
        self.num_uses += 1;
        let session = RemoteSession { tokens, is_running: false, last_use: self.num_uses };
        self.by_name.insert(name.clone(), session);
        Ok(())
    }
}

impl RemoteSession {
    /// Describes the session. No token is resident here.
    fn info(&self, name: &EngineSessionName) -> SessionInfo {
        let state = if self.is_running { SessionState::Running } else { SessionState::Idle };
        SessionInfo { name: name.clone(), state, num_tokens: self.tokens.len(), num_resident: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> EngineSessionName {
        EngineSessionName::parse(text).expect("a name")
    }

    #[test]
    fn the_session_used_longest_ago_makes_place() {
        let mut sessions = RemoteSessions::new(2);
        sessions.restore(&name("a"), vec![1]).expect("room");
        assert_eq!(sessions.enter(&name("b")).expect("room"), None);
        assert!(matches!(sessions.enter(&name("b")), Err(Error::SessionBusy(_))));
        assert_eq!(sessions.enter(&name("a")).expect("known"), Some(vec![1]));
        assert!(matches!(sessions.enter(&name("c")), Err(Error::SessionsFull { capacity: 2 })));
        sessions.leave(&name("b"), Some(vec![5, 6]));
        sessions.leave(&name("a"), None);
        assert_eq!(sessions.inspect(&name("b")).expect("known").tokens, [5, 6]);
        sessions.enter(&name("c")).expect("b makes place");
        assert!(matches!(sessions.inspect(&name("b")), Err(Error::SessionNotFound(_))));
        assert_eq!(sessions.inspect(&name("a")).expect("known").tokens, [1], "a failed turn changes nothing");
    }
}
