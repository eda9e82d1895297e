//! The kernels against double precision, and all ways of computing a row against each other, bit for bit.

use super::*;
use crate::isa::available;

/// A sequence's keys and values for one KV head.
struct History {
    kv_type: KvType,
    head_dim: usize,
    values: KvValues,
    /// Keys and values, by page; one block for both if the keys hold the values.
    pages: Vec<[Vec<u64>; 2]>,
    len: usize,
}

/// Generator of uniform numbers in -1..1 (xorshift).
struct ValueRandom(u32);

impl ValueRandom {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 as f32 / u32::MAX as f32 * 2.0 - 1.0
    }

    fn row(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.next() * scale).collect()
    }
}

impl History {
    fn new(kv_type: KvType, head_dim: usize, values: KvValues, len: usize) -> History {
        let words = (PAGE_TOKENS * kv_type.row_bytes(head_dim)).div_ceil(8);
        let value_dim = values.row_dim(head_dim);
        let pages = vec![[vec![0u64; words], vec![0u64; words]]; len.div_ceil(PAGE_TOKENS)];
        let mut history = History { kv_type, head_dim, values, pages, len };
        let mut random = ValueRandom(7 + len as u32);
        for position in 0..len {
            history.write(position, [random.row(head_dim, 2.0), random.row(value_dim, 1.0)]);
        }
        // Slots after the last token are not zero in general.
        for position in len..len.next_multiple_of(PAGE_TOKENS) {
            history.write(position, [vec![f32::NAN; head_dim], vec![f32::INFINITY; value_dim]]);
        }
        history
    }

    fn bytes(&self, dim: usize) -> usize {
        PAGE_TOKENS * self.kv_type.row_bytes(dim)
    }

    fn write(&mut self, position: usize, rows: [Vec<f32>; 2]) {
        let (kv_type, lens) = (self.kv_type, rows.each_ref().map(|row| self.bytes(row.len())));
        let key_layout = self.key_layout();
        let page = &mut self.pages[position / PAGE_TOKENS];
        for (((part, words), row), len) in
            [key_layout, KvPart::Values].into_iter().zip(page).zip(rows).zip(lens)
        {
            let block = &mut bytemuck::cast_slice_mut(words)[..len];
            write_row(Isa::Scalar, kv_type, part, block, position % PAGE_TOKENS, &row);
        }
    }

    fn key_layout(&self) -> KvPart {
        self.values.key_layout()
    }

    fn value_dim(&self) -> usize {
        self.values.dim(self.head_dim)
    }

    fn page(&self, number: usize) -> HeadPage<'_> {
        let [keys, values] = &self.pages[number];
        let values = if self.values.num_rows() == 1 { keys } else { values };
        let bytes = |words, dim| &bytemuck::cast_slice::<u64, u8>(words)[..self.bytes(dim)];
        let value_dim = self.values.row_dim(self.head_dim);
        HeadPage { keys: bytes(keys, self.head_dim), values: bytes(values, value_dim) }
    }

    fn read(&self, part: KvPart, position: usize) -> Vec<f32> {
        let page = self.page(position / PAGE_TOKENS);
        let (block, layout, dim) = match part {
            KvPart::Keys => (page.keys, self.key_layout(), self.head_dim),
            KvPart::Values => (page.values, part, self.values.row_dim(self.head_dim)),
        };
        let mut row = vec![0.0; dim];
        read_row(self.kv_type, layout, block, position % PAGE_TOKENS, &mut row);
        row
    }
}

/// A layer's queries for a whole history.
struct AttentionCase {
    history: History,
    heads: usize,
    window: Option<usize>,
    /// By position; empty for causal rows.
    spans: Vec<Range<usize>>,
    rule: ScoreRule,
    sink: Option<f32>,
    /// `[position][heads][head_dim]`.
    q: Vec<f32>,
}

