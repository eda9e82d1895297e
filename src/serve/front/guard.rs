//! The layer that checks each request against the policy and reads its body within limits of size, time and
//! memory.
//!
//! Invariants: the body of a refused request is discarded unread; all bodies being read share one bounded
//! budget of memory.

use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::lifecycle::Lifecycle;
use crate::error::ApiError;
use crate::gate::owner::Owner;
use crate::gate::policy::check_origin;
use crate::net::connection::{ConnectionInfo, after};
use crate::net::uploads::{PROMPT, Slow};
use crate::page;
use crate::telemetry::ledger::Ledger;
use llmctl_models::memory::give_back;

/// Time for reading the rest of a refused body, so that the client can read the refusal.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// Freed memory is given back to the system after a body of at least this size, in bytes.
const LARGE_BODY: u64 = 256 << 10;

/// Paths that need no key, because process supervisors have none; their answers tell nothing about requests.
const OPEN_PATHS: [&str; 3] = ["/health", "/v1/health", "/ready"];

/// Paths that are answered in every stage, but need a key if there are keys.
const STAGELESS_PATHS: [&str; 2] = ["/", "/metrics"];

/// The inner layer: refuses requests that the policy does not allow, and reads the body of the others.
pub async fn guard(State(lifecycle): State<Lifecycle>, mut request: Request, next: Next) -> Response {
    match check(&lifecycle, &request) {
        Ok(owner) => {
            if let Some(ledger) = Ledger::current().filter(|_| !lifecycle.policy().keys.is_empty()) {
                ledger.key(owner.to_string());
            }
            request.extensions_mut().insert(owner);
        }
        Err(refusal) => {
            discard(request);
            return refusal.into_response();
        }
    }
    let (request, _memory) = match read_body(&lifecycle, request).await {
        Ok(read) => read,
        Err(refusal) => return refusal.into_response(),
    };
    if let Some(connection) = request.extensions().get::<ConnectionInfo>() {
        connection.has_whole_request(request.version());
    }
    let is_large = request.body().size_hint().lower() >= LARGE_BODY;
    let response = next.run(request).await;
    if is_large {
        // The body's memory is free again, but still in the allocator's arenas.
        drop(tokio::task::spawn_blocking(give_back));
    }
    response
}

/// Returns the owner of the request's key.
///
/// # Errors
/// Why the request is refused.
fn check(lifecycle: &Lifecycle, request: &Request) -> Result<Owner, ApiError> {
    let (policy, path) = (lifecycle.policy(), request.uri().path());
    if request.extensions().get::<ConnectionInfo>().is_some_and(ConnectionInfo::has_two_lengths) {
        let message =
            "the request has both Content-Length and Transfer-Encoding: where its body ends is ambiguous";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_body"), message));
    }
    // A web page cannot reach a Unix socket.
    let is_reachable = request.extensions().get::<ConnectionInfo>().is_some_and(ConnectionInfo::is_tcp);
    let is_open = policy.keys.is_empty();
    if is_reachable && (is_open || !policy.hosts.names.is_empty()) {
        policy.hosts.check(request)?;
    }
    if is_reachable && is_open {
        check_origin(policy, request)?;
    }
    let is_page = || page::is_meant(request.method(), path, request.headers());
    if OPEN_PATHS.contains(&path) || policy.page && is_page() {
        return Ok(Owner::anonymous());
    }
    let owner = policy.keys.check(request.headers())?;
    if !STAGELESS_PATHS.contains(&path) {
        lifecycle.check_stage()?;
    }
    Ok(owner)
}

