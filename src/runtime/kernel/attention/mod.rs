//! Attention over pages, causal but within images, read in place, for all query heads that share a KV head together.
//!
//! Invariant, the definition of every output, independent of other rows, the number of threads and the
//! registers:
//!
//! ```text
//! for each run of 256 positions, counted from position 0, in ascending order, over the positions j that the query sees:
//!     score[j] = rule(sum over coordinates, ascending, of q * key[j])      8-bit keys: by block, times its scale;
//!                values in keys: coordinate d in lane d % 16, lanes in the order of `dot`
//!     max = largest score; weight[j] = exp(score[j] - max)
//!     sum = the weights, position j in lane j % 16, lanes in the order of `dot`
//!     mixed = sum over j, ascending, of weight[j] * value[j]               8-bit values: weight times scale first
//!     merge (max, sum, mixed) with the runs before                         online softmax, Milakov and Gimelshein 2018
//! out = mixed / sum, after a sink has joined max and sum
//! ```
//!
//! Packed rows are unpacked to 8-bit ones and are rotated; so are the queries, and a run's `mixed` is rotated back before it is
//! merged.
//!
//! Runs can be reduced by different threads and merged afterwards, or by one thread in order: the merges are
//! the same. Positions that a query does not see are never multiplied, so an infinity in them has no effect.

mod index;
mod lanes;
mod packed;
mod page;
mod stored;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

pub use index::{IndexQuery, KeyBlocks, index_page};
pub(crate) use lanes::VectorLanes;
pub use packed::Unpacked;
pub use page::{BLOCK, KvPart, PAGE_TOKENS};
use stored::{F16, F32, Q8, Stored};
pub use stored::{KvType, KvValues, copy_rows, read_row, write_row};
use tile::{KvBlock, mix_page, prefetch, score_page, score_rows};

use super::dot::sum_lanes;
use super::isa::{Isa, dispatch};
use super::math::{exp, exp_minus_body, softcap_body};
use super::wide::{LANES, Wide, dispatch_wide};

/// Number of pages that are reduced together.
pub const RUN_PAGES: usize = 8;

/// Number of positions that are reduced together; part of the definition.
pub const RUN_TOKENS: usize = RUN_PAGES * PAGE_TOKENS;

/// Rule that turns inner products into scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRule {
    pub scale: f32,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

/// Keys and values of a page, one block of [`PAGE_TOKENS`] rows per KV head in the layout of [`write_row`]. If the keys hold
/// the values, both are the same block, in the layout of values.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadPage<'a> {
    pub keys: &'a [u8],
    pub values: &'a [u8],
}

/// Queries of consecutive positions of a sequence, for some consecutive KV heads.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// `[kv_heads][heads][head_dim]` for each row; rows begin `row_stride` apart.
    pub q: &'a [f32],
    pub row_stride: usize,
    pub rows: usize,
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub heads: usize,
    pub head_dim: usize,
    pub values: KvValues,
    /// Position of the first row.
    pub start: usize,
    /// Number of positions that a row sees, including its own; `None` for all.
    pub window: Option<usize>,
    /// For each row, the positions that it sees besides those; empty if there are none. See [`visible`].
    pub spans: &'a [Range<usize>],
    pub rule: ScoreRule,
    pub kv_type: KvType,
}

/// Returns the positions that a row sees: its own and earlier ones, within a window that includes its own, and those of its
/// span. Spans contain their rows, and consecutive rows' ranges may not step back, at either end.
#[inline(always)]
pub fn visible(position: usize, window: Option<usize>, span: Option<&Range<usize>>) -> Range<usize> {
    let start = window.map_or(0, |window| (position + 1).saturating_sub(window));
    match span {
        None => start..position + 1,
        Some(span) => start.min(span.start)..span.end.max(position + 1),
    }
}

