//! GGUF key-value metadata: parsed once, read by typed getters whose errors name the key.
//!
//! Text and arrays stay in the mapped file; the parsed form holds spans, so that a vocabulary of 250 000
//! tokens costs one pass and no allocation per token. Invariant: a span is checked against the file's size
//! before it is stored, and no allocation trusts a size that the file claims. Knows nothing of tensors,
//! architectures or tokenizers. Format: the GGUF specification (ggml's docs/gguf.md), versions 2 and 3,
//! little endian.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::tensor::SharedBytes;
use llmctl_base::error::{LoadError, LoadResult};

/// Nesting limit of arrays: no writer nests them deeper, and each level is a stack frame.
const MAX_ARRAY_DEPTH: usize = 4;

/// Longest key that the specification allows, in bytes.
const MAX_KEY_BYTES: usize = 65_535;

/// The key-value section of a GGUF file.
///
/// Getters return `Ok(None)` for an absent key, and an error naming the key for a value of another type or out of the
/// requested type's range. Integer widths are interchangeable, because writers disagree about them.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    bytes: SharedBytes,
    values: BTreeMap<Box<str>, Value>,
    /// Keys in file order, with the span of each value and its type number.
    order: Vec<(Box<str>, TextSpan)>,
}

/// A metadata value; text and arrays are spans of the file.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Int(i128),
    Float(f64),
    Bool(bool),
    Text(TextSpan),
    Array(Array),
}

/// Span of bytes in the file.
#[derive(Debug, Clone, Copy, PartialEq)]
struct TextSpan {
    start: usize,
    len: usize,
}

#[derive(Debug, Clone, PartialEq)]
enum Array {
    /// `len` scalars of one fixed-size type, from `start`.
    Scalars { kind: ValueType, start: usize, len: usize },
    /// Strings, by their places in the file.
    Texts(Vec<TextSpan>),
    /// An array of arrays, checked for damage; no getter reads it.
    Nested,
}

/// The value types of the format, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_number(number: u32) -> Result<ValueType, String> {
        use ValueType::*;
        const KINDS: [ValueType; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64];
        KINDS.get(number as usize).copied().ok_or_else(|| format!("unknown value type {number}"))
    }

    /// Returns the bytes of one value: exact for scalars, the minimum for text (a length) and arrays (type and
    /// count).
    const fn min_bytes(self) -> usize {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::Text => 8,
            ValueType::Array => 12,
        }
    }
}

/// Reader of little-endian values from front to back; every read is checked against the end.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    /// Returns the number of bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(*self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(*self.array()?))
    }

    /// Reads a count of items of at least `min_bytes` each; an error if the rest of the file cannot hold them.
    pub(super) fn count(&mut self, min_bytes: usize) -> Result<usize, String> {
        let claimed = self.u64()?;
        let most = self.remaining() / min_bytes;
        match usize::try_from(claimed) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(format!("claims {claimed} items, but the rest of the file can hold only {most}")),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], String> {
        let at = self.at;
        let array = self.bytes[at..].first_chunk();
        let array = array.ok_or_else(|| format!("the file ends within the {N} bytes at offset {at}"))?;
        self.at += N;
        Ok(array)
    }

    fn skip(&mut self, len: usize) -> Result<usize, String> {
        let start = self.at;
        if len > self.remaining() {
            return Err(format!(
                "claims {len} bytes at offset {start}, but only {} follow",
                self.remaining()
            ));
        }
        self.at += len;
        Ok(start)
    }

    /// Reads `len` bytes.
    pub(super) fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let start = self.skip(len)?;
        Ok(&self.bytes[start..self.at])
    }

    fn text_span(&mut self) -> Result<TextSpan, String> {
        let claimed = self.u64()?;
        let len = usize::try_from(claimed).unwrap_or(usize::MAX);
        Ok(TextSpan { start: self.skip(len)?, len })
    }

    /// Reads a length-prefixed key or tensor name.
    pub(super) fn name(&mut self) -> Result<&'a str, String> {
        let text_span = self.text_span()?;
        if text_span.len > MAX_KEY_BYTES {
            return Err(format!("a name of {} bytes is too long", text_span.len));
        }
        std::str::from_utf8(&self.bytes[text_span.start..self.at])
            .map_err(|error| format!("a name is not UTF-8: {error}"))
    }

    fn value(&mut self) -> Result<Value, String> {
        match ValueType::from_number(self.u32()?)? {
            ValueType::Text => {
                let text_span = self.text_span()?;
                match std::str::from_utf8(&self.bytes[text_span.start..self.at]) {
                    Ok(_) => Ok(Value::Text(text_span)),
                    Err(error) => Err(format!("the text is not UTF-8: {error}")),
                }
            }
            ValueType::Array => Ok(Value::Array(self.elements(1)?)),
            kind => {
                let start = self.skip(kind.min_bytes())?;
                scalar(kind, &self.bytes[start..self.at])
            }
        }
    }

    fn elements(&mut self, depth: usize) -> Result<Array, String> {
        if depth > MAX_ARRAY_DEPTH {
            return Err(format!("arrays are nested more than {MAX_ARRAY_DEPTH} deep"));
        }
        let kind = ValueType::from_number(self.u32()?)?;
        let len = self.count(kind.min_bytes())?;
        match kind {
            ValueType::Text => (0..len).map(|_| self.text_span()).collect::<Result<_, _>>().map(Array::Texts),
            ValueType::Array => {
                (0..len).try_for_each(|_| self.elements(depth + 1).map(drop))?;
                Ok(Array::Nested)
            }
            kind => Ok(Array::Scalars { kind, start: self.skip(len * kind.min_bytes())?, len }),
        }
    }
}

