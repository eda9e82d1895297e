//! OpenAI's error envelope, and the status, type and code of each error of the engine.
//!
//! The only place that maps the engine's errors to HTTP: one `match`, so that a new one is a compile error
//! here.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use llmctl_base::{Error, GrammarError, StoreError};
use llmctl_engine::turn::TurnError;

/// The code of an error for want of a running engine.
const ENGINE_DOWN: &str = "engine_unavailable";

/// Retry-After while the model loads or the server drains.
pub const STAGE_WAIT: Duration = Duration::from_secs(5);

/// An error response.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Retry-After.
    pub retry_after: Option<Duration>,
    /// Tokens of a prompt that is too long, and of the context; boxed to keep results small.
    pub context: Option<Box<(usize, usize)>>,
}

impl ApiError {
    pub fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "capacity_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Self { status, kind, message: message.into(), param: None, code, retry_after: None, context: None }
    }

    /// Returns the status that Anthropic's and Ollama's clients expect: a body of the wrong form is a 400 like any other.
    pub fn plain_status(&self) -> StatusCode {
        match self.status {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        }
    }

    /// Creates a 400 for an invalid value.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message).param(param)
    }

    /// Creates a 400 for a parameter, or a value of one, that this server does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).param(param)
    }

    /// Creates a 503 for want of a running engine.
    pub fn engine_down() -> Self {
        let message = "the engine has stopped and is being brought back";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, Some(ENGINE_DOWN), message);
        error.retry_after(Duration::from_secs(5))
    }

    /// Creates a 500, for what only a bug of the server can cause.
    pub fn internal(message: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    /// Creates a 503 for a server that drains; another one may listen at its address soon.
    pub fn shutting_down(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("shutting_down"), message);
        error.retry_after(STAGE_WAIT)
    }

    /// Returns true if this is [`Self::engine_down`], so that another engine, or the same one later, may
    /// answer.
    pub fn is_engine_down(&self) -> bool {
        self.code == Some(ENGINE_DOWN)
    }

    pub fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Returns `{"error": {...}}`, for a response body or a stream event.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }
}

/// The response keeps the error itself too, for the layer that writes it in another API's envelope.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let (status, code) = match &error {
            Error::PromptEmpty => (StatusCode::BAD_REQUEST, Some("invalid_value")),
            Error::PromptTooLong { .. } | Error::PromptOversized { .. } | Error::ContextExceeded { .. } => {
                (StatusCode::BAD_REQUEST, Some("context_length_exceeded"))
            }
            Error::InvalidParameter { name, message } => {
                return Self::invalid(*name, format!("{name}: {message}"));
            }
            Error::NotSupported(_) => (StatusCode::BAD_REQUEST, Some("unsupported_parameter")),
            Error::SessionBusy(_) => (StatusCode::CONFLICT, Some("session_busy")),
            Error::SessionsFull { .. } => (StatusCode::TOO_MANY_REQUESTS, Some("capacity_exhausted")),
            Error::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, Some("queue_full")),
            Error::ImagesBusy { .. } => (StatusCode::SERVICE_UNAVAILABLE, Some("images_busy")),
            Error::DeadlineExceeded { .. } => (StatusCode::SERVICE_UNAVAILABLE, Some("deadline_exceeded")),
            Error::SessionNotFound(_) => (StatusCode::NOT_FOUND, Some("session_not_found")),
            Error::Template(_) => (StatusCode::BAD_REQUEST, Some("template_error")),
            Error::Store(StoreError::Io { .. }) => (StatusCode::INTERNAL_SERVER_ERROR, Some("storage_error")),
            Error::Store(StoreError::Damaged { .. } | StoreError::Unsupported { .. }) => {
                (StatusCode::INTERNAL_SERVER_ERROR, Some("session_damaged"))
            }
            Error::Grammar(GrammarError::Unsupported { .. }) => {
                (StatusCode::BAD_REQUEST, Some("unsupported_parameter"))
            }
            Error::Grammar(GrammarError::Invalid(_) | GrammarError::TooComplex(_)) => {
                (StatusCode::BAD_REQUEST, Some("invalid_value"))
            }
            Error::Grammar(GrammarError::Failed(_)) => {
                (StatusCode::INTERNAL_SERVER_ERROR, Some("grammar_error"))
            }
            Error::EngineGone => return Self::engine_down(),
            Error::RemoteLost(_) => return Self { message: error.to_string(), ..Self::engine_down() },
            Error::RemoteRefused(_) => (StatusCode::BAD_GATEWAY, Some("remote_engine_error")),
            Error::InvalidState(_)
            | Error::Poisoned
            | Error::Load(_)
            | Error::Backend(_)
            | Error::NotFinite(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        let context = match &error {
            Error::PromptTooLong { prompt_tokens, context_tokens } => Some((*prompt_tokens, *context_tokens)),
            Error::PromptOversized { least_tokens, context_tokens } => Some((*least_tokens, *context_tokens)),
            _ => None,
        };
        match told(&error) {
            None => Self { context: context.map(Box::new), ..Self::new(status, code, error.to_string()) },
            Some(message) => {
                tracing::error!("{error}");
                Self::new(status, code, message)
            }
        }
    }
}

impl From<TurnError> for ApiError {
    fn from(error: TurnError) -> Self {
        match error {
            TurnError::Unsupported { param, message } => Self::unsupported(param, message),
            TurnError::Param { param, error } => Self::from(error).param(param),
            TurnError::Other(error) => error.into(),
        }
    }
}

/// Returns the message for a client if the error itself names a path of this machine, which only the log may show; else `None`.
fn told(error: &Error) -> Option<String> {
    let message = match error {
        Error::Store(StoreError::Io { .. }) => "the session could not be read or written".to_owned(),
        Error::Store(StoreError::Damaged { line, .. }) => format!("the session is damaged in line {line}"),
        Error::Store(StoreError::Unsupported { .. }) => {
            "the session is in a form that this server does not read: of a newer version, or encrypted under keys that it lacks, or \
             plain where it encrypts (--encrypt)"
                .to_owned()
        }
        Error::Load(_) => "the model could not be loaded".to_owned(),
        _ => return None,
    };
    Some(format!("{message}; the server's log says more"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use llmctl_base::LoadError;

    #[test]
    fn no_place_on_this_machine_is_told() {
        let path = || PathBuf::from("/home/somebody/secret");
        let message = || "/home/somebody/secret: no space".to_owned();
        for (error, code) in [
            (Error::Store(StoreError::io(&path(), &std::io::Error::other(message()))), Some("storage_error")),
            (
                Error::Store(StoreError::Damaged { path: path(), line: 7, message: message() }),
                Some("session_damaged"),
            ),
            (
                Error::Store(StoreError::Unsupported { path: path(), message: message() }),
                Some("session_damaged"),
            ),
            (Error::Load(LoadError::NotFound(path())), None),
        ] {
            let told = ApiError::from(error);
            assert_eq!((told.status.as_u16(), told.code), (500, code));
            assert!(!told.message.contains("/home") && told.message.contains("log"), "{told:?}");
        }
        assert_eq!(ApiError::from(Error::PromptEmpty).message, "the prompt is empty");
    }
}
