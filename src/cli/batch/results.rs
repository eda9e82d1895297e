//! Destination of the results of a batch: a file that survives a kill, or stdout.
//!
//! Each row is one write and one sync, so what a kill can leave behind is a torn last line, which `--resume`
//! cuts off. It takes back what failed, too, by a new file in place of the old one, so that each row of the
//! batch has one result. The file is locked while it is written to: two batches into one file would tear each
//! other's lines.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, StdoutLock, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::cli::error::{CommandError, Kind};
use crate::cli::terminal::output::{Output, OutputError};
use llmctl_base::private_files::{UnfinishedFile, sync_folder_of};

/// The rows that a file holds already.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Earlier {
    /// Number of answers per custom_id.
    pub rows: HashMap<String, usize>,
    /// Number of failed results, which are removed.
    pub retried: usize,
    /// Number of bytes of a torn last line, which is cut off.
    pub torn_bytes: u64,
}

/// An open target.
pub struct Results(Target);

enum Target {
    Stdout(Output<StdoutLock<'static>>),
    File { file: File, path: PathBuf, is_regular: bool },
}

impl Results {
    pub fn stdout() -> Self {
        Self(Target::Stdout(Output::stdout()))
    }

    /// Opens, locks and reads the file.
    ///
    /// # Errors
    /// `Usage` when it has content and `resume` is not set, `Temporary` when another process writes to it,
    /// `BadData` when it holds something else than results, `Io`.
    pub fn open(path: &Path, resume: bool) -> Result<(Self, Earlier), CommandError> {
        let named = CommandError::io(path.display());
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(&named)?;
        let is_regular = file.metadata().map_err(&named)?.is_file();
        let mut earlier = Earlier::default();
        if is_regular {
            lock(&file, path)?;
            if file.metadata().map_err(&named)?.len() > 0 && !resume {
                let message = format!("{} exists and is not empty", path.display());
                return Err(CommandError::usage(message).hint("continue it with --resume, or remove it"));
            }
            earlier = read_earlier(&mut file, path)?;
            if earlier.retried > 0 {
                file = without_failures(&file, path).map_err(&named)?;
            }
            sync_folder_of(path);
        }
        Ok((Self(Target::File { file, path: path.to_owned(), is_regular }), earlier))
    }

    /// Appends one row; when this returns, a kill does not lose it.
    pub fn append(&mut self, row: &Value) -> Result<(), OutputError> {
        match &mut self.0 {
            Target::Stdout(output) => output.line(&row.to_string()),
            Target::File { file, path, is_regular } => {
                let line = format!("{row}\n");
                append(file, line.as_bytes(), *is_regular)
                    .map_err(|error| OutputError::new(&path.display().to_string(), error))
            }
        }
    }
}

impl Drop for Results {
    /// Unlocks the file. Closing it is not enough: a child process that is being started holds a copy until it runs its program.
    fn drop(&mut self) {
        if let Target::File { file, .. } = &self.0 {
            let _ = file.unlock();
        }
    }
}

fn append(file: &mut File, line: &[u8], is_regular: bool) -> io::Result<()> {
    if !is_regular {
        return file.write_all(line);
    }
    let end = file.seek(SeekFrom::End(0))?;
    let written = file.write_all(line).and_then(|()| file.sync_data());
    if written.is_err() {
        // Remove the half line; if this fails too, --resume cuts it off.
        let _ = file.set_len(end);
    }
    written
}

fn lock(file: &File, path: &Path) -> Result<(), CommandError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let message = format!("{} is in use by another batch", path.display());
            Err(Kind::Temporary.error(message))
        }
        // Some network file systems have no locks; that is no reason not to write there.
        Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => {
            Err(CommandError::new(Kind::Io, error).context(format!("locking {}", path.display())))
        }
    }
}

/// Puts a file with the answers alone in the place of `file`, and locks it before it is there.
fn without_failures(file: &File, path: &Path) -> io::Result<File> {
    let (unfinished, fresh) = UnfinishedFile::create(path)?;
    fresh.set_permissions(file.metadata()?.permissions())?;
    match fresh.try_lock() {
        Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => return Err(error),
        _ => {}
    }
    copy_answers(file, &fresh)?;
    unfinished.finish(&fresh)?;
    Ok(fresh)
}

fn copy_answers(mut from: &File, to: &File) -> io::Result<()> {
    from.seek(SeekFrom::Start(0))?;
    let mut writer = io::BufWriter::new(to);
    let (mut reader, mut line) = (BufReader::new(from), Vec::new());
    while reader.read_until(b'\n', &mut line)? > 0 {
        if serde_json::from_slice::<EarlierRow>(&line).is_ok_and(|row| row.error.is_none()) {
            writer.write_all(&line)?;
        }
        line.clear();
    }
    writer.flush()
}

/// Beginning of every row that llmctl writes.
const ROW_START: &[u8] = b"{\"id\":\"batch_req_";

/// Beginning of a result's id, llmctl's and OpenAI's.
const ID_START: &str = "batch_req_";

/// Fields that distinguish a result from rows of other files, which may have a custom_id too.
#[derive(Deserialize)]
struct EarlierRow {
    id: String,
    custom_id: String,
    #[serde(rename = "response")]
    _response: IgnoredAny,
    error: Option<IgnoredAny>,
}

