//! Layout of the pages on disk: `<root>/<fingerprint>/<two digits>/<name>-<group>.kv`, written under another
//! name and renamed.
//!
//! A file is either absent or complete, except after a power failure: only the manifest is synced. Pages are
//! a cache under a checksum (a torn page is computed again), the conversation they belong to is synced
//! elsewhere, and syncing half a gigabyte per turn would keep the disk busy for seconds. Only files whose
//! folder and name follow this layout are counted or removed, so other files below the root are safe. A
//! file's modification time is the time of its last use by any process that shares the root, and a month
//! later for a page that several sessions begin with.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirEntry, File, FileTimes, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::page::{self, FORMAT_VERSION};
use super::{DiskPageKey, MissingReason, PageLabel, PageName, PageUse};
use crate::tensor::SharedBytes;
use llmctl_base::private_files::{private_file, private_folder};
use llmctl_base::vault::{KeyKind, SEALED_HEADER, Vault, open_any, sealed_id};

pub(super) const MANIFEST: &str = "manifest.json";
/// Says of a folder that came from another machine which weights its pages were computed with.
pub(super) const ORIGIN: &str = "origin.json";
pub(super) const MAX_MANIFEST_BYTES: u64 = 1 << 20;
const EXTENSION: &str = ".kv";
/// Prefix of files that are being written.
const UNFINISHED: &str = ".new-";
/// Age from which an unfinished file counts as left by a crash and is removed.
const LEFTOVER_AGE: Duration = Duration::from_secs(60 * 60);
/// Uses within this time count as one use, so that within it the pages deepest in their sequences are removed first:
/// without the pages before it a page is worth nothing.
const SAME_USE: Duration = Duration::from_secs(60);

/// A shared page counts as used this much later than it was, so that it is removed after all others. The time is limited, so
/// that prefixes without any use lose their protection.
const SHARED_BONUS: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The folder with the pages of one fingerprint.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
    path: PathBuf,
    manifest: Value,
    vault: Option<Vault>,
}

/// A page's file, found by walking the folders.
#[derive(Debug)]
pub struct FoundPage {
    pub path: PathBuf,
    pub key: DiskPageKey,
    pub num_bytes: u64,
    pub last_use: SystemTime,
    /// Part of a [`WarmPrompt`](super::WarmPrompt): its file is read-only.
    pub is_pinned: bool,
}

pub(super) fn page_path(folder: &Path, key: DiskPageKey) -> PathBuf {
    let file_name = file_name(key);
    folder.join(&file_name[..2]).join(file_name)
}

/// Returns the name of a page's file.
pub fn file_name(key: DiskPageKey) -> String {
    format!("{}-{}{EXTENSION}", key.name, key.group)
}

/// Removes the pages with these names, of all models and groups below `root`, and every page that follows one of them
/// in a sequence: those are unreachable now, and they hold later text of the removed conversation. Pages of prompts that
/// were computed ahead stay, and what follows them. The keys of sealed pages are erased with them, also those of files that are
/// gone. Returns the number of removed files.
///
/// # Errors
/// Errors of the file system, except that a file is absent.
pub fn forget(root: &Path, names: &HashSet<PageName>, vault: Option<&Vault>) -> io::Result<usize> {
    let mut forgotten = ForgottenPages { names: names.clone(), ..ForgottenPages::default() };
    if names.is_empty() {
        return Ok(0);
    }
    for folder in unless_gone(fs::read_dir(root))?.into_iter().flatten() {
        let folder = folder?;
        if is_folder(&folder) {
            forgotten.add(&folder.path(), names)?;
        }
    }
    erase_keys(vault, forgotten.names.difference(&forgotten.pinned))?;
    Ok(forgotten.num_removed)
}

/// Erases the keys of pages; nothing without a vault.
fn erase_keys<'a>(vault: Option<&Vault>, mut names: impl Iterator<Item = &'a PageName>) -> io::Result<()> {
    let Some(vault) = vault else { return Ok(()) };
    names.try_for_each(|name| vault.erase(KeyKind::Page, (*name).into()))
}

#[derive(Default)]
struct ForgottenPages {
    num_removed: usize,
    /// Names of all pages that are to be removed.
    names: HashSet<PageName>,
    pinned: HashSet<PageName>,
}

