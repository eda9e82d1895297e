//! Chooses the files of a model from the listing of a repository.
//!
//! One pure function, [`choose`], for local snapshots and remote repositories alike: the same listing,
//! selector and memory give the same files. Without a selector it takes Q4_K_M, or what
//! [`PREFERENCE`](super::quant_tag::PREFERENCE) names next, or a smaller file if that does not fit the
//! machine's memory. A choice made for the user is reported as a [`Notice`]; two models that fit equally are
//! an error that lists them.

use super::quant_tag::{GgufGroup, group_shards, is_companion, is_quantised, projector_of, rank};
use super::reference::Selector;
use super::repo_files::{Checkpoint, ListedFile, text_files};
use llmctl_base::error::{LoadError, ModelCandidate};
use llmctl_base::notice::{ChoiceReason, Notice};

/// Selects the safetensors checkpoint of a repository that has GGUF files, too: `org/repo:safetensors`.
pub const CHECKPOINT_TAG: &str = "safetensors";

/// Tag that ollama's users write for "no tag".
const DEFAULT_TAG: &str = "latest";

/// Most candidates in the error for a tag that no file has.
const MAX_CANDIDATES: usize = 8;

/// Storage format of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    Gguf,
    Safetensors,
}

impl ModelKind {
    pub const fn name(self) -> &'static str {
        match self {
            ModelKind::Gguf => "gguf",
            ModelKind::Safetensors => "safetensors",
        }
    }
}

/// The listing of a repository, and the request.
#[derive(Debug, Clone, Copy)]
pub struct FileRequest<'a> {
    /// `org/name`, with `@revision` if the user must write it; for references in errors and notices.
    pub id: &'a str,
    pub files: &'a [ListedFile],
    pub selector: Option<&'a Selector>,
    /// The machine's memory in bytes; `None` if it is unknown or does not count.
    pub memory: Option<u64>,
    /// True if the files are in the cache; only wording depends on it.
    pub is_cached: bool,
}

/// The files of one model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileChoice {
    /// Paths of all files that the model needs: the parts of a GGUF file in order; the texts, index and weights of a
    /// checkpoint.
    pub files: Vec<String>,
    /// The path that the loader opens: a GGUF file's first part (which may be missing), `None` for a checkpoint.
    pub first: Option<String>,
    /// Quantisation in upper case, if the names say it.
    pub tag: Option<String>,
    /// The file of the vision tower (mmproj) that belongs to a GGUF file; it is not among `files`.
    pub projector: Option<String>,
    /// Size of the weights.
    pub bytes: u64,
    /// The first missing part or shard.
    pub missing: Option<String>,
    /// The choice made for the user, if there was one.
    pub notice: Option<Notice>,
}

/// Error of choosing a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileChoiceError {
    /// The listing holds no model; the message says what it holds.
    NoModel(String),
    /// No file matches the selector. Lists references that would.
    Unknown(Vec<ModelCandidate>),
    /// Several models match.
    Ambiguous(Vec<ModelCandidate>),
}

impl FileChoiceError {
    /// Converts to the error of loading `reference`, whose files are at `path`.
    pub fn into_load_error(self, reference: &str, path: &std::path::Path) -> LoadError {
        let reference = reference.to_owned();
        match self {
            FileChoiceError::NoModel(message) => LoadError::Unsupported { path: path.to_owned(), message },
            FileChoiceError::Unknown(found) => {
                let candidates = found.into_iter().map(|candidate| candidate.reference).collect();
                LoadError::UnknownModel { reference, candidates }
            }
            FileChoiceError::Ambiguous(candidates) => LoadError::AmbiguousModel { reference, candidates },
        }
    }
}

/// Returns whether weights of that size leave room for KV, activations and other programs: with the kernels' layout, which
/// is up to a sixteenth larger than the file, they may take three quarters of `memory`.
pub fn fits(weight_bytes: u64, memory: Option<u64>) -> bool {
    memory.is_none_or(|memory| weight_bytes.saturating_add(weight_bytes / 16) <= memory / 4 * 3)
}

/// Returns the reference of a GGUF file in the repository `id`: by its tag if no other file has that, else by its path.
pub fn gguf_reference(id: &str, file: &GgufGroup, files: &[GgufGroup]) -> String {
    match &file.tag {
        Some(tag) if files.iter().filter(|other| other.has_tag(tag)).count() == 1 => format!("{id}:{tag}"),
        _ => format!("hf:{id}:{}", file.first),
    }
}

