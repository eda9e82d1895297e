//! `llmctl serve`: the engine behind OpenAI's HTTP interface, with sessions.
//!
//! Invariants: the model never runs on the async runtime, whose tasks only translate; a parameter is honoured or refused
//! before the first byte of a response; every error, of whatever layer, has OpenAI's envelope; a client that goes away
//! cancels its request. Prints nothing and reads no variable: `cli/serve.rs` turns flags into what is here.
//!
//! From the outside in: `listen` owns sockets, runtime and the end of both; `connection` one connection's place and patience,
//! `half_open` the end of one side of it; `router` the endpoints and the layers around them: `access` (request id, log, envelope)
//! and `guard` (`policy`: keys, Host, Origin; bodies). `lifecycle` is the server's stage; `ledger` and `access_log` make the log line
//! of a request, `request_id` its id; `owner` is whose sessions a request uses, `uploads` bounds slow bodies;
//! `api` is the endpoints of the model, `wire` OpenAI's format as batches read it too. `engine` is the way to one engine, back up
//! after it was lost, `engines` to all of them; `preparing` bounds what is tokenised at once; `observe` and `metrics` say what was
//! done; `error` the envelope.

pub mod access;
pub mod access_log;
pub mod api;
pub mod connection;
pub mod engine;
pub mod engines;
pub mod error;
pub mod guard;
pub mod half_open;
pub mod ledger;
pub mod lifecycle;
pub mod listen;
pub mod metrics;
pub mod observe;
pub mod owner;
pub mod policy;
mod preparing;
pub mod request_id;
pub mod router;
pub mod uploads;
pub mod wire;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::RwLock;

use crate::runtime::grammar::GrammarCompiler;
use crate::runtime::load::GenerationDefaults;
use crate::runtime::session::store::{ModelFingerprint, SessionStore};
use crate::runtime::{ChatTokenizer, EngineClient};
use crate::template::{ReasoningFormat, ToolCallFormat};
use api::conversations::Conversations;
use api::line::Lines;
use api::transient::Transients;
use engines::Engines;
use error::ApiError;
use observe::Observer;
use preparing::Preparing;

/// What all handlers share; clones are the same server.
#[derive(Clone)]
pub struct App {
    shared: Arc<Shared>,
}

struct Shared {
    model: ServedModel,
    engines: Engines,
    sessions: Option<SessionStore>,
    conversations: Conversations,
    transients: Transients,
    lines: Lines,
    grammars: OnceLock<GrammarCompiler>,
    observer: Observer,
    settings: Settings,
    preparing: Preparing,
    /// Held by every ask until it has come to its end, which may be after its client has gone.
    in_flight: Arc<RwLock<()>>,
    /// The time of the drain is over: what is not answered by now will not be.
    is_cut_short: AtomicBool,
}

/// The model that is served, without its weights.
pub struct ServedModel {
    /// What requests call it.
    pub id: String,
    /// Seconds since 1970: when it was loaded.
    pub created: u64,
    pub chat_tokenizer: ChatTokenizer,
    pub fingerprint: ModelFingerprint,
    /// What the model recommends; requests override it.
    pub defaults: GenerationDefaults,
}

/// How requests are judged.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Fields that are not known are passed over instead of refused.
    pub lenient: bool,
    /// `max_tokens` beyond the context is refused instead of lowered to what the prompt leaves.
    pub strict_limits: bool,
    /// Objects of schemas may have members that the schema does not name, unless it forbids them.
    pub schema_open: bool,
    /// How long a request may take, waiting included; nothing: as long as it takes.
    pub deadline: Option<Duration>,
    /// How this model writes tool calls and reasoning, where its template does not show it.
    pub tool_format: Option<ToolCallFormat>,
    pub reasoning_format: Option<ReasoningFormat>,
    /// What templates get as `enable_thinking` where a request does not say.
    pub enable_thinking: Option<bool>,
    /// The engines are worker processes, which operators want to know of.
    pub isolated: bool,
    /// Messages that hold special tokens of the model are refused.
    pub refuses_special_tokens: bool,
    /// Other names that requests may call the model; `*` is any.
    pub aliases: Vec<String>,
    /// How long a request waits for a session that is busy; not at all when zero.
    pub session_wait: Duration,
    /// The sessions of the local user may be seen and used by all who may ask.
    pub share_sessions: bool,
}

impl App {
    /// `sessions` is where named sessions are kept on disk; without it they live as long as the server.
    pub fn new(
        model: ServedModel,
        engines: impl Into<Engines>,
        sessions: Option<SessionStore>,
        observer: Observer,
        settings: Settings,
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
        }
        let max_strands = engines.any().map_or(1, |engine| engine.spec().config.max_sessions);
        let shared = Shared {
            conversations: Conversations::new(sessions.clone()),
            transients: Transients::new(max_strands),
            lines: Lines::default(),
            model,
            engines,
            sessions,
            grammars: OnceLock::new(),
            observer,
            settings,
            preparing: Preparing::default(),
            in_flight: Arc::default(),
            is_cut_short: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Read-locked by every running request, so that a write lock means that none is left.
    pub fn in_flight(&self) -> Arc<RwLock<()>> {
        Arc::clone(&self.shared.in_flight)
    }

    /// From now on no request goes to an engine any more. What is with one already is cancelled there.
    pub fn cut_short(&self) {
        self.shared.is_cut_short.store(true, Ordering::Release);
    }

    fn is_cut_short(&self) -> bool {
        self.shared.is_cut_short.load(Ordering::Acquire)
    }

    pub fn model(&self) -> &ServedModel {
        &self.shared.model
    }

    pub fn sessions(&self) -> Option<&SessionStore> {
        self.shared.sessions.as_ref()
    }

    /// Whether requests may call the model so.
    fn answers_to(&self, name: &str) -> bool {
        name == self.model().id || self.settings().aliases.iter().any(|alias| alias == "*" || alias == name)
    }

    fn conversations(&self) -> &Conversations {
        &self.shared.conversations
    }

    fn transients(&self) -> &Transients {
        &self.shared.transients
    }

    fn lines(&self) -> &Lines {
        &self.shared.lines
    }

    /// Compiles grammars for the model; one for all requests.
    fn grammars(&self, engine: &EngineClient) -> &GrammarCompiler {
        let compiler = || engine.spec().grammar_compiler(self.model().chat_tokenizer.tokenizer().clone());
        self.shared.grammars.get_or_init(compiler)
    }

    pub fn observer(&self) -> &Observer {
        &self.shared.observer
    }

    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Where texts wait for their turn to become tokens.
    fn preparing(&self) -> &Preparing {
        &self.shared.preparing
    }

    pub fn engines(&self) -> &Engines {
        &self.shared.engines
    }

    /// The engine that has least to do, of those that are there.
    ///
    /// # Errors
    /// 503 while all are being brought back.
    pub fn engine(&self) -> Result<EngineClient, ApiError> {
        self.engines().any()
    }

    /// The engine that a session is with, or any for none.
    ///
    /// # Errors
    /// As [`Self::engine`].
    pub fn engine_of(&self, session: Option<&str>) -> Result<EngineClient, ApiError> {
        match session {
            Some(name) => self.engines().of(name),
            None => self.engine(),
        }
    }

    /// To be told when a request finds that its engine is gone.
    pub fn engine_lost(&self, engine: &EngineClient) {
        self.engines().lost(engine);
    }
}
