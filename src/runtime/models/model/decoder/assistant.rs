//! The assistant of a decoder (Gemma 4): a few layers from a file of their own that draft for it. They keep
//! no KV, and read the decoder's.
//!
//! A row is the last known token of a sequence, which has no KV row yet, and the hidden state of the token
//! before it, behind the decoder's last norm. It stands at the token's position, and sees all rows before it:
//!
//! ```text
//! x      = joined . [the decoder's embedding(token) | hidden before it]
//! normed = norm(layers(x))
//! logits = output matrix . normed     of the token after this one
//! hidden = returned . normed          what the next row takes in turn: the drafted token, at the same position
//! ```
//!
//! Sources: transformers' `Gemma4AssistantForCausalLM` and `SinglePositionMultiTokenCandidateGenerator`;
//! llama.cpp's `gemma4-assistant`. A list of tokens by centroid, which some folders have, is not used: the
//! output matrix gives all logits.

use super::buffers::{LayerContext, Projection, join_hidden};
use super::layer::DecoderLayer;
use super::load::Loader;
use super::stream::Stream;
use super::{Convert, Decoder, HiddenStates, StepBuffers, apply_divisors, kv_layout, load_vocabulary};
use crate::backend::Backend;
use crate::model::config::{DecoderConfig, KvSource, LayerConfig, MixerConfig, Names, Naming};
use crate::model::rope::Rope;
use crate::model::weights::WeightFile;
use crate::model::{Batch, Logits};
use crate::tensor::TensorSource;
use llmctl_base::error::{Error, LoadResult, Result};

/// Names of the tensors that join it to its decoder.
pub const JOINED: Names = ["pre_projection"; 2];
pub const RETURNED: Names = ["post_projection"; 2];

/// The inputs of an assistant's construction, besides the backend and the decoder.
pub struct AssistantParts<'a> {
    /// Every layer's KV is that of one of the decoder's layers.
    pub config: DecoderConfig,
    pub naming: Naming,
    pub source: &'a dyn TensorSource,
    /// See [`super::DecoderParts::convert`].
    pub convert: Convert<'a>,
}

pub struct Assistant<B: Backend> {
    config: DecoderConfig,
    ropes: Vec<Rope>,
    joined: Projection<B>,
    returned: Projection<B>,
    layers: Vec<DecoderLayer<B>>,
    last_norm: B::Vector,
    head: B::Weight,
    step: StepBuffers<B>,
}

impl<B: Backend> Decoder<B> {
    /// Loads an assistant with `backend`, which need not be the decoder's. The decoder keeps its hidden states from here on.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load_assistant(&mut self, backend: &B, parts: AssistantParts<'_>) -> LoadResult<()> {
        let AssistantParts { mut config, naming, source, convert } = parts;
        let (file, joint) = (WeightFile::new(source, &naming)?, WeightFile::of_assistant(source, &naming));
        if naming.gguf {
            apply_divisors(&mut config, &file)?;
        }
        file.check_layers(config.layers.len())?;
        let (hidden, width) = (config.hidden_size, self.config.hidden_size);
        let loader = Loader::new(backend, &file, &config, convert);
        let (_, _, stores) = kv_layout(&self.config);
        let layer = |(layer, described): (usize, &LayerConfig)| {
            let MixerConfig::Attention(attention) = &described.mixer else {
                unreachable!("attention layers")
            };
            let KvSource::Layer(owner) = attention.kv else { unreachable!("rows of the decoder") };
            DecoderLayer::load(&Loader { layer, ..loader }, &config, described, &stores[owner])
        };
        let layers = config.layers.iter().enumerate().map(layer).collect::<Result<_, _>>()?;
        let (head, _) = load_vocabulary(&loader, config.vocab_size)?;
        let context = self.spec.context_length;
        self.assistant = Some(Assistant {
            ropes: config.ropes.iter().map(|rope| Rope::new(rope, context)).collect(),
            joined: loader.projection(joint.global_linear(JOINED, [hidden, 2 * width])?)?,
            returned: loader.projection(joint.global_linear(RETURNED, [width, hidden])?)?,
            layers,
            last_norm: backend.vector(file.final_norm(hidden)?)?,
            head,
            step: StepBuffers::new(&config, self.spec.groups.len()),
            config,
        });
        self.hidden = Some(HiddenStates::new());
        Ok(())
    }

    /// Computes the assistant's logits and hidden states; see [`Model::predict`](crate::model::Model::predict).
    pub fn assist(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits> {
        let Self {
            backend, config, embedding, stream, work, kv, head_out, assistant, hidden: states, ..
        } = self;
        let (Some(assistant), Some(states)) = (assistant, states) else {
            return Err(Error::Backend("the model has no assistant".to_owned()));
        };
        assistant.turn_to(backend, batch)?;
        let (step, Stream { added, residual, normed, .. }) = (&assistant.step, &mut *stream);
        backend.embed(embedding, &step.tokens, config.embedding_scale, added)?;
        join_hidden(backend, [step.tokens.len(), config.hidden_size], hidden, [added, residual, normed])?;
        assistant.joined.apply(backend, normed, residual)?;
        let mut context =
            LayerContext { backend, step: &assistant.step, kv, per_layer: None, work, is_stored: false };
        assistant.layers.iter().try_for_each(|layer| layer.apply(&mut context, stream))?;
        let Stream { residual, normed, .. } = stream;
        let eps = assistant.config.final_norm_eps;
        backend.rms_norm_into_products(residual, &assistant.last_norm, eps, normed)?;
        assistant.returned.apply(backend, normed, &mut states.on_backend)?;
        backend.read(&mut states.on_backend, &mut states.values)?;
        backend.matmul(normed, &assistant.head, None, head_out)?;
        let mut values = std::mem::take(&mut self.logits);
        backend.read(head_out, &mut values)?;
        Ok(Logits { values, vocab_size: assistant.config.vocab_size })
    }
}

impl<B: Backend> Assistant<B> {
    /// Prepares the buffers for rows of which each sees the rows of its table up to its position, and stands behind them.
    fn turn_to(&mut self, backend: &B, batch: &Batch<'_>) -> Result<()> {
        self.step.turn_to(backend, (&[], &[]), batch)?;
        self.step.positions.iter_mut().for_each(|position| *position += 1);
        self.step.numbers.iter_mut().flatten().for_each(|number| *number += 1);
        self.step.fill_angles(backend, &self.ropes)
    }
}
