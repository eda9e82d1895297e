//! LFM2: short convolutions in most layers, attention with norms of q and k per head in the others.
//! Source: transformers `Lfm2Config`, `Lfm2MLP` for the width of the feed-forward part.

use super::dense::{ConfigDefaults, dense};
use super::{ConfigReader, Description, Family};
use crate::model::config::{MixerConfig, NormNames, PartNames, QkNorm, ShortConvConfig};
use llmctl_base::error::LoadError;

pub const FAMILY: Family = Family::new("lfm2", &["lfm2"], &["lfm2"], parse_config);

const NORMS: NormNames = NormNames {
    pre_mixer: ["operator_norm", "attn_norm"],
    pre_mlp: ["ffn_norm", "ffn_norm"],
    qk: [["self_attn.q_layernorm", "attn_q_norm"], ["self_attn.k_layernorm", "attn_k_norm"]],
    last: ["embedding_norm", "token_embd_norm"],
    ..NormNames::LLAMA
};

pub const PARTS: PartNames = PartNames {
    attention_output: ["self_attn.out_proj", "attn_output"],
    mlp: [["feed_forward.w1", "ffn_gate"], ["feed_forward.w3", "ffn_up"], ["feed_forward.w2", "ffn_down"]],
    ..PartNames::LLAMA
};

/// Limit on the tokens of a convolution's kernel.
const MAX_KERNEL: usize = 1 << 10;

fn parse_config(reader: &ConfigReader) -> Result<Description, LoadError> {
    let mut description = convolutional("lfm2", reader, false)?;
    if !reader.is_gguf() {
        let width = adjusted_width(reader)?;
        for dense in
            description.config.layers.iter_mut().filter_map(|layer| layer.feed_forward.dense.as_mut())
        {
            dense.intermediate_size = width;
        }
    }
    Ok(description)
}

/// Parses a model of convolutions and attention.
pub fn convolutional(
    name: &'static str,
    reader: &ConfigReader,
    experts: bool,
) -> Result<Description, LoadError> {
    let defaults = ConfigDefaults {
        context_length: 128_000,
        rope_theta: 1e6,
        norm_eps: 1e-5,
        tied: Some(true),
        experts,
        ..ConfigDefaults::default()
    };
    let mut description = dense(name, reader, defaults)?;
    (description.naming.norms, description.naming.parts) = (NORMS, PARTS);
    if !reader.is_gguf() {
        hugging_face(&mut description, reader, defaults)?;
    }
    let kernel_key = reader.pick("conv_L_cache", "shortconv.l_cache");
    let kernel = match reader.count(kernel_key)? {
        Some(kernel) if !(2..=MAX_KERNEL).contains(&kernel) => {
            return Err(reader.error(kernel_key, format!("{kernel} is not a valid kernel length")));
        }
        kernel => kernel.unwrap_or(3),
    };
    description.normalize_qk(QkNorm::PerHead);
    let convolves = convolutions(reader, description.config.layers.len())?;
    for (layer, _) in description.config.layers.iter_mut().zip(convolves).filter(|(_, convolves)| *convolves)
    {
        layer.mixer = MixerConfig::ShortConv(ShortConvConfig { kernel });
    }
    Ok(description)
}

/// Sets the values that only config.json has.
fn hugging_face(
    description: &mut Description,
    reader: &ConfigReader,
    defaults: ConfigDefaults,
) -> Result<(), LoadError> {
    if reader.flag("conv_bias")? == Some(true) {
        return Err(reader.error("conv_bias", "biases of convolutions are not supported"));
    }
    // Older files use another name.
    let tied = reader.flag("tie_embedding")?.or(reader.flag("tie_word_embeddings")?);
    description.naming.tied = tied.or(defaults.tied);
    let eps = reader.number("norm_eps")?.unwrap_or(defaults.norm_eps);
    description.config.final_norm_eps = eps;
    description.config.layers.iter_mut().for_each(|layer| layer.norm_eps = eps);
    Ok(())
}

/// Returns two thirds of the file's width, times a factor, rounded up.
fn adjusted_width(reader: &ConfigReader) -> Result<usize, LoadError> {
    let key = if reader.value("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let width = reader.size(key, 1 << 30)?;
    if reader.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(width);
    }
    let factor = reader.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = reader.count("block_multiple_of")?.unwrap_or(256).max(1);
    let width = (f64::from(factor) * (2 * width / 3) as f64) as usize;
    match width.next_multiple_of(multiple) {
        0 => Err(reader.error(key, "leaves no width for the feed-forward part")),
        width => Ok(width),
    }
}

/// Returns which layers are convolutions. In GGUF these have no heads for keys and values.
fn convolutions(reader: &ConfigReader, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if reader.is_gguf() {
        let heads = reader.counts("attention.head_count_kv", num_layers)?.unwrap_or_default();
        return Ok(heads.iter().map(|heads| *heads == 0).collect());
    }
    if let Some(listed) = reader.layers_of_kind(num_layers, "conv")? {
        return Ok(listed);
    }
    const ATTENTION: &str = "full_attn_idxs";
    let attention: Vec<usize> = match reader.value(ATTENTION) {
        None => (0..num_layers).collect(),
        Some(value) => serde_json::from_value(value)
            .map_err(|error| reader.error(ATTENTION, format!("is not a list of layers: {error}")))?,
    };
    Ok((0..num_layers).map(|layer| !attention.contains(&layer)).collect())
}
