//! The parts of a tokenizer that its other modules look into: the model that encodes a word, and the added
//! tokens.

use tokenizers::{AddedToken, Model, ModelWrapper};

use super::spm::Spm;

/// Model that encodes a word.
pub(super) enum Speller {
    Crate(Box<ModelWrapper>),
    Spm(Spm),
}

impl Speller {
    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        match self {
            Speller::Crate(model) => model.token_to_id(text),
            Speller::Spm(spm) => spm.token_to_id(text),
        }
    }

    /// Encodes a word; `is_rest` if an earlier part of it was encoded before.
    pub fn spell(&self, word: &str, is_rest: bool, ids: &mut Vec<u32>) -> tokenizers::Result<()> {
        match self {
            Speller::Crate(model) => ids.extend(model.tokenize(word)?.iter().map(|token| token.id)),
            Speller::Spm(spm) => ids.extend(spm.encode(word, is_rest)?),
        }
        Ok(())
    }
}

/// A token that is searched in the text before anything else.
#[derive(Debug, Clone)]
pub(super) struct Added {
    pub id: u32,
    pub token: AddedToken,
}
