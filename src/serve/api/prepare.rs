//! From an ask to tokens and a grammar: rendering, encoding, opening the conversation, compiling. All that may take long or
//! wait for a disk, and nothing that the engine computes: for blocking threads.

use std::sync::Arc;

use serde_json::{Value, json};

use super::conversations::Opened;
use super::turn::{Ask, InSession, Prompt, RawText, Shape, ToolUse};
use super::voice::Ear;
use crate::runtime::grammar::{Grammar, GrammarCompiler, GrammarSource};
use crate::runtime::session::conversation::{Dialogue, PromptedTurn};
use crate::runtime::{EngineHandle, Error, Result, Speech};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::template::{Conversation, Dialect, ToolChoice};

/// An ask with tokens.
pub struct Prepared {
    pub engine: EngineHandle,
    pub prompts: Vec<PreparedPrompt>,
    pub turn: Option<(Opened, PromptedTurn)>,
    /// What all answers keep to.
    pub grammar: Option<Grammar>,
    /// Special tokens that the ear must hear.
    pub markup: Arc<[u32]>,
}

pub struct PreparedPrompt {
    pub tokens: Vec<u32>,
    /// As text, where it is to be known.
    pub text: String,
    pub ear: Ear,
}

/// # Errors
/// Whatever is wrong with the prompt, the session or the grammar; 503 without an engine.
pub fn prepare(app: &App, ask: &Ask) -> Result<Prepared, ApiError> {
    let engine = app.engine()?;
    match &ask.prompt {
        Prompt::Texts(texts) => {
            let prompts = texts.iter().map(|text| prepare_text(app, text)).collect::<Result<_, _>>()?;
            let grammar = shaped(app.grammars(&engine), ask.shape.as_ref(), None)?;
            Ok(Prepared { engine, prompts, turn: None, grammar, markup: Arc::default() })
        }
        Prompt::Chat(conversation) => prepare_chat(app, engine, ask, conversation),
    }
}

fn prepare_text(app: &App, text: &RawText) -> Result<PreparedPrompt, ApiError> {
    let speech = &app.model().speech;
    let (tokens, text) = match text {
        RawText::Text(text) => (speech.encode(text)?, text.clone()),
        RawText::Ids(ids) => (ids.clone(), speech.tokenizer().decode(ids, true)),
    };
    Ok(PreparedPrompt { tokens, text, ear: Ear::plain() })
}

fn prepare_chat(
    app: &App,
    engine: EngineHandle,
    ask: &Ask,
    conversation: &Conversation,
) -> Result<Prepared, ApiError> {
    let model = app.model();
    let session = match &ask.session {
        None => None,
        Some(session) => Some(open(app, &engine, session)?),
    };
    let fresh;
    let (dialogue, conversation) = match (&session, &ask.session) {
        (Some(opened), Some(InSession { appends: true, .. })) => (&**opened, followed(opened, conversation)),
        (Some(opened), _) => (&**opened, conversation.clone()),
        (None, _) => {
            fresh = Dialogue::new(model.fingerprint.clone());
            (&fresh, conversation.clone())
        }
    };
    let turn = dialogue.prompt(&model.speech, conversation)?;
    let dialect =
        if ask.tools.is_on() { app.dialect() } else { Dialect { tool_calls: None, ..app.dialect() } };
    let grammar = match ask.tools.is_on() {
        true => called(app.grammars(&engine), &dialect, &ask.tools, turn.tail(), &model.speech)?,
        false => {
            let reasoning = dialect.open_reasoning(turn.tail());
            let thought = reasoning.map(|close| thought_rules(&model.speech, close));
            shaped(app.grammars(&engine), ask.shape.as_ref(), thought.as_deref())?
        }
    };
    // Also that of calls which nobody asked for: then it is text like any other.
    let markup = app.dialect().markup();
    let markup = markup.into_iter().filter_map(|mark| special(&model.speech, mark)).collect();
    let ear = Ear::new(dialect, ask.tools.heard(), turn.tail(), ask.is_streamed);
    let prompt = PreparedPrompt { tokens: turn.tokens().to_vec(), text: String::new(), ear };
    let turn = session.map(|opened| (opened, turn));
    Ok(Prepared { engine, prompts: vec![prompt], turn, grammar, markup })
}

/// The conversation so far and the new messages.
fn followed(dialogue: &Dialogue, added: &Conversation) -> Conversation {
    Conversation { messages: dialogue.followed_by(added.messages.clone()).messages, ..added.clone() }
}

