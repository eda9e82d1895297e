//! Members that the answers of all endpoints share: model, usage and timings.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, IntoResponseParts, Response, ResponseParts};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::collect::Collected;
use super::generate::{GenerateRequest, Running, Totals};
use super::request::Streaming;
use crate::App;
use crate::gate::request_id::{X_RECEIPT, X_SEED, X_TOOL_FORMAT};
use crate::sessions::Placed;
use crate::wire::answer;
use crate::wire::answer::CompletionLogprobs;
use crate::wire::json::members;
use llmctl_engine::turn::Answer;
use llmctl_engine::{Logprob, Reuse, Timings, Token, Usage};

/// First members of every object of one answer; `created` is the same in all of them.
#[derive(Clone)]
pub struct Head {
    app: App,
    id: String,
    created: u64,
}

impl Head {
    /// `prefix` is that of the id, e.g. `chatcmpl`.
    pub fn new(app: &App, prefix: &str) -> Self {
        let since = SystemTime::UNIX_EPOCH.elapsed();
        let created = since.map_or(0, |since| since.as_secs());
        Self { app: app.clone(), id: format!("{prefix}-{}", Uuid::new_v4().simple()), created }
    }

    /// An object with these choices.
    pub fn object(&self, kind: &str, choices: Vec<Value>) -> Map<String, Value> {
        let model = self.app.model();
        let fingerprint: String = model.fingerprint.fingerprint.chars().take(12).collect();
        members(json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model.id,
            "system_fingerprint": format!("fp_{fingerprint}"),
            "choices": choices,
        }))
    }

    /// Returns the object of a whole answer with its counts and times.
    pub fn whole(&self, kind: &str, choices: Vec<Value>, totals: &Totals) -> Map<String, Value> {
        let mut object = self.object(kind, choices);
        object.insert("usage".to_owned(), usage(totals));
        object.insert("timings".to_owned(), timings_json(&totals.timings, &totals.usage, &totals.reuse));
        object
    }

    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.app.model().chat_tokenizer.token_bytes(id).into_owned()
    }

    pub fn chat_logprobs(&self, tokens: &[Token]) -> Value {
        answer::chat_logprobs(tokens, &|id| self.token_bytes(id))
    }

    /// Of an answer, behind its prompt where that is told too.
    pub fn completion_logprobs(&self, told: Option<&Echoed>, tokens: &[Token], offset: &mut usize) -> Value {
        let mut logprobs = CompletionLogprobs::default();
        if let Some(Echoed { ids, scores, .. }) = told {
            let tokenizer = self.app.model().chat_tokenizer.tokenizer();
            let special = |id: u32| tokenizer.is_special(id);
            logprobs.add_prompt((ids, scores), &special, &|id| self.token_bytes(id), offset);
        }
        logprobs.add_answer(tokens, &|id| self.token_bytes(id), offset);
        logprobs.into_json()
    }
}

/// A prompt that its answer begins with.
#[derive(Clone, Default)]
pub struct Echoed {
    pub text: String,
    pub ids: Vec<u32>,
    /// Of all but the first, where they were asked for.
    pub scores: Vec<Logprob>,
}

/// Fields that were taken and have no effect, as a header of the response.
pub struct Ignored(pub Vec<String>);

impl IntoResponseParts for Ignored {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        // Names come from the client: what no header can hold is replaced.
        let plain = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
        let names: Vec<String> = self.0.iter().map(|name| name.chars().map(plain).collect()).collect();
        if let Ok(value) = HeaderValue::from_str(&names.join(", "))
            && !names.is_empty()
        {
            response.headers_mut().insert("x-llmctl-ignored", value);
        }
        Ok(response)
    }
}

/// Headers of an answer of a chat that tell what became of its request.
pub struct AnswerHeaders {
    placed: Option<Placed>,
    ignored: Vec<String>,
    /// Calls are asked for in llmctl's own format.
    is_generic: bool,
    /// The seed of the first choice; `None` if nothing depends on it, or each prompt has its own.
    seed: Option<u64>,
}

impl AnswerHeaders {
    /// Headers that are known before the request runs; `placed` is not.
    pub fn new(app: &App, request: &mut GenerateRequest) -> Self {
        let ignored = std::mem::take(&mut request.ignored);
        let is_generic = request.turn.tools.is_on() && app.model().chat_tokenizer.spells_tools();
        let sampling = request.turn.sampling();
        let seed = sampling.seed.filter(|_| sampling.temperature > 0.0);
        Self { placed: None, ignored, is_generic, seed }
    }

    /// Learns what became known with the plan.
    pub fn learn(&mut self, running: &Running) {
        self.placed.clone_from(&running.placed);
        self.ignored.extend(running.prompts.iter().flat_map(|sent| sent.relaxed.iter().cloned()));
    }

