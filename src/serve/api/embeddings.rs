//! `POST /v1/embeddings` in OpenAI's form, and `POST /v1/rerank` in Jina's and Cohere's, under the paths of llama.cpp and vLLM.
//!
//! Texts are encoded and results collected on a blocking thread; a client that leaves cancels what is not computed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::blocking;
use super::body::JsonBody;
use super::reply::Ignored;
use super::request::{model_not_found, token_ids};
use crate::runtime::embed::{EmbedClient, EmbedInput, EmbedKind, EmbedOutput, EmbedTexts, LongText};
use crate::serve::App;
use crate::serve::ServedEmbedder;
use crate::serve::error::ApiError;
use crate::serve::wire::{Fields, Problems};

/// A text to embed.
enum EmbeddingInput {
    Text(String),
    Ids(Vec<u32>),
}

/// A request for vectors.
pub struct EmbeddingBody {
    inputs: Vec<EmbeddingInput>,
    dimensions: Option<usize>,
    in_base64: bool,
    prompt_name: Option<String>,
    long: LongText,
}

/// A request for scores.
pub struct RerankBody {
    query: String,
    documents: Vec<String>,
    instruction: Option<String>,
    top_n: Option<usize>,
    returns_documents: bool,
    long: LongText,
}

/// Tells the work of a request that its client has left.
struct LeftGuard(Arc<AtomicBool>);

impl Drop for LeftGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub async fn embeddings(
    State(app): State<App>,
    JsonBody(body): JsonBody,
) -> Result<(Ignored, Json<Value>), ApiError> {
    let (ignored, body) = read(&app, body, embedding_body).await?;
    let num_bytes = body.inputs.iter().map(EmbeddingInput::num_bytes).sum();
    let place = app.preparing().enter(num_bytes).await?;
    let guard = LeftGuard(Arc::default());
    let has_left = Arc::clone(&guard.0);
    let response = blocking(&app, move |app| {
        let served = vectors_of(app)?;
        let EmbeddingBody { inputs, dimensions, in_base64, prompt_name, long } = body;
        let texts = served.client.texts();
        check_dimensions(texts, dimensions)?;
        let prompt = texts.prompt(prompt_name.as_deref())?;
        let encode = |(index, input): (usize, EmbeddingInput)| {
            let encoded = match input {
                EmbeddingInput::Text(text) => texts.encode(prompt, &text, long),
                EmbeddingInput::Ids(ids) => texts.ids(ids, long),
            };
            encoded.map_err(|error| at(error, format!("input[{index}]")))
        };
        let inputs: Vec<EmbedInput> = inputs.into_iter().enumerate().map(encode).collect::<Result<_, _>>()?;
        drop(place);
        let num_tokens: usize = inputs.iter().map(EmbedInput::num_tokens).sum();
        let outputs = compute(&served.client, inputs, dimensions, &has_left)?;
        let data: Vec<Value> = outputs.into_iter().enumerate().map(|(index, output)| {
            json!({"object": "embedding", "index": index, "embedding": vector(output, in_base64)})
        }).collect();
        let usage = json!({"prompt_tokens": num_tokens, "total_tokens": num_tokens});
        Ok(json!({"object": "list", "data": data, "model": served.id, "usage": usage}))
    });
    let response = response.await?;
    drop(guard);
    Ok((ignored, Json(response)))
}

pub async fn rerank(
    State(app): State<App>,
    JsonBody(body): JsonBody,
) -> Result<(Ignored, Json<Value>), ApiError> {
    let (ignored, body) = read(&app, body, rerank_body).await?;
    let documents: usize = body.documents.iter().map(String::len).sum();
    let place = app.preparing().enter(documents + body.query.len()).await?;
    let guard = LeftGuard(Arc::default());
    let has_left = Arc::clone(&guard.0);
    let response = blocking(&app, move |app| {
        let served = scores_of(app)?;
        let texts = served.client.texts();
        let encode = |(index, document): (usize, &String)| {
            let pair = texts.pair(body.instruction.as_deref(), &body.query, document, body.long);
            pair.map_err(|error| at(error, format!("documents[{index}]")))
        };
        let inputs: Vec<EmbedInput> =
            body.documents.iter().enumerate().map(encode).collect::<Result<_, _>>()?;
        drop(place);
        let num_tokens: usize = inputs.iter().map(EmbedInput::num_tokens).sum();
        let outputs = compute(&served.client, inputs, None, &has_left)?;
        let usage = json!({"prompt_tokens": num_tokens, "total_tokens": num_tokens});
        let id = format!("rerank-{}", Uuid::new_v4().simple());
        Ok(json!({"id": id, "model": served.id, "usage": usage, "results": results(&body, &outputs)}))
    });
    let response = response.await?;
    drop(guard);
    Ok((ignored, Json(response)))
}

