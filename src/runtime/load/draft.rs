//! A draft model beside the model that it drafts for: the same vocabulary, memory of its own, the same threads.
//!
//! Invariant: a token id means the same to both models. Ids beyond a tokenizer's tokens (rows that pad a table) may differ
//! in number.

use super::files::ModelFiles;
use super::hub::Resolved;
use super::{DecoderWith, LoadOptions, decoder, demand, fingerprint};
use crate::runtime::backend::cpu::CpuThreads;
use crate::runtime::error::LoadError;
use crate::runtime::memory::Demand;
use crate::runtime::model::Model;
use crate::runtime::model::arch::Description;
use crate::runtime::model::recognise::{Recognised, recognise};
use crate::runtime::notice::Notice;
use crate::runtime::text::Tokenizer;

/// Beginnings of the names of tokens that fill up a vocabulary.
const PADDING: [&str; 5] = ["[PAD", "<pad", "<unused", "<|dummy", "<|reserved"];

/// A draft model, or the model's own block that predicts further tokens, in memory.
pub struct LoadedDraft {
    /// `None` for the model's own block.
    pub name: Option<String>,
    pub model: Box<dyn Model>,
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
}

impl DraftFiles {
    /// Opens a model that is to draft for the model named `model`.
    ///
    /// # Errors
    /// Those of opening a model; [`LoadError::DraftModel`] for a model that cannot drop rows.
    pub fn open(resolved: &Resolved, model: &str) -> Result<Self, LoadError> {
        let files = ModelFiles::open(&resolved.source)?;
        let (name, model) = (resolved.name.clone(), model.to_owned());
        match recognise(files.config_reader())? {
            Recognised::Native(description) => Ok(Self { name, model, files, description }),
            #[cfg(feature = "candle-families")]
            Recognised::CandleModel(plan) => {
                let message =
                    format!("{} runs through candle-transformers and cannot drop rows", plan.architecture);
                Err(LoadError::DraftModel { draft: name, model, message })
            }
        }
    }

    fn refuse(&self, message: String) -> LoadError {
        LoadError::DraftModel { draft: self.name.clone(), model: self.model.clone(), message }
    }

    /// # Errors
    /// [`LoadError::DraftModel`] with the first token that differs from the one in `tokenizer`.
    pub fn check_vocabulary(&self, tokenizer: &Tokenizer) -> Result<(), LoadError> {
        let own = self.files.tokenizer()?;
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
    pub fn add_demand(
        &self,
        model: Demand,
        options: &LoadOptions,
        context: usize,
    ) -> Result<Demand, LoadError> {
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
    ) -> Result<LoadedDraft, LoadError> {
        let Self { name, files, description, .. } = self;
        let context = description.config.context_length.min(context);
        let weight_bytes = demand(&files, &description, options, context)?.weights;
        let identity = &fingerprint::identity(&files)?;
        let with = DecoderWith { options, workers, identity, block: None };
        let (model, _) = decoder(&files, description, with, context, &mut |_, _| (), notices)?;
        Ok(LoadedDraft { name: Some(name), model, weight_bytes })
    }
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