impl ForgottenPages {
    fn add(&mut self, folder: &Path, names: &HashSet<PageName>) -> io::Result<()> {
        let pages =
            unless_gone(walk(folder, &AtomicBool::new(false), FoundPage::measure))?.unwrap_or_default();
        let (pinned, pages): (Vec<_>, Vec<_>) = pages.into_iter().partition(|page| page.is_pinned);
        self.pinned.extend(pinned.into_iter().map(|page| page.key.name));
        let mut followers: HashMap<PageName, Vec<PageName>> = HashMap::new();
        let mut paths: HashMap<PageName, Vec<PathBuf>> = HashMap::new();
        for FoundPage { key: DiskPageKey { name, .. }, path, .. } in pages {
            // A page whose header cannot be read is matched by its own name only.
            if let Some(parent) = File::open(&path).ok().and_then(|mut file| page::read_parent(&mut file)) {
                followers.entry(parent).or_default().push(name);
            }
            paths.entry(name).or_default().push(path);
        }
        let mut left: Vec<PageName> = names.iter().copied().collect();
        while let Some(name) = left.pop() {
            self.names.insert(name);
            left.extend(followers.remove(&name).unwrap_or_default());
            for path in paths.remove(&name).unwrap_or_default() {
                self.num_removed += usize::from(unless_gone(fs::remove_file(path))?.is_some());
            }
        }
        Ok(())
    }
}

impl Folder {
    pub fn new(root: PathBuf, fingerprint: &str, description: &Value) -> Self {
        let manifest = json!({
            "schema": "llmctl.kv.v1",
            "page_format": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "made_of": description,
        });
        Self { path: root.join(fingerprint), root, manifest, vault: None }
    }

    /// Seals new pages, and opens sealed ones.
    pub fn with_vault(self, vault: Option<Vault>) -> Self {
        Self { vault, ..self }
    }

    pub fn vault(&self) -> Option<&Vault> {
        self.vault.as_ref()
    }

    /// Returns the length of the file of a page with a payload of `num_bytes`.
    pub fn file_len(&self, label: &PageLabel, num_bytes: usize) -> u64 {
        page::file_len(label, num_bytes) + self.vault.as_ref().map_or(0, |_| SEALED_HEADER as u64)
    }

    /// See [`DiskConfig::description`](super::DiskConfig::description).
    pub fn description(&self) -> &Value {
        &self.manifest["made_of"]
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the folder belongs to this fingerprint. A folder that does not exist yet passes.
    ///
    /// # Errors
    /// A sentence that names the manifest and what differs, or why it cannot be read.
    pub fn check_manifest(&self) -> Result<(), String> {
        let path = self.path.join(MANIFEST);
        let found = match read_small(&path, MAX_MANIFEST_BYTES) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        match serde_json::from_slice::<Value>(&found) {
            Ok(found) if found == self.manifest => Ok(()),
            Ok(_) => Err(format!(
                "{} belongs to another model; remove {} to start over",
                path.display(),
                self.path.display()
            )),
            Err(error) => {
                Err(format!("{}: {error}; remove {} to start over", path.display(), self.path.display()))
            }
        }
    }

    /// Creates the folder and its manifest if they do not exist.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn prepare(&self) -> io::Result<()> {
        private_folder(&self.path, true)?;
        let manifest = self.path.join(MANIFEST);
        if manifest.exists() {
            return Ok(());
        }
        // CACHEDIR.TAG excludes the folder from backups, since pages can be computed again:
        // https://bford.info/cachedir/
        drop(fs::write(self.root.join("CACHEDIR.TAG"), "Signature: 8a477f597d28d172789f06886806bc55\n"));
        let text = format!("{:#}\n", self.manifest);
        replace(&self.path, &manifest, |file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
    }

    fn page_path(&self, key: DiskPageKey) -> PathBuf {
        page_path(&self.path, key)
    }

    /// Writes a page, replacing a file of the same name.
    ///
    /// # Errors
    /// Errors of the file system; the folder is then unchanged.
    pub fn write(&self, label: &PageLabel, payload: &[u8]) -> io::Result<()> {
        match self.try_write(label, payload) {
            // Another process has removed the empty folder in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.prepare()?;
                self.try_write(label, payload)
            }
            written => written,
        }
    }

    fn try_write(&self, label: &PageLabel, payload: &[u8]) -> io::Result<()> {
        let path = self.page_path(label.key);
        let fan_out = path.parent().unwrap_or(&self.path);
        match private_folder(fan_out, false) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        replace(fan_out, &path, |file| {
            match &self.vault {
                None => page::write(file, label, payload)?,
                Some(vault) => file.write_all(&sealed(vault, label, payload)?)?,
            }
            file.set_times(used_now(label.depth, Duration::ZERO))
        })
    }

