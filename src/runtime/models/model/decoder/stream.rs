//! The residual stream of a step, or several in models with alternating updates; kept between steps to reuse
//! the memory.

use crate::backend::Backend;
use llmctl_base::error::Result;

/// The residual stream and the buffers that layers read and write.
pub struct Stream<B: Backend> {
    pub residual: B::Buffer,
    pub normed: B::Buffer,
    /// Output of a part, to be added to the residual stream.
    pub added: B::Buffer,
    pub altup: AltUpStreams<B>,
}

impl<B: Backend> Stream<B> {
    /// Creates the stream of a model with `num_streams` in alternation; 0 for other models.
    pub fn new(backend: &B, num_streams: usize) -> Self {
        Self {
            residual: backend.buffer(),
            normed: backend.buffer(),
            added: backend.buffer(),
            altup: AltUpStreams::new(backend, num_streams),
        }
    }
}

/// The streams of alternating updates, of which `Stream::residual` holds the one that a layer computes.
pub struct AltUpStreams<B: Backend> {
    /// `[rows, hidden]` by stream.
    pub current: Vec<B::Buffer>,
    /// A layer's prediction of each stream.
    pub predicted: Vec<B::Buffer>,
    /// A layer's learned residual.
    pub laurel: B::Buffer,
    /// `[rows, streams]`, from the router.
    pub modalities: Vec<f32>,
    /// Weights by row, computed from `modalities`.
    pub coefficients: Vec<f32>,
    /// One of the coefficients of each row.
    pub weights: Vec<f32>,
    /// The numbers of all rows.
    pub rows: Vec<usize>,
}

impl<B: Backend> AltUpStreams<B> {
    fn new(backend: &B, num_streams: usize) -> Self {
        let buffers = || (0..num_streams).map(|_| backend.buffer()).collect();
        Self {
            current: buffers(),
            predicted: buffers(),
            laurel: backend.buffer(),
            modalities: Vec::new(),
            coefficients: Vec::new(),
            weights: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Drops all other rows between two layers.
    pub fn keep_rows(&mut self, backend: &B, rows: &[usize]) -> Result<()> {
        for (current, space) in self.current.iter_mut().zip(&mut self.predicted) {
            backend.select_rows(current, rows, space)?;
            std::mem::swap(current, space);
        }
        self.rows.truncate(rows.len());
        Ok(())
    }
}
