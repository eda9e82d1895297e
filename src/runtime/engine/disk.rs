//! The engine's side of KV on disk: restores pages before a request starts, and saves pages of sessions.
//!
//! Invariants: a request starts when every read has been answered; pages that could not be read are computed.
//! Restored pages are held for their request and count against its promise. Pages to save are remembered by
//! name and not pinned: if their memory is reclaimed first, only warmth is lost. A page is copied out only
//! when the I/O thread has room; while requests run, a step copies a few, and more beside a long prompt.

use std::collections::{HashSet, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::generation::{Generation, RequestId};
use super::queue::QueuedRequest;
use super::{Engine, EngineLoad};
use crate::request::ReuseReason;
use crate::sequence::Resumed;
use llmctl_base::notice::Notice;
use llmctl_models::kv::disk;
use llmctl_models::kv::disk::{DiskEvent, DiskStore, MissingReason, PageLabel, PageUse, WarmPrompt};
use llmctl_models::kv::pool::PageHold;
use llmctl_models::kv::{KvGroup, PAGE_TOKENS, PageContent, PageName, PagePool, Tokens, prefix, reachable};
use llmctl_models::load::fingerprint::loaded_otherwise;
use llmctl_models::tensor::SharedBytes;

/// Bytes copied out per step while requests run, for each 32 rows that the longest prompt still has: a step with more rows takes
/// longer. Takes about a millisecond; the room of the I/O thread is the bound of long prompts.
const BYTES_PER_BUSY_STEP: usize = 8 << 20;
/// Pause before trying again when the I/O thread has no room.
const ROOM_PAUSE: Duration = Duration::from_millis(5);
/// Longest wait of an otherwise idle step for the disk. Commands to the engine wait with it.
const LOAD_PAUSE: Duration = Duration::from_millis(10);

/// The store and the engine's pending reads and writes.
#[derive(Debug)]
pub(super) struct KvDisk {
    store: DiskStore,
    saves: Saves,
    restoring: Vec<Restoring>,
    notices: Vec<Notice>,
    warm: WarmPrompts,
}

/// Prompts that were computed ahead, and the requests that began with one.
#[derive(Debug, Default)]
struct WarmPrompts {
    /// With the bytes of their pages.
    prompts: Vec<(WarmPrompt, u64)>,
    /// Time of their folder's last change when they were read.
    changed: Option<SystemTime>,
    num_hits: usize,
}

/// Identity of a full page within a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PageAt {
    group: usize,
    /// Number of pages before it.
    number: usize,
    name: PageName,
    parent: Option<PageName>,
    /// See [`PageContent::tokens`].
    tokens: Box<[u32]>,
}

/// An admitted request that waits for pages from disk.
#[derive(Debug)]
struct Restoring {
    request: QueuedRequest,
    wanted: Vec<PageAt>,
    arrived: HeldPages,
    /// Pages already in memory, held so that restored pages do not evict them.
    _held: HeldPages,
    /// Number of unusable pages on disk, and the reason for the first.
    lost: Option<(usize, String)>,
    /// Prompt tokens covered by pages in memory.
    num_indexed: usize,
}

/// Pages of a prompt, in memory and on disk.
#[derive(Debug, Default)]
struct Wanted {
    pages: Vec<PageAt>,
    held: HeldPages,
    num_indexed: usize,
}

/// Pages in sequence order. Released from the end, because the start of a chain is the most reusable.
#[derive(Debug, Default)]
struct HeldPages(Vec<PageHold>);

impl Drop for HeldPages {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

impl PageAt {
    fn of(tokens: Tokens<'_>, names: &[PageName], group: usize, number: usize) -> Option<Self> {
        let page = tokens.page(number)?;
        let parent = number.checked_sub(1).map(|parent| names[parent]);
        Some(Self { group, number, name: *names.get(number)?, parent, tokens: page.into() })
    }

    fn key(&self) -> PageContent<'_> {
        PageContent { parent: self.parent, tokens: &self.tokens }
    }

    fn disk_key(&self) -> disk::DiskPageKey {
        disk::DiskPageKey { name: self.name, group: self.group as u8 }
    }

