//! A repository's files at one commit: revision to commit, then the tree, page by page.
//!
//! Everything in an answer is untrusted: a path or hash that could leave the cache's folder is left out.

use serde_json::Value;

use super::client::{HubClient, JsonAnswer, RequestSubject};
use super::error::HubError;
use super::observer::PullObserver;

/// Limits on a tree; the hub sends a thousand entries in a page.
const MAX_PAGES: usize = 1000;
const MAX_ENTRIES: usize = 100_000;

/// Most bytes of a file, 64 TiB: the sizes of all entries can be summed.
const MAX_FILE_BYTES: u64 = 1 << 46;

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Relative to the repository, with `/`.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// The hash of the content, which names the blob.
    pub hash: FileHash,
    /// Git's own name of the entry; for a large file it is that of a pointer.
    pub(super) blob_id: String,
    /// Name in the hub's chunk store, which llmctl does not use.
    pub(super) xet_hash: Option<String>,
}

impl RemoteFile {
    /// Reads an entry of a tree; `None` for a folder, and for names and sizes that cannot be of files of the cache.
    pub fn of_entry(entry: &Value) -> Option<Self> {
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        if !is_file(entry) {
            return None;
        }
        let lfs = entry.get("lfs").filter(|lfs| lfs.is_object());
        let path = text(entry, "path").filter(|path| is_safe_path(path))?;
        let hash = FileHash::parse(&lfs.map_or_else(|| text(entry, "oid"), |lfs| text(lfs, "oid"))?)?;
        let blob_id = text(entry, "oid").filter(|oid| FileHash::parse(oid).is_some())?;
        let xet_hash = text(entry, "xetHash").filter(|hash| FileHash::parse(hash).is_some());
        let size = lfs.and_then(|lfs| lfs.get("size")).or_else(|| entry.get("size"))?.as_u64()?;
        (size <= MAX_FILE_BYTES).then_some(Self { path, size, hash, blob_id, xet_hash })
    }
}

/// The hash that names a file's content, in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileHash {
    hex: String,
}

impl FileHash {
    /// Returns the hash of 64 digits (sha256 of a large file) or 40 (git's sha1 of a small one).
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let is_hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        (is_hex && matches!(text.len(), 40 | 64)).then(|| Self { hex: text.to_owned() })
    }

    pub fn hex(&self) -> &str {
        &self.hex
    }

    pub(super) fn is_sha256(&self) -> bool {
        self.hex.len() == 64
    }
}

/// The files of a repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteListing {
    /// As the user names it, which is also its name in the cache.
    pub repo: String,
    /// The hub's current name, if the repository was renamed.
    pub renamed: Option<String>,
    pub revision: String,
    pub commit: String,
    pub files: Vec<RemoteFile>,
    /// No entry was left out.
    pub(super) is_whole: bool,
}

