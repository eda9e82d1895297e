//! `POST /v1/completions`: texts that are gone on with as they are, without a chat template.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body::{Incoming, JsonBody};
use super::collect::{self, Collected};
use super::generate::{FinishedChoice, Sent, Totals};
use super::reply::{self, AnswerHeaders, Echoed, Head, RunningUsage};
use super::request::{self, Streaming};
use super::sse::{self, StreamFormat};
use super::{blocking, drive};
use crate::App;
use crate::error::ApiError;
use llmctl_engine::turn::Delta;
use llmctl_engine::{Logprob, Token};

const OBJECT: &str = "text_completion";

pub async fn post(
    State(app): State<App>,
    incoming: Incoming,
    JsonBody(body): JsonBody,
) -> Result<Response, ApiError> {
    let asked = blocking(&app, move |app| request::completion(app, body, incoming)).await?;
    let request::Completion { request, streaming, echo, returns_token_ids, ignored } = asked;
    let (num_choices, logprobs) = (request.num_choices, request.turn.logprobs.is_some());
    let scores_prompt = request.turn.prompt_logprobs.is_some();
    let head = Head::new(&app, "cmpl");
    let headers = AnswerHeaders::new(&app, &request, ignored);
    let mut running = drive::begin(&app, request).await?;
    let usage = RunningUsage::new(streaming, running.prompt_tokens());
    let prompts = std::mem::take(&mut running.prompts);
    // The choices of one prompt stand together.
    let echoed = prompts.into_iter().flat_map(|Sent { text, tokens, .. }| {
        let prompt_ids = if returns_token_ids { tokens.clone() } else { Vec::new() };
        let echoed = if echo { Echoed { text, ids: tokens, scores: Vec::new() } } else { Echoed::default() };
        std::iter::repeat_n((echoed, prompt_ids), num_choices)
    });
    let (echoed, prompt_ids): (Vec<Echoed>, Vec<Vec<u32>>) = echoed.unzip();
    let scores_prompt = logprobs && scores_prompt;
    let style = CompletionStyle { logprobs, scores_prompt, returns_token_ids, streaming };
    if !streaming.is_on {
        let collected = collect::all(running).await?;
        let whole = Json(completion(&head, style, (echoed, prompt_ids), &collected));
        return Ok(headers.on(whole));
    }
    let held = prompt_ids.into_iter().map(HeldTokens::of_prompt).collect();
    let chunks = TextChunks { head, style, usage, echoed: echoed.into_iter().map(Some).collect(), held };
    Ok(headers.on(sse::response(running, chunks)))
}

/// Encoding of a text completion.
#[derive(Clone, Copy)]
struct CompletionStyle {
    logprobs: bool,
    /// Also those of the prompt.
    scores_prompt: bool,
    returns_token_ids: bool,
    streaming: Streaming,
}

fn completion(
    head: &Head,
    style: CompletionStyle,
    (echoed, prompt_ids): (Vec<Echoed>, Vec<Vec<u32>>),
    collected: &Collected,
) -> Value {
    let scores = collected.scores.iter().cloned();
    let echoed = echoed.into_iter().zip(scores).map(|(echoed, scores)| Echoed { scores, ..echoed });
    let choice = |(index, (choice, echoed)): (usize, (&FinishedChoice, Echoed))| {
        let tokens = &choice.answer.tokens;
        let mut offset = if style.scores_prompt { 0 } else { echoed.text.chars().count() };
        let told = Some(&echoed).filter(|_| style.scores_prompt);
        let mut choice_json = json!({
            "index": index,
            "text": format!("{}{}", echoed.text, choice.answer.content),
            "logprobs": style.logprobs.then(|| head.completion_logprobs(told, tokens, &mut offset)),
            "finish_reason": choice.finish_reason(),
        });
        if style.returns_token_ids {
            choice_json["token_ids"] = choice.answer.ids().into();
            choice_json["prompt_token_ids"] = prompt_ids[index].clone().into();
        }
        choice_json
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
    style: CompletionStyle,
    usage: RunningUsage,
    /// Beginning of each choice's text, until it is sent.
    echoed: Vec<Option<Echoed>>,
    held: Vec<HeldTokens>,
}

/// Tokens whose log-probabilities or ids wait for a chunk.
struct HeldTokens {
    tokens: Vec<Token>,
    /// Ids of the prompt, until they are sent.
    prompt_ids: Vec<u32>,
    /// Characters of the text before them.
    offset: usize,
}

impl HeldTokens {
    fn of_prompt(prompt_ids: Vec<u32>) -> Self {
        Self { tokens: Vec::new(), prompt_ids, offset: 0 }
    }
}

impl TextChunks {
    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = self.head.object(OBJECT, choices);
        self.usage.write(&mut chunk);
        chunk
    }

    fn text(&mut self, choice: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let HeldTokens { tokens, prompt_ids, offset } = &mut self.held[choice];
        let (tokens, prompt_ids) = (std::mem::take(tokens), std::mem::take(prompt_ids));
        let has_scores = self.style.logprobs && !tokens.is_empty();
        let logprobs = has_scores.then(|| self.head.completion_logprobs(None, &tokens, offset));
        let mut choice = json!({
            "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish,
        });
        if self.style.returns_token_ids {
            choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
            choice["prompt_token_ids"] = Some(prompt_ids).filter(|ids| !ids.is_empty()).into();
        }
        self.chunk(vec![choice])
    }

    /// The prompt, unless it has been told; with what was asked about its tokens.
    fn echo(&mut self, choice: usize) -> Option<Value> {
        let echoed = self.echoed[choice].take().filter(|echoed| !echoed.ids.is_empty())?;
        let offset = &mut self.held[choice].offset;
        let scored = self.style.scores_prompt;
        let logprobs = scored.then(|| self.head.completion_logprobs(Some(&echoed), &[], offset));
        *offset = echoed.text.chars().count();
        Some(Value::Object(self.chunk(vec![json!({
            "index": choice, "text": echoed.text, "logprobs": logprobs, "finish_reason": null,
        })])))
    }
}

impl StreamFormat for TextChunks {
    fn opening(&mut self) -> Vec<Value> {
        if self.style.scores_prompt {
            return Vec::new(); // what is asked about the prompt is not known yet
        }
        (0..self.echoed.len()).filter_map(|choice| self.echo(choice)).collect()
    }

    fn scored(&mut self, choice: usize, logprobs: Vec<Logprob>) {
        if let Some(echoed) = &mut self.echoed[choice] {
            echoed.scores.extend(logprobs);
        }
    }

    fn count(&mut self, num_tokens: usize) {
        self.usage.count(num_tokens);
    }

    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        if self.style.logprobs || self.style.returns_token_ids {
            self.held[choice].tokens.extend(tokens);
        }
        let echo = self.echo(choice);
        let chunk = |delta: &Delta| match delta {
            Delta::Content(text) => Some(Value::Object(self.text(choice, text, None))),
            _ => None, // a text without a template has no other parts
        };
        let mut chunks: Vec<Value> = deltas.iter().filter_map(chunk).collect();
        // A token without text is sent too where ids are asked for.
        if self.style.returns_token_ids && !self.held[choice].tokens.is_empty() {
            chunks.push(Value::Object(self.text(choice, "", None)));
        }
        echo.into_iter().chain(chunks).collect()
    }

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let echo = self.echo(choice);
        let mut chunk = self.text(choice, "", Some(finished.finish_reason()));
        chunk.insert("timings".to_owned(), reply::choice_timings(&finished.answer));
        echo.into_iter().chain([Value::Object(chunk)]).collect()
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
