//! The worker's end of the protocol, over any pair of streams: reads calls, drives the engine, writes
//! replies.
//!
//! Threads: one reads, one writes, and the caller's dispatches. Calls without an id have a thread that
//! answers them in order. Slow work has threads beside it: encoding text, compiling grammars, and questions
//! that wait for the engine's step.
//!
//! Invariants: every call gets exactly one last line unless the worker ends first, and lines are written
//! whole. The engine never waits for a reader: lines wait in memory, which is bounded because at most
//! [`OpenCalls`] calls are open before reading pauses. Calls without an id are answered before the end of the
//! input takes effect. Every kind of shutdown cancels open calls, waits up to [`GRACE`] for them, and saves
//! the KV of sessions.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::iter;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::protocol::{
    Detail, ErrorCode, ErrorLine, EventEncoder, Flush, Fork, Generate, IMAGES, Id, ImageUpload, KeptImages,
    MAX_LINE_BYTES, ModelId, Named, OPS, Op, Ready, Received, Refusal, Reply, ReplyBody, Restore, VERSION,
    WorkerCall, Yes, read_line, write_line,
};
use crate::client::EngineClient;
use crate::engine::StopHandle;
use crate::grammar::GrammarCompiler;
use crate::request::{EngineSessionName, Event, Request};
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::kv::TokenBuf;
use llmctl_models::text::{Encode, Tokenizer};

/// Open calls beyond those that the engine takes: questions, refusals, and replies that a slow reader has not
/// read.
const SPARE_CALLS: usize = 256;

/// Threads that encode text and compile grammars.
const PREPARERS: usize = 4;

/// Capacity of a Linux pipe in bytes, the unit of reads and writes.
const PIPE_BYTES: usize = 64 << 10;

/// Interval for polling whether the last call of an ended input is answered.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Longest wait of the shutdown for open calls, and again for the reader of the last lines.
const GRACE: Duration = Duration::from_secs(5);

/// Longest wait of the shutdown for KV to be saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(30);

/// Engine, tokenizer and identity that a worker serves.
pub struct WorkerContext {
    pub engine: EngineClient,
    pub tokenizer: Arc<Tokenizer>,
    pub model: ModelId,
}

/// Result of a worker's run.
#[derive(Debug)]
pub struct WorkerExit {
    pub why: ShutdownCause,
    /// False if saving the sessions' KV timed out.
    pub is_saved: bool,
    /// Notices for the user, one sentence each.
    pub notices: Vec<Notice>,
}

#[derive(Debug)]
pub enum ShutdownCause {
    /// The input ended.
    Input,
    /// A shutdown call, with its id.
    Shutdown(Option<Id>),
    /// A [`Stopper`].
    Stopped,
    /// The reader of the output has closed it.
    ReaderGone,
    OutputFailed(io::Error),
    EngineGone,
}

enum InputEvent {
    Line(Vec<u8>),
    TooLong,
    End(ShutdownCause),
}

/// Reader of the input. It starts before the model is loaded, so that an early end of the input is seen.
pub struct CallInbox {
    notices: Receiver<InputEvent>,
    sender: Sender<InputEvent>,
    open_calls: Arc<OpenCalls>,
    is_serving: Arc<AtomicBool>,
}

/// Shuts a worker down from outside. Clones refer to the same worker.
#[derive(Clone)]
pub struct Stopper(Sender<InputEvent>);

impl Stopper {
    pub fn stop(&self) {
        // Without a receiver the worker has ended already.
        let _ = self.0.send(InputEvent::End(ShutdownCause::Stopped));
    }
}

