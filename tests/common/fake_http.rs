//! Parts of fake HTTP servers: they accept connections, read one request of each, and write an answer.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// A request, as far as fakes look at it.
#[derive(Debug, Clone)]
pub struct FakeRequest {
    pub path: String,
    /// The bearer token.
    pub key: Option<String>,
    pub body: String,
}

/// Accepts connections until the process ends, each served by a thread of its own. Returns the address.
pub fn listen(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    address
}

/// Reads a request; `None` if the client leaves before its end.
pub fn read_request(stream: &mut impl Read) -> Option<FakeRequest> {
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
    Some(FakeRequest { path, key, body: String::from_utf8(body).ok()? })
}

/// Writes a whole answer. `headers` are lines with line ends between them.
pub fn write_plain(stream: &mut impl Write, code: u16, headers: &str, text: &str) -> Result<()> {
    let length = text.len();
    write!(stream, "HTTP/1.1 {code} X\r\n{headers}\r\nContent-Length: {length}\r\n\r\n{text}")?;
    stream.flush()
}

/// Writes the head of a stream of events, and these events.
pub fn write_events(
    stream: &mut impl Write,
    events: impl IntoIterator<Item = impl AsRef<str>>,
) -> Result<()> {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    events.into_iter().try_for_each(|event| write_chunk(stream, event.as_ref()))
}

/// Writes more of a stream; an empty chunk ends it.
pub fn write_chunk(stream: &mut impl Write, text: &str) -> Result<()> {
    write!(stream, "{:x}\r\n{text}\r\n", text.len())?;
    stream.flush()
}
