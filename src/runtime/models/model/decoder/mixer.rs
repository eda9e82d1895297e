//! The part of a layer in which tokens see earlier ones: one mixer, or attention and a state space side by
//! side.

use super::StoreIndex;
use super::attention::Attention;
use super::buffers::{LayerContext, Mixer};
use super::delta_net::DeltaNet;
use super::kimi_delta::KimiDelta;
use super::latent::LatentAttention;
use super::lightning::Lightning;
use super::load::Loader;
use super::short_conv::ShortConv;
use super::ssm::Ssm;
use crate::backend::Backend;
use crate::model::config::MixerConfig;
use llmctl_base::error::{LoadResult, Result};

/// Attention and a state space side by side.
struct AttentionAndSsm<B: Backend> {
    attention: Attention<B>,
    ssm: Ssm<B>,
    /// Factors of the two outputs.
    scales: [f32; 2],
}

/// Loads the mixer of a layer, which has `stores`; `None` if the layer has no mixer.
///
/// # Errors
/// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
pub fn load_mixer<B: Backend>(
    loader: &Loader<'_, B>,
    config: &MixerConfig,
    stores: &[StoreIndex],
) -> LoadResult<Option<Box<dyn Mixer<B>>>> {
    let mixer: Box<dyn Mixer<B>> = match (config, stores) {
        (MixerConfig::None, _) => return Ok(None),
        (MixerConfig::Attention(attention), stores) => Box::new(Attention::load(loader, attention, stores)?),
        (MixerConfig::Latent(latent), stores) => Box::new(LatentAttention::load(loader, latent, stores)?),
        (MixerConfig::ShortConv(conv), &[store]) => Box::new(ShortConv::load(loader, conv, store)?),
        (MixerConfig::DeltaNet(net), &[store, _]) if net.is_kimi => {
            Box::new(KimiDelta::load(loader, net, store)?)
        }
        (MixerConfig::DeltaNet(net), &[store, _]) => Box::new(DeltaNet::load(loader, net, store)?),
        (MixerConfig::Lightning(config), &[store]) => Box::new(Lightning::load(loader, config, store)?),
        (MixerConfig::Ssm(ssm), &[conv, state]) => Box::new(Ssm::load(loader, ssm, [conv, state])?),
        (MixerConfig::AttentionAndSsm { attention, ssm, scales }, &[rows, conv, state]) => {
            let attention = Attention::load(loader, attention, &[rows])?;
            let ssm = Ssm::load(loader, ssm, [conv, state])?;
            Box::new(AttentionAndSsm { attention, ssm, scales: *scales })
        }
        (mixer, stores) => unreachable!("{} stores for {mixer:?}", stores.len()),
    };
    Ok(Some(mixer))
}

impl<B: Backend> Mixer<B> for AttentionAndSsm<B> {
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        self.attention.apply(context, input, out)?;
        if self.scales[0] != 1.0 {
            context.backend.scale(out, self.scales[0])?;
        }
        let mut second = std::mem::take(&mut context.work.returned);
        self.ssm.apply(context, input, &mut second)?;
        context.backend.add_scaled(out, &second, self.scales[1])?;
        context.work.returned = second;
        Ok(())
    }
}
