//! A session in one file, for another machine: its conversation and branches, images, and the KV that makes it warm at once. Or
//! prompts that were computed ahead, and their KV.
//!
//! The file is a tar archive under zstd: `manifest.json`, then exactly the parts that it lists, in its order. A skippable frame of
//! zstd behind it has the SHA-256 of all bytes before, so that each changed or missing byte is found before anything is unpacked;
//! `tar --zstd` reads the file too. `pack` makes such files, `contents` checks them, `unpack` imports them.
//!
//! Invariants: nothing of a file is used before all of it was checked, twice over: once for damage, once for what a part is (a
//! conversation that replays, a page of it, an image that it names). Names of a file are parsed, never used as paths. No size that
//! a file claims is trusted for an allocation, and the sizes of all parts are bounded by the size of the file.

mod contents;
mod pack;
mod unpack;

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::folder::MAX_FILE_BYTES;
use llmctl_base::error::{Error, StoreError};
use llmctl_image::ImageHash;
use llmctl_models::images::ImageKey;
use llmctl_models::kv::disk::{DiskPageKey, PageLabel, file_name, parse_file_name};
use llmctl_models::load::Fingerprint;

pub use self::pack::Package;
pub use self::unpack::{Archive, Import, Imported, ImportedPages};

const SCHEMA: &str = "llmctl.session-archive.v1";
const MANIFEST: &str = "manifest.json";
/// Largest manifest, in bytes: of some 300,000 parts.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// Largest part, in bytes.
const MAX_PART_BYTES: u64 = MAX_FILE_BYTES;
/// Most bytes of all parts for each byte of the file, and beyond that: real conversations and KV stay far below.
const MAX_RATIO: u64 = 1000;
const FREE_BYTES: u64 = 64 << 20;

/// The frame at the end: magic number of a skippable frame (RFC 8878, 3.1.2) and its length, a name, the SHA-256.
const SEAL_NAME: &[u8; 24] = b"\x50\x2a\x4d\x18\x30\x00\x00\x00llmctl archive 1";
const SEAL_BYTES: u64 = 24 + 32;

/// What is in an archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveManifest {
    schema: String,
    /// Version of llmctl that wrote the file.
    pub llmctl: String,
    pub created_ms: u64,
    /// The session, then its branches; none in a file of prompts.
    pub sessions: Vec<ArchivedSession>,
    /// Names of prompts that were computed ahead; none in a file of a session.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,
    /// Models that computed KV.
    pub models: Vec<ArchivedModel>,
    parts: Vec<ArchivedPart>,
}

/// A conversation in an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchivedSession {
    pub name: String,
    pub turns: usize,
}

/// A model whose pages are in an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchivedModel {
    pub fingerprint: String,
    /// See [`Fingerprint::facts`].
    pub made_of: Value,
    /// SHA-256 of each weight file; `None` if the model was not there when the file was written, or is part of the program.
    pub weights_sha256: Option<Vec<String>>,
}

impl ArchivedModel {
    fn to_fingerprint(&self) -> Fingerprint {
        Fingerprint { hex: self.fingerprint.clone(), facts: self.made_of.clone() }
    }

    /// Returns a setting of the model, such as `kv_type`; a dash if there is none.
    pub fn setting(&self, name: &str) -> &str {
        self.made_of[name].as_str().unwrap_or("-")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ArchivedPart {
    name: PartName,
    bytes: u64,
    sha256: String,
}

/// Name of a part, which says what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
enum PartName {
    /// The transcript of a session, by its place in the manifest.
    Session(usize),
    /// The record of a prompt that was computed ahead, by its place in the manifest.
    Prompt(usize),
    /// The bytes of an image.
    Image(ImageHash),
    /// The embeddings of an image.
    Rows(ImageKey),
    /// A page of KV of a model, by its place in the manifest.
    Page(usize, DiskPageKey),
}

impl fmt::Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session(at) => write!(f, "sessions/{at}.jsonl"),
            Self::Prompt(at) => write!(f, "prompts/{at}.json"),
            Self::Image(hash) => write!(f, "images/{hash}"),
            Self::Rows(key) => write!(f, "rows/{key}"),
            Self::Page(model, key) => write!(f, "kv/{model}/{}", file_name(*key)),
        }
    }
}

impl From<PartName> for String {
    fn from(name: PartName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for PartName {
    type Error = String;

    /// Takes only the spelling that is written, so that no name is a path elsewhere.
    fn try_from(text: String) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok();
        let parsed = match text.split_once('/') {
            Some(("sessions", rest)) => rest.strip_suffix(".jsonl").and_then(number).map(Self::Session),
            Some(("prompts", rest)) => rest.strip_suffix(".json").and_then(number).map(Self::Prompt),
            Some(("images", hex)) => ImageHash::from_hex(hex).map(Self::Image),
            Some(("rows", hex)) => ImageHash::from_hex(hex).map(|hash| Self::Rows(ImageKey(hash.0))),
            Some(("kv", rest)) => rest
                .split_once('/')
                .and_then(|(model, file)| Some(Self::Page(number(model)?, parse_file_name(file)?))),
            _ => None,
        };
        parsed.filter(|name| name.to_string() == text).ok_or_else(|| format!("{text:?} is no name of a part"))
    }
}

/// What a part holds, checked.
enum PartContent {
    /// A session or one of its branches.
    Session,
    /// A prompt that was computed ahead.
    Prompt,
    /// The file of an image.
    Image(ImageHash),
    /// The rows of an image.
    Rows(ImageKey),
    /// A page of a model; its depth is that in the conversation.
    Page { model: usize, label: PageLabel, payload: std::ops::Range<usize> },
}

fn refusal(path: &Path, message: impl fmt::Display) -> Error {
    StoreError::Unsupported { path: path.into(), message: message.to_string() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_spelling_is_a_name() {
        let hex = "0123456789abcdef".repeat(4);
        for name in [
            "sessions/0.jsonl".to_owned(),
            "prompts/10.json".to_owned(),
            format!("images/{hex}"),
            format!("rows/{hex}"),
            format!("kv/1/{hex}-2.kv"),
        ] {
            let parsed = PartName::try_from(name.clone()).expect("a name");
            assert_eq!(String::from(parsed), name);
        }
        for bad in [
            "",
            "/",
            "..",
            "manifest.json",
            "sessions/00.jsonl",
            "sessions/+1.jsonl",
            "/sessions/0.jsonl",
            "sessions/../0.jsonl",
            "images/",
            "images/x",
            "kv/0",
            "kv/0/x.kv",
            "../kv/0",
        ] {
            assert!(PartName::try_from(bad.to_owned()).is_err(), "{bad}");
        }
        for bad in [
            format!("images/{}", hex.to_uppercase()),
            format!("kv/01/{hex}-2.kv"),
            format!("kv/1/../1/{hex}-2.kv"),
            format!("./images/{hex}"),
        ] {
            assert!(PartName::try_from(bad.clone()).is_err(), "{bad}");
        }
    }
}
