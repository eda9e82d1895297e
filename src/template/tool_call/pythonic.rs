//! Calls as Python: `[f(a=1, b="x"), g()]` (Llama 4, LFM2), and `<|python_tag|>f.call(a="x")` (Llama 3.1).
//!
//! A call is named at its opening parenthesis; each argument goes out when it is complete. Without a marker only text that
//! begins like a list of calls is one.

use super::json_object::JsonCalls;
use super::{
    CallError, CallParser, HeldText, ObjectWriter, ParserResult, ParserStep, PieceSink, done, met,
    python_literal,
};

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
    at: HeldText<PythonicState>,
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

    /// One call, `NAME.call(...)`, without a list.
    pub fn single() -> Self {
        Self { is_single: true, at: HeldText::new(PythonicState::Name), ..Self::default() }
    }

    fn take_name(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if c == '(' {
            let name = self.at.text.trim();
            let name = if self.is_single { name.strip_suffix(".call").unwrap_or(name) } else { name };
            sink.name(name)?;
            return self.at.enter(PythonicState::Arguments);
        }
        if c == '{' && self.at.text.trim().is_empty() && !self.is_bare && !self.is_single {
            let json = self.json.insert(JsonCalls::in_list(self.close));
            return json.take(c, sink);
        }
        let is_name = match c {
            _ if c.is_ascii_whitespace() => self.at.text.trim().is_empty(),
            _ if self.at.text.trim().is_empty() => c.is_ascii_alphabetic() || c == '_',
            _ => c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'),
        };
        self.at.text.push(c);
        if is_name { Ok(ParserStep::More) } else { Err(CallError::Malformed) }
    }

    fn take_argument(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if !self.argument.ends_before(c) {
            self.at.text.push(c);
            return Ok(ParserStep::More);
        }
        let text = std::mem::take(&mut self.at.text);
        self.argument = PythonArgument::default();
        if !text.trim().is_empty() {
            let (key, value) = text.split_once('=').ok_or(CallError::Malformed)?;
            let value = python_literal::whole_value(value).ok_or(CallError::Malformed)?;
            self.writer.member(key.trim(), &value, sink);
        }
        if c == ')' {
            self.writer.end(sink);
            return if self.is_single { done() } else { self.at.enter(PythonicState::Behind) };
        }
        Ok(ParserStep::More)
    }

    fn take_closing(&mut self, c: char) -> ParserResult {
        let Some(close) = self.close else { return Ok(ParserStep::Done(c.to_string())) };
        self.at.text.push(c);
        let is_met = met(&self.at.text, &[close])?.is_some();
        if is_met { done() } else { Ok(ParserStep::More) }
    }
}

impl CallParser for PythonicCalls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        if let Some(json) = &mut self.json {
            return json.take(c, sink);
        }
        let step = match (self.at.place, c) {
            (PythonicState::Open, '[') | (PythonicState::Behind, ',') => self.at.enter(PythonicState::Name),
            (PythonicState::Open | PythonicState::Behind, _) if c.is_ascii_whitespace() => {
                Ok(ParserStep::More)
            }
            (PythonicState::Behind, ']') if self.close.is_none() => done(),
            (PythonicState::Behind, ']') => self.at.enter(PythonicState::Closing),
            (PythonicState::Name, _) => self.take_name(c, sink),
            (PythonicState::Arguments, _) => self.take_argument(c, sink),
            (PythonicState::Closing, _) => self.take_closing(c),
            _ => Err(CallError::Malformed),
        };
        step.map_err(|broken| match broken {
            CallError::Malformed if self.is_bare && self.at.place == PythonicState::Name => {
                CallError::NotACall
            }
            broken => broken,
        })
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if let Some(json) = &mut self.json {
            return json.finish(is_cut, sink);
        }
        match self.at.place {
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
