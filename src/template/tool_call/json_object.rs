//! Calls as JSON objects: `{"name": ..., "arguments": {...}}`, alone, in a list, or one after another, with a close marker
//! or without.
//!
//! Arguments may be called `parameters`, may be JSON text inside a string, and may stand before the name; the object may be
//! wrapped as `{"type": "function", "function": {...}}`; `keyed` objects are `{NAME: {...}}`. Without arguments they are `{}`. The close marker counts only
//! behind the JSON value, never inside its strings. Without a marker (`bare`), an object is a call only when it names a
//! tool and has arguments; everything else is text.

use super::json_text::{JsonScanner, Malformed, Scan};
use super::{Broken, CallParser, Sink, Step};

/// One call object.
#[derive(Debug)]
struct CallObject {
    state: State,
    /// Objects open: one, or two inside `function`.
    depth: usize,
    name: Option<String>,
    is_named: bool,
    /// Arguments that came before the name.
    waiting: String,
    has_arguments: bool,
    is_bare: bool,
    /// The object's one key is the tool's name.
    is_keyed: bool,
}

#[derive(Debug)]
enum State {
    /// Before the opening brace.
    Open,
    KeyOrEnd,
    Key(JsonScanner, String),
    Colon(String),
    /// Before the value of a key.
    Value(String),
    Name(JsonScanner, String),
    Skipped(JsonScanner),
    Arguments(JsonScanner),
    /// Arguments as JSON text inside a string; the inner text is over when there is no scanner left.
    Encoded(StringDecoder, Option<JsonScanner>),
    CommaOrEnd,
    Closed,
}

impl CallObject {
    fn new(is_bare: bool, is_keyed: bool) -> Self {
        Self {
            is_keyed,
            state: State::Open,
            depth: 0,
            name: None,
            is_named: false,
            waiting: String::new(),
            has_arguments: false,
            is_bare,
        }
    }

    fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<(), Broken> {
        let state = std::mem::replace(&mut self.state, State::Closed);
        self.state = match (state, c) {
            (state @ (State::Open | State::KeyOrEnd | State::CommaOrEnd), _) if c.is_ascii_whitespace() => {
                state
            }
            (state @ (State::Colon(_) | State::Value(_)), _) if c.is_ascii_whitespace() => state,
            (State::Open, '{') => {
                self.depth += 1;
                State::KeyOrEnd
            }
            (State::KeyOrEnd, '"') => {
                let (scanner, key) = begun(c)?;
                State::Key(scanner, key)
            }
            (State::KeyOrEnd | State::CommaOrEnd, '}') => self.close(sink)?,
            (State::CommaOrEnd, ',') => State::KeyOrEnd,
            (State::Key(mut scanner, mut key), _) => match scanner.take(c, &mut key)? {
                Scan::More => State::Key(scanner, key),
                _ => State::Colon(unquoted(&key)?),
            },
            (State::Colon(key), ':') => State::Value(key),
            (State::Value(key), _) => self.begin_value(&key, c, sink)?,
            (State::Name(mut scanner, mut text), _) => match scanner.take(c, &mut text)? {
                Scan::More => State::Name(scanner, text),
                _ => self.learn_name(unquoted(&text)?, sink)?,
            },
            (State::Skipped(mut scanner), _) => match scanner.take(c, &mut String::new())? {
                Scan::More => State::Skipped(scanner),
                Scan::Done => State::CommaOrEnd,
                Scan::DoneBefore => {
                    self.state = State::CommaOrEnd;
                    return self.take(c, sink);
                }
            },
            (State::Arguments(mut scanner), _) => match self.scan_arguments(&mut scanner, c, sink)? {
                Scan::More => State::Arguments(scanner),
                _ => State::CommaOrEnd,
            },
            (State::Encoded(decoder, inner), _) => self.take_encoded(decoder, inner, c, sink)?,
            _ => return Err(Broken::Malformed),
        };
        Ok(())
    }

    fn begin_value(&mut self, key: &str, c: char, sink: &mut Sink<'_>) -> Result<State, Broken> {
        if self.is_keyed {
            if c != '{' || self.has_arguments {
                return Err(Broken::Malformed);
            }
            self.name = Some(key.to_owned());
        }
        match (if self.is_keyed { "arguments" } else { key }, c) {
            ("name" | "tool_name" | "function", '"') if self.name.is_none() => {
                let (scanner, text) = begun(c)?;
                Ok(State::Name(scanner, text))
            }
            ("function", '{') if self.depth == 1 => {
                self.depth += 1;
                Ok(State::KeyOrEnd)
            }
            ("arguments" | "parameters", '{' | '"') if !self.has_arguments => {
                self.has_arguments = true;
                self.commit(sink)?;
                if c == '"' {
                    return Ok(State::Encoded(StringDecoder::default(), Some(JsonScanner::new())));
                }
                let mut scanner = JsonScanner::new();
                self.scan_arguments(&mut scanner, c, sink)?;
                Ok(State::Arguments(scanner))
            }
            ("arguments" | "parameters", _) if !self.has_arguments && c != 'n' && c != 'N' => {
                Err(Broken::Malformed)
            }
            _ => Ok(State::Skipped(begun(c)?.0)),
        }
    }

