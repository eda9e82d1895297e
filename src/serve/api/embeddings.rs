//! `POST /v1/embeddings` in OpenAI's form, and `POST /v1/rerank` in Jina's and Cohere's, under the paths
//! of llama.cpp and vLLM; with `texts` in that of text-embeddings-inference (TEI), as llama.cpp tells them apart.
//!
//! Texts are encoded, and results collected and written as JSON, on a blocking thread; a client that
//! leaves cancels the texts that are not computed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use super::blocking::blocking;
use super::body::JsonBody;
use super::reply::Ignored;
use super::request::{model_not_found, token_ids};
use crate::App;
use crate::ServedEmbedder;
use crate::error::ApiError;
use crate::wire::ollama::is_same_name;
use crate::wire::{Fields, Problems};
use llmctl_base::Error;
use llmctl_engine::embed::{EmbedClient, EmbedInput, EmbedKind, EmbedOutput, EmbedTexts, LongText};

/// A text to embed.
enum EmbeddingInput {
    Text(String),
    Ids(Vec<u32>),
}

/// A request for vectors.
pub struct EmbeddingBody {
    /// The field of the texts.
    name: &'static str,
    inputs: Vec<EmbeddingInput>,
    dimensions: Option<usize>,
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
    /// The field of the documents: `texts` in TEI's form.
    name: &'static str,
}

/// The field by which a request for scores is in TEI's form.
const TEXTS: &str = "texts";

/// Texts of a request, as OpenAI bounds them.
const MAX_TEXTS: usize = 2048;

/// Tells the work of a request that its client has left.
struct LeftGuard(Arc<AtomicBool>);

impl Drop for LeftGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// State of a request for its work: its place among the texts that are encoded, and whether its client has
/// left.
struct TextWork {
    /// A place among the texts that are encoded at once.
    encoding: OwnedSemaphorePermit,
    has_left: Arc<AtomicBool>,
}

#[derive(Serialize)]
struct EmbeddingList<'a> {
    object: &'static str,
    data: Vec<EmbeddingItem>,
    model: &'a str,
    usage: TextUsage,
}

#[derive(Serialize)]
struct EmbeddingItem {
    object: &'static str,
    index: usize,
    embedding: EmbeddingValues,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EmbeddingValues {
    Numbers(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct Ranking<'a> {
    id: String,
    model: &'a str,
    usage: TextUsage,
    results: Vec<RankedDocument<'a>>,
}

/// A document of an answer; `score` and `text` are TEI's names of the other two.
#[derive(Default, Serialize)]
struct RankedDocument<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    relevance_score: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<DocumentText<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
}

#[derive(Serialize)]
struct DocumentText<'a> {
    text: &'a str,
}

#[derive(Serialize)]
struct TextUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl TextUsage {
    fn of(inputs: &[EmbedInput]) -> Self {
        let num_tokens = inputs.iter().map(EmbedInput::num_tokens).sum();
        Self { prompt_tokens: num_tokens, total_tokens: num_tokens }
    }
}

pub async fn embeddings(State(app): State<App>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let in_base64 = body.get("encoding_format").and_then(Value::as_str) == Some("base64");
    vectors(&app, body, embedding_body, move |model, vectors, prompt_tokens| {
        let item = |(index, vector): (usize, Vec<f32>)| {
            let embedding = if in_base64 {
                EmbeddingValues::Base64(base64(&vector))
            } else {
                EmbeddingValues::Numbers(vector)
            };
            EmbeddingItem { object: "embedding", index, embedding }
        };
        let data = vectors.into_iter().enumerate().map(item).collect();
        let usage = TextUsage { prompt_tokens, total_tokens: prompt_tokens };
        json_bytes(&EmbeddingList { object: "list", data, model, usage })
    })
    .await
}

