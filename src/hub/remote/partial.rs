//! The partial file of a download and the running hash of its bytes.
//!
//! Invariant: the file is written from its start without gaps, so its length is the progress, also after the
//! process was killed. The hash covers exactly the bytes in the file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::error::HubError;
use super::listing::{FileHash, RemoteFile};
use super::observer::PullObserver;
use llmctl_base::private_files::sync_folder_of;

/// Bytes that are read at a time to hash what is there already.
const READ_BYTES: usize = 1 << 20;

/// The hash that the hub announces for a file.
pub(crate) enum RunningHash {
    Sha256(Sha256),
    /// Git's name of a blob: the sha1 of `blob <size>`, a zero byte and the content.
    Git(Sha1),
}

impl RunningHash {
    /// Begins a hash of the same kind as `like`, of a file of `size` bytes.
    pub fn new(like: &FileHash, size: u64) -> Self {
        match like.is_sha256() {
            true => RunningHash::Sha256(Sha256::new()),
            false => RunningHash::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            RunningHash::Sha256(hash) => hash.update(bytes),
            RunningHash::Git(hash) => hash.update(bytes),
        }
    }

    pub fn hex(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            RunningHash::Sha256(hash) => hex(&hash.finalize()),
            RunningHash::Git(hash) => hex(&hash.finalize()),
        }
    }
}

/// Returns the hash that the hub would announce for `bytes` as the content of `file`.
pub(super) fn hash_of(file: &RemoteFile, bytes: &[u8]) -> String {
    let mut hash = RunningHash::new(&file.hash, file.size);
    hash.update(bytes);
    hash.hex()
}

/// An open partial file.
pub(super) struct PartialFile<'a> {
    target: &'a RemoteFile,
    path: PathBuf,
    file: File,
    hash: RunningHash,
    len: u64,
}

impl<'a> PartialFile<'a> {
    /// Opens or creates the partial file and hashes the bytes in it. A file longer than `target` is emptied.
    ///
    /// # Errors
    /// [`HubError::Files`], [`HubError::DiskFull`] or [`HubError::Cancelled`].
    pub fn open(
        path: PathBuf,
        target: &'a RemoteFile,
        observer: &dyn PullObserver,
    ) -> Result<Self, HubError> {
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = opened.map_err(|error| HubError::files(&path, &error))?;
        let mut partial =
            Self { target, path, file, hash: RunningHash::new(&target.hash, target.size), len: 0 };
        let existing = partial.file.metadata().map_err(|error| HubError::files(&partial.path, &error))?.len();
        if existing > target.size {
            partial.restart()?;
        } else {
            partial.hash_existing(existing, observer)?;
        }
        Ok(partial)
    }

    fn hash_existing(&mut self, existing: u64, observer: &dyn PullObserver) -> Result<(), HubError> {
        let mut buffer = vec![0; READ_BYTES];
        while self.len < existing {
            if observer.is_cancelled() {
                return Err(HubError::Cancelled);
            }
            let count = self.file.read(&mut buffer).map_err(|error| HubError::files(&self.path, &error))?;
            if count == 0 {
                break;
            }
            self.hash.update(&buffer[..count]);
            self.len += count as u64;
        }
        Ok(())
    }

    /// Returns the number of bytes in the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Empties the file.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn restart(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(|error| HubError::files(&self.path, &error))?;
        (self.hash, self.len) = (RunningHash::new(&self.target.hash, self.target.size), 0);
        Ok(())
    }

    /// Appends bytes of the content.
    ///
    /// # Errors
    /// As [`Self::open`]. The bytes of a failed call may be in the file, which is then not used further.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(|error| HubError::files(&self.path, &error))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Checks the hash of the complete file and gives it its final name. A file with another hash is removed.
    ///
    /// # Errors
    /// [`HubError::WrongHash`]; as [`Self::open`].
    pub fn finish(self, blob: &Path) -> Result<(), HubError> {
        let Self { target, path, file, hash, .. } = self;
        let failed = |error: std::io::Error| HubError::files(&path, &error);
        let found = hash.hex();
        if found != target.hash.hex() {
            drop(file);
            std::fs::remove_file(&path).map_err(failed)?;
            let expected = target.hash.hex().to_owned();
            return Err(HubError::WrongHash { path: target.path.clone(), expected, found });
        }
        // The content is on disk before the name says that it is complete.
        file.sync_all().map_err(failed)?;
        std::fs::rename(&path, blob).map_err(failed)?;
        sync_folder_of(blob); // a lost rename leaves the complete partial file
        Ok(())
    }
}
