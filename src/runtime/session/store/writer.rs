//! A session open for writing: every change is on disk before the call returns.
//!
//! Invariants: the writer holds the session's lock, and `saved` always equals the file's content. A call that
//! fails leaves both unchanged; `Log` undoes a failed write before the next one.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::folder::{self, Lock, MAX_FILE_BYTES, io_error, transcripts};
use super::log::Log;
use super::record::{LogRecord, StoredTurnRecord, Version};
use super::removal::Forgotten;
use super::saved::SavedSession;
use super::sealing::{self, SessionSeal, sealed_len};
use super::{Blobs, ModelFingerprint, SessionName, SessionStore, StoredTurn, TRANSCRIPT, log, now_ms};
use llmctl_base::error::{Error, Result, StoreError};
use llmctl_base::notice::Notice;
use llmctl_base::private_files;
use llmctl_base::vault::Vault;
use llmctl_image::ImageHash;

/// Size in bytes from which a file is rewritten when most of it is replaced turns.
const COMPACT_BYTES: u64 = 64 << 20;

/// The only writer of a session. Dropping it releases the lock.
#[derive(Debug)]
pub struct SessionWriter {
    store: SessionStore,
    name: SessionName,
    folder: PathBuf,
    log: Log<File>,
    saved: SavedSession,
    notices: Vec<Notice>,
    /// Smallest file that is compacted automatically, in bytes.
    compact_bytes: u64,
    /// File size at which compaction is considered next.
    compact_at: u64,
    /// Released last.
    lock: Lock,
}

/// Result of `SessionStore::open`.
pub(super) struct OpenedSession {
    pub store: SessionStore,
    pub name: SessionName,
    pub folder: PathBuf,
    pub log: Log<File>,
    pub saved: SavedSession,
    pub notices: Vec<Notice>,
    pub lock: Lock,
}

impl SessionWriter {
    pub(super) fn new(opened: OpenedSession) -> Self {
        let OpenedSession { store, name, folder, log, saved, notices, lock } = opened;
        Self {
            store,
            name,
            folder,
            log,
            saved,
            notices,
            compact_bytes: COMPACT_BYTES,
            compact_at: COMPACT_BYTES,
            lock,
        }
    }

    /// Returns whether the file is encrypted.
    pub fn is_sealed(&self) -> bool {
        self.log.seal().is_some()
    }

    /// Rewrites the file under a new key, and erases the one before it: what it has sealed cannot be read from then on, in copies
    /// too. A plain file becomes a sealed one.
    pub(super) fn seal_anew(&mut self, vault: &Vault, bodies: &[String]) -> Result<()> {
        self.check_length(num_bytes(bodies, true))?;
        let path = self.folder.join(TRANSCRIPT);
        let io = |error: io::Error| io_error(&path, &error);
        let seal = SessionSeal::create(vault, self.log.seal().map(|seal| seal.id)).map_err(io)?;
        self.rewrite_sealed(bodies, Some(seal))?;
        self.store.erase_replaced(self.log.seal()).map_err(io)
    }

    pub fn name(&self) -> &SessionName {
        &self.name
    }

    pub(super) fn store(&self) -> &SessionStore {
        &self.store
    }

    pub fn saved(&self) -> &SavedSession {
        &self.saved
    }

    /// Returns notices about the file for the user, one sentence each.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// Holds the bytes of images that later turns name, until a turn is saved.
    pub fn take_blobs(&mut self, blobs: &Blobs) {
        self.saved.blobs.take(blobs);
    }

    /// Appends a finished turn of `model` and syncs.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the turn keeps tokens that do not exist or could not be read back;
    /// [`Error::Store`]. Nothing is added then.
    pub fn append(&mut self, model: &ModelFingerprint, turn: &StoredTurn) -> Result<()> {
        self.append_after(self.saved.turns.len(), model, turn)
    }

    /// Replaces all turns after the first `turns` by an edited or regenerated one. A single line does both,
    /// so a crash leaves either the old turns or the new one.
    ///
    /// # Errors
    /// Errors of [`Self::append`]; [`Error::InvalidParameter`] if there are fewer turns.
    pub fn append_after(&mut self, turns: usize, model: &ModelFingerprint, turn: &StoredTurn) -> Result<()> {
        self.append_noted(turns, model, turn, None)
    }

