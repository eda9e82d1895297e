//! Mixtral: a Llama with experts in every layer. As GGUF it is published as `llama` with an `expert_count`.
//! Source: transformers `MixtralConfig`; llama.cpp for what GGUF fixes: weights that sum to 1.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, FeedForwardConfig, PartNames};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("mixtral", &["mixtral"], &[], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: Some(8),
        context_length: 131_072,
        rope_theta: 1e6,
        norm_eps: 1e-5,
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("mixtral", reader, defaults)?;
    set_experts(&mut description, reader)?;
    let window = reader.count("sliding_window")?;
    description.slide(window, |_| true);
    Ok(description)
}

/// Replaces the dense part of every layer by experts.
pub fn set_experts(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    description.naming.parts = PartNames::MIXTRAL;
    description.replace_dense(
        |_| true,
        |dense| {
            let experts = experts(reader, &ExpertKeys::LOCAL, &dense, ExpertWeights::OfUsed)?;
            Ok(FeedForwardConfig::of_experts(experts))
        },
    )
}
