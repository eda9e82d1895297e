//! The rows of a batch file, one line each, however long: none is kept beyond [`MAX_ROW_BYTES`].

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use crate::cli::error::CommandError;

/// A row longer than this is refused without being kept in memory.
pub const MAX_ROW_BYTES: u64 = 64 << 20;

/// Opens the rows, and counts their lines if that is possible beforehand, blank ones among them if they are rows too.
///
/// # Errors
/// A file that cannot be read.
pub fn open_rows(
    path: &Path,
    counts_blank: bool,
) -> Result<(Box<dyn BufRead + Send>, Option<u64>), CommandError> {
    if path == Path::new("-") {
        return Ok((Box::new(BufReader::new(io::stdin())), None));
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
    let mut rows = BufReader::with_capacity(1 << 20, File::open(path)?);
    let mut count = 0;
    while let Some(row) = read_row(&mut rows)? {
        count += u64::from(counts_blank || !row.trim_ascii().is_empty());
    }
    Ok(count)
}

/// Reads a line without its end; `None` at the end. Keeps only the beginning of a line that is too long.
pub fn read_row(rows: &mut dyn BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    if rows.take(MAX_ROW_BYTES + 1).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    match line.last() {
        Some(b'\n') => drop(line.pop()),
        _ if line.len() as u64 > MAX_ROW_BYTES => drop(rows.skip_until(b'\n')?),
        _ => {} // the last line
    }
    Ok(Some(line))
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
