//! The index of full pages by content. A page is named by the hash of its own tokens, the images among them and its
//! parent's name, so a name stands for all tokens and images from the start of the sequence.
//!
//! Invariants: a name maps to at most one page of a group, and a hit compares the parent and the tokens
//! besides the hash. Names are SHA-256, so that crafted prompts cannot collide, and equal in every process,
//! so that pages on disk use them too. The index pins nothing: the pool removes an entry when it reuses the
//! page. An engine has one model, so the model is not part of a name; on disk the folder identifies it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::fmt;

use llmctl_image::ImageHash;
use sha2::{Digest, Sha256};

use super::{PageRef, Tokens};
use serde::{Deserialize, Serialize};

use crate::backend::{PAGE_TOKENS, PageId};

/// Name of a page: a hash of all tokens and images up to its end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PageName(pub [u8; 32]);

impl From<PageName> for String {
    fn from(name: PageName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for PageName {
    type Error = String;

    fn try_from(hex: String) -> Result<Self, String> {
        Self::from_hex(&hex).ok_or_else(|| format!("{hex:?} is no name of a page"))
    }
}

impl PageName {
    /// Returns the name of a page from its parent and tokens.
    pub fn of(key: PageContent<'_>) -> Self {
        let mut hash = Sha256::new();
        // The first page has no parent; no page has the name of 32 zero bytes in practice.
        hash.update(key.parent.map_or([0; 32], |parent| parent.0));
        key.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        Self(hash.finalize().into())
    }

    /// Parses a name of 64 lower-case hexadecimal digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        ImageHash::from_hex(hex).map(|hash| Self(hash.0))
    }
}

impl fmt::Display for PageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Iterates over the names of the full pages of `tokens`, computing them lazily.
pub fn names<'a>(tokens: impl Into<Tokens<'a>>) -> impl Iterator<Item = PageName> {
    let tokens = tokens.into();
    (0..tokens.len() / PAGE_TOKENS).scan(None, move |parent, number| {
        *parent = Some(PageName::of(PageContent { parent: *parent, tokens: &tokens.page(number)? }));
        *parent
    })
}

/// A full page: its name and the content that the name is derived from.
#[derive(Debug, Clone)]
pub struct NamedPage<'a> {
    pub name: PageName,
    parent: Option<PageName>,
    tokens: Cow<'a, [u32]>,
}

impl<'a> NamedPage<'a> {
    /// Returns the page with this number; `None` if the tokens do not fill it. `names` are those of the pages before it, and
    /// may be its own too.
    pub fn of(tokens: Tokens<'a>, names: &[PageName], number: usize) -> Option<Self> {
        let parent = match number.checked_sub(1) {
            Some(before) => Some(*names.get(before)?),
            None => None,
        };
        let tokens = tokens.page(number)?;
        let derived = || PageName::of(PageContent { parent, tokens: &tokens });
        let name = names.get(number).copied().unwrap_or_else(derived);
        Some(Self { name, parent, tokens })
    }

    pub fn content(&self) -> PageContent<'_> {
        PageContent { parent: self.parent, tokens: &self.tokens }
    }
}

/// The content that a page's name is derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageContent<'a> {
    /// Name of the preceding page; `None` for the first.
    pub parent: Option<PageName>,
    /// Its tokens, and behind them the images that it has rows of; see [`Tokens::page`].
    pub tokens: &'a [u32],
}

#[derive(Debug, Default)]
pub struct PrefixIndex {
    entries: HashMap<(usize, PageName), IndexEntry>,
}

#[derive(Debug)]
struct IndexEntry {
    parent: Option<PageName>,
    tokens: Box<[u32]>,
    page: PageId,
}

impl PrefixIndex {
    /// Finds the page with this group, name and content.
    pub fn find(&self, group: usize, name: PageName, key: PageContent<'_>) -> Option<PageRef> {
        let entry = self.entries.get(&(group, name))?;
        let is_same = entry.parent == key.parent && *entry.tokens == *key.tokens;
        is_same.then_some(PageRef { group, page: entry.page })
    }

    /// Inserts a page. Returns false if the name maps to a page already, which stays.
    pub fn insert(&mut self, name: PageName, key: PageContent<'_>, page_ref: PageRef) -> bool {
        match self.entries.entry((page_ref.group, name)) {
            Slot::Occupied(_) => false,
            Slot::Vacant(slot) => {
                slot.insert(IndexEntry {
                    parent: key.parent,
                    tokens: key.tokens.into(),
                    page: page_ref.page,
                });
                true
            }
        }
    }

    pub fn remove(&mut self, group: usize, name: PageName) {
        self.entries.remove(&(group, name));
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether `name` maps to `page_ref`.
    pub fn leads_to(&self, name: PageName, page_ref: PageRef) -> bool {
        self.entries.get(&(page_ref.group, name)).is_some_and(|entry| entry.page == page_ref.page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_needs_the_group_the_parent_and_the_tokens_not_only_the_hash() {
        let mut index = PrefixIndex::default();
        let first = PageContent { parent: None, tokens: &[1, 2] };
        let name = PageName::of(first);
        let page_ref = |page| PageRef { group: 1, page };
        assert!(index.insert(name, first, page_ref(7)));
        assert!(!index.insert(name, first, page_ref(8)), "the first page of a name stays");
        assert_eq!(index.find(1, name, first), Some(page_ref(7)));
        assert_eq!(index.find(0, name, first), None);
        let other_parent = PageContent { parent: Some(name), tokens: &[1, 2] };
        assert_ne!(PageName::of(other_parent), name);
        // Simulates a hash collision.
        assert_eq!(index.find(1, name, other_parent), None);
        assert_eq!(index.find(1, name, PageContent { parent: None, tokens: &[1, 3] }), None);
        index.remove(1, name);
        assert_eq!(index.find(1, name, first), None);
    }

    /// Names are stored on disk, so the hashed bytes must not change.
    #[test]
    fn a_name_is_the_same_in_every_process() {
        let first = PageName::of(PageContent { parent: None, tokens: &[1, 2, 3] });
        let second = PageName::of(PageContent { parent: Some(first), tokens: &[4] });
        assert_eq!(format!("{first:?} {second:?}"), "3db346a4 6edb67c9");
    }
}
