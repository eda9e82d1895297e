//! The decoder as data: every difference between the families is a field here.
//!
//! `arch/` fills it in from config.json or GGUF metadata; the decoder reads no other configuration.

use std::ops::Range;

pub use crate::backend::{Activation, DeltaShape, KeyBlocks, SsmShape};
pub use crate::images::TwoWay;

/// A whole decoder.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecoderConfig {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Number of positions that the model was made for.
    pub context_length: usize,
    /// Factor of embedding rows (Gemma: sqrt(hidden_size); Granite: embedding_multiplier).
    pub embedding_scale: f32,
    /// Number added to the variance by a norm of the embeddings without weights (Muse Glimmer).
    pub embedding_norm: Option<f32>,
    /// True if norms subtract the mean first (Cohere).
    pub centers_norms: bool,
    pub layers: Vec<LayerConfig>,
    /// Rotary tables that layers refer to by index (Gemma 3 has one for local and one for global layers).
    pub ropes: Vec<RopeConfig>,
    pub final_norm_eps: f32,
    /// Factor of logits (Granite: 1 / logits_scaling).
    pub logit_scale: f32,
    /// `cap * tanh(logits / cap)`.
    pub final_softcap: Option<f32>,
    pub per_layer_inputs: Option<PerLayerInputs>,
    pub altup: Option<AltUpConfig>,
    pub hyper: Option<HyperConfig>,
    /// The layers in which rows of an image see each other in both directions.
    pub two_way: TwoWay,
}

/// A second embedding of each token; each layer reads its own part (Gemma 4 E).
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerInputs {
    /// Number of values per layer.
    pub size: usize,
    /// Number of tokens with such an embedding; those after them have that of token 0.
    pub num_rows: usize,
    /// Token whose embedding images have.
    pub padding: u32,
    /// Activation of the gate through which a layer reads them.
    pub activation: Activation,
}

/// Alternating updates (Gemma 3n): several residual streams, of which a layer computes one and predicts the others.
#[derive(Debug, Clone, PartialEq)]
pub struct AltUpConfig {
    /// At least 2.
    pub num_streams: usize,
    /// Index of the stream that layers compute.
    pub active: usize,
    /// True if the active stream is multiplied by a vector before the per-layer input reads it.
    pub scales_output: bool,
    /// By layer: standard deviations above the mean at which the gates of the feed-forward part are cut off; `None` if all
    /// gates stay.
    pub gate_cutoffs: Vec<Option<f32>>,
}

/// Low-rank hyper-connections (Qwen3.8-Flash-Next): several residual streams, of which each part of a layer reads a mix, and to each of
/// which it adds its output by a weight of its own. They take the place of all norms before parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HyperConfig {
    /// At least 2.
    pub num_streams: usize,
    /// Width of the projection between the streams and their weights in the mix.
    pub rank: usize,
}

/// Embeddings of the token and those before it together (Qwen3.8-Flash-Next), which a layer adds to the streams before its mixer. Head
/// `i` reads, for the last `2 + i / heads per length` tokens, row `first + hash % count` of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramConfig {
    /// The factors of tokens in the hash: of the row's own, of the one before it, and so on; at least 2.
    pub multipliers: Vec<u64>,
    /// The rows of each head, those of pairs of tokens first; as many for each length.
    pub heads: Vec<Range<u64>>,
    /// Width of a head's rows.
    pub row_dim: usize,
    /// Token that ends a text: those up to it count as it.
    pub end: u32,
    /// Tokens in the convolution behind the embeddings, its own included, each as far apart as a hash has tokens.
    pub kernel: usize,
}

impl NgramConfig {
    /// Returns the number of tokens before a row's own that a hash takes in.
    pub fn num_before(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Returns the number of tokens before a row's own that the convolution reads.
    pub fn conv_reach(&self) -> usize {
        (self.kernel - 1) * self.multipliers.len()
    }

    /// Returns the width of a token's embeddings.
    pub fn width(&self) -> usize {
        self.heads.len() * self.row_dim
    }
}

impl DecoderConfig {
    /// Iterates over the attention layers.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.layers.iter().filter_map(|layer| match &layer.mixer {
            MixerConfig::Attention(attention) | MixerConfig::AttentionAndSsm { attention, .. } => {
                Some(attention)
            }
            _ => None,
        })
    }

    /// Iterates over the attention layers with their indices.
    pub fn attentions_mut(&mut self) -> impl Iterator<Item = (usize, &mut AttentionConfig)> {
        self.layers.iter_mut().enumerate().filter_map(|(index, layer)| match &mut layer.mixer {
            MixerConfig::Attention(attention) | MixerConfig::AttentionAndSsm { attention, .. } => {
                Some((index, attention))
            }
            _ => None,
        })
    }
}

