//! Builds the tokenizer of a model from GGUF metadata or a Hugging Face folder.
//!
//! This file knows the names of keys and files; `text::tokenizer` implements vocabularies. Every error names
//! the file, and the key if there is one.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::AddedToken;

use super::hf::{MAX_FILE_BYTES, optional_json};
use super::metadata::Metadata;
use super::tokenizer_files;
use crate::text::{HfSettings, TokenKind, Tokenizer, VocabSpec, is_turn_end};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::read::read_optional;

/// Builds the tokenizer from a GGUF file's metadata.
///
/// # Errors
/// [`LoadError::Malformed`] for a missing or mistyped key, [`LoadError::Tokenizer`] for a vocabulary that
/// contradicts itself or is of a kind llmctl does not run.
pub fn from_gguf(metadata: &Metadata) -> LoadResult<Tokenizer> {
    Tokenizer::from_vocab(&vocab_spec(metadata)?)
}

/// Reads GGUF metadata as plain data, with llama.cpp's defaults for keys that older converters left out.
///
/// # Errors
/// [`LoadError::Malformed`] for a missing or mistyped key.
pub fn vocab_spec(metadata: &Metadata) -> LoadResult<VocabSpec> {
    let model: &str = metadata.require("tokenizer.ggml.model")?;
    let architecture: &str = metadata.get("general.architecture")?.unwrap_or_default();
    let pre: Option<&str> = metadata.get("tokenizer.ggml.pre")?;
    let pre = pre.or_else(|| pre_by_architecture(architecture)).map(str::to_owned);
    let mut spec = VocabSpec {
        model: model.to_owned(),
        pre,
        tokens: texts(metadata, "tokenizer.ggml.tokens")?.unwrap_or_default(),
        kinds: kinds(metadata)?,
        scores: metadata.get("tokenizer.ggml.scores")?.unwrap_or_default(),
        merges: texts(metadata, "tokenizer.ggml.merges")?.unwrap_or_default(),
        bos: metadata.get("tokenizer.ggml.bos_token_id")?,
        eos: metadata.get("tokenizer.ggml.eos_token_id")?,
        unk: metadata.get("tokenizer.ggml.unknown_token_id")?,
        add_bos: metadata.get("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.get("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
        remove_extra_whitespaces: metadata.get("tokenizer.ggml.remove_extra_whitespaces")?,
        strip_right: Vec::new(),
    };
    match model {
        "llama" => sentencepiece_defaults(&mut spec),
        "bert" => {
            spec.bos = metadata.get("tokenizer.ggml.cls_token_id")?.or(spec.bos);
            // llama.cpp's spelling.
            spec.eos = metadata.get("tokenizer.ggml.seperator_token_id")?.or(spec.eos);
            // As llama.cpp, which ends each text with it: `add_sep_token` is about pairs of texts in newer files.
            spec.add_eos = None;
        }
        _ => {}
    }
    for id in mistyped(&spec.tokens, &spec.kinds) {
        spec.kinds[id] = TokenKind::Control;
    }
    let name: &str = metadata.get("general.name")?.unwrap_or_default();
    spec.strip_right = strip_right(name, &spec);
    Ok(spec)
}

/// Returns the places of tokens that end turns and are typed as plain text, a fault of some converters that llama.cpp corrects too.
fn mistyped(tokens: &[impl AsRef<str>], kinds: &[TokenKind]) -> Vec<usize> {
    let typed = tokens.iter().zip(kinds).enumerate();
    let wrong = typed.filter(|(_, (text, kind))| **kind == TokenKind::Normal && is_turn_end(text.as_ref()));
    wrong.map(|(id, _)| id).collect()
}

/// Returns the texts of a GGUF file's tokens whose types are corrected.
///
/// # Errors
/// As [`vocab_spec`].
pub fn corrected(metadata: &Metadata) -> LoadResult<Vec<String>> {
    let tokens: Vec<&str> = metadata.get("tokenizer.ggml.tokens")?.unwrap_or_default();
    let ids = mistyped(&tokens, &kinds(metadata)?);
    Ok(ids.into_iter().map(|id| tokens[id].to_owned()).collect())
}

/// Chooses the pre-tokenizer for files from before `tokenizer.ggml.pre`. llama.cpp falls back to a rule that fits
/// none of these; the publishers' rules are known.
fn pre_by_architecture(architecture: &str) -> Option<&'static str> {
    match architecture {
        "gpt2" | "phi2" => Some("gpt-2"),
        "gptneox" => Some("olmo"), // GPT-2's words on composed characters
        "falcon" => Some("falcon"),
        "starcoder" | "starcoder2" => Some("starcoder"),
        "qwen" | "qwen2" | "qwen2moe" | "qwen3" | "qwen3moe" => Some("qwen2"),
        _ => None,
    }
}

