//! HTTP/1.1 requests to one engine, whole or as a stream of server-sent events.
//!
//! Invariant: each request has a connection of its own while it runs, which is closed when its answer is
//! dropped; engines end a generation when its connection closes. A client that keeps connections uses one
//! again whose last answer was read to its end.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::rustls::ClientConfig;

use super::address::EngineUrl;
use super::key::ServerKey;
use super::sse::{SseEvent, SseParser};
use super::tls::{TlsTrust, secure};

/// Longest wait for a connection, and for a whole answer to a short question.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ASK_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest wait for an answer that needs a model to be loaded first.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// Silence of a connection after which the other side is probed, so that a machine that is gone is noticed.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Most bytes of an answer that is read whole.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Characters of an error message that are shown.
const MAX_SHOWN: usize = 400;

/// Reason why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpFailure {
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("the connection ended before the answer: {0}")]
    Broken(String),
    #[error("it answers {code}: {message}")]
    Status {
        code: u16,
        message: String,
        /// The pause that it asks for.
        retry_after: Option<Duration>,
    },
    #[error("its answer cannot be read: {0}")]
    Malformed(String),
    #[error("it does not answer")]
    Timeout,
}

impl HttpFailure {
    fn broken(error: impl std::fmt::Display) -> Self {
        Self::Broken(error.to_string())
    }
}

/// Settings of connections to servers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerSettings {
    pub key: Option<ServerKey>,
    pub trust: TlsTrust,
}

/// Requests to one engine.
#[derive(Debug, Clone)]
pub struct EngineHttp {
    url: EngineUrl,
    settings: ServerSettings,
    /// Shared by all connections, so that later ones resume the TLS session of an earlier one.
    tls: Arc<OnceLock<Arc<ClientConfig>>>,
    idle: Option<IdleConnections>,
    /// The address of the URL's host, if it was looked up before.
    address: Option<IpAddr>,
}

/// Connections to be used again.
type IdleConnections = Arc<Mutex<Vec<EngineConnection>>>;

/// A connection, plain or secure.
trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// A connection and the task that drives it; the connection is closed when this is dropped.
#[derive(Debug)]
struct EngineConnection {
    sender: SendRequest<String>,
    driver: JoinHandle<()>,
}

impl Drop for EngineConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The body of an answer. Dropping it before its end closes the connection.
struct AnswerBody {
    body: Incoming,
    connection: Option<EngineConnection>,
    idle: Option<IdleConnections>,
}

impl EngineHttp {
    pub fn new(url: EngineUrl, settings: ServerSettings) -> Self {
        Self { url, settings, tls: Arc::default(), idle: None, address: None }
    }

    /// Connects to this address instead of looking up the host.
    #[must_use]
    pub fn at(self, address: IpAddr) -> Self {
        Self { address: Some(address), ..self }
    }

    /// As [`Self::new`], for a server whose connections are used again.
    pub fn keeping_connections(url: EngineUrl, settings: ServerSettings) -> Self {
        Self { idle: Some(Arc::default()), ..Self::new(url, settings) }
    }

    pub fn url(&self) -> &EngineUrl {
        &self.url
    }

