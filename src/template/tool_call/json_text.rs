//! JSON read one character at a time, so that a call's arguments can be passed on while they are written.
//!
//! The output parses with any strict reader, or the scanner returns [`Malformed`] and emits nothing more. Where a
//! model's slip has one meaning it is put right (a raw line break in a string, Python's `True`); a number that JSON
//! cannot hold (`NaN`, `Infinity`, `1e999`) goes out as a string of the same text, so that it is neither lost nor invalid.

use super::super::python::push_escaped;

/// The text is not JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// The effect of one character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JsonScan {
    /// The value goes on.
    More,
    /// The character was the value's last one.
    Done,
    /// The value had ended before this character, which belongs to what follows.
    DoneBefore,
}

/// Deeper values are refused: serde_json, and many other readers, stop at 128.
const MAX_DEPTH: usize = 100;
/// A bare literal longer than this is none.
const MAX_LITERAL: usize = 400;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Expect {
    #[default]
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
}

/// Inside a string.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Text {
    Plain,
    Backslash,
    /// Behind `\u`, with the digits so far.
    Unicode(String),
}

/// A scanner for one value of any kind.
#[derive(Debug, Default)]
pub struct JsonScanner {
    /// Open containers: true for an object.
    stack: Vec<bool>,
    expect: Expect,
    text: Option<Text>,
    /// A high surrogate that waits for its other half.
    surrogate: Option<u32>,
    literal: String,
}

impl JsonScanner {
    /// Takes one character; what is certain goes to `out`.
    pub fn take(&mut self, c: char, out: &mut String) -> Result<JsonScan, Malformed> {
        if let Some(text) = self.text.take() {
            return self.take_text(text, c, out);
        }
        if !self.literal.is_empty() {
            if !is_delimiter(c) {
                self.literal.push(c);
                return if self.literal.len() > MAX_LITERAL { Err(Malformed) } else { Ok(JsonScan::More) };
            }
            out.push_str(&literal(&std::mem::take(&mut self.literal))?);
            if self.stack.is_empty() {
                return Ok(JsonScan::DoneBefore);
            }
            self.expect = Expect::CommaOrEnd;
        }
        if matches!(c, ' ' | '\t' | '\n' | '\r') {
            out.push(c);
            return Ok(JsonScan::More);
        }
        self.take_structure(c, out)
    }

    /// Returns whether the value has not begun yet.
    pub fn is_before_value(&self) -> bool {
        self.stack.is_empty()
            && self.expect == Expect::Value
            && self.text.is_none()
            && self.literal.is_empty()
    }

    /// The end of the text: whether a complete value has been read (only a bare literal can still be waiting).
    pub fn end(&mut self, out: &mut String) -> Result<(), Malformed> {
        if self.stack.is_empty() && self.text.is_none() && !self.literal.is_empty() {
            out.push_str(&literal(&std::mem::take(&mut self.literal))?);
            return Ok(());
        }
        Err(Malformed)
    }

    fn take_structure(&mut self, c: char, out: &mut String) -> Result<JsonScan, Malformed> {
        use Expect::{Colon, CommaOrEnd, Key, KeyOrEnd, Value, ValueOrEnd};
        match (self.expect, c) {
            (Value | ValueOrEnd, '{' | '[') => {
                if self.stack.len() >= MAX_DEPTH {
                    return Err(Malformed);
                }
                self.stack.push(c == '{');
                self.expect = if c == '{' { KeyOrEnd } else { ValueOrEnd };
            }
            (Value | ValueOrEnd | Key | KeyOrEnd, '"') => self.text = Some(Text::Plain),
            (ValueOrEnd | CommaOrEnd, ']') | (KeyOrEnd | CommaOrEnd, '}') => {
                if self.stack.pop() != Some(c == '}') {
                    return Err(Malformed);
                }
                out.push(c);
                return Ok(self.after_value());
            }
            (Colon, ':') => self.expect = Value,
            (CommaOrEnd, ',') => self.expect = if self.stack.last() == Some(&true) { Key } else { Value },
            (Value | ValueOrEnd, _) if !is_delimiter(c) => {
                self.literal.push(c);
                return Ok(JsonScan::More);
            }
            _ => return Err(Malformed),
        }
        out.push(c);
        Ok(JsonScan::More)
    }

    fn after_value(&mut self) -> JsonScan {
        self.expect = Expect::CommaOrEnd;
        if self.stack.is_empty() { JsonScan::Done } else { JsonScan::More }
    }

