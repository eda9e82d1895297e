//! KV pages on disk, so that a conversation is warm again after a restart.
//!
//! The engine's thread asks and polls; one I/O thread behind the handle does all reading and writing, and no call but
//! [`DiskStore::open`], [`DiskStore::wait`], [`DiskStore::flush`] and dropping waits for the disk. Reads come before writes.
//! Invariants: what [`DiskEvent::Loaded`] delivers is what was saved under that key, parent and tokens, under a checksum;
//! everything else is [`DiskEvent::Missing`] with a reason. Each page asked for is answered once. Saving is for warmth
//! only: what does not fit is dropped and counted, the first error turns saving off, said once, and loading goes on.
//! Any number of processes share a root: files are immutable and named by content.
//!
//! `page` is the file format, `folder` the layout, `queue` what is asked and answered, `worker` the thread. Which pages are
//! worth saving, and what a page's bytes mean, is not known here.

mod folder;
mod io_queue;
mod io_thread;
pub mod page;

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::Value;

use self::folder::Folder;
use self::io_queue::IoQueue;
use crate::runtime::error::{Error, Result};

pub use self::folder::forget;
pub use self::page::FORMAT_VERSION;
pub use super::prefix::{PageName, names};

/// Bytes that may wait to be written, and as many that may wait to be polled: 18 pages of an 8B model.
pub const DEFAULT_QUEUE_BYTES: u64 = 64 << 20;
const MAX_FINGERPRINT_BYTES: usize = 128;

/// One page of one group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskPageKey {
    pub name: PageName,
    pub group: u8,
}

/// A page's key and what its name was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageLabel {
    pub key: DiskPageKey,
    /// Name of the page before; nothing for the first.
    pub parent: Option<PageName>,
    pub tokens: Box<[u32]>,
    /// Pages before this one in its sequence. Of pages last used together, the deepest are removed first.
    pub depth: u32,
}

/// Where pages are kept, and of what.
#[derive(Debug, Clone)]
pub struct DiskConfig {
    /// May hold the pages of other fingerprints too.
    pub root: PathBuf,
    /// Most bytes of pages below `root`, of all fingerprints; 0 turns the store off. Processes that share a root keep this
    /// together, give or take a sixteenth for each of them beyond the first.
    pub limit_bytes: u64,
    /// Equal only for models that compute the same bits; a folder's name.
    pub fingerprint: String,
    /// What the fingerprint was made of, for the manifest; equal whenever the fingerprint is.
    pub description: Value,
    /// Bytes that may wait to be written, and as many that may wait to be polled. One page waits even when it is larger.
    pub queue_bytes: u64,
}

/// What became of a page that was to be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    Queued,
    /// It is there or on its way; it counts as used now.
    Known,
    /// No room in the queue, larger than the limit, or saving is off.
    Dropped,
}

/// Why a page that was asked for is not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MissingReason {
    #[error("it is not on disk")]
    Absent,
    /// The file is not as it was written; it has been removed if the system allows.
    #[error("{0}")]
    Damaged(String),
    /// The file is intact, but of a page with other tokens, another parent or another size; removed as well.
    #[error("{0}")]
    Mismatch(String),
    /// The system could not read it, which says nothing about the file: it stays, but is not asked for again.
    #[error("{0}")]
    Io(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskEvent {
    Loaded {
        key: DiskPageKey,
        bytes: Vec<u8>,
    },
    Missing {
        key: DiskPageKey,
        reason: MissingReason,
    },
    /// What the user should know, one sentence.
    Notice(String),
}

/// Counts since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub saved_pages: u64,
    pub saved_bytes: u64,
    pub loaded_pages: u64,
    pub loaded_bytes: u64,
    /// Asked for and not there, for whatever reason.
    pub missing_pages: u64,
    /// Not saved: no room in the queue, larger than the limit, or saving was off.
    pub dropped_pages: u64,
    /// Removed to keep the limit, by this process.
    pub removed_pages: u64,
}

/// The handle that the engine's thread holds. Dropping it stops the I/O thread after the file it is at; what is queued then
/// is lost, so [`flush`](Self::flush) first.
#[derive(Debug)]
pub struct DiskStore {
    queue: Arc<IoQueue>,
    limit_bytes: u64,
    thread: Option<JoinHandle<()>>,
}

impl DiskStore {
    /// Lists what is there and starts the I/O thread. Creates nothing: the first page that is saved does.
    ///
    /// Whatever is wrong with the folder is a notice, not an error: then nothing is saved, and nothing is loaded either
    /// where its manifest is of something else.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] when the fingerprint is no plain name; [`Error::Backend`] when the system has no thread
    /// to give.
    pub fn open(config: DiskConfig) -> Result<Self> {
        check_fingerprint(&config.fingerprint)?;
        let DiskConfig { root, limit_bytes, fingerprint, description, queue_bytes } = config;
        let mut store = Self { queue: Arc::new(IoQueue::new(queue_bytes)), limit_bytes, thread: None };
        let folder = Folder::new(root, &fingerprint, &description);
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

    /// Whether the page is on disk or on its way there, as far as this process knows.
    pub fn contains(&self, key: DiskPageKey) -> bool {
        self.queue.contains(key)
    }

    /// Notes that a page is still in use, so that others go first; `depth` as in its label. False when it is not on disk.
    pub fn touch(&self, key: DiskPageKey, depth: u32) -> bool {
        self.thread.is_some() && self.queue.touch(key, depth)
    }

    /// Queues a page to be written.
    pub fn save(&self, label: PageLabel, bytes: Vec<u8>) -> Saving {
        if self.thread.is_none() || page::file_len(&label, bytes.len()) > self.limit_bytes {
            return self.queue.drop_page();
        }
        self.queue.save(label, bytes)
    }

    /// Whether [`save`](Self::save) takes a page of this size now: no need to copy pages out of a device that would be dropped.
    pub fn takes(&self, num_bytes: usize) -> bool {
        self.thread.is_some() && self.queue.takes(num_bytes as u64)
    }

    /// Whether anything is saved at all, now and later.
    pub fn is_saving(&self) -> bool {
        self.thread.is_some() && self.queue.is_saving()
    }

    /// Most bytes of pages on disk.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Asks for a page whose payload has `num_bytes`. Answered by one `Loaded` or `Missing`.
    pub fn load(&self, label: PageLabel, num_bytes: usize) {
        self.queue.load(label, num_bytes, self.thread.is_some());
    }

    /// What has happened since the last call; does not wait.
    pub fn poll(&self) -> Vec<DiskEvent> {
        self.queue.poll()
    }

    /// Waits until there is something to poll, for a thread that has nothing else to do. False when the time is over.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.queue.wait(timeout)
    }

    /// Whether pages were asked for whose answers have not been polled.
    pub fn is_loading(&self) -> bool {
        self.queue.is_loading()
    }

    /// Whether anything is queued, under way, or not polled yet.
    pub fn is_busy(&self) -> bool {
        self.queue.is_busy()
    }

    /// Waits until everything queued is written (or dropped, where saving is off). False when the time is over.
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
            drop(thread.join()); // a panic there has been answered with `Missing`
        }
    }
}

/// The fingerprint becomes a folder.
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
