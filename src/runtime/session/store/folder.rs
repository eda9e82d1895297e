//! Files and folders of the store: private modes, syncs, the writer's lock, and errors that name their path.
//!
//! Knows nothing of what the files say.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::Path;

use super::SessionName;
use crate::runtime::error::{Error, Result, StoreError};
use crate::runtime::private_files;

/// The longest transcript that is read: far beyond any context, small enough to hold.
pub const MAX_FILE_BYTES: u64 = 1 << 30;
const LOCK_FILE: &str = "lock";

/// Says which path an error is about.
pub fn io_error(path: &Path, error: &io::Error) -> Error {
    StoreError::Io { path: path.into(), message: error.to_string() }.into()
}

/// Returns when the folder's entries are on disk. Windows knows no such call and needs none.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// A whole file, `None` when there is none.
///
/// # Errors
/// [`StoreError`]: it cannot be read, or is absurdly long.
pub fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
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

/// The right to write a session. Dropping it gives it up at once: closing the file alone would not, while a child process
/// that was just started still has a copy of the descriptor.
#[derive(Debug)]
pub struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock(); // the file is closed next, which unlocks it too
    }
}

/// Makes the caller the one writer of the session in `folder`, until the lock is dropped or the process ends.
///
/// The lock is on a file of its own, because the transcript is replaced when it is compacted.
///
/// # Errors
/// [`Error::SessionBusy`]; [`Error::SessionNotFound`] when the folder went away meanwhile; [`StoreError::Io`].
pub fn lock(folder: &Path, name: &SessionName) -> Result<Lock> {
    let path = folder.join(LOCK_FILE);
    let opened =
        private_files::private_file(OpenOptions::new().write(true).create(true).truncate(false), &path);
    let file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::SessionNotFound(name.to_string()),
        _ => io_error(&path, &error),
    })?;
    match file.try_lock() {
        Ok(()) if is_still_there(&file, &path) => Ok(Lock(file)),
        Ok(()) => Err(Error::SessionNotFound(name.to_string())),
        Err(TryLockError::WouldBlock) => Err(Error::SessionBusy(name.to_string())),
        Err(TryLockError::Error(error)) => Err(io_error(&path, &error)),
    }
}

/// Whether the path still leads to this file: between opening and locking, the session can have been removed, and
/// even created anew.
#[cfg(unix)]
fn is_still_there(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
fn is_still_there(_: &File, path: &Path) -> bool {
    path.exists()
}