    /// Asks for a resource and reads the whole answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn get(&self, path: &str) -> Result<String, HttpFailure> {
        self.whole(Method::GET, path, String::new(), ASK_TIMEOUT).await
    }

    /// Asks for a resource; also returns the head of the answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn get_with_head(&self, path: &str) -> Result<(HeaderMap, String), HttpFailure> {
        let (head, body) = self.send(Method::GET, path, String::new()).await?.into_parts();
        Ok((head.headers, body.text().await?))
    }

    /// Sends JSON and reads the whole answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<String, HttpFailure> {
        self.whole(Method::POST, path, body.to_string(), ASK_TIMEOUT).await
    }

    /// As [`Self::post`], with time for the other side to load a model or a library.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn post_patiently(&self, path: &str, body: &Value) -> Result<String, HttpFailure> {
        self.whole(Method::POST, path, body.to_string(), LOAD_TIMEOUT).await
    }

    async fn whole(
        &self,
        method: Method,
        path: &str,
        body: String,
        longest: Duration,
    ) -> Result<String, HttpFailure> {
        let work = async { self.send(method, path, body).await?.into_body().text().await };
        timeout(longest, work).await.unwrap_or(Err(HttpFailure::Timeout))
    }

    /// Sends JSON and returns the events of the answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn stream(&self, path: &str, body: &Value) -> Result<SseStream, HttpFailure> {
        let response = self.send(Method::POST, path, body.to_string()).await?;
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content_type = content_type.unwrap_or_default().to_ascii_lowercase();
        let (body, parser, events) = (response.into_body(), SseParser::default(), VecDeque::new());
        Ok(SseStream { content_type, body, parser, events })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Response<AnswerBody>, HttpFailure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url.base))
            .header(HOST, self.url.authority())
            .header(ACCEPT, "application/json, text/event-stream")
            .header(USER_AGENT, concat!("llmctl/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.settings.key {
            request = request.header(AUTHORIZATION, key.header());
        }
        let request = request.body(body).map_err(|error| HttpFailure::Malformed(error.to_string()))?;
        let response = self.exchange(request).await?;
        match response.status() {
            StatusCode::OK => Ok(response),
            status => {
                let retry_after = retry_after(&response);
                let text = timeout(ASK_TIMEOUT, response.into_body().text()).await;
                let text = text.unwrap_or(Ok(String::new())).unwrap_or_default();
                let message = error_text(&text, self.settings.key.as_ref());
                Err(HttpFailure::Status { code: status.as_u16(), message, retry_after })
            }
        }
    }

    /// Sends a request as it is, without a key, and returns the answer of whatever status.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn request(&self, request: Request<String>) -> Result<HttpAnswer, HttpFailure> {
        let (parts, body) = self.exchange(request).await?.into_parts();
        Ok(HttpAnswer { status: parts.status, headers: parts.headers, body })
    }

    async fn exchange(&self, request: Request<String>) -> Result<Response<AnswerBody>, HttpFailure> {
        let mut connection = self.connection().await?;
        let response = connection.sender.send_request(request).await.map_err(HttpFailure::broken)?;
        let idle = self.idle.clone();
        Ok(response.map(|body| AnswerBody { body, connection: Some(connection), idle }))
    }

    /// Returns a connection that the server has left open, else a new one.
    async fn connection(&self) -> Result<EngineConnection, HttpFailure> {
        while let Some(mut kept) = self.idle.as_ref().and_then(|idle| idle.lock().pop()) {
            if kept.sender.ready().await.is_ok() {
                return Ok(kept);
            }
        }
        let stream = self.connect().await.map_err(|error| HttpFailure::Unreachable(error.to_string()))?;
        let (sender, driver) = handshake(TokioIo::new(stream)).await.map_err(HttpFailure::broken)?;
        let driver = tokio::spawn(async move {
            let _ = driver.await; // the request reports its errors
        });
        Ok(EngineConnection { sender, driver })
    }

    async fn connect(&self) -> io::Result<Box<dyn Wire>> {
        let connecting = async {
            let stream = match self.address {
                Some(address) => TcpStream::connect((address, self.url.port)).await?,
                None => TcpStream::connect((self.url.host.as_str(), self.url.port)).await?,
            };
            stream.set_nodelay(true)?;
            SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))?;
            let connection: Box<dyn Wire> = match self.url.is_https {
                false => Box::new(stream),
                true => Box::new(secure(self.tls_config()?, &self.url.host, stream).await?),
            };
            io::Result::Ok(connection)
        };
        timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Returns the TLS settings, made with the first connection. A failure is not kept: the file may be mended.
    fn tls_config(&self) -> io::Result<Arc<ClientConfig>> {
        if let Some(config) = self.tls.get() {
            return Ok(Arc::clone(config));
        }
        let config = Arc::new(self.settings.trust.config()?);
        Ok(Arc::clone(self.tls.get_or_init(|| config)))
    }
}

/// Returns the pause that an answer asks for, in seconds.
fn retry_after(response: &Response<AnswerBody>) -> Option<Duration> {
    let value = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    Duration::try_from_secs_f64(value.trim().parse().ok()?).ok()
}

/// The events of an answer. Dropping it closes the connection.
pub struct SseStream {
    /// In lower case; empty if the server does not say.
    pub content_type: String,
    body: AnswerBody,
    parser: SseParser,
    events: VecDeque<String>,
}

