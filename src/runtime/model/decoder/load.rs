//! Reading the parts of one layer onto a backend.

use super::layer::Projection;
use super::{Convert, Matrix};
use crate::runtime::backend::Backend;
use crate::runtime::error::LoadError;
use crate::runtime::model::config::{Names, Naming};
use crate::runtime::model::weights::{Linear, WeightFile};

/// Reads one layer.
pub struct Loader<'a, B: Backend> {
    pub backend: &'a B,
    pub file: &'a WeightFile<'a>,
    pub naming: &'a Naming,
    pub convert: Convert<'a>,
    pub hidden: usize,
    pub layer: usize,
}

impl<B: Backend> Loader<'_, B> {
    pub fn norm(&self, names: Names, len: usize) -> Result<B::Vector, LoadError> {
        self.backend.vector(self.file.layer_norm(self.layer, names, len)?)
    }

    /// A matrix and its bias as the backend keeps them.
    pub fn projection(&self, linear: Linear) -> Result<Projection<B>, LoadError> {
        self.keep(linear, Matrix::Projection)
    }

    /// As [`Self::projection`], of a matrix of few rows that decide much.
    pub fn gate(&self, linear: Linear) -> Result<Projection<B>, LoadError> {
        self.keep(linear, Matrix::Gate)
    }

    fn keep(&self, linear: Linear, matrix: Matrix) -> Result<Projection<B>, LoadError> {
        let weight = (self.convert)(&linear.name, matrix, linear.weight)?;
        let bias = linear.bias.map(|bias| self.backend.vector(bias)).transpose()?;
        Ok(Projection { weight: self.backend.weight(&weight)?, bias })
    }
}
