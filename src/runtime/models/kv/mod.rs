//! KV bookkeeping: which pages hold which part of which sequence. The values themselves are in the backend's
//! memory.
//!
//! Layers that keep their rows equally long form a group with its own pages: rows that all tokens see, rows
//! that only a window sees, and recurrent states are kept side by side. A sequence can resume from a position
//! if all its groups can.
//!
//! Invariants: a table's token count and its pages change together, only through `extend` and `truncate`.
//! Pages are freed when the last table that holds them is dropped. A page that others may read is never
//! written. Only full pages are indexed, and a freed page stays findable until it is reused.

pub mod disk;
pub mod pool;
pub mod prefix;
pub mod table;
mod tokens;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use crate::backend::{NO_PAGE, PAGE_TOKENS, PageId};
pub use pool::PagePool;
pub use prefix::{NamedPage, PageContent, PageName};
pub use table::{PageCopy, PageTable};
pub use tokens::{TokenBuf, Tokens};

/// Reference to a page: its group and its id within the group's storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageRef {
    pub group: usize,
    pub page: PageId,
}

/// A group of layers that keep the same part of a sequence between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvGroup {
    #[serde(rename = "keep")]
    pub kind: KvKind,
    /// Bytes of one page.
    pub page_bytes: usize,
}

/// The part of a sequence that a group keeps, which also defines its pages. The serialized names are those of the
/// worker protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvKind {
    /// Pages hold the rows of [`PAGE_TOKENS`] tokens each; later tokens see all of them.
    #[serde(rename = "all")]
    Full,
    /// Pages as in `Full`, but a token sees only this many rows, its own included.
    #[serde(rename = "window")]
    SlidingWindow(usize),
    /// A page holds the recurrent state after some token; the layers do not look back. A span that begins at position
    /// 0 starts from the zero state, whatever its page holds.
    #[serde(rename = "state")]
    Recurrent,
}

/// Returns `(resumable, covered)`: the longest prefix of at most `most` tokens from which every group can resume with
/// the full pages that `has(group, number)` reports, and the prefix covered by pages of full attention. `round_down` returns
/// the longest prefix not above a length that a step may end with.
pub fn reachable(
    groups: &[KvGroup],
    most: usize,
    round_down: impl Fn(usize) -> usize,
    has: impl Fn(usize, usize) -> bool,
) -> (usize, usize) {
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
    let lens = std::iter::once(known).chain(boundaries).map(round_down);
    ({ lens }.find(can_go_on).unwrap_or(0), known)
}

impl KvGroup {
    /// Returns the most bytes that a sequence of `len` tokens holds while it is fed at most `step_tokens` at a time.
    pub fn bytes(&self, len: usize, step_tokens: usize) -> usize {
        let pages = len.div_ceil(PAGE_TOKENS);
        let num_held = match self.kind {
            KvKind::Full => pages,
            KvKind::SlidingWindow(window) => pages.min((window + step_tokens).div_ceil(PAGE_TOKENS) + 1),
            KvKind::Recurrent => pages.min(1),
        };
        num_held * self.page_bytes
    }

    /// Returns the numbers of the pages needed to resume at `len`; `None` if only the very page with the last state
    /// would do.
    pub fn pages_needed(&self, len: usize) -> Option<Range<usize>> {
        match self.kind {
            KvKind::Recurrent if !len.is_multiple_of(PAGE_TOKENS) => None,
            KvKind::Full | KvKind::SlidingWindow(_) | KvKind::Recurrent => {
                Some(self.first_page(len)..len.div_ceil(PAGE_TOKENS))
            }
        }
    }

    /// Returns the first page that the token at position `len` and later tokens can see.
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
