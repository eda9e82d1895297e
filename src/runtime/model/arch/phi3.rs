//! Phi-3, 3.5 and 4-mini: q, k, v in one matrix, gate and up in another, LongRoPE, partly rotated heads.
//! Source: transformers `Phi3Config`.

use super::dense::{Defaults, dense};
use super::rope::gguf_long_rope;
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "phi3", model_types: &["phi3", "phi4"], gguf_names: &["phi3"], describe };

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let defaults = Defaults { norm_eps: 1e-5, context_length: 4096, ..Defaults::default() };
    let mut description = dense("phi3", facts, defaults)?;
    let key = facts.pick("sliding_window", "attention.sliding_window");
    let window = facts.count(key)?.filter(|window| *window > 0);
    description.slide(window, |_| true);
    if facts.is_gguf()
        && let Some(scaling) = gguf_long_rope(facts)?
    {
        description.config.ropes[0].scaling = scaling;
    }
    Ok(description)
}
