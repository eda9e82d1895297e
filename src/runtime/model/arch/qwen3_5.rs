//! Qwen 3.5, text, dense and with experts: gated delta nets in most layers, attention with gated output in the others; experts
//! come with one that every token passes through a gate. Source: transformers `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`.

use super::dense::{Defaults, MAX_WIDTH, dense};
use super::experts::{Keys, experts};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{
    DeltaNetConfig, DeltaShape, ExpertWeights, FeedForwardConfig, MixerConfig, MlpConfig, PartNames, QkNorm,
};

pub const FAMILY: Family = Family {
    name: "qwen3.5",
    model_types: &["qwen3_5", "qwen3_5_text"],
    gguf_names: &[],
    describe: describe_dense,
};

pub const MOE_FAMILY: Family = Family {
    name: "qwen3.5-moe",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf_names: &[],
    describe: describe_moe,
};

/// Every fourth layer attends unless the file says otherwise.
const PATTERN: usize = 4;

const EXPERTS: Keys =
    Keys { count: "num_experts", used: "num_experts_per_tok", intermediate_size: "moe_intermediate_size" };

/// A convolution sees no more than a few tokens.
const MAX_KERNEL: usize = 1 << 10;

fn describe_dense(facts: &Facts) -> Result<Description, LoadError> {
    describe("qwen3.5", facts, Defaults { num_kv_heads: Some(4), ..Defaults::default() })
}

fn describe_moe(facts: &Facts) -> Result<Description, LoadError> {
    // Its class has no width of its own for a dense part: the shared expert's stands in for it.
    let shared = facts.size("shared_expert_intermediate_size", MAX_WIDTH)?;
    let defaults = Defaults {
        num_kv_heads: Some(2),
        experts: true,
        intermediate_size: Some(shared),
        ..Defaults::default()
    };
    let mut description = describe("qwen3.5-moe", facts, defaults)?;
    description.naming.parts = PartNames {
        mlp: [
            ["mlp.shared_expert.gate_proj", ""],
            ["mlp.shared_expert.up_proj", ""],
            ["mlp.shared_expert.down_proj", ""],
        ],
        ..PartNames::LLAMA
    };
    for layer in &mut description.config.layers {
        if let Some(dense) = layer.feed_forward.dense.take() {
            layer.feed_forward = FeedForwardConfig {
                experts: Some(experts(facts, &EXPERTS, &dense, ExpertWeights::OfUsed)?),
                dense: Some(MlpConfig { intermediate_size: shared, ..dense }),
                gates_dense: true,
            };
        }
    }
    Ok(description)
}

fn describe(name: &'static str, facts: &Facts, defaults: Defaults) -> Result<Description, LoadError> {
    let defaults = Defaults {
        num_heads: Some(16),
        head_dim: Some(256),
        context_length: 32_768,
        rotated: 0.25,
        ..defaults
    };
    let mut description = dense(name, facts, defaults)?;
    description.naming.norm_offset = 1.0;
    let has_output_gate = facts.flag("attn_output_gate")?.unwrap_or(true);
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
        attention.has_output_gate = has_output_gate;
    }
    let delta_net = MixerConfig::DeltaNet(delta_net(facts)?);
    let num_layers = description.config.layers.len();
    let listed = facts.layers_of_kind(num_layers, "linear_attention")?;
    let period = match facts.count("full_attention_interval")? {
        Some(0) => return Err(facts.error("full_attention_interval", "0 is not a period of layers")),
        period => period.unwrap_or(PATTERN),
    };
    for (index, layer) in description.config.layers.iter_mut().enumerate() {
        if listed.as_ref().map_or(!(index + 1).is_multiple_of(period), |listed| listed[index]) {
            layer.mixer = delta_net.clone();
        }
    }
    Ok(description)
}

fn delta_net(facts: &Facts) -> Result<DeltaNetConfig, LoadError> {
    let size = |key, default| match facts.count(key)? {
        None => Ok(default),
        Some(_) => facts.size(key, MAX_WIDTH >> 6),
    };
    let shape = DeltaShape {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
    };
    if !shape.value_heads.is_multiple_of(shape.key_heads) {
        let message =
            format!("{} heads of values cannot share {} of keys evenly", shape.value_heads, shape.key_heads);
        return Err(facts.error("linear_num_key_heads", message));
    }
    let kernel = facts.count("linear_conv_kernel_dim")?.unwrap_or(4);
    if !(2..=MAX_KERNEL).contains(&kernel) {
        return Err(facts.error("linear_conv_kernel_dim", format!("{kernel} is no length of a convolution")));
    }
    Ok(DeltaNetConfig { shape, kernel })
}
