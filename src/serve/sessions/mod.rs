//! The one directory of a server's sessions: which conversation a request is a turn of, who has it, and
//! which engine it was with.
//!
//! A stored session is on disk, where `run --session` and `chat` keep theirs too, or in memory without a
//! store (`memory`); requests for it wait in `queue`. A transient one is what headers of clients name
//! (`transient`). [`SessionDirectory::check_out`] gives a request its session, or one of its branches, and
//! dropping [`Opened`] gives it back.
//!
//! Invariants: a request that opens a conversation has it alone until it is closed, and the next request
//! is told that it is busy; a conversation that was begun and came to no turn is removed again, and so is
//! a branch without a new turn. A request takes nothing away from what is saved: where it does not
//! continue its session or a branch, it begins another branch. Owners know nothing of each other's. All
//! calls but [`SessionDirectory::turn`] may wait for a disk: not on an async worker.

mod memory;
mod queue;
mod transient;

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use axum::http::StatusCode;
use parking_lot::Mutex;

use crate::engines::{EngineInstance, Engines};
use crate::error::ApiError;
use crate::gate::owner::{Caller, Owner};
use llmctl_base::{Error, Result};
use llmctl_engine::session::store::{
    BranchReason, Forgotten, Listed, ModelFingerprint, SavedSession, SessionName, SessionStore,
    SessionSummary, now_ms,
};
use llmctl_engine::turn::{SessionChat, num_repeated};
use llmctl_engine::{Difference, EngineClient, EngineSessionName, Reuse, Started};
use llmctl_template::Message;
use memory::MemoryStore;
use queue::SessionQueues;
pub use queue::SessionTurn;
pub use transient::{AFFINITY_HEADER, ROUTING_HEADERS, Transient, TransientBranch, TransientKey};
use transient::{HeldBranch, Transients};

/// Branches that requests may make of one session.
pub const MAX_BRANCHES: usize = 100;

/// Sessions whose last prompt and engine, or whose last branch, are known.
const MAX_RESUMES: usize = 4096;

/// Engines of different models that a session's routing remembers.
const MAX_ENGINES: usize = 8;

/// All sessions of a server. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct SessionDirectory {
    shared: Arc<DirectoryState>,
}

#[derive(Debug)]
struct DirectoryState {
    place: ConversationStore,
    transients: Transients,
    queues: SessionQueues,
    resumes: Mutex<HashMap<EngineSessionName, Resumes>>,
    /// The branch of a session that was continued last.
    last_branches: Mutex<HashMap<SessionKey, SessionKey>>,
}

/// Session that a request belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestSession {
    Stored(InSession),
    /// A client's hint: it costs the request nothing.
    Transient(TransientKey),
}

/// The part of a saved conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InSession {
    pub caller: Caller,
    pub name: SessionName,
    /// The messages are new ones behind those that are saved, instead of the whole conversation.
    pub appends: bool,
}

#[derive(Debug)]
enum ConversationStore {
    Disk(SessionStore),
    Memory(MemoryStore),
}

/// Key of a stored session. Each owner has names of its own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey {
    pub owner: Owner,
    pub name: SessionName,
}

impl SessionKey {
    /// The engine's name of the session. A name alone contains no slash.
    pub fn engine_name(&self) -> EngineSessionName {
        match self.owner.stored() {
            None => EngineSessionName::from(&self.name),
            Some(owner) => EngineSessionName::scoped(owner, &self.name),
        }
    }

    /// Returns the key of another session of the same owner.
    pub fn sibling(&self, name: SessionName) -> Self {
        Self { owner: self.owner.clone(), name }
    }
}

/// History of a session's KV since the server started.
#[derive(Debug, Clone, Default)]
pub struct Resumes {
    pub last: Option<Resume>,
    /// The last prompt that did not continue at the end of the session.
    pub last_miss: Option<(Resume, Difference)>,
    /// Changes that were made to what the last request said.
    pub notices: Vec<String>,
    /// The engines that it was with, the last one first; one of each model's.
    pub engines: Vec<EngineInstance>,
}

/// Reuse of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    pub prompt_tokens: usize,
    pub reuse: Reuse,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

