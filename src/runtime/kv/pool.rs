//! Who holds which KV page, and which pages to hand out next. Bookkeeping only; no memory moves here.
//!
//! A page is in one of four states, and the checker says when it is not:
//!
//! ```text
//! never used --take--> held by n >= 1 --last holder gone--> free     (its content has no name)
//!                         ^                            \--> cached   (named in the index: found again until reused)
//!                         \---------- take, find ----------------/
//! ```
//!
//! `take` prefers pages without a name, then the cached one let go of longest ago, whose name goes. A table lets go of its
//! last page first, so of a chain the end is reused before the beginning.
//! Shared by `Rc`, not by a lock: one thread owns the engine and all its tables.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::prefix::{ChainHash, PageKey, PrefixIndex};
use super::table::PageTable;
use crate::runtime::backend::PageId;

/// Hands out pages up to a capacity. Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    state: Rc<RefCell<State>>,
}

#[derive(Debug)]
struct State {
    capacity: usize,
    /// Every page handed out at least once, by id.
    pages: Vec<PageState>,
    free: Vec<PageId>,
    /// By when they were let go of.
    cached: BTreeMap<u64, PageId>,
    index: PrefixIndex,
    /// Whether pages are named at all.
    indexes: bool,
    clock: u64,
}

#[derive(Debug, Default)]
struct PageState {
    num_holders: usize,
    /// Its place in `cached`.
    released: u64,
    name: Option<ChainHash>,
}

impl PagePool {
    pub fn new(capacity: usize) -> Self {
        let state = State {
            capacity,
            pages: Vec::new(),
            free: Vec::new(),
            cached: BTreeMap::new(),
            index: PrefixIndex::default(),
            indexes: true,
            clock: 0,
        };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// A pool that remembers no content: a free page is used again before memory is made for another.
    pub fn without_index(capacity: usize) -> Self {
        let pool = Self::new(capacity);
        pool.state.borrow_mut().indexes = false;
        pool
    }

    /// A page nobody holds; `None` when all are taken.
    pub fn take(&self) -> Option<Page> {
        let id = self.state.borrow_mut().take()?;
        Some(Page { id, pool: self.clone() })
    }

    /// Pages that `take` can hand out, cached ones included.
    pub fn num_free(&self) -> usize {
        let state = self.state.borrow();
        state.capacity - state.pages.len() + state.free.len() + state.cached.len()
    }

    pub fn capacity(&self) -> usize {
        self.state.borrow().capacity
    }

    /// Pages that the index can find.
    pub fn num_indexed(&self) -> usize {
        self.state.borrow().index.len()
    }

    /// The page with this content, if one is indexed; held from now on.
    pub(super) fn find(&self, key: PageKey<'_>) -> Option<(ChainHash, Page)> {
        let mut state = self.state.borrow_mut();
        let name = state.index.name(key);
        let id = state.index.find(name, key)?;
        let page = &mut state.pages[id as usize];
        page.num_holders += 1;
        if page.num_holders == 1 {
            let released = page.released;
            state.cached.remove(&released);
        }
        Some((name, Page { id, pool: self.clone() }))
    }

    /// Makes a full page findable, unless another with the same content is. Returns its name in either case.
    pub(super) fn publish(&self, page: &Page, key: PageKey<'_>) -> ChainHash {
        let mut state = self.state.borrow_mut();
        let name = state.index.name(key);
        if state.indexes
            && state.pages[page.id as usize].name.is_none()
            && state.index.insert(name, key, page.id)
        {
            state.pages[page.id as usize].name = Some(name);
        }
        name
    }

    /// Whether the books are in order when `tables` are all there are.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check<'a>(&self, tables: impl IntoIterator<Item = &'a PageTable>) -> Result<(), String> {
        let state = self.state.borrow();
        let mut num_held = vec![0; state.pages.len()];
        for table in tables {
            table.check()?;
            table.page_ids(0).for_each(|id| num_held[id as usize] += 1);
        }
        let mut num_listed = vec![0; state.pages.len()];
        state.free.iter().chain(state.cached.values()).for_each(|&id| num_listed[id as usize] += 1);
        for (id, page) in state.pages.iter().enumerate() {
            let is_cached = state.cached.get(&page.released) == Some(&(id as PageId));
            let is_free = page.num_holders == 0;
            let fine = page.num_holders == num_held[id]
                && num_listed[id] == usize::from(is_free)
                && is_cached == (is_free && page.name.is_some())
                && page.name.is_none_or(|name| state.index.leads_to(name, id as PageId));
            if !fine {
                return Err(format!(
                    "page {id}, held {} times, listed {}: {page:?}",
                    num_held[id], num_listed[id]
                ));
            }
        }
        let num_named = state.pages.iter().filter(|page| page.name.is_some()).count();
        match num_named == state.index.len() && state.pages.len() <= state.capacity {
            true => Ok(()),
            false => Err(format!("{num_named} named pages, {} in the index", state.index.len())),
        }
    }
}

