//! Session names and their folder names.
//!
//! A name comes from users and HTTP clients: it is data, never a path. Its folder name contains only
//! `a-z 0-9 - _ % ~`, starts with no dot, is no device name of Windows, and is unique even where file names
//! ignore case. The encoding has exactly one inverse, so the folder name identifies the session. Touches no
//! file.

use std::fmt;

use crate::request::EngineSessionName;
use llmctl_base::error::{Error, Result};

/// Most bytes of a name.
pub const MAX_NAME_BYTES: usize = 128;
/// Most bytes of a session's name within a branch's name; the rest is for the number.
pub(super) const MAX_BRANCHED_BYTES: usize = MAX_NAME_BYTES - 12;
/// Percent-encoded names longer than this use the denser encoding; common file systems allow 255 bytes.
const MAX_PLAIN_BYTES: usize = 200;
/// RFC 4648 base 32 in lower case, without padding.
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// A valid name: 1 to 128 printable ASCII characters (0x21 to 0x7E) without `/` and `\`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionName(String);

impl SessionName {
    /// Validates a name.
    ///
    /// # Errors
    /// [`Error::InvalidParameter`] with what is wrong.
    pub fn new(name: &str) -> Result<Self> {
        let refuse = |message| Err(Error::InvalidParameter { name: "session", message });
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            let len = name.len();
            return refuse(format!("a name has 1 to {MAX_NAME_BYTES} characters, not {len}"));
        }
        if name.chars().any(|c| !c.is_ascii_graphic() || matches!(c, '/' | '\\')) {
            return refuse(format!(
                "name {name:?}: use letters a-z and A-Z, digits and punctuation marks, but no spaces, \"/\" or \"\\\""
            ));
        }
        Ok(Self(name.to_owned()))
    }

    /// Returns the name of a session's `number`th branch: `NAME~1`, with the end of a long name cut off.
    pub(super) fn branch(base: &str, number: usize) -> Self {
        Self(format!("{}~{number}", &base[..base.len().min(MAX_BRANCHED_BYTES)]))
    }

    /// Splits a branch's name into the session's name and the number.
    pub(super) fn branch_parts(&self) -> Option<(&str, usize)> {
        let (base, number) = self.0.rsplit_once('~').filter(|(base, _)| !base.is_empty())?;
        let is_number = number.starts_with(|c: char| c.is_ascii_digit() && c != '0');
        let number = number.parse().ok().filter(|_| is_number)?;
        Some((base, number))
    }

    /// Returns whether the name has a branch's form.
    pub fn is_of_branch(&self) -> bool {
        self.branch_parts().is_some()
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name of the session's folder.
    pub(super) fn to_folder(&self) -> String {
        let plain = percent_encoded(&self.0);
        if plain.len() <= MAX_PLAIN_BYTES { plain } else { format!("~{}", base32(self.0.as_bytes())) }
    }

    /// Parses a folder name; `None` if it is not a session's.
    pub fn from_folder(folder: &str) -> Option<Self> {
        let bytes = match folder.strip_prefix('~') {
            Some(dense) => base32_decoded(dense)?,
            None => percent_decoded(folder)?,
        };
        let name = Self::new(&String::from_utf8(bytes).ok()?).ok()?;
        (name.to_folder() == folder).then_some(name) // each session has one folder name only
    }
}

