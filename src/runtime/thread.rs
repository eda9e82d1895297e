//! The engine's thread: the only place where a request crosses threads.
//!
//! Events go from the engine thread into one unbounded channel per request. What a reader has not read is bounded by the
//! request itself: one event per place in the queue, per prompt chunk and per generated token, and three more, so a slow
//! reader costs memory in proportion to its own `max_tokens`, never stalls the others, and does not hold pages while it
//! dawdles. A reader that goes away stops its generation at the next step. The thread sleeps while there is nothing to
//! do, at the longest until the engine wants to be woken; dropping the last handle ends it, and requests still running
//! then fail with `EngineGone`.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::engine::{Engine, EngineLoad, RequestId, SessionDetail, SessionInfo, StopHandle};
use super::error::{Error, Result};
use super::request::{Event, Request};
use super::spec::EngineSpec;

/// Takes a request's events on the engine thread, so it must not block or panic; `Break` ends the generation.
pub type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

/// How long the last handle to go waits for KV to be saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Everything that can be asked of the engine thread.
enum Command {
    Submit { request: Request, client: Client },
    Session(SessionCommand),
    Load { reply: Sender<Result<EngineLoad>> },
    Notices { reply: Sender<Result<Vec<String>>> },
    Flush { timeout: Duration, reply: Sender<Result<bool>> },
    CancelAll,
    Shutdown,
}

/// What can be done to named sessions between their requests.
enum SessionCommand {
    Reset { name: String, reply: Sender<Result<()>> },
    Close { name: String, reply: Sender<Result<()>> },
    Fork { from: String, to: String, reply: Sender<Result<()>> },
    Restore { name: String, tokens: Vec<u32>, reply: Sender<Result<()>> },
    Inspect { name: String, reply: Sender<Result<SessionDetail>> },
    List { reply: Sender<Result<Vec<SessionInfo>>> },
}

struct Client {
    sink: Sink,
    stop: StopHandle,
}

/// A door to the engine; clones lead to the same one.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    spec: EngineSpec,
    commands: Sender<Command>,
    load: LastLoad,
    thread: Option<JoinHandle<()>>,
}

/// The engine's load after its last step, for those who do not want to wait for the next.
#[derive(Clone)]
struct LastLoad(Arc<Mutex<EngineLoad>>);

impl LastLoad {
    fn get(&self) -> EngineLoad {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, load: EngineLoad) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }
}

impl EngineHandle {
    /// Starts a thread, builds the engine in it and waits until it stands.
    ///
    /// # Errors
    /// That of `build`; [`Error::EngineGone`] when it panics or the system has no thread to give.
    pub fn spawn(build: impl FnOnce() -> Result<Engine> + Send + 'static) -> Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let (ready, built) = mpsc::channel();
        let body = move || match build() {
            Ok(engine) => {
                let load = LastLoad(Arc::new(Mutex::new(engine.load())));
                let announced = ready.send(Ok((engine.spec().clone(), load.clone())));
                drop(ready);
                if announced.is_ok() {
                    serve(engine, &inbox, &load);
                }
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let thread = thread::Builder::new().name("engine".to_owned()).spawn(body);
        let thread = thread.map_err(|_| Error::EngineGone)?;
        let (spec, load) = built.recv().map_err(|_| Error::EngineGone)??;
        Ok(Self { shared: Arc::new(Shared { spec, commands, load, thread: Some(thread) }) })
    }

    pub fn spec(&self) -> &EngineSpec {
        &self.shared.spec
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
        let command = Command::Submit { request, client: Client { sink, stop: stop.clone() } };
        self.shared.commands.send(command).map_err(|_| Error::EngineGone)?;
        Ok(stop)
    }

    /// Requests waiting and running, sessions, and memory in use. Waits for the step that the engine is in.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    pub fn load(&self) -> Result<EngineLoad> {
        self.shared.ask(|reply| Command::Load { reply })
    }

    /// As `load`, but as of the end of the last step: waits for nothing, also when the engine is gone.
    pub fn last_load(&self) -> EngineLoad {
        self.shared.load.get()
    }

    /// Whether the engine's thread still runs. False only after it has given everything back, so it may be true for a moment
    /// after [`Error::EngineGone`].
    pub fn is_alive(&self) -> bool {
        self.shared.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends all requests at the next step, waiting ones too; each goes on to its `Done`.
    ///
    /// # Errors
    /// [`Error::EngineGone`].
    pub fn cancel_all(&self) -> Result<()> {
        self.shared.commands.send(Command::CancelAll).map_err(|_| Error::EngineGone)
    }

    /// What the user should know, one sentence each, since the last call.
    ///
    /// # Errors
    /// [`Error::EngineGone`], here and below.
    pub fn take_notices(&self) -> Result<Vec<String>> {
        self.shared.ask(|reply| Command::Notices { reply })
    }

    /// Saves the KV of sessions that is still to be saved; false when it takes longer than that. Nothing else is done meanwhile.
    /// Dropping the last handle does the same, but cannot say how it went.
    pub fn flush_disk(&self, timeout: Duration) -> Result<bool> {
        self.shared.ask(|reply| Command::Flush { timeout, reply })
    }
}

/// Named sessions. Each call waits for the engine, at most for the step that it is in.
impl EngineHandle {
    /// # Errors
    /// Those of [`Engine::reset_session`]; [`Error::EngineGone`], here and below.
    pub fn reset_session(&self, name: &str) -> Result<()> {
        self.ask(|reply| SessionCommand::Reset { name: name.to_owned(), reply })
    }

    /// # Errors
    /// Those of [`Engine::close_session`].
    pub fn close_session(&self, name: &str) -> Result<()> {
        self.ask(|reply| SessionCommand::Close { name: name.to_owned(), reply })
    }

    /// # Errors
    /// Those of [`Engine::fork_session`].
    pub fn fork_session(&self, from: &str, to: &str) -> Result<()> {
        self.ask(|reply| SessionCommand::Fork { from: from.to_owned(), to: to.to_owned(), reply })
    }

    /// # Errors
    /// Those of [`Engine::restore_session`].
    pub fn restore_session(&self, name: &str, tokens: Vec<u32>) -> Result<()> {
        self.ask(|reply| SessionCommand::Restore { name: name.to_owned(), tokens, reply })
    }

    /// # Errors
    /// Those of [`Engine::inspect_session`].
    pub fn inspect_session(&self, name: &str) -> Result<SessionDetail> {
        self.ask(|reply| SessionCommand::Inspect { name: name.to_owned(), reply })
    }

    /// # Errors
    /// [`Error::EngineGone`].
    pub fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        self.ask(|reply| SessionCommand::List { reply })
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> SessionCommand) -> Result<T> {
        self.shared.ask(|reply| Command::Session(command(reply)))
    }
}

impl Shared {
    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        self.commands.send(command(reply)).map_err(|_| Error::EngineGone)?;
        answer.recv().map_err(|_| Error::EngineGone)?
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Shutdown); // fails only when the thread has ended already
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join(); // a panic there has been reported as EngineGone
        }
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

