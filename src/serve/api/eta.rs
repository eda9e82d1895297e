//! Estimates the time for the rest of a prompt from the time for its beginning.
//!
//! A token costs the weights' share and, through attention, a share that grows with its position: the time to
//! position n is `a n + b n² / 2`, fitted to what was measured (least squares). Before enough is measured
//! nothing is said, because an estimate that grows while one waits is worse than none.

use std::time::Duration;

/// Fewest measurements, and smallest measured share of the prompt, for an estimate.
const LEAST_POINTS: usize = 4;
const LEAST_SHARE: f64 = 0.05;

/// One prompt's progress in time.
#[derive(Debug, Clone, Default)]
pub struct Eta {
    /// Tokens that were there at the start.
    start: f64,
    num_points: usize,
    /// Sums over all points of `u = n - start`, `v = (n² - start²) / 2` and the time.
    uu: f64,
    uv: f64,
    vv: f64,
    ut: f64,
    vt: f64,
}

impl Eta {
    pub fn new(cached_tokens: usize) -> Self {
        Self { start: cached_tokens as f64, ..Self::default() }
    }

    /// So many tokens are there after this time.
    pub fn note(&mut self, done: usize, elapsed: Duration) {
        let (u, v) = self.terms(done);
        let time = elapsed.as_secs_f64();
        if u > 0.0 {
            self.num_points += 1;
            self.uu += u * u;
            self.uv += u * v;
            self.vv += v * v;
            self.ut += u * time;
            self.vt += v * time;
        }
    }

    /// The time from here to the end, once it can be told.
    pub fn left(&self, done: usize, total: usize) -> Option<Duration> {
        let (u, v) = self.terms(done);
        let (all_u, all_v) = self.terms(total);
        if self.num_points < LEAST_POINTS || u < LEAST_SHARE * all_u {
            return None;
        }
        let (a, b) = self.rates();
        Duration::try_from_secs_f64(a * (all_u - u) + b * (all_v - v)).ok()
    }

    fn terms(&self, done: usize) -> (f64, f64) {
        let n = done as f64;
        (n - self.start, (n * n - self.start * self.start) / 2.0)
    }

    /// Seconds per token, and what each position adds; neither is negative.
    fn rates(&self) -> (f64, f64) {
        let flat = (self.ut / self.uu, 0.0);
        let determinant = self.uu * self.vv - self.uv * self.uv;
        if determinant <= 1e-9 * self.uu * self.vv {
            return flat;
        }
        let a = (self.ut * self.vv - self.vt * self.uv) / determinant;
        let b = (self.vt * self.uu - self.ut * self.uv) / determinant;
        match (a >= 0.0, b >= 0.0) {
            (true, true) => (a, b),
            (false, _) => (0.0, self.vt / self.vv),
            (true, false) => flat,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns estimated / true time left, after `share` of a prompt of which `n` tokens take `time(n)`, in chunks of 512.
    fn error(start: usize, total: usize, share: f64, time: impl Fn(f64) -> f64) -> f64 {
        let mut eta = Eta::new(start);
        let mut done = start;
        while ((done - start) as f64) < share * (total - start) as f64 {
            done += 512;
            eta.note(done, Duration::from_secs_f64(time(done as f64) - time(start as f64)));
        }
        let left = eta.left(done, total).expect("enough is measured").as_secs_f64();
        left / (time(total as f64) - time(done as f64))
    }

    #[test]
    fn what_is_said_early_is_what_it_takes() {
        // 60 016 tokens in 129 s, nearly all of it attention: what was said was 9 s.
        let steep = |n: f64| 1e-4 * n + 6.9e-8 * n * n / 2.0;
        for (start, share) in [(0, 0.06), (0, 0.3), (0, 0.9), (20_000, 0.1)] {
            let error = error(start, 60_016, share, steep);
            assert!((0.95..1.05).contains(&error), "{start} {share}: {error}");
        }
        let flat = |n: f64| 2e-3 * n;
        assert!((0.99..1.01).contains(&error(0, 40_000, 0.1, flat)));
        // A machine that gets less busy must not give a time below nothing.
        let slowing_down = |n: f64| n.sqrt();
        assert!(error(0, 40_000, 0.1, slowing_down) > 0.5);
    }

    #[test]
    fn before_enough_is_measured_nothing_is_said() {
        let mut eta = Eta::new(0);
        for step in 1..=3 {
            eta.note(step * 512, Duration::from_millis(step as u64));
            assert_eq!(eta.left(step * 512, 2048), None);
        }
        eta.note(2048, Duration::from_millis(4));
        assert_eq!(eta.left(2048, 2048), Some(Duration::ZERO));
        assert_eq!(eta.left(2048, 1 << 20), None, "too small a share of a long prompt");
        assert_eq!(Eta::new(7).left(7, 7), None);
    }
}
