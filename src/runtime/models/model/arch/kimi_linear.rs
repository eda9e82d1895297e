//! Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others; experts as DeepSeek V3
//! has them. Sources: transformers `KimiLinearConfig`; llama.cpp's `kimi-linear` for GGUF.

use serde_json::Value;

use super::deepseek::{ExpertFacts, parse_latent};
use super::dense::MAX_WIDTH;
use super::experts::ExpertKeys;
use super::{ConfigReader, Description, Family};
use crate::model::config::{DeltaNetConfig, DeltaShape, ExpertWeights, MixerConfig, PartNames};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family =
    Family { parse: parse_config, ..Family::new("kimi-linear", &["kimi_linear"], &["kimi-linear"]) };

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
    let net = MixerConfig::DeltaNet(delta_net(reader)?);
    let is_recurrent = recurrent_layers(reader, config.layers.len())?;
    for (layer, is_recurrent) in config.layers.iter_mut().zip(is_recurrent) {
        match &mut layer.mixer {
            mixer if is_recurrent => *mixer = net.clone(),
            MixerConfig::Latent(latent) => latent.rope = None,
            _ => {}
        }
    }
    Ok(description)
}

fn delta_net(reader: &ConfigReader) -> LoadResult<DeltaNetConfig> {
    let [heads_key, dim_key, kernel_key] = match reader.is_gguf() {
        true => ["attention.head_count", "kda.head_dim", "ssm.conv_kernel"],
        false => ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"],
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
    Ok(DeltaNetConfig { shape, kernel, is_kimi: true })
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
