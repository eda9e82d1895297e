//! Receipts: all that decides an answer, so that it can be computed again and compared token by token.
//!
//! A [`AnswerRecipe`] is what a request says beside its prompt and its sampling, and what it was said to; turns that follow each other
//! usually share one. A [`Receipt`] adds the rest and the answer. Invariant: a receipt contains no time, path or name of a machine, so
//! equal answers to equal requests have equal hashes everywhere.

use serde::{Deserialize, Serialize};

use super::grammar::{Grammar, GrammarSource};
use super::request::{Finish, Limits, LoopGuard, Overflow, PromptImage, ReasoningLimit, Request};
use llmctl_base::error::{Error, Result};
use llmctl_base::{SamplerStep, Sampling, SamplingNumbers};
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;
use llmctl_models::load::fingerprint::sha256;

/// Schema of receipts.
pub const RECEIPT_SCHEMA: &str = "llmctl.receipt.v1";

/// What decides an answer beside its prompt and its sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerRecipe {
    /// Contents of the model's files, 64 hexadecimal digits.
    pub model: String,
    /// SHA-256 of the chat template in force, 64 hexadecimal digits.
    pub template: String,
    /// See [`EngineConfig::build`](super::spec::EngineConfig::build).
    pub build: String,
    /// Ids that end a generation.
    pub ends: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_ids: Vec<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_eos: bool,
    #[serde(default, skip_serializing_if = "LoopGuard::is_default")]
    pub loop_guard: LoopGuard,
    /// Special tokens that appear in the text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub markup: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<ReasoningLimit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grammar: Option<GrammarSource>,
}

impl AnswerRecipe {
    /// Returns whether the same model computes in the same way, so that an answer must come out as it was.
    pub fn is_same_model(&self, other: &Self) -> bool {
        let facts = |recipe: &Self| (recipe.model.clone(), recipe.build.clone(), recipe.ends.clone());
        facts(self) == facts(other)
    }
}

/// All that decides an answer, and the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    pub schema: String,
    /// Hash of the receipt of the turn before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,
    pub recipe: AnswerRecipe,
    /// LoRA adapters with which the rows were computed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterUse>,
    /// Rows of images in the prompt. Their keys name pixels, patches and the tower.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageSpan>,
    /// SHA-256 of the turn's messages as the session's file has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages_sha256: Option<String>,
    pub prompt_tokens: usize,
    /// See [`tokens_sha256`].
    pub prompt_sha256: String,
    pub sampling: SamplingRecord,
    /// Number of the answer's first tokens that the request gave.
    #[serde(default, skip_serializing_if = "llmctl_base::units::is_zero")]
    pub given: usize,
    /// Ids of the answer without the end-of-generation token.
    pub answer: Vec<u32>,
    pub finish: Finish,
}

impl Receipt {
    /// Returns the hash: SHA-256 of the receipt as JSON without spaces, its fields in the order of this type, in hexadecimal digits.
    pub fn hash(&self) -> String {
        sha256(&[serde_json::to_string(self).expect("strings, numbers and lists are always JSON").as_bytes()])
    }

    /// Checks what no type can say.
    ///
    /// # Errors
    /// The field that contradicts another one, in words.
    pub fn check(&self, prompt: &[u32]) -> std::result::Result<(), String> {
        let Self { schema, given, answer, prompt_tokens, prompt_sha256, .. } = self;
        if schema != RECEIPT_SCHEMA {
            return Err(format!("the schema {schema:?} is unknown"));
        }
        if *given > answer.len() {
            return Err(format!("{given} of {} tokens of the answer were given", answer.len()));
        }
        match (prompt.len(), tokens_sha256(prompt)) == (*prompt_tokens, prompt_sha256.clone()) {
            true => Ok(()),
            false => Err("the prompt's tokens are not those of the receipt".to_owned()),
        }
    }

    /// Returns whether the model, its grammar or a stop string ended the answer; a limit that says nothing of the tokens before it did
    /// otherwise.
    pub fn ended_by_itself(&self) -> bool {
        matches!(self.finish, Finish::Eos(_) | Finish::Complete | Finish::StopString(_))
    }

    /// Returns the request whose answer is this one: it may generate one token more than the answer has if the answer ended by itself,
    /// and as many if a limit ended it.
    ///
    /// # Errors
    /// Errors of `compile`. Does not call [`Request::validate`].
    pub fn request(
        &self,
        prompt: &[u32],
        images: Vec<PromptImage>,
        compile: impl FnOnce(&GrammarSource) -> Result<Grammar>,
    ) -> Result<Request> {
        let (given, generated) = self.answer.split_at_checked(self.given).ok_or(Error::PromptEmpty)?;
        let recipe = &self.recipe;
        let limits = Limits {
            max_tokens: Some(generated.len() + usize::from(self.ended_by_itself())),
            overflow: Overflow::Clamp,
            stop: recipe.stop.clone(),
            stop_ids: recipe.stop_ids.clone(),
            ignore_eos: recipe.ignore_eos,
            deadline: None,
            loop_guard: recipe.loop_guard,
        };
        Ok(Request {
            prompt: [prompt, given].concat(),
            images,
            sampling: self.sampling.clone().into(),
            limits,
            grammar: recipe.grammar.as_ref().map(compile).transpose()?,
            reasoning: recipe.reasoning.clone(),
            markup: recipe.markup.clone().into(),
            adapters: Some(self.adapters.clone()),
            ..Request::default()
        })
    }
}

/// Returns the SHA-256 of tokens, each as four bytes, the lowest first.
pub fn tokens_sha256(tokens: &[u32]) -> String {
    sha256(&[&tokens.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()])
}

/// Sampling parameters in a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingRecord {
    top_k: Option<usize>,
    #[serde(flatten)]
    numbers: SamplingNumbers,
    /// Pairs, because serde cannot read a map with numeric keys inside a tagged enum.
    logit_bias: Vec<(u32, f32)>,
    seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    samplers: Option<Vec<SamplerStep>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dry_sequence_breakers: Option<Vec<String>>,
}

impl From<&Sampling> for SamplingRecord {
    fn from(sampling: &Sampling) -> Self {
        Self {
            top_k: sampling.top_k,
            numbers: SamplingNumbers::of(sampling),
            logit_bias: sampling.logit_bias.iter().map(|(&id, &bias)| (id, bias)).collect(),
            seed: sampling.seed,
            samplers: sampling.samplers.clone(),
            dry_sequence_breakers: sampling.dry_sequence_breakers.clone(),
        }
    }
}

impl From<SamplingRecord> for Sampling {
    fn from(record: SamplingRecord) -> Self {
        let SamplingRecord { top_k, numbers, logit_bias, seed, samplers, dry_sequence_breakers } = record;
        let logit_bias = logit_bias.into_iter().collect();
        let mut sampling =
            Self { top_k, logit_bias, seed, samplers, dry_sequence_breakers, ..Self::default() };
        numbers.apply(&mut sampling);
        sampling
    }
}
