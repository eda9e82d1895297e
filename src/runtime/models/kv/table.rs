//! The page table of a sequence: its pages in order, group by group. `len` tokens are covered; the last page
//! may be partly filled.
//!
//! ```text
//! All      0 1 2 3 4 5      everything
//! Window         3 4 5      what the next token can see
//! State              s      the state after the last token
//! ```
//!
//! Invariants: a page may be shared with other tables and indexed, and such a page is never written: a writer
//! gets a copy first. Only full pages are named, and states after a full page. Pages that a window or a state
//! has left behind can be found by name until their memory is reused; a table can be truncated that far.
//! Pages are released from the end.

use std::collections::{BTreeMap, VecDeque};

use super::pool::{PageHold, PagePool};
use super::prefix::{self, NamedPage, PageName};
use super::{KvGroup, KvKind, PageRef, Tokens, reachable};
use crate::backend::{NO_PAGE, PAGE_TOKENS, PageId};

/// The pages of one sequence. Grows by `extend` and shrinks by `truncate`, by nothing else.
#[derive(Debug)]
pub struct PageTable {
    pool: PagePool,
    groups: Vec<Pages>,
    len: usize,
    /// Names of the leading pages that have been published.
    names: Vec<PageName>,
}

/// The pages of one group.
#[derive(Debug, Clone)]
struct Pages {
    spec: KvGroup,
    /// Number of the first held page within the sequence.
    first: usize,
    pages: VecDeque<PageHold>,
}

/// Error: the pool has no page left. The table is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolExhausted;

/// Copy that the caller must make before anything else is written: the content of page `from` to page `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    pub from: PageRef,
    pub to: PageRef,
}

impl Pages {
    /// Returns the number after the last page.
    fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// Returns the page that further tokens would be written to.
    fn open(&self, len: usize) -> Option<&PageHold> {
        let is_open = self.spec.kind == KvKind::Recurrent || !len.is_multiple_of(PAGE_TOKENS);
        self.pages.back().filter(|_| is_open)
    }

    fn num_new(&self, len: usize) -> usize {
        match self.spec.kind {
            KvKind::Recurrent => usize::from(self.pages.is_empty() && len > 0),
            KvKind::Full | KvKind::SlidingWindow(_) => len.div_ceil(PAGE_TOKENS) - self.end(),
        }
    }

    fn page(&self, number: usize) -> Option<&PageHold> {
        self.pages.get(number.checked_sub(self.first)?)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        while self.pages.pop_back().is_some() {}
    }
}

impl PagePool {
    /// Checks the bookkeeping, given that `tables` are all tables of this pool.
    ///
    /// # Errors
    /// A sentence that describes the first inconsistency.
    pub fn check<'a>(&self, tables: impl IntoIterator<Item = &'a PageTable>) -> Result<(), String> {
        let mut num_held: BTreeMap<PageRef, usize> = BTreeMap::new();
        for table in tables {
            table.check()?;
            table.page_refs().for_each(|page_ref| *num_held.entry(page_ref).or_default() += 1);
        }
        self.check_holders(&num_held)
    }
}

impl PageTable {
    pub fn new(pool: &PagePool) -> Self {
        let pages = |spec| Pages { spec, first: 0, pages: VecDeque::new() };
        let groups = pool.groups().into_iter().map(pages).collect();
        Self { pool: pool.clone(), groups, len: 0, names: Vec::new() }
    }

