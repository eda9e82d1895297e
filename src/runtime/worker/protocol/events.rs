//! Events of a generation as reply lines, and back.
//!
//! Invariant: with `Detail::Events`, an event that is encoded and decoded again is the same, its durations to
//! the nanosecond.

use std::time::Duration;

use super::{DoneLine, ErrorLine, PrefillProgress, ReplyBody, TextLine, Yes};
use crate::request::{Event, Finish, ImageUsage, Outcome, Reuse, ReuseReason, Timings, Usage};

/// Encoder of one generation's events as reply lines.
#[derive(Debug)]
pub struct EventEncoder {
    detail: Detail,
    reason: ReuseReason,
    ids: Vec<u32>,
}

/// Level of detail that a client receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Lines of the reference server only, for calls without an id.
    Reference,
    /// Also reasons and times, for calls with an id.
    Reasons,
    /// Every event in full, so that the client can rebuild it.
    Events,
}

impl Detail {
    pub fn of(has_id: bool, events: bool) -> Self {
        match (has_id, events) {
            (_, true) => Detail::Events,
            (true, false) => Detail::Reasons,
            (false, false) => Detail::Reference,
        }
    }
}

impl EventEncoder {
    pub fn new(detail: Detail) -> Self {
        Self { detail, reason: ReuseReason::default(), ids: Vec::new() }
    }

    /// Returns the reply for an event, or `None` if this level of detail omits it.
    pub fn encode(&mut self, event: Event) -> Option<ReplyBody> {
        let tells_all = self.detail == Detail::Events;
        match event {
            Event::Queued { position } => tells_all.then_some(ReplyBody::Queued { queued: position }),
            Event::Started(started) => {
                let Reuse { reason, .. } = started.reuse;
                self.reason = reason;
                tells_all.then_some(ReplyBody::Started { started })
            }
            Event::Prefill { done, total } => {
                tells_all.then_some(ReplyBody::Progress { progress: PrefillProgress { done, total } })
            }
            Event::Encoding { done, total } => {
                tells_all.then_some(ReplyBody::Encoding { encoding: PrefillProgress { done, total } })
            }
            Event::Prompt { logprobs } => {
                tells_all.then_some(ReplyBody::Prompt { prompt_logprobs: logprobs })
            }
            Event::Text { text, tokens } if tells_all => {
                Some(ReplyBody::Token(TextLine { token: text, tokens: Some(tokens) }))
            }
            Event::Text { text, tokens } => {
                self.ids.extend(tokens.iter().map(|token| token.id));
                (!text.is_empty()).then_some(ReplyBody::Token(TextLine { token: text, tokens: None }))
            }
            Event::Done(outcome) => Some(ReplyBody::Done(Box::new(self.done(outcome)))),
            Event::Failed(error) => {
                Some(ReplyBody::Error(ErrorLine::new(&error, self.detail != Detail::Reference)))
            }
        }
    }

    fn done(&mut self, outcome: Outcome) -> DoneLine {
        let Outcome { finish, usage, timings, seed, adapters } = outcome;
        let rate = |rate: Option<f64>| rate.unwrap_or(0.0);
        let tells_ids = self.detail != Detail::Events && !matches!(finish, Finish::StopString(_));
        let tells_reasons = self.detail != Detail::Reference;
        DoneLine {
            done: Yes,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            finish_reason: match finish {
                Finish::Cancelled => "stop".to_owned(), // the reference server's name for it
                _ => finish.reason().to_owned(),
            },
            reused_prompt_tokens: usage.cached_tokens,
            prefilled_prompt_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            session_reset_reason: self.reason,
            prefill_ms: ms(timings.prefill),
            decode_ms: ms(timings.decode),
            total_ms: ms(timings.total),
            prefill_tok_s: rate(timings.prefill_rate(&usage)),
            decode_tok_s: rate(timings.decode_rate(&usage)),
            generated_token_ids: tells_ids.then(|| std::mem::take(&mut self.ids)),
            queue_ms: tells_reasons.then(|| ms(timings.queue)),
            ttft_ms: timings.time_to_first_token.filter(|_| tells_reasons).map(ms),
            seed: tells_reasons.then_some(seed),
            finish: Some(finish).filter(|_| tells_reasons),
            adapters: if self.detail == Detail::Events { adapters } else { Vec::new() },
            drafted_tokens: if self.detail == Detail::Events { usage.drafted_tokens } else { 0 },
            accepted_tokens: if self.detail == Detail::Events { usage.accepted_tokens } else { 0 },
            draft_model: usage.draft_model.filter(|_| self.detail == Detail::Events),
            looped_reasoning: usage.looped_reasoning && self.detail == Detail::Events,
            images: if self.detail == Detail::Events { usage.images } else { ImageUsage::default() },
            encode_ms: (self.detail == Detail::Events && !timings.encode.is_zero())
                .then(|| ms(timings.encode)),
        }
    }
}

