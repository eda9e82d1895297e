//! Compares blobs with their names: sha256 of the bytes (64 digits, large files), or git's object id (40
//! digits): sha1 of `blob <length>\0` and the bytes.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::BlobFile;
use crate::remote::{FileHash, RunningHash};

const CHUNK_BYTES: usize = 1 << 20;

/// Result of comparing one blob with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlobState {
    Good,
    /// The hash of the bytes.
    Damaged(String),
    /// The name is no hash: it is what another server sent as the file's tag.
    Unnamed,
    /// Message of the failure to read it.
    Unreadable(String),
}

/// A blob and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlobCheck {
    pub blob: BlobFile,
    pub state: BlobState,
}

/// Reads a blob and compares it with its name. `progress` gets the number of bytes of each chunk.
pub fn check_blob(blob: &BlobFile, progress: &mut dyn FnMut(u64)) -> BlobCheck {
    let state = match FileHash::parse(&blob.name.to_ascii_lowercase()) {
        None => BlobState::Unnamed,
        Some(named) => match hash(&blob.path, RunningHash::new(&named, blob.bytes), progress) {
            Ok(hash) if hash == named.hex() => BlobState::Good,
            Ok(hash) => BlobState::Damaged(hash),
            Err(error) => BlobState::Unreadable(error.to_string()),
        },
    };
    BlobCheck { blob: blob.clone(), state }
}

/// Hashes a file.
fn hash(path: &Path, mut hash: RunningHash, progress: &mut dyn FnMut(u64)) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hash.hex()),
            count => {
                hash.update(&chunk[..count]);
                progress(count as u64);
            }
        }
    }
}
