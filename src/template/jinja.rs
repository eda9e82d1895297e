//! A model's own chat template: conversation in, prompt text out, as Hugging Face's `apply_chat_template` does it.
//!
//! minijinja parses and runs the template; [`super::python`] gives it Python's values, [`super::link`] puts them in
//! place. A template inside a model file is untrusted: it sees nothing but the conversation, and source size,
//! steps, memory, nesting and output are bounded. It can fail in every way that [`TemplateError`] names, never panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::{Map, Value as Json, json};

use super::clock::DateTime;
use super::python::budget::{Exhausted, INPUTS, Inputs, Raised};
use super::python::{self, Dict, from_json};
use super::{Content, Conversation, Message, Role, TemplateError, ToolCall, link, source};

/// Instructions that one rendering may take: a thousand times what a long conversation needs.
const FUEL: u64 = 20_000_000;
/// Bytes that one rendering may produce or scan, plus a multiple of what it is given.
const BASE_BYTES: u64 = 256 << 20;
const BYTES_PER_INPUT_BYTE: u64 = 256;
/// Nested scopes; a macro call counts four, so that macros may call each other 75 deep.
const MAX_SCOPES: usize = 300;
const NAME: &str = "chat template";

/// The special tokens of a tokenizer, as text; seen by templates as `bos_token`, `eos_token` and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub unk: Option<String>,
    pub pad: Option<String>,
    pub sep: Option<String>,
    pub cls: Option<String>,
    pub mask: Option<String>,
    /// Further named tokens, e.g. `image_token`.
    pub extra: Map<String, Json>,
}

/// What a rendering is for.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// End with the header of an assistant turn, so that the model answers.
    pub add_generation_prompt: bool,
    /// Text that the answer is to begin with (`--prefill-response`). It is appended as it is behind the generation
    /// prompt, which is switched on for it; the model goes on from there.
    pub response_prefix: Option<String>,
    /// The last message is an unfinished assistant turn: the text ends right behind its content, without the
    /// template's turn end, and without a generation prompt.
    pub continue_final_message: bool,
    /// What `strftime_now` sees.
    pub now: DateTime,
}

/// A compiled chat template. Cloning shares it.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
}

struct Inner {
    env: Environment<'static>,
    specials: Map<String, Json>,
    source: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source_bytes", &self.inner.source.len()).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// `Syntax` with the line at fault, `TooExpensive` when the source itself is beyond a bound.
    pub fn new(source: &str, specials: SpecialTokens) -> Result<Self, TemplateError> {
        let env = compile(source, source::chat_syntax()?, UndefinedBehavior::Lenient)?;
        let inner = Inner { env, specials: special_variables(specials), source: source.to_owned() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.inner.source
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// `Raised` when the template refuses the conversation, `Render` when it fails on it, `TooExpensive` when it hits
    /// a bound.
    pub fn render(&self, conversation: &Conversation, options: &RenderOptions) -> Result<String, TemplateError> {
        let mut variables = conversation_variables(conversation);
        let prompt = (options.add_generation_prompt || options.response_prefix.is_some())
            && !options.continue_final_message;
        variables.insert("add_generation_prompt".to_owned(), Json::Bool(prompt));
        let mut text = self.render_variables(&variables, options.now)?;
        if options.continue_final_message {
            cut_behind_final_message(&mut text, conversation)?;
        }
        text.push_str(options.response_prefix.as_deref().unwrap_or_default());
        Ok(text)
    }

    /// Renders with variables given by name, on top of the special tokens: the raw form of [`Self::render`].
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_variables(&self, variables: &Map<String, Json>, now: DateTime) -> Result<String, TemplateError> {
        let mut all = self.inner.specials.clone();
        all.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        run(&self.inner.env, &all, now)
    }
}

/// Builds an environment that holds one template.
pub(super) fn compile(
    source: &str,
    syntax: minijinja::syntax::SyntaxConfig,
    undefined: UndefinedBehavior,
) -> Result<Environment<'static>, TemplateError> {
    let prepared = source::prepare(source, &syntax)?;
    let mut env = Environment::new();
    env.set_debug(false);
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(undefined);
    env.set_recursion_limit(MAX_SCOPES);
    env.set_fuel(Some(FUEL));
    python::install(&mut env);
    let added = guarded(|| env.add_template_owned(NAME, prepared).map_err(|error| source::syntax_error(&error)));
    added?;
    link_check(&env)?;
    Ok(env)
}

/// Links once, so that what linking refuses is known when the template is loaded.
fn link_check(env: &Environment<'static>) -> Result<(), TemplateError> {
    let template = env.get_template(NAME).map_err(|error| source::syntax_error(&error))?;
    let compiled = get_compiled_template(&template);
    compiled.blocks.values().chain([&compiled.instructions]).try_for_each(|code| link::relink(code).map(drop))
}

/// Runs the template of an environment made by [`compile`].
pub(super) fn run(
    env: &Environment<'static>,
    variables: &Map<String, Json>,
    now: DateTime,
) -> Result<String, TemplateError> {
    let root = root(variables, now)?;
    guarded(|| {
        let template = env.get_template(NAME).map_err(|error| source::syntax_error(&error))?;
        let compiled = get_compiled_template(&template);
        let instructions = link::relink(&compiled.instructions)?;
        let blocks = compiled.blocks.iter().map(|(name, code)| Ok((*name, link::relink(code)?)));
        let blocks = blocks.collect::<Result<_, TemplateError>>()?;
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let done = eval(env, &instructions, root, &blocks, &mut output, AutoEscape::None).map(drop);
        drop(output);
        done.map(|()| text).map_err(|error| failure(&error))
    })
}

/// The variables of a rendering with its bounds among them.
fn root(variables: &Map<String, Json>, now: DateTime) -> Result<Value, TemplateError> {
    let given: u64 = variables.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum();
    let bytes = BASE_BYTES.saturating_add(given.saturating_mul(BYTES_PER_INPUT_BYTE));
    let mut pairs = Vec::with_capacity(variables.len() + 1);
    for (name, value) in variables {
        pairs.push((Value::from(name.as_str()), from_json(value).map_err(|error| failure(&error))?));
    }
    pairs.push((Value::from(INPUTS), Value::from_object(Inputs { bytes, now })));
    Dict::value(pairs).map_err(|error| failure(&error))
}

fn json_bytes(value: &Json) -> u64 {
    match value {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(json_bytes).sum::<u64>() + 8,
        Json::Object(members) => members.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum(),
        _ => 8,
    }
}

/// minijinja is not written for hostile templates (`break` inside `with` ends in an unwrap of nothing), so a panic in
/// it becomes an error. Nothing that it could leave half-changed outlives the call.
fn guarded<T>(work: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(TemplateError::Render { line: 1, message: "the template engine failed on this template".to_owned() })
    })
}

