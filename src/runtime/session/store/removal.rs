//! Removal of a session, with its conversation, and the KV and embeddings of images on disk that no other session uses.
//!
//! Invariants: once its lock is released, a removed session cannot be found. A page that another session's
//! conversation starts with is kept, as far as its transcript can be read: what that may lose is computed
//! again, while erased text must not stay on disk for the sake of a damaged file. The caller gets the names
//! of such sessions.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::blobs::named_in;
use super::folder::{self, Lock, io_error, transcripts};
use super::lock;
use super::log;
use super::sealing::{self, SessionSeal};
use super::token_history::each_sequence;
use super::{REMOVED, SessionName, SessionStore, TRANSCRIPT, read_transcript, unfinished_name};
use llmctl_base::error::{Result, StoreError};
use llmctl_base::vault::{KeyId, KeyKind, Vault};
use llmctl_models::images::ImageKey;
use llmctl_models::kv::disk;
use llmctl_models::kv::disk::PageName;

/// KV on disk that was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forgotten {
    pub num_pages: usize,
    /// Images that no session names any more.
    pub num_images: usize,
    /// Sessions that may have used removed pages, and cannot be read.
    pub unreadable: Vec<SessionName>,
    /// Reason why pages or images are left.
    pub problem: Option<String>,
}

impl Forgotten {
    /// Returns what a user has to know of other sessions.
    pub fn warning(&self) -> Option<String> {
        let names: Vec<&str> = self.unreadable.iter().map(SessionName::as_str).collect();
        let names = (!names.is_empty()).then(|| names.join(", "))?;
        Some(format!("sessions that cannot be read may have to compute erased KV again: {names}"))
    }
}

/// What transcripts tell: whole pages of KV, and images.
pub(super) type Told = (HashSet<PageName>, HashSet<ImageKey>);

/// Result of `SessionStore::purge`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Purged {
    /// Bytes by which the session's files shrank.
    pub num_bytes: u64,
    pub kv: Forgotten,
}

impl SessionStore {
    /// Removes a session's folder, and pages of KV that no other session uses.
    ///
    /// # Errors
    /// Errors of [`Self::open`]. A damaged session can be removed.
    pub fn remove(&self, name: &SessionName) -> Result<Forgotten> {
        self.remove_leftovers();
        let folder = self.existing(name)?;
        let lock = folder::lock(&folder, name)?;
        self.remove_locked(&folder, lock)
    }

    /// Holds the lock until the session cannot be found any more.
    pub(super) fn remove_locked(&self, folder: &Path, lock: Lock) -> Result<Forgotten> {
        let keys = self.keys_in(folder)?;
        self.check_sole(folder, &keys)?;
        let doomed = self.root.join(unfinished_name(REMOVED));
        lock::take_away(lock, folder, &doomed)?;
        self.erase_folder(&doomed)
    }

    /// Removes a folder that is no session's any more. What can be read with the session's key only is erased before the key, so that
    /// a crash leaves a folder from which the next removal goes on.
    pub(super) fn erase_folder(&self, doomed: &Path) -> Result<Forgotten> {
        let keys = self.keys_in(doomed)?;
        let (told, is_whole) = self.told_in(doomed);
        let mut forgotten = self.forget_kv(told);
        if self.vault.is_some() && !is_whole {
            let message = "some of it could not be read: its KV is left, and the keys of that";
            forgotten.problem.get_or_insert_with(|| message.to_owned());
        }
        self.add_blobs(&mut forgotten); // before the folder, by which the next removal knows that there is something to do
        let io = |error: io::Error| io_error(doomed, &error);
        let erase = |key| self.vault.as_ref().map_or(Ok(()), |vault| vault.erase(KeyKind::Session, key));
        keys.into_iter().try_for_each(erase).map_err(io)?;
        match fs::remove_dir_all(doomed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
            _ => {} // another process may finish the same removal
        }
        Ok(forgotten)
    }

    /// Returns the keys of the transcripts in a folder.
    ///
    /// # Errors
    /// There are some and no vault, so that they could not be erased.
    fn keys_in(&self, folder: &Path) -> Result<Vec<KeyId>> {
        let mut keys = Vec::new();
        for path in transcripts(folder) {
            keys.extend(sealing::keys_of(&folder::read_file(&path)?.unwrap_or_default()));
            let is_known = |key: &KeyId| self.vault.as_ref().is_some_and(|vault| vault.knows(*key));
            if !keys.iter().all(is_known) {
                let message = "the session is encrypted, and its key has to be erased: its folder of keys is needed (--encrypt DIR); \
                               if that is lost, nothing can read the session, and its folder can be removed by hand";
                return Err(StoreError::Unsupported { path, message: message.to_owned() }.into());
            }
        }
        Ok(keys)
    }

