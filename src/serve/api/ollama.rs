//! Ollama's `POST /api/chat` and `/api/generate`; `models` has its routes of models, `vectors` those of embeddings.
//!
//! Invariants: an answer is a stream unless the request says otherwise; the last object of an answer has its counts and times; a
//! request without a text loads the model and asks for nothing else.

pub mod models;
pub mod pull;
pub mod vectors;

use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::body::{Incoming, PostedBody, session_of};
use super::collect::Collected;
use super::generate::{FinishedChoice, GenerateRequest, Prompt, Running, Totals};
use super::reply::{self, Head, Ignored};
use super::request::{
    self, AnswerParams, Streaming, check_ranges, read_answer, with_known_roles, with_settings,
};
use super::sse::{self, WireFormat};
use crate::App;
use crate::error::ApiError;
use crate::wire::images::{self, ImagePiece, ImagePlace};
use crate::wire::message;
use crate::wire::ollama::{self, AnswerKind, AnswerPart};
use crate::wire::switches::{self, Wish, fulfil};
use crate::wire::{Fields, lora, options, params, shape};
use llmctl_engine::turn::{AnswerStart, AnsweredCall, Delta, InfillPrompt, TextPrompt, TurnRequest};
use llmctl_engine::{EngineClient, Limits, Token};
use llmctl_template::{Conversation, Message, Role};

/// A request for an answer, or for the model to be there.
pub enum OllamaBody {
    Load { ignored: Vec<String> },
    Answer(Box<GenerateRequest>),
}

pub async fn chat(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let times = RequestTimes::new(posted.incoming.begun);
    let asked = posted.read(&app, read_chat).await?;
    answer(&app, AnswerKind::Chat, times, asked).await
}

pub async fn generate(State(app): State<App>, posted: PostedBody) -> Result<Response, ApiError> {
    let times = RequestTimes::new(posted.incoming.begun);
    let asked = posted.read(&app, read_generate).await?;
    answer(&app, AnswerKind::Generate, times, asked).await
}

async fn answer(
    app: &App,
    kind: AnswerKind,
    times: RequestTimes,
    asked: OllamaBody,
) -> Result<Response, ApiError> {
    let model = ollama::tagged(&app.model().id);
    let request = match asked {
        OllamaBody::Answer(request) => *request,
        OllamaBody::Load { ignored } => {
            let done = ollama::without_text(kind, &model, "load");
            return Ok((Ignored(ignored), Json(done)).into_response());
        }
    };
    let conversation = match (&request.prompt, kind) {
        (Prompt::Chat(conversation), AnswerKind::Generate) => Some(conversation.messages.clone()),
        _ => None,
    };
    let logprobs = request.turn.logprobs.is_some();
    let format = |_: &mut Running| OllamaFormat {
        head: Head::new(app, "ollama"),
        kind,
        model,
        times,
        logprobs,
        conversation,
        call: None,
        tokens: Vec::new(),
        last: Map::new(),
    };
    sse::answer(app, request, format).await
}

