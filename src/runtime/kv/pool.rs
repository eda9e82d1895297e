//! Who holds which page, what they take together, and which pages to hand out next. Bookkeeping only; no memory moves here.
//!
//! A page is in one of four states, and the checker says when it is not:
//!
//! ```text
//! without memory --take--> held by n >= 1 --last holder gone--> free     (its content has no name)
//!       ^                     ^                            \--> cached   (named in the index: found again until reused)
//!       |                     \---------- take, find ----------------/
//!       \------------------- bytes needed by another group ----------/
//! ```
//!
//! Invariant: pages that have memory never take more than the capacity. `take` prefers pages without a name, then new memory,
//! then the cached page let go of longest ago, whose name goes. A table lets go of its last page first, so of a chain the end
//! is reused before the beginning. Shared by `Rc`, not by a lock: one thread owns the engine and all its tables.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::prefix::{PageKey, PageName, PrefixIndex};
use super::table::PageTable;
use super::{Place, StateGroup};
use crate::runtime::backend::PageId;

/// Hands out pages up to a capacity. Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    state: Rc<RefCell<State>>,
}

#[derive(Debug)]
struct State {
    /// Bytes that pages may take.
    capacity: usize,
    /// Bytes of pages that have memory.
    allocated: usize,
    /// Bytes of pages that somebody holds.
    held: usize,
    groups: Vec<Group>,
    /// By when they were let go of.
    cached: BTreeMap<u64, Place>,
    index: PrefixIndex,
    /// Whether pages are named at all.
    indexes: bool,
    /// Pages whose memory is to be given back.
    dropped: Vec<Place>,
    clock: u64,
}

#[derive(Debug)]
struct Group {
    spec: StateGroup,
    /// Every page handed out at least once, by id.
    pages: Vec<PageState>,
    /// Nobody's, without a name, with memory.
    free: Vec<PageId>,
    /// Nobody's, without memory.
    vacant: Vec<PageId>,
}

#[derive(Debug, Default)]
struct PageState {
    num_holders: usize,
    /// Its place in `cached`.
    released: u64,
    name: Option<PageName>,
}

impl PagePool {
    /// `capacity` in bytes.
    pub fn new(groups: &[StateGroup], capacity: usize) -> Self {
        let group = |&spec| Group { spec, pages: Vec::new(), free: Vec::new(), vacant: Vec::new() };
        let state = State {
            capacity,
            allocated: 0,
            held: 0,
            groups: groups.iter().map(group).collect(),
            cached: BTreeMap::new(),
            index: PrefixIndex::default(),
            indexes: true,
            dropped: Vec::new(),
            clock: 0,
        };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// A pool that remembers no content: a free page is used again before memory is made for another.
    pub fn without_index(groups: &[StateGroup], capacity: usize) -> Self {
        let pool = Self::new(groups, capacity);
        pool.state.borrow_mut().indexes = false;
        pool
    }

    pub fn groups(&self) -> Vec<StateGroup> {
        self.state.borrow().groups.iter().map(|group| group.spec).collect()
    }

    pub fn has_index(&self) -> bool {
        self.state.borrow().indexes
    }

    /// A page of `group` that nobody holds; `None` when those held leave no room for it.
    pub fn take(&self, group: usize) -> Option<Page> {
        let place = self.state.borrow_mut().take(group)?;
        Some(Page { place, pool: self.clone() })
    }

    /// Bytes that `take` can hand out, those of cached pages included.
    pub fn free_bytes(&self) -> usize {
        let state = self.state.borrow();
        state.capacity - state.held
    }

    /// In bytes.
    pub fn capacity(&self) -> usize {
        self.state.borrow().capacity
    }

    /// Bytes of pages that have memory, cached ones included.
    pub fn allocated_bytes(&self) -> usize {
        self.state.borrow().allocated
    }

    /// Pages that the index can find.
    pub fn num_indexed(&self) -> usize {
        self.state.borrow().index.len()
    }

    /// Pages whose memory is to be given back before anything is written: what has gone from them since the last call.
    pub fn take_dropped(&self) -> Vec<Place> {
        std::mem::take(&mut self.state.borrow_mut().dropped)
    }

    /// Whether a page with this content is indexed.
    pub fn contains(&self, group: usize, name: PageName, key: PageKey<'_>) -> bool {
        self.state.borrow().index.find(group, name, key).is_some()
    }

    /// The page with this content, if one is indexed; held from now on.
    pub fn find(&self, group: usize, name: PageName, key: PageKey<'_>) -> Option<Page> {
        let mut state = self.state.borrow_mut();
        let place = state.index.find(group, name, key)?;
        state.hold(place);
        Some(Page { place, pool: self.clone() })
    }

    /// Makes a full page findable, unless another with the same content is.
    pub fn publish(&self, page: &Page, name: PageName, key: PageKey<'_>) {
        let mut state = self.state.borrow_mut();
        let is_news = state.indexes && state.page(page.place).name.is_none();
        if is_news && state.index.insert(name, key, page.place) {
            state.page(page.place).name = Some(name);
        }
    }

    /// Takes the name of a page away, whoever holds it.
    pub(super) fn forget(&self, group: usize, name: PageName, key: PageKey<'_>) {
        let mut state = self.state.borrow_mut();
        let Some(place) = state.index.find(group, name, key) else { return };
        let released = state.page(place).released;
        if state.cached.get(&released) == Some(&place) {
            state.cached.remove(&released);
            state.groups[group].free.push(place.page);
        }
        state.forget(place);
    }

    /// Whether the books are in order when `tables` are all there are.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check<'a>(&self, tables: impl IntoIterator<Item = &'a PageTable>) -> Result<(), String> {
        let state = self.state.borrow();
        let mut num_held: BTreeMap<Place, usize> = BTreeMap::new();
        for table in tables {
            table.check()?;
            table.places().for_each(|place| *num_held.entry(place).or_default() += 1);
        }
        state.check_pages(&num_held)?;
        let names = state.groups.iter().flat_map(|group| &group.pages).filter(|page| page.name.is_some());
        let (num_named, num_indexed) = (names.count(), state.index.len());
        if num_named != num_indexed {
            return Err(format!("{num_named} named pages, {num_indexed} in the index"));
        }
        Ok(())
    }
}

