//! Writes small GGUF files in memory, honest ones and lying ones.
//!
//! `GgufBuilder::new().text("general.architecture", "llama").tensor("a", &[2, 3], F32, &bytes).build()`
//! Methods that begin with `claim` make the file lie. Written from the GGUF specification, apart from the reader.

/// ggml's type numbers that tests use.
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q4_0: u32 = 2;

const KIND_U32: u32 = 4;
const KIND_F32: u32 = 6;
pub const KIND_BOOL: u32 = 7;
const KIND_TEXT: u32 = 8;
const KIND_ARRAY: u32 = 9;

/// Collects metadata and tensors; [`GgufBuilder::build`] lays them out.
#[derive(Debug, Clone)]
pub struct GgufBuilder {
    version: u32,
    alignment: usize,
    entry_count: u64,
    entries: Vec<u8>,
    tensor_count: u64,
    infos: Vec<u8>,
    data: Vec<u8>,
}

impl Default for GgufBuilder {
    fn default() -> Self {
        GgufBuilder {
            version: 3,
            alignment: 32,
            entry_count: 0,
            entries: vec![],
            tensor_count: 0,
            infos: vec![],
            data: vec![],
        }
    }
}

impl GgufBuilder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Lays tensors out by another alignment, and says so.
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = alignment as usize;
        self.u32("general.alignment", alignment)
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, KIND_U32, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, KIND_F32, &value.to_le_bytes())
    }

    pub fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, KIND_BOOL, &[value.into()])
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, KIND_TEXT, &text_bytes(value.as_bytes()))
    }

    pub fn texts<T: AsRef<[u8]>>(self, key: &str, values: &[T]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| text_bytes(value.as_ref())).collect();
        self.array(key, KIND_TEXT, values.len() as u64, &items)
    }

    pub fn u32s(self, key: &str, values: &[u32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, KIND_U32, values.len() as u64, &items)
    }

    pub fn f32s(self, key: &str, values: &[f32]) -> Self {
        let items: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, KIND_F32, values.len() as u64, &items)
    }

    /// An array of `count` elements of a value type, whose bytes may tell otherwise.
    pub fn array(self, key: &str, kind: u32, count: u64, items: &[u8]) -> Self {
        let value = [&kind.to_le_bytes()[..], &count.to_le_bytes(), items].concat();
        self.raw(key, KIND_ARRAY, &value)
    }

    /// An entry of any value type with any bytes.
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entry_count += 1;
        self.entries.extend(text_bytes(key.as_bytes()));
        self.entries.extend(kind.to_le_bytes());
        self.entries.extend(value);
        self
    }

    /// A tensor of a row-major shape (outermost first), placed after the ones before.
    pub fn tensor(mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(bytes);
        let dims: Vec<u64> = shape.iter().map(|&dim| dim as u64).collect();
        self.claim_tensor(name, &dims, kind, offset)
    }

    /// A tensor entry without data; `shape` is row-major.
    pub fn claim_tensor(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        self.tensor_count += 1;
        self.infos.extend(text_bytes(name.as_bytes()));
        self.infos.extend((shape.len() as u32).to_le_bytes());
        self.infos.extend(shape.iter().rev().flat_map(|dim| dim.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self
    }

    /// Writes these counts into the header, whatever follows.
    pub fn claim_counts(mut self, tensors: u64, entries: u64) -> Self {
        (self.tensor_count, self.entry_count) = (tensors, entries);
        self
    }

    pub fn build(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(self.tensor_count.to_le_bytes());
        file.extend(self.entry_count.to_le_bytes());
        file.extend(&self.entries);
        file.extend(&self.infos);
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&self.data);
        }
        file
    }
}

/// A length-prefixed string.
pub fn text_bytes(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}
