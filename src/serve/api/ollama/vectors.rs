//! Ollama's `POST /api/embed` and its older form `/api/embeddings`.

use axum::extract::State;
use axum::response::Response;
use serde_json::json;

use super::super::body::{JsonBody, RequestArrival};
use super::super::embeddings::{self, EmbeddingBody};
use super::RequestTimes;
use crate::App;
use crate::error::ApiError;
use crate::wire::{Fields, ollama};

/// Vectors of one text or several.
pub async fn embed(
    State(app): State<App>,
    RequestArrival(begun): RequestArrival,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let times = RequestTimes::new(begun);
    embeddings::vectors(&app, body, embed_body, move |model, vectors, num_tokens| {
        let [total, load] = times.members().map(|(_, time)| time);
        embeddings::json_bytes(&json!({
            "model": ollama::tagged(model),
            "embeddings": vectors,
            "total_duration": total,
            "load_duration": load,
            "prompt_eval_count": num_tokens,
        }))
    })
    .await
}

/// The vector of one text.
pub async fn embedding(State(app): State<App>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    embeddings::vectors(&app, body, embedding_body, |_, vectors, _| {
        embeddings::json_bytes(&json!({"embedding": vectors.first()}))
    })
    .await
}

/// Reads a request for vectors.
pub fn embed_body(fields: &mut Fields<'_>) -> EmbeddingBody {
    of(fields, "input")
}

/// Reads a request for one vector.
pub fn embedding_body(fields: &mut Fields<'_>) -> EmbeddingBody {
    of(fields, "prompt")
}

fn of(fields: &mut Fields<'_>, name: &'static str) -> EmbeddingBody {
    fields.hint("options");
    embeddings::body_of(fields, name)
}
