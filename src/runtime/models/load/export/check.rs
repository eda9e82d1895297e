//! Checks that the keys of a new GGUF file describe the decoder of the folder it is made from.
//!
//! GGUF leaves parts of some families to the program that reads it (intervals of layers, weights of experts).
//! A folder that differs there would silently become another model, so the keys are read back and compared.

use super::super::gguf::Gguf;
use super::super::gguf_config::value;
use super::head::GgufHead;
use crate::model::arch::{ConfigReader, Description, parse_config};
use crate::model::{DecoderConfig, RopeScaling, TwoWay};
use llmctl_base::error::LoadResult;

/// Compares the decoder that the keys describe with the folder's.
///
/// # Errors
/// `LoadError::Unsupported` naming what differs.
pub(super) fn same_decoder(
    head: &GgufHead,
    reader: &ConfigReader,
    description: &Description,
) -> LoadResult<()> {
    let bytes = head.encode().map_err(|message| reader.unsupported(message))?;
    let keys = Gguf::from_bytes("new.gguf", bytes)?.metadata().clone();
    let rows = description.config.vocab_size;
    let gguf = ConfigReader::gguf("new.gguf".into(), move |key| match key {
        "vocab_size" => Some(rows.into()),
        _ if key.ends_with(".vocab_size") => None,
        _ => value(&keys, key),
    });
    let Some(written) = parse_config(&gguf)? else {
        return Err(reader.unsupported("its family is not read from GGUF files"));
    };
    match difference(&comparable(&description.config), &comparable(&written.config)) {
        None => Ok(()),
        Some(what) => Err(reader.unsupported(format!(
            "GGUF files of {:?} cannot express this model: {what}; llmctl runs the folder itself",
            written.config.architecture
        ))),
    }
}

/// Returns the configuration without what tensors of the GGUF file add to it, and what it has for images, which the exported
/// model does not read.
fn comparable(config: &DecoderConfig) -> DecoderConfig {
    let mut config = DecoderConfig { architecture: "", two_way: TwoWay::Never, ..config.clone() };
    config.per_layer_inputs.iter_mut().for_each(|inputs| inputs.padding = 0);
    for rope in &mut config.ropes {
        rope.sections = None;
        match &mut rope.scaling {
            RopeScaling::Llama3 { .. } => rope.scaling = RopeScaling::None,
            RopeScaling::LongRope { short, long, attention_factor, .. } => {
                (*short, *long) = (Vec::new(), Vec::new());
                *attention_factor = rounded(*attention_factor);
            }
            // Written as a quotient and multiplied again.
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                let own = 0.1 * factor.max(1.0).ln() + 1.0;
                *attention_factor = Some(rounded(attention_factor.unwrap_or(own)));
            }
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Divisors(_) => {}
        }
    }
    config
}

/// Rounds to five digits behind the point.
fn rounded(value: f32) -> f32 {
    (value * 1e5).round() / 1e5
}

fn difference(folder: &DecoderConfig, gguf: &DecoderConfig) -> Option<String> {
    let layers = folder.layers.iter().zip(&gguf.layers);
    let layer = layers.enumerate().find(|(_, (a, b))| a != b);
    if let Some((index, (a, b))) = layer {
        return Some(format!("layer {index} is {a:?}, and would become {b:?}"));
    }
    if folder.ropes != gguf.ropes {
        return Some(format!("rotary positions are {:?}, and would become {:?}", folder.ropes, gguf.ropes));
    }
    let plain = |config: &DecoderConfig| DecoderConfig { layers: vec![], ropes: vec![], ..config.clone() };
    let (folder, gguf) = (plain(folder), plain(gguf));
    (folder != gguf).then(|| format!("its configuration is {folder:?}, and would become {gguf:?}"))
}
