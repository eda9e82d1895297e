//! stdout: the answer and nothing else.
//!
//! A reader that went away is told apart from a disk that is full: the first ends a command quietly, the second is
//! an error. To a terminal, control characters are made visible, because a model's text is not to be trusted with
//! the terminal's escape sequences or with the order in which characters appear; to pipes and files bytes go unchanged.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use super::descriptors::is_stdout_closed;
use super::error::{CommandError, Kind};

/// Why nothing more can be written.
#[derive(Debug)]
pub enum OutputError {
    /// The reader of the pipe is gone (`| head`): not a failure.
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

/// stdout, or a buffer in its place.
pub struct Output<W: Write> {
    stream: W,
    is_terminal: bool,
    /// There is nothing behind the stream, and what goes there is lost.
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

/// The text with control characters (except line feed and tab) as symbols: ESC becomes U+241B, and so on.
///
/// C1 controls have no symbol; U+009B alone would start an escape sequence, so they become U+FFFD. So do the controls that
/// reorder what follows them (U+202A to U+202E, U+2066 to U+2069): text that reads as another than it is. Right-to-left
/// scripts need none of them.
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
