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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const FIRST: Turn<'static> = Turn { tokens: &[], generated_from: 0, seed: 7, logprobs: None };

    fn sample(logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<Token> {
        Sampler::default().sample(logits, sampling, turn)
    }

    /// The ids of `count` draws, each with the index it would have in one long turn.
    fn draws(logits: &[f32], sampling: &Sampling, seed: u64, count: usize) -> Vec<u32> {
        let tokens = vec![0; count];
        let mut sampler = Sampler::default();
        let turn = |index| Turn { tokens: &tokens[..index], generated_from: 0, seed, logprobs: None };
        (0..count)
            .map(|index| sampler.sample(logits, sampling, &turn(index)).expect("finite logits").id)
            .collect()
    }

    fn at_temperature(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::default() }
    }

    #[test]
    fn the_generator_gives_the_published_sequence() {
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!([0, 1, 2, 3, 4].map(|index| split_mix(1_234_567, index)), expected);
        assert_eq!(split_mix(u64::MAX, u64::MAX), split_mix(u64::MAX, u64::MAX), "wraps, never overflows");
        assert!((0..10_000).map(|index| uniform(3, index)).all(|u| (0.0..1.0).contains(&u)));
    }

    #[test]
    fn exp_agrees_with_the_library_and_underflows_to_zero() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-0.0), 1.0);
        for step in 0..70_000 {
            let x = -f64::from(step) * 0.01;
            let (ours, library) = (exp_nonpositive(x), x.exp());
            assert!((ours - library).abs() <= 4e-16 * library, "exp({x}) = {ours}, not {library}");
        }
        assert_eq!((exp_nonpositive(-1e9), exp_nonpositive(f64::NEG_INFINITY)), (0.0, 0.0));
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let greedy = Sampling::default();
        assert_eq!(sample(&[1.0, 3.0, 3.0, -2.0], &greedy, &FIRST).expect("finite").id, 1);
        assert_eq!(sample(&[-0.0, 0.0], &greedy, &FIRST).expect("finite").id, 0);
        let only_best = Sampling { top_k: Some(1), ..at_temperature(2.0) };
        assert_eq!(sample(&[1.0, 3.0, 3.0, -2.0], &only_best, &FIRST).expect("finite").id, 1);
    }

    #[test]
    fn broken_logits_are_errors_on_every_path() {
        let nan_last = [0.0, 1.0, f32::NAN];
        let nan_first = [f32::NAN, 1.0, 0.0];
        let masked = [f32::NEG_INFINITY; 3];
        let infinite = [0.0, f32::INFINITY, 0.0];
        let edited = Sampling { logit_bias: BTreeMap::from([(0, 1.0)]), ..at_temperature(1.0) };
        for sampling in [Sampling::default(), at_temperature(1.0), edited] {
            for logits in [nan_first, nan_last, masked, infinite] {
                let result = sample(&logits, &sampling, &FIRST);
                assert!(matches!(result, Err(Error::Backend(_))), "{logits:?} {sampling:?}: {result:?}");
            }
        }
        assert!(sample(&[], &Sampling::default(), &FIRST).is_err());
    }

    #[test]
    fn masked_tokens_are_never_drawn() {
        let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
        assert!(draws(&logits, &at_temperature(2.0), 1, 500).iter().all(|id| id % 2 == 1));
    }

    /// The logits after penalties and bias, as the sampler sees them.
    fn edited(logits: &[f32], sampling: &Sampling, tokens: &[u32], generated_from: usize) -> Vec<f32> {
        let mut sampler = Sampler::default();
        sampler.edit(logits, sampling, &Turn { tokens, generated_from, seed: 0, logprobs: None });
        assert!(sampler.counts.iter().all(|&count| count == 0), "counts are left clean");
        sampler.edited
    }

    #[test]
    fn repetition_counts_prompt_and_answer_once_and_the_others_the_answer_only() {
        let logits = [4.0, -4.0, 2.0, 1.0];
        let repetition = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(edited(&logits, &repetition, &[0, 1, 1, 0], 3), [2.0, -8.0, 2.0, 1.0]);
        let presence = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        assert_eq!(edited(&logits, &presence, &[0, 1, 2, 2], 2), [4.0, -4.0, 1.5, 1.0]);
        let frequency = Sampling { frequency_penalty: 0.5, ..Sampling::default() };
        assert_eq!(edited(&logits, &frequency, &[0, 2, 2, 3], 1), [4.0, -4.0, 1.0, 0.5]);
        let bias = Sampling { logit_bias: BTreeMap::from([(3, 100.0), (0, -100.0)]), ..Sampling::default() };
        assert_eq!(edited(&logits, &bias, &[], 0), [-96.0, -4.0, 2.0, 101.0]);
    }

    #[test]
    fn penalties_come_in_the_documented_order_and_survive_extremes() {
        let all = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            logit_bias: BTreeMap::from([(0, 3.0)]),
            ..Sampling::default()
        };
        assert_eq!(edited(&[8.0, 0.0], &all, &[0, 0], 0), [8.0 / 2.0 - 1.0 - 0.5 * 2.0 + 3.0, 0.0]);
        let tiny = Sampling { repetition_penalty: f32::MIN_POSITIVE, ..Sampling::default() };
        assert_eq!(edited(&[8.0, f32::NEG_INFINITY], &tiny, &[0, 1], 2), [f32::MAX, f32::NEG_INFINITY]);
        assert_eq!(edited(&[1.0, 2.0], &all, &[99, 1, u32::MAX], 0), [4.0, 2.0 / 2.0 - 1.5], "foreign ids");
    }

    #[test]
    fn no_processing_copies_nothing() {
        let mut sampler = Sampler::default();
        assert!(!sampler.edit(&[1.0, 2.0], &at_temperature(1.0), &FIRST));
    }

    /// Chi-square of `count` draws against `expected` probabilities.
    fn chi_square(drawn: &[u32], expected: &[f64]) -> f64 {
        let count_of = |id: usize| drawn.iter().filter(|&&drawn| drawn as usize == id).count() as f64;
        let term = |(id, &p): (usize, &f64)| {
            let wanted = p * drawn.len() as f64;
            (count_of(id) - wanted).powi(2) / wanted
        };
        expected.iter().enumerate().filter(|(_, p)| **p > 0.0).map(term).sum()
    }

    /// Draws follow `expected`; ids of probability 0 never occur. 27.9 is the 0.1% point at 9 degrees of freedom, more
    /// than any case here has.
    fn check_distribution(logits: &[f32], sampling: &Sampling, expected: &[f64]) {
        for seed in [1, 2, u64::MAX] {
            let drawn = draws(logits, sampling, seed, 20_000);
            assert!(drawn.iter().all(|&id| expected[id as usize] > 0.0), "{sampling:?}");
            let deviation = chi_square(&drawn, expected);
            assert!(deviation < 27.9, "{sampling:?}: chi-square {deviation}");
        }
    }

    fn logs(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn draws_follow_the_distribution() {
        let p = [0.1, 0.4, 0.05, 0.25, 0.2];
        let plain = at_temperature(1.0);
        check_distribution(&logs(&p), &plain, &p);
        let squares: Vec<f64> = p.iter().map(|p| p * p / 0.275).collect(); // 0.275 = sum of squares
        check_distribution(&logs(&p), &at_temperature(0.5), &squares);
        let top_k = Sampling { top_k: Some(3), ..plain.clone() };
        check_distribution(&logs(&p), &top_k, &[0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85]);
        let top_p = Sampling { top_p: 0.6, ..plain.clone() };
        check_distribution(&logs(&p), &top_p, &[0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0]);
        let min_p = Sampling { min_p: 0.4, ..plain.clone() };
        check_distribution(&logs(&p), &min_p, &[0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85]);
        // top_p is taken of what top_k left: 0.4 / 0.65 already reaches 0.61, as 0.4 of the whole does not.
        let both = Sampling { top_k: Some(2), top_p: 0.61, ..plain };
        check_distribution(&logs(&p), &both, &[0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn equal_logits_are_cut_by_id() {
        let flat = [1.0; 6];
        let top_k = Sampling { top_k: Some(2), ..at_temperature(1.0) };
        check_distribution(&flat, &top_k, &[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]);
        let top_p = Sampling { top_p: 0.4, ..at_temperature(1.0) };
        let third = 1.0 / 3.0;
        check_distribution(&flat, &top_p, &[third, third, third, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn the_coldest_and_hottest_temperatures_work() {
        let logits = [1.0, 1.1, -50.0, 0.9];
        assert!(draws(&logits, &at_temperature(1e-3), 5, 300).iter().all(|&id| id == 1));
        assert!(draws(&logits, &at_temperature(f32::MIN_POSITIVE), 5, 300).iter().all(|&id| id == 1));
        assert_eq!(draws(&[3.0e38, -3.0e38], &at_temperature(2.0), 5, 3), [0, 0, 0]);
        let tiny_top_p = Sampling { top_p: f32::MIN_POSITIVE, ..at_temperature(2.0) };
        assert!(draws(&logits, &tiny_top_p, 5, 300).iter().all(|&id| id == 1));
    }

    #[test]
    fn a_seed_fixes_the_draws_and_index_and_seed_change_them() {
        let logits = [0.0; 64];
        let plain = at_temperature(1.0);
        // Pinned: these ids must never change, or printed seeds lose their meaning.
        assert_eq!(draws(&logits, &plain, 42, 8), [47, 10, 17, 22, 2, 55, 13, 51]);
        assert_ne!(draws(&logits, &plain, 43, 8), draws(&logits, &plain, 42, 8));
        let replayed = Turn { tokens: &[5, 9, 0, 0, 0], generated_from: 2, seed: 42, logprobs: None };
        assert_eq!(sample(&logits, &plain, &replayed).expect("finite").id, 22, "draw 3, wherever it happens");
    }

    #[test]
    fn drawn_seeds_differ_and_are_exact_as_doubles() {
        let seeds: Vec<u64> = (0..32).map(|_| draw_seed()).collect();
        assert!(seeds.iter().all(|&seed| seed < 1 << 53));
        assert!(seeds.windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn logprobs_are_of_the_model_after_penalties_and_before_temperature() {
        let p = [0.1, 0.4, 0.05, 0.25, 0.2];
        let turn = Turn { logprobs: Some(3), ..FIRST };
        let sampling = Sampling { top_k: Some(1), ..at_temperature(0.1) };
        let logprob = sample(&logs(&p), &sampling, &turn).expect("finite").logprob.expect("asked for");
        let close = |ours: f32, p: f64| (f64::from(ours) - p.ln()).abs() < 1e-6;
        assert!(close(logprob.logprob, 0.4));
        assert_eq!(logprob.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 4]);
        assert!(logprob.top.iter().zip([0.4, 0.25, 0.2]).all(|(&(_, ours), p)| close(ours, p)));
        let biased = Sampling { logit_bias: BTreeMap::from([(2, 100.0)]), ..Sampling::default() };
        let token = sample(&logs(&p), &biased, &turn).expect("finite");
        assert_eq!((token.id, token.logprob.expect("asked for").logprob), (2, 0.0));
    }

    #[test]
    fn logprobs_of_masked_and_small_vocabularies() {
        let turn = Turn { logprobs: Some(20), ..FIRST };
        let logits = [0.0, f32::NEG_INFINITY, 0.0];
        let logprob =
            sample(&logits, &Sampling::default(), &turn).expect("finite").logprob.expect("asked for");
        let half = -std::f32::consts::LN_2;
        assert_eq!(logprob.top, [(0, half), (2, half)], "only tokens that can occur");
        let none =
            sample(&logits, &Sampling::default(), &Turn { logprobs: Some(0), ..FIRST }).expect("finite");
        assert_eq!(none.logprob.expect("asked for"), Logprob { logprob: half, top: Vec::new() });
        assert_eq!(sample(&logits, &Sampling::default(), &FIRST).expect("finite").logprob, None);
    }

    #[test]
    fn scratch_is_allocated_once() {
        let logits: Vec<f32> = (0..50_000).map(|id| ((id * 7919) % 1000) as f32 * 0.01).collect();
        let sampling = Sampling {
            top_p: 0.9,
            top_k: Some(1000),
            repetition_penalty: 1.1,
            frequency_penalty: 0.1,
            ..at_temperature(0.8)
        };
        let turn = Turn { tokens: &[1, 2, 3], generated_from: 1, seed: 1, logprobs: None };
        let mut sampler = Sampler::default();
        let places =
            |s: &Sampler| (s.edited.as_ptr(), s.counts.as_ptr(), s.candidates.as_ptr(), s.ranked.as_ptr());
        let first = sampler.sample(&logits, &sampling, &turn).expect("finite");
        let before = places(&sampler);
        assert_eq!(sampler.sample(&logits, &sampling, &turn).expect("finite"), first);
        assert_eq!(places(&sampler), before);
    }

    /// The same choice by sorting everything.
    fn reference(logits: &[f32], sampling: &Sampling, at: f64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(sampling.top_k.unwrap_or(logits.len()));
        let best = f64::from(logits[order[0]]);
        let weight =
            |id: usize| exp_nonpositive((f64::from(logits[id]) - best) / f64::from(sampling.temperature));
        if sampling.top_p < 1.0 {
            let mut in_id_order = order.clone();
            in_id_order.sort_unstable();
            let target = f64::from(sampling.top_p) * in_id_order.iter().map(|&id| weight(id)).sum::<f64>();
            let mut sum = 0.0;
            let reached = order.iter().position(|&id| {
                sum += weight(id);
                sum >= target
            });
            order.truncate(reached.map_or(order.len(), |last| last + 1));
        }
        order.retain(|&id| weight(id) >= f64::from(sampling.min_p));
        order.sort_unstable();
        let point = at * order.iter().map(|&id| weight(id)).sum::<f64>();
        let mut sum = 0.0;
        let chosen = order.iter().find(|&&id| {
            sum += weight(id);
            sum > point
        });
        *chosen.unwrap_or(&order[order.len() - 1]) as u32
    }

    proptest! {
        #[test]
        fn partial_selection_equals_sorting_everything(
            logits in prop::collection::vec((-80i32..80).prop_map(|x| x as f32 * 0.1), 1..700),
            temperature in 0.05f32..2.0,
            top_k in prop::option::of(1usize..400),
            top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
            seed in any::<u64>(),
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
            let turn = Turn { tokens: &[], generated_from: 0, seed, logprobs: None };
            let token = sample(&logits, &sampling, &turn).expect("finite");
            prop_assert_eq!(token.id, reference(&logits, &sampling, uniform(seed, 0)));
        }

        #[test]
        fn used_scratch_changes_nothing(
            first in prop::collection::vec(-5f32..5.0, 1..80), second in prop::collection::vec(-5f32..5.0, 1..80),
            tokens in prop::collection::vec(0u32..80, 0..30), seed in any::<u64>(),
        ) {
            let sampling = Sampling {
                top_p: 0.8, repetition_penalty: 1.3, presence_penalty: 0.4, frequency_penalty: -0.3,
                ..at_temperature(0.9)
            };
            let turn = Turn { tokens: &tokens, generated_from: tokens.len() / 2, seed, logprobs: Some(4) };
            let mut sampler = Sampler::default();
            sampler.sample(&first, &sampling, &turn).expect("finite");
            let reused = sampler.sample(&second, &sampling, &turn).expect("finite");
            prop_assert_eq!(reused, sample(&second, &sampling, &turn).expect("finite"));
        }
    }
}
