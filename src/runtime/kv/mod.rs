//! KV bookkeeping: which pages hold which tokens of which sequence. The numbers themselves live in the backend.
//!
//! Invariants: a table's token count and its pages change together, only through `extend` and `truncate`;
//! pages free themselves when the last table that holds them lets go; a page that others may read is never written;
//! only full pages are indexed, and a freed one stays addressable until it is reused.

pub mod disk;
pub mod pool;
pub mod prefix;
pub mod table;

pub use crate::runtime::backend::{NO_PAGE, PAGE_TOKENS, PageId};
pub use pool::PagePool;
pub use table::{PageCopy, PageTable};

/// A page and the group whose storage it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    pub group: usize,
    pub page: PageId,
}