    /// Refuses to remove a session of which another folder is a copy, which has the same key.
    fn check_sole(&self, folder: &Path, keys: &[KeyId]) -> Result<()> {
        let has_key = |path: &PathBuf| {
            let bytes = folder::read_file(path).ok().flatten().unwrap_or_default();
            sealing::keys_of(&bytes).iter().any(|key| keys.contains(key))
        };
        let others =
            self.session_folders().into_iter().filter(|(_, other)| !keys.is_empty() && other != folder);
        match others.flat_map(|(_, other)| transcripts(&other)).find(has_key) {
            None => Ok(()),
            Some(path) => {
                let message = "it is a copy of the session and has the same key: with that, both would be lost; \
                               remove the folder of one by hand";
                Err(StoreError::Unsupported { path, message: message.to_owned() }.into())
            }
        }
    }

    /// Returns the sessions of all owners, with their folders.
    fn session_folders(&self) -> Vec<(SessionName, PathBuf)> {
        let entries = self.owners.roots().into_iter().filter_map(|root| fs::read_dir(root).ok()).flatten();
        let session = |entry: fs::DirEntry| {
            Some((SessionName::from_folder(entry.file_name().to_str()?)?, entry.path()))
        };
        entries.flatten().filter_map(session).collect()
    }

    /// Erases the key of the file that a sealed one has replaced.
    pub(super) fn erase_replaced(&self, seal: Option<&SessionSeal>) -> io::Result<()> {
        let replaced = self.vault.as_ref().zip(seal.and_then(|seal| seal.replaces));
        replaced.map_or(Ok(()), |(vault, id)| vault.erase(KeyKind::Session, id))
    }

    /// Returns what the transcripts in a folder tell, as far as they can be read, and whether all of them can be.
    pub(super) fn told_in(&self, folder: &Path) -> (Told, bool) {
        let (mut told, mut is_whole) = (Told::default(), true);
        let is_asked = self.kv.is_some() || self.vault.is_some();
        for path in transcripts(folder).into_iter().filter(|_| is_asked) {
            let bytes = folder::read_file(&path).ok().flatten().unwrap_or_default();
            let plain = log::plain(&bytes, self.vault.as_ref());
            is_whole &= !bytes.is_empty()
                && plain.is_ok_and(|bytes| {
                    each_sequence(&bytes, |tokens| {
                        told.0.extend(self.kv.iter().flat_map(|_| disk::names(tokens)));
                        told.1.extend(tokens.images.iter().map(|span| span.key));
                    })
                });
        }
        (told, is_whole)
    }

    /// Encrypts a plain session: its file, its images and, because it can be computed again, its KV by removing it. Returns false if it
    /// is encrypted already.
    ///
    /// # Errors
    /// Errors of [`Self::open`]; [`StoreError::Unsupported`] without a vault, or beside damaged copies of the file, which stay plain.
    pub fn encrypt(&self, name: &SessionName) -> Result<bool> {
        let mut writer = self.open_any(name)?;
        let folder = self.path(name);
        let refuse =
            |path: PathBuf, message: &str| StoreError::Unsupported { path, message: message.to_owned() };
        if writer.is_sealed() {
            return Ok(false);
        }
        let vault = self.vault.as_ref();
        let vault =
            vault.ok_or_else(|| refuse(folder.clone(), "a folder of keys is needed (--encrypt DIR)"))?;
        if let Some(copy) = transcripts(&folder).into_iter().find(|path| !path.ends_with(TRANSCRIPT)) {
            return Err(refuse(copy, "a copy in plain text: remove it first").into());
        }
        let ((pages, images), _) = self.told_in(&folder);
        let transcript = read_transcript(&folder.join(TRANSCRIPT), name)?;
        let named = named_in(&transcript).collect();
        let (blobs, bodies) = (writer.saved().blobs.clone(), writer.bodies()?);
        self.save_blobs(&named, &blobs, || writer.seal_anew(vault, &bodies))?;
        self.collect_blobs()?;
        // Of all sessions: none may stay in plain text for the sake of another.
        let Some(kv) = &self.kv else { return Ok(true) };
        let gone =
            disk::forget_images(kv, images, Some(vault)).and_then(|()| disk::forget(kv, &pages, Some(vault)));
        gone.map(|_| true).map_err(|error| io_error(kv, &error))
    }

