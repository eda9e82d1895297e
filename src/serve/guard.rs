//! Who may ask, and how much: API keys, the Host and Origin of browsers, the size and the pace of bodies.
//!
//! Against web pages: a page may send requests to any address that its visitor can reach. Without keys, a request must
//! therefore name this server by an address that no foreign name resolves to (Host, against DNS rebinding), and must not
//! come from a foreign page (Origin, against forged requests); with keys, a page has none. Keys are compared in constant
//! time, as hashes, so that neither content nor length shows.
//!
//! Invariant: nothing of a body is kept of those who are turned away, and the bodies being read take bounded memory together.

use std::net::IpAddr;
use std::pin::pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody};
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::connection::{ConnectionInfo, after};
use super::error::ApiError;
use super::front::Front;
use super::ledger::Ledger;
use super::owner::{KeyLine, Owner};
use super::uploads::{PROMPT, Slow};
use crate::runtime::memory::give_back;

/// How long what is left of a body that was refused is still taken off the client's hands, so that it reads the refusal.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// Bodies that are read at the same time take at most so many times the largest.
const BODIES_AT_ONCE: usize = 8;

/// A body from this size on leaves memory behind that is worth giving back to the system.
const LARGE_BODY: u64 = 256 << 10;

/// Unit of the memory of bodies.
const KIBIBYTE: usize = 1024;

/// Paths that need no key, because those who watch over processes have none; they say nothing about the work.
const OPEN_PATHS: [&str; 2] = ["/health", "/ready"];

/// Paths that are answered in every stage, to who has a key where there are keys.
const STAGELESS_PATHS: [&str; 2] = ["/", "/metrics"];

/// What is asked of every request.
#[derive(Debug, Clone)]
pub struct Policy {
    pub keys: Keys,
    pub hosts: Hosts,
    /// Origins of web pages that may use this server; `*` for all.
    pub origins: Vec<String>,
    /// Bytes of a request's body.
    pub max_body: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// Bodies of one client address that are slow to arrive; 0 is no limit.
    pub max_slow_bodies: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            keys: Keys::default(),
            hosts: Hosts::default(),
            origins: Vec::new(),
            max_body: 16 << 20,
            body_timeout: Duration::from_secs(60),
            max_slow_bodies: 64,
        }
    }
}

/// The keys that are accepted, as their SHA-256, each with its owner; without any, everybody is.
#[derive(Clone, Default)]
pub struct Keys(Vec<([u8; 32], Owner)>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    pub fn new(keys: impl IntoIterator<Item = KeyLine>) -> Self {
        Self(keys.into_iter().map(|line| (Sha256::digest(line.key).into(), line.owner)).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whose the key is. Takes equally long for every key of a length.
    fn owner_of(&self, given: &str) -> Option<Owner> {
        let given: [u8; 32] = Sha256::digest(given).into();
        let mut found = u64::MAX;
        for (index, (key, _)) in (0..).zip(&self.0) {
            found.conditional_assign(&index, key.ct_eq(&given));
        }
        self.0.get(usize::try_from(found).ok()?).map(|(_, owner)| owner.clone())
    }

    /// Who asks.
    ///
    /// # Errors
    /// 401.
    fn check(&self, headers: &HeaderMap) -> Result<Owner, ApiError> {
        let refuse =
            |message: &str| Err(ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message));
        if self.is_empty() {
            return Ok(Owner::anonymous());
        }
        let given = headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap_or_default());
        let Some(given) = given else {
            return refuse("an API key is needed: Authorization: Bearer KEY");
        };
        let bearer = given.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let Some((_, key)) = bearer else {
            return refuse("the Authorization header is not of the form: Bearer KEY");
        };
        match self.owner_of(key.trim()) {
            Some(owner) => Ok(owner),
            None => refuse("this API key is not accepted"),
        }
    }
}

/// What a request may call this server.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    /// Names beside `localhost` and addresses, without a port, in lower case; `*` for all.
    pub names: Vec<String>,
}

