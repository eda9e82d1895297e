//! SmolLM 3: a Llama in which every fourth layer has no positions.
//! Source: transformers `SmolLM3Config`; llama.cpp fixes the interval, which GGUF does not carry.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("smollm3", &["smollm3"], &["smollm3"], parse_config);

const NO_ROPE_INTERVAL: usize = 4;

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        context_length: 32_768,
        rope_theta: 2e6,
        tied: Some(true),
        ..ConfigDefaults::default()
    };
    let mut description = dense("smollm3", reader, defaults)?;
    description.naming.interleaved_qk = reader.is_gguf();
    let listed = rope_layers(reader, description.config.layers.len())?;
    let interval = match reader.count("no_rope_layer_interval")? {
        Some(0) => return Err(reader.error("no_rope_layer_interval", "0 is not a valid interval of layers")),
        given => given.unwrap_or(NO_ROPE_INTERVAL),
    };
    for (index, attention) in description.config.attentions_mut() {
        let has_rope = listed.as_ref().map_or(!(index + 1).is_multiple_of(interval), |listed| listed[index]);
        attention.rope = has_rope.then_some(0);
    }
    slide(&mut description, reader)?;
    Ok(description)
}

/// Applies `use_sliding_window`, which turns windows on for the layers in `layer_types`, or else for those without
/// positions.
fn slide(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    if reader.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let window = reader.count("sliding_window")?;
    let listed = reader.sliding_layers(description.config.layers.len())?;
    let without_rope: Vec<bool> =
        description.config.attentions().map(|attention| attention.rope.is_none()).collect();
    let sliding = listed.unwrap_or(without_rope);
    description.slide(window, |layer| sliding[layer]);
    Ok(())
}

/// Reads `no_rope_layers`: despite its name, 1 for layers that have rotary positions.
fn rope_layers(reader: &ConfigReader, num_layers: usize) -> Result<Option<Vec<bool>>, LoadError> {
    const KEY: &str = "no_rope_layers";
    let Some(value) = reader.value(KEY) else { return Ok(None) };
    let list = value.as_array().filter(|list| list.len() == num_layers);
    let list = list.ok_or_else(|| reader.error(KEY, format!("is not a list of {num_layers} layers")))?;
    let flags = list.iter().map(|flag| flag.as_u64().filter(|flag| *flag < 2).map(|flag| flag == 1));
    flags.collect::<Option<_>>().map(Some).ok_or_else(|| reader.error(KEY, "holds values other than 0 and 1"))
}
