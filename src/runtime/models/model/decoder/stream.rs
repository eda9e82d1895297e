//! The residual stream of a step, or several in models with alternating updates; kept between steps to reuse
//! the memory.

use crate::backend::Backend;
use llmctl_base::error::Result;

/// The residual stream and the buffers that layers read and write.
#[derive(Default)]
pub struct Stream<T> {
    pub residual: T,
    pub normed: T,
    /// Output of a part, to be added to the residual stream.
    pub added: T,
    pub altup: AltUpStreams<T>,
    pub hyper: HyperBuffers<T>,
}

impl<T: Default> Stream<T> {
    /// Creates the stream of a model with `num_streams` in alternation; 0 for other models.
    pub fn new(num_streams: usize) -> Self {
        let buffers = || std::iter::repeat_with(T::default).take(num_streams).collect();
        let altup = AltUpStreams { current: buffers(), predicted: buffers(), ..AltUpStreams::default() };
        Self { altup, ..Self::default() }
    }
}

/// The streams of alternating updates, of which `Stream::residual` holds the one that a layer computes.
#[derive(Default)]
pub struct AltUpStreams<T> {
    /// `[rows, hidden]` by stream.
    pub current: Vec<T>,
    /// A layer's prediction of each stream.
    pub predicted: Vec<T>,
    /// A layer's learned residual.
    pub laurel: T,
    /// `[rows, streams]`, from the router.
    pub modalities: Vec<f32>,
    /// Weights by row, computed from `modalities`.
    pub coefficients: Vec<f32>,
    /// One of the coefficients of each row.
    pub weights: Vec<f32>,
    /// The numbers of all rows.
    pub rows: Vec<usize>,
}

/// Buffers of hyper-connections, whose streams `Stream::residual` holds side by side.
#[derive(Default)]
pub struct HyperBuffers<T> {
    /// `[rows, streams * hidden]`, behind the norms.
    pub normed: T,
    pub wide: T,
    pub space: T,
    /// `[rows, rank]`.
    pub low: T,
    /// `[rows, streams]`: the weights by which the streams take in a part's output.
    pub weights: T,
    /// Values on the host, of n-grams.
    pub values: Vec<f32>,
    pub others: Vec<f32>,
    /// Rows of n-grams' tables.
    pub rows: Vec<u64>,
}

impl<T> AltUpStreams<T> {
    /// Drops all other rows between two layers.
    pub fn keep_rows<B: Backend<Buffer = T>>(&mut self, backend: &B, rows: &[usize]) -> Result<()> {
        for (current, space) in self.current.iter_mut().zip(&mut self.predicted) {
            backend.select_rows(current, rows, space)?;
            std::mem::swap(current, space);
        }
        self.rows.truncate(rows.len());
        Ok(())
    }
}
