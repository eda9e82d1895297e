//! What the model says, told apart: answer, reasoning and tool calls, as they come.
//!
//! A reader of a stream gets the parts as soon as they are certain, and calls cannot be taken back; a reader of the whole
//! gets either all calls or none. What a session keeps is what its reader got.

use std::sync::Arc;

use serde_json::Value;

use super::reply::call_id;
use super::turn::{Delta, Said, SaidCall};
use crate::template::{Dialect, OutputParser, ParsedAnswer, ParsedCall, Piece, parse_answer};

/// How answers to one prompt are to be heard.
#[derive(Clone)]
pub struct Ear {
    /// Nothing where all text is the answer.
    chat: Option<Arc<Heard>>,
}

struct Heard {
    dialect: Dialect,
    tools: Vec<Value>,
    prompt_tail: String,
    is_streamed: bool,
}

impl Ear {
    /// All text is the answer.
    pub fn plain() -> Self {
        Self { chat: None }
    }

    pub fn new(dialect: Dialect, tools: &[Value], prompt_tail: &str, is_streamed: bool) -> Self {
        let (tools, prompt_tail) = (tools.to_vec(), prompt_tail.to_owned());
        Self { chat: Some(Arc::new(Heard { dialect, tools, prompt_tail, is_streamed })) }
    }

    /// For one more answer.
    pub fn voice(&self) -> Voice {
        let parser = |heard: &Arc<Heard>| OutputParser::new(&heard.dialect, &heard.tools, &heard.prompt_tail);
        Voice {
            parser: self.chat.as_ref().map(parser),
            heard: self.chat.clone(),
            text: String::new(),
            said: Said::default(),
            num_untold: 0,
        }
    }
}

/// One answer's text on its way.
pub struct Voice {
    /// Nothing where all text is the answer, and after the end.
    parser: Option<OutputParser>,
    heard: Option<Arc<Heard>>,
    /// All text, where the whole of it is read again at the end.
    text: String,
    said: Said,
    /// Tokens that belong to what comes out next.
    num_untold: usize,
}

impl Voice {
    /// Takes the text of `num_tokens` more tokens.
    pub fn push(&mut self, text: &str, num_tokens: usize) -> Vec<Delta> {
        self.num_untold += num_tokens;
        if self.heard.as_ref().is_some_and(|heard| !heard.is_streamed) {
            self.text.push_str(text);
        }
        let pieces = match &mut self.parser {
            Some(parser) => parser.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Piece::Content(text.to_owned())],
        };
        self.take(pieces)
    }

    /// The end of the text; `is_cut` when it did not end by itself. What is held back comes out.
    pub fn finish(&mut self, is_cut: bool) -> Vec<Delta> {
        let pieces = self.parser.take().map(|parser| parser.finish(is_cut)).unwrap_or_default();
        let deltas = self.take(pieces);
        if let Some(heard) = self.heard.clone().filter(|heard| !heard.is_streamed) {
            let Heard { dialect, tools, prompt_tail, .. } = &*heard;
            self.reconsider(parse_answer(dialect, tools, prompt_tail, &self.text, is_cut));
        }
        deltas
    }

    fn reconsider(&mut self, whole: ParsedAnswer) {
        let call =
            |ParsedCall { name, arguments }| SaidCall { id: call_id(), name, arguments, is_whole: true };
        let calls = whole.calls.into_iter().map(call).collect();
        let num_reasoning_tokens = self.said.num_reasoning_tokens;
        self.said = Said { content: whole.content, reasoning: whole.reasoning, calls, num_reasoning_tokens };
    }

    /// All so far.
    pub fn said(&self) -> &Said {
        &self.said
    }

    fn take(&mut self, pieces: Vec<Piece>) -> Vec<Delta> {
        if let Some(piece) = pieces.last() {
            let num_tokens = std::mem::take(&mut self.num_untold);
            if matches!(piece, Piece::Reasoning(_)) {
                self.said.num_reasoning_tokens += num_tokens;
            }
        }
        let deltas: Vec<Delta> = pieces.into_iter().map(delta).collect();
        deltas.iter().for_each(|delta| self.said.add(delta));
        deltas
    }
}

fn delta(piece: Piece) -> Delta {
    match piece {
        Piece::Content(text) => Delta::Content(text),
        Piece::Reasoning(text) => Delta::Reasoning(text),
        Piece::CallName { index, name } => Delta::Call { index, id: call_id(), name },
        Piece::CallArguments { index, fragment } => Delta::Arguments { index, fragment },
        Piece::CallEnd { index } => Delta::CallEnd { index },
    }
}
