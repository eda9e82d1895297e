//! Chooses the positions that rows see, by an indexer's scores: runs of positions of each choice on all threads, then the choices;
//! a row has one, or one for each KV head.

use std::cell::RefCell;

use super::kv::CpuKv;
use super::{Cpu, CpuBuffer};
use crate::backend::{IndexerSpec, PAGE_TOKENS, RowSpan, SelectedKeys};
use llmctl_kernel::Isa;
use llmctl_kernel::attention::{IndexQuery, RUN_TOKENS, Unpacked, index_page};

/// Scores that are held at once, but at least those of one row.
pub const HELD_SCORES: usize = 1 << 20;

thread_local! {
    static ORDER: RefCell<[Vec<u32>; 2]> = RefCell::default();
}

/// The choices of rows that do not see all positions, and their scores; kept between calls to reuse the memory.
#[derive(Default)]
pub struct IndexPlan {
    choices: Vec<IndexChoice>,
    /// `[choices held at once][runs][RUN_TOKENS]`.
    scores: Vec<f32>,
}

/// A choice of a row.
#[derive(Debug, Clone, Copy)]
struct IndexChoice {
    span: usize,
    /// Row of the step, times the choices of a row, plus the choice's number.
    index: usize,
    position: usize,
}

/// The inputs that all rows share.
struct IndexJob<'a> {
    kv: &'a CpuKv,
    store: usize,
    q: &'a CpuBuffer,
    weights: Option<&'a CpuBuffer>,
    num_choices: usize,
    spans: &'a [RowSpan],
}

impl IndexJob<'_> {
    /// Computes a choice's scores of a run of positions; those of pages behind the row's own stay as they are.
    fn score(&self, isa: Isa, choice: IndexChoice, run: usize, scores: &mut [f32]) {
        let (row, head) = (choice.index / self.num_choices, choice.index % self.num_choices);
        let width = self.q.width() / self.num_choices;
        let q = &self.q.row(row)[head * width..][..width];
        let weights = self.weights.map(|weights| weights.row(row));
        let (query, mut unpacked) = (IndexQuery::new(q, weights, self.kv.kv_type()), Unpacked::new());
        for (page, scores) in scores.chunks_exact_mut(PAGE_TOKENS).enumerate() {
            let position = run * RUN_TOKENS + page * PAGE_TOKENS;
            if position <= choice.position {
                let (page, _) = self.spans[choice.span].slot(position);
                let keys = self.kv.head_pages(self.store, 0..1, page).keys;
                index_page(isa, &query, keys, &mut unpacked, scores);
            }
        }
    }
}

impl Cpu {
    /// Fills `out` for all rows of a step; `[q, weights]` are the indexer's.
    pub(super) fn choose_keys(
        &self,
        kv: &CpuKv,
        IndexerSpec { store, top_k, blocks, is_per_head }: IndexerSpec,
        [q, weights]: [&CpuBuffer; 2],
        spans: &[RowSpan],
        out: &mut SelectedKeys,
    ) {
        let scratch = &mut *self.scratch.borrow_mut();
        let (IndexPlan { choices, scores }, isa) = (&mut scratch.index, self.isa);
        let num_choices = if is_per_head { q.width() / kv.shape(store).head_dim } else { 1 };
        find_choices(spans, blocks.first_choosing(top_k), num_choices, choices);
        (out.top_k, out.blocks, out.num_choices) = (top_k, blocks, num_choices);
        out.positions.resize(q.num_rows() * num_choices * top_k, 0);
        let job = IndexJob { kv, store, q, weights: (!is_per_head).then_some(weights), num_choices, spans };
        let longest = choices.iter().map(|choice| choice.position + 1).max().unwrap_or(1);
        let runs = longest.div_ceil(RUN_TOKENS);
        let stride = runs * RUN_TOKENS;
        for choices in choices.chunks((HELD_SCORES / stride).max(1)) {
            scores.resize(choices.len() * stride, 0.0);
            let work = choices.len() * stride * (q.width() / num_choices);
            self.for_chunks(scores, RUN_TOKENS, work, |index, scores| {
                job.score(isa, choices[index / runs], index % runs, scores);
            });
            let (first, last) = (choices[0].index, choices[choices.len() - 1].index);
            let places = &mut out.positions[first * top_k..(last + 1) * top_k];
            self.pool().chunks_mut(places, top_k, |index, chosen| {
                if let Ok(at) = choices.binary_search_by_key(&(first + index), |choice| choice.index) {
                    let scores = &scores[at * stride..][..choices[at].position + 1];
                    ORDER.with_borrow_mut(|memory| blocks.choose(scores, memory.each_mut(), chosen));
                }
            });
        }
    }
}

