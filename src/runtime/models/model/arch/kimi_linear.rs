//! Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others; experts as DeepSeek V3
//! has them. Sources: transformers `KimiLinearConfig`; llama.cpp's `kimi-linear` for GGUF. Ling 3 is alike, with positions, gates
//! on the heads of latent attention, and a bound on how fast values fade. Sources: transformers `BailingHybridConfig`;
//! llama.cpp's `bailingmoe3` for GGUF, and for limits of networks, which the class does not know.

use serde_json::Value;

use super::deepseek::{ExpertFacts, parse_latent};
use super::dense::{MAX_LAYERS, MAX_WIDTH};
use super::experts::ExpertKeys;
use super::gated_families::HEAD_GATE;
use super::step::limit_networks;
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    Activation, DeltaNetConfig, DeltaShape, ExpertWeights, LatentConfig, MixerConfig, PartNames,
};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family =
    Family { parse: parse_config, ..Family::new("kimi-linear", &["kimi_linear"], &["kimi-linear"]) };

pub const LING_FAMILY: Family =
    Family { parse: parse_ling, ..Family::new("bailing-moe3", &["bailing_hybrid"], &["bailingmoe3"]) };

const LING_FACTS: ExpertFacts = ExpertFacts {
    parts: PartNames {
        attention_output: ["self_attn.dense", "attn_output"],
        attention_gate: HEAD_GATE,
        expert_bias: ["mlp.gate.expert_bias", "exp_probs_b.bias"],
        ..PartNames::SHARED_EXPERTS
    },
    dense: ("first_k_dense_replace", 2),
    ..ExpertFacts::NUMBERED
};

