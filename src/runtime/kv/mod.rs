//! KV bookkeeping: which pages hold what of which sequence. The numbers themselves live in the backend.
//!
//! Layers that keep their rows equally long form a group with pages of its own: what all tokens see, what only a window sees,
//! and the state of recurrent layers are kept side by side, and a sequence can go on from a position when all its groups can.
//!
//! Invariants: a table's token count and its pages change together, only through `extend` and `truncate`;
//! pages free themselves when the last table that holds them lets go; a page that others may read is never written;
//! only full pages are indexed, and a freed one stays addressable until it is reused.

pub mod disk;
pub mod pool;
pub mod prefix;
pub mod table;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use crate::runtime::backend::{NO_PAGE, PAGE_TOKENS, PageId};
pub use pool::PagePool;
pub use prefix::{PageContent, PageName};
pub use table::{PageCopy, PageTable};

/// A page and the group whose storage it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageRef {
    pub group: usize,
    pub page: PageId,
}

/// What layers of one kind keep of a sequence between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    #[serde(rename = "keep")]
    pub kind: KvKind,
    /// Bytes of one page.
    pub page_bytes: usize,
}

/// How long it is kept, and so what a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvKind {
    /// A page holds the rows of [`PAGE_TOKENS`] tokens; all are seen for ever.
    #[serde(rename = "all")]
    Full,
    /// As `All`, but a token sees only this many, itself included.
    #[serde(rename = "window")]
    SlidingWindow(usize),
    /// A page holds the state after some token: recurrent layers, which do not look back. A span that begins at position 0
    /// begins with the zero state, whatever its page holds.
    #[serde(rename = "state")]
    Recurrent,
}

/// The longest beginning of a sequence, at most `most` tokens, that it can go on from when all there is are the full pages
/// that `has(group, number)` says; and how many tokens have all rows that are kept for ever.
pub fn reachable(groups: &[KvGroup], most: usize, has: impl Fn(usize, usize) -> bool) -> (usize, usize) {
    let lasting = groups.iter().enumerate().filter(|(_, spec)| spec.kind == KvKind::Full);
    let lasting: Vec<usize> = lasting.map(|(group, _)| group).collect();
    let all_have = |number: &usize| lasting.iter().all(|&group| has(group, *number));
    let known = ((0..most.div_ceil(PAGE_TOKENS)).take_while(all_have).count() * PAGE_TOKENS).min(most);
    let boundaries = (0..known.div_ceil(PAGE_TOKENS)).rev().map(|number| number * PAGE_TOKENS);
    let can_go_on = |len: &usize| {
        groups.iter().enumerate().filter(|(_, spec)| spec.kind != KvKind::Full).all(|(group, spec)| {
            spec.pages_needed(*len).is_some_and(|mut numbers| numbers.all(|number| has(group, number)))
        })
    };
    (std::iter::once(known).chain(boundaries).find(can_go_on).unwrap_or(0), known)
}

impl KvGroup {
    /// Bytes that a sequence of `len` tokens holds at most while it is fed by up to `step_tokens` at a time.
    pub fn bytes(&self, len: usize, step_tokens: usize) -> usize {
        let pages = len.div_ceil(PAGE_TOKENS);
        let num_held = match self.kind {
            KvKind::Full => pages,
            KvKind::SlidingWindow(window) => pages.min((window + step_tokens).div_ceil(PAGE_TOKENS) + 1),
            KvKind::Recurrent => pages.min(1),
        };
        num_held * self.page_bytes
    }

    /// Numbers of the pages that a sequence of `len` tokens needs to go on; none when there is no going on from there but with
    /// the very page that holds its last state.
    pub fn pages_needed(&self, len: usize) -> Option<Range<usize>> {
        match self.kind {
            KvKind::Recurrent if !len.is_multiple_of(PAGE_TOKENS) => None,
            KvKind::Full | KvKind::SlidingWindow(_) | KvKind::Recurrent => {
                Some(self.first_page(len)..len.div_ceil(PAGE_TOKENS))
            }
        }
    }

    /// The first page that the token at position `len` and later ones can see.
    fn first_page(&self, len: usize) -> usize {
        match self.kind {
            KvKind::Full => 0,
            KvKind::SlidingWindow(window) => (len + 1).saturating_sub(window) / PAGE_TOKENS,
            KvKind::Recurrent => len.div_ceil(PAGE_TOKENS).saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ready` of docs/worker-protocol.md carries groups in this form.
    #[test]
    fn groups_keep_their_names_on_the_wire() {
        let kinds = [KvKind::Full, KvKind::SlidingWindow(20), KvKind::Recurrent];
        let groups = kinds.map(|kind| KvGroup { kind, page_bytes: 3 });
        let json = serde_json::to_string(&groups).expect("JSON");
        let expected = r#"[{"keep":"all","page_bytes":3},{"keep":{"window":20},"page_bytes":3},{"keep":"state","page_bytes":3}]"#;
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_str::<[KvGroup; 3]>(&json).expect("read back"), groups);
    }
}
