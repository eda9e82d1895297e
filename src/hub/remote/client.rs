//! Requests to the hub: one blocking GET, its redirects, its repetition, and what a refusal means.
//!
//! Protocol: huggingface_hub's `file_download.py`, `hf_api.py` and `utils/_http.py`. Redirects are followed
//! here and not by ureq, so that the facts in the hub's own answer are read before the storage host is asked.
//!
//! Invariant: the token goes to the endpoint's scheme, host and port only.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use ureq::http::{HeaderMap, Response, Uri, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::error::{AttemptFailure, HubError};
use super::observer::{PullEvent, PullObserver, pause};
use super::settings::HubSettings;

/// Redirects of one request; the hub needs one to the storage host, and one for a renamed repository.
const MAX_REDIRECTS: usize = 8;

/// Size limit of a JSON answer in bytes.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// Attempts to connect before anything was received: without a network the user should not wait.
const CONNECT_ATTEMPTS: u32 = 2;

/// Pause in seconds after a 429 that does not name one.
const DEFAULT_WAIT: u64 = 10;

/// A client of one hub.
pub struct HubClient {
    settings: HubSettings,
    https: Agent,
    http: Agent,
}

/// Subject of a request, which decides the meaning of a refusal.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestSubject<'a> {
    pub repo: &'a str,
    pub revision: &'a str,
    /// The file; `None` for the repository's facts.
    pub path: Option<&'a str>,
}

/// An answer with status 200 or 206.
pub(super) struct HubAnswer {
    pub response: Response<Body>,
    /// Headers of the endpoint's own last answer, which describe the file also if another host sends it.
    pub facts: HeaderMap,
    /// The address that answered for the endpoint, after redirects within it.
    pub url: String,
}

/// A JSON answer.
pub(super) struct JsonAnswer {
    pub value: Value,
    /// Address of the next page.
    pub next: Option<String>,
    pub url: String,
}

impl HubClient {
    /// # Errors
    /// [`HubError::Setting`] for an address, a proxy or a certificate file that cannot be used.
    pub fn new(settings: HubSettings) -> Result<Arc<Self>, HubError> {
        if HostAndPort::of(&settings.endpoint).is_none() {
            let message = format!("{:?} is not an http or https address", settings.endpoint);
            return Err(HubError::Setting { name: "HF_ENDPOINT", message });
        }
        let (https, http) = (agent(&settings, true)?, agent(&settings, false)?);
        Ok(Arc::new(Self { settings, https, http }))
    }

    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// Returns the hub's name for the user, without `https://`.
    pub fn host(&self) -> &str {
        self.settings.endpoint.trim_start_matches("https://")
    }

