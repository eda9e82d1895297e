//! `llmctl serve`: flags to a running server, and a signal to its end.
//!
//! The main thread binds, loads and then waits; sockets have threads of their own from the first moment, so
//! that `/health` answers while the model loads. Keys are read from files and the environment and never from
//! the command line.

pub mod capacity;
mod downloads;
pub mod embedder;
pub mod fleet;
mod spans;
mod tools;
pub mod worker;
pub mod workers;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction, Args, ValueEnum};

use self::fleet::FleetArgs;
use super::error::{CommandError, Exit, Kind};
use super::mcp::{McpServerArgs, SharedToolServers};
use super::places::{KeptFiles, Places};
use super::sessions::{self, archive};
use super::terminal::Terminal;
use crate::cli::flags::args::{
    ByteSize, DEFAULT_KV_DISK, EngineArgs, EngineOptions, FetchArgs, ModelArgs, POOLINGS, SamplingArgs,
    TimeSpan, count, most_used, one_of,
};
use crate::cli::model::load::{PreparedTexts, remote};
use crate::cli::model::{load, running};
use crate::cli::serve::capacity::CapacityArgs;
use crate::cli::serve::downloads::CacheDownloads;
use crate::cli::serve::workers::{IsolationArgs, RELOAD_ATTEMPTS, RELOAD_PAUSE};
use crate::cli::terminal::descriptors;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::signal::Graceful;
use llmctl_base::private_files;
use llmctl_engine::http_engine::{HttpEngine, HttpEngineSettings, WhenLost};
use llmctl_engine::session::store::ModelFingerprint;
use llmctl_engine::{EngineClient, EngineTransport, LoopGuard};
use llmctl_models::hints::Frontend;
use llmctl_models::load::Pooling;
use llmctl_serve::engines::Engines;
use llmctl_serve::engines::engine::{EngineSlot, LONGEST_PAUSE, Recovery};
use llmctl_serve::fleet::OnLost;
use llmctl_serve::front::lifecycle::{Lifecycle, ServedModels};
use llmctl_serve::front::listen::{Address, Listener, Server};
use llmctl_serve::gate::owner::KeyLine;
use llmctl_serve::gate::policy::{ApiKeys, Hosts, Policy};
use llmctl_serve::net::connection::ConnectionLimits;
use llmctl_serve::shared::ServerShared;
use llmctl_serve::telemetry::access_log::AccessLog;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ImageUrls, ServeSettings, ServedEmbedder};
use llmctl_template::{ReasoningFormat, ToolCallFormat};

/// Not the default of any similar program: 8080, 8000, 11434, 1234, 30000 and 3000 are in use.
pub const DEFAULT_PORT: u16 = 8484;
pub const DEFAULT_HOST: &str = "127.0.0.1";
const DEFAULT_SESSION_WAIT: Duration = Duration::from_secs(60);
const DEFAULT_DRAIN: Duration = Duration::from_secs(30);

/// Descriptors for other things than connections: model, sessions, KV, logs.
const OTHER_DESCRIPTORS: usize = 128;

/// Descriptors of a worker's pipes.
const DESCRIPTORS_PER_WORKER: usize = 3;

/// First and longest pause between two attempts to reach a remote engine.
const REMOTE_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_REMOTE_PAUSE: Duration = Duration::from_secs(5);

/// Longest wait of the shutdown for the access log.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait of the shutdown for a collector of spans.
const SPANS_TIMEOUT: Duration = Duration::from_secs(5);

/// Serve one or several models over HTTP with OpenAI's interface
///
/// Requests of any number of clients run together, named sessions keep what is computed between requests and over
/// restarts. With --share-sessions they are the same that `run --session` uses. docs/http.md describes the interface.
#[derive(Debug, Clone, Default, Args)]
#[command(after_long_help = LONG_HELP, mut_args(of_serve))]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub embedding: EmbeddingArgs,

    #[command(flatten)]
    pub fleet: FleetArgs,

    #[command(flatten)]
    pub listen: ListenArgs,

    #[command(flatten)]
    pub access: AccessArgs,

    #[command(flatten)]
    pub capacity: CapacityArgs,

    #[command(flatten)]
    pub sessions: ServeSessionArgs,

    #[command(flatten)]
    pub answers: AnswerArgs,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub mcp: McpServerArgs,

    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub isolation: IsolationArgs,

    #[command(flatten)]
    pub limits: ServeLimitArgs,
}

/// The flags of `serve` that are used most, by id.
const MOST_USED: [&str; 10] = [
    "model",
    "ctx",
    "host",
    "port",
    "api_key_file",
    "parallel",
    "models_folder",
    "embedding_model",
    "share_sessions",
    "engine",
];

/// Adapts a flag that other subcommands share.
fn of_serve(arg: Arg) -> Arg {
    let arg = match arg.get_id().as_str() {
        "max_sessions" => arg.value_parser(count(1..)), // a worker may keep none: its client keeps the sessions
        "model" => arg.action(ArgAction::Append).long_help(MODEL_HELP),
        "mcp_config" => arg.long_help(tools::MCP_CONFIG_HELP),
        _ => arg,
    };
    most_used(arg, &MOST_USED)
}