    /// Removes undone, edited and damaged content from a session's files, and KV that only it used. A sealed session gets another key.
    ///
    /// # Errors
    /// Errors of [`Self::open`].
    pub fn purge(&self, name: &SessionName) -> Result<Purged> {
        let mut writer = self.open(name)?;
        let folder = self.path(name);
        let before = folder_bytes(&folder);
        let kv = writer.compact()?;
        let mut is_alone = true;
        for path in transcripts(&folder).into_iter().filter(|path| !path.ends_with(TRANSCRIPT)) {
            fs::remove_file(&path).map_err(|error| io_error(&path, &error))?;
            is_alone = false;
        }
        if !is_alone && self.vault.is_some() {
            writer.compact()?; // once more, because the key stayed for the sake of the copies
        }
        let kv = Forgotten { num_images: kv.num_images + self.collect_blobs()?, ..kv };
        let num_bytes = before.saturating_sub(folder_bytes(&folder));
        Ok(Purged { num_bytes, kv })
    }

    /// Removes those pages that no session starts with, the embeddings of images that none has, and images that none names.
    pub(super) fn forget(&self, told: Told) -> Forgotten {
        let mut forgotten = self.forget_kv(told);
        self.add_blobs(&mut forgotten);
        forgotten
    }

    /// Removes images that no session names.
    fn add_blobs(&self, forgotten: &mut Forgotten) {
        match self.collect_blobs() {
            Ok(num_images) => forgotten.num_images = num_images,
            Err(error) => forgotten.problem = Some(format!("images are left: {error}")),
        }
    }

    fn forget_kv(&self, (mut pages, mut images): Told) -> Forgotten {
        let mut forgotten = Forgotten::default();
        let is_any = !pages.is_empty() || !images.is_empty();
        let Some(kv) = self.kv.as_ref().filter(|_| is_any) else { return forgotten };
        // Sessions of all owners, because pages have no owner.
        // Search all pages at once, because a shared prefix is followed from its first page.
        let mut kept = Told::default();
        for (session, folder) in self.session_folders() {
            let used = used_in(&folder.join(TRANSCRIPT), &pages, self.vault.as_ref());
            if used.is_unknown {
                forgotten.unreadable.push(session);
            }
            kept.0.extend(used.told.0);
            kept.1.extend(used.told.1);
        }
        pages.retain(|name| !kept.0.contains(name));
        images.retain(|key| !kept.1.contains(key));
        let vault = self.vault.as_ref();
        forgotten.unreadable.sort();
        match disk::forget_images(kv, images, vault).and_then(|()| disk::forget(kv, &pages, vault)) {
            Ok(num_pages) => forgotten.num_pages = num_pages,
            Err(error) => forgotten.problem = Some(format!("{}: {error}", kv.display())),
        }
        forgotten
    }
}

/// What a session uses.
#[derive(Default)]
struct Used {
    told: Told,
    /// As far as it can be read it uses only that; the rest is unknown.
    is_unknown: bool,
}

fn used_in(transcript: &Path, names: &HashSet<PageName>, vault: Option<&Vault>) -> Used {
    let mut used = Used::default();
    let bytes = match folder::read_file(transcript) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return used, // not a session, or just removed
        Err(_) => return Used { is_unknown: true, ..used },
    };
    let Ok(bytes) = log::plain(&bytes, vault) else { return Used { is_unknown: true, ..used } };
    let mut departs = false;
    let is_whole = each_sequence(&bytes, |tokens| {
        // A page name covers all pages before it, so the first unknown name ends the shared prefix.
        for name in disk::names(tokens) {
            if !names.contains(&name) {
                departs = true;
                break;
            }
            used.told.0.insert(name);
        }
        used.told.1.extend(tokens.images.iter().map(|span| span.key));
    });
    used.is_unknown = !is_whole && !departs;
    used
}

fn folder_bytes(folder: &Path) -> u64 {
    let len = |path: PathBuf| fs::metadata(path).map_or(0, |metadata| metadata.len());
    transcripts(folder).into_iter().map(len).sum()
}
