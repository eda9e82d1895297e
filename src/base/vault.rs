//! Encryption of stored files, each with a key of its own, so that a file is erased by erasing its key, copies of the file
//! included.
//!
//! The keys lie in a folder of their own: `<folder>/<kind>/<id>.key`, each sealed under a master key, which is the file `master`
//! or is derived from a secret. Everything is sealed with XChaCha20-Poly1305 (draft-irtf-cfrg-xchacha-03) under random nonces.
//! Knows nothing of the content.
//!
//! Invariants: a key is on disk before it is used; a key that sessions and images need survives a power failure from then on, that
//! of a cache may not. Any number of processes may share a folder. No key is shown.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chacha20poly1305::aead::{AeadInOut, Generate};
use chacha20poly1305::{Key, KeyInit, Tag, XChaCha20Poly1305, XNonce};
use hkdf::Hkdf;
use sha2::Sha256;

use super::error::StoreError;
use super::private_files::{UnfinishedFile, mode_for_others, private_file, private_folder, sync_folder_of};

const MASTER: &str = "master";
/// Present from the first use on; opens only with the right master key.
const CHECK: &str = "check.key";
const LOCK: &str = "lock";
const KEY_BYTES: usize = 32;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
/// Bytes that sealing adds.
pub const SEAL_BYTES: usize = NONCE_BYTES + TAG_BYTES;
const KEY_MAGIC: &[u8; 8] = b"llmctlKY";
const KEY_FILE_BYTES: usize = KEY_MAGIC.len() + SEAL_BYTES + KEY_BYTES;
/// A master key is derived from a secret of at least as many bytes, which are to be random: it is no password hash.
const LEAST_SECRET_BYTES: usize = 16;

const FILE_MAGIC: &[u8; 8] = b"llmctlSE";
const FILE_VERSION: u32 = 1;
const FILE_ID: Range<usize> = 16..48;
/// Bytes that a sealed file has before its plain content: 8 magic, 4 version, 4 number `n` of plain bytes that stay in the clear,
/// 32 id of the key, 24 nonce, 16 tag. After them come `n` bytes in the clear, then the sealed rest. Numbers are little-endian; the
/// tag covers the first 48 bytes and those in the clear too.
pub const SEALED_HEADER: usize = FILE_ID.end + SEAL_BYTES;

/// Kind of a sealed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyKind {
    Session,
    Image,
    /// A page of KV, of all models and groups of layers.
    Page,
    /// The embeddings of an image.
    Rows,
}

impl KeyKind {
    const ALL: [Self; 4] = [Self::Session, Self::Image, Self::Page, Self::Rows];

    const fn name(self) -> &'static str {
        match self {
            KeyKind::Session => "session",
            KeyKind::Image => "image",
            KeyKind::Page => "page",
            KeyKind::Rows => "rows",
        }
    }

    /// Returns whether the loss of a key loses what cannot be computed again.
    const fn is_precious(self) -> bool {
        matches!(self, KeyKind::Session | KeyKind::Image)
    }
}

/// Name of a key: random, or the hash that names what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub [u8; 32]);

impl KeyId {
    pub fn random() -> Self {
        Self(Key::generate().into())
    }

    /// Parses what `Display` writes.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect::<Option<Vec<u8>>>()?;
        let bytes: Vec<u8> = digits.as_chunks().0.iter().map(|[high, low]| high << 4 | low).collect();
        bytes.try_into().ok().filter(|_| digits.len() == 64).map(Self)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A key that seals texts and files.
#[derive(Clone)]
pub struct SealKey(XChaCha20Poly1305);

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealKey")
    }
}

impl SealKey {
    fn of(bytes: &[u8]) -> Option<Self> {
        XChaCha20Poly1305::new_from_slice(bytes).ok().map(Self)
    }

    /// Returns nonce, tag and the encrypted bytes. `context` is bound to them and has to be given again.
    pub fn seal(&self, context: &[u8], plain: &[u8]) -> Vec<u8> {
        let mut sealed = [&[0; SEAL_BYTES], plain].concat();
        let (head, text) = sealed.split_at_mut(SEAL_BYTES);
        self.seal_in_place(context, head, text);
        sealed
    }

