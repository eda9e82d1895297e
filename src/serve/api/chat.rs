//! `POST /v1/chat/completions`.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::body::{Incoming, JsonBody};
use super::generate::{FinishedChoice, Totals};
use super::reply::{self, AnswerHeaders, Head, RunningUsage};
use super::request::{self, Streaming};
use super::sse::{self, StreamFormat};
use super::{blocking, collect, drive};
use crate::App;
use crate::error::ApiError;
use crate::wire::answer::message_json;
use llmctl_engine::Token;
use llmctl_engine::turn::Delta;

pub async fn post(
    State(app): State<App>,
    incoming: Incoming,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let chat = blocking(&app, move |app| request::chat(app, body, incoming)).await?;
    let request::ChatBody { request, streaming, shows_reasoning, has_functions, ignored } = chat;
    let style = ChatStyle {
        num_choices: request.num_choices,
        logprobs: request.turn.logprobs.is_some(),
        streaming,
        shows_reasoning,
        has_functions,
    };
    let head = Head::new(&app, "chatcmpl");
    let mut headers = AnswerHeaders::new(&app, &request, ignored);
    let running = drive::begin(&app, request).await?;
    headers.learn(&running);
    let response = match streaming.is_on {
        true => {
            let chunks = ChatChunks::new(head, style, running.prompt_tokens());
            sse::response(running, chunks)
        }
        false => {
            let collected = collect::all(running).await?;
            Json(completion(&head, &style, &collected)).into_response()
        }
    };
    Ok(headers.on(response))
}

/// Encoding of a chat completion.
struct ChatStyle {
    num_choices: usize,
    logprobs: bool,
    streaming: Streaming,
    shows_reasoning: bool,
    /// Calls are told in OpenAI's older form.
    has_functions: bool,
}

impl ChatStyle {
    fn finish_reason(&self, choice: &FinishedChoice) -> &'static str {
        match choice.finish_reason() {
            "tool_calls" if self.has_functions => "function_call",
            reason => reason,
        }
    }
}

/// The whole answer.
fn completion(head: &Head, style: &ChatStyle, collected: &collect::Collected) -> Value {
    let choice = |(index, choice): (usize, &FinishedChoice)| {
        json!({
            "index": index,
            "message": message_json(&choice.answer, style.shows_reasoning, style.has_functions),
            "logprobs": style.logprobs.then(|| head.chat_logprobs(&choice.answer.content_tokens)),
            "finish_reason": style.finish_reason(choice),
        })
    };
    let choices = collected.choices.iter().enumerate().map(choice).collect();
    let mut object = head.object("chat.completion", choices);
    object.insert("usage".to_owned(), reply::usage(&collected.totals));
    object.insert("timings".to_owned(), reply::timings(&collected.totals));
    let first = collected.choices.first().and_then(|choice| choice.placed.as_ref());
    object.extend(first.map(reply::placed));
    Value::Object(object)
}

/// Writes the chunks of a stream.
struct ChatChunks {
    head: Head,
    style: ChatStyle,
    usage: RunningUsage,
}

impl ChatChunks {
    fn new(head: Head, style: ChatStyle, prompt_tokens: usize) -> Self {
        let usage = RunningUsage::new(style.streaming, prompt_tokens);
        Self { usage, head, style }
    }

    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = self.head.object("chat.completion.chunk", choices);
        self.usage.write(&mut chunk);
        chunk
    }

    fn delta(
        &self,
        choice: usize,
        delta: Value,
        logprobs: Value,
        finish: Option<&str>,
    ) -> Map<String, Value> {
        self.chunk(vec![json!({
            "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        })])
    }
}

impl StreamFormat for ChatChunks {
    fn opening(&mut self) -> Vec<Value> {
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (0..self.style.num_choices)
            .map(|choice| Value::Object(self.delta(choice, role.clone(), Value::Null, None)))
            .collect()
    }

    fn prompt(&mut self, total: usize) {
        self.usage.prompt(total);
    }

    fn count(&mut self, num_tokens: usize) {
        self.usage.count(num_tokens);
    }

    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        let mut content = Some(tokens).filter(|tokens| self.style.logprobs && !tokens.is_empty());
        let mut chunks = Vec::new();
        for delta in deltas {
            let is_shown = self.style.shows_reasoning || !matches!(delta, Delta::Reasoning(_));
            let Some(json) = delta_json(&delta, self.style.has_functions).filter(|_| is_shown) else {
                continue;
            };
            let tokens = if matches!(delta, Delta::Content(_)) { content.take() } else { None };
            let logprobs = tokens.map(|tokens| self.head.chat_logprobs(&tokens));
            chunks.push(Value::Object(self.delta(choice, json, logprobs.into(), None)));
        }
        chunks
    }

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let mut chunk = self.delta(choice, json!({}), Value::Null, Some(self.style.finish_reason(finished)));
        chunk.insert("timings".to_owned(), reply::choice_timings(&finished.answer));
        chunk.extend(finished.placed.as_ref().map(reply::placed));
        vec![Value::Object(chunk)]
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        if !self.style.streaming.includes_usage {
            return Vec::new();
        }
        let mut chunk = self.chunk(Vec::new());
        chunk.insert("usage".to_owned(), reply::usage(totals));
        vec![Value::Object(chunk)]
    }
}

/// A call's end is not on the wire: the next call or the finish reason tells it.
fn delta_json(delta: &Delta, has_functions: bool) -> Option<Value> {
    Some(match delta {
        Delta::Call { index: 0, name, .. } if has_functions => {
            json!({"function_call": {"name": name, "arguments": ""}})
        }
        Delta::Arguments { index: 0, fragment } if has_functions => {
            json!({"function_call": {"arguments": fragment}})
        }
        Delta::Call { .. } | Delta::Arguments { .. } if has_functions => return None,
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
