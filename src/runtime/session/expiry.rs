//! Idle named sessions give their memory back after a time. They keep their tokens, as under pressure.
//!
//! The table knows no clock: a session that has been used counts as idle from the next time that it is told what time it is.

use std::time::{Duration, Instant};

use super::{Session, SessionState, SessionTable};

impl SessionTable {
    /// Evicts the named sessions that have been idle for `ttl` and more.
    pub fn expire(&mut self, now: Instant, ttl: Duration) {
        for id in self.names.values() {
            let Some(session) = self.sessions.get_mut(id).filter(|session| session.can_expire()) else {
                continue;
            };
            let since = *session.idle_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= ttl {
                session.evict();
            }
        }
    }

    /// When `expire` has something to do next: at once, if a session has been used since the last time.
    pub fn next_expiry(&self, ttl: Duration) -> Option<Instant> {
        let named = self.names.values().filter_map(|id| self.sessions.get(id));
        let expiry = |session: &Session| match session.idle_since {
            Some(since) => since.checked_add(ttl), // nothing: later than time can tell
            None => Some(Instant::now()),
        };
        named.filter(|session| session.can_expire()).filter_map(expiry).min()
    }
}

impl Session {
    fn can_expire(&self) -> bool {
        self.state == SessionState::Idle && self.position() > 0
    }
}
