//! All models of a server that has several: names, loading at first use, and requests on their way to them.
//!
//! `table` decides what is loaded and `pool` does it; `dispatch` gives a request to the model that it names,
//! `waiting` keeps its client informed meanwhile, `listing` shows the models and takes requests to load and
//! unload them.
//!
//! Invariants: a request is answered by the model that it names, or refused; a model has one `App` from a
//! load to its unload, and all of them share one [`ServerShared`]; KV is on disk before a model's memory is
//! freed, so that sessions come back warm.

mod dispatch;
mod leased;
mod listing;
mod pool;
mod table;
mod waiting;

use std::sync::{Arc, LazyLock, OnceLock, mpsc};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::FromRef;
use axum::http::StatusCode;

use super::api::mcp::ServedTools;
use super::api::ollama::pull::ServedDownloads;
use super::api::session_host::SessionHost;
use super::error::{ApiError, STAGE_WAIT};
use super::{App, ServeSettings, ServedModel, api};
use crate::gate::owner::SharesSessions;
use crate::shared::ServerShared;
use crate::wire::ollama::is_same_name;
pub use dispatch::routes;
use llmctl_base::units;
use llmctl_models::load::ModelFacts;
use llmctl_models::memory::give_back;
pub use pool::OnLost;
use pool::{Lease, ModelPool, ROOM_WAIT, Source, Unavailable, Unload};
use table::{RETRY_AFTER, Status, UseRefusal};

/// Longest wait of an unload for an engine to end.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// A model of a fleet.
pub struct Member {
    /// The name in requests and answers.
    pub id: String,
    /// Other names; `*` is any.
    pub aliases: Vec<String>,
    /// Stays loaded.
    pub is_pinned: bool,
    /// Computes vectors or scores, for requests that name no model.
    pub is_embedder: bool,
    /// Computes the bytes of memory that it will need.
    pub estimate: Box<dyn Fn() -> Result<u64, String> + Send + Sync>,
    /// Reads the headers of its files.
    pub facts: Box<dyn FnOnce() -> Option<ModelFacts> + Send>,
    /// Reads its texts, without the weights.
    pub texts: Box<dyn Fn() -> Result<ServedModel, String> + Send + Sync>,
    /// Loads it. The function is called if its engine is lost for good.
    pub load: Box<dyn Fn(OnLost) -> Result<App, String> + Send + Sync>,
}

/// The models of a server; clones are the same ones.
#[derive(Clone)]
pub struct Fleet {
    state: Arc<FleetState>,
}

struct FleetState {
    names: Vec<MemberNames>,
    pool: ModelPool<LoadedMember>,
    shared: ServerShared,
    settings: ServeSettings,
    /// When the server began, in seconds since 1970.
    created: u64,
    /// Time after which idle models are unloaded.
    keep_alive: OnceLock<Duration>,
}

struct MemberNames {
    id: String,
    aliases: Vec<String>,
    is_embedder: bool,
    facts: LazyLock<Option<ModelFacts>, Box<dyn FnOnce() -> Option<ModelFacts> + Send>>,
    texts: Box<dyn Fn() -> Result<ServedModel, String> + Send + Sync>,
}

/// A loaded model with its endpoints.
#[derive(Clone)]
struct LoadedMember {
    app: App,
    router: Router,
}

impl LoadedMember {
    fn new(app: App) -> Self {
        app.register_metrics();
        Self { router: api::routes_of(&app).with_state(app.clone()), app }
    }
}

impl Unload for LoadedMember {
    async fn unload(self) {
        let Self { app, router } = self;
        drop(router);
        // Turns of clients that have left are still being saved.
        let last = app.in_flight().write_owned().await;
        drop(last);
        let _ = tokio::task::spawn_blocking(move || end(app)).await; // a panic there has ended it as well
    }
}

