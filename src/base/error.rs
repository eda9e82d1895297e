//! Errors of the engine, split by what the caller can do about them.
//!
//! The CLI maps each variant to a kind, a hint and an exit code; HTTP maps it to a status and a code. Both
//! use one `match`, so a new variant is a compile error there.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::units::bytes;
use llmctl_template::TemplateError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The result of reading and loading a model's files.
pub type LoadResult<T> = std::result::Result<T, LoadError>;

/// Text of the program itself. An alias, because serde would borrow a plain reference from its input.
type Lasting = &'static str;

/// Most distinct texts of other processes that are kept, and most bytes of each; more than llmctl has.
const MAX_LASTING: usize = 1024;
const MAX_LASTING_BYTES: usize = 256;

/// Makes a text of another process `'static`. There are few such texts, so each is leaked once; beyond the
/// bounds a placeholder is used.
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
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    PromptEmpty,

    /// Refused before any work: a prompt must leave room for one generated token.
    #[error(
        "the prompt has {prompt_tokens} tokens, but the context holds {context_tokens} and needs room for an answer"
    )]
    PromptTooLong { prompt_tokens: usize, context_tokens: usize },

    /// Refused because of its size alone; the tokens were not all counted.
    #[error(
        "the prompt has {least_tokens} tokens or more, but the context holds {context_tokens} and needs room for an answer"
    )]
    PromptOversized { least_tokens: usize, context_tokens: usize },

    /// Refused before any work: prompt and `max_tokens` do not fit together.
    #[error(
        "the prompt has {prompt_tokens} tokens and up to {max_tokens} are to be generated, \
         but the context holds {context_tokens}"
    )]
    ContextExceeded { prompt_tokens: usize, max_tokens: usize, context_tokens: usize },

    /// A value is out of range; the request was not started.
    #[error("{name}: {message}")]
    InvalidParameter {
        #[serde(deserialize_with = "lasting")]
        name: Lasting,
        message: String,
    },

    /// The model or backend does not support the operation; the session is unchanged.
    #[error("not supported by this model: {0}")]
    NotSupported(#[serde(deserialize_with = "lasting")] Lasting),

    /// The call is not legal in the session's state (e.g. decode without a pending token).
    #[error("invalid state: {0}")]
    InvalidState(#[serde(deserialize_with = "lasting")] Lasting),

    /// An earlier error left the session's state undefined; only `reset` is legal.
    #[error("the session failed earlier and must be reset")]
    Poisoned,

    /// Another request is running in this session.
    #[error("session {0:?} is busy with another request")]
    SessionBusy(String),

    /// No room for another session; retry later, or close one.
    #[error("all {capacity} session slots are taken")]
    SessionsFull { capacity: usize },

    /// Refused before any work: the queue is full. Retry when requests have ended.
    #[error("{waiting} requests are waiting already")]
    QueueFull { waiting: usize },

    /// The pixels of other images take the memory. Retry when their requests have ended.
    #[error("the pixels of all images in use would take more than {} MiB", most_bytes >> 20)]
    ImagesBusy { most_bytes: u64 },

    /// The deadline passed while the request waited; no work was done.
    #[error("the request could not be started within its deadline of {deadline:?}")]
    DeadlineExceeded { deadline: Duration },

    /// No session has that name.
    #[error("no session named {0:?}")]
    SessionNotFound(String),

    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),

    /// The chat template cannot render this conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),

    /// A saved session cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),

    /// A grammar cannot be used, or exceeded its limits during the answer; the session keeps the answer so
    /// far.
    #[error(transparent)]
    Grammar(#[from] GrammarError),

    /// The forward pass failed or panicked; the sessions in the batch were reset.
    #[error("backend failure: {0}")]
    Backend(String),

    /// The model computed a NaN, as one with damaged weights does; the session was reset.
    #[error("the model's logits hold {0}")]
    NotFinite(#[serde(deserialize_with = "lasting")] Lasting),

    /// A remote engine cannot be reached, or was lost in the middle of an answer; each with its address and the reason.
    #[error("no remote engine answers: {0}")]
    RemoteLost(String),

    /// A remote engine has refused the request, or its answer breaks what was asked.
    #[error("{0}")]
    RemoteRefused(String),

    /// The engine has ended; it accepts no calls.
    #[error("the engine has stopped")]
    EngineGone,
}

/// Returns the message of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Error of a schema, regular expression or grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum GrammarError {
    /// Well-formed, but `keyword` cannot be enforced while sampling. No approximation is used.
    #[error("{keyword:?} cannot be enforced: {message}")]
    Unsupported { keyword: String, message: String },

    /// Syntax error, unknown reference, or unsatisfiable.
    #[error("{0}")]
    Invalid(String),

    /// Exceeds the limits on size, depth, work or time.
    #[error("too complex: {0}")]
    TooComplex(String),

    /// The constraint failed during an answer; a bug.
    #[error("the grammar failed: {0}")]
    Failed(String),
}

/// Error of reading or writing a saved session. Every message names the file.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum StoreError {
    /// The system refused: no permission, full disk, read-only folder. Earlier saves are intact.
    #[error("{}: {message}", path.display())]
    Io {
        path: PathBuf,
        message: String,
        #[serde(default)]
        cause: StoreCause,
    },

    /// The file was changed after it was written. Lines count from 1; earlier lines are intact.
    #[error("{}: line {line}: {message}", path.display())]
    Damaged { path: PathBuf, line: usize, message: String },

    /// Well-formed, but not supported by this version.
    #[error("{}: {message}", path.display())]
    Unsupported { path: PathBuf, message: String },
}

