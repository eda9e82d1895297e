//! The families of encoders: each parses config.json or GGUF metadata into an [`EncoderConfig`].
//!
//! Sources: transformers `BertConfig`, `RobertaConfig`, `ModernBertConfig`, `NomicBertConfig`; nomic's own
//! configuration, which has GPT-2's keys; llama.cpp's converter for GGUF.

use super::config::{EncoderConfig, EncoderLayerConfig, EncoderNames};
use crate::backend::Activation;
use crate::model::arch::{ConfigReader, ModelFormat};
use crate::model::config::{RopeConfig, RopeScaling};
use llmctl_base::error::LoadResult;

/// Limits for numbers in a file, generous compared to the largest published encoders.
const MAX_LAYERS: usize = 1 << 10;
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 26;

struct EncoderFamily {
    model_types: &'static [&'static str],
    gguf_names: &'static [&'static str],
    parse: fn(&ConfigReader) -> LoadResult<EncoderConfig>,
}

const FAMILIES: [EncoderFamily; 4] = [
    EncoderFamily { model_types: &["bert"], gguf_names: &["bert"], parse: bert },
    EncoderFamily { model_types: &["roberta", "xlm-roberta", "camembert"], gguf_names: &[], parse: roberta },
    EncoderFamily { model_types: &["nomic_bert"], gguf_names: &["nomic-bert"], parse: nomic_bert },
    EncoderFamily { model_types: &["modernbert"], gguf_names: &["modern-bert"], parse: modernbert },
];

/// Parses the configuration of an encoder; `None` if it is no encoder that is known.
///
/// # Errors
/// `LoadError::Malformed` naming a key that is missing or has a value out of range, `LoadError::Unsupported` for one that
/// llmctl does not compute.
pub fn parse_encoder(reader: &ConfigReader) -> LoadResult<Option<EncoderConfig>> {
    let name = reader.architecture()?;
    let names = |family: &EncoderFamily| match reader.format() {
        ModelFormat::HuggingFace => family.model_types,
        ModelFormat::Gguf => family.gguf_names,
    };
    let family = FAMILIES.iter().find(|family| names(family).contains(&name.as_str()));
    family.map(|family| (family.parse)(reader)).transpose()
}

/// Parses what BERT and its descendants share: learned positions, token types, norms behind each part.
fn bert(reader: &ConfigReader) -> LoadResult<EncoderConfig> {
    let first = |keys: &[&'static str], max| first_size(reader, keys, max);
    let num_layers = first(&["num_hidden_layers", "n_layer", "block_count"], MAX_LAYERS)?;
    let hidden_size = first(&["hidden_size", "n_embd", "embedding_length"], MAX_WIDTH)?;
    let num_heads = first(&["num_attention_heads", "n_head", "attention.head_count"], MAX_WIDTH)?;
    let head_key = reader.pick("num_attention_heads", "attention.head_count");
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(reader.error(head_key, format!("{num_heads} heads do not divide {hidden_size}")));
    }
    let kind = reader.string("position_embedding_type")?;
    if let Some(kind) = kind.filter(|kind| kind != "absolute") {
        return Err(reader.unsupported(format!("position_embedding_type {kind:?}")));
    }
    let eps_keys = ["layer_norm_eps", "layer_norm_epsilon", "norm_eps", "attention.layer_norm_epsilon"];
    let eps = eps_keys.iter().find_map(|key| reader.number(key).transpose()).transpose()?;
    let num_types = match reader.is_gguf() {
        true => reader.value("token_types.weight").and_then(|shape| Some(shape.get(0)?.as_u64()? as usize)),
        false => reader.count("type_vocab_size")?,
    };
    Ok(EncoderConfig {
        architecture: "bert",
        vocab_size: reader.size("vocab_size", MAX_VOCAB)?,
        hidden_size,
        context_length: first(&["max_position_embeddings", "n_positions", "context_length"], MAX_WIDTH)?,
        num_heads,
        intermediate_size: first(&["intermediate_size", "n_inner", "feed_forward_length"], MAX_WIDTH)?,
        activation: activation(reader)?,
        is_gated: false,
        norm_eps: eps.unwrap_or(1e-12),
        pre_norms: false,
        first_position: Some(0),
        num_types: num_types.unwrap_or(0),
        layers: vec![EncoderLayerConfig { distance: None, rope: None }; num_layers],
        ropes: Vec::new(),
        names: if reader.is_gguf() { EncoderNames::GGUF } else { EncoderNames::BERT },
    })
}

/// Parses BERT with positions that are counted from the one behind the padding token's id.
fn roberta(reader: &ConfigReader) -> LoadResult<EncoderConfig> {
    let base = bert(reader)?;
    let first = reader.count("pad_token_id")?.unwrap_or(1) + 1;
    let most = base.context_length.checked_sub(first).filter(|most| *most > 0);
    let context_length =
        most.ok_or_else(|| reader.error("max_position_embeddings", format!("is not above {first}")))?;
    Ok(EncoderConfig { architecture: "roberta", context_length, first_position: Some(first), ..base })
}