    /// Reads and checks a page, and sets its time of last use.
    ///
    /// # Errors
    /// [`MissingReason`] if the page is absent, damaged, another page, or unreadable.
    pub fn read(&self, label: &PageLabel, num_bytes: usize) -> Result<SharedBytes, MissingReason> {
        let path = self.page_path(label.key);
        let io = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => MissingReason::Absent,
            _ => MissingReason::Io(format!("{}: {error}", path.display())),
        };
        // Checked before opening: opening a pipe would wait for a writer.
        if !fs::metadata(&path).map_err(io)?.is_file() {
            return Err(MissingReason::Io(format!("{}: not a regular file", path.display())));
        }
        let mut file = File::open(&path).map_err(io)?;
        let mut len = file.metadata().map_err(io)?.len();
        let mut header = Vec::new();
        (&file).take(SEALED_HEADER as u64).read_to_end(&mut header).map_err(io)?;
        let is_sealed = sealed_id(&header).is_some();
        if is_sealed {
            len -= header.len() as u64;
        } else {
            file.rewind().map_err(io)?;
        }
        page::check_len(&mut file, len, label, num_bytes)?;
        file.rewind().map_err(io)?;
        let bytes = match is_sealed {
            true => self.opened(&mut file, len)?,
            false => contents(&mut file, len).map_err(io)?,
        };
        let payload = page::find_payload(&bytes, label, num_bytes)?;
        note_use(&file, PageUse { depth: label.depth, is_shared: false });
        Ok(bytes.slice(payload.start, payload.len()))
    }

    /// Returns the plain content of a sealed page, `len` bytes.
    fn opened(&self, file: &mut File, len: u64) -> Result<SharedBytes, MissingReason> {
        let mut bytes = Vec::new();
        let most = len + SEALED_HEADER as u64;
        file.take(most).read_to_end(&mut bytes).map_err(|error| MissingReason::Io(error.to_string()))?;
        match open_any(self.vault(), KeyKind::Page, &mut bytes) {
            Ok(plain) => Ok(SharedBytes::from(bytes).slice(plain.start, plain.len())),
            Err(reason) if self.vault.is_none() => Err(MissingReason::Io(reason)),
            Err(reason) => Err(MissingReason::Damaged(reason)),
        }
    }

    /// Returns whether there is a file under the page's name.
    pub fn has(&self, key: DiskPageKey) -> bool {
        fs::metadata(self.page_path(key)).is_ok_and(|metadata| metadata.is_file())
    }

    /// Sets a page's time of last use.
    pub fn touch(&self, key: DiskPageKey, page_use: PageUse) {
        if let Ok(file) = File::open(self.page_path(key)) {
            note_use(&file, page_use);
        }
    }

    /// Removes a page's file. Returns false if the file still exists.
    pub fn remove(&self, key: DiskPageKey) -> bool {
        match fs::remove_file(self.page_path(key)) {
            Err(error) => error.kind() == io::ErrorKind::NotFound,
            Ok(()) => true,
        }
    }

    /// Lists the pages of this fingerprint, from file names alone.
    ///
    /// # Errors
    /// Errors of the file system, except that the folder does not exist.
    pub fn list(&self) -> io::Result<Vec<DiskPageKey>> {
        let file = |entry: &DirEntry, key| entry.file_type().is_ok_and(|kind| kind.is_file()).then_some(key);
        unless_gone(walk(&self.path, &AtomicBool::new(false), file)).map(Option::unwrap_or_default)
    }

    /// Lists the pages of all fingerprints below the root. The list is incomplete if `stop` is set meanwhile.
    ///
    /// # Errors
    /// Errors of the file system, except that a folder does not exist or was removed by another process.
    pub fn list_all(&self, stop: &AtomicBool) -> io::Result<Vec<FoundPage>> {
        let mut found = Vec::new();
        for folder in unless_gone(fs::read_dir(&self.root))?.into_iter().flatten() {
            let folder = folder?;
            if is_folder(&folder) {
                found
                    .extend(unless_gone(walk(&folder.path(), stop, FoundPage::measure))?.unwrap_or_default());
            }
        }
        Ok(found)
    }

    /// Erases the keys of pages that are removed.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn erase_keys<'a>(&self, names: impl Iterator<Item = &'a PageName>) -> io::Result<()> {
        erase_keys(self.vault(), names)
    }

    pub fn is_ours(&self, found: &FoundPage) -> bool {
        found.path.starts_with(&self.path)
    }

    /// Removes a page's file and the folders that become empty. A file that is already gone is no error.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn remove_found(&self, found: &FoundPage) -> io::Result<()> {
        match fs::remove_file(&found.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let Some(fan_out) = found.path.parent() else { return Ok(()) };
        if fs::remove_dir(fan_out).is_ok()
            && !self.is_ours(found)
            && let Some(folder) = fan_out.parent()
        {
            remove_if_only_manifest(folder);
        }
        Ok(())
    }
}

