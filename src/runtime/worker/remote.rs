//! An engine at the other end of two streams: requests become lines to it, and its lines become events again.
//!
//! One thread reads and hands every answer to whoever asked, by its id; one writes what lies in a queue, so that nobody who asks
//! waits for a pipe; one asks now and then whether the other end still moves.
//!
//! Invariants: an end that breaks the protocol or stops answering is given up at once and for good: it is killed, and
//! whatever is open loses its engine (sinks are dropped, calls fail with [`Error::EngineGone`]), so that no answer is ever taken
//! from a stream that was wrong once. No lock is held while a sink is called. Knows no process: [`Peer`] is all of it.

use std::collections::{HashMap, VecDeque};
use std::io::{BufReader, Read, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{
    Answer, Call, Cancel, Flush, Fork, Generate, Id, ModelId, Named, Nothing, Op, Ready, Received, Reply,
    Restore, VERSION, read_line,
};
use crate::runtime::client::{EngineTransport, Sink};
use crate::runtime::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use crate::runtime::error::{Error, Result};
use crate::runtime::request::{Event, Request};
use crate::runtime::spec::EngineSpec;

/// How often a silent worker is asked whether it still moves.
const PING_EVERY: Duration = Duration::from_secs(1);

/// Requests that a worker has not read yet, in bytes; more are refused as if its queue were full.
const MAX_QUEUED_BYTES: usize = 64 << 20;

/// One that computes may be silent for so many times [`Patience::answer`].
const PATIENCE_WITH_WORK: u32 = 10;

/// How long a worker may take to end when it is asked to: it saves what its sessions have computed.
const LEAVE_TIME: Duration = Duration::from_secs(45);

/// Bytes of a wrong line that are shown.
const SHOWN_BYTES: usize = 120;

/// Who is at the other end.
pub trait Peer: Send + Sync {
    /// Ends it, in whatever state it is; then both streams end. Any number of times.
    fn kill(&self);

    /// Waits until it has ended and given everything back, and says how it ended.
    fn wait(&self) -> String;

    /// Whether it has computed since it was last asked; nothing where that cannot be known.
    fn has_worked(&self) -> Option<bool>;
}

/// How long a worker is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Until it is ready.
    pub start: Duration,
    /// For an answer, while it does not compute. A worker answers between two steps, so one that computes has ten times as long.
    pub answer: Duration,
}

/// Why there is no engine at the other end.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StartError {
    /// It says why.
    #[error(transparent)]
    Refused(Error),

    /// It ended, was too slow, or said what is no part of the protocol.
    #[error("{0}")]
    Lost(String),
}

/// An engine behind two streams.
pub struct RemoteEngine {
    spec: EngineSpec,
    model: ModelId,
    link: Arc<Link>,
}

impl RemoteEngine {
    /// Waits until the other end says that it is ready. When it does not, it is killed.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn connect(
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        peer: Arc<dyn Peer>,
        patience: Patience,
    ) -> Result<Self, StartError> {
        let link = Arc::new(Link::new(peer));
        let (ready, started) = mpsc::channel();
        let reading = Arc::clone(&link);
        spawn("worker-read", move || reading.read(from, ready), &link)?;
        let ready = match started.recv_timeout(patience.start) {
            Ok(ready) => checked(ready?, &link),
            Err(RecvTimeoutError::Timeout) => {
                link.give_up(format!("it was not ready within {:?}", patience.start));
                None
            }
            Err(RecvTimeoutError::Disconnected) => None, // it is being given up
        };
        let Some(ready) = ready else {
            let how = link.wait_for_end();
            return Err(StartError::Lost(how.unwrap_or_else(|| "it was killed and does not end".to_owned())));
        };
        let writing = Arc::clone(&link);
        spawn("worker-write", move || writing.write(to), &link)?;
        let watching = Arc::clone(&link);
        spawn("worker-watch", move || watching.watch(patience.answer), &link)?;
        let Ready { model, spec, .. } = ready;
        link.lock().load =
            EngineLoad { kv_free: spec.kv_memory, kv_capacity: spec.kv_memory, ..EngineLoad::default() };
        Ok(Self { spec, model, link })
    }

    /// The model that it has loaded.
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// An answer that is none to what was asked ends it.
    fn unexpected<T>(&self, op: &str, answer: &Answer) -> Result<T> {
        self.link.give_up(format!("it answered {op} with {}", shown(format!("{answer:?}").as_bytes())));
        Err(Error::EngineGone)
    }

    fn of_session(&self, op: Op) -> Result<Option<bool>> {
        let name = op.name();
        match self.link.ask(op)? {
            Answer::Closed { existed, .. } | Answer::Reset { existed, .. } => Ok(existed),
            Answer::Forked { .. } | Answer::Restored { .. } => Ok(None),
            other => self.unexpected(name, &other),
        }
    }
}

