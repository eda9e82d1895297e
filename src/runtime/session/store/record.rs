//! The format of a saved session's lines, up to `llmctl.session.v6`: types of their own, converted both ways.
//!
//! The types here are the format: a field is never renamed, and a new field means a new schema. Records that
//! an older llmctl would not understand are refused, not skipped. Each schema extends the one before it; a
//! file has the schema that its header names and contains nothing of a later one. Knows no file, no checksum
//! and no other record.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::blobs::{hashes, hashes_in_note};
use super::{ModelFingerprint, StoredTurn};
use crate::receipt::{AnswerRecipe, SamplingRecord};
use crate::request::{Finish, Usage};
use llmctl_image::ImageHash;
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::{ImageKey, ImageSpan};
use llmctl_models::load::fingerprint::sha256;
use llmctl_template::message::{Content, ImageRef, Message, Role, ToolCall};

const SCHEMA_FAMILY: &str = "llmctl.session.v";

/// Schema of a file, or of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    V1,
    /// Adds references of models, owners, ids and branches. New files begin with it.
    V2,
    /// Adds notes on turns.
    V3,
    /// Adds images in messages, and their rows.
    V4,
    /// Adds adapters of turns.
    V5,
    /// Adds receipts of turns.
    V6,
}

impl Version {
    const ALL: [Self; 6] = [Self::V1, Self::V2, Self::V3, Self::V4, Self::V5, Self::V6];
    pub const NEWEST: Self = Self::V6;

    fn of(schema: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.schema() == schema)
    }

    /// Returns the name in a header.
    pub fn schema(self) -> String {
        format!("{SCHEMA_FAMILY}{}", self as usize + 1)
    }
}

/// Returns whether this version reads files of the schema.
pub fn knows_schema(schema: &str) -> bool {
    Version::of(schema).is_some()
}

/// One line of the file. Times are milliseconds since 1970, UTC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum LogRecord {
    /// The first line. `name` is the session's name at its creation; the folder gives the current one.
    Header {
        schema: String,
        name: String,
        created_ms: u64,
        model: ModelFingerprint,
        /// Identifier of the session, independent of its name; required from the second schema on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// Owner of the API key that created it; `None` for the local user.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<String>,
    },
    /// Later turns come from another model, for which earlier ids are invalid.
    Model { model: ModelFingerprint },
    /// A finished turn. `number` counts from 1; it replaces turns from that number on.
    Turn { number: usize, turn: Box<StoredTurnRecord> },
    /// A frontend's note beside a turn, which counts from 1. It replaces an earlier note.
    Note { number: usize, note: Value },
    /// Only the first `turns` turns remain valid.
    Truncate { turns: usize, time_ms: u64 },
    /// The session was renamed.
    Rename { to: String, time_ms: u64 },
    /// The turns up to the next own one were copied from the first `turns` of another session.
    ForkOf {
        name: String,
        turns: usize,
        time_ms: u64,
        /// Set if the copy is a branch: it keeps earlier content, or content that did not continue the
        /// session.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        branch: Option<Branch>,
    },
}

/// Reference from a branch to its session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    /// Id of the session that the branch belongs to, even if that was renamed or removed. Never the id of a
    /// branch.
    pub of: String,
    pub reason: BranchReason,
}

/// Reason for creating a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum BranchReason {
    /// An earlier message was edited.
    Edit,
    /// An answer was regenerated.
    Retry,
    /// The last turns were undone.
    Undo,
    /// The conversation was emptied.
    Reset,
    /// An HTTP request did not continue the session.
    Request,
    /// Another branch replaced the session's conversation.
    Restore,
}

impl BranchReason {
    pub const ALL: [Self; 6] =
        [Self::Edit, Self::Retry, Self::Undo, Self::Reset, Self::Request, Self::Restore];

    /// Returns the reason's name in the file and in JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredTurnRecord {
    messages: Vec<MessageRecord>,
    kept_tokens: usize,
    prompt_tail: Vec<u32>,
    generated: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    spans: Vec<SpanRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    adapters: Vec<AdapterUse>,
    splice_after: Option<String>,
    sampling: SamplingRecord,
    #[serde(with = "FinishRecord")]
    finish: Finish,
    usage: UsageRecord,
    started_ms: u64,
    finished_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    receipt: Option<ReceiptRecord>,
}

