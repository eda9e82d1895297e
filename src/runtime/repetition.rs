//! Detects that a sequence of tokens repeats itself. Pure.

/// Longest period that is detected, in tokens.
const MAX_PERIOD: usize = 24;

/// Least number of repetitions.
const MIN_TIMES: usize = 6;

/// Least tokens of all repetitions: a row of dashes or a few equal list items do not count.
const MIN_TOKENS: usize = 48;

/// Longest period and least tokens of a repetition that is beyond doubt.
const MAX_LONG_PERIOD: usize = 250;
const LONG_TOKENS: usize = 1000;

/// Returns whether `tokens` end with 1,000 that are one run over and over.
pub fn goes_round(tokens: &[u32]) -> bool {
    let Some(start) = tokens.len().checked_sub(LONG_TOKENS) else { return false };
    let tail = &tokens[start..];
    (1..=MAX_LONG_PERIOD).any(|period| tail[period..] == tail[..LONG_TOKENS - period])
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

    #[test]
    fn a_thousand_tokens_of_one_run_go_round() {
        for (period, tokens, expected) in
            [(1, 1000, true), (1, 999, false), (250, 1000, true), (251, 9999, false)]
        {
            let tokens: Vec<u32> = (0..tokens).map(|n| n % period).collect();
            assert_eq!(goes_round(&tokens), expected, "period {period}");
        }
    }

    #[test]
    fn a_circle_that_was_left_is_forgiven() {
        let mut tokens = vec![1; 60];
        assert!(repeats(&tokens));
        tokens.push(2);
        assert!(!repeats(&tokens));
    }
}
