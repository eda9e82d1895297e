//! Writes a planned file: tensor by tensor, in pieces of rows, under a temporary name until it is complete.
//!
//! A write that is stopped or fails leaves nothing behind.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::head::ALIGNMENT;
use super::{Export, PlannedTensor, TensorOrigin};
use crate::load::quantize::convert_exactly;
use crate::model::weights::{Linear, missing, to_f32};
use crate::tensor::{HostTensor, SharedBytes};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::private_files::UnfinishedFile;
use llmctl_kernel::Dtype;

/// Values that are converted at a time.
const PIECE_VALUES: usize = 1 << 22;

/// End of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteEnd {
    Done,
    /// The caller asked to stop; nothing is left.
    Stopped,
}

impl Export<'_> {
    /// Writes the file. `progress` is called with the bytes of weights written and their total, and returns
    /// true to continue. An existing file at `path` is replaced when the new one is complete.
    ///
    /// # Errors
    /// [`LoadError::Io`] naming the file, or the error of reading or converting a tensor.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64, u64) -> bool) -> LoadResult<WriteEnd> {
        let io = |error: io::Error| LoadError::Io { path: path.into(), message: error.to_string() };
        let (unfinished, file) = UnfinishedFile::create(path).map_err(io)?;
        let mut out = BufWriter::new(file);
        let head = self.head.encode().map_err(|message| LoadError::malformed(path, "head", message))?;
        out.write_all(&head).map_err(io)?;
        let total = self.sizes().bytes_after;
        let mut written = 0;
        for planned in &self.tensors {
            let mut len = 0;
            let goes_on = self.pieces(planned, &mut |bytes| {
                out.write_all(bytes).map_err(io)?;
                len += bytes.len();
                written += bytes.len() as u64;
                Ok(progress(written, total))
            })?;
            if !goes_on {
                return Ok(WriteEnd::Stopped);
            }
            out.write_all(&vec![0; len.next_multiple_of(ALIGNMENT) - len]).map_err(io)?;
        }
        let file = out.into_inner().map_err(|error| io(error.into_error()))?;
        unfinished.finish(&file).map_err(io)?;
        Ok(WriteEnd::Done)
    }

    /// Converts a tensor and calls `write` with its bytes, a piece at a time, until that returns `false`.
    fn pieces(
        &self,
        planned: &PlannedTensor,
        write: &mut dyn FnMut(&[u8]) -> LoadResult<bool>,
    ) -> LoadResult<bool> {
        let PlannedTensor { tensor, dtype } = planned;
        let whole = self.read(&tensor.origin)?;
        let num_values: usize = tensor.shape.iter().product();
        if whole.shape.iter().product::<usize>() != num_values {
            let message = format!("has shape {:?}, but its header says {:?}", whole.shape, tensor.shape);
            return Err(LoadError::Tensor { tensor: tensor.name.clone(), message });
        }
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let rows = num_values / cols;
        let rows_per_matrix = tensor.shape.iter().rev().nth(1).copied().unwrap_or(1);
        let importance = match self.imatrix {
            Some(imatrix) if dtype.is_quantized() => imatrix.columns(&tensor.name, &tensor.shape)?,
            _ => None,
        };
        let flat = HostTensor { dtype: whole.dtype, shape: vec![rows, cols], bytes: whole.bytes };
        let row_bytes = flat.bytes.len() / rows;
        let step = (PIECE_VALUES / cols).max(1);
        let mut start = 0;
        while start < rows {
            let matrix = start / rows_per_matrix;
            let end = (start + step).min((matrix + 1) * rows_per_matrix);
            let columns = importance.map(|all| &all[matrix * cols..(matrix + 1) * cols]);
            let piece = convert_exactly(&tensor.name, &flat.slice_rows(start, end), *dtype, columns)?;
            if !write(&piece.bytes)? {
                return Ok(false);
            }
            flat.bytes.release(start * row_bytes..end * row_bytes);
            start = end;
        }
        Ok(true)
    }

    fn find(&self, name: &str) -> LoadResult<HostTensor> {
        self.files.tensors().tensor(name)?.ok_or_else(|| missing(name))
    }

    /// Reads a tensor, rearranged.
    fn read(&self, origin: &TensorOrigin) -> LoadResult<HostTensor> {
        let tensor = |name: &str, dtype, shape, bytes: Vec<u8>| {
            HostTensor::new(dtype, shape, SharedBytes::from(bytes))
                .map_err(|message| LoadError::Tensor { tensor: name.to_owned(), message })
        };
        match origin {
            TensorOrigin::Whole(name) => self.find(name),
            TensorOrigin::Offset { name, offset } => {
                let stored = self.find(name)?;
                let values: Vec<f32> = to_f32(&stored).iter().map(|value| value + offset).collect();
                tensor(name, Dtype::F32, stored.shape, float_bytes(&values))
            }
            TensorOrigin::Interleaved { name, head_dim } => {
                Ok(interleaved(name, self.find(name)?, *head_dim))
            }
            TensorOrigin::Rows { name, start, end } => {
                let stack = self.find(name)?;
                let (count, cols) = (stack.shape[0], stack.rows_cols().1);
                let parts = (0..count).map(|index| stack.slice_outer(index).slice_rows(*start, *end));
                let bytes = parts.flat_map(|part| part.bytes.to_vec()).collect();
                tensor(name, stack.dtype, vec![count, end - start, cols], bytes)
            }
            TensorOrigin::Stack(names) => {
                let parts: Vec<HostTensor> =
                    names.iter().map(|name| self.find(name)).collect::<Result<_, _>>()?;
                let shape = [vec![parts.len()], parts[0].shape.clone()].concat();
                let bytes = parts.iter().flat_map(|part| part.bytes.to_vec()).collect();
                tensor(&names[0], parts[0].dtype, shape, bytes)
            }
            TensorOrigin::Values(values) => {
                tensor("values", Dtype::F32, vec![values.len()], float_bytes(values))
            }
        }
    }
}

fn float_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Puts rotary pairs side by side, the reverse of [`Linear::deinterleave`]. A bias is a matrix of one column.
fn interleaved(name: &str, stored: HostTensor, head_dim: usize) -> HostTensor {
    let shape = stored.shape.clone();
    let rows = shape[0];
    let source_row = |row: usize| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + within % 2 * (head_dim / 2) + within / 2
    };
    let cols = shape.get(1).copied().unwrap_or(1);
    let matrix = HostTensor { shape: vec![rows, cols], ..stored };
    let linear = Linear::new(name, matrix, None);
    HostTensor { shape, ..linear.gather_rows((0..rows).map(source_row)).weight }
}