/// One layer: a mixer and a feed-forward part, each between norms, each added to the residual stream. A layer may lack
/// either (Nemotron-H).
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    pub ngrams: Option<NgramConfig>,
    pub mixer: MixerConfig,
    pub feed_forward: FeedForwardConfig,
    pub norm_eps: f32,
    /// That of the norms behind the parts.
    pub post_norm_eps: f32,
    /// True if the feed-forward part reads what the mixer reads (Cohere).
    pub is_parallel: bool,
    /// True if there are norms before the mixer and before the feed-forward part (not in OLMo 2).
    pub pre_norms: bool,
    /// True if the outputs of the mixer and of the feed-forward part are normalised (Gemma 2 and 3, OLMo 2).
    pub post_norms: bool,
    /// Factors of what the mixer and the feed-forward part add to the residual stream (Granite, Falcon-H1).
    pub residual_scales: [f32; 2],
    /// True if the file has a factor of the residual stream after the layer (Gemma 4).
    pub has_output_scale: bool,
}

impl LayerConfig {
    /// Returns the width of the widest of its mixer's buffers.
    pub fn mixer_width(&self) -> usize {
        match &self.mixer {
            MixerConfig::Attention(attention) => {
                let indexer = attention.indexer.map_or(0, IndexerConfig::width);
                indexer.max(attention.num_heads * attention.head_dim)
            }
            MixerConfig::None | MixerConfig::ShortConv(_) => 0,
            MixerConfig::DeltaNet(net) => net.shape.conv_width(),
            MixerConfig::Lightning(lightning) => lightning.shape.conv_width(),
            MixerConfig::Ssm(ssm) => ssm.shape.conv_width(),
            MixerConfig::AttentionAndSsm { attention, ssm, .. } => {
                ssm.shape.conv_width().max(attention.num_heads * attention.head_dim)
            }
            MixerConfig::Latent(latent) => latent.width(),
        }
    }
}

/// The part of a layer in which tokens see earlier ones.
#[derive(Debug, Clone, PartialEq)]
pub enum MixerConfig {
    /// Attention, with queries, keys and values of their own.
    Attention(AttentionConfig),
    /// Attention whose keys and values share a compressed row (DeepSeek).
    Latent(LatentConfig),
    /// A short convolution between two gates (LFM2).
    ShortConv(ShortConvConfig),
    /// A gated delta net (Qwen 3.5, Kimi).
    DeltaNet(DeltaNetConfig),
    /// Lightning attention (Ling 3).
    Lightning(LightningConfig),
    /// A Mamba-2 mixer.
    Ssm(SsmConfig),
    /// Both read the layer's input, and the outputs are added, each multiplied by its factor in `scales` (Falcon-H1).
    AttentionAndSsm { attention: AttentionConfig, ssm: SsmConfig, scales: [f32; 2] },
    /// The layer has only a feed-forward part.
    None,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionConfig {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Factor of q . k.
    pub scale: f32,
    /// Number of tokens that a row sees, including its own; `None` for all.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// Index into [`DecoderConfig::ropes`]; `None` for layers without positions.
    pub rope: Option<usize>,
    pub qk_norm: QkNorm,
    pub temperature: Option<AttentionTemperature>,
    pub kv: KvSource,
    /// True if each head's value is normalised, without weights (Gemma 4).
    pub value_norm: bool,
    /// True if heads have learned scores that take part in the softmax without a value (gpt-oss).
    pub has_sinks: bool,
    /// Width of a head's values where they are narrower than its keys (MiMo V2).
    pub narrow_values: Option<usize>,
    /// Factor of values (MiMo V2).
    pub value_scale: f32,
    pub output_gate: Option<OutputGate>,
    /// Chooses the tokens that a row sees, for each KV head; `None` if it sees all (MiniMax M3).
    pub indexer: Option<IndexerConfig>,
}

impl AttentionConfig {
    /// Returns the width of a head's values.
    pub fn value_dim(&self) -> usize {
        self.narrow_values.unwrap_or(self.head_dim)
    }
}

/// Gate that multiplies the output of each head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutputGate {
    /// The sigmoid of a projection that is stored beside the head's query (Qwen 3.5).
    BesideQuery,
    /// This function of a projection of its own, which has a row for each value (Muse Glimmer, AFMoE) or for each head
    /// (Laguna, Step 3.5).
    Own(Activation),
}

