//! Extractors of JSON bodies and of names in paths and headers, with refusals in OpenAI's envelope.

use std::convert::Infallible;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Map, Value};
use tokio::task::spawn_blocking;

use super::blocking::blocking;
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::{Caller, Owner};
use crate::gate::request_id::HttpRequestId;
use crate::sessions::{AFFINITY_HEADER, InSession, ROUTING_HEADERS, RequestSession, TransientKey};
use crate::wire::json;
use llmctl_engine::session::store::SessionName;

/// Bytes that are parsed where they come in; more would hold up the requests of others.
const PARSED_AT_ONCE: usize = 64 << 10;

/// Name of the body in error messages.
const WHAT: &str = "the body";

/// A body that is a JSON object. A server of several models parses it to find the model, and hands it on as an extension.
#[derive(Clone)]
pub struct JsonBody(pub Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, state: &S) -> Result<Self, ApiError> {
        if let Some(parsed) = request.extensions_mut().remove::<Self>() {
            return Ok(parsed);
        }
        Self::check_head(request.headers())?;
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| {
            let status = rejection.into_response().status();
            let (code, message) = match status {
                StatusCode::PAYLOAD_TOO_LARGE => ("request_too_large", "the body is too large"),
                _ => ("invalid_body", "the body could not be read"),
            };
            ApiError::new(status, Some(code), message)
        })?;
        Self::parse(bytes).await
    }
}

impl JsonBody {
    /// Checks that the headers announce plain JSON.
    ///
    /// # Errors
    /// 415.
    pub fn check_head(headers: &HeaderMap) -> Result<(), ApiError> {
        check_encoding(headers)?;
        check_type(headers)
    }

    /// Parses a body.
    ///
    /// # Errors
    /// 422.
    pub async fn parse(bytes: Bytes) -> Result<Self, ApiError> {
        let read = match bytes.len() {
            0..=PARSED_AT_ONCE => json::object(&bytes, WHAT),
            _ => spawn_blocking(move || json::object(&bytes, WHAT))
                .await
                .map_err(|_| ApiError::internal("reading the body failed"))?,
        };
        let malformed =
            |message| ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, Some("invalid_json"), message);
        read.map(Self).map_err(malformed)
    }
}

/// Bodies come as they are: what unpacks to a thousand times its size is nothing to take from a stranger.
fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get_all(header::CONTENT_ENCODING).iter();
    let is_plain =
        |value: &&HeaderValue| value.is_empty() || value.as_bytes().eq_ignore_ascii_case(b"identity");
    match given.into_iter().find(|value| !is_plain(value)) {
        None => Ok(()),
        Some(encoding) => {
            let message = format!(
                "Content-Encoding {:?} is not supported: send the body as it is, without the header",
                String::from_utf8_lossy(encoding.as_bytes())
            );
            let code = Some("unsupported_content_encoding");
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, code, message))
        }
    }
}

/// Only JSON that says so: a page in a browser may post other types across origins without asking. What `curl -d` says without a
/// header is taken from programs; browsers name their origin or site with a POST (Fetch standard, "append a request `Origin` header").
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let is_browsers = ["origin", "sec-fetch-site"].iter().any(|name| headers.contains_key(*name));
    if essence == "application/x-www-form-urlencoded" && !is_browsers {
        return Ok(());
    }
    let message = match given {
        "" => "Content-Type is missing: application/json".to_owned(),
        _ => format!("Content-Type is {given:?}, not application/json"),
    };
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_media_type"), message))
}

/// Moment at which the head of a request was read. `--request-timeout` counts from there.
#[derive(Debug, Clone, Copy)]
pub struct RequestArrival(pub Instant);

impl RequestArrival {
    /// Returns the arrival of the request with these extensions; without one, it has just come.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get().copied().unwrap_or_else(|| Self(Instant::now()))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for RequestArrival {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.extensions))
    }
}

