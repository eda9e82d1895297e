//! Body of a response: the fields of the Responses API, and their meaning here.
//!
//! A response is stored unless `store` is false: in the session of `previous_response_id`, in one that the
//! client names, or in one of its own. What is not stored may be in a transient session, as headers or
//! `prompt_cache_key` name it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::super::body::{Incoming, session_of};
use super::super::generate::{GenerateRequest, Prompt, TurnNote};
use super::super::reply::Head;
use super::super::request::{self, AnswerParams, Reading, with_known_roles};
use super::stored::{self, StoredResponse};
use super::writer::ResponseWriter;
use crate::App;
use crate::error::ApiError;
use crate::gate::owner::Caller;
use crate::sessions::{InSession, RequestSession, TransientKey};
use crate::wire::fields::shown;
use crate::wire::responses::input;
use crate::wire::responses::items::response_of_item;
use crate::wire::responses::object::{ResponseShape, repeated, sampling_members};
use crate::wire::responses::tools::{ResponseTools, tools};
use crate::wire::switches::{Switches, switches};
use crate::wire::{Fields, shape};
use llmctl_engine::grammar::GrammarSource;
use llmctl_engine::session::store::{SessionName, now_ms};
use llmctl_engine::turn::{OutputConstraint, ToolUse};
use llmctl_engine::{Limits, MAX_LOGPROBS};
use llmctl_template::{Conversation, Message};

/// Most stored responses that the item references of a request may be of. Each is read from disk with its session.
const MAX_REFERENCED: usize = 256;

/// The field that constrains the text.
const FORMAT: &str = "text.format";

/// A request for a response.
pub struct ResponsesBody {
    pub request: GenerateRequest,
    pub writer: ResponseWriter,
}

/// Fields about storing.
struct Storing {
    store: Option<bool>,
    previous: Option<String>,
    session: Option<String>,
    cache_key: Option<String>,
}

/// Parts of the output that a body asks for besides the text.
struct Outputs {
    logprobs: Option<usize>,
    seals_reasoning: bool,
}

/// The fields of a body beside those of every API, read and checked.
struct AskedResponse {
    storing: Storing,
    instructions: Option<String>,
    input: Vec<Message>,
    kwargs: Map<String, Value>,
    /// Without its id.
    shape: ResponseShape,
}

/// Reads the body of a response.
///
/// # Errors
/// All that is wrong with the body, the first kind of it; 404 for a response or an item that is not stored; 503 without an engine.
pub fn read(app: &App, mut body: Map<String, Value>, incoming: Incoming) -> Result<ResponsesBody, ApiError> {
    resolve_references(app, &incoming.caller, &mut body)?;
    let (params, asked) = ask(app, body)?;
    let previous = asked.storing.previous(app, &incoming.caller)?;
    let session = asked.storing.session(app, previous.as_ref(), &incoming)?;
    let is_stored = matches!(session, Some(RequestSession::Stored(_)));
    let instructions = asked.instructions.map(Message::system).into_iter();
    let earlier = previous.map(|previous| previous.messages()).unwrap_or_default();
    let messages = with_known_roles(app, instructions.chain(earlier).chain(asked.input).collect());
    let tools = params.turn.tools.definitions.clone();
    let conversation = Conversation { messages, tools, kwargs: asked.kwargs, ..Conversation::default() };
    let mut shape = ResponseShape { id: stored::new_id(&session_name(session.as_ref())), ..asked.shape };
    let mut request = params.request(Prompt::Chat(conversation), session, incoming);
    shape.repeated.insert("store".to_owned(), is_stored.into());
    shape.repeated.extend(sampling_members(&request.turn.sampling()));
    let writer = ResponseWriter::new(Head::new(app, "resp"), shape, request.turn.logprobs.is_some());
    request.notices.splice(0..0, left_out(&request.ignored));
    request.note = is_stored.then(|| Arc::new(writer.clone()) as Arc<dyn TurnNote>);
    Ok(ResponsesBody { request, writer })
}

