//! Qwen 3.5, text, dense and with experts: gated delta nets in most layers, attention with gated output in the others; experts
//! come with one that every token passes through a gate. Sources: transformers `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`;
//! llama.cpp's `qwen35` and `qwen35moe` for GGUF, whose rotary sections are all the same position in a text.

use serde_json::Value;

use super::dense::{Defaults, MAX_LAYERS, MAX_WIDTH, dense};
use super::experts::{Keys, experts};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{
    DeltaNetConfig, DeltaShape, ExpertWeights, FeedForwardConfig, MixerConfig, MlpConfig, NormNames,
    PartNames, QkNorm,
};

pub const FAMILY: Family = Family {
    name: "qwen3.5",
    model_types: &["qwen3_5", "qwen3_5_text"],
    gguf_names: &["qwen35"],
    describe: describe_dense,
};

pub const MOE_FAMILY: Family = Family {
    name: "qwen3.5-moe",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf_names: &["qwen35moe"],
    describe: describe_moe,
};

/// Every fourth layer attends unless the file says otherwise.
const PATTERN: usize = 4;

const EXPERTS: Keys =
    Keys { count: "num_experts", used: "num_experts_per_tok", intermediate_size: "moe_intermediate_size" };

/// The converter has added 1 to the weights of norms.
const GGUF_NORMS: NormNames =
    NormNames { pre_mlp: ["post_attention_layernorm", "post_attention_norm"], ..NormNames::LLAMA };

/// A convolution sees no more than a few tokens.
const MAX_KERNEL: usize = 1 << 10;

fn describe_dense(facts: &Facts) -> Result<Description, LoadError> {
    describe("qwen3.5", facts, Defaults { num_kv_heads: Some(4), ..Defaults::default() })
}

