//! The server's endpoints without a socket: a toy engine that says what a test has written down, behind a real tokenizer
//! and a chat template. The engine is a thread, or stands behind the worker protocol, as the test is run.
//!
//! The script goes by the text: after a question (the last user message, or a text to go on with) come the tokens of its
//! answer, one by one; an unknown question is answered with `echo: ` and itself.

use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Condvar;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request};
use axum::response::Response;
use futures_util::StreamExt;
use llmctl_models::load::{ChatTemplates, ModelTexts, model_facts};
use llmctl_models::text::Vocabulary;
use llmctl_serve::engines::engine::Recovery;
use llmctl_serve::telemetry::observe::Observer;
use llmctl_serve::{App, ServedModel, api};
use tower::ServiceExt;

use super::remote::behind_pipes;
use super::toy::{hashed_logits, one_hot};
use crate::common::prelude::*;

/// ChatML, with a switch for thinking and a place for tools.
pub const CHATML: &str = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}";

/// As Qwen 3's: calls in `<tool_call>`, reasoning in `<think>`.
pub const QWENISH: &str = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n\
    {\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}\
    {% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}{% endif %}";

/// A question that is answered with letters drawn from the logits.
pub const FREE: &str = "draw letters";

/// A question that is answered with anything at all.
pub const NOISE: &str = "make a noise";

pub const MODEL: &str = "org/toy";

const HEADER: &str = "<|im_start|>assistant\n";
const USER: &str = "<|im_start|>user\n";

/// The kind of engine behind the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Thread,
    Worker,
}

thread_local! {
    /// Of the servers that this thread's test starts.
    static KIND: Cell<Kind> = const { Cell::new(Kind::Thread) };
}

/// Servers that this thread starts from now on have this kind of engine.
pub fn use_kind(kind: Kind) {
    KIND.set(kind);
}

/// Runs asynchronous tests twice: with the engine as a thread, and behind the worker protocol.
macro_rules! both_kinds {
    ($($name:ident),* $(,)?) => {
        mod in_a_thread {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::common::server::use_kind(crate::common::server::Kind::Thread);
                super::$name().await;
            })*
        }

        mod in_a_worker {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::common::server::use_kind(crate::common::server::Kind::Worker);
                super::$name().await;
            })*
        }
    };
}
pub(crate) use both_kinds;

/// Answers of the model, by prompt.
#[derive(Clone)]
pub struct Script {
    tokenizer: Arc<Tokenizer>,
    answers: BTreeMap<String, String>,
}

impl Script {
    fn end(&self) -> u32 {
        self.tokenizer.vocab_size() as u32 // of no text
    }

    fn bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id).unwrap_or_default().into_owned()).collect()
    }

    /// The question, and the bytes of its answer so far.
    fn asked(&self, history: &[u32]) -> (String, Vec<u8>) {
        let bytes = self.bytes(history);
        let header = HEADER.as_bytes();
        let Some(at) = bytes.windows(header.len()).rposition(|window| window == header) else {
            let known = self.answers.keys().find(|key| bytes.starts_with(key.as_bytes()));
            let question = known.cloned().unwrap_or_default();
            let said = bytes[question.len()..].to_vec();
            return (question, said);
        };
        let before = String::from_utf8_lossy(&bytes[..at]);
        let question = before.rsplit(USER).next().unwrap_or_default();
        let question = question.split("<|im_end|>").next().unwrap_or_default();
        let said = &bytes[at + header.len()..];
        let scaffold = ["<think>\n\n</think>\n\n", "<think>\n"]
            .into_iter()
            .find_map(|s| said.strip_prefix(s.as_bytes()));
        (question.to_owned(), scaffold.unwrap_or(said).to_vec())
    }

    fn logits(&self, history: &[u32]) -> Vec<f32> {
        let vocab_size = self.tokenizer.vocab_size() + 1;
        let (question, said) = self.asked(history);
        if question == FREE {
            return self.letters(history, vocab_size);
        }
        if question == NOISE {
            return hashed_logits(history, vocab_size);
        }
        let answer = self.answers.get(&question).cloned().unwrap_or_else(|| format!("echo: {question}"));
        let ids = self.tokenizer.encode_chat_rest(&answer).expect("bytes");
        let so_far = |count: &usize| self.bytes(&ids[..*count]) == said;
        let at = (0..=ids.len()).find(so_far).unwrap_or(ids.len());
        one_hot(vocab_size, ids.get(at).copied().unwrap_or(self.end()))
    }

    fn letters(&self, history: &[u32], vocab_size: usize) -> Vec<f32> {
        let mut logits = vec![-1e4; vocab_size];
        for (letter, logit) in ('a'..='z').zip(hashed_logits(history, 26)) {
            let id = self.tokenizer.encode_chat_rest(&letter.to_string()).expect("a letter")[0];
            logits[id as usize] = logit;
        }
        logits
    }
}

