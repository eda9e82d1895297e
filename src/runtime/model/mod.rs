//! Models: the seam that the engine drives (`Model`), the decoder that implements it, and the families as facts.

pub mod arch;
pub mod config;
pub mod decoder;
pub mod rope;
pub mod weights;

pub use config::*;

use super::error::Result;
use super::kv::{PageId, PageTable};

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
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Family name, e.g. `qwen3`.
    pub architecture: String,
    pub vocab_size: usize,
    /// The most tokens a sequence may hold.
    pub context_length: usize,
    /// Bytes of KV per resident token, over all layers.
    pub kv_bytes_per_token: usize,
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

    /// Copies all rows of a page to another.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`]; the content of `to` is then undefined.
    fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()>;
}
