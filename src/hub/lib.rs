//! Resolves model references of `--model` to the files to load: paths, aliases, the shared Hugging Face
//! cache, ollama's store.
//!
//! Order: an existing path wins, then an alias, then the built-in models, then the cache. An ambiguous
//! reference is an error that lists the candidates. The only choice made for the user is the file of a
//! repository that has several ([`choice`]), with a notice. This module only reads; `remote` downloads. The
//! caller reads environment variables and fills in [`HubPaths`].

pub mod builtin;
pub mod cache;
pub mod choice;
pub mod ollama;
pub mod quant_tag;
pub mod reference;
mod remote;
pub mod repo_files;
pub mod upkeep;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use builtin::BuiltIn;
pub use cache::{CachedModel, Repo, Snapshot, Summary, list, repos, summary};
use choice::{CHECKPOINT_TAG, why_no_model};
pub use choice::{FileChoice, FileChoiceError, FileRequest, ModelKind, choose, fits};
use llmctl_base::error::{LoadError, ModelCandidate};
use llmctl_base::notice::Notice;
use quant_tag::{GgufGroup, group_shards, projector_of};
use reference::ReferenceForm;
pub use reference::{HubRef, ModelRef, Selector};
pub use remote::{
    FileHash, HubClient, HubError, HubProxies, HubSettings, HubToken, PullEvent, PullExtent, PullObserver,
    PullPlan, RemoteFile, RetrySettings,
};
pub use repo_files::{ListedFile, text_files};

/// Names that the configuration gives to model references.
pub type Aliases = BTreeMap<String, String>;

/// Folders to search, from the caller's environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HubPaths {
    /// The Hugging Face cache (`.../huggingface/hub`); `None` if there is none.
    pub cache: Option<PathBuf>,
    /// Folder for `~/` in a path that no shell has expanded (one in a config file).
    pub home: Option<PathBuf>,
    /// Ollama's stores, in the order in which they are searched.
    pub ollama: Vec<PathBuf>,
    /// The machine's memory in bytes, for the choice among several quantisations; `None` if it is unknown.
    pub memory: Option<u64>,
}

/// The files that the loader opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A GGUF file; the first part if it is split.
    Gguf(PathBuf),
    /// A folder with config.json and safetensors.
    Folder(PathBuf),
    /// A GGUF file inside the binary.
    BuiltIn(&'static BuiltIn),
}

impl ModelSource {
    pub fn path(&self) -> &Path {
        match self {
            ModelSource::Gguf(path) | ModelSource::Folder(path) => path,
            ModelSource::BuiltIn(model) => model.path(),
        }
    }

    /// Returns the built-in model, if this is one.
    pub fn built_in(&self) -> Option<&'static BuiltIn> {
        match self {
            ModelSource::BuiltIn(model) => Some(model),
            ModelSource::Gguf(_) | ModelSource::Folder(_) => None,
        }
    }
}

/// A resolved reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// Name of the model: `org/repo`, `org/repo:Q4_K_M`, a file's stem, a folder's name.
    pub name: String,
    pub source: ModelSource,
    /// Choices made for the user, one sentence each.
    pub notices: Vec<Notice>,
    /// Snapshot of the cache that the files belong to.
    pub snapshot: Option<SnapshotRef>,
    /// GGUF file of the vision tower (mmproj) that belongs to the model file.
    pub mmproj: Option<PathBuf>,
}

/// A repository of the hub at one of its commits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRef {
    pub repo: String,
    pub revision: String,
    folder: PathBuf,
}

impl Resolved {
    pub fn built_in(model: &'static BuiltIn) -> Self {
        Self::new(model.name.to_owned(), ModelSource::BuiltIn(model))
    }

    pub fn new(name: String, source: ModelSource) -> Self {
        Self { name, source, notices: Vec::new(), snapshot: None, mmproj: None }
    }

