//! GLM-4.5 and 4.6: a Llama with biases on q, k and v and half-rotated heads; the first layers are dense, the
//! others have experts as DeepSeek V3 does. Source: transformers `Glm4MoeConfig`; llama.cpp's `glm4moe` for
//! GGUF.

use super::deepseek::set_experts;
use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::model::config::{NormNames, QkNorm};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("glm4-moe", &["glm4_moe"], &["glm4moe"], parse_config);

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        num_kv_heads: (!reader.is_gguf()).then_some(8),
        context_length: 131_072,
        norm_eps: 1e-5,
        rotated: 0.5,
        experts: true,
        ..ConfigDefaults::default()
    };
    let mut description = dense("glm4-moe", reader, defaults)?;
    description.naming.norms = NormNames::POST_ATTENTION;
    description.leave_prediction_out(reader, "num_nextn_predict_layers")?;
    set_experts(&mut description, reader)?;
    let qk_norm = if normalizes_qk(reader)? { QkNorm::PerHead } else { QkNorm::None };
    description.normalize_qk(qk_norm);
    Ok(description)
}

/// Returns whether q and k are normalised. GGUF tells by its tensors.
fn normalizes_qk(reader: &ConfigReader) -> Result<bool, LoadError> {
    match reader.is_gguf() {
        true => Ok(reader.value("blk.0.attn_q_norm.weight").is_some()),
        false => Ok(reader.flag("use_qk_norm")? == Some(true)),
    }
}
