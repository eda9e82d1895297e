//! The text side of a model's files, without weights: for inspecting templates, and for engines elsewhere.
//!
//! Uses the same readers as loading. A folder without config.json, weights or even a tokenizer is accepted;
//! damaged files are errors.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::files::{ModelFiles, folder_generation};
use super::hf::{self, ChatTemplates};
use super::inspect::{DecoderFacts, decoder_facts};
use super::{ModelTexts, fingerprint, load_texts, tokenizer};
use crate::model::arch::ConfigReader;
use crate::model::recognise::recognise;
use crate::text::Tokenizer;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_hub::ModelSource;

/// Files that mark a folder as one with a tokenizer or a template.
const TEXT_FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"];

/// Tokenizer and chat templates of a model.
#[derive(Debug, Clone)]
pub struct TextFiles {
    pub tokenizer: Option<Arc<Tokenizer>>,
    pub chat_templates: ChatTemplates,
    /// Every id that ends a turn.
    pub end_of_generation: Vec<u32>,
}

impl TextFiles {
    /// Reads the texts of a GGUF file (which need not hold tensors), of a folder, or of a built-in model.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and the key at fault.
    pub fn open(source: &ModelSource) -> LoadResult<Self> {
        let (tokenizer, chat_templates, listed) = match source {
            ModelSource::Folder(path) => folder(path)?,
            ModelSource::Gguf(_) | ModelSource::BuiltIn(_) => {
                let files = ModelFiles::open(source)?;
                (Some(files.tokenizer()?), files.chat_templates()?, files.generation()?.eos_token_ids)
            }
        };
        let end_of_generation =
            tokenizer.as_ref().map(|tokenizer| end_of_generation(listed, tokenizer)).unwrap_or_default();
        Ok(Self { tokenizer: tokenizer.map(Arc::new), chat_templates, end_of_generation })
    }

    /// Returns whether a folder holds any text file.
    pub fn are_in(folder: &Path) -> bool {
        TEXT_FILES.iter().any(|name| folder.join(name).is_file())
    }
}

type TextParts = (Option<Tokenizer>, ChatTemplates, Vec<u32>);

fn folder(path: &Path) -> LoadResult<TextParts> {
    let config = hf::optional_json(&path.join("config.json"))?.unwrap_or_default();
    let listed = folder_generation(path, &config)?.eos_token_ids;
    let tokenizer = match tokenizer::from_folder(path) {
        Ok(tokenizer) => Some(tokenizer),
        Err(LoadError::NotFound(_)) => None,
        Err(error) => return Err(error),
    };
    Ok((tokenizer, hf::chat_templates(path, hf::tokenizer_config(path)?.as_ref())?, listed))
}

/// The text side of a model whose weights are elsewhere, and the facts of its configuration.
#[derive(Debug)]
pub struct TextsAlone {
    pub texts: ModelTexts,
    /// Family name, e.g. `qwen3`.
    pub architecture: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// `None` if the files do not say.
    pub context_length: Option<usize>,
}

impl TextsAlone {
    /// Reads a model without looking at its weights. Of a folder they need not be here.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and the key at fault.
    pub fn open(source: &ModelSource) -> LoadResult<Self> {
        match source {
            ModelSource::Folder(path) => {
                let config = hf::config(path)?;
                let reader = ConfigReader::hugging_face(path.join("config.json"), config.clone());
                Ok(Self::described(folder_texts(path, &config)?, &reader, &config))
            }
            ModelSource::Gguf(_) | ModelSource::BuiltIn(_) => {
                let files = ModelFiles::open(source)?;
                Ok(Self::described(load_texts(&files)?, files.config_reader(), &Value::Null))
            }
        }
    }

    /// Reads sizes. A family that llmctl does not run may well run elsewhere, so its description is not needed.
    fn described(texts: ModelTexts, reader: &ConfigReader, config: &Value) -> Self {
        let facts = recognise(reader).ok().map(|recognised| decoder_facts(&recognised));
        let text_config = config.get("text_config").unwrap_or(config);
        let number = |key: &str| text_config[key].as_u64().and_then(|value| usize::try_from(value).ok());
        let vocab_size = facts.as_ref().map(|facts| facts.vocab_size).or_else(|| number("vocab_size"));
        let context_length = facts.map(|facts: DecoderFacts| facts.context_length);
        Self {
            architecture: reader.architecture().unwrap_or_else(|_| "unknown".to_owned()),
            vocab_size: vocab_size.unwrap_or_else(|| texts.tokenizer.vocab_size()),
            context_length: context_length.or_else(|| number("max_position_embeddings")),
            texts,
        }
    }
}

/// Reads the texts of a folder without weights.
fn folder_texts(path: &Path, config: &Value) -> LoadResult<ModelTexts> {
    let tokenizer = tokenizer::from_folder(path)?;
    let generation = folder_generation(path, config)?;
    let listed_ends = generation.eos_token_ids;
    Ok(ModelTexts {
        identity: fingerprint::texts_identity(path)?,
        chat_templates: hf::chat_templates(path, hf::tokenizer_config(path)?.as_ref())?,
        defaults: generation.defaults,
        defaults_source: "generation_config.json",
        end_of_generation: end_of_generation(listed_ends.clone(), &tokenizer),
        listed_ends,
        tokenizer: Arc::new(tokenizer),
        hints: None,
    })
}

/// Collects the end ids that files list, the tokenizer's own and the turn terminators it registers as special, in
/// ascending order.
pub fn end_of_generation(listed: Vec<u32>, tokenizer: &Tokenizer) -> Vec<u32> {
    let mut ids = listed;
    ids.extend(tokenizer.eos());
    ids.extend(tokenizer.turn_terminators());
    ids.sort_unstable();
    ids.dedup();
    ids
}
