//! Connections: their number, their time limits, and what their requests can learn about them.
//!
//! A connection is idle, or receives the head of a request, or has a request under way. A new connection
//! beyond the limit closes the one that has been idle longest; it is refused only if none is idle. So idle
//! and slow connections cannot keep others out.
//!
//! Invariants: at most `max_connections` at a time, not counting those that are closing; a time limit never
//! ends a request under way, unless its client stops reading.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::Version;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::half_open::{ClientEnd, HalfOpen, PeerProbe, QUESTION};

/// Limits on the number of connections and on their pauses.
#[derive(Debug, Clone)]
pub struct ConnectionLimits {
    pub max_connections: usize,
    /// Time from the first byte of a request's head to its last.
    pub header_timeout: Duration,
    /// Time between requests, before the first one, and while a response is not read.
    pub idle_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(75),
        }
    }
}

/// Most bytes of a head that are searched for its headers.
const MAX_SCANNED: usize = 64 << 10;

/// The client's end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    Tcp(SocketAddr),
    /// At the port that Ollama's clients look for.
    Ollama(SocketAddr),
    /// A socket in the file system.
    Local,
}

/// All open connections.
#[derive(Debug)]
pub struct Connections {
    limits: ConnectionLimits,
    table: Mutex<ConnectionTable>,
    /// Notified when the last one closes.
    emptied: Notify,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    num_open: usize,
    /// The idle ones, in the order in which they became idle.
    idle: BTreeMap<u64, Arc<Notify>>,
    /// Number of times that a connection became idle.
    clock: u64,
}

impl Connections {
    pub fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default(), emptied: Notify::new() })
    }

    pub fn limits(&self) -> &ConnectionLimits {
        &self.limits
    }

    /// Counts one more connection. The second value says whether an idle one was closed for it.
    ///
    /// # Errors
    /// [`Full`] if none is idle.
    pub fn enter(self: &Arc<Self>, peer: Peer) -> Result<(OpenConnection, bool), Full> {
        let mut table = self.table.lock();
        let makes_room = table.num_open >= self.limits.max_connections;
        if makes_room {
            let (_, longest_idle) = table.idle.pop_first().ok_or(Full)?;
            longest_idle.notify_one();
        }
        table.num_open += 1;
        drop(table);
        let state = Mutex::new(ConnectionState {
            activity: Activity::Idle(Instant::now()),
            head: Vec::new(),
            has_two_lengths: false,
            blocked: None,
            idle_key: 0,
            end: ClientEnd::Open,
        });
        let info = ConnectionInfo(Arc::new(Connection {
            peer,
            connections: Arc::clone(self),
            state,
            must_go: Arc::new(Notify::new()),
        }));
        info.become_idle();
        Ok((OpenConnection(info), makes_room))
    }

    pub fn num_open(&self) -> usize {
        self.table.lock().num_open
    }

    pub fn num_busy(&self) -> usize {
        let table = self.table.lock();
        table.num_open - table.idle.len().min(table.num_open)
    }

    /// Waits until no connection is open.
    pub async fn emptied(&self) {
        loop {
            let notified = self.emptied.notified();
            if self.num_open() == 0 {
                return;
            }
            notified.await;
        }
    }
}

/// All connections have a request under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// Counts a connection as open until it is dropped.
#[derive(Debug)]
pub struct OpenConnection(ConnectionInfo);

impl OpenConnection {
    pub fn info(&self) -> &ConnectionInfo {
        &self.0
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let connections = &self.0.0.connections;
        let idle_key = self.0.0.state.lock().idle_key;
        let mut table = connections.table.lock();
        table.idle.remove(&idle_key);
        table.num_open -= 1;
        if table.num_open == 0 {
            connections.emptied.notify_waiters();
        }
    }
}

