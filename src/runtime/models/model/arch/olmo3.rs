//! OLMo 3: OLMo 2 with a sliding window on three of four layers; YaRN is for the others only. llama.cpp's
//! converter writes it as `olmo2` with a window. Source: transformers `Olmo3Config`; llama.cpp's `olmo2` for
//! GGUF.

use super::dense::{ConfigDefaults, dense};
use super::rope::rope;
use super::{ConfigReader, Description, Family};
use crate::model::config::{QkNorm, RopeConfig, RopeScaling};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("olmo3", &["olmo3"], &[], parse_config);

/// Every fourth layer sees the whole context by default.
const PATTERN: usize = 4;

const THETA: f32 = 500_000.0;

/// Indices of the rotary tables.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

/// Parses a config.json, or a GGUF of `olmo2` with a window.
pub fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, rope_theta: THETA, ..ConfigDefaults::default() };
    let mut description = dense("olmo3", reader, defaults)?;
    description.normalize_outputs(QkNorm::Whole);
    let local = local_rope(reader, &description.config.ropes[GLOBAL])?;
    description.config.ropes.push(local);
    let slides = reader.sliding_pattern(description.config.layers.len(), PATTERN)?;
    let window = reader.count(reader.pick("sliding_window", "attention.sliding_window"))?.unwrap_or(4096);
    description.slide(Some(window), |layer| slides[layer]);
    for (layer, attention) in description.config.attentions_mut() {
        attention.rope = Some(if slides[layer] { LOCAL } else { GLOBAL });
    }
    Ok(description)
}

/// Parses the windowed layers' rotary table. Only the form of transformers 5 can scale it.
fn local_rope(reader: &ConfigReader, global: &RopeConfig) -> Result<RopeConfig, LoadError> {
    if !reader.is_gguf() && reader.value("rope_parameters").is_some() {
        return rope(reader, "sliding_attention", global.dim, THETA);
    }
    let theta = reader.number("rope.freq_base_swa")?.unwrap_or(global.theta);
    Ok(RopeConfig { dim: global.dim, theta, scaling: RopeScaling::None })
}
