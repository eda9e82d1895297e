//! What several test modules share: fixtures, writers of small model files.

pub mod alloc;
pub mod gguf;
pub mod golden;
pub mod k_quants;
pub mod remote;
pub mod scripted;
pub mod server;
#[cfg(unix)]
pub mod terminal;
pub mod toy;
pub mod watched;

/// The folder of shared test data, or `None` (with a note) where it is absent.
pub fn fixtures() -> Option<std::path::PathBuf> {
    let folder = std::env::var_os("LLMCTL_FIXTURES").map_or_else(
        || std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"),
        std::path::PathBuf::from,
    );
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no fixtures at {}", folder.display());
    None
}
