//! Plans when requests are sent: pure functions from a seed to times.
//!
//! In a closed loop each user sends the next request when the last one is answered. In an open loop requests
//! come at planned times, and a slow server falls behind. Latency then counts from the planned time, so that
//! a client that falls behind hides nothing.

use super::trace::Arrival;
use crate::point::Spacing;
use crate::stats::SplitMix64;

/// Returns the times of `count` requests in seconds from the start; the first is 0.
pub fn spaced(rate: f64, spacing: Spacing, count: usize, seed: u64) -> Vec<f64> {
    let mut random = SplitMix64::new(seed);
    let mut now = 0.0;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        times.push(now);
        now += match spacing {
            Spacing::Constant => 1.0 / rate,
            Spacing::Poisson => random.exponential(rate),
        };
    }
    times
}

/// Returns the times of recorded requests, `speed` times as fast.
pub fn replayed(arrivals: &[Arrival], speed: f64) -> Vec<f64> {
    arrivals.iter().map(|arrival| arrival.at_s / speed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::point::Loop;

    #[test]
    fn even_and_random_arrivals() {
        assert_eq!(spaced(4.0, Spacing::Constant, 3, 1), [0.0, 0.25, 0.5]);
        let times = spaced(10.0, Spacing::Poisson, 5000, 1);
        assert!(times.is_sorted());
        let rate = 4999.0 / times[4999];
        assert!((rate - 10.0).abs() < 0.5, "{rate}");
        assert_eq!(times, spaced(10.0, Spacing::Poisson, 5000, 1), "a seed repeats them");
        assert_ne!(times, spaced(10.0, Spacing::Poisson, 5000, 2));
    }

    #[test]
    fn a_trace_is_played_faster() {
        let at = |at_s| Arrival { at_s, prompt_tokens: 1, output_tokens: 1, blocks: vec![] };
        assert_eq!(replayed(&[at(0.0), at(3.0)], 2.0), [0.0, 1.5]);
    }

    #[test]
    fn points_have_names() {
        let names = [
            Loop::Closed { concurrency: 1 },
            Loop::Closed { concurrency: 8 },
            Loop::Open { rate: 0.5, spacing: Spacing::Poisson },
            Loop::Trace { speed: 2.0 },
        ];
        assert_eq!(names.map(|point| point.name()), ["1 user", "8 users", "0.5/s", "trace x2"]);
    }
}