impl CallInbox {
    /// Starts reading. `ended_early` is called if the input ends before [`CallInbox::serve`] and contains no
    /// call.
    ///
    /// # Errors
    /// [`io::Error`] if the system cannot start a thread.
    pub fn open(
        input: impl Read + Send + 'static,
        ended_early: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, notices) = mpsc::channel();
        let open_calls = Arc::new(OpenCalls::new());
        let is_serving = Arc::new(AtomicBool::new(false));
        let inbox = Self { notices, sender: sender.clone(), open_calls, is_serving };
        let (open_calls, is_serving) = (inbox.open_calls.clone(), inbox.is_serving.clone());
        let body = move || {
            let num_calls = read_all(input, &sender, &open_calls);
            if num_calls == 0 && !is_serving.load(Ordering::SeqCst) {
                ended_early();
            }
            let _ = sender.send(InputEvent::End(ShutdownCause::Input)); // no receiver after another shutdown
        };
        thread::Builder::new().name("input".to_owned()).spawn(body)?;
        Ok(inbox)
    }

    /// Disables `ended_early`, because the process has an error to report and an exit code to set.
    pub fn stay(&self) {
        self.is_serving.store(true, Ordering::SeqCst);
    }

    pub fn stopper(&self) -> Stopper {
        Stopper(self.sender.clone())
    }

    /// Sends the ready line and answers calls until the shutdown.
    ///
    /// # Errors
    /// [`io::Error`] if the system cannot start a thread.
    pub fn serve(self, worker: WorkerContext, output: impl Write + Send + 'static) -> io::Result<WorkerExit> {
        self.is_serving.store(true, Ordering::SeqCst);
        let config = &worker.engine.spec().config;
        self.open_calls.set_most(config.max_running + config.max_waiting + SPARE_CALLS);
        let (lines, waiting_lines) = mpsc::channel();
        let writer = OutputWriter {
            output,
            open_calls: self.open_calls.clone(),
            notices: self.sender.clone(),
            is_broken: false,
        };
        let (is_open, written) = mpsc::channel::<()>();
        let body = move || {
            writer.run(&waiting_lines);
            drop(is_open);
        };
        thread::Builder::new().name("output".to_owned()).spawn(body)?;
        let _ = lines.send(OutputLine::Said(Reply { id: None, answer: ready(&worker) }));
        let dispatcher = Arc::new(Dispatcher::new(worker, lines, self.sender));
        let pools = CallPools::start(&dispatcher)?;
        let why = take_calls(&dispatcher, &pools, &self.notices);
        Ok(dispatcher.finish(why, &written))
    }
}

fn ready(worker: &WorkerContext) -> ReplyBody {
    let spec = worker.engine.spec().clone();
    let max_named_sessions = spec.config.max_sessions;
    ReplyBody::Ready(Box::new(Ready {
        ready: Yes,
        protocol: VERSION,
        max_sessions: max_named_sessions.saturating_add(1),
        max_named_sessions,
        capabilities: OPS
            .iter()
            .copied()
            .chain(spec.vision.is_some().then_some(IMAGES))
            .map(str::to_owned)
            .collect(),
        model: worker.model.clone(),
        spec,
    }))
}

/// Body of the reading thread. Returns the number of calls read.
fn read_all(input: impl Read, notices: &Sender<InputEvent>, open_calls: &OpenCalls) -> usize {
    let mut input = BufReader::with_capacity(PIPE_BYTES, input);
    let mut line = Vec::new();
    let mut num_calls = 0;
    loop {
        let notice = match read_line(&mut input, &mut line) {
            Ok(Received::Line) if line.iter().all(u8::is_ascii_whitespace) => continue,
            Ok(Received::Line) => InputEvent::Line(std::mem::take(&mut line)),
            Ok(Received::TooLong) => InputEvent::TooLong,
            // The writer of a torn line has ended, so there is no reader either.
            Ok(Received::Torn | Received::End) | Err(_) => return num_calls,
        };
        num_calls += 1;
        open_calls.begin();
        if notices.send(notice).is_err() {
            return num_calls;
        }
    }
}

