//! Tokenizers of folders without tokenizer.json: `tokenizer.model` of SentencePiece or tiktoken, and
//! `tekken.json`.
//!
//! tiktoken and Tekken store tokens as bytes with ranks: the pair of neighbours whose union has the lowest
//! rank is merged first. That is byte-level BPE with the merges left out; they follow from the ranks.
//! Formats: tiktoken's `load_tiktoken_bpe`, Meta's `llama3/tokenizer.py`, mistral-common's `tekken.py`.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::hf::{MAX_FILE_BYTES, optional_json};
use super::sentencepiece;
use crate::text::{HfSettings, TokenKind, VocabSpec, byte_level_spelling};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::read::read_optional;

const MODEL: &str = "tokenizer.model";
const TEKKEN: &str = "tekken.json";

/// Tokens of Llama 3's vocabulary without the special ones.
const LLAMA3_TOKENS: usize = 128_000;
/// Llama 3's special tokens at the first ids behind the others; the remaining ones of 256 are reserved.
const LLAMA3_SPECIAL: [&str; 10] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
];
const LLAMA3_NUM_SPECIAL: usize = 256;

/// Reads the vocabulary of a folder; `None` if it has none of these files.
///
/// # Errors
/// [`LoadError::Malformed`] for a damaged file, [`LoadError::Tokenizer`] for a kind that llmctl does not run.
pub fn vocab_spec(folder: &Path, settings: &HfSettings) -> LoadResult<Option<VocabSpec>> {
    let path = folder.join(MODEL);
    if let Some(bytes) = read_optional(&path, MAX_FILE_BYTES)? {
        // The first field of a SentencePiece model; tiktoken's file is text.
        if bytes.first() == Some(&0x0a) {
            return sentencepiece::vocab_spec(folder, &bytes, settings).map(Some);
        }
        let spec = tiktoken(&bytes, settings).map_err(|error| error.at(&path))?;
        return Ok(Some(spec));
    }
    let path = folder.join(TEKKEN);
    let Some(json) = optional_json(&path)? else { return Ok(None) };
    tekken(&json, settings).map(Some).map_err(|error| error.at(&path))
}

/// Why a file gives no vocabulary.
enum RankError {
    Damaged(String),
    Unsupported(String),
}

impl RankError {
    fn at(self, path: &Path) -> LoadError {
        match self {
            RankError::Damaged(message) => LoadError::malformed(path, "vocabulary", message),
            RankError::Unsupported(message) => LoadError::Tokenizer(format!("{}: {message}", path.display())),
        }
    }
}

fn damaged(message: impl Into<String>) -> RankError {
    RankError::Damaged(message.into())
}

/// Reads lines of a token in base64 and its rank.
fn tiktoken(bytes: &[u8], settings: &HfSettings) -> Result<VocabSpec, RankError> {
    let text = str::from_utf8(bytes).map_err(|_| damaged("is neither SentencePiece nor tiktoken"))?;
    let mut tokens = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let wrong = || damaged(format!("line {} is not a token in base64 and its rank", index + 1));
        let (token, rank) = line.split_once(' ').ok_or_else(wrong)?;
        let token = BASE64_STANDARD.decode(token).map_err(|_| wrong())?;
        if rank.trim().parse() != Ok(tokens.len()) {
            return Err(wrong());
        }
        tokens.push(token);
    }
    if tokens.len() != LLAMA3_TOKENS {
        return Err(RankError::Unsupported(format!(
            "not supported: a tiktoken vocabulary of {} tokens, whose rule for words is not known (Llama 3's has \
             {LLAMA3_TOKENS}); a folder with tokenizer.json works",
            tokens.len()
        )));
    }
    let reserved = |id: usize| format!("<|reserved_special_token_{}|>", id - LLAMA3_SPECIAL.len() + 5);
    let special = (0..LLAMA3_NUM_SPECIAL)
        .map(|id| LLAMA3_SPECIAL.get(id).map_or_else(|| reserved(id), |text| (*text).to_owned()));
    let mut special: Vec<String> = special.collect();
    for (id, token) in &settings.added {
        let at = (*id as usize).checked_sub(LLAMA3_TOKENS);
        if let Some(slot) = at.and_then(|at| special.get_mut(at)) {
            slot.clone_from(&token.content);
        }
    }
    let mut spec = ranked(&tokens, "llama-bpe")?;
    spec.tokens.extend(special);
    spec.kinds.resize(spec.tokens.len(), TokenKind::Control);
    name_special(&mut spec, settings, "<|begin_of_text|>", "<|end_of_text|>");
    Ok(spec)
}

