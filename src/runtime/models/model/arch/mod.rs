//! Model families: each parses config.json or GGUF metadata into a [`Description`] that the decoder runs.
//!
//! To add a family: a file here that describes it, or a few lines in [`dense_families`], and its line in
//! [`FAMILIES`]. All start from [`dense`], which reads what all decoders share, and change the fields in
//! which they differ; [`experts`] reads what mixtures of experts share.

mod config_reader;
mod deepseek;
mod dense;
mod experts;
pub(super) mod rope;
mod ssm;

mod apertus;
mod dense_families;
mod ernie4_5_moe;
mod exaone4;
mod falcon_h1;
mod gemma2;
mod gemma3;
mod gemma3n;
mod gemma4;
mod gemma4_assistant;
mod glm4_moe;
mod gpt_oss;
mod granite_hybrid;
mod lfm2;
mod lfm2_moe;
mod minimax_m2;
mod ministral3;
mod mixtral;
mod nemotron_h;
mod olmo3;
mod olmoe;
mod qwen3_5;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod smollm3;

pub use config_reader::{ConfigReader, ModelFormat};
#[cfg(feature = "candle-families")]
pub(super) use dense::{MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
pub use gemma4_assistant::{is_assistant, parse_assistant};

use super::config::{DecoderConfig, LayerConfig, Naming};
use llmctl_base::error::LoadError;

/// The model described by a file: its shape, and the names of its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    pub config: DecoderConfig,
    pub naming: Naming,
    /// The layer of the block that predicts further tokens, if the family's blocks can be computed; the file may lack it.
    pub prediction: Option<LayerConfig>,
}

/// One family and its names in files.
pub struct Family {
    /// Name in llmctl.
    pub name: &'static str,
    /// `model_type` values of config.json.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF.
    pub gguf_names: &'static [&'static str],
    pub parse_config: fn(&ConfigReader) -> Result<Description, LoadError>,
}

/// Every family that runs natively.
pub const FAMILIES: &[Family] = &[
    apertus::FAMILY,
    dense_families::ARCEE,
    deepseek::V2_FAMILY,
    deepseek::V3_FAMILY,
    deepseek::GLM_FAMILY,
    dense_families::ERNIE4_5,
    ernie4_5_moe::FAMILY,
    exaone4::FAMILY,
    falcon_h1::FAMILY,
    gemma2::FAMILY,
    gemma3::FAMILY,
    gemma3n::FAMILY,
    gemma4::FAMILY,
    dense_families::GLM4,
    glm4_moe::FAMILY,
    gpt_oss::FAMILY,
    dense_families::GRANITE,
    granite_hybrid::FAMILY,
    granite_hybrid::MOE_FAMILY,
    dense_families::HUNYUAN_DENSE,
    lfm2::FAMILY,
    lfm2_moe::FAMILY,
    dense_families::LLAMA,
    minimax_m2::FAMILY,
    ministral3::FAMILY,
    dense_families::MISTRAL,
    mixtral::FAMILY,
    nemotron_h::FAMILY,
    nemotron_h::MOE_FAMILY,
    dense_families::OLMO2,
    olmo3::FAMILY,
    olmoe::FAMILY,
    dense_families::PHI3,
    dense_families::QWEN2,
    dense_families::QWEN3,
    qwen3_5::FAMILY,
    qwen3_5::MOE_FAMILY,
    qwen3_moe::FAMILY,
    qwen3_next::FAMILY,
    qwen3_vl::FAMILY,
    qwen3_vl::MOE_FAMILY,
    dense_families::SEED_OSS,
    smollm3::FAMILY,
];

/// Parses the configuration with the model's native family; `None` if it has none.
///
/// # Errors
/// [`LoadError::Malformed`] naming a key that is missing or has a value out of range.
pub fn parse_config(reader: &ConfigReader) -> Result<Option<Description>, LoadError> {
    let (name, format) = (reader.architecture()?, reader.format());
    let family = FAMILIES.iter().find(|family| family.names(format).contains(&name.as_str()));
    family.map(|family| (family.parse_config)(reader)).transpose()
}

impl Family {
    const fn new(
        name: &'static str,
        model_types: &'static [&'static str],
        gguf_names: &'static [&'static str],
        parse_config: fn(&ConfigReader) -> Result<Description, LoadError>,
    ) -> Self {
        Self { name, model_types, gguf_names, parse_config }
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
    use serde_json::json;

    fn description(config: serde_json::Value) -> Result<Description, LoadError> {
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
}