/// Reads a body with `read`, computes the vectors of its texts, and answers with what `write` makes of the model's id, the vectors
/// and the number of tokens.
pub async fn vectors(
    app: &App,
    body: Map<String, Value>,
    read: fn(&mut Fields<'_>) -> EmbeddingBody,
    write: impl FnOnce(&str, Vec<Vec<f32>>, usize) -> Result<Vec<u8>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let (ignored, body) = blocking(app, move |app| read_fields(app, body, read)).await?;
    let num_bytes = body.inputs.iter().map(EmbeddingInput::num_bytes).sum();
    answer(app, ignored, num_bytes, move |app, work| {
        let served = served(app, false)?;
        let EmbeddingBody { name, inputs, dimensions, prompt_name, long } = body;
        let texts = served.client.texts();
        check_dimensions(texts, dimensions)?;
        let prompt = texts.prompt(prompt_name.as_deref())?;
        let encode = |(index, input): (usize, EmbeddingInput)| {
            let encoded = match input {
                EmbeddingInput::Text(text) => texts.encode(prompt, &text, long),
                EmbeddingInput::Ids(ids) => texts.ids(ids, long),
            };
            encoded.map_err(|error| at(error, format!("{name}[{index}]")))
        };
        let inputs: Vec<EmbedInput> = inputs.into_iter().enumerate().map(encode).collect::<Result<_, _>>()?;
        drop(work.encoding);
        let num_tokens = TextUsage::of(&inputs).prompt_tokens;
        let vectors = compute(&served.client, inputs, dimensions, &work.has_left, |output| match output {
            EmbedOutput::Vector(vector) => Some(vector),
            EmbedOutput::Score(_) => None,
        })?;
        write(&served.id, vectors, num_tokens)
    })
    .await
}

pub async fn rerank(State(app): State<App>, JsonBody(body): JsonBody) -> Result<Response, ApiError> {
    let (ignored, body) = blocking(&app, |app| read_fields(app, body, rerank_body)).await?;
    let documents: usize = body.documents.iter().map(String::len).sum();
    let num_bytes = documents + body.query.len();
    answer(&app, ignored, num_bytes, move |app, work| {
        let served = served(app, true)?;
        let texts = served.client.texts();
        let pairs = texts.pairs(body.instruction.as_deref(), &body.query)?;
        let encode = |(index, document): (usize, &String)| {
            pairs.with(document, body.long).map_err(|error| at(error, format!("{}[{index}]", body.name)))
        };
        let inputs: Vec<EmbedInput> =
            body.documents.iter().enumerate().map(encode).collect::<Result<_, _>>()?;
        drop(work.encoding);
        let usage = TextUsage::of(&inputs);
        let scores = compute(&served.client, inputs, None, &work.has_left, |output| match output {
            EmbedOutput::Score(score) => Some(score),
            EmbedOutput::Vector(_) => None,
        })?;
        let (id, results) = (format!("rerank-{}", Uuid::new_v4().simple()), results(&body, &scores));
        match body.name {
            TEXTS => json_bytes(&results),
            _ => json_bytes(&Ranking { id, model: &served.id, usage, results }),
        }
    })
    .await
}

/// Answers with the JSON that `work` makes on a blocking thread, within the limits of requests and of
/// texts that are encoded at once.
async fn answer(
    app: &App,
    ignored: Ignored,
    num_bytes: usize,
    work: impl FnOnce(&App, TextWork) -> Result<Vec<u8>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let place = app.embedder().map(|served| served.places.enter()).transpose()?;
    let encoding = app.preparing().enter(num_bytes).await?;
    let guard = LeftGuard(Arc::default());
    let has_left = Arc::clone(&guard.0);
    let body = blocking(app, move |app| {
        let body = work(app, TextWork { encoding, has_left });
        drop(place);
        body
    });
    let body = body.await?;
    drop(guard);
    Ok((ignored, [(CONTENT_TYPE, "application/json")], body).into_response())
}

/// Returns the JSON of an answer. Numbers have the fewest digits that give them again.
pub fn json_bytes(answer: &impl Serialize) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(answer).map_err(|_| ApiError::internal("an answer cannot be written as JSON"))
}

