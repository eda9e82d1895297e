//! Calls as tags: `<function=NAME><parameter=KEY>` value `</parameter></function>`, usually inside `<tool_call>`
//! (Qwen3-Coder, Qwen 3.5; Seed with its own wrapper).
//!
//! Values are plain text and may hold the same tags. A value ends at a `</parameter>` that a new parameter or the end of
//! the call follows, and nowhere else; a parameter that is never closed breaks the call, so that no argument is silently
//! lost. Each argument goes out when it is complete.

use super::coerce::{Schema, coerced};
use super::{Broken, ObjectWriter, Reader, Sink, Step};

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// A longer tag is none.
const MAX_KEY: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before `<function=`.
    Open,
    Name,
    /// Before a parameter or the end of the function.
    Body,
    Value,
    /// Behind `</function>`.
    Closing,
}

/// Reads one call.
#[derive(Debug)]
pub struct XmlCalls {
    is_wrapped: bool,
    wrapper_end: &'static str,
    /// The template sets values on lines of their own.
    has_line_breaks: bool,
    place: Place,
    held: String,
    name: String,
    /// Parameters so far; the last one is being read in `Value`.
    keys: Vec<String>,
    writer: ObjectWriter,
}

impl XmlCalls {
    pub fn new(opener: &str, wrapper_end: &'static str) -> Self {
        let is_wrapped = opener != FUNCTION;
        Self {
            is_wrapped,
            wrapper_end,
            has_line_breaks: wrapper_end == "</tool_call>",
            place: if is_wrapped { Place::Open } else { Place::Name },
            held: String::new(),
            name: String::new(),
            keys: Vec::new(),
            writer: ObjectWriter::default(),
        }
    }

    fn take_name(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        if c != '>' {
            self.held.push(c);
            return if self.held.len() > MAX_KEY || c == '\n' {
                Err(Broken::Malformed)
            } else {
                Ok(Step::More)
            };
        }
        self.name = std::mem::take(&mut self.held).trim().to_owned();
        sink.name(&self.name)?;
        self.place = Place::Body;
        Ok(Step::More)
    }

    fn take_body(&mut self, c: char) -> Result<Step, Broken> {
        self.held.push(c);
        let held = self.held.trim_start();
        if held == FUNCTION_END {
            self.held.clear();
            self.place = Place::Closing;
            return Ok(Step::More);
        }
        if let Some(key) = held.strip_prefix(PARAMETER) {
            let is_too_long = key.len() > MAX_KEY;
            if let Some(key) = key.strip_suffix('>') {
                self.keys.push(key.trim().to_owned());
                self.held.clear();
                self.place = Place::Value;
            }
            return if is_too_long { Err(Broken::Malformed) } else { Ok(Step::More) };
        }
        let is_tag = FUNCTION_END.starts_with(held) || PARAMETER.starts_with(held);
        if is_tag { Ok(Step::More) } else { Err(Broken::Malformed) }
    }

    fn take_value(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        self.held.push(c);
        if c != '>' {
            return Ok(Step::More);
        }
        if let Some((end, key)) = self.next_parameter() {
            self.end_value(end, sink)?;
            self.keys.push(key);
        } else if let Some(end) = self.end_of_call(self.is_wrapped) {
            self.end_value(end, sink)?;
            self.writer_end(sink);
            self.place = Place::Closing;
            if self.is_wrapped {
                return Ok(Step::Done(String::new()));
            }
        }
        Ok(Step::More)
    }

    /// The value's length and the next key, when the text ends with `</parameter>` and the tag of a parameter that has
    /// not come yet.
    fn next_parameter(&self) -> Option<(usize, String)> {
        let tail = floor_tail(&self.held, PARAMETER.len() + MAX_KEY);
        let tag = self.held.len() - tail.len() + tail.rfind(PARAMETER)?;
        let key = self.held[tag + PARAMETER.len()..].strip_suffix('>')?.trim();
        let is_key =
            !key.is_empty() && !key.contains(['<', '>', '\n']) && !self.keys.iter().any(|seen| seen == key);
        let before = self.held[..tag].trim_end().strip_suffix(PARAMETER_END)?;
        is_key.then(|| (before.len(), key.to_owned()))
    }

