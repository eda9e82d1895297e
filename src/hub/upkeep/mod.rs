//! Upkeep of the shared cache: what belongs to a model, and what nothing refers to any more.
//!
//! A plan of what to erase ([`Erasure`]) is computed first and changes nothing; the caller shows it, and then
//! runs it. `holders` finds downloads and processes that need a file, `check` compares files with their
//! names. Invariants: a blob is erased only if no remaining snapshot links to it, and after the links to it;
//! a plan names paths of one repository's folder and its lock folder only; links are never followed when
//! something is erased.

mod check;
mod holders;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

pub use self::check::{BlobCheck, BlobState, check_blob};
pub use self::holders::{DownloadLocks, MappedFiles};
use super::cache::{Repo, SNAPSHOT_DEPTH, Snapshot, is_commit, listing};
use super::choice::{FileRequest, choose};
use super::quant_tag::{group_shards, projector_of};
use super::reference::Selector;

/// Folder depth below a snapshot that is followed; repositories have two or three.
const MAX_DEPTH: usize = 16;

/// Age of a file without a link, in which nothing was written to it, after which its download counts as abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// A repository of the cache with all its files.
#[derive(Debug, Clone)]
pub struct RepoScan {
    pub repo: Repo,
    pub snapshots: Vec<SnapshotScan>,
    pub blobs: Vec<BlobFile>,
    /// Files in `refs/` with the commits that they name.
    refs: Vec<(PathBuf, String)>,
    locks: PathBuf,
}

/// One revision and its files.
#[derive(Debug, Clone)]
pub struct SnapshotScan {
    pub snapshot: Snapshot,
    pub files: Vec<SnapshotFile>,
}

/// A file of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotFile {
    /// Path inside the snapshot, with `/`.
    pub name: String,
    pub path: PathBuf,
    /// Name of the blob that it links to; `None` for a file of its own (systems without links).
    pub blob: Option<String>,
    /// Bytes of a file of its own.
    bytes: u64,
}

/// A file in `blobs/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobFile {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    /// It is being downloaded, or its download was given up.
    pub is_partial: bool,
    /// When it was last written, if the system says.
    modified: Option<SystemTime>,
}

impl BlobFile {
    /// Returns the hash that the finished file will have.
    fn hash(&self) -> &str {
        self.name.split('.').next().unwrap_or(&self.name)
    }
}

/// Scope of a removal.
#[derive(Debug, Clone, Copy)]
pub enum RemovalScope<'a> {
    Repository,
    /// A revision, by its commit.
    Snapshot(&'a str),
    /// One model of a revision.
    Model(&'a str, &'a Selector),
}

/// A plan of what to erase.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Erasure {
    /// Links of snapshots, or their files on systems without links; refs.
    pub files: Vec<PathBuf>,
    pub blobs: Vec<BlobFile>,
    /// Folders, with all that they contain.
    pub folders: Vec<PathBuf>,
    /// Bytes that become free.
    pub bytes: u64,
    /// Commits of other snapshots that keep some of the blobs.
    pub kept_for: BTreeSet<String>,
}

impl RepoScan {
    /// Lists all files of a repository of `cache`.
    pub fn of(cache: &Path, repo: &Repo) -> RepoScan {
        let snapshots = repo.snapshots().into_iter().map(SnapshotScan::of).collect();
        let folder = repo.dir.file_name().unwrap_or_default();
        RepoScan {
            snapshots,
            blobs: blobs(&repo.dir.join("blobs")),
            refs: repo.refs(),
            locks: cache.join(".locks").join(folder),
            repo: repo.clone(),
        }
    }

    /// Returns the folder of the locks of downloads.
    pub fn locks(&self) -> &Path {
        &self.locks
    }

    /// Plans a removal. What remains of a snapshot without a model (a README, a configuration) goes with its last model, and
    /// the folder of the repository with its last snapshot.
    ///
    /// # Errors
    /// The message of a selector that names no model.
    pub fn removal(&self, scope: RemovalScope<'_>) -> Result<Erasure, String> {
        let (commit, names) = match scope {
            RemovalScope::Repository => return Ok(self.whole()),
            RemovalScope::Snapshot(commit) => (commit, None),
            RemovalScope::Model(commit, selector) => (commit, Some(self.model_files(commit, selector)?)),
        };
        let Some(scan) = self.snapshots.iter().find(|scan| scan.snapshot.commit == commit) else {
            return Err(format!("{} has no revision {commit}", self.repo.id));
        };
        let names = names.filter(|names| scan.has_model_without(names));
        if names.is_none() && self.snapshots.len() == 1 {
            return Ok(self.whole());
        }
        let is_chosen = |file: &SnapshotFile| names.as_ref().is_none_or(|names| names.contains(&file.name));
        let mut erasure = self.erasure_of(commit, &is_chosen);
        if names.is_none() {
            let refs = self.refs.iter().filter(|(_, target)| target == commit).map(|(path, _)| path.clone());
            erasure.files.extend(refs);
            erasure.folders.push(scan.snapshot.dir.clone());
        }
        Ok(erasure)
    }

