//! The facts of experts, which all families with experts give alike.

use super::dense::MAX_WIDTH;
use super::facts::Facts;
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{ExpertWeights, ExpertsConfig, MlpConfig};

/// More than any published model has.
const MAX_EXPERTS: usize = 1 << 14;

/// Hugging Face's keys, which differ between families. GGUF's do not.
pub struct Keys {
    pub count: &'static str,
    pub used: &'static str,
    pub intermediate_size: &'static str,
}

/// Experts with the activation and the weights of `model`.
pub fn experts(
    facts: &Facts,
    keys: &Keys,
    MlpConfig { activation, .. }: &MlpConfig,
    weights: ExpertWeights,
) -> Result<ExpertsConfig, LoadError> {
    let count = facts.size(facts.pick(keys.count, "expert_count"), MAX_EXPERTS)?;
    let used = facts.size(facts.pick(keys.used, "expert_used_count"), count)?;
    let inner_key = facts.pick(keys.intermediate_size, "expert_feed_forward_length");
    let intermediate_size = facts.size(inner_key, MAX_WIDTH)?;
    Ok(ExpertsConfig {
        count,
        used,
        mlp: MlpConfig { intermediate_size, activation: *activation },
        weights,
        has_norms: false,
    })
}
