//! A response as a stream of events, in the order that OpenAI's clients rely on.
//!
//! Invariants: every event has the next sequence number; items come one after another, each added before its
//! deltas and done before the next one; the last event is `response.completed`, `response.incomplete` or
//! `response.failed` and holds the whole response.

use serde_json::{Map, Value, json};

use super::super::collect::Collected;
use super::super::generate::FinishedChoice;
use super::super::sse::WireFormat;
use super::writer::ResponseWriter;
use crate::error::ApiError;
use crate::wire::responses::items;
use crate::wire::responses::items::{InputText, ItemKind, item_id, reasoning_part, status, text_part};
use crate::wire::responses::object::{ResponseState, has_message};
use crate::wire::responses::tools::ToolName;
use llmctl_engine::Token;
use llmctl_engine::turn::Delta;

/// Silent seconds between events: clients that wait for an event do not see comments.
const SECONDS_BETWEEN_EVENTS: usize = 10;

/// Writes the events of a response.
pub struct ResponseEvents {
    writer: ResponseWriter,
    sequence_number: usize,
    /// Items that are done.
    output: Vec<Value>,
    open: Option<OpenItem>,
    /// Tokens whose log-probabilities wait for text.
    held: Vec<Token>,
    num_silent_seconds: usize,
}

/// The item that deltas belong to.
struct OpenItem {
    kind: ItemKind,
    id: String,
    /// Text of a message or of reasoning, arguments of a function, input of a custom tool.
    text: String,
    logprobs: Vec<Value>,
    call: Option<OpenCall>,
}

struct OpenCall {
    call_id: String,
    tool: ToolName,
    input: InputText,
}

impl ResponseEvents {
    pub fn new(writer: ResponseWriter) -> Self {
        Self {
            writer,
            sequence_number: 0,
            output: Vec::new(),
            open: None,
            held: Vec::new(),
            num_silent_seconds: 0,
        }
    }

    fn event(&mut self, kind: &str, members: Value) -> Value {
        let mut event = Map::new();
        event.insert("type".to_owned(), format!("response.{kind}").into());
        event.insert("sequence_number".to_owned(), self.sequence_number.into());
        if let Value::Object(members) = members {
            event.extend(members);
        }
        self.sequence_number += 1;
        Value::Object(event)
    }

    fn of_response(&mut self, kind: &str, response: &Value) -> Value {
        self.event(kind, json!({"response": response}))
    }

    /// Returns an event of `item`, with the index of its part if it has one.
    fn of_item(&mut self, kind: &str, item: &OpenItem, members: Value) -> Value {
        let mut all = json!({"item_id": item.id, "output_index": self.output.len()});
        if matches!(item.kind, ItemKind::Message | ItemKind::Reasoning) {
            all["content_index"] = 0.into();
        }
        if let (Value::Object(all), Value::Object(members)) = (&mut all, members) {
            all.extend(members);
        }
        self.event(kind, all)
    }

    /// Opens an item of the kind, unless it is open.
    fn need(&mut self, kind: ItemKind, events: &mut Vec<Value>) -> OpenItem {
        match self.open.take() {
            Some(open) if open.kind == kind => open,
            other => {
                self.open = other;
                self.close(true, events);
                self.begin(kind, None, events)
            }
        }
    }

    fn begin(&mut self, kind: ItemKind, call: Option<OpenCall>, events: &mut Vec<Value>) -> OpenItem {
        let id = item_id(kind, &self.writer.shape.id, self.output.len());
        let item = OpenItem { kind, id, text: String::new(), logprobs: Vec::new(), call };
        let added = json!({"output_index": self.output.len(), "item": self.empty(&item)});
        events.push(self.event("output_item.added", added));
        if let Some(part) = item.part() {
            events.push(self.of_item("content_part.added", &item, json!({"part": part})));
        }
        item
    }

    /// Returns the item as `output_item.added` shows it.
    fn empty(&self, item: &OpenItem) -> Value {
        let mut value = self.whole_item(item, "in_progress");
        if item.part().is_some() {
            value["content"] = json!([]);
        }
        value
    }

