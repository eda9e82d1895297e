//! Bytes of images, once for all sessions of an owner: `<root>/.blobs/<sha256>`, and `<sha256>.sealed` for encrypted sessions.
//!
//! Invariants: a blob is on disk before a line that names it; it is removed only while no such line is there and none is being
//! written. So blobs have a lock, which whoever writes a name of one holds from before it looks for the blob until the name is on
//! disk, and whoever removes blobs while it looks for names. It is taken behind the lock of a session, never before it, and nothing is
//! waited for while it is held. Bytes are checked by their hash when they are read; owners share none.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::folder::{self, io_error, transcripts};
use super::{REMOVED, SessionStore, log, sealing};
use llmctl_base::error::{Result, StoreError};
use llmctl_base::private_files;
use llmctl_base::vault::{KeyId, KeyKind, SEALED_HEADER, Vault, open_any, sealed_id};
use llmctl_image::{ImageHash, ImageSet};
use llmctl_template::ImageRef;

/// No session's folder has this name.
const FOLDER: &str = ".blobs";
const LOCK_FILE: &str = "lock";
/// Extension of a file that is being written.
const PART: &str = "part";
/// End of the name of a sealed file.
const SEALED: &str = ".sealed";

/// The bytes of a conversation's images: below its store, or in memory.
#[derive(Debug, Clone, Default)]
pub struct Blobs {
    folder: Option<PathBuf>,
    vault: Option<Vault>,
    kept: BTreeMap<ImageHash, Arc<[u8]>>,
}

/// Where bytes lie is no part of a conversation.
impl PartialEq for Blobs {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Blobs {
    /// Holds files in memory.
    pub fn keep(&mut self, files: &ImageSet) {
        self.kept.extend(files.iter().map(|file| (file.hash, Arc::clone(&file.bytes))));
    }

    /// Holds a file in memory.
    pub(super) fn keep_bytes(&mut self, hash: ImageHash, bytes: &[u8]) {
        self.kept.insert(hash, bytes.into());
    }

    /// The files in a folder, each named by its hash.
    pub(super) fn in_folder(folder: PathBuf, vault: Option<Vault>) -> Self {
        Self { folder: Some(folder), vault, ..Self::default() }
    }

    /// Takes what another holds in memory, and its folder if there is none here.
    pub fn take(&mut self, other: &Self) {
        if self.folder.is_none() {
            (self.folder, self.vault) = (other.folder.clone(), other.vault.clone());
        }
        self.kept.extend(other.kept.iter().map(|(hash, bytes)| (*hash, Arc::clone(bytes))));
    }

    /// Lets go of all in memory that is not named.
    pub fn retain(&mut self, named: &BTreeSet<ImageHash>) {
        self.kept.retain(|hash, _| named.contains(hash));
    }

    /// Returns the bytes of an image, or the reason why they cannot be read.
    ///
    /// # Errors
    /// The file is missing, unreadable or damaged.
    pub fn read(&self, hash: &ImageHash) -> Result<Arc<[u8]>, String> {
        if let Some(bytes) = self.kept.get(hash) {
            return Ok(Arc::clone(bytes));
        }
        let folder = self.folder.as_ref().ok_or("its file is not kept")?;
        let plain = folder.join(BlobName { hash: *hash, is_sealed: false }.to_string());
        let sealed = folder.join(BlobName { hash: *hash, is_sealed: true }.to_string());
        let path = if sealed.exists() && (self.vault.is_some() || !plain.exists()) { sealed } else { plain };
        let mut bytes = match folder::read_file(&path) {
            Ok(bytes) => bytes.ok_or_else(|| format!("{} is missing", path.display()))?,
            Err(error) => return Err(error.to_string()),
        };
        let content = open_any(self.vault.as_ref(), KeyKind::Image, &mut bytes)
            .map_err(|reason| format!("{}: {reason}", path.display()))?;
        match ImageHash::of(&bytes[content.clone()]) == *hash {
            true => Ok(bytes[content].into()),
            false => Err(format!("{} is damaged", path.display())),
        }
    }
}

/// The hashes of images, without those that are none.
pub fn hashes(images: impl IntoIterator<Item = ImageRef>) -> BTreeSet<ImageHash> {
    images.into_iter().filter_map(|image| ImageHash::from_hex(&image.sha256)).collect()
}

/// The hashes that a note names, in whatever form the frontend writes it.
pub(super) fn hashes_in_note(note: &Value) -> BTreeSet<ImageHash> {
    named_in(note.to_string().as_bytes()).collect()
}

/// Name of a blob's file. Sealed sessions name sealed blobs and plain sessions plain ones, so that whoever has no keys touches no
/// sealed blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BlobName {
    hash: ImageHash,
    is_sealed: bool,
}

