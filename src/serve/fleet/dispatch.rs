//! Gives each request to the model that it names.
//!
//! Invariant: a model is loaded only for a body that is a JSON object, and it is parsed once.

use std::collections::HashMap;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Map, Value};
use tower::ServiceExt;

use super::table::UnloadRefusal;
use super::waiting::{RequestKeepAlive, Waiting};
use super::{Fleet, listing};
use crate::api;
use crate::api::body::JsonBody;
use crate::error::ApiError;
use crate::telemetry::ledger::Ledger;
use crate::wire::ollama::{self, AnswerKind, is_ollama};

/// Endpoints whose query may name the model: `?model=ID`.
const BY_QUERY: [&str; 4] = ["/props", "/slots", "/tokenizer_info", "/openapi.json"];

/// Endpoints whose body names a model that is not loaded for it.
const WITHOUT_LOAD: [&str; 2] = ["/api/show", "/api/pull"];

/// The endpoints of a server with several models, without the layers around them.
pub fn routes(fleet: Fleet) -> Router {
    let listed = Router::new()
        .route("/v1/models", get(listing::list))
        .route("/models", get(listing::list))
        .route("/v1/models/{*id}", get(listing::get).post(listing::change))
        .route("/models/{*id}", get(listing::get))
        .route("/api/tags", get(listing::tags))
        .route("/api/ps", get(listing::ps))
        .route("/api/show", post(listing::show));
    let paths = api::paths_with_model().filter(|path| !WITHOUT_LOAD.contains(path));
    let with_body = paths.fold(listed, |routes, path| routes.route(path, post(by_body)));
    let all = BY_QUERY.iter().fold(with_body, |routes, path| routes.route(path, get(by_query)));
    let all = all.merge(api::session_routes()).merge(api::tool_routes()).merge(api::store_routes());
    let change = post(api::llama_cpp::change_adapters);
    all.route("/lora-adapters", get(api::llama_cpp::no_adapters).merge(change)).with_state(fleet)
}

async fn by_body(State(fleet): State<Fleet>, request: Request) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    JsonBody::check_head(&parts.headers)?;
    // The guard has read the body, within its limits.
    let bytes = to_bytes(body, usize::MAX).await.map_err(|_| ApiError::internal("the body is gone"))?;
    let mut body = JsonBody::parse(bytes).await?;
    let path = parts.uri.path();
    let index = fleet.find(named_model(&body.0)?, path)?;
    let is_ollama = is_ollama(path);
    let keep_alive = if is_ollama { keep_alive(&mut body.0)? } else { None };
    if keep_alive == Some(Duration::ZERO) && asks_nothing(&body.0) {
        return fleet.unload(index, path).await;
    }
    let streams_by_default = Value::Bool(is_ollama);
    let is_streamed = body.0.get("stream").unwrap_or(&streams_by_default) == &Value::Bool(true);
    let is_streamed = is_streamed && api::streams(path);
    parts.extensions.insert(body);
    parts.extensions.insert(RequestKeepAlive(keep_alive));
    let request = Request::from_parts(parts, Body::empty());
    let waiting = Waiting { fleet, index, request, ledger: Ledger::current() };
    match is_streamed {
        true => waiting.streamed().await,
        false => waiting.answered().await,
    }
}

impl Fleet {
    /// Answers Ollama's request for nothing but the end of the model.
    ///
    /// # Errors
    /// 409 for a model that stays loaded.
    async fn unload(&self, index: usize, path: &str) -> Result<Response, ApiError> {
        let kind = if path == "/api/chat" { AnswerKind::Chat } else { AnswerKind::Generate };
        let id = &self.state.names[index].id;
        match self.state.pool.unload(index).await {
            Err(UnloadRefusal::Pinned) => return Err(listing::stays(id, UnloadRefusal::Pinned)),
            // It leaves after its last request.
            Err(UnloadRefusal::Busy) => self.state.pool.keep_alive(index, Some(Duration::ZERO)),
            Ok(()) => {}
        }
        Ok(Json(ollama::without_text(kind, &ollama::tagged(id), "unload")).into_response())
    }
}

/// Takes Ollama's `keep_alive` out of a body.
///
/// # Errors
/// 400 for another form.
fn keep_alive(body: &mut Map<String, Value>) -> Result<Option<Duration>, ApiError> {
    let given = body.shift_remove("keep_alive").filter(|value| !value.is_null());
    let wrong = || ApiError::invalid("keep_alive", "keep_alive is neither seconds nor a time like \"5m\"");
    given.map(|value| ollama::keep_alive(&value).ok_or_else(wrong)).transpose()
}

/// Returns true for a body without a text.
fn asks_nothing(body: &Map<String, Value>) -> bool {
    ["prompt", "messages", "input", "suffix", "images"].into_iter().all(|name| match body.get(name) {
        Some(Value::String(text)) => text.is_empty(),
        Some(Value::Array(items)) => items.is_empty(),
        other => other.is_none_or(Value::is_null),
    })
}

/// Returns the name in `model`; `None` without one, which means the first model.
fn named_model(body: &Map<String, Value>) -> Result<Option<&str>, ApiError> {
    match body.get("model") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => Ok(Some(name)),
        Some(_) => {
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            Err(ApiError::new(status, Some("invalid_value"), "model is not a string").param("model"))
        }
    }
}

async fn by_query(
    State(fleet): State<Fleet>,
    Query(query): Query<HashMap<String, String>>,
    request: Request,
) -> Result<Response, ApiError> {
    let index = match query.get("model") {
        // Any model that is loaded knows the interface.
        None if request.uri().path() == "/openapi.json" => fleet.loaded_or_first(),
        named => fleet.find(named.map(String::as_str), "")?,
    };
    // Monitors ask for these again and again, which neither loads the model nor keeps it loaded.
    if matches!(request.uri().path(), "/props" | "/slots") {
        let member = fleet.state.pool.value(index).ok_or_else(|| fleet.not_loaded(index))?;
        return Ok(member.router.oneshot(request).await.into_response());
    }
    Waiting { fleet, index, request, ledger: Ledger::current() }.answered().await
}
