//! The block behind a decoder that predicts the token after the next one (Qwen 3.5 and 3.6, Qwen 3 Next;
//! "multi-token prediction" or "NextN" in files): one layer with full attention and KV of its own, which
//! shares the decoder's vocabulary.
//!
//! A row is a token and the hidden state of the token before it, behind the decoder's last norm:
//!
//! ```text
//! x      = joined . [norm(embedding(token)) | norm(hidden before it)]
//! hidden = norm(layer(x))           what the next row takes in turn, if the next token is a guess
//! logits = output matrix . hidden   of the token after this row's
//! ```
//!
//! Sources: vLLM's `qwen3_5_mtp` and `qwen3_next_mtp`; llama.cpp's `qwen35` and its converter for GGUF.

use std::sync::Arc;

use super::buffers::{LayerBuffers, LayerContext, Projection, join_hidden};
use super::layer::DecoderLayer;
use super::load::Loader;
use super::norm::DecoderNorm;
use super::stream::Stream;
use super::{Convert, Decoder, HiddenStates, StepBuffers, images, kv_groups, kv_layout};
use crate::backend::{Backend, KvType};
use crate::kv::PageRef;
use crate::model::config::{DecoderConfig, LayerConfig, Names, Naming};
use crate::model::rope::Rope;
use crate::model::weights::{WeightFile, missing};
use crate::model::{Batch, BatchImage, Logits, Model, ModelSpec};
use crate::tensor::{SharedBytes, TensorSource};
use llmctl_base::error::{Error, LoadResult, Result};

/// Names of the block's tensors outside its layer.
const JOINED: Names = ["fc", "eh_proj"];
const EMBEDDING_NORM: Names = ["pre_fc_norm_embedding", "enorm"];
const HIDDEN_NORM: Names = ["pre_fc_norm_hidden", "hnorm"];
const LAST_NORM: Names = ["norm", "shared_head_norm"];
/// Those of tables that no published block has, because it shares the decoder's.
const EMBEDDING: Names = ["embed_tokens", "embed_tokens"];
const HEAD: Names = ["lm_head", "shared_head_head"];

/// The inputs of a block's construction, besides the backend and the decoder.
pub struct PredictionParts<'a> {
    pub layer: LayerConfig,
    pub naming: Naming,
    pub source: &'a dyn TensorSource,
    pub kv_type: KvType,
    /// See [`super::DecoderParts::convert`].
    pub convert: Convert<'a>,
}

/// A block that predicts further tokens: weights on a backend of its own, those of the vocabulary shared, and its KV pages.
pub struct PredictionBlock<B: Backend> {
    backend: B,
    spec: ModelSpec,
    config: DecoderConfig,
    ropes: Vec<Rope>,
    embedding: Arc<B::Weight>,
    head: Arc<B::Weight>,
    /// Norms of an embedding and of a hidden state, one behind the other.
    input_norms: B::Vector,
    joined: Projection<B>,
    layer: DecoderLayer<B>,
    last_norm: DecoderNorm<B>,
    kv: B::Kv,
    stream: Stream<B::Buffer>,
    work: LayerBuffers<B::Buffer>,
    step: StepBuffers<B>,
    hidden: HiddenStates<B>,
    head_out: B::Buffer,
    /// Memory for the next step's logits.
    logits: Vec<f32>,
}

