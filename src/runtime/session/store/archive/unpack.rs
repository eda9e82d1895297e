//! Imports archives: KV first, then images, branches and last the session, so that a session which is there is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

use super::super::folder::io_error;
use super::super::name::MAX_BRANCHED_BYTES;
use super::super::record::Branch;
use super::super::saved::{ForkOf, SavedSession};
use super::super::{Blobs, Listed, SessionName, SessionStore, UNFINISHED, name_taken, unfinished_name};
use super::contents::{Contents, check_seal, read_parts};
use super::{ArchiveManifest, ArchivedModel, ArchivedPart, PartContent, PartName, refusal};
use llmctl_base::error::Result;
use llmctl_base::private_files::{private_file, private_folder};
use llmctl_base::units::bytes;
use llmctl_base::vault::Vault;
use llmctl_models::images::ImageKey;
use llmctl_models::kv::disk::{
    DEFAULT_QUEUE_BYTES, DiskConfig, DiskEvent, DiskStore, ImageFolder, PageLabel, Saving, WarmPrompt,
    decode_any, has_pages, set_origin,
};

/// Most of a branch's number that is kept.
const MAX_NUMBER: usize = 999_999;

/// A file whose every byte was checked.
pub struct Archive {
    path: PathBuf,
    file: File,
    len: u64,
    contents: Contents,
}

/// How an archive is imported.
#[derive(Debug, Clone, Copy)]
pub struct Import<'a> {
    /// Name of the session; `None` for the one that it had.
    pub name: Option<&'a SessionName>,
    /// Limit of all KV on disk, in bytes.
    pub kv_limit: u64,
}

/// What was imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    pub name: SessionName,
    pub branches: Vec<SessionName>,
    pub pages: ImportedPages,
}

/// The KV of an import.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportedPages {
    /// Pages that are on disk now, of those in the file.
    pub num_pages: usize,
    /// Pages of other conversations that made room.
    pub num_removed: u64,
    /// Why it is not as warm as it was, one sentence each.
    pub notices: Vec<String>,
}

impl Archive {
    /// Reads a file and checks all of it. `path` is for messages. Nothing is written.
    ///
    /// # Errors
    /// [`Error::Store`](llmctl_base::Error::Store) that says what is wrong with the file.
    pub fn open(path: &Path, mut file: File) -> Result<Self> {
        let len = file.metadata().map_err(|error| io_error(path, &error))?.len();
        check_seal(&mut file, path, len)?;
        let contents = read_parts(&mut file, (path, len), &mut |_, _, _| Ok(()))?;
        Ok(Self { path: path.to_owned(), file, len, contents })
    }

    pub fn manifest(&self) -> &ArchiveManifest {
        &self.contents.manifest
    }

    /// Prompts that were computed ahead.
    pub fn prompts(&self) -> &[WarmPrompt] {
        &self.contents.prompts
    }

    pub fn num_bytes(&self) -> u64 {
        self.len
    }

    /// Number of pages of KV in the file.
    pub fn num_pages(&self) -> usize {
        self.manifest().parts.iter().filter(|part| matches!(part.name, PartName::Page(..))).count()
    }
}

impl SessionStore {
    /// Copies what `from` gives to a file of no name below the store, for an archive that cannot be read twice.
    ///
    /// # Errors
    /// [`Error::Store`](llmctl_base::Error::Store).
    pub fn spooled(&self, from: &mut impl Read) -> Result<File> {
        let draft = self.draft_folder()?;
        let path = draft.join("archive");
        let mut options = OpenOptions::new();
        let spooled =
            private_file(options.read(true).write(true).create_new(true), &path).and_then(|mut file| {
                io::copy(from, &mut file)?;
                io::Seek::rewind(&mut file)?;
                Ok(file)
            });
        drop(fs::remove_dir_all(&draft)); // where an open file can be removed; else it is a leftover
        spooled.map_err(|error| io_error(&path, &error))
    }

