//! Shared by the parts of a layer: products with a matrix, the current step, and buffers for temporary
//! values.

use super::StepBuffers;
use super::routing::Routing;
use crate::adapters::{AdapterSpec, AdapterUse};
use crate::backend::{Backend, LowRankChange, Product, SelectedKeys, WeightedRows};
use crate::model::{Batch, Row};
use llmctl_base::error::{Error, Result};

/// A product with a matrix, and its optional bias.
pub struct Projection<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Vector>,
    /// The matrices of each adapter that changes the product, with the adapter's index; see [`crate::model::low_rank`].
    pub adapters: Vec<(usize, B::LowRank)>,
}

/// The rows of a step, or of a part of it, that adapters change.
#[derive(Debug, Default, Clone)]
pub struct AdaptedRows(Vec<RowsOfAdapter>);

/// Rows that one adapter changes, in ascending order.
#[derive(Debug, Clone)]
struct RowsOfAdapter {
    adapter: usize,
    rows: Vec<usize>,
    scales: Vec<f32>,
}

impl AdaptedRows {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Finds the rows of a step, of `adapters` in the decoder's order.
    ///
    /// # Errors
    /// [`Error::Backend`] for an adapter that is not loaded.
    pub fn find(&mut self, batch: &Batch<'_>, adapters: &[AdapterSpec]) -> Result<()> {
        self.0.clear();
        for (row, Row { sequence, .. }) in batch.rows.iter().enumerate() {
            for AdapterUse { key, scale } in batch.adapters.get(*sequence).copied().unwrap_or_default() {
                let index = adapters.iter().position(|adapter| adapter.key == *key);
                let adapter =
                    index.ok_or_else(|| Error::Backend(format!("adapter {key:?} is not loaded")))?;
                let of = match self.0.iter_mut().find(|known| known.adapter == adapter) {
                    Some(known) => known,
                    None => {
                        self.0.push(RowsOfAdapter { adapter, rows: Vec::new(), scales: Vec::new() });
                        self.0.last_mut().expect("was pushed")
                    }
                };
                of.rows.push(row);
                of.scales.push(*scale);
            }
        }
        // So that what a row gets does not depend on the rows before it.
        self.0.sort_by_key(|of| of.adapter);
        Ok(())
    }

    /// Returns the same of some of the rows, which are numbered anew; `rows` are in ascending order.
    pub fn within(&self, rows: &[usize]) -> Self {
        let within = |of: &RowsOfAdapter| {
            let pairs = of.rows.iter().zip(&of.scales);
            let kept = pairs.filter_map(|(row, scale)| Some((rows.binary_search(row).ok()?, *scale)));
            let (rows, scales): (Vec<usize>, Vec<f32>) = kept.unzip();
            RowsOfAdapter { adapter: of.adapter, rows, scales }
        };
        Self(self.0.iter().map(within).filter(|of| !of.rows.is_empty()).collect())
    }
}

impl<B: Backend> Projection<B> {
    pub fn onto<'a>(&'a self, out: &'a mut B::Buffer) -> Product<'a, B> {
        Product::new(&self.weight, self.bias.as_ref(), out)
    }

    /// Returns the product with the changes that adapters make to some of its rows.
    pub fn adapted<'a>(&'a self, rows: &'a AdaptedRows, out: &'a mut B::Buffer) -> Product<'a, B> {
        let change = |RowsOfAdapter { adapter, rows, scales }: &'a RowsOfAdapter| {
            let (_, matrices) = self.adapters.iter().find(|(index, _)| index == adapter)?;
            Some(LowRankChange { matrices, to: WeightedRows { rows, weights: scales } })
        };
        Product { changes: rows.0.iter().filter_map(change).collect(), ..self.onto(out) }
    }

    pub fn apply(&self, backend: &B, x: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        backend.matmul(x, &self.weight, self.bias.as_ref(), out)
    }
}

/// Joins each embedding in `rows`, `[rows, width]`, with its row of `hidden` into `out`; `space` is overwritten.
///
/// # Errors
/// [`Error::Backend`] unless `hidden` has as many rows.
pub fn join_hidden<B: Backend>(
    backend: &B,
    [num_rows, width]: [usize; 2],
    hidden: &[f32],
    [rows, space, out]: [&mut B::Buffer; 3],
) -> Result<()> {
    if hidden.len() != num_rows * width {
        return Err(Error::Backend(format!("{num_rows} rows need as many hidden states")));
    }
    backend.write(hidden, width, space)?;
    backend.join_heads(&[rows, space], 1, out)
}

/// Inputs of a part: the current step, and buffers for temporary values.
pub struct LayerContext<'a, B: Backend> {
    pub backend: &'a B,
    pub step: &'a StepBuffers<B>,
    pub kv: &'a mut B::Kv,
    /// Per-layer inputs of all layers, in families that have them.
    pub per_layer: Option<&'a B::Buffer>,
    pub work: &'a mut LayerBuffers<B::Buffer>,
    /// True if [`super::layer::DecoderLayer::store`] has stored the layer's keys and values. The layer then computes queries alone.
    pub is_stored: bool,
}

/// The part of a layer in which tokens see earlier ones.
pub trait Mixer<B: Backend>: Send {
    /// Stores the keys and values of all rows, if that can be done apart from the rest. Returns whether it was.
    fn store(&self, _: &mut LayerContext<'_, B>, _input: &B::Buffer) -> Result<bool> {
        Ok(false)
    }

    /// Computes the output from `input` into `out`.
    fn apply(&self, context: &mut LayerContext<'_, B>, input: &B::Buffer, out: &mut B::Buffer) -> Result<()>;
}

/// Buffers of a part, kept between layers and steps.
#[derive(Default)]
pub struct LayerBuffers<T> {
    pub q: T,
    pub k: T,
    pub v: T,
    pub mixed: T,
    pub gate: T,
    pub up: T,
    /// Rows gathered for one expert, and the expert's results.
    pub sent: T,
    pub returned: T,
    pub scores: T,
    pub routing: Routing,
    /// Factors of the rows' queries.
    pub factors: Vec<f32>,
    /// The choice of the step's last indexer.
    pub selected: SelectedKeys,
}