/// Dispatches calls until something shuts the worker down.
fn take_calls(
    dispatcher: &Arc<Dispatcher>,
    pools: &CallPools,
    notices: &Receiver<InputEvent>,
) -> ShutdownCause {
    loop {
        match notices.recv() {
            Ok(InputEvent::Line(line)) => dispatch(dispatcher, pools, WorkerCall::parse(&line)),
            Ok(InputEvent::TooLong) => {
                let message = format!("a line of more than {MAX_LINE_BYTES} bytes");
                dispatch(
                    dispatcher,
                    pools,
                    Err(Refusal { id: None, code: ErrorCode::InvalidRequest, message }),
                );
            }
            Ok(InputEvent::End(ShutdownCause::Input)) => return answer_the_rest(pools, notices),
            Ok(InputEvent::End(why)) => return why,
            Err(_) => return ShutdownCause::Stopped, // unreachable while the dispatcher, which holds a sender, lives
        }
    }
}

/// Answers the calls without an id that were read before the input ended, as users expect who pipe a file
/// into the worker. A dead parent closes the output too, which ends the wait.
fn answer_the_rest(pools: &CallPools, notices: &Receiver<InputEvent>) -> ShutdownCause {
    while pools.num_in_line.load(Ordering::SeqCst) > 0 {
        match notices.recv_timeout(LOOK_EVERY) {
            Ok(InputEvent::End(why)) => return why,
            Err(RecvTimeoutError::Disconnected) => return ShutdownCause::Stopped,
            Ok(InputEvent::Line(_) | InputEvent::TooLong) | Err(RecvTimeoutError::Timeout) => {}
        }
    }
    ShutdownCause::Input
}

/// Routes a call to a thread. Answers cancellations and refusals here, because they must not wait.
fn dispatch(dispatcher: &Arc<Dispatcher>, pools: &CallPools, call: Result<WorkerCall, Refusal>) {
    let (id, op) = match call {
        Ok(WorkerCall { id: Some(id), .. }) if dispatcher.has(&id) => {
            let message = "a call with this id is open".to_owned();
            let refusal = Refusal { id: Some(id), code: ErrorCode::DuplicateId, message };
            return dispatcher.send(OutputLine::Last(refusal.into()));
        }
        Ok(WorkerCall { id, op: Op::Cancel(cancel) }) => {
            let cancelled = dispatcher.cancel(cancel.request.as_ref());
            return dispatcher
                .send(OutputLine::Last(Reply { id, answer: ReplyBody::Cancelled { cancelled } }));
        }
        Ok(WorkerCall { id: None, op }) => return pools.one_by_one(Ok(op)),
        Ok(WorkerCall { id: Some(id), op }) => (id, op),
        Err(refusal) if refusal.id.is_none() => return pools.one_by_one(Err(refusal)),
        Err(refusal) => return dispatcher.send(OutputLine::Last(refusal.into())),
    };
    let (guard, stop) = CallGuard::new(dispatcher, Some(id), matches!(op, Op::Generate(_)));
    match op {
        Op::Generate(generate) if generate.is_work() => pools.prepare(GenerateJob { guard, generate, stop }),
        Op::Generate(generate) => dispatcher.generate(GenerateJob { guard, generate, stop }),
        // Before the calls that name it are looked at.
        op @ Op::Image(_) => dispatcher.answer(guard, op),
        op => pools.ask(guard, op),
    }
}

/// A generation to prepare and submit.
struct GenerateJob {
    guard: CallGuard,
    generate: Box<Generate>,
    stop: StopHandle,
}

/// The threads that answer calls.
struct CallPools {
    one_by_one: Sender<Result<Op, Refusal>>,
    /// Calls without an id that are not answered yet.
    num_in_line: Arc<AtomicUsize>,
    preparers: Sender<GenerateJob>,
    questions: Sender<(CallGuard, Op)>,
}