/// Reads the fields of a body.
fn ask(app: &App, body: Map<String, Value>) -> Result<(AnswerParams, AskedResponse), ApiError> {
    let mut repeated = repeated(&body);
    request::read_answer(app, body, |engine, fields| {
        let storing = Storing::read(fields);
        let instructions = fields.text("instructions");
        let input = read_input(fields, storing.previous.is_some());
        let ResponseTools { repeated: repeated_tools, names, inputs, .. } = tools(fields);
        let schema_open = shape::is_open(fields, app.settings().schema_open);
        let format = text_format(fields, schema_open);
        let outputs = Outputs::read(fields);
        labels_and_refusals(fields);
        let chat_tokenizer = &app.model().chat_tokenizer;
        let Switches { kwargs, reasoning } = chat_tokenizer
            .with_template(|template| switches(fields, template, app.settings().enable_thinking));
        let tools = ToolUse { inputs, ..request::tools(app, fields, schema_open) };
        let reading = Reading { schema_open, may_be_none: false };
        let mut params = request::params(app, engine, fields, Limits::default(), reading);
        if params.has_constraint() && format.is_some() {
            fields.out_of_range(FORMAT, "is a second form, and an answer has one");
        }
        repeated.insert("tools".to_owned(), repeated_tools.into());
        repeated.insert("model".to_owned(), app.model().id.as_str().into());
        params.turn.tools = tools;
        params.turn.logprobs = outputs.logprobs.or(params.turn.logprobs);
        params.turn.constraint = format.or(params.turn.constraint.take());
        params.turn.reasoning_budget = reasoning.budget;
        let shape = ResponseShape {
            id: String::new(),
            created_ms: now_ms(),
            repeated,
            names,
            shows_reasoning: reasoning.is_shown,
            seals_reasoning: outputs.seals_reasoning,
        };
        (params, AskedResponse { storing, instructions, input, kwargs, shape })
    })
}

/// Returns a notice for each type of items and tools that the request has for nothing.
fn left_out(ignored: &[String]) -> Vec<String> {
    let is_kind = |path: &&String| path.starts_with("input[].") || path.starts_with("tools[].");
    // Parts of items have notices of their own.
    let kinds = ignored.iter().filter(is_kind).filter(|path| path.matches("[]").count() == 1);
    kinds.map(|path| format!("{path} was left out, because this server has no use for it")).collect()
}

/// Reads `input`, which a request needs unless it continues a response.
fn read_input(fields: &mut Fields<'_>, continues: bool) -> Vec<Message> {
    if !fields.has("input") && !continues {
        fields.missing("input");
        return Vec::new();
    }
    let has_input = fields.has("input");
    let messages = input::input(fields);
    if messages.is_empty() && has_input && !continues {
        fields.out_of_range("input", "has no item that this server can use");
    }
    messages
}

impl Storing {
    fn read(fields: &mut Fields<'_>) -> Self {
        Self {
            store: fields.flag("store"),
            previous: fields.text("previous_response_id"),
            session: fields.text("session_id"),
            cache_key: fields.text("prompt_cache_key").filter(|key| !key.is_empty()),
        }
    }

    /// Finds the response that the request continues.
    fn previous(&self, app: &App, caller: &Caller) -> Result<Option<StoredResponse>, ApiError> {
        let Some(id) = &self.previous else { return Ok(None) };
        if self.session.is_some() {
            let message = "session_id: previous_response_id names the session already";
            return Err(ApiError::invalid("session_id", message));
        }
        let found = stored::find(app.sessions(), caller, id)?.ok_or_else(|| {
            let message = format!("Previous response with id {:?} not found.", shown(id));
            let code = Some("previous_response_not_found");
            ApiError::new(StatusCode::NOT_FOUND, code, message).param("previous_response_id")
        });
        found.map(Some)
    }

    /// Returns the session that the request is in.
    fn session(
        &self,
        app: &App,
        previous: Option<&StoredResponse>,
        incoming: &Incoming,
    ) -> Result<Option<RequestSession>, ApiError> {
        let caller = &incoming.caller;
        let named = session_of(self.session.clone(), false, &incoming.headers, caller)?;
        // Without room for more sessions, only a request that asks for storing is refused.
        let is_stored = self.store.unwrap_or_else(|| previous.is_some() || app.sessions().has_room());
        if !is_stored {
            if self.session.is_some() {
                let message = "session_id: a response that is not stored (store: false) is in no session";
                return Err(ApiError::invalid("session_id", message));
            }
            let hint = |key: &String| TransientKey::new(caller.owner().clone(), key.as_bytes());
            let key = match named {
                Some(RequestSession::Transient(key)) => Some(key),
                _ => self.cache_key.as_ref().map(hint),
            };
            let unstored = |key| RequestSession::Transient(TransientKey { is_memory_only: true, ..key });
            return Ok(key.map(unstored));
        }
        let name = match (previous, named) {
            (Some(previous), _) => previous.session.clone(),
            (None, Some(RequestSession::Stored(InSession { name, .. }))) => name,
            _ => SessionName::new(&stored::new_session())?,
        };
        Ok(Some(RequestSession::Stored(InSession { caller: caller.clone(), name, appends: false })))
    }
}

/// Returns the name that a response's id begins with.
fn session_name(session: Option<&RequestSession>) -> String {
    match session {
        Some(RequestSession::Stored(session)) => session.name.to_string(),
        _ => stored::new_session(),
    }
}

