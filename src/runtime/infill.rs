//! Fill in the middle: prompts for the text between two others, for models trained on it.
//!
//! Such a model has special tokens for it, known by their texts. Families differ in the tokens and in the
//! order of the parts.

use super::error::Result;
use super::text::{Encode, Tokenizer};

/// Texts of the tokens before the prefix, the suffix and the middle, per family.
const FAMILIES: [[&str; 3]; 9] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<PRE>", "<SUF>", "<MID>"],
    ["<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"],
    ["<fim_pre>", "<fim_suf>", "<fim_mid>"],
];

/// Tokens of Codestral: the suffix comes first, and the middle continues the prefix.
const SUFFIX_FIRST: [&str; 2] = ["[SUFFIX]", "[PREFIX]"];

/// Order of the parts in a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Infill {
    /// Ids of the tokens before prefix, suffix and middle.
    PrefixFirst([u32; 3]),
    /// Ids of the tokens before suffix and prefix.
    SuffixFirst([u32; 2]),
}

impl Infill {
    /// Detects the model's order; `id` maps a token's text to its id.
    pub fn detect(id: impl Fn(&str) -> Option<u32>) -> Option<Self> {
        let ids = |texts: &[&str]| texts.iter().map(|text| id(text)).collect::<Option<Vec<u32>>>();
        let family = FAMILIES.iter().find_map(|texts| ids(texts)?.try_into().ok());
        let suffix_first = || ids(&SUFFIX_FIRST)?.try_into().ok().map(Infill::SuffixFirst);
        family.map(Infill::PrefixFirst).or_else(suffix_first)
    }

    /// Returns the ids of a prompt. Special tokens in the texts are encoded as plain text.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn prompt(self, tokenizer: &Tokenizer, prefix: &str, suffix: &str) -> Result<Vec<u32>> {
        let plain = Encode { add_special: false, parse_special: false };
        let [prefix, suffix] = [prefix, suffix].map(|text| tokenizer.encode(text, plain));
        let (prefix, suffix) = (prefix?, suffix?);
        let begin = tokenizer.bos().filter(|_| tokenizer.adds_bos());
        let parts: Vec<&[u32]> = match &self {
            Infill::PrefixFirst([before, between, behind]) => vec![
                std::slice::from_ref(before),
                &prefix,
                std::slice::from_ref(between),
                &suffix,
                std::slice::from_ref(behind),
            ],
            Infill::SuffixFirst([before, between]) => {
                vec![std::slice::from_ref(before), &suffix, std::slice::from_ref(between), &prefix]
            }
        };
        Ok(begin.into_iter().chain(parts.concat()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::text::{TokenKind, VocabSpec};

    /// Each byte, then the control tokens.
    fn tokenizer(control: &[&str]) -> Tokenizer {
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let named = ["<unk>", "<s>", "</s>"].into_iter().chain(control.iter().copied()).map(str::to_owned);
        let tokens: Vec<String> = bytes.chain(named).collect();
        let control = [TokenKind::Control].into_iter().cycle().take(2 + control.len());
        let kinds = [TokenKind::Byte; 256].into_iter().chain([TokenKind::Unknown]).chain(control).collect();
        let spec = VocabSpec {
            model: "llama".to_owned(),
            scores: vec![0.0; tokens.len()],
            kinds,
            tokens,
            bos: Some(257),
            eos: Some(258),
            unk: Some(256),
            add_space_prefix: Some(false),
            add_bos: Some(true),
            ..VocabSpec::default()
        };
        Tokenizer::from_vocab(&spec).expect("a vocabulary")
    }

    #[test]
    fn the_parts_stand_between_their_tokens_and_hold_no_others() {
        let tokenizer = tokenizer(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]);
        let infill = Infill::detect(|text| tokenizer.token_to_id(text)).expect("a family");
        assert_eq!(
            infill.prompt(&tokenizer, "ab", "c").expect("encodes"),
            [257, 259, u32::from(b'a'), u32::from(b'b'), 260, u32::from(b'c'), 261]
        );
        let ids = infill.prompt(&tokenizer, "<fim_middle>", "").expect("encodes");
        assert_eq!(ids.iter().filter(|id| **id == 261).count(), 1, "text is text");
    }

    #[test]
    fn the_order_of_the_parts_is_the_familys() {
        let known = |texts: &'static [&'static str]| {
            Infill::detect(move |text| texts.iter().position(|known| *known == text).map(|at| at as u32))
        };
        assert_eq!(
            known(&["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]),
            Some(Infill::PrefixFirst([0, 2, 1]))
        );
        assert_eq!(known(&["[PREFIX]", "[SUFFIX]"]), Some(Infill::SuffixFirst([1, 0])));
        assert_eq!(known(&["<fim_prefix>", "<fim_suffix>"]), None);
    }
}