/// `--model` of `serve`, where it may be repeated.
const MODEL_HELP: &str = "\
Model: a .gguf file, a folder, org/repo[:QUANT][@REVISION] or an alias; may be repeated

A path that exists wins; repositories are looked up in the Hugging Face cache (HF_HUB_CACHE, HF_HOME), and a missing one is \
downloaded, on a terminal after a question. Without any it is guide, the small model inside llmctl. Of several models, each is \
loaded when a request first names it; a request without a name means the first.";

/// Flags of embeddings and reranking.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct EmbeddingArgs {
    /// Serve /v1/embeddings (or /v1/rerank) with this model, beside --model: a file, a folder, org/repo or an alias
    #[arg(long, value_name = "REF")]
    pub embedding_model: Option<String>,

    /// Task of --model (default: as its files say); `rerank` scores pairs by a language model's yes and no
    #[arg(long, value_enum, value_name = "TASK", hide_short_help = true)]
    pub task: Option<ModelTask>,

    /// Pool hidden states of the embedding model in this way (default: as its files say)
    #[arg(long, value_name = "HOW", value_parser = one_of(&POOLINGS), hide_short_help = true)]
    pub pooling: Option<Pooling>,

    /// Flags on the command line that have no meaning with a model that writes no text; filled in after the parse.
    #[arg(skip)]
    pub beside: Vec<&'static str>,
}

/// `--task`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelTask {
    Chat,
    Embed,
    Rerank,
}

/// Address of the server.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Address")]
pub struct ListenArgs {
    /// Address to listen on (default: 127.0.0.1)
    ///
    /// An address that others can reach needs an API key, or --insecure-no-auth.
    #[arg(long, value_name = "ADDRESS")]
    pub host: Option<String>,

    /// Port to listen on; 0 takes a free one (default: 8484)
    #[arg(long, short, value_name = "N")]
    pub port: Option<u16>,

    /// Listen at this port too, for Ollama's clients, which look for a server at 11434 (default: none)
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub ollama_port: Option<u16>,

    /// Listen on a socket in the file system instead, which only its owner may use
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "port", "ollama_port"])]
    pub uds: Option<PathBuf>,

    /// Name of the model in requests and answers (default: as it was found)
    #[arg(long, value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub model_id: Option<String>,

    /// Another name that requests may call the model, for clients that are set to one; `*` for any; may be repeated
    ///
    /// Answers carry the model's own name.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new(), hide_short_help = true)]
    pub alias: Vec<String>,
}

/// Flags of access.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Access")]
pub struct AccessArgs {
    /// File of API keys, one a line: KEY [owner=NAME] [# comment]. LLMCTL_API_KEY holds one more
    ///
    /// A key sees the sessions of its owner and no others. Keys without an owner have one each.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// Allow an address that others can reach without any API key
    #[arg(long, hide_short_help = true)]
    pub insecure_no_auth: bool,

    /// Let everyone who may send requests have models downloaded (POST /api/pull)
    ///
    /// By default only programs of this machine may, where there are no API keys.
    #[arg(long, hide_short_help = true)]
    pub allow_pull: bool,

    /// Let everyone who may send requests erase downloaded models (DELETE /api/delete)
    ///
    /// By default nobody may. A model that is in use, or that a session continues with, is kept.
    #[arg(long, hide_short_help = true)]
    pub allow_delete: bool,

    /// Answer browsers at / with JSON as other programs, not with the page
    #[arg(long)]
    pub no_page: bool,

    /// Let web pages of this origin use the server, e.g. https://chat.example; `*` for all; may be repeated
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',', value_parser = parse_origin)]
    pub cors_origin: Vec<String>,

    /// Answer to this name in the Host header, beside addresses and localhost; `*` for all; may be repeated
    ///
    /// The check keeps web pages from reaching the server through a name of theirs. With API keys it is off
    /// unless this is given.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = parse_host, hide_short_help = true)]
    pub allowed_host: Vec<String>,
}

/// Flags of sessions.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sessions")]
pub struct ServeSessionArgs {
    /// Let a request to a busy session wait this long for its turn; then it gets 409 (default: 60s)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub session_wait: Option<TimeSpan>,

    /// Let every client that may send requests use the sessions of `run` and `chat`
    ///
    /// Without it, sessions over HTTP and those of the terminal know nothing of each other.
    #[arg(long)]
    pub share_sessions: bool,

    /// Import prompts that were computed ahead, from a file of `llmctl warm --out`
    ///
    /// Once: later starts find them. The file is checked as a whole, and refused if it is damaged.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub warm: Vec<PathBuf>,
}

/// Flags of reading requests and answers.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Requests")]
pub struct AnswerArgs {
    /// Pass over unknown fields of requests instead of refusing them
    ///
    /// Known fields with values that this server has nothing for are passed over as well. What had no effect is named in the
    /// response header x-llmctl-ignored.
    #[arg(long)]
    pub lenient: bool,

