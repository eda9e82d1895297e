//! Images as work: a queue of jobs for the vision tower, the embeddings that it has computed, and those on disk.
//!
//! Invariants: a job exists only while a running request needs its image, so a cancelled request ends it between two slices.
//! Equal images have one job. While sequences decode, a step has rows of prompts or is followed by a slice, in turn, so that
//! they wait for one of both at the most. Embeddings that a request holds are never dropped. What disk and memory have changes
//! no answer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Engine;
use super::generation::Generation;
use crate::request::PromptImage;
use crate::step::guarded;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_image::ImageFile;
use llmctl_models::images::{ImageKey, ImageRows};
use llmctl_models::kv::disk::ImageFolder;
use llmctl_models::vision::{Tower, TowerJob};

/// Bytes of embeddings kept in memory beyond those that requests hold.
const CACHE_BYTES: usize = 256 << 20;

/// The vision tower and its work.
pub(super) struct ImageEncoder {
    tower: Box<dyn Tower>,
    jobs: VecDeque<EncodeJob>,
    cache: RowCache,
    folder: Option<ImageFolder>,
    /// True if this step is followed by a slice.
    has_turn: bool,
}

/// An image that a running request waits for.
struct EncodeJob {
    key: ImageKey,
    file: Arc<ImageFile>,
    num_rows: usize,
    /// `None` before the first slice.
    begun: Option<Box<dyn TowerJob>>,
}

/// Result of a slice of a job.
enum Slice {
    /// Slices done, and all.
    Part(usize, usize),
    Found(ImageRows),
    /// The result after so many slices.
    Encoded(ImageRows, usize),
}

/// Embeddings in memory, least recently used ones dropped first.
#[derive(Default)]
struct RowCache {
    /// With the time of their last use.
    entries: HashMap<ImageKey, (Arc<ImageRows>, u64)>,
    num_bytes: usize,
    clock: u64,
}

impl RowCache {
    fn get(&mut self, key: ImageKey) -> Option<Arc<ImageRows>> {
        self.clock += 1;
        let (rows, used) = self.entries.get_mut(&key)?;
        *used = self.clock;
        Some(Arc::clone(rows))
    }

    fn insert(&mut self, key: ImageKey, rows: Arc<ImageRows>, limit: usize) {
        self.clock += 1;
        self.num_bytes += rows.bytes();
        if let Some((old, _)) = self.entries.insert(key, (rows, self.clock)) {
            self.num_bytes -= old.bytes();
        }
        while self.num_bytes > limit {
            let free = self.entries.iter().filter(|(_, (rows, _))| Arc::strong_count(rows) == 1);
            let Some(oldest) = free.min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key) else { break };
            if let Some((rows, _)) = self.entries.remove(&oldest) {
                self.num_bytes -= rows.bytes();
            }
        }
    }
}

impl EncodeJob {
    /// Computes a slice. The first one looks on disk, and makes patches if the image is not there.
    fn advance(&mut self, tower: &dyn Tower, folder: Option<&ImageFolder>) -> Result<Slice> {
        let Some(job) = &mut self.begun else {
            if let Some(rows) = folder.and_then(|folder| folder.read(self.key, self.num_rows)) {
                return Ok(Slice::Found(rows));
            }
            let patches = tower.spec().pixels.patches(&self.file.picture);
            let job = tower.begin(patches.map_err(|error| Error::Backend(format!("an image: {error}")))?)?;
            let (done, total) = job.progress();
            self.begun = Some(job);
            return Ok(Slice::Part(done, total));
        };
        let rows = job.advance()?;
        let (done, total) = job.progress();
        match rows {
            None => Ok(Slice::Part(done, total)),
            Some(rows) if rows.len() == self.num_rows => Ok(Slice::Encoded(rows, total)),
            Some(rows) => {
                Err(Error::Backend(format!("{} embeddings of an image, not {}", rows.len(), self.num_rows)))
            }
        }
    }
}

impl ImageEncoder {
    pub fn new(tower: Box<dyn Tower>) -> Self {
        let (jobs, cache) = (VecDeque::new(), RowCache::default());
        Self { tower, jobs, cache, folder: None, has_turn: false }
    }

    pub fn set_folder(&mut self, folder: Option<ImageFolder>) {
        self.folder = folder;
    }

    pub fn has_turn(&self) -> bool {
        self.has_turn
    }

    /// Adds a job unless the image has one.
    fn ask(&mut self, image: &PromptImage) {
        if self.jobs.iter().all(|job| job.key != image.key) {
            let num_rows = image.spans.iter().map(|span| span.rows.len()).sum();
            let (key, file) = (image.key, Arc::clone(&image.file));
            self.jobs.push_back(EncodeJob { key, file, num_rows, begun: None });
        }
    }

