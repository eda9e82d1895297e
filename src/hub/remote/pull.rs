//! Plans a download and runs it: which files, what is there already, several files at once, then the links.
//!
//! Invariant: a snapshot gets its links only when every file of the plan is complete and checked; companions
//! come first, config.json and the first part of a split file last, so that a set that is cut off even then is
//! seen as incomplete.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::super::HubPaths;
use super::super::quant_tag::is_companion;
use super::super::reference::HubRef;
use super::client::HubClient;
use super::error::HubError;
use super::listing::{RemoteFile, RemoteListing, list_remote};
use super::observer::{PullEvent, PullObserver};
use super::parts::{download, small_file};
use super::selection::{INDEX, PullExtent, RemoteSelection, indexed_weights, select};
use super::store::RepoStore;
use llmctl_base::notice::Notice;

/// Files that are downloaded at the same time.
const MAX_FILES: usize = 4;

/// The branch of a reference without a revision.
const DEFAULT_REVISION: &str = "main";

/// Files to download, and where they go.
#[derive(Debug, Clone)]
pub struct PullPlan {
    listing: RemoteListing,
    store: RepoStore,
    files: Vec<RemoteFile>,
    absent: Vec<String>,
    /// Reference of these files for `--model`.
    pub reference: String,
    /// Choices made for the user.
    pub notices: Vec<Notice>,
    /// Size of all files in bytes.
    pub total_bytes: u64,
    /// Bytes that are on disk already, of complete files and of partial ones.
    pub present_bytes: u64,
}

impl PullPlan {
    /// Asks the hub what `hub` needs, to be written to the cache of `paths`.
    ///
    /// # Errors
    /// The hub's refusal; a reference that fits no file, or several; [`HubError::Cancelled`].
    pub fn new(
        client: &HubClient,
        hub: &HubRef,
        paths: &HubPaths,
        extent: PullExtent,
        observer: &dyn PullObserver,
    ) -> Result<Self, HubError> {
        let no_cache =
            || HubError::Setting { name: "HF_HUB_CACHE", message: "there is no cache folder".to_owned() };
        let cache = paths.cache.as_deref().ok_or_else(no_cache)?;
        let revision = hub.revision.as_deref().unwrap_or(DEFAULT_REVISION);
        let listing = list_remote(client, &hub.repo_id(), revision, observer)?;
        let store = RepoStore::new(cache, &listing.repo);
        let selection = select(&listing, hub, paths.memory, extent)?;
        let RemoteSelection { mut files, absent, needs_index, reference, notice } = selection;
        if needs_index && let Some(index) = listing.file(INDEX) {
            let index = match std::fs::read(store.blob(index)) {
                Ok(bytes) if store.has(index) => bytes,
                _ => small_file(client, &listing, index, observer)?,
            };
            files.extend(indexed_weights(&listing, &index)?);
        }
        let renamed = listing.renamed.clone();
        let renamed = renamed.map(|name| Notice::Renamed { repo: listing.repo.clone(), name });
        let notices = renamed.into_iter().chain(notice).collect();
        let total_bytes = files.iter().map(|file| file.size).sum();
        let present_bytes = files.iter().map(|file| store.bytes_of(file)).sum();
        Ok(Self { listing, store, files, absent, reference, notices, total_bytes, present_bytes })
    }

    pub fn repo(&self) -> &str {
        &self.listing.repo
    }

    pub fn commit(&self) -> &str {
        &self.listing.commit
    }

    /// Returns the files with their sizes.
    pub fn files(&self) -> &[RemoteFile] {
        &self.files
    }

    /// Returns the bytes of a file that are on disk.
    pub fn present_bytes_of(&self, file: &RemoteFile) -> u64 {
        self.store.bytes_of(file)
    }

    /// Returns the bytes that were not on disk when the plan was made.
    pub fn missing_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.present_bytes)
    }

    /// Returns the path of the model: its GGUF file (the first part), else the snapshot's folder.
    pub fn path(&self) -> PathBuf {
        let folder = self.store.snapshot(&self.listing.commit);
        match self.files.iter().find(|file| file.path.ends_with(".gguf")) {
            Some(first) => folder.join(&first.path),
            None => folder,
        }
    }

    /// Checks that the missing bytes fit into the `free` bytes of the cache's file system.
    ///
    /// # Errors
    /// [`HubError::DiskFull`].
    pub fn check_space(&self, free: Option<u64>) -> Result<(), HubError> {
        let needed = self.missing_bytes();
        match free {
            Some(available) if available < needed => {
                Err(HubError::DiskFull { folder: self.store.cache().to_path_buf(), needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Downloads the files and links them into the snapshot.
    ///
    /// # Errors
    /// Any [`HubError`]. Complete and partial files are kept, for the next attempt.
    pub fn run(&self, client: &Arc<HubClient>, observer: &dyn PullObserver) -> Result<(), HubError> {
        self.store.prepare()?;
        self.download_all(client, observer)?;
        if !self.files.iter().all(|file| self.store.has(file)) {
            self.download_all(client, observer)?; // another process has erased what nothing linked to yet
        }
        let mut files: Vec<&RemoteFile> = self.files.iter().collect();
        let order = |path: &str| (path == "config.json", !is_companion(path));
        files.sort_by_key(|file| (order(&file.path), std::cmp::Reverse(&file.path)));
        let commit = &self.listing.commit;
        files.into_iter().try_for_each(|file| self.store.link(commit, file))?;
        self.absent.iter().try_for_each(|path| self.store.mark_absent(commit, path))?;
        self.store.write_tree(&self.listing)?;
        self.store.set_ref(&self.listing.revision, commit)
    }

    /// Downloads several files at a time; the first failure stops the others.
    fn download_all(&self, client: &Arc<HubClient>, observer: &dyn PullObserver) -> Result<(), HubError> {
        let num_workers = self.files.len().min(MAX_FILES);
        let connections = (client.settings().connections / num_workers.max(1)).max(1);
        let (next, failure) = (AtomicUsize::new(0), Mutex::new(None));
        let group = DownloadGroup { observer, has_failed: AtomicBool::new(false) };
        let work = || {
            while let Some(file) = self.files.get(next.fetch_add(1, Ordering::SeqCst)) {
                if let Err(error) = download(client, &self.store, &self.listing, file, connections, &group) {
                    // Later failures are only the others' end.
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    group.has_failed.store(true, Ordering::SeqCst);
                    break;
                }
            }
        };
        thread::scope(|scope| {
            (1..num_workers).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// The files of one plan, which stop together.
struct DownloadGroup<'a> {
    observer: &'a dyn PullObserver,
    has_failed: AtomicBool,
}

impl PullObserver for DownloadGroup<'_> {
    fn event(&self, event: PullEvent) {
        self.observer.event(event);
    }

    fn is_cancelled(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst) || self.observer.is_cancelled()
    }
}
