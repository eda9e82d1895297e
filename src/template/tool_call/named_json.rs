//! Calls as a name, a separator and a JSON object: DeepSeek, Kimi, `<function=NAME>{...}</function>`, Mistral v11 on.
//!
//! The JSON value is read to its own end, so no marker inside its strings ends a call. A call is complete at its end
//! marker, or, where the form has none, at the closing brace.

use super::json_object::JsonCalls;
use super::json_text::{JsonScan, JsonScanner};
use super::{CallError, CallParser, ParserResult, ParserStep, PieceSink, Scan, met};

/// The marks of one form.
#[derive(Debug)]
pub struct NamedJsonMarks {
    /// Begins one call inside the section; empty where a section is one call.
    pub begin: &'static str,
    /// Ends the name.
    pub separator: &'static str,
    /// Ends one call.
    pub end: &'static str,
    /// Ends the section; empty where calls come without one.
    pub section_end: &'static str,
    /// The name in what stands before the separator, and whether the separator found there is the right one.
    pub name: fn(&str) -> Option<&str>,
}

#[derive(Debug)]
enum NamedJsonState {
    /// Before a call's begin mark.
    Between,
    Head,
    Arguments(JsonScanner),
    End,
}

/// Reads one section.
#[derive(Debug)]
pub struct NamedJson {
    marks: &'static NamedJsonMarks,
    place: NamedJsonState,
    held: String,
}

impl NamedJson {
    pub fn new(marks: &'static NamedJsonMarks, opener: &str) -> Self {
        let is_in_call = marks.begin.is_empty() || opener == marks.begin;
        Self {
            marks,
            place: if is_in_call { NamedJsonState::Head } else { NamedJsonState::Between },
            held: String::new(),
        }
    }

    fn take_between(&mut self) -> ParserResult {
        match met(&self.held, &[self.marks.section_end, self.marks.begin])? {
            Some(0) => return Ok(ParserStep::Done(String::new())),
            Some(_) => {
                self.held.clear();
                self.place = NamedJsonState::Head;
            }
            None => {}
        }
        Ok(ParserStep::More)
    }

    fn take_head(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(head) = self.held.strip_suffix(self.marks.separator) else {
            return Ok(ParserStep::More);
        };
        let name = (self.marks.name)(head).ok_or(CallError::Malformed)?;
        sink.name(name)?;
        let mut scanner = JsonScanner::default();
        if self.marks.separator == "{" {
            let mut text = String::new();
            scanner.take('{', &mut text)?;
            sink.arguments(&text);
        }
        self.held.clear();
        self.place = NamedJsonState::Arguments(scanner);
        Ok(ParserStep::More)
    }

    fn take_end(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        // DeepSeek closes its code block first.
        let held = self.held.trim_start();
        let held = held.strip_prefix("```").map_or(held, str::trim_start);
        if held == self.marks.end {
            sink.end();
            self.held.clear();
            self.place = NamedJsonState::Between;
            return Ok(if self.marks.begin.is_empty() {
                ParserStep::Done(String::new())
            } else {
                ParserStep::More
            });
        }
        let is_mark = self.marks.end.starts_with(held) || "```".starts_with(held);
        if is_mark { Ok(ParserStep::More) } else { Err(CallError::Malformed) }
    }
}

impl CallParser for NamedJson {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        match &mut self.place {
            NamedJsonState::Arguments(scanner) => {
                if take_arguments(scanner, c, sink)? != JsonScan::More {
                    self.place = NamedJsonState::End;
                }
                Ok(ParserStep::More)
            }
            place => {
                self.held.push(c);
                match place {
                    NamedJsonState::Between => self.take_between(),
                    NamedJsonState::Head => self.take_head(sink),
                    _ => self.take_end(sink),
                }
            }
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.place {
            _ if is_cut => Err(CallError::Malformed),
            NamedJsonState::End => {
                sink.end();
                Ok(())
            }
            NamedJsonState::Between if sink.calls.num > 0 => Ok(()),
            _ => Err(CallError::Malformed),
        }
    }
}

/// Takes a character of a call's arguments, which must be an object, and passes them on.
pub fn take_arguments(scanner: &mut JsonScanner, c: char, sink: &mut PieceSink<'_>) -> Scan {
    if scanner.is_before_value() && c != '{' {
        // Space in front of the object is no part of it.
        return if c.is_ascii_whitespace() { Ok(JsonScan::More) } else { Err(CallError::Malformed) };
    }
    let mut text = String::new();
    let scan = scanner.take(c, &mut text)?;
    sink.arguments(&text);
    Ok(scan)
}

/// As [`take_arguments`], for a call that ends with its arguments and ends the section.
pub fn take_last_arguments(scanner: &mut JsonScanner, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
    if take_arguments(scanner, c, sink)? == JsonScan::More {
        return Ok(ParserStep::More);
    }
    sink.end();
    Ok(ParserStep::Done(String::new()))
}

/// Mistral's calls behind `[TOOL_CALLS]`: a JSON list (v2 to v7), or `NAME[ARGS]{...}` with an optional `[CALL_ID]`
/// (v11 on).
#[derive(Debug, Default)]
pub struct MistralCalls {
    list: Option<JsonCalls>,
    head: String,
    arguments: Option<JsonScanner>,
}

impl CallParser for MistralCalls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if let Some(list) = &mut self.list {
            return list.take(c, sink);
        }
        if let Some(scanner) = &mut self.arguments {
            return take_last_arguments(scanner, c, sink);
        }
        if self.head.trim().is_empty() && matches!(c, '[' | '{') {
            return self.list.insert(JsonCalls::new(None)).take(c, sink);
        }
        self.head.push(c);
        if let Some(head) = self.head.strip_suffix("[ARGS]") {
            let (name, id) = head.split_once("[CALL_ID]").unwrap_or((head, ""));
            let is_id = |id: &&str| id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric());
            let id = Some(id.trim()).filter(is_id).map(str::to_owned);
            sink.name_with_id(name.trim(), id)?;
            self.arguments = Some(JsonScanner::default());
        }
        Ok(ParserStep::More)
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match &mut self.list {
            Some(list) => list.finish(is_cut, sink),
            None => Err(CallError::Malformed),
        }
    }
}

/// A longer recipient is none.
const MAX_NAME: usize = 256;

/// Functionary 3.2: `>>>NAME`, a line break and the arguments as JSON; `>>>all` begins text. The prompt may end with `>>>`.
/// Python's prompt looks the same: what no given tool's name follows is text.
#[derive(Debug, Default)]
pub struct Recipient {
    head: String,
    arguments: Option<JsonScanner>,
}

impl Recipient {
    fn take_head(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if c != '\n' {
            self.head.push(c);
            return if self.head.len() > MAX_NAME { Err(CallError::NotACall) } else { Ok(ParserStep::More) };
        }
        match self.head.trim() {
            "all" => Ok(ParserStep::Done(String::new())),
            name if sink.tools.get(name).is_some() => {
                sink.name(name)?;
                self.arguments = Some(JsonScanner::default());
                Ok(ParserStep::More)
            }
            _ => Err(CallError::NotACall),
        }
    }
}

impl CallParser for Recipient {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(scanner) = &mut self.arguments else { return self.take_head(c, sink) };
        take_last_arguments(scanner, c, sink)
    }

    fn finish(&mut self, is_cut: bool, _sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.arguments {
            None if !is_cut => Err(CallError::NotACall),
            _ => Err(CallError::Malformed),
        }
    }
}
