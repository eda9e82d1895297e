//! A small engine for tests: answers with what vLLM 0.32.0 answered (`vllm-0.32.0/`, recorded by `vllm.rs`'s model and the request
//! that the file's name says), or SGLang 0.5.23 (`sglang-0.5.23/`, the model of tests/parity/qwen3 on a CPU with
//! `--grammar-backend llguidance`; of its settings only the version is kept). It records what it is asked, and breaks off or
//! waits where a test wants it to.

use std::collections::VecDeque;
use std::sync::Condvar;

use llmctl_engine::http_engine::EngineUrl;

use crate::common::fake_http::{FakeRequest, listen, read_request, write_chunk, write_events, write_plain};
use crate::common::prelude::*;

const MODELS: &str = include_str!("vllm-0.32.0/models.json");
const VERSION: &str = include_str!("vllm-0.32.0/version.json");
const TOKENS: &str = include_str!("vllm-0.32.0/tokenize.json");
pub const LENGTH: &str = include_str!("vllm-0.32.0/length.sse");
pub const LOGPROBS: &str = include_str!("vllm-0.32.0/logprobs.sse");
pub const STOP: &str = include_str!("vllm-0.32.0/stop.sse");
pub const JSON: &str = include_str!("vllm-0.32.0/json.sse");
pub const REGEX: &str = include_str!("vllm-0.32.0/regex.sse");

/// What SGLang answered.
pub mod sglang {
    pub const MODELS: &str = include_str!("sglang-0.5.23/models.json");
    pub const SERVER_INFO: &str = include_str!("sglang-0.5.23/server_info.json");
    pub const TOKENS: &str = include_str!("sglang-0.5.23/tokenize.json");
    pub const LENGTH: &str = include_str!("sglang-0.5.23/length.sse");
    pub const LOGPROBS: &str = include_str!("sglang-0.5.23/logprobs.sse");
    pub const STOP: &str = include_str!("sglang-0.5.23/stop.sse");
    pub const JSON: &str = include_str!("sglang-0.5.23/json.sse");
    pub const REFUSED: &str = include_str!("sglang-0.5.23/refused.sse");
}

/// What the fake does with a generation.
#[derive(Debug, Clone)]
pub enum Deed {
    /// Sends a stream.
    Stream(&'static str),
    /// Sends so many events of a stream, then closes the connection.
    Break(&'static str, usize),
    /// Sends so many events, then waits until the client closes the connection.
    Wait(&'static str, usize),
    /// Answers with a status and a body.
    Refuse(u16, &'static str),
}

#[derive(Default)]
struct State {
    deeds: VecDeque<Deed>,
    asked: Vec<Value>,
    num_closed: usize,
    is_sick: bool,
}

/// A listening fake. It listens until the process ends; `kill` makes it refuse.
#[derive(Clone)]
pub struct FakeEngine {
    pub url: EngineUrl,
    state: Arc<(Mutex<State>, Condvar)>,
}

/// The part of a fake that serves connections.
#[derive(Clone)]
struct FakeAnswers {
    state: Arc<(Mutex<State>, Condvar)>,
    models: Arc<str>,
    tokens: &'static str,
}

impl FakeEngine {
    pub fn start(deeds: impl IntoIterator<Item = Deed>) -> Self {
        Self::with_models(MODELS, deeds)
    }

    /// Starts a fake SGLang.
    pub fn sglang(deeds: impl IntoIterator<Item = Deed>) -> Self {
        Self::serving(sglang::MODELS, sglang::TOKENS, deeds)
    }

    /// Starts a fake that lists other models.
    pub fn with_models(models: &str, deeds: impl IntoIterator<Item = Deed>) -> Self {
        Self::serving(models, TOKENS, deeds)
    }

    fn serving(models: &str, tokens: &'static str, deeds: impl IntoIterator<Item = Deed>) -> Self {
        let state = State { deeds: deeds.into_iter().collect(), ..State::default() };
        let (state, models): (_, Arc<str>) = (Arc::new((Mutex::new(state), Condvar::new())), models.into());
        let serving = FakeAnswers { state: Arc::clone(&state), models, tokens };
        let address = listen(move |stream| serving.serve(stream));
        Self { url: format!("http://{address}").parse().expect("an address"), state }
    }

    /// Bodies of all generations that were asked for.
    pub fn asked(&self) -> Vec<Value> {
        self.state.0.lock().expect("free").asked.clone()
    }

    /// Breaks every connection from now on, as a killed process does.
    pub fn kill(&self) {
        self.state.0.lock().expect("free").is_sick = true;
    }

    pub fn revive(&self) {
        self.state.0.lock().expect("free").is_sick = false;
    }

    /// Waits until the client has closed so many waiting streams.
    pub fn wait_for_closed(&self, count: usize) {
        self.wait_until("the client keeps its connection", |state| state.num_closed >= count);
    }

    /// Waits until so many generations were asked for.
    pub fn wait_for_asked(&self, count: usize) {
        self.wait_until("the client does not ask", |state| state.asked.len() >= count);
    }

    fn wait_until(&self, failure: &str, is_so: impl Fn(&State) -> bool) {
        let (state, changed) = &*self.state;
        let waited =
            changed.wait_timeout_while(state.lock().expect("free"), Duration::from_secs(30), |state| {
                !is_so(state)
            });
        assert!(!waited.expect("free").1.timed_out(), "{failure}");
    }
}

impl FakeAnswers {
    fn serve(&self, mut stream: TcpStream) {
        let Some(FakeRequest { path, body, .. }) = read_request(&mut stream) else { return };
        if self.state.0.lock().expect("free").is_sick {
            return;
        }
        let _ = match path.as_str() {
            "/health" => answer(&mut stream, 200, ""),
            "/v1/models" => answer(&mut stream, 200, &self.models),
            "/version" => answer(&mut stream, 200, VERSION),
            "/server_info" => answer(&mut stream, 200, sglang::SERVER_INFO),
            "/tokenize" => answer(&mut stream, 200, self.tokens),
            "/v1/completions" | "/generate" => self.generate(stream, &body),
            _ => answer(&mut stream, 404, r#"{"detail":"Not Found"}"#),
        };
    }

    fn generate(&self, mut stream: TcpStream, body: &str) -> std::io::Result<()> {
        let body: Value = serde_json::from_str(body).expect("JSON");
        let deed = {
            let mut state = self.state.0.lock().expect("free");
            state.asked.push(body);
            self.state.1.notify_all();
            state.deeds.pop_front().unwrap_or(Deed::Stream(LENGTH))
        };
        match deed {
            Deed::Refuse(code, text) => answer(&mut stream, code, text),
            Deed::Stream(text) => events(&mut stream, text, usize::MAX),
            Deed::Break(text, count) => events(&mut stream, text, count),
            Deed::Wait(text, count) => {
                // Until the client closes, which may be before it has read all events.
                let _ = events(&mut stream, text, count).and_then(|()| stream.read(&mut [0]));
                self.state.0.lock().expect("free").num_closed += 1;
                self.state.1.notify_all();
                Ok(())
            }
        }
    }
}

fn answer(stream: &mut TcpStream, code: u16, text: &str) -> std::io::Result<()> {
    write_plain(stream, code, "Content-Type: application/json", text)
}

fn events(stream: &mut TcpStream, text: &str, count: usize) -> std::io::Result<()> {
    let all: Vec<&str> = text.split_inclusive("\n\n").collect();
    write_events(stream, all.iter().take(count))?;
    if count >= all.len() { write_chunk(stream, "") } else { Ok(()) }
}
