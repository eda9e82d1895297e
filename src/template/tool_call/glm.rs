//! GLM and Hy3: a name, then keys and values in turn, each in tags of its own: `<arg_key>` and `<arg_value>`.
//!
//! Strings stand as they are, everything else as JSON. A value ends at a close tag that another key or the end of the call
//! follows.

use super::arguments::Tagging;
use super::coerce::{ArgumentSchema, coerced};
use super::{CallError, CallParser, ObjectWriter, ParserResult, ParserStep, PieceSink, met};

/// The markers of one format.
#[derive(Debug)]
pub struct GlmMarks {
    /// Begins a call inside a section; empty where each call has an opener of its own.
    pub call: &'static str,
    /// Ends the name, where a line break does not.
    pub separator: Option<&'static str>,
    pub key_end: &'static str,
    pub value: &'static str,
    /// Empty without sections.
    pub section_end: &'static str,
    /// A key, the end of a value and the end of a call.
    pub tagging: Tagging,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GlmState {
    /// In a section, before a call or its end.
    Between,
    Name,
    /// Before a key or the end.
    Body,
    Key,
    /// Between a key and its value.
    BeforeValue,
    Value,
}

/// Reads one call.
#[derive(Debug)]
pub struct GlmCall {
    marks: &'static GlmMarks,
    is_section: bool,
    place: GlmState,
    held: String,
    name: String,
    key: String,
    writer: ObjectWriter,
}

impl GlmCall {
    pub fn new(marks: &'static GlmMarks, opener: &str) -> Self {
        let is_section = !marks.call.is_empty() && marks.call != opener;
        Self {
            marks,
            is_section,
            place: if is_section { GlmState::Between } else { GlmState::Name },
            held: String::new(),
            name: String::new(),
            key: String::new(),
            writer: ObjectWriter::default(),
        }
    }

    fn take_between(&mut self) -> ParserResult {
        match met(&self.held, &[self.marks.section_end, self.marks.call])? {
            Some(0) => return Ok(ParserStep::Done(String::new())),
            Some(_) => self.enter(GlmState::Name),
            None => {}
        }
        Ok(ParserStep::More)
    }

    fn take_name(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let head = match self.marks.separator {
            Some(separator) => self.held.strip_suffix(separator),
            None => self.held.strip_suffix(['\n', '<']).filter(|head| !head.trim().is_empty()),
        };
        let Some(head) = head else { return Ok(ParserStep::More) };
        self.name = head.trim().to_owned();
        sink.name(&self.name)?;
        self.enter(GlmState::Body);
        if self.marks.separator.is_some() {
            return Ok(ParserStep::More);
        }
        self.held.push(c);
        self.take_body(sink)
    }

    fn take_body(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        match met(&self.held, &[self.marks.tagging.end, self.marks.tagging.before_key])? {
            Some(0) => return Ok(self.end_call(sink)),
            Some(_) => self.enter(GlmState::Key),
            None => {}
        }
        Ok(ParserStep::More)
    }

    fn end_call(&mut self, sink: &mut PieceSink<'_>) -> ParserStep {
        self.writer.end(sink);
        if !self.is_section {
            return ParserStep::Done(String::new());
        }
        self.enter(GlmState::Between);
        ParserStep::More
    }

    fn take_value(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        for (mark, is_end) in [(self.marks.tagging.before_key, false), (self.marks.tagging.end, true)] {
            let before = self
                .held
                .strip_suffix(mark)
                .and_then(|text| text.trim_end().strip_suffix(self.marks.tagging.behind_value));
            let Some(value) = before else { continue };
            let parameters = &sink.tools.get(&self.name).ok_or(CallError::Malformed)?.parameters;
            let value = coerced(value, ArgumentSchema::new(parameters).property(&self.key));
            self.writer.member(&self.key, &value, sink);
            if is_end {
                return Ok(self.end_call(sink));
            }
            self.enter(GlmState::Key);
            break;
        }
        Ok(ParserStep::More)
    }

    fn enter(&mut self, place: GlmState) {
        self.held.clear();
        self.place = place;
    }
}

impl CallParser for GlmCall {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        self.held.push(c);
        match self.place {
            GlmState::Between => self.take_between(),
            GlmState::Name => self.take_name(c, sink),
            GlmState::Body => self.take_body(sink),
            GlmState::Key => {
                if let Some(key) = self.held.strip_suffix(self.marks.key_end) {
                    self.key = key.trim().to_owned();
                    self.enter(GlmState::BeforeValue);
                }
                Ok(ParserStep::More)
            }
            GlmState::BeforeValue => {
                if met(&self.held, &[self.marks.value])?.is_some() {
                    self.enter(GlmState::Value);
                }
                Ok(ParserStep::More)
            }
            GlmState::Value if c == '>' => self.take_value(sink),
            GlmState::Value => Ok(ParserStep::More),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if is_cut {
            return Err(CallError::Malformed);
        }
        // The model ended its turn before the close marker, with every argument whole.
        match self.place {
            GlmState::Body if self.held.trim().is_empty() => {
                self.writer.end(sink);
                Ok(())
            }
            GlmState::Between if sink.calls.num > 0 => Ok(()),
            GlmState::Value if self.held.trim_end().ends_with(self.marks.tagging.behind_value) => {
                self.held = format!("{}{}", self.held.trim_end(), self.marks.tagging.end);
                self.take_value(sink).map(drop)
            }
            _ => Err(CallError::Malformed),
        }
    }
}