impl SessionDirectory {
    /// Creates the directory. `store` keeps named sessions on disk; with `None` they live as long as the
    /// server. `max_branches` bounds the branches of transient sessions: as many as an engine keeps.
    pub fn new(store: Option<SessionStore>, max_branches: usize) -> Self {
        let place =
            store.map_or_else(|| ConversationStore::Memory(MemoryStore::default()), ConversationStore::Disk);
        let transients = Transients::new(max_branches);
        let (queues, resumes, last_branches) = Default::default();
        Self { shared: Arc::new(DirectoryState { place, transients, queues, resumes, last_branches }) }
    }

    /// Returns the transient sessions.
    pub fn transients(&self) -> &Transients {
        &self.shared.transients
    }

    /// Waits for a session's turn; at most `most_waiting` requests wait for any session.
    ///
    /// # Errors
    /// [`Error::QueueFull`].
    pub async fn turn(&self, session: &SessionKey, most_waiting: usize) -> Result<SessionTurn> {
        self.shared.queues.turn(&session.engine_name(), most_waiting).await
    }

    /// Returns the engine that a session was with, as long as that is up; else the one that it is routed
    /// to.
    ///
    /// # Errors
    /// 503 while none is up.
    pub fn engine_of(
        &self,
        engines: &Engines,
        session: &EngineSessionName,
    ) -> Result<EngineClient, ApiError> {
        let resumes = self.shared.resumes.lock();
        engines.of(session, resumes.get(session).map_or(&[], |resumes| &resumes.engines))
    }

    /// The session that a name means to a caller: one that there is, or that is to begin.
    pub fn find(&self, caller: &Caller, name: &SessionName) -> SessionKey {
        let key = |owner: &Owner| SessionKey { owner: owner.clone(), name: name.clone() };
        let known = caller.owners().map(key).find(|key| self.exists(key));
        known.unwrap_or_else(|| key(caller.owner()))
    }

    /// Returns true if the session exists, even if it is damaged.
    pub fn exists(&self, key: &SessionKey) -> bool {
        match &self.shared.place {
            ConversationStore::Disk(store) => of_owner(store, &key.owner).exists(&key.name),
            ConversationStore::Memory(memory) => memory.read(key).is_ok(),
        }
    }

    /// Opens what a request is the next turn of: a branch of a transient session; or the stored session in
    /// its `turn`, begun if there is none, or the branch that the messages continue, a new one where they
    /// continue none. `None` if all branches are in use.
    ///
    /// # Errors
    /// `session_busy` while another has it open, here or in another process; `too_many_branches`; storage
    /// errors.
    pub fn check_out(
        &self,
        session: &RequestSession,
        turn: Option<Arc<SessionTurn>>,
        model: &ModelFingerprint,
        messages: &[Message],
    ) -> Result<Option<Opened>, ApiError> {
        let InSession { caller, name, appends } = match session {
            RequestSession::Stored(session) => session,
            RequestSession::Transient(key) => {
                let branch = self.shared.transients.check_out(key, model, messages);
                return Ok(branch.map(|(held, session_chat)| Opened::transient(held, session_chat)));
            }
        };
        let key = self.find(caller, name);
        let main = match self.open_known(&key, Some(model)) {
            Err(Error::SessionNotFound(_)) => self.begin(&key, model).map_err(too_many_sessions)?,
            opened => opened?,
        };
        let mut opened = if *appends { main } else { self.continued(&key, main, messages, model)? };
        opened.turn = turn;
        Ok(Some(opened))
    }

    /// Returns the session if the messages continue it, else the branch that they continue, or a new one.
    fn continued(
        &self,
        key: &SessionKey,
        main: Opened,
        messages: &[Message],
        model: &ModelFingerprint,
    ) -> Result<Opened, ApiError> {
        let num_turns = main.saved().turns.len();
        let is_continued = num_repeated(main.saved(), messages) == num_turns;
        if is_continued && (num_turns > 0 || main.is_new) {
            return Ok(main);
        }
        let mut branch = match self.continued_branch(key, messages)? {
            Some(branch) => self.open_known(&branch, Some(model))?.branched(&key.name, false),
            None if is_continued => return Ok(main),
            None => self.begin_branch(&main, key, messages, model)?,
        };
        branch.lend(main.saved()); // what it replaces may have images
        Ok(branch)
    }

