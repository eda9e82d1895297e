//! A model's vocabulary in llguidance's form: a trie over the tokens' bytes, and the spelling of forced text.
//!
//! Invariants: control tokens and end-of-generation tokens match by name only, never as text. A token whose
//! bytes occur in no UTF-8 text is never allowed. Forced text is spelt with exactly its bytes.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use llmctl_models::text::Tokenizer;

struct TrieVocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

/// Builds the environment. `vocab_size` is the number of logits, which may exceed the tokenizer's tokens.
pub fn token_environment(tokenizer: Arc<Tokenizer>, vocab_size: usize, ends: &[u32]) -> TokEnv {
    let ends: Vec<u32> = ends.iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
    let words: Vec<Vec<u8>> = (0u32..).take(vocab_size).map(|id| word(&tokenizer, id, &ends)).collect();
    let first_end = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first_end), &words);
    let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
    Arc::new(TrieVocabulary { tokenizer, trie })
}

/// Returns the bytes of a token in the trie, after a marker if it is not text; empty for tokens that never
/// come.
fn word(tokenizer: &Tokenizer, id: u32, ends: &[u32]) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    if tokenizer.is_special(id) || ends.contains(&id) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], &*bytes].concat()
    } else if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
        Vec::new()
    } else {
        bytes.into_owned()
    }
}

impl TrieVocabulary {
    /// Encodes text in the middle of an answer. If a normalising tokenizer changes the bytes, uses the
    /// longest matching tokens instead.
    fn spell(&self, text: &str) -> Vec<u32> {
        let ids = self.tokenizer.encode_plain_rest(text).unwrap_or_default();
        match self.trie.decode_raw(&ids) == text.as_bytes() {
            true => ids,
            false => self.trie.greedy_tokenize(text.as_bytes()),
        }
    }
}

impl TokenizerEnv for TrieVocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.spell(text))
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use llmctl_models::text::{TokenKind, VocabSpec};

    /// Ids 0 to 3 are `<unk>`, `<s>`, `</s>` and `<|call|>`, then each byte, then `ab` and a control token
    /// `cd`.
    pub fn letters() -> Arc<Tokenizer> {
        let named = ["<unk>", "<s>", "</s>", "<|call|>"].map(str::to_owned);
        let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
        let tokens: Vec<String> =
            named.into_iter().chain(bytes).chain(["ab", "cd"].map(str::to_owned)).collect();
        let kinds = [TokenKind::Unknown].into_iter().chain([TokenKind::Control; 3]);
        let kinds = kinds.chain([TokenKind::Byte; 256]).chain([TokenKind::Normal, TokenKind::Control]);
        let spec = VocabSpec {
            model: "llama".to_owned(),
            scores: vec![0.0; tokens.len()],
            kinds: kinds.collect(),
            tokens,
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            add_space_prefix: Some(false),
            ..VocabSpec::default()
        };
        Arc::new(Tokenizer::from_vocab(&spec).expect("a vocabulary"))
    }

    const AB: u32 = 260;
    const CD: u32 = 261;

    fn byte(byte: u8) -> u32 {
        4 + u32::from(byte)
    }

    #[test]
    fn control_tokens_and_ends_are_names_and_not_text() {
        let environment = token_environment(letters(), 300, &[AB, 2, 999]);
        let trie = environment.tok_trie();
        assert_eq!(trie.vocab_size(), 300);
        assert_eq!(trie.eos_tokens(), [AB, 2]);
        assert_eq!(trie.get_special_token("<|call|>"), Some(3));
        for special in [0, 1, 2, 3, AB, CD] {
            assert!(trie.is_special_token(special), "{special}");
        }
        assert_eq!(trie.token(byte(b'x')), b"x");
        assert!(trie.token(byte(0xff)).is_empty() && trie.token(299).is_empty());
    }

    #[test]
    fn text_is_spelt_byte_for_byte() {
        let environment = token_environment(letters(), 262, &[2]);
        assert_eq!(environment.tokenize_bytes(b"xab"), [byte(b'x'), AB]);
        assert_eq!(environment.tokenize_bytes(b"cd"), [byte(b'c'), byte(b'd')], "no control token");
        assert_eq!(environment.tokenize_bytes("é".as_bytes()), [byte(0xc3), byte(0xa9)]);
        assert_eq!(environment.tokenize_bytes(b"\xa9x"), [byte(0xa9), byte(b'x')], "the end of a character");
        assert_eq!(environment.tokenize_bytes(b" "), [byte(b' ')], "nothing is put before it");
    }
}
