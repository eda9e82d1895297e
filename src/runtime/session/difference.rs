//! Describes where a session and a prompt part: the answer to "why was this not resumed?".
//!
//! Pure. A difference is the first token at which session and prompt differ or one of them ends; an image differs at its
//! first row. A prompt that continues the session has none.

use crate::request::{Difference, ImageDifference};
use llmctl_models::kv::Tokens;
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
    /// Set if they part at an image.
    pub image: Option<ImageDifference>,
}

impl ImageDifference {
    /// Returns the difference as a clause, e.g. `image 2 (photo.png) is another one`; `name` is what the user calls the image.
    pub fn clause(&self, name: Option<&str>) -> String {
        let name = name.map(|name| format!(" ({name})")).unwrap_or_default();
        let what = match (self.in_session, self.in_prompt) {
            (true, false) => "of the session is not in the prompt there",
            (false, _) => "was not in the session there",
            (true, true) => "is another one",
        };
        format!("image {}{name} {what}", self.index + 1)
    }
}

impl Difference {
    /// Returns `None` if the prompt begins with all of `known`, or its adapters are others.
    pub fn between<'k, 'p>(known: impl Into<Tokens<'k>>, prompt: impl Into<Tokens<'p>>) -> Option<Self> {
        let (known, prompt) = (known.into(), prompt.into());
        let position = known.common_prefix(prompt);
        let next = |tokens: Tokens<'_>| tokens.ids[position..tokens.len().min(position + AROUND)].to_vec();
        let is_alike = known.adapters == prompt.adapters;
        (is_alike && position < known.len()).then(|| Self {
            position,
            before: known.ids[position.saturating_sub(AROUND)..position].to_vec(),
            session: next(known),
            prompt: next(prompt),
            image: ImageDifference::at(position, known, prompt),
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
            image: self.image,
        }
    }
}

impl ImageDifference {
    /// Returns the image that begins at `position`, up to which both are equal, in one of them or both.
    fn at(position: usize, known: Tokens<'_>, prompt: Tokens<'_>) -> Option<Self> {
        let begins = |tokens: Tokens<'_>| {
            let span = tokens.image_at(position).filter(|_| position < tokens.len());
            span.is_some_and(|span| span.rows.start == position)
        };
        let (in_session, in_prompt) = (begins(known), begins(prompt));
        let num_before = |position: usize| known.num_images(position);
        let index = position.checked_sub(1).map_or(0, num_before);
        (in_session || in_prompt).then_some(Self { index, in_session, in_prompt })
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
    use llmctl_models::images::{ImageKey, ImageSpan};
    use llmctl_models::kv::TokenBuf;

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
        let Explanation { position, before, session, prompt, .. } =
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
        let foreign =
            Difference { position: 1, before: vec![999], session: vec![65], prompt: vec![], image: None };
        assert_eq!(foreign.explain(&Bytes).before, "", "an id without a token has no text");
    }

    #[test]
    fn an_image_that_differs_is_told_by_its_number() {
        let image = |rows: std::ops::Range<usize>, key: u8| ImageSpan {
            grid: [1, rows.len() as u32],
            rows,
            key: ImageKey([key; 32]),
            first: 0,
        };
        let text = |images: &[ImageSpan]| TokenBuf {
            ids: vec![7; 20],
            images: images.to_vec(),
            ..TokenBuf::default()
        };
        let known = text(&[image(2..5, 1), image(8..12, 2)]);
        let clause = |images: &[ImageSpan], name: Option<&str>| {
            let difference = Difference::between(&known, &text(images)).expect("they differ");
            (difference.position, difference.image.map(|image| image.clause(name)))
        };
        let other = [image(2..5, 1), image(8..12, 3)];
        assert_eq!(clause(&other, Some("a.png")), (8, Some("image 2 (a.png) is another one".to_owned())));
        let dropped = "image 2 of the session is not in the prompt there".to_owned();
        assert_eq!(clause(&other[..1], None), (8, Some(dropped)));
        let new = "image 1 was not in the session there".to_owned();
        assert_eq!(clause(&[image(1..4, 1)], None), (1, Some(new)));
        let mut edited = known.clone();
        edited.ids[6] = 8;
        assert_eq!(Difference::between(&known, &edited).expect("they differ").image, None, "text differs");
    }
}
