//! Engines of other programs (vLLM, SGLang, another llmctl), reached over HTTP with token ids: the third
//! transport.
//!
//! One thread runs all requests of a client as tasks, and calls their sinks. `address` and `http` are
//! requests and streams; `wire` is what engines are asked and answer, `refusal` what they cannot honour,
//! `host` one engine, `answer` one answer, `sessions` the tokens of sessions, `order` the engine that a
//! session is with. `message_server` lends the same connections to clients of servers that take messages, and
//! [`EngineHttp::request`] to clients of MCP servers.
//!
//! Invariants: what an engine cannot honour is refused by name before it is sent; a request is asked of
//! another engine only while none of its tokens is delivered; an engine generates for no reader that has
//! gone.

mod address;
mod answer;
mod host;
mod http;
mod key;
mod message_server;
mod order;
mod refusal;
mod sessions;
mod sse;
mod tls;
mod wire;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

pub use self::address::{EndpointUrl, EngineUrl};
use self::answer::{AnswerSetting, OnEnd, RemoteAnswer};
use self::host::{AttemptEnd, EngineHostFacts, ExpectedModel, Host, RunningAt};
pub use self::http::{EngineHttp, HttpAnswer, HttpFailure, ServerSettings, SseStream};
pub use self::key::ServerKey;
pub use self::message_server::{MessagePart, MessageServer, MessageStream};
pub use self::order::rendezvous_order;
use self::sessions::RemoteSessions;
pub use self::sse::{SseEvent, SseParser};
pub use self::tls::TlsTrust;
pub use self::wire::{ChunkError, ChunkReader, EngineChunk, EngineFinish, EngineKind};
use crate::client::{EndGuard, EngineTransport, RemoteEngineFacts, Sink};
use crate::engine::{EngineLoad, SessionDetail, SessionInfo, StopHandle};
use crate::request::{Difference, EngineSessionName, Event, Finish, Request};
use crate::sample::draw_seed;
use crate::spec::{EngineConfig, EngineSpec};
use llmctl_base::error::{Error, Result};
use llmctl_base::notice::Notice;
use llmctl_models::kv::{KvGroup, KvKind, TokenBuf};
use llmctl_models::model::ModelSpec;
use llmctl_models::text::{Encode, Tokenizer};

/// Interval at which an engine that is alone is asked whether it is healthy, and failures in a row after which it is lost.
const HEALTH_EVERY: Duration = Duration::from_secs(5);
const MOST_FAILURES: u32 = 2;

/// Treatment of an engine that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WhenLost {
    /// The transport ends, so that a server replaces it.
    End,
    /// Requests fail until an engine is back.
    Stay,
}

/// Model and engines of a client.
#[derive(Debug, Clone)]
pub struct HttpEngineSettings {
    pub urls: Vec<EngineUrl>,
    pub connection: ServerSettings,
    /// Name of the model for the user.
    pub model: String,
    pub architecture: String,
    pub tokenizer: Arc<Tokenizer>,
    pub vocab_size: usize,
    /// The context that the user asks for.
    pub context_tokens: Option<usize>,
    /// The context that the model's files name.
    pub most_context_tokens: Option<usize>,
    pub ends: Vec<u32>,
    pub max_running: usize,
    pub max_waiting: usize,
    pub max_sessions: usize,
    /// Each session has its own cache at the engine, each request without a session none.
    pub salts_cache: bool,
    pub when_lost: WhenLost,
}

/// A client's engines behind HTTP.
pub struct HttpEngine {
    spec: Arc<EngineSpec>,
    vocabulary: Arc<Tokenizer>,
    facts: RemoteEngineFacts,
    shared: Arc<Shared>,
    tasks: TaskThread,
}

/// State that all requests share.
struct Shared {
    hosts: Vec<Arc<Host>>,
    expected: ExpectedModel,
    when_lost: WhenLost,
    max_waiting: usize,
    salts_cache: bool,
    /// Requests that may run.
    places: Arc<Semaphore>,
    num_waiting: AtomicUsize,
    state: Mutex<SharedState>,
}

