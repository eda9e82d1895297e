//! A client of few words: bytes in, a response out, so that tests decide what is sent and when.

use std::io::Write;

use crate::common::prelude::*;

/// No test waits longer for a byte.
const PATIENCE: Duration = Duration::from_secs(60);

/// A response as it came.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case; the last of each.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// An error in OpenAI's envelope.
    #[track_caller]
    pub fn check(&self, status: u16, code: &str) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/json", "{self:?}");
        let error = &self.json()["error"];
        assert_eq!(error["code"], code, "{self:?}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{self:?}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{self:?}");
        let says_when = self.header("retry-after").parse::<u64>().is_ok_and(|seconds| seconds > 0);
        assert_eq!(says_when, status == 429 || status == 503, "{self:?}");
        self
    }
}

/// A connection. `S` is a TCP stream or one of the file system.
pub struct Client<S> {
    stream: BufReader<S>,
}

pub fn connect(address: SocketAddr) -> Client<TcpStream> {
    let stream = TcpStream::connect(address).expect("somebody listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    stream.set_write_timeout(Some(PATIENCE)).expect("a time");
    stream.set_nodelay(true).expect("an option");
    Client { stream: BufReader::new(stream) }
}

/// One request on a connection of its own.
pub fn ask(address: SocketAddr, head: &str, body: &str) -> Reply {
    connect(address).ask(head, body)
}

pub fn get(address: SocketAddr, path: &str) -> Reply {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}"), "")
}

impl Client<TcpStream> {
    /// Closes the sending side. Answers can still be read.
    pub fn end_asking(&mut self) {
        self.stream.get_mut().shutdown(std::net::Shutdown::Write).expect("it is open");
    }
}

impl<S: Read + Write> Client<S> {
    pub fn new(stream: S) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: &str) {
        self.stream.get_mut().write_all(bytes.as_bytes()).expect("the server reads");
    }

    /// To somebody who may have closed already.
    pub fn try_send(&mut self, bytes: &str) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes.as_bytes())
    }

    /// `head` without its end; the length of a body is added.
    pub fn ask(&mut self, head: &str, body: &str) -> Reply {
        let length =
            if body.is_empty() { String::new() } else { format!("\r\nContent-Length: {}", body.len()) };
        self.send(&format!("{head}{length}\r\n\r\n{body}"));
        self.reply()
    }

    pub fn reply(&mut self) -> Reply {
        let reply = self.head();
        let body = match reply.header("content-length").parse() {
            Ok(length) => self.exactly(length),
            Err(_) if reply.header("transfer-encoding") == "chunked" => {
                let mut body = String::new();
                while let Some(chunk) = self.chunk() {
                    body.push_str(&chunk);
                }
                body
            }
            Err(_) => String::new(),
        };
        Reply { body, ..reply }
    }

    /// Status and headers.
    pub fn head(&mut self) -> Reply {
        let status_line = self.line();
        let status = status_line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("{status_line:?} is no status line"));
        let mut headers = BTreeMap::new();
        loop {
            let line = self.line();
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_lowercase(), value.to_owned());
        }
        Reply { status, headers, body: String::new() }
    }

    /// The next chunk of a body; nothing at its end.
    pub fn chunk(&mut self) -> Option<String> {
        let length = usize::from_str_radix(&self.line(), 16).expect("a chunk's length");
        let chunk = self.exactly(length);
        self.line();
        (length > 0).then_some(chunk)
    }

    /// Whether the server has closed the connection, be it with a reset; reads what was left.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a line");
        line.trim_end_matches(['\r', '\n']).to_owned()
    }

    fn exactly(&mut self, length: usize) -> String {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).expect("the whole body");
        String::from_utf8(bytes).expect("UTF-8")
    }
}