/// Reads one scalar from exactly `kind.min_bytes()` bytes.
fn scalar(kind: ValueType, bytes: &[u8]) -> Result<Value, String> {
    let mut raw = [0; 8];
    raw[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(raw);
    Ok(match kind {
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => Value::Int(bits.into()),
        ValueType::I8 => Value::Int((bits as i8).into()),
        ValueType::I16 => Value::Int((bits as i16).into()),
        ValueType::I32 => Value::Int((bits as i32).into()),
        ValueType::I64 => Value::Int((bits as i64).into()),
        ValueType::F32 => Value::Float(f32::from_bits(bits as u32).into()),
        ValueType::F64 => Value::Float(f64::from_bits(bits)),
        ValueType::Bool if bits < 2 => Value::Bool(bits == 1),
        ValueType::Bool => return Err(format!("{bits} is no bool")),
        ValueType::Text | ValueType::Array => return Err("not a scalar".into()),
    })
}

impl Metadata {
    /// Parses `count` entries at the cursor, which runs over `bytes`.
    ///
    /// # Errors
    /// [`LoadError::Malformed`] naming the key, or the entry's number if the key itself cannot be read.
    pub(super) fn parse(
        path: PathBuf,
        bytes: &SharedBytes,
        cursor: &mut Cursor<'_>,
        count: usize,
    ) -> LoadResult<Metadata> {
        let mut values = BTreeMap::new();
        let mut order = Vec::new();
        for index in 0..count {
            let key = cursor.name().map_err(|message| {
                LoadError::malformed(&path, format!("metadata entry {} of {count}", index + 1), message)
            })?;
            let start = cursor.position();
            let value = cursor.value().map_err(|message| malformed_key(&path, key, message))?;
            order.push((Box::from(key), TextSpan { start, len: cursor.position() - start }));
            if values.insert(Box::from(key), value).is_some() {
                return Err(malformed_key(&path, key, "the key appears twice".into()));
            }
        }
        Ok(Metadata { path, bytes: bytes.clone(), values, order })
    }

    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Returns all keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(AsRef::as_ref)
    }

    /// Iterates over the entries in file order, each value encoded with its type number.
    pub fn encoded(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let encoded = |span: &TextSpan| &self.bytes[span.start..span.start + span.len];
        self.order.iter().map(move |(key, span)| (key.as_ref(), encoded(span)))
    }

    /// Returns the value of a key as `T`, or `None` if the file lacks the key.
    ///
    /// `T` is one of `u32 u64 usize i32 i64 f32 bool &str`, or a `Vec` of one of these or of `&[u8]` (tokens that
    /// need not be UTF-8). Integers are accepted for `f32`.
    ///
    /// # Errors
    /// [`LoadError::Malformed`] naming the key, if its value has another type or is out of `T`'s range.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> LoadResult<Option<T>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        T::from_value(ValueRef { value, bytes: &self.bytes })
            .map(Some)
            .map_err(|message| malformed_key(&self.path, key, message))
    }

    /// Returns the value of a required key, like [`Metadata::get`].
    ///
    /// # Errors
    /// [`LoadError::Malformed`] naming the key.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> LoadResult<T> {
        self.get(key)?.ok_or_else(|| malformed_key(&self.path, key, "the key is missing".into()))
    }
}

fn malformed_key(path: &std::path::Path, key: &str, message: String) -> LoadError {
    LoadError::malformed(path, format!("key {:?}", shortened(key)), message)
}

