//! The head of a GGUF file to be written: metadata entries and the table of tensors.
//!
//! Invariant: tensors are laid out in the order in which they were added, each aligned to [`ALIGNMENT`]
//! bytes. Format: the GGUF specification (ggml's docs/gguf.md), version 3, little endian.

use crate::load::gguf_types;
use llmctl_kernel::Dtype;

/// Alignment of tensors in bytes: the format's default, so that no key is needed.
pub const ALIGNMENT: usize = 32;

/// A metadata value, encoded with its type number.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufValue(Vec<u8>);

/// Number of a value type.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

impl GgufValue {
    fn scalar(kind: u32, bytes: &[u8]) -> Self {
        Self([&kind.to_le_bytes()[..], bytes].concat())
    }

    fn array<T>(kind: u32, items: &[T], bytes: impl Fn(&T, &mut Vec<u8>)) -> Self {
        let mut value = [ARRAY.to_le_bytes(), kind.to_le_bytes()].concat();
        value.extend((items.len() as u64).to_le_bytes());
        items.iter().for_each(|item| bytes(item, &mut value));
        Self(value)
    }

    /// Takes a value that is encoded already, with its type number.
    pub fn encoded(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

impl From<u32> for GgufValue {
    fn from(value: u32) -> Self {
        Self::scalar(U32, &value.to_le_bytes())
    }
}

impl From<f32> for GgufValue {
    fn from(value: f32) -> Self {
        Self::scalar(F32, &value.to_le_bytes())
    }
}

impl From<bool> for GgufValue {
    fn from(value: bool) -> Self {
        Self::scalar(BOOL, &[value.into()])
    }
}

impl From<&str> for GgufValue {
    fn from(value: &str) -> Self {
        Self::scalar(TEXT, &text_bytes(value))
    }
}

impl From<&[String]> for GgufValue {
    fn from(values: &[String]) -> Self {
        Self::array(TEXT, values, |text, out| out.extend(text_bytes(text)))
    }
}

impl From<&[f32]> for GgufValue {
    fn from(values: &[f32]) -> Self {
        Self::array(F32, values, |value, out| out.extend(value.to_le_bytes()))
    }
}

impl From<&[i32]> for GgufValue {
    fn from(values: &[i32]) -> Self {
        Self::array(I32, values, |value, out| out.extend(value.to_le_bytes()))
    }
}

/// Returns a length-prefixed string.
fn text_bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A tensor to be written. `shape` is row-major, outermost first.
#[derive(Debug, Clone)]
struct HeadTensor {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    len: usize,
}

/// Metadata and tensor table.
#[derive(Debug, Clone, Default)]
pub struct GgufHead {
    entries: Vec<(String, GgufValue)>,
    tensors: Vec<HeadTensor>,
}

impl GgufHead {
    /// Sets a key, in its place if it is there already.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<GgufValue>) {
        let (key, value) = (key.into(), value.into());
        match self.entries.iter_mut().find(|(known, _)| *known == key) {
            Some((_, old)) => *old = value,
            None => self.entries.push((key, value)),
        }
    }

    /// Adds a tensor of `len` bytes behind those before it.
    pub fn add_tensor(&mut self, name: &str, shape: &[usize], dtype: Dtype, len: usize) {
        self.tensors.push(HeadTensor { name: name.to_owned(), shape: shape.to_vec(), dtype, len });
    }

    /// Encodes the head, padded to the first tensor.
    ///
    /// # Errors
    /// A sentence if a tensor's type has no number in GGUF.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            file.extend(text_bytes(key));
            file.extend(&value.0);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            file.extend(text_bytes(&tensor.name));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            file.extend(tensor.shape.iter().rev().flat_map(|&dim| (dim as u64).to_le_bytes()));
            file.extend(type_number(tensor.dtype)?.to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset += tensor.len.next_multiple_of(ALIGNMENT);
        }
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        Ok(file)
    }
}

/// Returns ggml's number of a type.
fn type_number(dtype: Dtype) -> Result<u32, String> {
    gguf_types::number(dtype).ok_or_else(|| format!("{} cannot be stored in a GGUF file", dtype.name()))
}
