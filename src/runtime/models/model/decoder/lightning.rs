//! Lightning attention (Ling 2.5 and 2.6): queries read a state of each head, which takes in the product of a token's key and value
//! and fades at a rate that its head and layer have; a norm over groups of heads, and a gate of its own. The recurrence is that of
//! Mamba-2 with time steps of 1. Source: vLLM's and SGLang's `bailing_moe_linear`.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::load::Loader;
use crate::backend::{Activation, Backend, Recurrence, SsmSpec};
use crate::model::config::LightningConfig;
use llmctl_base::error::{LoadResult, Result};

pub struct Lightning<B: Backend> {
    config: LightningConfig,
    eps: f32,
    store: StoreIndex,
    inputs: [Projection<B>; 3],
    /// Norms of queries and keys.
    norms: Option<[B::Vector; 2]>,
    fading: B::Vector,
    /// Zeros: the heads' values take no part in their outputs but through the states.
    skip: B::Vector,
    gate: Projection<B>,
    norm: B::Vector,
    output: Projection<B>,
}

impl<B: Backend> Lightning<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &LightningConfig, store: StoreIndex) -> LoadResult<Self> {
        let (hidden, inner, head_dim) = (loader.hidden, config.shape.inner(), config.shape.head_dim);
        let fused = ["self_attn.query_key_value", ""];
        let [q, k, v] = loader.file.stacked(loader.layer, fused, [inner; 3], hidden)?;
        let norm = |name| loader.norm([name, ""], head_dim);
        let norms = || Ok([norm("self_attn.query_layernorm")?, norm("self_attn.key_layernorm")?]);
        Ok(Self {
            config: config.clone(),
            eps: loader.eps,
            store,
            inputs: [loader.projection(q)?, loader.projection(k)?, loader.projection(v)?],
            norms: config.has_norms.then(norms).transpose()?,
            fading: loader.backend.vector(config.fading.clone())?,
            skip: loader.backend.vector(vec![0.0; config.shape.heads])?,
            gate: loader.linear(["self_attn.g_proj", ""], [inner, hidden])?,
            norm: loader.norm(["self_attn.g_norm", ""], inner)?,
            output: loader.linear(loader.naming.parts.attention_output, [hidden, inner])?,
        })
    }
}

impl<B: Backend> Mixer<B> for Lightning<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { q, k, v, mixed, gate, up, .. } = &mut **work;
        let (head_dim, angles) = (self.config.shape.head_dim, &step.angles[self.config.rope]);
        let [to_q, to_k, to_v] = &self.inputs;
        backend.matmul_each(input, &mut [to_q.onto(q), to_k.onto(k), to_v.onto(v), self.gate.onto(gate)])?;
        for (which, x) in [&mut *q, &mut *k].into_iter().enumerate() {
            match &self.norms {
                None => backend.rope(x, head_dim, angles)?,
                Some(norms) => {
                    backend.norm_rope(x, (&norms[which], self.eps), head_dim, angles, mixed)?;
                    std::mem::swap(x, mixed);
                }
            }
        }
        backend.scale(q, 1.0 / (head_dim as f32).sqrt())?;
        backend.join_heads(&[v, k, q], 1, up)?;
        let spec = SsmSpec {
            store: self.store.index,
            shape: self.config.shape,
            fading: &self.fading,
            step_bias: None,
            step_limits: [1.0; 2],
            skip: &self.skip,
        };
        backend.recur(kv, &Recurrence::Ssm(spec, [up, gate]), &step.spans[self.store.group], v)?;
        backend.rms_norm_groups(v, &self.norm, self.config.norm_groups, self.eps, mixed)?;
        backend.gated(Activation::Sigmoid, gate, mixed)?;
        self.output.apply(backend, gate, out)
    }
}