/// Chooses the files of the model that `request` means.
///
/// # Errors
/// [`FileChoiceError`]: no model in the listing, no file for the selector, or several.
pub fn choose(request: &FileRequest<'_>) -> Result<FileChoice, FileChoiceError> {
    let repository = ListedModels::of(request);
    match request.selector {
        Some(Selector::File(path)) => repository.by_file(path),
        Some(Selector::Quant(tag)) if tag.eq_ignore_ascii_case(CHECKPOINT_TAG) => {
            match &repository.checkpoint {
                Some(checkpoint) => Ok(repository.of_checkpoint(checkpoint, None)),
                None => Err(FileChoiceError::Unknown(repository.candidates(&repository.groups))),
            }
        }
        Some(Selector::Quant(tag)) if !tag.eq_ignore_ascii_case(DEFAULT_TAG) => repository.by_tag(tag),
        Some(Selector::Quant(_)) | None => repository.default_model(),
    }
}

/// The models in a listing.
struct ListedModels<'a> {
    request: &'a FileRequest<'a>,
    groups: Vec<GgufGroup>,
    checkpoint: Option<Checkpoint>,
}

impl<'a> ListedModels<'a> {
    fn of(request: &'a FileRequest<'a>) -> Self {
        let (groups, checkpoint) = (group_shards(request.files), Checkpoint::find(request.files));
        Self { request, groups, checkpoint }
    }

    /// Finds a GGUF file by path. A companion of a model is returned, too: the user asked for it by name.
    fn by_file(&self, path: &str) -> Result<FileChoice, FileChoiceError> {
        if let Some(group) = self.groups.iter().find(|group| group.parts.iter().any(|part| part == path)) {
            return Ok(self.of_group(group, None));
        }
        let file = self.request.files.iter().find(|file| file.path == path && is_companion(&file.path));
        let Some(file) = file else {
            return Err(FileChoiceError::Unknown(self.limited(path, &self.groups)));
        };
        Ok(FileChoice {
            files: vec![file.path.clone()],
            first: Some(file.path.clone()),
            bytes: file.bytes,
            ..FileChoice::default()
        })
    }

    /// Finds a GGUF file by tag: one with exactly that tag, else one whose name ends in it (`Q4_K_XL` finds `UD-Q4_K_XL`),
    /// else one whose path contains it before a dot or a dash, as llama.cpp searches.
    fn by_tag(&self, tag: &str) -> Result<FileChoice, FileChoiceError> {
        let rules: [fn(&GgufGroup, &str) -> bool; 3] =
            [GgufGroup::has_tag, GgufGroup::ends_with_tag, GgufGroup::contains_tag];
        let matching = |rule: &fn(&GgufGroup, &str) -> bool| {
            self.groups.iter().filter(|group| rule(group, tag)).cloned().collect::<Vec<_>>()
        };
        match rules.iter().map(matching).find(|found| !found.is_empty()).as_deref() {
            None => Err(FileChoiceError::Unknown(self.limited(tag, &self.groups))),
            Some([found]) => Ok(self.of_group(found, None)),
            Some(several) => Err(FileChoiceError::Ambiguous(self.candidates(several))),
        }
    }

    /// Chooses for a user who named no file: a quantised GGUF file, else the checkpoint, else any single GGUF file.
    fn default_model(&self) -> Result<FileChoice, FileChoiceError> {
        let whole: Vec<&GgufGroup> =
            self.groups.iter().filter(|group| group.missing_part().is_none()).collect();
        let groups = if whole.is_empty() { self.groups.iter().collect() } else { whole };
        let best = match *groups {
            [only] => Some((only, ChoiceReason::Preferred)),
            _ => preferred(&groups, self.request.memory),
        };
        let is_quantised = |group: &GgufGroup| group.tag.as_deref().is_some_and(is_quantised);
        match (&self.checkpoint, best) {
            (Some(checkpoint), best) if !best.as_ref().is_some_and(|(group, _)| is_quantised(group)) => {
                Ok(self.of_checkpoint(checkpoint, self.notice(CHECKPOINT_TAG, ChoiceReason::Preferred)))
            }
            (_, Some((group, reason))) => Ok(self.of_group(group, self.notice(group.name(), reason))),
            (_, None) if groups.is_empty() => Err(FileChoiceError::NoModel(why_no_model(self.request.files))),
            (_, None) => Err(FileChoiceError::Ambiguous(self.candidates(&self.groups))),
        }
    }

    /// Returns the notice of a choice among several models.
    fn notice(&self, chosen: &str, reason: ChoiceReason) -> Option<Notice> {
        let of_groups = self.groups.iter().map(|group| group.name().to_owned());
        let names: Vec<String> =
            of_groups.chain(self.checkpoint.iter().map(|_| CHECKPOINT_TAG.to_owned())).collect();
        (names.len() > 1).then(|| Notice::FileChoice {
            repo: self.request.id.to_owned(),
            is_cached: self.request.is_cached,
            names,
            chosen: chosen.to_owned(),
            reason,
        })
    }

