//! Takes one record per finished turn and uses it for the log, for `/metrics`, and for Retry-After.
//!
//! Invariant: log lines name sessions and requests, never their text.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::Request;
use parking_lot::Mutex;

use super::metrics::{FinishedTurn, Metrics};
use super::prefix::{AnsweredPrompt, PrefixWatch};
use super::spans::{RequestSpan, SpanSource};
use llmctl_engine::EngineLoad;
use llmctl_template::Conversation;

/// Retry-After before any turn has ended.
const UNKNOWN_WAIT: Duration = Duration::from_secs(2);
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(120);

/// Weight of the newest turn in the mean, which follows about the last two dozen turns.
const NEWEST_WEIGHT: f64 = 0.08;

/// Records finished turns; clones refer to the same records.
#[derive(Debug, Clone, Default)]
pub struct Observer {
    state: Arc<ObserverState>,
}

#[derive(Debug, Default)]
struct ObserverState {
    metrics: Metrics,
    rate: Mutex<TurnRate>,
    prefixes: PrefixWatch,
    spans: Option<Box<dyn SpanSource>>,
}

/// A moving mean of the time between the ends of turns while the engine is busy.
#[derive(Debug, Default)]
struct TurnRate {
    last_end: Option<Instant>,
    /// Mean seconds from one end to the next; `None` before the first.
    mean: Option<f64>,
}

impl TurnRate {
    /// Records the end of a turn that was computed for `took`.
    fn ended(&mut self, at: Instant, took: Duration) {
        // If the pause is longer than the turn took, the engine was idle in between: count the turn alone.
        let pause = self.last_end.map_or(took, |last| at.saturating_duration_since(last)).min(took);
        self.last_end = Some(at);
        let seconds = pause.as_secs_f64();
        self.mean = Some(self.mean.map_or(seconds, |mean| mean + NEWEST_WEIGHT * (seconds - mean)));
    }

    /// Estimates the time until `num_turns` more turns have ended.
    fn time_of(&self, num_turns: usize) -> Duration {
        let Some(mean) = self.mean else { return UNKNOWN_WAIT };
        let time = Duration::try_from_secs_f64(mean * num_turns as f64).unwrap_or(LONGEST_WAIT);
        time.clamp(SHORTEST_WAIT, LONGEST_WAIT)
    }
}

impl Observer {
    /// Creates an observer that has `spans` record requests too.
    pub fn new(spans: Option<Box<dyn SpanSource>>) -> Self {
        Self { state: Arc::new(ObserverState { spans, ..ObserverState::default() }) }
    }

    /// Begins the span of a request; `None` if no spans are recorded.
    pub fn begin_span(&self, request: &Request) -> Option<Box<dyn RequestSpan>> {
        self.state.spans.as_ref().map(|spans| spans.begin(request))
    }

    pub fn turn(&self, record: &FinishedTurn) {
        tracing::info!("{}", stats_line(record));
        self.state.metrics.turn(record);
        let timings = &record.outcome.timings;
        // Only started requests tell how long one takes.
        if record.started.is_some() {
            let took = timings.total.saturating_sub(timings.queue);
            self.state.rate.lock().ended(Instant::now(), took);
        }
    }

    /// Finds out what of an answered prompt broke the prefix of an earlier one: for the log, the metrics and `explain`.
    pub fn prompt(&self, prompt: AnsweredPrompt<'_>) {
        if let Some(broken) = self.state.prefixes.note(prompt) {
            tracing::info!("{}", broken.line());
            self.state.metrics.prefix_break(&broken);
        }
    }

    /// As [`PrefixWatch::agent_prompt`].
    pub fn agent_prompt(&self) -> Option<&Conversation> {
        self.state.prefixes.agent_prompt()
    }

    pub(crate) fn prefixes(&self) -> &PrefixWatch {
        &self.state.prefixes
    }

