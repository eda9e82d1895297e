//! The indexer of a layer: queries and one key per token score the tokens, and rows see those with the highest scores. In latent
//! attention (DeepSeek V3.2, GLM-5) the queries come from the queries' latent row, and a token's score is a weighted sum over heads;
//! in attention (MiniMax M3) each head chooses blocks of tokens for one KV head. Sources: transformers `DeepseekV32Indexer`,
//! `GlmMoeDsaIndexer` and `MiniMaxM3VLIndexer`; llama.cpp's converter for GGUF's names.
//!
//! The key is a row of each token in the layer's pages, beside those of attention.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::backend::{Backend, IndexerSpec};
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
    PerHead { norms: [B::Vector; 2], eps: f32 },
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
        let (Some(config), &[_, store]) = (attention.indexer, stores) else { return Ok(None) };
        let IndexerConfig { num_heads, head_dim, .. } = config;
        let norm = |names| loader.norm(names, head_dim);
        Ok(Some(Self {
            config,
            rope: attention.rope,
            store,
            query: loader.linear(OF_HEADS[0], [num_heads * head_dim, loader.hidden])?,
            key: loader.linear(OF_HEADS[1], [head_dim, loader.hidden])?,
            form: Form::PerHead {
                norms: [norm(NORMS_OF_HEADS[0])?, norm(NORMS_OF_HEADS[1])?],
                eps: loader.eps,
            },
        }))
    }

    /// Stores the keys of all rows, and chooses the tokens that each sees. In latent attention `up` holds the queries' latent rows.
    pub fn choose(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { gate, up, sent, returned, scores, selected, .. } = &mut **work;
        let IndexerConfig { head_dim, top_k, blocks, .. } = self.config;
        let rotate = |x: &mut B::Buffer| match self.rope {
            Some(rope) => backend.rope(x, head_dim, &step.angles[rope]),
            None => Ok(()),
        };
        match &self.form {
            Form::Weighted { weights, key_norm: [weight, bias] } => {
                backend.matmul_each(input, &mut [self.key.onto(gate), weights.onto(scores)])?;
                backend.layer_norm(gate, [weight, bias], KEY_EPS, returned)?;
            }
            Form::PerHead { norms: [_, norm], eps } => {
                self.key.apply(backend, input, gate)?;
                backend.rms_norm(gate, norm, *eps, returned)?;
            }
        }
        rotate(returned)?;
        let spans = &step.spans[self.store.group];
        backend.store_kv(kv, self.store.index, returned, returned, spans)?;
        if step.positions.iter().all(|position| *position < top_k) {
            selected.see_all(top_k);
            return Ok(());
        }
        match &self.form {
            Form::Weighted { .. } => self.query.apply(backend, up, sent)?,
            Form::PerHead { norms: [norm, _], eps } => {
                self.query.apply(backend, input, gate)?;
                backend.rms_norm(gate, norm, *eps, sent)?;
            }
        }
        rotate(sent)?;
        let is_per_head = matches!(self.form, Form::PerHead { .. });
        let spec = IndexerSpec { store: self.store.index, top_k, blocks, is_per_head };
        backend.select_keys(kv, &spec, [sent, scores], spans, selected)
    }
}
