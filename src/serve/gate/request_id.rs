//! The id of a request, and the headers of our own.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The name of the same header in Anthropic's API.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// Names the format of tool calls if it is not the model's own.
pub const X_TOOL_FORMAT: HeaderName = HeaderName::from_static("x-llmctl-tool-format");

/// The seed of a sampled answer: a request with it gets the same one.
pub const X_SEED: HeaderName = HeaderName::from_static("x-llmctl-seed");

/// The hash of the receipt of a stored turn.
pub const X_RECEIPT: HeaderName = HeaderName::from_static("x-llmctl-receipt");

/// Longer ids of clients are replaced by a new one.
const MAX_REQUEST_ID: usize = 128;

/// The `x-request-id` of a request: the client's if it is usable, else a new one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRequestId(pub String);

impl HttpRequestId {
    pub fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(&X_REQUEST_ID).and_then(|value| value.to_str().ok());
        let is_usable = |id: &&str| {
            (1..=MAX_REQUEST_ID).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
        };
        given.filter(is_usable).map_or_else(Self::new, |id| Self(id.to_owned()))
    }

    fn new() -> Self {
        Self(format!("req_{}", uuid::Uuid::new_v4().simple()))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for HttpRequestId {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let known = parts.extensions.get::<Self>().cloned();
        Ok(known.unwrap_or_else(|| Self::of(&parts.headers)))
    }
}