impl SseStream {
    /// Returns the data of the next event; `None` at the end of the answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn next(&mut self) -> Result<Option<String>, HttpFailure> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let Some(bytes) = self.body.next_part().await? else { return Ok(None) };
            let events = self.parser.push(&bytes).map_err(HttpFailure::Malformed)?;
            self.events.extend(events.into_iter().filter_map(|event| event.data));
        }
    }

    /// Reads an answer that is no stream of events.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn whole(self) -> Result<String, HttpFailure> {
        self.body.text().await
    }
}

/// An answer of any status. Dropping it closes the connection.
pub struct HttpAnswer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: AnswerBody,
}

impl HttpAnswer {
    /// Returns the events that the next bytes of the body complete, maybe none; `None` at its end. `parser` has the body's earlier bytes.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn events(&mut self, parser: &mut SseParser) -> Result<Option<Vec<SseEvent>>, HttpFailure> {
        let part = self.body.next_part().await?;
        part.map(|bytes| parser.push(&bytes).map_err(HttpFailure::Malformed)).transpose()
    }

    /// Reads the whole body.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn text(self) -> Result<String, HttpFailure> {
        self.body.text().await
    }

    /// As [`Self::text`], of bytes, of which there may be `most`.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn bytes(self, most: usize) -> Result<Vec<u8>, HttpFailure> {
        self.body.bytes(most).await
    }
}

impl AnswerBody {
    async fn next_part(&mut self) -> Result<Option<Vec<u8>>, HttpFailure> {
        loop {
            let frame = std::future::poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await;
            match frame.transpose().map_err(HttpFailure::broken)? {
                None => {
                    if let (Some(idle), Some(connection)) = (&self.idle, self.connection.take()) {
                        idle.lock().push(connection);
                    }
                    return Ok(None);
                }
                Some(frame) => match frame.into_data() {
                    Ok(bytes) => return Ok(Some(bytes.to_vec())),
                    Err(_) => continue, // trailers
                },
            }
        }
    }

    async fn text(self) -> Result<String, HttpFailure> {
        Ok(String::from_utf8_lossy(&self.bytes(MAX_ANSWER_BYTES).await?).into_owned())
    }

    async fn bytes(mut self, most: usize) -> Result<Vec<u8>, HttpFailure> {
        let mut bytes = Vec::new();
        while let Some(part) = self.next_part().await? {
            bytes.extend_from_slice(&part);
            if bytes.len() > most {
                return Err(HttpFailure::Malformed(format!("more than {most} bytes")));
            }
        }
        Ok(bytes)
    }
}

/// Returns the message of an error's body, in one of the forms that engines use. The key is hidden before the text is cut, because
/// a part of it would stay.
pub fn error_text(body: &str, key: Option<&ServerKey>) -> String {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    let texts = [&value["error"]["message"], &value["message"], &value["detail"], &value["error"]];
    let said = texts.into_iter().find_map(Value::as_str).unwrap_or(body);
    let said = key.map_or(said.to_owned(), |key| key.hidden_in(said));
    let words: Vec<&str> = said.split_whitespace().collect();
    words.join(" ").chars().filter(|c| !c.is_control()).take(MAX_SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    #[test]
    fn no_part_of_a_key_is_in_an_error() {
        let key = ServerKey::new("sk-very-secret").expect("a key");
        let before = "x".repeat(MAX_SHOWN - 4);
        let body = json!({"error": {"message": format!("{before} sk-very-secret")}}).to_string();
        assert_eq!(error_text(&body, Some(&key)), format!("{before} ***"));
        assert_eq!(error_text("wrong  key\n", None), "wrong key");
    }

    #[test]
    fn a_server_has_one_tls_configuration() {
        let of = |trust| {
            let settings = ServerSettings { key: None, trust: TlsTrust(trust) };
            EngineHttp::new("https://host".parse().expect("an address"), settings)
        };
        let http = of(None);
        let (first, second) = (http.tls_config().expect("made"), http.clone().tls_config().expect("made"));
        assert!(Arc::ptr_eq(&first, &second), "a TLS session can be resumed");
        assert_eq!(first.alpn_protocols, [b"http/1.1".to_vec()]);
        let folder = tempfile::tempdir().expect("a folder");
        let missing: PathBuf = folder.path().join("missing.pem");
        let error = of(Some(missing)).tls_config().expect_err("no file");
        assert!(error.to_string().contains("missing.pem"), "{error}");
    }
}
