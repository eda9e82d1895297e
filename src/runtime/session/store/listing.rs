//! What sessions there are: a summary of each, kept in memory as long as its file is the same one, of the same length and
//! time. A file that is only added to is read again as a whole, one that rests is not.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::folder::io_error;
use super::saved::{Branch, ForkOf, SavedSession};
use super::{ModelFingerprint, SessionName, SessionStore, TRANSCRIPT, load, read_transcript};
use crate::runtime::error::{Error, Result};

/// One session in a list.
#[derive(Debug, Clone)]
pub struct Listed {
    pub name: SessionName,
    /// What cannot be read is listed too, with the reason.
    pub summary: Result<SessionSummary>,
}

impl Listed {
    /// The branch that it is, if it is one.
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
    /// Bytes of the transcript.
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

/// Summaries of files as they were when they were read.
#[derive(Debug, Default)]
pub struct Summaries(Mutex<HashMap<SessionName, (Stamp, Result<SessionSummary>)>>);

/// Equal only while nobody has written to a file. A line that is added makes it longer, a rewrite another file.
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
    /// All sessions, by name. Folders that are none are passed over.
    ///
    /// # Errors
    /// [`Error::Store`] when the folder itself cannot be read; one that does not exist yet holds no sessions.
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
        // What is gone need not be remembered.
        self.summaries
            .locked()
            .retain(|name, _| listed.binary_search_by(|known| known.name.cmp(name)).is_ok());
        Ok(listed)
    }

    /// What is remembered of a file, or what it says now.
    fn summary(&self, name: &SessionName) -> Result<SessionSummary> {
        let path = self.path(name).join(TRANSCRIPT);
        let metadata = fs::metadata(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::SessionNotFound(name.to_string()),
            _ => io_error(&path, &error),
        })?;
        // Taken before the file is read: what is written meanwhile is seen the next time.
        let stamp = Stamp::of(&metadata);
        if let Some((known, summary)) = self.summaries.locked().get(name)
            && *known == stamp
        {
            return summary.clone();
        }
        let bytes = read_transcript(&path, name)?;
        let saved = load(&path, &bytes).into_result();
        let summary = saved.map(|(_, saved)| SessionSummary::of(&saved, bytes.len() as u64));
        self.summaries.locked().insert(name.clone(), (stamp, summary.clone()));
        summary
    }
}

impl Summaries {
    fn locked(&self) -> std::sync::MutexGuard<'_, HashMap<SessionName, (Stamp, Result<SessionSummary>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
