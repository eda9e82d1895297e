//! Qwen 3 with experts: Qwen 3's attention, and in most layers experts instead of the one network.
//! Source: transformers `Qwen3MoeConfig`; llama.cpp for what GGUF fixes: experts in every layer, weights that sum to 1.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family, qwen2};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{ExpertWeights, FeedForwardConfig, QkNorm};

pub const FAMILY: Family =
    Family { name: "qwen3-moe", model_types: &["qwen3_moe"], gguf_names: &["qwen3moe"], parse_config };

const KEYS: ExpertKeys = ExpertKeys {
    count: "num_experts",
    used: "num_experts_per_tok",
    intermediate_size: "moe_intermediate_size",
};

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        head_dim: (!reader.is_gguf()).then_some(128),
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("qwen3-moe", reader, defaults)?;
    qwen2::slide_upper_layers(&mut description, reader)?;
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
    }
    let weights = match reader.is_gguf() || reader.flag("norm_topk_prob")?.unwrap_or(false) {
        true => ExpertWeights::OfUsed,
        false => ExpertWeights::OfAll,
    };
    let is_sparse = sparse_layers(reader)?;
    description.replace_dense(is_sparse, |dense| {
        Ok(FeedForwardConfig::of_experts(experts(reader, &KEYS, &dense, weights)?))
    })?;
    Ok(description)
}

/// Returns which layers have experts: every `decoder_sparse_step`th one that `mlp_only_layers` does not list.
fn sparse_layers(reader: &ConfigReader) -> Result<impl Fn(usize) -> bool, LoadError> {
    const DENSE: &str = "mlp_only_layers";
    let step = reader.count("decoder_sparse_step")?.unwrap_or(1);
    let dense: Vec<u64> = match reader.value(DENSE) {
        None => Vec::new(),
        Some(value) => serde_json::from_value(value)
            .map_err(|error| reader.error(DENSE, format!("is not a list of layers: {error}")))?,
    };
    Ok(move |layer: usize| step > 0 && (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as u64)))
}
