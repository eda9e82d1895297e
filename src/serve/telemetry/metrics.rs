//! Metrics of `/metrics`: our own names, and those of vLLM that routers and dashboards read.
//!
//! Only counts; says nothing about prompts, answers or who asked. vLLM's names, types and meanings are those
//! of its `docs/design/metrics.md` and "Production Metrics" pages; the older names that some routers still
//! read are kept beside the new ones.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::prefix::PrefixBreak;
use crate::engines::EngineStatus;
use crate::engines::engine::Health;
use llmctl_engine::{DraftModelUsage, EngineLoad, EngineSpec, Finish, Outcome, Started};
use llmctl_models::kv::{KvKind, PAGE_TOKENS};

/// Content type of [`MetricsFormat::Text`].
const TEXT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// vLLM's buckets reach from a millisecond to hours; ours are fewer, in the same range.
const LATENCY_BUCKETS: [f64; 15] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0];
const TOKEN_BUCKETS: [f64; 13] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.0, 5.0];

/// One finished turn, for the log and the metrics.
#[derive(Debug, Clone)]
pub struct FinishedTurn {
    /// The id of the model.
    pub model: String,
    /// The `x-request-id` of the request.
    pub request_id: String,
    pub session: Option<String>,
    /// Index of the engine that answered.
    pub engine: usize,
    pub started: Option<Started>,
    pub outcome: Outcome,
    /// Times between tokens, in order; one fewer than tokens.
    pub inter_token: Vec<Duration>,
}

/// The KV of each engine, in blocks of the same number of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvBlocks {
    pub block_tokens: usize,
    pub blocks_per_engine: usize,
}

impl KvBlocks {
    /// Counts the pages of full attention that fit, if all memory of KV were theirs; of all layers where none has it. None
    /// where a remote engine keeps them.
    pub fn of(spec: &EngineSpec) -> Self {
        let bytes = |is_counted: fn(KvKind) -> bool| -> usize {
            spec.model
                .groups
                .iter()
                .filter(|group| is_counted(group.kind))
                .map(|group| group.page_bytes)
                .sum()
        };
        let block_bytes = match bytes(|kind| kind == KvKind::Full) {
            0 => bytes(|_| true),
            full => full,
        };
        Self {
            block_tokens: PAGE_TOKENS,
            blocks_per_engine: spec.kv_memory.checked_div(block_bytes).unwrap_or(0),
        }
    }
}

/// Text format of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsFormat {
    /// Prometheus' own text format, which every reader knows.
    Text,
    /// For those who ask for it.
    OpenMetrics,
}

