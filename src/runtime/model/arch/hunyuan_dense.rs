//! Hunyuan, dense: a Llama in which q and k are normalised per head after the rotary embedding.
//! Source: transformers `HunYuanDenseV1Config`; llama.cpp's `hunyuan-dense` for GGUF.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{NormNames, QkNorm};

pub const FAMILY: Family = Family {
    name: "hunyuan-dense",
    model_types: &["hunyuan_v1_dense"],
    gguf_names: &["hunyuan-dense"],
    parse_config,
};

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults { norm_eps: 1e-5, ..ConfigDefaults::default() };
    let mut description = dense("hunyuan-dense", reader, defaults)?;
    description.naming.norms = NormNames {
        qk: [["self_attn.query_layernorm", "attn_q_norm"], ["self_attn.key_layernorm", "attn_k_norm"]],
        ..NormNames::LLAMA
    };
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHeadAfterRope;
    }
    Ok(description)
}