    fn seal_in_place(&self, context: &[u8], head: &mut [u8], text: &mut [u8]) {
        let nonce = XNonce::generate();
        let tag = self.0.encrypt_inout_detached(&nonce, context, text.into());
        head[..NONCE_BYTES].copy_from_slice(&nonce);
        head[NONCE_BYTES..].copy_from_slice(&tag.expect("a file is shorter than 256 GiB"));
    }

    /// Decrypts what [`seal`](Self::seal) returned; `None` if a byte of it or of `context` is another.
    pub fn open(&self, context: &[u8], mut sealed: Vec<u8>) -> Option<Vec<u8>> {
        let (head, text) = sealed.split_at_mut_checked(SEAL_BYTES)?;
        self.open_in_place(context, head, text)?;
        sealed.drain(..SEAL_BYTES);
        Some(sealed)
    }

    fn open_in_place(&self, context: &[u8], head: &[u8], text: &mut [u8]) -> Option<()> {
        let nonce = XNonce::try_from(head.get(..NONCE_BYTES)?).ok()?;
        let tag = Tag::try_from(head.get(NONCE_BYTES..)?).ok()?;
        self.0.decrypt_inout_detached(&nonce, context, text.into(), &tag).ok()
    }
}

/// Reads the content of a file in the folder of keys; `None` unless `master` has sealed it for this use.
pub fn read_key(file: &[u8], master: &SealKey, context: &[u8]) -> Option<SealKey> {
    let sealed = file.strip_prefix(KEY_MAGIC).filter(|_| file.len() == KEY_FILE_BYTES)?;
    SealKey::of(&master.open(context, sealed.to_vec())?)
}

/// The folder of keys, open. Clones share it.
#[derive(Debug, Clone)]
pub struct Vault {
    folder: Arc<Path>,
    master: SealKey,
}

