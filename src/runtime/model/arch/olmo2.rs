//! OLMo 2: norms only after each part, q and k normalised over all heads together.
//! Source: transformers `Olmo2Config`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family, olmo3};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::QkNorm;

pub const FAMILY: Family =
    Family { name: "olmo2", model_types: &["olmo2"], gguf_names: &["olmo2"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    // llama.cpp's converter writes OLMo 3 under this name.
    if reader.is_gguf() && reader.count("attention.sliding_window")?.is_some_and(|window| window > 0) {
        return olmo3::parse_config(reader);
    }
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("olmo2", reader, defaults)?;
    description.normalize_outputs(QkNorm::Whole);
    Ok(description)
}
