//! Answers whose reasoning and calls stand between markers, see the header of `output.rs`.
//!
//! A state machine over characters: what it holds back is in `held` (the beginning of a marker, perhaps), `space` (what stands
//! in front of one) and `early` (calls inside reasoning that may count).

use super::output_markup::OutputMarkup;
use super::piece::{Piece, push_text};
use super::reasoning::ReasoningFormat;
use super::tool_call::{CallCount, CallError, CallParser, ParserStep, PieceSink, ToolCallSpec};

/// Answers whose reasoning and calls stand between markers.
#[derive(Debug, Default)]
pub struct Marked {
    reasoning: Option<ReasoningFormat>,
    calls: Option<&'static ToolCallSpec>,
    state: MarkedState,
    /// The beginning of what may be a marker.
    held: String,
    /// Space that is dropped when a marker follows.
    space: String,
    /// No text has come since the beginning, the end of reasoning or a call.
    is_fresh: bool,
    has_content: bool,
    /// Reasoning or a call has come: space in front of the first content is the markup's.
    has_markup: bool,
    /// Text that is dropped at the start of the answer.
    lead: Option<&'static str>,
    /// The text of a call whose tool is not known yet, with the space before it.
    pub raw: String,
    /// Calls inside reasoning that may count.
    early: Early,
}

#[derive(Debug, Default)]
enum MarkedState {
    #[default]
    Text,
    Reasoning,
    Call(Box<dyn CallParser>),
    /// A call inside reasoning.
    EarlyCall(Box<dyn CallParser>),
}

/// Complete calls inside reasoning, held back until it is known whether anything follows them.
#[derive(Debug, Default)]
struct Early {
    /// As it was written, with the space in front.
    raw: String,
    pieces: Vec<Piece>,
    /// Counted on from the calls in front.
    calls: CallCount,
    /// Of `raw`, `pieces` and the number of calls, what belongs to complete calls.
    done: (usize, usize, usize),
    /// The reasoning has been closed behind them.
    is_closed: bool,
}

impl Early {
    fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }
}

impl Marked {
    pub fn new(markup: &OutputMarkup, calls: Option<&'static ToolCallSpec>, prompt_tail: &str) -> Self {
        let is_reasoning = markup.reasoning.is_some_and(|format| format.is_open_in(prompt_tail));
        let ends_with = |mark: &str| prompt_tail.trim_end().ends_with(mark);
        let lead = markup.reasoning.and_then(|format| format.row().lead);
        let mut marked = Self {
            reasoning: markup.reasoning,
            calls,
            state: if is_reasoning { MarkedState::Reasoning } else { MarkedState::Text },
            is_fresh: true,
            lead: lead.filter(|(tail, _)| ends_with(tail)).map(|(_, lead)| lead),
            ..Self::default()
        };
        // The prompt has begun what may be a call.
        if let Some(opener) = calls.and_then(|calls| calls.prompt_opener).filter(|opener| ends_with(opener)) {
            marked.begin_call(opener);
            marked.raw.clear();
        }
        marked
    }

