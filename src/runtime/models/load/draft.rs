//! Loads the file that `--draft-model` names. A draft model has the model's vocabulary, memory of its own and
//! the model's threads. An assistant becomes a part of the model and reads its KV.
//!
//! Invariant: a token id means the same to both models. Ids beyond a tokenizer's tokens (rows that pad a
//! table) may differ in number.

use std::sync::atomic::AtomicBool;

use super::files::ModelFiles;
use super::{DecoderWith, LoadOptions, decoder, demand, tensor_bytes};
use crate::backend::cpu::CpuThreads;
use crate::memory::Demand;
use crate::model::arch::Description;
use crate::model::decoder::{AssistantParts, Convert, JOINED, RETURNED};
use crate::model::recognise::{Recognised, recognise};
use crate::model::weights::WeightFile;
use crate::model::{Model, ModelSpec, arch};
use crate::text::Tokenizer;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::notice::Notice;
use llmctl_hub::Resolved;

/// Beginnings of the names of tokens that fill up a vocabulary.
const PADDING: [&str; 5] = ["[PAD", "<pad", "<unused", "<|dummy", "<|reserved"];

/// A draft model, an assistant, or the model's own block that predicts further tokens, in memory.
pub struct LoadedDraft {
    /// `None` for the model's own block.
    pub name: Option<String>,
    /// `None` for an assistant, which is a part of the model.
    pub model: Option<Box<dyn Model>>,
    /// Bytes of its weights in memory.
    pub weight_bytes: u64,
}

/// The files of a draft model, before any weight is read.
pub struct DraftFiles {
    name: String,
    /// Name of the model that it drafts for.
    model: String,
    files: ModelFiles,
    description: Description,
    is_assistant: bool,
}

impl LoadedDraft {
    /// Returns the spec of a model of its own.
    pub fn spec(&self) -> Option<&ModelSpec> {
        self.model.as_ref().map(|model| model.spec())
    }
}

impl DraftFiles {
    /// Opens what is to draft for the model named `model`, which is `recognised`.
    ///
    /// # Errors
    /// Those of opening a model; [`LoadError::DraftModel`] for a model that cannot drop rows, for an assistant of another model,
    /// and for a draft model if it `must_assist`.
    pub fn open(
        resolved: &Resolved,
        (model, recognised): (&str, &Recognised),
        must_assist: bool,
    ) -> LoadResult<Self> {
        let files = ModelFiles::open(&resolved.source)?;
        let is_assistant = arch::is_assistant(files.config_reader());
        let described = match is_assistant {
            true => assistant_for(&files, recognised)?,
            false => match recognise(files.config_reader())? {
                Recognised::Native(_) if must_assist => {
                    Err("it is a model of its own, not an assistant; --speculate draft asks for one"
                        .to_owned())
                }
                Recognised::Native(description) => Ok(description),
                #[cfg(feature = "candle-families")]
                Recognised::CandleModel(plan) => Err(format!(
                    "{} runs through candle-transformers and cannot drop rows",
                    plan.architecture
                )),
            },
        };
        let (name, model) = (resolved.name.clone(), model.to_owned());
        match described {
            Ok(description) => Ok(Self { name, model, files, description, is_assistant }),
            Err(message) => Err(LoadError::DraftModel { draft: name, model, message }),
        }
    }

    pub fn is_assistant(&self) -> bool {
        self.is_assistant
    }

    fn refuse(&self, message: String) -> LoadError {
        LoadError::DraftModel { draft: self.name.clone(), model: self.model.clone(), message }
    }

    /// # Errors
    /// [`LoadError::DraftModel`] with the first token that differs from the one in `tokenizer`.
    pub fn check_vocabulary(&self, tokenizer: &Tokenizer) -> LoadResult<()> {
        let own = match self.files.tokenizer() {
            // A folder of an assistant need not repeat the model's.
            Err(LoadError::NotFound(_)) if self.is_assistant => return Ok(()),
            own => own?,
        };
        let (num_own, num_of_model) = (own.vocab_size(), tokenizer.vocab_size());
        match first_difference(&own, tokenizer) {
            None => Ok(()),
            Some(id) => Err(self.refuse(format!(
                "token {id} is {} in the one and {} in the other ({num_own} and {num_of_model} tokens)",
                spelled(own.id_to_token(id)),
                spelled(tokenizer.id_to_token(id)),
            ))),
        }
    }

