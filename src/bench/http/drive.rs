//! One point of a sweep: users or arrivals that send requests, and the ledger of their results.
//!
//! Bounded by a number of requests and by a time, after which no request is sent; open requests end within
//! their own timeout. An interruption drops open requests and keeps the ledger.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::arrivals;
use super::client::{LoadClient, TimedAnswer};
use super::text::{self, Ruler};
use super::trace::{Arrival, BLOCK_TOKENS};
use crate::point::{Loop, TurnSample};
use crate::stats::SplitMix64;

/// Endpoint of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

/// Requests to send.
#[derive(Debug, Clone)]
pub struct Workload {
    pub api: Api,
    pub model: String,
    /// Tokens of a conversation's first prompt, and of each answer.
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// Turns of a conversation, tokens added by each turn after the first, and the pause before it.
    pub turns: usize,
    pub turn_tokens: usize,
    pub think: Duration,
    /// Ask for answers of exactly that length; servers other than llmctl and vLLM may not know the field.
    pub ignore_eos: bool,
    pub ruler: Ruler,
    pub seed: u64,
}

impl Workload {
    pub fn path(&self) -> &'static str {
        match self.api {
            Api::Chat => "/chat/completions",
            Api::Completions => "/completions",
        }
    }

    /// Returns the request that continues a conversation of alternating questions and answers, a question
    /// last.
    pub fn body(&self, history: &[String], output_tokens: usize) -> Value {
        let mut body = json!({
            "model": self.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match self.api {
            Api::Chat => {
                let role = |index: usize| if index.is_multiple_of(2) { "user" } else { "assistant" };
                let messages = history.iter().enumerate();
                let messages = messages.map(|(index, text)| json!({"role": role(index), "content": text}));
                body["messages"] = messages.collect();
            }
            Api::Completions => body["prompt"] = history.join("\n").into(),
        }
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        body
    }
}

/// Limits of a point.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub requests: usize,
    pub duration: Option<Duration>,
}

/// State that all users of a point share.
pub struct LoadLedger {
    start: Instant,
    deadline: Option<Instant>,
    left: AtomicUsize,
    turns: Mutex<Vec<TurnSample>>,
    /// Set when an answer has no token counts.
    pub uncounted: AtomicBool,
}

impl LoadLedger {
    fn new(bounds: Bounds) -> Self {
        let start = Instant::now();
        Self {
            start,
            deadline: bounds.duration.map(|duration| start + duration),
            left: AtomicUsize::new(bounds.requests),
            turns: Mutex::default(),
            uncounted: AtomicBool::new(false),
        }
    }

    /// Returns whether one more request may be sent.
    fn claim(&self) -> bool {
        let in_time = self.deadline.is_none_or(|deadline| Instant::now() < deadline);
        let one_less = |left: usize| left.checked_sub(1);
        in_time && self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    fn enter(&self, turn: TurnSample) {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).push(turn);
    }