    /// Refuse messages that hold a special token of the model, e.g. <|im_end|>, as text (default: it counts as the token)
    ///
    /// Messages that the model itself has written are not looked at, nor are prompts of /v1/completions.
    #[arg(long, hide_short_help = true)]
    pub refuse_special_tokens: bool,

    /// Refuse max_tokens beyond the context instead of lowering it to what the prompt leaves
    #[arg(long, hide_short_help = true)]
    pub strict_limits: bool,

    /// Read JSON Schemas as their standard does: objects may have members that the schema does not name
    ///
    /// By default an object with `properties` has only those, unless `additionalProperties` says otherwise: small models would
    /// keep inventing members. A request overrides this with `schema_open`.
    #[arg(long, hide_short_help = true)]
    pub schema_open: bool,

    /// End what repeats itself: on, off, or the least tokens of a repetition (default: 1000, reasoning only)
    ///
    /// The last N tokens are one cycle over and over, four times at least. Reasoning is ended and the answer follows; an answer
    /// stops. `on` is 1000, and like a number guards both. A request overrides this with `loop_guard`.
    #[arg(long, value_name = "on|off|N", hide_short_help = true)]
    pub loop_guard: Option<LoopGuard>,

    /// Fetch images at https URLs of this host; may be repeated (default: only images in the request itself)
    ///
    /// HOST or HOST:PORT. Never from an address of this machine or its network, without redirects, 20 MiB and 10 s at most.
    #[arg(long, value_name = "HOST", value_delimiter = ',', value_parser = parse_image_host, hide_short_help = true)]
    pub image_urls: Vec<String>,

    /// Ask the model not to think unless a request does; for templates that know `enable_thinking`
    #[arg(long, hide_short_help = true)]
    pub no_think: bool,

    /// Ask the model to think unless a request does not; for templates that know `enable_thinking`
    #[arg(long, conflicts_with = "no_think", hide_short_help = true)]
    pub think: bool,

    /// Format of the model's tool calls (default: as its chat template shows)
    #[arg(long, value_name = "FORMAT", hide_short_help = true)]
    pub tool_format: Option<ToolCallFormat>,

    /// Format of the model's reasoning (default: as its chat template shows)
    #[arg(long, value_name = "FORMAT", hide_short_help = true)]
    pub reasoning_format: Option<ReasoningFormat>,
}

/// Flags of clients' limits and of logs.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Limits and logs")]
pub struct ServeLimitArgs {
    /// End a request after this time, waiting included (default: none)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub request_timeout: Option<TimeSpan>,

    /// Time for requests under way once the server is asked to stop (default: 30s)
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<TimeSpan>,

    /// Largest body of a request (default: 16M, 64M where the model reads images)
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub max_body: Option<ByteSize>,

    /// Time for the head of a request to arrive (default: 10s)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub header_timeout: Option<TimeSpan>,

    /// Time for the body of a request to arrive (default: 60s)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub body_timeout: Option<TimeSpan>,

    /// Requests of one client address whose body is still on its way after a second; more get 429, 0 is no limit (default: 64)
    ///
    /// A proxy that hands bodies on as they come is one address for all of its clients.
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub max_slow_bodies: Option<usize>,

    /// Close connections that are idle, or do not read their answer, for this long (default: 75s)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub idle_timeout: Option<TimeSpan>,

    /// Connections at the same time; one more takes the place of an idle one (default: 1024)
    #[arg(long, value_name = "N", value_parser = count(1..), hide_short_help = true)]
    pub max_connections: Option<usize>,

    /// Write a JSON line per request to this file (`-` is stdout)
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
}

const LONG_HELP: &str = include_str!("serve_help.txt").trim_ascii_end();

/// Parses an origin as browsers send it: without path and trailing slash.
fn parse_origin(text: &str) -> Result<String, String> {
    let is_origin = text.split_once("://").is_some_and(|(scheme, site)| {
        let is_scheme =
            !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
        let is_site =
            !site.is_empty() && site.bytes().all(|b| b.is_ascii_graphic() && !b"/?#@,".contains(&b));
        is_scheme && is_site
    });
    match text {
        "*" | "null" => Ok(text.to_owned()),
        _ if is_origin => Ok(text.to_ascii_lowercase()),
        _ => Err("not an origin like https://chat.example or http://localhost:3000 (no path)".to_owned()),
    }
}

/// Parses a name with or without a port.
fn parse_image_host(text: &str) -> Result<String, String> {
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok());
    match parse_host(host) {
        Ok(host) if host != "*" && is_port => {
            Ok(port.filter(|port| *port != "443").map_or(host.clone(), |port| format!("{host}:{port}")))
        }
        _ => Err("not a name like images.example or images.example:8443 (no scheme)".to_owned()),
    }
}

/// Parses a name without a port.
fn parse_host(text: &str) -> Result<String, String> {
    let is_name = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    match text {
        "*" => Ok(text.to_owned()),
        _ if !text.is_empty() && is_name(text) => Ok(text.trim_end_matches('.').to_ascii_lowercase()),
        _ => Err("not a name like llm.example (no scheme, no port)".to_owned()),
    }
}

/// Reason for the shutdown.
enum Stop {
    Signal,
    EngineLost(String),
}

