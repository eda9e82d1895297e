//! The endpoints.
//!
//! A wire format (`chat`, `completions`) reads a body with `request`, starts it with `drive` (which has it `prepare`d) and writes the answer whole
//! (`collect`) or as a stream (`sse`); `turn` is the words between them, `voice` tells answer, reasoning and calls apart.
//! `conversations` is what session ids name, `transient` what the headers of clients name, `line` and `patience` how requests wait
//! for a session, `listing` and `sessions` the endpoints of all that; `text` is the model's text side, `models` its name.
//! Handlers translate and wait: what may take long runs on blocking threads, the model on the engine's.

mod body;
mod chat;
mod collect;
mod completions;
pub(crate) mod conversations;
mod drive;
pub(crate) mod line;
mod listing;
mod models;
mod patience;
mod prepare;
mod reply;
mod request;
mod sessions;
mod sse;
mod text;
pub(crate) mod transient;
mod turn;
mod voice;

use axum::Router;
use axum::routing::{get, post};

use super::App;
use super::error::ApiError;

/// All endpoints that speak of models, generations and sessions, without the layers around them.
pub fn routes() -> Router<App> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/v1/chat/completions", post(chat::post))
        .route("/v1/completions", post(completions::post))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/tokenizer_info", get(text::tokenizer_info))
        .route("/apply-template", post(text::apply_template))
        .route("/v1/sessions", get(listing::list))
        .route("/v1/sessions/{id}", get(listing::get).delete(sessions::delete))
        .route("/v1/sessions/{id}/reset", post(sessions::reset))
        .route("/v1/sessions/{id}/explain", get(listing::explain))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/restore", post(sessions::restore))
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
    done.map_err(|_| drive::internal("the request failed within the server"))?
}
