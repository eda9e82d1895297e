//! Bodies to asks: which fields the two generating endpoints know, and what each means.
//!
//! Every field is honoured or refused here, before any work. What is checked where: the form and the ranges in `wire`,
//! what depends on the model here, the context by the engine.

use axum::http::{HeaderMap, StatusCode};
use serde_json::{Map, Value, json};

use super::body::session_of;
use super::turn::{Ask, InSession, Prompt, RawText, Shape, ToolUse};
use crate::runtime::grammar::GrammarSource;
use crate::runtime::{EngineHandle, Error, Limits, Sampling, Speech};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::serve::wire::{Fields, Problems, message, params};
use crate::template::{Conversation, Message, Role, ToolChoice};

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
    shape: Option<Shape>,
    streaming: Streaming,
}

/// # Errors
/// All that is wrong with the body, the first kind of it; `invalid_session_id`; 503 without an engine.
pub fn chat(
    app: &App,
    body: Map<String, Value>,
    headers: &HeaderMap,
    request_id: String,
) -> Result<Chat, ApiError> {
    let engine = app.engine()?;
    let mut problems = Problems::new(app.settings().lenient);
    let mut fields = Fields::new(body, &mut problems);
    let model = check_model(app, &mut fields);
    let mut conversation = conversation_without_tools(app, &mut fields);
    let shows_reasoning = shows_reasoning(&mut fields, &mut conversation.kwargs, &app.model().speech);
    let tools = tools(app, &mut fields);
    conversation.tools = tools.heard().to_vec();
    let common = common(app, &engine, &mut fields, Limits::default());
    if let Some(shape) = common.shape.as_ref().filter(|_| tools.is_on()) {
        let param = shape.param;
        fields.unsupported(param, "is not supported beside tools; tool_choice \"none\" switches them off");
    }
    fields.only("modalities", &[json!(["text"])]);
    fields.only("verbosity", &[json!("medium")]);
    let (in_body, appends) = (fields.text("session_id"), fields.flag("session_append").unwrap_or(false));
    fields.end();
    problems.check(model)?;
    let session = session_of(in_body, headers)?.map(|name| InSession { name, appends });
    check_session(session.as_ref(), appends, common.num_choices)?;
    let streaming = common.streaming;
    let ask = Ask { session, tools, ..common.ask(Prompt::Chat(conversation), request_id) };
    Ok(Chat { ask, streaming, shows_reasoning })
}

/// What the template gets.
pub fn conversation(app: &App, fields: &mut Fields<'_>) -> Conversation {
    let conversation = conversation_without_tools(app, fields);
    Conversation { tools: tools(app, fields).heard().to_vec(), ..conversation }
}

fn conversation_without_tools(app: &App, fields: &mut Fields<'_>) -> Conversation {
    let speech = &app.model().speech;
    let messages = message::messages(fields);
    let mut kwargs = fields.object("chat_template_kwargs").unwrap_or_default();
    effort(fields, &mut kwargs, speech);
    if let Some(thinks) = app.settings().enable_thinking {
        kwargs.entry(THINKING_SWITCHES[0]).or_insert(thinks.into());
    }
    let messages = messages.into_iter().map(|message| known_role(message, speech)).collect();
    Conversation { messages, kwargs, ..Conversation::default() }
}

