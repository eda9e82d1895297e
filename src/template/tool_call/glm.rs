//! GLM and Hy3: a name, then keys and values in turn, each in tags of its own: `<arg_key>` and `<arg_value>`.
//!
//! Strings stand as they are, everything else as JSON. A value ends at a close tag that another key or the end of the call
//! follows.

use super::arguments::Tagging;
use super::coerce::{ArgumentSchema, coerced};
use super::{CallError, CallParser, HeldText, ObjectWriter, ParserResult, ParserStep, PieceSink, done, met};

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
    at: HeldText<GlmState>,
    name: String,
    key: String,
    writer: ObjectWriter,
}

impl GlmCall {
    pub fn new(marks: &'static GlmMarks, opener: &str) -> Self {
        let is_section = !marks.call.is_empty() && marks.call != opener;
        let at = HeldText::new(if is_section { GlmState::Between } else { GlmState::Name });
        let writer = ObjectWriter::default();
        Self { marks, is_section, at, name: String::new(), key: String::new(), writer }
    }

    fn take_name(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let head = match self.marks.separator {
            Some(separator) => self.at.text.strip_suffix(separator),
            None => self.at.text.strip_suffix(['\n', '<']).filter(|head| !head.trim().is_empty()),
        };
        let Some(head) = head else { return Ok(ParserStep::More) };
        self.name = head.trim().to_owned();
        sink.name(&self.name)?;
        self.at.enter(GlmState::Body)?;
        if self.marks.separator.is_some() {
            return Ok(ParserStep::More);
        }
        self.at.text.push(c);
        self.take_body(sink)
    }

    fn take_body(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        match met(&self.at.text, &[self.marks.tagging.end, self.marks.tagging.before_key])? {
            Some(0) => self.end_call(sink),
            Some(_) => self.at.enter(GlmState::Key),
            None => Ok(ParserStep::More),
        }
    }

    fn end_call(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        self.writer.end(sink);
        if self.is_section { self.at.enter(GlmState::Between) } else { done() }
    }

    fn take_value(&mut self, sink: &mut PieceSink<'_>) -> ParserResult {
        for (mark, is_end) in [(self.marks.tagging.before_key, false), (self.marks.tagging.end, true)] {
            let before = self
                .at
                .text
                .strip_suffix(mark)
                .and_then(|text| text.trim_end().strip_suffix(self.marks.tagging.behind_value));
            let Some(value) = before else { continue };
            let parameters = &sink.tools.get(&self.name).ok_or(CallError::Malformed)?.parameters;
            let value = coerced(value, ArgumentSchema::new(parameters).property(&self.key));
            self.writer.member(&self.key, &value, sink);
            return if is_end { self.end_call(sink) } else { self.at.enter(GlmState::Key) };
        }
        Ok(ParserStep::More)
    }
}

impl CallParser for GlmCall {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        self.at.text.push(c);
        match self.at.place {
            GlmState::Between => {
                self.at.take_between([self.marks.section_end, self.marks.call], GlmState::Name)
            }
            GlmState::Name => self.take_name(c, sink),
            GlmState::Body => self.take_body(sink),
            GlmState::Key => {
                if let Some(key) = self.at.text.strip_suffix(self.marks.key_end) {
                    self.key = key.trim().to_owned();
                    return self.at.enter(GlmState::BeforeValue);
                }
                Ok(ParserStep::More)
            }
            GlmState::BeforeValue => {
                let is_met = met(&self.at.text, &[self.marks.value])?.is_some();
                if is_met { self.at.enter(GlmState::Value) } else { Ok(ParserStep::More) }
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
        match self.at.place {
            GlmState::Body if self.at.text.trim().is_empty() => {
                self.writer.end(sink);
                Ok(())
            }
            GlmState::Between if sink.calls.num > 0 => Ok(()),
            GlmState::Value if self.at.text.trim_end().ends_with(self.marks.tagging.behind_value) => {
                self.at.text = format!("{}{}", self.at.text.trim_end(), self.marks.tagging.end);
                self.take_value(sink).map(drop)
            }
            _ => Err(CallError::Malformed),
        }
    }
}
