//! From logits to the next token: the one path that every sampled token takes, the first of a request
//! included.
//!
//! Order: repetition penalty -> presence and frequency penalties -> DRY -> logit_bias -> log-probabilities are
//! read -> a grammar's mask -> top_n_sigma -> temperature -> top_k -> typical_p -> top_p -> min_p -> XTC -> draw.
//! Each truncation sees what the one before it kept, renormalised. `top_n_sigma` and `typical_p` are
//! llama.cpp's (with its `min_keep` of 0): their place among the truncations is the same, and `typical_p`
//! reads the probabilities before temperature. Mirostat takes the place of all truncations. `samplers` gives
//! another order (`order.rs`): logit_bias comes first then, and log-probabilities are read after the penalties
//! and DRY as far as these come before everything else.
//!
//! Invariants: the choice is a function of logits, parameters, history, seed and the token's index in its
//! turn, and of nothing else but Mirostat's bound, which the sequence keeps and which the tokens drawn before
//! determine: neighbours in a batch, rewinds and replays cannot change it. The arithmetic of
//! a draw uses IEEE basic operations only (its own `exp`, its own generator, sums in a fixed order), so it is
//! the same on every platform. Nothing is allocated per token in steady state; logits that are NaN or all
//! masked are errors, not panics.

mod candidates;
mod dry;
mod order;

use std::sync::Arc;

use super::grammar::TokenMask;
use super::request::{Logprob, Token};
use candidates::{
    Candidate, best_first, exp_nonpositive, keep_nucleus, keep_typical, lowest_near_best, pick, uniform,
};
use dry::Dry;
use llmctl_base::error::{Error, Result};
use llmctl_base::{SamplerStep, Sampling};
use llmctl_models::text::Vocabulary;

/// Inputs of a choice besides logits and parameters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turn<'a> {
    /// Everything the sequence holds: prompt, then the tokens generated since.
    pub tokens: &'a [u32],
    /// Index of the first generated token. Their number is the index of this draw.
    pub generated_from: usize,
    pub seed: u64,
    /// Report the log-probability, with this many alternatives.
    pub logprobs: Option<usize>,
    /// The tokens that may come next; `None` for all.
    pub mask: Option<&'a TokenMask>,
    /// Mirostat's bound on the surprise in bits (its mu); `None` before the first draw.
    pub surprise_bound: Option<f32>,
}

/// Chooses tokens. Holds only scratch space, so that one serves all sequences.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after penalties and bias; unused when a request has none.
    edited: Vec<f32>,
    /// The same with all but the allowed tokens at negative infinity; unused without a mask.
    masked: Vec<f32>,
    /// Logits with all but the tokens that `top_n_sigma` and `typical_p` keep at negative infinity; unused when both are off.
    kept: Vec<f32>,
    /// Occurrences by token id; all zero between calls.
    counts: Vec<u32>,
    /// By token id, proportional to its probability; the best token has 1.
    weights: Vec<f32>,
    /// Tokens still in the running, best first.
    ranked: Vec<Candidate>,
    dry: Dry,
    surprise_bound: Option<f32>,
}

impl Sampler {
    /// Tells the texts of tokens, without which DRY knows no sequence breakers.
    pub fn set_vocabulary(&mut self, vocabulary: Arc<dyn Vocabulary>) {
        self.dry.set_vocabulary(vocabulary);
    }

    /// Returns Mirostat's bound after the last choice, for the next one of the same sequence.
    pub fn surprise_bound(&self) -> Option<f32> {
        self.surprise_bound
    }

