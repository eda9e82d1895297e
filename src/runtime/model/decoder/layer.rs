//! One layer: the order of its parts.

use super::StoreIndex;
use super::buffers::LayerContext;
use super::feed_forward::FeedForward;
use super::load::Loader;
use super::mixer::Mixer;
use super::per_layer::LayerInput;
use crate::runtime::backend::Backend;
use crate::runtime::error::{LoadError, Result};
use crate::runtime::model::config::{LayerConfig, MixerConfig, PerLayerInputs};

const OUTPUT_SCALE: [&str; 2] = ["layer_scalar", "layer_output_scale.weight"];

/// The residual stream and the buffers that layers read and write.
pub struct Stream<B: Backend> {
    pub residual: B::Buffer,
    pub normed: B::Buffer,
    /// Output of a part, to be added to the residual stream.
    pub added: B::Buffer,
}

impl<B: Backend> Stream<B> {
    pub fn new(backend: &B) -> Self {
        Self { residual: backend.buffer(), normed: backend.buffer(), added: backend.buffer() }
    }
}

pub struct DecoderLayer<B: Backend> {
    eps: f32,
    residual_scales: [f32; 2],
    pre_mixer: Option<B::Vector>,
    post_mixer: Option<B::Vector>,
    pre_mlp: Option<B::Vector>,
    post_mlp: Option<B::Vector>,
    mixer: Option<Mixer<B>>,
    feed_forward: Option<FeedForward<B>>,
    input: Option<LayerInput<B>>,
    output_scale: f32,
}

impl<B: Backend> DecoderLayer<B> {
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &LayerConfig,
        per_layer: Option<&PerLayerInputs>,
        stores: &[StoreIndex],
    ) -> Result<Self, LoadError> {
        let norm = |wanted: bool, names| wanted.then(|| loader.norm(names, loader.hidden)).transpose();
        let names = &loader.naming.norms;
        let mixes = !matches!(config.mixer, MixerConfig::None);
        let feeds = !config.feed_forward.is_none();
        let feed_forward = |_| FeedForward::load(loader, &config.feed_forward, config.norm_eps);
        Ok(Self {
            eps: config.norm_eps,
            residual_scales: config.residual_scales,
            pre_mixer: norm(mixes && config.pre_norms, names.pre_mixer)?,
            post_mixer: norm(mixes && config.post_norms, names.post_mixer)?,
            pre_mlp: norm(feeds && config.pre_norms, names.pre_mlp)?,
            post_mlp: norm(feeds && config.post_norms, names.post_mlp)?,
            mixer: Mixer::load(loader, config, stores)?,
            feed_forward: feeds.then_some(()).map(feed_forward).transpose()?,
            input: per_layer.map(|input| LayerInput::load(loader, input, config.norm_eps)).transpose()?,
            output_scale: match config.has_output_scale {
                true => loader.file.values(loader.layer, OUTPUT_SCALE, 1)?[0],
                false => 1.0,
            },
        })
    }

    pub fn apply(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B>) -> Result<()> {
        let (backend, eps) = (context.backend, self.eps);
        let Stream { residual, normed: space, added } = stream;
        let [mixer_scale, mlp_scale] = self.residual_scales;
        if let Some(mixer) = &self.mixer {
            let input =
                normed(backend, B::rms_norm_into_products, self.pre_mixer.as_ref(), eps, residual, space)?;
            mixer.apply(context, input, added)?;
            let result = normed(backend, B::rms_norm, self.post_mixer.as_ref(), eps, added, space)?;
            backend.add_scaled(residual, result, mixer_scale)?;
        }
        if let Some(feed_forward) = &self.feed_forward {
            let input =
                normed(backend, B::rms_norm_into_products, self.pre_mlp.as_ref(), eps, residual, space)?;
            feed_forward.apply(context, input, residual, added)?;
            let result = normed(backend, B::rms_norm, self.post_mlp.as_ref(), eps, added, space)?;
            backend.add_scaled(residual, result, mlp_scale)?;
        }
        if let (Some(input), Some(inputs)) = (&self.input, context.per_layer) {
            input.apply(backend, inputs, residual, context.work)?;
        }
        match self.output_scale {
            1.0 => Ok(()),
            scale => backend.scale(residual, scale),
        }
    }
}

/// One of the backend's norms: backend, input, weight, eps, output.
type Norm<B> =
    fn(&B, &<B as Backend>::Buffer, &<B as Backend>::Vector, f32, &mut <B as Backend>::Buffer) -> Result<()>;

/// Normalises `x` into `out`; returns `x` itself if the family has no norm here.
fn normed<'a, B: Backend>(
    backend: &B,
    norm: Norm<B>,
    weight: Option<&B::Vector>,
    eps: f32,
    x: &'a B::Buffer,
    out: &'a mut B::Buffer,
) -> Result<&'a B::Buffer> {
    match weight {
        None => Ok(x),
        Some(weight) => {
            norm(backend, x, weight, eps, out)?;
            Ok(out)
        }
    }
}