    fn take_text(&mut self, text: Text, c: char, out: &mut String) -> Result<JsonScan, Malformed> {
        let next = match (text, c) {
            (Text::Plain, '\\') => Text::Backslash,
            (Text::Plain, '"') => {
                self.flush_surrogate(out);
                out.push('"');
                // A key is the only string that is expected where no value may be.
                if matches!(self.expect, Expect::Key | Expect::KeyOrEnd) {
                    self.expect = Expect::Colon;
                    return Ok(JsonScan::More);
                }
                return Ok(self.after_value());
            }
            (Text::Plain, _) | (Text::Backslash, '\'') => {
                self.flush_surrogate(out);
                push_escaped(c, out);
                Text::Plain
            }
            (Text::Backslash, 'u') => Text::Unicode(String::new()),
            (Text::Backslash, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => {
                self.flush_surrogate(out);
                out.extend(['\\', c]);
                Text::Plain
            }
            (Text::Backslash, _) => return Err(Malformed),
            (Text::Unicode(mut digits), _) if c.is_ascii_hexdigit() => {
                digits.push(c);
                if digits.len() < 4 {
                    Text::Unicode(digits)
                } else {
                    self.take_unit(&digits, out)?;
                    Text::Plain
                }
            }
            (Text::Unicode(_), _) => return Err(Malformed),
        };
        self.text = Some(next);
        Ok(JsonScan::More)
    }

    /// A UTF-16 unit from `\uXXXX`. Halves without a partner become U+FFFD, for no string can hold them.
    fn take_unit(&mut self, digits: &str, out: &mut String) -> Result<(), Malformed> {
        let unit = u32::from_str_radix(digits, 16).map_err(|_| Malformed)?;
        match (self.surrogate.take(), unit) {
            (Some(high), 0xDC00..=0xDFFF) => out.push_str(&format!("\\u{high:04x}\\u{digits}")),
            (waiting, _) => {
                self.surrogate = waiting;
                self.flush_surrogate(out);
                match unit {
                    0xD800..=0xDBFF => self.surrogate = Some(unit),
                    0xDC00..=0xDFFF => out.push('\u{fffd}'),
                    _ => out.push_str(&format!("\\u{digits}")),
                }
            }
        }
        Ok(())
    }

    fn flush_surrogate(&mut self, out: &mut String) {
        if self.surrogate.take().is_some() {
            out.push('\u{fffd}');
        }
    }
}

fn is_delimiter(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | ',' | ':' | '{' | '}' | '[' | ']' | '"' | '<' | ';')
}

/// A JSON string.
pub fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    text.chars().for_each(|c| push_escaped(c, &mut out));
    out.push('"');
    out
}

/// A JSON object, or a list if `close` ends no object, of what `member` makes of texts with commas between them up to `close`, and
/// what follows.
pub fn members<'a>(
    text: &'a str,
    close: char,
    mut member: impl FnMut(&'a str) -> Option<(String, &'a str)>,
) -> Option<(String, &'a str)> {
    let (mut all, mut rest) = (Vec::new(), text.trim_start());
    loop {
        if let Some(rest) = rest.strip_prefix(close) {
            let inside = all.join(", ");
            return Some((if close == '}' { format!("{{{inside}}}") } else { format!("[{inside}]") }, rest));
        }
        let (one, after) = member(rest)?;
        all.push(one);
        let after = after.trim_start();
        rest = if after.starts_with(close) { after } else { after.strip_prefix(',')?.trim_start() };
    }
}

/// A bare literal as JSON text.
fn literal(text: &str) -> Result<String, Malformed> {
    match text {
        "true" | "True" => Ok("true".to_owned()),
        "false" | "False" => Ok("false".to_owned()),
        "null" | "None" => Ok("null".to_owned()),
        "NaN" | "Infinity" | "-Infinity" => Ok(quoted(text)),
        _ if is_json_number(text) => {
            Ok(if text.parse::<f64>().is_ok_and(f64::is_finite) { text.to_owned() } else { quoted(text) })
        }
        _ => Err(Malformed),
    }
}

/// The number grammar of RFC 8259, section 6.
pub fn is_json_number(text: &str) -> bool {
    let is_number = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    is_number && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// One value that must fill the whole text.
pub fn whole_value(text: &str) -> Result<String, Malformed> {
    let mut scanner = JsonScanner::default();
    let mut out = String::new();
    let text = text.trim();
    let mut chars = text.chars();
    for c in chars.by_ref() {
        match scanner.take(c, &mut out)? {
            JsonScan::More => {}
            JsonScan::Done => return if chars.as_str().is_empty() { Ok(out) } else { Err(Malformed) },
            JsonScan::DoneBefore => return Err(Malformed),
        }
    }
    scanner.end(&mut out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<&str>) {
        let got = whole_value(text).ok();
        assert_eq!(got.as_deref(), expected, "{text}");
        if let Some(got) = got {
            serde_json::from_str::<serde_json::Value>(&got).expect("what comes out is JSON");
        }
    }

    #[test]
    fn json_stays_as_it_is() {
        let nested = r#"{"a": {"b": ["\u00e9\ud83d\ude00", "</tool_call>"]}, "c": ""}"#;
        for text in ["{}", "[]", "[1, 2.5, -3e4, true, null]", nested, "0", "\"x\""] {
            check(text, Some(text));
        }
    }

    #[test]
    fn slips_with_one_meaning_are_put_right() {
        check("{\"a\": \"1\n2\"}", Some(r#"{"a": "1\n2"}"#));
        check("[True, False, None]", Some("[true, false, null]"));
        check(
            r#"{"a": NaN, "b": -Infinity, "c": 1e999}"#,
            Some(r#"{"a": "NaN", "b": "-Infinity", "c": "1e999"}"#),
        );
        check(r#""it\'s""#, Some(r#""it's""#));
        check(r#""\ud800x\udc00""#, Some("\"\u{fffd}x\u{fffd}\""));
        check(r#""\ud800\ud83d\ude00""#, Some("\"\u{fffd}\\ud83d\\ude00\""));
    }

    #[test]
    fn everything_else_is_malformed() {
        for text in [
            "", "{", "}", "{]", "[}", "[1,]", "{\"a\"}", "{\"a\":}", "{a: 1}", "007", "1.", ".5", "+1",
            "nan", "\"", "\"\\x\"", "[1 2]", "{} {}", "'a'", "1_000",
        ] {
            check(text, None);
        }
        check("{\"a\": 1,}", None);
        check("\"\\u12g4\"", None);
        check(&"[".repeat(200), None);
    }
}
