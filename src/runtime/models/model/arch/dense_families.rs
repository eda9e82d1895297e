//! Families that differ from a Llama in a few facts, which are the same in all layers, each with its source.

use std::f32::consts::LN_2;

use serde_json::Value;

use super::dense::ConfigDefaults;
use super::rope::{gguf_long_rope, parameter, set_sections, yarn_magnitude};
use super::{ConfigReader, Description, Family, sliding_families};
use crate::model::config::{Activation, AttentionTemperature, NormNames, QkNorm, RopeScaling};
use llmctl_base::error::{LoadError, LoadResult};

/// Llama 2 and 3, and models published under their architecture (Yi, SmolLM 1 and 2, TinyLlama; Mistral and Mixtral as
/// GGUF).
/// Source: transformers `LlamaConfig`; llama.cpp's converter for the order of q and k rows.
pub const LLAMA: Family = Family {
    defaults: ConfigDefaults { experts: true, ..ConfigDefaults::CLASS },
    interleaved_qk: [false, true],
    adjust: |description, reader| {
        if !reader.is_gguf() {
            return Ok(());
        }
        if reader.count("expert_count")?.is_some_and(|count| count > 0) {
            description.replace_by_mixtral(reader)?;
        }
        description.slide(reader.window()?, |_| true);
        Ok(())
    },
    ..Family::new("llama", &["llama"], &["llama"])
};

/// Mistral 7B and its relatives: a Llama whose layers may all have a sliding window. As GGUF it is published as `llama`.
/// Source: transformers `MistralConfig`.
pub const MISTRAL: Family = Family {
    adjust: |description, reader| {
        // The class's own window is the default; `null` means none.
        let window = if reader.is_absent("sliding_window") { Some(4096) } else { reader.window()? };
        description.slide(window, |_| true);
        Ok(())
    },
    ..Family::new("mistral", &["mistral"], &[])
};

/// Qwen 1.5, 2 and 2.5: a Llama with biases on q, k and v; upper layers may have a sliding window.
/// Source: transformers `Qwen2Config`.
pub const QWEN2: Family =
    Family { adjust: slide_upper_layers, ..Family::new("qwen2", &["qwen2"], &["qwen2"]) };

/// `use_sliding_window` turns windows on, for the layers that `layer_types` names or those from `max_window_layers` on.
pub fn slide_upper_layers(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    if reader.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = reader.count("sliding_window")?;
    let first = reader.count("max_window_layers")?.unwrap_or(28);
    let slides = reader.sliding_or(description.config.layers.len(), |layer| layer >= first)?;
    description.slide(window, |layer| slides[layer]);
    Ok(())
}

/// Qwen 2 VL and 2.5 VL, text: Qwen 2 with M-RoPE. Sources: transformers `Qwen2_5_VLTextConfig`; llama.cpp's `qwen2vl` for
/// GGUF.
pub const QWEN2_VL: Family = Family {
    name: "qwen2.5-vl",
    model_types: &["qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"],
    gguf_names: &["qwen2vl"],
    adjust: |description, reader| {
        slide_upper_layers(description, reader)?;
        set_sections(&mut description.config.ropes[0], reader, [16, 24, 24], false)
    },
    ..QWEN2
};

/// Qwen 3, dense: no biases, q and k normalised per head, heads wider than hidden_size / heads.
/// Source: transformers `Qwen3Config`.
pub const QWEN3: Family = Family {
    defaults: ConfigDefaults { head_dim: Some(128), ..ConfigDefaults::CLASS },
    qk_norm: QkNorm::PerHead,
    adjust: slide_upper_layers,
    ..Family::new("qwen3", &["qwen3"], &["qwen3"])
};

/// Sections of Qwen 3 VL's M-RoPE.
pub const QWEN3_VL_SECTIONS: [usize; 3] = [24, 20, 20];

/// Qwen 3 VL, text: Qwen 3 with M-RoPE. Sources: transformers `Qwen3VLTextConfig`; llama.cpp's `qwen3vl` for GGUF.
pub const QWEN3_VL: Family = Family {
    name: "qwen3-vl",
    model_types: &["qwen3_vl", "qwen3_vl_text"],
    gguf_names: &["qwen3vl"],
    adjust: |description, reader| {
        set_sections(&mut description.config.ropes[0], reader, QWEN3_VL_SECTIONS, true)
    },
    ..QWEN3
};

/// Phi-3, 3.5 and 4-mini: q, k, v in one matrix, gate and up in another, LongRoPE, partly rotated heads.
/// Source: transformers `Phi3Config`.
pub const PHI3: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, context_length: 4096, ..ConfigDefaults::CLASS },
    adjust: |description, reader| {
        description.slide(reader.window()?, |_| true);
        if reader.is_gguf()
            && let Some(scaling) = gguf_long_rope(reader)?
        {
            description.config.ropes[0].scaling = scaling;
        }
        Ok(())
    },
    ..Family::new("phi3", &["phi3", "phi4"], &["phi3"])
};