/// A connection, for its requests; clones refer to the same one.
#[derive(Debug, Clone)]
pub struct ConnectionInfo(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    peer: Peer,
    connections: Arc<Connections>,
    state: Mutex<ConnectionState>,
    must_go: Arc<Notify>,
}

#[derive(Debug)]
struct ConnectionState {
    activity: Activity,
    /// Bytes of the head that is coming in, at most [`MAX_SCANNED`].
    head: Vec<u8>,
    /// The request under way states the length of its body twice.
    has_two_lengths: bool,
    /// Since when writes to the client are blocked; `None` if they are not.
    blocked: Option<Instant>,
    idle_key: u64,
    end: ClientEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activity {
    Idle(Instant),
    /// The head of a request is coming in.
    Head(Instant),
    Request {
        /// `None` while its body is coming in.
        whole_since: Option<Instant>,
        /// An interim response may go before the response: HTTP/1.1, and nothing of that is written.
        takes_interim: bool,
    },
}

/// Why a connection has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overdue {
    Idle,
    Header,
    Unread,
    /// Not overdue: it is to be looked after ([`ConnectionInfo::look`]).
    Look,
}

impl Overdue {
    pub fn reason(self) -> &'static str {
        match self {
            Overdue::Idle => "idle",
            Overdue::Header => "slow_header",
            Overdue::Unread => "unread_response",
            Overdue::Look => "gone",
        }
    }
}

impl ConnectionInfo {
    /// Returns the client's address; `None` for a Unix socket.
    pub fn address(&self) -> Option<IpAddr> {
        match self.0.peer {
            Peer::Tcp(address) | Peer::Ollama(address) => Some(address.ip()),
            Peer::Local => None,
        }
    }

    pub fn is_tcp(&self) -> bool {
        self.0.peer != Peer::Local
    }

    /// Returns whether it came to the port that Ollama's clients look for.
    pub fn is_ollamas(&self) -> bool {
        matches!(self.0.peer, Peer::Ollama(_))
    }

    /// Marks a request as under way until the value is dropped.
    pub fn begin_request(&self) -> Busy {
        let mut state = self.0.state.lock();
        state.activity = Activity::Request { whole_since: None, takes_interim: false };
        state.has_two_lengths = has_two_lengths(&std::mem::take(&mut state.head));
        self.0.connections.table.lock().idle.remove(&state.idle_key);
        drop(state);
        Busy(self.clone())
    }

    /// True if the head of the request under way has both Content-Length and Transfer-Encoding. hyper goes by
    /// the latter and hides the former; what a proxy went by is unknown. False for a request that arrived in
    /// one piece with an earlier one, after which hyper closes the connection all the same.
    pub fn has_two_lengths(&self) -> bool {
        self.0.state.lock().has_two_lengths
    }

    pub fn is_busy(&self) -> bool {
        matches!(self.0.state.lock().activity, Activity::Request { .. })
    }

    /// Records that the request under way has been received, body included.
    pub fn has_whole_request(&self, version: Version) {
        let mut state = self.0.state.lock();
        if let Activity::Request { whole_since, takes_interim } = &mut state.activity {
            (*whole_since, *takes_interim) = (Some(Instant::now()), version == Version::HTTP_11);
        }
    }

    /// The client's side has ended. Whether the client waits for an answer all the same, and whether it is to be asked.
    fn at_end(&self, watch: impl FnOnce() -> Option<PeerProbe>) -> (bool, bool) {
        let mut state = self.0.state.lock();
        let (asked, takes_interim) = match state.activity {
            Activity::Idle(_) => (None, false),
            Activity::Head(since) => (Some(since), false), // the request may have been read, and not begun yet
            Activity::Request { whole_since, takes_interim } => (whole_since, takes_interim),
        };
        let waits = state.end.waits(asked, watch);
        (waits, waits && takes_interim && state.end.asks())
    }

    /// No answer comes through to it.
    fn is_gone(&self) {
        self.0.state.lock().end = ClientEnd::Gone;
    }

