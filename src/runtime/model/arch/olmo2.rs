//! OLMo 2: norms only after each part, q and k normalised over all heads together.
//! Source: transformers `Olmo2Config`.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{NormNames, QkNorm};

pub const FAMILY: Family =
    Family { name: "olmo2", model_types: &["olmo2"], gguf_names: &["olmo2"], parse_config };

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("olmo2", reader, defaults)?;
    // llama.cpp writes OLMo 3, which has windows and two rotary tables, under this name too.
    const WINDOW: &str = "attention.sliding_window";
    if reader.is_gguf() && reader.count(WINDOW)?.is_some_and(|window| window > 0) {
        return Err(reader.error(WINDOW, "OLMo 3 is not supported"));
    }
    description.naming.norms = NormNames::SANDWICH;
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::Whole;
    }
    for layer in &mut description.config.layers {
        layer.pre_norms = false;
        layer.post_norms = true;
    }
    Ok(description)
}