    /// Returns whether another session can be kept.
    pub fn has_room(&self) -> bool {
        match &self.shared.place {
            ConversationStore::Disk(_) => true,
            ConversationStore::Memory(memory) => memory.has_room(),
        }
    }

    fn begin(&self, key: &SessionKey, model: &ModelFingerprint) -> Result<Opened> {
        let session_chat = match &self.shared.place {
            ConversationStore::Disk(store) => {
                let writer = of_owner(store, &key.owner).open_or_create(&key.name, model)?;
                SessionChat::resume(writer, model.clone())
            }
            ConversationStore::Memory(memory) => memory.begin(key, model)?,
        };
        let is_new = session_chat.saved().turns.is_empty();
        Ok(self.opened(key, session_chat, is_new))
    }

    /// Opens a conversation that there is, for a model; without one, for that of its last turn.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`]; [`Error::Store`].
    pub fn open_known(&self, key: &SessionKey, model: Option<&ModelFingerprint>) -> Result<Opened> {
        let model_of = |saved: &SavedSession| model.unwrap_or(&saved.model).clone();
        let session_chat = match &self.shared.place {
            ConversationStore::Disk(store) => {
                let writer = of_owner(store, &key.owner).open(&key.name)?;
                let model = model_of(writer.saved());
                SessionChat::resume(writer, model)
            }
            ConversationStore::Memory(memory) => {
                let saved = memory.open(key)?;
                let model = model_of(&saved);
                SessionChat::look_at(saved, model)
            }
        };
        Ok(self.opened(key, session_chat, false))
    }

    fn opened(&self, key: &SessionKey, session_chat: SessionChat, is_new: bool) -> Opened {
        let home = Home::Stored { directory: self.clone(), key: key.clone(), branch: None };
        let num_turns = session_chat.saved().turns.len();
        Opened { home, is_new, num_turns, parts_from: None, session_chat: Some(session_chat), turn: None }
    }

    /// The longest branch of which the messages repeat all turns.
    fn continued_branch(&self, of: &SessionKey, messages: &[Message]) -> Result<Option<SessionKey>> {
        let is_continued = |saved: &SavedSession| {
            !saved.turns.is_empty() && num_repeated(saved, messages) == saved.turns.len()
        };
        let last = self.shared.last_branches.lock().get(of).cloned();
        if let Some(last) = last.filter(|last| self.read(last).is_ok_and(|(saved, _)| is_continued(&saved))) {
            return Ok(Some(last));
        }
        let branches = self.read_branches(of)?.into_iter().filter(|(_, saved)| is_continued(saved));
        let longest = branches.max_by_key(|(_, saved)| saved.turns.len()).map(|(key, _)| key);
        if let Some(branch) = &longest {
            self.note_branch(of, branch);
        }
        Ok(longest)
    }

    /// Notes the branch that continues a session. Beyond the limit all notes are dropped: the longest
    /// branch is then found by reading.
    fn note_branch(&self, of: &SessionKey, branch: &SessionKey) {
        let mut all = self.shared.last_branches.lock();
        if all.len() >= MAX_RESUMES {
            all.clear();
        }
        all.insert(of.clone(), branch.clone());
    }

    /// All branches that can be read.
    fn read_branches(&self, of: &SessionKey) -> Result<Vec<(SessionKey, SavedSession)>> {
        let keys = self.branches(of)?.into_iter().map(|listed| of.sibling(listed.name));
        Ok(keys.filter_map(|key| self.read(&key).ok().map(|(saved, _)| (key, saved))).collect())
    }

