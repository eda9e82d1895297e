//! The I/O thread: processes one file at a time and enforces the limit over everything below the root.
//!
//! The used bytes are counted by one walk, then updated by what this process writes. Writes of other
//! processes are counted by the next walk, which comes each time a sixteenth of the limit has been written.
//! If a page does not fit, the least recently used files are removed until seven eighths of the limit are
//! used, so that walks stay rare.

use std::collections::HashSet;
use std::io;
use std::time::SystemTime;

use super::folder::{Folder, FoundPage};
use super::io_queue::{IoJob, IoQueue, ReadJob, WriteJob};
use super::{MissingReason, PageUse};
use crate::tensor::SharedBytes;
use llmctl_base::notice::Notice;
use llmctl_base::units::bytes;

/// Processes jobs until the queue returns `Stop`.
pub fn run(queue: &IoQueue, folder: &Folder, limit_bytes: u64) {
    let _closed_at_the_end = CloseOnDrop(queue);
    let mut thread =
        IoThread { queue, folder, space: Space { limit_bytes, ..Space::default() }, is_prepared: false };
    loop {
        match queue.next_job() {
            IoJob::Read(read) => thread.read(&read),
            IoJob::Write(write) => thread.write(&write),
            IoJob::Touch { key, page_use } => {
                folder.touch(key, page_use);
                queue.finish_touch(key);
            }
            IoJob::Tidy => thread.tidy(),
            IoJob::Stop => return,
        }
    }
}

/// Guard that answers all open reads, however the thread ends.
struct CloseOnDrop<'a>(&'a IoQueue);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

struct IoThread<'a> {
    queue: &'a IoQueue,
    folder: &'a Folder,
    space: Space,
    /// True if the folder and its manifest exist.
    is_prepared: bool,
}

#[derive(Default)]
struct Space {
    limit_bytes: u64,
    /// Bytes below the root as far as known; `None` before the first walk.
    used_bytes: Option<u64>,
    /// Bytes written since the last walk.
    new_bytes: u64,
}

