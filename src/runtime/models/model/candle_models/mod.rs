//! Families that candle-transformers computes, behind the same [`Model`] trait as ours: requirements and
//! limits.
//!
//! To add a family: a row in [`families::FAMILIES`] and the function that it names, which reads the config
//! and makes the model.
//!
//! candle-transformers keeps the state of a sequence inside its models, where it cannot be cut, copied out or
//! shared. So each sequence has a model of its own over the same weights, and only grows. Its pages are
//! bookkeeping: the first identifies the sequence, and together they account for its bytes. Invariant: the
//! bits of a row are a function of the tokens up to it, independent of other rows in the step and of the
//! chunks of the prompt; see [`sequence`]. Everything is f32.

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
use crate::backend::cpu::{BATCH_ROWS, CpuOptions};
use crate::kv::{KvGroup, KvKind, PAGE_TOKENS, PageId, PageRef, PageTable};
use crate::tensor::{SharedBytes, TensorSource};
use llmctl_base::error::{Error, LoadError, LoadResult, Result};
use llmctl_base::notice::Notice;
use sequence::{CHUNK, CandleSequence, LONGEST_BEGINNING, ModelParts};
use weights::{CandleWeights, WeightAdaptation};

pub use families::FAMILIES;
pub use sequence::Prefill;

/// One family and its names in files.
pub struct CandleFamily {
    /// Name in llmctl.
    pub name: &'static str,
    /// `model_type` values of config.json.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF, which is refused: candle-transformers reads Hugging Face's names.
    pub gguf_names: &'static [&'static str],
    plan: fn(&ConfigReader) -> LoadResult<CandlePlan>,
}

/// All facts about a model before its weights are read.
pub struct CandlePlan {
    pub architecture: &'static str,
    pub sizes: Sizes,
    /// The largest number of positions with correct results.
    pub context_length: usize,
    pub prefill: Prefill,
    /// Bytes of a recurrent model's state per sequence; `None` if all tokens are kept.
    pub state_bytes: Option<usize>,
    /// Notices about this family, besides the general one.
    pub notices: Vec<Notice>,
    /// The config for candle-transformers.
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
    /// Attention heads; 0 in models without attention.
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Width of the widest row within a layer.
    pub widest: usize,
}

/// Makes the plan for the model's family if candle-transformers supports it and llmctl has no family of its own.
///
/// # Errors
/// [`LoadError::Unsupported`] for a GGUF file of such a family, and for settings that candle-transformers does not
/// support; [`LoadError::Malformed`] naming a key that is missing or has a value out of range.
pub fn find(reader: &ConfigReader) -> LoadResult<Option<CandlePlan>> {
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
    /// Returns the family's names in files of this format.
    pub fn names(&self, format: ModelFormat) -> &'static [&'static str] {
        match format {
            ModelFormat::HuggingFace => self.model_types,
            ModelFormat::Gguf => self.gguf_names,
        }
    }
}

impl CandlePlan {
    /// Returns the bytes of keys and values per token, including all copies; 0 in recurrent models.
    pub fn kv_bytes_per_token(&self) -> usize {
        // Besides the growing state, the state after the last whole chunk is kept.
        let copies = if self.prefill == Prefill::Chunks { 2 } else { 1 };
        match self.state_bytes {
            Some(_) => 0,
            None => {
                let Sizes { num_layers, num_kv_heads, head_dim, .. } = self.sizes;
                copies * num_layers * 2 * num_kv_heads * head_dim * size_of::<f32>()
            }
        }
    }

    /// Returns the KV group of a sequence.
    pub fn group(&self) -> KvGroup {
        match self.state_bytes {
            Some(page_bytes) => KvGroup { kind: KvKind::Recurrent, page_bytes },
            None => KvGroup { kind: KvKind::Full, page_bytes: self.kv_bytes_per_token() * PAGE_TOKENS },
        }
    }

    /// Returns the bytes that attention holds per visible token while it computes a layer: keys and values widened to
    /// all heads, old and new, and scores before and after their softmax.
    pub fn attention_bytes_per_token(&self) -> usize {
        let Sizes { num_heads, head_dim, .. } = self.sizes;
        let rows = if self.prefill == Prefill::Chunks { CHUNK } else { 1 };
        size_of::<f32>() * num_heads * (4 * head_dim + 3 * rows)
    }

    /// Estimates the bytes of activations and logits, rounded up.
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

    /// Reads the weights and makes the model, for sequences of up to `context_length` tokens. On the CPU it uses the
    /// number of threads in `cpu`; candle chooses the instruction set. `progress` is called with the number of loaded
    /// layers and their total.
    ///
    /// # Errors
    /// [`LoadError`] naming the tensor that is missing, has another shape, or is not used by candle-transformers.
    pub fn load(
        mut self,
        source: &dyn TensorSource,
        context_length: usize,
        device: Device,
        cpu: Option<CpuOptions>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> LoadResult<CandleModel> {
        let num_layers = self.sizes.num_layers;
        let mut report = |done: usize, total: usize| progress(done * num_layers / total.max(1), num_layers);
        // This is the length of the rotary tables.
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
            adapters: Vec::new(),
        };
        let threads = cpu.map(Threads::new).transpose()?;
        let source = ModelParts { begin, prefill: self.prefill, device };
        Ok(CandleModel { spec, source, threads, sequences: HashMap::new() })
    }
}

/// A model of candle-transformers with its sequences.
pub struct CandleModel {
    spec: ModelSpec,
    source: ModelParts,
    threads: Option<Threads>,
    /// Sequences by their first page. A sequence without a holder stays until its page is reused, like a page's
    /// memory.
    sequences: HashMap<PageId, CandleSequence>,
}

/// Thread pools for steps of few rows and of many. candle computes on the pool that it is called in.
struct Threads {
    few: Arc<ThreadPool>,
    many: Arc<ThreadPool>,
}

impl Threads {
    fn new(options: CpuOptions) -> LoadResult<Self> {
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
    /// Computes the rows one by one, since sequences are independent. `pages` identify the sequences.
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

    /// Returns the page that identifies the sequence, and removes sequences whose first pages are now other pages of
    /// this one.
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
        let sequence = sequence.ok_or_else(|| backend("the state is for another position"))?;
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
        if !batch.images.is_empty() {
            return Err(Error::Backend("models of candle-transformers read no images".to_owned()));
        }
        let pages = batch.tables.iter().map(|table| self.claim(table)).collect::<Result<Vec<_>>>()?;
        match self.threads.as_ref().map(|threads| threads.of_step(batch.rows.len())) {
            Some(pool) => pool.install(|| self.compute(batch.rows, &pages)),
            None => self.compute(batch.rows, &pages),
        }
    }

    /// Unreachable: a model that cannot rewind shares no pages.
    fn copy_page(&mut self, _: PageRef, _: PageRef) -> Result<()> {
        Err(Error::NotSupported("copying a sequence"))
    }

    fn free_page(&mut self, page_ref: PageRef) {
        self.sequences.remove(&page_ref.page);
    }

    fn export_page(&self, _: PageRef, _: &mut Vec<u8>) -> Result<()> {
        Err(Error::NotSupported("keeping KV on disk"))
    }

    fn import_page(&mut self, _: PageRef, _: SharedBytes) -> Result<()> {
        Err(Error::NotSupported("keeping KV on disk"))
    }
}