impl Queries<'_> {
    /// Returns the number of queries that share a KV head.
    fn per_kv_head(&self) -> usize {
        self.rows * self.heads
    }

    fn count(&self) -> usize {
        self.kv_heads * self.per_kv_head()
    }

    /// Returns the number of values of a head's output.
    fn value_dim(&self) -> usize {
        self.values.dim(self.head_dim)
    }

    /// Returns the length of the rows of keys or values.
    fn row_dim(&self, part: KvPart) -> usize {
        match part {
            KvPart::Keys => self.head_dim,
            KvPart::Values => self.values.row_dim(self.head_dim),
        }
    }

    /// Returns the positions that a row sees.
    #[inline(always)]
    fn visible(&self, row: usize) -> Range<usize> {
        visible(self.start + row, self.window, self.spans.get(row))
    }

    /// Returns the positions that any row sees.
    fn all_visible(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.rows - 1).end
    }

    /// Returns the runs that contain any of them.
    pub fn runs(&self) -> Range<usize> {
        let visible = self.all_visible();
        visible.start / RUN_TOKENS..visible.end.div_ceil(RUN_TOKENS)
    }
}

/// Returns the positions of `range` within a run, relative to the run's start.
fn within(range: Range<usize>, run: usize) -> Range<usize> {
    let place = |position: usize| position.saturating_sub(run * RUN_TOKENS).min(RUN_TOKENS);
    place(range.start)..place(range.end)
}

/// Returns the length of a query's partial result: `value_dim` mixed values, the largest score, the sum of the
/// weights.
pub const fn partial_len(value_dim: usize) -> usize {
    value_dim + 2
}

/// Least distance in bytes between the block being read and the block being prefetched; measured.
const AHEAD_BYTES: usize = 8 << 10;

/// Temporary memory of [`attend`], kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    /// `[query][head_dim]`, queries by KV head, then row, then head.
    q: Vec<f32>,
    /// `[query][RUN_TOKENS]`: scores, then weights.
    scores: Vec<f32>,
    /// `[query][mixed_stride]`.
    mixed: Vec<f32>,
    /// Largest score and sum of weights, by query.
    stats: Vec<[f32; 2]>,
    /// Positions of a run that each query sees.
    seen: Vec<Range<usize>>,
    unpacked: Unpacked,
}

/// Reduces `runs` of the visible positions to one partial result per query, `[kv_heads][rows][heads][partial_len]`.
///
/// `page` returns a page of the sequence by number, for the KV heads of `queries`; it is only called for pages that
/// some row sees.
///
/// # Panics
/// If a slice is too short, or a page does not match `kv_type` and `head_dim`.
pub fn attend<'a>(
    isa: Isa,
    queries: &Queries<'_>,
    runs: Range<usize>,
    page: &dyn Fn(usize) -> HeadPage<'a>,
    scratch: &mut Scratch,
    partials: &mut [f32],
) {
    let Queries { rows, kv_heads, heads, head_dim, row_stride, .. } = *queries;
    let value_dim = queries.value_dim();
    assert!(value_dim <= head_dim, "values are at most as wide as keys");
    assert!(queries.kv_type.fits(head_dim, queries.values), "whole parts of the rotation");
    assert_eq!(partials.len(), queries.count() * partial_len(value_dim), "a partial result for each query");
    for partial in partials.chunks_exact_mut(partial_len(value_dim)) {
        partial[..value_dim].fill(0.0);
        partial[value_dim..].copy_from_slice(&EMPTY);
    }
    scratch.q.clear();
    for (kv_head, row) in (0..kv_heads).flat_map(|kv_head| (0..rows).map(move |row| (kv_head, row))) {
        let start = row * row_stride + kv_head * heads * head_dim;
        scratch.q.extend_from_slice(&queries.q[start..][..heads * head_dim]);
    }
    if queries.kv_type.packed().is_some() {
        packed::rotate(&mut scratch.q, packed::part_len(head_dim));
    }
    scratch.scores.resize(queries.count() * RUN_TOKENS, 0.0);
    scratch.mixed.resize(queries.count() * mixed_stride(value_dim), 0.0);
    scratch.stats.resize(queries.count(), EMPTY);
    for run in runs {
        let visible = within(queries.all_visible(), run);
        let numbers = visible.start / PAGE_TOKENS..visible.end.div_ceil(PAGE_TOKENS);
        let mut pages = [HeadPage::default(); RUN_PAGES];
        for number in numbers.clone() {
            pages[number] = page(run * RUN_PAGES + number);
        }
        let run = RunTask { queries, run, pages: &pages, numbers };
        reduce(isa, &run, scratch, partials);
    }
}

