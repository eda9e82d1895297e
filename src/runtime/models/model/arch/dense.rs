//! The common parts of all Llama-shaped decoders, read under either format's keys.

use serde_json::Value;

use super::Description;
use super::config_reader::ConfigReader;
use super::rope::{partial_factor, rope};
use crate::model::config::{
    Activation, AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig, MixerConfig, MlpConfig,
    Naming, NormNames, PartNames, QkNorm, SELF_ATTENTION,
};
use llmctl_base::error::LoadResult;

/// Limits for numbers in a file, generous compared to the largest published models.
pub const MAX_LAYERS: usize = 1 << 12;
pub const MAX_WIDTH: usize = 1 << 22;
pub const MAX_VOCAB: usize = 1 << 26;

/// Defaults of a family's class for Hugging Face keys that a config may leave out.
#[derive(Debug, Clone, Copy)]
pub struct ConfigDefaults {
    pub num_heads: Option<usize>,
    pub num_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    /// True if the numbers and the size of heads are defaults for GGUF, too.
    pub hold_in_gguf: bool,
    pub vocab_size: Option<usize>,
    pub context_length: usize,
    pub rope_theta: f32,
    pub norm_eps: f32,
    pub activation: Activation,
    pub tied: Option<bool>,
    /// True if the family parses experts itself; other families refuse a file with experts.
    pub experts: bool,
    pub intermediate_size: Option<usize>,
    /// Takes the place of `num_hidden_layers`.
    pub num_layers: Option<usize>,
    /// The rotated fraction of a head.
    pub rotated: f32,
}

impl ConfigDefaults {
    /// Those of most classes.
    pub const CLASS: Self = Self {
        num_heads: None,
        num_kv_heads: None,
        head_dim: None,
        hold_in_gguf: false,
        vocab_size: None,
        context_length: 2048,
        rope_theta: 10_000.0,
        norm_eps: 1e-6,
        activation: Activation::Silu,
        tied: None,
        experts: false,
        intermediate_size: None,
        num_layers: None,
        rotated: 1.0,
    };

    /// Returns the defaults that hold in the file's format.
    fn in_format_of(self, reader: &ConfigReader) -> Self {
        match reader.is_gguf() && !self.hold_in_gguf {
            true => Self { num_heads: None, num_kv_heads: None, head_dim: None, ..self },
            false => self,
        }
    }
}

/// Parses a Llama: pre-norms, rotary positions on all layers, SwiGLU, no windows. Families change the fields that
/// differ.
pub fn dense(name: &'static str, reader: &ConfigReader, defaults: ConfigDefaults) -> LoadResult<Description> {
    let defaults = defaults.in_format_of(reader);
    let (hidden_size, num_layers) = (hidden_size(reader)?, num_layers(reader, defaults)?);
    let attention = attention(reader, hidden_size, num_layers, defaults)?;
    let rotated = rotated_dim(reader, attention.head_dim, defaults.rotated)?;
    decoder(name, reader, MixerConfig::Attention(attention), rotated, defaults)
}

/// Parses a decoder as [`dense`] does, with this mixer in every layer and one rotary table of `rotated` values.
pub fn decoder(
    name: &'static str,
    reader: &ConfigReader,
    mixer: MixerConfig,
    rotated: usize,
    defaults: ConfigDefaults,
) -> LoadResult<Description> {
    if !defaults.experts {
        refuse_experts(reader)?;
    }
    let (hidden_size, num_layers) = (hidden_size(reader)?, num_layers(reader, defaults)?);
    let vocab_size = match defaults.vocab_size {
        Some(default) => reader.size_or("vocab_size", default, MAX_VOCAB)?,
        None => reader.size("vocab_size", MAX_VOCAB)?,
    };
    let layer = layer(reader, mixer, num_layers, defaults)?;
    let config = DecoderConfig {
        architecture: name,
        vocab_size,
        hidden_size,
        context_length: context_length(reader, defaults)?,
        embedding_scale: 1.0,
        final_norm_eps: layer.norm_eps,
        layers: vec![layer; num_layers],
        ropes: vec![rope(reader, "full_attention", rotated, defaults.rope_theta)?],
        logit_scale: 1.0,
        ..DecoderConfig::default()
    };
    Ok(Description { config, naming: naming(reader, defaults)?, prediction: None })
}

fn hidden_size(reader: &ConfigReader) -> LoadResult<usize> {
    width(reader, reader.pick("hidden_size", "embedding_length"), None)
}

