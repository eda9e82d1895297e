//! Sessions on disk: `<root>/<name>/transcript.jsonl`, append-only, one line per finished turn.
//!
//! Invariants: a change that a call reported as done survives a crash. A session appears and disappears as a
//! whole. One process at a time writes to a session; any number read. Damage is reported by line and repaired
//! only on request. A conversation is plain text for `jq`, and contains no KV.
//!
//! `name` maps names to folders; `folder` owns files and modes, `lock` the order of steps on them, `log`
//! lines and checksums, `record` the format, `saved` the meaning of the records; `writer` is the one open
//! session, `sealing` what encrypts its lines, `branch` its branches; `blobs` keeps images; `listing` lists sessions; `removal` removes them, with
//! the pages of KV that `token_history` finds; `archive` is a session in one file, for another machine. Knows no engine and no tokenizer.

mod archive;
mod blobs;
mod branch;
mod folder;
mod listing;
mod lock;
mod log;
mod name;
mod owners;
mod receipts;
mod record;
mod removal;
mod saved;
mod sealing;
mod token_history;
mod writer;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use self::folder::{Lock, io_error};
use self::listing::Summaries;
use self::log::{Log, LogEnd, LogScan};
use self::saved::{Contradiction, replay};
use self::sealing::SessionSeal;
use self::writer::OpenedSession;
use super::super::request::{Finish, Usage};
use llmctl_base::Sampling;
use llmctl_base::error::{Error, Result, StoreError};
use llmctl_base::notice::Notice;
use llmctl_base::private_files;
use llmctl_base::vault::Vault;
use llmctl_models::adapters::AdapterUse;
use llmctl_models::images::ImageSpan;
use llmctl_template::message::Message;

pub use self::archive::{Archive, ArchiveManifest, ArchivedModel, Import, Imported, ImportedPages, Package};
pub use self::blobs::{Blobs, hashes};
pub use self::branch::not_a_branch;
pub use self::listing::{Listed, SessionSummary};
pub use self::name::{MAX_NAME_BYTES, SessionName, percent_decoded};
use self::owners::Owners;
pub use self::receipts::receipt_of;
pub use self::record::{Branch, BranchReason, TurnReceipt};
pub use self::removal::{Forgotten, Purged};
pub use self::saved::{ForkOf, SavedSession, SavedTurn};
pub use self::writer::SessionWriter;

const TRANSCRIPT: &str = "transcript.jsonl";
/// Prefix of folders that are being created or removed; no session's folder has it.
const UNFINISHED: &str = ".unfinished-";
/// Prefix of those that are being removed.
const REMOVED: &str = ".unfinished-removed-";
/// Age after which such folders, left by a crash, are removed.
const LEFTOVER_AGE: Duration = Duration::from_secs(60 * 60);

/// Identity of the model that made a turn. Token ids are valid for this model only.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFingerprint {
    /// Name shown to the user.
    pub name: String,
    /// Equal only for models with the same vocabulary, template and weights.
    pub fingerprint: String,
    /// Reference that finds the model from any folder: an absolute path, `hf:org/repo@revision:file`, or the
    /// name of a built-in model. `None` in sessions of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
}

impl ModelFingerprint {
    /// Returns whether the models share token ids. Names and locations are ignored.
    pub fn is_same(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

/// A finished turn: one request and its answer. Times are milliseconds since 1970, UTC.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTurn {
    /// Messages that the turn adds, the answer last.
    pub messages: Vec<Message>,
    /// Tokens of the previous conversation that the prompt starts with.
    pub kept_tokens: usize,
    /// Tokens of the prompt after `kept_tokens`.
    pub prompt_tail: Vec<u32>,
    /// Tokens of the answer as generated, without the end-of-generation token.
    pub generated: Vec<u32>,
    /// Image rows of `prompt_tail`, at their positions in the conversation.
    pub spans: Vec<ImageSpan>,
    /// Adapters with which the conversation's rows were computed for this turn.
    pub adapters: Vec<AdapterUse>,
    /// Suffix of the prompt's text, if later prompts may contain `generated` in place of the answer's text
    /// (see `transcript`); `None` if not, e.g. because a stop string was cut off.
    pub splice_after: Option<String>,
    /// Sampling parameters, with the seed in force.
    pub sampling: Sampling,
    pub finish: Finish,
    pub usage: Usage,
    pub started_ms: u64,
    pub finished_ms: u64,
    /// `None` if the answer was not computed from this prompt here, or by an older llmctl.
    pub receipt: Option<TurnReceipt>,
}

impl StoredTurn {
    /// Returns the tokens of the conversation after this turn.
    pub fn num_tokens(&self) -> usize {
        self.kept_tokens + self.prompt_tail.len() + self.generated.len()
    }
}

/// Result of `SessionStore::repair`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repaired {
    /// The first damaged line, from 1.
    pub line: usize,
    /// Number of turns that are kept.
    pub turns: usize,
    /// Copy of the damaged file.
    pub backup: PathBuf,
}