/// A server that takes requests.
pub struct RunningServer {
    server: Server,
    served: ServedModels,
    /// The models as `--connect` looks for them: their names in requests, where these are other ones, and their references.
    recorded: Vec<(Option<String>, Option<String>)>,
    observer: Observer,
    tools: Option<SharedToolServers>,
    /// Time after which an idle model of several is unloaded.
    keep_alive: Option<Duration>,
    log: Option<AccessLog>,
    drain_timeout: Duration,
    stop: Sender<Stop>,
    stops: Receiver<Stop>,
}

/// Runs the server until a signal, or until the engine cannot be recovered.
pub fn run(args: ServeArgs, terminal: &Terminal, places: &Places) -> Result<Exit, CommandError> {
    let keys = keys(args.access.api_key_file.as_deref(), terminal)?;
    let running = RunningServer::start(&args, keys, terminal, places)?;
    let graceful = Graceful::begin();
    let stop = running.stop.clone();
    // The receiver lives until the process ends.
    let tell = move |_| drop(stop.send(Stop::Signal));
    graceful.on_signal(tell).map_err(CommandError::io("waiting for signals"))?;
    running.open(terminal);
    let (recorded, (_, context)) = (running.recorded.clone(), running.model());
    let _record = running::record(&args.model, context, recorded, running.address(), places, terminal);
    let stopped = running.stops.recv().unwrap_or(Stop::Signal);
    terminal.note("stopping: requests under way come to their end");
    running.finish(terminal);
    match stopped {
        Stop::Signal => Ok(Exit::Success),
        Stop::EngineLost(why) => Err(Kind::Failure.error(why)),
    }
}

impl RunningServer {
    /// Takes the address and loads the model. Requests get 503 until [`Self::open`].
    ///
    /// # Errors
    /// Those of `llmctl serve`.
    pub fn start(
        args: &ServeArgs,
        keys: ApiKeys,
        terminal: &Terminal,
        places: &Places,
    ) -> Result<Self, CommandError> {
        let mut policy = policy(args, keys);
        let num_workers = args.isolation.num_workers()?.unwrap_or(0);
        let listener = bind(args, &policy.keys)?;
        let limits = connection_limits(&args.limits, num_workers, terminal);
        if args.limits.max_slow_bodies.is_none() {
            // With few connections, one client still leaves half of them to others.
            policy.max_slow_bodies = policy.max_slow_bodies.min(limits.max_connections.div_ceil(2));
        }
        let log = args.limits.access_log.as_deref().map(open_log).transpose()?;
        let observer = Observer::new(spans::begin(terminal)?);
        let lifecycle = Lifecycle::new(policy, observer.clone(), log.clone());
        let starting = CommandError::io("starting the server");
        let mut server = Server::start(listener, lifecycle, limits).map_err(&starting)?;
        if let Some(port) = args.listen.ollama_port {
            let listener = Listener::ollama(&addresses(args, port)?[..]);
            let listener = listener
                .map_err(|error| bind_error(&format!("--ollama-port {port}"), "--ollama-port", error))?;
            let address = listener.address().map_err(&starting)?;
            server.listen(listener).map_err(&starting)?;
            terminal.note(format!("Ollama's clients find the server at {address}"));
        }
        terminal.detail(&format!("{} answers 503 while the model is loaded", server.address()));
        let tools = tools::begin(args, &server, terminal)?;
        import_warm(args, terminal, places)?;
        let (stop, stops) = mpsc::channel();
        let shared = shared(args, observer.clone(), terminal, places)?;
        let downloads = CacheDownloads {
            places: places.clone(),
            aliases: args.model.aliases.clone(),
            terminal: terminal.clone(),
            is_open: args.access.allow_pull,
            may_erase: args.access.allow_delete,
        };
        let shared = shared
            .with_tools(tools.as_ref().map(SharedToolServers::host))
            .with_downloads(Arc::new(downloads));
        let (served, recorded) = if args.fleet.is_asked() {
            let (fleet, references) = fleet::load(args, shared, terminal)?;
            let recorded = references.into_iter().map(|reference| (None, reference)).collect();
            (ServedModels::Fleet(fleet), recorded)
        } else {
            let stop = stop.clone();
            let gave_up: OnLost = Arc::new(move |why| drop(stop.send(Stop::EngineLost(why))));
            let app = load_app(args, shared, gave_up, terminal)?;
            (ServedModels::Model(app), vec![(args.listen.model_id.clone(), args.model.model.clone())])
        };
        let tools = tools::for_text(tools, &served, terminal);
        let drain_timeout = args.limits.drain_timeout.map_or(DEFAULT_DRAIN, |span| span.0);
        let keep_alive = args.fleet.keep_alive.map(|span| span.0);
        Ok(Self { server, served, recorded, observer, tools, keep_alive, log, drain_timeout, stop, stops })
    }