/// Reads a request for an answer to a conversation.
///
/// # Errors
/// All that is wrong with the body, the first kind of it; `invalid_session_id`; 503 without an engine.
pub fn read_chat(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<OllamaBody, ApiError> {
    let asked = read_answer(app, body, |engine, fields| {
        let messages =
            app.model().chat_tokenizer.with_template(|template| ollama::messages(fields, template.says));
        let is_load = messages.is_none();
        let mut messages = with_known_roles(app, messages.unwrap_or_default());
        // As in Ollama's templates, a lone message of the assistant is no beginning.
        let answer_start = if messages.len() > 1 {
            message::begun_last(fields, &mut messages)
        } else {
            AnswerStart::Nothing
        };
        let schema_open = shape::is_open(fields, app.settings().schema_open);
        let tools = request::tools(app, fields, schema_open);
        let (params, kwargs) = answer_fields(app, engine, fields, schema_open);
        message::check_continued(fields, "messages", &answer_start, params.has_constraint());
        let conversation =
            Conversation { messages, tools: tools.definitions.clone(), kwargs, ..Conversation::default() };
        let turn = TurnRequest { tools, answer_start, ..params.turn };
        (AnswerParams { turn, ..params }, (!is_load).then_some(Prompt::Chat(conversation)))
    });
    body_of(asked?, incoming)
}

/// Reads a request to go on with a text: a question to the chat template, the text itself, or one between two others.
///
/// # Errors
/// As [`read_chat`].
pub fn read_generate(
    app: &App,
    body: Map<String, Value>,
    incoming: Incoming,
) -> Result<OllamaBody, ApiError> {
    let asked = read_answer(app, body, |engine, fields| {
        let asked = prompt(app, fields);
        if matches!(asked, Some(Prompt::Texts(_))) {
            fields.hint("think");
        }
        let schema_open = shape::is_open(fields, app.settings().schema_open);
        let (params, kwargs) = answer_fields(app, engine, fields, schema_open);
        let prompt = asked.map(|prompt| match prompt {
            Prompt::Chat(conversation) => Prompt::Chat(Conversation { kwargs, ..conversation }),
            texts => texts,
        });
        (params, prompt)
    });
    body_of(asked?, incoming)
}

/// Makes the request of a prompt; without one, the model is to be loaded.
fn body_of(
    (params, prompt): (AnswerParams, Option<Prompt>),
    incoming: Incoming,
) -> Result<OllamaBody, ApiError> {
    let Some(prompt) = prompt else { return Ok(OllamaBody::Load { ignored: params.ignored }) };
    let is_chat = matches!(prompt, Prompt::Chat(_));
    let session = match is_chat {
        true => session_of(None, false, &incoming.headers, &incoming.caller)?,
        false => request::no_conversation(None, &incoming)?,
    };
    Ok(OllamaBody::Answer(Box::new(params.request(prompt, session, incoming))))
}

/// Reads what both endpoints know beside the prompt.
fn answer_fields(
    app: &App,
    engine: &EngineClient,
    fields: &mut Fields<'_>,
    schema_open: bool,
) -> (AnswerParams, Map<String, Value>) {
    let limits = with_settings(app, Limits::default());
    let (sampling, limits) = options::options(fields, &app.model().defaults, &limits, false);
    check_ranges(&sampling, engine.spec().vocab_size(), fields.problems());
    let mut wish = Wish::default();
    switches::ollama(fields, &mut wish);
    let mut kwargs = Map::new();
    let reasoning_budget = app.model().chat_tokenizer.with_template(|template| {
        fulfil(fields, &mut kwargs, template, wish, app.settings().enable_thinking)
    });
    let turn = TurnRequest {
        sampling,
        limits,
        logprobs: params::logprobs(fields, None),
        constraint: ollama::format(fields, schema_open),
        adapters: lora::adapters(&engine.spec().model.adapters, fields),
        reasoning_budget,
        ..TurnRequest::default()
    };
    ollama::cuts(fields);
    fields.only("_debug_render_only", &[false.into()]);
    let is_on = fields.flag("stream").unwrap_or(true);
    (AnswerParams::new(turn, Streaming { is_on, ..Streaming::default() }), kwargs)
}

/// Reads the prompt of `/api/generate`; `None` without any.
fn prompt(app: &App, fields: &mut Fields<'_>) -> Option<Prompt> {
    let chat_tokenizer = &app.model().chat_tokenizer;
    let text = fields.text("prompt").unwrap_or_default();
    let suffix = fields.text("suffix").unwrap_or_default();
    let system = fields.text("system").unwrap_or_default();
    let is_raw = fields.flag("raw").unwrap_or(false);
    fields.only("template", &["".into()]);
    let mut messages = ollama::context(fields);
    let images = images::list(fields, "images", ImagePlace::User);
    if text.is_empty() && suffix.is_empty() && images.is_empty() {
        return None;
    }
    let is_text = is_raw || !suffix.is_empty() || !chat_tokenizer.has_template();
    if is_text {
        let given = [
            (!messages.is_empty(), "context"),
            (!images.is_empty(), "images"),
            (!system.is_empty(), "system"),
        ];
        for (_, name) in given.into_iter().filter(|(is_given, _)| *is_given) {
            fields.unsupported(
                name,
                "needs the chat template, which raw, suffix and a model without one leave out",
            );
        }
        if !suffix.is_empty() && chat_tokenizer.infill().is_none() {
            fields.unsupported("suffix", "is not supported: this model has no fill-in-the-middle tokens");
        }
        let text = match suffix.is_empty() {
            true => TextPrompt::Text(text),
            false => TextPrompt::Infill(InfillPrompt { prefix: text, suffix, ..InfillPrompt::default() }),
        };
        return Some(Prompt::Texts(vec![text]));
    }
    if !system.is_empty() {
        messages.retain(|message| message.role != Role::System);
        messages.insert(0, Message::new(Role::System, system));
    }
    let pieces = images.into_iter().chain([ImagePiece::Text(text)]);
    messages.push(Message::user(images::content(pieces)));
    Some(Prompt::Chat(Conversation { messages, ..Conversation::default() }))
}

/// The beginning of a request, and how long its model took to be there.
#[derive(Clone, Copy)]
pub struct RequestTimes {
    begun: Instant,
    load: Duration,
}

impl RequestTimes {
    /// Called when the model is there.
    pub fn new(begun: Instant) -> Self {
        Self { begun, load: begun.elapsed() }
    }

    /// Returns Ollama's members, in nanoseconds.
    pub fn members(self) -> [(String, Value); 2] {
        let load = ("load_duration".to_owned(), nanoseconds(self.load));
        [("total_duration".to_owned(), nanoseconds(self.begun.elapsed())), load]
    }
}

fn nanoseconds(time: Duration) -> Value {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into()
}

/// Encoding of an answer.
struct OllamaFormat {
    head: Head,
    kind: AnswerKind,
    model: String,
    times: RequestTimes,
    logprobs: bool,
    /// The conversation before the answer, if the answer ends with it.
    conversation: Option<Vec<Message>>,
    /// The call that is not complete, and its place.
    call: Option<(usize, AnsweredCall)>,
    /// Tokens of the content whose log-probabilities wait for a part.
    tokens: Vec<Token>,
    /// Members of the last object, beside counts and times.
    last: Map<String, Value>,
}

impl OllamaFormat {
    fn logprobs_of(&self, tokens: &[Token]) -> Value {
        match self.logprobs && !tokens.is_empty() {
            true => self.head.chat_logprobs(tokens)["content"].take(),
            false => Value::Null,
        }
    }

    /// Returns what waits for a part.
    fn take_logprobs(&mut self) -> Value {
        let tokens = std::mem::take(&mut self.tokens);
        self.logprobs_of(&tokens)
    }

    fn part(&self, part: AnswerPart<'_>) -> Value {
        part.object(self.kind, &self.model, false).into()
    }

    fn delta(&mut self, delta: Delta) -> Option<Value> {
        match delta {
            Delta::Content(text) => {
                let logprobs = self.take_logprobs();
                Some(self.part(AnswerPart { content: &text, logprobs, ..AnswerPart::default() }))
            }
            Delta::Reasoning(text) => {
                Some(self.part(AnswerPart { thinking: &text, ..AnswerPart::default() }))
            }
            Delta::Call { index, id, name } => {
                let arguments = String::new();
                self.call = Some((index, AnsweredCall { id, name, arguments, is_whole: false }));
                None
            }
            Delta::Arguments { fragment, .. } => {
                if let Some((_, call)) = &mut self.call {
                    call.arguments.push_str(&fragment);
                }
                None
            }
            Delta::CallEnd { .. } => {
                let (index, call) = self.call.take()?;
                let calls = vec![ollama::call(index, &call)];
                Some(self.part(AnswerPart { calls, ..AnswerPart::default() }))
            }
        }
    }

    /// Notes why the answer ended, and the conversation with it.
    fn note_end(&mut self, finished: &FinishedChoice) {
        let reason = if finished.finish_reason() == "length" { "length" } else { "stop" };
        self.last.insert("done_reason".to_owned(), reason.into());
        self.last.extend(finished.placed.as_ref().map(reply::placed));
        if let Some(mut messages) = self.conversation.take() {
            messages.push(finished.answer.to_message());
            self.last.extend(ollama::context_of(&messages).map(|context| ("context".to_owned(), context)));
        }
    }

    fn end(&self, part: AnswerPart<'_>, totals: &Totals) -> Value {
        let mut object = part.object(self.kind, &self.model, true);
        object.extend(self.last.clone());
        object.extend(self.times.members());
        let counts = json!({
            "prompt_eval_count": totals.usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(totals.timings.prefill),
            "eval_count": totals.usage.completion_tokens,
            "eval_duration": nanoseconds(totals.timings.decode),
        });
        object.extend(crate::wire::json::members(counts));
        object.into()
    }
}

impl WireFormat for OllamaFormat {
    const ENDS_WITH_DONE: bool = false;
    const IS_LINES: bool = true;

    fn whole(mut self, collected: &Collected) -> Result<Value, ApiError> {
        let choice = collected.choices.first().ok_or_else(|| ApiError::internal("there is no answer"))?;
        self.note_end(choice);
        let answer = &choice.answer;
        let calls = answer.whole_calls().enumerate();
        let part = AnswerPart {
            content: &answer.content,
            thinking: &answer.reasoning,
            calls: calls.map(|(index, call)| ollama::call(index, call)).collect(),
            logprobs: self.logprobs_of(&answer.content_tokens),
        };
        Ok(self.end(part, &collected.totals))
    }

    fn deltas(&mut self, _choice: usize, deltas: Vec<Delta>, tokens: Vec<Token>) -> Vec<Value> {
        self.tokens.extend(tokens);
        deltas.into_iter().filter_map(|delta| self.delta(delta)).collect()
    }

    fn finished(&mut self, _choice: usize, finished: &FinishedChoice) -> Vec<Value> {
        self.note_end(finished);
        Vec::new()
    }

    fn ending(&mut self, totals: &Totals) -> Vec<Value> {
        let logprobs = self.take_logprobs();
        vec![self.end(AnswerPart { logprobs, ..AnswerPart::default() }, totals)]
    }
}
