//! A decoder that reads whole texts for their hidden states, without KV: an embedding model or a reranker.

use std::ops::Range;

use super::{Decoder, Stream};
use crate::backend::{Backend, Reach};
use crate::model::config::{DecoderConfig, KvSource, MixerConfig};
use crate::model::{TextIds, TextModel, TextModelSpec, text_rows};
use llmctl_base::error::Result;

/// The texts of a step.
pub struct TextPass {
    /// Rows of each text.
    pub rows: Vec<Range<usize>>,
    /// True if tokens attend to those after them.
    is_bidirectional: bool,
}

impl TextPass {
    /// Returns the positions that a layer with this window sees. A window that lies on both sides is as wide in all.
    pub fn reach(&self, window: Option<usize>) -> Reach {
        match (self.is_bidirectional, window) {
            (false, window) => Reach::causal(window),
            (true, None) => Reach::WHOLE,
            (true, Some(window)) => Reach::both(window / 2),
        }
    }
}

/// A decoder, and the way in which it reads texts.
pub struct TextDecoder<B: Backend> {
    decoder: Decoder<B>,
    spec: TextModelSpec,
    is_bidirectional: bool,
}

impl<B: Backend> TextDecoder<B> {
    /// Returns why a decoder cannot read texts without KV; `None` if it can.
    pub fn refusal(config: &DecoderConfig) -> Option<&'static str> {
        let reads = |mixer: &MixerConfig| match mixer {
            MixerConfig::None => true,
            MixerConfig::Attention(attention) => {
                !matches!(attention.kv, KvSource::Layer(_))
                    && !attention.has_sinks
                    && attention.narrow_values.is_none()
            }
            _ => false,
        };
        if !config.layers.iter().all(|layer| reads(&layer.mixer)) {
            return Some("embeddings are computed by decoders with plain attention in every layer only");
        }
        let has_streams = config.altup.is_some() || config.hyper.is_some();
        has_streams.then_some("embeddings are not computed by decoders with several residual streams")
    }

    /// Makes a decoder, for which there is no [`Self::refusal`], read texts; tokens see those after them if
    /// `is_bidirectional`.
    pub fn new(decoder: Decoder<B>, is_bidirectional: bool) -> Self {
        let spec = TextModelSpec {
            architecture: decoder.config.architecture,
            vocab_size: decoder.config.vocab_size,
            hidden_size: decoder.config.hidden_size,
            context_length: decoder.spec.context_length,
        };
        Self { decoder, spec, is_bidirectional }
    }

    /// Computes the residual stream of the texts' rows; `false` if there are none.
    fn read(&mut self, texts: &[TextIds<'_>]) -> Result<bool> {
        let rows = text_rows(texts, self.spec.context_length)?;
        let Decoder { backend, ropes, step, .. } = &mut self.decoder;
        step.tokens.clear();
        step.tokens.extend(texts.iter().flat_map(|text| text.ids));
        step.positions.clear();
        step.positions.extend(texts.iter().flat_map(|text| 0..text.ids.len()));
        step.numbers.clear();
        step.numbers.extend(step.positions.iter().map(|&position| [position as u32; 3]));
        if step.tokens.is_empty() {
            return Ok(false);
        }
        step.fill_angles(backend, ropes)?;
        step.texts = Some(TextPass { rows, is_bidirectional: self.is_bidirectional });
        self.decoder.apply_layers(&[])?;
        Ok(true)
    }
}

impl<B: Backend> TextModel for TextDecoder<B> {
    fn spec(&self) -> &TextModelSpec {
        &self.spec
    }

    fn encode(&mut self, texts: &[TextIds<'_>], out: &mut Vec<f32>) -> Result<()> {
        if !self.read(texts)? {
            out.clear();
            return Ok(());
        }
        let Decoder { backend, stream, last, .. } = &mut self.decoder;
        let Stream { residual, normed, hyper, .. } = stream;
        last.apply(backend, residual, hyper, normed)?;
        backend.read(normed, out)
    }
}
