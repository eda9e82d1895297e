//! Speculation: rows for tokens that a drafter expects next join the step, and the sampler then takes as many of
//! them as it would have taken anyway.
//!
//! Invariants: a draft is a guess and changes no answer. What a step computes beyond the known tokens depends on
//! measured times; what it delivers does not.

mod allotment;
mod costs;
mod drafts;
mod ngram;

use std::time::Duration;

use crate::runtime::spec::Speculation;
pub use allotment::DraftOffer;
use costs::{Account, MAX_ROWS, StepCosts};
pub use drafts::{DraftText, Drafts};

/// Draws up drafts: what it asks of each running generation.
pub trait Drafting {
    /// Returns the expected length and acceptance of a new draft of at most `most` tokens.
    fn propose(&mut self, mode: Speculation, most: usize) -> Option<DraftOffer>;

    /// Keeps the first `len` tokens of the draft.
    fn keep_draft(&mut self, len: usize);
}

/// Decides how many tokens are drafted in a step.
#[derive(Debug)]
pub struct Speculator {
    mode: Speculation,
    costs: StepCosts,
    account: Account,
}

impl Speculator {
    pub fn new(mode: Speculation) -> Self {
        Self { mode, costs: StepCosts::default(), account: Account::default() }
    }

    pub fn is_off(&self) -> bool {
        self.mode == Speculation::Off
    }

    /// Gives drafts to `generating`, those generations that sample in a step of `num_rows` rows, and at most
    /// `most_rows` with drafted ones. Returns the number of drafted rows.
    pub fn draft<D: Drafting>(
        &mut self,
        generating: &mut [&mut D],
        num_rows: usize,
        most_rows: usize,
    ) -> usize {
        let (room, each) = match self.mode {
            Speculation::Off => return 0,
            Speculation::Always(each) => (most_rows.saturating_sub(num_rows), each),
            Speculation::Auto | Speculation::Ngram => {
                (most_rows.min(MAX_ROWS).saturating_sub(num_rows), MAX_ROWS)
            }
        };
        if room == 0 || (!self.is_forced() && !self.costs.is_known(num_rows)) {
            return 0;
        }
        let proposed = generating.iter_mut().map(|generation| generation.propose(self.mode, each.min(room)));
        let offers: Vec<DraftOffer> = proposed.map(Option::unwrap_or_default).collect();
        let lens = match self.is_forced() {
            true => allotment::in_turn(&offers, room),
            false => allotment::by_gain(&offers, num_rows, room, |rows| self.costs.of(rows)),
        };
        let num_drafted: usize = lens.iter().sum();
        let extra = self.costs.extra(num_rows, num_rows + num_drafted);
        let is_refused = num_drafted > 0 && !self.is_forced() && !self.account.allows(extra);
        for (generation, len) in generating.iter_mut().zip(lens) {
            generation.keep_draft(if is_refused { 0 } else { len });
        }
        if is_refused { 0 } else { num_drafted }
    }

    fn is_forced(&self) -> bool {
        matches!(self.mode, Speculation::Always(_))
    }

    /// Learns from a step of generations only: `num_rows` known tokens, `num_drafted` drafted ones, of which
    /// `num_accepted` were taken.
    pub fn learn(&mut self, num_rows: usize, num_drafted: usize, num_accepted: usize, took: Duration) {
        if self.is_off() || num_rows + num_drafted > MAX_ROWS {
            return;
        }
        self.costs.learn(num_rows, num_rows + num_drafted, took);
        let per_token = self.costs.of(num_rows) / num_rows.max(1) as f64;
        let gain = num_accepted as f64 * per_token - self.costs.extra(num_rows, num_rows + num_drafted);
        self.account.book(gain, self.costs.of(num_rows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Guess(DraftOffer, usize);

    impl Drafting for Guess {
        fn propose(&mut self, _: Speculation, most: usize) -> Option<DraftOffer> {
            Some(DraftOffer { len: self.0.len.min(most), ..self.0 })
        }

        fn keep_draft(&mut self, len: usize) {
            self.1 = len;
        }
    }

    /// Runs `steps` steps in which a row more costs `slope` of a step and drafts hold with `rate`, of which
    /// the sequence's own estimate is right. Returns time with speculation over time without, and the drafts.
    fn simulate(slope: f64, rate: f64, steps: usize) -> (f64, usize) {
        let mut speculator = Speculator::new(Speculation::Auto);
        let (mut time, mut tokens, mut drafts) = (0.0, 0.0, 0);
        let mut credit = 0.0;
        for _ in 0..steps {
            let mut guess = Guess(DraftOffer { len: MAX_ROWS, acceptance: 0.8 }, 0);
            let num_drafted = speculator.draft(&mut [&mut guess], 1, 128);
            assert_eq!(num_drafted, guess.1);
            credit += num_drafted as f64 * rate;
            let num_accepted = (credit as usize).min(num_drafted);
            credit -= num_accepted as f64;
            let took = 1.0 + slope * num_drafted as f64;
            time += took;
            tokens += 1.0 + num_accepted as f64;
            drafts += usize::from(num_drafted > 0);
            speculator.learn(1, num_drafted, num_accepted, Duration::from_secs_f64(took / 1e3));
        }
        (time / tokens, drafts)
    }

    #[test]
    fn wrong_drafts_cost_at_most_two_percent_whatever_they_promise() {
        for slope in [0.02, 0.15, 0.5, 1.0] {
            let (cost, drafts) = simulate(slope, 0.0, 1000);
            assert!(cost < 1.02, "{cost} at {slope}");
            assert!(drafts > 0 || slope >= 0.5, "they are tried now and then");
        }
    }

    #[test]
    fn right_drafts_are_computed_as_far_as_rows_are_cheap() {
        let (cheap, _) = simulate(0.05, 1.0, 1000);
        assert!(cheap < 0.25, "{cheap}");
        let (dear, _) = simulate(1.0, 1.0, 1000);
        assert!(dear < 1.02, "{dear}");
    }
}