    /// Looks after a client that has ended its side: whether it is there, and has been answered. True when nothing is to come.
    pub fn look(&self) -> bool {
        let mut state = self.0.state.lock();
        let is_answered = matches!(state.activity, Activity::Idle(_));
        state.end.look(is_answered);
        is_answered
    }

    /// Resolves when the connection is to make room.
    pub async fn must_go(&self) {
        self.0.must_go.notified().await;
    }

    /// When it will have to end if nothing happens, and why.
    pub fn deadline(&self) -> Option<(Instant, Overdue)> {
        let limits = self.0.connections.limits();
        let state = self.0.state.lock();
        let of_activity = match state.activity {
            Activity::Idle(since) => Some((after(since, limits.idle_timeout), Overdue::Idle)),
            Activity::Head(since) => Some((after(since, limits.header_timeout), Overdue::Header)),
            Activity::Request { .. } => None,
        };
        let of_looking = state.end.look_at().map(|at| (at, Overdue::Look));
        let of_writing = state.blocked.map(|since| (after(since, limits.idle_timeout), Overdue::Unread));
        of_activity.into_iter().chain(of_writing).chain(of_looking).min_by_key(|(at, _)| *at)
    }

    fn become_idle(&self) {
        let mut state = self.0.state.lock();
        let mut table = self.0.connections.table.lock();
        table.clock += 1;
        state.idle_key = table.clock;
        state.activity = Activity::Idle(Instant::now());
        table.idle.insert(state.idle_key, Arc::clone(&self.0.must_go));
    }

    fn has_read(&self, bytes: &[u8]) {
        let mut state = self.0.state.lock();
        if matches!(state.activity, Activity::Request { .. }) {
            return;
        }
        if matches!(state.activity, Activity::Idle(_)) {
            state.activity = Activity::Head(Instant::now());
        }
        let room = MAX_SCANNED.saturating_sub(state.head.len());
        state.head.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn has_written(&self, is_blocked: bool) {
        let mut state = self.0.state.lock();
        if let Activity::Request { takes_interim, .. } = &mut state.activity {
            *takes_interim = false;
        }
        state.blocked = if is_blocked { state.blocked.or_else(|| Some(Instant::now())) } else { None };
    }
}

impl fmt::Display for ConnectionInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.peer {
            Peer::Tcp(address) | Peer::Ollama(address) => address.fmt(f),
            Peer::Local => f.write_str("unix"),
        }
    }
}

/// Returns whether a head has both headers that state where its body ends.
fn has_two_lengths(head: &[u8]) -> bool {
    let lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.split(|byte| *byte == b':').next());
    let has = |wanted: &str| names.clone().any(|name| name.eq_ignore_ascii_case(wanted.as_bytes()));
    has("content-length") && has("transfer-encoding")
}

/// A time that is never reached.
const NEVER: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// Returns `since` plus `wait`; a time that is never reached if the clock cannot represent the sum.
pub fn after(since: Instant, wait: Duration) -> Instant {
    since.checked_add(wait).unwrap_or_else(|| since + NEVER)
}

/// Marks a request as under way; see [`ConnectionInfo::begin_request`].
#[derive(Debug)]
pub struct Busy(ConnectionInfo);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.become_idle();
    }
}

/// A stream that records reads and writes in its connection.
#[derive(Debug)]
pub struct Metered<S> {
    stream: S,
    info: ConnectionInfo,
}

impl<S> Metered<S> {
    pub fn new(stream: S, info: ConnectionInfo) -> Self {
        Self { stream, info }
    }