/// Largest score and sum of weights of no positions.
const EMPTY: [f32; 2] = [f32::NEG_INFINITY, 0.0];

/// Returns the length of mixed values, padded to whole registers.
fn mixed_stride(value_dim: usize) -> usize {
    value_dim.next_multiple_of(LANES)
}

/// Merges the result of later positions into that of earlier ones.
#[inline(always)]
fn merge(values: &mut [f32], state: &mut [f32; 2], mixed: &[f32], stats: [f32; 2]) {
    if stats == EMPTY {
        return;
    }
    if *state == EMPTY {
        values.copy_from_slice(mixed);
        *state = stats;
        return;
    }
    let max = state[0].max(stats[0]);
    let factors = [exp(state[0] - max), exp(stats[0] - max)];
    for (value, mixed) in values.iter_mut().zip(mixed) {
        *value = mixed.mul_add(factors[1], *value * factors[0]);
    }
    *state = [max, stats[1].mul_add(factors[1], state[1] * factors[0])];
}

/// Splits a partial result into mixed values, largest score and sum of weights.
#[inline(always)]
fn parts(partial: &[f32], value_dim: usize) -> (&[f32], [f32; 2]) {
    (&partial[..value_dim], [partial[value_dim], partial[value_dim + 1]])
}

#[inline(always)]
fn finish_body(partials: &[f32], stride: usize, sink: Option<f32>, out: &mut [f32]) {
    let mut state = EMPTY;
    for partial in partials.chunks(stride) {
        let (mixed, stats) = parts(partial, out.len());
        merge(out, &mut state, mixed, stats);
    }
    let (mut factor, mut sum) = (1.0, state[1]);
    if let Some(sink) = sink {
        let max = state[0].max(sink);
        factor = exp(state[0] - max);
        sum = sum.mul_add(factor, exp(sink - max));
    }
    let factor = factor / sum;
    out.iter_mut().for_each(|out| *out *= factor);
}

dispatch! {
    /// Merges the partial results of one query, which begin `stride` apart, earlier runs first, into `out`,
    /// `[value_dim]`.
    ///
    /// A sink is a score that takes part in the softmax without a value (gpt-oss).
    pub fn finish(partials: &[f32], stride: usize, sink: Option<f32>, out: &mut [f32]) = finish_body
}

/// The reduction of one run.
struct RunTask<'a> {
    queries: &'a Queries<'a>,
    run: usize,
    pages: &'a [HeadPage<'a>; RUN_PAGES],
    /// Numbers of the pages that some row sees.
    numbers: Range<usize>,
}

impl RunTask<'_> {
    /// Writes the positions of the run that each query sees.
    fn see(&self, seen: &mut Vec<Range<usize>>) {
        let Queries { kv_heads, rows, heads, .. } = *self.queries;
        let rows = (0..kv_heads).flat_map(|_| 0..rows);
        seen.clear();
        for row in rows {
            seen.extend(std::iter::repeat_n(within(self.queries.visible(row), self.run), heads));
        }
    }

    /// Returns a page's keys or values for one KV head, as they are stored.
    #[inline(always)]
    fn bytes(&self, part: KvPart, page: usize, kv_head: usize) -> &[u8] {
        let bytes = match part {
            KvPart::Keys => self.pages[page].keys,
            KvPart::Values => self.pages[page].values,
        };
        let len = PAGE_TOKENS * self.queries.kv_type.row_bytes(self.queries.row_dim(part));
        &bytes[kv_head * len..][..len]
    }

    /// Returns them for the kernels, with the block to prefetch. Packed ones are unpacked, while the next are prefetched.
    #[inline(always)]
    fn block<S: Stored>(
        &self,
        part: KvPart,
        [page, kv_head]: [usize; 2],
        unpacked: &mut Unpacked,
    ) -> (KvBlock<S::Element>, Option<*const S::Element>) {
        let (bytes, dim) = (self.bytes(part, page, kv_head), self.queries.row_dim(part));
        let next = self.next(part, page, kv_head);
        if let Some(form) = self.queries.kv_type.packed() {
            let layout = if part == KvPart::Keys { self.queries.values.key_layout() } else { part };
            prefetch(next, 0, bytes.len());
            return (KvBlock::unpacked(form, layout, bytes, dim, unpacked), None);
        }
        (KvBlock::new::<S>(bytes, dim), next.map(<*const u8>::cast))
    }

    /// Returns the block [`AHEAD_BYTES`] after this one.
    #[inline(always)]
    fn next(&self, part: KvPart, page: usize, kv_head: usize) -> Option<*const u8> {
        let Queries { kv_heads, head_dim, kv_type, .. } = *self.queries;
        let ahead = AHEAD_BYTES.div_ceil(PAGE_TOKENS * kv_type.row_bytes(head_dim));
        let index = (page - self.numbers.start) * kv_heads + kv_head + ahead;
        let count = self.numbers.len() * kv_heads;
        let (part, index) = match part {
            part if index < count => (part, index),
            KvPart::Keys if index < 2 * count => (KvPart::Values, index - count),
            _ => return None,
        };
        let page = self.numbers.start + index / kv_heads;
        Some(self.bytes(part, page, index % kv_heads).as_ptr())
    }
}

