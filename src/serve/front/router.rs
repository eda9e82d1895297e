//! The router: the endpoints for operators, and the layers around every endpoint.
//!
//! Layers, from the outside in: `access` (request id, access log, error envelope), CORS, `guard` (keys, Host,
//! Origin, body).

use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Extension, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::lifecycle::Lifecycle;
use super::{access, guard};
use crate::App;
use crate::error::ApiError;
use crate::gate::request_id::{X_RECEIPT, X_REQUEST_ID, X_SEED, X_TOOL_FORMAT};
use crate::net::connection::ConnectionInfo;
use crate::telemetry::metrics::MetricsFormat;
use crate::wire::ollama::GREETING;
use crate::{api, page};

/// Time that a browser may cache the answer to a preflight request.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// Endpoints that the list for programs leaves out: the list itself, and what browsers get.
const UNLISTED: [&str; 2] = ["GET /", "GET /page/{file}"];

/// Returns all routes: `api` has the handlers of the model's endpoints, or no route while the model loads.
pub fn router(lifecycle: &Lifecycle, api: Router) -> Router {
    let own = Router::new()
        .route("/", get(index))
        .route("/health", get(health))
        .route("/v1/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(lifecycle.clone());
    let own = match lifecycle.policy().page {
        true => own.route("/page/{file}", get(page::file)),
        false => own,
    };
    // The guard bounds bodies by --max-body; axum's own limit of 2 MiB would apply first.
    let unbounded = own.merge(api).layer(DefaultBodyLimit::disable());
    let guarded = unbounded.layer(from_fn_with_state(lifecycle.clone(), guard::guard));
    let origins = &lifecycle.policy().origins;
    // Without allowed origins, responses carry no CORS headers.
    let with_cors = if origins.is_empty() { guarded } else { guarded.layer(cors(origins)) };
    with_cors.layer(from_fn_with_state(lifecycle.clone(), access::observe))
}

/// Returns the layer that answers preflight requests and adds CORS headers for `origins`.
fn cors(origins: &[String]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([
            X_REQUEST_ID,
            header::RETRY_AFTER,
            HeaderName::from_static("x-llmctl-ignored"),
            HeaderName::from_static("x-llmctl-branch"),
            X_SEED,
            X_RECEIPT,
            X_TOOL_FORMAT,
        ])
        .max_age(PREFLIGHT_AGE)
        // Chromium asks for this before a public page may reach a private address. The list of origins decides.
        .allow_private_network(true)
}

/// `GET /`: the page for browsers; for programs name, version, stage, model and endpoints, or Ollama's greeting at its port.
async fn index(
    State(lifecycle): State<Lifecycle>,
    connection: Option<Extension<ConnectionInfo>>,
    headers: HeaderMap,
) -> Response {
    // The page is for chats.
    let is_page = lifecycle.policy().page && lifecycle.writes_text() && page::names_html(&headers);
    let answer = match connection.is_some_and(|Extension(connection)| connection.is_ollamas()) {
        _ if is_page => page::document(),
        true => GREETING.into_response(),
        false => description(&lifecycle).into_response(),
    };
    ([(header::VARY, "Accept")], answer).into_response()
}

fn description(lifecycle: &Lifecycle) -> Json<serde_json::Value> {
    let (model, settings) = lifecycle.served().unzip();
    let mut description = json!({
        "name": "llmctl",
        "version": env!("CARGO_PKG_VERSION"),
        "status": lifecycle.stage(),
        "model": model,
        "base_url": "/v1",
        "shares_sessions": settings.map(|settings| settings.share_sessions),
        "remote_engine": settings.map(|settings| settings.remote),
        "endpoints": api::endpoints().filter(|endpoint| !UNLISTED.contains(endpoint)).collect::<Vec<_>>(),
    });
    if let Some(fleet) = lifecycle.fleet() {
        description["models"] = fleet.ids().collect();
    }
    Json(description)
}

/// `GET /health`: the process is alive. Includes the state of each worker, if there are worker processes.
async fn health(State(lifecycle): State<Lifecycle>) -> Json<serde_json::Value> {
    Json(lifecycle.status("ok"))
}

/// `GET /ready`: a request would be accepted, for which one running engine is enough.
async fn ready(State(lifecycle): State<Lifecycle>) -> Result<Json<serde_json::Value>, ApiError> {
    lifecycle.check_ready()?;
    Ok(Json(lifecycle.status("ready")))
}

/// `GET /metrics`, in the format that the `Accept` header prefers.
async fn metrics(State(lifecycle): State<Lifecycle>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = MetricsFormat::accepted(accept.unwrap_or_default());
    // Alive until the end, so that the restarts of a model that is leaving count once.
    let apps = lifecycle.apps();
    let statuses: Vec<_> = apps.iter().map(App::status).collect();
    let is_ready = lifecycle.check_ready().is_ok();
    let text = lifecycle.observer().metrics().encode(format, &statuses, is_ready);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}
