//! From the model flags to a loaded model, the only way for all subcommands.
//!
//! Chooses device and threads, reports the choice, draws the progress of loading, and joins text side and
//! engine client into the [`Loaded`] model that the commands use.

pub mod embedder;
mod loaded;
pub mod remote;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::{download, models, running, sight};
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args;
use crate::cli::flags::args::{
    BosId, DEFAULT_KV_DISK, EngineOptions, FetchArgs, ImageArgs, ModelArgs, SamplingArgs, Sharing, check_isa,
};
use crate::cli::places::{Places, free_bytes};
use crate::cli::sessions::encryption;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::input::read_file;
use crate::cli::terminal::output::visible;
use crate::cli::terminal::report::{bytes, counted};
use crate::cli::terminal::slow_cpu::slow_kernels;
use llmctl_base::machine::{Cores, default_threads};
use llmctl_base::{Error, GivenSampling, LoadError, Notice, Vault};
use llmctl_engine::{Engine, EngineClient, EngineConfig, EngineSpec, Speculation};
use llmctl_hub::builtin::GUIDE;
use llmctl_hub::{ModelSource, PullExtent, Resolved};
use llmctl_models::kv::disk::{DEFAULT_QUEUE_BYTES, DiskConfig, DiskStore, WarmPrompt};
use llmctl_models::load;
use llmctl_models::load::{
    CpuOptions, Device, DeviceKind, Fingerprint, ImageUse, Isa, LEAST_BYTES, LoadOptions, LoadedDraft,
    LoadedModel, ModelFiles, ModelTexts, PanelPlace, PredictionUse, Sight, kept_panels, open_device,
};
use llmctl_models::memory::{LimitKind, tightest};
use llmctl_models::model::{Model, ModelSpec};
use llmctl_models::text::Tokenizer;
use llmctl_models::vision::Tower;
use llmctl_template::TemplateError;
pub use loaded::{Loaded, ModelInfo, PreparedTexts, settle};

/// Default for bytes of packed weights kept on disk.
const DEFAULT_PACKED_DISK: u64 = 20 << 30;

/// Rows of a step for each request that may run.
const ROWS_PER_RUNNING: usize = 8;

/// Loading time below which no bar is drawn.
const PROGRESS_AFTER: Duration = Duration::from_millis(400);

/// Message if nothing names a model.
const NO_MODEL: &str =
    "using guide, the built-in demo model (knows only llmctl). Use your own with --model FILE.gguf";

/// Resolves the reference, loads the model and starts its engine. Notices and progress go to the terminal.
///
/// # Errors
/// `NotFound` if the reference cannot be resolved, `BadData` for damaged files, `Temporary` if the model does
/// not fit.
pub fn load(args: &ModelArgs, asked: EngineOptions, terminal: &Terminal) -> Result<Loaded, CommandError> {
    if !args.remote.engine.is_empty() {
        return remote::load(args, asked, terminal);
    }
    let start = Instant::now();
    let files = resolve(args, terminal)?;
    if args.connects
        && let Some(llm) = connected(args, &files, asked, terminal)
    {
        return Ok(llm);
    }
    ResolvedModel::new(files, args, asked, terminal)?.with_draft(args, terminal)?.start(start, terminal)
}

/// A model as its flags mean it on this machine, before a file of it is opened.
pub struct ResolvedModel {
    pub files: Resolved,
    pub options: LoadOptions,
    draft: Option<Resolved>,
    text: TextFlags,
    asked: EngineOptions,
}

/// Parts of a model's texts that flags replace.
struct TextFlags {
    template: Option<String>,
    bos: Option<BosId>,
    ends: Vec<u32>,
}

impl TextFlags {
    fn new(args: &ModelArgs) -> Result<Self, CommandError> {
        let template = args.chat_template.as_deref().map(read_file).transpose()?;
        Ok(Self { template, bos: args.bos_id, ends: args.eos_id.clone() })
    }

    fn apply(
        &self,
        files: &Resolved,
        mut texts: ModelTexts,
        context_tokens: usize,
    ) -> Result<PreparedTexts, CommandError> {
        if let Some(BosId(bos)) = self.bos {
            texts.set_bos(bos)?;
        }
        if !self.ends.is_empty() {
            texts.set_ends(&self.ends)?;
        }
        Ok(PreparedTexts::new(files, texts, self.template.as_deref(), context_tokens))
    }
}