/// The sessions below one folder. Clones share state. Creating one touches no file.
#[derive(Debug, Clone)]
pub struct SessionStore {
    root: PathBuf,
    /// Root of the sessions' KV.
    kv: Option<PathBuf>,
    summaries: Arc<Summaries>,
    /// State shared by the stores of all owners below the same root, including the local user's.
    owners: Arc<Owners>,
    /// Owner of an API key, of whom new sessions are; `None` for the local user.
    owner: Option<String>,
    /// Keys of sealed sessions; `None` writes plain ones.
    vault: Option<Vault>,
}

impl SessionStore {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        let owners = Arc::new(Owners::new(root.clone()));
        Self { kv: None, summaries: Arc::default(), owners, owner: None, root, vault: None }
    }

    /// Also removes pages of KV below `root` that only removed sessions used.
    pub fn with_kv(self, root: Option<PathBuf>) -> Self {
        Self { kv: root, ..self }
    }

    /// Seals new sessions, and opens sealed ones. A plain session can be read, but is not continued before it is
    /// [encrypted](Self::encrypt).
    pub fn with_vault(self, vault: Option<Vault>) -> Self {
        Self { vault, ..self }
    }

    /// Returns whether a session of that name exists, even if damaged.
    pub fn exists(&self, name: &SessionName) -> bool {
        self.existing(name).is_ok()
    }

    /// Creates a session, open for writing.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the name is in use; [`Error::Store`].
    pub fn create(&self, name: &SessionName, model: &ModelFingerprint) -> Result<SessionWriter> {
        self.create_saved(name, self.owned(SavedSession::new(model, now_ms())))
    }

    /// Returns a session of the owner of this store.
    fn owned(&self, saved: SavedSession) -> SavedSession {
        SavedSession { owner: self.owner.clone(), ..saved }
    }

    /// Opens a session for writing. A torn last line is cut off, with a notice.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::SessionBusy`] while another writer has it; [`Error::Store`], also for a plain session
    /// if there is a vault.
    pub fn open(&self, name: &SessionName) -> Result<SessionWriter> {
        let writer = self.open_any(name)?;
        if self.vault.is_none() || writer.is_sealed() {
            return Ok(writer);
        }
        let message = format!(
            "the session is plain text: `llmctl sessions encrypt {name}` encrypts it, and without --encrypt it goes on as it is"
        );
        Err(StoreError::Unsupported { path: self.path(name).join(TRANSCRIPT), message }.into())
    }

    /// Opens a session, plain or sealed.
    fn open_any(&self, name: &SessionName) -> Result<SessionWriter> {
        let folder = self.existing(name)?;
        let lock = folder::lock(&folder, name)?;
        let path = folder.join(TRANSCRIPT);
        let bytes = read_transcript(&path, name)?;
        let LoadedTranscript { scan, saved, seal } = self.load(&path, &bytes).into_result()?;
        let saved = self.with_blobs(saved);
        let file = private_files::private_file(OpenOptions::new().append(true), &path);
        let log = file.and_then(|file| {
            self.erase_replaced(seal.as_ref())?;
            Ok(Log::resume(file, &scan)?.with_seal(seal))
        });
        let log = log.map_err(|error| io_error(&path, &error))?;
        let notices = end_notice(name, scan.end).into_iter().collect();
        let store = self.clone();
        Ok(SessionWriter::new(OpenedSession { store, name: name.clone(), folder, log, saved, notices, lock }))
    }

    /// Opens a session or creates it.
    ///
    /// # Errors
    /// Errors of [`Self::open`] and [`Self::create`], except that the session exists or does not.
    pub fn open_or_create(&self, name: &SessionName, model: &ModelFingerprint) -> Result<SessionWriter> {
        let opened = lock::open_or_begin(
            || match self.open(name) {
                Err(Error::SessionNotFound(_)) => Ok(None),
                opened => opened.map(Some),
            },
            || match self.create(name, model) {
                Err(Error::InvalidParameter { name: "session", .. }) => Ok(None),
                created => created.map(Some),
            },
        );
        opened?.ok_or_else(|| match self.exists(name) {
            true => Error::SessionBusy(name.to_string()),
            false => {
                let message = "a file, folder or link of that name holds no session".to_owned();
                StoreError::Unsupported { path: self.path(name), message }.into()
            }
        })
    }

    /// Reads a session, also while another process writes to it. A line that is being written is ignored.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::Store`].
    pub fn read(&self, name: &SessionName) -> Result<SavedSession> {
        let path = self.existing(name)?.join(TRANSCRIPT);
        let bytes = read_transcript(&path, name)?;
        self.load(&path, &bytes).into_result().map(|loaded| self.with_blobs(loaded.saved))
    }

    /// Returns the session with its blobs in this store.
    fn with_blobs(&self, saved: SavedSession) -> SavedSession {
        SavedSession { blobs: self.blobs(), ..saved }
    }

    /// Returns the size of a session's transcript in bytes.
    ///
    /// # Errors
    /// [`Error::SessionNotFound`]; [`Error::Store`].
    pub fn num_bytes(&self, name: &SessionName) -> Result<u64> {
        let path = self.existing(name)?.join(TRANSCRIPT);
        fs::metadata(&path).map(|metadata| metadata.len()).map_err(|error| io_error(&path, &error))
    }

    /// Returns when a session's transcript was written last, in milliseconds since 1970; 0 if the system does not say.
    pub fn written_ms(&self, name: &SessionName) -> u64 {
        let written = fs::metadata(self.path(name).join(TRANSCRIPT)).and_then(|file| file.modified());
        let since_1970 = written.ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        since_1970.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    /// Renames a session.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if the new name is in use; errors of [`Self::open`].
    pub fn rename(&self, from: &SessionName, to: &SessionName) -> Result<()> {
        let mut writer = self.open(from)?;
        if from == to {
            return Ok(());
        }
        let (old, new) = (self.path(from), self.path(to));
        self.beside_blobs(|| self.move_into_place(&old, to))?;
        drop(writer.renamed(to.clone(), new)); // for the history only: the folder is the session's name
        Ok(())
    }

    /// Creates a session, open for writing, from the first `turns` turns of another; `None` for all.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] if there are fewer turns or the name is in use; errors of [`Self::read`].
    pub fn fork(&self, from: &SessionName, to: &SessionName, turns: Option<usize>) -> Result<SessionWriter> {
        let saved = self.read(from)?;
        let forked = saved.forked(from, turns)?;
        self.create_saved(to, SavedSession { last_used_ms: saved.last_used_ms, ..forked })
    }

    /// Forks a session to another owner's sessions.
    ///
    /// # Errors
    /// Errors of [`Self::fork`].
    pub fn fork_to(
        &self,
        from: &SessionName,
        (store, to): (&Self, &SessionName),
        turns: Option<usize>,
    ) -> Result<SessionWriter> {
        store.create_saved(to, store.owned(self.read(from)?.forked(from, turns)?))
    }

    /// Keeps the lines before the first damaged one, and a copy of the damaged file. Returns `None` if
    /// nothing is wrong.
    ///
    /// # Errors
    /// [`Error::Store`], also if the first line is damaged or a newer llmctl wrote the file; errors of
    /// [`Self::open`].
    pub fn repair(&self, name: &SessionName) -> Result<Option<Repaired>> {
        let folder = self.existing(name)?;
        let _lock = folder::lock(&folder, name)?;
        let path = folder.join(TRANSCRIPT);
        let bytes = read_transcript(&path, name)?;
        let loaded = self.load(&path, &bytes);
        let (Some(StoreError::Damaged { line, .. }), Some(saved)) = (&loaded.problem, &loaded.saved) else {
            return loaded.into_result().map(|_| None);
        };
        let seal = loaded.seal.clone(); // the damaged file stays readable
        let backup = folder.join(format!("transcript.damaged-{}.jsonl", now_ms()));
        let copied = private_files::private_file(OpenOptions::new().append(true).create_new(true), &backup)
            .and_then(|mut file| io::Write::write_all(&mut file, &bytes).and_then(|()| file.sync_all()));
        copied.map_err(|error| io_error(&backup, &error))?;
        writer::replace((&folder.join("transcript.new"), &path), &saved.bodies(name), seal)
            .and_then(|_| folder::sync_folder(&folder))
            .map_err(|error| io_error(&path, &error))?;
        Ok(Some(Repaired { line: *line, turns: saved.turns.len(), backup }))
    }

    fn path(&self, name: &SessionName) -> PathBuf {
        self.root.join(name.to_folder())
    }

    fn existing(&self, name: &SessionName) -> Result<PathBuf> {
        let folder = self.path(name);
        match fs::metadata(folder.join(TRANSCRIPT)) {
            Ok(_) => Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::SessionNotFound(name.to_string()))
            }
            Err(error) => Err(io_error(&folder, &error)),
        }
    }

    /// Builds the folder under another name, locked, and renames it, so that half a session is never visible.
    fn create_saved(&self, name: &SessionName, saved: SavedSession) -> Result<SessionWriter> {
        if self.path(name).exists() {
            return Err(name_taken(name)); // checked again, atomically, by the rename
        }
        private_files::private_folder(&self.root, true).map_err(|error| io_error(&self.root, &error))?;
        self.remove_leftovers();
        let draft = self.root.join(unfinished_name(UNFINISHED));
        let made = self.save_blobs(&saved.named_images(), &saved.blobs, || {
            let (log, lock) = self.make_draft(&draft, name, &saved)?;
            self.move_into_place(&draft, name)?;
            Ok((log, lock))
        });
        let saved = self.with_blobs(saved);
        let (log, lock) = made.inspect_err(|_| drop(self.erase_folder(&draft)))?;
        let (store, name, folder, notices) = (self.clone(), name.clone(), self.path(name), Vec::new());
        Ok(SessionWriter::new(OpenedSession { store, name, folder, log, saved, notices, lock }))
    }

    fn make_draft(
        &self,
        draft: &Path,
        name: &SessionName,
        saved: &SavedSession,
    ) -> Result<(Log<File>, Lock)> {
        private_files::private_folder(draft, false).map_err(|error| io_error(draft, &error))?;
        let lock = folder::lock(draft, name)?;
        let path = draft.join(TRANSCRIPT);
        let log = private_files::private_file(OpenOptions::new().append(true).create_new(true), &path)
            .and_then(|file| {
                let seal = self.vault.as_ref().map(|vault| SessionSeal::create(vault, None)).transpose()?;
                let mut log = Log::new(file).with_seal(seal);
                log.append(&saved.bodies(name))?;
                folder::sync_folder(draft)?;
                Ok(log)
            })
            .map_err(|error| io_error(&path, &error))?;
        Ok((log, lock))
    }

    /// Renames a session's folder to the place of `name`. The system refuses to replace a folder that is not
    /// empty.
    fn move_into_place(&self, folder: &Path, name: &SessionName) -> Result<()> {
        let target = self.path(name);
        if target.exists() {
            return Err(name_taken(name));
        }
        fs::rename(folder, &target).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => name_taken(name),
            _ => io_error(&target, &error),
        })?;
        folder::sync_folder(&self.root).map_err(|error| io_error(&self.root, &error))
    }

    fn load<'a>(&self, path: &Path, bytes: &'a [u8]) -> ScannedTranscript<'a> {
        load(path, bytes, self.vault.as_ref())
    }

    /// Removes folders that crashes left. Errors are ignored.
    fn remove_leftovers(&self) {
        let Ok(entries) = fs::read_dir(&self.root) else { return };
        for entry in entries.flatten() {
            let is_unfinished = entry.file_name().to_str().is_some_and(|name| name.starts_with(UNFINISHED));
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            let is_old =
                modified.is_ok_and(|time| time.elapsed().is_ok_and(|elapsed| elapsed > LEFTOVER_AGE));
            // Of a removal that a crash or an error has ended, at once: it is found under no name.
            let is_removed = entry.file_name().to_str().is_some_and(|name| name.starts_with(REMOVED));
            let doomed = self.root.join(unfinished_name(REMOVED));
            if is_removed {
                drop(self.erase_folder(&entry.path()));
            } else if is_unfinished && is_old && fs::rename(entry.path(), &doomed).is_ok() {
                drop(self.erase_folder(&doomed));
            }
        }
    }
}