    /// As [`Self::append_after`], with a note on the turn. A crash may leave the turn without its note.
    ///
    /// # Errors
    /// Errors of [`Self::append_after`].
    pub fn append_noted(
        &mut self,
        turns: usize,
        model: &ModelFingerprint,
        turn: &StoredTurn,
        note: Option<Value>,
    ) -> Result<()> {
        let mut records = Vec::new();
        if *model != *self.saved.model {
            records.push(LogRecord::Model { model: model.clone() });
        }
        let number = turns + 1;
        let before = turns.checked_sub(1).and_then(|before| self.saved.turns.get(before));
        let turn = StoredTurnRecord::following(turn, before.map(|saved| &saved.turn));
        records.push(LogRecord::Turn { number, turn: Box::new(turn) });
        records.extend(note.map(|note| LogRecord::Note { number, note }));
        self.write(records)
    }

    /// Replaces the note on a turn, which counts from 1.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there is no such turn; [`Error::Store`].
    pub fn set_note(&mut self, number: usize, note: Value) -> Result<()> {
        self.write(vec![LogRecord::Note { number, note }])
    }

    /// Rewinds to the first `turns` turns, for undo and edits.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there are fewer; [`Error::Store`].
    pub fn truncate(&mut self, turns: usize) -> Result<()> {
        if turns == self.saved.turns.len() {
            return Ok(());
        }
        self.write(vec![LogRecord::Truncate { turns, time_ms: now_ms() }])
    }

    /// Rewrites the file without rewound turns, and removes KV that only they used. A crash leaves the old or the new file,
    /// both whole. A sealed file gets another key, unless a damaged copy beside it needs the old one.
    ///
    /// # Errors
    /// [`Error::Store`]; the session continues in the old file.
    pub fn compact(&mut self) -> Result<Forgotten> {
        let (told, _) = self.store.told_in(&self.folder);
        let bodies = self.saved.bodies(&self.name);
        match self.store.vault.clone().filter(|_| self.is_sealed() && transcripts(&self.folder).len() == 1) {
            Some(vault) => self.seal_anew(&vault, &bodies)?,
            None => self.rewrite(&bodies)?,
        }
        Ok(self.store.forget(told))
    }