    /// Returns a reference that finds the same files from any directory: `hf:org/repo@revision:file` for GGUF files of the
    /// cache, `:safetensors` instead of a file for a checkpoint, a name for a built-in model, else an absolute path. `None` if the path is not UTF-8.
    pub fn reference(&self) -> Option<String> {
        let path = match &self.source {
            ModelSource::BuiltIn(model) => return Some(model.name.to_owned()),
            ModelSource::Gguf(path) | ModelSource::Folder(path) => path,
        };
        let Some(SnapshotRef { repo, revision, folder }) = &self.snapshot else {
            return Some(std::path::absolute(path).ok()?.to_str()?.to_owned());
        };
        // The tag of a checkpoint keeps the reference unambiguous when a GGUF file is added to the snapshot.
        let file = match path.strip_prefix(folder).ok()?.to_str()? {
            "" => CHECKPOINT_TAG,
            inside => inside,
        };
        Some(format!("hf:{repo}@{revision}:{file}"))
    }
}

/// Limit for aliases that name aliases.
const MAX_ALIAS_DEPTH: usize = 8;

/// Finds the files of `reference`.
///
/// # Errors
/// - [`LoadError::NotFound`]: a missing path, or a missing part of a split file
/// - [`LoadError::UnknownModel`]: neither path nor alias nor cached; carries similar names
/// - [`LoadError::AmbiguousModel`]: several models match
/// - [`LoadError::InvalidReference`]: neither a path nor the form of a repository
/// - [`LoadError::Unsupported`]: a file or folder without a model that llmctl reads
pub fn resolve(reference: &ModelRef, paths: &HubPaths, aliases: &Aliases) -> Result<Resolved, LoadError> {
    let mut reference = reference.clone();
    let mut notices = Vec::new();
    for _ in 0..MAX_ALIAS_DEPTH {
        let search = ReferenceLookup { reference: &reference, paths, aliases };
        match search.step()? {
            LookupStep::Found(mut resolved) => {
                resolved.notices.splice(0..0, notices);
                return Ok(resolved);
            }
            LookupStep::Alias(target) => {
                notices.push(Notice::Alias { name: reference.text().to_string(), target: target.to_owned() });
                reference = ModelRef::parse(target)?;
            }
        }
    }
    let message = format!("its aliases form a loop (more than {MAX_ALIAS_DEPTH} steps)");
    Err(LoadError::InvalidReference { reference: reference.text().to_owned(), message })
}

/// Finds the texts of a model whose weights need not be here: as [`resolve`] does, else in a folder or a cached snapshot that
/// has texts and no model.
///
/// # Errors
/// Those of [`resolve`].
pub fn resolve_texts(
    reference: &ModelRef,
    paths: &HubPaths,
    aliases: &Aliases,
    has_texts: impl Fn(&Path) -> bool,
) -> Result<Resolved, LoadError> {
    let error = match resolve(reference, paths, aliases) {
        Ok(resolved) => return Ok(resolved),
        Err(error) => error,
    };
    let path = Path::new(reference.text());
    if has_texts(path) {
        return Ok(Resolved::new(folder_name(path), ModelSource::Folder(path.to_path_buf())));
    }
    let Ok(hub) = remote_form(reference, aliases) else { return Err(error) };
    let Ok(repo) = cached_repo(reference, &hub, paths, aliases) else { return Err(error) };
    match repo.snapshot(hub.revision.as_deref()) {
        Ok(Snapshot { dir, commit }) if has_texts(&dir) => {
            let snapshot = SnapshotRef { repo: repo.id.clone(), revision: commit, folder: dir.clone() };
            Ok(Resolved { snapshot: Some(snapshot), ..Resolved::new(repo.id, ModelSource::Folder(dir)) })
        }
        _ => Err(error),
    }
}

