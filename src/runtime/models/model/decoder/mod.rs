//! The one decoder: every family runs through this code, driven by [`DecoderConfig`]. `layer` is one layer,
//! and each kind of mixer and feed-forward part has a file.
//!
//! The caller supplies KV pages and page tables, so rewinding, sharing and batching are its decisions. A
//! row's result depends on its own sequence only.

mod altup;
mod assistant;
mod attention;
mod buffers;
mod delta_net;
mod feed_forward;
mod hyper;
mod images;
mod indexer;
mod kimi_delta;
mod latent;
mod layer;
mod lightning;
mod load;
mod mixer;
mod ngrams;
mod norm;
mod per_layer;
mod prediction;
mod routing;
mod short_conv;
mod ssm;
mod stream;
mod texts;

use altup::AltUp;
use assistant::Assistant;
pub use assistant::{AssistantParts, JOINED, RETURNED};
pub use buffers::Projection;
use buffers::{AdaptedRows, LayerBuffers, LayerContext};
use hyper::LastNorm;
use layer::DecoderLayer;
use load::Loader;
pub use ngrams::is_table;
use norm::DecoderNorm;
use per_layer::PerLayer;
pub use prediction::{PredictionBlock, PredictionParts};
use stream::Stream;
pub use texts::TextDecoder;
use texts::TextPass;

use std::ops::Range;
use std::sync::Arc;

use super::config::{
    AttentionConfig, DecoderConfig, DeltaNetConfig, IndexerConfig, KvSource, LayerConfig, MixerConfig,
    Naming, RopeScaling, SsmConfig,
};
use super::low_rank::Adapter;
use super::rope::Rope;
use super::weights::WeightFile;
use super::{Batch, BatchImage, Logits, Model, ModelSpec, Row};
use crate::adapters::AdapterSpec;
use crate::backend::{Backend, KvLayout, KvShape, KvType, KvValues, RowSpan, Store, StoreShape};
use crate::images::TwoWay;
use crate::kv::{KvGroup, KvKind, PAGE_TOKENS, PageRef};
use crate::tensor::{HostTensor, SharedBytes, TensorSource};
use llmctl_base::error::{Error, LoadError, LoadResult, Result};
use llmctl_kernel::{isa, math};

/// The inputs of a decoder's construction, besides the backend.
pub struct DecoderParts<'a> {
    pub config: DecoderConfig,
    pub naming: Naming,
    pub source: &'a dyn TensorSource,
    /// Tokens per sequence; selects LongRoPE's divisors.
    pub context_length: usize,
    pub kv_type: KvType,
    /// Converts a matrix to the type that it is kept in.
    pub convert: Convert<'a>,
    /// The adapters that sequences of a batch may use.
    pub adapters: &'a [Adapter],
    /// Called after each layer with the number of loaded layers and their total.
    pub progress: &'a mut dyn FnMut(usize, usize),
}

/// Converter of a matrix, given its name and purpose, to the type that it is kept in.
pub type Convert<'a> = &'a (dyn Fn(&str, Matrix, HostTensor) -> LoadResult<HostTensor> + 'a);

/// Purpose of a matrix: some are more sensitive to rounding than others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Embedding table or output matrix, `[vocab, hidden]`.
    Vocabulary,
    /// A projection within a layer.
    Projection,
    /// A matrix of few rows that is sensitive to rounding: a router of experts, the rates of a recurrent state.
    Gate,
}

/// A decoder: weights on a backend, and its KV pages.
pub struct Decoder<B: Backend> {
    backend: B,
    config: DecoderConfig,
    spec: ModelSpec,
    ropes: Vec<Rope>,
    embedding: Arc<B::Weight>,
    head: Option<Arc<B::Weight>>,
    embedding_norm: Option<DecoderNorm<B>>,
    last: LastNorm<B>,
    per_layer: Option<PerLayer<B>>,
    altup: Option<AltUp<B>>,
    layers: Vec<DecoderLayer<B>>,
    /// The last layer that keeps rows or a state.
    last_keeper: usize,
    kv: B::Kv,
    stream: Stream<B::Buffer>,
    work: LayerBuffers<B::Buffer>,
    step: StepBuffers<B>,
    /// Rows of the step that were not dropped; kept to reuse the memory.
    kept_rows: Vec<Row>,
    /// Logits on the backend. A separate buffer, because growing another one to the vocabulary's size would write
    /// zeros into it at every step.
    head_out: B::Buffer,
    /// Memory for the next step's logits.
    logits: Vec<f32>,
    /// Hidden states of the last step, for a block that predicts further tokens or an assistant; `None` without either.
    hidden: Option<HiddenStates<B>>,
    assistant: Option<Assistant<B>>,
}

