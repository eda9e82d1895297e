//! Client of an engine behind two streams: requests become lines, and reply lines become events.
//!
//! One thread reads replies and hands each to its caller by id. One writes lines from a queue, so that no
//! caller waits for a pipe. One sends pings to detect a worker that hangs.
//!
//! Invariants: a worker that breaks the protocol or stops answering is killed for good, and everything open
//! fails: sinks are dropped and calls return [`Error::EngineGone`]. No reply is used after the first invalid
//! one. No lock is held while a sink is called. The process is known only as a [`ProcessHandle`].

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::io::{BufReader, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::protocol::{
    Cancel, ErrorCode, ErrorLine, Flush, Fork, Generate, Id, ImageUpload, ModelId, Named, Nothing, Op, Ready,
    Received, Reply, ReplyBody, Restore, VERSION, WorkerCall, read_line,
};
use crate::client::{EndGuard, EngineTransport, Sink};
use crate::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use crate::request::{EngineSessionName, Event, Request};
use crate::spec::EngineSpec;
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_image::ImageFile;
use llmctl_models::kv::TokenBuf;

/// Interval of pings to a silent worker.
const PING_EVERY: Duration = Duration::from_secs(1);

/// Most bytes queued for the worker. Further requests are refused with [`Error::QueueFull`].
const MAX_QUEUED_BYTES: usize = 64 << 20;

/// A busy worker gets this many times [`Timeouts::answer`] before it is killed.
const BUSY_FACTOR: u32 = 10;

/// Time to shut down, which includes saving the KV of its sessions.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(45);

/// Bytes of an invalid line that error messages show.
const SHOWN_BYTES: usize = 120;

/// The process at the other end.
pub trait ProcessHandle: Send + Sync {
    /// Kills it in any state, which ends both streams. May be called repeatedly.
    fn kill(&self);

    /// Waits until it is reaped, and describes how it ended.
    fn wait(&self) -> String;

    /// Returns whether it has used the processor since the last call; `None` if that is unknown.
    fn has_computed(&self) -> Option<bool>;
}

/// Time limits for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Until the ready line.
    pub start: Duration,
    /// Until an answer, while the worker is idle. A worker answers between two steps, so a busy one gets ten
    /// times as long.
    pub answer: Duration,
}

/// Error of starting a worker.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StartError {
    /// Error that the worker reported.
    #[error(transparent)]
    Refused(Error),

    /// The worker ended, was too slow, or broke the protocol.
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
    /// Waits for the ready line. Kills the worker if it does not come.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn connect(
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        process: Arc<dyn ProcessHandle>,
        timeouts: Timeouts,
    ) -> Result<Self, StartError> {
        let link = Arc::new(Link::new(process));
        let (ready, started) = mpsc::channel();
        let reading = Arc::clone(&link);
        spawn("worker-read", move || reading.read(from, ready), &link)?;
        let ready = match started.recv_timeout(timeouts.start) {
            Ok(ready) => checked(ready?, &link),
            Err(RecvTimeoutError::Timeout) => {
                link.give_up(format!("it was not ready within {:?}", timeouts.start));
                None
            }
            Err(RecvTimeoutError::Disconnected) => None, // the reading thread is giving up
        };
        let Some(ready) = ready else {
            let how = link.wait_for_end();
            return Err(StartError::Lost(how.unwrap_or_else(|| "it was killed and does not end".to_owned())));
        };
        let writing = Arc::clone(&link);
        spawn("worker-write", move || writing.write(to), &link)?;
        let watching = Arc::clone(&link);
        spawn("worker-watch", move || watching.watch(timeouts.answer), &link)?;
        let Ready { model, spec, .. } = ready;
        link.open.lock().load =
            EngineLoad { kv_free: spec.kv_memory, kv_capacity: spec.kv_memory, ..EngineLoad::default() };
        Ok(Self { spec, model, link })
    }

    /// Returns the identity of the loaded model.
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// Gives up the worker because of an answer of the wrong kind.
    fn unexpected<T>(&self, op: &str, answer: &ReplyBody) -> Result<T> {
        self.link.give_up(format!("it answered {op} with {}", shown(format!("{answer:?}").as_bytes())));
        Err(Error::EngineGone)
    }

    fn of_session(&self, op: Op) -> Result<Option<bool>> {
        let name = op.name();
        match self.link.ask(op)? {
            ReplyBody::Closed { existed, .. } | ReplyBody::Reset { existed, .. } => Ok(existed),
            ReplyBody::Forked { .. } | ReplyBody::Restored { .. } => Ok(None),
            other => self.unexpected(name, &other),
        }
    }
}

