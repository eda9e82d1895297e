//! Mistral 7B and its relatives: a Llama whose layers may all have a sliding window. As GGUF it is published as `llama`.
//! Source: transformers `MistralConfig`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "mistral", model_types: &["mistral"], gguf_names: &[], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("mistral", reader, ConfigDefaults::default())?;
    // The class's own window is the default; `null` means none.
    let window =
        if reader.is_absent("sliding_window") { Some(4096) } else { reader.count("sliding_window")? };
    let window = window.filter(|window| *window > 0);
    description.slide(window, |_| true);
    Ok(description)
}
