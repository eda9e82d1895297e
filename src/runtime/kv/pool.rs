//! The free list of KV pages. Handing out and taking back is bookkeeping only; no memory moves here.
//!
//! Invariant: an id is either free or held by exactly one [`Page`]; dropping the page frees it. Shared by `Rc`, not
//! by a lock: one thread owns the engine and all its tables.

use std::cell::RefCell;
use std::rc::Rc;

use crate::runtime::backend::PageId;

/// Hands out pages up to a capacity, lowest free id first. Cloning shares the pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    state: Rc<RefCell<State>>,
}

#[derive(Debug)]
struct State {
    capacity: usize,
    /// Ids handed out at least once are below this.
    fresh: PageId,
    free: Vec<PageId>,
}

impl PagePool {
    pub fn new(capacity: usize) -> Self {
        Self { state: Rc::new(RefCell::new(State { capacity, fresh: 0, free: Vec::new() })) }
    }

    /// A page nobody holds; `None` when all are taken.
    pub fn take(&self) -> Option<Page> {
        let mut state = self.state.borrow_mut();
        let id = match state.free.pop() {
            Some(id) => id,
            None if (state.fresh as usize) < state.capacity => {
                state.fresh += 1;
                state.fresh - 1
            }
            None => return None,
        };
        Some(Page { id, pool: self.clone() })
    }

    pub fn num_free(&self) -> usize {
        let state = self.state.borrow();
        state.capacity - state.fresh as usize + state.free.len()
    }

    pub fn capacity(&self) -> usize {
        self.state.borrow().capacity
    }
}

/// A page in use; dropping it gives it back.
#[derive(Debug)]
pub struct Page {
    id: PageId,
    pool: PagePool,
}

impl Page {
    pub fn id(&self) -> PageId {
        self.id
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pool.state.borrow_mut().free.push(self.id);
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
        drop(first);
        assert_eq!(pool.num_free(), 1);
        assert_eq!(pool.take().expect("one free").id(), freed);
    }
}
