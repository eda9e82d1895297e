//! The part of a layer in which tokens see earlier ones: one mixer, or attention and a state space side by
//! side.

use super::StoreIndex;
use super::attention::Attention;
use super::buffers::LayerContext;
use super::delta_net::DeltaNet;
use super::latent::LatentAttention;
use super::load::Loader;
use super::short_conv::ShortConv;
use super::ssm::Ssm;
use crate::backend::Backend;
use crate::model::config::{LayerConfig, MixerConfig};
use llmctl_base::error::{LoadResult, Result};

pub enum Mixer<B: Backend> {
    Attention(Attention<B>),
    Latent(LatentAttention<B>),
    ShortConv(ShortConv<B>),
    DeltaNet(DeltaNet<B>),
    Ssm(Ssm<B>),
    Both {
        attention: Attention<B>,
        ssm: Ssm<B>,
        /// Factors of the two outputs.
        scales: [f32; 2],
    },
}

impl<B: Backend> Mixer<B> {
    /// Loads the mixer of a layer, which has `stores`; `None` if the layer has no mixer.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load(
        loader: &Loader<'_, B>,
        config: &LayerConfig,
        stores: &[StoreIndex],
    ) -> LoadResult<Option<Self>> {
        let eps = config.norm_eps;
        Ok(match (&config.mixer, stores) {
            (MixerConfig::None, _) => None,
            (MixerConfig::Attention(attention), [store]) => {
                Some(Mixer::Attention(Attention::load(loader, attention, eps, *store)?))
            }
            (MixerConfig::Latent(latent), [store]) => {
                Some(Mixer::Latent(LatentAttention::load(loader, latent, *store)?))
            }
            (MixerConfig::ShortConv(conv), [store]) => {
                Some(Mixer::ShortConv(ShortConv::load(loader, conv, *store)?))
            }
            (MixerConfig::DeltaNet(net), [store, _]) => {
                Some(Mixer::DeltaNet(DeltaNet::load(loader, net, eps, *store)?))
            }
            (MixerConfig::Ssm(ssm), &[conv, state]) => {
                Some(Mixer::Ssm(Ssm::load(loader, ssm, eps, [conv, state])?))
            }
            (MixerConfig::AttentionAndSsm { attention, ssm, scales }, &[rows, conv, state]) => {
                Some(Mixer::Both {
                    attention: Attention::load(loader, attention, eps, rows)?,
                    ssm: Ssm::load(loader, ssm, eps, [conv, state])?,
                    scales: *scales,
                })
            }
            (mixer, stores) => unreachable!("{} stores for {mixer:?}", stores.len()),
        })
    }

    /// Stores the keys and values of all rows, if that can be done apart from the rest. Returns whether it was.
    pub fn store(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer) -> Result<bool> {
        match self {
            Mixer::Attention(attention) => attention.store(context, input),
            _ => Ok(false),
        }
    }

    /// Computes the mixer's output from `input` into `out`.
    pub fn apply(
        &self,
        context: &mut LayerContext<'_, B>,
        input: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<()> {
        match self {
            Mixer::Attention(attention) => attention.apply(context, input, out),
            Mixer::Latent(attention) => attention.apply(context, input, out),
            Mixer::DeltaNet(net) => net.apply(context, input, out),
            Mixer::ShortConv(conv) => conv.apply(context, input, out),
            Mixer::Ssm(ssm) => ssm.apply(context, input, out),
            Mixer::Both { attention, ssm, scales } => {
                attention.apply(context, input, out)?;
                if scales[0] != 1.0 {
                    context.backend.scale(out, scales[0])?;
                }
                let mut second = std::mem::take(&mut context.work.returned);
                ssm.apply(context, input, &mut second)?;
                context.backend.add_scaled(out, &second, scales[1])?;
                context.work.returned = second;
                Ok(())
            }
        }
    }
}