/// A ready line that this end can go on from.
fn checked(ready: Ready, link: &Link) -> Option<Ready> {
    if ready.protocol == VERSION {
        return Some(ready);
    }
    link.give_up(format!("it speaks version {} of the protocol, not {VERSION}", ready.protocol));
    None
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static, link: &Link) -> Result<(), StartError> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| {
        link.give_up(format!("the system has no thread to give: {error}"));
        StartError::Lost(format!("the system has no thread to give: {error}"))
    })
}

impl EngineTransport for RemoteEngine {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn start(&self, request: Request, sink: Sink, stop: StopHandle) -> Result<()> {
        let op = Op::Generate(Box::new(Generate::from(&request)));
        drop(request);
        let generation = Generation { sink: Some(sink), stop: stop.clone(), is_started: false };
        let id = self.link.register(Ask::Generation(generation))?;
        if !self.link.outbox.push(&Call { id: Some(Id::Number(id)), op }, Urgency::WithRoom) {
            self.link.refuse(id);
            return Ok(());
        }
        let link = Arc::downgrade(&self.link);
        stop.on_stop(move || {
            if let Some(link) = link.upgrade() {
                link.cancel(id);
            }
        });
        Ok(())
    }

    fn load(&self) -> Result<EngineLoad> {
        match self.link.ask(Op::Ping(Nothing {}))? {
            Answer::Pong { load, .. } => Ok(load),
            other => self.unexpected("ping", &other),
        }
    }

    fn last_load(&self) -> EngineLoad {
        self.link.lock().load()
    }

    fn is_alive(&self) -> bool {
        !matches!(self.link.lock().state, State::Ended(_))
    }

    fn last_words(&self) -> Option<String> {
        match &self.link.lock().state {
            State::Ended(how) => Some(how.clone()),
            _ => None,
        }
    }

    fn cancel_all(&self) -> Result<()> {
        let stops = self.link.lock().stops()?;
        stops.iter().for_each(StopHandle::stop);
        Ok(())
    }

    fn take_notices(&self) -> Result<Vec<String>> {
        match self.link.ask(Op::Notices(Nothing {}))? {
            Answer::Notices { notices } => Ok(notices),
            other => self.unexpected("notices", &other),
        }
    }

    fn flush_disk(&self, timeout: Duration) -> Result<bool> {
        // It does nothing else meanwhile, and answers no ping.
        self.link.excuse(timeout);
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        match self.link.ask(Op::Flush(Flush { timeout_ms }))? {
            Answer::Flushed { flushed } => Ok(flushed),
            other => self.unexpected("flush", &other),
        }
    }

    fn reset_session(&self, name: &str) -> Result<()> {
        found(name, self.of_session(Op::Reset(named(name)))?)
    }

    fn close_session(&self, name: &str) -> Result<()> {
        found(name, self.of_session(Op::Close(named(name)))?)
    }

    fn fork_session(&self, from: &str, to: &str) -> Result<()> {
        self.of_session(Op::Fork(Fork { session_id: from.to_owned(), to: to.to_owned() })).map(drop)
    }