    fn label(&self) -> PageLabel {
        let (parent, tokens) = (self.parent, self.tokens.clone());
        PageLabel { key: self.disk_key(), parent, tokens, depth: self.number as u32 }
    }

    fn is_indexed(&self, pool: &PagePool) -> bool {
        pool.contains(self.group, self.name, self.key())
    }
}

/// Queue of pages to save, without duplicates.
#[derive(Debug, Default)]
struct Saves {
    order: VecDeque<PageAt>,
    keys: HashSet<disk::DiskPageKey>,
}

impl Saves {
    fn push(&mut self, page: PageAt) {
        if self.keys.insert(page.disk_key()) {
            self.order.push_back(page);
        }
    }

    fn pop(&mut self) -> Option<PageAt> {
        let page = self.order.pop_front()?;
        self.keys.remove(&page.disk_key());
        Some(page)
    }
}

impl KvDisk {
    pub fn new(store: DiskStore) -> Self {
        let (saves, mut warm) = (Saves::default(), WarmPrompts::default());
        warm.refresh(store.root());
        Self { store, saves, restoring: Vec::new(), notices: Vec::new(), warm }
    }

    pub fn num_restoring(&self) -> usize {
        self.restoring.len()
    }

    pub fn generations(&self) -> impl Iterator<Item = &Generation> {
        self.restoring.iter().map(|restoring| &restoring.request.generation)
    }

    /// Removes a request that has not started. Its pending reads are ignored when they arrive.
    pub fn remove(&mut self, is_wanted: impl Fn(&Generation) -> bool) -> Option<QueuedRequest> {
        let index = self.generations().position(is_wanted)?;
        Some(self.restoring.remove(index).request)
    }

    fn has(&self, page: &PageAt) -> bool {
        self.store.contains(page.disk_key())
    }
}

impl WarmPrompts {
    /// Reads the prompts if their folder has changed.
    fn refresh(&mut self, root: &Path) {
        let changed = WarmPrompt::changed(root);
        if changed == self.changed {
            return;
        }
        let prompts = WarmPrompt::read_all(root).0;
        let sizes = WarmPrompt::bytes_on_disk(&prompts, root).unwrap_or_default();
        let measured = prompts.into_iter().zip(sizes).filter_map(|(prompt, size)| Some((prompt, size?)));
        (self.prompts, self.changed) = (measured.collect(), changed);
    }
}

/// Prompts that were computed ahead.
impl Engine {
    /// Counts a request that begins with all pages of a prompt that was computed ahead, unless its session had them.
    pub(super) fn count_warm_hit(&mut self, resumed: &Resumed) {
        let Some(KvDisk { store, warm, .. }) = &mut self.disk else { return };
        warm.refresh(store.root());
        if !matches!(resumed.reuse.reason, ReuseReason::PrefixCache | ReuseReason::Restored) {
            return;
        }
        let pages = resumed.sequence.resident().table().names();
        let begun = warm.prompts.iter().map(|(prompt, _)| prompt).filter(|prompt| prompt.begins(pages));
        if let Some(longest) = begun.max_by_key(|prompt| prompt.num_tokens()) {
            warm.num_hits += 1;
            drop(longest.count_hit(store.root())); // a count that is not written is no reason to fail a request
        }
    }

    /// Returns the load of prompts that were computed ahead; all else is 0.
    pub(super) fn warm_load(&self) -> EngineLoad {
        let Some(KvDisk { warm, .. }) = &self.disk else { return EngineLoad::default() };
        EngineLoad {
            warm_prompts: warm.prompts.len(),
            warm_bytes: warm.prompts.iter().map(|(_, num_bytes)| *num_bytes as usize).sum(),
            warm_hits: warm.num_hits,
            ..EngineLoad::default()
        }
    }
}

