//! From logits to the next token: the one path that every sampled token takes, the first of a request included.
//!
//! Order: repetition penalty -> presence and frequency penalties -> logit_bias -> (a grammar's mask belongs here) ->
//! log-probabilities are read -> temperature -> top_k -> top_p -> min_p -> draw. Each truncation sees what the one
//! before it kept, renormalised.
//!
//! Invariants: the choice is a function of logits, parameters, history, seed and the token's index in its turn, and of
//! nothing else: neighbours in a batch, rewinds and replays cannot change it. The arithmetic of a draw uses IEEE
//! basic operations only (its own `exp`, its own generator, sums in id order), so it is the same on every platform.
//! Nothing is allocated per token in steady state; logits that are NaN or all masked are errors, not panics.

use std::cmp::Ordering;

use super::error::{Error, Result};
use super::request::{Logprob, Sampling, Token};

/// What a choice depends on besides logits and parameters.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a> {
    /// Everything the sequence holds: prompt, then the tokens generated since.
    pub tokens: &'a [u32],
    /// Where the generated ones begin. Their number is the index of this draw.
    pub generated_from: usize,
    pub seed: u64,
    /// Report the log-probability, with this many alternatives.
    pub logprobs: Option<usize>,
}

/// Chooses tokens. Holds only scratch space, so that one serves all sequences.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after penalties and bias; unused when a request has none.
    edited: Vec<f32>,
    /// Occurrences by token id; all zero between calls.
    counts: Vec<u32>,
    /// Tokens still in the running, in id order.
    candidates: Vec<Candidate>,
    /// Candidates being ordered, wholly or in part.
    ranked: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Proportional to its probability; the best candidate has 1.
    weight: f64,
}

impl Sampler {
    /// The next token. `logits` has one value per vocabulary entry, and every id in `turn.tokens` and in
    /// `sampling.logit_bias` is below its length (ids beyond it are passed over).
    ///
    /// # Errors
    /// [`Error::Backend`] when a logit is NaN or infinite, or when all are masked (negative infinity).
    pub fn sample(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<Token> {
        let edited = self.edit(logits, sampling, turn);
        let mut buffer = std::mem::take(&mut self.edited);
        let processed = if edited { &buffer[..] } else { logits };
        let chosen = self.choose(processed, sampling, turn);
        let token =
            chosen.map(|id| Token { id, logprob: turn.logprobs.map(|n| self.logprob(processed, id, n)) });
        std::mem::swap(&mut self.edited, &mut buffer);
        token
    }

    /// Applies penalties and bias to a copy in `self.edited`; false when there are none and nothing was copied.
    fn edit(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> bool {
        let penalises_generated = sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
        if sampling.repetition_penalty == 1.0 && !penalises_generated && sampling.logit_bias.is_empty() {
            return false;
        }
        self.edited.clear();
        self.edited.extend_from_slice(logits);
        self.counts.resize(logits.len(), 0);
        if sampling.repetition_penalty != 1.0 {
            let penalty = sampling.repetition_penalty;
            self.for_each_distinct(turn.tokens, |logit, _| {
                let changed = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                if logit.is_finite() {
                    *logit = changed.clamp(f32::MIN, f32::MAX); // a tiny penalty may overflow
                }
            });
        }
        if penalises_generated {
            let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
            let generated = turn.tokens.get(turn.generated_from..).unwrap_or_default();
            self.for_each_distinct(generated, |logit, count| *logit -= presence + frequency * count as f32);
        }
        for (&id, bias) in &sampling.logit_bias {
            if let Some(logit) = self.edited.get_mut(id as usize) {
                *logit += bias;
            }
        }
        true
    }

    /// Calls `change` once per distinct id in `tokens`, with its logit and how often it occurs.
    ///
    /// History is recounted for each token rather than kept per sequence: one pass over ids is small beside the
    /// attention over the same positions, and a rewind then has nothing to undo.
    fn for_each_distinct(&mut self, tokens: &[u32], mut change: impl FnMut(&mut f32, u32)) {
        let known = |id: &&u32| (**id as usize) < self.edited.len();
        for &id in tokens.iter().filter(known) {
            self.counts[id as usize] += 1;
        }
        for &id in tokens {
            if let (Some(count), Some(logit)) =
                (self.counts.get_mut(id as usize), self.edited.get_mut(id as usize))
                && *count > 0
            {
                change(logit, std::mem::take(count));
            }
        }
    }

    fn choose(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<u32> {
        let best = argmax(logits)?;
        if sampling.temperature == 0.0 || sampling.top_k == Some(1) {
            return Ok(best);
        }
        let index = turn.tokens.len().saturating_sub(turn.generated_from) as u64;
        self.gather(logits, sampling.top_k);
        self.weigh(f64::from(logits[best as usize]), f64::from(sampling.temperature));
        if sampling.top_p < 1.0 {
            self.keep_nucleus(f64::from(sampling.top_p));
        }
        if sampling.min_p > 0.0 {
            let least = f64::from(sampling.min_p);
            self.candidates.retain(|candidate| candidate.weight >= least);
        }
        Ok(pick(&self.candidates, uniform(turn.seed, index)).unwrap_or(best))
    }

    /// Fills `candidates` with the unmasked tokens, or with the `top_k` best of them, in id order.
    fn gather(&mut self, logits: &[f32], top_k: Option<usize>) {
        let unmasked = |&(_, &logit): &(usize, &f32)| logit != f32::NEG_INFINITY;
        let candidate = |(id, &logit): (usize, &f32)| Candidate { id: id as u32, logit, weight: 0.0 };
        self.candidates.clear();
        self.candidates.extend(logits.iter().enumerate().filter(unmasked).map(candidate));
        if let Some(k) = top_k.filter(|&k| k > 0 && k < self.candidates.len()) {
            self.ranked.clear();
            self.ranked.extend_from_slice(&self.candidates);
            let (_, &mut last, _) = self.ranked.select_nth_unstable_by(k - 1, best_first);
            self.candidates.retain(|candidate| best_first(candidate, &last) != Ordering::Greater);
        }
    }

    fn weigh(&mut self, best: f64, temperature: f64) {
        for candidate in &mut self.candidates {
            candidate.weight = exp_nonpositive((f64::from(candidate.logit) - best) / temperature);
        }
    }

    /// Keeps the smallest best-first set whose share of the weight reaches `top_p`.
    fn keep_nucleus(&mut self, top_p: f64) {
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        // Candidates lighter than this weigh less than 1 - top_p together, so the nucleus is complete without
        // them; in a large vocabulary that leaves few to order.
        let lightest = (1.0 - top_p) * total / self.candidates.len() as f64;
        self.ranked.clear();
        self.ranked.extend(self.candidates.iter().filter(|candidate| candidate.weight >= lightest));
        if let Some(last) = nucleus_end(&mut self.ranked, top_p * total) {
            self.candidates.retain(|candidate| best_first(candidate, &last) != Ordering::Greater);
        }
    }

    /// `logits` hold a finite maximum: [`Sampler::choose`] has checked.
    fn logprob(&mut self, logits: &[f32], id: u32, num_alternatives: usize) -> Logprob {
        self.gather(logits, None);
        let best =
            self.candidates.iter().fold(f32::NEG_INFINITY, |best, candidate| best.max(candidate.logit));
        self.weigh(f64::from(best), 1.0);
        let total: f64 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        let log_total = f64::from(best) + total.ln();
        let log_of = |logit: f32| (f64::from(logit) - log_total) as f32;
        let wanted = num_alternatives.min(self.candidates.len());
        if wanted > 0 && wanted < self.candidates.len() {
            self.candidates.select_nth_unstable_by(wanted - 1, best_first);
        }
        let top = &mut self.candidates[..wanted];
        top.sort_unstable_by(best_first);
        let top = top.iter().map(|candidate| (candidate.id, log_of(candidate.logit))).collect();
        Logprob { logprob: log_of(logits[id as usize]), top }
    }
}

/// Higher logit first; among equals the lower id. A total order, because NaN was refused before.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// The first index of the highest logit.
fn argmax(logits: &[f32]) -> Result<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    let mut has_nan = false;
    for (id, &logit) in logits.iter().enumerate() {
        has_nan |= logit.is_nan();
        if logit > best.1 {
            best = (id, logit);
        }
    }
    match best {
        _ if has_nan => Err(Error::Backend("the model's logits hold NaN".to_owned())),
        (_, f32::INFINITY) => Err(Error::Backend("the model's logits hold infinity".to_owned())),
        (_, f32::NEG_INFINITY) => Err(Error::Backend("every token is masked".to_owned())),
        (id, _) => Ok(id as u32),
    }
}

/// The last member of the smallest best-first set that weighs at least `target`. Orders only as much as it needs.
fn nucleus_end(ranked: &mut [Candidate], target: f64) -> Option<Candidate> {
    let mut weight = 0.0;
    let mut rest = ranked;
    let mut block = 64;
    let mut last = None;
    while !rest.is_empty() {
        let count = block.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count - 1, best_first);
        }
        let (head, tail) = rest.split_at_mut(count);
        head.sort_unstable_by(best_first);
        for candidate in head.iter() {
            weight += candidate.weight;
            last = Some(*candidate);
            if weight >= target {
                return last;
            }
        }
        rest = tail;
        block *= 4;
    }
    last
}