/// The loop: take what is asked, cancel what nobody wants, compute a step, deliver.
fn serve(mut engine: Engine, inbox: &Receiver<Command>, load: &LastLoad) {
    let mut clients: HashMap<RequestId, Client> = HashMap::new();
    loop {
        while let Some(command) = next_command(inbox, &engine) {
            match command {
                Command::Submit { request, client } => admit(&mut engine, &mut clients, request, client),
                Command::Session(command) => obey(&mut engine, command),
                Command::Load { reply } => drop(reply.send(Ok(engine.load()))),
                Command::Flush { timeout, reply } => drop(reply.send(Ok(engine.flush_disk(timeout)))),
                Command::Notices { reply } => drop(reply.send(Ok(engine.take_notices()))),
                Command::CancelAll => clients.values().for_each(|client| client.stop.stop()),
                Command::Shutdown => {
                    drop(clients);
                    return end(engine);
                }
            }
            load.set(engine.load());
        }
        for (&id, _) in clients.iter().filter(|(_, client)| client.stop.is_stopped()) {
            engine.cancel(id);
        }
        let events = engine.step();
        load.set(engine.load()); // whoever hears that a request has ended finds it gone
        for (id, event) in events {
            deliver(&mut clients, id, event);
        }
    }
}

/// The next command; waits for it while the engine has nothing to do.
fn next_command(inbox: &Receiver<Command>, engine: &Engine) -> Option<Command> {
    let wakeup = if engine.is_idle() { engine.next_wakeup() } else { Some(Instant::now()) };
    let received = match wakeup {
        Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
        None => inbox.recv().map_err(RecvTimeoutError::from),
    };
    match received {
        Ok(command) => Some(command),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Command::Shutdown),
    }
}

/// What is computed but not saved yet is saved, unless the disk takes too long over it.
fn end(mut engine: Engine) {
    engine.flush_disk(FLUSH_TIMEOUT);
}

fn admit(
    engine: &mut Engine,
    clients: &mut HashMap<RequestId, Client>,
    request: Request,
    mut client: Client,
) {
    match engine.submit(request) {
        Ok(id) => drop(clients.insert(id, client)),
        Err(error) => drop((client.sink)(Event::Failed(error))),
    }
}

fn obey(engine: &mut Engine, command: SessionCommand) {
    // Nobody may be waiting for the answer any more.
    let _ = match command {
        SessionCommand::Reset { name, reply } => reply.send(engine.reset_session(&name)).is_ok(),
        SessionCommand::Close { name, reply } => reply.send(engine.close_session(&name)).is_ok(),
        SessionCommand::Fork { from, to, reply } => reply.send(engine.fork_session(&from, &to)).is_ok(),
        SessionCommand::Restore { name, tokens, reply } => {
            reply.send(engine.restore_session(&name, tokens)).is_ok()
        }
        SessionCommand::Inspect { name, reply } => reply.send(engine.inspect_session(&name)).is_ok(),
        SessionCommand::List { reply } => reply.send(Ok(engine.list_sessions())).is_ok(),
    };
}

fn deliver(clients: &mut HashMap<RequestId, Client>, id: RequestId, event: Event) {
    let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
    let Some(client) = clients.get_mut(&id) else { return };
    if (client.sink)(event).is_break() {
        client.stop.stop();
    }
    if is_last {
        clients.remove(&id);
    }
}