/// Returns the repository of the hub that `reference` means if no file has that name.
///
/// # Errors
/// [`LoadError::InvalidReference`] for a path, and for a text without the form of a repository.
pub fn remote_form(reference: &ModelRef, aliases: &Aliases) -> Result<HubRef, LoadError> {
    let mut reference = reference.clone();
    for _ in 0..MAX_ALIAS_DEPTH {
        let text = reference.text().to_owned();
        let invalid = |message: String| LoadError::InvalidReference { reference: text.clone(), message };
        match reference.form() {
            ReferenceForm::Path(_) => {
                return Err(invalid("it is a path, not a repository org/name".to_owned()));
            }
            ReferenceForm::Ollama(_) => {
                return Err(invalid("it is a model of ollama, not a repository org/name".to_owned()));
            }
            ReferenceForm::Hub(hub) => return Ok(hub.clone()),
            ReferenceForm::Open(hub) => match aliases.get(&text) {
                Some(target) => reference = ModelRef::parse(target)?,
                None => return hub.clone().map_err(invalid),
            },
        }
    }
    let message = format!("its aliases form a loop (more than {MAX_ALIAS_DEPTH} steps)");
    Err(LoadError::InvalidReference { reference: reference.text().to_owned(), message })
}

/// Finds the cached repository that `hub`, the meaning of `reference`, names.
///
/// # Errors
/// [`LoadError::UnknownModel`] with similar names, [`LoadError::AmbiguousModel`] for a bare name of several owners.
pub fn cached_repo(
    reference: &ModelRef,
    hub: &HubRef,
    paths: &HubPaths,
    aliases: &Aliases,
) -> Result<Repo, LoadError> {
    ReferenceLookup { reference, paths, aliases }.find_repo(hub)
}

enum LookupStep<'a> {
    Found(Resolved),
    Alias(&'a str),
}

/// The lookup of one reference.
struct ReferenceLookup<'a> {
    reference: &'a ModelRef,
    paths: &'a HubPaths,
    aliases: &'a Aliases,
}

