//! The two products of attention, for a few queries at a time whose sums stay in registers.
//!
//! Every sum is one chain of fused multiply-adds in ascending order, over coordinates for a score and over
//! tokens for a mixed value, so the result depends neither on the number of queries side by side nor on the
//! width of the registers. Scores of keys in the layout of values have a chain for each of 16 lanes.

use half::f16;

use super::lanes::VectorLanes;
use super::packed::{PackedForm, Unpacked};
use super::page::{BLOCK, KvPart, PAGE_TOKENS};
use super::stored::Stored;
use crate::dot::sum_lanes;
use crate::wide::LANES;

/// Registers of 16 numbers for a page's scores.
const PAGE_LANES: usize = PAGE_TOKENS / LANES;

/// One head's keys or values of a page: its elements, and its scales if it has some.
#[derive(Clone, Copy)]
pub struct KvBlock<E> {
    pub elements: *const E,
    pub scales: *const f16,
}

impl<E> KvBlock<E> {
    /// Panics if there are too few bytes or they are not aligned for `E`.
    pub fn new<S: Stored<Element = E>>(bytes: &[u8], head_dim: usize) -> Self {
        let elements = PAGE_TOKENS * head_dim * size_of::<E>();
        let scales = if S::SCALED { 2 * PAGE_TOKENS * head_dim.div_ceil(BLOCK) } else { 0 };
        assert_eq!(bytes.len(), elements + scales, "the block of a head");
        assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<E>()), "aligned elements");
        assert!(!S::SCALED || elements.is_multiple_of(2), "aligned scales");
        KvBlock { elements: bytes.as_ptr().cast(), scales: bytes[elements..].as_ptr().cast() }
    }

    /// Unpacks packed rows. `E` is `i8`. Panics if there are too few bytes.
    #[inline(always)]
    pub fn unpacked(
        form: PackedForm,
        part: KvPart,
        bytes: &[u8],
        dim: usize,
        unpacked: &mut Unpacked,
    ) -> Self {
        let (codes, scales) = form.unpack(part, bytes, dim, unpacked);
        KvBlock { elements: codes.as_ptr().cast(), scales: scales.as_ptr() }
    }
}

