//! Loads a model: from a reference on the command line to a model in memory.
//!
//! `hub` resolves references; `gguf` and `safetensors` implement
//! [`TensorSource`](super::tensor::TensorSource); `tokenizer` builds the tokenizer from either; `files` opens
//! both alike; [`load`] combines them. Files are untrusted: sizes and offsets are checked before use, and no
//! allocation exceeds what the file's size can justify.

pub mod adapter;
mod adoption;
mod blocks;
#[cfg(feature = "candle-families")]
mod candle_models;
pub mod divergence;
pub mod draft;
pub mod embedder;
pub mod export;
pub mod files;
pub mod fingerprint;
pub mod gguf;
pub mod gguf_config;
mod gguf_types;
pub mod hf;
pub mod inspect;
pub mod metadata;
pub mod packed;
mod prediction;
pub mod quantize;
pub mod safetensors;
mod sentencepiece;
pub mod text_task;
pub mod texts;
pub mod tokenizer;
pub mod tokenizer_files;
pub mod vision;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use adapter::AdapterFile;
use adapter::read_adapters;
pub use adoption::adopt_pages;

pub use super::backend::KvType;
pub use super::backend::candle::{DeviceKind, device_memory, open_device};
pub use super::backend::cpu::CpuOptions;
pub use super::model::text_head::Pooling;
pub use super::panels::{KeptPanels, LEAST_BYTES, PanelPlace, kept_panels};
use draft::DraftFiles;
pub use draft::LoadedDraft;
pub use embedder::{LoadedEmbedder, load_embedder};
pub use files::ModelFiles;
pub use fingerprint::{Fingerprint, content_hashes, fingerprint, with_template};
pub use hf::ChatTemplates;
pub use inspect::{DecoderFacts, ModelFacts, model_facts};
pub use llmctl_kernel::gemm::kernels_name;
pub use llmctl_kernel::{Dtype, Isa};
use prediction::OwnBlock;
pub use prediction::PredictionUse;
pub use text_task::{AskedTask, Prompts, TextTask, TextTaskFacts};
pub use texts::{TextFiles, TextsAlone};
use vision::VisionFiles;
pub use vision::{Sight, VisionFacts};

use super::backend::candle::cuda::{KernelFault, WIDENED_BYTES, faults};
use super::backend::candle::{Candle, GROUP_VALUES, is_widened};
use super::backend::cpu::{Cpu, CpuThreads, HELD_SCORES};
use super::backend::{Backend, PAGE_TOKENS};
use super::hints::Hints;
use super::kv::KvKind;
use super::memory::{Demand, LimitKind, MemoryLimit, fit, memory_limits};
use super::model::arch::Description;
use super::model::config::{DecoderConfig, MixerConfig};
use super::model::decoder::{
    AssistantParts, Decoder, DecoderParts, Matrix, PredictionParts, is_table, kv_groups,
};
use super::model::recognise::{Recognised, recognise};
use super::model::weights::{TensorFacts, WeightFile};
use super::model::{Model, STEP_TOKENS, TEXT_STEP_TOKENS};
use super::panels::PanelStore;
use super::tensor::HostTensor;
use super::text::Tokenizer;
use super::vision::Tower;
use llmctl_base::GivenSampling;
use llmctl_base::error::{Error, LoadError, LoadResult};
use llmctl_base::machine::default_threads;
use llmctl_base::notice::Notice;
use llmctl_hub::Resolved;
use llmctl_kernel::attention::{RUN_TOKENS, partial_len};
use llmctl_kernel::gemm::{PANEL_LAYOUT, packed_bytes};

/// A model ready for the engine, with the settings from its files.
pub struct LoadedModel {
    /// Name of the model for the user, e.g. the file stem or `org/repo`.
    pub name: String,
    pub model: Box<dyn Model>,
    pub texts: ModelTexts,
    pub fingerprint: Fingerprint,
    /// Notices for the user that are not errors, one sentence each.
    pub notices: Vec<Notice>,
    /// The drafter: the draft model or assistant that the caller named, or the block of the model's own file.
    pub draft: Option<LoadedDraft>,
    /// The vision tower, if the files have one that is used.
    pub tower: Option<Box<dyn Tower>>,
    /// As `notices`, for users who ask for details.
    pub details: Vec<Notice>,
}

/// The text side of a model, without its weights: all that converts a conversation to token ids and back.
#[derive(Debug, Clone)]
pub struct ModelTexts {
    /// Equal only for files with the same contents; see [`fingerprint::identity`].
    pub identity: String,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_templates: ChatTemplates,
    /// Sampling that generation_config.json or GGUF's `general.sampling.*` recommend.
    pub defaults: GivenSampling,
    /// Name of the file that the defaults were read from.
    pub defaults_source: &'static str,
    /// The end-of-generation ids that `defaults_source` and config.json list.
    pub listed_ends: Vec<u32>,
    /// Every token id that ends a turn: the files' lists plus the turn terminators the tokenizer registers as special.
    pub end_of_generation: Vec<u32>,
    /// Hints for prompts in the model's own template.
    pub hints: Option<Hints>,
}

