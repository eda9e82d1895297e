//! The least number of tokens of a text, from its size alone. It refuses a text far beyond a context before
//! any work.
//!
//! Sound or absent: there is no bound if a part of the pipeline may drop text, encode many characters as one
//! unknown token, or shrink a text by an unknown factor.

use serde_json::Value;
use tokenizers::{ModelWrapper, NormalizerWrapper};

use super::pieces::{Table, byte_level_char};
use super::speller::{Added, Speller};

/// Most bytes that a normal form makes from one: three bytes of a singleton from one of ASCII, three of a
/// composed character from nine of its parts, four of a mathematical letter from one.
const NORMAL_FORM: usize = 12;

/// Most bytes that become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shrinkage {
    of_all: usize,
    /// In normal forms: ASCII characters never combine with each other, and each leaves at least a byte.
    beyond_ascii: usize,
}

/// Most text that one token stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    bytes_per_token: usize,
    shrinkage: Shrinkage,
    /// Added tokens absorb any amount of white space around them.
    skips_white_space: bool,
}

impl Bound {
    pub fn of(
        normalizer: Option<&NormalizerWrapper>,
        rule: Option<&Value>,
        speller: &Speller,
        added: &[Added],
        (texts, bytes): (&Table, &Table),
    ) -> Option<Self> {
        let none = Shrinkage { of_all: 1, beyond_ascii: 1 };
        let shrinkage = normalizer.map_or(Some(none), |norm| shrinkage(&serde_json::to_value(norm).ok()?))?;
        let is_byte_level = rule.is_some_and(has_byte_level)
            && spells_bytes(speller, |byte| byte_level_char(byte).to_string());
        let is_complete = is_byte_level || has_byte_tokens(speller);
        if !is_complete || !rule.is_none_or(keeps_all) {
            return None;
        }
        let longest = if is_byte_level { bytes.longest() } else { bytes.longest().max(texts.longest()) };
        let skips_white_space = added.iter().any(|added| added.token.lstrip || added.token.rstrip);
        Some(Self { bytes_per_token: longest.max(1), shrinkage, skips_white_space })
    }

    /// Returns the least number of tokens of a text.
    pub fn least_tokens(self, text: &str) -> usize {
        let counted = |c: &char| !self.skips_white_space || !c.is_whitespace();
        let (mut ascii, mut beyond) = (0, 0);
        for c in text.chars().filter(counted) {
            match c.is_ascii() {
                true => ascii += 1,
                false => beyond += c.len_utf8(),
            }
        }
        let num_bytes = (ascii + beyond / self.shrinkage.beyond_ascii) / self.shrinkage.of_all;
        num_bytes.div_ceil(self.bytes_per_token)
    }
}

/// Returns how far a normalizer shrinks a text; `None` if text may vanish.
fn shrinkage(norm: &Value) -> Option<Shrinkage> {
    let (of_all, beyond_ascii) = match norm["type"].as_str()? {
        "NFC" | "NFD" | "NFKC" | "NFKD" => (1, NORMAL_FORM),
        "Prepend" => (1, 1),
        "Replace" => {
            let (from, to) = (norm["pattern"]["String"].as_str()?.len(), norm["content"].as_str()?.len());
            ((to > 0).then(|| from.div_ceil(to).max(1))?, 1)
        }
        "Sequence" => {
            let parts = norm["normalizers"].as_array()?;
            let all: Option<Vec<Shrinkage>> = parts.iter().map(shrinkage).collect();
            let product = |factor: fn(&Shrinkage) -> usize| {
                all.as_ref()?.iter().try_fold(1_usize, |product, part| product.checked_mul(factor(part)))
            };
            (product(|part| part.of_all)?, product(|part| part.beyond_ascii)?)
        }
        _ => return None,
    };
    Some(Shrinkage { of_all, beyond_ascii })
}

/// Returns whether a pre-tokenizer keeps all text in some word.
fn keeps_all(rule: &Value) -> bool {
    match rule["type"].as_str() {
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Punctuation" | "Split") => rule["behavior"] != "Removed",
        Some("Sequence") => rule["pretokenizers"].as_array().is_some_and(|parts| parts.iter().all(keeps_all)),
        _ => false,
    }
}

/// Returns whether words are in byte spelling.
fn has_byte_level(rule: &Value) -> bool {
    let parts = rule["pretokenizers"].as_array();
    rule["type"] == "ByteLevel" || parts.is_some_and(|parts| parts.iter().any(has_byte_level))
}

fn spells_bytes(speller: &Speller, token: impl Fn(u8) -> String) -> bool {
    let is_bpe = matches!(speller, Speller::Crate(model) if matches!(**model, ModelWrapper::BPE(_)));
    is_bpe && (0..=255).all(|byte| speller.token_to_id(&token(byte)).is_some())
}

/// Returns whether text without a token is encoded as bytes.
fn has_byte_tokens(speller: &Speller) -> bool {
    match speller {
        Speller::Spm(spm) => spm.is_complete(),
        Speller::Crate(model) => match &**model {
            ModelWrapper::BPE(bpe) => {
                bpe.byte_fallback && spells_bytes(speller, |byte| format!("<0x{byte:02X}>"))
            }
            _ => false,
        },
    }
}
