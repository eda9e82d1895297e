//! Lines on a stream: written whole, read with a bound on their length.

use std::io::{self, BufRead, Write};

use serde::Serialize;

use super::MAX_LINE_BYTES;

/// Writes `line` and a line feed, and flushes.
///
/// # Errors
/// Errors of the stream.
pub fn write_line(to: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(line)?;
    bytes.push(b'\n');
    to.write_all(&bytes)?;
    to.flush()
}

/// Result of [`read_line`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// A line; the buffer holds it without its line feed.
    Line,
    /// A line longer than [`MAX_LINE_BYTES`]; it was skipped.
    TooLong,
    /// The stream ended within a line, so its writer has ended.
    Torn,
    End,
}

/// Reads the next line into `line`, replacing its content.
///
/// # Errors
/// Errors of the stream.
pub fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Received> {
    read_line_within(from, line, MAX_LINE_BYTES)
}

pub(super) fn read_line_within(
    from: &mut impl BufRead,
    line: &mut Vec<u8>,
    most: usize,
) -> io::Result<Received> {
    line.clear();
    let mut is_too_long = false;
    loop {
        let part = match from.fill_buf() {
            Ok(part) => part,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if part.is_empty() {
            return Ok(if line.is_empty() && !is_too_long { Received::End } else { Received::Torn });
        }
        let end = part.iter().position(|&byte| byte == b'\n');
        let content = &part[..end.unwrap_or(part.len())];
        is_too_long |= line.len() + content.len() > most;
        if is_too_long {
            *line = Vec::new();
        } else {
            line.extend_from_slice(content);
        }
        let used = end.map_or(part.len(), |end| end + 1);
        from.consume(used);
        if end.is_some() {
            return Ok(if is_too_long { Received::TooLong } else { Received::Line });
        }
    }
}
