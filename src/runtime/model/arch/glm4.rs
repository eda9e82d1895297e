//! GLM-4-0414 and GLM-Z1: norms around each part, gate and up in one matrix, the first half of each head rotated in pairs of
//! neighbours. Source: transformers `Glm4Config`; llama.cpp's `glm4` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::NormNames;

pub const FAMILY: Family =
    Family { name: "glm4", model_types: &["glm4"], gguf_names: &["glm4"], parse_config };

const NORMS: NormNames = NormNames {
    post_mixer: ["post_self_attn_layernorm", "post_attention_norm"],
    post_mlp: ["post_mlp_layernorm", "post_ffw_norm"],
    ..NormNames::LLAMA
};

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(2),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 131_072,
        norm_eps: 1.5625e-7,
        rotated: 0.5,
        ..ConfigDefaults::default()
    };
    let mut description = dense("glm4", reader, defaults)?;
    description.naming.norms = NORMS;
    // llama.cpp's converter splits the pairs of models that also read images.
    description.naming.interleaved_qk = reader.is_absent("rope.dimension_sections");
    for layer in &mut description.config.layers {
        layer.post_norms = true;
    }
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    Ok(description)
}
