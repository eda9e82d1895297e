//! The JSON document of a run, which `bench compare`, plots and other tools read.
//!
//! Plain data. Every measured value is kept in order, so that readers can judge for themselves; summaries
//! computed from them stand beside them. Names follow llama-bench where it has one (`n_prompt`,
//! `samples_ts`).

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::{Case, Unit};
use super::point::Point;
use super::stats;
use crate::error::BenchError;
use llmctl_base::private_files::replace_file;
use llmctl_engine::DraftModelUsage;

/// Changes when a reader of the old form would misread the new one.
pub const SCHEMA: &str = "llmctl.bench.v1";

/// A run, complete or in progress.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Document {
    pub schema: String,
    pub build: Build,
    /// The arguments without the program's name.
    pub command: Vec<String>,
    /// Seconds since 1970.
    pub started: u64,
    /// True if every requested test was measured.
    pub complete: bool,
    pub machine: HostFacts,
    pub models: Vec<BenchModel>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerFacts>,
    /// Results of engines.
    pub cases: Vec<CaseResult>,
    /// Results of servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
    /// Reasons to doubt the results.
    pub warnings: Vec<String>,
}

/// The llmctl that measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    pub version: String,
    /// The git commit, if the build recorded it.
    pub commit: Option<String>,
    pub profile: String,
    pub target: String,
}

/// The machine that was measured on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    pub cpu: Option<String>,
    /// Processors of the machine.
    pub processors: Option<usize>,
    /// The cgroup's quota in CPUs.
    pub quota: Option<f64>,
    /// Instruction-set extensions of the processor.
    pub features: Vec<String>,
    pub memory_bytes: Option<u64>,
    /// Limits for each number of threads, before and after.
    pub probes: Vec<Probe>,
    /// Most resident bytes of the process.
    pub peak_memory: Option<u64>,
    pub load: Option<Load>,
}

/// Limits of the machine at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    pub threads: usize,
    pub read_gb_s: f64,
    pub int8_gop_s: Option<f64>,
    pub f32_gop_s: Option<f64>,
}

/// Other load during the run, as shares of all processor time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Taken by the hypervisor.
    pub steal: f64,
    /// Used by other processes.
    pub others: f64,
    /// Seconds that the cgroup's quota held the process back.
    pub throttled_s: f64,
    /// Number of slowdowns of a core because of heat.
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
    /// Equal only for models with the same results, bit by bit.
    pub fingerprint: Option<String>,
    pub context: Option<usize>,
    pub kv_bytes_per_token: Option<u64>,
    /// Matrix kernels in use, e.g. `avx512-vnni`.
    pub kernels: Option<String>,
    /// Name of the model that drafts for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model: Option<String>,
    /// Seconds, one value per load.
    pub load_s: Vec<f64>,
    /// Cost of a token; `None` if unknown, e.g. for a mixture of experts.
    pub cost: Option<TokenCost>,
}

/// A server that was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFacts {
    pub endpoint: String,
    pub model: String,
    /// Its `Server` header.
    pub software: Option<String>,
    /// True if the server reports numbers of tokens.
    pub counts_tokens: bool,
}

/// Cost of a token in the units of the machine's limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCost {
    /// Multiplications and additions with weights for each prompt row, without the output matrix.
    pub operations: u64,
    /// Additional operations for a row that is sampled from.
    pub head_operations: u64,
    /// Bytes of weights that a step reads, independent of its rows.
    pub weight_bytes: u64,
    /// Bytes of KV that a row reads for each token before it.
    pub kv_bytes: u64,
    /// True if products use 8-bit integers.
    pub is_integer: bool,
}

/// Settings that may differ between the engines of one run.
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
    /// Value in the case's unit.
    pub value: f64,
    /// Seconds from the start of the run.
    pub at_s: f64,
    pub first_token_ms: Option<f64>,
    /// Prompt tokens of all sequences that were reused.
    pub cached_tokens: usize,
    /// Reused tokens that came from disk.
    pub restored_tokens: usize,
    /// Tokens that were computed before they were sampled.
    #[serde(default)]
    pub drafted_tokens: usize,
    /// Those of them that were sampled then.
    #[serde(default)]
    pub accepted_tokens: usize,
    /// Those of a draft model among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model: Option<DraftModelUsage>,
    /// Bytes of KV in use while all sequences were open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes: Option<u64>,
    /// Time for forking all sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_ms: Option<f64>,
    /// Time for starting the engine, if each repetition has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
    /// Milliseconds from one token of a sequence to the next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub token_ms: Vec<f64>,
}

/// Summary of the samples' values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleSummary {
    pub mean: f64,
    pub stddev: f64,
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// The limit that a rate reaches first, if known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RateLimit {
    /// `memory` or `arithmetic`.
    pub by: String,
    /// The rate at the limit.
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

    /// Returns the standard deviation as a share of the mean.
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

    /// Returns the median time to the first token; `None` without one.
    pub fn first_token_ms(&self) -> Option<f64> {
        let times: Vec<f64> = self.samples.iter().filter_map(|sample| sample.first_token_ms).collect();
        (!times.is_empty()).then(|| stats::median(&times))
    }
}

impl Document {
    /// Reads a result file.
    ///
    /// # Errors
    /// [`BenchError::Read`], or [`BenchError::Damaged`] if it is something else.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let name = || path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| BenchError::Read { path: name(), error })?;
        let damaged = |message: String| BenchError::Damaged(format!("{}: {message}", path.display()));
        let value: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| damaged(format!("not a result of `llmctl bench` (not JSON: {error})")))?;
        match value["schema"].as_str() {
            Some(SCHEMA) => serde_json::from_value(value).map_err(|error| damaged(error.to_string())),
            Some(other) => Err(damaged(format!("its schema is {other:?}, not {SCHEMA:?}"))),
            None => Err(damaged("not a result of `llmctl bench` (it has no \"schema\")".to_owned())),
        }
    }

    /// Returns the text of a result file.
    pub fn text(&self) -> String {
        let text = serde_json::to_string_pretty(self);
        text.expect("names are strings and numbers are finite or null") + "\n"
    }

    /// Replaces the file atomically, so that a killed run leaves its last state.
    ///
    /// # Errors
    /// [`BenchError::Write`].
    pub fn save(&self, path: &Path) -> Result<(), BenchError> {
        let written = replace_file(path, self.text().as_bytes());
        written.map_err(|error| BenchError::Write { place: path.display().to_string(), error })
    }
}
