//! Llama 2 and 3, and models published under their architecture (Yi, SmolLM 1 and 2, TinyLlama; Mistral and Mixtral as
//! GGUF).
//! Source: transformers `LlamaConfig`; llama.cpp's converter for the order of q and k rows.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family, mixtral};
use crate::runtime::error::LoadError;

pub const FAMILY: Family =
    Family { name: "llama", model_types: &["llama"], gguf_names: &["llama"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { experts: reader.is_gguf(), ..ConfigDefaults::default() };
    let mut description = dense("llama", reader, defaults)?;
    if reader.is_gguf() {
        if reader.count("expert_count")?.is_some_and(|count| count > 0) {
            mixtral::set_experts(&mut description, reader)?;
        }
        description.naming.interleaved_qk = true;
        let window = reader.count("attention.sliding_window")?.filter(|window| *window > 0);
        description.slide(window, |_| true);
    }
    Ok(description)
}
