//! A model's answer taken apart while it comes: content, reasoning, tool calls.

use serde_json::Value;

use super::dialect::Dialect;

/// A part of an answer, in the order in which it was written. Adjacent pieces of one kind belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Content(String),
    Reasoning(String),
    /// A call begins; calls count from 0. Its tool is one of those given.
    CallName {
        index: usize,
        name: String,
    },
    /// The fragments of one call, concatenated, are the JSON text of an object.
    CallArguments {
        index: usize,
        fragment: String,
    },
    /// The call is complete. A call without this piece was cut off or broke: its arguments may not parse, and it must not
    /// be executed.
    CallEnd {
        index: usize,
    },
}

/// A complete call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedCall {
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

/// An answer taken apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedAnswer {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ParsedCall>,
}

/// Takes an answer apart while it comes.
#[derive(Debug)]
pub struct OutputParser {
    _dialect: Dialect,
}

impl OutputParser {
    /// `tools` are definitions in OpenAI's form; without any, no call is looked for. `prompt_tail` is the end of the
    /// rendered prompt: the template may have opened the reasoning there.
    pub fn new(dialect: &Dialect, tools: &[Value], prompt_tail: &str) -> Self {
        let _ = (tools, prompt_tail);
        Self { _dialect: *dialect }
    }

    /// Takes the next text, split anywhere.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        if text.is_empty() { Vec::new() } else { vec![Piece::Content(text.to_owned())] }
    }

    /// The rest. `is_cut` when the answer was ended by a limit and not by the model.
    pub fn finish(self, is_cut: bool) -> Vec<Piece> {
        let _ = is_cut;
        Vec::new()
    }
}

/// Takes a whole answer apart. No partial sets: an answer with a call that is undefined, broken or cut has no calls.
pub fn parse_answer(dialect: &Dialect, tools: &[Value], prompt_tail: &str, text: &str) -> ParsedAnswer {
    let mut parser = OutputParser::new(dialect, tools, prompt_tail);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish(false));
    let mut answer = ParsedAnswer::default();
    for piece in pieces {
        if let Piece::Content(text) = piece {
            answer.content.push_str(&text);
        }
    }
    answer
}
