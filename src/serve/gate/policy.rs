//! The rules for requests: API keys, the Host and Origin of browsers, and the memory that bodies may take.
//!
//! Against web pages: a page may send requests to any address that its visitor can reach. Without keys, a
//! request must therefore name this server by an address that no foreign name resolves to (Host, against DNS
//! rebinding), and must not come from a foreign page (Origin, against forged requests); with keys, a page has
//! none. Keys are compared in constant time, as hashes, so that neither content nor length shows.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, Version, header};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::owner::{KeyLine, Owner};
use crate::error::ApiError;

/// The bodies being read take at most this many times the largest body.
const BODIES_AT_ONCE: usize = 8;

/// Anthropic's header for a key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Bytes for one permit of [`Bodies`].
const KIBIBYTE: usize = 1024;

/// The rules that every request is checked against.
#[derive(Debug, Clone)]
pub struct Policy {
    pub keys: ApiKeys,
    pub hosts: Hosts,
    /// Origins of web pages that may use this server; `*` allows all.
    pub origins: Vec<String>,
    /// Largest request body, in bytes, and that where a model reads images.
    pub max_body: usize,
    pub max_body_with_images: usize,
    /// Time limit for a body to arrive.
    pub body_timeout: Duration,
    /// Most slow bodies of one client address at a time; 0 is no limit.
    pub max_slow_bodies: usize,
    /// Browsers get the page, without a key: it asks for one.
    pub page: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            keys: ApiKeys::default(),
            hosts: Hosts::default(),
            origins: Vec::new(),
            max_body: 16 << 20,
            max_body_with_images: 64 << 20,
            body_timeout: Duration::from_secs(60),
            max_slow_bodies: 64,
            page: true,
        }
    }
}

/// The accepted keys as SHA-256 hashes, each with its owner; if empty, every request is accepted.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<([u8; 32], Owner)>);

impl std::fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

impl ApiKeys {
    pub fn new(keys: impl IntoIterator<Item = KeyLine>) -> Self {
        Self(keys.into_iter().map(|line| (Sha256::digest(line.key).into(), line.owner)).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the owner of the key. Takes the same time for all keys of one length.
    fn owner_of(&self, given: &str) -> Option<Owner> {
        let given: [u8; 32] = Sha256::digest(given).into();
        let mut found = u64::MAX;
        for (index, (key, _)) in (0..).zip(&self.0) {
            found.conditional_assign(&index, key.ct_eq(&given));
        }
        self.0.get(usize::try_from(found).ok()?).map(|(_, owner)| owner.clone())
    }

    /// Returns the owner of the request's key; the anonymous owner if there are no keys.
    ///
    /// # Errors
    /// 401.
    pub fn check(&self, headers: &HeaderMap) -> Result<Owner, ApiError> {
        let refuse =
            |message: &str| Err(ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message));
        if self.is_empty() {
            return Ok(Owner::anonymous());
        }
        let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let (api_key, given) = (text(&X_API_KEY), text(&header::AUTHORIZATION));
        // Agents may send both, one of them for another server.
        if let Some(owner) = api_key.and_then(|key| self.owner_of(key.trim())) {
            return Ok(owner);
        }
        let Some(given) = given else {
            return refuse(match api_key {
                Some(_) => "this API key is not accepted",
                None => "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            });
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

/// The names that requests may call this server by.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    /// Allowed names beside `localhost` and addresses, without a port, in lower case; `*` allows all.
    pub names: Vec<String>,
}

impl Hosts {
    /// Accepts every address: DNS rebinding needs a name, because a page cannot make its address one of this machine.
    fn accept(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&host);
        address.parse::<IpAddr>().is_ok()
            || host == "localhost"
            || host.ends_with(".localhost")
            || self.names.iter().any(|name| name == "*" || *name == host)
    }

    /// Checks the host that the request names.
    ///
    /// # Errors
    /// 403; 400 if an HTTP/1.1 request has no Host.
    pub fn check(&self, request: &Request) -> Result<(), ApiError> {
        let Some(host) = authority(request.uri(), request.headers()) else {
            // No browser uses HTTP/1.0, so DNS rebinding cannot send such a request.
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

/// Returns the host that the request names: that of its target, else the Host header (RFC 9112, 3.2.2).
fn authority(uri: &Uri, headers: &HeaderMap) -> Option<String> {
    let target = uri.authority().map(|authority| authority.as_str().to_owned());
    target.or_else(|| {
        let mut hosts = headers.get_all(header::HOST).iter();
        let first = hosts.next().filter(|_| hosts.next().is_none())?;
        Some(first.to_str().ok()?.to_owned())
    })
}

/// Checks that the request comes from no web page, from an allowed one, or from one of this server's own.
///
/// # Errors
/// 403.
pub fn check_origin(policy: &Policy, request: &Request) -> Result<(), ApiError> {
    let Some(origin) = request.headers().get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let is_listed = policy.origins.iter().any(|allowed| allowed == "*" || allowed == origin);
    if is_listed || is_own(origin, request.uri(), request.headers()) {
        return Ok(());
    }
    Err(origin_refused("pages of this origin may not use this server (--cors-origin allows them)"))
}

/// Checks that the request comes from no web page but this server's own. For what no foreign page may do, listed or not, with a key or
/// without, and over whatever socket a proxy has come.
///
/// # Errors
/// 403.
pub fn check_own_origin(uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(header::ORIGIN) {
        Some(origin) if !is_own(origin.to_str().unwrap_or_default(), uri, headers) => Err(origin_refused(
            "only this server's own page may use its tools, and no --cors-origin allows others",
        )),
        _ => Ok(()),
    }
}

/// Returns whether a page of `origin` came from the host that the request names.
fn is_own(origin: &str, uri: &Uri, headers: &HeaderMap) -> bool {
    let site = origin.split_once("://").map(|(_, site)| site);
    site.zip(authority(uri, headers)).is_some_and(|(site, host)| site.eq_ignore_ascii_case(&host))
}

fn origin_refused(message: &str) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, Some("origin_not_allowed"), message)
}

/// The memory budget that all bodies being read share.
#[derive(Debug, Clone)]
pub struct Bodies(Arc<Semaphore>);

impl Bodies {
    pub fn new(max_body: usize) -> Self {
        let kibibytes = max_body.div_ceil(KIBIBYTE).saturating_mul(BODIES_AT_ONCE);
        Self(Arc::new(Semaphore::new(kibibytes.clamp(BODIES_AT_ONCE, Semaphore::MAX_PERMITS))))
    }

    /// Extends `memory` to cover `num_bytes`; false if the budget is used up.
    pub fn cover(&self, num_bytes: usize, memory: &mut Option<OwnedSemaphorePermit>) -> bool {
        let held = memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        // A growing buffer has up to twice the size of its body, so a permit covers two bytes.
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