impl ModelTexts {
    /// Replaces the token at the start of prompts; `None` removes it.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for an id without a token.
    ///
    /// # Panics
    /// If the tokenizer is shared already.
    pub fn set_bos(&mut self, bos: Option<u32>) -> Result<(), Error> {
        self.check_tokens("bos-id", bos.as_slice())?;
        Arc::get_mut(&mut self.tokenizer).expect("a tokenizer that is not shared yet").set_bos(bos);
        Ok(())
    }

    /// Replaces the ids that end a turn.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] for an id without a token.
    pub fn set_ends(&mut self, ids: &[u32]) -> Result<(), Error> {
        self.check_tokens("eos-id", ids)?;
        self.listed_ends.clear();
        self.end_of_generation = ids.to_vec();
        self.end_of_generation.sort_unstable();
        self.end_of_generation.dedup();
        Ok(())
    }

    fn check_tokens(&self, name: &'static str, ids: &[u32]) -> Result<(), Error> {
        let missing = ids.iter().find(|&&id| self.tokenizer.id_to_token(id).is_none());
        missing.map_or(Ok(()), |id| {
            let message = format!("the model has no token {id}");
            Err(Error::InvalidParameter { name, message })
        })
    }
}

/// The device that a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU, with our kernels.
    Cpu(CpuOptions),
    /// candle's backend, on a GPU (or, for comparison, on the CPU).
    Candle(DeviceKind),
}

impl Device {
    /// Starts threads that several models share; `None` for a GPU.
    fn workers(self) -> Option<Result<CpuThreads, Error>> {
        match self {
            Device::Cpu(options) => Some(CpuThreads::new(&options)),
            Device::Candle(_) => None,
        }
    }

    /// Returns the limits of the memory for weights and KV: the GPU's own, else this process's. A GPU that does not open has none.
    pub fn memory_limits(self) -> Vec<MemoryLimit> {
        let Device::Candle(kind @ (DeviceKind::Cuda(_) | DeviceKind::Metal(_))) = self else {
            return memory_limits(Path::new("/"));
        };
        let memory = open_device(kind).and_then(|device| device_memory(&device)).ok().flatten();
        let (kind, source) = (LimitKind::Device, format!("{kind:?}").into());
        memory.map(|[total, available]| MemoryLimit { kind, source, total, available }).into_iter().collect()
    }

    /// Returns the tokens of a step that takes in a prompt. A GPU's matrix units want more rows than the CPU's kernels, which are
    /// done with reading weights and unpacking them at 256.
    pub fn step_tokens(self) -> usize {
        match self {
            Device::Cpu(_) => 2 * STEP_TOKENS,
            Device::Candle(DeviceKind::Cpu) => STEP_TOKENS,
            Device::Candle(_) => TEXT_STEP_TOKENS,
        }
    }
}

/// The CPU, with as many threads as this machine has fast cores.
impl Default for Device {
    fn default() -> Self {
        Device::Cpu(CpuOptions::new(default_threads()))
    }
}

/// Options for loading a model.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    pub device: Device,
    /// Converts float matrices to this type.
    pub dtype: Option<Dtype>,
    /// Quantises matrices to this type.
    pub quantize: Option<Dtype>,
    /// Tokens per sequence; `None` is the model's own context, or as much of it as fits.
    pub context: Option<usize>,
    pub kv_type: KvType,
    /// Bytes for KV; `None` is as much as the context needs.
    pub kv_memory: Option<u64>,
    /// Bytes for weights and KV together; `None` if unknown.
    pub available_memory: Option<u64>,
    /// Place of packed weights; `None` packs at every load.
    pub packed: Option<PanelPlace>,
    pub prediction: PredictionUse,
    pub images: ImageUse,
    pub adapters: Vec<AdapterFile>,
}

/// Whether a model reads images.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageUse {
    /// Leaves the vision tower out.
    pub is_off: bool,
    /// Least and most tokens of an image, in place of the model's own.
    pub tokens: [Option<u32>; 2],
}

/// Reads everything except the weights.
///
/// # Errors
/// [`LoadError`] naming the file and the key at fault.
pub fn load_texts(files: &ModelFiles) -> LoadResult<ModelTexts> {
    load_texts_with(files, Arc::new(files.tokenizer()?))
}

