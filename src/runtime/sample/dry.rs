//! DRY: a penalty on tokens that continue a repetition (p-e-w, text-generation-webui PR 5677), as llama.cpp's
//! sampler computes it.
//!
//! A token that came after an earlier occurrence of the history's last n tokens loses
//! `multiplier * base^(n - allowed_length)`, if n is at least the allowed length. No repetition goes across a
//! sequence breaker.
//!
//! Invariant: a function of token ids, parameters and the vocabulary; nothing of the history is kept.

use std::collections::HashMap;
use std::sync::Arc;

use llmctl_base::{DRY_SEQUENCE_BREAKERS, Sampling};
use llmctl_models::text::Vocabulary;

/// The most tokens of a breaker after its first one, and lists of breakers whose tokens are kept.
const MAX_TAIL: usize = 20;
const MAX_KNOWN: usize = 8;

/// Natural logarithm of the highest f32, from which llama.cpp computes the highest exponent.
const LOG_OF_HIGHEST: f32 = 88.722_84;

/// Tokens that begin a breaker, each with the tokens that may complete it; none if it has a whole breaker in it.
type BreakerHeads = HashMap<u32, Vec<Vec<u32>>>;

#[derive(Default)]
pub struct Dry {
    vocabulary: Option<Arc<dyn Vocabulary>>,
    /// The latest lists of breakers, with their tokens.
    known: Vec<(Vec<String>, Arc<BreakerHeads>)>,
    /// By distance from the end of the history, how many tokens before there repeat its end.
    repeats: Vec<u32>,
    /// By token id, the longest repetition that it continues.
    longest: HashMap<u32, usize>,
}

impl std::fmt::Debug for Dry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dry").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Dry {
    pub fn set_vocabulary(&mut self, vocabulary: Arc<dyn Vocabulary>) {
        self.vocabulary = Some(vocabulary);
    }

    /// Lowers the logits of tokens that would continue a repetition at the end of `tokens`.
    pub fn penalise(&mut self, logits: &mut [f32], sampling: &Sampling, tokens: &[u32]) {
        if !sampling.uses_dry() {
            return;
        }
        let allowed = sampling.dry_allowed_length as usize;
        let last_n = match sampling.dry_penalty_last_n {
            all if all < 0.0 => tokens.len(),
            count => tokens.len().min(count as usize),
        };
        let tokens = &tokens[tokens.len() - last_n..];
        if tokens.len() <= allowed {
            return;
        }
        let heads = self.heads(sampling.dry_sequence_breakers.as_deref(), logits.len());
        let limit = end_of_breaker(tokens, &heads).unwrap_or(tokens.len());
        if limit < allowed {
            return;
        }
        self.find_longest(tokens, allowed, limit);
        for (&token, &longest) in &self.longest {
            let is_breaker = heads.get(&token).is_some_and(|tails| tails.iter().any(Vec::is_empty));
            let logit = logits.get_mut(token as usize).filter(|logit| logit.is_finite() && !is_breaker);
            if let Some(logit) = logit {
                *logit = (*logit - penalty(sampling, longest - allowed)).max(f32::MIN);
            }
        }
    }

    /// Sets `longest`: for each token that came after what repeats the end of `tokens`, the most tokens repeated there, from
    /// `allowed` up to `limit`.
    fn find_longest(&mut self, tokens: &[u32], allowed: usize, limit: usize) {
        self.count_repeats(tokens);
        self.longest.clear();
        for (&token, &repeat) in tokens.iter().rev().zip(&self.repeats[1..]) {
            let repeat = (repeat as usize).min(limit);
            if repeat >= allowed {
                let longest = self.longest.entry(token).or_default();
                *longest = repeat.max(*longest);
            }
        }
    }

    /// Sets `repeats`, by Main and Lorentz's Z-algorithm on the history from its end: linear in its length.
    fn count_repeats(&mut self, tokens: &[u32]) {
        let at = |distance: usize| tokens[tokens.len() - 1 - distance];
        self.repeats.clear();
        self.repeats.resize(tokens.len(), 0);
        // The stretch [start, end) of distances that is known to repeat the end of the history.
        let (mut start, mut end) = (0, 0);
        for distance in 1..tokens.len() {
            let mut count = match distance < end {
                true => (self.repeats[distance - start] as usize).min(end - distance),
                false => 0,
            };
            while distance + count < tokens.len() && at(count) == at(distance + count) {
                count += 1;
            }
            if distance + count > end {
                (start, end) = (distance, distance + count);
            }
            self.repeats[distance] = count as u32;
        }
    }

    /// Returns the tokens of the breakers. Reads the whole vocabulary the first time.
    fn heads(&mut self, breakers: Option<&[String]>, vocab_size: usize) -> Arc<BreakerHeads> {
        let is_same = |known: &[String]| match breakers {
            Some(breakers) => known == breakers,
            None => known == DRY_SEQUENCE_BREAKERS,
        };
        if let Some((_, heads)) = self.known.iter().find(|(known, _)| is_same(known)) {
            return heads.clone();
        }
        let own = || DRY_SEQUENCE_BREAKERS.map(str::to_owned).to_vec();
        let breakers = breakers.map_or_else(own, <[String]>::to_vec);
        let heads = self.vocabulary.as_ref().map(|vocabulary| heads_of(&**vocabulary, vocab_size, &breakers));
        let heads = Arc::new(heads.unwrap_or_default());
        self.known.truncate(MAX_KNOWN - 1);
        self.known.insert(0, (breakers, heads.clone()));
        heads
    }
}

