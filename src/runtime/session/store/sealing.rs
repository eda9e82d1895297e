//! Sealed transcripts: lines whose records only the session's key opens.
//!
//! The first line names the key, in the clear; each line after it has a record as a string: base64 of the sealed record, bound to the
//! number of its line. Frames and checksums are those of plain lines, so that recovery after a crash is the same. A session is plain
//! or sealed from its first line on. Knows no file.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use llmctl_base::vault::{KeyId, KeyKind, SEAL_BYTES, SealKey, Vault};

/// Schema of a sealed file, of the family that older versions refuse.
pub const SCHEMA: &str = "llmctl.session.v7-sealed";

/// A longer first line is no header.
const MAX_HEADER_BYTES: usize = 512;

/// The first line.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealedHeader {
    /// `header`.
    r#type: String,
    schema: String,
    key: String,
    /// The key of the file that this one replaced, which is erased.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replaces: Option<String>,
}

/// The key of a transcript.
#[derive(Debug, Clone)]
pub struct SessionSeal {
    pub id: KeyId,
    pub replaces: Option<KeyId>,
    key: SealKey,
}

impl SessionSeal {
    /// Creates a key, in place of another if there is one.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn create(vault: &Vault, replaces: Option<KeyId>) -> std::io::Result<Self> {
        let id = KeyId::random();
        Ok(Self { id, replaces, key: vault.key_or_new(KeyKind::Session, id)? })
    }

    /// Returns the key that a header names.
    ///
    /// # Errors
    /// A sentence that continues "the session is encrypted, and".
    pub fn find(header: &SealedHeader, vault: Option<&Vault>) -> Result<Self, String> {
        let vault = vault.ok_or("its folder of keys is needed (--encrypt DIR)")?;
        let id = |hex: &str| KeyId::from_hex(hex).ok_or("its first line is damaged");
        let replaces = header.replaces.as_deref().map(id).transpose()?;
        let id = id(&header.key)?;
        let key = vault.key(KeyKind::Session, id).map_err(|reason| format!("{reason} (--encrypt)"))?;
        Ok(Self { id, replaces, key })
    }

    fn header(&self) -> String {
        let (key, replaces) = (self.id.to_string(), self.replaces.map(|id| id.to_string()));
        let header = SealedHeader { r#type: "header".to_owned(), schema: SCHEMA.to_owned(), key, replaces };
        serde_json::to_string(&header).expect("strings are always JSON")
    }

    /// Returns the lines of records behind `num_lines` lines.
    pub fn lines(&self, num_lines: usize, bodies: &[String]) -> Vec<String> {
        let header = (num_lines == 0).then(|| self.header());
        let first = num_lines + usize::from(header.is_some());
        let sealed = bodies.iter().enumerate().map(|(at, body)| {
            let sealed = self.key.seal(&context(first + at), body.as_bytes());
            format!("\"{}\"", STANDARD.encode(sealed))
        });
        header.into_iter().chain(sealed).collect()
    }

    /// Opens the line behind `num_lines` lines.
    pub fn open(&self, num_lines: usize, body: &str) -> Option<String> {
        let sealed = STANDARD.decode(body.strip_prefix('"')?.strip_suffix('"')?).ok()?;
        String::from_utf8(self.key.open(&context(num_lines), sealed)?).ok()
    }
}

/// Returns the context that a line is sealed with: its number, from 0.
fn context(num_lines: usize) -> [u8; 8] {
    (num_lines as u64).to_le_bytes()
}

/// Returns the most bytes that a record takes in a sealed line.
pub const fn sealed_len(num_bytes: u64) -> u64 {
    (num_bytes + SEAL_BYTES as u64).div_ceil(3) * 4 + 2
}

/// Parses a first record; `None` unless it is that of a sealed transcript.
pub fn header_of(body: &str) -> Option<SealedHeader> {
    let header: SealedHeader = serde_json::from_str(body).ok()?;
    (header.r#type == "header" && header.schema == SCHEMA).then_some(header)
}

/// Returns the keys that the first line of a transcript names, also if it is damaged elsewhere; none for a plain transcript.
pub fn keys_of(transcript: &[u8]) -> Vec<KeyId> {
    let first = transcript.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let first = String::from_utf8_lossy(&first[..first.len().min(MAX_HEADER_BYTES)]);
    let key = |name| first.split_once(name).and_then(|(_, rest)| KeyId::from_hex(rest.get(..64)?));
    ["\"key\":\"", "\"replaces\":\""].into_iter().filter_map(key).collect()
}

/// The records of a transcript.
#[derive(Debug, Default)]
pub struct OpenedLines<'a> {
    pub bodies: Vec<Cow<'a, str>>,
    /// `None` for a plain transcript.
    pub seal: Option<SessionSeal>,
    /// The first line, from 1, that its key does not open.
    pub damaged: Option<usize>,
}

impl OpenedLines<'_> {
    /// Number of lines before that of the first record.
    pub fn num_before(&self) -> usize {
        usize::from(self.seal.is_some())
    }
}

/// Opens the intact lines of a transcript.
///
/// # Errors
/// A sentence that continues "the session is encrypted, and".
pub fn open<'a>(bodies: &[&'a str], vault: Option<&Vault>) -> Result<OpenedLines<'a>, String> {
    let plain = || bodies.iter().copied().map(Cow::Borrowed).collect();
    let Some(header) = bodies.first().and_then(|body| header_of(body)) else {
        return Ok(OpenedLines { bodies: plain(), ..OpenedLines::default() });
    };
    let seal = SessionSeal::find(&header, vault)?;
    let mut opened = OpenedLines::default();
    for (at, body) in bodies.iter().enumerate().skip(1) {
        let Some(body) = seal.open(at, body) else {
            opened.damaged = Some(at + 1);
            break;
        };
        opened.bodies.push(Cow::Owned(body));
    }
    Ok(OpenedLines { seal: Some(seal), ..opened })
}
