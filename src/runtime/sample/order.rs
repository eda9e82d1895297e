//! The general way from logits to a draw: the steps of an order, one after another, each over what the one
//! before it left. Computes what llama.cpp's samplers compute, with its `min_keep` of 0.
//!
//! Differences: sums are f64; where a step would leave NaN there (no finite logit, a temperature so low that
//! logits overflow), the best tokens stay; tokens at negative infinity are none of the typical ones.

use super::{
    Candidate, Sampler, Turn, best, best_first, candidates, keep_best, keep_nucleus, keep_typical,
    lowest_near_best, pick, uniform,
};
use llmctl_base::error::Result;
use llmctl_base::{SamplerStep, Sampling};

/// The steps after the penalties where no order is given: those of `Sampler::choose`, whose cuts before the temperature see
/// logits that it has not changed.
const OWN_ORDER: [SamplerStep; 7] = [
    SamplerStep::TopNSigma,
    SamplerStep::TopK,
    SamplerStep::TypicalP,
    SamplerStep::Temperature,
    SamplerStep::TopP,
    SamplerStep::MinP,
    SamplerStep::Xtc,
];

/// Where XTC's random numbers differ from those of the draws.
const XTC_SEED: u64 = 0x5854_4320_5854_4320;

/// The most tokens from which Mirostat 1 estimates the exponent of Zipf's law (its m).
const ZIPF_TOKENS: usize = 100;

/// Returns the penalties with which the order begins; they change the logits that log-probabilities are read of.
pub fn first_edits(sampling: &Sampling) -> &[SamplerStep] {
    let order = match &sampling.samplers {
        None => return &[SamplerStep::Penalties, SamplerStep::Dry],
        Some(order) => order,
    };
    let is_edit = |step: &&SamplerStep| matches!(step, SamplerStep::Penalties | SamplerStep::Dry);
    &order[..order.iter().take_while(is_edit).count()]
}

/// Returns whether the choice takes the steps of this module.
pub fn is_needed(sampling: &Sampling) -> bool {
    let is_greedy = sampling.temperature == 0.0 && (sampling.samplers.is_none() || sampling.mirostat > 0.0);
    let has_xtc = sampling.xtc_probability > 0.0 && sampling.xtc_threshold <= 0.5;
    let has_step = has_xtc || sampling.dynatemp_range > 0.0 || sampling.mirostat > 0.0;
    !is_greedy && (sampling.samplers.is_some() || has_step)
}

impl Sampler {
    /// Chooses from logits after the first edits and a grammar's mask.
    pub(super) fn choose_in_order(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        turn: &Turn<'_>,
    ) -> Result<u32> {
        let (best_id, _) = best(logits)?;
        self.narrow(logits, sampling, turn);
        let at = uniform(turn.seed, turn.index());
        let chosen = pick(self.ranked.iter().map(|candidate| (candidate.id, candidate.weight)), at);
        let chosen = chosen.unwrap_or(best_id);
        if sampling.mirostat > 0.0 {
            self.follow_surprise(chosen, sampling, turn.surprise_bound);
        }
        Ok(chosen)
    }

    /// Fills `ranked` with the tokens of the draw, weighed. At least one of `logits` is finite.
    fn narrow(&mut self, logits: &[f32], sampling: &Sampling, turn: &Turn<'_>) {
        let steps = match &sampling.samplers {
            _ if sampling.mirostat > 0.0 => &[SamplerStep::Temperature],
            None => &OWN_ORDER[..],
            Some(order) => &order[first_edits(sampling).len()..],
        };
        let is_on = |step: &&SamplerStep| **step != SamplerStep::TopNSigma || sampling.top_n_sigma > 0.0;
        let begins_with_top_k = steps.iter().find(is_on) == Some(&SamplerStep::TopK);
        match sampling.top_k.filter(|_| begins_with_top_k) {
            Some(k) => keep_best(&mut self.ranked, logits, k),
            None => {
                let finite = (0u32..).zip(logits).filter(|(_, logit)| logit.is_finite());
                self.ranked.clear();
                self.ranked.extend(finite.map(|(id, &logit)| Candidate { id, logit, weight: 0.0 }));
            }
        }
        for step in steps {
            self.take_step(*step, logits.len(), sampling, turn);
        }
        if sampling.mirostat > 0.0 {
            let bound = turn.surprise_bound.unwrap_or(2.0 * sampling.mirostat_tau);
            match sampling.mirostat {
                1.0 => keep_zipf(&mut self.ranked, bound, logits.len()),
                _ => keep_unsurprising(&mut self.ranked, bound),
            }
        }
        candidates::weigh(&mut self.ranked);
    }

