//! Qwen 3, dense: no biases, q and k normalised per head, heads wider than hidden_size / heads.
//! Source: transformers `Qwen3Config`.

use super::dense::{Defaults, dense};
use super::{Description, Facts, Family, qwen2};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::QkNorm;

pub const FAMILY: Family =
    Family { name: "qwen3", model_types: &["qwen3"], gguf_names: &["qwen3"], describe };

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let defaults = Defaults { head_dim: (!facts.is_gguf()).then_some(128), ..Defaults::default() };
    let mut description = dense("qwen3", facts, defaults)?;
    qwen2::slide_upper_layers(&mut description, facts)?;
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
    }
    Ok(description)
}
