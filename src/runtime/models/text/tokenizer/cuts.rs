//! Positions at which a long text may be cut, so that the parts together have the ids of the whole.
//!
//! The library needs some hundred bytes for each byte that it splits into words, so a text goes through it in
//! windows. A window is cut between words, well before its end: the known rules look at no more than their
//! match, the run of characters after it, and no byte before it (the table has no look-behind). So text
//! before a cut has the same words in the window as in the whole, and text after it starts a word in both.
//! Three rules split a run of digits or white space into many words that depend on what follows the run, so
//! they are not cut within one, nor just before it: the window grows until it contains the run.
//!
//! Invariant: if any of that is not known to hold, there is no cut, and the text is encoded as a whole.

use serde_json::Value;
use tokenizers::NormalizerWrapper;

use super::pretokenize;
use super::speller::{Added, Speller};

/// Most words before the end of a window that may change with more text behind them; a generous bound.
const UNCERTAIN_WORDS: usize = 16;
/// The same in bytes.
const UNCERTAIN_BYTES: usize = 64;

/// Positions at which texts of one tokenizer may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cuts {
    /// A text is one part, however long.
    Nowhere,
    /// Between words. `composes`: not before a character that may combine with the one before it. `looks_far`: not at a run
    /// of digits or white space whose end is not in the window.
    BetweenWords { composes: bool, looks_far: bool, margin: Margin },
    /// Between characters that are adjacent in no token, for tokenizers without words.
    BetweenStrangers { margin: Margin },
}

/// Distance from the end of a window within which it is uncertain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Margin {
    bytes: usize,
    /// An added token absorbs any white space before it, so other text must follow a cut.
    wants_text: bool,
}

impl Margin {
    /// Returns the last position of a window that may be a cut.
    fn latest(self, window: &str) -> Option<usize> {
        let latest = window.len().checked_sub(self.bytes)?;
        match self.wants_text {
            false => Some(latest),
            true => window.rfind(|c: char| !c.is_whitespace()).map(|text| text.min(latest)),
        }
    }
}

/// A word of a window as the library lists them: its text, its range, and whether it is an added token.
pub(super) struct Word<'a> {
    pub text: &'a str,
    pub start: usize,
    pub end: usize,
    pub is_added: bool,
}

/// Certain part of a window, up to `end`: all words before `words`, and `bytes` of that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SafeCut {
    pub words: usize,
    pub bytes: usize,
    pub end: usize,
}

impl Cuts {
    pub fn of(
        normalizer: Option<&NormalizerWrapper>,
        rule: Option<&Value>,
        speller: &Speller,
        added: &[Added],
    ) -> Self {
        let longest = added.iter().map(|added| added.token.content.len()).max().unwrap_or(0);
        let wants_text = added.iter().any(|added| added.token.lstrip);
        let margin = Margin { bytes: UNCERTAIN_BYTES + 4 * longest, wants_text };
        if added.iter().any(|added| added.token.single_word) {
            return Cuts::Nowhere; // such a token matches depending on the character before it
        }
        let normalizer = normalizer.map(|norm| serde_json::to_value(norm).unwrap_or_default());
        match (speller, &normalizer, rule) {
            (Speller::Spm(spm), None, None) if spm.is_cut() => Cuts::BetweenStrangers { margin },
            (Speller::Crate(_), _, Some(rule)) if is_local(rule) => {
                let looks_far = looks_far(rule);
                match normalizer {
                    Some(norm) if !is_composing(&norm) => Cuts::Nowhere,
                    norm => Cuts::BetweenWords { composes: norm.is_some(), looks_far, margin },
                }
            }
            _ => Cuts::Nowhere,
        }
    }

