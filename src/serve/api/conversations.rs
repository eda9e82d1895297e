//! The conversations behind session ids: on disk, where `run --session` and `chat` find them too, or in memory without a
//! store.
//!
//! Invariants: whoever opens a conversation has it alone until it is closed, and the next one is told that it is busy;
//! one that was begun and came to no turn is gone again. All calls may wait for a disk: not on an async worker.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::runtime::session::conversation::Dialogue;
use crate::runtime::session::store::{
    ForkOf, Listed, ModelFingerprint, SavedSession, SessionName, SessionStore, Summary, now_ms,
};
use crate::runtime::{Difference, Error, Result, Reuse, Started};

/// All conversations of a server. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct Conversations {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    place: Place,
    resumes: Mutex<HashMap<SessionName, Resumes>>,
}

#[derive(Debug)]
enum Place {
    Disk(SessionStore),
    Memory(Mutex<BTreeMap<SessionName, Kept>>),
}

/// A conversation in memory.
#[derive(Debug)]
struct Kept {
    /// As it was when it was last closed.
    saved: SavedSession,
    /// Nothing while it is open.
    dialogue: Option<Dialogue>,
}

/// What became of a session's KV in this server's time.
#[derive(Debug, Clone, Default)]
pub struct Resumes {
    pub last: Option<Resume>,
    /// The last prompt that did not go on where the session ended.
    pub last_miss: Option<(Resume, Difference)>,
}

/// How much of a prompt was reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    pub prompt_tokens: usize,
    pub reuse: Reuse,
    /// Milliseconds since 1970.
    pub at_ms: u64,
}

impl Conversations {
    pub fn new(store: Option<SessionStore>) -> Self {
        let place = store.map_or_else(|| Place::Memory(Mutex::default()), Place::Disk);
        Self { shared: Arc::new(Shared { place, resumes: Mutex::default() }) }
    }

    /// Opens a conversation, or begins it.
    ///
    /// # Errors
    /// [`Error::SessionBusy`] while another has it open, here or in another process; [`Error::Store`].
    pub fn open(&self, name: &SessionName, model: &ModelFingerprint) -> Result<Opened> {
        match self.open_known(name, model) {
            Err(Error::SessionNotFound(_)) => {}
            opened => return opened,
        }
        let dialogue = match &self.shared.place {
            Place::Disk(store) => Dialogue::resume(store.open_or_create(name, model)?, model.clone()),
            Place::Memory(kept) => {
                let dialogue = Dialogue::new(model.clone());
                let busy = Kept { saved: dialogue.saved().clone(), dialogue: None };
                if locked(kept).insert(name.clone(), busy).is_some() {
                    return Err(Error::SessionBusy(name.to_string())); // begun by another in between
                }
                dialogue
            }
        };
        Ok(self.opened(name, dialogue, true))
    }

    /// Opens a conversation that there is.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; as [`Self::open`].
    pub fn open_known(&self, name: &SessionName, model: &ModelFingerprint) -> Result<Opened> {
        let dialogue = match &self.shared.place {
            Place::Disk(store) => Dialogue::resume(store.open(name)?, model.clone()),
            Place::Memory(kept) => {
                let mut kept = locked(kept);
                let kept = kept.get_mut(name).ok_or_else(|| not_found(name))?;
                kept.dialogue.take().ok_or_else(|| Error::SessionBusy(name.to_string()))?
            }
        };
        Ok(self.opened(name, dialogue, false))
    }

    fn opened(&self, name: &SessionName, dialogue: Dialogue, is_new: bool) -> Opened {
        Opened { conversations: self.clone(), name: name.clone(), is_new, dialogue: Some(dialogue) }
    }

    /// Reads a conversation, also while it is open: then as it was before.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::Store`].
    pub fn read(&self, name: &SessionName) -> Result<(SavedSession, Summary)> {
        match &self.shared.place {
            Place::Disk(store) => {
                let saved = store.read(name)?;
                let num_bytes = store.num_bytes(name)?;
                let summary = Summary::of(&saved, num_bytes);
                Ok((saved, summary))
            }
            Place::Memory(kept) => {
                let kept = locked(kept);
                let saved = &kept.get(name).ok_or_else(|| not_found(name))?.saved;
                Ok((saved.clone(), Summary::of(saved, 0)))
            }
        }
    }

