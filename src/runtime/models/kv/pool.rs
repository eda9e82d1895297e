//! The page pool: counts holders and bytes of pages, and decides which page to hand out next. It moves no
//! memory.
//!
//! A page is in one of four states, which `check` verifies:
//!
//! ```text
//! without memory --take--> held by n >= 1 --last holder gone--> free     (its content has no name)
//!       ^                     ^                            \--> cached   (named in the index: found again until reused)
//!       |                     \---------- take, find ----------------/
//!       \------------------- bytes needed by another group ----------/
//! ```
//!
//! Invariant: pages with memory never exceed the capacity. `take` prefers pages without a name, then new
//! memory, then the cached page released longest ago, which loses its name. A table releases its last page
//! first, so the end of a chain is reused before its beginning. The pool is shared by `Rc`, not by a lock:
//! one thread owns the engine and all its tables.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::prefix::{PageContent, PageName, PrefixIndex};
use super::{KvGroup, PageRef, Tokens};
use crate::backend::PageId;

/// A pool that hands out pages up to a capacity. Clones share the pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    state: Rc<RefCell<PoolState>>,
}

#[derive(Debug)]
struct PoolState {
    /// Limit of the pages with memory, in bytes.
    capacity: usize,
    /// Bytes of pages that have memory.
    allocated: usize,
    /// Bytes of pages with at least one holder.
    held: usize,
    groups: Vec<GroupPages>,
    /// Cached pages by the time of their release.
    cached: BTreeMap<u64, PageRef>,
    index: PrefixIndex,
    /// True if pages are named and indexed.
    indexes: bool,
    /// True if the rows of an image see each other in both directions, so that they are computed in one step.
    whole_images: bool,
    /// Pages whose memory the backend must free.
    dropped: Vec<PageRef>,
    clock: u64,
}

#[derive(Debug)]
struct GroupPages {
    spec: KvGroup,
    /// Every page ever handed out, by id.
    pages: Vec<PageState>,
    /// Pages with memory, without holder and without name.
    free: Vec<PageId>,
    /// Pages without memory.
    vacant: Vec<PageId>,
}

#[derive(Debug, Default)]
struct PageState {
    num_holders: usize,
    /// Time of the release, the key in `cached`.
    released: u64,
    name: Option<PageName>,
}

impl PagePool {
    /// Creates a pool of `capacity` bytes.
    pub fn new(groups: &[KvGroup], capacity: usize) -> Self {
        let group = |&spec| GroupPages { spec, pages: Vec::new(), free: Vec::new(), vacant: Vec::new() };
        let state = PoolState {
            capacity,
            allocated: 0,
            held: 0,
            groups: groups.iter().map(group).collect(),
            cached: BTreeMap::new(),
            index: PrefixIndex::default(),
            indexes: true,
            whole_images: false,
            dropped: Vec::new(),
            clock: 0,
        };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// Creates a pool without an index: a free page is reused before new memory is allocated.
    pub fn without_index(groups: &[KvGroup], capacity: usize) -> Self {
        let pool = Self::new(groups, capacity);
        pool.state.borrow_mut().indexes = false;
        pool
    }

    /// Sets that no sequence resumes within a span of an image.
    pub fn keep_images_whole(&self) {
        self.state.borrow_mut().whole_images = true;
    }

    pub fn keeps_images_whole(&self) -> bool {
        self.state.borrow().whole_images
    }

    /// Returns the longest prefix, of at most `len` tokens, that a step may end with.
    pub fn round_down(&self, tokens: Tokens<'_>, len: usize) -> usize {
        if self.keeps_images_whole() { tokens.before_span(len) } else { len }
    }

    pub fn groups(&self) -> Vec<KvGroup> {
        self.state.borrow().groups.iter().map(|group| group.spec).collect()
    }

    pub fn has_index(&self) -> bool {
        self.state.borrow().indexes
    }

    /// Takes a free page of `group`; `None` if the held pages leave no room.
    pub fn take(&self, group: usize) -> Option<PageHold> {
        let page_ref = self.state.borrow_mut().take(group)?;
        Some(PageHold { page_ref, pool: self.clone() })
    }

    /// Returns the bytes that `take` can hand out, cached pages included.
    pub fn free_bytes(&self) -> usize {
        let state = self.state.borrow();
        state.capacity - state.held
    }

    /// Returns the capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.state.borrow().capacity
    }

