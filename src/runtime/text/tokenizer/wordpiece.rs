//! BERT's tokenizer from a GGUF vocabulary.
//!
//! llama.cpp's converter marks the beginning of a word with '▁' and leaves out the `##` of the other tokens, and files do not
//! say whether the model was trained on lower case: llama.cpp always lowers, and removes accents.

use serde_json::{Map, Value, json};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::bpe::TokenizerParts;
use super::pieces::Spelling;
use super::pipeline::guarded;
use super::speller::Speller;
use super::vocab::{TokenKind, VocabSpec};

/// The ids of `[UNK]`, `[CLS]` and `[SEP]` in BERT's own vocabulary, for files that do not list them.
pub(super) const UNKNOWN: u32 = 100;
pub(super) const FIRST: u32 = 101;
pub(super) const LAST: u32 = 102;

/// Builds a WordPiece tokenizer.
///
/// # Errors
/// A vocabulary without the unknown token.
pub(super) fn wordpiece(spec: &VocabSpec) -> Result<TokenizerParts, String> {
    let spelled = |(id, text): (u32, &String)| {
        let text = match (spec.kind(id), text.strip_prefix('▁')) {
            (TokenKind::Normal, Some(beginning)) => beginning.to_owned(),
            (TokenKind::Normal, None) => format!("##{text}"),
            _ => text.clone(),
        };
        (text, Value::from(id))
    };
    let unknown = spec.unk.unwrap_or(UNKNOWN);
    let unknown = spec.tokens.get(unknown as usize).ok_or("the vocabulary has no unknown token")?.clone();
    let vocab: Map<String, Value> = (0u32..).zip(&spec.tokens).map(spelled).collect();
    let model = json!({"type": "WordPiece", "vocab": vocab, "unk_token": unknown, "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100});
    let model: ModelWrapper = guarded(|| Ok(serde_json::from_value(model)?))?;
    Ok(TokenizerParts {
        normalizer: Some(NormalizerWrapper::BertNormalizer(BertNormalizer::new(
            true,
            true,
            Some(true),
            true,
        ))),
        pre_tokenizer: Some(PreTokenizerWrapper::BertPreTokenizer(BertPreTokenizer)),
        speller: Speller::Crate(Box::new(model)),
        spelling: Spelling::SentencePiece,
        adds_bos: true,
    })
}