/// Returns what a token loses that continues a repetition of so many tokens beyond those allowed.
fn penalty(sampling: &Sampling, beyond: usize) -> f32 {
    let highest = match sampling.dry_base > 1.000_001 {
        true => (LOG_OF_HIGHEST / libm::logf(sampling.dry_base)) as usize,
        false => 0,
    };
    let exponent = if highest > 0 { beyond.min(highest) } else { beyond };
    (f64::from(sampling.dry_multiplier) * libm::pow(sampling.dry_base.into(), exponent as f64)) as f32
}

/// Returns how many tokens come after the last breaker of `tokens`; `None` if they have none.
fn end_of_breaker(tokens: &[u32], heads: &BreakerHeads) -> Option<usize> {
    let mut after = tokens.len();
    tokens.iter().rev().enumerate().find_map(|(distance, token)| {
        after -= 1;
        let following = &tokens[after + 1..];
        let tails = heads.get(token)?.iter().filter(|tail| following.starts_with(tail));
        Some(distance - tails.map(Vec::len).max()?)
    })
}

fn heads_of(vocabulary: &dyn Vocabulary, vocab_size: usize, breakers: &[String]) -> BreakerHeads {
    let mut heads = BreakerHeads::new();
    for id in (0u32..).take(vocab_size) {
        let Some(word) = vocabulary.token_bytes(id) else { continue };
        for breaker in breakers {
            for tail in tails(vocabulary, &word, breaker) {
                let known = heads.entry(id).or_default();
                if tail.is_empty() || !known.contains(&tail) {
                    known.push(tail);
                }
            }
        }
    }
    heads
}

