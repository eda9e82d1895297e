//! Answers that are rows of messages, each with a header that names its recipient: Harmony (gpt-oss) and ATEM (Muse Glimmer).
//!
//! In Harmony, `<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning, `final` and `commentary` without a
//! recipient are content, and a message `to=functions.NAME` is a call with its arguments as JSON. In ATEM, messages `to=self`
//! are reasoning, those `to=user` content, and a message `to=NAME` holds a call in tags. The prompt ends inside a header.
//!
//! No header and no marker is ever shown. In Harmony, a call of a tool that was not given is a call all the same: clients answer
//! it with an error that the model can read. A message to another recipient, or a call where no tools were given, is the model
//! talking to itself: reasoning. Harmony's calls are complete at their closing brace, because `<|call|>` ends the turn
//! and is usually not seen.

use super::arguments::Tagging;
use super::json_text::{JsonScan, JsonScanner};
use super::named_json::take_arguments;
use super::xml::{Tags, XmlCalls};
use super::{CallError, CallParser, ParserStep, PieceSink};
use crate::piece::{Piece, push_text};

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";

/// The two ways of writing messages with headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Protocol {
    #[default]
    Harmony,
    Atem,
}

impl Protocol {
    /// Returns the markers that end a message's text.
    fn ends(self) -> &'static [&'static str] {
        match self {
            Self::Harmony => &["<|end|>", "<|return|>", "<|call|>", START, CHANNEL],
            Self::Atem => &["<|eom|>", "<|eot|>", START],
        }
    }
}

/// Begins the calls of an ATEM message.
pub const ATEM_CALLS: &str = "<atem:function_calls>";

pub const ATEM_TAGS: Tags = Tags {
    call: "<atem:invoke name=\"",
    section_end: "</atem:function_calls>",
    is_many: true,
    tagging: Tagging::named("<atem:parameter name=\"", "</atem:parameter>", "</atem:invoke>"),
    ..Tags::PLAIN
};

/// Every marker, for tokenizers that have them as special tokens.
pub const MARKUP: &[&str] = &[START, CHANNEL, MESSAGE, "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"];

#[derive(Debug, Default)]
enum Body {
    #[default]
    Content,
    Reasoning,
    /// Arguments; no scanner when they are complete.
    Call(Option<JsonScanner>),
    /// A call in tags, with what may still be the marker that begins it; no reader when it is complete.
    Tagged(String, Option<Box<dyn CallParser>>),
}

/// Takes the messages of one answer apart.
#[derive(Debug, Default)]
pub struct Harmony {
    protocol: Protocol,
    /// The header so far, when inside one.
    header: Option<String>,
    body: Body,
    /// The beginning of a marker, perhaps.
    held: String,
    /// Space that counts only when text follows.
    space: String,
    /// A message has begun whose first text is still to come.
    is_fresh: bool,
    has_content: bool,
    has_reasoning: bool,
}

impl Harmony {
    pub fn new(protocol: Protocol, prompt_tail: &str) -> Self {
        let mut harmony = Self { protocol, ..Self::default() };
        if let Some((_, open)) = prompt_tail.rsplit_once(START) {
            match open.split_once(MESSAGE) {
                None => harmony.header = Some(open.to_owned()),
                Some((header, text)) if !protocol.ends().iter().any(|end| text.contains(end)) => {
                    let is_reasoning = harmony.is_reasoning(header);
                    harmony.body = if is_reasoning { Body::Reasoning } else { Body::Content };
                }
                Some(_) => {}
            }
        }
        harmony
    }