impl MetricsFormat {
    /// By an `Accept` header.
    pub fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            MetricsFormat::OpenMetrics
        } else {
            MetricsFormat::Text
        }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            MetricsFormat::Text => TEXT_TYPE,
            MetricsFormat::OpenMetrics => OPEN_METRICS_TYPE,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HttpLabels {
    pub method: String,
    /// The pattern, not the path: ids of sessions are no labels.
    pub route: String,
    pub status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Engines of a model are numbered from 0, as vLLM's are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    model_name: String,
    engine: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KvBlockLabels {
    model_name: String,
    engine: String,
    block_size: usize,
    /// vLLM's name, on processors too; the endpoint picker reads it with the size to bound its index of prefixes.
    num_gpu_blocks: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResumeLabels {
    model_name: String,
    engine: String,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    engine: String,
    finished_reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BreakLabels {
    client: String,
    cause: &'static str,
}

/// Prompts that did not repeat what they could have.
#[derive(Debug, Default)]
struct BreakMetrics {
    prompts: Family<BreakLabels, Counter>,
    tokens: Family<BreakLabels, Counter>,
}

type Level = Gauge<i64, AtomicI64>;
type Ratio = Gauge<f64, AtomicU64>;
type PerEngine<M> = Family<EngineLabels, M>;
type Times = Family<EngineLabels, Histogram, fn() -> Histogram>;

impl EngineLabels {
    fn new(model: &str, engine: usize) -> Self {
        Self { model_name: model.to_owned(), engine: engine.to_string() }
    }
}

/// The engines of a loaded model, for `/metrics`.
#[derive(Debug)]
pub struct ModelStatus {
    pub id: String,
    pub engines: Vec<EngineStatus>,
}

/// All that is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<ModelRegistry>,
    pub http: HttpMetrics,
    pub engine: EngineMetrics,
    turns: TurnMetrics,
    breaks: BreakMetrics,
    process: ProcessMetrics,
}

/// The registered metrics. Those of models are registered with the first model.
#[derive(Debug, Default)]
struct ModelRegistry {
    all: Registry,
    has_models: bool,
}

#[derive(Debug, Default)]
pub struct HttpMetrics {
    pub requests: Family<HttpLabels, Counter>,
    pub in_flight: Level,
    pub connections: Level,
    /// Connections that the server ended before the client did, by reason.
    closed: Family<ReasonLabels, Counter>,
    pub panics: Counter,
    pub log_lines_lost: Counter,
    /// Bodies that were not waited for, because too many of their clients' were slow.
    pub slow_bodies_refused: Counter,
}

impl HttpMetrics {
    pub fn closed(&self, reason: &'static str) {
        self.closed.get_or_create(&ReasonLabels { reason }).inc();
    }
}

/// The name or names of a metric, its description, and the function that reads it.
type MetricRow<N, S, V> = (N, &'static str, fn(&S) -> V);

/// Names, descriptions and values of what an engine has at a moment.
const LEVELS: [MetricRow<&str, EngineStatus, usize>; 10] = [
    ("llmctl_engine_up", "1 while the engine is there", |status| usize::from(status.health == Health::Up)),
    ("llmctl_sessions", "Sessions in the engine", |status| load_of(status).num_sessions),
    ("llmctl_kv_capacity_bytes", "Most that KV may take", |status| load_of(status).kv_capacity),
    ("llmctl_kv_allocated_bytes", "KV with memory behind it", |status| load_of(status).kv_allocated),
    ("llmctl_kv_held_bytes", "KV that requests and sessions hold", held),
    ("llmctl_warm_prompts", "Prompts computed ahead", |status| load_of(status).warm_prompts),
    ("llmctl_warm_bytes", "KV of prompts computed ahead, on disk", |status| load_of(status).warm_bytes),
    ("llmctl_warm_hits", "Requests that began with a prompt computed ahead", |status| {
        load_of(status).warm_hits
    }),
    ("vllm:num_requests_running", "Requests being computed", |status| load_of(status).num_running),
    ("vllm:num_requests_waiting", "Requests in the queue", |status| load_of(status).num_waiting),
];

/// Returns the load of an engine; one that is not there has none.
fn load_of(status: &EngineStatus) -> EngineLoad {
    status.load.unwrap_or_default()
}

fn held(status: &EngineStatus) -> usize {
    let load = load_of(status);
    load.kv_capacity.saturating_sub(load.kv_free)
}

#[derive(Debug, Default)]
pub struct EngineMetrics {
    pub ready: Level,
    restarts: Counter,
    /// Of engines that are gone with their model.
    past_restarts: AtomicU64,
    pub retries: Counter,
    /// Those of [`LEVELS`].
    levels: [PerEngine<Level>; LEVELS.len()],
    kv_usage: PerEngine<Ratio>,
    kv_blocks: Family<KvBlockLabels, Level>,
}

impl EngineMetrics {
    /// Forgets the levels of all engines: a model that has been unloaded has none.
    fn clear(&self) {
        self.levels.iter().for_each(Family::clear);
        self.kv_usage.clear();
    }

    fn set(&self, model: &str, engine: usize, status: &EngineStatus) {
        let labels = EngineLabels::new(model, engine);
        for (gauge, (_, _, value)) in self.levels.iter().zip(LEVELS) {
            gauge.get_or_create(&labels).set(i64::try_from(value(status)).unwrap_or(i64::MAX));
        }
        self.kv_usage
            .get_or_create(&labels)
            .set(held(status) as f64 / load_of(status).kv_capacity.max(1) as f64);
    }
}

/// Names, descriptions and values of what turns add up to.
const COUNTS: [MetricRow<&[&str], FinishedTurn, usize>; 8] = [
    (&["vllm:prefix_cache_queries", "vllm:prompt_tokens"], "Prompt tokens, reused ones included", |turn| {
        turn.outcome.usage.prompt_tokens
    }),
    (&["vllm:prefix_cache_hits"], "Prompt tokens that were reused", |turn| turn.outcome.usage.cached_tokens),
    (&["llmctl_restored_tokens"], "Prompt tokens whose KV was read from disk", |turn| {
        turn.started.as_ref().map_or(0, |started| started.reuse.restored_tokens)
    }),
    (&["vllm:generation_tokens"], "Generated tokens", |turn| turn.outcome.usage.completion_tokens),
    (&["vllm:spec_decode_num_draft_tokens"], "Tokens computed before they were sampled", |turn| {
        turn.outcome.usage.drafted_tokens
    }),
    (&["vllm:spec_decode_num_accepted_tokens"], "Those of them that were sampled then", |turn| {
        turn.outcome.usage.accepted_tokens
    }),
    (
        &["llmctl_computed_draft_tokens"],
        "Tokens drafted by a draft model, or the model's prediction block or assistant",
        |turn| by_model(turn).drafted_tokens,
    ),
    (
        &["llmctl_computed_accepted_tokens"],
        "Accepted ones of those drafted by a draft model, or the model's prediction block or assistant",
        |turn| by_model(turn).accepted_tokens,
    ),
];

/// Returns the drafts of a draft model or of the model's own block.
fn by_model(turn: &FinishedTurn) -> DraftModelUsage {
    turn.outcome.usage.draft_model.unwrap_or_default()
}

/// Names, descriptions and values of the times of turns; the first has the finer buckets of single tokens.
const TIMES: [MetricRow<&[&str], FinishedTurn, Vec<Duration>>; 6] = [
    (
        &["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
        "From one token to the next",
        |turn| turn.inter_token.clone(),
    ),
    (&["vllm:time_to_first_token_seconds"], "From submission to the first token", |turn| {
        Vec::from_iter(turn.outcome.timings.time_to_first_token)
    }),
    (&["vllm:e2e_request_latency_seconds"], "From submission to the last token", |turn| {
        vec![turn.outcome.timings.total]
    }),
    (&["vllm:request_queue_time_seconds"], "From submission to the start of work", |turn| {
        vec![turn.outcome.timings.queue]
    }),
    (&["vllm:request_prefill_time_seconds"], "Computing the prompt", |turn| {
        vec![turn.outcome.timings.prefill]
    }),
    (&["vllm:request_decode_time_seconds"], "From the first token to the last", |turn| {
        vec![turn.outcome.timings.decode]
    }),
];

#[derive(Debug)]
struct TurnMetrics {
    finished: Family<FinishLabels, Counter>,
    resumed: Family<ResumeLabels, Counter>,
    /// Those of [`COUNTS`] and [`TIMES`].
    counts: [PerEngine<Counter>; COUNTS.len()],
    times: [Times; TIMES.len()],
}

impl TurnMetrics {
    fn new() -> Self {
        let times = |index| match index {
            0 => Times::new_with_constructor(|| Histogram::new(TOKEN_BUCKETS)),
            _ => Times::new_with_constructor(|| Histogram::new(LATENCY_BUCKETS)),
        };
        let (finished, resumed, counts) = Default::default();
        Self { finished, resumed, counts, times: std::array::from_fn(times) }
    }

    /// Shows what there is of an engine before it has done anything, so that rates begin at 0.
    fn begin(&self, model: &str, engine: usize) {
        let labels = EngineLabels::new(model, engine);
        self.counts.iter().for_each(|count| drop(count.get_or_create(&labels)));
        self.times.iter().for_each(|times| drop(times.get_or_create(&labels)));
    }

    fn add(&self, turn: &FinishedTurn) {
        let labels = EngineLabels::new(&turn.model, turn.engine);
        let EngineLabels { model_name, engine } = labels.clone();
        let finished_reason = match turn.outcome.finish {
            Finish::Cancelled => "abort",
            ref finish => finish.reason(),
        };
        let finished =
            FinishLabels { model_name: model_name.clone(), engine: engine.clone(), finished_reason };
        self.finished.get_or_create(&finished).inc();
        if let Some(started) = &turn.started {
            let reason = started.reuse.reason.name();
            self.resumed.get_or_create(&ResumeLabels { model_name, engine, reason }).inc();
        }
        for (counter, (_, _, count)) in self.counts.iter().zip(COUNTS) {
            counter.get_or_create(&labels).inc_by(count(turn) as u64);
        }
        for (histogram, (_, _, times)) in self.times.iter().zip(TIMES) {
            let histogram = histogram.get_or_create(&labels);
            times(turn).iter().for_each(|time| histogram.observe(time.as_secs_f64()));
        }
    }
}

/// Standard names of Prometheus' client libraries.
#[derive(Debug, Default)]
struct ProcessMetrics {
    resident_bytes: Level,
    open_fds: Level,
}

impl ProcessMetrics {
    /// From /proc; where there is none, nothing is claimed.
    fn read(&self) {
        if let Some(bytes) = resident_bytes() {
            self.resident_bytes.set(bytes);
        }
        if let Ok(entries) = std::fs::read_dir("/proc/self/fd") {
            // The folder itself is open while it is read.
            self.open_fds.set(i64::try_from(entries.count()).unwrap_or(i64::MAX).saturating_sub(1));
        }
    }
}

/// `VmRSS` of /proc/self/status, in bytes; see proc_pid_status(5).
fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Mutex::default(),
            http: HttpMetrics::default(),
            engine: EngineMetrics::default(),
            turns: TurnMetrics::new(),
            breaks: BreakMetrics::default(),
            process: ProcessMetrics::default(),
        };
        metrics.register_server();
        metrics
    }
}

impl Metrics {
    pub fn turn(&self, record: &FinishedTurn) {
        self.turns.add(record);
    }

    pub fn prefix_break(&self, broken: &PrefixBreak) {
        let labels = BreakLabels { client: broken.client.clone(), cause: broken.cause.name() };
        self.breaks.prompts.get_or_create(&labels).inc();
        self.breaks.tokens.get_or_create(&labels).inc_by(broken.tokens as u64);
    }

    /// Begins to show what concerns this model, which so many engines compute.
    pub fn register_model(&self, id: &str, num_engines: usize, cache: KvBlocks) {
        let mut registry = self.registry.lock();
        if !std::mem::replace(&mut registry.has_models, true) {
            self.register_models(&mut registry.all);
        }
        let labels = |engine: usize| KvBlockLabels {
            model_name: id.to_owned(),
            engine: engine.to_string(),
            block_size: cache.block_tokens,
            num_gpu_blocks: cache.blocks_per_engine,
        };
        let known_engines = if cache.blocks_per_engine > 0 { num_engines } else { 0 };
        for engine in 0..known_engines {
            self.engine.kv_blocks.get_or_create(&labels(engine)).set(1);
        }
        (0..num_engines).for_each(|engine| self.turns.begin(id, engine));
    }

    /// Adds restarts of engines that are gone with their model.
    pub fn add_restarts(&self, num_restarts: u64) {
        self.engine.past_restarts.fetch_add(num_restarts, Ordering::Relaxed);
    }

    /// Returns the body of `/metrics`. `models` are the loaded ones.
    pub fn encode(&self, format: MetricsFormat, models: &[ModelStatus], is_ready: bool) -> String {
        let registry = self.registry.lock();
        let engine = &self.engine;
        engine.ready.set(i64::from(is_ready));
        let past = engine.past_restarts.load(Ordering::Relaxed);
        let engines = || models.iter().flat_map(|model| &model.engines);
        let num_restarts = past + engines().map(|status| status.num_restarts).sum::<u64>();
        engine.restarts.inc_by(num_restarts.saturating_sub(engine.restarts.get()));
        engine.clear();
        for ModelStatus { id, engines } in models {
            engines.iter().enumerate().for_each(|(index, status)| engine.set(id, index, status));
        }
        self.process.read();
        let mut out = String::new();
        text::encode(&mut out, &registry.all).expect("a string takes everything");
        match format {
            MetricsFormat::OpenMetrics => out,
            MetricsFormat::Text => to_text(&out),
        }
    }

    fn register_server(&self) {
        let mut registry = self.registry.lock();
        let r = &mut registry.all;
        let (http, process) = (&self.http, &self.process);
        let version = Info::new(vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
        r.register("llmctl_build", "Version of llmctl", version);
        r.register("llmctl_ready", "1 while requests are taken", self.engine.ready.clone());
        let restarts = self.engine.restarts.clone();
        r.register("llmctl_engine_restarts", "Times the engine was lost and brought back", restarts);
        let retries = self.engine.retries.clone();
        r.register("llmctl_engine_retries", "Requests begun again after their engine was lost", retries);
        r.register("llmctl_http_requests", "HTTP requests answered", http.requests.clone());
        r.register("llmctl_http_requests_in_flight", "HTTP requests being answered", http.in_flight.clone());
        r.register("llmctl_http_connections", "Open connections", http.connections.clone());
        let closed = http.closed.clone();
        r.register("llmctl_http_connections_closed", "Connections that the server ended", closed);
        r.register("llmctl_http_panics", "Requests that ended in a bug of the server", http.panics.clone());
        let refused = http.slow_bodies_refused.clone();
        r.register("llmctl_http_slow_bodies_refused", "Slow bodies beyond what a client may have", refused);
        let lost = http.log_lines_lost.clone();
        r.register("llmctl_access_log_lines_lost", "Lines that the access log could not take in time", lost);
        if cfg!(target_os = "linux") {
            r.register("process_resident_memory_bytes", "Resident memory", process.resident_bytes.clone());
            r.register("process_open_fds", "Open file descriptors", process.open_fds.clone());
        }
    }

    fn register_models(&self, r: &mut Registry) {
        let (engine, turns) = (&self.engine, &self.turns);
        for ((name, help, _), level) in LEVELS.iter().zip(&engine.levels) {
            r.register(*name, *help, level.clone());
        }
        for name in ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"] {
            r.register(name, "Part of the KV that is held, 0 to 1", engine.kv_usage.clone());
        }
        let blocks = engine.kv_blocks.clone();
        r.register("vllm:cache_config_info", "Blocks of KV, with their size in tokens", blocks);
        let resumed = turns.resumed.clone();
        r.register("llmctl_turns_started", "Turns by why as much of their prompt was reused", resumed);
        let BreakMetrics { prompts, tokens } = &self.breaks;
        r.register(
            "llmctl_prefix_breaks",
            "Prompts that changed what their client had sent before",
            prompts.clone(),
        );
        r.register("llmctl_prefix_break_tokens", "Prompt tokens computed again for that", tokens.clone());
        r.register("vllm:request_success", "Turns by how they ended", turns.finished.clone());
        for ((names, help, _), count) in COUNTS.iter().zip(&turns.counts) {
            names.iter().for_each(|name| r.register(*name, *help, count.clone()));
        }
        for ((names, help, _), times) in TIMES.iter().zip(&turns.times) {
            names.iter().for_each(|name| r.register(*name, *help, times.clone()));
        }
    }
}

/// OpenMetrics as Prometheus' older text format (version 0.0.4): there a counter is called in its comments what it is called
/// in its samples, an info is a gauge, and nothing marks the end.
fn to_text(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            let help = help.take().map_or("", |(_, text)| text);
            out.push_str(&format!("# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n"));
        } else {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_engine::{DraftModelUsage, EngineLoad, Timings, Usage};

    #[test]
    fn both_formats_name_a_metric_alike() {
        let metrics = Metrics::default();
        metrics.register_model("m \"1\"", 2, KvBlocks { block_tokens: 32, blocks_per_engine: 7 });
        let labels = HttpLabels { method: "GET".into(), route: "/health".into(), status: 200 };
        metrics.http.requests.get_or_create(&labels).inc();
        let load = EngineLoad { num_running: 3, kv_capacity: 8, kv_free: 6, ..EngineLoad::default() };
        let engines = vec![
            EngineStatus { health: Health::Up, num_restarts: 0, load: Some(load) },
            EngineStatus { health: Health::Down, num_restarts: 2, load: None },
        ];
        let models = [ModelStatus { id: "m \"1\"".to_owned(), engines }];
        let text = metrics.encode(MetricsFormat::Text, &models, true);
        for expected in [
            "# TYPE vllm:num_requests_running gauge\n",
            "vllm:num_requests_running{model_name=\"m \\\"1\\\"\",engine=\"0\"} 3\n",
            "vllm:num_requests_running{model_name=\"m \\\"1\\\"\",engine=\"1\"} 0\n",
            "vllm:kv_cache_usage_perc{model_name=\"m \\\"1\\\"\",engine=\"0\"} 0.25\n",
            "# TYPE vllm:cache_config_info gauge\n",
            "vllm:cache_config_info{model_name=\"m \\\"1\\\"\",engine=\"1\",block_size=\"32\",num_gpu_blocks=\"7\"} 1\n",
            "llmctl_engine_up{model_name=\"m \\\"1\\\"\",engine=\"0\"} 1\n",
            "llmctl_engine_up{model_name=\"m \\\"1\\\"\",engine=\"1\"} 0\n",
            "vllm:generation_tokens_total{model_name=\"m \\\"1\\\"\",engine=\"1\"} 0\n",
            "# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total{",
            "# TYPE llmctl_engine_restarts_total counter\nllmctl_engine_restarts_total 2\n",
            "# TYPE llmctl_build_info gauge\nllmctl_build_info{version=",
            "llmctl_http_requests_total{method=\"GET\",route=\"/health\",status=\"200\"} 1\n",
            "# TYPE vllm:time_to_first_token_seconds histogram\n",
            "le=\"+Inf\"",
        ] {
            assert!(text.contains(expected), "{expected} in\n{text}");
        }
        assert!(!text.contains("EOF"));
        let open = metrics.encode(MetricsFormat::OpenMetrics, &models, true);
        assert!(open.contains("# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{"), "{open}");
        assert!(open.ends_with("# EOF\n") && open.contains("llmctl_engine_restarts_total 2\n"));
        let samples = |text: &str| {
            let own = |line: &&str| !line.starts_with('#') && !line.starts_with("process_");
            text.lines().filter(own).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(samples(&text), samples(&open));
    }

    #[test]
    fn drafts_are_counted_under_vllms_names() {
        let metrics = Metrics::default();
        metrics.register_model("m", 1, KvBlocks::default());
        let by_model =
            DraftModelUsage { drafted_tokens: 5, accepted_tokens: 4, ..DraftModelUsage::default() };
        let usage =
            Usage { drafted_tokens: 9, accepted_tokens: 7, draft_model: Some(by_model), ..Usage::default() };
        let outcome = Outcome {
            finish: Finish::MaxTokens,
            usage,
            timings: Timings::default(),
            seed: 1,
            adapters: Vec::new(),
        };
        let request_id = "r".to_owned();
        let inter_token = Vec::new();
        metrics.turn(&FinishedTurn {
            model: "m".to_owned(),
            request_id,
            session: None,
            engine: 0,
            started: None,
            outcome,
            inter_token,
        });
        let text = metrics.encode(MetricsFormat::Text, &[], true);
        let labels = "{model_name=\"m\",engine=\"0\"}";
        for expected in [
            format!("vllm:spec_decode_num_draft_tokens_total{labels} 9\n"),
            format!("vllm:spec_decode_num_accepted_tokens_total{labels} 7\n"),
            format!("llmctl_computed_draft_tokens_total{labels} 5\n"),
            format!("llmctl_computed_accepted_tokens_total{labels} 4\n"),
        ] {
            assert!(text.contains(&expected), "{expected} in\n{text}");
        }
    }

    #[test]
    fn the_format_is_chosen_by_accept() {
        assert_eq!(MetricsFormat::accepted("*/*"), MetricsFormat::Text);
        assert_eq!(MetricsFormat::accepted(""), MetricsFormat::Text);
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
        assert_eq!(MetricsFormat::accepted(prometheus), MetricsFormat::OpenMetrics);
    }
}
