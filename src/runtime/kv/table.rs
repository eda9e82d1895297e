//! A sequence's pages, in order. `len` tokens are covered; the last page may be partly filled.

use super::pool::{Page, PagePool};
use crate::runtime::backend::{PAGE_TOKENS, PageId};

/// Which page holds each token of one sequence. Grows by `extend`, shrinks by `truncate`, and by nothing else.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    pages: Vec<Page>,
    len: usize,
}

/// The pool has no page left; the table is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolExhausted;

impl PageTable {
    pub fn new(pool: &PagePool) -> Self {
        Self { pool: pool.clone(), pages: Vec::new(), len: 0 }
    }

    /// Tokens covered.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Covers `count` more tokens, taking pages as needed.
    ///
    /// # Errors
    /// [`PoolExhausted`] when the pool cannot supply them; nothing has changed then.
    pub fn extend(&mut self, count: usize) -> Result<(), PoolExhausted> {
        let wanted = (self.len + count).div_ceil(PAGE_TOKENS);
        let had = self.pages.len();
        while self.pages.len() < wanted {
            match self.pool.take() {
                Some(page) => self.pages.push(page),
                None => {
                    self.pages.truncate(had);
                    return Err(PoolExhausted);
                }
            }
        }
        self.len += count;
        Ok(())
    }

    /// Covers only the first `len` tokens; later pages go back to the pool. Panics when `len` is more than is covered.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "truncate to {len}, but only {} tokens are covered", self.len);
        self.pages.truncate(len.div_ceil(PAGE_TOKENS));
        self.len = len;
    }

    /// Page and offset within it of the token at `position`. Panics beyond `len`.
    pub fn slot(&self, position: usize) -> (PageId, usize) {
        assert!(position < self.len, "position {position} is beyond the table's {} tokens", self.len);
        (self.pages[position / PAGE_TOKENS].id(), position % PAGE_TOKENS)
    }

    /// Ids of the pages, in token order.
    pub fn page_ids(&self) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().map(Page::id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extend_takes_pages_lazily_and_truncate_gives_them_back() {
        let pool = PagePool::new(3);
        let mut table = PageTable::new(&pool);
        table.extend(1).expect("room");
        assert_eq!((table.len(), pool.num_free()), (1, 2));
        table.extend(PAGE_TOKENS).expect("room");
        assert_eq!((table.len(), pool.num_free()), (PAGE_TOKENS + 1, 1));
        assert_eq!(table.slot(PAGE_TOKENS).1, 0);
        table.truncate(PAGE_TOKENS);
        assert_eq!(pool.num_free(), 2);
        table.truncate(0);
        assert_eq!(pool.num_free(), 3);
    }

    #[test]
    fn a_failed_extend_changes_nothing() {
        let pool = PagePool::new(1);
        let mut table = PageTable::new(&pool);
        table.extend(3).expect("room");
        assert_eq!(table.extend(PAGE_TOKENS), Err(PoolExhausted));
        assert_eq!((table.len(), pool.num_free()), (3, 0));
    }
}
