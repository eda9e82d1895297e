//! Prompts that were computed ahead (`llmctl warm`). `<root>/warm/<name>.json` has the names of a prompt's pages, and the files of
//! these pages are read-only: limits do not evict such pages, and they stay when a session that begins with them is removed.
//!
//! `<root>/warm/<name>.hits` has one byte for each request that began with all pages of the prompt, so that any number of
//! processes count without a lock. A record is written before its pages become read-only, and goes after they are writable
//! again, so each read-only page has a record, whenever a process is killed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirEntry, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::folder::{FoundPage, read_small, replace, unless_gone, walk};
use super::portable::fingerprints;
use super::{DiskPageKey, PageName, check_fingerprint};
use crate::kv::PAGE_TOKENS;
use llmctl_base::private_files::{private_file, private_folder, set_read_only};

const FOLDER: &str = "warm";
const SCHEMA: &str = "llmctl.warm.v1";
/// Of a prompt of some 60 million tokens.
const MAX_RECORD_BYTES: u64 = 128 << 20;

/// A prompt whose KV stays on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmPrompt {
    schema: String,
    /// 1 to 128 letters, digits, '-' and '_'.
    pub name: String,
    /// Reference of the model, as the user gave it.
    pub model: String,
    pub created_ms: u64,
    /// Names of its pages, in order; each stands for [`PAGE_TOKENS`] tokens.
    pub pages: Vec<PageName>,
}

impl WarmPrompt {
    /// Returns a prompt of these pages, or why there is none.
    ///
    /// # Errors
    /// The name is none, or there is no page.
    pub fn new(name: String, model: String, created_ms: u64, pages: Vec<PageName>) -> Result<Self, String> {
        let prompt = Self { schema: SCHEMA.to_owned(), name, model, created_ms, pages };
        prompt.check().map(|()| prompt)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn from_json(bytes: &[u8]) -> Result<Self, String> {
        let prompt: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        prompt.check().map(|()| prompt)
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers are always JSON")
    }

    fn check(&self) -> Result<(), String> {
        check_fingerprint(&self.name).map_err(|_| {
            format!("{:?} is no name: 1 to 128 letters, digits, '-' and '_' are one", self.name)
        })?;
        match () {
            () if self.schema != SCHEMA => Err(format!("the schema is {:?}, not {SCHEMA:?}", self.schema)),
            () if self.pages.is_empty() => {
                Err(format!("it has no page: KV is kept by pages of {PAGE_TOKENS} tokens"))
            }
            () => Ok(()),
        }
    }

    pub fn num_tokens(&self) -> usize {
        self.pages.len() * PAGE_TOKENS
    }

    /// Keeps the prompt's pages below `root` until [`remove`](Self::remove), in place of an earlier prompt of the name. Returns
    /// their bytes, of all models; pages that are not there stay away.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn keep(&self, root: &Path) -> io::Result<u64> {
        let folder = root.join(FOLDER);
        private_folder(&folder, true)?;
        let earlier = Self::read_all(root).0.into_iter().find(|earlier| earlier.name == self.name);
        earlier.map_or(Ok(()), |earlier| earlier.release(root))?;
        replace(&folder, &self.path(root, "json"), |file| {
            file.write_all(&self.to_json())?;
            file.sync_all()
        })?;
        pin(root, &self.names(), true)
    }

