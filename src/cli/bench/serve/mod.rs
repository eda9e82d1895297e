//! `llmctl bench serve`: load on an OpenAI-compatible server, and what its users would feel.
//!
//! The load comes from `llmctl_bench::http`; `own` starts llmctl's own server in this process for --self.

mod own;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use tokio::runtime::Runtime;

use super::{BenchOutputArgs, Outlook};
use crate::cli::error::{CommandError, Exit, Kind};
use crate::cli::flags::args::{
    FetchArgs, FlagValue, INSTRUCTION_SETS, KV_TYPES, ModelArgs, TimeSpan, count, endpoint_text, one_of,
};
use crate::cli::model::load;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::signal::Graceful;
use llmctl_bench::http::client::{LoadClient, address};
use llmctl_bench::http::drive::{Api, Bounds, Workload, drive};
use llmctl_bench::http::meet::meet;
use llmctl_bench::http::trace::{self, Arrival};
use llmctl_bench::machine::Counters;
use llmctl_bench::point::{self, Loop, Point, Slo, Spacing};
use llmctl_bench::record::{Document, ServerFacts};
use llmctl_hub::Aliases;
use llmctl_models::load::{Isa, KvType};

/// Measure a server that speaks OpenAI's interface
///
/// A sweep over numbers of users (--concurrency) and rates of arrival (--rate), or a recorded trace. Each point is bounded by
/// --requests and --duration.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct BenchServeArgs {
    #[command(flatten)]
    pub target: TargetArgs,

    #[command(flatten)]
    pub fetch: FetchArgs,

    #[command(flatten)]
    pub load: LoadArgs,

    #[command(flatten)]
    pub workload: WorkloadArgs,

    #[command(flatten)]
    pub output: BenchOutputArgs,

    /// Model aliases of the configuration files; set after parsing.
    #[arg(skip)]
    pub aliases: Aliases,
}

const APIS: [FlagValue<Api>; 2] =
    [("chat", Api::Chat, "/v1/chat/completions"), ("completions", Api::Completions, "/v1/completions")];

const SPACINGS: [FlagValue<Spacing>; 2] = [
    ("poisson", Spacing::Poisson, "Independent of each other, as many users are"),
    ("constant", Spacing::Constant, "Evenly"),
];

/// Flags that choose the server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct TargetArgs {
    /// Address of the server, e.g. http://127.0.0.1:8484; https is not supported
    #[arg(long, value_name = "URL", value_parser = endpoint_text, conflicts_with = "own")]
    pub endpoint: Option<String>,

    /// Start llmctl's own server in this process, on a free port of 127.0.0.1
    #[arg(long = "self", id = "own")]
    pub own: bool,

    /// Model to load with --self; with --endpoint, as --served-model
    #[arg(long, short, value_name = "REF")]
    pub model: Option<String>,

    /// Name of the model in requests (default: the first that the server lists)
    #[arg(long, value_name = "ID", conflicts_with = "own")]
    pub served_model: Option<String>,

    /// File with the server's API key; OPENAI_API_KEY holds it too
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub api_key_file: Option<PathBuf>,

    /// Endpoint to ask (default: chat; completions with --self for a model without a chat template)
    #[arg(long, value_name = "API", value_parser = one_of(&APIS))]
    pub api: Option<Api>,

    /// Requests that are computed at the same time, with --self (default: the most users)
    #[arg(long, value_name = "N", conflicts_with = "endpoint", hide_short_help = true, value_parser = count(1..=1024))]
    pub parallel: Option<usize>,

    /// Threads to compute with, with --self
    #[arg(long, short = 't', value_name = "N", conflicts_with = "endpoint", hide_short_help = true, value_parser = count(1..=1024))]
    pub threads: Option<usize>,

    /// Context size in tokens, with --self (default: what the conversations need)
    #[arg(long, value_name = "N", conflicts_with = "endpoint", hide_short_help = true, value_parser = count(2..))]
    pub ctx: Option<usize>,

    /// Type of the KV cache, with --self
    #[arg(long, value_name = "TYPE", value_parser = one_of(&KV_TYPES), conflicts_with = "endpoint", hide_short_help = true)]
    pub kv_type: Option<KvType>,

    /// Instruction set of the CPU kernels, with --self
    #[arg(long, value_name = "SET", value_parser = one_of(&INSTRUCTION_SETS), conflicts_with = "endpoint", hide_short_help = true)]
    pub cpu: Option<Isa>,
}

