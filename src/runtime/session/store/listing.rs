//! Lists sessions with a summary of each. A summary is cached while its file has the same identity, length
//! and time. A file that has grown is read again as a whole.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::folder::io_error;
use super::record::Branch;
use super::saved::{ForkOf, SavedSession};
use super::{ModelFingerprint, SessionName, SessionStore, TRANSCRIPT, read_transcript};
use llmctl_base::error::{Error, Result};

/// An entry of the list.
#[derive(Debug, Clone)]
pub struct Listed {
    pub name: SessionName,
    /// An error for a session that cannot be read.
    pub summary: Result<SessionSummary>,
}

impl Listed {
    /// Returns the branch record, if the session is a branch.
    pub fn branch(&self) -> Option<&Branch> {
        self.summary.as_ref().ok()?.fork_of.as_ref()?.branch.as_ref()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionSummary {
    pub id: String,
    pub owner: Option<String>,
    pub fork_of: Option<ForkOf>,
    pub turns: usize,
    pub tokens: usize,
    pub created_ms: u64,
    pub last_used_ms: u64,
    pub model: ModelFingerprint,
    /// Size of the transcript in bytes.
    pub num_bytes: u64,
}

impl SessionSummary {
    pub fn of(saved: &SavedSession, num_bytes: u64) -> Self {
        Self {
            id: saved.id.clone(),
            owner: saved.owner.clone(),
            fork_of: saved.fork_of.clone(),
            turns: saved.turns.len(),
            tokens: saved.num_tokens(),
            created_ms: saved.created_ms,
            last_used_ms: saved.last_used_ms,
            model: (*saved.model).clone(),
            num_bytes,
        }
    }
}

/// Cache of summaries, by name.
#[derive(Debug, Default)]
pub struct Summaries(Mutex<HashMap<SessionName, (Stamp, Result<SessionSummary>)>>);

/// Identity of a file's content: appending changes the length, a rewrite the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    len: u64,
    modified: Option<SystemTime>,
    #[cfg(unix)]
    file: (u64, u64),
}

impl Stamp {
    #[cfg(unix)]
    fn of(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        let file = (metadata.dev(), metadata.ino());
        Self { len: metadata.len(), modified: metadata.modified().ok(), file }
    }

    #[cfg(not(unix))]
    fn of(metadata: &Metadata) -> Self {
        Self { len: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl SessionStore {
    /// Lists all sessions by name. Folders that are not sessions are skipped.
    ///
    /// # Errors
    /// [`Error::Store`] if the root cannot be read. A root that does not exist is empty.
    pub fn list(&self) -> Result<Vec<Listed>> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error(&self.root, &error)),
        };
        let mut listed = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| io_error(&self.root, &error))?;
            let Some(name) = entry.file_name().to_str().and_then(SessionName::from_folder) else { continue };
            if entry.path().join(TRANSCRIPT).exists() {
                listed.push(Listed { summary: self.summary(&name), name });
            }
        }
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        // Drop cached summaries of sessions that are gone.
        self.summaries
            .0
            .lock()
            .retain(|name, _| listed.binary_search_by(|known| known.name.cmp(name)).is_ok());
        Ok(listed)
    }

    /// Returns the summary from the cache or the file.
    fn summary(&self, name: &SessionName) -> Result<SessionSummary> {
        let path = self.path(name).join(TRANSCRIPT);
        let metadata = fs::metadata(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::SessionNotFound(name.to_string()),
            _ => io_error(&path, &error),
        })?;
        // Taken before the file is read, so that a later change is noticed the next time.
        let stamp = Stamp::of(&metadata);
        if let Some((known, summary)) = self.summaries.0.lock().get(name)
            && *known == stamp
        {
            return summary.clone();
        }
        let bytes = read_transcript(&path, name)?;
        let loaded = self.load(&path, &bytes).into_result();
        let summary = loaded.map(|loaded| SessionSummary::of(&loaded.saved, bytes.len() as u64));
        self.summaries.0.lock().insert(name.clone(), (stamp, summary.clone()));
        summary
    }
}
