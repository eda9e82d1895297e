//! Transient sessions: what clients' routing headers name. They keep KV warm and, in memory, the answers as
//! they were generated; the conversations are not saved.
//!
//! A client may send one value for several conversations at once (a title beside the main turn, agents below
//! an agent), so that a transient session is a bundle of branches: a request continues the branch that its
//! messages repeat.
//!
//! Invariants: a request is never refused and never waits for the sake of its transient session; where no
//! branch is free, it is answered without. Limits evict the least recently used branch. A branch in use
//! belongs to its request; if it was evicted meanwhile, its result is dropped.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::HeaderMap;
use sha2::{Digest, Sha256};

use crate::gate::owner::{Caller, Owner};
use llmctl_engine::EngineSessionName;
use llmctl_engine::session::store::{ModelFingerprint, SavedSession, SessionName, now_ms};
use llmctl_engine::turn::{SessionChat, num_repeated};
use llmctl_template::Message;

/// Headers that clients send by themselves to keep a conversation's requests together, the first that is not empty counts.
/// Codex names its threads, Claude Code its sessions.
pub const ROUTING_HEADERS: [&str; 3] = ["session-id", "thread-id", "x-claude-code-session-id"];

/// The one that says what it is for: it counts before a header that names a stored session.
pub const AFFINITY_HEADER: &str = "x-session-affinity";

/// Most branches of one session.
const MAX_STRANDS: usize = 16;

/// Most transient sessions of a server, with branches or without.
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
    /// Most branches of all sessions together.
    max_strands: usize,
    num_begun: u64,
    clock: u64,
}

#[derive(Debug)]
struct Bundle {
    created_ms: u64,
    last_used_ms: u64,
    last_used: u64,
    strands: Vec<Strand>,
}

#[derive(Debug)]
struct Strand {
    name: EngineSessionName,
    /// As it was when it last came back.
    saved: SavedSession,
    /// `None` while a request holds it.
    session_chat: Option<SessionChat>,
    last_used: u64,
}

/// One transient session, for those who look.
#[derive(Debug, Clone)]
pub struct Transient {
    pub id: String,
    pub created_ms: u64,
    pub last_used_ms: u64,
    /// The one used last comes first.
    pub strands: Vec<StrandInfo>,
}

#[derive(Debug, Clone)]
pub struct StrandInfo {
    /// Its session in the engine.
    pub name: EngineSessionName,
    pub saved: SavedSession,
}

/// A branch that a request holds.
#[derive(Debug)]
pub struct HeldStrand {
    transients: Transients,
    key: TransientKey,
    name: EngineSessionName,
    parts_from: Option<EngineSessionName>,
}

/// A branch for a request: its name, its conversation, and the branch that it parts from.
type TakenStrand = (EngineSessionName, SessionChat, Option<EngineSessionName>);

impl Transients {
    /// Creates an empty table. `max_strands` bounds the branches: as many sessions as the engine keeps.
    pub fn new(max_strands: usize) -> Self {
        let shared = TransientTable { sessions: BTreeMap::new(), max_strands, num_begun: 0, clock: 0 };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Takes the branch that the messages continue, or begins one that parts from the branch with most turns
    /// in common. `None` if all are in use.
    pub fn open(
        &self,
        key: &TransientKey,
        model: &ModelFingerprint,
        messages: &[Message],
    ) -> Option<(HeldStrand, SessionChat)> {
        let mut shared = self.shared();
        let now = shared.touch(key);
        let bundle = shared.sessions.get_mut(key)?;
        let (name, session_chat, parts_from) = match bundle.take_continued(messages, now) {
            Some((name, session_chat)) => (name, session_chat.answered_by(model.clone()), None),
            None => shared.begin(key, model, messages)?,
        };
        Some((HeldStrand { transients: self.clone(), key: key.clone(), name, parts_from }, session_chat))
    }

    /// Takes note of a request that needs no branch.
    pub fn note(&self, key: &TransientKey) {
        self.shared().touch(key);
    }

    /// Those of these owners, by id.
    pub fn list(&self, caller: &Caller) -> Vec<Transient> {
        let shared = self.shared();
        let own = shared.sessions.iter().filter(|(key, _)| caller.owners().any(|owner| *owner == key.owner));
        own.map(|(key, bundle)| bundle.info(&key.id)).collect()
    }

    pub fn get(&self, caller: &Caller, id: &str) -> Option<Transient> {
        let shared = self.shared();
        keys(caller, id).find_map(|key| shared.sessions.get(&key)).map(|bundle| bundle.info(id))
    }

    /// Removes a session, and returns it with all its branches.
    pub fn remove(&self, caller: &Caller, id: &str) -> Option<Transient> {
        let mut shared = self.shared();
        let mut removed = keys(caller, id).filter_map(|key| shared.sessions.remove(&key));
        let mut first = removed.next()?;
        first.strands.extend(removed.flat_map(|bundle| bundle.strands));
        Some(first.info(id))
    }

    /// Ignores poison: the state behind the lock is consistent at every moment.
    fn shared(&self) -> MutexGuard<'_, TransientTable> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// Sees to the session, and to room for it.
    fn touch(&mut self, key: &TransientKey) -> u64 {
        self.clock += 1;
        let now = self.clock;
        if !self.sessions.contains_key(key) && self.sessions.len() >= MAX_SESSIONS {
            let idle = self.sessions.iter().filter(|(_, bundle)| bundle.is_idle());
            let oldest = idle.min_by_key(|(_, bundle)| bundle.last_used).map(|(key, _)| key.clone());
            oldest.and_then(|oldest| self.sessions.remove(&oldest));
        }
        let bundle = self.sessions.entry(key.clone()).or_insert_with(Bundle::new);
        (bundle.last_used, bundle.last_used_ms) = (now, now_ms());
        now
    }

    /// Begins a branch for the messages, if there is room for it or can be made.
    fn begin(
        &mut self,
        key: &TransientKey,
        model: &ModelFingerprint,
        messages: &[Message],
    ) -> Option<TakenStrand> {
        let nearest = self.sessions.get(key)?.nearest(messages);
        self.make_room(key)?;
        self.num_begun += 1;
        let mut kept = SavedSession::new(model, now_ms());
        let mut parts_from = None;
        if let Some((name, saved, turns)) = nearest {
            kept.turns = saved.turns.into_iter().take(turns).collect();
            parts_from = Some(name);
        }
        let session_chat = SessionChat::look_at(kept, model.clone());
        let slash = if key.is_memory_only { "/" } else { "" };
        let name = format_args!("{slash}affinity/{}/{}", key.owner, key.id);
        let name = EngineSessionName::scoped(name, self.num_begun);
        let (saved, last_used) = (session_chat.saved().clone(), self.clock);
        let strand = Strand { name: name.clone(), saved, session_chat: None, last_used };
        self.sessions.get_mut(key)?.strands.push(strand);
        Some((name, session_chat, parts_from))
    }

    /// Evicts the idle branch used longest ago, of this session if it has too many, else of all. `None` if
    /// all are in use.
    fn make_room(&mut self, key: &TransientKey) -> Option<()> {
        if self.sessions.get(key)?.strands.len() >= MAX_STRANDS {
            let bundle = self.sessions.get_mut(key)?;
            let index = bundle.oldest_idle()?;
            bundle.strands.remove(index);
        }
        let num_strands: usize = self.sessions.values().map(|bundle| bundle.strands.len()).sum();
        if num_strands >= self.max_strands {
            let idle = |bundle: &Bundle| Some(bundle.strands[bundle.oldest_idle()?].last_used);
            let oldest = self.sessions.values_mut().filter(|bundle| bundle.oldest_idle().is_some());
            let bundle = oldest.min_by_key(|bundle| idle(bundle))?;
            let index = bundle.oldest_idle()?;
            bundle.strands.remove(index);
        }
        Some(())
    }
}

impl Bundle {
    fn new() -> Self {
        Self { created_ms: now_ms(), last_used_ms: now_ms(), last_used: 0, strands: Vec::new() }
    }

