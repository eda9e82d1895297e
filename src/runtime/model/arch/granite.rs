//! Granite 3, dense: a Llama with multipliers on embeddings, scores, residuals and logits.
//! Source: transformers `GraniteConfig`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "granite", model_types: &["granite"], gguf_names: &["granite"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = dense("granite", reader, ConfigDefaults::default())?;
    set_multipliers(&mut description, reader)?;
    Ok(description)
}

/// Sets what all Granite models share: multipliers, and the order of q and k rows in GGUF.
pub fn set_multipliers(description: &mut Description, reader: &ConfigReader) -> Result<(), LoadError> {
    description.naming.interleaved_qk = reader.is_gguf();
    let multiplier = |key| Ok::<_, LoadError>(reader.number(key)?.unwrap_or(1.0));
    let config = &mut description.config;
    config.embedding_scale = multiplier(reader.pick("embedding_multiplier", "embedding_scale"))?;
    let logits_key = reader.pick("logits_scaling", "logit_scale");
    let divisor = multiplier(logits_key)?;
    if divisor == 0.0 {
        return Err(reader.error(logits_key, "logits cannot be divided by 0"));
    }
    config.logit_scale = 1.0 / divisor;
    let score = reader.number(reader.pick("attention_multiplier", "attention.scale"))?;
    let residual = multiplier(reader.pick("residual_multiplier", "residual_scale"))?;
    config.layers.iter_mut().for_each(|layer| layer.residual_scales = [residual; 2]);
    for (_, attention) in config.attentions_mut() {
        // If absent, GGUF means the usual scale and config.json means 1, the class's default.
        attention.scale = match score {
            Some(score) => score,
            None if reader.is_gguf() => attention.scale,
            None => 1.0,
        };
    }
    Ok(())
}
