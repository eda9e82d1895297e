//! Compares blobs with their names: sha256 of the bytes (64 digits, large files), or git's object id (40
//! digits): sha1 of `blob <length>\0` and the bytes.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::BlobFile;

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
    let is_hex = blob.name.bytes().all(|b| b.is_ascii_hexdigit());
    let hash = match blob.name.len() {
        64 if is_hex => hash::<Sha256>(&blob.path, None, progress),
        40 if is_hex => hash::<Sha1>(&blob.path, Some(blob.bytes), progress),
        _ => return BlobCheck { blob: blob.clone(), state: BlobState::Unnamed },
    };
    let state = match hash {
        Ok(hash) if hash.eq_ignore_ascii_case(&blob.name) => BlobState::Good,
        Ok(hash) => BlobState::Damaged(hash),
        Err(error) => BlobState::Unreadable(error.to_string()),
    };
    BlobCheck { blob: blob.clone(), state }
}

/// Hashes a file; with `git_length`, as a git object of that length.
fn hash<D: Digest>(
    path: &Path,
    git_length: Option<u64>,
    progress: &mut dyn FnMut(u64),
) -> io::Result<String> {
    let mut hasher = D::new();
    if let Some(length) = git_length {
        hasher.update(format!("blob {length}\0"));
    }
    let mut file = File::open(path)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk)? {
            0 => break,
            count => {
                hasher.update(&chunk[..count]);
                progress(count as u64);
            }
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