/// Returns the sealed file of a page, in which the names of the page and of the one before it stay in the clear.
fn sealed(vault: &Vault, label: &PageLabel, payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut plain = Vec::new();
    page::write(&mut plain, label, payload)?;
    vault.seal_file(KeyKind::Page, label.key.name.into(), &plain, page::TOKENS_START)
}

/// Returns the content of a page's file, `len` bytes: the system's own copy of it, which is there already if the file was
/// written or read before, so that no fresh memory is filled. A copy of ours where a mapped file could not be removed or
/// replaced, and where mapping fails, as it does when very many pages are mapped.
pub(super) fn contents(file: &mut File, len: u64) -> io::Result<SharedBytes> {
    if cfg!(unix)
        && let Ok(mapped) = SharedBytes::map_present(file)
    {
        return Ok(mapped);
    }
    copied(file, len)
}

fn copied(file: &mut File, len: u64) -> io::Result<SharedBytes> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX)).map_err(io::Error::other)?;
    file.take(len).read_to_end(&mut copy)?;
    Ok(SharedBytes::from(copy))
}

/// Reads at most `most` bytes of a file.
pub(super) fn read_small(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // Checked before opening: opening a pipe would wait for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Sets the time of last use of an open page; a shared page stays shared. On failure the page is only removed earlier.
fn note_use(file: &File, page_use: PageUse) {
    let now = SystemTime::now();
    let was_shared = || file.metadata().and_then(|metadata| metadata.modified()).is_ok_and(|time| time > now);
    let bonus = if page_use.is_shared || was_shared() { SHARED_BONUS } else { Duration::ZERO };
    drop(file.set_times(used_now(page_use.depth, bonus)));
}

/// Returns the file times of a page used now by a sequence with `depth` pages before it.
fn used_now(depth: u32, bonus: Duration) -> FileTimes {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let use_number = since_1970.as_secs() / SAME_USE.as_secs();
    let time = Duration::from_secs(use_number * SAME_USE.as_secs()).saturating_add(bonus);
    let time = time.saturating_sub(Duration::from_millis(u64::from(depth)));
    FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + time)
}

/// Fills a new file in `folder` and renames it to `path`. Removes the new file on failure.
pub fn replace(folder: &Path, path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let (unfinished, mut file) = new_file(folder)?;
    let filled = fill(&mut file).and_then(|()| fs::rename(&unfinished, path));
    if filled.is_err() {
        drop(fs::remove_file(&unfinished)); // on failure it is removed later as a leftover
    }
    filled
}