    fn whole_item(&self, item: &OpenItem, status: &str) -> Value {
        let seals = self.writer.shape.seals_reasoning;
        match (&item.call, item.part()) {
            (Some(call), _) => items::call(&item.id, &call.call_id, &call.tool, &item.text, status),
            (None, Some(part)) if item.kind == ItemKind::Message => items::message(&item.id, &[part], status),
            _ => items::reasoning(&item.id, &item.text, seals, status),
        }
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, is_whole: bool, events: &mut Vec<Value>) {
        let Some(item) = self.open.take() else { return };
        events.push(self.text_done(&item));
        if let Some(part) = item.part() {
            events.push(self.of_item("content_part.done", &item, json!({"part": part})));
        }
        let whole = self.whole_item(&item, status(is_whole));
        let done = json!({"output_index": self.output.len(), "item": whole});
        events.push(self.event("output_item.done", done));
        self.output.push(whole);
    }

    fn text_done(&mut self, item: &OpenItem) -> Value {
        let (kind, members) = match item.kind {
            ItemKind::Message => ("output_text.done", json!({"text": item.text, "logprobs": item.logprobs})),
            ItemKind::Reasoning => ("reasoning_text.done", json!({"text": item.text})),
            ItemKind::CustomCall => ("custom_tool_call_input.done", json!({"input": item.text})),
            ItemKind::FunctionCall => {
                let name = item.call.as_ref().map(|call| call.tool.name.as_str());
                ("function_call_arguments.done", json!({"arguments": item.text, "name": name}))
            }
        };
        self.of_item(kind, item, members)
    }

    fn delta(&mut self, delta: Delta, events: &mut Vec<Value>) {
        match delta {
            Delta::Content(text) => self.says(&text, events),
            Delta::Reasoning(text) => self.thinks(&text, events),
            Delta::Call { id, name, .. } => {
                self.close(true, events);
                let tool = self.writer.shape.names.called(&name);
                let kind = ItemKind::of_call(&tool);
                let call = OpenCall { call_id: id, tool, input: InputText::default() };
                self.open = Some(self.begin(kind, Some(call), events));
            }
            Delta::Arguments { fragment, .. } => self.calls_with(&fragment, events),
            Delta::CallEnd { .. } => self.close(true, events),
        }
    }

    fn says(&mut self, text: &str, events: &mut Vec<Value>) {
        let mut item = self.need(ItemKind::Message, events);
        let logprobs = self.writer.logprobs(&std::mem::take(&mut self.held));
        item.text.push_str(text);
        events.push(self.of_item("output_text.delta", &item, json!({"delta": text, "logprobs": logprobs})));
        item.logprobs.extend(logprobs.as_array().cloned().unwrap_or_default());
        self.open = Some(item);
    }

    fn thinks(&mut self, text: &str, events: &mut Vec<Value>) {
        if !self.writer.shape.shows_reasoning {
            return;
        }
        let mut item = self.need(ItemKind::Reasoning, events);
        item.text.push_str(text);
        events.push(self.of_item("reasoning_text.delta", &item, json!({"delta": text})));
        self.open = Some(item);
    }

    fn calls_with(&mut self, fragment: &str, events: &mut Vec<Value>) {
        let Some(mut item) = self.open.take() else { return };
        let (kind, text) = match &mut item.call {
            Some(call) if call.tool.is_custom => ("custom_tool_call_input.delta", call.input.take(fragment)),
            _ => ("function_call_arguments.delta", fragment.to_owned()),
        };
        item.text.push_str(&text);
        if !text.is_empty() {
            events.push(self.of_item(kind, &item, json!({"delta": text})));
        }
        self.open = Some(item);
    }
}

impl OpenItem {
    /// Returns the item's content part; `None` for calls.
    fn part(&self) -> Option<Value> {
        match self.kind {
            ItemKind::Message => Some(text_part(&self.text, &Value::Array(self.logprobs.clone()))),
            ItemKind::Reasoning => Some(reasoning_part(&self.text)),
            ItemKind::FunctionCall | ItemKind::CustomCall => None,
        }
    }
}