    fn take_step(&mut self, step: SamplerStep, vocab_size: usize, sampling: &Sampling, turn: &Turn<'_>) {
        let ranked = &mut self.ranked;
        match step {
            SamplerStep::Penalties | SamplerStep::Dry => {
                self.penalise_ranked(step, vocab_size, sampling, turn)
            }
            SamplerStep::TopNSigma if sampling.top_n_sigma > 0.0 => mask_far(ranked, sampling.top_n_sigma),
            SamplerStep::TopK => sampling.top_k.into_iter().for_each(|k| candidates::keep_ranked(ranked, k)),
            SamplerStep::TypicalP if sampling.typical_p < 1.0 => {
                ranked.retain(|candidate| candidate.logit.is_finite());
                let (best, _) = candidates::weigh(ranked);
                keep_typical(ranked, best, sampling.typical_p);
            }
            SamplerStep::TopP if sampling.top_p < 1.0 => {
                let (_, total) = candidates::weigh(ranked);
                let top_p = f64::from(sampling.top_p);
                let lightest = (1.0 - top_p) * total / ranked.len() as f64; // as in `Sampler::rank`
                ranked.retain(|candidate| f64::from(candidate.weight) >= lightest);
                keep_nucleus(ranked, top_p * total);
            }
            SamplerStep::MinP if sampling.min_p > 0.0 => {
                candidates::weigh(ranked);
                ranked.retain(|candidate| candidate.weight >= sampling.min_p);
            }
            SamplerStep::Xtc
                if uniform(turn.seed ^ XTC_SEED, turn.index()) <= sampling.xtc_probability.into() =>
            {
                leave_out_top(ranked, sampling);
            }
            SamplerStep::Temperature => temper(ranked, sampling),
            _ => {}
        }
    }

    /// Applies the penalties or DRY behind a cut.
    fn penalise_ranked(
        &mut self,
        step: SamplerStep,
        vocab_size: usize,
        sampling: &Sampling,
        turn: &Turn<'_>,
    ) {
        self.edited.clear();
        self.edited.resize(vocab_size, f32::NEG_INFINITY);
        for candidate in &self.ranked {
            self.edited[candidate.id as usize] = candidate.logit;
        }
        self.penalise(step, sampling, turn);
        for candidate in &mut self.ranked {
            candidate.logit = self.edited[candidate.id as usize];
        }
    }

    /// Moves Mirostat's bound by how much the surprise of the chosen token differs from the one to aim at.
    fn follow_surprise(&mut self, chosen: u32, sampling: &Sampling, bound: Option<f32>) {
        let weight_of = |candidate: &Candidate| f64::from(candidate.weight);
        let total: f64 = self.ranked.iter().map(weight_of).sum();
        let weight = self.ranked.iter().find(|candidate| candidate.id == chosen).map_or(total, weight_of);
        let surprise = -libm::log2(weight / total) as f32;
        let bound = bound.unwrap_or(2.0 * sampling.mirostat_tau);
        self.surprise_bound = Some(bound - sampling.mirostat_eta * (surprise - sampling.mirostat_tau));
    }
}

