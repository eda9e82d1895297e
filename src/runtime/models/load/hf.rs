//! The plain files of a Hugging Face model folder: configuration, generation defaults, chat templates.
//!
//! Every file is read whole, up to [`MAX_FILE_BYTES`], and every error names the file and the key or the
//! position. A key that is `null` counts as absent, as in Python. `model::arch` interprets the configuration,
//! `tokenizer` the tokenizer's files.

use std::path::Path;

use serde_json::{Map, Value};

use llmctl_base::error::{Error, LoadError, LoadResult};
use llmctl_base::notice::Notice;
use llmctl_base::read::read_optional;
use llmctl_base::{GivenSampling, SAMPLING, SamplingNumbers, TopK};

/// Size limit of a configuration file in bytes; real ones are below a megabyte, the index of a huge model below ten.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads a JSON file; `None` if it does not exist.
///
/// # Errors
/// As [`read_optional`]; [`LoadError::Malformed`] with line and column if it is not JSON.
pub fn optional_json(path: &Path) -> LoadResult<Option<Value>> {
    let Some(bytes) = read_optional(path, MAX_FILE_BYTES)? else { return Ok(None) };
    // Editors on Windows leave a byte order mark, which JSON does not allow but Python's readers accept.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    serde_json::from_slice(text)
        .or_else(|error| serde_json::from_slice(&without_infinities(text)).map_err(|_| error))
        .map(Some)
        .map_err(|error| LoadError::malformed(path, "JSON", error.to_string()))
}

/// Replaces `Infinity`, `-Infinity` and `NaN` outside strings by `null`. Python writes them, as in the
/// `time_step_limit` of models with Mamba-2 mixers; JSON has no such numbers.
fn without_infinities(text: &[u8]) -> Vec<u8> {
    let mut kept = Vec::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(&byte) = rest.first() {
        let name = [&b"-Infinity"[..], b"Infinity", b"NaN"].into_iter().find(|name| rest.starts_with(name));
        let len = match (in_string, name) {
            (false, Some(name)) => {
                kept.extend_from_slice(b"null");
                rest = &rest[name.len()..];
                continue;
            }
            (true, _) if byte == b'\\' => 2.min(rest.len()),
            _ => 1,
        };
        in_string ^= byte == b'"';
        kept.extend_from_slice(&rest[..len]);
        rest = &rest[len..];
    }
    kept
}

/// Reads a required JSON file.
///
/// # Errors
/// Errors of [`optional_json`], and [`LoadError::NotFound`].
pub fn require_json(path: &Path) -> LoadResult<Value> {
    optional_json(path)?.ok_or_else(|| LoadError::NotFound(path.into()))
}

/// Reads `config.json` of a model folder, which must be an object.
///
/// # Errors
/// [`LoadError::NotFound`], [`LoadError::Io`] or [`LoadError::Malformed`] naming the file.
pub fn config(folder: &Path) -> LoadResult<Value> {
    let path = folder.join("config.json");
    let value = require_json(&path)?;
    object(&path, &value)?;
    Ok(value)
}

/// Reads `tokenizer_config.json` of a model folder, if it exists; it must be an object.
///
/// # Errors
/// [`LoadError::Io`] or [`LoadError::Malformed`] naming the file.
pub fn tokenizer_config(folder: &Path) -> LoadResult<Option<Value>> {
    let path = folder.join("tokenizer_config.json");
    let value = optional_json(&path)?;
    value.iter().try_for_each(|value| object(&path, value).map(drop))?;
    Ok(value)
}

fn object<'a>(path: &Path, value: &'a Value) -> LoadResult<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| LoadError::malformed(path, "JSON", "is not an object"))
}

/// Recommendations of `generation_config.json`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    pub defaults: GivenSampling,
    /// Token ids that end a generation; empty if the file lists none.
    pub eos_token_ids: Vec<u32>,
}

