//! `POST /infill`, in llama.cpp's form: the text between a prefix and a suffix, for editors that complete
//! code.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body::PostedBody;
use super::collect::Collected;
use super::generate::FinishedChoice;
use super::request;
use super::sse::{self, WireFormat};
use crate::App;
use crate::error::ApiError;
use crate::wire::json::members;
use llmctl_engine::turn::Delta;
use llmctl_engine::{Finish, Outcome, Token};

pub async fn post(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let request::InfillBody { request, wanted } = posted.read(&app, request::infill).await?;
    sse::answer(&app, request, |_| InfillFormat { model: app.model().id.clone(), wanted }).await
}

/// Writes the text as it comes, and last the facts about it.
pub struct InfillFormat {
    pub model: String,
    /// The members of the last object that the client wants; empty for all.
    pub wanted: Vec<String>,
}

impl InfillFormat {
    /// Returns the members behind the text: why it ended, counts and times.
    pub fn end(&self, finished: &FinishedChoice) -> Map<String, Value> {
        let Outcome { finish, usage, .. } = &finished.answer.outcome;
        let (stop_type, word) = match finish {
            Finish::StopString(word) => ("word", word.as_str()),
            Finish::Eos(_) | Finish::Complete => ("eos", ""),
            _ => ("limit", ""),
        };
        members(json!({
            "index": 0,
            "content": "",
            "model": self.model,
            "stop": true,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": false,
            "timings": timings(&finished.answer.outcome),
        }))
    }

    /// Leaves the members that the client wants. `timings/prompt_n` is a member of a member.
    pub fn wanted(&self, members: Map<String, Value>) -> Value {
        if self.wanted.is_empty() {
            return members.into();
        }
        let members = Value::Object(members);
        let find = |path: &String| {
            let value = members.pointer(&format!("/{path}"))?;
            Some((path.clone(), value.clone()))
        };
        self.wanted.iter().filter_map(find).collect::<Map<_, _>>().into()
    }
}

/// Returns llama.cpp's counts and times.
fn timings(outcome: &Outcome) -> Value {
    let Outcome { usage, timings, .. } = outcome;
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    let num_computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
    json!({
        "prompt_n": num_computed,
        "prompt_ms": ms(timings.prefill),
        "prompt_per_token_ms": ms(timings.prefill) / num_computed as f64,
        "prompt_per_second": timings.prefill_rate(usage),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": ms(timings.decode),
        "predicted_per_token_ms": ms(timings.decode) / usage.completion_tokens as f64,
        "predicted_per_second": timings.decode_rate(usage),
    })
}

impl WireFormat for InfillFormat {
    const ENDS_WITH_DONE: bool = false;

    fn whole(self, collected: &Collected) -> Result<Value, ApiError> {
        Ok(collected.choices.first().map_or(Value::Null, |choice| {
            let mut members = self.end(choice);
            members.insert("content".to_owned(), choice.answer.content.as_str().into());
            self.wanted(members)
        }))
    }

    fn deltas(&mut self, _choice: usize, deltas: Vec<Delta>, _tokens: Vec<Token>) -> Vec<Value> {
        let chunk = |delta: Delta| match delta {
            Delta::Content(text) => Some(json!({"index": 0, "content": text, "stop": false})),
            _ => None, // a text without a template has no other parts
        };
        deltas.into_iter().filter_map(chunk).collect()
    }

    fn finished(&mut self, _choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        vec![self.wanted(self.end(finished))]
    }
}
