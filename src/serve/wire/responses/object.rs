//! The response object: members that repeat the request, the answer's items, and the end.
//!
//! All members that OpenAI and Open Responses require are always there, `null` where they do not apply.

use serde_json::{Map, Value, json};

use super::items::{ItemKind, answered_call, item_id, message, reasoning, status, text_part};
use super::tools::ToolNames;
use crate::wire::answer::add_details;
use crate::wire::json::members;
use llmctl_base::sampling::Support;
use llmctl_base::{SAMPLING, Sampling};
use llmctl_engine::Finish;
use llmctl_engine::turn::Answer;

/// A response before its answer.
#[derive(Debug, Clone)]
pub struct ResponseShape {
    pub id: String,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// Members that say what was asked for.
    pub repeated: Map<String, Value>,
    pub names: ToolNames,
    pub shows_reasoning: bool,
    /// Reasoning items have `encrypted_content`.
    pub seals_reasoning: bool,
}

/// The part of a response object that changes.
#[derive(Debug, Default)]
pub struct ResponseState {
    pub status: &'static str,
    pub output: Vec<Value>,
    pub usage: Value,
    pub error: Value,
    pub incomplete_reason: Option<&'static str>,
    /// Seconds since 1970.
    pub completed_at: Option<u64>,
}

impl ResponseState {
    pub fn in_progress() -> Self {
        Self { status: "in_progress", ..Self::default() }
    }

    /// Returns the state at the end of an answer.
    pub fn ended(answer: &Answer, created_ms: u64, output: Vec<Value>) -> Self {
        let incomplete_reason = incomplete_reason(answer);
        let status = match answer.outcome.finish {
            Finish::Cancelled => "cancelled",
            _ => status(incomplete_reason.is_none()),
        };
        let total_ms = u64::try_from(answer.outcome.timings.total.as_millis()).unwrap_or_default();
        let completed_at = (status == "completed").then(|| created_ms.saturating_add(total_ms) / 1000);
        let usage = usage(answer);
        Self { status, output, usage, incomplete_reason, completed_at, ..Self::default() }
    }
}

/// Returns why an answer is not complete; `None` if it is.
fn incomplete_reason(answer: &Answer) -> Option<&'static str> {
    match answer.outcome.finish {
        Finish::MaxTokens | Finish::ContextFull => Some("max_output_tokens"),
        Finish::Deadline => Some("deadline_exceeded"),
        Finish::Cancelled => Some("cancelled"),
        Finish::Repetition => Some("repetition"),
        Finish::Eos(_) | Finish::Complete | Finish::StopString(_) => None,
    }
}

/// Returns whether an answer has a message: it has text, or nothing but an end.
pub fn has_message(answer: &Answer) -> bool {
    !answer.content.is_empty() || (answer.tool_calls.is_empty() && incomplete_reason(answer).is_none())
}

fn usage(answer: &Answer) -> Value {
    let usage = &answer.outcome.usage;
    let mut details = json!({"reasoning_tokens": answer.num_reasoning_tokens});
    add_details(&mut details, usage);
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    })
}

impl ResponseShape {
    pub fn object(&self, state: ResponseState) -> Value {
        let ResponseState { status, output, usage, error, incomplete_reason, completed_at } = state;
        let mut object = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_ms / 1000,
            "completed_at": completed_at,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": incomplete_reason.map(|reason| json!({"reason": reason})),
            "output": output,
            "usage": usage,
        });
        if let Value::Object(members) = &mut object {
            members.extend(self.repeated.clone());
        }
        object
    }

    /// Returns the object of a finished answer. `logprobs` are those of the message's tokens.
    pub fn whole(&self, answer: &Answer, logprobs: &Value) -> Value {
        self.object(ResponseState::ended(answer, self.created_ms, self.output(answer, logprobs)))
    }

    /// Returns the items of an answer: reasoning, message, calls.
    fn output(&self, answer: &Answer, logprobs: &Value) -> Vec<Value> {
        let is_cut = incomplete_reason(answer).is_some();
        let has_calls = !answer.tool_calls.is_empty();
        let mut output = Vec::new();
        if self.shows_reasoning && !answer.reasoning.is_empty() {
            let id = item_id(ItemKind::Reasoning, &self.id, output.len());
            let status = status(!is_cut || has_calls || !answer.content.is_empty());
            output.push(reasoning(&id, &answer.reasoning, self.seals_reasoning, status));
        }
        if has_message(answer) {
            let id = item_id(ItemKind::Message, &self.id, output.len());
            let parts = [text_part(&answer.content, logprobs)];
            output.push(message(&id, &parts, status(!is_cut || has_calls)));
        }
        for call in &answer.tool_calls {
            output.push(answered_call(&self.names, &self.id, output.len(), call));
        }
        output
    }
}

/// Returns the members that repeat a request, as far as its body gives them.
pub fn repeated(body: &Map<String, Value>) -> Map<String, Value> {
    let given = |name: &str| body.get(name).cloned().unwrap_or_default();
    let or = |name: &str, default: Value| {
        body.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default)
    };
    let reasoning =
        |name: &str| body.get("reasoning").and_then(|value| value.get(name)).cloned().unwrap_or_default();
    members(json!({
        "instructions": given("instructions"),
        "max_output_tokens": given("max_output_tokens"),
        "max_tool_calls": given("max_tool_calls"),
        "metadata": or("metadata", json!({})),
        "parallel_tool_calls": or("parallel_tool_calls", true.into()),
        "previous_response_id": given("previous_response_id"),
        "prompt_cache_key": given("prompt_cache_key"),
        "reasoning": {"effort": reasoning("effort"), "summary": reasoning("summary")},
        "safety_identifier": given("safety_identifier"),
        "service_tier": "default",
        "text": text(body.get("text")),
        "tool_choice": or("tool_choice", "auto".into()),
        "top_logprobs": or("top_logprobs", 0.into()),
        "truncation": "disabled",
        "user": given("user"),
    }))
}

/// Returns `text` with the members that a response always has.
fn text(given: Option<&Value>) -> Value {
    let mut text = given.filter(|text| text.is_object()).cloned().unwrap_or_else(|| json!({}));
    if !text["format"].is_object() {
        text["format"] = json!({"type": "text"});
    }
    let format = &mut text["format"];
    if format["type"] == "json_schema" {
        for (name, default) in [("description", Value::Null), ("strict", false.into())] {
            if format[name].is_null() {
                format[name] = default;
            }
        }
    }
    text
}

/// Returns the members that tell how tokens are sampled.
pub fn sampling_members(sampling: &Sampling) -> Map<String, Value> {
    let members = SAMPLING.iter().filter(|number| number.facts.support == Support::Everywhere);
    members.map(|number| (number.name.to_owned(), decimal(number.get(sampling)))).collect()
}

/// Returns the number with the digits that were given: 0.7, not 0.699999988.
fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_repeated_as_they_were_given() {
        let sampling = Sampling { temperature: 0.7, top_p: 0.95, ..Sampling::default() };
        let members = sampling_members(&sampling);
        assert_eq!((&members["temperature"], &members["top_p"]), (&json!(0.7), &json!(0.95)));
    }

    #[test]
    fn a_bare_request_is_repeated_with_all_members() {
        let members = repeated(&Map::new());
        assert_eq!(members["text"], json!({"format": {"type": "text"}}));
        assert_eq!((&members["tool_choice"], &members["metadata"]), (&json!("auto"), &json!({})));
        for name in ["instructions", "max_output_tokens", "previous_response_id", "user"] {
            assert_eq!(members.get(name), Some(&Value::Null), "{name}");
        }
    }
}
