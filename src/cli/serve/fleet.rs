//! `serve` with several models: from flags to a fleet.
//!
//! Invariants: every model is found at the start, so that a wrong name is an error there, and no weight is
//! read before a request asks for it; a model is loaded with the context and the KV of its estimate, whatever
//! else is loaded, so that its answers and limits do not depend on its neighbours.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::Args;

use super::{ServeArgs, load_app, settings};
use crate::cli::error::{CommandError, Kind};
use crate::cli::flags::args::{ByteSize, EngineOptions, ModelArgs, TimeSpan};
use crate::cli::model::load;
use crate::cli::model::load::embedder::{is_embedder, is_reranker_by_name};
use crate::cli::serve::workers::IsolationArgs;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::report::bytes;
use llmctl_base::{LoadError, Notice};
use llmctl_hub::Resolved;
use llmctl_models::hints::Frontend;
use llmctl_models::load::{LoadOptions, MemoryNeed, ModelFiles, memory_need, model_facts};
use llmctl_serve::fleet::{Fleet, Member, OnLost};
use llmctl_serve::shared::ServerShared;

/// Memory of an embedding model beside its weights, in bytes.
const EMBEDDER_BYTES: u64 = 64 << 20;

/// A model with less room than this, in tokens, cannot answer.
const LEAST_CONTEXT: usize = 2;

/// Flags of several models.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Several models")]
pub struct FleetArgs {
    /// Serve all models in this folder too: each .gguf file and each model folder, under its name
    #[arg(long, value_name = "DIR")]
    pub models_folder: Option<PathBuf>,

    /// Memory of all models together, KV included (default: what is available at the start)
    ///
    /// Without --ctx and --kv-memory, a model gets a context and KV that fit half of it with its weights, or all of it if the weights
    /// alone need more than half. The rest is shared by the models that fit beside it.
    #[arg(long, value_name = "SIZE")]
    pub model_memory: Option<ByteSize>,

    /// Unload a model that has been idle for this long (default: when others need its memory)
    #[arg(long, value_name = "TIME")]
    pub keep_alive: Option<TimeSpan>,

    /// Load this model at the start and never unload it; may be repeated
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub pin: Vec<String>,

    /// All values of --model; filled in after the parse.
    #[arg(skip)]
    pub models: Vec<String>,
}

impl FleetArgs {
    /// Returns whether models are loaded when they are asked for.
    pub fn is_asked(&self) -> bool {
        let Self { models_folder, model_memory, keep_alive, pin, models } = self;
        let has_flag = models_folder.is_some() || model_memory.is_some() || keep_alive.is_some();
        models.len() > 1 || has_flag || !pin.is_empty()
    }
}

/// A model of the command line.
struct AskedModel {
    reference: Option<String>,
    resolved: Resolved,
    is_pinned: bool,
    /// It is for vectors or scores, by its files or because --embedding-model names it.
    is_embedder: bool,
}

/// Context and KV of a model, and the memory that it takes with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MemoryPlan {
    /// `None` for a model that writes no text.
    limits: Option<(usize, u64)>,
    bytes: u64,
}

/// Finds all models, and loads those that are pinned. Returns the references of those that may write text, too.
///
/// # Errors
/// A usage error for a flag that is for one model; a model that is not there; why a pinned one cannot be loaded.
pub fn load(
    args: &ServeArgs,
    shared: ServerShared,
    terminal: &Terminal,
) -> Result<(Fleet, Vec<Option<String>>), CommandError> {
    check_flags(args)?;
    let models = find_all(args, terminal)?;
    check_names(&models, &args.fleet.pin)?;
    let budget = budget(args, terminal)?;
    let members = models.iter().enumerate().map(|(index, model)| {
        let aliases = if index == 0 { args.listen.alias.clone() } else { Vec::new() };
        member(args, model, aliases, &shared, budget, terminal)
    });
    let fleet = Fleet::new(shared.clone(), settings(args), budget, members.collect());
    for model in models.iter().filter(|model| model.is_pinned) {
        let name = &model.resolved.name;
        let why = |why| Kind::Failure.error(why);
        fleet
            .load_now(name)
            .map_err(|error| why(error).context(format!("loading {name}, which is pinned")))?;
    }
    if budget < u64::MAX {
        terminal.detail(&format!("{} of memory for all models together", bytes(budget)));
    }
    let references = models.into_iter().filter(|model| !model.is_embedder).map(|model| model.reference);
    Ok((fleet, references.collect()))
}

