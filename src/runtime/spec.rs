//! Requested limits of an engine (`EngineConfig`) and those in force (`EngineSpec`): plain data that every
//! frontend may read before it submits.
//!
//! Invariant: a spec was checked against its model, so one sequence of the full context always fits.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::grammar::GrammarCompiler;
use llmctl_base::error::{Error, Result};
use llmctl_image::ImageLimits;
use llmctl_models::images::{TwoWay, VisionSpec};
use llmctl_models::model::{ModelSpec, STEP_TOKENS};
use llmctl_models::text::Tokenizer;

/// Requested limits of an engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// Most tokens of a sequence; at most the model's context.
    pub context_length: usize,
    /// Most rows of a step: one per running sequence, the rest for prompts, which are computed in chunks of
    /// at most this many tokens. At least twice `max_running` lets every sequence advance in every step; with
    /// less, they alternate.
    pub step_tokens: usize,
    /// Most requests that run at once; others wait.
    pub max_running: usize,
    /// Most waiting requests; others are refused.
    pub max_waiting: usize,
    /// Most sessions, named and step-wise together.
    pub max_sessions: usize,
    /// Time after which an idle named session loses its pages; `None` keeps them until they are needed.
    pub session_ttl: Option<Duration>,
    /// Bytes of KV of all sequences. `None` is enough for `max_sessions` or `max_running` full contexts,
    /// whichever is more.
    pub kv_memory: Option<usize>,
    /// Ids that end a generation: the model's own and its turn terminators.
    pub end_of_generation: Vec<u32>,
    /// True if requests reuse computed prefixes. Changes no answer.
    pub warm_resume: bool,
    /// Most tokens of an answer without a limit of its own; the answer also ends when it repeats itself. For
    /// models with short answers, where an endless one is an error. `None` allows the whole context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_tokens: Option<usize>,
    #[serde(default)]
    pub speculation: Speculation,
    /// Names what decides the bits of results beside the model's files, for receipts; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub build: String,
}

/// Speculative decoding: source of the draft tokens, which are verified several in a step. Changes no answer,
/// only its speed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speculation {
    #[default]
    Off,
    /// From every source, as far as it pays by the times measured.
    Auto,
    /// As `Auto`, from the text alone: what followed the latest tokens when they occurred before.
    Ngram,
    /// As `Auto`, from the draft model alone.
    Draft,
    /// As `Auto`, from the model's own block that predicts further tokens alone.
    Mtp,
    /// From every source, so many tokens whenever there are, whatever they cost.
    Always(usize),
}

impl EngineConfig {
    /// Returns a configuration for one sequence of `context_length` tokens at a time, with prompts in chunks
    /// of [`STEP_TOKENS`].
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
            speculation: Speculation::Off,
            build: String::new(),
        }
    }
}

/// Configuration in force for a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineSpec {
    pub model: ModelSpec,
    pub config: EngineConfig,
    /// Bytes of KV in force.
    pub kv_memory: usize,
    /// The vision tower; `None` if the model reads text alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vision: Option<Arc<VisionSpec>>,
}

/// Sessions whose KV fits in memory, and the bytes of one. A hard limit for step-wise sessions, which keep
/// their memory. There may be more named sessions: the least recently used lose theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServingCapacity {
    pub sessions: usize,
    /// Bytes of KV of a session with a full context.
    pub bytes_per_session: usize,
}