/// # Errors
/// As [`chat`].
pub fn completion(
    app: &App,
    body: Map<String, Value>,
    headers: &HeaderMap,
    request_id: String,
) -> Result<Completion, ApiError> {
    let engine = app.engine()?;
    let mut problems = Problems::new(app.settings().lenient);
    let mut fields = Fields::new(body, &mut problems);
    let model = check_model(app, &mut fields);
    let prompts = prompts(&mut fields);
    let defaults = Limits { max_tokens: Some(COMPLETION_TOKENS), ..Limits::default() };
    let common = common(app, &engine, &mut fields, defaults);
    let most = most_answers(&engine);
    if prompts.len() * common.num_choices > most {
        fields.out_of_range("prompt", &format!("and n together ask for more than {most} answers"));
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
    Ok(Completion { ask: common.ask(Prompt::Texts(prompts), request_id), streaming, echo })
}

impl Common {
    fn ask(self, prompt: Prompt, request_id: String) -> Ask {
        let Self { num_choices, sampling, limits, logprobs, shape, streaming } = self;
        Ask {
            prompt,
            num_choices,
            sampling,
            limits,
            logprobs,
            shape,
            request_id,
            is_streamed: streaming.is_on,
            session: None,
            tools: ToolUse::default(),
        }
    }
}

fn common(app: &App, engine: &EngineHandle, fields: &mut Fields<'_>, limits: Limits) -> Common {
    let limits = Limits { deadline: app.settings().deadline, ..limits };
    let common = Common {
        num_choices: num_choices(fields, most_answers(engine)),
        sampling: params::sampling(fields, &app.model().defaults.sampling()),
        limits: params::limits(fields, &limits),
        logprobs: params::logprobs(fields, None),
        shape: shape(fields),
        streaming: streaming(fields),
    };
    params::labels(fields);
    check_ranges(&common.sampling, engine.spec().vocab_size(), fields.problems());
    common
}

/// `response_format`, or one of this server's own: `regex`, `lark`, and `grammar`, which is `lark` by another name.
fn shape(fields: &mut Fields<'_>) -> Option<Shape> {
    let format = params::response_format(fields, None);
    let format = format.map(|source| Shape { source, param: "response_format" });
    let regex = fields.text("regex").map(|text| Shape { source: GrammarSource::Regex(text), param: "regex" });
    let lark = ["lark", "grammar"]
        .map(|param| fields.text(param).map(|text| Shape { source: GrammarSource::Lark(text), param }));
    let mut shapes = [format, regex].into_iter().chain(lark).flatten();
    let shape = shapes.next();
    if let Some(second) = shapes.next() {
        fields.out_of_range(second.param, "is a second form, and an answer has one");
    }
    shape
}

/// `tools` with how they may be called.
fn tools(app: &App, fields: &mut Fields<'_>) -> ToolUse {
    let definitions = fields.list("tools").unwrap_or_default();
    for (index, definition) in definitions.iter().enumerate() {
        check_tool(fields, &format!("tools[{index}]"), definition);
    }
    let choice = tool_choice(fields, &definitions);
    let parallel = fields.flag("parallel_tool_calls").unwrap_or(true);
    let tools = ToolUse { definitions, choice, parallel };
    let speech = &app.model().speech;
    if tools.is_on() && !speech.shows_tools() {
        let why = "are not shown to the model by its chat template (--tool-format generic describes them)";
        fields.unsupported("tools", why);
    }
    tools
}

fn check_tool(fields: &mut Fields<'_>, at: &str, definition: &Value) {
    let Value::Object(members) = definition else { return fields.wrong(at, "is not an object") };
    let mut tool = fields.inside(at, members.clone());
    tool.only("type", &[json!("function")]);
    tool.take("cache_control"); // a hint: what a prompt begins with is kept anyway
    let Some(function) = tool.object("function") else { return tool.wrong("function", "is missing") };
    let mut function = tool.inside("function", function);
    match function.text("name") {
        Some(name) if !name.is_empty() => {}
        Some(_) => function.out_of_range("name", "is empty"),
        None => function.wrong("name", "is missing"),
    }
    function.text("description");
    function.object("parameters");
    function.flag("strict");
    function.end();
    tool.end();
}

fn tool_choice(fields: &mut Fields<'_>, definitions: &[Value]) -> ToolChoice {
    let choice = match fields.take("tool_choice") {
        None => return ToolChoice::Auto,
        Some(Value::String(word)) => match word.as_str() {
            "auto" => return ToolChoice::Auto,
            "none" => return ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => {
                fields.out_of_range("tool_choice", "is none of none, auto, required and a function");
                return ToolChoice::Auto;
            }
        },
        Some(Value::Object(choice)) if choice.get("type").is_some_and(|kind| *kind != "function") => {
            fields.unsupported("tool_choice", "of this type is not supported, only of type function");
            return ToolChoice::Auto;
        }
        Some(choice) => match choice["function"]["name"].as_str() {
            Some(name) => ToolChoice::Named(name.to_owned()),
            None => {
                fields.wrong(
                    "tool_choice",
                    "is neither a word nor {\"type\": \"function\", \"function\": {\"name\": ...}}",
                );
                return ToolChoice::Auto;
            }
        },
    };
    let is_known = match &choice {
        ToolChoice::Named(name) => {
            definitions.iter().any(|tool| tool["function"]["name"].as_str() == Some(name.as_str()))
        }
        _ => !definitions.is_empty(),
    };
    if !is_known {
        fields.out_of_range("tool_choice", "asks for a tool that is not among the tools");
    }
    choice
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

/// More than may run and wait could never be admitted together.
fn most_answers(engine: &EngineHandle) -> usize {
    let config = &engine.spec().config;
    config.max_running.saturating_add(config.max_waiting).min(MAX_CHOICES)
}

fn num_choices(fields: &mut Fields<'_>, most: usize) -> usize {
    match fields.size("n") {
        None => 1,
        Some(n) if (1..=most).contains(&n) => n,
        Some(_) => {
            fields.out_of_range("n", &format!("is not in [1, {most}]"));
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
    let is_known = speech.template_knows_role(Role::Developer.as_str()).unwrap_or(true);
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
