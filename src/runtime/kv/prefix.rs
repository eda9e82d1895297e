//! The index of full pages by content: a page is named by the hash of its own tokens and its parent's name, so that a name
//! stands for everything from the start of the sequence.
//!
//! Invariants: a name leads to at most one page; a hit compares the parent and the tokens besides the hash. Hashes are
//! keyed anew for every index, so that nobody can make up prompts whose pages collide; they mean nothing outside it.
//! Pins nothing: the pool takes an entry out when it gives the page to others. One engine has one model, so the model
//! is no part of a name here.

use std::collections::HashMap;
use std::collections::hash_map::{Entry as Place, RandomState};
use std::hash::BuildHasher;

use crate::runtime::backend::PageId;

/// Names a page by all tokens up to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainHash(u128);

/// What a page's name is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageKey<'a> {
    /// Name of the page before; nothing for the first.
    pub parent: Option<ChainHash>,
    pub tokens: &'a [u32],
}

#[derive(Debug, Default)]
pub struct PrefixIndex {
    seed: RandomState,
    entries: HashMap<ChainHash, Entry>,
}

#[derive(Debug)]
struct Entry {
    parent: Option<ChainHash>,
    tokens: Box<[u32]>,
    page: PageId,
}

impl PrefixIndex {
    pub fn name(&self, key: PageKey<'_>) -> ChainHash {
        let half = |salt: u8| u128::from(self.seed.hash_one((salt, key.parent, key.tokens)));
        ChainHash(half(0) << 64 | half(1))
    }

    /// The page of this name and content.
    pub fn find(&self, name: ChainHash, key: PageKey<'_>) -> Option<PageId> {
        let entry = self.entries.get(&name)?;
        (entry.parent == key.parent && *entry.tokens == *key.tokens).then_some(entry.page)
    }

    /// False when the name leads to a page already; that one stays.
    pub fn insert(&mut self, name: ChainHash, key: PageKey<'_>, page: PageId) -> bool {
        match self.entries.entry(name) {
            Place::Occupied(_) => false,
            Place::Vacant(place) => {
                place.insert(Entry { parent: key.parent, tokens: key.tokens.into(), page });
                true
            }
        }
    }

    pub fn remove(&mut self, name: ChainHash) {
        self.entries.remove(&name);
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether `name` leads to `page`.
    pub fn leads_to(&self, name: ChainHash, page: PageId) -> bool {
        self.entries.get(&name).is_some_and(|entry| entry.page == page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_needs_the_parent_and_the_tokens_not_only_the_hash() {
        let mut index = PrefixIndex::default();
        let first = PageKey { parent: None, tokens: &[1, 2] };
        let name = index.name(first);
        assert!(index.insert(name, first, 7));
        assert!(!index.insert(name, first, 8), "the first page of a name stays");
        assert_eq!(index.find(name, first), Some(7));
        let other_parent = PageKey { parent: Some(name), tokens: &[1, 2] };
        assert_ne!(index.name(other_parent), name);
        // As if the hashes had collided.
        assert_eq!(index.find(name, other_parent), None);
        assert_eq!(index.find(name, PageKey { parent: None, tokens: &[1, 3] }), None);
        index.remove(name);
        assert_eq!(index.find(name, first), None);
    }
}
