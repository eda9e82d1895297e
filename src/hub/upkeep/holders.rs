//! Finds the users of a file of the cache: downloads, by the locks that huggingface_hub and llmctl share, and
//! processes that have it mapped, as far as Linux tells this user.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// Locks of downloads, held until it is dropped, so that no download begins meanwhile.
#[derive(Debug, Default)]
pub struct DownloadLocks {
    locks: Vec<File>,
}

impl DownloadLocks {
    /// Takes the locks of the files with these hashes. A file system without locks counts as one without downloads.
    ///
    /// # Errors
    /// The hash of a file that another process is downloading.
    pub fn take<'a>(folder: &Path, hashes: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let mut taken = Self::default();
        for hash in hashes.collect::<BTreeSet<_>>() {
            let Ok(lock) = File::options().write(true).open(folder.join(format!("{hash}.lock"))) else {
                continue;
            };
            match lock.try_lock() {
                Ok(()) => taken.locks.push(lock),
                Err(TryLockError::WouldBlock) => return Err(hash.to_owned()),
                Err(TryLockError::Error(_)) => {}
            }
        }
        Ok(taken)
    }
}

/// Files that processes have mapped, read once for any number of questions.
#[derive(Debug, Default)]
pub struct MappedFiles {
    /// Processes by file, as `name (pid)`.
    users: BTreeMap<PathBuf, BTreeSet<String>>,
}

impl MappedFiles {
    /// Reads `<root>/proc` (`/` in production). Only processes of this user are seen, and none on other systems than Linux.
    pub fn read(root: &Path) -> Self {
        let mut users: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
        for entry in fs::read_dir(root.join("proc")).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) else {
                continue;
            };
            let text = |file| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            let user = format!("{} ({pid})", text("comm").trim());
            // address perms offset device inode, then the path after padding.
            for path in text("maps").lines().filter_map(|line| line.get(line.find(" /")? + 1..)) {
                users.entry(path.into()).or_default().insert(user.clone());
            }
        }
        Self { users }
    }

    /// Lists the processes that have one of `paths` mapped.
    pub fn users(&self, paths: &[PathBuf]) -> Vec<String> {
        let paths = paths.iter().filter_map(|path| fs::canonicalize(path).ok());
        let users: BTreeSet<&String> = paths.filter_map(|path| self.users.get(&path)).flatten().collect();
        users.into_iter().cloned().collect()
    }
}