/// The candidate in whose stretch of the total weight the point `at` in [0, 1) falls.
fn pick(candidates: &[Candidate], at: f64) -> Option<u32> {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let point = at * total;
    let mut weight = 0.0;
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        weight += candidate.weight;
        last = Some(candidate.id);
        if weight > point {
            break;
        }
    }
    last
}

/// A number in [0, 1) that depends on `seed` and `index` only.
///
/// SplitMix64 (Steele, Lea, Flood 2014), addressed by index: output n is a hash of `seed + (n + 1) * GAMMA`. Written
/// here because it is six lines, must never change with a dependency's version, and needs no state: a sequence that is
/// rewound or replayed draws the same numbers at the same places.
fn uniform(seed: u64, index: u64) -> f64 {
    (split_mix(seed, index) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

fn split_mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A seed for a request that names none: from the operating system's randomness, below 2^53 so that JSON readers that
/// hold numbers as doubles report it exactly.
pub fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() >> 11
}

/// e^x for x <= 0, to about 1 ulp: 2^n * e^r with |r| <= ln(2)/2 and the Taylor series for e^r.
///
/// libm's `exp` differs in its last bit between platforms, which would move a draw that falls on an edge.
fn exp_nonpositive(x: f64) -> f64 {
    /// ln(2) in two parts, the first with trailing zeros so that n * LN2_HIGH is exact (Cody and Waite).
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// Adding and subtracting 1.5 * 2^52 rounds to an integer.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const TAYLOR: [f64; 14] = {
        let mut terms = [1.0; 14];
        let mut k = 1;
        while k < 14 {
            terms[k] = terms[k - 1] / k as f64;
            k += 1;
        }
        terms
    };
    if x < -700.0 {
        return 0.0; // below the normal range of the exponent arithmetic, and of no weight
    }
    let n = (x * std::f64::consts::LOG2_E + ROUND) - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let series = TAYLOR.iter().rev().fold(0.0, |sum, term| sum * r + term);
    let power = f64::from_bits(((1023 + n as i64) as u64) << 52);
    series * power
}