    fn learn_name(&mut self, name: String, sink: &mut Sink<'_>) -> Result<State, Broken> {
        self.name = Some(name);
        if !self.is_bare || self.has_arguments {
            self.commit(sink)?;
        }
        Ok(State::CommaOrEnd)
    }

    /// Names the call, once the name is known.
    fn commit(&mut self, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if let (Some(name), false) = (&self.name, self.is_named) {
            sink.name(name)?;
            self.is_named = true;
            sink.arguments(&std::mem::take(&mut self.waiting));
        }
        Ok(())
    }

    fn scan_arguments(
        &mut self,
        scanner: &mut JsonScanner,
        c: char,
        sink: &mut Sink<'_>,
    ) -> Result<Scan, Broken> {
        let scan = scanner.take(c, &mut self.waiting)?;
        if self.is_named {
            sink.arguments(&self.waiting);
            self.waiting.clear();
        }
        Ok(scan)
    }

    fn take_encoded(
        &mut self,
        mut decoder: StringDecoder,
        mut inner: Option<JsonScanner>,
        c: char,
        sink: &mut Sink<'_>,
    ) -> Result<State, Broken> {
        match decoder.take(c)? {
            Decoded::Nothing => {}
            Decoded::Char(c) if c.is_whitespace() && (inner.is_none() || !decoder.has_begun) => {}
            Decoded::Char(c) if !decoder.has_begun && c != '{' => return Err(Broken::Malformed),
            Decoded::Char(c) => {
                decoder.has_begun = true;
                let scanner = inner.as_mut().ok_or(Broken::Malformed)?;
                if self.scan_arguments(scanner, c, sink)? != Scan::More {
                    inner = None;
                }
            }
            Decoded::End if inner.is_none() => return Ok(State::CommaOrEnd),
            Decoded::End if !decoder.has_begun => {
                // An empty string: no arguments.
                self.has_arguments = false;
                return Ok(State::CommaOrEnd);
            }
            Decoded::End => return Err(Broken::Malformed),
        }
        Ok(State::Encoded(decoder, inner))
    }

    fn close(&mut self, sink: &mut Sink<'_>) -> Result<State, Broken> {
        self.depth -= 1;
        if self.depth > 0 {
            return Ok(State::CommaOrEnd);
        }
        if !self.is_named {
            return Err(Broken::Malformed);
        }
        if !self.has_arguments {
            sink.arguments("{}");
        }
        Ok(State::Closed)
    }
}

fn begun(c: char) -> Result<(JsonScanner, String), Malformed> {
    let (mut scanner, mut text) = (JsonScanner::new(), String::new());
    scanner.take(c, &mut text)?;
    Ok((scanner, text))
}

fn unquoted(json: &str) -> Result<String, Malformed> {
    serde_json::from_str(json).map_err(|_| Malformed)
}

enum Decoded {
    Nothing,
    Char(char),
    End,
}

/// Takes the escapes out of a JSON string, behind its opening quote.
#[derive(Debug, Default)]
struct StringDecoder {
    escape: Option<String>,
    /// Something other than space has been decoded.
    has_begun: bool,
}

impl StringDecoder {
    fn take(&mut self, c: char) -> Result<Decoded, Malformed> {
        let Some(mut escape) = self.escape.take() else {
            return Ok(match c {
                '"' => Decoded::End,
                '\\' => {
                    self.escape = Some(String::new());
                    Decoded::Nothing
                }
                c => Decoded::Char(c),
            });
        };
        escape.push(c);
        // A surrogate pair takes two escapes: `\uD83D` and then `\uDE00`, without the first backslash.
        let is_whole = match escape.as_bytes() {
            [b'u', b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B', ..] => escape.len() == 11,
            [b'u', ..] => escape.len() == 5,
            _ => true,
        };
        if !is_whole {
            self.escape = Some(escape);
            return Ok(Decoded::Nothing);
        }
        let decoded = unquoted(&format!("\"\\{escape}\""))?;
        decoded.chars().next().map(Decoded::Char).ok_or(Malformed)
    }
}

/// The call objects of one span.
#[derive(Debug)]
pub struct JsonCalls {
    close: Option<&'static str>,
    is_bare: bool,
    is_keyed: bool,
    is_list: bool,
    object: Option<CallObject>,
    place: Place,
    /// What has come of the close marker; without one, what separates calls.
    closing: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before an object.
    Before,
    Inside,
    /// Behind an object.
    Behind,
    /// Behind the list.
    Closing,
}

impl JsonCalls {
    pub fn new(close: Option<&'static str>) -> Self {
        Self {
            close,
            is_bare: false,
            is_keyed: false,
            is_list: false,
            object: None,
            place: Place::Before,
            closing: String::new(),
        }
    }

