//! Ollama's native API on the wire: bodies into the crate's vocabulary, answers, models and errors out of it.
//!
//! Sources: docs/api.md and api/types.go of github.com/ollama/ollama. Invariants: as in `wire`, every field is taken by name and what
//! is left over is refused; `options` are read by `options`, whose names are those of the engine's sampling; a context is never cut.
//! Knows no endpoint and no model.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::Fields;
use super::json::{self, members};
use super::message::{self, as_arguments, message_json};
use super::shape::closed;
use crate::error::ApiError;
use llmctl_engine::grammar::GrammarSource;
use llmctl_engine::turn::{AnsweredCall, OutputConstraint};
use llmctl_models::load::ModelFacts;
use llmctl_template::{Content, DateTime, Message};

/// The version of Ollama whose API this is. Clients look for a least one.
pub const VERSION: &str = "0.12.0";

/// Answer of Ollama's server at `/`, by which some clients know it.
pub const GREETING: &str = "Ollama is running";

/// The tag that a name without one has.
const LATEST: &str = ":latest";

/// Moment of an end that never comes.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// Returns whether the answer of a path has Ollama's form. Below `/api/v1` clients look for OpenAI's.
pub fn is_ollama(path: &str) -> bool {
    path.strip_prefix("/api/").is_some_and(|rest| rest != "v1" && !rest.starts_with("v1/"))
}

/// Returns the envelope of an error, for a response body or a line of a stream: Ollama's member and, beside it, our code.
pub fn error_body(error: &ApiError) -> Value {
    json!({"error": error.message, "code": error.code, "param": error.param})
}

/// Returns whether two names are of the same model: a name without a tag has the tag `latest`.
pub fn is_same_name(one: &str, other: &str) -> bool {
    let bare = |name: &str| name.strip_suffix(LATEST).unwrap_or(name).len();
    one[..bare(one)] == other[..bare(other)]
}

/// Returns a name as lists show it, with a tag.
pub fn tagged(name: &str) -> String {
    let has_tag = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if has_tag { name.to_owned() } else { format!("{name}{LATEST}") }
}

/// Reads `keep_alive`: seconds, or a text like `5m`, `1h30m`, `-1`; less than zero is for ever, as [`Duration::MAX`].
pub fn keep_alive(value: &Value) -> Option<Duration> {
    let seconds = match value {
        Value::String(text) => seconds_of(text)?,
        other => other.as_f64()?,
    };
    Some(if seconds < 0.0 { Duration::MAX } else { Duration::try_from_secs_f64(seconds).ok()? })
}

/// Returns the seconds of Go's notation of a time. A number without a unit is seconds.
fn seconds_of(text: &str) -> Option<f64> {
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number: f64 = rest[..end].parse().ok()?;
        let unit_end = rest[end..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| end + at);
        let unit = match &rest[end..unit_end] {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "" | "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        (seconds, rest) = (seconds + number * unit, &rest[unit_end..]);
    }
    (!text.is_empty()).then_some(sign * seconds)
}

/// Reads `messages`, which are OpenAI's but for roles in any case and the name of a result's tool. `None` if there are none.
pub fn messages(fields: &mut Fields<'_>, knows_role: &dyn Fn(&str) -> bool) -> Option<Vec<Message>> {
    const NAME: &str = "messages";
    let mut given = fields.take(NAME)?;
    let items = given.as_array_mut().map(Vec::as_mut_slice);
    if items.as_ref().is_some_and(|items| items.is_empty()) {
        return None;
    }
    for message in items.into_iter().flatten().filter_map(Value::as_object_mut) {
        if let Some(Value::String(role)) = message.get_mut("role") {
            role.make_ascii_lowercase();
        }
        if let Some(name) = message.remove("tool_name") {
            message.entry("name").or_insert(name);
        }
    }
    fields.put(NAME, given);
    Some(message::messages(fields, knows_role))
}

/// Reads `format`: any JSON object, or what a schema says, whose objects are closed unless `is_open`.
pub fn format(fields: &mut Fields<'_>, is_open: bool) -> Option<OutputConstraint> {
    const NAME: &str = "format";
    let source = match fields.take(NAME)? {
        Value::String(word) if word.is_empty() => return None,
        Value::String(word) if word == "json" => GrammarSource::JsonObject,
        schema @ Value::Object(_) => GrammarSource::JsonSchema(schema),
        _ => {
            return fields.none(NAME, "is neither \"json\" nor a JSON Schema");
        }
    };
    Some(closed(OutputConstraint { source, param: NAME }, is_open))
}

/// Takes wishes to cut a prompt or a conversation, which is never done: what does not fit is refused.
pub fn cuts(fields: &mut Fields<'_>) {
    for name in ["truncate", "shift"] {
        if fields.flag(name) == Some(true) {
            fields.ignored(name);
        }
    }
}

