//! `POST /v1/chat/completions`.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::body::JsonBody;
use super::reply::{self, Head};
use super::request::{self, Streaming};
use super::sse::{self, Chunks};
use super::turn::{Answered, Delta, Said, SaidCall, Totals};
use super::{collect, drive};
use crate::runtime::Token;
use crate::serve::App;
use crate::serve::access::{RequestId, X_TOOL_FORMAT};
use crate::serve::error::ApiError;
use crate::serve::wire::message::tool_call_json;
use crate::template::ToolCall;

pub async fn post(
    State(app): State<App>,
    headers: HeaderMap,
    RequestId(request_id): RequestId,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let request::Chat { ask, streaming, shows_reasoning } = request::chat(&app, body, &headers, request_id)?;
    let style = Style {
        num_choices: ask.num_choices,
        logprobs: ask.logprobs.is_some(),
        include_usage: streaming.includes_usage,
        shows_reasoning,
    };
    let head = Head::new(&app, "chatcmpl");
    let is_generic = ask.tools.is_on() && app.model().speech.spells_tools();
    let running = drive::begin(&app, ask).await?;
    let mut response = match streaming {
        Streaming { is_on: true, .. } => {
            let held = vec![Vec::new(); style.num_choices];
            sse::response(running, ChatChunks { head, style, held })
        }
        Streaming { is_on: false, .. } => {
            let collected = collect::all(running).await?;
            Json(completion(&head, &style, &collected)).into_response()
        }
    };
    if is_generic {
        response.headers_mut().insert(X_TOOL_FORMAT, HeaderValue::from_static("generic"));
    }
    Ok(response)
}

/// How an answer is shown.
struct Style {
    num_choices: usize,
    logprobs: bool,
    include_usage: bool,
    shows_reasoning: bool,
}

/// The whole answer.
fn completion(head: &Head, style: &Style, collected: &collect::Collected) -> Value {
    let choice = |(index, (answer, tokens)): (usize, &(Answered, Vec<Token>))| {
        json!({
            "index": index,
            "message": message(&answer.said, style.shows_reasoning),
            "logprobs": style.logprobs.then(|| head.chat_logprobs(tokens)),
            "finish_reason": answer.finish_reason(),
        })
    };
    let choices = collected.choices.iter().enumerate().map(choice).collect();
    let mut object = head.object("chat.completion", choices);
    object.insert("usage".to_owned(), reply::usage(&collected.totals));
    object.insert("timings".to_owned(), reply::timings(&collected.totals));
    Value::Object(object)
}

/// The content is a string whenever the answer is one, be it empty, and null when there is nothing but calls.
fn message(said: &Said, shows_reasoning: bool) -> Value {
    let is_call_only = said.content.is_empty() && !said.calls.is_empty();
    let content = if is_call_only { Value::Null } else { said.content.as_str().into() };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if shows_reasoning && !said.reasoning.is_empty() {
        message["reasoning_content"] = said.reasoning.as_str().into();
    }
    if !said.calls.is_empty() {
        let call = |call: &SaidCall| {
            let arguments = Value::String(call.arguments.clone());
            tool_call_json(&ToolCall { id: Some(call.id.clone()), name: call.name.clone(), arguments })
        };
        message["tool_calls"] = said.calls.iter().map(call).collect();
    }
    message
}

/// The answer as it comes.
struct ChatChunks {
    head: Head,
    style: Style,
    /// Of each choice, the tokens whose log-probabilities wait for a chunk.
    held: Vec<Vec<Token>>,
}

impl ChatChunks {
    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = self.head.object("chat.completion.chunk", choices);
        if self.style.include_usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        chunk
    }

    fn delta(&mut self, choice: usize, delta: Value, finish: Option<&str>) -> Map<String, Value> {
        let tokens = std::mem::take(&mut self.held[choice]);
        let logprobs = (!tokens.is_empty()).then(|| self.head.chat_logprobs(&tokens));
        self.chunk(vec![json!({
            "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        })])
    }
}

impl Chunks for ChatChunks {
    fn opening(&mut self) -> Vec<Value> {
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (0..self.style.num_choices)
            .map(|choice| Value::Object(self.delta(choice, role.clone(), None)))
            .collect()
    }

    fn said(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        if self.style.logprobs {
            self.held[choice].extend(tokens);
        }
        let shown = |delta: &Delta| self.style.shows_reasoning || !matches!(delta, Delta::Reasoning(_));
        let deltas: Vec<Delta> = deltas.into_iter().filter(shown).collect();
        let deltas = deltas.iter().filter_map(delta_json);
        deltas.map(|delta| Value::Object(self.delta(choice, delta, None))).collect()
    }

    fn finished(&mut self, choice: usize, answer: &Answered) -> Vec<Value> {
        let mut chunk = self.delta(choice, json!({}), Some(answer.finish_reason()));
        chunk.insert("timings".to_owned(), reply::choice_timings(answer));
        vec![Value::Object(chunk)]
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        if !self.style.include_usage {
            return Vec::new();
        }
        let mut chunk = self.chunk(Vec::new());
        chunk.insert("usage".to_owned(), reply::usage(totals));
        vec![Value::Object(chunk)]
    }
}

/// A call's end is not on the wire: the next call or the finish reason tells it.
fn delta_json(delta: &Delta) -> Option<Value> {
    Some(match delta {
        Delta::Content(text) => json!({"content": text}),
        Delta::Reasoning(text) => json!({"reasoning_content": text}),
        Delta::Call { index, id, name } => json!({"tool_calls": [
            {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}},
        ]}),
        Delta::Arguments { index, fragment } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})
        }
        Delta::CallEnd { .. } => return None,
    })
}