/// Flags for the arrival of requests; lists are separated by commas.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Closed loop: numbers of users who each wait for their answer (default: 1,4)
    #[arg(long, short, value_name = "N", value_delimiter = ',', value_parser = count(1..=4096))]
    pub concurrency: Vec<usize>,

    /// Open loop: requests per second, whether or not the server keeps up
    #[arg(long, value_name = "R", value_delimiter = ',', value_parser = positive)]
    pub rate: Vec<f64>,

    /// Spacing of the arrivals of an open loop
    #[arg(long, value_name = "HOW", default_value = "poisson", value_parser = one_of(&SPACINGS))]
    pub spacing: Spacing,

    /// Replay a trace: an Azure LLM inference trace (CSV) or a Mooncake trace (JSON Lines)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Replay it this many times as fast
    #[arg(long, value_name = "X", default_value = "1", value_parser = positive, requires = "trace")]
    pub speed: f64,

    /// Requests of each point, at most
    #[arg(long, short = 'N', value_name = "N", default_value = "32", value_parser = count(1..=1_000_000))]
    pub requests: usize,

    /// Send nothing more after this time, e.g. 60s, in each point
    #[arg(long, value_name = "TIME")]
    pub duration: Option<TimeSpan>,

    /// Give up a request after this time
    #[arg(long, value_name = "TIME", default_value = "300s", hide_short_help = true)]
    pub timeout: TimeSpan,
}

/// Flags for the content of requests.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Requests")]
pub struct WorkloadArgs {
    /// Tokens of a prompt, about; with --trace, the most
    #[arg(long, short = 'p', value_name = "N", value_parser = count(1..))]
    pub n_prompt: Option<usize>,

    /// Tokens of an answer, at most; with --trace, the most of any
    #[arg(long, short = 'n', value_name = "N", value_parser = count(1..))]
    pub n_gen: Option<usize>,

    /// Turns of a conversation, each with all earlier turns before it
    #[arg(long, value_name = "N", default_value = "1", value_parser = count(1..=1000))]
    pub turns: usize,

    /// Tokens that each further turn adds, about
    #[arg(long, value_name = "N", default_value = "32", hide_short_help = true, value_parser = count(1..))]
    pub turn: usize,

    /// Time a user thinks between two turns (default: none)
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub think_time: Option<TimeSpan>,

    /// Ask for answers of full length (`ignore_eos`, which llmctl and vLLM know; always with --self)
    #[arg(long)]
    pub ignore_eos: bool,

    /// Count requests that keep to these limits in milliseconds as good, e.g. ttft=500,tpot=100,e2e=9000
    #[arg(long, value_name = "LIMITS")]
    pub slo: Option<Slo>,

    /// Seed of prompts and arrivals
    #[arg(long, value_name = "N", default_value = "1", hide_short_help = true)]
    pub seed: u64,
}

const LONG_HELP: &str = include_str!("long_help.txt").trim_ascii_end();

fn positive(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 && value.is_finite() { Ok(value) } else { Err("must be above 0".to_owned()) }
}