/// Writes a conversation as `context`: the bytes of its messages as JSON. `None` for one with images, whose bytes are not in it.
pub fn context_of(messages: &[Message]) -> Option<Value> {
    let has_parts = messages.iter().any(|message| matches!(message.content, Some(Content::Parts(_))));
    let text = json!({"messages": messages.iter().map(message_json).collect::<Value>()}).to_string();
    (!has_parts).then(|| text.bytes().map(Value::from).collect())
}

/// Reads `context`: the conversation of [`context_of`].
pub fn context(fields: &mut Fields<'_>) -> Vec<Message> {
    const NAME: &str = "context";
    let Some(items) = fields.list(NAME).filter(|items| !items.is_empty()) else { return Vec::new() };
    let bytes: Option<Vec<u8>> = items.iter().map(|item| u8::try_from(item.as_u64()?).ok()).collect();
    match bytes.and_then(|bytes| json::object(&bytes, NAME).ok()) {
        Some(members) => {
            let mut inner = fields.inside(NAME, members);
            let messages = message::messages(&mut inner, &|_| true);
            inner.end();
            messages
        }
        None => {
            fields.out_of_range(NAME, "is not the context of an answer of this server");
            Vec::new()
        }
    }
}

/// Returns a moment as Ollama writes it.
fn time(since_1970: Duration) -> String {
    let seconds = i64::try_from(since_1970.as_secs()).unwrap_or_default();
    let date = DateTime::from_unix(seconds).strftime("%FT%T");
    format!("{date}.{:09}Z", since_1970.subsec_nanos())
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The endpoint whose answers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    Chat,
    Generate,
}

/// A part of an answer, or all of it.
#[derive(Debug, Default)]
pub struct AnswerPart<'a> {
    pub content: &'a str,
    pub thinking: &'a str,
    pub calls: Vec<Value>,
    /// In OpenAI's form; `Null` without any.
    pub logprobs: Value,
}

impl AnswerPart<'_> {
    /// Writes the part as an object of a stream. The last one has `done`.
    pub fn object(self, kind: AnswerKind, model: &str, done: bool) -> Map<String, Value> {
        let mut text = match kind {
            AnswerKind::Chat => members(json!({"role": "assistant", "content": self.content})),
            AnswerKind::Generate => members(json!({"response": self.content})),
        };
        if !self.thinking.is_empty() {
            text.insert("thinking".to_owned(), self.thinking.into());
        }
        if !self.calls.is_empty() {
            text.insert("tool_calls".to_owned(), self.calls.into());
        }
        let mut object = members(json!({"model": model, "created_at": time(now())}));
        match kind {
            AnswerKind::Chat => drop(object.insert("message".to_owned(), text.into())),
            AnswerKind::Generate => object.extend(text),
        }
        object.insert("done".to_owned(), done.into());
        if self.logprobs.is_array() {
            object.insert("logprobs".to_owned(), self.logprobs);
        }
        object
    }
}

/// Writes a call of an answer, with its arguments as an object.
pub fn call(index: usize, call: &AnsweredCall) -> Value {
    let arguments = serde_json::from_str(&call.arguments).map(as_arguments);
    let arguments = arguments.unwrap_or_else(|_| call.arguments.as_str().into());
    json!({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
}

/// Writes the last object of an answer that asked for no text.
pub fn without_text(kind: AnswerKind, model: &str, reason: &str) -> Value {
    let mut object = AnswerPart::default().object(kind, model, true);
    object.insert("done_reason".to_owned(), reason.into());
    object.into()
}

/// Facts about a model for lists.
pub struct ModelCard<'a> {
    pub id: &'a str,
    /// Seconds since 1970.
    pub modified: u64,
    /// Names the bits that the model computes; empty if it is not loaded.
    pub digest: &'a str,
    pub facts: Option<&'a ModelFacts>,
    /// Tokens of the context in use; of training if the model is not loaded.
    pub context: Option<usize>,
    pub capabilities: Vec<&'static str>,
}

impl ModelCard<'_> {
    fn architecture(&self) -> &str {
        self.facts.and_then(|facts| facts.architecture.as_deref()).unwrap_or("unknown")
    }

    fn details(&self) -> Value {
        let family = self.architecture();
        let format = self.facts.map_or("", |facts| facts.kind.name());
        let width =
            self.facts.and_then(|facts| facts.decoder.as_ref().ok()).map(|decoder| decoder.hidden_size);
        json!({
            "parent_model": "",
            "format": format,
            "family": family,
            "families": [family],
            "parameter_size": self.facts.map(|facts| num_parameters(facts.parameters)).unwrap_or_default(),
            "quantization_level": self.facts.and_then(|facts| facts.quantization.as_deref()).unwrap_or_default(),
            "context_length": self.context,
            "embedding_length": width,
        })
    }

    /// Writes the model under one of its names.
    pub fn listed(&self, name: &str) -> Map<String, Value> {
        let name = tagged(name);
        members(json!({
            "name": name,
            "model": name,
            "modified_at": time(Duration::from_secs(self.modified)),
            "size": self.facts.map_or(0, |facts| facts.bytes),
            "digest": self.digest,
            "details": self.details(),
            "capabilities": self.capabilities,
        }))
    }

    /// Writes a loaded model, which stays so for `left`, or for ever.
    pub fn running(&self, left: Option<Duration>) -> Value {
        let mut object = self.listed(self.id);
        object.shift_remove("modified_at");
        object.shift_remove("capabilities");
        let end = left.and_then(|left| now().checked_add(left)).filter(|end| end.as_secs() < 1 << 37);
        object.insert("expires_at".to_owned(), end.map_or_else(|| NEVER.to_owned(), time).into());
        object.insert("size_vram".to_owned(), 0.into());
        object.insert("context_length".to_owned(), self.context.into());
        object.into()
    }

    /// Writes all that is known; `parameters` are the publisher's, one a line.
    pub fn shown(&self, template: &str, parameters: &str) -> Value {
        let lines: String = parameters.lines().map(|line| format!("PARAMETER {line}\n")).collect();
        json!({
            "modelfile": format!("FROM {}\n{lines}", self.id),
            "parameters": parameters,
            "template": template,
            "details": self.details(),
            "model_info": self.model_info(),
            "capabilities": self.capabilities,
            "modified_at": time(Duration::from_secs(self.modified)),
        })
    }

    fn model_info(&self) -> Map<String, Value> {
        let architecture = self.architecture();
        let mut info = members(json!({"general.architecture": architecture}));
        if let Some(facts) = self.facts {
            info.insert("general.parameter_count".to_owned(), facts.parameters.into());
        }
        let decoder = self.facts.and_then(|facts| facts.decoder.as_ref().ok());
        for (name, value) in [
            ("context_length", self.context),
            ("embedding_length", decoder.map(|decoder| decoder.hidden_size)),
            ("block_count", decoder.map(|decoder| decoder.num_layers)),
            ("vocab_size", decoder.map(|decoder| decoder.vocab_size)),
        ] {
            info.extend(value.map(|value| (format!("{architecture}.{name}"), value.into())));
        }
        info
    }
}