    fn of_group(&self, group: &GgufGroup, notice: Option<Notice>) -> FileChoice {
        FileChoice {
            files: group.parts.clone(),
            first: Some(group.first.clone()),
            tag: group.tag.clone(),
            projector: projector_of(self.request.files, &group.first).map(|file| file.path.clone()),
            bytes: group.bytes,
            missing: group.missing_part(),
            notice,
        }
    }

    fn of_checkpoint(&self, checkpoint: &Checkpoint, notice: Option<Notice>) -> FileChoice {
        let needed = text_files(self.request.files).into_iter().chain(checkpoint.index.clone());
        FileChoice {
            files: needed.chain(checkpoint.weights.iter().cloned()).map(|file| file.path).collect(),
            bytes: checkpoint.bytes(),
            missing: checkpoint.missing.clone(),
            notice,
            ..FileChoice::default()
        }
    }

    fn candidates(&self, groups: &[GgufGroup]) -> Vec<ModelCandidate> {
        let candidate = |group: &GgufGroup| ModelCandidate {
            reference: gguf_reference(self.request.id, group, &self.groups),
            bytes: Some(group.bytes),
        };
        let checkpoint = self.checkpoint.as_ref().filter(|_| groups.len() == self.groups.len());
        let checkpoint = checkpoint.map(|checkpoint| ModelCandidate {
            reference: format!("{}:{CHECKPOINT_TAG}", self.request.id),
            bytes: Some(checkpoint.bytes()),
        });
        groups.iter().map(candidate).chain(checkpoint).collect()
    }

    /// Returns the candidates that resemble `wanted` most, in the listing's order.
    fn limited(&self, wanted: &str, groups: &[GgufGroup]) -> Vec<ModelCandidate> {
        let mut candidates = self.candidates(groups);
        let wanted = wanted.to_ascii_uppercase();
        let likeness = |candidate: &ModelCandidate| {
            let selector = candidate.reference.rsplit(':').next().unwrap_or_default();
            strsim::jaro_winkler(&selector.to_ascii_uppercase(), &wanted)
        };
        let mut likenesses: Vec<f64> = candidates.iter().map(likeness).collect();
        likenesses.sort_by(|a, b| b.total_cmp(a));
        if let Some(least) = likenesses.get(MAX_CANDIDATES - 1) {
            candidates.retain(|candidate| likeness(candidate) >= *least);
            candidates.truncate(MAX_CANDIDATES);
        }
        candidates
    }
}

/// Describes a listing without a model.
pub fn why_no_model(files: &[ListedFile]) -> String {
    let has = |test: &dyn Fn(&str) -> bool| files.iter().any(|file| test(&file.path));
    if has(&|path| path == "adapter_config.json" || path == "adapter_model.safetensors") {
        "is a LoRA adapter: name its base model, and give its folder to --lora"
    } else if has(&|path| path.ends_with(".gguf")) {
        "holds only companions of models (projectors, importance matrices, draft models), and no model"
    } else if has(&|path| path == "config.json") {
        "has a config.json but no .safetensors weights (PyTorch .bin files are not read)"
    } else if has(&|path| path.starts_with("consolidated") && path.ends_with(".safetensors")) {
        "has weights in Mistral's own form (consolidated.safetensors) only, without a config.json"
    } else {
        "holds neither config.json with safetensors nor a GGUF file"
    }
    .to_owned()
}

/// Returns the file to use if the user names none, and why; `None` if no file has a known quantisation, or two models
/// have the preferred one.
fn preferred<'g>(groups: &[&'g GgufGroup], memory: Option<u64>) -> Option<(&'g GgufGroup, ChoiceReason)> {
    let place = |group: &GgufGroup| rank(group.tag.as_deref()?);
    let is_only =
        |group: &&&GgufGroup| groups.iter().filter(|other| place(other) == place(group)).count() == 1;
    let best = groups.iter().filter(|group| place(group).is_some()).min_by_key(|group| place(group))?;
    if !is_only(&best) {
        return None;
    }
    let Some(memory) = memory.filter(|_| !fits(best.bytes, memory)) else {
        return Some((best, ChoiceReason::Preferred));
    };
    let known = || groups.iter().filter(|group| place(group).is_some()).filter(is_only);
    let (wanted, bytes) = (best.name().to_owned(), best.bytes);
    let smaller = known().filter(|group| fits(group.bytes, Some(memory)));
    let by_size = |group: &&&GgufGroup| (group.bytes, std::cmp::Reverse(place(group)));
    match smaller.max_by_key(by_size) {
        Some(group) => {
            Some((group, ChoiceReason::Smaller { wanted, bytes, chosen_bytes: group.bytes, memory }))
        }
        None => {
            let group = known().min_by_key(|group| group.bytes)?;
            Some((group, ChoiceReason::NoneFits { chosen_bytes: group.bytes, memory }))
        }
    }
}

#[cfg(test)]
mod tests;