    fn whole(&self) -> Erasure {
        let own = self.snapshots.iter().flat_map(|scan| &scan.files).map(|file| file.bytes);
        Erasure {
            bytes: own.chain(self.blobs.iter().map(|blob| blob.bytes)).sum(),
            blobs: self.blobs.clone(),
            folders: vec![self.repo.dir.clone(), self.locks.clone()],
            ..Erasure::default()
        }
    }

    /// Plans to erase the chosen files of a snapshot, and the blobs that no other file links to.
    fn erasure_of(&self, commit: &str, is_chosen: &dyn Fn(&SnapshotFile) -> bool) -> Erasure {
        let mut erasure = Erasure::default();
        let (mut wanted, mut kept) = (BTreeSet::new(), BTreeSet::new());
        for scan in &self.snapshots {
            for file in &scan.files {
                let blob = file.blob.as_deref();
                if scan.snapshot.commit == commit && is_chosen(file) {
                    erasure.files.push(file.path.clone());
                    erasure.bytes += file.bytes;
                    wanted.extend(blob);
                } else {
                    kept.extend(blob.map(|blob| (blob, scan.snapshot.commit.as_str())));
                }
            }
        }
        for blob in self.blobs.iter().filter(|blob| wanted.contains(&*blob.name)) {
            let revisions: Vec<_> = kept.iter().filter(|(name, _)| *name == blob.name).collect();
            if revisions.is_empty() {
                erasure.bytes += blob.bytes;
                erasure.blobs.push(blob.clone());
            }
            erasure.kept_for.extend(revisions.into_iter().map(|(_, commit)| (*commit).to_owned()));
        }
        erasure.kept_for.remove(commit);
        erasure
    }

    /// Returns the files of one model, without texts and projectors that other models of the snapshot share.
    fn model_files(&self, commit: &str, selector: &Selector) -> Result<Vec<String>, String> {
        let scan = self.snapshots.iter().find(|scan| scan.snapshot.commit == commit);
        let dir = scan.map(|scan| scan.snapshot.dir.clone()).unwrap_or_default();
        let files = listing(&dir, SNAPSHOT_DEPTH);
        let request = FileRequest {
            id: &self.repo.id,
            files: &files,
            selector: Some(selector),
            memory: None,
            is_cached: true,
        };
        let choice =
            choose(&request).map_err(|error| error.into_load_error(&self.repo.id, &dir).to_string())?;
        let others =
            group_shards(&files).into_iter().filter(|group| Some(&group.first) != choice.first.as_ref());
        let shared: Vec<String> =
            others.filter_map(|group| Some(projector_of(&files, &group.first)?.path.clone())).collect();
        let own = choice.projector.filter(|path| !shared.contains(path));
        Ok(choice.files.into_iter().chain(own).collect())
    }

    /// Returns the snapshots that no ref names, if a ref names another one.
    pub fn detached(&self) -> Vec<&SnapshotScan> {
        let is_named =
            |scan: &&SnapshotScan| self.refs.iter().any(|(_, commit)| *commit == scan.snapshot.commit);
        match self.snapshots.iter().any(|scan| is_named(&scan)) {
            true => self.snapshots.iter().filter(|scan| !is_named(scan)).collect(),
            // llmctl's and huggingface_hub's downloads of a commit write no ref.
            false => Vec::new(),
        }
    }

    /// Returns the blobs that no snapshot links to, and that were not written lately; complete ones only while no other file
    /// looks as if a download of the repository is running, because that links all its files at its end.
    pub fn unreferenced(&self, now: SystemTime) -> Vec<&BlobFile> {
        let linked: BTreeSet<&str> = self
            .snapshots
            .iter()
            .flat_map(|scan| &scan.files)
            .filter_map(|file| file.blob.as_deref())
            .collect();
        let is_old = |blob: &BlobFile| {
            blob.modified.and_then(|at| now.duration_since(at).ok()).is_some_and(|age| age >= ABANDONED_AFTER)
        };
        let unlinked = || self.blobs.iter().filter(|blob| !linked.contains(&*blob.name));
        let is_running = !unlinked().all(is_old);
        unlinked().filter(|blob| is_old(blob) && (blob.is_partial || !is_running)).collect()
    }

    /// Returns the links of snapshots to blobs that do not exist.
    pub fn dangling(&self) -> impl Iterator<Item = &SnapshotFile> {
        let exists = |name: &str| self.blobs.iter().any(|blob| blob.name == name);
        let files = self.snapshots.iter().flat_map(|scan| &scan.files);
        files.filter(move |file| file.blob.as_deref().is_some_and(|blob| !exists(blob)))
    }
}

impl SnapshotScan {
    fn of(snapshot: Snapshot) -> SnapshotScan {
        let mut files = Vec::new();
        collect(&snapshot.dir, "", MAX_DEPTH, &mut files);
        files.sort_by(|a: &SnapshotFile, b| a.name.cmp(&b.name));
        SnapshotScan { snapshot, files }
    }

