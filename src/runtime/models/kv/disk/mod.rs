//! KV pages on disk, so that a conversation is warm again after a restart.
//!
//! The engine's thread sends requests and polls for events; one I/O thread does all reading and writing. Only
//! [`DiskStore::open`], [`DiskStore::wait`], [`DiskStore::flush`] and dropping wait for the disk;
//! [`DiskStore::contains`] asks the system for the name of a page that this process does not know. Reads come
//! before writes. Invariants: [`DiskEvent::Loaded`] delivers exactly what was saved under that key, parent
//! and tokens, verified by a checksum; everything else is [`DiskEvent::Missing`] with a reason. Each
//! requested page is answered once. Saving is best effort: a page that does not fit is dropped and counted,
//! and the first error turns saving off with one notice while loading continues. Any number of processes may
//! share a root: files are immutable and named by content.
//!
//! Loaded bytes are those of the mapped file, where the system maps files and lets a mapped one be removed
//! and replaced. No process changes a file in place, so they stay the verified ones; a file that is removed
//! while a page is in use takes room on the disk until the page is freed, beyond the limit. What the system
//! drops from memory it reads again unverified, as it does the weights: an error of the disk then ends the
//! process (SIGBUS).
//!
//! With a [`Vault`], new files are sealed. A sealed page is opened into memory of its own, as much as the pool counts for a page.
//!
//! `page` is the file format, `image_rows` keeps embeddings of images beside the pages, `folder` is the layout, `io_queue` the requests and answers, `io_thread` the
//! thread, `portable` what moves pages between machines, `warm` prompts whose pages stay. The caller decides which pages to save and interprets their bytes.

mod folder;
mod image_rows;
mod io_queue;
mod io_thread;
pub mod page;
mod portable;
mod warm;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::Value;

use self::folder::{Folder, page_path};
use self::io_queue::IoQueue;
use crate::tensor::SharedBytes;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_base::vault::{KeyId, Vault};

pub use self::folder::{file_name, forget, parse_file_name};
pub use self::image_rows::{ImageFolder, decode_any, forget_images};
pub use self::page::FORMAT_VERSION;
pub use self::portable::{
    ForeignPages, PageSet, find_pages, foreign_pages, forget_origin, set_origin, take_over,
};
pub use self::warm::{WarmPrompt, has_pages, pinned_bytes};
pub use super::prefix::{PageName, names};

/// Bytes that may wait to be written, and again as many that may wait to be polled: 18 pages of an 8B model.
pub const DEFAULT_QUEUE_BYTES: u64 = 64 << 20;
const MAX_FINGERPRINT_BYTES: usize = 128;

impl From<PageName> for KeyId {
    fn from(name: PageName) -> Self {
        Self(name.0)
    }
}

/// Key of one page of one group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskPageKey {
    pub name: PageName,
    pub group: u8,
}

/// A page's key and the content that its name is derived from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageLabel {
    pub key: DiskPageKey,
    /// Name of the preceding page; `None` for the first.
    pub parent: Option<PageName>,
    /// See [`PageContent::tokens`](super::PageContent::tokens).
    pub tokens: Box<[u32]>,
    /// Number of pages before this one in its sequence. Among pages last used together, the deepest are removed
    /// first.
    pub depth: u32,
}

/// A use of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageUse {
    /// See [`PageLabel::depth`].
    pub depth: u32,
    /// Another session than the one that computed it begins with the page. It is then evicted after all pages of single
    /// sessions, unless a month passes without a use.
    pub is_shared: bool,
}

/// Location, limit and fingerprint of a page store.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// Folder that may hold the pages of other fingerprints too.
    pub root: PathBuf,
    /// Limit in bytes over all pages below `root`, of all fingerprints; 0 turns the store off. Processes that share a
    /// root keep the limit together, within a sixteenth for each process beyond the first.
    pub limit_bytes: u64,
    /// Folder name; equal only for models that compute the same bits.
    pub fingerprint: String,
    /// Description of the fingerprint for the manifest; equal whenever the fingerprint is.
    pub description: Value,
    /// Bytes that may wait to be written, and again as many that may wait to be polled. A single page may be larger.
    pub queue_bytes: u64,
    /// Keys that new files are sealed with; `None` leaves them plain. Files of both forms are read.
    pub vault: Option<Vault>,
}

