//! Tokens that may be drawn, with the arithmetic that all samplers share.
//!
//! Invariant: after each function that keeps the best, their order is a function of logits and ids alone.

use std::cmp::Ordering;

/// A token, its logit and, once weighed, a weight proportional to its probability; the best token has 1.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    pub id: u32,
    pub logit: f32,
    pub weight: f32,
}

/// Higher logit first; among equals the lower id. A total order, because NaN was refused before.
pub fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Keeps the `k` best, in order.
pub fn keep_ranked(ranked: &mut Vec<Candidate>, k: usize) {
    if k < ranked.len() {
        ranked.select_nth_unstable_by(k.saturating_sub(1), best_first);
        ranked.truncate(k);
    }
    ranked.sort_unstable_by(best_first);
}

/// Sets the weights to those of a softmax. Returns the highest logit and the sum of the weights.
pub fn weigh(ranked: &mut [Candidate]) -> (f32, f64) {
    let best = ranked.iter().fold(f32::NEG_INFINITY, |best, candidate| best.max(candidate.logit));
    let mut total = 0.0;
    for candidate in ranked {
        candidate.weight = exp_nonpositive(candidate.logit - best);
        total += f64::from(candidate.weight);
    }
    (best, total)
}

/// Returns the lowest logit within `n` standard deviations of the best. Those at negative infinity do not count.
pub fn lowest_near_best(logits: impl Iterator<Item = f32> + Clone, best: f32, n: f32) -> f64 {
    let finite = logits.filter(|logit| logit.is_finite()).map(f64::from);
    let count = finite.clone().count() as f64;
    let mean = finite.clone().sum::<f64>() / count;
    let variance = finite.map(|logit| (logit - mean) * (logit - mean)).sum::<f64>() / count;
    f64::from(best) - f64::from(n) * variance.sqrt()
}

/// Keeps the smallest best-first set that weighs at least `target`, in order. Orders only as much as it needs.
pub fn keep_nucleus(ranked: &mut Vec<Candidate>, target: f64) {
    let mut weight = 0.0;
    let mut start = 0;
    let mut block = 64;
    while start < ranked.len() {
        let rest = &mut ranked[start..];
        let count = block.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, best_first);
        }
        rest[..count].sort_unstable_by(best_first);
        for index in start..start + count {
            weight += f64::from(ranked[index].weight);
            if weight >= target {
                ranked.truncate(index + 1);
                return;
            }
        }
        start += count;
        block *= 4;
    }
}

/// Keeps the tokens whose surprise is nearest to the average surprise (the entropy), until they have more than probability
/// `p` together. Among equally near ones the more likely comes first.
///
/// A token's surprise is `ln(total) - (logit - best)`, so the distance between it and the average needs no logarithm.
pub fn keep_typical(ranked: &mut Vec<Candidate>, best: f32, p: f32) {
    let (mut total, mut average) = (0.0, 0.0);
    for candidate in ranked.iter_mut() {
        candidate.weight = exp_nonpositive(candidate.logit - best);
        total += f64::from(candidate.weight);
        average += f64::from(candidate.weight) * f64::from(candidate.logit - best);
    }
    average /= total;
    let distance = |candidate: &Candidate| (average - f64::from(candidate.logit - best)).abs();
    ranked.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(best_first(a, b)));
    let target = f64::from(p) * total;
    let mut weight = 0.0;
    let enough = ranked.iter().position(|candidate| {
        weight += f64::from(candidate.weight);
        weight > target
    });
    ranked.truncate(enough.map_or(ranked.len(), |index| index + 1));
}

/// Returns the token in whose stretch of the total weight the point `at` in [0, 1) falls.
pub fn pick(weighed: impl Iterator<Item = (u32, f32)> + Clone, at: f64) -> Option<u32> {
    let total: f64 = weighed.clone().map(|(_, weight)| f64::from(weight)).sum();
    let point = at * total;
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in weighed.filter(|(_, weight)| *weight > 0.0) {
        sum += f64::from(weight);
        last = Some(id);
        if sum > point {
            break;
        }
    }
    last
}

/// Returns a number in [0, 1) that depends on `seed` and `index` only.
///
/// SplitMix64 (Steele, Lea, Flood 2014), addressed by index: output n is a hash of `seed + (n + 1) * GAMMA`. Written
/// here because it is six lines, must never change with a dependency's version, and needs no state: a sequence that is
/// rewound or replayed draws the same numbers at the same places.
pub fn uniform(seed: u64, index: u64) -> f64 {
    (split_mix(seed, index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

pub fn split_mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// e^x for x <= 0, to within 2 units in the last place: 2^n * e^r with |r| <= ln(2)/2 and the Taylor series for e^r.
/// Below e^-87 it is 0.
///
/// libm's `exp` differs in its last bits between platforms, which would move a draw that falls on an edge. Without
/// branches, so that a loop over a vocabulary vectorises.
pub fn exp_nonpositive(x: f32) -> f32 {
    /// ln(2) in two parts, the first with trailing zeros so that n * LN2_HIGH is exact (Cody and Waite).
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding and subtracting 1.5 * 2^23 rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let high = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0))));
    let series = 1.0 + r * (1.0 + r * (0.5 + r * high));
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x > -87.0 { series * power } else { 0.0 }
}