    /// Returns the last cut of a window that has more text behind it.
    pub fn last(self, window: &str, words: &[Word<'_>], speller: &Speller) -> Option<SafeCut> {
        match (self, speller) {
            (Cuts::BetweenWords { composes, looks_far, margin }, _) => {
                let latest = margin.latest(window)?;
                let latest = if looks_far { before_run(window, latest) } else { latest };
                let certain = words.len().checked_sub(UNCERTAIN_WORDS)?;
                let is_cut = |index: &usize| {
                    let (end, next) = (words[*index].end, &words[index + 1]);
                    // Rules that cut bytes may cut a character, and then both words contain the whole
                    // character.
                    let is_between = end <= next.start && end <= latest && window.is_char_boundary(end);
                    is_between && (!composes || window[end..].chars().next().is_some_and(stands_alone))
                };
                let last = (0..certain).rev().find(is_cut)?;
                Some(SafeCut { words: last + 1, bytes: 0, end: words[last].end })
            }
            (Cuts::BetweenStrangers { margin }, Speller::Spm(spm)) => {
                let latest = margin.latest(window)?;
                let in_word = |(index, word): (usize, &Word<'_>)| {
                    let most = latest.checked_sub(word.start)?.min(word.text.len());
                    let at = if word.is_added { None } else { spm.last_cut(word.text, most) };
                    at.map(|bytes| SafeCut { words: index, bytes, end: word.start + bytes })
                };
                words.iter().enumerate().rev().find_map(in_word)
            }
            _ => None,
        }
    }
}

/// Returns the start of the digits that contain or end at a position, and of the white space before them.
fn before_run(window: &str, position: usize) -> usize {
    let before = &window[..window.floor_char_boundary(position)];
    before.trim_end_matches(char::is_numeric).trim_end().len()
}

/// Returns whether no normal form combines the character with the one before it. Lists only scripts without
/// combining letters.
fn stands_alone(c: char) -> bool {
    matches!(c, '\0'..='\u{2ff}' | '\u{400}'..='\u{482}' | '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fff}')
}

fn parts<'a>(value: &'a Value, list: &str) -> Option<&'a [Value]> {
    value.get(list).and_then(Value::as_array).map(Vec::as_slice)
}

/// Returns whether the normalizer is NFC, alone or in a sequence, which does not change text that stands
/// alone.
fn is_composing(norm: &Value) -> bool {
    match norm["type"].as_str() {
        Some("NFC") => true,
        Some("Sequence") => parts(norm, "normalizers").is_some_and(|parts| parts.iter().all(is_composing)),
        _ => false,
    }
}

/// Returns whether words depend only on their own text and a little after it.
fn is_local(rule: &Value) -> bool {
    match rule["type"].as_str() {
        Some("Sequence") => parts(rule, "pretokenizers").is_some_and(|parts| parts.iter().all(is_local)),
        Some("ByteLevel") => rule["add_prefix_space"] == false,
        Some("Digits") => true,
        Some("Punctuation") => rule["behavior"] != "Removed",
        Some("Split") => {
            let is_known = rule["pattern"]["Regex"].as_str().is_some_and(pretokenize::is_known);
            is_known && rule["behavior"] == "Isolated" && rule["invert"] == false
        }
        _ => false,
    }
}

