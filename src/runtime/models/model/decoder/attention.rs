//! Attention of one layer: projections, norms of q, k and v, rotary positions, and its KV rows.

use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::indexer::Indexer;
use super::load::Loader;
use super::{StepBuffers, StoreIndex};
use crate::backend::{Activation, AttentionSpec, Backend, ScoreRule, TextHeads};
use crate::model::config::{AttentionConfig, AttentionTemperature, KvSource, OutputGate, QkNorm};
use crate::model::weights::Linear;
use llmctl_base::error::{LoadResult, Result};

pub struct Attention<B: Backend> {
    config: AttentionConfig,
    eps: f32,
    store: StoreIndex,
    q: Projection<B>,
    q_norm: Option<B::Vector>,
    output_gate: Option<HeadGate<B>>,
    /// `None` if the rows are another layer's.
    kv: Option<KeysAndValues<B>>,
    sinks: Option<B::Vector>,
    output: Projection<B>,
    indexer: Option<Indexer<B>>,
}

/// A gate of the heads' outputs.
pub struct HeadGate<B: Backend> {
    projection: Projection<B>,
    activation: Activation,
    /// True if a head has one value of the gate.
    is_per_head: bool,
}

struct KeysAndValues<B: Backend> {
    k: Projection<B>,
    /// `None` if the keys serve as values.
    v: Option<Projection<B>>,
    k_norm: Option<B::Vector>,
    /// Weights of ones, for a norm without weights.
    v_norm: Option<B::Vector>,
}