/// Saves the KV of a model's engines and frees their memory.
fn end(app: App) {
    let id = app.model().id.clone();
    let (is_all_saved, notices) = app.engines().save_kv();
    if !is_all_saved {
        tracing::warn!("{id}: not all KV was saved in time; the next turns compute the rest again");
    }
    notices.iter().for_each(|notice| tracing::warn!("{id}: {notice}"));
    let (guard, ended) = mpsc::channel::<()>();
    app.engines().up().iter().for_each(|engine| engine.drop_at_end(Box::new(guard.clone())));
    drop((guard, app));
    // Ends when the last guard is dropped.
    if let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(END_TIMEOUT) {
        tracing::warn!("{id}: its engine has not ended in {} s", END_TIMEOUT.as_secs());
    }
    give_back();
    tracing::info!("{id} is unloaded");
}

impl Fleet {
    /// Creates a fleet in which nothing is loaded. `budget` is the memory of all models together, in bytes.
    pub fn new(shared: ServerShared, settings: ServeSettings, budget: u64, members: Vec<Member>) -> Self {
        let (mut names, mut sources) = (Vec::new(), Vec::new());
        for Member { id, aliases, is_pinned, is_embedder, estimate, facts, texts, load } in members {
            let facts = LazyLock::new(facts);
            names.push(MemberNames { id, aliases, is_embedder, facts, texts });
            let load = Box::new(move |on_lost: OnLost| load(on_lost).map(LoadedMember::new));
            sources.push(Source { is_pinned, estimate, load });
        }
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let created = created.as_secs();
        let pool = ModelPool::new(budget, sources);
        Self {
            state: Arc::new(FleetState {
                names,
                pool,
                shared,
                settings,
                created,
                keep_alive: OnceLock::new(),
            }),
        }
    }