    /// Sends the last spans, for at most this long.
    ///
    /// # Errors
    /// The collector does not take them.
    pub fn finish_spans(&self, longest: Duration) -> Result<(), String> {
        self.state.spans.as_ref().map_or(Ok(()), |spans| spans.finish(longest))
    }

    pub fn metrics(&self) -> &Metrics {
        &self.state.metrics
    }

    /// Estimates when a request that is refused now would be accepted: when all waiting requests have started, at the
    /// rate at which the last turns ended.
    pub fn retry_after(&self, load: &EngineLoad) -> Duration {
        self.state.rate.lock().time_of(load.num_waiting.max(1))
    }
}

/// Returns the log line of a turn: the reference server's fields under their names, then our own.
fn stats_line(record: &FinishedTurn) -> String {
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

/// Returns `text` as one word: control characters, spaces and non-ASCII become `?`.
fn word(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_engine::{Finish, Outcome, Reuse, ReuseReason, Started, Timings, Usage};

    fn record(total_ms: u64) -> FinishedTurn {
        let reuse = Reuse { cached_tokens: 6, reason: ReuseReason::ExactPrefix, ..Reuse::default() };
        let started = Started { prompt_tokens: 10, max_tokens: 5, seed: 1, reuse, difference: None };
        let timings = Timings {
            encode: Duration::ZERO,
            queue: Duration::from_millis(50),
            prefill: Duration::from_millis(100),
            decode: Duration::from_millis(200),
            time_to_first_token: Some(Duration::from_millis(150)),
            total: Duration::from_millis(total_ms),
        };
        let usage = Usage { prompt_tokens: 10, cached_tokens: 6, completion_tokens: 5, ..Usage::default() };
        let outcome = Outcome { finish: Finish::MaxTokens, usage, timings, seed: 1, adapters: Vec::new() };
        let session = Some("a b\n".to_owned());
        FinishedTurn {
            model: "m".to_owned(),
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
        let refused = FinishedTurn { session: None, started: None, ..record(350) };
        assert!(stats_line(&refused).starts_with("llm_turn_stats session_id=<scratch> reason=not_started "));
    }

    #[test]
    fn retry_after_follows_the_queue_and_the_rate() {
        let mut rate = TurnRate::default();
        assert_eq!(rate.time_of(64), UNKNOWN_WAIT);
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let took = Duration::from_secs(4);
        rate.ended(at(0), took);
        assert_eq!(rate.time_of(3), Duration::from_secs(12), "one alone");
        // Four side by side, for a long time: one a second comes to its end, whether they end together or in turns.
        for turn in 1..200_u64 {
            rate.ended(at(turn / 4 * 4000 + 1), took);
        }
        let wait = rate.time_of(16).as_secs_f64();
        assert!((11.0..21.0).contains(&wait), "{wait}");
        for turn in 1..200_u64 {
            rate.ended(at(200_000 + turn * 1000), took);
        }
        let wait = rate.time_of(16).as_secs_f64();
        assert!((15.9..16.1).contains(&wait), "{wait}");
        // A night without requests, then short turns one after the other.
        for turn in 0..200_u64 {
            rate.ended(at(40_000_000 + turn * 50_000), Duration::from_millis(50));
        }
        let wait = rate.time_of(64).as_secs_f64();
        assert!((3.1..3.3).contains(&wait), "{wait}: nothing to do is no pace");
        assert_eq!((rate.time_of(1), rate.time_of(100_000)), (SHORTEST_WAIT, LONGEST_WAIT));
    }

    #[test]
    fn a_turn_that_never_started_says_nothing_of_the_pace() {
        let load = EngineLoad { num_waiting: 60, num_running: 1, kv_capacity: 1, ..EngineLoad::default() };
        let observer = Observer::default();
        observer.turn(&FinishedTurn { started: None, ..record(100_000) });
        assert_eq!(observer.retry_after(&load), UNKNOWN_WAIT);
        observer.turn(&record(150));
        assert_eq!(observer.retry_after(&load), Duration::from_secs(6));
    }
}
