//! A scripted engine for tests: the production client, stream and validation over answers given in advance.
//!
//! Letters are tokens (an id is a byte), and the chat template prints a line `<role>text` for each message.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Map, json};

use llmctl_base::GivenSampling;
use llmctl_base::error::Result;
use llmctl_engine::chat_tokenizer::ChatTokenizer;
use llmctl_engine::client::Sessionless;
use llmctl_engine::request::{Event, Finish, Logprob, Outcome, Request, Started, Timings, Token, Usage};
use llmctl_engine::spec::{EngineConfig, EngineSpec};
use llmctl_engine::{EngineTransport, Sink};
use llmctl_models::load::{ChatTemplates, ModelTexts};
use llmctl_models::model::ModelSpec;
use llmctl_models::text::{HfSettings, Tokenizer};

pub const TEMPLATE: &str =
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>";

/// A scripted engine; clones share the answers and the record.
#[derive(Clone)]
pub struct Script {
    pub name: String,
    template: Option<String>,
    spec: EngineSpec,
    /// Events after `Started`, one list per request. Without one, the answer repeats the prompt's last word.
    answers: Arc<Mutex<VecDeque<Vec<Event>>>>,
    requests: Arc<Mutex<Vec<Request>>>,
    /// Set if each request waits a moment for the next: true once one came before the answer.
    met: Option<Arc<AtomicBool>>,
}

impl Default for Script {
    fn default() -> Self {
        let (architecture, vocab_size, context_length) = ("script".to_owned(), 256, 100);
        let model = ModelSpec {
            architecture,
            vocab_size,
            context_length,
            groups: Vec::new(),
            can_rewind: true,
            adapters: Vec::new(),
        };
        let config = EngineConfig::new(context_length, Vec::new());
        let spec = EngineSpec::new(model, config).expect("a spec without pages fits");
        let (answers, requests) = Default::default();
        let (name, template) = ("script".to_owned(), Some(TEMPLATE.to_owned()));
        Self { name, template, spec, answers, requests, met: None }
    }
}

/// Returns events that stream `text`, one token per character, and end with `finish`.
pub fn saying(text: &str, prompt_tokens: usize, finish: Finish) -> Vec<Event> {
    let one = |c: char| {
        let id = u32::from(c as u8);
        let logprob = Some(Logprob { logprob: -0.5, top: vec![(id, -0.5), (b'?'.into(), -1.5)] });
        Event::Text { text: c.to_string(), tokens: vec![Token { id, logprob }] }
    };
    let completion_tokens = text.chars().count();
    let usage = Usage { prompt_tokens, completion_tokens, ..Usage::default() };
    let timings = Timings {
        prefill: Duration::from_millis(10),
        decode: Duration::from_millis(20),
        time_to_first_token: Some(Duration::from_millis(11)),
        total: Duration::from_millis(31),
        ..Timings::default()
    };
    let mut events: Vec<_> = text.chars().map(one).collect();
    events.push(Event::Done(Outcome { finish, usage, timings, seed: 42, adapters: Vec::new() }));
    events
}

impl Script {
    /// Answers the next request that has no answer yet with these events.
    pub fn answering(self, events: Vec<Event>) -> Self {
        self.answers.lock().push_back(events);
        self
    }

    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_string();
        self
    }

    /// Uses this chat template, or none.
    pub fn with_template(mut self, template: Option<&str>) -> Self {
        self.template = template.map(str::to_owned);
        self
    }

    pub fn with_context(mut self, context_tokens: usize) -> Self {
        self.spec.config.context_length = context_tokens;
        self
    }

    /// Answers a request when another one has come, or after a second.
    pub fn awaiting_the_next(self) -> Self {
        Self { met: Some(Arc::default()), ..self }
    }

    /// Returns whether a request came while another had no answer.
    pub fn has_met(&self) -> bool {
        self.met.as_ref().is_some_and(|met| met.load(Ordering::SeqCst))
    }

    /// Returns the requests so far, oldest first.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().clone()
    }

    /// Returns the text side that belongs to the script.
    pub fn chat_tokenizer(&self) -> ChatTokenizer {
        let texts = ModelTexts {
            identity: "script".to_owned(),
            tokenizer: Arc::new(letters()),
            chat_templates: ChatTemplates { default: self.template.clone(), ..ChatTemplates::default() },
            defaults: GivenSampling::GREEDY,
            defaults_source: "generation_config.json",
            listed_ends: Vec::new(),
            end_of_generation: Vec::new(),
            hints: None,
        };
        ChatTokenizer::new(texts, None)
    }

    pub fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// Returns the engine that reads the script.
    pub fn engine(&self) -> impl EngineTransport + use<> {
        let script = self.clone();
        Sessionless::new(self.spec.clone(), move |request, sink| script.start(request, sink))
    }

    /// Gives all events at once, so that a test does not depend on time.
    fn start(&self, request: Request, mut sink: Sink) -> Result<()> {
        let prompt_tokens = request.prompt.len();
        let room = self.spec.context_length() - prompt_tokens;
        let max_tokens = request.limits.max_tokens.map_or(room, |most| most.min(room));
        let (reuse, difference) = Default::default();
        let started = Event::Started(Started { prompt_tokens, max_tokens, seed: 42, reuse, difference });
        let events = self.answer(&request);
        self.requests.lock().push(request);
        let mut events = std::iter::once(started).chain(events);
        let mut answer = move || {
            let _ = events.try_for_each(|event| match sink(event) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(()),
            });
        };
        let Some(met) = self.met.clone() else {
            answer();
            return Ok(());
        };
        let requests = Arc::clone(&self.requests);
        thread::spawn(move || {
            let (so_far, deadline) = (requests.lock().len(), Instant::now() + Duration::from_secs(1));
            while requests.lock().len() == so_far && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            met.fetch_or(requests.lock().len() > so_far, Ordering::SeqCst);
            answer();
        });
        Ok(())
    }

    fn answer(&self, request: &Request) -> Vec<Event> {
        self.answers.lock().pop_front().unwrap_or_else(|| {
            let prompt: String = request.prompt.iter().map(|id| *id as u8 as char).collect();
            let last = prompt.trim_end_matches("<assistant>").split_whitespace().last().unwrap_or("");
            saying(last, request.prompt.len(), Finish::Eos(0))
        })
    }
}

/// Returns a byte-level tokenizer in which the id of every token is its byte.
fn letters() -> Tokenizer {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut substitutes = (256..).filter_map(char::from_u32);
    let spelt = (0..=255u8).map(|byte| {
        let letter = if is_printable(byte) { byte.into() } else { substitutes.next().expect("a letter") };
        (letter.to_string(), byte.into())
    });
    let vocab: Map<String, serde_json::Value> = spelt.collect();
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let json = json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(json.to_string().as_bytes(), &HfSettings::default()).expect("a tokenizer of bytes")
}
