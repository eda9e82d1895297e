//! Attention within whole texts, whose keys and values are rows of the same step: for encoders, which keep
//! none.
//!
//! Invariant: rows are computed in blocks of [`BLOCK_ROWS`], counted from the beginning of their text, so
//! that a text's results depend neither on the texts beside it nor on the number of threads.

use super::Isa;
use super::attention::ScoreRule;
use super::dot;
use super::math;
use super::matmul::{self, MatmulShape};
use super::wide::LANES;

/// Rows of a text that are computed together; part of the definition.
pub const BLOCK_ROWS: usize = 32;

/// Number of positions that a row sees before and after its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    pub before: usize,
    pub after: usize,
}

impl Reach {
    /// Every row sees the whole text.
    pub const WHOLE: Reach = Reach { before: usize::MAX, after: usize::MAX };

    /// A row sees its own and earlier positions, at most `window`.
    pub fn causal(window: Option<usize>) -> Self {
        Self { before: window.map_or(usize::MAX, |window| window.saturating_sub(1)), after: 0 }
    }

    /// A row sees up to `distance` positions on both sides.
    pub fn both(distance: usize) -> Self {
        Self { before: distance, after: distance }
    }
}

/// Heads of a step's queries, keys and values, and the rule of their scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TextHeads {
    pub num_heads: usize,
    /// Divides `num_heads`.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub rule: ScoreRule,
    pub reach: Reach,
}

/// One text's rows of the step: `q` is `[rows, num_heads * head_dim]`, `k` and `v` are `[rows, num_kv_heads * head_dim]`.
#[derive(Debug, Clone, Copy)]
pub struct TextRows<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
}

/// Memory of a task, kept between its blocks.
#[derive(Debug, Default)]
pub struct TextScratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    /// `[head_dim, keys]`, padded with zeros.
    values: Vec<f32>,
    scores: Vec<f32>,
    /// Scores of one row, padded with zeros.
    weights: Vec<f32>,
    mixed: Vec<f32>,
}

/// Computes the rows of `out`, `[rows, num_heads * head_dim]`, of a block that begins at row `first` of the text.
pub fn attend_block(
    isa: Isa,
    heads: &TextHeads,
    text: TextRows<'_>,
    first: usize,
    out: &mut [f32],
    scratch: &mut TextScratch,
) {
    let TextHeads { num_heads, num_kv_heads, head_dim, reach, .. } = *heads;
    let [width, kv_width] = [num_heads, num_kv_heads].map(|heads| heads * head_dim);
    let (rows, len) = (out.len() / width, text.k.len() / kv_width);
    let visible = first.saturating_sub(reach.before)..(first + rows).saturating_add(reach.after).min(len);
    let padded = visible.len().next_multiple_of(LANES);
    let TextScratch { queries, keys, values, scores, weights, mixed } = scratch;
    for head in 0..num_heads {
        let kv_head = head / (num_heads / num_kv_heads);
        if head % (num_heads / num_kv_heads) == 0 {
            gather(text.k, kv_width, kv_head * head_dim, head_dim, visible.clone(), keys);
            gather_columns(text.v, kv_width, kv_head * head_dim, head_dim, visible.clone(), padded, values);
        }
        gather(text.q, width, head * head_dim, head_dim, first..first + rows, queries);
        scores.resize(rows * visible.len(), 0.0);
        matmul::block(isa, MatmulShape { k: head_dim, m: visible.len() }, queries, keys, scores);
        weights.clear();
        weights.resize(rows * padded, 0.0);
        for (row, (scores, weights)) in
            scores.chunks_exact_mut(visible.len()).zip(weights.chunks_exact_mut(padded)).enumerate()
        {
            let position = first + row;
            let start = position.saturating_sub(reach.before).saturating_sub(visible.start);
            let end = (position + 1).saturating_add(reach.after).min(len) - visible.start;
            weigh(isa, &heads.rule, &mut scores[start..end]);
            weights[start..end].copy_from_slice(&scores[start..end]);
        }
        mixed.resize(rows * head_dim, 0.0);
        matmul::block(isa, MatmulShape { k: padded, m: head_dim }, weights, values, mixed);
        for (out, mixed) in out.chunks_exact_mut(width).zip(mixed.chunks_exact(head_dim)) {
            out[head * head_dim..][..head_dim].copy_from_slice(mixed);
        }
    }
}

/// Turns the inner products of a query with its keys into weights that sum to 1.
fn weigh(isa: Isa, rule: &ScoreRule, scores: &mut [f32]) {
    scores.iter_mut().for_each(|score| *score *= rule.scale);
    if let Some(cap) = rule.softcap {
        math::softcap(isa, scores, cap);
    }
    math::exp_minus(isa, scores, math::max(scores));
    let factor = 1.0 / dot::sum(isa, scores);
    scores.iter_mut().for_each(|score| *score *= factor);
}