    /// Returns the bytes of pages with memory, cached ones included.
    pub fn allocated_bytes(&self) -> usize {
        self.state.borrow().allocated
    }

    /// Returns the number of indexed pages.
    pub fn num_indexed(&self) -> usize {
        self.state.borrow().index.len()
    }

    /// Returns the pages dropped since the last call; their memory must be freed before anything is written.
    pub fn take_dropped(&self) -> Vec<PageRef> {
        std::mem::take(&mut self.state.borrow_mut().dropped)
    }

    /// Returns whether a page with this content is indexed.
    pub fn contains(&self, group: usize, name: PageName, key: PageContent<'_>) -> bool {
        self.state.borrow().index.find(group, name, key).is_some()
    }

    /// Finds the indexed page with this content and holds it.
    pub fn find(&self, group: usize, name: PageName, key: PageContent<'_>) -> Option<PageHold> {
        let mut state = self.state.borrow_mut();
        let page_ref = state.index.find(group, name, key)?;
        state.hold(page_ref);
        Some(PageHold { page_ref, pool: self.clone() })
    }

    /// Adds a full page to the index, unless a page with the same content is there.
    pub fn publish(&self, page: &PageHold, name: PageName, key: PageContent<'_>) {
        let mut state = self.state.borrow_mut();
        let is_news = state.indexes && state.page(page.page_ref).name.is_none();
        if is_news && state.index.insert(name, key, page.page_ref) {
            state.page(page.page_ref).name = Some(name);
        }
    }

    /// Removes a page from the index, even if it is held.
    pub(super) fn forget(&self, group: usize, name: PageName, key: PageContent<'_>) {
        let mut state = self.state.borrow_mut();
        let Some(page_ref) = state.index.find(group, name, key) else { return };
        let released = state.page(page_ref).released;
        if state.cached.get(&released) == Some(&page_ref) {
            state.cached.remove(&released);
            state.groups[group].free.push(page_ref.page);
        }
        state.forget(page_ref);
    }

    /// Checks the bookkeeping, given the number of holders of each held page.
    ///
    /// # Errors
    /// A sentence that describes the first inconsistency.
    pub(super) fn check_holders(&self, num_held: &BTreeMap<PageRef, usize>) -> Result<(), String> {
        let state = self.state.borrow();
        state.check_pages(num_held)?;
        let names = state.groups.iter().flat_map(|group| &group.pages).filter(|page| page.name.is_some());
        let (num_named, num_indexed) = (names.count(), state.index.len());
        if num_named != num_indexed {
            return Err(format!("{num_named} named pages, {num_indexed} in the index"));
        }
        Ok(())
    }
}

impl PoolState {
    fn page(&mut self, page_ref: PageRef) -> &mut PageState {
        &mut self.groups[page_ref.group].pages[page_ref.page as usize]
    }

    fn take(&mut self, group: usize) -> Option<PageRef> {
        let bytes = self.groups[group].spec.page_bytes;
        if self.held + bytes > self.capacity {
            return None;
        }
        let page = match self.groups[group].free.pop() {
            Some(page) => page,
            None => self.find_room(group, bytes)?,
        };
        let page_ref = PageRef { group, page };
        self.page(page_ref).num_holders = 1;
        self.held += bytes;
        Some(page_ref)
    }

    /// Finds a page with memory: a new one, or a free one of any group.
    fn find_room(&mut self, group: usize, bytes: usize) -> Option<PageId> {
        while self.allocated + bytes > self.capacity {
            if let Some(other) = self.groups.iter().position(|group| !group.free.is_empty()) {
                let page = self.groups[other].free.pop()?;
                self.drop_memory(PageRef { group: other, page });
                continue;
            }
            let (_, page_ref) = self.cached.pop_first()?;
            self.forget(page_ref);
            if page_ref.group == group {
                return Some(page_ref.page);
            }
            self.drop_memory(page_ref);
        }
        self.allocated += bytes;
        let vacant = self.groups[group].vacant.pop();
        let pages = &mut self.groups[group].pages;
        Some(vacant.unwrap_or_else(|| {
            pages.push(PageState::default());
            (pages.len() - 1) as PageId
        }))
    }