struct SharedState {
    sessions: RemoteSessions,
    notices: Vec<Notice>,
    guards: Vec<EndGuard>,
    /// Why the only engine is lost.
    lost: Option<String>,
    open: HashMap<u64, StopHandle>,
    num_requests: u64,
}

impl Shared {
    /// Ends the transport.
    fn end(&self, why: String) {
        let mut state = self.state.lock();
        state.lost.get_or_insert(why);
        let guards = std::mem::take(&mut state.guards);
        drop(state);
        drop(guards);
    }

    /// Returns the engines for a request, the best first: those in trouble come last.
    fn order(&self, session: Option<&EngineSessionName>) -> Vec<&Arc<Host>> {
        let mut order: Vec<&Arc<Host>> = match session {
            Some(name) => rendezvous_order(name.as_str(), self.hosts.len())
                .into_iter()
                .map(|nth| &self.hosts[nth])
                .collect(),
            None => self.hosts.iter().collect(),
        };
        if session.is_none() {
            order.sort_by_key(|host| host.num_running());
        }
        order.sort_by_key(|host| host.is_in_trouble());
        order
    }

    /// Returns the salt of the request's cache at the engine.
    fn cache_salt(&self, session: Option<&EngineSessionName>) -> Option<String> {
        let name = || match session {
            Some(name) => format!("session {name}"),
            None => format!("request {}{}", draw_seed(), draw_seed()),
        };
        let salt = || Sha256::digest(name()).iter().map(|byte| format!("{byte:02x}")).collect();
        self.salts_cache.then(salt)
    }

    /// Runs a request to its last event.
    async fn answer(&self, answer: &mut RemoteAnswer, spec: &EngineSpec, cancel: &Notify) {
        let session = answer.request.session.clone();
        let salt = self.cache_salt(session.as_ref());
        let mut reasons: Vec<String> = Vec::new();
        for host in self.order(session.as_ref()) {
            if let Some(reason) = reasons.last() {
                let notice = format!("{reason}; the request goes to {}", host.name());
                self.state.lock().notices.push(Notice::Remote(notice));
            }
            answer.hold_engine(Some(Box::new(RunningAt::new(host))));
            let end = match host.facts(&self.expected).await {
                Ok(facts) => host.generate(answer, spec, (&facts, salt.as_deref()), cancel).await,
                Err(why) => AttemptEnd::Lost(why),
            };
            let AttemptEnd::Lost(why) = end else { return host.set_trouble(None) };
            answer.hold_engine(None);
            host.set_trouble(Some(why.clone()));
            reasons.push(format!("{}: {why}", host.name()));
            if !answer.is_untouched() {
                break;
            }
        }
        self.check_lost().await;
        answer.fail(Error::RemoteLost(reasons.join("; ")));
    }

    /// Ends the transport if its engine is not healthy.
    async fn check_lost(&self) {
        if let ([host], WhenLost::End) = (&*self.hosts, self.when_lost)
            && let Err(failure) = host.check_health().await
        {
            self.end(failure.to_string());
        }
    }

    /// Waits until as few requests run as may, and says so to the reader; `None` after a cancellation.
    async fn place(&self, answer: &mut RemoteAnswer, cancel: &Notify) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Some(place);
        }
        let waiting = self.num_waiting.fetch_add(1, Ordering::SeqCst);
        if waiting >= self.max_waiting {
            self.num_waiting.fetch_sub(1, Ordering::SeqCst);
            answer.fail(Error::QueueFull { waiting });
            return None;
        }
        answer.wait(waiting + 1);
        let place = tokio::select! {
            place = Arc::clone(&self.places).acquire_owned() => place.ok(),
            () = cancel.notified() => None,
        };
        self.num_waiting.fetch_sub(1, Ordering::SeqCst);
        if place.is_none() {
            answer.finish(Finish::Cancelled);
        }
        place
    }

    /// Keeps a request's stop until it ends, and returns what to do then, with its session's tokens.
    fn open(self: &Arc<Self>, session: Option<EngineSessionName>, stop: StopHandle) -> OnEnd {
        let mut state = self.state.lock();
        state.num_requests += 1;
        let id = state.num_requests;
        state.open.insert(id, stop);
        let shared = Arc::downgrade(self);
        Box::new(move |tokens| {
            let Some(shared) = shared.upgrade() else { return };
            let mut state = shared.state.lock();
            state.open.remove(&id);
            if let Some(name) = session {
                state.sessions.leave(&name, tokens);
            }
        })
    }

    fn load(&self) -> EngineLoad {
        let num_running = self.hosts.iter().map(|host| host.num_running()).sum();
        let num_waiting = self.num_waiting.load(Ordering::SeqCst);
        EngineLoad {
            num_running,
            num_waiting,
            num_sessions: self.state.lock().sessions.len(),
            ..EngineLoad::default()
        }
    }
}