/// Copies `count` columns from `from` on of some rows.
fn gather(
    x: &[f32],
    width: usize,
    from: usize,
    count: usize,
    rows: std::ops::Range<usize>,
    out: &mut Vec<f32>,
) {
    out.clear();
    rows.for_each(|row| out.extend_from_slice(&x[row * width + from..][..count]));
}

/// Copies columns as [`gather`] does, each to a row of `padded` values.
fn gather_columns(
    x: &[f32],
    width: usize,
    from: usize,
    count: usize,
    rows: std::ops::Range<usize>,
    padded: usize,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.resize(count * padded, 0.0);
    for (at, row) in rows.enumerate() {
        for (column, value) in x[row * width + from..][..count].iter().enumerate() {
            out[column * padded + at] = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::available;
    use super::*;

    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const DIM: usize = 8;

    fn rows(count: usize, width: usize, seed: f32) -> Vec<f32> {
        (0..count * width).map(|at| (at as f32 * 0.7 + seed).sin()).collect()
    }

    fn attend(isa: Isa, heads: &TextHeads, [q, k, v]: [&[f32]; 3]) -> Vec<f32> {
        let mut out = vec![0.0; q.len()];
        for (block, out) in out.chunks_mut(BLOCK_ROWS * HEADS * DIM).enumerate() {
            attend_block(
                isa,
                heads,
                TextRows { q, k, v },
                block * BLOCK_ROWS,
                out,
                &mut TextScratch::default(),
            );
        }
        out
    }

    /// The definition, in f64.
    fn plain(heads: &TextHeads, [q, k, v]: [&[f32]; 3], len: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for row in 0..len {
            for head in 0..HEADS {
                let at = |x: &[f32], row: usize, width: usize, head: usize, d: usize| {
                    f64::from(x[row * width + head * DIM + d])
                };
                let kv_head = head / (HEADS / KV_HEADS);
                let sees = |key: &usize| {
                    row.saturating_sub(heads.reach.before) <= *key
                        && *key <= row.saturating_add(heads.reach.after)
                };
                let keys: Vec<usize> = (0..len).filter(sees).collect();
                let score = |key: usize| {
                    let dot: f64 = (0..DIM)
                        .map(|d| at(q, row, HEADS * DIM, head, d) * at(k, key, KV_HEADS * DIM, kv_head, d))
                        .sum();
                    let scaled = dot * f64::from(heads.rule.scale);
                    heads.rule.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
                };
                let weights: Vec<f64> = keys.iter().map(|&key| score(key).exp()).collect();
                let sum: f64 = weights.iter().sum();
                out.extend((0..DIM).map(|d| {
                    let mixed = keys.iter().zip(&weights);
                    mixed.map(|(&key, w)| w * at(v, key, KV_HEADS * DIM, kv_head, d)).sum::<f64>() / sum
                }));
            }
        }
        out
    }

    #[test]
    fn texts_of_any_length_follow_the_definition_with_the_same_bits_everywhere() {
        let rule = ScoreRule { scale: 0.9, softcap: None };
        for (reach, rule) in [
            (Reach::WHOLE, rule),
            (Reach::both(3), rule),
            (Reach::causal(None), rule),
            (Reach::causal(Some(5)), rule),
            (Reach::causal(Some(1)), ScoreRule { softcap: Some(2.0), ..rule }),
            (Reach::both(40), ScoreRule { softcap: Some(2.0), ..rule }),
        ] {
            let heads = TextHeads { num_heads: HEADS, num_kv_heads: KV_HEADS, head_dim: DIM, rule, reach };
            for len in [1, 2, 15, 16, 17, 33, 70] {
                let (q, k) = (rows(len, HEADS * DIM, 0.1), rows(len, KV_HEADS * DIM, 0.5));
                let v = rows(len, KV_HEADS * DIM, 1.3);
                let expected = plain(&heads, [&q, &k, &v], len);
                let scalar = attend(Isa::Scalar, &heads, [&q, &k, &v]);
                let close = |(got, exact): (&f32, &f64)| (f64::from(*got) - exact).abs() < 1e-5;
                assert!(scalar.iter().zip(&expected).all(close), "{reach:?} {len}");
                for isa in available() {
                    let got = attend(isa, &heads, [&q, &k, &v]);
                    assert!(
                        got.iter().zip(&scalar).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{isa:?} {len}"
                    );
                }
            }
        }
    }
}
