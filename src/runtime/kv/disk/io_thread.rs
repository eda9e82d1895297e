//! The I/O thread: one file at a time, and the limit over all that lies below the root.
//!
//! How much lies there is counted by walking once, then by adding what is written here. What other processes write is
//! seen at the next walk, which comes after every sixteenth of the limit. When a page does not fit, the files last used
//! the longest ago go, down to seven eighths of the limit, so that walks stay rare.

use std::io;

use super::MissingReason;
use super::folder::{Folder, FoundPage};
use super::io_queue::{IoJob, IoQueue, ReadJob, WriteJob};
use super::page;

/// Works until the queue says to stop.
pub fn run(queue: &IoQueue, folder: &Folder, limit_bytes: u64) {
    let _closed_at_the_end = CloseOnDrop(queue);
    let mut thread =
        IoThread { queue, folder, space: Space { limit_bytes, ..Space::default() }, is_prepared: false };
    loop {
        match queue.next_job() {
            IoJob::Read(read) => thread.read(&read),
            IoJob::Write(write) => thread.write(&write),
            IoJob::Touch { key, depth } => {
                folder.touch(key, depth);
                queue.finish_touch(key);
            }
            IoJob::Tidy => thread.tidy(),
            IoJob::Stop => return,
        }
    }
}

/// Whoever waits for an answer gets one, however the thread ends.
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
    /// The folder and its manifest have been made, or were there.
    is_prepared: bool,
}

#[derive(Default)]
struct Space {
    limit_bytes: u64,
    /// Bytes below the root, as far as known; `None` before the first walk.
    used_bytes: Option<u64>,
    /// Written since the last walk.
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

    /// False when the thread is to end before there is room.
    fn try_write(&mut self, write: &WriteJob) -> io::Result<bool> {
        let len = page::file_len(&write.label, write.bytes.len());
        if !self.make_room(len)? {
            return Ok(false);
        }
        if !self.is_prepared {
            self.folder.prepare()?;
            self.is_prepared = true;
        }
        self.folder.write(&write.label, &write.bytes)?;
        self.space.add(len);
        Ok(true)
    }

    /// Walks when nothing else is to do, for leftovers and for a limit that is lower than it was.
    fn tidy(&mut self) {
        if self.space.used_bytes.is_none() {
            // What cannot be removed now is an error when a page is to be written.
            drop(self.make_room(0));
        }
    }

    /// False when the thread is to end before there is room.
    fn make_room(&mut self, len: u64) -> io::Result<bool> {
        if self.space.fits(len) {
            return Ok(true);
        }
        let Some(found) = self.walk()? else { return Ok(false) };
        if self.space.fits(len) {
            return Ok(true);
        }
        self.remove_oldest(found, self.space.target(len))?;
        Ok(true)
    }

    /// Counts what is there, and learns of the pages that others have saved or removed. `None` when the thread is to end. What is
    /// known stays where the folders cannot be read.
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

    /// Removes pages, those last used the longest ago first, until `target` bytes are left.
    fn remove_oldest(&mut self, mut found: Vec<FoundPage>, target: u64) -> io::Result<()> {
        found.sort_unstable_by_key(|page| page.last_use);
        let mut left: u64 = found.iter().map(|page| page.num_bytes).sum();
        for page in found {
            if left <= target {
                break;
            }
            self.folder.remove_found(&page)?;
            left -= page.num_bytes;
            self.space.used_bytes = Some(left);
            self.queue.count_removed(self.folder.is_ours(&page).then_some(page.key));
        }
        Ok(())
    }
}

/// A page that still waits to be written, under the same checks as one on disk.
fn from_memory(write: &WriteJob, read: &ReadJob) -> Result<Vec<u8>, MissingReason> {
    let WriteJob { label, bytes } = write;
    let is_same = label.parent == read.label.parent && label.tokens == read.label.tokens;
    if is_same && bytes.len() == read.num_bytes {
        return Ok(bytes.clone());
    }
    Err(MissingReason::Mismatch("a page with other tokens, parent or length is being saved".to_owned()))
}

impl Space {
    /// False also when it is time to walk.
    fn fits(&self, len: u64) -> bool {
        let is_recent = self.new_bytes <= self.limit_bytes / 16;
        is_recent && self.used_bytes.is_some_and(|used| used.saturating_add(len) <= self.limit_bytes)
    }

    /// Bytes that may be left when `len` are to be added.
    fn target(&self, len: u64) -> u64 {
        let seven_eighths = self.limit_bytes - self.limit_bytes / 8;
        seven_eighths.min(self.limit_bytes.saturating_sub(len))
    }

    fn add(&mut self, len: u64) {
        self.used_bytes = self.used_bytes.map(|used| used.saturating_add(len));
        self.new_bytes = self.new_bytes.saturating_add(len);
    }
}
