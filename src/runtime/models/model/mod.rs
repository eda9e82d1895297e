//! Models: the trait that the engine uses (`Model`), the decoder that implements it, the families'
//! configurations, and the families that candle-transformers computes.

pub mod arch;
#[cfg(feature = "candle-families")]
pub mod candle_models;
pub mod config;
pub mod decoder;
pub mod encoder;
pub mod low_rank;
pub mod recognise;
pub mod rope;
pub mod text_head;
pub mod weights;

pub use config::*;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::adapters::{AdapterSpec, AdapterUse};
use super::images::ImageRows;
use super::kv::{KvGroup, PageRef, PageTable};
use super::tensor::SharedBytes;
use llmctl_base::error::{Error, Result};

/// Default number of rows per step; a cancelled prompt ends within one step.
pub const STEP_TOKENS: usize = 128;

/// Tokens of a step of a [`TextModel`], unless one text alone has more.
pub const TEXT_STEP_TOKENS: usize = 512;

/// One token of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    /// Absolute position in its sequence, where its KV row is written.
    pub position: usize,
    /// Position numbers of the rotary embedding (time, row, column): three times `position` but for models with M-RoPE, whose
    /// images take fewer numbers than rows.
    pub angles: [u32; 3],
    /// End of the positions that the row sees where its image is two-way; `position + 1` for all other rows.
    pub visible: usize,
    /// Index into [`Batch::tables`].
    pub sequence: usize,
    pub wants_logits: bool,
    /// True if the token is a draft token. A step leaves recurrent states before it; see
    /// [`Model::keep_drafted`].
    pub is_drafted: bool,
}

impl Row {
    /// Returns the row of a token that is no guess.
    pub fn known(token: u32, position: usize, sequence: usize, wants_logits: bool) -> Self {
        let angles = [position as u32; 3];
        Self { token, position, angles, visible: position + 1, sequence, wants_logits, is_drafted: false }
    }
}

/// One step: rows of any mix of prompts and running generations.
///
/// Rows of one sequence are in ascending, gapless position order, drafted ones last, and its table already covers them.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    pub rows: &'a [Row],
    pub tables: &'a [&'a PageTable],
    /// Rows whose embeddings are an image's, in ascending order.
    pub images: &'a [BatchImage<'a>],
    /// The adapters of each table's sequence; empty if none has any.
    pub adapters: &'a [&'a [AdapterUse]],
}

impl<'a> Batch<'a> {
    /// Returns a batch without images and adapters.
    pub fn new(rows: &'a [Row], tables: &'a [&'a PageTable]) -> Self {
        Self { rows, tables, images: &[], adapters: &[] }
    }
}

/// Rows of a step that take embeddings of an image.
#[derive(Debug, Clone)]
pub struct BatchImage<'a> {
    /// Indices into [`Batch::rows`].
    pub rows: Range<usize>,
    pub embeddings: &'a ImageRows,
    /// The embedding of the first row; the others follow.
    pub first: usize,
}

/// Logits of the rows that want them, in row order: `[rows, vocab_size]`, f32, row-major.
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

/// The model's properties that the engine needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Family name, e.g. `qwen3`.
    pub architecture: String,
    pub vocab_size: usize,
    /// Limit of tokens per sequence.
    pub context_length: usize,
    /// KV groups of a sequence, at least one. Sequences can share pages only if a group keeps rows by tokens.
    pub groups: Vec<KvGroup>,
    /// True if a sequence can be truncated to an earlier position.
    pub can_rewind: bool,
    /// Adapters that requests may name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<AdapterSpec>,
}

/// A text for a [`TextModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextIds<'a> {
    pub ids: &'a [u32],
    /// Index of the first token of the second part of a pair; the number of tokens of a text alone.
    pub second: usize,
}

/// The properties of a [`TextModel`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextModelSpec {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Limit of tokens per text.
    pub context_length: usize,
}

