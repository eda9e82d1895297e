//! The indexer of a layer: queries and one key per token score the tokens, and rows see those with the highest scores. In latent
//! attention (DeepSeek V3.2, GLM-5) the queries come from the queries' latent row, and a token's score is a weighted sum over heads;
//! in attention (MiniMax M3) each head chooses blocks of tokens for one KV head, or all heads together choose blocks that have one key,
//! the mean of their tokens' (Qwen3.8-Flash-Next). Sources: transformers `DeepseekV32Indexer`, `GlmMoeDsaIndexer`,
//! `MiniMaxM3VLIndexer` and `Qwen4ExpTextQSAIndexer`; llama.cpp's converter for GGUF's names.
//!
//! The key is a row of each token in the layer's pages, beside those of attention. Where blocks have one, each token's row is the mean
//! of as many last tokens, whose projections a convolution's state keeps, and the choice reads those at the ends of blocks.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::backend::{Backend, ConvSpec, IndexerSpec, Recurrence};
use crate::model::config::{AttentionConfig, IndexerConfig, LatentConfig, Names};
use crate::model::weights::{Linear, deinterleaved};
use llmctl_base::error::{LoadResult, Result};

/// The classes normalise keys with this constant, not with the configuration's.
const KEY_EPS: f32 = 1e-6;

const QUERY: Names = ["self_attn.indexer.wq_b", "indexer.attn_q_b"];
const KEY: Names = ["self_attn.indexer.wk", "indexer.attn_k"];
const KEY_NORM: [Names; 2] = [
    ["self_attn.indexer.k_norm.weight", "indexer.k_norm.weight"],
    ["self_attn.indexer.k_norm.bias", "indexer.k_norm.bias"],
];
/// The heads' weights, which depend on the token.
const WEIGHTS: Names = ["self_attn.indexer.weights_proj", "indexer.proj"];

/// Query and key of an indexer whose heads choose for KV heads, and the norms of both.
const OF_HEADS: [Names; 2] =
    [["self_attn.index_q_proj", "indexer.q_proj"], ["self_attn.index_k_proj", "indexer.k_proj"]];
const NORMS_OF_HEADS: [Names; 2] =
    [["self_attn.index_q_norm", "indexer.q_norm"], ["self_attn.index_k_norm", "indexer.k_norm"]];

/// Query and key in one matrix, where blocks have one key, and the norms.
const FUSED: Names = ["self_attn.indexer.index_qk_proj", ""];
const NORMS_OF_MEANS: [Names; 2] = [
    ["self_attn.indexer.q_layernorm", "indexer.q_norm"],
    ["self_attn.indexer.k_layernorm", "indexer.k_norm"],
];

pub struct Indexer<B: Backend> {
    config: IndexerConfig,
    rope: Option<usize>,
    store: StoreIndex,
    query: Projection<B>,
    key: Projection<B>,
    form: Form<B>,
}

enum Form<B: Backend> {
    /// The heads' weights; keys are centred and normalised.
    Weighted { weights: Projection<B>, key_norm: [B::Vector; 2] },
    /// The norms of each head's query, and of the key.
    PerHead { norms: [B::Vector; 2], eps: f32, means: Option<Means<B>> },
}

/// The means that stand for blocks.
struct Means<B: Backend> {
    /// State of the last tokens' projections.
    store: StoreIndex,
    /// Weights of a mean.
    kernel: B::Vector,
}

