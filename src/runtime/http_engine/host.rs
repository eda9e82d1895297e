//! One remote engine: its own report, its health, and one generation by it.
//!
//! Invariant: a request is never restarted once its client has received output.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, OnceCell};
use tokio::time::{sleep, timeout};

use super::answer::RemoteAnswer;
use super::http::{EngineHttp, HttpFailure, SseStream};
use super::refusal;
use super::wire::{
    AskedGeneration, ChunkError, ChunkReader, EngineChunk, EngineFinish, EngineKind, lark_question,
};
use crate::request::Finish;
use crate::spec::EngineSpec;
use llmctl_base::error::Error;

/// Silence of a stream after which the engine is asked whether it is healthy.
const SILENCE: Duration = Duration::from_secs(5);

/// Longest wait for the counts that follow the last token.
const COUNTS_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which an engine in trouble is not asked again, unless there is no other.
const TROUBLE_TIME: Duration = Duration::from_secs(5);

/// A text that tokenizers of different models cut differently.
const PROBE_TEXT: &str = "The 1,234 naïve façades (x_y): 漢字, \"don't\" 😀\n\tif a != b { return; }";

/// The report of an engine about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineHostFacts {
    pub kind: EngineKind,
    pub version: Option<String>,
    /// Name of the model there.
    pub model: String,
    /// Most tokens of a sequence, if it says so.
    pub context_tokens: Option<usize>,
}

/// Expected model identity, compared with the engine's report.
#[derive(Debug, Clone)]
pub struct ExpectedModel {
    /// The name that the user gave; taken among several of an engine.
    pub name: String,
    /// Token ids of [`ExpectedModel::probe_text`].
    pub probe_ids: Vec<u32>,
}

impl ExpectedModel {
    /// Returns the text whose ids are compared.
    pub fn probe_text() -> &'static str {
        PROBE_TEXT
    }
}

/// End of an attempt to generate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptEnd {
    /// The answer has its last event.
    Over,
    /// The engine was lost, for this reason.
    Lost(String),
}

/// Why a part of an answer ended.
enum PartEnd {
    Finished(Finish),
    ByEngine(EngineFinish),
    /// The reasoning must be closed, and the rest be asked for.
    Closing,
    Failed(Error),
    Lost(String),
}

pub struct Host {
    pub http: EngineHttp,
    facts: Mutex<Option<Arc<EngineHostFacts>>>,
    takes_lark: OnceCell<bool>,
    num_running: AtomicUsize,
    /// When and why it was lost last.
    trouble: Mutex<Option<(Instant, String)>>,
}

/// Counts a request at an engine until it is dropped.
pub struct RunningAt(Arc<Host>);

impl RunningAt {
    pub fn new(host: &Arc<Host>) -> Self {
        host.num_running.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(host))
    }
}