impl Hosts {
    /// Addresses are always fine: a page's own address is its name, and it cannot make that an address of this machine.
    fn accept(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&host);
        address.parse::<IpAddr>().is_ok()
            || host == "localhost"
            || host.ends_with(".localhost")
            || self.names.iter().any(|name| name == "*" || *name == host)
    }

    /// # Errors
    /// 403; 400 without a Host where HTTP/1.1 asks for one.
    fn check(&self, request: &Request) -> Result<(), ApiError> {
        let Some(host) = authority(request) else {
            // No browser speaks HTTP/1.0.
            let is_fine = request.version() < Version::HTTP_11;
            return if is_fine {
                Ok(())
            } else {
                Err(ApiError::invalid("Host", "one Host header is needed"))
            };
        };
        let name = Authority::from_str(&host).map(|authority| authority.host().to_owned());
        match name {
            Ok(name) if self.accept(&name) => Ok(()),
            Ok(name) => {
                let message =
                    format!("this server does not answer to the name {name:?} (--allowed-host allows it)");
                Err(ApiError::new(StatusCode::FORBIDDEN, Some("host_not_allowed"), message))
            }
            Err(_) => Err(ApiError::invalid("Host", "the Host header names no host")),
        }
    }
}

/// Whom the request is for: the target's own host wins over the header (RFC 9112, 3.2.2).
fn authority(request: &Request) -> Option<String> {
    let target = request.uri().authority().map(|authority| authority.as_str().to_owned());
    target.or_else(|| {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let first = hosts.next().filter(|_| hosts.next().is_none())?;
        Some(first.to_str().ok()?.to_owned())
    })
}

/// A page may ask if it is allowed to, or was served from here.
///
/// # Errors
/// 403.
fn check_origin(policy: &Policy, request: &Request) -> Result<(), ApiError> {
    let Some(origin) = request.headers().get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let is_listed = policy.origins.iter().any(|allowed| allowed == "*" || allowed == origin);
    let is_own = || {
        let (_, site) = origin.split_once("://")?;
        Some(site.eq_ignore_ascii_case(&authority(request)?))
    };
    if is_listed || is_own() == Some(true) {
        return Ok(());
    }
    let message = "pages of this origin may not use this server (--cors-origin allows them)";
    Err(ApiError::new(StatusCode::FORBIDDEN, Some("origin_not_allowed"), message))
}

/// The inner layer: turns away who may not ask, and reads the body of who may.
pub async fn guard(State(front): State<Front>, mut request: Request, next: Next) -> Response {
    match check(&front, &request) {
        Ok(owner) => {
            if let Some(ledger) = Ledger::current().filter(|_| !front.policy().keys.is_empty()) {
                ledger.key(owner.to_string());
            }
            request.extensions_mut().insert(owner);
        }
        Err(refusal) => {
            discard(request);
            return refusal.into_response();
        }
    }
    let (request, _memory) = match read_body(&front, request).await {
        Ok(read) => read,
        Err(refusal) => return refusal.into_response(),
    };
    if let Some(connection) = request.extensions().get::<ConnectionInfo>() {
        connection.has_whole_request(request.version());
    }
    let is_large = request.body().size_hint().lower() >= LARGE_BODY;
    let response = next.run(request).await;
    if is_large {
        // What was taken for it is free again, and lies in the allocator's arenas for nobody.
        drop(tokio::task::spawn_blocking(give_back));
    }
    response
}

/// Who asks, where that is allowed.
fn check(front: &Front, request: &Request) -> Result<Owner, ApiError> {
    let (policy, path) = (front.policy(), request.uri().path());
    // A page cannot reach a socket in the file system.
    let is_reachable = request.extensions().get::<ConnectionInfo>().is_some_and(ConnectionInfo::is_tcp);
    let is_open = policy.keys.is_empty();
    if is_reachable && (is_open || !policy.hosts.names.is_empty()) {
        policy.hosts.check(request)?;
    }
    if is_reachable && is_open {
        check_origin(policy, request)?;
    }
    if OPEN_PATHS.contains(&path) {
        return Ok(Owner::anonymous());
    }
    let owner = policy.keys.check(request.headers())?;
    if !STAGELESS_PATHS.contains(&path) {
        front.check_stage()?;
    }
    Ok(owner)
}

