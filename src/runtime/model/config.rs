//! The decoder as data: everything in which the families differ is a field here.
//!
//! `arch/` fills it in from config.json or GGUF metadata; the decoder reads nothing else.

pub use crate::runtime::backend::Activation;

/// A whole decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// The most positions the model was made for.
    pub context_length: usize,
    /// Multiplies embedding rows (Gemma: sqrt(hidden_size); Granite: embedding_multiplier).
    pub embedding_scale: f32,
    pub layers: Vec<LayerConfig>,
    /// Rotary tables that layers refer to by index (Gemma 3 has one for local and one for global layers).
    pub ropes: Vec<RopeConfig>,
    pub final_norm_eps: f32,
    /// Multiplies logits (Granite: 1 / logits_scaling).
    pub logit_scale: f32,
    /// `cap * tanh(logits / cap)`.
    pub final_softcap: Option<f32>,
}

/// One layer: a mixer and a feed-forward part, each between norms, each added to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    pub attention: AttentionConfig,
    pub mlp: MlpConfig,
    pub norm_eps: f32,
    /// Norm before the mixer and before the feed-forward part (absent in OLMo 2).
    pub pre_norms: bool,
    /// Norm of what the mixer and the feed-forward part add (Gemma 2 and 3, OLMo 2).
    pub post_norms: bool,
    /// Multiplies what is added to the residual stream (Granite).
    pub residual_scale: f32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Multiplies q . k.
    pub scale: f32,
    /// Sees at most this many tokens, itself included.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// Index into [`DecoderConfig::ropes`]; `None` for layers without positions.
    pub rope: Option<usize>,
    pub qk_norm: QkNorm,
}

/// Whether q and k are normalised before the rotary embedding, and over what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head by itself (Qwen 3, Gemma 3).
    PerHead,
    /// All heads together (OLMo 2).
    Whole,
}

#[derive(Debug, Clone, PartialEq)]
pub struct MlpConfig {
    pub intermediate_size: usize,
    pub activation: Activation,
}

/// Rotary positions: pairs are (i, i + dim/2) of the first `dim` values of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Rotated values of each head; at most head_dim, even.
    pub dim: usize,
    pub theta: f32,
    pub scaling: RopeScaling,
}

#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided, high kept, a smooth ramp between.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023): interpolate by wavelength, scale the magnitude.
    Yarn {
        factor: f32,
        beta_fast: f32,
        beta_slow: f32,
        original_context: usize,
        attention_factor: Option<f32>,
        truncate: bool,
    },
    /// LongRoPE (phi-3): one divisor per frequency, another set beyond the original context. Empty lists are filled from
    /// GGUF's rope_factors_short.weight and rope_factors_long.weight.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_context: usize,
        attention_factor: f32,
    },
    /// Divisors stored in the file (GGUF's rope_freqs.weight).
    Divisors(Vec<f32>),
}

/// How a file names and stores what [`DecoderConfig`] describes.
#[derive(Debug, Clone, PartialEq)]
pub struct Naming {
    /// GGUF's block names; else Hugging Face's module names.
    pub gguf: bool,
    /// Whether the output matrix is the embedding table; `None` lets the presence of an output matrix decide.
    pub tied: Option<bool>,
    /// Added to stored norm weights (Gemma in Hugging Face's form stores them minus 1).
    pub norm_offset: f32,
    /// q and k rows are stored with rotary pairs side by side (llama.cpp's converter, llama and its relatives).
    pub interleaved_qk: bool,
    /// Hugging Face's names of the norms around mixer and feed-forward part.
    pub norms: NormNames,
}

/// Hugging Face's names of a layer's norms; GGUF's are the same for all families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormNames {
    pub pre_mixer: &'static str,
    pub post_mixer: &'static str,
    pub pre_mlp: &'static str,
    pub post_mlp: &'static str,
}

impl NormNames {
    /// Two norms per layer, each before its part.
    pub const LLAMA: NormNames = NormNames {
        pre_mixer: "input_layernorm.weight",
        post_mixer: "",
        pre_mlp: "post_attention_layernorm.weight",
        post_mlp: "",
    };

    /// Four norms per layer, or the two that come after (OLMo 2).
    pub const SANDWICH: NormNames = NormNames {
        pre_mixer: "input_layernorm.weight",
        post_mixer: "post_attention_layernorm.weight",
        pre_mlp: "pre_feedforward_layernorm.weight",
        post_mlp: "post_feedforward_layernorm.weight",
    };
}
