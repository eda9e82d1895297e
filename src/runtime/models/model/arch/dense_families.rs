//! Families that differ from a Llama in a few facts, each with its source.

use super::dense::{ConfigDefaults, dense};
use super::rope::gguf_long_rope;
use super::{ConfigReader, Description, Family, mixtral, olmo3};
use crate::model::config::{Activation, NormNames, QkNorm};
use llmctl_base::error::LoadError;

/// Llama 2 and 3, and models published under their architecture (Yi, SmolLM 1 and 2, TinyLlama; Mistral and Mixtral as
/// GGUF).
/// Source: transformers `LlamaConfig`; llama.cpp's converter for the order of q and k rows.
pub const LLAMA: Family = Family::new("llama", &["llama"], &["llama"], llama);

fn llama(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { experts: reader.is_gguf(), ..ConfigDefaults::default() };
    let mut description = dense("llama", reader, defaults)?;
    if reader.is_gguf() {
        if reader.count("expert_count")?.is_some_and(|count| count > 0) {
            mixtral::set_experts(&mut description, reader)?;
        }
        description.naming.interleaved_qk = true;
        let window = reader.count("attention.sliding_window")?;
        description.slide(window, |_| true);
    }
    Ok(description)
}

/// Mistral 7B and its relatives: a Llama whose layers may all have a sliding window. As GGUF it is published as `llama`.
/// Source: transformers `MistralConfig`.
pub const MISTRAL: Family = Family::new("mistral", &["mistral"], &[], mistral);

fn mistral(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("mistral", reader, ConfigDefaults::default())?;
    // The class's own window is the default; `null` means none.
    let window =
        if reader.is_absent("sliding_window") { Some(4096) } else { reader.count("sliding_window")? };
    description.slide(window, |_| true);
    Ok(description)
}

/// Qwen 1.5, 2 and 2.5: a Llama with biases on q, k and v; upper layers may have a sliding window.
/// Source: transformers `Qwen2Config`.
pub const QWEN2: Family = Family::new("qwen2", &["qwen2"], &["qwen2"], qwen2);

fn qwen2(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("qwen2", reader, ConfigDefaults::default())?;
    slide_upper_layers(&mut description, reader)?;
    Ok(description)
}

/// `use_sliding_window` turns windows on, for the layers that `layer_types` names or those from `max_window_layers` on.
pub fn slide_upper_layers(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    if reader.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = reader.count("sliding_window")?;
    let sliding = reader.sliding_layers(description.config.layers.len())?;
    let first = reader.count("max_window_layers")?.unwrap_or(28);
    description.slide(window, |layer| sliding.as_ref().map_or(layer >= first, |sliding| sliding[layer]));
    Ok(())
}

/// Qwen 3, dense: no biases, q and k normalised per head, heads wider than hidden_size / heads.
/// Source: transformers `Qwen3Config`.
pub const QWEN3: Family = Family::new("qwen3", &["qwen3"], &["qwen3"], qwen3);

fn qwen3(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults =
        ConfigDefaults { head_dim: (!reader.is_gguf()).then_some(128), ..ConfigDefaults::default() };
    let mut description = dense("qwen3", reader, defaults)?;
    slide_upper_layers(&mut description, reader)?;
    description.normalize_qk(QkNorm::PerHead);
    Ok(description)
}

/// Phi-3, 3.5 and 4-mini: q, k, v in one matrix, gate and up in another, LongRoPE, partly rotated heads.
/// Source: transformers `Phi3Config`.
pub const PHI3: Family = Family::new("phi3", &["phi3", "phi4"], &["phi3"], phi3);

fn phi3(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, context_length: 4096, ..ConfigDefaults::default() };
    let mut description = dense("phi3", reader, defaults)?;
    let key = reader.pick("sliding_window", "attention.sliding_window");
    let window = reader.count(key)?;
    description.slide(window, |_| true);
    if reader.is_gguf()
        && let Some(scaling) = gguf_long_rope(reader)?
    {
        description.config.ropes[0].scaling = scaling;
    }
    Ok(description)
}

/// OLMo 2: norms only after each part, q and k normalised over all heads together.
/// Source: transformers `Olmo2Config`.
pub const OLMO2: Family = Family::new("olmo2", &["olmo2"], &["olmo2"], olmo2);

fn olmo2(reader: &ConfigReader) -> Result<Description, LoadError> {
    // llama.cpp's converter writes OLMo 3 under this name.
    if reader.is_gguf() && reader.count("attention.sliding_window")?.is_some_and(|window| window > 0) {
        return olmo3::parse_config(reader);
    }
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("olmo2", reader, defaults)?;
    description.normalize_outputs(QkNorm::Whole);
    Ok(description)
}

/// Seed-OSS: a Llama with biases on q, k and v.
/// Source: transformers `SeedOssConfig`; llama.cpp's converter for the names in GGUF.
pub const SEED_OSS: Family = Family::new("seed-oss", &["seed_oss"], &["seed_oss"], seed_oss);

