//! A saved session: its records replayed in order.
//!
//! Pure: knows records, not files. Invariants: turns count from 1 without gaps. A turn keeps only tokens of
//! earlier turns, so the turns alone determine the ids of the whole conversation.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::record::{Branch, BranchReason, LogRecord, StoredTurnRecord, Unreadable, Version};
use super::{Blobs, ModelFingerprint, SessionName, StoredTurn, blobs, now_ms};
use crate::session::transcript::Transcript;
use llmctl_base::error::{Error, Result};
use llmctl_image::ImageHash;
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;
use llmctl_models::kv::TokenBuf;
use llmctl_template::message::{Content, Message, Role};

/// A finished turn and the model that made it.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedTurn {
    pub turn: StoredTurn,
    pub model: Arc<ModelFingerprint>,
    /// A frontend's note beside the turn, which is no part of the conversation.
    pub note: Option<Value>,
}

impl SavedTurn {
    /// Returns the record of the note, if there is one; the turn counts from 1.
    pub(super) fn note_record(&self, number: usize) -> Option<LogRecord> {
        self.note.clone().map(|note| LogRecord::Note { number, note })
    }
}

/// Origin of a forked session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkOf {
    /// The other session's name at that time.
    pub name: String,
    /// Number of turns copied.
    pub turns: usize,
    /// Set if it is a branch of another session.
    pub branch: Option<Branch>,
}

/// A conversation from disk. Clones share the turns.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSession {
    /// Unique id, independent of the session's name.
    pub id: String,
    /// Owner of the API key that created it; `None` for the local user.
    pub owner: Option<String>,
    /// Milliseconds since 1970, UTC, as all times here.
    pub created_ms: u64,
    /// Time of the last append or rewind.
    pub last_used_ms: u64,
    /// Model expected to make the next turn.
    pub model: Arc<ModelFingerprint>,
    pub fork_of: Option<ForkOf>,
    /// Turns in force, without those rewound.
    pub turns: Vec<Arc<SavedTurn>>,
    /// Bytes of the turns' images.
    pub blobs: Blobs,
    /// Schema of the file.
    pub(super) version: Version,
    /// True if there are or were turns.
    pub(super) had_turns: bool,
}

impl SavedSession {
    pub fn new(model: &ModelFingerprint, created_ms: u64) -> Self {
        Self {
            id: Uuid::new_v4().to_string(),
            owner: None,
            created_ms,
            last_used_ms: created_ms,
            model: Arc::new(model.clone()),
            fork_of: None,
            turns: Vec::new(),
            blobs: Blobs::default(),
            version: Version::V2,
            had_turns: false,
        }
    }

    /// Returns a session with the first `turns` turns, all with `None`, and the same models and owner. `name` is this session's.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] naming `turns` if there are fewer.
    pub fn forked(&self, name: &SessionName, turns: Option<usize>) -> Result<Self> {
        let turns = turns.unwrap_or(self.turns.len());
        let Some(kept) = self.turns.get(..turns) else {
            let message = format!("session {:?} has {} turns, not {turns}", name.as_str(), self.turns.len());
            return Err(Error::InvalidParameter { name: "turns", message });
        };
        Ok(Self {
            owner: self.owner.clone(),
            had_turns: !kept.is_empty(),
            fork_of: Some(ForkOf { name: name.to_string(), turns, branch: None }),
            turns: kept.to_vec(),
            blobs: self.blobs.clone(),
            ..Self::new(&self.model, now_ms())
        })
    }

    /// As [`Self::forked`], as a branch of this session, or of its session if it is a branch.
    ///
    /// # Errors
    /// Those of [`Self::forked`].
    pub fn branched(&self, name: &SessionName, turns: Option<usize>, reason: BranchReason) -> Result<Self> {
        let mut forked = self.forked(name, turns)?;
        let branch = Some(Branch { of: self.root_id().to_owned(), reason });
        forked.fork_of.iter_mut().for_each(|fork| fork.branch = branch.clone());
        Ok(forked)
    }

    /// Returns the branch record, if the session is a branch.
    pub fn branch(&self) -> Option<&Branch> {
        self.fork_of.as_ref()?.branch.as_ref()
    }

    /// Returns the id that the session's branches refer to: its own, or its session's if it is a branch.
    pub fn root_id(&self) -> &str {
        self.branch().map_or(&self.id, |branch| &branch.of)
    }

