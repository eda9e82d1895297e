//! Transient sessions: what clients' routing headers name. They keep KV warm and, in memory, the answers
//! as they were generated; the conversations are not saved.
//!
//! A client may send one value for several conversations at once (a title beside the main turn, agents
//! below an agent), so that a transient session is a bundle of branches: a request continues the branch
//! whose turns its messages repeat.
//!
//! Invariants: a request is never refused and never waits because of its transient session; if all
//! branches are in use, it is answered without one. Limits evict the least recently used branch. A branch
//! in use belongs to its request; if it was evicted meanwhile, its result is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::HeaderMap;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::gate::owner::{Caller, Owner};
use llmctl_engine::EngineSessionName;
use llmctl_engine::session::store::{ModelFingerprint, SavedSession, SavedTurn, SessionName, now_ms};
use llmctl_engine::turn::{SessionChat, num_repeated};
use llmctl_template::Message;

/// Headers that clients send by themselves to keep a conversation's requests together, the first that is
/// not empty counts. Codex names its threads, Claude Code its sessions.
pub const ROUTING_HEADERS: [&str; 3] = ["session-id", "thread-id", "x-claude-code-session-id"];

/// The one that says what it is for: it counts before a header that names a stored session.
pub const AFFINITY_HEADER: &str = "x-session-affinity";

/// Branches of one session.
const MAX_BRANCHES: usize = 16;

/// Transient sessions of a server, with or without branches.
const MAX_SESSIONS: usize = 1024;

/// A transient session and its owner.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransientKey {
    pub owner: Owner,
    /// Its id in lists and paths.
    pub id: String,
    /// KV stays off the disk, for `store: false`.
    pub is_memory_only: bool,
}

impl TransientKey {
    /// The session of a header's value, whatever that is.
    pub fn new(owner: Owner, value: &[u8]) -> Self {
        let name = std::str::from_utf8(value).ok().filter(|value| SessionName::new(value).is_ok());
        let id = name.map_or_else(
            || {
                let digest = Sha256::digest(value);
                let hex: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
                format!("affinity-{hex}")
            },
            str::to_owned,
        );
        Self { owner, id, is_memory_only: false }
    }

    /// Value of the header that names it, if present.
    pub fn in_headers(owner: &Owner, headers: &HeaderMap, names: &[&str]) -> Option<Self> {
        let value = names.iter().filter_map(|name| headers.get(*name)).find(|value| !value.is_empty())?;
        Some(Self::new(owner.clone(), value.as_bytes()))
    }
}

/// All transient sessions of a server. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct Transients {
    shared: Arc<Mutex<TransientTable>>,
}

#[derive(Debug)]
struct TransientTable {
    sessions: BTreeMap<TransientKey, Bundle>,
    /// Limit on the branches of all sessions together.
    max_branches: usize,
    num_begun: u64,
    clock: u64,
}

#[derive(Debug, Default)]
struct Bundle {
    created_ms: u64,
    last_used_ms: u64,
    last_used: u64,
    branches: Vec<TransientBranch>,
}

/// One conversation of a transient session.
#[derive(Debug, Clone)]
pub struct TransientBranch {
    /// Its session in the engine.
    pub name: EngineSessionName,
    /// As it was when it was last given back.
    pub saved: SavedSession,
    /// A request has it.
    is_busy: bool,
    last_used: u64,
}

/// One transient session, for those who look.
#[derive(Debug, Clone)]
pub struct Transient {
    pub id: String,
    pub created_ms: u64,
    pub last_used_ms: u64,
    /// The one used last comes first.
    pub branches: Vec<TransientBranch>,
}

/// A branch that a request has.
#[derive(Debug)]
pub struct HeldBranch {
    transients: Transients,
    pub key: TransientKey,
    /// Its session in the engine.
    pub name: EngineSessionName,
    /// The branch that this one has just parted from.
    pub parts_from: Option<EngineSessionName>,
}

/// A branch for a request: its name, what was said, and the branch that it parts from.
type TakenBranch = (EngineSessionName, SavedSession, Option<EngineSessionName>);