/// Sets SentencePiece's customary ids if the file lists none and the vocabulary agrees.
fn sentencepiece_defaults(spec: &mut VocabSpec) {
    let is = |id: usize, kind: TokenKind| spec.kinds.get(id).is_some_and(|&found| found == kind);
    let unk = is(0, TokenKind::Unknown).then_some(0);
    let bos = is(1, TokenKind::Control).then_some(1);
    let eos = is(2, TokenKind::Control).then_some(2);
    spec.unk = spec.unk.or(unk);
    spec.bos = spec.bos.or(bos);
    spec.eos = spec.eos.or(eos);
}

/// Returns the special tokens that strip white space behind them. GGUF cannot express it; llama.cpp derives it for
/// phi-3 from the model's name: all special tokens but these.
fn strip_right(model_name: &str, spec: &VocabSpec) -> Vec<u32> {
    const KEEP: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];
    let name = model_name.to_lowercase();
    if !(name.contains("phi-3") || name.contains("phi3")) {
        return Vec::new();
    }
    let listed = (0u32..).zip(spec.tokens.iter().zip(&spec.kinds));
    let strips = |text: &String, kind: TokenKind| {
        (kind.is_special() || kind == TokenKind::UserDefined) && !KEEP.contains(&text.as_str())
    };
    listed.filter(|(_, (text, kind))| strips(text, **kind)).map(|(id, _)| id).collect()
}

fn texts(metadata: &Metadata, key: &str) -> LoadResult<Option<Vec<String>>> {
    let values: Option<Vec<&str>> = metadata.get(key)?;
    Ok(values.map(|values| values.into_iter().map(str::to_owned).collect()))
}

fn kinds(metadata: &Metadata) -> LoadResult<Vec<TokenKind>> {
    let numbers: Vec<u32> = metadata.get("tokenizer.ggml.token_type")?.unwrap_or_default();
    let kind = |number| {
        let unknown =
            || LoadError::Tokenizer(format!("tokenizer.ggml.token_type: {number} is no token type"));
        TokenKind::from_number(number).ok_or_else(unknown)
    };
    numbers.into_iter().map(kind).collect()
}

/// Builds the tokenizer of a Hugging Face folder: tokenizer.json with the settings of tokenizer_config.json,
/// completed by the older special_tokens_map.json. Without a tokenizer.json, tokenizer.model or tekken.json is read.
///
/// # Errors
/// [`LoadError::NotFound`] without any of these files, [`LoadError::Malformed`] for a damaged one,
/// [`LoadError::Tokenizer`] for a tokenizer that cannot be built.
pub fn from_folder(folder: &Path) -> LoadResult<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let settings = hf_settings(folder)?;
    let Some(json) = read_optional(&path, MAX_FILE_BYTES)? else {
        let spec = tokenizer_files::vocab_spec(folder, &settings)?.ok_or(LoadError::NotFound(path))?;
        return Tokenizer::from_vocab(&spec);
    };
    Tokenizer::from_json(&json, &settings).map_err(|error| match error {
        LoadError::Tokenizer(message) => LoadError::Tokenizer(format!("{}: {message}", path.display())),
        other => other,
    })
}