fn looks_far(rule: &Value) -> bool {
    rule["pattern"]["Regex"].as_str().is_some_and(pretokenize::looks_far)
        || parts(rule, "pretokenizers").is_some_and(|parts| parts.iter().any(looks_far))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::pieces::byte_level_char;
    use super::super::{Encode, TokenKind, Tokenizer, VocabSpec, pretokenize};

    const PARSE: Encode = Encode { add_special: false, parse_special: true };

    /// Smaller than any real window, so that a test's text has many.
    const WINDOW: usize = 160;

    /// Every pair of common bytes is a token, so that a word that ends elsewhere has other ids.
    fn byte_level(pre: &str) -> Tokenizer {
        let byte = |byte: u8| byte_level_char(byte).to_string();
        let mut tokens: Vec<String> = (0..=255).map(byte).collect();
        let common: Vec<String> = b"abS12 \n.'s-".iter().map(|&b| byte(b)).collect();
        let pairs = || common.iter().flat_map(|left| common.iter().map(move |right| (left, right)));
        let merges = pairs().map(|(left, right)| format!("{left} {right}")).collect();
        tokens.extend(pairs().map(|(left, right)| format!("{left}{right}")));
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        let added = tokens.len() as u32;
        for (text, kind) in [("<|x|>", TokenKind::Control), ("<user>", TokenKind::UserDefined)] {
            tokens.push(text.to_owned());
            kinds.push(kind);
        }
        let (model, pre) = ("gpt2".to_owned(), Some(pre.to_owned()));
        let spec =
            VocabSpec { model, pre, tokens, kinds, merges, strip_right: vec![added], ..VocabSpec::default() };
        Tokenizer::from_vocab(&spec).expect("a vocabulary")
    }

    fn sentencepiece(has_bytes: bool) -> Tokenizer {
        let mut tokens: Vec<String> =
            ["<unk>", "<|x|>", "▁", "a", "b", "1", "ab", "▁a", "▁ab", "aa", "bb▁", "▁▁", "▁▁▁▁"]
                .map(str::to_owned)
                .to_vec();
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        (kinds[0], kinds[1]) = (TokenKind::Unknown, TokenKind::Control);
        if has_bytes {
            tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
            kinds.resize(tokens.len(), TokenKind::Byte);
        }
        let scores = (0..tokens.len()).map(|rank| -(rank as f32)).collect();
        let spec = VocabSpec {
            model: "llama".to_owned(),
            tokens,
            kinds,
            scores,
            unk: Some(0),
            ..VocabSpec::default()
        };
        Tokenizer::from_vocab(&spec).expect("a vocabulary")
    }

    fn text() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            6 => "[abS12 \n.'s-]{1,8}",
            2 => "[ab]{1,40}",
            2 => "[12]{1,40}",
            2 => "[ \n\r\t]{1,40}",
            1 => "(é|漢|字|e\u{301}|ß|Ä|\u{a0}|…|🦙|й|ẛ\u{323}){1,12}",
            1 => "(<\\|x\\|>|<user>|<\\|x| <|\\|>)[ \n]{0,3}",
        ];
        prop::collection::vec(part, 0..160).prop_map(|parts| parts.concat())
    }

    fn check(name: &str, tokenizer: &Tokenizer, text: &str, window: usize) -> Result<(), TestCaseError> {
        prop_assert!(tokenizer.takes_long_texts_apart(), "{}", name);
        let whole = tokenizer.encode_in_windows(text, PARSE, usize::MAX, None).expect("ids");
        let cut = tokenizer.encode_in_windows(text, PARSE, window, None).expect("ids");
        prop_assert_eq!(&cut, &whole, "{}: {:?}", name, text);
        if let Some(least) = tokenizer.least_tokens(text) {
            prop_assert!(least <= whole.len(), "{}: {} of {:?}", name, least, text);
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn windows_change_no_id_by_any_rule(text in text(), window in WINDOW..4 * WINDOW) {
            for name in pretokenize::names() {
                check(name, &byte_level(name), &text, window)?;
            }
        }

        #[test]
        fn windows_change_no_id_without_words(text in text(), window in WINDOW..4 * WINDOW) {
            for has_bytes in [true, false] {
                check("sentencepiece", &sentencepiece(has_bytes), &text, window)?;
            }
        }
    }

    /// A rule may look to the end of a run: windows end within these, and what follows them differs.
    #[test]
    fn windows_within_long_runs_change_no_id_by_any_rule() {
        let runs = [
            "1", "½", "1½", "1\u{301}", "1 ", "12_", "a", "S", "aS", "漢", "漢S", "é", "e\u{301}", "\u{301}",
            "a b ", " ", "\t", "\n", " \n", "  \n\t", "\r\n", "\u{a0}", "!", "!\n", "'s", "..-", "🦙",
            "한글", "かな", "ع", "١", "<",
        ];
        let ends = ["", "a", " a", "\n", "1", "!", "\u{301}", "S\n漢"];
        let long = |run: &str, len: usize| run.repeat(len.div_ceil(run.chars().count()));
        for name in pretokenize::names() {
            let tokenizer = byte_level(name);
            for run in runs {
                // Numbers of all lengths modulo three, and white space beyond jais-2's longest word.
                let parts = ends.iter().zip(700..).map(|(end, len)| format!("x {}{end}", long(run, len)));
                let text = parts.collect::<Vec<_>>().join(" x, ");
                check(name, &tokenizer, &text, WINDOW).expect("the same ids");
            }
        }
    }

    #[test]
    fn a_prompt_far_beyond_the_context_is_not_read_to_its_end() {
        use llmctl_base::Error;
        let tokenizer = byte_level("qwen2");
        assert_eq!(tokenizer.least_tokens("x").map(|least| least > 0), Some(true));
        let ask = |num_bytes: usize, context| tokenizer.encode_prompt(&"1".repeat(num_bytes), PARSE, context);
        assert_eq!(ask(100_000, 60_000).map(|ids| ids.len()).ok(), Some(100_000), "that can be counted");
        // The longest token has six bytes.
        let counted = ask(400_000, 80_000);
        assert!(
            matches!(counted, Err(Error::PromptOversized { least_tokens, context_tokens: 80_000 }) if (320_000..400_000).contains(&least_tokens)),
            "{counted:?}"
        );
        let by_size = ask(601, 100);
        assert!(matches!(by_size, Err(Error::PromptOversized { least_tokens: 101, .. })), "{by_size:?}");
        assert_eq!(ask(600, 100).map(|ids| ids.len()).ok(), Some(600));
    }

    #[test]
    fn a_rule_that_cuts_characters_is_not_cut_there() {
        // Falcon searches digits in the byte spelling, where the second byte of this character is one.
        for name in pretokenize::names() {
            check(name, &byte_level(name), &"漢字 é½ ".repeat(300), WINDOW).expect("the same ids");
        }
    }

    #[test]
    fn what_may_drop_text_has_no_bound() {
        assert!(sentencepiece(true).least_tokens("a").is_some());
        assert_eq!(sentencepiece(false).least_tokens("a"), None, "unknown characters are one token");
    }
}