impl<'a> ReferenceLookup<'a> {
    fn step(&self) -> Result<LookupStep<'a>, LoadError> {
        match self.reference.form() {
            ReferenceForm::Path(path) => self.local(&self.expand_home(path)).map(LookupStep::Found),
            ReferenceForm::Hub(hub) => self.cached(hub).map(LookupStep::Found),
            ReferenceForm::Ollama(name) => ollama::find(name, &self.paths.ollama).map(LookupStep::Found),
            ReferenceForm::Open(hub) => self.open(hub),
        }
    }

    /// Resolves `name` or `org/repo`, which may also be a path or an alias.
    fn open(&self, hub: &Result<HubRef, String>) -> Result<LookupStep<'a>, LoadError> {
        let path = Path::new(self.reference.text());
        let alias = self.aliases.get(self.reference.text());
        let built_in = BuiltIn::find(self.reference.text());
        if path.exists() {
            // A folder without a model does not hide an alias or another model of the same name.
            match self.local(path) {
                Ok(found) => return Ok(LookupStep::Found(found)),
                Err(LoadError::Unsupported { .. }) if alias.is_some() || built_in.is_some() => {}
                Err(error @ LoadError::Unsupported { .. }) => {
                    let cached = hub.as_ref().ok().and_then(|hub| self.cached(hub).ok());
                    return cached.map(LookupStep::Found).ok_or(error);
                }
                Err(error) => return Err(error),
            }
        }
        match (alias, built_in, hub) {
            (Some(target), ..) => Ok(LookupStep::Alias(target)),
            (None, Some(model), _) => Ok(LookupStep::Found(Resolved::built_in(model))),
            (None, None, Ok(hub)) => self.cached(hub).map(LookupStep::Found),
            (None, None, Err(message)) => Err(LoadError::InvalidReference {
                reference: self.reference.text().to_owned(),
                message: message.clone(),
            }),
        }
    }

    fn expand_home(&self, path: &Path) -> PathBuf {
        match (path.strip_prefix("~"), &self.paths.home) {
            (Ok(rest), Some(home)) => home.join(rest),
            _ => path.to_path_buf(),
        }
    }

    fn local(&self, path: &Path) -> Result<Resolved, LoadError> {
        // `metadata` instead of `exists`: a folder without permission differs from a missing file.
        fs::metadata(path).map_err(|error| LoadError::io(path, &error))?;
        if path.is_dir() { self.local_folder(path) } else { local_file(path) }
    }

    fn local_folder(&self, path: &Path) -> Result<Resolved, LoadError> {
        let name = folder_name(path);
        if cache::is_checkpoint(path) {
            return Ok(Resolved::new(name, ModelSource::Folder(path.to_path_buf())));
        }
        let listing = cache::listing(path, 0);
        let mut files = group_shards(&listing);
        let candidate = |file: &GgufGroup| ModelCandidate {
            reference: path.join(&file.first).display().to_string(),
            bytes: Some(file.bytes),
        };
        match files.len() {
            0 => Err(LoadError::Unsupported { path: path.to_path_buf(), message: why_no_model(&listing) }),
            1 => gguf_in(path, &listing, &files.remove(0), name),
            _ => Err(self.ambiguous(files.iter().map(candidate).collect())),
        }
    }

    fn cached(&self, hub: &HubRef) -> Result<Resolved, LoadError> {
        let repo = self.find_repo(hub)?;
        let snapshot = match repo.snapshot(hub.revision.as_deref()) {
            Ok(snapshot) => snapshot,
            Err(candidates) if candidates.is_empty() => return Err(self.unknown(Vec::new())),
            Err(candidates) if hub.revision.is_some() => return Err(self.unknown(candidates)),
            Err(candidates) => {
                return Err(self.ambiguous(candidates.into_iter().map(ModelCandidate::from).collect()));
            }
        };
        let id = match &hub.revision {
            Some(revision) => format!("{}@{revision}", repo.id),
            None => repo.id.clone(),
        };
        let listing = cache::listing(&snapshot.dir, cache::SNAPSHOT_DEPTH);
        let request = FileRequest {
            id: &id,
            files: &listing,
            selector: hub.selector.as_ref(),
            memory: self.paths.memory,
            is_cached: true,
        };
        let chosen =
            choose(&request).map_err(|error| error.into_load_error(self.reference.text(), &snapshot.dir))?;
        let mut resolved = found(&repo, &snapshot, chosen)?;
        let revision = snapshot.commit.clone();
        resolved.snapshot = Some(SnapshotRef { repo: repo.id, revision, folder: snapshot.dir });
        Ok(resolved)
    }

    /// Finds the cached repository of that name; a bare name may be the end of a single `org/name`.
    fn find_repo(&self, hub: &HubRef) -> Result<Repo, LoadError> {
        let repos = repos(self.paths.cache.as_deref());
        let wanted = hub.repo_id();
        if let Some(exact) = repos.iter().find(|repo| repo.id == wanted) {
            return Ok(exact.clone());
        }
        let same = |repo: &&Repo| {
            repo.id.eq_ignore_ascii_case(&wanted)
                || (hub.org.is_none() && repo.name().eq_ignore_ascii_case(&hub.repo))
        };
        let mut matches: Vec<&Repo> = repos.iter().filter(same).collect();
        match matches.len() {
            0 => Err(self.unknown(resembling(&wanted, &repos, self.aliases))),
            1 => Ok(matches.remove(0).clone()),
            _ => Err(self.ambiguous(matches.iter().map(|repo| repo.id.clone().into()).collect())),
        }
    }

    fn unknown(&self, candidates: Vec<String>) -> LoadError {
        LoadError::UnknownModel { reference: self.reference.text().to_owned(), candidates }
    }

    fn ambiguous(&self, candidates: Vec<ModelCandidate>) -> LoadError {
        LoadError::AmbiguousModel { reference: self.reference.text().to_owned(), candidates }
    }
}