/// Returns the error of a tensor in a file.
pub(super) fn malformed_tensor(path: &std::path::Path, name: &str, message: String) -> LoadError {
    LoadError::malformed(path, format!("tensor {:?}", shortened(name)), message)
}

/// Shortens and escapes a name from a file for a message.
pub(super) fn shortened(name: &str) -> String {
    match name.char_indices().nth(100) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.into(),
    }
}

/// A value together with the file that its spans refer to; private to this module.
#[derive(Clone, Copy)]
pub struct ValueRef<'a> {
    value: &'a Value,
    bytes: &'a [u8],
}

impl<'a> ValueRef<'a> {
    fn describe(self) -> &'static str {
        match self.value {
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::Text(_) => "text",
            Value::Array(Array::Texts(_)) => "an array of text",
            Value::Array(Array::Nested) => "an array of arrays",
            Value::Array(_) => "an array of numbers",
        }
    }

    fn instead_of(self, wanted: &str) -> String {
        format!("is {}, not {wanted}", self.describe())
    }

    fn int<T: TryFrom<i128>>(self) -> Result<T, String> {
        match *self.value {
            Value::Int(value) => value
                .try_into()
                .map_err(|_| format!("{value} is out of range for {}", std::any::type_name::<T>())),
            _ => Err(self.instead_of("an integer")),
        }
    }

    fn texts(self) -> Result<impl ExactSizeIterator<Item = &'a [u8]>, String> {
        match self.value {
            Value::Array(Array::Texts(places)) => Ok(places
                .iter()
                .map(move |text_span| &self.bytes[text_span.start..text_span.start + text_span.len])),
            _ => Err(self.instead_of("an array of text")),
        }
    }

    fn scalars<T: for<'v> FromValue<'v>>(self) -> Result<Vec<T>, String> {
        match *self.value {
            Value::Array(Array::Scalars { kind, start, len }) => {
                let bytes = &self.bytes[start..start + len * kind.min_bytes()];
                let element = |(index, raw)| {
                    let value = scalar(kind, raw)?;
                    T::from_value(ValueRef { value: &value, bytes: &[] })
                        .map_err(|message| format!("element {index}: {message}"))
                };
                bytes.chunks_exact(kind.min_bytes()).enumerate().map(element).collect()
            }
            _ => Err(self.instead_of("an array of numbers")),
        }
    }
}

/// Rust types that metadata values convert to; see [`Metadata::get`].
pub trait FromValue<'a>: Sized {
    /// # Errors
    /// Converts the value; the error says why it cannot, and follows the key's name in a message.
    fn from_value(value: ValueRef<'a>) -> Result<Self, String>;
}

macro_rules! integers_from_value {
    ($($integer:ty),*) => {$(
        impl FromValue<'_> for $integer {
            fn from_value(value: ValueRef<'_>) -> Result<Self, String> {
                value.int()
            }
        }
    )*};
}
integers_from_value!(u32, u64, usize, i32, i64);

macro_rules! vectors_from_value {
    ($($scalar:ty),*) => {$(
        impl FromValue<'_> for Vec<$scalar> {
            fn from_value(value: ValueRef<'_>) -> Result<Self, String> {
                value.scalars()
            }
        }
    )*};
}
vectors_from_value!(u32, u64, usize, i32, i64, f32, bool);

impl FromValue<'_> for f32 {
    fn from_value(value: ValueRef<'_>) -> Result<Self, String> {
        match *value.value {
            Value::Float(float) => Ok(float as f32),
            Value::Int(int) => Ok(int as f32),
            _ => Err(value.instead_of("a number")),
        }
    }
}

impl FromValue<'_> for bool {
    fn from_value(value: ValueRef<'_>) -> Result<Self, String> {
        match *value.value {
            Value::Bool(flag) => Ok(flag),
            _ => Err(value.instead_of("a bool")),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    fn from_value(value: ValueRef<'a>) -> Result<Self, String> {
        match *value.value {
            Value::Text(TextSpan { start, len }) => std::str::from_utf8(&value.bytes[start..start + len])
                .map_err(|error| format!("is not UTF-8: {error}")),
            _ => Err(value.instead_of("text")),
        }
    }
}

impl<'a> FromValue<'a> for Vec<&'a [u8]> {
    fn from_value(value: ValueRef<'a>) -> Result<Self, String> {
        Ok(value.texts()?.collect())
    }
}

impl<'a> FromValue<'a> for Vec<&'a str> {
    fn from_value(value: ValueRef<'a>) -> Result<Self, String> {
        let text = |(index, bytes)| {
            std::str::from_utf8(bytes).map_err(|error| format!("element {index} is not UTF-8: {error}"))
        };
        value.texts()?.enumerate().map(text).collect()
    }
}
