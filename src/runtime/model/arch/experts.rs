//! Parses experts, which all families with experts describe alike.

use super::config_reader::ConfigReader;
use super::dense::MAX_WIDTH;
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{ExpertWeights, ExpertsConfig, MlpConfig};

/// Limit on the number of experts, above that of any published model.
const MAX_EXPERTS: usize = 1 << 14;

/// Hugging Face's keys, which differ between families; GGUF's do not.
pub struct ExpertKeys {
    pub count: &'static str,
    pub used: &'static str,
    pub intermediate_size: &'static str,
}

/// Parses experts with the activation of the given network and these `weights`. GGUF names their width only if it
/// differs from that of a dense network.
pub fn experts(
    reader: &ConfigReader,
    keys: &ExpertKeys,
    dense: &MlpConfig,
    weights: ExpertWeights,
) -> Result<ExpertsConfig, LoadError> {
    let count = reader.size(reader.pick(keys.count, "expert_count"), MAX_EXPERTS)?;
    let used = reader.size(reader.pick(keys.used, "expert_used_count"), count)?;
    let inner_key = reader.pick(keys.intermediate_size, "expert_feed_forward_length");
    let intermediate_size = match reader.is_gguf() && reader.is_absent(inner_key) {
        true => dense.intermediate_size,
        false => reader.size(inner_key, MAX_WIDTH)?,
    };
    Ok(ExpertsConfig {
        count,
        used,
        mlp: MlpConfig { intermediate_size, activation: dense.activation },
        weights,
        weight_scale: 1.0,
        has_bias: false,
        groups: None,
        has_norms: false,
    })
}
