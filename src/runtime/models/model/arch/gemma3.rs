//! Gemma 3, text: Gemma 2 with q and k norms instead of soft-capped scores, five local layers to each global
//! one, and a rotary table of their own for the local ones. Source: transformers `Gemma3TextConfig`.

use super::dense::{ConfigDefaults, dense};
use super::gemma2::shared_with_gemma3;
use super::rope::rope;
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, QkNorm, RopeConfig, RopeScaling};
use llmctl_base::error::LoadError;

pub const FAMILY: Family =
    Family::new("gemma3", &["gemma3", "gemma3_text"], &["gemma3", "gemma-embedding"], parse_config);

/// Number of layers that identifies the 27B.
const LAYERS_27B: usize = 62;

/// Every sixth layer is global by default.
const PATTERN: usize = 6;

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_heads: Some(8),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        vocab_size: Some(262_208),
        context_length: 131_072,
        rope_theta: 1e6,
        activation: Activation::GeluTanh,
        tied: Some(true),
        ..ConfigDefaults::default()
    };
    let mut description = dense("gemma3", reader, defaults)?;
    shared_with_gemma3(&mut description, reader, LAYERS_27B)?;
    let local = local_rope(reader, &description.config.ropes[0])?;
    description.config.ropes.push(local);

    let num_layers = description.config.layers.len();
    let listed = reader.sliding_layers(num_layers)?;
    let pattern_key = reader.pick("sliding_window_pattern", "attention.sliding_window_pattern");
    let pattern = match reader.count(pattern_key)?.or(reader.count("_sliding_window_pattern")?) {
        Some(0) => return Err(reader.error(pattern_key, "0 is not a valid interval of layers")),
        Some(pattern) => pattern,
        None => PATTERN,
    };
    let slides =
        |layer: usize| listed.as_ref().map_or(!(layer + 1).is_multiple_of(pattern), |sliding| sliding[layer]);
    let window = reader.count(reader.pick("sliding_window", "attention.sliding_window"))?.unwrap_or(4096);
    description.slide(Some(window), slides);
    for (index, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
        attention.rope = Some(usize::from(slides(index)));
    }
    Ok(description)
}

/// Parses the local layers' rotary table, which is never scaled.
fn local_rope(reader: &ConfigReader, global: &RopeConfig) -> Result<RopeConfig, LoadError> {
    const THETA: f32 = 10_000.0;
    if !reader.is_gguf() && reader.value("rope_parameters").is_some() {
        return rope(reader, "sliding_attention", global.dim, THETA);
    }
    let key = reader.pick("rope_local_base_freq", "rope.freq_base_swa");
    let theta = reader.number(key)?.unwrap_or(THETA);
    Ok(RopeConfig { dim: global.dim, theta, scaling: RopeScaling::None })
}