    /// Calls without a marker.
    pub fn bare() -> Self {
        Self { is_bare: true, ..Self::new(None) }
    }

    /// Objects whose one key is the tool's name, and its value the arguments.
    pub fn keyed(close: Option<&'static str>) -> Self {
        Self { is_keyed: true, ..Self::new(close) }
    }

    /// Calls in a list whose bracket has come already.
    pub fn in_list(close: Option<&'static str>) -> Self {
        Self { is_list: true, ..Self::new(close) }
    }

    fn begin(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        if *sink.is_open {
            sink.end();
        }
        self.closing.clear();
        let mut object = CallObject::new(self.is_bare, self.is_keyed);
        object.take(c, sink)?;
        self.object = Some(object);
        self.place = Place::Inside;
        Ok(Step::More)
    }

    fn take_inside(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let object = self.object.as_mut().ok_or(Broken::Malformed)?;
        object.take(c, sink).map_err(|broken| match broken {
            Broken::Malformed if self.is_bare && !*sink.is_open => Broken::NotACall,
            broken => broken,
        })?;
        if object.is_closed() {
            self.place = Place::Behind;
            // With a close marker, a lone call is complete when the marker is: what stands between is no JSON.
            if self.is_list || self.close.is_none() {
                sink.end();
            }
        }
        Ok(Step::More)
    }

    fn take_behind(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        match c {
            '{' if !self.is_list && (self.close.is_none() || self.closing.is_empty()) => self.begin(c, sink),
            ',' if self.is_list => {
                self.place = Place::Before;
                Ok(Step::More)
            }
            ']' if self.is_list => {
                self.place = Place::Closing;
                Ok(if self.close.is_none() { Step::Done(String::new()) } else { Step::More })
            }
            _ if self.is_list && !c.is_ascii_whitespace() => Err(Broken::Malformed),
            _ => self.take_closing(c, sink),
        }
    }

    fn take_closing(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let Some(close) = self.close else {
            // What separates calls belongs to the text when no call follows.
            self.closing.push(c);
            let is_separator = c.is_ascii_whitespace() || matches!(c, ';' | ',');
            return Ok(if is_separator { Step::More } else { Step::Done(std::mem::take(&mut self.closing)) });
        };
        if c.is_ascii_whitespace() && self.closing.is_empty() {
            return Ok(Step::More);
        }
        self.closing.push(c);
        if !close.starts_with(&self.closing) {
            return Err(Broken::Malformed);
        }
        if close != self.closing {
            return Ok(Step::More);
        }
        if *sink.is_open {
            sink.end();
        }
        Ok(Step::Done(String::new()))
    }
}

impl CallParser for JsonCalls {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        match (self.place, c) {
            (Place::Before, _) if c.is_ascii_whitespace() => Ok(Step::More),
            (Place::Before, '[') if !self.is_list && !self.is_bare => {
                self.is_list = true;
                Ok(Step::More)
            }
            (Place::Before, '{') => self.begin(c, sink),
            (Place::Before, _) => Err(Broken::Malformed),
            (Place::Inside, _) => self.take_inside(c, sink),
            (Place::Behind, _) => self.take_behind(c, sink),
            (Place::Closing, _) => self.take_closing(c, sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        match self.place {
            Place::Inside if self.is_bare && !*sink.is_open => {
                let name = self.object.as_ref().and_then(|object| object.name.as_deref());
                Err(if name.is_some_and(|name| sink.tools.get(name).is_some()) {
                    Broken::Malformed
                } else {
                    Broken::NotACall
                })
            }
            Place::Before | Place::Inside => Err(Broken::Malformed),
            // The model ended its turn behind a whole value: nothing of the call is missing.
            Place::Behind | Place::Closing if is_cut && (self.is_list || self.close.is_some()) => {
                Err(Broken::Malformed)
            }
            Place::Behind | Place::Closing => {
                if *sink.is_open {
                    sink.end();
                }
                Ok(())
            }
        }
    }
}
