//! Discovery: `GET /v1/models` and `/models`, one model by its id, and `GET /props`.
//!
//! Invariant: one length of context stands under every name that some client reads; null while no engine runs.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde_json::{Map, Value, json};

use super::is_anthropic;
use super::request::model_not_found;
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::template::DateTime;

/// Names of the context length at the top level of a model, as vLLM, OpenRouter and LM Studio spell it.
const CONTEXT_NAMES: [&str; 3] = ["max_model_len", "context_length", "max_context_length"];

/// Returns the list in OpenAI's form, or in Anthropic's for its clients.
pub async fn list(State(app): State<App>, headers: HeaderMap) -> Json<Value> {
    if is_anthropic("", &headers) {
        let id = &app.model().id;
        let data = [anthropic_model(&app)];
        return Json(json!({"data": data, "has_more": false, "first_id": id, "last_id": id}));
    }
    Json(json!({"object": "list", "data": [model(&app)]}))
}

/// Returns one model. Ids may contain slashes.
pub async fn get(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    match app.answers_to(&id) {
        true if is_anthropic("", &headers) => Ok(Json(anthropic_model(&app))),
        true => Ok(Json(model(&app).into())),
        false => Err(model_not_found(&id, &app.model().id)),
    }
}

/// Returns Anthropic's object. The context bounds prompt and answer together, so that it is the limit of both.
fn anthropic_model(app: &App) -> Value {
    let context = context_length(app);
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

/// Returns the server's properties in llama.cpp's form, which agents read for the length of the context. The path of the
/// model's file is not among them.
pub async fn props(State(app): State<App>) -> Json<Value> {
    let chat_tokenizer = &app.model().chat_tokenizer;
    let tokenizer = chat_tokenizer.tokenizer();
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.id_to_token(id)).unwrap_or_default();
    let slots = app.engine().ok().map(|engine| engine.spec().config.max_running);
    Json(json!({
        "default_generation_settings": {"n_ctx": context_length(&app)},
        "total_slots": slots,
        "model_alias": app.model().id,
        "chat_template": chat_tokenizer.template_source().unwrap_or_default(),
        "modalities": {"vision": false, "audio": false},
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "build_info": format!("llmctl {}", env!("CARGO_PKG_VERSION")),
    }))
}

fn context_length(app: &App) -> Option<usize> {
    app.engine().ok().map(|engine| engine.spec().context_length())
}

/// Returns OpenAI's object with the members that other servers add to it.
fn model(app: &App) -> Map<String, Value> {
    let served = app.model();
    let context = context_length(app);
    let members = json!({
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": "llmctl",
        "type": "base",
        "capabilities": {
            "completion_chat": served.chat_tokenizer.has_template(),
            "function_calling": served.chat_tokenizer.output_markup().tool_calls.is_some(),
        },
        "aliases": app.settings().aliases,
        "meta": meta(app, context),
    });
    let Value::Object(mut model) = members else { unreachable!("written as an object above") };
    model.extend(CONTEXT_NAMES.map(|name| (name.to_owned(), context.into())));
    model
}

/// Returns llama.cpp's facts about a model: the context in use and in training, values and bytes of the weights.
fn meta(app: &App, context: Option<usize>) -> Value {
    let facts = app.model().facts.as_ref();
    let trained = facts.and_then(|facts| facts.decoder.as_ref().ok()).map(|decoder| decoder.context_length);
    json!({
        "n_ctx": context,
        "n_ctx_train": trained,
        "n_params": facts.map(|facts| facts.parameters),
        "size": facts.map(|facts| facts.bytes),
        "n_vocab": app.model().chat_tokenizer.tokenizer().vocab_size(),
    })
}
