//! `llmctl serve`'s code on a loopback port, in this process, with the scripted model as its engine. Its sessions and KV lie in
//! a folder that outlives it, so that a second server is the first one restarted.

use std::io::Write;

use llmctl::cli::model::load::{open_kv_folder, start_engine};
use llmctl_models::hints::Frontend;
use llmctl_models::load::with_template;
use llmctl_serve::front::lifecycle::Lifecycle;
use llmctl_serve::front::listen::{Address, Listener, Server};
use llmctl_serve::gate::policy::Policy;
use llmctl_serve::net::connection::ConnectionLimits;
use llmctl_serve::telemetry::access_log::AccessLog;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServedModel};

use super::model::{CONTEXT_TOKENS, Script, load_scripted};
use crate::common::prelude::*;

pub const MODEL: &str = "scripted";

const KV_BYTES: u64 = 1 << 30;
const FLUSH_TIME: Duration = Duration::from_secs(30);

/// The access log in memory.
#[derive(Clone, Default)]
struct LogBytes(Arc<Mutex<Vec<u8>>>);

impl Write for LogBytes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no writer panics").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A line of the access log.
#[derive(Debug, Clone)]
pub struct Turn {
    pub session: String,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub completion_tokens: usize,
}

pub struct AgentServer {
    server: Server,
    app: App,
    engine: EngineClient,
    log: AccessLog,
    lines: LogBytes,
    prompts: Arc<Mutex<Vec<String>>>,
}

impl AgentServer {
    /// Starts a server of the checkpoint in `model`, which keeps its sessions and KV in `state`.
    pub fn start(model: &Path, state: &Path, script: Script) -> Self {
        let prompts = Arc::<Mutex<Vec<String>>>::default();
        let loaded = load_scripted(model, noting_prompts(script, Arc::clone(&prompts)));
        let config = EngineConfig {
            max_running: 4,
            max_sessions: 16,
            step_tokens: 256,
            ..EngineConfig::new(CONTEXT_TOKENS, loaded.texts.end_of_generation.clone())
        };
        let kv = state.join("kv");
        let disk = open_kv_folder(kv.clone(), KV_BYTES, &loaded.fingerprint, None).expect("a folder of KV");
        let (defaults, identity) = (loaded.texts.defaults.clone(), loaded.texts.identity.clone());
        let mut chat_tokenizer = ChatTokenizer::new(loaded.texts, None);
        chat_tokenizer.set_frontend(Frontend::Http);
        let engine =
            start_engine((loaded.model, None), loaded.tower, chat_tokenizer.tokenizer(), config, Some(disk));
        let engine = engine.expect("an engine");
        let fingerprint = with_template(&identity, chat_tokenizer.template_source());
        let fingerprint = ModelFingerprint { name: MODEL.to_owned(), fingerprint, reference: None };
        let served = ServedModel {
            id: MODEL.to_owned(),
            created: 1_700_000_000,
            chat_tokenizer,
            fingerprint,
            defaults,
            facts: None,
        };
        let settings = ServeSettings { session_wait: Duration::from_secs(60), ..ServeSettings::default() };
        let store = SessionStore::new(state.join("sessions")).with_kv(Some(kv));
        let observer = Observer::default();
        let lines = LogBytes::default();
        let log = AccessLog::new(Box::new(lines.clone())).expect("a thread");
        let lifecycle = Lifecycle::new(Policy::default(), observer.clone(), Some(log.clone()));
        let listener = Listener::tcp(("127.0.0.1", 0)).expect("a port");
        let server = Server::start(listener, lifecycle, ConnectionLimits::default()).expect("a server");
        let app = App::new(served, EngineSlot::new(engine.clone()), Some(store), observer, settings);
        server.open(app.clone());
        Self { server, app, engine, log, lines, prompts }
    }

    /// Returns `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        match self.server.address() {
            Address::Tcp(address) => format!("http://{address}"),
            Address::Unix(path) => panic!("a port, not {}", path.display()),
        }
    }

    pub fn num_running(&self) -> usize {
        self.engine.last_load().num_running
    }

    /// Returns the prompt tokens whose KV was read from disk so far.
    pub fn restored_tokens(&self) -> usize {
        let metrics = self.app.observer().metrics();
        let text = metrics.encode(llmctl_serve::telemetry::metrics::MetricsFormat::accepted(""), &[], true);
        let value = |line: &str| {
            line.strip_prefix("llmctl_restored_tokens_total")?.split(' ').nth(1)?.parse::<usize>().ok()
        };
        text.lines().filter_map(value).sum()
    }

    /// Returns the tokens of the first prompt of the conversation itself, without the answer's header. Agents ask for titles and the
    /// like with much shorter prompts.
    pub fn first_prompt(&self) -> Vec<u32> {
        let prompts = self.prompts.lock().expect("no script panics");
        let longest = prompts.iter().map(String::len).max().unwrap_or_default();
        let first = prompts.iter().find(|prompt| prompt.len() * 2 > longest).expect("a prompt");
        self.app.model().chat_tokenizer.tokenizer().encode_chat(first).expect("a text")
    }

    /// Whether a prompt had this text.
    pub fn was_told(&self, text: &str) -> bool {
        self.prompts.lock().expect("no script panics").iter().any(|prompt| prompt.contains(text))
    }

    /// Returns the turns that have ended, in their order.
    pub fn turns(&self) -> Vec<Turn> {
        assert!(self.log.flush(FLUSH_TIME), "the log is written");
        let bytes = self.lines.0.lock().expect("no writer panics").clone();
        let lines = std::str::from_utf8(&bytes)
            .expect("UTF-8")
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("a JSON object"));
        lines.filter_map(|line| turn(&line)).collect()
    }

    /// Ends the server as a signal does: requests end, KV is saved.
    pub fn stop(self) {
        let engine = self.engine.clone();
        self.server.drain(Duration::from_secs(30), move || drop(engine.cancel_all()));
        assert!(self.engine.flush_disk(FLUSH_TIME).expect("an engine"), "KV is saved");
        assert_eq!(self.engine.take_notices().expect("an engine"), []);
    }
}

/// Returns the script, which notes each prompt that it answers.
fn noting_prompts(script: Script, prompts: Arc<Mutex<Vec<String>>>) -> Script {
    Arc::new(move |prompt| {
        let mut prompts = prompts.lock().expect("no script panics");
        if prompts.last().is_none_or(|last| last != prompt) {
            prompts.push(prompt.to_owned());
        }
        script(prompt)
    })
}

fn turn(line: &Value) -> Option<Turn> {
    let number = |name: &str| Some(line[name].as_u64()? as usize);
    Some(Turn {
        session: line["session"].as_str().unwrap_or_default().to_owned(),
        prompt_tokens: number("prompt_tokens")?,
        cached_tokens: number("cached_tokens")?,
        completion_tokens: number("completion_tokens")?,
    })
}