    fn drop_memory(&mut self, page_ref: PageRef) {
        let group = &mut self.groups[page_ref.group];
        group.vacant.push(page_ref.page);
        self.allocated -= group.spec.page_bytes;
        self.dropped.push(page_ref);
    }

    fn hold(&mut self, page_ref: PageRef) {
        let page = self.page(page_ref);
        page.num_holders += 1;
        if page.num_holders == 1 {
            let released = page.released;
            self.cached.remove(&released);
            self.held += self.groups[page_ref.group].spec.page_bytes;
        }
    }

    fn forget(&mut self, page_ref: PageRef) {
        if let Some(name) = self.page(page_ref).name.take() {
            self.index.remove(page_ref.group, name);
        }
    }

    fn release(&mut self, page_ref: PageRef) {
        let page = self.page(page_ref);
        page.num_holders -= 1;
        if page.num_holders > 0 {
            return;
        }
        let is_named = page.name.is_some();
        self.held -= self.groups[page_ref.group].spec.page_bytes;
        if !is_named {
            return self.groups[page_ref.group].free.push(page_ref.page);
        }
        self.clock += 1;
        self.page(page_ref).released = self.clock;
        self.cached.insert(self.clock, page_ref);
    }

    fn check_pages(&self, num_held: &BTreeMap<PageRef, usize>) -> Result<(), String> {
        let (mut held, mut allocated) = (0, 0);
        for (index, group) in self.groups.iter().enumerate() {
            for (page, state) in group.pages.iter().enumerate() {
                let page_ref = PageRef { group: index, page: page as PageId };
                let listed = [&group.free, &group.vacant]
                    .map(|list| list.iter().filter(|&&id| id == page_ref.page).count());
                let is_cached = self.cached.get(&state.released) == Some(&page_ref);
                let is_held = state.num_holders > 0;
                let fine = state.num_holders == num_held.get(&page_ref).copied().unwrap_or(0)
                    && listed[0] + listed[1] + usize::from(is_cached) + usize::from(is_held) == 1
                    && (!is_cached || state.name.is_some())
                    && state
                        .name
                        .is_none_or(|name| (is_cached || is_held) && self.index.leads_to(name, page_ref));
                if !fine {
                    return Err(format!(
                        "{page_ref:?}, held by {:?}, listed {listed:?}: {state:?}",
                        num_held.get(&page_ref)
                    ));
                }
                held += usize::from(is_held) * group.spec.page_bytes;
                allocated += (1 - listed[1]) * group.spec.page_bytes;
            }
        }
        match (held, allocated) == (self.held, self.allocated) && allocated <= self.capacity {
            true => Ok(()),
            false => Err(format!(
                "{held} and {allocated} bytes, in the books {} and {}",
                self.held, self.allocated
            )),
        }
    }
}

/// A hold on a page. A clone holds the page once more; dropping the last hold frees it.
#[derive(Debug)]
pub struct PageHold {
    page_ref: PageRef,
    pool: PagePool,
}

impl PageHold {
    pub fn page_ref(&self) -> PageRef {
        self.page_ref
    }

    /// Returns whether the page has other holders; such a page must not be written.
    pub fn is_shared(&self) -> bool {
        self.pool.state.borrow_mut().page(self.page_ref).num_holders > 1
    }

    /// Returns whether the page is indexed; writing it would make the index wrong.
    pub fn is_indexed(&self) -> bool {
        self.pool.state.borrow_mut().page(self.page_ref).name.is_some()
    }

    /// Removes the page from the index.
    pub(super) fn forget(&self) {
        self.pool.state.borrow_mut().forget(self.page_ref);
    }
}

impl Clone for PageHold {
    fn clone(&self) -> Self {
        self.pool.state.borrow_mut().hold(self.page_ref);
        Self { page_ref: self.page_ref, pool: self.pool.clone() }
    }
}

impl Drop for PageHold {
    fn drop(&mut self) {
        self.pool.state.borrow_mut().release(self.page_ref);
    }
}

