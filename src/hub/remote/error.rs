//! Errors of downloading, split by what the user can do about them.
//!
//! The hub answers "missing", "private" and "gated" with the same statuses; `X-Error-Code` and the presence
//! of a token tell them apart (huggingface_hub's `hf_raise_for_status`). No message holds a token or a signed
//! address.

use std::io;
use std::path::{Path, PathBuf};

/// A download that did not happen, or did not end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    /// No repository of that name that this user may see.
    #[error("{repo} is not on {endpoint}, or is private")]
    RepoNotFound { repo: String, endpoint: String, has_token: bool },

    /// The repository has no such branch, tag or commit. `existing` lists its branches and tags.
    #[error("{repo} has no revision {revision:?}")]
    RevisionNotFound { repo: String, revision: String, existing: Vec<String> },

    /// The repository has no such file or quantisation. `candidates` are references, with sizes.
    #[error("{repo} has no {wanted}")]
    FileNotFound { repo: String, wanted: String, candidates: Vec<String> },

    /// Several files match. `candidates` are references, with sizes.
    #[error("{reference:?} could be any of: {}", candidates.join(", "))]
    SeveralFiles { reference: String, candidates: Vec<String> },

    /// The repository exists, but holds nothing that llmctl runs.
    #[error("{repo} {message}")]
    NoModel { repo: String, message: String },

    /// The publisher asks for consent first. `page` is where it is given.
    #[error("{repo} is gated: its publisher asks to accept terms first")]
    Gated { repo: String, page: String, has_token: bool },

    /// The hub does not accept the token.
    #[error("{endpoint} does not accept the token")]
    TokenRejected { endpoint: String },

    #[error("access to {repo} is disabled by the hub")]
    Disabled { repo: String },

    /// Too many requests; the hub accepts the next one after `seconds`.
    #[error("{endpoint} allows no more requests for {seconds} s")]
    RateLimited { endpoint: String, seconds: u64 },

    /// No connection, or only failing ones.
    #[error("{host}: {message}")]
    Unreachable { host: String, message: String },

    /// An answer that the hub's protocol does not have.
    #[error("{url}: {message}")]
    Unexpected { url: String, message: String },

    /// The file is not the one that the listing describes.
    #[error("{path} changed on the hub during the download: {message}")]
    Changed { path: String, message: String },

    /// The bytes received are not those that the listing announces; they were removed.
    #[error(
        "{path}: the bytes received have the hash {found}, but the hub announces {expected}; they were removed"
    )]
    WrongHash { path: String, expected: String, found: String },

    /// The download needs more than is free. Sizes in bytes.
    #[error("{}: not enough space", folder.display())]
    DiskFull { folder: PathBuf, needed: u64, free: Option<u64> },

    #[error("{}: {message}", path.display())]
    Files { path: PathBuf, message: String, is_denied: bool },

    /// A setting that cannot be used, such as an address that is none.
    #[error("{name}: {message}")]
    Setting { name: &'static str, message: String },

    /// The caller asked to stop. Partial files are kept.
    #[error("the download was interrupted")]
    Cancelled,
}

impl HubError {
    /// Wraps an error of reading or writing `path`.
    pub(super) fn files(path: &Path, error: &io::Error) -> Self {
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            let folder = path.parent().unwrap_or(path).to_path_buf();
            return HubError::DiskFull { folder, needed: 0, free: None };
        }
        let is_denied =
            matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem);
        HubError::Files { path: path.to_path_buf(), message: error.to_string(), is_denied }
    }
}

/// A failure of one request.
#[derive(Debug)]
pub(super) enum AttemptFailure {
    /// Repeating the request may help: the connection broke, or the server is busy.
    Transient {
        error: HubError,
        /// Pause that the server asks for, in seconds.
        wait: Option<u64>,
        /// No connection was made.
        is_unconnected: bool,
    },
    /// Repeating does not help.
    Final(HubError),
    /// The server ignores `Range`.
    NoRanges,
}

impl From<HubError> for AttemptFailure {
    fn from(error: HubError) -> Self {
        AttemptFailure::Final(error)
    }
}
