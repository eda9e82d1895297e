//! LFM2: short convolutions in most layers, attention with norms of q and k per head in the others.
//! Source: transformers `Lfm2Config`, `Lfm2MLP` for the width of the feed-forward part.

use super::dense::{Defaults, dense};
use super::{Description, Facts, Family};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{MixerConfig, NormNames, PartNames, QkNorm, ShortConvConfig};

pub const FAMILY: Family = Family { name: "lfm2", model_types: &["lfm2"], gguf_names: &["lfm2"], describe };

const NORMS: NormNames = NormNames {
    pre_mixer: ["operator_norm", "attn_norm"],
    pre_mlp: ["ffn_norm", "ffn_norm"],
    qk: [["self_attn.q_layernorm", "attn_q_norm"], ["self_attn.k_layernorm", "attn_k_norm"]],
    last: ["embedding_norm", "token_embd_norm"],
    ..NormNames::LLAMA
};

const PARTS: PartNames = PartNames {
    attention_output: ["self_attn.out_proj", "attn_output"],
    mlp: [["feed_forward.w1", "ffn_gate"], ["feed_forward.w3", "ffn_up"], ["feed_forward.w2", "ffn_down"]],
    ..PartNames::LLAMA
};

/// A convolution sees no more than a few tokens.
const MAX_KERNEL: usize = 1 << 10;

fn describe(facts: &Facts) -> Result<Description, LoadError> {
    let defaults = Defaults {
        context_length: 128_000,
        rope_theta: 1e6,
        norm_eps: 1e-5,
        tied: Some(true),
        ..Defaults::default()
    };
    let mut description = dense("lfm2", facts, defaults)?;
    (description.naming.norms, description.naming.parts) = (NORMS, PARTS);
    if !facts.is_gguf() {
        hugging_face(&mut description, facts, defaults)?;
    }
    let kernel_key = facts.pick("conv_L_cache", "shortconv.l_cache");
    let kernel = match facts.count(kernel_key)? {
        Some(kernel) if !(2..=MAX_KERNEL).contains(&kernel) => {
            return Err(facts.error(kernel_key, format!("{kernel} is no length of a convolution")));
        }
        kernel => kernel.unwrap_or(3),
    };
    for (_, attention) in description.config.attentions_mut() {
        attention.qk_norm = QkNorm::PerHead;
    }
    let convolves = convolutions(facts, description.config.layers.len())?;
    for (layer, _) in description.config.layers.iter_mut().zip(convolves).filter(|(_, convolves)| *convolves)
    {
        layer.mixer = MixerConfig::ShortConv(ShortConvConfig { kernel });
    }
    Ok(description)
}

/// What config.json says in its own way.
fn hugging_face(description: &mut Description, facts: &Facts, defaults: Defaults) -> Result<(), LoadError> {
    if facts.flag("conv_bias")? == Some(true) {
        return Err(facts.error("conv_bias", "biases of convolutions are not supported"));
    }
    // Older files name it otherwise.
    let tied = facts.flag("tie_embedding")?.or(facts.flag("tie_word_embeddings")?);
    description.naming.tied = tied.or(defaults.tied);
    let eps = facts.number("norm_eps")?.unwrap_or(defaults.norm_eps);
    description.config.final_norm_eps = eps;
    let width = adjusted_width(facts)?;
    for layer in &mut description.config.layers {
        layer.norm_eps = eps;
        if let Some(dense) = &mut layer.feed_forward.dense {
            dense.intermediate_size = width;
        }
    }
    Ok(())
}

/// Two thirds of the width that the file gives, times a factor, rounded up.
fn adjusted_width(facts: &Facts) -> Result<usize, LoadError> {
    let key = if facts.value("block_ff_dim").is_some() { "block_ff_dim" } else { "intermediate_size" };
    let width = facts.size(key, 1 << 30)?;
    if facts.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(width);
    }
    let factor = facts.number("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = facts.count("block_multiple_of")?.unwrap_or(256).max(1);
    let width = (f64::from(factor) * (2 * width / 3) as f64) as usize;
    match width.next_multiple_of(multiple) {
        0 => Err(facts.error(key, "leaves no width for the feed-forward part")),
        width => Ok(width),
    }
}

/// Which layers convolve. GGUF gives them no heads for keys and values.
fn convolutions(facts: &Facts, num_layers: usize) -> Result<Vec<bool>, LoadError> {
    if facts.is_gguf() {
        let heads = facts.counts("attention.head_count_kv", num_layers)?.unwrap_or_default();
        return Ok(heads.iter().map(|heads| *heads == 0).collect());
    }
    if let Some(listed) = facts.layers_of_kind(num_layers, "conv")? {
        return Ok(listed);
    }
    const ATTENTION: &str = "full_attn_idxs";
    let attention: Vec<usize> = match facts.value(ATTENTION) {
        None => (0..num_layers).collect(),
        Some(value) => serde_json::from_value(value)
            .map_err(|error| facts.error(ATTENTION, format!("is not a list of layers: {error}")))?,
    };
    Ok((0..num_layers).map(|layer| !attention.contains(&layer)).collect())
}