impl ReplyBody {
    /// Decodes the event of a generation that was called with `events`.
    ///
    /// # Errors
    /// The reply itself if it is not an event, or an incomplete one.
    pub fn into_event(self) -> Result<Event, Box<ReplyBody>> {
        match self {
            ReplyBody::Queued { queued } => Ok(Event::Queued { position: queued }),
            ReplyBody::Started { started } => Ok(Event::Started(started)),
            ReplyBody::Progress { progress: PrefillProgress { done, total } } => {
                Ok(Event::Prefill { done, total })
            }
            ReplyBody::Encoding { encoding: PrefillProgress { done, total } } => {
                Ok(Event::Encoding { done, total })
            }
            ReplyBody::Prompt { prompt_logprobs: logprobs } => Ok(Event::Prompt { logprobs }),
            ReplyBody::Token(TextLine { token, tokens: Some(tokens) }) => {
                Ok(Event::Text { text: token, tokens })
            }
            ReplyBody::Done(done) => match done.outcome() {
                Some(outcome) => Ok(Event::Done(outcome)),
                None => Err(Box::new(ReplyBody::Done(done))),
            },
            ReplyBody::Error(line) => Ok(Event::Failed(line.into_error())),
            other => Err(Box::new(other)),
        }
    }
}

impl DoneLine {
    /// Returns the outcome, or `None` if the line omits a part of it.
    pub fn outcome(&self) -> Option<Outcome> {
        let time_to_first_token = match self.ttft_ms {
            Some(ms) => Some(duration(ms)?),
            None => None,
        };
        Some(Outcome {
            finish: self.finish.clone()?,
            usage: Usage {
                prompt_tokens: self.prompt_tokens,
                cached_tokens: self.reused_prompt_tokens,
                completion_tokens: self.completion_tokens,
                drafted_tokens: self.drafted_tokens,
                accepted_tokens: self.accepted_tokens,
                draft_model: self.draft_model,
                looped_reasoning: self.looped_reasoning,
                images: self.images,
                remote: None, // a worker computes itself
            },
            timings: Timings {
                queue: duration(self.queue_ms?)?,
                encode: duration(self.encode_ms.unwrap_or(0.0))?,
                prefill: duration(self.prefill_ms)?,
                decode: duration(self.decode_ms)?,
                time_to_first_token,
                total: duration(self.total_ms)?,
            },
            seed: self.seed?,
            adapters: self.adapters.clone(),
        })
    }
}

/// Converts to milliseconds. Exact to the nanosecond for durations up to a day; reading longer ones back may
/// be off by one.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// Converts milliseconds to a duration. `None` if `ms` is negative, not finite, or out of range.
pub(super) fn duration(ms: f64) -> Option<Duration> {
    let nanos = (ms * 1e6).round();
    // The check comes first because `as` saturates silently.
    ((0.0..1.8e19).contains(&nanos)).then(|| Duration::from_nanos(nanos as u64))
}
