//! Requests to an OpenAI-compatible server, with the time of each part of the answer.
//!
//! HTTP/1.1 without TLS. Connections are reused; one that the server has closed is replaced once, before
//! anything was sent on it. Failures are [`RequestFailure`]s with a kind, because they are counted, not
//! fatal.

use std::fmt::Write;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, SERVER};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

use super::sse::{self, ChunkUsage};
use crate::cli::error::{CommandError, Kind};
use crate::runtime::http_engine::SseParser;

/// Most bytes of a response that is read whole.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Characters of an error that are shown.
const MAX_SHOWN: usize = 400;

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub host: String,
    pub port: u16,
    /// Path before `/chat/completions`, e.g. `/v1`.
    pub base: String,
}

impl Endpoint {
    /// Parses `http://127.0.0.1:8484`, with or without `/v1`.
    ///
    /// # Errors
    /// A usage error for anything else, including https.
    pub fn parse(text: &str) -> Result<Self, CommandError> {
        let refuse = |why: &str| {
            let hint = "give the server's address, e.g. --endpoint http://127.0.0.1:8484";
            CommandError::usage(format!("--endpoint {text}: {why}")).hint(hint)
        };
        let uri: Uri = text.parse().map_err(|_| refuse("not an address"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                let hint = "measure without TLS, on the server's own machine or through `ssh -L`: TLS would be part of the figures";
                return Err(refuse("https is not supported").hint(hint));
            }
            _ => return Err(refuse("it does not begin with http://")),
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| refuse("it names no host"))?;
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: host.to_owned(),
            port: uri.port_u16().unwrap_or(80),
            base: if path.is_empty() { "/v1".to_owned() } else { path.to_owned() },
        })
    }

    pub fn url(&self) -> String {
        format!("http://{}:{}{}", self.host, self.port, self.base)
    }
}

/// Reason why a request has no complete answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestFailure {
    /// No connection.
    Unreachable(String),
    /// An error status.
    Status(u16, String),
    /// The connection ended before the answer did.
    Broken(String),
    /// The answer is not of the expected form.
    Malformed(String),
    /// An error in the middle of a stream.
    Server(String),
    Timeout,
}

impl RequestFailure {
    /// Returns the name under which failures are counted.
    pub fn kind(&self) -> String {
        match self {
            RequestFailure::Unreachable(_) => "unreachable".to_owned(),
            RequestFailure::Status(code, _) => format!("http_{code}"),
            RequestFailure::Broken(_) => "broken".to_owned(),
            RequestFailure::Malformed(_) => "malformed".to_owned(),
            RequestFailure::Server(_) => "server".to_owned(),
            RequestFailure::Timeout => "timeout".to_owned(),
        }
    }
}

impl std::fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = match self {
            RequestFailure::Unreachable(why) => format!("cannot connect to {why}"),
            RequestFailure::Status(code, message) => format!("the server answers {code}: {message}"),
            RequestFailure::Broken(why) => format!("the connection ended before the answer: {why}"),
            RequestFailure::Malformed(why) => format!("the answer cannot be read: {why}"),
            RequestFailure::Server(message) => format!("the server reports: {message}"),
            RequestFailure::Timeout => "no answer in time".to_owned(),
        };
        // A server may answer with megabytes.
        text.chars().take(MAX_SHOWN).try_for_each(|c| f.write_char(c))
    }
}

impl From<RequestFailure> for CommandError {
    fn from(trouble: RequestFailure) -> Self {
        let kind = match &trouble {
            RequestFailure::Unreachable(_) | RequestFailure::Broken(_) | RequestFailure::Timeout => {
                Kind::Unavailable
            }
            RequestFailure::Status(401 | 403, _) => Kind::Auth,
            RequestFailure::Status(404, _) => Kind::NotFound,
            RequestFailure::Status(429 | 503, _) => Kind::Temporary,
            RequestFailure::Status(..) | RequestFailure::Malformed(_) | RequestFailure::Server(_) => {
                Kind::Failure
            }
        };
        CommandError::new(kind, anyhow::anyhow!("{trouble}"))
    }
}

/// An answer with the times of its parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TimedAnswer {
    pub text: String,
    /// Time of each part with text, since the request was sent.
    pub chunks: Vec<Duration>,
    pub end: Duration,
    pub finish: Option<String>,
    pub usage: Option<ChunkUsage>,
}