impl ResolvedModel {
    /// Returns the model of these files, without a draft model.
    ///
    /// # Errors
    /// Those of [`options`], and of reading the chat template of a flag.
    pub fn new(
        files: Resolved,
        args: &ModelArgs,
        asked: EngineOptions,
        terminal: &Terminal,
    ) -> Result<Self, CommandError> {
        let text = TextFlags::new(args)?;
        Ok(Self { files, options: options(args, asked, terminal)?, draft: None, text, asked })
    }

    /// Adds the model of `--draft-model`, unless no draft would be asked of it.
    ///
    /// # Errors
    /// Those of [`resolve`]; a usage error if drafts of a draft model are asked for and there is none.
    pub fn with_draft(self, args: &ModelArgs, terminal: &Terminal) -> Result<Self, CommandError> {
        let draft = match (&args.draft_model, self.asked.speculation) {
            (None, Speculation::Draft) => {
                let hint = "name a small model of the same family with --draft-model";
                return Err(CommandError::usage("--speculate draft needs a draft model").hint(hint));
            }
            (None, _) => None,
            (Some(_), Speculation::Off | Speculation::Ngram) => {
                terminal.detail("the draft model is not loaded: --speculate asks for none");
                None
            }
            (Some(reference), _) => Some(find_or_download(reference, args, terminal)?),
        };
        Ok(Self { draft, ..self })
    }

    /// Loads the model and starts its engine. Loading began at `start`.
    fn start(self, start: Instant, terminal: &Terminal) -> Result<Loaded, CommandError> {
        let (asked, device) = (self.asked, self.options.device);
        let loaded = self.load_files(terminal)?;
        let model = loaded.model.spec();
        let context_tokens = model.context_length;
        let mut texts = self.text.apply(&self.files, loaded.texts, context_tokens)?;
        if self.options.images.is_off {
            texts.why_blind = "--no-mmproj leaves the vision tower out: leave that flag out instead";
        }
        loaded.notices.iter().for_each(|notice| terminal.note(notice));
        loaded.details.iter().for_each(|notice| terminal.detail(&notice.to_string()));
        report_ends(texts.chat_tokenizer.texts(), terminal);
        let ends = texts.chat_tokenizer.texts().end_of_generation.clone();
        let mut config = engine_config(asked, device, context_tokens, ends);
        config.build = loaded.fingerprint.build();
        config.answer_tokens = self.files.source.built_in().map(|model| model.answer_tokens);
        if asked.kv_memory.is_none() && config.max_running > 1 {
            config.kv_memory = Some(shared_kv(model, loaded.draft.as_ref(), &config, device, terminal)?);
        }
        let kv = open_kv(asked, &loaded.fingerprint, &self.files, terminal)?;
        report_draft(model, loaded.draft.as_ref(), &config, terminal)?;
        let models = (loaded.model, loaded.draft.and_then(|draft| draft.model));
        let engine = start_engine(models, loaded.tower, texts.chat_tokenizer.tokenizer(), config, kv)?;
        texts.info.sees = engine.spec().vision.is_some();
        texts.info.refuses_drafts = asked.speculation != engine.spec().speculation();
        texts.info.load_time = start.elapsed();
        let seconds = texts.info.load_time.as_secs_f32();
        tracing::info!("loaded in {seconds:.2} s, context {context_tokens} tokens");
        Ok(remote::joined(texts, engine))
    }

    /// Loads the files of the model and of its draft model, with a progress bar.
    ///
    /// # Errors
    /// Those of [`load::load_with_draft`].
    pub fn load_files(&self, terminal: &Terminal) -> Result<LoadedModel, CommandError> {
        let Self { files, draft, options, .. } = self;
        let bar = LoadBar::new(terminal, &files.name);
        let mut show = |done, total| bar.show(done, total);
        let loaded = load::load_with_draft(files, draft.as_ref(), options, &mut show);
        bar.clear();
        let loaded = loaded?;
        let places = Places::from_environment();
        std::iter::once(files).chain(draft).for_each(|files| models::record_use(files, &places));
        Ok(loaded)
    }
}

