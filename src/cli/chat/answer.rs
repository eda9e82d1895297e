//! An answer on its way to the screen: content to stdout, reasoning and calls beside it, progress while there is none.
//!
//! Takes the model's text apart once, for the eye and for the record. Reasoning is dim and only shown on a terminal; a pipe
//! gets the content. Statistics and what becomes of the answer are not known here.

use std::io::{IsTerminal, StdoutLock, Write};
use std::time::{Duration, Instant};

use super::render::{Markdown, Style, Styled};
use super::think::Think;
use super::{grouped, spoken, talk::NOTICEABLE};
use crate::cli::output::{Output, OutputError};
use crate::cli::run::answer::Sink;
use crate::cli::terminal::{self, Terminal};
use crate::runtime::{Started, Token};
use crate::template::{OutputParser, Piece};

/// How often a line of progress is drawn anew.
const REDRAW: Duration = Duration::from_millis(200);

/// What an answer is made of, so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
}

/// A tool call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    /// JSON text.
    pub arguments: String,
    /// Not cut off or broken: it may be run.
    pub is_whole: bool,
}

impl Parts {
    fn add(&mut self, piece: &Piece) {
        match piece {
            Piece::Content(text) => self.content.push_str(text),
            Piece::Reasoning(text) => self.reasoning.push_str(text),
            Piece::CallName { index, name } => self.call(*index).name.clone_from(name),
            Piece::CallArguments { index, fragment } => self.call(*index).arguments.push_str(fragment),
            Piece::CallEnd { index } => self.call(*index).is_whole = true,
        }
    }

    fn call(&mut self, index: usize) -> &mut Call {
        if self.calls.len() <= index {
            self.calls.resize(index + 1, Call::default());
        }
        &mut self.calls[index]
    }
}

/// What was written last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Written {
    Nothing,
    Content,
    Reasoning,
    Call,
}

/// How to show an answer.
pub struct Manner {
    pub think: Think,
    /// Markdown in colours, on a terminal with its line breaks.
    pub is_styled: bool,
    /// How long the prompt takes, as far as is known before.
    pub estimate: Option<Duration>,
}

/// The sink of one answer.
pub struct Screen<'a> {
    terminal: &'a Terminal,
    manner: Manner,
    output: Output<StdoutLock<'static>>,
    markdown: Option<Markdown>,
    thoughts: Styled,
    parser: Option<OutputParser>,
    pub parts: Parts,
    written: Written,
    ends_line: bool,
    num_reasoning_tokens: usize,
    /// The answer's reasoning has been ended already, or there is no budget for it.
    is_budget_spent: bool,
    begun: Instant,
    drawn: Option<Instant>,
    prompt: Progress,
}

/// How far the prompt is.
#[derive(Debug, Default)]
struct Progress {
    cached: usize,
    done: usize,
    total: usize,
}

impl<'a> Screen<'a> {
    pub fn new(terminal: &'a Terminal, parser: OutputParser, manner: Manner) -> Self {
        // What is styled has been made harmless already.
        let output = match manner.is_styled {
            true => Output::new(std::io::stdout().lock(), false),
            false => Output::stdout(),
        };
        let markdown = || Markdown::new(terminal.colors_output(), output_columns());
        Self {
            terminal,
            output,
            markdown: manner.is_styled.then(markdown),
            thoughts: Styled::new(terminal.colors_notices(), terminal.width()),
            parser: Some(parser),
            parts: Parts::default(),
            written: Written::Nothing,
            ends_line: true,
            num_reasoning_tokens: 0,
            is_budget_spent: manner.think.budget.is_none(),
            begun: Instant::now(),
            drawn: None,
            prompt: Progress::default(),
            manner,
        }
    }

    /// Text of the answer that was shown before.
    pub fn skip(&mut self, text: &str) {
        for piece in self.parse(text) {
            self.parts.add(&piece);
        }
    }

    /// Ends the reasoning with this text, which the model did not write.
    pub fn end_reasoning(&mut self, markup: &str) -> Result<(), OutputError> {
        self.is_budget_spent = true;
        let pieces = self.parse(markup);
        self.show(pieces)
    }

    /// The rest: what was held back, and a line end behind it. `is_cut` when the model did not end the answer itself.
    pub fn finish(&mut self, is_cut: bool) -> Result<(), OutputError> {
        let pieces = self.parser.take().map(|parser| parser.finish(is_cut)).unwrap_or_default();
        self.show(pieces)?;
        self.clear_status();
        self.end_part()?;
        self.note_hidden();
        Ok(())
    }

