//! Requests to engines and their answers, in the form of each kind of engine. Pure.
//!
//! Every parameter is sent, because an engine fills in defaults of its own, e.g. those of the model's
//! generation_config.json.

use serde_json::{Map, Value, json};

use super::http::error_text;
use crate::grammar::{GrammarSource, between_slashes, gbnf_to_lark, prepare_schema};
use crate::request::{Logprob, Request, Token};
use llmctl_base::error::GrammarError;
use llmctl_base::sampling::Support;
use llmctl_base::{SAMPLING, Sampling, SamplingNumber};

/// Log-probability that engines write for an impossible token.
const IMPOSSIBLE: f32 = -9999.0;

/// Text before the id of a token in vLLM's log-probabilities.
const ID_PREFIX: &str = "token_id:";

/// First line of a Lark grammar that only llmctl's own library compiles (llguidance): vLLM by default tries another one first,
/// which gives some grammars another meaning.
const LARK_HEAD: &str = "%llguidance {}\n";

/// A grammar that only that library compiles, behind [`LARK_HEAD`].
const PROBE_GRAMMAR: &str = "start: %json {\"type\": \"integer\"}\n";

/// Kind of a remote engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Vllm,
    Sglang,
    Llmctl,
}

impl EngineKind {
    /// Returns the name for users.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Vllm => "vLLM",
            EngineKind::Sglang => "SGLang",
            EngineKind::Llmctl => "llmctl",
        }
    }

    /// Returns the path of generations.
    pub fn path(self) -> &'static str {
        match self {
            EngineKind::Vllm | EngineKind::Llmctl => "/v1/completions",
            EngineKind::Sglang => "/generate",
        }
    }

    /// Returns whether it has no parameter for the sampling number.
    pub fn lacks(self, number: &SamplingNumber) -> bool {
        self != EngineKind::Llmctl && number.facts.support == Support::LlamaCpp
    }
}

/// One generation as an engine is asked for it.
#[derive(Debug, Clone, Copy)]
pub struct AskedGeneration<'a> {
    /// Name of the model at the engine.
    pub model: &'a str,
    pub request: &'a Request,
    /// The prompt, and what was generated of the answer before.
    pub tokens: &'a [u32],
    pub max_tokens: usize,
    pub seed: u64,
    /// Tokens that end the generation.
    pub ends: &'a [u32],
    /// The engine compiles Lark grammars as llmctl does.
    pub takes_lark: bool,
    /// Separates what the engine has cached of this request from others.
    pub cache_salt: Option<&'a str>,
}

impl AskedGeneration<'_> {
    /// Returns the body of the request. The caller has refused what `kind` cannot honour.
    pub fn body(&self, kind: EngineKind) -> Value {
        match kind {
            EngineKind::Vllm | EngineKind::Llmctl => self.completion(kind),
            EngineKind::Sglang => self.sglang(),
        }
    }

    /// Returns a body of `/v1/completions`.
    fn completion(&self, kind: EngineKind) -> Value {
        let Self { request, .. } = *self;
        let mut body = json!({
            "model": self.model,
            "prompt": self.tokens,
            "max_tokens": self.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_token_ids": true,
            "stop_token_ids": self.ends,
            "ignore_eos": request.limits.ignore_eos,
            "top_k": request.sampling.top_k.unwrap_or(0),
        });
        let members = body.as_object_mut().expect("an object, written above");
        members.extend(numbers(kind, &request.sampling));
        members.extend(bias(&request.sampling));
        if kind == EngineKind::Llmctl {
            let Sampling { samplers, dry_sequence_breakers, .. } = &request.sampling;
            members.extend(samplers.as_ref().map(|steps| ("samplers".to_owned(), json!(steps))));
            let breakers = dry_sequence_breakers.as_ref();
            members.extend(breakers.map(|texts| ("dry_sequence_breakers".to_owned(), json!(texts))));
        }
        if request.sampling.temperature > 0.0 {
            members.insert("seed".to_owned(), self.seed.into());
        }
        if let Some(count) = request.logprobs {
            members.insert("logprobs".to_owned(), count.into());
            members.insert("return_tokens_as_token_ids".to_owned(), true.into());
        }
        if kind == EngineKind::Vllm {
            let vllm = json!({
                "skip_special_tokens": false, "spaces_between_special_tokens": false, "add_special_tokens": false,
                "min_tokens": 0, "include_stop_str_in_output": false,
            });
            members.extend(vllm.as_object().cloned().unwrap_or_default());
        }
        if let Some(salt) = self.cache_salt {
            members.insert("cache_salt".to_owned(), salt.into());
        }
        if let Some(grammar) = &request.grammar {
            members.insert("structured_outputs".to_owned(), structured(grammar.source(), self.takes_lark));
        }
        body
    }

    fn sglang(&self) -> Value {
        let Self { request, .. } = *self;
        let mut sampling = json!({
            "max_new_tokens": self.max_tokens,
            "stop_token_ids": self.ends,
            "ignore_eos": request.limits.ignore_eos,
            "top_k": request.sampling.top_k.map_or(-1, |k| i64::try_from(k).unwrap_or(i64::MAX)),
            "skip_special_tokens": false,
            "no_stop_trim": true,
        });
        let members = sampling.as_object_mut().expect("an object, written above");
        members.extend(numbers(EngineKind::Sglang, &request.sampling));
        members.extend(bias(&request.sampling));
        let grammar = request.grammar.as_ref();
        members.extend(grammar.and_then(|grammar| constraint(grammar.source(), self.takes_lark)));
        let mut body = json!({"input_ids": self.tokens, "sampling_params": sampling, "stream": true});
        if let Some(count) = request.logprobs {
            body["return_logprob"] = true.into();
            body["top_logprobs_num"] = count.into();
        }
        body
    }
}