/// The hidden states of a step's rows, behind the last norm.
struct HiddenStates<B: Backend> {
    on_backend: B::Buffer,
    values: Vec<f32>,
}

impl<B: Backend> HiddenStates<B> {
    fn new() -> Self {
        Self { on_backend: B::Buffer::default(), values: Vec::new() }
    }

    fn compute(&mut self, backend: &B, residual: &B::Buffer, norm: &DecoderNorm<B>) -> Result<()> {
        norm.apply(backend, residual, &mut self.on_backend)?;
        backend.read(&mut self.on_backend, &mut self.values)
    }

    /// Moves the values of the rows that were kept to the rows' places in the batch; the others get zeros, which no assistant reads.
    fn spread(&mut self, batch: &Batch<'_>, width: usize) {
        let mut kept = batch.rows.iter().filter(|row| row.wants_logits).count();
        self.values.resize(batch.rows.len() * width, 0.0);
        for (index, row) in batch.rows.iter().enumerate().rev() {
            let place = index * width;
            match row.wants_logits {
                true => {
                    kept -= 1;
                    self.values.copy_within(kept * width..(kept + 1) * width, place);
                }
                false => self.values[place..place + width].fill(0.0),
            }
        }
    }
}

/// Index of a layer's store, and its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoreIndex {
    /// Index into [`KvLayout::stores`].
    index: usize,
    group: usize,
}

