//! `GET /v1/models` and `/v1/models/{id}`.

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::request::model_not_found;
use crate::serve::App;
use crate::serve::error::ApiError;

pub async fn list(State(app): State<App>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&app)]}))
}

/// Ids may contain slashes.
pub async fn get(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    match app.answers_to(&id) {
        true => Ok(Json(model(&app))),
        false => Err(model_not_found(&id, &app.model().id)),
    }
}

/// OpenAI's object, with the context under the name that routers read; null while there is no engine to tell it.
fn model(app: &App) -> Value {
    let context = app.engine().ok().map(|engine| engine.spec().context_length());
    json!({
        "id": app.model().id,
        "object": "model",
        "created": app.model().created,
        "owned_by": "llmctl",
        "type": "base",
        "capabilities": {
            "completion_chat": app.model().chat_tokenizer.has_template(),
            "function_calling": app.model().chat_tokenizer.output_markup().tool_calls.is_some(),
        },
        "max_model_len": context,
    })
}
