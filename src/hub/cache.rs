//! Reads the shared Hugging Face cache: its repositories, revisions and models.
//!
//! Layout (huggingface_hub's "Understand caching"): `models--org--repo/refs/<name>` holds a commit,
//! `snapshots/<commit>/` holds symlinks into `blobs/`. Read only; another program may be writing, so entries
//! that are unreadable, dangling or oddly named count as absent. Names from refs and folders are checked
//! before they are joined to a path.

use std::fs;
use std::path::{Path, PathBuf};

use super::ModelSource;
use super::choice::{CHECKPOINT_TAG, ModelKind, gguf_reference};
use super::quant_tag::group_shards;
use super::reference::{ModelRef, ReferenceForm};
use super::repo_files::{Checkpoint, ListedFile};

/// Folder depth of models inside a snapshot: publishers put large quantisations into folders of their own.
pub(super) const SNAPSHOT_DEPTH: usize = 2;

/// Size limit of a config.json in bytes; real ones have a few kilobytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// A repository in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    /// `org/name`, or a bare name for the oldest repositories.
    pub id: String,
    pub dir: PathBuf,
}

/// One revision of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub commit: String,
    pub dir: PathBuf,
}

/// Lists all model repositories in `cache`, by name.
pub fn repos(cache: Option<&Path>) -> Vec<Repo> {
    let mut repos: Vec<Repo> = cache
        .map(subfolders)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|(name, dir)| {
            let id = name.strip_prefix("models--")?.replacen("--", "/", 1);
            // The folder's name must equal the one that the reference would be joined to.
            let plain = matches!(ModelRef::parse(&format!("hf:{id}")).ok()?.form(), ReferenceForm::Hub(hub) if hub.repo_id() == id);
            plain.then_some(Repo { id, dir })
        })
        .collect();
    repos.sort_by(|a, b| a.id.cmp(&b.id));
    repos
}

impl Repo {
    /// Returns the part after the owner.
    pub fn name(&self) -> &str {
        self.id.rsplit('/').next().unwrap_or(&self.id)
    }

    /// Finds the snapshot of `revision`: a ref's name, a commit, or the first characters of one. Without a revision,
    /// finds `main`, else the only snapshot.
    ///
    /// # Errors
    /// The existing revisions, as references, if none or several match.
    pub fn snapshot(&self, revision: Option<&str>) -> Result<Snapshot, Vec<String>> {
        let snapshots = self.snapshots();
        let by_ref = |name: &str| {
            let commit = self.ref_commit(name)?;
            snapshots.iter().find(|s| s.commit == commit).cloned()
        };
        if let Some(found) = by_ref(revision.unwrap_or("main")) {
            return Ok(found);
        }
        let prefix = revision.unwrap_or_default().to_ascii_lowercase();
        // Git's own minimum for an abbreviated commit is four characters.
        let long_enough = revision.is_none() || prefix.len() >= 4;
        let mut matches = snapshots.iter().filter(|s| long_enough && s.commit.starts_with(&prefix));
        match (matches.next(), matches.next()) {
            (Some(only), None) => Ok(only.clone()),
            _ => Err(snapshots.iter().map(|s| format!("{}@{}", self.id, self.revision_name(s))).collect()),
        }
    }

    /// Lists all snapshots, by commit.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        let mut snapshots: Vec<Snapshot> = subfolders(&self.dir.join("snapshots"))
            .into_iter()
            .filter(|(commit, _)| is_commit(commit))
            .map(|(commit, dir)| Snapshot { commit, dir })
            .collect();
        snapshots.sort_by(|a, b| a.commit.cmp(&b.commit));
        snapshots
    }

    /// Returns the revision to write after `@` for a snapshot: a ref that points to it, else the start of its commit.
    pub fn revision_name(&self, snapshot: &Snapshot) -> String {
        let mut names: Vec<String> = file_names(&self.dir.join("refs"), 2)
            .into_iter()
            .filter(|name| self.ref_commit(name).as_deref() == Some(&snapshot.commit))
            .collect();
        names.sort_by_key(|name| (name != "main", name.clone()));
        names.into_iter().next().unwrap_or_else(|| snapshot.commit.chars().take(12).collect())
    }

    /// Returns the files in `refs/`, each with the commit in it.
    pub(super) fn refs(&self) -> Vec<(PathBuf, String)> {
        let refs = self.dir.join("refs");
        let names = file_names(&refs, 2).into_iter();
        names.filter_map(|name| Some((refs.join(&name), self.ref_commit(&name)?))).collect()
    }

    fn ref_commit(&self, name: &str) -> Option<String> {
        let path = self.dir.join("refs").join(name);
        let small = fs::metadata(&path).ok().is_some_and(|meta| meta.is_file() && meta.len() < 200);
        let commit = if small { fs::read_to_string(path).ok()? } else { return None };
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }
}

/// Returns whether `text` is a hexadecimal commit; other contents of a folder or a ref are not followed.
pub(super) fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Lists names and paths of the folders in `dir`; a name that is not UTF-8 cannot be a model's.
fn subfolders(dir: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect()
}