dispatch_wide! {
    fn reduce(run: &RunTask<'_>, scratch: &mut Scratch, partials: &mut [f32]) = reduce_any
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn reduce_any<V: VectorLanes>(run: &RunTask<'_>, scratch: &mut Scratch, partials: &mut [f32]) {
    // SAFETY: by this function's contract.
    unsafe {
        match run.queries.kv_type {
            KvType::F32 => reduce_body::<V, F32>(run, scratch, partials),
            KvType::F16 => reduce_body::<V, F16>(run, scratch, partials),
            KvType::Q8_0 | KvType::Q6_0 | KvType::Q5_1 => reduce_body::<V, Q8>(run, scratch, partials),
        }
    }
}

/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn reduce_body<V: VectorLanes, S: Stored>(
    run: &RunTask<'_>,
    scratch: &mut Scratch,
    partials: &mut [f32],
) {
    run.see(&mut scratch.seen);
    // SAFETY: by this function's contract; `attend` made the scratch large enough.
    unsafe {
        score::<V, S>(run, scratch);
        // First all maxima, then all exponentials: those of a row wait for its maximum, but not for other rows'.
        let rows = scratch.scores.chunks_exact_mut(RUN_TOKENS).zip(&scratch.seen);
        for ((row, seen), stats) in rows.zip(&mut scratch.stats) {
            stats[0] = scale_to_max::<V>(run.queries.rule, row, seen);
        }
        let rows = scratch.scores.chunks_exact_mut(RUN_TOKENS).zip(&scratch.seen);
        for ((row, seen), [max, sum]) in rows.zip(&mut scratch.stats) {
            *sum = exp_to_sum::<V>(&mut row[whole_pages(seen)], *max);
        }
        mix::<V, S>(run, scratch);
    }
    let value_dim = run.queries.value_dim();
    if run.queries.kv_type.packed().is_some() {
        let part = packed::part_len(run.queries.row_dim(KvPart::Values));
        for mixed in scratch.mixed.chunks_exact_mut(mixed_stride(value_dim)) {
            packed::rotate(&mut mixed[..value_dim], part);
        }
    }
    let mixed = scratch.mixed.chunks_exact(mixed_stride(value_dim)).zip(&scratch.stats);
    for (partial, (mixed, stats)) in partials.chunks_exact_mut(partial_len(value_dim)).zip(mixed) {
        let (values, state) = partial.split_at_mut(value_dim);
        let state = state.first_chunk_mut().expect("two numbers after the values");
        merge(values, state, &mixed[..value_dim], *stats);
    }
}

/// Most queries that are scored side by side: a page's scores take two registers each.
const MOST_SCORED: usize = 8;

/// Returns the most queries that are mixed side by side. Half as many allow four registers of a token's values to be
/// loaded for them, which is faster unless the weights need a scale of their own in every second register.
const fn most_mixed<S: Stored>() -> usize {
    if S::SCALED { 8 } else { 4 }
}

/// Returns the number of queries to compute side by side: the largest number, at most `most`, for which there is a
/// kernel.
#[inline(always)]
fn tile<V: VectorLanes>(rest: usize, most: usize) -> usize {
    [8, 4, 3, 2].into_iter().find(|size| *size <= rest.min(most) && 2 * size <= V::SUMS).unwrap_or(1)
}

/// Calls `$kernel::<V, S, Q>` with a tile's size as a constant.
macro_rules! with_tile {
    ($size:expr, $kernel:ident::<$v:ty, $s:ty>($($arg:expr),* $(,)?)) => {
        match $size {
            8 => $kernel::<$v, $s, 8>($($arg),*),
            4 => $kernel::<$v, $s, 4>($($arg),*),
            3 => $kernel::<$v, $s, 3>($($arg),*),
            2 => $kernel::<$v, $s, 2>($($arg),*),
            _ => $kernel::<$v, $s, 1>($($arg),*),
        }
    };
}
use with_tile;

/// Computes inner products of all queries with the pages that they see, page by page, so that memory is read
/// sequentially.
///
/// # Safety
/// The processor has `V`'s instruction set; the scratch is as [`attend`] makes it.
#[inline(always)]
unsafe fn score<V: VectorLanes, S: Stored>(run: &RunTask<'_>, scratch: &mut Scratch) {
    let head_dim = run.queries.head_dim;
    for page in run.numbers.clone() {
        for kv_head in 0..run.queries.kv_heads {
            let (keys, mut next) = run.block::<S>(KvPart::Keys, [page, kv_head], &mut scratch.unpacked);
            for (query, size) in tiles::<V>(run.queries, kv_head, MOST_SCORED) {
                // The first query sees furthest back, the last one furthest forward.
                let seen = scratch.seen[query].start..scratch.seen[query + size - 1].end;
                if on_page(&seen, page).is_empty() {
                    continue;
                }
                let keys = (keys, next.take());
                let q = scratch.q[query * head_dim..][..size * head_dim].as_ptr();
                let scores = &mut scratch.scores[query * RUN_TOKENS..][..size * RUN_TOKENS];
                let scores = (scores[page * PAGE_TOKENS..].as_mut_ptr(), RUN_TOKENS);
                // SAFETY: by this function's contract; the slices hold `size` rows.
                unsafe {
                    match run.queries.values.key_layout() {
                        KvPart::Keys => with_tile!(size, score_page::<V, S>(head_dim, q, keys, scores)),
                        KvPart::Values => with_tile!(size, score_rows::<V, S>(head_dim, q, keys, scores)),
                    }
                };
            }
        }
    }
}

/// Returns the part of a run's `range` on a page, relative to the page's start.
#[inline(always)]
fn on_page(range: &Range<usize>, page: usize) -> Range<usize> {
    let place = |position: usize| position.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
    place(range.start)..place(range.end)
}

/// Iterates over tiles of a KV head's queries: the first query and the number of queries of each.
#[inline(always)]
fn tiles<V: VectorLanes>(
    queries: &Queries<'_>,
    kv_head: usize,
    most: usize,
) -> impl Iterator<Item = (usize, usize)> + use<V> {
    let end = (kv_head + 1) * queries.per_kv_head();
    let mut query = kv_head * queries.per_kv_head();
    std::iter::from_fn(move || {
        let (first, size) = (query, tile::<V>(end - query, most));
        query += size;
        (first < end).then_some((first, size))
    })
}

/// Returns the positions of all pages of which a query sees some: a position's lane does not depend on the window's start.
#[inline(always)]
fn whole_pages(seen: &Range<usize>) -> Range<usize> {
    match seen.is_empty() {
        true => 0..0,
        false => seen.start / PAGE_TOKENS * PAGE_TOKENS..seen.end.next_multiple_of(PAGE_TOKENS),
    }
}

/// Applies the rule to the scores of one query, and hides those that it does not see; returns the largest, ignoring NaN.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn scale_to_max<V: VectorLanes>(rule: ScoreRule, row: &mut [f32], seen: &Range<usize>) -> f32 {
    if seen.is_empty() {
        return f32::NEG_INFINITY;
    }
    let pages = whole_pages(seen);
    let (start, row) = (pages.start, &mut row[pages]);
    let mut scale = rule.scale;
    if rule.softcap.is_some() || row.len() > seen.len() {
        row.iter_mut().for_each(|score| *score *= rule.scale);
        if let Some(cap) = rule.softcap {
            softcap_body(row, cap);
        }
        row[..seen.start - start].fill(f32::NEG_INFINITY);
        row[seen.end - start..].fill(f32::NEG_INFINITY);
        scale = 1.0;
    }
    // SAFETY: by this function's contract; blocks have 16 numbers.
    let lanes = unsafe {
        let (scale, mut largest) = (V::splat(scale), V::splat(f32::NEG_INFINITY));
        for block in row.as_chunks_mut::<LANES>().0 {
            let scaled = V::load(block).mul(scale);
            scaled.store(block.as_mut_ptr());
            largest = scaled.max(largest);
        }
        largest.lanes()
    };
    lanes.into_iter().fold(f32::NEG_INFINITY, |largest, lane| if lane > largest { lane } else { largest })
}

/// Computes `exp(x - max)` of a multiple of 16 scores; returns the sum, in the order of `dot`.
///
/// # Safety
/// The processor has `V`'s instruction set.
#[inline(always)]
unsafe fn exp_to_sum<V: Wide>(row: &mut [f32], max: f32) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let mut sums = V::zero();
        for block in row.as_chunks_mut::<LANES>().0 {
            exp_minus_body(block, max);
            sums = sums.add(V::load(block));
        }
        sum_lanes(sums.lanes())
    }
}