/// Checks the protocol version.
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
        let files: Vec<Arc<ImageFile>> = request.images.into_iter().map(|image| image.file).collect();
        let resend = (!files.is_empty()).then(|| Box::new(ResentGeneration { op: op.clone(), files }));
        let generation = RemoteGeneration { sink: Some(sink), stop: stop.clone(), is_started: false, resend };
        let id = self.link.register(PendingCall::Generation(generation))?;
        if !self.link.outbox.push(&WorkerCall { id: Some(Id::Number(id)), op }, Urgency::WithRoom) {
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
            ReplyBody::Pong { load, .. } => Ok(load),
            other => self.unexpected("ping", &other),
        }
    }

    fn last_load(&self) -> EngineLoad {
        self.link.open.lock().load()
    }

    fn is_alive(&self) -> bool {
        !matches!(self.link.open.lock().state, WorkerState::Ended(_))
    }

    fn exit_reason(&self) -> Option<String> {
        match &self.link.open.lock().state {
            WorkerState::Ended(how) => Some(how.clone()),
            _ => None,
        }
    }

    fn drop_at_end(&self, guard: EndGuard) {
        let mut open = self.link.open.lock();
        match open.state {
            WorkerState::Up | WorkerState::Leaving => open.guards.push(guard),
            WorkerState::GivenUp(_) | WorkerState::Ended(_) => drop(guard),
        }
    }

    fn cancel_all(&self) -> Result<()> {
        let stops = self.link.open.lock().stops()?;
        stops.iter().for_each(StopHandle::stop);
        Ok(())
    }

    fn take_notices(&self) -> Result<Vec<Notice>> {
        match self.link.ask(Op::Notices(Nothing {}))? {
            ReplyBody::Notices { notices } => Ok(notices.into_iter().map(Notice::Remote).collect()),
            other => self.unexpected("notices", &other),
        }
    }

    fn flush_disk(&self, timeout: Duration) -> Result<bool> {
        // The worker answers no ping while it saves.
        self.link.expect_busy(timeout);
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        match self.link.ask(Op::Flush(Flush { timeout_ms }))? {
            ReplyBody::Flushed { flushed } => Ok(flushed),
            other => self.unexpected("flush", &other),
        }
    }

    fn reset_session(&self, name: &EngineSessionName) -> Result<()> {
        found(name, self.of_session(Op::Reset(named(name)))?)
    }

    fn close_session(&self, name: &EngineSessionName) -> Result<()> {
        found(name, self.of_session(Op::Close(named(name)))?)
    }

    fn fork_session(&self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        self.of_session(Op::Fork(Fork { session_id: from.clone(), to: to.clone() })).map(drop)
    }

    fn restore_session(&self, name: &EngineSessionName, tokens: TokenBuf) -> Result<()> {
        let TokenBuf { ids: tokens, images, adapters } = tokens;
        self.of_session(Op::Restore(Restore { session_id: name.clone(), tokens, images, adapters })).map(drop)
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        match self.link.ask(Op::Inspect(named(name)))? {
            ReplyBody::Session { session } => Ok(session),
            other => self.unexpected("inspect", &other),
        }
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        match self.link.ask(Op::Sessions(Nothing {}))? {
            ReplyBody::Sessions { sessions } => Ok(sessions),
            other => self.unexpected("sessions", &other),
        }
    }
}

fn named(name: &EngineSessionName) -> Named {
    Named { session_id: name.clone() }
}

/// Restores the engine's error: in the protocol, closing or resetting an unknown session succeeds.
fn found(name: &EngineSessionName, existed: Option<bool>) -> Result<()> {
    match existed {
        Some(false) => Err(Error::SessionNotFound(name.to_string())),
        _ => Ok(()),
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        self.link.leave();
    }
}

