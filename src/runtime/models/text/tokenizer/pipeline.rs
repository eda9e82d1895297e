//! Encodes text: finds added tokens, normalises, splits into words, and lets the model encode each word.
//!
//! This is Hugging Face's pipeline from its own parts, with two differences: a call may ignore special tokens
//! (the crate only has a switch on the whole tokenizer, which is shared here), and nothing is added around
//! the text. The crate panics on some hostile inputs (e.g. a regular expression over its retry limit);
//! [`guarded`] turns that into an error. It also needs hundreds of bytes per byte of text, so a long text
//! goes through it in windows (`cuts.rs`), of which only the ids are kept.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::{
    AddedVocabulary, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizerWrapper, Token,
};

use super::bound::Bound;
use super::cuts::{Cuts, SafeCut, Word};
use super::groups::SplitStage;
use super::pieces::Table;
use super::speller::{Added, Speller};
use llmctl_base::error::panic_text;

pub(super) struct Pipeline {
    normalizer: Option<NormalizerWrapper>,
    /// The pre-tokenizer, as tokenizer.json describes it.
    rule: Option<Value>,
    stages: Vec<SplitStage>,
    pub speller: Speller,
    /// All added tokens.
    with_special: AddedVocabulary,
    /// Added tokens that are not special.
    without_special: AddedVocabulary,
    cuts: Cuts,
}

/// Reason why a text was not encoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The vocabulary cannot express it; the message tells why.
    Unspeakable(String),
    /// It has at least this many tokens, more than the limit.
    TooLong(usize),
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure::Unspeakable(message)
    }
}

/// The next window is larger unless at least 1/LEAST_PART of this one is certain.
const LEAST_PART: usize = 2;

/// A text being encoded: the position, and the ids so far.
struct ChunkProgress {
    ids: Vec<u32>,
    at: usize,
    /// The last part ended within a word of the library.
    is_within: bool,
}

impl Pipeline {
    pub fn new(
        normalizer: Option<NormalizerWrapper>,
        pre_tokenizer: Option<PreTokenizerWrapper>,
        speller: Speller,
        added: &[Added],
    ) -> Result<Self, String> {
        let plain: Vec<Added> = added.iter().filter(|added| !added.token.special).cloned().collect();
        let rule = pre_tokenizer.as_ref().map(|rule| serde_json::to_value(rule).unwrap_or_default());
        let stages = pre_tokenizer.map_or_else(|| Ok(Vec::new()), SplitStage::all_of);
        Ok(Pipeline {
            with_special: vocabulary(added, normalizer.as_ref())?,
            without_special: vocabulary(&plain, normalizer.as_ref())?,
            cuts: Cuts::of(normalizer.as_ref(), rule.as_ref(), &speller, added),
            normalizer,
            stages: stages.map_err(|error| error.to_string())?,
            rule,
            speller,
        })
    }

    /// Returns whether long texts are encoded in parts.
    pub fn is_cut(&self) -> bool {
        self.cuts != Cuts::Nowhere
    }

    pub fn bound(&self, added: &[Added], tables: (&Table, &Table)) -> Option<Bound> {
        Bound::of(self.normalizer.as_ref(), self.rule.as_ref(), &self.speller, added, tables)
    }

    /// Encodes in windows of about `window` bytes, which changes no id. Stops when more than `most` ids are
    /// certain.
    pub fn encode(
        &self,
        text: &str,
        parse_special: bool,
        window: usize,
        most: usize,
    ) -> Result<Vec<u32>, Failure> {
        let added = if parse_special { &self.with_special } else { &self.without_special };
        let mut progress = ChunkProgress { ids: Vec::new(), at: 0, is_within: false };
        let mut size = window.max(1);
        while progress.at < text.len() {
            let rest = &text[progress.at..];
            let end = if self.is_cut() { rest.ceil_char_boundary(size.min(rest.len())) } else { rest.len() };
            let is_last = end == rest.len();
            let is_cut = guarded(|| self.encode_part(added, &rest[..end], is_last, &mut progress))?;
            if progress.ids.len() > most {
                return Err(Failure::TooLong(progress.ids.len()));
            }
            size = if is_cut { window.max(1) } else { size.saturating_mul(2) };
        }
        Ok(progress.ids)
    }

    /// Encodes a window up to its last certain cut. Returns false if it has none.
    fn encode_part(
        &self,
        added: &AddedVocabulary,
        window: &str,
        is_last: bool,
        progress: &mut ChunkProgress,
    ) -> tokenizers::Result<bool> {
        let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), window);
        for stage in &self.stages {
            stage.apply(&mut pieces)?;
        }
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let word = |&(text, (start, end), tokens): &(_, _, &Option<Vec<Token>>)| Word {
            text,
            start,
            end,
            is_added: tokens.is_some(),
        };
        let words: Vec<Word<'_>> = splits.iter().map(word).collect();
        let cut = match is_last {
            true => Some(SafeCut { words: words.len(), bytes: 0, end: window.len() }),
            false => self.cuts.last(window, &words, &self.speller),
        };
        // Text after the cut is read again with the next window.
        let is_worth_it = |cut: &SafeCut| is_last || cut.end >= window.len() / LEAST_PART;
        let Some(SafeCut { words: num_words, bytes, end }) = cut.filter(is_worth_it) else {
            return Ok(false);
        };
        for ((_, _, tokens), word) in splits.iter().zip(&words[..num_words]) {
            let is_rest = progress.is_within && word.start == 0;
            match tokens {
                Some(tokens) => progress.ids.extend(tokens.iter().map(|token| token.id)),
                None => self.speller.spell(word.text, is_rest, &mut progress.ids)?,
            }
        }
        if bytes > 0 {
            let word = &words[num_words];
            let is_rest = progress.is_within && word.start == 0;
            self.speller.spell(&word.text[..bytes], is_rest, &mut progress.ids)?;
        }
        progress.at += end;
        progress.is_within = bytes > 0;
        Ok(true)
    }
}

fn vocabulary(added: &[Added], normalizer: Option<&NormalizerWrapper>) -> Result<AddedVocabulary, String> {
    // The crate asks a model for the ids of added tokens, so give it a model with exactly these.
    let ids = added.iter().map(|added| (added.token.content.clone(), added.id)).collect();
    guarded(|| {
        let ids = WordLevel::builder().vocab(ids).build()?;
        let mut vocabulary = AddedVocabulary::new();
        vocabulary.add_tokens(added.iter().map(|added| added.token.clone()), &ids, normalizer)?;
        Ok(vocabulary)
    })
}

/// Runs the crate's code, and turns both its errors and its panics into a message.
pub(super) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("the tokenizers library failed: {}", panic_text(&*panic))),
    }
}
