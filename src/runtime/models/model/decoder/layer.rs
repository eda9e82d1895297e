//! One layer: the order of its parts.

use super::StoreIndex;
use super::altup::LayerAltUp;
use super::buffers::{LayerContext, Mixer};
use super::feed_forward::FeedForward;
use super::hyper::StreamMixer;
use super::load::Loader;
use super::mixer::load_mixer;
use super::ngrams::Ngrams;
use super::norm::DecoderNorm;
use super::per_layer::LayerInput;
use super::stream::Stream;
use crate::backend::Backend;
use crate::model::config::{DecoderConfig, LayerConfig, MixerConfig};
use llmctl_base::error::{LoadResult, Result};

const OUTPUT_SCALE: [&str; 2] = ["layer_scalar", "layer_output_scale.weight"];

pub struct DecoderLayer<B: Backend> {
    is_parallel: bool,
    residual_scales: [f32; 2],
    pre_mixer: Option<DecoderNorm<B>>,
    post_mixer: Option<DecoderNorm<B>>,
    pre_mlp: Option<DecoderNorm<B>>,
    post_mlp: Option<DecoderNorm<B>>,
    mixer: Option<Box<dyn Mixer<B>>>,
    feed_forward: Option<FeedForward<B>>,
    input: Option<LayerInput<B>>,
    altup: Option<LayerAltUp<B>>,
    /// Before the mixer and before the feed-forward part.
    hyper: Option<[StreamMixer<B>; 2]>,
    ngrams: Option<Ngrams<B>>,
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
        let read = |names, eps| {
            let weights = loader.file.layer_norm(loader.layer, names, loader.hidden)?;
            DecoderNorm::new(loader.backend, model, weights, eps)
        };
        let norm = |wanted: bool, names, eps| wanted.then(|| read(names, eps)).transpose();
        let [eps, post_eps] = [config.norm_eps, config.post_norm_eps];
        let names = &loader.naming.norms;
        let mixes = !matches!(config.mixer, MixerConfig::None);
        let feeds = !config.feed_forward.is_none();
        let feed_forward = |_| FeedForward::load(loader, &config.feed_forward, gate_cutoff);
        let hyper = model.hyper.as_ref();
        let of_ngrams = if config.ngrams.is_some() { Ngrams::<B>::NUM_STORES } else { 0 };
        let (of_mixer, of_ngrams) = stores.split_at(stores.len() - of_ngrams);
        Ok(Self {
            is_parallel: config.is_parallel,
            residual_scales: config.residual_scales,
            pre_mixer: norm(mixes && config.pre_norms, names.pre_mixer, eps)?,
            post_mixer: norm(mixes && config.post_norms, names.post_mixer, post_eps)?,
            pre_mlp: norm(feeds && config.pre_norms && !config.is_parallel, names.pre_mlp, eps)?,
            post_mlp: norm(feeds && config.post_norms, names.post_mlp, post_eps)?,
            mixer: load_mixer(loader, &config.mixer, of_mixer)?,
            feed_forward: feeds.then_some(()).map(feed_forward).transpose()?,
            input: per_layer.map(|input| LayerInput::load(loader, input)).transpose()?,
            altup: altup.map(|altup| LayerAltUp::load(loader, altup)).transpose()?,
            hyper: hyper.map(|hyper| StreamMixer::of_layer(loader, hyper)).transpose()?,
            ngrams: match (&config.ngrams, hyper, of_ngrams) {
                (Some(ngrams), Some(hyper), &[tokens, conv]) => {
                    Some(Ngrams::load(loader, ngrams, hyper.num_streams, [tokens, conv])?)
                }
                _ => None,
            },
            output_scale: match config.has_output_scale {
                true => loader.file.values(loader.layer, OUTPUT_SCALE, 1)?[0],
                false => 1.0,
            },
        })
    }

    /// Stores the keys and values of all rows, if that can be done apart from the rest: [`Self::apply`] then need not compute all
    /// of them. Returns whether it was done.
    pub fn store(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<bool> {
        // With several streams, `residual` is not what keys are computed from.
        let is_one = self.altup.is_none() && self.hyper.is_none();
        let Some(mixer) = self.mixer.as_ref().filter(|_| is_one) else { return Ok(false) };
        let Stream { residual, normed: space, .. } = stream;
        let norm = self.pre_mixer.as_ref();
        let input = normed(context.backend, DecoderNorm::apply_into_products, norm, residual, space)?;
        mixer.store(context, input)
    }

    pub fn apply(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let backend = context.backend;
        if let Some(mixers) = &self.hyper {
            return self.apply_to_streams(mixers, context, stream);
        }
        if let Some(altup) = &self.altup {
            altup.predict(context, stream)?;
        }
        let Stream { residual, normed: space, added, altup: streams, .. } = stream;
        let [mixer_scale, mlp_scale] = self.residual_scales;
        if let Some(mixer) = &self.mixer {
            let (norm, apply) = (self.pre_mixer.as_ref(), DecoderNorm::apply_into_products);
            let input = normed(backend, apply, norm, residual, space)?;
            if let Some(altup) = &self.altup {
                altup.compute_laurel(context, input, &mut streams.laurel)?;
            }
            mixer.apply(context, input, added)?;
            if self.is_parallel {
                return self.feed_beside(context, stream);
            }
            let result = normed(backend, DecoderNorm::apply, self.post_mixer.as_ref(), added, space)?;
            backend.add_scaled(residual, result, mixer_scale)?;
        }
        if self.altup.is_some() {
            LayerAltUp::add_laurel(backend, &streams.laurel, residual)?;
        }
        if let Some(feed_forward) = &self.feed_forward {
            let (norm, apply) = (self.pre_mlp.as_ref(), DecoderNorm::apply_into_products);
            let input = normed(backend, apply, norm, residual, space)?;
            feed_forward.apply(context, input, residual, added)?;
            let result = normed(backend, DecoderNorm::apply, self.post_mlp.as_ref(), added, space)?;
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

    /// Computes a layer whose parts read mixes of several streams.
    fn apply_to_streams(
        &self,
        [before_mixer, before_mlp]: &[StreamMixer<B>; 2],
        context: &mut LayerContext<'_, B>,
        stream: &mut Stream<B::Buffer>,
    ) -> Result<()> {
        if let Some(ngrams) = &self.ngrams {
            ngrams.apply(context, stream)?;
        }
        let (backend, Stream { residual, normed, added, hyper, .. }) = (context.backend, stream);
        if let Some(mixer) = &self.mixer {
            before_mixer.mix(backend, residual, hyper, normed)?;
            mixer.apply(context, normed, added)?;
            before_mixer.add(backend, added, hyper, residual)?;
        }
        if let Some(feed_forward) = &self.feed_forward {
            before_mlp.mix(backend, residual, hyper, normed)?;
            feed_forward.apply(context, normed, residual, added)?;
            before_mlp.add(backend, added, hyper, residual)?;
        }
        Ok(())
    }

    /// Adds the mixer's output, in `stream.added`, and that of the feed-forward part, which reads the same normalised rows.
    fn feed_beside(&self, context: &mut LayerContext<'_, B>, stream: &mut Stream<B::Buffer>) -> Result<()> {
        let Stream { residual, normed: input, added, .. } = stream;
        let (backend, [mixer_scale, mlp_scale]) = (context.backend, self.residual_scales);
        let Some(feed_forward) = &self.feed_forward else {
            return backend.add_scaled(residual, added, mixer_scale);
        };
        backend.add_scaled(residual, added, mixer_scale)?;
        feed_forward.apply(context, input, residual, added)?;
        backend.add_scaled(residual, added, mlp_scale)
    }
}

/// Either way of [`DecoderNorm`]: norm, backend, input, output.
type Apply<B> = fn(&DecoderNorm<B>, &B, &<B as Backend>::Buffer, &mut <B as Backend>::Buffer) -> Result<()>;

/// Normalises `x` into `out`; returns `x` itself if the family has no norm here.
fn normed<'a, B: Backend>(
    backend: &B,
    apply: Apply<B>,
    norm: Option<&DecoderNorm<B>>,
    x: &'a B::Buffer,
    out: &'a mut B::Buffer,
) -> Result<&'a B::Buffer> {
    match norm {
        None => Ok(x),
        Some(norm) => {
            apply(norm, backend, x, out)?;
            Ok(out)
        }
    }
}
