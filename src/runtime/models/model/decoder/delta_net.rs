//! Gated delta net (Qwen 3 Next, Qwen 3.5): a short convolution over queries, keys and values, a recurrent
//! state for each head, and a gated norm of the heads' outputs. Source: transformers `Qwen3_5GatedDeltaNet`;
//! llama.cpp's converter for the form in GGUF, where value heads may be ordered differently and the factors
//! of decay are `-exp(A_log)`. Qwen 3 Next stores the rows of each key head together, in one matrix for
//! queries, keys, values and gates, and in one for rates and decays (transformers
//! `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`).

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::load::Loader;
use crate::backend::{Activation, Backend, ConvSpec, DeltaShape, DeltaSpec, Recurrence};
use crate::model::config::{DeltaNetConfig, Names};
use crate::model::weights::Linear;
use llmctl_base::error::{LoadResult, Result};

pub struct DeltaNet<B: Backend> {
    qkv: Projection<B>,
    gate: Projection<B>,
    rate: Projection<B>,
    decay: Projection<B>,
    heads: DeltaHeads<B>,
}

/// The convolution, the recurrent states and the gated norm of a delta net's heads, and the output behind them.
pub struct DeltaHeads<B: Backend> {
    pub shape: DeltaShape,
    pub eps: f32,
    /// Store of the convolution; the heads' states are in the next store.
    pub store: StoreIndex,
    pub kernel: B::Vector,
    pub fading: B::Vector,
    pub decay_bound: Option<f32>,
    pub decay_bias: B::Vector,
    pub norm: B::Vector,
    /// Activation of the gate.
    pub activation: Activation,
    pub output: Projection<B>,
}

impl<B: Backend> DeltaHeads<B> {
    /// Computes the heads from queries, keys and values together in `q`, rates in `k`, decays in `v`, and gates in `gate`.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn apply(&self, context: &mut LayerContext<'_, B>, out: &mut B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { q: qkv, k: rate, v: decay, mixed, gate, up, .. } = &mut **work;
        let spans = &step.spans[self.store.group];
        let conv = ConvSpec { store: self.store.index, kernel: &self.kernel, bias: None, silu: true };
        backend.recur(kv, &Recurrence::Convolution(conv, qkv), spans, mixed)?;
        let spec = DeltaSpec {
            store: self.store.index + 1,
            shape: self.shape,
            fading: &self.fading,
            decay_bound: self.decay_bound,
            decay_bias: &self.decay_bias,
        };
        backend.recur(kv, &Recurrence::Delta(spec, [mixed, rate, decay]), spans, up)?;
        backend.rms_norm(up, &self.norm, self.eps, mixed)?;
        backend.gated(self.activation, gate, mixed)?;
        self.output.apply(backend, gate, out)
    }
}

impl<B: Backend> DeltaNet<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &DeltaNetConfig, store: StoreIndex) -> LoadResult<Self> {
        let (file, layer, hidden, shape) = (loader.file, loader.layer, loader.hidden, config.shape);
        let inner = shape.value_heads * shape.value_dim;
        let ([qkv, gate], [rate, decay]) =
            (read_qkv_and_gate(loader, shape)?, read_rate_and_decay(loader, shape)?);
        let conv = ["linear_attn.conv1d", "ssm_conv1d"];
        let heads = DeltaHeads {
            shape,
            eps: loader.eps,
            store,
            kernel: loader.backend.vector(file.conv(layer, conv, [shape.conv_width(), config.kernel])?)?,
            fading: loader.fading(file.values(
                layer,
                ["linear_attn.A_log", "ssm_a"],
                shape.value_heads,
            )?)?,
            decay_bound: config.decay_bound,
            decay_bias: loader.values(["linear_attn.dt_bias", "ssm_dt.bias"], shape.value_heads)?,
            norm: loader.values(["linear_attn.norm.weight", "ssm_norm.weight"], shape.value_dim)?,
            activation: config.gate,
            output: loader.linear(["linear_attn.out_proj", "ssm_out"], [hidden, inner])?,
        };
        Ok(Self {
            qkv: loader.projection(qkv)?,
            gate: loader.projection(gate)?,
            rate: loader.gate(rate)?,
            decay: loader.gate(decay)?,
            heads,
        })
    }
}

