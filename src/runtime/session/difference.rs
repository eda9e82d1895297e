//! Describes where a session and a prompt part: the answer to "why was this not resumed?".
//!
//! Pure. A difference is the first token at which session and prompt differ or one of them ends. A prompt
//! that continues the session has none.

use super::prefill::common_prefix;
use crate::request::Difference;
use llmctl_models::text::Vocabulary;

/// Tokens shown before a difference, and of each side after it.
const AROUND: usize = 8;

/// A difference as text. Parts of characters show as U+FFFD, control characters as `\n`, `\u{1b}` and so on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Number of equal tokens before it.
    pub position: usize,
    pub before: String,
    /// Continuation of the session; empty if it ends there.
    pub session: String,
    /// Continuation of the prompt; empty if it ends there.
    pub prompt: String,
}

impl Difference {
    /// Returns `None` if the prompt begins with all of `known`.
    pub fn between(known: &[u32], prompt: &[u32]) -> Option<Self> {
        let position = common_prefix(known, prompt);
        let next = |tokens: &[u32]| tokens[position..tokens.len().min(position + AROUND)].to_vec();
        (position < known.len()).then(|| Self {
            position,
            before: known[position.saturating_sub(AROUND)..position].to_vec(),
            session: next(known),
            prompt: next(prompt),
        })
    }

    pub fn explain(&self, vocabulary: &dyn Vocabulary) -> Explanation {
        let text = |ids: &[u32]| {
            let bytes: Vec<u8> = ids
                .iter()
                .filter_map(|&id| vocabulary.token_bytes(id))
                .flat_map(|b| b.into_owned())
                .collect();
            visible(&String::from_utf8_lossy(&bytes))
        };
        Explanation {
            position: self.position,
            before: text(&self.before),
            session: text(&self.session),
            prompt: text(&self.prompt),
        }
    }
}

/// Escapes control characters and the backslash as in a Rust string.
fn visible(text: &str) -> String {
    let escaped = |c: char| match c {
        '\\' => "\\\\".to_owned(),
        _ if c.is_control() => c.escape_default().to_string(),
        _ => c.to_string(),
    };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    /// Token n is the byte n.
    struct Bytes;

    impl Vocabulary for Bytes {
        fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
            u8::try_from(id).ok().map(|byte| vec![byte].into())
        }

        fn is_special(&self, _id: u32) -> bool {
            false
        }
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn explained(known: &str, prompt: &str) -> Option<(usize, String, String, String)> {
        let Explanation { position, before, session, prompt } =
            Difference::between(&ids(known), &ids(prompt))?.explain(&Bytes);
        Some((position, before, session, prompt))
    }

    #[test]
    fn a_prompt_that_goes_on_has_no_difference() {
        for (known, prompt) in [("", ""), ("", "abc"), ("abc", "abc"), ("abc", "abcd")] {
            assert_eq!(explained(known, prompt), None, "{known:?} {prompt:?}");
        }
    }

    #[test]
    fn the_first_difference_is_shown_with_what_is_around_it() {
        let check = |known: &str, prompt: &str, wanted: (usize, &str, &str, &str)| {
            let (position, before, session, prompt) = explained(known, prompt).expect("they differ");
            assert_eq!((position, &*before, &*session, &*prompt), wanted);
        };
        check("abc", "axc", (1, "a", "bc", "xc"));
        check("abc", "xbc", (0, "", "abc", "xbc"));
        check("abc", "ab", (2, "ab", "c", ""));
        check("abc", "", (0, "", "abc", ""));
        check("0123456789abcdefghijklm", "0123456789Abcdefghijklm", (10, "23456789", "abcdefgh", "Abcdefgh"));
    }

    #[test]
    fn text_is_whole_where_it_can_be_and_never_controls_a_terminal() {
        // The euro sign is three tokens here, and parts from another one in its last byte.
        let (position, before, session, prompt) = explained("a\u{20ac}", "a\u{20ad}").expect("they differ");
        assert_eq!((position, &*before, &*session, &*prompt), (3, "a\u{fffd}", "\u{fffd}", "\u{fffd}"));
        let (_, before, session, _) = explained("\\\n\x1b[0m\u{20ac}", "\\\n").expect("they differ");
        assert_eq!((&*before, &*session), ("\\\\\\n", "\\u{1b}[0m\u{20ac}"));
        let foreign = Difference { position: 1, before: vec![999], session: vec![65], prompt: vec![] };
        assert_eq!(foreign.explain(&Bytes).before, "", "an id without a token has no text");
    }
}