    /// A new branch of what has most turns in common with the messages, with those turns.
    fn begin_branch(
        &self,
        main: &Opened,
        of: &SessionKey,
        messages: &[Message],
        model: &ModelFingerprint,
    ) -> Result<Opened, ApiError> {
        let branches = self.read_branches(of)?;
        if branches.len() >= MAX_BRANCHES {
            return Err(too_many_branches(of, branches.len()));
        }
        let own = num_repeated(main.saved(), messages);
        let repeated = branches.iter().map(|(key, saved)| (num_repeated(saved, messages), key));
        let best = repeated.max_by_key(|(turns, _)| *turns).filter(|(turns, _)| *turns > own);
        let (turns, base) = best.map_or((own, of), |(turns, key)| (turns, key));
        let (key, session_chat) = match &self.shared.place {
            ConversationStore::Disk(store) => {
                let store = of_owner(store, &of.owner);
                let writer = store.branch(&base.name, Some(turns), BranchReason::Request)?;
                (of.sibling(writer.name().clone()), SessionChat::resume(writer, model.clone()))
            }
            ConversationStore::Memory(memory) => {
                let (key, saved) = memory.branch(base, turns)?;
                (key, SessionChat::look_at(saved, model.clone()))
            }
        };
        self.note_branch(of, &key);
        let mut branch = self.opened(&key, session_chat, true).branched(&of.name, true);
        branch.parts_from = Some(base.engine_name());
        Ok(branch)
    }

    /// The branches of a session, the oldest first.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::Store`].
    pub fn branches(&self, of: &SessionKey) -> Result<Vec<Listed>> {
        match &self.shared.place {
            ConversationStore::Disk(store) => of_owner(store, &of.owner).branches(&of.name),
            ConversationStore::Memory(memory) => memory.branches(of),
        }
    }

    /// Puts what a branch holds in the session's place; the branch that keeps what the session held, where
    /// there was anything.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming `branch` when it is none of this session; as
    /// [`Self::open_known`].
    pub fn restore(&self, opened: &mut Opened, branch: &SessionName) -> Result<Option<SessionName>> {
        match (&self.shared.place, &opened.home) {
            (ConversationStore::Memory(memory), Home::Stored { key, .. }) => {
                let key = key.clone();
                memory.restore(&key, opened, branch)
            }
            _ => opened.restore(branch),
        }
    }