    /// Imports a session, its branches, images and KV.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`](llmctl_base::Error::InvalidParameter) if the name is in use;
    /// [`Error::Store`](llmctl_base::Error::Store). There is no session then; pages of KV may be.
    pub fn import(&self, archive: &mut Archive, import: Import<'_>) -> Result<Imported> {
        let Some((own, _)) = archive.contents.sessions.first() else {
            return Err(refusal(&archive.path, "it has prompts and no session: `llmctl warm FILE` takes it"));
        };
        let name = import.name.unwrap_or(own).clone();
        if self.path(&name).exists() {
            return Err(name_taken(&name));
        }
        let draft = self.draft_folder()?;
        let imported = self.import_through(archive, (&name, &draft), import);
        drop(fs::remove_dir_all(&draft)); // else it is removed later as a leftover
        imported
    }

    /// Imports prompts that were computed ahead, and keeps their KV. Those that are here already stay as they are.
    ///
    /// # Errors
    /// [`Error::Store`](llmctl_base::Error::Store). Pages of KV may be there then, and the first prompts.
    pub fn import_prompts(&self, archive: &mut Archive, kv_limit: u64) -> Result<ImportedPages> {
        let Archive { path, file, len, contents } = archive;
        if contents.prompts.is_empty() {
            return Err(refusal(
                path,
                "it has a session and no prompts: `llmctl sessions import FILE` takes it",
            ));
        }
        let root = self.kv.as_deref().filter(|_| kv_limit > 0);
        let root = root.ok_or_else(|| refusal(path, "no KV is kept on disk here (--kv-disk)"))?;
        let there = WarmPrompt::read_all(root).0;
        let key = |part: &ArchivedPart| match part.name {
            PartName::Page(_, key) => Some(key),
            _ => None,
        };
        // The archive says which pages there are: some models save none for the middle of a prompt.
        let is_whole = || has_pages(root, contents.manifest.parts.iter().filter_map(key).collect());
        if contents.prompts.iter().all(|prompt| there.contains(prompt)) && is_whole().unwrap_or(false) {
            return Ok(ImportedPages::default());
        }
        let mut pages = PageImport::new(Some(root), self.vault.clone(), contents, kv_limit);
        let contents = read_parts(file, (path, *len), &mut |_, content, bytes| {
            if let PartContent::Page { model, label, payload } = content {
                pages.put(model, label, &bytes[payload]);
            }
            Ok(())
        })?;
        let imported = pages.finish();
        for prompt in &contents.prompts {
            prompt.keep(root).map_err(|error| io_error(root, &error))?;
        }
        Ok(imported)
    }

    /// Creates a folder that is removed as a leftover if this process is killed.
    fn draft_folder(&self) -> Result<PathBuf> {
        private_folder(&self.root, true).map_err(|error| io_error(&self.root, &error))?;
        self.remove_leftovers();
        let draft = self.root.join(unfinished_name(UNFINISHED));
        private_folder(&draft, false).map_err(|error| io_error(&draft, &error))?;
        Ok(draft)
    }

    fn import_through(
        &self,
        archive: &mut Archive,
        (name, draft): (&SessionName, &Path),
        import: Import<'_>,
    ) -> Result<Imported> {
        let Archive { path, file, len, contents } = archive;
        let mut pages = PageImport::new(self.kv.as_deref(), self.vault.clone(), contents, import.kv_limit);
        let mut blobs = Blobs::in_folder(draft.to_owned(), None);
        let contents = read_parts(file, (path, *len), &mut |read, content, bytes| match content {
            PartContent::Session if read.manifest == contents.manifest => Ok(()),
            PartContent::Session | PartContent::Prompt => {
                Err(refusal(path, "the file changes while it is read"))
            }
            PartContent::Image(hash) if self.vault.is_some() => {
                blobs.keep_bytes(hash, bytes); // not in a draft, which is plain
                Ok(())
            }
            PartContent::Image(hash) => {
                let path = draft.join(hash.to_string());
                let file = private_file(OpenOptions::new().write(true).create_new(true), &path);
                file.and_then(|mut file| file.write_all(bytes)).map_err(|error| io_error(&path, &error))
            }
            PartContent::Rows(key) => {
                pages.put_rows(key, bytes);
                Ok(())
            }
            PartContent::Page { model, label, payload } => {
                pages.put(model, label, &bytes[payload]);
                Ok(())
            }
        })?;
        let pages = pages.finish();
        let mut created = Vec::new();
        let branches = self.create_imported(contents.sessions, (name, &blobs), &mut created);
        let branches = branches.inspect_err(|_| {
            created.iter().for_each(|branch| drop(self.remove(branch)));
        })?;
        Ok(Imported { name: name.clone(), branches, pages })
    }

