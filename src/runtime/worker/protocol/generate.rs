//! The `generate` call: its fields and defaults on the wire, and the conversion from and to [`Request`].
//!
//! Invariant: a request that [`Request::validate`] accepts comes out of the two conversions unchanged.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use super::events::{duration, ms};
use super::image::{WorkerImage, decoded};
use crate::grammar::{Grammar, GrammarSource};
use crate::request::{EngineSessionName, Limits, LoopGuard, Overflow, PromptImage, ReasoningLimit, Request};
use llmctl_base::error::{Error, Result};
use llmctl_base::{SamplerStep, Sampling, SamplingNumbers};
use llmctl_models::adapters::AdapterUse;

/// Arguments of a generation. The defaults are the reference server's, not those of [`Request`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Generate {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_segments: Option<Vec<PromptSegment>>,
    /// Images whose rows are in the prompt, in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<WorkerImage>,
    /// Generate up to the end of the context if not positive.
    pub max_new_tokens: i64,
    /// [`Overflow::Clamp`] if it is absent, as the reference server does.
    #[serde(default = "clamp")]
    pub overflow: Overflow,
    /// 0 disables it.
    pub top_k: usize,
    /// Refuses unknown fields, too.
    #[serde(flatten)]
    pub numbers: SamplingNumbers,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<u32, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samplers: Option<Vec<SamplerStep>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// 0 draws a random seed.
    pub seed: u64,
    /// Seed used verbatim; unlike in `seed`, 0 is a seed. Takes precedence over `seed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_seed: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Absent or empty for no session.
    #[serde(deserialize_with = "name_or_empty", skip_serializing_if = "Option::is_none")]
    pub session_id: Option<EngineSessionName>,
    pub ignore_eos: bool,
    pub render_special: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub markup: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<usize>,
    /// Generate nothing; only the prompt's log-probabilities are wanted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub prompt_only: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_ids: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<GrammarSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<ReasoningLimit>,
    /// Tokens that the answer may consist of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prediction: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<f64>,
    #[serde(skip_serializing_if = "LoopGuard::is_default")]
    pub loop_guard: LoopGuard,
    /// LoRA adapters; absent for those that the model was loaded with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Vec<AdapterUse>>,
    /// Send every [`Event`] in full.
    pub events: bool,
}

fn clamp() -> Overflow {
    Overflow::Clamp
}

fn name_or_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<EngineSessionName>, D::Error> {
    Ok(EngineSessionName::parse(String::deserialize(deserializer)?).ok())
}

/// Part of a prompt: text or ids. If both are given, the ids are used.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromptSegment {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
}

/// Encodes a request with all events, its images by their hashes alone. For a request that [`Request::validate`] accepts,
/// [`Generate::into_request`] restores it unchanged.
impl From<&Request> for Generate {
    fn from(request: &Request) -> Self {
        let Request { sampling, limits, .. } = request;
        Self {
            prompt_segments: Some(vec![PromptSegment { text: None, ids: Some(request.prompt.clone()) }]),
            images: request.images.iter().map(WorkerImage::of).collect(),
            max_new_tokens: limits.max_tokens.map_or(-1, |tokens| i64::try_from(tokens).unwrap_or(i64::MAX)),
            overflow: limits.overflow,
            top_k: sampling.top_k.unwrap_or(0),
            numbers: SamplingNumbers::of(sampling),
            logit_bias: sampling.logit_bias.clone(),
            samplers: sampling.samplers.clone(),
            dry_sequence_breakers: sampling.dry_sequence_breakers.clone(),
            exact_seed: sampling.seed,
            stop: limits.stop.clone(),
            session_id: request.session.clone(),
            ignore_eos: limits.ignore_eos,
            render_special: request.render_special,
            markup: request.markup.to_vec(),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            prompt_only: limits.max_tokens == Some(0),
            stop_ids: limits.stop_ids.clone(),
            grammar: request.grammar.as_ref().map(|grammar| grammar.source().clone()),
            reasoning: request.reasoning.clone(),
            prediction: request.prediction.clone(),
            deadline_ms: limits.deadline.map(ms),
            loop_guard: limits.loop_guard,
            adapters: request.adapters.clone(),
            events: true,
            ..Self::default()
        }
    }
}

