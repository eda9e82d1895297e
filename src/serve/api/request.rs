//! From bodies to requests: which fields OpenAI's chat and completions know, and what all APIs share.
//!
//! Every field is honoured or refused here, before any work. What is checked where: the form and the
//! ranges in `wire`, what depends on the model here, the context by the engine.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::body::{Incoming, session_of};
use super::generate::{GenerateRequest, Prompt};
use super::image_urls::problems;
use crate::App;
use crate::error::ApiError;
use crate::sessions::RequestSession;
use crate::wire::fields::shown;
use crate::wire::images::{self, ImagePiece, ImagePlace};
use crate::wire::switches::{AnswerReasoning, Switches, switches};
use crate::wire::{Fields, Problems, lora, message, options, params, shape, tools};
use llmctl_base::{Error, GivenSampling};
use llmctl_engine::turn::{AnswerStart, InfillPrompt, TextPrompt, ToolUse, TurnRequest};
use llmctl_engine::{ChatTokenizer, EngineClient, Limits, MAX_LOGPROBS, Overflow, draw_seed};
use llmctl_template::{Conversation, ImageRef, Message, Role};

/// OpenAI's default for completions, which its clients rely on.
const COMPLETION_TOKENS: usize = 16;

/// A chat completion.
pub struct ChatBody {
    pub request: GenerateRequest,
    pub streaming: Streaming,
    pub shows_reasoning: bool,
    /// Calls are asked for and told in OpenAI's older form.
    pub has_functions: bool,
}

/// A completion.
pub struct Completion {
    pub request: GenerateRequest,
    pub streaming: Streaming,
    /// Answers begin with their prompts.
    pub echo: bool,
    /// Answers have the ids of their tokens and of their prompts.
    pub returns_token_ids: bool,
}

/// Delivery of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    pub is_on: bool,
    /// The stream ends with a chunk of usage.
    pub includes_usage: bool,
    /// Each chunk tells the usage so far.
    pub usage_in_all: bool,
}

/// Parameters of an answer that every API has, under field names of its own.
pub struct AnswerParams {
    /// Answers to each prompt.
    pub num_choices: usize,
    pub turn: TurnRequest,
    pub streaming: Streaming,
    /// Fields that have no effect, and changes that were made to what the client sent.
    pub ignored: Vec<String>,
    pub notices: Vec<String>,
}

/// Reads a body that names a model of this server.
///
/// # Errors
/// All that is wrong with the body, the first kind of it.
pub fn read_body<T>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&mut Fields<'_>) -> T,
) -> Result<(T, Problems), ApiError> {
    problems(app).read(body, |fields| {
        check_model(app, fields);
        read(fields)
    })
}