impl IoThread<'_> {
    fn read(&self, read: &ReadJob) {
        let ReadJob { label, num_bytes, in_memory } = read;
        let result = match in_memory {
            Some(write) => from_memory(write, read),
            None => self.folder.read(label, *num_bytes),
        };
        let is_wrong = matches!(&result, Err(MissingReason::Damaged(_) | MissingReason::Mismatch(_)));
        if is_wrong && in_memory.is_none() && !self.folder.remove(label.key) {
            self.queue.ignore(label.key);
        }
        self.queue.finish_read(label.key, result);
    }

    fn write(&mut self, write: &WriteJob) {
        match self.try_write(write) {
            Ok(is_saved) => self.queue.finish_write(write.label.key, is_saved),
            Err(error) => {
                let path = self.folder.path().display();
                self.queue.stop_saving(&format!("{path}: {error}"));
            }
        }
    }

    /// Writes a page, unless another process has. Returns false if there is no room.
    fn try_write(&mut self, write: &WriteJob) -> io::Result<bool> {
        let label = &write.label;
        if self.folder.has(label.key) && !self.queue.is_unreadable(label.key) {
            self.folder.touch(label.key, PageUse { depth: label.depth, is_shared: false });
            return Ok(true);
        }
        let len = self.folder.file_len(label, write.bytes.len());
        if !self.make_room(len)? {
            return Ok(false);
        }
        if !self.is_prepared {
            self.folder.prepare()?;
            self.is_prepared = true;
        }
        self.folder.write(label, &write.bytes)?;
        self.space.add(len);
        Ok(true)
    }

    /// Walks the folders when idle, to remove leftovers and to apply a limit that has been lowered.
    fn tidy(&mut self) {
        if self.space.used_bytes.is_none() {
            // A failure to remove files is reported when a page is written.
            drop(self.make_room(0));
        }
    }

    /// Makes room for `len` bytes. Returns false if the thread must end first, or pinned
    /// pages leave no room.
    fn make_room(&mut self, len: u64) -> io::Result<bool> {
        if self.space.fits(len) {
            return Ok(true);
        }
        let Some(found) = self.walk()? else { return Ok(false) };
        if self.space.fits(len) {
            return Ok(true);
        }
        self.remove_oldest(found, self.space.target(len))?;
        if self.space.fits(len) {
            return Ok(true);
        }
        let used = bytes(self.space.used_bytes.unwrap_or(0));
        let limit = bytes(self.space.limit_bytes);
        let reason =
            format!("prompts that were computed ahead take {used} of {limit} (--kv-disk, `llmctl warm`)");
        self.queue.stop_saving(&reason);
        Ok(false)
    }

    /// Counts the files and updates the index with pages that other processes have saved or removed. Returns `None`
    /// if the thread must end. On an error the index stays as it is.
    fn walk(&mut self) -> io::Result<Option<Vec<FoundPage>>> {
        let stop = self.queue.stop_flag();
        let found = self.folder.list_all(stop)?;
        if stop.load(std::sync::atomic::Ordering::Relaxed) {
            return Ok(None);
        }
        self.space.used_bytes = Some(found.iter().map(|page| page.num_bytes).sum());
        self.space.new_bytes = 0;
        let ours = found.iter().filter(|page| self.folder.is_ours(page));
        self.queue.replace_index(ours.map(|page| page.key));
        Ok(Some(found))
    }

    /// Removes the least recently used pages until at most `target` bytes are left, shared ones last and pinned ones never.
    fn remove_oldest(&mut self, mut found: Vec<FoundPage>, target: u64) -> io::Result<()> {
        found.sort_unstable_by_key(|page| page.last_use);
        let mut left: u64 = found.iter().map(|page| page.num_bytes).sum();
        let (now, mut num_shared) = (SystemTime::now(), 0);
        let (mut removed, mut kept) = (HashSet::new(), HashSet::new());
        for page in found {
            if left <= target || page.is_pinned {
                kept.insert(page.key.name);
                continue;
            }
            removed.insert(page.key.name);
            self.folder.remove_found(&page)?;
            left -= page.num_bytes;
            num_shared += usize::from(page.is_shared(now));
            self.space.used_bytes = Some(left);
            self.queue.count_removed(self.folder.is_ours(&page).then_some(page.key));
        }
        self.folder.erase_keys(removed.difference(&kept))?;
        if num_shared > 0 {
            let limit_bytes = self.space.limit_bytes;
            self.queue.note(Notice::KvSharedPagesRemoved { count: num_shared, limit_bytes });
        }
        Ok(())
    }
}

/// Returns a page that still waits to be written, under the same checks as a page on disk.
fn from_memory(write: &WriteJob, read: &ReadJob) -> Result<SharedBytes, MissingReason> {
    let WriteJob { label, bytes } = write;
    let is_same = label.parent == read.label.parent && label.tokens == read.label.tokens;
    if is_same && bytes.len() == read.num_bytes {
        return Ok(bytes.clone().into());
    }
    Err(MissingReason::Mismatch("a page with other tokens, parent or length is being saved".to_owned()))
}

impl Space {
    /// Returns whether `len` bytes fit. False also when the next walk is due.
    fn fits(&self, len: u64) -> bool {
        let is_recent = self.new_bytes <= self.limit_bytes / 16;
        is_recent && self.used_bytes.is_some_and(|used| used.saturating_add(len) <= self.limit_bytes)
    }

    /// Returns the bytes that may remain before `len` are added.
    fn target(&self, len: u64) -> u64 {
        let seven_eighths = self.limit_bytes - self.limit_bytes / 8;
        seven_eighths.min(self.limit_bytes.saturating_sub(len))
    }

    fn add(&mut self, len: u64) {
        self.used_bytes = self.used_bytes.map(|used| used.saturating_add(len));
        self.new_bytes = self.new_bytes.saturating_add(len);
    }
}