/// State that the threads of one engine share.
struct Link {
    process: Arc<dyn ProcessHandle>,
    outbox: Outbox,
    open: Mutex<LinkState>,
    /// Signalled when the state changes.
    changed: Condvar,
}

/// State of the worker and its open calls.
struct LinkState {
    state: WorkerState,
    num_calls: i64,
    pending: HashMap<i64, PendingCall>,
    /// Dropped when the worker is given up, which its end is too.
    guards: Vec<EndGuard>,
    /// Load in the last pong. The numbers of requests are counted from `pending` instead.
    load: EngineLoad,
    last_line_at: Instant,
    /// Deadline of an operation during which the worker answers no ping.
    busy_until: Instant,
    reader: Option<thread::ThreadId>,
}

#[derive(Debug, PartialEq)]
enum WorkerState {
    Up,
    /// Asked to shut down.
    Leaving,
    /// Given up, with the reason; being killed.
    GivenUp(String),
    /// Reaped, with the reason.
    Ended(String),
}

/// An open call.
enum PendingCall {
    Generation(RemoteGeneration),
    Call(Sender<ReplyBody>),
    /// A ping and the time it was sent.
    Ping(Instant),
    /// A cancellation, whose answer is ignored.
    Cancel,
    /// An image. If it is refused, so is the generation behind it.
    Image,
}

struct RemoteGeneration {
    /// `None` while it is being called.
    sink: Option<Sink>,
    stop: StopHandle,
    is_started: bool,
    /// For a worker that does not have its images; `None` without images, or once they were sent.
    resend: Option<Box<ResentGeneration>>,
}

/// A generation that follows its images.
struct ResentGeneration {
    op: Op,
    files: Vec<Arc<ImageFile>>,
}

impl LinkState {
    fn is_up(&self) -> bool {
        self.state == WorkerState::Up
    }

    fn generations(&self) -> impl Iterator<Item = (&i64, &RemoteGeneration)> {
        self.pending.iter().filter_map(|(id, call)| match call {
            PendingCall::Generation(generation) => Some((id, generation)),
            _ => None,
        })
    }

    /// Returns the stops of all generations, the last to start first: if the running one were stopped before those that
    /// wait, the worker could start one of them in its place.
    fn stops(&self) -> Result<Vec<StopHandle>> {
        if !self.is_up() {
            return Err(Error::EngineGone);
        }
        let mut newest_first: Vec<(&i64, &RemoteGeneration)> = self.generations().collect();
        newest_first.sort_by_key(|(id, generation)| (generation.is_started, Reverse(**id)));
        Ok(newest_first.into_iter().map(|(_, generation)| generation.stop.clone()).collect())
    }

    /// Returns the load, with requests counted here so that the newest are included.
    fn load(&self) -> EngineLoad {
        let num_open = self.generations().count();
        let num_running = self.generations().filter(|(_, generation)| generation.is_started).count();
        EngineLoad { num_waiting: num_open - num_running, num_running, ..self.load }
    }

    fn pinged_at(&self) -> Option<Instant> {
        self.pending.values().find_map(|call| match call {
            PendingCall::Ping(at) => Some(*at),
            _ => None,
        })
    }

    fn register(&mut self, call: PendingCall) -> Result<i64> {
        if !self.is_up() {
            return Err(Error::EngineGone);
        }
        self.num_calls += 1;
        self.pending.insert(self.num_calls, call);
        Ok(self.num_calls)
    }
}

impl Link {
    fn new(process: Arc<dyn ProcessHandle>) -> Self {
        let load = EngineLoad::default();
        let now = Instant::now();
        let open = LinkState {
            state: WorkerState::Up,
            num_calls: 0,
            pending: HashMap::new(),
            guards: Vec::new(),
            load,
            last_line_at: now,
            busy_until: now,
            reader: None,
        };
        Self { process, outbox: Outbox::default(), open: Mutex::new(open), changed: Condvar::new() }
    }

    fn register(&self, call: PendingCall) -> Result<i64> {
        self.open.lock().register(call)
    }