/// Returns the chosen model of a snapshot, after checking that all its files exist.
fn found(repo: &Repo, snapshot: &Snapshot, chosen: FileChoice) -> Result<Resolved, LoadError> {
    if let Some(missing) = &chosen.missing {
        return Err(LoadError::NotFound(snapshot.dir.join(missing)));
    }
    let (name, source) = match (&chosen.first, &chosen.tag) {
        (None, _) => (repo.id.clone(), ModelSource::Folder(snapshot.dir.clone())),
        (Some(first), None) => (format!("{}:{first}", repo.id), ModelSource::Gguf(snapshot.dir.join(first))),
        (Some(first), Some(tag)) => {
            (format!("{}:{tag}", repo.id), ModelSource::Gguf(snapshot.dir.join(first)))
        }
    };
    let mmproj = chosen.projector.map(|path| snapshot.dir.join(path));
    Ok(Resolved { notices: chosen.notice.into_iter().collect(), mmproj, ..Resolved::new(name, source) })
}

/// Resolves a file by path: GGUF by its magic or its name, or a part of a checkpoint folder.
fn local_file(path: &Path) -> Result<Resolved, LoadError> {
    let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if extension.eq_ignore_ascii_case("gguf") || has_gguf_magic(path)? {
        let listing = cache::listing(parent, 0);
        let group = group_shards(&listing).into_iter().find(|f| f.parts.iter().any(|part| part == file_name));
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        return match group {
            Some(file) => gguf_in(parent, &listing, &file, file.stem.clone()),
            // The folder's listing lacks it: a GGUF without the extension, such as a blob, or a projector requested
            // by name.
            None => Ok(Resolved::new(stem, ModelSource::Gguf(path.to_path_buf()))),
        };
    }
    if (extension == "safetensors" || file_name == "config.json") && cache::is_checkpoint(parent) {
        let source = ModelSource::Folder(parent.to_path_buf());
        return Ok(Resolved::new(folder_name(parent), source));
    }
    let message = "neither a GGUF file nor part of a folder with config.json and safetensors".to_owned();
    Err(LoadError::Unsupported { path: path.to_path_buf(), message })
}

fn has_gguf_magic(path: &Path) -> Result<bool, LoadError> {
    let io = |error: std::io::Error| LoadError::io(path, &error);
    let mut magic = Vec::with_capacity(4);
    fs::File::open(path).map_err(io)?.take(4).read_to_end(&mut magic).map_err(io)?;
    Ok(magic == b"GGUF")
}

/// Returns the first part of `file` of the folder with that listing, after checking that all parts exist.
fn gguf_in(
    folder: &Path,
    listing: &[ListedFile],
    file: &GgufGroup,
    name: String,
) -> Result<Resolved, LoadError> {
    if let Some(missing) = file.missing_part() {
        return Err(LoadError::NotFound(folder.join(missing)));
    }
    let mmproj = projector_of(listing, &file.first).map(|projector| folder.join(&projector.path));
    Ok(Resolved { mmproj, ..Resolved::new(name, ModelSource::Gguf(folder.join(&file.first))) })
}

/// Returns a folder's own name, also for `.` and `..`.
fn folder_name(path: &Path) -> String {
    let absolute = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    absolute.file_name().unwrap_or(absolute.as_os_str()).to_string_lossy().into_owned()
}

/// Returns aliases and cached repositories with names similar to `wanted`, closest first, at most five.
fn resembling(wanted: &str, repos: &[Repo], aliases: &Aliases) -> Vec<String> {
    let name = |id: &str| id.rsplit('/').next().unwrap_or(id).to_lowercase();
    let wanted_name = name(wanted);
    let score = |id: &str| {
        let id_name = name(id);
        let contained = id_name.contains(&wanted_name) || wanted_name.contains(&id_name);
        let by_name = strsim::jaro_winkler(&id_name, &wanted_name);
        let whole = strsim::jaro_winkler(&id.to_lowercase(), &wanted.to_lowercase());
        if contained { 1.0 } else { by_name.max(whole) }
    };
    let ids = aliases.keys().map(String::as_str).chain(repos.iter().map(|repo| repo.id.as_str()));
    let mut scored: Vec<(f64, &str)> = ids.map(|id| (score(id), id)).filter(|(s, _)| *s >= 0.8).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(5).map(|(_, id)| id.to_owned()).collect()
}
