//! Files and folders that only their owner can read: conversations, and what is computed from them.
//!
//! Knows nothing of what the files say. Elsewhere than on Unix the modes are those of the folder above.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

/// # Errors
/// Those of opening.
pub fn private_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.open(path)
}

/// Creates a folder for its owner only; with `with_parents` also those above it, and one that exists is fine.
///
/// # Errors
/// Those of creating.
pub fn private_folder(path: &Path, with_parents: bool) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(with_parents);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// The mode of a file that others than its owner may read or write; nothing for a private one, or where that is not known.
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