impl fmt::Display for BlobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.hash, if self.is_sealed { SEALED } else { "" })
    }
}

impl BlobName {
    fn parse(name: &str) -> Option<Self> {
        let (hex, is_sealed) = name.strip_suffix(SEALED).map_or((name, false), |hex| (hex, true));
        Some(Self { hash: ImageHash::from_hex(hex)?, is_sealed })
    }
}

/// The single steps on the blobs of an owner. Other processes may run between any two.
trait BlobSteps {
    type Held<'a>
    where
        Self: 'a;
    /// Name of a blob in transcripts and in the folder.
    type Name: Copy + Ord;

    /// Waits for the lock.
    fn hold(&self) -> Result<Self::Held<'_>>;
    /// Writes a blob, unless it is there or its bytes are nowhere.
    fn put(&self, hash: &ImageHash) -> Result<()>;
    /// The hashes that any transcript names, but for those of sessions that are being removed.
    fn named(&self) -> Result<BTreeSet<Self::Name>>;
    fn all(&self) -> Result<BTreeSet<Self::Name>>;
    fn remove(&self, name: &Self::Name) -> Result<()>;
}

/// Saves blobs and then, by `name`, what names them.
fn save<T>(
    steps: &impl BlobSteps,
    hashes: &BTreeSet<ImageHash>,
    name: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let _held = steps.hold()?;
    hashes.iter().try_for_each(|hash| steps.put(hash))?;
    name()
}

/// Removes blobs that nothing names; returns their number.
fn collect<S: BlobSteps>(steps: &S) -> Result<usize> {
    let _held = steps.hold()?;
    let named = steps.named()?;
    let unnamed: Vec<S::Name> = steps.all()?.difference(&named).copied().collect();
    unnamed.iter().try_for_each(|hash| steps.remove(hash))?;
    Ok(unnamed.len())
}

/// The blobs of a store, and where the bytes of new ones are.
struct BlobFolder<'a> {
    root: &'a Path,
    folder: PathBuf,
    from: &'a Blobs,
    vault: Option<&'a Vault>,
}

impl BlobFolder<'_> {
    /// Erases the key of a sealed blob, if there is one.
    fn erase_key(&self, path: &Path) -> io::Result<()> {
        let mut header = Vec::new();
        if let Some(file) = self.vault.and_then(|_| File::open(path).ok()) {
            file.take(SEALED_HEADER as u64).read_to_end(&mut header)?;
        }
        let key = self.vault.zip(sealed_id(&header));
        key.map_or(Ok(()), |(vault, id)| vault.erase(KeyKind::Image, id))
    }

    /// Writes a file that is whole whenever it is there. There is one writer, because the lock is held.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let part = path.with_extension(PART);
        let mut options = OpenOptions::new();
        let mut file = private_files::private_file(options.write(true).create(true).truncate(true), &part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&part, path)?;
        folder::sync_folder(&self.folder)?;
        folder::sync_folder(self.root)
    }
}

