//! The worker protocol as types: [`WorkerCall`]s go to a worker, [`Reply`]s come back, each one line of JSON.
//!
//! Invariants: what is written is read back as the same value, so that an engine behind a pipe is asked and answers as one in
//! this process does (a grammar travels as its source); a call with a field that is not known is refused, so that nothing a
//! client asks for is passed over; a line is at most [`MAX_LINE_BYTES`] long; bytes that are not UTF-8 become U+FFFD.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::runtime::engine::{EngineLoad, SessionDetail, SessionInfo};
use crate::runtime::error::{Error, Result};
use crate::runtime::grammar::{Grammar, GrammarSource};
use crate::runtime::request::{
    Event, Finish, Limits, Logprob, Outcome, Overflow, Request, Reuse, ReuseReason, Sampling,
    SamplingNumbers, Started, Timings, Token, Usage,
};
use crate::runtime::spec::EngineSpec;

/// What [`Ready::protocol`] says; another number is another language.
pub const VERSION: u32 = 1;

/// The longest line, its end excluded: a prompt of several million ids.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// Bytes of an id of a client's own: it comes back with every token.
pub const MAX_ID_BYTES: usize = 256;

/// All that can be asked, by its name on the wire.
pub const OPS: [&str; 13] = [
    "generate", "open", "close", "reset", "fork", "restore", "inspect", "sessions", "cancel", "ping",
    "notices", "flush", "shutdown",
];

/// Names a call among those under way; every line that answers it says it again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Id {
    Number(i64),
    Text(String),
}

/// A line to the worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerCall {
    /// Without one it is answered before the next one without one is looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<Id>,
    #[serde(flatten)]
    pub op: Op,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    Generate(Box<Generate>),
    Open(Named),
    Close(Named),
    Reset(Named),
    Fork(Fork),
    Restore(Restore),
    Inspect(Named),
    Sessions(Nothing),
    Cancel(Cancel),
    Ping(Nothing),
    Notices(Nothing),
    Flush(Flush),
    Shutdown(Nothing),
}

/// A generation. Its defaults are the reference server's, not those of [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Generate {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_segments: Option<Vec<PromptSegment>>,
    /// 0 and less: what is left of the context.
    pub max_new_tokens: i64,
    pub overflow: Overflow,
    /// 0 is off.
    pub top_k: usize,
    /// Refuses unknown fields, too.
    #[serde(flatten)]
    pub numbers: SamplingNumbers,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<u32, f32>,
    /// 0 draws one.
    pub seed: u64,
    /// The seed, be it 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_seed: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Empty is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub session_id: String,
    pub ignore_eos: bool,
    pub render_special: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub markup: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<usize>,
    /// No answer: the prompt's log-probabilities are all.
    #[serde(skip_serializing_if = "is_false")]
    pub prompt_only: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<GrammarSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<f64>,
    /// Whether to tell all that an [`Event`] tells.
    pub events: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// A part of a prompt: one of the two; where both are given, the ids count.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromptSegment {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
}

/// Of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    pub session_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    pub session_id: String,
    pub to: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    pub session_id: String,
    pub tokens: Vec<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cancel {
    /// Nothing: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<Id>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flush {
    pub timeout_ms: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// A line that is no call, and what of it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub id: Option<Id>,
    pub code: ErrorCode,
    pub message: String,
}

/// A line from the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// The call's that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Id>,
    #[serde(flatten)]
    pub answer: ReplyBody,
}

/// Which one it is, is told by the field that it begins with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum ReplyBody {
    Token(TextLine),
    Done(Box<DoneLine>),
    Error(ErrorLine),
    Queued {
        queued: usize,
    },
    Started {
        started: Started,
    },
    Progress {
        progress: PrefillProgress,
    },
    Prompt {
        prompt_logprobs: Vec<Logprob>,
    },
    /// Here and below, `existed` says whether there was such a session; calls without an id are not told.
    Opened {
        opened: Yes,
        session_id: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    Closed {
        closed: Yes,
        session_id: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    Reset {
        reset: Yes,
        session_id: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    Forked {
        forked: Yes,
        session_id: String,
        to: String,
    },
    Restored {
        restored: Yes,
        session_id: String,
    },
    Session {
        session: SessionDetail,
    },
    Sessions {
        sessions: Vec<SessionInfo>,
    },
    Cancelled {
        cancelled: usize,
    },
    Pong {
        pong: Yes,
        load: EngineLoad,
    },
    Notices {
        notices: Vec<String>,
    },
    Flushed {
        flushed: bool,
    },
    Bye {
        bye: Yes,
    },
    Ready(Box<Ready>),
}

/// `true`, and nothing else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Yes;

/// New text. The ids are told only where `events` were asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextLine {
    pub token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<Token>>,
}

/// Prompt tokens computed so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillProgress {
    pub done: usize,
    pub total: usize,
}

/// The end of a generation that went well. What has a default is told to calls with an id only, beyond the reference server's
/// fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoneLine {
    pub done: Yes,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// `stop` or `length`.
    pub finish_reason: String,
    pub reused_prompt_tokens: usize,
    pub prefilled_prompt_tokens: usize,
    pub session_reset_reason: ReuseReason,
    pub prefill_ms: f64,
    pub decode_ms: f64,
    pub total_ms: f64,
    pub prefill_tok_s: f64,
    pub decode_tok_s: f64,
    /// Nothing where a stop string cut the text, or where token lines have told them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated_token_ids: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// Nothing without a first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<Finish>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorLine {
    pub error: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
    /// The [`Error`] itself, for calls with an id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
}

/// The first line of a worker that can work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    pub ready: Yes,
    pub protocol: u32,
    /// As the reference server counts: named ones, and one for requests without a name.
    pub max_sessions: usize,
    pub max_named_sessions: usize,
    pub capabilities: Vec<String>,
    pub model: ModelId,
    pub spec: EngineSpec,
}

/// Which model it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelId {
    pub name: String,
    /// Equal only for models that give the same answers, [`crate::runtime::session::store::ModelFingerprint`]'s.
    pub fingerprint: String,
}

