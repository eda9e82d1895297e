//! An opened model of either format: configuration, tensors, tokenizer, template and generation settings,
//! before any weight is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::gguf::Gguf;
use super::gguf_config::gguf_config_reader;
use super::hf::{self, ChatTemplates, GenerationConfig};
use super::metadata::Metadata;
use super::packed::{PackedFacts, PackedTensors};
use super::safetensors::{self, Safetensors};
use super::tokenizer;
use crate::hints::Hints;
use crate::model::arch::ConfigReader;
use crate::tensor::TensorSource;
use crate::text::Tokenizer;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::notice::Notice;
use llmctl_base::{GivenSampling, SAMPLING, TopK};
use llmctl_hub::builtin::BuiltIn;
use llmctl_hub::{ModelSource, Resolved};

/// The files of one model. Opening them reads headers only.
pub struct ModelFiles {
    files: Files,
    config_reader: ConfigReader,
    built_in: Option<&'static BuiltIn>,
    mmproj: Option<PathBuf>,
}

enum Files {
    Gguf(Arc<Gguf>),
    Folder { path: PathBuf, config: Value, tensors: FolderTensors },
}

/// The weights of a folder.
enum FolderTensors {
    Plain(Safetensors),
    Packed(PackedTensors),
}

impl FolderTensors {
    fn files(&self) -> &Safetensors {
        match self {
            FolderTensors::Plain(files) => files,
            FolderTensors::Packed(packed) => packed.files(),
        }
    }
}

impl ModelFiles {
    /// Opens a model's files, and notes where its tower is.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn of(resolved: &Resolved) -> LoadResult<Self> {
        Ok(Self { mmproj: resolved.mmproj.clone(), ..Self::open(&resolved.source)? })
    }

    /// # Errors
    /// `LoadError` naming the file and the key or tensor at fault.
    pub fn open(source: &ModelSource) -> LoadResult<Self> {
        match source {
            ModelSource::Gguf(path) => Ok(Self::of_gguf(Gguf::open(path)?)),
            ModelSource::BuiltIn(model) => {
                let gguf = Gguf::from_bytes(model.path(), crate::tensor::SharedBytes::from(model.bytes()))?;
                Ok(Self { built_in: Some(model), ..Self::of_gguf(gguf) })
            }
            ModelSource::Folder(path) => {
                let config = hf::config(path)?;
                let config_reader = ConfigReader::hugging_face(path.join("config.json"), config.clone());
                let files = Safetensors::open(path)?;
                let tensors = match PackedTensors::of(&path.join("config.json"), &config, files)? {
                    Ok(packed) => FolderTensors::Packed(packed),
                    Err(plain) => FolderTensors::Plain(plain),
                };
                Ok(Self {
                    files: Files::Folder { path: path.clone(), config, tensors },
                    config_reader,
                    built_in: None,
                    mmproj: None,
                })
            }
        }
    }

    fn of_gguf(gguf: Gguf) -> Self {
        let gguf = Arc::new(gguf);
        let config_reader = gguf_config_reader(&gguf);
        Self { files: Files::Gguf(gguf), config_reader, built_in: None, mmproj: None }
    }

    /// Returns the mmproj file that belongs to the model.
    pub fn mmproj(&self) -> Option<&Path> {
        self.mmproj.as_deref()
    }

    pub fn config_reader(&self) -> &ConfigReader {
        &self.config_reader
    }

    pub fn tensors(&self) -> &dyn TensorSource {
        match &self.files {
            Files::Gguf(gguf) => &**gguf,
            Files::Folder { tensors: FolderTensors::Plain(files), .. } => files,
            Files::Folder { tensors: FolderTensors::Packed(packed), .. } => packed,
        }
    }

    /// Returns the facts about a folder's packed matrices; `None` if it has none.
    pub fn packed(&self) -> Option<PackedFacts> {
        match &self.files {
            Files::Folder { tensors: FolderTensors::Packed(packed), .. } => Some(packed.facts()),
            _ => None,
        }
    }

    /// Checks a folder's packed matrices, from the headers alone.
    ///
    /// # Errors
    /// `LoadError::Tensor` naming the first that cannot be read.
    pub fn check_packed(&self) -> LoadResult<()> {
        match &self.files {
            Files::Folder { tensors: FolderTensors::Packed(packed), .. } => packed.check(),
            _ => Ok(()),
        }
    }

    /// Returns the GGUF file; `None` for a folder.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.files {
            Files::Gguf(gguf) => Some(gguf),
            Files::Folder { .. } => None,
        }
    }

    /// Returns the weight files, their bytes, and the length of each header in bytes.
    pub fn contents(&self) -> Vec<(&Path, &[u8], usize)> {
        match &self.files {
            Files::Gguf(gguf) => gguf.contents().collect(),
            Files::Folder { tensors, .. } => tensors.files().contents().collect(),
        }
    }

    /// Adds the file to an error of a tensor, if the model has several.
    pub fn placed(&self, error: LoadError) -> LoadError {
        let LoadError::Tensor { tensor, message } = error else { return error };
        let file = match &self.files {
            Files::Gguf(gguf) => gguf.file_of(&tensor),
            Files::Folder { tensors, .. } => tensors.files().file_of(&tensor),
        };
        let place = file.map_or(String::new(), |file| format!(" (in {})", file.display()));
        LoadError::Tensor { tensor, message: message + &place }
    }

    /// Returns whether the weights are part of the executable, so that their age is the executable's.
    pub fn is_built_in(&self) -> bool {
        self.built_in.is_some()
    }

    /// Returns the hints that are added to the prompts of a built-in model.
    pub fn hints(&self) -> Option<Hints> {
        let parse = |model: &BuiltIn| Hints::parse(model.hints).expect("the index that was compiled in");
        self.built_in.map(parse)
    }

    /// Returns the folder with the files that describe the weights; `None` if the weights' own header does.
    pub fn folder(&self) -> Option<&Path> {
        match &self.files {
            Files::Gguf(_) => None,
            Files::Folder { path, .. } => Some(path),
        }
    }

    /// Names the source of the model's own settings, for messages.
    pub fn settings_source(&self) -> &'static str {
        match self.files {
            Files::Gguf(_) => "the GGUF file",
            Files::Folder { .. } => "generation_config.json",
        }
    }

    /// # Errors
    /// `LoadError::Tokenizer`, or `LoadError::Malformed` naming the key.
    pub fn tokenizer(&self) -> LoadResult<Tokenizer> {
        match &self.files {
            Files::Gguf(gguf) => tokenizer::from_gguf(gguf.metadata()),
            Files::Folder { path, .. } => tokenizer::from_folder(path),
        }
    }

    /// Returns what is read in another way than the files say, or not at all.
    ///
    /// # Errors
    /// Those of [`Self::tokenizer`], and of an index of shards.
    pub fn notices(&self) -> LoadResult<Vec<Notice>> {
        match &self.files {
            Files::Gguf(gguf) => {
                let tokens = tokenizer::corrected(gguf.metadata())?;
                Ok(Vec::from_iter((!tokens.is_empty()).then_some(Notice::MistypedTokens(tokens))))
            }
            Files::Folder { path, .. } => {
                Ok(Vec::from_iter(safetensors::has_unused_shards(path)?.then_some(Notice::UnusedShards)))
            }
        }
    }

    /// # Errors
    /// `LoadError::Malformed` if a template is not text.
    pub fn chat_templates(&self) -> LoadResult<ChatTemplates> {
        match &self.files {
            Files::Gguf(gguf) => gguf_templates(gguf.metadata()),
            Files::Folder { path, .. } => hf::chat_templates(path, hf::tokenizer_config(path)?.as_ref()),
        }
    }

    /// Reads sampling defaults and every end-of-generation id that the files list.
    ///
    /// # Errors
    /// `LoadError::Malformed` naming the key.
    pub fn generation(&self) -> LoadResult<GenerationConfig> {
        match &self.files {
            Files::Gguf(gguf) => gguf_generation(gguf.metadata()),
            Files::Folder { path, config, .. } => folder_generation(path, config),
        }
    }
}