impl Transients {
    /// `max_branches` is what is worth keeping: as many sessions as the engine keeps.
    pub fn new(max_branches: usize) -> Self {
        let shared = TransientTable { sessions: BTreeMap::new(), max_branches, num_begun: 0, clock: 0 };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Returns the branch that the messages continue; a new one where they continue none, which begins
    /// with the turns that it has in common with another. `None` if all are in use.
    pub fn check_out(
        &self,
        key: &TransientKey,
        model: &ModelFingerprint,
        messages: &[Message],
    ) -> Option<(HeldBranch, SessionChat)> {
        let mut shared = self.shared.lock();
        let now = shared.touch(key);
        let continued = shared.sessions.get_mut(key)?.take_continued(messages, now);
        let (name, saved, parts_from) = continued.or_else(|| shared.begin(key, model, messages))?;
        let held = HeldBranch { transients: self.clone(), key: key.clone(), name, parts_from };
        Some((held, SessionChat::look_at(saved, model.clone())))
    }

    /// Takes note of a request that needs no branch.
    pub fn note(&self, key: &TransientKey) {
        self.shared.lock().touch(key);
    }

    /// Returns those of these owners, by id.
    pub fn list(&self, caller: &Caller) -> Vec<Transient> {
        let shared = self.shared.lock();
        let own = shared.sessions.iter().filter(|(key, _)| caller.owners().any(|owner| *owner == key.owner));
        own.map(|(key, bundle)| bundle.info(&key.id)).collect()
    }

    pub fn get(&self, caller: &Caller, id: &str) -> Option<Transient> {
        let shared = self.shared.lock();
        keys(caller, id).find_map(|key| shared.sessions.get(&key)).map(|bundle| bundle.info(id))
    }

    /// Removes one, and returns it with all its branches.
    pub fn remove(&self, caller: &Caller, id: &str) -> Option<Transient> {
        let mut shared = self.shared.lock();
        let mut removed = keys(caller, id).filter_map(|key| shared.sessions.remove(&key));
        let mut first = removed.next()?;
        first.branches.extend(removed.flat_map(|bundle| bundle.branches));
        Some(first.info(id))
    }
}

/// Keys that an id may stand for, the caller's own first.
fn keys(caller: &Caller, id: &str) -> impl Iterator<Item = TransientKey> {
    let key = |owner: &Owner, is_memory_only| TransientKey {
        owner: owner.clone(),
        id: id.to_owned(),
        is_memory_only,
    };
    caller.owners().flat_map(move |owner| [key(owner, false), key(owner, true)])
}

impl TransientTable {
    /// Records a use of the session, which is made if there is none, and makes room for it.
    fn touch(&mut self, key: &TransientKey) -> u64 {
        self.clock += 1;
        let now = self.clock;
        if !self.sessions.contains_key(key) && self.sessions.len() >= MAX_SESSIONS {
            let is_idle = |bundle: &Bundle| bundle.branches.iter().all(|branch| !branch.is_busy);
            let idle = self.sessions.iter().filter(|(_, bundle)| is_idle(bundle));
            let oldest = idle.min_by_key(|(_, bundle)| bundle.last_used).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| self.sessions.remove(&oldest));
        }
        let new = || Bundle { created_ms: now_ms(), ..Bundle::default() };
        let bundle = self.sessions.entry(key.clone()).or_insert_with(new);
        (bundle.last_used, bundle.last_used_ms) = (now, now_ms());
        now
    }

    /// Returns a new branch for the messages, if there is room for it or can be made.
    fn begin(
        &mut self,
        key: &TransientKey,
        model: &ModelFingerprint,
        messages: &[Message],
    ) -> Option<TakenBranch> {
        let nearest = self.sessions.get(key)?.nearest(messages);
        self.make_room(key)?;
        self.num_begun += 1;
        let mut saved = SavedSession::new(model, now_ms());
        let parts_from = nearest.map(|(name, turns)| {
            saved.turns = turns;
            name
        });
        let slash = if key.is_memory_only { "/" } else { "" };
        let name = format_args!("{slash}affinity/{}/{}", key.owner, key.id);
        let name = EngineSessionName::scoped(name, self.num_begun);
        let (last_used, is_busy) = (self.clock, true);
        let branch = TransientBranch { name: name.clone(), saved: saved.clone(), is_busy, last_used };
        self.sessions.get_mut(key)?.branches.push(branch);
        Some((name, saved, parts_from))
    }

