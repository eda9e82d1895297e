//! Pages of keys and values, and of states, in memory of their own.
//!
//! A page holds, store by store of its group, keys and then values, each `[kv_head]` blocks as [`attention::write_row`] lays
//! them, or the f32 values of a state. Its memory is made when it is first written and stays for the page's next owner, unless
//! the page is freed.

use std::ops::Range;

use crate::runtime::backend::{KvLayout, KvShape, KvType, PAGE_TOKENS, PageId, Span, StoreShape};
use crate::runtime::error::{Error, Result};
use crate::runtime::kernel::attention::{self, HeadPage, Part};
use crate::runtime::kernel::memory::Memory;

/// Pages by group.
pub struct CpuKv {
    kv_type: KvType,
    stores: Vec<StorePlace>,
    groups: Vec<GroupKv>,
}

/// Pages of one group.
#[derive(Default)]
struct GroupKv {
    page_bytes: usize,
    /// Nothing where a page was never written or is freed.
    pages: Vec<Option<Memory>>,
}

/// Where a store begins in a page of its group; a layer's values follow its keys.
#[derive(Debug, Clone, Copy)]
struct StorePlace {
    group: usize,
    offset: usize,
    shape: StoreShape,
}

impl CpuKv {
    pub fn new(layout: &KvLayout, kv_type: KvType) -> CpuKv {
        let mut groups: Vec<_> = (0..layout.num_groups).map(|_| GroupKv::default()).collect();
        let mut stores = Vec::with_capacity(layout.stores.len());
        for store in &layout.stores {
            let page_bytes = &mut groups[store.group].page_bytes;
            stores.push(StorePlace { group: store.group, offset: *page_bytes, shape: store.shape });
            *page_bytes += store.shape.bytes(kv_type);
        }
        CpuKv { kv_type, stores, groups }
    }

    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// The shape of a store that holds rows, and where it lies.
    fn rows(&self, store: usize) -> (StorePlace, KvShape) {
        match self.stores[store] {
            place @ StorePlace { shape: StoreShape::Rows(shape), .. } => (place, shape),
            StorePlace { shape: StoreShape::State(_), .. } => unreachable!("store {store} holds a state"),
        }
    }

    pub fn shape(&self, store: usize) -> KvShape {
        self.rows(store).1
    }

    /// A sequence's state, as the step that begins at `span.start` finds it and is to leave it.
    pub fn state_mut(&mut self, store: usize, span: &Span) -> Result<&mut [f32]> {
        let StorePlace { group, offset, shape } = self.stores[store];
        let (len, first) = (shape.bytes(self.kv_type), span.start == 0);
        let bytes = &mut self.page_mut(group, span.pages[0])?[offset..offset + len];
        let state: &mut [f32] = bytemuck::cast_slice_mut(bytes); // pages are aligned, and states lie in pages of their own
        if first {
            state.fill(0.0);
        }
        Ok(state)
    }

    /// The page's bytes, to be written.
    fn page_mut(&mut self, group: usize, id: PageId) -> Result<&mut [u8]> {
        let GroupKv { page_bytes, pages } = &mut self.groups[group];
        let index = id as usize;
        if index >= pages.len() {
            pages.resize_with(index + 1, || None);
        }
        let page = &mut pages[index];
        if page.is_none() {
            let no_memory = |error| Error::Backend(format!("no memory for a KV page: {error}"));
            *page = Some(Memory::zeroed(*page_bytes).map_err(no_memory)?);
        }
        Ok(&mut page.as_mut().expect("made above")[..*page_bytes])
    }

    fn page(&self, group: usize, id: PageId) -> Option<&[u8]> {
        let GroupKv { page_bytes, pages } = &self.groups[group];
        pages.get(id as usize)?.as_ref().map(|page| &page[..*page_bytes])
    }

    pub fn copy_page(&mut self, group: usize, from: PageId, to: PageId) -> Result<()> {
        if self.page(group, from).is_none() {
            self.free_page(group, to);
        } else if from != to {
            self.page_mut(group, to)?;
            let pair = self.groups[group].pages.get_disjoint_mut([from as usize, to as usize]);
            if let Ok([Some(from), Some(to)]) = pair {
                to.copy_from_slice(from);
            }
        }
        Ok(())
    }

    pub fn free_page(&mut self, group: usize, page: PageId) {
        if let Some(page) = self.groups[group].pages.get_mut(page as usize) {
            *page = None;
        }
    }

    pub fn export_page(&self, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.page(group, page);
        out.extend_from_slice(bytes.ok_or_else(|| Error::Backend(format!("page {page} was never written")))?);
        Ok(())
    }

    pub fn import_page(&mut self, group: usize, page: PageId, bytes: &[u8]) -> Result<()> {
        let expected = self.groups[group].page_bytes;
        if expected != bytes.len() {
            return Err(Error::Backend(format!("a page of {expected} bytes, not {}", bytes.len())));
        }
        self.page_mut(group, page)?.copy_from_slice(bytes);
        Ok(())
    }

    /// Writes rows of keys or values, `[rows of the step][num_kv_heads * head_dim]`, at their places.
    pub fn write(&mut self, store: usize, part: Part, rows: &[f32], spans: &[Span]) -> Result<()> {
        let (StorePlace { group, offset, .. }, KvShape { num_kv_heads, head_dim }) = self.rows(store);
        let kv_type = self.kv_type;
        let (width, block_bytes) = (num_kv_heads * head_dim, PAGE_TOKENS * kv_type.row_bytes(head_dim));
        let start = offset + if part == Part::Keys { 0 } else { num_kv_heads * block_bytes };
        for span in spans {
            let mut row = span.rows.start;
            while row < span.rows.end {
                let (id, token) = span.slot(span.start + row - span.rows.start);
                let count = (PAGE_TOKENS - token).min(span.rows.end - row);
                let page = self.page_mut(group, id)?;
                // Head by head, so that a block is in the cache while its tokens are scattered over it.
                for (head, block) in
                    page[start..][..num_kv_heads * block_bytes].chunks_exact_mut(block_bytes).enumerate()
                {
                    for index in 0..count {
                        let values = &rows[(row + index) * width + head * head_dim..][..head_dim];
                        attention::write_row(kv_type, part, block, token + index, values);
                    }
                }
                row += count;
            }
        }
        Ok(())
    }

    /// Some heads' keys and values in a page that has been written.
    pub fn head_pages(&self, store: usize, heads: Range<usize>, id: PageId) -> HeadPage<'_> {
        let (StorePlace { group, offset, .. }, KvShape { num_kv_heads, head_dim }) = self.rows(store);
        let page = self.page(group, id).expect("a covered position has been written");
        let block_bytes = PAGE_TOKENS * self.kv_type.row_bytes(head_dim);
        let blocks = |first: usize| &page[offset + first * block_bytes..][..heads.len() * block_bytes];
        HeadPage { keys: blocks(heads.start), values: blocks(num_kv_heads + heads.start) }
    }
}
