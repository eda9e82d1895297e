//! Qwen 1.5, 2 and 2.5: a Llama with biases on q, k and v; upper layers may have a sliding window.
//! Source: transformers `Qwen2Config`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "qwen2", model_types: &["qwen2"], gguf_names: &["qwen2"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("qwen2", reader, ConfigDefaults::default())?;
    slide_upper_layers(&mut description, reader)?;
    Ok(description)
}

/// `use_sliding_window` turns windows on, for the layers that `layer_types` names or those from `max_window_layers` on.
pub fn slide_upper_layers(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    if reader.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = reader.count("sliding_window")?.filter(|window| *window > 0);
    let sliding = reader.sliding_layers(description.config.layers.len())?;
    let first = reader.count("max_window_layers")?.unwrap_or(28);
    description.slide(window, |layer| sliding.as_ref().map_or(layer >= first, |sliding| sliding[layer]));
    Ok(())
}
