//! Zeroed memory for packed weights and KV pages, straight from the system: page-aligned, on huge pages where it gives them.
//!
//! Not from the allocator, which would write the zeros itself and keep freed memory for a process that has no use for it.

use std::io;

use memmap2::MmapMut;

/// A huge page of x86-64 and, with 4 KiB pages, of aarch64.
const HUGE_PAGE: usize = 2 << 20;

/// Owned bytes.
pub struct Memory(MmapMut);

impl Memory {
    /// `len` zero bytes; 0 is taken for 1.
    ///
    /// # Errors
    /// When the system has no memory to give.
    pub fn zeroed(len: usize) -> io::Result<Memory> {
        let map = MmapMut::map_anon(len.max(1))?;
        #[cfg(target_os = "linux")]
        {
            // Fewer page faults at load and fewer TLB misses at every step. Whole huge pages only: the tail would
            // waste memory. A refusal means small pages, which work too.
            let whole = len / HUGE_PAGE * HUGE_PAGE;
            if whole > 0 {
                let _ = map.advise_range(memmap2::Advice::HugePage, 0, whole);
            }
        }
        Ok(Memory(map))
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        for len in [1, 64, 1000, HUGE_PAGE, HUGE_PAGE + 4097] {
            let mut memory = Memory::zeroed(len).unwrap();
            assert_eq!(memory.len(), len);
            assert!((memory.as_ptr() as usize).is_multiple_of(64));
            assert!(memory.iter().step_by(61).all(|byte| *byte == 0));
            memory[len - 1] = 7;
            assert_eq!(memory[len - 1], 7);
        }
    }
}