/// Reads `generation_config.json` of a model folder, if it exists.
///
/// `"do_sample": false` means greedy, as in transformers: temperature 0, and values that only affect sampling are
/// ignored. `true` without a temperature means 1, as there. If the key is absent but a temperature or the like is given, the value is used: transformers would decode
/// greedily and warn, but servers (vLLM, SGLang) and publishers of such files intend it. `top_k` of 0 or -1 keeps all
/// tokens, like no `top_k` at all.
///
/// # Errors
/// [`LoadError::Malformed`] naming the key, if a value has the wrong type or is out of the range that
/// [`crate::runtime::Sampling::validate`] allows.
pub fn generation_config(folder: &Path) -> LoadResult<Option<GenerationConfig>> {
    let path = folder.join("generation_config.json");
    let Some(value) = optional_json(&path)? else { return Ok(None) };
    let keys = ConfigKeys { path: &path, object: object(&path, &value)? };
    let eos_token_ids = keys.ids("eos_token_id")?;
    let samples = keys.bool("do_sample")?;
    let top_k = keys.top_k()?.map(TopK::Best);
    let mut read = GivenSampling { top_k, ..GivenSampling::default() };
    for number in SAMPLING {
        if let Some(key) = number.facts.config_key {
            number.give(&mut read.numbers, keys.f32(key)?);
        }
    }
    check_ranges(&path, &read)?;
    let repetition_penalty = read.numbers.repetition_penalty;
    let defaults = match samples {
        // The repetition penalty also changes greedy decoding, so it is kept.
        Some(false) => {
            let numbers =
                SamplingNumbers { temperature: Some(0.0), repetition_penalty, ..SamplingNumbers::default() };
            GivenSampling { numbers, ..GivenSampling::default() }
        }
        Some(true) => {
            let temperature = read.numbers.temperature.or(Some(1.0));
            GivenSampling { numbers: SamplingNumbers { temperature, ..read.numbers }, ..read }
        }
        None => read,
    };
    Ok(Some(GenerationConfig { defaults, eos_token_ids }))
}

/// Validates with the sampling parameters' own validator; its parameter names are the file's keys.
fn check_ranges(path: &Path, defaults: &GivenSampling) -> LoadResult<()> {
    defaults.sampling(false).validate(usize::MAX).map_err(|error| match error {
        Error::InvalidParameter { name, message } => {
            LoadError::malformed(path, format!("key {name:?}"), message)
        }
        other => LoadError::malformed(path, "sampling defaults", other.to_string()),
    })
}

/// Reads the end-of-generation ids of config.json, from the top or from the text part of a multimodal model.
///
/// # Errors
/// [`LoadError::Malformed`] naming the key.
pub fn config_eos_ids(folder: &Path, config: &Value) -> LoadResult<Vec<u32>> {
    let path = folder.join("config.json");
    let mut ids = Vec::new();
    for object in [Some(config), config.get("text_config")].into_iter().flatten().filter_map(Value::as_object)
    {
        ids.extend(ConfigKeys { path: &path, object }.ids("eos_token_id")?);
    }
    Ok(ids)
}

/// Typed access to the keys of an object; `null` counts as absent.
struct ConfigKeys<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl<'a> ConfigKeys<'a> {
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn get<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> LoadResult<Option<T>> {
        let wrong = |value| {
            let shown: String = format!("{value}").chars().take(40).collect();
            LoadError::malformed(self.path, format!("key {key:?}"), format!("{shown} is not {wanted}"))
        };
        self.value(key).map(|value| read(value).ok_or_else(|| wrong(value))).transpose()
    }