impl<B: Backend> Attention<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &AttentionConfig, stores: &[StoreIndex]) -> LoadResult<Self> {
        let mixed_width = config.num_heads * config.value_dim();
        let [q_len, _] = normed_lens(config);
        let Projections { q, output_gate, kv } = load_projections(loader, config)?;
        let output = loader.naming.parts.attention_output;
        let output = loader.file.linear(loader.layer, output, [loader.hidden, mixed_width])?;
        let sinks = || loader.values(loader.naming.parts.sinks, config.num_heads);
        Ok(Self {
            config: config.clone(),
            eps: loader.eps,
            store: stores[0],
            q,
            output_gate,
            q_norm: q_len.map(|len| qk_weights(loader, config, 0, len)).transpose()?,
            kv,
            sinks: config.has_sinks.then(sinks).transpose()?,
            output: loader.adapted(output)?,
            indexer: Indexer::of_heads(loader, config, stores)?,
        })
    }

    /// Computes k and v of `own`, and q by `to_q`, as the projections give them.
    fn project(
        LayerContext { backend, step, work, .. }: &mut LayerContext<'_, B>,
        to_q: Option<&Projection<B>>,
        own: Option<&KeysAndValues<B>>,
        input: &B::Buffer,
    ) -> Result<()> {
        let LayerBuffers { q, k, v, .. } = &mut **work;
        let q = to_q.map(|to_q| to_q.adapted(&step.adapted, q));
        let k = own.map(|own| own.k.adapted(&step.adapted, k));
        let v = own.and_then(|own| Some(own.v.as_ref()?.adapted(&step.adapted, v)));
        // In arrays, because a decode step may not allocate.
        match (q, k, v) {
            (Some(q), Some(k), Some(v)) => backend.matmul_each(input, &mut [q, k, v]),
            (Some(q), Some(k), None) => backend.matmul_each(input, &mut [q, k]),
            (Some(q), None, _) => backend.matmul_each(input, &mut [q]),
            (None, Some(k), Some(v)) => backend.matmul_each(input, &mut [k, v]),
            (None, Some(k), None) => backend.matmul_each(input, &mut [k]),
            (None, None, _) => Ok(()),
        }
    }

    /// Normalises and rotates projected keys, and normalises values.
    fn finish_keys_and_values(
        &self,
        own: &KeysAndValues<B>,
        context: &mut LayerContext<'_, B>,
    ) -> Result<()> {
        let LayerContext { backend, step, work, .. } = context;
        let LayerBuffers { k, v, mixed, .. } = &mut **work;
        if self.config.value_scale != 1.0 {
            backend.scale(v, self.config.value_scale)?;
        }
        match (&own.v, &own.v_norm) {
            (None, Some(ones)) => backend.rms_norm(k, ones, self.eps, v)?,
            (_, norm) => self.normalize(backend, norm.as_ref(), [v, &mut *mixed])?,
        }
        self.normalize_and_rotate((backend, step), own.k_norm.as_ref(), [k, mixed])
    }

    /// Normalises, rotates and scales projected queries.
    fn finish_queries(&self, context: &mut LayerContext<'_, B>) -> Result<()> {
        let LayerContext { backend, step, work, .. } = context;
        let LayerBuffers { q, mixed, factors, .. } = &mut **work;
        self.normalize_and_rotate((backend, step), self.q_norm.as_ref(), [&mut *q, mixed])?;
        if let Some(temperature) = self.config.temperature {
            temperature.fill_factors(&step.positions, factors);
            backend.scale_rows(q, factors)?;
        }
        Ok(())
    }

    /// Normalises queries or keys before or behind the rotary embedding, as the family does.
    fn normalize_and_rotate(
        &self,
        (backend, step): (&B, &StepBuffers<B>),
        norm: Option<&B::Vector>,
        [x, space]: [&mut B::Buffer; 2],
    ) -> Result<()> {
        let is_after = self.config.qk_norm == QkNorm::PerHeadAfterRope;
        if let (Some(norm), Some(rope), false) = (norm, self.config.rope, is_after) {
            let (head_dim, angles) = (self.config.head_dim, &step.angles[rope]);
            backend.norm_rope(x, (norm, self.eps), head_dim, angles, space)?;
            std::mem::swap(x, space);
            return Ok(());
        }
        self.normalize(backend, norm.filter(|_| !is_after), [&mut *x, &mut *space])?;
        if let Some(rope) = self.config.rope {
            backend.rope(x, self.config.head_dim, &step.angles[rope])?;
        }
        self.normalize(backend, norm.filter(|_| is_after), [x, space])
    }

    fn normalize(
        &self,
        backend: &B,
        norm: Option<&B::Vector>,
        [x, space]: [&mut B::Buffer; 2],
    ) -> Result<()> {
        if let Some(norm) = norm {
            backend.rms_norm(x, norm, self.eps, space)?;
            std::mem::swap(x, space);
        }
        Ok(())
    }
}

impl<B: Backend> Mixer<B> for Attention<B> {
    /// Returns false if the keys and values are another layer's, or the layer has keys of an indexer.
    fn store(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer) -> Result<bool> {
        let Some(own) = self.kv.as_ref().filter(|_| self.indexer.is_none()) else { return Ok(false) };
        Self::project(context, None, Some(own), input)?;
        self.finish_keys_and_values(own, context)?;
        let LayerContext { backend, step, kv, work, .. } = context;
        backend.store_kv(kv, self.store.index, &work.k, &work.v, &step.spans[self.store.group])?;
        Ok(true)
    }

    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let (backend, config) = (context.backend, &self.config);
        let own = self.kv.as_ref().filter(|_| !context.is_stored);
        Self::project(context, Some(&self.q), own, input)?;
        if let Some(kv) = own {
            self.finish_keys_and_values(kv, context)?;
        }
        self.finish_queries(context)?;
        if let Some(indexer) = &self.indexer {
            indexer.choose(context, input)?;
        }
        let LayerContext { step, kv, work, .. } = context;
        let LayerBuffers { q, k, v, mixed, gate, selected, .. } = &mut **work;
        let spans = &step.spans[self.store.group];
        let rule = ScoreRule { scale: config.scale, softcap: config.softcap };
        if let Some(texts) = &step.texts {
            let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = *config;
            let reach = texts.reach(config.window);
            let heads = TextHeads { num_heads, num_kv_heads, head_dim, rule, reach };
            backend.attend_texts(&heads, [q, k, v], &texts.rows, mixed)?;
        } else {
            if own.is_some() {
                backend.store_kv(kv, self.store.index, k, v, spans)?;
            }
            let spec = AttentionSpec {
                store: self.store.index,
                num_heads: config.num_heads,
                rule,
                window: config.window,
                is_two_way: step.two_way.is_in(config.window),
                sinks: self.sinks.as_ref(),
                selected: self.indexer.as_ref().map(|_| &*selected),
            };
            backend.attend(kv, &spec, q, spans, mixed)?;
        }
        if let Some(output_gate) = &self.output_gate {
            output_gate.apply((backend, step), input, gate, mixed)?;
        }
        backend.matmul_each(mixed, &mut [self.output.adapted(&step.adapted, out)])
    }
}