/// Holds the model up before a step.
#[derive(Clone, Default)]
pub struct Gate {
    state: Arc<(Mutex<GateState>, Condvar)>,
}

#[derive(Default)]
struct GateState {
    /// Steps that may still pass before it is closed; nothing while it is open.
    left: Option<usize>,
    /// Steps until one fails.
    failure: Option<(usize, Error)>,
    num_waiting: usize,
}

impl Gate {
    pub fn close(&self) {
        self.close_after(0);
    }

    /// Lets so many steps pass first.
    pub fn close_after(&self, num_steps: usize) {
        self.state.0.lock().expect("free").left = Some(num_steps);
    }

    /// Lets one more step pass.
    pub fn step(&self) {
        self.close_after(1);
        self.state.1.notify_all();
    }

    pub fn open(&self) {
        self.state.0.lock().expect("free").left = None;
        self.state.1.notify_all();
    }

    /// The step after so many fails.
    pub fn fail_after(&self, num_steps: usize, error: Error) {
        self.state.0.lock().expect("free").failure = Some((num_steps, error));
    }

    /// Waits until the model stands before the closed gate.
    pub async fn reached(&self) {
        for _ in 0..3000 {
            if self.state.0.lock().expect("free").num_waiting > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the model has not come to the gate");
    }

    fn pass(&self) -> Result<(), Error> {
        let (state, changed) = &*self.state;
        let mut state = state.lock().expect("free");
        state.num_waiting += 1;
        let limit = Duration::from_secs(60);
        let is_closed = |state: &mut GateState| state.left == Some(0);
        let (mut state, timeout) = changed.wait_timeout_while(state, limit, is_closed).expect("free");
        state.num_waiting -= 1;
        assert!(!timeout.timed_out(), "nobody opens the gate");
        state.left = state.left.map(|left| left - 1);
        match state.failure.take() {
            Some((0, error)) => Err(error),
            Some((steps, error)) => {
                state.failure = Some((steps - 1, error));
                Ok(())
            }
            None => Ok(()),
        }
    }
}

/// Parts of a test server.
pub struct Build {
    pub template: Option<String>,
    /// Special tokens that the tokenizer knows besides its own.
    pub special_tokens: &'static [&'static str],
    pub answers: Vec<(&'static str, String)>,
    pub store: Option<SessionStore>,
    pub lenient: bool,
    pub settings: ServeSettings,
    pub defaults: GivenSampling,
    pub context_length: usize,
    pub max_running: usize,
    pub max_waiting: usize,
    pub max_sessions: usize,
    pub speculation: Speculation,
    /// An engine that is lost is built anew.
    pub recovers: bool,
}

impl Default for Build {
    fn default() -> Self {
        Self {
            template: Some(CHATML.to_owned()),
            special_tokens: &[],
            answers: Vec::new(),
            store: None,
            lenient: false,
            settings: ServeSettings::default(),
            defaults: GivenSampling::GREEDY,
            context_length: 4096,
            max_running: 4,
            max_waiting: 64,
            max_sessions: 16,
            speculation: Speculation::Off,
            recovers: false,
        }
    }
}

/// So many times, an engine of this server is lost when it comes to the text of a token: a bug outside of what a step guards.
#[derive(Clone, Default)]
pub struct Fatal(Arc<AtomicUsize>);

impl Fatal {
    pub fn set(&self, num_losses: usize) {
        self.0.store(num_losses, Ordering::SeqCst);
    }

    fn strike(&self) {
        let struck = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        assert!(struck.is_err(), "the end of this engine");
    }
}

struct Fragile {
    tokenizer: Arc<Tokenizer>,
    fatal: Fatal,
}

impl Vocabulary for Fragile {
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        self.fatal.strike();
        self.tokenizer.token_bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.is_special(id)
    }
}

pub struct Server {
    pub app: App,
    pub gate: Gate,
    /// Of the first engine.
    pub log: Log,
    pub fatal: Fatal,
    pub tokenizer: Arc<Tokenizer>,
    router: Router,
}

pub fn model_fingerprint() -> ModelFingerprint {
    ModelFingerprint { name: MODEL.to_owned(), fingerprint: "0123456789abcdef".to_owned(), reference: None }
}

pub fn chat_tokenizer(template: Option<&str>) -> ChatTokenizer {
    chat_tokenizer_with(&[], template)
}