/// Cause of a refusal by the system, as far as the user can remove it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreCause {
    /// The disk or the user's quota is full.
    Full,
    /// No permission, or a read-only file system.
    NotWritable,
    #[default]
    Other,
}

impl StoreError {
    /// Wraps an I/O error with its path.
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

/// A model that a reference may mean.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCandidate {
    /// Reference for `--model`.
    pub reference: String,
    /// Size of its weights, if it is known.
    pub bytes: Option<u64>,
}

impl From<String> for ModelCandidate {
    fn from(reference: String) -> Self {
        Self { reference, bytes: None }
    }
}

impl fmt::Display for ModelCandidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reference)?;
        self.bytes.map_or(Ok(()), |count| write!(f, " ({})", bytes(count)))
    }
}

fn list(candidates: &[ModelCandidate]) -> String {
    let all: Vec<String> = candidates.iter().map(ToString::to_string).collect();
    all.join(", ")
}

/// Error of loading a model. Every message names the file, and the tensor or key at fault.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
pub enum LoadError {
    #[error("{}: no such file or directory", .0.display())]
    NotFound(PathBuf),

    /// The reference names no model; `candidates` are similar names.
    #[error("model {reference:?} not found")]
    UnknownModel { reference: String, candidates: Vec<String> },

    /// The reference fits several models; `candidates` lists them.
    #[error("{reference:?} could be any of: {}", list(candidates))]
    AmbiguousModel { reference: String, candidates: Vec<ModelCandidate> },

    /// The reference is neither a path nor a repository; nothing was looked up.
    #[error("{reference:?} is not a model reference: {message}")]
    InvalidReference { reference: String, message: String },

    /// The system has no memory or address space to map the file.
    #[error("{}: not enough memory to map it", .0.display())]
    OutOfMemory(PathBuf),

    /// The user may not read the file or a folder above it.
    #[error("{}: permission denied", .0.display())]
    Denied(PathBuf),

    #[error("{}: {message}", path.display())]
    Io { path: PathBuf, message: String },

    /// The file breaks its format or has wrong sizes; `what` is the tensor, key or field.
    #[error("{}: {what}: {message}", path.display())]
    Malformed { path: PathBuf, what: String, message: String },

    /// Well-formed, but of an architecture that llmctl does not run.
    #[error("unsupported architecture {name:?} (known: {})", known.join(", "))]
    UnknownArchitecture { name: String, known: Vec<String>, nearest: Option<String> },

    /// Well-formed, but uses a feature that llmctl does not run.
    #[error("{}: {message}", path.display())]
    Unsupported { path: PathBuf, message: String },

    /// A tensor of the architecture is missing, or has the wrong shape or type.
    #[error("tensor {tensor:?}: {message}")]
    Tensor { tensor: String, message: String },

    /// Weights and KV do not fit in memory. `largest_context` is the largest context that does.
    #[error("the model needs {needed} bytes with a context of {context}, but only {available} are available")]
    TooBig { needed: u64, available: u64, context: usize, largest_context: Option<usize> },

    /// The KV limit is too small for the context.
    #[error("{asked} bytes of KV memory do not hold a context of {context} tokens, which takes {needed}")]
    KvTooSmall { asked: u64, needed: u64, context: usize },

    /// The KV limit does not fit beside the weights.
    #[error("{asked} bytes of KV memory do not fit: {most} are left beside the weights")]
    KvTooLarge { asked: u64, most: u64 },

    /// The context is longer than the model supports.
    #[error("a context of {asked} tokens was asked for, but the model was made for {most}")]
    ContextTooLong { asked: usize, most: usize },

    /// The model cannot draft for the other.
    #[error("draft model {draft} cannot draft for {model}: {message}")]
    DraftModel { draft: String, model: String, message: String },

    /// No block of the model's file can predict further tokens.
    #[error("{model} cannot draft for itself: {message}")]
    NoPrediction { model: String, message: String },

    /// The device cannot be used.
    #[error("{0}")]
    Device(String),

    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

impl LoadError {
    /// Wraps an I/O error. A missing file becomes [`LoadError::NotFound`], an unreadable one
    /// [`LoadError::Denied`].
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

    /// Returns [`LoadError::Malformed`] for `what`: a tensor, key or field.
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