    fn parse(&mut self, text: &str) -> Vec<Piece> {
        self.parser.as_mut().map(|parser| parser.push(text)).unwrap_or_default()
    }

    fn show(&mut self, pieces: Vec<Piece>) -> Result<(), OutputError> {
        for piece in pieces {
            self.parts.add(&piece);
            match piece {
                Piece::Content(text) => self.show_content(&text)?,
                Piece::Reasoning(text) => self.show_reasoning(&text)?,
                Piece::CallName { name, .. } => {
                    self.begin(Written::Call)?;
                    self.aside(&format!("calls {name} "), Style::PLAIN);
                }
                Piece::CallArguments { fragment, .. } => self.aside(&fragment, Style::DIM),
                Piece::CallEnd { .. } => {}
            }
        }
        Ok(())
    }

    fn show_content(&mut self, text: &str) -> Result<(), OutputError> {
        if text.is_empty() {
            return Ok(());
        }
        self.begin(Written::Content)?;
        self.ends_line = text.ends_with('\n');
        match &mut self.markdown {
            Some(markdown) => {
                markdown.resize(output_columns());
                let styled = markdown.push(text);
                self.output.write(&styled)
            }
            None => self.output.write(text),
        }
    }

    fn show_reasoning(&mut self, text: &str) -> Result<(), OutputError> {
        if !self.manner.think.is_shown || !self.terminal.shows_progress() {
            return Ok(());
        }
        self.begin(Written::Reasoning)?;
        self.aside(text, Style::DIM);
        Ok(())
    }

    /// Separates what comes from what was written before.
    fn begin(&mut self, next: Written) -> Result<(), OutputError> {
        self.clear_status();
        if self.written == next {
            if next == Written::Call {
                self.aside("\n", Style::PLAIN);
            }
            return Ok(());
        }
        self.end_part()?;
        self.written = next;
        Ok(())
    }

    /// What is held back of the part that was written last, and a line end behind it.
    fn end_part(&mut self) -> Result<(), OutputError> {
        let rest = self.markdown.as_mut().map(Markdown::finish).unwrap_or_default();
        self.output.write(&rest)?;
        match self.written {
            Written::Content if !self.ends_line => self.output.write("\n")?,
            Written::Reasoning | Written::Call => {
                self.aside("\n", Style::PLAIN);
                self.thoughts.reset();
                self.print_thoughts();
            }
            _ => {}
        }
        Ok(())
    }

    /// Text on stderr.
    fn aside(&mut self, text: &str, style: Style) {
        self.thoughts.resize(self.terminal.width());
        self.thoughts.push(text, style);
        self.print_thoughts();
    }

    fn print_thoughts(&mut self) {
        let mut stream = std::io::stderr();
        let _ = stream.write_all(self.thoughts.take().as_bytes()).and_then(|()| stream.flush());
    }

    fn note_hidden(&self) {
        if self.num_reasoning_tokens > 0 && !self.manner.think.is_shown {
            let count = grouped(self.num_reasoning_tokens);
            self.terminal.note(&format!("(thought for {count} tokens; /show thinking)"));
        }
    }

    fn draw_status(&mut self) {
        let is_due = self.drawn.is_none_or(|drawn| drawn.elapsed() > REDRAW);
        if self.begun.elapsed() > NOTICEABLE && is_due {
            let status = self.status();
            if !status.is_empty() {
                self.terminal.status(&status);
                self.drawn = Some(Instant::now());
            }
        }
    }

    fn status(&self) -> String {
        match self.num_reasoning_tokens {
            0 => self.prompt.spoken(self.begun.elapsed(), self.manner.estimate),
            count => format!("thinking, {} tokens", grouped(count)),
        }
    }

    fn clear_status(&mut self) {
        if self.drawn.take().is_some() {
            self.terminal.status("");
        }
    }
}

/// How wide the terminal on stdout is, where there is one.
fn output_columns() -> Option<usize> {
    std::io::stdout().is_terminal().then(terminal::columns).flatten()
}