/// Says with `-v` which tokens end an answer, where there are several.
fn report_ends(texts: &ModelTexts, terminal: &Terminal) {
    if let ends @ [_, _, ..] = &*texts.listed_ends {
        let ids: BTreeSet<_> = ends.iter().collect();
        let ids: Vec<_> = ids.into_iter().map(u32::to_string).collect();
        terminal.detail(&format!("stop tokens: {} ({})", ids.join(", "), texts.defaults_source));
    }
}

/// Opens the model at a running server of this user; `None`, with a notice, where no server has it or can be used.
fn connected(
    args: &ModelArgs,
    resolved: &Resolved,
    asked: EngineOptions,
    terminal: &Terminal,
) -> Option<Loaded> {
    let places = Places::from_environment();
    let opened = running::find(args, resolved, &places).and_then(|server| {
        let llm = remote::load_connected(&server.flags(args), resolved, asked, terminal)
            .map_err(|error| error.to_string())?;
        terminal.note(format!("connected to {}, which has {}", server.url, server.model));
        Ok(llm)
    });
    opened.map_err(|why| terminal.note(format!("--connect: {why}; the model is loaded here"))).ok()
}

/// Returns whether a model fits into the memory that is left, with the context that it has by itself. One that is not here or
/// cannot be read does not: [`load`] says why, and asks before it downloads.
pub fn fits_beside(args: &ModelArgs, asked: EngineOptions, terminal: &Terminal) -> bool {
    let fetch = FetchArgs { offline: true, ..args.fetch.clone() };
    let args = &ModelArgs { fetch, ..args.clone() };
    let fits = || {
        let model = ResolvedModel::new(resolve(args, terminal)?, args, asked, terminal)?;
        let mut notices = Vec::new();
        load::context_length(&ModelFiles::of(&model.files)?, &model.options, &mut notices)?;
        let is_limited = notices.iter().any(|notice| matches!(notice, Notice::ContextLimited { .. }));
        Ok::<_, CommandError>(!is_limited)
    };
    args.remote.engine.is_empty() && fits().unwrap_or(false)
}

/// Says with `-v` what memory the draft model, the assistant or the model's own block takes.
fn report_draft(
    model: &ModelSpec,
    draft: Option<&LoadedDraft>,
    config: &EngineConfig,
    terminal: &Terminal,
) -> Result<(), CommandError> {
    let Some(draft) = draft else { return Ok(()) };
    let spec = EngineSpec::new(model.clone(), config.clone())?;
    let kind = if draft.model.is_some() { "draft model" } else { "assistant" };
    let drafter = draft.name.as_ref().map_or("prediction block".to_owned(), |name| format!("{kind} {name}"));
    let kv_memory = draft.spec().map(|own| spec.for_draft_model(own)).transpose()?.map(|own| own.kv_memory);
    let kv_memory =
        kv_memory.map_or("the model's KV".to_owned(), |kv| format!("up to {} of KV", bytes(kv as u64)));
    terminal.detail(&format!("{drafter}: {} of weights, {kv_memory}", bytes(draft.weight_bytes)));
    Ok(())
}

/// Starts an engine in a thread of its own, which reads images if there is a tower, drafts with the second model if there is one, and keeps the KV of named
/// sessions in `kv`.
///
/// # Errors
/// Those of [`Engine::new`], [`Engine::set_draft_model`] and [`EngineClient::spawn`].
pub fn start_engine(
    (model, draft_model): (Box<dyn Model>, Option<Box<dyn Model>>),
    tower: Option<Box<dyn Tower>>,
    tokenizer: &Arc<Tokenizer>,
    config: EngineConfig,
    kv: Option<DiskStore>,
) -> Result<EngineClient, Error> {
    let vocabulary = Arc::clone(tokenizer);
    EngineClient::spawn(move || {
        let mut engine = Engine::new(model, vocabulary, config)?;
        tower.into_iter().for_each(|tower| engine.set_tower(tower));
        draft_model.map_or(Ok(()), |model| engine.set_draft_model(model))?;
        kv.into_iter().for_each(|store| engine.set_disk(store));
        Ok(engine)
    })
}

