//! From a reference on the command line to a model in memory.
//!
//! `gguf` and `safetensors` implement [`TensorSource`](super::tensor::TensorSource); `tokenizer` builds the
//! tokenizer from either; `hub` resolves references; this file puts them together. Files are hostile: sizes
//! and offsets are checked before they are believed, and no allocation is larger than the file can justify.

mod facts;
pub mod gguf;
pub mod hf;
pub mod hub;
pub mod metadata;
pub mod quantize;
pub mod safetensors;

use std::sync::Arc;

use super::model::Model;
use super::text::Tokenizer;

/// A model ready for the engine, with all that its files say about using it.
pub struct LoadedModel {
    /// What the user will recognise it by, e.g. the file stem or `org/repo`.
    pub name: String,
    pub model: Box<dyn Model>,
    pub tokenizer: Arc<Tokenizer>,
    /// Jinja source of the chat template, if the model has one.
    pub chat_template: Option<String>,
    /// Sampling defaults that the model's publisher recommends.
    pub defaults: GenerationDefaults,
    /// Every token id that ends a turn: the files' lists plus the turn terminators the tokenizer registers as special.
    pub end_of_generation: Vec<u32>,
    /// What the user should know and nothing failed on, one sentence each.
    pub notices: Vec<String>,
}

/// Sampling defaults from generation_config.json (or GGUF's `general.sampling.*`); `None` where the file is silent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}
