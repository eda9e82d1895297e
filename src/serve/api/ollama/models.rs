//! Ollama's routes of models: `GET /api/tags`, `/api/ps` and `/api/version`, `POST /api/show`, and those that change what is on disk.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::super::body::JsonBody;
use super::super::models::context_length;
use super::super::reply::Ignored;
use super::super::request::model_not_found;
use crate::error::ApiError;
use crate::wire::ollama::{self, ModelCard, is_same_name};
use crate::wire::{Fields, Problems};
use crate::{App, ServedEmbedder, ServedModel};
use llmctl_base::{SAMPLING, TopK};
use llmctl_models::load::ModelFacts;

/// Returns the models under all of their names.
pub async fn tags(State(app): State<App>) -> Json<Value> {
    let mut models = of_app(&app, app.settings().aliases.iter());
    models.extend(beside(&app).map(|embedder| embedder_card(embedder, &app).listed(&embedder.id).into()));
    Json(json!({"models": models}))
}

/// Returns the loaded models.
pub async fn ps(State(app): State<App>) -> Json<Value> {
    let mut models = vec![card(&app).running(None)];
    models.extend(beside(&app).map(|embedder| embedder_card(embedder, &app).running(None)));
    Json(json!({"models": models}))
}

/// Returns the version of Ollama whose API this is, and that of the program.
pub async fn version() -> Json<Value> {
    Json(json!({"version": ollama::VERSION, "llmctl": env!("CARGO_PKG_VERSION")}))
}

/// Returns all that is known of a model.
pub async fn show(
    State(app): State<App>,
    JsonBody(body): JsonBody,
) -> Result<(Ignored, Json<Value>), ApiError> {
    let (ignored, name) = read_name(app.settings().lenient, body)?;
    if let Some(embedder) = beside(&app).filter(|embedder| is_same_name(&embedder.id, &name)) {
        return Ok((ignored, Json(embedder_card(embedder, &app).shown("", ""))));
    }
    if !app.answers_to(&name) {
        return Err(model_not_found(&name, &app.model().id));
    }
    Ok((ignored, Json(shown(&card(&app), app.model()))))
}

/// Refuses to copy a model.
pub async fn copy() -> ApiError {
    let message = "a model is not copied: serve --alias gives another name";
    ApiError::new(StatusCode::FORBIDDEN, Some("not_allowed"), message)
}

/// Reads a body that names a model, in one of two fields.
///
/// # Errors
/// All that is wrong with the body, the first kind of it.
pub fn read_name(lenient: bool, body: Map<String, Value>) -> Result<(Ignored, String), ApiError> {
    let (name, mut problems) = Problems::new(lenient).read(body, |fields| {
        let name = name_of(fields);
        for hint in ["verbose", "system", "template", "options", "insecure", "username", "password", "stream"]
        {
            fields.hint(hint);
        }
        name
    })?;
    Ok((Ignored(problems.take_ignored()), name))
}

/// Reads the name of a model.
pub fn name_of(fields: &mut Fields<'_>) -> String {
    let spelling = fields.spelled(&["model", "name"]);
    fields.require(spelling);
    fields.text(spelling).unwrap_or_default()
}

/// Returns the entries of a loaded model: one for its id and for each of the other names.
pub fn of_app<'a>(app: &'a App, names: impl Iterator<Item = &'a String>) -> Vec<Value> {
    let card = card(app);
    let names = names.map(String::as_str).filter(|name| *name != "*");
    std::iter::once(card.id).chain(names).map(|name| card.listed(name).into()).collect()
}

/// Returns the card of a loaded model.
pub fn card(app: &App) -> ModelCard<'_> {
    let served = app.model();
    let capabilities = match app.embedder().filter(|embedder| embedder.is_alone) {
        Some(_) => vec!["embedding"],
        None => capabilities(served, app.reads_images()),
    };
    let (id, digest) = (served.id.as_str(), served.fingerprint.fingerprint.as_str());
    let facts = served.facts.as_ref();
    ModelCard { id, modified: served.created, digest, facts, context: context_length(app), capabilities }
}

/// Returns the card of a model that is not loaded, of which the texts may be there.
pub fn unloaded_card<'a>(
    id: &'a str,
    modified: u64,
    facts: Option<&'a ModelFacts>,
    texts: Option<&ServedModel>,
) -> ModelCard<'a> {
    let context = facts.and_then(|facts| facts.decoder.as_ref().ok()).map(|decoder| decoder.context_length);
    let is_embedder = facts.is_some_and(|facts| facts.text_task.is_some());
    let capabilities = match texts {
        Some(texts) => capabilities(texts, texts.chat_tokenizer.vision().is_some()),
        None => vec![if is_embedder { "embedding" } else { "completion" }],
    };
    ModelCard { id, modified, digest: "", facts, context, capabilities }
}

/// Returns all that is known of a model.
pub fn shown(card: &ModelCard<'_>, served: &ServedModel) -> Value {
    card.shown(served.chat_tokenizer.template_source().unwrap_or_default(), &parameters(served))
}

/// Returns the publisher's sampling, one parameter a line, under Ollama's names.
fn parameters(served: &ServedModel) -> String {
    let numbers = SAMPLING.iter().filter_map(|number| {
        let name = number.spellings().iter().find(|name| **name == "repeat_penalty").unwrap_or(&number.name);
        number.given(&served.defaults.numbers).map(|value| format!("{name} {value}\n"))
    });
    let top_k = match served.defaults.top_k {
        Some(TopK::Best(count)) => Some(format!("top_k {count}\n")),
        _ => None,
    };
    numbers.chain(top_k).collect()
}

fn capabilities(served: &ServedModel, reads_images: bool) -> Vec<&'static str> {
    let chat = &served.chat_tokenizer;
    let all = [
        (true, "completion"),
        (chat.has_template() && chat.shows_tools(), "tools"),
        (chat.output_markup().reasoning.is_some(), "thinking"),
        (reads_images, "vision"),
        (chat.infill().is_some(), "insert"),
    ];
    all.into_iter().filter(|(is_there, _)| *is_there).map(|(_, name)| name).collect()
}

/// Returns the model for embeddings or scores beside the one that writes text.
fn beside(app: &App) -> Option<&ServedEmbedder> {
    app.embedder().filter(|embedder| !embedder.is_alone)
}

fn embedder_card<'a>(embedder: &'a ServedEmbedder, app: &App) -> ModelCard<'a> {
    let context = Some(embedder.client.texts().spec.context_length);
    let (id, modified) = (embedder.id.as_str(), app.model().created);
    ModelCard { id, modified, digest: "", facts: None, context, capabilities: vec!["embedding"] }
}
