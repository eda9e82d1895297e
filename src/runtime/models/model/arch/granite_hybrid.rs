//! Granite 4, and Granite 3 with experts: a Granite of Mamba-2 mixers in most layers and attention, often
//! without positions, in the others, or in all; experts, if there are some, come with one that every token
//! passes. Sources: transformers `GraniteMoeHybridConfig`, `GraniteMoeSharedConfig`; llama.cpp's
//! `granitehybrid` and `granitemoe`. Without recurrent layers and experts, llama.cpp's converter writes
//! `granite`.

use super::dense::{ConfigDefaults, MAX_WIDTH, dense};
use super::dense_families::set_multipliers;
use super::experts::{ExpertKeys, experts};
use super::ssm::{MAMBA_KEYS, inner_size, ssm};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, FeedForwardConfig, MixerConfig, MlpConfig, PartNames};
use llmctl_base::error::LoadError;

pub const FAMILY: Family =
    Family::new("granite-hybrid", &["granitemoehybrid"], &["granitehybrid"], parse_config);

pub const MOE_FAMILY: Family =
    Family::new("granite-moe", &["granitemoe", "granitemoeshared"], &["granitemoe"], parse_moe);

/// Gate and up of the part that every token passes are in one matrix.
const PARTS: PartNames = PartNames {
    mlp: [
        ["shared_mlp.gate_linear", "ffn_gate"],
        ["shared_mlp.up_linear", "ffn_up"],
        ["shared_mlp.output_linear", "ffn_down"],
    ],
    mlp_beside_experts: [
        ["shared_mlp.gate_linear", "ffn_gate_shexp"],
        ["shared_mlp.up_linear", "ffn_up_shexp"],
        ["shared_mlp.output_linear", "ffn_down_shexp"],
    ],
    mlp_fused: ["shared_mlp.input_linear", "ffn_up"],
    router: ["block_sparse_moe.router.layer", "ffn_gate_inp"],
    experts: ["block_sparse_moe", "ffn"],
    expert_stacks: ["input_linear.weight", "output_linear.weight"],
    ..PartNames::LLAMA
};

fn parse_moe(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = parse(MOE_FAMILY.name, reader)?;
    set_feed_forward(&mut description, reader)?;
    Ok(description)
}

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = parse(FAMILY.name, reader)?;
    set_feed_forward(&mut description, reader)?;
    if !has_positions(reader)? {
        for (_, attention) in description.config.attentions_mut() {
            attention.rope = None;
        }
    }
    let is_recurrent = recurrent_layers(reader, description.config.layers.len())?;
    if is_recurrent.contains(&true) {
        let inner = inner_size(reader, None, "mamba_expand", description.config.hidden_size)?;
        let mixer = MixerConfig::Ssm(ssm(reader, &MAMBA_KEYS, inner)?);
        let layers = description.config.layers.iter_mut().zip(is_recurrent);
        layers.filter(|(_, is)| *is).for_each(|(layer, _)| layer.mixer = mixer.clone());
    }
    Ok(description)
}

fn parse(name: &'static str, reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { experts: true, ..ConfigDefaults::default() };
    let mut description = dense(name, reader, defaults)?;
    set_multipliers(&mut description, reader)?;
    Ok(description)
}

/// Sets experts, if there are some, and the width of the part that every token passes.
fn set_feed_forward(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    let has_experts =
        reader.count(reader.pick(ExpertKeys::LOCAL.count, "expert_count"))?.is_some_and(|count| count > 0);
    let shared_key = reader.pick("shared_intermediate_size", "expert_shared_feed_forward_length");
    let shared = match reader.count(shared_key)? {
        Some(1..) => Some(reader.size(shared_key, MAX_WIDTH)?),
        _ => None,
    };
    description.naming.parts = PARTS;
    for layer in &mut description.config.layers {
        let Some(dense) = layer.feed_forward.dense.take() else { continue };
        let with_width = |intermediate_size| MlpConfig { intermediate_size, ..dense.clone() };
        layer.feed_forward = match has_experts {
            true => FeedForwardConfig {
                experts: Some(experts(reader, &ExpertKeys::LOCAL, &dense, ExpertWeights::OfUsed)?),
                dense: shared.map(with_width),
                gates_dense: false,
            },
            // GGUF keeps the width of a dense part under the usual key.
            false => {
                let width = shared.filter(|_| !reader.is_gguf()).unwrap_or(dense.intermediate_size);
                FeedForwardConfig { dense: Some(with_width(width)), ..FeedForwardConfig::NONE }
            }
        };
    }
    Ok(())
}

/// Returns whether attention rotates queries and keys.
fn has_positions(reader: &ConfigReader) -> Result<bool, LoadError> {
    match reader.is_gguf() {
        true => Ok(reader.flag("rope.scaling.finetuned")?.unwrap_or(false)),
        false => Ok(reader.string("position_embedding_type")?.as_deref() == Some("rope")),
    }
}

/// Returns which layers are recurrent: all unless listed; in GGUF these have no heads for keys and values.
fn recurrent_layers(reader: &ConfigReader, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if reader.is_gguf() {
        let heads = reader.counts("attention.head_count_kv", num_layers)?.unwrap_or_default();
        return Ok(heads.iter().map(|heads| *heads == 0).collect());
    }
    const KEY: &str = "layer_types";
    let key = if reader.value(KEY).is_some() { KEY } else { "layers_block_type" };
    let Some(kinds) = reader.kinds_of_layers(key, num_layers)? else { return Ok(vec![true; num_layers]) };
    let is_recurrent = kinds.iter().map(|kind| match kind.as_str() {
        "mamba" | "linear_attention" => Ok(true),
        "attention" | "full_attention" => Ok(false),
        other => Err(reader.error(key, format!("{other:?} is not a known kind of layer"))),
    });
    is_recurrent.collect()
}