/// Answers 400 to each request for text, naming the endpoint that the model serves.
pub async fn writes_no_text(State(app): State<App>, _: Request, _: Next) -> Response {
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
///
/// # Errors
/// All that is wrong with the body, the first kind of it.
pub fn read_fields<T>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&mut Fields<'_>) -> T,
) -> Result<(Ignored, T), ApiError> {
    let (read, mut problems) = Problems::new(app.settings().lenient).read(body, |fields| {
        if let (Some(name), Some(served)) = (fields.text("model"), app.embedder())
            && !is_same_name(&name, &served.id)
            && !app.is_alias(&name)
        {
            fields.problems().no_model(model_not_found(&name, &served.id));
        }
        let read = read(fields);
        fields.hint("user");
        read
    })?;
    Ok((Ignored(problems.take_ignored()), read))
}

/// Reads a request for vectors.
pub fn embedding_body(fields: &mut Fields<'_>) -> EmbeddingBody {
    let format = fields.text("encoding_format");
    if format.as_deref().is_some_and(|format| !matches!(format, "float" | "base64")) {
        fields.unsupported("encoding_format", "is neither \"float\" nor \"base64\"");
    }
    let prompt_name = fields.text("prompt_name");
    EmbeddingBody { prompt_name, ..body_of(fields, "input") }
}

/// Reads texts in the field `name`, and what every form of a request for vectors has.
pub fn body_of(fields: &mut Fields<'_>, name: &'static str) -> EmbeddingBody {
    let what = "is neither a string, nor a list of strings or token ids that is not empty";
    let inputs = texts(fields, name, what, |fields| inputs(fields.take(name)));
    let dimensions = positive(fields, "dimensions");
    EmbeddingBody { name, inputs, dimensions, prompt_name: None, long: long(fields) }
}