impl<B: Backend> HeadGate<B> {
    /// Multiplies the heads' outputs by the activation of `input`'s projection, for which `gate` is memory.
    pub fn apply(
        &self,
        (backend, step): (&B, &StepBuffers<B>),
        input: &B::Buffer,
        gate: &mut B::Buffer,
        heads: &mut B::Buffer,
    ) -> Result<()> {
        backend.matmul_each(input, &mut [self.projection.adapted(&step.adapted, gate)])?;
        if self.is_per_head {
            backend.activate(self.activation, gate)?;
            return backend.scale_heads(heads, gate);
        }
        backend.gated(self.activation, gate, heads)?;
        std::mem::swap(gate, heads);
        Ok(())
    }

    /// Reads a gate that is a matrix of its own, with a row for each value or for each head.
    pub fn load(
        loader: &Loader<'_, B>,
        [num_heads, value_dim]: [usize; 2],
        activation: Activation,
    ) -> LoadResult<Self> {
        let names = loader.naming.parts.attention_gate;
        let is_per_head = loader.file.num_rows(loader.layer, names)? == num_heads;
        let rows = num_heads * if is_per_head { 1 } else { value_dim };
        let matrix = loader.file.linear(loader.layer, names, [rows, loader.hidden])?;
        Ok(Self { projection: loader.adapted(matrix)?, activation, is_per_head })
    }
}

impl AttentionTemperature {
    /// Computes the factor of each row's queries.
    pub fn fill_factors(self, positions: &[usize], factors: &mut Vec<f32>) {
        let factor = |position: &usize| {
            let intervals = (1 + position / self.interval) as f64;
            1.0 + self.scale * libm::log(intervals) as f32
        };
        factors.clear();
        factors.extend(positions.iter().map(factor));
    }
}

struct Projections<B: Backend> {
    q: Projection<B>,
    output_gate: Option<HeadGate<B>>,
    kv: Option<KeysAndValues<B>>,
}

/// The weights of keys and, unless the keys serve as values, of values.
type KeyValueWeights = (Linear, Option<Linear>);

/// Reads q, and k and v if the layer has rows of its own.
fn read_qkv<B: Backend>(
    loader: &Loader<'_, B>,
    config: &AttentionConfig,
) -> LoadResult<(Linear, Option<KeyValueWeights>)> {
    let (file, layer, hidden) = (loader.file, loader.layer, loader.hidden);
    // A head's output gate is stored beside its query.
    let per_head = if config.output_gate == Some(OutputGate::BesideQuery) { 2 } else { 1 };
    let q_width = per_head * config.num_heads * config.head_dim;
    let kv_width = config.num_kv_heads * config.head_dim;
    let separate = loader.naming.parts.attention_inputs;
    let [q_name, k_name, v_name] = separate;
    match config.kv {
        KvSource::Layer(_) => Ok((file.linear(layer, q_name, [q_width, hidden])?, None)),
        KvSource::OwnOrKeys if !file.has_linear(layer, v_name) => {
            let q = file.linear(layer, q_name, [q_width, hidden])?;
            Ok((q, Some((file.linear(layer, k_name, [kv_width, hidden])?, None))))
        }
        KvSource::Own | KvSource::OwnOrKeys => {
            let v_width = config.num_kv_heads * config.value_dim();
            let (rows, fused) = ([q_width, kv_width, v_width], loader.naming.parts.attention_fused);
            let [q, k, v] = file.linears(layer, separate, fused, rows, hidden)?;
            Ok((q, Some((k, Some(v)))))
        }
    }
}