/// A model in a server's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    pub id: String,
    /// `None` if the server does not say.
    pub context_tokens: Option<usize>,
}

impl ListedModel {
    fn read(model: &Value) -> Option<Self> {
        let context_tokens = model["max_model_len"].as_u64().and_then(|count| usize::try_from(count).ok());
        Some(Self { id: model["id"].as_str()?.to_owned(), context_tokens })
    }
}

/// A server and its connections.
pub struct LoadClient {
    endpoint: Endpoint,
    key: Option<String>,
    timeout: Duration,
    idle: Mutex<Vec<SendRequest<Body>>>,
}

impl LoadClient {
    pub fn new(endpoint: Endpoint, key: Option<String>, timeout: Duration) -> Self {
        Self { endpoint, key, timeout, idle: Mutex::new(Vec::new()) }
    }

    /// Returns the models that the server lists, each as it describes it, and its `Server` header.
    ///
    /// # Errors
    /// [`RequestFailure`].
    pub async fn models(&self) -> Result<(Vec<ListedModel>, Option<String>), RequestFailure> {
        self.in_time(async {
            let (response, connection) = self.send(Method::GET, "/models", None).await?;
            let software = response.headers().get(SERVER).and_then(|value| value.to_str().ok());
            let software = software.map(str::to_owned);
            let text = self.whole(response).await?;
            self.put_back(connection);
            let value: Value =
                serde_json::from_str(&text).map_err(|error| RequestFailure::Malformed(error.to_string()))?;
            let models = value["data"].as_array().into_iter().flatten();
            Ok((models.filter_map(ListedModel::read).collect(), software))
        })
        .await
    }

    /// Sends a completion request and reads the stream to its end.
    ///
    /// # Errors
    /// [`RequestFailure`].
    pub async fn complete(&self, path: &str, body: &Value) -> Result<TimedAnswer, RequestFailure> {
        self.in_time(async {
            let sent = Instant::now();
            let (response, connection) = self.send(Method::POST, path, Some(body)).await?;
            let is_stream = response
                .headers()
                .get(CONTENT_TYPE)
                .and_then(|value| value.to_str().ok())
                .is_some_and(|value| value.starts_with("text/event-stream"));
            let answer = if is_stream {
                let (answer, is_whole) = hear(response.into_body(), sent).await?;
                if !is_whole {
                    return Ok(answer); // the connection cannot be reused
                }
                answer
            } else {
                let text = self.whole(response).await?;
                let mut answer = TimedAnswer::default();
                take(&mut answer, &text, sent)?;
                answer.end = sent.elapsed();
                answer
            };
            self.put_back(connection);
            Ok(answer)
        })
        .await
    }

    async fn in_time<T>(
        &self,
        work: impl Future<Output = Result<T, RequestFailure>>,
    ) -> Result<T, RequestFailure> {
        tokio::time::timeout(self.timeout, work).await.unwrap_or(Err(RequestFailure::Timeout))
    }

    /// Sends a request. Returns the head of a successful response, and its connection.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(Response<Incoming>, SendRequest<Body>), RequestFailure> {
        let mut connection = self.connection().await?;
        let request = self.request(method, path, body)?;
        let response = connection.send_request(request).await;
        let response = response.map_err(|error| RequestFailure::Broken(error.to_string()))?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok((response, connection));
        }
        let text = self.whole(response).await.unwrap_or_default();
        self.put_back(connection);
        Err(RequestFailure::Status(status.as_u16(), sse::error_message(&text)))
    }

    /// Returns an idle connection that the server has left open, else a new one.
    async fn connection(&self) -> Result<SendRequest<Body>, RequestFailure> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
            let Some(mut connection) = idle else { break };
            if !connection.is_closed() && connection.ready().await.is_ok() {
                return Ok(connection);
            }
        }
        let url = self.endpoint.url();
        let unreachable =
            |error: &dyn std::fmt::Display| RequestFailure::Unreachable(format!("{url}: {error}"));
        let host = self.endpoint.host.trim_start_matches('[').trim_end_matches(']');
        let stream =
            TcpStream::connect((host, self.endpoint.port)).await.map_err(|error| unreachable(&error))?;
        let _ = stream.set_nodelay(true); // without it, delays are measured, which is no error
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| unreachable(&error))?;
        tokio::spawn(connection); // its errors are reported by the request
        Ok(sender)
    }

    fn put_back(&self, connection: SendRequest<Body>) {
        if !connection.is_closed() {
            self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(connection);
        }
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Request<Body>, RequestFailure> {
        let Endpoint { host, port, base } = &self.endpoint;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{base}{path}"))
            .header(HOST, format!("{host}:{port}"));
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let body = match body {
            Some(value) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Body::from(value.to_string())
            }
            None => Body::empty(),
        };
        request.body(body).map_err(|error| RequestFailure::Malformed(error.to_string()))
    }

    async fn whole(&self, response: Response<Incoming>) -> Result<String, RequestFailure> {
        let mut body = response.into_body();
        let mut bytes = Vec::new();
        while let Some(part) = next_part(&mut body).await? {
            bytes.extend_from_slice(&part);
            if bytes.len() > MAX_BODY_BYTES {
                return Err(RequestFailure::Malformed("more than 16 MiB".to_owned()));
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, RequestFailure> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(RequestFailure::Broken(error.to_string())),
            // Ignore trailers.
            Some(Ok(frame)) => match frame.into_data() {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(_) => continue,
            },
        }
    }
}