    /// Returns the messages of all turns.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.turns.iter().flat_map(|saved| &saved.turn.messages)
    }

    /// Returns the first system prompt, if it is a single text.
    pub fn system(&self) -> Option<&str> {
        let first = self.messages().next();
        let first = first.filter(|message| matches!(message.role, Role::System | Role::Developer))?;
        match &first.content {
            Some(Content::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns the tokens after the last turn if `model` made it, else `None`, because another model's ids
    /// differ.
    pub fn tokens_of(&self, model: &ModelFingerprint) -> Option<TokenBuf> {
        let last = self.turns.last().filter(|saved| saved.model.is_same(model));
        last.map(|saved| TokenBuf {
            ids: self.tokens(),
            images: self.spans(),
            adapters: saved.turn.adapters.clone(),
        })
    }

    /// Returns the ids of the whole conversation, last answer included.
    pub fn tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.num_tokens());
        for saved in &self.turns {
            let turn = &saved.turn;
            tokens.truncate(turn.kept_tokens);
            tokens.extend_from_slice(&turn.prompt_tail);
            tokens.extend_from_slice(&turn.generated);
        }
        tokens
    }

    /// Returns the image rows among [`Self::tokens`], in ascending order.
    pub fn spans(&self) -> Vec<ImageSpan> {
        let mut spans: Vec<ImageSpan> = Vec::new();
        for saved in &self.turns {
            spans.retain(|span| span.rows.end <= saved.turn.kept_tokens);
            spans.extend_from_slice(&saved.turn.spans);
        }
        spans
    }

    /// Returns the hashes of all images that the turns and the notes on them name.
    pub fn named_images(&self) -> BTreeSet<ImageHash> {
        let notes = self.turns.iter().filter_map(|saved| saved.note.as_ref());
        let mut named: BTreeSet<ImageHash> = notes.flat_map(blobs::hashes_in_note).collect();
        named.extend(blobs::hashes(self.messages().flat_map(Message::images)));
        named
    }

    /// Returns the answers of `model`, whatever its name was, that can go back into prompts as ids.
    pub fn transcript(&self, model: &ModelFingerprint) -> Transcript {
        let messages: Vec<Message> = self.messages().cloned().collect();
        let mut end = 0;
        let known = self.turns.iter().filter_map(|saved| {
            end += saved.turn.messages.len();
            let after = saved.turn.splice_after.as_deref().filter(|_| saved.model.is_same(model))?;
            Some((end.checked_sub(1)?, after, saved.turn.generated.as_slice()))
        });
        Transcript::restored(&messages, known)
    }

    /// Returns the length of [`Self::tokens`].
    pub fn num_tokens(&self) -> usize {
        self.turns.last().map_or(0, |saved| saved.turn.num_tokens())
    }

    /// Applies a record. `Err` describes a contradiction to earlier records, and leaves the session
    /// unchanged.
    pub(super) fn apply(&mut self, record: LogRecord) -> Result<(), String> {
        if record.version() > self.version {
            return Err("a record of a later schema than the header's".to_owned());
        }
        match record {
            LogRecord::Header { .. } => return Err("a second header".to_owned()),
            LogRecord::Model { model } => self.model = Arc::new(model),
            LogRecord::Turn { number, turn } => self.add_turn(number, *turn)?,
            LogRecord::Note { number, note } => self.set_note(number, note)?,
            LogRecord::Truncate { turns, time_ms } => {
                if turns > self.turns.len() {
                    return Err(format!("a return to turn {turns} of {}", self.turns.len()));
                }
                self.turns.truncate(turns);
                self.last_used_ms = self.last_used_ms.max(time_ms);
            }
            LogRecord::Rename { to, .. } => {
                self.rename(&SessionName::new(&to).map_err(|error| error.to_string())?)
            }
            LogRecord::ForkOf { name, turns, branch, .. } => {
                self.fork_of = Some(ForkOf { name, turns, branch });
            }
        }
        Ok(())
    }

    /// Renames the session. A branch with a name of its own becomes an ordinary session.
    pub(super) fn rename(&mut self, to: &SessionName) {
        if let Some(fork) = self.fork_of.as_mut().filter(|_| !to.is_of_branch()) {
            fork.branch = None;
        }
    }

    fn add_turn(&mut self, number: usize, record: StoredTurnRecord) -> Result<(), String> {
        let kept = number.checked_sub(1).and_then(|kept| self.turns.get(..kept));
        let kept = kept.ok_or_else(|| format!("turn {number} after turn {}", self.turns.len()))?;
        let num_kept_tokens = kept.last().map_or(0, |saved| saved.turn.num_tokens());
        let turn = record.into_turn(kept.last().map(|saved| &saved.turn))?;
        if turn.messages.is_empty() {
            return Err("a turn without messages".to_owned());
        }
        let tail = turn.kept_tokens..turn.kept_tokens.saturating_add(turn.prompt_tail.len());
        let is_in_tail = |span: &ImageSpan| {
            tail.start <= span.rows.start && span.rows.start < span.rows.end && span.rows.end <= tail.end
        };
        if !turn.spans.iter().all(is_in_tail) || !turn.spans.is_sorted_by(|a, b| a.rows.end <= b.rows.start) {
            return Err("image rows that are not in the turn's prompt".to_owned());
        }
        if AdapterUse::list(turn.adapters.iter().copied()).as_ref() != Ok(&turn.adapters) {
            return Err("adapters that are not in order".to_owned());
        }
        if turn.kept_tokens > num_kept_tokens {
            return Err(format!("the turn keeps {} of {num_kept_tokens} tokens", turn.kept_tokens));
        }
        self.turns.truncate(number - 1);
        self.last_used_ms = self.last_used_ms.max(turn.finished_ms);
        self.turns.push(Arc::new(SavedTurn { turn, model: self.model.clone(), note: None }));
        self.had_turns = true;
        Ok(())
    }

    /// Replaces the note on a turn, which counts from 1. `Err` if there is no such turn.
    pub fn set_note(&mut self, number: usize, note: Value) -> Result<(), String> {
        let num_turns = self.turns.len();
        let turn = number.checked_sub(1).and_then(|at| self.turns.get_mut(at));
        let turn = turn.ok_or_else(|| format!("a note on turn {number} of {num_turns}"))?;
        Arc::make_mut(turn).note = Some(note);
        Ok(())
    }

    /// Returns the schema of a new file with this session's content.
    fn needed_version(&self) -> Version {
        if self.turns.iter().any(|saved| saved.turn.receipt.is_some()) {
            return Version::V6;
        }
        if self.turns.iter().any(|saved| !saved.turn.adapters.is_empty()) {
            return Version::V5;
        }
        let has_images = |saved: &Arc<SavedTurn>| {
            !saved.turn.spans.is_empty()
                || saved.turn.messages.iter().any(|message| message.images().next().is_some())
        };
        if self.turns.iter().any(has_images) {
            return Version::V4;
        }
        let has_notes = self.turns.iter().any(|saved| saved.note.is_some());
        if has_notes { Version::V3 } else { Version::V2 }
    }

    /// Returns the lines of a new file with this session.
    pub(super) fn bodies(&self, name: &SessionName) -> Vec<String> {
        self.to_records(name, now_ms()).iter().map(LogRecord::to_body).collect()
    }

    /// Returns the records that rebuild this session, without rewound turns.
    fn to_records(&self, name: &SessionName, time_ms: u64) -> Vec<LogRecord> {
        let mut model = self.turns.first().map_or(&self.model, |saved| &saved.model);
        let mut records = vec![LogRecord::Header {
            schema: self.version.max(self.needed_version()).schema(),
            name: name.to_string(),
            created_ms: self.created_ms,
            model: ModelFingerprint::clone(model),
            id: Some(self.id.clone()),
            owner: self.owner.clone(),
        }];
        let fork = |fork: &ForkOf| LogRecord::ForkOf {
            name: fork.name.clone(),
            turns: fork.turns,
            time_ms,
            branch: fork.branch.clone(),
        };
        records.extend(self.fork_of.as_ref().map(fork));
        for (at, saved) in self.turns.iter().enumerate() {
            if saved.model != *model {
                model = &saved.model;
                records.push(LogRecord::Model { model: ModelFingerprint::clone(model) });
            }
            let before = at.checked_sub(1).map(|before| &self.turns[before].turn);
            let turn = Box::new(StoredTurnRecord::following(&saved.turn, before));
            records.push(LogRecord::Turn { number: at + 1, turn });
            records.extend(saved.note_record(at + 1));
        }
        if self.model != *model {
            records.push(LogRecord::Model { model: ModelFingerprint::clone(&self.model) });
        }
        records
    }
}

