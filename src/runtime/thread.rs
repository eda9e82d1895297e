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

/// A command to the engine thread.
enum EngineCommand {
    Submit { request: Request, client: Client },
    Session(SessionCommand),
    Load { reply: Sender<Result<EngineLoad>> },
    Notices { reply: Sender<Result<Vec<Notice>>> },
    Flush { timeout: Duration, reply: Sender<Result<bool>> },
    DropAtEnd(EndGuard),
    CancelAll,
    Shutdown,
}

/// Operations on named sessions between their requests.
enum SessionCommand {
    Reset { name: EngineSessionName, reply: Sender<Result<()>> },
    Close { name: EngineSessionName, reply: Sender<Result<()>> },
    Fork { from: EngineSessionName, to: EngineSessionName, reply: Sender<Result<()>> },
    Restore { name: EngineSessionName, tokens: TokenBuf, reply: Sender<Result<()>> },
    Inspect { name: EngineSessionName, reply: Sender<Result<SessionDetail>> },
    List { reply: Sender<Result<Vec<SessionInfo>>> },
}

struct Client {
    sink: Sink,
    stop: StopHandle,
}

/// The engine's thread, seen from its clients.
struct EngineThread {
    spec: EngineSpec,
    commands: Sender<EngineCommand>,
    load: LastLoad,
    thread: Option<JoinHandle<()>>,
}

/// The engine's load after its last step, which can be read without waiting for the next.
#[derive(Clone)]
struct LastLoad(Arc<Mutex<EngineLoad>>);

impl LastLoad {
    fn get(&self) -> EngineLoad {
        *self.0.lock()
    }

    fn set(&self, load: EngineLoad) {
        *self.0.lock() = load;
    }
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
        self.ask(|reply| EngineCommand::Load { reply })
    }

    fn last_load(&self) -> EngineLoad {
        self.load.get()
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
        self.ask(|reply| EngineCommand::Notices { reply })
    }

    fn flush_disk(&self, timeout: Duration) -> Result<bool> {
        self.ask(|reply| EngineCommand::Flush { timeout, reply })
    }

    fn reset_session(&self, name: &EngineSessionName) -> Result<()> {
        self.of_session(|reply| SessionCommand::Reset { name: name.clone(), reply })
    }

    fn close_session(&self, name: &EngineSessionName) -> Result<()> {
        self.of_session(|reply| SessionCommand::Close { name: name.clone(), reply })
    }

    fn fork_session(&self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        self.of_session(|reply| SessionCommand::Fork { from: from.clone(), to: to.clone(), reply })
    }

    fn restore_session(&self, name: &EngineSessionName, tokens: TokenBuf) -> Result<()> {
        self.of_session(|reply| SessionCommand::Restore { name: name.clone(), tokens, reply })
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        self.of_session(|reply| SessionCommand::Inspect { name: name.clone(), reply })
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        self.of_session(|reply| SessionCommand::List { reply })
    }
}

impl EngineThread {
    fn send(&self, command: EngineCommand) -> Result<()> {
        self.commands.send(command).map_err(|_| Error::EngineGone)
    }

    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> EngineCommand) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        self.send(command(reply))?;
        answer.recv().map_err(|_| Error::EngineGone)?
    }

    fn of_session<T>(&self, command: impl FnOnce(Sender<Result<T>>) -> SessionCommand) -> Result<T> {
        self.ask(|reply| EngineCommand::Session(command(reply)))
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
fn serve(mut engine: Engine, inbox: &Receiver<EngineCommand>, load: &LastLoad) {
    let mut clients: HashMap<RequestId, Client> = HashMap::new();
    let mut guards: Vec<EndGuard> = Vec::new();
    loop {
        while let Some(command) = next_command(inbox, &engine) {
            match command {
                EngineCommand::Submit { request, client } => {
                    admit(&mut engine, &mut clients, request, client)
                }
                EngineCommand::Session(command) => obey(&mut engine, command),
                EngineCommand::Load { reply } => drop(reply.send(Ok(engine.load()))),
                EngineCommand::Flush { timeout, reply } => drop(reply.send(Ok(engine.flush_disk(timeout)))),
                EngineCommand::Notices { reply } => drop(reply.send(Ok(engine.take_notices()))),
                EngineCommand::DropAtEnd(guard) => guards.push(guard),
                EngineCommand::CancelAll => clients.values().for_each(|client| client.stop.stop()),
                EngineCommand::Shutdown => {
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
        load.set(engine.load()); // before the events, so that a reader of a request's end finds it gone
        for (id, event) in events {
            deliver(&mut clients, id, event);
        }
    }
}

/// Returns the next command. Waits for it while the engine is idle.
fn next_command(inbox: &Receiver<EngineCommand>, engine: &Engine) -> Option<EngineCommand> {
    let wakeup = if engine.is_idle() { engine.next_wakeup() } else { Some(Instant::now()) };
    let received = match wakeup {
        Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
        None => inbox.recv().map_err(RecvTimeoutError::from),
    };
    match received {
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

fn obey(engine: &mut Engine, command: SessionCommand) {
    // Sending fails if the caller no longer waits for the answer.
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
