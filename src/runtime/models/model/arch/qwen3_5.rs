//! Qwen 3.5, text, dense and with experts: gated delta nets in most layers, attention with gated output in
//! the others; experts come with one that every token passes through a gate. Sources: transformers
//! `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`; llama.cpp's `qwen35` and `qwen35moe` for GGUF.

use serde_json::Value;

use super::dense::{ConfigDefaults, MAX_LAYERS, MAX_WIDTH};
use super::experts::{ExpertKeys, experts};
use super::rope::set_sections;
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    Activation, DeltaNetConfig, DeltaShape, ExpertWeights, FeedForwardConfig, MixerConfig, MlpConfig,
    NormNames, OutputGate, PartNames, QkNorm,
};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_heads: Some(16),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        rotated: 0.25,
        ..ConfigDefaults::CLASS
    },
    qk_norm: QkNorm::PerHead,
    adjust,
    parse: |family, reader| family.dense(in_format(family.defaults, reader), reader),
    ..Family::new("qwen3.5", &["qwen3_5", "qwen3_5_text"], &["qwen35"])
};

pub const MOE_FAMILY: Family = Family {
    name: "qwen3.5-moe",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf_names: &["qwen35moe"],
    defaults: ConfigDefaults { num_kv_heads: Some(2), experts: true, ..FAMILY.defaults },
    parts: PartNames { mlp_beside_experts: PartNames::SHARED_EXPERT, ..PartNames::LLAMA },
    parse: |family, reader| with_experts(family, reader, ExpertWeights::OfUsed),
    ..FAMILY
};

/// Qwen 3 Next: Qwen 3.5 with experts, except that a delta net's projections are stored together and that GGUF keeps the
/// checkpoint's order of value heads. Sources: transformers `Qwen3NextConfig`; llama.cpp's `qwen3next` for GGUF.
pub const NEXT_FAMILY: Family = Family {
    name: "qwen3-next",
    model_types: &["qwen3_next"],
    gguf_names: &["qwen3next"],
    parse: |family, reader| {
        refuse_dense_layers(reader)?;
        // llama.cpp's weights always sum to 1.
        let sum_to_one = reader.flag("norm_topk_prob")?.unwrap_or(true) || reader.is_gguf();
        let mut description = with_experts(family, reader, ExpertWeights::softmax(sum_to_one))?;
        for layer in &mut description.config.layers {
            if let MixerConfig::DeltaNet(net) = &mut layer.mixer {
                net.shape.tiled = false;
            }
        }
        Ok(description)
    },
    ..MOE_FAMILY
};

/// Refuses layers without experts, which the class allows but no published model has.
fn refuse_dense_layers(reader: &ConfigReader) -> LoadResult<()> {
    const DENSE: &str = "mlp_only_layers";
    const STEP: &str = "decoder_sparse_step";
    if reader.value(DENSE).is_some_and(|layers| layers.as_array().is_none_or(|layers| !layers.is_empty())) {
        return Err(reader.error(DENSE, "layers without experts are not supported"));
    }
    match reader.count(STEP)? {
        None | Some(1) => Ok(()),
        Some(step) => Err(reader.error(STEP, format!("{step} leaves layers without experts"))),
    }
}

/// Number of blocks that predict further tokens; Qwen 3 Next has one without it.
const PREDICTION: &str = "mtp_num_hidden_layers";

/// Every fourth layer is full attention by default.
const PATTERN: usize = 4;

/// Returns the class's defaults for Hugging Face's form, and the usual context for GGUF.
fn in_format(defaults: ConfigDefaults, reader: &ConfigReader) -> ConfigDefaults {
    match reader.is_gguf() {
        true => defaults,
        false => ConfigDefaults { context_length: 32_768, ..defaults },
    }
}

/// Parses a model with experts in every layer.
pub fn with_experts(
    family: &Family,
    reader: &ConfigReader,
    weights: ExpertWeights,
) -> LoadResult<Description> {
    let shared = shared_size(reader)?;
    let defaults = ConfigDefaults { intermediate_size: Some(shared), ..family.defaults };
    let mut description = family.dense(in_format(defaults, reader), reader)?;
    description.replace_dense(
        |_| true,
        |dense| {
            Ok(FeedForwardConfig {
                experts: Some(experts(reader, &ExpertKeys::QWEN, &dense, weights)?),
                dense: Some(MlpConfig { intermediate_size: shared, ..dense }),
                gates_dense: true,
            })
        },
    )?;
    Ok(description)
}

