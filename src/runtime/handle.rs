//! The door to an engine, wherever it runs: a thread of this process ([`super::thread`]) or a worker process
//! ([`super::worker`]).
//!
//! Invariants: what is wrong with a request itself is refused here, the same for every kind of engine, before anything is
//! asked of it; a stream ends with `Done` or `Failed`, and an engine that goes away fails what it leaves unfinished with
//! `EngineGone`.

use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use super::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use super::error::{Error, Result};
use super::request::{Event, Request};
use super::spec::EngineSpec;

/// Takes a request's events on the engine's thread, so it must not block or panic; `Break` ends the generation.
pub type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

/// What a running engine can be asked. Every call may come from any thread; those that return a result fail with
/// [`Error::EngineGone`] when there is no engine any more, beside what is said of them.
pub trait EngineDoor: Send + Sync {
    fn spec(&self) -> &EngineSpec;

    /// Starts a request that [`Request::validate`] has passed. What depends on the engine's state (no room) comes as the
    /// first event. A sink that is dropped without a last event has lost its engine.
    ///
    /// # Errors
    /// Only [`Error::EngineGone`].
    fn start(&self, request: Request, sink: Sink, stop: StopHandle) -> Result<()>;

    /// Requests waiting and running, sessions, and memory in use. Waits for the step that the engine is in.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn load(&self) -> Result<EngineLoad>;

    /// As `load`, but as of the end of the last step: waits for nothing, also when the engine is gone.
    fn last_load(&self) -> EngineLoad;

    /// Whether the engine still runs. False only after it has given everything back, so it may be true for a moment after
    /// [`Error::EngineGone`].
    fn is_alive(&self) -> bool;

    /// How it ended, once it is not alive any more, where that can be told.
    fn exit_reason(&self) -> Option<String> {
        None
    }

    /// Ends all requests at the next step, waiting ones too; each goes on to its `Done`.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn cancel_all(&self) -> Result<()>;

    /// What the user should know, one sentence each, since the last call.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn take_notices(&self) -> Result<Vec<String>>;

    /// Saves the KV of sessions that is still to be saved; false when it takes longer than that. Nothing else is done meanwhile.
    /// Dropping the last handle does the same, but cannot say how it went.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn flush_disk(&self, timeout: Duration) -> Result<bool>;

    /// Named sessions; each call, here and below, waits for the engine, at most for the step that it is in.
    ///
    /// # Errors
    /// Those of [`crate::runtime::Engine::reset_session`].
    fn reset_session(&self, name: &str) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::close_session`].
    fn close_session(&self, name: &str) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::fork_session`].
    fn fork_session(&self, from: &str, to: &str) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::restore_session`].
    fn restore_session(&self, name: &str, tokens: Vec<u32>) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::inspect_session`].
    fn inspect_session(&self, name: &str) -> Result<SessionDetail>;

    /// # Errors
    /// [`Error::EngineGone`].
    fn list_sessions(&self) -> Result<Vec<SessionInfo>>;
}

/// A running engine; clones lead to the same one, and the last to go ends it.
#[derive(Clone)]
pub struct EngineHandle {
    door: Arc<dyn EngineDoor>,
}

impl Deref for EngineHandle {
    type Target = dyn EngineDoor;

    fn deref(&self) -> &Self::Target {
        &*self.door
    }
}

impl EngineHandle {
    pub fn new(door: impl EngineDoor + 'static) -> Self {
        Self { door: Arc::new(door) }
    }

    /// Whether both lead to the same engine.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.door, &other.door)
    }

    /// Starts a request. What is wrong with the request itself is refused here, without waiting for the engine; what
    /// depends on its state (no room) comes as the stream's first event.
    ///
    /// # Errors
    /// Those of [`Request::validate`]; [`Error::EngineGone`].
    pub fn submit(&self, request: Request) -> Result<EventStream> {
        let (sender, events) = mpsc::channel();
        let deliver = move |event| match sender.send(event) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        };
        let stop = self.submit_to(request, Box::new(deliver))?;
        Ok(EventStream { events, stop, ended: false })
    }

    /// As `submit`, with a sink instead of a stream, e.g. the sender of an async channel. The handle cancels. A sink
    /// that is dropped without a last event has lost its engine.
    ///
    /// # Errors
    /// Those of [`Request::validate`]; [`Error::EngineGone`].
    pub fn submit_to(&self, request: Request, sink: Sink) -> Result<StopHandle> {
        request.validate(self.spec().vocab_size(), self.spec().context_length())?;
        let stop = StopHandle::default();
        self.door.start(request, sink, stop.clone())?;
        Ok(stop)
    }
}

/// The events of one request. Dropping it cancels the request at the next step.
#[derive(Debug)]
pub struct EventStream {
    events: Receiver<Event>,
    stop: StopHandle,
    ended: bool,
}

impl EventStream {
    /// As `next`, but `Err(NotYet)` when nothing comes in time.
    ///
    /// # Errors
    /// [`NotYet`]; the stream goes on.
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, NotYet> {
        if self.ended {
            return Ok(None);
        }
        match self.events.recv_timeout(timeout) {
            Ok(event) => Ok(Some(self.note(event))),
            Err(RecvTimeoutError::Timeout) => Err(NotYet),
            Err(RecvTimeoutError::Disconnected) => Ok(Some(self.note(Event::Failed(Error::EngineGone)))),
        }
    }

    /// Ends the generation at the next step; the stream goes on to its `Done`.
    pub fn cancel(&self) {
        self.stop.stop();
    }

    /// Cancels from elsewhere, e.g. a signal handler's thread.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    fn note(&mut self, event: Event) -> Event {
        self.ended = matches!(event, Event::Done(_) | Event::Failed(_));
        event
    }
}

/// Waits for each event; ends after `Done` or `Failed`.
impl Iterator for EventStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().unwrap_or(Event::Failed(Error::EngineGone));
        Some(self.note(event))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

/// No event within the time given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no event yet")]
pub struct NotYet;
