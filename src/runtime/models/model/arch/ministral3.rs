//! Ministral 3 and Devstral Small 2: Mistral with YaRN and queries that grow with the position.
//! Sources: transformers `Ministral3Config`, `get_llama_4_attn_scale`; llama.cpp's `mistral3` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::rope::{parameter, yarn_magnitude};
use super::{ConfigReader, Description, Family};
use crate::model::config::{AttentionTemperature, RopeScaling};
use llmctl_base::error::LoadError;

pub const FAMILY: Family =
    Family::new("ministral3", &["ministral3", "mistral3"], &["mistral3"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(8),
        head_dim: (!reader.is_gguf()).then_some(128),
        context_length: 262_144,
        norm_eps: 1e-5,
        ..ConfigDefaults::default()
    };
    let mut description = dense("ministral3", reader, defaults)?;
    description.naming.interleaved_qk = reader.is_gguf();
    let window = reader.count(reader.pick("sliding_window", "attention.sliding_window"))?;
    description.slide(window, |_| true);
    set_gguf_magnitude(&mut description, reader)?;
    let temperature = temperature(&description, reader)?;
    for (_, attention) in description.config.attentions_mut() {
        attention.temperature = temperature;
    }
    Ok(description)
}

/// Divides YaRN's magnitude by that for `mscale_all_dim`, which llama.cpp's converter writes as the logarithm's factor;
/// `mscale` is 1 in all published models.
fn set_gguf_magnitude(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    let log_factor = match reader.is_gguf() {
        true => reader.number("rope.scaling.yarn_log_multiplier")?.filter(|factor| *factor != 0.0),
        false => None,
    };
    for rope in &mut description.config.ropes {
        if let (RopeScaling::Yarn { factor, attention_factor, .. }, Some(log_factor)) =
            (&mut rope.scaling, log_factor)
        {
            *attention_factor = Some(yarn_magnitude(*factor, 1.0) / yarn_magnitude(*factor, log_factor));
        }
    }
    Ok(())
}

/// Returns the growth of queries: its interval is the context before YaRN.
fn temperature(
    description: &Description,
    reader: &ConfigReader,
) -> Result<Option<AttentionTemperature>, LoadError> {
    const SCALE: &str = "llama_4_scaling_beta";
    let scale = match reader.is_gguf() {
        true => reader.number("attention.temperature_scale")?,
        false => parameter(reader, SCALE)?,
    };
    let Some(scale) = scale.filter(|scale| *scale != 0.0) else { return Ok(None) };
    match description.config.ropes.first().map(|rope| &rope.scaling) {
        Some(RopeScaling::Yarn { original_context, .. }) => {
            Ok(Some(AttentionTemperature { scale, interval: *original_context }))
        }
        _ => {
            let key = reader.pick(SCALE, "attention.temperature_scale");
            Err(reader.error(key, "needs the context before YaRN, which the file does not give"))
        }
    }
}
