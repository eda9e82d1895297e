//! When requests are sent. Pure: a plan of times from a seed.
//!
//! In a closed loop a number of users each send the next request when the last one is answered; in an open loop requests come
//! when they come, and a server that is too slow falls behind. Latency then counts from when a request should have been
//! sent, so that a client that could not keep up hides nothing.

use super::trace::Arrival;
use crate::cli::bench::point::Spacing;
use crate::cli::bench::stats::SplitMix64;

/// Times of `count` requests in seconds from the start, the first at 0.
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

/// Times of recorded requests, played `speed` times as fast.
pub fn replayed(arrivals: &[Arrival], speed: f64) -> Vec<f64> {
    arrivals.iter().map(|arrival| arrival.at_s / speed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::bench::point::Loop;

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