/// Reads everything except the weights and the tokenizer, which is the files'.
///
/// # Errors
/// Those of [`load_texts`].
pub fn load_texts_with(files: &ModelFiles, tokenizer: Arc<Tokenizer>) -> LoadResult<ModelTexts> {
    let generation = files.generation()?;
    let listed_ends = generation.eos_token_ids.clone();
    let end_of_generation = texts::end_of_generation(generation.eos_token_ids, &tokenizer);
    Ok(ModelTexts {
        identity: fingerprint::identity(files)?,
        tokenizer,
        chat_templates: files.chat_templates()?,
        listed_ends,
        defaults: generation.defaults,
        defaults_source: files.settings_source(),
        end_of_generation,
        hints: files.hints(),
    })
}

/// Loads a model. `progress` is called with the number of loaded layers and their total.
///
/// # Errors
/// [`LoadError::TooBig`] before anything is read if weights and KV do not fit; otherwise [`LoadError`] naming the
/// file, and the tensor or key at fault.
pub fn load(
    resolved: &Resolved,
    options: &LoadOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<LoadedModel> {
    load_with_draft(resolved, None, options, progress)
}

/// Loads a model, and another one that drafts for it. The context is one that both models' memory fits.
///
/// # Errors
/// Those of [`load`], of either model; [`LoadError::DraftModel`] if the other cannot draft for it.
pub fn load_with_draft(
    resolved: &Resolved,
    draft: Option<&Resolved>,
    options: &LoadOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> LoadResult<LoadedModel> {
    let files = ModelFiles::of(resolved)?;
    let recognised = recognise(files.config_reader())?;
    let of_model = (resolved.name.as_str(), &recognised);
    let must_assist = options.prediction == PredictionUse::Required;
    let draft = draft.map(|draft| DraftFiles::open(draft, of_model, must_assist)).transpose()?;
    let mut notices = resolved.notices.clone();
    let options = &in_force(&files, options, &mut notices);
    let place = notices.len();
    notices.extend(files.notices()?);
    #[cfg(feature = "candle-families")]
    if let Recognised::CandleModel(plan) = &recognised {
        candle_models::check(&files, plan, options)?;
        notices.extend(candle_models::notices(plan));
    }
    let rows = inspect::decoder_facts(&recognised).vocab_size;
    let details: Vec<Notice> = prediction::unused(&files, &recognised)?.into_iter().collect();
    let alone = Planned::alone(&files, &recognised, options);
    let block = if draft.is_some() { None } else { prediction::block(alone, &resolved.name)? };
    let vision = alone.vision(&mut notices)?;
    let planned = Planned { draft: draft.as_ref(), block: block.as_ref(), vision: vision.as_ref(), ..alone };
    let context_length = planned.context(&mut notices)?;
    let shares = draft.is_some() || block.is_some() || vision.is_some();
    let workers = shares.then(|| options.device.workers()).flatten().transpose().map_err(backend)?;
    let with = DecoderWith {
        options,
        workers: workers.as_ref(),
        block: block.as_ref(),
        assistant: draft.as_ref().filter(|draft| draft.is_assistant()),
        is_unwanted: &AtomicBool::new(false),
    };
    let load_weights = || match recognised {
        Recognised::Native(mut description) => {
            let fingerprint = fingerprint(&files, &description.config, context_length, options)?;
            vision.iter().for_each(|vision| description.config.two_way = vision.rows.two_way);
            Ok((fingerprint, decoder(&files, description, with, context_length, progress, &mut notices)?))
        }
        #[cfg(feature = "candle-families")]
        Recognised::CandleModel(plan) => Ok((
            fingerprint::candle_fingerprint(&files, plan.architecture, options)?,
            (candle_models::load(&files, plan, options, context_length, progress)?, None),
        )),
    };
    let (texts, weights) = with_texts(&files, draft.as_ref(), with.is_unwanted, load_weights);
    let (mut texts, (fingerprint, (model, own))) = (texts?, weights.map_err(|error| files.placed(error))?);
    notices.splice(place..place, texts.chat_templates.notice());
    fit_vocabulary(&mut texts, rows, &mut notices);
    let load =
        |vision: VisionFiles| vision.load(&files, options, workers.as_ref(), &texts.tokenizer, &mut notices);
    let tower = vision.map(load).transpose()?.flatten();
    let own = own.zip(block).map(|(model, block)| block.loaded(model));
    let load = |draft: DraftFiles| draft.load(options, workers.as_ref(), context_length, &mut notices);
    let (name, draft) = (resolved.name.clone(), draft.map(load).transpose()?.or(own));
    Ok(LoadedModel { name, model, texts, fingerprint, notices, draft, tower, details })
}

/// Reads the texts while `load_weights` loads the weights, and says in `is_unwanted` if that fails: with packed weights on disk both
/// take about as long. The draft's vocabulary is compared with the model's.
fn with_texts<T>(
    files: &ModelFiles,
    draft: Option<&DraftFiles>,
    is_unwanted: &AtomicBool,
    load_weights: impl FnOnce() -> LoadResult<T>,
) -> (LoadResult<ModelTexts>, LoadResult<T>) {
    let read = || {
        let texts = load_texts(files)?;
        draft.map_or(Ok(()), |draft| draft.check_vocabulary(&texts.tokenizer))?;
        Ok(texts)
    };
    std::thread::scope(|scope| {
        let texts = scope.spawn(|| read().inspect_err(|_| is_unwanted.store(true, Ordering::Relaxed)));
        let weights = load_weights();
        (texts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), weights)
    })
}

/// Adapts the vocabulary to the embedding's rows. Published models have tokens without a row (Gemma 3's image token,
/// padding added later): a prompt with such a token is refused when it is submitted, and no answer can end with one.
fn fit_vocabulary(texts: &mut ModelTexts, rows: usize, notices: &mut Vec<Notice>) {
    let tokens = texts.tokenizer.vocab_size();
    if tokens > rows {
        notices.push(Notice::TokensWithoutRows { num_tokens: tokens, num_rows: rows });
    }
    let is_row = |id: &u32| (*id as usize) < rows;
    if let Some(id) = texts.end_of_generation.iter().find(|id| !is_row(id)) {
        notices.push(Notice::EndWithoutRow(*id));
        texts.end_of_generation.retain(is_row);
    }
}

/// Computes the context that [`load`] would give the model, from the headers alone.
///
/// # Errors
/// Those errors of [`load`] that concern settings and memory.
pub fn context_length(
    files: &ModelFiles,
    options: &LoadOptions,
    notices: &mut Vec<Notice>,
) -> LoadResult<usize> {
    plan(files, options, notices).map(|(context, _)| context)
}

/// Memory that a model needs with the context that [`load`] would give it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    pub context: usize,
    /// Weights, and everything else that does not grow with the context.
    pub base: u64,
    /// KV of one full context.
    pub kv: u64,
}

