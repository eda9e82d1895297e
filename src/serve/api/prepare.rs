//! From an ask to tokens, a grammar and an engine: rendering, encoding, opening the conversation, compiling, and bringing the
//! session to the engine that it goes to. All that may take long or wait for a disk, and nothing that the engine computes: for
//! blocking threads.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::conversations::{Next, Opened, Placed};
use super::line::Turn;
use super::plain;
use super::turn::{Ask, InSession, Prompt, RawText, Session, Shape, ToolUse};
use super::voice::Ear;
use crate::runtime::grammar::{self, Grammar, GrammarCompiler, GrammarSource};
use crate::runtime::turn::session_chat::{PromptedTurn, SessionChat};
use crate::runtime::{AnswerForm, EngineClient, Error, Result};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::template::{Conversation, Dialect, ToolChoice};

/// An ask with tokens.
pub struct Prepared {
    /// Nothing when the engine was lost meanwhile.
    pub seat: Option<Seat>,
    pub prompts: Vec<PreparedPrompt>,
    pub turn: Option<(Opened, PromptedTurn)>,
    /// The engine's session that the requests are in.
    pub session: Option<String>,
    /// Where the turn goes.
    pub placed: Option<Placed>,
    /// What all answers keep to.
    pub grammar: Option<Grammar>,
    /// Special tokens that the ear must hear.
    pub markup: Arc<[u32]>,
}

/// The engine that an ask goes to, which knows its session.
#[derive(Clone)]
pub struct Seat {
    pub engine: EngineClient,
    /// Its number.
    pub index: usize,
    /// The session was with an engine that has been lost.
    pub is_brought_back: bool,
}

pub struct PreparedPrompt {
    pub tokens: Vec<u32>,
    /// As text, where it is to be known.
    pub text: String,
    pub ear: Ear,
}

/// `turn` is that of the stored session that the ask is in.
///
/// # Errors
/// Whatever is wrong with the prompt, the session or the grammar; 503 without an engine.
pub fn prepare(app: &App, ask: &Ask, turn: Option<Arc<Turn>>) -> Result<Prepared, ApiError> {
    let engine = app.engine()?;
    match &ask.prompt {
        Prompt::Texts(texts) => {
            let prompts = texts.iter().map(|text| prepare_text(app, text)).collect::<Result<_, _>>()?;
            let grammar = shaped(ask.shape.as_ref(), |source| app.grammars(&engine).compile(source))?;
            if let Some(Session::Transient(key)) = &ask.session {
                app.transients().note(key);
            }
            let (seat, markup) = (Some(Seat::of(app, engine)), Arc::default());
            Ok(Prepared { seat, prompts, turn: None, session: None, placed: None, grammar, markup })
        }
        Prompt::Chat(conversation) => prepare_chat(app, &engine, ask, conversation, turn),
    }
}

fn prepare_text(app: &App, text: &RawText) -> Result<PreparedPrompt, ApiError> {
    let chat_tokenizer = &app.model().chat_tokenizer;
    let (tokens, text) = match text {
        RawText::Text(text) => (chat_tokenizer.encode(text)?, text.clone()),
        RawText::Ids(ids) => (ids.clone(), chat_tokenizer.tokenizer().decode(ids, true)),
        RawText::Between { prefix, suffix } => {
            let missing = || ApiError::unsupported("suffix", "suffix: this model has no such tokens");
            (
                chat_tokenizer.infill().ok_or_else(missing)?.prompt(
                    chat_tokenizer.tokenizer(),
                    prefix,
                    suffix,
                )?,
                prefix.clone(),
            )
        }
    };
    Ok(PreparedPrompt { tokens, text, ear: Ear::plain() })
}

