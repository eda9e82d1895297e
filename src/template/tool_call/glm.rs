//! GLM: `<tool_call>NAME`, then `<arg_key>` and `<arg_value>` in turn, and `</tool_call>`.
//!
//! Strings stand as they are, everything else as JSON. A value ends at an `</arg_value>` that another key or the end of the
//! call follows.

use super::coerce::{Schema, coerced};
use super::{Broken, ObjectWriter, Reader, Sink, Step};

const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";
const CLOSE: &str = "</tool_call>";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Name,
    /// Before a key or the end.
    Body,
    Key,
    /// Between a key and its value.
    Between,
    Value,
}

/// Reads one call.
#[derive(Debug)]
pub struct GlmCall {
    place: Place,
    held: String,
    name: String,
    key: String,
    writer: ObjectWriter,
}

impl GlmCall {
    pub fn new() -> Self {
        Self {
            place: Place::Name,
            held: String::new(),
            name: String::new(),
            key: String::new(),
            writer: ObjectWriter::default(),
        }
    }

    fn take_name(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let held = self.held.trim();
        if (c == '\n' || c == '<') && !held.is_empty() {
            self.name = held.to_owned();
            sink.name(&self.name)?;
            self.held.clear();
            self.place = Place::Body;
            return self.take_body(c, sink);
        }
        self.held.push(c);
        Ok(Step::More)
    }

    fn take_body(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        self.held.push(c);
        let held = self.held.trim_start();
        if held == CLOSE {
            std::mem::take(&mut self.writer).end(sink);
            return Ok(Step::Done(String::new()));
        }
        if held == KEY {
            self.enter(Place::Key);
        } else if !KEY.starts_with(held) && !CLOSE.starts_with(held) {
            return Err(Broken::Malformed);
        }
        Ok(Step::More)
    }

    fn take_value(&mut self, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        for (mark, is_end) in [(KEY, false), (CLOSE, true)] {
            let before =
                self.held.strip_suffix(mark).and_then(|text| text.trim_end().strip_suffix(VALUE_END));
            let Some(value) = before else { continue };
            let parameters = &sink.tool(&self.name).ok_or(Broken::Malformed)?.parameters;
            let value = coerced(value, Schema::new(parameters).property(&self.key));
            self.writer.member(&self.key, &value, sink);
            if is_end {
                std::mem::take(&mut self.writer).end(sink);
                return Ok(Step::Done(String::new()));
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

impl Reader for GlmCall {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        match self.place {
            Place::Name => self.take_name(c, sink),
            Place::Body => self.take_body(c, sink),
            Place::Key => {
                self.held.push(c);
                if let Some(key) = self.held.strip_suffix(KEY_END) {
                    self.key = key.trim().to_owned();
                    self.enter(Place::Between);
                }
                Ok(Step::More)
            }
            Place::Between => {
                self.held.push(c);
                let held = self.held.trim_start();
                if held == VALUE {
                    self.enter(Place::Value);
                } else if !VALUE.starts_with(held) {
                    return Err(Broken::Malformed);
                }
                Ok(Step::More)
            }
            Place::Value => {
                self.held.push(c);
                if c == '>' { self.take_value(sink) } else { Ok(Step::More) }
            }
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
            Place::Value if self.held.trim_end().ends_with(VALUE_END) => {
                self.held = format!("{}{CLOSE}", self.held.trim_end());
                self.take_value(sink).map(drop)
            }
            _ => Err(Broken::Malformed),
        }
    }
}