    /// Returns the address below the endpoint; `path` is encoded already.
    pub(super) fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.settings.endpoint)
    }

    /// Requests `url` once, with the bytes of `range` (first, and last if any), and follows redirects.
    ///
    /// # Errors
    /// A refusal, an answer that is no HTTP, or a connection that fails.
    pub(super) fn get(
        &self,
        url: &str,
        subject: RequestSubject<'_>,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<HubAnswer, AttemptFailure> {
        let hub = HostAndPort::of(&self.settings.endpoint);
        let (mut at, mut hub_url, mut facts) = (url.to_owned(), url.to_owned(), HeaderMap::new());
        for _ in 0..=MAX_REDIRECTS {
            let is_hub = HostAndPort::of(&at) == hub;
            let response = self.send(&at, is_hub, range)?;
            if is_hub {
                (facts, hub_url) = (response.headers().clone(), at.clone());
            }
            match response.status().as_u16() {
                200 | 206 => return Ok(HubAnswer { response, facts, url: hub_url }),
                301 | 302 | 303 | 307 | 308 => at = redirected(&at, &response)?,
                _ => return Err(self.refusal(response, is_hub, &at, subject)),
            }
        }
        Err(unexpected(url, format!("more than {MAX_REDIRECTS} redirects")))
    }

    fn send(
        &self,
        url: &str,
        is_hub: bool,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<Response<Body>, AttemptFailure> {
        let agent = if url.starts_with("https:") { &self.https } else { &self.http };
        // A compressed body would have other sizes and offsets.
        let mut request = agent.get(url).header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = self.settings.token.as_ref().filter(|_| is_hub) {
            request = request.header(header::AUTHORIZATION, token.header());
        }
        if let Some((first, last)) = range {
            let last = last.map(|last| last.to_string()).unwrap_or_default();
            request = request.header(header::RANGE, format!("bytes={first}-{last}"));
        }
        request.call().map_err(|error| connection_failure(url, error))
    }

    /// Returns the meaning of a status that is no success.
    fn refusal(
        &self,
        response: Response<Body>,
        is_hub: bool,
        url: &str,
        subject: RequestSubject<'_>,
    ) -> AttemptFailure {
        let status = response.status().as_u16();
        let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let message = text("x-error-message").unwrap_or_default().to_owned();
        // A signed address of the storage host expires; the hub signs a new one.
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) || (!is_hub && matches!(status, 401 | 403)) {
            let wait = wait_seconds(response.headers()).or((status == 429).then_some(DEFAULT_WAIT));
            let endpoint = self.host().to_owned();
            let error = match status {
                429 => HubError::RateLimited { endpoint, seconds: wait.unwrap_or_default() },
                _ => HubError::Unreachable { host: host_of(url), message: format!("status {status}") },
            };
            return AttemptFailure::Transient { error, wait, is_unconnected: false };
        }
        let code = text("x-error-code").unwrap_or_default();
        AttemptFailure::Final(self.meaning(status, code, message, url, subject))
    }

    fn meaning(
        &self,
        status: u16,
        code: &str,
        message: String,
        url: &str,
        subject: RequestSubject<'_>,
    ) -> HubError {
        let (repo, endpoint) = (subject.repo.to_owned(), self.host().to_owned());
        let has_token = self.settings.token.is_some();
        let file = |path: &str| HubError::FileNotFound {
            repo: repo.clone(),
            wanted: path.to_owned(),
            candidates: Vec::new(),
        };
        match (status, code, subject.path) {
            (_, "GatedRepo", _) => {
                HubError::Gated { page: self.address(subject.repo), repo: repo.clone(), has_token }
            }
            (_, "RevisionNotFound", _) => {
                let revision = subject.revision.to_owned();
                HubError::RevisionNotFound { repo: repo.clone(), revision, existing: Vec::new() }
            }
            (_, "EntryNotFound", path) => file(path.unwrap_or("such file")),
            _ if message.contains("is disabled") => HubError::Disabled { repo: repo.clone() },
            (401, "", _) if has_token && message.starts_with("Invalid") => {
                HubError::TokenRejected { endpoint }
            }
            (404, "", Some(path)) => file(path),
            (_, "RepoNotFound", _) | (401, "", _) | (404, "", None) => {
                HubError::RepoNotFound { repo: repo.clone(), endpoint, has_token }
            }
            (416, ..) => HubError::Changed {
                path: subject.path.unwrap_or_default().to_owned(),
                message: "it is shorter than announced".to_owned(),
            },
            _ => {
                let message = if message.is_empty() { code.to_owned() } else { message };
                let separator = if message.is_empty() { "" } else { ": " };
                let message = format!("status {status}{separator}{message}");
                HubError::Unexpected { url: without_query(url), message }
            }
        }
    }

    /// Requests a JSON document, repeatedly if that may help.
    ///
    /// # Errors
    /// The refusal or the last failure; [`HubError::Cancelled`].
    pub(super) fn json(
        &self,
        url: &str,
        subject: RequestSubject<'_>,
        observer: &dyn PullObserver,
    ) -> Result<JsonAnswer, HubError> {
        self.repeated(url, observer, || {
            let HubAnswer { response, facts, url } = self.get(url, subject, None)?;
            let body = response.into_body().into_with_config().limit(MAX_JSON_BYTES).read_to_vec();
            let body = body.map_err(|error| connection_failure(&url, error))?;
            let value = serde_json::from_slice(&body)
                .map_err(|_| unexpected(&url, "the answer is not the JSON of a Hugging Face hub"))?;
            Ok(JsonAnswer { value, next: next_page(&facts), url })
        })
    }

    /// Calls `attempt` until it succeeds or does not fail for a passing reason.
    ///
    /// # Errors
    /// The last failure; [`HubError::Cancelled`].
    pub(super) fn repeated<T>(
        &self,
        what: &str,
        observer: &dyn PullObserver,
        mut attempt: impl FnMut() -> Result<T, AttemptFailure>,
    ) -> Result<T, HubError> {
        let mut num_failures = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(AttemptFailure::Final(error)) => return Err(error),
                Err(AttemptFailure::NoRanges) => {
                    let message = "the server ignores the requested range".to_owned();
                    return Err(HubError::Unexpected { url: without_query(what), message });
                }
                Err(AttemptFailure::Transient { error, wait, is_unconnected }) => {
                    num_failures += 1;
                    let most = if is_unconnected { CONNECT_ATTEMPTS } else { self.settings.retry.attempts };
                    if num_failures >= most {
                        return Err(error);
                    }
                    self.wait_to_retry(&host_of(what), &error, wait, num_failures, observer)?;
                }
            }
        }
    }

    /// Waits before an attempt is repeated: as long as the server asks, else exponentially longer, with jitter so
    /// that many clients do not come back at once.
    ///
    /// # Errors
    /// `error` if the server asks for more than the longest pause; [`HubError::Cancelled`].
    pub(super) fn wait_to_retry(
        &self,
        what: &str,
        error: &HubError,
        wait: Option<u64>,
        num_failures: u32,
        observer: &dyn PullObserver,
    ) -> Result<(), HubError> {
        let retry = &self.settings.retry;
        let backoff = retry.first_pause.saturating_mul(1 << (num_failures.clamp(1, 7) - 1));
        let jitter = backoff.mul_f64(f64::from(random_byte()) / 512.0);
        let duration = wait.map_or(backoff.min(retry.longest_pause), Duration::from_secs) + jitter;
        if duration > retry.longest_pause + jitter {
            return Err(error.clone());
        }
        let seconds = duration.as_secs();
        observer.event(PullEvent::Retrying { what: what.to_owned(), why: error.to_string(), seconds });
        pause(duration, observer)
    }
}

