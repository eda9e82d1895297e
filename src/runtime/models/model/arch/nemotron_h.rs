//! Nemotron-H and Nemotron 3: every layer is one of Mamba-2 mixer, attention without positions, a network of
//! two matrices, and experts of two matrices, chosen as DeepSeek V3 does, beside a network for every token.
//! Source: transformers `NemotronHConfig`, except that time steps have only the limits that the file gives,
//! as in the models' own code and in llama.cpp (transformers to 5.23 also uses `time_step_min`, see its pull
//! request 48989); llama.cpp's `nemotron_h` and `nemotron_h_moe`.

use super::deepseek::{self, ExpertFacts, SharedNetwork};
use super::dense::{ConfigDefaults, MAX_LAYERS, MAX_WIDTH};
use super::ssm::{SsmKeys, ssm};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, FeedForwardConfig, MixerConfig, MlpConfig, NormNames, PartNames};
use llmctl_base::error::{LoadError, LoadResult};

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, tied: Some(false), experts: true, ..ConfigDefaults::CLASS },
    norms: NormNames {
        pre_mixer: ["norm", "attn_norm"],
        pre_mlp: ["norm", "attn_norm"],
        last: ["norm_f", "output_norm"],
        ..NormNames::LLAMA
    },
    parts: PartNames {
        attention_inputs: [
            ["mixer.q_proj", "attn_q"],
            ["mixer.k_proj", "attn_k"],
            ["mixer.v_proj", "attn_v"],
        ],
        attention_output: ["mixer.o_proj", "attn_output"],
        ssm: "mixer",
        mlp: [["", ""], ["mixer.up_proj", "ffn_up"], ["mixer.down_proj", "ffn_down"]],
        mlp_beside_experts: [
            ["", ""],
            ["mixer.shared_experts.up_proj", "ffn_up_shexp"],
            ["mixer.shared_experts.down_proj", "ffn_down_shexp"],
        ],
        router: ["mixer.gate", "ffn_gate_inp"],
        expert_bias: ["mixer.gate.e_score_correction_bias", "exp_probs_b.bias"],
        experts: ["mixer.experts", "ffn"],
        ..PartNames::LLAMA
    },
    interleaved_qk: [false, true],
    parse: |_, reader| parse_config(reader),
    ..Family::new("nemotron-h", &["nemotron_h"], &["nemotron_h"])
};

/// Hugging Face's form has one name for files with and without experts.
pub const MOE_FAMILY: Family =
    Family { name: "nemotron-h-moe", model_types: &[], gguf_names: &[GGUF_MOE], ..FAMILY };

const GGUF_MOE: &str = "nemotron_h_moe";

const KEYS: SsmKeys = SsmKeys {
    heads: "mamba_num_heads",
    groups: "n_groups",
    state_dim: "ssm_state_size",
    kernel: "conv_kernel",
};

/// BlockKind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Ssm,
    Attention,
    Mlp,
    Experts,
}

fn parse_config(reader: &ConfigReader) -> LoadResult<Description> {
    let kinds = if reader.is_gguf() { gguf_kinds(reader)? } else { hugging_face_kinds(reader)? };
    // Older files have a head's size under another key.
    let head_dim = reader.count("attention_head_dim")?.or(Some(128));
    let defaults = ConfigDefaults { num_layers: Some(kinds.len()), head_dim, ..FAMILY.defaults };
    let mut description = FAMILY.dense(defaults, reader)?;
    description.naming.embedding = "embeddings";
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    let eps_key = reader.pick("layer_norm_epsilon", "attention.layer_norm_epsilon");
    let eps = match reader.number(eps_key)? {
        Some(eps) if eps < 0.0 => return Err(reader.error(eps_key, format!("{eps} is below 0"))),
        eps => eps.unwrap_or(description.config.final_norm_eps),
    };
    description.config.final_norm_eps = eps;
    description.config.ropes.clear();
    let inner = inner(reader)?;
    let ssm = MixerConfig::Ssm(ssm(reader, &KEYS, inner)?);
    for (layer, kind) in description.config.layers.iter_mut().zip(kinds) {
        layer.norm_eps = eps;
        if let MixerConfig::Attention(attention) = &mut layer.mixer {
            attention.rope = None;
        }
        if let Some(mlp) = &mut layer.feed_forward.dense {
            (mlp.activation, mlp.is_gated) = (activation(reader)?, false);
        }
        match kind {
            BlockKind::Ssm => (layer.mixer, layer.feed_forward) = (ssm.clone(), FeedForwardConfig::NONE),
            BlockKind::Attention => layer.feed_forward = FeedForwardConfig::NONE,
            BlockKind::Mlp => layer.mixer = MixerConfig::None,
            BlockKind::Experts => {
                layer.mixer = MixerConfig::None;
                let dense = layer.feed_forward.dense.take();
                layer.feed_forward =
                    dense.map(|mlp| experts(reader, mlp)).transpose()?.unwrap_or(FeedForwardConfig::NONE);
            }
        }
    }
    Ok(description)
}

