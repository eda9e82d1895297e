//! Arcee's AFM: a Llama whose feed-forward parts are two matrices with a squared ReLU between them.
//! Source: transformers `ArceeConfig`; llama.cpp's `arcee` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::Activation;

pub const FAMILY: Family =
    Family { name: "arcee", model_types: &["arcee"], gguf_names: &["arcee"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
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