/// Refuses what a server does whose model writes text.
pub async fn writes_no_text(State(app): State<App>) -> Response {
    let (what, instead) = match app.embedder().map(|served| served.client.texts().kind) {
        Some(EmbedKind::Scores) => ("scores pairs of texts", "/v1/rerank"),
        _ => ("computes embeddings", "/v1/embeddings"),
    };
    let message = format!("{:?} {what} and writes no text: POST {instead}", app.model().id);
    ApiError::unsupported("model", message).into_response()
}

impl EmbeddingInput {
    fn num_bytes(&self) -> usize {
        match self {
            EmbeddingInput::Text(text) => text.len(),
            EmbeddingInput::Ids(_) => 0,
        }
    }
}

/// Reads a body whose fields all mean something.
async fn read<T: Send + 'static>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&mut Fields<'_>) -> T + Send + 'static,
) -> Result<(Ignored, T), ApiError> {
    blocking(app, move |app| {
        let mut problems = Problems::new(app.settings().lenient);
        let mut fields = Fields::new(body, &mut problems);
        let model = match (fields.text("model"), app.embedder()) {
            (Some(name), Some(served)) if name != served.id && !app.is_alias(&name) => {
                Err(model_not_found(&name, &served.id))
            }
            _ => Ok(()),
        };
        let read = read(&mut fields);
        fields.hint("user");
        fields.end();
        problems.check(model)?;
        Ok((Ignored(problems.take_ignored()), read))
    })
    .await
}

/// Reads a request for vectors.
pub fn embedding_body(fields: &mut Fields<'_>) -> EmbeddingBody {
    let has_input = fields.has("input");
    let inputs = inputs(fields.take("input"));
    if !has_input {
        fields.wrong("input", "is missing");
    } else if inputs.as_ref().is_none_or(Vec::is_empty) {
        fields.wrong("input", "is neither a string, nor a list of strings or token ids that is not empty");
    }
    let format = fields.text("encoding_format");
    if format.as_deref().is_some_and(|format| !matches!(format, "float" | "base64")) {
        fields.unsupported("encoding_format", "is neither \"float\" nor \"base64\"");
    }
    let dimensions = fields.size("dimensions");
    if dimensions == Some(0) {
        fields.out_of_range("dimensions", "is 0");
    }
    EmbeddingBody {
        inputs: inputs.unwrap_or_default(),
        dimensions,
        in_base64: format.as_deref() == Some("base64"),
        prompt_name: fields.text("prompt_name"),
        long: long(fields),
    }
}

/// Whether long texts are cut; by default they are refused.
fn long(fields: &mut Fields<'_>) -> LongText {
    match fields.flag("truncate") {
        Some(true) => LongText::Cut,
        _ => LongText::Refuse,
    }
}

/// Reads a string, a list of strings, a list of ids, or a list of lists of ids.
fn inputs(value: Option<Value>) -> Option<Vec<EmbeddingInput>> {
    let items = match value? {
        Value::String(text) => return Some(vec![EmbeddingInput::Text(text)]),
        Value::Array(items) => items,
        _ => return None,
    };
    if items.first().is_some_and(Value::is_number) {
        return token_ids(&items).map(|ids| vec![EmbeddingInput::Ids(ids)]);
    }
    let input = |item: Value| match item {
        Value::String(text) => Some(EmbeddingInput::Text(text)),
        Value::Array(ids) => token_ids(&ids).map(EmbeddingInput::Ids),
        _ => None,
    };
    items.into_iter().map(input).collect()
}

