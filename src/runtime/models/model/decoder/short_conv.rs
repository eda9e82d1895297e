//! LFM2's short convolution: a gate, a causal convolution of few tokens over each channel, and another gate.
//! Source: transformers `Lfm2ShortConv`.

use super::StoreIndex;
use super::buffers::{LayerBuffers, LayerContext, Mixer, Projection};
use super::load::Loader;
use crate::backend::{Activation, Backend, ConvSpec, Recurrence};
use crate::model::config::ShortConvConfig;
use llmctl_base::error::{LoadResult, Result};

pub struct ShortConv<B: Backend> {
    store: StoreIndex,
    /// Projections b, c and x.
    inputs: [Projection<B>; 3],
    kernel: B::Vector,
    output: Projection<B>,
}

impl<B: Backend> ShortConv<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(loader: &Loader<'_, B>, config: &ShortConvConfig, store: StoreIndex) -> LoadResult<Self> {
        let (hidden, file) = (loader.hidden, loader.file);
        let [b, c, x] =
            file.stacked(loader.layer, ["conv.in_proj", "shortconv.in_proj"], [hidden; 3], hidden)?;
        let kernel = file.conv(loader.layer, ["conv.conv", "shortconv.conv"], [hidden, config.kernel])?;
        Ok(Self {
            store,
            inputs: [loader.projection(b)?, loader.projection(c)?, loader.projection(x)?],
            kernel: loader.backend.vector(kernel)?,
            output: loader.linear(["conv.out_proj", "shortconv.out_proj"], [hidden; 2])?,
        })
    }
}

impl<B: Backend> Mixer<B> for ShortConv<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        let LayerContext { backend, step, kv, work, .. } = context;
        let LayerBuffers { q: b, k: c, v: x, mixed, .. } = &mut **work;
        let [to_b, to_c, to_x] = &self.inputs;
        backend.matmul_each(input, &mut [to_b.onto(b), to_c.onto(c), to_x.onto(x)])?;
        backend.gated(Activation::None, b, x)?;
        let spec = ConvSpec { store: self.store.index, kernel: &self.kernel, bias: None, silu: false };
        backend.recur(kv, &Recurrence::Convolution(spec, b), &step.spans[self.store.group], mixed)?;
        backend.gated(Activation::None, c, mixed)?;
        self.output.apply(backend, c, out)
    }
}
