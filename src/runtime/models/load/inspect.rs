//! Describes a model's files from their headers alone, for people who choose a model; the engine does not use
//! it.
//!
//! A model that llmctl cannot run is described too, with the reason.

use std::collections::BTreeMap;

use super::embedder;
use super::files::ModelFiles;
use crate::backend::KvType;
use crate::model::arch::{Description, published_as};
use crate::model::decoder::kv_bytes_per_token;
use crate::model::recognise::{Recognised, recognise};
use llmctl_base::error::LoadResult;
use llmctl_hub::{ModelKind, ModelSource, summary};
use llmctl_kernel::Dtype;

/// Facts about a model that is not loaded.
#[derive(Debug, Clone)]
pub struct ModelFacts {
    pub kind: ModelKind,
    /// The family named by the files; `None` if they name none.
    pub architecture: Option<String>,
    /// Values in all tensors, including those that llmctl does not use (vision).
    pub parameters: u64,
    /// Size of the weights on disk, in bytes.
    pub bytes: u64,
    /// The file name's tag, or the type of most values.
    pub quantization: Option<String>,
    /// Its task with texts, if its files say that it is for embeddings or scores.
    pub text_task: Option<String>,
    /// Facts about the decoder, or the reason why llmctl cannot run it.
    pub decoder: LoadResult<DecoderFacts>,
    pub has_chat_template: bool,
}

/// The values that determine a decoder's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecoderFacts {
    /// The models of its family; `None` if candle-transformers computes it.
    pub models: Option<&'static str>,
    pub context_length: usize,
    pub num_layers: usize,
    pub hidden_size: usize,
    pub vocab_size: usize,
    /// Bytes in the default KV type.
    pub kv_bytes_per_token: usize,
}

/// Reads the headers of `source`.
///
/// # Errors
/// `LoadError` naming the file and the key or tensor at fault.
pub fn model_facts(source: &ModelSource) -> LoadResult<ModelFacts> {
    let files = ModelFiles::open(source)?;
    let tensors = files.tensors();
    let mut values: BTreeMap<&'static str, u64> = BTreeMap::new();
    for name in tensors.names() {
        if let Some((shape, dtype)) = tensors.describe(&name) {
            let count = shape.iter().fold(1u64, |count, &n| count.saturating_mul(n as u64));
            let total = values.entry(Dtype::name(dtype)).or_default();
            *total = total.saturating_add(count);
        }
    }
    let most = values.iter().max_by_key(|(_, count)| **count).map(|(name, _)| (*name).to_owned());
    let summary = summary(source);
    let decoder = recognise(files.config_reader()).and_then(|recognised| {
        files.check_packed()?;
        Ok(decoder_facts(&recognised))
    });
    Ok(ModelFacts {
        kind: summary.kind,
        architecture: files.config_reader().architecture().ok(),
        parameters: values.values().fold(0, |sum, count| sum.saturating_add(*count)),
        bytes: summary.bytes,
        quantization: summary.quantization.or(most),
        text_task: embedder::describe(&files),
        decoder,
        has_chat_template: files.chat_templates()?.default.is_some(),
    })
}

/// Returns the facts of a decoder.
pub(super) fn decoder_facts(recognised: &Recognised) -> DecoderFacts {
    match recognised {
        Recognised::Native(Description { config, .. }) => DecoderFacts {
            models: published_as(config.architecture),
            context_length: config.context_length,
            num_layers: config.layers.len(),
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            kv_bytes_per_token: kv_bytes_per_token(config, KvType::default()),
        },
        #[cfg(feature = "candle-families")]
        Recognised::CandleModel(plan) => DecoderFacts {
            models: None,
            context_length: plan.context_length,
            num_layers: plan.sizes.num_layers,
            hidden_size: plan.sizes.hidden_size,
            vocab_size: plan.sizes.vocab_size,
            kv_bytes_per_token: plan.kv_bytes_per_token(),
        },
    }
}
