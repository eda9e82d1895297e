//! An engine at the other end of two pipes, in this process: the worker's own loop, or a script that misbehaves.

use std::io::{PipeReader, PipeWriter, Write};
use std::sync::Condvar;
use std::thread;

use llmctl_engine::EngineSpec;
use llmctl_engine::worker::protocol::{ModelId, OPS, Ready, Reply, ReplyBody, VERSION, Yes};
use llmctl_engine::worker::remote::{ProcessHandle, RemoteEngine, StartError, Timeouts};
use llmctl_engine::worker::service::{CallInbox, WorkerContext};

use crate::common::prelude::*;

/// No working machine takes so long.
pub const PATIENT: Timeouts = Timeouts { start: Duration::from_secs(60), answer: Duration::from_secs(60) };

/// The other end of a connection, with its state.
#[derive(Default)]
pub struct Other {
    state: Mutex<OtherState>,
    changed: Condvar,
}

#[derive(Default)]
struct OtherState {
    is_killed: bool,
    is_over: bool,
    /// Its answer to the health check.
    works: bool,
}

impl Other {
    /// Whether it says that it computes.
    pub fn working(self, works: bool) -> Self {
        self.state.lock().expect("free").works = works;
        self
    }

    pub fn is_killed(&self) -> bool {
        self.state.lock().expect("free").is_killed
    }

    /// Waits as a process does that does nothing: until it is killed.
    pub fn hang(&self) {
        let state = self.state.lock().expect("free");
        let limit = Duration::from_secs(60);
        let waited = self.changed.wait_timeout_while(state, limit, |state| !state.is_killed).expect("free");
        assert!(!waited.1.timed_out(), "nobody has killed it");
    }

    fn end(&self) {
        self.state.lock().expect("free").is_over = true;
        self.changed.notify_all();
    }
}

impl ProcessHandle for Other {
    fn kill(&self) {
        self.state.lock().expect("free").is_killed = true;
        self.changed.notify_all();
    }

    fn wait(&self) -> String {
        let state = self.state.lock().expect("free");
        let state = self.changed.wait_while(state, |state| !state.is_over).expect("free");
        if state.is_killed { "it was killed".to_owned() } else { "it left".to_owned() }
    }

    fn has_computed(&self) -> Option<bool> {
        Some(self.state.lock().expect("free").works)
    }
}

pub fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(from_folder(&parity_folder().join("llama")).expect("a tokenizer"))
}

/// The engine, with all that is asked of it and all that it says passed through the worker protocol.
pub fn behind_pipes(engine: EngineClient, tokenizer: Arc<Tokenizer>) -> EngineClient {
    let body = move |input, output| {
        let model = ModelId { name: "toy".to_owned(), fingerprint: "toy".to_owned() };
        let reception = CallInbox::open(input, || {}).expect("a thread");
        reception.serve(WorkerContext { engine, tokenizer, model }, output).expect("threads");
    };
    let remote = connect(Arc::default(), PATIENT, body).expect("it is ready");
    EngineClient::new(remote)
}

/// Connects to what `body` does with its two ends of the pipes.
pub fn connect(
    other: Arc<Other>,
    timeouts: Timeouts,
    body: impl FnOnce(PipeReader, PipeWriter) + Send + 'static,
) -> Result<RemoteEngine, StartError> {
    let (input, to) = std::io::pipe().expect("a pipe");
    let (from, output) = std::io::pipe().expect("a pipe");
    let peer = Arc::clone(&other);
    thread::spawn(move || {
        body(input, output);
        other.end();
    });
    RemoteEngine::connect(from, to, peer, timeouts)
}

/// The line of an engine that is ready.
pub fn ready(spec: &EngineSpec) -> String {
    let answer = ReplyBody::Ready(Box::new(Ready {
        ready: Yes,
        protocol: VERSION,
        max_sessions: 5,
        max_named_sessions: 4,
        capabilities: OPS.iter().map(|op| (*op).to_owned()).collect(),
        model: ModelId { name: "toy".to_owned(), fingerprint: "toy".to_owned() },
        spec: spec.clone(),
    }));
    serde_json::to_string(&Reply { id: None, answer }).expect("plain data")
}

/// A worker that follows a script.
pub struct Script {
    input: BufReader<PipeReader>,
    output: PipeWriter,
    pub other: Arc<Other>,
}

impl Script {
    pub fn say(&mut self, line: &str) {
        // The other end may have had enough.
        let _ = self.output.write_all(line.as_bytes()).and_then(|()| self.output.write_all(b"\n"));
    }

    pub fn say_half(&mut self, text: &str) {
        self.output.write_all(text.as_bytes()).expect("somebody reads");
    }

    /// The next call that is none of these; nothing at the end. Pings are answered.
    pub fn hear(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.input.read_line(&mut line).expect("UTF-8") == 0 {
                return None;
            }
            let call: Value = serde_json::from_str(&line).expect("a call");
            if call["op"] != "ping" {
                return Some(call);
            }
            self.say(&pong(&call["id"]));
        }
    }
}

pub fn pong(id: &Value) -> String {
    let load =
        r#"{"num_waiting":0,"num_running":0,"num_sessions":2,"kv_free":1,"kv_capacity":3,"kv_allocated":2}"#;
    format!(r#"{{"id":{id},"pong":true,"load":{load}}}"#)
}

/// An engine whose worker says that it is ready and then follows the script.
pub fn scripted(
    spec: &EngineSpec,
    other: Other,
    timeouts: Timeouts,
    script: impl FnOnce(&mut Script) + Send + 'static,
) -> (EngineClient, Arc<Other>) {
    let other = Arc::new(other);
    let (its, ready) = (Arc::clone(&other), ready(spec));
    let body = move |input, output| {
        let mut worker = Script { input: BufReader::new(input), output, other: its };
        worker.say(&ready);
        script(&mut worker);
    };
    let remote = connect(Arc::clone(&other), timeouts, body).expect("it is ready");
    (EngineClient::new(remote), other)
}