/// Reads the texts of a request; none, or too many, are refused. `what` completes "NAME ...".
fn texts<T>(
    fields: &mut Fields<'_>,
    name: &str,
    what: &str,
    read: impl FnOnce(&mut Fields<'_>) -> Option<Vec<T>>,
) -> Vec<T> {
    let is_given = fields.has(name);
    let texts = read(fields).unwrap_or_default();
    match texts.len() {
        0 if !is_given => fields.missing(name),
        0 => fields.wrong(name, what),
        count if count > MAX_TEXTS => {
            fields.out_of_range(name, &format!("has {count} texts, more than {MAX_TEXTS}"));
        }
        _ => {}
    }
    texts
}

fn positive(fields: &mut Fields<'_>, name: &str) -> Option<usize> {
    let count = fields.size(name);
    if count == Some(0) {
        fields.out_of_range(name, "is 0");
    }
    count
}

/// Reads whether long texts are cut; by default they are refused.
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
    fields.require("query");
    let query = fields.text("query");
    let name = fields.spelled(&["documents", TEXTS]);
    let text = |document: Value| match document {
        Value::String(text) => Some(text),
        Value::Object(mut members) => match members.remove("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        _ => None,
    };
    let what = "is no list of strings, or of objects with a text, that is not empty";
    let documents = texts(fields, name, what, |fields| fields.list(name)?.into_iter().map(text).collect());
    let top_n = positive(fields, "top_n");
    fields.only("raw_scores", &[false.into()]);
    fields.only("truncation_direction", &["right".into(), "Right".into()]);
    let returned = fields.spelled(&["return_documents", "return_text"]);
    RerankBody {
        query: query.unwrap_or_default(),
        documents,
        instruction: fields.text("instruction"),
        top_n,
        returns_documents: fields.flag(returned).unwrap_or(false),
        long: long(fields),
        name,
    }
}

/// Returns the embedder if it computes scores, or vectors if not `scores`.
fn served(app: &App, scores: bool) -> Result<&ServedEmbedder, ApiError> {
    let embedder = app.embedder();
    let is_asked = |served: &&ServedEmbedder| (served.client.texts().kind == EmbedKind::Scores) == scores;
    if let Some(served) = embedder.filter(is_asked) {
        return Ok(served);
    }
    let name = embedder.map_or(&app.model().id, |served| &served.id);
    let message = match (scores, embedder) {
        (true, _) => format!("{name:?} is no reranker: serve one with --model (and --task rerank)"),
        (false, other) => format!(
            "{name:?} {}computes no embeddings: serve an embedding model with --model, or beside it with \
             --embedding-model",
            if other.is_some() { "scores pairs and " } else { "" }
        ),
    };
    Err(ApiError::unsupported("model", message))
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
fn at(error: Error, place: String) -> ApiError {
    let error = ApiError::from(error);
    let message = error.message.strip_prefix("input: ").unwrap_or(&error.message);
    ApiError { message: format!("{place}: {message}"), ..error }.param(place)
}

/// Waits for all results; an error as soon as the client has left.
fn compute<T>(
    client: &EmbedClient,
    inputs: Vec<EmbedInput>,
    dimensions: Option<usize>,
    has_left: &AtomicBool,
    pick: fn(EmbedOutput) -> Option<T>,
) -> Result<Vec<T>, ApiError> {
    let count = inputs.len();
    let mut outputs = Vec::with_capacity(count);
    for output in client.submit(inputs, dimensions)? {
        if has_left.load(Ordering::Relaxed) {
            return Err(ApiError::internal("the client has left"));
        }
        let mixed = || ApiError::internal("a score instead of a vector, or the other way round");
        outputs.push(pick(output?).ok_or_else(mixed)?);
    }
    match outputs.len() == count {
        true => Ok(outputs),
        false => Err(ApiError::engine_down()),
    }
}

fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

/// Returns the best documents, the best first; equal ones in their order.
fn results<'a>(body: &'a RerankBody, scores: &[f32]) -> Vec<RankedDocument<'a>> {
    let mut ranked: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(body.top_n.unwrap_or(usize::MAX));
    let result = |(index, score): (usize, f32)| {
        let (score, text) = (Some(score), body.returns_documents.then(|| &*body.documents[index]));
        if body.name == TEXTS {
            return RankedDocument { index, score, text, ..RankedDocument::default() };
        }
        let document = text.map(|text| DocumentText { text });
        RankedDocument { index, relevance_score: score, document, ..RankedDocument::default() }
    };
    ranked.into_iter().map(result).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_best_documents_come_first_with_the_digits_of_their_scores() {
        let body = RerankBody {
            query: "q".to_owned(),
            documents: ["a", "b", "c"].map(str::to_owned).to_vec(),
            instruction: None,
            top_n: Some(2),
            returns_documents: true,
            long: LongText::Refuse,
            name: "documents",
        };
        let json = json_bytes(&results(&body, &[0.1, 0.7, 0.7])).expect("JSON");
        let expected = r#"[{"index":1,"relevance_score":0.7,"document":{"text":"b"}},{"index":2,"relevance_score":0.7,"document":{"text":"c"}}]"#;
        assert_eq!(String::from_utf8_lossy(&json), expected);
        let body = RerankBody { name: TEXTS, ..body };
        let texts = results(&body, &[0.1, 0.7, 0.7]);
        let expected = r#"[{"index":1,"score":0.7,"text":"b"},{"index":2,"score":0.7,"text":"c"}]"#;
        assert_eq!(String::from_utf8_lossy(&json_bytes(&texts).expect("JSON")), expected);
    }

    #[test]
    fn a_field_tells_the_form_of_a_request_for_scores() {
        let read = |body: Value| {
            let body = body.as_object().cloned().unwrap_or_default();
            Problems::new(false).read(body, rerank_body).map(|(body, _)| body)
        };
        let tei = json!({"query": "q", "texts": ["a"], "raw_scores": false, "return_text": true, "truncate": true,
            "truncation_direction": "Right"});
        let body = read(tei).expect("TEI's form");
        assert_eq!((body.name, body.returns_documents, body.documents.len()), (TEXTS, true, 1));
        let jina = json!({"query": "q", "documents": ["a"], "return_documents": true});
        assert_eq!(read(jina).expect("Jina's form").name, "documents");
        for (other, named) in [
            (json!({"query": "q", "texts": ["a"], "raw_scores": true}), "raw_scores = true is not supported"),
            (json!({"query": "q", "texts": ["a"], "truncation_direction": "left"}), "truncation_direction"),
        ] {
            let refused = read(other).err().expect("refused").message;
            assert!(refused.contains(named), "{refused}");
        }
    }
}
