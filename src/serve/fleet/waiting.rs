//! A request while its model is being loaded.
//!
//! Invariants: a stream that waits for long has begun, with comments that tell its reader of the load, and a
//! refusal then comes as an event in the format of its API; other requests just wait. A client that leaves
//! ends its wait, and the load continues.

use std::pin::Pin;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::header;
use axum::response::Response;
use futures_util::{Stream, StreamExt, stream};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};

use super::Fleet;
use super::leased::answered_by;
use super::table::Status;
use crate::api::body::RequestArrival;
use crate::api::sse::{LINES, SILENCE, failure, stream_response};
use crate::error::ApiError;
use crate::gate::request_id::HttpRequestId;
use crate::telemetry::ledger::Ledger;
use crate::wire::ollama::is_ollama;

/// Time that a stream's head is held back, so that an early refusal has a status of its own.
const HEAD_AFTER: Duration = Duration::from_secs(1);

/// Interval of comments while the model is being loaded.
const COMMENT_EVERY: Duration = Duration::from_secs(2);

/// Idle time after which a model is unloaded, as its last request says; `None` is that of all.
#[derive(Clone, Copy)]
pub struct RequestKeepAlive(pub Option<Duration>);

/// A request for a model that may not be loaded yet.
pub struct Waiting {
    pub fleet: Fleet,
    pub index: usize,
    pub request: Request,
    pub ledger: Option<Ledger>,
}

type Answering = Pin<Box<dyn Future<Output = Result<Response, ApiError>> + Send>>;
type Chunks = Pin<Box<dyn Stream<Item = Result<Bytes, axum::Error>> + Send>>;

impl Waiting {
    /// Waits for the model, and returns its answer.
    ///
    /// # Errors
    /// 503 if it cannot be used.
    pub async fn answered(self) -> Result<Response, ApiError> {
        let RequestArrival(begun) = RequestArrival::of(self.request.extensions());
        let lease = self.fleet.acquire(self.index, begun).await?;
        let keep_alive = self.request.extensions().get().copied();
        let answering = answered_by(lease, self.request);
        let answer = match self.ledger {
            Some(ledger) => ledger.of(answering).await,
            None => answering.await,
        };
        // The answer's body still uses the model.
        if let Some(RequestKeepAlive(time)) = keep_alive.filter(|_| answer.status().is_success()) {
            self.fleet.state.pool.keep_alive(self.index, time);
        }
        Ok(answer)
    }

    /// As [`Self::answered`], but begins the stream if the model takes long.
    ///
    /// # Errors
    /// 503 if that is known soon.
    pub async fn streamed(self) -> Result<Response, ApiError> {
        let (fleet, index) = (self.fleet.clone(), self.index);
        if fleet.status(index) == Status::Loaded {
            return self.answered().await;
        }
        let path = self.request.uri().path().to_owned();
        let request_id = self.request.extensions().get::<HttpRequestId>().map(|id| id.0.clone());
        let begun = Instant::now();
        let mut answering: Answering = Box::pin(self.answered());
        tokio::select! {
            biased;
            answer = &mut answering => return answer,
            () = sleep(HEAD_AFTER) => {}
        }
        let mut comments = interval_at(Instant::now(), COMMENT_EVERY);
        comments.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let state = LoadingStream { fleet, index, path, request_id, begun, comments };
        let is_lines = is_ollama(&state.path);
        Ok(stream_response(state.events(answering), is_lines))
    }
}

/// The state of a stream that waits.
struct LoadingStream {
    fleet: Fleet,
    index: usize,
    path: String,
    request_id: Option<String>,
    begun: Instant,
    comments: Interval,
}

/// The phases of a stream that has begun before its model was loaded.
enum StreamPhase {
    Loading(LoadingStream, Answering),
    Answer(Chunks),
}

impl LoadingStream {
    fn events(self, answering: Answering) -> impl Stream<Item = Result<Bytes, axum::Error>> + Send {
        stream::unfold(StreamPhase::Loading(self, answering), |phase| async {
            match phase {
                StreamPhase::Loading(mut waiting, mut answering) => tokio::select! {
                    biased;
                    answer = &mut answering => StreamPhase::Answer(waiting.chunks(answer)).next().await,
                    _ = waiting.comments.tick() => {
                        let comment = waiting.comment();
                        Some((Ok(comment), StreamPhase::Loading(waiting, answering)))
                    }
                },
                answer @ StreamPhase::Answer(_) => answer.next().await,
            }
        })
    }

    /// A line that clients pass over.
    fn comment(&self) -> Bytes {
        let id = &self.fleet.state.names[self.index].id;
        let seconds = self.begun.elapsed().as_secs();
        if is_ollama(&self.path) {
            return SILENCE;
        }
        Bytes::from(match self.fleet.status(self.index) {
            Status::Loading => format!(": loading {id}, {seconds} s\n\n"),
            Status::Loaded => ": keep-alive\n\n".to_owned(),
            _ => format!(": waiting for memory for {id}, {seconds} s\n\n"),
        })
    }

    /// Returns the rest of the stream: the model's, or an error as an event.
    fn chunks(self, answer: Result<Response, ApiError>) -> Chunks {
        let error = match answer {
            Ok(response) if is_stream(&response) => return Box::pin(response.into_body().into_data_stream()),
            Ok(response) => refusal(response),
            Err(error) => error,
        };
        let events = failure(&self.path, &error, self.request_id.as_deref().unwrap_or_default());
        Box::pin(stream::iter([Ok(events)]))
    }
}

impl StreamPhase {
    async fn next(self) -> Option<(Result<Bytes, axum::Error>, Self)> {
        let Self::Answer(mut chunks) = self else { return None };
        let chunk = chunks.next().await?;
        Some((chunk, Self::Answer(chunks)))
    }
}

fn is_stream(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    response.status().is_success()
        && kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream") || kind == LINES)
}

/// Returns the error of a refusal, which responses of this server carry.
fn refusal(response: Response) -> ApiError {
    let status = response.status();
    response.extensions().get::<ApiError>().cloned().unwrap_or_else(|| {
        let code = if status.is_success() { None } else { Some("invalid_request") };
        ApiError::new(status, code, format!("the request was refused with {status}"))
    })
}
