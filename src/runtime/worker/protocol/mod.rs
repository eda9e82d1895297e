//! Types of the worker protocol: [`WorkerCall`]s go to a worker, [`Reply`]s come back, one line of JSON each.
//! `docs/worker-protocol.md` is the contract.
//!
//! Invariants: a value that is written is read back as the same value, so an engine behind a pipe answers as
//! one in this process (a grammar travels as its source). A call with an unknown field is refused. A line is
//! at most [`MAX_LINE_BYTES`] long. Bytes that are not UTF-8 become U+FFFD.

mod events;
mod generate;
mod image;
mod line;
mod parse;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use crate::engine::{EngineLoad, SessionDetail, SessionInfo};
use crate::request::{
    DraftModelUsage, EngineSessionName, Finish, ImageUsage, Logprob, ReuseReason, Started, Token,
};
use crate::spec::EngineSpec;
use llmctl_base::error::{Error, Result};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;

pub use events::{Detail, EventEncoder};
pub use generate::{Generate, PromptSegment};
pub use image::{ImageUpload, KeptImages, WorkerImage};
pub use line::{Received, read_line, write_line};

/// Value of [`Ready::protocol`]. Another number is an incompatible protocol.
pub const VERSION: u32 = 1;

/// Longest line in bytes, without its line feed: enough for a prompt of several million ids.
pub const MAX_LINE_BYTES: usize = 64 << 20;

/// Longest textual id in bytes. Ids are bounded because every reply line repeats them.
pub const MAX_ID_BYTES: usize = 256;

/// Names of all operations on the wire.
pub const OPS: &[&str] = <Op as strum::VariantNames>::VARIANTS;

/// Capability, beside the operations, of a worker whose model reads images.
pub const IMAGES: &str = "images";

/// Identifier of an open call, chosen by the client and repeated in every line that answers the call.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Id {
    Number(i64),
    Text(String),
}

/// Line to the worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerCall {
    /// `None` for a call that is answered before the next call without an id is read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<Id>,
    #[serde(flatten)]
    pub op: Op,
}

#[derive(Debug, Clone, PartialEq, Serialize, strum::IntoStaticStr, strum::VariantNames)]
#[serde(tag = "op", rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Op {
    Generate(Box<Generate>),
    Image(ImageUpload),
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

/// Arguments of an operation on a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    pub session_id: EngineSessionName,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    pub session_id: EngineSessionName,
    pub to: EngineSessionName,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    pub session_id: EngineSessionName,
    pub tokens: Vec<u32>,
    /// Rows of images among the tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageSpan>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterUse>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cancel {
    /// `None` cancels all generations.
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

/// Refusal of a line that is not a valid call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub id: Option<Id>,
    pub code: ErrorCode,
    pub message: String,
}

/// Line from the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Id of the call that this line answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Id>,
    #[serde(flatten)]
    pub answer: ReplyBody,
}

/// Content of a reply. The name of the first field tells the variants apart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum ReplyBody {
    /// New text of a generation.
    Token(TextLine),
    /// The end of a generation.
    Done(Box<DoneLine>),
    /// The end of a call that failed.
    Error(ErrorLine),
    /// Place of a generation in the queue; 1 is next.
    Queued { queued: usize },
    /// A generation leaves the queue.
    Started { started: Started },
    /// Prompt tokens that are computed.
    Progress { progress: PrefillProgress },
    /// Work on the images of a prompt.
    Encoding { encoding: PrefillProgress },
    /// Log-probabilities of the next tokens of a prompt.
    Prompt { prompt_logprobs: Vec<Logprob> },
    /// Here and below, `existed` tells whether the session existed. It is omitted for calls without an id.
    Opened {
        opened: Yes,
        session_id: EngineSessionName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    /// A session is closed.
    Closed {
        closed: Yes,
        session_id: EngineSessionName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    /// A session has no tokens any more.
    Reset {
        reset: Yes,
        session_id: EngineSessionName,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        existed: Option<bool>,
    },
    /// A session has a copy.
    Forked { forked: Yes, session_id: EngineSessionName, to: EngineSessionName },
    /// A session has these tokens.
    Restored { restored: Yes, session_id: EngineSessionName },
    /// A file of an image is kept, under its hash.
    Stored { stored: Yes, sha256: String },
    /// Description of a session, with its tokens.
    Session { session: SessionDetail },
    /// Descriptions of all sessions.
    Sessions { sessions: Vec<SessionInfo> },
    /// Number of generations that were cancelled.
    Cancelled { cancelled: usize },
    /// Answer to a ping.
    Pong { pong: Yes, load: EngineLoad },
    /// Notices since the last call.
    Notices { notices: Vec<String> },
    /// True if all KV is saved.
    Flushed { flushed: bool },
    /// The last line of a worker.
    Bye { bye: Yes },
    /// The first line of a worker.
    Ready(Box<Ready>),
}

/// The JSON value `true`; any other value is an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Yes;

/// New text. `tokens` is present only if the call asked for `events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextLine {
    pub token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<Token>>,
}