/// Line, from 1, that contradicts earlier lines, and how.
#[derive(Debug, PartialEq, Eq)]
pub enum Contradiction {
    Schema(String),
    Line { line: usize, message: String },
}

/// Replays a session. If a line fails, returns the session before it and the contradiction.
pub fn replay(bodies: &[impl AsRef<str>]) -> (Option<SavedSession>, Option<Contradiction>) {
    let mut session: Option<SavedSession> = None;
    for (at, body) in bodies.iter().enumerate() {
        let taken = LogRecord::from_body(body.as_ref()).map_err(|error| match error {
            Unreadable::Schema(schema) => Contradiction::Schema(schema),
            Unreadable::Malformed(message) => Contradiction::Line { line: at + 1, message },
        });
        let taken = taken.and_then(|record| {
            take(&mut session, record).map_err(|message| Contradiction::Line { line: at + 1, message })
        });
        if let Err(contradiction) = taken {
            return (session, Some(contradiction));
        }
    }
    (session, None)
}

fn take(session: &mut Option<SavedSession>, record: LogRecord) -> Result<(), String> {
    match (session.as_mut(), record) {
        (Some(session), record) => session.apply(record),
        (None, record) => {
            *session = Some(begun(record)?);
            Ok(())
        }
    }
}

fn begun(header: LogRecord) -> Result<SavedSession, String> {
    let version = header.version();
    let LogRecord::Header { created_ms, model, id, owner, name, .. } = header else {
        return Err("the first line is not a header".to_owned());
    };
    let id = id.unwrap_or_else(|| id_of_v1(&name, created_ms));
    Ok(SavedSession { id, owner, version, ..SavedSession::new(&model, created_ms) })
}

/// Derives the id of a session of the first schema, which has none, from fields that never change.
pub(super) fn id_of_v1(name: &str, created_ms: u64) -> String {
    format!("v1-{created_ms}-{:08x}", crc32fast::hash(name.as_bytes()))
}