/// What kind of error it is, for programs. The first two are the reference server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// All named sessions are taken.
    CapacityExhausted,
    /// There are no named sessions here at all.
    UnsupportedSession,
    /// The line is not understood.
    InvalidRequest,
    UnknownOp,
    /// A call of this id is under way.
    DuplicateId,
    InvalidValue,
    ContextLengthExceeded,
    /// The model cannot do it.
    Unsupported,
    SessionBusy,
    SessionNotFound,
    QueueFull,
    DeadlineExceeded,
    Grammar,
    /// The model failed, or the engine is not in a state for it.
    Backend,
    /// The engine is gone; the worker ends.
    EngineGone,
    LoadFailed,
    /// The worker is on its way out.
    Ending,
}

impl ErrorCode {
    pub fn of(error: &Error) -> ErrorCode {
        match error {
            Error::PromptEmpty | Error::InvalidParameter { .. } => ErrorCode::InvalidValue,
            Error::PromptTooLong { .. } | Error::PromptOversized { .. } | Error::ContextExceeded { .. } => {
                ErrorCode::ContextLengthExceeded
            }
            Error::NotSupported(_) => ErrorCode::Unsupported,
            Error::SessionBusy(_) => ErrorCode::SessionBusy,
            Error::SessionsFull { capacity: 0 } => ErrorCode::UnsupportedSession,
            Error::SessionsFull { .. } => ErrorCode::CapacityExhausted,
            Error::QueueFull { .. } => ErrorCode::QueueFull,
            Error::DeadlineExceeded { .. } => ErrorCode::DeadlineExceeded,
            Error::SessionNotFound(_) => ErrorCode::SessionNotFound,
            Error::Load(_) => ErrorCode::LoadFailed,
            Error::Grammar(_) => ErrorCode::Grammar,
            Error::InvalidState(_)
            | Error::Poisoned
            | Error::Template(_)
            | Error::Store(_)
            | Error::Backend(_)
            | Error::NotFinite(_) => ErrorCode::Backend,
            Error::EngineGone => ErrorCode::EngineGone,
        }
    }
}

impl Op {
    /// Its name on the wire, one of [`OPS`].
    pub fn name(&self) -> &'static str {
        match self {
            Op::Generate(_) => "generate",
            Op::Open(_) => "open",
            Op::Close(_) => "close",
            Op::Reset(_) => "reset",
            Op::Fork(_) => "fork",
            Op::Restore(_) => "restore",
            Op::Inspect(_) => "inspect",
            Op::Sessions(_) => "sessions",
            Op::Cancel(_) => "cancel",
            Op::Ping(_) => "ping",
            Op::Notices(_) => "notices",
            Op::Flush(_) => "flush",
            Op::Shutdown(_) => "shutdown",
        }
    }

    /// The session that it is about.
    pub fn session(&self) -> Option<&str> {
        match self {
            Op::Generate(generate) => Some(&generate.session_id).filter(|name| !name.is_empty()),
            Op::Open(named) | Op::Close(named) | Op::Reset(named) | Op::Inspect(named) => {
                Some(&named.session_id)
            }
            Op::Fork(fork) => Some(&fork.session_id),
            Op::Restore(restore) => Some(&restore.session_id),
            _ => None,
        }
        .map(String::as_str)
    }
}

impl WorkerCall {
    /// Reads a line without its end.
    ///
    /// # Errors
    /// A [`Refusal`] with the call's id where that can be read.
    pub fn parse(line: &[u8]) -> Result<WorkerCall, Refusal> {
        let refuse = |id, code, message| Refusal { id, code, message };
        let text = String::from_utf8_lossy(line);
        let mut fields: Map<String, Value> = serde_json::from_str(&text).map_err(|error| {
            refuse(None, ErrorCode::InvalidRequest, format!("not a JSON object: {error}"))
        })?;
        let id = match fields.shift_remove("id") {
            None => None,
            Some(id) => {
                Some(read_id(id).map_err(|message| refuse(None, ErrorCode::InvalidRequest, message))?)
            }
        };
        let name = match fields.shift_remove("op") {
            None => "generate".to_owned(),
            Some(Value::String(name)) => name,
            Some(other) => {
                return Err(refuse(id, ErrorCode::InvalidRequest, format!("op: {other} is not a string")));
            }
        };
        match read_op(&name, fields) {
            Ok(Some(op)) => Ok(WorkerCall { id, op }),
            Ok(None) => {
                let known = OPS.join(", ");
                Err(refuse(id, ErrorCode::UnknownOp, format!("unknown op {name:?} (known: {known})")))
            }
            Err(message) => Err(refuse(id, ErrorCode::InvalidRequest, message)),
        }
    }
}

fn read_id(id: Value) -> Result<Id, String> {
    match serde_json::from_value(id) {
        Ok(Id::Text(text)) if text.len() > MAX_ID_BYTES => Err(format!("id: more than {MAX_ID_BYTES} bytes")),
        Ok(id) => Ok(id),
        Err(_) => Err("id: neither a string nor a whole number".to_owned()),
    }
}

/// Nothing for an op that is not known.
fn read_op(name: &str, fields: Map<String, Value>) -> Result<Option<Op>, String> {
    let op = match name {
        "generate" => Op::Generate(Box::new(read(fields)?)),
        "open" => Op::Open(read_named(fields)?),
        "close" => Op::Close(read_named(fields)?),
        "reset" => Op::Reset(read_named(fields)?),
        "fork" => Op::Fork(read(fields)?),
        "restore" => Op::Restore(read(fields)?),
        "inspect" => Op::Inspect(read_named(fields)?),
        "sessions" => Op::Sessions(read(fields)?),
        "cancel" => Op::Cancel(read(fields)?),
        "ping" => Op::Ping(read(fields)?),
        "notices" => Op::Notices(read(fields)?),
        "flush" => Op::Flush(read(fields)?),
        "shutdown" => Op::Shutdown(read(fields)?),
        _ => return Ok(None),
    };
    Ok(Some(op))
}

