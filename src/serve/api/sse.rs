//! An answer in a wire format, whole or as server-sent events: `data:` lines with JSON, and comments or
//! the API's own events in a silent stream. Ollama's streams are lines of JSON.
//!
//! Invariants: every event leaves whole; after an error event comes nothing but `[DONE]`, in APIs that
//! have it; dropping the body drops the answer, which cancels it. Comments keep proxies and clients from
//! giving up, and tell people how far a prompt is.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::{BoxError, Json};
use futures_util::{Stream, stream};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use super::collect::{self, Collected};
use super::drive;
use super::generate::{FinishedChoice, GenerateRequest, Progress, Running, Totals, Update};
use super::reply::{AnswerHeaders, RunningUsage};
use crate::App;
use crate::error::ApiError;
use crate::wire::anthropic::error as anthropic;
use crate::wire::ollama::{self, is_ollama};
use llmctl_engine::turn::Delta;
use llmctl_engine::{Logprob, Token};

/// Interval of keep-alive comments in a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

const DONE: &[u8] = b"data: [DONE]\n\n";

/// Type of a stream of lines with an object each.
pub const LINES: &str = "application/x-ndjson";

/// Keeps a silent stream of lines alive: white space before the next object.
pub const SILENCE: Bytes = Bytes::from_static(b" ");

/// Writes the answers of one API. Each call but the first returns the objects of a stream to send.
pub trait WireFormat: Send + 'static {
    /// Events have an `event:` line with the member `type` of their object.
    const NAMES_EVENTS: bool = false;

    /// `data: [DONE]` is the last line.
    const ENDS_WITH_DONE: bool = true;

    /// The stream is no stream of events: each object is a line, as in Ollama's API.
    const IS_LINES: bool = false;

    /// A stream whose prompt is too long begins and fails, instead of being refused.
    const BEGINS_TOO_LONG: bool = false;

    /// Returns a whole answer.
    ///
    /// # Errors
    /// For what only a bug can cause.
    fn whole(self, collected: &Collected) -> Result<Value, ApiError>;

    fn opening(&mut self) -> Vec<Value> {
        Vec::new()
    }

    /// Returns the counts that chunks tell, which follow the answer before its deltas do.
    fn usage(&mut self) -> Option<&mut RunningUsage> {
        None
    }

    /// More of a choice, and the tokens of its content. Called for every token, also those that say
    /// nothing yet.
    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value>;

    /// Encodes log-probabilities of more tokens of a choice's prompt; precedes the choice's text.
    fn scored(&mut self, _choice: usize, _logprobs: Vec<Logprob>) {}

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value>;

    fn ending(&mut self, _totals: &Totals) -> Vec<Value> {
        Vec::new()
    }

    /// Ends a stream that has begun and cannot be completed.
    fn failed(&mut self, error: &ApiError) -> Vec<Value> {
        vec![if Self::IS_LINES { ollama::error_body(error) } else { error.body() }]
    }

    /// Returns the API's own event for a silent stream; a comment is sent where it has none.
    fn keep_alive(&mut self) -> Option<Value> {
        None
    }
}

/// Runs a request and waits for its answer, or begins the answer's stream, in the format that `begin` makes when the request is
/// admitted.
///
/// # Errors
/// Why there is no answer.
pub async fn answer<F: WireFormat>(
    app: &App,
    mut request: GenerateRequest,
    begin: impl FnOnce(&mut Running) -> F,
) -> Result<Response, ApiError> {
    let is_streamed = request.turn.is_streamed;
    let mut headers = AnswerHeaders::new(app, &mut request);
    let mut running = match drive::begin(app, request).await {
        Err(error) if F::BEGINS_TOO_LONG && is_streamed && error.code == Some("context_length_exceeded") => {
            Running::failed(error)
        }
        begun => begun?,
    };
    headers.learn(&running);
    let format = begin(&mut running);
    let response = match is_streamed {
        true => response(running, format),
        false => {
            let collected = collect::all(running).await?;
            headers.learn_end(&collected);
            Json(format.whole(&collected)?).into_response()
        }
    };
    Ok(headers.on(response))
}