    /// Returns what closes the reasoning; empty without reasoning.
    fn close_marker(&self) -> &'static str {
        self.reasoning.map_or("", |format| format.row().close)
    }

    /// Returns the markers that count in this state.
    fn markers(&self) -> impl Iterator<Item = &'static str> {
        let (in_reasoning, is_fresh) = (matches!(self.state, MarkedState::Reasoning), self.is_fresh);
        // An answer may end reasoning that nothing has opened, and open it twice.
        let is_end = in_reasoning || !self.has_content && is_fresh;
        let close = Some(self.close_marker()).filter(|close| is_end && !close.is_empty());
        let lead = self.lead.filter(|_| !in_reasoning && is_fresh && !self.has_markup);
        let marks = self.reasoning.map(ReasoningFormat::row);
        let opens = marks.filter(|marks| is_fresh || !in_reasoning && marks.is_anywhere);
        let of_reasoning = marks.map(|marks| if in_reasoning { marks.followers } else { marks.dropped });
        // Inside reasoning, only calls whose end is marked.
        let calls = self.calls.filter(|calls| !in_reasoning || !calls.end.is_empty());
        let dropped = calls.filter(|_| !in_reasoning).map(|calls| calls.dropped);
        let sets = [
            of_reasoning,
            opens.map(|marks| marks.opens),
            calls.map(|calls| calls.unwritten_openers),
            calls.map(|calls| calls.openers),
            dropped,
        ];
        close.into_iter().chain(lead).chain(sets.into_iter().flatten().flatten().copied())
    }

    pub fn take(&mut self, c: char, todo: &mut Vec<char>, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if matches!(self.state, MarkedState::Call(_)) {
            return self.take_call(c, todo, sink);
        }
        if matches!(self.state, MarkedState::EarlyCall(_)) {
            self.take_early(c, todo, sink);
            return Ok(());
        }
        if self.held.is_empty() {
            let is_bare_call = self.is_fresh
                && matches!(self.state, MarkedState::Text)
                && self.calls.and_then(|calls| calls.bare) == Some(c);
            if is_bare_call {
                self.begin_call("");
                return self.take_call(c, todo, sink);
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
                self.meet(marker, sink);
            }
            None => {
                self.emit_first(&held, todo, sink);
            }
        }
        Ok(())
    }

    /// Handles a marker.
    fn meet(&mut self, marker: &'static str, sink: &mut PieceSink<'_>) {
        let is_call = self.calls.is_some_and(|calls| {
            calls.openers.contains(&marker) || calls.unwritten_openers.contains(&marker)
        });
        let is_open = self.reasoning.is_some_and(|format| format.row().opens.contains(&marker));
        if matches!(self.state, MarkedState::Reasoning) {
            match (is_call, is_open) {
                (true, _) => self.begin_early(marker, sink),
                (_, true) => self.space.clear(),
                _ => self.close_reasoning(),
            }
        } else if is_call {
            self.give_early_back(sink);
            self.begin_call(marker);
        } else if is_open {
            self.give_early_back(sink);
            self.space.clear();
            self.state = MarkedState::Reasoning;
            self.is_fresh = true;
        } else if self.lead == Some(marker) || self.close_marker() == marker {
            self.has_markup = true;
        }
    }

    fn close_reasoning(&mut self) {
        if !self.early.is_empty() {
            self.early.raw.push_str(&self.space);
            self.early.raw.push_str(self.close_marker());
            self.early.is_closed = true;
        }
        self.space.clear();
        self.state = MarkedState::Text;
        self.is_fresh = true;
        self.has_markup = true;
    }

    // -- Calls inside reasoning.

    fn begin_early(&mut self, opener: &'static str, sink: &PieceSink<'_>) {
        let Some(reader) = self.calls.map(|calls| calls.reader(opener)) else { return };
        if self.early.is_empty() {
            (self.early.calls, self.early.done) = (*sink.calls, (0, 0, sink.calls.num));
        }
        let space = std::mem::take(&mut self.space);
        // Space that begins the reasoning is the markup's.
        if !self.is_fresh || !self.early.is_empty() {
            self.early.raw.push_str(&space);
        }
        self.early.raw.push_str(opener);
        self.state = MarkedState::EarlyCall(reader);
    }

    fn take_early(&mut self, c: char, todo: &mut Vec<char>, sink: &mut PieceSink<'_>) {
        let MarkedState::EarlyCall(reader) = &mut self.state else { return };
        let Early { raw, pieces, calls, .. } = &mut self.early;
        raw.push(c);
        let mut trial = PieceSink { tools: sink.tools, pieces, calls };
        match reader.take(c, &mut trial) {
            Ok(ParserStep::More) => {
                let close = self.close_marker();
                if !close.is_empty() && self.early.raw.ends_with(close) {
                    self.drop_early_call(false, todo, sink);
                }
            }
            Ok(ParserStep::Done(rest)) => {
                let len = self.early.raw.len() - rest.len();
                self.early.raw.truncate(len);
                todo.extend(rest.chars().rev());
                self.early.done = (len, self.early.pieces.len(), self.early.calls.num);
                self.state = MarkedState::Reasoning;
            }
            Err(_) => self.drop_early_call(true, todo, sink),
        }
    }

    /// Treats an incomplete call inside reasoning as reasoning. A malformed one (`is_wrong`) is read again behind its first
    /// character; of one that the end of the reasoning cut off, only that end is read again.
    fn drop_early_call(&mut self, is_wrong: bool, todo: &mut Vec<char>, sink: &mut PieceSink<'_>) {
        self.state = MarkedState::Reasoning;
        let mut raw = self.early.raw.split_off(self.early.done.0);
        self.give_early_back(sink);
        let close = self.close_marker();
        if !is_wrong && raw.ends_with(close) {
            raw.truncate(raw.len() - close.len());
            todo.extend(close.chars().rev());
        }
        let text = raw.trim_start();
        self.space = raw[..raw.len() - text.len()].to_owned();
        if is_wrong {
            return self.emit_first(text, todo, sink);
        }
        text.chars().for_each(|c| if c.is_whitespace() { self.space.push(c) } else { self.emit(c, sink) });
    }

    /// Emits the calls held back as reasoning, because something follows them.
    fn give_early_back(&mut self, sink: &mut PieceSink<'_>) {
        let early = std::mem::take(&mut self.early);
        if early.is_empty() {
            return;
        }
        let close = self.close_marker();
        let raw =
            early.raw.strip_suffix(close).filter(|_| early.is_closed).map_or(&*early.raw, str::trim_end);
        push_text(sink.pieces, true, raw);
        if !early.is_closed {
            self.is_fresh = false;
        }
    }

    /// Emits the calls inside reasoning as calls, because the answer has ended behind them.
    fn take_early_calls(&mut self, sink: &mut PieceSink<'_>) {
        let Early { pieces, done: (_, num_pieces, num_calls), .. } = std::mem::take(&mut self.early);
        sink.pieces.extend(pieces.into_iter().take(num_pieces));
        sink.calls.num = num_calls;
    }

    // -- Calls.

    fn begin_call(&mut self, opener: &'static str) {
        let Some(reader) = self.calls.map(|calls| calls.reader(opener)) else { return };
        self.raw = std::mem::take(&mut self.space) + opener;
        self.state = MarkedState::Call(reader);
    }

    fn take_call(
        &mut self,
        c: char,
        todo: &mut Vec<char>,
        sink: &mut PieceSink<'_>,
    ) -> Result<(), CallError> {
        let MarkedState::Call(reader) = &mut self.state else { return Ok(()) };
        let num_calls = sink.calls.num;
        self.raw.push(c);
        let step = reader.take(c, sink);
        if sink.calls.is_open || sink.calls.num > num_calls {
            self.raw.clear();
        }
        match step {
            Ok(ParserStep::More) => {}
            Ok(ParserStep::Done(rest)) => {
                self.raw.clear();
                todo.extend(rest.chars().rev());
                self.state = MarkedState::Text;
                self.is_fresh = true;
                self.has_markup = true;
            }
            Err(CallError::NotACall) => self.take_back(todo, sink),
            Err(broken) => {
                if broken == CallError::Undefined && self.has_markup && !self.has_content {
                    self.raw = self.raw.trim_start().to_owned();
                }
                return Err(broken);
            }
        }
        Ok(())
    }

    /// Treats what looked like a call as text: emits its first character and reads the rest again.
    fn take_back(&mut self, todo: &mut Vec<char>, sink: &mut PieceSink<'_>) {
        self.state = MarkedState::Text;
        let raw = std::mem::take(&mut self.raw);
        let text = raw.trim_start();
        self.space = raw[..raw.len() - text.len()].to_owned();
        self.emit_first(text, todo, sink);
    }

    /// Emits the first character; the rest is read again.
    fn emit_first(&mut self, text: &str, todo: &mut Vec<char>, sink: &mut PieceSink<'_>) {
        let mut chars = text.chars();
        chars.next().into_iter().for_each(|first| self.emit(first, sink));
        todo.extend(chars.rev());
    }

    fn emit(&mut self, c: char, sink: &mut PieceSink<'_>) {
        self.give_early_back(sink);
        self.flush_space(sink);
        let is_reasoning = matches!(self.state, MarkedState::Reasoning);
        self.is_fresh = false;
        self.has_content |= !is_reasoning;
        push_text(sink.pieces, is_reasoning, c.encode_utf8(&mut [0; 4]));
    }

    /// Emits the space held back, unless it stands between markup and the first text.
    fn flush_space(&mut self, sink: &mut PieceSink<'_>) {
        let space = std::mem::take(&mut self.space);
        let is_reasoning = matches!(self.state, MarkedState::Reasoning);
        let is_markups = if is_reasoning { self.is_fresh } else { self.has_markup && !self.has_content };
        if !is_markups {
            push_text(sink.pieces, is_reasoning, &space);
        }
    }

    pub fn finish(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) -> Result<(), CallError> {
        if let MarkedState::Call(reader) = &mut self.state {
            return reader.finish(is_cut, sink);
        }
        self.finish_early_call(is_cut, sink);
        let held = std::mem::take(&mut self.held);
        // A marker that is whole and was waiting for a longer one leaves nothing to show; so does one that was cut. One
        // character of it may be text, but not where markup is to be expected.
        let is_whole = self.markers().any(|marker| marker == held);
        let is_markup = is_whole || (is_cut && (held.len() > 1 || self.is_fresh));
        if !is_markup {
            held.chars().for_each(|c| self.emit(c, sink));
        }
        if !self.early.is_empty() {
            match is_cut {
                true => self.give_early_back(sink),
                false => self.take_early_calls(sink),
            }
        }
        if !self.has_markup && matches!(self.state, MarkedState::Text) {
            self.flush_space(sink);
        }
        Ok(())
    }

    /// Ends an open call inside reasoning; it counts if it is complete.
    fn finish_early_call(&mut self, is_cut: bool, sink: &mut PieceSink<'_>) {
        let MarkedState::EarlyCall(reader) = &mut self.state else { return };
        let Early { raw, pieces, calls, done, .. } = &mut self.early;
        let mut trial = PieceSink { tools: sink.tools, pieces, calls };
        if reader.finish(is_cut, &mut trial).is_ok() {
            *done = (raw.len(), pieces.len(), calls.num);
            self.state = MarkedState::Reasoning;
            return;
        }
        let mut todo = Vec::new();
        self.drop_early_call(false, &mut todo, sink);
        self.flush_space(sink);
    }
}
