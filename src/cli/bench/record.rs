//! What a run leaves behind: one JSON document that `bench compare`, plots and other tools read.
//!
//! Plain data. Every measured value is kept, in the order of measurement, so that whoever reads it can judge for himself; summaries
//! are computed from them and written beside them. Names follow llama-bench where it has one (`n_prompt`, `samples_ts`).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::{Case, Unit};
use super::point::Point;
use super::stats;
use crate::cli::error::{CommandError, Kind};

/// Changes when a reader of the old form would misread the new one.
pub const SCHEMA: &str = "llmctl.bench.v1";

/// A whole run, or as much of it as is done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    pub schema: String,
    pub build: Build,
    /// The arguments, without the program's name.
    pub command: Vec<String>,
    /// Seconds since 1970.
    pub started: u64,
    /// Whether all that was asked for was measured.
    pub complete: bool,
    pub machine: HostFacts,
    pub models: Vec<BenchModel>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerFacts>,
    /// What an engine did.
    pub cases: Vec<CaseResult>,
    /// What a server did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
    /// Why not to believe all of it.
    pub warnings: Vec<String>,
}

/// Which llmctl measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    pub version: String,
    /// The git commit, where the build recorded it.
    pub commit: Option<String>,
    pub profile: String,
    pub target: String,
}

/// Where it was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    pub cpu: Option<String>,
    /// Processors of the machine.
    pub processors: Option<usize>,
    /// What the cgroup allows, in CPUs.
    pub quota: Option<f64>,
    /// Instruction-set extensions that there are.
    pub features: Vec<String>,
    pub memory_bytes: Option<u64>,
    /// The limits with each number of threads, before and after.
    pub probes: Vec<Probe>,
    /// Most memory that the process had resident, in bytes.
    pub peak_memory: Option<u64>,
    pub load: Option<Load>,
}

/// Limits of the machine at some moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    pub threads: usize,
    pub read_gb_s: f64,
    pub int8_gop_s: Option<f64>,
    pub f32_gop_s: Option<f64>,
}

/// Who else used the machine while it was measured; shares of all its processor time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Taken by the hypervisor.
    pub steal: f64,
    /// Used by other processes.
    pub others: f64,
    /// Seconds that the cgroup's quota held this process's group back.
    pub throttled_s: f64,
    /// Times that a core slowed down for heat.
    pub hot: u64,
}

/// A model as it was loaded.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BenchModel {
    pub setting: BenchSetting,
    /// Family, e.g. `qwen3`.
    pub architecture: Option<String>,
    pub parameters: Option<u64>,
    pub bytes: Option<u64>,
    pub quantization: Option<String>,
    /// Equal only for models that give the same bits.
    pub fingerprint: Option<String>,
    pub context: Option<usize>,
    pub kv_bytes_per_token: Option<u64>,
    /// Which kernels multiply, e.g. `avx512-vnni`.
    pub kernels: Option<String>,
    /// Seconds, one value for each time it was loaded.
    pub load_s: Vec<f64>,
    /// What a token costs; nothing where that is not known, e.g. for a mixture of experts.
    pub cost: Option<TokenCost>,
}

/// A server that was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFacts {
    pub endpoint: String,
    pub model: String,
    /// What it calls itself in its `Server` header.
    pub software: Option<String>,
    /// Whether it says how many tokens there were.
    pub counts_tokens: bool,
}

/// What a token costs, in the units of the machine's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCost {
    /// Multiplications and additions with weights for each row of a prompt, the output matrix not counted.
    pub operations: u64,
    /// Those for a row that is sampled from, beyond that.
    pub head_operations: u64,
    /// Bytes of weights that a step reads, however many rows it has.
    pub weight_bytes: u64,
    /// Bytes of KV that a row reads for each token before it.
    pub kv_bytes: u64,
    /// Whether products are computed with 8-bit integers.
    pub is_integer: bool,
}

/// What may differ between the engines of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenchSetting {
    pub model: String,
    pub threads: usize,
    pub threads_batch: usize,
    pub kv_type: String,
    pub quantize: Option<String>,
    /// Instruction set of the kernels.
    pub cpu: String,
    pub step_tokens: usize,
}

/// One case, measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    pub test: String,
    pub case: Case,
    pub setting: BenchSetting,
    pub n_prompt: usize,
    pub n_gen: usize,
    pub n_depth: usize,
    pub n_sequences: usize,
    pub unit: Unit,
    pub summary: SampleSummary,
    pub limit: Option<RateLimit>,
    pub samples: Vec<Sample>,
}

