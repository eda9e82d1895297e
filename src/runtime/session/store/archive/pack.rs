//! Writes archives.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::folder::io_error;
use super::super::log;
use super::super::saved::SavedSession;
use super::super::{SessionName, SessionStore, now_ms};
use super::{
    ArchiveManifest, ArchivedModel, ArchivedPart, ArchivedSession, MANIFEST, PartName, SCHEMA, SEAL_NAME,
};
use llmctl_base::error::Result;
use llmctl_base::vault::Vault;
use llmctl_image::ImageHash;
use llmctl_models::images::ImageKey;
use llmctl_models::kv::TokenBuf;
use llmctl_models::kv::disk::{self, ImageFolder, PageName, PageSet, WarmPrompt};
use llmctl_models::load::Fingerprint;
use llmctl_models::tensor::SharedBytes;

/// zstd's level: KV hardly shrinks, whatever the level.
const LEVEL: i32 = 1;

/// All that an archive will have. Pages are mapped, so they stay as they were found even if they are removed meanwhile.
#[derive(Debug, Default)]
pub struct Package {
    manifest: ArchiveManifest,
    parts: Vec<SharedBytes>,
    /// Tokens of the session.
    pub num_tokens: usize,
    pub num_pages: usize,
    /// Bytes of the files of pages.
    pub page_bytes: u64,
    pub num_images: usize,
    /// What is left out, one sentence each.
    pub notices: Vec<String>,
}

/// What sequences have of KV and images.
#[derive(Default)]
pub(super) struct Needs {
    /// Names of full pages, and the number of pages before them.
    pub pages: HashMap<PageName, u32>,
    pub images: BTreeSet<ImageHash>,
    pub rows: BTreeSet<ImageKey>,
}

impl Needs {
    pub fn add(&mut self, saved: &SavedSession) {
        let tokens = saved.turns.last().and_then(|last| saved.tokens_of(&last.model)).unwrap_or_default();
        self.add_tokens(&tokens);
        self.images.extend(saved.named_images());
    }

    pub fn add_prompt(&mut self, prompt: &WarmPrompt) {
        self.pages.extend(prompt.pages.iter().copied().zip(0..));
    }

    fn add_tokens(&mut self, tokens: &TokenBuf) {
        self.pages.extend(disk::names(tokens).zip(0..));
        self.rows.extend(tokens.images.iter().map(|span| span.key));
    }
}

impl SessionStore {
    /// Collects what another machine needs to continue a session and its branches, warm. `hashes` returns the content hashes of
    /// the model with a fingerprint, if a session's reference leads to it.
    ///
    /// # Errors
    /// Errors of [`Self::read`]; [`Error::Store`](llmctl_base::Error::Store) if KV cannot be read.
    pub fn pack(
        &self,
        name: &SessionName,
        hashes: impl Fn(&str, &Fingerprint) -> Option<Vec<String>>,
    ) -> Result<Package> {
        let mut package = Package::new(self.read(name)?.num_tokens());
        let sessions = self.with_branches(name, &mut package)?;
        let mut needs = Needs::default();
        for (at, (name, saved)) in sessions.iter().enumerate() {
            needs.add(saved);
            package.add(PartName::Session(at), log::lines(None, &saved.bodies(name)).0.into_bytes().into());
            package
                .manifest
                .sessions
                .push(ArchivedSession { name: name.to_string(), turns: saved.turns.len() });
        }
        for hash in &needs.images {
            match self.blobs().read(hash) {
                Ok(bytes) => package.add(PartName::Image(*hash), bytes.to_vec().into()),
                Err(reason) => package.notices.push(format!("an image is left out: {reason}")),
            }
        }
        package.num_images = package.parts.len() - sessions.len();
        let Some(root) = &self.kv else { return Ok(package) };
        let folder = ImageFolder::new(root, u64::MAX).with_vault(self.vault.clone());
        let rows = needs.rows.iter().filter_map(|key| Some((*key, folder.file(*key)?)));
        rows.for_each(|(key, file)| package.add(PartName::Rows(key), file.into()));
        let references: BTreeSet<&str> =
            sessions.iter().filter_map(|(_, saved)| saved.model.reference.as_deref()).collect();
        package.add_kv((root, self.vault.as_ref()), &needs, |model| {
            references.iter().find_map(|reference| hashes(reference, model))
        })?;
        Ok(package)
    }

    /// Collects prompts that were computed ahead, and their KV. `hashes` as for [`Self::pack`].
    ///
    /// # Errors
    /// [`Error::Store`](llmctl_base::Error::Store) if KV cannot be read.
    pub fn pack_prompts(
        &self,
        prompts: &[WarmPrompt],
        hashes: impl Fn(&str, &Fingerprint) -> Option<Vec<String>>,
    ) -> Result<Package> {
        let mut package = Package::new(prompts.iter().map(WarmPrompt::num_tokens).sum());
        let mut needs = Needs::default();
        for (at, prompt) in prompts.iter().enumerate() {
            needs.add_prompt(prompt);
            package.add(PartName::Prompt(at), prompt.to_json().into());
            package.manifest.prompts.push(prompt.name.clone());
        }
        if let Some(root) = &self.kv {
            package.add_kv((root, self.vault.as_ref()), &needs, |model| {
                prompts.iter().find_map(|prompt| hashes(&prompt.model, model))
            })?;
        }
        Ok(package)
    }

