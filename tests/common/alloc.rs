//! Remembers the largest single allocation of each thread and how many there were, so that a test can say "nothing huge was
//! asked for", or nothing at all.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Watched;

#[global_allocator]
static WATCHED: Watched = Watched;

/// Runs `work` and returns its result with the size of its largest single allocation on this thread.
pub fn largest_allocation<T>(work: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.set(0);
    let result = work();
    (result, LARGEST.get())
}

/// Runs `work` and returns its result with the number of its allocations on this thread, growing included.
pub fn allocations<T>(work: impl FnOnce() -> T) -> (T, usize) {
    COUNT.set(0);
    let result = work();
    (result, COUNT.get())
}

fn note(size: usize) {
    // Fails only while a thread ends, when nobody asks any more.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to the system allocator unchanged; noting a size allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller keeps `realloc`'s contract, and the pointer came from `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
