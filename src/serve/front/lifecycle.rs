//! The server's stage (loading, serving, draining) and the state that its layers share.
//!
//! Invariants: `/ready` succeeds only while a request would be accepted; a request that the stage refuses
//! gets 503 with Retry-After.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::json;

use crate::engines::EngineStatus;
use crate::error::{ApiError, STAGE_WAIT};
use crate::fleet::Fleet;
use crate::gate::policy::{Bodies, Policy};
use crate::net::uploads::Uploads;
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::observe::Observer;
use crate::{App, ServeSettings};

/// The stage of the server, in order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Stage {
    Loading,
    Serving,
    Draining,
}

/// The models of a server.
pub enum ServedModels {
    /// One model, which is loaded as long as the server runs.
    Model(App),
    Fleet(Fleet),
}

impl ServedModels {
    /// Returns the loaded models.
    pub fn apps(&self) -> Vec<App> {
        match self {
            ServedModels::Model(app) => vec![app.clone()],
            ServedModels::Fleet(fleet) => fleet.apps(),
        }
    }
}

/// State shared by the layers around the handlers; clones refer to the same server.
#[derive(Clone)]
pub struct Lifecycle {
    state: Arc<LifecycleState>,
}

struct LifecycleState {
    stage: AtomicU8,
    served: OnceLock<ServedModels>,
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
        let (stage, served) = (AtomicU8::new(Stage::Loading as u8), OnceLock::new());
        Self { state: Arc::new(LifecycleState { stage, served, policy, bodies, uploads, observer, log }) }
    }

    /// Enters [`Stage::Serving`] with one model. `app` must use the observer that was passed to [`Self::new`].
    pub fn open(&self, app: App) {
        app.register_metrics();
        self.serve(ServedModels::Model(app));
    }

    /// Enters [`Stage::Serving`] with several models, of which none needs to be loaded.
    pub fn open_fleet(&self, fleet: Fleet) {
        self.serve(ServedModels::Fleet(fleet));
    }

    fn serve(&self, served: ServedModels) {
        // A second call would be a bug of the caller; the first one stays.
        if self.state.served.set(served).is_ok() {
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

    /// Returns the bytes that a body may have. Of several models, the one that reads it is not known yet.
    pub fn max_body(&self) -> usize {
        let policy = self.policy();
        match self.apps().iter().any(App::reads_images) {
            true => policy.max_body.max(policy.max_body_with_images),
            false => policy.max_body,
        }
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

    /// Returns the loaded models.
    pub fn apps(&self) -> Vec<App> {
        self.state.served.get().map(ServedModels::apps).unwrap_or_default()
    }

    /// Returns the models of a server that has several.
    pub fn fleet(&self) -> Option<&Fleet> {
        match self.state.served.get()? {
            ServedModels::Model(_) => None,
            ServedModels::Fleet(fleet) => Some(fleet),
        }
    }

    /// Returns the id of the model of requests that name none, and the settings; `None` while the server begins.
    pub fn served(&self) -> Option<(&str, &ServeSettings)> {
        Some(match self.state.served.get()? {
            ServedModels::Model(app) => (&app.model().id, app.settings()),
            ServedModels::Fleet(fleet) => (fleet.first(), fleet.settings()),
        })
    }

    /// Returns whether some model writes text, also one that is not loaded.
    pub fn writes_text(&self) -> bool {
        match self.state.served.get() {
            Some(ServedModels::Model(app)) => app.writes_text(),
            Some(ServedModels::Fleet(_)) | None => true,
        }
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

    /// Checks that a request would be accepted now: the stage, and that an engine is up. Of several models, a request may bring one
    /// up.
    ///
    /// # Errors
    /// 503.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.check_stage()?;
        match self.state.served.get() {
            Some(ServedModels::Model(app)) => app.engine().map(drop),
            Some(ServedModels::Fleet(_)) | None => Ok(()),
        }
    }

    /// Returns the body of `/health` and `/ready`: `status`, the state of each model of several, and that of each worker process, if
    /// there are any.
    pub fn status(&self, status: &str) -> serde_json::Value {
        let mut body = json!({"status": status});
        if let Some(fleet) = self.fleet() {
            body["models"] = fleet.states().map(|(id, state)| (id.to_owned(), json!(state))).collect();
        }
        if self.served().is_some_and(|(_, settings)| settings.isolated) {
            body["workers"] = self.apps().iter().flat_map(|app| self.workers(app)).collect();
        }
        body
    }

    fn workers(&self, app: &App) -> Vec<serde_json::Value> {
        let worker = |worker: EngineStatus| {
            let mut status = json!({"state": worker.health, "restarts": worker.num_restarts});
            if self.fleet().is_some() {
                status["model"] = app.model().id.as_str().into();
            }
            status
        };
        app.engines().statuses().into_iter().map(worker).collect()
    }

    /// Returns the Retry-After for requests that are refused for overload.
    pub fn retry_after(&self) -> Duration {
        match self.apps().iter().find_map(|app| app.engine().ok()) {
            Some(engine) => self.observer().retry_after(&engine.last_load()),
            None => STAGE_WAIT,
        }
    }
}