/// Reads a stream to its end. Returns the answer, and whether the response has ended too. A stream without
/// `[DONE]` and finish reason was cut; one that stays open after `[DONE]` is dropped after a while.
async fn hear(mut body: Incoming, sent: Instant) -> Result<(TimedAnswer, bool), RequestFailure> {
    const AFTERWARDS: Duration = Duration::from_secs(1);
    let mut parser = SseParser::default();
    let mut answer = TimedAnswer::default();
    let mut is_done = false;
    loop {
        let part = match is_done {
            false => next_part(&mut body).await?,
            true => match tokio::time::timeout(AFTERWARDS, next_part(&mut body)).await {
                Ok(Ok(part)) => part,
                Ok(Err(_)) | Err(_) => return Ok((answer, false)),
            },
        };
        let Some(bytes) = part else { break };
        let events = parser.push(&bytes).map_err(RequestFailure::Malformed)?;
        for data in events.into_iter().filter_map(|event| event.data) {
            if is_done {
                continue;
            }
            is_done = data.trim() == "[DONE]";
            match is_done {
                true => answer.end = sent.elapsed(),
                false => take(&mut answer, &data, sent)?,
            }
        }
    }
    if !is_done {
        answer.end = sent.elapsed();
        if answer.finish.is_none() {
            return Err(RequestFailure::Broken("the stream has no end".to_owned()));
        }
    }
    Ok((answer, true))
}

fn take(answer: &mut TimedAnswer, data: &str, sent: Instant) -> Result<(), RequestFailure> {
    let chunk = sse::chunk(data).map_err(RequestFailure::Malformed)?;
    if let Some(message) = chunk.error {
        return Err(RequestFailure::Server(message));
    }
    if !chunk.text.is_empty() {
        answer.text.push_str(&chunk.text);
        answer.chunks.push(sent.elapsed());
    }
    answer.finish = chunk.finish.or(answer.finish.take());
    answer.usage = chunk.usage.or(answer.usage);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let check = |text: &str, expected: &str| {
            assert_eq!(Endpoint::parse(text).expect("an endpoint").url(), expected);
        };
        check("http://127.0.0.1:8484", "http://127.0.0.1:8484/v1");
        check("http://localhost/", "http://localhost:80/v1");
        check("http://[::1]:1/api/v3/", "http://[::1]:1/api/v3");
        for (wrong, why) in [
            ("https://127.0.0.1", "https is not supported"),
            ("127.0.0.1:80", "does not begin with http://"),
            ("ftp://x", "does not begin with http://"),
            ("http//", "not an address"),
            ("", "not an address"),
        ] {
            let error = Endpoint::parse(wrong).unwrap_err();
            assert_eq!(error.kind, Kind::Usage, "{wrong}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn troubles_have_exit_codes() {
        let kind = |trouble: RequestFailure| CommandError::from(trouble).kind;
        assert_eq!(kind(RequestFailure::Unreachable("refused".to_owned())), Kind::Unavailable);
        assert_eq!(kind(RequestFailure::Status(401, String::new())), Kind::Auth);
        assert_eq!(kind(RequestFailure::Status(500, String::new())), Kind::Failure);
        assert_eq!(RequestFailure::Status(429, String::new()).kind(), "http_429");
        let long = RequestFailure::Malformed("x".repeat(10_000)).to_string();
        assert_eq!(long.chars().count(), MAX_SHOWN);
    }
}