/// OLMo 2: norms only after each part, q and k normalised over all heads together.
/// Source: transformers `Olmo2Config`.
pub const OLMO2: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::CLASS },
    adjust: |description, _| {
        description.normalize_outputs(QkNorm::Whole);
        Ok(())
    },
    parse: |family, reader| {
        // llama.cpp's converter writes OLMo 3 under this name.
        let is_olmo3 = reader.is_gguf() && reader.window()?.is_some_and(|window| window > 0);
        let family = if is_olmo3 { &sliding_families::OLMO3 } else { family };
        family.dense(family.defaults, reader)
    },
    ..Family::new("olmo2", &["olmo2"], &["olmo2"])
};

/// Seed-OSS: a Llama with biases on q, k and v.
/// Source: transformers `SeedOssConfig`; llama.cpp's converter for the names in GGUF.
pub const SEED_OSS: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 524_288,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames::POST_ATTENTION,
    ..Family::new("seed-oss", &["seed_oss"], &["seed_oss"])
};

/// ERNIE 4.5, dense: a Llama whose heads are rotated in pairs of neighbours, in both formats.
/// Source: transformers `Ernie4_5Config`; llama.cpp's `ernie4_5` for GGUF.
pub const ERNIE4_5: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        context_length: 131_072,
        rope_theta: 500_000.0,
        norm_eps: 1e-5,
        tied: Some(true),
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [true; 2],
    ..Family::new("ernie4.5", &["ernie4_5"], &["ernie4_5"])
};

/// Arcee's AFM: a Llama whose feed-forward parts are two matrices with a squared ReLU between them.
/// Source: transformers `ArceeConfig`; llama.cpp's `arcee` for GGUF.
pub const ARCEE: Family = Family {
    defaults: ConfigDefaults {
        context_length: 4096,
        norm_eps: 1e-5,
        activation: Activation::SquaredRelu,
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [false, true],
    adjust: |description, _| {
        description.networks_mut().for_each(|(_, network)| network.is_gated = false);
        Ok(())
    },
    ..Family::new("arcee", &["arcee"], &["arcee"])
};

/// Hunyuan, dense: a Llama in which q and k are normalised per head after the rotary embedding.
/// Source: transformers `HunYuanDenseV1Config`; llama.cpp's `hunyuan-dense` for GGUF.
pub const HUNYUAN_DENSE: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::CLASS },
    norms: NormNames {
        qk: [["self_attn.query_layernorm", "attn_q_norm"], ["self_attn.key_layernorm", "attn_k_norm"]],
        ..NormNames::LLAMA
    },
    qk_norm: QkNorm::PerHeadAfterRope,
    ..Family::new("hunyuan-dense", &["hunyuan_v1_dense"], &["hunyuan-dense"])
};

/// GLM-4-0414 and GLM-Z1: norms around each part, gate and up in one matrix, the first half of each head rotated in pairs of
/// neighbours. Source: transformers `Glm4Config`; llama.cpp's `glm4` for GGUF.
pub const GLM4: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(2),
        head_dim: Some(128),
        context_length: 131_072,
        norm_eps: 1.5625e-7,
        rotated: 0.5,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames {
        post_mixer: ["post_self_attn_layernorm", "post_attention_norm"],
        post_mlp: ["post_mlp_layernorm", "post_ffw_norm"],
        ..NormNames::LLAMA
    },
    adjust: |description, reader| {
        // llama.cpp's converter splits the pairs of models that also read images.
        description.naming.interleaved_qk = reader.is_absent("rope.dimension_sections");
        if !description.naming.interleaved_qk {
            set_sections(&mut description.config.ropes[0], reader, GLM_SECTIONS, false)?;
        }
        description.config.layers.iter_mut().for_each(|layer| layer.post_norms = true);
        description.leave_prediction_out(reader, "num_nextn_predict_layers")
    },
    ..Family::new("glm4", &["glm4"], &["glm4"])
};

/// Sections of GLM-4.1V's M-RoPE.
const GLM_SECTIONS: [usize; 3] = [8, 12, 12];

/// GLM-4.1V, text: GLM-4 with M-RoPE. Source: transformers `Glm4vTextConfig`. As GGUF it is published as `glm4`.
pub const GLM4V: Family = Family {
    name: "glm4v",
    model_types: &["glm4v", "glm4v_text", "glm46v"],
    gguf_names: &[],
    defaults: ConfigDefaults { head_dim: None, norm_eps: 1e-5, context_length: 32_768, ..GLM4.defaults },
    adjust: |description, reader| {
        (GLM4.adjust)(description, reader)?;
        set_sections(&mut description.config.ropes[0], reader, GLM_SECTIONS, false)
    },
    ..GLM4
};

