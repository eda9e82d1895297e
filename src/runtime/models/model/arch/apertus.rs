//! Apertus: a Llama with norms on the heads of q and k, whose feed-forward parts are two matrices with an
//! activation between them that each layer has learned (xIELU). Source: transformers `ApertusConfig`;
//! llama.cpp's `apertus` for GGUF.

use serde_json::Value;

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, NormNames, QkNorm};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("apertus", &["apertus"], &["apertus"], parse_config);

const NORMS: NormNames = NormNames {
    pre_mixer: ["attention_layernorm", "attn_norm"],
    pre_mlp: ["feedforward_layernorm", "ffn_norm"],
    ..NormNames::LLAMA
};

/// GGUF's lists of each layer's parameters, in the order of [`Activation::xielu`].
const GGUF_KEYS: [&str; 4] = ["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"];

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        context_length: 65_536,
        norm_eps: 1e-5,
        rope_theta: 12_000_000.0,
        tied: Some(false),
        // Hugging Face's form has the parameters as tensors, from which the decoder takes them.
        activation: Activation::xielu([0.0; 4]),
        ..ConfigDefaults::default()
    };
    let mut description = dense(FAMILY.name, reader, defaults)?;
    description.naming.norms = NORMS;
    description.normalize_qk(QkNorm::PerHead);
    let num_layers = description.config.layers.len();
    let lists = match reader.is_gguf() {
        true => Some(GGUF_KEYS.map(|key| parameters(reader, key, num_layers))),
        false => None,
    };
    let lists = lists.map(|[p, n, beta, eps]| Ok::<_, LoadError>([p?, n?, beta?, eps?])).transpose()?;
    for (index, layer) in description.config.layers.iter_mut().enumerate() {
        let Some(mlp) = &mut layer.feed_forward.dense else { continue };
        mlp.is_gated = false;
        if let Some(lists) = &lists {
            mlp.activation = Activation::xielu([0, 1, 2, 3].map(|parameter| lists[parameter][index]));
        }
    }
    Ok(description)
}

/// Parses a parameter of each layer, from a list or one number for all.
fn parameters(reader: &ConfigReader, key: &str, num_layers: usize) -> Result<Vec<f32>, LoadError> {
    let list = match reader.value(key) {
        Some(Value::Array(list)) => list.iter().map(Value::as_f64).collect(),
        Some(value) => value.as_f64().map(|number| vec![number; num_layers]),
        None => return Err(reader.error(key, "is missing")),
    };
    let list = list.filter(|list: &Vec<f64>| list.len() == num_layers);
    let list = list.ok_or_else(|| reader.error(key, format!("is not a list of {num_layers} numbers")))?;
    Ok(list.into_iter().map(|number| number as f32).collect())
}
