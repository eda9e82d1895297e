//! A norm of rows by their root mean square, or by mean and deviation.

use crate::backend::Backend;
use crate::model::config::DecoderConfig;
use llmctl_base::error::{LoadResult, Result};

pub struct DecoderNorm<B: Backend> {
    weight: B::Vector,
    /// Zeros, in models whose norms subtract the mean first; there are no biases.
    bias: Option<B::Vector>,
    eps: f32,
}

impl<B: Backend> DecoderNorm<B> {
    pub fn new(backend: &B, config: &DecoderConfig, weight: Vec<f32>, eps: f32) -> LoadResult<Self> {
        let zeros = config.centers_norms.then(|| backend.vector(vec![0.0; weight.len()]));
        Ok(Self { bias: zeros.transpose()?, weight: backend.vector(weight)?, eps })
    }

    /// Normalises `x` into `out`.
    pub fn apply(&self, backend: &B, x: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        match &self.bias {
            None => backend.rms_norm(x, &self.weight, self.eps, out),
            Some(bias) => backend.layer_norm(x, [&self.weight, bias], self.eps, out),
        }
    }

    /// Normalises rows that are inputs of products.
    pub fn apply_into_products(&self, backend: &B, x: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        match &self.bias {
            None => backend.rms_norm_into_products(x, &self.weight, self.eps, out),
            Some(_) => self.apply(backend, x, out),
        }
    }
}