impl From<&SessionName> for EngineSessionName {
    fn from(name: &SessionName) -> Self {
        Self::of_valid(&name.0)
    }
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the folder of an owner's sessions.
pub(super) fn owner_folder(owner: &str) -> String {
    percent_encoded(owner)
}

/// Parses the name of an owner's folder; `None` if it is not one.
pub(super) fn owner_of_folder(folder: &str) -> Option<String> {
    let owner = String::from_utf8(percent_decoded(folder)?).ok()?;
    (owner_folder(&owner) == folder).then_some(owner)
}

fn percent_encoded(name: &str) -> String {
    let escape_first = is_device(name);
    let mut folder = String::with_capacity(name.len());
    for (at, byte) in name.bytes().enumerate() {
        let plain = byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_');
        if plain && !(escape_first && at == 0) {
            folder.push(char::from(byte));
        } else {
            folder.push_str(&format!("%{byte:02x}"));
        }
    }
    folder
}

/// Returns whether Windows reserves the name for a device. Other spellings (upper case, with an extension)
/// are escaped anyway.
fn is_device(name: &str) -> bool {
    let numbered = |prefix| {
        name.strip_prefix(prefix).is_some_and(|n: &str| n.len() == 1 && n.as_bytes()[0].is_ascii_digit())
    };
    matches!(name, "con" | "prn" | "aux" | "nul") || numbered("com") || numbered("lpt")
}

/// Decodes `%20` and the like; `None` for a `%` before anything but two hexadecimal digits.
pub fn percent_decoded(folder: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(folder.len());
    let mut rest = folder.as_bytes();
    while let [first, after @ ..] = rest {
        if *first == b'%' {
            let digits = str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    Some(bytes)
}

fn base32(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 8 / 5 + 1);
    let (mut buffer, mut num_bits) = (0u32, 0);
    for &byte in bytes {
        buffer = buffer << 8 | u32::from(byte);
        num_bits += 8;
        while num_bits >= 5 {
            num_bits -= 5;
            text.push(char::from(BASE32[(buffer >> num_bits & 31) as usize]));
        }
        buffer &= (1 << num_bits) - 1;
    }
    if num_bits > 0 {
        text.push(char::from(BASE32[(buffer << (5 - num_bits) & 31) as usize]));
    }
    text
}

fn base32_decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 5 / 8);
    let (mut buffer, mut num_bits) = (0u32, 0);
    for digit in text.bytes() {
        let value = BASE32.iter().position(|&known| known == digit)?;
        buffer = buffer << 5 | value as u32;
        num_bits += 5;
        if num_bits >= 8 {
            num_bits -= 8;
            bytes.push((buffer >> num_bits) as u8);
        }
        buffer &= (1 << num_bits) - 1;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn folder(name: &str) -> String {
        SessionName::new(name).expect("a valid name").to_folder()
    }

    #[test]
    fn names_are_one_to_128_printable_characters_without_separators() {
        for good in ["a", "A.b:c", "..", ".", "%41", "~x", "con", "*?<>|\"", &"x".repeat(128)] {
            assert!(SessionName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a/b", "a\\b", "../x", "é", "a\n", "\0", "a\u{7f}", &"x".repeat(129)] {
            let error = SessionName::new(bad).expect_err(bad);
            assert!(matches!(error, Error::InvalidParameter { name: "session", .. }), "{bad}: {error}");
        }
    }

    #[test]
    fn folders_are_readable_and_harmless() {
        for (name, expected) in [
            ("work-2_b", "work-2_b"),
            ("Work", "%57ork"),
            ("..", "%2e%2e"),
            ("a.b", "a%2eb"),
            ("%41", "%2541"),
            ("con", "%63on"),
            ("com7", "%63om7"),
            ("comb", "comb"),
            ("~x", "%7ex"),
        ] {
            assert_eq!(folder(name), expected);
        }
        assert!(folder(&"Z".repeat(128)).starts_with('~'), "too long in the plain form");
        for stranger in
            ["", ".new-1", "%2", "%zz", "Work", "%61", "con", "~me", "a.b", "lost+found", "é", "%"]
        {
            assert_eq!(SessionName::from_folder(stranger), None, "{stranger}");
        }
    }

    proptest! {
        #[test]
        fn every_name_has_its_own_folder(name in "[!-.0-\\[\\]-~]{1,128}") {
            let name = SessionName::new(&name).expect("the pattern draws valid names");
            let folder = name.to_folder();
            prop_assert!(folder.len() <= 255);
            prop_assert!(folder.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_%~".contains(&b)));
            prop_assert_eq!(SessionName::from_folder(&folder), Some(name));
        }

        #[test]
        fn any_folder_name_is_a_session_or_none(folder in "\\PC{0,40}") {
            if let Some(name) = SessionName::from_folder(&folder) {
                prop_assert_eq!(name.to_folder(), folder);
            }
        }
    }
}
