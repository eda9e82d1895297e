//! Files that others wrote, read within a limit.

use std::io::Read;
use std::path::Path;

use crate::error::LoadError;

/// Reads a file of at most `limit` bytes; `None` if it does not exist.
///
/// # Errors
/// [`LoadError::Io`] if it cannot be read or is not a regular file; [`LoadError::Malformed`] if it is longer.
pub fn read_optional(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, LoadError> {
    // Checked before opening: opening a pipe would wait for a writer.
    match std::fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            return Err(LoadError::Io { path: path.into(), message: "not a regular file".into() });
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(LoadError::io(path, &error)),
        Ok(_) => {}
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| LoadError::io(path, &error))?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| LoadError::io(path, &error))?;
    if bytes.len() as u64 > limit {
        return Err(LoadError::malformed(path, "size", format!("the file is longer than {limit} bytes")));
    }
    Ok(Some(bytes))
}