/// Result of saving a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    Queued,
    /// The page is saved or queued already; its time of use is updated.
    Known,
    /// The queue is full, the page is larger than the limit, or saving is off.
    Dropped,
}

/// Reason why a requested page was not delivered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MissingReason {
    #[error("it is not on disk")]
    Absent,
    /// The file is damaged. It has been removed if the system allowed it.
    #[error("{0}")]
    Damaged(String),
    /// The file is intact but belongs to a page with other tokens, another parent or another size. It has been
    /// removed as well.
    #[error("{0}")]
    Mismatch(String),
    /// The system could not read the file. It stays, but is not requested again.
    #[error("{0}")]
    Io(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskEvent {
    Loaded { key: DiskPageKey, bytes: SharedBytes },
    Missing { key: DiskPageKey, reason: MissingReason },
    Notice(Notice),
}

/// Counts since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub saved_pages: u64,
    pub saved_bytes: u64,
    pub loaded_pages: u64,
    pub loaded_bytes: u64,
    /// Pages requested but not delivered, for any reason.
    pub missing_pages: u64,
    /// Pages not saved: the queue was full, the page was larger than the limit, or saving was off.
    pub dropped_pages: u64,
    /// Pages that this process removed to keep the limit.
    pub removed_pages: u64,
}

/// The handle that the engine's thread owns. Dropping it stops the I/O thread after the current file and discards the
/// queue, so call [`flush`](Self::flush) first.
#[derive(Debug)]
pub struct DiskStore {
    queue: Arc<IoQueue>,
    folder: Arc<Folder>,
    limit_bytes: u64,
    thread: Option<JoinHandle<()>>,
}

impl DiskStore {
    /// Lists the saved pages and starts the I/O thread. Creates no folder: the first saved page does.
    ///
    /// A problem with the folder is a notice, not an error: saving is then off, and if the manifest belongs to
    /// another model, loading is off too.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the fingerprint is not a plain name; [`Error::Backend`] if the system cannot
    /// start a thread.
    pub fn open(config: DiskConfig) -> Result<Self> {
        check_fingerprint(&config.fingerprint)?;
        let DiskConfig { root, limit_bytes, fingerprint, description, queue_bytes, vault } = config;
        let folder = Arc::new(Folder::new(root, &fingerprint, &description).with_vault(vault));
        let queue = Arc::new(IoQueue::new(queue_bytes));
        let mut store = Self { queue, folder: Arc::clone(&folder), limit_bytes, thread: None };
        if limit_bytes == 0 {
            return Ok(store);
        }
        if let Err(reason) = folder.check_manifest() {
            store.queue.stop_saving(&reason);
            return Ok(store);
        }
        match folder.list() {
            Ok(found) => store.queue.replace_index(found.into_iter()),
            Err(error) => store.queue.stop_saving(&format!("{}: {error}", folder.path().display())),
        }
        let queue = Arc::clone(&store.queue);
        let thread = thread::Builder::new().name("kv-disk".to_owned());
        let body = move || io_thread::run(&queue, &folder, limit_bytes);
        let started = thread
            .spawn(body)
            .map_err(|error| Error::Backend(format!("the thread for KV on disk: {error}")))?;
        store.thread = Some(started);
        Ok(store)
    }

    /// Returns whether the page is saved or queued. A page that this process has not saved is looked for on disk, because
    /// another process that shares the root may have saved it meanwhile.
    pub fn contains(&self, key: DiskPageKey) -> bool {
        self.queue.contains(key) || (self.thread.is_some() && self.folder.has(key) && self.queue.learn(key))
    }

    /// Returns the descriptions of other fingerprints whose pages have the middle one of these, which are those of a prompt: one
    /// that only begins as another has nothing there.
    pub fn elsewhere(&self, names: &[PageName]) -> Vec<Value> {
        let name = names.get(names.len() / 2).filter(|_| self.thread.is_some());
        let Some(&name) = name else { return Vec::new() };
        let has = |of: &Path| (0..4).any(|group| page_path(of, DiskPageKey { name, group }).is_file());
        let is_other = |path: &Path| path != self.folder.path() && has(path);
        let others = portable::fingerprints(self.folder.root(), is_other).unwrap_or_default();
        others.into_iter().map(|(_, facts)| facts).collect()
    }