/// Returns the tokens of the rest of `breaker` for each way in which the end of `word` begins it.
fn tails(vocabulary: &dyn Vocabulary, word: &[u8], breaker: &str) -> Vec<Vec<u32>> {
    let bytes = breaker.as_bytes();
    if word.windows(bytes.len()).any(|part| part == bytes) {
        return vec![Vec::new()];
    }
    let ends = (0..word.len()).map(|start| &word[start..]).filter(|end| bytes.starts_with(end));
    let rest = |end: &[u8]| {
        let mut tail = vocabulary.encode_rest(breaker.get(end.len()..)?)?;
        tail.truncate(MAX_TAIL);
        Some(tail)
    };
    ends.filter_map(rest).collect()
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use proptest::prelude::*;

    use super::*;

    /// Token n is a letter from `a` on, and one token is an end of line.
    struct Letters;

    const LINE: u32 = 26;

    impl Vocabulary for Letters {
        fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
            let byte = if id == LINE { b'\n' } else { b'a' + u8::try_from(id).ok()? };
            Some(Cow::Owned(vec![byte]))
        }

        fn is_special(&self, _id: u32) -> bool {
            false
        }

        fn encode_rest(&self, rest: &str) -> Option<Vec<u32>> {
            Some(rest.bytes().map(|byte| u32::from(byte - b'a')).collect())
        }
    }

    fn sampling(breakers: &[&str]) -> Sampling {
        let dry_sequence_breakers = Some(breakers.iter().map(|text| (*text).to_owned()).collect());
        Sampling { dry_multiplier: 1.0, dry_base: 2.0, dry_sequence_breakers, ..Sampling::default() }
    }

    /// What 27 tokens lose after a text; only those that lose something.
    fn losses(sampling: &Sampling, text: &str) -> Vec<(char, f32)> {
        let mut dry = Dry::default();
        dry.set_vocabulary(Arc::new(Letters));
        let id = |byte: u8| if byte == b'\n' { LINE } else { u32::from(byte - b'a') };
        let tokens: Vec<u32> = text.bytes().map(id).collect();
        let mut logits = [0.0; 27];
        dry.penalise(&mut logits, sampling, &tokens);
        let letters = ('a'..='z').chain(['\n']).zip(logits.map(|logit| 0.0 - logit));
        letters.filter(|(_, loss)| *loss != 0.0).collect()
    }

    #[test]
    fn what_continues_a_repetition_loses_more_the_longer_it_is() {
        let plain = sampling(&[]);
        assert_eq!(losses(&plain, "abcdxabc"), [('d', 2.0)]);
        assert_eq!(losses(&plain, "abcdxab"), [('c', 1.0)]);
        assert_eq!(losses(&plain, "abcdxa"), []);
        assert_eq!(losses(&plain, "abcybxbcdabc"), [('d', 1.0), ('y', 2.0)]);
        let last_n = Sampling { dry_penalty_last_n: 6.0, ..plain.clone() };
        assert_eq!(losses(&last_n, "abcdxabc"), [], "a and b lie too far back");
        let shorter = Sampling { dry_allowed_length: 1.0, dry_multiplier: 0.5, ..plain };
        assert_eq!(losses(&shorter, "abcdxab"), [('c', 1.0)]);
    }

    #[test]
    fn no_repetition_goes_across_a_breaker_and_breakers_are_free() {
        assert_eq!(losses(&sampling(&["\n"]), "ab\ncxab\n"), [], "nothing comes after the last one");
        assert_eq!(losses(&sampling(&["\n"]), "\nabcd\nabc"), [('d', 2.0)], "of those after it");
        assert_eq!(losses(&sampling(&["bc"]), "abcdxabc"), [], "of two tokens");
        assert_eq!(losses(&sampling(&["d"]), "abcdabc"), [], "one of its own");
        let unknown = Sampling { dry_sequence_breakers: None, ..sampling(&[]) };
        assert_eq!(losses(&unknown, "ab\ncxab\n"), [], "an end of line is one of the usual");
    }

    proptest! {
        #[test]
        fn repeats_are_those_counted_one_by_one(tokens in prop::collection::vec(0u32..3, 1..60)) {
            let mut dry = Dry::default();
            dry.count_repeats(&tokens);
            for distance in 1..tokens.len() {
                let earlier = &tokens[..tokens.len() - distance];
                let same = tokens.iter().rev().zip(earlier.iter().rev()).take_while(|(a, b)| a == b).count();
                prop_assert_eq!(dry.repeats[distance] as usize, same);
            }
        }
    }
}
