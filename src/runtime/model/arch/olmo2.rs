//! OLMo 2: norms only after each part, q and k normalised over all heads together.
//! Source: transformers `Olmo2Config`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family, olmo3};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{NormNames, QkNorm};

pub const FAMILY: Family =
    Family { name: "olmo2", model_types: &["olmo2"], gguf_names: &["olmo2"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    // llama.cpp's converter writes OLMo 3 under this name.
    if reader.is_gguf() && reader.count("attention.sliding_window")?.is_some_and(|window| window > 0) {
        return olmo3::parse_config(reader);
    }
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("olmo2", reader, defaults)?;
    normalize_outputs(&mut description);
    Ok(description)
}

/// Moves the norms behind the parts, and normalises q and k.
pub fn normalize_outputs(description: &mut Description) {
    description.naming.norms = NormNames::SANDWICH;
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::Whole;
    }
    for layer in &mut description.config.layers {
        (layer.pre_norms, layer.post_norms) = (false, true);
    }
}
