//! What the engine asks of a tokenizer: the bytes of a token. Encoding happens before a request is submitted.

use std::borrow::Cow;

/// Token ids as text. Tests run the engine with toy vocabularies through this.
pub trait Vocabulary: Send + Sync {
    /// The bytes that a token stands for, possibly part of a character; `None` for ids that stand for no text.
    fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>>;

    /// Whether this is a control token (turn markers, padding) rather than text.
    fn is_special(&self, id: u32) -> bool;
}
