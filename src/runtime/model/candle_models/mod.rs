//! Families that candle-transformers computes, behind the same [`Model`] as ours: what it takes to run them, and at what price.
//!
//! To add one: a row in [`families::FAMILIES`] and the function that it names, which reads the config and makes the model.
//!
//! What candle-transformers keeps of a sequence lies inside its models and cannot be cut, copied out or shared. So each
//! sequence has a model of its own, over the same weights; it only grows; and its pages are bookkeeping: the first names the
//! sequence, and together they take what its state takes.
//! Invariant: the bits of a row are a function of the tokens up to it, whatever else is in the step and however the prompt was
//! cut; see [`sequence`]. Everything is f32.

mod config;
mod families;
mod sequence;
mod weights;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde_json::{Map, Value};

use super::arch::{ConfigReader, ModelFormat};
use super::{Batch, Logits, Model, ModelSpec, Row};
use crate::runtime::backend::cpu::{BATCH_ROWS, CpuOptions};
use crate::runtime::error::{Error, LoadError, Result};
use crate::runtime::kv::{KvGroup, KvKind, PAGE_TOKENS, PageId, PageRef, PageTable};
use crate::runtime::tensor::TensorSource;
use sequence::{CHUNK, CandleSequence, LONGEST_BEGINNING, ModelParts};
use weights::{CandleWeights, WeightAdaptation};

pub use families::FAMILIES;
pub use sequence::Prefill;

/// One family and the names files know it by.
pub struct CandleFamily {
    /// What llmctl calls it.
    pub name: &'static str,
    /// `model_type` values of config.json.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF, from which these do not run: candle-transformers reads Hugging Face's names.
    pub gguf_names: &'static [&'static str],
    plan: fn(&ConfigReader) -> Result<CandlePlan, LoadError>,
}

/// All that is known of a model before its weights are read.
pub struct CandlePlan {
    pub architecture: &'static str,
    pub sizes: Sizes,
    /// The most positions that it computes rightly.
    pub context_length: usize,
    pub prefill: Prefill,
    /// Bytes that a recurrent model keeps of a sequence; nothing where all tokens are kept.
    pub state_bytes: Option<usize>,
    /// What the user should know of this family besides what holds for all of them.
    pub notices: Vec<String>,
    /// As candle-transformers reads it.
    config: Map<String, Value>,
    weights: WeightAdaptation,
    open: families::OpenModel,
}

/// Widths of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    /// Of attention; 0 in models that have none.
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// The widest row within a layer.
    pub widest: usize,
}

/// The plan for the family that `reader` name, if candle-transformers has it and llmctl has not.
///
/// # Errors
/// [`LoadError::Unsupported`] for a GGUF file of such a family, and for what candle-transformers does not compute;
/// [`LoadError::Malformed`] naming a key that is missing or has a value out of range.
pub fn find(reader: &ConfigReader) -> Result<Option<CandlePlan>, LoadError> {
    let name = reader.architecture()?;
    let Some(family) = FAMILIES.iter().find(|family| family.names(reader.format()).contains(&&*name)) else {
        return Ok(None);
    };
    if reader.is_gguf() {
        return Err(reader.unsupported(format!(
            "{name} models run through candle-transformers, from Hugging Face folders with safetensors only"
        )));
    }
    (family.plan)(reader).map(Some)
}

impl CandleFamily {
    /// The names that files of this format know it by.
    pub fn names(&self, format: ModelFormat) -> &'static [&'static str] {
        match format {
            ModelFormat::HuggingFace => self.model_types,
            ModelFormat::Gguf => self.gguf_names,
        }
    }
}

impl CandlePlan {
    /// Bytes of keys and values of a token, all copies included; 0 in recurrent models.
    pub fn kv_bytes_per_token(&self) -> usize {
        // Beside what grows with every token lies the state of the last whole chunk.
        let copies = if self.prefill == Prefill::Chunks { 2 } else { 1 };
        match self.state_bytes {
            Some(_) => 0,
            None => {
                let Sizes { num_layers, num_kv_heads, head_dim, .. } = self.sizes;
                copies * num_layers * 2 * num_kv_heads * head_dim * size_of::<f32>()
            }
        }
    }

    /// What a sequence keeps.
    pub fn group(&self) -> KvGroup {
        match self.state_bytes {
            Some(page_bytes) => KvGroup { kind: KvKind::Recurrent, page_bytes },
            None => KvGroup { kind: KvKind::Full, page_bytes: self.kv_bytes_per_token() * PAGE_TOKENS },
        }
    }

    /// Bytes that attention holds of each token it sees while it computes a layer: keys and values widened to all heads, old
    /// and new, and scores before and after their softmax.
    pub fn attention_bytes_per_token(&self) -> usize {
        let Sizes { num_heads, head_dim, .. } = self.sizes;
        let rows = if self.prefill == Prefill::Chunks { CHUNK } else { 1 };
        size_of::<f32>() * num_heads * (4 * head_dim + 3 * rows)
    }

    /// Bytes of activations and logits, generously.
    pub fn activation_bytes(&self) -> usize {
        let Sizes { vocab_size, hidden_size, num_heads, widest, .. } = self.sizes;
        let rows = match self.prefill {
            Prefill::Chunks => CHUNK,
            Prefill::Beginning => LONGEST_BEGINNING,
            Prefill::Single => 1,
        };
        let scores = if self.prefill == Prefill::Beginning { 3 * num_heads * rows * rows } else { 0 };
        size_of::<f32>() * (rows * (6 * hidden_size + 3 * widest) + scores + 8 * vocab_size)
    }

