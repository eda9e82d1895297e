//! Tensors as they lie in files: a type, a shape and bytes that are mapped or owned.
//!
//! `TensorSource` is the one seam between file formats and models: `load/` implements it for GGUF and safetensors,
//! `model/` reads through it. Bytes have been checked against shape and type by whoever made the tensor.

use std::borrow::Cow;
use std::sync::Arc;

use memmap2::Mmap;

use super::error::LoadError;
use super::kernel::Dtype;

/// Immutable bytes, in a mapped file or in memory; cloning shares them.
#[derive(Debug, Clone)]
pub enum Bytes {
    Mapped { map: Arc<Mmap>, start: usize, len: usize },
    Owned(Arc<[u8]>),
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped { map, start, len } => &map[*start..*start + *len],
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::Owned(bytes.into())
    }
}

/// A tensor of a file. `shape` is row-major, outermost first (GGUF's dimensions reversed);
/// `bytes.len()` equals the product of the outer dimensions times `dtype.row_bytes(innermost)`.
#[derive(Debug, Clone)]
pub struct HostTensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Bytes,
}

impl HostTensor {
    /// Rows and columns of a matrix; a vector is one row.
    pub fn rows_cols(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        (self.shape.iter().rev().skip(1).product(), cols)
    }

    /// Rows `start..end` of a matrix, sharing the bytes. Panics when out of range or not a matrix.
    pub fn slice_rows(&self, start: usize, end: usize) -> HostTensor {
        let (rows, cols) = self.rows_cols();
        assert!(self.shape.len() == 2 && start <= end && end <= rows, "slice of rows outside the matrix");
        let row_bytes = self.dtype.row_bytes(cols).expect("checked by the loader");
        let bytes = match &self.bytes {
            Bytes::Mapped { map, start: at, .. } => Bytes::Mapped {
                map: map.clone(),
                start: at + start * row_bytes,
                len: (end - start) * row_bytes,
            },
            Bytes::Owned(bytes) => Bytes::Owned(bytes[start * row_bytes..end * row_bytes].into()),
        };
        HostTensor { dtype: self.dtype, shape: vec![end - start, cols], bytes }
    }
}

/// Named tensors of a model, whatever the file format.
pub trait TensorSource: Send + Sync {
    /// The tensor, or `None` when the model has none of that name.
    ///
    /// # Errors
    /// [`LoadError`] naming the tensor when the file's entry is damaged or of a type that is not supported.
    fn tensor(&self, name: &str) -> Result<Option<HostTensor>, LoadError>;

    /// Shape and type without touching the bytes.
    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)>;

    /// All names, in file order.
    fn names(&self) -> Vec<Cow<'_, str>>;
}
