//! OLMoE: experts in every layer, q and k normalised over all heads together.
//! Source: transformers `OlmoeConfig`; llama.cpp for what GGUF fixes: weights that do not sum to 1.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, FeedForwardConfig, QkNorm};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("olmoe", &["olmoe"], &["olmoe"], parse_config);

const KEYS: ExpertKeys =
    ExpertKeys { count: "num_experts", used: "num_experts_per_tok", intermediate_size: "intermediate_size" };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    const CLIP: &str = "clip_qkv";
    let defaults =
        ConfigDefaults { context_length: 4096, norm_eps: 1e-5, experts: true, ..ConfigDefaults::default() };
    let mut description = dense("olmoe", reader, defaults)?;
    if reader.value(CLIP).is_some() {
        return Err(reader.error(CLIP, "limits on q, k and v are not supported"));
    }
    description.normalize_qk(QkNorm::Whole);
    let weights = match reader.flag("norm_topk_prob")? {
        Some(true) => ExpertWeights::OfUsed,
        _ => ExpertWeights::OfAll,
    };
    description.replace_dense(
        |_| true,
        |dense| Ok(FeedForwardConfig::of_experts(experts(reader, &KEYS, &dense, weights)?)),
    )?;
    Ok(description)
}
