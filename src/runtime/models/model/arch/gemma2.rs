//! Gemma 2: norms before and after each part, scaled embeddings, GeGLU, soft-capped scores and logits, a
//! window on every other layer. Source: transformers `Gemma2Config`; llama.cpp for the 27B's query scale,
//! which GGUF does not carry.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, AttentionConfig, NormNames};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("gemma2", &["gemma2"], &["gemma2"], parse_config);

/// Number of layers that identifies the 27B.
const LAYERS_27B: usize = 46;

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_heads: Some(8),
        num_kv_heads: Some(4),
        head_dim: Some(256),
        vocab_size: Some(256_000),
        context_length: 8192,
        activation: Activation::GeluTanh,
        tied: Some(true),
        ..ConfigDefaults::default()
    };
    let mut description = dense("gemma2", reader, defaults)?;
    shared_with_gemma3(&mut description, reader, LAYERS_27B)?;
    default_caps(&mut description, reader);
    let window = reader.count(reader.pick("sliding_window", "attention.sliding_window"))?.unwrap_or(4096);
    let sliding = reader.sliding_layers(description.config.layers.len())?;
    description
        .slide(Some(window), |layer| sliding.as_ref().map_or(layer % 2 == 0, |sliding| sliding[layer]));
    Ok(description)
}

/// Sets the class's caps if the file lacks the keys; `null` means no caps.
fn default_caps(description: &mut Description, reader: &ConfigReader) {
    if reader.is_absent("final_logit_softcapping") {
        description.config.final_softcap = Some(30.0);
    }
    if reader.is_absent("attn_logit_softcapping") {
        for (_, attention) in description.config.attentions_mut() {
            attention.softcap = Some(50.0);
        }
    }
}

/// Sets norms, embedding scale, query scale and caps.
pub fn shared_with_gemma3(
    description: &mut Description,
    reader: &ConfigReader,
    layers_27b: usize,
) -> Result<(), LoadError> {
    let config = &mut description.config;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.final_softcap = reader.number("final_logit_softcapping")?.filter(|cap| *cap > 0.0);
    let softcap = reader.number("attn_logit_softcapping")?.filter(|cap| *cap > 0.0);
    let query_scalar = if reader.is_gguf() {
        let is_27b = config.layers.len() == layers_27b;
        let derived =
            |head: &AttentionConfig| if is_27b { config.hidden_size / head.num_heads } else { head.head_dim };
        config.attentions().next().map_or(0, derived) as f32
    } else {
        reader.number("query_pre_attn_scalar")?.unwrap_or(256.0)
    };
    for (_, attention) in config.attentions_mut() {
        attention.scale = 1.0 / query_scalar.sqrt();
        attention.softcap = softcap;
    }
    config.layers.iter_mut().for_each(|layer| layer.post_norms = true);
    description.naming.norms = NormNames::SANDWICH;
    description.naming.norm_offset = if reader.is_gguf() { 0.0 } else { 1.0 };
    Ok(())
}
