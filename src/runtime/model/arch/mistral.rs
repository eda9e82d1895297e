//! Mistral 7B and its relatives: a Llama whose layers may all have a sliding window. As GGUF it is published as `llama`.
//! Source: transformers `MistralConfig`.

use super::dense::{Defaults, dense};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;

pub const FAMILY: Family = Family { name: "mistral", model_types: &["mistral"], gguf_names: &[], describe };

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let mut description = dense("mistral", facts, Defaults::default())?;
    let window = facts.count("sliding_window")?.filter(|window| *window > 0);
    description.slide(window, |_| true);
    Ok(description)
}
