//! The part of a tokenizer that the engine uses: the bytes of a token. Encoding happens before a request is
//! submitted.

use std::borrow::Cow;

use super::tokenizer::Tokenizer;

/// Token ids as bytes. Tests run the engine with small vocabularies through this trait.
pub trait Vocabulary: Send + Sync {
    /// Returns the bytes of a token, possibly part of a character; `None` for ids without text.
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>>;

    /// Returns whether this is a control token (turn marker, padding) rather than text.
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
