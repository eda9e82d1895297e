//! HTTP/1.1 requests to one engine, whole or as a stream of server-sent events.
//!
//! Invariant: each request has a connection of its own, which is closed when its answer is dropped; engines end a
//! generation when its connection closes.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::handshake;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::address::EngineUrl;
use super::sse::SseParser;

/// Longest wait for a connection, and for a whole answer to a short question.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ASK_TIMEOUT: Duration = Duration::from_secs(20);

/// Most bytes of an answer that is read whole.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Bytes of an error message that are shown.
const SHOWN_BYTES: usize = 400;

/// Reason why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpFailure {
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("the connection ended before the answer: {0}")]
    Broken(String),
    #[error("it answers {0}: {1}")]
    Status(u16, String),
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

/// Requests to one engine.
#[derive(Debug, Clone)]
pub struct EngineHttp {
    url: EngineUrl,
    key: Option<String>,
}

/// The task that drives a connection; the connection is closed when this is dropped.
struct EngineConnection(JoinHandle<()>);

impl Drop for EngineConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl EngineHttp {
    /// Creates a client that sends `key` as a bearer token.
    pub fn new(url: EngineUrl, key: Option<String>) -> Self {
        Self { url, key }
    }

    pub fn url(&self) -> &EngineUrl {
        &self.url
    }

    /// Asks for a resource and reads the whole answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn get(&self, path: &str) -> Result<String, HttpFailure> {
        self.whole(Method::GET, path, String::new()).await
    }

    /// Sends JSON and reads the whole answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<String, HttpFailure> {
        self.whole(Method::POST, path, body.to_string()).await
    }

    async fn whole(&self, method: Method, path: &str, body: String) -> Result<String, HttpFailure> {
        let work = async {
            let (response, _connection) = self.send(method, path, body).await?;
            read_text(response.into_body()).await
        };
        timeout(ASK_TIMEOUT, work).await.unwrap_or(Err(HttpFailure::Timeout))
    }

    /// Sends JSON and returns the events of the answer.
    ///
    /// # Errors
    /// [`HttpFailure`].
    pub async fn stream(&self, path: &str, body: &Value) -> Result<SseStream, HttpFailure> {
        let (response, connection) = self.send(Method::POST, path, body.to_string()).await?;
        let (body, parser, events) = (response.into_body(), SseParser::default(), VecDeque::new());
        Ok(SseStream { body, parser, events, _connection: connection })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<(Response<Incoming>, EngineConnection), HttpFailure> {
        let stream = self.connect().await.map_err(|error| HttpFailure::Unreachable(error.to_string()))?;
        let (mut sender, driver) = handshake(TokioIo::new(stream)).await.map_err(HttpFailure::broken)?;
        let connection = EngineConnection(tokio::spawn(async move {
            let _ = driver.await; // the request reports its errors
        }));
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url.base))
            .header(HOST, self.url.authority())
            .header(ACCEPT, "application/json, text/event-stream")
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(body).map_err(|error| HttpFailure::Malformed(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(HttpFailure::broken)?;
        match response.status() {
            StatusCode::OK => Ok((response, connection)),
            status => {
                let text = timeout(ASK_TIMEOUT, read_text(response.into_body())).await;
                let text = text.unwrap_or(Ok(String::new())).unwrap_or_default();
                Err(HttpFailure::Status(status.as_u16(), error_text(&text)))
            }
        }
    }

    async fn connect(&self) -> io::Result<TcpStream> {
        let connecting = TcpStream::connect((self.url.host.as_str(), self.url.port));
        let stream = timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| io::ErrorKind::TimedOut)??;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// The events of an answer. Dropping it closes the connection.
pub struct SseStream {
    body: Incoming,
    parser: SseParser,
    events: VecDeque<String>,
    _connection: EngineConnection,
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
            let Some(bytes) = next_part(&mut self.body).await? else { return Ok(None) };
            self.events.extend(self.parser.push(&bytes).map_err(HttpFailure::Malformed)?);
        }
    }
}

async fn next_part(body: &mut Incoming) -> Result<Option<Vec<u8>>, HttpFailure> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        match frame.transpose().map_err(HttpFailure::broken)? {
            None => return Ok(None),
            Some(frame) => match frame.into_data() {
                Ok(bytes) => return Ok(Some(bytes.to_vec())),
                Err(_) => continue, // trailers
            },
        }
    }
}

async fn read_text(mut body: Incoming) -> Result<String, HttpFailure> {
    let mut bytes = Vec::new();
    while let Some(part) = next_part(&mut body).await? {
        bytes.extend_from_slice(&part);
        if bytes.len() > MAX_ANSWER_BYTES {
            return Err(HttpFailure::Malformed("more than 16 MiB".to_owned()));
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the message of an error's body, in one of the forms that engines use.
pub fn error_text(body: &str) -> String {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    let texts = [&value["error"]["message"], &value["message"], &value["detail"], &value["error"]];
    let said = texts.into_iter().find_map(Value::as_str).unwrap_or(body).trim();
    said.chars().take(SHOWN_BYTES).collect()
}
