//! A session as its file tells it: records replayed in order.
//!
//! Pure: knows records, not files. Invariants: turns count from 1 without gaps; what a turn keeps was there before it, so
//! that the token ids of the whole conversation follow from the turns alone.

use std::sync::Arc;

use super::record::{Record, SCHEMA, TurnRecord, Unreadable};
use super::{ModelFingerprint, SessionName, Turn};
use crate::runtime::session::transcript::Transcript;
use crate::template::message::{Content, Message, Role};

/// A finished turn and the model that made it.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedTurn {
    pub turn: Turn,
    pub model: Arc<ModelFingerprint>,
}

/// Where a forked session comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkOf {
    /// The other session's name at that time.
    pub name: String,
    /// Turns taken over.
    pub turns: usize,
}

/// A conversation from disk. Cloning shares the turns.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedSession {
    /// Milliseconds since 1970, UTC; as all times here.
    pub created_ms: u64,
    /// When it was last added to or rewound.
    pub last_used_ms: u64,
    /// The model that the next turn is expected from.
    pub model: Arc<ModelFingerprint>,
    pub fork_of: Option<ForkOf>,
    /// The turns that count: those rewound are gone.
    pub turns: Vec<Arc<SavedTurn>>,
}

impl SavedSession {
    pub fn new(model: &ModelFingerprint, created_ms: u64) -> Self {
        Self {
            created_ms,
            last_used_ms: created_ms,
            model: Arc::new(model.clone()),
            fork_of: None,
            turns: Vec::new(),
        }
    }

    /// The conversation: the messages of all turns.
    pub fn messages(&self) -> impl Iterator<Item = &Message> {
        self.turns.iter().flat_map(|saved| &saved.turn.messages)
    }

    /// The system prompt that the conversation began with, when it is one text.
    pub fn system(&self) -> Option<&str> {
        let first = self.messages().next();
        let first = first.filter(|message| matches!(message.role, Role::System | Role::Developer))?;
        match &first.content {
            Some(Content::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// What the last turn left resident, where `model` gave it; nothing where another did, whose ids mean something else.
    pub fn tokens_of(&self, model: &ModelFingerprint) -> Option<Vec<u32>> {
        self.turns.last().filter(|saved| saved.model.is_same(model)).map(|_| self.tokens())
    }

    /// The ids of the whole conversation, the last answer included: what was resident after the last turn.
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

    /// The answers that can go back into prompts of `model` as they were generated: its own, whatever it was called then.
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

    /// The length of [`Self::tokens`].
    pub fn num_tokens(&self) -> usize {
        self.turns.last().map_or(0, |saved| saved.turn.num_tokens())
    }

    /// Takes one more record in; `Err` says what contradicts the records before it, and changes nothing.
    pub(super) fn apply(&mut self, record: Record) -> Result<(), String> {
        match record {
            Record::Header { .. } => return Err("a second header".to_owned()),
            Record::Model { model } => self.model = Arc::new(model.into()),
            Record::Turn { number, turn } => self.add_turn(number, *turn)?,
            Record::Truncate { turns, time_ms } => {
                if turns > self.turns.len() {
                    return Err(format!("a return to turn {turns} of {}", self.turns.len()));
                }
                self.turns.truncate(turns);
                self.last_used_ms = self.last_used_ms.max(time_ms);
            }
            Record::Rename { to, .. } => drop(SessionName::new(&to).map_err(|error| error.to_string())?),
            Record::ForkOf { name, turns, .. } => self.fork_of = Some(ForkOf { name, turns }),
        }
        Ok(())
    }

    fn add_turn(&mut self, number: usize, record: TurnRecord) -> Result<(), String> {
        let kept = number.checked_sub(1).and_then(|kept| self.turns.get(..kept));
        let kept = kept.ok_or_else(|| format!("turn {number} after turn {}", self.turns.len()))?;
        let num_kept_tokens = kept.last().map_or(0, |saved| saved.turn.num_tokens());
        let turn = Turn::try_from(record)?;
        if turn.messages.is_empty() {
            return Err("a turn without messages".to_owned());
        }
        if turn.kept_tokens > num_kept_tokens {
            return Err(format!("the turn keeps {} of {num_kept_tokens} tokens", turn.kept_tokens));
        }
        self.turns.truncate(number - 1);
        self.last_used_ms = self.last_used_ms.max(turn.finished_ms);
        self.turns.push(Arc::new(SavedTurn { turn, model: self.model.clone() }));
        Ok(())
    }

    /// The records that tell this session from its beginning, without what was rewound.
    pub(super) fn to_records(&self, name: &SessionName, time_ms: u64) -> Vec<Record> {
        let mut model = self.turns.first().map_or(&self.model, |saved| &saved.model);
        let mut records = vec![Record::Header {
            schema: SCHEMA.to_owned(),
            name: name.to_string(),
            created_ms: self.created_ms,
            model: (&**model).into(),
        }];
        let fork = |fork: &ForkOf| Record::ForkOf { name: fork.name.clone(), turns: fork.turns, time_ms };
        records.extend(self.fork_of.as_ref().map(fork));
        for (at, saved) in self.turns.iter().enumerate() {
            if saved.model != *model {
                model = &saved.model;
                records.push(Record::Model { model: (&**model).into() });
            }
            let turn = Box::new(TurnRecord::from(&saved.turn));
            records.push(Record::Turn { number: at + 1, turn });
        }
        if self.model != *model {
            records.push(Record::Model { model: (&*self.model).into() });
        }
        records
    }
}

/// Why a list of bodies is no session: which line, from 1, and how.
#[derive(Debug, PartialEq, Eq)]
pub enum Contradiction {
    Schema(String),
    Line { line: usize, message: String },
}

/// Replays a session. The second value is what it was before a line that could not be taken in, if one could not.
pub fn replay(bodies: &[&str]) -> (Option<SavedSession>, Option<Contradiction>) {
    let mut session: Option<SavedSession> = None;
    for (at, body) in bodies.iter().enumerate() {
        let taken = Record::from_body(body).map_err(|error| match error {
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

fn take(session: &mut Option<SavedSession>, record: Record) -> Result<(), String> {
    match (session.as_mut(), record) {
        (Some(session), record) => session.apply(record),
        (None, Record::Header { created_ms, model, .. }) => {
            *session = Some(SavedSession::new(&model.into(), created_ms));
            Ok(())
        }
        (None, _) => Err("the first line is not a header".to_owned()),
    }
}
