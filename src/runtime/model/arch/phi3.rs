//! Phi-3, 3.5 and 4-mini: q, k, v in one matrix, gate and up in another, LongRoPE, partly rotated heads.
//! Source: transformers `Phi3Config`.

use super::dense::{ConfigDefaults, dense};
use super::rope::gguf_long_rope;
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "phi3", model_types: &["phi3", "phi4"], gguf_names: &["phi3"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, context_length: 4096, ..ConfigDefaults::default() };
    let mut description = dense("phi3", reader, defaults)?;
    let key = reader.pick("sliding_window", "attention.sliding_window");
    let window = reader.count(key)?.filter(|window| *window > 0);
    description.slide(window, |_| true);
    if reader.is_gguf()
        && let Some(scaling) = gguf_long_rope(reader)?
    {
        description.config.ropes[0].scaling = scaling;
    }
    Ok(description)
}
