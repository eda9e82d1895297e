//! Kimi delta attention (Kimi Linear, Ling 3): a delta net in which each key's values fade by themselves. Queries, keys and values
//! are projections of their own, decays and gates are computed at once or through a narrow row, and the gate is a sigmoid. Sources:
//! transformers `KimiLinearDeltaAttention` and `BailingHybridDeltaAttention`; llama.cpp's `kimi-linear` and `bailingmoe3` for GGUF.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::delta_net::DeltaHeads;
use super::load::Loader;
use crate::backend::Backend;
use crate::model::config::{DeltaNetConfig, Names};
use llmctl_base::error::{LoadResult, Result};

const INPUTS: [Names; 3] =
    [["self_attn.q_proj", "attn_q"], ["self_attn.k_proj", "attn_k"], ["self_attn.v_proj", "attn_v"]];
const KERNELS: [Names; 3] = [
    ["self_attn.q_conv1d", "ssm_conv1d_q"],
    ["self_attn.k_conv1d", "ssm_conv1d_k"],
    ["self_attn.v_conv1d", "ssm_conv1d_v"],
];
/// Decays and gates in two steps, and in one.
const DECAY: [Names; 3] =
    [["self_attn.f_a_proj", "ssm_f_a"], ["self_attn.f_b_proj", "ssm_f_b"], ["self_attn.f_proj", "ssm_f_a"]];
const GATE: [Names; 3] =
    [["self_attn.g_a_proj", "ssm_g_a"], ["self_attn.g_b_proj", "ssm_g_b"], ["self_attn.g_proj", "ssm_g_a"]];

pub struct KimiDelta<B: Backend> {
    inputs: [Projection<B>; 3],
    rate: Projection<B>,
    decay: Steps<B>,
    gate: Steps<B>,
    heads: DeltaHeads<B>,
}

/// One projection, or two in turn.
struct Steps<B: Backend> {
    first: Projection<B>,
    second: Option<Projection<B>>,
}

impl<B: Backend> KimiDelta<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &DeltaNetConfig, store: StoreIndex) -> LoadResult<Self> {
        let (file, layer, hidden, shape) = (loader.file, loader.layer, loader.hidden, config.shape);
        let inner = shape.value_heads * shape.value_dim;
        let [q, k, v] = INPUTS.map(|names| loader.linear(names, [inner, hidden]));
        let in_steps = |[down, up, at_once]: [Names; 3]| {
            if !file.has_linear(layer, up) {
                return Ok(Steps { first: loader.linear(at_once, [inner, hidden])?, second: None });
            }
            let down = file.linear(layer, down, [shape.value_dim, hidden])?;
            let up = file.linear(layer, up, [inner, shape.value_dim])?;
            Ok(Steps { first: loader.gate(down)?, second: Some(loader.gate(up)?) })
        };
        let rate = file.linear(layer, ["self_attn.b_proj", "ssm_beta"], [shape.value_heads, hidden])?;
        let heads = DeltaHeads {
            shape,
            eps: loader.eps,
            store,
            kernel: loader.backend.vector(read_kernel(loader, [inner, config.kernel])?)?,
            fading: loader.fading(file.flat_values(
                layer,
                ["self_attn.A_log", "ssm_a"],
                shape.value_heads,
            )?)?,
            decay_bound: config.decay_bound,
            decay_bias: loader.values(["self_attn.dt_bias", "ssm_dt.bias"], inner)?,
            norm: loader.values(["self_attn.o_norm.weight", "ssm_norm.weight"], shape.value_dim)?,
            activation: config.gate,
            output: loader.linear(loader.naming.parts.attention_output, [hidden, inner])?,
        };
        Ok(Self {
            inputs: [q?, k?, v?],
            rate: loader.gate(rate)?,
            decay: in_steps(DECAY)?,
            gate: in_steps(GATE)?,
            heads,
        })
    }

    /// Computes what [`DeltaHeads::apply`] reads.
    fn project(&self, backend: &B, input: &B::Buffer, work: &mut LayerBuffers<B::Buffer>) -> Result<()> {
        let LayerBuffers { q, k: rate, v, mixed, gate, up: k, sent, returned, .. } = work;
        let [to_q, to_k, to_v] = &self.inputs;
        let products = &mut [
            to_q.onto(q),
            to_k.onto(k),
            to_v.onto(v),
            self.rate.onto(rate),
            self.decay.first.onto(sent),
            self.gate.first.onto(returned),
        ];
        backend.matmul_each(input, products)?;
        backend.join_heads(&[q, k, v], 1, mixed)?;
        std::mem::swap(q, mixed);
        self.decay.finish(backend, sent, v)?;
        self.gate.finish(backend, returned, gate)
    }
}

impl<B: Backend> Steps<B> {
    /// Moves or projects what the first step gave into `out`.
    fn finish(&self, backend: &B, given: &mut B::Buffer, out: &mut B::Buffer) -> Result<()> {
        match &self.second {
            Some(second) => second.apply(backend, given, out),
            None => {
                std::mem::swap(given, out);
                Ok(())
            }
        }
    }
}

impl<B: Backend> Mixer<B> for KimiDelta<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        self.project(context.backend, input, context.work)?;
        self.heads.apply(context, out)
    }
}

/// Reads the kernels of queries, keys and values into one, `[taps, channels of all]`.
fn read_kernel<B: Backend>(loader: &Loader<'_, B>, [inner, taps]: [usize; 2]) -> LoadResult<Vec<f32>> {
    let [q, k, v] = KERNELS.map(|names| loader.file.conv(loader.layer, names, [inner, taps]));
    let parts = [q?, k?, v?];
    let tap = |tap| parts.each_ref().map(|part| &part[tap * inner..(tap + 1) * inner]);
    Ok((0..taps).flat_map(tap).flatten().copied().collect())
}