impl Generate {
    /// Returns whether `into_request` has to encode text, compile a grammar or decode images, which takes long.
    pub fn is_work(&self) -> bool {
        let has_text = |segment: &PromptSegment| segment.ids.is_none();
        self.grammar.is_some()
            || self.prompt.is_some()
            || !self.images.is_empty()
            || self.prompt_segments.as_ref().is_some_and(|segments| segments.iter().any(has_text))
    }

    /// Converts to a request. `encode` gets a text and whether other tokens precede it; `files` are the images'.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if an image cannot be decoded, the prompt is missing or given twice, or the deadline is not a
    /// duration; errors of `encode` and `compile`. Does not call [`Request::validate`].
    pub fn into_request(
        self,
        encode: impl Fn(&str, bool) -> Result<Vec<u32>>,
        compile: impl Fn(&GrammarSource) -> Result<Grammar>,
        files: Vec<Arc<[u8]>>,
    ) -> Result<Request> {
        let prompt = read_prompt(self.prompt, self.prompt_segments, encode)?;
        let image = |(image, file): (WorkerImage, Arc<[u8]>)| {
            Ok(PromptImage { file: decoded(file)?, key: image.key, spans: image.spans })
        };
        let images = self.images.into_iter().zip(files).map(image).collect::<Result<_>>()?;
        let deadline = self.deadline_ms.map(|ms| {
            let time = duration(ms).ok_or_else(|| format!("{ms} is not a time"));
            time.map_err(|message| Error::InvalidParameter { name: "deadline_ms", message })
        });
        let mut sampling = Sampling {
            top_k: Some(self.top_k).filter(|&k| k > 0),
            logit_bias: self.logit_bias,
            samplers: self.samplers,
            dry_sequence_breakers: self.dry_sequence_breakers,
            seed: self.exact_seed.or(Some(self.seed).filter(|&seed| seed > 0)),
            ..Sampling::default()
        };
        self.numbers.apply(&mut sampling);
        Ok(Request {
            prompt,
            sampling,
            limits: Limits {
                max_tokens: match self.prompt_only {
                    true => Some(0),
                    false => usize::try_from(self.max_new_tokens).ok().filter(|&tokens| tokens > 0),
                },
                overflow: self.overflow,
                stop: self.stop,
                stop_ids: self.stop_ids,
                ignore_eos: self.ignore_eos,
                deadline: deadline.transpose()?,
                loop_guard: self.loop_guard,
            },
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            render_special: self.render_special,
            markup: self.markup.into(),
            grammar: self.grammar.as_ref().map(compile).transpose()?,
            reasoning: self.reasoning,
            prediction: self.prediction,
            session: self.session_id,
            images,
            adapters: self.adapters,
        })
    }
}

fn read_prompt(
    text: Option<String>,
    segments: Option<Vec<PromptSegment>>,
    encode: impl Fn(&str, bool) -> Result<Vec<u32>>,
) -> Result<Vec<u32>> {
    let refuse = |message: &str| Error::InvalidParameter { name: "prompt", message: message.to_owned() };
    let segments = match (text, segments) {
        (Some(text), None) => return encode(&text, false),
        (None, Some(segments)) => segments,
        (None, None) => return Err(refuse("neither prompt nor prompt_segments is given")),
        (Some(_), Some(_)) => return Err(refuse("prompt and prompt_segments exclude each other")),
    };
    let mut prompt = Vec::new();
    for segment in segments {
        match segment {
            PromptSegment { ids: Some(ids), .. } if prompt.is_empty() => prompt = ids,
            PromptSegment { ids: Some(ids), .. } => prompt.extend(ids),
            PromptSegment { text: Some(text), .. } => prompt.extend(encode(&text, !prompt.is_empty())?),
            PromptSegment { .. } => return Err(refuse("a segment has neither text nor ids")),
        }
    }
    Ok(prompt)
}