impl CallPools {
    fn start(dispatcher: &Arc<Dispatcher>) -> io::Result<Self> {
        let (one_by_one, calls) = mpsc::channel();
        let (questions, asked) = mpsc::channel::<(CallGuard, Op)>();
        let (preparers, jobs) = mpsc::channel::<GenerateJob>();
        let jobs = Arc::new(Mutex::new(jobs));
        let start = |name: &str, body: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
        };
        let own = Arc::clone(dispatcher);
        let num_in_line = Arc::<AtomicUsize>::default();
        let its_line = Arc::clone(&num_in_line);
        start("calls", Box::new(move || own.answer_one_by_one(&calls, &its_line)))?;
        let own = Arc::clone(dispatcher);
        let answer = move |(guard, op)| own.answer(guard, op);
        start("questions", Box::new(move || asked.into_iter().for_each(answer)))?;
        for _ in 0..PREPARERS {
            let (own, jobs) = (Arc::clone(dispatcher), Arc::clone(&jobs));
            let next = move || jobs.lock().recv();
            let body = move || {
                while let Ok(job) = next() {
                    own.generate(job);
                }
            };
            start("prepare", Box::new(body))?;
        }
        Ok(Self { one_by_one, num_in_line, preparers, questions })
    }

    // The threads live as long as their senders, so sending fails only after a panic; dropping the guard then
    // answers the call.

    fn one_by_one(&self, call: Result<Op, Refusal>) {
        self.num_in_line.fetch_add(1, Ordering::SeqCst);
        let _ = self.one_by_one.send(call);
    }

    fn prepare(&self, job: GenerateJob) {
        let _ = self.preparers.send(job);
    }

    fn ask(&self, guard: CallGuard, op: Op) {
        let _ = self.questions.send((guard, op));
    }
}

/// State that all threads share.
struct Dispatcher {
    engine: EngineClient,
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
    lines: Sender<OutputLine>,
    notices: Sender<InputEvent>,
    active: Mutex<ActiveCalls>,
    none_active: Condvar,
    images: Mutex<KeptImages>,
}

#[derive(Default)]
struct ActiveCalls {
    /// Open calls by id; at most one has none. Generations have a handle to stop them.
    calls: HashMap<Option<Id>, Option<StopHandle>>,
    is_ending: bool,
}

impl Dispatcher {
    fn new(worker: WorkerContext, lines: Sender<OutputLine>, notices: Sender<InputEvent>) -> Self {
        let WorkerContext { engine, tokenizer, .. } = worker;
        let compiler = engine.spec().grammar_compiler(Arc::clone(&tokenizer));
        let (active, none_active, images) = Default::default();
        Self { engine, tokenizer, compiler, lines, notices, active, none_active, images }
    }

    fn send(&self, line: OutputLine) {
        let _ = self.lines.send(line); // the writer ends only after `OutputLine::End`
    }

    /// Returns whether a call with this id is open.
    fn has(&self, id: &Id) -> bool {
        self.active.lock().calls.contains_key(&Some(id.clone()))
    }

    /// Stops the generation with this id, or all of them. Returns how many were stopped.
    fn cancel(&self, request: Option<&Id>) -> usize {
        let stops: Vec<StopHandle> = {
            let active = self.active.lock();
            let named = active
                .calls
                .iter()
                .filter(|(id, _)| request.is_none_or(|request| id.as_ref() == Some(request)));
            named.filter_map(|(_, stop)| stop.clone()).collect()
        };
        stops.iter().for_each(StopHandle::stop);
        stops.len()
    }

