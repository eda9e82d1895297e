//! Files and folders that only their owner can read, for conversations and what is computed from them.
//!
//! Knows nothing of the content. On other systems than Unix, permissions are inherited from the folder above.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens a file that only its owner can read.
///
/// # Errors
/// Errors of opening.
pub fn private_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.open(path)
}

/// Creates a folder for its owner only. With `with_parents` also creates those above it, and accepts an
/// existing one.
///
/// # Errors
/// Errors of creating.
pub fn private_folder(path: &Path, with_parents: bool) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(with_parents);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Returns the mode of a file that others may read or write; `None` for a private one, or if the system has
/// no modes.
pub fn mode_for_others(path: &Path) -> Option<u32> {
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).ok()?.permissions()) & 0o777;
        (mode & 0o077 != 0).then_some(mode)
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}
