//! Attention of one query over the keys and values it can see.
//!
//! Keys are visited in ascending position, whatever else is in the batch, so a row's result depends on its own history only.

use super::dot::{axpy_body, dot_body, sum_body};
use super::isa::dispatch;
use super::math::{self, exp_minus_body, softcap_body};

/// How scores are made from inner products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRule {
    pub scale: f32,
    /// `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

#[inline(always)]
fn attend_body(rule: ScoreRule, q: &[f32], kv: [&[f32]; 2], scores: &mut [f32], out: &mut [f32]) {
    let [keys, values] = kv;
    for (score, key) in scores.iter_mut().zip(keys.chunks_exact(q.len())) {
        *score = dot_body(q, key) * rule.scale;
    }
    if let Some(cap) = rule.softcap {
        softcap_body(scores, cap);
    }
    exp_minus_body(scores, math::max(scores));
    let norm = 1.0 / sum_body(scores);
    out.fill(0.0);
    for (score, value) in scores.iter().zip(values.chunks_exact(out.len())) {
        axpy_body(score * norm, value, out);
    }
}

dispatch! {
    /// `out = softmax(rule(q . keys)) . values` for one head.
    ///
    /// `q` is `[head_dim]`, `kv` is keys `[n, head_dim]` and values `[n, out.len()]`, `scores` is scratch of length `n`, at least 1.
    pub fn attend(rule: ScoreRule, q: &[f32], kv: [&[f32]; 2], scores: &mut [f32], out: &mut [f32]) = attend_body
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, available};
    use super::*;

    #[test]
    fn agrees_with_double_precision_and_across_instruction_sets() {
        let (n, dim) = (45, 24);
        let q: Vec<f32> = (0..dim).map(|i| (i as f32 * 0.7).sin()).collect();
        let keys: Vec<f32> = (0..n * dim).map(|i| (i as f32 * 0.3).cos()).collect();
        let values: Vec<f32> = (0..n * dim).map(|i| (i as f32 * 0.11).sin()).collect();
        let rule = ScoreRule { scale: 0.2, softcap: Some(3.0) };
        let weights: Vec<f64> = (0..n)
            .map(|j| {
                let dot: f64 =
                    (0..dim).map(|d| f64::from(q[d]) * f64::from(keys[j * dim + d])).sum::<f64>() * 0.2;
                (3.0 * (dot / 3.0).tanh()).exp()
            })
            .collect();
        let norm: f64 = weights.iter().sum();
        let mut first = None;
        for isa in available() {
            let (mut scores, mut out) = (vec![0.0; n], vec![0.0; dim]);
            attend(isa, rule, &q, [&keys, &values], &mut scores, &mut out);
            for d in 0..dim {
                let exact: f64 =
                    (0..n).map(|j| weights[j] * f64::from(values[j * dim + d])).sum::<f64>() / norm;
                assert!((f64::from(out[d]) - exact).abs() < 1e-5);
            }
            let expected = first.get_or_insert_with(|| out.clone());
            assert_eq!(&out, expected, "{isa:?} against {:?}", Isa::Scalar);
        }
    }
}