fn read_named(fields: Map<String, Value>) -> Result<Named, String> {
    let named: Named = read(fields)?;
    match named.session_id.is_empty() {
        true => Err("session_id: must not be empty".to_owned()),
        false => Ok(named),
    }
}

/// What is wrong names the field.
fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    let names: Vec<String> = fields.keys().cloned().collect();
    let values = fields.clone();
    serde_json::from_value(Value::Object(fields)).map_err(|error| {
        // A field of the wrong type is not named by the library: it is the one that is wrong alone, too.
        let is_wrong = |name: &&String| {
            let alone = Map::from_iter([((*name).clone(), values[name.as_str()].clone())]);
            let error = serde_json::from_value::<T>(Value::Object(alone)).err();
            error.is_some_and(|error| error.to_string().starts_with("invalid "))
        };
        let message = error.to_string();
        match names.iter().find(is_wrong).filter(|_| message.starts_with("invalid ")) {
            Some(name) => format!("{name}: {message}"),
            None => message,
        }
    })
}

impl Default for Generate {
    fn default() -> Self {
        Self {
            prompt: None,
            prompt_segments: None,
            max_new_tokens: -1,
            overflow: Overflow::Clamp,
            top_k: 0,
            numbers: SamplingNumbers::default(),
            logit_bias: BTreeMap::new(),
            seed: 0,
            exact_seed: None,
            stop: Vec::new(),
            session_id: String::new(),
            ignore_eos: false,
            render_special: false,
            markup: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            prompt_only: false,
            stop_ids: Vec::new(),
            grammar: None,
            deadline_ms: None,
            events: false,
        }
    }
}

/// A request as a worker is told it, with all events. One that [`Request::validate`] passes comes out of
/// [`Generate::into_request`] as it was.
impl From<&Request> for Generate {
    fn from(request: &Request) -> Self {
        let Request {
            prompt,
            sampling,
            limits,
            logprobs,
            prompt_logprobs,
            render_special,
            markup,
            grammar,
            session,
        } = request;
        Self {
            prompt: None,
            prompt_segments: Some(vec![PromptSegment { text: None, ids: Some(prompt.clone()) }]),
            max_new_tokens: limits.max_tokens.map_or(-1, |tokens| i64::try_from(tokens).unwrap_or(i64::MAX)),
            overflow: limits.overflow,
            top_k: sampling.top_k.unwrap_or(0),
            numbers: SamplingNumbers::of(sampling),
            logit_bias: sampling.logit_bias.clone(),
            seed: 0,
            exact_seed: sampling.seed,
            stop: limits.stop.clone(),
            session_id: session.clone().unwrap_or_default(),
            ignore_eos: limits.ignore_eos,
            render_special: *render_special,
            markup: markup.to_vec(),
            logprobs: *logprobs,
            prompt_logprobs: *prompt_logprobs,
            prompt_only: limits.max_tokens == Some(0),
            stop_ids: limits.stop_ids.clone(),
            grammar: grammar.as_ref().map(|grammar| grammar.source().clone()),
            deadline_ms: limits.deadline.map(ms),
            events: true,
        }
    }
}

impl Generate {
    /// Whether `into_request` has more to do than to move: text to encode, or a grammar to compile.
    pub fn is_work(&self) -> bool {
        let has_text = |segment: &PromptSegment| segment.ids.is_none();
        self.grammar.is_some()
            || self.prompt.is_some()
            || self.prompt_segments.as_ref().is_some_and(|segments| segments.iter().any(has_text))
    }

    /// The request that is meant. `encode` gets a text and whether something stands before it.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for a prompt that is missing or given twice, or a deadline that is no time; those of
    /// `encode` and `compile`. What [`Request::validate`] finds is left to it.
    pub fn into_request(
        self,
        encode: impl Fn(&str, bool) -> Result<Vec<u32>>,
        compile: impl Fn(&GrammarSource) -> Result<Grammar>,
    ) -> Result<Request> {
        let prompt = read_prompt(self.prompt, self.prompt_segments, encode)?;
        let deadline = self.deadline_ms.map(|ms| {
            let time = duration(ms).ok_or_else(|| format!("{ms} is not a time"));
            time.map_err(|message| Error::InvalidParameter { name: "deadline_ms", message })
        });
        let mut sampling = Sampling {
            top_k: Some(self.top_k).filter(|&k| k > 0),
            logit_bias: self.logit_bias,
            seed: self.exact_seed.or(Some(self.seed).filter(|&seed| seed > 0)),
            ..Sampling::default()
        };
        self.numbers.apply(&mut sampling);
        Ok(Request {
            prompt,
            sampling,
            limits: Limits {
                max_tokens: match self.prompt_only {
                    true => Some(0),
                    false => usize::try_from(self.max_new_tokens).ok().filter(|&tokens| tokens > 0),
                },
                overflow: self.overflow,
                stop: self.stop,
                stop_ids: self.stop_ids,
                ignore_eos: self.ignore_eos,
                deadline: deadline.transpose()?,
            },
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            render_special: self.render_special,
            markup: self.markup.into(),
            grammar: self.grammar.as_ref().map(compile).transpose()?,
            session: Some(self.session_id).filter(|name| !name.is_empty()),
        })
    }
}

fn read_prompt(
    text: Option<String>,
    segments: Option<Vec<PromptSegment>>,
    encode: impl Fn(&str, bool) -> Result<Vec<u32>>,
) -> Result<Vec<u32>> {
    let refuse = |message: &str| Error::InvalidParameter { name: "prompt", message: message.to_owned() };
    let segments = match (text, segments) {
        (Some(text), None) => return encode(&text, false),
        (None, Some(segments)) => segments,
        (None, None) => return Err(refuse("neither prompt nor prompt_segments is given")),
        (Some(_), Some(_)) => return Err(refuse("prompt and prompt_segments exclude each other")),
    };
    let mut prompt = Vec::new();
    for segment in segments {
        match segment {
            PromptSegment { ids: Some(ids), .. } if prompt.is_empty() => prompt = ids,
            PromptSegment { ids: Some(ids), .. } => prompt.extend(ids),
            PromptSegment { text: Some(text), .. } => prompt.extend(encode(&text, !prompt.is_empty())?),
            PromptSegment { .. } => return Err(refuse("a segment has neither text nor ids")),
        }
    }
    Ok(prompt)
}

