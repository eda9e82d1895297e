//! Model families: each parses config.json or GGUF metadata into a [`Description`] that the decoder runs.
//!
//! To add a family: a row in one of the files of families, or a file of its own, and its line in [`FAMILIES`]. A row says in which
//! facts a family differs from a Llama, whose keys [`dense`] reads; [`experts`] reads what mixtures of experts share.

mod cohere;
mod config_reader;
mod deepseek;
mod dense;
mod experts;
pub(super) mod rope;
mod ssm;

mod dense_families;
mod expert_families;
mod falcon_h1;
mod gated_families;
mod gemma3n;
mod gemma4;
mod gemma4_assistant;
mod granite_hybrid;
mod kimi_linear;
mod lfm2;
pub mod mimo;
mod minimax_m3;
mod nemotron_h;
mod qwen3_5;
mod qwen4_exp;
mod sliding_families;
mod sparse_latent;
mod step;

pub use config_reader::{ConfigReader, ModelFormat};
#[cfg(feature = "candle-families")]
pub(super) use dense::{MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
pub use gemma4_assistant::{is_assistant, parse_assistant};

use super::config::{DecoderConfig, LayerConfig, Naming, NormNames, PartNames, QkNorm};
use dense::{ConfigDefaults, dense};
use llmctl_base::error::LoadResult;

/// The model described by a file: its shape, and the names of its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    pub config: DecoderConfig,
    pub naming: Naming,
    /// The layer of the block that predicts further tokens, if the family's blocks can be computed; the file may lack it.
    pub prediction: Option<LayerConfig>,
}

/// One family: its names in files, and the facts in which it differs from a Llama.
pub struct Family {
    /// Name in llmctl.
    pub name: &'static str,
    /// `model_type` values of config.json.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF.
    pub gguf_names: &'static [&'static str],
    /// The models that it covers, as docs/models.md lists them.
    pub published: &'static str,
    defaults: ConfigDefaults,
    norms: NormNames,
    parts: PartNames,
    qk_norm: QkNorm,
    /// True if rotary pairs of q and k lie side by side, in config.json's form and in GGUF's.
    interleaved_qk: [bool; 2],
    /// Sets the rest.
    adjust: fn(&mut Description, &ConfigReader) -> LoadResult<()>,
    parse: fn(&Family, &ConfigReader) -> LoadResult<Description>,
}