impl State {
    fn page(&mut self, place: Place) -> &mut PageState {
        &mut self.groups[place.group].pages[place.page as usize]
    }

    fn take(&mut self, group: usize) -> Option<Place> {
        let bytes = self.groups[group].spec.page_bytes;
        if self.held + bytes > self.capacity {
            return None;
        }
        let page = match self.groups[group].free.pop() {
            Some(page) => page,
            None => self.find_room(group, bytes)?,
        };
        let place = Place { group, page };
        self.page(place).num_holders = 1;
        self.held += bytes;
        Some(place)
    }

    /// A page with memory: new, or taken from what nobody holds.
    fn find_room(&mut self, group: usize, bytes: usize) -> Option<PageId> {
        while self.allocated + bytes > self.capacity {
            if let Some(other) = self.groups.iter().position(|group| !group.free.is_empty()) {
                let page = self.groups[other].free.pop()?;
                self.drop_memory(Place { group: other, page });
                continue;
            }
            let (_, place) = self.cached.pop_first()?;
            self.forget(place);
            if place.group == group {
                return Some(place.page);
            }
            self.drop_memory(place);
        }
        self.allocated += bytes;
        let vacant = self.groups[group].vacant.pop();
        let pages = &mut self.groups[group].pages;
        Some(vacant.unwrap_or_else(|| {
            pages.push(PageState::default());
            (pages.len() - 1) as PageId
        }))
    }

    fn drop_memory(&mut self, place: Place) {
        let group = &mut self.groups[place.group];
        group.vacant.push(place.page);
        self.allocated -= group.spec.page_bytes;
        self.dropped.push(place);
    }

    fn hold(&mut self, place: Place) {
        let page = self.page(place);
        page.num_holders += 1;
        if page.num_holders == 1 {
            let released = page.released;
            self.cached.remove(&released);
            self.held += self.groups[place.group].spec.page_bytes;
        }
    }

    fn forget(&mut self, place: Place) {
        if let Some(name) = self.page(place).name.take() {
            self.index.remove(place.group, name);
        }
    }

    fn let_go(&mut self, place: Place) {
        let page = self.page(place);
        page.num_holders -= 1;
        if page.num_holders > 0 {
            return;
        }
        let is_named = page.name.is_some();
        self.held -= self.groups[place.group].spec.page_bytes;
        if !is_named {
            return self.groups[place.group].free.push(place.page);
        }
        self.clock += 1;
        self.page(place).released = self.clock;
        self.cached.insert(self.clock, place);
    }