/// Returns a number of parameters as Ollama writes it: `1.2B`, `134.52M`.
fn num_parameters(count: u64) -> String {
    let (unit, name, digits) = if count >= 1_000_000_000 { (1e9, "B", 1) } else { (1e6, "M", 2) };
    let text = format!("{:.digits$}", count as f64 / unit);
    format!("{}{name}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::super::Problems;
    use super::*;
    use llmctl_template::Role;

    #[test]
    fn times_are_seconds_or_gos_notation() {
        for (given, seconds) in [
            (json!(0), 0.0),
            (json!(90), 90.0),
            (json!("0"), 0.0),
            (json!("5m"), 300.0),
            (json!("1h30m"), 5400.0),
            (json!("1.5s"), 1.5),
            (json!("300ms"), 0.3),
        ] {
            assert_eq!(keep_alive(&given), Some(Duration::from_secs_f64(seconds)), "{given}");
        }
        for given in [json!(-1), json!("-1"), json!("-1m")] {
            assert_eq!(keep_alive(&given), Some(Duration::MAX), "{given}");
        }
        for given in
            [json!(""), json!("soon"), json!("5 m"), json!("5d"), json!(true), json!([]), json!(1e300)]
        {
            assert_eq!(keep_alive(&given), None, "{given}");
        }
    }

    #[test]
    fn a_name_without_a_tag_has_the_tag_latest() {
        for (one, other, is_same) in [
            ("a", "a:latest", true),
            ("org/a:latest", "org/a", true),
            ("a:7b", "a:7b", true),
            ("a:7b", "a", false),
            ("a:latest", "b", false),
        ] {
            assert_eq!(is_same_name(one, other), is_same, "{one} {other}");
        }
        let named = ["a", "org/a:Q4", "host:80/a"].map(tagged);
        assert_eq!(named, ["a:latest", "org/a:Q4", "host:80/a:latest"]);
        assert_eq!(
            [134_515_008, 1_235_814_432, 7_000_000_000].map(num_parameters),
            ["134.52M", "1.2B", "7B"]
        );
    }

    #[test]
    fn a_conversation_goes_there_and_back_as_context() {
        let messages = [Message::new(Role::User, "übung 🦀"), Message::new(Role::Assistant, "b")];
        let context = context_of(&messages).expect("no images");
        let mut problems = Problems::new(false);
        let body = Map::from_iter([("context".to_owned(), context)]);
        let mut fields = Fields::new(body, &mut problems);
        let read = super::context(&mut fields);
        fields.end();
        assert_eq!(problems.check(), Ok(()));
        assert_eq!(read, messages);
        let image = Message { content: Some(Content::Parts(Vec::new())), ..Message::new(Role::User, "") };
        assert_eq!(context_of(&[image]), None);
    }

    #[test]
    fn only_its_own_paths_have_its_form() {
        assert!(is_ollama("/api/chat") && is_ollama("/api/nothing"));
        assert!(!is_ollama("/api/v1/chat/completions") && !is_ollama("/v1/models") && !is_ollama("/api"));
    }
}