impl WireFormat for ResponseEvents {
    const NAMES_EVENTS: bool = true;
    const ENDS_WITH_DONE: bool = false;
    const BEGINS_TOO_LONG: bool = true;

    fn whole(self, collected: &Collected) -> Result<Value, ApiError> {
        let finished = collected.choices.first();
        let finished = finished.ok_or_else(|| ApiError::internal("the answer is missing"))?;
        Ok(ResponseWriter::with_report(self.writer.whole(&finished.answer), finished))
    }

    fn opening(&mut self) -> Vec<Value> {
        let response = self.writer.shape.object(ResponseState::in_progress());
        ["created", "in_progress"].map(|kind| self.of_response(kind, &response)).into()
    }

    fn deltas(&mut self, _choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        self.num_silent_seconds = 0;
        if self.writer.has_logprobs {
            self.held.extend(tokens);
        }
        let mut events = Vec::new();
        deltas.into_iter().for_each(|delta| self.delta(delta, &mut events));
        events
    }

    fn finished(&mut self, _choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let mut events = Vec::new();
        let answer = &finished.answer;
        let ended = ResponseState::ended(answer, self.writer.shape.created_ms, Vec::new());
        let is_complete = ended.status == "completed";
        let has_written = self.output.iter().any(|item| item["type"] == "message");
        if !has_written && answer.content.is_empty() && has_message(answer) {
            self.open = Some(self.need(ItemKind::Message, &mut events));
        }
        let is_open_call = self.open.as_ref().is_some_and(|item| item.call.is_some());
        self.close(is_complete && !is_open_call, &mut events);
        let state = ResponseState { output: self.output.clone(), ..ended };
        let kind = if is_complete { "completed" } else { "incomplete" };
        let response = ResponseWriter::with_report(self.writer.shape.object(state), finished);
        events.push(self.of_response(kind, &response));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<Value> {
        let mut events = Vec::new();
        self.close(false, &mut events);
        let state = ResponseState {
            status: "failed",
            output: self.output.clone(),
            error: failure(error),
            ..ResponseState::default()
        };
        let response = self.writer.shape.object(state);
        events.push(self.of_response("failed", &response));
        events
    }

    fn keep_alive(&mut self) -> Option<Value> {
        self.num_silent_seconds += 1;
        if !self.num_silent_seconds.is_multiple_of(SECONDS_BETWEEN_EVENTS) {
            return None;
        }
        let response = self.writer.shape.object(ResponseState::in_progress());
        Some(self.of_response("in_progress", &response))
    }
}

/// Returns an error with the codes that agents act on: they wait as long as the message of `rate_limit_exceeded` says, and
/// compact their conversation at `context_length_exceeded`.
fn failure(error: &ApiError) -> Value {
    let mut message = error.message.clone();
    let code = match error.status.as_u16() {
        409 | 429 => "rate_limit_exceeded",
        500.. => "server_error",
        _ => error.code.unwrap_or("invalid_request_error"),
    };
    if let (Some(wait), "rate_limit_exceeded") = (error.retry_after, code) {
        message.push_str(&format!("; try again in {}s", wait.as_secs_f64().ceil().max(1.0)));
    }
    json!({"code": code, "message": message})
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn failures_have_the_codes_that_agents_act_on() {
        let check = |error: ApiError, code: &str, message: &str| {
            assert_eq!(failure(&error), json!({"code": code, "message": message}));
        };
        let error = |status, code| ApiError::new(status, code, "no");
        let busy = error(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"));
        check(busy.retry_after(Duration::from_millis(1200)), "rate_limit_exceeded", "no; try again in 2s");
        let long = error(StatusCode::BAD_REQUEST, Some("context_length_exceeded"));
        check(long, "context_length_exceeded", "no");
        check(ApiError::internal("no"), "server_error", "no");
        check(error(StatusCode::CONFLICT, Some("session_busy")), "rate_limit_exceeded", "no");
    }
}
