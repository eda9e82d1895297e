//! BPE by merge list, as GGUF stores it, on the tokenizers crate's model.
//!
//! `gpt2`: byte-level, with words cut by the rule that `tokenizer.ggml.pre` names; two names mean `gemma4`.
//! `gemma4`: SentencePiece spelling ('▁', byte fallback) with a merge list, and lines as words. Control and
//! unused tokens stay out of the model, so no text can encode to them; merges that lead to them are dropped.

use std::collections::HashSet;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::replace::Replace;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::pieces::Spelling;
use super::pipeline::guarded;
use super::pretokenize::PreRule;
use super::speller::Speller;
use super::vocab::{TokenKind, VocabSpec};

/// Parts of a tokenizer made from a vocabulary, without its added tokens.
pub(super) struct TokenizerParts {
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub speller: Speller,
    pub spelling: Spelling,
    /// True if a BOS is added where the file does not say.
    pub adds_bos: bool,
}

/// Builds a byte-level tokenizer.
///
/// # Errors
/// An unknown pre-tokenizer, or merges that do not fit the vocabulary.
pub(super) fn byte_level(spec: &VocabSpec) -> Result<TokenizerParts, String> {
    let name = spec.pre.as_deref().unwrap_or("default");
    if PreRule::is_sentence_piece(name) {
        return Ok(TokenizerParts { adds_bos: false, ..gemma4(spec)? });
    }
    let rule = PreRule::named(name)?;
    let (vocab, merges) = vocab_and_merges(spec)?;
    let model =
        guarded(|| BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rule.ignore_merges).build())?;
    Ok(TokenizerParts {
        normalizer: rule.normalizer(),
        pre_tokenizer: Some(rule.pre_tokenizer()?),
        speller: Speller::Crate(Box::new(ModelWrapper::BPE(model))),
        spelling: Spelling::ByteLevel,
        adds_bos: rule.adds_bos,
    })
}

/// Builds a Gemma 4 tokenizer.
///
/// # Errors
/// Merges that do not fit the vocabulary.
pub(super) fn gemma4(spec: &VocabSpec) -> Result<TokenizerParts, String> {
    let (vocab, merges) = vocab_and_merges(spec)?;
    let unknown = spec.unk.and_then(|id| spec.tokens.get(id as usize)).cloned();
    guarded(|| {
        let mut vocab = vocab;
        let mut builder = BPE::builder().byte_fallback(true).fuse_unk(true);
        if let Some((text, id)) = unknown.zip(spec.unk) {
            vocab.insert(text.clone(), id);
            builder = builder.unk_token(text);
        }
        let model = builder.vocab_and_merges(vocab, merges).build()?;
        let lines = SplitPattern::Regex(r"[^\n]+|\n+".to_owned());
        let lines = Split::new(lines, SplitDelimiterBehavior::Isolated, false)?;
        Ok(TokenizerParts {
            normalizer: Some(NormalizerWrapper::Replace(Replace::new(" ", "▁")?)),
            pre_tokenizer: Some(PreTokenizerWrapper::Split(lines)),
            speller: Speller::Crate(Box::new(ModelWrapper::BPE(model))),
            spelling: Spelling::SentencePiece,
            adds_bos: true,
        })
    })
}

fn vocab_and_merges(spec: &VocabSpec) -> Result<(Vocab, Merges), String> {
    let mut vocab = Vocab::default();
    let mut unspellable = HashSet::new();
    for (id, text) in (0u32..).zip(&spec.tokens) {
        match spec.kind(id) {
            TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte => {
                vocab.insert(text.clone(), id);
            }
            TokenKind::Control | TokenKind::Unknown | TokenKind::Unused => {
                unspellable.insert(text.as_str());
            }
        }
    }
    let mut merges = Merges::with_capacity(spec.merges.len());
    for (index, merge) in spec.merges.iter().enumerate() {
        let malformed = |why: &str| format!("tokenizer.ggml.merges: entry {index} ({merge:?}) {why}");
        // The first character belongs to the left side even if it is a space.
        let split = merge.char_indices().skip(1).find(|&(_, c)| c == ' ');
        let (at, _) = split.ok_or_else(|| malformed("is not two tokens with a space between"))?;
        let (left, right) = (&merge[..at], &merge[at + 1..]);
        let joined = [left, right].concat();
        let mut missing = [left, right, &joined].into_iter().filter(|&part| !vocab.contains_key(part));
        match missing.next() {
            None => merges.push((left.to_owned(), right.to_owned())),
            Some(part) if unspellable.contains(part) => {}
            Some(part) => return Err(malformed(&format!("needs {part:?}, which is no token"))),
        }
    }
    Ok((vocab, merges))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(tokens: &[&str], merges: &[&str]) -> VocabSpec {
        let owned = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
        VocabSpec { tokens: owned(tokens), merges: owned(merges), ..VocabSpec::default() }
    }

    #[test]
    fn merges_must_fit_the_vocabulary() {
        assert!(vocab_and_merges(&spec(&["a", "b", "ab"], &["a b"])).is_ok());
        let message = |merges: &[&str]| vocab_and_merges(&spec(&["a", "b", "ab"], merges)).unwrap_err();
        assert!(message(&["a b", "b a"]).contains("entry 1 (\"b a\") needs \"ba\""), "{}", message(&["b a"]));
        assert!(message(&["ab"]).contains("not two tokens"));
        assert!(message(&[""]).contains("not two tokens"));
    }

    #[test]
    fn merges_into_control_tokens_are_dropped() {
        let mut spec = spec(&["a", "b", "ab"], &["a b"]);
        spec.kinds = vec![TokenKind::Normal, TokenKind::Normal, TokenKind::Control];
        let (vocab, merges) = vocab_and_merges(&spec).unwrap();
        assert!(merges.is_empty() && !vocab.contains_key("ab"));
    }
}
