//! The engine's thread: the only place where a request crosses threads. [`EngineClient::spawn`] makes one.
//!
//! Events go from the engine thread into one unbounded channel per request. The request bounds the number of
//! unread events: one per place in the queue, per prompt chunk and per generated token, and three more. So a
//! slow reader costs memory in proportion to its own `max_tokens`, never stalls other requests, and holds no
//! pages. A reader that is dropped stops its generation at the next step. The thread sleeps while it is idle,
//! at the longest until the engine's next wakeup. Dropping the last client ends it, and unfinished requests
//! fail with `EngineGone`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{EndGuard, EngineClient, EngineTransport, Sink};
use super::engine::{Engine, EngineLoad, RequestId, SessionDetail, SessionInfo, StopHandle};
use super::request::{EngineSessionName, Event, Request};
use super::spec::EngineSpec;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::kv::TokenBuf;

/// Longest wait for KV to be saved when the last client is dropped.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Time without work after which the engine prepares memory for KV.
const IDLE_TIME: Duration = Duration::from_millis(20);

/// A command to the engine thread.
enum EngineCommand {
    /// A request, and the client that takes its events.
    Submit { request: Request, client: Client },
    /// Anything else of the engine between its steps, with its answer.
    Ask(Box<dyn FnOnce(&mut Engine) + Send>),
    /// A value to drop when the engine ends.
    DropAtEnd(EndGuard),
    /// Stops all requests.
    CancelAll,
    /// The last client has gone.
    Shutdown,
}

struct Client {
    sink: Sink,
    stop: StopHandle,
}

/// The engine's thread, seen from its clients.
struct EngineThread {
    spec: EngineSpec,
    commands: Sender<EngineCommand>,
    /// The load after the last step, which can be read without waiting for the next.
    load: Arc<Mutex<EngineLoad>>,
    thread: Option<JoinHandle<()>>,
}

impl EngineClient {
    /// Starts a thread, builds the engine in it and waits until it is built.
    ///
    /// # Errors
    /// The error of `build`; [`Error::EngineGone`] if it panics or the system starts no thread.
    pub fn spawn(build: impl FnOnce() -> Result<Engine> + Send + 'static) -> Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let (ready, built) = mpsc::channel();
        let body = move || match build() {
            Ok(engine) => {
                let load = Arc::new(Mutex::new(engine.load()));
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
        Ok(Self::new(EngineThread { spec, commands, load, thread: Some(thread) }))
    }
}

impl EngineTransport for EngineThread {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn start(&self, request: Request, sink: Sink, stop: StopHandle) -> Result<()> {
        self.send(EngineCommand::Submit { request, client: Client { sink, stop } })
    }

    fn load(&self) -> Result<EngineLoad> {
        self.ask(|engine| Ok(engine.load()))
    }

    fn last_load(&self) -> EngineLoad {
        *self.load.lock()
    }

    fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn drop_at_end(&self, guard: EndGuard) {
        let _ = self.send(EngineCommand::DropAtEnd(guard)); // fails, and drops it, when the thread has ended already
    }

    fn cancel_all(&self) -> Result<()> {
        self.send(EngineCommand::CancelAll)
    }

    fn take_notices(&self) -> Result<Vec<Notice>> {
        self.ask(|engine| Ok(engine.take_notices()))
    }

    fn flush_disk(&self, timeout: Duration) -> Result<bool> {
        self.ask(move |engine| Ok(engine.flush_disk(timeout)))
    }

    fn reset_session(&self, name: &EngineSessionName) -> Result<()> {
        let name = name.clone();
        self.ask(move |engine| engine.reset_session(&name))
    }

    fn close_session(&self, name: &EngineSessionName) -> Result<()> {
        let name = name.clone();
        self.ask(move |engine| engine.close_session(&name))
    }

    fn fork_session(&self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        let (from, to) = (from.clone(), to.clone());
        self.ask(move |engine| engine.fork_session(&from, &to))
    }

    fn restore_session(&self, name: &EngineSessionName, tokens: TokenBuf) -> Result<()> {
        let name = name.clone();
        self.ask(move |engine| engine.restore_session(&name, tokens))
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        let name = name.clone();
        self.ask(move |engine| engine.inspect_session(&name))
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        self.ask(|engine| Ok(engine.list_sessions()))
    }
}

impl EngineThread {
    fn send(&self, command: EngineCommand) -> Result<()> {
        self.commands.send(command).map_err(|_| Error::EngineGone)
    }

    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Engine) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        // Sending the answer fails if the caller no longer waits for it.
        self.send(EngineCommand::Ask(Box::new(move |engine| drop(reply.send(question(engine))))))?;
        answer.recv().map_err(|_| Error::EngineGone)?
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        let _ = self.commands.send(EngineCommand::Shutdown); // fails only when the thread has ended already
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join(); // a panic there has been reported as EngineGone
        }
    }
}

/// Runs the engine: executes commands, cancels stopped requests, computes a step, delivers its events.
fn serve(mut engine: Engine, inbox: &Receiver<EngineCommand>, load: &Mutex<EngineLoad>) {
    let mut clients: HashMap<RequestId, Client> = HashMap::new();
    let mut guards: Vec<EndGuard> = Vec::new();
    loop {
        while let Some(command) = next_command(inbox, &mut engine) {
            match command {
                EngineCommand::Submit { request, client } => {
                    admit(&mut engine, &mut clients, request, client)
                }
                EngineCommand::Ask(question) => question(&mut engine),
                EngineCommand::DropAtEnd(guard) => guards.push(guard),
                EngineCommand::CancelAll => clients.values().for_each(|client| client.stop.stop()),
                EngineCommand::Shutdown => {
                    drop(clients);
                    return end(engine);
                }
            }
            *load.lock() = engine.load();
        }
        for (&id, _) in clients.iter().filter(|(_, client)| client.stop.is_stopped()) {
            engine.cancel(id);
        }
        let events = engine.step();
        *load.lock() = engine.load(); // before the events, so that a reader of a request's end finds it gone
        for (id, event) in events {
            deliver(&mut clients, id, event);
        }
    }
}

/// Returns the next command. Waits for it while the engine is idle, and after a while without work prepares memory for KV, a page
/// at a time.
fn next_command(inbox: &Receiver<EngineCommand>, engine: &mut Engine) -> Option<EngineCommand> {
    if !engine.is_idle() {
        return received(inbox.recv_timeout(Duration::ZERO));
    }
    let wakeup = engine.next_wakeup();
    let left = || wakeup.map(|at| at.saturating_duration_since(Instant::now()));
    let mut pause = IDLE_TIME;
    while left().is_none_or(|left| left > pause) {
        match inbox.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) if engine.prepare_page() => pause = Duration::ZERO,
            Err(RecvTimeoutError::Timeout) => break,
            other => return received(other),
        }
    }
    received(match left() {
        Some(left) => inbox.recv_timeout(left),
        None => inbox.recv().map_err(RecvTimeoutError::from),
    })
}

fn received(result: Result<EngineCommand, RecvTimeoutError>) -> Option<EngineCommand> {
    match result {
        Ok(command) => Some(command),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(EngineCommand::Shutdown),
    }
}

/// Saves computed KV that is not on disk yet, unless that takes too long.
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