fn num_layers(reader: &ConfigReader, defaults: ConfigDefaults) -> LoadResult<usize> {
    match defaults.num_layers.filter(|_| !reader.is_gguf()) {
        Some(num_layers) => Ok(num_layers),
        None => reader.size(reader.pick("num_hidden_layers", "block_count"), MAX_LAYERS),
    }
}

/// Parses one layer, with the largest feed-forward width of any layer.
fn layer(
    reader: &ConfigReader,
    mixer: MixerConfig,
    num_layers: usize,
    defaults: ConfigDefaults,
) -> LoadResult<LayerConfig> {
    let norm_eps = norm_eps(reader, defaults)?;
    let inner_key = reader.pick("intermediate_size", "feed_forward_length");
    let mlp = MlpConfig {
        intermediate_size: widest(reader, inner_key, defaults.intermediate_size, num_layers)?,
        activation: activation(reader, defaults.activation)?,
        is_gated: true,
    };
    Ok(LayerConfig {
        ngrams: None,
        mixer,
        feed_forward: FeedForwardConfig { dense: Some(mlp), experts: None, gates_dense: false },
        has_output_scale: false,
        norm_eps,
        post_norm_eps: norm_eps,
        is_parallel: false,
        pre_norms: true,
        post_norms: false,
        residual_scales: [1.0; 2],
    })
}

/// Returns the names and storage conventions of a Llama.
fn naming(reader: &ConfigReader, defaults: ConfigDefaults) -> LoadResult<Naming> {
    let gguf = reader.is_gguf();
    Ok(Naming {
        gguf,
        tied: if gguf { None } else { reader.flag("tie_word_embeddings")?.or(defaults.tied) },
        norm_offset: 0.0,
        last_norm_offset: 0.0,
        interleaved_qk: false,
        embedding: "embed_tokens",
        attention: SELF_ATTENTION,
        norms: NormNames::LLAMA,
        parts: PartNames::LLAMA,
        alternating_experts: false,
        qkv_parts: 1,
        prediction_layers: 0,
    })
}

/// Parses attention with full visibility and the first rotary table.
fn attention(
    reader: &ConfigReader,
    hidden_size: usize,
    num_layers: usize,
    defaults: ConfigDefaults,
) -> LoadResult<AttentionConfig> {
    let heads_key = reader.pick("num_attention_heads", "attention.head_count");
    let num_heads = widest(reader, heads_key, defaults.num_heads, num_layers)?;
    let kv_heads_key = reader.pick("num_key_value_heads", "attention.head_count_kv");
    let default_kv_heads = Some(defaults.num_kv_heads.unwrap_or(num_heads));
    let num_kv_heads = widest(reader, kv_heads_key, default_kv_heads, num_layers)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        let message = format!("{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly");
        return Err(reader.error(kv_heads_key, message));
    }
    let head_dim = head_dim(reader, hidden_size / num_heads, defaults)?;
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rope: Some(0),
        value_scale: 1.0,
        ..AttentionConfig::default()
    })
}

fn width(reader: &ConfigReader, key: &str, default: Option<usize>) -> LoadResult<usize> {
    default.map_or_else(|| reader.size(key, MAX_WIDTH), |default| reader.size_or(key, default, MAX_WIDTH))
}

/// Returns the largest size of any layer. GGUF has a list if layers differ; the family then sets each layer's own.
fn widest(reader: &ConfigReader, key: &str, default: Option<usize>, num_layers: usize) -> LoadResult<usize> {
    match reader.value(key) {
        Some(Value::Array(_)) => {
            let counts = reader.counts(key, num_layers)?.unwrap_or_default();
            let most = counts.into_iter().max().filter(|most| (1..=MAX_WIDTH).contains(most));
            most.ok_or_else(|| reader.error(key, format!("has no count between 1 and {MAX_WIDTH}")))
        }
        _ => width(reader, key, default),
    }
}

fn context_length(reader: &ConfigReader, defaults: ConfigDefaults) -> LoadResult<usize> {
    let key = reader.pick("max_position_embeddings", "context_length");
    match reader.count(key)?.unwrap_or(defaults.context_length) {
        context if context >= 2 => Ok(context),
        context => Err(reader.error(key, format!("a context of {context} has no room for an answer"))),
    }
}

fn norm_eps(reader: &ConfigReader, defaults: ConfigDefaults) -> LoadResult<f32> {
    let key = reader.pick("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    match reader.number(key)?.unwrap_or(defaults.norm_eps) {
        eps if eps >= 0.0 => Ok(eps),
        eps => Err(reader.error(key, format!("{eps} is below 0"))),
    }
}

