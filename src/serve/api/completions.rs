//! `POST /v1/completions`: texts that are gone on with as they are, without a chat template.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::body::JsonBody;
use super::collect::{self, Collected};
use super::drive;
use super::reply::{self, Head};
use super::request;
use super::sse::{self, Chunks};
use super::turn::{Answered, Delta, Totals};
use crate::runtime::Token;
use crate::serve::App;
use crate::serve::access::RequestId;
use crate::serve::error::ApiError;
use crate::serve::owner::Caller;

const OBJECT: &str = "text_completion";

pub async fn post(
    State(app): State<App>,
    headers: HeaderMap,
    caller: Caller,
    RequestId(request_id): RequestId,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let request::Completion { ask, streaming, echo } =
        request::completion(&app, body, &headers, &caller, request_id)?;
    let (num_choices, logprobs) = (ask.num_choices, ask.logprobs.is_some());
    let head = Head::new(&app, "cmpl");
    let mut running = drive::begin(&app, ask).await?;
    // The choices of one prompt stand together.
    let prompts = std::mem::take(&mut running.prompts);
    let echoed = prompts
        .into_iter()
        .flat_map(|prompt| std::iter::repeat_n(if echo { prompt } else { String::new() }, num_choices));
    let echoed: Vec<String> = echoed.collect();
    if !streaming.is_on {
        let collected = collect::all(running).await?;
        return Ok(Json(completion(&head, logprobs, &echoed, &collected)).into_response());
    }
    let held = echoed.iter().map(|text| Held { tokens: Vec::new(), offset: text.chars().count() }).collect();
    let include_usage = streaming.includes_usage;
    Ok(sse::response(running, TextChunks { head, logprobs, include_usage, echoed, held }))
}

fn completion(head: &Head, logprobs: bool, echoed: &[String], collected: &Collected) -> Value {
    let choice = |(index, ((answer, tokens), echoed)): (usize, (&(Answered, Vec<Token>), &String))| {
        let mut offset = echoed.chars().count();
        json!({
            "index": index,
            "text": format!("{echoed}{}", answer.said.content),
            "logprobs": logprobs.then(|| head.completion_logprobs(tokens, &mut offset)),
            "finish_reason": answer.finish_reason(),
        })
    };
    let choices = collected.choices.iter().zip(echoed).enumerate().map(choice).collect();
    let mut object = head.object(OBJECT, choices);
    object.insert("usage".to_owned(), reply::usage(&collected.totals));
    object.insert("timings".to_owned(), reply::timings(&collected.totals));
    Value::Object(object)
}

/// The texts as they come.
struct TextChunks {
    head: Head,
    logprobs: bool,
    include_usage: bool,
    /// What each choice's text begins with.
    echoed: Vec<String>,
    held: Vec<Held>,
}

/// Tokens whose log-probabilities wait for a chunk.
struct Held {
    tokens: Vec<Token>,
    /// Characters of the text before them.
    offset: usize,
}

impl TextChunks {
    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = self.head.object(OBJECT, choices);
        if self.include_usage {
            chunk.insert("usage".to_owned(), Value::Null);
        }
        chunk
    }

    fn text(&mut self, choice: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let Held { tokens, offset } = &mut self.held[choice];
        let tokens = std::mem::take(tokens);
        let logprobs = (!tokens.is_empty()).then(|| self.head.completion_logprobs(&tokens, offset));
        self.chunk(vec![json!({
            "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish,
        })])
    }
}

impl Chunks for TextChunks {
    fn opening(&mut self) -> Vec<Value> {
        let echoed = std::mem::take(&mut self.echoed);
        let said = echoed.iter().enumerate().filter(|(_, text)| !text.is_empty());
        said.map(|(choice, text)| Value::Object(self.text(choice, text, None))).collect()
    }

    fn said(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        if self.logprobs {
            self.held[choice].tokens.extend(tokens);
        }
        let chunk = |delta: &Delta| match delta {
            Delta::Content(text) => Some(Value::Object(self.text(choice, text, None))),
            _ => None, // a text without a template has no other parts
        };
        deltas.iter().filter_map(chunk).collect()
    }

    fn finished(&mut self, choice: usize, answer: &Answered) -> Vec<Value> {
        let mut chunk = self.text(choice, "", Some(answer.finish_reason()));
        chunk.insert("timings".to_owned(), reply::choice_timings(answer));
        vec![Value::Object(chunk)]
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut chunk = self.chunk(Vec::new());
        chunk.insert("usage".to_owned(), reply::usage(totals));
        vec![Value::Object(chunk)]
    }
}