impl Progress {
    /// How far the prompt is and how long it still takes: from what was measured, before that from `estimate`, the time for
    /// the whole.
    fn spoken(&self, elapsed: Duration, estimate: Option<Duration>) -> String {
        let &Progress { cached, done, total } = self;
        if total == 0 || done >= total {
            return String::new();
        }
        let left = match done.checked_sub(cached).filter(|computed| *computed > 0) {
            Some(computed) => Some(elapsed.mul_f64((total - done) as f64 / computed as f64)),
            None => estimate
                .map(|whole| whole.mul_f64((total - cached) as f64 / total as f64).saturating_sub(elapsed)),
        };
        let left = left.map_or(String::new(), |left| format!(", about {} left", spoken(left)));
        format!("prompt {} of {} tokens{left}", grouped(done), grouped(total))
    }
}

impl Drop for Screen<'_> {
    /// Also when a panic passes: the terminal's colours are off.
    fn drop(&mut self) {
        self.clear_status();
        if let Some(markdown) = &mut self.markdown {
            let rest = markdown.finish();
            let _ = self.output.write(&rest);
        }
        self.thoughts.reset();
        self.print_thoughts();
    }
}

impl Sink for Screen<'_> {
    fn started(&mut self, started: &Started) -> Result<(), OutputError> {
        self.begun = Instant::now();
        let cached = started.reuse.cached_tokens;
        self.prompt = Progress { cached, done: cached, total: started.prompt_tokens };
        Ok(())
    }

    fn prefill(&mut self, done: usize, total: usize) -> Result<(), OutputError> {
        (self.prompt.done, self.prompt.total) = (done, total);
        if done >= total {
            self.clear_status()
        } else {
            self.draw_status()
        }
        Ok(())
    }

    fn text(&mut self, text: &str, tokens: &[Token]) -> Result<(), OutputError> {
        let pieces = self.parse(text);
        let thinks = pieces.iter().all(|piece| matches!(piece, Piece::Reasoning(_)));
        let is_reasoning =
            thinks && (!pieces.is_empty() || self.num_reasoning_tokens > 0) && self.is_thinking();
        if is_reasoning {
            self.num_reasoning_tokens += tokens.len();
            if !self.manner.think.is_shown {
                self.draw_status();
            }
        }
        self.show(pieces)
    }

    fn waiting(&mut self) {
        if self.written == Written::Nothing {
            self.draw_status();
        }
    }

    fn is_enough(&self) -> bool {
        let budget = self.manner.think.budget.filter(|_| !self.is_budget_spent && self.is_thinking());
        budget.is_some_and(|budget| self.num_reasoning_tokens >= budget)
    }
}

impl Screen<'_> {
    fn is_thinking(&self) -> bool {
        self.parts.content.is_empty() && self.parts.calls.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_says_how_far_it_is_and_how_long_it_takes() {
        let spoken = |cached, done, total, seconds, estimate: Option<u64>| {
            let progress = Progress { cached, done, total };
            progress.spoken(Duration::from_secs(seconds), estimate.map(Duration::from_secs))
        };
        assert_eq!(spoken(0, 0, 4000, 1, None), "prompt 0 of 4,000 tokens");
        assert_eq!(spoken(0, 0, 4000, 1, Some(41)), "prompt 0 of 4,000 tokens, about 40 s left");
        assert_eq!(spoken(2000, 2000, 4000, 1, Some(42)), "prompt 2,000 of 4,000 tokens, about 20 s left");
        assert_eq!(spoken(1000, 2000, 4000, 10, Some(1)), "prompt 2,000 of 4,000 tokens, about 20 s left");
        assert_eq!((spoken(0, 4000, 4000, 9, None), spoken(0, 0, 0, 9, None)), Default::default());
    }

    #[test]
    fn parts_are_put_together_from_pieces() {
        let mut parts = Parts::default();
        let name = |index, name: &str| Piece::CallName { index, name: name.to_owned() };
        let arguments = |index, fragment: &str| Piece::CallArguments { index, fragment: fragment.to_owned() };
        for piece in [
            Piece::Reasoning("hm".to_owned()),
            Piece::Reasoning("m".to_owned()),
            Piece::Content("a".to_owned()),
            name(0, "f"),
            arguments(0, "{\"x\":"),
            arguments(0, "1}"),
            Piece::CallEnd { index: 0 },
            name(1, "g"),
            arguments(1, "{"),
        ] {
            parts.add(&piece);
        }
        assert_eq!((parts.reasoning.as_str(), parts.content.as_str()), ("hmm", "a"));
        let call = |name: &str, arguments: &str, is_whole| Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            is_whole,
        };
        assert_eq!(parts.calls, [call("f", "{\"x\":1}", true), call("g", "{", false)]);
    }
}
