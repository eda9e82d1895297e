//! A model's answer taken apart while it comes: content, reasoning, tool calls.
//!
//! One character at a time, so however the text is split, the same pieces come out (adjacent ones joined). Held back is
//! only what may still turn out to be something else: the beginning of a marker, space in front of one, and a call until
//! its tool is known. Inside reasoning nothing but its end is looked for, and inside a call's strings nothing at all.
//!
//! What becomes of calls that are not in order:
//! - No marker: the text comes out unchanged. Without tools no call is looked for.
//! - A call of a tool that was not given: it and all that follows is content, markup included.
//! - A malformed or cut call: nothing of it and nothing after it comes out as content. If it had been named already, its
//!   [`Piece::CallEnd`] is missing.
//!
//! Calls that went out before such a one cannot be taken back in a stream; a grammar
//! ([`Dialect::tool_grammar`]) rules them out. [`parse_answer`], which sees the whole, gives no partial sets: either all
//! calls are well-formed and defined or there are none. Text between and behind calls is content.

use serde_json::Value;

use super::dialect::{Dialect, ReasoningFormat, ToolCallFormat};
use super::tool_call::{self, Broken, Harmony, Reader, Sink, Step, Tools};

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
    machine: Machine,
    tools: Tools,
    mode: Mode,
    num_calls: usize,
    is_open: bool,
    /// The text of a call whose tool is not known yet, with the space before it.
    raw: String,
}

#[derive(Debug)]
enum Machine {
    Marked(Marked),
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
    pub fn new(dialect: &Dialect, tools: &[Value], prompt_tail: &str) -> Self {
        let tools = Tools::new(tools);
        let is_harmony = dialect.reasoning == Some(ReasoningFormat::Harmony)
            || dialect.tool_calls == Some(ToolCallFormat::Harmony);
        let machine = if is_harmony {
            Machine::Harmony(Harmony::new(prompt_tail))
        } else {
            let format = dialect.tool_calls.filter(|_| !tools.is_empty());
            Machine::Marked(Marked::new(dialect, format, prompt_tail))
        };
        Self { machine, tools, mode: Mode::Parsing, num_calls: 0, is_open: false, raw: String::new() }
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
        let mut sink =
            Sink { tools: &self.tools, pieces, num_calls: &mut self.num_calls, is_open: &mut self.is_open };
        let taken = match &mut self.machine {
            Machine::Marked(marked) => marked.take(c, &mut self.raw, todo, &mut sink),
            Machine::Harmony(harmony) => harmony.take(c, &mut self.raw, &mut sink),
        };
        if let Err(broken) = taken {
            self.give_up(broken, pieces);
        }
    }

    fn give_up(&mut self, broken: Broken, pieces: &mut Vec<Piece>) {
        let raw = std::mem::take(&mut self.raw);
        if broken == Broken::Malformed {
            self.mode = Mode::Discarding;
        } else {
            self.mode = Mode::Verbatim;
            push_text(pieces, false, &raw);
        }
    }

    /// The rest. `is_cut` when the answer was ended by a limit and not by the model.
    pub fn finish(mut self, is_cut: bool) -> Vec<Piece> {
        self.finish_in_place(is_cut)
    }