    /// Removes the session while holding its lock, so that no other writer opens it.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn remove(self) -> Result<Forgotten> {
        self.store.remove_locked(&self.folder, self.lock)
    }

    /// Removes the session if it never had a turn, and returns whether it did so. The lock is held from the
    /// check to the removal; closing the session and removing it by name would let another writer add a turn
    /// in between.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub fn remove_if_empty(self) -> Result<bool> {
        if self.saved.had_turns {
            return Ok(false);
        }
        self.remove().map(|_| true)
    }

    fn rewrite(&mut self, bodies: &[String]) -> Result<()> {
        let seal = self.log.seal().cloned();
        self.rewrite_sealed(bodies, seal)
    }

    fn rewrite_sealed(&mut self, bodies: &[String], seal: Option<SessionSeal>) -> Result<()> {
        let path = self.folder.join("transcript.new");
        self.log = replace((&path, &self.folder.join(TRANSCRIPT)), bodies, seal)
            .map_err(|error| io_error(&path, &error))?;
        // Either file is the whole session, so a failed sync of the folder loses nothing.
        drop(folder::sync_folder(&self.folder));
        Ok(())
    }

    /// Returns the lines of the file.
    pub(super) fn bodies(&self) -> Result<Vec<String>> {
        let path = self.folder.join(TRANSCRIPT);
        let bytes = super::read_transcript(&path, &self.name)?;
        let opened = sealing::open(&log::scan(&bytes).bodies, self.store.vault.as_ref());
        let opened = opened.map_err(|message| StoreError::Unsupported { path, message })?;
        Ok(opened.bodies.into_iter().map(Cow::into_owned).collect())
    }

    /// Rewrites a file of an older schema with a header of a later one.
    fn upgrade(&mut self, version: Version) -> Result<()> {
        let mut bodies = self.bodies()?;
        let header = bodies.first().and_then(|body| LogRecord::from_body(body).ok());
        let Some(LogRecord::Header { name, created_ms, model, .. }) = header else {
            let path = self.folder.join(TRANSCRIPT);
            let message = "the header changed while the session was open".to_owned();
            return Err(StoreError::Damaged { path, line: 1, message }.into());
        };
        let (id, owner) = (Some(self.saved.id.clone()), self.saved.owner.clone());
        let header = LogRecord::Header { schema: version.schema(), name, created_ms, model, id, owner };
        self.saved.version = header.version();
        bodies[0] = header.to_body();
        self.rewrite(&bodies)
    }

    /// Upgrades the file if its schema cannot express one of the records.
    fn upgrade_for(&mut self, records: &[LogRecord]) -> Result<()> {
        let needed = records.iter().map(LogRecord::version).max();
        needed.filter(|needed| *needed > self.saved.version).map_or(Ok(()), |needed| self.upgrade(needed))
    }

    /// Rewrites the file with `records` appended. A crash leaves all of them or none.
    pub(super) fn rewrite_with(&mut self, records: Vec<LogRecord>) -> Result<()> {
        self.upgrade_for(&records)?;
        let saved = self.replayed(&records)?;
        let mut bodies = self.bodies()?;
        bodies.extend(records.iter().map(LogRecord::to_body));
        self.check_length(self.num_bytes(&bodies))?;
        let (store, blobs) = (self.store.clone(), saved.blobs.clone());
        store.save_blobs(&named_images(&records), &blobs, || self.rewrite(&bodies))?;
        self.saved = store.with_blobs(saved);
        Ok(())
    }

    /// Compacts a long file whose content is mostly obsolete, before it becomes too long to read.
    fn compact_if_long(&mut self) -> Result<()> {
        if self.log.len() < self.compact_at {
            return Ok(());
        }
        let needed = self.num_bytes(&self.saved.bodies(&self.name));
        self.compact_at = needed.saturating_mul(4).max(self.compact_bytes);
        if self.log.len() < self.compact_at { Ok(()) } else { self.compact().map(drop) }
    }

    /// Records the new name after the folder was renamed.
    pub(super) fn renamed(&mut self, name: SessionName, folder: PathBuf) -> Result<()> {
        let record = LogRecord::Rename { to: name.to_string(), time_ms: now_ms() };
        (self.name, self.folder) = (name, folder);
        self.write(vec![record])
    }

    fn write(&mut self, records: Vec<LogRecord>) -> Result<()> {
        self.upgrade_for(&records)?;
        let saved = self.replayed(&records)?;
        self.compact_if_long()?;
        let bodies: Vec<String> = records.iter().map(LogRecord::to_body).collect();
        self.check_length(self.log.len() + self.num_bytes(&bodies))?;
        let (log, path) = (&mut self.log, self.folder.join(TRANSCRIPT));
        self.store.save_blobs(&named_images(&records), &saved.blobs, || {
            log.append(&bodies).map_err(|error| io_error(&path, &error))
        })?;
        self.saved = self.store.with_blobs(saved);
        Ok(())
    }

    /// Returns the session after `records`, so that nothing is written that could not be read back.
    fn replayed(&self, records: &[LogRecord]) -> Result<SavedSession> {
        let refuse = |message: String| Error::InvalidParameter { name: "turn", message };
        let mut saved = self.saved.clone();
        for record in records {
            let record =
                LogRecord::from_body(&record.to_body()).map_err(|error| refuse(error.to_string()))?;
            saved.apply(record).map_err(refuse)?;
        }
        Ok(saved)
    }

    fn num_bytes(&self, bodies: &[String]) -> u64 {
        num_bytes(bodies, self.is_sealed())
    }

    fn check_length(&self, num_bytes: u64) -> Result<()> {
        if num_bytes <= MAX_FILE_BYTES {
            return Ok(());
        }
        let message = format!("the turn is not saved: the file would be longer than {MAX_FILE_BYTES} bytes");
        Err(StoreError::Unsupported { path: self.folder.join(TRANSCRIPT), message }.into())
    }
}

fn named_images(records: &[LogRecord]) -> BTreeSet<ImageHash> {
    records.iter().flat_map(LogRecord::named_images).collect()
}

/// Returns the most bytes that `bodies` take as lines of a log.
fn num_bytes(bodies: &[String], is_sealed: bool) -> u64 {
    let len = |body: &String| match is_sealed {
        true => sealed_len(body.len() as u64),
        false => body.len() as u64,
    };
    bodies.iter().map(|body| len(body) + 64).sum()
}