/// Returns the sampling numbers that an engine has, by name.
fn numbers(kind: EngineKind, sampling: &Sampling) -> impl Iterator<Item = (String, Value)> {
    let has = SAMPLING.iter().filter(move |number| !kind.lacks(number));
    has.map(|number| (number.name.to_owned(), shortest(number.get(sampling))))
}

/// Returns the number as people write it: 0.7, not 0.699999988079071.
fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().unwrap_or_default().into()
}

fn bias(sampling: &Sampling) -> Option<(String, Value)> {
    let biases = sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), shortest(*bias)));
    let biases: Map<String, Value> = biases.collect();
    (!biases.is_empty()).then(|| ("logit_bias".to_owned(), biases.into()))
}

/// Returns a constraint as vLLM's `structured_outputs`. With `takes_lark`, the engine compiles it with llmctl's own grammar
/// library, so that it means the same there, spaces in JSON included.
fn structured(source: &GrammarSource, takes_lark: bool) -> Value {
    match (shared_lark(source, takes_lark), source) {
        (Some(lark), _) => json!({"grammar": lark}),
        (None, GrammarSource::Lark(grammar) | GrammarSource::Gbnf(grammar)) => json!({"grammar": grammar}),
        (None, GrammarSource::JsonObject) => json!({"json": {"type": "object"}}),
        (None, GrammarSource::JsonSchema(schema)) => json!({"json": schema}),
        (None, GrammarSource::Regex(regex)) => json!({"regex": regex}),
    }
}

/// Returns a constraint as SGLang's sampling parameter; `None` for a Lark grammar without `takes_lark`, which the caller has
/// refused. SGLang passes its parameter `ebnf` to llguidance, which recognises Lark there.
fn constraint(source: &GrammarSource, takes_lark: bool) -> Option<(String, Value)> {
    let (name, text) = match (shared_lark(source, takes_lark), source) {
        (Some(lark), _) => ("ebnf", lark),
        (None, GrammarSource::JsonObject) => ("json_schema", json!({"type": "object"}).to_string()),
        (None, GrammarSource::JsonSchema(schema)) => ("json_schema", schema.to_string()),
        (None, GrammarSource::Regex(regex)) => ("regex", regex.clone()),
        (None, GrammarSource::Lark(_) | GrammarSource::Gbnf(_)) => return None,
    };
    Some((name.to_owned(), text.into()))
}

/// Returns a constraint for an engine that has llmctl's grammar library, if it does.
fn shared_lark(source: &GrammarSource, takes_lark: bool) -> Option<String> {
    let lark = takes_lark.then(|| lark_of(source))?.ok()?; // it was compiled here before, so this is no error
    Some(format!("{LARK_HEAD}{lark}"))
}

/// Returns the body of a request that an engine answers if it compiles grammars with llmctl's own library, and refuses otherwise;
/// `None` for a kind that is not asked. `prompt` is a token of the model.
pub fn lark_question(kind: EngineKind, model: &str, prompt: u32) -> Option<Value> {
    let grammar = format!("{LARK_HEAD}{PROBE_GRAMMAR}");
    match kind {
        EngineKind::Vllm => Some(json!({
            "model": model, "prompt": [prompt], "max_tokens": 1, "structured_outputs": {"grammar": grammar},
        })),
        EngineKind::Sglang => {
            Some(json!({"input_ids": [prompt], "sampling_params": {"max_new_tokens": 1, "ebnf": grammar}}))
        }
        EngineKind::Llmctl => None,
    }
}

