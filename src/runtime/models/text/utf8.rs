//! Decodes bytes that arrive in arbitrary pieces into complete characters.
//!
//! Tokens are byte strings, and a character may span several of them. Invariant: all text returned so far,
//! plus what `finish` returns, is exactly `String::from_utf8_lossy` of all bytes pushed. At most three bytes
//! are held back: the start of a character that later bytes can complete.

use std::borrow::Cow;
use std::str;

/// Incremental, lossy UTF-8 decoder.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    /// An incomplete but so far valid character; at most three bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes and returns every character that is complete. An invalid sequence becomes one U+FFFD per
    /// maximal subpart (Unicode 15, section 3.9, as in the standard library) as soon as it is recognised.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.pending.is_empty() {
            bytes
        } else {
            joined = [self.pending.as_slice(), bytes].concat();
            joined.as_slice()
        };
        let mut text = String::with_capacity(rest.len());
        let held = loop {
            let error = match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break &[][..];
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            text.push_str(str::from_utf8(valid).expect("from_utf8 reported this prefix as valid"));
            let Some(length) = error.error_len() else { break invalid };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &invalid[length..];
        };
        self.pending = held.to_vec();
        text
    }

    /// Ends the stream. An unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        if self.pending.is_empty() {
            return String::new();
        }
        self.pending.clear();
        char::REPLACEMENT_CHARACTER.to_string()
    }

    /// Returns whether bytes are held back that later bytes may complete.
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// Returns JSON text with U+FFFD in place of escaped halves of characters, at the same length.
pub fn without_lone_surrogates(text: &[u8]) -> Cow<'_, [u8]> {
    let mut text = Cow::Borrowed(text);
    let mut at = 0;
    while let Some(offset) = text[at..].iter().position(|&byte| byte == b'\\') {
        at += offset;
        match (surrogate(&text[at..]), text.get(at + 6..).and_then(surrogate)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..)) => at += 12,
            (Some(_), _) => {
                text.to_mut()[at + 2..at + 6].copy_from_slice(b"fffd");
                at += 6;
            }
            (None, _) => at = text.len().min(at + 2), // an escape of another kind
        }
    }
    text
}

/// Returns the half of a character that a text begins with as an escape.
fn surrogate(text: &[u8]) -> Option<u16> {
    let digits =
        text.strip_prefix(b"\\u")?.get(..4).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))?;
    let unit = u16::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    (0xd800..=0xdfff).contains(&unit).then_some(unit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pieces: &[&[u8]]) -> String {
        let mut stream = Utf8Stream::new();
        let mut text: String = pieces.iter().map(|piece| stream.push(piece)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Bytes that are mostly UTF-8 with damage: random bytes alone would rarely form long characters.
    fn damaged_text() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            any::<char>().prop_map(|c| c.to_string().into_bytes()[..c.len_utf8() - 1].to_vec()),
            any::<u8>().prop_map(|byte| vec![byte]),
            "[a-z ]{0,4}".prop_map(String::into_bytes),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_split_equals_the_lossy_whole(bytes in damaged_text(), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12)) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(decode(&pieces), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn nothing_complete_is_held(bytes in damaged_text()) {
            let mut stream = Utf8Stream::new();
            let mut text = String::new();
            for (index, &byte) in bytes.iter().enumerate() {
                text.push_str(&stream.push(&[byte]));
                // Held-back bytes must be exactly an incomplete character at the end of the bytes so far.
                let seen = &bytes[..=index];
                let whole = String::from_utf8_lossy(seen);
                let tail = (0..=3.min(seen.len())).find(|&n| text == String::from_utf8_lossy(&seen[..seen.len() - n]));
                prop_assert!(tail.is_some(), "{text:?} of {whole:?}");
                if stream.is_pending() {
                    let incomplete = str::from_utf8(&seen[seen.len() - stream.pending.len()..]).unwrap_err();
                    prop_assert_eq!((incomplete.valid_up_to(), incomplete.error_len()), (0, None));
                } else {
                    prop_assert_eq!(&text, &whole);
                }
            }
        }
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let mut stream = Utf8Stream::new();
        let llama = "🦙".as_bytes();
        assert_eq!(stream.push(&llama[..3]), "");
        assert!(stream.is_pending());
        assert_eq!(stream.push(&llama[3..]), "🦙");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_broken_character_does_not_swallow_its_successor() {
        assert_eq!(decode(&[b"\xe2\x82", b"A"]), "\u{fffd}A");
        assert_eq!(decode(&[b"\xf0\x9f"]), "\u{fffd}");
        assert_eq!(decode(&[b"\xff", b"\xfe"]), "\u{fffd}\u{fffd}");
    }
}