    /// Returns the description of the store's fingerprint.
    pub fn description(&self) -> &Value {
        self.folder.description()
    }

    /// Records that a page is still in use, so that other pages are evicted first. Returns false if the page is not on
    /// disk.
    pub fn touch(&self, key: DiskPageKey, page_use: PageUse) -> bool {
        self.thread.is_some() && self.queue.touch(key, page_use)
    }

    /// Queues a page to be written.
    pub fn save(&self, label: PageLabel, bytes: Vec<u8>) -> Saving {
        if self.thread.is_none() || self.folder.file_len(&label, bytes.len()) > self.limit_bytes {
            return self.queue.drop_page();
        }
        self.queue.save(label, bytes)
    }

    /// Returns whether [`save`](Self::save) would queue a page of this size now, so that no page is copied out of a
    /// device in vain.
    pub fn takes(&self, num_bytes: usize) -> bool {
        self.thread.is_some() && self.queue.takes(num_bytes as u64)
    }

    /// Returns whether saving is on.
    pub fn is_saving(&self) -> bool {
        self.thread.is_some() && self.queue.is_saving()
    }

    /// Returns the folder of images' embeddings; `None` if the store is off.
    pub fn images(&self) -> Option<ImageFolder> {
        let folder = || ImageFolder::new(self.folder.root(), self.limit_bytes);
        self.thread.as_ref().map(|_| folder().with_vault(self.folder.vault().cloned()))
    }

    /// Folder of the pages of all fingerprints.
    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// Limit of the pages on disk, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Requests a page with a payload of `num_bytes`. One `Loaded` or `Missing` event answers it.
    pub fn load(&self, label: PageLabel, num_bytes: usize) {
        self.queue.load(label, num_bytes, self.thread.is_some());
    }

    /// Returns the events since the last call, without waiting.
    pub fn poll(&self) -> Vec<DiskEvent> {
        self.queue.poll()
    }

    /// Waits until there is an event to poll, for a thread that is otherwise idle. Returns false on timeout.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.queue.wait(timeout)
    }

    /// Returns whether requested pages have answers that were not polled yet.
    pub fn is_loading(&self) -> bool {
        self.queue.is_loading()
    }

    /// Returns whether anything is queued, in progress, or not polled yet.
    pub fn is_busy(&self) -> bool {
        self.queue.is_busy()
    }

    /// Waits until everything queued is written (or dropped, if saving is off). Returns false on timeout.
    pub fn flush(&self, timeout: Duration) -> bool {
        self.queue.flush(timeout)
    }

    pub fn stats(&self) -> DiskStats {
        self.queue.stats()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.queue.stop();
        if let Some(thread) = self.thread.take() {
            drop(thread.join()); // after a panic there, requests were answered with `Missing`
        }
    }
}

/// Checks that the fingerprint can name a folder.
fn check_fingerprint(fingerprint: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if (1..=MAX_FINGERPRINT_BYTES).contains(&fingerprint.len()) && fingerprint.bytes().all(plain) {
        return Ok(());
    }
    let message = format!("{fingerprint:?} is not 1 to {MAX_FINGERPRINT_BYTES} letters, digits, '-' and '_'");
    Err(Error::InvalidParameter { name: "fingerprint", message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_64_digits_and_back() {
        let name = PageName(std::array::from_fn(|n| (n * 37) as u8));
        assert_eq!(PageName::from_hex(&name.to_string()), Some(name));
        for bad in ["", "00", &"0".repeat(63), &"0".repeat(65), &"A".repeat(64), &"g".repeat(64)] {
            assert_eq!(PageName::from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn fingerprints_are_plain_names() {
        assert!(check_fingerprint("0af9-b_C").is_ok());
        for bad in ["", ".", "..", "a/b", "a b", "é", &"a".repeat(129)] {
            assert!(check_fingerprint(bad).is_err(), "{bad}");
        }
    }
}