/// Source of an attention layer's keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvSource {
    /// The layer's own projections.
    #[default]
    Own,
    /// Own projections, but if the file has no projection for values, the keys before their norm, normalised without
    /// weights (Gemma 4's global layers).
    OwnOrKeys,
    /// The rows of this earlier layer (Gemma 4 E).
    Layer(usize),
}

/// Growth of q with the position p: its factor is `1 + scale * ln(1 + floor(p / interval))` (Llama 4, Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionTemperature {
    pub scale: f32,
    /// Number of positions with the same factor.
    pub interval: usize,
}

/// Normalisation of q and k, before the rotary embedding unless a variant says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum QkNorm {
    #[default]
    None,
    /// Each head separately, without weights; q is multiplied by this number (Muse Glimmer).
    PerHeadBy(f32),
    /// Each head separately (Qwen 3, Gemma 3).
    PerHead,
    /// Each head separately, after the rotary embedding (Hunyuan).
    PerHeadAfterRope,
    /// All heads together (OLMo 2).
    Whole,
}

/// `out(c * convolution(b * x))` with three projections b, c and x of the layer's input (LFM2); causal, over each
/// channel separately.
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConvConfig {
    /// Tokens in the convolution, its own included.
    pub kernel: usize,
}

/// A gated delta net (Qwen 3.5), or Kimi delta attention.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaNetConfig {
    pub shape: DeltaShape,
    /// Tokens in the convolution before it, its own included.
    pub kernel: usize,
    /// True if each key's values fade by themselves (Kimi delta attention).
    pub is_kimi: bool,
    /// Logarithm of the least factor by which a token's values fade, below 0 (Ling 3); `None` if there is none.
    pub decay_bound: Option<f32>,
    /// Function of the outputs' gate.
    pub gate: Activation,
}

/// Lightning attention (Ling 2.5 and 2.6).
#[derive(Debug, Clone, PartialEq)]
pub struct LightningConfig {
    /// Each head has a key and a query of its own, as wide as its value.
    pub shape: SsmShape,
    /// Index into [`DecoderConfig::ropes`].
    pub rope: usize,
    /// True if each head's query and key are normalised before the rotary embedding.
    pub has_norms: bool,
    /// Groups of heads that are normalised together.
    pub norm_groups: usize,
    /// `[heads]`: a state is multiplied by `exp(-fading)` at each token.
    pub fading: Vec<f32>,
}

/// A Mamba-2 mixer (Granite 4, Nemotron-H, Falcon-H1).
#[derive(Debug, Clone, PartialEq)]
pub struct SsmConfig {
    pub shape: SsmShape,
    /// Tokens in the convolution before it, its own included.
    pub kernel: usize,
    pub norm: SsmNorm,
    /// Least and greatest time step.
    pub step_limits: [f32; 2],
    pub factors: SsmFactors,
}

/// Norm of a Mamba-2 mixer's output, over each group of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SsmNorm {
    None,
    AfterGate,
    BeforeGate,
    /// After the gate if the file has its weights, else none (GGUF, which does not say).
    IfStored,
}

/// Factors of the parts of a Mamba-2 mixer's input projection (Falcon-H1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SsmFactors {
    pub gate: f32,
    pub values: f32,
    pub key: f32,
    pub query: f32,
    pub step: f32,
}

impl SsmFactors {
    pub const ONES: SsmFactors = SsmFactors { gate: 1.0, values: 1.0, key: 1.0, query: 1.0, step: 1.0 };
}

/// Attention whose keys and values are projections of one latent row per token (DeepSeek V2 and V3). A head's query and key
/// have a plain part and a rotated one; all heads share the rotated key.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentConfig {
    pub num_heads: usize,
    /// Width of the queries' own latent row; `None` if queries are projections of the layer's input.
    pub query_rank: Option<usize>,
    /// Width of the latent row of keys and values.
    pub kv_rank: usize,
    /// Width of the plain part of a head's query.
    pub plain_dim: usize,
    /// Width of the rotated part; even.
    pub rotary_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// Factor of q . k.
    pub scale: f32,
    pub temperature: Option<AttentionTemperature>,
    /// Index into [`DecoderConfig::ropes`]; `None` for layers without positions (Kimi Linear).
    pub rope: Option<usize>,
    /// True if the file stores rotary pairs side by side.
    pub interleaved: bool,
    pub seen: SeenKeys,
    /// True if each head's output is multiplied by the sigmoid of a gate of its own (Ling 3).
    pub has_gate: bool,
}

