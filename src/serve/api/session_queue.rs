//! Requests that wait for their session: one request at a time is in a session, the others come in the order
//! of their arrival.
//!
//! Invariants: a request that leaves, by being dropped, frees its place; an empty line takes no memory. Knows
//! no conversation and no engine: another process may still have the session, which is for the one whose turn
//! it is to find out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use llmctl_base::{Error, Result};
use llmctl_engine::EngineSessionName;

/// The lines of all sessions. Clones are the same ones.
#[derive(Debug, Clone, Default)]
pub struct SessionQueues {
    shared: Arc<Mutex<QueueTable>>,
}

#[derive(Debug, Default)]
struct QueueTable {
    lines: HashMap<EngineSessionName, SessionQueue>,
    num_waiting: usize,
}

#[derive(Debug)]
struct SessionQueue {
    /// One permit: the session.
    session: Arc<Semaphore>,
    /// Those who have the session or wait for it.
    num_places: usize,
}

/// Result of joining a session's queue.
#[derive(Debug)]
pub enum Entered {
    Turn(SessionTurn),
    Waiting(SessionWait),
}

/// The session is this request's until it is dropped.
#[derive(Debug)]
pub struct SessionTurn {
    _session: OwnedSemaphorePermit,
    // Dropped after the permit, so that no request begins a second line meanwhile.
    _place: QueuePlace,
}

/// A place in the line.
#[derive(Debug)]
pub struct SessionWait {
    session: Arc<Semaphore>,
    place: QueuePlace,
    count: CountedWait,
}

#[derive(Debug)]
struct QueuePlace {
    lines: SessionQueues,
    name: EngineSessionName,
}

/// One of those who wait.
#[derive(Debug)]
struct CountedWait(SessionQueues);

impl SessionQueues {
    /// Comes to a session; at most `most_waiting` wait for any at the same time.
    ///
    /// # Errors
    /// [`Error::QueueFull`].
    pub fn enter(&self, name: &EngineSessionName, most_waiting: usize) -> Result<Entered> {
        let mut shared = self.shared();
        let num_waiting = shared.num_waiting;
        let line = shared.lines.entry(name.clone()).or_insert_with(SessionQueue::new);
        let session = Arc::clone(&line.session);
        let free = Arc::clone(&session).try_acquire_owned().ok();
        if free.is_none() && num_waiting >= most_waiting {
            return Err(Error::QueueFull { waiting: num_waiting });
        }
        line.num_places += 1;
        let place = QueuePlace { lines: self.clone(), name: name.clone() };
        Ok(match free {
            Some(permit) => Entered::Turn(SessionTurn { _session: permit, _place: place }),
            None => {
                shared.num_waiting += 1;
                Entered::Waiting(SessionWait { session, place, count: CountedWait(self.clone()) })
            }
        })
    }

    /// Counts and lines are whole at every moment.
    fn shared(&self) -> MutexGuard<'_, QueueTable> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionQueue {
    fn new() -> Self {
        Self { session: Arc::new(Semaphore::new(1)), num_places: 0 }
    }
}

impl SessionWait {
    /// Comes when all who were earlier have left. The place counts from the first time that this is polled.
    ///
    /// # Errors
    /// None that happen: the semaphore is never closed.
    pub async fn turn(self) -> Result<SessionTurn> {
        let Self { session, place, count } = self;
        let permit = session.acquire_owned().await;
        drop(count);
        let permit = permit.map_err(|_| Error::SessionBusy(place.name.to_string()))?;
        Ok(SessionTurn { _session: permit, _place: place })
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut shared = self.lines.shared();
        let Some(line) = shared.lines.get_mut(&self.name) else { return };
        line.num_places -= 1;
        if line.num_places == 0 {
            shared.lines.remove(&self.name);
        }
    }
}

impl Drop for CountedWait {
    fn drop(&mut self) {
        self.0.shared().num_waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn named(name: &str) -> EngineSessionName {
        EngineSessionName::parse(name).expect("not empty")
    }

    fn turn(entered: Result<Entered>) -> SessionTurn {
        match entered {
            Ok(Entered::Turn(turn)) => turn,
            other => panic!("{other:?}"),
        }
    }

    fn waiting(entered: Result<Entered>) -> SessionWait {
        match entered {
            Ok(Entered::Waiting(waiting)) => waiting,
            other => panic!("{other:?}"),
        }
    }

    fn is_ready<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn first_come_first_served_and_who_leaves_frees_the_place() {
        let lines = SessionQueues::default();
        let first = turn(lines.enter(&named("a"), 9));
        let _other = turn(lines.enter(&named("b"), 9));
        let mut second = pin!(waiting(lines.enter(&named("a"), 9)).turn());
        let mut third = Box::pin(waiting(lines.enter(&named("a"), 9)).turn());
        let mut fourth = pin!(waiting(lines.enter(&named("a"), 9)).turn());
        assert!(is_ready(second.as_mut()).is_none());
        assert!(is_ready(third.as_mut()).is_none());
        assert!(is_ready(fourth.as_mut()).is_none());
        drop(first);
        assert!(is_ready(fourth.as_mut()).is_none(), "it is not the next");
        let second = is_ready(second.as_mut()).expect("its turn").expect("a turn");
        drop(third);
        drop(second);
        let fourth = is_ready(fourth.as_mut()).expect("its turn").expect("a turn");
        assert_eq!(lines.shared().num_waiting, 0);
        assert_eq!(lines.shared().lines.len(), 2);
        drop(fourth);
        assert_eq!(lines.shared().lines.keys().collect::<Vec<_>>(), [&named("b")]);
    }

    #[test]
    fn only_so_many_wait_for_all_sessions_together() {
        let lines = SessionQueues::default();
        let (first, _second) = (turn(lines.enter(&named("a"), 1)), turn(lines.enter(&named("b"), 1)));
        let third = waiting(lines.enter(&named("a"), 1));
        assert!(matches!(lines.enter(&named("b"), 1), Err(Error::QueueFull { waiting: 1 })));
        drop(turn(lines.enter(&named("c"), 1)));
        drop(third);
        let _third = waiting(lines.enter(&named("b"), 1));
        drop(first);
        turn(lines.enter(&named("a"), 0));
    }
}