/// Opens a session and tells the engine what it held, if that does not know.
fn open(app: &App, engine: &EngineHandle, session: &InSession) -> Result<Opened, ApiError> {
    let model = &app.model().fingerprint;
    let opened = app.conversations().open(&session.name, model)?;
    let saved = opened.saved();
    let is_ours = saved.turns.last().is_some_and(|turn| turn.model.is_same(model));
    if is_ours {
        match engine.restore_session(session.name.as_str(), saved.tokens()) {
            Ok(()) | Err(Error::InvalidParameter { .. }) => {} // it knows the session already
            Err(error) => return Err(error.into()),
        }
    }
    Ok(opened)
}

/// The id of a special token.
fn special(speech: &Speech, text: &str) -> Option<u32> {
    let tokenizer = speech.tokenizer();
    tokenizer.token_to_id(text).filter(|&id| tokenizer.is_special(id))
}

/// Lark rules for the rest of a thought that ends with `close`, and the space that models put behind it. A marker that is a
/// special token is that token, which no text can contain; any other ends the thought where it first stands.
fn thought_rules(speech: &Speech, close: &str) -> String {
    let thought = match special(speech, close) {
        Some(id) => format!("thought: TEXT? <[{id}]>\nTEXT: /(?s:.+)/\n"),
        None => format!("thought[lazy]: THOUGHT\nTHOUGHT: /(?s:.*){}/\n", escaped(close)),
    };
    format!("start: thought SPACE? answer\n{thought}SPACE: /[ \\t\\r\\n]{{1,4}}/\n")
}

/// For a regular expression between slashes.
fn escaped(text: &str) -> String {
    let is_meta = |c: char| "\\.+*?()|[]{}^$#&-~/".contains(c);
    text.chars().flat_map(|c| is_meta(c).then_some('\\').into_iter().chain([c])).collect()
}

/// The grammar of an answer's shape. Where the prompt has opened reasoning, that comes first: `thought` is its rules.
fn shaped(
    compiler: &GrammarCompiler,
    shape: Option<&Shape>,
    thought: Option<&str>,
) -> Result<Option<Grammar>, ApiError> {
    let Some(Shape { source, param }) = shape else { return Ok(None) };
    let named = |error: Error| ApiError::from(error).param(*param);
    let alone = compiler.compile(source).map_err(named)?;
    let Some(thought) = thought else { return Ok(Some(alone)) };
    let answer = match source {
        GrammarSource::JsonObject => format!("%json {}", spaced(&json!({"type": "object"}))),
        GrammarSource::JsonSchema(schema) => format!("%json {}", spaced(schema)),
        GrammarSource::Regex(regex) => format!("/{}/", regex.replace('/', "\\/")),
        GrammarSource::Lark(_) => {
            let message = "a grammar of one's own holds for the whole answer, and this prompt has begun with reasoning; \
                           switch it off, e.g. with reasoning_effort \"none\"";
            return Err(ApiError::unsupported(*param, format!("{param}: {message}")));
        }
    };
    let whole = format!("{thought}answer: {answer}\n");
    compiler.compile(&GrammarSource::Lark(whole)).map(Some).map_err(named)
}

/// A schema with one way of setting white space, as it is enforced on its own.
fn spaced(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(members) = schema.as_object_mut() {
        let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        members.entry("x-guidance").or_insert(options);
    }
    schema
}

/// The grammar of an answer with tools, where there is something to hold it to.
fn called(
    compiler: &GrammarCompiler,
    dialect: &Dialect,
    tools: &ToolUse,
    prompt_tail: &str,
    speech: &Speech,
) -> Result<Option<Grammar>, ApiError> {
    let special = |text: &str| special(speech, text);
    let compile = |definitions: &[Value]| {
        let grammar = dialect.tool_grammar(definitions, &tools.choice, tools.parallel, prompt_tail, &special);
        grammar.map(|lark| compiler.compile(&GrammarSource::Lark(lark))).transpose()
    };
    match compile(&tools.definitions) {
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
            let relaxed: Vec<Value> = tools.definitions.iter().map(relaxed).collect();
            compile(&relaxed).map_err(|error| ApiError::from(error).param("tools"))
        }
        compiled => compiled.map_err(|error| ApiError::from(error).param("tools")),
    }
}

fn is_strict(definition: &Value) -> bool {
    definition["function"]["strict"] == true
}

/// A tool that takes any object, unless it is strict.
fn relaxed(definition: &Value) -> Value {
    let mut definition = definition.clone();
    if !is_strict(&definition) {
        definition["function"]["parameters"] = json!({"type": "object"});
    }
    definition
}