/// Lists the choices of rows at positions from `first` on, in ascending order.
fn find_choices(spans: &[RowSpan], first: usize, num_choices: usize, found: &mut Vec<IndexChoice>) {
    found.clear();
    for (span, facts) in spans.iter().enumerate() {
        let rows = facts.first_beyond(first)..facts.rows.end;
        let choice = |index| {
            let position = facts.start + index / num_choices - facts.rows.start;
            IndexChoice { span, index, position }
        };
        found.extend((rows.start * num_choices..rows.end * num_choices).map(choice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{
        AttentionSpec, Backend, KeyBlocks, KvLayout, KvShape, KvType, KvValues, ScoreRule, Store, StoreShape,
    };

    const HEADS: usize = 3;
    const KEY: usize = 40;
    const VALUE: usize = 24;
    const INDEX_HEADS: usize = 5;
    const INDEX: usize = 16;
    const TOP_K: usize = 70;
    /// More than a run of positions.
    const TOKENS: usize = 600;

    fn buffer(rows: usize, width: usize, seed: usize) -> CpuBuffer {
        let mut buffer = CpuBuffer::default();
        buffer.resize(rows, width);
        let number = |n: usize| ((n * 2_654_435_761 + seed * 97) % 1013) as f32 / 500.0 - 1.0;
        buffer.values_mut().iter_mut().enumerate().for_each(|(n, value)| *value = number(n));
        buffer
    }

    fn some_rows(x: &CpuBuffer, rows: impl IntoIterator<Item = usize>) -> CpuBuffer {
        let values: Vec<f32> = rows.into_iter().flat_map(|row| x.row(row).to_vec()).collect();
        let mut some = CpuBuffer::default();
        some.resize(values.len() / x.width(), x.width());
        some.values_mut().copy_from_slice(&values);
        some
    }

    fn layout() -> KvLayout {
        let store = |head_dim, values| {
            let shape = KvShape { num_kv_heads: 1, head_dim, values };
            Store { shape: StoreShape::Rows(shape), group: 0 }
        };
        let stores = vec![store(KEY, KvValues::InKeys(VALUE)), store(INDEX, KvValues::None)];
        KvLayout { stores, num_groups: 1 }
    }

    /// Rows `start..end` of a sequence, from row `first` of the step on; every sequence has pages of its own.
    fn span(first: usize, positions: std::ops::Range<usize>, sequence: u32) -> RowSpan {
        let pages = (0..TOKENS.div_ceil(PAGE_TOKENS) as u32).rev().map(|page| 2 * page + sequence).collect();
        let (rows, start) = (first..first + positions.len(), positions.start);
        RowSpan { rows, start, num_drafted: 0, pages, seen_besides: vec![] }
    }

    struct Layer {
        keys: CpuBuffer,
        q: CpuBuffer,
        index_keys: CpuBuffer,
        index_q: CpuBuffer,
        weights: CpuBuffer,
    }

    impl Layer {
        fn new() -> Self {
            Self {
                keys: buffer(TOKENS, KEY, 1),
                q: buffer(TOKENS, HEADS * KEY, 2),
                index_keys: buffer(TOKENS, INDEX, 3),
                index_q: buffer(TOKENS, INDEX_HEADS * INDEX, 4),
                weights: buffer(TOKENS, INDEX_HEADS, 5),
            }
        }

        /// Computes a step of rows of the sequence, which `spans` place.
        fn step(
            &self,
            cpu: &Cpu,
            kv: &mut CpuKv,
            positions: &[usize],
            spans: &[RowSpan],
        ) -> (SelectedKeys, CpuBuffer) {
            let rows = |x| some_rows(x, positions.iter().copied());
            let mut selected = SelectedKeys::default();
            cpu.store_kv(kv, 0, &rows(&self.keys), &rows(&self.keys), spans).expect("pages");
            cpu.store_kv(kv, 1, &rows(&self.index_keys), &rows(&self.index_keys), spans).expect("pages");
            let (blocks, is_per_head) = (KeyBlocks::SINGLE, false);
            let spec = IndexerSpec { store: 1, top_k: TOP_K, blocks, is_per_head };
            let inputs = [&rows(&self.index_q), &rows(&self.weights)];
            cpu.select_keys(kv, &spec, inputs, spans, &mut selected).expect("a choice");
            let out = attend(cpu, kv, &rows(&self.q), spans, Some(&selected));
            (selected, out)
        }
    }

    fn attend(
        cpu: &Cpu,
        kv: &CpuKv,
        q: &CpuBuffer,
        spans: &[RowSpan],
        selected: Option<&SelectedKeys>,
    ) -> CpuBuffer {
        let rule = ScoreRule { scale: 0.2, softcap: None };
        let (window, is_two_way, sinks, num_heads) = (None, false, None, q.width() / KEY);
        let spec = AttentionSpec { store: 0, num_heads, rule, window, is_two_way, sinks, selected };
        let mut out = CpuBuffer::default();
        cpu.attend(kv, &spec, q, spans, &mut out).expect("attention");
        out
    }

    #[test]
    fn a_row_sees_the_keys_that_score_highest_as_if_there_were_no_others() {
        let (layer, cpu) = (Layer::new(), Cpu::new(2).expect("threads"));
        for kv_type in KvType::ALL {
            let mut kv = CpuKv::new(&layout(), kv_type);
            let positions: Vec<usize> = (0..TOKENS).collect();
            let (selected, out) = layer.step(&cpu, &mut kv, &positions, &[span(0, 0..TOKENS, 0)]);
            for row in [0, TOP_K - 1, TOP_K, TOP_K + 1, 255, 256, 411, TOKENS - 1] {
                let chosen: Vec<usize> = match selected.of_row(row, 0, row) {
                    None => (0..=row).collect(),
                    Some(chosen) => chosen.iter().map(|position| *position as usize).collect(),
                };
                assert_eq!(chosen.len(), TOP_K.min(row + 1));
                let score = |position: &usize| -> f32 {
                    let heads = layer.index_q.row(row).chunks_exact(INDEX).zip(layer.weights.row(row));
                    let key = layer.index_keys.row(*position);
                    let products = heads.map(|(q, weight)| {
                        weight * q.iter().zip(key).map(|(q, key)| q * key).sum::<f32>().max(0.0)
                    });
                    products.sum()
                };
                let least = chosen.iter().map(score).fold(f32::INFINITY, f32::min);
                let others = (0..=row).filter(|position| !chosen.contains(position));
                let best = others.map(|position| score(&position)).fold(f32::NEG_INFINITY, f32::max);
                assert!(best < least + 0.1, "{} row {row}: {best} left out, {least} taken", kv_type.name());
                // The chosen keys alone, as a sequence of their own.
                let mut alone = CpuKv::new(&layout(), kv_type);
                let keys = some_rows(&layer.keys, chosen.iter().copied());
                cpu.store_kv(&mut alone, 0, &keys, &keys, &[span(0, 0..chosen.len(), 0)]).expect("pages");
                let last = [span(0, chosen.len() - 1..chosen.len(), 0)];
                let expected = attend(&cpu, &alone, &some_rows(&layer.q, [row]), &last, None);
                assert_eq!(out.row(row), expected.values(), "{} row {row}", kv_type.name());
            }
        }
    }

    #[test]
    fn keys_and_values_of_several_heads_are_read_where_they_were_chosen() {
        let cpu = Cpu::new(2).expect("threads");
        let (blocks, top_k) = (KeyBlocks { size: 4, num_local: 0 }, 44);
        let of_heads = |heads: usize, head_dim, values| {
            let shape = KvShape { num_kv_heads: heads, head_dim, values };
            Store { shape: StoreShape::Rows(shape), group: 0 }
        };
        for (kv_type, values) in KvType::ALL
            .into_iter()
            .flat_map(|kind| [KvValues::Own, KvValues::Narrow(VALUE)].map(|values| (kind, values)))
        {
            let stores = vec![of_heads(2, KEY, values), of_heads(1, INDEX, KvValues::None)];
            let layout = KvLayout { stores, num_groups: 1 };
            let mut kv = CpuKv::new(&layout, kv_type);
            let (k, v) = (buffer(TOKENS, 2 * KEY, 1), buffer(TOKENS, 2 * values.dim(KEY), 2));
            let (q, index_q) = (buffer(TOKENS, 6 * KEY, 3), buffer(TOKENS, INDEX_HEADS * INDEX, 4));
            let (index_k, mut weights) = (buffer(TOKENS, INDEX, 5), buffer(TOKENS, INDEX_HEADS, 6));
            weights.values_mut().fill(1.0);
            let spans = [span(0, 0..TOKENS, 0)];
            cpu.store_kv(&mut kv, 0, &k, &v, &spans).expect("pages");
            cpu.store_kv(&mut kv, 1, &index_k, &index_k, &spans).expect("pages");
            let mut selected = SelectedKeys::default();
            let spec = IndexerSpec { store: 1, top_k, blocks, is_per_head: false };
            cpu.select_keys(&kv, &spec, [&index_q, &weights], &spans, &mut selected).expect("a choice");
            let out = attend(&cpu, &kv, &q, &spans, Some(&selected));
            for row in [0, 42, 43, 44, 45, 46, 47, 302, TOKENS - 1] {
                let chosen: Vec<usize> = match selected.of_row(row, 1, row) {
                    None => (0..=row).collect(),
                    Some(chosen) => chosen.iter().map(|position| *position as usize).collect(),
                };
                let complete = (row + 1) / 4;
                assert_eq!(chosen.len(), 4 * complete.min(10) + (row + 1) % 4);
                let mut alone = CpuKv::new(&layout, kv_type);
                let [k, v] = [&k, &v].map(|x| some_rows(x, chosen.iter().copied()));
                cpu.store_kv(&mut alone, 0, &k, &v, &[span(0, 0..chosen.len(), 0)]).expect("pages");
                let last = [span(0, chosen.len() - 1..chosen.len(), 0)];
                let expected = attend(&cpu, &alone, &some_rows(&q, [row]), &last, None);
                assert_eq!(out.row(row), expected.values(), "{} {values:?} row {row}", kv_type.name());
            }
        }
    }

    #[test]
    fn chunks_batches_and_threads_change_no_bit() {
        let layer = Layer::new();
        for kv_type in KvType::ALL {
            let mut kv = CpuKv::new(&layout(), kv_type);
            let cpu = Cpu::new(1).expect("threads");
            let positions: Vec<usize> = (0..TOKENS).collect();
            let (_, whole) = layer.step(&cpu, &mut kv, &positions, &[span(0, 0..TOKENS, 0)]);
            for (threads, chunk) in [(1, 64), (3, 37), (2, 300)] {
                let (cpu, mut kv) = (Cpu::new(threads).expect("threads"), CpuKv::new(&layout(), kv_type));
                // Two sequences with the same tokens, one behind the other by a chunk.
                for start in (0..TOKENS + chunk).step_by(chunk) {
                    let first = start.min(TOKENS)..(start + chunk).min(TOKENS);
                    let second = start.saturating_sub(chunk)..start.min(TOKENS);
                    let mut spans = vec![span(0, first.clone(), 0), span(first.len(), second.clone(), 1)];
                    spans.retain(|span| !span.rows.is_empty());
                    let positions: Vec<usize> = first.chain(second).collect();
                    let (_, out) = layer.step(&cpu, &mut kv, &positions, &spans);
                    for (row, position) in positions.into_iter().enumerate() {
                        assert_eq!(out.row(row), whole.row(position), "{threads} threads, {position}");
                    }
                }
            }
        }
    }
}