/// Parses BERT with rotary positions and a gated feed-forward part.
fn nomic_bert(reader: &ConfigReader) -> LoadResult<EncoderConfig> {
    let base = bert(reader)?;
    for (key, plain) in [("rotary_emb_fraction", 1.0), ("rotary_emb_scale_base", 0.0), ("num_experts", 0.0)] {
        if let Some(value) = reader.number(key).ok().flatten().filter(|value| *value != plain) {
            return Err(reader.unsupported(format!("nomic_bert with {key} {value}")));
        }
    }
    if reader.flag("prenorm").ok().flatten() == Some(true) {
        return Err(reader.unsupported("nomic_bert with prenorm"));
    }
    let theta = match reader.value("rope_parameters") {
        Some(parameters) => parameters["rope_theta"].as_f64().map(|theta| theta as f32),
        None => reader.number(reader.pick("rotary_emb_base", "rope.freq_base"))?,
    };
    let rope = plain_rope(&base, theta.unwrap_or(1000.0));
    // Beyond the positions of its training, nomic's code changes the frequencies with the length of the text.
    let is_stretched = reader.number("rotary_scaling_factor").ok().flatten().is_some();
    let trained = reader.count("max_trained_positions")?.filter(|trained| *trained > 0 && is_stretched);
    Ok(EncoderConfig {
        architecture: "nomic-bert",
        context_length: trained.unwrap_or(base.context_length).min(base.context_length),
        is_gated: true,
        first_position: None,
        ropes: vec![rope],
        layers: vec![EncoderLayerConfig { distance: None, rope: Some(0) }; base.layers.len()],
        names: if reader.is_gguf() { EncoderNames::GGUF } else { EncoderNames::NOMIC },
        ..base
    })
}

/// Parses ModernBERT: norms before each part, rotary positions, and windows in all but every third layer.
fn modernbert(reader: &ConfigReader) -> LoadResult<EncoderConfig> {
    let base = bert(reader)?;
    let num_layers = base.layers.len();
    let interval = reader.count("global_attn_every_n_layers")?.unwrap_or(3).max(1);
    let by_interval = || (0..num_layers).map(|layer| !layer.is_multiple_of(interval)).collect::<Vec<bool>>();
    let slides = match reader.is_gguf() {
        true if reader
            .value("attention.sliding_window_pattern")
            .is_some_and(|pattern| pattern.is_array()) =>
        {
            reader.sliding_pattern(num_layers, interval)?
        }
        true => by_interval(),
        false => reader.sliding_layers(num_layers)?.unwrap_or_else(by_interval),
    };
    let window = reader.count(reader.pick("local_attention", "attention.sliding_window"))?.unwrap_or(128);
    let parameters = reader.value("rope_parameters").unwrap_or_default();
    let theta = |kind: &str, key: &'static str, default: f32| match parameters[kind]["rope_theta"].as_f64() {
        Some(theta) => Ok(theta as f32),
        None => reader.number(key).map(|theta| theta.unwrap_or(default)),
    };
    let of_all = theta("full_attention", reader.pick("global_rope_theta", "rope.freq_base"), 160_000.0)?;
    let of_window =
        theta("sliding_attention", reader.pick("local_rope_theta", "rope.freq_base_swa"), 10_000.0)?;
    let layer = |slides: bool| EncoderLayerConfig {
        distance: slides.then_some(window / 2),
        rope: Some(usize::from(slides)),
    };
    let is_default_eps = reader.value("norm_eps").is_none() && !reader.is_gguf();
    Ok(EncoderConfig {
        architecture: "modernbert",
        is_gated: true,
        pre_norms: true,
        first_position: None,
        num_types: 0,
        norm_eps: if is_default_eps { 1e-5 } else { base.norm_eps },
        ropes: [of_all, of_window].map(|theta| plain_rope(&base, theta)).into(),
        layers: slides.into_iter().map(layer).collect(),
        names: if reader.is_gguf() { EncoderNames::GGUF_MODERN } else { EncoderNames::MODERN },
        ..base
    })
}

fn plain_rope(config: &EncoderConfig, theta: f32) -> RopeConfig {
    RopeConfig::new(config.hidden_size / config.num_heads, theta, RopeScaling::None)
}

/// Returns the first of some keys that the file has, within `1..=max`.
fn first_size(reader: &ConfigReader, keys: &[&'static str], max: usize) -> LoadResult<usize> {
    let found = keys.iter().find(|key| reader.value(key).is_some());
    let [first, .., of_gguf] = keys else { unreachable!("names of both formats") };
    reader.size(found.copied().unwrap_or(reader.pick(first, of_gguf)), max)
}

/// Parses the activation. GGUF does not say: llama.cpp computes SiLU in nomic-bert and else GELU.
fn activation(reader: &ConfigReader) -> LoadResult<Activation> {
    let keys = ["hidden_activation", "hidden_act", "activation_function"];
    let name = keys.iter().find_map(|key| reader.string(key).transpose()).transpose()?;
    let is_nomic = || reader.architecture().is_ok_and(|name| name == "nomic-bert");
    match name.as_deref() {
        None if reader.is_gguf() && is_nomic() => Ok(Activation::Silu),
        None | Some("gelu") => Ok(Activation::GeluErf),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some("silu" | "swish" | "swiglu") => Ok(Activation::Silu),
        Some(other) => Err(reader.unsupported(format!("hidden_act {other:?} of an encoder"))),
    }
}
