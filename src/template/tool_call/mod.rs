//! The forms in which models write tool calls, one reader per form.
//!
//! A reader is given one character at a time behind the marker that begins a call. It names the call before it passes on
//! arguments, and arguments only as JSON text; the sink refuses the name of a tool that was not given. What a reader
//! holds back is never lost: the parser keeps the raw text of every call whose name is not out yet.

mod coerce;
mod gemma;
mod glm;
pub(super) mod grammar;
mod harmony;
mod json_object;
mod json_text;
mod named_json;
mod python_literal;
mod pythonic;
mod xml;

use serde_json::Value;

use super::dialect::ToolCallFormat;
use super::output::Piece;

pub(super) use harmony::Harmony;
use json_text::Malformed;

/// The tools that an answer may call, by name.
#[derive(Debug, Default)]
pub(super) struct Tools {
    tools: Vec<Tool>,
}

#[derive(Debug)]
pub(super) struct Tool {
    pub name: String,
    /// JSON Schema of the arguments; an empty object where the definition has none.
    pub parameters: Value,
}

impl Tools {
    /// From definitions in OpenAI's form, with or without the `function` wrapping. One without a name is left out.
    pub fn new(definitions: &[Value]) -> Self {
        let tools = definitions.iter().filter_map(|definition| {
            let function = definition.get("function").unwrap_or(definition);
            let parameters = function.get("parameters").filter(|schema| schema.is_object());
            Some(Tool {
                name: function.get("name")?.as_str()?.to_owned(),
                parameters: parameters.cloned().unwrap_or_else(|| Value::Object(serde_json::Map::new())),
            })
        });
        Self { tools: tools.collect() }
    }

    /// The one tool of this name, or none.
    pub fn only(mut self, name: &str) -> Self {
        self.tools.retain(|tool| tool.name == name);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.tools.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter()
    }

    pub fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// Why a reader gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// It looked like a call and is ordinary text (forms without a marker only).
    NotACall,
    /// A call of a tool that was not given.
    Undefined,
    /// A call that is not well-formed, or was cut.
    Malformed,
}

impl From<Malformed> for Broken {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

/// What one character did to a reader.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    More,
    /// The calls are over; the text given back comes after them.
    Done(String),
}

/// Where readers put calls.
pub(super) struct Sink<'a> {
    pub tools: &'a Tools,
    pub pieces: &'a mut Vec<Piece>,
    /// Calls named so far in this answer.
    pub num_calls: &'a mut usize,
    /// A call is named and not ended.
    pub is_open: &'a mut bool,
}

impl Sink<'_> {
    /// Begins a call.
    pub fn name(&mut self, name: &str) -> Result<(), Broken> {
        if self.tools.get(name).is_none() {
            return Err(Broken::Undefined);
        }
        self.pieces.push(Piece::CallName { index: *self.num_calls, name: name.to_owned() });
        *self.num_calls += 1;
        *self.is_open = true;
        Ok(())
    }

    /// Passes on JSON text of the call's arguments.
    pub fn arguments(&mut self, fragment: &str) {
        if fragment.is_empty() {
            return;
        }
        let index = *self.num_calls - 1;
        if let Some(Piece::CallArguments { index: last, fragment: text }) = self.pieces.last_mut()
            && *last == index
        {
            text.push_str(fragment);
            return;
        }
        self.pieces.push(Piece::CallArguments { index, fragment: fragment.to_owned() });
    }

    /// The call is complete.
    pub fn end(&mut self) {
        self.pieces.push(Piece::CallEnd { index: *self.num_calls - 1 });
        *self.is_open = false;
    }

    /// The schema of one argument of a tool.
    pub fn tool(&self, name: &str) -> Option<&Tool> {
        self.tools.get(name)
    }
}

/// Reads the calls of one span.
pub(super) trait Reader: std::fmt::Debug + Send {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken>;

    /// The answer ends here; `is_cut` when a limit ended it. `Ok` means that no call is left open.
    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken>;
}

/// Arguments written as an object, one complete member after the other.
#[derive(Debug, Default)]
pub(super) struct ObjectWriter {
    has_members: bool,
}

impl ObjectWriter {
    /// `value` is JSON text.
    pub fn member(&mut self, key: &str, value: &str, sink: &mut Sink<'_>) {
        let open = if self.has_members { ", " } else { "{" };
        self.has_members = true;
        sink.arguments(&format!("{open}{}: {value}", json_text::quoted(key)));
    }

    pub fn end(&mut self, sink: &mut Sink<'_>) {
        sink.arguments(if self.has_members { "}" } else { "{}" });
        sink.end();
    }
}

