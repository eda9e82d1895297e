//! What can go wrong in the engine, split by what the caller can do about it.
//!
//! The CLI maps each variant to a kind, a hint and an exit code; HTTP maps it to a status and a code. Both do so
//! in one `match`, so a new variant is a compile error there.

use std::any::Any;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::template::TemplateError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A text of the program itself. A name for it, because serde would borrow a reference from what it reads.
type Lasting = &'static str;

/// Different texts of other processes that are kept, and the bytes of each: more than any llmctl has.
const MAX_LASTING: usize = 1024;
const MAX_LASTING_BYTES: usize = 256;

/// Gives a text that comes from another process the life of a text of this one. They come from a small set, so each is kept
/// once and for good; beyond the bounds a word stands in.
fn lasting<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Lasting, D::Error> {
    static KEPT: Mutex<BTreeSet<Lasting>> = Mutex::new(BTreeSet::new());
    let text = String::deserialize(deserializer)?;
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = kept.get(text.as_str()) {
        return Ok(known);
    }
    if kept.len() >= MAX_LASTING || text.len() > MAX_LASTING_BYTES {
        return Ok("value");
    }
    let lasting = Box::leak(text.into_boxed_str());
    kept.insert(lasting);
    Ok(lasting)
}

#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum Error {
    /// The prompt has no tokens; nothing can be computed from it.
    #[error("the prompt is empty")]
    PromptEmpty,

    /// Refused before any work: a prompt must leave room for at least one generated token.
    #[error(
        "the prompt has {prompt_tokens} tokens, but the context holds {context_tokens} and needs room for an answer"
    )]
    PromptTooLong { prompt_tokens: usize, context_tokens: usize },

    /// Refused while it was read, or by its size alone: so far beyond the context that its tokens were not counted to the end.
    #[error(
        "the prompt has {least_tokens} tokens or more, but the context holds {context_tokens} and needs room for an answer"
    )]
    PromptOversized { least_tokens: usize, context_tokens: usize },

    /// Refused before any work: prompt and `max_tokens` together do not fit.
    #[error(
        "the prompt has {prompt_tokens} tokens and up to {max_tokens} are to be generated, \
         but the context holds {context_tokens}"
    )]
    ContextExceeded { prompt_tokens: usize, max_tokens: usize, context_tokens: usize },

    /// A value out of its range; the request was not started.
    #[error("{name}: {message}")]
    InvalidParameter {
        #[serde(deserialize_with = "lasting")]
        name: Lasting,
        message: String,
    },

    /// This model or backend cannot do what was asked; the session is untouched.
    #[error("not supported by this model: {0}")]
    NotSupported(#[serde(deserialize_with = "lasting")] Lasting),

    /// The call is not legal in the session's present state (e.g. decode without a pending token).
    #[error("invalid state: {0}")]
    InvalidState(#[serde(deserialize_with = "lasting")] Lasting),

    /// An earlier error left the session's state unknown; only `reset` is legal.
    #[error("the session failed earlier and must be reset")]
    Poisoned,

    /// Another request is running in this session.
    #[error("session {0:?} is busy with another request")]
    SessionBusy(String),

    /// No room for another session; retry later or close one.
    #[error("all {capacity} session slots are taken")]
    SessionsFull { capacity: usize },

    /// Refused before any work: as many requests wait as may; try again when some have ended.
    #[error("{waiting} requests are waiting already")]
    QueueFull { waiting: usize },

    /// The request's deadline passed while it waited; no work was done for it.
    #[error("the request could not be started within its deadline of {deadline:?}")]
    DeadlineExceeded { deadline: Duration },

    /// No session of that name.
    #[error("no session named {0:?}")]
    SessionNotFound(String),

    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// The chat template gives no prompt for this conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),

    /// A saved session cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),

    /// What an answer is to keep to cannot be used, or ran out of bounds on the way; the session holds what was said.
    #[error(transparent)]
    Grammar(#[from] GrammarError),

    /// The forward pass failed or panicked; the sessions in the batch were reset.
    #[error("backend failure: {0}")]
    Backend(String),

    /// The model computed what is no number, as one does whose weights are damaged; the session was reset.
    #[error("the model's logits hold {0}")]
    NotFinite(#[serde(deserialize_with = "lasting")] Lasting),

    /// The engine thread is gone; nothing more can be asked of it.
    #[error("the engine has stopped")]
    EngineGone,
}

/// What a panic said, for a message.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Why an answer cannot be held to a schema, a regular expression or a grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum GrammarError {
    /// Well-formed, but `keyword` cannot be enforced while tokens are chosen. Nothing is approximated.
    #[error("{keyword:?} cannot be enforced: {message}")]
    Unsupported { keyword: String, message: String },

    /// It breaks its syntax, names what is not there, or nothing can satisfy it.
    #[error("{0}")]
    Invalid(String),

    /// Beyond the limits on size, depth, work or time.
    #[error("too complex: {0}")]
    TooComplex(String),

    /// The constraint failed under an answer; a bug.
    #[error("the grammar failed: {0}")]
    Failed(String),
}

/// Why a saved session cannot be read or written. Every message names the file.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum StoreError {
    /// The system refused: no permission, a full disk, a read-only folder. What was saved before still is.
    #[error("{}: {message}", path.display())]
    Io {
        path: PathBuf,
        message: String,
        #[serde(default)]
        cause: StoreCause,
    },

    /// The file was changed since it was written. Lines count from 1; those before this one are intact.
    #[error("{}: line {line}: {message}", path.display())]
    Damaged { path: PathBuf, line: usize, message: String },

    /// Well-formed, but beyond what this version reads.
    #[error("{}: {message}", path.display())]
    Unsupported { path: PathBuf, message: String },
}

/// Why the system refused, as far as the user can do something about it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreCause {
    /// The disk, or the user's share of it, is full.
    Full,
    /// No permission, or a file system that is only read.
    NotWritable,
    #[default]
    Other,
}

