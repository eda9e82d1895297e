//! One point of a sweep over HTTP: its requests and their figures.
//!
//! Definitions are the usual ones: time to first token (TTFT) counts from a request's scheduled time;
//! inter-token latency (ITL) is the time from one part of the stream to the next, whatever its number of
//! tokens, which is why that is recorded; time per output token (TPOT) is (E2E - TTFT) / (n - 1) of a whole
//! request.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Spacing of the requests of an open loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spacing {
    /// Independent of each other, as many users are
    #[default]
    Poisson,
    /// Evenly
    Constant,
}

/// Load of one point of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loop {
    /// Requests of a constant number of users.
    Closed { concurrency: usize },
    /// Requests at a rate per second.
    Open { rate: f64, spacing: Spacing },
    /// Recorded arrivals, sped up by a factor.
    Trace { speed: f64 },
}

impl Loop {
    /// Returns the name in reports: `4 users`, `2.5/s`, `trace x2`.
    pub fn name(&self) -> String {
        match self {
            Loop::Closed { concurrency: 1 } => "1 user".to_owned(),
            Loop::Closed { concurrency } => format!("{concurrency} users"),
            Loop::Open { rate, spacing: Spacing::Poisson } => format!("{rate}/s"),
            Loop::Open { rate, spacing: Spacing::Constant } => format!("{rate}/s even"),
            Loop::Trace { speed } => format!("trace x{speed}"),
        }
    }
}

/// Measurements of one request.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnSample {
    /// Scheduled time in seconds from the start of the point.
    pub at_s: f64,
    /// Delay of the request after its scheduled time.
    pub late_ms: f64,
    /// Number of the turn in its conversation, from 1.
    pub turn: usize,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub output_tokens: usize,
    /// Time from the scheduled time to the first part.
    pub first_ms: Option<f64>,
    pub total_ms: f64,
    /// Times from each part of the stream to the next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gaps_ms: Vec<f64>,
    /// Kind of failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl TurnSample {
    pub fn is_ok(&self) -> bool {
        self.error.is_none()
    }

    /// Returns the milliseconds per output token after the first; `None` for a single token.
    pub fn tpot_ms(&self) -> Option<f64> {
        // An answer in a single part has no time between tokens.
        let rest = self.output_tokens.checked_sub(1).filter(|&rest| rest > 0 && !self.gaps_ms.is_empty())?;
        Some((self.total_ms - self.first_ms?) / rest as f64)
    }
}

/// Distribution of a latency in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub count: u64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Latency {
    /// Computes the distribution to three significant digits; `None` without values. Caps values at a day.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        const DAY_US: u64 = 86_400_000_000;
        let mut histogram =
            Histogram::<u64>::new_with_bounds(1, DAY_US, 3).expect("the bounds are constant and valid");
        for value in values {
            histogram.saturating_record(((value * 1000.0).round() as u64).clamp(1, DAY_US));
        }
        let at = |q: f64| histogram.value_at_quantile(q) as f64 / 1000.0;
        (!histogram.is_empty()).then(|| Self {
            count: histogram.len(),
            mean: histogram.mean() / 1000.0,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: histogram.max() as f64 / 1000.0,
        })
    }
}

/// Limits in milliseconds that a request must meet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    pub ttft: Option<f64>,
    pub tpot: Option<f64>,
    pub e2e: Option<f64>,
}

impl Slo {
    fn is_met(&self, turn: &TurnSample) -> bool {
        let within = |limit: Option<f64>, value: Option<f64>| {
            limit.is_none_or(|limit| value.is_some_and(|value| value <= limit))
        };
        // An answer of one token meets every limit per token.
        let tpot = turn.tpot_ms().or((turn.output_tokens <= 1).then_some(0.0));
        turn.is_ok()
            && within(self.ttft, turn.first_ms)
            && within(self.tpot, tpot)
            && within(self.e2e, Some(turn.total_ms))
    }
}

impl std::str::FromStr for Slo {
    type Err = String;

    /// Parses `ttft=200,tpot=50,e2e=5000`, in milliseconds.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut slo = Slo::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or("not of the form ttft=MS,tpot=MS,e2e=MS")?;
            let value: f64 =
                value.trim_end_matches("ms").parse().map_err(|_| format!("{value:?} is not a number"))?;
            if !(value > 0.0 && value.is_finite()) {
                return Err(format!("{value} is not above 0"));
            }
            match name {
                "ttft" => slo.ttft = Some(value),
                "tpot" => slo.tpot = Some(value),
                "e2e" => slo.e2e = Some(value),
                _ => return Err(format!("{name:?} is none of ttft, tpot, e2e")),
            }
        }
        Ok(slo)
    }
}

/// Requests that met the limits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    pub slo: Slo,
    /// Share of all requests.
    pub share: f64,
    pub per_second: f64,
}

/// Results of one point of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub name: String,
    #[serde(rename = "loop")]
    pub kind: Loop,
    /// Time from the first request to the last answer.
    pub seconds: f64,
    pub requests: usize,
    /// Failures by kind: `unreachable`, `http_429`, `broken`, `timeout`, ...
    pub errors: BTreeMap<String, usize>,
    pub requests_per_second: f64,
    pub prompt_tokens_per_second: f64,
    pub output_tokens_per_second: f64,
    /// Share of the prompts' tokens that the server reused.
    pub cached_share: f64,
    pub tokens_per_chunk: Option<f64>,
    pub ttft_ms: Option<Latency>,
    pub itl_ms: Option<Latency>,
    pub tpot_ms: Option<Latency>,
    pub e2e_ms: Option<Latency>,
    /// Delays of requests after their scheduled times.
    pub late_ms: Option<Latency>,
    pub goodput: Option<Goodput>,
    pub turns: Vec<TurnSample>,
}