impl State {
    fn take(&mut self) -> Option<PageId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.pages.len() < self.capacity => {
                self.pages.push(PageState::default());
                (self.pages.len() - 1) as PageId
            }
            None => {
                let (_, id) = self.cached.pop_first()?;
                self.forget(id);
                id
            }
        };
        self.pages[id as usize].num_holders = 1;
        Some(id)
    }

    fn forget(&mut self, id: PageId) {
        if let Some(name) = self.pages[id as usize].name.take() {
            self.index.remove(name);
        }
    }

    fn let_go(&mut self, id: PageId) {
        let page = &mut self.pages[id as usize];
        page.num_holders -= 1;
        if page.num_holders > 0 {
            return;
        }
        if page.name.is_none() {
            return self.free.push(id);
        }
        self.clock += 1;
        page.released = self.clock;
        self.cached.insert(self.clock, id);
    }
}

/// A hold on a page. Cloning holds it once more; dropping the last hold frees it.
#[derive(Debug)]
pub struct Page {
    id: PageId,
    pool: PagePool,
}

impl Page {
    pub fn id(&self) -> PageId {
        self.id
    }

    /// Whether somebody else holds it too: then it must not be written.
    pub fn is_shared(&self) -> bool {
        self.pool.state.borrow().pages[self.id as usize].num_holders > 1
    }

    /// Whether the index leads to it: writing it would make the index lie.
    pub fn is_indexed(&self) -> bool {
        self.pool.state.borrow().pages[self.id as usize].name.is_some()
    }

    /// Takes it out of the index.
    pub(super) fn forget(&self) {
        self.pool.state.borrow_mut().forget(self.id);
    }
}

impl Clone for Page {
    fn clone(&self) -> Self {
        self.pool.state.borrow_mut().pages[self.id as usize].num_holders += 1;
        Self { id: self.id, pool: self.pool.clone() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pool.state.borrow_mut().let_go(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_page_is_handed_out_again_and_capacity_holds() {
        let pool = PagePool::new(2);
        let first = pool.take().expect("two free");
        let second = pool.take().expect("one free");
        assert_ne!(first.id(), second.id());
        assert!(pool.take().is_none());
        let freed = first.id();
        let again = first.clone();
        drop(first);
        assert!(pool.take().is_none(), "still held once");
        drop(again);
        assert_eq!(pool.num_free(), 1);
        assert_eq!(pool.take().expect("one free").id(), freed);
    }

    #[test]
    fn without_an_index_the_page_let_go_of_last_is_used_first() {
        let pool = PagePool::without_index(2);
        let page = pool.take().expect("free");
        let (id, key) = (page.id(), PageKey { parent: None, tokens: &[1] });
        pool.publish(&page, key);
        drop(page);
        assert!(pool.find(key).is_none());
        assert_eq!(pool.take().expect("free").id(), id);
    }

    #[test]
    fn cached_pages_are_reused_last_and_the_longest_unused_first() {
        let pool = PagePool::new(3);
        let key = |tokens| PageKey { parent: None, tokens };
        let pages = [(); 3].map(|()| pool.take().expect("free"));
        let [a, b, plain] = pages;
        let (a_id, b_id, plain_id) = (a.id(), b.id(), plain.id());
        pool.publish(&a, key(&[1]));
        pool.publish(&b, key(&[2]));
        drop((a, b, plain));
        assert_eq!((pool.num_free(), pool.num_indexed()), (3, 2));
        drop(pool.find(key(&[1])).expect("addressable while free")); // used again: now the younger of the two
        let first = pool.take().expect("free");
        assert_eq!((first.id(), pool.num_indexed()), (plain_id, 2));
        let second = pool.take().expect("free");
        assert_eq!((second.id(), pool.num_indexed()), (b_id, 1));
        assert!(pool.find(key(&[2])).is_none());
        assert_eq!(pool.find(key(&[1])).expect("still there").1.id(), a_id);
    }
}
