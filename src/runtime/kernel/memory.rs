//! Zeroed memory for packed weights and KV pages, straight from the system: on huge pages where it gives them.
//!
//! Not from the allocator, which would write the zeros itself and keep freed memory for a process that has no use for it.
//! Huge pages mean fewer page faults at load and fewer TLB misses at every step.

use std::cell::RefCell;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

/// A huge page of x86-64 and, with 4 KiB pages, of aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// What an [`Arena`] asks the system for at a time. What is never written takes no memory.
const CHUNK: usize = 64 * HUGE_PAGE;

/// Larger pieces get a mapping of their own: they would leave much of a chunk's addresses unused.
const LARGEST_PIECE: usize = CHUNK / 2;

/// Pieces begin at multiples of it: a cache line.
const ALIGNMENT: usize = 64;

/// Owned bytes.
pub struct Memory {
    start: NonNull<u8>,
    len: usize,
    /// Holds the bytes, perhaps among others that are not ours.
    mapping: Arc<MmapMut>,
}

// SAFETY: the bytes from `start` on belong to this value alone, as those of a `Box<[u8]>` do, and the mapping lives as long.
unsafe impl Send for Memory {}
// SAFETY: as above; through `&Memory` they are only read.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zero bytes with a mapping of their own, which is given back with them; 0 is taken for 1.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn zeroed(len: usize) -> io::Result<Memory> {
        // Linux puts only mappings of whole huge pages at the beginning of one. What is behind `len` is never written.
        let whole = if len < HUGE_PAGE { len.max(1) } else { len.next_multiple_of(HUGE_PAGE) };
        let mut mapping = MmapMut::map_anon(whole)?;
        // Whole huge pages only: the tail of one would waste memory.
        use_huge_pages(&mapping, len / HUGE_PAGE * HUGE_PAGE);
        let start = NonNull::from(&mut mapping[..]).cast();
        Ok(Memory { start, len, mapping: Arc::new(mapping) })
    }

    /// Gives the memory back to the system until it is written again; what the bytes hold is lost. Only what shares no page
    /// with others' bytes is given back, and nothing where the system has no such call.
    pub fn release(&mut self) {
        const LARGEST_PAGE: usize = 64 << 10;
        let own = self.start.as_ptr() as usize;
        // A small piece may hold no whole page: then the end is before the start, and even before the mapping.
        let (start, end) =
            (own.next_multiple_of(LARGEST_PAGE), (own + self.len) / LARGEST_PAGE * LARGEST_PAGE);
        #[cfg(unix)]
        if start < end {
            let offset = start - self.mapping.as_ptr() as usize;
            // SAFETY: these bytes are ours, borrowed mutably, and any value is valid for them.
            let released = unsafe {
                self.mapping.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, end - start)
            };
            // A refusal costs memory and nothing else.
            let _ = released;
        }
        #[cfg(not(unix))]
        let _ = (start, end);
    }
}

/// Asks for huge pages under the first `len` bytes. A refusal means small pages, which work too.
fn use_huge_pages(mapping: &MmapMut, len: usize) {
    #[cfg(target_os = "linux")]
    if len > 0 {
        let _ = mapping.advise_range(memmap2::Advice::HugePage, 0, len);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (mapping, len);
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of a live mapping that nobody else has.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Gives out memory that is kept together: pieces smaller than a huge page lie side by side on one. The system gets the
/// memory back when all pieces of a chunk are gone.
#[derive(Default)]
pub struct Arena(RefCell<Option<Chunk>>);

/// A mapping whose bytes before `used` belong to pieces.
struct Chunk {
    mapping: Arc<MmapMut>,
    start: NonNull<u8>,
    used: usize,
}

// SAFETY: the pointer is to the mapping, which may go to another thread.
unsafe impl Send for Chunk {}

impl Arena {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn zeroed(&self, len: usize) -> io::Result<Memory> {
        if len > LARGEST_PIECE {
            return Memory::zeroed(len);
        }
        let mut current = self.0.borrow_mut();
        let chunk = match &mut *current {
            Some(chunk) if chunk.used + len <= CHUNK => chunk,
            full => match Chunk::new() {
                Ok(chunk) => full.insert(chunk),
                // A process with little address space may still have room for the piece.
                Err(_) => return Memory::zeroed(len),
            },
        };
        // SAFETY: `used + len` is within the mapping.
        let start = unsafe { chunk.start.add(chunk.used) };
        chunk.used = (chunk.used + len).next_multiple_of(ALIGNMENT);
        Ok(Memory { start, len, mapping: Arc::clone(&chunk.mapping) })
    }
}

impl Chunk {
    fn new() -> io::Result<Chunk> {
        let mut mapping = MmapMut::map_anon(CHUNK)?;
        use_huge_pages(&mapping, CHUNK);
        let start = NonNull::from(&mut mapping[..]).cast();
        Ok(Chunk { mapping: Arc::new(mapping), start, used: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mut memory: Memory, len: usize) -> Memory {
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
            check(Memory::zeroed(len).unwrap(), len);
            check(arena.zeroed(len).unwrap(), len);
        }
    }

    #[test]
    fn pieces_of_an_arena_do_not_overlap_and_outlive_it() {
        let arena = Arena::default();
        // More than a chunk holds.
        let lens = (0..40).map(|n| [1, 63, 64, 65, LARGEST_PIECE][n % 5]);
        let mut pieces: Vec<Memory> = lens.map(|len| check(arena.zeroed(len).unwrap(), len)).collect();
        drop(arena);
        for (n, piece) in pieces.iter_mut().enumerate() {
            let last = piece.len() - 1;
            (piece[0], piece[last]) = (n as u8, n as u8);
        }
        pieces.remove(7);
        let is_whole = |(n, piece): (usize, &Memory)| {
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
        let mut pieces: Vec<Memory> = (0..3).map(|_| arena.zeroed(300_000).unwrap()).collect();
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
        // Mappings begin at any page, most of them at no multiple of the largest one.
        let mut pieces: Vec<Memory> = (0..40).map(|n| Memory::zeroed(600 + 4096 * n).unwrap()).collect();
        for piece in &mut pieces {
            piece.fill(3);
            piece.release();
            piece.fill(5);
        }
        assert!(pieces.iter().all(|piece| piece.iter().all(|byte| *byte == 5)));
    }

    #[test]
    fn nothing_is_a_piece_too() {
        assert!(Arena::default().zeroed(0).unwrap().is_empty());
        assert!(Memory::zeroed(0).unwrap().is_empty());
    }
}