fn lark_of(source: &GrammarSource) -> Result<String, GrammarError> {
    Ok(match source {
        GrammarSource::JsonObject => {
            format!("start: %json {}\n", prepare_schema(&json!({"type": "object"}))?)
        }
        GrammarSource::JsonSchema(schema) => format!("start: %json {}\n", prepare_schema(schema)?),
        GrammarSource::Regex(regex) => format!("start: /{}/\n", between_slashes(regex)),
        GrammarSource::Lark(lark) => lark.clone(),
        GrammarSource::Gbnf(gbnf) => gbnf_to_lark(gbnf, &|_| None)?, // a compiled grammar is Lark already
    })
}

/// The content of one event of a stream.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineChunk {
    pub tokens: Vec<Token>,
    pub finish: Option<EngineFinish>,
    /// Prompt tokens that the engine had cached, if it says so.
    pub cached_tokens: Option<usize>,
    /// The stream is complete.
    pub is_last: bool,
}

/// Reason for which an engine ended a generation.
#[derive(Debug, Clone, PartialEq)]
pub enum EngineFinish {
    /// A token that ends it; `None` if the engine does not say which.
    Stop(Option<u32>),
    Length,
    /// Any other reason, in the engine's words.
    Other(String),
}

/// Why an event of a stream is no chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkError {
    /// The engine does not do what it is asked for; another one would not do it either.
    Refused(String),
    /// The engine is lost: its failure, or what is wrong with the event.
    Lost(String),
}

impl ChunkError {
    /// The engine's error with an HTTP status, if it names one.
    fn with_status(status: &Value, message: String) -> Self {
        match status.as_u64() {
            Some(400..=499) if status != 429 => Self::Refused(message),
            _ => Self::Lost(message),
        }
    }
}

impl From<String> for ChunkError {
    fn from(message: String) -> Self {
        Self::Lost(message)
    }
}

/// Reads the events of one stream.
#[derive(Debug, Clone, Copy)]
pub struct ChunkReader {
    kind: EngineKind,
    /// Log-probabilities, with so many alternatives.
    logprobs: Option<usize>,
    /// Tokens so far.
    num_tokens: usize,
}

impl ChunkReader {
    pub fn new(kind: EngineKind, logprobs: Option<usize>) -> Self {
        Self { kind, logprobs, num_tokens: 0 }
    }

    /// Reads the data of one event.
    ///
    /// # Errors
    /// The engine's error, or what is wrong with the event.
    pub fn read(&mut self, data: &str) -> Result<EngineChunk, ChunkError> {
        if data.trim() == "[DONE]" {
            return Ok(EngineChunk { is_last: true, ..EngineChunk::default() });
        }
        let value: Value =
            serde_json::from_str(data).map_err(|error| format!("an event is no JSON: {error}"))?;
        if !value["error"].is_null() {
            return Err(ChunkError::with_status(&value["error"]["code"], error_text(data, None)));
        }
        let chunk = match self.kind {
            EngineKind::Vllm | EngineKind::Llmctl => self.completion(&value)?,
            EngineKind::Sglang => self.sglang(&value)?,
        };
        self.num_tokens += chunk.tokens.len();
        Ok(chunk)
    }

    fn completion(&self, value: &Value) -> Result<EngineChunk, String> {
        let choice = &value["choices"][0];
        let ids = match &choice["token_ids"] {
            Value::Null if choice.is_null() || choice["text"] == "" => Vec::new(),
            Value::Null => return Err("it sends no token ids (return_token_ids)".to_owned()),
            ids => token_ids(ids)?,
        };
        let scores = self.logprobs.map(|count| completion_scores(&choice["logprobs"], count)).transpose()?;
        let stop = choice["stop_reason"].as_u64().and_then(|id| u32::try_from(id).ok());
        Ok(EngineChunk {
            tokens: with_scores(ids, scores)?,
            finish: choice["finish_reason"].as_str().map(|reason| finish(reason, stop)),
            cached_tokens: count(&value["usage"]["prompt_tokens_details"]["cached_tokens"]),
            is_last: false,
        })
    }