    /// Evicts the least recently used idle branch, of this session where it has too many, or of all;
    /// `None` if all are in use.
    fn make_room(&mut self, key: &TransientKey) -> Option<()> {
        let own = self.sessions.get_mut(key)?;
        if own.branches.len() >= MAX_BRANCHES {
            own.evict()?;
        }
        let num_branches: usize = self.sessions.values().map(|bundle| bundle.branches.len()).sum();
        if num_branches >= self.max_branches {
            let oldest = |bundle: &Bundle| Some(bundle.branches[bundle.oldest_idle()?].last_used);
            let idle = self.sessions.values_mut().filter(|bundle| bundle.oldest_idle().is_some());
            idle.min_by_key(|bundle| oldest(bundle))?.evict()?;
        }
        Some(())
    }
}

impl Bundle {
    /// Returns the longest idle branch of which the messages repeat all turns.
    fn take_continued(&mut self, messages: &[Message], now: u64) -> Option<TakenBranch> {
        let is_continued = |branch: &TransientBranch| {
            !branch.is_busy && num_repeated(&branch.saved, messages) == branch.saved.turns.len()
        };
        let continued = self.branches.iter_mut().filter(|branch| is_continued(branch));
        let branch = continued.max_by_key(|branch| branch.saved.turns.len())?;
        (branch.last_used, branch.is_busy) = (now, true);
        Some((branch.name.clone(), branch.saved.clone(), None))
    }

    /// Returns the branch that has most turns in common with the messages, and those turns; `None` if none
    /// has any.
    fn nearest(&self, messages: &[Message]) -> Option<(EngineSessionName, Vec<Arc<SavedTurn>>)> {
        let common = self.branches.iter().map(|branch| (num_repeated(&branch.saved, messages), branch));
        let (turns, branch) = common.max_by_key(|(turns, _)| *turns).filter(|(turns, _)| *turns > 0)?;
        Some((branch.name.clone(), branch.saved.turns[..turns].to_vec()))
    }

    fn oldest_idle(&self) -> Option<usize> {
        let idle = self.branches.iter().enumerate().filter(|(_, branch)| !branch.is_busy);
        idle.min_by_key(|(_, branch)| branch.last_used).map(|(index, _)| index)
    }

    fn evict(&mut self) -> Option<TransientBranch> {
        self.oldest_idle().map(|index| self.branches.remove(index))
    }

    fn info(&self, id: &str) -> Transient {
        let mut branches = self.branches.clone();
        branches.sort_by_key(|branch| std::cmp::Reverse(branch.last_used));
        let Self { created_ms, last_used_ms, .. } = *self;
        Transient { id: id.to_owned(), created_ms, last_used_ms, branches }
    }
}

impl HeldBranch {
    /// Returns true if it has been removed meanwhile.
    pub fn is_removed(&self) -> bool {
        let shared = self.transients.shared.lock();
        let branches = shared.sessions.get(&self.key).map(|bundle| &bundle.branches);
        branches.is_none_or(|branches| branches.iter().all(|branch| branch.name != self.name))
    }

    /// Gives the branch back; without what was said, it is gone.
    pub fn give_back(&self, saved: Option<SavedSession>) {
        let mut shared = self.transients.shared.lock();
        let Some(bundle) = shared.sessions.get_mut(&self.key) else { return };
        bundle.last_used_ms = now_ms();
        let Some(index) = bundle.branches.iter().position(|branch| branch.name == self.name) else { return };
        match saved {
            None => drop(bundle.branches.remove(index)),
            Some(saved) => {
                let branch = &mut bundle.branches[index];
                (branch.saved, branch.is_busy) = (saved, false);
            }
        }
    }
}