const FACTS: ExpertFacts = ExpertFacts {
    keys: ExpertKeys { used: "num_experts_per_token", ..ExpertKeys::QWEN },
    parts: PartNames {
        mlp_beside_experts: [
            ["block_sparse_moe.shared_experts.gate_proj", "ffn_gate_shexp"],
            ["block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"],
            ["block_sparse_moe.shared_experts.down_proj", "ffn_down_shexp"],
        ],
        expert_bias: ["block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::MIXTRAL
    },
    ..ExpertFacts::NUMBERED
};

/// Limit on the heads, and on the values of a head.
const MAX_SIZE: usize = MAX_WIDTH >> 6;

/// config.json's object for Kimi delta attention.
const OBJECT: &str = "linear_attn_config";

fn parse_config(family: &Family, reader: &ConfigReader) -> LoadResult<Description> {
    const GROUPS: &str = "num_expert_group";
    if reader.count(GROUPS)?.is_some_and(|groups| groups > 1) {
        return Err(reader.error(GROUPS, "groups of experts are not supported"));
    }
    let mut description = parse_latent(family, reader, &FACTS)?;
    // llama.cpp's weights always sum to 1.
    let weights = ExpertWeights::sigmoid(reader.flag("moe_renormalize")?.unwrap_or(true));
    description.experts_mut().for_each(|experts| experts.weights = weights);
    let config = &mut description.config;
    config.context_length = reader.count("model_max_length")?.unwrap_or(config.context_length);
    config.ropes.clear();
    let net = delta_net(reader, ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"])?;
    let is_recurrent = recurrent_layers(reader, config.layers.len())?;
    set_mixers(&mut description, &is_recurrent, &net, |latent| latent.rope = None);
    Ok(description)
}

fn parse_ling(family: &Family, reader: &ConfigReader) -> LoadResult<Description> {
    const LIMITS: [&str; 2] = ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"];
    const KERNEL: &str = "short_conv_kernel_size";
    const SAFE: &str = "kda_safe_gate";
    if !reader.is_gguf() && reader.is_absent(KERNEL) && reader.is_absent(SAFE) {
        return Err(reader.unsupported("the lightning attention of Ling 2.5 and 2.6 is not supported"));
    }
    if reader.flag("use_mla_nope")? == Some(true) {
        return Err(reader.error("use_mla_nope", "latent attention without positions is not supported here"));
    }
    let num_layers = reader.size(reader.pick("num_hidden_layers", "block_count"), MAX_LAYERS)?;
    let reader = &reader.with(reader.cut_lists(&LIMITS, num_layers));
    let mut description = parse_latent(family, reader, &LING_FACTS)?;
    (description.naming.embedding, description.naming.attention) = ("word_embeddings", "attention");
    let of_decoder = description.config.layers.len();
    let is_recurrent = match reader.is_gguf() {
        true => reader.layers_without_heads(num_layers)?,
        false => ling_layers(reader, of_decoder)?,
    };
    let bound_key = reader.pick("kda_lower_bound", "kda.gate_lower_bound");
    let is_bounded = reader.flag(reader.pick(SAFE, "kda.safe_gate"))?.unwrap_or(true);
    let decay_bound = match reader.number(bound_key)?.unwrap_or(-5.0) {
        bound if bound < 0.0 => is_bounded.then_some(bound),
        bound => return Err(reader.error(bound_key, format!("{bound} is not below 0"))),
    };
    let net = delta_net(reader, ["num_attention_heads", "head_dim", KERNEL])?;
    let net = DeltaNetConfig { decay_bound, ..net };
    set_mixers(&mut description, &is_recurrent, &net, |latent| latent.has_gate = true);
    let limited = reader.with(reader.cut_lists(&["swiglu_clamp_exp", "swiglu_clamp_shexp"], of_decoder));
    limit_networks(&mut description, &limited, LIMITS)?;
    Ok(description)
}

/// Returns which layers have Kimi delta attention: as listed, or all but the last of each group.
fn ling_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    let size = reader.interval("layer_group_size", 6)?;
    let by_group = || (1..=num_layers).map(|number| !number.is_multiple_of(size)).collect();
    Ok(reader.layers_of_kind(num_layers, "linear_attention")?.unwrap_or_else(by_group))
}

/// Gives the layers for which `is_recurrent` is true a delta net, and the others what `adjust` makes of their latent attention.
fn set_mixers(
    description: &mut Description,
    is_recurrent: &[bool],
    net: &DeltaNetConfig,
    adjust: impl Fn(&mut LatentConfig),
) {
    for (layer, is_recurrent) in description.config.layers.iter_mut().zip(is_recurrent) {
        match &mut layer.mixer {
            mixer if *is_recurrent => *mixer = MixerConfig::DeltaNet(net.clone()),
            MixerConfig::Latent(latent) => adjust(latent),
            _ => {}
        }
    }
}

/// Reads a delta net, whose number of heads, their width and the kernel config.json has under these keys.
fn delta_net(reader: &ConfigReader, keys: [&'static str; 3]) -> LoadResult<DeltaNetConfig> {
    let [heads_key, dim_key, kernel_key] = match reader.is_gguf() {
        true => ["attention.head_count", "kda.head_dim", "ssm.conv_kernel"],
        false => keys,
    };
    let size = |key, inside: &str| match nested(reader, inside).and_then(|value| value.as_u64()) {
        Some(size) if (1..=MAX_SIZE as u64).contains(&size) => Ok(size as usize),
        Some(size) => Err(reader.error(OBJECT, format!("{inside} is {size}"))),
        None => reader.size(key, MAX_SIZE),
    };
    let (heads, dim) = (size(heads_key, "num_heads")?, size(dim_key, "head_dim")?);
    let kernel = match nested(reader, "short_conv_kernel_size").and_then(|value| value.as_u64()) {
        Some(kernel @ 2..=1024) => kernel as usize,
        Some(kernel) => return Err(reader.error(OBJECT, format!("a kernel of {kernel} tokens is not valid"))),
        None => reader.kernel(kernel_key, 4)?,
    };
    let shape =
        DeltaShape { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim, tiled: false };
    Ok(DeltaNetConfig { shape, kernel, is_kimi: true, decay_bound: None, gate: Activation::Sigmoid })
}

fn nested(reader: &ConfigReader, key: &str) -> Option<Value> {
    reader.value(OBJECT)?.get(key).cloned()
}

/// Returns which layers have Kimi delta attention: as listed, numbered from 1, or those without heads in GGUF.
fn recurrent_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    if reader.is_gguf() {
        return reader.layers_without_heads(num_layers);
    }
    if let Some(listed) = reader.layers_of_kind(num_layers, "linear_attention")? {
        return Ok(listed);
    }
    let listed =
        nested(reader, "kda_layers").and_then(|layers| serde_json::from_value::<Vec<usize>>(layers).ok());
    let listed = listed.ok_or_else(|| reader.error(OBJECT, "kda_layers is not a list of layers"))?;
    Ok((1..=num_layers).map(|number| listed.contains(&number)).collect())
}