/// Computes what a model needs, from the headers alone.
///
/// # Errors
/// Those of [`context_length`].
pub fn memory_need(
    files: &ModelFiles,
    options: &LoadOptions,
    notices: &mut Vec<Notice>,
) -> LoadResult<MemoryNeed> {
    let (context, demand) = plan(files, options, notices)?;
    let kv = demand.kv_fixed.saturating_add(demand.kv_per_token.saturating_mul(context as u64));
    Ok(MemoryNeed { context, base: demand.weights.saturating_add(demand.fixed), kv })
}

/// Computes the context that [`load`] would give the model without a draft model, and its memory with it.
fn plan(files: &ModelFiles, options: &LoadOptions, notices: &mut Vec<Notice>) -> LoadResult<(usize, Demand)> {
    let options = in_force(files, options, notices);
    let recognised = recognise(files.config_reader())?;
    let alone = Planned::alone(files, &recognised, &options);
    let (block, vision) = (prediction::block(alone, "")?, alone.vision(notices)?);
    let planned = Planned { block: block.as_ref(), vision: vision.as_ref(), ..alone };
    let context = planned.context(notices)?;
    Ok((context, planned.demand(context)?))
}

/// A model that is planned, and the drafters and the tower, which take memory beside it.
#[derive(Clone, Copy)]
struct Planned<'a> {
    files: &'a ModelFiles,
    recognised: &'a Recognised,
    options: &'a LoadOptions,
    draft: Option<&'a DraftFiles>,
    block: Option<&'a OwnBlock>,
    vision: Option<&'a VisionFiles>,
}

impl<'a> Planned<'a> {
    fn alone(files: &'a ModelFiles, recognised: &'a Recognised, options: &'a LoadOptions) -> Self {
        Self { files, recognised, options, draft: None, block: None, vision: None }
    }

    /// Finds the tower of a model that our decoder runs.
    fn vision(self, notices: &mut Vec<Notice>) -> LoadResult<Option<VisionFiles>> {
        let Some(description) = self.recognised.native() else { return Ok(None) };
        vision::find(self.files, description, self.options.images, notices)
    }

    fn context(self, notices: &mut Vec<Notice>) -> LoadResult<usize> {
        let most = inspect::decoder_facts(self.recognised).context_length;
        context(most, |context| self.demand(context), self.options, notices)
    }