/// A model that reads whole texts and keeps nothing of them: an encoder, or a decoder whose hidden states are wanted.
///
/// A text's hidden states depend on that text alone.
pub trait TextModel: Send {
    fn spec(&self) -> &TextModelSpec;

    /// Computes the hidden states of all tokens behind the last norm, `[tokens, hidden_size]`, the texts one after
    /// another. Replaces the content of `out`.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`], also for a token or position without an embedding.
    fn encode(&mut self, texts: &[TextIds<'_>], out: &mut Vec<f32>) -> Result<()>;
}

/// Returns the rows of each text.
///
/// # Errors
/// [`Error::Backend`] for a text longer than the context.
pub fn text_rows(texts: &[TextIds<'_>], context_length: usize) -> Result<Vec<Range<usize>>> {
    let mut end = 0;
    let rows = |text: &TextIds<'_>| {
        let len = text.ids.len();
        if len > context_length {
            return Err(Error::Backend(format!("a text of {len} tokens; the context is {context_length}")));
        }
        end += len;
        Ok(end - len..end)
    };
    texts.iter().map(rows).collect()
}

/// A loaded model with its KV storage. The engine owns exactly one and calls it from one thread.
pub trait Model: Send {
    fn spec(&self) -> &ModelSpec;

    /// Computes one step: writes each row's keys and values to its page and returns the wanted logits.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`]; KV rows of this batch are then undefined.
    fn forward(&mut self, batch: &Batch<'_>) -> Result<Logits>;

    /// Returns the width of the hidden state that [`Self::predict`] needs of each row; `None` for all models but blocks that
    /// predict further tokens, which compute by it alone, and models with an assistant.
    fn hidden_width(&self) -> Option<usize> {
        None
    }

    /// Computes one step of a block that predicts further tokens, or of the model's assistant. `hidden` holds for each row the
    /// hidden state of the token before it, `[rows, width]`. An assistant writes no row: a row's position is that of the token
    /// before its own, up to which the pages are the model's.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`], also for every other model.
    fn predict(&mut self, _: &Batch<'_>, _hidden: &[f32]) -> Result<Logits> {
        Err(Error::Backend("the model takes no hidden states".to_owned()))
    }

    /// Returns the hidden states of all rows of the last step, `[rows, width]`: what the output matrix is multiplied with, or
    /// after `predict` of an assistant, what stands for it. Empty unless a block that predicts further tokens or an assistant was
    /// loaded with the model, or the model is such a block.
    fn hidden(&self) -> &[f32] {
        &[]
    }

    /// Returns logits that are no longer needed, to reuse their memory.
    fn reuse(&mut self, logits: Logits) {
        drop(logits);
    }

    /// Lets the state in a page of a recurrent group take in the first `count` drafted rows of the last step, as if they
    /// had not been drafted.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`] if so many were not drafted; the state is then undefined.
    fn keep_drafted(&mut self, state: PageRef, count: usize) -> Result<()> {
        Err(Error::Backend(format!("no state to keep {count} drafted rows in: {state:?}")))
    }

    /// Copies a page to another of its group.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`]; the content of `to` is then undefined.
    fn copy_page(&mut self, from: PageRef, to: PageRef) -> Result<()>;

    /// Returns a page's memory to the system if possible; its content is lost.
    fn free_page(&mut self, page_ref: PageRef);

    /// Makes memory ready for a page that will be written some day, so that no step waits for the system. Returns false if `most` bytes
    /// or as many as are worth it are ready.
    fn prepare_page(&mut self, _most: usize) -> bool {
        false
    }

    /// Appends a page's content to `out`.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`].
    fn export_page(&self, page_ref: PageRef, out: &mut Vec<u8>) -> Result<()>;

    /// Replaces a page's content by bytes that `export_page` wrote, for this model or one with equal weights, KV type
    /// and backend. The model may keep the bytes and read them where they are.
    ///
    /// # Errors
    /// [`crate::runtime::Error::Backend`] for any other number of bytes; the content is then undefined.
    fn import_page(&mut self, page_ref: PageRef, bytes: SharedBytes) -> Result<()>;
}