impl HttpEngine {
    /// Asks the engines what they are. One of them must answer; the others may come later.
    ///
    /// # Errors
    /// [`Error::RemoteLost`] with the reason of each if none can be used; [`Error::InvalidParameter`] for a context that they
    /// do not have.
    pub fn connect(settings: HttpEngineSettings) -> Result<Self> {
        let (shared, tasks) = prepare(&settings)?;
        let (facts, known) = describe_all(&shared, &tasks)?;
        if known.is_empty() {
            return Err(Error::RemoteLost(facts.unreachable.join("; ")));
        }
        let spec = Arc::new(spec(&settings, &known)?);
        let engine = Self { spec, vocabulary: settings.tokenizer, facts, shared, tasks };
        engine.watch();
        Ok(engine)
    }

    /// Connects to an engine whose limits are known from others. One that cannot be used is lost at once, with the reason.
    pub fn connect_as(settings: HttpEngineSettings, spec: &EngineSpec) -> Result<Self> {
        let (shared, tasks) = prepare(&settings)?;
        let (facts, known) = describe_all(&shared, &tasks)?;
        let shortest = known.iter().filter_map(|facts| facts.context_tokens).min();
        match shortest.filter(|context| *context < spec.context_length()) {
            _ if known.is_empty() => shared.end(facts.unreachable.join("; ")),
            Some(context) => {
                shared.end(format!("its context is {context} tokens, less than that of the others"))
            }
            None => {}
        }
        let spec = Arc::new(spec.clone());
        let engine = Self { spec, vocabulary: settings.tokenizer, facts, shared, tasks };
        engine.watch();
        Ok(engine)
    }
}

/// Creates what the requests of one client share.
fn prepare(settings: &HttpEngineSettings) -> Result<(Arc<Shared>, TaskThread)> {
    let expected = ExpectedModel {
        name: settings.model.clone(),
        probe_ids: settings
            .tokenizer
            .encode(ExpectedModel::probe_text(), Encode { add_special: false, parse_special: false })?,
    };
    let host =
        |url: &EngineUrl| Arc::new(Host::new(EngineHttp::new(url.clone(), settings.connection.clone())));
    let shared = Arc::new(Shared {
        hosts: settings.urls.iter().map(host).collect(),
        expected,
        when_lost: settings.when_lost,
        max_waiting: settings.max_waiting,
        salts_cache: settings.salts_cache,
        places: Arc::new(Semaphore::new(settings.max_running)),
        num_waiting: AtomicUsize::new(0),
        state: Mutex::new(SharedState {
            sessions: RemoteSessions::new(settings.max_sessions),
            notices: Vec::new(),
            guards: Vec::new(),
            lost: None,
            open: HashMap::new(),
            num_requests: 0,
        }),
    });
    Ok((shared, TaskThread::start()?))
}

/// Asks all engines what they are.
fn describe_all(
    shared: &Arc<Shared>,
    tasks: &TaskThread,
) -> Result<(RemoteEngineFacts, Vec<Arc<EngineHostFacts>>)> {
    let asked = Arc::clone(shared);
    let answers = tasks.ask(async move {
        let mut answers = Vec::new();
        for host in &asked.hosts {
            answers.push((host.name(), host.facts(&asked.expected).await));
        }
        answers
    })?;
    let facts = remote_facts(&answers);
    Ok((facts, answers.into_iter().filter_map(|(_, facts)| facts.ok()).collect()))
}

