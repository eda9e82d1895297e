//! LFM2 with experts: LFM2 in which all layers but the first have experts, weighed by sigmoids with a bias
//! for their choice. Source: transformers `Lfm2MoeConfig`; llama.cpp's `lfm2moe` for GGUF.

use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family, lfm2};
use crate::model::config::{ExpertWeights, ExpertsConfig, FeedForwardConfig, PartNames};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("lfm2-moe", &["lfm2_moe"], &["lfm2moe"], parse_config);

const PARTS: PartNames = PartNames {
    router: ["feed_forward.gate", "ffn_gate_inp"],
    expert_bias: ["feed_forward.expert_bias", "exp_probs_b.bias"],
    experts: ["feed_forward.experts", "ffn"],
    expert_mlp: ["w1", "w3", "w2"],
    ..lfm2::PARTS
};

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = lfm2::convolutional("lfm2-moe", reader, true)?;
    description.naming.parts = PARTS;
    let num_dense = reader.count(reader.pick("num_dense_layers", "leading_dense_block_count"))?;
    let num_dense = num_dense.unwrap_or(if reader.is_gguf() { 0 } else { 2 });
    // llama.cpp's weights always sum to 1.
    let weights = match reader.flag("norm_topk_prob")?.unwrap_or(true) || reader.is_gguf() {
        true => ExpertWeights::SigmoidOfUsed,
        false => ExpertWeights::Sigmoid,
    };
    let scale = reader.number(reader.pick("routed_scaling_factor", "expert_weights_scale"))?;
    let has_bias = reader.flag("use_expert_bias")?.unwrap_or(true);
    description.replace_dense(
        |layer| layer >= num_dense,
        |dense| {
            let experts = experts(reader, &ExpertKeys::QWEN, &dense, weights)?;
            Ok(FeedForwardConfig::of_experts(ExpertsConfig {
                // GGUF's 0 means no scaling.
                weight_scale: scale.filter(|scale| *scale != 0.0).unwrap_or(1.0),
                has_bias,
                ..experts
            }))
        },
    )?;
    Ok(description)
}