/// Returns the width of the shared expert, which takes the place of a dense part: the class has none.
fn shared_size(reader: &ConfigReader) -> LoadResult<usize> {
    const SCALE: &str = "expert_weights_scale";
    if reader.is_gguf() && reader.number(SCALE)?.is_some_and(|scale| scale != 0.0 && scale != 1.0) {
        return Err(reader.error(SCALE, "scaled weights of experts are not supported"));
    }
    let key = reader.pick("shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    match reader.is_gguf() && reader.value(key).is_none() {
        true => reader.size("feed_forward_length", MAX_WIDTH),
        false => reader.size(key, MAX_WIDTH),
    }
}

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    if reader.is_gguf() {
        // The converter has added 1 to the weights of norms.
        description.naming.norms = NormNames::POST_ATTENTION;
        description.leave_prediction_out(reader, PREDICTION)?;
    } else {
        (description.naming.norm_offset, description.naming.last_norm_offset) = (1.0, 1.0);
    }
    let has_output_gate = reader.flag("attn_output_gate")?.unwrap_or(true);
    let output_gate = has_output_gate.then_some(OutputGate::BesideQuery);
    description.config.attentions_mut().for_each(|(_, it)| it.output_gate = output_gate);
    let blocks = reader.count(reader.pick(PREDICTION, "nextn_predict_layers"))?;
    // More blocks than one, of which each would predict one token more, are in no published model.
    description.prediction = description.config.layers.first().filter(|_| blocks.unwrap_or(1) == 1).cloned();
    let delta_net = MixerConfig::DeltaNet(delta_net(reader)?);
    let is_recurrent = recurrent_layers(reader, description.config.layers.len())?;
    for (layer, _) in description.config.layers.iter_mut().zip(is_recurrent).filter(|(_, is)| *is) {
        layer.mixer = delta_net.clone();
    }
    match description.config.architecture {
        "qwen3-next" => Ok(()),
        _ => set_sections(&mut description.config.ropes[0], reader, [11, 11, 10], true),
    }
}

/// Returns which layers are recurrent: as listed, or all except every fourth by default.
fn recurrent_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    if let Some(listed) = listed_layers(reader, num_layers)? {
        return Ok(listed);
    }
    let period = reader.interval("full_attention_interval", PATTERN)?;
    Ok((1..=num_layers).map(|number| !number.is_multiple_of(period)).collect())
}

fn listed_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Option<Vec<bool>>> {
    if !reader.is_gguf() {
        return reader.layers_of_kind(num_layers, "linear_attention");
    }
    const KEY: &str = "attention.recurrent_layers";
    let Some(value) = reader.value(KEY) else { return Ok(None) };
    let is_recurrent = |value: &Value| value.as_bool().or(value.as_u64().map(|number| number != 0));
    let listed: Option<Vec<bool>> = match &value {
        Value::Array(list) => list.iter().map(is_recurrent).collect(),
        one => is_recurrent(one).map(|is| vec![is; num_layers]),
    };
    // Prediction blocks may be listed too.
    match listed.filter(|listed| (num_layers..=MAX_LAYERS).contains(&listed.len())) {
        Some(listed) => Ok(Some(listed[..num_layers].to_vec())),
        None => Err(reader.error(KEY, format!("is not a list of {num_layers} layers"))),
    }
}

fn delta_net(reader: &ConfigReader) -> LoadResult<DeltaNetConfig> {
    let shape = if reader.is_gguf() { gguf_shape(reader)? } else { hugging_face_shape(reader)? };
    if !shape.value_heads.is_multiple_of(shape.key_heads) {
        let key = reader.pick("linear_num_key_heads", "ssm.group_count");
        let message =
            format!("{} heads of values cannot share {} of keys evenly", shape.value_heads, shape.key_heads);
        return Err(reader.error(key, message));
    }
    let kernel = reader.kernel(reader.pick("linear_conv_kernel_dim", "ssm.conv_kernel"), 4)?;
    Ok(DeltaNetConfig { shape, kernel, is_kimi: false, decay_bound: None, gate: Activation::Silu })
}

/// Limit on the heads, and on the values of a head.
const MAX_SIZE: usize = MAX_WIDTH >> 6;

fn hugging_face_shape(reader: &ConfigReader) -> LoadResult<DeltaShape> {
    let size = |key, default| reader.size_or(key, default, MAX_SIZE);
    Ok(DeltaShape {
        key_heads: size("linear_num_key_heads", 16)?,
        value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        tiled: false,
    })
}

/// Reads the shape under the keys of state space models: groups are key heads, the rank of time steps is the number
/// of value heads.
fn gguf_shape(reader: &ConfigReader) -> LoadResult<DeltaShape> {
    const INNER: &str = "ssm.inner_size";
    let value_heads = reader.size("ssm.time_step_rank", MAX_SIZE)?;
    let inner = reader.size(INNER, MAX_WIDTH)?;
    if !inner.is_multiple_of(value_heads) {
        return Err(reader.error(INNER, format!("{inner} values cannot be divided into {value_heads} heads")));
    }
    Ok(DeltaShape {
        key_heads: reader.size("ssm.group_count", MAX_SIZE)?,
        value_heads,
        key_dim: reader.size("ssm.state_size", MAX_SIZE)?,
        value_dim: inner / value_heads,
        tiled: true,
    })
}
