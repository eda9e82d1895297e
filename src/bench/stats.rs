//! Statistics of few measurements: pure functions of numbers, with known answers in the tests below.
//!
//! Knows nothing of models or machines. Random choices come from a seeded generator, so that a report can be
//! reproduced.

/// Returns the arithmetic mean; 0 without values.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Returns the standard deviation of a sample (n - 1 in the denominator, as in llama-bench); 0 for fewer than
/// two values.
pub fn stddev(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

/// Returns the quantile `q` in [0, 1], with linear interpolation between neighbours (type 7 of Hyndman and
/// Fan 1996, R's default). 0 without values.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile_of_sorted(&sorted, q)
}

fn quantile_of_sorted(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = q.clamp(0.0, 1.0) * last as f64;
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the median distance from the median.
pub fn median_deviation(values: &[f64]) -> f64 {
    let middle = median(values);
    median(&values.iter().map(|value| (value - middle).abs()).collect::<Vec<_>>())
}

/// Returns the indices of values so far off that they are probably something else: the modified Z-score
/// 0.6745 * |x - median| / MAD is above 10 (Iglewicz and Hoaglin 1993 suggest 3.5 for the normal
/// distribution; times of programs have long tails, and hyperfine uses 10 for this reason).
pub fn outliers(values: &[f64]) -> Vec<usize> {
    let (middle, deviation) = (median(values), median_deviation(values));
    let score = |value: f64| 0.6745 * (value - middle).abs() / deviation;
    (0..values.len()).filter(|&index| deviation > 0.0 && score(values[index]) > 10.0).collect()
}

/// Returns the rise (or fall, below 0) from the first value to the last as a share of their median: the slope
/// of Theil and Sen, if the trend is significant at 5% by Mann and Kendall. `None` without a trend, or with
/// fewer than five values.
pub fn drift(values: &[f64]) -> Option<f64> {
    let n = values.len();
    let mut slopes = Vec::new();
    let mut balance = 0i64;
    for later in 1..n {
        for earlier in 0..later {
            let rise = values[later] - values[earlier];
            balance += i64::from(rise > 0.0) - i64::from(rise < 0.0);
            slopes.push(rise / (later - earlier) as f64);
        }
    }
    let variance = (n * n.saturating_sub(1) * (2 * n + 5)) as f64 / 18.0;
    let score = (balance.abs() - 1) as f64 / variance.sqrt();
    let middle = median(values);
    (n >= 5 && score > 1.96 && middle != 0.0).then(|| median(&slopes) * (n - 1) as f64 / middle)
}

/// Range that contains the true value with some probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

/// Returns the ratio median(b) / median(a) and its bootstrap percentile interval (Efron and Tibshirani 1993,
/// chapter 13) from `resamples` resamplings of both. `None` if either is empty or the median of `a` is 0.
pub fn ratio_of_medians(
    a: &[f64],
    b: &[f64],
    confidence: f64,
    resamples: usize,
    seed: u64,
) -> Option<(f64, Interval)> {
    let (below, above) = (median(a), median(b));
    if a.is_empty() || b.is_empty() || below == 0.0 {
        return None;
    }
    let mut random = SplitMix64::new(seed);
    let mut drawn = |values: &[f64]| {
        let again: Vec<f64> = values.iter().map(|_| values[random.below(values.len())]).collect();
        median(&again)
    };
    let mut ratios: Vec<f64> = (0..resamples).map(|_| drawn(b) / drawn(a)).collect();
    ratios.retain(|ratio| ratio.is_finite());
    ratios.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence) / 2.0;
    let (low, high) = (quantile_of_sorted(&ratios, tail), quantile_of_sorted(&ratios, 1.0 - tail));
    Some((above / below, Interval { low, high }))
}

/// Random numbers from a seed (Steele, Lea and Flood 2014): small, fast, and good enough for prompts and
/// arrivals.
#[derive(Debug, Clone)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns a uniform number of 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in [0, n); `n` is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// Returns a uniform number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns the time to the next of independent events that come at `rate` per unit of time, as in a
    /// Poisson process.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn means_and_deviations() {
        let values = [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0];
        assert!(close(mean(&values), 5.0));
        assert!(close(stddev(&values), (32.0f64 / 7.0).sqrt()));
        assert!(close(median(&values), 4.5));
        assert_eq!((mean(&[]), stddev(&[3.0]), median(&[])), (0.0, 0.0, 0.0));
    }

    #[test]
    fn quantiles_are_those_of_r() {
        // quantile(c(1, 3, 2, 10), c(0, .25, .5, .9, 1)) in R.
        let values = [1.0, 3.0, 2.0, 10.0];
        for (q, expected) in [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (0.9, 7.9), (1.0, 10.0)] {
            assert!(close(quantile(&values, q), expected), "{q}");
        }
    }

    #[test]
    fn what_is_far_off_is_an_outlier_and_equal_values_have_none() {
        assert_eq!(outliers(&[10.0, 10.1, 9.9, 10.05, 20.0]), [4]);
        assert!(outliers(&[10.0, 11.0, 9.0, 12.0, 8.0]).is_empty());
        assert!(outliers(&[5.0; 6]).is_empty());
        assert!(close(median_deviation(&[1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]), 1.0));
    }

    #[test]
    fn a_trend_is_told_from_noise() {
        let falling = [100.0, 98.0, 96.0, 94.0, 92.0];
        assert!(close(drift(&falling).expect("a trend"), -8.0 / 96.0));
        assert_eq!(drift(&[100.0, 98.0, 101.0, 97.0, 100.0, 99.0]), None);
        assert_eq!(drift(&falling[..4]), None, "four values prove nothing");
        assert_eq!(drift(&[7.0; 9]), None);
        assert_eq!(drift(&[]), None);
    }

    #[test]
    fn a_ratio_has_an_interval_around_it() {
        let a = [100.0, 101.0, 99.0, 100.5, 99.5];
        let faster = a.map(|value| value * 1.2);
        let (ratio, interval) = ratio_of_medians(&a, &faster, 0.95, 2000, 1).expect("values");
        assert!(close(ratio, 1.2));
        assert!(interval.low > 1.17 && interval.high < 1.23 && interval.low < 1.2, "{interval:?}");
        let (_, same) = ratio_of_medians(&a, &a, 0.95, 2000, 1).expect("values");
        assert!(same.low <= 1.0 && same.high >= 1.0, "{same:?}");
        // Without spread the interval is a point.
        let (_, exact) = ratio_of_medians(&[2.0; 3], &[3.0; 3], 0.95, 100, 7).expect("values");
        assert_eq!(exact, Interval { low: 1.5, high: 1.5 });
        assert_eq!(ratio_of_medians(&[], &a, 0.95, 10, 1), None);
        assert_eq!(ratio_of_medians(&[0.0], &a, 0.95, 10, 1), None);
    }

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = SplitMix64::new(1234567);
        // The first outputs for this seed in the reference implementation's test vector.
        assert_eq!(random.bits(), 6457827717110365317);
        assert_eq!(random.bits(), 3203168211198807973);
    }

    #[test]
    fn arrivals_have_the_rate_asked_for() {
        let mut random = SplitMix64::new(3);
        let gaps: Vec<f64> = (0..20_000).map(|_| random.exponential(4.0)).collect();
        // Both are 1/4 for an exponential distribution; 20,000 draws are within 1% of it or nearly.
        assert!((mean(&gaps) - 0.25).abs() < 0.006, "{}", mean(&gaps));
        assert!((stddev(&gaps) - 0.25).abs() < 0.008, "{}", stddev(&gaps));
        assert!((0..1000).all(|_| random.below(7) < 7));
    }
}