/// Prefetches `count` elements of the next block into the second-level cache. Blocks of a few KiB are too short for
/// the processor's own prefetching, and the first-level cache has too few outstanding lines.
#[inline(always)]
pub fn prefetch<E>(next: Option<*const E>, element: usize, count: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(next) = next {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let first = next.wrapping_add(element);
        for line in (0..count * size_of::<E>()).step_by(64) {
            // SAFETY: every x86-64 has the instruction, and it faults nowhere.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(first.wrapping_byte_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (next, element, count);
}

/// Computes `scores[query][token] = q[query] . keys[token]` for the tokens of one page, and prefetches the `next`
/// block.
///
/// `q` points to `Q` rows of `head_dim` numbers, `scores` to the first of `Q` rows `stride` apart.
///
/// # Safety
/// The processor has `V`'s instruction set; `keys` is a [`KvBlock`] of `head_dim`; the rows can be read and written.
#[inline(always)]
pub unsafe fn score_page<V: VectorLanes, S: Stored, const Q: usize>(
    head_dim: usize,
    q: *const f32,
    (keys, next): (KvBlock<S::Element>, Option<*const S::Element>),
    (scores, stride): (*mut f32, usize),
) {
    // SAFETY: by this function's contract; coordinates stay below `head_dim`, blocks below their number.
    unsafe {
        let mut sums = [[V::zero(); PAGE_LANES]; Q];
        let per_scale = if S::SCALED { BLOCK } else { head_dim };
        for block in 0..head_dim.div_ceil(per_scale) {
            let mut parts = [[V::zero(); PAGE_LANES]; Q];
            for dim in block * per_scale..head_dim.min((block + 1) * per_scale) {
                prefetch(next, dim * PAGE_TOKENS, PAGE_TOKENS);
                let key = keys.elements.add(dim * PAGE_TOKENS);
                let key: [V; PAGE_LANES] = std::array::from_fn(|lane| S::load(key.add(lane * LANES)));
                for query in 0..Q {
                    let q = V::splat(*q.add(query * head_dim + dim));
                    for lane in 0..PAGE_LANES {
                        parts[query][lane] = parts[query][lane].fma(q, key[lane]);
                    }
                }
            }
            if S::SCALED {
                let scale = keys.scales.add(block * PAGE_TOKENS);
                let scale: [V; PAGE_LANES] = std::array::from_fn(|lane| V::load_f16(scale.add(lane * LANES)));
                for query in 0..Q {
                    for lane in 0..PAGE_LANES {
                        sums[query][lane] = sums[query][lane].fma(parts[query][lane], scale[lane]);
                    }
                }
            } else {
                sums = parts;
            }
        }
        for query in 0..Q {
            for lane in 0..PAGE_LANES {
                sums[query][lane].store(scores.add(query * stride + lane * LANES));
            }
        }
    }
}

/// Keys of a page in the layout of values that are scored side by side.
const ROW_TOKENS: usize = 2;

/// Computes what [`score_page`] does for keys in the layout of values, `[PAGE_TOKENS][head_dim]`.
///
/// # Safety
/// As [`score_page`].
#[inline(always)]
pub unsafe fn score_rows<V: VectorLanes, S: Stored, const Q: usize>(
    head_dim: usize,
    q: *const f32,
    (keys, next): (KvBlock<S::Element>, Option<*const S::Element>),
    (scores, stride): (*mut f32, usize),
) {
    let per_scale = if S::SCALED { BLOCK } else { head_dim };
    for token in (0..PAGE_TOKENS).step_by(ROW_TOKENS) {
        // SAFETY: by this function's contract; coordinates stay below `head_dim`, blocks below their number.
        unsafe {
            let mut sums = [[V::zero(); ROW_TOKENS]; Q];
            for block in 0..head_dim.div_ceil(per_scale) {
                let range = (block * per_scale, head_dim.min((block + 1) * per_scale));
                let rows = keys.elements.add(token * head_dim);
                prefetch(next, token * head_dim + range.0, ROW_TOKENS * (range.1 - range.0));
                let parts = score_block::<V, S, Q>(head_dim, range, q, rows);
                if S::SCALED {
                    for at in 0..ROW_TOKENS {
                        let scale = V::splat((*keys.scales.add(block * PAGE_TOKENS + token + at)).to_f32());
                        for query in 0..Q {
                            sums[query][at] = sums[query][at].fma(parts[query][at], scale);
                        }
                    }
                } else {
                    sums = parts;
                }
            }
            for query in 0..Q {
                for at in 0..ROW_TOKENS {
                    *scores.add(query * stride + token + at) = sum_lanes(sums[query][at].lanes());
                }
            }
        }
    }
}

/// Multiplies coordinates `from..to` of the queries with those of a few keys, whose rows begin at `rows`; lanes apart.
///
/// # Safety
/// As [`score_rows`].
#[inline(always)]
unsafe fn score_block<V: VectorLanes, S: Stored, const Q: usize>(
    head_dim: usize,
    (from, to): (usize, usize),
    q: *const f32,
    rows: *const S::Element,
) -> [[V; ROW_TOKENS]; Q] {
    // SAFETY: by this function's contract; the last lanes, which may lie after the row, are copied.
    unsafe {
        let mut parts = [[V::zero(); ROW_TOKENS]; Q];
        let whole = from + (to - from) / LANES * LANES;
        for dim in (from..whole).step_by(LANES) {
            let key: [V; ROW_TOKENS] = std::array::from_fn(|at| S::load(rows.add(at * head_dim + dim)));
            for query in 0..Q {
                let q = V::load_f32(q.add(query * head_dim + dim));
                for at in 0..ROW_TOKENS {
                    parts[query][at] = parts[query][at].fma(q, key[at]);
                }
            }
        }
        if whole < to {
            let key: [V; ROW_TOKENS] = std::array::from_fn(|at| {
                let mut padded = [S::Element::default(); LANES];
                std::ptr::copy_nonoverlapping(
                    rows.add(at * head_dim + whole),
                    padded.as_mut_ptr(),
                    to - whole,
                );
                S::load(padded.as_ptr())
            });
            for query in 0..Q {
                let mut padded = [0.0; LANES];
                std::ptr::copy_nonoverlapping(
                    q.add(query * head_dim + whole),
                    padded.as_mut_ptr(),
                    to - whole,
                );
                let q = V::load_f32(padded.as_ptr());
                for at in 0..ROW_TOKENS {
                    parts[query][at] = parts[query][at].fma(q, key[at]);
                }
            }
        }
        parts
    }
}

/// Adds `weights[query][token] * values[token]` to `mixed[query]`, for tokens `from..to` of one page, and prefetches
/// the `next` block.
///
/// Rows are `head_dim` long, of which the first `value_dim` are values.
/// `weights` points to the first query's weights of this page, with the other queries' `weight_stride` apart; `mixed`
/// to `Q` rows `mixed_stride` apart, each long enough for whole registers.
///
/// # Safety
/// The processor has `V`'s instruction set; `values` is a [`KvBlock`] of `head_dim`; `to` is at most [`PAGE_TOKENS`]; the rows
/// can be read and written.
#[inline(always)]
pub unsafe fn mix_page<V: VectorLanes, S: Stored, const Q: usize>(
    [head_dim, value_dim]: [usize; 2],
    (values, next): (KvBlock<S::Element>, Option<*const S::Element>),
    (from, to): (usize, usize),
    (weights, weight_stride): (*const f32, usize),
    (mixed, mixed_stride): (*mut f32, usize),
) {
    let registers = value_dim / LANES;
    let mut register = 0;
    let call =
        Mix::<S> { head_dim, value_dim, values, next, from, to, weights, weight_stride, mixed, mixed_stride };
    // SAFETY: by this function's contract; the registers lie within the row.
    unsafe {
        if 4 * Q <= V::SUMS {
            while register + 4 <= registers {
                call.registers::<V, Q, 4>(register);
                register += 4;
            }
        }
        if 2 * Q <= V::SUMS {
            while register + 2 <= registers {
                call.registers::<V, Q, 2>(register);
                register += 2;
            }
        }
        while register < registers {
            call.registers::<V, Q, 1>(register);
            register += 1;
        }
        if registers * LANES < value_dim {
            call.tail::<V, Q>();
        }
    }
}

/// The arguments of [`mix_page`].
struct Mix<S: Stored> {
    head_dim: usize,
    value_dim: usize,
    values: KvBlock<S::Element>,
    next: Option<*const S::Element>,
    from: usize,
    to: usize,
    weights: *const f32,
    weight_stride: usize,
    mixed: *mut f32,
    mixed_stride: usize,
}

/// Weights of one page multiplied by the scales of a block.
type Scaled<const Q: usize> = [[f32; PAGE_TOKENS]; Q];

impl<S: Stored> Mix<S> {
    /// Computes `N` registers of each row, from number `first` on; with scales, an even number or a single one.
    ///
    /// # Safety
    /// As [`mix_page`]; the registers lie within the row.
    #[inline(always)]
    unsafe fn registers<V: VectorLanes, const Q: usize, const N: usize>(&self, first: usize) {
        const PER_BLOCK: usize = BLOCK / LANES;
        // SAFETY: by this function's contract.
        unsafe {
            let scaled = self.scaled::<V, Q>(first / PER_BLOCK);
            let scaled_next = if N > PER_BLOCK { self.scaled::<V, Q>(first / PER_BLOCK + 1) } else { scaled };
            let mut sums: [[V; N]; Q] = std::array::from_fn(|query| {
                std::array::from_fn(|n| {
                    V::load_f32(self.mixed.add(query * self.mixed_stride + (first + n) * LANES))
                })
            });
            for token in self.from..self.to {
                let element = token * self.head_dim + first * LANES;
                prefetch(self.next, element, N * LANES);
                let row = self.values.elements.add(element);
                let row: [V; N] = std::array::from_fn(|n| S::load(row.add(n * LANES)));
                for query in 0..Q {
                    if S::SCALED {
                        for n in 0..N {
                            let scaled = if n < PER_BLOCK { &scaled } else { &scaled_next };
                            let weight = V::splat(*scaled.get_unchecked(query).get_unchecked(token));
                            sums[query][n] = sums[query][n].fma(weight, row[n]);
                        }
                    } else {
                        let weight = V::splat(*self.weights.add(query * self.weight_stride + token));
                        for n in 0..N {
                            sums[query][n] = sums[query][n].fma(weight, row[n]);
                        }
                    }
                }
            }
            for query in 0..Q {
                for n in 0..N {
                    sums[query][n].store(self.mixed.add(query * self.mixed_stride + (first + n) * LANES));
                }
            }
        }
    }

    /// # Safety
    /// As [`mix_page`]; `block` is one of the row's.
    #[inline(always)]
    unsafe fn scaled<V: VectorLanes, const Q: usize>(&self, block: usize) -> Scaled<Q> {
        let mut scaled = [[0.0; PAGE_TOKENS]; Q];
        if S::SCALED {
            // SAFETY: by this function's contract.
            unsafe {
                let scales = self.values.scales.add(block * PAGE_TOKENS);
                for lane in 0..PAGE_LANES {
                    let scale = V::load_f16(scales.add(lane * LANES));
                    for query in 0..Q {
                        let weights = self.weights.add(query * self.weight_stride + lane * LANES);
                        V::load_f32(weights).mul(scale).store(scaled[query].as_mut_ptr().add(lane * LANES));
                    }
                }
            }
        }
        scaled
    }

    /// Computes the coordinates after the last whole register.
    ///
    /// # Safety
    /// As [`mix_page`].
    #[inline(always)]
    unsafe fn tail<V: VectorLanes, const Q: usize>(&self) {
        let start = self.value_dim / LANES * LANES;
        // SAFETY: by this function's contract; only elements below `value_dim` are read.
        unsafe {
            let scaled = self.scaled::<V, Q>(start / BLOCK);
            let mut padded = [S::Element::default(); LANES];
            for token in self.from..self.to {
                let row = self.values.elements.add(token * self.head_dim + start);
                std::ptr::copy_nonoverlapping(row, padded.as_mut_ptr(), self.value_dim - start);
                let row: V = S::load(padded.as_ptr());
                for query in 0..Q {
                    let weight = match S::SCALED {
                        true => scaled[query][token],
                        false => *self.weights.add(query * self.weight_stride + token),
                    };
                    let sum = self.mixed.add(query * self.mixed_stride + start);
                    V::load_f32(sum).fma(V::splat(weight), row).store(sum);
                }
            }
        }
    }
}
