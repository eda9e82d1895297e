//! Branches: earlier or diverging content of a session, kept beside it as a session of its own.
//!
//! Invariants: a branch is on disk before anything is taken from its session, and is removed only after the
//! session holds its content, so a crash may leave a turn twice but never loses one. Every branch belongs, by
//! id, to a session that is not a branch: branching off a branch makes another branch of the same session.

use std::fs;

use super::folder::io_error;
use super::name::MAX_BRANCHED_BYTES;
use super::record::{BranchReason, LogRecord, StoredTurnRecord};
use super::saved::{ForkOf, SavedSession, SavedTurn};
use super::writer::SessionWriter;
use super::{Listed, ModelFingerprint, SessionName, SessionStore, name_taken, now_ms};
use llmctl_base::error::{Error, Result};

/// Most attempts to create a branch while other processes take the free names.
const MAX_TRIES: usize = 100;

impl SessionStore {
    /// Creates a branch of a session, open for writing, with its first `turns` turns; `None` for all.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there are fewer turns; errors of [`Self::read`].
    pub fn branch(
        &self,
        from: &SessionName,
        turns: Option<usize>,
        reason: BranchReason,
    ) -> Result<SessionWriter> {
        self.branch_of(from, &self.read(from)?, turns, reason)
    }

    pub(super) fn branch_of(
        &self,
        name: &SessionName,
        saved: &SavedSession,
        turns: Option<usize>,
        reason: BranchReason,
    ) -> Result<SessionWriter> {
        let fork = saved.branched(name, turns, reason)?;
        let kept = SavedSession { last_used_ms: saved.last_used_ms, ..fork };
        let base = branch_base(name, saved);
        for _ in 0..MAX_TRIES {
            let free = SessionName::branch(base, self.last_branch_number(base)? + 1);
            match self.create_saved(&free, kept.clone()) {
                Err(Error::InvalidParameter { name: "session", .. }) => {} // another process took the name
                created => return created,
            }
        }
        Err(name_taken(&SessionName::branch(base, 1)))
    }

    pub(super) fn last_branch_number(&self, base: &str) -> Result<usize> {
        let names = fs::read_dir(&self.root).map_err(|error| io_error(&self.root, &error))?.flatten();
        let names = names.filter_map(|entry| entry.file_name().to_str().and_then(SessionName::from_folder));
        let number = |name: SessionName| name.branch_parts().filter(|(of, _)| *of == base).map(|(_, n)| n);
        Ok(names.filter_map(number).max().unwrap_or(0))
    }

    /// Lists the branches of a session, or of the session that a branch belongs to, oldest first; in the end those that cannot be
    /// read, and are its branches by their names.
    ///
    /// # Errors
    /// Errors of [`Self::read`] and [`Self::list`].
    pub fn branches(&self, name: &SessionName) -> Result<Vec<Listed>> {
        self.branches_of(name, &self.read(name)?)
    }

    fn branches_of(&self, name: &SessionName, saved: &SavedSession) -> Result<Vec<Listed>> {
        let mut branches = self.list()?;
        let base = branch_base(name, saved);
        branches.retain(|listed| match &listed.summary {
            Ok(_) => listed.branch().is_some_and(|branch| branch.of == saved.root_id()),
            Err(_) => listed.name.branch_parts().is_some_and(|(of, _)| of == base),
        });
        let created =
            |listed: &Listed| listed.summary.as_ref().map_or(u64::MAX, |summary| summary.created_ms);
        branches.sort_by_key(|listed| (created(listed), listed.name.branch_parts().map(|(_, n)| n)));
        Ok(branches)
    }

    /// Returns the session that a branch belongs to; `None` if `branch` is not a branch or its session is
    /// removed.
    ///
    /// # Errors
    /// Errors of [`Self::read`] and [`Self::list`].
    pub fn session_of(&self, branch: &SessionName) -> Result<Option<SessionName>> {
        let saved = self.read(branch)?;
        let Some(branch) = saved.branch() else { return Ok(None) };
        let is_root = |listed: &Listed| listed.summary.as_ref().is_ok_and(|summary| summary.id == branch.of);
        Ok(self.list()?.into_iter().find(is_root).map(|listed| listed.name))
    }

