//! Per token id: its text in the vocabulary, and the bytes it adds in the middle of a text.
//!
//! Both tables are flat (one buffer, one offset per id), because a vocabulary has up to 260 000 small
//! strings. Ids without a token are holes: padding up to the embedding's height, or gaps in the file.

use std::sync::LazyLock;

/// Strings by id in one buffer; an empty entry is a hole.
#[derive(Debug, Default)]
pub(super) struct Table {
    buffer: Vec<u8>,
    /// End of entry i, which starts where entry i - 1 ends.
    ends: Vec<u32>,
}

impl Table {
    /// Appends an entry.
    ///
    /// # Errors
    /// More than 4 GiB of text, far beyond any real vocabulary.
    pub fn push(&mut self, entry: &[u8]) -> Result<(), String> {
        self.buffer.extend_from_slice(entry);
        let end = u32::try_from(self.buffer.len()).map_err(|_| "the vocabulary is larger than 4 GiB")?;
        self.ends.push(end);
        Ok(())
    }

    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let index = usize::try_from(id).ok()?;
        let end = *self.ends.get(index)? as usize;
        let start = index.checked_sub(1).map_or(0, |previous| self.ends[previous] as usize);
        (start < end).then(|| &self.buffer[start..end])
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the bytes of the longest entry.
    pub fn longest(&self) -> usize {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        self.ends.iter().zip(starts).map(|(end, start)| (end - start) as usize).max().unwrap_or(0)
    }
}

/// Representation of bytes in a vocabulary's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's byte level: each byte is one of 256 printable characters.
    ByteLevel,
    /// SentencePiece: '▁' is a space, `<0xAB>` a byte.
    SentencePiece,
    /// Plain text.
    Literal,
}

impl Spelling {
    /// Returns the bytes of an ordinary token written `text`.
    pub fn bytes(self, text: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel => byte_level_bytes(text),
            Spelling::SentencePiece => match fallback_byte(text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
            Spelling::Literal => text.as_bytes().to_vec(),
        }
    }
}

/// Returns the byte of a byte-fallback token: `<0x0A>` is 10.
pub(super) fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let plain = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    plain.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Decodes GPT-2's spelling. A text with any other character is not in that spelling and stays as it is.
fn byte_level_bytes(text: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> =
        text.chars().map(|c| CHAR_TO_BYTE.get(c as usize).copied().flatten()).collect();
    bytes.unwrap_or_else(|| text.as_bytes().to_vec())
}

/// Returns the character that represents a byte.
pub(super) fn byte_level_char(byte: u8) -> char {
    let code = CHAR_TO_BYTE.iter().position(|&found| found == Some(byte));
    code.and_then(|code| char::from_u32(code as u32)).unwrap_or_default() // every byte has one
}

/// Spells bytes as GPT-2 does, a character for each.
pub fn byte_level_spelling(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| byte_level_char(byte)).collect()
}

/// GPT-2's `bytes_to_unicode`: printable Latin-1 represents itself, the other 68 bytes are U+0100 and up.
static CHAR_TO_BYTE: LazyLock<[Option<u8>; 256 + 68]> = LazyLock::new(|| {
    let mut table = [None; 256 + 68];
    let mut next = 256;
    for byte in 0..=255u8 {
        let code = match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => usize::from(byte),
            _ => {
                next += 1;
                next - 1
            }
        };
        table[code] = Some(byte);
    }
    table
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_spelling_is_gpt2s() {
        assert_eq!(Spelling::ByteLevel.bytes("Ġhello"), b" hello");
        assert_eq!(Spelling::ByteLevel.bytes("Ċ"), b"\n");
        assert_eq!(Spelling::ByteLevel.bytes("Ã©"), "é".as_bytes());
        assert_eq!(Spelling::ByteLevel.bytes("漢"), "漢".as_bytes(), "not byte-level: stands for itself");
        assert_eq!(CHAR_TO_BYTE.iter().flatten().count(), 256);
        for byte in 0..=255 {
            assert_eq!(Spelling::ByteLevel.bytes(&byte_level_char(byte).to_string()), [byte]);
        }
    }

    #[test]
    fn sentencepiece_spelling() {
        assert_eq!(Spelling::SentencePiece.bytes("▁a▁"), b" a ");
        assert_eq!(Spelling::SentencePiece.bytes("<0xE2>"), [0xe2]);
        assert_eq!(Spelling::SentencePiece.bytes("<0xE2"), b"<0xE2");
        assert_eq!(fallback_byte("<0x+1>"), None);
    }

    #[test]
    fn holes_and_out_of_range_ids_are_none() {
        let mut table = Table::default();
        table.push(b"a").unwrap();
        table.push(b"").unwrap();
        table.push(b"bc").unwrap();
        assert_eq!([0, 1, 2, 3].map(|id| table.get(id)), [Some(&b"a"[..]), None, Some(b"bc"), None]);
        assert_eq!((table.longest(), Table::default().longest()), (2, 0));
    }
}
