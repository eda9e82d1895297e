//! The end of a client's side of a connection: a part of asking, or a client that is gone. TCP says the same of both.
//!
//! A client may end its side right behind a whole request and wait for the answer (`nc -N`, some proxies); most that do so have closed
//! the connection, and nobody wants the answer. The first kind is asked: an interim response (100 Continue), which every client
//! of HTTP/1.1 passes over, makes the system of one that has closed say so at once. To one of HTTP/1.0 nothing can be said
//! before its answer; that is found out within a minute, when the system forgets the connection that was closed.
//! Who ends its side later than that has gone away, and is not waited for.

use std::fmt;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::time::Instant;

/// How soon after its request the end of a client's side is part of asking.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// How often a client that has ended its side is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What systems ask each other, in silence, after so long, and how often without an answer.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_RETRIES: u32 = 3;

/// Asks whether anybody is there.
pub const QUESTION: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Tells whether the system takes the other side to be there.
pub type Watch = Box<dyn Fn() -> bool + Send>;

/// A stream of which one side may end before the other.
pub trait HalfOpen {
    /// Has the system watch the other side; nothing where that cannot be done.
    fn watch(&self) -> Option<Watch>;
}

impl HalfOpen for tokio::net::TcpStream {
    fn watch(&self) -> Option<Watch> {
        let socket = SockRef::from(self);
        let asking = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
        socket.set_tcp_keepalive(&asking.with_retries(KEEP_ALIVE_RETRIES)).ok()?;
        let socket = socket.try_clone().ok()?;
        Some(Box::new(move || matches!(socket.take_error(), Ok(None))))
    }
}

/// Whoever ends a side of a socket in the file system is taken to be gone.
#[cfg(unix)]
impl HalfOpen for tokio::net::UnixStream {
    fn watch(&self) -> Option<Watch> {
        None
    }
}

/// What is known of the client's side.
pub enum End {
    Open,
    /// It is ended, and the client waits.
    Half {
        watch: Watch,
        look_at: Instant,
        is_asked: bool,
    },
    Gone,
}

impl End {
    /// The side has ended; `asked` is when what is under way was asked, if anything is. True when the client waits for it.
    pub fn waits(&mut self, asked: Option<Instant>, watch: impl FnOnce() -> Option<Watch>) -> bool {
        let Some(asked) = asked else { return false };
        match self {
            End::Half { .. } => true,
            End::Open if asked.elapsed() < ENDS_WITHIN => {
                let Some(watch) = watch() else { return false };
                *self = End::Half { watch, look_at: Instant::now() + LOOK_EVERY, is_asked: false };
                true
            }
            End::Open | End::Gone => false,
        }
    }

    /// Whether the client is to be asked now, which is done once.
    pub fn asks(&mut self) -> bool {
        match self {
            End::Half { is_asked, .. } => !std::mem::replace(is_asked, true),
            End::Open | End::Gone => false,
        }
    }

    /// When to look after it.
    pub fn look_at(&self) -> Option<Instant> {
        match self {
            End::Half { look_at, .. } => Some(*look_at),
            End::Open | End::Gone => None,
        }
    }

    /// Looks whether the client is there; one that has been answered has nothing to wait for.
    pub fn look(&mut self, is_answered: bool) {
        if let End::Half { watch, look_at, .. } = self {
            match !is_answered && watch() {
                true => *look_at = Instant::now() + LOOK_EVERY,
                false => *self = End::Gone,
            }
        }
    }
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            End::Open => "Open",
            End::Half { .. } => "Half",
            End::Gone => "Gone",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_right_behind_a_request_is_part_of_it() {
        let there = || Some(Box::new(|| true) as Watch);
        let now = Instant::now();
        assert!(!End::Open.waits(None, there), "nothing was asked");
        assert!(!End::Open.waits(Some(now), || None), "nobody can tell");
        let late = now.checked_sub(ENDS_WITHIN);
        assert!(late.is_none() || !End::Open.waits(late, there), "it has gone away");
        let mut end = End::Open;
        assert!(end.waits(Some(now), there) && end.waits(late, || None), "it waits for as long as it takes");
        assert!(end.asks() && !end.asks(), "it is asked once");
        end.look(false);
        assert!(end.look_at().is_some_and(|at| at > now));
        end.look(true);
        assert!(end.look_at().is_none() && !end.waits(Some(now), there), "it has been answered");
    }

    #[test]
    fn one_that_does_not_answer_is_gone() {
        let mut end = End::Open;
        assert!(end.waits(Some(Instant::now()), || Some(Box::new(|| false))));
        end.look(false);
        assert!(matches!(end, End::Gone) && !end.asks());
    }
}