/// Everything about a request to generate besides its body.
pub struct Incoming {
    pub headers: HeaderMap,
    pub caller: Caller,
    pub request_id: String,
    /// See [`RequestArrival`].
    pub begun: Instant,
}

impl Incoming {
    /// Creates an anonymous request without headers.
    pub fn anonymous() -> Self {
        let caller = Caller::new(Owner::anonymous(), false);
        Self { headers: HeaderMap::new(), caller, request_id: String::new(), begun: Instant::now() }
    }
}

impl FromRequestParts<App> for Incoming {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Infallible> {
        let caller = Caller::from_request_parts(parts, app).await?;
        let HttpRequestId(request_id) = HttpRequestId::from_request_parts(parts, app).await?;
        let RequestArrival(begun) = RequestArrival::of(&parts.extensions);
        Ok(Self { headers: parts.headers.clone(), caller, request_id, begun })
    }
}

/// A request to generate.
pub struct PostedBody {
    pub incoming: Incoming,
    body: Map<String, Value>,
}

impl FromRequest<App> for PostedBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let Ok(incoming) = Incoming::from_request_parts(&mut parts, app).await;
        let JsonBody(body) = JsonBody::from_request(Request::from_parts(parts, body), app).await?;
        Ok(Self { incoming, body })
    }
}

impl PostedBody {
    /// Reads the body on a thread that may wait.
    ///
    /// # Errors
    /// Those of `read`.
    pub async fn read<T: Send + 'static>(self, app: &App, read: ReadBody<T>) -> Result<T, ApiError> {
        blocking(app, move |app| read(app, self.body, self.incoming)).await
    }
}

/// Reads the body of one API.
type ReadBody<T> = fn(&App, Map<String, Value>, Incoming) -> Result<T, ApiError>;

/// Headers that name a stored session, the first that is not empty counts.
const SESSION_HEADERS: [&str; 3] = ["x-session-id", "x-executorch-session-id", "session_id"];

/// The session that a request belongs to: what the body says; else a transient one, where the header is there that asks for
/// one; else a stored one; else the transient one of a client that names its conversations by itself.
///
/// # Errors
/// `invalid_session_id`, for a stored one.
pub fn session_of(
    in_body: Option<String>,
    appends: bool,
    headers: &HeaderMap,
    caller: &Caller,
) -> Result<Option<RequestSession>, ApiError> {
    let stored =
        |name: SessionName| RequestSession::Stored(InSession { caller: caller.clone(), name, appends });
    if let Some(name) = in_body {
        return session_name(&name).map(stored).map(Some);
    }
    let transient = |names: &[&str]| TransientKey::in_headers(caller.owner(), headers, names);
    if let Some(key) = transient(&[AFFINITY_HEADER]) {
        return Ok(Some(RequestSession::Transient(key)));
    }
    let given = SESSION_HEADERS.iter().filter_map(|name| headers.get(*name)).find(|value| !value.is_empty());
    let Some(given) = given else { return Ok(transient(&ROUTING_HEADERS).map(RequestSession::Transient)) };
    let name = given.to_str().map_err(|_| invalid_session("it holds more than printable ASCII"))?;
    session_name(name).map(stored).map(Some)
}

pub fn session_name(name: &str) -> Result<SessionName, ApiError> {
    use llmctl_base::Error;
    SessionName::new(name).map_err(|error| match error {
        Error::InvalidParameter { message, .. } => invalid_session(&message),
        other => other.into(),
    })
}

