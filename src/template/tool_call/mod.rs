//! Tool calls as models write them: `format` is the table of formats, `formats` has a constant for each, of the type that `spec`
//! declares. The other files parse calls, and write grammars for them (`writer`, `arguments`, `literals`).
//!
//! A [`CallParser`] takes one character at a time behind the marker that begins a call. It names the call before it passes on
//! arguments, and passes on arguments only as JSON text; the sink refuses the name of a tool that was not given. No text is
//! lost: `OutputParser` keeps the raw text of every call whose name is not out yet.

mod arguments;
mod coerce;
mod format;
mod formats;
mod gemma;
mod glm;
mod harmony;
mod json_object;
mod json_text;
mod literals;
mod minimax_m3;
mod named_json;
mod python_literal;
mod pythonic;
mod shape;
mod spec;
pub(super) mod writer;
mod xml;

use serde_json::Value;

use super::piece::Piece;

pub use coerce::{COUNT_KEYWORDS, has_word, resolve as resolve_reference};
pub use format::ToolCallFormat;
pub(super) use harmony::{Harmony, Protocol};
use json_object::JsonCalls;
use json_text::{JsonScan, Malformed};
pub(super) use spec::{Messages, ToolCallSpec};

/// The member of a string's schema that holds the grammar of its text, as it stands `in_json` and `between_tags`: items of a Lark
/// grammar. Grammars for calls follow it; templates never see it.
pub const TEXT_GRAMMAR: &str = "x-llmctl-text";

/// The terminal that every terminal of a text between tags follows too. The grammar of the call defines it, so that the text
/// cannot contain the tag that ends it.
pub const TAGGED_TEXT: &str = "LLMCTL_TEXT";

/// The tools that an answer may call, by name.
#[derive(Debug, Default)]
pub(super) struct ToolDefinitions {
    tools: Vec<ToolDefinition>,
}

#[derive(Debug)]
pub(super) struct ToolDefinition {
    pub name: String,
    /// JSON Schema of the arguments; an empty object where the definition has none.
    pub parameters: Value,
}