/// Returns the client of addresses with or without TLS, each with its own proxy.
fn agent(settings: &HubSettings, is_https: bool) -> Result<Agent, HubError> {
    let mut tls = TlsConfig::builder();
    if let Some(path) = &settings.ca_file {
        tls = tls.root_certs(RootCerts::new_with_certs(&certificates(path)?));
    }
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .proxy(settings.proxies.proxy(is_https, &host_of(&settings.endpoint))?)
        .tls_config(tls.build())
        .user_agent(concat!("llmctl/", env!("CARGO_PKG_VERSION")))
        .max_idle_connections_per_host(settings.connections)
        .timeout_resolve(Some(settings.answer_timeout))
        .timeout_connect(Some(settings.answer_timeout))
        .timeout_recv_response(Some(settings.answer_timeout))
        .timeout_per_read(Some(settings.read_timeout))
        .build();
    Ok(config.into())
}

fn certificates(path: &std::path::Path) -> Result<Vec<Certificate<'static>>, HubError> {
    let invalid = |message: String| HubError::Setting { name: "SSL_CERT_FILE", message };
    let pem = fs::read(path).map_err(|error| invalid(format!("{}: {error}", path.display())))?;
    let certificates: Vec<_> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(invalid(format!("{} holds no certificate in PEM form", path.display())));
    }
    Ok(certificates)
}

/// The part of an address that must be equal for the token to be sent.
#[derive(Debug, PartialEq, Eq)]
struct HostAndPort {
    is_https: bool,
    host: String,
    port: u16,
}

impl HostAndPort {
    fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let is_https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        Some(Self { is_https, host: uri.host()?.to_ascii_lowercase(), port })
    }
}

fn host_of(url: &str) -> String {
    HostAndPort::of(url).map_or_else(|| without_query(url), |host| host.host)
}

/// Removes the query, which holds the signature of a signed address.
fn without_query(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or(url).to_owned()
}

fn unexpected(url: &str, message: impl Into<String>) -> AttemptFailure {
    HubError::Unexpected { url: without_query(url), message: message.into() }.into()
}

/// Returns the address that a redirect leads to.
fn redirected(from: &str, response: &Response<Body>) -> Result<String, AttemptFailure> {
    let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| unexpected(from, "a redirect without an address"))?;
    let host_end = from.find("://").map_or(0, |at| at + 3);
    let host_end = from[host_end..].find('/').map_or(from.len(), |at| host_end + at);
    let to = if location.contains("://") {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{}://{rest}", from.split("://").next().unwrap_or("https"))
    } else if location.starts_with('/') {
        format!("{}{location}", &from[..host_end])
    } else {
        let folder = without_query(from);
        let folder = folder.rfind('/').filter(|at| *at >= host_end).map_or(&*folder, |at| &folder[..at]);
        format!("{folder}/{location}")
    };
    match HostAndPort::of(&to) {
        None => Err(unexpected(from, "a redirect to an address that is neither http nor https")),
        Some(host) if from.starts_with("https:") && !host.is_https => {
            Err(unexpected(from, format!("a redirect to {}, which is not encrypted", host.host)))
        }
        Some(_) => Ok(to),
    }
}