/// The disk's part in the engine's steps.
impl Engine {
    /// Saves KV of named sessions in `store` and restores it from there. No effect without warm resume.
    pub fn set_disk(&mut self, store: DiskStore) {
        let largest = self.spec().model.groups.iter().map(|group| group.page_bytes).max().unwrap_or(0);
        let limit = store.limit_bytes();
        let is_useless = store.is_saving() && limit < largest as u64;
        let images = store.images().filter(|_| self.pool.has_index());
        self.encoder.iter_mut().for_each(|encoder| encoder.set_folder(images.clone()));
        self.disk = self.pool.has_index().then(|| KvDisk::new(store));
        if is_useless {
            self.note(Notice::KvLimitBelowPage { limit_bytes: limit, page_bytes: largest });
        }
    }

    /// Returns the notices of the disk and of what computes drafts for the user, and clears them.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.poll_disk();
        let of_disk = self.disk.as_mut().map(|disk| std::mem::take(&mut disk.notices));
        let of_drafts = self.speculator.take_notice();
        of_disk.into_iter().flatten().chain(of_drafts).collect()
    }

    /// Saves pending pages within `timeout`. Returns false if it was too short.
    pub fn flush_disk(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let left = || deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
        while self.disk.as_ref().is_some_and(|disk| disk.store.is_saving() && !disk.saves.order.is_empty()) {
            if left().is_zero() {
                return false;
            }
            if !self.save_pages(usize::MAX) {
                std::thread::sleep(ROOM_PAUSE);
            }
        }
        self.disk.as_ref().is_none_or(|disk| disk.store.flush(left()))
    }

    /// Returns when the disk needs a step although no request is in flight.
    pub(super) fn disk_wakeup(&self) -> Option<Instant> {
        let disk = self.disk.as_ref()?;
        let first = disk.saves.order.front()?;
        let pause = if disk.store.takes(self.page_bytes(first.group)) { Duration::ZERO } else { ROOM_PAUSE };
        Some(Instant::now() + pause)
    }

    /// Handles answers of the disk, and gives it pages to save.
    pub(super) fn advance_disk(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let rows = self.running.iter().map(Generation::rows_left).max();
        if rows.is_none() && disk.store.is_loading() {
            disk.store.wait(LOAD_PAUSE);
        }
        self.poll_disk();
        self.start_restored();
        self.save_pages(rows.map_or(usize::MAX, |rows| BYTES_PER_BUSY_STEP * rows.div_ceil(32).max(1)));
    }

    /// Handles the events of the store.
    fn poll_disk(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        for event in disk.store.poll() {
            match event {
                DiskEvent::Loaded { key, bytes } => self.page_loaded(key, bytes),
                DiskEvent::Missing { key, reason } => self.page_missing(key, &reason),
                DiskEvent::Notice(notice) => self.note(notice),
            }
        }
        if let Some(disk) = self.disk.as_mut().filter(|disk| !disk.store.is_saving()) {
            disk.saves = Saves::default();
        }
    }

    pub(super) fn note(&mut self, notice: Notice) {
        if let Some(disk) = &mut self.disk {
            disk.notices.push(notice);
        }
    }

    fn page_bytes(&self, group: usize) -> usize {
        self.spec().model.groups[group].page_bytes
    }
}

/// Restoring.
impl Engine {
    /// Starts reading pages of the prompt that only the disk has. Returns the request if there are none.
    pub(super) fn restore(&mut self, request: QueuedRequest) -> Option<QueuedRequest> {
        let Wanted { pages: wanted, held, num_indexed } = self.wanted_pages(&request.generation);
        let Some(disk) = self.disk.as_mut().filter(|_| !wanted.is_empty()) else { return Some(request) };
        for page in &wanted {
            let num_bytes = self.executor.spec().model.groups[page.group].page_bytes;
            disk.store.load(page.label(), num_bytes);
        }
        let (arrived, lost) = (HeldPages::default(), None);
        disk.restoring.push(Restoring { request, wanted, arrived, _held: held, lost, num_indexed });
        None
    }

