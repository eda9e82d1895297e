//! Files and folders of the store: private modes, syncs, the writer's lock, and errors that name their path.
//!
//! Knows nothing of the files' content.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::SessionName;
use super::lock::{self, Attempt, Folders, LockGuard};
use llmctl_base::error::{Error, Result, StoreError};
use llmctl_base::private_files;

/// Largest transcript that is read, in bytes: far beyond any context, small enough for memory.
pub const MAX_FILE_BYTES: u64 = 1 << 30;
const LOCK_FILE: &str = "lock";

/// Wraps an I/O error with its path.
pub fn io_error(path: &Path, error: &io::Error) -> Error {
    StoreError::io(path, error).into()
}

/// Syncs a folder's entries to disk. Windows has no such call and needs none.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Reads a whole file; `None` if it does not exist.
///
/// # Errors
/// [`StoreError`] if it cannot be read or exceeds the limit.
pub fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    // Checked before opening: opening a pipe would wait for a writer.
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(io_error(path, &io::Error::other("not a regular file")));
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error(path, &error)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|error| io_error(path, &error))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let message = format!("the file is longer than {MAX_FILE_BYTES} bytes");
        return Err(StoreError::Unsupported { path: path.into(), message }.into());
    }
    Ok(Some(bytes))
}

/// Lists the transcript, damaged ones kept by a repair, and new ones left by a crash.
pub fn transcripts(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_transcript = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("transcript."))
    };
    paths.filter(is_transcript).collect()
}

/// The real file system, as steps for `lock`.
#[derive(Debug, Clone, Copy)]
pub struct FileSystem;

/// The right to write a session. Dropping it unlocks explicitly, because closing the file does not unlock it
/// while a child process that was just started holds a copy of the descriptor.
pub type Lock = LockGuard<FileSystem>;

impl Folders for FileSystem {
    type LockFile = File;

    fn open_lock(&self, folder: &Path) -> Result<Option<File>> {
        let path = folder.join(LOCK_FILE);
        let mut options = OpenOptions::new();
        let opened = private_files::private_file(options.write(true).create(true).truncate(false), &path);
        match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some).map_err(|error| io_error(&path, &error)),
        }
    }

    fn try_lock(&self, folder: &Path, file: &File) -> Result<bool> {
        match file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(io_error(&folder.join(LOCK_FILE), &error)),
        }
    }

    fn is_still_there(&self, folder: &Path, file: &File) -> bool {
        is_still_there(file, &folder.join(LOCK_FILE))
    }

    fn unlock(&self, file: &File) {
        let _ = file.unlock(); // the file is closed next, which unlocks it too
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(|error| io_error(from, &error))?;
        let parent = to.parent().unwrap_or(to);
        sync_folder(parent).map_err(|error| io_error(parent, &error))
    }
}

/// Makes the caller the only writer of the session in `folder`, until the lock is dropped or the process
/// ends.
///
/// The lock is on a file of its own, because compaction replaces the transcript.
///
/// # Errors
/// [`Error::SessionBusy`]; [`Error::SessionNotFound`] if the folder was removed in the meantime;
/// [`StoreError::Io`].
pub fn lock(folder: &Path, name: &SessionName) -> Result<Lock> {
    match lock::lock(FileSystem, folder)? {
        Attempt::Done(lock) => Ok(lock),
        Attempt::Busy => Err(Error::SessionBusy(name.to_string())),
        Attempt::Gone => Err(Error::SessionNotFound(name.to_string())),
    }
}

/// Returns whether the path still leads to this file. Between opening and locking, the session may have been
/// removed or replaced.
#[cfg(unix)]
fn is_still_there(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Returns true: on other systems an open file cannot be removed.
#[cfg(not(unix))]
fn is_still_there(_: &File, path: &Path) -> bool {
    path.exists()
}