/// Granite 3, dense: a Llama with multipliers on embeddings, scores, residuals and logits.
/// Source: transformers `GraniteConfig`.
pub const GRANITE: Family = Family {
    interleaved_qk: [false, true],
    adjust: set_multipliers,
    ..Family::new("granite", &["granite"], &["granite"])
};

/// Sets the multipliers of all Granite models.
pub fn set_multipliers(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
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

/// Ministral 3 and Devstral Small 2: Mistral with YaRN and queries that grow with the position.
/// Sources: transformers `Ministral3Config`, `get_llama_4_attn_scale`; llama.cpp's `mistral3` for GGUF.
pub const MINISTRAL3: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 262_144,
        norm_eps: 1e-5,
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [false, true],
    adjust: |description, reader| {
        description.slide(reader.window()?, |_| true);
        set_gguf_magnitude(description, reader)?;
        let temperature = temperature(description, reader)?;
        description.config.attentions_mut().for_each(|(_, attention)| attention.temperature = temperature);
        Ok(())
    },
    ..Family::new("ministral3", &["ministral3", "mistral3"], &["mistral3"])
};

/// Divides YaRN's magnitude by that for `mscale_all_dim`, which llama.cpp's converter writes as the logarithm's factor;
/// `mscale` is 1 in all published models.
fn set_gguf_magnitude(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let log_factor = match reader.is_gguf() {
        true => reader.number("rope.scaling.yarn_log_multiplier")?.filter(|factor| *factor != 0.0),
        false => None,
    };
    for rope in &mut description.config.ropes {
        if let (RopeScaling::Yarn { factor, attention_factor, .. }, Some(log_factor)) =
            (&mut rope.scaling, log_factor)
        {
            *attention_factor = Some(yarn_magnitude(*factor, 1.0) / yarn_magnitude(*factor, log_factor));
        }
    }
    Ok(())
}

/// Returns the growth of queries: its interval is the context before YaRN.
pub fn temperature(
    description: &Description,
    reader: &ConfigReader,
) -> LoadResult<Option<AttentionTemperature>> {
    const SCALE: &str = "llama_4_scaling_beta";
    let scale = match reader.is_gguf() {
        true => reader.number("attention.temperature_scale")?,
        false => parameter(reader, SCALE)?,
    };
    let Some(scale) = scale.filter(|scale| *scale != 0.0) else { return Ok(None) };
    match description.config.ropes.first().map(|rope| &rope.scaling) {
        Some(RopeScaling::Yarn { original_context, .. }) => {
            Ok(Some(AttentionTemperature { scale, interval: *original_context }))
        }
        _ => {
            let key = reader.pick(SCALE, "attention.temperature_scale");
            Err(reader.error(key, "needs the context before YaRN, which the file does not give"))
        }
    }
}

/// Apertus: a Llama with norms on the heads of q and k, whose feed-forward parts are two matrices with an activation
/// between them that each layer has learned (xIELU). Source: transformers `ApertusConfig`; llama.cpp's `apertus` for GGUF.
pub const APERTUS: Family = Family {
    defaults: ConfigDefaults {
        context_length: 65_536,
        norm_eps: 1e-5,
        rope_theta: 12_000_000.0,
        tied: Some(false),
        // Hugging Face's form has the parameters as tensors, from which the decoder takes them.
        activation: Activation::Xielu { positive: LN_2, negative: LN_2, slope: 0.0, limit: 0.0 },
        ..ConfigDefaults::CLASS
    },
    norms: NormNames {
        pre_mixer: ["attention_layernorm", "attn_norm"],
        pre_mlp: ["feedforward_layernorm", "ffn_norm"],
        ..NormNames::LLAMA
    },
    qk_norm: QkNorm::PerHead,
    adjust: apertus,
    ..Family::new("apertus", &["apertus"], &["apertus"])
};

/// GGUF's lists of each layer's parameters, in the order of [`Activation::xielu`].
const GGUF_KEYS: [&str; 4] = ["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"];

fn apertus(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    let keys = if reader.is_gguf() { &GGUF_KEYS[..] } else { &[] };
    let lists = keys.iter().map(|key| parameters(reader, key, num_layers));
    let lists = lists.collect::<Result<Vec<_>, _>>()?;
    for (layer, network) in description.networks_mut() {
        network.is_gated = false;
        if let [p, n, beta, eps] = &lists[..] {
            network.activation = Activation::xielu([p, n, beta, eps].map(|list| list[layer]));
        }
    }
    Ok(())
}

/// Parses a parameter of each layer, from a list or one number for all.
fn parameters(reader: &ConfigReader, key: &str, num_layers: usize) -> LoadResult<Vec<f32>> {
    let list = match reader.value(key).map(|value| value.as_f64()) {
        Some(Some(number)) => vec![number; num_layers],
        _ => {
            let list = reader.list(key, num_layers, &format!("{num_layers} numbers"), Value::as_f64)?;
            list.ok_or_else(|| reader.error(key, "is missing"))?
        }
    };
    Ok(list.into_iter().map(|number| number as f32).collect())
}
