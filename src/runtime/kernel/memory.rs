//! Zeroed memory for packed weights and KV pages, directly from the system, on huge pages if it grants them.
//!
//! The allocator would write the zeros itself and hold freed memory that the process does not need. Huge
//! pages mean fewer page faults at load and fewer TLB misses at every step.
//!
//! On a machine with several memory nodes an [`Arena`] may spread its pages over them: which thread reads a
//! page of weights changes from step to step, so the best that placement can do is to let all nodes deliver
//! at the same time.

use std::cell::RefCell;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use memmap2::MmapMut;

/// Size of a huge page of x86-64 and, with 4 KiB pages, of aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that an [`Arena`] requests from the system at a time. Bytes never written take no memory.
const CHUNK: usize = 64 * HUGE_PAGE;

/// Largest piece of a chunk in bytes; larger pieces would waste addresses of a chunk, and get mappings of their own.
const LARGEST_PIECE: usize = CHUNK / 2;

/// Alignment of pieces in bytes: a cache line.
const ALIGNMENT: usize = 64;

/// Memory nodes by number, at most [`Self::MOST`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryNodes(u64);

impl MemoryNodes {
    const MOST: usize = u64::BITS as usize;

    pub fn are_several(self) -> bool {
        self.0.count_ones() > 1
    }

    /// Alternates the pages of a mapping, none of which was touched, between these nodes. Does nothing if there is only one, if
    /// the user has chosen a policy (`numactl`), or if the system refuses: then the thread that writes a page first decides.
    fn spread(self, mapping: &MmapMut) {
        #[cfg(target_os = "linux")]
        if self.are_several() && policy_of(0, ptr::null()) == Some(libc::MPOL_DEFAULT) {
            let _ = self.interleave(mapping);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = mapping;
    }

    /// # Errors
    /// If the system refuses, as containers without the capability do.
    #[cfg(target_os = "linux")]
    fn interleave(self, mapping: &MmapMut) -> io::Result<()> {
        let mask = &raw const self.0;
        // The system takes one bit less than it is told.
        let bits = Self::MOST + 1;
        let [start, len] = [mapping.as_ptr() as usize, mapping.len()];
        // SAFETY: changes where pages of a mapping of ours come from; the mask has as many bits as it says.
        let status =
            unsafe { libc::syscall(libc::SYS_mbind, start, len, libc::MPOL_INTERLEAVE, mask, bits, 0) };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Ignores numbers too large for the set.
impl FromIterator<usize> for MemoryNodes {
    fn from_iter<I: IntoIterator<Item = usize>>(nodes: I) -> Self {
        let nodes = nodes.into_iter().filter(|node| *node < Self::MOST);
        MemoryNodes(nodes.fold(0, |mask, node| mask | 1 << node))
    }
}

/// Returns the policy of the calling thread, or with the flag MPOL_F_ADDR that of the page at an address; `None` if the system
/// does not tell.
#[cfg(target_os = "linux")]
fn policy_of(flags: libc::c_int, address: *const u8) -> Option<libc::c_int> {
    let mut policy: libc::c_int = 0;
    let no_mask = ptr::null_mut::<u64>();
    // SAFETY: writes one number to `policy`; reads nothing at the address.
    let status =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut policy, no_mask, 0usize, address, flags) };
    (status == 0).then_some(policy)
}

/// Owned bytes of a mapping.
pub struct ArenaMemory {
    start: NonNull<u8>,
    len: usize,
    /// The mapping of these bytes and possibly of others'.
    mapping: Arc<MmapMut>,
}

// SAFETY: the bytes from `start` on belong to this value alone, as those of a `Box<[u8]>` do, and the mapping lives as long.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above; through `&ArenaMemory` they are only read.
unsafe impl Sync for ArenaMemory {}

impl ArenaMemory {
    /// Allocates `len` zero bytes (at least 1) in a mapping of their own, which is unmapped with them.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn zeroed(len: usize) -> io::Result<ArenaMemory> {
        ArenaMemory::zeroed_over(len, MemoryNodes::default())
    }

    fn zeroed_over(len: usize, nodes: MemoryNodes) -> io::Result<ArenaMemory> {
        // Linux aligns only mappings of whole huge pages to one. Bytes past `len` are never written.
        let whole = if len < HUGE_PAGE { len.max(1) } else { len.next_multiple_of(HUGE_PAGE) };
        let mut mapping = MmapMut::map_anon(whole)?;
        // Whole huge pages only: the tail of one would waste memory.
        use_huge_pages(&mapping, len / HUGE_PAGE * HUGE_PAGE);
        nodes.spread(&mapping);
        let start = NonNull::from(&mut mapping[..]).cast();
        Ok(ArenaMemory { start, len, mapping: Arc::new(mapping) })
    }