impl Drop for RunningAt {
    fn drop(&mut self) {
        self.0.num_running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Host {
    pub fn new(http: EngineHttp) -> Self {
        let (facts, takes_lark, trouble) = Default::default();
        Self { http, facts, takes_lark, num_running: AtomicUsize::new(0), trouble }
    }

    pub fn name(&self) -> String {
        self.http.url().to_string()
    }

    pub fn known_facts(&self) -> Option<Arc<EngineHostFacts>> {
        self.facts.lock().clone()
    }

    pub fn num_running(&self) -> usize {
        self.num_running.load(Ordering::Relaxed)
    }

    /// Returns whether it was lost a moment ago.
    pub fn is_in_trouble(&self) -> bool {
        self.trouble.lock().as_ref().is_some_and(|(since, _)| since.elapsed() < TROUBLE_TIME)
    }

    pub fn set_trouble(&self, why: Option<String>) {
        *self.trouble.lock() = why.map(|why| (Instant::now(), why));
    }

    /// Returns the engine's report about itself, asked for once.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub async fn facts(&self, expected: &ExpectedModel) -> Result<Arc<EngineHostFacts>, String> {
        if let Some(facts) = self.known_facts() {
            return Ok(facts);
        }
        let facts = Arc::new(describe(&self.http, expected).await?);
        *self.facts.lock() = Some(Arc::clone(&facts));
        Ok(facts)
    }

    /// # Errors
    /// Why it is not healthy.
    pub async fn check_health(&self) -> Result<(), HttpFailure> {
        self.http.get("/health").await.map(drop)
    }

    /// Returns whether the engine compiles grammars with llmctl's own library. It is asked once, patiently: SGLang loads the library
    /// then, which took 18 s on two cores.
    async fn takes_lark(&self, facts: &EngineHostFacts, prompt: &[u32]) -> Result<bool, HttpFailure> {
        let asking = async || {
            let Some(question) = lark_question(facts.kind, &facts.model, prompt[0]) else { return Ok(false) };
            match self.http.post_patiently(facts.kind.path(), &question).await {
                Err(HttpFailure::Status { code: 400..=422, .. }) => Ok(false),
                answer => answer.map(|_| true),
            }
        };
        self.takes_lark.get_or_try_init(asking).await.copied()
    }

    /// Returns whether the request's constraint goes to the engine as Lark; how the answer ends if it cannot go there, or if the
    /// request ends while the engine is asked.
    async fn sends_lark(
        &self,
        answer: &mut RemoteAnswer,
        facts: &EngineHostFacts,
        cancel: &Notify,
    ) -> Result<bool, PartEnd> {
        if answer.request.grammar.is_none() {
            return Ok(false);
        }
        let takes_lark = tokio::select! {
            biased;
            () = cancel.notified() => return Err(PartEnd::Finished(Finish::Cancelled)),
            () = until(answer.time_left()) => return Err(overdue(answer)),
            takes_lark = self.takes_lark(facts, &answer.request.prompt) => takes_lark,
        };
        match takes_lark {
            Err(failure) => Err(PartEnd::Lost(failure.to_string())),
            Ok(false) => {
                refusal::lark(facts.kind, &answer.request).map_or(Ok(false), |why| Err(PartEnd::Failed(why)))
            }
            Ok(true) => Ok(true),
        }
    }

    /// Generates an answer, or the part of it that is left when the engine is lost.
    pub async fn generate(
        &self,
        answer: &mut RemoteAnswer,
        spec: &EngineSpec,
        (facts, cache_salt): (&EngineHostFacts, Option<&str>),
        cancel: &Notify,
    ) -> AttemptEnd {
        if let Err(error) = refusal::check(facts.kind, &answer.request) {
            answer.fail(error);
            return AttemptEnd::Over;
        }
        loop {
            let end = match self.sends_lark(answer, facts, cancel).await {
                Err(end) => end,
                Ok(takes_lark) => {
                    let body = body(answer, spec, facts, (takes_lark, cache_salt));
                    self.generate_part(answer, facts.kind, &body, cancel).await
                }
            };
            match end {
                PartEnd::Finished(finish) => answer.finish(finish),
                PartEnd::ByEngine(finish) => answer.end(finish),
                PartEnd::Failed(error) => answer.fail(error),
                PartEnd::Lost(why) => return AttemptEnd::Lost(why),
                PartEnd::Closing => match answer.close_reasoning() {
                    Ok(None) => continue,
                    Ok(Some(finish)) => answer.finish(finish),
                    Err(error) => answer.fail(error),
                },
            }
            return AttemptEnd::Over;
        }
    }

    /// Reads one stream to its end.
    async fn generate_part(
        &self,
        answer: &mut RemoteAnswer,
        kind: EngineKind,
        body: &Value,
        cancel: &Notify,
    ) -> PartEnd {
        let is_first = answer.is_untouched();
        answer.note_sent();
        let stream = tokio::select! {
            biased;
            () = cancel.notified() => return PartEnd::Finished(Finish::Cancelled),
            () = until(answer.time_left()) => return overdue(answer),
            stream = self.http.stream(kind.path(), body) => stream,
        };
        let mut stream = match stream {
            Ok(stream) => stream,
            Err(HttpFailure::Status { code, message, .. }) if (400..500).contains(&code) && code != 429 => {
                return self.refused(&format!("answers {code}: {message}"));
            }
            Err(failure) => return PartEnd::Lost(failure.to_string()),
        };
        answer.start();
        let mut reader = ChunkReader::new(kind, answer.request.logprobs);
        loop {
            let chunk = tokio::select! {
                biased;
                () = cancel.notified() => return PartEnd::Finished(Finish::Cancelled),
                () = until(answer.time_left()) => return overdue(answer),
                chunk = self.next_chunk(&mut stream, &mut reader) => match chunk {
                    Ok(chunk) => chunk,
                    Err(ChunkError::Lost(why)) => return PartEnd::Lost(why),
                    Err(ChunkError::Refused(why)) => return self.refused(&format!("refuses: {why}")),
                },
            };
            if let Some(end) = take(answer, &chunk, is_first) {
                return self.with_counts(answer, end, &mut stream, &mut reader, is_first).await;
            }
        }
    }

    /// Reads the next event; while there is none, asks from time to time whether the engine is healthy.
    async fn next_chunk(
        &self,
        stream: &mut SseStream,
        reader: &mut ChunkReader,
    ) -> Result<EngineChunk, ChunkError> {
        let mut next = std::pin::pin!(stream.next());
        let event = loop {
            match timeout(SILENCE, &mut next).await {
                Ok(event) => break event.map_err(|failure| failure.to_string())?,
                Err(_) => self.check_health().await.map_err(|failure| failure.to_string())?,
            }
        };
        reader.read(&event.ok_or_else(|| "its answer has no end".to_owned())?)
    }

    fn refused(&self, words: &str) -> PartEnd {
        PartEnd::Failed(Error::RemoteRefused(format!("{} {words}", self.name())))
    }

    /// Reads the counts that follow the engine's last token; what llmctl itself has ended, it does not wait for.
    async fn with_counts(
        &self,
        answer: &mut RemoteAnswer,
        end: PartEnd,
        stream: &mut SseStream,
        reader: &mut ChunkReader,
        is_first: bool,
    ) -> PartEnd {
        let is_by_engine = matches!(
            end,
            PartEnd::ByEngine(_)
                | PartEnd::Finished(Finish::Eos(_) | Finish::MaxTokens | Finish::ContextFull)
        );
        let counts = async {
            while let Ok(chunk) = self.next_chunk(stream, reader).await {
                if is_first {
                    answer.note_cached(chunk.cached_tokens);
                }
                if chunk.is_last || chunk.cached_tokens.is_some() {
                    break;
                }
            }
        };
        if is_by_engine {
            let _ = timeout(COUNTS_TIMEOUT, counts).await; // without them, the counts are unknown
        }
        end
    }
}

/// Ends a request whose deadline has passed.
fn overdue(answer: &RemoteAnswer) -> PartEnd {
    match (answer.is_untouched(), answer.request.limits.deadline) {
        (true, Some(deadline)) => PartEnd::Failed(Error::DeadlineExceeded { deadline }),
        _ => PartEnd::Finished(Finish::Deadline),
    }
}

async fn until(left: Option<Duration>) {
    match left {
        Some(left) => sleep(left).await,
        None => std::future::pending().await,
    }
}

/// Delivers a chunk; returns why the stream need not be read further.
fn take(answer: &mut RemoteAnswer, chunk: &EngineChunk, is_first: bool) -> Option<PartEnd> {
    if is_first {
        answer.note_cached(chunk.cached_tokens);
    }
    for token in &chunk.tokens {
        match answer.push(token.clone()) {
            Err(error) => return Some(PartEnd::Failed(error)),
            Ok(Some(finish)) => return Some(PartEnd::Finished(finish)),
            Ok(None) if answer.is_left() => return Some(PartEnd::Finished(Finish::Cancelled)),
            Ok(None) if answer.is_closing() => return Some(PartEnd::Closing),
            Ok(None) => {}
        }
    }
    match &chunk.finish {
        Some(EngineFinish::Other(why)) if why == "abort" => {
            Some(PartEnd::Lost("it has aborted the request".to_owned()))
        }
        Some(finish) => Some(PartEnd::ByEngine(finish.clone())),
        None if chunk.is_last => Some(PartEnd::Lost("its answer has no end".to_owned())),
        None => None,
    }
}

fn body(
    answer: &RemoteAnswer,
    spec: &EngineSpec,
    facts: &EngineHostFacts,
    (takes_lark, cache_salt): (bool, Option<&str>),
) -> Value {
    let limits = &answer.request.limits;
    let mut ends = limits.stop_ids.clone();
    if !limits.ignore_eos {
        ends.extend(&spec.config.end_of_generation);
    }
    let asked = AskedGeneration {
        model: &facts.model,
        request: &answer.request,
        tokens: &answer.tokens(),
        max_tokens: answer.tokens_left(),
        seed: answer.seed(),
        ends: &ends,
        takes_lark,
        cache_salt,
    };
    asked.body(facts.kind)
}

/// Asks an engine what it is, and compares its tokenizer with ours.
async fn describe(http: &EngineHttp, expected: &ExpectedModel) -> Result<EngineHostFacts, String> {
    let mut model = listed(http, &expected.name).await?;
    let kind = match model["owned_by"].as_str().unwrap_or_default() {
        "vllm" => EngineKind::Vllm,
        "sglang" => EngineKind::Sglang,
        "llmctl" => EngineKind::Llmctl,
        other => return Err(format!("it is neither vLLM nor SGLang nor llmctl ({other:?})")),
    };
    let name = model["id"].as_str().ok_or("it lists a model without a name")?.to_owned();
    let question = json!({"model": name, "prompt": PROBE_TEXT, "add_special_tokens": false});
    let ids = if kind == EngineKind::Llmctl && model["max_model_len"].is_null() {
        // Its server loads the model for the question, and knows the context then.
        let ids = http.post_patiently("/tokenize", &question).await.map_err(|failure| failure.to_string())?;
        model = listed(http, &name).await?;
        Some(ids)
    } else {
        http.post("/tokenize", &question).await.ok() // an engine that does not answer this is not refused
    };
    check_tokenizer(ids.as_deref(), &name, &expected.probe_ids)?;
    let context = [&model["max_model_len"], &model["context_length"]].into_iter().find_map(Value::as_u64);
    Ok(EngineHostFacts {
        kind,
        version: version(http, kind).await,
        model: name,
        context_tokens: context.and_then(|context| usize::try_from(context).ok()),
    })
}

/// Returns the model that is meant of those that an engine lists: by its name, or the only one; another one of several only where
/// names may stand for parts of one model, as vLLM's adapters do.
async fn listed(http: &EngineHttp, name: &str) -> Result<Value, String> {
    let text = http.get("/v1/models").await.map_err(|failure| failure.to_string())?;
    let list: Value = serde_json::from_str(&text).map_err(|_| "it lists no models".to_owned())?;
    let models = list["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_meant = |model: &&Value| model["id"] == name || model["root"] == name;
    let stands_for_all = |model: &&Value| models.len() == 1 || model["owned_by"] != "llmctl";
    let first = models.first().ok_or("it lists no models")?;
    let model = models.iter().find(is_meant).or_else(|| Some(first).filter(stands_for_all));
    model.cloned().ok_or_else(|| {
        let names: Vec<&str> = models.iter().filter_map(|model| model["id"].as_str()).collect();
        format!("it has no model {name:?}, but {}", names.join(", "))
    })
}

/// Compares the ids of a text in an answer, if there is one, with ours.
fn check_tokenizer(answer: Option<&str>, model: &str, ids: &[u32]) -> Result<(), String> {
    let answer: Value = answer.and_then(|answer| serde_json::from_str(answer).ok()).unwrap_or_default();
    let Some(theirs) = answer["tokens"].as_array() else { return Ok(()) };
    let theirs: Option<Vec<u64>> = theirs.iter().map(Value::as_u64).collect();
    match theirs.is_none_or(|theirs| theirs.into_iter().eq(ids.iter().map(|&id| u64::from(id)))) {
        true => Ok(()),
        false => Err(format!("its model {model:?} has another tokenizer")),
    }
}

async fn version(http: &EngineHttp, kind: EngineKind) -> Option<String> {
    let path = match kind {
        EngineKind::Vllm => "/version",
        EngineKind::Sglang => "/server_info",
        EngineKind::Llmctl => return None,
    };
    let answer: Value = serde_json::from_str(&http.get(path).await.ok()?).ok()?;
    answer["version"].as_str().map(str::to_owned)
}