    /// Returns pages on disk that extend the resumable prefix beyond what memory holds.
    fn wanted_pages(&self, generation: &Generation) -> Wanted {
        let disk = self.disk.as_ref().filter(|_| !generation.scores_prompt());
        let (Some(disk), prompt) = (disk, generation.prompt()) else { return Wanted::default() };
        let groups = &self.spec().model.groups;
        let names: Vec<_> = prefix::names(prompt).collect();
        let page = |group, number| PageAt::of(prompt, &names, group, number);
        let in_memory = |group, number| page(group, number).is_some_and(|page| page.is_indexed(&self.pool));
        let anywhere = |group, number| {
            page(group, number).is_some_and(|page| page.is_indexed(&self.pool) || disk.has(&page))
        };
        let most = prompt.len() - 1;
        let round_down = |len| self.pool.round_down(prompt, len);
        let (there, _) = reachable(groups, most, round_down, in_memory);
        let (len, _) = reachable(groups, most, round_down, anywhere);
        if len <= there.max(self.num_resident_of(generation)) {
            return Wanted::default();
        }
        let mut wanted = Wanted { num_indexed: there, ..Wanted::default() };
        for page in pages_of(groups, len).filter_map(|(group, number)| page(group, number)) {
            match self.pool.find(page.group, page.name, page.key()) {
                Some(held) => wanted.held.0.push(held),
                None => wanted.pages.push(page),
            }
        }
        wanted
    }

    /// Returns how many leading prompt tokens its session has in memory.
    fn num_resident_of(&self, generation: &Generation) -> usize {
        let session = generation.session().and_then(|name| self.sessions.find(name).ok());
        let session = session.and_then(|id| self.sessions.get(id).ok());
        session.map_or(0, |session| session.content().common_prefix(generation.prompt()))
    }

    /// Removes the page from a request that waits for it.
    fn take_wanted(&mut self, key: disk::DiskPageKey) -> Option<(RequestId, PageAt)> {
        self.disk.as_mut()?.restoring.iter_mut().find_map(|restoring| {
            let index = restoring.wanted.iter().position(|page| page.disk_key() == key)?;
            Some((restoring.request.generation.id(), restoring.wanted.swap_remove(index)))
        })
    }

    fn page_loaded(&mut self, key: disk::DiskPageKey, bytes: SharedBytes) {
        let Some((id, wanted)) = self.take_wanted(key) else { return };
        let page = self.pool.find(wanted.group, wanted.name, wanted.key());
        let Some(page) = page.or_else(|| self.import(&wanted, bytes)) else { return };
        if let Some(restoring) = self.restoring_mut(id) {
            restoring.arrived.0.push(page);
        }
    }

    fn page_missing(&mut self, key: disk::DiskPageKey, reason: &MissingReason) {
        let Some((id, _)) = self.take_wanted(key) else { return };
        if let Some(restoring) = self.restoring_mut(id).filter(|_| *reason != MissingReason::Absent) {
            restoring.lost.get_or_insert_with(|| (0, reason.to_string())).0 += 1;
        }
    }

    fn restoring_mut(&mut self, id: RequestId) -> Option<&mut Restoring> {
        let mut restoring = self.disk.iter_mut().flat_map(|disk| &mut disk.restoring);
        restoring.find(|restoring| restoring.request.generation.id() == id)
    }

    /// Gives the model a page and publishes it in the index; `None` if no page is free or the model
    /// rejects the bytes.
    fn import(&mut self, wanted: &PageAt, bytes: SharedBytes) -> Option<PageHold> {
        self.make_room(self.page_bytes(wanted.group));
        let page = self.pool.take(wanted.group)?;
        match self.executor.import_page(&self.pool, page.page_ref(), bytes) {
            Ok(()) => self.pool.publish(&page, wanted.name, wanted.key()),
            Err(error) => {
                self.note(Notice::KvPageUnusable(error.to_string()));
                return None;
            }
        }
        Some(page)
    }

    /// Tells of a prompt of which nothing is found that this model has kept it, loaded otherwise.
    pub(super) fn note_kept_otherwise(&mut self, prompt: Tokens<'_>, reason: ReuseReason) {
        let is_cold = matches!(reason, ReuseReason::New | ReuseReason::Evicted);
        let Some(disk) = self.disk.as_ref().filter(|_| is_cold) else { return };
        let names: Vec<_> = prefix::names(prompt).collect();
        let mut others = disk.store.elsewhere(&names).into_iter();
        if let Some(reason) = others.find_map(|other| loaded_otherwise(disk.store.description(), &other)) {
            self.note(Notice::KvPagesRecomputed { count: names.len(), reason });
        }
    }

