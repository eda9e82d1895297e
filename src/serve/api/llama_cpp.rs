//! llama.cpp's native routes: `POST /completion`, `GET /slots` and `/lora-adapters`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body::PostedBody;
use super::collect::Collected;
use super::generate::{FinishedChoice, Running};
use super::infill::InfillFormat;
use super::reply::Head;
use super::request;
use super::sse::{self, WireFormat};
use crate::App;
use crate::error::ApiError;
use llmctl_engine::Token;
use llmctl_engine::turn::Delta;
use llmctl_models::adapters::AdapterSpec;

/// Goes on with a text, or with several.
pub async fn completion(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let read = posted.read(&app, request::native).await?;
    let request::NativeBody { request, wanted, returns_tokens, is_list } = read;
    let has_probs = request.turn.logprobs.is_some();
    let format = |_: &mut Running| NativeFormat {
        infill: InfillFormat { model: app.model().id.clone(), wanted },
        head: Head::new(&app, "native"),
        has_probs,
        returns_tokens,
        is_list,
        tokens: Vec::new(),
    };
    sse::answer(&app, request, format).await
}

/// Returns the requests that may run together, in llama.cpp's form. No conversation belongs to one.
pub async fn slots(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let engine = app.engine()?;
    let (spec, num_running) = (engine.spec(), engine.last_load().num_running);
    let slot = |id: usize| {
        json!({
            "id": id, "n_ctx": spec.context_length(), "speculative": false, "is_processing": id < num_running,
        })
    };
    Ok(Json((0..spec.config.max_running).map(slot).collect()))
}

/// Returns the adapters of the model, with the scales of requests that name none.
pub async fn adapters(State(app): State<App>) -> Result<Json<Value>, ApiError> {
    let engine = app.engine()?;
    let adapters = engine.spec().model.adapters.iter().enumerate();
    let adapter =
        |(id, spec): (usize, &AdapterSpec)| json!({"id": id, "path": spec.name, "scale": spec.scale});
    Ok(Json(adapters.map(adapter).collect()))
}

/// Returns the adapters of a server of several models: none.
pub async fn no_adapters() -> Json<Value> {
    Json(json!([]))
}

/// Refuses to change the scales of adapters: answers would depend on what other clients have set.
pub async fn change_adapters() -> ApiError {
    let message = "lora: scales are set when the server starts (serve --lora FILE=SCALE) and by each request (\"lora\": [{\"id\": 0, \"scale\": 1}])";
    ApiError::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).param("lora")
}

/// Writes texts as they come, and last the facts about them.
struct NativeFormat {
    infill: InfillFormat,
    head: Head,
    /// Log-probabilities are told.
    has_probs: bool,
    returns_tokens: bool,
    /// Several prompts have a list of answers.
    is_list: bool,
    /// Of each text, the tokens that wait for a chunk.
    tokens: Vec<Vec<Token>>,
}

impl NativeFormat {
    /// Adds what is told of tokens to an object.
    fn add_tokens(&self, object: &mut Map<String, Value>, tokens: &[Token]) {
        if self.returns_tokens {
            object.insert("tokens".to_owned(), tokens.iter().map(|token| token.id).collect());
        }
        if !self.has_probs {
            return;
        }
        let mut probs = self.head.chat_logprobs(tokens)["content"].take();
        for (entry, token) in probs.as_array_mut().into_iter().flatten().zip(tokens) {
            entry["id"] = token.id.into();
            let tops = token.logprob.iter().flat_map(|logprob| &logprob.top);
            for (top, (id, _)) in entry["top_logprobs"].as_array_mut().into_iter().flatten().zip(tops) {
                top["id"] = (*id).into();
            }
        }
        object.insert("completion_probabilities".to_owned(), probs);
    }

    /// Returns the last object of a text, `content` of which is not told yet.
    fn end(&self, index: usize, finished: &FinishedChoice, content: &str, tokens: &[Token]) -> Value {
        let mut members = self.infill.end(finished);
        members.insert("index".to_owned(), index.into());
        members.insert("content".to_owned(), content.into());
        self.add_tokens(&mut members, tokens);
        self.infill.wanted(members)
    }
}

impl WireFormat for NativeFormat {
    const ENDS_WITH_DONE: bool = false;

    fn whole(self, collected: &Collected) -> Result<Value, ApiError> {
        let whole = |(index, choice): (usize, &FinishedChoice)| {
            self.end(index, choice, &choice.answer.content, &choice.answer.tokens)
        };
        let mut all: Vec<Value> = collected.choices.iter().enumerate().map(whole).collect();
        Ok(if self.is_list { all.into() } else { all.pop().unwrap_or_default() })
    }

    fn deltas(&mut self, choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        if self.tokens.len() <= choice {
            self.tokens.resize_with(choice + 1, Vec::new);
        }
        self.tokens[choice].extend(tokens);
        let mut chunks = Vec::new();
        for delta in deltas {
            let Delta::Content(text) = delta else { continue }; // a text without a template has no other parts
            let mut chunk = Map::from_iter([
                ("index".to_owned(), choice.into()),
                ("content".to_owned(), text.into()),
                ("stop".to_owned(), false.into()),
            ]);
            let tokens = std::mem::take(&mut self.tokens[choice]);
            self.add_tokens(&mut chunk, &tokens);
            chunks.push(chunk.into());
        }
        chunks
    }

    fn finished(&mut self, choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        let rest = self.tokens.get_mut(choice).map(std::mem::take).unwrap_or_default();
        vec![self.end(choice, finished, "", &rest)]
    }
}