    /// Computes the memory of a model and its drafters with a context of up to `context` tokens.
    fn demand(self, context: usize) -> LoadResult<Demand> {
        let Self { files, recognised, options, draft, block, vision } = self;
        match recognised {
            Recognised::Native(description) => {
                let demand = demand(files, description, options, context)?;
                let demand = block.map_or(demand, |block| block.add_demand(demand, options, context));
                let demand = vision.map_or(Ok(demand), |vision| vision.add_demand(demand, files, options))?;
                draft.map_or(Ok(demand), |draft| draft.add_demand(demand, options, context))
            }
            #[cfg(feature = "candle-families")]
            Recognised::CandleModel(plan) => Ok(candle_models::demand(files, plan)),
        }
    }
}

/// Returns the options in force: a GPU keeps KV in f16 instead of in codes; what a packed folder has in floats of 8 or 4 bits is
/// kept in bf16, unless a type is asked for. Exactly, it would take four bytes for each value.
fn in_force(files: &ModelFiles, options: &LoadOptions, notices: &mut Vec<Notice>) -> LoadOptions {
    let mut options = options.clone();
    if matches!(options.device, Device::Candle(_)) && options.kv_type.is_quantized() {
        options.kv_type = KvType::F16;
        notices.push(Notice::KvInHalves);
    }
    let Some(packed) = files.packed().filter(|packed| packed.count > 0) else { return options };
    let rounded = packed.floats > 0 && options.dtype.is_none() && options.quantize.is_none();
    if rounded {
        options.dtype = Some(Dtype::Bf16);
    }
    if options.quantize.is_none() {
        let float_bytes = if options.dtype == Some(Dtype::F32) { 4 } else { 2 };
        let bytes = packed.bytes + packed.floats * float_bytes;
        notices.push(Notice::PackedWeights { form: packed.form, count: packed.count, bytes, rounded });
    }
    options
}

/// Chooses the context, at most `most` tokens, or returns why it does not fit. `demand` computes the model's memory
/// for a context.
fn context(
    most: usize,
    demand: impl Fn(usize) -> LoadResult<Demand>,
    options: &LoadOptions,
    notices: &mut Vec<Notice>,
) -> LoadResult<usize> {
    let wanted = match options.context {
        Some(asked) if asked > most => return Err(LoadError::ContextTooLong { asked, most }),
        asked => asked.unwrap_or(most),
    };
    let demand = demand(wanted)?;
    let base = demand.weights.saturating_add(demand.fixed);
    if let Some(asked) = options.kv_memory {
        check_kv_memory(asked, demand, options, wanted)?;
    }
    let allowed = options.kv_memory.map(|kv_memory| base.saturating_add(kv_memory));
    let Some(available) = allowed.or(options.available_memory) else { return Ok(wanted) };
    let fit = fit(demand, wanted, available);
    // A context of one token has no room for an answer.
    match (options.context, fit.largest_context.filter(|largest| *largest >= 2)) {
        (None, Some(largest)) if !fit.fits() => {
            let by = if allowed.is_some() { "--kv-memory" } else { "the memory available" };
            notices.push(Notice::ContextLimited { context: largest, most, by });
            Ok(largest)
        }
        _ => fit.check().map(|()| wanted),
    }
}

/// Checks that the requested KV memory holds the requested context, or a minimal one, and fits beside the weights.
fn check_kv_memory(asked: u64, demand: Demand, options: &LoadOptions, wanted: usize) -> LoadResult<()> {
    let context = options.context.map_or(2, |_| wanted);
    let needed = demand.kv_fixed.saturating_add(demand.kv_per_token.saturating_mul(context as u64));
    if asked < needed {
        return Err(LoadError::KvTooSmall { asked, needed, context });
    }
    let left = |available: u64| available.saturating_sub(demand.weights.saturating_add(demand.fixed));
    match options.available_memory.map(left) {
        Some(most) if most < asked => Err(LoadError::KvTooLarge { asked, most }),
        _ => Ok(()),
    }
}

/// Computes the memory of a model with these options and a context of up to `context` tokens. KV of windows does not
/// grow with it.
fn demand(
    files: &ModelFiles,
    description: &Description,
    options: &LoadOptions,
    context: usize,
) -> LoadResult<Demand> {
    let Description { config, naming, .. } = description;
    let file = WeightFile::new(files.tensors(), naming)?;
    let weights = tensor_bytes(tensors_in_memory(&file, config), config, options)?;
    let adapters = options.adapters.iter().map(AdapterFile::bytes).sum::<u64>();
    let (lasting, windowed): (Vec<_>, Vec<_>) =
        kv_groups(config, options.kv_type).into_iter().partition(|group| group.kind == KvKind::Full);
    let page_bytes = lasting.iter().map(|group| group.page_bytes as u64).sum::<u64>();
    let in_windows =
        windowed.iter().map(|group| group.bytes(context, options.device.step_tokens()) as u64).sum::<u64>();
    let kv_per_token = page_bytes / PAGE_TOKENS as u64;
    Ok(Demand {
        weights: weights.saturating_add(adapters),
        kv_per_token: kv_per_token + attention_bytes_per_token(config, options.device),
        kv_fixed: page_bytes + in_windows,
        fixed: activation_bytes(config) + scratch_bytes(most_heads(config), options.device, context),
    })
}