fn describe_moe(facts: &Facts) -> Result<Description, LoadError> {
    let shared = shared_size(facts)?;
    let defaults = Defaults {
        num_kv_heads: Some(2),
        experts: true,
        intermediate_size: Some(shared),
        ..Defaults::default()
    };
    let mut description = describe("qwen3.5-moe", facts, defaults)?;
    description.naming.parts = PartNames {
        mlp: [
            ["mlp.shared_expert.gate_proj", "ffn_gate_shexp"],
            ["mlp.shared_expert.up_proj", "ffn_up_shexp"],
            ["mlp.shared_expert.down_proj", "ffn_down_shexp"],
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

/// The width of the expert that every token passes, which stands in for that of a dense part: the class has none.
fn shared_size(facts: &Facts) -> Result<usize, LoadError> {
    const SCALE: &str = "expert_weights_scale";
    if facts.is_gguf() && facts.number(SCALE)?.is_some_and(|scale| scale != 0.0 && scale != 1.0) {
        return Err(facts.error(SCALE, "scaled weights of experts are not supported"));
    }
    let key = facts.pick("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    match facts.is_gguf() && facts.value(key).is_none() {
        true => facts.size("feed_forward_length", MAX_WIDTH),
        false => facts.size(key, MAX_WIDTH),
    }
}

fn describe(name: &'static str, facts: &Facts, defaults: Defaults) -> Result<Description, LoadError> {
    let defaults = match facts.is_gguf() {
        true => Defaults { num_kv_heads: None, ..defaults },
        false => Defaults {
            num_heads: Some(16),
            head_dim: Some(256),
            context_length: 32_768,
            rotated: 0.25,
            ..defaults
        },
    };
    let mut description = dense(name, facts, defaults)?;
    if facts.is_gguf() {
        description.naming.norms = GGUF_NORMS;
        leave_prediction_out(&mut description, facts)?;
    } else {
        description.naming.norm_offset = 1.0;
    }
    let has_output_gate = facts.flag("attn_output_gate")?.unwrap_or(true);
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
        attention.has_output_gate = has_output_gate;
    }
    let delta_net = MixerConfig::DeltaNet(delta_net(facts)?);
    let is_recurrent = recurrent_layers(facts, description.config.layers.len())?;
    for (layer, _) in description.config.layers.iter_mut().zip(is_recurrent).filter(|(_, is)| *is) {
        layer.mixer = delta_net.clone();
    }
    Ok(description)
}

/// GGUF counts the layers that predict further tokens among the blocks.
fn leave_prediction_out(description: &mut Description, facts: &Facts) -> Result<(), LoadError> {
    const KEY: &str = "nextn_predict_layers";
    let extra = facts.count(KEY)?.unwrap_or(0);
    match description.config.layers.len().checked_sub(extra) {
        None | Some(0) => Err(facts.error(KEY, format!("{extra} layers leave none for the text"))),
        Some(count) => {
            description.config.layers.truncate(count);
            description.naming.prediction_layers = extra;
            Ok(())
        }
    }
}

/// Which layers have a state: as listed, or all but every fourth or so.
fn recurrent_layers(facts: &Facts, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if let Some(listed) = listed_layers(facts, num_layers)? {
        return Ok(listed);
    }
    const PERIOD: &str = "full_attention_interval";
    match facts.count(PERIOD)?.unwrap_or(PATTERN) {
        0 => Err(facts.error(PERIOD, "0 is not a period of layers")),
        period => Ok((1..=num_layers).map(|number| !number.is_multiple_of(period)).collect()),
    }
}

fn listed_layers(facts: &Facts, num_layers: usize) -> Result<Option<Vec<bool>>, LoadError> {
    if !facts.is_gguf() {
        return facts.layers_of_kind(num_layers, "linear_attention");
    }
    const KEY: &str = "attention.recurrent_layers";
    let Some(value) = facts.value(KEY) else { return Ok(None) };
    let is_recurrent = |value: &Value| value.as_bool().or(value.as_u64().map(|number| number != 0));
    let listed: Option<Vec<bool>> = match &value {
        Value::Array(list) => list.iter().map(is_recurrent).collect(),
        one => is_recurrent(one).map(|is| vec![is; num_layers]),
    };
    // Blocks that predict may be listed too.
    match listed.filter(|listed| (num_layers..=MAX_LAYERS).contains(&listed.len())) {
        Some(listed) => Ok(Some(listed[..num_layers].to_vec())),
        None => Err(facts.error(KEY, format!("does not say for {num_layers} layers whether they recur"))),
    }
}

fn delta_net(facts: &Facts) -> Result<DeltaNetConfig, LoadError> {
    let shape = if facts.is_gguf() { gguf_shape(facts)? } else { hugging_face_shape(facts)? };
    if !shape.value_heads.is_multiple_of(shape.key_heads) {
        let key = facts.pick("linear_num_key_heads", "ssm.group_count");
        let message =
            format!("{} heads of values cannot share {} of keys evenly", shape.value_heads, shape.key_heads);
        return Err(facts.error(key, message));
    }
    let key = facts.pick("linear_conv_kernel_dim", "ssm.conv_kernel");
    let kernel = facts.count(key)?.unwrap_or(4);
    if !(2..=MAX_KERNEL).contains(&kernel) {
        return Err(facts.error(key, format!("{kernel} is no length of a convolution")));
    }
    Ok(DeltaNetConfig { shape, kernel })
}

/// Most heads, and values of a head.
const MAX_SIZE: usize = MAX_WIDTH >> 6;

fn hugging_face_shape(facts: &Facts) -> Result<DeltaShape, LoadError> {
    let size = |key, default| match facts.count(key)? {
        None => Ok(default),
        Some(_) => facts.size(key, MAX_SIZE),
    };
    Ok(DeltaShape {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        tiled: false,
    })
}

/// Under the names of state space models: groups are heads of keys, the rank of time steps counts the heads of values.
fn gguf_shape(facts: &Facts) -> Result<DeltaShape, LoadError> {
    const INNER: &str = "ssm.inner_size";
    let value_heads = facts.size("ssm.time_step_rank", MAX_SIZE)?;
    let inner = facts.size(INNER, MAX_WIDTH)?;
    if !inner.is_multiple_of(value_heads) {
        return Err(facts.error(INNER, format!("{inner} values cannot be {value_heads} heads")));
    }
    Ok(DeltaShape {
        key_heads: facts.size("ssm.group_count", MAX_SIZE)?,
        value_heads,
        key_dim: facts.size("ssm.state_size", MAX_SIZE)?,
        value_dim: inner / value_heads,
        tiled: true,
    })
}
