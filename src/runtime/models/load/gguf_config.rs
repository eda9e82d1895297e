//! GGUF metadata as a [`ConfigReader`] for families.

use std::sync::Arc;

use serde_json::{Value, json};

use super::gguf::Gguf;
use super::metadata::Metadata;
use crate::model::arch::ConfigReader;
use crate::tensor::TensorSource;

/// Longest list to convert; longer ones are vocabularies.
const MAX_LIST: usize = 4096;

/// Creates the reader of a GGUF file. `vocab_size` is the number of rows of the embedding table, which every file
/// has, regardless of its keys; the name of a tensor of the file is a key for its shape.
pub fn gguf_config_reader(gguf: &Arc<Gguf>) -> ConfigReader {
    let path = gguf.paths().next().map(Into::into).unwrap_or_default();
    let gguf = gguf.clone();
    ConfigReader::gguf(path, move |key| match key {
        "vocab_size" => {
            gguf.describe("token_embd.weight").and_then(|(shape, _)| shape.first().map(|rows| json!(rows)))
        }
        _ if key.ends_with(".vocab_size") => None,
        _ => value(gguf.metadata(), key).or_else(|| gguf.describe(key).map(|(shape, _)| json!(shape))),
    })
}

/// Converts a scalar or short list to JSON; `None` if the key is absent or of another kind.
pub(super) fn value(metadata: &Metadata, key: &str) -> Option<Value> {
    fn scalar<T: Into<Value>>(got: Result<Option<T>, impl Sized>) -> Option<Value> {
        got.ok().flatten().map(Into::into)
    }
    fn list<T: Into<Value>>(got: Result<Option<Vec<T>>, impl Sized>) -> Option<Value> {
        got.ok().flatten().filter(|list| list.len() <= MAX_LIST).map(Into::into)
    }
    scalar(metadata.get::<bool>(key))
        .or_else(|| scalar(metadata.get::<u64>(key)))
        .or_else(|| scalar(metadata.get::<i64>(key)))
        .or_else(|| scalar(metadata.get::<f32>(key)))
        .or_else(|| scalar(metadata.get::<&str>(key)))
        .or_else(|| list(metadata.get::<Vec<bool>>(key)))
        .or_else(|| list(metadata.get::<Vec<i64>>(key)))
        .or_else(|| list(metadata.get::<Vec<f32>>(key)))
}