/// Reads what is there and cuts off a torn last line.
fn read_earlier(file: &mut File, path: &Path) -> Result<Earlier, CommandError> {
    let io = CommandError::io(path.display());
    let length = file.metadata().map_err(&io)?.len();
    let mut reader = BufReader::new(&*file);
    let (mut earlier, mut line, mut good, mut number) = (Earlier::default(), Vec::new(), 0, 0);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).map_err(&io)? as u64;
        number += 1;
        let is_whole = line.ends_with(b"\n");
        match serde_json::from_slice::<EarlierRow>(&line) {
            _ if read == 0 => break,
            Ok(row) if is_whole && row.id.starts_with(ID_START) => {
                match row.error {
                    Some(_) => earlier.retried += 1,
                    None => *earlier.rows.entry(row.custom_id).or_default() += 1,
                }
                good += read;
            }
            // The last line, torn by a kill.
            _ if !is_whole => break,
            Ok(_) | Err(_) => {
                let message = format!("{}:{number}: not the result of a batch", path.display());
                return Err(CommandError::bad_data(message).hint("give another --out"));
            }
        }
    }
    // Cut off only what a killed llmctl can leave: the start of a row, or a hole. Anything else may be the user's work.
    let is_hole = line.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace());
    let is_ours = is_hole || line.starts_with(ROW_START) || ROW_START.starts_with(&line);
    if !is_ours {
        let message = format!("{} does not hold the results of a batch", path.display());
        return Err(CommandError::bad_data(message).hint("give another --out"));
    }
    earlier.torn_bytes = length - good;
    if earlier.torn_bytes > 0 {
        file.set_len(good).and_then(|()| file.sync_all()).map_err(&io)?;
    }
    Ok(earlier)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = r#"{"id":"batch_req_1","custom_id":"a","response":{},"error":null}"#;
    const FAILED: &str = r#"{"id":"batch_req_2","custom_id":"b","response":null,"error":{"code":"x"}}"#;

    fn resumed(content: &str) -> (Result<Earlier, Kind>, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        std::fs::write(&path, content).expect("a file");
        let earlier = Results::open(&path, true).map(|(_, earlier)| earlier).map_err(|error| error.kind);
        (earlier, std::fs::read_to_string(&path).expect("the file"))
    }

    #[test]
    fn a_torn_last_line_is_cut_off_and_the_rest_kept() {
        for torn in ["", "{", "{\"id\":\"batch_req_3\",\"custom_id\":\"c", "\0\0\0", FAILED] {
            let whole = format!("{ROW}\n{FAILED}\n");
            let (earlier, left) = resumed(&format!("{whole}{torn}"));
            let earlier = earlier.expect("resumable");
            assert_eq!(left, format!("{ROW}\n"), "{torn:?}");
            assert_eq!((earlier.rows.len(), earlier.retried, earlier.torn_bytes), (1, 1, torn.len() as u64));
        }
        let (earlier, left) = resumed(&ROW[..20]);
        assert_eq!((earlier.expect("resumable").rows.len(), left.as_str()), (0, ""));
    }

    #[test]
    fn a_file_of_something_else_is_left_alone() {
        for other in ["my thesis\n", "my thesis", "{\"a\":1}\n", "{\"prompt\":\"x\"}"] {
            assert_eq!(resumed(other), (Err(Kind::BadData), other.to_owned()));
        }
        let input =
            "{\"custom_id\":\"a\",\"prompt\":\"one\"}\n{\"custom_id\":\"b\",\"prompt\":\"precious last\"}";
        let foreign = "{\"id\":\"1\",\"custom_id\":\"a\",\"response\":{}}\n";
        let tail = format!("{ROW}\n{{\"custom_id\":\"b\",\"prompt\":\"precious last\"}}");
        for other in [input, foreign, &tail] {
            assert_eq!(resumed(other), (Err(Kind::BadData), other.to_owned()));
        }
        let middle = format!("{ROW}\nnot a row\n{FAILED}\n");
        assert_eq!(resumed(&middle), (Err(Kind::BadData), middle));
    }

    #[cfg(unix)]
    #[test]
    fn the_new_file_has_the_old_ones_place_lock_and_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let (path, link) = (folder.path().join("out.jsonl"), folder.path().join("link.jsonl"));
        std::fs::write(&path, format!("{FAILED}\n{ROW}\n")).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("chmod");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        let (mut results, _) = Results::open(&link, true).expect("resumable");
        assert_eq!(Results::open(&path, true).map(drop).unwrap_err().kind, Kind::Temporary, "it is locked");
        results.append(&serde_json::from_str(ROW).expect("JSON")).expect("written");
        drop(results);
        assert_eq!(std::fs::read_to_string(&path).expect("the file"), format!("{ROW}\n{ROW}\n"));
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o640);
        assert!(std::fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 2, "nothing is left behind");
    }

    #[test]
    fn content_needs_resume_and_a_lock_keeps_others_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.jsonl");
        let (mut results, earlier) = Results::open(&path, false).expect("a new file");
        assert_eq!(earlier, Earlier::default());
        let kind = |resume| Results::open(&path, resume).map(drop).unwrap_err().kind;
        assert_eq!(kind(true), Kind::Temporary);
        results.append(&serde_json::from_str(ROW).expect("JSON")).expect("written");
        drop(results);
        assert_eq!(kind(false), Kind::Usage);
        assert_eq!(std::fs::read_to_string(&path).expect("the file"), format!("{ROW}\n"));
    }
}