/// Returns the seconds to wait by `ratelimit: "api";r=0;t=55` (draft-ietf-httpapi-ratelimit-headers), else by
/// `Retry-After`.
fn wait_seconds(headers: &HeaderMap) -> Option<u64> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let reset = text("ratelimit").and_then(|limit| {
        limit.split(';').find_map(|part| part.trim().strip_prefix("t=")?.parse::<u64>().ok())
    });
    // The window has ended one second after its last one.
    reset.map(|seconds| seconds + 1).or_else(|| text("retry-after")?.trim().parse().ok())
}

/// Returns the address of the next page, of `Link: <address>; rel="next"`.
fn next_page(headers: &HeaderMap) -> Option<String> {
    let links = headers.get_all(header::LINK).iter().filter_map(|value| value.to_str().ok());
    let next = links.flat_map(|line| line.split(',')).find(|link| link.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// Maps a failure below HTTP: only those are final that a second attempt meets again.
pub(super) fn connection_failure(url: &str, error: ureq::Error) -> AttemptFailure {
    use std::io::ErrorKind;
    let host = host_of(url);
    let is_unconnected = match &error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::ConnectProxyFailed(_) => {
            true
        }
        ureq::Error::Timeout(timeout) => matches!(timeout, ureq::Timeout::Resolve | ureq::Timeout::Connect),
        ureq::Error::Io(error) => {
            matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NetworkUnreachable)
        }
        _ => false,
    };
    let is_final = match &error {
        ureq::Error::Io(error) => error.kind() == ErrorKind::InvalidData,
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::BadUri(_) => true,
        ureq::Error::InvalidProxyUrl | ureq::Error::BodyExceedsLimit(_) => true,
        _ => false,
    };
    let message = match &error {
        ureq::Error::HostNotFound => "no such host, or no network".to_owned(),
        ureq::Error::Timeout(_) => "no answer in time".to_owned(),
        ureq::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    };
    let error = HubError::Unreachable { host, message };
    match is_final {
        true => AttemptFailure::Final(error),
        false => AttemptFailure::Transient { error, wait: None, is_unconnected },
    }
}

fn random_byte() -> u8 {
    RandomState::new().build_hasher().finish().to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (name.parse().expect("name"), value.parse().expect("value")))
            .collect()
    }

    #[test]
    fn waits_as_the_headers_say() {
        assert_eq!(
            wait_seconds(&headers(&[("ratelimit", "\"api\";r=0;t=55"), ("retry-after", "3")])),
            Some(56)
        );
        assert_eq!(wait_seconds(&headers(&[("retry-after", "7")])), Some(7));
        assert_eq!(wait_seconds(&headers(&[("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")])), None);
    }

    #[test]
    fn finds_the_next_page_among_links() {
        let links = headers(&[("link", "<https://h/a?cursor=x>; rel=\"next\", <https://h/b>; rel=\"last\"")]);
        assert_eq!(next_page(&links).as_deref(), Some("https://h/a?cursor=x"));
        assert_eq!(next_page(&headers(&[("link", "<https://h/b>; rel=\"last\"")])), None);
    }

    #[test]
    fn a_redirect_is_resolved_and_never_leaves_encryption() {
        let to = |from: &str, location: &str| {
            let response = Response::builder().header("location", location).body(Body::builder().data(""));
            redirected(from, &response.expect("valid")).map_err(|_| ())
        };
        assert_eq!(to("https://h:8/a/b?c", "/x?y").as_deref(), Ok("https://h:8/x?y"));
        assert_eq!(to("https://h/a/b?c/d", "x").as_deref(), Ok("https://h/a/x"));
        assert_eq!(to("https://h/a", "//cdn/x").as_deref(), Ok("https://cdn/x"));
        assert_eq!(to("http://h/a", "https://cdn/x").as_deref(), Ok("https://cdn/x"));
        assert_eq!(to("https://h/a", "http://cdn/x"), Err(()));
        assert_eq!(to("https://h/a", "file:///etc/passwd"), Err(()));
    }

    #[test]
    fn hosts_differ_by_scheme_host_and_port() {
        let same = |a: &str, b: &str| HostAndPort::of(a) == HostAndPort::of(b);
        assert!(same("https://h/a", "https://H:443/b"));
        assert!(!same("https://h/a", "http://h/a") && !same("https://h/a", "https://h:8443/a"));
        assert!(!same("https://h/a", "https://h.evil/a") && HostAndPort::of("ftp://h").is_none());
    }
}