/// Reads the tokenizer settings from a folder's configuration files.
///
/// # Errors
/// [`LoadError::Malformed`] or [`LoadError::Io`] naming the file.
pub fn hf_settings(folder: &Path) -> LoadResult<HfSettings> {
    let config: TokenizerConfig = parse(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let map: TokenizerConfig = parse(&folder.join("special_tokens_map.json"))?.unwrap_or_default();
    let text = |first: Option<TokenName>, second: Option<TokenName>| first.or(second).map(TokenName::text);
    Ok(HfSettings {
        bos: text(config.bos_token, map.bos_token),
        eos: text(config.eos_token, map.eos_token),
        add_bos: config.add_bos_token,
        add_eos: config.add_eos_token,
        added: added_tokens(config.added_tokens_decoder),
    })
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct TokenizerConfig {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    added_tokens_decoder: Option<Value>,
}

/// A token by its text, or as a serialised AddedToken.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Text(String),
    Token { content: String },
}

impl TokenName {
    fn text(self) -> String {
        match self {
            TokenName::Text(text) | TokenName::Token { content: text } => text,
        }
    }
}

/// Parses `{"151643": {"content": ..., "special": ...}, ...}`; entries of any other form are left to tokenizer.json.
fn added_tokens(decoder: Option<Value>) -> Vec<(u32, AddedToken)> {
    let Some(Value::Object(entries)) = decoder else { return Vec::new() };
    let entry = |(id, token): (String, Value)| Some((id.parse().ok()?, serde_json::from_value(token).ok()?));
    entries.into_iter().filter_map(entry).collect()
}

fn parse<T: DeserializeOwned>(path: &Path) -> LoadResult<Option<T>> {
    let parsed = optional_json(path)?.map(serde_json::from_value).transpose();
    parsed.map_err(|error| LoadError::malformed(path, "JSON", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(files: &[(&str, &str)]) -> LoadResult<HfSettings> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        hf_settings(folder.path())
    }

    #[test]
    fn names_of_tokens_in_all_their_forms() {
        let config = r#"{"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "add_bos_token": true}"#;
        let map = r#"{"bos_token": "<other>", "eos_token": {"content": "<end>"}}"#;
        let both = settings(&[("tokenizer_config.json", config), ("special_tokens_map.json", map)]).unwrap();
        assert_eq!((both.bos.as_deref(), both.eos.as_deref()), (Some("<s>"), Some("</s>")));
        assert_eq!((both.add_bos, both.add_eos), (Some(true), None));
        let map_only = settings(&[("special_tokens_map.json", map)]).unwrap();
        assert_eq!((map_only.bos.as_deref(), map_only.eos.as_deref()), (Some("<other>"), Some("<end>")));
        let null = settings(&[("tokenizer_config.json", r#"{"bos_token": null}"#)]).unwrap();
        assert_eq!((null.bos, null.eos), (None, None));
        assert!(settings(&[]).unwrap().added.is_empty());
    }

    #[test]
    fn added_tokens_that_only_the_settings_know() {
        let config = r#"{"added_tokens_decoder": {"7": {"content": "<x>", "lstrip": false, "normalized": false,
            "rstrip": false, "single_word": false, "special": true}, "eight": {}, "9": {"content": 1}}}"#;
        let added = settings(&[("tokenizer_config.json", config)]).unwrap().added;
        assert_eq!(added.len(), 1, "broken entries are left out");
        assert_eq!((added[0].0, added[0].1.content.as_str(), added[0].1.special), (7, "<x>", true));
    }

    #[test]
    fn ends_of_turns_that_are_typed_as_text_are_found() {
        let tokens = ["a", "<|im_end|>", "</s>", "<|im_end|>", "<tool_call>", "<end_of_turn>"];
        let mut kinds = [TokenKind::Normal; 6];
        kinds[3] = TokenKind::Control;
        assert_eq!(mistyped(&tokens, &kinds), [1, 5]);
        assert_eq!(mistyped(&tokens, &[]), [0; 0]);
    }

    #[test]
    fn errors_name_the_file() {
        let message = settings(&[("tokenizer_config.json", "{")]).unwrap_err().to_string();
        assert!(message.contains("tokenizer_config.json"), "{message}");
        let folder = tempfile::tempdir().unwrap();
        let missing = from_folder(folder.path()).unwrap_err();
        assert!(
            matches!(&missing, LoadError::NotFound(path) if path.ends_with("tokenizer.json")),
            "{missing}"
        );
        std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        let message = from_folder(folder.path()).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json: missing field `model`"), "{message}");
    }
}