/// A tokenizer that knows more special tokens.
pub fn chat_tokenizer_with(special_tokens: &[&str], template: Option<&str>) -> ChatTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    let from = parity_folder().join("llama");
    for name in ["tokenizer_config.json", "config.json"] {
        std::fs::copy(from.join(name), folder.path().join(name)).expect("a copy");
    }
    let text = std::fs::read_to_string(from.join("tokenizer.json")).expect("a tokenizer");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    let added = json["added_tokens"].as_array_mut().expect("added tokens");
    let first = added.iter().filter_map(|token| token["id"].as_u64()).max().expect("some") + 1;
    added.extend((first..).zip(special_tokens).map(|(id, text)| {
        let mut token = json!({"id": id, "content": text, "special": true});
        for name in ["single_word", "lstrip", "rstrip", "normalized"] {
            token[name] = false.into();
        }
        token
    }));
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).expect("a file");
    let tokenizer = from_folder(folder.path()).expect("a tokenizer");
    let texts = ModelTexts {
        identity: String::new(),
        tokenizer: Arc::new(tokenizer),
        chat_templates: ChatTemplates::default(),
        defaults: GivenSampling::GREEDY,
        defaults_source: "nothing",
        listed_ends: Vec::new(),
        end_of_generation: Vec::new(),
        hints: None,
    };
    ChatTokenizer::new(texts, template)
}

impl Build {
    pub fn answers(answers: &[(&'static str, &str)]) -> Self {
        let answers = answers.iter().map(|&(question, answer)| (question, answer.to_owned())).collect();
        Self { answers, ..Self::default() }
    }

    pub fn start(self) -> Server {
        let chat_tokenizer = chat_tokenizer_with(self.special_tokens, self.template.as_deref());
        let tokenizer = chat_tokenizer.tokenizer().clone();
        let answers = self.answers.iter().map(|(question, answer)| ((*question).to_owned(), answer.clone()));
        let script = Script { tokenizer: tokenizer.clone(), answers: answers.collect() };
        let (end, vocab_size) = (script.end(), tokenizer.vocab_size() + 1);
        let gate = Gate::default();
        let model = {
            let gate = gate.clone();
            move || {
                let (script, gate) = (script.clone(), gate.clone());
                let rule: Rule = Box::new(move |history| Ok(script.logits(history)));
                ToyModel::new(vocab_size, rule).with_hook(Box::new(move || gate.pass()))
            }
        };
        let config = EngineConfig {
            max_running: self.max_running,
            max_waiting: self.max_waiting,
            max_sessions: self.max_sessions,
            step_tokens: 64,
            speculation: self.speculation,
            ..EngineConfig::new(self.context_length, vec![end])
        };
        let fatal = Fatal::default();
        let engine = {
            let (tokenizer, fatal, kind) = (tokenizer.clone(), fatal.clone(), KIND.get());
            move |model: ToyModel| {
                let vocabulary = Arc::new(Fragile { tokenizer: tokenizer.clone(), fatal: fatal.clone() });
                let config = config.clone();
                let engine = EngineClient::spawn(move || Engine::new(Box::new(model), vocabulary, config));
                match kind {
                    Kind::Thread => engine.expect("an engine"),
                    Kind::Worker => behind_pipes(engine.expect("an engine"), tokenizer.clone()),
                }
            }
        };
        let first = model();
        let log = first.log();
        let slot = match self.recovers {
            false => EngineSlot::new(engine(first)),
            true => {
                let recovery = Recovery {
                    name: "the engine".to_owned(),
                    rebuild: {
                        let engine = engine.clone();
                        Box::new(move || Ok(engine(model())))
                    },
                    build_time: Duration::from_millis(1),
                    pause: Duration::from_millis(1),
                    longest_pause: Duration::from_secs(60),
                    max_attempts: 5,
                    gave_up: Box::new(|_| {}),
                };
                EngineSlot::with_recovery(engine(first), recovery).expect("a thread")
            }
        };
        let model = ServedModel {
            id: MODEL.to_owned(),
            created: 1_700_000_000,
            chat_tokenizer,
            fingerprint: model_fingerprint(),
            defaults: self.defaults,
            facts: model_facts(&ModelSource::Folder(parity_folder().join("llama"))).ok(),
        };
        let settings = ServeSettings { lenient: self.lenient, ..self.settings };
        let app = App::new(model, slot, self.store, Observer::default(), settings);
        let router = api::routes_of(&app).with_state(app.clone());
        Server { app, gate, log, fatal, tokenizer, router }
    }
}

/// A whole response.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Reply {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    #[track_caller]
    pub fn ok(self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// Status, code and parameter of an error in OpenAI's envelope.
    #[track_caller]
    pub fn error(&self) -> (u16, String, String) {
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("no error: {}", self.text));
        assert!(error["message"].is_string() && error["type"].is_string(), "{body}");
        assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (self.status.as_u16(), text("code"), text("param"))
    }

    /// The events of a stream that ended as it should.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let mut blocks: Vec<&str> = self.text.split("\n\n").collect();
        assert_eq!(blocks.pop(), Some(""), "every event is whole");
        assert_eq!(blocks.pop(), Some("data: [DONE]"), "{}", self.text);
        let data = blocks.into_iter().filter(|block| !block.starts_with(':'));
        let json =
            |block: &str| serde_json::from_str(block.strip_prefix("data: ").expect("data")).expect("JSON");
        data.map(json).collect()
    }
}