    pub fn num_answered(&self) -> usize {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns all finished requests, and the seconds from the start to the end of the last.
    fn close(&self) -> (Vec<TurnSample>, f64) {
        let turns = std::mem::take(&mut *self.turns.lock().unwrap_or_else(PoisonError::into_inner));
        let end = turns.iter().map(|turn| turn.at_s + turn.total_ms / 1000.0).fold(0.0, f64::max);
        (turns, end)
    }
}

/// Result of a point.
pub struct Driven {
    pub turns: Vec<TurnSample>,
    pub seconds: f64,
    /// True if tokens were counted by chunks, because the server does not count them.
    pub uncounted: bool,
    pub signal: Option<u8>,
}

/// Sends the load of `kind` until it is done or `interrupted` gives a signal. Calls `watch` with the number
/// of finished requests.
pub async fn drive(
    client: &Arc<LoadClient>,
    work: &Arc<Workload>,
    kind: Loop,
    trace: &[Arrival],
    bounds: Bounds,
    interrupted: &dyn Fn() -> Option<u8>,
    watch: &dyn Fn(usize),
) -> Driven {
    const POLL: Duration = Duration::from_millis(25);
    let ledger = Arc::new(LoadLedger::new(bounds));
    let mut everybody = JoinSet::new();
    let users = Users { client: client.clone(), work: work.clone(), ledger: ledger.clone() };
    match kind {
        Loop::Closed { concurrency } => {
            for user in 0..concurrency {
                everybody.spawn(users.clone().in_turn(user as u64, concurrency as u64));
            }
        }
        Loop::Open { rate, spacing } => {
            let times = arrivals::spaced(rate, spacing, bounds.requests, work.seed);
            let arrive = |at_s| Arrival {
                at_s,
                prompt_tokens: work.prompt_tokens,
                output_tokens: work.output_tokens,
                blocks: Vec::new(),
            };
            everybody.spawn(users.arrive(times.into_iter().map(arrive).collect()));
        }
        Loop::Trace { speed } => {
            let times = arrivals::replayed(trace, speed);
            let at = |(arrival, at_s): (&Arrival, f64)| Arrival { at_s, ..arrival.clone() };
            everybody.spawn(users.arrive(trace.iter().zip(times).map(at).collect()));
        }
    }
    let mut signal = None;
    loop {
        watch(ledger.num_answered());
        signal = signal.or_else(interrupted);
        if signal.is_some() {
            everybody.shutdown().await;
            break;
        }
        if let Ok(None) = tokio::time::timeout(POLL, everybody.join_next()).await {
            break;
        }
    }
    let (turns, seconds) = ledger.close();
    Driven { turns, seconds, uncounted: ledger.uncounted.load(Ordering::Relaxed), signal }
}

/// Senders of requests.
#[derive(Clone)]
struct Users {
    client: Arc<LoadClient>,
    work: Arc<Workload>,
    ledger: Arc<LoadLedger>,
}

impl Users {
    /// Runs one conversation after the other. `step` is the number of users, so that no two use the same
    /// words.
    async fn in_turn(self, user: u64, step: u64) {
        let mut conversation = user;
        loop {
            let started = self.ledger.start.elapsed().as_secs_f64();
            let first = Arrival {
                at_s: started,
                prompt_tokens: self.work.prompt_tokens,
                output_tokens: self.work.output_tokens,
                blocks: Vec::new(),
            };
            if !self.converse(conversation, first).await {
                return;
            }
            conversation += step;
        }
    }

    /// Starts conversations at their planned times, independent of earlier ones.
    async fn arrive(self, arrivals: Vec<Arrival>) {
        let mut conversations = JoinSet::new();
        for (index, arrival) in arrivals.into_iter().enumerate() {
            let due = self.ledger.start + Duration::from_secs_f64(arrival.at_s);
            let is_late = self.ledger.deadline.is_some_and(|deadline| due >= deadline);
            if is_late {
                break;
            }
            tokio::time::sleep_until(due.into()).await;
            let users = self.clone();
            conversations.spawn(async move { users.converse(index as u64, arrival).await });
        }
        while conversations.join_next().await.is_some() {}
    }

    /// Runs a conversation to its last turn. Returns false when no more requests may be sent.
    async fn converse(&self, number: u64, first: Arrival) -> bool {
        let work = &self.work;
        let mut random =
            SplitMix64::new(work.seed ^ number.wrapping_add(1).wrapping_mul(0xd134_2543_de82_ef95));
        let mut history: Vec<String> = Vec::new();
        let mut at_s = first.at_s;
        for turn in 1..=work.turns {
            if !self.ledger.claim() {
                return false;
            }
            history.push(match turn {
                1 if !first.blocks.is_empty() => {
                    text::blocks(&first.blocks, BLOCK_TOKENS, first.prompt_tokens, &work.ruler, work.seed)
                }
                1 => text::words(work.ruler.words(first.prompt_tokens), &mut random),
                _ => text::words(work.ruler.words(work.turn_tokens), &mut random),
            });
            let Some(answer) = self.ask(&history, first.output_tokens, turn, at_s).await else { return true };
            history.push(answer);
            if turn < work.turns {
                tokio::time::sleep(work.think).await;
                at_s = self.ledger.start.elapsed().as_secs_f64();
            }
        }
        true
    }

