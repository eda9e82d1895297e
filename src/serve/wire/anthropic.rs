//! Anthropic's Messages format: bodies into the crate's vocabulary, answers and errors out of it.
//!
//! Invariants: as in `wire`, every field is taken by name and what is left over is refused; places in
//! lists are written with dots (`messages.3.content.1`), as Anthropic's API writes them. Knows no endpoint
//! and no model.

pub mod answer;
pub mod error;
pub mod messages;
pub mod output;
pub mod tools;

use axum::http::HeaderMap;

use super::Fields;
use super::hints::OTHER_SERVERS;

/// Takes the hints at the top level of a body, beside those that every API takes.
pub fn hints(fields: &mut Fields<'_>) {
    OTHER_SERVERS.anthropic.iter().for_each(|name| fields.hint(name));
}

/// Returns whether a request is in Anthropic's form, by its path or by the header that its clients send.
/// Its response is, too.
pub fn is_anthropic(path: &str, headers: &HeaderMap) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/") || headers.contains_key("anthropic-version")
}