/// The request with its body in memory; the permit stands for that memory.
///
/// # Errors
/// 413, 408, 400 when it breaks off, 429 when too many of this client's are slow, 503 when too much is being read already.
async fn read_body(
    front: &Front,
    request: Request,
) -> Result<(Request, Option<OwnedSemaphorePermit>), ApiError> {
    let policy = front.policy();
    if request.body().is_end_stream() {
        return Ok((request, None));
    }
    if usize::try_from(request.body().size_hint().lower()).map_or(true, |bytes| bytes > policy.max_body) {
        discard(request);
        return Err(too_large(policy.max_body));
    }
    let client = request.extensions().get::<ConnectionInfo>().and_then(ConnectionInfo::address);
    let (parts, body) = request.into_parts();
    let mut chunks = body.into_data_stream();
    let mut pace = Pace::new(front, client);
    let mut bytes = Vec::new();
    let mut memory: Option<OwnedSemaphorePermit> = None;
    loop {
        let chunk = match pace.within(chunks.next()).await {
            Err(refusal) => return Err(refusal), // nothing is on its way that would have to be taken off
            Ok(None) => break,
            Ok(Some(Err(error))) => {
                let message = format!("the body broke off: {error}");
                return Err(ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_body"), message));
            }
            Ok(Some(Ok(chunk))) => chunk,
        };
        if bytes.len() + chunk.len() > policy.max_body {
            discard_rest(chunks);
            return Err(too_large(policy.max_body));
        }
        bytes.extend_from_slice(&chunk);
        if !front.bodies().cover(bytes.capacity(), &mut memory) {
            discard_rest(chunks);
            let message = "too many large requests arrive at once";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("overloaded"), message));
        }
    }
    Ok((Request::from_parts(parts, Body::from(bytes)), memory))
}

/// How a body keeps up with what it has time for.
struct Pace<'a> {
    front: &'a Front,
    client: Option<IpAddr>,
    deadline: Instant,
    slow_from: Instant,
    place: Option<Slow>,
}

impl<'a> Pace<'a> {
    fn new(front: &'a Front, client: Option<IpAddr>) -> Self {
        let now = Instant::now();
        let deadline = after(now, front.policy().body_timeout);
        Self { front, client, deadline, slow_from: after(now, PROMPT), place: None }
    }

    /// Waits for the next part of it.
    ///
    /// # Errors
    /// 429 when it is slow, and too many of this client's are; 408 when its time is over.
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
        self.front.uploads().enter(self.client).ok_or_else(|| {
            self.front.observer().metrics().http.slow_bodies_refused.inc();
            let most = self.front.policy().max_slow_bodies;
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

/// Of a request that is refused by its head.
fn discard(request: Request) {
    // A client that asks first has sent nothing yet.
    if !request.headers().contains_key(header::EXPECT) && !request.body().is_end_stream() {
        discard_rest(request.into_body().into_data_stream());
    }
}

/// Reads on for a moment without keeping anything: a connection closed with data unread is reset, and the answer with it.
fn discard_rest(mut chunks: BodyDataStream) {
    tokio::spawn(async move {
        let deadline = Instant::now() + DISCARD_TIME;
        while let Ok(Some(Ok(_))) = timeout_at(deadline, chunks.next()).await {}
    });
}

/// The memory that all bodies being read share.
#[derive(Debug, Clone)]
pub struct Bodies(Arc<Semaphore>);

impl Bodies {
    pub fn new(max_body: usize) -> Self {
        let kibibytes = max_body.div_ceil(KIBIBYTE).saturating_mul(BODIES_AT_ONCE);
        Self(Arc::new(Semaphore::new(kibibytes.clamp(BODIES_AT_ONCE, Semaphore::MAX_PERMITS))))
    }

    /// Lets `memory` stand for so many bytes; false when there are not as many.
    fn cover(&self, num_bytes: usize, memory: &mut Option<OwnedSemaphorePermit>) -> bool {
        let held = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        // A body may lie in a buffer of twice its size; what counts is that it is bounded.
        let missing = num_bytes.div_ceil(2 * KIBIBYTE).saturating_sub(held);
        if missing == 0 {
            return true;
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        let Ok(more) = Arc::clone(&self.0).try_acquire_many_owned(missing) else { return false };
        match memory {
            Some(memory) => memory.merge(more),
            None => *memory = Some(more),
        }
        true
    }
}
