//! Shares drafted rows among sequences: pure functions of plain numbers.

/// A draft that a sequence could add to a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftOffer {
    /// Tokens of the draft; 0 without one.
    pub len: usize,
    /// Probability that a token is accepted if those before it were.
    pub acceptance: f64,
    /// Tokens that a draft model computes before the first of the draft; 0 if the draft is there already.
    pub num_lacking: usize,
}

/// Returns the length of each draft with which a step with at most `room` drafted rows is expected to deliver most tokens
/// per unit of `cost`, which gets the lengths.
///
/// Rows are added where they are most likely to be accepted; what a number of rows delivers at best is then
/// known, and the best number is taken.
pub fn by_gain(offers: &[DraftOffer], room: usize, cost: impl Fn(&[usize]) -> f64) -> Vec<usize> {
    let mut lens = vec![0; offers.len()];
    let mut best = lens.clone();
    let mut tokens = offers.len() as f64;
    let mut best_rate = tokens / cost(&lens);
    for _ in 0..room {
        let chance = |index: usize| offers[index].acceptance.powi(lens[index] as i32 + 1);
        let open = (0..lens.len()).filter(|&index| lens[index] < offers[index].len);
        let Some(next) = open.max_by(|&a, &b| chance(a).total_cmp(&chance(b))) else { break };
        tokens += chance(next);
        lens[next] += 1;
        let rate = tokens / cost(&lens);
        if rate > best_rate {
            (best_rate, best) = (rate, lens.clone());
        }
    }
    best
}

/// Returns the length of each draft if all get rows in turn.
pub fn in_turn(offers: &[DraftOffer], room: usize) -> Vec<usize> {
    let mut lens = vec![0; offers.len()];
    let mut left = room;
    while let Some(next) = (0..lens.len())
        .filter(|&index| left > 0 && lens[index] < offers[index].len)
        .min_by_key(|&index| lens[index])
    {
        lens[next] += 1;
        left -= 1;
    }
    lens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(drafts: &[(usize, f64)]) -> Vec<DraftOffer> {
        drafts.iter().map(|&(len, acceptance)| DraftOffer { len, acceptance, num_lacking: 0 }).collect()
    }

    #[track_caller]
    fn check(drafts: &[(usize, f64)], slope: f64, expected: &[usize]) {
        let cost = |lens: &[usize]| 1.0 + slope * (drafts.len() + lens.iter().sum::<usize>()) as f64;
        assert_eq!(by_gain(&offers(drafts), 7, cost), expected, "{drafts:?} at {slope}");
    }

    #[test]
    fn likely_drafts_are_long_and_dear_rows_make_them_short() {
        check(&[(9, 1.0)], 0.1, &[7]);
        check(&[(3, 1.0)], 0.1, &[3]);
        check(&[(9, 0.5)], 0.1, &[2]);
        check(&[(9, 0.5)], 0.6, &[1]);
        check(&[(9, 0.1)], 0.3, &[0]);
        check(&[(9, 0.9)], 100.0, &[0]);
        check(&[(0, 0.0), (2, 0.9), (9, 0.9)], 0.1, &[0, 2, 5]);
        check(&[(9, 0.9), (9, 0.5)], 0.1, &[6, 1]);
        assert_eq!(by_gain(&[], 7, |_| 1.0), [0; 0]);
    }

    #[test]
    fn forced_drafts_share_the_room() {
        assert_eq!(in_turn(&offers(&[(4, 0.0), (1, 0.0), (9, 0.0)]), 8), [4, 1, 3]);
        assert_eq!(in_turn(&offers(&[(4, 0.0)]), 0), [0]);
    }
}
