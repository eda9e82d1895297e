//! Models: the seam that the engine drives (`Model`), the decoder that implements it, the families as facts, and those that
//! run through candle-transformers.

pub mod arch;
#[cfg(feature = "candle-families")]
pub mod candle_models;
pub mod config;
pub mod decoder;
pub mod rope;
pub mod weights;

pub use config::*;

use serde::{Deserialize, Serialize};

use super::error::Result;
use super::kv::{KvGroup, PageRef, PageTable};

/// Rows of a step unless asked otherwise: a prompt that is cancelled ends within one.
pub const STEP_TOKENS: usize = 128;

/// One token of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    /// Absolute position in its sequence; its KV row is written there.
    pub position: usize,
    /// Index into [`Batch::tables`].
    pub sequence: usize,
    pub wants_logits: bool,
}

/// One step: rows of any mix of prompts and running generations.
///
/// Rows of one sequence are in ascending, gapless position order, and its table already covers them.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub rows: &'a [Row],
    pub tables: &'a [&'a PageTable],
}

/// Logits of the rows that wanted them, in row order: `[rows, vocab_size]`, f32, row-major.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logits {
    pub values: Vec<f32>,
    pub vocab_size: usize,
}

impl Logits {
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.vocab_size).unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// What the engine must know of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Family name, e.g. `qwen3`.
    pub architecture: String,
    pub vocab_size: usize,
    /// The most tokens a sequence may hold.
    pub context_length: usize,
    /// What a sequence keeps, at least one group. Without a group that keeps something by tokens, nothing can be shared.
    pub groups: Vec<KvGroup>,
    /// Whether a sequence may be cut back to an earlier position.
    pub can_rewind: bool,
}

/// A loaded model with its KV storage. The engine owns exactly one and calls it from one thread.
pub trait Model: Send {
    fn spec(&self) -> &ModelSpec;

    /// Computes one step: writes each row's keys and values at its place and returns the wanted logits.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`]; KV rows of this batch are then undefined.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits>;

    /// Takes back logits that nobody needs any more, for their memory.
    fn reuse(&mut self, logits: Logits) {
        drop(logits);
    }

    /// Copies a page to another of its group.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`]; the content of `to` is then undefined.
    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()>;

    /// Gives a page's memory back to the system where that is possible; its content is gone.
    fn free_page(&mut self, page_ref: PageRef);

    /// Appends a page's content to `out`.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`].
    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()>;

    /// Fills a page with what `export_page` gave, of this model or one that is equal to it in weights, KV type and backend.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`] for any other number of bytes; the content is then undefined.
    fn import_page(&mut self, page_ref: PageRef, bytes: &[u8]) -> Result<()>;
}