    /// Restores a branch as [`SessionWriter::restore`] does, in the session it belongs to. Returns that
    /// session, and the branch that keeps its previous content.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`] if that session is removed; errors of [`Self::open`].
    pub fn restore(&self, branch: &SessionName) -> Result<(SessionName, Option<SessionName>)> {
        let Some(session) = self.session_of(branch)? else {
            return Err(match self.read(branch)?.fork_of {
                Some(ForkOf { name, branch: Some(_), .. }) => Error::SessionNotFound(name),
                _ => not_a_branch(branch),
            });
        };
        let kept = self.open(&session)?.restore(branch)?;
        Ok((session, kept))
    }
}

impl SessionWriter {
    /// Creates a branch of this session; see [`SessionStore::branch`].
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there are fewer turns; [`Error::Store`].
    pub fn branch(&self, turns: Option<usize>, reason: BranchReason) -> Result<SessionWriter> {
        self.store().branch_of(self.name(), self.saved(), turns, reason)
    }

    /// Copies all turns to a branch, before the caller removes some. Returns the branch, or an older one that
    /// already holds all turns; `None` if the session is empty.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn keep(&self, reason: BranchReason) -> Result<Option<SessionName>> {
        if self.saved().turns.is_empty() {
            return Ok(None);
        }
        for Listed { name, summary } in self.store().branches_of(self.name(), self.saved())? {
            let is_long = summary.is_ok_and(|summary| summary.turns >= self.saved().turns.len());
            if is_long && name != *self.name() && self.store().read(&name).is_ok_and(|kept| self.is_in(&kept))
            {
                return Ok(Some(name));
            }
        }
        Ok(Some(self.branch(None, reason)?.name().clone()))
    }

    /// Replaces the session's conversation by a branch's, and removes that branch. Returns the new branch
    /// with the previous conversation; `None` if nothing of it would be lost.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if `branch` is not a branch of this session; errors of
    /// [`SessionStore::open`].
    pub fn restore(&mut self, branch: &SessionName) -> Result<Option<SessionName>> {
        let restored = self.store().open(branch)?;
        let is_ours = restored.saved().branch().is_some_and(|branch| branch.of == self.saved().id);
        if !is_ours {
            return Err(not_a_branch(branch));
        }
        let kept = match self.is_in(restored.saved()) {
            true => None,
            false => self.keep(BranchReason::Restore)?,
        };
        self.rewrite_with(self.records_to(restored.saved()))?;
        restored.remove()?;
        Ok(kept)
    }

    /// Returns whether this conversation is a prefix of another.
    fn is_in(&self, other: &SavedSession) -> bool {
        common_turns(self.saved(), other) == self.saved().turns.len()
    }

    /// Returns the records that turn this session's conversation into another's.
    fn records_to(&self, other: &SavedSession) -> Vec<LogRecord> {
        let common = common_turns(self.saved(), other);
        let mut records = vec![LogRecord::Truncate { turns: common, time_ms: now_ms() }];
        let mut model = &self.saved().model;
        for (at, saved) in other.turns.iter().enumerate().skip(common) {
            let SavedTurn { turn, model: own, .. } = &**saved;
            if own != model {
                model = own;
                records.push(LogRecord::Model { model: ModelFingerprint::clone(model) });
            }
            records.push(LogRecord::Turn { number: at + 1, turn: Box::new(StoredTurnRecord::from(turn)) });
            records.extend(saved.note_record(at + 1));
        }
        if *model != other.model {
            records.push(LogRecord::Model { model: ModelFingerprint::clone(&other.model) });
        }
        records
    }
}

/// Returns what the names of a session's branches begin with.
fn branch_base<'a>(name: &'a SessionName, saved: &SavedSession) -> &'a str {
    let base = match name.branch_parts() {
        Some((base, _)) if saved.branch().is_some() => base,
        _ => name.as_str(),
    };
    &base[..base.len().min(MAX_BRANCHED_BYTES)]
}

/// Returns the number of equal leading turns.
fn common_turns(a: &SavedSession, b: &SavedSession) -> usize {
    let is_same = |(a, b): &(&std::sync::Arc<SavedTurn>, &std::sync::Arc<SavedTurn>)| {
        a.turn == b.turn && a.model.is_same(&b.model)
    };
    a.turns.iter().zip(&b.turns).take_while(is_same).count()
}

/// The error of a session that is no branch of the one that is asked.
pub fn not_a_branch(name: &SessionName) -> Error {
    let message = format!("session {:?} is not a branch of it", name.as_str());
    Error::InvalidParameter { name: "branch", message }
}