    /// Builds a table of the longest prefix of `tokens`, at most `most` of them, from which a sequence can resume
    /// with indexed pages alone. Also returns how many leading tokens have indexed rows, which may be more.
    pub fn from_index<'a>(pool: &PagePool, tokens: impl Into<Tokens<'a>>, most: usize) -> (Self, usize) {
        let (mut table, tokens) = (Self::new(pool), tokens.into());
        table.names = prefix::names(tokens).collect();
        let has = |group, number| table.is_indexed(group, tokens, number);
        let round_down = |len| pool.round_down(tokens, len);
        let (len, known) = reachable(&pool.groups(), most.min(tokens.len()), round_down, has);
        table.cut(tokens, len);
        (table, known)
    }

    /// Takes over pages that other sequences have published for `tokens` meanwhile. Returns true if the table now
    /// covers more.
    pub fn catch_up(&mut self, tokens: Tokens<'_>, most: usize) -> bool {
        let is_known = self.next_page(tokens).is_some_and(|page| {
            let contains = |group| self.pool.contains(group, page.name, page.content());
            let mut lasting = self.groups_that(|keep| keep == KvKind::Full).peekable();
            match lasting.peek() {
                Some(_) => lasting.all(contains),
                None => (0..self.groups.len()).any(contains),
            }
        });
        let found = is_known.then(|| Self::from_index(&self.pool, tokens, most).0);
        match found.filter(|found| found.len > self.len) {
            Some(found) => *self = found,
            None => return false,
        }
        true
    }

    /// Returns the next page to fill if the sequence becomes `tokens`; `None` if they do not fill it.
    pub fn next_page<'a>(&self, tokens: Tokens<'a>) -> Option<NamedPage<'a>> {
        let number = self.len / PAGE_TOKENS;
        NamedPage::of(tokens, &self.names, number).filter(|_| self.names.len() == number)
    }

    fn groups_that(&self, wanted: impl Fn(KvKind) -> bool) -> impl Iterator<Item = usize> {
        let groups = self.groups.iter().enumerate();
        groups.filter(move |(_, pages)| wanted(pages.spec.kind)).map(|(group, _)| group)
    }

    /// Returns another table over the same pages.
    pub fn fork(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            groups: self.groups.clone(),
            len: self.len,
            names: self.names.clone(),
        }
    }

    /// Returns the number of covered tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Returns the names of the published pages.
    pub fn names(&self) -> &[PageName] {
        &self.names
    }

    /// Covers `count` more tokens and takes pages as needed. A last page that others may read is replaced by a copy,
    /// which the caller must make.
    ///
    /// # Errors
    /// [`PoolExhausted`] if the pool cannot supply the pages; the table is then unchanged.
    pub fn extend(&mut self, count: usize) -> Result<Vec<PageCopy>, PoolExhausted> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let (len, mut taken, mut copies) = (self.len + count, Vec::new(), Vec::new());
        for (group, pages) in self.groups.iter().enumerate() {
            for _ in 0..pages.num_new(len) {
                taken.push((group, self.pool.take(group).ok_or(PoolExhausted)?));
            }
        }
        let open =
            || self.groups.iter().enumerate().filter_map(|(n, pages)| Some((n, pages.open(self.len)?)));
        for (group, _) in open().filter(|(_, page)| page.is_shared()) {
            copies.push((group, self.pool.take(group).ok_or(PoolExhausted)?));
        }
        // All needed pages are taken. Copying a page that only the index knows is optional: without room the page is
        // removed from the index instead.
        for (group, page) in open().filter(|(_, page)| !page.is_shared() && page.is_indexed()) {
            match self.pool.take(group) {
                Some(own) => copies.push((group, own)),
                None => page.forget(),
            }
        }
        self.len = len;
        let copies = copies.into_iter().map(|(group, own)| self.replace_last(group, own)).collect();
        taken.into_iter().for_each(|(group, page)| self.groups[group].pages.push_back(page));
        Ok(copies)
    }

    fn replace_last(&mut self, group: usize, own: PageHold) -> PageCopy {
        let pages = &mut self.groups[group].pages;
        let to = own.page_ref();
        let last = pages.back_mut().expect("an open page is the last");
        PageCopy { from: std::mem::replace(last, own).page_ref(), to }
    }

    /// Returns the most bytes that `extend(count)` takes from the pool.
    pub fn bytes_needed(&self, count: usize) -> usize {
        let of_group = |pages: &Pages| {
            let copies = pages.open(self.len).is_some_and(PageHold::is_shared);
            (pages.num_new(self.len + count) + usize::from(copies)) * pages.spec.page_bytes
        };
        if count == 0 { 0 } else { self.groups.iter().map(of_group).sum() }
    }

    /// Returns the largest length of at most `len` that the table can be truncated to. `tokens` are the covered ones.
    pub fn resumable<'a>(&self, tokens: impl Into<Tokens<'a>>, len: usize) -> usize {
        let tokens = tokens.into();
        let boundaries = (0..len.div_ceil(PAGE_TOKENS)).rev().map(|page| page * PAGE_TOKENS);
        let mut lens = std::iter::once(len).chain(boundaries).map(|len| self.pool.round_down(tokens, len));
        lens.find(|&len| (0..self.groups.len()).all(|group| self.has(group, tokens, len))).unwrap_or(0)
    }

    /// Returns whether all that `group` needs to resume at `len` is held or indexed.
    fn has(&self, group: usize, tokens: Tokens<'_>, len: usize) -> bool {
        let pages = &self.groups[group];
        let is_held = |number| pages.spec.kind != KvKind::Recurrent && pages.page(number).is_some();
        let needed = pages.spec.pages_needed(len);
        let has = |number| is_held(number) || self.is_indexed(group, tokens, number);
        len == self.len || needed.is_some_and(|mut numbers| numbers.all(has))
    }

    fn is_indexed(&self, group: usize, tokens: Tokens<'_>, number: usize) -> bool {
        let page = self.published(tokens, number);
        page.is_some_and(|page| self.pool.contains(group, page.name, page.content()))
    }

    /// Returns a published page.
    fn published<'a>(&self, tokens: Tokens<'a>, number: usize) -> Option<NamedPage<'a>> {
        if number < self.names.len() { NamedPage::of(tokens, &self.names, number) } else { None }
    }

    /// Truncates the table to `len` tokens if it can resume there; later pages are released. Returns whether it
    /// could. `tokens` are the covered ones. Panics if `len` exceeds the covered length.
    pub fn truncate<'a>(&mut self, tokens: impl Into<Tokens<'a>>, len: usize) -> bool {
        let tokens = tokens.into();
        assert!(len <= self.len, "truncate to {len}, but only {} tokens are covered", self.len);
        let can = self.resumable(tokens, len) == len;
        if can {
            self.cut(tokens, len);
        }
        can
    }

    /// Truncates the table to `len` tokens, where the later ones were drafted: they were never published, no page that
    /// the others need was released, and no state has taken them in. Panics if `len` is 0 or exceeds the covered length.
    pub fn drop_drafted(&mut self, len: usize) {
        assert!((1..=self.len).contains(&len), "{len} of {} tokens are known", self.len);
        debug_assert!(self.names.len() <= len / PAGE_TOKENS, "drafted rows are not published");
        for pages in self.groups.iter_mut().filter(|pages| pages.spec.kind != KvKind::Recurrent) {
            while pages.end() > len.div_ceil(PAGE_TOKENS) {
                pages.pages.pop_back();
            }
        }
        self.len = len;
    }

    /// Truncates to a length that `resumable` returned.
    fn cut(&mut self, tokens: Tokens<'_>, len: usize) {
        for group in 0..self.groups.len() {
            let pages = self.needed(group, tokens, len);
            let held = &mut self.groups[group];
            while held.pages.pop_back().is_some() {}
            (held.first, held.pages) = pages;
        }
        self.names.truncate(len / PAGE_TOKENS);
        self.len = len;
    }

    /// Returns what a group needs to resume at `len`: the number of the first page, and the pages.
    fn needed(&self, group: usize, tokens: Tokens<'_>, len: usize) -> (usize, VecDeque<PageHold>) {
        let pages = &self.groups[group];
        let find = |number| {
            let page = self.published(tokens, number)?;
            self.pool.find(group, page.name, page.content())
        };
        match pages.spec.kind {
            _ if len == 0 => (0, VecDeque::new()),
            KvKind::Recurrent if len == self.len => (0, pages.pages.clone()),
            KvKind::Recurrent => (0, find(len / PAGE_TOKENS - 1).into_iter().collect()),
            KvKind::Full | KvKind::SlidingWindow(_) => {
                let first = pages.spec.first_page(len);
                let numbers = first..len.div_ceil(PAGE_TOKENS);
                (
                    first,
                    numbers
                        .filter_map(|number| pages.page(number).cloned().or_else(|| find(number)))
                        .collect(),
                )
            }
        }
    }

    /// Adds the full pages to the index, and releases pages that the next token cannot see. `tokens` are the covered
    /// ones, and their rows must be written.
    pub fn publish<'a>(&mut self, tokens: impl Into<Tokens<'a>>) {
        let tokens = tokens.into();
        debug_assert_eq!(tokens.len(), self.len);
        while let Some(full) = NamedPage::of(tokens, &self.names, self.names.len()) {
            let number = self.names.len();
            for pages in self.groups.iter().filter(|pages| pages.spec.kind != KvKind::Recurrent) {
                if let Some(page) = pages.page(number) {
                    self.pool.publish(page, full.name, full.content());
                }
            }
            self.names.push(full.name);
        }
        for pages in &mut self.groups {
            if matches!(pages.spec.kind, KvKind::SlidingWindow(_)) {
                while pages.first < pages.spec.first_page(self.len) && pages.pages.pop_front().is_some() {
                    pages.first += 1;
                }
            }
        }
    }

    /// Returns whether the sequence has recurrent states, which can only be found again if they are published.
    pub fn has_state(&self) -> bool {
        self.groups_that(|keep| keep == KvKind::Recurrent).next().is_some()
    }

    /// Returns whether each page can be shared as soon as it is published.
    pub fn is_shareable(&self) -> bool {
        self.pool.has_index() && !self.has_state()
    }

    /// Publishes the state after the last token if it ends a page; the next `extend` continues with a copy. Returns
    /// false if other sequences published all of it before.
    pub fn publish_state<'a>(&mut self, tokens: impl Into<Tokens<'a>>) -> bool {
        if !self.len.is_multiple_of(PAGE_TOKENS) || self.len == 0 {
            return false;
        }
        let Some(last) = self.published(tokens.into(), self.len / PAGE_TOKENS - 1) else { return false };
        let states = self.groups.iter().filter(|pages| pages.spec.kind == KvKind::Recurrent);
        let pages: Vec<&PageHold> = states.filter_map(|pages| pages.pages.back()).collect();
        pages.iter().for_each(|page| self.pool.publish(page, last.name, last.content()));
        pages.iter().any(|page| page.is_indexed())
    }

    /// Removes the state after `len` tokens from the index.
    pub fn forget_state<'a>(&mut self, tokens: impl Into<Tokens<'a>>, len: usize) {
        let Some(page) = self.published(tokens.into(), len / PAGE_TOKENS - 1) else { return };
        for group in self.groups_that(|keep| keep == KvKind::Recurrent) {
            self.pool.forget(group, page.name, page.content());
        }
    }

    /// Returns the page of the row at `position`, and the offset within it, in a group that keeps rows. Panics if the
    /// row is not held.
    pub fn slot(&self, group: usize, position: usize) -> (PageId, usize) {
        let page = self.groups[group].page(position / PAGE_TOKENS).filter(|_| position < self.len);
        let page =
            page.unwrap_or_else(|| panic!("position {position} has no page among {} tokens", self.len));
        (page.page_ref().page, position % PAGE_TOKENS)
    }

    /// Iterates over the pages with the sequence's states.
    pub fn states(&self) -> impl Iterator<Item = PageRef> + '_ {
        let groups = self.groups_that(|keep| keep == KvKind::Recurrent);
        groups.filter_map(|group| Some(PageRef { group, page: self.state(group)? }))
    }

    /// Returns the page with the sequence's state, in a recurrent group.
    pub fn state(&self, group: usize) -> Option<PageId> {
        self.groups[group].pages.back().map(|page| page.page_ref().page)
    }

    /// Iterates over the page ids of a group in token order, with [`NO_PAGE`] for pages that are no longer held.
    pub fn page_ids(&self, group: usize) -> impl Iterator<Item = PageId> + '_ {
        let pages = &self.groups[group];
        std::iter::repeat_n(NO_PAGE, pages.first).chain(pages.pages.iter().map(|page| page.page_ref().page))
    }

    /// Iterates over all held pages.
    pub fn page_refs(&self) -> impl Iterator<Item = PageRef> + '_ {
        self.groups.iter().flat_map(|pages| pages.pages.iter().map(PageHold::page_ref))
    }

    fn check(&self) -> Result<(), String> {
        for pages in &self.groups {
            let end = match pages.spec.kind {
                KvKind::Recurrent => usize::from(self.len > 0),
                KvKind::Full | KvKind::SlidingWindow(_) => self.len.div_ceil(PAGE_TOKENS),
            };
            let (has_all, names) = (pages.first <= pages.spec.first_page(self.len), self.names.len());
            if pages.end() != end || !has_all || names > self.len / PAGE_TOKENS {
                return Err(format!("{} tokens, {names} names, {pages:?}", self.len));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool with pages of one byte, in groups of these kinds.
    fn pool(kinds: &[KvKind], capacity: usize) -> PagePool {
        let groups: Vec<_> = kinds.iter().map(|&kind| KvGroup { kind, page_bytes: 1 }).collect();
        PagePool::new(&groups, capacity)
    }

    fn filled(pool: &PagePool, len: usize) -> PageTable {
        let mut table = PageTable::new(pool);
        assert_eq!(table.extend(len).expect("room"), []);
        table
    }

    fn numbers(len: usize) -> Vec<u32> {
        (0..len as u32).collect()
    }

    #[test]
    fn extend_takes_pages_lazily_and_truncate_gives_them_back() {
        let pool = pool(&[KvKind::Full], 3);
        let tokens = numbers(PAGE_TOKENS + 1);
        let mut table = filled(&pool, 1);
        assert_eq!((table.len(), pool.free_bytes()), (1, 2));
        table.extend(PAGE_TOKENS).expect("room");
        assert_eq!((table.len(), pool.free_bytes()), (PAGE_TOKENS + 1, 1));
        assert_eq!(table.slot(0, PAGE_TOKENS).1, 0);
        assert!(table.truncate(&tokens, PAGE_TOKENS));
        assert_eq!(pool.free_bytes(), 2);
        assert!(table.truncate(&tokens, 0));
        assert_eq!(pool.free_bytes(), 3);
    }

    #[test]
    fn a_failed_extend_changes_nothing() {
        let pool = pool(&[KvKind::Full, KvKind::Recurrent], 2);
        let mut table = filled(&pool, 3);
        assert_eq!(table.extend(PAGE_TOKENS), Err(PoolExhausted));
        assert_eq!((table.len(), pool.free_bytes()), (3, 0));
        let fork = table.fork();
        assert_eq!(table.extend(1), Err(PoolExhausted), "no page for the copies");
        assert_eq!((table.len(), table.slot(0, 0)), (3, fork.slot(0, 0)));
    }

    #[test]
    fn the_diverging_page_is_copied_and_only_that_one() {
        let pool = pool(&[KvKind::Full], 4);
        let mut table = filled(&pool, PAGE_TOKENS + 3);
        let mut fork = table.fork();
        assert_eq!((pool.free_bytes(), fork.bytes_needed(1), fork.bytes_needed(0)), (2, 1, 0));
        assert_eq!(fork.extend(0).expect("nothing to do"), []);
        let copies = fork.extend(1).expect("room");
        let [PageCopy { from, to }] = copies[..] else { panic!("others read it: {copies:?}") };
        assert_eq!((from.page, to.page), (table.slot(0, PAGE_TOKENS).0, fork.slot(0, PAGE_TOKENS).0));
        assert_eq!(table.slot(0, 0), fork.slot(0, 0));
        assert_eq!(table.extend(1).expect("room"), [], "its own again");
        drop(fork);
        assert_eq!(pool.free_bytes(), 2);
    }

    #[test]
    fn a_page_that_the_index_knows_is_copied_too_unless_there_is_no_room() {
        let tokens = [5; PAGE_TOKENS];
        for (capacity, found) in [(2, PAGE_TOKENS), (1, 0)] {
            let pool = pool(&[KvKind::Full], capacity);
            let mut table = filled(&pool, PAGE_TOKENS);
            table.publish(&tokens);
            assert!(table.truncate(&tokens, 9));
            assert_eq!(table.extend(1).expect("room either way").len(), capacity - 1);
            assert_eq!(PageTable::from_index(&pool, &tokens, 99).0.len(), found);
            pool.check([&table]).expect("in order");
        }
    }

    #[test]
    fn the_beginning_of_a_chain_outlives_its_end() {
        let pool = pool(&[KvKind::Full], 3);
        let tokens = numbers(3 * PAGE_TOKENS);
        let mut table = filled(&pool, tokens.len());
        table.publish(&tokens);
        drop(table);
        assert_eq!(PageTable::from_index(&pool, &tokens[..70], 70).0.len(), 64);
        let _page = pool.take(0).expect("free");
        assert_eq!(PageTable::from_index(&pool, &tokens, 96).0.len(), 2 * PAGE_TOKENS);
    }

    #[test]
    fn a_window_holds_what_it_sees_and_finds_the_rest_until_it_is_used_otherwise() {
        let pool = pool(&[KvKind::Full, KvKind::SlidingWindow(40)], 12);
        let tokens = numbers(5 * PAGE_TOKENS + 3);
        let mut table = filled(&pool, tokens.len());
        table.publish(&tokens);
        assert_eq!(pool.free_bytes(), 12 - 6 - 3, "tokens 124 to 162 are in sight, on pages 3 to 5");
        assert_eq!(table.page_ids(1).filter(|&page| page == NO_PAGE).count(), 3);
        assert_eq!(table.resumable(&tokens, 70), 70, "its window is still cached");
        let taken: Vec<_> = (0..2).map(|_| pool.take(0).expect("free")).collect();
        let back = table.resumable(&tokens, 70);
        assert!(back < 70 && table.truncate(&tokens, back), "{back}");
        assert_eq!(table.len(), back);
        drop(taken);
        pool.check([&table]).expect("in order");
    }

    #[test]
    fn a_state_is_found_where_one_was_left() {
        let pool = pool(&[KvKind::Recurrent], 3);
        let tokens = numbers(2 * PAGE_TOKENS + 5);
        let mut table = filled(&pool, PAGE_TOKENS);
        table.publish(&tokens[..PAGE_TOKENS]);
        table.publish_state(&tokens[..PAGE_TOKENS]);
        let copies = table.extend(PAGE_TOKENS + 5).expect("room");
        assert_eq!(copies.len(), 1, "the state left behind stays as it is");
        table.publish(&tokens);
        assert_eq!(table.resumable(&tokens, 2 * PAGE_TOKENS), PAGE_TOKENS);
        assert!(!table.truncate(&tokens, 40) && table.truncate(&tokens, PAGE_TOKENS));
        assert_eq!(table.state(0), Some(copies[0].from.page));
        table.forget_state(&tokens, PAGE_TOKENS);
        assert_eq!(PageTable::from_index(&pool, &tokens, 99).0.len(), 0);
        pool.check([&table]).expect("in order");
    }
}