impl Vault {
    /// Opens a folder of keys, or creates it with its master key. With a secret, the master key is derived from it by HKDF-SHA256
    /// (RFC 5869) and is not written.
    ///
    /// # Errors
    /// [`StoreError`] that names the folder: it cannot be read or written, others may read it, its keys are of another master key.
    pub fn open(folder: &Path, secret: Option<&[u8]>) -> Result<Self, StoreError> {
        private_folder(folder, true).map_err(|error| StoreError::io(folder, &error))?;
        check_private(folder)?;
        let _held = lock(folder).map_err(|error| StoreError::io(folder, &error))?;
        let path = folder.join(MASTER);
        let is_new = !folder.join(CHECK).exists();
        let master = match secret {
            _ if is_new && KeyKind::ALL.iter().any(|kind| folder.join(kind.name()).exists()) => Err(format!(
                "there are keys, and {CHECK} is missing: a new master key would open none of them"
            )),
            Some(_) if path.exists() => {
                Err("the keys are under this file, and not under a secret (--encrypt-key-command)".to_owned())
            }
            Some(secret) if secret.len() < LEAST_SECRET_BYTES => Err(format!(
                "a secret of {} bytes is too short: random text of {LEAST_SECRET_BYTES} and more is needed",
                secret.len()
            )),
            Some(secret) => Ok(derived(secret)),
            None => read_master(&path, is_new).map_err(|error| StoreError::io(&path, &error))?,
        };
        let master = master.map_err(|message| refuse(&path, message))?;
        check_private(&path)?;
        let vault = Self { folder: folder.into(), master };
        let check = folder.join(CHECK);
        let checked = if is_new { vault.write_key(&check, CHECK, true) } else { vault.read(&check, CHECK) };
        match checked.map_err(|error| StoreError::io(&check, &error))? {
            Some(_) => Ok(vault),
            None => Err(refuse(folder, "the keys in it are under another master key".to_owned())),
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn place(&self, kind: KeyKind, id: KeyId) -> (PathBuf, String) {
        (self.folder.join(kind.name()).join(format!("{id}.key")), format!("{}/{id}", kind.name()))
    }

    /// Returns a key.
    ///
    /// # Errors
    /// A sentence: the key was erased, or cannot be read.
    pub fn key(&self, kind: KeyKind, id: KeyId) -> Result<SealKey, String> {
        let (path, context) = self.place(kind, id);
        match self.read(&path, &context) {
            Ok(Some(key)) => Ok(key),
            Ok(None) if fs::metadata(&path).is_ok_and(|file| file.len() == 0) => {
                Err(format!("its key in {} is gone: it was erased", self.folder.display()))
            }
            Ok(None) => Err(format!("its key {} is damaged", path.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!(
                "its key is not in {}: it was erased, or belongs to another folder of keys",
                self.folder.display()
            )),
            Err(error) => Err(format!("its key {}: {error}", path.display())),
        }
    }

    /// Returns a key, which is created if it is not there.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn key_or_new(&self, kind: KeyKind, id: KeyId) -> io::Result<SealKey> {
        let (path, context) = self.place(kind, id);
        let there = || self.read(&path, &context).ok().flatten();
        if let Some(key) = there() {
            return Ok(key);
        }
        let _held = lock(&self.folder)?;
        if let Some(key) = there() {
            return Ok(key);
        }
        private_folder(&self.folder.join(kind.name()), true)?;
        let key = self.write_key(&path, &context, kind.is_precious())?;
        key.ok_or_else(|| io::Error::other("a key has another length"))
    }

    /// Returns whether a session's key is or was in this folder.
    pub fn knows(&self, id: KeyId) -> bool {
        self.place(KeyKind::Session, id).0.exists()
    }

    /// Erases a key: overwrites, syncs and removes its file. Nothing that it has sealed can be read from then on. An empty file stays
    /// of a session's, which tells it from a key of another folder.
    ///
    /// # Errors
    /// Errors of the file system, except that there is no such key.
    pub fn erase(&self, kind: KeyKind, id: KeyId) -> io::Result<()> {
        let path = self.place(kind, id).0;
        let erased = OpenOptions::new().write(true).open(&path).and_then(|mut file| {
            file.write_all(&[0; KEY_FILE_BYTES])?;
            file.sync_all()?;
            match kind {
                KeyKind::Session => file.set_len(0).and_then(|()| file.sync_all()),
                _ => fs::remove_file(&path),
            }
        });
        match erased {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Reads a key; `None` for a file that is no key for this use.
    fn read(&self, path: &Path, context: &str) -> io::Result<Option<SealKey>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(KEY_FILE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        Ok(read_key(&bytes, &self.master, context.as_bytes()))
    }

    /// Writes a new key, under the lock.
    fn write_key(&self, path: &Path, context: &str, is_synced: bool) -> io::Result<Option<SealKey>> {
        let key = Key::generate();
        let part = path.with_extension("part");
        let mut file = private_file(OpenOptions::new().write(true).create(true).truncate(true), &part)?;
        file.write_all(&[KEY_MAGIC, &self.master.seal(context.as_bytes(), &key)[..]].concat())?;
        if is_synced {
            file.sync_all()?;
        }
        fs::rename(&part, path)?;
        if is_synced {
            sync_folder_of(path);
        }
        Ok(SealKey::of(&key))
    }

    /// Returns the sealed form of a file, of which the first `num_clear` bytes stay in the clear.
    ///
    /// # Errors
    /// Errors of the file system: there has to be a key first.
    pub fn seal_file(&self, kind: KeyKind, id: KeyId, plain: &[u8], num_clear: usize) -> io::Result<Vec<u8>> {
        let key = self.key_or_new(kind, id)?;
        let numbers = [FILE_VERSION, num_clear as u32].map(u32::to_le_bytes).concat();
        let mut file = [FILE_MAGIC, &numbers[..], &id.0, &[0; SEAL_BYTES], plain].concat();
        let (header, content) = file.split_at_mut(SEALED_HEADER);
        let (clear, text) = content.split_at_mut(num_clear);
        let (context, head) = header.split_at_mut(FILE_ID.end);
        key.seal_in_place(&[context, clear].concat(), head, text);
        Ok(file)
    }

    /// Opens a sealed file: its plain content is then what follows the first [`SEALED_HEADER`] bytes.
    ///
    /// # Errors
    /// A sentence: it is damaged, or its key was erased.
    pub fn open_file(&self, kind: KeyKind, file: &mut [u8]) -> Result<(), String> {
        let id = sealed_id(file).ok_or("it is damaged")?;
        let num_clear = file[12..FILE_ID.start].try_into().map_or(u32::MAX, u32::from_le_bytes);
        let key = self.key(kind, id)?;
        let (header, content) = file.split_at_mut(SEALED_HEADER);
        let (clear, text) = content.split_at_mut_checked(num_clear as usize).ok_or("it is damaged")?;
        let (context, head) = header.split_at(FILE_ID.end);
        key.open_in_place(&[context, clear].concat(), head, text).ok_or_else(|| "it is damaged".to_owned())
    }
}

/// Returns the id of the key of a sealed file, of which the first [`SEALED_HEADER`] bytes are enough; `None` if it is no sealed file.
pub fn sealed_id(file: &[u8]) -> Option<KeyId> {
    let is_sealed = file.len() >= SEALED_HEADER
        && file.starts_with(FILE_MAGIC)
        && file[FILE_MAGIC.len()..12] == FILE_VERSION.to_le_bytes();
    file.get(FILE_ID).filter(|_| is_sealed)?.try_into().ok().map(KeyId)
}

/// Opens a file, or takes it as it is if it is not sealed. Returns where its plain content is.
///
/// # Errors
/// A sentence: it is sealed and there is no vault, or it cannot be opened.
pub fn open_any(vault: Option<&Vault>, kind: KeyKind, file: &mut [u8]) -> Result<Range<usize>, String> {
    match (sealed_id(file), vault) {
        (None, _) => Ok(0..file.len()),
        (Some(_), None) => Err("it is encrypted, and no folder of keys is given (--encrypt DIR)".to_owned()),
        (Some(_), Some(vault)) => vault.open_file(kind, file).map(|()| SEALED_HEADER..file.len()),
    }
}

fn refuse(path: &Path, message: String) -> StoreError {
    StoreError::Unsupported { path: path.into(), message }
}

/// Refuses keys that others may read.
fn check_private(path: &Path) -> Result<(), StoreError> {
    let Some(mode) = mode_for_others(path) else { return Ok(()) };
    Err(refuse(path, format!("others may use it (mode {mode:o}): `chmod go= {}`", path.display())))
}

fn lock(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = private_file(options.write(true).create(true).truncate(false), &folder.join(LOCK))?;
    file.lock()?;
    Ok(file)
}

fn derived(secret: &[u8]) -> SealKey {
    let mut key = Key::default();
    let derived = Hkdf::<Sha256>::new(None, secret).expand(b"llmctl master key 1", &mut key);
    derived.expect("32 bytes are no more than SHA-256 expands to");
    SealKey(XChaCha20Poly1305::new(&key))
}

/// Reads the master key, or writes one if the folder is new.
fn read_master(path: &Path, is_new: bool) -> io::Result<Result<SealKey, String>> {
    if is_new && !path.exists() {
        let (unfinished, mut file) = UnfinishedFile::create_private(path)?;
        file.write_all(&Key::generate())?;
        unfinished.finish(&file)?;
    }
    let mut bytes = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Err("it is missing, and so is a secret (--encrypt-key-command)".to_owned()));
        }
        file => file?.take(KEY_BYTES as u64 + 1).read_to_end(&mut bytes)?,
    };
    Ok(SealKey::of(&bytes).ok_or_else(|| format!("{} bytes instead of {KEY_BYTES}", bytes.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: KeyId = KeyId([7; 32]);

    fn scratch() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let keys = folder.path().join("a/keys");
        (folder, keys)
    }

    fn open(keys: &Path) -> Vault {
        Vault::open(keys, None).expect("opened")
    }

    fn refused(keys: &Path, secret: Option<&[u8]>) -> String {
        Vault::open(keys, secret).expect_err("refused").to_string()
    }

    #[test]
    fn what_is_sealed_opens_with_the_same_key_and_context_only() {
        let (_folder, keys) = scratch();
        let key = open(&keys).key_or_new(KeyKind::Session, ID).expect("a key");
        let again = open(&keys).key(KeyKind::Session, ID).expect("after a restart");
        let sealed = key.seal(b"line 1", b"text");
        assert_eq!(again.open(b"line 1", sealed.clone()).as_deref(), Some(&b"text"[..]));
        assert_eq!(again.open(b"line 2", sealed.clone()), None);
        assert_ne!(sealed, key.seal(b"line 1", b"text"), "another nonce");
        for at in 0..sealed.len() {
            let mut damaged = sealed.clone();
            damaged[at] ^= 1;
            assert_eq!(again.open(b"line 1", damaged), None, "byte {at}");
            assert_eq!(again.open(b"line 1", sealed[..at].to_vec()), None, "cut at {at}");
        }
        let other = open(&keys).key_or_new(KeyKind::Image, ID).expect("a key");
        assert_eq!(other.open(b"line 1", sealed), None, "of another kind");
    }

    #[test]
    fn each_byte_of_a_sealed_file_counts() {
        let (_folder, keys) = scratch();
        let vault = open(&keys);
        let sealed = vault.seal_file(KeyKind::Page, ID, b"head and secret", 4).expect("sealed");
        assert_eq!(&sealed[SEALED_HEADER..SEALED_HEADER + 4], b"head");
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_eq!(sealed_id(&sealed[..SEALED_HEADER]), Some(ID));
        let mut opened = sealed.clone();
        vault.open_file(KeyKind::Page, &mut opened).expect("opens");
        assert_eq!(&opened[SEALED_HEADER..], b"head and secret");
        for at in 0..sealed.len() {
            let mut damaged = sealed.clone();
            damaged[at] ^= 0x10;
            vault.open_file(KeyKind::Page, &mut damaged).expect_err("damaged");
            vault.open_file(KeyKind::Page, &mut sealed[..at].to_vec()).expect_err("cut");
        }
        let without = open_any(None, KeyKind::Page, &mut sealed.clone()).expect_err("no keys");
        assert!(without.contains("--encrypt"), "{without}");
        assert_eq!(open_any(None, KeyKind::Page, &mut b"plain".to_vec()), Ok(0..5));
    }

    #[test]
    fn an_erased_key_opens_nothing_and_its_id_gets_another() {
        let (_folder, keys) = scratch();
        let vault = open(&keys);
        let sealed = vault.seal_file(KeyKind::Rows, ID, b"secret", 0).expect("sealed");
        vault.erase(KeyKind::Rows, ID).expect("erased");
        vault.erase(KeyKind::Rows, ID).expect("a second time");
        let gone = vault.open_file(KeyKind::Rows, &mut sealed.clone()).expect_err("gone");
        assert!(gone.contains("it was erased"), "{gone}");
        vault.key_or_new(KeyKind::Rows, ID).expect("another");
        assert_eq!(
            open(&keys).open_file(KeyKind::Rows, &mut sealed.clone()),
            Err("it is damaged".to_owned())
        );
    }

    #[test]
    fn an_erased_session_is_told_from_one_of_another_folder() {
        let (_folder, keys) = scratch();
        let vault = open(&keys);
        assert!(!vault.knows(ID));
        let other = vault.key(KeyKind::Session, ID).expect_err("none").to_string();
        vault.key_or_new(KeyKind::Session, ID).expect("a key");
        vault.erase(KeyKind::Session, ID).expect("erased");
        let erased = vault.key(KeyKind::Session, ID).expect_err("erased");
        assert!(
            vault.knows(ID) && erased.contains("is gone") && other.contains("another folder"),
            "{erased}; {other}"
        );
        fs::remove_file(keys.join(CHECK)).expect("lost");
        assert!(refused(&keys, None).contains("check.key is missing"));
    }

    #[test]
    fn a_damaged_key_is_said_to_be_and_a_cache_gets_a_new_one() {
        let (_folder, keys) = scratch();
        let vault = open(&keys);
        vault.key_or_new(KeyKind::Page, ID).expect("a key");
        let (path, context) = vault.place(KeyKind::Page, ID);
        let whole = fs::read(&path).expect("there");
        assert!(read_key(&whole, &vault.master, context.as_bytes()).is_some());
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).expect("damaged");
            let reason = vault.key(KeyKind::Page, ID).expect_err("damaged");
            assert!(reason.ends_with(".key is damaged"), "{reason}");
            assert!(read_key(&whole[..at], &vault.master, context.as_bytes()).is_none());
        }
        let new = vault.key_or_new(KeyKind::Page, ID).expect("a new one");
        let sealed = new.seal(b"", b"x");
        assert!(vault.key(KeyKind::Page, ID).expect("there").open(b"", sealed).is_some());
    }

    #[test]
    fn another_master_key_is_refused_and_writes_nothing() {
        let (_folder, keys) = scratch();
        open(&keys).key_or_new(KeyKind::Session, ID).expect("a key");
        let before = fs::read(keys.join(CHECK)).expect("there");
        let master = fs::read(keys.join(MASTER)).expect("there");
        assert_eq!(master.len(), KEY_BYTES);
        fs::write(keys.join(MASTER), [1; KEY_BYTES]).expect("another");
        assert!(refused(&keys, None).ends_with("are under another master key"));
        fs::write(keys.join(MASTER), [1; 5]).expect("cut");
        assert!(refused(&keys, None).ends_with("5 bytes instead of 32"));
        fs::rename(keys.join(MASTER), keys.join("lost")).expect("lost");
        assert!(refused(&keys, None).contains("it is missing"));
        assert!(!keys.join(MASTER).exists(), "a new one would open nothing");
        assert!(refused(&keys, Some(b"a secret of some length")).contains("another master key"));
        assert_eq!(fs::read(keys.join(CHECK)).expect("there"), before);
        fs::rename(keys.join("lost"), keys.join(MASTER)).expect("found");
        fs::write(keys.join(MASTER), master).expect("put back");
        open(&keys).key(KeyKind::Session, ID).expect("as before");
    }

    #[test]
    fn a_secret_stands_for_the_master_file() {
        let (_folder, keys) = scratch();
        assert!(refused(&keys, Some(b"short")).contains("5 bytes is too short"));
        let secret: &[u8] = b"0123456789abcdef";
        let sealed = Vault::open(&keys, Some(secret)).expect("opened");
        let sealed = sealed.seal_file(KeyKind::Page, ID, b"text", 0).expect("sealed");
        assert!(!keys.join(MASTER).exists());
        let again = Vault::open(&keys, Some(secret)).expect("opened");
        again.open_file(KeyKind::Page, &mut sealed.clone()).expect("opens");
        assert!(refused(&keys, Some(b"0123456789abcdeF")).contains("another master key"));
        assert!(refused(&keys, None).contains("it is missing, and so is a secret"));
    }

    #[cfg(unix)]
    #[test]
    fn keys_are_for_their_owner_only() {
        use std::os::unix::fs::PermissionsExt;
        let (_folder, keys) = scratch();
        open(&keys).key_or_new(KeyKind::Session, ID).expect("a key");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        let key = keys.join("session").join(format!("{ID}.key"));
        assert_eq!([mode(&keys), mode(&keys.join("session"))], [0o700; 2]);
        assert_eq!([mode(&keys.join(MASTER)), mode(&key)], [0o600; 2]);
        for path in [keys.join(MASTER), keys.clone()] {
            let before = mode(&path);
            fs::set_permissions(&path, fs::Permissions::from_mode(before | 0o44)).expect("opened to others");
            assert!(refused(&keys, None).contains("others may use it"), "{}", path.display());
            fs::set_permissions(&path, fs::Permissions::from_mode(before)).expect("closed");
        }
    }

    #[test]
    fn processes_that_need_a_key_at_once_get_the_same() {
        let (_folder, keys) = scratch();
        let sealed: Vec<_> = std::thread::scope(|scope| {
            let seal = || open(&keys).seal_file(KeyKind::Page, ID, b"text", 0).expect("sealed");
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(seal)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        for mut file in sealed {
            open(&keys).open_file(KeyKind::Page, &mut file).expect("opens");
        }
    }
}