/// Writes a log beside `target` and renames it into place.
pub(super) fn replace(
    (new, target): (&Path, &Path),
    bodies: &[String],
    seal: Option<SessionSeal>,
) -> io::Result<Log<File>> {
    remove_if_there(new)?; // left by a crash
    let file = private_files::private_file(OpenOptions::new().append(true).create_new(true), new)?;
    let mut log = Log::new(file).with_seal(seal);
    let written = log.append(bodies).and_then(|()| fs::rename(new, target));
    if let Err(error) = written {
        drop(remove_if_there(new));
        return Err(error);
    }
    Ok(log)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::SessionStore;
    use super::*;
    use crate::request::{Finish, Usage};
    use llmctl_base::Sampling;
    use llmctl_template::Message;

    fn turn(text: &str) -> StoredTurn {
        StoredTurn {
            messages: vec![Message::user(text), Message::assistant("yes")],
            kept_tokens: 0,
            prompt_tail: vec![1, 2],
            generated: vec![3],
            spans: Vec::new(),
            adapters: Vec::new(),
            splice_after: None,
            sampling: Sampling::default(),
            finish: Finish::Eos(2),
            usage: Usage { prompt_tokens: 2, cached_tokens: 0, completion_tokens: 1, ..Usage::default() },
            started_ms: 1,
            finished_ms: 2,
            receipt: None,
        }
    }

    #[test]
    fn a_file_that_is_mostly_history_is_rewritten() {
        let folder = tempfile::TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path());
        let name = SessionName::new("a").expect("a name");
        let model = ModelFingerprint { name: "m".to_owned(), fingerprint: "1".to_owned(), reference: None };
        let mut writer = store.create(&name, &model).expect("created");
        (writer.compact_bytes, writer.compact_at) = (4096, 4096);
        for n in 0..200 {
            writer.append_after(0, &model, &turn(&format!("{n} {}", "x".repeat(300)))).expect("saved");
            let len = fs::metadata(writer.folder.join(TRANSCRIPT)).expect("there").len();
            assert_eq!(len, writer.log.len());
            assert!(len < 8192, "{len} bytes after edit {n}");
        }
        drop(writer);
        let turns = store.read(&name).expect("reads").turns;
        assert_eq!(turns.len(), 1);
        assert_eq!(turns[0].turn, turn(&format!("199 {}", "x".repeat(300))));
    }

    #[test]
    fn a_note_stays_with_its_turn() {
        let folder = tempfile::TempDir::new().expect("a scratch folder");
        let store = SessionStore::new(folder.path());
        let name = SessionName::new("a").expect("a name");
        let model = ModelFingerprint { name: "m".to_owned(), fingerprint: "1".to_owned(), reference: None };
        let mut writer = store.create(&name, &model).expect("created");
        writer.append(&model, &turn("plain")).expect("saved");
        let transcript =
            |name: &SessionName| fs::read_to_string(store.path(name).join(TRANSCRIPT)).expect("there");
        assert!(transcript(&name).contains("llmctl.session.v2"), "older readers read it");
        writer.append_noted(1, &model, &turn("noted"), Some("first".into())).expect("saved");
        writer.set_note(2, "second".into()).expect("saved");
        assert!(writer.set_note(3, "none".into()).is_err(), "there is no such turn");
        assert!(transcript(&name).contains("llmctl.session.v3"), "older readers refuse it");
        let notes = |name: &SessionName| -> Vec<Option<Value>> {
            store.read(name).expect("reads").turns.iter().map(|saved| saved.note.clone()).collect()
        };
        let expected = [None, Some(Value::from("second"))];
        assert_eq!(notes(&name), expected);
        writer.compact().expect("compacted");
        assert_eq!(notes(&name), expected);
        assert!(!transcript(&name).contains("first"), "what it replaces is gone");
        let branch = writer.branch(None, super::super::BranchReason::Undo).expect("a branch");
        assert_eq!(notes(branch.name()), expected);
        writer.truncate(1).expect("truncated");
        writer.compact().expect("compacted");
        writer.append_noted(1, &model, &turn("again"), Some("third".into())).expect("saved");
        assert_eq!(notes(&name), [None, Some(Value::from("third"))]);
    }
}
