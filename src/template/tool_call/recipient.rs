//! Functionary 3.2: `>>>NAME`, a line break and the arguments as JSON; `>>>all` begins text. The prompt may end with `>>>`.
//!
//! Python's prompt looks the same: what no given tool's name follows is text.

use super::json_text::JsonScanner;
use super::named_json::take_last_arguments;
use super::{CallError, CallParser, ParserStep, PieceSink};

const MAX_NAME: usize = 256;

/// Reads one recipient and, if it is a tool, its call.
#[derive(Debug)]
pub struct Recipient {
    head: String,
    arguments: Option<JsonScanner>,
}

impl Recipient {
    pub fn new() -> Self {
        Self { head: String::new(), arguments: None }
    }

    fn take_head(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<ParserStep, CallError> {
        if c != '\n' {
            self.head.push(c);
            return if self.head.len() > MAX_NAME { Err(CallError::NotACall) } else { Ok(ParserStep::More) };
        }
        match self.head.trim() {
            "all" => Ok(ParserStep::Done(String::new())),
            name if sink.tool(name).is_some() => {
                sink.name(name)?;
                self.arguments = Some(JsonScanner::new());
                Ok(ParserStep::More)
            }
            _ => Err(CallError::NotACall),
        }
    }
}

impl CallParser for Recipient {
    fn take(&mut self, c: char, sink: &mut PieceSink<'_>) -> Result<ParserStep, CallError> {
        let Some(scanner) = &mut self.arguments else { return self.take_head(c, sink) };
        take_last_arguments(scanner, c, sink)
    }

    fn finish(&mut self, is_cut: bool, _sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        match self.arguments {
            None if !is_cut => Err(CallError::NotACall),
            _ => Err(CallError::Malformed),
        }
    }
}