/// Adds the values multiplied by the weights: in tiles for positions that all queries see, one query at a time before
/// and after.
///
/// # Safety
/// The processor has `V`'s instruction set; the scratch is as [`attend`] makes it.
#[inline(always)]
unsafe fn mix<V: VectorLanes, S: Stored>(run: &RunTask<'_>, scratch: &mut Scratch) {
    scratch.mixed.fill(0.0);
    for page in run.numbers.clone() {
        for kv_head in 0..run.queries.kv_heads {
            let (values, mut next) = run.block::<S>(KvPart::Values, [page, kv_head], &mut scratch.unpacked);
            for (query, size) in tiles::<V>(run.queries, kv_head, most_mixed::<S>()) {
                let (first, last) = (scratch.seen[query].clone(), scratch.seen[query + size - 1].clone());
                let common = last.start..first.end.max(last.start);
                let alone = |scratch: &Scratch, query: usize| {
                    let own = scratch.seen[query].clone();
                    [own.start..own.end.min(common.start), own.start.max(common.end)..own.end]
                };
                // SAFETY: by this function's contract; the queries are those of a tile.
                unsafe {
                    if first != last {
                        for query in query..query + size {
                            let tokens = on_page(&alone(scratch, query)[0], page);
                            mix_tile::<V, S>(run, scratch, (query, 1), (values, None), page, tokens);
                        }
                    }
                    let tokens = on_page(&common, page);
                    mix_tile::<V, S>(run, scratch, (query, size), (values, next.take()), page, tokens);
                    if first != last {
                        for query in query..query + size {
                            let tokens = on_page(&alone(scratch, query)[1], page);
                            mix_tile::<V, S>(run, scratch, (query, 1), (values, None), page, tokens);
                        }
                    }
                }
            }
        }
    }
}

/// Adds tokens of a page for `size` queries from `query` on.
///
/// # Safety
/// As [`mix`], and these queries exist.
#[inline(always)]
unsafe fn mix_tile<V: VectorLanes, S: Stored>(
    run: &RunTask<'_>,
    scratch: &mut Scratch,
    (query, size): (usize, usize),
    values: (KvBlock<S::Element>, Option<*const S::Element>),
    page: usize,
    tokens: Range<usize>,
) {
    if tokens.is_empty() {
        return;
    }
    let dims = [run.queries.row_dim(KvPart::Values), run.queries.value_dim()];
    let stride = mixed_stride(dims[1]);
    let mixed = (scratch.mixed[query * stride..][..size * stride].as_mut_ptr(), stride);
    let weights = &scratch.scores[query * RUN_TOKENS..][..size * RUN_TOKENS];
    let weights = (weights[page * PAGE_TOKENS..].as_ptr(), RUN_TOKENS);
    let tokens = (tokens.start, tokens.end);
    // SAFETY: by this function's contract; the slices hold `size` rows.
    unsafe { with_tile!(size, mix_page::<V, S>(dims, values, tokens, weights, mixed)) };
}