    /// SGLang's `output_ids` are those so far, or, as a server may be set, the new ones.
    fn sglang(&self, value: &Value) -> Result<EngineChunk, ChunkError> {
        let about = &value["meta_info"];
        let ids = token_ids(&value["output_ids"])?;
        let total = count(&about["completion_tokens"]).unwrap_or(ids.len());
        let num_new = total.saturating_sub(self.num_tokens).min(ids.len());
        let new = ids[ids.len() - num_new..].to_vec();
        let scores = self.logprobs.map(|_| sglang_scores(about, num_new)).transpose()?;
        let reason = &about["finish_reason"];
        if reason["type"] == "abort" {
            let message = reason["message"].as_str().unwrap_or("it has aborted the request");
            return Err(ChunkError::with_status(&reason["status_code"], message.to_owned()));
        }
        let stop = reason["matched"].as_u64().and_then(|id| u32::try_from(id).ok());
        Ok(EngineChunk {
            tokens: with_scores(new, scores)?,
            finish: reason["type"].as_str().map(|reason| finish(reason, stop)),
            cached_tokens: count(&about["cached_tokens"]),
            is_last: false,
        })
    }
}

fn finish(reason: &str, stop: Option<u32>) -> EngineFinish {
    match reason {
        "stop" => EngineFinish::Stop(stop),
        "length" => EngineFinish::Length,
        other => EngineFinish::Other(other.to_owned()),
    }
}

fn count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

fn token_ids(value: &Value) -> Result<Vec<u32>, String> {
    let ids = value.as_array().into_iter().flatten();
    let ids = ids.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
    ids.collect::<Option<_>>().ok_or_else(|| format!("a token id is no number: {value}"))
}

fn with_scores(ids: Vec<u32>, scores: Option<Vec<Logprob>>) -> Result<Vec<Token>, String> {
    match scores {
        None => Ok(ids.into_iter().map(|id| Token { id, logprob: None }).collect()),
        Some(scores) if scores.len() == ids.len() => {
            let tokens = ids.into_iter().zip(scores);
            Ok(tokens.map(|(id, score)| Token { id, logprob: Some(score) }).collect())
        }
        Some(scores) => Err(format!("{} tokens have {} log-probabilities", ids.len(), scores.len())),
    }
}

fn logprob(value: &Value) -> f32 {
    match value.as_f64() {
        Some(value) if value as f32 > IMPOSSIBLE => value as f32,
        _ => f32::NEG_INFINITY,
    }
}

/// Reads vLLM's log-probabilities. The chosen token is among the alternatives of an engine, even if it is none of the best.
fn completion_scores(value: &Value, num_alternatives: usize) -> Result<Vec<Logprob>, String> {
    let id = |text: &str| text.strip_prefix(ID_PREFIX).and_then(|id| id.parse::<u32>().ok());
    let chosen = value["token_logprobs"].as_array().into_iter().flatten();
    let tops = value["top_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    chosen
        .enumerate()
        .map(|(at, chosen)| {
            let top = tops.get(at).and_then(Value::as_object).into_iter().flatten();
            let top = top.map(|(text, value)| Some((id(text)?, logprob(value))));
            let top: Vec<(u32, f32)> =
                top.collect::<Option<_>>().ok_or("log-probabilities without token ids")?;
            Ok(Logprob { logprob: logprob(chosen), top: best(top, num_alternatives) })
        })
        .collect()
}

/// Reads the last `num_new` of SGLang's log-probabilities: `[value, id, text]`.
fn sglang_scores(about: &Value, num_new: usize) -> Result<Vec<Logprob>, String> {
    let last = |name: &str| {
        let all = about[name].as_array().map(Vec::as_slice).unwrap_or_default();
        all[all.len().saturating_sub(num_new)..].to_vec()
    };
    let tops = last("output_top_logprobs");
    let entry = |entry: &Value| Some((u32::try_from(entry[1].as_u64()?).ok()?, logprob(&entry[0])));
    let scores = last("output_token_logprobs").into_iter().enumerate().map(|(at, chosen)| {
        let top = tops.get(at).and_then(Value::as_array).into_iter().flatten().map(entry);
        let top: Vec<(u32, f32)> = top.collect::<Option<_>>().ok_or("log-probabilities without token ids")?;
        let num_alternatives = top.len();
        Ok(Logprob { logprob: logprob(&chosen[0]), top: best(top, num_alternatives) })
    });
    scores.collect()
}

/// Sorts alternatives, best first, and keeps `count` of them.
fn best(mut top: Vec<(u32, f32)>, count: usize) -> Vec<(u32, f32)> {
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.truncate(count);
    top
}