impl BlobSteps for BlobFolder<'_> {
    type Held<'a>
        = File
    where
        Self: 'a;
    type Name = BlobName;

    fn hold(&self) -> Result<File> {
        let path = self.folder.join(LOCK_FILE);
        let locked = private_files::private_folder(&self.folder, true).and_then(|()| {
            let mut options = OpenOptions::new();
            let file = private_files::private_file(options.write(true).create(true).truncate(false), &path)?;
            file.lock()?;
            Ok(file)
        });
        locked.map_err(|error| io_error(&path, &error))
    }

    fn put(&self, hash: &ImageHash) -> Result<()> {
        let name = BlobName { hash: *hash, is_sealed: self.vault.is_some() };
        let path = self.folder.join(name.to_string());
        if path.exists() && !self.from.kept.contains_key(hash) {
            return Ok(());
        }
        // A fork of a session whose image is lost has the other turns.
        let Ok(bytes) = self.from.read(hash) else { return Ok(()) };
        let there = Blobs::in_folder(self.folder.clone(), self.vault.cloned());
        if path.exists() && there.read(hash).is_ok() {
            return Ok(());
        }
        let written = self.erase_key(&path).and_then(|()| match self.vault {
            None => self.write(&path, &bytes),
            Some(vault) => self.write(&path, &vault.seal_file(KeyKind::Image, KeyId::random(), &bytes, 0)?),
        });
        written.map_err(|error| io_error(&path, &error))
    }

    fn named(&self) -> Result<BTreeSet<BlobName>> {
        let mut named = BTreeSet::new();
        let is_doomed =
            |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVED));
        for entry in entries(self.root)?.into_iter().filter(|entry| !is_doomed(entry)) {
            for path in transcripts(&entry.path()) {
                let bytes = folder::read_file(&path)?.unwrap_or_default();
                let is_sealed = !sealing::keys_of(&bytes).is_empty();
                if is_sealed && self.vault.is_none() {
                    continue; // it names sealed blobs, and these stay
                }
                let plain = log::plain(&bytes, self.vault);
                let plain = plain.map_err(|message| StoreError::Unsupported { path, message })?;
                named.extend(named_in(&plain).map(|hash| BlobName { hash, is_sealed }));
            }
        }
        Ok(named)
    }

    fn all(&self) -> Result<BTreeSet<BlobName>> {
        let entries = entries(&self.folder)?;
        // Left by crashes, because nobody writes while the lock is held.
        let parts = entries.iter().filter(|entry| entry.path().extension().is_some_and(|end| end == PART));
        parts.for_each(|entry| drop(fs::remove_file(entry.path())));
        let names = entries.iter().filter_map(|entry| BlobName::parse(entry.file_name().to_str()?));
        Ok(names.filter(|name| !name.is_sealed || self.vault.is_some()).collect())
    }

    fn remove(&self, name: &BlobName) -> Result<()> {
        let path = self.folder.join(name.to_string());
        let removed = self.erase_key(&path).and_then(|()| fs::remove_file(&path));
        removed.map_err(|error| io_error(&path, &error))
    }
}

fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect);
    entries.map_err(|error: io::Error| io_error(folder, &error))
}

/// Returns the hashes in a transcript, also in undone turns, notes, damaged lines and later schemas.
pub(super) fn named_in(transcript: &[u8]) -> impl Iterator<Item = ImageHash> {
    const NAME: &[u8] = b"\"sha256\":\"";
    let hash = |rest: &[u8]| ImageHash::from_hex(str::from_utf8(rest.get(..64)?).ok()?);
    let starts = transcript.windows(NAME.len()).enumerate().filter(|(_, window)| *window == NAME);
    starts.filter_map(move |(at, _)| hash(&transcript[at + NAME.len()..]))
}

impl SessionStore {
    fn blob_folder<'a>(&'a self, from: &'a Blobs) -> BlobFolder<'a> {
        BlobFolder { root: &self.root, folder: self.root.join(FOLDER), from, vault: self.vault.as_ref() }
    }

    /// The blobs in this store.
    pub(super) fn blobs(&self) -> Blobs {
        Blobs::in_folder(self.root.join(FOLDER), self.vault.clone())
    }

    /// Saves the images whose bytes `from` has, and then, by `name`, what names them.
    ///
    /// # Errors
    /// Those of `name` and of the file system; nothing is named then.
    pub(super) fn save_blobs<T>(
        &self,
        hashes: &BTreeSet<ImageHash>,
        from: &Blobs,
        name: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match hashes.is_empty() {
            true => name(),
            false => save(&self.blob_folder(from), hashes, name),
        }
    }

    /// Calls `rename`, which moves a session's folder, while no blobs are removed: a collection could miss both names.
    pub(super) fn beside_blobs<T>(&self, rename: impl FnOnce() -> Result<T>) -> Result<T> {
        let blobs = Blobs::default();
        let folder = self.blob_folder(&blobs);
        let _held = folder.folder.exists().then(|| folder.hold()).transpose()?;
        rename()
    }

