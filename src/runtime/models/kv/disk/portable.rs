//! Pages that move between machines: those of a conversation are found for all models, and those that another machine has
//! computed lie in the folder of its fingerprint until a model is loaded that has the same weights.
//!
//! A fingerprint has the modification times of weight files, which say nothing on another machine. There `origin.json` of a
//! folder has the hashes of the whole files. Pages are moved file by file, so a move that is interrupted is continued by the next.

use std::collections::HashSet;
use std::fs::{self, DirEntry, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};

use super::folder::{
    Folder, MANIFEST, MAX_MANIFEST_BYTES, ORIGIN, contents, is_folder, page_path, read_small, replace,
    unless_gone, walk,
};
use super::{DiskPageKey, PageName, page};
use crate::tensor::SharedBytes;
use llmctl_base::private_files::{private_folder, set_read_only};
use llmctl_base::vault::{KeyKind, Vault, open_any, sealed_id};

/// Whole files of pages of one fingerprint.
#[derive(Debug, Clone)]
pub struct PageSet {
    pub fingerprint: String,
    /// See [`DiskConfig::description`](super::DiskConfig::description).
    pub facts: Value,
    pub pages: Vec<(DiskPageKey, SharedBytes)>,
}

/// A folder of pages that another machine computed.
#[derive(Debug, Clone)]
pub struct ForeignPages {
    pub fingerprint: String,
    pub facts: Value,
    /// SHA-256 of each weight file, hexadecimal.
    pub weights_sha256: Vec<String>,
}

/// Reads all pages with these names below `root`, by fingerprint, in their plain form. Damaged pages are left out, and sealed ones
/// whose keys are not in `vault`.
///
/// # Errors
/// Errors of the file system, except that a file is absent.
pub fn find_pages(root: &Path, names: &HashSet<PageName>, vault: Option<&Vault>) -> io::Result<Vec<PageSet>> {
    let mut sets = Vec::new();
    for (fingerprint, facts) in fingerprints(root, |_| true)? {
        let file =
            |entry: &DirEntry, key: DiskPageKey| names.contains(&key.name).then(|| (key, entry.path()));
        let found = unless_gone(walk(&root.join(&fingerprint), &AtomicBool::new(false), file))?;
        let mut pages = Vec::new();
        for (key, path) in found.unwrap_or_default() {
            let Some(mut file) = unless_gone(File::open(&path))? else { continue };
            let mut bytes = file.metadata().and_then(|metadata| contents(&mut file, metadata.len()))?;
            if sealed_id(&bytes).is_some() {
                let mut copy = bytes.to_vec();
                let Ok(plain) = open_any(vault, KeyKind::Page, &mut copy) else { continue };
                bytes = SharedBytes::from(copy).slice(plain.start, plain.len());
            }
            if page::read_any(&bytes).is_ok_and(|(label, _)| label.key == key) {
                pages.push((key, bytes));
            }
        }
        if !pages.is_empty() {
            sets.push(PageSet { fingerprint, facts, pages });
        }
    }
    sets.sort_by(|a, b| a.fingerprint.cmp(&b.fingerprint));
    Ok(sets)
}

/// A fingerprint and its facts.
type FolderFacts = (String, Value);

/// Returns the fingerprints that have a folder, and their facts. Manifests of folders that are not `wanted` are not read.
pub(super) fn fingerprints(root: &Path, wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<FolderFacts>> {
    let mut found = Vec::new();
    for folder in unless_gone(fs::read_dir(root))?.into_iter().flatten() {
        let folder = folder?;
        let name = folder.file_name().to_str().map(str::to_owned);
        let Some(name) = name.filter(|_| is_folder(&folder) && wanted(&folder.path())) else { continue };
        let manifest = read_json(&folder.path().join(MANIFEST)).unwrap_or_default();
        if manifest["fingerprint"] == *name {
            found.push((name, manifest["made_of"].clone()));
        }
    }
    Ok(found)
}

fn read_json(path: &Path) -> Option<Value> {
    serde_json::from_slice(&read_small(path, MAX_MANIFEST_BYTES).ok()?).ok()
}

/// Creates the folder of a fingerprint for pages that another machine has computed with these weights. An existing folder stays
/// as it is: its pages are those of a model of this machine, or came before.
///
/// # Errors
/// Errors of the file system.
pub fn set_origin(
    root: &Path,
    fingerprint: &str,
    facts: &Value,
    weights_sha256: &[String],
) -> io::Result<()> {
    let folder = root.join(fingerprint);
    if folder.exists() {
        return Ok(());
    }
    private_folder(&folder, true)?;
    let text = json!({"weights_sha256": weights_sha256}).to_string();
    replace(&folder, &folder.join(ORIGIN), |file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    })?;
    Folder::new(root.to_owned(), fingerprint, facts).prepare()
}

/// Lists the pages that other machines computed.
pub fn foreign_pages(root: &Path) -> Vec<ForeignPages> {
    let foreign = |(fingerprint, facts): FolderFacts| {
        let origin = read_json(&root.join(&fingerprint).join(ORIGIN))?;
        let weights_sha256 = serde_json::from_value(origin["weights_sha256"].clone()).ok()?;
        Some(ForeignPages { fingerprint, facts, weights_sha256 })
    };
    fingerprints(root, |_| true).unwrap_or_default().into_iter().filter_map(foreign).collect()
}

/// Moves the pages of a fingerprint to that of a model, `(fingerprint, facts)`. Returns the number of moved pages.
///
/// # Errors
/// Errors of the file system; the rest is left where it is, and the next call moves it.
pub fn take_over(root: &Path, from: &str, (fingerprint, facts): (&str, &Value)) -> io::Result<usize> {
    let source = root.join(from);
    Folder::new(root.to_owned(), fingerprint, facts).prepare()?;
    let file = |entry: &DirEntry, key| Some((key, entry.path()));
    let found = unless_gone(walk(&source, &AtomicBool::new(false), file))?.unwrap_or_default();
    let mut num_moved = 0;
    for (key, path) in found {
        let target = page_path(&root.join(fingerprint), key);
        target.parent().map_or(Ok(()), |folder| private_folder(folder, true))?;
        // A page of this machine stays, and is kept if the other was.
        if target.exists() && fs::metadata(&path).is_ok_and(|found| found.permissions().readonly()) {
            unless_gone(set_read_only(&target, true))?;
        }
        let moved = if target.exists() { fs::remove_file(&path) } else { fs::rename(&path, &target) };
        num_moved += usize::from(unless_gone(moved)?.is_some());
        drop(path.parent().map(fs::remove_dir)); // unless it has more pages
    }
    forget_origin(root, from)?;
    unless_gone(fs::remove_file(source.join(MANIFEST)))?;
    drop(fs::remove_dir(source)); // unless another process is writing there
    Ok(num_moved)
}

/// Removes the note of where the pages of a fingerprint came from: they are of a model of this machine, or of none that it has.
///
/// # Errors
/// Errors of the file system.
pub fn forget_origin(root: &Path, fingerprint: &str) -> io::Result<()> {
    unless_gone(fs::remove_file(root.join(fingerprint).join(ORIGIN))).map(drop)
}