    fn check_pages(&self, num_held: &BTreeMap<Place, usize>) -> Result<(), String> {
        let (mut held, mut allocated) = (0, 0);
        for (index, group) in self.groups.iter().enumerate() {
            for (page, state) in group.pages.iter().enumerate() {
                let place = Place { group: index, page: page as PageId };
                let listed = [&group.free, &group.vacant]
                    .map(|list| list.iter().filter(|&&id| id == place.page).count());
                let is_cached = self.cached.get(&state.released) == Some(&place);
                let is_held = state.num_holders > 0;
                let fine = state.num_holders == num_held.get(&place).copied().unwrap_or(0)
                    && listed[0] + listed[1] + usize::from(is_cached) + usize::from(is_held) == 1
                    && (!is_cached || state.name.is_some())
                    && state
                        .name
                        .is_none_or(|name| (is_cached || is_held) && self.index.leads_to(name, place));
                if !fine {
                    return Err(format!(
                        "{place:?}, held by {:?}, listed {listed:?}: {state:?}",
                        num_held.get(&place)
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

/// A hold on a page. Cloning holds it once more; dropping the last hold frees it.
#[derive(Debug)]
pub struct Page {
    place: Place,
    pool: PagePool,
}

impl Page {
    pub fn place(&self) -> Place {
        self.place
    }

    /// Whether somebody else holds it too: then it must not be written.
    pub fn is_shared(&self) -> bool {
        self.pool.state.borrow_mut().page(self.place).num_holders > 1
    }

    /// Whether the index leads to it: writing it would make the index lie.
    pub fn is_indexed(&self) -> bool {
        self.pool.state.borrow_mut().page(self.place).name.is_some()
    }

    /// Takes it out of the index.
    pub(super) fn forget(&self) {
        self.pool.state.borrow_mut().forget(self.place);
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        self.pool.state.borrow_mut().hold(self.place);
        Self { place: self.place, pool: self.pool.clone() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pool.state.borrow_mut().let_go(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Keep;
    use super::*;

    /// Pages of one byte.
    fn pool(capacity: usize) -> PagePool {
        PagePool::new(&[StateGroup { keep: Keep::All, page_bytes: 1 }], capacity)
    }

    fn publish(pool: &PagePool, page: &Page, tokens: &[u32]) {
        let key = PageKey { parent: None, tokens };
        pool.publish(page, PageName::of(key), key);
    }

    fn find(pool: &PagePool, tokens: &[u32]) -> Option<Page> {
        let key = PageKey { parent: None, tokens };
        pool.find(0, PageName::of(key), key)
    }

    #[test]
    fn a_dropped_page_is_handed_out_again_and_capacity_holds() {
        let pool = pool(2);
        let first = pool.take(0).expect("two free");
        let second = pool.take(0).expect("one free");
        assert_ne!(first.place(), second.place());
        assert!(pool.take(0).is_none());
        let freed = first.place();
        let again = first.clone();
        drop(first);
        assert!(pool.take(0).is_none(), "still held once");
        drop(again);
        assert_eq!(pool.free_bytes(), 1);
        assert_eq!(pool.take(0).expect("one free").place(), freed);
    }

    #[test]
    fn without_an_index_the_page_let_go_of_last_is_used_first() {
        let pool = PagePool::without_index(&pool(0).groups(), 2);
        let page = pool.take(0).expect("free");
        let place = page.place();
        publish(&pool, &page, &[1]);
        drop(page);
        assert!(find(&pool, &[1]).is_none());
        assert_eq!(pool.take(0).expect("free").place(), place);
    }

    #[test]
    fn cached_pages_are_reused_last_and_the_longest_unused_first() {
        let pool = pool(3);
        let [a, b, plain] = [(); 3].map(|()| pool.take(0).expect("free"));
        let (a_place, b_place, plain_place) = (a.place(), b.place(), plain.place());
        publish(&pool, &a, &[1]);
        publish(&pool, &b, &[2]);
        drop((a, b, plain));
        assert_eq!((pool.free_bytes(), pool.num_indexed()), (3, 2));
        drop(find(&pool, &[1]).expect("addressable while free")); // used again: now the younger of the two
        let first = pool.take(0).expect("free");
        assert_eq!((first.place(), pool.num_indexed()), (plain_place, 2));
        let second = pool.take(0).expect("free");
        assert_eq!((second.place(), pool.num_indexed()), (b_place, 1));
        assert!(find(&pool, &[2]).is_none());
        assert_eq!(find(&pool, &[1]).expect("still there").place(), a_place);
    }

    #[test]
    fn groups_share_the_bytes_and_memory_goes_back_before_another_group_takes_it() {
        let groups =
            [(Keep::All, 2), (Keep::Window(8), 3)].map(|(keep, page_bytes)| StateGroup { keep, page_bytes });
        let pool = PagePool::new(&groups, 7);
        let [a, b] = [pool.take(0).expect("room"), pool.take(0).expect("room")];
        let c = pool.take(1).expect("room for both kinds");
        assert_eq!((pool.free_bytes(), pool.allocated_bytes()), (0, 7));
        publish(&pool, &a, &[1]);
        let (a_place, b_place) = (a.place(), b.place());
        drop((a, b));
        assert!(pool.take_dropped().is_empty(), "nobody needed them yet");
        let d = pool.take(1).expect("four bytes are free");
        assert_eq!(pool.take_dropped(), [b_place, a_place], "without a name first, then the cached one");
        assert!(find(&pool, &[1]).is_none() && pool.take(0).is_none());
        assert_eq!((pool.free_bytes(), pool.allocated_bytes()), (1, 6));
        drop((c, d));
        pool.check([]).expect("in order");
        let again = pool.take(0).expect("room");
        assert!([a_place, b_place].contains(&again.place()), "ids are used again");
    }
}
