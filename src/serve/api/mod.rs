//! The endpoints.
//!
//! A wire format (`chat`, `completions`, `messages`, `responses`, `ollama`, `llama_cpp`) reads a body with `request`, starts it
//! with `drive` (which has it `prepare`d) and writes the answer with `sse`, whole (`collect`) or as a
//! stream; `generate` holds the types between them; `eta` estimates how long a prompt takes; `plain` keeps
//! markup out of messages. `patience` lets requests wait for a session; `listing` and `sessions` are the
//! endpoints of sessions, `session_host` what they reach; `text` is the model's text side, `models` its
//! name; `embeddings` computes vectors and scores; `mcp` lists and calls tools; `openapi` describes all of
//! it; `ahead` reads prompts that are computed and not answered. Handlers translate and wait: what may take long runs on `blocking` threads, the model on the
//! engine's.

pub mod ahead;
pub(crate) mod blocking;
pub(crate) mod body;
mod chat;
mod collect;
mod completions;
mod drive;
pub(crate) mod embeddings;
mod eta;
mod generate;
pub(crate) mod image_urls;
mod infill;
mod listing;
pub(crate) mod llama_cpp;
pub(crate) mod mcp;
mod messages;
pub(crate) mod models;
pub(crate) mod ollama;
mod openapi;
mod patience;
mod plain;
mod prepare;
pub(crate) mod reply;
mod request;
mod responses;
pub(crate) mod session_host;
mod sessions;
pub(crate) mod sse;
mod text;

use axum::Router;
use axum::extract::FromRef;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};

use super::App;
use crate::gate::owner::SharesSessions;
use mcp::ServedTools;
use ollama::pull::ServedDownloads;
pub use openapi::{endpoints, paths_with_model, streams};
use session_host::SessionHost;

/// Suggests the endpoint for a request path with a wrong base URL: one without `/v1`, with two, or with a
/// path that is not under it.
pub fn meant(method: &str, path: &str) -> Option<String> {
    let bare = path.trim_matches('/');
    let bare = bare.strip_prefix("api/").unwrap_or(bare);
    let rest = std::iter::successors(Some(bare), |rest| rest.strip_prefix("v1/")).last()?;
    let is_known = |path: &str| endpoints().any(|endpoint| fits(endpoint, method, path));
    let candidates = [format!("/v1/{rest}"), format!("/{rest}")];
    candidates.into_iter().find(|candidate| !is_known(path) && is_known(candidate))
}

/// Returns true if an endpoint of the list is that of a path; HEAD counts as GET.
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
            (Some(part), Some(given)) if part.starts_with('{') && !given.is_empty() => {}
            _ => return false,
        }
    }
}

/// Endpoints that every kind of model has.
fn shared_routes() -> Router<App> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get).post(models::change))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .route("/props", get(models::props))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/rerank", post(embeddings::rerank))
        .route("/rerank", post(embeddings::rerank))
        .route("/v2/rerank", post(embeddings::rerank))
        .route("/reranking", post(embeddings::rerank))
        .route("/v1/reranking", post(embeddings::rerank))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/tokenizer_info", get(text::tokenizer_info))
        .route("/openapi.json", get(openapi::get))
        .route("/api/tags", get(ollama::models::tags))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/show", post(ollama::models::show))
        .route("/api/embed", post(ollama::vectors::embed))
        .route("/api/embeddings", post(ollama::vectors::embedding))
        .route("/lora-adapters", get(llama_cpp::adapters).post(llama_cpp::change_adapters))
}

/// Returns the endpoints of a model. Those that write text refuse it where the model computes embeddings or scores.
pub fn routes_of(app: &App) -> Router<App> {
    let of_text = text_routes().merge(session_routes()).merge(tool_routes());
    let of_text = match app.writes_text() {
        true => of_text,
        false => of_text.layer(from_fn_with_state(app.clone(), embeddings::writes_no_text)),
    };
    shared_routes().merge(of_text).merge(store_routes())
}

/// Endpoints of a model that writes text.
fn text_routes() -> Router<App> {
    Router::new()
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/v1/messages", post(messages::post))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::post))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/infill", post(infill::post))
        .route("/completion", post(llama_cpp::completion))
        .route("/slots", get(llama_cpp::slots))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/apply-template", post(text::apply_template))
}

/// Endpoints of saved conversations, which need no loaded model.
pub fn session_routes<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    SessionHost: FromRef<S>,
    SharesSessions: FromRef<S>,
{
    Router::new()
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/sessions", get(listing::list))
        .route("/v1/sessions/{id}", get(listing::get).delete(sessions::delete))
        .route("/v1/sessions/{id}/reset", post(sessions::reset))
        .route("/v1/sessions/{id}/explain", get(listing::explain))
        .route("/v1/sessions/{id}/receipt", get(listing::receipt))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/rename", post(sessions::rename))
        .route("/v1/sessions/{id}/restore", post(sessions::restore))
}

/// Ollama's endpoints that need no loaded model.
pub fn store_routes<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    ServedDownloads: FromRef<S>,
{
    Router::new()
        .route("/api/version", get(ollama::models::version))
        .route("/api/pull", post(ollama::pull::pull))
        .route("/api/copy", post(ollama::models::copy))
        .route("/api/delete", delete(ollama::pull::erase))
}

/// Endpoints of tools, which need no loaded model.
pub fn tool_routes<S>() -> Router<S>
where
    S: Clone + Send + Sync + 'static,
    ServedTools: FromRef<S>,
{
    Router::new().route("/v1/mcp", get(mcp::list)).route("/v1/mcp/tools/{name}", post(mcp::call))
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
