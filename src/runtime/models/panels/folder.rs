//! The folder of packed weights: one file per model, `<key>.panels`, and `<key>.part` while it is written.
//!
//! Only files of these names are counted or removed. A file's modification time is the time of its last use.
//! A file that a process has mapped may be removed: its bytes stay until the process ends.

use std::fs::{self, File, FileTimes};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use llmctl_base::private_files::private_folder;

const FINISHED: &str = "panels";
const UNFINISHED: &str = "part";

/// Contents of a folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeptPanels {
    /// Number of models.
    pub files: usize,
    /// Bytes, with those of files that are being written or were given up.
    pub bytes: u64,
}

/// A file of ours.
struct FolderEntry {
    path: PathBuf,
    bytes: u64,
    last_use: SystemTime,
    is_finished: bool,
}

pub fn path_of(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.{FINISHED}"))
}

pub fn unfinished_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.{UNFINISHED}"))
}

/// Counts the files of a folder, which need not exist.
pub fn kept_panels(folder: &Path) -> KeptPanels {
    let files = list(folder);
    KeptPanels {
        files: files.iter().filter(|file| file.is_finished).count(),
        bytes: files.iter().map(|file| file.bytes).sum(),
    }
}

fn list(folder: &Path) -> Vec<FolderEntry> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let ours = entries.filter_map(|entry| {
        let path = entry.path();
        let is_key = path.file_stem()?.to_str()?.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_finished = path.extension()? == FINISHED;
        let meta = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        let is_ours = is_key && (is_finished || path.extension()? == UNFINISHED);
        let last_use = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        is_ours.then_some(FolderEntry { path, bytes: meta.len(), last_use, is_finished })
    });
    ours.collect()
}

/// Creates the folder, and removes what was used longest ago until `needed` more bytes are within the limit, but not what
/// `key` names and not what is being written. Returns false, and removes nothing, if they never are.
///
/// # Errors
/// Errors of the file system, with the path.
pub fn prepare(folder: &Path, limit_bytes: u64, needed: u64, key: &str) -> io::Result<bool> {
    if needed > limit_bytes {
        return Ok(false);
    }
    private_folder(folder, true)?;
    // CACHEDIR.TAG excludes the folder from backups: https://bford.info/cachedir/
    fs::write(folder.join("CACHEDIR.TAG"), "Signature: 8a477f597d28d172789f06886806bc55\n")?;
    let mut others = list(folder);
    others.retain(|file| file.path.file_stem().is_some_and(|stem| stem != key));
    others.sort_by_key(|file| file.last_use);
    let mut total = needed + others.iter().map(|file| file.bytes).sum::<u64>();
    for file in others {
        if total > limit_bytes && (file.is_finished || !is_being_written(&file.path)) && remove(&file.path) {
            total -= file.bytes;
        }
    }
    Ok(total <= limit_bytes)
}

/// Returns whether a process holds the lock of an unfinished file.
fn is_being_written(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock)))
}

/// Removes a file; returns whether it is gone.
pub fn remove(path: &Path) -> bool {
    fs::remove_file(path).map_or_else(|error| error.kind() == io::ErrorKind::NotFound, |()| true)
}

/// Sets the time of last use; on failure the file is only removed earlier.
pub fn note_use(path: &Path) {
    if let Ok(file) = File::options().append(true).open(path) {
        drop(file.set_times(FileTimes::new().set_modified(SystemTime::now())));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn put(folder: &Path, name: &str, bytes: usize, age: u64) {
        let path = folder.join(name);
        fs::write(&path, vec![1; bytes]).expect("a file");
        let used = SystemTime::now() - Duration::from_secs(age);
        let file = File::options().append(true).open(path).expect("opens");
        file.set_times(FileTimes::new().set_modified(used)).expect("times");
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
            .filter(|name| name != "CACHEDIR.TAG")
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_files_used_longest_ago_make_room_and_nothing_else_does() {
        let folder = tempfile::tempdir().expect("tempdir");
        let at = folder.path();
        put(at, "aa.panels", 100, 30);
        put(at, "bb.panels", 100, 20);
        put(at, "cc.part", 100, 40);
        put(at, "dd.part", 100, 50);
        put(at, "notes.txt", 1000, 90);
        put(at, "mine.panels", 1000, 90); // no key
        let held = File::open(at.join("dd.part")).expect("opens");
        held.lock().expect("the lock of a writer");
        assert_eq!(kept_panels(at), KeptPanels { files: 2, bytes: 400 });
        assert!(!prepare(at, 400, 401, "ee").expect("works"), "larger than the limit");
        assert!(prepare(at, 500, 100, "ee").expect("works"), "there is room");
        assert_eq!(kept_panels(at).bytes, 400, "so nothing goes");
        assert!(prepare(at, 400, 200, "ee").expect("works"));
        assert_eq!(names(at), ["bb.panels", "dd.part", "mine.panels", "notes.txt"]);
        assert!(!prepare(at, 150, 100, "ee").expect("works"), "what is being written stays");
        assert_eq!(names(at), ["dd.part", "mine.panels", "notes.txt"]);
        put(at, "ee.part", 90, 5);
        assert!(prepare(at, 200, 100, "ee").expect("works"), "a file's own beginning is no other's");
        assert!(names(at).contains(&"ee.part".to_owned()));
    }

    #[test]
    fn a_use_makes_a_file_young_and_no_folder_holds_nothing() {
        let folder = tempfile::tempdir().expect("tempdir");
        put(folder.path(), "aa.panels", 10, 1000);
        note_use(&folder.path().join("aa.panels"));
        let age = list(folder.path())[0].last_use.elapsed().unwrap_or_default();
        assert!(age < Duration::from_secs(500), "{age:?}");
        assert_eq!(kept_panels(&folder.path().join("none")), KeptPanels::default());
    }
}