/// Lists the decoder's tensors but for tables of n-grams, whose rows are read where the file has them.
fn tensors_in_memory<'a>(
    file: &'a WeightFile<'a>,
    config: &DecoderConfig,
) -> impl Iterator<Item = TensorFacts> + 'a {
    let has_tables = config.layers.iter().any(|layer| layer.ngrams.is_some());
    file.decoder_tensors(config.layers.len()).filter(move |(name, ..)| !(has_tables && is_table(name)))
}

/// Returns the bytes of tensors in memory.
fn tensor_bytes(
    tensors: impl IntoIterator<Item = TensorFacts>,
    config: &DecoderConfig,
    options: &LoadOptions,
) -> LoadResult<u64> {
    let mut bytes = 0u64;
    for (name, shape, dtype) in tensors {
        let dtype = quantize::converted_dtype(&shape, dtype, target(options, matrix(&shape, config), dtype));
        let tensor = weight_bytes(options.device, dtype, &shape)
            .map_err(|message| LoadError::Tensor { tensor: name, message })?;
        bytes = bytes.saturating_add(tensor as u64);
    }
    Ok(bytes)
}

/// Returns the bytes of a tensor in memory: our kernels keep matrices in a layout of their own, candle keeps the types that
/// it lacks as F16.
fn weight_bytes(device: Device, dtype: Dtype, shape: &[usize]) -> Result<usize, String> {
    let stored = super::tensor::byte_len(dtype, shape)?;
    let cols = shape.last().copied().unwrap_or(1);
    let rows = stored / dtype.row_bytes(cols).ok_or("rows are not whole blocks")?.max(1);
    Ok(match device {
        Device::Cpu(_) => packed_bytes(dtype, [rows, cols]).unwrap_or(0).max(stored),
        Device::Candle(_) if is_widened(dtype) => 2 * rows * cols,
        Device::Candle(_) => stored,
    })
}

/// Returns the types whose weights take far more memory than in the file, and how much more.
fn widened_types(
    files: &ModelFiles,
    Description { config, naming, .. }: &Description,
    options: &LoadOptions,
) -> LoadResult<Option<Notice>> {
    let is_kept = options.quantize.is_none() && options.dtype != Some(Dtype::F32);
    let (mut types, mut more) = (BTreeSet::new(), 0);
    for (_, shape, dtype) in tensors_in_memory(&WeightFile::new(files.tensors(), naming)?, config) {
        let sizes = super::tensor::byte_len(dtype, &shape)
            .and_then(|stored| Ok([stored, weight_bytes(options.device, dtype, &shape)?]));
        // The layout of the other types is up to an eighth larger.
        if let Ok([stored, taken]) = sizes
            && is_kept
            && dtype.is_quantized()
            && taken > stored + stored / 8
        {
            types.insert(dtype.name());
            more += taken - stored;
        }
    }
    let types: Vec<_> = types.into_iter().collect();
    Ok((more >> 20 > 0).then_some(Notice::WidenedTypes { types, mebibytes: more >> 20 }))
}

/// Returns the bytes that attention holds per visible token while it computes a layer: our kernels keep one partial
/// result per head for each run of pages, candle a key and a value in f32.
fn attention_bytes_per_token(config: &DecoderConfig, device: Device) -> u64 {
    let partials = |heads: usize, value_dim| (4 * heads * partial_len(value_dim)).div_ceil(RUN_TOKENS);
    let of_layers = config.layers.iter().map(|layer| match (&layer.mixer, device) {
        (MixerConfig::Attention(attention), Device::Cpu { .. }) => {
            partials(attention.num_heads, attention.head_dim)
        }
        (MixerConfig::Attention(attention), Device::Candle(_)) => {
            2 * 4 * attention.num_kv_heads * attention.head_dim
        }
        (MixerConfig::Latent(latent), _) => partials(latent.num_heads, latent.kv_rank),
        _ => 0,
    });
    of_layers.max().unwrap_or(0) as u64
}

