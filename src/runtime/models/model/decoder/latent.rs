//! Latent attention (DeepSeek V2 and V3): the keys and values of all heads are projections of one latent row
//! per token; a rotated key, which all heads share, stands beside it. Sources: DeepSeek-V2 (2024), section
//! 2.1; transformers `DeepseekV3Attention`; llama.cpp's converter for GGUF's names.
//!
//! The pages hold the latent row and the rotated key only. The projections are absorbed: a head's query is
//! projected to the latent row's width before the scores, and its mixed latent row to values after them. All
//! heads then share one KV head, whose values are the beginning of its keys. An indexer may choose the tokens that a row sees.

use super::StoreIndex;
use super::attention::HeadGate;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::indexer::Indexer;
use super::load::Loader;
use crate::backend::{Activation, AttentionSpec, Backend, ScoreRule};
use crate::model::config::{LatentConfig, Names, SeenKeys};
use crate::model::weights::Linear;
use llmctl_base::error::{LoadResult, Result};

/// The classes normalise latent rows with this constant, not with the configuration's.
const LATENT_EPS: f32 = 1e-6;

const QUERY: Names = ["self_attn.q_proj", "attn_q"];
const QUERY_DOWN: Names = ["self_attn.q_a_proj", "attn_q_a"];
const QUERY_NORM: Names = ["self_attn.q_a_layernorm", "attn_q_a_norm"];
const QUERY_UP: Names = ["self_attn.q_b_proj", "attn_q_b"];
const KEY_DOWN: Names = ["self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"];
const KEY_NORM: Names = ["self_attn.kv_a_layernorm", "attn_kv_a_norm"];
/// Keys and values of each head together.
const KEY_VALUE_UP: Names = ["self_attn.kv_b_proj", "attn_kv_b"];
/// Newer GGUF files have keys, transposed, and values of each head apart.
const KEY_UP: Names = ["", "attn_k_b"];
const VALUE_UP: Names = ["", "attn_v_b"];

pub struct LatentAttention<B: Backend> {
    config: LatentConfig,
    store: StoreIndex,
    /// The queries' own latent row, in models that have one.
    query_down: Option<(Projection<B>, B::Vector)>,
    plain_query: Projection<B>,
    rotary_query: Projection<B>,
    latent: Projection<B>,
    latent_norm: B::Vector,
    rotary_key: Projection<B>,
    /// From a head's plain query to the latent row's width, by head.
    absorbed_keys: B::HeadWeights,
    /// From a head's mixed latent row to its values, by head.
    values: B::HeadWeights,
    output_gate: Option<HeadGate<B>>,
    output: Projection<B>,
    indexer: Option<Indexer<B>>,
}

impl<B: Backend> LatentAttention<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &LatentConfig, stores: &[StoreIndex]) -> LoadResult<Self> {
        let (file, layer, hidden) = (loader.file, loader.layer, loader.hidden);
        let LatentConfig { num_heads, kv_rank, rotary_dim, value_dim, .. } = *config;
        let (query_down, query) = read_query(loader, config)?;
        let [plain_query, rotary_query] = split_heads(&query, num_heads, [config.plain_dim, rotary_dim]);
        let [latent, rotary_key] = file.stacked(layer, KEY_DOWN, [kv_rank, rotary_dim], hidden)?;
        let unrolled = |linear: Linear| match config.interleaved {
            true => linear.deinterleave(rotary_dim, rotary_dim),
            false => linear,
        };
        let (keys, values) = read_heads(loader, config)?;
        let heads = |matrices: Vec<Linear>| {
            let weights =
                matrices.into_iter().map(|linear| loader.projection(linear).map(|head| head.weight));
            loader.backend.head_weights(weights.collect::<Result<Vec<_>, _>>()?)
        };
        let gate = || HeadGate::load(loader, [num_heads, value_dim], Activation::Sigmoid);
        Ok(Self {
            config: config.clone(),
            store: stores[0],
            query_down,
            plain_query: loader.projection(plain_query)?,
            rotary_query: loader.projection(unrolled(rotary_query))?,
            latent: loader.projection(latent)?,
            latent_norm: loader.norm(KEY_NORM, kv_rank)?,
            rotary_key: loader.projection(unrolled(rotary_key))?,
            absorbed_keys: heads(keys)?,
            values: heads(values)?,
            output_gate: config.has_gate.then(gate).transpose()?,
            output: loader.linear(loader.naming.parts.attention_output, [hidden, num_heads * value_dim])?,
            indexer: Indexer::load(loader, config, stores)?,
        })
    }

    /// Computes the plain queries into `q`, the rotary queries into `mixed`, the latent row into `k` and the rotary key into
    /// `v`.
    fn project(&self, backend: &B, input: &B::Buffer, work: &mut LayerBuffers<B::Buffer>) -> Result<()> {
        let LayerBuffers { q, k, v, mixed, gate, up, .. } = work;
        let (latent, rotary_key) = (self.latent.onto(gate), self.rotary_key.onto(v));
        match &self.query_down {
            None => {
                let (plain, rotary) = (self.plain_query.onto(q), self.rotary_query.onto(mixed));
                backend.matmul_each(input, &mut [plain, rotary, latent, rotary_key])?;
            }
            Some((down, norm)) => {
                backend.matmul_each(input, &mut [down.onto(k), latent, rotary_key])?;
                backend.rms_norm_into_products(k, norm, LATENT_EPS, up)?;
                backend.matmul_each(up, &mut [self.plain_query.onto(q), self.rotary_query.onto(mixed)])?;
            }
        }
        backend.rms_norm(gate, &self.latent_norm, LATENT_EPS, k)
    }
}