    fn f32(&self, key: &str) -> LoadResult<Option<f32>> {
        self.get(key, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    fn bool(&self, key: &str) -> LoadResult<Option<bool>> {
        self.get(key, "true or false", Value::as_bool)
    }

    fn top_k(&self) -> LoadResult<Option<usize>> {
        let read = |value: &Value| value.as_i64().filter(|&k| k >= -1);
        let top_k = self.get("top_k", "a whole number of at least -1", read)?;
        Ok(top_k.and_then(|k| usize::try_from(k).ok()).filter(|&k| k > 0))
    }

    /// Reads one token id or a list of them.
    fn ids(&self, key: &str) -> LoadResult<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.get(key, "a token id or a list of them", |value| match value {
            Value::Array(values) => values.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

/// The Jinja sources in a model folder.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatTemplates {
    /// The default template, if the folder has one.
    pub default: Option<String>,
    /// Other templates by name (e.g. `tool_use`, `rag`), in file order.
    pub others: Vec<(String, String)>,
}

impl ChatTemplates {
    /// Returns a notice if the folder has templates that are not used.
    pub fn notice(&self) -> Option<Notice> {
        let names: Vec<String> = self.others.iter().map(|(name, _)| name.clone()).collect();
        let has_default = self.default.is_some();
        (!names.is_empty()).then_some(Notice::UnusedChatTemplates { names, has_default })
    }
}

/// Reads the chat templates of a model folder: `chat_template.jinja`, else `chat_template.json`, else the key
/// `chat_template` of `tokenizer_config.json`. Python's readers use this order.
///
/// # Errors
/// [`LoadError::Io`], or [`LoadError::Malformed`] naming the file, if a template is not text.
pub fn chat_templates(folder: &Path, tokenizer_config: Option<&Value>) -> LoadResult<ChatTemplates> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_optional(&path, MAX_FILE_BYTES)? {
        let text = String::from_utf8(bytes)
            .map_err(|error| LoadError::malformed(&path, "template", format!("is not UTF-8: {error}")))?;
        return Ok(ChatTemplates { default: Some(text), others: vec![] });
    }
    let path = folder.join("chat_template.json");
    if let Some(value) = optional_json(&path)? {
        object(&path, &value)?;
        return templates_of(&path, value.get("chat_template"));
    }
    let path = folder.join("tokenizer_config.json");
    templates_of(&path, tokenizer_config.and_then(|config| config.get("chat_template")))
}

/// Reads the key `chat_template`: a string, or a list of `{"name", "template"}`.
fn templates_of(path: &Path, value: Option<&Value>) -> LoadResult<ChatTemplates> {
    let wrong = |message: &str| LoadError::malformed(path, "key \"chat_template\"", message);
    let list = match value {
        None | Some(Value::Null) => return Ok(ChatTemplates::default()),
        Some(Value::String(text)) => {
            return Ok(ChatTemplates { default: Some(text.clone()), others: vec![] });
        }
        Some(Value::Array(list)) => list,
        Some(_) => return Err(wrong("is neither text nor a list")),
    };
    let mut templates = ChatTemplates::default();
    for entry in list {
        let text = |key| entry.get(key).and_then(Value::as_str);
        match (text("name"), text("template")) {
            (Some("default"), Some(template)) => templates.default = Some(template.into()),
            (Some(name), Some(template)) => templates.others.push((name.into(), template.into())),
            _ => return Err(wrong("has an entry without the texts \"name\" and \"template\"")),
        }
    }
    // A single template is the default, whatever its name.
    if templates.default.is_none() && templates.others.len() == 1 {
        templates.default = templates.others.pop().map(|(_, template)| template);
    }
    Ok(templates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_read_as_absent() {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("config.json");
        std::fs::write(&path, r#"{"limit": [0.0, Infinity], "low": -Infinity, "text": "\"NaN, Infinity"}"#)
            .expect("written");
        let value = require_json(&path).expect("readable");
        assert_eq!(value, serde_json::json!({"limit": [0.0, null], "low": null, "text": "\"NaN, Infinity"}));
        std::fs::write(&path, r#"{"limit": Infinite}"#).expect("written");
        assert!(require_json(&path).is_err());
    }
}
