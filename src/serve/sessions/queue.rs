//! Requests that wait for their session: one request at a time is in a session, the others come in the
//! order of their arrival.
//!
//! Invariants: dropping a turn or a wait frees its place; the queue of an unused session is
//! dropped when the next request comes to any. Knows no conversation and no engine: another process may
//! still have the session, which the request whose turn it is finds out.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Mutex as Turns, OwnedMutexGuard};

use llmctl_base::{Error, Result};
use llmctl_engine::EngineSessionName;

/// The session is this request's until it is dropped.
pub type SessionTurn = OwnedMutexGuard<()>;

/// The queues of all sessions.
#[derive(Debug, Default)]
pub struct SessionQueues {
    /// A queue lives as long as a request has its session or waits for it.
    queues: Mutex<HashMap<EngineSessionName, Weak<Turns<()>>>>,
}

impl SessionQueues {
    /// Waits until all earlier requests have left the session; at most `most_waiting` wait for any at the
    /// same time. The place counts from the first time that this is polled.
    ///
    /// # Errors
    /// [`Error::QueueFull`] at once.
    pub async fn turn(&self, name: &EngineSessionName, most_waiting: usize) -> Result<SessionTurn> {
        Ok(self.queue(name, most_waiting)?.lock_owned().await)
    }

    fn queue(&self, name: &EngineSessionName, most_waiting: usize) -> Result<Arc<Turns<()>>> {
        let mut queues = self.queues.lock();
        queues.retain(|_, queue| queue.strong_count() > 0);
        if let Some(queue) = queues.get(name).and_then(Weak::upgrade) {
            // Each request in a queue holds it once; the first one is in the session. This one holds it too.
            let waiting = queues.values().map(|queue| queue.strong_count().saturating_sub(1)).sum::<usize>();
            let waiting = waiting.saturating_sub(1);
            return if waiting < most_waiting { Ok(queue) } else { Err(Error::QueueFull { waiting }) };
        }
        let queue = Arc::default();
        queues.insert(name.clone(), Arc::downgrade(&queue));
        Ok(queue)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn named(name: &str) -> EngineSessionName {
        EngineSessionName::parse(name).expect("not empty")
    }

    fn ready<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn first_come_first_served_and_who_leaves_frees_the_place() {
        let queues = SessionQueues::default();
        let (a, b) = (named("a"), named("b"));
        let first = ready(pin!(queues.turn(&a, 9))).expect("free");
        let other = ready(pin!(queues.turn(&b, 9))).expect("free");
        let mut second = pin!(queues.turn(&a, 9));
        let mut third = Box::pin(queues.turn(&a, 9));
        let mut fourth = pin!(queues.turn(&a, 9));
        assert!(ready(second.as_mut()).is_none());
        assert!(ready(third.as_mut()).is_none());
        assert!(ready(fourth.as_mut()).is_none());
        drop(first);
        assert!(ready(fourth.as_mut()).is_none(), "it is not the next");
        let second = ready(second.as_mut()).expect("its turn").expect("a turn");
        drop(third);
        drop(second);
        drop(ready(fourth.as_mut()).expect("its turn").expect("a turn"));
        let _next = ready(pin!(queues.turn(&named("c"), 0))).expect("free").expect("nobody waits");
        assert!(queues.queues.lock().get(&a).is_none(), "nobody is in it");
        assert_eq!(queues.queues.lock().len(), 2);
        drop(other);
    }

    #[test]
    fn only_so_many_wait_for_all_sessions_together() {
        let queues = SessionQueues::default();
        let (a, b, c) = (named("a"), named("b"), named("c"));
        let first = ready(pin!(queues.turn(&a, 1))).expect("free");
        let _second = ready(pin!(queues.turn(&b, 1))).expect("free");
        {
            let mut third = pin!(queues.turn(&a, 1));
            assert!(ready(third.as_mut()).is_none());
            let refused = ready(pin!(queues.turn(&b, 1))).expect("at once");
            assert!(matches!(refused, Err(Error::QueueFull { waiting: 1 })));
            assert!(ready(pin!(queues.turn(&c, 1))).is_some_and(|turn| turn.is_ok()));
        }
        let mut third = pin!(queues.turn(&b, 1));
        assert!(ready(third.as_mut()).is_none(), "one that left has made room");
        drop(first);
        assert!(ready(pin!(queues.turn(&a, 0))).is_some_and(|turn| turn.is_ok()), "a free one is no wait");
    }
}
