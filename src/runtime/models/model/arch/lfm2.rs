//! LFM2: short convolutions in most layers, attention with norms of q and k per head in the others.
//! Source: transformers `Lfm2Config`, `Lfm2MLP` for the width of the feed-forward part.

use super::dense::{ConfigDefaults, MAX_WIDTH};
use super::experts::{ExpertKeys, weight_scale};
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, MixerConfig, NormNames, PartNames, QkNorm, ShortConvConfig};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: DEFAULTS,
    norms: NormNames {
        pre_mixer: ["operator_norm", "attn_norm"],
        pre_mlp: ["ffn_norm", "ffn_norm"],
        qk: [["self_attn.q_layernorm", "attn_q_norm"], ["self_attn.k_layernorm", "attn_k_norm"]],
        last: ["embedding_norm", "token_embd_norm"],
        ..NormNames::LLAMA
    },
    parts: PartNames {
        attention_output: ["self_attn.out_proj", "attn_output"],
        mlp: [
            ["feed_forward.w1", "ffn_gate"],
            ["feed_forward.w3", "ffn_up"],
            ["feed_forward.w2", "ffn_down"],
        ],
        ..PartNames::LLAMA
    },
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        set_convolutions(description, reader)?;
        if !reader.is_gguf() {
            let width = adjusted_width(reader)?;
            description.networks_mut().for_each(|(_, network)| network.intermediate_size = width);
        }
        Ok(())
    },
    parse: |family, reader| {
        // Files may have the width under this key alone.
        let intermediate_size = reader.count("block_ff_dim")?.filter(|_| !reader.is_gguf());
        family.dense(ConfigDefaults { intermediate_size, ..family.defaults }, reader)
    },
    ..Family::new("lfm2", &["lfm2"], &["lfm2"])
};

const DEFAULTS: ConfigDefaults = ConfigDefaults {
    context_length: 128_000,
    rope_theta: 1e6,
    norm_eps: 1e-5,
    tied: Some(true),
    ..ConfigDefaults::CLASS
};

/// LFM2 in which all layers but the first have experts, weighed by sigmoids with a bias for their choice.
/// Source: transformers `Lfm2MoeConfig`; llama.cpp's `lfm2moe` for GGUF.
pub const MOE_FAMILY: Family = Family {
    name: "lfm2-moe",
    model_types: &["lfm2_moe"],
    gguf_names: &["lfm2moe"],
    defaults: ConfigDefaults { experts: true, ..DEFAULTS },
    parts: PartNames {
        router: ["feed_forward.gate", "ffn_gate_inp"],
        expert_bias: ["feed_forward.expert_bias", "exp_probs_b.bias"],
        experts: ["feed_forward.experts", "ffn"],
        expert_mlp: ["w1", "w3", "w2"],
        ..FAMILY.parts
    },
    adjust: set_experts,
    ..FAMILY
};

fn set_experts(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    set_convolutions(description, reader)?;
    let num_dense = reader.count(reader.pick("num_dense_layers", "leading_dense_block_count"))?;
    let num_dense = num_dense.unwrap_or(if reader.is_gguf() { 0 } else { 2 });
    // llama.cpp's weights always sum to 1.
    let sum_to_one = reader.flag("norm_topk_prob")?.unwrap_or(true) || reader.is_gguf();
    let (weights, is_sparse) = (ExpertWeights::sigmoid(sum_to_one), |layer| layer >= num_dense);
    description.replace_by_experts(reader, &ExpertKeys::QWEN, weights, is_sparse)?;
    let (scale, has_bias) =
        (weight_scale(reader, "routed_scaling_factor")?, reader.flag("use_expert_bias")?.unwrap_or(true));
    for experts in description.experts_mut() {
        (experts.weight_scale, experts.has_bias) = (scale, has_bias);
    }
    Ok(())
}

/// Replaces the attention of some layers by convolutions.
fn set_convolutions(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    if !reader.is_gguf() {
        hugging_face(description, reader)?;
    }
    let kernel = reader.kernel(reader.pick("conv_L_cache", "shortconv.l_cache"), 3)?;
    let convolves = convolutions(reader, description.config.layers.len())?;
    for (layer, _) in description.config.layers.iter_mut().zip(convolves).filter(|(_, convolves)| *convolves)
    {
        layer.mixer = MixerConfig::ShortConv(ShortConvConfig { kernel });
    }
    Ok(())
}

/// Sets the values that only config.json has.
fn hugging_face(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    if reader.flag("conv_bias")? == Some(true) {
        return Err(reader.error("conv_bias", "biases of convolutions are not supported"));
    }
    // Older files use another name.
    let tied = reader.flag("tie_embedding")?.or(reader.flag("tie_word_embeddings")?);
    description.naming.tied = tied.or(DEFAULTS.tied);
    let eps = reader.number("norm_eps")?.unwrap_or(DEFAULTS.norm_eps);
    description.config.final_norm_eps = eps;
    description.config.layers.iter_mut().for_each(|layer| layer.norm_eps = eps);
    Ok(())
}

/// Returns two thirds of the file's width, times a factor, rounded up.
fn adjusted_width(reader: &ConfigReader) -> LoadResult<usize> {
    let key = if reader.value("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let width = reader.size(key, MAX_WIDTH)?;
    if reader.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(width);
    }
    let factor = reader.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = reader.count("block_multiple_of")?.unwrap_or(256).max(1);
    let width = (f64::from(factor) * (2 * width / 3) as f64) as usize;
    match width.checked_next_multiple_of(multiple) {
        Some(width @ 1..=MAX_WIDTH) => Ok(width),
        _ => Err(reader.error(key, "gives the feed-forward part no width that can be")),
    }
}

/// Returns which layers are convolutions. In GGUF these have no heads for keys and values.
fn convolutions(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    if reader.is_gguf() {
        return reader.layers_without_heads(num_layers);
    }
    if let Some(listed) = reader.layers_of_kind(num_layers, "conv")? {
        return Ok(listed);
    }
    let attention = reader.listed_layers("full_attn_idxs")?.unwrap_or_else(|| (0..num_layers).collect());
    Ok((0..num_layers).map(|layer| !attention.contains(&layer)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_width_that_cannot_be_is_refused() {
        let width = |factor: f64| {
            let config = json!({"intermediate_size": 96, "block_ffn_dim_multiplier": factor});
            adjusted_width(&ConfigReader::hugging_face("config.json".into(), config))
        };
        assert_eq!(width(1.5).expect("valid"), 256);
        for factor in [1e30, -1.0, 0.0] {
            let error = width(factor).expect_err("no width").to_string();
            assert!(error.contains("intermediate_size"), "{error}");
        }
    }
}
