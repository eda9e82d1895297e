//! Mamba-2 mixer (Granite 4, Nemotron-H, Falcon-H1): one projection for gate, values, keys, queries and time
//! steps; a short convolution over values, keys and queries; a recurrent state for each head; a gate, and
//! often a norm. Source: transformers `Mamba2Mixer`; llama.cpp's converter for the form in GGUF, where A is
//! `-exp(A_log)`.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::load::Loader;
use crate::backend::{Activation, Backend, ConvSpec, Recurrence, SsmSpec};
use crate::model::config::{SsmConfig, SsmFactors, SsmNorm};
use llmctl_base::error::{LoadResult, Result};

pub struct Ssm<B: Backend> {
    config: SsmConfig,
    eps: f32,
    conv_store: StoreIndex,
    state_store: StoreIndex,
    gate: Projection<B>,
    /// Values, keys and queries.
    xbc: Projection<B>,
    step: Projection<B>,
    kernel: B::Vector,
    conv_bias: Option<B::Vector>,
    fading: B::Vector,
    step_bias: B::Vector,
    skip: B::Vector,
    /// `None` if there is no norm.
    norm: Option<B::Vector>,
    output: Projection<B>,
}

impl<B: Backend> Ssm<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &SsmConfig,
        [conv_store, state_store]: [StoreIndex; 2],
    ) -> LoadResult<Self> {
        let (file, layer, shape) = (loader.file, loader.layer, config.shape);
        let hf = |part: &str| format!("{}.{part}", loader.naming.parts.ssm);
        let values = |part: &str, gguf: &str, len| {
            loader.backend.vector(file.flat_values(layer, [hf(part).as_str(), gguf], len)?)
        };
        let rows = [shape.inner(), shape.conv_width(), shape.heads];
        let [gate, xbc, step] = file.stacked(layer, [&hf("in_proj"), "ssm_in"], rows, loader.hidden)?;
        let conv_bias = [&hf("conv1d.bias"), "ssm_conv1d.bias"];
        let conv_bias = file.optional_values(layer, conv_bias, shape.conv_width())?;
        let has_norm = match config.norm {
            SsmNorm::None => false,
            SsmNorm::AfterGate | SsmNorm::BeforeGate => true,
            SsmNorm::IfStored => file.has_linear(layer, [&hf("norm"), "ssm_norm"]),
        };
        let norm = || values("norm.weight", "ssm_norm.weight", shape.inner());
        let norm = has_norm.then(norm).transpose()?;
        Ok(Self {
            config: config.clone(),
            eps: loader.eps,
            conv_store,
            state_store,
            gate: loader.projection(gate)?,
            xbc: loader.projection(xbc)?,
            step: loader.gate(step)?,
            kernel: loader.backend.vector(kernel(loader, config, &hf("conv1d"))?)?,
            conv_bias: conv_bias.map(|bias| loader.backend.vector(bias)).transpose()?,
            fading: loader.fading(file.flat_values(layer, [&hf("A_log"), "ssm_a"], shape.heads)?)?,
            step_bias: values("dt_bias", "ssm_dt.bias", shape.heads)?,
            skip: values("D", "ssm_d", shape.heads)?,
            norm,
            output: loader.linear([&hf("out_proj"), "ssm_out"], [loader.hidden, shape.inner()])?,
        })
    }
}

impl<B: Backend> Mixer<B> for Ssm<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let LayerContext { backend, step: rows, kv, work, .. } = context;
        let LayerBuffers { q: xbc, k: step, mixed, gate, up, .. } = &mut **work;
        let (shape, factors) = (self.config.shape, self.config.factors);
        backend.matmul_each(input, &mut [self.gate.onto(gate), self.xbc.onto(xbc), self.step.onto(step)])?;
        for (buffer, factor) in [(&mut *gate, factors.gate), (&mut *step, factors.step)] {
            if factor != 1.0 {
                backend.scale(buffer, factor)?;
            }
        }
        let conv = ConvSpec {
            store: self.conv_store.index,
            kernel: &self.kernel,
            bias: self.conv_bias.as_ref(),
            silu: true,
        };
        let spans = &rows.spans[self.conv_store.group];
        backend.recur(kv, &Recurrence::Convolution(conv, xbc), spans, mixed)?;
        let spec = SsmSpec {
            store: self.state_store.index,
            shape,
            fading: &self.fading,
            step_bias: Some(&self.step_bias),
            step_limits: self.config.step_limits,
            skip: &self.skip,
        };
        backend.recur(kv, &Recurrence::Ssm(spec, [mixed, step]), spans, up)?;
        let is_before = self.config.norm == SsmNorm::BeforeGate;
        let norm = |x: &B::Buffer, out: &mut B::Buffer| match &self.norm {
            Some(norm) => backend.rms_norm_groups(x, norm, shape.groups, self.eps, out).map(|()| true),
            None => Ok(false),
        };
        let values = if is_before && norm(up, mixed)? { &*mixed } else { &*up };
        backend.gated(Activation::Silu, gate, values)?;
        let gated = if !is_before && norm(gate, mixed)? { mixed } else { gate };
        self.output.apply(backend, gated, out)
    }
}

/// Reads the convolution's kernel. It is linear, so it takes the factors of its inputs.
fn kernel<B: Backend>(loader: &Loader<'_, B>, config: &SsmConfig, name: &str) -> LoadResult<Vec<f32>> {
    let SsmConfig { shape, kernel, factors: SsmFactors { values, key, query, .. }, .. } = config;
    let (width, keys) = (shape.conv_width(), shape.groups * shape.state_dim);
    let mut weights = loader.file.conv(loader.layer, [name, "ssm_conv1d"], [width, *kernel])?;
    for taps in weights.chunks_exact_mut(width) {
        let (of_values, rest) = taps.split_at_mut(shape.inner());
        let (of_keys, of_queries) = rest.split_at_mut(keys);
        for (part, factor) in [(of_values, values), (of_keys, key), (of_queries, query)] {
            part.iter_mut().for_each(|weight| *weight *= factor);
        }
    }
    Ok(weights)
}
