//! Calls as JSON objects: `{"name": ..., "arguments": {...}}`, alone, in a list, or one after another, with a close marker
//! or without.
//!
//! Arguments may be called `parameters`, may be JSON text inside a string, and may stand before the name; the object may be
//! wrapped as `{"type": "function", "function": {...}}`; `keyed` objects are `{NAME: {...}}`. Without arguments they are `{}`. The close marker counts only
//! behind the JSON value, never inside its strings. Without a marker (`bare`), an object is a call only when it names a
//! tool and has arguments; everything else is text.

use super::json_text::{JsonScan, JsonScanner, Malformed};
use super::{CallError, CallParser, ParserResult, ParserStep, PieceSink, Scan};

/// One call object.
#[derive(Debug, Default)]
struct CallObject {
    state: ObjectState,
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

#[derive(Debug, Default)]
enum ObjectState {
    /// Before the opening brace.
    #[default]
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

type NextState = Result<ObjectState, CallError>;

impl CallObject {
    fn new(is_bare: bool, is_keyed: bool) -> Self {
        Self { is_bare, is_keyed, ..Self::default() }
    }

    fn is_closed(&self) -> bool {
        matches!(self.state, ObjectState::Closed)
    }

    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        let state = std::mem::replace(&mut self.state, ObjectState::Closed);
        self.state = match (state, c) {
            (state @ (ObjectState::Open | ObjectState::KeyOrEnd | ObjectState::CommaOrEnd), _)
                if c.is_ascii_whitespace() =>
            {
                state
            }
            (state @ (ObjectState::Colon(_) | ObjectState::Value(_)), _) if c.is_ascii_whitespace() => state,
            (ObjectState::Open, '{') => {
                self.depth += 1;
                ObjectState::KeyOrEnd
            }
            (ObjectState::KeyOrEnd, '"') => {
                let (scanner, key) = begun(c)?;
                ObjectState::Key(scanner, key)
            }
            (ObjectState::KeyOrEnd | ObjectState::CommaOrEnd, '}') => self.close(sink)?,
            (ObjectState::CommaOrEnd, ',') => ObjectState::KeyOrEnd,
            (ObjectState::Key(mut scanner, mut key), _) => match scanner.take(c, &mut key)? {
                JsonScan::More => ObjectState::Key(scanner, key),
                _ => ObjectState::Colon(unquoted(&key)?),
            },
            (ObjectState::Colon(key), ':') => ObjectState::Value(key),
            (ObjectState::Value(key), _) => self.begin_value(&key, c, sink)?,
            (ObjectState::Name(mut scanner, mut text), _) => match scanner.take(c, &mut text)? {
                JsonScan::More => ObjectState::Name(scanner, text),
                _ => self.learn_name(unquoted(&text)?, sink)?,
            },
            (ObjectState::Skipped(mut scanner), _) => match scanner.take(c, &mut String::new())? {
                JsonScan::More => ObjectState::Skipped(scanner),
                JsonScan::Done => ObjectState::CommaOrEnd,
                JsonScan::DoneBefore => {
                    self.state = ObjectState::CommaOrEnd;
                    return self.take(c, sink);
                }
            },
            (ObjectState::Arguments(mut scanner), _) => match self.scan_arguments(&mut scanner, c, sink)? {
                JsonScan::More => ObjectState::Arguments(scanner),
                _ => ObjectState::CommaOrEnd,
            },
            (ObjectState::Encoded(decoder, inner), _) => self.take_encoded(decoder, inner, c, sink)?,
            _ => return Err(CallError::Malformed),
        };
        Ok(())
    }

    fn begin_value(&mut self, key: &str, c: char, sink: &mut PieceSink<'_>) -> NextState {
        if self.is_keyed {
            if c != '{' || self.has_arguments {
                return Err(CallError::Malformed);
            }
            self.name = Some(key.to_owned());
        }
        match (if self.is_keyed { "arguments" } else { key }, c) {
            ("name" | "tool_name" | "function", '"') if self.name.is_none() => {
                let (scanner, text) = begun(c)?;
                Ok(ObjectState::Name(scanner, text))
            }
            ("function", '{') if self.depth == 1 => {
                self.depth += 1;
                Ok(ObjectState::KeyOrEnd)
            }
            ("arguments" | "parameters", '{' | '"') if !self.has_arguments => {
                self.has_arguments = true;
                self.commit(sink)?;
                if c == '"' {
                    return Ok(ObjectState::Encoded(StringDecoder::default(), Some(JsonScanner::default())));
                }
                let mut scanner = JsonScanner::default();
                self.scan_arguments(&mut scanner, c, sink)?;
                Ok(ObjectState::Arguments(scanner))
            }
            ("arguments" | "parameters", _) if !self.has_arguments && c != 'n' && c != 'N' => {
                Err(CallError::Malformed)
            }
            _ => Ok(ObjectState::Skipped(begun(c)?.0)),
        }
    }

    fn learn_name(&mut self, name: String, sink: &mut PieceSink<'_>) -> NextState {
        self.name = Some(name);
        if !self.is_bare || self.has_arguments {
            self.commit(sink)?;
        }
        Ok(ObjectState::CommaOrEnd)
    }

    /// Names the call, once the name is known.
    fn commit(&mut self, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if let (Some(name), false) = (&self.name, self.is_named) {
            sink.name(name)?;
            self.is_named = true;
            sink.arguments(&std::mem::take(&mut self.waiting));
        }
        Ok(())
    }