/// Runs the subcommand.
pub fn run(args: &BenchServeArgs, terminal: &Terminal) -> Result<Exit, CommandError> {
    if args.target.own {
        load::check_machine(&own_model(args))?;
    }
    let plan = Plan::new(args)?;
    let outlook = Outlook::new(&args.output, terminal)?;
    let endpoint = args.target.endpoint.as_deref().map(address).transpose()?;
    let key = api_key(args)?;
    let graceful = Graceful::begin();
    let own = match endpoint {
        None if args.target.own => Some(own::start(
            &own_model(args),
            args.target.ctx.unwrap_or(plan.context),
            plan.users(args),
            terminal,
        )?),
        _ => None,
    };
    let endpoint = match (endpoint, &own) {
        (Some(endpoint), _) => endpoint,
        (None, Some(own)) => address(&own.url())?,
        (None, None) => return Err(CommandError::usage("no server: give --endpoint URL or --self")),
    };
    let runtime = Runtime::new().map_err(|error| CommandError::new(Kind::Failure, error))?;
    let client = Arc::new(LoadClient::new(endpoint.clone(), key.as_deref(), args.load.timeout.0)?);
    let has_template = own.as_ref().is_none_or(|own| own.has_chat_template());
    let api = args.target.api.unwrap_or(if has_template { Api::Chat } else { Api::Completions });
    let named = args.target.model.as_ref().filter(|_| own.is_none());
    let served = args.target.served_model.as_ref().or(named).map(String::as_str);
    let (work, server) = runtime.block_on(meet(workload(args, &plan, api), served, &client))?;
    let mut document = super::new_document();
    document.server = Some(ServerFacts { endpoint: endpoint.address().to_string(), ..server });
    let sweep = LoadSweep { args, plan: &plan, client, work: Arc::new(work), graceful: &graceful, terminal };
    let ended = sweep.measure(&runtime, &mut document);
    if let Some(own) = own {
        own.stop();
    }
    document.complete = matches!(ended, Ok(None));
    // Report what was measured before a failure, too.
    let judged = outlook.conclude(&mut document);
    let signal = ended?;
    let judged = judged?;
    match signal {
        Some(signal) => Ok(Exit::Signal(signal)),
        None => verdict(&document).map(|exit| if exit == Exit::Success { judged } else { exit }),
    }
}

/// Returns an error if the server answered nothing.
fn verdict(document: &Document) -> Result<Exit, CommandError> {
    let has_answers = document.points.iter().any(|point| point.turns.iter().any(point::TurnSample::is_ok));
    let Some(first) = document.points.iter().flat_map(|point| point.errors.keys()).next() else {
        return Ok(Exit::Success);
    };
    match has_answers {
        true => Ok(Exit::Success),
        false => Err(Kind::Failure.error(format!("no request was answered ({first})"))),
    }
}

/// Load of all points.
struct Plan {
    points: Vec<Loop>,
    trace: Vec<Arrival>,
    prompt_tokens: usize,
    output_tokens: usize,
    /// Upper bound on the tokens of the longest conversation.
    context: usize,
}

impl Plan {
    const PROMPT: usize = 256;
    const OUTPUT: usize = 64;

    fn new(args: &BenchServeArgs) -> Result<Self, CommandError> {
        let (load, workload) = (&args.load, &args.workload);
        let mut trace = match &load.trace {
            None => Vec::new(),
            Some(path) => {
                let text = read_file(path)?;
                let trace = trace::parse(&text, load.requests);
                trace.map_err(|error| CommandError::from(error).context(path.display().to_string()))?
            }
        };
        for arrival in &mut trace {
            arrival.prompt_tokens = arrival.prompt_tokens.min(workload.n_prompt.unwrap_or(usize::MAX)).max(1);
            arrival.output_tokens = arrival.output_tokens.min(workload.n_gen.unwrap_or(usize::MAX)).max(1);
        }
        let mut points: Vec<Loop> =
            load.concurrency.iter().map(|&concurrency| Loop::Closed { concurrency }).collect();
        points.extend(load.rate.iter().map(|&rate| Loop::Open { rate, spacing: load.spacing }));
        points.extend(load.trace.as_ref().map(|_| Loop::Trace { speed: load.speed }));
        if points.is_empty() {
            points = [1, 4].map(|concurrency| Loop::Closed { concurrency }).to_vec();
        }
        let prompt_tokens = workload.n_prompt.unwrap_or(Self::PROMPT);
        let output_tokens = workload.n_gen.unwrap_or(Self::OUTPUT);
        let longest =
            trace.iter().map(|arrival| arrival.prompt_tokens + arrival.output_tokens).max().unwrap_or(0);
        let further = (workload.turns - 1) * (workload.turn + output_tokens);
        // Words are not tokens, and templates add to each turn.
        let context = (longest.max(prompt_tokens + output_tokens) + further) * 5 / 4 + 64 * workload.turns;
        Ok(Self { points, trace, prompt_tokens, output_tokens, context })
    }