    /// Empties a session; the branch that keeps what it held, where there was anything.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn reset(&self, opened: &mut Opened) -> Result<Option<SessionName>> {
        let kept = match (&self.shared.place, &opened.home) {
            (ConversationStore::Memory(memory), Home::Stored { key, .. }) => {
                memory.keep(key, opened.saved(), BranchReason::Reset)?
            }
            _ => opened.keep(BranchReason::Reset)?,
        };
        opened.rewind(0)?;
        Ok(kept)
    }

    /// Reads a conversation, also while it is open: then as it was before.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::Store`].
    pub fn read(&self, key: &SessionKey) -> Result<(SavedSession, SessionSummary)> {
        match &self.shared.place {
            ConversationStore::Disk(store) => {
                let store = of_owner(store, &key.owner);
                let saved = store.read(&key.name)?;
                let summary = SessionSummary::of(&saved, store.num_bytes(&key.name)?);
                Ok((saved, summary))
            }
            ConversationStore::Memory(memory) => {
                let saved = memory.read(key)?;
                let summary = SessionSummary::of(&saved, 0);
                Ok((saved, summary))
            }
        }
    }

    /// All conversations of an owner, by name.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn list(&self, owner: &Owner) -> Result<Vec<Listed>> {
        match &self.shared.place {
            ConversationStore::Disk(store) => of_owner(store, owner).list(),
            ConversationStore::Memory(memory) => Ok(memory.list(owner)),
        }
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`]; [`Error::Store`].
    pub fn remove(&self, key: &SessionKey) -> Result<()> {
        match &self.shared.place {
            ConversationStore::Disk(store) => {
                log_forgotten(&of_owner(store, &key.owner).remove(&key.name)?);
            }
            ConversationStore::Memory(memory) => memory.remove(key)?,
        }
        self.forget(&key.engine_name());
        self.shared.last_branches.lock().remove(key);
        Ok(())
    }

    /// # Errors
    /// [`Error::InvalidParameter`] naming `session` when the name is taken; as [`Self::remove`].
    pub fn rename(&self, from: &SessionKey, to: &SessionKey) -> Result<()> {
        match &self.shared.place {
            ConversationStore::Disk(store) => of_owner(store, &from.owner).rename(&from.name, &to.name)?,
            ConversationStore::Memory(memory) => memory.rename(from, to)?,
        }
        self.shared.last_branches.lock().remove(from);
        Ok(())
    }

    /// A new conversation with the first `turns` turns (all when `None`) of another; how many that are.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming `turns` when there are fewer, or `session` when the name is
    /// taken; as [`Self::read`].
    pub fn fork(&self, from: &SessionKey, to: &SessionKey, turns: Option<usize>) -> Result<usize> {
        match &self.shared.place {
            ConversationStore::Disk(store) => {
                let (old, new) = (of_owner(store, &from.owner), of_owner(store, &to.owner));
                let writer = old.fork_to(&from.name, (&new, &to.name), turns)?;
                Ok(writer.saved().turns.len())
            }
            ConversationStore::Memory(memory) => memory.fork(from, to, turns),
        }
    }

    /// Records how a session's prompt began, and the changes that were made to its request. Sessions that
    /// have not been used for long are forgotten.
    pub fn note(
        &self,
        engine_name: &EngineSessionName,
        started: &Started,
        engine: EngineInstance,
        notices: &[String],
    ) {
        let Started { prompt_tokens, reuse, difference, .. } = started;
        let resume = Resume { prompt_tokens: *prompt_tokens, reuse: *reuse, at_ms: now_ms() };
        let mut all = self.shared.resumes.lock();
        if all.len() >= MAX_RESUMES && !all.contains_key(engine_name) {
            let at = |resumes: &Resumes| resumes.last.map_or(0, |last| last.at_ms);
            let oldest = all.iter().min_by_key(|(_, resumes)| at(resumes)).map(|(name, _)| name.clone());
            oldest.and_then(|oldest| all.remove(&oldest));
        }
        let resumes = all.entry(engine_name.clone()).or_default();
        resumes.last = Some(resume);
        resumes.engines.retain(|other| !other.is_of_same_set(engine));
        resumes.engines.insert(0, engine);
        resumes.engines.truncate(MAX_ENGINES);
        resumes.notices = notices.to_vec();
        if let Some(difference) = difference {
            resumes.last_miss = Some((resume, difference.clone()));
        }
    }

    pub fn resumes(&self, engine_name: &EngineSessionName) -> Resumes {
        self.shared.resumes.lock().get(engine_name).cloned().unwrap_or_default()
    }

    /// Moves the notes about one session's prompts and engines to another session.
    pub fn hand_over(&self, from: &EngineSessionName, to: &EngineSessionName) {
        let mut all = self.shared.resumes.lock();
        if let Some(resumes) = all.remove(from) {
            all.insert(to.clone(), resumes);
        }
    }

    /// There is no such session any more.
    pub fn forget(&self, engine_name: &EngineSessionName) {
        self.shared.resumes.lock().remove(engine_name);
    }
}

/// A conversation with exclusive write access. Dropping it closes it, which may wait for the disk.
#[derive(Debug)]
pub struct Opened {
    home: Home,
    /// It began with this opening.
    is_new: bool,
    /// Turns that it had then.
    num_turns: usize,
    /// The engine's session that it parts from, where it began with this opening.
    parts_from: Option<EngineSessionName>,
    /// Always there until it is dropped.
    session_chat: Option<SessionChat>,
    /// Given up last.
    turn: Option<Arc<SessionTurn>>,
}

/// Destination of a conversation when it is closed.
#[derive(Debug)]
enum Home {
    Stored {
        directory: SessionDirectory,
        key: SessionKey,
        /// It is a branch of what was asked for.
        branch: Option<Branched>,
    },
    Transient(HeldBranch),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branched {
    pub of: SessionName,
    /// It began with this request.
    pub is_new: bool,
}

/// Place of a turn, as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// The session's, or the branch's.
    pub id: String,
    /// Those before it that it follows.
    pub kept_turns: usize,
    pub branch: Option<Branched>,
    pub is_transient: bool,
    /// Hash of the turn's receipt, once it is stored.
    pub receipt: Option<String>,
}

impl Opened {
    fn transient(held: HeldBranch, session_chat: SessionChat) -> Self {
        let num_turns = session_chat.saved().turns.len();
        let parts_from = held.parts_from.clone();
        let home = Home::Transient(held);
        Self { home, is_new: false, num_turns, parts_from, session_chat: Some(session_chat), turn: None }
    }

    fn branched(mut self, of: &SessionName, is_new: bool) -> Self {
        if let Home::Stored { branch, .. } = &mut self.home {
            *branch = Some(Branched { of: of.clone(), is_new });
        }
        self
    }

    /// The engine's name of the session.
    pub fn engine_name(&self) -> EngineSessionName {
        match &self.home {
            Home::Stored { key, .. } => key.engine_name(),
            Home::Transient(held) => held.name.clone(),
        }
    }

    /// The engine's session that holds what this one begins with, where it has just parted from it.
    pub fn parts_from(&self) -> Option<&EngineSessionName> {
        self.parts_from.as_ref()
    }

    pub fn is_transient(&self) -> bool {
        matches!(self.home, Home::Transient(_))
    }

    /// Returns the place of a turn that follows so many.
    pub fn placed(&self, kept_turns: usize) -> Placed {
        let (id, branch, is_transient) = match &self.home {
            Home::Stored { key, branch, .. } => (key.name.to_string(), branch.clone(), false),
            Home::Transient(held) => (held.key.id.clone(), None, true),
        };
        Placed { id, kept_turns, branch, is_transient, receipt: None }
    }

    /// Returns true if nothing of it will be left: it began with this opening and got no turn, or it was
    /// removed meanwhile.
    pub fn is_forgotten(&self) -> bool {
        match &self.home {
            Home::Stored { .. } => self.is_new && self.saved().turns.len() == self.num_turns,
            Home::Transient(held) => {
                let is_begun = self.num_turns == 0 || self.parts_from.is_some();
                held.is_removed() || (is_begun && self.saved().turns.len() == self.num_turns)
            }
        }
    }
}

impl Deref for Opened {
    type Target = SessionChat;

    fn deref(&self) -> &SessionChat {
        self.session_chat.as_ref().expect("taken by drop only")
    }
}

impl DerefMut for Opened {
    fn deref_mut(&mut self) -> &mut SessionChat {
        self.session_chat.as_mut().expect("taken by drop only")
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let is_forgotten = self.session_chat.is_some() && self.is_forgotten();
        let Some(session_chat) = self.session_chat.take() else { return };
        let (directory, key) = match &self.home {
            Home::Transient(held) => {
                return held.give_back((!is_forgotten).then(|| session_chat.saved().clone()));
            }
            Home::Stored { directory, key, .. } => (directory, key),
        };
        match &directory.shared.place {
            // The rest of a session that cannot be removed is listed and does no harm.
            ConversationStore::Disk(_) if is_forgotten => drop(session_chat.remove()),
            ConversationStore::Disk(_) => drop(session_chat),
            ConversationStore::Memory(memory) if is_forgotten => memory.forget(key),
            ConversationStore::Memory(memory) => memory.close(key, session_chat.saved().clone()),
        }
    }
}

/// Logs what an erasure of KV could not do.
pub fn log_forgotten(forgotten: &Forgotten) {
    let warnings = [forgotten.warning(), forgotten.problem.clone()];
    warnings.iter().flatten().for_each(|warning| tracing::warn!("{warning}"));
}

/// Returns the store of an owner's sessions.
fn of_owner(store: &SessionStore, owner: &Owner) -> SessionStore {
    owner.stored().map_or_else(|| store.clone(), |owner| store.of_owner(owner))
}

/// Of conversations that are kept in memory there are only so many: nothing goes unasked.
fn too_many_sessions(error: Error) -> ApiError {
    let Error::SessionsFull { capacity } = error else { return error.into() };
    let message = format!(
        "there are {capacity} sessions in memory already, and no folder to keep more in; delete some"
    );
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("too_many_sessions"), message)
}

fn too_many_branches(of: &SessionKey, count: usize) -> ApiError {
    let message = format!(
        "the request does not continue session {:?} or one of its {count} branches, and there may be no more branches; \
         delete some (DELETE /v1/sessions/ID) or use another session",
        of.name.as_str()
    );
    ApiError::new(StatusCode::CONFLICT, Some("too_many_branches"), message)
}
