//! Files and folders that only their owner can read, for conversations and what is computed from them; and
//! files that get their names when they are complete.
//!
//! Knows nothing of the content. On other systems than Unix, permissions are inherited from the folder above.
//! Invariant: no name ever holds an incomplete [`UnfinishedFile`]; one that is given up leaves nothing
//! behind, and what a killed process leaves goes with the next file of the name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Temporary names that are tried; earlier ones are of crashed processes with the same id.
const MAX_ATTEMPTS: usize = 100;

/// Opens a file that only its owner can read.
///
/// # Errors
/// Errors of opening.
pub fn private_file(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.open(path)
}

/// Creates a folder for its owner only. With `with_parents` also creates those above it, and accepts an
/// existing one.
///
/// # Errors
/// Errors of creating.
pub fn private_folder(path: &Path, with_parents: bool) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(with_parents);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Makes a file of its owner read-only, or writable again.
///
/// # Errors
/// Errors of changing its permissions.
pub fn set_read_only(path: &Path, is_read_only: bool) -> io::Result<()> {
    #[cfg(unix)]
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(if is_read_only { 0o400 } else { 0o600 });
    #[cfg(not(unix))]
    let permissions = {
        let mut permissions = fs::metadata(path)?.permissions();
        permissions.set_readonly(is_read_only);
        permissions
    };
    fs::set_permissions(path, permissions)
}

/// A file under a temporary name, removed unless it gets its own.
#[derive(Debug)]
pub struct UnfinishedFile {
    part: PathBuf,
    path: PathBuf,
    is_finished: bool,
}

impl UnfinishedFile {
    /// Creates the file that is to be `path`, or to be what a link of that name leads to, in the same folder.
    ///
    /// # Errors
    /// A name that something else than a regular file has, e.g. a device; a file that cannot be created.
    pub fn create(path: &Path) -> io::Result<(Self, File)> {
        Self::create_as(path, |options, part| options.open(part))
    }

    /// As [`create`](Self::create), for its owner only.
    ///
    /// # Errors
    /// Errors of [`create`](Self::create).
    pub fn create_private(path: &Path) -> io::Result<(Self, File)> {
        Self::create_as(path, private_file)
    }

    fn create_as(
        path: &Path,
        open: impl Fn(&mut OpenOptions, &Path) -> io::Result<File>,
    ) -> io::Result<(Self, File)> {
        let path = if path.is_symlink() { path.canonicalize()? } else { path.to_owned() };
        if path.metadata().is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::other("it is no regular file, and is not replaced"));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        remove_abandoned(&path, &name);
        let mut attempt = 0;
        loop {
            let part = path.with_file_name(format!(".{name}.{}-{attempt}.part", std::process::id()));
            match open(File::options().read(true).write(true).create_new(true), &part) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < MAX_ATTEMPTS => {
                    attempt += 1;
                }
                // Another process may take it for abandoned until it is locked.
                Ok(file) if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) || !part.exists() => {
                    attempt += 1;
                }
                opened => return opened.map(|file| (Self { part, path, is_finished: false }, file)),
            }
        }
    }

    /// Gives the file its name once its content is on disk; another of that name is replaced.
    ///
    /// # Errors
    /// A full disk, a name that cannot be given; the file is removed.
    pub fn finish(mut self, file: &File) -> io::Result<()> {
        file.sync_all()?;
        fs::rename(&self.part, &self.path)?;
        self.is_finished = true;
        sync_folder_of(&self.path);
        Ok(())
    }
}

/// Removes what killed processes have left of a file: one that is being written is locked.
fn remove_abandoned(path: &Path, name: &str) {
    let is_part = |part: &str| {
        let process = part.strip_prefix('.')?.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(".part")?;
        let (id, attempt) = process.split_once('-')?;
        Some(id.parse::<u32>().is_ok() && attempt.parse::<u32>().is_ok())
    };
    for entry in fs::read_dir(folder_of(path)).into_iter().flatten().flatten() {
        if entry.file_name().to_str().and_then(is_part) == Some(true)
            && entry.file_type().is_ok_and(|kind| kind.is_file())
            && File::open(entry.path()).is_ok_and(|part| part.try_lock().is_ok())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.is_finished {
            // An error here would hide the one that brought us here.
            let _ = fs::remove_file(&self.part);
        }
    }
}

/// Writes a file so that a reader sees the old content or the new one, whole.
///
/// # Errors
/// Those of [`UnfinishedFile`].
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let (unfinished, mut file) = UnfinishedFile::create(path)?;
    file.write_all(content)?;
    unfinished.finish(&file)
}

/// Makes a new name durable, where the file system can.
pub fn sync_folder_of(path: &Path) {
    let _ = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the mode of a file that others may read or write; `None` for a private one, or if the system has
/// no modes.
pub fn mode_for_others(path: &Path) -> Option<u32> {
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).ok()?.permissions()) & 0o777;
        (mode & 0o077 != 0).then_some(mode)
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_goes_and_what_another_writes_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for name in [".out.1-0.part", ".out.mine.part", ".other.1-0.part"] {
            fs::write(path(name), "half").expect("written");
        }
        let (running, file) = UnfinishedFile::create(&path("out")).expect("created");
        replace_file(&path("out"), b"new").expect("beside it");
        let there = [".out.1-0.part", ".out.mine.part", ".other.1-0.part"].map(|name| path(name).exists());
        assert_eq!((there, running.part.exists()), ([false, true, true], true));
        running.finish(&file).expect("whole");
    }

    #[cfg(unix)]
    #[test]
    fn a_planted_link_is_neither_followed_nor_removed() {
        use std::os::unix::fs::symlink;

        let folder = tempfile::tempdir().expect("a folder");
        let (path, victim) = (folder.path().join("out"), folder.path().join("victim"));
        fs::write(&victim, "precious").expect("written");
        let planted = folder.path().join(format!(".out.{}-0.part", std::process::id()));
        symlink(&victim, &planted).expect("a link");
        replace_file(&path, b"new").expect("under another temporary name");
        assert_eq!(fs::read(&path).expect("there"), b"new");
        assert!(!path.is_symlink() && planted.is_symlink());
        assert_eq!(fs::read(&victim).expect("there"), b"precious");
        symlink(folder.path().join("nowhere"), folder.path().join("dangling")).expect("a link");
        assert!(replace_file(&folder.path().join("dangling"), b"").is_err());
        assert!(replace_file(Path::new("/dev/null"), b"").is_err());
    }
}
