//! Parses experts, which all families with experts describe alike.

use super::Description;
use super::config_reader::ConfigReader;
use super::dense::MAX_WIDTH;
use crate::model::config::{ExpertWeights, ExpertsConfig, FeedForwardConfig, MlpConfig};
use llmctl_base::error::LoadError;

/// Limit on the number of experts, above that of any published model.
const MAX_EXPERTS: usize = 1 << 14;

/// Hugging Face's keys, which differ between families; GGUF's do not.
pub struct ExpertKeys {
    pub count: &'static str,
    pub used: &'static str,
    pub intermediate_size: &'static str,
}

impl ExpertKeys {
    pub const QWEN: Self = Self {
        count: "num_experts",
        used: "num_experts_per_tok",
        intermediate_size: "moe_intermediate_size",
    };

    /// Mixtral's, and of those that follow it.
    pub const LOCAL: Self = Self {
        count: "num_local_experts",
        used: "num_experts_per_tok",
        intermediate_size: "intermediate_size",
    };
}

/// Parses experts with the activation of the given network and these `weights`. GGUF names their width only if it
/// differs from that of a dense network.
pub fn experts(
    reader: &ConfigReader,
    keys: &ExpertKeys,
    dense: &MlpConfig,
    weights: ExpertWeights,
) -> Result<ExpertsConfig, LoadError> {
    // transformers 5 writes the number of experts under the name that all its classes share.
    let count_key = if reader.value(keys.count).is_some() { keys.count } else { "num_local_experts" };
    let count = reader.size(reader.pick(count_key, "expert_count"), MAX_EXPERTS)?;
    let used = reader.size(reader.pick(keys.used, "expert_used_count"), count)?;
    let inner_key = reader.pick(keys.intermediate_size, "expert_feed_forward_length");
    let intermediate_size = match reader.is_gguf() && reader.is_absent(inner_key) {
        true => dense.intermediate_size,
        false => reader.size(inner_key, MAX_WIDTH)?,
    };
    Ok(ExpertsConfig {
        count,
        used,
        mlp: MlpConfig { intermediate_size, ..dense.clone() },
        weights,
        weight_scale: 1.0,
        has_bias: false,
        groups: None,
        has_norms: false,
    })
}

impl FeedForwardConfig {
    /// Returns a part of experts alone.
    pub fn of_experts(experts: ExpertsConfig) -> Self {
        Self { dense: None, experts: Some(experts), gates_dense: false }
    }
}

impl Description {
    /// Replaces the dense part of the layers for which `is_sparse` returns true by what `part` makes of it.
    ///
    /// # Errors
    /// Those of `part`.
    pub fn replace_dense(
        &mut self,
        is_sparse: impl Fn(usize) -> bool,
        part: impl Fn(MlpConfig) -> Result<FeedForwardConfig, LoadError>,
    ) -> Result<(), LoadError> {
        let layers = self.config.layers.iter_mut().enumerate().filter(|(index, _)| is_sparse(*index));
        for layer in layers.map(|(_, layer)| layer).chain(self.prediction.as_mut()) {
            if let Some(dense) = layer.feed_forward.dense.take() {
                layer.feed_forward = part(dense)?;
            }
        }
        Ok(())
    }
}