/// Every family that runs natively, with the names under which its models are published.
pub const FAMILIES: &[Family] = &[
    gated_families::AFMOE.published("Trinity (AFMoE)"),
    dense_families::APERTUS.published("Apertus"),
    dense_families::ARCEE.published("AFM (Arcee)"),
    kimi_linear::LING_FAMILY.published("Ling 3, Ling 2.5 and 2.6"),
    expert_families::BAILING_MOE2.published("Ling 2, Ring 2 (Bailing MoE V2)"),
    cohere::FAMILY.published("Command R7B, Command A"),
    cohere::MOE_FAMILY.published("Command A+, North Mini Code"),
    deepseek::V2_FAMILY.published("DeepSeek V2"),
    deepseek::V3_FAMILY.published("DeepSeek V3, V3.1 and R1, Kimi K2 (text)"),
    deepseek::GLM_FAMILY.published("GLM-4.7-Flash"),
    sparse_latent::DEEPSEEK_FAMILY.published("DeepSeek V3.2"),
    sparse_latent::GLM_FAMILY.published("GLM-5, 5.1 and 5.2"),
    dense_families::ERNIE4_5.published("ERNIE 4.5"),
    expert_families::ERNIE4_5_MOE.published("ERNIE 4.5 with experts"),
    sliding_families::EXAONE4.published("EXAONE 4"),
    expert_families::EXAONE_MOE.published("K-EXAONE"),
    falcon_h1::FAMILY.published("Falcon-H1"),
    sliding_families::GEMMA2.published("Gemma 2"),
    sliding_families::GEMMA3.published("Gemma 3"),
    gemma3n::FAMILY.published("Gemma 3n"),
    gemma4::FAMILY.published("Gemma 4"),
    dense_families::GLM4.published("GLM-4-0414, GLM-Z1"),
    dense_families::GLM4V.published("GLM-4.1V"),
    expert_families::GLM4_MOE.published("GLM-4.5 and 4.6"),
    expert_families::GPT_OSS.published("gpt-oss"),
    dense_families::GRANITE.published("Granite 3, Granite 4.1"),
    granite_hybrid::FAMILY.published("Granite 4 (hybrid)"),
    granite_hybrid::MOE_FAMILY.published("Granite 3 with experts"),
    dense_families::HUNYUAN_DENSE.published("Hunyuan, dense"),
    expert_families::HY3.published("Hy3"),
    kimi_linear::FAMILY.published("Kimi Linear"),
    gated_families::LAGUNA.published("Laguna XS and M"),
    lfm2::FAMILY.published("LFM2, LFM2.5"),
    lfm2::MOE_FAMILY.published("LFM2 and LFM2.5 with experts"),
    dense_families::LLAMA.published("Llama 2 and 3, SmolLM 1 and 2, Yi, TinyLlama"),
    mimo::FAMILY.published("MiMo V2 Flash, MiMo V2.5 (text)"),
    expert_families::MINIMAX_M2.published("MiniMax M2"),
    minimax_m3::FAMILY.published("MiniMax M3 (text)"),
    dense_families::MINISTRAL3.published("Ministral 3, Devstral Small 2"),
    dense_families::MISTRAL.published("Mistral 7B and Nemo"),
    deepseek::MISTRAL4_FAMILY.published("Mistral Small 4, Mistral Large 3"),
    expert_families::MIXTRAL.published("Mixtral"),
    gated_families::MUSE_GLIMMER.published("Muse Glimmer"),
    nemotron_h::FAMILY.published("Nemotron-H, Nemotron 3"),
    nemotron_h::MOE_FAMILY.published("Nemotron 3 Nano"),
    dense_families::OLMO2.published("OLMo 2"),
    sliding_families::OLMO3.published("OLMo 3"),
    expert_families::OLMOE.published("OLMoE"),
    dense_families::PHI3.published("Phi-3, 3.5 and 4"),
    dense_families::QWEN2.published("Qwen 1.5, 2 and 2.5"),
    dense_families::QWEN2_VL.published("Qwen 2 VL and 2.5 VL"),
    dense_families::QWEN3.published("Qwen 3"),
    qwen3_5::FAMILY.published("Qwen 3.5, Qwen 3.6, Qwen 3.8"),
    qwen3_5::MOE_FAMILY.published("Qwen 3.5, Qwen 3.6, Qwen 3.8, with experts"),
    expert_families::QWEN3_MOE.published("Qwen 3 with experts, Qwen3-Coder"),
    qwen3_5::NEXT_FAMILY.published("Qwen 3 Next, Qwen3-Coder-Next"),
    qwen4_exp::FAMILY.published("Qwen3.8-Flash-Next (text)"),
    dense_families::QWEN3_VL.published("Qwen 3 VL"),
    expert_families::QWEN3_VL_MOE.published("Qwen 3 VL with experts"),
    dense_families::SEED_OSS.published("Seed-OSS"),
    sliding_families::SMOLLM3.published("SmolLM 3"),
    step::FAMILY.published("Step 3.5 Flash, Step 3.7 Flash (text)"),
];

/// Returns the models of a family, by its name in llmctl; `None` if it is none of [`FAMILIES`].
pub fn published_as(family: &str) -> Option<&'static str> {
    FAMILIES.iter().find(|one| one.name == family).map(|family| family.published)
}

/// Parses the configuration with the model's native family; `None` if it has none.
///
/// # Errors
/// `LoadError::Malformed` naming a key that is missing or has a value out of range.
pub fn parse_config(reader: &ConfigReader) -> LoadResult<Option<Description>> {
    let (name, format) = (reader.architecture()?, reader.format());
    let family = FAMILIES.iter().find(|family| family.names(format).contains(&name.as_str()));
    family.map(|family| (family.parse)(family, reader)).transpose()
}