    /// Returns the next token. `logits` has one value per vocabulary entry, and every id in `turn.tokens`, in
    /// `sampling.logit_bias` and in `turn.mask` is below its length (ids beyond it are passed over).
    ///
    /// # Errors
    /// [`Error::NotFinite`] when a logit is NaN or infinite, [`Error::Backend`] when all are masked (negative infinity).
    pub fn sample(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<Token> {
        self.surprise_bound = turn.surprise_bound;
        let edited = self.edit(logits, sampling, turn);
        let mut buffer = std::mem::take(&mut self.edited);
        let processed = if edited { &buffer[..] } else { logits };
        let chosen = self.choose_allowed(processed, sampling, turn);
        let token =
            chosen.map(|id| Token { id, logprob: turn.logprobs.map(|n| self.logprob(processed, id, n)) });
        std::mem::swap(&mut self.edited, &mut buffer);
        token
    }

    /// Returns the log-probability of `id` under unchanged `logits`; `id` is below their number.
    ///
    /// # Errors
    /// Those of `sample`.
    pub fn score(&mut self, logits: &[f32], id: u32, num_alternatives: usize) -> Result<Logprob> {
        best(logits)?;
        Ok(self.logprob(logits, id, num_alternatives))
    }

    /// Applies penalties and bias to a copy in `self.edited`; false when there are none and nothing was copied.
    fn edit(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> bool {
        let first = order::first_edits(sampling);
        let changes = |step: &SamplerStep| match step {
            SamplerStep::Dry => sampling.uses_dry(),
            _ => sampling.uses_penalties(),
        };
        if !first.iter().any(changes) && sampling.logit_bias.is_empty() {
            return false;
        }
        self.edited.clear();
        self.edited.extend_from_slice(logits);
        if sampling.samplers.is_some() {
            self.add_bias(sampling);
        }
        first.iter().for_each(|step| self.penalise(*step, sampling, turn));
        if sampling.samplers.is_none() {
            self.add_bias(sampling);
        }
        true
    }

    fn add_bias(&mut self, sampling: &Sampling) {
        for (&id, bias) in &sampling.logit_bias {
            if let Some(logit) = self.edited.get_mut(id as usize) {
                *logit += bias;
            }
        }
    }

    /// Applies the penalties or DRY to `self.edited`.
    fn penalise(&mut self, step: SamplerStep, sampling: &Sampling, turn: &Turn<'_>) {
        self.counts.resize(self.edited.len(), 0);
        if step == SamplerStep::Dry {
            return self.dry.penalise(&mut self.edited, sampling, turn.tokens);
        }
        let generated = turn.tokens.get(turn.generated_from..).unwrap_or_default();
        let (seen, generated) = match sampling.repeat_last_n {
            window if window < 0.0 => (turn.tokens, generated),
            window => {
                let last = &turn.tokens[turn.tokens.len().saturating_sub(window as usize)..];
                (last, last)
            }
        };
        if sampling.repetition_penalty != 1.0 {
            let penalty = sampling.repetition_penalty;
            self.for_each_distinct(seen, |logit, _| {
                let changed = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                if logit.is_finite() {
                    *logit = changed.clamp(f32::MIN, f32::MAX); // a tiny penalty may overflow
                }
            });
        }
        if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
            let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
            self.for_each_distinct(generated, |logit, count| *logit -= presence + frequency * count as f32);
        }
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

    fn choose_allowed(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<u32> {
        match turn.mask {
            None => self.choose_kept(logits, sampling, turn),
            Some(TokenMask::Forced(id)) => Ok(*id),
            Some(TokenMask::Allowed(allowed)) => {
                let mut masked = std::mem::take(&mut self.masked);
                masked.clear();
                masked.resize(logits.len(), f32::NEG_INFINITY);
                allowed.for_each(|id| {
                    if let (Some(kept), Some(&logit)) = (masked.get_mut(id), logits.get(id)) {
                        *kept = logit;
                    }
                });
                let chosen = self.choose_kept(&masked, sampling, turn);
                self.masked = masked;
                chosen
            }
        }
    }

    /// Applies the truncations that work on logits, then chooses.
    fn choose_kept(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<u32> {
        if order::is_needed(sampling) {
            return self.choose_in_order(logits, sampling, turn);
        }
        let (has_sigma, has_typical) = (sampling.top_n_sigma > 0.0, sampling.typical_p < 1.0);
        if sampling.temperature == 0.0 || !(has_sigma || has_typical) {
            return self.choose(logits, sampling, turn);
        }
        let (_, best) = best(logits)?;
        let mut kept = std::mem::take(&mut self.kept);
        kept.clear();
        kept.extend_from_slice(logits);
        if has_sigma {
            keep_near_best(&mut kept, best, sampling.top_n_sigma);
        }
        if has_typical {
            keep_best(&mut self.ranked, &kept, sampling.top_k.unwrap_or(logits.len()));
            keep_typical(&mut self.ranked, best, sampling.typical_p);
            kept.fill(f32::NEG_INFINITY);
            for candidate in &self.ranked {
                kept[candidate.id as usize] = candidate.logit;
            }
        }
        let chosen = self.choose(&kept, sampling, turn);
        self.kept = kept;
        chosen
    }

    fn choose(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<u32> {
        let (best_id, best) = best(logits)?;
        if sampling.temperature == 0.0 || sampling.top_k == Some(1) {
            return Ok(best_id);
        }
        let at = uniform(turn.seed, turn.tokens.len().saturating_sub(turn.generated_from) as u64);
        let top_k = sampling.top_k.filter(|&k| k < logits.len());
        let chosen = if top_k.is_some() || sampling.top_p < 1.0 {
            self.rank(logits, best, top_k, sampling);
            let kept = self.ranked.iter().take_while(|candidate| candidate.weight >= sampling.min_p);
            pick(kept.map(|candidate| (candidate.id, candidate.weight)), at)
        } else {
            self.weigh(logits, best, sampling.temperature);
            for weight in &mut self.weights {
                *weight = if *weight >= sampling.min_p { *weight } else { 0.0 };
            }
            pick((0u32..).zip(self.weights.iter().copied()), at)
        };
        Ok(chosen.unwrap_or(best_id))
    }

    /// Fills `ranked` with what `top_k` and `top_p` leave.
    fn rank(&mut self, logits: &[f32], best: f32, top_k: Option<usize>, sampling: &Sampling) {
        let top_p = f64::from(sampling.top_p);
        match top_k {
            Some(k) => {
                keep_best(&mut self.ranked, logits, k);
                for candidate in &mut self.ranked {
                    candidate.weight = exp_nonpositive((candidate.logit - best) / sampling.temperature);
                }
                if top_p < 1.0 {
                    let total: f64 = self.ranked.iter().map(|candidate| f64::from(candidate.weight)).sum();
                    keep_nucleus(&mut self.ranked, top_p * total);
                }
            }
            None => {
                self.weigh(logits, best, sampling.temperature);
                let total = sum(&self.weights);
                // Tokens lighter than this weigh less than 1 - top_p together, so the nucleus is complete
                // without them; of a large vocabulary that leaves few to order.
                let lightest = (1.0 - top_p) * total / logits.len() as f64;
                let weighed = (0u32..).zip(logits.iter().zip(&self.weights));
                let heavy = weighed.filter(|(_, (_, weight))| f64::from(**weight) >= lightest);
                self.ranked.clear();
                self.ranked.extend(heavy.map(|(id, (&logit, &weight))| Candidate { id, logit, weight }));
                keep_nucleus(&mut self.ranked, top_p * total);
            }
        }
    }

    fn weigh(&mut self, logits: &[f32], best: f32, temperature: f32) {
        self.weights.clear();
        self.weights.extend(logits.iter().map(|logit| exp_nonpositive((logit - best) / temperature)));
    }

    /// Natural-log probabilities of `logits`, whose highest is finite.
    fn logprob(&mut self, logits: &[f32], id: u32, num_alternatives: usize) -> Logprob {
        keep_best(&mut self.ranked, logits, num_alternatives.max(1));
        let best = self.ranked.first().map_or(0.0, |candidate| candidate.logit);
        self.weigh(logits, best, 1.0);
        let log_total = f64::from(best) + libm::log(sum(&self.weights));
        let log_of = |logit: f32| (f64::from(logit) - log_total) as f32;
        let top = self.ranked.iter().take(num_alternatives);
        let top = top.map(|candidate| (candidate.id, log_of(candidate.logit))).collect();
        Logprob { logprob: log_of(logits[id as usize]), top }
    }
}

/// Returns the highest logit and its first index.
fn best(logits: &[f32]) -> Result<(u32, f32)> {
    // Independent lanes, because one running maximum would wait for itself at every step.
    let (mut highest, mut has_nan) = ([f32::NEG_INFINITY; 16], [false; 16]);
    let (blocks, rest) = logits.as_chunks::<16>();
    for block in blocks {
        for lane in 0..16 {
            highest[lane] = if block[lane] > highest[lane] { block[lane] } else { highest[lane] };
            has_nan[lane] |= block[lane].is_nan();
        }
    }
    let highest = highest.iter().chain(rest).fold(f32::NEG_INFINITY, |highest, &logit| highest.max(logit));
    if has_nan.contains(&true) || rest.iter().any(|logit| logit.is_nan()) {
        return Err(Error::NotFinite("NaN"));
    }
    match logits.iter().position(|&logit| logit == highest) {
        _ if highest == f32::INFINITY => Err(Error::NotFinite("infinity")),
        Some(index) if highest > f32::NEG_INFINITY => Ok((index as u32, highest)),
        _ => Err(Error::Backend("every token is masked".to_owned())),
    }
}

/// Fills `ranked` with the `k` best unmasked tokens, in order, weights unset. One pass; the bar rises as it goes.
fn keep_best(ranked: &mut Vec<Candidate>, logits: &[f32], k: usize) {
    ranked.clear();
    let mut bar = f32::NEG_INFINITY;
    for (id, &logit) in (0u32..).zip(logits) {
        // An equal logit does not pass: it has a higher id than those that set the bar.
        if logit > bar {
            ranked.push(Candidate { id, logit, weight: 0.0 });
            if ranked.len() == k.saturating_mul(2) {
                let (_, last, _) = ranked.select_nth_unstable_by(k - 1, best_first);
                bar = last.logit;
                ranked.truncate(k);
            }
        }
    }
    if k < ranked.len() {
        ranked.select_nth_unstable_by(k - 1, best_first);
        ranked.truncate(k);
    }
    ranked.sort_unstable_by(best_first);
}

/// Drops logits more than `n` standard deviations below the best. Those that are dropped already do not count.
fn keep_near_best(logits: &mut [f32], best: f32, n: f32) {
    let lowest = lowest_near_best(logits.iter().copied(), best, n);
    for logit in logits.iter_mut().filter(|logit| f64::from(**logit) < lowest) {
        *logit = f32::NEG_INFINITY;
    }
}

/// In fixed lanes: the same result everywhere, and no addition waits for the one before.
fn sum(weights: &[f32]) -> f64 {
    let mut lanes = [0.0; 8];
    let (blocks, rest) = weights.as_chunks::<8>();
    for block in blocks {
        for lane in 0..8 {
            lanes[lane] += f64::from(block[lane]);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|&weight| f64::from(weight)).sum::<f64>()
}

/// Returns a seed for a request that names none: from the operating system's randomness, below 2^53 so that JSON readers that
/// hold numbers as doubles report it exactly.
pub fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() >> 11
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::candidates::split_mix;
    use super::*;
    use crate::grammar::AllowedTokens;

    const FIRST: Turn<'static> =
        Turn { tokens: &[], generated_from: 0, seed: 7, logprobs: None, mask: None, surprise_bound: None };

    fn sample(logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) -> Result<Token> {
        Sampler::default().sample(logits, sampling, turn)
    }

    /// The ids of `count` draws, each with the index it would have in one long turn.
    fn draws(logits: &[f32], sampling: &Sampling, seed: u64, count: usize) -> Vec<u32> {
        let tokens = vec![0; count];
        let mut sampler = Sampler::default();
        let turn = |index| Turn {
            tokens: &tokens[..index],
            generated_from: 0,
            seed,
            logprobs: None,
            mask: None,
            surprise_bound: None,
        };
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
        assert_eq!((exp_nonpositive(0.0), exp_nonpositive(-0.0)), (1.0, 1.0));
        for step in 0..86_900 {
            let x = -(step as f32) * 0.001;
            let (ours, exact) = (f64::from(exp_nonpositive(x)), f64::from(x).exp());
            assert!(
                (ours - exact).abs() <= 2.0 * f64::from(f32::EPSILON) * exact,
                "exp({x}) = {ours}, not {exact}"
            );
        }
        assert_eq!((exp_nonpositive(-87.1), exp_nonpositive(f32::NEG_INFINITY)), (0.0, 0.0));
    }

    /// Tokens that 400 draws from `probabilities` give with these parameters, ascending.
    fn drawn(probabilities: &[f32], sampling: Sampling) -> Vec<u32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let sampling = Sampling { temperature: 1.0, ..sampling };
        let mut ids = draws(&logits, &sampling, 11, 400);
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The cases of llama.cpp's own test of its sampler.
    #[test]
    fn top_n_sigma_keeps_what_is_near_the_best_logit() {
        let kept = |n| drawn(&[0.1, 0.2, 0.3, 0.4], Sampling { top_n_sigma: n, ..Sampling::default() });
        assert_eq!(kept(1.0), [2, 3]);
        assert_eq!(kept(0.0), [0, 1, 2, 3]);
        assert_eq!(kept(-1.0), [0, 1, 2, 3]);
        assert_eq!(kept(3.0), [0, 1, 2, 3]);
    }

    /// The cases of llama.cpp's own test of its sampler.
    #[test]
    fn typical_p_keeps_what_is_near_the_entropy() {
        let kept =
            |probabilities: &[f32], p| drawn(probabilities, Sampling { typical_p: p, ..Sampling::default() });
        assert_eq!(kept(&[0.97, 0.01, 0.01, 0.01], 0.5), [0]);
        assert_eq!(kept(&[0.4, 0.2, 0.2, 0.2], 0.5), [1, 2, 3], "the most likely is not typical");
        assert_eq!(kept(&[0.4, 0.2, 0.2, 0.2], 1.0), [0, 1, 2, 3]);
    }

    #[test]
    fn typical_p_sees_what_top_k_keeps_before_temperature() {
        let probabilities = [0.4, 0.2, 0.15, 0.15, 0.1];
        let of = |top_k, temperature| {
            let logits: Vec<f32> = probabilities.iter().map(|p: &f32| p.ln()).collect();
            let sampling = Sampling { temperature, top_k, typical_p: 0.3, ..Sampling::default() };
            let mut ids = draws(&logits, &sampling, 11, 400);
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(of(None, 1.0), [1, 2]);
        assert_eq!(of(None, 2.0), [1, 2], "the temperature does not change what is typical");
        assert_eq!(of(Some(2), 1.0), [0], "of two, the likelier is nearer to the average");
    }

    #[test]
    fn top_n_sigma_does_not_count_tokens_that_a_grammar_forbids() {
        let logits = [0.0, -1.0, -2.0, -300.0];
        let allowed = AllowedTokens::of(4, &[0, 1, 2]);
        let mask = TokenMask::Allowed(allowed);
        let sampling = Sampling { temperature: 2.0, top_n_sigma: 1.0, ..Sampling::default() };
        for seed in 0..100 {
            let turn = Turn { mask: Some(&mask), seed, ..FIRST };
            assert_eq!(sample(&logits, &sampling, &turn).expect("a token").id, 0);
        }
        let mut ids: Vec<u32> = (0..100)
            .map(|seed| sample(&logits, &sampling, &Turn { seed, ..FIRST }).expect("a token").id)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids, [0, 1, 2], "without the mask, the forbidden one widens the deviation");
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
                let is_told = match result {
                    Err(Error::Backend(_)) => logits == masked,
                    Err(Error::NotFinite(what)) => logits != masked && ["NaN", "infinity"].contains(&what),
                    _ => false,
                };
                assert!(is_told, "{logits:?} {sampling:?}: {result:?}");
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
        sampler.edit(
            logits,
            sampling,
            &Turn { tokens, generated_from, seed: 0, logprobs: None, mask: None, surprise_bound: None },
        );
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
    fn a_window_counts_the_last_tokens_of_prompt_and_answer_alike() {
        let all = Sampling { repetition_penalty: 2.0, frequency_penalty: 0.5, ..Sampling::default() };
        let windowed = |last_n: f32| {
            let sampling = Sampling { repeat_last_n: last_n, ..all.clone() };
            edited(&[4.0, 4.0, 4.0, 4.0], &sampling, &[0, 1, 2, 2], 3)
        };
        assert_eq!(windowed(-1.0), [2.0, 2.0, 1.5, 4.0]);
        assert_eq!(windowed(3.0), [4.0, 1.5, 1.0, 4.0]);
        assert_eq!(windowed(9.0), [1.5, 1.5, 1.0, 4.0]);
        assert!(windowed(0.0).is_empty(), "no penalties, no copy");
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
        let replayed = Turn {
            tokens: &[5, 9, 0, 0, 0],
            generated_from: 2,
            seed: 42,
            logprobs: None,
            mask: None,
            surprise_bound: None,
        };
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
    fn only_allowed_tokens_are_chosen_and_log_probabilities_know_no_mask() {
        let p = [0.1, 0.4, 0.05, 0.25, 0.2];
        let allowed = TokenMask::Allowed(AllowedTokens::of(5, &[0, 2]));
        let turn = Turn { mask: Some(&allowed), logprobs: Some(2), ..FIRST };
        let token = sample(&logs(&p), &Sampling::default(), &turn).expect("finite");
        let logprob = token.logprob.expect("asked for");
        assert_eq!((token.id, logprob.top[0].0), (0, 1));
        assert!((f64::from(logprob.logprob) - 0.1f64.ln()).abs() < 1e-6);
        let mut sampler = Sampler::default();
        for seed in 0..200 {
            let turn = Turn { seed, ..turn };
            let drawn = sampler.sample(&logs(&p), &at_temperature(2.0), &turn).expect("finite").id;
            assert!([0, 2].contains(&drawn), "{drawn}");
        }
        let forced = TokenMask::Forced(2);
        let turn = Turn { mask: Some(&forced), ..FIRST };
        assert_eq!(sampler.sample(&logs(&p), &at_temperature(0.1), &turn).expect("finite").id, 2);
        let nothing = TokenMask::Allowed(AllowedTokens::of(5, &[]));
        let turn = Turn { mask: Some(&nothing), ..FIRST };
        assert!(matches!(sampler.sample(&logs(&p), &Sampling::default(), &turn), Err(Error::Backend(_))));
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
        let turn = Turn {
            tokens: &[1, 2, 3],
            generated_from: 1,
            seed: 1,
            logprobs: None,
            mask: None,
            surprise_bound: None,
        };
        let mut sampler = Sampler::default();
        let places =
            |s: &Sampler| (s.edited.as_ptr(), s.counts.as_ptr(), s.weights.as_ptr(), s.ranked.as_ptr());
        let first = sampler.sample(&logits, &sampling, &turn).expect("finite");
        let before = places(&sampler);
        assert_eq!(sampler.sample(&logits, &sampling, &turn).expect("finite"), first);
        assert_eq!(places(&sampler), before);
    }

    /// The same choice by sorting everything.
    fn reference(logits: &[f32], sampling: &Sampling, at: f64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let top_k = sampling.top_k.filter(|&k| k < logits.len());
        order.truncate(top_k.unwrap_or(logits.len()));
        let best = logits[order[0]];
        let weight = |id: usize| exp_nonpositive((logits[id] - best) / sampling.temperature);
        let weight = |id: &usize| f64::from(weight(*id));
        if sampling.top_p < 1.0 {
            let target = f64::from(sampling.top_p) * order.iter().map(weight).sum::<f64>();
            let mut sum = 0.0;
            let reached = order.iter().position(|id| {
                sum += weight(id);
                sum >= target
            });
            order.truncate(reached.map_or(order.len(), |last| last + 1));
        }
        order.retain(|id| weight(id) >= f64::from(sampling.min_p));
        if top_k.is_none() && sampling.top_p == 1.0 {
            order.sort_unstable(); // what is not ranked is drawn in id order
        }
        let point = at * order.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let chosen = order.iter().find(|id| {
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
            let turn = Turn { tokens: &[], generated_from: 0, seed, logprobs: None, mask: None, surprise_bound: None };
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
            let turn = Turn { tokens: &tokens, generated_from: tokens.len() / 2, seed, logprobs: Some(4), mask: None, surprise_bound: None };
            let mut sampler = Sampler::default();
            sampler.sample(&first, &sampling, &turn).expect("finite");
            let reused = sampler.sample(&second, &sampling, &turn).expect("finite");
            prop_assert_eq!(reused, sample(&second, &sampling, &turn).expect("finite"));
        }
    }
}
