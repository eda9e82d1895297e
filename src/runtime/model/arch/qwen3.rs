//! Qwen 3, dense: no biases, q and k normalised per head, heads wider than hidden_size / heads.
//! Source: transformers `Qwen3Config`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family, qwen2};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::QkNorm;

pub const FAMILY: Family =
    Family { name: "qwen3", model_types: &["qwen3"], gguf_names: &["qwen3"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults =
        ConfigDefaults { head_dim: (!reader.is_gguf()).then_some(128), ..ConfigDefaults::default() };
    let mut description = dense("qwen3", reader, defaults)?;
    qwen2::slide_upper_layers(&mut description, reader)?;
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
    }
    Ok(description)
}
