//! One layer: the order of its parts.

use super::StoreIndex;
use super::attention::Attention;
use super::buffers::LayerContext;
use super::delta_net::DeltaNet;
use super::feed_forward::FeedForward;
use super::latent::LatentAttention;
use super::load::Loader;
use super::per_layer::LayerInput;
use super::short_conv::ShortConv;
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
    residual_scale: f32,
    pre_mixer: Option<B::Vector>,
    post_mixer: Option<B::Vector>,
    pre_mlp: Option<B::Vector>,
    post_mlp: Option<B::Vector>,
    mixer: Mixer<B>,
    feed_forward: FeedForward<B>,
    input: Option<LayerInput<B>>,
    output_scale: f32,
}

enum Mixer<B: Backend> {
    Attention(Attention<B>),
    Latent(LatentAttention<B>),
    ShortConv(ShortConv<B>),
    DeltaNet(DeltaNet<B>),
}

impl<B: Backend> DecoderLayer<B> {
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &LayerConfig,
        per_layer: Option<&PerLayerInputs>,
        store: StoreIndex,
    ) -> Result<Self, LoadError> {
        let norm = |wanted: bool, names| wanted.then(|| loader.norm(names, loader.hidden)).transpose();
        let names = &loader.naming.norms;
        Ok(Self {
            eps: config.norm_eps,
            residual_scale: config.residual_scale,
            pre_mixer: norm(config.pre_norms, names.pre_mixer)?,
            post_mixer: norm(config.post_norms, names.post_mixer)?,
            pre_mlp: norm(config.pre_norms, names.pre_mlp)?,
            post_mlp: norm(config.post_norms, names.post_mlp)?,
            mixer: match &config.mixer {
                MixerConfig::Attention(attention) => {
                    Mixer::Attention(Attention::load(loader, attention, config.norm_eps, store)?)
                }
                MixerConfig::Latent(latent) => Mixer::Latent(LatentAttention::load(loader, latent, store)?),
                MixerConfig::DeltaNet(net) => {
                    Mixer::DeltaNet(DeltaNet::load(loader, net, config.norm_eps, store)?)
                }
                MixerConfig::ShortConv(conv) => Mixer::ShortConv(ShortConv::load(loader, conv, store)?),
            },
            feed_forward: FeedForward::load(loader, &config.feed_forward, config.norm_eps)?,
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
        let input =
            normed(backend, B::rms_norm_into_products, self.pre_mixer.as_ref(), eps, residual, space)?;
        match &self.mixer {
            Mixer::Attention(attention) => attention.apply(context, input, added)?,
            Mixer::Latent(attention) => attention.apply(context, input, added)?,
            Mixer::DeltaNet(net) => net.apply(context, input, added)?,
            Mixer::ShortConv(conv) => conv.apply(context, input, added)?,
        }
        let result = normed(backend, B::rms_norm, self.post_mixer.as_ref(), eps, added, space)?;
        backend.add_scaled(residual, result, self.residual_scale)?;

        let input = normed(backend, B::rms_norm_into_products, self.pre_mlp.as_ref(), eps, residual, space)?;
        self.feed_forward.apply(context, input, residual, added)?;
        let result = normed(backend, B::rms_norm, self.post_mlp.as_ref(), eps, added, space)?;
        backend.add_scaled(residual, result, self.residual_scale)?;
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
