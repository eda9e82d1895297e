//! Reads archives, part by part, each checked before it is given on.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::saved::SavedSession;
use super::super::{SessionName, load};
use super::pack::Needs;
use super::{
    ArchiveManifest, ArchivedPart, FREE_BYTES, MANIFEST, MAX_MANIFEST_BYTES, MAX_PART_BYTES, MAX_RATIO,
    PartContent, PartName, SCHEMA, SEAL_BYTES, SEAL_NAME, refusal,
};
use llmctl_base::error::Result;
use llmctl_image::ImageHash;
use llmctl_models::kv::disk::{PageLabel, WarmPrompt, decode_any, page};
use llmctl_models::load::Fingerprint;

/// Bytes of padding that may follow the last part.
const MAX_PADDING: u64 = 1 << 20;

/// What the parts so far have told.
pub(super) struct Contents {
    pub manifest: ArchiveManifest,
    pub sessions: Vec<(SessionName, SavedSession)>,
    pub prompts: Vec<WarmPrompt>,
    pub needs: Needs,
    /// Bytes of the pages of each group of each model.
    payloads: HashMap<(usize, u8), usize>,
}

/// Checks the seal of a file, `len` bytes, against all bytes before it.
pub(super) fn check_seal(file: &mut File, path: &Path, len: u64) -> Result<()> {
    let io = |error: io::Error| refusal(path, error);
    let Some(content) = len.checked_sub(SEAL_BYTES) else { return Err(foreign(path)) };
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    let mut rest = file.take(content);
    loop {
        match rest.read(&mut buffer).map_err(io)? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    let mut seal = Vec::new();
    file.take(SEAL_BYTES).read_to_end(&mut seal).map_err(io)?;
    match seal.strip_prefix(SEAL_NAME) {
        None => Err(foreign(path)),
        Some(stored) if *stored == *hash.finalize() => Ok(()),
        Some(_) => Err(refusal(path, "the file is damaged: its checksum is another; nothing is imported")),
    }
}

fn foreign(path: &Path) -> llmctl_base::Error {
    refusal(path, "no file of `llmctl sessions export --with-kv`, or one that is cut")
}

/// Gets what was read before, what a part is, and its bytes.
pub(super) type TakePart<'a> = dyn FnMut(&Contents, PartContent, &[u8]) -> Result<()> + 'a;

/// Reads all parts of a sealed file, `len` bytes, and gives each to `take` after it was checked.
///
/// # Errors
/// A sentence that names the part and what is wrong; those of `take`.
pub(super) fn read_parts(
    file: &mut File,
    (path, len): (&Path, u64),
    take: &mut TakePart<'_>,
) -> Result<Contents> {
    let malformed = |error: io::Error| refusal(path, format!("the file cannot be unpacked: {error}"));
    file.rewind().map_err(malformed)?;
    let packed = BufReader::new(file.take(len.saturating_sub(SEAL_BYTES)));
    let mut tar = tar::Archive::new(zstd::Decoder::with_buffer(packed).map_err(malformed)?);
    // Raw, because extensions of tar could give a part another name or length than its header has.
    let mut entries = tar.entries().map_err(malformed)?.raw(true);
    let mut next = |name: &str, most: u64| {
        let entry = entries.next().unwrap_or(Err(io::ErrorKind::UnexpectedEof.into())).map_err(malformed)?;
        part_bytes(entry, name, most).map_err(|message| refusal(path, format!("{name}: {message}")))
    };
    let manifest = next(MANIFEST, MAX_MANIFEST_BYTES)?;
    let mut contents = Contents::new(&manifest, len).map_err(|message| refusal(path, message))?;
    for part in contents.manifest.parts.clone() {
        let name = part.name.to_string();
        let bytes = next(&name, part.bytes)?;
        let content = contents.check(&part, &bytes);
        let content = content.map_err(|message| refusal(path, format!("{name}: {message}")))?;
        take(&contents, content, &bytes)?;
    }
    let found = [contents.sessions.len(), contents.prompts.len()];
    let listed = [contents.manifest.sessions.len(), contents.manifest.prompts.len()];
    if found != listed || entries.next().is_some() {
        return Err(refusal(path, "its parts are not those of its manifest"));
    }
    check_padding(tar.into_inner()).map_err(malformed)?;
    Ok(contents)
}

/// Returns the bytes of a regular file of that name, at most `most`.
fn part_bytes(entry: tar::Entry<'_, impl Read>, name: &str, most: u64) -> Result<Vec<u8>, String> {
    let is_named = *entry.path_bytes() == *name.as_bytes();
    if !is_named || !entry.header().entry_type().is_file() {
        let found = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        return Err(format!("{found:?} is in its place"));
    }
    let num_bytes = entry.size();
    if num_bytes > most {
        return Err(format!("it has {num_bytes} bytes, more than {most}"));
    }
    let mut bytes = Vec::new();
    entry.take(most).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 == num_bytes { Ok(bytes) } else { Err("it is cut".to_owned()) }
}

/// Reads to the end, which has zeros only.
fn check_padding(mut rest: impl Read) -> io::Result<()> {
    let (mut buffer, mut len) = (vec![0; 64 << 10], 0);
    loop {
        let count = rest.read(&mut buffer)?;
        len += count as u64;
        if buffer[..count].iter().any(|byte| *byte != 0) || len > MAX_PADDING {
            return Err(io::Error::other("there is more behind the last part"));
        }
        if count == 0 {
            return Ok(());
        }
    }
}

impl Contents {
    /// Reads a manifest of a file of `len` bytes.
    fn new(manifest: &[u8], len: u64) -> Result<Self, String> {
        let value: serde_json::Value =
            serde_json::from_slice(manifest).map_err(|error| format!("{MANIFEST}: {error}"))?;
        if value["schema"] != SCHEMA {
            return Err(format!(
                "written by another llmctl: the schema is {}, not {SCHEMA:?}",
                value["schema"]
            ));
        }
        let manifest: ArchiveManifest =
            serde_json::from_value(value).map_err(|error| format!("{MANIFEST}: {error}"))?;
        let total = manifest.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes));
        if total > len.saturating_mul(MAX_RATIO).saturating_add(FREE_BYTES) {
            return Err(format!("it claims {total} bytes of content in a file of {len} bytes"));
        }
        if manifest.parts.iter().any(|part| part.bytes > MAX_PART_BYTES) {
            return Err(format!("it claims a part of more than {MAX_PART_BYTES} bytes"));
        }
        // Sessions and prompts first: they decide what else belongs to the file. Each part once.
        let kind = |part: &ArchivedPart| match part.name {
            PartName::Session(at) | PartName::Prompt(at) => (0, at),
            PartName::Image(_) => (1, 0),
            PartName::Rows(_) => (2, 0),
            PartName::Page(model, _) => (3, model),
        };
        let mut names: Vec<PartName> = manifest.parts.iter().map(|part| part.name).collect();
        names.sort_unstable();
        if !manifest.parts.is_sorted_by_key(kind) || names.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("its parts are not in order".to_owned());
        }
        let is_fingerprint =
            |model: &super::ArchivedModel| model.fingerprint == Fingerprint::of(model.made_of.clone()).hex;
        if !manifest.models.iter().all(is_fingerprint) {
            return Err("a model's fingerprint is not that of its facts".to_owned());
        }
        if manifest.sessions.is_empty() == manifest.prompts.is_empty() {
            return Err("it has neither a session nor prompts, or both".to_owned());
        }
        let (sessions, prompts) = (Vec::new(), Vec::new());
        Ok(Self { manifest, sessions, prompts, needs: Needs::default(), payloads: HashMap::new() })
    }

    /// Checks what a part is. Of pages, embeddings and images only those of the sessions are taken.
    fn check(&mut self, part: &ArchivedPart, bytes: &[u8]) -> Result<PartContent, String> {
        let hash = ImageHash::of(bytes);
        if hash.to_string() != part.sha256 {
            return Err("its checksum is another".to_owned());
        }
        match part.name {
            PartName::Session(at) => self.add_session(at, bytes).map(|()| PartContent::Session),
            PartName::Prompt(at) => self.add_prompt(at, bytes).map(|()| PartContent::Prompt),
            PartName::Image(name) if name == hash && self.needs.images.contains(&name) => {
                Ok(PartContent::Image(name))
            }
            PartName::Rows(key) if self.needs.rows.contains(&key) && decode_any(bytes, key).is_some() => {
                Ok(PartContent::Rows(key))
            }
            PartName::Image(_) | PartName::Rows(_) => Err("no image of the session".to_owned()),
            PartName::Page(model, key) => {
                let depth = self.needs.pages.get(&key.name).filter(|_| model < self.manifest.models.len());
                let depth = *depth.ok_or("no page of its sessions or prompts")?;
                let (label, payload) = page::read_any(bytes)?;
                let len = *self.payloads.entry((model, key.group)).or_insert(payload.len());
                if label.key != key || payload.len() != len {
                    return Err("another page, or one of another size".to_owned());
                }
                Ok(PartContent::Page { model, label: PageLabel { depth, ..label }, payload })
            }
        }
    }

    fn add_prompt(&mut self, at: usize, record: &[u8]) -> Result<(), String> {
        let prompt = WarmPrompt::from_json(record)?;
        if at != self.prompts.len() || self.manifest.prompts.get(at) != Some(&prompt.name) {
            return Err("no prompt of that number".to_owned());
        }
        self.needs.add_prompt(&prompt);
        self.prompts.push(prompt);
        Ok(())
    }

    /// Replays a conversation: first the session, then branches of it.
    fn add_session(&mut self, at: usize, transcript: &[u8]) -> Result<(), String> {
        let listed = self.manifest.sessions.get(at).filter(|_| at == self.sessions.len());
        let listed = listed.ok_or("no session of that number")?;
        let name = SessionName::new(&listed.name).map_err(|error| error.to_string())?;
        let loaded = load(Path::new(&listed.name), transcript, None).into_result();
        let saved = loaded.map_err(|error| error.to_string())?.saved;
        if saved.turns.len() != listed.turns {
            return Err(format!("{} turns instead of {}", saved.turns.len(), listed.turns));
        }
        let is_branch = |root: &SavedSession| saved.branch().is_some_and(|branch| branch.of == root.id);
        if self.sessions.first().is_some_and(|(_, root)| !is_branch(root)) {
            return Err("no branch of the session".to_owned());
        }
        self.needs.add(&saved);
        self.sessions.push((name, saved));
        Ok(())
    }
}
