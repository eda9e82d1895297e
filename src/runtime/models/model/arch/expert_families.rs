//! Families with experts that differ from a Llama in few other facts, each with its source.

use super::deepseek::{self, ExpertFacts, SharedNetwork};
use super::dense::ConfigDefaults;
use super::dense_families::{QWEN3, QWEN3_VL_SECTIONS, slide_upper_layers};
use super::experts::{ExpertKeys, experts, with_shared};
use super::rope::set_sections;
use super::{ConfigReader, Description, Family, sliding_families};
use crate::model::config::{
    Activation, ExpertWeights, ExpertsConfig, FeedForwardConfig, MlpConfig, NormNames, PartNames, QkNorm,
    RopeScaling,
};
use llmctl_base::error::LoadResult;

/// Mixtral: a Llama with experts in every layer. As GGUF it is published as `llama` with an `expert_count`.
/// Source: transformers `MixtralConfig`; llama.cpp for what GGUF fixes: weights that sum to 1.
pub const MIXTRAL: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        context_length: 131_072,
        rope_theta: 1e6,
        norm_eps: 1e-5,
        experts: true,
        ..ConfigDefaults::CLASS
    },
    adjust: |description, reader| {
        description.replace_by_mixtral(reader)?;
        description.slide(reader.window()?, |_| true);
        Ok(())
    },
    ..Family::new("mixtral", &["mixtral"], &[])
};

/// OLMoE: experts in every layer, q and k normalised over all heads together.
/// Source: transformers `OlmoeConfig`; llama.cpp for what GGUF fixes: weights that do not sum to 1.
pub const OLMOE: Family = Family {
    defaults: ConfigDefaults { context_length: 4096, norm_eps: 1e-5, experts: true, ..ConfigDefaults::CLASS },
    qk_norm: QkNorm::Whole,
    adjust: |description, reader| {
        const CLIP: &str = "clip_qkv";
        const KEYS: ExpertKeys = ExpertKeys { intermediate_size: "intermediate_size", ..ExpertKeys::QWEN };
        if reader.value(CLIP).is_some() {
            return Err(reader.error(CLIP, "limits on q, k and v are not supported"));
        }
        let weights = ExpertWeights::softmax(reader.flag("norm_topk_prob")? == Some(true));
        description.replace_by_experts(reader, &KEYS, weights, |_| true)
    },
    ..Family::new("olmoe", &["olmoe"], &["olmoe"])
};

/// Qwen 3 with experts: Qwen 3's attention, and in most layers experts instead of the one network.
/// Source: transformers `Qwen3MoeConfig`; llama.cpp for what GGUF fixes: experts in every layer, weights that sum to 1.
pub const QWEN3_MOE: Family = Family {
    name: "qwen3-moe",
    model_types: &["qwen3_moe"],
    gguf_names: &["qwen3moe"],
    defaults: ConfigDefaults { experts: true, ..QWEN3.defaults },
    adjust: qwen3_moe,
    ..QWEN3
};