/// What is told of one generation, from its events.
#[derive(Debug)]
pub struct EventEncoder {
    detail: Detail,
    reason: ReuseReason,
    ids: Vec<u32>,
}

/// How much a client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// What the reference server tells: calls without an id.
    Reference,
    /// Also why and when: calls with one.
    Reasons,
    /// All, so that the events can be built again.
    Events,
}

impl Detail {
    pub fn of(has_id: bool, events: bool) -> Self {
        match (has_id, events) {
            (_, true) => Detail::Events,
            (true, false) => Detail::Reasons,
            (false, false) => Detail::Reference,
        }
    }
}

impl EventEncoder {
    pub fn new(detail: Detail) -> Self {
        Self { detail, reason: ReuseReason::default(), ids: Vec::new() }
    }

    /// The answer to send for an event, if it is one to be told.
    pub fn encode(&mut self, event: Event) -> Option<ReplyBody> {
        let tells_all = self.detail == Detail::Events;
        match event {
            Event::Queued { position } => tells_all.then_some(ReplyBody::Queued { queued: position }),
            Event::Started(started) => {
                let Reuse { reason, .. } = started.reuse;
                self.reason = reason;
                tells_all.then_some(ReplyBody::Started { started })
            }
            Event::Prefill { done, total } => {
                tells_all.then_some(ReplyBody::Progress { progress: PrefillProgress { done, total } })
            }
            Event::Prompt { logprobs } => {
                tells_all.then_some(ReplyBody::Prompt { prompt_logprobs: logprobs })
            }
            Event::Text { text, tokens } if tells_all => {
                Some(ReplyBody::Token(TextLine { token: text, tokens: Some(tokens) }))
            }
            Event::Text { text, tokens } => {
                self.ids.extend(tokens.iter().map(|token| token.id));
                (!text.is_empty()).then_some(ReplyBody::Token(TextLine { token: text, tokens: None }))
            }
            Event::Done(outcome) => Some(ReplyBody::Done(Box::new(self.done(outcome)))),
            Event::Failed(error) => {
                Some(ReplyBody::Error(ErrorLine::new(&error, self.detail != Detail::Reference)))
            }
        }
    }

    fn done(&mut self, outcome: Outcome) -> DoneLine {
        let Outcome { finish, usage, timings, seed } = outcome;
        let rate = |rate: Option<f64>| rate.unwrap_or(0.0);
        let tells_ids = self.detail != Detail::Events && !matches!(finish, Finish::StopString(_));
        let tells_reasons = self.detail != Detail::Reference;
        DoneLine {
            done: Yes,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            finish_reason: match finish {
                Finish::Cancelled => "stop".to_owned(), // what the reference server calls it
                _ => finish.reason().to_owned(),
            },
            reused_prompt_tokens: usage.cached_tokens,
            prefilled_prompt_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            session_reset_reason: self.reason,
            prefill_ms: ms(timings.prefill),
            decode_ms: ms(timings.decode),
            total_ms: ms(timings.total),
            prefill_tok_s: rate(timings.prefill_rate(&usage)),
            decode_tok_s: rate(timings.decode_rate(&usage)),
            generated_token_ids: tells_ids.then(|| std::mem::take(&mut self.ids)),
            queue_ms: tells_reasons.then(|| ms(timings.queue)),
            ttft_ms: timings.time_to_first_token.filter(|_| tells_reasons).map(ms),
            seed: tells_reasons.then_some(seed),
            finish: Some(finish).filter(|_| tells_reasons),
        }
    }
}

impl ReplyBody {
    /// The event that it tells, where it is one of a generation that was asked for with `events`; else the answer again.
    ///
    /// # Errors
    /// The answer, when it tells no event, or not all of one.
    pub fn into_event(self) -> Result<Event, Box<ReplyBody>> {
        match self {
            ReplyBody::Queued { queued } => Ok(Event::Queued { position: queued }),
            ReplyBody::Started { started } => Ok(Event::Started(started)),
            ReplyBody::Progress { progress: PrefillProgress { done, total } } => {
                Ok(Event::Prefill { done, total })
            }
            ReplyBody::Prompt { prompt_logprobs: logprobs } => Ok(Event::Prompt { logprobs }),
            ReplyBody::Token(TextLine { token, tokens: Some(tokens) }) => {
                Ok(Event::Text { text: token, tokens })
            }
            ReplyBody::Done(done) => match done.outcome() {
                Some(outcome) => Ok(Event::Done(outcome)),
                None => Err(Box::new(ReplyBody::Done(done))),
            },
            ReplyBody::Error(line) => Ok(Event::Failed(line.into_error())),
            other => Err(Box::new(other)),
        }
    }
}

impl DoneLine {
    /// How it ended; nothing where not all of it was told.
    pub fn outcome(&self) -> Option<Outcome> {
        let time_to_first_token = match self.ttft_ms {
            Some(ms) => Some(duration(ms)?),
            None => None,
        };
        Some(Outcome {
            finish: self.finish.clone()?,
            usage: Usage {
                prompt_tokens: self.prompt_tokens,
                cached_tokens: self.reused_prompt_tokens,
                completion_tokens: self.completion_tokens,
            },
            timings: Timings {
                queue: duration(self.queue_ms?)?,
                prefill: duration(self.prefill_ms)?,
                decode: duration(self.decode_ms)?,
                time_to_first_token,
                total: duration(self.total_ms)?,
            },
            seed: self.seed?,
        })
    }
}

impl ErrorLine {
    pub fn new(error: &Error, has_detail: bool) -> Self {
        // A path that is not UTF-8 has no JSON: then the message must do.
        let detail = || serde_json::to_value(error).ok();
        Self {
            error: error.to_string(),
            code: Some(ErrorCode::of(error)),
            detail: has_detail.then(detail).flatten(),
            session_id: None,
        }
    }