    /// Adds the memory of the draft model, with a context of `context` tokens or its own, to that of the other.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] for a tensor of an impossible size.
    pub fn add_demand(&self, model: Demand, options: &LoadOptions, context: usize) -> LoadResult<Demand> {
        if self.is_assistant {
            return Ok(Demand {
                weights: model.weights.saturating_add(self.assistant_bytes(options)?),
                ..model
            });
        }
        let own_context = self.description.config.context_length.min(context);
        let own = demand(&self.files, &self.description, options, own_context)?;
        // KV memory that the user gives is the other model's alone, and beyond the own context nothing grows.
        let grows = options.kv_memory.is_none() && own_context == context;
        let kv = if grows { 0 } else { own.kv_per_token.saturating_mul(own_context as u64) };
        Ok(Demand {
            weights: model.weights.saturating_add(own.weights),
            kv_per_token: model.kv_per_token + if grows { own.kv_per_token } else { 0 },
            kv_fixed: model.kv_fixed,
            fixed: model.fixed.saturating_add(own.fixed).saturating_add(own.kv_fixed).saturating_add(kv),
        })
    }

    /// Returns the bytes of an assistant's weights in memory.
    fn assistant_bytes(&self, options: &LoadOptions) -> LoadResult<u64> {
        let Description { config, naming, .. } = &self.description;
        let source = self.files.tensors();
        let (file, joint) = (WeightFile::new(source, naming)?, WeightFile::of_assistant(source, naming));
        let of_layers = file.decoder_tensors(config.layers.len());
        // In GGUF they are among the decoder's.
        let joints = [JOINED, RETURNED].into_iter().filter(|_| !naming.gguf);
        let joints = joints.filter_map(|names| joint.describe_global(names));
        tensor_bytes(of_layers.chain(joints), config, options)
    }

    /// Returns what a decoder needs to load the assistant; `None` for a draft model.
    pub fn assistant<'a>(&'a self, convert: Convert<'a>) -> Option<AssistantParts<'a>> {
        let Description { config, naming, .. } = self.description.clone();
        let source = self.files.tensors();
        self.is_assistant.then_some(AssistantParts { config, naming, source, convert })
    }

    /// Loads the draft model for contexts of up to `context` tokens. It computes with `workers`, if there are any.
    ///
    /// # Errors
    /// Those of [`super::load`] that concern weights.
    pub fn load(
        self,
        options: &LoadOptions,
        workers: Option<&CpuThreads>,
        context: usize,
        notices: &mut Vec<Notice>,
    ) -> LoadResult<LoadedDraft> {
        if self.is_assistant {
            // The decoder has loaded it.
            let weight_bytes = self.assistant_bytes(options)?;
            return Ok(LoadedDraft { name: Some(self.name), model: None, weight_bytes });
        }
        let Self { name, files, description, .. } = self;
        let context = description.config.context_length.min(context);
        let weight_bytes = demand(&files, &description, options, context)?.weights;
        // Adapters are made for the model that it drafts for.
        let options = &LoadOptions { adapters: Vec::new(), ..options.clone() };
        let is_unwanted = &AtomicBool::new(false);
        let with = DecoderWith { options, workers, block: None, assistant: None, is_unwanted };
        let (model, _) = decoder(&files, description, with, context, &mut |_, _| (), notices)?;
        Ok(LoadedDraft { name: Some(name), model: Some(model), weight_bytes })
    }
}

/// Describes the assistant in `files` for a model; in the inner result, why it is one for another.
fn assistant_for(files: &ModelFiles, recognised: &Recognised) -> LoadResult<Result<Description, String>> {
    let assistant = arch::parse_assistant(files.config_reader())?;
    Ok(match recognised {
        Recognised::Native(of_model) => assistant.of_model(&of_model.config),
        #[cfg(feature = "candle-families")]
        Recognised::CandleModel(plan) => {
            Err(format!("{} runs through candle-transformers", plan.architecture))
        }
    })
}

/// Returns the first id that stands for different tokens. Tokens that only one of them has may be padding.
fn first_difference(a: &Tokenizer, b: &Tokenizer) -> Option<u32> {
    let most = a.vocab_size().max(b.vocab_size()) as u32;
    (0..most).find(|&id| match (a.id_to_token(id), b.id_to_token(id)) {
        (Some(a), Some(b)) => a != b,
        (Some(alone), None) | (None, Some(alone)) => !PADDING.iter().any(|start| alone.starts_with(start)),
        (None, None) => false,
    })
}

fn spelled(token: Option<&str>) -> String {
    token.map_or("missing".to_owned(), |token| format!("{token:?}"))
}
