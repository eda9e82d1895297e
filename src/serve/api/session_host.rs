//! The state behind requests about sessions: the conversations, and the engines of all loaded models, which
//! may hold their KV.
//!
//! A server of one model is a host with one `App`; one of several has an `App` for each loaded model, maybe
//! none.

use axum::extract::FromRef;

use super::conversations::{Conversations, Opened, SessionKey};
use super::drive::retriable;
use super::shared::ServerShared;
use super::transient::Transients;
use crate::App;
use crate::error::ApiError;
use llmctl_base::Result;
use llmctl_engine::{EngineClient, EngineSessionName};

/// The sessions of a server.
#[derive(Clone)]
pub struct SessionHost {
    shared: ServerShared,
    apps: Vec<App>,
    lenient: bool,
}

impl FromRef<App> for SessionHost {
    fn from_ref(app: &App) -> Self {
        Self::new(app.shared().clone(), vec![app.clone()], app.settings().lenient)
    }
}

impl SessionHost {
    /// Creates the host of the sessions in `shared`, which the engines of `apps` may hold.
    pub fn new(shared: ServerShared, apps: Vec<App>, lenient: bool) -> Self {
        Self { shared, apps, lenient }
    }

    pub fn conversations(&self) -> &Conversations {
        self.shared.conversations()
    }

    pub fn transients(&self) -> &Transients {
        self.shared.transients()
    }

    /// Returns the loaded models.
    pub fn apps(&self) -> &[App] {
        &self.apps
    }

    /// Returns true if unknown fields are ignored.
    pub fn is_lenient(&self) -> bool {
        self.lenient
    }

    /// Checks that what engines hold of sessions can be reached.
    ///
    /// # Errors
    /// 503 if models are loaded and none of their engines is up.
    pub fn check(&self) -> Result<(), ApiError> {
        self.reached(App::engine).map(drop)
    }

    /// Returns the engine of each loaded model that a session is with, or is routed to.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn engines_of(&self, session: &EngineSessionName) -> Result<Vec<EngineClient>, ApiError> {
        self.reached(|app| app.engine_of(Some(session)))
    }

    fn reached<T>(&self, find: impl Fn(&App) -> Result<T, ApiError>) -> Result<Vec<T>, ApiError> {
        let mut found = Vec::new();
        let mut refusal = None;
        for app in &self.apps {
            match find(app) {
                Ok(value) => found.push(value),
                Err(error) => refusal = Some(error),
            }
        }
        refusal.filter(|_| found.is_empty()).map_or(Ok(found), Err)
    }

    /// Opens a conversation that exists, for the model of its last turn: no turn is added.
    ///
    /// # Errors
    /// Those of [`Conversations::open_known`].
    pub fn open_known(&self, key: &SessionKey) -> Result<Opened> {
        self.conversations().open_known(key, None)
    }

    /// Forgets what engines were chosen for a session that has been removed.
    pub fn forget_route(&self, name: &EngineSessionName) {
        self.apps.iter().for_each(|app| app.engines().forget(name));
    }

    /// Adds Retry-After to errors that a later attempt may not meet.
    pub fn retriable(&self, error: ApiError) -> ApiError {
        match self.apps.first() {
            Some(app) => retriable(app, error),
            None => error,
        }
    }
}
