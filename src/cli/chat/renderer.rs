//! An answer on its way to the screen: content to stdout, reasoning and calls beside it, progress while there
//! is none.
//!
//! Reasoning is dim and only shown on a terminal; a pipe gets the content. Statistics and what becomes of the
//! answer are not known here.

use std::io::{IsTerminal, StdoutLock, Write};
use std::time::{Duration, Instant};

use super::{grouped, spoken};
use crate::cli::run::answer::AnswerSink;
use crate::cli::run::report::{ENCODING_NOTICEABLE, encoding_status};
use crate::cli::terminal;
use crate::cli::terminal::Terminal;
use crate::cli::terminal::output::{Output, OutputError};
use crate::cli::terminal::render::{Markdown, Styled, TextStyle};
use crate::cli::think::Think;
use llmctl_engine::turn::Delta;
use llmctl_engine::{Started, Token};

/// PromptProgress is shown only after this time.
const NOTICEABLE: Duration = Duration::from_millis(500);

/// Interval at which the progress line is redrawn.
const REDRAW: Duration = Duration::from_millis(200);

/// The part that was written last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastWritten {
    Nothing,
    Content,
    Reasoning,
    Call,
}

/// Options of showing an answer.
pub struct RendererOptions {
    pub think: Think,
    /// Markdown in colours, on a terminal with its line breaks.
    pub is_styled: bool,
    /// Estimated time for the prompt; `None` if unknown.
    pub estimate: Option<Duration>,
}

/// The sink of one answer.
pub struct Renderer<'a> {
    terminal: &'a Terminal,
    manner: RendererOptions,
    output: Output<StdoutLock<'static>>,
    markdown: Option<Markdown>,
    thoughts: Styled,
    written: LastWritten,
    ends_line: bool,
    num_reasoning_tokens: usize,
    begun: Instant,
    drawn: Option<Instant>,
    prompt: PromptProgress,
    /// Slices of images that are encoded, and of all.
    images: (usize, usize),
}

/// Progress of the prompt.
#[derive(Debug, Default)]
struct PromptProgress {
    cached: usize,
    done: usize,
    total: usize,
}

impl<'a> Renderer<'a> {
    pub fn new(terminal: &'a Terminal, manner: RendererOptions) -> Self {
        // Styled text has been made harmless already.
        let output = Output::stdout().trusted(manner.is_styled);
        let markdown = || Markdown::new(terminal.colors_output(), output_columns());
        Self {
            terminal,
            output,
            markdown: manner.is_styled.then(markdown),
            thoughts: Styled::new(terminal.colors_notices(), terminal.width()),
            written: LastWritten::Nothing,
            ends_line: true,
            num_reasoning_tokens: 0,
            begun: Instant::now(),
            drawn: None,
            prompt: PromptProgress::default(),
            images: (0, 0),
            manner,
        }
    }

    /// Ends the answer with a line end.
    pub fn finish(&mut self) -> Result<(), OutputError> {
        self.clear_status();
        self.end_part()?;
        self.note_hidden();
        Ok(())
    }

    fn show(&mut self, delta: &Delta) -> Result<(), OutputError> {
        match delta {
            Delta::Content(text) => self.show_content(text)?,
            Delta::Reasoning(text) => self.show_reasoning(text)?,
            Delta::Call { name, .. } => {
                self.begin(LastWritten::Call)?;
                self.aside(&format!("calls {name} "), TextStyle::PLAIN);
            }
            Delta::Arguments { fragment, .. } => self.aside(fragment, TextStyle::DIM),
            Delta::CallEnd { .. } => {}
        }
        Ok(())
    }

    fn show_content(&mut self, text: &str) -> Result<(), OutputError> {
        if text.is_empty() {
            return Ok(());
        }
        self.begin(LastWritten::Content)?;
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
        self.begin(LastWritten::Reasoning)?;
        self.aside(text, TextStyle::DIM);
        Ok(())
    }

