//! `llmctl serve`: the engine behind OpenAI's HTTP interface, with sessions.
//!
//! Invariants: the model never runs on the async runtime, whose tasks only translate; a parameter is
//! honoured or refused before the first byte of a response; every error, of whatever layer, has OpenAI's
//! envelope; a client that goes away cancels its request. Prints nothing and reads no variable:
//! `cli/serve.rs` turns flags into what is here.
//!
//! From the outside in: `listen` owns sockets and the async runtime; `connection` limits connections,
//! `half_open` tells whether a client has left; `router` the endpoints and the layers around them:
//! `access` (request id, log, envelope) and `guard` (`policy`: keys, Host, Origin; bodies). `lifecycle` is
//! the server's stage; `ledger` and `access_log` make the log line of a request, `request_id` its id;
//! `page` is what browsers get; `tools` is what the page calls for the model, `downloads` what Ollama's clients ask for; `owner` is whose sessions a
//! request uses, `uploads` bounds slow bodies; `sessions` is the directory of sessions, `shared` what all
//! models of a server have in common; `api` is the endpoints of the model, `wire` OpenAI's format as
//! batches read it too. `engine` is the way to one engine, back up after it was lost, `engines` to all of
//! them; `preparing` bounds what is tokenised at once; `observe` and `metrics` record finished turns,
//! `spans` and `traces` send them to a collector; `fleet` is all models of a server with several; `error`
//! is the envelope.

#[path = "serve/api/mod.rs"]
pub mod api;
#[path = "serve/downloads.rs"]
pub mod downloads;
#[path = "serve/engines/mod.rs"]
pub mod engines;
#[path = "serve/error.rs"]
pub mod error;
#[path = "serve/fleet/mod.rs"]
pub mod fleet;
#[path = "serve/front/mod.rs"]
pub mod front;
#[path = "serve/gate/mod.rs"]
pub mod gate;
#[path = "serve/net/mod.rs"]
pub mod net;
#[path = "serve/page.rs"]
mod page;
#[path = "serve/sessions/mod.rs"]
mod sessions;
#[path = "serve/shared.rs"]
pub mod shared;
#[path = "serve/telemetry/mod.rs"]
pub mod telemetry;
#[path = "serve/tools.rs"]
pub mod tools;
#[path = "serve/wire/mod.rs"]
pub mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::RwLock;

pub use api::image_urls::ImageUrls;
use engines::Engines;
use engines::preparing::{EmbedPlaces, Preparing};
use error::ApiError;
use llmctl_base::GivenSampling;
use llmctl_engine::embed::EmbedClient;
use llmctl_engine::grammar::GrammarCompiler;
use llmctl_engine::session::store::{ModelFingerprint, SessionStore};
use llmctl_engine::turn::Planner;
use llmctl_engine::{ChatTokenizer, EngineClient, EngineSessionName, LoopGuard};
use llmctl_models::load::ModelFacts;
use llmctl_template::{ReasoningFormat, ToolCallFormat};
use sessions::SessionDirectory;
use shared::ServerShared;
use telemetry::metrics::{KvBlocks, ModelStatus};
use telemetry::observe::Observer;
use wire::ollama::is_same_name;

/// The state of one model that all handlers share; clones refer to the same one.
#[derive(Clone)]
pub struct App {
    state: Arc<AppState>,
}

struct AppState {
    model: ServedModel,
    engines: Engines,
    shared: ServerShared,
    grammars: OnceLock<GrammarCompiler>,
    settings: ServeSettings,
    /// The model for /v1/embeddings or /v1/rerank.
    embedder: Option<ServedEmbedder>,
    /// Read-locked by every request until it has ended, which may be after its client has left.
    in_flight: Arc<RwLock<()>>,
    /// The drain timeout is over: requests under way end with an error.
    is_cut_short: AtomicBool,
}

/// Restarts of a model's engines stay counted after the model has been unloaded.
impl Drop for AppState {
    fn drop(&mut self) {
        self.shared.observer().metrics().add_restarts(self.engines.num_restarts());
    }
}