impl EngineSpec {
    /// Checks `config` against the model.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`], naming the field that the model cannot serve.
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
        Ok(Self { model, config, kv_memory, vision: None })
    }

    /// Adds a vision tower. Memory that was not asked for grows by what an image takes that is computed in one step.
    pub(super) fn set_vision(&mut self, vision: &VisionSpec) {
        self.vision = Some(Arc::new(vision.clone()));
        let side = ImageLimits::default().side;
        let plan = vision.pixels.plan(side, side).map(|plan| plan.num_tokens());
        let len = self.context_length();
        let more = self.request_bytes(len, plan.unwrap_or(0)) - self.sequence_bytes(len);
        if self.config.kv_memory.is_none() && self.has_whole_images() {
            let num_sequences = self.config.max_sessions.max(self.config.max_running);
            self.kv_memory = self.kv_memory.saturating_add(more.saturating_mul(num_sequences));
        }
    }

    /// Returns whether the rows of an image see each other in both directions, so that a step computes all or none of them.
    pub fn has_whole_images(&self) -> bool {
        self.vision.as_ref().is_some_and(|vision| vision.rows.two_way != TwoWay::Never)
    }

    /// Returns the token that stands for an image's row.
    pub fn placeholder(&self) -> Option<u32> {
        self.vision.as_ref().map(|vision| vision.placeholder)
    }

    pub fn vocab_size(&self) -> usize {
        self.model.vocab_size
    }

    pub fn context_length(&self) -> usize {
        self.config.context_length
    }

    /// Returns the speculation in force: off if the model cannot drop rows.
    pub fn speculation(&self) -> Speculation {
        if self.model.can_rewind { self.config.speculation } else { Speculation::Off }
    }

    /// Returns the limits of a model that drafts for this one: memory for as many contexts as this one's own memory holds,
    /// one at least.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if it cannot drop rows; otherwise those of [`Self::new`].
    pub fn for_draft_model(&self, model: &ModelSpec) -> Result<Self> {
        if !model.can_rewind {
            return Err(Error::NotSupported("a draft model that cannot drop rows"));
        }
        let context_length = self.context_length().min(model.context_length);
        let config = EngineConfig {
            step_tokens: self.config.step_tokens,
            max_running: self.config.max_running,
            ..EngineConfig::new(context_length, Vec::new())
        };
        let most = Self::new(model.clone(), config.clone())?;
        let one = most.sequence_bytes(context_length);
        let num_contexts = self.kv_memory as f64 / self.sequence_bytes(self.context_length()).max(1) as f64;
        let kv_memory = most.kv_memory.min((one as f64 * num_contexts) as usize).max(one);
        Self::new(model.clone(), EngineConfig { kv_memory: Some(kv_memory), ..config })
    }

    pub fn ends_generation(&self, id: u32) -> bool {
        self.config.end_of_generation.binary_search(&id).is_ok()
    }

    /// Returns a compiler of grammars for this model's vocabulary.
    pub fn grammar_compiler(&self, tokenizer: Arc<Tokenizer>) -> GrammarCompiler {
        GrammarCompiler::new(tokenizer, self.vocab_size(), &self.config.end_of_generation)
    }

    /// Returns the most bytes of KV that a sequence of `len` tokens takes.
    pub fn sequence_bytes(&self, len: usize) -> usize {
        sequence_bytes(&self.model, &self.config, len)
    }

    /// Returns the most bytes of KV that a request of `len` tokens takes whose longest image has `image_rows` rows, which a step
    /// may compute beyond its other ones.
    pub fn request_bytes(&self, len: usize, image_rows: usize) -> usize {
        let step_rows = self.config.step_tokens + image_rows;
        self.model.groups.iter().map(|group| group.bytes(len, step_rows)).sum()
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

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_models::kv::{KvGroup, KvKind};

    #[test]
    fn a_model_that_cannot_drop_rows_drafts_nothing() {
        let in_force = |kind, can_rewind| {
            let groups = vec![KvGroup { kind, page_bytes: 1 }];
            let architecture = "toy".to_owned();
            let adapters = Vec::new();
            let model =
                ModelSpec { architecture, vocab_size: 9, context_length: 99, groups, can_rewind, adapters };
            let config = EngineConfig { speculation: Speculation::Auto, ..EngineConfig::new(99, Vec::new()) };
            EngineSpec::new(model, config).expect("valid").speculation()
        };
        assert_eq!(in_force(KvKind::Recurrent, true), Speculation::Auto);
        assert_eq!(in_force(KvKind::Full, false), Speculation::Off);
        assert_eq!(in_force(KvKind::SlidingWindow(4), true), Speculation::Auto);
    }
}