#[cfg(test)]
mod tests {
    use super::super::KvKind;
    use super::*;

    /// A pool with pages of one byte.
    fn pool(capacity: usize) -> PagePool {
        PagePool::new(&[KvGroup { kind: KvKind::Full, page_bytes: 1 }], capacity)
    }

    fn publish(pool: &PagePool, page: &PageHold, tokens: &[u32]) {
        let key = PageContent { parent: None, tokens };
        pool.publish(page, PageName::of(key), key);
    }

    fn find(pool: &PagePool, tokens: &[u32]) -> Option<PageHold> {
        let key = PageContent { parent: None, tokens };
        pool.find(0, PageName::of(key), key)
    }

    #[test]
    fn a_dropped_page_is_handed_out_again_and_capacity_holds() {
        let pool = pool(2);
        let first = pool.take(0).expect("two free");
        let second = pool.take(0).expect("one free");
        assert_ne!(first.page_ref(), second.page_ref());
        assert!(pool.take(0).is_none());
        let freed = first.page_ref();
        let again = first.clone();
        drop(first);
        assert!(pool.take(0).is_none(), "still held once");
        drop(again);
        assert_eq!(pool.free_bytes(), 1);
        assert_eq!(pool.take(0).expect("one free").page_ref(), freed);
    }

    #[test]
    fn without_an_index_the_page_released_last_is_used_first() {
        let pool = PagePool::without_index(&pool(0).groups(), 2);
        let page = pool.take(0).expect("free");
        let page_ref = page.page_ref();
        publish(&pool, &page, &[1]);
        drop(page);
        assert!(find(&pool, &[1]).is_none());
        assert_eq!(pool.take(0).expect("free").page_ref(), page_ref);
    }

    #[test]
    fn cached_pages_are_reused_last_and_the_longest_unused_first() {
        let pool = pool(3);
        let [a, b, plain] = [(); 3].map(|()| pool.take(0).expect("free"));
        let (a_ref, b_ref, plain_ref) = (a.page_ref(), b.page_ref(), plain.page_ref());
        publish(&pool, &a, &[1]);
        publish(&pool, &b, &[2]);
        drop((a, b, plain));
        assert_eq!((pool.free_bytes(), pool.num_indexed()), (3, 2));
        drop(find(&pool, &[1]).expect("addressable while free")); // used again: now the younger of the two
        let first = pool.take(0).expect("free");
        assert_eq!((first.page_ref(), pool.num_indexed()), (plain_ref, 2));
        let second = pool.take(0).expect("free");
        assert_eq!((second.page_ref(), pool.num_indexed()), (b_ref, 1));
        assert!(find(&pool, &[2]).is_none());
        assert_eq!(find(&pool, &[1]).expect("still there").page_ref(), a_ref);
    }

    #[test]
    fn groups_share_the_bytes_and_memory_goes_back_before_another_group_takes_it() {
        let groups = [(KvKind::Full, 2), (KvKind::SlidingWindow(8), 3)]
            .map(|(kind, page_bytes)| KvGroup { kind, page_bytes });
        let pool = PagePool::new(&groups, 7);
        let [a, b] = [pool.take(0).expect("room"), pool.take(0).expect("room")];
        let c = pool.take(1).expect("room for both kinds");
        assert_eq!((pool.free_bytes(), pool.allocated_bytes()), (0, 7));
        publish(&pool, &a, &[1]);
        let (a_ref, b_ref) = (a.page_ref(), b.page_ref());
        drop((a, b));
        assert!(pool.take_dropped().is_empty(), "nobody needed them yet");
        let d = pool.take(1).expect("four bytes are free");
        assert_eq!(pool.take_dropped(), [b_ref, a_ref], "without a name first, then the cached one");
        assert!(find(&pool, &[1]).is_none() && pool.take(0).is_none());
        assert_eq!((pool.free_bytes(), pool.allocated_bytes()), (1, 6));
        drop((c, d));
        pool.check([]).expect("in order");
        let again = pool.take(0).expect("room");
        assert!([a_ref, b_ref].contains(&again.page_ref()), "ids are used again");
    }
}