    /// Creates the branches, which `created` gets, then the session. Returns the names of all branches.
    fn create_imported(
        &self,
        sessions: Vec<(SessionName, SavedSession)>,
        (name, blobs): (&SessionName, &Blobs),
        created: &mut Vec<SessionName>,
    ) -> Result<Vec<SessionName>> {
        let listed = self.list()?;
        let known = |id: &str| {
            let has_id = |listed: &&Listed| listed.summary.as_ref().is_ok_and(|summary| summary.id == *id);
            listed.iter().find(has_id).map(|listed| &listed.name)
        };
        // Another id if the session is here already, under another name.
        let fresh = |id: String| if known(&id).is_some() { Uuid::new_v4().to_string() } else { id };
        let owned = |saved| SavedSession { blobs: blobs.clone(), ..self.owned(saved) };
        let mut sessions = sessions.into_iter();
        let Some((_, mut root)) = sessions.next() else { return Ok(Vec::new()) };
        let id = fresh(root.id.clone());
        let mut branches = Vec::new();
        for (old, saved) in sessions {
            // Left by an import that was killed before its session was there.
            let left = known(&saved.id).filter(|_| id == root.id);
            if let Some(left) =
                left.filter(|left| self.read(left).is_ok_and(|there| there.turns == saved.turns))
            {
                branches.push(left.clone());
                continue;
            }
            let branch = saved.branch().map(|branch| Branch { of: id.clone(), ..branch.clone() });
            let fork_of = saved.fork_of.as_ref();
            let fork_of = fork_of.map(|fork| ForkOf { name: name.to_string(), branch, ..fork.clone() });
            let saved = SavedSession { id: fresh(saved.id.clone()), fork_of, ..owned(saved) };
            let number = old.branch_parts().map_or(1, |(_, number)| number.min(MAX_NUMBER));
            created.push(self.create_branch(name, number, saved)?);
            branches.extend(created.last().cloned());
        }
        root.rename(name);
        self.create_saved(name, SavedSession { id, ..owned(root) })?;
        Ok(branches)
    }

    /// Creates a branch under its number, or under the next that is free.
    fn create_branch(&self, name: &SessionName, number: usize, saved: SavedSession) -> Result<SessionName> {
        let base = &name.as_str()[..name.as_str().len().min(MAX_BRANCHED_BYTES)];
        let mut branch = SessionName::branch(base, number);
        if self.path(&branch).exists() {
            branch = SessionName::branch(base, self.last_branch_number(base)? + 1);
        }
        self.create_saved(&branch, saved).map(|writer| writer.name().clone())
    }
}

/// Puts pages and embeddings on disk as an engine does, within the limit.
struct PageImport<'a> {
    root: Option<&'a Path>,
    vault: Option<Vault>,
    limit_bytes: u64,
    /// Of each model, whether its pages are taken.
    models: Vec<(&'a ArchivedModel, bool)>,
    /// Pages from this depth on do not fit.
    end: u32,
    open: Option<(usize, DiskStore)>,
    num_beyond: usize,
    imported: ImportedPages,
}