/// Opens a folder of KV pages for one model.
///
/// # Errors
/// Those of [`DiskStore::open`].
pub fn open_kv_folder(
    root: PathBuf,
    limit_bytes: u64,
    model: &Fingerprint,
    vault: Option<Vault>,
) -> Result<DiskStore, Error> {
    let Fingerprint { hex: fingerprint, facts: description } = model.clone();
    let queue_bytes = DEFAULT_QUEUE_BYTES;
    DiskStore::open(DiskConfig { root, limit_bytes, fingerprint, description, queue_bytes, vault })
}

fn engine_config(
    asked: EngineOptions,
    device: Device,
    context_tokens: usize,
    ends: Vec<u32>,
) -> EngineConfig {
    let Sharing { max_running, max_waiting, max_sessions, session_ttl } = asked.sharing;
    let alone = EngineConfig::new(context_tokens, ends);
    EngineConfig {
        // A row for each running request, and a prompt chunk that is worth a step beside them.
        step_tokens: device.step_tokens().max(ROWS_PER_RUNNING * max_running),
        max_running,
        max_waiting,
        max_sessions,
        session_ttl,
        kv_memory: asked.kv_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        warm_resume: asked.warm_resume,
        speculation: asked.speculation,
        ..alone
    }
}

/// Returns the default bytes of KV for several requests: a full context for each as far as memory allows, and
/// at least the one context that loading has checked. Memory is taken as it is used.
fn shared_kv(
    model: &ModelSpec,
    draft: Option<&LoadedDraft>,
    config: &EngineConfig,
    device: Device,
    terminal: &Terminal,
) -> Result<usize, CommandError> {
    let config = EngineConfig { kv_memory: None, max_sessions: 1, ..config.clone() };
    let (context_tokens, max_running) = (config.context_length, config.max_running);
    let spec = EngineSpec::new(model.clone(), config)?;
    let (wanted, one) = (spec.kv_memory, spec.sequence_bytes(context_tokens));
    let draft = draft.and_then(LoadedDraft::spec).map(|own| spec.for_draft_model(own)).transpose()?;
    // A draft model gets memory in the same proportion.
    let own_part = wanted as f64 / (wanted + draft.map_or(0, |draft| draft.kv_memory)).max(1) as f64;
    let available = tightest(&device.memory_limits()).map(|limit| limit.available);
    let Some(available) = available else { return Ok(wanted) };
    let left = (available as f64 * 0.75 * own_part) as usize;
    let granted = wanted.min(left).max(one);
    if granted < wanted {
        terminal.note(format!(
            "KV memory limited to {} by the memory available: {:.1} full contexts of {context_tokens} tokens instead of {max_running}",
            bytes(granted as u64),
            granted as f64 / one as f64,
        ));
    }
    Ok(granted)
}

/// Returns where packed weights are kept; `None` if they are not, or no folder is known. Without a limit of the user's, half
/// of the free space stays free.
fn packed_place(asked: EngineOptions, places: &Places) -> Option<PanelPlace> {
    let folder = places.packed()?;
    let by_default = || {
        let kept = kept_panels(&folder).bytes;
        let free = free_bytes(&folder).unwrap_or(u64::MAX);
        DEFAULT_PACKED_DISK.min(kept.saturating_add(free) / 2)
    };
    let limit_bytes = asked.packed_disk.unwrap_or_else(by_default);
    (limit_bytes > 0).then_some(PanelPlace { folder, limit_bytes, least_bytes: LEAST_BYTES })
}

