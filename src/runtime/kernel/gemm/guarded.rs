//! Checks that no product reads or writes past its buffers: odd shapes, with every buffer next to an
//! inaccessible page.

use std::ops::Range;
use std::sync::Arc;

use super::fixed;
use super::format::ALL;
use super::tests::{GemmRandom, random_weights};
use super::*;
use crate::Dtype;
use crate::matmul::{self, MatmulShape};
use crate::memory::Arena;

const PAGE: usize = 4096;

/// Memory between two inaccessible pages. Contents are placed next to one of them.
struct Guarded {
    start: *mut u8,
    len: usize,
}

/// The inaccessible page next to a buffer.
#[derive(Debug, Clone, Copy)]
enum Against {
    Start,
    End,
}

impl Guarded {
    fn new(len: usize) -> Guarded {
        let len = len.next_multiple_of(PAGE) + 2 * PAGE;
        // SAFETY: a new mapping, and changes within it.
        unsafe {
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let start = libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0);
            assert!(start != libc::MAP_FAILED);
            let end = start.cast::<u8>().add(len - PAGE);
            assert_eq!(libc::mprotect(start, PAGE, libc::PROT_NONE), 0);
            assert_eq!(libc::mprotect(end.cast(), PAGE, libc::PROT_NONE), 0);
            Guarded { start: start.cast(), len }
        }
    }

    fn place(&self, bytes: usize, against: Against) -> Range<usize> {
        assert!(bytes <= self.len - 2 * PAGE);
        match against {
            Against::Start => PAGE..PAGE + bytes,
            Against::End => self.len - PAGE - bytes..self.len - PAGE,
        }
    }

    /// Copies `values` into the memory.
    fn hold<T: Copy>(&mut self, values: &[T], against: Against) -> &mut [T] {
        let place = self.place(size_of_val(values), against);
        // SAFETY: within the accessible part; its ends are page-aligned, so that whole values keep their alignment.
        unsafe {
            let to = self.start.add(place.start).cast::<T>();
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
            std::slice::from_raw_parts_mut(to, values.len())
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Memory for the weights, the activations and the output of a product.
struct Room([Guarded; 3]);

impl Room {
    /// Runs `product(weights, x, out)` in the guarded memory and returns `out`.
    fn run(
        &mut self,
        against: Against,
        weights: &[u8],
        x: &[f32],
        outputs: usize,
        product: impl Fn(&[u8], &[f32], &mut [f32]),
    ) -> Vec<u32> {
        let [w, x_room, out] = &mut self.0;
        let out = out.hold(&vec![f32::NAN; outputs], against);
        product(w.hold(weights, against), x_room.hold(x, against), out);
        out.iter().map(|value| value.to_bits()).collect()
    }
}

/// Checks that every variant gives the same bits in guarded and in ordinary memory.
fn check(room: &mut Room, dtype: Dtype, [n, k, m]: [usize; 3], random: &mut GemmRandom, pool: &Pool) {
    let x = random.values(m * k);
    let weights = match dtype {
        Dtype::F32 => random.values(n * k).iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::F16 | Dtype::Bf16 => {
            (0..n * k).flat_map(|_| (random.next() as u16 & 0xbfff).to_le_bytes()).collect()
        }
        _ => random_weights(dtype, n * k, random.next()),
    };
    for against in [Against::Start, Against::End] {
        let mut expected: Option<Vec<u32>> = None;
        for (isa, variant) in Isa::available().flat_map(|isa| Variant::within(isa).map(move |v| (isa, v))) {
            let got = room.run(against, &weights, &x, n * m, |w, x, out| match dtype {
                Dtype::F32 if m > 10 => {
                    let mut rows = plain::PlainActivations::default();
                    rows.fill(isa, x, k, pool);
                    let w: &[f32] = bytemuck::cast_slice(w);
                    let read = |rows: Range<usize>, compute: &mut dyn FnMut(&[f32])| {
                        compute(&w[rows.start * k..rows.end * k]);
                    };
                    plain::matmul(isa, n, read, &rows, out, pool);
                }
                Dtype::F32 => matmul::block(isa, MatmulShape { k, m }, bytemuck::cast_slice(w), x, out),
                Dtype::F16 | Dtype::Bf16 => {
                    let bytes: &'static [u8] = {
                        // SAFETY: the guarded memory outlives the weights, which this call drops.
                        unsafe { std::slice::from_raw_parts(w.as_ptr(), w.len()) }
                    };
                    let in_place = fixed::FixedWeights::in_place(isa, dtype, [n, k], Arc::new(bytes));
                    let source = MatrixSource::new(dtype, [n, k], w);
                    let packed = fixed::FixedWeights::pack(isa, &source, &Arena::default(), pool).unwrap();
                    let mut rows = fixed::FixedActivations::default();
                    rows.quantize(isa, x, k, pool);
                    let mut other = out.to_vec();
                    fixed::matmul(isa, &in_place.unwrap(), &rows, &mut other, pool);
                    fixed::matmul(isa, &packed.unwrap(), &rows, out, pool);
                    assert!(out.iter().zip(&other).all(|(a, b)| a.to_bits() == b.to_bits()), "in place");
                }
                _ => {
                    let w = Packed::pack(&MatrixSource::new(dtype, [n, k], w), &Arena::default(), pool)
                        .unwrap()
                        .unwrap();
                    let mut rows = Activations::default();
                    rows.quantize(isa, x, k, pool);
                    matmul_by(variant, &rows, [(&w, &mut *out)], pool);
                }
            });
            let expected = expected.get_or_insert_with(|| got.clone());
            assert!(got == *expected, "{dtype:?} {n} x {k}, {m} rows, {variant:?} {against:?}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "no mprotect")]
fn odd_shapes_stay_within_their_buffers() {
    let mut room = Room([(); 3].map(|()| Guarded::new(1 << 20)));
    let pool = Pool::new(2).unwrap();
    let mut random = GemmRandom(2024);
    for dtype in ALL.into_iter().chain([Dtype::F32, Dtype::F16, Dtype::Bf16]) {
        for _ in 0..6 {
            let cols = dtype.block_len() * (1 + random.below(if dtype.is_quantized() { 5 } else { 130 }));
            check(&mut room, dtype, [1 + random.below(70), cols, 1 + random.below(20)], &mut random, &pool);
        }
        check(&mut room, dtype, [33, dtype.block_len().max(32), 100], &mut random, &pool);
    }
}

#[test]
#[cfg_attr(miri, ignore = "no processes")]
fn the_forbidden_pages_are_forbidden() {
    let guarded = Guarded::new(100);
    let place = guarded.place(100, Against::End);
    // SAFETY: the child does nothing but read one byte, which ends it, and the parent waits for it.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            let byte = guarded.start.add(place.end).read_volatile();
            libc::_exit(i32::from(byte));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert!(libc::WIFSIGNALED(status), "reading past the end went well: {status}");
    }
}