/// Sorts an error of minijinja into what a caller can do about it.
fn failure(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut innermost = error;
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        if let Some(Exhausted(reason)) = current.downcast_ref() {
            return TemplateError::TooExpensive(reason.clone());
        }
        if let Some(inner) = current.downcast_ref::<minijinja::Error>() {
            innermost = inner;
        }
        cause = current.source();
    }
    let detail = innermost.detail().unwrap_or_default();
    if innermost.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooExpensive(format!("it takes more than {FUEL} steps"));
    }
    if detail.contains("recursion limit exceeded") {
        return TemplateError::TooExpensive("its macros or loops call each other too deeply".to_owned());
    }
    let message = if detail.is_empty() { innermost.kind().to_string() } else { detail.to_owned() };
    TemplateError::Render { line: innermost.line().or(error.line()).unwrap_or(1), message }
}

fn special_variables(specials: SpecialTokens) -> Map<String, Json> {
    let SpecialTokens { bos, eos, unk, pad, sep, cls, mask, extra } = specials;
    let named = [
        ("bos_token", bos),
        ("eos_token", eos),
        ("unk_token", unk),
        ("pad_token", pad),
        ("sep_token", sep),
        ("cls_token", cls),
        ("mask_token", mask),
    ];
    let mut variables = extra;
    for (name, token) in named {
        if let Some(token) = token {
            variables.insert(name.to_owned(), Json::String(token));
        }
    }
    variables
}

/// The variables that transformers passes: absent tools and documents are `None`, not missing.
fn conversation_variables(conversation: &Conversation) -> Map<String, Json> {
    let or_none = |items: &[Json]| if items.is_empty() { Json::Null } else { Json::Array(items.to_vec()) };
    let mut variables = conversation.kwargs.clone();
    let messages = conversation.messages.iter().map(message_json).collect();
    variables.insert("messages".to_owned(), Json::Array(messages));
    variables.insert("tools".to_owned(), or_none(&conversation.tools));
    variables.insert("documents".to_owned(), or_none(&conversation.documents));
    variables
}

fn message_json(message: &Message) -> Json {
    let mut members = Map::new();
    members.insert("role".to_owned(), json!(message.role.as_str()));
    match &message.content {
        None => {}
        Some(Content::Text(text)) => drop(members.insert("content".to_owned(), json!(text))),
        Some(Content::Parts(parts)) => drop(members.insert("content".to_owned(), Json::Array(parts.clone()))),
    }
    if let Some(reasoning) = &message.reasoning {
        members.insert("reasoning_content".to_owned(), json!(reasoning));
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(tool_call_json).collect();
        members.insert("tool_calls".to_owned(), Json::Array(calls));
    }
    for (name, value) in [("tool_call_id", &message.tool_call_id), ("name", &message.name)] {
        if let Some(value) = value {
            members.insert(name.to_owned(), json!(value));
        }
    }
    Json::Object(members)
}

fn tool_call_json(call: &ToolCall) -> Json {
    let mut members = Map::new();
    if let Some(id) = &call.id {
        members.insert("id".to_owned(), json!(id));
    }
    members.insert("type".to_owned(), json!("function"));
    members.insert("function".to_owned(), json!({"name": call.name, "arguments": call.arguments}));
    Json::Object(members)
}

/// Cuts a rendering behind the last message's content, as transformers does for `continue_final_message`: at the last
/// place where the content stands, with its outer white space given up when the template trims it.
fn cut_behind_final_message(text: &mut String, conversation: &Conversation) -> Result<(), TemplateError> {
    let last = conversation.messages.last().filter(|message| message.role == Role::Assistant);
    let content = match last.and_then(|message| message.content.as_ref()) {
        Some(Content::Text(content)) => content.clone(),
        Some(Content::Parts(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text").and_then(Json::as_str));
            texts.last().unwrap_or_default().to_owned()
        }
        None => String::new(),
    };
    let wanted = content.trim();
    let found = if wanted.is_empty() { None } else { text.rfind(wanted) };
    let Some(at) = found else {
        let message = "the last message cannot be continued: its content is not in the rendered text".to_owned();
        return Err(TemplateError::Render { line: 1, message });
    };
    let end = at + wanted.len();
    let trailing = &content[content.trim_end().len()..];
    let keep = if text[end..].starts_with(trailing) { end + trailing.len() } else { end };
    text.truncate(keep);
    Ok(())
}
