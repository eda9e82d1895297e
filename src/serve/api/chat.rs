//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body::PostedBody;
use super::collect::Collected;
use super::generate::{FinishedChoice, Running, Totals};
use super::reply::{self, Head, RunningUsage};
use super::request::{self, ChatBody};
use super::sse::{self, WireFormat};
use crate::App;
use crate::error::ApiError;
use crate::wire::answer::message_json;
use llmctl_engine::Token;
use llmctl_engine::turn::Delta;

pub async fn post(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let asked = posted.read(&app, request::chat).await?;
    let ChatBody { request, streaming, shows_reasoning, has_functions } = asked;
    let (num_choices, logprobs) = (request.num_choices, request.turn.logprobs.is_some());
    let head = Head::new(&app, "chatcmpl");
    let format = |running: &mut Running| {
        let usage = RunningUsage::new(streaming, running.prompt_tokens());
        ChatFormat { head, num_choices, logprobs, shows_reasoning, has_functions, usage }
    };
    sse::answer(&app, request, format).await
}

/// Encoding of a chat completion.
struct ChatFormat {
    head: Head,
    num_choices: usize,
    logprobs: bool,
    shows_reasoning: bool,
    /// Calls are told in OpenAI's older form.
    has_functions: bool,
    usage: RunningUsage,
}

impl ChatFormat {
    fn finish_reason(&self, choice: &FinishedChoice) -> &'static str {
        match choice.finish_reason() {
            "tool_calls" if self.has_functions => "function_call",
            reason => reason,
        }
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

impl WireFormat for ChatFormat {
    fn whole(self, collected: &Collected) -> Result<Value, ApiError> {
        let choice = |(index, choice): (usize, &FinishedChoice)| {
            json!({
                "index": index,
                "message": message_json(&choice.answer, self.shows_reasoning, self.has_functions),
                "logprobs": self.logprobs.then(|| self.head.chat_logprobs(&choice.answer.content_tokens)),
                "finish_reason": self.finish_reason(choice),
            })
        };
        let choices = collected.choices.iter().enumerate().map(choice).collect();
        let mut object = self.head.whole("chat.completion", choices, &collected.totals);
        let first = collected.choices.first().and_then(|choice| choice.placed.as_ref());
        object.extend(first.map(reply::placed));
        Ok(object.into())
    }

    fn opening(&mut self) -> Vec<Value> {
        let role = json!({"role": "assistant", "content": "", "refusal": null});
        (0..self.num_choices)
            .map(|choice| self.delta(choice, role.clone(), Value::Null, None).into())
            .collect()
    }

    fn usage(&mut self) -> Option<&mut RunningUsage> {
        Some(&mut self.usage)
    }

    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        let mut content = Some(tokens).filter(|tokens| self.logprobs && !tokens.is_empty());
        let mut chunks = Vec::new();
        for delta in deltas {
            let is_shown = self.shows_reasoning || !matches!(delta, Delta::Reasoning(_));
            let Some(json) = delta_json(&delta, self.has_functions).filter(|_| is_shown) else {
                continue;
            };
            let tokens = if matches!(delta, Delta::Content(_)) { content.take() } else { None };
            let logprobs = tokens.map(|tokens| self.head.chat_logprobs(&tokens));
            chunks.push(self.delta(choice, json, logprobs.into(), None).into());
        }
        chunks
    }

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let mut chunk = self.delta(choice, json!({}), Value::Null, Some(self.finish_reason(finished)));
        chunk.insert("timings".to_owned(), reply::choice_timings(&finished.answer));
        chunk.extend(finished.placed.as_ref().map(reply::placed));
        vec![chunk.into()]
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        self.usage.ending(self.chunk(Vec::new()), totals)
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