/// Opens the user's folder of KV, where pages that were imported for the model become its own; `None` if KV on disk is off or no
/// folder is known.
fn open_kv(
    asked: EngineOptions,
    model: &Fingerprint,
    files: &Resolved,
    terminal: &Terminal,
) -> Result<Option<DiskStore>, CommandError> {
    let limit_bytes = asked.kv_disk.unwrap_or(DEFAULT_KV_DISK);
    // Without sessions nothing is saved, and there is something to read where prompts were computed ahead.
    let is_used = |root: &PathBuf| asked.keeps_sessions || WarmPrompt::changed(root).is_some();
    let root = Places::from_environment().kv().filter(|root| limit_bytes > 0 && is_used(root));
    if let Some(root) = &root {
        let hashes = || ModelFiles::of(files).ok().map(|files| load::content_hashes(&files));
        match load::adopt_pages(root, model, hashes) {
            Ok(0) => {}
            Ok(count) => {
                terminal.detail(&format!("{} of imported KV: the model is the same", counted(count, "page")));
            }
            Err(error) => terminal.warn(format!("{}: imported KV is not used: {error}", root.display())),
        }
    }
    let Some(root) = root else { return Ok(None) };
    Ok(Some(open_kv_folder(root, limit_bytes, model, encryption::vault()?)?))
}

/// Loads the model without its weights, enough to render and count tokens, with the context that `load` would
/// give. If the model does not fit, a notice says so and the requested context is used.
///
/// # Errors
/// Those of [`load`] that do not concern the weights.
pub fn load_texts(
    args: &ModelArgs,
    asked: EngineOptions,
    terminal: &Terminal,
) -> Result<PreparedTexts, CommandError> {
    if !args.remote.engine.is_empty() {
        return Ok(remote::open(args, asked, terminal)?.0);
    }
    let start = Instant::now();
    let model = ResolvedModel::new(resolve(args, terminal)?, args, asked, terminal)?;
    let facts = load::model_facts(&model.files.source)?;
    let facts = facts.decoder?;
    let files = ModelFiles::of(&model.files)?;
    let mut notices = Vec::new();
    let context_tokens = match load::context_length(&files, &model.options, &mut notices) {
        Err(error @ LoadError::TooBig { .. }) => {
            terminal.warn(error.to_string());
            args.ctx.unwrap_or(facts.context_length)
        }
        context => context?,
    };
    notices.iter().for_each(|notice| terminal.note(notice));
    let mut texts = model.text.apply(&model.files, load::load_texts(&files)?, context_tokens)?;
    texts.info.vocab_size = facts.vocab_size;
    texts.info.sees = matches!(sight::sight(&model.files, model.options.images), Sight::Images(_));
    texts.info.load_time = start.elapsed();
    Ok(texts)
}

/// Resolves the model flags to files, with a notice if they are not what the user typed.
///
/// # Errors
/// Those of [`models::find`].
pub fn resolve(args: &ModelArgs, terminal: &Terminal) -> Result<Resolved, CommandError> {
    let Some(reference) = &args.model else {
        terminal.note(NO_MODEL);
        return Ok(Resolved::built_in(&GUIDE));
    };
    let mut resolved = find_or_download(reference, args, terminal)?;
    resolved.mmproj = args.images.file_of(&resolved)?;
    if args.images.mmproj.is_none() {
        sight::drop_foreign(&mut resolved, args.images.asked(), terminal);
    }
    let path = resolved.source.path();
    tracing::info!("{reference} is {}", path.display());
    // A path that the user typed needs no notice.
    if path != Path::new(reference) {
        terminal.detail(&format!("model {} ({})", resolved.name, path.display()));
    }
    Ok(resolved)
}

impl ImageArgs {
    fn asked(&self) -> ImageUse {
        ImageUse { is_off: self.no_mmproj, tokens: self.image_tokens.map_or([None; 2], |tokens| tokens.0) }
    }

    /// Returns the mmproj file that these flags mean for a model.
    ///
    /// # Errors
    /// A usage error for a file that is missing or is for a model that takes none.
    fn file_of(&self, model: &Resolved) -> Result<Option<PathBuf>, CommandError> {
        let Some(path) = &self.mmproj else { return Ok(model.mmproj.clone().filter(|_| !self.no_mmproj)) };
        if !matches!(model.source, ModelSource::Gguf(_)) {
            let error =
                CommandError::usage(format!("--mmproj is for GGUF models, and {} is none", model.name));
            return Err(error.hint("a folder in transformers' form has its tower among its weights"));
        }
        std::fs::metadata(path).map_err(|error| LoadError::io(path, &error))?;
        Ok(Some(path.clone()))
    }
}