impl<'a> PageImport<'a> {
    fn new(root: Option<&'a Path>, vault: Option<Vault>, contents: &'a Contents, limit_bytes: u64) -> Self {
        let root = root.filter(|_| limit_bytes > 0);
        let mut imported = ImportedPages::default();
        let notices = &mut imported.notices;
        let mut is_taken = |model: &ArchivedModel| match model.to_fingerprint().is_of_other_build() {
            Some(reason) => {
                notices.push(format!("KV of another build is left out and will be computed anew: {reason}"));
                false
            }
            None => root.is_some(),
        };
        let models: Vec<_> = contents.manifest.models.iter().map(|model| (model, is_taken(model))).collect();
        let mut pages: Vec<(u32, u64)> = Vec::new();
        for part in &contents.manifest.parts {
            if let PartName::Page(model, key) = part.name
                && models[model].1
            {
                pages.push((contents.needs.pages[&key.name], part.bytes));
            }
        }
        pages.sort_unstable();
        // Beyond seven eighths of the limit, the store would remove the first pages for the last.
        let mut left = limit_bytes - limit_bytes / 8;
        let fits = |(_, bytes): &&(u32, u64)| left.checked_sub(*bytes).map(|rest| left = rest).is_some();
        let num_fitting = pages.iter().take_while(fits).count();
        let end = pages.get(num_fitting).map_or(u32::MAX, |(depth, _)| *depth);
        if root.is_none() && !models.is_empty() {
            notices.push("KV is left out and will be computed anew: none is kept on disk".to_owned());
        }
        Self { root, vault, limit_bytes, models, end, open: None, num_beyond: 0, imported }
    }

    fn note(&mut self, notice: String) {
        self.imported.notices.push(notice);
    }

    fn put_rows(&mut self, key: ImageKey, file: &[u8]) {
        let (Some(root), Some(rows)) = (self.root, decode_any(file, key)) else { return };
        if let Err(error) =
            ImageFolder::new(root, self.limit_bytes).with_vault(self.vault.clone()).write(key, &rows)
        {
            self.note(format!("embeddings of an image are left out: {}: {error}", root.display()));
        }
    }

    fn put(&mut self, model: usize, label: PageLabel, payload: &[u8]) {
        if !self.models[model].1 {
            return;
        }
        if label.depth >= self.end {
            self.num_beyond += 1;
            return;
        }
        if self.open.as_ref().is_none_or(|(open, _)| *open != model) {
            self.close();
            match self.store(model) {
                Ok(store) => self.open = Some((model, store)),
                Err(reason) => {
                    self.models[model].1 = false;
                    return self.note(format!("KV is left out and will be computed anew: {reason}"));
                }
            }
        }
        let Some((_, store)) = &self.open else { return };
        if !store.takes(payload.len()) {
            store.flush(Duration::MAX);
        }
        self.imported.num_pages += usize::from(store.save(label, payload.to_vec()) == Saving::Known);
    }

    fn store(&self, model: usize) -> Result<DiskStore, String> {
        let root = self.root.ok_or("no folder")?;
        let ArchivedModel { fingerprint, made_of, weights_sha256 } = self.models[model].0;
        if let Some(weights) = weights_sha256 {
            let noted = set_origin(root, fingerprint, made_of, weights);
            noted.map_err(|error| format!("{}: {error}", root.display()))?;
        }
        let store = DiskStore::open(DiskConfig {
            root: root.to_owned(),
            limit_bytes: self.limit_bytes,
            fingerprint: fingerprint.clone(),
            description: made_of.clone(),
            queue_bytes: DEFAULT_QUEUE_BYTES,
            vault: self.vault.clone(),
        });
        store.map_err(|error| error.to_string())
    }

    /// Waits until the pages of the open store are on disk.
    fn close(&mut self) {
        let Some((_, store)) = self.open.take() else { return };
        store.flush(Duration::MAX);
        let stats = store.stats();
        self.imported.num_pages += stats.saved_pages as usize;
        self.imported.num_removed += stats.removed_pages;
        let notices = store.poll().into_iter().filter_map(|event| match event {
            DiskEvent::Notice(notice) => Some(notice.to_string()),
            _ => None,
        });
        self.imported.notices.extend(notices);
    }

    fn finish(mut self) -> ImportedPages {
        self.close();
        if self.num_beyond > 0 {
            let (count, limit) = (self.num_beyond, bytes(self.limit_bytes));
            self.note(format!(
                "{count} pages of KV are left out and will be computed anew: they do not fit into {limit} (--kv-disk)"
            ));
        }
        self.imported
    }
}
