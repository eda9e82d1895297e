//! Calls as a name, a separator and a JSON object: DeepSeek, Kimi, `<function=NAME>{...}</function>`, Mistral v11 on.
//!
//! The JSON value is read to its own end, so no marker inside its strings ends a call. A call is complete at its end
//! marker, or, where the form has none, at the closing brace.

use super::json_text::{JsonScan, JsonScanner};
use super::{CallError, CallParser, HeldText, ParserResult, ParserStep, PieceSink, Scan, done, met};

/// The marks of one form.
#[derive(Debug)]
pub struct NamedJsonMarks {
    /// Begins one call inside the section; empty where a section is one call.
    pub begin: &'static str,
    /// Ends the name.
    pub separator: &'static str,
    /// Ends one call; empty where its closing brace does.
    pub end: &'static str,
    /// Ends the section; empty where calls come without one.
    pub section_end: &'static str,
    /// The name in what stands before the separator, whether the separator found there is the right one, and the model's own id.
    pub name: fn(&str) -> Option<NameAndId<'_>>,
}

/// A tool's name, and the model's own id of the call.
pub type NameAndId<'a> = (&'a str, Option<&'a str>);

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
    at: HeldText<NamedJsonState>,
}

impl NamedJson {
    pub fn new(marks: &'static NamedJsonMarks, opener: &str) -> Self {
        let is_in_call = marks.begin.is_empty() || opener == marks.begin;
        let at = HeldText::new(if is_in_call { NamedJsonState::Head } else { NamedJsonState::Between });
        Self { marks, at }
    }

    fn take_head(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(head) = self.at.text.strip_suffix(self.marks.separator) else {
            return Ok(ParserStep::More);
        };
        let (name, id) = (self.marks.name)(head).ok_or(CallError::Malformed)?;
        sink.name_with_id(name, id.map(str::to_owned))?;
        let mut scanner = JsonScanner::default();
        if self.marks.separator == "{" {
            take_arguments(&mut scanner, '{', sink)?;
        }
        self.at.enter(NamedJsonState::Arguments(scanner))
    }

    fn take_end(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        // DeepSeek closes its code block first.
        let held = self.at.text.trim_start();
        let held = held.strip_prefix("```").map_or(held, str::trim_start);
        let NamedJsonMarks { begin, end, section_end, .. } = self.marks;
        match met(held, &[end, begin, section_end, "```"])? {
            Some(0) => self.end_call(sink),
            // Kimi K2 leaves the end of a call out now and then.
            Some(1) => {
                sink.end();
                self.at.enter(NamedJsonState::Head)
            }
            Some(2) => {
                sink.end();
                done()
            }
            _ => Ok(ParserStep::More),
        }
    }

    fn end_call(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        sink.end();
        if self.marks.begin.is_empty() { done() } else { self.at.enter(NamedJsonState::Between) }
    }
}

impl CallParser for NamedJson {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if let NamedJsonState::Arguments(scanner) = &mut self.at.place {
            return match take_arguments(scanner, c, sink)? {
                JsonScan::More => Ok(ParserStep::More),
                _ if self.marks.end.is_empty() => self.end_call(sink),
                _ => self.at.enter(NamedJsonState::End),
            };
        }
        self.at.text.push(c);
        match self.at.place {
            NamedJsonState::Between => {
                self.at.take_between([self.marks.section_end, self.marks.begin], NamedJsonState::Head)
            }
            NamedJsonState::Head => self.take_head(sink),
            _ => self.take_end(sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.at.place {
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

/// A longer recipient is none.
const MAX_NAME: usize = 256;

/// Functionary 3.2: `>>>NAME`, a line break and the arguments as JSON; `>>>all` begins text. The prompt may end with `>>>`.
/// Python's prompt looks the same: what no given tool's name follows is text.
#[derive(Debug, Default)]
pub struct Recipient {
    head: String,
    arguments: Option<JsonScanner>,
}

impl CallParser for Recipient {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        match (&mut self.arguments, c) {
            (Some(scanner), _) => {
                if take_arguments(scanner, c, sink)? != JsonScan::More {
                    sink.end();
                    return done();
                }
            }
            (None, '\n') => match self.head.trim() {
                "all" => return done(),
                name if sink.tools.get(name).is_some() => {
                    sink.name(name)?;
                    self.arguments = Some(JsonScanner::default());
                }
                _ => return Err(CallError::NotACall),
            },
            (None, _) if self.head.len() + c.len_utf8() > MAX_NAME => return Err(CallError::NotACall),
            (None, _) => self.head.push(c),
        }
        Ok(ParserStep::More)
    }

    fn finish(&mut self, is_cut: bool, _sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.arguments {
            None if !is_cut => Err(CallError::NotACall),
            _ => Err(CallError::Malformed),
        }
    }
}
