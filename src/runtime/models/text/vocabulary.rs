//! The part of a tokenizer that the engine uses: the bytes of a token, and the tokens of sequence breakers. Prompts are
//! encoded before a request is submitted.

use std::borrow::Cow;

use super::tokenizer::Tokenizer;

/// Token ids as bytes. Tests run the engine with small vocabularies through this trait.
pub trait Vocabulary: Send + Sync {
    /// Returns the bytes of a token, possibly part of a character; `None` for ids without text.
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>>;

    /// Returns whether this is a control token (turn marker, padding) rather than text.
    fn is_special(&self, id: u32) -> bool;

    /// Returns the tokens of a text that continues another; `None` if it cannot encode, as vocabularies of tests.
    fn encode_rest(&self, _rest: &str) -> Option<Vec<u32>> {
        None
    }
}

impl Vocabulary for Tokenizer {
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
        Tokenizer::token_bytes(self, id)
    }

    fn is_special(&self, id: u32) -> bool {
        Tokenizer::is_special(self, id)
    }

    fn encode_rest(&self, rest: &str) -> Option<Vec<u32>> {
        self.encode_plain_rest(rest).ok()
    }
}
