//! `GET /v1/models` and `/v1/models/{id}`.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};

use super::is_anthropic;
use super::request::model_not_found;
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::template::DateTime;

/// The list in OpenAI's form, or in Anthropic's for its clients.
pub async fn list(State(app): State<App>, headers: HeaderMap) -> Json<Value> {
    if is_anthropic("", &headers) {
        let id = &app.model().id;
        let data = [anthropic_model(&app)];
        return Json(json!({"data": data, "has_more": false, "first_id": id, "last_id": id}));
    }
    Json(json!({"object": "list", "data": [model(&app)]}))
}

/// One model. Ids may contain slashes.
pub async fn get(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    match app.answers_to(&id) {
        true if is_anthropic("", &headers) => Ok(Json(anthropic_model(&app))),
        true => Ok(Json(model(&app))),
        false => Err(model_not_found(&id, &app.model().id)),
    }
}

/// Returns Anthropic's object. The context bounds prompt and answer together, so that it is the limit of both.
fn anthropic_model(app: &App) -> Value {
    let context = app.engine().ok().map(|engine| engine.spec().context_length());
    let created = i64::try_from(app.model().created).unwrap_or_default();
    json!({
        "type": "model",
        "id": app.model().id,
        "display_name": app.model().id,
        "created_at": DateTime::from_unix(created).strftime("%FT%TZ"),
        "max_input_tokens": context,
        "max_tokens": context,
        "lifecycle": "active",
        "capabilities": null,
        "line": null,
        "deprecated_at": null,
        "retires_at": null,
    })
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
