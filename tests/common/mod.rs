//! What several test modules share.

use std::path::{Path, PathBuf};

/// The folder of test data: `LLMCTL_FIXTURES`, else `../shared/fixtures` beside the repository. Says so when absent.
pub fn fixtures() -> Option<PathBuf> {
    let root = std::env::var_os("LLMCTL_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"), PathBuf::from);
    if root.is_dir() {
        return Some(root);
    }
    eprintln!("skipped: no fixtures at {}", root.display());
    None
}
