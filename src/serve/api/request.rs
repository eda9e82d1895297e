//! Bodies to asks: which fields the two generating endpoints know, and what each means.
//!
//! Every field is honoured or refused here, before any work. What is checked where: the form and the ranges in `wire`,
//! what depends on the model here, the context by the engine.

use axum::http::{HeaderMap, StatusCode};
use serde_json::{Map, Value, json};

use super::body::{request_id, session_of};
use super::turn::{Ask, InSession, Prompt, RawText};
use crate::runtime::{EngineHandle, Error, Limits, Sampling, Speech};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::serve::wire::{Fields, Problems, message, params};
use crate::template::{Conversation, Message, Role};

/// The most answers that one request may ask for, as in OpenAI's API.
const MAX_CHOICES: usize = 128;

/// OpenAI's default for completions, which its clients rely on.
const COMPLETION_TOKENS: usize = 16;

/// `reasoning_effort`, the least first; the first two ask for none.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];

/// Variables by which templates switch reasoning on and off.
const THINKING_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// A chat completion.
pub struct Chat {
    pub ask: Ask,
    pub streaming: Streaming,
    pub shows_reasoning: bool,
}

/// A completion.
pub struct Completion {
    pub ask: Ask,
    pub streaming: Streaming,
    /// Answers begin with their prompts.
    pub echo: bool,
}

/// How an answer is to come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    pub is_on: bool,
    /// The stream ends with a chunk of usage.
    pub includes_usage: bool,
}

/// What both endpoints ask in the same words.
struct Common {
    num_choices: usize,
    sampling: Sampling,
    limits: Limits,
    logprobs: Option<usize>,
    streaming: Streaming,
}

/// # Errors
/// All that is wrong with the body, the first kind of it; `invalid_session_id`; 503 without an engine.
pub fn chat(app: &App, body: Map<String, Value>, headers: &HeaderMap) -> Result<Chat, ApiError> {
    let engine = app.engine()?;
    let mut problems = Problems::new(app.settings().lenient);
    let mut fields = Fields::new(body, &mut problems);
    let model = check_model(app, &mut fields);
    let mut conversation = conversation(app, &mut fields);
    let shows_reasoning = shows_reasoning(&mut fields, &mut conversation.kwargs, &app.model().speech);
    let common = common(app, &engine, &mut fields, Limits::default());
    fields.only("modalities", &[json!(["text"])]);
    fields.only("verbosity", &[json!("medium")]);
    let (in_body, appends) = (fields.text("session_id"), fields.flag("session_append").unwrap_or(false));
    fields.end();
    problems.check(model)?;
    let session = session_of(in_body, headers)?.map(|name| InSession { name, appends });
    check_session(session.as_ref(), appends, common.num_choices)?;
    let streaming = common.streaming;
    Ok(Chat { ask: common.ask(Prompt::Chat(conversation), session, headers), streaming, shows_reasoning })
}

/// What the template gets.
pub fn conversation(app: &App, fields: &mut Fields<'_>) -> Conversation {
    let speech = &app.model().speech;
    let messages = message::messages(fields);
    let mut kwargs = fields.object("chat_template_kwargs").unwrap_or_default();
    effort(fields, &mut kwargs, speech);
    let messages = messages.into_iter().map(|message| known_role(message, speech)).collect();
    Conversation { messages, kwargs, ..Conversation::default() }
}

/// # Errors
/// As [`chat`].
pub fn completion(app: &App, body: Map<String, Value>, headers: &HeaderMap) -> Result<Completion, ApiError> {
    let engine = app.engine()?;
    let mut problems = Problems::new(app.settings().lenient);
    let mut fields = Fields::new(body, &mut problems);
    let model = check_model(app, &mut fields);
    let prompts = prompts(&mut fields);
    let defaults = Limits { max_tokens: Some(COMPLETION_TOKENS), ..Limits::default() };
    let common = common(app, &engine, &mut fields, defaults);
    if prompts.len() * common.num_choices > MAX_CHOICES {
        fields.out_of_range("prompt", &format!("and n together ask for more than {MAX_CHOICES} answers"));
    }
    fields.only("best_of", &[json!(common.num_choices)]);
    fields.only("suffix", &[json!("")]);
    let echo = fields.flag("echo").unwrap_or(false);
    if echo && common.logprobs.is_some() {
        fields.unsupported("logprobs", "of a prompt that is echoed are not supported");
    }
    let in_body = fields.text("session_id");
    fields.end();
    problems.check(model)?;
    if session_of(in_body, headers)?.is_some() {
        let message = "a session is a conversation: it is gone on with through /v1/chat/completions";
        return Err(ApiError::unsupported("session_id", message));
    }
    let streaming = common.streaming;
    Ok(Completion { ask: common.ask(Prompt::Texts(prompts), None, headers), streaming, echo })
}

impl Common {
    fn ask(self, prompt: Prompt, session: Option<InSession>, headers: &HeaderMap) -> Ask {
        let Self { num_choices, sampling, limits, logprobs, streaming: _ } = self;
        Ask { prompt, num_choices, sampling, limits, logprobs, session, request_id: request_id(headers) }
    }
}

fn common(app: &App, engine: &EngineHandle, fields: &mut Fields<'_>, limits: Limits) -> Common {
    let common = Common {
        num_choices: num_choices(fields),
        sampling: params::sampling(fields, &app.model().defaults.sampling()),
        limits: params::limits(fields, &limits),
        logprobs: params::logprobs(fields, None),
        streaming: streaming(fields),
    };
    params::labels(fields);
    check_ranges(&common.sampling, engine.spec().vocab_size(), fields.problems());
    common
}