    /// Takes requests from now on.
    pub fn open(&self, terminal: &Terminal) {
        match &self.served {
            ServedModels::Model(app) => self.server.open(app.clone()),
            ServedModels::Fleet(fleet) => self.server.open_fleet(fleet.clone(), self.keep_alive),
        }
        let names = match &self.served {
            ServedModels::Model(app) => app.model().id.clone(),
            ServedModels::Fleet(fleet) => fleet.ids().collect::<Vec<_>>().join(", "),
        };
        terminal.note(format!("serving {names} at {}", self.server.address().base_url()));
        terminal.note(format!("listening on {}", self.server.address()));
    }

    pub fn address(&self) -> &Address {
        self.server.address()
    }

    /// Returns whether the model is loaded and reads images.
    pub fn sees(&self) -> bool {
        self.app().is_some_and(|app| app.engine().is_ok_and(|engine| engine.spec().vision.is_some()))
    }

    /// Returns the id of the model of requests that name none, and its context if it is loaded.
    pub fn model(&self) -> (String, Option<usize>) {
        match &self.served {
            ServedModels::Model(app) => {
                let context = app.engine().ok().map(|engine| engine.spec().context_length());
                (app.model().id.clone(), context)
            }
            ServedModels::Fleet(fleet) => (fleet.first().to_owned(), None),
        }
    }

    /// Returns the model of requests that name none; `None` while it is not loaded.
    pub fn app(&self) -> Option<App> {
        match &self.served {
            ServedModels::Model(app) => Some(app.clone()),
            ServedModels::Fleet(_) => None,
        }
    }

    /// Lets requests come to their end, saves the sessions' KV and writes the rest of the log.
    pub fn finish(self, terminal: &Terminal) {
        finish(self.server, &self.served, self.tools, self.drain_timeout, terminal);
        if !self.log.is_none_or(|log| log.flush(FLUSH_TIMEOUT)) {
            terminal.warn("the last lines of the access log could not be written");
        }
        if let Err(error) = self.observer.finish_spans(SPANS_TIMEOUT) {
            terminal.warn(format!("the last spans could not be sent: {error}"));
        }
    }
}

/// Completes requests, closes connections and sockets, and saves the sessions' KV.
fn finish(
    server: Server,
    served: &ServedModels,
    tools: Option<SharedToolServers>,
    timeout: Duration,
    terminal: &Terminal,
) {
    let engines = || served.apps().iter().flat_map(|app| app.engines().up()).collect::<Vec<_>>();
    let cancel = || {
        tools.iter().for_each(SharedToolServers::stop);
        // An engine that has ended has nothing to cancel.
        engines().iter().for_each(|engine| drop(engine.cancel_all()));
    };
    let drained = server.drain(timeout, cancel);
    match drained.num_cancelled {
        0 => {}
        1 => terminal.warn("--drain-timeout was over: one request was cancelled"),
        many => terminal.warn(format!("--drain-timeout was over: {many} requests were cancelled")),
    }
    drop(tools); // they have ended then
    for app in served.apps() {
        let (is_all_saved, notices) = app.engines().save_kv();
        if !is_all_saved {
            terminal
                .warn("the disk is slow: not all KV was saved, and the next turns compute the rest again");
        }
        notices.iter().for_each(|notice| terminal.warn(notice));
    }
}

/// Creates what all models of the server share.
fn shared(
    args: &ServeArgs,
    observer: Observer,
    terminal: &Terminal,
    places: &Places,
) -> Result<ServerShared, CommandError> {
    let store = places.sessions().map(|_| sessions::store(places)).transpose()?;
    if let Err(obstacle) = places.check(KeptFiles::Sessions) {
        let end = if store.is_none() { "they end with the server" } else { "requests with a session fail" };
        terminal.warn(format!("{obstacle}; {end}"));
    }
    let max_sessions = args.capacity.options(&args.engine).sharing.max_sessions;
    Ok(ServerShared::new(store, observer, max_sessions))
}

/// Imports the prompts of `--warm`.
fn import_warm(args: &ServeArgs, terminal: &Terminal, places: &Places) -> Result<(), CommandError> {
    if !args.sessions.warm.is_empty() && is_remote(args) {
        return Err(CommandError::usage("--warm: the KV is on the machine of --engine"));
    }
    for file in &args.sessions.warm {
        let kv_limit = args.engine.kv_disk.map_or(DEFAULT_KV_DISK, |size| size.0);
        let (_, text) = archive::import_prompts(file, &sessions::store(places)?, kv_limit)?;
        text.lines().for_each(|line| terminal.note(line));
    }
    Ok(())
}

/// Loads a model and everything that requests need. Calls `gave_up` when its engine cannot be brought back.
fn load_app(
    args: &ServeArgs,
    shared: ServerShared,
    gave_up: OnLost,
    terminal: &Terminal,
) -> Result<App, CommandError> {
    if let Some(resolved) = embedder::files(args, terminal)? {
        return embedder::alone(args, &resolved, shared, terminal);
    }
    let beside = embedder::beside(args, terminal)?;
    let (texts, engines) = match args.isolation.num_workers()? {
        Some(_) if is_remote(args) => {
            let message = "--isolate and --workers are for engines of this machine, not for --engine";
            return Err(CommandError::usage(message));
        }
        None if is_remote(args) => connect_engines(args, terminal)?,
        None => load_engine(args, gave_up, terminal)?,
        Some(count) => start_workers(args, count, gave_up, terminal)?,
    };
    let texts = texts.for_frontend(Frontend::Http);
    if !texts.info().has_chat_template {
        let name = &texts.info().name;
        terminal.warn(format!("{name} has no chat template: chat needs --chat-template FILE"));
    }
    if args.answers.tool_format.is_none()
        && let Some(notice) = texts.chat_tokenizer().notice_of_tools()
    {
        terminal.note(notice);
    }
    let model = texts.into_served(args.listen.model_id.clone(), args.sampling.given.clone());
    embedder::check_id(&model, beside.as_ref())?;
    Ok(App::with_embedder(shared, model, engines, settings(args), beside))
}