/// Finds the files of `reference`, after downloading them if they are missing and may be downloaded.
fn find_or_download(
    reference: &str,
    args: &ModelArgs,
    terminal: &Terminal,
) -> Result<Resolved, CommandError> {
    let places = &Places::from_environment();
    let (only_texts, is_blind) = (!args.remote.engine.is_empty(), args.images.no_mmproj);
    let extent = match (only_texts, is_blind || args.images.mmproj.is_some()) {
        (true, _) => PullExtent::Texts,
        (false, true) => PullExtent::WithoutProjector,
        (false, false) => PullExtent::Whole,
    };
    let look_up = if only_texts { models::look_up_texts } else { models::look_up };
    let missing = match look_up(reference, places, &args.aliases) {
        Ok(resolved) => return Ok(resolved),
        Err(error) => error,
    };
    let Some(hub) = models::downloadable(reference, &missing, places, &args.aliases) else {
        return Err(models::not_found(missing));
    };
    if let Some(setting) = download::forbidden_by(&args.fetch) {
        let meant = match &missing {
            LoadError::UnknownModel { candidates, .. } if !candidates.is_empty() => {
                format!("did you mean {}? ", candidates.join(" or "))
            }
            _ => String::new(),
        };
        let hint = format!("{meant}{setting} forbids downloading it; `llmctl models` lists what you have");
        return Err(CommandError::from(missing).hint(hint));
    }
    download::first_use(&hub, extent, &args.fetch, places, terminal).map_err(|error| match &missing {
        // The name may be a slip of one that is here.
        LoadError::UnknownModel { candidates, .. }
            if error.kind == Kind::NotFound && !candidates.is_empty() =>
        {
            error.hint(format!("did you mean {}?", candidates.join(" or ")))
        }
        _ => error,
    })?;
    look_up(reference, places, &args.aliases).map_err(models::not_found)
}

/// Returns whether the flags mean the built-in model. An invalid reference is reported when it is loaded.
pub fn means_built_in(args: &ModelArgs) -> bool {
    args.model.as_ref().is_none_or(|reference| {
        let found = models::find(reference, &Places::from_environment(), &args.aliases);
        found.is_ok_and(|resolved| resolved.source.built_in().is_some())
    })
}

/// Returns the options for loading a model on this machine.
///
/// # Errors
/// A usage error for a device or an instruction set that does not exist.
pub fn options(
    args: &ModelArgs,
    asked: EngineOptions,
    terminal: &Terminal,
) -> Result<LoadOptions, CommandError> {
    let device = device(args, terminal)?;
    // Weights used in place do not count as data; packing checks the limit itself.
    let limits = device.memory_limits().into_iter();
    let limits: Vec<_> = limits.filter(|limit| limit.kind != LimitKind::Data).collect();
    let available_memory = tightest(&limits).map(|limit| limit.available);
    Ok(LoadOptions {
        images: args.images.asked(),
        adapters: args.lora.iter().map(|asked| asked.0.clone()).collect(),
        device,
        dtype: args.dtype,
        quantize: args.quantize,
        context: args.ctx,
        kv_type: args.kv_type.unwrap_or_default(),
        kv_memory: asked.kv_memory,
        available_memory,
        packed: packed_place(asked, &Places::from_environment()),
        prediction: match asked.speculation {
            Speculation::Mtp => PredictionUse::Required,
            Speculation::Auto | Speculation::Always(_) if args.draft_model.is_none() => {
                PredictionUse::IfPresent
            }
            _ => PredictionUse::Never,
        },
    })
}

/// Checks that this processor and this build support the flags. Reads no file, so every command calls it
/// first: a wrong value is a usage error wherever the model is.
///
/// # Errors
/// A usage error for an instruction set or a device that does not exist.
pub fn check_machine(args: &ModelArgs) -> Result<(), CommandError> {
    cpu_options(args)?;
    match args.device.unwrap_or_default() {
        args::DeviceArg::Cuda => built(cfg!(feature = "cuda"), "cuda"),
        args::DeviceArg::Metal => built(cfg!(feature = "metal"), "metal"),
        args::DeviceArg::Auto | args::DeviceArg::Cpu => Ok(()),
    }
}