    /// Calls the worker and waits for the answer.
    fn ask(&self, op: Op) -> Result<ReplyBody> {
        let (sender, answer) = mpsc::channel();
        let id = self.register(PendingCall::Call(sender))?;
        self.outbox.push(&WorkerCall { id: Some(Id::Number(id)), op }, Urgency::Always);
        match answer.recv() {
            Ok(ReplyBody::Error(line)) => Err(line.into_error()),
            Ok(answer) => Ok(answer),
            Err(_) => Err(Error::EngineGone),
        }
    }

    /// Calls the worker without waiting.
    fn send_call(&self, call: PendingCall, op: Op) {
        if let Ok(id) = self.register(call) {
            self.outbox.push(&WorkerCall { id: Some(Id::Number(id)), op }, Urgency::Always);
        }
    }

    /// Cancels a generation that is still open.
    fn cancel(&self, id: i64) {
        let is_open = matches!(self.open.lock().pending.get(&id), Some(PendingCall::Generation(_)));
        if is_open {
            self.send_call(PendingCall::Cancel, Op::Cancel(Cancel { request: Some(Id::Number(id)) }));
        }
    }

    /// Fails a request that was not sent, because too many bytes are queued.
    fn refuse(&self, id: i64) {
        let mut open = self.open.lock();
        let waiting = open.generations().count();
        let call = open.pending.remove(&id);
        drop(open);
        if let Some(PendingCall::Generation(RemoteGeneration { sink: Some(mut sink), .. })) = call {
            let _ = sink(Event::Failed(Error::QueueFull { waiting })); // the sink's return value no longer matters
        }
    }

    fn expect_busy(&self, time: Duration) {
        let mut open = self.open.lock();
        open.busy_until = open.busy_until.max(Instant::now() + time);
    }

    /// Kills the worker and fails what is open. Only the first reason is kept.
    fn give_up(&self, why: String) {
        let mut open = self.open.lock();
        if matches!(open.state, WorkerState::GivenUp(_) | WorkerState::Ended(_)) {
            return;
        }
        open.state = WorkerState::GivenUp(why);
        let pending = (std::mem::take(&mut open.pending), std::mem::take(&mut open.guards));
        drop(open);
        self.changed.notify_all();
        self.outbox.close();
        self.process.kill();
        drop(pending); // dropped after the kill: callers learn of it and may ask for the reason
    }

    /// Asks the worker to shut down and waits for it. Open calls fail.
    fn leave(&self) {
        let mut open = self.open.lock();
        if open.is_up() {
            open.state = WorkerState::Leaving;
            open.num_calls += 1;
            let id = Some(Id::Number(open.num_calls));
            self.outbox.push(&WorkerCall { id, op: Op::Shutdown(Nothing {}) }, Urgency::Always);
        }
        let pending = std::mem::take(&mut open.pending);
        let is_reader = open.reader == Some(thread::current().id());
        drop(open);
        self.changed.notify_all();
        self.outbox.close();
        drop(pending);
        if is_reader {
            return; // the last handle was dropped inside a sink, on the thread that waits for the end
        }
        if self.wait_for_end().is_none() {
            self.give_up(format!("it did not end within {SHUTDOWN_TIMEOUT:?}"));
        }
    }

    /// Waits until the worker is reaped; returns the reason, or `None` after a timeout.
    fn wait_for_end(&self) -> Option<String> {
        let is_there = |open: &mut LinkState| !matches!(open.state, WorkerState::Ended(_));
        let mut open = self.open.lock();
        self.changed.wait_while_for(&mut open, is_there, SHUTDOWN_TIMEOUT);
        match &open.state {
            WorkerState::Ended(how) => Some(how.clone()),
            _ => None,
        }
    }