fn is_remote(args: &ServeArgs) -> bool {
    !args.model.remote.engine.is_empty()
}

/// Connects to engines elsewhere, each in a slot of its own, so that requests of a lost one go to another. An
/// engine that is lost is asked again for ever, because its own operator restarts it.
fn connect_engines(args: &ServeArgs, terminal: &Terminal) -> Result<(PreparedTexts, Engines), CommandError> {
    let asked = args.capacity.options(&args.engine);
    let (mut texts, settings) = remote::open(&args.model, asked, terminal)?;
    let all = remote::connect(settings.clone())?;
    remote::report(&all, terminal);
    remote::set_limits(&mut texts, &all);
    let spec = all.spec().clone();
    let mut slots = Vec::new();
    for url in &settings.urls {
        let alone =
            HttpEngineSettings { urls: vec![url.clone()], when_lost: WhenLost::End, ..settings.clone() };
        let engine = EngineClient::new(HttpEngine::connect_as(alone.clone(), &spec)?);
        let spec = spec.clone();
        let recovery = Recovery {
            name: format!("the engine at {url}"),
            rebuild: Box::new(move || {
                let engine =
                    HttpEngine::connect_as(alone.clone(), &spec).map_err(|error| error.to_string())?;
                engine.exit_reason().map_or(Ok(EngineClient::new(engine)), Err)
            }),
            build_time: REMOTE_PAUSE,
            pause: REMOTE_PAUSE,
            longest_pause: LONGEST_REMOTE_PAUSE,
            max_attempts: u32::MAX,
            gave_up: Box::new(|_| {}),
        };
        slots.push(
            EngineSlot::with_recovery(engine, recovery).map_err(CommandError::io("watching an engine"))?,
        );
    }
    Ok((texts, Engines::new(slots)))
}

/// Starts the engine as a thread of this process.
fn load_engine(
    args: &ServeArgs,
    gave_up: OnLost,
    terminal: &Terminal,
) -> Result<(PreparedTexts, Engines), CommandError> {
    let start = Instant::now();
    let asked = args.capacity.options(&args.engine);
    let (texts, engine) = load::load(&args.model, asked, terminal)?.into_parts();
    let recovery = Recovery {
        name: "the engine".to_owned(),
        rebuild: rebuild(args.model.clone(), asked, texts.fingerprint().clone(), terminal.clone()),
        build_time: start.elapsed(),
        pause: RELOAD_PAUSE,
        longest_pause: LONGEST_PAUSE,
        max_attempts: RELOAD_ATTEMPTS,
        gave_up: Box::new(move |why| gave_up(why)),
    };
    let slot =
        EngineSlot::with_recovery(engine, recovery).map_err(CommandError::io("watching the engine"))?;
    Ok((texts, slot.into()))
}

/// Loads the text side here, and the model in worker processes.
fn start_workers(
    args: &ServeArgs,
    count: usize,
    gave_up: OnLost,
    terminal: &Terminal,
) -> Result<(PreparedTexts, Engines), CommandError> {
    let texts = load::load_texts(&args.model, args.capacity.options(&args.engine), terminal)?;
    let slots = workers::start(args, count, texts.fingerprint(), terminal, move |why| gave_up(why))?;
    Ok((texts, Engines::new(slots)))
}

/// Loads the model again, if it is still the same.
fn rebuild(
    model: ModelArgs,
    asked: EngineOptions,
    fingerprint: ModelFingerprint,
    terminal: Terminal,
) -> Box<dyn FnMut() -> Result<EngineClient, String> + Send> {
    // A restart in the middle of the night must not begin a download.
    let fetch = FetchArgs { offline: true, ..model.fetch.clone() };
    let model = ModelArgs { fetch, ..model };
    Box::new(move || {
        let llm = load::load(&model, asked, &terminal).map_err(|error| error.to_string())?;
        let (texts, engine) = llm.into_parts();
        match texts.fingerprint().is_same(&fingerprint) {
            true => Ok(engine),
            false => Err("the files of the model have changed; start the server anew".to_owned()),
        }
    })
}