/// Progress of a prefill, in prompt tokens, or of the work on its images, in slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillProgress {
    pub done: usize,
    pub total: usize,
}

/// Last line of a generation that succeeded. Fields with a serde default go beyond the reference server's and
/// are sent only for calls with an id.
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
    /// `None` if a stop string cut the text, or if token lines have sent the ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated_token_ids: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_ms: Option<f64>,
    /// `None` if no token was generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<Finish>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterUse>,
    /// Tokens that were computed before they were sampled; 0 for calls without `events`.
    #[serde(default, skip_serializing_if = "llmctl_base::units::is_zero")]
    pub drafted_tokens: usize,
    /// Those of them that were sampled then.
    #[serde(default, skip_serializing_if = "llmctl_base::units::is_zero")]
    pub accepted_tokens: usize,
    /// Those of a draft model among them; `None` for calls without `events`, or without a draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model: Option<DraftModelUsage>,
    /// Reasoning that repeated itself was ended; absent for calls without `events`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub looped_reasoning: bool,
    /// Images of the prompt, and the time that went into them; absent for calls without `events`.
    #[serde(default, skip_serializing_if = "ImageUsage::is_zero")]
    pub images: ImageUsage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encode_ms: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorLine {
    pub error: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<ErrorCode>,
    /// The serialized [`Error`], for calls with an id; hashes for [`ErrorCode::ImageUnknown`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<EngineSessionName>,
}

/// First line of a worker whose model is loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    pub ready: Yes,
    pub protocol: u32,
    /// Named sessions plus one for requests without a name, as the reference server counts.
    pub max_sessions: usize,
    pub max_named_sessions: usize,
    pub capabilities: Vec<String>,
    pub model: ModelId,
    pub spec: EngineSpec,
}

/// Identity of the loaded model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelId {
    pub name: String,
    /// Equal only for models with the same answers; see [`crate::runtime::session::store::ModelFingerprint`].
    pub fingerprint: String,
}

/// Kind of an error, for programs. The first two are the reference server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// All named sessions are in use.
    CapacityExhausted,
    /// The worker has no named sessions.
    UnsupportedSession,
    /// The line is not a valid call.
    InvalidRequest,
    UnknownOp,
    /// A call with this id is open.
    DuplicateId,
    InvalidValue,
    ContextLengthExceeded,
    /// The model does not support the operation.
    Unsupported,
    SessionBusy,
    SessionNotFound,
    QueueFull,
    DeadlineExceeded,
    Grammar,
    /// The model failed, or the engine's state does not allow the operation.
    Backend,
    /// The engine has ended, and the worker ends.
    EngineGone,
    LoadFailed,
    /// The worker is shutting down.
    Ending,
    /// The worker does not have files that a prompt names; `detail` has their hashes.
    ImageUnknown,
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
            Error::QueueFull { .. } | Error::ImagesBusy { .. } => ErrorCode::QueueFull,
            Error::DeadlineExceeded { .. } => ErrorCode::DeadlineExceeded,
            Error::SessionNotFound(_) => ErrorCode::SessionNotFound,
            Error::Load(_) => ErrorCode::LoadFailed,
            Error::Grammar(_) => ErrorCode::Grammar,
            Error::InvalidState(_)
            | Error::Poisoned
            | Error::Template(_)
            | Error::Store(_)
            | Error::Backend(_)
            | Error::RemoteLost(_)
            | Error::RemoteRefused(_)
            | Error::NotFinite(_) => ErrorCode::Backend,
            Error::EngineGone => ErrorCode::EngineGone,
        }
    }
}

impl Op {
    /// Returns the name on the wire, one of [`OPS`].
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// Returns the name of the session that the operation uses.
    pub fn session(&self) -> Option<&EngineSessionName> {
        match self {
            Op::Generate(generate) => generate.session_id.as_ref(),
            Op::Open(named) | Op::Close(named) | Op::Reset(named) | Op::Inspect(named) => {
                Some(&named.session_id)
            }
            Op::Fork(fork) => Some(&fork.session_id),
            Op::Restore(restore) => Some(&restore.session_id),
            _ => None,
        }
    }
}

impl ErrorLine {
    pub fn new(error: &Error, has_detail: bool) -> Self {
        // Serialization fails for a path that is not UTF-8; the message alone is sent then.
        let detail = || serde_json::to_value(error).ok();
        Self {
            error: error.to_string(),
            code: Some(ErrorCode::of(error)),
            detail: has_detail.then(detail).flatten(),
            session_id: None,
        }
    }

    /// Returns the line for a prompt whose files of these hashes are missing.
    pub fn unknown_images(hashes: Vec<String>) -> Self {
        Self {
            error: format!("{} images of the prompt are unknown: send them first (op image)", hashes.len()),
            code: Some(ErrorCode::ImageUnknown),
            detail: Some(json!({"type": "image_unknown", "value": hashes})),
            session_id: None,
        }
    }

    /// Returns the original error if `detail` is readable, else [`Error::Backend`] with the message.
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
    /// Parses a line without its line feed.
    ///
    /// # Errors
    /// A description of what is wrong.
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

#[cfg(test)]
mod tests;