    /// Polls for a client that closed its sending side. No event wakes the reader of a silent client, so
    /// writes continue meanwhile.
    fn at_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>>
    where
        S: AsyncWrite + HalfOpen + Unpin,
    {
        let (waits, is_asked) = self.info.at_end(|| self.stream.watch());
        if is_asked {
            let written = Pin::new(&mut self.stream).poll_write(cx, QUESTION);
            if !matches!(written, Poll::Ready(Ok(count)) if count == QUESTION.len()) {
                self.info.is_gone();
                return Poll::Ready(Ok(()));
            }
        }
        if waits { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn note_write(&self, polled: &Poll<io::Result<usize>>) {
        self.info.has_written(polled.is_pending());
    }
}

impl<S: AsyncRead + AsyncWrite + HalfOpen + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let num_before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > num_before {
            self.info.has_read(&buffer.filled()[num_before..]);
        } else if matches!(polled, Poll::Ready(Ok(()))) && buffer.remaining() > 0 {
            return self.at_end(cx);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buffer);
        self.note_write(&polled);
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, buffers);
        self.note_write(&polled);
        polled
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(max_connections: usize) -> Arc<Connections> {
        Connections::new(ConnectionLimits { max_connections, ..ConnectionLimits::default() })
    }

    fn enter(connections: &Arc<Connections>) -> Result<(OpenConnection, bool), Full> {
        connections.enter(Peer::Local)
    }

    #[tokio::test]
    async fn the_longest_idle_makes_room_and_busy_ones_stay() {
        let connections = connections(3);
        let [first, second, third] = [(); 3].map(|()| enter(&connections).expect("room").0);
        let busy = first.info().begin_request();
        let again = second.info().begin_request();
        drop(again); // idle, but later than the third
        let (fourth, made_room) = enter(&connections).expect("the third goes");
        assert!(made_room);
        third.info().must_go().await;
        assert_eq!(
            (connections.num_open(), connections.num_busy()),
            (4, 2),
            "the third is on its way out, in nobody's way"
        );
        drop(third);
        let _all = [second.info().begin_request(), fourth.info().begin_request()];
        assert_eq!(enter(&connections).err(), Some(Full));
        drop(busy);
        assert!(enter(&connections).is_ok_and(|(_, made_room)| made_room));
        first.info().must_go().await;
    }

    #[test]
    fn deadlines_follow_what_moves() {
        let connections = connections(1);
        let (place, _) = enter(&connections).expect("room");
        let info = place.info();
        let why = |info: &ConnectionInfo| info.deadline().map(|(_, why)| why);
        assert_eq!(why(info), Some(Overdue::Idle));
        info.has_read(b"GET");
        let of_head = info.deadline();
        assert_eq!(why(info), Some(Overdue::Header));
        info.has_read(b" / HTTP/1.1");
        assert_eq!(info.deadline(), of_head, "drop by drop buys no time");
        let busy = info.begin_request();
        assert_eq!(info.deadline(), None, "a request takes as long as it takes");
        info.has_written(true);
        let of_writing = info.deadline();
        assert_eq!(why(info), Some(Overdue::Unread));
        info.has_written(true);
        assert_eq!(info.deadline(), of_writing, "since the first time");
        info.has_written(false);
        assert_eq!(info.deadline(), None);
        drop(busy);
        assert_eq!(why(info), Some(Overdue::Idle));
        drop(place);
        assert_eq!((connections.num_open(), connections.num_busy()), (0, 0));
    }

    #[test]
    fn two_lengths_are_found_in_the_head_alone() {
        let length = "Content-Length: 9\r\n";
        let chunked = "transfer-encoding:chunked\n";
        for (head, expected) in [
            (format!("POST / HTTP/1.1\r\n{length}{chunked}\r\n"), true),
            (format!("POST / HTTP/1.1\r\n{chunked}A: b\r\n{length}\r\n"), true),
            (format!("POST / HTTP/1.1\r\n{chunked}\r\n{length}"), false),
            (format!("POST / HTTP/1.1\r\nX-{length}{chunked}\r\n"), false),
        ] {
            assert_eq!(has_two_lengths(head.as_bytes()), expected, "{head}");
        }
    }
}
