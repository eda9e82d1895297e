//! A sequence's pages, in order. `len` tokens are covered; the last page may be partly filled.
//!
//! Invariants: pages may be shared with other tables and named in the index, and such a page is never written: what would
//! write into it gets a copy first. Only full pages are named. Pages are let go of from the end.

use super::pool::{Page, PagePool};
use super::prefix::{ChainHash, PageKey};
use crate::runtime::backend::{PAGE_TOKENS, PageId};

/// Which page holds each token of one sequence. Grows by `extend`, shrinks by `truncate`, and by nothing else.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    pages: Vec<Page>,
    len: usize,
    /// Names of the first pages, as far as their content has been announced.
    names: Vec<ChainHash>,
}

/// The pool has no page left; the table is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolExhausted;

/// The content of page `from` is to be copied to `to` before anything else is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    pub from: PageId,
    pub to: PageId,
}

impl PageTable {
    pub fn new(pool: &PagePool) -> Self {
        Self { pool: pool.clone(), pages: Vec::new(), len: 0, names: Vec::new() }
    }

    /// The longest beginning of `tokens` whose pages are indexed.
    pub fn from_index(pool: &PagePool, tokens: &[u32]) -> Self {
        let mut table = Self::new(pool);
        for tokens in tokens.chunks_exact(PAGE_TOKENS) {
            let parent = table.names.last().copied();
            let Some((name, page)) = pool.find(PageKey { parent, tokens }) else { break };
            table.pages.push(page);
            table.names.push(name);
            table.len += PAGE_TOKENS;
        }
        table
    }

    /// Another table over the same pages.
    pub fn fork(&self) -> Self {
        Self { pool: self.pool.clone(), pages: self.pages.clone(), len: self.len, names: self.names.clone() }
    }

    /// Tokens covered.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Covers `count` more tokens, taking pages as needed. A last page that others may read is replaced by a copy, which
    /// the caller has to make.
    ///
    /// # Errors
    /// [`PoolExhausted`] when the pool cannot supply them; nothing has changed then.
    pub fn extend(&mut self, count: usize) -> Result<Option<PageCopy>, PoolExhausted> {
        let num_new = self.num_new(count);
        let new: Vec<Page> = std::iter::from_fn(|| self.pool.take()).take(num_new).collect();
        if new.len() < num_new {
            return Err(PoolExhausted);
        }
        let copy = if count > 0 { self.unshare_last()? } else { None };
        self.pages.extend(new);
        self.len += count;
        Ok(copy)
    }

    /// Pages that `extend(count)` takes from the pool at most.
    pub fn num_needed(&self, count: usize) -> usize {
        let copies = count > 0 && self.partial().is_some_and(Page::is_shared);
        self.num_new(count) + usize::from(copies)
    }

    fn num_new(&self, count: usize) -> usize {
        (self.len + count).div_ceil(PAGE_TOKENS) - self.pages.len()
    }

    /// The last page, when more tokens would be written into it.
    fn partial(&self) -> Option<&Page> {
        self.pages.last().filter(|_| !self.len.is_multiple_of(PAGE_TOKENS))
    }

    /// Makes the last page this table's own. The copy of a page that only the index knows is a courtesy: without a free
    /// page its name goes instead.
    fn unshare_last(&mut self) -> Result<Option<PageCopy>, PoolExhausted> {
        let Some(last) = self.partial().filter(|page| page.is_shared() || page.is_indexed()) else {
            return Ok(None);
        };
        let Some(own) = self.pool.take() else {
            if last.is_shared() {
                return Err(PoolExhausted);
            }
            last.forget();
            return Ok(None);
        };
        let copy = PageCopy { from: last.id(), to: own.id() };
        self.pages.pop();
        self.pages.push(own);
        Ok(Some(copy))
    }