/// Refuses experts, which a file of a dense family may contain (Mixtral as `llama`).
fn refuse_experts(reader: &ConfigReader) -> LoadResult<()> {
    const KEY: &str = "expert_count";
    match reader.is_gguf() && reader.count(KEY)?.is_some_and(|count| count > 0) {
        true => Err(reader.error(KEY, "mixtures of experts are not supported yet")),
        false => Ok(()),
    }
}

fn head_dim(reader: &ConfigReader, derived: usize, defaults: ConfigDefaults) -> LoadResult<usize> {
    let key = reader.pick("head_dim", "attention.key_length");
    let dim = reader.count(key)?.or(defaults.head_dim).unwrap_or(derived);
    if dim == 0 || dim > MAX_WIDTH || !dim.is_multiple_of(2) {
        return Err(reader.error(key, format!("{dim} is not a possible head size")));
    }
    if reader.is_gguf() && reader.count("attention.value_length")?.is_some_and(|value| value != dim) {
        return Err(reader.error("attention.value_length", "differs from attention.key_length"));
    }
    Ok(dim)
}

fn rotated_dim(reader: &ConfigReader, head_dim: usize, default: f32) -> LoadResult<usize> {
    let key = reader.pick("partial_rotary_factor", "rope.dimension_count");
    let dim = if reader.is_gguf() {
        reader.count(key)?.unwrap_or(head_dim)
    } else {
        let factor = match partial_factor(reader, "full_attention") {
            Some(value) => {
                value.as_f64().ok_or_else(|| reader.error("rope_parameters", "partial_rotary_factor"))?
            }
            None => reader.number(key)?.unwrap_or(default).into(),
        };
        (head_dim as f64 * factor) as usize
    };
    if dim == 0 || dim > head_dim || !dim.is_multiple_of(2) {
        return Err(reader.error(key, format!("{dim} of {head_dim} values of a head cannot be rotated")));
    }
    Ok(dim)
}

/// Parses the activation. GGUF does not name it: the family fixes it.
fn activation(reader: &ConfigReader, default: Activation) -> LoadResult<Activation> {
    if reader.is_gguf() {
        return Ok(default);
    }
    let key = if reader.value("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    match reader.string(key)?.as_deref() {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu2") => Ok(Activation::SquaredRelu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("xielu") if matches!(default, Activation::Xielu { .. }) => Ok(default),
        Some(other) => Err(reader.error(key, format!("activation {other:?} is not supported"))),
    }
}

impl Description {
    /// Leaves the layers out that predict further tokens. GGUF counts them among the blocks, Hugging Face does not: its files
    /// may have them after the others, `hugging_face_key` of them.
    pub fn leave_prediction_out(
        &mut self,
        reader: &ConfigReader,
        hugging_face_key: &'static str,
    ) -> LoadResult<()> {
        let key = reader.pick(hugging_face_key, "nextn_predict_layers");
        let extra = reader.count(key)?.unwrap_or(0);
        self.naming.prediction_layers = extra;
        if !reader.is_gguf() {
            return Ok(());
        }
        match self.config.layers.len().checked_sub(extra) {
            None | Some(0) => {
                Err(reader.error(key, format!("{extra} prediction layers leave no layer for the decoder")))
            }
            Some(count) => {
                self.config.layers.truncate(count);
                Ok(())
            }
        }
    }

    /// Normalises q and k of all layers.
    pub fn normalize_qk(&mut self, qk_norm: QkNorm) {
        self.config.attentions_mut().for_each(|(_, attention)| attention.qk_norm = qk_norm);
    }

    /// Moves the norms behind the parts of each layer (OLMo 2), and normalises q and k.
    pub fn normalize_outputs(&mut self, qk_norm: QkNorm) {
        self.naming.norms = NormNames::SANDWICH;
        self.normalize_qk(qk_norm);
        for layer in &mut self.config.layers {
            (layer.pre_norms, layer.post_norms) = (false, true);
        }
    }

    /// Returns the dense networks with their layers' numbers.
    pub fn networks_mut(&mut self) -> impl Iterator<Item = (usize, &mut MlpConfig)> {
        let networks = self.config.layers.iter_mut().map(|layer| layer.feed_forward.dense.as_mut());
        networks.enumerate().filter_map(|(index, network)| Some((index, network?)))
    }

    /// Sets the window of the layers for which `slides` returns true. A window of 0, in which a token would not see
    /// itself, counts as none.
    pub fn slide(&mut self, window: Option<usize>, slides: impl Fn(usize) -> bool) {
        let window = window.filter(|&window| window > 0);
        for (index, attention) in self.config.attentions_mut() {
            if slides(index) {
                attention.window = window;
            }
        }
    }
}
