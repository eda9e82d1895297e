//! A model's answer taken apart while it comes: content, reasoning, tool calls.
//!
//! One character at a time, so however the text is split, the same pieces come out (adjacent ones joined). HeldText back is
//! only what may still turn out to be something else: the beginning of a marker, space in front of one, and a call until
//! its tool is known. Inside a call's strings nothing is looked for. A call inside reasoning counts where nothing but the end of
//! the reasoning follows it, to the end of the answer: some models call before they close it. Until then it is held back.
//!
//! Calls that are not in order:
//! - No marker: the text comes out unchanged. Without tools no call is looked for.
//! - A call of a tool that was not given: it and all that follows is content, markup included. Messages with headers
//!   are never shown with their markup, see `tool_call/harmony.rs`.
//! - A malformed or cut call: nothing of it and nothing after it comes out as content. If it had been named already, its
//!   [`Piece::CallEnd`] is missing.
//!
//! Calls that are complete before such a call count, in streams and in [`parse_answer`]; a grammar
//! ([`OutputMarkup::tool_grammar`]) rules such calls out, cut ones aside. Text between and behind calls is content.

use serde_json::Value;

use super::marked::Marked;
use super::output_markup::OutputMarkup;
use super::piece::{Piece, push_text};
use super::tool_call::{CallCount, CallError, Harmony, PieceSink, ToolCallFormat, ToolDefinitions};

/// A complete call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedCall {
    pub name: String,
    /// The model's own, see [`Piece::CallName`].
    pub id: Option<String>,
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
    machine: Machine,
    tools: ToolDefinitions,
    mode: Mode,
    calls: CallCount,
}

#[derive(Debug)]
enum Machine {
    Marked(Box<Marked>),
    Harmony(Harmony),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Parsing,
    /// An undefined tool was called: the rest is content.
    Verbatim,
    /// A call broke: the rest is dropped.
    Discarding,
}

impl OutputParser {
    /// `tools` are definitions in OpenAI's form; without any, no call is looked for. `prompt_tail` is the end of the
    /// rendered prompt: the template, or a prefilled answer, may have opened the reasoning there.
    pub fn new(output_markup: &OutputMarkup, tools: &[Value], prompt_tail: &str) -> Self {
        let tools = ToolDefinitions::new(tools);
        let machine = match output_markup.protocol() {
            Some(protocol) => Machine::Harmony(Harmony::new(protocol, prompt_tail)),
            None => {
                let calls = output_markup.tool_calls.filter(|_| !tools.is_empty()).map(ToolCallFormat::row);
                Machine::Marked(Box::new(Marked::new(output_markup, calls, prompt_tail)))
            }
        };
        Self { machine, tools, mode: Mode::Parsing, calls: CallCount::default() }
    }

    /// Takes the next text, split anywhere.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut todo: Vec<char> = text.chars().rev().collect();
        while let Some(c) = todo.pop() {
            self.take(c, &mut todo, &mut pieces);
        }
        pieces
    }

    fn take(&mut self, c: char, todo: &mut Vec<char>, pieces: &mut Vec<Piece>) {
        match self.mode {
            Mode::Parsing => {}
            Mode::Verbatim => return push_text(pieces, false, c.encode_utf8(&mut [0; 4])),
            Mode::Discarding => return,
        }
        let mut sink = PieceSink { tools: &self.tools, pieces, calls: &mut self.calls };
        let taken = match &mut self.machine {
            Machine::Marked(marked) => marked.take(c, todo, &mut sink),
            Machine::Harmony(harmony) => harmony.take(c, &mut sink),
        };
        if let Err(broken) = taken {
            self.give_up(broken, pieces);
        }
    }

    fn give_up(&mut self, broken: CallError, pieces: &mut Vec<Piece>) {
        let raw = match &mut self.machine {
            Machine::Marked(marked) => std::mem::take(&mut marked.raw),
            Machine::Harmony(_) => String::new(),
        };
        if broken == CallError::Malformed {
            self.mode = Mode::Discarding;
        } else {
            self.mode = Mode::Verbatim;
            push_text(pieces, false, &raw);
        }
    }

    /// The rest. `is_cut` when the answer was ended by a limit and not by the model.
    pub fn finish(mut self, is_cut: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.mode != Mode::Parsing {
            return pieces;
        }
        let mut sink = PieceSink { tools: &self.tools, pieces: &mut pieces, calls: &mut self.calls };
        let finished = match &mut self.machine {
            Machine::Marked(marked) => marked.finish(is_cut, &mut sink),
            Machine::Harmony(harmony) => harmony.finish(is_cut, &mut sink),
        };
        if let Err(broken) = finished {
            self.give_up(broken, &mut pieces);
        }
        pieces
    }
}

/// Takes a whole answer apart, with the calls that are complete.
pub fn parse_answer(
    output_markup: &OutputMarkup,
    tools: &[Value],
    prompt_tail: &str,
    text: &str,
    is_cut: bool,
) -> ParsedAnswer {
    let mut parser = OutputParser::new(output_markup, tools, prompt_tail);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish(is_cut));
    let (mut answer, mut num_complete) = (ParsedAnswer::default(), 0);
    for piece in pieces {
        match piece {
            Piece::Content(text) => answer.content.push_str(&text),
            Piece::Reasoning(text) => answer.reasoning.push_str(&text),
            Piece::CallName { name, id, .. } => {
                answer.calls.push(ParsedCall { name, id, arguments: String::new() });
            }
            Piece::CallArguments { index, fragment } => {
                if let Some(call) = answer.calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
            Piece::CallEnd { index } => num_complete = index + 1,
        }
    }
    answer.calls.truncate(num_complete);
    answer
}
