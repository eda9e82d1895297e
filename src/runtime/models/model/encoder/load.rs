//! Reads an encoder's tensors, each checked against the configuration's shape.

use super::EncoderNorm;
use super::config::EncoderNames;
use crate::backend::Backend;
use crate::model::decoder::{Convert, Matrix, Projection};
use crate::model::weights::{Linear, missing, to_f32};
use crate::tensor::{HostTensor, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};

/// The tensors of an encoder, by name.
pub struct EncoderFile<'a, B: Backend> {
    pub backend: &'a B,
    pub source: &'a dyn TensorSource,
    pub convert: Convert<'a>,
    pub prefix: &'static str,
}

impl<'a, B: Backend> EncoderFile<'a, B> {
    /// # Errors
    /// [`LoadError::Tensor`] if the file has the table of words under none of the prefixes.
    pub fn new(
        backend: &'a B,
        source: &'a dyn TensorSource,
        convert: Convert<'a>,
        names: &EncoderNames,
    ) -> LoadResult<Self> {
        let prefix = names.prefix_in(source);
        let prefix = prefix.ok_or_else(|| missing(&format!("{}.weight", names.words)))?;
        Ok(Self { backend, source, convert, prefix })
    }

    pub fn has(&self, name: &str) -> bool {
        self.source.describe(&format!("{}{name}.weight", self.prefix)).is_some()
    }

    fn find(&self, name: &str, shape: &[usize]) -> LoadResult<Option<HostTensor>> {
        let name = format!("{}{name}", self.prefix);
        let Some(tensor) = self.source.tensor(&name)? else { return Ok(None) };
        if tensor.shape != shape {
            let message = format!("has shape {:?}, but the configuration needs {shape:?}", tensor.shape);
            return Err(LoadError::Tensor { tensor: name, message });
        }
        Ok(Some(tensor))
    }

    /// Reads a table of rows that are looked up.
    pub fn table(&self, name: &str, shape: [usize; 2]) -> LoadResult<B::Weight> {
        let name = format!("{name}.weight");
        let tensor = self.find(&name, &shape)?.ok_or_else(|| missing(&name))?;
        self.backend.table(&(self.convert)(&name, Matrix::Vocabulary, tensor)?)
    }

    /// Reads a norm; its bias is zero if the file has none.
    pub fn norm(&self, name: &str, len: usize) -> LoadResult<EncoderNorm<B>> {
        // TensorFlow's names of weight and bias are in checkpoints of 2018.
        let either = |names: [&str; 2]| {
            let [first, second] = names.map(|part| self.find(&format!("{name}.{part}"), &[len]));
            Ok::<_, LoadError>(first?.or(second?))
        };
        let weight = either(["weight", "gamma"])?.ok_or_else(|| missing(&format!("{name}.weight")))?;
        let bias = either(["bias", "beta"])?;
        let bias = bias.map_or_else(|| vec![0.0; len], |bias| to_f32(&bias));
        Ok(EncoderNorm { weight: self.backend.vector(to_f32(&weight))?, bias: self.backend.vector(bias)? })
    }

    /// Reads a matrix and its bias, if it has one.
    pub fn linear(&self, name: &str, shape: [usize; 2]) -> LoadResult<Linear> {
        let weight_name = format!("{name}.weight");
        let weight = self.find(&weight_name, &shape)?.ok_or_else(|| missing(&weight_name))?;
        let bias = self.find(&format!("{name}.bias"), &[shape[0]])?.map(|bias| to_f32(&bias));
        Ok(Linear::new(weight_name, weight, bias))
    }

    /// Uploads a matrix and its bias.
    pub fn projection(&self, linear: Linear) -> LoadResult<Projection<B>> {
        let weight = (self.convert)(&linear.name, Matrix::Projection, linear.weight)?;
        let bias = linear.bias.map(|bias| self.backend.vector(bias)).transpose()?;
        Ok(Projection { weight: self.backend.weight(&weight)?, bias, adapters: Vec::new() })
    }

    /// Reads projections of equal heights, apart or as consecutive rows of one matrix.
    pub fn projections<const N: usize>(
        &self,
        names: [String; N],
        fused: &str,
        [rows, cols]: [usize; 2],
    ) -> LoadResult<[Projection<B>; N]> {
        let read: Vec<Projection<B>> = if self.has(&names[0]) || !self.has(fused) {
            let apart = |name: &String| self.projection(self.linear(name, [rows, cols])?);
            names.iter().map(apart).collect::<Result<_, _>>()?
        } else {
            let whole = self.linear(fused, [N * rows, cols])?;
            let part = |part| self.projection(whole.slice_rows(part * rows, (part + 1) * rows));
            (0..N).map(part).collect::<Result<_, _>>()?
        };
        let mut read = read.into_iter();
        Ok(std::array::from_fn(|_| read.next().expect("one was read for each name")))
    }
}