pub fn invalid_session(message: &str) -> ApiError {
    let message = format!("session_id: {message}");
    ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_session_id"), message).param("session_id")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::owner::Owner;

    fn caller() -> Caller {
        Caller::new(Owner::anonymous(), false)
    }

    /// The session's name, `~` before a transient one's.
    fn named(body: Option<&str>, headers: &HeaderMap) -> Result<Option<String>, Option<&'static str>> {
        let session = session_of(body.map(str::to_owned), false, headers, &caller());
        let name = |session| match session {
            RequestSession::Stored(session) => session.name.to_string(),
            RequestSession::Transient(key) => format!("~{}", key.id),
        };
        session.map(|session| session.map(name)).map_err(|error| error.code)
    }

    #[test]
    fn the_body_names_the_session_before_the_headers_in_their_order() {
        let mut headers = HeaderMap::new();
        assert_eq!(named(None, &headers), Ok(None));
        for (header, expected) in SESSION_HEADERS.iter().rev().zip(["c", "b", "a"]) {
            headers.insert(*header, HeaderValue::from_static(expected));
            assert_eq!(named(None, &headers), Ok(Some(expected.to_owned())));
        }
        headers.insert("x-session-id", HeaderValue::from_static(""));
        assert_eq!(named(None, &headers), Ok(Some("b".to_owned())), "an empty header is absent");
        assert_eq!(named(Some("body"), &headers), Ok(Some("body".to_owned())));
        for bad in ["", "a b", "a/b", &"x".repeat(129)] {
            assert_eq!(named(Some(bad), &headers), Err(Some("invalid_session_id")), "{bad:?}");
        }
        headers.insert("x-session-id", HeaderValue::from_bytes(b"\xe9").expect("opaque bytes"));
        assert_eq!(named(None, &headers), Err(Some("invalid_session_id")));
    }

    #[test]
    fn headers_that_clients_send_by_themselves_name_transient_sessions() {
        let mut headers = HeaderMap::new();
        headers.insert("x-claude-code-session-id", HeaderValue::from_static("claude"));
        assert_eq!(named(None, &headers), Ok(Some("~claude".to_owned())));
        headers.insert("thread-id", HeaderValue::from_static("codex"));
        assert_eq!(named(None, &headers), Ok(Some("~codex".to_owned())));
        headers.insert("x-session-id", HeaderValue::from_static("mine"));
        assert_eq!(named(None, &headers), Ok(Some("mine".to_owned())), "it was asked for");
        headers.insert("x-session-affinity", HeaderValue::from_static("ses_1"));
        assert_eq!(named(None, &headers), Ok(Some("~ses_1".to_owned())), "opencode sends both");
        assert_eq!(named(Some("body"), &headers), Ok(Some("body".to_owned())));
        for odd in [&b"a b"[..], b"a/b", b"\xe9", &[b'x'; 4000]] {
            headers.insert("x-session-affinity", HeaderValue::from_bytes(odd).expect("a value"));
            let name = named(None, &headers).expect("never refused").expect("a session");
            assert!(name.starts_with("~affinity-") && name.len() == 26, "{name}");
        }
    }

    #[test]
    fn a_packed_body_is_refused_by_its_header() {
        let check = |given: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(given));
            check_encoding(&headers).map_err(|error| (error.status.as_u16(), error.message))
        };
        assert_eq!(check_encoding(&HeaderMap::new()), Ok(()));
        assert_eq!((check("identity"), check("Identity"), check("")), (Ok(()), Ok(()), Ok(())));
        for given in ["gzip", "br", "identity, gzip"] {
            let (status, message) = check(given).expect_err(given);
            assert!(
                status == 415 && message.starts_with(&format!("Content-Encoding {given:?}")),
                "{message}"
            );
        }
    }

    #[test]
    fn only_json_is_taken_for_json() {
        let check = |given: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            given.map(|given| headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(given)));
            check_type(&headers).is_ok()
        };
        assert!(check(Some("application/json")) && check(Some("Application/JSON; charset=utf-8")));
        assert!(check(Some("application/vnd.api+json")));
        assert!(!check(None) && !check(Some("text/plain")) && !check(Some("text/x+json")));
        let form = (header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        let origin = (header::ORIGIN, HeaderValue::from_static("null"));
        assert!(check_type(&HeaderMap::from_iter([form.clone()])).is_ok(), "curl -d");
        assert!(check_type(&HeaderMap::from_iter([form, origin])).is_err(), "a page's form");
    }
}