    /// All conversations, by name.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn list(&self) -> Result<Vec<Listed>> {
        match &self.shared.place {
            Place::Disk(store) => store.list(),
            Place::Memory(kept) => {
                let listed = |(name, kept): (&SessionName, &Kept)| Listed {
                    name: name.clone(),
                    summary: Ok(Summary::of(&kept.saved, 0)),
                };
                Ok(locked(kept).iter().map(listed).collect())
            }
        }
    }

    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`]; [`Error::Store`].
    pub fn remove(&self, name: &SessionName) -> Result<()> {
        match &self.shared.place {
            Place::Disk(store) => store.remove(name)?,
            Place::Memory(kept) => {
                let mut kept = locked(kept);
                let is_open = kept.get(name).ok_or_else(|| not_found(name))?.dialogue.is_none();
                if is_open {
                    return Err(Error::SessionBusy(name.to_string()));
                }
                kept.remove(name);
            }
        }
        locked(&self.shared.resumes).remove(name);
        Ok(())
    }

    /// A new conversation with the first `turns` turns (all when `None`) of another; how many that are.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming `turns` when there are fewer, or `session` when the name is taken; as
    /// [`Self::read`].
    pub fn fork(
        &self,
        from: &SessionName,
        to: &SessionName,
        turns: Option<usize>,
        model: &ModelFingerprint,
    ) -> Result<usize> {
        let kept = match &self.shared.place {
            Place::Disk(store) => return Ok(store.fork(from, to, turns)?.saved().turns.len()),
            Place::Memory(kept) => kept,
        };
        let mut kept = locked(kept);
        let saved = kept.get(from).ok_or_else(|| not_found(from))?.saved.clone();
        let refuse = |name, message| Err(Error::InvalidParameter { name, message });
        if kept.contains_key(to) {
            return refuse("session", format!("there is a session named {:?} already", to.as_str()));
        }
        let num_turns = turns.unwrap_or(saved.turns.len());
        if num_turns > saved.turns.len() {
            let message =
                format!("session {:?} has {} turns, not {num_turns}", from.as_str(), saved.turns.len());
            return refuse("turns", message);
        }
        let fork_of = ForkOf { name: from.to_string(), turns: num_turns, branch: None };
        let saved = saved.forked(fork_of, now_ms());
        let dialogue = Some(Dialogue::look_at(saved.clone(), model.clone()));
        kept.insert(to.clone(), Kept { saved, dialogue });
        Ok(num_turns)
    }

    /// Takes note of how a session's prompt began.
    pub fn note(&self, name: &SessionName, started: &Started) {
        let Started { prompt_tokens, reuse, difference, .. } = started;
        let resume = Resume { prompt_tokens: *prompt_tokens, reuse: *reuse, at_ms: now_ms() };
        let mut resumes = locked(&self.shared.resumes);
        let resumes = resumes.entry(name.clone()).or_default();
        resumes.last = Some(resume);
        if let Some(difference) = difference {
            resumes.last_miss = Some((resume, difference.clone()));
        }
    }

    pub fn resumes(&self, name: &SessionName) -> Resumes {
        locked(&self.shared.resumes).get(name).cloned().unwrap_or_default()
    }
}

/// A conversation that nobody else may write to. Dropping it closes it, which may wait for the disk.
#[derive(Debug)]
pub struct Opened {
    conversations: Conversations,
    name: SessionName,
    /// It began with this opening.
    is_new: bool,
    /// Always there until it is dropped.
    dialogue: Option<Dialogue>,
}

impl Opened {
    pub fn name(&self) -> &SessionName {
        &self.name
    }

    /// Whether nothing of it will be left: it began with this opening and came to no turn.
    pub fn is_forgotten(&self) -> bool {
        self.is_new && self.saved().turns.is_empty()
    }
}

impl Deref for Opened {
    type Target = Dialogue;

    fn deref(&self) -> &Dialogue {
        self.dialogue.as_ref().expect("taken by drop only")
    }
}

impl DerefMut for Opened {
    fn deref_mut(&mut self) -> &mut Dialogue {
        self.dialogue.as_mut().expect("taken by drop only")
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let is_forgotten = self.dialogue.is_some() && self.is_forgotten();
        let Some(dialogue) = self.dialogue.take() else { return };
        match &self.conversations.shared.place {
            Place::Disk(_) if is_forgotten => {
                let _ = dialogue.remove_if_empty(); // an empty session is listed, and harms nobody
            }
            Place::Disk(_) => drop(dialogue),
            Place::Memory(kept) if is_forgotten => drop(locked(kept).remove(&self.name)),
            Place::Memory(kept) => {
                let kept_one = Kept { saved: dialogue.saved().clone(), dialogue: Some(dialogue) };
                locked(kept).insert(self.name.clone(), kept_one);
            }
        }
    }
}

fn not_found(name: &SessionName) -> Error {
    Error::SessionNotFound(name.to_string())
}

/// What is behind these locks is whole at every moment, so that a panic elsewhere leaves nothing half-changed.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
