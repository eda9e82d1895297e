//! Pages of keys and values, and of recurrent states, each in memory of its own.
//!
//! A page holds, for each store of its group, keys and then values, each as `[kv_head]` blocks in the layout
//! of [`attention::write_row`], or the f32 values of a state. Its memory is allocated at the first write and
//! stays for the page's next owner, unless the page is freed: then the system takes it back, and the
//! addresses are reused for the next allocated page.
//!
//! A page that was imported stays where its bytes are, usually in a mapped file, and is read there: filling
//! fresh memory takes several times as long as checking the bytes. Invariant: those bytes are never written;
//! a page is copied into memory of its own before its first write.

use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};

use parking_lot::Mutex;

use super::drafted::StoreRecords;
use crate::backend::{KvLayout, KvShape, KvType, PAGE_TOKENS, PageId, RowSpan, StoreShape};
use crate::tensor::SharedBytes;
use llmctl_base::error::{Error, Result};
use llmctl_kernel::Isa;
use llmctl_kernel::attention;
use llmctl_kernel::attention::{HeadPage, KvPart};
use llmctl_kernel::memory::{Arena, ArenaMemory};
use llmctl_kernel::pool::Pool;

/// Number of values below which writing rows on several threads does not pay.
const SERIAL_LIMIT: usize = 1 << 14;

/// Most pages of a group whose memory is ready before they are needed: those of 2,048 tokens.
const MOST_READY: usize = 2048 / PAGE_TOKENS;

/// The smallest page of the systems that llmctl runs on, in bytes.
const SYSTEM_PAGE: usize = 4096;

/// Pages by group.
pub struct CpuKv {
    kv_type: KvType,
    stores: Vec<StoreOffset>,
    groups: Vec<GroupKv>,
    /// Allocator of pages, side by side on huge pages. The mutex is never contended; it makes the type `Sync`.
    arena: Mutex<Arena>,
    /// Runs of the rows being written; kept to reuse the memory.
    runs: Vec<PageRun>,
    /// By store: the inputs that the last step's drafted rows have for its states.
    drafted: Vec<StoreRecords>,
}

/// Consecutive rows of a step that go to one page.
struct PageRun {
    page: AtomicPtr<u8>,
    /// First token within the page.
    first_token: usize,
    /// Rows of the step.
    rows: Range<usize>,
}

/// Pages of one group.
#[derive(Default)]
struct GroupKv {
    page_bytes: usize,
    /// `None` for a page that was never written or is freed.
    pages: Vec<Option<PageMemory>>,
    /// Memory for pages to come that the system has filled with zeros already.
    ready: Vec<ArenaMemory>,
    /// Address ranges of freed pages, whose memory the system has taken back.
    spare: Vec<ArenaMemory>,
}

impl GroupKv {
    /// Returns the bytes of a page that has memory of its own.
    fn own_mut(&mut self, id: PageId) -> &mut [u8] {
        match &mut self.pages[id as usize] {
            Some(PageMemory::Own(memory)) => &mut memory[..self.page_bytes],
            _ => unreachable!("page {id} has memory of its own"),
        }
    }
}

/// Memory of a page's bytes.
enum PageMemory {
    Own(ArenaMemory),
    /// Imported and not written since; aligned for every value of a page.
    Imported(SharedBytes),
}

impl PageMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            PageMemory::Own(memory) => memory,
            PageMemory::Imported(bytes) => bytes,
        }
    }
}