    /// Body of the reading thread.
    fn read(&self, from: impl Read, ready: Sender<Result<Ready, StartError>>) {
        self.open.lock().reader = Some(thread::current().id());
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
            let handled = match ready.take() {
                Some(ready) => begin(&line, &ready),
                None => self.handle_line(&line),
            };
            if let Err(why) = handled {
                break why;
            }
        };
        self.give_up(why);
        let how = self.process.wait();
        let mut open = self.open.lock();
        let how = match &open.state {
            WorkerState::GivenUp(why) => format!("{why}; {how}"),
            _ => how,
        };
        open.state = WorkerState::Ended(how);
        drop(open);
        drop(ready);
        self.changed.notify_all();
    }

    /// Dispatches one reply line.
    fn handle_line(&self, line: &[u8]) -> Result<(), String> {
        let mut open = self.open.lock();
        open.last_line_at = Instant::now();
        if !open.is_up() {
            return Ok(()); // replies after the shutdown are ignored
        }
        drop(open);
        let Reply { id, answer } = Reply::parse(line)
            .map_err(|why| format!("it sent a line that is no answer ({why}): {}", shown(line)))?;
        let Some(Id::Number(id)) = id else {
            return Err(format!("it sent an answer without an id: {}", shown(line)));
        };
        let mut open = self.open.lock();
        if let ReplyBody::Pong { load, .. } = &answer {
            open.load = *load;
        }
        let is_up = open.is_up();
        match open.pending.get(&id) {
            Some(PendingCall::Generation(_)) => {}
            Some(_) => {
                let call = open.pending.remove(&id);
                drop(open);
                return self.answer_call(call, answer);
            }
            None if !is_up => return Ok(()),
            None => return Err(format!("it answered {id}, which is not open: {}", shown(line))),
        };
        drop(open);
        if let ReplyBody::Error(line) = &answer
            && line.code == Some(ErrorCode::ImageUnknown)
            && self.send_images(id, line)
        {
            return Ok(());
        }
        let event = answer.into_event().map_err(|answer| {
            format!("it answered a generation with {}", shown(format!("{answer:?}").as_bytes()))
        })?;
        let sink = match self.open.lock().pending.get_mut(&id) {
            Some(PendingCall::Generation(generation)) => generation.sink.take(),
            _ => None, // it was given up in the meantime
        };
        if let Some(sink) = sink {
            self.deliver(id, sink, event);
        }
        Ok(())
    }

    fn answer_call(&self, call: Option<PendingCall>, answer: ReplyBody) -> Result<(), String> {
        match (call, answer) {
            (Some(PendingCall::Call(sender)), answer) => drop(sender.send(answer)), // the caller may have panicked
            (Some(PendingCall::Ping(_)), ReplyBody::Pong { .. })
            | (Some(PendingCall::Cancel), ReplyBody::Cancelled { .. })
            | (Some(PendingCall::Image), ReplyBody::Stored { .. } | ReplyBody::Error(_)) => {}
            (_, answer) => {
                return Err(format!("it sent a wrong answer: {}", shown(format!("{answer:?}").as_bytes())));
            }
        }
        Ok(())
    }

    /// Sends the images that the worker lacks, and the generation again. Returns false if that was done before.
    fn send_images(&self, id: i64, line: &ErrorLine) -> bool {
        let (resend, stop) = match self.open.lock().pending.get_mut(&id) {
            Some(PendingCall::Generation(generation)) => (generation.resend.take(), generation.stop.clone()),
            _ => return false,
        };
        let Some(resend) = resend else { return false };
        let ResentGeneration { op, files } = *resend;
        let lacks = |file: &&Arc<ImageFile>| {
            let hashes = line.detail.as_ref().and_then(|detail| detail["value"].as_array());
            hashes.is_some_and(|hashes| hashes.iter().any(|hash| *hash == file.hash.to_string()))
        };
        for file in files.iter().filter(lacks) {
            self.send_call(PendingCall::Image, Op::Image(ImageUpload::of(file)));
        }
        self.outbox.push(&WorkerCall { id: Some(Id::Number(id)), op }, Urgency::Always);
        if stop.is_stopped() {
            self.cancel(id); // the worker knew no such generation in between
        }
        true
    }

    /// Calls a generation's sink without the lock.
    fn deliver(&self, id: i64, mut sink: Sink, event: Event) {
        let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
        let mut stop = None;
        {
            let mut open = self.open.lock();
            if is_last {
                open.pending.remove(&id); // before the sink learns of the end
            } else if let Some(PendingCall::Generation(generation)) = open.pending.get_mut(&id) {
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
        let mut open = self.open.lock();
        if let Some(PendingCall::Generation(generation)) = open.pending.get_mut(&id) {
            generation.sink = Some(sink);
            return;
        }
        drop(open);
        drop(sink); // it was given up in the meantime
    }

    /// Body of the writing thread. It ends, and closes the stream, when the queue is closed and empty.
    fn write(&self, mut to: impl Write) {
        while let Some(line) = self.outbox.take() {
            let written = to.write_all(&line).and_then(|()| to.flush());
            if let Err(error) = written {
                return self.give_up(format!("it does not read any more: {error}"));
            }
        }
    }

    /// Body of the watching thread: gives up a worker that has stopped answering.
    fn watch(&self, timeout: Duration) {
        let mut last_busy_at = Instant::now();
        loop {
            let period = PING_EVERY.min(timeout / 4);
            let mut open = self.open.lock();
            self.changed.wait_while_for(&mut open, |open| open.is_up(), period);
            if !open.is_up() {
                return;
            }
            let (last_line_at, pinged_at, busy_until) =
                (open.last_line_at, open.pinged_at(), open.busy_until);
            drop(open);
            if self.process.has_computed() != Some(false) {
                last_busy_at = Instant::now();
            }
            let Some(pinged_at) = pinged_at else {
                self.send_call(PendingCall::Ping(Instant::now()), Op::Ping(Nothing {}));
                continue;
            };
            let now = Instant::now();
            let since = last_line_at.max(pinged_at).max(busy_until);
            let (silent, idle) =
                (now.saturating_duration_since(since), now.saturating_duration_since(last_busy_at));
            if silent > timeout && (idle > timeout || silent > timeout * BUSY_FACTOR) {
                let state = if idle > timeout { "computes nothing" } else { "does nothing but compute" };
                return self
                    .give_up(format!("it has not answered for {:.1} s and {state}", silent.as_secs_f64()));
            }
        }
    }
}

/// Handles the first line.
fn begin(line: &[u8], ready: &Sender<Result<Ready, StartError>>) -> Result<(), String> {
    // Sending fails if `connect` has timed out.
    match Reply::parse(line).map(|reply| reply.answer) {
        Ok(ReplyBody::Ready(line)) => {
            let _ = ready.send(Ok(*line));
            Ok(())
        }
        Ok(ReplyBody::Error(line)) => {
            let why = format!("it cannot start: {}", line.error);
            let _ = ready.send(Err(StartError::Refused(line.into_error())));
            Err(why)
        }
        _ => Err(format!("its first line does not say that it is ready: {}", shown(line))),
    }
}

/// Quotes the start of an invalid line.
fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(&line[..line.len().min(SHOWN_BYTES)]);
    let dots = if line.len() > SHOWN_BYTES { " ..." } else { "" };
    format!("{text:?}{dots}")
}

