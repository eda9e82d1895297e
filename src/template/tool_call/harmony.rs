//! Harmony (gpt-oss): an answer is a row of messages, each with a header that names its channel and its recipient.
//!
//! `<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning, `final` and `commentary` without a recipient
//! are content, and a message `to=functions.NAME` is a call with its arguments as JSON. The prompt ends inside a header. A
//! call is complete at its closing brace, because `<|call|>` ends the turn and is usually not seen.

use super::json_text::{JsonScanner, Scan};
use super::named_json::take_object;
use super::{Broken, Sink};
use crate::template::output::{Piece, push_text};

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
/// What ends a message's text.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", START, CHANNEL];

/// Every marker, for tokenizers that have them as special tokens.
pub const MARKUP: &[&str] = &[START, CHANNEL, MESSAGE, "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"];

#[derive(Debug)]
enum Body {
    Content,
    Reasoning,
    /// Arguments; no scanner when they are complete.
    Call(Option<JsonScanner>),
}

/// Takes the messages of one answer apart.
#[derive(Debug)]
pub struct Harmony {
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
    pub fn new(prompt_tail: &str) -> Self {
        let mut harmony = Self {
            header: None,
            body: Body::Content,
            held: String::new(),
            space: String::new(),
            is_fresh: false,
            has_content: false,
            has_reasoning: false,
        };
        if let Some((_, open)) = prompt_tail.rsplit_once(START) {
            match open.split_once(MESSAGE) {
                None => harmony.header = Some(open.to_owned()),
                Some((header, text)) if !ENDS.iter().any(|end| text.contains(end)) => {
                    let is_reasoning = recipient(header).is_none() && channel(header) == Some("analysis");
                    harmony.body = if is_reasoning { Body::Reasoning } else { Body::Content };
                }
                Some(_) => {}
            }
        }
        harmony
    }

    /// Takes one character. `raw` is what would be shown if the call it belongs to is none.
    pub fn take(&mut self, c: char, raw: &mut String, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if let Some(header) = &mut self.header {
            raw.push(c);
            header.push(c);
            if header.ends_with(MESSAGE) {
                let header = self.header.take().unwrap_or_default();
                self.begin_message(header.trim_end_matches(MESSAGE), sink)?;
                raw.clear();
            }
            return Ok(());
        }
        self.held.push(c);
        while !self.held.is_empty() {
            if let Some(end) = ENDS.iter().find(|end| **end == self.held) {
                self.held.clear();
                return self.end_message(end, raw);
            }
            if ENDS.iter().any(|end| end.starts_with(&self.held)) {
                return Ok(());
            }
            let first = self.held.remove(0);
            self.take_text(first, sink)?;
        }
        Ok(())
    }

    fn begin_message(&mut self, header: &str, sink: &mut Sink<'_>) -> Result<(), Broken> {
        self.is_fresh = true;
        self.body = match recipient(header) {
            Some(recipient) => {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                sink.name(if sink.tool(recipient).is_some() { recipient } else { name })?;
                Body::Call(Some(JsonScanner::new()))
            }
            None if channel(header) == Some("analysis") => Body::Reasoning,
            None => Body::Content,
        };
        Ok(())
    }

    fn end_message(&mut self, end: &str, raw: &mut String) -> Result<(), Broken> {
        self.space.clear();
        if matches!(self.body, Body::Call(Some(_))) {
            return Err(Broken::Malformed);
        }
        self.body = Body::Content;
        self.is_fresh = true;
        if end == START || end == CHANNEL {
            self.header = Some(if end == CHANNEL { CHANNEL.to_owned() } else { String::new() });
            raw.push_str(end);
        }
        Ok(())
    }

    fn take_text(&mut self, c: char, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if let Body::Call(arguments) = &mut self.body {
            let Some(scanner) = arguments else {
                return if c.is_whitespace() { Ok(()) } else { Err(Broken::Malformed) };
            };
            let mut text = String::new();
            let scan = take_object(scanner, c, &mut text)?;
            sink.arguments(&text);
            if scan != Scan::More {
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
    pub fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if matches!(self.body, Body::Call(Some(_))) {
            return Err(Broken::Malformed);
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
    let (_, rest) = header.split_once(mark)?;
    let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
    Some(&rest[..end])
}

fn recipient(header: &str) -> Option<&str> {
    word_after(header, "to=").filter(|name| !name.is_empty())
}

fn channel(header: &str) -> Option<&str> {
    word_after(header, CHANNEL)
}