    /// Sends a request that was due at `at_s` and records it. Returns the answer's text, if it succeeded.
    async fn ask(&self, history: &[String], output_tokens: usize, turn: usize, at_s: f64) -> Option<String> {
        let body = self.work.body(history, output_tokens);
        let late = self.ledger.start.elapsed().saturating_sub(Duration::from_secs_f64(at_s));
        let late_ms = milliseconds(late);
        let sent = Instant::now();
        let entry = TurnSample { at_s, late_ms, turn, ..TurnSample::default() };
        match self.client.complete(self.work.path(), &body).await {
            Ok(answer) => {
                if answer.usage.is_none() {
                    self.ledger.uncounted.store(true, Ordering::Relaxed);
                }
                self.ledger.enter(answered(entry, &answer));
                Some(answer.text)
            }
            Err(trouble) => {
                tracing::info!("a request failed: {trouble}");
                let total_ms = late_ms + milliseconds(sent.elapsed());
                self.ledger.enter(TurnSample { total_ms, error: Some(trouble.kind()), ..entry });
                None
            }
        }
    }
}

/// Adds the answer to a request's entry. Without the server's count, each chunk counts as a token.
fn answered(entry: TurnSample, answer: &TimedAnswer) -> TurnSample {
    let usage = answer.usage.unwrap_or_default();
    let gaps = answer.chunks.windows(2).map(|pair| milliseconds(pair[1] - pair[0]));
    TurnSample {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        output_tokens: if answer.usage.is_some() { usage.completion_tokens } else { answer.chunks.len() },
        first_ms: answer.chunks.first().map(|first| entry.late_ms + milliseconds(*first)),
        total_ms: entry.late_ms + milliseconds(answer.end),
        gaps_ms: gaps.collect(),
        ..entry
    }
}

/// Returns milliseconds rounded to thousandths.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::super::sse::ChunkUsage;
    use super::*;

    fn work(api: Api) -> Workload {
        Workload {
            api,
            model: "m".to_owned(),
            prompt_tokens: 8,
            output_tokens: 4,
            turns: 2,
            turn_tokens: 2,
            think: Duration::ZERO,
            ignore_eos: false,
            ruler: Ruler::default(),
            seed: 1,
        }
    }

    #[test]
    fn requests_of_both_kinds() {
        let history = ["a", "b", "c"].map(str::to_owned);
        let body = work(Api::Chat).body(&history, 4);
        assert_eq!(body["messages"][1], json!({"role": "assistant", "content": "b"}));
        assert_eq!((&body["max_tokens"], &body["stream"]), (&4.into(), &true.into()));
        assert!(body.get("ignore_eos").is_none());
        let body = Workload { ignore_eos: true, ..work(Api::Completions) }.body(&history, 4);
        assert_eq!((&body["prompt"], &body["ignore_eos"]), (&"a\nb\nc".into(), &true.into()));
    }

    #[test]
    fn latency_counts_from_when_a_request_was_due() {
        let ms = Duration::from_millis;
        let usage = ChunkUsage { prompt_tokens: 9, completion_tokens: 6, cached_tokens: 3 };
        let answer = TimedAnswer {
            chunks: vec![ms(100), ms(120), ms(160)],
            end: ms(165),
            usage: Some(usage),
            ..TimedAnswer::default()
        };
        let entry = TurnSample { at_s: 1.0, late_ms: 50.0, turn: 1, ..TurnSample::default() };
        let turn = answered(entry.clone(), &answer);
        assert_eq!((turn.first_ms, turn.total_ms), (Some(150.0), 215.0));
        assert_eq!((turn.gaps_ms.as_slice(), turn.output_tokens), (&[20.0, 40.0][..], 6));
        let uncounted = answered(entry, &TimedAnswer { usage: None, ..answer });
        assert_eq!((uncounted.output_tokens, uncounted.prompt_tokens), (3, 0));
    }

    #[test]
    fn a_ledger_is_bounded_by_number_and_by_time() {
        let ledger = LoadLedger::new(Bounds { requests: 2, duration: None });
        assert_eq!([ledger.claim(), ledger.claim(), ledger.claim()], [true, true, false]);
        let late = LoadLedger::new(Bounds { requests: 2, duration: Some(Duration::ZERO) });
        assert!(!late.claim());
    }
}