impl HttpEngine {
    /// Watches the health of an engine that is alone, so that its loss is known before the next request.
    fn watch(&self) {
        if self.shared.when_lost == WhenLost::Stay || self.shared.hosts.len() != 1 {
            return;
        }
        let shared = Arc::downgrade(&self.shared);
        self.tasks.handle.spawn(async move {
            let mut num_failures = 0;
            loop {
                sleep(HEALTH_EVERY).await;
                let Some(shared) = shared.upgrade() else { return };
                let Err(failure) = shared.hosts[0].check_health().await else {
                    num_failures = 0;
                    continue;
                };
                num_failures += 1;
                if num_failures == MOST_FAILURES {
                    return shared.end(failure.to_string());
                }
            }
        });
    }

    fn is_lost(&self) -> bool {
        self.shared.state.lock().lost.is_some()
    }

    /// Runs `work` on the sessions of a transport that has not ended.
    fn of_sessions<T>(&self, work: impl FnOnce(&mut RemoteSessions) -> Result<T>) -> Result<T> {
        let mut state = self.shared.state.lock();
        match state.lost {
            Some(_) => Err(Error::EngineGone),
            None => work(&mut state.sessions),
        }
    }
}

fn remote_facts(answers: &[(String, Result<Arc<EngineHostFacts>, String>)]) -> RemoteEngineFacts {
    let mut facts = RemoteEngineFacts::default();
    for (name, answer) in answers {
        match answer {
            Ok(known) => {
                let version = known.version.as_ref().map_or(String::new(), |version| format!(" {version}"));
                facts.engines.push(format!("{}{version} at {name} ({})", known.kind.name(), known.model));
            }
            Err(why) => facts.unreachable.push(format!("{name}: {why}")),
        }
    }
    facts
}

/// Returns the limits in force: the smallest of all engines, and of what was asked for.
fn spec(settings: &HttpEngineSettings, known: &[Arc<EngineHostFacts>]) -> Result<EngineSpec> {
    let theirs = known.iter().filter_map(|facts| facts.context_tokens).min();
    let Some(most) = theirs.or(settings.most_context_tokens) else {
        let message = "neither the engine nor the model's files say how long it is; give --ctx".to_owned();
        return Err(Error::InvalidParameter { name: "context_length", message });
    };
    let model = ModelSpec {
        architecture: settings.architecture.clone(),
        vocab_size: settings.vocab_size,
        context_length: most,
        // Its KV takes no memory here.
        groups: vec![KvGroup { kind: KvKind::Full, page_bytes: 0 }],
        can_rewind: true,
        adapters: Vec::new(),
    };
    let config = EngineConfig {
        max_running: settings.max_running,
        max_waiting: settings.max_waiting,
        max_sessions: settings.max_sessions,
        ..EngineConfig::new(settings.context_tokens.unwrap_or(most), settings.ends.clone())
    };
    EngineSpec::new(model, config)
}