impl<B: Backend> Mixer<B> for LatentAttention<B> {
    /// Computes the layer's attention into `out`.
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let (backend, config) = (context.backend, &self.config);
        self.project(backend, input, context.work)?;
        if let Some(indexer) = &self.indexer {
            indexer.choose(context, input)?;
        }
        let LayerContext { step, kv, work, .. } = context;
        let LayerBuffers { q, k, v, mixed, gate, up, factors, selected, .. } = &mut **work;
        if let Some(rope) = config.rope {
            backend.rope(mixed, config.rotary_dim, &step.angles[rope])?;
            backend.rope(v, config.rotary_dim, &step.angles[rope])?;
        }
        backend.matmul_heads(q, &self.absorbed_keys, gate)?;
        backend.join_heads(&[gate, mixed], config.num_heads, up)?;
        backend.join_heads(&[k, v], 1, q)?;
        if let Some(temperature) = config.temperature {
            temperature.fill_factors(&step.positions, factors);
            backend.scale_rows(up, factors)?;
        }
        let spans = &step.spans[self.store.group];
        backend.store_kv(kv, self.store.index, q, q, spans)?;
        let spec = AttentionSpec {
            store: self.store.index,
            num_heads: config.num_heads,
            rule: ScoreRule { scale: config.scale, softcap: None },
            window: None,
            is_two_way: false,
            sinks: None,
            selected: (config.seen != SeenKeys::All).then_some(&*selected),
        };
        backend.attend(kv, &spec, up, spans, mixed)?;
        backend.matmul_heads(mixed, &self.values, gate)?;
        if let Some(output_gate) = &self.output_gate {
            output_gate.apply((backend, step), input, up, gate)?;
        }
        self.output.apply(backend, gate, out)
    }
}

/// The projection to the queries' latent row with its norm, in models that have one.
type QueryDown<B> = Option<(Projection<B>, <B as Backend>::Vector)>;

/// Reads the queries' projections; the second one is from the latent row or the layer's input.
fn read_query<B: Backend>(
    loader: &Loader<'_, B>,
    config: &LatentConfig,
) -> LoadResult<(QueryDown<B>, Linear)> {
    let (file, layer) = (loader.file, loader.layer);
    let width = config.num_heads * (config.plain_dim + config.rotary_dim);
    match config.query_rank {
        None => Ok((None, file.linear(layer, QUERY, [width, loader.hidden])?)),
        Some(rank) => {
            let down = loader.linear(QUERY_DOWN, [rank, loader.hidden])?;
            let norm = loader.norm(QUERY_NORM, rank)?;
            Ok((Some((down, norm)), file.linear(layer, QUERY_UP, [width, rank])?))
        }
    }
}

/// Splits a projection whose heads hold two parts one after the other.
fn split_heads(linear: &Linear, num_heads: usize, lens: [usize; 2]) -> [Linear; 2] {
    let per_head = lens[0] + lens[1];
    [0..lens[0], lens[0]..per_head].map(|part| {
        let rows = move |head| head * per_head + part.start..head * per_head + part.end;
        linear.gather_rows((0..num_heads).flat_map(rows))
    })
}

/// Reads each head's matrices: `[kv_rank, plain_dim]` for keys and `[value_dim, kv_rank]` for values.
fn read_heads<B: Backend>(
    loader: &Loader<'_, B>,
    config: &LatentConfig,
) -> LoadResult<(Vec<Linear>, Vec<Linear>)> {
    let LatentConfig { num_heads, kv_rank, plain_dim, value_dim, .. } = *config;
    let (file, layer) = (loader.file, loader.layer);
    if loader.naming.gguf && !file.has_linear(layer, KEY_VALUE_UP) {
        let keys = file.stacked_heads(layer, KEY_UP, [num_heads, kv_rank, plain_dim])?;
        return Ok((keys, file.stacked_heads(layer, VALUE_UP, [num_heads, value_dim, kv_rank])?));
    }
    let rows = num_heads * (plain_dim + value_dim);
    let both = file.linear(layer, KEY_VALUE_UP, [rows, kv_rank])?;
    let [keys, values] = split_heads(&both, num_heads, [plain_dim, value_dim]);
    Ok((
        (0..num_heads)
            .map(|head| keys.slice_rows(head * plain_dim, (head + 1) * plain_dim).transposed())
            .collect(),
        (0..num_heads).map(|head| values.slice_rows(head * value_dim, (head + 1) * value_dim)).collect(),
    ))
}