impl AttentionCase {
    fn new(history: History, heads: usize, window: Option<usize>, softcap: Option<f32>) -> AttentionCase {
        let q = ValueRandom(99).row(history.len * heads * history.head_dim, 2.0);
        let rule = ScoreRule { scale: 1.0 / (history.head_dim as f32).sqrt(), softcap };
        AttentionCase {
            sink: window.map(|window| window as f32 / 50.0 - 1.0),
            history,
            heads,
            window,
            spans: Vec::new(),
            rule,
            q,
        }
    }

    /// Computes rows `rows`, each run separately if `split`.
    fn attend(&self, isa: Isa, rows: Range<usize>, split: bool) -> Vec<f32> {
        let (heads, head_dim) = (self.heads, self.history.head_dim);
        let queries = Queries {
            q: &self.q[rows.start * heads * head_dim..],
            row_stride: heads * head_dim,
            rows: rows.len(),
            kv_heads: 1,
            heads,
            head_dim,
            values: self.history.values,
            start: rows.start,
            window: self.window,
            spans: self.spans.get(rows.clone()).unwrap_or_default(),
            rule: self.rule,
            kv_type: self.history.kv_type,
        };
        let value_dim = self.history.value_dim();
        let len = partial_len(value_dim);
        let slot_len = rows.len() * heads * len;
        let runs = queries.runs();
        let parts: Vec<_> = match split {
            true => runs.map(|run| run..run + 1).collect(),
            false => vec![runs],
        };
        let mut partials = vec![f32::NAN; parts.len() * slot_len];
        let mut scratch = Scratch::default();
        for (runs, slot) in parts.into_iter().zip(partials.chunks_exact_mut(slot_len)) {
            attend(isa, &queries, runs, &|number| self.history.page(number), &mut scratch, slot);
        }
        let mut out = vec![f32::NAN; rows.len() * heads * value_dim];
        for (query, out) in out.chunks_exact_mut(value_dim).enumerate() {
            finish(isa, &partials[query * len..], slot_len, self.sink, out);
        }
        out
    }

    /// Computes one query in double precision, from the stored rows.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let head_dim = self.history.head_dim;
        let q = &self.q[(position * self.heads + head) * head_dim..][..head_dim];
        let causal = self.window.map_or(0, |window| (position + 1).saturating_sub(window))..=position;
        let span = self.spans.get(position);
        let sees = |at: &usize| causal.contains(at) || span.is_some_and(|span| span.contains(at));
        let seen: Vec<usize> = (0..self.history.len).filter(sees).collect();
        let score = |at: usize| {
            let key = self.history.read(KvPart::Keys, at);
            let dot: f64 = q.iter().zip(key).map(|(q, key)| f64::from(*q) * f64::from(key)).sum();
            let score = dot * f64::from(self.rule.scale);
            self.rule.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
        };
        let weights: Vec<f64> = seen.iter().map(|&at| score(at)).collect();
        let sum = weights.iter().sum::<f64>() + self.sink.map_or(0.0, |sink| f64::from(sink).exp());
        let mut out = vec![0.0; self.history.value_dim()];
        for (at, weight) in seen.into_iter().zip(weights) {
            for (out, value) in out.iter_mut().zip(self.history.read(KvPart::Values, at)) {
                *out += weight / sum * f64::from(value);
            }
        }
        out
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Returns what each position sees besides earlier ones if there are two images; all rows of its image if `whole`, else those
/// behind it.
fn image_spans(len: usize, whole: bool) -> Vec<Range<usize>> {
    let images = [(3, 38), (200, 310)].map(|(start, end)| start..end);
    let span = |position| {
        let image = images.iter().find(|image| image.contains(&position));
        image.map_or(position..position + 1, |image| if whole { image.clone() } else { position..image.end })
    };
    (0..len).map(span).collect()
}

fn cases(len: usize) -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for kv_type in KvType::ALL {
        let own = [(64, 1), (24, 2), (40, 3), (128, 2), (8, 7)];
        let own = own.map(|(head_dim, heads)| (head_dim, heads, KvValues::Own));
        let in_keys = [(24, 4, 16), (576, 5, 512), (50, 3, 9), (72, 8, 64)];
        let in_keys = in_keys.map(|(head_dim, heads, values)| (head_dim, heads, KvValues::InKeys(values)));
        let narrow = [(24, 4, 16), (192, 2, 128), (40, 3, 9)];
        let narrow = narrow.map(|(head_dim, heads, values)| (head_dim, heads, KvValues::Narrow(values)));
        let shapes = own.into_iter().chain(in_keys).chain(narrow);
        for (head_dim, heads, values) in shapes.filter(|(dim, _, values)| kv_type.fits(*dim, *values)) {
            for (window, softcap) in [(None, None), (Some(70), None), (Some(1), Some(2.0)), (Some(300), None)]
            {
                let history = History::new(kv_type, head_dim, values, len);
                cases.push(AttentionCase::new(history, heads, window, softcap));
            }
            for (window, whole) in [(None, false), (Some(70), false), (Some(70), true)] {
                let history = History::new(kv_type, head_dim, values, len);
                let causal = AttentionCase::new(history, heads, window, None);
                cases.push(AttentionCase { spans: image_spans(len, whole), ..causal });
            }
        }
    }
    cases
}

