//! Low-rank hyper-connections (Qwen3.8-Flash-Next): several residual streams, side by side in a row. Each part of a layer reads a mix of
//! them, and each stream takes in the part's output by a weight of its own; both depend on the streams. Sources: Zhu et al. 2024;
//! transformers `Qwen4ExpTextGatedResidual`; llama.cpp's converter for GGUF's names.
//!
//! ```text
//! n       = norm of each stream
//! mix     = mean over streams of sigmoid(up . silu(down . n / streams)) * n
//! weights = 2 * sigmoid(inject . n / streams)
//! stream += weight * output
//! ```

use super::buffers::Projection;
use super::load::Loader;
use super::norm::DecoderNorm;
use super::stream::HyperBuffers;
use crate::backend::{Activation, Backend};
use crate::model::config::{HyperConfig, Names};
use llmctl_base::error::{LoadResult, Result};

/// Norm, down, up and inject of a layer's mixer and of its feed-forward part.
const OF_LAYER: [[Names; 4]; 2] = [
    [
        ["attn_hyper_connection.hc_norm", "hc_attn_norm"],
        ["attn_hyper_connection.input_mix_weight_down", "hc_attn_down"],
        ["attn_hyper_connection.input_mix_weight_up", "hc_attn_up"],
        ["attn_hyper_connection.block_inject_weight", "hc_attn_inject"],
    ],
    [
        ["mlp_hyper_connection.hc_norm", "hc_ffn_norm"],
        ["mlp_hyper_connection.input_mix_weight_down", "hc_ffn_down"],
        ["mlp_hyper_connection.input_mix_weight_up", "hc_ffn_up"],
        ["mlp_hyper_connection.block_inject_weight", "hc_ffn_inject"],
    ],
];

/// Norm, down and up before the output matrix.
const LAST: [Names; 3] = [
    ["hyper_connection_mixer.hc_norm", "output_hc_norm"],
    ["hyper_connection_mixer.input_mix_weight_down", "output_hc_down"],
    ["hyper_connection_mixer.input_mix_weight_up", "output_hc_up"],
];

/// The mix of streams that one part reads.
pub struct StreamMixer<B: Backend> {
    num_streams: usize,
    hidden: usize,
    eps: f32,
    norm: B::Vector,
    down: Projection<B>,
    up: Projection<B>,
    /// `None` before the output matrix, whose result no stream takes in.
    inject: Option<Projection<B>>,
}

impl<B: Backend> StreamMixer<B> {
    /// Loads those of a layer's mixer and of its feed-forward part.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn of_layer(loader: &Loader<'_, B>, config: &HyperConfig) -> LoadResult<[Self; 2]> {
        let (hidden, HyperConfig { num_streams, rank }) = (loader.hidden, *config);
        let width = num_streams * hidden;
        let load = |[norm, down, up, inject]: [Names; 4]| {
            let inject = loader.file.linear(loader.layer, inject, [num_streams, width])?;
            Ok(Self {
                num_streams,
                hidden,
                eps: loader.eps,
                norm: loader.norm(norm, width)?,
                down: loader.linear(down, [rank, width])?,
                up: loader.linear(up, [width, rank])?,
                inject: Some(loader.gate(inject)?),
            })
        };
        let [mixer, feed_forward] = OF_LAYER.map(load);
        Ok([mixer?, feed_forward?])
    }

    fn of_output(loader: &Loader<'_, B>, config: &HyperConfig) -> LoadResult<Self> {
        let (hidden, HyperConfig { num_streams, rank }, file) = (loader.hidden, *config, loader.file);
        let (width, [norm, down, up]) = (num_streams * hidden, LAST);
        Ok(Self {
            num_streams,
            hidden,
            eps: loader.eps,
            norm: loader.backend.vector(file.global_norm(norm, width)?)?,
            down: loader.projection(file.global_linear(down, [rank, width])?)?,
            up: loader.projection(file.global_linear(up, [width, rank])?)?,
            inject: None,
        })
    }

    /// Computes the mix of `streams`, `[rows, streams * hidden]`, into `out`, `[rows, hidden]`, and the weights for [`Self::add`].
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn mix(
        &self,
        backend: &B,
        streams: &B::Buffer,
        HyperBuffers { normed, wide, space, low, weights, .. }: &mut HyperBuffers<B::Buffer>,
        out: &mut B::Buffer,
    ) -> Result<()> {
        let (hidden, share) = (self.hidden, 1.0 / self.num_streams as f32);
        backend.rms_norm_groups(streams, &self.norm, self.num_streams, self.eps, normed)?;
        match &self.inject {
            None => self.down.apply(backend, normed, low)?,
            Some(inject) => {
                backend.matmul_each(normed, &mut [self.down.onto(low), inject.onto(weights)])?;
                backend.scale(weights, share)?;
                backend.activate(Activation::Sigmoid, weights)?;
                backend.scale(weights, 2.0)?;
            }
        }
        backend.scale(low, share)?;
        backend.activate(Activation::Silu, low)?;
        self.up.apply(backend, low, wide)?;
        backend.gated(Activation::Sigmoid, wide, normed)?;
        backend.select_columns(wide, 0..hidden, out)?;
        for stream in 1..self.num_streams {
            backend.select_columns(wide, stream * hidden..(stream + 1) * hidden, space)?;
            backend.add_scaled(out, space, 1.0)?;
        }
        backend.scale(out, share)
    }

    /// Adds a part's output, `[rows, hidden]`, to `streams`, by the weights of [`Self::mix`].
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn add(
        &self,
        backend: &B,
        output: &B::Buffer,
        HyperBuffers { wide, weights, .. }: &mut HyperBuffers<B::Buffer>,
        streams: &mut B::Buffer,
    ) -> Result<()> {
        backend.join_heads(&vec![output; self.num_streams], 1, wide)?;
        backend.scale_heads(wide, weights)?;
        backend.add_scaled(streams, wide, 1.0)
    }
}

/// The step between the residual stream, or several, and the output matrix.
pub enum LastNorm<B: Backend> {
    Norm(DecoderNorm<B>),
    Mix(StreamMixer<B>),
}

impl<B: Backend> LastNorm<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        hyper: Option<&HyperConfig>,
        norm: impl FnOnce(Vec<f32>) -> LoadResult<DecoderNorm<B>>,
    ) -> LoadResult<Self> {
        match hyper {
            None => norm(loader.file.final_norm(loader.hidden)?).map(Self::Norm),
            Some(hyper) => StreamMixer::of_output(loader, hyper).map(Self::Mix),
        }
    }

    /// Computes the rows that the output matrix reads.
    ///
    /// # Errors
    /// Errors of the backend.
    pub fn apply(
        &self,
        backend: &B,
        x: &B::Buffer,
        buffers: &mut HyperBuffers<B::Buffer>,
        out: &mut B::Buffer,
    ) -> Result<()> {
        match self {
            Self::Norm(norm) => norm.apply_into_products(backend, x, out),
            Self::Mix(mixer) => mixer.mix(backend, x, buffers, out),
        }
    }
}