impl<B: Backend> Indexer<B> {
    /// Loads the indexer of a layer with latent attention whose second store holds its keys; `None` if the layer has none.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        latent: &LatentConfig,
        stores: &[StoreIndex],
    ) -> LoadResult<Option<Self>> {
        let (Some(config), Some(rank), &[_, store]) = (latent.indexer(), latent.query_rank, stores) else {
            return Ok(None);
        };
        let (file, layer, hidden) = (loader.file, loader.layer, loader.hidden);
        let IndexerConfig { num_heads, head_dim, interleaved, .. } = *config;
        let unrolled = |linear: Linear| match interleaved {
            true => linear.deinterleave(head_dim, latent.rotary_dim),
            false => linear,
        };
        let norm = |names| -> LoadResult<_> {
            let stored = file.values(layer, names, head_dim)?;
            let source = |at| if interleaved { deinterleaved(at, head_dim, latent.rotary_dim) } else { at };
            loader.backend.vector((0..head_dim).map(|at| stored[source(at)]).collect())
        };
        Ok(Some(Self {
            config: *config,
            rope: latent.rope,
            store,
            query: loader.projection(unrolled(file.linear(layer, QUERY, [num_heads * head_dim, rank])?))?,
            key: loader.projection(unrolled(file.linear(layer, KEY, [head_dim, hidden])?))?,
            form: Form::Weighted {
                weights: loader.gate(file.linear(layer, WEIGHTS, [num_heads, hidden])?)?,
                key_norm: [norm(KEY_NORM[0])?, norm(KEY_NORM[1])?],
            },
        }))
    }

    /// Loads the indexer of an attention layer, as [`Self::load`] does.
    ///
    /// # Errors
    /// Those of [`Self::load`].
    pub fn of_heads(
        loader: &Loader<'_, B>,
        attention: &AttentionConfig,
        stores: &[StoreIndex],
    ) -> LoadResult<Option<Self>> {
        let (Some(config), &[_, store, ref of_means @ ..]) = (attention.indexer, stores) else {
            return Ok(None);
        };
        let IndexerConfig { num_heads, head_dim, blocks, .. } = config;
        let (file, rows) = (loader.file, [num_heads * head_dim, head_dim]);
        let [query, key] = file.linears(loader.layer, OF_HEADS, FUSED, rows, loader.hidden)?;
        let [of_query, of_key] = if of_means.is_empty() { NORMS_OF_HEADS } else { NORMS_OF_MEANS };
        let means = |store: &StoreIndex| -> LoadResult<_> {
            let weights = vec![1.0 / blocks.size as f32; blocks.size * head_dim];
            Ok(Means { store: *store, kernel: loader.backend.vector(weights)? })
        };
        Ok(Some(Self {
            config,
            rope: attention.rope,
            store,
            query: loader.projection(query)?,
            key: loader.projection(key)?,
            form: Form::PerHead {
                norms: [loader.norm(of_query, head_dim)?, loader.norm(of_key, head_dim)?],
                eps: loader.eps,
                means: of_means.first().map(means).transpose()?,
            },
        }))
    }

    /// Stores the keys of all rows, and chooses the tokens that each sees. In latent attention `up` holds the queries' latent rows.
    pub fn choose(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { gate, up, sent, returned, scores, factors, selected, .. } = &mut **work;
        let IndexerConfig { num_heads, head_dim, top_k, blocks, key_rope, .. } = self.config;
        let rotate = |rope: Option<usize>, x: &mut B::Buffer| match rope {
            Some(rope) => backend.rope(x, head_dim, &step.angles[rope]),
            None => Ok(()),
        };
        match &self.form {
            Form::Weighted { weights, key_norm: [weight, bias] } => {
                backend.matmul_each(input, &mut [self.key.onto(gate), weights.onto(scores)])?;
                backend.layer_norm(gate, [weight, bias], KEY_EPS, returned)?;
            }
            Form::PerHead { norms: [_, norm], eps, means } => {
                self.key.apply(backend, input, gate)?;
                if let Some(Means { store, kernel }) = means {
                    let spec = ConvSpec { store: store.index, kernel, bias: None, silu: false };
                    let means = Recurrence::Convolution(spec, gate);
                    backend.recur(kv, &means, &step.spans[store.group], returned)?;
                    std::mem::swap(gate, returned);
                }
                backend.rms_norm(gate, norm, *eps, returned)?;
            }
        }
        rotate(key_rope.or(self.rope), returned)?;
        let spans = &step.spans[self.store.group];
        backend.store_kv(kv, self.store.index, returned, returned, spans)?;
        if step.positions.iter().all(|position| *position < blocks.first_choosing(top_k)) {
            selected.see_all(top_k);
            return Ok(());
        }
        match &self.form {
            Form::Weighted { .. } => self.query.apply(backend, up, sent)?,
            Form::PerHead { norms: [norm, _], eps, .. } => {
                self.query.apply(backend, input, gate)?;
                backend.rms_norm(gate, norm, *eps, sent)?;
            }
        }
        rotate(self.rope, sent)?;
        let is_per_head = matches!(self.form, Form::PerHead { means: None, .. });
        if blocks.are_whole() {
            factors.clear();
            factors.resize(step.positions.len() * num_heads, 1.0);
            backend.write(factors, num_heads, scores)?;
        }
        let spec = IndexerSpec { store: self.store.index, top_k, blocks, is_per_head };
        backend.select_keys(kv, &spec, [sent, scores], spans, selected)
    }
}