fn settings(args: &ServeArgs) -> ServeSettings {
    let answers = &args.answers;
    let others = args.model.aliases.keys().filter(|name| Some(*name) != args.model.model.as_ref());
    ServeSettings {
        lenient: answers.lenient,
        strict_limits: answers.strict_limits,
        schema_open: answers.schema_open,
        loop_guard: answers.loop_guard.unwrap_or_default(),
        deadline: args.limits.request_timeout.map(|span| span.0),
        tool_format: answers.tool_format,
        reasoning_format: answers.reasoning_format,
        enable_thinking: (answers.think || answers.no_think).then_some(answers.think),
        isolated: args.isolation.isolate || args.isolation.workers.is_some(),
        refuses_special_tokens: answers.refuse_special_tokens,
        aliases: args.listen.alias.clone(),
        other_models: others.cloned().collect(),
        session_wait: args.sessions.session_wait.map_or(DEFAULT_SESSION_WAIT, |span| span.0),
        share_sessions: args.sessions.share_sessions,
        remote: is_remote(args),
        image_urls: ImageUrls { hosts: answers.image_urls.clone(), allows_loopback: false },
    }
}

fn policy(args: &ServeArgs, keys: ApiKeys) -> Policy {
    let mut names = args.access.allowed_host.clone();
    // A name that the server is bound to is meant to be used; with keys, any name is allowed.
    names.extend(
        args.listen.host.as_deref().filter(|_| keys.is_empty()).and_then(|host| parse_host(host).ok()),
    );
    let defaults = Policy::default();
    let max_body = args.limits.max_body.map(|size| usize::try_from(size.0).unwrap_or(usize::MAX));
    Policy {
        keys,
        hosts: Hosts { names },
        origins: args.access.cors_origin.clone(),
        max_body: max_body.unwrap_or(defaults.max_body),
        max_body_with_images: max_body.unwrap_or(defaults.max_body_with_images),
        body_timeout: args.limits.body_timeout.map_or(defaults.body_timeout, |span| span.0),
        max_slow_bodies: args.limits.max_slow_bodies.unwrap_or(defaults.max_slow_bodies),
        page: !args.access.no_page,
    }
}

/// Reads the keys of the file and the environment.
fn keys(file: Option<&Path>, terminal: &Terminal) -> Result<ApiKeys, CommandError> {
    let mut lines = Vec::new();
    if let Some(path) = file {
        lines = key_lines(path)?;
        if let Some(mode) = private_files::mode_for_others(path) {
            terminal.warn(format!(
                "{}: other users of this machine can read these API keys (mode {mode:03o}); chmod 600 keeps them private",
                path.display()
            ));
        }
    }
    // Not a flag, because every user of the machine can read the command line.
    let variable = std::env::var("LLMCTL_API_KEY").unwrap_or_default();
    let from_variable = KeyLine::parse(&variable)
        .map_err(|error| CommandError::bad_data(format!("LLMCTL_API_KEY: {error}")))?;
    lines.extend(from_variable);
    Ok(ApiKeys::new(lines))
}

/// Reads the keys of a file; errors name the line.
fn key_lines(path: &Path) -> Result<Vec<KeyLine>, CommandError> {
    let text = read_file(path)?;
    let mut found: Vec<(usize, KeyLine)> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let refuse = |what: &str| {
            CommandError::bad_data(format!("--api-key-file: {}, line {number}: {what}", path.display()))
        };
        let Some(line) = KeyLine::parse(line).map_err(|error| refuse(&error))? else { continue };
        match found.iter().find(|(_, earlier)| earlier.key == line.key) {
            Some((earlier, _)) => return Err(refuse(&format!("the key of line {earlier} again"))),
            None => found.push((number, line)),
        }
    }
    if found.is_empty() {
        return Err(CommandError::bad_data(format!("--api-key-file: {} holds no API key", path.display())));
    }
    Ok(found.into_iter().map(|(_, line)| line).collect())
}

/// Binds the address, so that one in use is an error before anything is loaded.
fn bind(args: &ServeArgs, keys: &ApiKeys) -> Result<Listener, CommandError> {
    let listen = &args.listen;
    if let Some(path) = &listen.uds {
        return bind_local(path);
    }
    let (host, port) = (host(args), listen.port.unwrap_or(DEFAULT_PORT));
    let addresses = addresses(args, port)?;
    let is_reachable = addresses.iter().any(|address| !address.ip().to_canonical().is_loopback());
    if is_reachable && keys.is_empty() {
        check_strangers(args, host)?;
    }
    Listener::tcp(&addresses[..]).map_err(|error| bind_error(&format!("{host}:{port}"), "--port", error))
}