/// Splits a projection whose heads hold a query and an output gate side by side.
fn split_output_gate(q: &Linear, config: &AttentionConfig) -> [Linear; 2] {
    let (num_heads, head_dim) = (config.num_heads, config.head_dim);
    [0, 1].map(|part| {
        let head_rows = move |head| (2 * head + part) * head_dim..(2 * head + part + 1) * head_dim;
        q.gather_rows((0..num_heads).flat_map(head_rows))
    })
}

fn load_projections<B: Backend>(
    loader: &Loader<'_, B>,
    config: &AttentionConfig,
) -> LoadResult<Projections<B>> {
    let (q, kv) = read_qkv(loader, config)?;
    let Some((k, v)) = kv else {
        return Ok(Projections { q: loader.adapted(q)?, output_gate: None, kv: None });
    };
    let (q, k) = match loader.naming.interleaved_qk {
        true => {
            let rotated = config.rope.map_or(config.head_dim, |rope| loader.ropes[rope].dim);
            (q.deinterleave(config.head_dim, rotated), k.deinterleave(config.head_dim, rotated))
        }
        false => (q, k),
    };
    let (q, output_gate) = match config.output_gate {
        None => (q, None),
        Some(OutputGate::BesideQuery) => {
            let [q, gate] = split_output_gate(&q, config);
            let (projection, activation) = (loader.adapted(gate)?, Activation::Sigmoid);
            (q, Some(HeadGate { projection, activation, is_per_head: false }))
        }
        Some(OutputGate::Own(activation)) => {
            (q, Some(HeadGate::load(loader, [config.num_heads, config.value_dim()], activation)?))
        }
    };
    let [_, k_len] = normed_lens(config);
    let ones = |_| loader.backend.vector(vec![1.0; config.head_dim]);
    let kv = KeysAndValues {
        k: loader.adapted(k)?,
        k_norm: k_len.map(|len| qk_weights(loader, config, 1, len)).transpose()?,
        v_norm: (config.value_norm || v.is_none()).then_some(()).map(ones).transpose()?,
        v: v.map(|v| loader.adapted(v)).transpose()?,
    };
    Ok(Projections { q: loader.adapted(q)?, output_gate, kv: Some(kv) })
}

/// Returns the weights of the norm of q (0) or k (1).
fn qk_weights<B: Backend>(
    loader: &Loader<'_, B>,
    config: &AttentionConfig,
    which: usize,
    len: usize,
) -> LoadResult<B::Vector> {
    match config.qk_norm {
        QkNorm::PerHeadBy(factor) => loader.backend.vector(vec![[factor, 1.0][which]; len]),
        _ => loader.norm(loader.naming.norms.qk[which], len),
    }
}

/// Returns the number of values over which q and k are normalised, if they are.
fn normed_lens(config: &AttentionConfig) -> [Option<usize>; 2] {
    match config.qk_norm {
        QkNorm::None => [None; 2],
        QkNorm::PerHead | QkNorm::PerHeadBy(_) | QkNorm::PerHeadAfterRope => [Some(config.head_dim); 2],
        QkNorm::Whole => [config.num_heads, config.num_kv_heads].map(|heads| Some(heads * config.head_dim)),
    }
}
