//! The server's stage (loading, serving, draining) and the state that its layers share.
//!
//! Invariants: `/ready` succeeds only while a request would be accepted; a request that the stage refuses gets 503 with
//! Retry-After.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::json;

use super::App;
use super::access_log::AccessLog;
use super::engines::EngineStatus;
use super::error::{ApiError, STAGE_WAIT};
use super::metrics::KvBlocks;
use super::observe::Observer;
use super::policy::{Bodies, Policy};
use super::uploads::Uploads;

/// The stage of the server, in order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    Loading,
    Serving,
    Draining,
}

/// State shared by the layers around the handlers; clones refer to the same server.
#[derive(Clone)]
pub struct Lifecycle {
    state: Arc<LifecycleState>,
}

struct LifecycleState {
    stage: AtomicU8,
    app: OnceLock<App>,
    policy: Policy,
    bodies: Bodies,
    uploads: Uploads,
    observer: Observer,
    log: Option<AccessLog>,
}

impl Lifecycle {
    /// Starts in [`Stage::Loading`].
    pub fn new(policy: Policy, observer: Observer, log: Option<AccessLog>) -> Self {
        let (bodies, uploads) = (Bodies::new(policy.max_body), Uploads::new(policy.max_slow_bodies));
        let (stage, app) = (AtomicU8::new(Stage::Loading as u8), OnceLock::new());
        Self { state: Arc::new(LifecycleState { stage, app, policy, bodies, uploads, observer, log }) }
    }

    /// Enters [`Stage::Serving`]. `app` must use the observer that was passed to [`Self::new`].
    pub fn open(&self, app: App) {
        let blocks = app.engines().any().map(|engine| KvBlocks::of(engine.spec())).unwrap_or_default();
        self.observer().metrics().register_model(&app.model().id, app.engines().len(), blocks);
        // A second call would be a bug of the caller; the first app stays.
        if self.state.app.set(app).is_ok() {
            self.state.stage.store(Stage::Serving as u8, Ordering::Release);
        }
    }

    /// Enters [`Stage::Draining`]: new requests are refused.
    pub fn drain(&self) {
        self.state.stage.store(Stage::Draining as u8, Ordering::Release);
    }

    pub fn stage(&self) -> Stage {
        match self.state.stage.load(Ordering::Acquire) {
            0 => Stage::Loading,
            1 => Stage::Serving,
            _ => Stage::Draining,
        }
    }

    pub fn policy(&self) -> &Policy {
        &self.state.policy
    }

    pub fn bodies(&self) -> &Bodies {
        &self.state.bodies
    }

    pub fn uploads(&self) -> &Uploads {
        &self.state.uploads
    }

    pub fn observer(&self) -> &Observer {
        &self.state.observer
    }

    pub fn access_log(&self) -> Option<&AccessLog> {
        self.state.log.as_ref()
    }

    pub fn app(&self) -> Option<&App> {
        self.state.app.get()
    }

    /// Refuses requests in every stage but [`Stage::Serving`].
    ///
    /// # Errors
    /// 503 with Retry-After.
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

    /// Checks that a request would be accepted now: the stage, and that an engine is up.
    ///
    /// # Errors
    /// 503.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.check_stage()?;
        self.app().map_or(Ok(()), |app| app.engine().map(drop))
    }

    /// Returns the body of `/health` and `/ready`: `status`, and the state of each worker process, if there are any.
    pub fn status(&self, status: &str) -> serde_json::Value {
        let mut body = json!({"status": status});
        if let Some(app) = self.app().filter(|app| app.settings().isolated) {
            let worker = |worker: EngineStatus| json!({"state": worker.health.name(), "restarts": worker.num_restarts});
            body["workers"] = app.engines().statuses().into_iter().map(worker).collect();
        }
        body
    }

    /// Returns the Retry-After for requests that are refused for overload.
    pub fn retry_after(&self) -> Duration {
        match self.app().and_then(|app| app.engine().ok()) {
            Some(engine) => self.observer().retry_after(&engine.last_load()),
            None => STAGE_WAIT,
        }
    }
}
