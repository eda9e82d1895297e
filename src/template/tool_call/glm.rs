//! GLM and Hy3: a name, then keys and values in turn, each in tags of its own: `<arg_key>` and `<arg_value>`.
//!
//! Strings stand as they are, everything else as JSON. A value ends at a close tag that another key or the end of the call
//! follows.

use super::coerce::{Schema, coerced};
use super::{Broken, CallParser, ObjectWriter, Sink, Step};

/// The marks of one notation.
#[derive(Debug)]
pub struct Marks {
    /// Begins a call inside a section; none where each call has an opener of its own.
    pub call: Option<&'static str>,
    /// Ends the name, where a line break does not.
    pub separator: Option<&'static str>,
    pub key: &'static str,
    pub key_end: &'static str,
    pub value: &'static str,
    pub value_end: &'static str,
    /// Ends a call.
    pub close: &'static str,
    pub section_end: Option<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
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
    marks: &'static Marks,
    is_section: bool,
    place: Place,
    held: String,
    name: String,
    key: String,
    writer: ObjectWriter,
}

impl GlmCall {
    pub fn new(marks: &'static Marks, opener: &str) -> Self {
        let is_section = marks.call.is_some_and(|call| call != opener);
        Self {
            marks,
            is_section,
            place: if is_section { Place::Between } else { Place::Name },
            held: String::new(),
            name: String::new(),
            key: String::new(),
            writer: ObjectWriter::default(),
        }
    }

    fn take_between(&mut self) -> Result<Step, Broken> {
        let held = self.held.trim_start();
        if self.marks.section_end == Some(held) {
            return Ok(Step::Done(String::new()));
        }
        let goes_on = |mark: &str| mark.starts_with(held);
        let is_mark = self.marks.call.is_some_and(goes_on) || self.marks.section_end.is_some_and(goes_on);
        if self.marks.call == Some(held) {
            self.enter(Place::Name);
        } else if !is_mark {
            return Err(Broken::Malformed);
        }
        Ok(Step::More)
    }

    fn take_name(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let head = match self.marks.separator {
            Some(separator) => self.held.strip_suffix(separator),
            None => self.held.strip_suffix(['\n', '<']).filter(|head| !head.trim().is_empty()),
        };
        let Some(head) = head else { return Ok(Step::More) };
        self.name = head.trim().to_owned();
        sink.name(&self.name)?;
        self.enter(Place::Body);
        if self.marks.separator.is_some() {
            return Ok(Step::More);
        }
        self.held.push(c);
        self.take_body(sink)
    }

    fn take_body(&mut self, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let held = self.held.trim_start();
        if held == self.marks.close {
            return Ok(self.end_call(sink));
        }
        if held == self.marks.key {
            self.enter(Place::Key);
        } else if !self.marks.key.starts_with(held) && !self.marks.close.starts_with(held) {
            return Err(Broken::Malformed);
        }
        Ok(Step::More)
    }

    fn end_call(&mut self, sink: &mut Sink<'_>) -> Step {
        std::mem::take(&mut self.writer).end(sink);
        if !self.is_section {
            return Step::Done(String::new());
        }
        self.enter(Place::Between);
        Step::More
    }

    fn take_value(&mut self, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        for (mark, is_end) in [(self.marks.key, false), (self.marks.close, true)] {
            let before = self
                .held
                .strip_suffix(mark)
                .and_then(|text| text.trim_end().strip_suffix(self.marks.value_end));
            let Some(value) = before else { continue };
            let parameters = &sink.tool(&self.name).ok_or(Broken::Malformed)?.parameters;
            let value = coerced(value, Schema::new(parameters).property(&self.key));
            self.writer.member(&self.key, &value, sink);
            if is_end {
                return Ok(self.end_call(sink));
            }
            self.enter(Place::Key);
            break;
        }
        Ok(Step::More)
    }

    fn enter(&mut self, place: Place) {
        self.held.clear();
        self.place = place;
    }
}

impl CallParser for GlmCall {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        self.held.push(c);
        match self.place {
            Place::Between => self.take_between(),
            Place::Name => self.take_name(c, sink),
            Place::Body => self.take_body(sink),
            Place::Key => {
                if let Some(key) = self.held.strip_suffix(self.marks.key_end) {
                    self.key = key.trim().to_owned();
                    self.enter(Place::BeforeValue);
                }
                Ok(Step::More)
            }
            Place::BeforeValue => {
                let held = self.held.trim_start();
                if held == self.marks.value {
                    self.enter(Place::Value);
                } else if !self.marks.value.starts_with(held) {
                    return Err(Broken::Malformed);
                }
                Ok(Step::More)
            }
            Place::Value if c == '>' => self.take_value(sink),
            Place::Value => Ok(Step::More),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if is_cut {
            return Err(Broken::Malformed);
        }
        // The model ended its turn before the close marker, with every argument whole.
        match self.place {
            Place::Body if self.held.trim().is_empty() => {
                std::mem::take(&mut self.writer).end(sink);
                Ok(())
            }
            Place::Between if *sink.num_calls > 0 => Ok(()),
            Place::Value if self.held.trim_end().ends_with(self.marks.value_end) => {
                self.held = format!("{}{}", self.held.trim_end(), self.marks.close);
                self.take_value(sink).map(drop)
            }
            _ => Err(Broken::Malformed),
        }
    }
}