    fn restore_session(&self, name: &str, tokens: Vec<u32>) -> Result<()> {
        self.of_session(Op::Restore(Restore { session_id: name.to_owned(), tokens })).map(drop)
    }

    fn inspect_session(&self, name: &str) -> Result<SessionDetail> {
        match self.link.ask(Op::Inspect(named(name)))? {
            Answer::Session { session } => Ok(session),
            other => self.unexpected("inspect", &other),
        }
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        match self.link.ask(Op::Sessions(Nothing {}))? {
            Answer::Sessions { sessions } => Ok(sessions),
            other => self.unexpected("sessions", &other),
        }
    }
}

fn named(name: &str) -> Named {
    Named { session_id: name.to_owned() }
}

/// The protocol closes and resets what there is not; the engine says that there is not.
fn found(name: &str, existed: Option<bool>) -> Result<()> {
    match existed {
        Some(false) => Err(Error::SessionNotFound(name.to_owned())),
        _ => Ok(()),
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        self.link.leave();
    }
}

/// What the threads of one engine share.
struct Link {
    peer: Arc<dyn Peer>,
    outbox: Outbox,
    open: Mutex<Open>,
    /// The state has changed.
    changed: Condvar,
}

/// What is under way.
struct Open {
    state: State,
    num_asked: i64,
    asks: HashMap<i64, Ask>,
    /// As of the last answer that told it; who waits and who runs is counted from `asks`.
    load: EngineLoad,
    heard_at: Instant,
    /// It was asked for something that takes so long.
    excused_until: Instant,
    reader: Option<thread::ThreadId>,
}

#[derive(Debug, PartialEq)]
enum State {
    Up,
    /// It was asked to end.
    Leaving,
    /// Given up, and why.
    GivenUp(String),
    /// Nothing is left of it, and this is how it came to that.
    Ended(String),
}

/// Who waits for an answer.
enum Ask {
    Generation(Generation),
    Call(Sender<Answer>),
    /// A ping, and when it was sent.
    Ping(Instant),
    /// Whatever it is, nobody is interested.
    Cancel,
}

struct Generation {
    /// Nothing while it is being called.
    sink: Option<Sink>,
    stop: StopHandle,
    is_started: bool,
}

impl Open {
    fn is_up(&self) -> bool {
        self.state == State::Up
    }

    fn generations(&self) -> impl Iterator<Item = &Generation> {
        self.asks.values().filter_map(|ask| match ask {
            Ask::Generation(generation) => Some(generation),
            _ => None,
        })
    }

    fn stops(&self) -> Result<Vec<StopHandle>> {
        match self.is_up() {
            true => Ok(self.generations().map(|generation| generation.stop.clone()).collect()),
            false => Err(Error::EngineGone),
        }
    }

    /// Requests are counted here, so that one that was asked a moment ago is among them.
    fn load(&self) -> EngineLoad {
        let num_open = self.generations().count();
        let num_running = self.generations().filter(|generation| generation.is_started).count();
        EngineLoad { num_waiting: num_open - num_running, num_running, ..self.load }
    }

    fn pinged_at(&self) -> Option<Instant> {
        self.asks.values().find_map(|ask| match ask {
            Ask::Ping(at) => Some(*at),
            _ => None,
        })
    }

    fn register(&mut self, ask: Ask) -> Result<i64> {
        if !self.is_up() {
            return Err(Error::EngineGone);
        }
        self.num_asked += 1;
        self.asks.insert(self.num_asked, ask);
        Ok(self.num_asked)
    }
}

impl Link {
    fn new(peer: Arc<dyn Peer>) -> Self {
        let load = EngineLoad::default();
        let now = Instant::now();
        let open = Open {
            state: State::Up,
            num_asked: 0,
            asks: HashMap::new(),
            load,
            heard_at: now,
            excused_until: now,
            reader: None,
        };
        Self { peer, outbox: Outbox::default(), open: Mutex::new(open), changed: Condvar::new() }
    }

