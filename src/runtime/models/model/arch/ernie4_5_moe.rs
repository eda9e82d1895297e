//! ERNIE 4.5 with experts: softmax weights with a bias for the choice of experts, beside a shared network;
//! the first layers are dense. Source: transformers `Ernie4_5_MoeConfig`; llama.cpp's `ernie4_5-moe` for
//! GGUF.

use super::dense::{ConfigDefaults, MAX_WIDTH, dense};
use super::experts::{ExpertKeys, experts};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, ExpertsConfig, FeedForwardConfig, MlpConfig, PartNames};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("ernie4.5-moe", &["ernie4_5_moe"], &["ernie4_5-moe"], parse_config);

const KEYS: ExpertKeys =
    ExpertKeys { count: "moe_num_experts", used: "moe_k", intermediate_size: "moe_intermediate_size" };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(4),
        context_length: 131_072,
        rope_theta: 500_000.0,
        norm_eps: 1e-5,
        tied: Some(true),
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("ernie4.5-moe", reader, defaults)?;
    description.naming.interleaved_qk = true;
    description.naming.parts = PartNames {
        expert_bias: ["mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::SHARED_EXPERTS
    };
    let num_layers = description.config.layers.len();
    // GGUF tells by its tensors.
    let has_bias =
        !reader.is_gguf() || reader.value(&format!("blk.{}.exp_probs_b.bias", num_layers - 1)).is_some();
    let is_sparse = sparse_layers(reader, num_layers)?;
    description.replace_dense(is_sparse, |dense| feed_forward(reader, dense, has_bias))?;
    Ok(description)
}

/// Parses a layer with experts. The shared ones are one network, whose width GGUF gives wrongly: it is read from the number
/// of experts in both formats.
fn feed_forward(
    reader: &ConfigReader,
    dense: MlpConfig,
    has_bias: bool,
) -> Result<FeedForwardConfig, LoadError> {
    let experts = experts(reader, &KEYS, &dense, ExpertWeights::OfUsed)?;
    let shared_key = reader.pick("moe_num_shared_experts", "expert_shared_count");
    let shared = reader.count(shared_key)?.unwrap_or(if reader.is_gguf() { 0 } else { 2 });
    let width = shared * experts.mlp.intermediate_size;
    if width > MAX_WIDTH {
        return Err(reader.error(shared_key, format!("{shared} is more than a network can hold")));
    }
    Ok(FeedForwardConfig {
        dense: (width > 0).then_some(MlpConfig { intermediate_size: width, ..dense }),
        experts: Some(ExpertsConfig { has_bias, ..experts }),
        gates_dense: false,
    })
}

/// Returns which layers have experts: every `interval`th one between a first and a last.
fn sparse_layers(
    reader: &ConfigReader,
    num_layers: usize,
) -> Result<impl Fn(usize) -> bool + use<>, LoadError> {
    const LAST: &str = "moe_layer_end_index";
    let interval_key = reader.pick("moe_layer_interval", "interleave_moe_layer_step");
    let first_key = reader.pick("moe_layer_start_index", "leading_dense_block_count");
    let interval = match reader.count(interval_key)?.unwrap_or(1) {
        0 => return Err(reader.error(interval_key, "0 is not a valid interval of layers")),
        interval => interval,
    };
    let first = reader.count(first_key)?.unwrap_or(usize::from(!reader.is_gguf()));
    let last = match reader.value(LAST).and_then(|last| last.as_i64()) {
        None | Some(-1) => num_layers,
        Some(_) => reader.count(LAST)?.unwrap_or(num_layers),
    };
    Ok(move |layer: usize| (layer + 1).is_multiple_of(interval) && (first..=last).contains(&layer))
}