/// Refuses flags that would mean something else for each model.
fn check_flags(args: &ServeArgs) -> Result<(), CommandError> {
    let ServeArgs { model, listen, embedding, .. } = args;
    let for_one = [
        (listen.model_id.is_some(), "--model-id"),
        (model.draft_model.is_some(), "--draft-model"),
        (model.chat_template.is_some(), "--chat-template"),
        (model.bos_id.is_some(), "--bos-id"),
        (!model.eos_id.is_empty(), "--eos-id"),
        (model.images.mmproj.is_some(), "--mmproj"),
        (!model.lora.is_empty(), "--lora"),
        (!model.remote.engine.is_empty(), "--engine"),
        (embedding.task.is_some(), "--task"),
        (embedding.pooling.is_some(), "--pooling"),
    ];
    if let Some((_, flag)) = for_one.iter().find(|(is_given, _)| *is_given) {
        let message = format!("{flag} is for one model, and this server has several, or unloads its model");
        return Err(CommandError::usage(message));
    }
    args.isolation.num_workers().map(drop)
}

/// Finds the models of all flags, in order.
fn find_all(args: &ServeArgs, terminal: &Terminal) -> Result<Vec<AskedModel>, CommandError> {
    let FleetArgs { pin, .. } = &args.fleet;
    let find = |reference: Option<String>, is_embedder: bool| {
        let model = ModelArgs { model: reference.clone(), ..args.model.clone() };
        let resolved = load::resolve(&model, terminal)?;
        let names = [Some(&resolved.name), reference.as_ref()];
        let is_named = |pinned: &String| names.iter().flatten().any(|name| *name == pinned);
        // The model of --embedding-model is there from the start, as beside a single model.
        let is_pinned = is_embedder || pin.iter().any(is_named);
        let is_embedder = is_embedder || computes_vectors(&resolved);
        Ok(AskedModel { is_pinned, reference, resolved, is_embedder })
    };
    let mut found: Vec<AskedModel> = references(&args.fleet, terminal)?
        .into_iter()
        .map(|model| find(model, false))
        .collect::<Result<_, CommandError>>()?;
    if let Some(reference) = &args.embedding.embedding_model {
        found.push(find(Some(reference.clone()), true)?);
    }
    Ok(without_twins(found))
}

/// Keeps one of the models with the same files, the pinned one if one of them is: a folder may hold a model that --model or --embedding-model names as well.
fn without_twins(found: Vec<AskedModel>) -> Vec<AskedModel> {
    let mut kept: Vec<(PathBuf, AskedModel)> = Vec::new();
    for model in found {
        let path = model.resolved.source.path();
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        match kept.iter_mut().find(|(known, _)| *known == path) {
            None => kept.push((path, model)),
            Some((_, twin)) if model.is_pinned && !twin.is_pinned => *twin = model,
            Some(_) => {}
        }
    }
    kept.into_iter().map(|(_, model)| model).collect()
}

/// Returns the references of all models that may write text; `None` is the model inside llmctl.
///
/// # Errors
/// Those of reading --models-folder.
fn references(args: &FleetArgs, terminal: &Terminal) -> Result<Vec<Option<String>>, CommandError> {
    let mut references: Vec<Option<String>> = args.models.iter().cloned().map(Some).collect();
    if let Some(folder) = &args.models_folder {
        references.extend(in_folder(folder, terminal)?.into_iter().map(Some));
    }
    if references.is_empty() {
        references.push(None);
    }
    Ok(references)
}