    /// The error that it was made from, or what is known of it.
    pub fn into_error(self) -> Error {
        let detail = self.detail.and_then(|detail| serde_json::from_value(detail).ok());
        detail.unwrap_or(Error::Backend(self.error))
    }
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        let Refusal { id, code, message } = refusal;
        let line = ErrorLine { error: message, code: Some(code), detail: None, session_id: None };
        Reply { id, answer: ReplyBody::Error(line) }
    }
}

impl Reply {
    /// Reads a line without its end.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &[u8]) -> Result<Reply, String> {
        serde_json::from_str(&String::from_utf8_lossy(line)).map_err(|error| error.to_string())
    }
}

impl Serialize for Yes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(true)
    }
}

impl<'de> Deserialize<'de> for Yes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match bool::deserialize(deserializer)? {
            true => Ok(Yes),
            false => Err(D::Error::custom("must be true")),
        }
    }
}

/// Exact to the nanosecond for a day; beyond, reading JSON may miss the last one.
fn ms(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// Nothing for what is no time: negative, infinite, beyond all bounds.
fn duration(ms: f64) -> Option<Duration> {
    let nanos = (ms * 1e6).round();
    // `as` would hide what is out of range.
    ((0.0..1.8e19).contains(&nanos)).then(|| Duration::from_nanos(nanos as u64))
}

/// Writes a line whole, and flushes.
///
/// # Errors
/// Those of the stream.
pub fn write_line(to: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(line)?;
    bytes.push(b'\n');
    to.write_all(&bytes)?;
    to.flush()
}

/// What [`read_line`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// A line, in the buffer without its end.
    Line,
    /// One beyond [`MAX_LINE_BYTES`]; it has been passed over.
    TooLong,
    /// The stream ended within a line: its writer is gone.
    Torn,
    End,
}

/// Reads the next line into `line`, in place of what was there.
///
/// # Errors
/// Those of the stream.
pub fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Received> {
    read_line_within(from, line, MAX_LINE_BYTES)
}