/// Returns the host to listen on, without brackets.
fn host(args: &ServeArgs) -> &str {
    let host = args.listen.host.as_deref().unwrap_or(DEFAULT_HOST);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Returns the addresses of the host with a port.
fn addresses(args: &ServeArgs, port: u16) -> Result<Vec<SocketAddr>, CommandError> {
    let host = host(args);
    let found = (host, port).to_socket_addrs();
    found.map(Iterator::collect).map_err(|error| CommandError::usage(format!("--host {host}: {error}")))
}

/// Refuses an address that others can reach without a key, unless that is wanted. Tools need a key there in
/// any case, because they act with the rights of llmctl's user.
fn check_strangers(args: &ServeArgs, host: &str) -> Result<(), CommandError> {
    let keys = "give --api-key-file FILE or LLMCTL_API_KEY";
    if !args.access.insecure_no_auth {
        let message = format!("--host {host}: others can reach this address, and there is no API key");
        let hint = format!("{keys}, or --insecure-no-auth for access without a key");
        return Err(CommandError::usage(message).hint(hint));
    }
    if !args.mcp.mcp_config.is_empty() {
        let message =
            format!("--mcp-config: others can reach {host}, and would call the tools without an API key");
        return Err(CommandError::usage(message).hint(keys));
    }
    Ok(())
}

#[cfg(unix)]
fn bind_local(path: &Path) -> Result<Listener, CommandError> {
    Listener::unix(path).map_err(|error| bind_error(&path.display().to_string(), "--uds", error))
}

#[cfg(not(unix))]
fn bind_local(_: &Path) -> Result<Listener, CommandError> {
    Err(CommandError::usage("--uds: this system has no such sockets"))
}

/// `flag` gives another address.
fn bind_error(address: &str, flag: &str, error: io::Error) -> CommandError {
    let is_taken = error.kind() == io::ErrorKind::AddrInUse;
    let error = CommandError::new(if is_taken { Kind::Temporary } else { Kind::Io }, error);
    let hint = is_taken.then(|| format!("another server is there; {flag} takes another address"));
    error.context(format!("listening on {address}")).hint_if(hint)
}

fn connection_limits(args: &ServeLimitArgs, num_workers: usize, terminal: &Terminal) -> ConnectionLimits {
    let defaults = ConnectionLimits::default();
    let asked = args.max_connections.unwrap_or(defaults.max_connections);
    let others = OTHER_DESCRIPTORS + num_workers * DESCRIPTORS_PER_WORKER;
    let room = descriptors::raise_limit().map(|limit| limit.saturating_sub(others).max(1));
    let max_connections = room.map_or(asked, |room| asked.min(room));
    if max_connections < asked {
        terminal
            .warn(format!("connections limited to {max_connections} by the limit on open files (ulimit -n)"));
    }
    let time = |given: Option<TimeSpan>, default| given.map_or(default, |span: TimeSpan| span.0);
    ConnectionLimits {
        max_connections,
        header_timeout: time(args.header_timeout, defaults.header_timeout),
        idle_timeout: time(args.idle_timeout, defaults.idle_timeout),
    }
}

fn open_log(path: &Path) -> Result<AccessLog, CommandError> {
    let out: Box<dyn Write + Send> = if path == Path::new("-") {
        Box::new(io::stdout())
    } else {
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600); // the log shows when each client asks what
        Box::new(options.open(path).map_err(CommandError::io(format!("opening {}", path.display())))?)
    };
    AccessLog::new(out).map_err(CommandError::io("starting the access log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_address_names_the_flag_for_another() {
        for flag in ["--port", "--ollama-port", "--uds"] {
            let error = bind_error("there", flag, io::ErrorKind::AddrInUse.into());
            let hint = format!("another server is there; {flag} takes another address");
            assert_eq!((error.kind, error.hint_text()), (Kind::Temporary, Some(hint.as_str())));
        }
    }

    #[test]
    fn origins_and_hosts_are_those_that_browsers_send() {
        for origin in ["https://a.example", "http://localhost:3000", "http://[::1]:8", "app://x", "*", "null"]
        {
            assert_eq!(parse_origin(origin).as_deref(), Ok(origin));
        }
        assert_eq!(parse_origin("HTTPS://A.Example").as_deref(), Ok("https://a.example"));
        for bad in ["", "a.example", "https://a.example/", "https://a/b", "://a", "https://", "https://a b"] {
            assert!(parse_origin(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_host("LLM.example.").as_deref(), Ok("llm.example"));
        assert_eq!(parse_host("*").as_deref(), Ok("*"));
        for bad in ["", "http://a", "a:80", "a/b", "[::1]"] {
            assert!(parse_host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_come_line_by_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        let check = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            let lines = key_lines(&path).map_err(|error| (error.kind, format!("{error}")))?;
            Ok(lines.into_iter().map(|line| (line.key, line.owner.to_string())).collect::<Vec<_>>())
        };
        let found = check("# ours\nsk-1 owner=anna\n\n  sk-2 # x  \r\n").expect("keys");
        assert_eq!(found[0], ("sk-1".to_owned(), "anna".to_owned()));
        assert_eq!((found.len(), found[1].0.as_str()), (2, "sk-2"));
        for (text, expected) in [
            ("\n# none\n", "holds no API key"),
            ("sk-1\nwith space\n", "line 2: unexpected word"),
            ("sk-1\n\nsk-2 owner=a/b\n", "line 3: owner \"a/b\""),
            ("sk-1 owner=a\nsk-1 owner=b\n", "line 2: the key of line 1 again"),
        ] {
            let (kind, message) = check(text).expect_err(text);
            assert!(kind == Kind::BadData && message.contains(expected), "{text:?}: {message}");
        }
        let absent = key_lines(Path::new("/no/such/file")).map_err(|error| error.kind);
        assert_eq!(absent.err(), Some(Kind::NotFound));
    }
}
