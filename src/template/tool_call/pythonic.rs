//! Calls as Python: `[f(a=1, b="x"), g()]` (Llama 4, LFM2), and `<|python_tag|>f.call(a="x")` (Llama 3.1).
//!
//! A call is named at its opening parenthesis; each argument goes out when it is complete. Without a marker only text that
//! begins like a list of calls is one.

use super::json_object::JsonCalls;
use super::python_literal;
use super::{CallError, CallParser, ObjectWriter, ParserResult, ParserStep, PieceSink, met};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum PythonicState {
    /// Before the list's bracket.
    #[default]
    Open,
    Name,
    Arguments,
    /// Behind a call.
    Behind,
    /// Behind the list.
    Closing,
}

/// Reads a list of calls.
#[derive(Debug, Default)]
pub struct PythonicCalls {
    close: Option<&'static str>,
    is_bare: bool,
    /// One call, `NAME.call(...)`, without a list.
    is_single: bool,
    place: PythonicState,
    held: String,
    argument: PythonArgument,
    writer: ObjectWriter,
    json: Option<JsonCalls>,
}

impl PythonicCalls {
    /// `close` ends calls behind an opener; an empty opener is the bare one.
    pub fn new(opener: &str, close: &'static str) -> Self {
        let is_bare = opener.is_empty();
        Self { close: (!is_bare).then_some(close), is_bare, ..Self::default() }
    }

    fn take_name(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if c == '(' {
            let name = self.held.trim();
            let name = if self.is_single { name.strip_suffix(".call").unwrap_or(name) } else { name };
            sink.name(name)?;
            self.held.clear();
            self.place = PythonicState::Arguments;
            return Ok(ParserStep::More);
        }
        if c == '{' && self.held.trim().is_empty() && !self.is_bare && !self.is_single {
            let json = self.json.insert(JsonCalls::in_list(self.close));
            return json.take(c, sink);
        }
        let is_name = match c {
            _ if c.is_ascii_whitespace() => self.held.trim().is_empty(),
            _ if self.held.trim().is_empty() => c.is_ascii_alphabetic() || c == '_',
            _ => c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'),
        };
        self.held.push(c);
        if is_name { Ok(ParserStep::More) } else { Err(CallError::Malformed) }
    }

    fn take_argument(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if !self.argument.ends_before(c) {
            self.held.push(c);
            return Ok(ParserStep::More);
        }
        let text = std::mem::take(&mut self.held);
        self.argument = PythonArgument::default();
        if !text.trim().is_empty() {
            let (key, value) = text.split_once('=').ok_or(CallError::Malformed)?;
            let value = python_literal::whole_value(value).ok_or(CallError::Malformed)?;
            self.writer.member(key.trim(), &value, sink);
        }
        if c == ')' {
            self.writer.end(sink);
            self.place = PythonicState::Behind;
            if self.is_single {
                return Ok(ParserStep::Done(String::new()));
            }
        }
        Ok(ParserStep::More)
    }

    fn take_closing(&mut self, c: char) -> ParserResult {
        let Some(close) = self.close else { return Ok(ParserStep::Done(c.to_string())) };
        self.held.push(c);
        let is_met = met(&self.held, &[close])?.is_some();
        Ok(if is_met { ParserStep::Done(String::new()) } else { ParserStep::More })
    }
}

impl CallParser for PythonicCalls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if let Some(json) = &mut self.json {
            return json.take(c, sink);
        }
        let step = match (self.place, c) {
            (PythonicState::Open, '[') => {
                self.place = PythonicState::Name;
                Ok(ParserStep::More)
            }
            (PythonicState::Open | PythonicState::Behind, _) if c.is_ascii_whitespace() => {
                Ok(ParserStep::More)
            }
            (PythonicState::Behind, ',') => {
                self.place = PythonicState::Name;
                Ok(ParserStep::More)
            }
            (PythonicState::Behind, ']') => {
                self.place = PythonicState::Closing;
                Ok(if self.close.is_none() { ParserStep::Done(String::new()) } else { ParserStep::More })
            }
            (PythonicState::Name, _) => self.take_name(c, sink),
            (PythonicState::Arguments, _) => self.take_argument(c, sink),
            (PythonicState::Closing, _) => self.take_closing(c),
            _ => Err(CallError::Malformed),
        };
        step.map_err(|broken| match broken {
            CallError::Malformed if self.is_bare && self.place == PythonicState::Name => CallError::NotACall,
            broken => broken,
        })
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if let Some(json) = &mut self.json {
            return json.finish(is_cut, sink);
        }
        match self.place {
            PythonicState::Behind | PythonicState::Closing if !is_cut => Ok(()),
            PythonicState::Open | PythonicState::Name if self.is_bare => Err(CallError::NotACall),
            _ => Err(CallError::Malformed),
        }
    }
}

/// Finds the end of one argument: a comma or a closing parenthesis outside brackets and strings.
#[derive(Debug, Default)]
struct PythonArgument {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
    /// A quote has come that ends the string if what follows lets it.
    may_end: bool,
}

impl PythonArgument {
    fn ends_before(&mut self, c: char) -> bool {
        if let Some(quote) = self.quote {
            if self.may_end {
                if c.is_whitespace() {
                    return false;
                }
                if python_literal::can_follow(c.encode_utf8(&mut [0; 4])) {
                    (self.quote, self.may_end) = (None, false);
                    return self.ends_before(c);
                }
                self.may_end = false;
            }
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                c => self.may_end = c == quote,
            }
            return false;
        }
        match c {
            '"' | '\'' => self.quote = Some(c),
            '[' | '(' | '{' => self.depth += 1,
            ')' | ',' if self.depth == 0 => return true,
            ']' | ')' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}

/// Parses what follows `<|python_tag|>`: a JSON call, or `NAME.call(...)`.
#[derive(Debug, Default)]
pub struct PythonTag {
    inner: Option<Box<dyn CallParser>>,
}

impl CallParser for PythonTag {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if self.inner.is_none() {
            if c.is_ascii_whitespace() {
                return Ok(ParserStep::More);
            }
            let (is_single, place) = (true, PythonicState::Name);
            let inner: Box<dyn CallParser> = match c {
                '{' | '[' => Box::new(JsonCalls::new(None)),
                _ => Box::new(PythonicCalls { is_single, place, ..PythonicCalls::default() }),
            };
            self.inner = Some(inner);
        }
        self.inner.as_mut().ok_or(CallError::Malformed)?.take(c, sink)
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        self.inner.as_mut().ok_or(CallError::Malformed)?.finish(is_cut, sink)
    }
}
