//! The endpoints.
//!
//! A wire format (`chat`, `completions`, `messages`, `responses`) reads a body with `request`, starts it with `drive` (which has it `prepare`d) and writes the answer whole
//! (`collect`) or as a stream (`sse`); `generate` holds the types between them; `eta` estimates how long a prompt takes; `plain`
//! keeps markup out of messages.
//! `conversations` is what session ids name, `transient` what the headers of clients name, `line` and `patience` how requests wait
//! for a session, `listing` and `sessions` the endpoints of all that; `text` is the model's text side, `models` its name.
//! Handlers translate and wait: what may take long runs on blocking threads, the model on the engine's.

mod body;
mod chat;
mod collect;
mod completions;
pub(crate) mod conversations;
mod drive;
mod embeddings;
mod eta;
mod generate;
mod infill;
mod listing;
mod messages;
mod models;
mod patience;
mod plain;
mod prepare;
mod reply;
mod request;
mod responses;
pub(crate) mod session_queue;
mod sessions;
mod sse;
mod text;
pub(crate) mod transient;

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::{get, post};

use super::App;
use super::error::ApiError;

/// Descriptions of [`routes`] for people.
pub const ENDPOINTS: [&str; 25] = [
    "GET /v1/models",
    "GET /v1/models/{id}",
    "GET /models",
    "GET /models/{id}",
    "GET /props",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /infill",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /tokenize",
    "POST /detokenize",
    "POST /apply-template",
    "GET /v1/sessions",
    "GET /v1/sessions/{id}",
    "DELETE /v1/sessions/{id}",
    "POST /v1/sessions/{id}/reset",
    "GET /v1/sessions/{id}/explain",
    "POST /v1/sessions/{id}/fork",
];

/// The endpoint that somebody meant whose base URL is not this server's: it lacks `/v1`, or has it twice, or has what is not under it.
pub fn meant(method: &str, path: &str) -> Option<String> {
    let bare = path.trim_matches('/');
    let bare = bare.strip_prefix("api/").unwrap_or(bare);
    let rest = std::iter::successors(Some(bare), |rest| rest.strip_prefix("v1/")).last()?;
    let is_known = |path: &str| ENDPOINTS.iter().any(|endpoint| fits(endpoint, method, path));
    let candidates = [format!("/v1/{rest}"), format!("/{rest}")];
    candidates.into_iter().find(|candidate| !is_known(path) && is_known(candidate))
}

/// Whether an endpoint of the list is that of a path; HEAD is where GET is.
fn fits(endpoint: &str, method: &str, path: &str) -> bool {
    let method = if method == "HEAD" { "GET" } else { method };
    let Some(pattern) = endpoint.strip_prefix(method).and_then(|rest| rest.strip_prefix(' ')) else {
        return false;
    };
    let (mut ours, mut theirs) = (pattern.split('/'), path.split('/'));
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => return true,
            (Some(part), Some(given)) if part == given => {}
            (Some("{id}"), Some(given)) if !given.is_empty() => {}
            _ => return false,
        }
    }
}

/// Endpoints that every kind of model has.
fn shared_routes() -> Router<App> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .route("/props", get(models::props))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/rerank", post(embeddings::rerank))
        .route("/rerank", post(embeddings::rerank))
        .route("/v2/rerank", post(embeddings::rerank))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/tokenizer_info", get(text::tokenizer_info))
}

/// The endpoints of a server whose model computes embeddings or scores: those that write text refuse it.
pub fn embedder_routes() -> Router<App> {
    shared_routes()
        .route("/v1/chat/completions", post(embeddings::writes_no_text))
        .route("/v1/completions", post(embeddings::writes_no_text))
        .route("/v1/messages", post(embeddings::writes_no_text))
        .route("/v1/responses", post(embeddings::writes_no_text))
        .route("/infill", post(embeddings::writes_no_text))
        .route("/apply-template", post(embeddings::writes_no_text))
}

/// All endpoints that speak of models, generations and sessions, without the layers around them.
pub fn routes() -> Router<App> {
    shared_routes()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/messages", post(messages::post))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::post))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/infill", post(infill::post))
        .route("/apply-template", post(text::apply_template))
        .route("/v1/sessions", get(listing::list))
        .route("/v1/sessions/{id}", get(listing::get).delete(sessions::delete))
        .route("/v1/sessions/{id}/reset", post(sessions::reset))
        .route("/v1/sessions/{id}/explain", get(listing::explain))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/restore", post(sessions::restore))
}

/// Returns whether a request is in Anthropic's form, by its path or by the header that its clients send. Its response is, too.
pub fn is_anthropic(path: &str, headers: &HeaderMap) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/") || headers.contains_key("anthropic-version")
}

/// Runs work that may take long or wait for a disk where waiting is allowed.
///
/// # Errors
/// Those of the work.
async fn blocking<T: Send + 'static>(
    app: &App,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let app = app.clone();
    let done = tokio::task::spawn_blocking(move || work(&app)).await;
    done.map_err(|_| ApiError::internal("the request failed within the server"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_meant_is_found() {
        let check = |method: &str, path: &str, expected: Option<&str>| {
            assert_eq!(meant(method, path).as_deref(), expected, "{method} {path}");
        };
        check("POST", "/chat/completions", Some("/v1/chat/completions"));
        check("GET", "/sessions", Some("/v1/sessions"));
        check("HEAD", "/sessions/a", Some("/v1/sessions/a"));
        check("GET", "/v1/props", Some("/props"));
        check("POST", "/v1/v1/chat/completions", Some("/v1/chat/completions"));
        check("POST", "/api/v1/completions", Some("/v1/completions"));
        check("POST", "/v1/tokenize", Some("/tokenize"));
        check("POST", "/v1/chat/completions/", Some("/v1/chat/completions"));
        check("GET", "/chat/completions", None);
        check("GET", "/v1/nothing", None);
        check("GET", "/", None);
        check("GET", "/v1/models", None);
    }
}
