//! `GET /openapi.json`: the HTTP interface as OpenAPI 3.1.
//!
//! Sources: `bodies` observes the reader of each body while it reads examples, and `schema` makes schemas of
//! the fields that it asked for; `fields.json` has descriptions and limits of fields, `operations` routes and
//! statuses, `answers.json` schemas of answers.
//!
//! Invariant: the document names every route and every field of a body that is read, and no other; tests
//! compare it with docs/http.md and docs/http-fields.md, and real answers with the schemas.

mod bodies;
mod operations;
mod schema;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::blocking::blocking;
use crate::App;
use crate::error::ApiError;

const ABOUT: &str = "Large language models on this machine. The interfaces of OpenAI (chat completions, completions, Responses) and Anthropic \
                     (Messages), with sessions that stay warm. Every field of a body is honoured, accepted as a hint without effect, or refused by name.";

pub use operations::{endpoints, paths_with_model, streams};

/// Returns the document.
///
/// # Errors
/// 503 without an engine, whose limits the readers of bodies look at.
pub async fn get(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    blocking(&app, document).await.map(Json)
}

fn document(app: &App) -> Result<Value, ApiError> {
    app.engine()?;
    let mut schemas = object_of(include_str!("openapi/answers.json"));
    schemas.extend(bodies::schemas(app));
    Ok(json!({
        "openapi": "3.1.0",
        "info": {
            "title": "llmctl",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        // Relative to this document, so that a proxy may serve it below a path.
        "servers": [{"url": "./"}],
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "paths": operations::paths(),
        "components": {
            "schemas": schemas,
            "responses": operations::error_responses(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }))
}

/// Parses a file of this folder, which is an object.
fn object_of(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).expect("a file of the source, which tests read")
}
