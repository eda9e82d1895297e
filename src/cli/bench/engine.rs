//! Engines to measure: from a combination of the flags to a loaded model, or to a connection.

use std::path::Path;
use std::time::Instant;

use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::{ColorWhen, EngineArgs, EngineOptions, ModelArgs, Sharing};
use crate::cli::model::load::{self, ResolvedModel};
use crate::cli::sessions::encryption;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::bytes;
use llmctl_bench::cost;
use llmctl_bench::engine::rounded;
use llmctl_bench::record::{BenchModel, BenchSetting};
use llmctl_engine::{EngineClient, EngineConfig, EngineSpec, Speculation};
use llmctl_models::kv::{KvKind, PAGE_TOKENS};
use llmctl_models::load::{Device, LoadedDraft, ModelFiles, kernels_name, model_facts};
use llmctl_models::memory::{MemoryLimit, tightest};

/// Options for loading a model and starting its engine.
#[derive(Debug, Clone)]
pub struct Recipe {
    pub model: ModelArgs,
    /// Name in results.
    pub name: String,
    pub step_tokens: Option<usize>,
    pub speculation: Speculation,
    /// Tokens of a sequence.
    pub context: usize,
    /// Sequences at once.
    pub sequences: usize,
    /// Number of depths that are kept for all repetitions.
    pub depths: usize,
}

/// Loads the model and starts an engine; with a folder, one that saves its sessions' KV there.
pub fn start(
    recipe: &Recipe,
    disk: Option<&Path>,
    terminal: &Terminal,
) -> Result<(EngineClient, BenchModel), CommandError> {
    if !recipe.model.remote.engine.is_empty() {
        return start_remote(recipe, terminal);
    }
    let begun = Instant::now();
    let quiet = Terminal::new(ColorWhen::Never, 0, true);
    let files = load::resolve(&recipe.model, &quiet)?;
    let asked = EngineOptions {
        packed_disk: Some(0), // nothing is written while times are taken
        speculation: recipe.speculation,
        ..EngineArgs::default().resolve(disk.is_some())
    };
    let mut model =
        ResolvedModel::new(files, &recipe.model, asked, terminal)?.with_draft(&recipe.model, &quiet)?;
    model.options.images.is_off = true; // no case has any
    let loaded = model.load_files(terminal)?;
    let mut config = EngineConfig::new(recipe.context, loaded.texts.end_of_generation.clone());
    config.step_tokens = recipe.step_tokens.unwrap_or(model.options.device.step_tokens());
    config.max_running = recipe.sequences;
    config.speculation = recipe.speculation;
    config.max_sessions = recipe.sequences + recipe.depths + 1;
    let spec = EngineSpec::new(loaded.model.spec().clone(), config.clone())?;
    let draft_spec =
        loaded.draft.as_ref().and_then(LoadedDraft::spec).map(|own| spec.for_draft_model(own)).transpose()?;
    let limits = model.options.device.memory_limits();
    check_memory(&limits, spec.kv_memory + draft_spec.map_or(0, |spec| spec.kv_memory))?;
    let vault = encryption::vault()?;
    let open =
        |root: &Path| load::open_kv_folder(root.to_path_buf(), u64::MAX, &loaded.fingerprint, vault.clone());
    let kv = disk.map(open).transpose()?;
    let step_tokens = config.step_tokens;
    let draft_name = loaded.draft.as_ref().and_then(|draft| draft.name.clone());
    let models = (loaded.model, loaded.draft.and_then(|draft| draft.model));
    let handle = load::start_engine(models, None, &loaded.texts.tokenizer, config, kv)?;
    let load_s = rounded(begun.elapsed().as_secs_f64());
    let mut facts = facts(recipe, &model, handle.spec())?;
    facts.setting.step_tokens = step_tokens;
    facts.fingerprint = Some(loaded.fingerprint.hex);
    facts.load_s = vec![load_s];
    facts.draft_model = draft_name;
    Ok((handle, facts))
}

/// Returns the context of a model whose engine is elsewhere.
pub fn remote_context(model: &ModelArgs, terminal: &Terminal) -> Result<usize, CommandError> {
    let (_, settings) = load::remote::open(model, remote_options(1), terminal)?;
    Ok(load::remote::connect(settings)?.spec().context_length())
}

fn remote_options(sequences: usize) -> EngineOptions {
    let sharing = Sharing { max_running: sequences, max_sessions: sequences, ..Sharing::default() };
    EngineOptions { speculation: Speculation::Off, sharing, ..EngineArgs::default().resolve(false) }
}

/// Connects to an engine elsewhere.
fn start_remote(recipe: &Recipe, terminal: &Terminal) -> Result<(EngineClient, BenchModel), CommandError> {
    let options = remote_options(recipe.sequences + recipe.depths + 1);
    let (_, settings) = load::remote::open(&recipe.model, options, terminal)?;
    let architecture = settings.architecture.clone();
    let handle = load::remote::connect(settings)?;
    load::remote::report(&handle, terminal);
    let setting =
        BenchSetting { model: recipe.name.clone(), cpu: "remote".to_owned(), ..BenchSetting::default() };
    let context = Some(recipe.context);
    let facts = BenchModel { architecture: Some(architecture), context, setting, ..BenchModel::default() };
    Ok((handle, facts))
}

/// Checks that all sequences fit beside what is loaded.
fn check_memory(limits: &[MemoryLimit], kv_memory: usize) -> Result<(), CommandError> {
    let needed = kv_memory as u64;
    let available = tightest(limits).map_or(u64::MAX, |limit| limit.available);
    if needed <= available {
        return Ok(());
    }
    let message =
        format!("the KV of all sequences takes {}, and {} are left", bytes(needed), bytes(available));
    let hint = "measure fewer sequences at once (-b) or a smaller depth (-d)";
    Err(Kind::Temporary.error(message).hint(hint))
}

fn facts(recipe: &Recipe, model: &ResolvedModel, spec: &EngineSpec) -> Result<BenchModel, CommandError> {
    let ResolvedModel { files: resolved, options, .. } = model;
    let about = model_facts(&resolved.source)?;
    let lasting = spec.model.groups.iter().filter(|group| group.kind == KvKind::Full);
    let kv_bytes = lasting.map(|group| group.page_bytes as u64).sum::<u64>() / PAGE_TOKENS as u64;
    let files = ModelFiles::open(&resolved.source)?;
    let converted = options.quantize.or(options.dtype);
    let mut setting = BenchSetting {
        model: recipe.name.clone(),
        kv_type: options.kv_type.name().to_owned(),
        quantize: converted.map(|dtype| dtype.name().to_owned()),
        ..BenchSetting::default()
    };
    let mut facts = BenchModel {
        architecture: about.architecture,
        parameters: Some(about.parameters),
        bytes: Some(about.bytes),
        quantization: about.quantization,
        context: Some(recipe.context),
        kv_bytes_per_token: Some(kv_bytes),
        ..BenchModel::default()
    };
    match options.device {
        Device::Cpu(cpu) => {
            setting.threads = cpu.threads;
            setting.threads_batch = cpu.threads_batch;
            setting.cpu = cpu.isa.name().to_owned();
            facts.kernels = Some(kernels_name(cpu.isa).to_owned());
            // The probed limits are the processor's.
            facts.cost = cost::cost(&cost::tensors(files.tensors()), converted, kv_bytes);
        }
        Device::Candle(kind) => setting.cpu = format!("{kind:?}").to_lowercase(),
    }
    facts.setting = setting;
    Ok(facts)
}
