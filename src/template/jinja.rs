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
const BASE_BYTES: u64 = 32 << 20;
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
    /// By which names templates get the reasoning of a message.
    reasoning_names: &'static [&'static str],
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
        let inner = Inner {
            env,
            specials: special_variables(specials),
            source: source.to_owned(),
            reasoning_names: reasoning_names(source),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.inner.source
    }

    /// Whether the template has this word as a text of its own, as one that tells roles apart does.
    pub fn has_literal(&self, word: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.inner.source.contains(&format!("{quote}{word}{quote}")))
    }

    /// Whether the template reads a variable of this name somewhere.
    pub fn reads(&self, variable: &str) -> bool {
        let template = self.inner.env.get_template(NAME);
        template.is_ok_and(|template| template.undeclared_variables(false).contains(variable))
    }

    /// Renders a conversation. Where the template fails on tool arguments as a mapping, or escapes them, it gets them as JSON
    /// text; where it fails on messages without content, their content is none or empty; where it fails on tools without a
    /// description, they have an empty one.
    ///
    /// # Errors
    /// `Raised` when the template refuses the conversation, `Render` when it fails on it, `TooExpensive` when it hits
    /// a bound.
    pub fn render(
        &self,
        conversation: &Conversation,
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let mut variables = conversation_variables(conversation, self.inner.reasoning_names);
        let prompt = (options.add_generation_prompt || options.response_prefix.is_some())
            && !options.continue_final_message;
        variables.insert("add_generation_prompt".to_owned(), Json::Bool(prompt));
        let mut text = self.render_variables(&variables, options.now).or_else(|error| match error {
            TemplateError::Render { .. } => self.render_adapted(&variables, options.now).ok_or(error),
            TemplateError::Raised { .. } => {
                self.render_changed(&variables, &[think_content], options.now).ok_or(error)
            }
            error => Err(error),
        })?;
        if let Some(unescaped) = self.without_escapes(&variables, options.now, &text) {
            text = unescaped;
        }
        if options.continue_final_message {
            cut_behind_final_message(&mut text, conversation)?;
        }
        text.push_str(options.response_prefix.as_deref().unwrap_or_default());
        Ok(text)
    }

    /// Renders with the conversation in the other forms that templates expect; the first that succeeds.
    fn render_adapted(&self, variables: &Map<String, Json>, now: DateTime) -> Option<String> {
        let descriptions: [&[Adaptation]; 4] =
            [&[], &[describe_tools], &[describe_parameters], &[describe_tools, describe_parameters]];
        descriptions.iter().find_map(|descriptions| {
            ADAPTATIONS.iter().find_map(|changes| {
                let changes = [descriptions, *changes].concat();
                // What nothing has been changed for has been tried.
                (!changes.is_empty()).then(|| self.render_changed(variables, &changes, now)).flatten()
            })
        })
    }

    /// Renders with all of these changes, if each of them changes something: with one left out it is another form.
    fn render_changed(
        &self,
        variables: &Map<String, Json>,
        changes: &[Adaptation],
        now: DateTime,
    ) -> Option<String> {
        let mut adapted = variables.clone();
        let num_changed = changes.iter().filter(|change| change(&mut adapted)).count();
        (num_changed == changes.len()).then(|| self.render_variables(&adapted, now).ok()).flatten()
    }

    /// The rendering with tool arguments as JSON text, where that has fewer quotes escaped for HTML. Mistral's own templates
    /// mark arguments as safe and add other text to them, which Jinja then escapes: no model was trained on that.
    fn without_escapes(&self, variables: &Map<String, Json>, now: DateTime, text: &str) -> Option<String> {
        const QUOTE: &str = "&#34;";
        let num_escaped = text.matches(QUOTE).count();
        if num_escaped == 0 {
            return None;
        }
        let mut adapted = variables.clone();
        spell_arguments_out(&mut adapted).then_some(())?;
        let spelt = self.render_variables(&adapted, now).ok()?;
        (spelt.matches(QUOTE).count() < num_escaped).then_some(spelt)
    }

    /// Renders with variables given by name, on top of the special tokens: the raw form of [`Self::render`].
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_variables(
        &self,
        variables: &Map<String, Json>,
        now: DateTime,
    ) -> Result<String, TemplateError> {
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
    let added =
        guarded(|| env.add_template_owned(NAME, prepared).map_err(|error| source::syntax_error(&error)));
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
        done.map(|()| text).map_err(|error| match failure(&error) {
            TemplateError::Render { line, message } if error.kind() == ErrorKind::UndefinedError => {
                let missing = missing_variables(env, variables);
                TemplateError::Render { line, message: message + &missing }
            }
            other => other,
        })
    })
}

