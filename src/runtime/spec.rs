//! What an engine is asked to serve (`EngineConfig`) and what it serves in fact (`EngineSpec`): plain data that every
//! front door may read before it submits.
//!
//! Invariant: a spec has been checked against its model, so that one sequence of the full context always fits.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::grammar::GrammarCompiler;
use super::model::{ModelSpec, STEP_TOKENS};
use super::text::Tokenizer;

/// What the engine is asked to serve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The most tokens a sequence may hold; at most what the model was made for.
    pub context_length: usize,
    /// The most rows of a step: one per running sequence, the rest for prompts. A prompt is computed in chunks of at
    /// most this many tokens. Twice `max_running` and more keeps everybody going in every step; below, they take turns.
    pub step_tokens: usize,
    /// The most requests that run at once; more wait.
    pub max_running: usize,
    /// The most requests in flight beyond `max_running`: they wait, and more are refused.
    pub max_waiting: usize,
    /// The most sessions that exist at once, named and driven by hand together.
    pub max_sessions: usize,
    /// How long a named session keeps its pages while nobody uses it; nothing: until others need them.
    pub session_ttl: Option<Duration>,
    /// Bytes that the KV of all sequences may take together; without it, as much as `max_sessions` or `max_running` full
    /// contexts take, whichever is more.
    pub kv_memory: Option<usize>,
    /// Ids that end a generation: the model's own and its turn terminators.
    pub end_of_generation: Vec<u32>,
    /// Whether requests keep what of their prompt is computed already. Changes no answer, only the work.
    pub warm_resume: bool,
    /// Most tokens of an answer whose request names no limit; it ends sooner when it goes round in circles. For a model whose
    /// answers are short, so that one that never ends is wrong. Nothing: to the end of the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_tokens: Option<usize>,
}

impl EngineConfig {
    /// One sequence of `context_length` tokens at a time, prompts in chunks of [`STEP_TOKENS`].
    pub fn new(context_length: usize, end_of_generation: Vec<u32>) -> Self {
        Self {
            context_length,
            step_tokens: STEP_TOKENS,
            max_running: 1,
            max_waiting: 64,
            max_sessions: 1,
            session_ttl: None,
            kv_memory: None,
            end_of_generation,
            warm_resume: true,
            answer_tokens: None,
        }
    }
}

/// What the engine serves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineSpec {
    pub model: ModelSpec,
    pub config: EngineConfig,
    /// Bytes of KV in force.
    pub kv_memory: usize,
}

/// How many sessions fit with their KV in memory, and what one costs. The authority for those driven by hand, which keep their
/// memory; named ones may be more, and then those used longest ago give theirs away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServingCapacity {
    pub sessions: usize,
    /// KV bytes of a session that fills its context.
    pub bytes_per_session: usize,
}

impl EngineSpec {
    /// # Errors
    /// [`Error::InvalidParameter`] when the model cannot serve what is asked, naming the field.
    pub fn new(model: ModelSpec, mut config: EngineConfig) -> Result<Self> {
        let refuse = |name, message: String| Err(Error::InvalidParameter { name, message });
        if config.context_length < 2 || config.context_length > model.context_length {
            let message = format!("{} is not in [2, {}]", config.context_length, model.context_length);
            return refuse("context_length", message);
        }
        if config.step_tokens == 0 {
            return refuse("step_tokens", "must be at least 1".to_owned());
        }
        if config.max_running == 0 {
            return refuse("max_running", "must be at least 1".to_owned());
        }
        let per_context = sequence_bytes(&model, &config, config.context_length);
        let kv_memory = config
            .kv_memory
            .unwrap_or(per_context.saturating_mul(config.max_sessions.max(config.max_running)));
        if kv_memory < per_context {
            let message = format!(
                "{kv_memory} bytes cannot hold a context of {} tokens, which takes {per_context}",
                config.context_length
            );
            return refuse("kv_memory", message);
        }
        config.end_of_generation.sort_unstable();
        config.end_of_generation.dedup();
        Ok(Self { model, config, kv_memory })
    }

    pub fn vocab_size(&self) -> usize {
        self.model.vocab_size
    }

    pub fn context_length(&self) -> usize {
        self.config.context_length
    }

    pub fn ends_generation(&self, id: u32) -> bool {
        self.config.end_of_generation.binary_search(&id).is_ok()
    }

    /// Makes grammars for this model's answers, from its own tokenizer.
    pub fn grammar_compiler(&self, tokenizer: Arc<Tokenizer>) -> GrammarCompiler {
        GrammarCompiler::new(tokenizer, self.vocab_size(), &self.config.end_of_generation)
    }

    /// Bytes of KV that a sequence of up to `len` tokens takes at most.
    pub fn sequence_bytes(&self, len: usize) -> usize {
        sequence_bytes(&self.model, &self.config, len)
    }

    pub fn serving_capacity(&self) -> ServingCapacity {
        let bytes_per_session = self.sequence_bytes(self.context_length());
        let fitting = self.kv_memory.checked_div(bytes_per_session).unwrap_or(usize::MAX);
        ServingCapacity { sessions: self.config.max_sessions.min(fitting), bytes_per_session }
    }
}

fn sequence_bytes(model: &ModelSpec, config: &EngineConfig, len: usize) -> usize {
    model.groups.iter().map(|group| group.bytes(len, config.step_tokens)).sum()
}
