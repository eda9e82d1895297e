//! Spans of requests, as a tracer receives them. `traces` (cargo feature `otel`) sends them to a collector;
//! without a collector none is recorded.
//!
//! Invariant: a span has counts, times and names, never the text of a prompt or an answer.

use std::fmt::Debug;
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use serde_json::{Map, Value};

use super::metrics::FinishedTurn;

/// A tracer of requests.
pub trait SpanSource: Debug + Send + Sync {
    /// Begins the span of a request: a child of the span that its `traceparent` names, or the root of a new trace.
    fn begin(&self, request: &Request) -> Box<dyn RequestSpan>;

    /// Sends what is left, for at most this long.
    ///
    /// # Errors
    /// The collector does not take it.
    fn finish(&self, longest: Duration) -> Result<(), String>;
}

/// The span of one request, ended when it is dropped.
pub trait RequestSpan: Send + Sync {
    /// Records an answer that has just ended, as a child of the request.
    fn turn(&self, record: &FinishedTurn);

    /// Records the line of the access log.
    fn end(&mut self, line: &Map<String, Value>);
}

/// Returns the pattern of the endpoint that a request is for; `None` where there is none.
pub fn route_of(request: &Request) -> Option<&str> {
    request.extensions().get::<MatchedPath>().map(MatchedPath::as_str)
}
