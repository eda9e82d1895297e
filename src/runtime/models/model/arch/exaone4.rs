//! EXAONE 4: norms only after each part, q and k normalised per head. The larger one has a sliding window and
//! positions on three of four layers, and neither on the others. Source: transformers `Exaone4Config`.

use serde_json::Value;

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::model::config::QkNorm;
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("exaone4", &["exaone4"], &["exaone4"], parse_config);

/// Every fourth layer sees the whole context by default.
const PATTERN: usize = 4;

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("exaone4", reader, defaults)?;
    description.normalize_outputs(QkNorm::PerHead);
    let window_key = reader.pick("sliding_window", "attention.sliding_window");
    // The class's own window is the default of config.json; `null` means none.
    let default = (!reader.is_gguf() && reader.is_absent(window_key)).then_some(4096);
    if let Some(window) = reader.count(window_key)?.or(default).filter(|window| *window > 0) {
        let slides = sliding_layers(reader, description.config.layers.len())?;
        description.slide(Some(window), |layer| slides[layer]);
        for (layer, attention) in description.config.attentions_mut() {
            attention.rope = slides[layer].then_some(0);
        }
    }
    Ok(description)
}

/// Returns which layers have a window: as listed, or by a pattern such as "LLLG" or 4.
fn sliding_layers(reader: &ConfigReader, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    const KEY: &str = "sliding_window_pattern";
    if reader.is_gguf() || reader.value("layer_types").is_some() {
        return reader.sliding_pattern(num_layers, PATTERN);
    }
    match reader.value(KEY) {
        Some(Value::String(letters)) if !letters.is_empty() => {
            Ok(letters.chars().cycle().take(num_layers).map(|letter| letter == 'L').collect())
        }
        _ => reader.sliding_pattern(num_layers, reader.count(KEY)?.unwrap_or(PATTERN)),
    }
}