fn prepare_chat(
    app: &App,
    engine: &EngineClient,
    ask: &Ask,
    conversation: &Conversation,
    turn: Option<Arc<Turn>>,
) -> Result<Prepared, ApiError> {
    let model = app.model();
    if app.settings().refuses_special_tokens {
        plain::check(model.chat_tokenizer.tokenizer(), conversation)?;
    }
    let session = open(app, ask, conversation, turn)?;
    let fresh;
    let (session_chat, conversation) = match (&session, &ask.session) {
        (Some(opened), Some(Session::Stored(InSession { appends: true, .. }))) => {
            (&**opened, followed(opened, conversation))
        }
        (Some(opened), _) => (&**opened, conversation.clone()),
        (None, _) => {
            fresh = SessionChat::new(model.fingerprint.clone());
            (&fresh, conversation.clone())
        }
    };
    let turn = session_chat.prompt(&model.chat_tokenizer, conversation)?;
    let dialect =
        if ask.tools.is_on() { app.dialect() } else { Dialect { tool_calls: None, ..app.dialect() } };
    let form =
        AnswerForm { chat_tokenizer: &model.chat_tokenizer, dialect: &dialect, prompt_tail: turn.tail() };
    let compiler = app.grammars(engine);
    let shaped = shaped(ask.shape.as_ref(), |source| form.compile(compiler, source))?;
    let grammar = match ask.tools.is_on() {
        true => called(compiler, form, &ask.tools, ask.shape.as_ref())?,
        false => shaped,
    };
    // Also that of calls which nobody asked for: then it is text like any other.
    let markup = model.chat_tokenizer.markup(&app.dialect());
    let ear = Ear::new(dialect, ask.tools.heard(), turn.tail(), ask.is_streamed);
    let prompt = PreparedPrompt { tokens: turn.tokens().to_vec(), text: String::new(), ear };
    // Several answers are no turn: which of them the conversation goes on with, its next prompt says.
    let session = session.filter(|_| ask.num_choices == 1);
    let seat = match seat(app, session.as_ref()) {
        Err(error) if error.is_engine_down() => None,
        seat => Some(seat?),
    };
    let name = session.as_ref().map(Opened::engine_name);
    let placed = session.as_ref().map(|opened| opened.placed(turn.num_kept_turns()));
    let turn = session.map(|opened| (opened, turn));
    Ok(Prepared { seat, prompts: vec![prompt], turn, session: name, placed, grammar, markup })
}

/// The conversation that the ask is a turn of, where it is of one.
fn open(
    app: &App,
    ask: &Ask,
    conversation: &Conversation,
    turn: Option<Arc<Turn>>,
) -> Result<Option<Opened>, ApiError> {
    let model = &app.model().fingerprint;
    match &ask.session {
        None => Ok(None),
        Some(Session::Transient(key)) => {
            let strand = app.transients().open(key, model, &conversation.messages);
            Ok(strand.map(|(held, session_chat)| Opened::transient(held, session_chat)))
        }
        Some(Session::Stored(InSession { caller, name, appends })) => {
            let next = if *appends { Next::Append } else { Next::Whole(&conversation.messages) };
            let key = app.conversations().find(caller, name);
            Ok(Some(app.conversations().open(&key, model, next)?.in_turn(turn)))
        }
    }
}

/// The conversation so far and the new messages.
fn followed(session_chat: &SessionChat, added: &Conversation) -> Conversation {
    Conversation { messages: session_chat.followed_by(added.messages.clone()).messages, ..added.clone() }
}

impl Seat {
    fn of(app: &App, engine: EngineClient) -> Self {
        Self { index: app.engines().index_of(&engine), engine, is_brought_back: false }
    }
}

/// Finds the engine for a session, or for none, and tells it what the session held, if it does not know.
///
/// # Errors
/// 503 without an engine, or when it was lost meanwhile; what the engine refuses with.
pub fn seat(app: &App, session: Option<&Opened>) -> Result<Seat, ApiError> {
    let Some(opened) = session else { return Ok(Seat::of(app, app.engine()?)) };
    let name = opened.engine_name();
    let mut seat = Seat::of(app, app.engine_of(Some(&name))?);
    // What it parts from is shared to the token, and told where they part. Where that does not work out, what there is is found.
    if opened.parts_from().is_some_and(|from| seat.engine.fork_session(from, &name).is_ok()) {
        return Ok(seat);
    }
    let Some(tokens) = opened.saved().tokens_of(&app.model().fingerprint) else { return Ok(seat) };
    let was_with = app.conversations().resumes(&name).engine;
    match seat.engine.restore_session(&name, tokens) {
        Ok(()) => seat.is_brought_back = was_with.is_some_and(|engine| !app.engines().has(engine)),
        Err(Error::InvalidParameter { .. }) => {} // it knows the session already
        Err(Error::SessionsFull { .. }) if opened.is_transient() => {} // it is answered without
        Err(error) => {
            if matches!(error, Error::EngineGone) {
                app.engine_lost(&seat.engine);
            }
            return Err(error.into());
        }
    }
    Ok(seat)
}

/// The grammar of an answer's shape, if it has one; what is wrong with it is told of its parameter.
fn shaped(
    shape: Option<&Shape>,
    compile: impl Fn(&GrammarSource) -> Result<Grammar>,
) -> Result<Option<Grammar>, ApiError> {
    let compiled =
        |shape: &Shape| compile(&shape.source).map_err(|error| ApiError::from(error).param(shape.param));
    shape.map(compiled).transpose()
}

