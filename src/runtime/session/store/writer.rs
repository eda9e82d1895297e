//! One session open for writing: every change is a line on disk before the call returns.
//!
//! Invariants: holds the session's lock; `saved` is what the file says at every moment; a call that fails leaves both
//! as they were, except that a failed write may have to be taken back before the next one (`Log` sees to it).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::folder::{self, Lock, io_error};
use super::log::Log;
use super::record::{Record, TurnRecord};
use super::saved::SavedSession;
use super::{ModelFingerprint, SessionName, TRANSCRIPT, Turn, now_ms};
use crate::runtime::error::{Error, Result};
use crate::runtime::private_files;

/// The one writer of a session. Dropping it lets others in.
#[derive(Debug)]
pub struct SessionWriter {
    name: SessionName,
    folder: PathBuf,
    log: Log<File>,
    saved: SavedSession,
    notices: Vec<String>,
    /// Held, never used.
    _lock: Lock,
}

/// What `SessionStore::open` found.
pub(super) struct Opened {
    pub name: SessionName,
    pub folder: PathBuf,
    pub log: Log<File>,
    pub saved: SavedSession,
    pub notices: Vec<String>,
    pub lock: Lock,
}

impl SessionWriter {
    pub(super) fn new(opened: Opened) -> Self {
        let Opened { name, folder, log, saved, notices, lock } = opened;
        Self { name, folder, log, saved, notices, _lock: lock }
    }

    pub fn name(&self) -> &SessionName {
        &self.name
    }

    pub fn saved(&self) -> &SavedSession {
        &self.saved
    }

    /// What the user should know about the file and nothing failed on, one sentence each.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Adds a finished turn of `model`; it is on disk when this returns.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] when the turn keeps tokens that are not there or could not be read back;
    /// [`Error::Store`]. Nothing was added then.
    pub fn append(&mut self, model: &ModelFingerprint, turn: &Turn) -> Result<()> {
        self.append_after(self.saved.turns.len(), model, turn)
    }

    /// Adds a finished turn in place of all after the first `turns`: an edited or regenerated one. One line does both, so
    /// that a crash leaves the old turns or the new one.
    ///
    /// # Errors
    /// As [`Self::append`]; [`Error::InvalidParameter`] when there are fewer turns.
    pub fn append_after(&mut self, turns: usize, model: &ModelFingerprint, turn: &Turn) -> Result<()> {
        let mut records = Vec::new();
        if *model != *self.saved.model {
            records.push(Record::Model { model: model.into() });
        }
        records.push(Record::Turn { number: turns + 1, turn: Box::new(TurnRecord::from(turn)) });
        self.write(records)
    }

    /// Goes back to the first `turns` turns: undo, or the beginning of an edit.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] when there are fewer; [`Error::Store`].
    pub fn truncate(&mut self, turns: usize) -> Result<()> {
        if turns == self.saved.turns.len() {
            return Ok(());
        }
        self.write(vec![Record::Truncate { turns, time_ms: now_ms() }])
    }

    /// Rewrites the file without what was rewound. A crash leaves the old file or the new one, both whole.
    ///
    /// # Errors
    /// [`Error::Store`]; the session goes on in the file that was there.
    pub fn compact(&mut self) -> Result<()> {
        let records = self.saved.to_records(&self.name, now_ms());
        let path = self.folder.join("transcript.new");
        let bodies: Vec<String> = records.iter().map(Record::to_body).collect();
        self.log = replace(&path, &self.folder.join(TRANSCRIPT), &bodies)
            .map_err(|error| io_error(&path, &error))?;
        // Either file is the whole session, so a folder that cannot be synced costs nothing.
        drop(folder::sync_folder(&self.folder));
        Ok(())
    }

    /// Records the new name, which the folder has already.
    pub(super) fn renamed(&mut self, name: SessionName, folder: PathBuf) -> Result<()> {
        let record = Record::Rename { to: name.to_string(), time_ms: now_ms() };
        (self.name, self.folder) = (name, folder);
        self.write(vec![record])
    }

    /// Replays what is about to be written, as a reader would: what cannot be read back is not written.
    fn write(&mut self, records: Vec<Record>) -> Result<()> {
        let refuse = |message: String| Error::InvalidParameter { name: "turn", message };
        let bodies: Vec<String> = records.iter().map(Record::to_body).collect();
        let mut saved = self.saved.clone();
        for body in &bodies {
            let record = Record::from_body(body).map_err(|error| refuse(error.to_string()))?;
            saved.apply(record).map_err(refuse)?;
        }
        let path = self.folder.join(TRANSCRIPT);
        self.log.append(&bodies).map_err(|error| io_error(&path, &error))?;
        self.saved = saved;
        Ok(())
    }
}

/// Writes a whole log beside another and puts it in the other's place.
pub(super) fn replace(new: &Path, target: &Path, bodies: &[String]) -> io::Result<Log<File>> {
    remove_if_there(new)?; // left by a crash
    let file = private_files::private_file(OpenOptions::new().append(true).create_new(true), new)?;
    let mut log = Log::new(file);
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
