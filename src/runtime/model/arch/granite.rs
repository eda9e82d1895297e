//! Granite 3, dense: a Llama with multipliers on embeddings, scores, residuals and logits.
//! Source: transformers `GraniteConfig`.

use super::dense::{Defaults, dense};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "granite", model_types: &["granite"], gguf_names: &["granite"], describe };

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let mut description = dense("granite", facts, Defaults::default())?;
    description.naming.interleaved_qk = facts.is_gguf();
    let multiplier = |key| Ok::<_, LoadError>(facts.number(key)?.unwrap_or(1.0));
    let config = &mut description.config;
    config.embedding_scale = multiplier(facts.pick("embedding_multiplier", "embedding_scale"))?;
    let logits_key = facts.pick("logits_scaling", "logit_scale");
    let divisor = multiplier(logits_key)?;
    if divisor == 0.0 {
        return Err(facts.error(logits_key, "logits cannot be divided by 0"));
    }
    config.logit_scale = 1.0 / divisor;
    let score = facts.number(facts.pick("attention_multiplier", "attention.scale"))?;
    let residual = multiplier(facts.pick("residual_multiplier", "residual_scale"))?;
    config.layers.iter_mut().for_each(|layer| layer.residual_scale = residual);
    for (_, attention) in config.attentions_mut() {
        // Absent from GGUF means the usual scale; absent from config.json means 1, as its class has it.
        attention.scale = match score {
            Some(score) => score,
            None if facts.is_gguf() => attention.scale,
            None => 1.0,
        };
    }
    Ok(description)
}
