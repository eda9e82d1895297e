//! Parses experts, which all families with experts describe alike.

use super::Description;
use super::config_reader::ConfigReader;
use super::dense::MAX_WIDTH;
use crate::model::config::{ExpertWeights, ExpertsConfig, FeedForwardConfig, MlpConfig, PartNames};
use llmctl_base::error::LoadResult;

/// Limit on the number of experts, above that of any published model.
const MAX_EXPERTS: usize = 1 << 14;

/// Limit on shared experts, above that of any published model.
const MAX_SHARED: usize = 1 << 10;

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
) -> LoadResult<ExpertsConfig> {
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

impl ExpertWeights {
    /// Returns softmax weights, which sum to 1 or not.
    pub fn softmax(sum_to_one: bool) -> Self {
        if sum_to_one { ExpertWeights::OfUsed } else { ExpertWeights::OfAll }
    }

    /// Returns sigmoids, which sum to 1 or not.
    pub fn sigmoid(sum_to_one: bool) -> Self {
        if sum_to_one { ExpertWeights::SigmoidOfUsed } else { ExpertWeights::Sigmoid }
    }
}

/// Returns the factor of the experts' weights. GGUF's 0 means no scaling.
pub fn weight_scale(reader: &ConfigReader, hugging_face: &'static str) -> LoadResult<f32> {
    let scale = reader.number(reader.pick(hugging_face, "expert_weights_scale"))?;
    Ok(scale.filter(|scale| *scale != 0.0).unwrap_or(1.0))
}

/// Returns the width of a network beside the experts; `None` if there is none.
pub fn shared_width(reader: &ConfigReader, hugging_face: &'static str) -> LoadResult<Option<usize>> {
    let key = reader.pick(hugging_face, "expert_shared_feed_forward_length");
    let width = reader.count(key)?.filter(|width| *width > 0);
    width.map(|_| reader.size(key, MAX_WIDTH)).transpose()
}

/// Returns experts beside `shared` of them that are one network for every token.
pub fn with_shared(
    reader: &ConfigReader,
    shared_key: &str,
    shared: usize,
    experts: ExpertsConfig,
    dense: MlpConfig,
) -> LoadResult<FeedForwardConfig> {
    let width = shared.saturating_mul(experts.mlp.intermediate_size);
    if shared > MAX_SHARED || width > MAX_WIDTH {
        return Err(reader.error(shared_key, format!("{shared} is more than a network can hold")));
    }
    let dense = (width > 0).then_some(MlpConfig { intermediate_size: width, ..dense });
    Ok(FeedForwardConfig { dense, experts: Some(experts), gates_dense: false })
}

impl Description {
    /// Replaces the dense part of every layer by Mixtral's experts.
    pub fn replace_by_mixtral(&mut self, reader: &ConfigReader) -> LoadResult<()> {
        self.naming.parts = PartNames::MIXTRAL;
        self.replace_by_experts(reader, &ExpertKeys::LOCAL, ExpertWeights::OfUsed, |_| true)
    }

    /// Replaces the dense part of the layers for which `is_sparse` returns true by what `part` makes of it.
    ///
    /// # Errors
    /// Those of `part`.
    pub fn replace_dense(
        &mut self,
        is_sparse: impl Fn(usize) -> bool,
        part: impl Fn(MlpConfig) -> LoadResult<FeedForwardConfig>,
    ) -> LoadResult<()> {
        let layers = self.config.layers.iter_mut().enumerate().filter(|(index, _)| is_sparse(*index));
        for layer in layers.map(|(_, layer)| layer).chain(self.prediction.as_mut()) {
            if let Some(dense) = layer.feed_forward.dense.take() {
                layer.feed_forward = part(dense)?;
            }
        }
        Ok(())
    }

    /// Replaces the dense part of the layers for which `is_sparse` returns true by experts alone.
    ///
    /// # Errors
    /// Those of [`experts`].
    pub fn replace_by_experts(
        &mut self,
        reader: &ConfigReader,
        keys: &ExpertKeys,
        weights: ExpertWeights,
        is_sparse: impl Fn(usize) -> bool,
    ) -> LoadResult<()> {
        self.replace_dense(is_sparse, |dense| {
            let experts = Some(experts(reader, keys, &dense, weights)?);
            Ok(FeedForwardConfig { experts, ..FeedForwardConfig::NONE })
        })
    }

    pub fn experts_mut(&mut self) -> impl Iterator<Item = &mut ExpertsConfig> {
        let layers = self.config.layers.iter_mut().chain(self.prediction.as_mut());
        layers.filter_map(|layer| layer.feed_forward.experts.as_mut())
    }
}
