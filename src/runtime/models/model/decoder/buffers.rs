//! Shared by the parts of a layer: products with a matrix, the current step, and buffers for temporary
//! values.

use super::StepBuffers;
use super::routing::Routing;
use crate::backend::{Backend, Product};
use llmctl_base::error::{Error, Result};

/// A product with a matrix, and its optional bias.
pub struct Projection<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Vector>,
}

impl<B: Backend> Projection<B> {
    pub fn onto<'a>(&'a self, out: &'a mut B::Buffer) -> Product<'a, B> {
        Product { weight: &self.weight, bias: self.bias.as_ref(), out }
    }

    pub fn apply(&self, backend: &B, x: &B::Buffer, out: &mut B::Buffer) -> Result<()> {
        backend.matmul(x, &self.weight, self.bias.as_ref(), out)
    }
}

/// Memory for rows that join a token's embedding and a hidden state.
#[derive(Default)]
pub struct JoinedRows {
    embedded: Vec<f32>,
    joined: Vec<f32>,
}

impl JoinedRows {
    /// Replaces embeddings in `rows`, `[rows, width]`, by `[rows, 2 * width]`: each embedding, then its row of `hidden`.
    ///
    /// # Errors
    /// [`Error::Backend`] unless `hidden` has one row for each embedding.
    pub fn join<B: Backend>(
        &mut self,
        backend: &B,
        rows: &mut B::Buffer,
        hidden: &[f32],
        width: usize,
    ) -> Result<()> {
        let Self { embedded, joined } = self;
        backend.read(rows, embedded)?;
        if hidden.len() != embedded.len() {
            let message = format!("{} rows need as many hidden states", embedded.len() / width);
            return Err(Error::Backend(message));
        }
        joined.clear();
        for (embedding, hidden) in embedded.chunks_exact(width).zip(hidden.chunks_exact(width)) {
            joined.extend_from_slice(embedding);
            joined.extend_from_slice(hidden);
        }
        backend.write(joined, 2 * width, rows)
    }
}

/// Inputs of a part: the current step, and buffers for temporary values.
pub struct LayerContext<'a, B: Backend> {
    pub backend: &'a B,
    pub step: &'a StepBuffers<B>,
    pub kv: &'a mut B::Kv,
    /// Per-layer inputs of all layers, in families that have them.
    pub per_layer: Option<&'a B::Buffer>,
    pub work: &'a mut LayerBuffers<B>,
    /// True if [`super::layer::DecoderLayer::store`] has stored the layer's keys and values. The layer then computes queries alone.
    pub is_stored: bool,
}

/// Buffers of a part, kept between layers and steps.
pub struct LayerBuffers<B: Backend> {
    pub q: B::Buffer,
    pub k: B::Buffer,
    pub v: B::Buffer,
    pub mixed: B::Buffer,
    pub gate: B::Buffer,
    pub up: B::Buffer,
    /// Rows gathered for one expert, and the expert's results.
    pub sent: B::Buffer,
    pub returned: B::Buffer,
    pub scores: B::Buffer,
    pub routing: Routing,
    /// Factors of the rows' queries.
    pub factors: Vec<f32>,
}

impl<B: Backend> LayerBuffers<B> {
    pub fn new(backend: &B) -> Self {
        let buffer = || backend.buffer();
        Self {
            q: buffer(),
            k: buffer(),
            v: buffer(),
            mixed: buffer(),
            gate: buffer(),
            up: buffer(),
            sent: buffer(),
            returned: buffer(),
            scores: buffer(),
            routing: Routing::default(),
            factors: Vec::new(),
        }
    }
}