/// Estimates the activations of one step in bytes, rounded up: every buffer of the decoder with more rows than the
/// engine's default step, and a few rows of logits.
fn activation_bytes(config: &DecoderConfig) -> u64 {
    const ROWS: usize = 512;
    let widest = config.layers.iter().map(|layer| layer.mixer_width() + layer.feed_forward.width()).max();
    let chosen = config.layers.iter().filter_map(|layer| match &layer.mixer {
        MixerConfig::Latent(latent) => Some(HELD_SCORES + ROWS * latent.indexer()?.top_k),
        MixerConfig::Attention(attention) => {
            Some(HELD_SCORES + ROWS * attention.num_kv_heads * attention.indexer?.top_k)
        }
        _ => None,
    });
    let streams = config.hyper.map_or(0, |hyper| hyper.num_streams * config.hidden_size);
    let widths = 6 * (config.hidden_size + streams) + 3 * widest.unwrap_or(0);
    let rows = ROWS * widths + chosen.max().unwrap_or(0);
    (4 * (rows + 8 * config.vocab_size)) as u64
}

/// Returns what a GPU holds beside buffers: a part of a matrix in f16, and scores three times, with their mask and softmax.
fn scratch_bytes(num_heads: usize, device: Device, context: usize) -> u64 {
    let rows = device.step_tokens();
    let scores = num_heads.saturating_mul(rows).saturating_mul(context);
    if rows < TEXT_STEP_TOKENS { 0 } else { (WIDENED_BYTES + 12 * scores.min(GROUP_VALUES)) as u64 }
}

/// Returns the number of query heads of the layer that has most.
fn most_heads(config: &DecoderConfig) -> usize {
    let heads = config.layers.iter().map(|layer| match &layer.mixer {
        MixerConfig::Attention(attention) => attention.num_heads,
        MixerConfig::Latent(latent) => latent.num_heads,
        _ => 0,
    });
    heads.max().unwrap_or(0)
}

/// Guesses a tensor's purpose from its shape; only token tables have that many rows.
fn matrix(shape: &[usize], config: &DecoderConfig) -> Matrix {
    match shape {
        [rows, _] if *rows == config.vocab_size => Matrix::Vocabulary,
        _ => Matrix::Projection,
    }
}

/// Chooses the type of a matrix. Token tables are rounded less than the rest: at 4 bits they cost quality out of
/// proportion to their size, so they get Q6_K (llama.cpp does the same in its 4-bit mixes).
fn target(options: &LoadOptions, matrix: Matrix, stored: Dtype) -> Dtype {
    match (options.quantize, options.dtype, matrix) {
        // A rounded router selects other experts, and a router is small.
        (_, _, Matrix::Gate) => Dtype::F32,
        (Some(Dtype::Q4_0 | Dtype::Q4K), _, Matrix::Vocabulary) => Dtype::Q6K,
        (Some(quantized), _, _) => quantized,
        (None, Some(float), _) if !stored.is_quantized() || float == Dtype::F32 => float,
        _ => stored,
    }
}

/// The parts of a load that a decoder's own files do not give.
#[derive(Clone, Copy)]
struct DecoderWith<'a> {
    options: &'a LoadOptions,
    /// Threads that it shares with another model.
    workers: Option<&'a CpuThreads>,
    /// Loaded with the model.
    block: Option<&'a OwnBlock>,
    assistant: Option<&'a DraftFiles>,
    /// Set by another thread to end the load with an error.
    is_unwanted: &'a AtomicBool,
}

/// A model, and its block that predicts further tokens.
type Models = (Box<dyn Model>, Option<Box<dyn Model>>);

fn decoder(
    files: &ModelFiles,
    description: Description,
    with: DecoderWith<'_>,
    context_length: usize,
    progress: &mut dyn FnMut(usize, usize),
    notices: &mut Vec<Notice>,
) -> LoadResult<Models> {
    let DecoderWith { options, workers, block, assistant, is_unwanted } = with;
    let panels = panels(files, description.config.architecture, options).map(Arc::new);
    let kept = RefCell::new(BTreeMap::<(&'static str, &'static str), usize>::new());
    let convert = |name: &str, matrix: Matrix, tensor: HostTensor| {
        if is_unwanted.load(Ordering::Relaxed) {
            return Err(LoadError::Device("the tokenizer cannot be used".to_owned()));
        }
        let wanted = target(options, matrix, tensor.dtype);
        let converted = quantize::convert(name, &tensor, wanted)?;
        let asked = options.quantize.or(options.dtype).unwrap_or(converted.dtype);
        if converted.dtype != asked && matrix != Matrix::Gate {
            *kept.borrow_mut().entry((converted.dtype.name(), asked.name())).or_default() += 1;
        }
        Ok(converted)
    };
    notices.extend(widened_types(files, &description, options)?);
    let block = block.map(|block| PredictionParts {
        layer: block.layer.clone(),
        naming: description.naming.clone(),
        source: files.tensors(),
        kv_type: options.kv_type,
        convert: &convert,
    });
    let adapters = read_adapters(files, &options.adapters)?;
    let drafting = DraftingParts { block, assistant: assistant.and_then(|files| files.assistant(&convert)) };
    let parts = DecoderParts {
        config: description.config,
        naming: description.naming,
        source: files.tensors(),
        context_length,
        kv_type: options.kv_type,
        convert: &convert,
        adapters: &adapters,
        progress,
    };
    let models = match options.device {
        Device::Cpu(options) => {
            let sharing = |workers: &CpuThreads| Cpu::sharing(options, workers.clone());
            let cpu = || workers.map_or_else(|| Cpu::with(options), sharing);
            build(|| cpu().map_err(backend), |cpu| cpu.keeping(panels.clone()), parts, drafting)?
        }
        Device::Candle(kind) => {
            let candle = candle(kind, notices)?;
            build(|| Ok(candle.clone()), |candle| candle, parts, drafting)?
        }
    };
    notices.extend(panels.iter().flat_map(|panels| panels.finish()));
    let kept = kept.into_inner().into_iter();
    notices.extend(kept.map(|((dtype, asked), count)| Notice::WeightTypes { count, dtype, asked }));
    Ok(models)
}

