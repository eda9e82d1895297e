//! Qwen 3 VL, text, dense and with experts: Qwen 3. Positions in a text are the same in all sections of
//! M-RoPE, and images, which also feed the first layers, are not read. Sources: transformers
//! `Qwen3VLTextConfig`, `Qwen3VLMoeTextConfig`; llama.cpp's `qwen3vl` and `qwen3vlmoe` for GGUF.

use super::{ConfigReader, Description, Family, dense_families, qwen3_moe};
use crate::model::config::ExpertWeights;
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("qwen3-vl", &["qwen3_vl", "qwen3_vl_text"], &["qwen3vl"], |reader| {
    named("qwen3-vl", reader, dense_families::QWEN3.parse_config)
});

pub const MOE_FAMILY: Family = Family {
    name: "qwen3-vl-moe",
    model_types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    gguf_names: &["qwen3vlmoe"],
    parse_config: |reader| {
        let mut description = named("qwen3-vl-moe", reader, qwen3_moe::FAMILY.parse_config)?;
        for layer in &mut description.config.layers {
            if let Some(experts) = &mut layer.feed_forward.experts {
                experts.weights = ExpertWeights::OfUsed; // the class has no `norm_topk_prob`
            }
        }
        Ok(description)
    },
};

fn named(
    name: &'static str,
    reader: &ConfigReader,
    parse_config: fn(&ConfigReader) -> Result<Description, LoadError>,
) -> Result<Description, LoadError> {
    let mut description = parse_config(reader)?;
    description.config.architecture = name;
    Ok(description)
}
