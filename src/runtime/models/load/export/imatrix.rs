//! llama.cpp's importance matrices: the mean square of what each column of a matrix is multiplied with.
//!
//! Two forms are read: GGUF with the tensors `NAME.in_sum2` and `NAME.counts`, and the older binary list.
//! Sources: llama.cpp's tools/imatrix and tools/quantize. Every count is checked against the file's size
//! before it is used.

use std::collections::HashMap;
use std::path::Path;

use super::super::gguf::Gguf;
use super::super::metadata::Cursor;
use crate::model::weights::to_f32;
use crate::tensor::{SharedBytes, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};

/// Importance of the columns of each matrix, by the name of its tensor in GGUF.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Imatrix {
    columns: HashMap<String, Vec<f32>>,
}

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

impl Imatrix {
    /// Reads a file of either form.
    ///
    /// # Errors
    /// [`LoadError`] naming the file and the tensor or entry at fault.
    pub fn open(path: &Path) -> LoadResult<Self> {
        let bytes = SharedBytes::map_file(path)?;
        let columns = match bytes.starts_with(b"GGUF") {
            true => read_gguf(path)?,
            false => {
                read_list(&bytes).map_err(|(what, message)| LoadError::malformed(path, what, message))?
            }
        };
        let bad = columns.iter().find(|(_, values)| values.iter().any(|v| !v.is_finite() || *v < 0.0));
        match bad {
            Some((name, _)) => {
                let message = "holds an importance that is negative or not finite";
                Err(LoadError::malformed(path, format!("tensor {name:?}"), message))
            }
            None if columns.is_empty() => {
                Err(LoadError::malformed(path, "importance matrix", "has no entries"))
            }
            None => Ok(Self { columns }),
        }
    }

    /// Returns the number of tensors with importance.
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Returns whether the file has importance for a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.columns.contains_key(name)
    }

    /// Returns the importance of a tensor's columns, for each of its matrices in turn; `None` if the file has none.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] if the importance is that of another shape.
    pub fn columns(&self, name: &str, shape: &[usize]) -> LoadResult<Option<&[f32]>> {
        let Some(values) = self.columns.get(name) else { return Ok(None) };
        let cols = shape.last().copied().unwrap_or(1);
        let matrices: usize = shape.iter().rev().skip(2).product();
        if values.len() == cols * matrices {
            return Ok(Some(values));
        }
        let message = format!(
            "has shape {shape:?}, but the importance matrix has {} values for it: it was made for another model",
            values.len()
        );
        Err(LoadError::Tensor { tensor: name.to_owned(), message })
    }
}

fn read_gguf(path: &Path) -> LoadResult<HashMap<String, Vec<f32>>> {
    let gguf = Gguf::open(path)?; // with the other parts of a split file
    let mut columns = HashMap::new();
    for sums_name in gguf.names() {
        let Some(name) = sums_name.strip_suffix(SUMS) else { continue };
        let counts_name = format!("{name}{COUNTS}");
        let error = |message: &str| {
            Err(LoadError::malformed(path, format!("tensor {counts_name:?}"), message.to_owned()))
        };
        let (Some(sums), Some(counts)) = (gguf.tensor(&sums_name)?, gguf.tensor(&counts_name)?) else {
            return error("is missing");
        };
        let (mut sums, counts) = (to_f32(&sums), to_f32(&counts));
        if counts.is_empty() || sums.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return error("does not fit the sums");
        }
        let cols = sums.len() / counts.len();
        for (sums, count) in sums.chunks_exact_mut(cols).zip(counts) {
            // A column that was never used has no importance of its own.
            sums.iter_mut().for_each(|sum| *sum = if count > 0.0 { *sum / count } else { 1.0 });
        }
        columns.insert(name.to_owned(), sums);
    }
    Ok(columns)
}

/// Reads the older form: a count, then for each tensor its name, the number of calls and the sums, all of 32 bits. What
/// follows the list is a comment. An error is the part at fault and a sentence.
fn read_list(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, (String, String)> {
    let mut cursor = Cursor::new(bytes);
    let header = |message| ("header".to_owned(), message);
    let count = cursor.u32().map_err(header)? as usize;
    if count > bytes.len() / 12 {
        return Err(header("is neither GGUF nor an importance matrix of llama.cpp".to_owned()));
    }
    let mut columns = HashMap::new();
    for index in 0..count {
        let entry = |message| (format!("entry {} of {count}", index + 1), message);
        let len = cursor.u32().map_err(entry)? as usize;
        let name = String::from_utf8_lossy(cursor.take(len).map_err(entry)?).into_owned();
        let calls = cursor.u32().map_err(entry)?;
        let len = cursor.u32().map_err(entry)? as usize;
        let raw = cursor.take(len.saturating_mul(4)).map_err(entry)?;
        let divisor = if calls > 0 { calls as f32 } else { 1.0 };
        let values = raw.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw) / divisor);
        columns.insert(name, values.collect());
    }
    Ok(columns)
}