    /// Returns the memory to the system until it is written again; its contents are lost. Pages shared with other
    /// pieces are not returned; on systems without such a call nothing is.
    pub fn release(&mut self) {
        const LARGEST_PAGE: usize = 64 << 10;
        let own = self.start.as_ptr() as usize;
        // A small piece may contain no whole page: then the end is before the start, and even before the mapping.
        let (start, end) =
            (own.next_multiple_of(LARGEST_PAGE), (own + self.len) / LARGEST_PAGE * LARGEST_PAGE);
        #[cfg(unix)]
        if start < end {
            // macOS keeps private pages that are not needed, and takes those that are free.
            #[cfg(target_vendor = "apple")]
            const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::Free;
            #[cfg(not(target_vendor = "apple"))]
            const ADVICE: memmap2::UncheckedAdvice = memmap2::UncheckedAdvice::DontNeed;
            let offset = start - self.mapping.as_ptr() as usize;
            // SAFETY: these bytes are ours, borrowed mutably, and any value is valid for them.
            let released = unsafe { self.mapping.unchecked_advise_range(ADVICE, offset, end - start) };
            // If the system refuses, the only cost is memory.
            let _ = released;
        }
        #[cfg(not(unix))]
        let _ = (&self.mapping, start, end);
    }
}

/// Requests huge pages under the first `len` bytes. If refused, small pages work too.
fn use_huge_pages(mapping: &MmapMut, len: usize) {
    #[cfg(target_os = "linux")]
    if len > 0 {
        let _ = mapping.advise_range(memmap2::Advice::HugePage, 0, len);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (mapping, len);
}

impl Deref for ArenaMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of a live mapping that this value alone owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for ArenaMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// The panels of one matrix. Clones share the bytes, which are never written.
#[derive(Clone)]
pub struct PanelMemory(Arc<ArenaMemory>);

impl PanelMemory {
    /// Returns whether these are `len` bytes that begin at a cache line, as kernels expect of panels.
    pub(crate) fn holds(&self, len: usize) -> bool {
        self.len() == len && (self.as_ptr() as usize).is_multiple_of(ALIGNMENT)
    }
}

impl From<ArenaMemory> for PanelMemory {
    fn from(memory: ArenaMemory) -> PanelMemory {
        PanelMemory(Arc::new(memory))
    }
}

impl Deref for PanelMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Allocator of memory that is kept together: pieces smaller than a huge page lie side by side on one. The system
/// gets a chunk's memory back when all its pieces are dropped.
#[derive(Default)]
pub struct Arena {
    chunk: RefCell<Option<ArenaChunk>>,
    nodes: MemoryNodes,
}

/// A mapping whose bytes before `used` belong to pieces.
struct ArenaChunk {
    mapping: Arc<MmapMut>,
    start: NonNull<u8>,
    used: usize,
}

// SAFETY: the pointer is to the mapping, which may go to another thread.
unsafe impl Send for ArenaChunk {}

impl Arena {
    /// Creates an arena that spreads its pages over these nodes.
    pub fn over(nodes: MemoryNodes) -> Arena {
        Arena { chunk: RefCell::default(), nodes }
    }

    /// Allocates `len` zero bytes.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub fn zeroed(&self, len: usize) -> io::Result<ArenaMemory> {
        if len > LARGEST_PIECE {
            return ArenaMemory::zeroed_over(len, self.nodes);
        }
        let mut current = self.chunk.borrow_mut();
        let chunk = match &mut *current {
            Some(chunk) if chunk.used + len <= CHUNK => chunk,
            full => match ArenaChunk::new(self.nodes) {
                Ok(chunk) => full.insert(chunk),
                // A process with little address space may still have room for the piece.
                Err(_) => return ArenaMemory::zeroed_over(len, self.nodes),
            },
        };
        // SAFETY: `used + len` is within the mapping.
        let start = unsafe { chunk.start.add(chunk.used) };
        chunk.used = (chunk.used + len).next_multiple_of(ALIGNMENT);
        Ok(ArenaMemory { start, len, mapping: Arc::clone(&chunk.mapping) })
    }
}

