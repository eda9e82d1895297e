//! Granite 4, and Granite 3 with experts: a Granite of Mamba-2 mixers in most layers and attention, often
//! without positions, in the others, or in all; experts, if there are some, come with one that every token
//! passes. Sources: transformers `GraniteMoeHybridConfig`, `GraniteMoeSharedConfig`; llama.cpp's
//! `granitehybrid` and `granitemoe`. Without recurrent layers and experts, llama.cpp's converter writes
//! `granite`.

use super::dense::ConfigDefaults;
use super::dense_families::{GRANITE, set_multipliers};
use super::experts::{ExpertKeys, experts, shared_width};
use super::ssm::{MAMBA_KEYS, inner_size, ssm};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, FeedForwardConfig, MixerConfig, MlpConfig, PartNames};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    name: "granite-hybrid",
    model_types: &["granitemoehybrid"],
    gguf_names: &["granitehybrid"],
    adjust: |description, reader| {
        (MOE_FAMILY.adjust)(description, reader)?;
        if !has_positions(reader)? {
            description.config.attentions_mut().for_each(|(_, attention)| attention.rope = None);
        }
        let is_recurrent = recurrent_layers(reader, description.config.layers.len())?;
        if is_recurrent.contains(&true) {
            let inner = inner_size(reader, None, "mamba_expand", description.config.hidden_size)?;
            let mixer = MixerConfig::Ssm(ssm(reader, &MAMBA_KEYS, inner)?);
            let layers = description.config.layers.iter_mut().zip(is_recurrent);
            layers.filter(|(_, is)| *is).for_each(|(layer, _)| layer.mixer = mixer.clone());
        }
        Ok(())
    },
    ..MOE_FAMILY
};

pub const MOE_FAMILY: Family = Family {
    name: "granite-moe",
    model_types: &["granitemoe", "granitemoeshared"],
    gguf_names: &["granitemoe"],
    defaults: ConfigDefaults { experts: true, ..ConfigDefaults::CLASS },
    parts: PARTS,
    adjust: |description, reader| {
        set_multipliers(description, reader)?;
        set_feed_forward(description, reader)
    },
    ..GRANITE
};

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

/// Sets experts, if there are some, and the width of the part that every token passes.
fn set_feed_forward(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let has_experts =
        reader.count(reader.pick(ExpertKeys::LOCAL.count, "expert_count"))?.is_some_and(|count| count > 0);
    let shared = shared_width(reader, "shared_intermediate_size")?;
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
fn has_positions(reader: &ConfigReader) -> LoadResult<bool> {
    match reader.is_gguf() {
        true => Ok(reader.flag("rope.scaling.finetuned")?.unwrap_or(false)),
        false => Ok(reader.string("position_embedding_type")?.as_deref() == Some("rope")),
    }
}

/// Returns which layers are recurrent: all unless listed; in GGUF these have no heads for keys and values.
fn recurrent_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    if reader.is_gguf() {
        return reader.layers_without_heads(num_layers);
    }
    const KEY: &str = "layer_types";
    let key = if reader.value(KEY).is_some() { KEY } else { "layers_block_type" };
    let kinds: [&[&str]; 2] = [&["mamba", "linear_attention"], &["attention", "full_attention"]];
    Ok(reader.layers_named(key, num_layers, kinds)?.unwrap_or_else(|| vec![true; num_layers]))
}
