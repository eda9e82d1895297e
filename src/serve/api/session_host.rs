//! The state behind requests about sessions: the conversations, and the engines of all loaded models,
//! which may hold their KV.
//!
//! A server of one model is a host with one `App`; one of several has an `App` for each loaded model,
//! maybe none.

use axum::Json;
use axum::extract::{FromRef, FromRequestParts, Path};
use axum::http::request::Parts;
use serde_json::Value;

use super::blocking::blocking;
use super::body::{invalid_session, session_name};
use super::drive::retriable;
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::{Caller, SharesSessions};
use crate::sessions::{Opened, SessionDirectory, SessionKey};
use crate::shared::ServerShared;
use crate::telemetry::prefix::PrefixWatch;
use llmctl_base::Result;
use llmctl_engine::session::store::SessionName;
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

    pub fn sessions(&self) -> &SessionDirectory {
        self.shared.sessions()
    }

    pub fn prefixes(&self) -> &PrefixWatch {
        self.shared.observer().prefixes()
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
    /// Those of [`SessionDirectory::open_known`].
    pub fn open_known(&self, key: &SessionKey) -> Result<Opened> {
        self.sessions().open_known(key, None)
    }

    /// Adds Retry-After to errors that a later attempt may not meet.
    pub fn retriable(&self, error: ApiError) -> ApiError {
        match self.apps.first() {
            Some(app) => retriable(app, error),
            None => error,
        }
    }
}

/// A request about the session that its path names.
pub struct AskedSession {
    pub host: SessionHost,
    caller: Caller,
    name: SessionName,
}

impl<S: Send + Sync> FromRequestParts<S> for AskedSession
where
    SessionHost: FromRef<S>,
    SharesSessions: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Ok(caller) = Caller::from_request_parts(parts, state).await;
        let name = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|error| invalid_session(&error.to_string()))?;
        Ok(Self { host: SessionHost::from_ref(state), caller, name: session_name(&name)? })
    }
}

impl AskedSession {
    /// Answers with what `work` returns, on a thread that may wait for a disk. The work gets the key of
    /// the session.
    ///
    /// # Errors
    /// Those of the work.
    pub async fn answer(
        self,
        work: impl FnOnce(&SessionHost, &Caller, SessionKey) -> Result<Value, ApiError> + Send + 'static,
    ) -> Result<Json<Value>, ApiError> {
        let Self { host, caller, name } = self;
        let done = blocking(&host, move |host| work(host, &caller, host.sessions().find(&caller, &name)));
        done.await.map(Json)
    }
}
