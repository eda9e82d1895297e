//! stdout: the answer and nothing else.
//!
//! A closed pipe or terminal ends a command quietly; a full disk is an error. On a terminal, control characters are made
//! visible, because a model's text must not use the terminal's escape sequences or reorder characters. Pipes
//! and files get the bytes unchanged.

use std::io::{self, IsTerminal, Write};

use super::descriptors::is_stdout_closed;
use crate::cli::error::{CommandError, Kind};
pub use llmctl_base::columns::visible;

/// Reason why output ended.
#[derive(Debug)]
pub enum OutputError {
    /// The pipe was closed (`| head`), which is not a failure.
    Closed,
    Failed(CommandError),
}

impl OutputError {
    pub fn new(name: &str, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => OutputError::Closed,
            _ => {
                OutputError::Failed(CommandError::new(Kind::Io, error).context(format!("writing to {name}")))
            }
        }
    }
}

/// stdout, or a buffer for tests.
pub struct Output<W: Write> {
    stream: W,
    is_terminal: bool,
    /// Texts may use the terminal's escape sequences.
    is_trusted: bool,
    /// No file is open behind the stream, so output would be lost.
    is_closed: bool,
}

impl Output<io::StdoutLock<'static>> {
    pub fn stdout() -> Self {
        let stream = io::stdout();
        let is_terminal = stream.is_terminal();
        Self { is_closed: is_stdout_closed(), ..Self::new(stream.lock(), is_terminal) }
    }
}

impl<W: Write> Output<W> {
    pub fn new(stream: W, is_terminal: bool) -> Self {
        Self { stream, is_terminal, is_trusted: false, is_closed: false }
    }

    /// Takes texts that were made harmless already.
    pub fn trusted(self, is_trusted: bool) -> Self {
        Self { is_trusted, ..self }
    }

    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Writes and flushes.
    pub fn write(&mut self, text: &str) -> Result<(), OutputError> {
        if self.is_closed {
            return Err(OutputError::new("standard output", io::Error::other("it is closed")));
        }
        let text = if self.is_terminal && !self.is_trusted { visible(text) } else { text.into() };
        let written = self.stream.write_all(text.as_bytes()).and_then(|()| self.stream.flush());
        written.map_err(|error| match self.is_terminal {
            true => OutputError::Closed, // it was hung up
            false => OutputError::new("standard output", error),
        })
    }

    pub fn line(&mut self, text: &str) -> Result<(), OutputError> {
        self.write(&format!("{text}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_never_sees_an_escape_and_a_pipe_sees_the_bytes() {
        let hostile = "a\x1b]0;title\x07\r\u{9b}31m\x7f\tb\n";
        let mut terminal = Vec::new();
        Output::new(&mut terminal, true).write(hostile).expect("a Vec takes all");
        assert_eq!(String::from_utf8(terminal).unwrap(), "a␛]0;title␇␍\u{fffd}31m␡\tb\n");
        let mut pipe = Vec::new();
        Output::new(&mut pipe, false).write(hostile).expect("a Vec takes all");
        assert_eq!(pipe, hostile.as_bytes());
    }

    #[test]
    fn a_terminal_that_is_gone_has_left_as_a_pipe_does() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::other("input/output error"))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(matches!(Output::new(Gone, true).trusted(true).write("a"), Err(OutputError::Closed)));
        assert!(matches!(Output::new(Gone, false).write("a"), Err(OutputError::Failed(_))));
    }

    #[test]
    fn what_a_terminal_would_reorder_is_shown_in_the_order_it_has() {
        let hostile = "user\u{202e}fdp.exe\u{2066}x\u{2069}";
        let mut terminal = Vec::new();
        Output::new(&mut terminal, true).write(hostile).expect("a Vec takes all");
        assert_eq!(String::from_utf8(terminal).unwrap(), "user\u{fffd}fdp.exe\u{fffd}x\u{fffd}");
        let mut pipe = Vec::new();
        Output::new(&mut pipe, false).write(hostile).expect("a Vec takes all");
        assert_eq!(pipe, hostile.as_bytes());
    }
}
