//! Texts from files and standard input.
//!
//! Invariant: a text is UTF-8 without a byte order mark, has no line end at its end, and at most
//! [`MAX_TEXT_BYTES`].

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::cli::error::CommandError;
use crate::cli::terminal::Terminal;

/// More text than any context holds; a bound for /dev/zero and wrong files.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Time of silence on stdin after which a note says that llmctl waits for it.
const STDIN_PATIENCE: Duration = Duration::from_secs(2);

/// Reads a text file, without the line end at its end.
///
/// # Errors
/// `NotFound` (66) whatever prevents reading it; `BadData` if it is not UTF-8 or longer than [`MAX_TEXT_BYTES`].
pub fn read_file(path: &Path) -> Result<String, CommandError> {
    let unreadable = |error| CommandError::reading(path, error);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    text_of(bytes, &path.display().to_string())
}

/// Reads standard input to its end, without the line end at its end; `None` if it is empty.
///
/// # Errors
/// `Io` if it cannot be read, `BadData` if it is not UTF-8 or longer than [`MAX_TEXT_BYTES`].
pub fn read_all_stdin(terminal: &Terminal) -> Result<Option<String>, CommandError> {
    let bytes = read_stdin_bytes(terminal)?;
    if bytes.is_empty() { Ok(None) } else { text_of(bytes, "standard input").map(Some) }
}

/// Reads standard input to its end, at most one byte more than [`MAX_TEXT_BYTES`].
///
/// # Errors
/// `Io` if it cannot be read.
pub fn read_stdin_bytes(terminal: &Terminal) -> Result<Vec<u8>, CommandError> {
    let patience = say_when_waiting(terminal.clone());
    let mut stdin = io::stdin().lock().take(MAX_TEXT_BYTES + 1);
    let mut bytes = vec![0; 1 << 16];
    let first = loop {
        match stdin.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            first => break first,
        }
    };
    drop(patience);
    let rest = first.and_then(|length| {
        bytes.truncate(length);
        stdin.read_to_end(&mut bytes)
    });
    rest.map_err(CommandError::io("reading standard input"))?;
    Ok(bytes)
}

/// Returns the offset of stdin in its file if it is not 0: another process reads the same file, as the shell does in a
/// `while read` loop around this command. `None` for pipes, which have no offset.
pub fn position_in_file() -> Option<u64> {
    let mut file = stdin_file()?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    let position = if is_file { file.stream_position().ok() } else { None };
    position.filter(|position| *position > 0)
}

#[cfg(unix)]
fn stdin_file() -> Option<File> {
    use std::os::fd::AsFd;
    io::stdin().as_fd().try_clone_to_owned().ok().map(File::from)
}

#[cfg(not(unix))]
fn stdin_file() -> Option<File> {
    None
}

/// Prints a note after [`STDIN_PATIENCE`], because a pipe that another program holds open without writing looks like a
/// hang. Dropping the sender cancels the note.
fn say_when_waiting(terminal: Terminal) -> Sender<()> {
    let (sender, waiting) = channel::<()>();
    std::thread::spawn(move || {
        if waiting.recv_timeout(STDIN_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            terminal.note("waiting for stdin; press Ctrl-D to end it, or use --no-stdin");
        }
    });
    sender
}

/// Returns the text of a file or of a stream.
///
/// # Errors
/// `BadData` if it is not UTF-8 or longer than [`MAX_TEXT_BYTES`].
pub fn text_of(mut bytes: Vec<u8>, name: &str) -> Result<String, CommandError> {
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        return Err(CommandError::bad_data(format!(
            "{name}: more than {} MiB of text",
            MAX_TEXT_BYTES >> 20
        )));
    }
    if bytes.starts_with("\u{feff}".as_bytes()) {
        bytes.drain(..3);
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        CommandError::bad_data(format!("{name}: not UTF-8 text (at byte {at})"))
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::error::Kind;

    #[test]
    fn one_line_end_is_not_part_of_a_text() {
        let check = |bytes: &[u8], expected| assert_eq!(text_of(bytes.to_vec(), "x").unwrap(), expected);
        check(b"a\n", "a");
        check(b"a\r\n", "a");
        check(b"a\n\n", "a\n");
        check(b"\xef\xbb\xbfa", "a");
        check(b"", "");
        assert_eq!(text_of(b"a\xff".to_vec(), "x").unwrap_err().kind, Kind::BadData);
    }
}