    /// What is behind the lock is whole at every moment.
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, ask: Ask) -> Result<i64> {
        self.lock().register(ask)
    }

    /// Asks, and waits for the answer.
    fn ask(&self, op: Op) -> Result<Answer> {
        let (sender, answer) = mpsc::channel();
        let id = self.register(Ask::Call(sender))?;
        self.outbox.push(&Call { id: Some(Id::Number(id)), op }, Urgency::Always);
        match answer.recv() {
            Ok(Answer::Error(line)) => Err(line.into_error()),
            Ok(answer) => Ok(answer),
            Err(_) => Err(Error::EngineGone),
        }
    }

    /// Asks for something whose answer nobody waits for.
    fn tell(&self, ask: Ask, op: Op) {
        if let Ok(id) = self.register(ask) {
            self.outbox.push(&Call { id: Some(Id::Number(id)), op }, Urgency::Always);
        }
    }

    /// Ends a generation, if it is still under way.
    fn cancel(&self, id: i64) {
        let is_open = matches!(self.lock().asks.get(&id), Some(Ask::Generation(_)));
        if is_open {
            self.tell(Ask::Cancel, Op::Cancel(Cancel { request: Some(Id::Number(id)) }));
        }
    }

    /// A request that was not sent: too much waits to be read by the worker.
    fn refuse(&self, id: i64) {
        let mut open = self.lock();
        let waiting = open.generations().count();
        let ask = open.asks.remove(&id);
        drop(open);
        if let Some(Ask::Generation(Generation { sink: Some(mut sink), .. })) = ask {
            let _ = sink(Event::Failed(Error::QueueFull { waiting })); // it was the last
        }
    }

    fn excuse(&self, time: Duration) {
        let mut open = self.lock();
        open.excused_until = open.excused_until.max(Instant::now() + time);
    }

    /// Nothing more is expected of it. Only the first reason counts.
    fn give_up(&self, why: String) {
        let mut open = self.lock();
        if matches!(open.state, State::GivenUp(_) | State::Ended(_)) {
            return;
        }
        open.state = State::GivenUp(why);
        let asks = std::mem::take(&mut open.asks);
        drop(open);
        self.changed.notify_all();
        self.outbox.close();
        self.peer.kill();
        drop(asks); // their owners learn of it, and may ask what became of the engine
    }

    /// Asks it to end, and waits for that; what is under way loses its engine.
    fn leave(&self) {
        let mut open = self.lock();
        if open.is_up() {
            open.state = State::Leaving;
            open.num_asked += 1;
            let id = Some(Id::Number(open.num_asked));
            self.outbox.push(&Call { id, op: Op::Shutdown(Nothing {}) }, Urgency::Always);
        }
        let asks = std::mem::take(&mut open.asks);
        let is_reader = open.reader == Some(thread::current().id());
        drop(open);
        self.changed.notify_all();
        self.outbox.close();
        drop(asks);
        if is_reader {
            return; // the last handle went with a sink: this thread is the one that sees it end
        }
        let is_leaving = |open: &mut Open| !matches!(open.state, State::Ended(_));
        let waited = self.changed.wait_timeout_while(self.lock(), LEAVE_TIME, is_leaving);
        let timed_out = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        if timed_out {
            self.give_up(format!("it did not end within {LEAVE_TIME:?}"));
        }
    }

    /// Waits until nothing is left of it; says how it came to that.
    fn wait_for_end(&self) -> Option<String> {
        let is_there = |open: &mut Open| !matches!(open.state, State::Ended(_));
        let waited = self.changed.wait_timeout_while(self.lock(), LEAVE_TIME, is_there);
        let (open, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &open.state {
            State::Ended(how) => Some(how.clone()),
            _ => None,
        }
    }

    /// The reading thread.
    fn read(&self, from: impl Read, ready: Sender<Result<Ready, StartError>>) {
        self.lock().reader = Some(thread::current().id());
        let mut from = BufReader::with_capacity(1 << 16, from);
        let mut line = Vec::new();
        let mut ready = Some(ready);
        let why = loop {
            match read_line(&mut from, &mut line) {
                Ok(Received::Line) => {}
                Ok(Received::End) => break "it has ended".to_owned(),
                Ok(Received::Torn) => break format!("it ended within a line: {}", shown(&line)),
                Ok(Received::TooLong) => break "it sent a line that is too long".to_owned(),
                Err(error) => break format!("reading from it failed: {error}"),
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let heard = match ready.take() {
                Some(ready) => begin(&line, &ready),
                None => self.hear(&line),
            };
            if let Err(why) = heard {
                break why;
            }
        };
        self.give_up(why);
        let how = self.peer.wait();
        let mut open = self.lock();
        let how = match &open.state {
            State::GivenUp(why) => format!("{why}; {how}"),
            _ => how,
        };
        open.state = State::Ended(how);
        drop(open);
        drop(ready);
        self.changed.notify_all();
    }

    /// Passes an answer on.
    fn hear(&self, line: &[u8]) -> Result<(), String> {
        let mut open = self.lock();
        open.heard_at = Instant::now();
        if !open.is_up() {
            return Ok(()); // what it says on its way out is for nobody
        }
        drop(open);
        let Reply { id, answer } = Reply::parse(line)
            .map_err(|why| format!("it sent a line that is no answer ({why}): {}", shown(line)))?;
        let Some(Id::Number(id)) = id else {
            return Err(format!("it sent an answer to nobody: {}", shown(line)));
        };
        let mut open = self.lock();
        if let Answer::Pong { load, .. } = &answer {
            open.load = *load;
        }
        let is_up = open.is_up();
        match open.asks.get(&id) {
            Some(Ask::Generation(_)) => {}
            Some(_) => {
                let ask = open.asks.remove(&id);
                drop(open);
                return self.answer_call(ask, answer);
            }
            None if !is_up => return Ok(()),
            None => return Err(format!("it answered {id}, which is not open: {}", shown(line))),
        };
        drop(open);
        let event = answer.into_event().map_err(|answer| {
            format!("it answered a generation with {}", shown(format!("{answer:?}").as_bytes()))
        })?;
        let sink = match self.lock().asks.get_mut(&id) {
            Some(Ask::Generation(generation)) => generation.sink.take(),
            _ => None, // it was given up meanwhile
        };
        if let Some(sink) = sink {
            self.deliver(id, sink, event);
        }
        Ok(())
    }

    fn answer_call(&self, ask: Option<Ask>, answer: Answer) -> Result<(), String> {
        match (ask, answer) {
            (Some(Ask::Call(sender)), answer) => drop(sender.send(answer)), // the caller may have panicked
            (Some(Ask::Ping(_)), Answer::Pong { .. }) | (Some(Ask::Cancel), Answer::Cancelled { .. }) => {}
            (_, answer) => {
                return Err(format!("it sent a wrong answer: {}", shown(format!("{answer:?}").as_bytes())));
            }
        }
        Ok(())
    }

    /// Calls a generation's sink, without the lock.
    fn deliver(&self, id: i64, mut sink: Sink, event: Event) {
        let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
        let mut stop = None;
        {
            let mut open = self.lock();
            if is_last {
                open.asks.remove(&id); // whoever hears that it has ended finds it gone
            } else if let Some(Ask::Generation(generation)) = open.asks.get_mut(&id) {
                generation.is_started |= matches!(event, Event::Started(_));
                stop = Some(generation.stop.clone());
            }
        }
        let wants_more = sink(event).is_continue();
        if is_last {
            return;
        }
        if let Some(stop) = stop.filter(|_| !wants_more) {
            stop.stop();
        }
        let mut open = self.lock();
        if let Some(Ask::Generation(generation)) = open.asks.get_mut(&id) {
            generation.sink = Some(sink);
            return;
        }
        drop(open);
        drop(sink); // it was given up meanwhile
    }

    /// The writing thread. Ends, and with it the stream, when the queue is closed and empty.
    fn write(&self, mut to: impl Write) {
        while let Some(line) = self.outbox.take() {
            let written = to.write_all(&line).and_then(|()| to.flush());
            if let Err(error) = written {
                return self.give_up(format!("it does not read any more: {error}"));
            }
        }
    }

    /// The watching thread: gives up an end that has stopped to move.
    fn watch(&self, patience: Duration) {
        let mut worked_at = Instant::now();
        loop {
            let period = PING_EVERY.min(patience / 4);
            let waited = self.changed.wait_timeout_while(self.lock(), period, |open| open.is_up());
            let (open, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if !open.is_up() {
                return;
            }
            let (heard_at, pinged_at, excused) = (open.heard_at, open.pinged_at(), open.excused_until);
            drop(open);
            if self.peer.has_worked() != Some(false) {
                worked_at = Instant::now();
            }
            let Some(pinged_at) = pinged_at else {
                self.tell(Ask::Ping(Instant::now()), Op::Ping(Nothing {}));
                continue;
            };
            let now = Instant::now();
            let since = heard_at.max(pinged_at).max(excused);
            let (silent, idle) =
                (now.saturating_duration_since(since), now.saturating_duration_since(worked_at));
            if silent > patience && (idle > patience || silent > patience * PATIENCE_WITH_WORK) {
                let state = if idle > patience { "computes nothing" } else { "does nothing but compute" };
                return self
                    .give_up(format!("it has not answered for {:.1} s and {state}", silent.as_secs_f64()));
            }
        }
    }
}

/// The first line.
fn begin(line: &[u8], ready: &Sender<Result<Ready, StartError>>) -> Result<(), String> {
    // Whoever waits may have had enough.
    match Reply::parse(line).map(|reply| reply.answer) {
        Ok(Answer::Ready(line)) => {
            let _ = ready.send(Ok(*line));
            Ok(())
        }
        Ok(Answer::Error(line)) => {
            let why = format!("it cannot start: {}", line.error);
            let _ = ready.send(Err(StartError::Refused(line.into_error())));
            Err(why)
        }
        _ => Err(format!("its first line does not say that it is ready: {}", shown(line))),
    }
}

/// The beginning of what should not have been said.
fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(SHOWN_BYTES)]);
    let dots = if line.len() > SHOWN_BYTES { " ..." } else { "" };
    format!("{text:?}{dots}")
}

