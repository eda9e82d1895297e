//! The encoder as data, and the names of its tensors: every difference between the families is a field here.

use crate::backend::Activation;
use crate::model::config::RopeConfig;
use crate::tensor::TensorSource;

/// A whole encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Limit of tokens per text.
    pub context_length: usize,
    pub num_heads: usize,
    pub intermediate_size: usize,
    pub activation: Activation,
    /// True if the feed-forward part is `down(activation(gate(x)) * up(x))` instead of
    /// `down(activation(up(x)))`.
    pub is_gated: bool,
    pub norm_eps: f32,
    /// True if norms come before the parts of a layer and behind the last layer (ModernBERT), instead of
    /// behind each part.
    pub pre_norms: bool,
    /// Row of the table of positions for the first token; `None` without such a table.
    pub first_position: Option<usize>,
    /// Rows of the table of token types, which tell the parts of a pair apart; 0 without such a table.
    pub num_types: usize,
    pub layers: Vec<EncoderLayerConfig>,
    /// Rotary tables that layers refer to by index.
    pub ropes: Vec<RopeConfig>,
    pub names: EncoderNames,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderLayerConfig {
    /// Number of tokens that a token sees on each side; `None` for all.
    pub distance: Option<usize>,
    /// Index into [`EncoderConfig::ropes`].
    pub rope: Option<usize>,
}

/// Names of tensors in one format, without `.weight` and `.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderNames {
    /// Prefixes of all names, of which a file has one.
    pub prefixes: &'static [&'static str],
    pub words: &'static str,
    pub positions: &'static str,
    pub types: &'static str,
    pub embedding_norm: &'static str,
    /// Prefix of the layers' names, before their number.
    pub layers: &'static str,
    /// Projections of queries, keys and values, where they are apart.
    pub qkv: [&'static str; 3],
    /// The three as consecutive rows of one matrix.
    pub fused_qkv: &'static str,
    pub attention_output: &'static str,
    pub attention_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    /// Gate and up as consecutive rows of one matrix.
    pub gate_up: &'static str,
    pub down: &'static str,
    pub mlp_norm: &'static str,
    /// Norm behind the last layer.
    pub last_norm: &'static str,
}

impl EncoderNames {
    /// Returns the prefix of a file's names: that of its table of words. `None` if the file has no such table.
    pub fn prefix_in(&self, source: &dyn TensorSource) -> Option<&'static str> {
        let has = |prefix: &&&str| source.describe(&format!("{prefix}{}.weight", self.words)).is_some();
        self.prefixes.iter().find(has).copied()
    }

    pub const BERT: EncoderNames = EncoderNames {
        prefixes: &["", "bert.", "roberta.", "xlm_roberta."],
        words: "embeddings.word_embeddings",
        positions: "embeddings.position_embeddings",
        types: "embeddings.token_type_embeddings",
        embedding_norm: "embeddings.LayerNorm",
        layers: "encoder.layer",
        qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
        fused_qkv: "",
        attention_output: "attention.output.dense",
        attention_norm: "attention.output.LayerNorm",
        gate: "",
        up: "intermediate.dense",
        gate_up: "",
        down: "output.dense",
        mlp_norm: "output.LayerNorm",
        last_norm: "",
    };

    pub const NOMIC: EncoderNames = EncoderNames {
        prefixes: &["", "bert.", "nomic_bert.", "model."],
        embedding_norm: "emb_ln",
        layers: "encoder.layers",
        fused_qkv: "attn.Wqkv",
        attention_output: "attn.out_proj",
        attention_norm: "norm1",
        gate: "mlp.fc12",
        up: "mlp.fc11",
        down: "mlp.fc2",
        mlp_norm: "norm2",
        ..EncoderNames::BERT
    };

    pub const MODERN: EncoderNames = EncoderNames {
        prefixes: &["", "model."],
        words: "embeddings.tok_embeddings",
        embedding_norm: "embeddings.norm",
        layers: "layers",
        fused_qkv: "attn.Wqkv",
        attention_output: "attn.Wo",
        attention_norm: "attn_norm",
        up: "",
        gate_up: "mlp.Wi",
        down: "mlp.Wo",
        mlp_norm: "mlp_norm",
        last_norm: "final_norm",
        ..EncoderNames::BERT
    };

    /// GGUF's names of encoders with norms behind each part.
    pub const GGUF: EncoderNames = EncoderNames {
        prefixes: &[""],
        words: "token_embd",
        positions: "position_embd",
        types: "token_types",
        embedding_norm: "token_embd_norm",
        layers: "blk",
        qkv: ["attn_q", "attn_k", "attn_v"],
        fused_qkv: "attn_qkv",
        attention_output: "attn_output",
        attention_norm: "attn_output_norm",
        gate: "ffn_gate",
        up: "ffn_up",
        gate_up: "",
        down: "ffn_down",
        mlp_norm: "layer_output_norm",
        last_norm: "output_norm",
    };

    pub const GGUF_MODERN: EncoderNames = EncoderNames {
        attention_norm: "attn_norm",
        up: "",
        gate_up: "ffn_up",
        mlp_norm: "ffn_norm",
        ..EncoderNames::GGUF
    };
}
