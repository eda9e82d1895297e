//! One layer: the order of its parts.

use super::StoreIndex;
use super::altup::LayerAltUp;
use super::buffers::{LayerContext, Mixer};
use super::feed_forward::FeedForward;
use super::load::Loader;
use super::mixer::load_mixer;
use super::per_layer::LayerInput;
use super::stream::Stream;
use crate::backend::Backend;
use crate::model::config::{DecoderConfig, LayerConfig, MixerConfig};
use llmctl_base::error::{LoadResult, Result};

const OUTPUT_SCALE: [&str; 2] = ["layer_scalar", "layer_output_scale.weight"];

pub struct DecoderLayer<B: Backend> {
    eps: f32,
    residual_scales: [f32; 2],
    pre_mixer: Option<B::Vector>,
    post_mixer: Option<B::Vector>,
    pre_mlp: Option<B::Vector>,
    post_mlp: Option<B::Vector>,
    mixer: Option<Box<dyn Mixer<B>>>,
    feed_forward: Option<FeedForward<B>>,
    input: Option<LayerInput<B>>,
    altup: Option<LayerAltUp<B>>,
    output_scale: f32,
}

impl<B: Backend> DecoderLayer<B> {
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        model: &DecoderConfig,
        config: &LayerConfig,
        stores: &[StoreIndex],
    ) -> LoadResult<Self> {
        let loader = &Loader { eps: config.norm_eps, ..*loader };
        let (per_layer, altup) = (model.per_layer_inputs.as_ref(), model.altup.as_ref());
        let gate_cutoff = altup.and_then(|altup| altup.gate_cutoffs[loader.layer]);
        let norm = |wanted: bool, names| wanted.then(|| loader.norm(names, loader.hidden)).transpose();
        let names = &loader.naming.norms;
        let mixes = !matches!(config.mixer, MixerConfig::None);
        let feeds = !config.feed_forward.is_none();
        let feed_forward = |_| FeedForward::load(loader, &config.feed_forward, gate_cutoff);
        Ok(Self {
            eps: config.norm_eps,
            residual_scales: config.residual_scales,
            pre_mixer: norm(mixes && config.pre_norms, names.pre_mixer)?,
            post_mixer: norm(mixes && config.post_norms, names.post_mixer)?,
            pre_mlp: norm(feeds && config.pre_norms, names.pre_mlp)?,
            post_mlp: norm(feeds && config.post_norms, names.post_mlp)?,
            mixer: load_mixer(loader, &config.mixer, stores)?,
            feed_forward: feeds.then_some(()).map(feed_forward).transpose()?,
            input: per_layer.map(|input| LayerInput::load(loader, input)).transpose()?,
            altup: altup.map(|altup| LayerAltUp::load(loader, altup)).transpose()?,
            output_scale: match config.has_output_scale {
                true => loader.file.values(loader.layer, OUTPUT_SCALE, 1)?[0],
                false => 1.0,
            },
        })
    }

    /// Stores the keys and values of all rows, if that can be done apart from the rest: [`Self::apply`] then need not compute all
    /// of them. Returns whether it was done.
    pub fn store(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<bool> {
        // A layer with alternating updates first predicts its input, so that `residual` is not what its keys are computed from.
        let Some(mixer) = self.mixer.as_ref().filter(|_| self.altup.is_none()) else { return Ok(false) };
        let Stream { residual, normed: space, .. } = stream;
        let norm = self.pre_mixer.as_ref();
        let input = normed(context.backend, B::rms_norm_into_products, norm, self.eps, residual, space)?;
        mixer.store(context, input)
    }

    pub fn apply(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let (backend, eps) = (context.backend, self.eps);
        if let Some(altup) = &self.altup {
            altup.predict(context, stream)?;
        }
        let Stream { residual, normed: space, added, altup: streams } = stream;
        let [mixer_scale, mlp_scale] = self.residual_scales;
        if let Some(mixer) = &self.mixer {
            let input =
                normed(backend, B::rms_norm_into_products, self.pre_mixer.as_ref(), eps, residual, space)?;
            if let Some(altup) = &self.altup {
                altup.compute_laurel(context, input, &mut streams.laurel)?;
            }
            mixer.apply(context, input, added)?;
            let result = normed(backend, B::rms_norm, self.post_mixer.as_ref(), eps, added, space)?;
            backend.add_scaled(residual, result, mixer_scale)?;
        }
        if self.altup.is_some() {
            LayerAltUp::add_laurel(backend, &streams.laurel, residual)?;
        }
        if let Some(feed_forward) = &self.feed_forward {
            let input =
                normed(backend, B::rms_norm_into_products, self.pre_mlp.as_ref(), eps, residual, space)?;
            feed_forward.apply(context, input, residual, added)?;
            let result = normed(backend, B::rms_norm, self.post_mlp.as_ref(), eps, added, space)?;
            backend.add_scaled(residual, result, mlp_scale)?;
        }
        let inputs = self.input.as_ref().zip(context.per_layer);
        if let Some(altup) = &self.altup {
            altup.correct(context, inputs, stream)?;
        } else if let Some((input, inputs)) = inputs {
            input.compute(context, [inputs, residual], added)?;
            backend.add_scaled(residual, added, 1.0)?;
        }
        let residual = &mut stream.residual;
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
