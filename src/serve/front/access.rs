//! The outermost layer: request id, access log, counters, and the error envelope of the API, also after a
//! panic.
//!
//! Invariants: each request has exactly one log line and one count, made when its response has been sent or
//! given up (`ledger` holds the line back until the engine has finished, too); lost log lines are counted.
//! The path is logged without its query.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, SizeHint};
use serde_json::{Map, Value, json};

use super::lifecycle::Lifecycle;
use crate::api;
use crate::error::ApiError;
use crate::gate::request_id::{HttpRequestId, REQUEST_ID, X_REQUEST_ID};
use crate::net::connection::{Busy, ConnectionInfo};
use crate::telemetry::ledger::Ledger;
use crate::telemetry::metrics::HttpLabels;
use crate::telemetry::observe::Observer;
use crate::telemetry::spans::route_of;
use crate::wire::{anthropic, ollama};
use llmctl_template::DateTime;

/// Longer paths and user agents are cut in the log, in bytes.
const MAX_LOGGED: usize = 512;
/// Longer error messages of axum are cut, in bytes.
const MAX_MESSAGE: usize = 4096;
/// Logged as the status if the client left before its response began (nginx's number).
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// The outermost layer.
pub async fn observe(State(lifecycle): State<Lifecycle>, mut request: Request, next: Next) -> Response {
    let id = HttpRequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let observer = lifecycle.observer().clone();
    let span = observer.begin_span(&request);
    let user_agent = request.headers().get(header::USER_AGENT).and_then(|value| value.to_str().ok());
    let user_agent = user_agent.map(|agent| cut(agent).to_owned());
    let ledger = Ledger::new(lifecycle.access_log().cloned(), observer, span, user_agent);
    let mut entry = TrackedRequest::new(&lifecycle, &request, &id, ledger.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let is_anthropic = anthropic::is_anthropic(&path, request.headers());
    let is_ollama = ollama::is_ollama(&path);
    let response = match catch_panic(ledger.of(next.run(request))).await {
        Ok(response) => response,
        Err(panic) => {
            lifecycle.observer().metrics().http.panics.inc();
            tracing::error!("request {}: a bug of the server: {}", id.0, llmctl_base::panic_text(&*panic));
            let message = "the server met a bug while answering this request";
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error"), message).into_response()
        }
    };
    let mut response = in_envelope(response, &method, &path).await;
    if is_ollama {
        response = with_error(response, ollama::error_body);
    } else if is_anthropic {
        response = in_anthropic_form(response, &id);
    }
    add_headers(&lifecycle, &id, &mut response);
    entry.status = response.status().as_u16();
    let is_head = method == Method::HEAD;
    response.map(|inner| Body::new(TrackedBody { inner, entry, has_ended: is_head }))
}

fn add_headers(lifecycle: &Lifecycle, id: &HttpRequestId, response: &mut Response) {
    let status = response.status();
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id.0) {
        headers.insert(X_REQUEST_ID, id);
    }
    let says_later = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    if says_later && !headers.contains_key(header::RETRY_AFTER) {
        let seconds = lifecycle.retry_after().as_secs_f64().ceil().max(1.0) as u64;
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
}

/// Puts error responses of the router and of extractors into OpenAI's envelope; returns others unchanged.
async fn in_envelope(response: Response, method: &Method, path: &str) -> Response {
    let status = response.status();
    let content_type = response.headers().get(header::CONTENT_TYPE);
    let is_json = content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if is_json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let (parts, body) = response.into_parts();
    let text = to_bytes(body, MAX_MESSAGE).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let (code, message) = match status {
        StatusCode::NOT_FOUND => ("unknown_url", nothing_there(method, path)),
        StatusCode::METHOD_NOT_ALLOWED => {
            ("method_not_supported", format!("{method} is not possible at {}", cut(path)))
        }
        StatusCode::PAYLOAD_TOO_LARGE => ("request_too_large", text.into_owned()),
        StatusCode::UNSUPPORTED_MEDIA_TYPE => ("unsupported_media_type", text.into_owned()),
        _ if text.is_empty() => ("error", status.to_string()),
        _ => ("invalid_request", text.into_owned()),
    };
    let mut enveloped = ApiError::new(status, Some(code), message).into_response();
    let kept = parts.headers.into_iter().filter_map(|(name, value)| Some((name?, value)));
    let is_of_body = |name: &HeaderName| *name == header::CONTENT_TYPE || *name == header::CONTENT_LENGTH;
    enveloped.headers_mut().extend(kept.filter(|(name, _)| !is_of_body(name)));
    enveloped
}

/// Writes the error of a response, if it is one, in another API's envelope.
fn with_error(mut response: Response, write: impl FnOnce(&ApiError) -> Value) -> Response {
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let body = write(&error).to_string();
        *response.status_mut() = error.plain_status();
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        *response.body_mut() = Body::from(body);
    }
    response
}