impl StoreError {
    /// Says which path an error of the system is about.
    pub fn io(path: &Path, error: &std::io::Error) -> Self {
        use std::io::ErrorKind;
        let cause = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StoreCause::Full,
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => StoreCause::NotWritable,
            _ => StoreCause::Other,
        };
        Self::Io { path: path.into(), message: error.to_string(), cause }
    }
}

/// Why a model cannot be loaded. Every message names the file, and the tensor or key at fault.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum LoadError {
    #[error("{}: no such file or directory", .0.display())]
    NotFound(PathBuf),

    /// A model reference that names nothing here; `candidates` are what it might have meant.
    #[error("model {reference:?} not found")]
    UnknownModel { reference: String, candidates: Vec<String> },

    /// A model reference that fits several models; `candidates` name each of them.
    #[error("{reference:?} could be any of: {}", candidates.join(", "))]
    AmbiguousModel { reference: String, candidates: Vec<String> },

    /// Neither a path nor the form of a repository; nothing was looked up.
    #[error("{reference:?} is not a model reference: {message}")]
    InvalidReference { reference: String, message: String },

    /// The system has no memory, or no address space, to map a file into.
    #[error("{}: not enough memory to map it", .0.display())]
    OutOfMemory(PathBuf),

    /// A file, or a folder on the way to it, that this user may not read.
    #[error("{}: permission denied", .0.display())]
    Denied(PathBuf),

    #[error("{}: {message}", path.display())]
    Io { path: PathBuf, message: String },

    /// The file breaks its format, or lies about sizes: `what` is the tensor, key or field.
    #[error("{}: {what}: {message}", path.display())]
    Malformed { path: PathBuf, what: String, message: String },

    /// Well-formed, but of a kind llmctl does not run.
    #[error("unsupported architecture {name:?} (known: {})", known.join(", "))]
    UnknownArchitecture { name: String, known: Vec<String>, nearest: Option<String> },

    /// Well-formed, but uses a feature llmctl does not run.
    #[error("{}: {message}", path.display())]
    Unsupported { path: PathBuf, message: String },

    /// A tensor that the architecture needs is missing, or has the wrong shape or type.
    #[error("tensor {tensor:?}: {message}")]
    Tensor { tensor: String, message: String },

    /// Weights plus KV do not fit; `largest_context` is the largest context that does, if any.
    #[error("the model needs {needed} bytes with a context of {context}, but only {available} are available")]
    TooBig { needed: u64, available: u64, context: usize, largest_context: Option<usize> },

    /// What the KV may take does not hold the context.
    #[error("{asked} bytes of KV memory do not hold a context of {context} tokens, which takes {needed}")]
    KvTooSmall { asked: u64, needed: u64, context: usize },

    /// What the KV may take does not fit beside the weights.
    #[error("{asked} bytes of KV memory do not fit: {most} are left beside the weights")]
    KvTooLarge { asked: u64, most: u64 },

    /// A context beyond what the model was made for.
    #[error("a context of {asked} tokens was asked for, but the model was made for {most}")]
    ContextTooLong { asked: usize, most: usize },

    /// The device cannot be used.
    #[error("{0}")]
    Device(String),

    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

impl LoadError {
    /// An I/O error of this file; a missing file is [`LoadError::NotFound`], one that may not be read [`LoadError::Denied`].
    pub fn io(path: &Path, error: &std::io::Error) -> LoadError {
        match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                LoadError::NotFound(path.into())
            }
            std::io::ErrorKind::PermissionDenied => LoadError::Denied(path.into()),
            std::io::ErrorKind::OutOfMemory => LoadError::OutOfMemory(path.into()),
            _ => LoadError::Io { path: path.into(), message: error.to_string() },
        }
    }

    /// A file that breaks its format at `what`: a tensor, a key or a field.
    pub fn malformed(path: &Path, what: impl Into<String>, message: impl Into<String>) -> LoadError {
        LoadError::Malformed { path: path.into(), what: what.into(), message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_disk_says_what_can_be_done_about_it() {
        use std::io::{Error as IoError, ErrorKind};
        for (kind, expected) in [
            (ErrorKind::StorageFull, StoreCause::Full),
            (ErrorKind::QuotaExceeded, StoreCause::Full),
            (ErrorKind::PermissionDenied, StoreCause::NotWritable),
            (ErrorKind::ReadOnlyFilesystem, StoreCause::NotWritable),
            (ErrorKind::NotADirectory, StoreCause::Other),
        ] {
            let error = StoreError::io(Path::new("/p"), &IoError::from(kind));
            assert!(
                matches!(&error, StoreError::Io { cause, .. } if *cause == expected),
                "{kind}: {error:?}"
            );
            assert!(error.to_string().starts_with("/p: "), "{error}");
        }
    }
}