    fn scan_arguments(&mut self, scanner: &mut JsonScanner, c: char, sink: &mut PieceSink<'_>) -> Scan {
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
        sink: &mut PieceSink<'_>,
    ) -> NextState {
        match decoder.take(c)? {
            Decoded::Nothing => {}
            Decoded::Char(c) if c.is_whitespace() && (inner.is_none() || !decoder.has_begun) => {}
            Decoded::Char(c) if !decoder.has_begun && c != '{' => return Err(CallError::Malformed),
            Decoded::Char(c) => {
                decoder.has_begun = true;
                let scanner = inner.as_mut().ok_or(CallError::Malformed)?;
                if self.scan_arguments(scanner, c, sink)? != JsonScan::More {
                    inner = None;
                }
            }
            Decoded::End if inner.is_none() => return Ok(ObjectState::CommaOrEnd),
            Decoded::End if !decoder.has_begun => {
                // An empty string: no arguments.
                self.has_arguments = false;
                return Ok(ObjectState::CommaOrEnd);
            }
            Decoded::End => return Err(CallError::Malformed),
        }
        Ok(ObjectState::Encoded(decoder, inner))
    }

    fn close(&mut self, sink: &mut PieceSink<'_>) -> NextState {
        self.depth -= 1;
        if self.depth > 0 {
            return Ok(ObjectState::CommaOrEnd);
        }
        if !self.is_named {
            return Err(CallError::Malformed);
        }
        if !self.has_arguments {
            sink.arguments("{}");
        }
        Ok(ObjectState::Closed)
    }
}

fn begun(c: char) -> Result<(JsonScanner, String), Malformed> {
    let (mut scanner, mut text) = (JsonScanner::default(), String::new());
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
#[derive(Debug, Default)]
pub struct JsonCalls {
    close: Option<&'static str>,
    is_bare: bool,
    is_keyed: bool,
    is_list: bool,
    object: Option<CallObject>,
    place: ListState,
    /// The part of the close marker read so far; without a close marker, the text between calls.
    closing: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ListState {
    /// Before an object.
    #[default]
    Before,
    Inside,
    /// Behind an object.
    Behind,
    /// Behind the list.
    Closing,
}

impl JsonCalls {
    pub fn new(close: Option<&'static str>) -> Self {
        Self { close, ..Self::default() }
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

    fn begin(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        sink.end_open();
        self.closing.clear();
        let mut object = CallObject::new(self.is_bare, self.is_keyed);
        object.take(c, sink)?;
        self.object = Some(object);
        self.place = ListState::Inside;
        Ok(ParserStep::More)
    }

    fn take_inside(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let object = self.object.as_mut().ok_or(CallError::Malformed)?;
        object.take(c, sink).map_err(|broken| match broken {
            CallError::Malformed if self.is_bare && !sink.calls.is_open => CallError::NotACall,
            broken => broken,
        })?;
        if object.is_closed() {
            self.place = ListState::Behind;
            // With a close marker, a lone call is complete when the marker is: what stands between is no JSON.
            if self.is_list || self.close.is_none() {
                sink.end();
            }
        }
        Ok(ParserStep::More)
    }

    fn take_behind(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        match c {
            '{' if !self.is_list && (self.close.is_none() || self.closing.is_empty()) => self.begin(c, sink),
            ',' if self.is_list => {
                self.place = ListState::Before;
                Ok(ParserStep::More)
            }
            ']' if self.is_list => {
                self.place = ListState::Closing;
                Ok(if self.close.is_none() { ParserStep::Done(String::new()) } else { ParserStep::More })
            }
            _ if self.is_list && !c.is_ascii_whitespace() => Err(CallError::Malformed),
            _ => self.take_closing(c, sink),
        }
    }

    fn take_closing(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        let Some(close) = self.close else {
            // The text between calls is content if no call follows.
            self.closing.push(c);
            let is_separator = c.is_ascii_whitespace() || matches!(c, ';' | ',');
            return Ok(if is_separator {
                ParserStep::More
            } else {
                ParserStep::Done(std::mem::take(&mut self.closing))
            });
        };
        if c.is_ascii_whitespace() && self.closing.is_empty() {
            return Ok(ParserStep::More);
        }
        self.closing.push(c);
        if !close.starts_with(&self.closing) {
            return Err(CallError::Malformed);
        }
        if close != self.closing {
            return Ok(ParserStep::More);
        }
        sink.end_open();
        Ok(ParserStep::Done(String::new()))
    }
}

impl CallParser for JsonCalls {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> ParserResult {
        match (self.place, c) {
            (ListState::Before, _) if c.is_ascii_whitespace() => Ok(ParserStep::More),
            (ListState::Before, '[') if !self.is_list && !self.is_bare => {
                self.is_list = true;
                Ok(ParserStep::More)
            }
            (ListState::Before, '{') => self.begin(c, sink),
            (ListState::Before, _) => Err(CallError::Malformed),
            (ListState::Inside, _) => self.take_inside(c, sink),
            (ListState::Behind, _) => self.take_behind(c, sink),
            (ListState::Closing, _) => self.take_closing(c, sink),
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.place {
            ListState::Inside if self.is_bare && !sink.calls.is_open => {
                let name = self.object.as_ref().and_then(|object| object.name.as_deref());
                Err(if name.is_some_and(|name| sink.tools.get(name).is_some()) {
                    CallError::Malformed
                } else {
                    CallError::NotACall
                })
            }
            ListState::Before | ListState::Inside => Err(CallError::Malformed),
            // The model ended its turn behind a whole value: nothing of the call is missing.
            ListState::Behind | ListState::Closing if is_cut && (self.is_list || self.close.is_some()) => {
                Err(CallError::Malformed)
            }
            ListState::Behind | ListState::Closing => {
                sink.end_open();
                Ok(())
            }
        }
    }
}
