//! Loads the parts of one layer onto a backend.

use super::buffers::Projection;
use super::{Convert, Matrix};
use crate::backend::Backend;
use crate::model::config::{DecoderConfig, Names, Naming, RopeConfig};
use crate::model::low_rank::{LowRank, LowRankMatrices, not_adapted};
use crate::model::weights::{Linear, WeightFile};
use crate::tensor::HostTensor;
use llmctl_base::error::LoadResult;

/// Loader of one layer.
pub struct Loader<'a, B: Backend> {
    pub backend: &'a B,
    pub file: &'a WeightFile<'a>,
    pub naming: &'a Naming,
    pub ropes: &'a [RopeConfig],
    pub convert: Convert<'a>,
    pub hidden: usize,
    pub layer: usize,
    /// Added to the variance by the layer's norms.
    pub eps: f32,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// Returns the loader of the first layer, and of what belongs to no layer.
    pub fn new(
        backend: &'a B,
        file: &'a WeightFile<'a>,
        config: &'a DecoderConfig,
        convert: Convert<'a>,
    ) -> Self {
        let (naming, ropes, hidden) = (file.naming(), &config.ropes[..], config.hidden_size);
        Self { backend, file, naming, ropes, convert, hidden, layer: 0, eps: config.final_norm_eps }
    }

    pub fn norm(&self, names: Names, len: usize) -> LoadResult<B::Vector> {
        self.backend.vector(self.file.layer_norm(self.layer, names, len)?)
    }

    /// Reads and uploads a projection of the layer.
    pub fn linear(&self, names: [&str; 2], shape: [usize; 2]) -> LoadResult<Projection<B>> {
        self.projection(self.file.linear(self.layer, names, shape)?)
    }

    /// Reads and uploads the values of a small tensor of the layer.
    pub fn values(&self, names: [&str; 2], len: usize) -> LoadResult<B::Vector> {
        self.backend.vector(self.file.values(self.layer, names, len)?)
    }

    /// Uploads the rates at which the heads' states fade: `exp(A_log)`, or in GGUF `-A`, of either sign (Ling 3).
    pub fn fading(&self, mut stored: Vec<f32>) -> LoadResult<B::Vector> {
        let rate = |value: f32| if self.naming.gguf { value.abs() } else { libm::exp(value.into()) as f32 };
        stored.iter_mut().for_each(|value| *value = rate(*value));
        self.backend.vector(stored)
    }

    /// Uploads a matrix and its bias.
    ///
    /// # Errors
    /// `LoadError::Tensor` if an adapter changes the matrix; those of the backend.
    pub fn projection(&self, linear: Linear) -> LoadResult<Projection<B>> {
        self.keep(linear, Matrix::Projection, B::weight)
    }

    /// Uploads a matrix as [`Self::projection`] does, with what adapters add: for a product that is
    /// made by [`Projection::adapted`].
    pub fn adapted(&self, linear: Linear) -> LoadResult<Projection<B>> {
        self.keep_adapted(linear, B::weight)
    }

    /// Converts an embedding table or an output matrix.
    pub fn vocabulary(&self, table: Linear) -> LoadResult<HostTensor> {
        (self.convert)(&table.name, Matrix::Vocabulary, table.weight)
    }

    /// Uploads a matrix of an expert as [`Self::adapted`] does.
    pub fn expert(&self, linear: Linear) -> LoadResult<Projection<B>> {
        self.keep_adapted(linear, B::expert)
    }

    /// Uploads a matrix as [`Self::projection`] does, for one of few rows that is sensitive to rounding.
    pub fn gate(&self, linear: Linear) -> LoadResult<Projection<B>> {
        self.keep(linear, Matrix::Gate, B::weight)
    }

    fn keep(
        &self,
        linear: Linear,
        matrix: Matrix,
        upload: impl FnOnce(&B, &HostTensor) -> LoadResult<B::Weight>,
    ) -> LoadResult<Projection<B>> {
        if let Some(first) = linear.adapters.first() {
            return Err(not_adapted(&linear.name, &self.file.adapters()[first.adapter].spec.name));
        }
        let weight = (self.convert)(&linear.name, matrix, linear.weight)?;
        let bias = linear.bias.map(|bias| self.backend.vector(bias)).transpose()?;
        Ok(Projection { weight: upload(self.backend, &weight)?, bias, adapters: Vec::new() })
    }

    fn keep_adapted(
        &self,
        mut linear: Linear,
        upload: impl FnOnce(&B, &HostTensor) -> LoadResult<B::Weight>,
    ) -> LoadResult<Projection<B>> {
        let adapter = |LowRank { adapter, matrices: LowRankMatrices { down, up, factor } }: LowRank| {
            Ok((adapter, self.backend.low_rank([&down, &up], factor)?))
        };
        let adapters = std::mem::take(&mut linear.adapters).into_iter().map(adapter);
        let adapters = adapters.collect::<LoadResult<Vec<_>>>()?;
        Ok(Projection { adapters, ..self.keep(linear, Matrix::Projection, upload)? })
    }
}
