//! Who needs a file of the cache: downloads, by the locks that huggingface_hub and llmctl share, and processes that have it
//! mapped, as far as Linux tells this user.

use std::collections::BTreeSet;
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

/// Lists processes that have one of `paths` mapped, as `name (pid)`, by reading `<root>/proc` (`/` in production). Only
/// processes of this user are seen, and none on other systems than Linux.
pub fn mapping_processes(root: &Path, paths: &[PathBuf]) -> Vec<String> {
    let paths: BTreeSet<PathBuf> = paths.iter().filter_map(|path| fs::canonicalize(path).ok()).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(root.join("proc")).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit())) else {
            continue;
        };
        let maps = fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
        // address perms offset device inode, then the path after padding.
        let mapped = |line: &str| {
            let path = line.get(line.find(" /")? + 1..)?;
            paths.contains(Path::new(path)).then_some(())
        };
        if maps.lines().any(|line| mapped(line).is_some()) {
            let program = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            found.push(format!("{} ({pid})", program.trim()));
        }
    }
    found.sort();
    found
}
