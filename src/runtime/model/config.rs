//! The decoder as data: everything in which the families differ is a field here.
//!
//! `arch/` fills it in from config.json or GGUF metadata; the decoder reads nothing else.

pub use crate::runtime::backend::{Activation, DeltaShape};

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
    pub per_layer_inputs: Option<PerLayerInputs>,
}

/// A second embedding of each token, of which each layer reads a part of its own (Gemma 4 E).
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerInputs {
    /// Values for one layer.
    pub size: usize,
    /// Of the gate through which a layer reads them.
    pub activation: Activation,
}

impl DecoderConfig {
    /// The attention of those layers that attend.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            MixerConfig::Attention(attention) => Some(attention),
            MixerConfig::ShortConv(_) | MixerConfig::DeltaNet(_) => None,
        })
    }

    /// As [`Self::attentions`], with the layers' indices.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = (usize, &mut AttentionConfig)> {
        self.layers.iter_mut().enumerate().filter_map(|(index, layer)| match &mut layer.mixer {
            MixerConfig::Attention(attention) => Some((index, attention)),
            MixerConfig::ShortConv(_) | MixerConfig::DeltaNet(_) => None,
        })
    }
}

/// One layer: a mixer and a feed-forward part, each between norms, each added to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    pub mixer: MixerConfig,
    pub feed_forward: FeedForwardConfig,
    pub norm_eps: f32,
    /// Norm before the mixer and before the feed-forward part (absent in OLMo 2).
    pub pre_norms: bool,
    /// Norm of what the mixer and the feed-forward part add (Gemma 2 and 3, OLMo 2).
    pub post_norms: bool,
    /// Multiplies what is added to the residual stream (Granite).
    pub residual_scale: f32,
    /// Whether the file has a number that multiplies the residual stream after the layer (Gemma 4).
    pub has_output_scale: bool,
}

impl LayerConfig {
    /// Values of a row in the widest of its mixer's buffers.
    pub fn mixer_width(&self) -> usize {
        match &self.mixer {
            MixerConfig::Attention(attention) => attention.num_heads * attention.head_dim,
            MixerConfig::ShortConv(_) => 0,
            MixerConfig::DeltaNet(net) => net.shape.conv_width(),
        }
    }
}

/// How a layer's tokens learn of those before them.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerConfig {
    Attention(AttentionConfig),
    ShortConv(ShortConvConfig),
    DeltaNet(DeltaNetConfig),
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
    pub kv: KvSource,
    /// Whether each head's value is normalised, without weights (Gemma 4).
    pub value_norm: bool,
    /// Whether heads have learned scores that take part in the softmax without a value (gpt-oss).
    pub has_sinks: bool,
    /// Whether each head's output is multiplied by the sigmoid of a projection that lies beside the head's query (Qwen 3.5).
    pub has_output_gate: bool,
}

/// Where an attention layer's keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// Projections of its own.
    Own,
    /// As `Own`, but where the file has no projection for values, keys before their norm serve, normalised without weights
    /// (Gemma 4's global layers).
    OwnOrKeys,
    /// The rows of that layer, which comes before it (Gemma 4 E).
    Layer(usize),
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

/// `out(c * convolution(b * x))` with three projections b, c and x of the layer's input (LFM2); causal, and each channel by
/// itself.
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConvConfig {
    /// Tokens that a convolution sees, its own included.
    pub kernel: usize,
}

/// A gated delta net (Qwen 3.5).
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetConfig {
    pub shape: DeltaShape,
    /// Tokens that the convolution before it sees, its own included.
    pub kernel: usize,
}

/// At least one of the two; of both, the sum.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForwardConfig {
    /// What every token passes.
    pub dense: Option<MlpConfig>,
    pub experts: Option<ExpertsConfig>,
    /// Whether what `dense` gives is multiplied by the sigmoid of a product with its input (Qwen's shared expert).
    pub gates_dense: bool,
}

impl FeedForwardConfig {
    /// Values of a row within it: each row passes all experts that it uses in turn.
    pub fn width(&self) -> usize {
        let dense = self.dense.iter().map(|mlp| mlp.intermediate_size);
        dense.chain(self.experts.iter().map(|experts| experts.mlp.intermediate_size)).max().unwrap_or(0)
    }
}

/// `down(activation(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpConfig {
    pub intermediate_size: usize,
    pub activation: Activation,
}

/// Networks of which a token passes those that its router scores highest; their results are weighted and added.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    pub count: usize,
    /// Of them, for each token.
    pub used: usize,
    /// What each of them is.
    pub mlp: MlpConfig,
    pub weights: ExpertWeights,
    /// Gemma 4: experts and router each read the residual stream through a norm of their own, what the experts and the dense
    /// part give is normalised before it is added, and the file has a number for each expert that multiplies its weights.
    pub has_norms: bool,
}

/// How much of each expert a token gets: the softmax of its router's scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Over all experts: the weights of those used sum to less than 1.
    OfAll,
    /// Over those used.
    OfUsed,
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
    pub norms: NormNames,
    pub parts: PartNames,
    /// Rows of gate and up take turns in the experts' stacked tensors, and all of these are `[expert, in, out]` but for those
    /// in MXFP4 (gpt-oss in Hugging Face's form).
    pub alternating_experts: bool,
    /// Layers behind the decoder's that predict further tokens (GGUF's NextN), which are left out.
    pub prediction_layers: usize,
}

/// Hugging Face's and GGUF's name of a tensor within its layer, or of what its parts begin with.
pub type Names = [&'static str; 2];

/// Names of norms, without `.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormNames {
    pub pre_mixer: Names,
    pub post_mixer: Names,
    pub pre_mlp: Names,
    pub post_mlp: Names,
    /// Of q and k.
    pub qk: [Names; 2],
    /// Before the output matrix.
    pub last: Names,
}

impl NormNames {
    /// Two norms per layer, each before its part.
    pub const LLAMA: NormNames = NormNames {
        pre_mixer: ["input_layernorm", "attn_norm"],
        post_mixer: ["", ""],
        pre_mlp: ["post_attention_layernorm", "ffn_norm"],
        post_mlp: ["", ""],
        qk: [["self_attn.q_norm", "attn_q_norm"], ["self_attn.k_norm", "attn_k_norm"]],
        last: ["norm", "output_norm"],
    };

    /// Four norms per layer, or the two that come after (OLMo 2).
    pub const SANDWICH: NormNames = NormNames {
        post_mixer: ["post_attention_layernorm", "post_attention_norm"],
        pre_mlp: ["pre_feedforward_layernorm", "ffn_norm"],
        post_mlp: ["post_feedforward_layernorm", "post_ffw_norm"],
        ..NormNames::LLAMA
    };
}

/// Names of the projections that not all families call alike, without `.weight` and `.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartNames {
    pub attention_output: Names,
    /// Gate, up and down.
    pub mlp: [Names; 3],
    pub router: Names,
    pub dense_gate: Names,
    /// The experts of a layer. Hugging Face's form is a folder of modules or of tensors for all of them.
    pub experts: Names,
}

impl PartNames {
    pub const LLAMA: PartNames = PartNames {
        attention_output: ["self_attn.o_proj", "attn_output"],
        mlp: [["mlp.gate_proj", "ffn_gate"], ["mlp.up_proj", "ffn_up"], ["mlp.down_proj", "ffn_down"]],
        router: ["mlp.gate", "ffn_gate_inp"],
        dense_gate: ["mlp.shared_expert_gate", "ffn_gate_inp_shexp"],
        experts: ["mlp.experts", "ffn"],
    };
}