    /// Reads the weights and makes the model, for sequences of up to `context_length` tokens. On the CPU it computes with as
    /// many threads as `cpu` says; its instruction set is candle's choice. `progress` is told layers done, of how many.
    ///
    /// # Errors
    /// [`LoadError`] naming the tensor that is missing, of another shape, or of no use to candle-transformers.
    pub fn load(
        mut self,
        source: &dyn TensorSource,
        context_length: usize,
        device: Device,
        cpu: Option<CpuOptions>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<CandleModel, LoadError> {
        let num_layers = self.sizes.num_layers;
        let mut report = |done: usize, total: usize| progress(done * num_layers / total.max(1), num_layers);
        // As long as this are the rotary tables.
        self.config.insert("max_position_embeddings".to_owned(), context_length.into());
        let weights = Arc::new(CandleWeights::load(source, &self.weights, &device, &mut report)?);
        let begin = (self.open)(self.config.clone(), weights.builder(&device));
        let begin = begin.map_err(|error| weights.fault(error))?;
        weights.check_all_read(&self.weights)?;
        let spec = ModelSpec {
            architecture: self.architecture.to_owned(),
            vocab_size: self.sizes.vocab_size,
            context_length,
            groups: vec![self.group()],
            can_rewind: false,
        };
        let threads = cpu.map(Threads::new).transpose()?;
        let source = ModelParts { begin, prefill: self.prefill, device };
        Ok(CandleModel { spec, source, threads, sequences: HashMap::new() })
    }
}

/// A model of candle-transformers, and the sequences in it.
pub struct CandleModel {
    spec: ModelSpec,
    source: ModelParts,
    threads: Option<Threads>,
    /// By the first page of each. One that nobody holds any more stays until its page is another's, as a page's memory does.
    sequences: HashMap<PageId, CandleSequence>,
}

/// Threads of steps of few rows and of many. candle computes on those of the pool that it is called in.
struct Threads {
    few: Arc<ThreadPool>,
    many: Arc<ThreadPool>,
}

impl Threads {
    fn new(options: CpuOptions) -> Result<Self, LoadError> {
        let pool = |count: usize| {
            let pool = ThreadPoolBuilder::new().num_threads(count.max(1)).build();
            pool.map(Arc::new).map_err(|error| LoadError::Device(error.to_string()))
        };
        let few = pool(options.threads)?;
        let is_same = options.threads == options.threads_batch;
        let many = if is_same { few.clone() } else { pool(options.threads_batch)? };
        Ok(Self { few, many })
    }

    fn of_step(&self, num_rows: usize) -> Arc<ThreadPool> {
        if num_rows < BATCH_ROWS { self.few.clone() } else { self.many.clone() }
    }
}

impl CandleModel {
    /// Row by row: sequences know nothing of each other. `pages` name the sequences.
    fn compute(&mut self, rows: &[Row], pages: &[PageId]) -> Result<Logits> {
        let vocab_size = self.spec.vocab_size;
        let mut values = Vec::new();
        for row in rows {
            let Some(logits) = self.feed(pages[row.sequence], row)? else { continue };
            if logits.len() != vocab_size {
                let message = format!("{} logits for a vocabulary of {vocab_size}", logits.len());
                return Err(Error::Backend(message));
            }
            values.extend(logits);
        }
        Ok(Logits { values, vocab_size })
    }

    /// The page that names the sequence. Those whose pages have become part of it lose their memory.
    fn claim(&mut self, table: &PageTable) -> Result<PageId> {
        let mut pages = table.page_ids(0);
        let first = pages.next().ok_or_else(|| backend("a sequence has no page"))?;
        pages.for_each(|page| drop(self.sequences.remove(&page)));
        Ok(first)
    }

    fn feed(&mut self, page: PageId, row: &Row) -> Result<Option<Vec<f32>>> {
        if row.position == 0 {
            self.sequences.insert(page, CandleSequence::default());
        }
        let sequence = self.sequences.get_mut(&page).filter(|sequence| sequence.len() == row.position);
        let sequence = sequence.ok_or_else(|| backend("a state belongs to another position"))?;
        sequence.feed(&self.source, row.token, row.wants_logits).map_err(|error| backend(&error.to_string()))
    }
}

fn backend(message: &str) -> Error {
    Error::Backend(message.to_owned())
}

impl Model for CandleModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits> {
        let pages = batch.tables.iter().map(|table| self.claim(table)).collect::<Result<Vec<_>>>()?;
        match self.threads.as_ref().map(|threads| threads.of_step(batch.rows.len())) {
            Some(pool) => pool.install(|| self.compute(batch.rows, &pages)),
            None => self.compute(batch.rows, &pages),
        }
    }

    /// Never asked for: where nothing can be rewound, nothing is shared.
    fn copy_page(&mut self, _: PageRef, _: PageRef) -> Result<()> {
        Err(Error::NotSupported("copying a sequence"))
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.sequences.remove(&page_ref.page);
    }

    fn export_page(&self, _: PageRef, _: &mut Vec<u8>) -> Result<()> {
        Err(Error::NotSupported("keeping KV on disk"))
    }

    fn import_page(&mut self, _: PageRef, _: &[u8]) -> Result<()> {
        Err(Error::NotSupported("keeping KV on disk"))
    }
}