    /// Removes images that no session names; returns their number.
    ///
    /// # Errors
    /// A session that cannot be read, so that its images are not known; the file system's.
    pub(super) fn collect_blobs(&self) -> Result<usize> {
        let blobs = Blobs::default();
        let folder = self.blob_folder(&blobs);
        if folder.folder.exists() { collect(&folder) } else { Ok(0) }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use llmctl_image::{ImageFile, ImageInfo, Picture};
    use llmctl_models::images::{ImageKey, ImageSpan};
    use llmctl_template::{Content, Message};
    use shuttle::sync::{Mutex, MutexGuard};
    use shuttle::thread;

    use super::super::{ModelFingerprint, SessionName, SessionWriter, StoredTurn};
    use super::*;
    use crate::request::{Finish, Usage};
    use llmctl_base::Sampling;

    #[test]
    fn names_are_found_in_whatever_is_left_of_a_line() {
        let (a, b) = (ImageHash([0xa1; 32]), ImageHash([0xb2; 32]));
        let text =
            format!("{{\"sha256\":\"{a}\"}} damaged \"sha256\":\"{b}\" \"sha256\":\"12\" \"sha256\":\"");
        assert_eq!(named_in(text.as_bytes()).collect::<Vec<_>>(), [a, b]);
    }

    fn file(content: &[u8]) -> ImageSet {
        let info = ImageInfo { media_type: "image/png", width: 2, height: 1 };
        let picture = Picture { width: 2, height: 1, rgb: vec![0; 6] };
        let mut files = ImageSet::default();
        files.insert(Arc::new(ImageFile {
            hash: ImageHash::of(content),
            bytes: content.into(),
            info,
            picture,
        }));
        files
    }

    /// A turn whose question has the image.
    fn turn(content: &[u8]) -> StoredTurn {
        let image = ImageRef {
            sha256: ImageHash::of(content).to_string(),
            width: 2,
            height: 1,
            media_type: "image/png".to_owned(),
            name: None,
        };
        let question = Message { content: Some(Content::Parts(vec![image.to_part()])), ..Message::user("") };
        let span = ImageSpan { rows: 1..3, key: ImageKey([3; 32]), first: 0, grid: [1, 2] };
        StoredTurn {
            messages: vec![question, Message::assistant("yes")],
            kept_tokens: 0,
            prompt_tail: vec![1, 9, 9, 2],
            generated: vec![3],
            spans: vec![span],
            adapters: Vec::new(),
            splice_after: None,
            sampling: Sampling::default(),
            finish: Finish::Eos(2),
            usage: Usage::default(),
            started_ms: 1,
            finished_ms: 2,
            receipt: None,
        }
    }

    struct Place {
        folder: tempfile::TempDir,
        store: SessionStore,
        model: ModelFingerprint,
    }

    impl Place {
        fn new() -> Self {
            let folder = tempfile::TempDir::new().expect("a scratch folder");
            let store = SessionStore::new(folder.path());
            Self { folder, store, model: ModelFingerprint::default() }
        }

        fn say(&self, writer: &mut SessionWriter, content: &[u8]) {
            let mut blobs = Blobs::default();
            blobs.keep(&file(content));
            writer.take_blobs(&blobs);
            writer.append(&self.model, &turn(content)).expect("saved");
        }

        fn session(&self, session: &str, content: &[u8]) -> SessionWriter {
            let mut writer = self.store.create(&name(session), &self.model).expect("created");
            self.say(&mut writer, content);
            writer
        }

        /// Whether the image's file is there.
        fn has(&self, content: &[u8]) -> bool {
            self.folder.path().join(FOLDER).join(ImageHash::of(content).to_string()).exists()
        }
    }

    fn name(name: &str) -> SessionName {
        SessionName::new(name).expect("a name")
    }

    #[test]
    fn images_stay_as_long_as_a_session_names_them() {
        let place = Place::new();
        drop(place.session("a", b"one"));
        let transcript = place.folder.path().join("a").join(super::super::TRANSCRIPT);
        assert!(
            fs::read_to_string(transcript).expect("there").contains("llmctl.session.v4"),
            "older ones refuse it"
        );
        let saved = place.store.read(&name("a")).expect("reads");
        assert_eq!((&saved.turns[0].turn, saved.spans()), (&turn(b"one"), turn(b"one").spans));
        assert_eq!(saved.blobs.read(&ImageHash::of(b"one")).as_deref(), Ok(&b"one"[..]));
        drop(place.store.fork(&name("a"), &name("b"), None).expect("forked"));
        place.store.rename(&name("b"), &name("c")).expect("renamed");
        let mut writer = place.store.open(&name("a")).expect("opens");
        place.say(&mut writer, b"two");
        assert!(place.has(b"one") && place.has(b"two"));
        writer.truncate(1).expect("undone");
        assert!(place.has(b"two"), "an undone turn can be read until the file is written anew");
        assert_eq!(writer.compact().expect("compacted").num_images, 1);
        assert!(place.has(b"one") && !place.has(b"two"));
        assert_eq!(writer.remove().expect("removed").num_images, 0);
        assert!(place.has(b"one"), "the fork names it");
        assert_eq!(place.store.remove(&name("c")).expect("removed").num_images, 1);
        assert!(!place.has(b"one"));
    }

    #[test]
    fn owners_share_no_images() {
        let place = Place::new();
        drop(place.session("a", b"one"));
        let other = place.store.of_owner("anna");
        let forked = place.store.fork_to(&name("a"), (&other, &name("b")), None);
        drop(forked.expect("forked"));
        place.store.remove(&name("a")).expect("removed");
        assert!(!place.has(b"one"));
        let saved = other.read(&name("b")).expect("reads");
        assert_eq!(saved.blobs.read(&ImageHash::of(b"one")).as_deref(), Ok(&b"one"[..]), "her own");
    }

    #[test]
    fn a_crash_before_the_line_leaves_a_file_that_goes_with_the_next_collection() {
        let place = Place::new();
        drop(place.session("a", b"one"));
        let folder = place.folder.path().join(FOLDER);
        fs::write(folder.join(ImageHash::of(b"two").to_string()), b"two").expect("written");
        fs::write(folder.join("two.part"), b"tw").expect("written");
        assert_eq!(place.store.purge(&name("a")).expect("purged").kv.num_images, 1);
        assert_eq!(entries(&folder).expect("a folder").len(), 2, "the lock and the image of the turn");
    }

    #[test]
    fn a_lost_image_costs_no_other_turn_and_can_be_sent_again() {
        let place = Place::new();
        let mut writer = place.session("a", b"one");
        let path = place.folder.path().join(FOLDER).join(ImageHash::of(b"one").to_string());
        for damage in [Some("0ne"), None] {
            match damage {
                Some(text) => fs::write(&path, text).expect("written"),
                None => fs::remove_file(&path).expect("removed"),
            }
            let reason = writer.saved().blobs.read(&ImageHash::of(b"one")).expect_err("not that image");
            assert!(reason.ends_with(if damage.is_some() { "is damaged" } else { "is missing" }), "{reason}");
            drop(
                place
                    .store
                    .fork(&name("a"), &name(if damage.is_some() { "b" } else { "c" }), None)
                    .expect("forked"),
            );
            place.say(&mut writer, b"one");
            assert!(writer.saved().blobs.read(&ImageHash::of(b"one")).is_ok());
        }
    }

    /// One image, which a session may name. Each call is one step.
    #[derive(Default)]
    struct BlobModel {
        lock: Mutex<()>,
        is_there: Mutex<bool>,
        is_named: Mutex<bool>,
        /// The lock is not taken: an order that loses blobs.
        is_lax: bool,
    }

    const IMAGE: ImageHash = ImageHash([1; 32]);

    fn set(flag: &Mutex<bool>, value: bool) {
        *flag.lock().expect("no step panics") = value;
    }

    fn is(flag: &Mutex<bool>) -> bool {
        *flag.lock().expect("no step panics")
    }

    fn one(flag: &Mutex<bool>) -> BTreeSet<ImageHash> {
        if is(flag) { [IMAGE].into() } else { BTreeSet::new() }
    }

    impl BlobSteps for BlobModel {
        type Held<'a>
            = Option<MutexGuard<'a, ()>>
        where
            Self: 'a;
        type Name = ImageHash;

        fn hold(&self) -> Result<Self::Held<'_>> {
            Ok((!self.is_lax).then(|| self.lock.lock().expect("no holder panics")))
        }

        fn put(&self, _: &ImageHash) -> Result<()> {
            if !is(&self.is_there) {
                set(&self.is_there, true);
            }
            Ok(())
        }

        fn named(&self) -> Result<BTreeSet<ImageHash>> {
            Ok(one(&self.is_named))
        }

        fn all(&self) -> Result<BTreeSet<ImageHash>> {
            Ok(one(&self.is_there))
        }

        fn remove(&self, _: &ImageHash) -> Result<()> {
            set(&self.is_there, false);
            Ok(())
        }
    }

    /// A session that names the image is removed while another one comes to name it.
    fn race(is_lax: bool) {
        let model = Arc::new(BlobModel { is_lax, ..BlobModel::default() });
        set(&model.is_there, true);
        let remover = Arc::clone(&model);
        let removal = thread::spawn(move || collect(&*remover).map(drop));
        let saved = save(&*model, &[IMAGE].into(), || {
            set(&model.is_named, true);
            Ok(())
        });
        saved.and(removal.join().expect("no panic")).expect("no step fails");
        assert!(is(&model.is_there), "a turn names an image that is gone");
    }

    #[test]
    fn an_image_that_a_turn_names_stays() {
        shuttle::check_random(|| race(false), 2_000);
        shuttle::check_pct(|| race(false), 2_000, 3);
        let lax = || shuttle::check_pct(|| race(true), 2_000, 3);
        catch_unwind(AssertUnwindSafe(lax)).expect_err("without the lock some order loses the image");
    }
}