    /// Computes a slice of the first job. Returns its key, and removes it with its end.
    fn advance(&mut self) -> Option<(ImageKey, Result<Slice>)> {
        let job = self.jobs.front_mut()?;
        let slice = guarded(|| job.advance(&*self.tower, self.folder.as_ref()));
        let key = job.key;
        if !matches!(slice, Ok(Slice::Part(..))) {
            self.jobs.pop_front();
        }
        Some((key, slice))
    }
}

impl Engine {
    /// Gives running requests the embeddings in memory, and asks for those that they lack.
    pub(super) fn supply_images(&mut self) {
        let Some(encoder) = &mut self.encoder else { return };
        let mut wanted = Vec::new();
        for generation in &mut self.running {
            let lacking: Vec<PromptImage> = generation.lacking_images().cloned().collect();
            for image in lacking {
                match encoder.cache.get(image.key) {
                    Some(rows) => generation.give_image(image.key, &rows, None),
                    None => {
                        wanted.push(image.key);
                        encoder.ask(&image);
                    }
                }
            }
        }
        encoder.jobs.retain(|job| wanted.contains(&job.key));
    }

    /// Decides whether this step has a slice, in which prompts wait if sequences decode.
    pub(super) fn plan_slice(&mut self) {
        let generates = self.running.iter().any(|generation| generation.rows_left() == 0);
        if let Some(encoder) = &mut self.encoder {
            encoder.has_turn = !(encoder.jobs.is_empty() || generates && encoder.has_turn);
        }
    }

    /// Computes a slice if this step has one, and tells the requests that wait for its image.
    pub(super) fn encode_slice(&mut self) {
        let Some(encoder) = self.encoder.as_mut().filter(|encoder| encoder.has_turn) else { return };
        let begun = Instant::now();
        let Some((key, slice)) = encoder.advance() else { return };
        let took = begun.elapsed();
        match slice {
            Ok(Slice::Part(done, total)) => self.note_slice(key, (done, total), took),
            Ok(Slice::Found(rows)) => self.finish_image(key, rows, None, took),
            Ok(Slice::Encoded(rows, total)) => {
                self.save_image(key, &rows);
                self.note_slice(key, (total, total), Duration::ZERO);
                self.finish_image(key, rows, Some(total), took);
            }
            Err(error) => self.fail_image(key, &error),
        }
    }

    fn waiting_for(&mut self, key: ImageKey) -> impl Iterator<Item = &mut Generation> {
        self.running.iter_mut().filter(move |generation| generation.lacks_image(key))
    }

    fn note_slice(&mut self, key: ImageKey, progress: (usize, usize), took: Duration) {
        let mut events = std::mem::take(&mut self.events);
        for generation in self.waiting_for(key) {
            generation.note_slice(progress, took, &mut events);
        }
        self.events = events;
    }

    fn finish_image(&mut self, key: ImageKey, rows: ImageRows, slices: Option<usize>, took: Duration) {
        let rows = Arc::new(rows);
        for generation in self.waiting_for(key) {
            generation.spend_on_images(took);
            generation.give_image(key, &rows, slices);
        }
        if let Some(encoder) = &mut self.encoder {
            encoder.cache.insert(key, rows, CACHE_BYTES);
        }
    }

    fn save_image(&mut self, key: ImageKey, rows: &ImageRows) {
        let folder = self.encoder.as_ref().and_then(|encoder| encoder.folder.clone());
        let Some(Err(error)) = folder.map(|folder| folder.write(key, rows)) else { return };
        self.note(Notice::KvPageNotSaved(format!("the embeddings of an image: {error}")));
        self.encoder.iter_mut().for_each(|encoder| encoder.set_folder(None));
    }

    fn fail_image(&mut self, key: ImageKey, error: &Error) {
        while let Some(index) = self.running.iter().position(|generation| generation.lacks_image(key)) {
            let mut generation = self.running.remove(index);
            generation.fail(error.clone(), &mut self.events);
            self.retire(generation);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_in_use_stay_and_the_least_recently_used_others_go() {
        let mut cache = RowCache::default();
        let rows = || Arc::new(ImageRows { width: 1, embeddings: vec![0.0; 10], deep: Vec::new() });
        let key = |n| ImageKey([n; 32]);
        let held = rows();
        cache.insert(key(0), Arc::clone(&held), 120);
        (1..=2).for_each(|n| cache.insert(key(n), rows(), 120));
        assert!(cache.get(key(1)).is_some());
        cache.insert(key(3), rows(), 120);
        assert_eq!([0, 1, 2, 3].map(|n| cache.get(key(n)).is_some()), [true, true, false, true]);
        cache.insert(key(1), rows(), 0);
        assert_eq!((cache.num_bytes, cache.get(key(1)).is_some()), (40, false), "one is held");
    }
}