/// Opens a device of candle. Kernels that are wrong there are notices.
fn candle(kind: DeviceKind, notices: &mut Vec<Notice>) -> LoadResult<Candle> {
    let device = open_device(kind).map_err(backend)?;
    notices.extend(faults(&device).iter().map(KernelFault::notice));
    Candle::new(device).map_err(backend)
}

/// Inputs of the drafters that read a decoder's hidden states.
struct DraftingParts<'a> {
    block: Option<PredictionParts<'a>>,
    assistant: Option<AssistantParts<'a>>,
}

/// Loads a decoder on the backend that `keeping` makes of a new one, and what drafts on others, because only the decoder's packed
/// weights are kept: a file of them does not depend on what drafts.
fn build<B: Backend>(
    new: impl Fn() -> LoadResult<B>,
    keeping: impl FnOnce(B) -> B,
    parts: DecoderParts<'_>,
    DraftingParts { block, assistant }: DraftingParts<'_>,
) -> LoadResult<Models> {
    let mut decoder = Decoder::load(keeping(new()?), parts)?;
    assistant.map_or(Ok(()), |assistant| decoder.load_assistant(&new()?, assistant))?;
    let block = block.map(|block| decoder.load_prediction(new()?, block)).transpose()?;
    Ok((Box::new(decoder), block.map(|block| Box::new(block) as Box<dyn Model>)))
}

/// Opens the packed weights of a model. None are kept of weights that are converted on load, because converting them takes
/// most of the time, of the model in the executable, and for other devices.
fn panels(files: &ModelFiles, architecture: &str, options: &LoadOptions) -> Option<PanelStore> {
    let is_as_stored = options.dtype.is_none() && options.quantize.is_none() && files.packed().is_none();
    let is_kept =
        is_as_stored && !files.is_built_in() && matches!(options.device, Device::Cpu(_)) && cfg!(unix);
    let place = options.packed.clone().filter(|_| is_kept)?;
    let identity = fingerprint::stamped_identity(files).ok()?;
    Some(PanelStore::open(place, fingerprint::panel_key(architecture, &identity, PANEL_LAYOUT)))
}

fn backend(error: Error) -> LoadError {
    LoadError::Device(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_memory_of_its_own_has_the_limits_of_the_process() {
        let kinds = |device: Device| -> Vec<LimitKind> {
            device.memory_limits().iter().map(|limit| limit.kind).collect()
        };
        let of_process = kinds(Device::Cpu(CpuOptions::new(1)));
        assert_eq!(kinds(Device::Candle(DeviceKind::Cpu)), of_process);
        assert!(!of_process.contains(&LimitKind::Device));
        // No such GPU, or a build without any.
        assert_eq!(kinds(Device::Candle(DeviceKind::Cuda(99))), []);
    }

    /// Routers above all: see docs/numbers.md.
    #[test]
    fn gates_are_multiplied_in_f32_whatever_is_asked_and_stored() {
        let options = |dtype, quantize| LoadOptions {
            device: Device::Cpu(CpuOptions::new(1)),
            dtype,
            quantize,
            ..LoadOptions::default()
        };
        for stored in [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Q8_0] {
            for dtype in [None, Some(Dtype::F32), Some(Dtype::F16), Some(Dtype::Bf16)] {
                assert_eq!(target(&options(dtype, None), Matrix::Gate, stored), Dtype::F32);
            }
            for quantize in [Dtype::Q8_0, Dtype::Q4_0, Dtype::Q4K, Dtype::Q6K] {
                let options = options(None, Some(quantize));
                assert_eq!(target(&options, Matrix::Gate, stored), Dtype::F32);
                assert_eq!(target(&options, Matrix::Projection, stored), quantize);
            }
            assert_eq!(target(&options(None, None), Matrix::Projection, stored), stored);
        }
    }
}
