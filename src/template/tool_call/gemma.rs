//! Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.
//!
//! Strings stand between `<|"|>` and hold anything, the close marker too. Bare words are typed by the schema, at every
//! depth; without a type they are JSON when they can be.

use super::coerce::{ArgumentSchema, typed};
use super::json_text::{members, quoted, whole_value};
use super::{CallError, CallParser, HeldText, ObjectWriter, ParserResult, ParserStep, PieceSink, met};

const QUOTE: &str = "<|\"|>";
const CLOSE: &str = "<tool_call|>";
const MAX_DEPTH: usize = 100;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum GemmaState {
    /// `call:NAME` before the brace.
    #[default]
    Head,
    Members,
    Closing,
}

/// Reads one call.
#[derive(Debug, Default)]
pub struct GemmaCall {
    at: HeldText<GemmaState>,
    name: String,
    is_quoted: bool,
    depth: usize,
    writer: ObjectWriter,
}

impl GemmaCall {
    fn take_head(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if c != '{' {
            self.at.text.push(c);
            let head = self.at.text.trim_start();
            let is_head = head.starts_with("call") || "call".starts_with(head);
            return if is_head { Ok(ParserStep::More) } else { Err(CallError::Malformed) };
        }
        let head = self.at.text.trim();
        let name = head.strip_prefix("call").and_then(|head| head.trim_start().strip_prefix(':'));
        self.name = name.ok_or(CallError::Malformed)?.trim().to_owned();
        sink.name(&self.name)?;
        self.at.enter(GemmaState::Members)
    }

    fn take_member(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if !self.is_quoted && self.depth == 0 && matches!(c, ',' | '}') {
            let member = std::mem::take(&mut self.at.text);
            if !member.trim().is_empty() {
                let (key, value) = self.member(&member, sink).ok_or(CallError::Malformed)?;
                self.writer.member(&key, &value, sink);
            }
            return if c == '}' { self.at.enter(GemmaState::Closing) } else { Ok(ParserStep::More) };
        }
        self.at.text.push(c);
        if self.at.text.ends_with(QUOTE) {
            self.is_quoted = !self.is_quoted;
        } else if !self.is_quoted {
            match c {
                '{' | '[' => self.depth += 1,
                '}' | ']' => self.depth = self.depth.checked_sub(1).ok_or(CallError::Malformed)?,
                _ => {}
            }
        }
        Ok(ParserStep::More)
    }

    /// A member's key and its value as JSON text.
    fn member(&self, text: &str, sink: &PieceSink<'_>) -> Option<(String, String)> {
        let (key, rest) = key(text)?;
        let parameters = &sink.tools.get(&self.name)?.parameters;
        let (value, rest) = value(rest, ArgumentSchema::new(parameters).property(&key), 0)?;
        rest.trim().is_empty().then_some((key, value))
    }
}

impl CallParser for GemmaCall {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        match self.at.place {
            GemmaState::Head => self.take_head(c, sink),
            GemmaState::Members => self.take_member(c, sink),
            GemmaState::Closing => {
                self.at.text.push(c);
                if met(&self.at.text, &[CLOSE])?.is_none() {
                    return Ok(ParserStep::More);
                }
                self.writer.end(sink);
                Ok(ParserStep::Done(String::new()))
            }
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if is_cut || self.at.place != GemmaState::Closing {
            return Err(CallError::Malformed);
        }
        self.writer.end(sink);
        Ok(())
    }
}

/// A key, bare or quoted, and what follows its colon.
fn key(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start();
    if let Some(quoted) = text.strip_prefix(QUOTE) {
        let (key, rest) = quoted.split_once(QUOTE)?;
        return Some((key.to_owned(), rest.trim_start().strip_prefix(':')?));
    }
    let (key, rest) = text.split_once(':')?;
    Some((key.trim().trim_matches('"').to_owned(), rest))
}

/// A value as JSON text, and what follows it.
fn value<'a>(text: &'a str, schema: ArgumentSchema<'_>, depth: usize) -> Option<(String, &'a str)> {
    let text = text.trim_start();
    if depth > MAX_DEPTH {
        return None;
    }
    if let Some(rest) = text.strip_prefix(QUOTE) {
        let (content, rest) = rest.split_once(QUOTE)?;
        return Some((quoted(content), rest));
    }
    if let Some(rest) = text.strip_prefix('{') {
        return members(rest, '}', |rest| {
            let (key, rest) = key(rest)?;
            let (value, rest) = value(rest, schema.property(&key), depth + 1)?;
            Some((format!("{}: {value}", quoted(&key)), rest))
        });
    }
    if let Some(rest) = text.strip_prefix('[') {
        return members(rest, ']', |rest| value(rest, schema.items(), depth + 1));
    }
    let end = text.find([',', '}', ']']).unwrap_or(text.len());
    Some((bare(text[..end].trim(), schema), &text[end..]))
}

/// A word without quotes: what the schema says it is, and else what it looks like.
fn bare(word: &str, schema: ArgumentSchema<'_>) -> String {
    let types = schema.types();
    if let Some(value) = typed(word, types) {
        return value;
    }
    match whole_value(word) {
        // A string in plain quotes is one whatever the schema says.
        Ok(value) if types.is_unknown() || word.starts_with('"') => value,
        _ => quoted(word),
    }
}