/// Returns the request with its body in memory, and the permit for that memory.
///
/// # Errors
/// 413, 408, 400 if the body breaks off, 429 for too many slow bodies of this client, 503 if the memory for bodies is used up.
async fn read_body(
    lifecycle: &Lifecycle,
    request: Request,
) -> Result<(Request, Option<OwnedSemaphorePermit>), ApiError> {
    if request.body().is_end_stream() {
        return Ok((request, None));
    }
    let max_body = lifecycle.max_body();
    if usize::try_from(request.body().size_hint().lower()).map_or(true, |bytes| bytes > max_body) {
        discard(request);
        return Err(too_large(max_body));
    }
    let client = request.extensions().get::<ConnectionInfo>().and_then(ConnectionInfo::address);
    let (parts, body) = request.into_parts();
    let mut chunks = body.into_data_stream();
    let mut timer = BodyTimer::new(lifecycle, client);
    let mut bytes = Vec::new();
    let mut memory: Option<OwnedSemaphorePermit> = None;
    loop {
        let chunk = match timer.within(chunks.next()).await {
            Err(refusal) => return Err(refusal), // no part of the body is waiting to be discarded
            Ok(None) => break,
            Ok(Some(Err(error))) => {
                let message = format!("the body broke off: {error}");
                return Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_body"), message));
            }
            Ok(Some(Ok(chunk))) => chunk,
        };
        if bytes.len() + chunk.len() > max_body {
            discard_rest(chunks);
            return Err(too_large(max_body));
        }
        bytes.extend_from_slice(&chunk);
        if !lifecycle.bodies().cover(bytes.capacity(), &mut memory) {
            discard_rest(chunks);
            let message = "too many large requests arrive at once";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("overloaded"), message));
        }
    }
    Ok((Request::from_parts(parts, Body::from(bytes)), memory))
}

/// The time limits of one body: until it counts as slow, and until it is refused.
struct BodyTimer<'a> {
    lifecycle: &'a Lifecycle,
    client: Option<IpAddr>,
    deadline: Instant,
    slow_from: Instant,
    place: Option<Slow>,
}

impl<'a> BodyTimer<'a> {
    fn new(lifecycle: &'a Lifecycle, client: Option<IpAddr>) -> Self {
        let now = Instant::now();
        let deadline = after(now, lifecycle.policy().body_timeout);
        Self { lifecycle, client, deadline, slow_from: after(now, PROMPT), place: None }
    }

    /// Waits for the next part of the body.
    ///
    /// # Errors
    /// 429 if the body is slow and the client has too many slow ones; 408 after the time limit.
    async fn within<T>(&mut self, next: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut next = pin!(next);
        if self.place.is_none() && self.slow_from < self.deadline {
            if let Ok(part) = timeout_at(self.slow_from, next.as_mut()).await {
                return Ok(part);
            }
            self.place = Some(self.enter()?);
        }
        timeout_at(self.deadline, next).await.map_err(|_| {
            let message = "the body did not arrive in time";
            ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message)
        })
    }

    fn enter(&self) -> Result<Slow, ApiError> {
        self.lifecycle.uploads().enter(self.client).ok_or_else(|| {
            self.lifecycle.observer().metrics().http.slow_bodies_refused.inc();
            let most = self.lifecycle.policy().max_slow_bodies;
            let message =
                format!("{most} bodies of this address are on their way already (--max-slow-bodies)");
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("too_many_slow_bodies"), message);
            error.retry_after(PROMPT)
        })
    }
}

fn too_large(max_body: usize) -> ApiError {
    let message = format!("the body is larger than {max_body} bytes (--max-body)");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message)
}

/// Discards the body of a request that was refused by its headers.
fn discard(request: Request) {
    // A client that sends `Expect: 100-continue` has not sent its body yet.
    if !request.headers().contains_key(header::EXPECT) && !request.body().is_end_stream() {
        discard_rest(request.into_body().into_data_stream());
    }
}

/// Reads and drops the rest for a moment: closing a connection with unread data resets it, and the client loses the response.
fn discard_rest(mut chunks: BodyDataStream) {
    tokio::spawn(async move {
        let deadline = Instant::now() + DISCARD_TIME;
        while let Ok(Some(Ok(_))) = timeout_at(deadline, chunks.next()).await {}
    });
}
