//! What removing takes with it: a session, what was said in it, and the KV on disk that only it used.
//!
//! Invariants: a session is found by nobody from the moment on that its lock is given up; a page that the conversation of
//! any other session begins with stays. Where that cannot be known, because another transcript cannot be read, the page
//! stays, and the caller is told why.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::folder::{self, Lock, io_error};
use super::lock;
use super::token_history::each_sequence;
use super::{SessionName, SessionStore, TRANSCRIPT, unfinished_name};
use crate::runtime::error::Result;
use crate::runtime::kv::disk::{self, PageName};

/// What was removed of the KV on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forgotten {
    pub num_pages: usize,
    /// Pages that stay, because the sessions below cannot be read and may use them.
    pub num_kept: usize,
    pub unreadable: Vec<SessionName>,
    /// Why not all pages are removed.
    pub problem: Option<String>,
}

/// What `SessionStore::purge` did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Purged {
    /// Bytes that the session's files take less.
    pub num_bytes: u64,
    pub kv: Forgotten,
}

impl SessionStore {
    /// Removes a session with all that lies in its folder, and the pages of KV that no other session uses.
    ///
    /// # Errors
    /// As [`Self::open`]; a session whose content is damaged can be removed.
    pub fn remove(&self, name: &SessionName) -> Result<Forgotten> {
        let folder = self.existing(name)?;
        let lock = folder::lock(&folder, name)?;
        self.remove_locked(&folder, lock)
    }

    /// The lock is held until nobody can find the session any more.
    pub(super) fn remove_locked(&self, folder: &Path, lock: Lock) -> Result<Forgotten> {
        let doomed = self.root.join(unfinished_name());
        lock::take_away(lock, folder, &doomed)?;
        let told = self.kv.as_ref().map(|_| told_in(&doomed));
        fs::remove_dir_all(&doomed).map_err(|error| io_error(&doomed, &error))?;
        Ok(told.map(|told| self.forget(told)).unwrap_or_default())
    }

    /// Removes what was undone, edited away or damaged from a session's files, and the KV that only it had left.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn purge(&self, name: &SessionName) -> Result<Purged> {
        let mut writer = self.open(name)?;
        let folder = self.path(name);
        let told = told_in(&folder);
        let before = folder_bytes(&folder);
        writer.compact()?;
        for path in transcripts(&folder).into_iter().filter(|path| !path.ends_with(TRANSCRIPT)) {
            fs::remove_file(&path).map_err(|error| io_error(&path, &error))?;
        }
        let num_bytes = before.saturating_sub(folder_bytes(&folder));
        Ok(Purged { num_bytes, kv: self.forget(told) })
    }

    /// Removes those pages that no session begins with.
    fn forget(&self, mut names: HashSet<PageName>) -> Forgotten {
        let mut forgotten = Forgotten::default();
        let Some(kv) = self.kv.as_ref().filter(|_| !names.is_empty()) else { return forgotten };
        // Whosever they are: pages know no owner.
        let entries = self.owners.roots().into_iter().filter_map(|root| fs::read_dir(root).ok()).flatten();
        let sessions = entries.flatten().filter_map(|entry| {
            let name = SessionName::from_folder(entry.file_name().to_str()?)?;
            Some((name, entry.path()))
        });
        // Looked for among all of them, because what is shared is followed from the first page on.
        let mut kept = HashSet::new();
        for (session, folder) in sessions {
            let used = used_in(&folder.join(TRANSCRIPT), &names);
            if used.is_unknown {
                forgotten.unreadable.push(session);
            }
            kept.extend(used.names);
        }
        names.retain(|name| !kept.contains(name));
        if !forgotten.unreadable.is_empty() {
            forgotten.num_kept = names.len();
            forgotten.unreadable.sort();
            return forgotten;
        }
        match disk::forget(kv, &names) {
            Ok(num_pages) => forgotten.num_pages = num_pages,
            Err(error) => forgotten.problem = Some(format!("{}: {error}", kv.display())),
        }
        forgotten
    }
}

/// What a session uses of some pages.
#[derive(Default)]
struct Used {
    names: HashSet<PageName>,
    /// As far as it can be read it uses nothing but those pages, and what follows is not known.
    is_unknown: bool,
}

fn used_in(transcript: &Path, names: &HashSet<PageName>) -> Used {
    let mut used = Used::default();
    let bytes = match folder::read_file(transcript) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return used, // no session, or one that was just removed
        Err(_) => return Used { is_unknown: true, ..used },
    };
    let mut departs = false;
    let is_whole = each_sequence(&bytes, |tokens| {
        // A name stands for all pages before it, so the first that is not among them ends what is shared.
        for name in disk::names(tokens) {
            if !names.contains(&name) {
                departs = true;
                break;
            }
            used.names.insert(name);
        }
    });
    used.is_unknown = !is_whole && !departs;
    used
}

/// The names of all pages that the transcripts in a session's folder ever told, as far as they can be read.
fn told_in(folder: &Path) -> HashSet<PageName> {
    let mut names = HashSet::new();
    for path in transcripts(folder) {
        if let Ok(Some(bytes)) = folder::read_file(&path) {
            each_sequence(&bytes, |tokens| names.extend(disk::names(tokens)));
        }
    }
    names
}

/// The transcript, damaged ones that a repair has kept, and what a crash left of a new one.
fn transcripts(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_transcript = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("transcript."))
    };
    paths.filter(is_transcript).collect()
}

fn folder_bytes(folder: &Path) -> u64 {
    let len = |path: PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
    transcripts(folder).into_iter().map(len).sum()
}