/// Returns the models in a folder, by name: files of GGUF, the first part of split ones, and folders with a config.json. Links to
/// nothing are none; names that are not UTF-8 are left out with a warning.
fn in_folder(folder: &Path, terminal: &Terminal) -> Result<Vec<String>, CommandError> {
    let shown = || format!("--models-folder: {}", folder.display());
    let entries = fs::read_dir(folder).map_err(|error| {
        let kind = if error.kind() == std::io::ErrorKind::NotFound { Kind::NotFound } else { Kind::Io };
        CommandError::new(kind, error).context(shown())
    })?;
    let mut paths: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    paths.retain(|path| is_model(path));
    paths.sort();
    let named = |path: PathBuf| match path.into_os_string().into_string() {
        Ok(name) => Some(name),
        Err(name) => {
            terminal.warn(format!("{name:?} is left out: its name is not UTF-8"));
            None
        }
    };
    let names: Vec<String> = paths.into_iter().filter_map(named).collect();
    if names.is_empty() {
        let message = format!("{} holds neither a .gguf file nor a model folder", shown());
        return Err(Kind::NotFound.error(message));
    }
    Ok(names)
}

fn is_model(path: &Path) -> bool {
    if path.is_dir() {
        return path.join("config.json").is_file();
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let Some(stem) = name.strip_suffix(".gguf").filter(|_| path.exists()) else { return false };
    let part = stem.rsplit_once("-of-").and_then(|(begin, _)| begin.rsplit_once('-')).map(|(_, part)| part);
    let is_later_part = part.and_then(|part| part.parse::<u32>().ok()).is_some_and(|part| part > 1);
    !is_later_part && !stem.starts_with("mmproj")
}

/// Checks that no two models have one name, and that pinned names exist.
fn check_names(models: &[AskedModel], pinned: &[String]) -> Result<(), CommandError> {
    for (index, model) in models.iter().enumerate() {
        let name = &model.resolved.name;
        if let Some(other) = models[..index].iter().find(|other| other.resolved.name == *name) {
            let (first, second) = (other.resolved.source.path(), model.resolved.source.path());
            let message =
                format!("two models are called {name:?}: {} and {}", first.display(), second.display());
            return Err(CommandError::usage(message).hint("rename one of the files or folders"));
        }
    }
    let is_known = |pin: &String| {
        models.iter().any(|model| model.resolved.name == *pin || model.reference.as_ref() == Some(pin))
    };
    match pinned.iter().find(|pin| !is_known(pin)) {
        Some(pin) => {
            let names: Vec<&str> = models.iter().map(|model| model.resolved.name.as_str()).collect();
            Err(CommandError::usage(format!("--pin {pin}: the models are {}", names.join(", "))))
        }
        None => Ok(()),
    }
}

/// Returns the memory for all models: the flag's, or what is available; without a limit where that is unknown.
fn budget(args: &ServeArgs, terminal: &Terminal) -> Result<u64, CommandError> {
    let asked = args.capacity.options(&args.engine);
    let available = load::options(&args.model, asked, terminal)?.available_memory;
    Ok(args.fleet.model_memory.map(|size| size.0).or(available).unwrap_or(u64::MAX))
}

fn member(
    args: &ServeArgs,
    model: &AskedModel,
    mut aliases: Vec<String>,
    shared: &ServerShared,
    budget: u64,
    terminal: &Terminal,
) -> Member {
    let id = model.resolved.name.clone();
    // A name of the configuration file is one that clients may use too.
    let named = model.reference.iter().filter(|name| args.model.aliases.contains_key(*name) && **name != id);
    aliases.extend(named.cloned());
    let mut args = args.clone();
    args.model.model.clone_from(&model.reference);
    args.fleet = FleetArgs::default();
    args.embedding.embedding_model = None;
    args.embedding.beside.clear();
    args.listen.alias.clone_from(&aliases);
    let args = Arc::new(args);
    let plan = Arc::new(OnceLock::new());
    let estimate = {
        let (args, resolved, terminal) = (Arc::clone(&args), model.resolved.clone(), terminal.clone());
        let plan = Arc::clone(&plan);
        Box::new(move || {
            let found = plan_memory(&args, &resolved, budget, &terminal);
            let found = found.map_err(|error| for_clients(&error, &resolved, &terminal))?;
            Ok(plan.get_or_init(|| found).bytes)
        })
    };
    let source = model.resolved.source.clone();
    let facts = Box::new(move || model_facts(&source).ok());
    let texts = {
        let (args, terminal) = (Arc::clone(&args), terminal.clone());
        Box::new(move || {
            let texts = load::load_texts(&args.model, args.capacity.options(&args.engine), &terminal);
            let texts = texts.map_err(|error| error.to_string())?.for_frontend(Frontend::Http);
            Ok(texts.into_served(None, args.sampling.given.clone()))
        })
    };
    let (shared, resolved, terminal) = (shared.clone(), model.resolved.clone(), terminal.clone());
    let load = Box::new(move |on_lost: OnLost| {
        let args = planned(&args, plan.get());
        let loaded = load_app(&args, shared.clone(), on_lost, &terminal);
        loaded.map_err(|error| for_clients(&error, &resolved, &terminal))
    });
    let AskedModel { is_pinned, is_embedder, .. } = *model;
    Member { id, aliases, is_pinned, is_embedder, estimate, facts, texts, load }
}

/// Returns why a model cannot be used, without the folder that it is in. That is for the log.
fn for_clients(error: &CommandError, model: &Resolved, terminal: &Terminal) -> String {
    terminal.warn(format!("{}: {error}", model.name));
    let folder = model.source.path().parent().map(|folder| folder.join("").display().to_string());
    folder
        .filter(|folder| !folder.is_empty())
        .map_or(error.to_string(), |it| error.to_string().replace(&it, ""))
}

/// Returns whether a model computes vectors or scores instead of text.
fn computes_vectors(resolved: &Resolved) -> bool {
    is_embedder(resolved) || is_reranker_by_name(resolved)
}

/// Returns the flags that load a model with the memory of its plan.
fn planned(args: &ServeArgs, plan: Option<&MemoryPlan>) -> ServeArgs {
    let mut args = args.clone();
    match plan.and_then(|plan| plan.limits) {
        Some((context, kv)) => {
            args.model.ctx = Some(context);
            args.engine.kv_memory = (kv > 0).then_some(ByteSize(kv));
        }
        // Vectors are computed in this process.
        None => args.isolation = IsolationArgs::default(),
    }
    args
}

/// Computes context, KV and memory of a model, from its headers. One that needs more than the budget gets the least that it needs,
/// which is then refused with both numbers.
fn plan_memory(
    args: &ServeArgs,
    resolved: &Resolved,
    budget: u64,
    terminal: &Terminal,
) -> Result<MemoryPlan, CommandError> {
    if computes_vectors(resolved) {
        let weights = model_facts(&resolved.source)?.bytes;
        return Ok(MemoryPlan { limits: None, bytes: weights + weights / 4 + EMBEDDER_BYTES });
    }
    let asked = args.capacity.options(&args.engine);
    let mut options = load::options(&args.model, asked, terminal)?;
    let files = ModelFiles::of(resolved)?;
    let most = model_facts(&resolved.source)?.decoder?.context_length;
    if let Some(context) = options.context.filter(|context| *context > most) {
        terminal.note(format!(
            "{}: --ctx {context} is more than its {most} tokens, which it gets",
            resolved.name
        ));
        options.context = Some(most);
    }
    let mut notices = Vec::new();
    let need = fitting(&files, &options, budget, &mut notices)?;
    notices.iter().for_each(|notice| terminal.note(format!("{}: {notice}", resolved.name)));
    let kv = kv_bytes(need, asked, budget);
    let num_engines = args.isolation.num_workers()?.unwrap_or(1) as u64;
    let bytes = need.base.saturating_add(kv).saturating_mul(num_engines);
    Ok(MemoryPlan { limits: Some((need.context, kv)), bytes })
}

/// Returns what the model needs with the longest context, at most the asked one, that fits half of the budget, or all of it.
fn fitting(
    files: &ModelFiles,
    options: &LoadOptions,
    budget: u64,
    notices: &mut Vec<Notice>,
) -> Result<MemoryNeed, LoadError> {
    if budget == u64::MAX {
        return memory_need(files, &LoadOptions { available_memory: None, ..options.clone() }, notices);
    }
    for available in [budget / 2, budget] {
        let within = LoadOptions { available_memory: Some(available), ..options.clone() };
        let mut heard = Vec::new();
        match memory_need(files, &within, &mut heard) {
            Err(LoadError::TooBig { .. } | LoadError::KvTooLarge { .. }) => {}
            need => {
                notices.append(&mut heard);
                return need;
            }
        }
    }
    let context = options.context.or(Some(LEAST_CONTEXT));
    memory_need(files, &LoadOptions { available_memory: None, context, ..options.clone() }, notices)
}

/// Returns the KV of a model: --kv-memory, or a full context for each of --parallel requests as far as half of the budget allows.
fn kv_bytes(need: MemoryNeed, asked: EngineOptions, budget: u64) -> u64 {
    let wanted = need.kv.saturating_mul(asked.sharing.max_running as u64);
    asked.kv_memory.unwrap_or_else(|| wanted.min((budget / 2).saturating_sub(need.base)).max(need.kv))
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::cli::flags::args::ColorWhen;

    #[test]
    fn folders_hold_files_and_folders_of_models() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let terminal = &Terminal::new(ColorWhen::Never, 0, true);
        let in_folder = |folder: &Path| in_folder(folder, terminal);
        assert_eq!(in_folder(folder.path()).map_err(|error| error.kind), Err(Kind::NotFound));
        for file in
            ["b.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-b.gguf", "notes.txt"]
        {
            fs::write(path(file), "").expect("a file");
        }
        for (dir, file) in [("a", "config.json"), ("empty", "readme.md")] {
            fs::create_dir(path(dir)).expect("a folder");
            fs::write(path(dir).join(file), "{}").expect("a file");
        }
        #[cfg(target_os = "linux")]
        fs::write(folder.path().join(std::ffi::OsStr::from_bytes(b"\xff.gguf")), "").expect("a file");
        let found = in_folder(folder.path()).unwrap_or_default();
        let names: Vec<_> = found.iter().map(|path| path.rsplit('/').next().unwrap_or_default()).collect();
        assert_eq!(names, ["a", "b.gguf", "big-00001-of-00002.gguf"]);
        assert_eq!(in_folder(&path("none")).map_err(|error| error.kind), Err(Kind::NotFound));
    }

    #[test]
    fn kv_is_for_all_requests_as_far_as_half_of_the_budget_allows() {
        let need = MemoryNeed { context: 8, base: 100, kv: 50 };
        let asked = |kv_memory| {
            let mut options = crate::cli::flags::args::EngineArgs::default().resolve(false);
            options.sharing.max_running = 4;
            EngineOptions { kv_memory, ..options }
        };
        assert_eq!(kv_bytes(need, asked(None), u64::MAX), 200);
        assert_eq!(kv_bytes(need, asked(None), 500), 150);
        assert_eq!(kv_bytes(need, asked(None), 160), 50, "one context at least");
        assert_eq!(kv_bytes(need, asked(Some(70)), 500), 70);
    }
}