/// The response that streams `running`.
fn response<C: WireFormat>(running: Running, chunks: C) -> Response {
    let mut silence = interval_at(Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
    silence.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut feed = EventFeed {
        updates: running.updates,
        chunks,
        silence,
        progress: None,
        ready: VecDeque::new(),
        is_over: false,
    };
    let opening = feed.chunks.opening();
    feed.push(opening);
    let events = stream::unfold(feed, |mut feed| async {
        let bytes = feed.next().await?;
        Some((Ok::<_, Infallible>(bytes), feed))
    });
    stream_response(events, C::IS_LINES)
}

/// The response whose body is a stream of events, or of lines with an object each.
pub fn stream_response<E: Into<BoxError> + 'static>(
    events: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
    is_lines: bool,
) -> Response {
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    let kind = if is_lines { LINES } else { "text/event-stream; charset=utf-8" };
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would gather events into its buffers.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct EventFeed<C> {
    updates: UnboundedReceiver<Update>,
    chunks: C,
    silence: Interval,
    progress: Option<Progress>,
    ready: VecDeque<Bytes>,
    is_over: bool,
}

impl<C: WireFormat> EventFeed<C> {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                self.silence.reset();
                return Some(bytes);
            }
            if self.is_over {
                return None;
            }
            tokio::select! {
                biased;
                update = self.updates.recv() => self.take(update),
                _ = self.silence.tick() => return Some(self.keep_alive()),
            }
        }
    }

    fn take(&mut self, update: Option<Update>) {
        let objects = match update {
            Some(Update::Progress(progress)) => {
                self.progress = Some(progress);
                if let (Progress::Prompt { total, .. }, Some(usage)) = (progress, self.chunks.usage()) {
                    usage.prompt(total);
                }
                return;
            }
            Some(Update::Restarted) => return, // nothing has been said
            Some(Update::Scored { choice, logprobs }) => {
                self.chunks.scored(choice, logprobs);
                return;
            }
            Some(Update::Deltas { choice, deltas, num_tokens, content }) => {
                self.progress = None;
                if let Some(usage) = self.chunks.usage() {
                    usage.count(num_tokens);
                }
                self.chunks.deltas(choice, deltas, content)
            }
            Some(Update::Finished { choice, finished }) => self.chunks.finished(choice, &finished),
            Some(Update::Ended(totals)) => return self.end(|chunks| chunks.ending(&totals)),
            Some(Update::Failed(error)) => return self.end(|chunks| chunks.failed(&error)),
            // A bug: the task that answers has ended without a last update. The client must not wait for one.
            None => {
                let error = ApiError::internal("the answer ended early");
                return self.end(|chunks| chunks.failed(&error));
            }
        };
        self.push(objects);
    }

    fn end(&mut self, last: impl FnOnce(&mut C) -> Vec<Value>) {
        let objects = last(&mut self.chunks);
        self.push(objects);
        if C::ENDS_WITH_DONE && !C::IS_LINES {
            self.ready.push_back(Bytes::from_static(DONE));
        }
        self.is_over = true;
    }

    fn push(&mut self, objects: Vec<Value>) {
        self.ready.extend(objects.iter().map(event::<C>));
    }

    fn keep_alive(&mut self) -> Bytes {
        match self.chunks.keep_alive() {
            Some(object) => event::<C>(&object),
            None if C::IS_LINES => SILENCE,
            None => comment(self.progress),
        }
    }
}

fn event<C: WireFormat>(object: &Value) -> Bytes {
    if C::IS_LINES { line(object) } else { event_bytes(object, C::NAMES_EVENTS) }
}

/// Returns an object as a line.
pub fn line(object: &Value) -> Bytes {
    Bytes::from(format!("{object}\n"))
}

fn event_bytes(object: &Value, is_named: bool) -> Bytes {
    let name = object["type"].as_str().filter(|_| is_named);
    let line = name.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{line}data: {object}\n\n"))
}

/// Returns the end of a stream that has begun before anything was known of its answer, in the form of the
/// path's API.
pub fn failure(path: &str, error: &ApiError, request_id: &str) -> Bytes {
    match path {
        "/v1/messages" => event_bytes(&anthropic::body(error, request_id), true),
        "/v1/responses" => {
            let (code, message, param) = (error.code, &error.message, &error.param);
            let event = json!({
                "type": "error", "code": code, "message": message, "param": param, "sequence_number": 0,
            });
            event_bytes(&event, true)
        }
        "/infill" | "/completion" => event_bytes(&error.body(), false),
        _ if is_ollama(path) => line(&ollama::error_body(error)),
        _ => [&event_bytes(&error.body(), false)[..], DONE].concat().into(),
    }
}

/// A line that clients pass over.
fn comment(progress: Option<Progress>) -> Bytes {
    let text = match progress {
        None => "keep-alive".to_owned(),
        Some(Progress::Session) => "waiting: the session is busy with another request".to_owned(),
        Some(Progress::Waiting { position }) => format!("waiting: {position} in the queue"),
        Some(Progress::Images { done, total }) => {
            format!("images: {} % looked at", (100 * done).checked_div(total).unwrap_or(0))
        }
        Some(Progress::Prompt { done, total, left: None }) => format!("prompt: {done} of {total} tokens"),
        Some(Progress::Prompt { done, total, left: Some(left) }) => {
            format!("prompt: {done} of {total} tokens, about {:.0} s left", left.as_secs_f64().ceil())
        }
    };
    Bytes::from(format!(": {text}\n\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_early_failure_has_the_form_of_its_api() {
        let error = ApiError::invalid("n", "no");
        let text = |path| String::from_utf8(failure(path, &error, "r").to_vec()).expect("text");
        let chat = text("/v1/chat/completions");
        assert!(chat.starts_with("data: {\"error\":") && chat.ends_with("\n\ndata: [DONE]\n\n"), "{chat}");
        assert!(text("/v1/messages").starts_with("event: error\ndata: {"));
        assert!(text("/v1/responses").contains("\"type\":\"error\""));
        assert!(!text("/infill").contains("DONE") && !text("/completion").contains("DONE"));
        assert_eq!(text("/api/chat"), "{\"error\":\"no\",\"code\":\"invalid_value\",\"param\":\"n\"}\n");
    }

    #[test]
    fn comments_say_how_far_it_is() {
        let check = |progress, expected: &str| assert_eq!(comment(progress), format!(": {expected}\n\n"));
        check(None, "keep-alive");
        check(Some(Progress::Session), "waiting: the session is busy with another request");
        check(Some(Progress::Waiting { position: 3 }), "waiting: 3 in the queue");
        check(Some(Progress::Images { done: 1, total: 4 }), "images: 25 % looked at");
        check(Some(Progress::Prompt { done: 0, total: 9, left: None }), "prompt: 0 of 9 tokens");
        let left = Some(Duration::from_millis(1200));
        check(Some(Progress::Prompt { done: 4, total: 9, left }), "prompt: 4 of 9 tokens, about 2 s left");
    }
}