    /// Covers only the first `len` tokens; later pages go back to the pool. Panics when `len` is more than is covered.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "truncate to {len}, but only {} tokens are covered", self.len);
        while self.pages.len() > len.div_ceil(PAGE_TOKENS) {
            self.pages.pop();
        }
        self.names.truncate(len / PAGE_TOKENS);
        self.len = len;
    }

    /// Announces the full pages to the index. `tokens` are those covered, and their rows are written.
    pub fn publish(&mut self, tokens: &[u32]) {
        debug_assert_eq!(tokens.len(), self.len);
        for index in self.names.len()..self.len / PAGE_TOKENS {
            let tokens = &tokens[index * PAGE_TOKENS..][..PAGE_TOKENS];
            let key = PageKey { parent: self.names.last().copied(), tokens };
            let name = self.pool.publish(&self.pages[index], key);
            self.names.push(name);
        }
    }

    /// Page and offset within it of the token at `position`. Panics beyond `len`.
    pub fn slot(&self, position: usize) -> (PageId, usize) {
        assert!(position < self.len, "position {position} is beyond the table's {} tokens", self.len);
        (self.pages[position / PAGE_TOKENS].id(), position % PAGE_TOKENS)
    }

    /// Ids of the pages, in token order.
    pub fn page_ids(&self, _group: usize) -> impl Iterator<Item = PageId> + '_ {
        self.pages.iter().map(Page::id)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let fine =
            self.pages.len() == self.len.div_ceil(PAGE_TOKENS) && self.names.len() <= self.len / PAGE_TOKENS;
        let (pages, names) = (self.pages.len(), self.names.len());
        if fine { Ok(()) } else { Err(format!("{pages} pages and {names} names for {} tokens", self.len)) }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pool: &PagePool, len: usize) -> PageTable {
        let mut table = PageTable::new(pool);
        assert_eq!(table.extend(len).expect("room"), None);
        table
    }

    #[test]
    fn extend_takes_pages_lazily_and_truncate_gives_them_back() {
        let pool = PagePool::new(3);
        let mut table = filled(&pool, 1);
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
        let mut table = filled(&pool, 3);
        assert_eq!(table.extend(PAGE_TOKENS), Err(PoolExhausted));
        assert_eq!((table.len(), pool.num_free()), (3, 0));
        let fork = table.fork();
        assert_eq!(table.extend(1), Err(PoolExhausted), "no page for the copy");
        assert_eq!((table.len(), table.slot(0)), (3, fork.slot(0)));
    }

    #[test]
    fn the_diverging_page_is_copied_and_only_that_one() {
        let pool = PagePool::new(4);
        let mut table = filled(&pool, PAGE_TOKENS + 3);
        let mut fork = table.fork();
        assert_eq!((pool.num_free(), fork.num_needed(1), fork.num_needed(0)), (2, 1, 0));
        assert_eq!(fork.extend(0), Ok(None));
        let copy = fork.extend(1).expect("room").expect("others read it");
        assert_eq!((copy.from, copy.to), (table.slot(PAGE_TOKENS).0, fork.slot(PAGE_TOKENS).0));
        assert_eq!(table.slot(0), fork.slot(0));
        assert_eq!(table.extend(1), Ok(None), "its own again");
        drop(fork);
        assert_eq!(pool.num_free(), 2);
    }

    #[test]
    fn a_page_that_the_index_knows_is_copied_too_unless_there_is_no_room() {
        let tokens = [5; PAGE_TOKENS];
        for (capacity, found) in [(2, PAGE_TOKENS), (1, 0)] {
            let pool = PagePool::new(capacity);
            let mut table = filled(&pool, PAGE_TOKENS);
            table.publish(&tokens);
            table.truncate(9);
            assert_eq!(table.extend(1).expect("room either way").is_some(), capacity == 2);
            assert_eq!(PageTable::from_index(&pool, &tokens).len(), found);
            pool.check([&table]).expect("in order");
        }
    }

    #[test]
    fn the_beginning_of_a_chain_outlives_its_end() {
        let pool = PagePool::new(3);
        let tokens: Vec<u32> = (0..3 * PAGE_TOKENS as u32).collect();
        let mut table = filled(&pool, tokens.len());
        table.publish(&tokens);
        drop(table);
        assert_eq!(PageTable::from_index(&pool, &tokens[..70]).len(), 64);
        let _page = pool.take().expect("free");
        assert_eq!(PageTable::from_index(&pool, &tokens).len(), 2 * PAGE_TOKENS);
    }
}