    /// Starts requests whose reads have all been answered.
    fn start_restored(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let is_ready = |restoring: &mut Restoring| restoring.wanted.is_empty();
        let ready: Vec<_> = disk.restoring.extract_if(.., is_ready).collect();
        for Restoring { request, arrived, _held, lost, num_indexed, .. } in ready {
            if let Some((count, reason)) = lost {
                self.note(Notice::KvPagesRecomputed { count, reason });
            }
            // The sequence takes its own references to the pages here.
            self.begin(request.generation, (!arrived.0.is_empty()).then_some(num_indexed));
        }
    }
}

/// Saving.
impl Engine {
    /// Queues the pages of a session that are worth having after a restart: all full-attention pages, and
    /// what windows and recurrent states need at the end and at the end of the prompt, where the next turn
    /// may part. Where memory is short the last ones come first, which are evicted first; else the beginning, which is of use
    /// without the rest.
    pub(super) fn save_session(&mut self, generation: &Generation) {
        let Some(disk) = self.disk.as_mut().filter(|disk| disk.store.is_saving()) else { return };
        let resident = generation.sequence().resident();
        let (tokens, names) = (resident.content(), resident.table().names());
        let groups = &self.executor.spec().model.groups;
        let end = names.len() * PAGE_TOKENS;
        let prompt_end = (generation.prompt().len() - 1).min(end) / PAGE_TOKENS * PAGE_TOKENS;
        let mut pages: Vec<_> = [prompt_end, end].into_iter().flat_map(|len| pages_of(groups, len)).collect();
        let sign = if self.pool.allocated_bytes() > self.pool.capacity() / 2 { -1 } else { 1 };
        pages.sort_unstable_by_key(|&(group, number)| (sign * number as isize, group));
        pages.dedup();
        let pages = pages.into_iter().filter_map(|(group, number)| PageAt::of(tokens, names, group, number));
        // Touch pages that are already saved, so that a live conversation is evicted last, and pages that several
        // sessions begin with after all others.
        let num_shared = generation.num_shared() / PAGE_TOKENS;
        let is_new = |page: &PageAt| {
            let page_use = PageUse { depth: page.number as u32, is_shared: page.number < num_shared };
            !disk.store.touch(page.disk_key(), page_use) && !disk.saves.keys.contains(&page.disk_key())
        };
        let news: Vec<_> = pages.filter(is_new).collect(); // collected first, because pushing changes what is new
        news.into_iter().for_each(|page| disk.saves.push(page));
    }

    /// Copies out up to `num_bytes` of pending pages while the I/O thread has room. Returns whether it copied
    /// any.
    fn save_pages(&mut self, num_bytes: usize) -> bool {
        let Self { disk, pool, executor, .. } = self;
        let Some(disk) = disk else { return false };
        let mut left = num_bytes;
        let mut bytes = Vec::new();
        while let Some(next) = disk.saves.order.front() {
            let len = executor.spec().model.groups[next.group].page_bytes;
            if left < len.min(num_bytes) || !disk.store.takes(len) {
                break;
            }
            left = left.saturating_sub(len);
            let page = disk.saves.pop().expect("there is a first");
            let Some(held) = pool.find(page.group, page.name, page.key()) else { continue };
            bytes.clear();
            match executor.export_page(held.page_ref(), &mut bytes) {
                Ok(()) => drop(disk.store.save(page.label(), std::mem::take(&mut bytes))),
                Err(error) => disk.notices.push(Notice::KvPageNotSaved(error.to_string())),
            }
        }
        left < num_bytes
    }
}

/// Lists the pages, as group and number, that a sequence of `len` tokens needs to resume.
fn pages_of(groups: &[KvGroup], len: usize) -> impl Iterator<Item = (usize, usize)> {
    let numbers = move |(group, spec): (usize, &KvGroup)| {
        spec.pages_needed(len).unwrap_or_default().map(move |number| (group, number))
    };
    groups.iter().enumerate().flat_map(numbers)
}
