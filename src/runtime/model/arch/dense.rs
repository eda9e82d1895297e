//! What all Llama-shaped decoders share, read under either format's keys.

use serde_json::Value;

use super::Description;
use super::facts::Facts;
use super::rope::{partial_factor, rope};
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{
    Activation, AttentionConfig, DecoderConfig, FeedForwardConfig, KvSource, LayerConfig, MixerConfig,
    MlpConfig, Naming, NormNames, PartNames, QkNorm,
};

/// Bounds beyond which a number in a file is a lie; generous against the largest published models.
pub const MAX_LAYERS: usize = 1 << 12;
pub const MAX_WIDTH: usize = 1 << 22;
pub const MAX_VOCAB: usize = 1 << 26;

/// Hugging Face keys that a config may leave out, with the values its family's class gives them.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    pub num_heads: Option<usize>,
    pub num_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub vocab_size: Option<usize>,
    pub context_length: usize,
    pub rope_theta: f32,
    pub norm_eps: f32,
    pub activation: Activation,
    pub tied: Option<bool>,
    /// Whether the family describes experts itself; a file of another that has some is refused.
    pub experts: bool,
    pub intermediate_size: Option<usize>,
    /// The part of a head that turns.
    pub rotated: f32,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            num_heads: None,
            num_kv_heads: None,
            head_dim: None,
            vocab_size: None,
            context_length: 2048,
            rope_theta: 10_000.0,
            norm_eps: 1e-6,
            activation: Activation::Silu,
            tied: None,
            experts: false,
            intermediate_size: None,
            rotated: 1.0,
        }
    }
}

/// A Llama: pre-norms, rotary positions on all layers, SwiGLU, no windows. Families change what differs.
pub fn dense(name: &'static str, facts: &Facts, defaults: Defaults) -> Result<Description, LoadError> {
    if !defaults.experts {
        refuse_experts(facts)?;
    }
    let hidden_size = width(facts, facts.pick("hidden_size", "embedding_length"), None)?;
    let num_layers = facts.size(facts.pick("num_hidden_layers", "block_count"), MAX_LAYERS)?;
    let attention = attention(facts, hidden_size, num_layers, defaults)?;
    let vocab_size = match (facts.count("vocab_size")?, defaults.vocab_size) {
        (None, Some(default)) => default,
        _ => facts.size("vocab_size", MAX_VOCAB)?,
    };
    let rotated = rotated_dim(facts, attention.head_dim, defaults.rotated)?;
    let norm_eps = norm_eps(facts, defaults)?;
    let inner_key = facts.pick("intermediate_size", "feed_forward_length");
    let layer = LayerConfig {
        mixer: MixerConfig::Attention(attention),
        feed_forward: FeedForwardConfig {
            dense: Some(MlpConfig {
                intermediate_size: widest(facts, inner_key, defaults.intermediate_size, num_layers)?,
                activation: activation(facts, defaults.activation)?,
            }),
            experts: None,
            gates_dense: false,
        },
        has_output_scale: false,
        norm_eps,
        pre_norms: true,
        post_norms: false,
        residual_scale: 1.0,
    };
    let config = DecoderConfig {
        architecture: name,
        vocab_size,
        hidden_size,
        context_length: context_length(facts, defaults)?,
        embedding_scale: 1.0,
        layers: vec![layer; num_layers],
        ropes: vec![rope(facts, "full_attention", rotated, defaults.rope_theta)?],
        final_norm_eps: norm_eps,
        logit_scale: 1.0,
        final_softcap: None,
        per_layer_inputs: None,
    };
    let naming = Naming {
        gguf: facts.is_gguf(),
        tied: if facts.is_gguf() { None } else { facts.flag("tie_word_embeddings")?.or(defaults.tied) },
        norm_offset: 0.0,
        interleaved_qk: false,
        norms: NormNames::LLAMA,
        parts: PartNames::LLAMA,
        alternating_experts: false,
        prediction_layers: 0,
    };
    Ok(Description { config, naming })
}

/// Every position seen, with the first rotation.
fn attention(
    facts: &Facts,
    hidden_size: usize,
    num_layers: usize,
    defaults: Defaults,
) -> Result<AttentionConfig, LoadError> {
    let num_heads =
        width(facts, facts.pick("num_attention_heads", "attention.head_count"), defaults.num_heads)?;
    let kv_heads_key = facts.pick("num_key_value_heads", "attention.head_count_kv");
    let default_kv_heads = Some(defaults.num_kv_heads.unwrap_or(num_heads));
    let num_kv_heads = widest(facts, kv_heads_key, default_kv_heads, num_layers)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        let message = format!("{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly");
        return Err(facts.error(kv_heads_key, message));
    }
    let head_dim = head_dim(facts, hidden_size / num_heads, defaults)?;
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        softcap: None,
        rope: Some(0),
        qk_norm: QkNorm::None,
        kv: KvSource::Own,
        value_norm: false,
        has_sinks: false,
        has_output_gate: false,
    })
}