/// Reads a request for scores.
pub fn rerank_body(fields: &mut Fields<'_>) -> RerankBody {
    let query = fields.text("query");
    if query.is_none() {
        fields.wrong("query", "is missing");
    }
    let given = fields.spelled(&["documents", "texts"]);
    let has_documents = fields.has(given);
    let text = |document: Value| match document {
        Value::String(text) => Some(text),
        Value::Object(mut members) => match members.remove("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        _ => None,
    };
    let documents: Option<Vec<String>> = match fields.list(given) {
        Some(documents) => documents.into_iter().map(text).collect(),
        None => None,
    };
    if !has_documents {
        fields.wrong(given, "is missing");
    } else if documents.as_ref().is_none_or(Vec::is_empty) {
        fields.wrong(given, "is no list of strings, or of objects with a text, that is not empty");
    }
    RerankBody {
        query: query.unwrap_or_default(),
        documents: documents.unwrap_or_default(),
        instruction: fields.text("instruction"),
        top_n: fields.size("top_n"),
        returns_documents: fields.flag("return_documents").unwrap_or(false),
        long: long(fields),
    }
}

fn vectors_of(app: &App) -> Result<&ServedEmbedder, ApiError> {
    let message = |name: &str, what: &str| {
        format!("{name:?} {what}: serve an embedding model with --model, or beside it with --embedding-model")
    };
    match app.embedder() {
        Some(served) if served.client.texts().kind == EmbedKind::Scores => Err(ApiError::unsupported(
            "model",
            message(&served.id, "scores pairs and computes no embeddings"),
        )),
        Some(served) => Ok(served),
        None => Err(no_embedder(message(&app.model().id, "computes no embeddings"))),
    }
}

fn scores_of(app: &App) -> Result<&ServedEmbedder, ApiError> {
    match app.embedder() {
        Some(served) if served.client.texts().kind == EmbedKind::Scores => Ok(served),
        other => {
            let name = other.map_or(&app.model().id, |served| &served.id);
            Err(no_embedder(format!("{name:?} is no reranker: serve one with --model (and --task rerank)")))
        }
    }
}

fn no_embedder(message: String) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).param("model")
}

fn check_dimensions(texts: &EmbedTexts, dimensions: Option<usize>) -> Result<(), ApiError> {
    match (texts.kind, dimensions) {
        (EmbedKind::Vectors(width), Some(asked)) if asked > width => {
            let message = format!("dimensions: {asked} are asked for, but vectors have {width}");
            Err(ApiError::invalid("dimensions", message))
        }
        _ => Ok(()),
    }
}

/// Names the place of a text that is wrong.
fn at(error: crate::runtime::Error, place: String) -> ApiError {
    let error = ApiError::from(error);
    let message = error.message.strip_prefix("input: ").unwrap_or(&error.message);
    ApiError { message: format!("{place}: {message}"), ..error }.param(place)
}

/// Waits for all results; an error as soon as the client has left.
fn compute(
    client: &EmbedClient,
    inputs: Vec<EmbedInput>,
    dimensions: Option<usize>,
    has_left: &AtomicBool,
) -> Result<Vec<EmbedOutput>, ApiError> {
    let count = inputs.len();
    let mut outputs = Vec::with_capacity(count);
    for output in client.submit(inputs, dimensions)? {
        if has_left.load(Ordering::Relaxed) {
            return Err(ApiError::internal("the client has left"));
        }
        outputs.push(output?);
    }
    match outputs.len() == count {
        true => Ok(outputs),
        false => Err(ApiError::engine_down()),
    }
}

fn vector(output: EmbedOutput, in_base64: bool) -> Value {
    match output {
        EmbedOutput::Vector(vector) if in_base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
            STANDARD.encode(bytes).into()
        }
        EmbedOutput::Vector(vector) => vector.into_iter().map(shortest).collect(),
        EmbedOutput::Score(score) => shortest(score),
    }
}

/// Returns a number with the fewest digits that give it again.
fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Returns the best documents, the best first; equal ones in their order.
fn results(body: &RerankBody, outputs: &[EmbedOutput]) -> Vec<Value> {
    let score = |output: &EmbedOutput| match output {
        EmbedOutput::Score(score) => *score,
        EmbedOutput::Vector(_) => f32::NAN,
    };
    let mut ranked: Vec<(usize, f32)> = outputs.iter().map(score).enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(body.top_n.unwrap_or(usize::MAX));
    let result = |(index, score): (usize, f32)| {
        let mut result = json!({"index": index, "relevance_score": shortest(score)});
        if body.returns_documents {
            result["document"] = json!({"text": body.documents[index]});
        }
        result
    };
    ranked.into_iter().map(result).collect()
}