/// Names what a template reads and was not given, for the message of an error that an undefined value caused.
fn missing_variables(env: &Environment<'static>, given: &Map<String, Json>) -> String {
    let Ok(template) = env.get_template(NAME) else { return String::new() };
    let mut missing: Vec<String> = template.undeclared_variables(false).into_iter().collect();
    missing.retain(|name| !given.contains_key(name) && !env.globals().any(|(known, _)| known == name));
    missing.sort();
    if missing.is_empty() { String::new() } else { format!(" (not given: {})", missing.join(", ")) }
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
        Json::Object(members) => {
            members.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum()
        }
        _ => 8,
    }
}

/// minijinja is not written for hostile templates (`break` inside `with` ends in an unwrap of nothing), so a panic in
/// it becomes an error. Nothing that it could leave half-changed outlives the call.
fn guarded<T>(work: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(TemplateError::Render {
            line: 1,
            message: "the template engine failed on this template".to_owned(),
        })
    })
}

/// Sorts an error of minijinja into what a caller can do about it.
fn failure(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut innermost = error;
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            let line = innermost.line().or(error.line()).unwrap_or(1);
            return TemplateError::Raised { line, message: message.clone() };
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
fn conversation_variables(conversation: &Conversation, reasoning_names: &[&str]) -> Map<String, Json> {
    let or_none = |items: &[Json]| if items.is_empty() { Json::Null } else { Json::Array(items.to_vec()) };
    let mut variables = conversation.kwargs.clone();
    let messages =
        conversation.messages.iter().map(|message| message_json(message, reasoning_names)).collect();
    variables.insert("messages".to_owned(), Json::Array(messages));
    variables.insert("tools".to_owned(), or_none(&conversation.tools));
    variables.insert("documents".to_owned(), or_none(&conversation.documents));
    variables
}

/// Templates read `reasoning_content` or `thinking`, and transformers gives them both. A few know it as `reasoning` alone.
fn reasoning_names(source: &str) -> &'static [&'static str] {
    let reads =
        |name: &str| [".", "'", "\""].iter().any(|before| source.contains(&format!("{before}{name}")));
    let is_other = !reads("reasoning_content") && !reads("thinking") && reads("reasoning");
    if is_other {
        &["reasoning_content", "thinking", "reasoning"]
    } else {
        &["reasoning_content", "thinking"]
    }
}