/// The tokens that a row of latent attention sees, among those up to its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeenKeys {
    All,
    /// The layer's indexer chooses them by their scores (DeepSeek V3.2).
    Indexed(IndexerConfig),
    /// The last indexer before the layer has chosen them (GLM-5.2).
    AsBefore,
}

/// An indexer, with one key for all heads. A token's score is the sum over heads of `weight * max(q . key, 0)`, in ordinary attention
/// each head's `q . key`, by which it chooses for one KV head. Where blocks have one key, the mean of their tokens', the weights are 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexerConfig {
    pub num_heads: usize,
    /// Width of a query and of the key; at least that of the rotated part, with which each begins.
    pub head_dim: usize,
    /// Number of tokens that a row sees at most.
    pub top_k: usize,
    pub blocks: KeyBlocks,
    /// True if the file stores rotary pairs side by side.
    pub interleaved: bool,
    /// Index into [`DecoderConfig::ropes`] of the keys' positions, if those of the layer are not: a block's key has its first token's.
    pub key_rope: Option<usize>,
}

impl IndexerConfig {
    /// Returns the number of values of a row's queries.
    fn width(self) -> usize {
        self.num_heads * self.head_dim
    }
}

impl LatentConfig {
    /// Returns the width of the widest of its buffers.
    fn width(&self) -> usize {
        let indexer = self.indexer().copied().map_or(0, IndexerConfig::width);
        indexer.max(self.num_heads * self.key_dim())
    }

    /// Returns the layer's own indexer.
    pub fn indexer(&self) -> Option<&IndexerConfig> {
        match &self.seen {
            SeenKeys::Indexed(indexer) => Some(indexer),
            SeenKeys::All | SeenKeys::AsBefore => None,
        }
    }

    /// Returns the number of values that are kept per token.
    pub fn key_dim(&self) -> usize {
        self.kv_rank + self.rotary_dim
    }
}

/// A dense part, experts, or the sum of both.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForwardConfig {
    /// Network applied to every token.
    pub dense: Option<MlpConfig>,
    pub experts: Option<ExpertsConfig>,
    /// True if the output of `dense` is multiplied by the sigmoid of a product with its input (Qwen's shared
    /// expert).
    pub gates_dense: bool,
}

impl FeedForwardConfig {
    /// No feed-forward part: the layer has only a mixer.
    pub const NONE: FeedForwardConfig = FeedForwardConfig { dense: None, experts: None, gates_dense: false };

    pub fn is_none(&self) -> bool {
        self.dense.is_none() && self.experts.is_none()
    }

    /// Returns the width of a row within it: each row passes its experts in turn.
    pub fn width(&self) -> usize {
        let dense = self.dense.iter().map(|mlp| mlp.intermediate_size);
        dense.chain(self.experts.iter().map(|experts| experts.mlp.intermediate_size)).max().unwrap_or(0)
    }
}

/// `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpConfig {
    pub intermediate_size: usize,
    pub activation: Activation,
    pub is_gated: bool,
}

/// Networks of which each token uses those that its router scores highest; their results are weighted and added.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    pub count: usize,
    /// Number of experts used per token.
    pub used: usize,
    /// Configuration of each expert.
    pub mlp: MlpConfig,
    pub weights: ExpertWeights,
    /// Factor of the weights.
    pub weight_scale: f32,
    /// True if the file has a bias of each expert, which is added to the scores for the choice of experts
    /// alone.
    pub has_bias: bool,
    pub groups: Option<ExpertGroups>,
    /// Gemma 4: experts and router each read the residual stream through a norm of their own, the outputs of the
    /// experts and of the dense part are normalised before they are added, and the file has a factor for each
    /// expert's weights.
    pub has_norms: bool,
}

/// Weights of a token's experts, computed from its router's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertWeights {
    /// Softmax over all experts: the weights of the used ones sum to less than 1.
    OfAll,
    /// Softmax over the used experts.
    OfUsed,
    /// Sigmoid of each (DeepSeek V3).
    Sigmoid,
    /// Sigmoid of each, divided by the sum over the used experts (DeepSeek V3).
    SigmoidOfUsed,
}

