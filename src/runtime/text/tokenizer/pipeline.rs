//! Text -> ids: added tokens first, then normalise, cut into words, and let the model spell each word.
//!
//! This is Hugging Face's pipeline on its own parts, with two differences: the special tokens may be left out of
//! the search per call (the crate only has a switch on the whole tokenizer, which is shared here), and nothing is
//! added around the text. The crate panics on some hostile inputs (a regular expression over its retry limit, say);
//! [`guarded`] turns that into an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::models::wordlevel::WordLevel;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, ModelWrapper, NormalizerWrapper, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper, Token,
};

use super::spm::Spm;
use crate::runtime::error::panic_text;

/// What spells a word.
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

    fn spell(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Speller::Crate(model) => model.tokenize(word),
            Speller::Spm(spm) => {
                Ok(spm.encode(word)?.into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect())
            }
        }
    }
}

/// A token that is searched for in the text before anything else.
#[derive(Debug, Clone)]
pub(super) struct Added {
    pub id: u32,
    pub token: AddedToken,
}

pub(super) struct Pipeline {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    pub speller: Speller,
    /// All added tokens.
    with_special: AddedVocabulary,
    /// The added tokens that are not special.
    without_special: AddedVocabulary,
}

impl Pipeline {
    pub fn new(
        normalizer: Option<NormalizerWrapper>,
        pre_tokenizer: Option<PreTokenizerWrapper>,
        speller: Speller,
        added: &[Added],
    ) -> Result<Self, String> {
        let plain: Vec<Added> = added.iter().filter(|added| !added.token.special).cloned().collect();
        Ok(Pipeline {
            with_special: vocabulary(added, normalizer.as_ref())?,
            without_special: vocabulary(&plain, normalizer.as_ref())?,
            normalizer,
            pre_tokenizer,
            speller,
        })
    }

    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, String> {
        let added = if parse_special { &self.with_special } else { &self.without_special };
        guarded(|| {
            let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), text);
            if let Some(pre_tokenizer) = &self.pre_tokenizer {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|word| self.speller.spell(word.get()))?;
            Ok(collect_ids(pieces))
        })
    }
}

fn collect_ids(pieces: PreTokenizedString) -> Vec<u32> {
    use tokenizers::{OffsetReferential, OffsetType};
    let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
    let tokens = splits.into_iter().filter_map(|(_, _, tokens)| tokens.as_ref());
    tokens.flatten().map(|token| token.id).collect()
}

fn vocabulary(added: &[Added], normalizer: Option<&NormalizerWrapper>) -> Result<AddedVocabulary, String> {
    // The crate asks a model for the ids of added tokens; this one knows exactly these.
    let ids = added.iter().map(|added| (added.token.content.clone(), added.id)).collect();
    guarded(|| {
        let ids = WordLevel::builder().vocab(ids).build()?;
        let mut vocabulary = AddedVocabulary::new();
        vocabulary.add_tokens(added.iter().map(|added| added.token.clone()), &ids, normalizer)?;
        Ok(vocabulary)
    })
}

/// Runs the crate's code and turns both its errors and its panics into a message.
pub(super) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("the tokenizers library failed: {}", panic_text(&*panic))),
    }
}
