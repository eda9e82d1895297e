//! Texts to embed: given on the command line, or the lines of a file, plain or in JSON.

use std::io::BufRead;

use serde_json::Value;

use crate::cli::batch::input::{MAX_ROW_BYTES, read_row};
use crate::cli::error::CommandError;

/// One text.
#[derive(Debug, PartialEq)]
pub struct EmbedRow {
    /// Its number in the input, from 1.
    pub line: usize,
    /// The `id` of its object.
    pub id: Option<Value>,
    pub text: String,
}

/// The texts of a command.
pub struct Rows<'a> {
    source: RowSource<'a>,
    /// Number of lines read.
    line: usize,
}

enum RowSource<'a> {
    Given(std::vec::IntoIter<String>),
    /// With the member that holds the text, if lines are JSON.
    Lines(Box<dyn BufRead + 'a>, Option<String>),
}

impl<'a> Rows<'a> {
    pub fn given(texts: Vec<String>) -> Self {
        Self { source: RowSource::Given(texts.into_iter()), line: 0 }
    }

    pub fn lines(lines: Box<dyn BufRead + 'a>, field: Option<String>) -> Self {
        Self { source: RowSource::Lines(lines, field), line: 0 }
    }

    /// Returns the next text. An empty plain line is an empty text, so that results and lines have the same numbers; an empty
    /// line among JSON is passed over.
    ///
    /// # Errors
    /// An input that cannot be read, a line that is not UTF-8 or, if lines are JSON, holds no text.
    pub fn next_row(&mut self) -> Result<Option<EmbedRow>, CommandError> {
        loop {
            self.line += 1;
            let line = self.line;
            let (lines, field) = match &mut self.source {
                RowSource::Given(texts) => {
                    return Ok(texts.next().map(|text| EmbedRow { line, id: None, text }));
                }
                RowSource::Lines(lines, field) => (lines, field),
            };
            let read = read_row(lines.as_mut());
            let Some(bytes) = read.map_err(CommandError::io("reading texts"))? else {
                return Ok(None);
            };
            let wrong = |what: &str| CommandError::bad_data(format!("line {line} {what}"));
            if bytes.len() as u64 > MAX_ROW_BYTES {
                return Err(wrong("is longer than 64 MiB"));
            }
            let text = String::from_utf8(bytes).map_err(|_| wrong("is not UTF-8"))?;
            let text = text.strip_suffix('\r').unwrap_or(&text);
            match field {
                None => return Ok(Some(EmbedRow { line, id: None, text: text.to_owned() })),
                Some(_) if text.trim().is_empty() => {}
                Some(field) => return json_row(line, text, field).map(Some),
            }
        }
    }
}

fn json_row(line: usize, text: &str, field: &str) -> Result<EmbedRow, CommandError> {
    let wrong = |what: String| CommandError::bad_data(format!("line {line} {what}"));
    match serde_json::from_str(text).map_err(|error| wrong(format!("is not JSON: {error}")))? {
        Value::String(text) => Ok(EmbedRow { line, id: None, text }),
        Value::Object(mut members) => match members.remove(field) {
            Some(Value::String(text)) => Ok(EmbedRow { line, id: members.remove("id"), text }),
            Some(_) => Err(wrong(format!("has a member {field:?} that is no string"))),
            None => Err(wrong(format!("has no member {field:?} (--field names another)"))),
        },
        _ => Err(wrong("is neither a string nor an object".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, field: Option<&str>) -> Result<Vec<EmbedRow>, String> {
        let mut rows = Rows::lines(Box::new(text.as_bytes()), field.map(str::to_owned));
        let mut read = Vec::new();
        while let Some(row) = rows.next_row().map_err(|error| error.to_string())? {
            read.push(row);
        }
        Ok(read)
    }

    #[test]
    fn lines_are_texts_or_json() {
        let texts =
            |rows: Vec<EmbedRow>| rows.into_iter().map(|row| (row.line, row.text)).collect::<Vec<_>>();
        let row = |line, text: &str| (line, text.to_owned());
        assert_eq!(texts(read("a\r\n\nb", None).expect("texts")), [row(1, "a"), row(2, ""), row(3, "b")]);
        let json = "\"a\"\n\n{\"id\": 7, \"body\": \"b\", \"more\": []}\n";
        let rows = read(json, Some("body")).expect("texts");
        assert_eq!((rows[1].id.clone(), rows[0].id.clone()), (Some(7.into()), None));
        assert_eq!(texts(rows), [row(1, "a"), row(3, "b")]);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, expected) in [
            ("\"a\"\n{", "line 2 is not JSON"),
            ("[1]", "line 1 is neither"),
            ("{\"b\": \"x\"}", "line 1 has no member \"text\""),
            ("{\"text\": 1}", "line 1 has a member"),
        ] {
            let error = read(text, Some("text")).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
        let mut rows = Rows::lines(Box::new(&b"\xff\n"[..]), None);
        assert!(rows.next_row().expect_err("refused").to_string().contains("not UTF-8"));
    }
}
