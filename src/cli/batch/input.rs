//! The rows of a batch file, one line each, however long: none is kept beyond [`MAX_ROW_BYTES`].

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use crate::cli::error::CommandError;

/// A row longer than this is refused without being kept in memory.
pub const MAX_ROW_BYTES: u64 = 64 << 20;

/// Opens the rows, and counts their lines if that is possible beforehand, blank ones among them if they are rows too.
///
/// # Errors
/// A file that cannot be read.
pub fn open_rows(path: &Path, counts_blank: bool) -> Result<(Box<dyn BufRead>, Option<u64>), CommandError> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin().lock()), None));
    }
    let unreadable = |error| CommandError::reading(path, error);
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(unreadable(io::ErrorKind::IsADirectory.into()));
    }
    let total =
        if metadata.is_file() { Some(count_rows(path, counts_blank).map_err(unreadable)?) } else { None };
    Ok((Box::new(BufReader::new(file)), total))
}

fn count_rows(path: &Path, counts_blank: bool) -> io::Result<u64> {
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path)?);
    let (mut count, mut is_blank, mut is_begun) = (0, true, false);
    loop {
        let chunk = reader.fill_buf()?;
        if chunk.is_empty() {
            return Ok(count + u64::from(!is_blank || counts_blank && is_begun));
        }
        for byte in chunk {
            if *byte == b'\n' {
                count += u64::from(!is_blank || counts_blank);
                is_blank = true;
            } else if !byte.is_ascii_whitespace() {
                is_blank = false;
            }
        }
        is_begun = chunk.last() != Some(&b'\n');
        let length = chunk.len();
        reader.consume(length);
    }
}

/// Reads a line without its end; `None` at the end. Keeps only the beginning of a line that is too long.
pub fn read_row(rows: &mut dyn BufRead) -> io::Result<Option<Vec<u8>>> {
    let (mut line, mut any) = (Vec::new(), false);
    loop {
        let chunk = match rows.fill_buf() {
            Ok(chunk) => chunk,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if chunk.is_empty() {
            return Ok(any.then_some(line));
        }
        any = true;
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let content = &chunk[..end.unwrap_or(chunk.len())];
        if line.len() as u64 <= MAX_ROW_BYTES {
            line.extend_from_slice(content);
        }
        let used = content.len() + usize::from(end.is_some());
        rows.consume(used);
        if end.is_some() {
            return Ok(Some(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_as_they_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("in.jsonl");
        for (text, filled, all) in
            [("", 0, 0), ("\n \n", 0, 2), ("a\nb", 2, 2), ("a\n\nb\n", 2, 3), ("a\n ", 1, 2)]
        {
            std::fs::write(&path, text).expect("a file");
            for (counts_blank, expected) in [(false, filled), (true, all)] {
                let (mut rows, total) = open_rows(&path, counts_blank).expect("rows");
                let mut read = 0;
                while let Some(line) = read_row(rows.as_mut()).expect("a line") {
                    read += u64::from(counts_blank || !line.trim_ascii().is_empty());
                }
                assert_eq!((total, read), (Some(expected), expected), "{text:?}");
            }
        }
    }
}