impl Turn<'_> {
    /// Returns the index of the next draw.
    pub(super) fn index(&self) -> u64 {
        self.tokens.len().saturating_sub(self.generated_from) as u64
    }
}

/// Masks logits more than `n` standard deviations below the best. They stay in the number of tokens, which the entropy of
/// dynamic temperature is measured by.
fn mask_far(ranked: &mut [Candidate], n: f32) {
    let (best, _) = candidates::weigh(ranked);
    let lowest = lowest_near_best(ranked.iter().map(|candidate| candidate.logit), best, n);
    for candidate in ranked.iter_mut().filter(|candidate| f64::from(candidate.logit) < lowest) {
        candidate.logit = f32::NEG_INFINITY;
    }
}

/// XTC: drops the tokens of at least the threshold's probability but the last of them.
fn leave_out_top(ranked: &mut Vec<Candidate>, sampling: &Sampling) {
    if sampling.xtc_probability <= 0.0 || sampling.xtc_threshold > 0.5 {
        return;
    }
    let (_, total) = candidates::weigh(ranked);
    let least = f64::from(sampling.xtc_threshold) * total;
    let is_top = |candidate: &Candidate| candidate.weight > 0.0 && f64::from(candidate.weight) >= least;
    let Some(last) = ranked.iter().filter(|candidate| is_top(candidate)).max_by(|a, b| best_first(a, b))
    else {
        return;
    };
    let last = last.id;
    ranked.retain(|candidate| candidate.id == last || !is_top(candidate));
}

/// Divides the logits by the temperature, which may follow their entropy. At 0 the best token stays.
fn temper(ranked: &mut Vec<Candidate>, sampling: &Sampling) {
    let temperature = match sampling.dynatemp_range > 0.0 {
        true if ranked.len() < 2 => return,
        true => dynamic_temperature(ranked, sampling),
        false => sampling.temperature,
    };
    let best = ranked.iter().fold(f32::NEG_INFINITY, |best, candidate| best.max(candidate.logit));
    if temperature <= 0.0 || !(best / temperature).is_finite() {
        let first = ranked.iter().min_by(|a, b| best_first(a, b)).map(|candidate| candidate.id);
        return ranked.retain(|candidate| Some(candidate.id) == first);
    }
    ranked.iter_mut().for_each(|candidate| candidate.logit /= temperature);
}

fn dynamic_temperature(ranked: &mut [Candidate], sampling: &Sampling) -> f32 {
    let (temperature, range) = (sampling.temperature, sampling.dynatemp_range);
    let (lowest, highest) = ((temperature - range).max(0.0), temperature + range);
    let (_, total) = candidates::weigh(ranked);
    let probabilities = ranked.iter().map(|candidate| f64::from(candidate.weight) / total);
    let terms = probabilities.filter(|p| *p > 0.0).map(|p| -p * libm::log(p));
    let share = (terms.sum::<f64>() / libm::log(ranked.len() as f64)) as f32;
    lowest + (highest - lowest) * libm::powf(share.max(0.0), sampling.dynatemp_exponent)
}

/// Mirostat 2: drops tokens of more than `bound` bits of surprise, but not the best.
fn keep_unsurprising(ranked: &mut Vec<Candidate>, bound: f32) {
    let (_, total) = candidates::weigh(ranked);
    let least = libm::exp2(f64::from(-bound)) * total;
    let is_kept = |candidate: &Candidate| candidate.weight > 0.0 && f64::from(candidate.weight) >= least;
    match ranked.iter().any(is_kept) {
        true => ranked.retain(is_kept),
        false => candidates::keep_ranked(ranked, 1),
    }
}

