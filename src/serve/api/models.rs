//! Discovery: `GET /v1/models` and `/models`, one model by its id, loading and unloading it, and
//! `GET /props`.
//!
//! Invariant: one length of context stands under every name that some client reads; null while no engine
//! runs.

use std::borrow::Cow;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use serde_json::{Map, Value, json};

use super::request::model_not_found;
use crate::error::ApiError;
use crate::wire::anthropic::is_anthropic;
use crate::wire::json::members;
use crate::{App, ServedEmbedder};
use llmctl_models::adapters::AdapterSpec;
use llmctl_template::DateTime;

/// Names of the context length at the top level of a model, as vLLM, OpenRouter and LM Studio spell it.
const CONTEXT_NAMES: [&str; 3] = ["max_model_len", "context_length", "max_context_length"];

/// Returns the list in OpenAI's form, or in Anthropic's for its clients.
pub async fn list(State(app): State<App>, headers: HeaderMap) -> Json<Value> {
    let served = std::iter::once(ModelEntry::served(&app));
    let models: Vec<ModelEntry<'_>> = served.chain(adapted(&app)).chain(beside(&app)).collect();
    if is_anthropic("", &headers) {
        let data: Vec<Value> = models.iter().map(|listed| listed.anthropic(&app)).collect();
        let [first, last] = [models.first(), models.last()].map(|listed| listed.map(|listed| &listed.id));
        return Json(json!({"data": data, "has_more": false, "first_id": first, "last_id": last}));
    }
    let data: Vec<_> = models.iter().map(|listed| listed.openai(&app)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// Returns one model. Ids may contain slashes.
pub async fn get(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let other = adapted(&app).into_iter().chain(beside(&app)).find(|listed| listed.id == id);
    let listed = other.or_else(|| app.answers_to(&id).then(|| ModelEntry::served(&app)));
    match listed {
        Some(listed) if is_anthropic("", &headers) => Ok(Json(listed.anthropic(&app))),
        Some(listed) => Ok(Json(listed.openai(&app).into())),
        None => Err(model_not_found(&id, &app.model().id)),
    }
}

/// A model of the server, as lists show it.
struct ModelEntry<'a> {
    id: Cow<'a, str>,
    context: Option<usize>,
    /// The model for embeddings or scores beside the one that writes text, if it is this.
    embedder: Option<&'a ServedEmbedder>,
    /// It is the model with one of its adapters.
    is_adapted: bool,
}

/// Returns the model with each of its adapters, which a request may name in its place.
fn adapted(app: &App) -> Vec<ModelEntry<'_>> {
    let Ok(engine) = app.engine() else { return Vec::new() };
    let entry = |spec: &AdapterSpec| {
        let id = format!("{}:{}", app.model().id, spec.name).into();
        ModelEntry { id, is_adapted: true, ..ModelEntry::served(app) }
    };
    engine.spec().model.adapters.iter().map(entry).collect()
}

/// Returns the model for embeddings or scores beside the one that writes text.
fn beside(app: &App) -> Option<ModelEntry<'_>> {
    let served = app.embedder().filter(|served| !served.is_alone)?;
    let context = Some(served.client.texts().spec.context_length);
    Some(ModelEntry { id: served.id.as_str().into(), context, embedder: Some(served), is_adapted: false })
}

impl<'a> ModelEntry<'a> {
    fn served(app: &'a App) -> Self {
        let id = app.model().id.as_str().into();
        Self { id, context: context_length(app), embedder: None, is_adapted: false }
    }

    fn anthropic(&self, app: &App) -> Value {
        anthropic_object(&self.id, app.model().created, self.context)
    }

    /// Returns OpenAI's object with the members that other servers add to it.
    fn openai(&self, app: &App) -> Map<String, Value> {
        let chat = self.embedder.is_none().then(|| &app.model().chat_tokenizer);
        let parent = self.is_adapted.then(|| &app.model().id);
        let aliases = if chat.is_some() && !self.is_adapted { &app.settings().aliases[..] } else { &[] };
        let object = json!({
            "id": self.id,
            "object": "model",
            "created": app.model().created,
            "owned_by": "llmctl",
            "type": if self.is_adapted { "adapter" } else { "base" },
            "parent": parent,
            "capabilities": {
                "completion_chat": chat.is_some_and(|chat| chat.has_template()),
                "function_calling": chat.is_some_and(|chat| chat.output_markup().tool_calls.is_some()),
                "vision": chat.is_some_and(|chat| chat.vision().is_some()),
            },
            "architecture": architecture(chat.is_some_and(|chat| chat.vision().is_some())),
            "aliases": aliases,
            "status": {"value": "loaded"},
            "meta": self.meta(app),
        });
        with_context(object, self.context)
    }