    /// Returns the ids of all models, in order.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.state.names.iter().map(|names| names.id.as_str())
    }

    /// Returns the model of requests that name none.
    pub fn first(&self) -> &str {
        &self.state.names[self.default_of("")].id
    }

    pub fn settings(&self) -> &ServeSettings {
        &self.state.settings
    }

    /// Returns the loaded models.
    pub fn apps(&self) -> Vec<App> {
        self.state.pool.values().into_iter().map(|member| member.app).collect()
    }

    /// Returns each id with the name of its state.
    pub fn states(&self) -> impl Iterator<Item = (&str, &'static str)> {
        self.ids().enumerate().map(|(index, id)| (id, self.state.pool.status(index).name()))
    }

    /// Loads a model before the server takes requests.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub fn load_now(&self, id: &str) -> Result<(), String> {
        let index = self.ids().position(|other| other == id).ok_or("there is no such model")?;
        self.state.pool.load_now(index).map_err(|why| self.unavailable(index, why).message)
    }

    /// Unloads models that have been idle for `keep_alive`, or as long as their last request says, until [`Self::close`].
    pub async fn expire_idle(self, keep_alive: Duration) {
        let _ = self.state.keep_alive.set(keep_alive); // once
        self.state.pool.clone().expire_idle(keep_alive).await;
    }

    /// Refuses requests from now on, also those that wait.
    pub fn close(&self) {
        self.state.pool.close();
    }

    /// Waits until no model is unloading.
    pub async fn settled(&self) {
        self.state.pool.settled().await;
    }

    /// Returns the index of the model that a request means; without a name, the first one of the endpoint's kind.
    ///
    /// # Errors
    /// 404 for a name that no model has.
    fn find(&self, name: Option<&str>, path: &str) -> Result<usize, ApiError> {
        let Some(name) = name else { return Ok(self.default_of(path)) };
        let names = &self.state.names;
        let by_id = names.iter().position(|names| is_same_name(&names.id, name));
        let is_named = |names: &MemberNames| names.aliases.iter().any(|alias| is_same_name(alias, name));
        let by_alias = || names.iter().position(is_named);
        let any = || names.iter().any(|names| names.aliases.iter().any(|alias| alias == "*"));
        let found = by_id.or_else(by_alias).or_else(|| any().then(|| self.default_of(path)));
        found.ok_or_else(|| self.not_found(name))
    }

    fn loaded_or_first(&self) -> usize {
        let mut all = 0..self.state.names.len();
        all.find(|index| self.status(*index) == Status::Loaded).unwrap_or_else(|| self.default_of(""))
    }

    fn default_of(&self, path: &str) -> usize {
        let is_for_vectors = path.ends_with("/embeddings") || path == "/api/embed" || path.contains("rerank");
        self.state.names.iter().position(|names| names.is_embedder == is_for_vectors).unwrap_or(0)
    }

    fn not_found(&self, name: &str) -> ApiError {
        let shown = |name: &str| name.chars().take(100).collect::<String>();
        let known: Vec<String> = self.ids().map(|id| format!("{id:?}")).collect();
        let message = format!(
            "the model {:?} does not exist here; there are {} (serve --alias accepts other names)",
            shown(name),
            known.join(", ")
        );
        ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).param("model")
    }

    /// Uses a model until the lease is dropped, after loading it if necessary. The request came at `begun`.
    ///
    /// # Errors
    /// 503 with the reason.
    async fn acquire(&self, index: usize, begun: Instant) -> Result<Lease<LoadedMember>, ApiError> {
        let deadline = self.settings().deadline.and_then(|longest| begun.checked_add(longest));
        let acquired = self.state.pool.acquire(index, deadline).await;
        acquired.map_err(|why| self.unavailable(index, why))
    }

    /// Refuses to tell the status of a model that is not loaded, as llama.cpp's router does.
    fn not_loaded(&self, index: usize) -> ApiError {
        let id = &self.state.names[index].id;
        let message = format!("{id:?} is not loaded: POST /v1/models/{id}/load loads it");
        ApiError::new(StatusCode::BAD_REQUEST, Some("model_not_loaded"), message).param("model")
    }

    /// Words why a model cannot be used.
    fn unavailable(&self, index: usize, why: Unavailable) -> ApiError {
        let id = &self.state.names[index].id;
        let unavailable = |code, message: String| {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some(code), message).param("model")
        };
        let needs = |needed, have: String| {
            let message = format!("{id:?} needs {} of memory, and {have}", units::bytes(needed));
            unavailable("insufficient_memory", message)
        };
        match why {
            Unavailable::Refused(UseRefusal::TooLarge { needed, free, budget }) => {
                let of = if free < budget { " that pinned models leave" } else { "" };
                let [free, budget] = [free, budget].map(units::bytes);
                needs(needed, format!("there are {free} (--model-memory {budget}){of}"))
                    .retry_after(ROOM_WAIT)
            }
            Unavailable::NoRoom { needed, free, budget } => {
                let [free, budget] = [free, budget].map(units::bytes);
                let have = format!("{free} of {budget} are free: the other models are in use");
                needs(needed, have).retry_after(STAGE_WAIT)
            }
            Unavailable::Refused(UseRefusal::Failed(why)) => {
                unavailable("model_failed", format!("{id:?} cannot be used: {why}")).retry_after(RETRY_AFTER)
            }
            Unavailable::Late => {
                unavailable("deadline_exceeded", format!("{id:?} was not loaded in time (--request-timeout)"))
            }
            Unavailable::Closed => ApiError::shutting_down("the server is shutting down"),
        }
    }

    fn status(&self, index: usize) -> Status {
        self.state.pool.status(index)
    }
}

impl FromRef<Fleet> for SessionHost {
    fn from_ref(fleet: &Fleet) -> Self {
        Self::new(fleet.state.shared.clone(), fleet.apps(), fleet.settings().lenient)
    }
}

impl FromRef<Fleet> for ServedTools {
    fn from_ref(fleet: &Fleet) -> Self {
        Self { host: fleet.state.shared.tools().cloned(), lenient: fleet.settings().lenient }
    }
}

impl FromRef<Fleet> for ServedDownloads {
    fn from_ref(fleet: &Fleet) -> Self {
        let names = fleet.state.names.iter().flat_map(|names| names.aliases.iter().chain([&names.id]));
        let (names, lenient) = (names.cloned().collect(), fleet.settings().lenient);
        Self { host: fleet.state.shared.downloads().cloned(), lenient, names }
    }
}

impl FromRef<Fleet> for SharesSessions {
    fn from_ref(fleet: &Fleet) -> Self {
        Self(fleet.settings().share_sessions)
    }
}