impl<B: Backend> Decoder<B> {
    /// Loads the block behind this decoder, which keeps its hidden states from here on.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the tensor that is missing or has the wrong shape.
    pub fn load_prediction(
        &mut self,
        backend: B,
        parts: PredictionParts<'_>,
    ) -> LoadResult<PredictionBlock<B>> {
        let PredictionParts { layer, naming, source, kv_type, convert } = parts;
        let (num_layers, hidden) = (self.config.layers.len(), self.config.hidden_size);
        let file = WeightFile::of_prediction(source, &naming, num_layers);
        let file = file.ok_or_else(|| missing("mtp.fc"))?;
        let config = DecoderConfig { layers: vec![layer], ..self.config.clone() };
        let (layout, _, stores) = kv_layout(&config);
        let kv = backend.kv(&layout, kv_type)?;
        let number = if naming.gguf { num_layers } else { 0 };
        let loader = Loader { layer: number, ..Loader::new(&backend, &file, &config, convert) };
        let norm = |names| file.global_norm(names, hidden);
        let input_norms = [norm(EMBEDDING_NORM)?, norm(HIDDEN_NORM)?].concat();
        // llama.cpp takes the decoder's norm where the block has none.
        let last_norm = match file.has_global(LAST_NORM) {
            true => norm(LAST_NORM)?,
            false => WeightFile::new(source, &naming)?.final_norm(hidden)?,
        };
        let joined = loader.projection(file.global_linear(JOINED, [hidden, 2 * hidden])?)?;
        let table = |names| -> LoadResult<_> {
            let table = file.optional_global_linear(names, [config.vocab_size, hidden])?;
            let weight = |table| backend.weight(&loader.vocabulary(table)?).map(Arc::new);
            table.map(weight).transpose()
        };
        let (own_embedding, own_head) = (table(EMBEDDING)?, table(HEAD)?);
        let spec = ModelSpec {
            architecture: format!("{}'s prediction block", config.architecture),
            groups: kv_groups(&config, kv_type),
            ..self.spec.clone()
        };
        self.hidden = Some(HiddenStates::new());
        Ok(PredictionBlock {
            ropes: config.ropes.iter().map(|rope| Rope::new(rope, spec.context_length)).collect(),
            embedding: own_embedding.unwrap_or_else(|| self.embedding.clone()),
            head: own_head.unwrap_or_else(|| self.head.as_ref().unwrap_or(&self.embedding).clone()),
            input_norms: backend.vector(input_norms)?,
            joined,
            layer: DecoderLayer::load(&loader, &config, &config.layers[0], &stores[0])?,
            last_norm: DecoderNorm::new(&backend, &config, last_norm, config.final_norm_eps)?,
            kv,
            stream: Stream::new(0),
            work: LayerBuffers::default(),
            step: StepBuffers::new(&config, spec.groups.len()),
            hidden: HiddenStates::new(),
            head_out: B::Buffer::default(),
            logits: Vec::new(),
            spec,
            config,
            backend,
        })
    }
}

impl<B: Backend> PredictionBlock<B> {
    /// Puts the joined rows of a step into the residual stream.
    fn join(&mut self, hidden: &[f32], images: &[BatchImage<'_>]) -> Result<()> {
        let Self { backend, config, step, stream, .. } = self;
        let Stream { added, normed, residual, .. } = stream;
        backend.embed(&self.embedding, &step.tokens, config.embedding_scale, added)?;
        images::place(backend, images, added)?;
        join_hidden(backend, [step.tokens.len(), config.hidden_size], hidden, [added, normed, residual])?;
        backend.rms_norm_groups(residual, &self.input_norms, 2, config.final_norm_eps, normed)?;
        self.joined.apply(backend, normed, residual)
    }

    fn logits(&mut self) -> Result<Logits> {
        let Self { backend, config, stream, step, head_out, .. } = self;
        let (vocab_size, mut values) = (config.vocab_size, std::mem::take(&mut self.logits));
        if step.wanted.is_empty() {
            values.clear();
            return Ok(Logits { values, vocab_size });
        }
        let Stream { residual, normed, added, .. } = stream;
        backend.select_rows(residual, &step.wanted, added)?;
        self.last_norm.apply_into_products(backend, added, normed)?;
        backend.matmul(normed, &self.head, None, head_out)?;
        backend.read(head_out, &mut values)?;
        Ok(Logits { values, vocab_size })
    }
}

impl<B: Backend> Model for PredictionBlock<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, _: &Batch<'_>) -> Result<Logits> {
        Err(Error::Backend("a prediction block needs hidden states".to_owned()))
    }

    fn hidden_width(&self) -> Option<usize> {
        Some(self.config.hidden_size)
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits> {
        images::check(batch, &self.config)?;
        self.step.turn_to(&self.backend, (&self.ropes, &[]), batch)?;
        self.join(hidden, batch.images)?;
        let Self { backend, step, kv, stream, work, .. } = self;
        self.layer.apply(
            &mut LayerContext { backend, step, kv, per_layer: None, work, is_stored: false },
            stream,
        )?;
        self.hidden.compute(backend, &stream.residual, &self.last_norm)?;
        self.logits()
    }

    fn hidden(&self) -> &[f32] {
        &self.hidden.values
    }

    fn reuse(&mut self, logits: Logits) {
        self.logits = logits.values;
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()> {
        self.backend.copy_page(&mut self.kv, from.group, from.page, to.page)
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.backend.free_page(&mut self.kv, page_ref.group, page_ref.page);
    }

    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()> {
        self.backend.export_page(&self.kv, page_ref.group, page_ref.page, out)
    }

    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<()> {
        self.backend.import_page(&mut self.kv, page_ref.group, page_ref.page, bytes)
    }
}
