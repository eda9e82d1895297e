//! Half-closed connections: tells a client that still waits for its answer from one that has left. TCP
//! signals both alike.
//!
//! A client may close its sending side right after a whole request and wait for the answer (`nc -N`, some
//! proxies); most clients that do so have closed the connection. An interim response (100 Continue), which
//! every HTTP/1.1 client ignores, makes the system of a client that has left answer with a reset. An HTTP/1.0
//! client cannot be probed that way; its system resets the connection within a minute. A client that closes
//! its side later has left, and is not waited for.

use std::fmt;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::time::Instant;

/// A client that closes its side within this time after its request still waits for the answer.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Interval for checking a client that has closed its side.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// TCP keep-alive: interval of probes on a silent connection, and unanswered probes before it counts as lost.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_RETRIES: u32 = 3;

/// The interim response that probes the client.
pub const QUESTION: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Returns whether the system considers the connection open.
pub type PeerProbe = Box<dyn Fn() -> bool + Send>;

/// A stream whose two directions close separately.
pub trait HalfOpen {
    /// Has the system watch the other side; nothing where that cannot be done.
    fn watch(&self) -> Option<PeerProbe>;
}

impl HalfOpen for tokio::net::TcpStream {
    fn watch(&self) -> Option<PeerProbe> {
        let socket = SockRef::from(self);
        let asking = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
        socket.set_tcp_keepalive(&asking.with_retries(KEEP_ALIVE_RETRIES)).ok()?;
        let socket = socket.try_clone().ok()?;
        Some(Box::new(move || matches!(socket.take_error(), Ok(None))))
    }
}

/// On a Unix socket, a client that closes its side has left.
#[cfg(unix)]
impl HalfOpen for tokio::net::UnixStream {
    fn watch(&self) -> Option<PeerProbe> {
        None
    }
}

/// The client's sending side.
pub enum ClientEnd {
    /// The client may still send.
    Open,
    /// Closed, while the client waits for its answer.
    Half { watch: PeerProbe, look_at: Instant, is_asked: bool },
    /// The client is gone, and so is the reader of its answer.
    Gone,
}

impl ClientEnd {
    /// The side has ended; `asked` is when what is under way was asked, if anything is. True when the client waits for it.
    pub fn waits(&mut self, asked: Option<Instant>, watch: impl FnOnce() -> Option<PeerProbe>) -> bool {
        let Some(asked) = asked else { return false };
        match self {
            ClientEnd::Half { .. } => true,
            ClientEnd::Open if asked.elapsed() < ENDS_WITHIN => {
                let Some(watch) = watch() else { return false };
                *self = ClientEnd::Half { watch, look_at: Instant::now() + LOOK_EVERY, is_asked: false };
                true
            }
            ClientEnd::Open | ClientEnd::Gone => false,
        }
    }

    /// Returns true if the client is to be probed now, which happens once.
    pub fn asks(&mut self) -> bool {
        match self {
            ClientEnd::Half { is_asked, .. } => !std::mem::replace(is_asked, true),
            ClientEnd::Open | ClientEnd::Gone => false,
        }
    }

    /// Returns when to check the client next.
    pub fn look_at(&self) -> Option<Instant> {
        match self {
            ClientEnd::Half { look_at, .. } => Some(*look_at),
            ClientEnd::Open | ClientEnd::Gone => None,
        }
    }

    /// Looks whether the client is there; one that has been answered has nothing to wait for.
    pub fn look(&mut self, is_answered: bool) {
        if let ClientEnd::Half { watch, look_at, .. } = self {
            match !is_answered && watch() {
                true => *look_at = Instant::now() + LOOK_EVERY,
                false => *self = ClientEnd::Gone,
            }
        }
    }
}

impl fmt::Debug for ClientEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ClientEnd::Open => "Open",
            ClientEnd::Half { .. } => "Half",
            ClientEnd::Gone => "Gone",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_right_behind_a_request_is_part_of_it() {
        let there = || Some(Box::new(|| true) as PeerProbe);
        let now = Instant::now();
        assert!(!ClientEnd::Open.waits(None, there), "nothing was asked");
        assert!(!ClientEnd::Open.waits(Some(now), || None), "nobody can tell");
        let late = now.checked_sub(ENDS_WITHIN);
        assert!(late.is_none() || !ClientEnd::Open.waits(late, there), "it has gone away");
        let mut end = ClientEnd::Open;
        assert!(end.waits(Some(now), there) && end.waits(late, || None), "it waits for as long as it takes");
        assert!(end.asks() && !end.asks(), "it is asked once");
        end.look(false);
        assert!(end.look_at().is_some_and(|at| at > now));
        end.look(true);
        assert!(end.look_at().is_none() && !end.waits(Some(now), there), "it has been answered");
    }

    #[test]
    fn one_that_does_not_answer_is_gone() {
        let mut end = ClientEnd::Open;
        assert!(end.waits(Some(Instant::now()), || Some(Box::new(|| false))));
        end.look(false);
        assert!(matches!(end, ClientEnd::Gone) && !end.asks());
    }
}
