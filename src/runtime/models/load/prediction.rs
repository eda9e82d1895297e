//! The block of a model's file that predicts further tokens, which drafts for the model: its memory, and
//! whether it is loaded.

use super::draft::LoadedDraft;
use super::files::ModelFiles;
use super::{LoadOptions, Planned, tensor_bytes};
use crate::backend::PAGE_TOKENS;
use crate::memory::Demand;
use crate::model::Model;
use crate::model::arch::Description;
use crate::model::config::{DecoderConfig, LayerConfig};
use crate::model::decoder::kv_groups;
use crate::model::recognise::Recognised;
use crate::model::weights::WeightFile;
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::notice::Notice;

/// Use of the model's own block that predicts further tokens: it drafts for the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PredictionUse {
    #[default]
    Never,
    IfPresent,
    /// A model without one is refused. If another file is to draft, it must be an assistant.
    Required,
}

/// A block to load.
pub struct OwnBlock {
    pub layer: LayerConfig,
    weight_bytes: u64,
    kv_per_token: u64,
}

/// Returns the block of the model named `name`, if it is to be loaded.
///
/// # Errors
/// [`LoadError::NoPrediction`] if one is required; [`LoadError::Tensor`] for a tensor of an impossible size.
pub(super) fn block(planned: Planned<'_>, name: &str) -> LoadResult<Option<OwnBlock>> {
    let Planned { files, recognised, options, .. } = planned;
    if options.prediction == PredictionUse::Never {
        return Ok(None);
    }
    let found = recognised.native().map(|description| find(files, description, options)).transpose()?;
    match (found.flatten(), options.prediction) {
        (None, PredictionUse::Required) => {
            let message = match unused(files, recognised)? {
                Some(notice) => notice.to_string(),
                None => "its file has none".to_owned(),
            };
            Err(LoadError::NoPrediction { model: name.to_owned(), message })
        }
        (found, _) => Ok(found),
    }
}

fn find(
    files: &ModelFiles,
    Description { config, naming, prediction }: &Description,
    options: &LoadOptions,
) -> LoadResult<Option<OwnBlock>> {
    let num_layers = config.layers.len();
    let file = WeightFile::of_prediction(files.tensors(), naming, num_layers);
    let Some((layer, file)) = prediction.clone().zip(file) else { return Ok(None) };
    let weight_bytes = tensor_bytes(file.prediction_tensors(num_layers), config, options)?;
    let alone = DecoderConfig { layers: vec![layer.clone()], ..config.clone() };
    let page_bytes: usize = kv_groups(&alone, options.kv_type).iter().map(|group| group.page_bytes).sum();
    Ok(Some(OwnBlock { layer, weight_bytes, kv_per_token: (page_bytes / PAGE_TOKENS) as u64 }))
}

/// Returns what to say of a file with blocks that llmctl cannot compute.
///
/// # Errors
/// [`LoadError::Tensor`] if the file lacks its embedding table.
pub fn unused(files: &ModelFiles, recognised: &Recognised) -> LoadResult<Option<Notice>> {
    let Some(Description { config, naming, prediction }) = recognised.native() else { return Ok(None) };
    let num_layers = config.layers.len();
    let block = WeightFile::of_prediction(files.tensors(), naming, num_layers);
    let can = prediction.is_some() && block.is_some();
    let has = WeightFile::new(files.tensors(), naming)?.has_prediction(num_layers);
    Ok((has && !can).then_some(Notice::UnusedPrediction { architecture: config.architecture }))
}

impl OwnBlock {
    /// Adds the memory of the block, with a context of `context` tokens, to that of the model.
    pub fn add_demand(&self, model: Demand, options: &LoadOptions, context: usize) -> Demand {
        // KV memory that the user gives is the model's alone.
        let (per_token, fixed) = match options.kv_memory {
            None => (self.kv_per_token, 0),
            Some(_) => (0, self.kv_per_token.saturating_mul(context as u64)),
        };
        Demand {
            weights: model.weights.saturating_add(self.weight_bytes),
            kv_per_token: model.kv_per_token + per_token,
            fixed: model.fixed.saturating_add(fixed),
            ..model
        }
    }

    pub fn loaded(self, model: Box<dyn Model>) -> LoadedDraft {
        LoadedDraft { name: None, model: Some(model), weight_bytes: self.weight_bytes }
    }
}