fn built(is_built: bool, name: &str) -> Result<(), CommandError> {
    if is_built {
        return Ok(());
    }
    let hint = format!("build llmctl with `--features {name}`, or use --device cpu");
    Err(CommandError::usage(format!("this build has no support for {name}")).hint(hint))
}

/// Returns threads and instruction set for the CPU. Flags are checked even if a GPU makes them unused.
fn cpu_options(args: &ModelArgs) -> Result<CpuOptions, CommandError> {
    let mut options = CpuOptions::new(args.threads.unwrap_or_else(default_threads));
    options.threads_batch = args.threads_batch.unwrap_or(options.threads);
    options.nodes = Cores::here().nodes.iter().copied().collect();
    if let Some(isa) = args.cpu {
        check_isa(isa, &Isa::available().collect::<Vec<_>>())?;
        options.isa = isa;
    }
    Ok(options)
}

/// Chooses the device. `auto` takes a GPU that this build supports and that answers, else the CPU.
fn device(args: &ModelArgs, terminal: &Terminal) -> Result<Device, CommandError> {
    check_machine(args)?;
    let options = cpu_options(args)?;
    let cpu = || {
        tracing::info!(?options, "computing on the CPU");
        // Once: a benchmark loads many times.
        static NOTED: Once = Once::new();
        NOTED.call_once(|| match slow_kernels(options.isa) {
            Some(words) if args.cpu.is_some() => terminal.detail(&words), // the user has chosen
            Some(words) => terminal.note(words),
            None => {}
        });
        Device::Cpu(options)
    };
    let (cuda, metal) = (cfg!(feature = "cuda"), cfg!(feature = "metal"));
    match args.device.unwrap_or_default() {
        args::DeviceArg::Cpu => Ok(cpu()),
        args::DeviceArg::Cuda => Ok(Device::Candle(DeviceKind::Cuda(0))),
        args::DeviceArg::Metal => Ok(Device::Candle(DeviceKind::Metal(0))),
        args::DeviceArg::Auto if cuda || metal => {
            let kind = if cuda { DeviceKind::Cuda(0) } else { DeviceKind::Metal(0) };
            match open_device(kind) {
                Ok(_) => Ok(Device::Candle(kind)),
                Err(error) => {
                    terminal.note(format!("no GPU ({error}): computing on the CPU"));
                    Ok(cpu())
                }
            }
        }
        args::DeviceArg::Auto => Ok(cpu()),
    }
}

/// Progress of loading, drawn if it takes long enough.
struct LoadBar {
    start: Instant,
    bar: Option<ProgressBar>,
}

impl LoadBar {
    fn new(terminal: &Terminal, name: &str) -> Self {
        let style = ProgressStyle::with_template("loading {msg} {bar:30} layer {pos}/{len}")
            .expect("the template is constant and valid");
        let hidden = || ProgressBar::hidden().with_style(style).with_message(visible(name).into_owned());
        Self { start: Instant::now(), bar: terminal.shows_progress().then(hidden) }
    }

    fn show(&self, done: usize, total: usize) {
        let Some(bar) = &self.bar else { return };
        if bar.is_hidden() && self.start.elapsed() > PROGRESS_AFTER {
            bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        }
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl From<TemplateError> for CommandError {
    fn from(error: TemplateError) -> Self {
        let hint = match &error {
            TemplateError::Missing => {
                "complete plain text with --raw, or give a template with --chat-template FILE"
            }
            TemplateError::Raised { .. } => {
                "change the messages, or give another template with --chat-template FILE"
            }
            TemplateError::UndefinedVariables { .. } => "give each with --var KEY=VALUE",
            _ => "give another template with --chat-template FILE, or complete plain text with --raw",
        };
        CommandError::new(Kind::BadData, error).hint(hint)
    }
}

impl SamplingArgs {
    /// Returns what the flags give, else the model's publisher. With `-v`, prints what comes from the publisher.
    pub fn resolve_for(&self, info: &ModelInfo, terminal: &Terminal) -> GivenSampling {
        let taken = self.taken_from(&info.defaults);
        if !taken.is_empty() {
            let (taken, source) = (taken.join(", "), &info.defaults_source);
            terminal.detail(&format!("{taken}, recommended by the model ({source})"));
        }
        self.given.clone().or(&info.defaults)
    }
}