/// Data that all layers of a step share; kept to reuse the memory.
struct StepBuffers<B: Backend> {
    /// The layers in which rows of an image see each other in both directions.
    two_way: TwoWay,
    /// Token in place of placeholders, which may lack an embedding.
    placeholder: u32,
    /// See [`images::find_seen`].
    seen_besides: Vec<Range<usize>>,
    /// Spans by group.
    spans: Vec<Vec<RowSpan>>,
    /// Angles by rotary table.
    angles: Vec<B::Angles>,
    positions: Vec<usize>,
    /// Numbers of the rows' rotary positions; see [`Row::angles`].
    numbers: Vec<[u32; 3]>,
    tokens: Vec<u32>,
    /// Rows whose logits are wanted.
    wanted: Vec<usize>,
    /// Whole texts that are read without KV, in place of `spans`.
    texts: Option<TextPass>,
    adapted: AdaptedRows,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl<B: Backend> StepBuffers<B> {
    fn new(config: &DecoderConfig, num_groups: usize) -> Self {
        let num_ropes = config.ropes.len();
        Self {
            two_way: config.two_way,
            placeholder: config.per_layer_inputs.as_ref().map_or(0, |inputs| inputs.padding),
            seen_besides: Vec::new(),
            spans: vec![Vec::new(); num_groups],
            angles: std::iter::repeat_with(B::Angles::default).take(num_ropes).collect(),
            positions: Vec::new(),
            numbers: Vec::new(),
            tokens: Vec::new(),
            wanted: Vec::new(),
            texts: None,
            adapted: AdaptedRows::default(),
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Prepares the buffers for another batch.
    fn turn_to(
        &mut self,
        backend: &B,
        (ropes, adapters): (&[Rope], &[AdapterSpec]),
        batch: &Batch<'_>,
    ) -> Result<()> {
        self.adapted.find(batch, adapters)?;
        images::find_seen(batch.rows, self.two_way, &mut self.seen_besides);
        self.fill(backend, ropes, batch)
    }

    /// Drops the rows that are not in `batch`, those whose logits are not wanted.
    fn narrow_to(&mut self, backend: &B, ropes: &[Rope], batch: &Batch<'_>) -> Result<()> {
        let Self { seen_besides, wanted, adapted, .. } = self;
        if !adapted.is_empty() {
            *adapted = adapted.within(wanted);
        }
        if !seen_besides.is_empty() {
            *seen_besides = wanted.iter().map(|&row| seen_besides[row].clone()).collect();
        }
        self.fill(backend, ropes, batch)
    }

    fn fill(&mut self, backend: &B, ropes: &[Rope], batch: &Batch<'_>) -> Result<()> {
        let Self { spans, positions, numbers, tokens, wanted, seen_besides, .. } = self;
        positions.clear();
        positions.extend(batch.rows.iter().map(|row| row.position));
        numbers.clear();
        numbers.extend(batch.rows.iter().map(|row| row.angles));
        tokens.clear();
        tokens.extend(batch.rows.iter().map(|row| row.token));
        batch.images.iter().for_each(|image| tokens[image.rows.clone()].fill(self.placeholder));
        wanted.clear();
        wanted.extend((0..batch.rows.len()).filter(|&index| batch.rows[index].wants_logits));
        for (group, spans) in spans.iter_mut().enumerate() {
            find_spans(batch, group, spans)?;
            for span in spans {
                let seen = seen_besides.get(span.rows.clone()).unwrap_or_default();
                span.seen_besides.clear();
                span.seen_besides.extend_from_slice(seen);
            }
        }
        self.fill_angles(backend, ropes)
    }

    /// Computes the angles of the rows.
    fn fill_angles(&mut self, backend: &B, ropes: &[Rope]) -> Result<()> {
        let Self { angles, numbers, cos, sin, .. } = self;
        ropes.iter().zip(angles).try_for_each(|(rope, angles)| {
            rope.angles(numbers, cos, sin);
            backend.angles(cos, sin, numbers.len(), angles)
        })
    }
}

impl<B: Backend> Decoder<B> {
    /// Reads all weights.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming the tensor that is missing or has the wrong shape.
    pub fn load(backend: B, parts: DecoderParts<'_>) -> LoadResult<Self> {
        let DecoderParts { mut config, naming, source, context_length, kv_type, convert, adapters, progress } =
            parts;
        let file = WeightFile::new(source, &naming)?.adapted(adapters);
        if naming.gguf {
            apply_divisors(&mut config, &file)?;
        }
        file.check_layers(config.layers.len())?;
        let (layout, _, stores) = kv_layout(&config);
        let kv = backend.kv(&layout, kv_type)?;
        let loader = Loader::new(&backend, &file, &config, convert);
        let (embedding, head) = load_vocabulary(&loader, config.vocab_size)?;
        let hidden = config.hidden_size;
        let norm = |weights, eps| DecoderNorm::new(&backend, &config, weights, eps);
        let embedding_norm = config.embedding_norm.map(|eps| norm(vec![1.0; hidden], eps)).transpose()?;
        let last_norm = |weights| norm(weights, config.final_norm_eps);
        let last = LastNorm::load(&loader, config.hyper.as_ref(), last_norm)?;
        let per_layer = |inputs| PerLayer::load(&loader, &config, inputs);
        let per_layer = config.per_layer_inputs.as_ref().map(per_layer).transpose()?;
        let altup = config.altup.as_ref().map(|altup| AltUp::load(&loader, altup)).transpose()?;
        let layers = load_layers(&loader, &config, &stores, progress)?;
        adapters.iter().try_for_each(Adapter::check_taken)?;
        let mut spec = spec_of(&config, context_length, kv_type);
        spec.adapters = adapters.iter().map(|adapter| adapter.spec.clone()).collect();
        Ok(Self {
            ropes: config.ropes.iter().map(|rope| Rope::new(rope, context_length)).collect(),
            embedding: Arc::new(embedding),
            head: head.map(Arc::new),
            embedding_norm,
            last,
            per_layer,
            altup,
            layers,
            last_keeper: last_keeper(&config),
            kv,
            stream: Stream::new(config.altup.as_ref().map_or(0, |altup| altup.num_streams)),
            work: LayerBuffers::default(),
            step: StepBuffers::new(&config, spec.groups.len()),
            kept_rows: Vec::new(),
            head_out: B::Buffer::default(),
            logits: Vec::new(),
            hidden: None,
            assistant: None,
            backend,
            config,
            spec,
        })
    }

    /// Computes the residual stream of all rows of the step.
    fn apply_layers(&mut self, images: &[BatchImage<'_>]) -> Result<()> {
        self.begin(images)?;
        self.apply_some(0..self.layers.len(), false, images)
    }

    /// Computes the residual stream of the rows whose logits are wanted, and of the others what the KV and the states of all layers
    /// need. Of a prompt, all but the last row leave the last layer behind its keys and values, and never enter layers that read
    /// the KV of earlier ones. A row's values do not depend on which rows remain.
    fn apply_layers_narrowing(&mut self, batch: &Batch<'_>) -> Result<()> {
        let last = self.last_keeper;
        self.begin(batch.images)?;
        self.apply_some(0..last, false, batch.images)?;
        let is_stored = self.store(last)?;
        if !is_stored {
            self.apply_some(last..last + 1, false, batch.images)?;
        }
        if self.step.wanted.is_empty() {
            return Ok(());
        }
        let images = images::wanted(batch);
        self.narrow(batch, &images)?;
        if is_stored {
            self.apply_some(last..last + 1, true, &images)?;
        }
        self.apply_some(last + 1..self.layers.len(), false, &images)
    }

    /// Returns whether rows can be dropped on the way: some are not wanted, and no hidden states of theirs.
    fn can_narrow(&self, batch: &Batch<'_>) -> bool {
        let keeps_all_hidden = self.hidden.is_some() && self.assistant.is_none();
        self.step.wanted.len() < batch.rows.len() && !keeps_all_hidden
    }

    fn begin(&mut self, images: &[BatchImage<'_>]) -> Result<()> {
        let Self { backend, config, step, stream, work, per_layer, altup, .. } = self;
        backend.embed(&self.embedding, &step.tokens, config.embedding_scale, &mut stream.residual)?;
        if let Some(norm) = &self.embedding_norm {
            norm.apply(backend, &stream.residual, &mut stream.added)?;
            std::mem::swap(&mut stream.residual, &mut stream.added);
        }
        images::place(backend, images, &mut stream.residual)?;
        if let Some(per_layer) = per_layer {
            per_layer.turn_to(backend, &step.tokens, &stream.residual, work)?;
        }
        if let Some(altup) = altup {
            altup.begin(backend, step.tokens.len(), stream)?;
        }
        if let Some(hyper) = config.hyper {
            let Stream { residual, added, .. } = stream;
            backend.join_heads(&vec![&*residual; hyper.num_streams], 1, added)?;
            std::mem::swap(residual, added);
        }
        Ok(())
    }

    fn apply_some(&mut self, layers: Range<usize>, is_stored: bool, images: &[BatchImage<'_>]) -> Result<()> {
        let Self { backend, step, kv, stream, work, per_layer, .. } = self;
        let per_layer = per_layer.as_ref().map(PerLayer::inputs);
        let mut context = LayerContext { backend, step, kv, per_layer, work, is_stored };
        for layer in layers {
            self.layers[layer].apply(&mut context, stream)?;
            images::add_deep(backend, layer, images, stream)?;
        }
        Ok(())
    }

    fn store(&mut self, layer: usize) -> Result<bool> {
        let Self { backend, step, kv, stream, work, .. } = self;
        let mut context = LayerContext { backend, step, kv, per_layer: None, work, is_stored: false };
        self.layers[layer].store(&mut context, stream)
    }

    /// Drops the rows of the step whose logits are not wanted.
    fn narrow(&mut self, batch: &Batch<'_>, images: &[BatchImage<'_>]) -> Result<()> {
        let Self { backend, ropes, step, stream, work, per_layer, kept_rows, .. } = self;
        let Stream { residual, added, altup, .. } = stream;
        backend.select_rows(residual, &step.wanted, added)?;
        std::mem::swap(residual, added);
        altup.keep_rows(backend, &step.wanted)?;
        if let Some(per_layer) = per_layer {
            per_layer.keep_rows(backend, &step.wanted, &mut work.mixed)?;
        }
        kept_rows.clear();
        kept_rows.extend(batch.rows.iter().filter(|row| row.wants_logits));
        step.narrow_to(backend, ropes, &Batch { rows: kept_rows, images, ..*batch })
    }

    /// Computes the wanted logits.
    fn logits(&mut self) -> Result<Logits> {
        let vocab_size = self.config.vocab_size;
        let mut values = std::mem::take(&mut self.logits);
        if self.step.wanted.is_empty() {
            values.clear();
            return Ok(Logits { values, vocab_size });
        }
        let Self { backend, config, head_out, stream, work, .. } = self;
        match &self.altup {
            None => backend.select_rows(&stream.residual, &self.step.wanted, &mut stream.added)?,
            Some(altup) => altup.merge(backend, &self.step.wanted, stream, work)?,
        }
        let Stream { normed, added, hyper, .. } = stream;
        self.last.apply(backend, added, hyper, normed)?;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.matmul(normed, head, None, head_out)?;
        backend.read(head_out, &mut values)?;
        if config.logit_scale != 1.0 {
            values.iter_mut().for_each(|value| *value *= config.logit_scale);
        }
        if let Some(cap) = config.final_softcap {
            math::softcap(isa::isa(), &mut values, cap);
        }
        Ok(Logits { values, vocab_size })
    }
}

impl<B: Backend> Model for Decoder<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        images::check(batch, &self.config)?;
        self.step.turn_to(&self.backend, (&self.ropes, &self.spec.adapters), batch)?;
        let narrows = self.can_narrow(batch);
        match narrows {
            true => self.apply_layers_narrowing(batch)?,
            false => self.apply_layers(batch.images)?,
        }
        let Self { backend, config, stream, .. } = self;
        if let (Some(hidden), LastNorm::Norm(norm)) = (&mut self.hidden, &self.last) {
            if !narrows || !self.step.wanted.is_empty() {
                hidden.compute(backend, &stream.residual, norm)?;
            }
            if narrows {
                hidden.spread(batch, config.hidden_size);
            }
        }
        self.logits()
    }

    fn hidden_width(&self) -> Option<usize> {
        self.assistant.as_ref().map(|_| self.config.hidden_size)
    }

    fn predict(&mut self, batch: &Batch<'_>, hidden: &[f32]) -> Result<Logits> {
        self.assist(batch, hidden)
    }

    fn hidden(&self) -> &[f32] {
        self.hidden.as_ref().map_or(&[], |hidden| &hidden.values)
    }

    fn reuse(&mut self, logits: Logits) {
        self.logits = logits.values;
    }

    fn keep_drafted(&mut self, state: PageRef, count: usize) -> Result<()> {
        self.backend.keep_drafted(&mut self.kv, state.group, state.page, count)
    }

    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()> {
        self.backend.copy_page(&mut self.kv, from.group, from.page, to.page)
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.backend.free_page(&mut self.kv, page_ref.group, page_ref.page);
    }

    fn prepare_page(&mut self, most: usize) -> bool {
        self.backend.prepare_page(&mut self.kv, most)
    }

    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()> {
        self.backend.export_page(&self.kv, page_ref.group, page_ref.page, out)
    }

    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<()> {
        self.backend.import_page(&mut self.kv, page_ref.group, page_ref.page, bytes)
    }
}

fn spec_of(config: &DecoderConfig, context_length: usize, kv_type: KvType) -> ModelSpec {
    ModelSpec {
        architecture: config.architecture.to_owned(),
        vocab_size: config.vocab_size,
        context_length,
        groups: kv_groups(config, kv_type),
        can_rewind: true,
        adapters: Vec::new(),
    }
}

/// Returns the last layer that keeps rows or a state of its own.
fn last_keeper(config: &DecoderConfig) -> usize {
    let keeps = |layer: &LayerConfig| match &layer.mixer {
        MixerConfig::None => false,
        MixerConfig::Attention(attention) => !matches!(attention.kv, KvSource::Layer(_)),
        _ => true,
    };
    config.layers.iter().rposition(keeps).unwrap_or(config.layers.len() - 1)
}

/// Loads the embedding table, and the output matrix; `None` if the embedding table serves as output matrix too.
fn load_vocabulary<B: Backend>(
    loader: &Loader<'_, B>,
    vocab: usize,
) -> LoadResult<(B::Weight, Option<B::Weight>)> {
    let (backend, file, hidden) = (loader.backend, loader.file, loader.hidden);
    let embedding = loader.vocabulary(file.embedding(vocab, hidden)?)?;
    match file.head(vocab, hidden)? {
        Some(head) => Ok((backend.table(&embedding)?, Some(backend.weight(&loader.vocabulary(head)?)?))),
        None => Ok((backend.weight(&embedding)?, None)),
    }
}

/// Loads all layers, each with its stores, and reports every layer to `progress`.
fn load_layers<B: Backend>(
    loader: &Loader<'_, B>,
    config: &DecoderConfig,
    stores: &[Vec<StoreIndex>],
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<Vec<DecoderLayer<B>>> {
    let mut layers = Vec::with_capacity(config.layers.len());
    for (layer, stores) in stores.iter().enumerate() {
        let loader = Loader { layer, ..*loader };
        layers.push(DecoderLayer::load(&loader, config, &config.layers[layer], stores)?);
        progress(layer + 1, config.layers.len());
    }
    Ok(layers)
}

/// Collects consecutive rows of one sequence, with its pages in `group`, into `spans`, whose memory is reused.
fn find_spans(batch: &Batch<'_>, group: usize, spans: &mut Vec<RowSpan>) -> Result<()> {
    let mut count = 0;
    let mut last = None;
    for (index, row) in batch.rows.iter().enumerate() {
        let table = *batch
            .tables
            .get(row.sequence)
            .ok_or_else(|| Error::Backend(format!("row {index} names sequence {}", row.sequence)))?;
        if row.position.max(row.visible.saturating_sub(1)) >= table.len() {
            return Err(Error::Backend(format!("row {index} is not covered by its page table")));
        }
        if last == Some((row.sequence, row.position.wrapping_sub(1))) {
            spans[count - 1].rows.end += 1;
        } else {
            if count == spans.len() {
                spans.push(RowSpan {
                    rows: 0..0,
                    start: 0,
                    num_drafted: 0,
                    pages: Vec::new(),
                    seen_besides: Vec::new(),
                });
            }
            let span = &mut spans[count];
            (span.rows, span.start, span.num_drafted) = (index..index + 1, row.position, 0);
            span.pages.clear();
            span.pages.extend(table.page_ids(group));
            count += 1;
        }
        spans[count - 1].num_drafted += usize::from(row.is_drafted);
        last = Some((row.sequence, row.position));
    }
    spans.truncate(count);
    Ok(())
}

/// Returns the page layout, the kinds of its groups in order of first use, and each layer's stores in the order of its
/// mixer's parts. Layers whose rows are kept equally long share a group.
fn kv_layout(config: &DecoderConfig) -> (KvLayout, Vec<KvKind>, Vec<Vec<StoreIndex>>) {
    let mut kinds: Vec<KvKind> = Vec::new();
    let mut stores = Vec::new();
    let mut add = |kind: KvKind, shape: StoreShape| {
        let group = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        stores.push(Store { shape, group });
        StoreIndex { index: stores.len() - 1, group }
    };
    let mut of_layers: Vec<Vec<StoreIndex>> = Vec::with_capacity(config.layers.len());
    for layer in &config.layers {
        if let MixerConfig::Attention(AttentionConfig { kv: KvSource::Layer(owner), .. }) = &layer.mixer {
            of_layers.push(of_layers[*owner].clone());
        } else {
            let mut shapes = store_shapes(&layer.mixer, config.hidden_size);
            if let (Some(ngrams), Some(hyper)) = (&layer.ngrams, config.hyper) {
                let [tokens, reach] = [ngrams.num_before(), ngrams.conv_reach()];
                let lens = [tokens * tokens, reach * hyper.num_streams * config.hidden_size];
                shapes.extend(lens.map(|len| (KvKind::Recurrent, StoreShape::State(len))));
            }
            of_layers.push(shapes.into_iter().map(|(kind, shape)| add(kind, shape)).collect());
        }
    }
    (KvLayout { stores, num_groups: kinds.len() }, kinds, of_layers)
}

/// Returns the stores of a mixer that has its own, in the order of its parts.
fn store_shapes(mixer: &MixerConfig, hidden_size: usize) -> Vec<(KvKind, StoreShape)> {
    let state = |len| (KvKind::Recurrent, StoreShape::State(len));
    let rows = |attention: &AttentionConfig| {
        let AttentionConfig { num_kv_heads, head_dim, window, narrow_values, .. } = *attention;
        let values = narrow_values.map_or(KvValues::Own, KvValues::Narrow);
        let shape = StoreShape::Rows(KvShape { num_kv_heads, head_dim, values });
        (window.map_or(KvKind::Full, KvKind::SlidingWindow), shape)
    };
    let one_head =
        |head_dim, values| (KvKind::Full, StoreShape::Rows(KvShape { num_kv_heads: 1, head_dim, values }));
    let keys =
        |indexer: Option<&IndexerConfig>| indexer.map(|indexer| one_head(indexer.head_dim, KvValues::None));
    let of_ssm = |SsmConfig { shape, kernel, .. }: &SsmConfig| {
        [state((kernel - 1) * shape.conv_width()), state(shape.state_len())]
    };
    match mixer {
        MixerConfig::None => vec![],
        MixerConfig::Attention(attention) => {
            let blocks = attention.indexer.filter(|indexer| indexer.blocks.are_whole());
            let means = blocks.map(|indexer| state((indexer.blocks.size - 1) * indexer.head_dim));
            [rows(attention)].into_iter().chain(keys(attention.indexer.as_ref())).chain(means).collect()
        }
        MixerConfig::Latent(latent) => {
            let rows = one_head(latent.key_dim(), KvValues::InKeys(latent.kv_rank));
            [rows].into_iter().chain(keys(latent.indexer())).collect()
        }
        MixerConfig::ShortConv(conv) => vec![state((conv.kernel - 1) * hidden_size)],
        MixerConfig::DeltaNet(DeltaNetConfig { shape, kernel, .. }) => {
            vec![state((kernel - 1) * shape.conv_width()), state(shape.state_len())]
        }
        MixerConfig::Lightning(lightning) => vec![state(lightning.shape.state_len())],
        MixerConfig::Ssm(ssm) => of_ssm(ssm).into(),
        MixerConfig::AttentionAndSsm { attention, ssm, .. } => {
            [rows(attention)].into_iter().chain(of_ssm(ssm)).collect()
        }
    }
}

/// Returns the KV groups of this model.
pub fn kv_groups(config: &DecoderConfig, kv_type: KvType) -> Vec<KvGroup> {
    let (layout, kinds, _) = kv_layout(config);
    let group = |(group, kind)| KvGroup { kind, page_bytes: layout.page_bytes(group, kv_type) };
    kinds.into_iter().enumerate().map(group).collect()
}

/// Returns the bytes of keys and values that one token adds while every layer sees it.
pub fn kv_bytes_per_token(config: &DecoderConfig, kv_type: KvType) -> usize {
    let groups = kv_groups(config, kv_type).into_iter().filter(|group| group.kind != KvKind::Recurrent);
    groups.map(|group| group.page_bytes / PAGE_TOKENS).sum()
}

/// Applies frequency divisors, which GGUF keeps as tensors: one set for Llama 3, two for LongRoPE. They belong to the
/// first rotary table.
fn apply_divisors(config: &mut DecoderConfig, file: &WeightFile<'_>) -> LoadResult<()> {
    if let Some(rope) = config.ropes.first_mut() {
        let pairs = rope.dim / 2;
        match &mut rope.scaling {
            RopeScaling::None => {
                if let Some(divisors) = file.divisors("rope_freqs.weight", pairs)? {
                    rope.scaling = RopeScaling::Divisors(divisors);
                }
            }
            RopeScaling::LongRope { short, long, .. } if short.is_empty() => {
                let found = (
                    file.divisors("rope_factors_short.weight", pairs)?,
                    file.divisors("rope_factors_long.weight", pairs)?,
                );
                match found {
                    (Some(from_file_short), Some(from_file_long)) => {
                        (*short, *long) = (from_file_short, from_file_long);
                    }
                    (None, None) => rope.scaling = RopeScaling::None,
                    _ => {
                        let tensor = "rope_factors_short.weight".to_owned();
                        let message = "needs rope_factors_long.weight beside it".to_owned();
                        return Err(LoadError::Tensor { tensor, message });
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}