/// Lines that wait to be written.
#[derive(Default)]
struct Outbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    num_bytes: usize,
    is_closed: bool,
}

/// What a full queue does to a line.
#[derive(Clone, Copy, PartialEq)]
enum Urgency {
    /// It is refused.
    WithRoom,
    /// It is taken: those who send such are few, or wait for the answer.
    Always,
}

impl Outbox {
    /// False when there is no room. After the end nothing is kept, and nobody will miss it.
    fn push(&self, call: &Call, urgency: Urgency) -> bool {
        let mut line = serde_json::to_vec(call).expect("calls are plain data with text for keys");
        line.push(b'\n');
        let mut queue = self.lock();
        if queue.is_closed {
            return true;
        }
        let is_full = !queue.lines.is_empty() && queue.num_bytes + line.len() > MAX_QUEUED_BYTES;
        if is_full && urgency == Urgency::WithRoom {
            return false;
        }
        queue.num_bytes += line.len();
        queue.lines.push_back(line);
        drop(queue);
        self.changed.notify_one();
        true
    }

    /// The next line; waits for it. Nothing after the end.
    fn take(&self) -> Option<Vec<u8>> {
        let is_idle = |queue: &mut Queue| queue.lines.is_empty() && !queue.is_closed;
        let mut queue = self.changed.wait_while(self.lock(), is_idle).unwrap_or_else(PoisonError::into_inner);
        let line = queue.lines.pop_front()?;
        queue.num_bytes -= line.len();
        Some(line)
    }

    /// Nothing more is taken; what waits is still written.
    fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
