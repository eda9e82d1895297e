//! The model's text taken apart while it streams: content, reasoning and tool calls.
//!
//! Deltas are told as soon as they are certain, and a reader of the whole answer gets the same: complete calls count, whatever
//! comes behind them. A session stores what its reader got.

use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use super::content_tokens::ContentTokens;
use crate::request::{Finish, Outcome, Reuse, Started, Timings, Token, Usage};
use llmctl_template::{CallIds, Content, Message, OutputMarkup, OutputParser, Piece, Role, ToolCall};

/// A part of an answer, in the order in which it was generated.
#[derive(Debug, Clone, PartialEq)]
pub enum Delta {
    /// Text of the answer.
    Content(String),
    /// Text of the reasoning before it.
    Reasoning(String),
    /// A tool call begins.
    Call { index: usize, id: String, name: String },
    /// The fragments of one call, concatenated, are JSON text.
    Arguments { index: usize, fragment: String },
    /// A tool call is complete.
    CallEnd { index: usize },
}

/// A finished answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub content: String,
    pub reasoning: String,
    pub tool_calls: Vec<AnsweredCall>,
    /// Tokens of the reasoning, without the markup around it.
    pub num_reasoning_tokens: usize,
    /// All generated tokens except the end-of-generation token.
    pub tokens: Vec<Token>,
    /// Those of the content.
    pub content_tokens: Vec<Token>,
    pub outcome: Outcome,
    /// `None` if the request ended before its prompt was looked at.
    pub started: Option<Started>,
}

/// A tool call of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct AnsweredCall {
    pub id: String,
    pub name: String,
    /// JSON text of an object, unless the call is cut.
    pub arguments: String,
    /// The call was neither cut nor malformed. Otherwise it must not be executed.
    pub is_whole: bool,
}

impl Answer {
    /// Returns the message that conversations keep. A call that was cut is left out, so that the model never sees it again.
    pub fn to_message(&self) -> Message {
        let call = |call: &AnsweredCall| ToolCall {
            id: Some(call.id.clone()),
            name: call.name.clone(),
            arguments: serde_json::from_str(&call.arguments)
                .unwrap_or_else(|_| call.arguments.as_str().into()),
        };
        let tool_calls: Vec<ToolCall> = self.whole_calls().map(call).collect();
        let is_call_only = self.content.is_empty() && !tool_calls.is_empty();
        Message {
            content: (!is_call_only).then(|| Content::Text(self.content.clone())),
            reasoning: (!self.reasoning.is_empty()).then(|| self.reasoning.clone()),
            tool_calls,
            ..Message::new(Role::Assistant, "")
        }
    }

    /// Returns the calls to execute: all of them if all are whole and the answer was not cancelled, else none.
    pub fn calls_to_run(&self) -> &[AnsweredCall] {
        let is_whole = self.tool_calls.iter().all(|call| call.is_whole);
        if is_whole && self.outcome.finish != Finish::Cancelled { &self.tool_calls } else { &[] }
    }

    /// Returns the calls that are complete: those of a whole answer, and of the message that conversations keep.
    pub fn whole_calls(&self) -> impl Iterator<Item = &AnsweredCall> {
        self.tool_calls.iter().filter(|call| call.is_whole)
    }

    /// Returns OpenAI's word for the end: why the engine cut the answer, else `tool_calls` if there are calls to execute.
    pub fn finish_reason(&self) -> &'static str {
        match self.outcome.finish.reason() {
            "stop" if !self.calls_to_run().is_empty() => "tool_calls",
            reason => reason,
        }
    }

    /// Returns the generated token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// Returns how the prompt began.
    pub fn reuse(&self) -> Reuse {
        self.started.as_ref().map(|started| started.reuse).unwrap_or_default()
    }
}

/// Parser settings that all answers to one prompt share.
#[derive(Debug, Clone)]
pub struct ParserConfig {
    /// `None` if all text is content.
    format: Option<Arc<AnswerFormat>>,
    /// The given beginning of the answer, and those of its tokens that were generated.
    start: (String, Vec<u32>),
}

#[derive(Debug)]
struct AnswerFormat {
    output_markup: OutputMarkup,
    tools: Vec<Value>,
    call_ids: CallIds,
    prompt_tail: String,
}

impl ParserConfig {
    /// Creates settings by which all text is content. The answer begins with `start`.
    pub fn plain(start: &str) -> Self {
        Self { format: None, start: (start.to_owned(), Vec::new()) }
    }