fn qwen3_moe(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    slide_upper_layers(description, reader)?;
    let sum_to_one = reader.is_gguf() || reader.flag("norm_topk_prob")?.unwrap_or(false);
    let step = reader.count("decoder_sparse_step")?.unwrap_or(1);
    let dense = reader.listed_layers("mlp_only_layers")?.unwrap_or_default();
    let is_sparse = |layer: usize| step > 0 && (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    description.replace_by_experts(reader, &ExpertKeys::QWEN, ExpertWeights::softmax(sum_to_one), is_sparse)
}

/// Qwen 3 VL with experts, text; see [`QWEN3_VL`](super::dense_families::QWEN3_VL). Sources: transformers
/// `Qwen3VLMoeTextConfig`; llama.cpp's `qwen3vlmoe` for GGUF.
pub const QWEN3_VL_MOE: Family = Family {
    name: "qwen3-vl-moe",
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    gguf_names: &["qwen3vlmoe"],
    adjust: |description, reader| {
        qwen3_moe(description, reader)?;
        // The class has no `norm_topk_prob`.
        description.experts_mut().for_each(|experts| experts.weights = ExpertWeights::OfUsed);
        set_sections(&mut description.config.ropes[0], reader, QWEN3_VL_SECTIONS, true)
    },
    ..QWEN3_MOE
};

/// MiniMax M2: experts in every layer, weighed by sigmoids with a bias for their choice; q and k normalised over all heads
/// together, and half-rotated. Source: transformers `MiniMaxM2Config`; llama.cpp's `minimax-m2` for GGUF.
pub const MINIMAX_M2: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 196_608,
        rope_theta: 5e6,
        experts: true,
        ..ConfigDefaults::CLASS
    },
    parts: PartNames {
        expert_bias: ["block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::MIXTRAL
    },
    qk_norm: QkNorm::Whole,
    adjust: |description, reader| {
        let weights = ExpertWeights::SigmoidOfUsed;
        description.replace_by_experts(reader, &ExpertKeys::LOCAL, weights, |_| true)?;
        description.experts_mut().for_each(|experts| experts.has_bias = true);
        Ok(())
    },
    parse: |family, reader| {
        let rotated = rotated_fraction(reader)?;
        family.dense(ConfigDefaults { rotated, ..family.defaults }, reader)
    },
    ..Family::new("minimax-m2", &["minimax_m2"], &["minimax-m2"])
};

/// Returns the rotated fraction of a head, of which published files give the values: `rotary_dim`.
pub fn rotated_fraction(reader: &ConfigReader) -> LoadResult<f32> {
    match (reader.count("rotary_dim")?, reader.count("head_dim")?.unwrap_or(128)) {
        (Some(rotated), head_dim) if head_dim > 0 => Ok(rotated as f32 / head_dim as f32),
        _ => Ok(1.0),
    }
}

/// GLM-4.5 and 4.6: a Llama with biases on q, k and v and half-rotated heads; the first layers are dense, the others have
/// experts as DeepSeek V3 does. Source: transformers `Glm4MoeConfig`; llama.cpp's `glm4moe` for GGUF.
pub const GLM4_MOE: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        context_length: 131_072,
        norm_eps: 1e-5,
        rotated: 0.5,
        experts: true,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames::POST_ATTENTION,
    adjust: |description, reader| {
        description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
        deepseek::set_experts(description, reader, &ExpertFacts::DEEPSEEK)?;
        description.normalize_qk(if normalizes_qk(reader)? { QkNorm::PerHead } else { QkNorm::None });
        Ok(())
    },
    ..Family::new("glm4-moe", &["glm4_moe"], &["glm4moe"])
};

/// Returns whether q and k are normalised. GGUF tells by its tensors.
fn normalizes_qk(reader: &ConfigReader) -> LoadResult<bool> {
    match reader.is_gguf() {
        true => Ok(reader.value("blk.0.attn_q_norm.weight").is_some()),
        false => Ok(reader.flag("use_qk_norm")? == Some(true)),
    }
}

/// Hy3: a Llama with norms on the heads of q and k; the first layer is dense, the others have experts weighed by sigmoids.
/// Source: transformers `HYV3Config`; llama.cpp's `hy_v3` for GGUF.
pub const HY3: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 131_072,
        rope_theta: 11_158_840.0,
        norm_eps: 1e-5,
        experts: true,
        ..ConfigDefaults::CLASS
    },
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        const FACTS: ExpertFacts = ExpertFacts {
            shared: [SharedNetwork::Count("num_shared_experts", 1), SharedNetwork::GGUF_WIDTH],
            scale: "router_scaling_factor",
            parts: PartNames {
                mlp_beside_experts: [
                    ["mlp.shared_mlp.gate_proj", "ffn_gate_shexp"],
                    ["mlp.shared_mlp.up_proj", "ffn_up_shexp"],
                    ["mlp.shared_mlp.down_proj", "ffn_down_shexp"],
                ],
                expert_bias: ["mlp.expert_bias", "exp_probs_b"],
                ..ROUTER_MODULE
            },
            ..ExpertFacts::NUMBERED
        };
        description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
        deepseek::set_experts(description, reader, &FACTS)
    },
    ..Family::new("hy3", &["hy_v3"], &["hy_v3"])
};

