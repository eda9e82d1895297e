//! When llmctl last loaded each model: a file per model below `$XDG_STATE_HOME/llmctl/models/`, named by a
//! hash of the path that was loaded, whose content is that path and whose modification time is the time.
//!
//! Not the files' access time: file systems are mounted without it, or update it once a day, and backups and
//! `verify` change it. Not a file in the cache: other tools read that layout. A record that cannot be written
//! is no error.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use crate::cli::places::Places;
use crate::cli::terminal::report::age;
use llmctl_base::private_files::{private_file, private_folder};
use llmctl_engine::session::store::now_ms;
use llmctl_hub::Resolved;

fn record_path(model: &Path, places: &Places) -> Option<PathBuf> {
    let hash = Sha256::digest(model.as_os_str().as_encoded_bytes());
    let name: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    Some(places.state.as_ref()?.join("models").join(name))
}

/// Records that a model was loaded now.
pub fn record(model: &Resolved, places: &Places) {
    let Ok(path) = std::path::absolute(model.source.path()) else { return };
    let path = if model.source.built_in().is_some() { model.source.path().to_path_buf() } else { path };
    let Some(record) = record_path(&path, places) else { return };
    if let Err(error) = write(&record, &path) {
        tracing::debug!("{}: the use of the model is not recorded: {error}", record.display());
    }
}

fn write(record: &Path, model: &Path) -> io::Result<()> {
    if let Some(folder) = record.parent() {
        private_folder(folder, true)?;
    }
    let mut file = private_file(OpenOptions::new().write(true).create(true).truncate(true), record)?;
    file.write_all(model.as_os_str().as_encoded_bytes())
}

/// Returns when llmctl last loaded the model at `path`, in milliseconds since 1970; `None` if never.
pub fn last_used_ms(path: &Path, places: &Places) -> Option<u64> {
    let modified = fs::metadata(record_path(path, places)?).ok()?.modified().ok()?;
    u64::try_from(modified.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()
}

/// Removes the record of an erased model.
pub fn forget(path: &Path, places: &Places) {
    if let Some(record) = record_path(path, places) {
        // A model that was never used has no record; the error of removing it is ignored.
        let _ = fs::remove_file(record);
    }
}

/// Formats the time since the last use.
pub fn describe(last_used_ms: Option<u64>) -> String {
    last_used_ms.map_or_else(|| "never".to_owned(), |at| age(now_ms().saturating_sub(at)))
}
