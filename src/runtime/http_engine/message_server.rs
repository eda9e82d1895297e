//! A server that takes messages, for callers without an async runtime.
//!
//! Invariant: dropping a stream closes its connection, so that the server generates for no reader that has
//! gone.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use serde_json::Value;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::TaskThread;
use super::address::EndpointUrl;
use super::http::{EngineHttp, HttpFailure, ServerSettings};
use crate::client::NotYet;
use llmctl_base::error::Result;

/// Most bytes of an answer's events: some hundred for each of a million tokens.
const MAX_STREAM_BYTES: usize = 256 << 20;

/// Silence after which an answer is given up: a model may have to be loaded there, and a long prompt to be computed.
const LONGEST_SILENCE: Duration = Duration::from_secs(20 * 60);

/// A server that takes messages.
pub struct MessageServer {
    http: EngineHttp,
    tasks: TaskThread,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MessagePart {
    /// Data of an event.
    Event(String),
    /// The whole answer of a server that does not stream.
    Whole { content_type: String, text: String },
    /// The answer has no more parts.
    End,
}

/// The parts of an answer as they come; it ends with [`MessagePart::End`] or a failure.
pub struct MessageStream {
    parts: Receiver<Result<MessagePart, HttpFailure>>,
    task: AbortHandle,
}

impl Drop for MessageStream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl MessageServer {
    /// Creates a client. It connects with each request.
    ///
    /// # Errors
    /// [`Backend`](llmctl_base::Error::Backend) if the system gives no thread.
    pub fn new(url: &EndpointUrl, settings: ServerSettings) -> Result<Self> {
        Ok(Self { http: EngineHttp::new(url.address().clone(), settings), tasks: TaskThread::start()? })
    }

    /// Asks for a resource and reads the whole answer.
    ///
    /// # Errors
    /// [`HttpFailure`], inside; [`EngineGone`](llmctl_base::Error::EngineGone) if the thread has ended.
    pub fn get(&self, path: &'static str) -> Result<Result<String, HttpFailure>> {
        let http = self.http.clone();
        self.tasks.ask(async move { http.get(path).await })
    }

    /// Sends JSON. The answer's parts come with [`MessageStream::next_timeout`].
    pub fn stream(&self, path: &'static str, body: Value) -> MessageStream {
        let (sender, parts) = mpsc::channel();
        let http = self.http.clone();
        let task = self.tasks.handle.spawn(async move {
            let end = pass_on(&http, path, &body, &sender, LONGEST_SILENCE).await;
            let _ = sender.send(end.map(|()| MessagePart::End)); // the reader may have gone
        });
        MessageStream { parts, task: task.abort_handle() }
    }
}

impl MessageStream {
    /// Waits a little for the next part.
    ///
    /// # Errors
    /// [`NotYet`]; the stream continues.
    pub fn next_timeout(&self, timeout: Duration) -> Result<Result<MessagePart, HttpFailure>, NotYet> {
        match self.parts.recv_timeout(timeout) {
            Ok(part) => Ok(part),
            Err(RecvTimeoutError::Timeout) => Err(NotYet),
            Err(RecvTimeoutError::Disconnected) => Ok(Ok(MessagePart::End)),
        }
    }
}

async fn pass_on(
    http: &EngineHttp,
    path: &str,
    body: &Value,
    parts: &Sender<Result<MessagePart, HttpFailure>>,
    silence: Duration,
) -> Result<(), HttpFailure> {
    let mut stream = timeout(silence, http.stream(path, body)).await.unwrap_or(Err(HttpFailure::Timeout))?;
    let is_document =
        ["application/json", "text/html"].iter().any(|kind| stream.content_type.starts_with(kind));
    if is_document {
        let content_type = stream.content_type.clone();
        let text = timeout(silence, stream.whole()).await.unwrap_or(Err(HttpFailure::Timeout))?;
        let _ = parts.send(Ok(MessagePart::Whole { content_type, text })); // as below
        return Ok(());
    }
    let mut num_bytes = 0;
    while let Some(event) = timeout(silence, stream.next()).await.unwrap_or(Err(HttpFailure::Timeout))? {
        num_bytes += event.len();
        if num_bytes > MAX_STREAM_BYTES {
            return Err(HttpFailure::Malformed("more than 256 MiB".to_owned()));
        }
        if parts.send(Ok(MessagePart::Event(event))).is_err() {
            break; // the reader has gone
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    /// Says what becomes of a request to a server that sends `said` and nothing more.
    fn failure_after(said: &'static str) -> Result<(), HttpFailure> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url: EndpointUrl =
            format!("http://{}", listener.local_addr().expect("a port")).parse().expect("a URL");
        let (done, is_done) = mpsc::channel::<()>();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            assert!(stream.read(&mut [0; 4096]).expect("a request") > 0);
            stream.write_all(said.as_bytes()).expect("an open connection");
            let _ = is_done.recv(); // ends when the client has given up
        });
        let tasks = TaskThread::start().expect("a thread");
        let http = EngineHttp::new(url.address().clone(), ServerSettings::default());
        let (sender, _parts) = mpsc::channel();
        let silence = Duration::from_millis(300);
        let asked = async move { pass_on(&http, "/chat/completions", &Value::Null, &sender, silence).await };
        let end = tasks.ask(asked).expect("a result");
        drop(done);
        server.join().expect("it ends");
        end
    }

    #[test]
    fn a_server_that_stalls_is_given_up() {
        assert_eq!(failure_after(""), Err(HttpFailure::Timeout));
        let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n";
        assert_eq!(failure_after(head), Err(HttpFailure::Timeout));
    }
}
