//! Reads tokenizer.json, Hugging Face's format, part by part.
//!
//! The crate's own loader is not used because it hides the post-processor's effect and the declared ids, and
//! keeps truncation and padding, which do not belong here. Format: the tokenizers crate's serialisation,
//! version 1.0.

use std::collections::HashSet;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken, Encoding, Model, ModelWrapper, NormalizerWrapper, PostProcessor, PostProcessorWrapper,
    PreTokenizerWrapper, Token,
};

use super::pieces::{Spelling, Table};
use super::pipeline::guarded;
use super::speller::Added;

/// Settings beside tokenizer.json (tokenizer_config.json, special_tokens_map.json).
#[derive(Debug, Clone, Default)]
pub struct HfSettings {
    pub bos: Option<String>,
    pub eos: Option<String>,
    /// Overrides the post-processor, as `add_bos_token` does in transformers.
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    /// Added tokens that tokenizer.json may lack (`added_tokens_decoder`).
    pub added: Vec<(u32, AddedToken)>,
}

/// Most unused ids. More mean a damaged file, not padding: tables are sized by the largest id.
const MAX_HOLES: usize = 1 << 20;

#[derive(Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    #[serde(default)]
    pub normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(default)]
    post_processor: Option<PostProcessorWrapper>,
    #[serde(default)]
    decoder: Option<Value>,
    pub model: ModelWrapper,
}

#[derive(Deserialize)]
struct AddedEntry {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

impl TokenizerJson {
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let mut file: TokenizerJson = guarded(|| Ok(serde_json::from_slice(json)?))?;
        match &mut file.model {
            ModelWrapper::BPE(bpe) => {
                bpe.dropout = None; // dropout is for training; ids must not be random
                Ok(file)
            }
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) | ModelWrapper::Unigram(_) => Ok(file),
        }
    }

    /// Returns the added tokens of the file, then those only in the settings. As in the crate, the model's
    /// own id of a text takes precedence over the declared one.
    pub fn added(&self, settings: &HfSettings) -> Vec<Added> {
        let mut added: Vec<Added> = Vec::new();
        let mut known = HashSet::from([String::new()]); // an empty token could match nothing
        let mut add = |id: Option<u32>, token: &AddedToken| {
            let id = self.model.token_to_id(&token.content).or(id);
            if let (Some(id), false) = (id, known.contains(&token.content)) {
                known.insert(token.content.clone());
                // Match special tokens before normalising. Llama 2's file asks for normalised text, where '▁'
                // precedes the text, so "<s>" would match only after a space. sentencepiece, GGUF and later
                // revisions of the file match the raw text.
                let normalized = token.normalized && !token.special;
                added.push(Added { id, token: token.clone().normalized(normalized) });
            }
        };
        self.added_tokens.iter().for_each(|entry| add(Some(entry.id), &entry.token));
        settings.added.iter().for_each(|(id, token)| add(Some(*id), token));
        // A BOS or EOS that is only a vocabulary entry is special too.
        let named = [&settings.bos, &settings.eos].into_iter().flatten();
        named.for_each(|text| add(None, &AddedToken::from(text.clone(), true)));
        added
    }

    /// Returns the ids that the post-processor puts before and after a text.
    pub fn surroundings(&self) -> Result<(Vec<u32>, Vec<u32>), String> {
        const TEXT: u32 = u32::MAX; // placeholder for the text's own ids
        let Some(processor) = &self.post_processor else { return Ok(Default::default()) };
        let encoding = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
        let ids = guarded(|| Ok(processor.process(encoding, None, true)?.get_ids().to_vec()))?;
        let at = ids.iter().position(|&id| id == TEXT);
        let at = at.ok_or("the post-processor drops the text")?;
        Ok((ids[..at].to_vec(), ids[at + 1..].to_vec()))
    }

    /// Returns the ids that the post-processor puts before, between and behind a pair of texts; `None` without one, or if it
    /// does not keep their order.
    pub fn pair_surroundings(&self) -> Option<[Vec<u32>; 3]> {
        const TEXTS: [u32; 2] = [u32::MAX, u32::MAX - 1]; // placeholders for the texts' own ids
        let processor = self.post_processor.as_ref()?;
        let [first, second] =
            TEXTS.map(|id| Encoding::from_tokens(vec![Token::new(id, String::new(), (0, 0))], 0));
        let ids = guarded(|| Ok(processor.process(first, Some(second), true)?.get_ids().to_vec())).ok()?;
        let [first, second] = TEXTS.map(|text| ids.iter().position(|&id| id == text));
        let (first, second) = first.zip(second).filter(|(first, second)| first < second)?;
        Some([&ids[..first], &ids[first + 1..second], &ids[second + 1..]].map(<[u32]>::to_vec))
    }

    /// Returns texts and bytes of all ids.
    pub fn tables(&self, added: &[Added]) -> Result<(Table, Table), String> {
        let spelling = self.spelling();
        let vocab = self.model.get_vocab();
        let ids = vocab.values().copied().chain(added.iter().map(|added| added.id));
        let size = ids.max().map_or(0, |id| id as usize + 1);
        if size > vocab.len() + added.len() + MAX_HOLES {
            return Err(format!("token id {} in a vocabulary of {} tokens", size - 1, vocab.len()));
        }
        let mut entries: Vec<Option<(&str, Vec<u8>)>> = vec![None; size];
        for (text, &id) in &vocab {
            entries[id as usize] = Some((text, spelling.bytes(text)));
        }
        for Added { id, token } in added {
            let literal = token.special || spelling != Spelling::SentencePiece;
            let bytes = if literal { token.content.clone() } else { token.content.replace('▁', " ") };
            entries[*id as usize] = Some((&token.content, bytes.into_bytes()));
        }
        let (mut texts, mut bytes) = (Table::default(), Table::default());
        for entry in &entries {
            let (text, value) = entry.as_ref().map_or(("", &[][..]), |(text, value)| (*text, value));
            texts.push(text.as_bytes())?;
            bytes.push(value)?;
        }
        Ok((texts, bytes))
    }

    /// Returns the spelling of the vocabulary, from the decoder or, without one, from the pre-tokenizer.
    fn spelling(&self) -> Spelling {
        let pre_tokenizer = || serde_json::to_value(&self.pre_tokenizer).ok();
        let decoder = self.decoder.clone().filter(|decoder| !decoder.is_null());
        let part = decoder.or_else(pre_tokenizer).unwrap_or_default();
        if mentions(&part, "type", &["ByteLevel"]) {
            Spelling::ByteLevel
        } else if mentions(&part, "type", &["Metaspace", "ByteFallback"]) || mentions(&part, "String", &["▁"])
        {
            Spelling::SentencePiece
        } else {
            Spelling::Literal
        }
    }
}

/// Returns whether a key has one of the values at any depth (the parser bounds the depth).
fn mentions(json: &Value, key: &str, values: &[&str]) -> bool {
    match json {
        Value::Array(items) => items.iter().any(|item| mentions(item, key, values)),
        Value::Object(fields) => fields.iter().any(|(name, value)| {
            let here = name == key && value.as_str().is_some_and(|value| values.contains(&value));
            here || mentions(value, key, values)
        }),
        _ => false,
    }
}