    /// Reads a session and, unless it is a branch itself, its branches.
    fn with_branches(
        &self,
        name: &SessionName,
        package: &mut Package,
    ) -> Result<Vec<(SessionName, SavedSession)>> {
        let saved = self.read(name)?;
        let branches = if saved.branch().is_some() { Vec::new() } else { self.branches(name)? };
        let mut sessions = vec![(name.clone(), saved)];
        for branch in branches {
            match self.read(&branch.name) {
                Ok(saved) => sessions.push((branch.name, saved)),
                Err(error) => package.notices.push(format!("branch {} is left out: {error}", branch.name)),
            }
        }
        Ok(sessions)
    }
}

impl Package {
    fn new(num_tokens: usize) -> Self {
        let manifest = ArchiveManifest {
            schema: SCHEMA.to_owned(),
            llmctl: env!("CARGO_PKG_VERSION").to_owned(),
            created_ms: now_ms(),
            ..ArchiveManifest::default()
        };
        Self { manifest, num_tokens, ..Self::default() }
    }

    pub fn manifest(&self) -> &ArchiveManifest {
        &self.manifest
    }

    fn add(&mut self, name: PartName, bytes: SharedBytes) {
        let sha256 = ImageHash::of(&bytes).to_string();
        self.manifest.parts.push(ArchivedPart { name, bytes: bytes.len() as u64, sha256 });
        self.parts.push(bytes);
    }

    fn add_kv(
        &mut self,
        (root, vault): (&Path, Option<&Vault>),
        needs: &Needs,
        hashes: impl Fn(&Fingerprint) -> Option<Vec<String>>,
    ) -> Result<()> {
        let names = needs.pages.keys().copied().collect();
        for set in disk::find_pages(root, &names, vault).map_err(|error| io_error(root, &error))? {
            self.add_pages(set, needs, &hashes);
        }
        Ok(())
    }

    /// Adds pages in the order of their depth, because a page is worth nothing without those before it.
    fn add_pages(
        &mut self,
        set: PageSet,
        needs: &Needs,
        hashes: impl Fn(&Fingerprint) -> Option<Vec<String>>,
    ) {
        let PageSet { fingerprint, facts, mut pages } = set;
        let model = Fingerprint::of(facts);
        if model.hex != fingerprint {
            return self.notices.push(format!("{} of KV are left out: their folder is damaged", pages.len()));
        }
        let weights_sha256 = if model.has_times() { hashes(&model) } else { None };
        if model.has_times() && weights_sha256.is_none() {
            self.notices.push(
                "the model that computed the KV is not here: elsewhere the session is warm only with a copy of its file that has the same time"
                    .to_owned(),
            );
        }
        pages.sort_unstable_by_key(|(key, _)| (needs.pages.get(&key.name), key.group, key.name));
        let at = self.manifest.models.len();
        self.manifest.models.push(ArchivedModel { fingerprint, made_of: model.facts, weights_sha256 });
        self.num_pages += pages.len();
        for (key, bytes) in pages {
            self.page_bytes += bytes.len() as u64;
            self.add(PartName::Page(at, key), bytes);
        }
    }

    /// Writes the archive and returns its length in bytes.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<u64> {
        let mut hashed = HashedWriter { out, hash: Sha256::new(), len: 0 };
        let mut encoder = zstd::Encoder::new(&mut hashed, LEVEL)?;
        encoder.include_checksum(true)?;
        let mut tar = tar::Builder::new(encoder);
        let manifest = serde_json::to_vec_pretty(&self.manifest)?;
        let time = self.manifest.created_ms / 1000;
        append(&mut tar, MANIFEST, &manifest, time)?;
        for (part, bytes) in self.manifest.parts.iter().zip(&self.parts) {
            append(&mut tar, &part.name.to_string(), bytes, time)?;
        }
        tar.into_inner()?.finish()?;
        let HashedWriter { out, hash, len } = hashed;
        let seal = [&SEAL_NAME[..], &hash.finalize()].concat();
        out.write_all(&seal)?;
        out.flush()?;
        Ok(len + seal.len() as u64)
    }
}

fn append(tar: &mut tar::Builder<impl Write>, name: &str, bytes: &[u8], time: u64) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(0o600);
    header.set_mtime(time);
    tar.append_data(&mut header, name, bytes)
}

/// Hashes and counts what is written.
struct HashedWriter<'a, W> {
    out: &'a mut W,
    hash: Sha256,
    len: u64,
}

impl<W: Write> Write for HashedWriter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.out.write(bytes)?;
        self.hash.update(&bytes[..count]);
        self.len += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