impl<B: Backend> Mixer<B> for DeltaNet<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let LayerBuffers { q: qkv, k: rate, v: decay, gate, .. } = &mut *context.work;
        let (to_rate, to_decay) = (self.rate.onto(rate), self.decay.onto(decay));
        let products = &mut [self.qkv.onto(qkv), self.gate.onto(gate), to_rate, to_decay];
        context.backend.matmul_each(input, products)?;
        self.heads.apply(context, out)
    }
}

/// Reads the projections for queries, keys and values together, and for the gate, from separate matrices or one.
fn read_qkv_and_gate<B: Backend>(loader: &Loader<'_, B>, shape: DeltaShape) -> LoadResult<[Linear; 2]> {
    const SEPARATE: [Names; 2] =
        [["linear_attn.in_proj_qkv", "attn_qkv"], ["linear_attn.in_proj_z", "attn_gate"]];
    const FUSED: Names = ["linear_attn.in_proj_qkvz", "ssm_in"];
    let values = shape.value_heads / shape.key_heads * shape.value_dim;
    let inner = shape.value_heads * shape.value_dim;
    if !loader.file.has_linear(loader.layer, FUSED) {
        let read = |names, rows| loader.file.linear(loader.layer, names, [rows, loader.hidden]);
        return Ok([read(SEPARATE[0], shape.conv_width())?, read(SEPARATE[1], inner)?]);
    }
    let rows = shape.conv_width() + inner;
    let fused = loader.file.linear(loader.layer, FUSED, [rows, loader.hidden])?;
    let [q, k, v, gate] = by_key_head(shape.key_heads, [shape.key_dim, shape.key_dim, values, values]);
    Ok([fused.gather_rows([q, k, v].concat().into_iter()), fused.gather_rows(gate.into_iter())])
}

/// Reads the projections for the rate and for the decay, from separate matrices or one.
fn read_rate_and_decay<B: Backend>(loader: &Loader<'_, B>, shape: DeltaShape) -> LoadResult<[Linear; 2]> {
    const SEPARATE: [Names; 2] =
        [["linear_attn.in_proj_b", "ssm_beta"], ["linear_attn.in_proj_a", "ssm_alpha"]];
    const FUSED: Names = ["linear_attn.in_proj_ba", "ssm_ba"];
    let heads = shape.value_heads;
    let read = |names, rows| loader.file.linear(loader.layer, names, [rows, loader.hidden]);
    if !loader.file.has_linear(loader.layer, FUSED) {
        return Ok([read(SEPARATE[0], heads)?, read(SEPARATE[1], heads)?]);
    }
    let fused = read(FUSED, 2 * heads)?;
    let parts = by_key_head(shape.key_heads, [heads / shape.key_heads; 2]);
    Ok(parts.map(|rows| fused.gather_rows(rows.into_iter())))
}

/// Returns the rows of each part of a matrix in which each key head has its rows of all parts, `lens` of them, together.
fn by_key_head<const N: usize>(key_heads: usize, lens: [usize; N]) -> [Vec<usize>; N] {
    let per_head: usize = lens.iter().sum();
    std::array::from_fn(|part| {
        let first: usize = lens[..part].iter().sum();
        let rows = move |head| head * per_head + first..head * per_head + first + lens[part];
        (0..key_heads).flat_map(rows).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_part_are_gathered_from_every_key_head() {
        let [q, z] = by_key_head(2, [1, 3]);
        assert_eq!((q, z), (vec![0, 4], vec![1, 2, 3, 5, 6, 7]));
    }
}