/// Adds Anthropic's header to a response, and writes an error in its envelope.
fn in_anthropic_form(response: Response, id: &HttpRequestId) -> Response {
    let mut response = with_error(response, |error| anthropic::error::body(error, &id.0));
    if let Ok(id) = HeaderValue::from_str(&id.0) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn nothing_there(method: &Method, path: &str) -> String {
    let nothing = format!("there is nothing at {method} {}", cut(path));
    match api::meant(method.as_str(), cut(path)) {
        Some(meant) => format!("{nothing}, but at {meant}: the base URL of OpenAI's interface ends with /v1"),
        None => format!("{nothing}; GET / lists what is here"),
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_LOGGED)]
}

/// Returns a panic as an error. Unwind safety: the future is not polled again, and shared state recovers from poisoned locks.
async fn catch_panic<F: Future>(future: F) -> Result<F::Output, Box<dyn Any + Send>> {
    let mut future = pin!(future);
    poll_fn(move |cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// One request; dropping it logs and counts it.
struct TrackedRequest {
    observer: Observer,
    ledger: Ledger,
    /// Marks the connection as busy while the request lasts.
    _busy: Option<Busy>,
    start: Instant,
    id: HttpRequestId,
    peer: String,
    method: Method,
    route: String,
    path: String,
    status: u16,
    num_bytes: u64,
    is_complete: bool,
}

impl TrackedRequest {
    fn new(lifecycle: &Lifecycle, request: &Request, id: &HttpRequestId, ledger: Ledger) -> Self {
        let connection = request.extensions().get::<ConnectionInfo>();
        let observer = lifecycle.observer().clone();
        observer.metrics().http.in_flight.inc();
        Self {
            observer,
            ledger,
            _busy: connection.map(ConnectionInfo::begin_request),
            start: Instant::now(),
            id: id.clone(),
            peer: connection.map_or_else(|| "-".to_owned(), ToString::to_string),
            method: request.method().clone(),
            route: route_of(request).unwrap_or("none").to_owned(),
            path: cut(request.uri().path()).to_owned(),
            status: CLIENT_CLOSED_REQUEST,
            num_bytes: 0,
            is_complete: false,
        }
    }

    fn line(&self) -> Map<String, Value> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(since_1970.as_secs()).unwrap_or_default();
        let date = DateTime::from_unix(seconds).strftime("%FT%T");
        let members = [
            ("time", json!(format!("{date}.{:03}Z", since_1970.subsec_millis()))),
            ("request_id", json!(self.id.0)),
            ("peer", json!(self.peer)),
            ("method", json!(self.method.as_str())),
            ("path", json!(self.path)),
            ("status", json!(self.status)),
            ("bytes", json!(self.num_bytes)),
            ("ms", json!(self.ms())),
            ("complete", json!(self.is_complete)),
            ("user_agent", json!(self.ledger.user_agent())),
        ];
        members.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    fn ms(&self) -> f64 {
        (self.start.elapsed().as_secs_f64() * 1e4).round() / 10.0
    }
}

impl Drop for TrackedRequest {
    fn drop(&mut self) {
        let http = &self.observer.metrics().http;
        http.in_flight.dec();
        // Clients may send any method; unknown ones share a label, to bound the number of labels.
        let is_known = |method: &Method| {
            [Method::GET, Method::POST, Method::DELETE, Method::HEAD, Method::OPTIONS, Method::PUT]
                .contains(method)
        };
        let method = if is_known(&self.method) { self.method.as_str() } else { "other" };
        let route = std::mem::take(&mut self.route);
        let labels = HttpLabels { method: method.to_owned(), route, status: self.status };
        http.requests.get_or_create(&labels).inc();
        let (method, path, id) = (&self.method, &self.path, &self.id.0);
        let how = if self.is_complete { "" } else { ", broken off" };
        tracing::info!("{method} {path}: {} in {} ms{how}, {}, {id}", self.status, self.ms(), self.peer);
        self.ledger.answered(self.line());
    }
}

/// A response body that counts its bytes and catches panics while it is streamed.
struct TrackedBody {
    inner: Body,
    entry: TrackedRequest,
    has_ended: bool,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut this.inner).poll_frame(cx)));
        let polled = polled.unwrap_or_else(|panic| {
            this.entry.observer.metrics().http.panics.inc();
            let message = llmctl_base::panic_text(&*panic);
            tracing::error!("request {}: a bug while streaming: {message}", this.entry.id.0);
            this.inner = Body::empty();
            Poll::Ready(Some(Err(axum::Error::new(std::io::Error::other("the response broke off")))))
        });
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                this.entry.num_bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
            }
            Poll::Ready(None) => this.has_ended = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.entry.is_complete = self.has_ended || self.inner.is_end_stream();
    }
}