fn read_line_within(from: &mut impl BufRead, line: &mut Vec<u8>, most: usize) -> io::Result<Received> {
    line.clear();
    let mut is_too_long = false;
    loop {
        let part = match from.fill_buf() {
            Ok(part) => part,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if part.is_empty() {
            return Ok(if line.is_empty() && !is_too_long { Received::End } else { Received::Torn });
        }
        let end = part.iter().position(|&byte| byte == b'\n');
        let content = &part[..end.unwrap_or(part.len())];
        is_too_long |= line.len() + content.len() > most;
        if is_too_long {
            *line = Vec::new();
        } else {
            line.extend_from_slice(content);
        }
        let used = end.map_or(part.len(), |end| end + 1);
        from.consume(used);
        if end.is_some() {
            return Ok(if is_too_long { Received::TooLong } else { Received::Line });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::runtime::error::{GrammarError, LoadError, StoreError};
    use crate::runtime::request::Difference;
    use crate::runtime::session::SessionState;
    use crate::template::TemplateError;

    fn line(value: &impl Serialize) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_line(&mut bytes, value).expect("a Vec takes all");
        assert_eq!(bytes.iter().filter(|&&byte| byte == b'\n').count(), 1);
        assert_eq!(bytes.pop(), Some(b'\n'));
        bytes
    }

    fn no_text(text: &str, _: bool) -> Result<Vec<u32>> {
        panic!("{text:?} should be ids")
    }

    fn no_grammar(_: &GrammarSource) -> Result<Grammar> {
        panic!("there is none")
    }

    /// What comes out at the other end.
    fn sent(request: &Request) -> Request {
        let call = WorkerCall { id: Some(Id::Number(7)), op: Op::Generate(Box::new(request.into())) };
        let read_back = WorkerCall::parse(&line(&call)).expect("a call");
        assert_eq!(read_back, call);
        let Op::Generate(generate) = read_back.op else { panic!("{read_back:?}") };
        assert!(!generate.is_work() && generate.events);
        generate.into_request(no_text, no_grammar).expect("a request")
    }

    fn assert_same(request: &Request) {
        assert_eq!(format!("{:?}", sent(request)), format!("{request:?}"));
    }

    #[test]
    fn a_request_comes_out_as_it_went_in() {
        assert_same(&Request { prompt: vec![1, 2, 3], ..Request::default() });
        assert_same(&Request {
            prompt: (0..5000).collect(),
            sampling: Sampling {
                temperature: 0.7,
                top_k: Some(40),
                top_p: 0.95,
                min_p: 0.05,
                repetition_penalty: 1.1,
                presence_penalty: -0.3,
                frequency_penalty: 1.9,
                typical_p: 0.9,
                top_n_sigma: 1.5,
                logit_bias: BTreeMap::from([(0, -100.0), (383, 0.1)]),
                seed: Some(0),
            },
            limits: Limits {
                max_tokens: Some(1),
                overflow: Overflow::Clamp,
                stop: vec!["\n\n".to_owned(), "\u{2028}\"\\\u{1}".to_owned()],
                stop_ids: vec![7],
                ignore_eos: true,
                deadline: Some(Duration::from_nanos(1_234_567_891)),
            },
            logprobs: Some(0),
            prompt_logprobs: Some(3),
            render_special: true,
            markup: vec![5, 6].into(),
            grammar: None,
            session: Some("a b/\u{1F600}".to_owned()),
        });
        let seeded = Sampling { seed: Some(u64::MAX), ..Sampling::default() };
        assert_same(&Request { sampling: seeded, ..Request::default() });
    }

    #[test]
    fn a_grammar_travels_as_its_source() {
        let schema = json!({"type": "object", "properties": {"a": {"const": 1.5}, "7": true}});
        for source in [
            GrammarSource::JsonObject,
            GrammarSource::JsonSchema(schema),
            GrammarSource::JsonSchema(json!(true)),
            GrammarSource::Regex("[a-z]+\n".to_owned()),
            GrammarSource::Lark("start: \"x\"".to_owned()),
        ] {
            let generate = Generate { grammar: Some(source.clone()), ..Generate::default() };
            let call = WorkerCall { id: None, op: Op::Generate(Box::new(generate)) };
            assert_eq!(WorkerCall::parse(&line(&call)).expect("a call"), call);
            let Ok(WorkerCall { op: Op::Generate(generate), .. }) = WorkerCall::parse(&line(&call)) else {
                panic!()
            };
            assert!(generate.is_work());
            assert_eq!(generate.grammar, Some(source));
        }
    }

    proptest! {
        #[test]
        fn numbers_keep_their_bits(bits in any::<u32>(), nanos in 0_u64..86_400_000_000_000, seed in any::<u64>()) {
            let number = f32::from_bits(bits);
            prop_assume!(number.is_finite());
            let sampling = Sampling { temperature: number, seed: Some(seed), ..Sampling::default() };
            let limits = Limits { deadline: Some(Duration::from_nanos(nanos)), ..Limits::default() };
            let request = Request { sampling, limits, ..Request::default() };
            let read_back = sent(&request);
            prop_assert_eq!(read_back.sampling.temperature.to_bits(), bits);
            prop_assert_eq!(read_back.limits, request.limits);
            prop_assert_eq!(read_back.sampling.seed, Some(seed));
            let token = Token { id: 1, logprob: Some(Logprob { logprob: number, top: vec![(2, number)] }) };
            prop_assert_eq!(round_trip(Event::Text { text: String::new(), tokens: vec![token.clone()] }),
                format!("{:?}", Event::Text { text: String::new(), tokens: vec![token] }));
        }
    }

    /// An event as it is at the other end.
    fn round_trip(event: Event) -> String {
        let answer = EventEncoder::new(Detail::Events).encode(event).expect("all are told");
        let reply = Reply { id: Some(Id::Text("x".to_owned())), answer };
        let read_back = Reply::parse(&line(&reply)).expect("a reply");
        assert_eq!(read_back.id, reply.id);
        format!("{:?}", read_back.answer.into_event().expect("an event"))
    }

    fn outcome(finish: Finish) -> Outcome {
        Outcome {
            finish,
            usage: Usage { prompt_tokens: 10, cached_tokens: 4, completion_tokens: 3 },
            timings: Timings {
                queue: Duration::ZERO,
                prefill: Duration::from_nanos(1),
                decode: Duration::from_secs(86_400),
                time_to_first_token: Some(Duration::from_micros(333)),
                total: Duration::from_nanos(123_456_789_012),
            },
            seed: u64::MAX,
        }
    }

    #[test]
    fn events_come_out_as_they_went_in() {
        let reuse = Reuse {
            cached_tokens: 1,
            restored_tokens: 1,
            reason: ReuseReason::Restored,
            first_difference: Some(9),
        };
        let difference = Difference { position: 9, before: vec![1], session: vec![], prompt: vec![2, 3] };
        let started =
            Started { prompt_tokens: 10, max_tokens: 5, seed: u64::MAX, reuse, difference: Some(difference) };
        let plain = Started { reuse: Reuse::default(), difference: None, ..started.clone() };
        let ruled_out = Logprob { logprob: f32::NEG_INFINITY, top: vec![] };
        let tokens = vec![Token { id: 3, logprob: Some(ruled_out) }, Token { id: 4, logprob: None }];
        let mut events = vec![
            Event::Queued { position: 3 },
            Event::Started(started),
            Event::Started(plain),
            Event::Prefill { done: 5, total: 10 },
            Event::Prompt { logprobs: vec![Logprob { logprob: -1.5, top: vec![(4, -0.25)] }] },
            Event::Text { text: "\"\n\u{0}\u{fffd}é".to_owned(), tokens },
            Event::Text { text: String::new(), tokens: Vec::new() },
            Event::Failed(Error::Poisoned),
        ];
        let finishes = [
            Finish::Eos(2),
            Finish::Complete,
            Finish::StopString("\n".to_owned()),
            Finish::MaxTokens,
            Finish::ContextFull,
            Finish::Cancelled,
            Finish::Deadline,
        ];
        events.extend(finishes.map(outcome).map(Event::Done));
        let unstarted = Timings { time_to_first_token: None, ..Timings::default() };
        events.push(Event::Done(Outcome { timings: unstarted, ..outcome(Finish::Cancelled) }));
        for event in events {
            assert_eq!(round_trip(event.clone()), format!("{event:?}"));
        }
    }

    #[test]
    fn errors_come_out_as_they_went_in() {
        let path = PathBuf::from("/a b/c");
        let message = "m \"x\"".to_owned();
        let (keyword, what, name) = (message.clone(), message.clone(), message.clone());
        let known = vec!["a".to_owned()];
        let errors = vec![
            Error::PromptEmpty,
            Error::PromptTooLong { prompt_tokens: 1, context_tokens: 2 },
            Error::PromptOversized { least_tokens: 1, context_tokens: 2 },
            Error::ContextExceeded { prompt_tokens: 1, max_tokens: 2, context_tokens: 3 },
            Error::InvalidParameter { name: "top_p", message: message.clone() },
            Error::NotSupported("forking a session"),
            Error::InvalidState("no pending token"),
            Error::NotFinite("NaN"),
            Error::Poisoned,
            Error::SessionBusy(name.clone()),
            Error::SessionsFull { capacity: 0 },
            Error::QueueFull { waiting: 9 },
            Error::DeadlineExceeded { deadline: Duration::from_nanos(17) },
            Error::SessionNotFound(name.clone()),
            LoadError::NotFound(path.clone()).into(),
            LoadError::TooBig { needed: 9, available: 5, context: 4, largest_context: None }.into(),
            LoadError::UnknownArchitecture { name, known, nearest: Some("b".to_owned()) }.into(),
            LoadError::Malformed { path: path.clone(), what, message: message.clone() }.into(),
            TemplateError::Missing.into(),
            TemplateError::Syntax { line: 3, message: message.clone() }.into(),
            StoreError::Damaged { path, line: 3, message: message.clone() }.into(),
            GrammarError::Unsupported { keyword, message: message.clone() }.into(),
            GrammarError::Invalid(message.clone()).into(),
            Error::Backend(message),
            Error::EngineGone,
        ];
        for error in errors {
            let reply = Reply { id: None, answer: ReplyBody::Error(ErrorLine::new(&error, true)) };
            let ReplyBody::Error(read_back) = Reply::parse(&line(&reply)).expect("a reply").answer else {
                panic!()
            };
            assert_eq!(read_back.code, Some(ErrorCode::of(&error)));
            assert_eq!(read_back.error, error.to_string());
            assert_eq!(format!("{:?}", read_back.into_error()), format!("{error:?}"));
        }
        let foreign = ErrorLine {
            error: "hm".to_owned(),
            code: None,
            detail: Some(json!({"type": "new"})),
            session_id: None,
        };
        assert!(matches!(foreign.into_error(), Error::Backend(message) if message == "hm"));
    }

    #[test]
    fn every_answer_is_told_from_the_others() {
        let info = SessionInfo {
            name: "s".to_owned(),
            state: SessionState::Waiting,
            num_tokens: 2,
            num_resident: 0,
        };
        let session_id = "s".to_owned();
        let load = EngineLoad {
            num_waiting: 1,
            num_running: 2,
            num_sessions: 3,
            kv_free: 4,
            kv_capacity: usize::MAX,
            kv_allocated: 6,
        };
        let answers = vec![
            ReplyBody::Opened { opened: Yes, session_id: session_id.clone(), existed: Some(false) },
            ReplyBody::Closed { closed: Yes, session_id: session_id.clone(), existed: None },
            ReplyBody::Reset { reset: Yes, session_id: session_id.clone(), existed: Some(true) },
            ReplyBody::Forked { forked: Yes, session_id: session_id.clone(), to: "t".to_owned() },
            ReplyBody::Restored { restored: Yes, session_id },
            ReplyBody::Session { session: SessionDetail { info: info.clone(), tokens: vec![1, 2] } },
            ReplyBody::Sessions { sessions: vec![info] },
            ReplyBody::Sessions { sessions: vec![] },
            ReplyBody::Cancelled { cancelled: 0 },
            ReplyBody::Pong { pong: Yes, load },
            ReplyBody::Notices { notices: vec!["n".to_owned()] },
            ReplyBody::Flushed { flushed: false },
            ReplyBody::Bye { bye: Yes },
        ];
        for answer in answers {
            for id in [None, Some(Id::Number(i64::MIN)), Some(Id::Text(String::new()))] {
                let reply = Reply { id, answer: answer.clone() };
                assert_eq!(Reply::parse(&line(&reply)), Ok(reply));
            }
        }
        for bad in
            ["", "{}", "[]", r#"{"opened":false,"session_id":"s"}"#, r#"{"token":"a","x":1}"#, r#"{"tok"#]
        {
            assert!(Reply::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn calls_come_out_as_they_went_in() {
        let named = || Named { session_id: "s".to_owned() };
        let ops = vec![
            Op::Generate(Box::default()),
            Op::Open(named()),
            Op::Close(named()),
            Op::Reset(named()),
            Op::Fork(Fork { session_id: "s".to_owned(), to: "t".to_owned() }),
            Op::Restore(Restore { session_id: "s".to_owned(), tokens: vec![1, 2] }),
            Op::Inspect(named()),
            Op::Sessions(Nothing {}),
            Op::Cancel(Cancel { request: Some(Id::Text("a".to_owned())) }),
            Op::Ping(Nothing {}),
            Op::Notices(Nothing {}),
            Op::Flush(Flush { timeout_ms: 5 }),
            Op::Shutdown(Nothing {}),
        ];
        assert_eq!(ops.iter().map(Op::name).collect::<Vec<_>>(), OPS);
        for op in ops {
            let call = WorkerCall { id: Some(Id::Text("é".to_owned())), op };
            assert_eq!(WorkerCall::parse(&line(&call)), Ok(call));
        }
    }

    #[track_caller]
    fn check_refused(line: &[u8], code: ErrorCode, id: Option<Id>, part: &str) {
        let refusal = WorkerCall::parse(line).expect_err("not a call");
        assert_eq!((refusal.code, &refusal.id), (code, &id), "{refusal:?}");
        assert!(refusal.message.contains(part), "{part:?} is not in {refusal:?}");
    }

    #[test]
    fn what_is_no_call_is_refused_with_its_id_and_the_field() {
        let id = || Some(Id::Number(1));
        let deep = [&[b'['; 100_000][..], b"1"].concat();
        for (line, part) in [
            (&b"{"[..], "not a JSON object: EOF"),
            (b"[1]", "invalid type: sequence"),
            (b"nonsense", "not a JSON object"),
            (b"{\"prompt\": \"a\"} x", "trailing"),
            (b"\xff\xfe", "not a JSON object"),
            (&deep, "not a JSON object"),
            (b"{\"id\": 1.5}", "neither a string nor a whole number"),
            (b"{\"id\": null}", "neither a string nor a whole number"),
        ] {
            check_refused(line, ErrorCode::InvalidRequest, None, part);
        }
        let long = format!("{{\"id\": \"{}\"}}", "x".repeat(MAX_ID_BYTES + 1));
        check_refused(long.as_bytes(), ErrorCode::InvalidRequest, None, "more than 256 bytes");
        check_refused(
            br#"{"id":1,"op":"think"}"#,
            ErrorCode::UnknownOp,
            id(),
            "unknown op \"think\" (known: generate",
        );
        for (line, part) in [
            (&br#"{"id":1,"op":3}"#[..], "op: 3 is not a string"),
            (br#"{"id":1,"prompt":"a","max_tokens":3}"#, "unknown field `max_tokens`"),
            (br#"{"id":1,"prompt":"a","temperature":"hot"}"#, "temperature: invalid type: string"),
            (br#"{"id":1,"prompt":"a","top_k":-1}"#, "top_k: invalid value"),
            (br#"{"id":1,"prompt":"a","seed":-1}"#, "seed: invalid value"),
            (br#"{"id":1,"prompt":"a","max_new_tokens":1.5}"#, "max_new_tokens: invalid type"),
            (br#"{"id":1,"prompt_segments":[{"txt":"a"}]}"#, "unknown field `txt`"),
            (br#"{"id":1,"prompt_segments":[{"ids":[-1]}]}"#, "prompt_segments: invalid value"),
            (br#"{"id":1,"grammar":{"type":"poem"}}"#, "poem"),
            (br#"{"id":1,"op":"open"}"#, "missing field `session_id`"),
            (br#"{"id":1,"op":"open","session_id":""}"#, "session_id: must not be empty"),
            (br#"{"id":1,"op":"open","session_id":7}"#, "session_id: invalid type"),
            (br#"{"id":1,"op":"ping","x":1}"#, "unknown field `x`"),
        ] {
            check_refused(line, ErrorCode::InvalidRequest, id(), part);
        }
    }

    #[test]
    fn a_prompt_is_text_or_segments_and_ids_win() {
        let encode = |text: &str, is_behind: bool| {
            Ok(text.bytes().map(|byte| u32::from(byte) + 1000 * u32::from(is_behind)).collect())
        };
        let check = |line: &str| {
            let call = WorkerCall::parse(line.as_bytes()).expect("a call");
            let Op::Generate(generate) = call.op else { panic!() };
            generate.into_request(encode, no_grammar).map(|request| request.prompt).map_err(|e| e.to_string())
        };
        assert_eq!(check(r#"{"prompt":"a"}"#), Ok(vec![97]));
        assert_eq!(
            check(r#"{"prompt_segments":[{"text":"a"},{"ids":[1,2]},{"text":"b"}]}"#),
            Ok(vec![97, 1, 2, 1098])
        );
        assert_eq!(check(r#"{"prompt_segments":[{"text":"a","ids":[5]}]}"#), Ok(vec![5]));
        assert_eq!(check(r#"{"prompt_segments":[]}"#), Ok(vec![]));
        assert!(check("{}").expect_err("none").contains("neither prompt nor prompt_segments"));
        assert!(check(r#"{"prompt":"a","prompt_segments":[]}"#).expect_err("two").contains("exclude"));
        assert!(check(r#"{"prompt_segments":[{}]}"#).expect_err("empty").contains("neither text nor ids"));
        assert!(check(r#"{"prompt":"a","deadline_ms":-1}"#).expect_err("no time").contains("deadline_ms"));
    }

    #[test]
    fn the_defaults_are_the_reference_servers() {
        let Ok(WorkerCall { op: Op::Generate(generate), id: None }) = WorkerCall::parse(br#"{"prompt":"a"}"#)
        else {
            panic!()
        };
        let request = generate.into_request(|_, _| Ok(vec![1]), no_grammar).expect("a request");
        assert_eq!(request.sampling, Sampling::default());
        assert_eq!(request.limits, Limits { overflow: Overflow::Clamp, ..Limits::default() });
        assert_eq!((request.logprobs, request.session), (None, None));
    }

    #[test]
    fn calls_without_an_id_hear_what_the_reference_server_says() {
        let mut encoder = EventEncoder::new(Detail::Reference);
        assert!(encoder.encode(Event::Queued { position: 1 }).is_none());
        assert!(encoder.encode(Event::Prefill { done: 1, total: 1 }).is_none());
        let tokens = vec![Token { id: 7, logprob: None }];
        assert!(encoder.encode(Event::Text { text: String::new(), tokens: tokens.clone() }).is_none());
        let answer = encoder.encode(Event::Text { text: "é".to_owned(), tokens }).expect("text");
        assert_eq!(line(&answer), r#"{"token":"é"}"#.as_bytes());
        let done = encoder.encode(Event::Done(outcome(Finish::Cancelled))).expect("an end");
        let done: Value = serde_json::from_slice(&line(&done)).expect("JSON");
        let fields: Vec<&String> = done.as_object().expect("an object").keys().collect();
        assert_eq!(
            fields,
            [
                "done",
                "prompt_tokens",
                "completion_tokens",
                "finish_reason",
                "reused_prompt_tokens",
                "prefilled_prompt_tokens",
                "session_reset_reason",
                "prefill_ms",
                "decode_ms",
                "total_ms",
                "prefill_tok_s",
                "decode_tok_s",
                "generated_token_ids"
            ]
        );
        assert_eq!(done["finish_reason"], "stop");
        assert_eq!(done["generated_token_ids"], json!([7, 7]));
        let stopped = outcome(Finish::StopString("x".to_owned()));
        let cut = EventEncoder::new(Detail::Reference).encode(Event::Done(stopped)).expect("an end");
        assert!(!String::from_utf8(line(&cut)).expect("UTF-8").contains("generated_token_ids"));
    }

    #[test]
    fn lines_are_found_however_they_arrive() {
        let input = b"one\n\ntoo long for this\nexact!\n\xff\ntorn";
        for size in 1..input.len() {
            let mut reader = io::BufReader::with_capacity(size, &input[..]);
            let (mut line, mut found) = (Vec::new(), Vec::new());
            loop {
                let received = read_line_within(&mut reader, &mut line, 6).expect("a slice");
                found.push((received, line.clone()));
                if matches!(received, Received::Torn | Received::End) {
                    break;
                }
            }
            let whole = |text: &[u8]| (Received::Line, text.to_vec());
            let torn = (Received::Torn, b"torn".to_vec());
            let expected = [
                whole(b"one"),
                whole(b""),
                (Received::TooLong, vec![]),
                whole(b"exact!"),
                whole(b"\xff"),
                torn,
            ];
            assert_eq!(found, expected, "{size}");
            let after = read_line_within(&mut reader, &mut line, 6).expect("a slice");
            assert_eq!((after, line), (Received::End, vec![]));
        }
    }
}
