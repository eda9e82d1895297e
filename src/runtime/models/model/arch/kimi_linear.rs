//! Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others; experts as DeepSeek V3
//! has them. Sources: transformers `KimiLinearConfig`; llama.cpp's `kimi-linear` for GGUF. Ling 3 is alike, with positions, gates
//! on the heads of latent attention, and a bound on how fast values fade. Sources: transformers `BailingHybridConfig`;
//! llama.cpp's `bailingmoe3` for GGUF, and for limits of networks, which the class does not know. Ling 2.5 and 2.6 have lightning
//! attention instead, and no gates on heads; only folders have them.

use serde_json::Value;

use super::deepseek::{ExpertFacts, parse_latent};
use super::dense::{MAX_LAYERS, MAX_WIDTH};
use super::experts::ExpertKeys;
use super::gated_families::HEAD_GATE;
use super::rope::{partial_factor, rope};
use super::step::limit_networks;
use super::{ConfigReader, Description, Family};
use crate::model::config::{
    Activation, DeltaNetConfig, DeltaShape, ExpertWeights, LatentConfig, LightningConfig, MixerConfig,
    PartNames, SsmShape,
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

/// The layers that rotary settings are for.
const KIND: &str = "full_attention";

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
    set_mixers(
        &mut description,
        &is_recurrent,
        |_| MixerConfig::DeltaNet(net.clone()),
        |latent| latent.rope = None,
    );
    Ok(description)
}

fn parse_ling(family: &Family, reader: &ConfigReader) -> LoadResult<Description> {
    const LIMITS: [&str; 2] = ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"];
    const KERNEL: &str = "short_conv_kernel_size";
    const SAFE: &str = "kda_safe_gate";
    if !reader.is_gguf() && reader.is_absent(KERNEL) && reader.is_absent(SAFE) {
        return parse_lightning(family, reader);
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
    set_mixers(
        &mut description,
        &is_recurrent,
        |_| MixerConfig::DeltaNet(net.clone()),
        |latent| latent.has_gate = true,
    );
    let limited = reader.with(reader.cut_lists(&["swiglu_clamp_exp", "swiglu_clamp_shexp"], of_decoder));
    limit_networks(&mut description, &limited, LIMITS)?;
    Ok(description)
}

/// Parses Ling 2.5 and 2.6, whose config.json has the name of Ling 3 without its keys.
fn parse_lightning(family: &Family, reader: &ConfigReader) -> LoadResult<Description> {
    for (key, supported) in [("use_linear_silu", false), ("linear_silu", false), ("linear_rope", true)] {
        if reader.flag(key)?.is_some_and(|given| given != supported) {
            return Err(reader.error(key, format!("{} is not supported", !supported)));
        }
    }
    let mut description = parse_latent(family, reader, &LING_FACTS)?;
    (description.naming.embedding, description.naming.attention) = ("word_embeddings", "attention");
    let (num_layers, hidden) = (description.config.layers.len(), description.config.hidden_size);
    let heads = reader.size("num_attention_heads", MAX_SIZE)?;
    let head_dim = reader.size_or("head_dim", (hidden / heads).max(1), MAX_SIZE)?;
    let factor = partial_factor(reader, KIND).or(reader.value("partial_rotary_factor"));
    let by_factor = (head_dim as f64 * factor.and_then(|factor| factor.as_f64()).unwrap_or(1.0)) as usize;
    let rotated = reader.count("rotary_dim")?.unwrap_or(by_factor);
    if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
        let message = format!("{rotated} of {head_dim} values cannot be rotated");
        return Err(reader.error("partial_rotary_factor", message));
    }
    let norm_groups = reader.size_or("group_norm_size", 1, heads)?;
    if !heads.is_multiple_of(norm_groups) {
        let message = format!("{heads} heads cannot be normalised in {norm_groups} groups");
        return Err(reader.error("group_norm_size", message));
    }
    description.config.ropes.push(rope(reader, KIND, rotated, 600_000.0)?);
    let config = LightningConfig {
        shape: SsmShape { heads, head_dim, groups: heads, state_dim: head_dim },
        rope: 1,
        has_norms: reader.flag("use_qk_norm")?.unwrap_or(false),
        norm_groups,
        fading: Vec::new(),
    };
    let of_layer = |layer| LightningConfig { fading: fading(heads, layer, num_layers), ..config.clone() };
    let is_recurrent = ling_layers(reader, num_layers)?;
    set_mixers(&mut description, &is_recurrent, |layer| MixerConfig::Lightning(of_layer(layer)), |_| {});
    Ok(description)
}

/// Returns the rates at which a layer's heads fade: 2^(-8i/n) for head i of n, counted from 1, if n is a power of two; else those of
/// the next lower power and then every other one of the next higher; times a factor that falls from 1 in the first layer to 1e-5 in
/// the last. The published class has the factor of the layer before, as if layers were numbered from 1; vLLM and SGLang, and by the
/// notes of AReaL the training, do not.
fn fading(heads: usize, layer: usize, num_layers: usize) -> Vec<f32> {
    let lower = 1 << heads.ilog2();
    let of = |count: usize| (1..=count).map(move |head| libm::exp2(-8.0 * head as f64 / count as f64));
    let factor = 1.0 - layer as f64 / (num_layers - 1).max(1) as f64 + 1e-5;
    of(lower).chain(of(2 * lower).step_by(2)).take(heads).map(|rate| (rate * factor) as f32).collect()
}

/// Returns which layers have Kimi delta attention or lightning attention: as listed, or all but the last of each group.
fn ling_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    let size = reader.interval("layer_group_size", 6)?;
    let by_group = || (1..=num_layers).map(|number| !number.is_multiple_of(size)).collect();
    Ok(reader.layers_of_kind(num_layers, "linear_attention")?.unwrap_or_else(by_group))
}

/// Gives the layers for which `is_recurrent` is true a mixer with a state, and the others what `adjust` makes of their latent attention.
fn set_mixers(
    description: &mut Description,
    is_recurrent: &[bool],
    recurrent: impl Fn(usize) -> MixerConfig,
    adjust: impl Fn(&mut LatentConfig),
) {
    for (index, (layer, is_recurrent)) in description.config.layers.iter_mut().zip(is_recurrent).enumerate() {
        match &mut layer.mixer {
            mixer if *is_recurrent => *mixer = recurrent(index),
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
