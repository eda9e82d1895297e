//! Reasons for which an image is refused.

/// Reason for which an image is refused; one sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The file or its pixels exceed a limit.
    #[error("{0}")]
    TooLarge(String),
    /// The bytes are not an image, or of a format that is not read.
    #[error("{0}")]
    Format(String),
    /// The file is damaged or incomplete.
    #[error("{0}")]
    Damaged(String),
    /// The pixels of other images take the memory; they may be gone later.
    #[error("the pixels of all images in use would take more than {} MiB", most_bytes >> 20)]
    Busy { most_bytes: u64 },
    /// The model's rule cannot make patches of this size.
    #[error("{0}")]
    Size(String),
    /// A configuration's numbers make no rule.
    #[error("the model's image settings make no sense: {0}")]
    Rule(String),
}