/// Reads a body that asks for an answer: its parameters and what else `read` finds, then its images.
///
/// # Errors
/// As [`read_body`]; 503 without an engine.
pub fn read_answer<T>(
    app: &App,
    body: Map<String, Value>,
    read: impl FnOnce(&EngineClient, &mut Fields<'_>) -> (AnswerParams, T),
) -> Result<(AnswerParams, T), ApiError> {
    let engine = app.engine()?;
    let ((mut params, rest), mut problems) = read_body(app, body, |fields| read(&engine, fields))?;
    params.turn.images = problems.images().decode()?;
    (params.ignored, params.notices) = (problems.take_ignored(), problems.take_notices());
    Ok((params, rest))
}

/// Reads the body of a chat completion.
///
/// # Errors
/// All that is wrong with the body, the first kind of it; `invalid_session_id`; 503 without an engine.
pub fn chat(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<ChatBody, ApiError> {
    let (params, (conversation, shows_reasoning, has_functions, session)) =
        read_answer(app, body, |engine, fields| {
            let (mut conversation, reasoning) = conversation_without_tools(app, fields);
            let answer_start = message::continued(fields, &mut conversation.messages);
            let schema_open = shape::is_open(fields, app.settings().schema_open);
            let has_functions = fields.has("functions");
            let tools = tools(app, fields, schema_open);
            conversation.tools = tools.definitions.clone();
            let reading = Reading { schema_open, may_be_none: false };
            let mut params = params(app, engine, fields, Limits::default(), reading);
            let has_constraint = params.has_constraint();
            message::check_continued(fields, "continue_final_message", &answer_start, has_constraint);
            params.turn =
                TurnRequest { tools, answer_start, reasoning_budget: reasoning.budget, ..params.turn };
            fields.only("modalities", &[json!(["text"])]);
            ["echo", "add_special_tokens"].iter().for_each(|name| fields.only(name, &[false.into()]));
            fields.only("suffix", &[json!("")]);
            let session = (fields.text("session_id"), fields.flag("session_append").unwrap_or(false));
            (params, (conversation, reasoning.is_shown, has_functions, session))
        })?;
    let (in_body, appends) = session;
    let session = session_of(in_body, appends, &incoming.headers, &incoming.caller)?;
    check_session(session.as_ref(), appends, params.num_choices)?;
    let streaming = params.streaming;
    let request = params.request(Prompt::Chat(conversation), session, incoming);
    Ok(ChatBody { request, streaming, shows_reasoning, has_functions })
}

/// Reads the inputs of the chat template, and how the answer begins.
pub fn conversation(app: &App, fields: &mut Fields<'_>) -> (Conversation, AnswerStart) {
    let (mut conversation, _) = conversation_without_tools(app, fields);
    let answer_start = message::continued(fields, &mut conversation.messages);
    (Conversation { tools: tools(app, fields, false).definitions, ..conversation }, answer_start)
}

/// Returns the conversation, and the reasoning that is asked for.
fn conversation_without_tools(app: &App, fields: &mut Fields<'_>) -> (Conversation, AnswerReasoning) {
    let (messages, switched) = app.model().chat_tokenizer.with_template(|template| {
        let messages = message::messages(fields, template.says);
        (messages, switches(fields, template, app.settings().enable_thinking))
    });
    let Switches { kwargs, reasoning } = switched;
    let messages = with_known_roles(app, messages);
    (Conversation { messages, kwargs, ..Conversation::default() }, reasoning)
}

/// Reads the body of a completion.
///
/// # Errors
/// As [`chat`].
pub fn completion(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<Completion, ApiError> {
    let (params, (prompts, echo, returns_token_ids, in_body)) = read_answer(app, body, |engine, fields| {
        let prompts = prompts(fields);
        let prompts = between(fields, prompts, &app.model().chat_tokenizer);
        let echo = fields.flag("echo").unwrap_or(false);
        let returns_token_ids = fields.flag("return_token_ids").unwrap_or(false);
        let defaults = Limits { max_tokens: Some(COMPLETION_TOKENS), ..Limits::default() };
        let schema_open = shape::is_open(fields, app.settings().schema_open);
        let params = params(app, engine, fields, defaults, Reading { schema_open, may_be_none: echo });
        let most = most_answers(engine);
        if prompts.len() * params.num_choices > most {
            fields.out_of_range("prompt", &format!("and n together ask for more than {most} answers"));
        }
        fields.only("add_special_tokens", &[json!(true)]);
        (params, (prompts, echo, returns_token_ids, fields.text("session_id")))
    })?;
    let session = no_conversation(in_body, &incoming)?;
    let streaming = params.streaming;
    // A request for no tokens is a request for the prompt's log-probabilities.
    let asks_for_none = params.turn.limits.max_tokens == Some(0);
    let prompt_logprobs = params.turn.logprobs.or(asks_for_none.then_some(0));
    let prompt_logprobs = prompt_logprobs.filter(|_| echo);
    // Log-probabilities of a prompt need it computed in full, so a transient session is ignored.
    let session = session.filter(|_| prompt_logprobs.is_none());
    let mut request = params.request(Prompt::Texts(prompts), session, incoming);
    request.turn.prompt_logprobs = prompt_logprobs;
    Ok(Completion { request, streaming, echo, returns_token_ids })
}

/// A request for the text between two others.
pub struct InfillBody {
    pub request: GenerateRequest,
    /// The members of the response that the client wants; empty for all.
    pub wanted: Vec<String>,
}

/// Reads llama.cpp's request for the text between two others.
///
/// # Errors
/// As [`chat`].
pub fn infill(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<InfillBody, ApiError> {
    let (params, (prompt, wanted)) = read_answer(app, body, |engine, fields| {
        let prompt = infill_prompt(fields);
        if app.model().chat_tokenizer.infill().is_none() {
            fields
                .unsupported("input_prefix", "is not supported: this model has no fill-in-the-middle tokens");
        }
        let wanted = llama_cpp(fields);
        let params = plain_params(app, engine, fields);
        if params.num_choices > 1 {
            fields.unsupported("n", "is not supported: the response holds one text");
        }
        if params.turn.logprobs.is_some() {
            fields.unsupported("logprobs", "is not supported, nor n_probs: the response holds text alone");
        }
        (params, (Prompt::Texts(vec![TextPrompt::Infill(prompt)]), wanted))
    })?;
    Ok(InfillBody { request: plain_request(params, prompt, incoming)?, wanted })
}

/// Returns the session of a text, which belongs to no stored one.
///
/// # Errors
/// `invalid_session_id`; 400 for a stored session.
pub fn no_conversation(
    in_body: Option<String>,
    incoming: &Incoming,
) -> Result<Option<RequestSession>, ApiError> {
    match session_of(in_body, false, &incoming.headers, &incoming.caller)? {
        Some(RequestSession::Stored(_)) => {
            let message = "a session is a conversation, which /v1/chat/completions continues";
            Err(ApiError::unsupported("session_id", message))
        }
        other => Ok(other),
    }
}

/// Makes a request in llama.cpp's form. One for no tokens computes the prompt.
fn plain_request(
    params: AnswerParams,
    prompt: Prompt,
    incoming: Incoming,
) -> Result<GenerateRequest, ApiError> {
    let prompt_logprobs = (params.turn.limits.max_tokens == Some(0)).then_some(0);
    let session = no_conversation(None, &incoming)?.filter(|_| prompt_logprobs.is_none());
    let mut request = params.request(prompt, session, incoming);
    request.turn.prompt_logprobs = prompt_logprobs;
    Ok(request)
}

/// Takes hints that llama.cpp's clients send with each request: limits of time, and indentation. Returns the members of the
/// response that are asked for; none for all.
fn llama_cpp(fields: &mut Fields<'_>) -> Vec<String> {
    for name in ["n_indent", "t_max_prompt_ms", "t_max_predict_ms"] {
        fields.hint(name);
    }
    let wanted = fields.list("response_fields").unwrap_or_default();
    wanted.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Reads the shared fields of an API without defaults of its own.
fn plain_params(app: &App, engine: &EngineClient, fields: &mut Fields<'_>) -> AnswerParams {
    let schema_open = shape::is_open(fields, app.settings().schema_open);
    params(app, engine, fields, Limits::default(), Reading { schema_open, may_be_none: true })
}

/// A completion in llama.cpp's form.
pub struct NativeBody {
    pub request: GenerateRequest,
    /// The members of the response that the client wants; empty for all.
    pub wanted: Vec<String>,
    pub returns_tokens: bool,
    /// The prompts are a list.
    pub is_list: bool,
}

/// Reads llama.cpp's request to go on with texts.
///
/// # Errors
/// As [`chat`].
pub fn native(app: &App, body: Map<String, Value>, incoming: Incoming) -> Result<NativeBody, ApiError> {
    let (params, (prompts, wanted, returns_tokens)) = read_answer(app, body, |engine, fields| {
        let prompts = prompts(fields);
        let wanted = llama_cpp(fields);
        let num_probs = fields.size("n_probs").filter(|count| *count > 0);
        if num_probs.is_some_and(|count| count > MAX_LOGPROBS) {
            fields.out_of_range("n_probs", &format!("is not in [0, {MAX_LOGPROBS}]"));
        }
        let returns_tokens = fields.flag("return_tokens").unwrap_or(false);
        let mut params = plain_params(app, engine, fields);
        if params.num_choices > 1 || prompts.len() > most_answers(engine) {
            fields.unsupported("n", "is not supported: each prompt has one text");
        }
        params.turn.logprobs = num_probs.or(params.turn.logprobs);
        (params, (prompts, wanted, returns_tokens))
    })?;
    let is_list = prompts.len() > 1;
    let request = plain_request(params, Prompt::Texts(prompts), incoming)?;
    Ok(NativeBody { request, wanted, returns_tokens, is_list })
}

fn infill_prompt(fields: &mut Fields<'_>) -> InfillPrompt {
    let mut files = Vec::new();
    for (index, file) in fields.list("input_extra").unwrap_or_default().into_iter().enumerate() {
        let at = format!("input_extra[{index}]");
        let Value::Object(members) = file else {
            fields.wrong(&at, "is not an object");
            continue;
        };
        let mut file = fields.inside(&at, members);
        let name = file.text("filename").unwrap_or_default();
        match file.text("text") {
            Some(text) => files.push((name, text)),
            None => file.missing("text"),
        }
        file.hint("time");
        file.end();
    }
    for name in ["input_prefix", "input_suffix"] {
        fields.require(name);
    }
    let mut text = |name: &str| fields.text(name).unwrap_or_default();
    InfillPrompt { files, prefix: text("input_prefix"), suffix: text("input_suffix"), begun: text("prompt") }
}

impl AnswerParams {
    /// Creates the parameters of one answer.
    pub fn new(turn: TurnRequest, streaming: Streaming) -> Self {
        Self { num_choices: 1, turn, streaming, ignored: Vec::new(), notices: Vec::new() }
    }

    pub fn has_constraint(&self) -> bool {
        self.turn.constraint.is_some()
    }

    /// Makes the request of a prompt.
    pub fn request(
        self,
        prompt: Prompt,
        session: Option<RequestSession>,
        incoming: Incoming,
    ) -> GenerateRequest {
        let Self { num_choices, turn, streaming, ignored, notices } = self;
        let texts: &[TextPrompt] = if let Prompt::Texts(texts) = &prompt { texts } else { &[] };
        // Drawn here, so that a header can tell it before the answer. Each of several prompts draws its own.
        let seed = turn.sampling.seed.or_else(|| (texts.len() <= 1).then(draw_seed));
        let is_infill = texts.iter().any(TextPrompt::is_infill);
        let below = if is_infill { GivenSampling::GREEDY } else { GivenSampling::default() };
        let sampling = GivenSampling { seed, ..turn.sampling.or(&below) };
        let turn = TurnRequest { sampling, is_streamed: streaming.is_on, ..turn };
        let Incoming { request_id, begun, .. } = incoming;
        let note = None;
        GenerateRequest { prompt, turn, num_choices, session, request_id, begun, ignored, notices, note }
    }
}

/// Settings for reading the shared fields.
#[derive(Clone, Copy)]
pub struct Reading {
    /// Schemas as their standard has it.
    pub schema_open: bool,
    /// `max_tokens` may be 0.
    pub may_be_none: bool,
}

/// Reads the fields that OpenAI's endpoints share, all but the tools.
pub fn params(
    app: &App,
    engine: &EngineClient,
    fields: &mut Fields<'_>,
    limits: Limits,
    reading: Reading,
) -> AnswerParams {
    let limits = with_settings(app, limits);
    let defaults = &app.model().defaults;
    let (sampling, limits) = options::generation(fields, defaults, &limits, reading.may_be_none);
    let num_choices = params::num_choices(fields, most_answers(engine));
    let turn = TurnRequest {
        sampling,
        limits,
        logprobs: params::logprobs(fields, None),
        constraint: shape::shape(fields, reading.schema_open),
        prediction: params::prediction(fields),
        adapters: lora::adapters(&engine.spec().model.adapters, fields),
        ..TurnRequest::default()
    };
    let streaming = streaming(fields);
    params::labels(fields);
    check_ranges(&turn.sampling, engine.spec().vocab_size(), fields.problems());
    AnswerParams { num_choices, ..AnswerParams::new(turn, streaming) }
}

/// Returns limits with what the server's settings say of all requests.
pub fn with_settings(app: &App, limits: Limits) -> Limits {
    let settings = app.settings();
    let overflow = if settings.strict_limits { Overflow::Refuse } else { Overflow::Clamp };
    Limits { deadline: settings.deadline, overflow, loop_guard: settings.loop_guard, ..limits }
}

/// Reads the sampling and checks the engine's ranges.
pub fn sampling(app: &App, engine: &EngineClient, fields: &mut Fields<'_>) -> GivenSampling {
    let sampling = params::sampling(fields, &app.model().defaults);
    check_ranges(&sampling, engine.spec().vocab_size(), fields.problems());
    sampling
}

/// Reads `tools` with how they may be called.
pub fn tools(app: &App, fields: &mut Fields<'_>, schema_open: bool) -> ToolUse {
    let tools = tools::tools(fields, schema_open);
    check_tools(app, fields, &tools);
    tools
}

/// Refuses tools that the chat template does not show to the model.
pub fn check_tools(app: &App, fields: &mut Fields<'_>, tools: &ToolUse) {
    if tools.is_on() && !app.model().chat_tokenizer.shows_tools() {
        let why = "are not shown to the model by its chat template (--tool-format generic describes them)";
        fields.unsupported("tools", why);
    }
}

/// Checks the ranges of the engine before the engine is asked.
pub fn check_ranges(sampling: &GivenSampling, vocab_size: usize, problems: &mut Problems) {
    match sampling.sampling(true).validate(vocab_size) {
        Ok(()) => {}
        Err(Error::InvalidParameter { name, message }) => problems.value(name, format!("{name}: {message}")),
        Err(other) => problems.value("", other.to_string()),
    }
}

/// Takes the model's name. The only model that writes text also answers to names that are no other
/// model's, because many clients are set to one; then the field has no effect.
fn check_model(app: &App, fields: &mut Fields<'_>) {
    let Some(model) = fields.text("model") else { return };
    match () {
        () if app.answers_to(&model) || name_adapter(app, &model, fields) => {}
        () if app.knows_other(&model) => fields.problems().no_model(model_not_found(&model, &app.model().id)),
        () => fields.ignored("model"),
    }
}

/// Lets a request use the adapter alone that stands behind the model's name, as in `MODEL:ADAPTER`. Returns false if none does.
fn name_adapter(app: &App, model: &str, fields: &mut Fields<'_>) -> bool {
    let Some((_, name)) = model.rsplit_once(':').filter(|(base, _)| app.answers_to(base)) else {
        return false;
    };
    app.engine().is_ok_and(|engine| lora::name(&engine.spec().model.adapters, name, fields))
}

pub fn model_not_found(model: &str, served: &str) -> ApiError {
    let message = format!(
        "the model {:?} does not exist here; {served:?} does (serve --alias accepts other names)",
        shown(model)
    );
    ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).param("model")
}

/// More than may run and wait could never be admitted together.
fn most_answers(engine: &EngineClient) -> usize {
    let config = &engine.spec().config;
    config.max_running.saturating_add(config.max_waiting).min(params::MAX_CHOICES)
}

fn streaming(fields: &mut Fields<'_>) -> Streaming {
    let is_on = fields.flag("stream").unwrap_or(false);
    let options = fields.object("stream_options").unwrap_or_default();
    let mut options = fields.inside("stream_options", options);
    let includes_usage = options.flag("include_usage").unwrap_or(false);
    let usage_in_all = options.flag("continuous_usage_stats").unwrap_or(false);
    if options.flag("include_obfuscation") == Some(true) {
        options.ignored("include_obfuscation"); // padding against eavesdroppers who measure sizes: never sent
    }
    options.end();
    Streaming { is_on, includes_usage, usage_in_all: includes_usage && usage_in_all }
}

/// Replaces `developer`, OpenAI's newer word for `system`, for templates that do not know it and would
/// print nothing.
pub fn with_known_roles(app: &App, mut messages: Vec<Message>) -> Vec<Message> {
    let chat_tokenizer = &app.model().chat_tokenizer;
    if !chat_tokenizer.template_knows_role(Role::Developer.as_str()).unwrap_or(true) {
        let unknown = messages.iter_mut().filter(|message| message.role == Role::Developer);
        unknown.for_each(|message| message.role = Role::System);
    }
    messages
}

/// Checks a session against the rest of its request.
///
/// # Errors
/// `session_append` without a stored session; several answers in one.
pub fn check_session(
    session: Option<&RequestSession>,
    appends: bool,
    num_choices: usize,
) -> Result<(), ApiError> {
    match session {
        None if appends => {
            let message = "session_append: there is no session to append to; give session_id or a header";
            Err(ApiError::invalid("session_append", message))
        }
        Some(RequestSession::Transient(_)) if appends => {
            let message = "session_append: the session is a transient one, as a header of the client says, and keeps \
                           nothing to append to; give session_id";
            Err(ApiError::invalid("session_append", message))
        }
        Some(RequestSession::Stored(_)) if num_choices > 1 => {
            let message = "n: a session continues with one answer, so n cannot be more than 1 in one";
            Err(ApiError::unsupported("n", message))
        }
        _ => Ok(()),
    }
}

/// A text, ids, both in one list, or a list of these.
fn prompts(fields: &mut Fields<'_>) -> Vec<TextPrompt> {
    let prompts = match fields.take("prompt") {
        None => {
            fields.missing("prompt");
            return Vec::new();
        }
        Some(Value::Array(items)) if items.is_empty() => {
            fields.out_of_range("prompt", "is empty");
            return Vec::new();
        }
        Some(Value::Object(members)) => Some(vec![text_with_images(fields.inside("prompt", members))]),
        Some(all) => {
            raw_text(&all).map(|it| vec![it]).or_else(|| all.as_array()?.iter().map(raw_text).collect())
        }
    };
    if prompts.is_none() {
        fields.wrong("prompt", "is neither text, nor token ids, nor an array of them");
    }
    prompts.unwrap_or_default()
}

/// With `suffix`, what stands between it and each prompt is asked for.
fn between(
    fields: &mut Fields<'_>,
    prompts: Vec<TextPrompt>,
    chat_tokenizer: &ChatTokenizer,
) -> Vec<TextPrompt> {
    let Some(suffix) = fields.text("suffix").filter(|suffix| !suffix.is_empty()) else { return prompts };
    if chat_tokenizer.infill().is_none() {
        fields.unsupported("suffix", "is not supported: this model has no fill-in-the-middle tokens");
    }
    let texts = prompts.into_iter().map(|prompt| match prompt {
        TextPrompt::Text(prefix) => {
            let suffix = suffix.clone();
            Some(TextPrompt::Infill(InfillPrompt { prefix, suffix, ..InfillPrompt::default() }))
        }
        TextPrompt::Ids(_) | TextPrompt::WithImages { .. } | TextPrompt::Infill(_) => None,
    });
    let texts: Option<Vec<TextPrompt>> = texts.collect();
    if texts.is_none() {
        fields.out_of_range("suffix", "needs prompts that are text, not token ids");
    }
    texts.unwrap_or_default()
}

/// Reads llama.cpp's form of a text with images, whose places the text marks.
fn text_with_images(mut prompt: Fields<'_>) -> TextPrompt {
    prompt.require("prompt_string");
    let text = prompt.text("prompt_string").unwrap_or_default();
    let images = images::list(&mut prompt, "multimodal_data", ImagePlace::User);
    prompt.end();
    let image = |piece| match piece {
        ImagePiece::Image(part) => ImageRef::of(&part),
        ImagePiece::Text(_) => None,
    };
    TextPrompt::WithImages { text, images: images.into_iter().filter_map(image).collect() }
}

/// Reads a text, or token ids, with texts among them as llama.cpp takes them; `None` for a list of texts alone.
fn raw_text(value: &Value) -> Option<TextPrompt> {
    let part = |items: &[Value]| match items {
        [ids @ .., Value::String(text)] => Some((token_ids(ids)?, text.clone())),
        ids => Some((token_ids(ids)?, String::new())),
    };
    match value {
        Value::String(text) => Some(TextPrompt::Text(text.clone())),
        Value::Array(items) if items.is_empty() || items.iter().any(Value::is_number) => {
            let parts = items.chunk_by(|before, _| before.is_number()).map(part);
            parts.collect::<Option<_>>().map(TextPrompt::Ids)
        }
        _ => None,
    }
}

pub fn token_ids(items: &[Value]) -> Option<Vec<u32>> {
    items.iter().map(|item| u32::try_from(item.as_u64()?).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_texts_in_one_list_are_one_prompt() {
        let read = |prompt: Value| {
            let body = Map::from_iter([("prompt".to_owned(), prompt)]);
            Problems::new(false).read(body, prompts).map(|(prompts, _)| prompts)
        };
        let part = |ids: &[u32], text: &str| (ids.to_vec(), text.to_owned());
        let mixed = TextPrompt::Ids(vec![part(&[12, 34], "a"), part(&[], "b"), part(&[56], "")]);
        assert_eq!(read(json!([12, 34, "a", "b", 56])).as_deref(), Ok(&[mixed.clone()][..]));
        let two = [mixed, TextPrompt::Ids(vec![part(&[7], "")])];
        assert_eq!(read(json!([[12, 34, "a", "b", 56], [7]])).as_deref(), Ok(&two[..]));
        let begun = TextPrompt::Ids(vec![part(&[], "a"), part(&[1], "")]);
        assert_eq!(read(json!(["a", 1])).as_deref(), Ok(&[begun][..]));
        let texts = ["a", "b"].map(|text| TextPrompt::Text(text.to_owned()));
        assert_eq!(
            read(json!(["a", "b"])).as_deref(),
            Ok(&texts[..]),
            "texts alone are prompts of their own"
        );
        for bad in [json!(["a", -1]), json!([["a"]]), json!([1, "a", null]), json!(["a", [1, [2]]])] {
            let error = read(bad).expect_err("no prompt");
            assert!(error.message.contains("prompt is neither text, nor token ids"), "{error:?}");
        }
    }
}