/// Reads `tokenizer.chat_template` and the named templates beside it.
fn gguf_templates(metadata: &Metadata) -> LoadResult<ChatTemplates> {
    const KEY: &str = "tokenizer.chat_template";
    let mut templates =
        ChatTemplates { default: metadata.get::<&str>(KEY)?.map(str::to_owned), others: Vec::new() };
    for key in metadata.keys() {
        if let Some(name) = key.strip_prefix(KEY).and_then(|rest| rest.strip_prefix('.')) {
            templates.others.push((name.to_owned(), metadata.require::<&str>(key)?.to_owned()));
        }
    }
    Ok(templates)
}

/// Reads `general.sampling.*`, as llama.cpp's converter writes it, and the ids that end a turn or a message.
fn gguf_generation(metadata: &Metadata) -> LoadResult<GenerationConfig> {
    let top_k: Option<i64> = metadata.get("general.sampling.top_k")?;
    let top_k = top_k.and_then(|k| usize::try_from(k).ok()).filter(|k| *k > 0).map(TopK::Best);
    let mut defaults = GivenSampling { top_k, ..GivenSampling::default() };
    for number in SAMPLING {
        if let Some(key) = number.facts.gguf_key {
            number.give(&mut defaults.numbers, metadata.get(key)?);
        }
    }
    let mut eos_token_ids = Vec::new();
    for key in ["eos", "eot", "eom"] {
        eos_token_ids.extend(metadata.get::<u32>(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    Ok(GenerationConfig { defaults, eos_token_ids })
}

/// Reads generation_config.json, and `eos_token_id` of config.json.
pub(super) fn folder_generation(path: &Path, config: &Value) -> LoadResult<GenerationConfig> {
    let mut generation = hf::generation_config(path)?.unwrap_or_default();
    generation.eos_token_ids.extend(hf::config_eos_ids(path, config)?);
    Ok(generation)
}
