//! ERNIE 4.5, dense: a Llama whose heads are rotated in pairs of neighbours, in both formats.
//! Source: transformers `Ernie4_5Config`; llama.cpp's `ernie4_5` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "ernie4.5", model_types: &["ernie4_5"], gguf_names: &["ernie4_5"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
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