/// Creates a file with an unused name. Process ids alone are not unique: containers that share a folder number their
/// own processes.
fn new_file(folder: &Path) -> io::Result<(PathBuf, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    const ATTEMPTS: usize = 1000;
    for _ in 0..ATTEMPTS {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{UNFINISHED}{}-{count}", std::process::id()));
        match private_file(OpenOptions::new().write(true).create_new(true), &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => return Ok((path, file)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

impl FoundPage {
    pub(super) fn measure(entry: &DirEntry, key: DiskPageKey) -> Option<Self> {
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        let last_use = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let is_pinned = metadata.permissions().readonly();
        Some(Self { path: entry.path(), key, num_bytes: metadata.len(), last_use, is_pinned })
    }

    /// Returns whether several sessions begin with the page, and one of them was used within the last month.
    pub fn is_shared(&self, now: SystemTime) -> bool {
        self.last_use > now
    }
}

/// Collects `take` of each page below one fingerprint's folder, and removes old unfinished files on the way.
pub(super) fn walk<T>(
    folder: &Path,
    stop: &AtomicBool,
    take: impl Fn(&DirEntry, DiskPageKey) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut taken = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match entry.file_name().to_str() {
            Some(name) if is_fan_out(name) && is_folder(&entry) => {
                let page = |file: DirEntry| take(&file, page_key(name, &file)?);
                for file in unless_gone(fs::read_dir(entry.path()))?.into_iter().flatten() {
                    taken.extend(page(file?));
                }
            }
            Some(name) if is_unfinished(name) => remove_if_old(&entry),
            _ => {}
        }
    }
    Ok(taken)
}

/// Maps a missing file or folder to `None`.
pub fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

pub(super) fn is_folder(entry: &DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir())
}

fn is_fan_out(name: &str) -> bool {
    name.len() == 2 && name.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Parses the key from the name of a file in a fan-out folder.
fn page_key(fan_out: &str, entry: &DirEntry) -> Option<DiskPageKey> {
    let name = entry.file_name();
    let name = name.to_str()?;
    if is_unfinished(name) {
        remove_if_old(entry);
    }
    parse_file_name(name).filter(|_| name.starts_with(fan_out))
}

fn is_unfinished(name: &str) -> bool {
    let numbers = name.strip_prefix(UNFINISHED).and_then(|rest| rest.split_once('-'));
    numbers.is_some_and(|(process, count)| process.parse::<u32>().is_ok() && count.parse::<u64>().is_ok())
}

fn remove_if_old(entry: &DirEntry) {
    let Ok(metadata) = entry.metadata() else { return };
    let age = metadata.modified().ok().and_then(|written| written.elapsed().ok());
    if metadata.is_file() && age.is_some_and(|age| age > LEFTOVER_AGE) {
        drop(fs::remove_file(entry.path()));
    }
}

fn remove_if_only_manifest(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let is_about_pages = |name: &std::ffi::OsStr| name == MANIFEST || name == ORIGIN;
    if entries.filter_map(Result::ok).all(|entry| is_about_pages(&entry.file_name())) {
        drop(fs::remove_file(folder.join(ORIGIN)));
        drop(fs::remove_file(folder.join(MANIFEST)));
        drop(fs::remove_dir(folder));
    }
}

/// Parses a file name, accepting only the spelling that [`file_name`] writes.
pub fn parse_file_name(name: &str) -> Option<DiskPageKey> {
    let (hex, group) = name.strip_suffix(EXTENSION)?.split_once('-')?;
    let key = DiskPageKey { name: PageName::from_hex(hex)?, group: group.parse().ok()? };
    (key.group.to_string() == group).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_spelling_is_a_page() {
        let hex = "0123456789abcdef".repeat(4);
        let key = parse_file_name(&format!("{hex}-12.kv")).expect("a page");
        assert_eq!((key.name.to_string(), key.group), (hex.clone(), 12));
        for bad in [
            format!("{hex}-12"),
            format!("{hex}.kv"),
            format!("{hex}-012.kv"),
            format!("{hex}-+1.kv"),
            format!("{hex}-256.kv"),
            format!("{}-1.kv", &hex[1..]),
            format!("{}-1.kv", hex.to_uppercase()),
            format!("{hex}-1.kv.new"),
        ] {
            assert!(parse_file_name(&bad).is_none(), "{bad}");
        }
        assert!(is_unfinished(".new-12-0"));
        assert!(!is_unfinished(".new-12") && !is_unfinished(".new-a-b") && !is_unfinished("new-1-2"));
    }

    #[test]
    fn a_file_gives_the_same_bytes_mapped_and_copied() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("page");
        fs::write(&path, (0..100_000u32).map(|n| (n * 7) as u8).collect::<Vec<_>>()).expect("written");
        let open = || File::open(&path).expect("opened");
        let found = contents(&mut open(), 100_000).expect("read");
        assert_eq!(found.is_mapped(), cfg!(unix));
        assert_eq!(copied(&mut open(), 100_000).expect("read"), found);
        assert_eq!(copied(&mut open(), 99).expect("read"), found.slice(0, 99));
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_empty() {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let (gone, file) = (scratch.path().join("gone"), scratch.path().join("file"));
        fs::write(&file, "no folder").expect("written");
        assert!(unless_gone(fs::read_dir(gone)).expect("nothing wrong").is_none());
        assert!(unless_gone(fs::read_dir(&file)).is_err());
        let all = |_: &DirEntry, key| Some(key);
        assert!(walk(&file, &AtomicBool::new(false), all).is_err());
        assert!(walk(scratch.path(), &AtomicBool::new(false), all).expect("reads").is_empty());
    }

    #[test]
    fn deeper_pages_count_as_used_earlier() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let modified = |depth| {
            let path = folder.path().join("file");
            let file = File::create(&path).expect("created");
            file.set_times(used_now(depth, Duration::ZERO)).expect("ours");
            fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("known")
        };
        assert!(modified(1) < modified(0) && modified(100) < modified(2));
        assert!(modified(0) <= SystemTime::now());
    }
}