fn message_json(message: &Message, reasoning_names: &[&str]) -> Json {
    let mut members = Map::new();
    members.insert("role".to_owned(), json!(message.role.as_str()));
    match &message.content {
        None => {}
        Some(Content::Text(text)) => drop(members.insert("content".to_owned(), json!(text))),
        Some(Content::Parts(parts)) => drop(members.insert("content".to_owned(), Json::Array(parts.clone()))),
    }
    if let Some(reasoning) = &message.reasoning {
        members.extend(reasoning_names.iter().map(|name| ((*name).to_owned(), json!(reasoning))));
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

/// A change of a conversation's form; tells whether there was anything to change.
type Adaptation = fn(&mut Map<String, Json>) -> bool;

/// Forms of a conversation that published templates want in place of the documented one, in the order they are tried.
const ADAPTATIONS: [&[Adaptation]; 6] = [
    &[],
    &[spell_arguments_out],
    &[say_none],
    &[spell_arguments_out, say_none],
    // Last: a template that tells calls by content that is none prints none of them beside an empty one.
    &[say_nothing],
    &[spell_arguments_out, say_nothing],
];

/// Gives tools without a description an empty one: it is optional at OpenAI, and some templates (Hermes', gpt-oss') add it to a
/// text all the same.
fn describe_tools(variables: &mut Map<String, Json>) -> bool {
    functions(variables).map(described).filter(|&is_new| is_new).count() > 0
}

/// The same of their parameters.
fn describe_parameters(variables: &mut Map<String, Json>) -> bool {
    let properties = functions(variables)
        .filter_map(|function| function.get_mut("parameters")?.get_mut("properties")?.as_object_mut())
        .flat_map(|properties| properties.values_mut().filter_map(Json::as_object_mut));
    properties.map(described).filter(|&is_new| is_new).count() > 0
}

/// Puts an empty description where there is none.
fn described(members: &mut Map<String, Json>) -> bool {
    let is_missing = !members.get("description").is_some_and(Json::is_string);
    if is_missing {
        members.insert("description".to_owned(), json!(""));
    }
    is_missing
}

/// The definitions of tools, with or without their wrapping.
fn functions(variables: &mut Map<String, Json>) -> impl Iterator<Item = &mut Map<String, Json>> {
    let tools = variables.get_mut("tools").and_then(Json::as_array_mut).into_iter().flatten();
    tools.filter_map(|tool| match tool.get("function") {
        Some(_) => tool.get_mut("function")?.as_object_mut(),
        None => tool.as_object_mut(),
    })
}

/// Makes one text of the reasoning and the content of answers with calls, for gpt-oss' template: it prints either as
/// reasoning and refuses both.
fn think_content(variables: &mut Map<String, Json>) -> bool {
    let mut changed = false;
    for message in variables.get_mut("messages").and_then(Json::as_array_mut).into_iter().flatten() {
        let Some(members) = message.as_object_mut().filter(|members| members.contains_key("tool_calls"))
        else {
            continue;
        };
        let text = |name: &str| members.get(name).and_then(Json::as_str).filter(|text| !text.is_empty());
        if let (Some(thought), Some(content)) = (text("thinking"), text("content")) {
            let whole = json!(format!("{thought}\n\n{content}"));
            members.insert("thinking".to_owned(), whole.clone());
            members.insert("reasoning_content".to_owned(), whole);
            members.remove("content");
            changed = true;
        }
    }
    changed
}

/// Gives messages without content one that is none, as OpenAI's answers with calls have it. Some templates (DeepSeek R1's
/// Llama distillations) test for none and fail on what is not there.
fn say_none(variables: &mut Map<String, Json>) -> bool {
    fill_contents(variables, &Json::Null)
}

/// Gives messages without content an empty one. Others (Qwen 3's first, Granite's, Devstral's) only know texts.
fn say_nothing(variables: &mut Map<String, Json>) -> bool {
    fill_contents(variables, &Json::String(String::new()))
}

fn fill_contents(variables: &mut Map<String, Json>, content: &Json) -> bool {
    let mut changed = false;
    for message in variables.get_mut("messages").and_then(Json::as_array_mut).into_iter().flatten() {
        if let Some(members) = message.as_object_mut().filter(|members| !members.contains_key("content")) {
            members.insert("content".to_owned(), content.clone());
            changed = true;
        }
    }
    changed
}

/// Turns the arguments of tool calls into JSON text, the form of OpenAI's wire format. Some templates (DeepSeek's,
/// Functionary's) glue them to a string and fail on the mapping that transformers asks for. Tells whether it did.
fn spell_arguments_out(variables: &mut Map<String, Json>) -> bool {
    let mut changed = false;
    for message in variables.get_mut("messages").and_then(Json::as_array_mut).into_iter().flatten() {
        for call in message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|value| value.is_object())
                && let Ok(text) = python::dumps(arguments)
            {
                *arguments = Json::String(text);
                changed = true;
            }
        }
    }
    changed
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
            let mut texts = parts.iter().filter_map(|part| part.get("text").and_then(Json::as_str));
            texts.next_back().unwrap_or_default().to_owned()
        }
        None => String::new(),
    };
    let wanted = content.trim();
    let found = if wanted.is_empty() { None } else { text.rfind(wanted) };
    let Some(at) = found else {
        let message =
            "the last message cannot be continued: its content is not in the rendered text".to_owned();
        return Err(TemplateError::Render { line: 1, message });
    };
    let end = at + wanted.len();
    let trailing = &content[content.trim_end().len()..];
    let keep = if text[end..].starts_with(trailing) { end + trailing.len() } else { end };
    text.truncate(keep);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(source: &str, variables: &Json) -> Result<String, TemplateError> {
        let variables = variables.as_object().cloned().unwrap_or_default();
        ChatTemplate::new(source, SpecialTokens::default())?
            .render_variables(&variables, DateTime::from_unix(0))
    }

    #[track_caller]
    fn check(source: &str, wanted: &str) {
        let variables = json!({
            "d": {"b": 1, "a": [1, 2.5, null, true, "it's"], "items": "own"},
            "l": [3, 1, 2],
            "s": "Hello wörld",
            "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
        });
        assert_eq!(rendered(source, &variables).as_deref(), Ok(wanted), "{source}");
    }

    #[test]
    fn values_print_as_in_python() {
        check(
            "{{ none }} {{ true }} {{ 1.0 }} {{ 1e16 }} {{ 1e-5 }} {{ missing }}|",
            "None True 1.0 1e+16 1e-05 |",
        );
        check("{{ d }}", r#"{'b': 1, 'a': [1, 2.5, None, True, "it's"], 'items': 'own'}"#);
        check("{{ (1,) }} {{ (1, 'a') }} {{ 'a\\n\\t' | list }}", "(1,) (1, 'a') ['a', '\\n', '\\t']");
        check("{{ 'x' ~ none ~ true ~ d.a }}", r#"xNoneTrue[1, 2.5, None, True, "it's"]"#);
    }

    #[test]
    fn json_is_printed_as_hugging_face_prints_it() {
        check("{{ d | tojson }}", r#"{"b": 1, "a": [1, 2.5, null, true, "it's"], "items": "own"}"#);
        check(
            "{{ s | tojson }} {{ s | tojson(ensure_ascii=true) }}",
            "\"Hello wörld\" \"Hello w\\u00f6rld\"",
        );
        check(
            "{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}",
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}",
        );
        check("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", r#"{"a":2,"b":1}"#);
        check("{{ '<&>' | tojson }}", "\"<&>\"");
    }

    #[test]
    fn operators_are_pythons() {
        check(
            "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ +true }}",
            "3 -4 2 3.5 8 1",
        );
        check(
            "{{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' in s }} {{ 'H' in s }} {{ 'b' in d }}",
            "abab [1, 2] False True True",
        );
        check("{{ '%s is %d%%' % ('x', 5) }} {{ '%.2f' % 1.005 }} {{ '%s' % none }}", "x is 5% 1.00 None");
        check("{{ 1 == true }} {{ [1] == [1.0] }} {{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }}", "True True True False");
        check(
            "{{ s[::-1] }} {{ l[-2:] }} {{ s[-1] }} {{ l[::2] }} {{ l[9] is defined }}",
            "dlröw olleH [1, 2] d [3, 2] False",
        );
    }

    #[test]
    fn methods_come_before_members_and_mutation_is_refused() {
        check("{% for k, v in d.items() %}{{ k }};{% endfor %}{{ d['items'] }}", "b;a;items;own");
        check("{{ d.get('zz') }} {{ d.get('zz', 1) }} {{ d.keys() | list }}", "None 1 ['b', 'a', 'items']");
        check(
            "{{ '  a b ' .strip() }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'a,b,c'.split(',', 1)[-1] }}",
            "a b|axx|b,c",
        );
        check(
            "{{ 'abc'.startswith(('x', 'a')) }} {{ 'hello wORLD'.title() }} {{ 'abcabc'.find('c', 3) }}",
            "True Hello World 5",
        );
        check(
            "{{ '{}-{}'.format(1, 'x') }} {{ 'a\\nb'.splitlines() }} {{ '-'.join(['a', 'b']) }}",
            "1-x ['a', 'b'] a-b",
        );
        assert!(rendered("{{ l.append(1) }}", &json!({"l": []})).is_err());
    }

    #[test]
    fn filters_are_lazy_where_jinja2_is() {
        check(
            "{{ rows | map(attribute='k') | join(',') }} {{ rows | selectattr('v', '>', 1) | list | length }}",
            "x,y,x 2",
        );
        check(
            "{{ rows | groupby('k') | map('first') | list }} {{ rows | sum(attribute='v') }}",
            "['x', 'y'] 6",
        );
        check("{% for g in rows | groupby('k') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}", "x2y1");
        check(
            "{{ l | sort }} {{ l | sort(reverse=true) | first }} {{ d | dictsort | map('first') | list }}",
            "[1, 2, 3] 3 ['a', 'b', 'items']",
        );
        check(
            "{{ ['a', 'B', 'A'] | unique | list }} {{ 'a\\nb' | indent(2) }} {{ x | default('y') }}",
            "['a', 'B'] a\n  b y",
        );
        check("{{ l | batch(2) | list }} {{ none | selectattr('x') | list }}", "[[3, 1], [2]] []");
        assert!(rendered("{{ [1] | map('string') | length }}", &json!({})).is_err());
    }

    #[test]
    fn statements_are_jinja2s() {
        check(
            "{% set ns = namespace(n=0) %}{% for i in l %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "6",
        );
        check(
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        );
        check(
            "{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(2, b=3) %}!{% endcall %}",
            "1z23!",
        );
        check("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}q{% endfilter %}", "A1Q");
        check("{% generation %}\na{% set y = 1 %}{% endgeneration %}{{ y is defined }}", "aFalse");
        check(
            "{% for i in l %}{{ loop.index }}{{ loop.last }}{{ loop.previtem }}{% endfor %}",
            "1False2False33True1",
        );
        check("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970");
    }

    #[test]
    fn safe_text_escapes_what_is_added_to_it() {
        check("{{ '<' + ('>' | safe) }}{{ ('<' | e) ~ '<' }}{{ ('%s' | safe) % '<' }}", "&lt;>&lt;<&lt;");
    }

    #[test]
    fn errors_say_what_and_where() {
        let error = |source: &str| rendered(source, &json!({"d": {}})).expect_err(source);
        assert_eq!(
            error("a\n{{ raise_exception('no ' + 'way') }}"),
            TemplateError::Raised { line: 2, message: "no way".to_owned() }
        );
        assert!(
            matches!(error("a\n\n{{ d.x.y }}"), TemplateError::Render { line: 3, message } if message.contains("'y'"))
        );
        assert!(matches!(error("a\n{% if %}"), TemplateError::Syntax { line: 2, .. }));
        assert!(matches!(error("\n{% include 'x' %}"), TemplateError::Render { line: 2, .. }));
        assert!(
            matches!(error("{{ 1 + 'a' }}"), TemplateError::Render { message, .. } if message.contains("'int' and 'str'"))
        );
        assert!(
            matches!(error("{{ 1 | nofilter }}"), TemplateError::Render { message, .. } if message.contains("nofilter"))
        );
    }

    /// Rendered on a thread with the stack of a plain worker, so that a recursion without bound would end the test.
    #[track_caller]
    fn too_expensive(source: &str) {
        let owned = source.to_owned();
        let worker = std::thread::Builder::new().stack_size(2 << 20);
        let result = worker.spawn(move || rendered(&owned, &json!({"deep": "x"}))).expect("a thread").join();
        let start: String = source.chars().take(80).collect();
        match result {
            Ok(Err(TemplateError::TooExpensive(_) | TemplateError::Syntax { .. })) => {}
            other => panic!("{start}: {other:?}"),
        }
    }

    #[test]
    fn memory_is_bounded() {
        too_expensive(
            "{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        );
        too_expensive(
            "{% set ns = namespace(x='a') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        );
        too_expensive("{% set n = 1000000000 %}{{ 'a' * n }}");
        too_expensive("{{ 'a' * 10 ** 9 }}");
        too_expensive("{% set n = 1000000000 %}{{ ([1] * n) | length }}");
        too_expensive(
            "{% set ns = namespace(x=[1, 1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        );
        too_expensive(
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        );
        too_expensive(
            "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
        );
        too_expensive("{% set n = 900000000 %}{{ 'a'.center(n) }}");
        too_expensive("{{ '%999999999d' % 5 }}");
        too_expensive("{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}");
        too_expensive("{% set x = 'a' * 1000000 %}{{ x | list | join(x) }}");
    }

    #[test]
    fn steps_are_bounded() {
        too_expensive("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}");
        too_expensive(
            "{% for i in range(9999) %}{% for j in range(9999) %}{% macro m() %}{{ j }}{% endmacro %}{% endfor %}{% endfor %}",
        );
        too_expensive("{{ range(10 ** 12) }}");
        too_expensive(
            "{% set l = range(99999) | list %}{% for i in l %}{% if 5.5 in l %}{% endif %}{% endfor %}",
        );
    }

    #[test]
    fn nesting_is_bounded() {
        too_expensive("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
        too_expensive(
            "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        );
        too_expensive("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}");
        too_expensive("{% block b %}{{ self.b() }}{% endblock %}");
        too_expensive(
            "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        );
        too_expensive(
            "{% set ns = namespace(x={}) %}{% for i in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
        );
        too_expensive(
            "{% set ns = namespace(x=1) %}{% for i in range(90000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}",
        );
        too_expensive(&format!("{{{{ {}1{} }}}}", "(".repeat(600), ")".repeat(600)));
        too_expensive(&format!("{{{{ {}1{} }}}}", "[".repeat(600), "]".repeat(600)));
        too_expensive(&"{% if a %}".repeat(5000));
        too_expensive(&format!("{{{{ x{} }}}}", " + 1".repeat(5000)));
    }

    #[test]
    fn the_largest_expressions_that_pass_fit_a_small_stack() {
        let long = [
            format!("{{{{ deep{} }}}}", " ~ 1".repeat(740)),
            format!("{{{{ {}deep }}}}", "not ".repeat(1400)),
            format!("{{{{ {}1 }}}}", "- ".repeat(1400)),
            format!("{{{{ deep{} }}}}", "|trim".repeat(700)),
            format!("{{{{ d{} }}}}", " if 0 else d".repeat(370)),
            format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(400)),
            format!("{{{{ {}1{} }}}}", "(".repeat(70), ")".repeat(70)),
        ];
        for source in long {
            let worker = std::thread::Builder::new().stack_size(2 << 20);
            let result =
                worker.spawn(move || rendered(&source, &json!({"deep": "x"}))).expect("a thread").join();
            assert!(matches!(result, Ok(Ok(_) | Err(TemplateError::Syntax { .. }))), "{result:?}");
        }
    }

    #[test]
    fn cycles_and_stored_loops_are_refused() {
        for source in [
            "{% set ns = namespace() %}{% set ns.x = ns %}",
            "{% set ns = namespace() %}{% set ns.x = [ns] %}",
            "{% set ns = namespace() %}{% for i in [1] %}{% set ns.x = loop %}{% endfor %}",
            "{% for i in [1] %}{{ loop.cycle() }}{% endfor %}",
            "{% for i in [1] %}{{ loop.cycle(*[]) }}{% endfor %}",
        ] {
            assert!(rendered(source, &json!({})).is_err(), "{source}");
        }
        check("{% set a = namespace(t='x') %}{% set l = [a] %}{% set a.t = 'y' %}{{ l[0].t }}", "y");
    }

    fn talk(turns: &[(&str, &str)]) -> Conversation {
        let messages = turns.iter().map(|(role, text)| Message::new(Role::from(*role), *text)).collect();
        Conversation { messages, ..Conversation::default() }
    }

    const CHATML: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    #[test]
    fn a_response_prefix_follows_the_generation_prompt() {
        let template = ChatTemplate::new(CHATML, SpecialTokens::default()).expect("a template");
        let options =
            RenderOptions { response_prefix: Some("Sure, ".to_owned()), ..RenderOptions::default() };
        let text = template.render(&talk(&[("user", "hi")]), &options);
        assert_eq!(text.as_deref(), Ok("<user>hi<end>\n<assistant>Sure, "));
    }

    #[test]
    fn a_final_message_is_continued_without_its_turn_end() {
        let template = ChatTemplate::new(CHATML, SpecialTokens::default()).expect("a template");
        let options = RenderOptions { continue_final_message: true, ..RenderOptions::default() };
        let text = template.render(&talk(&[("user", "hi"), ("assistant", "Well, ")]), &options);
        assert_eq!(text.as_deref(), Ok("<user>hi<end>\n<assistant>Well,"));
        assert!(template.render(&talk(&[("user", "hi")]), &options).is_err());
    }

    #[test]
    fn absent_tools_are_none_and_absent_members_are_undefined() {
        let source = "{{ tools is none }}{{ documents is none }}{{ messages[0].tool_calls is defined }}{{ bos_token }}";
        let specials = SpecialTokens { bos: Some("<s>".to_owned()), ..SpecialTokens::default() };
        let template = ChatTemplate::new(source, specials).expect("a template");
        let text = template.render(&talk(&[("user", "hi")]), &RenderOptions::default());
        assert_eq!(text.as_deref(), Ok("TrueTrueFalse<s>"));
    }

    #[test]
    fn tool_arguments_are_spelt_out_for_templates_that_want_text() {
        let source = "{% for m in messages %}{% for c in m.tool_calls %}{{ '> ' + c.function.arguments }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let call = ToolCall { id: None, name: "f".to_owned(), arguments: json!({"a": [1, "x"]}) };
        let mut message = Message::assistant("");
        message.tool_calls.push(call);
        let conversation = Conversation { messages: vec![message], ..Conversation::default() };
        let text = template.render(&conversation, &RenderOptions::default());
        assert_eq!(text.as_deref(), Ok(r#"> {"a": [1, "x"]}"#));
    }

    #[test]
    fn reasoning_comes_by_both_of_its_names() {
        let thoughtful = Message { reasoning: Some("Hm.".to_owned()), ..Message::assistant("Yes.") };
        let conversation = Conversation { messages: vec![thoughtful], ..Conversation::default() };
        let check = |source: &str, expected: &str| {
            let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
            let text = template.render(&conversation, &RenderOptions::default());
            assert_eq!(text.as_deref(), Ok(expected), "{source}");
        };
        check("{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}", "Hm.|Hm.");
        check("{{ messages[0].reasoning }}", "Hm.");
        check("{{ messages[0].thinking }}|{{ messages[0].reasoning is defined }}", "Hm.|False");
    }

    #[test]
    fn tools_without_a_description_get_an_empty_one_where_the_template_needs_it() {
        let source = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }};{% for n, p in \
            t.function.parameters.properties.items() %}{{ n + ' ' + p.description }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let parameters = json!({"type": "object", "properties": {"x": {"type": "string"}}});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        let conversation = Conversation { tools: vec![tool], ..talk(&[("user", "hi")]) };
        assert_eq!(template.render(&conversation, &RenderOptions::default()).as_deref(), Ok("f: ;x "));
        // One that does without sees nothing new.
        let source = "{{ tools | tojson }}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let text = template.render(&conversation, &RenderOptions::default()).expect("a rendering");
        assert!(!text.contains("description"), "{text}");
    }

    #[test]
    fn content_is_none_for_templates_that_test_for_it() {
        let source = "{% for m in messages %}{% if m['content'] is none %}{{ m.tool_calls[0].function.name }}{% else %}\
            {{ m['content'].strip() }}{% endif %};{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let call = ToolCall { id: None, name: "f".to_owned(), arguments: json!({}) };
        let answer = Message { content: None, tool_calls: vec![call], ..Message::assistant("") };
        let conversation =
            Conversation { messages: vec![Message::user(" hi "), answer], ..Conversation::default() };
        let text = template.render(&conversation, &RenderOptions::default());
        assert_eq!(text.as_deref(), Ok("hi;f;"));
    }

    #[test]
    fn content_is_empty_for_templates_that_only_know_texts() {
        let source = "{% for m in messages %}{{ 'x' + m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %};{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let call = ToolCall { id: None, name: "f".to_owned(), arguments: json!({}) };
        let answer = Message { content: None, tool_calls: vec![call], ..Message::assistant("") };
        let conversation =
            Conversation { messages: vec![Message::user("hi"), answer], ..Conversation::default() };
        assert_eq!(template.render(&conversation, &RenderOptions::default()).as_deref(), Ok("xhi;xf;"));
    }

    #[test]
    fn arguments_that_a_template_would_escape_are_spelt_out() {
        let source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\
            {% set a = c.function.arguments %}{% if a is not string %}{% set a = a | tojson | safe %}{% endif %}\
            {{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + a + '}' }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a template");
        let call = ToolCall { id: None, name: "f".to_owned(), arguments: json!({"a": "<"}) };
        let answer = Message { tool_calls: vec![call], ..Message::assistant("") };
        // What the user wrote stays as it is.
        let messages = vec![Message::user("&#34;"), answer];
        let conversation = Conversation { messages, ..Conversation::default() };
        let text = template.render(&conversation, &RenderOptions::default());
        assert_eq!(text.as_deref(), Ok("&#34;{\"name\": \"f\", \"arguments\": {\"a\": \"<\"}}"));
    }

    #[test]
    fn a_template_can_be_shared_by_threads() {
        fn shared<T: Send + Sync + Clone>() {}
        shared::<ChatTemplate>();
    }
}