impl Outputs {
    fn read(fields: &mut Fields<'_>) -> Self {
        let top = fields.size("top_logprobs");
        if top.is_some_and(|top| top > MAX_LOGPROBS) {
            fields.out_of_range("top_logprobs", &format!("is not in [0, {MAX_LOGPROBS}]"));
        }
        let mut outputs = Self { logprobs: top.filter(|top| *top > 0), seals_reasoning: false };
        for included in fields.list("include").unwrap_or_default() {
            match included.as_str() {
                Some("reasoning.encrypted_content") => outputs.seals_reasoning = true,
                Some("message.output_text.logprobs") => outputs.logprobs = Some(top.unwrap_or(0)),
                Some(other) => fields.ignored(&format!("include.{}", shown(other))),
                None => fields.wrong("include", "is not an array of strings"),
            }
        }
        outputs
    }
}

/// Reads `text`: its verbosity goes where the chat template's switches are read.
fn text_format(fields: &mut Fields<'_>, schema_open: bool) -> Option<OutputConstraint> {
    let mut text = fields.nested("text")?;
    let source = text.nested("format").and_then(format_source);
    let verbosity = text.take("verbosity");
    text.end();
    if let Some(verbosity) = verbosity {
        fields.put("verbosity", verbosity);
    }
    let constraint = OutputConstraint { source: source?, param: FORMAT };
    Some(shape::closed(constraint, schema_open))
}

fn format_source(mut format: Fields<'_>) -> Option<GrammarSource> {
    let source = match format.text("type").as_deref() {
        None | Some("text") => None,
        Some("json_object") => Some(GrammarSource::JsonObject),
        Some("json_schema") => {
            ["name", "description"].iter().for_each(|label| drop(format.text(label)));
            format.flag("strict");
            let schema = format.object("schema");
            if schema.is_none() {
                format.missing("schema");
            }
            schema.map(|schema| GrammarSource::JsonSchema(Value::Object(schema)))
        }
        Some(_) => {
            format.unsupported("type", "is none of text, json_object and json_schema");
            None
        }
    };
    format.end();
    source
}

/// Takes the labels that the response repeats, and refuses by name the fields that this server does not support.
fn labels_and_refusals(fields: &mut Fields<'_>) {
    ["user", "safety_identifier"].iter().for_each(|name| drop(fields.text(name)));
    fields.object("metadata");
    // It limits tools that a server calls by itself, of which there are none here.
    fields.count("max_tool_calls");
    if fields.flag("background") == Some(true) {
        fields.unsupported("background", "= true is not supported: the response comes with its request");
    }
    fields.only("n", &[json!(1)]);
    for (name, instead) in [
        ("conversation", "is not supported: previous_response_id continues a response"),
        ("prompt", "is not supported: this server stores no prompts"),
    ] {
        if fields.take(name).is_some() {
            fields.unsupported(name, instead);
        }
    }
    match fields.text("truncation").as_deref() {
        None | Some("disabled") => {}
        // Nothing is dropped: a prompt that is too long is refused.
        Some("auto") => fields.ignored("truncation"),
        Some(_) => fields.out_of_range("truncation", "is neither auto nor disabled"),
    }
    fields.hint("context_management");
}

/// Puts stored items in the places of references to them. Reads each stored response once, however many items are of it.
///
/// # Errors
/// 404 for an item that is not stored; 400 for items of too many responses; storage errors.
fn resolve_references(app: &App, caller: &Caller, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(Value::Array(items)) = body.get_mut("input") else { return Ok(()) };
    let mut outputs = HashMap::new();
    for response in referenced(items)? {
        let found = stored::find(app.sessions(), caller, &response)?;
        let output = found.map_or(Value::Null, |found| found.object()["output"].clone());
        outputs.insert(response, output);
    }
    for (index, item) in items.iter_mut().enumerate().filter(|(_, item)| is_reference(item)) {
        let id = item["id"].as_str().unwrap_or_default();
        let stored = response_of_item(id).and_then(|(response, at)| outputs.get(response)?.get(at));
        let stored = stored.filter(|stored| stored["id"] == id).cloned();
        *item = stored.ok_or_else(|| {
            let param = format!("input[{index}].id");
            let message = format!("{param}: there is no stored item {:?}", shown(id));
            ApiError::new(StatusCode::NOT_FOUND, Some("item_not_found"), message).param(param)
        })?;
    }
    Ok(())
}

fn is_reference(item: &Value) -> bool {
    // The type may be left out.
    item["type"] == "item_reference" || item.as_object().is_some_and(|item| item.keys().eq(["id"]))
}

/// Returns the ids of the responses whose items are referred to.
fn referenced(items: &[Value]) -> Result<BTreeSet<String>, ApiError> {
    let ids = items.iter().filter(|item| is_reference(item)).filter_map(|item| item["id"].as_str());
    let responses: BTreeSet<String> =
        ids.filter_map(response_of_item).map(|(response, _)| response.to_owned()).collect();
    if responses.len() > MAX_REFERENCED {
        let message = format!("input refers to items of more than {MAX_REFERENCED} stored responses");
        return Err(ApiError::invalid("input", message));
    }
    Ok(responses)
}
