//! The specification of one tool-call format: the texts by which a template is recognised, the markers, the parser, and the
//! grammar.

use super::glm::{GlmCall, GlmMarks};
use super::harmony::Protocol;
use super::json_object::JsonCalls;
use super::named_json::{NamedJson, NamedJsonMarks};
use super::writer::Writer;
use super::xml::{Tags, XmlCalls};
use super::{CallParser, ToolDefinition};

/// One tool-call format.
#[derive(Debug)]
pub struct ToolCallSpec {
    /// The word for flags and reports.
    pub name: &'static str,
    /// Texts by which a template is recognised: all texts of any of these sets.
    pub signs: &'static [&'static [&'static str]],
    /// The markers that begin a span of calls; grammars write the first.
    pub openers: &'static [&'static str],
    /// Further markers that begin calls, which grammars neither write nor rule out where several calls may be: nothing counts these.
    pub unwritten_openers: &'static [&'static str],
    /// Further markers that a tokenizer may have as tokens of their own.
    pub marks: &'static [&'static str],
    /// Markers that mean nothing and are left out.
    pub dropped: &'static [&'static str],
    /// Ends a span of calls; empty if no marker does. ToolCallSpecs with one are looked for in reasoning too.
    pub end: &'static str,
    /// An opener that the prompt may end with.
    pub prompt_opener: Option<&'static str>,
    /// The protocol, if answers are rows of messages with headers.
    pub protocol: Option<Protocol>,
    /// The markup around calls, if text has markers too.
    pub messages: Option<Messages>,
    /// The character that may begin a call without a marker, where an answer begins.
    pub bare: Option<char>,
    /// A regular expression for answers that begin like a call, where grammars write calls without a marker.
    pub bare_call: Option<&'static str>,
    pub frame: Frame,
    pub notation: Notation,
    /// One call as a grammar writes it; the last text stands in front of the tool's name.
    pub call: fn(&'static Self, &mut Writer<'_>, &ToolDefinition, &str) -> String,
}

/// How a reader takes calls apart.
#[derive(Debug)]
pub enum Notation {
    /// JSON objects with a name and arguments, alone or in a list.
    Objects,
    /// A name, a separator and a JSON object.
    Named(NamedJsonMarks),
    /// A tag for each parameter.
    Tags(Tags),
    /// Keys and values in turn.
    Pairs(GlmMarks),
    /// A reader of its own for what follows an opener.
    Own(fn(&'static str) -> Box<dyn CallParser>),
}

/// The texts between and around the calls of a format.
#[derive(Debug)]
pub struct Frame {
    /// Between the marker and the first call.
    pub open: &'static str,
    /// In front of the first call's name, where the call begins with it and text may begin alike.
    pub lead: &'static str,
    /// Between calls that share a marker; `None` where each call has its own.
    pub separator: Option<&'static str>,
    pub close: &'static str,
    /// Between spans with a marker each.
    pub between: &'static str,
}

impl ToolCallSpec {
    pub const PLAIN: Self = Self::new("", &[], &[], "");

    /// A format of these texts whose calls are `{"name": NAME, "arguments": {...}}`.
    pub const fn new(
        name: &'static str,
        signs: &'static [&'static [&'static str]],
        openers: &'static [&'static str],
        end: &'static str,
    ) -> Self {
        Self {
            name,
            signs,
            openers,
            unwritten_openers: &[],
            marks: &[],
            dropped: &[],
            end,
            prompt_opener: None,
            protocol: None,
            messages: None,
            bare: None,
            bare_call: None,
            frame: Frame::PLAIN,
            notation: Notation::Objects,
            call: |spec, writer, tool, _| match &spec.notation {
                Notation::Tags(Tags { tagging, .. }) | Notation::Pairs(GlmMarks { tagging, .. }) => {
                    writer.tagged(tool, tagging)
                }
                _ => writer.object_call(tool, ["{\"name\": ", ", \"arguments\": ", "}"]),
            },
        }
    }

    /// Returns a reader for what follows an opener; an empty opener is the bare one, whose character the reader gets. Not for formats
    /// with a protocol: their messages are read by [`super::Harmony`].
    pub fn reader(&'static self, opener: &'static str) -> Box<dyn CallParser> {
        match &self.notation {
            Notation::Objects => Box::new(JsonCalls::new(Some(self.end).filter(|end| !end.is_empty()))),
            Notation::Named(marks) => Box::new(NamedJson::new(marks, opener)),
            Notation::Tags(tags) => Box::new(XmlCalls::new(tags, opener)),
            Notation::Pairs(marks) => Box::new(GlmCall::new(marks, opener)),
            Notation::Own(reader) => reader(opener),
        }
    }
}

impl Frame {
    pub const PLAIN: Self = Self { open: "", lead: "", separator: None, close: "", between: "" };
    /// Calls of a JSON list.
    pub const LIST: Self = Self { open: "[", separator: Some(", "), close: "]", ..Self::PLAIN };

    /// Each call begins with `open`, and the last one is followed by `close`.
    pub const fn each(open: &'static str, close: &'static str) -> Self {
        Self { open, separator: Some(open), close, ..Self::PLAIN }
    }
}

/// The markup around calls in answers whose text has markers too.
#[derive(Debug)]
pub struct Messages {
    /// The markers that begin a text and that end it if something follows.
    pub texts: &'static [(&'static str, &'static str)],
    /// May end the answer behind a text.
    pub end: &'static str,
    /// May end the answer behind calls.
    pub calls_end: &'static str,
}
