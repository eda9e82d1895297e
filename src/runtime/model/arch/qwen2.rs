//! Qwen 1.5, 2 and 2.5: a Llama with biases on q, k and v; upper layers may have a sliding window.
//! Source: transformers `Qwen2Config`.

use super::dense::{Defaults, dense};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "qwen2", model_types: &["qwen2"], gguf_names: &["qwen2"], describe };

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let mut description = dense("qwen2", facts, Defaults::default())?;
    slide_upper_layers(&mut description, facts)?;
    Ok(description)
}

/// `use_sliding_window` turns windows on, for the layers that `layer_types` names or those from `max_window_layers` on.
pub fn slide_upper_layers(description: &mut Description, facts: &Facts) -> Result<(), LoadError> {
    if facts.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = facts.count("sliding_window")?.filter(|window| *window > 0);
    let sliding = facts.sliding_layers(description.config.layers.len())?;
    let first = facts.count("max_window_layers")?.unwrap_or(28);
    description.slide(window, |layer| sliding.as_ref().map_or(layer >= first, |sliding| sliding[layer]));
    Ok(())
}