impl RemoteListing {
    pub fn file(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Asks the hub for the files of `repo` at `revision`.
///
/// # Errors
/// The hub's refusal, with the existing revisions if it has no such one; [`HubError::Cancelled`].
pub(super) fn list_remote(
    client: &HubClient,
    repo: &str,
    revision: &str,
    observer: &dyn PullObserver,
) -> Result<RemoteListing, HubError> {
    let subject = RequestSubject { repo, revision, path: None };
    let url = client.address(&format!("api/models/{repo}/revision/{}", encoded(revision, false)));
    let answer = client.json(&url, subject, observer).map_err(|error| match error {
        HubError::RevisionNotFound { repo, revision, .. } => {
            let existing = revisions(client, subject, observer);
            HubError::RevisionNotFound { repo, revision, existing }
        }
        other => other,
    })?;
    let commit = answer.value.get("sha").and_then(Value::as_str).filter(|sha| is_commit(sha));
    let Some(commit) = commit.map(str::to_owned) else {
        let message = "the answer names no commit; is this the address of a Hugging Face hub?".to_owned();
        return Err(HubError::Unexpected { url, message });
    };
    if answer.value.get("disabled").and_then(Value::as_bool) == Some(true) {
        return Err(HubError::Disabled { repo: repo.to_owned() });
    }
    let renamed = current_name(&answer.url).filter(|name| name != repo);
    let asked = renamed.as_deref().unwrap_or(repo);
    let mut next =
        Some(client.address(&format!("api/models/{asked}/tree/{commit}?recursive=true&expand=false")));
    let (mut files, mut num_entries, mut num_seen) = (Vec::new(), 0, 0);
    for _ in 0..MAX_PAGES {
        let Some(url) = next.take() else { break };
        let page: JsonAnswer = client.json(&url, subject, observer)?;
        let Some(entries) = page.value.as_array() else {
            let message = "the answer is no list of files".to_owned();
            return Err(HubError::Unexpected { url, message });
        };
        num_seen += entries.len();
        if num_seen > MAX_ENTRIES {
            let message = format!("the repository has more than {MAX_ENTRIES} files and folders");
            return Err(HubError::Unexpected { url, message });
        }
        num_entries += entries.iter().filter(|entry| is_file(entry)).count();
        files.extend(entries.iter().filter_map(RemoteFile::of_entry));
        // Behind a mirror the address may be the hub's own, which the user cannot or must not reach.
        next = page.next.map(|link| match link.find("/api/models/") {
            Some(at) => client.address(&link[at + 1..]),
            None => link,
        });
    }
    let is_whole = num_entries == files.len() && next.is_none();
    let (repo, revision) = (repo.to_owned(), revision.to_owned());
    Ok(RemoteListing { repo, renamed, revision, commit, files, is_whole })
}

/// Lists branches and tags; none if the hub does not say.
fn revisions(client: &HubClient, subject: RequestSubject<'_>, observer: &dyn PullObserver) -> Vec<String> {
    let url = client.address(&format!("api/models/{}/refs", subject.repo));
    let Ok(answer) = client.json(&url, subject, observer) else { return Vec::new() };
    let names = |kind: &str| {
        let list = answer.value.get(kind).and_then(Value::as_array).cloned().unwrap_or_default();
        list.iter().filter_map(|entry| Some(entry.get("name")?.as_str()?.to_owned())).collect::<Vec<_>>()
    };
    [names("branches"), names("tags")].concat()
}

/// Returns `org/name` of `.../api/models/org/name/revision/...`.
fn current_name(url: &str) -> Option<String> {
    let rest = url.split("/api/models/").nth(1)?;
    rest.split("/revision/").next().map(str::to_owned)
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn is_file(entry: &Value) -> bool {
    entry.get("type").and_then(Value::as_str) == Some("file")
}

/// Returns whether a path stays inside the folder that it is joined to, on every system.
fn is_safe_path(path: &str) -> bool {
    let is_odd = |c: char| c.is_control() || matches!(c, '\\' | ':');
    path.len() <= 1024
        && path
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != ".." && !part.contains(is_odd))
}

/// Percent-encodes a path for an address (RFC 3986, unreserved characters), with its slashes if `keeps_slashes`.
pub(super) fn encoded(path: &str, keeps_slashes: bool) -> String {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b) || (keeps_slashes && b == b'/');
    path.bytes().fold(String::new(), |mut text, byte| {
        match is_plain(byte) {
            true => text.push(char::from(byte)),
            false => text.push_str(&format!("%{byte:02X}")),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn entries_of_a_tree() {
        let sha256 = "a".repeat(64);
        let large = json!({"type": "file", "path": "a/b.gguf", "size": 130, "oid": "0".repeat(40),
            "lfs": {"oid": sha256, "size": 4096, "pointerSize": 130}});
        let file = RemoteFile::of_entry(&large).expect("a file");
        assert_eq!((file.path.as_str(), file.size, file.hash.hex()), ("a/b.gguf", 4096, sha256.as_str()));
        assert!(file.hash.is_sha256());
        let small = |path: &str, oid: &str| json!({"type": "file", "path": path, "size": 3, "oid": oid});
        assert!(
            !RemoteFile::of_entry(&small("config.json", &"1".repeat(40))).expect("a file").hash.is_sha256()
        );
        for path in ["../x", "/etc/x", "a/../../x", "a//b", "C:/x", "a\\b", "", "a/\u{0}"] {
            assert_eq!(RemoteFile::of_entry(&small(path, &"1".repeat(40))), None, "{path:?}");
        }
        for oid in ["../../x", "", "ABCDEF", &"g".repeat(40)] {
            assert_eq!(RemoteFile::of_entry(&small("x", oid)), None, "{oid:?}");
        }
        let large = json!({"type": "file", "path": "x", "size": 1u64 << 63, "oid": "1".repeat(40)});
        assert_eq!(RemoteFile::of_entry(&large), None, "two of them have no sum");
        assert_eq!(
            RemoteFile::of_entry(&json!({"type": "directory", "path": "a", "oid": "1".repeat(40)})),
            None
        );
    }

    #[test]
    fn names_and_addresses() {
        assert_eq!(encoded("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(encoded("a b/\u{e9}#?.gguf", true), "a%20b/%C3%A9%23%3F.gguf");
        let url = "https://h/api/models/new/name/revision/main";
        assert_eq!(current_name(url).as_deref(), Some("new/name"));
    }
}