    fn finish_in_place(&mut self, is_cut: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.mode != Mode::Parsing {
            return pieces;
        }
        let mut sink = Sink {
            tools: &self.tools,
            pieces: &mut pieces,
            num_calls: &mut self.num_calls,
            is_open: &mut self.is_open,
        };
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

/// Takes a whole answer apart. No partial sets: an answer with a call of an undefined tool is content, one with a broken or
/// cut call is the text in front of its first call.
pub fn parse_answer(
    dialect: &Dialect,
    tools: &[Value],
    prompt_tail: &str,
    text: &str,
    is_cut: bool,
) -> ParsedAnswer {
    let mut parser = OutputParser::new(dialect, tools, prompt_tail);
    let mut pieces = parser.push(text);
    pieces.extend(parser.finish_in_place(is_cut));
    if parser.mode == Mode::Verbatim && parser.num_calls > 0 {
        return parse_answer(dialect, &[], prompt_tail, text, is_cut);
    }
    let mut answer = collected(&pieces);
    if parser.mode == Mode::Discarding {
        let first_call = pieces.iter().position(|piece| matches!(piece, Piece::CallName { .. }));
        answer.content = collected(&pieces[..first_call.unwrap_or(pieces.len())]).content;
        answer.calls.clear();
    }
    answer
}

fn collected(pieces: &[Piece]) -> ParsedAnswer {
    let mut answer = ParsedAnswer::default();
    for piece in pieces {
        match piece {
            Piece::Content(text) => answer.content.push_str(text),
            Piece::Reasoning(text) => answer.reasoning.push_str(text),
            Piece::CallName { name, .. } => {
                answer.calls.push(ParsedCall { name: name.clone(), arguments: String::new() });
            }
            Piece::CallArguments { index, fragment } => {
                if let Some(call) = answer.calls.get_mut(*index) {
                    call.arguments.push_str(fragment);
                }
            }
            Piece::CallEnd { .. } => {}
        }
    }
    answer
}

/// Adds text to the last piece of its kind, or as a new one.
pub(super) fn push_text(pieces: &mut Vec<Piece>, is_reasoning: bool, text: &str) {
    match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Reasoning(last)) if is_reasoning => last.push_str(text),
        Some(Piece::Content(last)) if !is_reasoning => last.push_str(text),
        _ if is_reasoning => pieces.push(Piece::Reasoning(text.to_owned())),
        _ => pieces.push(Piece::Content(text.to_owned())),
    }
}

/// Answers whose reasoning and calls stand between markers.
#[derive(Debug)]
struct Marked {
    reasoning: Option<ReasoningFormat>,
    calls: Option<ToolCallFormat>,
    state: State,
    /// The beginning of a marker, perhaps.
    held: String,
    /// Space that is dropped when a marker follows.
    space: String,
    /// No text since the beginning, the end of reasoning or a call.
    is_fresh: bool,
    has_content: bool,
    /// Reasoning or a call has come: space in front of the first content is the markup's.
    has_markup: bool,
}

#[derive(Debug)]
enum State {
    Text,
    Reasoning,
    Call(Box<dyn Reader>),
}

impl Marked {
    fn new(dialect: &Dialect, calls: Option<ToolCallFormat>, prompt_tail: &str) -> Self {
        let is_reasoning = dialect.reasoning.is_some_and(|format| format.is_open_in(prompt_tail));
        Self {
            reasoning: dialect.reasoning,
            calls,
            state: if is_reasoning { State::Reasoning } else { State::Text },
            held: String::new(),
            space: String::new(),
            is_fresh: true,
            has_content: false,
            has_markup: false,
        }
    }