    fn is_idle(&self) -> bool {
        self.strands.iter().all(|strand| strand.session_chat.is_some())
    }

    /// Takes the longest idle branch of which the messages repeat all turns.
    fn take_continued(&mut self, messages: &[Message], now: u64) -> Option<(EngineSessionName, SessionChat)> {
        let is_continued = |strand: &Strand| {
            strand.session_chat.is_some() && num_repeated(&strand.saved, messages) == strand.saved.turns.len()
        };
        let continued = self.strands.iter_mut().filter(|strand| is_continued(strand));
        let strand = continued.max_by_key(|strand| strand.saved.turns.len())?;
        strand.last_used = now;
        Some((strand.name.clone(), strand.session_chat.take()?))
    }

    /// The conversation that has most turns in common with the messages, and how many; nothing where none has any.
    fn nearest(&self, messages: &[Message]) -> Option<(EngineSessionName, SavedSession, usize)> {
        let common = self.strands.iter().map(|strand| (num_repeated(&strand.saved, messages), strand));
        let (turns, strand) = common.max_by_key(|(turns, _)| *turns).filter(|(turns, _)| *turns > 0)?;
        Some((strand.name.clone(), strand.saved.clone(), turns))
    }

    fn oldest_idle(&self) -> Option<usize> {
        let idle = self.strands.iter().enumerate().filter(|(_, strand)| strand.session_chat.is_some());
        idle.min_by_key(|(_, strand)| strand.last_used).map(|(index, _)| index)
    }

    fn info(&self, id: &str) -> Transient {
        let mut strands: Vec<&Strand> = self.strands.iter().collect();
        strands.sort_by_key(|strand| std::cmp::Reverse(strand.last_used));
        let info = |strand: &Strand| StrandInfo { name: strand.name.clone(), saved: strand.saved.clone() };
        Transient {
            id: id.to_owned(),
            created_ms: self.created_ms,
            last_used_ms: self.last_used_ms,
            strands: strands.into_iter().map(info).collect(),
        }
    }
}

impl HeldStrand {
    /// Its session in the engine.
    pub fn name(&self) -> &EngineSessionName {
        &self.name
    }

    pub fn id(&self) -> &str {
        &self.key.id
    }

    /// Returns the branch that this one has just parted from.
    pub fn parts_from(&self) -> Option<&EngineSessionName> {
        self.parts_from.as_ref()
    }

    /// Returns true if it has been removed meanwhile.
    pub fn is_removed(&self) -> bool {
        let shared = self.transients.shared();
        let strands = shared.sessions.get(&self.key).map(|bundle| &bundle.strands);
        strands.is_none_or(|strands| strands.iter().all(|strand| strand.name != self.name))
    }

    /// Gives the branch back; without a conversation it is removed.
    pub fn give_back(&self, session_chat: Option<SessionChat>) {
        let mut shared = self.transients.shared();
        let Some(bundle) = shared.sessions.get_mut(&self.key) else { return };
        bundle.last_used_ms = now_ms();
        let Some(index) = bundle.strands.iter().position(|strand| strand.name == self.name) else { return };
        match session_chat {
            None => drop(bundle.strands.remove(index)),
            Some(session_chat) => {
                let strand = &mut bundle.strands[index];
                strand.saved = session_chat.saved().clone();
                strand.session_chat = Some(session_chat);
            }
        }
    }
}