/// Names of a router that is a module of its own (Hy3, AFMoE).
pub const ROUTER_MODULE: PartNames = PartNames {
    router: ["mlp.router.gate", "ffn_gate_inp"],
    expert_bias: ["mlp.expert_bias", "exp_probs_b.bias"],
    ..PartNames::SHARED_EXPERTS
};

/// K-EXAONE: a sliding window and positions on three of four layers, neither on the others, norms on the heads of q and k, and
/// experts as DeepSeek V3 has them. Source: transformers `ExaoneMoeConfig`; llama.cpp's `exaone-moe` for GGUF.
pub const EXAONE_MOE: Family = Family {
    defaults: ConfigDefaults { norm_eps: 1e-5, experts: true, ..ConfigDefaults::CLASS },
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        const FACTS: ExpertFacts = ExpertFacts {
            parts: PartNames {
                expert_bias: ["mlp.e_score_correction_bias", "exp_probs_b.bias"],
                ..PartNames::SHARED_EXPERTS
            },
            ..ExpertFacts::NUMBERED
        };
        description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
        sliding_families::slide_exaone(description, reader)?;
        deepseek::set_experts(description, reader, &FACTS)
    },
    ..Family::new("exaone-moe", &["exaone_moe"], &["exaone-moe"])
};

/// Ling and Ring 2 (Bailing MoE V2): a Llama with norms on the heads of q and k, which are half-rotated and one matrix with v;
/// the first layers are dense, the others have experts as DeepSeek V3 has them. Sources: llama.cpp's converter and its
/// `bailingmoe2`; transformers' `Glm4MoeConfig` describes the same function.
pub const BAILING_MOE2: Family = Family {
    defaults: ConfigDefaults {
        context_length: 16_384,
        rope_theta: 600_000.0,
        rotated: 0.5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames {
        qk: [["attention.query_layernorm", "attn_q_norm"], ["attention.key_layernorm", "attn_k_norm"]],
        ..NormNames::LLAMA
    },
    qk_norm: QkNorm::PerHead,
    adjust: |description, reader| {
        const FACTS: ExpertFacts = ExpertFacts {
            parts: PartNames {
                attention_fused: ["attention.query_key_value", "attn_qkv"],
                attention_output: ["attention.dense", "attn_output"],
                expert_bias: ["mlp.gate.expert_bias", "exp_probs_b.bias"],
                ..PartNames::SHARED_EXPERTS
            },
            ..ExpertFacts::NUMBERED
        };
        description.naming.embedding = "word_embeddings";
        description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
        deepseek::set_experts(description, reader, &FACTS)
    },
    ..Family::new("bailing-moe2", &["bailing_moe_v2"], &["bailingmoe2"])
};

/// ERNIE 4.5 with experts: softmax weights with a bias for the choice of experts, beside a shared network; the first layers
/// are dense. Source: transformers `Ernie4_5_MoeConfig`; llama.cpp's `ernie4_5-moe` for GGUF.
pub const ERNIE4_5_MOE: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(4),
        context_length: 131_072,
        rope_theta: 500_000.0,
        norm_eps: 1e-5,
        tied: Some(true),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    interleaved_qk: [true; 2],
    parts: PartNames {
        expert_bias: ["mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::SHARED_EXPERTS
    },
    adjust: |description, reader| {
        let num_layers = description.config.layers.len();
        let is_sparse = ernie_layers(reader, num_layers)?;
        description.replace_dense(is_sparse, |dense| ernie_part(reader, dense, num_layers - 1))
    },
    ..Family::new("ernie4.5-moe", &["ernie4_5_moe"], &["ernie4_5-moe"])
};

/// Parses a layer with experts. The shared ones are one network, whose width GGUF gives wrongly: it is read from the number
/// of experts in both formats.
fn ernie_part(reader: &ConfigReader, dense: MlpConfig, last_layer: usize) -> LoadResult<FeedForwardConfig> {
    const KEYS: ExpertKeys =
        ExpertKeys { count: "moe_num_experts", used: "moe_k", intermediate_size: "moe_intermediate_size" };
    let experts = experts(reader, &KEYS, &dense, ExpertWeights::OfUsed)?;
    // GGUF tells by its tensors.
    let bias = format!("blk.{last_layer}.exp_probs_b.bias");
    let has_bias = !reader.is_gguf() || reader.value(&bias).is_some();
    let shared_key = reader.pick("moe_num_shared_experts", "expert_shared_count");
    let shared = reader.count(shared_key)?.unwrap_or(if reader.is_gguf() { 0 } else { 2 });
    with_shared(reader, shared_key, shared, ExpertsConfig { has_bias, ..experts }, dense)
}

/// Returns which layers have experts: every `interval`th one between a first and a last.
fn ernie_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<impl Fn(usize) -> bool + use<>> {
    const LAST: &str = "moe_layer_end_index";
    let interval_key = reader.pick("moe_layer_interval", "interleave_moe_layer_step");
    let first_key = reader.pick("moe_layer_start_index", "leading_dense_block_count");
    let interval = reader.interval(interval_key, 1)?;
    let first = reader.count(first_key)?.unwrap_or(usize::from(!reader.is_gguf()));
    let last = match reader.value(LAST).and_then(|last| last.as_i64()) {
        None | Some(-1) => num_layers,
        Some(_) => reader.count(LAST)?.unwrap_or(num_layers),
    };
    Ok(move |layer: usize| (layer + 1).is_multiple_of(interval) && (first..=last).contains(&layer))
}

/// gpt-oss: experts in every layer, a window on every other one, learned sinks, biases everywhere, YaRN.
/// Source: transformers `GptOssConfig`; llama.cpp's converter for the names in GGUF.
pub const GPT_OSS: Family = Family {
    defaults: ConfigDefaults {
        head_dim: Some(64),
        hold_in_gguf: true,
        context_length: 131_072,
        rope_theta: 150_000.0,
        norm_eps: 1e-5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    norms: NormNames::POST_ATTENTION,
    parts: PartNames { router: ["mlp.router", "ffn_gate_inp"], ..PartNames::LLAMA },
    adjust: gpt_oss,
    ..Family::new("gpt-oss", &["gpt_oss"], &["gpt-oss"])
};

/// Reads the activation of gpt-oss and MiniMax M3.
pub fn clamped_swish(reader: &ConfigReader) -> LoadResult<Activation> {
    let alpha = reader.number("swiglu_alpha")?.unwrap_or(1.702);
    match reader.number("swiglu_limit")?.unwrap_or(7.0) {
        limit if limit >= 0.0 => Ok(Activation::ClampedSwish { alpha, limit }),
        limit => Err(reader.error("swiglu_limit", format!("{limit} is below 0"))),
    }
}

fn gpt_oss(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    description.naming.alternating_experts = !reader.is_gguf();
    for rope in &mut description.config.ropes {
        // As in the published config; GGUF lacks the key.
        if let (RopeScaling::Yarn { truncate, .. }, true) = (&mut rope.scaling, reader.is_gguf()) {
            *truncate = false;
        }
    }
    let activation = clamped_swish(reader)?;
    description.replace_by_experts(reader, &ExpertKeys::LOCAL, ExpertWeights::OfUsed, |_| true)?;
    description.experts_mut().for_each(|experts| experts.mlp.activation = activation);
    description.config.attentions_mut().for_each(|(_, attention)| attention.has_sinks = true);
    let slides = reader.sliding_or(description.config.layers.len(), |layer| layer.is_multiple_of(2))?;
    description.slide(Some(reader.window()?.unwrap_or(128)), |layer| slides[layer]);
    Ok(())
}
