//! Gated delta net (Qwen 3.5): a short convolution over queries, keys and values, a recurrent state for each head,
//! and a gated norm of the heads' outputs. Source: transformers `Qwen3_5GatedDeltaNet`; llama.cpp's converter for the
//! form in GGUF, where value heads may be ordered differently and the factors of decay are `-exp(A_log)`.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Projection};
use super::load::Loader;
use crate::runtime::backend::{Activation, Backend, ConvSpec, DeltaShape, DeltaSpec};
use crate::runtime::error::{LoadError, Result};
use crate::runtime::model::config::DeltaNetConfig;

pub struct DeltaNet<B: Backend> {
    shape: DeltaShape,
    eps: f32,
    /// Store of the convolution; the heads' states are in the next store.
    store: StoreIndex,
    qkv: Projection<B>,
    gate: Projection<B>,
    rate: Projection<B>,
    decay: Projection<B>,
    kernel: B::Vector,
    fading: B::Vector,
    decay_bias: B::Vector,
    norm: B::Vector,
    output: Projection<B>,
}

impl<B: Backend> DeltaNet<B> {
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &DeltaNetConfig,
        eps: f32,
        store: StoreIndex,
    ) -> Result<Self, LoadError> {
        let (file, layer, hidden, shape) = (loader.file, loader.layer, loader.hidden, config.shape);
        let matrix = |names, rows, cols| file.linear(layer, names, [rows, cols]);
        let (inner, heads) = (shape.value_heads * shape.value_dim, shape.value_heads);
        let values = |names, len| loader.backend.vector(file.values(layer, names, len)?);
        let conv = ["linear_attn.conv1d", "ssm_conv1d"];
        let mut fading = file.values(layer, ["linear_attn.A_log", "ssm_a"], heads)?;
        let is_log = !loader.naming.gguf;
        fading
            .iter_mut()
            .for_each(|value| *value = if is_log { f64::from(*value).exp() as f32 } else { -*value });
        Ok(Self {
            shape,
            eps,
            store,
            qkv: loader.projection(matrix(
                ["linear_attn.in_proj_qkv", "attn_qkv"],
                shape.conv_width(),
                hidden,
            )?)?,
            gate: loader.projection(matrix(["linear_attn.in_proj_z", "attn_gate"], inner, hidden)?)?,
            rate: loader.gate(matrix(["linear_attn.in_proj_b", "ssm_beta"], heads, hidden)?)?,
            decay: loader.gate(matrix(["linear_attn.in_proj_a", "ssm_alpha"], heads, hidden)?)?,
            kernel: loader.backend.vector(file.conv(layer, conv, [shape.conv_width(), config.kernel])?)?,
            fading: loader.backend.vector(fading)?,
            decay_bias: values(["linear_attn.dt_bias", "ssm_dt.bias"], heads)?,
            norm: values(["linear_attn.norm.weight", "ssm_norm.weight"], shape.value_dim)?,
            output: loader.projection(matrix(["linear_attn.out_proj", "ssm_out"], hidden, inner)?)?,
        })
    }

    pub fn apply(
        &self,
        context: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { q: qkv, k: rate, v: decay, mixed, gate, up, .. } = &mut **work;
        let spans = &step.spans[self.store.group];
        let onto = [
            (&self.qkv, &mut *qkv),
            (&self.gate, &mut *gate),
            (&self.rate, &mut *rate),
            (&self.decay, &mut *decay),
        ];
        backend.matmul_each(input, &mut onto.map(|(projection, out)| projection.onto(out)))?;
        let conv = ConvSpec { store: self.store.index, kernel: &self.kernel, bias: None, silu: true };
        backend.convolve(kv, &conv, qkv, spans, mixed)?;
        let spec = DeltaSpec {
            store: self.store.index + 1,
            shape: self.shape,
            fading: &self.fading,
            decay_bias: &self.decay_bias,
        };
        backend.delta_rule(kv, &spec, [mixed, rate, decay], spans, up)?;
        backend.rms_norm(up, &self.norm, self.eps, mixed)?;
        backend.gated(Activation::Silu, gate, mixed)?;
        self.output.apply(backend, gate, out)
    }
}