/// One repetition.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// In the case's unit.
    pub value: f64,
    /// Seconds from the start of the run.
    pub at_s: f64,
    pub first_token_ms: Option<f64>,
    /// Prompt tokens of all sequences that were not computed.
    pub cached_tokens: usize,
    /// Those of them that came from disk.
    pub restored_tokens: usize,
    /// Bytes of KV in use while all sequences were there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes: Option<u64>,
    /// What it took to fork all sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_ms: Option<f64>,
    /// What it took to start the engine, where each repetition has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
    /// Milliseconds from one token of a sequence to the next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub token_ms: Vec<f64>,
}

/// Of the samples' values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleSummary {
    pub mean: f64,
    pub stddev: f64,
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// The limit that a rate runs into first, as far as is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RateLimit {
    /// `memory` or `arithmetic`.
    pub by: String,
    /// The rate there.
    pub rate: f64,
    /// The median as a share of it.
    pub share: f64,
}

impl SampleSummary {
    pub fn of(values: &[f64]) -> Self {
        Self {
            mean: stats::mean(values),
            stddev: stats::stddev(values),
            median: stats::median(values),
            min: stats::quantile(values, 0.0),
            max: stats::quantile(values, 1.0),
        }
    }

    /// The standard deviation as a share of the mean.
    pub fn spread(&self) -> f64 {
        if self.mean == 0.0 { 0.0 } else { self.stddev / self.mean }
    }
}

impl CaseResult {
    pub fn new(case: &Case, setting: &BenchSetting) -> Self {
        let (n_prompt, n_gen) = case.tokens();
        Self {
            test: case.name(),
            case: *case,
            setting: setting.clone(),
            n_prompt,
            n_gen,
            n_depth: case.depth,
            n_sequences: case.sequences,
            unit: case.unit(),
            summary: SampleSummary::default(),
            limit: None,
            samples: Vec::new(),
        }
    }

    pub fn values(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.value).collect()
    }

    pub fn push(&mut self, sample: Sample) {
        self.samples.push(sample);
        self.summary = SampleSummary::of(&self.values());
    }

    /// The median time to the first token, where there is one.
    pub fn first_token_ms(&self) -> Option<f64> {
        let times: Vec<f64> = self.samples.iter().filter_map(|sample| sample.first_token_ms).collect();
        (!times.is_empty()).then(|| stats::median(&times))
    }
}

impl Document {
    /// Reads a result file.
    ///
    /// # Errors
    /// [`Kind::NotFound`] when it is not there, [`Kind::BadData`] when it is something else.
    pub fn read(path: &Path) -> Result<Self, CommandError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let kind = match error.kind() {
                std::io::ErrorKind::NotFound => Kind::NotFound,
                std::io::ErrorKind::InvalidData => Kind::BadData,
                _ => Kind::Io,
            };
            CommandError::new(kind, error).context(path.display().to_string())
        })?;
        let damaged = |message: String| CommandError::bad_data(format!("{}: {message}", path.display()));
        let value: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| damaged(format!("not a result of `llmctl bench` (not JSON: {error})")))?;
        match value["schema"].as_str() {
            Some(SCHEMA) => serde_json::from_value(value).map_err(|error| damaged(error.to_string())),
            Some(other) => Err(damaged(format!("its schema is {other:?}, not {SCHEMA:?}"))),
            None => Err(damaged("not a result of `llmctl bench` (it has no \"schema\")".to_owned())),
        }
    }

    /// Writes the file whole or not at all: a run that is killed leaves the last state.
    ///
    /// # Errors
    /// [`Kind::Io`].
    pub fn save(&self, path: &Path) -> Result<(), CommandError> {
        let text = serde_json::to_string_pretty(self).map_err(|error| CommandError::new(Kind::Bug, error))?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let draft = path.with_file_name(name);
        let written = std::fs::write(&draft, text + "\n").and_then(|()| std::fs::rename(&draft, path));
        written.map_err(|error| CommandError::new(Kind::Io, error).context(path.display().to_string()))
    }
}

/// This program.
pub fn build() -> Build {
    Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        // Set by the release recipe; a plain `cargo build` does not know it.
        commit: option_env!("LLMCTL_COMMIT").map(str::to_owned),
        profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
    }
}