impl Point {
    /// Computes the figures of requests that took `seconds` in total.
    pub fn new(kind: Loop, mut turns: Vec<TurnSample>, seconds: f64, slo: Option<Slo>) -> Self {
        turns.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let ok: Vec<&TurnSample> = turns.iter().filter(|turn| turn.is_ok()).collect();
        let mut errors = BTreeMap::new();
        for kind in turns.iter().filter_map(|turn| turn.error.as_ref()) {
            *errors.entry(kind.clone()).or_insert(0) += 1;
        }
        let sum = |count: fn(&TurnSample) -> usize| ok.iter().map(|turn| count(turn)).sum::<usize>() as f64;
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let (prompt, output) = (sum(|turn| turn.prompt_tokens), sum(|turn| turn.output_tokens));
        let chunks = ok
            .iter()
            .filter(|turn| turn.first_ms.is_some())
            .map(|turn| turn.gaps_ms.len() + 1)
            .sum::<usize>();
        let goodput = slo.map(|slo| {
            let good = turns.iter().filter(|turn| slo.is_met(turn)).count() as f64;
            Goodput { slo, share: good / turns.len().max(1) as f64, per_second: per_second(good) }
        });
        Self {
            name: kind.name(),
            kind,
            seconds,
            requests: turns.len(),
            errors,
            requests_per_second: per_second(ok.len() as f64),
            prompt_tokens_per_second: per_second(prompt),
            output_tokens_per_second: per_second(output),
            cached_share: if prompt > 0.0 { sum(|turn| turn.cached_tokens) / prompt } else { 0.0 },
            tokens_per_chunk: (chunks > 0).then(|| output / chunks as f64),
            ttft_ms: Latency::of(ok.iter().filter_map(|turn| turn.first_ms)),
            itl_ms: Latency::of(ok.iter().flat_map(|turn| turn.gaps_ms.iter().copied())),
            tpot_ms: Latency::of(ok.iter().filter_map(|turn| turn.tpot_ms())),
            e2e_ms: Latency::of(ok.iter().map(|turn| turn.total_ms)),
            late_ms: Latency::of(turns.iter().map(|turn| turn.late_ms)),
            goodput,
            turns,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a request with these times in milliseconds.
    pub fn turn(at_s: f64, first_ms: f64, gaps_ms: &[f64], output_tokens: usize) -> TurnSample {
        TurnSample {
            at_s,
            turn: 1,
            prompt_tokens: 100,
            cached_tokens: 50,
            output_tokens,
            first_ms: Some(first_ms),
            total_ms: first_ms + gaps_ms.iter().sum::<f64>(),
            gaps_ms: gaps_ms.to_vec(),
            ..TurnSample::default()
        }
    }

    #[test]
    fn figures_of_a_point() {
        let failed = TurnSample {
            at_s: 0.5,
            error: Some("http_429".to_owned()),
            total_ms: 1.0,
            ..TurnSample::default()
        };
        let turns = vec![turn(1.0, 300.0, &[20.0, 40.0], 5), turn(0.0, 100.0, &[10.0, 10.0], 3), failed];
        let slo = "ttft=200,tpot=15".parse().expect("limits");
        let point = Point::new(Loop::Closed { concurrency: 2 }, turns, 2.0, Some(slo));
        assert_eq!((point.requests, point.errors["http_429"]), (3, 1));
        assert_eq!(point.requests_per_second, 1.0);
        assert_eq!((point.prompt_tokens_per_second, point.output_tokens_per_second), (100.0, 4.0));
        assert_eq!(point.cached_share, 0.5);
        assert_eq!(point.tokens_per_chunk, Some(8.0 / 6.0));
        // (360 - 300) / 4 and (120 - 100) / 2.
        assert_eq!(point.turns.iter().filter_map(TurnSample::tpot_ms).collect::<Vec<_>>(), [10.0, 15.0]);
        let goodput = point.goodput.expect("limits were given");
        assert_eq!((goodput.share, goodput.per_second), (1.0 / 3.0, 0.5));
        assert_eq!(point.itl_ms.map(|latency| latency.count), Some(4));
        assert!(point.turns.is_sorted_by(|a, b| a.at_s <= b.at_s));
    }

    #[test]
    fn percentiles_have_three_digits() {
        let latency = Latency::of((1..=1000).map(f64::from)).expect("values");
        assert_eq!(latency.count, 1000);
        for (found, expected) in
            [(latency.p50, 500.0), (latency.p90, 900.0), (latency.p99, 990.0), (latency.max, 1000.0)]
        {
            assert!((found / expected - 1.0f64).abs() < 0.002, "{found} for {expected}");
        }
        assert_eq!(Latency::of([]), None);
    }

    #[test]
    fn limits_are_named_numbers() {
        let slo: Slo = "ttft=200ms,e2e=5000".parse().expect("limits");
        assert_eq!(slo, Slo { ttft: Some(200.0), tpot: None, e2e: Some(5000.0) });
        for wrong in ["", "ttft", "ttft=x", "ttft=0", "itl=5", "tpot=-1"] {
            assert!(wrong.parse::<Slo>().is_err(), "{wrong}");
        }
        // A single token meets every limit per token; no token at all misses the limit on the first.
        let slo: Slo = "tpot=1,ttft=1000".parse().expect("limits");
        assert!(slo.is_met(&turn(0.0, 5.0, &[], 1)));
        assert!(!slo.is_met(&TurnSample { first_ms: None, ..turn(0.0, 5.0, &[], 0) }));
    }
}
