//! The server as requests meet it, from the first one on: while the model loads, while it serves, while it drains.
//!
//! Invariants: `/health` answers in every stage; `/ready` is a success only while a request would be taken; what is
//! refused for the stage says so with 503 and a time to come back.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use serde_json::json;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::App;
use super::access::{self, AccessLog, X_REQUEST_ID, X_TOOL_FORMAT};
use super::engines::Place;
use super::error::{ApiError, STAGE_WAIT};
use super::guard::{self, Bodies, Policy};
use super::metrics::Format;
use super::observe::Observer;
use super::uploads::Uploads;

/// How long a browser may remember what a page is allowed.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

/// The endpoints of this file.
const OWN_ENDPOINTS: [&str; 3] = ["GET /health", "GET /ready", "GET /metrics"];

/// How far the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    Loading,
    Serving,
    Draining,
}

/// What surrounds the handlers; clones are the same.
#[derive(Clone)]
pub struct Front {
    shared: Arc<Shared>,
}

struct Shared {
    stage: AtomicU8,
    app: OnceLock<App>,
    policy: Policy,
    bodies: Bodies,
    uploads: Uploads,
    observer: Observer,
    log: Option<AccessLog>,
}

impl Front {
    /// While the model loads.
    pub fn new(policy: Policy, observer: Observer, log: Option<AccessLog>) -> Self {
        let (bodies, uploads) = (Bodies::new(policy.max_body), Uploads::new(policy.max_slow_bodies));
        let (stage, app) = (AtomicU8::new(Stage::Loading as u8), OnceLock::new());
        Self { shared: Arc::new(Shared { stage, app, policy, bodies, uploads, observer, log }) }
    }

    /// The model is there. Its observer is the one that this was made with.
    pub fn open(&self, app: App) {
        self.observer().metrics().register_model(&app.model().id, app.engines().len());
        // A second one would be a bug of the caller; the first stays.
        if self.shared.app.set(app).is_ok() {
            self.shared.stage.store(Stage::Serving as u8, Ordering::Release);
        }
    }

    /// Nothing new is taken from now on.
    pub fn drain(&self) {
        self.shared.stage.store(Stage::Draining as u8, Ordering::Release);
    }

    pub fn stage(&self) -> Stage {
        match self.shared.stage.load(Ordering::Acquire) {
            0 => Stage::Loading,
            1 => Stage::Serving,
            _ => Stage::Draining,
        }
    }

    pub fn policy(&self) -> &Policy {
        &self.shared.policy
    }

    pub fn bodies(&self) -> &Bodies {
        &self.shared.bodies
    }

    pub fn uploads(&self) -> &Uploads {
        &self.shared.uploads
    }

    pub fn observer(&self) -> &Observer {
        &self.shared.observer
    }

    pub fn access_log(&self) -> Option<&AccessLog> {
        self.shared.log.as_ref()
    }

    pub fn app(&self) -> Option<&App> {
        self.shared.app.get()
    }

    /// # Errors
    /// 503 before and after the time of serving.
    pub fn check_stage(&self) -> Result<(), ApiError> {
        match self.stage() {
            Stage::Serving => Ok(()),
            Stage::Draining => Err(ApiError::shutting_down("the server is shutting down")),
            Stage::Loading => {
                let code = Some("model_loading");
                let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, "the model is being loaded");
                Err(error.retry_after(STAGE_WAIT))
            }
        }
    }

    /// # Errors
    /// 503 when a request would not be taken now.
    fn check_ready(&self) -> Result<(), ApiError> {
        self.check_stage()?;
        self.app().map_or(Ok(()), |app| app.engine().map(drop))
    }

    /// `status`, and how each worker is, where there are any.
    fn status(&self, status: &str) -> serde_json::Value {
        let mut body = json!({"status": status});
        if let Some(app) = self.app().filter(|app| app.settings().isolated) {
            let worker =
                |place: Place| json!({"state": place.standing.name(), "restarts": place.num_restarts});
            body["workers"] = app.engines().places().into_iter().map(worker).collect();
        }
        body
    }

    /// For those who are turned away because there is too much to do.
    pub fn retry_after(&self) -> Duration {
        match self.app().and_then(|app| app.engine().ok()) {
            Some(engine) => self.observer().retry_after(&engine.last_load()),
            None => STAGE_WAIT,
        }
    }
}

/// The whole server over `api`, the handlers of the model's endpoints; nothing while there is no model.
pub fn router(front: &Front, api: Router) -> Router {
    let own = Router::new()
        .route("/", get(index))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .with_state(front.clone());
    // The guard bounds bodies, by what the operator says; axum's own limit of 2 MiB would come before it.
    let unbounded = own.merge(api).layer(DefaultBodyLimit::disable());
    let guarded = unbounded.layer(from_fn_with_state(front.clone(), guard::guard));
    let origins = &front.policy().origins;
    // Without any, no page gets a permission, and there is nothing to say.
    let asked = if origins.is_empty() { guarded } else { guarded.layer(cors(origins)) };
    asked.layer(from_fn_with_state(front.clone(), access::observe))
}

/// Answers browsers' questions for the origins that are allowed.
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
            HeaderName::from_static("x-session-id"),
            X_TOOL_FORMAT,
        ])
        .max_age(PREFLIGHT_AGE)
        // Chromium asks so before a page of the public web may reach a private address; the origin is what counts here.
        .allow_private_network(true)
}

/// What this is, for whoever opens the address.
async fn index(State(front): State<Front>) -> Json<serde_json::Value> {
    let stage = match front.stage() {
        Stage::Loading => "loading",
        Stage::Serving => "serving",
        Stage::Draining => "draining",
    };
    Json(json!({
        "name": "llmctl",
        "version": env!("CARGO_PKG_VERSION"),
        "status": stage,
        "model": front.app().map(|app| app.model().id.as_str()),
        "base_url": "/v1",
        "endpoints": super::api::ENDPOINTS.iter().chain(&OWN_ENDPOINTS).collect::<Vec<_>>(),
    }))
}

/// The process lives; and how its workers are, where there are any.
async fn health(State(front): State<Front>) -> Json<serde_json::Value> {
    Json(front.status("ok"))
}

/// A request would be taken, which one engine is enough for.
async fn ready(State(front): State<Front>) -> Result<Json<serde_json::Value>, ApiError> {
    front.check_ready()?;
    Ok(Json(front.status("ready")))
}

async fn metrics(State(front): State<Front>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::accepted(accept.unwrap_or_default());
    let places = front.app().map_or_else(Vec::new, |app| app.engines().places());
    let is_ready = front.check_ready().is_ok();
    let text = front.observer().metrics().encode(format, &places, is_ready);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}