    /// Body of the thread for calls without an id.
    fn answer_one_by_one(self: &Arc<Self>, calls: &Receiver<Result<Op, Refusal>>, num_in_line: &AtomicUsize) {
        for call in calls {
            match call {
                Ok(op) => self.answer_alone(op),
                Err(refusal) => self.send(OutputLine::Last(refusal.into())),
            }
            num_in_line.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Answers a call and returns when its last line is queued.
    fn answer_alone(self: &Arc<Self>, op: Op) {
        let (over, wait) = mpsc::channel();
        let (mut guard, stop) = CallGuard::new(self, None, matches!(op, Op::Generate(_)));
        guard.over = Some(over);
        match op {
            Op::Generate(generate) => self.generate(GenerateJob { guard, generate, stop }),
            op => self.answer(guard, op),
        }
        let _ = wait.recv(); // fails when the guard is dropped
    }

    /// Prepares and submits a generation. Its events arrive on the engine's thread.
    fn generate(&self, job: GenerateJob) {
        let GenerateJob { mut guard, generate, stop } = job;
        guard.session.clone_from(&generate.session_id);
        let detail = Detail::of(guard.id.is_some(), generate.events);
        let kept = self.images.lock().files(&generate.images);
        let files = match kept {
            Ok((files, missing)) if missing.is_empty() => files,
            Ok((_, missing)) => return guard.end(ReplyBody::Error(ErrorLine::unknown_images(missing))),
            Err(error) => return guard.fail(&error),
        };
        let request = match catch_unwind(AssertUnwindSafe(|| self.prepare(*generate, files))) {
            Ok(Ok(request)) => request,
            Ok(Err(error)) => return guard.fail(&error),
            Err(_) => return guard.fail(&Error::Backend("preparing the request panicked".to_owned())),
        };
        if self.active.lock().is_ending {
            return guard.refuse_at_end();
        }
        let mut encoder = EventEncoder::new(detail);
        let mut guard = Some(guard);
        let sink = move |event: Event| {
            let is_last = matches!(event, Event::Done(_) | Event::Failed(_));
            let answer = encoder.encode(event);
            match (guard.take_if(|_| is_last), &guard, answer) {
                (Some(guard), _, Some(answer)) => guard.end(answer),
                (None, Some(guard), Some(answer)) => guard.send_line(answer),
                _ => {}
            }
            ControlFlow::Continue(())
        };
        // The request is valid, so an error means that the engine is gone; the guard in the dropped sink
        // reports that.
        if let Ok(engine_stop) = self.engine.submit_to(request, Box::new(sink)) {
            stop.on_stop(move || engine_stop.stop());
        }
    }

    fn prepare(&self, generate: Generate, files: Vec<Arc<[u8]>>) -> Result<Request> {
        let spec = self.engine.spec();
        let context = spec.context_length();
        let plain = Encode { add_special: false, parse_special: true };
        let encode = |text: &str, is_behind: bool| match is_behind {
            false => self.tokenizer.encode_prompt(text, plain, context),
            true => self.tokenizer.encode_chat_rest_for(text, Some(context)),
        };
        let request = generate.into_request(encode, |source| self.compiler.compile(source), files)?;
        request.validate(spec)?;
        Ok(request)
    }

    /// Answers all calls but generations.
    fn answer(&self, mut guard: CallGuard, op: Op) {
        guard.session = op.session().cloned();
        if let Op::Shutdown(_) = op {
            let why = ShutdownCause::Shutdown(guard.id.clone());
            guard.leave();
            let _ = self.notices.send(InputEvent::End(why)); // without a receiver the worker is ending already
            return;
        }
        match self.ask(op, guard.id.is_some()) {
            Ok(answer) => guard.end(answer),
            Err(error) => guard.fail(&error),
        }
    }

    fn ask(&self, op: Op, tells_more: bool) -> Result<ReplyBody> {
        let engine = &self.engine;
        let told = |existed: bool| tells_more.then_some(existed);
        Ok(match op {
            Op::Open(Named { session_id }) => {
                // Open a session by restoring it with no tokens. The engine's error for a name in use means
                // that it existed.
                let existed = match engine.restore_session(&session_id, TokenBuf::default()) {
                    Err(Error::InvalidParameter { .. }) => true,
                    other => other.map(|()| false)?,
                };
                ReplyBody::Opened { opened: Yes, session_id, existed: told(existed) }
            }
            Op::Close(Named { session_id }) => {
                let existed = existed(engine.close_session(&session_id))?;
                ReplyBody::Closed { closed: Yes, session_id, existed: told(existed) }
            }
            Op::Reset(Named { session_id }) => {
                let existed = existed(engine.reset_session(&session_id))?;
                ReplyBody::Reset { reset: Yes, session_id, existed: told(existed) }
            }
            Op::Fork(Fork { session_id, to }) => {
                engine.fork_session(&session_id, &to)?;
                ReplyBody::Forked { forked: Yes, session_id, to }
            }
            Op::Restore(Restore { session_id, tokens: ids, images, adapters }) => {
                engine.restore_session(&session_id, TokenBuf { ids, images, adapters })?;
                ReplyBody::Restored { restored: Yes, session_id }
            }
            Op::Image(ImageUpload { blob }) => {
                let sha256 = self.images.lock().add(&blob)?.to_string();
                ReplyBody::Stored { stored: Yes, sha256 }
            }
            Op::Inspect(Named { session_id }) => {
                ReplyBody::Session { session: engine.inspect_session(&session_id)? }
            }
            Op::Sessions(_) => ReplyBody::Sessions { sessions: engine.list_sessions()? },
            Op::Ping(_) => ReplyBody::Pong { pong: Yes, load: engine.load()? },
            Op::Notices(_) => {
                let notices = engine.take_notices()?.iter().map(Notice::to_string).collect();
                ReplyBody::Notices { notices }
            }
            Op::Flush(Flush { timeout_ms }) => {
                ReplyBody::Flushed { flushed: engine.flush_disk(Duration::from_millis(timeout_ms))? }
            }
            Op::Generate(_) | Op::Cancel(_) | Op::Shutdown(_) => {
                return Err(Error::InvalidState("no question to the engine")); // handled before
            }
        })
    }

    /// Stops open calls, saves, and waits for the last lines to be written.
    fn finish(&self, why: ShutdownCause, written: &Receiver<()>) -> WorkerExit {
        self.active.lock().is_ending = true;
        self.cancel(None);
        let still_under_way = |active: &mut ActiveCalls| !active.calls.is_empty();
        self.none_active.wait_while_for(&mut self.active.lock(), still_under_way, GRACE);
        let (is_saved, notices) = self.save().unwrap_or_default();
        if let ShutdownCause::Shutdown(id) = &why {
            self.send(OutputLine::Last(Reply { id: id.clone(), answer: ReplyBody::Bye { bye: Yes } }));
        }
        self.send(OutputLine::End);
        // Bounded, so that a stalled reader does not keep the worker alive.
        let _ = written.recv_timeout(GRACE);
        WorkerExit { why, is_saved, notices }
    }

    /// Saves KV. Returns whether all is saved, and notices; `None` if the engine does not answer in time, so
    /// that a hanging step does not keep the worker alive.
    fn save(&self) -> Option<(bool, Vec<Notice>)> {
        let (sender, saved) = mpsc::channel();
        let engine = self.engine.clone();
        let save = move || {
            let is_saved = engine.flush_disk(FLUSH_TIMEOUT).unwrap_or(false);
            let _ = sender.send((is_saved, engine.take_notices().unwrap_or_default())); // the receiver may have timed out
        };
        thread::Builder::new().name("save".to_owned()).spawn(save).ok()?;
        saved.recv_timeout(FLUSH_TIMEOUT + GRACE).ok()
    }
}

/// Maps `SessionNotFound` to `false`.
fn existed(done: Result<()>) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(Error::SessionNotFound(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// An open call. Sending its last line closes it. A guard that is dropped reports [`Error::EngineGone`].
struct CallGuard {
    id: Option<Id>,
    /// Session named in error lines.
    session: Option<EngineSessionName>,
    dispatcher: Arc<Dispatcher>,
    is_over: bool,
    /// Closed when the call is.
    over: Option<Sender<()>>,
}

impl CallGuard {
    /// Opens a call and returns its stop handle. No other open call may have this id.
    fn new(dispatcher: &Arc<Dispatcher>, id: Option<Id>, is_generate: bool) -> (Self, StopHandle) {
        let stop = StopHandle::default();
        dispatcher.active.lock().calls.insert(id.clone(), is_generate.then(|| stop.clone()));
        (Self { id, session: None, dispatcher: Arc::clone(dispatcher), is_over: false, over: None }, stop)
    }

    fn send_line(&self, answer: ReplyBody) {
        self.dispatcher.send(OutputLine::Said(Reply { id: self.id.clone(), answer }));
    }

    fn end(mut self, answer: ReplyBody) {
        self.conclude(answer);
    }

    fn fail(self, error: &Error) {
        let line = ErrorLine::new(error, self.id.is_some());
        self.end(ReplyBody::Error(line));
    }

    fn refuse_at_end(self) {
        let error = "the worker is ending".to_owned();
        let code = Some(ErrorCode::Ending);
        self.end(ReplyBody::Error(ErrorLine { error, code, detail: None, session_id: None }));
    }

    /// Closes the call without a line.
    fn leave(mut self) {
        self.unregister();
    }

    fn conclude(&mut self, mut answer: ReplyBody) {
        let mut is_engine_gone = false;
        if let ReplyBody::Error(line) = &mut answer {
            line.session_id = self.session.take();
            is_engine_gone = line.code == Some(ErrorCode::EngineGone);
        }
        self.unregister(); // before its client can read the line and reuse the id
        self.dispatcher.send(OutputLine::Last(Reply { id: self.id.clone(), answer }));
        if is_engine_gone {
            let _ = self.dispatcher.notices.send(InputEvent::End(ShutdownCause::EngineGone)); // the worker may be ending already
        }
    }

    fn unregister(&mut self) {
        self.is_over = true;
        let mut active = self.dispatcher.active.lock();
        active.calls.remove(&self.id);
        if active.calls.is_empty() {
            self.dispatcher.none_active.notify_all();
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        if !self.is_over {
            let line = ErrorLine::new(&Error::EngineGone, self.id.is_some());
            self.conclude(ReplyBody::Error(line));
        }
    }
}

/// Message to the writing thread.
enum OutputLine {
    Said(Reply),
    /// The last line of its call.
    Last(Reply),
    /// The last message.
    End,
}

/// State of the writing thread.
struct OutputWriter<W> {
    output: W,
    open_calls: Arc<OpenCalls>,
    notices: Sender<InputEvent>,
    is_broken: bool,
}

impl<W: Write> OutputWriter<W> {
    fn run(mut self, lines: &Receiver<OutputLine>) {
        let mut bytes = Vec::new();
        let mut is_over = false;
        while !is_over && let Ok(first) = lines.recv() {
            bytes.clear();
            let mut num_answered = 0;
            for line in iter::once(first).chain(lines.try_iter()) {
                match line {
                    OutputLine::Said(reply) => self.append(&mut bytes, &reply),
                    OutputLine::Last(reply) => {
                        self.append(&mut bytes, &reply);
                        num_answered += 1;
                    }
                    OutputLine::End => is_over = true,
                }
                if is_over || bytes.len() >= PIPE_BYTES {
                    break;
                }
            }
            self.write(&bytes);
            self.open_calls.end(num_answered);
        }
    }

    fn append(&mut self, bytes: &mut Vec<u8>, reply: &Reply) {
        if let Err(error) = write_line(bytes, reply) {
            self.fail(error);
        }
    }

    /// Writes bytes. After an error, later bytes are discarded so that no call waits for them.
    fn write(&mut self, bytes: &[u8]) {
        if self.is_broken {
            return;
        }
        if let Err(error) = self.output.write_all(bytes).and_then(|()| self.output.flush()) {
            self.fail(error);
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.is_broken = true;
        let why = match error.kind() {
            io::ErrorKind::BrokenPipe => ShutdownCause::ReaderGone,
            _ => ShutdownCause::OutputFailed(error),
        };
        let _ = self.notices.send(InputEvent::End(why)); // the worker may be ending already
    }
}

/// Count of calls that are read and whose answers are not fully written. The reading thread waits at the
/// limit.
struct OpenCalls {
    count: Mutex<Count>,
    fewer: Condvar,
}

struct Count {
    open: usize,
    most: usize,
}

impl OpenCalls {
    fn new() -> Self {
        Self { count: Mutex::new(Count { open: 0, most: SPARE_CALLS }), fewer: Condvar::new() }
    }

    fn set_most(&self, most: usize) {
        self.count.lock().most = most;
        self.fewer.notify_all();
    }

    fn begin(&self) {
        let mut count = self.count.lock();
        self.fewer.wait_while(&mut count, |count| count.open >= count.most);
        count.open += 1;
    }

    fn end(&self, num_calls: usize) {
        let mut count = self.count.lock();
        count.open = count.open.saturating_sub(num_calls);
        self.fewer.notify_all();
    }
}