    /// The markers that count at this place.
    fn markers(&self) -> impl Iterator<Item = &'static str> {
        let in_reasoning = matches!(self.state, State::Reasoning);
        let is_fresh = self.is_fresh;
        let close = self.reasoning.filter(|_| in_reasoning).map(|format| format.marks().close);
        let text = self.reasoning.filter(|_| !in_reasoning);
        let opens = text.filter(|format| is_fresh || format.marks().is_anywhere);
        let dropped = text.map_or(&[][..], |format| format.marks().dropped);
        let calls = self.calls.filter(|_| !in_reasoning);
        close
            .into_iter()
            .chain(opens.map_or(&[][..], |format| format.marks().opens).iter().copied())
            .chain(dropped.iter().copied())
            .chain(calls.map_or(&[][..], tool_call::openers).iter().copied())
            .chain(calls.map_or(&[][..], tool_call::dropped).iter().copied())
    }

    fn take(
        &mut self,
        c: char,
        raw: &mut String,
        todo: &mut Vec<char>,
        sink: &mut Sink<'_>,
    ) -> Result<(), Broken> {
        if matches!(self.state, State::Call(_)) {
            return self.take_call(c, raw, todo, sink);
        }
        if self.held.is_empty() {
            let is_bare_call = self.is_fresh
                && matches!(self.state, State::Text)
                && self.calls.and_then(tool_call::bare_opener) == Some(c);
            if is_bare_call {
                self.begin_call("", raw);
                return self.take_call(c, raw, todo, sink);
            }
            if c.is_whitespace() {
                self.space.push(c);
                if self.markers().next().is_none() {
                    self.flush_space(sink);
                }
                return Ok(());
            }
        }
        self.held.push(c);
        if self.markers().any(|marker| marker.starts_with(&self.held) && marker != self.held) {
            return Ok(());
        }
        let marker =
            self.markers().filter(|marker| self.held.starts_with(marker)).max_by_key(|marker| marker.len());
        let held = std::mem::take(&mut self.held);
        match marker {
            Some(marker) => {
                todo.extend(held[marker.len()..].chars().rev());
                self.meet(marker, raw);
            }
            None => {
                let mut chars = held.chars();
                chars.next().into_iter().for_each(|first| self.emit(first, sink));
                todo.extend(chars.rev());
            }
        }
        Ok(())
    }

    /// A marker has come.
    fn meet(&mut self, marker: &'static str, raw: &mut String) {
        if matches!(self.state, State::Reasoning) {
            self.space.clear();
            self.state = State::Text;
            self.is_fresh = true;
            self.has_markup = true;
        } else if self.calls.is_some_and(|format| tool_call::openers(format).contains(&marker)) {
            self.begin_call(marker, raw);
        } else if self.reasoning.is_some_and(|format| format.marks().opens.contains(&marker)) {
            self.space.clear();
            self.state = State::Reasoning;
            self.is_fresh = true;
        }
    }

    fn begin_call(&mut self, opener: &'static str, raw: &mut String) {
        let Some(reader) = self.calls.and_then(|format| tool_call::reader(format, opener)) else { return };
        *raw = std::mem::take(&mut self.space);
        raw.push_str(opener);
        self.state = State::Call(reader);
    }

    fn take_call(
        &mut self,
        c: char,
        raw: &mut String,
        todo: &mut Vec<char>,
        sink: &mut Sink<'_>,
    ) -> Result<(), Broken> {
        let State::Call(reader) = &mut self.state else { return Ok(()) };
        let num_calls = *sink.num_calls;
        raw.push(c);
        let step = reader.take(c, sink);
        if *sink.is_open || *sink.num_calls > num_calls {
            raw.clear();
        }
        match step {
            Ok(Step::More) => {}
            Ok(Step::Done(rest)) => {
                raw.clear();
                todo.extend(rest.chars().rev());
                self.state = State::Text;
                self.is_fresh = true;
                self.has_markup = true;
            }
            Err(Broken::NotACall) => self.take_back(&std::mem::take(raw), todo, sink),
            Err(broken) => {
                if broken == Broken::Undefined && self.has_markup && !self.has_content {
                    *raw = raw.trim_start().to_owned();
                }
                return Err(broken);
            }
        }
        Ok(())
    }

    /// What looked like a call is text: its first character goes out, the rest is read again.
    fn take_back(&mut self, raw: &str, todo: &mut Vec<char>, sink: &mut Sink<'_>) {
        self.state = State::Text;
        let text = raw.trim_start();
        self.space = raw[..raw.len() - text.len()].to_owned();
        let mut chars = text.chars();
        chars.next().into_iter().for_each(|first| self.emit(first, sink));
        todo.extend(chars.rev());
    }

    fn emit(&mut self, c: char, sink: &mut Sink<'_>) {
        self.flush_space(sink);
        let is_reasoning = matches!(self.state, State::Reasoning);
        self.is_fresh = false;
        self.has_content |= !is_reasoning;
        push_text(sink.pieces, is_reasoning, c.encode_utf8(&mut [0; 4]));
    }

    /// Space goes out, unless it stands between markup and the first text.
    fn flush_space(&mut self, sink: &mut Sink<'_>) {
        let space = std::mem::take(&mut self.space);
        let is_reasoning = matches!(self.state, State::Reasoning);
        let is_markups = if is_reasoning { self.is_fresh } else { self.has_markup && !self.has_content };
        if !is_markups {
            push_text(sink.pieces, is_reasoning, &space);
        }
    }

    fn finish(&mut self, is_cut: bool, sink: &mut Sink<'_>) -> Result<(), Broken> {
        if let State::Call(reader) = &mut self.state {
            return reader.finish(is_cut, sink);
        }
        let held = std::mem::take(&mut self.held);
        // A marker that is whole and was waiting for a longer one leaves nothing to show; so does one that was cut.
        let is_whole = self.markers().any(|marker| marker == held);
        let is_markup = is_whole || (is_cut && held.len() > 1);
        if !is_markup {
            held.chars().for_each(|c| self.emit(c, sink));
        }
        if !self.has_markup && matches!(self.state, State::Text) {
            self.flush_space(sink);
        }
        Ok(())
    }
}
