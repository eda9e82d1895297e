//! Calls as a name, a separator and a JSON object: DeepSeek, Kimi, `<function=NAME>{...}</function>`, Mistral v11 on.
//!
//! The JSON value is read to its own end, so no marker inside its strings ends a call. A call is complete at its end
//! marker, or, where the form has none, at the closing brace.

use super::json_object::JsonCalls;
use super::json_text::{JsonScanner, Scan};
use super::{Broken, CallParser, Sink, Step};

/// The marks of one form.
#[derive(Debug)]
pub struct Marks {
    /// Begins one call inside the section; empty where a section is one call.
    pub begin: &'static str,
    /// Ends the name.
    pub separator: &'static str,
    /// Ends one call.
    pub end: &'static str,
    /// Ends the section; `None` where calls come without one.
    pub section_end: Option<&'static str>,
    /// The name in what stands before the separator, and whether the separator found there is the right one.
    pub name: fn(&str) -> Option<&str>,
}

#[derive(Debug)]
enum Place {
    /// Before a call's begin mark.
    Between,
    Head,
    Arguments(JsonScanner),
    End,
}

/// Reads one section.
#[derive(Debug)]
pub struct NamedJson {
    marks: &'static Marks,
    place: Place,
    held: String,
}

impl NamedJson {
    pub fn new(marks: &'static Marks, opener: &str) -> Self {
        let is_in_call = marks.begin.is_empty() || opener == marks.begin;
        Self { marks, place: if is_in_call { Place::Head } else { Place::Between }, held: String::new() }
    }

    fn take_between(&mut self) -> Result<Step, Broken> {
        let held = self.held.trim_start();
        if held == self.marks.begin {
            self.held.clear();
            self.place = Place::Head;
            return Ok(Step::More);
        }
        if self.marks.section_end == Some(held) {
            return Ok(Step::Done(String::new()));
        }
        let goes_on = |mark: &str| mark.starts_with(held);
        let is_mark = goes_on(self.marks.begin) || self.marks.section_end.is_some_and(goes_on);
        if is_mark { Ok(Step::More) } else { Err(Broken::Malformed) }
    }

    fn take_head(&mut self, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let Some(head) = self.held.strip_suffix(self.marks.separator) else {
            return Ok(Step::More);
        };
        let name = (self.marks.name)(head).ok_or(Broken::Malformed)?;
        sink.name(name)?;
        let mut scanner = JsonScanner::new();
        if self.marks.separator == "{" {
            let mut text = String::new();
            scanner.take('{', &mut text)?;
            sink.arguments(&text);
        }
        self.held.clear();
        self.place = Place::Arguments(scanner);
        Ok(Step::More)
    }

    fn take_end(&mut self, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        // DeepSeek closes its code block first.
        let held = self.held.trim_start();
        let held = held.strip_prefix("```").map_or(held, str::trim_start);
        if held == self.marks.end {
            sink.end();
            self.held.clear();
            self.place = Place::Between;
            return Ok(if self.marks.begin.is_empty() { Step::Done(String::new()) } else { Step::More });
        }
        let is_mark = self.marks.end.starts_with(held) || "```".starts_with(held);
        if is_mark { Ok(Step::More) } else { Err(Broken::Malformed) }
    }
}

impl CallParser for NamedJson {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        match &mut self.place {
            Place::Arguments(scanner) => {
                let mut text = String::new();
                let scan = take_object(scanner, c, &mut text)?;
                sink.arguments(&text);
                if scan != Scan::More {
                    self.place = Place::End;
                }
                Ok(Step::More)
            }
            place => {
                self.held.push(c);
                match place {
                    Place::Between => self.take_between(),
                    Place::Head => self.take_head(sink),
                    _ => self.take_end(sink),
                }
            }
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        match self.place {
            _ if is_cut => Err(Broken::Malformed),
            Place::End => {
                sink.end();
                Ok(())
            }
            Place::Between if *sink.num_calls > 0 => Ok(()),
            _ => Err(Broken::Malformed),
        }
    }
}

/// As [`JsonScanner::take`], for a value that must be an object.
pub fn take_object(scanner: &mut JsonScanner, c: char, out: &mut String) -> Result<Scan, Broken> {
    if scanner.is_before_value() && !c.is_ascii_whitespace() && c != '{' {
        return Err(Broken::Malformed);
    }
    // Space in front of the object is no part of it.
    if scanner.is_before_value() && c != '{' {
        return Ok(Scan::More);
    }
    Ok(scanner.take(c, out)?)
}

/// Mistral's calls behind `[TOOL_CALLS]`: a JSON list (v2 to v7), or `NAME[ARGS]{...}` with an optional `[CALL_ID]`
/// (v11 on).
#[derive(Debug)]
pub struct MistralCalls {
    list: Option<JsonCalls>,
    head: String,
    arguments: Option<JsonScanner>,
}

impl MistralCalls {
    pub fn new() -> Self {
        Self { list: None, head: String::new(), arguments: None }
    }
}

impl CallParser for MistralCalls {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        if let Some(list) = &mut self.list {
            return list.take(c, sink);
        }
        if let Some(scanner) = &mut self.arguments {
            let mut text = String::new();
            let scan = take_object(scanner, c, &mut text)?;
            sink.arguments(&text);
            if scan == Scan::More {
                return Ok(Step::More);
            }
            sink.end();
            return Ok(Step::Done(String::new()));
        }
        if self.head.trim().is_empty() && matches!(c, '[' | '{') {
            return self.list.insert(JsonCalls::new(None)).take(c, sink);
        }
        self.head.push(c);
        if let Some(head) = self.head.strip_suffix("[ARGS]") {
            let name = head.split_once("[CALL_ID]").map_or(head, |(name, _)| name);
            sink.name(name.trim())?;
            self.arguments = Some(JsonScanner::new());
        }
        Ok(Step::More)
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        match &mut self.list {
            Some(list) => list.finish(is_cut, sink),
            None => Err(Broken::Malformed),
        }
    }
}