#[test]
fn agrees_with_double_precision() {
    for case in cases(if cfg!(miri) { 40 } else { 530 }) {
        let len = case.history.len;
        let rows = [0, 1, 31, 32, 255, 256, 257, 511, 512, 529];
        for row in rows.into_iter().filter(|row| *row < len) {
            let out = case.attend(crate::isa::isa(), row..row + 1, false);
            for (head, out) in out.chunks_exact(case.history.value_dim()).enumerate() {
                for (out, exact) in out.iter().zip(case.exact(row, head)) {
                    let name = case.history.kv_type.name();
                    assert!((f64::from(*out) - exact).abs() < 2e-6, "{name} row {row}: {out}, not {exact}");
                }
            }
        }
    }
}

#[test]
fn instruction_sets_chunks_and_splits_change_no_bit() {
    // Every third of the seven cases of a shape still covers every type, shape and window, but not all combinations.
    for case in cases(if cfg!(miri) { 40 } else { 330 }).into_iter().step_by(3) {
        let (len, width) = (case.history.len, case.heads * case.history.value_dim());
        let scalar = case.attend(Isa::Scalar, 0..len, false);
        assert!(scalar.iter().all(|value| value.is_finite()), "what is not seen must not be read");
        for isa in available() {
            assert!(same_bits(&case.attend(isa, 0..len, false), &scalar), "{isa:?}");
            for (start, count) in [(0, 1), (17, 40), (250, 13), (len - 1, 1), (len - 37, 37)] {
                let rows = start.min(len)..(start + count).min(len);
                let expected = &scalar[rows.start * width..rows.end * width];
                for split in [false, true] {
                    let got = case.attend(isa, rows.clone(), split);
                    assert!(same_bits(&got, expected), "{isa:?} rows {rows:?} split {split}");
                }
            }
        }
    }
}

#[test]
fn a_broken_token_is_seen_by_those_after_it_only() {
    for kv_type in KvType::ALL {
        for values in [KvValues::Own, KvValues::InKeys(32)] {
            let mut history = History::new(kv_type, 32, values, 100);
            history.write(50, [vec![f32::NAN; 32], vec![f32::INFINITY; 32]]);
            let case = AttentionCase::new(history, 2, Some(20), None);
            let out = case.attend(crate::isa::isa(), 0..100, false);
            for (row, out) in out.chunks(64).enumerate() {
                let sees = (50..70).contains(&row);
                assert_eq!(out.iter().any(|value| !value.is_finite()), sees, "{} row {row}", kv_type.name());
            }
        }
    }
}