    /// Learns what became known with the whole answer.
    pub fn learn_end(&mut self, collected: &Collected) {
        let placed = collected.choices.first().and_then(|choice| choice.placed.clone());
        self.placed = placed.or(self.placed.take());
    }

    /// Adds the headers to a response.
    pub fn on(self, response: Response) -> Response {
        let Self { placed, ignored, is_generic, seed } = self;
        let receipt = placed.as_ref().and_then(|placed| placed.receipt.as_deref()).and_then(receipt_header);
        let mut response = (PlacedHeader(placed), Ignored(ignored), response).into_response();
        let headers = response.headers_mut();
        headers.extend(is_generic.then(|| (X_TOOL_FORMAT, HeaderValue::from_static("generic"))));
        headers.extend(seed.map(|seed| (X_SEED, seed.into())));
        headers.extend(receipt);
        response
    }
}

/// Returns the header with the hash of a receipt.
pub fn receipt_header(hash: &str) -> Option<(HeaderName, HeaderValue)> {
    Some((X_RECEIPT, HeaderValue::from_str(hash).ok()?))
}

/// The usage so far, which each chunk of a stream tells where it is asked for.
pub struct RunningUsage {
    streaming: Streaming,
    prompt_tokens: usize,
    completion_tokens: usize,
}

impl RunningUsage {
    pub fn new(streaming: Streaming, prompt_tokens: usize) -> Self {
        Self { streaming, prompt_tokens, completion_tokens: 0 }
    }

    /// A prompt has so many tokens, where that was not known in the beginning.
    pub fn prompt(&mut self, total: usize) {
        self.prompt_tokens = self.prompt_tokens.max(total);
    }

    pub fn count(&mut self, completion_tokens: usize) {
        self.completion_tokens += completion_tokens;
    }

    /// Returns the last chunk, which has all counts, where it is asked for.
    pub fn ending(&self, mut chunk: Map<String, Value>, totals: &Totals) -> Vec<Value> {
        chunk.insert("usage".to_owned(), usage(totals));
        if self.streaming.includes_usage { vec![chunk.into()] } else { Vec::new() }
    }

    /// The member of a chunk: what there is so far, or that it comes later.
    pub fn write(&self, chunk: &mut Map<String, Value>) {
        let Self { streaming, prompt_tokens, completion_tokens } = *self;
        if streaming.usage_in_all {
            let usage = Usage { prompt_tokens, completion_tokens, ..Usage::default() };
            let mut usage = answer::usage(&usage);
            // The last chunk has the cached tokens.
            usage.as_object_mut().map(|members| members.shift_remove("prompt_tokens_details"));
            chunk.insert("usage".to_owned(), usage);
        } else if streaming.includes_usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
    }
}

/// Returns the place of a turn: a member of its answer.
pub fn placed(placed: &Placed) -> (String, Value) {
    let Placed { id, kept_turns, branch, is_transient, receipt } = placed;
    let value = json!({
        "session_id": branch.as_ref().map_or(id.as_str(), |branch| branch.of.as_str()),
        "transient": is_transient,
        "branch": branch.as_ref().map(|_| id),
        "branch_is_new": branch.as_ref().is_some_and(|branch| branch.is_new),
        "kept_turns": kept_turns,
        "receipt": receipt,
    });
    ("llmctl".to_owned(), value)
}

/// Tells clients that read headers that their turn went to a branch.
struct PlacedHeader(Option<Placed>);

impl IntoResponseParts for PlacedHeader {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        if let Some(Placed { id, branch: Some(_), .. }) = &self.0
            && let Ok(id) = HeaderValue::from_str(id)
        {
            response.headers_mut().insert("x-llmctl-branch", id);
        }
        Ok(response)
    }
}

fn usage(totals: &Totals) -> Value {
    let mut usage = answer::usage(&totals.usage);
    let details = &mut usage["completion_tokens_details"];
    details["reasoning_tokens"] = totals.num_reasoning_tokens.into();
    usage
}

/// The times of one choice.
pub fn choice_timings(answer: &Answer) -> Value {
    timings_json(&answer.outcome.timings, &answer.outcome.usage, &answer.reuse())
}

fn timings_json(timings: &Timings, usage: &Usage, reuse: &Reuse) -> Value {
    json!({
        "queue_ms": ms(timings.queue),
        "ttft_ms": timings.time_to_first_token.map(ms),
        "prefill_ms": ms(timings.prefill),
        "prefill_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "prefill_tokens_per_second": timings.prefill_rate(usage).map(rounded),
        "decode_ms": ms(timings.decode),
        "decode_tokens": usage.completion_tokens,
        "decode_tokens_per_second": timings.decode_rate(usage).map(rounded),
        "total_ms": ms(timings.total),
        "cached_tokens": usage.cached_tokens,
        "restored_tokens": reuse.restored_tokens,
        "resume_reason": reuse.reason.name(),
    })
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1000.0)
}

/// To a thousandth: more is noise, and makes lines long.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
