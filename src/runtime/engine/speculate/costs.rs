//! Costs of steps with few rows, measured as they run, and an account that bounds the cost of wrong drafts.

use std::time::Duration;

/// Most rows of a step with drafted rows: those that one call of a product's direct path takes.
pub const MAX_ROWS: usize = 8;

/// Share of a step's cost that another row is assumed to add until it is measured.
const ASSUMED_SLOPE: f64 = 0.15;

/// Weight of a new measurement in the running mean.
const NEW_WEIGHT: f64 = 0.125;

/// Measurements of a number of rows without a draft before drafts build on it: the first steps of a process
/// are slow.
const NEEDED_MEASUREMENTS: u32 = 2;

/// Steps with a draft after which one without is measured again: a context that grows makes steps slower.
const MAX_AGE: u32 = 64;

/// Share of all steps' time that wrong drafts may cost beyond what right ones have saved.
const ALLOWANCE: f64 = 0.01;

/// Most credit in steps. At the start it is there too: an answer of 200 tokens with nothing but wrong drafts
/// then costs 2% more.
const MAX_CREDIT: f64 = 2.0;

/// Part of the credit that may be spent on reading a text for drafts; the rest is for the drafts.
const READING_SHARE: f64 = 0.5;

/// Most savings in steps.
const MAX_SAVINGS: f64 = 512.0;

/// Running means of the time of steps, in seconds, by their number of rows.
#[derive(Debug, Default)]
pub struct StepCosts {
    means: [f64; MAX_ROWS + 1],
    counts: [u32; MAX_ROWS + 1],
    /// Steps with a draft since one of so many rows had none.
    ages: [u32; MAX_ROWS + 1],
}

impl StepCosts {
    /// Notes a step of `num_known` rows, or of `num_rows` with drafted ones.
    pub fn learn(&mut self, num_known: usize, num_rows: usize, took: Duration) {
        let is_plain = num_known == num_rows;
        self.ages[num_known] = if is_plain { 0 } else { self.ages[num_known] + 1 };
        let (mean, count) = (&mut self.means[num_rows], &mut self.counts[num_rows]);
        *count = count.saturating_add(1);
        if *count <= NEEDED_MEASUREMENTS {
            *mean = took.as_secs_f64(); // the first one may have waited for memory
        } else {
            // A step that was interrupted says little about the next one.
            *mean += (took.as_secs_f64().min(2.0 * *mean) - *mean) * NEW_WEIGHT;
        }
    }

    /// Returns whether steps of `num_rows` rows without a draft were measured lately.
    pub fn is_known(&self, num_rows: usize) -> bool {
        self.counts[num_rows] >= NEEDED_MEASUREMENTS && self.ages[num_rows] < MAX_AGE
    }

    /// Returns the seconds of a step of `num_rows` rows: measured, or from the measured number next to it.
    pub fn of(&self, num_rows: usize) -> f64 {
        let measured = (1..=MAX_ROWS).filter(|&rows| self.counts[rows] > 0);
        let Some(nearest) = measured.min_by_key(|&rows| rows.abs_diff(num_rows)) else { return 0.0 };
        let per_row = |rows: usize| 1.0 + ASSUMED_SLOPE * rows as f64;
        self.means[nearest] * per_row(num_rows) / per_row(nearest)
    }

    /// Returns the seconds that a step of `to` rows takes longer than one of `from`.
    pub fn extra(&self, from: usize, to: usize) -> f64 {
        if from == to { 0.0 } else { (self.of(to.min(MAX_ROWS)) - self.of(from)).max(0.0) }
    }
}

/// Time that drafts have saved and cost.
#[derive(Debug, Default)]
pub struct Account {
    /// Seconds. Negative after wrong drafts.
    balance: f64,
    /// Seconds that right drafts saved beyond the most credit. Wrong drafts cannot cost them: they pay for reading texts
    /// alone, which takes many steps' time at once and brings it back later.
    savings: f64,
    /// Seconds of a step without drafts; 0 before the first.
    step: f64,
}

impl Account {
    /// Returns whether a draft that costs `extra` seconds is affordable even if it is wrong.
    pub fn allows(&self, extra: f64) -> bool {
        extra <= self.balance
    }

    /// Books a step that takes `step` seconds without drafts, and what its draft gained.
    pub fn book(&mut self, gain: f64, step: f64) {
        if self.step == 0.0 {
            self.balance = MAX_CREDIT * step;
        }
        self.step = step;
        let balance = self.balance + gain + ALLOWANCE * step;
        self.balance = balance.min(MAX_CREDIT * step);
        self.save(balance - self.balance);
    }

    /// Books a step that took `seconds` and could have no drafts: one of prompts.
    pub fn book_other(&mut self, seconds: f64) {
        self.save(ALLOWANCE * seconds);
    }

    fn save(&mut self, seconds: f64) {
        // Before the first step without prompts there is no measure of the most.
        let most = if self.step > 0.0 { MAX_SAVINGS * self.step } else { f64::INFINITY };
        self.savings = (self.savings + seconds).min(most);
    }

    /// Returns the seconds that may be spent on reading.
    pub fn for_reading(&self) -> f64 {
        self.savings + READING_SHARE * self.balance.max(0.0)
    }

    /// Books seconds spent on reading.
    pub fn pay_reading(&mut self, seconds: f64) {
        let saved = seconds.min(self.savings);
        self.savings -= saved;
        self.balance -= seconds - saved;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn unmeasured_steps_are_taken_from_measured_ones() {
        let mut costs = StepCosts::default();
        assert!(!costs.is_known(1));
        (0..2).for_each(|_| costs.learn(1, 1, ms(23)));
        assert!(costs.is_known(1) && !costs.is_known(2));
        assert!((costs.of(1) - 0.023).abs() < 1e-9);
        assert!((costs.extra(1, 3) - 0.006).abs() < 1e-9, "{}", costs.extra(1, 3));
        costs.learn(1, 4, ms(50));
        assert!((costs.of(4) - 0.05).abs() < 1e-9);
        assert!(costs.of(3) > 0.04, "nearer to 4 than to 1");
    }

    #[test]
    fn reading_is_paid_from_savings_first_and_from_half_the_credit() {
        let mut account = Account::default();
        account.book(0.0, 1.0);
        assert!((account.for_reading() - 1.01).abs() < 1e-9, "{account:?}");
        account.book(10.0, 1.0);
        account.book_other(50.0);
        assert!((account.for_reading() - 11.52).abs() < 1e-9, "{account:?}");
        account.pay_reading(10.6);
        assert!(account.for_reading() < 1.0 && account.allows(1.5), "{account:?}");
        account.pay_reading(5.0);
        assert!(account.for_reading() == 0.0 && !account.allows(0.0), "{account:?}");
    }

    #[test]
    fn an_interrupted_step_counts_little_and_old_measurements_end() {
        let mut costs = StepCosts::default();
        (0..2).for_each(|_| costs.learn(1, 1, ms(10)));
        costs.learn(1, 1, ms(9000));
        assert!(costs.of(1) < 0.012);
        (0..MAX_AGE).for_each(|_| costs.learn(1, 5, ms(12)));
        assert!(!costs.is_known(1));
        costs.learn(1, 1, ms(10));
        assert!(costs.is_known(1));
    }
}
