//! The indexer of a layer (DeepSeek V3.2, GLM-5): queries from the queries' latent row and one key per token score the tokens, and
//! rows see those with the highest scores. Sources: transformers `DeepseekV32Indexer` and `GlmMoeDsaIndexer`; llama.cpp's
//! converter for GGUF's names.
//!
//! The key is a row of each token in the layer's pages, beside the latent row.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::backend::{Backend, IndexerSpec};
use crate::model::config::{IndexerConfig, LatentConfig, Names};
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

pub struct Indexer<B: Backend> {
    config: IndexerConfig,
    rope: Option<usize>,
    store: StoreIndex,
    query: Projection<B>,
    key: Projection<B>,
    key_norm: [B::Vector; 2],
    weights: Projection<B>,
}

impl<B: Backend> Indexer<B> {
    /// Loads the indexer of a layer whose second store holds its keys; `None` if the layer has none.
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
            key_norm: [norm(KEY_NORM[0])?, norm(KEY_NORM[1])?],
            weights: loader.gate(file.linear(layer, WEIGHTS, [num_heads, hidden])?)?,
        }))
    }

    /// Stores the keys of all rows, and chooses the tokens that each sees; `up` holds the queries' latent rows.
    pub fn choose(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { gate, up, sent, returned, scores, selected, .. } = &mut **work;
        let IndexerConfig { head_dim, top_k, .. } = self.config;
        let rotate = |x: &mut B::Buffer| match self.rope {
            Some(rope) => backend.rope(x, head_dim, &step.angles[rope]),
            None => Ok(()),
        };
        backend.matmul_each(input, &mut [self.key.onto(gate), self.weights.onto(scores)])?;
        backend.layer_norm(gate, [&self.key_norm[0], &self.key_norm[1]], KEY_EPS, returned)?;
        rotate(returned)?;
        let spans = &step.spans[self.store.group];
        backend.store_kv(kv, self.store.index, returned, returned, spans)?;
        if step.positions.iter().all(|position| *position < top_k) {
            selected.see_all(top_k);
            return Ok(());
        }
        self.query.apply(backend, up, sent)?;
        rotate(sent)?;
        let spec = IndexerSpec { store: self.store.index, top_k };
        backend.select_keys(kv, &spec, [sent, scores], spans, selected)
    }
}