    /// `tools` are those that may be called, `prompt_tail` is the end of the rendered prompt.
    pub fn chat(output_markup: OutputMarkup, tools: &[Value], call_ids: CallIds, prompt_tail: &str) -> Self {
        let (tools, prompt_tail) = (tools.to_vec(), prompt_tail.to_owned());
        let format = AnswerFormat { output_markup, tools, call_ids, prompt_tail };
        Self { format: Some(Arc::new(format)), start: Default::default() }
    }

    /// Puts a text in front of what is generated, with the tokens of it that were generated before.
    pub fn starting_with(self, text: &str, ids: &[u32]) -> Self {
        Self { start: (text.to_owned(), ids.to_vec()), ..self }
    }

    /// Returns the number of tokens of the given beginning that were generated before.
    pub fn given_tokens(&self) -> usize {
        self.start.1.len()
    }

    /// Returns what was generated of an answer: its reasoning and content without the given beginning, for readers that know it.
    pub fn generated(&self, answer: Answer) -> Answer {
        let (mut reasoning, mut content) = (answer.reasoning.as_str(), answer.content.as_str());
        for delta in self.stream().1 {
            match delta {
                Delta::Reasoning(text) => reasoning = reasoning.strip_prefix(&*text).unwrap_or(reasoning),
                Delta::Content(text) => content = content.strip_prefix(&*text).unwrap_or(content),
                _ => {} // a beginning has no calls
            }
        }
        Answer { reasoning: reasoning.to_owned(), content: content.to_owned(), ..answer }
    }

    /// Begins one more answer. The deltas are those of its given beginning.
    pub fn stream(&self) -> (AnswerStream, Vec<Delta>) {
        let parser = |format: &Arc<AnswerFormat>| {
            OutputParser::new(&format.output_markup, &format.tools, &format.prompt_tail)
        };
        let mut stream = AnswerStream {
            parser: self.format.as_ref().map(parser),
            format: self.format.clone(),
            ..AnswerStream::default()
        };
        let (text, ids) = &self.start;
        let tokens: Vec<Token> = ids.iter().map(|&id| Token { id, logprob: None }).collect();
        let deltas = stream.push(text, &tokens);
        (stream, deltas)
    }
}

/// An answer while it is generated.
#[derive(Debug, Default)]
pub struct AnswerStream {
    /// `None` if all text is content, and after the end.
    parser: Option<OutputParser>,
    format: Option<Arc<AnswerFormat>>,
    content: String,
    reasoning: String,
    tool_calls: Vec<AnsweredCall>,
    num_reasoning_tokens: usize,
    /// Tokens that belong to the next piece.
    num_pending_tokens: usize,
    tokens: Vec<Token>,
    held: ContentTokens,
    content_tokens: Vec<Token>,
    num_content_taken: usize,
    pub started: Option<Started>,
}

impl AnswerStream {
    /// Takes the text of more tokens.
    pub fn push(&mut self, text: &str, tokens: &[Token]) -> Vec<Delta> {
        self.tokens.extend_from_slice(tokens);
        self.num_pending_tokens += tokens.len();
        let pieces = match &mut self.parser {
            Some(parser) => {
                self.held.hold(text, tokens);
                parser.push(text)
            }
            None => {
                self.content_tokens.extend_from_slice(tokens);
                let text = Some(text).filter(|text| !text.is_empty());
                text.map(|text| Piece::Content(text.to_owned())).into_iter().collect()
            }
        };
        self.take(pieces, tokens.len())
    }

    /// Returns the tokens of the content since the last call.
    pub fn new_content_tokens(&mut self) -> Vec<Token> {
        let from = std::mem::replace(&mut self.num_content_taken, self.content_tokens.len());
        self.content_tokens[from..].to_vec()
    }

    /// Ends the text and returns what was held back. `is_cut` if the model did not end it. Does nothing the second time.
    pub fn flush(&mut self, is_cut: bool) -> Vec<Delta> {
        let Some(parser) = self.parser.take() else { return Vec::new() };
        self.take(parser.finish(is_cut), 0)
    }

    /// Ends the text and returns whether a message without calls says the same. A call that was cut is left out of a message.
    pub fn says(mut self, message: &Message, is_cut: bool) -> bool {
        self.flush(is_cut);
        let content = match &message.content {
            Some(Content::Text(text)) => text.as_str(),
            _ => "",
        };
        let is_begun = is_cut && self.content.starts_with(content);
        (self.content == content || is_begun)
            && self.reasoning == message.reasoning.as_deref().unwrap_or_default()
    }