/// Mirostat 1: keeps as many of the best tokens as have `bound` bits of surprise under Zipf's law, whose exponent the best
/// of them tell (algorithm 1 of the paper).
fn keep_zipf(ranked: &mut Vec<Candidate>, bound: f32, vocab_size: usize) {
    if ranked.len() > ZIPF_TOKENS {
        ranked.select_nth_unstable_by(ZIPF_TOKENS, best_first);
    }
    let best = ranked.len().min(ZIPF_TOKENS);
    let best = &mut ranked[..best];
    best.sort_unstable_by(best_first);
    let (mut products, mut squares) = (0.0, 0.0);
    for (rank, pair) in best.windows(2).enumerate() {
        let step = libm::log((rank + 2) as f64 / (rank + 1) as f64);
        products += step * f64::from(pair[0].logit - pair[1].logit);
        squares += step * step;
    }
    let exponent = products / squares;
    let epsilon = exponent - 1.0;
    let share = 1.0 - libm::pow(vocab_size as f64, -epsilon);
    let count = libm::pow(epsilon * libm::exp2(bound.into()) / share, 1.0 / exponent);
    candidates::keep_ranked(ranked, (count as usize).max(1)); // NaN, as of one token, is 0
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::collections::BTreeMap;
    use std::fs;
    use std::sync::Arc;

    use llmctl_base::{SAMPLING, SamplingNumbers};
    use llmctl_models::text::Vocabulary;
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    /// 64 tokens of a real vocabulary, and the tokens of the rests of sequence breakers in it.
    #[derive(Deserialize)]
    struct Words {
        words: Vec<String>,
        tails: BTreeMap<String, Vec<u32>>,
    }

    impl Vocabulary for Words {
        fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
            let hex = self.words.get(id as usize)?.as_bytes();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("hex"), 16);
            Some(hex.chunks(2).map(|pair| byte(pair).expect("hex")).collect())
        }

        fn is_special(&self, _id: u32) -> bool {
            false
        }

        fn encode_rest(&self, rest: &str) -> Option<Vec<u32>> {
            Some(self.tails[rest].clone())
        }
    }

    #[derive(Deserialize)]
    struct Case {
        sampling: SamplingNumbers,
        samplers: Option<Vec<SamplerStep>>,
        top_k: Option<usize>,
        dry_sequence_breakers: Option<Vec<String>>,
        #[serde(default)]
        history: Vec<u32>,
        #[serde(default)]
        steps: Vec<Step>,
        #[serde(flatten)]
        only: Option<Step>,
    }

    #[derive(Deserialize)]
    struct Step {
        logits: Vec<Option<f32>>,
        expected: Vec<(u32, f64)>,
        chosen: Option<u32>,
    }

    impl Case {
        fn sampling(&self) -> Sampling {
            let (samplers, breakers) = (self.samplers.clone(), self.dry_sequence_breakers.clone());
            let mut sampling = Sampling {
                samplers,
                dry_sequence_breakers: breakers,
                temperature: 1.0,
                top_k: self.top_k,
                ..Sampling::default()
            };
            self.sampling.apply(&mut sampling);
            sampling
        }

        /// Compares each step; returns what differs.
        fn difference(&self, sampler: &mut Sampler) -> Option<String> {
            let sampling = self.sampling();
            let mut turn = Turn { tokens: &self.history, ..Turn::default() };
            self.steps.iter().chain(&self.only).find_map(|step| {
                let logits: Vec<f32> =
                    step.logits.iter().map(|logit| logit.unwrap_or(f32::NEG_INFINITY)).collect();
                let edited = sampler.edit(&logits, &sampling, &turn);
                let mut buffer = std::mem::take(&mut sampler.edited);
                sampler.narrow(if edited { &buffer } else { &logits }, &sampling, &turn);
                std::mem::swap(&mut sampler.edited, &mut buffer);
                // At low temperatures, one rounding of a logit in f32 is more than 1e-6, there as here.
                let is_rough = sampling.dynatemp_range > 0.0 || sampling.mirostat > 0.0;
                let differs = difference(&sampler.ranked, &step.expected, if is_rough { 5e-6 } else { 1e-6 });
                if let Some(chosen) = step.chosen {
                    sampler.follow_surprise(chosen, &sampling, turn.surprise_bound);
                    turn.surprise_bound = sampler.surprise_bound;
                }
                differs
            })
        }
    }

    /// Returns how the candidates differ from those expected, more than `tolerance` in probability.
    fn difference(ranked: &[Candidate], expected: &[(u32, f64)], tolerance: f64) -> Option<String> {
        let total: f64 = ranked.iter().map(|candidate| f64::from(candidate.weight)).sum();
        let of = |candidate: &Candidate| (candidate.id, f64::from(candidate.weight) / total);
        let ours: BTreeMap<u32, f64> = ranked.iter().map(of).collect();
        let theirs: BTreeMap<u32, f64> = expected.iter().copied().collect();
        let is_close = |id: &u32| match (ours.get(id), theirs.get(id)) {
            (Some(ours), Some(theirs)) => (ours - theirs).abs() <= tolerance,
            (Some(only), None) => *only < 1e-30,
            _ => false,
        };
        let odd = ours.keys().chain(theirs.keys()).find(|id| !is_close(id))?;
        Some(format!("token {odd}: {:?}, llama.cpp has {:?}", ours.get(odd), theirs.get(odd)))
    }

    /// The cases of tests/parity-samplers/make.py, or more of them: see there.
    #[test]
    fn llama_cpp_keeps_the_same_tokens() {
        let all = std::env::var("LLMCTL_SAMPLER_CASES").map(|path| fs::read_to_string(path).expect("cases"));
        let own = include_str!("../../../tests/parity-samplers/cases.jsonl").to_owned();
        let text = all.unwrap_or(own);
        let mut lines = text.lines();
        let words: Words = serde_json::from_str(lines.next().expect("a first line")).expect("words");
        let mut sampler = Sampler::default();
        sampler.set_vocabulary(Arc::new(words));
        let (mut count, mut found) = (BTreeMap::<String, usize>::new(), Vec::new());
        for line in lines {
            let case: Case = serde_json::from_str(line).expect(line);
            let name = match case.samplers.as_deref() {
                None => format!("mirostat {}", case.sampling().mirostat),
                Some([one]) => one.name().to_owned(),
                Some(_) => "orders".to_owned(),
            };
            *count.entry(name).or_default() += case.steps.len().max(1);
            found.extend(case.difference(&mut sampler).map(|difference| format!("{difference}: {line}")));
        }
        assert_eq!(count.len(), 12, "{count:?}");
        // A token on the edge of a cut is kept or not by the last bit: none of the few, one in 10,000 of many.
        assert!(
            found.len() * 10_000 <= count.values().sum::<usize>(),
            "{} of {count:?} differ:\n{}",
            found.len(),
            found[..found.len().min(5)].join("\n")
        );
    }

    /// Values of a parameter, its ends among them.
    fn values(low: f32, high: f32) -> impl Strategy<Value = f32> {
        prop_oneof![Just(low), Just(high), low..=high]
    }

    fn samplings() -> impl Strategy<Value = Sampling> {
        let number = |name: &str| {
            let number = SAMPLING.iter().find(|number| number.name == name).expect("a parameter");
            let range = number.facts.range;
            let low = if range.excludes_low { f32::MIN_POSITIVE } else { range.low };
            let is_whole = number.facts.is_whole;
            values(low, range.high).prop_map(move |value| if is_whole { value.round() } else { value })
        };
        let numbers: Vec<_> = SAMPLING.iter().map(|parameter| number(parameter.name)).collect();
        let steps = prop::sample::select(SamplerStep::NAMES.map(|(_, step)| step).to_vec());
        let samplers = prop::option::of(prop::collection::vec(steps, 0..12));
        let breakers = prop::option::of(prop::collection::vec("[a-c :*]{1,3}", 0..4));
        (
            numbers,
            samplers,
            prop::option::of(1usize..70),
            breakers,
            prop::collection::vec(any::<bool>(), SAMPLING.len()),
        )
            .prop_map(|(values, samplers, top_k, dry_sequence_breakers, given)| {
                let mut sampling = Sampling { samplers, top_k, dry_sequence_breakers, ..Sampling::default() };
                let given = SAMPLING.iter().zip(values).zip(given).filter(|(_, is_given)| *is_given);
                given.for_each(|((number, value), _)| number.set(&mut sampling, value));
                sampling
            })
    }

    proptest! {
        #[test]
        fn any_order_and_values_choose_a_candidate(
            sampling in samplings(),
            logits in prop::collection::vec(prop_oneof![9 => -40f32..40.0, 1 => Just(f32::NEG_INFINITY), 1 => Just(-3e38)], 1..64),
            tokens in prop::collection::vec(0u32..8, 0..40), seed in any::<u64>(), bound in prop::option::of(-10f32..200.0),
        ) {
            prop_assume!(logits.iter().any(|logit| logit.is_finite()));
            sampling.validate(usize::MAX).expect("in range");
            let turn = Turn { tokens: &tokens, seed, surprise_bound: bound, ..Turn::default() };
            let mut sampler = Sampler::default();
            let token = sampler.sample(&logits, &sampling, &turn).expect("a token");
            prop_assert!(logits[token.id as usize].is_finite(), "{token:?}");
            prop_assert!(sampler.surprise_bound().is_none_or(f32::is_finite), "{:?}", sampler.surprise_bound());
            prop_assert_eq!(sampler.sample(&logits, &sampling, &turn).expect("a token"), token);
            if is_needed(&sampling) {
                let total: f64 = sampler.ranked.iter().map(|candidate| f64::from(candidate.weight)).sum();
                prop_assert!(total.is_finite() && total > 0.0, "{total}");
            }
        }

        #[test]
        fn an_order_like_our_own_keeps_the_same_tokens(
            logits in prop::collection::vec(-8f32..8.0, 2..60), seed in any::<u64>(), temperature in 0.1f32..2.0,
            top_k in prop::option::of(1usize..70), top_p in values(0.05, 1.0), min_p in values(0.0, 0.5),
        ) {
            let own = Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() };
            let given = Sampling { samplers: Some(OWN_ORDER.to_vec()), ..own.clone() };
            let mut sampler = Sampler::default();
            sampler.narrow(&logits, &given, &Turn::default());
            let kept: Vec<u32> = sampler.ranked.iter().map(|candidate| candidate.id).collect();
            for seed in seed..seed.saturating_add(20) {
                let turn = Turn { seed, ..Turn::default() };
                let token = sampler.sample(&logits, &own, &turn).expect("a token");
                prop_assert!(kept.contains(&token.id), "{} is not among {kept:?}", token.id);
            }
        }
    }

    #[test]
    fn xtc_leaves_the_top_out_as_often_as_it_is_asked() {
        let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
        let sampling =
            Sampling { temperature: 1.0, xtc_probability: 0.25, xtc_threshold: 0.12, ..Sampling::default() };
        let mut sampler = Sampler::default();
        let mut draw = |index: usize| {
            let turn = Turn { tokens: &[0; 20_000][..index], seed: 3, ..Turn::default() };
            sampler.sample(&logits, &sampling, &turn).expect("a token").id
        };
        let counts = (0..20_000).fold([0.0f64; 4], |mut counts, index| {
            counts[draw(index) as usize] += 1.0 / 20_000.0;
            counts
        });
        let expected = [0.75 * 0.5, 0.75 * 0.3, 0.75 * 0.15 + 0.25 * 0.75, 0.75 * 0.05 + 0.25 * 0.25];
        for (count, expected) in counts.iter().zip(expected) {
            assert!((count - expected).abs() < 0.015, "{counts:?}");
        }
    }
}
