//! Qwen 3 Next: Qwen 3.5 with experts, except that a delta net's projections are stored together and that
//! GGUF keeps the checkpoint's order of value heads. Sources: transformers `Qwen3NextConfig`; llama.cpp's
//! `qwen3next` for GGUF.

use super::qwen3_5;
use super::{ConfigReader, Description, Family};
use crate::model::config::{ExpertWeights, MixerConfig};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("qwen3-next", &["qwen3_next"], &["qwen3next"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    refuse_dense_layers(reader)?;
    // llama.cpp's weights always sum to 1.
    let weights = match reader.flag("norm_topk_prob")?.unwrap_or(true) || reader.is_gguf() {
        true => ExpertWeights::OfUsed,
        false => ExpertWeights::OfAll,
    };
    let mut description = qwen3_5::with_experts(FAMILY.name, reader, weights)?;
    for layer in &mut description.config.layers {
        if let MixerConfig::DeltaNet(net) = &mut layer.mixer {
            net.shape.tiled = false;
        }
    }
    Ok(description)
}

/// Refuses layers without experts, which the class allows but no published model has.
fn refuse_dense_layers(reader: &ConfigReader) -> Result<(), LoadError> {
    const DENSE: &str = "mlp_only_layers";
    const STEP: &str = "decoder_sparse_step";
    if reader.value(DENSE).is_some_and(|layers| layers.as_array().is_none_or(|layers| !layers.is_empty())) {
        return Err(reader.error(DENSE, "layers without experts are not supported"));
    }
    match reader.count(STEP)? {
        None | Some(1) => Ok(()),
        Some(step) => Err(reader.error(STEP, format!("{step} leaves layers without experts"))),
    }
}
