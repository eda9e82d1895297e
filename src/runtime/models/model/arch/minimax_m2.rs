//! MiniMax M2: experts in every layer, weighed by sigmoids with a bias for their choice; q and k normalised
//! over all heads together, and half-rotated. Source: transformers `MiniMaxM2Config`; llama.cpp's
//! `minimax-m2` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, ExpertsConfig, FeedForwardConfig, PartNames, QkNorm};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("minimax-m2", &["minimax_m2"], &["minimax-m2"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(8),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 196_608,
        rope_theta: 5e6,
        experts: true,
        rotated: rotated_fraction(reader)?,
        ..ConfigDefaults::default()
    };
    let mut description = dense("minimax-m2", reader, defaults)?;
    description.naming.parts = PartNames {
        expert_bias: ["block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::MIXTRAL
    };
    description.normalize_qk(QkNorm::Whole);
    description.replace_dense(
        |_| true,
        |dense| {
            let experts = experts(reader, &ExpertKeys::LOCAL, &dense, ExpertWeights::SigmoidOfUsed)?;
            Ok(FeedForwardConfig::of_experts(ExpertsConfig { has_bias: true, ..experts }))
        },
    )?;
    Ok(description)
}

/// Returns the rotated fraction of a head, of which published files give the values: `rotary_dim`.
fn rotated_fraction(reader: &ConfigReader) -> Result<f32, LoadError> {
    match (reader.count("rotary_dim")?, reader.count("head_dim")?.unwrap_or(128)) {
        (Some(rotated), head_dim) if head_dim > 0 => Ok(rotated as f32 / head_dim as f32),
        _ => Ok(1.0),
    }
}
