//! Idle named sessions give their slots and their memory back after a time. Whoever knows what one held can bring it back.
//!
//! The table knows no clock: a session that has been used counts as idle from the next time that it is told what time it is.

use std::time::{Duration, Instant};

use super::{Session, SessionId, SessionTable};

impl SessionTable {
    /// Removes the named sessions that have been idle for `ttl` and more.
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

    /// When `expire` has something to do next: at once, if a session has been used since the last time.
    pub fn next_expiry(&self, ttl: Duration) -> Option<Instant> {
        let named = self.names.values().filter_map(|id| self.sessions.get(id));
        let expiry = |session: &Session| match session.idle_since {
            Some(since) => since.checked_add(ttl), // nothing: later than time can tell
            None => Some(Instant::now()),
        };
        named.filter(|session| session.is_idle()).filter_map(expiry).min()
    }
}