/// Reads Mistral's Tekken: special tokens first, then tokens in base64 by rank.
fn tekken(json: &Value, settings: &HfSettings) -> Result<VocabSpec, RankError> {
    let count = |key: &str, most: usize| {
        let value = json["config"][key].as_u64().and_then(|count| usize::try_from(count).ok());
        value
            .filter(|count| *count <= most)
            .ok_or_else(|| damaged(format!("key \"config.{key}\" is not a count up to {most}")))
    };
    let size = count("default_vocab_size", 1 << 24)?;
    let num_special = count("default_num_special_tokens", MAX_TEKKEN_SPECIAL)?;
    let listed = json["vocab"].as_array().ok_or_else(|| damaged("key \"vocab\" is not a list"))?;
    let most = size.checked_sub(num_special).ok_or_else(|| damaged("has more special tokens than tokens"))?;
    let token = |(index, entry): (usize, &Value)| {
        let bytes = entry["token_bytes"].as_str().and_then(|text| BASE64_STANDARD.decode(text).ok());
        bytes
            .filter(|_| entry["rank"].as_u64() == Some(index as u64))
            .ok_or_else(|| damaged(format!("token {index} is not of this rank, or not in base64")))
    };
    let tokens: Vec<Vec<u8>> = listed.iter().take(most).enumerate().map(token).collect::<Result<_, _>>()?;
    let ranked = ranked(&tokens, "tekken")?;
    let mut special: Vec<String> = (0..num_special).map(|id| format!("<SPECIAL_{id}>")).collect();
    for (slot, text) in special.iter_mut().zip(TEKKEN_SPECIAL) {
        (*slot).clone_from(&text.to_owned());
    }
    for entry in json["special_tokens"].as_array().into_iter().flatten() {
        let at = entry["rank"].as_u64().and_then(|rank| usize::try_from(rank).ok());
        if let (Some(slot), Some(text)) = (at.and_then(|at| special.get_mut(at)), entry["token_str"].as_str())
        {
            text.clone_into(slot);
        }
    }
    let mut spec = VocabSpec {
        kinds: [vec![TokenKind::Control; num_special], ranked.kinds].concat(),
        tokens: [special, ranked.tokens].concat(),
        ..ranked
    };
    name_special(&mut spec, settings, "<s>", "</s>");
    Ok(spec)
}

/// Most special tokens of a file, which need not list them; Mistral's have 1,000.
const MAX_TEKKEN_SPECIAL: usize = 1 << 16;

/// Special tokens of files that do not list them (version 3 of Tekken).
const TEKKEN_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// Sets BOS and EOS by the settings' texts, or by the customary ones.
fn name_special(spec: &mut VocabSpec, settings: &HfSettings, bos: &str, eos: &str) {
    let id_of = |given: &Option<String>, usual: &str| {
        let text = given.as_deref().unwrap_or(usual);
        spec.tokens.iter().position(|token| token == text).and_then(|at| u32::try_from(at).ok())
    };
    let (bos, eos) = (id_of(&settings.bos, bos), id_of(&settings.eos, eos));
    (spec.bos, spec.eos) = (bos, eos);
    (spec.add_bos, spec.add_eos) = (settings.add_bos, settings.add_eos);
}

/// Most lookups of pairs to find the merges of all tokens, about as many for each as the square of its bytes. Tekken has 10 million.
const MAX_LOOKUPS: usize = 1 << 28;

/// Returns a byte-level vocabulary with the merges that the ranks imply.
fn ranked(tokens: &[Vec<u8>], pre: &str) -> Result<VocabSpec, RankError> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    if ranks.len() != tokens.len() {
        return Err(damaged("a token is there twice"));
    }
    if tokens.iter().map(|token| token.len().saturating_pow(2)).fold(0, usize::saturating_add) > MAX_LOOKUPS {
        return Err(damaged("has tokens longer than those of any vocabulary"));
    }
    let mut merges = Vec::with_capacity(tokens.len());
    for (rank, token) in tokens.iter().enumerate().filter(|(_, token)| token.len() > 1) {
        if let Some((left, right)) = last_merge(token, rank, &ranks) {
            merges.push(format!("{} {}", byte_level_spelling(left), byte_level_spelling(right)));
        }
    }
    Ok(VocabSpec {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        tokens: tokens.iter().map(|token| byte_level_spelling(token)).collect(),
        kinds: vec![TokenKind::Normal; tokens.len()],
        merges,
        ..VocabSpec::default()
    })
}

/// Returns the two parts that merging by lower ranks leaves of a token; `None` if it leaves more, so that no merge
/// leads to the token.
fn last_merge<'a>(
    token: &'a [u8],
    rank: usize,
    ranks: &HashMap<&[u8], usize>,
) -> Option<(&'a [u8], &'a [u8])> {
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    loop {
        let pairs = cuts.windows(3).enumerate();
        let lowest = pairs
            .filter_map(|(at, ends)| Some((*ranks.get(&token[ends[0]..ends[2]])?, at + 1)))
            .filter(|(found, _)| *found < rank)
            .min();
        let Some((_, at)) = lowest else { break };
        cuts.remove(at);
    }
    match cuts[..] {
        [_, middle, _] => Some(token.split_at(middle)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns why Tekken's file of these tokens is refused.
    fn refusal(num_special: u64, tokens: &[&[u8]]) -> String {
        let entry = |(rank, bytes): (usize, &&[u8])| json!({"rank": rank, "token_bytes": BASE64_STANDARD.encode(bytes)});
        let vocab: Vec<Value> = tokens.iter().enumerate().map(entry).collect();
        let config = json!({"default_vocab_size": 1 << 24, "default_num_special_tokens": num_special});
        let file = json!({"config": config, "vocab": vocab});
        match tekken(&file, &HfSettings::default()) {
            Err(error) => error.at(Path::new("tekken.json")).to_string(),
            Ok(spec) => panic!("{} tokens", spec.tokens.len()),
        }
    }

    #[test]
    fn a_small_file_cannot_ask_for_much_memory_or_time() {
        assert!(refusal(1 << 23, &[b"a"]).contains("default_num_special_tokens"));
        let long = vec![b'a'; 20_000];
        assert!(refusal(2, &[b"a", b"aa", &long]).contains("longer than those of any vocabulary"));
    }
}
