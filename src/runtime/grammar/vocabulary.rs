//! A model's vocabulary as llguidance wants it: a trie over the tokens' bytes, and a way to spell forced text.
//!
//! Invariants: control tokens and those that end a generation are reachable by name only, never as text; a token of bytes
//! that no UTF-8 text has is never allowed; spelt text is exactly the bytes asked for.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::runtime::text::Tokenizer;

struct TrieVocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

/// `vocab_size` is the number of the model's logits, which may be more than the tokenizer has tokens.
pub fn token_environment(tokenizer: Arc<Tokenizer>, vocab_size: usize, ends: &[u32]) -> TokEnv {
    let ends: Vec<u32> = ends.iter().copied().filter(|&id| (id as usize) < vocab_size).collect();
    let words: Vec<Vec<u8>> = (0u32..).take(vocab_size).map(|id| word(&tokenizer, id, &ends)).collect();
    let first_end = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, first_end), &words);
    let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
    Arc::new(TrieVocabulary { tokenizer, trie })
}

/// The bytes of a token in the trie, behind a marker for those that are not text; nothing for those that never come.
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
    /// Ids for text in the middle of an answer. Normalising tokenizers may spell something else than was asked for; then
    /// the longest tokens that fit do.
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
