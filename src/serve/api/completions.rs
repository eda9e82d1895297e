//! `POST /v1/completions`: texts that are gone on with as they are, without a chat template.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body::PostedBody;
use super::collect::Collected;
use super::generate::{FinishedChoice, Running, Sent, Totals};
use super::reply::{self, Echoed, Head, RunningUsage};
use super::request::{self, Completion};
use super::sse::{self, WireFormat};
use crate::App;
use crate::error::ApiError;
use llmctl_engine::turn::Delta;
use llmctl_engine::{Logprob, Token};

const OBJECT: &str = "text_completion";

pub async fn post(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let asked = posted.read(&app, request::completion).await?;
    let Completion { request, streaming, echo, returns_token_ids } = asked;
    let (num_choices, logprobs) = (request.num_choices, request.turn.logprobs.is_some());
    let scores_prompt = logprobs && request.turn.prompt_logprobs.is_some();
    let head = Head::new(&app, "cmpl");
    // The choices of one prompt stand together.
    let begin = |Sent { text, tokens, .. }: Sent| {
        let prompt_ids = if returns_token_ids { tokens.clone() } else { Vec::new() };
        let echoed = echo.then(|| Echoed { text, ids: tokens, scores: Vec::new() });
        std::iter::repeat_n(BegunText { echoed, prompt_ids, tokens: Vec::new(), offset: 0 }, num_choices)
    };
    let format = |running: &mut Running| {
        let usage = RunningUsage::new(streaming, running.prompt_tokens());
        let begun = std::mem::take(&mut running.prompts).into_iter().flat_map(begin).collect();
        TextFormat { head, logprobs, scores_prompt, returns_token_ids, usage, begun }
    };
    sse::answer(&app, request, format).await
}

/// Encoding of a text completion.
struct TextFormat {
    head: Head,
    logprobs: bool,
    /// Also those of the prompt.
    scores_prompt: bool,
    returns_token_ids: bool,
    usage: RunningUsage,
    /// Of each choice.
    begun: Vec<BegunText>,
}

/// The beginning of a choice's text, and what waits for a chunk.
#[derive(Clone)]
struct BegunText {
    /// The prompt, until it is sent; `None` if it is not told.
    echoed: Option<Echoed>,
    /// Ids of the prompt, until they are sent.
    prompt_ids: Vec<u32>,
    /// Tokens whose log-probabilities or ids wait.
    tokens: Vec<Token>,
    /// Characters of the text before them.
    offset: usize,
}

impl TextFormat {
    fn chunk(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut chunk = self.head.object(OBJECT, choices);
        self.usage.write(&mut chunk);
        chunk
    }

    fn text(&mut self, choice: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let BegunText { tokens, prompt_ids, offset, .. } = &mut self.begun[choice];
        let (tokens, prompt_ids) = (std::mem::take(tokens), std::mem::take(prompt_ids));
        let has_scores = self.logprobs && !tokens.is_empty();
        let logprobs = has_scores.then(|| self.head.completion_logprobs(None, &tokens, offset));
        let mut choice = json!({
            "index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish,
        });
        if self.returns_token_ids {
            choice["token_ids"] = tokens.iter().map(|token| token.id).collect();
            choice["prompt_token_ids"] = Some(prompt_ids).filter(|ids| !ids.is_empty()).into();
        }
        self.chunk(vec![choice])
    }

    /// The prompt, unless it has been told; with what was asked about its tokens.
    fn echo(&mut self, choice: usize) -> Option<Value> {
        let BegunText { echoed, offset, .. } = &mut self.begun[choice];
        let echoed = echoed.take().filter(|echoed| !echoed.ids.is_empty())?;
        let scored = self.scores_prompt;
        let logprobs = scored.then(|| self.head.completion_logprobs(Some(&echoed), &[], offset));
        *offset = echoed.text.chars().count();
        let chunk = self.chunk(vec![json!({
            "index": choice, "text": echoed.text, "logprobs": logprobs, "finish_reason": null,
        })]);
        Some(chunk.into())
    }
}

impl WireFormat for TextFormat {
    fn whole(mut self, collected: &Collected) -> Result<Value, ApiError> {
        let begun = std::mem::take(&mut self.begun).into_iter().zip(&collected.scores);
        let choice = |(index, (choice, (begun, scores))): (
            usize,
            (&FinishedChoice, (BegunText, &Vec<_>)),
        )| {
            let echoed = Echoed { scores: scores.clone(), ..begun.echoed.unwrap_or_default() };
            let mut offset = if self.scores_prompt { 0 } else { echoed.text.chars().count() };
            let told = Some(&echoed).filter(|_| self.scores_prompt);
            let tokens = &choice.answer.tokens;
            let mut choice_json = json!({
                "index": index,
                "text": format!("{}{}", echoed.text, choice.answer.content),
                "logprobs": self.logprobs.then(|| self.head.completion_logprobs(told, tokens, &mut offset)),
                "finish_reason": choice.finish_reason(),
            });
            if self.returns_token_ids {
                choice_json["token_ids"] = choice.answer.ids().into();
                choice_json["prompt_token_ids"] = begun.prompt_ids.into();
            }
            choice_json
        };
        let choices = collected.choices.iter().zip(begun).enumerate().map(choice).collect();
        Ok(self.head.whole(OBJECT, choices, &collected.totals).into())
    }

    fn opening(&mut self) -> Vec<Value> {
        if self.scores_prompt {
            return Vec::new(); // what is asked about the prompt is not known yet
        }
        (0..self.begun.len()).filter_map(|choice| self.echo(choice)).collect()
    }

    fn scored(&mut self, choice: usize, logprobs: Vec<Logprob>) {
        if let Some(echoed) = &mut self.begun[choice].echoed {
            echoed.scores.extend(logprobs);
        }
    }

    fn usage(&mut self) -> Option<&mut RunningUsage> {
        Some(&mut self.usage)
    }

    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        if self.logprobs || self.returns_token_ids {
            self.begun[choice].tokens.extend(tokens);
        }
        let echo = self.echo(choice);
        let chunk = |delta: &Delta| match delta {
            Delta::Content(text) => Some(self.text(choice, text, None).into()),
            _ => None, // a text without a template has no other parts
        };
        let mut chunks: Vec<Value> = deltas.iter().filter_map(chunk).collect();
        // A token without text is sent too where ids are asked for.
        if self.returns_token_ids && !self.begun[choice].tokens.is_empty() {
            chunks.push(self.text(choice, "", None).into());
        }
        echo.into_iter().chain(chunks).collect()
    }

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let echo = self.echo(choice);
        let mut chunk = self.text(choice, "", Some(finished.finish_reason()));
        chunk.insert("timings".to_owned(), reply::choice_timings(&finished.answer));
        echo.into_iter().chain([chunk.into()]).collect()
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        self.usage.ending(self.chunk(Vec::new()), totals)
    }
}
