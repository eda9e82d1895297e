//! What the server says about its work: one record per turn, for the log, for `/metrics`, and for telling those who are
//! turned away when to come back.
//!
//! Invariant: what is logged names sessions and requests, never their text.

use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::metrics::Metrics;
use crate::runtime::{EngineLoad, Outcome, Started};

/// Retry-After before any turn has ended.
const UNKNOWN_WAIT: Duration = Duration::from_secs(2);
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(120);

/// Weight of the newest turn in the mean time of a turn: the last dozen or so count.
const NEWEST_WEIGHT: f64 = 0.15;

/// One finished request, as statistics see it.
#[derive(Debug, Clone)]
pub struct TurnRecord {
    /// The `x-request-id` in force.
    pub request_id: String,
    pub session: Option<String>,
    /// Which engine has answered.
    pub engine: usize,
    pub started: Option<Started>,
    pub outcome: Outcome,
    /// Times between tokens, in order; one less than there are tokens.
    pub inter_token: Vec<Duration>,
}

/// Takes records of what was done; clones are the same observer.
#[derive(Debug, Clone, Default)]
pub struct Observer {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    metrics: Metrics,
    /// Seconds that a turn takes from its start, the newer ones weighing more.
    mean_turn: Mutex<Option<f64>>,
}

impl Observer {
    pub fn turn(&self, record: &TurnRecord) {
        tracing::info!("{}", stats_line(record));
        self.shared.metrics.turn(record);
        let timings = &record.outcome.timings;
        // A request that never started says nothing about how long one takes.
        if record.started.is_some() {
            let seconds = timings.total.saturating_sub(timings.queue).as_secs_f64();
            let mut mean = self.shared.mean_turn.lock().unwrap_or_else(PoisonError::into_inner);
            *mean = Some(mean.map_or(seconds, |mean| mean + NEWEST_WEIGHT * (seconds - mean)));
        }
    }

    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// When a request that is turned away now is likely to find a place: when those that wait have started, at the pace
    /// of the last turns.
    pub fn retry_after(&self, load: &EngineLoad) -> Duration {
        let mean = *self.shared.mean_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mean) = mean else { return UNKNOWN_WAIT };
        let num_ahead = load.num_waiting.max(1) as f64;
        let seconds = mean * num_ahead / load.num_running.max(1) as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST_WAIT).clamp(SHORTEST_WAIT, LONGEST_WAIT)
    }
}

/// The reference server's line per turn, with the names of its fields, and then our own.
fn stats_line(record: &TurnRecord) -> String {
    let (usage, timings) = (&record.outcome.usage, &record.outcome.timings);
    let reason = record.started.as_ref().map_or("not_started", |started| started.reuse.reason.name());
    let prompt_tokens = record.started.as_ref().map_or(usage.prompt_tokens, |started| started.prompt_tokens);
    let (cached, completion) = (usage.cached_tokens, usage.completion_tokens);
    let prefilled = usage.prompt_tokens.saturating_sub(cached);
    let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
    let rate = |rate: Option<f64>| rate.map_or("0.0".to_owned(), |rate| format!("{rate:.1}"));
    let mut line =
        format!("llm_turn_stats session_id={}", word(record.session.as_deref().unwrap_or("<scratch>")));
    let mut add = |name: &str, value: &dyn std::fmt::Display| {
        write!(line, " {name}={value}").expect("a string takes everything");
    };
    add("reason", &reason);
    add("prompt_tokens", &prompt_tokens);
    add("reused_prompt_tokens", &cached);
    add("prefilled_prompt_tokens", &prefilled);
    add("completion_tokens", &completion);
    add("prefill_ms", &ms(timings.prefill));
    add("prefill_tok_s", &rate(timings.prefill_rate(usage)));
    add("decode_ms", &ms(timings.decode));
    add("decode_tok_s", &rate(timings.decode_rate(usage)));
    add("total_ms", &ms(timings.total));
    add("finish", &record.outcome.finish.reason());
    add("queue_ms", &ms(timings.queue));
    add("ttft_ms", &timings.time_to_first_token.map_or("-".to_owned(), ms));
    add("request_id", &word(&record.request_id));
    line
}

/// One word of a line: what would break it up, or a terminal, becomes `?`.
fn word(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{Finish, Reuse, ReuseReason, Timings, Usage};

    fn record(total_ms: u64) -> TurnRecord {
        let reuse = Reuse { cached_tokens: 6, reason: ReuseReason::ExactPrefix, ..Reuse::default() };
        let started = Started { prompt_tokens: 10, max_tokens: 5, seed: 1, reuse, difference: None };
        let timings = Timings {
            queue: Duration::from_millis(50),
            prefill: Duration::from_millis(100),
            decode: Duration::from_millis(200),
            time_to_first_token: Some(Duration::from_millis(150)),
            total: Duration::from_millis(total_ms),
        };
        let usage = Usage { prompt_tokens: 10, cached_tokens: 6, completion_tokens: 5 };
        let outcome = Outcome { finish: Finish::MaxTokens, usage, timings, seed: 1 };
        let session = Some("a b\n".to_owned());
        TurnRecord {
            request_id: "r1".to_owned(),
            session,
            engine: 0,
            started: Some(started),
            outcome,
            inter_token: vec![],
        }
    }

    #[test]
    fn the_line_has_the_references_fields_in_its_order() {
        assert_eq!(
            stats_line(&record(350)),
            "llm_turn_stats session_id=a?b? reason=exact_prefix prompt_tokens=10 reused_prompt_tokens=6 \
             prefilled_prompt_tokens=4 completion_tokens=5 prefill_ms=100.0 prefill_tok_s=40.0 decode_ms=200.0 \
             decode_tok_s=20.0 total_ms=350.0 finish=length queue_ms=50.0 ttft_ms=150.0 request_id=r1"
        );
        let refused = TurnRecord { session: None, started: None, ..record(350) };
        assert!(stats_line(&refused).starts_with("llm_turn_stats session_id=<scratch> reason=not_started "));
    }

    #[test]
    fn retry_after_follows_the_queue_and_the_pace() {
        let load = |num_waiting, num_running| EngineLoad {
            num_waiting,
            num_running,
            num_sessions: 0,
            kv_free: 0,
            kv_capacity: 1,
            kv_allocated: 0,
        };
        let observer = Observer::default();
        assert_eq!(observer.retry_after(&load(64, 4)), UNKNOWN_WAIT);
        observer.turn(&record(4_050));
        assert_eq!(observer.retry_after(&load(8, 4)), Duration::from_secs(8));
        assert_eq!(observer.retry_after(&load(8, 1)), Duration::from_secs(32));
        assert_eq!(observer.retry_after(&load(0, 4)), SHORTEST_WAIT);
        assert_eq!(observer.retry_after(&load(1_000, 1)), LONGEST_WAIT);
        (0..100).for_each(|_| observer.turn(&record(2_050)));
        let wait = observer.retry_after(&load(8, 1)).as_secs_f64();
        assert!((wait - 16.0).abs() < 0.1, "{wait}: the last turns count");
        observer.turn(&TurnRecord { started: None, ..record(100_000) });
        assert_eq!(
            observer.retry_after(&load(8, 1)).as_secs_f64(),
            wait,
            "one that never started says nothing"
        );
    }
}