/// The markers that begin a span of calls.
pub(super) fn openers(format: ToolCallFormat) -> &'static [&'static str] {
    use ToolCallFormat as F;
    match format {
        F::Hermes | F::Glm => &["<tool_call>"],
        F::QwenXml => &["<tool_call>", "<function="],
        F::SeedXml => &["<seed:tool_call>", "<function="],
        F::Gemma => &["<|tool_call>"],
        F::Llama3 => &["<|python_tag|>"],
        F::Mistral | F::MistralArgs => &["[TOOL_CALLS]"],
        F::Pythonic => &["<|python_start|>"],
        F::Lfm2 => &["<|tool_call_start|>"],
        F::Granite => &["<|tool_call|>"],
        F::ToolCallsTag => &["<tool_calls>"],
        F::CommandAction => &["<|START_ACTION|>"],
        F::Functools => &["functools["],
        F::DeepSeekV3 | F::DeepSeekV31 => &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        F::Kimi => &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        F::FunctionTag => &["<function="],
        F::Harmony => &[],
    }
}

/// Every marker of a format that a tokenizer may have as a token of its own.
pub(super) fn markup(format: ToolCallFormat) -> Vec<&'static str> {
    use ToolCallFormat as F;
    let more: &[&str] = match format {
        F::Hermes | F::QwenXml => &["</tool_call>"],
        F::SeedXml => &["</seed:tool_call>"],
        F::Glm => &["</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        F::Gemma => &["<tool_call|>", "<|\"|>"],
        F::MistralArgs => &["[CALL_ID]", "[ARGS]"],
        F::Pythonic => &["<|python_end|>"],
        F::Lfm2 => &["<|tool_call_end|>"],
        F::ToolCallsTag => &["</tool_calls>"],
        F::CommandAction => &["<|END_ACTION|>"],
        F::DeepSeekV3 | F::DeepSeekV31 => &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        F::Kimi => &["<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
        F::Harmony => harmony::MARKUP,
        F::Llama3 | F::Mistral | F::Granite | F::Functools | F::FunctionTag => &[],
    };
    let is_token = |marker: &&&str| marker.ends_with(['>', ']']);
    openers(format).iter().filter(is_token).chain(dropped(format)).chain(more).copied().collect()
}

/// Markers that mean nothing and are left out.
pub(super) fn dropped(format: ToolCallFormat) -> &'static [&'static str] {
    match format {
        ToolCallFormat::Llama3 => &["<|python_start|>", "<|python_end|>"],
        _ => &[],
    }
}

/// The character that may begin a call without a marker, where an answer begins.
pub(super) fn bare_opener(format: ToolCallFormat) -> Option<char> {
    match format {
        ToolCallFormat::Llama3 => Some('{'),
        ToolCallFormat::Pythonic | ToolCallFormat::Lfm2 => Some('['),
        _ => None,
    }
}

/// The reader for what follows `opener`; an empty opener is the bare one, whose character the
/// reader gets. Harmony has none: its messages are read by [`Harmony`].
pub(super) fn reader(format: ToolCallFormat, opener: &str) -> Option<Box<dyn Reader>> {
    use ToolCallFormat as F;
    let reader: Box<dyn Reader> = match format {
        F::Hermes => Box::new(json_object::JsonCalls::new(Some("</tool_call>"))),
        F::ToolCallsTag => Box::new(json_object::JsonCalls::new(Some("</tool_calls>"))),
        F::CommandAction => Box::new(json_object::JsonCalls::new(Some("<|END_ACTION|>"))),
        F::Granite => Box::new(json_object::JsonCalls::new(None)),
        F::Functools => Box::new(json_object::JsonCalls::in_list(None)),
        F::Llama3 if opener.is_empty() => Box::new(json_object::JsonCalls::bare()),
        F::Llama3 => Box::new(pythonic::PythonTag::new()),
        F::Mistral | F::MistralArgs => Box::new(named_json::MistralCalls::new()),
        F::DeepSeekV3 | F::DeepSeekV31 => Box::new(named_json::NamedJson::new(&named_json::DEEPSEEK, opener)),
        F::Kimi => Box::new(named_json::NamedJson::new(&named_json::KIMI, opener)),
        F::FunctionTag => Box::new(named_json::NamedJson::new(&named_json::FUNCTION_TAG, opener)),
        F::QwenXml => Box::new(xml::XmlCalls::new(opener, "</tool_call>")),
        F::SeedXml => Box::new(xml::XmlCalls::new(opener, "</seed:tool_call>")),
        F::Glm => Box::new(glm::GlmCall::new()),
        F::Gemma => Box::new(gemma::GemmaCall::new()),
        F::Pythonic if opener.is_empty() => Box::new(pythonic::PythonicCalls::new(None, true)),
        F::Pythonic => Box::new(pythonic::PythonicCalls::new(Some("<|python_end|>"), false)),
        F::Lfm2 if opener.is_empty() => Box::new(pythonic::PythonicCalls::new(None, true)),
        F::Lfm2 => Box::new(pythonic::PythonicCalls::new(Some("<|tool_call_end|>"), false)),
        F::Harmony => return None,
    };
    Some(reader)
}
