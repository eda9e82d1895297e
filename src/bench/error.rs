//! Reasons why something is not measured, compared or written, and why a request has no answer.

use std::error::Error as StdError;
use std::io;

use llmctl_engine::http_engine::HttpFailure;

/// Characters of a server's error that are shown.
const MAX_SHOWN: usize = 400;

/// An error of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The request makes no sense.
    #[error("{message}")]
    Usage { message: String, hint: Option<&'static str> },
    /// A file holds something else.
    #[error("{0}")]
    Damaged(String),
    #[error("{path}: {error}")]
    Read { path: String, error: io::Error },
    /// `place` is a path, or what is done with one.
    #[error("{place}: {error}")]
    Write { place: String, error: io::Error },
    #[error("starting threads: {0}")]
    Threads(io::Error),
    #[error("{0}")]
    Drawing(String),
    /// May succeed later, or with other numbers.
    #[error("{0}")]
    Temporary(&'static str),
    #[error(transparent)]
    Engine(#[from] llmctl_base::Error),
    #[error("{}", explained(url, failure))]
    Request { url: String, failure: RequestFailure },
    /// A part of the caller's failed: starting an engine, or taking a result.
    #[error("{0}")]
    Caller(Box<dyn StdError + Send + Sync>),
    #[error("{name}: {error}")]
    Case { name: String, error: Box<BenchError> },
}

impl BenchError {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: None }
    }
}

fn explained(url: &str, failure: &RequestFailure) -> String {
    match failure.unreachable() {
        Some(why) => format!("cannot connect to {url}: {why}"),
        None => format!("{url}: {failure}"),
    }
}

/// Reason why a request has no complete answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestFailure {
    #[error("{}", shown(.0))]
    Http(#[from] HttpFailure),
    /// An error in the middle of a stream.
    #[error("it reports: {}", shown(.0))]
    Server(String),
}

/// Returns the beginning of a text: a server may answer with megabytes.
fn shown(text: &impl ToString) -> String {
    text.to_string().chars().take(MAX_SHOWN).collect()
}

impl RequestFailure {
    /// Returns the name under which failures are counted.
    pub fn kind(&self) -> String {
        let name = match self {
            Self::Http(HttpFailure::Status { code, .. }) => return format!("http_{code}"),
            Self::Http(HttpFailure::Unreachable(_)) => "unreachable",
            Self::Http(HttpFailure::Broken(_)) => "broken",
            Self::Http(HttpFailure::Malformed(_)) => "malformed",
            Self::Http(HttpFailure::Timeout) => "timeout",
            Self::Server(_) => "server",
        };
        name.to_owned()
    }

    /// Returns why there is no connection.
    fn unreachable(&self) -> Option<&str> {
        match self {
            Self::Http(HttpFailure::Unreachable(why)) => Some(why),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted_by_kind_and_shown_in_part() {
        let status = HttpFailure::Status { code: 429, message: String::new(), retry_after: None };
        assert_eq!(RequestFailure::from(status).kind(), "http_429");
        let long = RequestFailure::from(HttpFailure::Malformed("x".repeat(10_000))).to_string();
        assert_eq!(long.chars().count(), MAX_SHOWN);
    }
}