/// Groups of consecutive experts. A token uses experts of its best groups only: those with the highest score (softmax), or
/// with the highest sum of two scores (sigmoid).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides that of the experts.
    pub count: usize,
    /// Number of groups used per token.
    pub used: usize,
}

/// Rotary positions: pairs are (i, i + dim/2) of the first `dim` values of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Rotated values of each head; at most head_dim, even.
    pub dim: usize,
    pub theta: f32,
    pub scaling: RopeScaling,
    /// The pairs that rotate by an image's rows and columns (M-RoPE); `None` if all rotate by the position.
    pub sections: Option<RopeSections>,
    /// Number of positions before a row's own by which the row is rotated, at least 0.
    pub lag: u32,
}

impl RopeConfig {
    /// Returns a table whose pairs all rotate by the position.
    pub fn new(dim: usize, theta: f32, scaling: RopeScaling) -> Self {
        Self { dim, theta, scaling, sections: None, lag: 0 }
    }
}

/// Sections of rotary pairs (M-RoPE). Sources: transformers' `Qwen2_5_VLTextModel` and `Qwen3VLTextRotaryEmbedding`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeSections {
    /// Number of pairs that rotate by the time, by the row and by the column.
    pub counts: [usize; 3],
    /// True if pair i rotates by the row if `i % 3 == 1`, by the column if `i % 3 == 2`, while i is below 3 times the
    /// section's count, and else by the time (Qwen 3 VL, Qwen 3.5); else the sections follow one another.
    pub interleaved: bool,
}