/// Lists the files below `dir` to a depth of `depth` folders, as relative paths with `/`; symlinked folders are not
/// entered.
fn file_names(dir: &Path, depth: usize) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if path.is_file() {
            names.push(name);
        } else if depth > 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            names.extend(file_names(&path, depth - 1).into_iter().map(|inner| format!("{name}/{inner}")));
        }
    }
    names
}

/// Lists the files below `dir` with their sizes, by name.
pub(super) fn listing(dir: &Path, depth: usize) -> Vec<ListedFile> {
    let mut names = file_names(dir, depth);
    names.sort();
    names.into_iter().map(|path| ListedFile { bytes: size(&dir.join(&path)), path }).collect()
}

/// Returns whether `dir` is a folder with config.json and safetensors weights.
pub(super) fn is_checkpoint(dir: &Path) -> bool {
    dir.join("config.json").is_file() && file_names(dir, 0).iter().any(|name| name.ends_with(".safetensors"))
}

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// Reference to write after `--model`.
    pub reference: String,
    pub commit: String,
    pub kind: ModelKind,
    /// The file name's tag, config.json's dtype, or the built-in model's own value.
    pub quantization: Option<String>,
    /// Size of the weights on disk.
    pub bytes: u64,
    /// The file (first part) or folder.
    pub path: PathBuf,
    /// A missing part.
    pub missing: Option<PathBuf>,
}

/// Lists everything in the cache that could be loaded, by name. Folders without weights (a tokenizer alone) are left
/// out.
pub fn list(cache: Option<&Path>) -> Vec<CachedModel> {
    repos(cache)
        .iter()
        .flat_map(|repo| repo.snapshots().into_iter().flat_map(|s| models_in(repo, &s)))
        .collect()
}

fn models_in(repo: &Repo, snapshot: &Snapshot) -> Vec<CachedModel> {
    let is_default = repo.snapshot(None).is_ok_and(|default| default == *snapshot);
    let revision = if is_default { String::new() } else { format!("@{}", repo.revision_name(snapshot)) };
    let id = format!("{}{revision}", repo.id);
    let listing = listing(&snapshot.dir, SNAPSHOT_DEPTH);
    let files = group_shards(&listing);
    let checkpoint = Checkpoint::find(&listing).map(|checkpoint| CachedModel {
        reference: if files.is_empty() { id.clone() } else { format!("{id}:{CHECKPOINT_TAG}") },
        commit: snapshot.commit.clone(),
        kind: ModelKind::Safetensors,
        quantization: checkpoint_dtype(&snapshot.dir),
        bytes: checkpoint.bytes(),
        path: snapshot.dir.clone(),
        missing: checkpoint.missing.map(|shard| snapshot.dir.join(shard)),
    });
    let of_group = files.iter().map(|file| CachedModel {
        reference: gguf_reference(&id, file, &files),
        commit: snapshot.commit.clone(),
        kind: ModelKind::Gguf,
        quantization: file.tag.clone(),
        bytes: file.bytes,
        path: snapshot.dir.join(&file.first),
        missing: file.missing_part().map(|part| snapshot.dir.join(part)),
    });
    checkpoint.into_iter().chain(of_group).collect()
}

/// Facts from the names and sizes of a model's files alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    pub kind: ModelKind,
    /// The file name's tag, or config.json's dtype.
    pub quantization: Option<String>,
    /// Size of the weights on disk, all parts.
    pub bytes: u64,
}

/// Summarises the files that [`super::resolve`] found.
pub fn summary(source: &ModelSource) -> Summary {
    match source {
        ModelSource::Folder(dir) => Summary {
            kind: ModelKind::Safetensors,
            quantization: checkpoint_dtype(dir),
            bytes: checkpoint_bytes(dir),
        },
        ModelSource::BuiltIn(model) => Summary {
            kind: ModelKind::Gguf,
            quantization: Some(model.quantization.to_owned()),
            bytes: model.bytes().len() as u64,
        },
        ModelSource::Gguf(path) => {
            let dir = path.parent().unwrap_or(Path::new("."));
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let group = group_shards(&listing(dir, 0)).into_iter().find(|file| file.first == name);
            Summary {
                kind: ModelKind::Gguf,
                bytes: group.as_ref().map_or_else(|| size(path), |file| file.bytes),
                quantization: group.and_then(|file| file.tag),
            }
        }
    }
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

fn checkpoint_bytes(dir: &Path) -> u64 {
    let weights = file_names(dir, 0).into_iter().filter(|name| name.ends_with(".safetensors"));
    weights.map(|name| size(&dir.join(name))).sum()
}

/// Reads `torch_dtype` (until transformers 4) or `dtype` of config.json, also if nested for a multimodal model.
fn checkpoint_dtype(dir: &Path) -> Option<String> {
    let path = dir.join("config.json");
    if size(&path) > MAX_CONFIG_BYTES {
        return None;
    }
    let config: serde_json::Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let at = |value: &serde_json::Value| {
        let dtype = value.get("dtype").or_else(|| value.get("torch_dtype"))?.as_str()?;
        Some(match dtype.trim_start_matches("torch.") {
            "float32" => "f32".to_owned(),
            "bfloat16" => "bf16".to_owned(),
            "float16" => "f16".to_owned(),
            other => other.to_owned(),
        })
    };
    at(&config).or_else(|| at(config.get("text_config")?))
}