/// The engine's own ranges, told before the engine is asked.
fn check_ranges(sampling: &Sampling, vocab_size: usize, problems: &mut Problems) {
    match sampling.validate(vocab_size) {
        Ok(()) => {}
        Err(Error::InvalidParameter { name, message }) => problems.value(name, format!("{name}: {message}")),
        Err(other) => problems.value("", other.to_string()),
    }
}

/// The name of the model that is served, or none.
pub fn check_model(app: &App, fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let served = &app.model().id;
    match fields.text("model") {
        Some(model) if model != *served => Err(model_not_found(&model, served)),
        _ => Ok(()),
    }
}

pub fn model_not_found(model: &str, served: &str) -> ApiError {
    let message = format!("the model {model:?} does not exist here; {served:?} does");
    ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).param("model")
}

fn num_choices(fields: &mut Fields<'_>) -> usize {
    match fields.size("n") {
        None => 1,
        Some(n) if (1..=MAX_CHOICES).contains(&n) => n,
        Some(_) => {
            fields.out_of_range("n", &format!("is not in [1, {MAX_CHOICES}]"));
            1
        }
    }
}

fn streaming(fields: &mut Fields<'_>) -> Streaming {
    let is_on = fields.flag("stream").unwrap_or(false);
    let options = fields.object("stream_options").unwrap_or_default();
    let mut options = fields.inside("stream_options", options);
    let includes_usage = options.flag("include_usage").unwrap_or(false);
    options.flag("include_obfuscation"); // padding against eavesdroppers who measure sizes: never sent
    options.end();
    Streaming { is_on, includes_usage }
}

/// The reference's switch, which it keeps among the template's variables.
fn shows_reasoning(fields: &mut Fields<'_>, kwargs: &mut Map<String, Value>, speech: &Speech) -> bool {
    const NAME: &str = "return_reasoning";
    if !kwargs.contains_key(NAME) || speech.template_reads(NAME) {
        return true;
    }
    match kwargs.shift_remove(NAME) {
        Some(Value::Bool(shows)) => shows,
        _ => {
            fields.wrong("chat_template_kwargs", &format!(".{NAME} is neither true nor false"));
            true
        }
    }
}

/// `reasoning_effort` in the variables that the template reads; what the client says of them itself counts first.
fn effort(fields: &mut Fields<'_>, kwargs: &mut Map<String, Value>, speech: &Speech) {
    let Some(effort) = fields.text("reasoning_effort") else { return };
    let Some(rank) = EFFORTS.iter().position(|known| *known == effort) else {
        fields.out_of_range("reasoning_effort", &format!("is none of {}", EFFORTS.join(", ")));
        return;
    };
    let switches = THINKING_SWITCHES.map(|name| (name, Value::Bool(rank > 1)));
    let mut is_heard = false;
    for (name, value) in switches.into_iter().chain([("reasoning_effort", effort.into())]) {
        if speech.template_reads(name) {
            kwargs.entry(name).or_insert(value);
            is_heard = true;
        }
    }
    if !is_heard {
        fields.unsupported("reasoning_effort", "means nothing to this model's chat template");
    }
}

/// Templates that do not know `developer` print nothing for it; it is OpenAI's newer word for `system`.
fn known_role(message: Message, speech: &Speech) -> Message {
    let is_known = speech.template_source().is_none_or(|source| source.contains("developer"));
    match message.role {
        Role::Developer if !is_known => Message { role: Role::System, ..message },
        _ => message,
    }
}

fn check_session(session: Option<&InSession>, appends: bool, num_choices: usize) -> Result<(), ApiError> {
    match session {
        None if appends => {
            let message = "session_append: there is no session to append to; give session_id or a header";
            Err(ApiError::invalid("session_append", message))
        }
        Some(_) if num_choices > 1 => {
            let message = "n: a session goes on with one answer, so n cannot be more than 1 in one";
            Err(ApiError::unsupported("n", message))
        }
        _ => Ok(()),
    }
}

/// A text, ids, or a list of either.
fn prompts(fields: &mut Fields<'_>) -> Vec<RawText> {
    let prompts = match fields.take("prompt") {
        None => {
            fields.wrong("prompt", "is missing");
            return Vec::new();
        }
        Some(Value::Array(items)) if items.is_empty() => {
            fields.out_of_range("prompt", "is empty");
            return Vec::new();
        }
        Some(Value::Array(items)) if items.iter().all(Value::is_number) => {
            token_ids(&items).map(|ids| vec![RawText::Ids(ids)])
        }
        Some(Value::Array(items)) => items.iter().map(raw_text).collect(),
        Some(value) => raw_text(&value).map(|text| vec![text]),
    };
    if prompts.is_none() {
        fields.wrong("prompt", "is neither text, nor token ids, nor an array of one of them");
    }
    prompts.unwrap_or_default()
}

fn raw_text(value: &Value) -> Option<RawText> {
    match value {
        Value::String(text) => Some(RawText::Text(text.clone())),
        Value::Array(items) => token_ids(items).map(RawText::Ids),
        _ => None,
    }
}

pub fn token_ids(items: &[Value]) -> Option<Vec<u32>> {
    items.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect()
}