/// Offset of a store in a page of its group; a layer's values follow its keys.
#[derive(Debug, Clone, Copy)]
struct StoreOffset {
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
            stores.push(StoreOffset { group: store.group, offset: *page_bytes, shape: store.shape });
            *page_bytes += store.shape.bytes(kv_type);
        }
        let drafted = stores.iter().map(|_| StoreRecords::default()).collect();
        CpuKv { kv_type, stores, groups, arena: Mutex::default(), runs: Vec::new(), drafted }
    }

    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Returns shape and offset of a store of rows.
    fn rows(&self, store: usize) -> (StoreOffset, KvShape) {
        match self.stores[store] {
            place @ StoreOffset { shape: StoreShape::Rows(shape), .. } => (place, shape),
            StoreOffset { shape: StoreShape::State(_), .. } => unreachable!("store {store} holds a state"),
        }
    }

    pub fn shape(&self, store: usize) -> KvShape {
        self.rows(store).1
    }

    /// Returns a sequence's state, to be updated by the step that begins at `span.start`.
    pub fn state_mut(&mut self, store: usize, span: &RowSpan) -> Result<&mut [f32]> {
        let StoreOffset { group, offset, shape } = self.stores[store];
        let (len, first) = (shape.bytes(self.kv_type), span.start == 0);
        let bytes = &mut self.page_mut(group, span.pages[0])?[offset..offset + len];
        let state: &mut [f32] = bytemuck::cast_slice_mut(bytes); // pages are aligned, and states lie in pages of their own
        if first {
            state.fill(0.0);
        }
        Ok(state)
    }

    /// Returns the records of a state's drafted rows.
    pub fn drafted_mut(&mut self, store: usize) -> &mut StoreRecords {
        &mut self.drafted[store]
    }

    /// Returns the states in a page of a recurrent group, each with the records of its drafted rows.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory for the page.
    pub fn states_with_records(
        &mut self,
        group: usize,
        page: PageId,
    ) -> Result<Vec<(&mut [f32], &StoreRecords)>> {
        self.own(group, page)?;
        let Self { kv_type, stores, groups, drafted, .. } = self;
        let mut rest = groups[group].own_mut(page);
        let mut states = Vec::new();
        for (store, records) in stores.iter().zip(drafted).filter(|(store, _)| store.group == group) {
            let (state, behind) = rest.split_at_mut(store.shape.bytes(*kv_type));
            states.push((bytemuck::cast_slice_mut(state), &*records));
            rest = behind;
        }
        Ok(states)
    }

    /// Returns the page's bytes for writing, in memory of its own.
    fn page_mut(&mut self, group: usize, id: PageId) -> Result<&mut [u8]> {
        self.own(group, id)?;
        Ok(self.groups[group].own_mut(id))
    }

    /// Gives a page memory of its own, with the page's content if it has any.
    fn own(&mut self, group: usize, id: PageId) -> Result<()> {
        if !matches!(self.slot_mut(group, id), Some(PageMemory::Own(_))) {
            let mut memory = self.unused_memory(group)?;
            let slot = self.slot_mut(group, id);
            if let Some(PageMemory::Imported(bytes)) = slot {
                memory[..bytes.len()].copy_from_slice(bytes);
            }
            *slot = Some(PageMemory::Own(memory));
        }
        Ok(())
    }

    /// Returns the entry of a page, `None` for a new one.
    fn slot_mut(&mut self, group: usize, id: PageId) -> &mut Option<PageMemory> {
        let pages = &mut self.groups[group].pages;
        let index = id as usize;
        if index >= pages.len() {
            pages.resize_with(index + 1, || None);
        }
        &mut pages[index]
    }

    /// Returns memory for a page. Where none is ready, other groups give up at least as much of theirs, so that the pool's
    /// capacity holds for pages and ready memory together.
    fn unused_memory(&mut self, group: usize) -> Result<ArenaMemory> {
        if let Some(memory) = self.groups[group].ready.pop() {
            return Ok(memory);
        }
        let mut lacking = self.groups[group].page_bytes;
        for GroupKv { page_bytes, ready, spare, .. } in &mut self.groups {
            while let Some(mut memory) = ready.pop_if(|_| lacking > 0) {
                memory.release();
                spare.push(memory);
                lacking = lacking.saturating_sub(*page_bytes);
            }
        }
        self.unfilled_memory(group)
    }

    fn unfilled_memory(&mut self, group: usize) -> Result<ArenaMemory> {
        let GroupKv { page_bytes, spare, .. } = &mut self.groups[group];
        let arena = self.arena.get_mut();
        let no_memory = |error| Error::Backend(format!("no memory for a KV page: {error}"));
        spare.pop().map_or_else(|| arena.zeroed(*page_bytes).map_err(no_memory), Ok)
    }

    /// Makes memory ready for a page of the group that has the fewest ready. Returns false if that would be more than `most` bytes, or
    /// more pages than are worth it.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory.
    pub fn prepare_page(&mut self, most: usize) -> Result<bool> {
        let ready: usize = self.groups.iter().map(|group| group.page_bytes * group.ready.len()).sum();
        let fewest = (0..self.groups.len()).min_by_key(|group| self.groups[*group].ready.len());
        let is_wanted = |group: &usize| {
            let GroupKv { page_bytes, ready: pages, .. } = &self.groups[*group];
            pages.len() < MOST_READY && ready + page_bytes <= most
        };
        let Some(group) = fewest.filter(is_wanted) else { return Ok(false) };
        let mut memory = self.unfilled_memory(group)?;
        memory.iter_mut().step_by(SYSTEM_PAGE).for_each(|byte| *byte = 0);
        self.groups[group].ready.push(memory);
        Ok(true)
    }

    fn page(&self, group: usize, id: PageId) -> Option<&[u8]> {
        let GroupKv { page_bytes, pages, .. } = &self.groups[group];
        pages.get(id as usize)?.as_ref().map(|page| &page.bytes()[..*page_bytes])
    }

    pub fn copy_page(&mut self, group: usize, from: PageId, to: PageId) -> Result<()> {
        if self.page(group, from).is_none() {
            self.free_page(group, to);
        } else if from != to {
            if matches!(self.slot_mut(group, to), Some(PageMemory::Imported(_))) {
                self.free_page(group, to);
            }
            let page_bytes = self.page_mut(group, to)?.len();
            let pair = self.groups[group].pages.get_disjoint_mut([from as usize, to as usize]);
            if let Ok([Some(from), Some(PageMemory::Own(to))]) = pair {
                to[..page_bytes].copy_from_slice(&from.bytes()[..page_bytes]);
            }
        }
        Ok(())
    }

    pub fn free_page(&mut self, group: usize, page: PageId) {
        let GroupKv { pages, spare, .. } = &mut self.groups[group];
        if let Some(PageMemory::Own(mut memory)) = pages.get_mut(page as usize).and_then(Option::take) {
            memory.release();
            spare.push(memory);
        }
    }

    pub fn export_page(&self, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.page(group, page);
        out.extend_from_slice(bytes.ok_or_else(|| Error::Backend(format!("page {page} was never written")))?);
        Ok(())
    }

    pub fn import_page(&mut self, group: usize, page: PageId, bytes: SharedBytes) -> Result<()> {
        let expected = self.groups[group].page_bytes;
        if expected != bytes.len() {
            return Err(Error::Backend(format!("a page of {expected} bytes, not {}", bytes.len())));
        }
        self.free_page(group, page);
        *self.slot_mut(group, page) = Some(PageMemory::Imported(bytes.aligned_to(align_of::<f32>())));
        Ok(())
    }

    /// Writes rows of keys, `[rows of the step][num_kv_heads * head_dim]`, and of values, which may be narrower, to their pages. Keys that hold
    /// the values are written alone, in the layout of values.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory for a page.
    pub fn write(
        &mut self,
        store: usize,
        rows: [&[f32]; 2],
        spans: &[RowSpan],
        (isa, pool): (Isa, &Pool),
    ) -> Result<()> {
        let (StoreOffset { group, offset, .. }, KvShape { num_kv_heads, head_dim, values }) =
            self.rows(store);
        self.find_runs(group, spans)?;
        let (kv_type, value_dim) = (self.kv_type, values.row_dim(head_dim));
        let [key_bytes, value_bytes] = [head_dim, value_dim].map(|dim| PAGE_TOKENS * kv_type.row_bytes(dim));
        let page_bytes = self.groups[group].page_bytes;
        let count = values.num_rows() * num_kv_heads;
        let key_layout = values.key_layout();
        let all_bytes = num_kv_heads * PAGE_TOKENS * values.bytes(kv_type, head_dim);
        assert!(offset + all_bytes <= page_bytes, "a layer's blocks lie in its page");
        // One block at a time, so that it is in the cache while its tokens are scattered over it. Keys first, as in
        // the page.
        let task = |block: usize| {
            let head = block % num_kv_heads;
            let (part, rows, dim, at, block_bytes) = match block < num_kv_heads {
                true => (key_layout, rows[0], head_dim, head * key_bytes, key_bytes),
                false => {
                    let at = num_kv_heads * key_bytes + head * value_bytes;
                    (KvPart::Values, rows[1], value_dim, at, value_bytes)
                }
            };
            for run in &self.runs {
                let page = run.page.load(Ordering::Relaxed);
                // SAFETY: the page has these bytes, by the assertion, and lives and is ours alone during this call; other
                // tasks write other blocks.
                let bytes = unsafe { std::slice::from_raw_parts_mut(page.add(offset + at), block_bytes) };
                for (index, row) in run.rows.clone().enumerate() {
                    let values = &rows[(row * num_kv_heads + head) * dim..][..dim];
                    attention::write_row(isa, kv_type, part, bytes, run.first_token + index, values);
                }
            }
        };
        if rows[0].len() + rows[1].len() < SERIAL_LIMIT {
            (0..count).for_each(task);
        } else {
            pool.for_each(count, task);
        }
        Ok(())
    }

    /// Assigns rows to pages, and allocates missing pages.
    fn find_runs(&mut self, group: usize, spans: &[RowSpan]) -> Result<()> {
        self.runs.clear();
        for span in spans {
            let mut row = span.rows.start;
            while row < span.rows.end {
                let (id, first_token) = span.slot(span.start + row - span.rows.start);
                let count = (PAGE_TOKENS - first_token).min(span.rows.end - row);
                let page = AtomicPtr::new(self.page_mut(group, id)?.as_mut_ptr());
                self.runs.push(PageRun { page, first_token, rows: row..row + count });
                row += count;
            }
        }
        Ok(())
    }

    /// Returns keys and values of some heads in a page that has been written.
    pub fn head_pages(&self, store: usize, heads: Range<usize>, id: PageId) -> HeadPage<'_> {
        let (StoreOffset { group, offset, .. }, KvShape { num_kv_heads, head_dim, values }) =
            self.rows(store);
        let page = self.page(group, id).expect("a covered position has been written");
        let bytes = |dim| PAGE_TOKENS * self.kv_type.row_bytes(dim);
        let blocks =
            |from: usize, len: usize| &page[offset + from + heads.start * len..][..heads.len() * len];
        let first_values = if values.num_rows() == 1 { 0 } else { num_kv_heads * bytes(head_dim) };
        HeadPage {
            keys: blocks(0, bytes(head_dim)),
            values: blocks(first_values, bytes(values.row_dim(head_dim))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{KvValues, Store};

    const SHAPE: KvShape = KvShape { num_kv_heads: 2, head_dim: 64, values: KvValues::Own };

    /// Returns rows of 2 heads with the values `first`, `first + 1`, ... in order.
    fn rows(count: usize, first: f32) -> Vec<f32> {
        (0..count * 128).map(|n| first + (n % 1000) as f32).collect()
    }

    fn written(kv: &CpuKv, page: PageId, token: usize, head: usize) -> [Vec<f32>; 2] {
        let pages = kv.head_pages(0, head..head + 1, page);
        [(KvPart::Keys, pages.keys), (KvPart::Values, pages.values)].map(|(part, block)| {
            let mut row = vec![0.0; 64];
            attention::read_row(KvType::F32, part, block, token, &mut row);
            row
        })
    }

    #[test]
    fn rows_go_to_their_places_by_any_number_of_threads() {
        let layout =
            KvLayout { stores: vec![Store { shape: StoreShape::Rows(SHAPE), group: 0 }], num_groups: 1 };
        let (keys, values) = (rows(150, 0.0), rows(150, 5000.0));
        // 70 rows from position 20 on, of a sequence with three pages, and the first 80 rows of another.
        let spans = [
            RowSpan { rows: 0..70, start: 20, num_drafted: 0, pages: vec![3, 0, 1], seen_besides: vec![] },
            RowSpan { rows: 70..150, start: 0, num_drafted: 0, pages: vec![2, 5, 4], seen_besides: vec![] },
        ];
        for threads in [1, 3] {
            let mut kv = CpuKv::new(&layout, KvType::F32);
            kv.write(0, [&keys, &values], &spans, (Isa::Scalar, &Pool::new(threads).unwrap())).unwrap();
            for span in &spans {
                for row in span.rows.clone() {
                    let (page, token) = span.slot(span.start + row - span.rows.start);
                    for head in 0..2 {
                        let expected = [&keys, &values].map(|x| x[row * 128 + head * 64..][..64].to_vec());
                        assert_eq!(written(&kv, page, token, head), expected, "row {row}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_freed_page_is_nobodys_and_its_memory_serves_the_next() {
        let layout =
            KvLayout { stores: vec![Store { shape: StoreShape::Rows(SHAPE), group: 0 }], num_groups: 1 };
        let mut kv = CpuKv::new(&layout, KvType::F32);
        let pool = Pool::new(1).unwrap();
        let x = rows(1, 1.0);
        let write = |kv: &mut CpuKv, page| {
            let span =
                RowSpan { rows: 0..1, start: 0, num_drafted: 0, pages: vec![page], seen_besides: vec![] };
            kv.write(0, [&x, &x], &[span], (Isa::Scalar, &pool)).unwrap();
        };
        write(&mut kv, 7);
        kv.free_page(0, 7);
        kv.free_page(0, 7);
        assert!(kv.page(0, 7).is_none() && kv.export_page(0, 7, &mut Vec::new()).is_err());
        assert_eq!(kv.groups[0].spare.len(), 1);
        write(&mut kv, 2);
        assert!(kv.groups[0].spare.is_empty());
        assert_eq!(written(&kv, 2, 0, 0), [x[..64].to_vec(), x[..64].to_vec()]);
    }

    #[test]
    fn prepared_memory_is_taken_first_and_counts_against_other_groups() {
        let store = |group, shape| Store { shape, group };
        let shapes = [StoreShape::Rows(SHAPE), StoreShape::State(4096)]; // 32 KiB and 16 KiB a page
        let stores = vec![store(0, shapes[0]), store(1, shapes[1])];
        let mut kv = CpuKv::new(&KvLayout { stores, num_groups: 2 }, KvType::F32);
        let ready = |kv: &CpuKv| [0, 1].map(|group: usize| kv.groups[group].ready.len());
        while kv.prepare_page(100 << 10).unwrap() {}
        assert_eq!(ready(&kv), [2, 2], "96 KiB; one more page would make 128");
        let address = kv.groups[0].ready[1].as_ptr();
        assert_eq!(kv.page_mut(0, 5).unwrap().as_ptr(), address);
        kv.page_mut(1, 0).unwrap();
        kv.page_mut(1, 1).unwrap();
        assert_eq!(ready(&kv), [1, 0]);
        kv.page_mut(1, 2).unwrap();
        assert_eq!(ready(&kv), [0, 0], "the other group gives up a page for one that was not prepared");
        assert_eq!(kv.groups[0].spare.len(), 1);
        kv.page_mut(0, 6).unwrap();
        assert!(kv.groups[0].spare.is_empty(), "the addresses serve again");
        while kv.prepare_page(usize::MAX).unwrap() {}
        assert_eq!(ready(&kv), [MOST_READY; 2]);
    }

    #[test]
    fn an_imported_page_stays_where_it_is_until_it_is_written() {
        let layout =
            KvLayout { stores: vec![Store { shape: StoreShape::Rows(SHAPE), group: 0 }], num_groups: 1 };
        let pool = Pool::new(1).expect("threads");
        let spans = |page, rows: Range<usize>| {
            [RowSpan {
                start: rows.start,
                rows: 0..rows.len(),
                num_drafted: 0,
                pages: vec![page],
                seen_besides: vec![],
            }]
        };
        let mut kv = CpuKv::new(&layout, KvType::F32);
        let x = rows(PAGE_TOKENS, 1.0);
        kv.write(0, [&x, &x], &spans(0, 0..PAGE_TOKENS), (Isa::Scalar, &pool)).expect("pages");
        let mut saved = Vec::new();
        kv.export_page(0, 0, &mut saved).expect("a page");
        let bytes = SharedBytes::from(saved.clone());

        kv.import_page(0, 3, bytes.clone()).expect("a page");
        assert_eq!(kv.page(0, 3).expect("a page").as_ptr(), bytes.as_ptr(), "not copied");
        kv.copy_page(0, 3, 4).expect("a page");
        let y = rows(1, 9000.0);
        kv.write(0, [&y, &y], &spans(3, 5..6), (Isa::Scalar, &pool)).expect("pages");
        assert_eq!(*bytes, *saved, "others may read these bytes");
        for token in 0..PAGE_TOKENS {
            let row = if token == 5 { &y[..64] } else { &x[token * 128..][..64] };
            assert_eq!(written(&kv, 3, token, 0), [row.to_vec(), row.to_vec()], "row {token}");
        }
        assert_eq!(kv.page(0, 4).expect("a page"), saved, "its own copy");

        kv.import_page(0, 4, bytes.clone()).expect("a page");
        assert_eq!(kv.groups[0].spare.len(), 1, "the memory that page 4 had");
        kv.copy_page(0, 3, 4).expect("a page");
        assert!(kv.groups[0].spare.is_empty() && kv.page(0, 4) == kv.page(0, 3) && *bytes == *saved);
        kv.import_page(0, 4, bytes.clone()).expect("a page");
        kv.free_page(0, 4);
        assert!(kv.page(0, 4).is_none() && kv.import_page(0, 4, bytes.slice(4, 64)).is_err());
    }
}
