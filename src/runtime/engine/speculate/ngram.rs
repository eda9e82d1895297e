//! Looks up the continuation of the sequence where its latest tokens occurred last: in the predicted text,
//! the prompt and the answer so far.
//!
//! The predicted text is indexed behind the end of the prompt, as if the prompt had once been answered with
//! it; so the start of an answer is drafted from the start of the prediction.

use std::collections::HashMap;

/// Tokens that must agree. With fewer, common pairs of prose are drafted after all the time.
pub const MIN_MATCH: usize = 2;

/// Tokens compared at most: beyond, a longer match says no more.
const MAX_MATCH: usize = 32;

/// Earlier places compared at most, the latest first.
const MAX_PLACES: usize = 24;

/// No earlier place.
const NONE: u32 = u32::MAX;

/// An index of a text by pairs of tokens.
#[derive(Debug, Default)]
pub struct NgramDrafter {
    tokens: Vec<u32>,
    /// End of the last occurrence of each pair.
    latest: HashMap<[u32; MIN_MATCH], u32>,
    /// By end of a pair: the end of its occurrence before.
    earlier: Vec<u32>,
}

impl NgramDrafter {
    /// Indexes the prediction behind the last tokens of the prompt.
    pub fn new(prediction: &[u32], prompt: &[u32]) -> Self {
        let mut drafter = Self::default();
        if !prediction.is_empty() {
            drafter.extend(&prompt[prompt.len().saturating_sub(MAX_MATCH)..]);
            drafter.extend(prediction);
        }
        drafter
    }

    /// Appends tokens of the sequence.
    pub fn extend(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.tokens.push(token);
            let end = self.tokens.len();
            // An occurrence is entered once it has a token after it.
            if let Some(pair) = (end > MIN_MATCH).then(|| pair_before(&self.tokens, end - 1)).flatten() {
                let before = self.latest.insert(pair, (end - 1) as u32);
                self.earlier.resize(end - 1, NONE);
                self.earlier.push(before.unwrap_or(NONE));
            }
        }
    }

    /// Appends at most `most` tokens that may come next to `draft`. Returns how many tokens before them
    /// agree; 0 without a draft.
    pub fn draft(&self, most: usize, draft: &mut Vec<u32>) -> usize {
        let end = self.tokens.len();
        let latest = pair_before(&self.tokens, end).and_then(|pair| self.latest.get(&pair).copied());
        let next = |&place: &u32| self.earlier.get(place as usize).copied().filter(|&place| place != NONE);
        let places = std::iter::successors(latest, next).take(MAX_PLACES);
        let matched = |place: u32| (self.num_equal(place as usize, end), place);
        // The latest of equally good places: `max_by_key` returns the last maximum, and the order is reversed.
        let Some((num_equal, place)) = places.map(matched).max_by_key(|&found| found) else { return 0 };
        let place = place as usize;
        // A place near the end repeats itself: what follows it is followed by the draft.
        let period = end - place;
        draft.extend((0..most).map(|index| self.tokens[place + index % period]));
        num_equal
    }

    /// Counts the tokens before `place` that equal those before `end`.
    fn num_equal(&self, place: usize, end: usize) -> usize {
        let before = |at: usize| self.tokens[..at].iter().rev();
        before(place).zip(before(end)).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
    }
}

fn pair_before(tokens: &[u32], end: usize) -> Option<[u32; MIN_MATCH]> {
    tokens.get(end.checked_sub(MIN_MATCH)?..end)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drafts four tokens after `tokens`, with a prediction.
    #[track_caller]
    fn check(prediction: &[u32], prompt: &[u32], answer: &[u32], num_equal: usize, expected: &[u32]) {
        let mut drafter = NgramDrafter::new(prediction, prompt);
        drafter.extend(prompt);
        answer.iter().for_each(|token| drafter.extend(&[*token]));
        let mut draft = Vec::new();
        assert_eq!(drafter.draft(4, &mut draft), num_equal, "{draft:?}");
        assert_eq!(draft, expected);
    }

    #[test]
    fn the_longest_match_goes_on_and_of_equals_the_latest() {
        check(&[], &[1, 2, 3, 4, 5, 6, 7], &[9, 2, 3], 2, &[4, 5, 6, 7]);
        check(&[], &[8, 2, 3, 4, 0, 0, 7, 2, 3, 5, 6, 1, 1, 8, 2, 3], &[], 3, &[4, 0, 0, 7]);
        check(&[], &[2, 3, 4, 0, 2, 3, 5, 6, 7, 8, 2, 3], &[], 2, &[5, 6, 7, 8]);
        check(&[], &[1, 2, 3], &[4], 0, &[]);
        check(&[], &[1], &[], 0, &[]);
        check(&[], &[], &[], 0, &[]);
    }

    #[test]
    fn what_repeats_itself_is_drafted_on() {
        check(&[], &[1, 5, 6, 5, 6, 5, 6], &[], 4, &[5, 6, 5, 6]);
        check(&[], &[7, 7, 7, 7], &[], 3, &[7, 7, 7, 7]);
    }

    #[test]
    fn a_prediction_is_drafted_from_its_start_and_after_a_change() {
        check(&[20, 21, 22, 23, 24, 25, 26, 27, 28], &[1, 2, 3], &[], 3, &[20, 21, 22, 23]);
        check(&[20, 21, 22, 23, 24, 25, 26, 27, 28], &[1, 2, 3], &[20, 99, 22, 23], 2, &[24, 25, 26, 27]);
        check(&[20, 21], &[1, 2, 3], &[7, 20], 0, &[]);
    }
}
