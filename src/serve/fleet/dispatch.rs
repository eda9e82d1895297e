//! Gives each request to the model that it names.
//!
//! Invariant: a model is loaded only for a body that is a JSON object, and it is parsed once.

use std::collections::HashMap;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Query, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Map, Value};

use super::waiting::Waiting;
use super::{Fleet, listing};
use crate::api;
use crate::api::body::JsonBody;
use crate::error::ApiError;
use crate::telemetry::ledger::Ledger;

/// Endpoints whose query may name the model: `?model=ID`.
const BY_QUERY: [&str; 3] = ["/props", "/tokenizer_info", "/openapi.json"];

/// The endpoints of a server with several models, without the layers around them.
pub fn routes(fleet: Fleet) -> Router {
    let listed = Router::new()
        .route("/v1/models", get(listing::list))
        .route("/models", get(listing::list))
        .route("/v1/models/{*id}", get(listing::get).post(listing::change))
        .route("/models/{*id}", get(listing::get));
    let with_body = api::paths_with_model().fold(listed, |routes, path| routes.route(path, post(by_body)));
    let all = BY_QUERY.iter().fold(with_body, |routes, path| routes.route(path, get(by_query)));
    all.merge(api::session_routes()).merge(api::tool_routes()).with_state(fleet)
}

async fn by_body(State(fleet): State<Fleet>, request: Request) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    JsonBody::check_head(&parts.headers)?;
    // The guard has read the body, within its limits.
    let bytes = to_bytes(body, usize::MAX).await.map_err(|_| ApiError::internal("the body is gone"))?;
    let body = JsonBody::parse(bytes).await?;
    let path = parts.uri.path();
    let index = fleet.find(named_model(&body.0)?, path)?;
    let is_streamed = body.0.get("stream") == Some(&Value::Bool(true)) && api::streams(path);
    parts.extensions.insert(body);
    let request = Request::from_parts(parts, Body::empty());
    let waiting = Waiting { fleet, index, request, ledger: Ledger::current() };
    match is_streamed {
        true => waiting.streamed().await,
        false => waiting.answered().await,
    }
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
    Waiting { fleet, index, request, ledger: Ledger::current() }.answered().await
}
