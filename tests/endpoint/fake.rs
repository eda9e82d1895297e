//! A server that takes messages, for tests: answers what it is told to, in the forms of real servers, and records what it is asked.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Condvar;

use crate::common::fake_http::{FakeRequest, listen, read_request, write_chunk, write_events, write_plain};
use crate::common::prelude::*;

/// A request for an answer.
#[derive(Debug, Clone)]
pub struct Asked {
    pub key: Option<String>,
    pub body: Value,
}

impl Asked {
    /// Roles and texts of the messages.
    pub fn messages(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let messages = self.body["messages"].as_array().expect("messages");
        messages.iter().map(|message| (text(&message["role"]), text(&message["content"]))).collect()
    }
}

/// An answer to one request.
#[derive(Debug, Clone)]
pub enum Deed {
    /// Sends these events, then the end of the stream.
    Events(Vec<Value>),
    /// Sends these events, then closes the connection.
    Break(Vec<Value>),
    /// Sends these events, then waits until the client closes the connection.
    Wait(Vec<Value>),
    /// Sends a status, headers and a body.
    Plain(u16, &'static str, String),
}

/// A part of an answer.
pub fn part(delta: Value) -> Value {
    json!({"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
}

/// The end of an answer, and its counts.
pub fn end(reason: &str) -> [Value; 2] {
    [
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}}),
    ]
}

/// An answer of these texts.
pub fn saying(texts: &[&str]) -> Deed {
    let parts = texts.iter().map(|text| part(json!({"content": text})));
    Deed::Events(parts.chain(end("stop")).collect())
}

#[derive(Default)]
struct State {
    deeds: VecDeque<Deed>,
    asked: Vec<Asked>,
    num_closed: usize,
    num_waiting: usize,
    /// The list of models is refused with this status.
    list_refusal: Option<u16>,
}

/// A listening fake. It listens until the process ends.
#[derive(Clone)]
pub struct FakeServer {
    pub url: String,
    models: Arc<str>,
    state: Arc<(Mutex<State>, Condvar)>,
}

impl FakeServer {
    /// Starts a fake with one model, `tiny`.
    pub fn start(deeds: impl IntoIterator<Item = Deed>) -> Self {
        Self::with_models(&[("tiny", "someone")], deeds)
    }

    /// Starts a fake that lists these models with their owners.
    pub fn with_models(models: &[(&str, &str)], deeds: impl IntoIterator<Item = Deed>) -> Self {
        let models: Vec<Value> =
            models.iter().map(|(id, owner)| json!({"id": id, "owned_by": owner})).collect();
        let state = State { deeds: deeds.into_iter().collect(), ..State::default() };
        let fake = Self {
            url: String::new(),
            models: json!({"object": "list", "data": models}).to_string().into(),
            state: Arc::new((Mutex::new(state), Condvar::new())),
        };
        let serving = fake.clone();
        let address = listen(move |stream| serving.serve(stream));
        Self { url: format!("http://{address}"), ..fake }
    }

    /// Refuses the list of models with this status from now on.
    pub fn refuse_list(&self, code: u16) {
        self.change(|state| state.list_refusal = Some(code));
    }

    /// All requests for answers so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.state.0.lock().expect("free").asked.clone()
    }

    /// Waits until so many answers wait for their reader.
    pub fn wait_for_waiting(&self, count: usize) {
        self.wait_until("no answer waits", |state| state.num_waiting >= count);
    }

    /// Waits until the client has closed so many waiting answers.
    pub fn wait_for_closed(&self, count: usize) {
        self.wait_until("the client keeps its connection", |state| state.num_closed >= count);
    }

    fn wait_until(&self, complaint: &str, is_so: impl Fn(&State) -> bool) {
        let (state, changed) = &*self.state;
        let guard = state.lock().expect("free");
        let waited = changed.wait_timeout_while(guard, Duration::from_secs(120), |state| !is_so(state));
        assert!(!waited.expect("free").1.timed_out(), "{complaint}");
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.0.lock().expect("free"));
        self.state.1.notify_all();
    }

    /// Answers one request.
    pub fn serve(&self, mut stream: impl Read + Write) {
        let Some(FakeRequest { path, key, body }) = read_request(&mut stream) else { return };
        let json = "Content-Type: application/json";
        let list_refusal = self.state.0.lock().expect("free").list_refusal;
        let _ = match (path.as_str(), list_refusal) {
            ("/v1/models", Some(code)) => write_plain(&mut stream, code, json, "{\"error\": \"no list\"}"),
            ("/v1/models", None) => write_plain(&mut stream, 200, json, &self.models),
            ("/v1/chat/completions", _) => self.answer(&mut stream, key, &body),
            _ => write_plain(&mut stream, 404, "Content-Type: text/html", "<html>not here</html>"),
        };
    }

    fn answer(
        &self,
        stream: &mut (impl Read + Write),
        key: Option<String>,
        body: &str,
    ) -> std::io::Result<()> {
        let body = serde_json::from_str(body).expect("JSON");
        let mut deed = None;
        self.change(|state| {
            state.asked.push(Asked { key, body });
            deed = state.deeds.pop_front();
        });
        match deed.unwrap_or_else(|| saying(&["done"])) {
            Deed::Plain(code, headers, text) => write_plain(stream, code, headers, &text),
            Deed::Events(all) => {
                events(stream, &all)?;
                write_chunk(stream, "data: [DONE]\n\n")?;
                write_chunk(stream, "")
            }
            Deed::Break(all) => events(stream, &all),
            Deed::Wait(all) => {
                events(stream, &all)?;
                self.change(|state| state.num_waiting += 1);
                let _ = stream.read(&mut [0]); // until the client closes
                self.change(|state| state.num_closed += 1);
                Ok(())
            }
        }
    }
}

fn events(stream: &mut impl Write, all: &[Value]) -> std::io::Result<()> {
    write_events(stream, all.iter().map(|value| format!("data: {value}\n\n")))
}

/// A fake behind TLS, with the certificate of `server.pem` for 127.0.0.1.
pub fn behind_tls(fake: &FakeServer) -> String {
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned, crypto::ring};

    const PEM: &[u8] = include_bytes!("server.pem");
    let chain = CertificateDer::pem_slice_iter(PEM).collect::<Result<Vec<_>, _>>().expect("a certificate");
    let key = PrivateKeyDer::from_pem_slice(PEM).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    let config = Arc::new(config.with_single_cert(chain, key).expect("a certificate and its key"));
    let fake = fake.clone();
    let address = listen(move |stream| {
        let connection = ServerConnection::new(Arc::clone(&config)).expect("a connection");
        let mut stream: StreamOwned<ServerConnection, TcpStream> = StreamOwned::new(connection, stream);
        fake.serve(&mut stream);
        stream.conn.send_close_notify();
        let _ = stream.flush(); // the client may have gone
    });
    format!("https://{address}")
}