    /// Ends the answer with the engine's outcome. Also returns the deltas that were held back.
    pub fn finish(mut self, outcome: Outcome) -> (Vec<Delta>, Answer) {
        let deltas = self.flush(outcome.finish.is_cut());
        let Self { content, reasoning, tool_calls, num_reasoning_tokens, tokens, content_tokens, .. } = self;
        let mut started = self.started;
        if let Some(Started { reuse, .. }) = &mut started {
            // Known at the end only: what a remote engine reused, and pages that were taken over while the prompt was computed.
            reuse.cached_tokens = reuse.cached_tokens.max(outcome.usage.cached_tokens);
        }
        let answer = Answer {
            content,
            reasoning,
            tool_calls,
            num_reasoning_tokens,
            tokens,
            content_tokens,
            outcome,
            started,
        };
        (deltas, answer)
    }

    /// Returns the outcome of an answer whose reader has left, as far as it is known.
    pub fn cancelled(&self) -> Outcome {
        let started = self.started.as_ref();
        let usage = Usage {
            prompt_tokens: started.map_or(0, |started| started.prompt_tokens),
            cached_tokens: started.map_or(0, |started| started.reuse.cached_tokens),
            completion_tokens: self.tokens.len(),
            ..Usage::default()
        };
        let seed = started.map_or(0, |started| started.seed);
        Outcome { finish: Finish::Cancelled, usage, timings: Timings::default(), seed, adapters: Vec::new() }
    }

    /// Returns all tokens so far.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Returns the tokens of the reasoning so far, with those whose text the parser holds back.
    pub fn num_reasoning_tokens(&self) -> usize {
        let is_pending = !self.reasoning.is_empty() && self.is_before_content();
        self.num_reasoning_tokens + if is_pending { self.num_pending_tokens } else { 0 }
    }

    /// Returns whether neither content nor a call has begun.
    pub fn is_before_content(&self) -> bool {
        self.content.is_empty() && self.tool_calls.is_empty()
    }

    /// Adds `pieces`, the last of which is of the text of `num_new` tokens.
    fn take(&mut self, pieces: Vec<Piece>, num_new: usize) -> Vec<Delta> {
        self.content_tokens.extend(self.held.release(&pieces));
        if let Some(piece) = pieces.last() {
            let num_pending = std::mem::take(&mut self.num_pending_tokens);
            if matches!(piece, Piece::Reasoning(_)) {
                // Tokens before the first piece are the markup that opens the reasoning.
                self.num_reasoning_tokens += if self.reasoning.is_empty() { num_new } else { num_pending };
            }
        }
        pieces.into_iter().map(|piece| self.add(piece)).collect()
    }

    fn add(&mut self, piece: Piece) -> Delta {
        match piece {
            Piece::Content(text) => {
                self.content.push_str(&text);
                Delta::Content(text)
            }
            Piece::Reasoning(text) => {
                self.reasoning.push_str(&text);
                Delta::Reasoning(text)
            }
            Piece::CallName { index, name, id } => {
                let (id, arguments) = (self.call_id(id), String::new());
                self.tool_calls.push(AnsweredCall {
                    id: id.clone(),
                    name: name.clone(),
                    arguments,
                    is_whole: false,
                });
                Delta::Call { index, id, name }
            }
            Piece::CallArguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
                Delta::Arguments { index, fragment }
            }
            Piece::CallEnd { index } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.is_whole = true;
                }
                Delta::CallEnd { index }
            }
        }
    }

    /// Returns the model's own id of a call, or a new one in the form that its template takes.
    fn call_id(&self, own: Option<String>) -> String {
        if let Some(id) = own.filter(|id| self.tool_calls.iter().all(|call| call.id != *id)) {
            return id;
        }
        let hex = Uuid::new_v4().simple().to_string();
        match self.format.as_ref().map(|format| format.call_ids) {
            Some(CallIds::Nine) => hex[..9].to_owned(),
            _ => format!("call_{}", &hex[..24]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuse_counts_pages_that_were_taken_over_after_the_start() {
        let (mut stream, _) = ParserConfig::plain("").stream();
        let reuse = Reuse { cached_tokens: 2, ..Reuse::default() };
        stream.started = Some(Started { prompt_tokens: 9, max_tokens: 1, seed: 1, reuse, difference: None });
        let usage = Usage { prompt_tokens: 9, cached_tokens: 6, ..Usage::default() };
        let finish = Finish::Eos(0);
        let outcome = Outcome { finish, usage, timings: Timings::default(), seed: 1, adapters: Vec::new() };
        assert_eq!(stream.finish(outcome).1.reuse().cached_tokens, 6);
    }
}
