//! Detects that a sequence of tokens repeats itself. Pure.

/// Longest period that is detected, in tokens.
const MAX_PERIOD: usize = 24;

/// Least number of repetitions.
const MIN_TIMES: usize = 6;

/// Least tokens of all repetitions: a row of dashes or a few equal list items do not count.
const MIN_TOKENS: usize = 48;

/// Longest cycle that [`Repetition`] proves, and how often it must come.
const MAX_CYCLE: usize = 1024;
const MIN_CYCLES: usize = 4;

/// Follows tokens, and tells when the last ones are a cycle over and over: at least `threshold` tokens and four cycles. A token
/// takes at most [`MAX_CYCLE`] comparisons.
#[derive(Debug)]
pub struct Repetition {
    threshold: usize,
    tokens: Vec<u32>,
    /// For each length of a cycle from 1 on, how many of the last tokens equal the one that many before them.
    runs: Vec<usize>,
}

impl Repetition {
    pub fn new(threshold: usize) -> Self {
        Self { threshold, tokens: Vec::new(), runs: Vec::new() }
    }

    /// Appends a token. Returns whether the tokens end with a repetition.
    pub fn push(&mut self, id: u32) -> bool {
        self.runs.resize(self.tokens.len().min(MAX_CYCLE), 0);
        let mut is_found = false;
        for ((run, earlier), length) in self.runs.iter_mut().zip(self.tokens.iter().rev()).zip(1..) {
            *run = if *earlier == id { *run + 1 } else { 0 };
            is_found |= *run > 0 && *run + length >= self.threshold.max(MIN_CYCLES * length);
        }
        self.tokens.push(id);
        is_found
    }
}

/// Returns whether `tokens` end with a short run that repeats.
pub fn repeats(tokens: &[u32]) -> bool {
    (1..=MAX_PERIOD).any(|period| {
        let needed = (MIN_TIMES * period).max(MIN_TOKENS);
        let Some(start) = tokens.len().checked_sub(needed) else { return false };
        let tail = &tokens[start..];
        tail[period..] == tail[..needed - period]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_that_do_not_end_are_found_and_others_are_not() {
        let cycle = |run: &[u32], times: usize| -> Vec<u32> {
            let lead = [7, 8, 9];
            lead.iter().copied().chain(run.iter().copied().cycle().take(run.len() * times)).collect()
        };
        assert!(repeats(&cycle(&[1], 48)) && !repeats(&cycle(&[1], 47)));
        assert!(repeats(&cycle(&[1, 2], 24)) && !repeats(&cycle(&[1, 2], 23)));
        let ten: Vec<u32> = (0..10).collect();
        assert!(repeats(&cycle(&ten, 6)) && !repeats(&cycle(&ten, 5)));
        let long: Vec<u32> = (0..=MAX_PERIOD as u32).collect();
        assert!(!repeats(&cycle(&long, 20)), "paragraphs may be alike");
        let varied: Vec<u32> = (0..200).map(|n| if n % 9 == 0 { n } else { 1 }).collect();
        assert!(!repeats(&varied) && !repeats(&[]));
    }

    /// Returns after how many tokens a repetition is found.
    fn found_at(threshold: usize, tokens: impl IntoIterator<Item = u32>) -> Option<usize> {
        let mut repetition = Repetition::new(threshold);
        tokens.into_iter().position(|id| repetition.push(id)).map(|at| at + 1)
    }

    #[test]
    fn a_cycle_is_proven_by_its_tokens_and_its_times() {
        for (length, threshold, expected) in [
            (1, 1000, Some(1000)),
            (7, 1000, Some(1000)),
            (250, 1000, Some(1000)),
            (251, 1000, Some(1004)),
            (1024, 1000, Some(4096)),
            (1025, 16, None),
            (4, 16, Some(16)),
            (5, 16, Some(20)),
        ] {
            let cycle = (0..9999).map(|n| n % length);
            assert_eq!(found_at(threshold, cycle), expected, "{length} tokens, threshold {threshold}");
            let behind = (5000..5003).chain((0..9999).map(|n| n % length));
            assert_eq!(found_at(threshold, behind), expected.map(|at| at + 3), "{length} behind others");
        }
    }

    #[test]
    fn text_that_is_alike_is_no_cycle() {
        let zeros = (0..998).map(|n| n % 2);
        assert_eq!(found_at(1000, zeros.chain([9])), None, "a list of 499 zeros");
        let table = (0..400).flat_map(|row| [1, 2, 3, 100 + row, 2, 3, 7]);
        assert_eq!(found_at(1000, table), None, "rows that differ in one cell");
        let poem = (0..60).flat_map(|verse| (0..20).map(move |n| 1000 + verse * 20 + n).chain(0..30));
        assert_eq!(found_at(1000, poem), None, "a refrain behind different verses");
        let code = (0..300).flat_map(|line| [5, 5, 5, 5, line + 50, 6]);
        assert_eq!(found_at(1000, code), None, "lines that begin alike");
    }

    #[test]
    fn a_circle_that_was_left_is_forgiven() {
        let mut tokens = vec![1; 60];
        assert!(repeats(&tokens));
        tokens.push(2);
        assert!(!repeats(&tokens));
    }
}
