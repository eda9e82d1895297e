//! From an ask to tokens and a grammar: rendering, encoding, opening the conversation, compiling. All that may take long or
//! wait for a disk, and nothing that the engine computes: for blocking threads.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::conversations::Opened;
use super::turn::{Ask, InSession, Prompt, RawText, Shape, ToolUse};
use super::voice::Ear;
use crate::runtime::grammar::{self, Grammar, GrammarCompiler, GrammarSource};
use crate::runtime::session::conversation::{Dialogue, PromptedTurn};
use crate::runtime::{EngineHandle, Error, Result, Speech};
use crate::serve::App;
use crate::serve::error::ApiError;
use crate::template::{Conversation, Dialect, ReasoningFormat, ToolChoice};

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
            let grammar = ask.shape.as_ref();
            let grammar = grammar.map_or(Ok(None), |shape| shaped(app.grammars(&engine), shape, None))?;
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
            let within_frame = |shape| {
                let frame = frame(&model.speech, &dialect, turn.tail(), shape)?;
                shaped(app.grammars(&engine), shape, frame.as_deref())
            };
            ask.shape.as_ref().map_or(Ok(None), within_frame)?
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

/// Lark rules for what stands around an answer with a shape, which is their rule `answer`: reasoning first, where the prompt
/// has opened it or the model may, and Harmony's messages. Nothing where the answer is all there is.
///
/// # Errors
/// 400 where that cannot be written, or the shape is a grammar of the client's own and could not stand within it.
fn frame(speech: &Speech, dialect: &Dialect, tail: &str, shape: &Shape) -> Result<Option<String>, ApiError> {
    let is_own = matches!(shape.source, GrammarSource::Lark(_));
    let refuse = |message: &str| ApiError::unsupported(shape.param, format!("{}: {message}", shape.param));
    if dialect.reasoning == Some(ReasoningFormat::Harmony) {
        if is_own {
            return Err(refuse(
                "a grammar of one's own holds for the whole answer, and this model's come in messages",
            ));
        }
        let rules =
            harmony_rules(speech).ok_or_else(|| refuse("this model's messages have no tokens of their own"));
        return rules.map(Some);
    }
    if let Some(close) = dialect.open_reasoning(tail) {
        if is_own {
            let message = "a grammar of one's own holds for the whole answer, and this prompt has begun with reasoning; \
                           switch it off, e.g. with reasoning_effort \"none\"";
            return Err(refuse(message));
        }
        return Ok(Some(format!("start: thought SPACE? answer\n{}", thought_rules(speech, close))));
    }
    let free = dialect.may_reason(tail).filter(|_| !is_own);
    Ok(free.map(|(open, close)| {
        let open = match special(speech, open) {
            Some(id) => format!("<[{id}]>"),
            None => json!(open).to_string(),
        };
        format!("start: ({open} thought SPACE?)? answer\n{}", thought_rules(speech, close))
    }))
}

/// One message of analysis if the model likes, then the final one.
fn harmony_rules(speech: &Speech) -> Option<String> {
    let mark = |text| special(speech, text).map(|id| format!("<[{id}]>"));
    let [channel, message, end, start] =
        [mark("<|channel|>")?, mark("<|message|>")?, mark("<|end|>")?, mark("<|start|>")?];
    Some(format!(
        "start: ({channel} \"analysis\" {message} TEXT? {end} {start} \"assistant\")? {channel} \"final\" {message} answer\n\
         TEXT: /(?s:.+)/\n"
    ))
}

/// Lark rules for the rest of a thought that ends with `close`, and the space that models put behind it. A marker that is a
/// special token is that token, which no text can contain; any other ends the thought where it first stands.
fn thought_rules(speech: &Speech, close: &str) -> String {
    let thought = match special(speech, close) {
        Some(id) => format!("thought: TEXT? <[{id}]>\nTEXT: /(?s:.+)/\n"),
        None => format!("thought[lazy]: THOUGHT\nTHOUGHT: /(?s:.*){}/\n", escaped(close)),
    };
    format!("{thought}SPACE: /[ \\t\\r\\n]{{1,4}}/\n")
}

/// For a regular expression between slashes.
fn escaped(text: &str) -> String {
    let is_meta = |c: char| "\\.+*?()|[]{}^$#&-~/".contains(c);
    text.chars().flat_map(|c| is_meta(c).then_some('\\').into_iter().chain([c])).collect()
}

/// The grammar of an answer's shape, within the rules of [`frame`] where there are some.
fn shaped(
    compiler: &GrammarCompiler,
    shape: &Shape,
    frame: Option<&str>,
) -> Result<Option<Grammar>, ApiError> {
    let Shape { source, param } = shape;
    let named = |error: Error| ApiError::from(error).param(*param);
    let alone = compiler.compile(source).map_err(named)?;
    let Some(frame) = frame else { return Ok(Some(alone)) };
    let json = |schema: &Value| {
        let prepared = grammar::prepare_schema(schema).map_err(|error| named(Error::Grammar(error)));
        prepared.map(|schema| format!("%json {schema}"))
    };
    let answer = match source {
        GrammarSource::JsonObject => json(&json!({"type": "object"}))?,
        GrammarSource::JsonSchema(schema) => json(schema)?,
        GrammarSource::Regex(regex) => format!("/{}/", slashed(regex)),
        GrammarSource::Lark(_) => return Ok(Some(alone)), // stands within no frame
    };
    let whole = format!("{frame}answer: {answer}\n");
    compiler.compile(&GrammarSource::Lark(whole)).map(Some).map_err(named)
}

/// A regular expression for between slashes: those that are not escaped yet are.
fn slashed(regex: &str) -> String {
    let (mut text, mut is_escaped) = (String::with_capacity(regex.len()), false);
    for c in regex.chars() {
        if c == '/' && !is_escaped {
            text.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        text.push(c);
    }
    text
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
    let simplified: Vec<Value> = tools.definitions.iter().map(simplified).collect();
    match compile(&simplified) {
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

fn is_strict(definition: &Value) -> bool {
    definition["function"]["strict"] == true
}

/// A tool whose parameters are without what constrains nothing.
fn simplified(definition: &Value) -> Value {
    let mut definition = definition.clone();
    if let Some(parameters) = definition.pointer_mut("/function/parameters") {
        *parameters = grammar::simplified(parameters);
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
    }
    definition["function"]["parameters"] = parameters;
    definition
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_in_a_regular_expression_is_escaped_once() {
        for (given, between_slashes) in
            [("a/b", "a\\/b"), ("a\\/b", "a\\/b"), ("\\\\/", "\\\\\\/"), ("ab", "ab")]
        {
            assert_eq!(slashed(given), between_slashes, "{given}");
        }
    }

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
        });
        assert_eq!(relaxed(&tool(false))["function"]["parameters"], expected);
    }
}
