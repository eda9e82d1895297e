//! Functionary 3.2: `>>>NAME`, a line break and the arguments as JSON; `>>>all` begins text. The prompt may end with `>>>`.
//!
//! Python's prompt looks the same: what no given tool's name follows is text.

use super::json_text::{JsonScanner, Scan};
use super::named_json::take_object;
use super::{Broken, CallParser, Sink, Step};

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

    fn take_head(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        if c != '\n' {
            self.head.push(c);
            return if self.head.len() > MAX_NAME { Err(Broken::NotACall) } else { Ok(Step::More) };
        }
        match self.head.trim() {
            "all" => Ok(Step::Done(String::new())),
            name if sink.tool(name).is_some() => {
                sink.name(name)?;
                self.arguments = Some(JsonScanner::new());
                Ok(Step::More)
            }
            _ => Err(Broken::NotACall),
        }
    }
}

impl CallParser for Recipient {
    fn take(&mut self, c: char, sink: &mut Sink<'_>) -> Result<Step, Broken> {
        let Some(scanner) = &mut self.arguments else { return self.take_head(c, sink) };
        let mut text = String::new();
        let scan = take_object(scanner, c, &mut text)?;
        sink.arguments(&text);
        if scan == Scan::More {
            return Ok(Step::More);
        }
        sink.end();
        Ok(Step::Done(String::new()))
    }

    fn finish(&mut self, is_cut: bool, _sink: &mut Sink<'_>) -> Result<(), Broken> {
        match self.arguments {
            None if !is_cut => Err(Broken::NotACall),
            _ => Err(Broken::Malformed),
        }
    }
}
