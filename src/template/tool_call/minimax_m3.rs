//! MiniMax M3's tags, each behind a token of its own: a parameter's tag is its name, lists are rows of `<item>`, objects hold
//! tags again. The token stands in no text, so that a tag is one wherever it comes.
//!
//! A call is named at its head; its arguments go out when it is complete.

use super::coerce::{ArgumentSchema, coerced};
use super::json_text::quoted;
use super::{CallError, CallParser, HeldText, ObjectWriter, ParserResult, ParserStep, PieceSink};

/// Stands in front of every tag.
pub const TOKEN: &str = "]<]minimax[>[";
const CALL: &str = "]<]minimax[>[<invoke name=\"";
const CALL_END: &str = "]<]minimax[>[</invoke>";
const SECTION_END: &str = "]<]minimax[>[</tool_call>";
const MAX_DEPTH: usize = 50;
const MAX_NAME: usize = 256;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum MiniMaxState {
    #[default]
    Between,
    Name,
    Body,
}

/// Reads one section.
#[derive(Debug, Default)]
pub struct M3Calls {
    at: HeldText<MiniMaxState>,
    name: String,
}

impl M3Calls {
    fn take_name(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        if let Some(name) = self.at.text.strip_suffix("\">") {
            self.name = name.trim().to_owned();
            sink.name(&self.name)?;
            return self.at.enter(MiniMaxState::Body);
        }
        if self.at.text.len() > MAX_NAME { Err(CallError::Malformed) } else { Ok(ParserStep::More) }
    }

    fn take_body(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(body) = self.at.text.strip_suffix(CALL_END) else { return Ok(ParserStep::More) };
        let parameters = &sink.tools.get(&self.name).ok_or(CallError::Malformed)?.parameters;
        let elements = elements(body).ok_or(CallError::Malformed)?;
        let schema = ArgumentSchema::new(parameters);
        let values = elements.iter().map(|(key, text)| Some((*key, value(text, schema.property(key), 0)?)));
        let values: Option<Vec<(&str, String)>> = values.collect();
        let mut writer = ObjectWriter::default();
        for (key, value) in values.ok_or(CallError::Malformed)? {
            writer.member(key, &value, sink);
        }
        writer.end(sink);
        self.at.enter(MiniMaxState::Between)
    }
}

impl CallParser for M3Calls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        self.at.text.push(c);
        match self.at.place {
            MiniMaxState::Between => self.at.take_between([SECTION_END, CALL], MiniMaxState::Name),
            MiniMaxState::Name => self.take_name(sink),
            MiniMaxState::Body => self.take_body(sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        let is_whole = self.at.place == MiniMaxState::Between && sink.calls.num > 0 && !is_cut;
        if is_whole { Ok(()) } else { Err(CallError::Malformed) }
    }
}

/// A row of elements with what is inside of each; `None` where it is none.
fn elements(text: &str) -> Option<Vec<(&str, &str)>> {
    let (mut all, mut rest) = (Vec::new(), text.trim());
    while !rest.is_empty() {
        let (tag, inside) = rest.strip_prefix(TOKEN)?.strip_prefix('<')?.split_once('>')?;
        let end = end_of(inside, tag)?;
        all.push((tag, &inside[..end]));
        rest = inside[end + TOKEN.len() + "</>".len() + tag.len()..].trim_start();
    }
    Some(all)
}

/// Finds the end of an open element: the close tag that belongs to no element of the same name inside it.
fn end_of(inside: &str, tag: &str) -> Option<usize> {
    let (open, close) = (format!("{TOKEN}<{tag}>"), format!("{TOKEN}</{tag}>"));
    let mut depth = 0_usize;
    for (at, _) in inside.match_indices(TOKEN) {
        if inside[at..].starts_with(&close) {
            if depth == 0 {
                return Some(at);
            }
            depth -= 1;
        } else if inside[at..].starts_with(&open) {
            depth += 1;
        }
    }
    None
}

/// Returns the content of an element as JSON.
fn value(text: &str, schema: ArgumentSchema<'_>, depth: usize) -> Option<String> {
    if !text.trim_start().starts_with(TOKEN) {
        return Some(match schema.types() {
            types if text.trim().is_empty() && types.array && !types.string => "[]".to_owned(),
            types if text.trim().is_empty() && types.object && !types.string => "{}".to_owned(),
            _ => coerced(text, schema),
        });
    }
    let inside = elements(text).filter(|_| depth < MAX_DEPTH)?;
    let types = schema.types();
    let is_list = types.array || (!types.object && inside.iter().all(|(tag, _)| *tag == "item"));
    let of = |(tag, text): &(&str, &str)| {
        let schema = if is_list { schema.items() } else { schema.property(tag) };
        let value = value(text, schema, depth + 1)?;
        Some(if is_list { value } else { format!("{}: {value}", quoted(tag)) })
    };
    let all: Vec<String> = inside.iter().map(of).collect::<Option<_>>()?;
    Some(if is_list { format!("[{}]", all.join(", ")) } else { format!("{{{}}}", all.join(", ")) })
}
