//! Conversations without a store: they end with the server, and are otherwise what they are on disk.
//!
//! Invariants: one that is open is busy for others and read as it was before; there is an end to how many
//! there are.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::{SessionKey, locked};
use crate::gate::owner::Owner;
use llmctl_base::{Error, Result};
use llmctl_engine::session::store::{
    Branch, BranchReason, ForkOf, Listed, ModelFingerprint, SavedSession, SessionName, SessionSummary, now_ms,
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
    /// `None` while it is open.
    session_chat: Option<SessionChat>,
}

type All = BTreeMap<SessionKey, MemorySession>;

impl MemoryStore {
    pub fn has_room(&self) -> bool {
        locked(&self.kept).len() < MAX_CONVERSATIONS
    }

    /// # Errors
    /// [`Error::SessionBusy`] when another was quicker; [`Error::SessionsFull`].
    pub fn begin(&self, key: &SessionKey, model: &ModelFingerprint) -> Result<SessionChat> {
        let mut kept = locked(&self.kept);
        if kept.contains_key(key) {
            return Err(Error::SessionBusy(key.name.to_string()));
        }
        let mut saved = SavedSession::new(model, now_ms());
        saved.owner = key.owner.stored().map(str::to_owned);
        let session_chat = SessionChat::look_at(saved, model.clone());
        insert(&mut kept, key.clone(), session_chat.saved().clone(), None)?;
        Ok(session_chat)
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn open(&self, key: &SessionKey) -> Result<SessionChat> {
        let mut kept = locked(&self.kept);
        let kept = kept.get_mut(key).ok_or_else(|| not_found(key))?;
        kept.session_chat.take().ok_or_else(|| Error::SessionBusy(key.name.to_string()))
    }

    pub fn close(&self, key: &SessionKey, session_chat: SessionChat) {
        let kept = MemorySession { saved: session_chat.saved().clone(), session_chat: Some(session_chat) };
        locked(&self.kept).insert(key.clone(), kept);
    }

    /// Removes one that is open.
    pub fn forget(&self, key: &SessionKey) {
        locked(&self.kept).remove(key);
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`].
    pub fn remove(&self, key: &SessionKey) -> Result<()> {
        let mut kept = locked(&self.kept);
        let is_open = kept.get(key).ok_or_else(|| not_found(key))?.session_chat.is_none();
        if is_open {
            return Err(Error::SessionBusy(key.name.to_string()));
        }
        kept.remove(key);
        Ok(())
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn read(&self, key: &SessionKey) -> Result<SavedSession> {
        locked(&self.kept).get(key).map(|kept| kept.saved.clone()).ok_or_else(|| not_found(key))
    }

    pub fn list(&self, owner: &Owner) -> Vec<Listed> {
        let kept = locked(&self.kept);
        kept.iter().filter(|(key, _)| key.owner == *owner).map(listed).collect()
    }

    /// # Errors
    /// [`Error::SessionNotFound`].
    pub fn branches(&self, of: &SessionKey) -> Result<Vec<Listed>> {
        let kept = locked(&self.kept);
        let root = kept.get(of).ok_or_else(|| not_found(of))?.saved.root_id();
        let is_branch = |(_, kept): &(&SessionKey, &MemorySession)| {
            kept.saved.branch().is_some_and(|branch| branch.of == root)
        };
        let mut branches: Vec<_> = kept.iter().filter(is_branch).collect();
        branches.sort_by_key(|(key, kept)| (kept.saved.created_ms, key.name.as_str().len(), (*key).clone()));
        Ok(branches.into_iter().map(listed).collect())
    }

    /// A new branch, open.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionsFull`].
    pub fn branch(
        &self,
        from: &SessionKey,
        turns: Option<usize>,
        reason: BranchReason,
        model: &ModelFingerprint,
    ) -> Result<(SessionKey, SessionChat)> {
        let mut kept = locked(&self.kept);
        let saved = kept.get(from).ok_or_else(|| not_found(from))?.saved.clone();
        let branch = branch_of(from, &saved, turns.unwrap_or(saved.turns.len()), reason);
        let key = free_name(&kept, from, &saved);
        insert(&mut kept, key.clone(), branch.clone(), None)?;
        Ok((key, SessionChat::look_at(branch, model.clone())))
    }

    /// Keeps all turns of an open conversation in a branch; nothing when it has none.
    ///
    /// # Errors
    /// [`Error::SessionsFull`].
    pub fn keep(
        &self,
        key: &SessionKey,
        session_chat: &SessionChat,
        reason: BranchReason,
    ) -> Result<Option<SessionName>> {
        let saved = session_chat.saved();
        if saved.turns.is_empty() {
            return Ok(None);
        }
        let mut kept = locked(&self.kept);
        let branch = branch_of(key, saved, saved.turns.len(), reason);
        let name = free_name(&kept, key, saved);
        let look = SessionChat::look_at(branch.clone(), session_chat.model().clone());
        insert(&mut kept, name.clone(), branch, Some(look))?;
        Ok(Some(name.name))
    }

    /// # Errors
    /// [`Error::InvalidParameter`] naming `branch`; [`Error::SessionNotFound`] and [`Error::SessionBusy`] for it.
    pub fn restore(
        &self,
        key: &SessionKey,
        session_chat: &mut SessionChat,
        branch: &SessionName,
    ) -> Result<Option<SessionName>> {
        let from = key.sibling(branch.clone());
        let saved = self.read(&from)?;
        if saved.branch().is_none_or(|branch| branch.of != session_chat.saved().id) {
            let message = format!("session {:?} is not a branch of it", branch.as_str());
            return Err(Error::InvalidParameter { name: "branch", message });
        }
        drop(self.open(&from)?);
        let kept = self.keep(key, session_chat, BranchReason::Restore)?;
        let mut restored = session_chat.saved().clone();
        (restored.turns, restored.last_used_ms) = (saved.turns, now_ms());
        *session_chat = SessionChat::look_at(restored, session_chat.model().clone());
        self.forget(&from);
        Ok(kept)
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`]; [`Error::InvalidParameter`] naming `session`.
    pub fn rename(&self, from: &SessionKey, to: &SessionKey) -> Result<()> {
        let mut session_chat = self.open(from)?;
        let mut kept = locked(&self.kept);
        if from != to && kept.contains_key(to) {
            kept.get_mut(from).ok_or_else(|| not_found(from))?.session_chat = Some(session_chat);
            return Err(taken(to));
        }
        let mut saved = kept.remove(from).ok_or_else(|| not_found(from))?.saved;
        if let Some(fork) = saved.fork_of.as_mut().filter(|_| !to.name.is_of_branch()) {
            fork.branch = None;
            session_chat = SessionChat::look_at(saved.clone(), session_chat.model().clone());
        }
        insert(&mut kept, to.clone(), saved, Some(session_chat))
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionsFull`]; [`Error::InvalidParameter`] naming `turns` or `session`.
    pub fn fork(&self, from: &SessionKey, to: &SessionKey, turns: Option<usize>) -> Result<usize> {
        let mut kept = locked(&self.kept);
        let saved = kept.get(from).ok_or_else(|| not_found(from))?.saved.clone();
        if kept.contains_key(to) {
            return Err(taken(to));
        }
        let num_turns = turns.unwrap_or(saved.turns.len());
        if num_turns > saved.turns.len() {
            let (name, count) = (from.name.as_str(), saved.turns.len());
            let message = format!("session {name:?} has {count} turns, not {num_turns}");
            return Err(Error::InvalidParameter { name: "turns", message });
        }
        let fork_of = ForkOf { name: from.name.to_string(), turns: num_turns, branch: None };
        let mut forked = saved.forked(fork_of, now_ms());
        forked.owner = to.owner.stored().map(str::to_owned);
        let session_chat = SessionChat::look_at(forked.clone(), (*forked.model).clone());
        insert(&mut kept, to.clone(), forked, Some(session_chat))?;
        Ok(num_turns)
    }
}

fn insert(
    all: &mut All,
    key: SessionKey,
    saved: SavedSession,
    session_chat: Option<SessionChat>,
) -> Result<()> {
    if all.len() >= MAX_CONVERSATIONS {
        return Err(Error::SessionsFull { capacity: MAX_CONVERSATIONS });
    }
    all.insert(key, MemorySession { saved, session_chat });
    Ok(())
}

fn branch_of(from: &SessionKey, saved: &SavedSession, turns: usize, reason: BranchReason) -> SavedSession {
    let branch = Some(Branch { of: saved.root_id().to_owned(), reason });
    saved.forked(ForkOf { name: from.name.to_string(), turns, branch }, now_ms())
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

fn taken(key: &SessionKey) -> Error {
    let message = format!("there is a session named {:?} already", key.name.as_str());
    Error::InvalidParameter { name: "session", message }
}

fn not_found(key: &SessionKey) -> Error {
    Error::SessionNotFound(key.name.to_string())
}
