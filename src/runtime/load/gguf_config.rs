//! GGUF metadata as the facts that families read.

use std::sync::Arc;

use serde_json::{Value, json};

use super::gguf::Gguf;
use super::metadata::Metadata;
use crate::runtime::model::arch::ConfigReader;
use crate::runtime::tensor::TensorSource;

/// Lists longer than this are vocabularies, not facts.
const MAX_LIST: usize = 4096;

/// The facts of a GGUF file. `vocab_size` is the embedding table's, which every file has, whatever its keys say.
pub fn gguf_config_reader(gguf: &Arc<Gguf>) -> ConfigReader {
    let path = gguf.paths().next().map(Into::into).unwrap_or_default();
    let gguf = gguf.clone();
    ConfigReader::gguf(path, move |key| match key {
        "vocab_size" => {
            gguf.describe("token_embd.weight").and_then(|(shape, _)| shape.first().map(|rows| json!(rows)))
        }
        _ if key.ends_with(".vocab_size") => None,
        _ => value(gguf.metadata(), key),
    })
}

/// A scalar or short list as JSON; `None` when absent, or of a kind that no fact has.
fn value(metadata: &Metadata, key: &str) -> Option<Value> {
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