/// Parses a layer of experts of the given kind of network, beside one for every token.
fn experts(reader: &ConfigReader, mlp: MlpConfig) -> LoadResult<FeedForwardConfig> {
    const LATENT: &str = "moe_latent_size";
    if reader.count(LATENT)?.is_some_and(|size| size > 0) {
        return Err(
            reader.error(LATENT, "experts that work in a latent space (Nemotron 3 Super) are not supported")
        );
    }
    const SHARED: SharedNetwork = SharedNetwork::Width("moe_shared_expert_intermediate_size");
    let facts = ExpertFacts { shared: [SHARED, SharedNetwork::GGUF_WIDTH], ..ExpertFacts::DEEPSEEK };
    deepseek::feed_forward(reader, mlp, &facts)
}

fn inner(reader: &ConfigReader) -> LoadResult<usize> {
    match reader.is_gguf() {
        true => reader.size("ssm.inner_size", MAX_WIDTH),
        false => Ok(reader.size(KEYS.heads, MAX_WIDTH)? * reader.size("mamba_head_dim", MAX_WIDTH)?),
    }
}

/// Parses the activation of a network of two matrices.
fn activation(reader: &ConfigReader) -> LoadResult<Activation> {
    const KEY: &str = "mlp_hidden_act";
    match reader.string(KEY)?.as_deref() {
        None | Some("relu2") => Ok(Activation::SquaredRelu),
        Some(other) => Err(reader.error(KEY, format!("activation {other:?} is not supported"))),
    }
}

/// Parses the kinds of layers from a list or, in older files, a text with a letter for each layer.
fn hugging_face_kinds(reader: &ConfigReader) -> LoadResult<Vec<BlockKind>> {
    const LIST: &str = "layers_block_type";
    const PATTERN: &str = "hybrid_override_pattern";
    let kind = |key, name: &str| match name {
        "M" | "linear_attention" | "mamba" => Ok(BlockKind::Ssm),
        "*" | "full_attention" | "attention" => Ok(BlockKind::Attention),
        "-" | "mlp" => Ok(BlockKind::Mlp),
        "E" | "moe" => Ok(BlockKind::Experts),
        other => Err(reader.error(key, format!("{other:?} is not a known kind of layer"))),
    };
    if let Some(serde_json::Value::Array(list)) = reader.value(LIST) {
        let kinds = list.iter().map(|name| kind(LIST, name.as_str().unwrap_or_default()));
        return kinds.collect();
    }
    let pattern = reader.string(PATTERN)?.ok_or_else(|| reader.error(LIST, "is missing"))?;
    pattern.chars().map(|letter| kind(PATTERN, letter.encode_utf8(&mut [0; 4]))).collect()
}

/// Derives the kinds of layers: attention has heads for keys and values, a network has a width, a mixer neither. Files with
/// experts have no other networks.
fn gguf_kinds(reader: &ConfigReader) -> LoadResult<Vec<BlockKind>> {
    let num_layers = reader.size("block_count", MAX_LAYERS)?;
    let list = |key| Ok::<_, LoadError>(reader.counts(key, num_layers)?.unwrap_or(vec![0; num_layers]));
    let network = match reader.architecture()?.as_str() {
        GGUF_MOE => BlockKind::Experts,
        _ => BlockKind::Mlp,
    };
    let (heads, widths) = (list("attention.head_count_kv")?, list("feed_forward_length")?);
    let kind = |(heads, width): (&usize, &usize)| match (heads, width) {
        (0, 0) => BlockKind::Ssm,
        (_, 0) => BlockKind::Attention,
        _ => network,
    };
    Ok(heads.iter().zip(&widths).map(kind).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn experts_in_a_latent_space_are_refused_by_name() {
        let config = |latent: serde_json::Value| {
            json!({
                "model_type": "nemotron_h", "hybrid_override_pattern": "ME*-", "hidden_size": 64, "vocab_size": 100,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
                "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4,
                "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "moe_shared_expert_intermediate_size": 40, "moe_latent_size": latent,
            })
        };
        let parse = |latent| parse_config(&ConfigReader::hugging_face("config.json".into(), config(latent)));
        let plain = parse(json!(null)).expect("Nemotron 3 Nano");
        let part = &plain.config.layers[1].feed_forward;
        assert_eq!(part.dense.as_ref().map(|shared| shared.intermediate_size), Some(40));
        assert!(part.experts.as_ref().is_some_and(|experts| !experts.mlp.is_gated));
        let error = parse(json!(32)).expect_err("Nemotron 3 Super").to_string();
        assert!(error.contains("moe_latent_size"), "{error}");
    }
}
