//! Fill in the middle: prompts for the text between two others, for models trained on it.
//!
//! Such a model has special tokens for it, known by their texts. Families differ in the tokens and in the
//! order of the parts.

use llmctl_base::error::{Error, Result};
use llmctl_models::text::{Encode, Tokenizer};

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

/// Texts of the token before each file, in models trained on whole repositories.
const FILE_SEPARATORS: [&str; 2] = ["<|file_sep|>", "<|file_separator|>"];

/// Special tokens in texts are encoded as plain text.
const PLAIN: Encode = Encode { add_special: false, parse_special: false };

/// A request for the text between two others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InfillPrompt {
    /// Names and texts of other files, which the model sees first.
    pub files: Vec<(String, String)>,
    pub prefix: String,
    pub suffix: String,
    /// The beginning of the text between the two, which the model continues.
    pub begun: String,
}

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

    /// Returns the ids of a prompt for a context of `context_tokens`.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_prompt`].
    pub fn prompt(
        self,
        tokenizer: &Tokenizer,
        asked: &InfillPrompt,
        context_tokens: usize,
    ) -> Result<Vec<u32>> {
        let InfillPrompt { files, prefix, suffix, begun } = asked;
        let encode = |text: &str| tokenizer.encode_prompt(text, PLAIN, context_tokens);
        let mut ids: Vec<u32> = tokenizer.bos().filter(|_| tokenizer.adds_bos()).into_iter().collect();
        ids.extend(file_ids(tokenizer, files, context_tokens)?);
        let parts = match self {
            Infill::PrefixFirst([before, between, behind]) => {
                [vec![before], encode(prefix)?, vec![between], encode(suffix)?, vec![behind]]
            }
            Infill::SuffixFirst([before, between]) => {
                [vec![before], encode(suffix)?, vec![between], encode(prefix)?, Vec::new()]
            }
        };
        ids.extend(parts.concat());
        ids.extend(encode(begun)?);
        Ok(ids)
    }
}

/// Returns the ids of other files: each behind the separator of models that know one, which then stands before the file that is
/// edited too.
fn file_ids(tokenizer: &Tokenizer, files: &[(String, String)], context_tokens: usize) -> Result<Vec<u32>> {
    let separator = FILE_SEPARATORS.iter().find_map(|text| tokenizer.token_to_id(text));
    let mut ids = Vec::new();
    for (name, text) in files {
        ids.extend(separator);
        ids.extend(tokenizer.encode_prompt(&format!("{name}\n{text}\n"), PLAIN, context_tokens)?);
        if ids.len() > context_tokens {
            return Err(Error::PromptOversized { least_tokens: ids.len(), context_tokens });
        }
    }
    ids.extend(separator.filter(|_| !files.is_empty()));
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmctl_models::text::{TokenKind, VocabSpec};

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
        let between = |prefix: &str, suffix: &str| InfillPrompt {
            prefix: prefix.to_owned(),
            suffix: suffix.to_owned(),
            ..InfillPrompt::default()
        };
        let [a, b, c, d] = [b'a', b'b', b'c', b'd'].map(u32::from);
        let asked = InfillPrompt { begun: "d".to_owned(), ..between("ab", "c") };
        let ids = infill.prompt(&tokenizer, &asked, 1000).expect("encodes");
        assert_eq!(ids, [257, 259, a, b, 260, c, 261, d]);
        let ids = infill.prompt(&tokenizer, &between("<fim_middle>", ""), 1000).expect("encodes");
        assert_eq!(ids.iter().filter(|id| **id == 261).count(), 1, "text is text");
    }

    #[test]
    fn other_files_come_first() {
        let ids = |control: &[&str]| {
            let tokenizer = tokenizer(control);
            let infill = Infill::detect(|text| tokenizer.token_to_id(text)).expect("a family");
            let asked = InfillPrompt {
                files: vec![("a".to_owned(), "b".to_owned())],
                prefix: "c".to_owned(),
                ..InfillPrompt::default()
            };
            infill.prompt(&tokenizer, &asked, 1000).expect("encodes")
        };
        let [a, b, c, line] = [b'a', b'b', b'c', b'\n'].map(u32::from);
        let fim = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
        assert_eq!(ids(&fim), [257, a, line, b, line, 259, c, 260, 261]);
        let with_separator = [&fim[..], &["<|file_sep|>"]].concat();
        assert_eq!(ids(&with_separator), [257, 262, a, line, b, line, 262, 259, c, 260, 261]);
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