    /// Separates what comes from what was written before.
    fn begin(&mut self, next: LastWritten) -> Result<(), OutputError> {
        self.clear_status();
        if self.written == next {
            if next == LastWritten::Call {
                self.aside("\n", TextStyle::PLAIN);
            }
            return Ok(());
        }
        self.end_part()?;
        self.written = next;
        Ok(())
    }

    /// Writes the rest of the last part and a line end.
    fn end_part(&mut self) -> Result<(), OutputError> {
        let rest = self.markdown.as_mut().map(Markdown::finish).unwrap_or_default();
        self.output.write(&rest)?;
        match self.written {
            LastWritten::Content if !self.ends_line => self.output.write("\n")?,
            LastWritten::Reasoning | LastWritten::Call => {
                self.aside("\n", TextStyle::PLAIN);
                self.thoughts.reset();
                self.print_thoughts();
            }
            _ => {}
        }
        Ok(())
    }

    /// Text on stderr.
    fn aside(&mut self, text: &str, style: TextStyle) {
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
            self.terminal.note(format!("(thought for {count} tokens; /show thinking)"));
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
        let (done, total) = self.images;
        match self.num_reasoning_tokens {
            _ if done < total && self.begun.elapsed() < ENCODING_NOTICEABLE => String::new(),
            _ if done < total => encoding_status(done, total),
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

/// Returns the width of the terminal on stdout; `None` without one.
fn output_columns() -> Option<usize> {
    std::io::stdout().is_terminal().then(terminal::columns).flatten()
}

impl PromptProgress {
    /// Describes the progress and the time left, from the speed measured so far, else from `estimate`, the time for the whole.
    fn spoken(&self, elapsed: Duration, estimate: Option<Duration>) -> String {
        let &PromptProgress { cached, done, total } = self;
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

impl Drop for Renderer<'_> {
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

impl AnswerSink for Renderer<'_> {
    fn is_watched(&self) -> bool {
        true
    }

    /// The beginning of an answer that is continued is on the screen already.
    fn started(&mut self, started: &Started, _: &[Delta]) -> Result<(), OutputError> {
        self.begun = Instant::now();
        let cached = started.reuse.cached_tokens;
        self.prompt = PromptProgress { cached, done: cached, total: started.prompt_tokens };
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

    fn encoding(&mut self, done: usize, total: usize) -> Result<(), OutputError> {
        self.images = (done, total);
        if done >= total {
            self.clear_status()
        } else {
            self.draw_status()
        }
        Ok(())
    }

    fn answer(&mut self, deltas: &[Delta], _: &[Token], num_reasoning: usize) -> Result<(), OutputError> {
        let is_more = num_reasoning > std::mem::replace(&mut self.num_reasoning_tokens, num_reasoning);
        if is_more && !self.manner.think.is_shown {
            self.draw_status();
        }
        deltas.iter().try_for_each(|delta| self.show(delta))
    }

    fn waiting(&mut self) {
        if self.written == LastWritten::Nothing {
            self.draw_status();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_says_how_far_it_is_and_how_long_it_takes() {
        let spoken = |cached, done, total, seconds, estimate: Option<u64>| {
            let progress = PromptProgress { cached, done, total };
            progress.spoken(Duration::from_secs(seconds), estimate.map(Duration::from_secs))
        };
        assert_eq!(spoken(0, 0, 4000, 1, None), "prompt 0 of 4,000 tokens");
        assert_eq!(spoken(0, 0, 4000, 1, Some(41)), "prompt 0 of 4,000 tokens, about 40 s left");
        assert_eq!(spoken(2000, 2000, 4000, 1, Some(42)), "prompt 2,000 of 4,000 tokens, about 20 s left");
        assert_eq!(spoken(1000, 2000, 4000, 10, Some(1)), "prompt 2,000 of 4,000 tokens, about 20 s left");
        assert_eq!((spoken(0, 4000, 4000, 9, None), spoken(0, 0, 0, 9, None)), Default::default());
    }
}