    /// Takes one character.
    pub fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if let Some(header) = &mut self.header {
            header.push(c);
            if header.ends_with(MESSAGE) {
                let header = self.header.take().unwrap_or_default();
                self.begin_message(header.trim_end_matches(MESSAGE), sink);
            }
            return Ok(());
        }
        self.held.push(c);
        let ends = self.protocol.ends();
        while !self.held.is_empty() {
            if let Some(end) = ends.iter().find(|end| **end == self.held) {
                self.held.clear();
                return self.end_message(end);
            }
            if ends.iter().any(|end| end.starts_with(&self.held)) {
                return Ok(());
            }
            let first = self.held.remove(0);
            self.take_text(first, sink)?;
        }
        Ok(())
    }

    /// Returns whether a message without a call is reasoning.
    fn is_reasoning(&self, header: &str) -> bool {
        match (self.protocol, recipient(header)) {
            (Protocol::Harmony, None) => channel(header) == Some("analysis"),
            (Protocol::Harmony, Some(_)) => true,
            (Protocol::Atem, to) => to.is_some_and(|to| to != "user"),
        }
    }

    /// The tool that a message calls.
    fn called<'a>(&self, header: &'a str, sink: &PieceSink<'_>) -> Option<&'a str> {
        let to = recipient(header).filter(|_| !sink.tools.is_empty())?;
        match (sink.tools.get(to), self.protocol) {
            (Some(_), _) => Some(to),
            (None, Protocol::Harmony) => to.strip_prefix("functions."),
            (None, Protocol::Atem) => None,
        }
    }

    fn begin_message(&mut self, header: &str, sink: &mut PieceSink<'_>) {
        self.is_fresh = true;
        self.body = match (self.called(header, sink), self.protocol) {
            (Some(name), Protocol::Harmony) => {
                sink.any_name(name, None);
                Body::Call(Some(JsonScanner::default()))
            }
            (Some(_), Protocol::Atem) => {
                Body::Tagged(String::new(), Some(Box::new(XmlCalls::new(&ATEM_TAGS, ATEM_CALLS))))
            }
            _ if self.is_reasoning(header) => Body::Reasoning,
            _ => Body::Content,
        };
    }

    fn end_message(&mut self, end: &str) -> Result<(), CallError> {
        self.space.clear();
        if matches!(self.body, Body::Call(Some(_)) | Body::Tagged(_, Some(_))) {
            return Err(CallError::Malformed);
        }
        self.body = Body::Content;
        self.is_fresh = true;
        if end == START || end == CHANNEL {
            self.header = Some(if end == CHANNEL { CHANNEL.to_owned() } else { String::new() });
        }
        Ok(())
    }

    /// A character of a call in tags.
    fn take_tagged(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        let Body::Tagged(opener, reader) = &mut self.body else { return Ok(()) };
        let Some(inside) = reader else {
            return if c.is_whitespace() { Ok(()) } else { Err(CallError::Malformed) };
        };
        let marker = ATEM_CALLS;
        if opener != marker {
            opener.push(c);
            let held = opener.trim_start();
            let is_marker = marker.starts_with(held);
            *opener = held.to_owned();
            return if is_marker { Ok(()) } else { Err(CallError::Malformed) };
        }
        // The tag may name another tool than the header.
        if let ParserStep::Done(_) = inside.take(c, sink).map_err(|_| CallError::Malformed)? {
            *reader = None;
        }
        Ok(())
    }

    fn take_text(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if matches!(self.body, Body::Tagged(..)) {
            return self.take_tagged(c, sink);
        }
        if let Body::Call(arguments) = &mut self.body {
            let Some(scanner) = arguments else {
                return if c.is_whitespace() { Ok(()) } else { Err(CallError::Malformed) };
            };
            if take_arguments(scanner, c, sink)? != JsonScan::More {
                *arguments = None;
                sink.end();
            }
            return Ok(());
        }
        if c.is_whitespace() {
            self.space.push(c);
            return Ok(());
        }
        let is_reasoning = matches!(self.body, Body::Reasoning);
        let has_before = if is_reasoning { &mut self.has_reasoning } else { &mut self.has_content };
        let mut text = std::mem::take(&mut self.space);
        if self.is_fresh && *has_before {
            // Two messages of one kind are two paragraphs.
            text = "\n\n".to_owned();
        } else if self.is_fresh && is_reasoning {
            text.clear();
        }
        *has_before = true;
        self.is_fresh = false;
        text.push(c);
        push_text(sink.pieces, is_reasoning, &text);
        Ok(())
    }

    /// The end of the answer.
    pub fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match &mut self.body {
            Body::Call(Some(_)) => return Err(CallError::Malformed),
            Body::Tagged(_, Some(reader)) if self.held.is_empty() => return reader.finish(is_cut, sink),
            Body::Tagged(_, Some(_)) => return Err(CallError::Malformed),
            _ => {}
        }
        if self.header.is_some() {
            return Ok(());
        }
        let held = std::mem::take(&mut self.held);
        if !(is_cut && held.len() > 1) {
            held.chars().try_for_each(|c| self.take_text(c, sink))?;
        }
        if matches!(self.body, Body::Content) && self.has_content && !self.space.is_empty() {
            sink.pieces.push(Piece::Content(std::mem::take(&mut self.space)));
        }
        Ok(())
    }
}

fn word_after<'a>(header: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = header.rsplit_once(mark)?;
    let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
    Some(&rest[..end])
}

fn recipient(header: &str) -> Option<&str> {
    word_after(header, "to=").filter(|name| !name.is_empty() && *name != "assistant")
}

fn channel(header: &str) -> Option<&str> {
    word_after(header, CHANNEL)
}