/// The served model, without its weights.
pub struct ServedModel {
    /// The name in requests and answers.
    pub id: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    pub chat_tokenizer: ChatTokenizer,
    pub fingerprint: ModelFingerprint,
    /// Sampling that flags or the model's publisher give; requests override it.
    pub defaults: GivenSampling,
    /// Facts about the weights that clients may read; `None` if the headers cannot be read again.
    pub facts: Option<ModelFacts>,
}

/// A served model that computes vectors or scores: the server's only one, or one beside it.
pub struct ServedEmbedder {
    /// The name in requests and answers.
    pub id: String,
    pub client: EmbedClient,
    places: EmbedPlaces,
    /// It is the server's model: nothing here writes text.
    pub is_alone: bool,
}

impl ServedEmbedder {
    pub fn new(id: String, client: EmbedClient, is_alone: bool) -> Self {
        Self { id, client, places: EmbedPlaces::default(), is_alone }
    }
}

/// ServeSettings that apply to all requests.
#[derive(Debug, Clone, Default)]
pub struct ServeSettings {
    /// Unknown fields are ignored instead of refused.
    pub lenient: bool,
    /// `max_tokens` beyond the context is refused instead of lowered to what the prompt leaves.
    pub strict_limits: bool,
    /// Objects of schemas may have members that the schema does not name, unless it forbids them.
    pub schema_open: bool,
    /// Ends what repeats itself, unless a request sets it.
    pub loop_guard: LoopGuard,
    /// Time limit of a request, waiting included; `None` is no limit.
    pub deadline: Option<Duration>,
    /// Format of tool calls and of reasoning, if not the one that the template shows.
    pub tool_format: Option<ToolCallFormat>,
    pub reasoning_format: Option<ReasoningFormat>,
    /// `enable_thinking` for templates, unless a request sets it.
    pub enable_thinking: Option<bool>,
    /// The engines are worker processes, whose state `/health` shows.
    pub isolated: bool,
    /// Messages that contain the model's special tokens are refused.
    pub refuses_special_tokens: bool,
    /// Other names that requests may use for the model; `*` is any.
    pub aliases: Vec<String>,
    /// Names of other models in the configuration: a request for one is not meant for this model.
    pub other_models: Vec<String>,
    /// Longest wait of a request for a busy session; zero means no wait.
    pub session_wait: Duration,
    /// All clients may see and use the sessions of the local user.
    pub share_sessions: bool,
    /// Engines elsewhere compute and keep the KV.
    pub remote: bool,
    /// Hosts that images are fetched from; none by default.
    pub image_urls: ImageUrls,
}

impl App {
    /// Creates the server's state. `sessions` keeps named sessions on disk; with `None` they live as long
    /// as the server.
    pub fn new(
        model: ServedModel,
        engines: impl Into<Engines>,
        sessions: Option<SessionStore>,
        observer: Observer,
        settings: ServeSettings,
    ) -> Self {
        let engines: Engines = engines.into();
        let max_branches = engines.any().map_or(1, |engine| engine.spec().config.max_sessions);
        let shared = ServerShared::new(sessions, observer, max_branches);
        Self::with_embedder(shared, model, engines, settings, None)
    }

    /// Creates the state of a model in a server whose models have `shared` in common. The embedder serves
    /// vectors or scores too.
    pub fn with_embedder(
        shared: ServerShared,
        model: ServedModel,
        engines: impl Into<Engines>,
        settings: ServeSettings,
        embedder: Option<ServedEmbedder>,
    ) -> Self {
        let mut model = model;
        if let Some(format) = settings.tool_format {
            model.chat_tokenizer.set_tool_format(format);
        }
        if let Some(format) = settings.reasoning_format {
            model.chat_tokenizer.set_reasoning_format(format);
        }
        let engines: Engines = engines.into();
        if let Ok(engine) = engines.any() {
            model.chat_tokenizer.set_context_tokens(engine.spec().context_length());
            let spec = engine.spec();
            model.chat_tokenizer.set_build(&spec.config.build);
            model.chat_tokenizer.set_vision(&spec.model.architecture, spec.vision.as_ref());
        }
        let state = AppState {
            model,
            engines,
            shared,
            grammars: OnceLock::new(),
            settings,
            embedder,
            in_flight: Arc::default(),
            is_cut_short: AtomicBool::new(false),
        };
        Self { state: Arc::new(state) }
    }