    /// Returns how many requests the own server computes at once.
    fn users(&self, args: &BenchServeArgs) -> usize {
        const OPEN: usize = 8;
        let of = |point: &Loop| match point {
            Loop::Closed { concurrency } => *concurrency,
            Loop::Open { .. } | Loop::Trace { .. } => OPEN,
        };
        args.target.parallel.unwrap_or_else(|| self.points.iter().map(of).max().unwrap_or(1))
    }
}

fn own_model(args: &BenchServeArgs) -> ModelArgs {
    let target = &args.target;
    ModelArgs {
        model: target.model.clone(),
        threads: target.threads,
        kv_type: target.kv_type,
        cpu: target.cpu,
        fetch: args.fetch.clone(),
        aliases: args.aliases.clone(),
        ..ModelArgs::default()
    }
}

fn workload(args: &BenchServeArgs, plan: &Plan, api: Api) -> Workload {
    let load = &args.workload;
    Workload {
        api,
        model: String::new(),
        prompt_tokens: plan.prompt_tokens,
        output_tokens: plan.output_tokens,
        turns: load.turns,
        turn_tokens: load.turn,
        think: load.think_time.map_or(Duration::ZERO, |span| span.0),
        ignore_eos: load.ignore_eos || args.target.own,
        ruler: Default::default(),
        seed: load.seed,
    }
}

fn api_key(args: &BenchServeArgs) -> Result<Option<String>, CommandError> {
    let key = match &args.target.api_key_file {
        Some(path) => Some(read_file(path)?),
        None => std::env::var("OPENAI_API_KEY").ok(),
    };
    Ok(key.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty()))
}

/// All points, and their common parts.
struct LoadSweep<'a> {
    args: &'a BenchServeArgs,
    plan: &'a Plan,
    client: Arc<LoadClient>,
    work: Arc<Workload>,
    graceful: &'a Graceful,
    terminal: &'a Terminal,
}

impl LoadSweep<'_> {
    /// Measures all points. Returns the signal that ended it early, if any.
    fn measure(&self, runtime: &Runtime, document: &mut Document) -> Result<Option<u8>, CommandError> {
        let root = Path::new("/");
        let before = Counters::read(root);
        let mut signal = None;
        for &kind in &self.plan.points {
            signal = self.point(kind, runtime, document)?;
            if signal.is_some() {
                break;
            }
        }
        let after = Counters::read(root);
        document.machine.load = before.zip(after).map(|(before, after)| before.until(&after));
        Ok(signal)
    }

    fn point(
        &self,
        kind: Loop,
        runtime: &Runtime,
        document: &mut Document,
    ) -> Result<Option<u8>, CommandError> {
        let load = &self.args.load;
        let bounds = Bounds { requests: load.requests, duration: load.duration.map(|span| span.0) };
        let bar = self.progress(kind, bounds);
        // Use new prompts, because those of an earlier point may be in the server's cache.
        let nth = document.points.len() as u64 + 1;
        let seed = self.work.seed ^ nth.wrapping_mul(0xa076_1d64_78bd_642f);
        let work = Arc::new(Workload { seed, ..(*self.work).clone() });
        let interrupted = || self.graceful.received();
        let watch = |done: usize| bar.set_position(done as u64);
        let driven = runtime.block_on(drive(
            &self.client,
            &work,
            kind,
            &self.plan.trace,
            bounds,
            &interrupted,
            &watch,
        ));
        bar.finish_and_clear();
        if let Some(server) = &mut document.server {
            server.counts_tokens &= !driven.uncounted;
        }
        if driven.signal.is_none() || !driven.turns.is_empty() {
            document.points.push(Point::new(kind, driven.turns, driven.seconds, self.args.workload.slo));
        }
        if let Some(path) = &self.args.output.save {
            document.save(path)?;
        }
        Ok(driven.signal)
    }

    fn progress(&self, kind: Loop, bounds: Bounds) -> ProgressBar {
        let length = if matches!(kind, Loop::Trace { .. }) { self.plan.trace.len() } else { bounds.requests };
        self.terminal
            .bar(length as u64, "{msg} {bar:30} {pos}/{len} requests {elapsed}")
            .with_message(kind.name())
    }
}