/// Queue of lines to write.
#[derive(Default)]
struct Outbox {
    queue: Mutex<OutboxLines>,
    changed: Condvar,
}

#[derive(Default)]
struct OutboxLines {
    lines: VecDeque<Vec<u8>>,
    num_bytes: usize,
    is_closed: bool,
}

/// Treatment of a line when the queue is full.
#[derive(Clone, Copy, PartialEq)]
enum Urgency {
    /// Refuse it.
    WithRoom,
    /// Queue it anyway: such lines are few, or their callers wait for the answer.
    Always,
}

impl Outbox {
    /// Queues a line. Returns false if the queue is full. Drops the line if the queue is closed.
    fn push(&self, call: &WorkerCall, urgency: Urgency) -> bool {
        let mut line = serde_json::to_vec(call).expect("calls are plain data with text for keys");
        line.push(b'\n');
        let mut queue = self.queue.lock();
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

    /// Waits for the next line; `None` after the queue is closed and empty.
    fn take(&self) -> Option<Vec<u8>> {
        let is_idle = |queue: &mut OutboxLines| queue.lines.is_empty() && !queue.is_closed;
        let mut queue = self.queue.lock();
        self.changed.wait_while(&mut queue, is_idle);
        let line = queue.lines.pop_front()?;
        queue.num_bytes -= line.len();
        Some(line)
    }

    /// Closes the queue; lines in it are still written.
    fn close(&self) {
        self.queue.lock().is_closed = true;
        self.changed.notify_all();
    }
}