impl ArenaChunk {
    fn new(nodes: MemoryNodes) -> io::Result<ArenaChunk> {
        let mut mapping = MmapMut::map_anon(CHUNK)?;
        use_huge_pages(&mapping, CHUNK);
        nodes.spread(&mapping);
        let start = NonNull::from(&mut mapping[..]).cast();
        Ok(ArenaChunk { mapping: Arc::new(mapping), start, used: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mut memory: ArenaMemory, len: usize) -> ArenaMemory {
        assert_eq!(memory.len(), len);
        assert!((memory.as_ptr() as usize).is_multiple_of(ALIGNMENT));
        assert!(memory.iter().step_by(61).all(|byte| *byte == 0));
        memory[len - 1] = 7;
        assert_eq!(memory[len - 1], 7);
        memory
    }

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        let arena = Arena::default();
        for len in [1, 64, 1000, HUGE_PAGE, HUGE_PAGE + 4097, LARGEST_PIECE, LARGEST_PIECE + 1] {
            check(ArenaMemory::zeroed(len).unwrap(), len);
            check(arena.zeroed(len).unwrap(), len);
        }
    }

    #[test]
    fn pieces_of_an_arena_do_not_overlap_and_outlive_it() {
        let arena = Arena::default();
        // More than one chunk holds.
        let lens = (0..40).map(|n| [1, 63, 64, 65, LARGEST_PIECE][n % 5]);
        let mut pieces: Vec<ArenaMemory> = lens.map(|len| check(arena.zeroed(len).unwrap(), len)).collect();
        drop(arena);
        for (n, piece) in pieces.iter_mut().enumerate() {
            let last = piece.len() - 1;
            (piece[0], piece[last]) = (n as u8, n as u8);
        }
        pieces.remove(7);
        let is_whole = |(n, piece): (usize, &ArenaMemory)| {
            let n = if n < 7 { n } else { n + 1 } as u8;
            piece[0] == n && piece[piece.len() - 1] == n
        };
        assert!(pieces.iter().enumerate().all(is_whole));
        assert!(std::thread::spawn(move || pieces.len()).join().unwrap() == 39);
    }

    #[test]
    #[cfg(unix)]
    #[cfg_attr(miri, ignore = "no madvise")]
    fn a_released_piece_leaves_its_neighbours_alone_and_can_be_written_again() {
        let arena = Arena::default();
        let mut pieces: Vec<ArenaMemory> = (0..3).map(|_| arena.zeroed(300_000).unwrap()).collect();
        for (n, piece) in pieces.iter_mut().enumerate() {
            piece.fill(n as u8 + 1);
        }
        pieces[1].release();
        assert!(pieces[0].iter().all(|byte| *byte == 1) && pieces[2].iter().all(|byte| *byte == 3));
        #[cfg(target_os = "linux")]
        assert!(pieces[1].iter().filter(|byte| **byte == 0).count() >= 131_072, "not given back");
        pieces[1].fill(9);
        assert!(pieces[1].iter().all(|byte| *byte == 9));
    }

    #[test]
    #[cfg_attr(miri, ignore = "no madvise")]
    fn a_piece_smaller_than_a_page_can_be_released_wherever_it_lies() {
        // Mappings begin at any page, usually not at a multiple of the largest page size.
        let mut pieces: Vec<ArenaMemory> =
            (0..40).map(|n| ArenaMemory::zeroed(600 + 4096 * n).unwrap()).collect();
        for piece in &mut pieces {
            piece.fill(3);
            piece.release();
            piece.fill(5);
        }
        assert!(pieces.iter().all(|piece| piece.iter().all(|byte| *byte == 5)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "no mbind")]
    fn pages_are_spread_over_nodes_where_the_system_allows_it() {
        let mapping = MmapMut::map_anon(HUGE_PAGE).unwrap();
        const MPOL_F_ADDR: libc::c_int = 2; // of linux/mempolicy.h
        let policy = || policy_of(MPOL_F_ADDR, mapping.as_ptr());
        let Some(before) = policy() else {
            eprintln!("skipped: this system does not tell where memory lies");
            return;
        };
        let nodes: MemoryNodes = [0, 64, 1000].into_iter().collect();
        assert_eq!(nodes, MemoryNodes(1), "numbers too large are ignored");
        nodes.spread(&mapping);
        assert_eq!(policy(), Some(before), "one node is no choice");
        match nodes.interleave(&mapping) {
            Ok(()) => assert_eq!(policy(), Some(libc::MPOL_INTERLEAVE)),
            Err(error) => eprintln!("skipped: this system does not place memory: {error}"),
        }
        // A node that the machine lacks is refused or ignored, and the memory is usable.
        check(Arena::over([0, 63].into_iter().collect()).zeroed(HUGE_PAGE).unwrap(), HUGE_PAGE);
    }

    #[test]
    fn panels_are_shared_and_begin_at_a_cache_line() {
        let made = PanelMemory::from(check(ArenaMemory::zeroed(256).expect("memory"), 256));
        assert!(made.holds(256) && !made.holds(255));
        assert!(ptr::eq(made.as_ptr(), made.clone().as_ptr()), "clones share the bytes");
    }

    #[test]
    fn nothing_is_a_piece_too() {
        assert!(Arena::default().zeroed(0).unwrap().is_empty());
        assert!(ArenaMemory::zeroed(0).unwrap().is_empty());
    }
}