fn width(facts: &Facts, key: &str, default: Option<usize>) -> Result<usize, LoadError> {
    match (facts.count(key)?, default) {
        (None, Some(default)) => Ok(default),
        _ => facts.size(key, MAX_WIDTH),
    }
}

/// Where layers differ, GGUF has a list; the family gives each layer its own.
fn widest(facts: &Facts, key: &str, default: Option<usize>, num_layers: usize) -> Result<usize, LoadError> {
    match facts.value(key) {
        Some(Value::Array(_)) => {
            let counts = facts.counts(key, num_layers)?.unwrap_or_default();
            let most = counts.into_iter().max().filter(|most| (1..=MAX_WIDTH).contains(most));
            most.ok_or_else(|| facts.error(key, format!("has no count between 1 and {MAX_WIDTH}")))
        }
        _ => width(facts, key, default),
    }
}

fn context_length(facts: &Facts, defaults: Defaults) -> Result<usize, LoadError> {
    let key = facts.pick("max_position_embeddings", "context_length");
    match facts.count(key)?.unwrap_or(defaults.context_length) {
        context if context >= 2 => Ok(context),
        context => Err(facts.error(key, format!("a context of {context} has no room for an answer"))),
    }
}

fn norm_eps(facts: &Facts, defaults: Defaults) -> Result<f32, LoadError> {
    let key = facts.pick("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    match facts.number(key)?.unwrap_or(defaults.norm_eps) {
        eps if eps >= 0.0 => Ok(eps),
        eps => Err(facts.error(key, format!("{eps} is below 0"))),
    }
}

/// Experts are another kind of layer, which a file of a dense family may hold (Mixtral as `llama`).
fn refuse_experts(facts: &Facts) -> Result<(), LoadError> {
    const KEY: &str = "expert_count";
    match facts.is_gguf() && facts.count(KEY)?.is_some_and(|count| count > 0) {
        true => Err(facts.error(KEY, "mixtures of experts are not supported yet")),
        false => Ok(()),
    }
}

fn head_dim(facts: &Facts, derived: usize, defaults: Defaults) -> Result<usize, LoadError> {
    let key = facts.pick("head_dim", "attention.key_length");
    let dim = facts.count(key)?.or(defaults.head_dim).unwrap_or(derived);
    if dim == 0 || dim > MAX_WIDTH || !dim.is_multiple_of(2) {
        return Err(facts.error(key, format!("{dim} is not a possible head size")));
    }
    if facts.is_gguf() && facts.count("attention.value_length")?.is_some_and(|value| value != dim) {
        return Err(facts.error("attention.value_length", "differs from attention.key_length"));
    }
    Ok(dim)
}

fn rotated_dim(facts: &Facts, head_dim: usize, default: f32) -> Result<usize, LoadError> {
    let key = facts.pick("partial_rotary_factor", "rope.dimension_count");
    let dim = if facts.is_gguf() {
        facts.count(key)?.unwrap_or(head_dim)
    } else {
        let factor = match partial_factor(facts, "full_attention") {
            Some(value) => {
                value.as_f64().ok_or_else(|| facts.error("rope_parameters", "partial_rotary_factor"))?
            }
            None => facts.number(key)?.unwrap_or(default).into(),
        };
        (head_dim as f64 * factor) as usize
    };
    if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) {
        return Err(facts.error(key, format!("rotates {dim} of {head_dim} values of a head")));
    }
    Ok(dim)
}

/// GGUF does not name the activation: the family fixes it.
fn activation(facts: &Facts, default: Activation) -> Result<Activation, LoadError> {
    if facts.is_gguf() {
        return Ok(default);
    }
    let key = if facts.value("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    match facts.string(key)?.as_deref() {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(facts.error(key, format!("activation {other:?} is not supported"))),
    }
}

impl Description {
    /// Gives a window to the layers for which `slides` holds. One of 0, in which a token would not see itself, is none.
    pub fn slide(&mut self, window: Option<usize>, slides: impl Fn(usize) -> bool) {
        let window = window.filter(|&window| window > 0);
        for (index, attention) in self.config.attentions_mut() {
            if slides(index) {
                attention.window = window;
            }
        }
    }
}