    /// Returns llama.cpp's facts about a model: the context in use and in training, values and bytes of the weights.
    fn meta(&self, app: &App) -> Value {
        if let Some(served) = self.embedder {
            return json!({"n_ctx": self.context, "n_vocab": served.client.texts().spec.vocab_size});
        }
        let facts = app.model().facts.as_ref();
        let trained =
            facts.and_then(|facts| facts.decoder.as_ref().ok()).map(|decoder| decoder.context_length);
        json!({
            "n_ctx": self.context,
            "n_ctx_train": trained,
            "n_params": facts.map(|facts| facts.parameters),
            "size": facts.map(|facts| facts.bytes),
            "n_vocab": app.model().chat_tokenizer.tokenizer().vocab_size(),
        })
    }
}

/// Returns what goes in and comes out, in OpenRouter's form, by which clients switch pictures on.
fn architecture(reads_images: bool) -> Value {
    let inputs: &[&str] = if reads_images { &["text", "image"] } else { &["text"] };
    json!({"input_modalities": inputs, "output_modalities": ["text"]})
}

/// Returns the object of a loaded model of several.
pub fn loaded(app: &App) -> Map<String, Value> {
    ModelEntry::served(app).openai(app)
}

/// Returns the object of a model that is not loaded, of which little is known; `status` has llama.cpp's form.
pub fn not_loaded(id: &str, aliases: &[String], created: u64, status: Value) -> Map<String, Value> {
    let object = json!({
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "llmctl",
        "type": "base",
        "capabilities": null,
        "aliases": aliases,
        "status": status,
        "meta": null,
    });
    with_context(object, None)
}

/// Adds the length of the context to an object, under all its names.
fn with_context(object: Value, context: Option<usize>) -> Map<String, Value> {
    let mut model = members(object);
    model.extend(CONTEXT_NAMES.map(|name| (name.to_owned(), context.into())));
    model
}

/// Returns the form of Anthropic for a model of several.
pub fn anthropic(app: Option<&App>, id: &str, created: u64) -> Value {
    match app {
        Some(app) => ModelEntry::served(app).anthropic(app),
        None => anthropic_object(id, created, None),
    }
}

/// Returns Anthropic's object. The context bounds prompt and answer together, so that it is the limit of both.
fn anthropic_object(id: &str, created: u64, context: Option<usize>) -> Value {
    let created = i64::try_from(created).unwrap_or_default();
    json!({
        "type": "model",
        "id": id,
        "display_name": id,
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

/// A change of a model's state that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelChange {
    Load,
    Unload,
}

/// Reads `ID/load` or `ID/unload`, where the id may contain slashes.
///
/// # Errors
/// 404 for another path.
pub fn change_of(path: &str) -> Result<(&str, ModelChange), ApiError> {
    let change = match path.rsplit_once('/') {
        Some((id, "load")) => Some((id, ModelChange::Load)),
        Some((id, "unload")) => Some((id, ModelChange::Unload)),
        _ => None,
    };
    change.ok_or_else(|| {
        let message = "there is nothing to POST here: /v1/models/{id}/load and /v1/models/{id}/unload are";
        ApiError::new(StatusCode::NOT_FOUND, Some("unknown_url"), message)
    })
}

/// `POST /v1/models/{id}/load` and `/unload` of a server with one model, which is loaded and stays so.
pub async fn change(State(app): State<App>, Path(path): Path<String>) -> Result<Json<Value>, ApiError> {
    let (id, change) = change_of(&path)?;
    if !app.answers_to(id) {
        return Err(model_not_found(id, &app.model().id));
    }
    match change {
        ModelChange::Load => Ok(Json(loaded(&app).into())),
        ModelChange::Unload => {
            let message = format!("{id:?} is the only model of this server and stays loaded");
            Err(ApiError::new(StatusCode::CONFLICT, Some("model_pinned"), message))
        }
    }
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
        "modalities": {"vision": app.reads_images(), "audio": false},
        "bos_token": text(tokenizer.bos()),
        "eos_token": text(tokenizer.eos()),
        "build_info": format!("llmctl {}", env!("CARGO_PKG_VERSION")),
    }))
}

pub fn context_length(app: &App) -> Option<usize> {
    app.engine().ok().map(|engine| engine.spec().context_length())
}