    /// The value's length, when the text ends with all the closing tags of a call.
    fn end_of_call(&self, with_wrapper: bool) -> Option<usize> {
        let mut text = self.held.trim_end();
        if with_wrapper {
            text = text.strip_suffix(self.wrapper_end)?.trim_end();
        }
        Some(text.strip_suffix(FUNCTION_END)?.trim_end().strip_suffix(PARAMETER_END)?.len())
    }

    fn end_value(&mut self, len: usize, sink: &mut Sink<'_>) -> Result<(), Broken> {
        let mut text = std::mem::take(&mut self.held);
        text.truncate(len);
        let key = self.keys.last().ok_or(Broken::Malformed)?;
        let parameters = &sink.tool(&self.name).ok_or(Broken::Malformed)?.parameters;
        if self.hides_a_parameter(&text, parameters) {
            return Err(Broken::Malformed);
        }
        let value = if self.has_line_breaks { without_line_breaks(&text) } else { &text };
        let value = coerced(value, Schema::new(parameters).property(key));
        self.writer.member(key, &value, sink);
        Ok(())
    }

    /// Whether the value swallowed a parameter of this tool because a close tag is missing.
    fn hides_a_parameter(&self, text: &str, parameters: &serde_json::Value) -> bool {
        if text.matches(PARAMETER).count() <= text.matches(PARAMETER_END).count() {
            return false;
        }
        let properties = parameters.get("properties").and_then(serde_json::Value::as_object);
        let unseen = properties.into_iter().flat_map(|all| all.keys()).filter(|key| !self.keys.contains(key));
        unseen.map(|key| format!("{PARAMETER}{key}>")).any(|tag| text.contains(&tag))
    }

    fn writer_end(&mut self, sink: &mut Sink<'_>) {
        std::mem::take(&mut self.writer).end(sink);
    }

    fn take_closing(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        self.held.push(c);
        let held = self.held.trim_start();
        if held == self.wrapper_end {
            if *sink.is_open {
                self.writer_end(sink);
            }
            return Ok(Step::Done(String::new()));
        }
        match self.wrapper_end.starts_with(held) {
            true => Ok(Step::More),
            false if self.is_wrapped => Err(Broken::Malformed),
            false => Ok(Step::Done(std::mem::take(&mut self.held))),
        }
    }
}

impl Reader for XmlCalls {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        match self.place {
            Place::Open => {
                self.held.push(c);
                let held = self.held.trim_start();
                if held == FUNCTION {
                    self.held.clear();
                    self.place = Place::Name;
                } else if !FUNCTION.starts_with(held) {
                    return Err(Broken::Malformed);
                }
                Ok(Step::More)
            }
            Place::Name => self.take_name(c, sink),
            Place::Body => {
                let step = self.take_body(c);
                if self.place == Place::Closing && !self.is_wrapped {
                    self.writer_end(sink);
                }
                step
            }
            Place::Value => self.take_value(c, sink),
            Place::Closing => self.take_closing(c, sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        let is_whole = match self.place {
            Place::Closing => true,
            Place::Value if !is_cut => match self.end_of_call(false) {
                Some(end) => {
                    self.end_value(end, sink)?;
                    true
                }
                None => false,
            },
            _ => false,
        };
        if !is_whole || (is_cut && *sink.is_open) {
            return Err(Broken::Malformed);
        }
        if *sink.is_open {
            self.writer_end(sink);
        }
        Ok(())
    }
}

/// The last `len` bytes or a little less, from a character boundary.
fn floor_tail(text: &str, len: usize) -> &str {
    let mut start = text.len().saturating_sub(len);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Without the line break that the template sets behind the opening tag and before the closing one.
fn without_line_breaks(text: &str) -> &str {
    let text = text.strip_prefix("\r\n").or_else(|| text.strip_prefix('\n')).unwrap_or(text);
    text.strip_suffix("\r\n").or_else(|| text.strip_suffix('\n')).unwrap_or(text)
}
