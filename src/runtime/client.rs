//! The client of an engine, wherever the engine runs: in a thread of this process ([`super::thread`]) or in a
//! worker process ([`super::worker`]), or elsewhere, behind HTTP ([`super::http_engine`]).
//!
//! Invariants: the client validates a request, the same for every kind of engine, before the engine sees it;
//! a stream ends with `Done` or `Failed`; an engine that ends fails its unfinished requests with
//! `EngineGone`.

mod sessionless;

use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use super::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use super::request::{EngineSessionName, Event, Request};
use super::spec::EngineSpec;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::kv::TokenBuf;
pub use sessionless::Sessionless;

/// Takes a request's events. Runs on the engine's thread, so it must not block or panic; `Break` ends the generation.
pub type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

/// A value whose drop reports the end of an engine. Dropped on a thread of the engine, so its drop must not block.
pub type EndGuard = Box<dyn Send>;

/// Calls to a running engine, from any thread. Those that return a result fail with [`Error::EngineGone`] when the engine
/// has ended, beside the errors that they list.
pub trait EngineTransport: Send + Sync {
    fn spec(&self) -> &EngineSpec;

    /// Starts a request that [`Request::validate`] has passed. Errors that depend on the engine's state, such as no
    /// capacity, arrive as the first event. A sink that is dropped without a last event has lost its engine.
    ///
    /// # Errors
    /// Only [`Error::EngineGone`].
    fn start(&self, request: Request, sink: Sink, stop: StopHandle) -> Result<()>;

    /// Returns requests waiting and running, sessions, and memory in use. Waits for the current step.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn load(&self) -> Result<EngineLoad>;

    /// Returns the load at the end of the last step, without waiting, also when the engine has ended.
    fn last_load(&self) -> EngineLoad;

    /// Returns whether the engine still runs. False only after it has released its memory, so it may be true for a moment
    /// after [`Error::EngineGone`].
    fn is_alive(&self) -> bool;

    /// Returns why the engine ended, if it has and the reason is known.
    fn exit_reason(&self) -> Option<String> {
        None
    }

    /// Returns what users should know of the engine's programs if they run elsewhere, behind HTTP.
    fn remote(&self) -> Option<&RemoteEngineFacts> {
        None
    }

    /// Drops `guard` when the engine ends, however it does; at once if it has ended. So a guard that reports its drop
    /// replaces asking for [`Self::is_alive`] from time to time.
    fn drop_at_end(&self, guard: EndGuard);

    /// Ends all requests at the next step, waiting ones too; each still gets its `Done`.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn cancel_all(&self) -> Result<()>;

    /// Returns the notices since the last call.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn take_notices(&self) -> Result<Vec<Notice>>;

    /// Saves the unsaved KV of sessions and returns whether that was done within `timeout`. The engine does nothing else
    /// meanwhile. Dropping the last client does the same without reporting the result.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    fn flush_disk(&self, timeout: Duration) -> Result<bool>;

    /// Forgets the tokens of a named session. This call and those below wait for the current step.
    ///
    /// # Errors
    /// Those of [`crate::runtime::Engine::reset_session`].
    fn reset_session(&self, name: &EngineSessionName) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::close_session`].
    fn close_session(&self, name: &EngineSessionName) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::fork_session`].
    fn fork_session(&self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::restore_session`].
    fn restore_session(&self, name: &EngineSessionName, tokens: TokenBuf) -> Result<()>;

    /// # Errors
    /// Those of [`crate::runtime::Engine::inspect_session`].
    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail>;

    /// # Errors
    /// [`Error::EngineGone`].
    fn list_sessions(&self) -> Result<Vec<SessionInfo>>;
}

/// Facts about remote engines that users should know.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RemoteEngineFacts {
    /// Address, kind, version and model of each engine that answers.
    pub engines: Vec<String>,
    /// Address and reason of each that does not.
    pub unreachable: Vec<String>,
}

/// A client of a running engine. Clones share the engine; dropping the last one ends it.
#[derive(Clone)]
pub struct EngineClient {
    transport: Arc<dyn EngineTransport>,
}

impl Deref for EngineClient {
    type Target = dyn EngineTransport;

    fn deref(&self) -> &Self::Target {
        &*self.transport
    }
}

impl EngineClient {
    pub fn new(transport: impl EngineTransport + 'static) -> Self {
        Self { transport: Arc::new(transport) }
    }

    /// Returns whether both are clients of the same engine.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.transport, &other.transport)
    }

    /// Creates a session with known tokens; see [`EngineTransport::restore_session`].
    ///
    /// # Errors
    /// Those of [`crate::runtime::Engine::restore_session`].
    pub fn restore_session(&self, name: &EngineSessionName, tokens: impl Into<TokenBuf>) -> Result<()> {
        self.transport.restore_session(name, tokens.into())
    }

    /// Validates a request, without waiting for the engine, and starts it. Errors that depend on the engine, such as no
    /// capacity, arrive as the first event.
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

    /// As `submit`, with a sink instead of a stream, e.g. the sender of an async channel. The [`StopHandle`] cancels. A
    /// sink that is dropped without a last event has lost its engine.
    ///
    /// # Errors
    /// Those of [`Request::validate`]; [`Error::EngineGone`].
    pub fn submit_to(&self, request: Request, sink: Sink) -> Result<StopHandle> {
        request.validate(self.spec())?;
        let stop = StopHandle::default();
        self.transport.start(request, sink, stop.clone())?;
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
    /// [`NotYet`]; the stream continues.
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

    /// Ends the generation at the next step; the stream continues to its `Done`.
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
