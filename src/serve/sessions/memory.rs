//! Conversations without a store: they end with the server, and are otherwise what they are on disk.
//!
//! Invariants: one that is open is busy for others and read as it was before; there is an end to how many
//! there are.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::SessionKey;
use crate::gate::owner::Owner;
use llmctl_base::{Error, Result};
use llmctl_engine::session::store::{
    BranchReason, Listed, ModelFingerprint, SavedSession, SessionName, SessionSummary, name_taken,
    not_a_branch, now_ms,
};
use llmctl_engine::turn::SessionChat;

/// Conversations at the same time: nothing takes them out of memory but their removal.
const MAX_CONVERSATIONS: usize = 10_000;

/// Leaves room for a branch's number in the longest name.
const MAX_BASE_BYTES: usize = 120;

#[derive(Debug, Default)]
pub struct MemoryStore {
    kept: Mutex<BTreeMap<SessionKey, MemorySession>>,
}

#[derive(Debug)]
struct MemorySession {
    /// As it was when it was last closed.
    saved: SavedSession,
    is_open: bool,
}

type All = BTreeMap<SessionKey, MemorySession>;

impl MemoryStore {
    pub fn has_room(&self) -> bool {
        self.kept.lock().len() < MAX_CONVERSATIONS
    }

    /// # Errors
    /// [`Error::SessionBusy`] when another was quicker; [`Error::SessionsFull`].
    pub fn begin(&self, key: &SessionKey, model: &ModelFingerprint) -> Result<SessionChat> {
        let mut kept = self.kept.lock();
        if kept.contains_key(key) {
            return Err(Error::SessionBusy(key.name.to_string()));
        }
        let mut saved = SavedSession::new(model, now_ms());
        saved.owner = key.owner.stored().map(str::to_owned);
        insert(&mut kept, key.clone(), saved.clone(), true)?;
        Ok(SessionChat::look_at(saved, model.clone()))
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn open(&self, key: &SessionKey) -> Result<SavedSession> {
        let mut kept = self.kept.lock();
        let kept = closed(&mut kept, key)?;
        kept.is_open = true;
        Ok(kept.saved.clone())
    }

    pub fn close(&self, key: &SessionKey, saved: SavedSession) {
        self.kept.lock().insert(key.clone(), MemorySession { saved, is_open: false });
    }

    /// Removes one that is open.
    pub fn forget(&self, key: &SessionKey) {
        self.kept.lock().remove(key);
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn remove(&self, key: &SessionKey) -> Result<()> {
        let mut kept = self.kept.lock();
        closed(&mut kept, key)?;
        kept.remove(key);
        Ok(())
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn read(&self, key: &SessionKey) -> Result<SavedSession> {
        self.kept.lock().get(key).map(|kept| kept.saved.clone()).ok_or_else(|| not_found(key))
    }

    pub fn list(&self, owner: &Owner) -> Vec<Listed> {
        let kept = self.kept.lock();
        kept.iter().filter(|(key, _)| key.owner == *owner).map(listed).collect()
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn branches(&self, of: &SessionKey) -> Result<Vec<Listed>> {
        let kept = self.kept.lock();
        let root = kept.get(of).ok_or_else(|| not_found(of))?.saved.root_id();
        let is_branch = |(_, kept): &(&SessionKey, &MemorySession)| {
            kept.saved.branch().is_some_and(|branch| branch.of == root)
        };
        let mut branches: Vec<_> = kept.iter().filter(is_branch).collect();
        branches.sort_by_key(|(key, kept)| (kept.saved.created_ms, key.name.as_str().len(), (*key).clone()));
        Ok(branches.into_iter().map(listed).collect())
    }

    /// A new branch with the first `turns` turns, open.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionsFull`].
    pub fn branch(&self, from: &SessionKey, turns: usize) -> Result<(SessionKey, SavedSession)> {
        let mut kept = self.kept.lock();
        let saved = kept.get(from).ok_or_else(|| not_found(from))?.saved.clone();
        let branch = saved.branched(&from.name, Some(turns), BranchReason::Request)?;
        let key = free_name(&kept, from, &saved);
        insert(&mut kept, key.clone(), branch.clone(), true)?;
        Ok((key, branch))
    }

    /// Keeps all turns of an open conversation in a branch; nothing when it has none.
    ///
    /// # Errors
    /// [`Error::SessionsFull`].
    pub fn keep(
        &self,
        key: &SessionKey,
        saved: &SavedSession,
        reason: BranchReason,
    ) -> Result<Option<SessionName>> {
        if saved.turns.is_empty() {
            return Ok(None);
        }
        let mut kept = self.kept.lock();
        let name = free_name(&kept, key, saved);
        insert(&mut kept, name.clone(), saved.branched(&key.name, None, reason)?, false)?;
        Ok(Some(name.name))
    }

    /// # Errors
    /// [`Error::InvalidParameter`] naming `branch`; [`Error::SessionNotFound`] and [`Error::SessionBusy`]
    /// for it.
    pub fn restore(
        &self,
        key: &SessionKey,
        session_chat: &mut SessionChat,
        branch: &SessionName,
    ) -> Result<Option<SessionName>> {
        let from = key.sibling(branch.clone());
        let saved = self.read(&from)?;
        if saved.branch().is_none_or(|branch| branch.of != session_chat.saved().id) {
            return Err(not_a_branch(branch));
        }
        self.open(&from)?;
        let kept = self.keep(key, session_chat.saved(), BranchReason::Restore);
        let kept = kept.inspect_err(|_| self.close(&from, saved.clone()))?;
        let mut restored = session_chat.saved().clone();
        (restored.turns, restored.last_used_ms) = (saved.turns, now_ms());
        *session_chat = SessionChat::look_at(restored, session_chat.model().clone());
        self.forget(&from);
        Ok(kept)
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`]; [`Error::InvalidParameter`] naming `session`.
    pub fn rename(&self, from: &SessionKey, to: &SessionKey) -> Result<()> {
        let mut kept = self.kept.lock();
        let mut saved = closed(&mut kept, from)?.saved.clone();
        if from != to && kept.contains_key(to) {
            return Err(name_taken(&to.name));
        }
        if let Some(fork) = saved.fork_of.as_mut().filter(|_| !to.name.is_of_branch()) {
            fork.branch = None;
        }
        kept.remove(from);
        insert(&mut kept, to.clone(), saved, false)
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionsFull`]; [`Error::InvalidParameter`] naming `turns` or
    /// `session`.
    pub fn fork(&self, from: &SessionKey, to: &SessionKey, turns: Option<usize>) -> Result<usize> {
        let mut kept = self.kept.lock();
        let saved = kept.get(from).ok_or_else(|| not_found(from))?.saved.clone();
        if kept.contains_key(to) {
            return Err(name_taken(&to.name));
        }
        let mut forked = saved.forked(&from.name, turns)?;
        let num_turns = forked.turns.len();
        forked.owner = to.owner.stored().map(str::to_owned);
        insert(&mut kept, to.clone(), forked, false)?;
        Ok(num_turns)
    }
}

fn insert(all: &mut All, key: SessionKey, saved: SavedSession, is_open: bool) -> Result<()> {
    if all.len() >= MAX_CONVERSATIONS {
        return Err(Error::SessionsFull { capacity: MAX_CONVERSATIONS });
    }
    all.insert(key, MemorySession { saved, is_open });
    Ok(())
}

/// Returns a conversation that no request has open.
fn closed<'a>(all: &'a mut All, key: &SessionKey) -> Result<&'a mut MemorySession> {
    let kept = all.get_mut(key).ok_or_else(|| not_found(key))?;
    if kept.is_open { Err(Error::SessionBusy(key.name.to_string())) } else { Ok(kept) }
}

/// `NAME~1`, or the first number after it that is free.
fn free_name(all: &All, from: &SessionKey, saved: &SavedSession) -> SessionKey {
    let name = from.name.as_str();
    let base = match name.rsplit_once('~') {
        Some((base, _)) if saved.branch().is_some() => base,
        _ => name,
    };
    let base = &base[..base.len().min(MAX_BASE_BYTES)];
    let numbered = |number: usize| {
        let name = SessionName::new(&format!("{base}~{number}"));
        name.map_or_else(|_| from.clone(), |name| from.sibling(name))
    };
    (1..).map(numbered).find(|key| !all.contains_key(key)).unwrap_or_else(|| from.clone())
}

fn listed((key, kept): (&SessionKey, &MemorySession)) -> Listed {
    Listed { name: key.name.clone(), summary: Ok(SessionSummary::of(&kept.saved, 0)) }
}

fn not_found(key: &SessionKey) -> Error {
    Error::SessionNotFound(key.name.to_string())
}
