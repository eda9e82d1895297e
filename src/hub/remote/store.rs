//! Writes a repository of the shared cache, in huggingface_hub's layout.
//!
//! ```text
//! CACHEDIR.TAG   .locks/models--org--name/<hash>.lock
//! models--org--name/blobs/<hash>                      complete files, by content
//! models--org--name/blobs/<hash>.llmctl.incomplete    a file that is being downloaded
//! models--org--name/snapshots/<commit>/<path>         relative link to ../../blobs/<hash>
//! models--org--name/refs/<revision>                   a commit, without a line end
//! models--org--name/trees/<commit>.json               the files of a commit, with their hashes
//! models--org--name/.no_exist/<commit>/<path>         a file that the commit does not have
//! ```
//! Invariants: a blob has its name only after its hash was checked; a link is made after its blob, a ref
//! after all links. Partial files have a name of their own, because huggingface_hub counts every other name
//! as complete.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use super::error::HubError;
use super::listing::{RemoteFile, RemoteListing};
use super::observer::{PullEvent, PullObserver, pause};
use llmctl_base::private_files::{replace_file, sync_folder_of};

/// Pause between two attempts to take a lock.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

/// Content by which backup programs recognise a cache (<https://bford.info/cachedir/>), as huggingface_hub begins it.
const CACHEDIR_TAG: &str = "Signature: 8a477f597d28d172789f06886806bc55\n\
    # This file is a cache directory tag created by llmctl, in the format of huggingface_hub.\n\
    # For information about cache directory tags see:\n#\thttps://bford.info/cachedir/\n";

/// Version of `trees/<commit>.json` (huggingface_hub 2's `_tree_cache.py`).
const TREE_VERSION: u32 = 1;

/// One repository of a cache, for writing.
#[derive(Debug, Clone)]
pub(super) struct RepoStore {
    cache: PathBuf,
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoStore {
    /// Returns the repository's place; creates nothing.
    pub fn new(cache: &Path, repo: &str) -> Self {
        let name = format!("models--{}", repo.replace('/', "--"));
        let (folder, locks) = (cache.join(&name), cache.join(".locks").join(&name));
        Self { cache: cache.to_path_buf(), folder, locks }
    }

    pub fn cache(&self) -> &Path {
        &self.cache
    }

    pub fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(file.hash.hex())
    }

    pub fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(format!("{}.llmctl.incomplete", file.hash.hex()))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns whether the file's content is complete. A blob has its name only after a check, so its size suffices.
    pub fn has(&self, file: &RemoteFile) -> bool {
        fs::metadata(self.blob(file)).is_ok_and(|blob| blob.is_file() && blob.len() == file.size)
    }

    /// Returns the bytes of the file that are on disk, complete or not.
    pub fn bytes_of(&self, file: &RemoteFile) -> u64 {
        let partial = || fs::metadata(self.partial(file)).map_or(0, |partial| partial.len());
        if self.has(file) { file.size } else { partial().min(file.size) }
    }

    /// Creates the folders of the repository.
    ///
    /// # Errors
    /// [`HubError::Files`] naming the folder.
    pub fn prepare(&self) -> Result<(), HubError> {
        for folder in [&self.folder.join("blobs"), &self.locks] {
            fs::create_dir_all(folder).map_err(|error| HubError::files(folder, &error))?;
        }
        let tag = self.cache.join("CACHEDIR.TAG");
        if !tag.exists() {
            fs::write(&tag, CACHEDIR_TAG).map_err(|error| HubError::files(&tag, &error))?;
        }
        Ok(())
    }