impl Family {
    /// A Llama under these names.
    const fn new(
        name: &'static str,
        model_types: &'static [&'static str],
        gguf_names: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            model_types,
            gguf_names,
            published: "",
            defaults: ConfigDefaults::CLASS,
            norms: NormNames::LLAMA,
            parts: PartNames::LLAMA,
            qk_norm: QkNorm::None,
            interleaved_qk: [false; 2],
            adjust: |_, _| Ok(()),
            parse: |family, reader| family.dense(family.defaults, reader),
        }
    }

    /// Returns the family with the names of its models.
    const fn published(mut self, models: &'static str) -> Self {
        self.published = models;
        self
    }

    /// Parses a Llama with the family's differences.
    fn dense(&self, defaults: ConfigDefaults, reader: &ConfigReader) -> LoadResult<Description> {
        let mut description = dense(self.name, reader, defaults)?;
        let naming = &mut description.naming;
        (naming.norms, naming.parts) = (self.norms, self.parts);
        naming.interleaved_qk = self.interleaved_qk[usize::from(reader.is_gguf())];
        description.normalize_qk(self.qk_norm);
        (self.adjust)(&mut description, reader)?;
        Ok(description)
    }

    /// Returns the names of the family in files of this format.
    pub fn names(&self, format: ModelFormat) -> &'static [&'static str] {
        match format {
            ModelFormat::HuggingFace => self.model_types,
            ModelFormat::Gguf => self.gguf_names,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::MixerConfig;
    use serde_json::json;

    fn description(config: serde_json::Value) -> LoadResult<Description> {
        let description = parse_config(&ConfigReader::hugging_face("config.json".into(), config))?;
        Ok(description.expect("a native family"))
    }

    fn small(model_type: &str) -> serde_json::Value {
        json!({
            "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
        })
    }

    #[test]
    fn rope_is_read_in_the_forms_before_and_after_transformers_5() {
        let mut old = small("llama");
        old["rope_theta"] = json!(500000.0);
        old["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let mut new = small("llama");
        new["rope_parameters"] = json!({"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let old = description(old).expect("old form");
        assert_eq!(old.config.ropes[0].theta, 500000.0);
        assert_eq!(old, description(new).expect("new form"));
    }

    #[test]
    fn a_multimodal_config_is_read_from_its_text_part() {
        let mut text = small("gemma3_text");
        text.as_object_mut().expect("object").remove("num_attention_heads");
        let nested =
            json!({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}});
        let config = description(nested).expect("nested").config;
        assert_eq!((config.hidden_size, config.attentions().next().map(|a| a.num_heads)), (64, Some(8)));
    }

    #[test]
    fn values_that_cannot_be_are_refused_by_name() {
        for (key, value) in [
            ("num_attention_heads", json!(0)),
            ("hidden_size", json!(-4)),
            ("num_key_value_heads", json!(3)),
            ("num_hidden_layers", json!(1e9)),
            ("vocab_size", json!("many")),
            ("rope_scaling", json!({"rope_type": "spiral"})),
            ("hidden_act", json!("relu")),
        ] {
            let mut config = small("llama");
            config[key] = value;
            let error = description(config).expect_err(key).to_string();
            assert!(error.contains(key), "{error} names {key}");
        }
    }

    #[test]
    fn facts_of_single_families_are_checked_by_name() {
        let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "num_experts_per_token": 2,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "linear_attn_config":
            {"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3]},
            "head_dim": 24, "short_conv_kernel_size": 4, "n_routed_experts": 4});
        let with = |model_type: &str, key: &str, value: &serde_json::Value| {
            let mut config = small(model_type);
            config.as_object_mut().expect("object").extend(experts.as_object().expect("object").clone());
            config[key] = value.clone();
            description(config)
        };
        for (model_type, key, value) in [
            ("laguna", "moe_router_logit_softcapping", json!(30.0)),
            ("laguna", "num_attention_heads_per_layer", json!([4, 4, 3, 4])),
            ("laguna", "num_attention_heads_per_layer", json!([4])),
            ("muse_glimmer", "layer_rope_theta", json!([0])),
            ("step3p5", "attention_other_setting", json!({"num_attention_heads": -1})),
            ("step3p5", "attention_other_setting", json!({"head_dim": 8})),
            ("step3p5", "moe_layers_enum", json!("1,x")),
            ("step3p5", "swiglu_limits", json!([1.0])),
            ("step3p5", "swiglu_limits_shared", json!([0, 0, -1, 0])),
            ("bailing_hybrid", "use_mla_nope", json!(true)),
            ("bailing_hybrid", "kda_lower_bound", json!(1.0)),
            ("bailing_hybrid", "layer_group_size", json!(0)),
            ("mimo_v2_flash", "attention_projection_layout", json!("fused_kv")),
            ("mimo_v2", "attention_projection_layout", json!("interleaved")),
            ("mimo_v2_flash", "swa_head_dim", json!(8)),
            ("mimo_v2_flash", "add_full_attention_sink_bias", json!(true)),
            ("mimo_v2_flash", "swa_num_key_value_heads", json!(3)),
            ("mimo_v2_flash", "v_head_dim", json!(25)),
            ("cohere2_moe", "shared_expert_combination_strategy", json!("least")),
            ("cohere2_moe", "expert_selection_fn", json!("topk")),
            ("cohere2", "sliding_window_pattern", json!(0)),
            ("kimi_linear", "num_expert_group", json!(2)),
            ("kimi_linear", "linear_attn_config", json!({"kda_layers": 3})),
            ("kimi_linear", "linear_attn_config", json!({"num_heads": 1u64 << 40, "kda_layers": []})),
        ] {
            with(model_type, "x", &json!(0)).unwrap_or_else(|error| panic!("{model_type}: {error}"));
            let error = with(model_type, key, &value).expect_err(key).to_string();
            let named = if key == "linear_attn_config" { "linear_" } else { key };
            assert!(error.contains(named), "{error} names {key}");
        }
    }

    #[test]
    fn published_keys_of_step_mean_what_the_class_makes_of_them() {
        let mut published = small("step3p5");
        let keys = published.as_object_mut().expect("object");
        keys.remove("num_key_value_heads");
        keys.extend(
            json!({
                "head_dim": 24, "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 8,
                "share_expert_dim": 8, "attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1, 3",
                "num_nextn_predict_layers": 1, "sliding_window": 32, "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention",
                    "sliding_attention"],
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0], "swiglu_limits": [0, 0, 0, 7, 0],
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            })
            .as_object()
            .expect("object")
            .clone(),
        );
        let mut saved = small("step3p5");
        saved.as_object_mut().expect("object").extend(
            json!({
                "head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                "share_expert_dim": 8, "num_sliding_attention_heads": 6, "num_nextn_predict_layers": 1,
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "sliding_window": 32,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "swiglu_limits": [null, null, null, 7.0], "rope_parameters": {
                    "full_attention":
                        {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
                },
            })
            .as_object()
            .expect("object")
            .clone(),
        );
        let step = description(published).expect("published");
        assert_eq!(step, description(saved).expect("saved"));
        let heads: Vec<_> = step.config.attentions().map(|attention| attention.num_heads).collect();
        let sparse = |layer: &LayerConfig| layer.feed_forward.experts.is_some();
        let sparse: Vec<_> = step.config.layers.iter().map(sparse).collect();
        assert_eq!((heads, sparse), (vec![4, 6, 6, 4], vec![false, true, false, true]));
    }

    #[test]
    fn lightning_attention_has_the_name_of_ling_3_and_rates_of_its_own() {
        let mut ling = small("bailing_hybrid");
        ling.as_object_mut().expect("object").extend(
            json!({"num_hidden_layers": 5, "num_attention_heads": 6, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
                "layer_group_size": 5, "group_norm_size": 2, "partial_rotary_factor": 0.5, "use_qk_norm": true})
            .as_object()
            .expect("object")
            .clone(),
        );
        let config = description(ling.clone()).expect("Ling 2.6").config;
        let fading = |layer: usize| match &config.layers[layer].mixer {
            MixerConfig::Lightning(lightning) => lightning.fading.clone(),
            other => panic!("{other:?}"),
        };
        let rates = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125];
        for (layer, factor) in [(0, 1.00001), (1, 0.75001), (3, 0.25001)] {
            let expected = rates.map(|rate: f32| rate * factor);
            assert!(
                fading(layer).iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-7),
                "{:?}",
                fading(layer)
            );
        }
        assert!(matches!(config.layers[4].mixer, MixerConfig::Latent(_)) && config.ropes[1].dim == 8);
        for (key, value) in [
            ("linear_silu", json!(true)),
            ("linear_rope", json!(false)),
            ("group_norm_size", json!(4)),
            ("partial_rotary_factor", json!(2.0)),
        ] {
            let mut wrong = ling.clone();
            wrong[key] = value;
            let error = description(wrong).expect_err(key).to_string();
            assert!(error.contains(key), "{error} names {key}");
        }
    }
}
