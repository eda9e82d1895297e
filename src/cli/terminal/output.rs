//! stdout: the answer and nothing else.
//!
//! A closed pipe ends a command quietly; a full disk is an error. On a terminal, control characters are made
//! visible, because a model's text must not use the terminal's escape sequences or reorder characters. Pipes
//! and files get the bytes unchanged.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use super::descriptors::is_stdout_closed;
use crate::cli::error::{CommandError, Kind};

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
    /// No file is open behind the stream, so output would be lost.
    is_closed: bool,
}

impl Output<io::StdoutLock<'static>> {
    pub fn stdout() -> Self {
        let stream = io::stdout();
        let is_terminal = stream.is_terminal();
        Self { stream: stream.lock(), is_terminal, is_closed: is_stdout_closed() }
    }
}

impl<W: Write> Output<W> {
    pub fn new(stream: W, is_terminal: bool) -> Self {
        Self { stream, is_terminal, is_closed: false }
    }

    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Writes and flushes.
    pub fn write(&mut self, text: &str) -> Result<(), OutputError> {
        if self.is_closed {
            return Err(OutputError::new("standard output", io::Error::other("it is closed")));
        }
        let text = if self.is_terminal { visible(text) } else { text.into() };
        let written = self.stream.write_all(text.as_bytes()).and_then(|()| self.stream.flush());
        written.map_err(|error| OutputError::new("standard output", error))
    }

    pub fn line(&mut self, text: &str) -> Result<(), OutputError> {
        self.write(&format!("{text}\n"))
    }
}

/// Replaces control characters other than line feed and tab by symbols: ESC becomes U+241B, and so on.
///
/// C1 controls have no symbol; U+009B alone would start an escape sequence, so they become U+FFFD. So do
/// controls that reorder the text after them (U+202A to U+202E, U+2066 to U+2069), which would make it read
/// as something else. Right-to-left scripts need none of them.
pub fn visible(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_hostile) {
        return Cow::Borrowed(text);
    }
    let symbol = |c: char| match c {
        '\x7f' => '\u{2421}',
        _ if !is_hostile(c) => c,
        _ => char::from_u32(c as u32 + 0x2400).filter(|_| c < ' ').unwrap_or(char::REPLACEMENT_CHARACTER),
    };
    text.chars().map(symbol).collect::<String>().into()
}

fn is_hostile(c: char) -> bool {
    let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || c.is_control() && c != '\n' && c != '\t'
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
    fn ordinary_text_is_untouched() {
        assert!(matches!(visible("Grüße 🙂 \u{5e9}\u{5dc}\u{200f}\n\t"), Cow::Borrowed(_)));
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