    /// Takes the lock of a file, as huggingface_hub does, waiting for another process that has it.
    ///
    /// # Errors
    /// [`HubError::Files`] if the lock file cannot be created; [`HubError::Cancelled`].
    pub fn lock(&self, file: &RemoteFile, observer: &dyn PullObserver) -> Result<FileLock, HubError> {
        let path = self.locks.join(format!("{}.lock", file.hash.hex()));
        let mut has_waited = false;
        loop {
            let lock = open_lock(&path).map_err(|error| HubError::files(&path, &error))?;
            match lock.try_lock() {
                // The previous owner may have removed the file, and another one may hold its successor.
                Ok(()) if is_file_at(&lock, &path) => return Ok(FileLock { _file: lock }),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if !has_waited {
                        observer.event(PullEvent::Waiting { path: file.path.clone() });
                        has_waited = true;
                    }
                    pause(LOCK_INTERVAL, observer)?;
                }
                // A file system without locks: the hash check does not depend on them.
                Err(TryLockError::Error(_)) => return Ok(FileLock { _file: lock }),
            }
        }
    }

    /// Links `path` of a snapshot to the file's blob.
    ///
    /// # Errors
    /// [`HubError::Files`] naming the link.
    pub fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(&file.path);
        let failed = |error: io::Error| HubError::files(&link, &error);
        let depth = file.path.matches('/').count();
        let target = format!("{}blobs/{}", "../".repeat(depth + 2), file.hash.hex());
        if fs::read_link(&link).is_ok_and(|existing| existing == Path::new(&target)) {
            return Ok(());
        }
        let parent = link.parent().unwrap_or(&link);
        fs::create_dir_all(parent).map_err(failed)?;
        // A rename replaces an older link without a moment in which there is none.
        let temporary =
            self.folder.join("blobs").join(format!("{}.{}.link", file.hash.hex(), std::process::id()));
        let _ = fs::remove_file(&temporary);
        make_link(Path::new(&target), &self.blob(file), &temporary).map_err(failed)?;
        fs::rename(&temporary, &link).map_err(failed)?;
        sync_folder_of(&link); // before a ref names its commit
        Ok(())
    }

    /// Writes the name of a revision; a commit needs none.
    ///
    /// # Errors
    /// [`HubError::Files`] naming the file.
    pub fn set_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        let path = self.folder.join("refs").join(revision);
        if revision == commit || fs::read_to_string(&path).is_ok_and(|existing| existing == commit) {
            return Ok(());
        }
        replace(&path, commit.as_bytes())
    }

    /// Records that a commit lacks a file, so that others do not ask the hub for it.
    ///
    /// # Errors
    /// [`HubError::Files`] naming the file.
    pub fn mark_absent(&self, commit: &str, path: &str) -> Result<(), HubError> {
        let path = self.folder.join(".no_exist").join(commit).join(path);
        if path.exists() { Ok(()) } else { replace(&path, b"") }
    }

    /// Writes the listing of a commit, in huggingface_hub's form.
    ///
    /// # Errors
    /// [`HubError::Files`] naming the file.
    pub fn write_tree(&self, listing: &RemoteListing) -> Result<(), HubError> {
        let path = self.folder.join("trees").join(format!("{}.json", listing.commit));
        if path.exists() || !listing.is_whole {
            return Ok(());
        }
        let files: serde_json::Map<String, Value> =
            listing.files.iter().map(|file| (file.path.clone(), tree_entry(file))).collect();
        let tree = json!({"format_version": TREE_VERSION, "files": files});
        replace(&path, tree.to_string().as_bytes())
    }
}

/// Returns an entry of a tree file.
fn tree_entry(file: &RemoteFile) -> Value {
    let mut entry = json!({"size": file.size, "blob_id": file.blob_id});
    if file.hash.is_sha256() {
        entry["lfs_sha256"] = file.hash.hex().into();
        entry["lfs_size"] = file.size.into();
    }
    if let Some(hash) = &file.xet_hash {
        entry["xet_hash"] = hash.as_str().into();
    }
    entry
}

/// A lock that ends when it is dropped, or with the process.
#[derive(Debug)]
pub(super) struct FileLock {
    _file: File,
}

fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // As huggingface_hub: users of a group may share a cache.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o664);
    options.open(path)
}

#[cfg(unix)]
fn is_file_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |data: fs::Metadata| (data.dev(), data.ino());
    let (held, named) = (file.metadata().map(id), fs::metadata(path).map(id));
    matches!((held, named), (Ok(held), Ok(named)) if held == named)
}

#[cfg(not(unix))]
fn is_file_at(_: &File, _: &Path) -> bool {
    true
}

#[cfg(unix)]
fn make_link(target: &Path, _: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Links as far as the user may, else copies.
#[cfg(not(unix))]
fn make_link(target: &Path, blob: &Path, link: &Path) -> io::Result<()> {
    #[cfg(windows)]
    if std::os::windows::fs::symlink_file(target, link).is_ok() {
        return Ok(());
    }
    let _ = target;
    fs::copy(blob, link).map(drop)
}

/// Writes a file so that a reader sees the old content or the new one, whole.
fn replace(path: &Path, content: &[u8]) -> Result<(), HubError> {
    let failed = |error: io::Error| HubError::files(path, &error);
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(failed)?;
    replace_file(path, content).map_err(failed)
}