fn seed_oss(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(8),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 524_288,
        ..ConfigDefaults::default()
    };
    let mut description = dense("seed-oss", reader, defaults)?;
    description.naming.norms = NormNames::POST_ATTENTION;
    Ok(description)
}

/// ERNIE 4.5, dense: a Llama whose heads are rotated in pairs of neighbours, in both formats.
/// Source: transformers `Ernie4_5Config`; llama.cpp's `ernie4_5` for GGUF.
pub const ERNIE4_5: Family = Family::new("ernie4.5", &["ernie4_5"], &["ernie4_5"], ernie4_5);

fn ernie4_5(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(2),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 131_072,
        rope_theta: 500_000.0,
        norm_eps: 1e-5,
        tied: Some(true),
        ..ConfigDefaults::default()
    };
    let mut description = dense("ernie4.5", reader, defaults)?;
    description.naming.interleaved_qk = true;
    Ok(description)
}

/// Arcee's AFM: a Llama whose feed-forward parts are two matrices with a squared ReLU between them.
/// Source: transformers `ArceeConfig`; llama.cpp's `arcee` for GGUF.
pub const ARCEE: Family = Family::new("arcee", &["arcee"], &["arcee"], arcee);

fn arcee(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        context_length: 4096,
        norm_eps: 1e-5,
        activation: Activation::SquaredRelu,
        ..ConfigDefaults::default()
    };
    let mut description = dense("arcee", reader, defaults)?;
    description.naming.interleaved_qk = reader.is_gguf();
    for layer in &mut description.config.layers {
        if let Some(mlp) = &mut layer.feed_forward.dense {
            mlp.is_gated = false;
        }
    }
    Ok(description)
}

/// Hunyuan, dense: a Llama in which q and k are normalised per head after the rotary embedding.
/// Source: transformers `HunYuanDenseV1Config`; llama.cpp's `hunyuan-dense` for GGUF.
pub const HUNYUAN_DENSE: Family =
    Family::new("hunyuan-dense", &["hunyuan_v1_dense"], &["hunyuan-dense"], hunyuan_dense);

fn hunyuan_dense(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("hunyuan-dense", reader, defaults)?;
    description.naming.norms = NormNames {
        qk: [["self_attn.query_layernorm", "attn_q_norm"], ["self_attn.key_layernorm", "attn_k_norm"]],
        ..NormNames::LLAMA
    };
    description.normalize_qk(QkNorm::PerHeadAfterRope);
    Ok(description)
}

/// GLM-4-0414 and GLM-Z1: norms around each part, gate and up in one matrix, the first half of each head rotated in pairs of
/// neighbours. Source: transformers `Glm4Config`; llama.cpp's `glm4` for GGUF.
pub const GLM4: Family = Family::new("glm4", &["glm4"], &["glm4"], glm4);

const GLM4_NORMS: NormNames = NormNames {
    post_mixer: ["post_self_attn_layernorm", "post_attention_norm"],
    post_mlp: ["post_mlp_layernorm", "post_ffw_norm"],
    ..NormNames::LLAMA
};

fn glm4(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(2),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 131_072,
        norm_eps: 1.5625e-7,
        rotated: 0.5,
        ..ConfigDefaults::default()
    };
    let mut description = dense("glm4", reader, defaults)?;
    description.naming.norms = GLM4_NORMS;
    // llama.cpp's converter splits the pairs of models that also read images.
    description.naming.interleaved_qk = reader.is_absent("rope.dimension_sections");
    for layer in &mut description.config.layers {
        layer.post_norms = true;
    }
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    Ok(description)
}

/// Granite 3, dense: a Llama with multipliers on embeddings, scores, residuals and logits.
/// Source: transformers `GraniteConfig`.
pub const GRANITE: Family = Family::new("granite", &["granite"], &["granite"], granite);

fn granite(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("granite", reader, ConfigDefaults::default())?;
    set_multipliers(&mut description, reader)?;
    Ok(description)
}

/// Sets what all Granite models share: multipliers, and the order of q and k rows in GGUF.
pub fn set_multipliers(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    description.naming.interleaved_qk = reader.is_gguf();
    let multiplier = |key| Ok::<_, LoadError>(reader.number(key)?.unwrap_or(1.0));
    let config = &mut description.config;
    config.embedding_scale = multiplier(reader.pick("embedding_multiplier", "embedding_scale"))?;
    let logits_key = reader.pick("logits_scaling", "logit_scale");
    let divisor = multiplier(logits_key)?;
    if divisor == 0.0 {
        return Err(reader.error(logits_key, "logits cannot be divided by 0"));
    }
    config.logit_scale = 1.0 / divisor;
    let score = reader.number(reader.pick("attention_multiplier", "attention.scale"))?;
    let residual = multiplier(reader.pick("residual_multiplier", "residual_scale"))?;
    config.layers.iter_mut().for_each(|layer| layer.residual_scales = [residual; 2]);
    for (_, attention) in config.attentions_mut() {
        // If absent, GGUF means the usual scale and config.json means 1, the class's default.
        attention.scale = match score {
            Some(score) => score,
            None if reader.is_gguf() => attention.scale,
            None => 1.0,
        };
    }
    Ok(())
}
