//! Qwen 3 with experts: Qwen 3's attention, and in most layers experts instead of the one network.
//! Source: transformers `Qwen3MoeConfig`; llama.cpp for what GGUF fixes: experts in every layer, weights that
//! sum to 1.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family, dense_families};
use crate::model::config::{ExpertWeights, FeedForwardConfig, QkNorm};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("qwen3-moe", &["qwen3_moe"], &["qwen3moe"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        head_dim: (!reader.is_gguf()).then_some(128),
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("qwen3-moe", reader, defaults)?;
    dense_families::slide_upper_layers(&mut description, reader)?;
    description.normalize_qk(QkNorm::PerHead);
    let weights = match reader.is_gguf() || reader.flag("norm_topk_prob")?.unwrap_or(false) {
        true => ExpertWeights::OfUsed,
        false => ExpertWeights::OfAll,
    };
    let is_sparse = sparse_layers(reader)?;
    description.replace_dense(is_sparse, |dense| {
        Ok(FeedForwardConfig::of_experts(experts(reader, &ExpertKeys::QWEN, &dense, weights)?))
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