impl Server {
    pub async fn send(&self, request: Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.expect("a router does not fail")
    }

    /// Sends a request that the test does not wait for yet.
    pub fn spawn(&self, request: Request<Body>) -> tokio::task::JoinHandle<Reply> {
        let router = self.router.clone();
        tokio::spawn(
            async move { whole(router.oneshot(request).await.expect("a router does not fail")).await },
        )
    }

    pub async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<Value>,
    ) -> Reply {
        whole(self.send(request(method, path, headers, body)).await).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.call(Method::POST, path, &[], Some(body)).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.call(Method::GET, path, &[], None).await
    }

    /// A chat of one question, with more fields.
    pub async fn chat(&self, question: &str, more: Value) -> Reply {
        self.post("/v1/chat/completions", ask(question, more)).await
    }
}

/// The body of a chat of one question, with more fields.
pub fn ask(question: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": question}]});
    let members = more.as_object().expect("an object");
    body.as_object_mut().expect("an object").extend(members.clone());
    body
}

pub fn request(method: Method, path: &str, headers: &[(&str, &str)], body: Option<Value>) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    match body {
        None => request.body(Body::empty()),
        Some(body) => request.header("content-type", "application/json").body(Body::from(body.to_string())),
    }
    .expect("a request")
}

pub async fn whole(response: Response) -> Reply {
    let (parts, body) = response.into_parts();
    let bytes = axum::body::to_bytes(body, usize::MAX).await.expect("a body");
    let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
    Reply { status: parts.status, headers: parts.headers, text }
}

/// The pieces of a body as they come.
pub fn pieces(response: Response) -> impl futures_util::Stream<Item = Bytes> + Unpin {
    response.into_body().into_data_stream().map(|piece| piece.expect("a body"))
}

/// Replaces what differs from run to run: ids, times and rates.
pub fn redacted(value: &Value) -> Value {
    let mut ids = HashMap::new();
    redact(value, "", &mut ids)
}

fn redact(value: &Value, name: &str, ids: &mut HashMap<String, usize>) -> Value {
    match value {
        Value::Object(members) => {
            members.iter().map(|(name, value)| (name.clone(), redact(value, name, ids))).collect()
        }
        Value::Array(items) => items.iter().map(|item| redact(item, name, ids)).collect(),
        Value::String(id) if ["chatcmpl-", "cmpl-", "call_"].iter().any(|prefix| id.starts_with(prefix)) => {
            let count = ids.len();
            let nth = ids.entry(id.clone()).or_insert(count);
            let prefix = id.split(['-', '_']).next().unwrap_or_default();
            format!("[{prefix} {nth}]").into()
        }
        Value::Number(_) if name == "created" || name.ends_with("_ms") || name.ends_with("_per_second") => {
            format!("[{name}]").into()
        }
        Value::Null if name.ends_with("_per_second") => format!("[{name}]").into(),
        other => other.clone(),
    }
}

/// A stream for a snapshot: one line per event.
pub fn lines(events: &[Value]) -> String {
    redacted(&events.to_vec().into())
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| format!("{event}\n"))
        .collect()
}

/// The text of a chat completion.
pub fn content(reply: &Value) -> &str {
    reply["choices"][0]["message"]["content"].as_str().expect("text")
}

/// Why a prompt resumed as it did.
pub fn reason(reply: &Value) -> &str {
    reply["timings"]["resume_reason"].as_str().expect("a reason")
}

/// Fields that were ignored.
pub fn ignored(reply: &Reply) -> &str {
    reply.headers.get("x-llmctl-ignored").map_or("", |value| value.to_str().expect("ASCII"))
}

/// A store and none.
pub fn stores() -> [(Option<TempDir>, Option<SessionStore>); 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    [(Some(folder), Some(store)), (None, None)]
}

/// A server over a folder, with its store.
pub fn on_disk(build: fn(Option<SessionStore>) -> Build) -> (TempDir, SessionStore, Server) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    let server = build(Some(store.clone())).start();
    (folder, store, server)
}