impl EngineTransport for HttpEngine {
    fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    fn start(&self, request: Request, mut sink: Sink, stop: StopHandle) -> Result<()> {
        let max_tokens = request.validate(&self.spec)?;
        let known = match &request.session {
            None => self.of_sessions(|_| Ok(None))?,
            Some(name) => match self.of_sessions(|sessions| sessions.enter(name)) {
                Ok(known) => known,
                Err(Error::EngineGone) => return Err(Error::EngineGone),
                Err(error) => {
                    let _ = sink(Event::Failed(error)); // its last event
                    return Ok(());
                }
            },
        };
        let cancel = Arc::new(Notify::new());
        let stopped = Arc::clone(&cancel);
        stop.on_stop(move || stopped.notify_one());
        let setting = AnswerSetting {
            vocabulary: Arc::clone(&self.vocabulary) as _,
            spec: Arc::clone(&self.spec),
            max_tokens,
            seed: request.sampling.seed.unwrap_or_else(draw_seed),
            difference: known.and_then(|known| Difference::between(&known, &request.prompt)),
            on_end: self.shared.open(request.session.clone(), stop),
        };
        let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(&self.spec));
        self.tasks.handle.spawn(async move {
            let mut answer = RemoteAnswer::new(request, setting, sink);
            if let Some(place) = shared.place(&mut answer, &cancel).await {
                answer.hold_place(place);
                shared.answer(&mut answer, &spec, &cancel).await;
            }
        });
        Ok(())
    }

    fn load(&self) -> Result<EngineLoad> {
        match self.is_lost() {
            true => Err(Error::EngineGone),
            false => Ok(self.shared.load()),
        }
    }

    fn last_load(&self) -> EngineLoad {
        self.shared.load()
    }

    fn is_alive(&self) -> bool {
        !self.is_lost()
    }

    fn exit_reason(&self) -> Option<String> {
        self.shared.state.lock().lost.clone()
    }

    fn drop_at_end(&self, guard: EndGuard) {
        let mut state = self.shared.state.lock();
        match state.lost {
            None => state.guards.push(guard),
            Some(_) => drop(guard),
        }
    }

    fn cancel_all(&self) -> Result<()> {
        let stops: Vec<StopHandle> = self.shared.state.lock().open.values().cloned().collect();
        stops.iter().for_each(StopHandle::stop);
        Ok(())
    }

    fn take_notices(&self) -> Result<Vec<Notice>> {
        if self.shared.when_lost == WhenLost::End {
            let shared = Arc::clone(&self.shared);
            self.tasks.ask(async move { shared.check_lost().await })?;
        }
        match self.is_lost() {
            true => Err(Error::EngineGone),
            false => Ok(std::mem::take(&mut self.shared.state.lock().notices)),
        }
    }

    /// Nothing is kept on this disk.
    fn flush_disk(&self, _: Duration) -> Result<bool> {
        Ok(true)
    }

    fn reset_session(&self, name: &EngineSessionName) -> Result<()> {
        self.of_sessions(|sessions| sessions.reset(name))
    }

    fn close_session(&self, name: &EngineSessionName) -> Result<()> {
        self.of_sessions(|sessions| sessions.close(name))
    }

    fn fork_session(&self, from: &EngineSessionName, to: &EngineSessionName) -> Result<()> {
        self.of_sessions(|sessions| sessions.fork(from, to))
    }

    fn restore_session(&self, name: &EngineSessionName, tokens: TokenBuf) -> Result<()> {
        self.of_sessions(|sessions| sessions.restore(name, tokens.ids))
    }

    fn inspect_session(&self, name: &EngineSessionName) -> Result<SessionDetail> {
        self.of_sessions(|sessions| sessions.inspect(name))
    }

    fn list_sessions(&self) -> Result<Vec<SessionInfo>> {
        self.of_sessions(|sessions| Ok(sessions.list()))
    }

    fn remote(&self) -> Option<&RemoteEngineFacts> {
        Some(&self.facts)
    }
}

/// The thread that runs all tasks. Dropping it drops them, so that unfinished requests fail with `EngineGone`.
struct TaskThread {
    handle: Handle,
    stop: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl TaskThread {
    fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|error| Error::Backend(format!("starting a thread: {error}")))?;
        let (handle, stop) = (runtime.handle().clone(), Arc::new(Notify::new()));
        let stopped = Arc::clone(&stop);
        let body = move || runtime.block_on(stopped.notified());
        let thread = thread::Builder::new().name("remote-engine".to_owned()).spawn(body);
        let thread = thread.map_err(|error| Error::Backend(format!("starting a thread: {error}")))?;
        Ok(Self { handle, stop, thread: Some(thread) })
    }

    /// Runs `work` there and waits for its result.
    fn ask<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Result<T> {
        let (sender, answer) = mpsc::channel();
        self.handle.spawn(async move {
            let _ = sender.send(work.await); // the caller waits below
        });
        answer.recv().map_err(|_| Error::EngineGone)
    }
}

impl Drop for TaskThread {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            let _ = thread.join(); // the last handle may be dropped inside a sink, on the thread itself
        }
    }
}
