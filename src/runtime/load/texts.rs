//! The text side of a model's files, without weights: for inspecting templates.
//!
//! Uses the same readers as loading. A folder without config.json, weights or even a tokenizer is accepted; damaged
//! files are errors.

use std::path::Path;
use std::sync::Arc;

use super::files::{ModelFiles, folder_generation};
use super::hf::{self, ChatTemplates};
use super::hub::ModelSource;
use super::tokenizer;
use crate::runtime::error::LoadError;
use crate::runtime::text::Tokenizer;

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
    pub fn open(source: &ModelSource) -> Result<Self, LoadError> {
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

fn folder(path: &Path) -> Result<TextParts, LoadError> {
    let config = hf::optional_json(&path.join("config.json"))?.unwrap_or_default();
    let listed = folder_generation(path, &config)?.eos_token_ids;
    let tokenizer = match tokenizer::from_folder(path) {
        Ok(tokenizer) => Some(tokenizer),
        Err(LoadError::NotFound(_)) => None,
        Err(error) => return Err(error),
    };
    Ok((tokenizer, hf::chat_templates(path, hf::tokenizer_config(path)?.as_ref())?, listed))
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
