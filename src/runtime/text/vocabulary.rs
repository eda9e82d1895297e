//! What the engine asks of a tokenizer: the bytes of a token. Encoding happens before a request is submitted.

use std::borrow::Cow;

use super::tokenizer::Tokenizer;

/// Token ids as text. Tests run the engine with toy vocabularies through this.
pub trait Vocabulary: Send + Sync {
    /// The bytes that a token stands for, possibly part of a character; `None` for ids that stand for no text.
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>>;

    /// Whether this is a control token (turn markers, padding) rather than text.
    fn is_special(&self, id: u32) -> bool;
}

impl Vocabulary for Tokenizer {
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        Tokenizer::token_bytes(self, id)
    }

    fn is_special(&self, id: u32) -> bool {
        Tokenizer::is_special(self, id)
    }
}
