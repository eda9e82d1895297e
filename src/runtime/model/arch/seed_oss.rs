//! Seed-OSS: a Llama with biases on q, k and v.
//! Source: transformers `SeedOssConfig`; llama.cpp's converter for the names in GGUF.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::NormNames;

pub const FAMILY: Family =
    Family { name: "seed-oss", model_types: &["seed_oss"], gguf_names: &["seed_oss"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
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