impl RopeSections {
    /// Returns the index of the number by which a pair rotates: time, row, column.
    pub fn axis(self, pair: usize) -> usize {
        let [time, row, _] = self.counts;
        match self.interleaved {
            true => Some(pair % 3).filter(|&axis| pair < 3 * self.counts[axis]).unwrap_or(0),
            false => usize::from(pair >= time) + usize::from(pair >= time + row),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// The frequencies as the base gives them.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f32 },
    /// Llama 3.1: low frequencies divided, high kept, a smooth ramp between.
    Llama3 { factor: f32, low_freq_factor: f32, high_freq_factor: f32, original_context: usize },
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
    LongRope { short: Vec<f32>, long: Vec<f32>, original_context: usize, attention_factor: f32 },
    /// Divisors stored in the file (GGUF's rope_freqs.weight).
    Divisors(Vec<f32>),
}

/// The naming and storage conventions of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Naming {
    /// True if names are GGUF's block names; else they are Hugging Face's module names.
    pub gguf: bool,
    /// True if the output matrix is the embedding table; `None` lets the presence of an output matrix decide.
    pub tied: Option<bool>,
    /// Offset added to stored norm weights (Gemma in Hugging Face's form stores them minus 1).
    pub norm_offset: f32,
    /// That of the norm before the output matrix.
    pub last_norm_offset: f32,
    /// True if q and k rows are stored with rotary pairs side by side (llama.cpp's converter, for llama and
    /// related families).
    pub interleaved_qk: bool,
    /// Hugging Face's name of the embedding table.
    pub embedding: &'static str,
    /// Hugging Face's name of the modules that are `self_attn` in other families.
    pub attention: &'static str,
    pub norms: NormNames,
    pub parts: PartNames,
    /// True if rows of gate and up alternate in the experts' stacked tensors, all of which are `[expert, in,
    /// out]` except those in MXFP4 (gpt-oss in Hugging Face's form).
    pub alternating_experts: bool,
    /// Number of parts of the rows of queries, keys and values in one matrix, each with its share of the three (MiMo V2.5); usually 1.
    pub qkv_parts: usize,
    /// Number of layers after the decoder's that predict further tokens (GGUF's NextN); they are left out.
    pub prediction_layers: usize,
}

/// Hugging Face's usual name of attention modules.
pub const SELF_ATTENTION: &str = "self_attn";

/// Hugging Face's and GGUF's name of a tensor within its layer, or their common prefix.
pub type Names = [&'static str; 2];

/// Names of norms, without `.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NormNames {
    pub pre_mixer: Names,
    pub post_mixer: Names,
    pub pre_mlp: Names,
    pub post_mlp: Names,
    /// Norms of q and k.
    pub qk: [Names; 2],
    /// Norm before the output matrix.
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

    /// Two norms per layer, of which GGUF names the second after the part before it.
    pub const POST_ATTENTION: NormNames =
        NormNames { pre_mlp: ["post_attention_layernorm", "post_attention_norm"], ..NormNames::LLAMA };

    /// Four norms per layer, or the two that come after (OLMo 2).
    pub const SANDWICH: NormNames = NormNames {
        post_mixer: ["post_attention_layernorm", "post_attention_norm"],
        pre_mlp: ["pre_feedforward_layernorm", "ffn_norm"],
        post_mlp: ["post_feedforward_layernorm", "post_ffw_norm"],
        ..NormNames::LLAMA
    };
}

/// Names of the projections that differ between families, without `.weight` and `.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartNames {
    /// Projections of queries, keys and values.
    pub attention_inputs: [Names; 3],
    /// The three in one matrix.
    pub attention_fused: Names,
    pub attention_output: Names,
    pub attention_gate: Names,
    /// Full name of the heads' learned scores without a value.
    pub sinks: Names,
    /// Hugging Face's module of a Mamba-2 mixer.
    pub ssm: &'static str,
    /// Gate, up and down.
    pub mlp: [Names; 3],
    /// Gate and up in one matrix.
    pub mlp_fused: Names,
    /// Gate, up and down of the dense part in layers with experts.
    pub mlp_beside_experts: [Names; 3],
    pub router: Names,
    /// Full name of the experts' biases.
    pub expert_bias: Names,
    pub dense_gate: Names,
    /// The experts of a layer. Hugging Face has modules, or tensors for all experts, under this name.
    pub experts: Names,
    /// Gate, up and down within an expert's module (Hugging Face only).
    pub expert_mlp: [&'static str; 3],
    /// Gate and up in one tensor for all experts, and down (Hugging Face only).
    pub expert_stacks: [&'static str; 2],
}

impl PartNames {
    const MLP: [Names; 3] =
        [["mlp.gate_proj", "ffn_gate"], ["mlp.up_proj", "ffn_up"], ["mlp.down_proj", "ffn_down"]];

    pub const LLAMA: PartNames = PartNames {
        attention_inputs: [
            ["self_attn.q_proj", "attn_q"],
            ["self_attn.k_proj", "attn_k"],
            ["self_attn.v_proj", "attn_v"],
        ],
        attention_fused: ["self_attn.qkv_proj", "attn_qkv"],
        attention_output: ["self_attn.o_proj", "attn_output"],
        attention_gate: ["self_attn.gate_proj", "attn_gate"],
        sinks: ["self_attn.sinks", "attn_sinks.weight"],
        ssm: "mamba",
        mlp: PartNames::MLP,
        mlp_fused: ["mlp.gate_up_proj", "ffn_up"],
        mlp_beside_experts: PartNames::MLP,
        router: ["mlp.gate", "ffn_gate_inp"],
        expert_bias: ["mlp.gate.e_score_correction_bias", "exp_probs_b.bias"],
        dense_gate: ["mlp.shared_expert_gate", "ffn_gate_inp_shexp"],
        experts: ["mlp.experts", "ffn"],
        expert_mlp: ["gate_proj", "up_proj", "down_proj"],
        expert_stacks: ["gate_up_proj", "down_proj"],
    };

    /// Llama's names, with one network for all shared experts (DeepSeek V2 and V3, GLM 4.5, ERNIE 4.5).
    pub const SHARED_EXPERTS: PartNames = PartNames {
        mlp_beside_experts: [
            ["mlp.shared_experts.gate_proj", "ffn_gate_shexp"],
            ["mlp.shared_experts.up_proj", "ffn_up_shexp"],
            ["mlp.shared_experts.down_proj", "ffn_down_shexp"],
        ],
        ..PartNames::LLAMA
    };

    /// Gate, up and down of the one expert that every token passes.
    pub const SHARED_EXPERT: [Names; 3] = [
        ["mlp.shared_expert.gate_proj", "ffn_gate_shexp"],
        ["mlp.shared_expert.up_proj", "ffn_up_shexp"],
        ["mlp.shared_expert.down_proj", "ffn_down_shexp"],
    ];

    /// Mixtral's names.
    pub const MIXTRAL: PartNames = PartNames {
        router: ["block_sparse_moe.gate", "ffn_gate_inp"],
        experts: ["block_sparse_moe.experts", "ffn"],
        expert_mlp: ["w1", "w3", "w2"],
        ..PartNames::LLAMA
    };
}
