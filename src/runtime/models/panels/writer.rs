//! Writes the panels of a load in the background.
//!
//! Panels of one key are the same bytes in every process, so a writer continues where the last one was
//! stopped: the length of the unfinished file is the progress, after any kill. A file lock admits one writer;
//! the others leave the work to it. The file is synced before it gets its name. What a crash of the system
//! leaves wrong in it is found by the checksums, which are those of the panels in memory.

use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use super::LoadedPanels;
use super::file::{self, PIECE_BYTES, PanelEntry, PanelLabel};
use llmctl_base::private_files::private_file;

/// Longest wait for the writer when the model is dropped: a short `run` should leave something for the next.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// A thread that writes one file.
pub struct PanelWriter {
    stop: Arc<AtomicBool>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl PanelWriter {
    /// Starts to write; `None` if another process does.
    ///
    /// # Errors
    /// Errors of the file system, and that the system starts no thread. Errors while writing have no reader: the next load
    /// tries again.
    pub fn start(
        unfinished: &Path,
        path: &Path,
        loaded: Vec<(PanelLabel, LoadedPanels)>,
    ) -> io::Result<Option<PanelWriter>> {
        let file = private_file(File::options().write(true).create(true).truncate(false), unfinished)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
            Ok(()) => {}
        }
        if !is_at(&file, unfinished) {
            return Ok(None); // its writer has given it its name since it was opened
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (alive, ended) = mpsc::channel();
        let draft =
            PanelDraft { file, unfinished: unfinished.into(), path: path.into(), stop: Arc::clone(&stop) };
        let body = move || {
            use_idle_time();
            drop(draft.write(&loaded));
            drop(alive);
        };
        thread::Builder::new().name("panels".to_owned()).spawn(body)?;
        Ok(Some(PanelWriter { stop, ended }))
    }
}

impl Drop for PanelWriter {
    fn drop(&mut self) {
        let _ = self.ended.recv_timeout(LAST_WAIT);
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Returns whether an open file is still the one at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |meta: io::Result<fs::Metadata>| meta.map(|meta| (meta.dev(), meta.ino())).ok();
        let here = id(fs::metadata(path));
        here.is_some() && here == id(file.metadata())
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

/// Lets this thread run when others do not want to. Only on Linux do threads have a priority of their own.
fn use_idle_time() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(19); // refused, it only competes more
}

/// An unfinished file under this process's lock.
struct PanelDraft {
    file: File,
    unfinished: PathBuf,
    path: PathBuf,
    stop: Arc<AtomicBool>,
}

impl PanelDraft {
    /// Writes the rest of the file and gives it its name. A stopped write leaves the unfinished file to the next.
    fn write(mut self, loaded: &[(PanelLabel, LoadedPanels)]) -> io::Result<()> {
        let done = self.file.metadata()?.len();
        let (starts, end) = file::places(loaded.iter().map(|(_, panels)| panels.len()));
        file::write_start(&mut self.file)?;
        let mut entries = Vec::with_capacity(loaded.len());
        for ((label, panels), start) in loaded.iter().zip(starts) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let memory = panels.get()?;
            let Some(checksums) = self.write_matrix(&memory, start as u64, done)? else { return Ok(()) };
            entries.push(PanelEntry { label: label.clone(), start, len: memory.len(), checksums });
        }
        self.file.set_len(end as u64)?;
        let key = self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        file::write_index(&mut self.file, key, end, entries)?;
        self.file.sync_all()?;
        fs::rename(&self.unfinished, &self.path)?;
        // The name, too, survives a crash of the system where folders can be synced.
        self.path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    }

    /// Writes the pieces of a matrix that are not within the first `done` bytes of the file. Returns the checksums of all;
    /// `None` if it was stopped.
    fn write_matrix(&mut self, memory: &[u8], start: u64, done: u64) -> io::Result<Option<Vec<u32>>> {
        let mut checksums = Vec::with_capacity(memory.len().div_ceil(PIECE_BYTES));
        let mut at = start;
        for piece in memory.chunks(PIECE_BYTES) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            checksums.push(crc32fast::hash(piece));
            if at + piece.len() as u64 > done {
                self.file.seek(SeekFrom::Start(at))?;
                self.file.write_all(piece)?;
            }
            at += piece.len() as u64;
        }
        Ok(Some(checksums))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_got_its_name_meanwhile_is_not_written_again() {
        let folder = tempfile::tempdir().expect("tempdir");
        let [unfinished, path] = ["aa.part", "aa.panels"].map(|name| folder.path().join(name));
        let file = File::create(&unfinished).expect("creates");
        assert!(is_at(&file, &unfinished));
        fs::rename(&unfinished, &path).expect("renames");
        assert!(!is_at(&file, &unfinished), "gone");
        drop(File::create(&unfinished).expect("creates"));
        assert!(!is_at(&file, &unfinished), "another file");
    }
}