/// What decides the turn's answer beside the turn itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReceiptRecord {
    /// Absent if it is that of the turn before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recipe: Option<Box<AnswerRecipe>>,
    #[serde(default, skip_serializing_if = "llmctl_base::units::is_zero")]
    given: usize,
    hash: String,
}

/// A run of image rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpanRecord {
    /// First position in the conversation, and the one behind the last.
    rows: [usize; 2],
    key: ImageKey,
    /// The embedding of the first row.
    first: usize,
    /// Rows and columns of the tile.
    grid: [u32; 2],
}

impl From<&ImageSpan> for SpanRecord {
    fn from(span: &ImageSpan) -> Self {
        let ImageSpan { rows, key, first, grid } = span;
        Self { rows: [rows.start, rows.end], key: *key, first: *first, grid: *grid }
    }
}

impl From<SpanRecord> for ImageSpan {
    fn from(record: SpanRecord) -> Self {
        let SpanRecord { rows: [start, end], key, first, grid } = record;
        Self { rows: start..end, key, first, grid }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageRecord {
    role: String,
    /// Text, a list of parts, or null.
    content: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCallRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCallRecord {
    id: Option<String>,
    name: String,
    arguments: Value,
}

/// The form of a [`Finish`] in the file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Finish", rename_all = "snake_case")]
enum FinishRecord {
    Eos(u32),
    Complete,
    StopString(String),
    MaxTokens,
    ContextFull,
    Cancelled,
    Deadline,
    Repetition,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UsageRecord {
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    /// Reasoning that repeated itself was ended. Absent otherwise, because readers older than it refuse it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    looped_reasoning: bool,
}

/// Reason why a body is not a record.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// The name of an unknown schema.
    #[error("the schema {0:?} is unknown")]
    Schema(String),
    #[error("{0}")]
    Malformed(String),
}

impl LogRecord {
    pub fn to_body(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers, lists and string-keyed maps are always JSON")
    }

    /// Parses a body.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn from_body(body: &str) -> Result<Self, Unreadable> {
        check_schema(body)?;
        let record: Self = serde_json::from_str(body)
            .map_err(|error| Unreadable::Malformed(shortened(&error.to_string())))?;
        record.check_header().map_err(Unreadable::Malformed)?;
        Ok(record)
    }

    /// Returns the schema that a file needs to contain this record; for a header, the one it names.
    pub fn version(&self) -> Version {
        let is_second = match self {
            Self::Header { schema, .. } => return Version::of(schema).unwrap_or(Version::V2),
            Self::Model { model } => model.reference.is_some(),
            Self::ForkOf { branch, .. } => branch.is_some(),
            Self::Turn { turn, .. } if turn.receipt.is_some() => return Version::V6,
            Self::Turn { turn, .. } if !turn.adapters.is_empty() => return Version::V5,
            Self::Turn { turn, .. } if turn.has_images() => return Version::V4,
            Self::Note { .. } => return Version::V3,
            Self::Turn { .. } | Self::Truncate { .. } | Self::Rename { .. } => false,
        };
        if is_second { Version::V2 } else { Version::V1 }
    }

    /// Returns the hashes of the images that the record names.
    pub fn named_images(&self) -> BTreeSet<ImageHash> {
        match self {
            Self::Turn { turn, .. } => hashes(turn.images()),
            Self::Note { note, .. } => hashes_in_note(note),
            _ => BTreeSet::new(),
        }
    }

    fn check_header(&self) -> Result<(), String> {
        let Self::Header { id, owner, model, .. } = self else { return Ok(()) };
        match self.version() {
            Version::V1 if id.is_some() || owner.is_some() || model.reference.is_some() => {
                Err(format!("a header of {} with fields of a later schema", Version::V1.schema()))
            }
            Version::V2 | Version::V3 | Version::V4 | Version::V5 | Version::V6 if id.is_none() => {
                Err("a header without an id".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl StoredTurnRecord {
    /// Returns a turn behind `before`, whose recipe is not repeated.
    pub fn following(turn: &StoredTurn, before: Option<&StoredTurn>) -> Self {
        let mut record = Self::from(turn);
        let known = before.and_then(|before| before.receipt.as_ref());
        if let Some((receipt, known)) = record.receipt.as_mut().zip(known) {
            receipt.recipe = receipt.recipe.take().filter(|recipe| **recipe != *known.recipe);
        }
        record
    }

    /// Returns the turn behind `before`.
    ///
    /// # Errors
    /// A field that contradicts others.
    pub fn into_turn(self, before: Option<&StoredTurn>) -> Result<StoredTurn, String> {
        let known = before.and_then(|before| before.receipt.as_ref()).map(|receipt| &receipt.recipe);
        let receipt = self.receipt.clone().map(|ReceiptRecord { recipe, given, hash }| {
            let recipe = recipe.map(|recipe| Arc::new(*recipe)).or_else(|| known.cloned());
            let recipe = recipe.ok_or("a receipt without its recipe")?;
            Ok::<_, &str>(TurnReceipt { recipe, given, hash })
        });
        Ok(StoredTurn { receipt: receipt.transpose()?, ..StoredTurn::try_from(self)? })
    }

    fn images(&self) -> impl Iterator<Item = ImageRef> {
        let parts = self.messages.iter().filter_map(|message| message.content.as_array());
        parts.flatten().filter_map(ImageRef::of)
    }

    fn has_images(&self) -> bool {
        !self.spans.is_empty() || self.images().next().is_some()
    }
}

/// Most characters of a message that quotes a file.
const MAX_QUOTED: usize = 300;

/// Shortens a message that quotes a file's content.
pub fn shortened(message: &str) -> String {
    match message.char_indices().nth(MAX_QUOTED) {
        None => message.to_owned(),
        Some((end, _)) => format!("{}...", &message[..end]),
    }
}

/// Checks a header's schema first, because its other fields may differ.
fn check_schema(body: &str) -> Result<(), Unreadable> {
    #[derive(Deserialize)]
    struct Header {
        r#type: String,
        schema: String,
    }
    match serde_json::from_str::<Header>(body) {
        Ok(header) if header.r#type == "header" && Version::of(&header.schema).is_none() => {
            if header.schema.starts_with(SCHEMA_FAMILY) {
                return Err(Unreadable::Schema(shortened(&header.schema)));
            }
            Err(Unreadable::Malformed(format!("unknown schema {:?}", shortened(&header.schema))))
        }
        _ => Ok(()),
    }
}

impl From<&StoredTurn> for StoredTurnRecord {
    fn from(turn: &StoredTurn) -> Self {
        Self {
            messages: turn.messages.iter().map(MessageRecord::from).collect(),
            kept_tokens: turn.kept_tokens,
            prompt_tail: turn.prompt_tail.clone(),
            generated: turn.generated.clone(),
            spans: turn.spans.iter().map(SpanRecord::from).collect(),
            adapters: turn.adapters.clone(),
            splice_after: turn.splice_after.clone(),
            sampling: SamplingRecord::from(&turn.sampling),
            finish: turn.finish.clone(),
            usage: UsageRecord {
                prompt_tokens: turn.usage.prompt_tokens,
                cached_tokens: turn.usage.cached_tokens,
                completion_tokens: turn.usage.completion_tokens,
                looped_reasoning: turn.usage.looped_reasoning,
            },
            started_ms: turn.started_ms,
            finished_ms: turn.finished_ms,
            receipt: turn.receipt.as_ref().map(|TurnReceipt { recipe, given, hash }| ReceiptRecord {
                recipe: Some(Box::new(AnswerRecipe::clone(recipe))),
                given: *given,
                hash: hash.clone(),
            }),
        }
    }
}

impl TryFrom<StoredTurnRecord> for StoredTurn {
    type Error = String;

    fn try_from(record: StoredTurnRecord) -> Result<Self, String> {
        Ok(Self {
            messages: record.messages.into_iter().map(Message::try_from).collect::<Result<_, _>>()?,
            kept_tokens: record.kept_tokens,
            prompt_tail: record.prompt_tail,
            generated: record.generated,
            spans: record.spans.into_iter().map(ImageSpan::from).collect(),
            adapters: record.adapters,
            splice_after: record.splice_after,
            sampling: record.sampling.into(),
            finish: record.finish,
            usage: Usage {
                prompt_tokens: record.usage.prompt_tokens,
                cached_tokens: record.usage.cached_tokens,
                completion_tokens: record.usage.completion_tokens,
                looped_reasoning: record.usage.looped_reasoning,
                ..Usage::default()
            },
            started_ms: record.started_ms,
            finished_ms: record.finished_ms,
            receipt: None,
        })
    }
}

/// What a turn records beside its fields.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnReceipt {
    pub recipe: Arc<AnswerRecipe>,
    /// Number of the first generated tokens that the request gave.
    pub given: usize,
    /// Hash of the receipt, see [`Receipt::hash`].
    pub hash: String,
}

/// Returns the SHA-256 of messages as a file has them, in hexadecimal digits.
pub fn messages_sha256(messages: &[Message]) -> String {
    let records: Vec<MessageRecord> = messages.iter().map(MessageRecord::from).collect();
    sha256(&[serde_json::to_string(&records).expect("messages are always JSON").as_bytes()])
}

impl From<&Message> for MessageRecord {
    fn from(message: &Message) -> Self {
        let call = |call: &ToolCall| ToolCallRecord {
            id: call.id.clone(),
            name: call.name.clone(),
            arguments: call.arguments.clone(),
        };
        Self {
            role: message.role.as_str().to_owned(),
            content: match &message.content {
                None => Value::Null,
                Some(Content::Text(text)) => Value::String(text.clone()),
                Some(Content::Parts(parts)) => Value::Array(parts.clone()),
            },
            reasoning: message.reasoning.clone(),
            tool_calls: message.tool_calls.iter().map(call).collect(),
            tool_call_id: message.tool_call_id.clone(),
            name: message.name.clone(),
        }
    }
}

impl TryFrom<MessageRecord> for Message {
    type Error = String;

    fn try_from(record: MessageRecord) -> Result<Self, String> {
        let content = match record.content {
            Value::Null => None,
            Value::String(text) => Some(Content::Text(text)),
            Value::Array(parts) => Some(Content::Parts(parts)),
            _ => return Err("content is neither a text, a list nor null".to_owned()),
        };
        let call =
            |call: ToolCallRecord| ToolCall { id: call.id, name: call.name, arguments: call.arguments };
        Ok(Self {
            role: Role::from(record.role.as_str()),
            content,
            reasoning: record.reasoning,
            tool_calls: record.tool_calls.into_iter().map(call).collect(),
            tool_call_id: record.tool_call_id,
            name: record.name,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use llmctl_base::{SamplerStep, Sampling};

    fn rich_turn() -> StoredTurn {
        let mut answer = Message::assistant("see \u{2028} \"this\"\n\0");
        answer.reasoning = Some("hm".to_owned());
        answer.tool_calls = vec![
            ToolCall {
                id: Some("c1".to_owned()),
                name: "f".to_owned(),
                arguments: json!({"b": 0.1, "a": [null]}),
            },
            ToolCall { id: None, name: "g".to_owned(), arguments: json!("not json {") },
        ];
        let mut result = Message::new(Role::Tool, "42");
        (result.tool_call_id, result.name) = (Some("c1".to_owned()), Some("f".to_owned()));
        let mut parts = Message::user("");
        parts.content = Some(Content::Parts(vec![json!({"type": "text", "text": "x"})]));
        let mut silent = Message::assistant("");
        silent.content = None;
        let sampling = Sampling {
            temperature: 0.7,
            top_k: Some(40),
            top_p: 0.95,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: -0.3,
            frequency_penalty: 1e-7,
            repeat_last_n: 64.0,
            typical_p: 0.9,
            top_n_sigma: 1.5,
            dry_multiplier: 0.8,
            dry_base: 1.5,
            dry_allowed_length: 3.0,
            dry_penalty_last_n: 256.0,
            xtc_probability: 0.5,
            xtc_threshold: 0.2,
            dynatemp_range: 0.3,
            dynatemp_exponent: 2.0,
            mirostat: 2.0,
            mirostat_tau: 4.0,
            mirostat_eta: 0.2,
            samplers: Some(vec![SamplerStep::Dry, SamplerStep::TypicalP, SamplerStep::Temperature]),
            dry_sequence_breakers: Some(vec!["\n".to_owned(), "user:".to_owned()]),
            logit_bias: [(7, -100.0), (u32::MAX, 0.1)].into(),
            seed: Some(u64::MAX),
        };
        StoredTurn {
            messages: vec![
                parts,
                Message::new(Role::Other("critic".to_owned()), "x"),
                silent,
                result,
                answer,
            ],
            kept_tokens: 3,
            prompt_tail: vec![1, u32::MAX],
            generated: vec![],
            spans: Vec::new(),
            adapters: Vec::new(),
            splice_after: Some("<|im_start|>assistant\n".to_owned()),
            sampling,
            finish: Finish::Eos(2),
            usage: Usage {
                prompt_tokens: 5,
                cached_tokens: 3,
                completion_tokens: 0,
                looped_reasoning: true,
                ..Usage::default()
            },
            started_ms: 1,
            finished_ms: u64::MAX,
            receipt: None,
        }
    }

    #[test]
    fn every_record_comes_back_as_it_went() {
        let old = ModelFingerprint { name: "m".to_owned(), fingerprint: "f".to_owned(), reference: None };
        let model = ModelFingerprint { reference: Some("/models/m.gguf".to_owned()), ..old.clone() };
        let header =
            |version, model: &ModelFingerprint, id: Option<&str>, owner: Option<&str>| LogRecord::Header {
                schema: version,
                name: "n".into(),
                created_ms: 1,
                model: model.clone(),
                id: id.map(str::to_owned),
                owner: owner.map(str::to_owned),
            };
        let span = ImageSpan { rows: 4..5, key: ImageKey([9; 32]), first: 0, grid: [1, 1] };
        let mut turns = vec![rich_turn(), StoredTurn { spans: vec![span], ..rich_turn() }];
        let cut =
            [Finish::Complete, Finish::MaxTokens, Finish::ContextFull, Finish::Cancelled, Finish::Deadline];
        for finish in cut.into_iter().chain([Finish::Repetition, Finish::StopString("\n".to_owned())]) {
            turns.push(StoredTurn { finish, splice_after: None, ..rich_turn() });
        }
        let mut records = vec![
            header(Version::V1.schema(), &old, None, None),
            header(Version::V2.schema(), &model, Some("i"), None),
            header(Version::V2.schema(), &old, Some("i"), Some("anna")),
            LogRecord::Model { model },
            LogRecord::Model { model: old },
            LogRecord::Note { number: 1, note: json!({"a": [null, "b"]}) },
            LogRecord::Truncate { turns: 0, time_ms: 2 },
            LogRecord::Rename { to: "b".into(), time_ms: 3 },
            LogRecord::ForkOf { name: "a".into(), turns: 1, time_ms: 4, branch: None },
        ];
        for reason in BranchReason::ALL {
            let branch = Some(Branch { of: "i".into(), reason });
            records.push(LogRecord::ForkOf { name: "a".into(), turns: 1, time_ms: 4, branch });
        }
        for turn in turns {
            let record = StoredTurnRecord::from(&turn);
            assert_eq!(StoredTurn::try_from(record.clone()), Ok(turn));
            records.push(LogRecord::Turn { number: 1, turn: Box::new(record) });
        }
        for record in records {
            let body = record.to_body();
            assert!(!body.contains('\n'), "one line: {body}");
            assert_eq!(LogRecord::from_body(&body), Ok(record));
        }
    }

    #[test]
    fn a_recipe_is_written_once_for_turns_that_share_it() {
        let with = |stop: &str, given| {
            let recipe = AnswerRecipe { stop: vec![stop.to_owned()], ..AnswerRecipe::default() };
            StoredTurn {
                receipt: Some(TurnReceipt { recipe: recipe.into(), given, hash: "h".to_owned() }),
                ..rich_turn()
            }
        };
        let (first, second, other) = (with("a", 0), with("a", 2), with("b", 0));
        for (turn, before, is_whole) in [
            (&first, None, true),
            (&first, Some(&rich_turn()), true),
            (&second, Some(&first), false),
            (&other, Some(&second), true),
        ] {
            let record = StoredTurnRecord::following(turn, before);
            let has_recipe = record.receipt.as_ref().is_some_and(|receipt| receipt.recipe.is_some());
            assert_eq!(has_recipe, is_whole);
            let line = LogRecord::Turn { number: 1, turn: Box::new(record) };
            assert_eq!(line.version(), Version::V6);
            let Ok(LogRecord::Turn { turn: read, .. }) = LogRecord::from_body(&line.to_body()) else {
                panic!("{}", line.to_body())
            };
            assert_eq!(read.into_turn(before).as_ref(), Ok(turn));
        }
        let alone = StoredTurnRecord::following(&second, Some(&first));
        assert_eq!(alone.into_turn(Some(&rich_turn())), Err("a receipt without its recipe".to_owned()));
    }

    /// A turn as it was written before `typical_p` and `top_n_sigma`.
    const OLD_TURN: &str = r#"{"type":"turn","number":1,"turn":{"messages":[{"role":"user","content":"q"}],"kept_tokens":0,"prompt_tail":[1,2],"generated":[3],"splice_after":"x","sampling":{"temperature":0.7,"top_k":4,"top_p":0.95,"min_p":0.05,"repetition_penalty":1.1,"presence_penalty":-0.3,"frequency_penalty":1e-7,"logit_bias":[[1,2.0]],"seed":1},"finish":"complete","usage":{"prompt_tokens":2,"cached_tokens":0,"completion_tokens":1},"started_ms":1,"finished_ms":2}}"#;

    #[test]
    fn old_turns_open_and_turns_without_new_parameters_are_written_as_before() {
        let Ok(LogRecord::Turn { turn, .. }) = LogRecord::from_body(OLD_TURN) else { panic!("it opens") };
        let expected = Sampling {
            temperature: 0.7,
            top_k: Some(4),
            top_p: 0.95,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: -0.3,
            frequency_penalty: 1e-7,
            logit_bias: [(1, 2.0)].into(),
            seed: Some(1),
            ..Sampling::default()
        };
        let stored = StoredTurn::try_from(*turn).expect("a turn");
        assert_eq!(stored.sampling, expected);
        let written =
            LogRecord::Turn { number: 1, turn: Box::new(StoredTurnRecord::from(&stored)) }.to_body();
        let value = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        assert_eq!(value(&written), value(OLD_TURN), "older readers refuse fields that they do not know");

        let unknown = OLD_TURN.replace("min_p", "min_q");
        assert!(matches!(LogRecord::from_body(&unknown), Err(Unreadable::Malformed(_))));
    }

    #[test]
    fn what_another_version_wrote_is_refused() {
        let header = |schema: &str| format!(r#"{{"type":"header","schema":"{schema}","new":{{}}}}"#);
        assert_eq!(
            LogRecord::from_body(&header("llmctl.session.v7")),
            Err(Unreadable::Schema("llmctl.session.v7".into()))
        );
        for malformed in [
            &*header("other.v1"),
            &*header(&Version::V2.schema()),
            &*header(&Version::V1.schema()),
            r#"{"type":"header","schema":"llmctl.session.v1","name":"a","created_ms":1,"model":{"name":"m","fingerprint":"f"},"id":"i"}"#,
            r#"{"type":"header","schema":"llmctl.session.v1","name":"a","created_ms":1,"model":{"name":"m","fingerprint":"f","reference":"r"}}"#,
            r#"{"type":"header","schema":"llmctl.session.v2","name":"a","created_ms":1,"model":{"name":"m","fingerprint":"f"}}"#,
            r#"{"type":"fork_of","name":"a","turns":1,"time_ms":2,"branch":{"of":"i","reason":"whim"}}"#,
            r#"{"type":"telepathy"}"#,
            r#"{"type":"truncate","turns":1,"time_ms":2,"new":3}"#,
            r#"{"type":"truncate","turns":-1,"time_ms":2}"#,
            "[]",
            "",
        ] {
            assert!(matches!(LogRecord::from_body(malformed), Err(Unreadable::Malformed(_))), "{malformed}");
        }
    }

    #[test]
    fn what_a_message_quotes_is_short() {
        let body = format!(r#"{{"type":"{}"}}"#, "t".repeat(1_000_000));
        let schema = format!(r#"{{"type":"header","schema":"llmctl.session.v{}"}}"#, "9".repeat(1_000_000));
        for body in [body, schema.replace("session.v", "v"), schema] {
            let message = LogRecord::from_body(&body).expect_err("unknown").to_string();
            assert!(message.len() < 400, "{} bytes", message.len());
        }
    }
}