/// Content of a transcript and its first problem.
struct ScannedTranscript<'a> {
    scan: LogScan<'a>,
    /// Session up to the problem.
    saved: Option<SavedSession>,
    seal: Option<SessionSeal>,
    problem: Option<StoreError>,
}

/// Content of a transcript without a problem.
struct LoadedTranscript<'a> {
    scan: LogScan<'a>,
    saved: SavedSession,
    seal: Option<SessionSeal>,
}

impl<'a> ScannedTranscript<'a> {
    fn into_result(self) -> Result<LoadedTranscript<'a>> {
        let Self { scan, saved, seal, problem } = self;
        match problem {
            Some(problem) => Err(problem.into()),
            None => {
                let saved = saved.expect("without a header there is a problem");
                Ok(LoadedTranscript { scan, saved, seal })
            }
        }
    }
}

fn load<'a>(path: &Path, bytes: &'a [u8], vault: Option<&Vault>) -> ScannedTranscript<'a> {
    let scan = log::scan(bytes);
    let opened = match sealing::open(&scan.bodies, vault) {
        Ok(opened) => opened,
        Err(reason) => {
            let name =
                path.parent().and_then(|folder| SessionName::from_folder(folder.file_name()?.to_str()?));
            let name = name.map_or_else(String::new, |name| format!(" {:?}", name.as_str()));
            let message = format!("session{name} is encrypted, and {reason}");
            let problem = Some(StoreError::Unsupported { path: path.into(), message });
            return ScannedTranscript { scan, saved: None, seal: None, problem };
        }
    };
    let (saved, contradiction) = replay(&opened.bodies);
    let damaged = |line, message| StoreError::Damaged { path: path.into(), line, message };
    let problem = match (contradiction, &scan.damage) {
        (Some(Contradiction::Line { line, message }), _) => {
            Some(damaged(opened.num_before() + line, message))
        }
        (Some(Contradiction::Schema(schema)), _) => {
            let message = format!(
                "written by a newer llmctl: the schema is {schema:?}, not {:?}",
                record::Version::NEWEST.schema()
            );
            Some(StoreError::Unsupported { path: path.into(), message })
        }
        (None, _) if let Some(line) = opened.damaged => {
            Some(damaged(line, "cannot be decrypted with the session's key".to_owned()))
        }
        (None, Some(damage)) => Some(damaged(damage.line, damage.message.clone())),
        (None, None) if saved.is_none() => Some(damaged(1, "there is no header".to_owned())),
        (None, None) => None,
    };
    ScannedTranscript { scan, saved, seal: opened.seal, problem }
}

fn read_transcript(path: &Path, name: &SessionName) -> Result<Vec<u8>> {
    folder::read_file(path)?.ok_or_else(|| Error::SessionNotFound(name.to_string()))
}

fn end_notice(name: &SessionName, end: LogEnd) -> Option<Notice> {
    let session = name.to_string();
    match end {
        LogEnd::Clean => None,
        LogEnd::Torn { num_bytes } => Some(Notice::TornTurn { session, num_bytes }),
        LogEnd::NoLineFeed => Some(Notice::LineEndRestored { session }),
    }
}

/// The error of a name that another session has.
pub fn name_taken(name: &SessionName) -> Error {
    let message = format!("there is a session named {:?} already", name.as_str());
    Error::InvalidParameter { name: "session", message }
}

/// Returns a folder name that no process uses.
fn unfinished_name(prefix: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_nanos());
    format!("{prefix}{}-{}-{nanos:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the time in milliseconds since 1970, UTC.
pub fn now_ms() -> u64 {
    let millis = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_millis());
    u64::try_from(millis).unwrap_or(u64::MAX)
}