    /// Returns whether a model remains after the removal of the named files.
    fn has_model_without(&self, names: &[String]) -> bool {
        let mut left = listing(&self.snapshot.dir, SNAPSHOT_DEPTH);
        left.retain(|file| !names.contains(&file.path));
        let request = FileRequest { id: "", files: &left, selector: None, memory: None, is_cached: true };
        !matches!(choose(&request), Err(super::FileChoiceError::NoModel(_)))
    }
}

/// Collects the files below `dir`; linked folders are not entered.
fn collect(dir: &Path, prefix: &str, depth: usize, files: &mut Vec<SnapshotFile>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (Ok(name), Ok(kind)) = (entry.file_name().into_string(), entry.file_type()) else { continue };
        let name = format!("{prefix}{name}");
        if kind.is_dir() {
            if depth > 0 {
                collect(&entry.path(), &format!("{name}/"), depth - 1, files);
            }
            continue;
        }
        let blob = fs::read_link(entry.path()).ok().and_then(|target| blob_of(&target));
        let bytes = if kind.is_file() { entry.metadata().map_or(0, |meta| meta.len()) } else { 0 };
        files.push(SnapshotFile { name, path: entry.path(), blob, bytes });
    }
}

/// Returns the blob's name if a link leads into a folder `blobs`.
fn blob_of(target: &Path) -> Option<String> {
    let folder = target.parent()?.file_name()?;
    (folder == "blobs").then(|| target.file_name()?.to_str().map(str::to_owned))?
}

fn blobs(dir: &Path) -> Vec<BlobFile> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut blobs: Vec<BlobFile> = entries
        .filter_map(|entry| {
            let (name, meta) = (entry.file_name().into_string().ok()?, entry.metadata().ok()?);
            // huggingface_hub's and hf-hub's, llmctl's, and llama.cpp's.
            let is_partial = name.contains(".incomplete") || name.contains(".downloadInProgress");
            let modified = meta.modified().ok();
            meta.is_file().then(|| BlobFile {
                name,
                path: entry.path(),
                bytes: meta.len(),
                is_partial,
                modified,
            })
        })
        .collect();
    blobs.sort_by(|a, b| a.name.cmp(&b.name));
    blobs
}

impl Erasure {
    /// Plans to erase blobs alone.
    pub fn of_blobs(blobs: &[&BlobFile]) -> Erasure {
        let blobs: Vec<BlobFile> = blobs.iter().map(|blob| (*blob).clone()).collect();
        Erasure { bytes: blobs.iter().map(|blob| blob.bytes).sum(), blobs, ..Erasure::default() }
    }

    /// Returns the hashes of the files that a download may be working on.
    pub fn hashes(&self) -> impl Iterator<Item = &str> {
        self.blobs.iter().map(BlobFile::hash)
    }

    /// Returns the files whose bytes go, for the search for processes that use them.
    pub fn contents(&self) -> Vec<PathBuf> {
        self.blobs.iter().map(|blob| &blob.path).chain(&self.files).cloned().collect()
    }

    /// Returns whether the plan erases the file or folder at `path`.
    pub fn covers(&self, path: &Path) -> bool {
        self.files.iter().any(|file| file == path || file.parent() == Some(path))
            || self.folders.iter().any(|folder| path.starts_with(folder))
    }

    /// Returns a path of the plan that lies behind a linked folder, and so outside of the cache.
    pub fn behind_link(&self) -> Option<&Path> {
        let blobs = self.blobs.iter().map(|blob| &blob.path);
        let mut paths = self.files.iter().chain(blobs).chain(&self.folders);
        paths.find(|path| is_behind_link(path)).map(PathBuf::as_path)
    }

    /// Erases everything, links before blobs; empty folders of links go, too. What is gone already is no error.
    ///
    /// # Errors
    /// The first path that cannot be erased.
    pub fn run(&self) -> Result<(), (PathBuf, io::Error)> {
        if let Some(path) = self.behind_link() {
            return Err((path.to_owned(), io::Error::other("it lies behind a link")));
        }
        let gone = |path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err((path.to_path_buf(), error)),
            _ => Ok(()),
        };
        for path in &self.files {
            gone(path, fs::remove_file(path))?;
            // Fails for a folder that still has files.
            let above =
                path.ancestors().skip(1).take_while(|dir| dir.file_name().is_some_and(|name| !is_top(name)));
            above.take_while(|dir| fs::remove_dir(dir).is_ok()).for_each(drop);
        }
        for blob in &self.blobs {
            gone(&blob.path, fs::remove_file(&blob.path))?;
        }
        self.folders.iter().try_for_each(|folder| gone(folder, fs::remove_dir_all(folder)))
    }
}

/// Returns whether a folder above `path`, from the repository's or that of all locks on, is a link.
fn is_behind_link(path: &Path) -> bool {
    let is_first = |dir: &Path| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        name == ".locks" || name.starts_with("models--")
    };
    let num_inside = path.ancestors().skip(1).position(is_first).map_or(0, |first| first + 1);
    path.ancestors().skip(1).take(num_inside).any(Path::is_symlink)
}

/// Returns whether a folder's name ends the removal of empty folders: a snapshot, `refs`.
fn is_top(name: &std::ffi::OsStr) -> bool {
    name.to_str().is_none_or(|name| is_commit(name) || matches!(name, "refs" | "snapshots"))
}
