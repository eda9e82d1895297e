//! A server that takes messages, for tests: answers what it is told to, in the forms of real servers, and records what it is asked.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

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
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let models: Vec<Value> =
            models.iter().map(|(id, owner)| json!({"id": id, "owned_by": owner})).collect();
        let fake = Self {
            url: format!("http://{}", listener.local_addr().expect("bound")),
            models: json!({"object": "list", "data": models}).to_string().into(),
            state: Arc::new((
                Mutex::new(State { deeds: deeds.into_iter().collect(), ..State::default() }),
                Condvar::new(),
            )),
        };
        let serving = fake.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let fake = serving.clone();
                thread::spawn(move || fake.serve(stream));
            }
        });
        fake
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
        let Some((path, key, body)) = request(&mut stream) else { return };
        let _ = match path.as_str() {
            "/v1/models" => plain(&mut stream, 200, "Content-Type: application/json", &self.models),
            "/v1/chat/completions" => self.answer(&mut stream, key, &body),
            _ => plain(&mut stream, 404, "Content-Type: text/html", "<html>not here</html>"),
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
            Deed::Plain(code, headers, text) => plain(stream, code, headers, &text),
            Deed::Events(all) => {
                events(stream, &all)?;
                write!(stream, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
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

/// Reads a request: its path, its key and its body.
fn request(stream: &mut impl Read) -> Option<(String, Option<String>, String)> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let (mut length, mut key) = (0, None);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim().split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => key = value.trim().strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, key, String::from_utf8(body).ok()?))
}

fn plain(stream: &mut impl Write, code: u16, headers: &str, text: &str) -> std::io::Result<()> {
    let length = text.len();
    write!(stream, "HTTP/1.1 {code} X\r\n{headers}\r\nContent-Length: {length}\r\n\r\n{text}")?;
    stream.flush()
}

fn events(stream: &mut impl Write, all: &[Value]) -> std::io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    for value in all {
        let event = format!("data: {value}\n\n");
        write!(stream, "{:x}\r\n{event}\r\n", event.len())?;
        stream.flush()?;
    }
    Ok(())
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
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let fake = fake.clone();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (fake, config) = (fake.clone(), Arc::clone(&config));
            thread::spawn(move || {
                let connection = ServerConnection::new(config).expect("a connection");
                let mut stream: StreamOwned<ServerConnection, TcpStream> =
                    StreamOwned::new(connection, stream);
                fake.serve(&mut stream);
                stream.conn.send_close_notify();
                let _ = stream.flush(); // the client may have gone
            });
        }
    });
    format!("https://{address}")
}
