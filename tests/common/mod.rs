//! What several test modules share.

pub mod decoder;
pub mod golden;

use std::path::{Path, PathBuf};

/// The folder of shared fixtures; says so and gives `None` where there is none.
pub fn fixtures() -> Option<PathBuf> {
    let folder = match std::env::var_os("LLMCTL_FIXTURES") {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
    };
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no fixtures at {}", folder.display());
    None
}