/// The grammar of an answer with tools, where there is something to hold it to. With a shape, an answer that may leave the
/// calls out has that shape instead.
fn called(
    compiler: &GrammarCompiler,
    form: AnswerForm<'_>,
    tools: &ToolUse,
    shape: Option<&Shape>,
) -> Result<Option<Grammar>, ApiError> {
    let AnswerForm { chat_tokenizer, dialect, prompt_tail } = form;
    let special = |text: &str| chat_tokenizer.special(text);
    let shape = shape.filter(|_| tools.choice == ToolChoice::Auto);
    let choice = if shape.is_some() { &ToolChoice::Required } else { &tools.choice };
    let otherwise =
        shape.map(|shape| form.lark(&shape.source).map_err(|error| ApiError::from(error).param(shape.param)));
    let otherwise = otherwise.transpose()?;
    let compile = |definitions: &[Value]| {
        let calls = dialect.tool_grammar(definitions, choice, tools.parallel, prompt_tail, &special);
        let whole = calls.map(|calls| match &otherwise {
            Some(form) => either(&calls, form),
            None => calls,
        });
        whole.map(|lark| compiler.compile(&GrammarSource::Lark(lark))).transpose()
    };
    let simplified: Vec<Value> =
        tools.definitions.iter().map(|tool| simplified(tool, tools.schema_open)).collect();
    match compile(&simplified) {
        Ok(None) if shape.is_some() => {
            let message = "response_format beside tools: calls in this model's format cannot be enforced; tool_choice \"none\" \
                           switches them off";
            Err(ApiError::unsupported("response_format", message))
        }
        Ok(None) if tools.choice != ToolChoice::Auto => {
            let message =
                "tool_choice: calls in this model's format cannot be enforced, only \"auto\" and \"none\"";
            Err(ApiError::unsupported("tool_choice", message))
        }
        Ok(None) if !tools.parallel => {
            let message = "parallel_tool_calls: calls in this model's format cannot be limited to one";
            Err(ApiError::unsupported("parallel_tool_calls", message))
        }
        // OpenAI promises arguments that follow their schema for strict tools alone.
        Err(Error::Grammar(_)) if !tools.definitions.iter().all(is_strict) => {
            let relaxed: Vec<Value> = simplified.iter().map(relaxed).collect();
            compile(&relaxed).map_err(|error| ApiError::from(error).param("tools"))
        }
        compiled => compiled.map_err(|error| ApiError::from(error).param("tools")),
    }
}

/// A grammar of what either of two allows; their rules have names of their own but for `start`.
fn either(calls: &str, form: &str) -> String {
    let renamed = |lark: &str, name: &str| {
        let rest = lark.strip_prefix("start:").unwrap_or(lark);
        format!("{name}:{rest}")
    };
    format!("start: calls | form\n{}\n{}\n", renamed(calls, "calls"), renamed(form, "form"))
}

fn is_strict(definition: &Value) -> bool {
    definition["function"]["strict"] == true
}

/// A tool whose parameters are without what constrains nothing, and have the members that they name unless they open their
/// objects, or all are `open`.
fn simplified(definition: &Value, open: bool) -> Value {
    let mut definition = definition.clone();
    if let Some(parameters) = definition.pointer_mut("/function/parameters") {
        let simple = grammar::simplified(parameters);
        *parameters = if open { simple } else { grammar::closed(&simple) };
    }
    definition
}

/// A tool of whose parameters only the names and types count, unless it is strict. The names have to stay: some notations
/// write nothing but members that are known.
fn relaxed(definition: &Value) -> Value {
    let mut definition = definition.clone();
    if is_strict(&definition) {
        return definition;
    }
    let given = definition["function"]["parameters"].take();
    let loose = |value: &Value| value.get("type").map_or_else(|| json!({}), |kind| json!({"type": kind}));
    let members = given["properties"].as_object().into_iter().flatten();
    let members: Map<String, Value> = members.map(|(name, value)| (name.clone(), loose(value))).collect();
    let mut parameters = json!({"type": "object"});
    if !members.is_empty() {
        parameters["properties"] = members.into();
        if given["required"].is_array() {
            parameters["required"] = given["required"].clone();
        }
        if given["additionalProperties"] == false {
            parameters["additionalProperties"] = false.into();
        }
    }
    definition["function"]["parameters"] = parameters;
    definition
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_whose_schema_cannot_be_enforced_keeps_its_names_and_types() {
        let tool = |strict: bool| {
            json!({"type": "function", "function": {"name": "f", "strict": strict, "parameters": {
                "type": "object", "required": ["tags"], "additionalProperties": false,
                "properties": {"tags": {"type": "array", "uniqueItems": true}, "any": {"minimum": 3}},
            }}})
        };
        assert_eq!(relaxed(&tool(true)), tool(true));
        let expected = json!({
            "type": "object", "properties": {"tags": {"type": "array"}, "any": {}}, "required": ["tags"],
            "additionalProperties": false,
        });
        assert_eq!(relaxed(&tool(false))["function"]["parameters"], expected);
    }
}
