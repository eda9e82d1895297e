//! BERT's tokenizer from a GGUF vocabulary.
//!
//! llama.cpp's converter marks the beginning of a word with '▁' and leaves out the `##` of the other tokens,
//! and files do not say whether the model was trained on lower case: llama.cpp always lowers, and removes
//! accents.

use serde_json::{Map, Value, json};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::bpe::TokenizerParts;
use super::pieces::Spelling;
use super::pipeline::guarded;
use super::speller::Speller;
use super::vocab::{TokenKind, VocabSpec};

/// Returns the id that the file lists for a special token, or that of its name in BERT's vocabularies.
///
/// # Errors
/// A vocabulary without the token.
pub(super) fn special_id(spec: &VocabSpec, listed: Option<u32>, name: &str) -> Result<u32, String> {
    let id = || Some(spec.tokens.iter().position(|text| text == name)? as u32);
    listed.or_else(id).ok_or_else(|| format!("the vocabulary has no token {name}"))
}

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
    let unknown = spec.tokens[special_id(spec, spec.unk, "[UNK]")? as usize].clone();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;

    #[test]
    fn special_tokens_are_found_by_name_where_the_file_lists_no_ids() {
        let tokens = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let spec = VocabSpec {
            model: "bert".to_owned(),
            tokens: tokens(&["[SEP]", "[UNK]", "\u{2581}a", "[CLS]"]),
            kinds: vec![TokenKind::Control, TokenKind::Unknown, TokenKind::Normal, TokenKind::Control],
            ..VocabSpec::default()
        };
        let encoded = |spec: &VocabSpec| {
            let tokenizer = Tokenizer::from_vocab(spec).map_err(|error| error.to_string())?;
            let options = crate::text::Encode { add_special: true, parse_special: false };
            tokenizer.encode("a", options).map_err(|error| error.to_string())
        };
        assert_eq!(encoded(&spec), Ok(vec![3, 2, 0]));
        let without = VocabSpec { tokens: tokens(&["[SEP]", "[UNK]", "\u{2581}a", "b"]), ..spec };
        assert!(encoded(&without).expect_err("no first token").contains("[CLS]"));
    }
}
