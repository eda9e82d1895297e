//! `GET /v1/models` of a server with several models, one of them by its id, and requests to load and unload
//! it.
//!
//! `status` has the form of llama.cpp's router: `{"value": "loaded"}`, with `failed` and the reason after a
//! failure.

use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use serde_json::{Map, Value, json};

use super::Fleet;
use super::table::{Status, UnloadRefusal};
use crate::api::blocking::blocking;
use crate::api::body::{JsonBody, RequestArrival};
use crate::api::models;
use crate::api::models::{ModelChange, change_of};
use crate::api::ollama::models as cards;
use crate::api::reply::Ignored;
use crate::error::ApiError;
use crate::wire::anthropic::is_anthropic;

/// Returns the list in OpenAI's form, or in Anthropic's for its clients.
pub async fn list(State(fleet): State<Fleet>, headers: HeaderMap) -> Json<Value> {
    let all = 0..fleet.state.names.len();
    if is_anthropic("", &headers) {
        let data: Vec<Value> = all.map(|index| fleet.anthropic(index)).collect();
        let [first, last] = [fleet.ids().next(), fleet.ids().last()];
        return Json(json!({"data": data, "has_more": false, "first_id": first, "last_id": last}));
    }
    let data: Vec<_> = all.map(|index| fleet.openai(index)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// Returns one model. Ids may contain slashes.
pub async fn get(
    State(fleet): State<Fleet>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let index = fleet.find(Some(&id), "")?;
    Ok(Json(match is_anthropic("", &headers) {
        true => fleet.anthropic(index),
        false => fleet.openai(index).into(),
    }))
}

/// Ollama's list of all models under all of their names.
pub async fn tags(State(fleet): State<Fleet>) -> Result<Json<Value>, ApiError> {
    blocking(&fleet, |fleet| {
        let all = 0..fleet.state.names.len();
        let models: Vec<Value> = all.flat_map(|index| fleet.tags(index)).collect();
        Ok(Json(json!({"models": models})))
    })
    .await
}

/// Ollama's list of the models that are loaded.
pub async fn ps(State(fleet): State<Fleet>) -> Json<Value> {
    let keep_alive = fleet.state.keep_alive.get().copied().unwrap_or(Duration::MAX);
    let loaded = |index: usize| {
        let member = fleet.state.pool.value(index)?;
        Some(cards::card(&member.app).running(fleet.state.pool.left(index, keep_alive)))
    };
    let models: Vec<Value> = (0..fleet.state.names.len()).filter_map(loaded).collect();
    Json(json!({"models": models}))
}

/// What Ollama's clients ask about one model, which is not loaded for that.
pub async fn show(
    State(fleet): State<Fleet>,
    JsonBody(body): JsonBody,
) -> Result<(Ignored, Json<Value>), ApiError> {
    let (ignored, name) = cards::read_name(fleet.settings().lenient, body)?;
    let index = fleet.find(Some(&name), "")?;
    let shown = blocking(&fleet, move |fleet| Ok(fleet.shown(index))).await?;
    Ok((ignored, Json(shown)))
}

/// `POST /v1/models/{id}/load` and `/unload`: done when it answers; nothing is to do where the model is so already.
pub async fn change(
    State(fleet): State<Fleet>,
    RequestArrival(begun): RequestArrival,
    Path(path): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let (id, change) = change_of(&path)?;
    let index = fleet.find(Some(id), "")?;
    match change {
        ModelChange::Load => {
            fleet.state.pool.forget_failure(index);
            let lease = fleet.acquire(index, begun).await?;
            fleet.state.pool.keep_alive(index, None);
            drop(lease);
        }
        ModelChange::Unload => fleet.state.pool.unload(index).await.map_err(|refusal| stays(id, refusal))?,
    }
    Ok(Json(fleet.openai(index).into()))
}

pub fn stays(id: &str, refusal: UnloadRefusal) -> ApiError {
    let (code, why) = match refusal {
        UnloadRefusal::Pinned => ("model_pinned", "stays loaded (serve --pin)"),
        UnloadRefusal::Busy => ("model_in_use", "is in use, or being loaded"),
    };
    ApiError::new(StatusCode::CONFLICT, Some(code), format!("{id:?} {why}"))
}

impl Fleet {
    fn openai(&self, index: usize) -> Map<String, Value> {
        let names = &self.state.names[index];
        match self.state.pool.value(index) {
            Some(member) => models::loaded(&member.app),
            None => {
                let status = status_json(&self.status(index));
                models::not_loaded(&names.id, &names.aliases, self.state.created, status)
            }
        }
    }

    fn tags(&self, index: usize) -> Vec<Value> {
        let names = &self.state.names[index];
        if let Some(member) = self.state.pool.value(index) {
            return cards::of_app(&member.app, names.aliases.iter());
        }
        let card = cards::unloaded_card(&names.id, self.state.created, names.facts.as_ref(), None);
        let all = names.aliases.iter().filter(|name| *name != "*");
        std::iter::once(&names.id).chain(all).map(|name| card.listed(name).into()).collect()
    }

    fn shown(&self, index: usize) -> Value {
        if let Some(member) = self.state.pool.value(index) {
            return cards::shown(&cards::card(&member.app), member.app.model());
        }
        let names = &self.state.names[index];
        let texts = (names.texts)().ok().filter(|_| !names.is_embedder);
        let card = cards::unloaded_card(&names.id, self.state.created, names.facts.as_ref(), texts.as_ref());
        texts.as_ref().map_or_else(|| card.shown("", ""), |texts| cards::shown(&card, texts))
    }

    fn anthropic(&self, index: usize) -> Value {
        let member = self.state.pool.value(index);
        let app = member.as_ref().map(|member| &member.app);
        models::anthropic(app, &self.state.names[index].id, self.state.created)
    }
}

fn status_json(status: &Status) -> Value {
    let mut object = json!({"value": status.name()});
    if let Status::Failed(why) = status {
        object["failed"] = true.into();
        object["error"] = why.as_str().into();
    }
    object
}