    /// Read-locked by every running request, so that a write lock means that none is left.
    pub fn in_flight(&self) -> Arc<RwLock<()>> {
        Arc::clone(&self.state.in_flight)
    }

    /// Ends the drain: no request goes to an engine any more. The caller cancels those that are with one.
    pub fn cut_short(&self) {
        self.state.is_cut_short.store(true, Ordering::Release);
    }

    fn is_cut_short(&self) -> bool {
        self.state.is_cut_short.load(Ordering::Acquire)
    }

    pub fn model(&self) -> &ServedModel {
        &self.state.model
    }

    /// Returns what all models of the server have in common.
    pub fn shared(&self) -> &ServerShared {
        &self.state.shared
    }

    fn sessions(&self) -> &SessionDirectory {
        self.shared().sessions()
    }

    /// Returns true if `name` is a name of the model.
    fn answers_to(&self, name: &str) -> bool {
        is_same_name(name, &self.model().id) || self.is_alias(name)
    }

    /// Returns true if `name` is another name for any model of this server.
    fn is_alias(&self, name: &str) -> bool {
        self.settings().aliases.iter().any(|alias| alias == "*" || is_same_name(alias, name))
    }

    /// Returns true if `name` is that of a model beside the one that writes text, or of one that this
    /// server could have been started with.
    fn knows_other(&self, name: &str) -> bool {
        self.embedder().is_some_and(|served| is_same_name(&served.id, name))
            || self.settings().other_models.iter().any(|other| other == name)
    }

    /// Returns true if the server's model writes text.
    pub fn writes_text(&self) -> bool {
        !self.embedder().is_some_and(|served| served.is_alone)
    }

    /// Returns true if the model reads images.
    pub fn reads_images(&self) -> bool {
        self.writes_text() && self.model().chat_tokenizer.vision().is_some()
    }

    pub fn embedder(&self) -> Option<&ServedEmbedder> {
        self.state.embedder.as_ref()
    }

    /// Returns the grammar compiler, which all requests share.
    fn grammars(&self, engine: &EngineClient) -> &GrammarCompiler {
        let compiler = || engine.spec().grammar_compiler(self.model().chat_tokenizer.tokenizer().clone());
        self.state.grammars.get_or_init(compiler)
    }

    /// Returns the planner of the model's requests.
    pub fn planner(&self, engine: &EngineClient) -> Planner<'_> {
        Planner { chat_tokenizer: &self.model().chat_tokenizer, grammars: self.grammars(engine) }
    }

    pub fn observer(&self) -> &Observer {
        self.shared().observer()
    }

    pub fn settings(&self) -> &ServeSettings {
        &self.state.settings
    }

    /// Returns the limits on texts being tokenised.
    fn preparing(&self) -> &Preparing {
        self.shared().preparing()
    }

    /// Begins to show the model in the metrics.
    pub fn register_metrics(&self) {
        let blocks = self.engines().any().map(|engine| KvBlocks::of(engine.spec())).unwrap_or_default();
        self.observer().metrics().register_model(&self.model().id, self.engines().len(), blocks);
    }

    /// Returns what `/metrics` shows of the engines.
    pub fn status(&self) -> ModelStatus {
        ModelStatus { id: self.model().id.clone(), engines: self.engines().statuses() }
    }

    pub fn engines(&self) -> &Engines {
        &self.state.engines
    }

    /// Returns the engine with the fewest requests.
    ///
    /// # Errors
    /// 503 while none is up.
    pub fn engine(&self) -> Result<EngineClient, ApiError> {
        self.engines().any()
    }

    /// Returns the engine of a session; without a session, the one with the fewest requests.
    ///
    /// # Errors
    /// As [`Self::engine`].
    pub fn engine_of(&self, session: Option<&EngineSessionName>) -> Result<EngineClient, ApiError> {
        match session {
            Some(name) => self.sessions().engine_of(self.engines(), name),
            None => self.engine(),
        }
    }

    /// Reports that a request found its engine dead.
    pub fn engine_lost(&self, engine: &EngineClient) {
        self.engines().lost(engine);
    }
}
