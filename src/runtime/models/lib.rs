//! Model files to models in memory. A model computes rows over KV pages; what the rows mean, sessions and
//! requests know.
//!
//! - [`load`]: readers of formats, checks of memory, the model; [`text`]: tokenizers; [`hints`]: of the
//!   built-in model
//! - [`model`]: families, the decoder that they share, encoders
//! - [`vision`]: towers; [`images`], [`adapters`]: what others know of images and of LoRA adapters
//! - [`backend`]: processors and devices; [`panels`]: packed weights; [`tensor`]: bytes of files; [`memory`]:
//!   limits
//! - [`kv`]: which pages hold which part of which sequence, in memory and on disk

pub mod adapters;
pub mod backend;
pub mod hints;
pub mod images;
pub mod kv;
pub mod load;
pub mod memory;
pub mod model;
pub mod panels;
pub mod tensor;
pub mod text;
pub mod vision;