    /// Lets limits evict the prompt's pages again, except those of other prompts, and forgets the prompt.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn remove(&self, root: &Path) -> io::Result<()> {
        self.release(root)?;
        drop(fs::remove_file(self.path(root, "hits")));
        fs::remove_file(self.path(root, "json"))
    }

    fn release(&self, root: &Path) -> io::Result<()> {
        let mut names = self.names();
        let others = Self::read_all(root).0.into_iter().filter(|other| other != self);
        let used: HashSet<PageName> = others.flat_map(|other| other.pages).collect();
        names.retain(|name| !used.contains(name));
        pin(root, &names, false).map(drop)
    }

    fn names(&self) -> HashSet<PageName> {
        self.pages.iter().copied().collect()
    }

    fn path(&self, root: &Path, extension: &str) -> PathBuf {
        root.join(FOLDER).join(format!("{}.{extension}", self.name))
    }

    /// Returns whether a sequence with these pages has all of the prompt.
    pub fn begins(&self, pages: &[PageName]) -> bool {
        // A page's name depends on all pages before it.
        pages.get(self.pages.len() - 1) == self.pages.last()
    }

    /// Counts a request that began with the prompt.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn count_hit(&self, root: &Path) -> io::Result<()> {
        private_file(OpenOptions::new().append(true).create(true), &self.path(root, "hits"))?.write_all(b"+")
    }

    /// Number of requests that began with the prompt.
    pub fn num_hits(&self, root: &Path) -> u64 {
        fs::metadata(self.path(root, "hits")).map_or(0, |metadata| metadata.len())
    }

    /// Returns the bytes of each prompt's pages below `root`, of all models; `None` if the prompt's last page is not there, which is
    /// saved after all others.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn bytes_on_disk(prompts: &[Self], root: &Path) -> io::Result<Vec<Option<u64>>> {
        let mut sizes: HashMap<PageName, u64> = HashMap::new();
        let names = prompts.iter().flat_map(|prompt| prompt.pages.iter().copied()).collect();
        each_page(root, &names, |key, path| {
            *sizes.entry(key.name).or_default() += fs::metadata(path)?.len();
            Ok(())
        })?;
        let measured = |prompt: &Self| {
            let is_whole = prompt.pages.last().is_some_and(|last| sizes.contains_key(last));
            is_whole.then(|| prompt.names().iter().filter_map(|name| sizes.get(name)).sum())
        };
        Ok(prompts.iter().map(measured).collect())
    }

    /// Returns when a prompt below `root` was added or removed last; `None` if there was none ever.
    pub fn changed(root: &Path) -> Option<SystemTime> {
        fs::metadata(root.join(FOLDER)).and_then(|metadata| metadata.modified()).ok()
    }

    /// Reads all prompts below `root`, by name, and for each file that is no record a sentence that says why.
    pub fn read_all(root: &Path) -> (Vec<Self>, Vec<String>) {
        let (mut prompts, mut faults) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(root.join(FOLDER)).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = read_small(&path, MAX_RECORD_BYTES).map_err(|error| error.to_string());
            let read = bytes.and_then(|bytes| Self::from_json(&bytes));
            match read.map(|prompt: Self| (path == prompt.path(root, "json"), prompt)) {
                Ok((true, prompt)) => prompts.push(prompt),
                Ok((false, _)) => {
                    faults.push(format!("{}: it has the name of another prompt", path.display()))
                }
                Err(reason) => faults.push(format!("{}: {reason}", path.display())),
            }
        }
        prompts.sort_by(|a, b| a.name.cmp(&b.name));
        faults.sort();
        (prompts, faults)
    }
}

/// Returns the bytes of all pages of prompts that were computed ahead.
///
/// # Errors
/// Errors of the file system.
pub fn pinned_bytes(root: &Path) -> io::Result<u64> {
    let mut num_bytes = 0;
    for (fingerprint, _) in fingerprints(root, |_| true)? {
        let pages = walk(&root.join(fingerprint), &AtomicBool::new(false), FoundPage::measure);
        let pinned = unless_gone(pages)?.into_iter().flatten().filter(|page| page.is_pinned);
        num_bytes += pinned.map(|page| page.num_bytes).sum::<u64>();
    }
    Ok(num_bytes)
}

/// Returns whether all these pages are there, each of any model.
///
/// # Errors
/// Errors of the file system.
pub fn has_pages(root: &Path, mut keys: HashSet<DiskPageKey>) -> io::Result<bool> {
    let names = keys.iter().map(|key| key.name).collect();
    each_page(root, &names, |key, _| {
        keys.remove(&key);
        Ok(())
    })?;
    Ok(keys.is_empty())
}

/// Makes pages read-only or writable. Returns their bytes.
fn pin(root: &Path, names: &HashSet<PageName>, is_pinned: bool) -> io::Result<u64> {
    let mut num_bytes = 0;
    each_page(root, names, |_, path| {
        num_bytes += fs::metadata(path)?.len();
        set_read_only(path, is_pinned)
    })?;
    Ok(num_bytes)
}

/// Calls `act` for each page with one of these names. A page that another process removes meanwhile is left out.
fn each_page(
    root: &Path,
    names: &HashSet<PageName>,
    mut act: impl FnMut(DiskPageKey, &Path) -> io::Result<()>,
) -> io::Result<()> {
    for (fingerprint, _) in fingerprints(root, |_| true)? {
        let page =
            |entry: &DirEntry, key: DiskPageKey| names.contains(&key.name).then(|| (key, entry.path()));
        let found = unless_gone(walk(&root.join(fingerprint), &AtomicBool::new(false), page))?;
        for (key, path) in found.unwrap_or_default() {
            unless_gone(act(key, &path))?;
        }
    }
    Ok(())
}