impl ToolDefinitions {
    /// From definitions in OpenAI's form, with or without the `function` wrapping. One without a name is left out.
    pub fn new(definitions: &[Value]) -> Self {
        let tools = definitions.iter().filter_map(|definition| {
            let function = definition.get("function").unwrap_or(definition);
            let parameters = function.get("parameters").filter(|schema| schema.is_object());
            Some(ToolDefinition {
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

    pub fn iter(&self) -> impl Iterator<Item = &ToolDefinition> {
        self.tools.iter()
    }

    pub fn get(&self, name: &str) -> Option<&ToolDefinition> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// The reason why a parser gives up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallError {
    /// It looked like a call and is ordinary text (forms without a marker only).
    NotACall,
    /// A call of a tool that was not given.
    Undefined,
    /// A call that is not well-formed, or was cut.
    Malformed,
}

impl From<Malformed> for CallError {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

/// The effect of one character on a parser.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ParserStep {
    More,
    /// The calls are over; the text given back comes after them.
    Done(String),
}

/// Collects the calls that parsers find.
pub(super) struct PieceSink<'a> {
    pub tools: &'a ToolDefinitions,
    pub pieces: &'a mut Vec<Piece>,
    pub calls: &'a mut CallCount,
}

/// The calls of an answer so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CallCount {
    /// Calls that are named.
    pub num: usize,
    /// The last one is not ended.
    pub is_open: bool,
}

impl PieceSink<'_> {
    /// Begins a call.
    pub fn name(&mut self, name: &str) -> Result<(), CallError> {
        self.name_with_id(name, None)
    }

    /// Begins a call with an id of the model's own.
    pub fn name_with_id(&mut self, name: &str, own: Option<String>) -> Result<(), CallError> {
        self.tools.get(name).ok_or(CallError::Undefined)?;
        self.any_name(name, own);
        Ok(())
    }

    /// Begins a call of a tool that may not have been given.
    pub fn any_name(&mut self, name: &str, id: Option<String>) {
        self.pieces.push(Piece::CallName { index: self.calls.num, name: name.to_owned(), id });
        self.calls.num += 1;
        self.calls.is_open = true;
    }

    /// Passes on JSON text of the call's arguments.
    pub fn arguments(&mut self, fragment: &str) {
        if fragment.is_empty() {
            return;
        }
        let index = self.calls.num - 1;
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
        self.pieces.push(Piece::CallEnd { index: self.calls.num - 1 });
        self.calls.is_open = false;
    }

    /// As [`Self::end`], if a call is open.
    pub fn end_open(&mut self) {
        if self.calls.is_open {
            self.end();
        }
    }
}

/// Effect of one character.
type ParserResult = Result<ParserStep, CallError>;
/// Effect of one character of a JSON value.
type Scan = Result<JsonScan, CallError>;

/// Parses the calls of one span.
pub(super) trait CallParser: std::fmt::Debug + Send {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult;

    /// The answer ends here; `is_cut` when a limit ended it. `Ok` means that no call is left open.
    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError>;
}

/// Returns which of these markers a text is, the white space in front of it aside; `None` while it may become one.
fn met(held: &str, markers: &[&str]) -> Result<Option<usize>, CallError> {
    let held = held.trim_start();
    let is_begun = markers.iter().any(|marker| marker.starts_with(held));
    let met = markers.iter().position(|marker| *marker == held && !held.is_empty());
    if is_begun { Ok(met) } else { Err(CallError::Malformed) }
}

/// The place of a parser, and the text that it has read there.
#[derive(Debug, Default)]
pub(super) struct HeldText<S> {
    place: S,
    text: String,
}

impl<S> HeldText<S> {
    fn new(place: S) -> Self {
        Self { place, text: String::new() }
    }

    fn enter(&mut self, place: S) -> ParserResult {
        self.text.clear();
        self.place = place;
        Ok(ParserStep::More)
    }

    /// Reads the marker that ends a section, or one behind which `next` begins.
    fn take_between(&mut self, markers: [&str; 2], next: S) -> ParserResult {
        match met(&self.text, &markers)? {
            None => Ok(ParserStep::More),
            Some(0) => done(),
            Some(_) => self.enter(next),
        }
    }
}

/// The calls are over, and the last character belonged to them.
fn done() -> ParserResult {
    Ok(ParserStep::Done(String::new()))
}

/// Reads a span of JSON calls, or what `other` reads if it does not begin like JSON.
#[derive(Debug)]
pub(super) struct JsonOr {
    chosen: Option<Box<dyn CallParser>>,
    other: fn() -> Box<dyn CallParser>,
}

impl JsonOr {
    fn new(other: fn() -> Box<dyn CallParser>) -> Self {
        Self { chosen: None, other }
    }
}

impl CallParser for JsonOr {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if self.chosen.is_none() && c.is_whitespace() {
            return Ok(ParserStep::More);
        }
        let chosen = self.chosen.get_or_insert_with(|| match c {
            '{' | '[' => Box::new(JsonCalls::new(None)),
            _ => (self.other)(),
        });
        chosen.take(c, sink)
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        self.chosen.as_mut().ok_or(CallError::Malformed)?.finish(is_cut, sink)
    }
}

/// Arguments written as an object, one complete member after the other.
#[derive(Debug, Default)]
pub(super) struct ObjectWriter {
    has_members: bool,
}

impl ObjectWriter {
    /// `value` is JSON text.
    pub fn member(&mut self, key: &str, value: &str, sink: &mut PieceSink<'_>) {
        let open = if self.has_members { ", " } else { "{" };
        self.has_members = true;
        sink.arguments(&format!("{open}{}: {value}", json_text::quoted(key)));
    }

    pub fn end(&mut self, sink: &mut PieceSink<'_>) {
        sink.arguments(if std::mem::take(&mut self.has_members) { "}" } else { "{}" });
        sink.end();
    }
}
