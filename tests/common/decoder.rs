//! Decoders of any backend from files, and the logits of whole prompts.

use std::path::Path;
use std::sync::Arc;

use llmctl::runtime::LoadError;
use llmctl::runtime::backend::{Backend, KvType};
use llmctl::runtime::kernel::Dtype;
use llmctl::runtime::kv::{PagePool, PageTable};
use llmctl::runtime::load::gguf::Gguf;
use llmctl::runtime::load::quantize::convert;
use llmctl::runtime::load::safetensors::Safetensors;
use llmctl::runtime::load::{facts, hf};
use llmctl::runtime::model::arch::{Facts, describe};
use llmctl::runtime::model::decoder::{Decoder, Parts};
use llmctl::runtime::model::{Batch, Model, Row};
use llmctl::runtime::tensor::TensorSource;
use serde_json::Value;

pub fn from_folder<B: Backend>(backend: B, folder: &Path, kv_type: KvType) -> Result<Decoder<B>, LoadError> {
    from_config(backend, folder, hf::config(folder)?, kv_type)
}

/// A folder's weights under another config than its own.
pub fn from_config<B: Backend>(
    backend: B,
    folder: &Path,
    config: Value,
    kv_type: KvType,
) -> Result<Decoder<B>, LoadError> {
    let facts = Facts::hugging_face(folder.join("config.json"), config);
    decoder(backend, &facts, &Safetensors::open(folder)?, kv_type, None)
}

/// Matrices are converted to `dtype`, if one is given.
pub fn from_gguf<B: Backend>(
    backend: B,
    path: &Path,
    kv_type: KvType,
    dtype: Option<Dtype>,
) -> Result<Decoder<B>, LoadError> {
    let gguf = Arc::new(Gguf::open(path)?);
    decoder(backend, &facts::facts(&gguf), &*gguf, kv_type, dtype)
}

fn decoder<B: Backend>(
    backend: B,
    facts: &Facts,
    source: &dyn TensorSource,
    kv_type: KvType,
    dtype: Option<Dtype>,
) -> Result<Decoder<B>, LoadError> {
    let description = describe(facts)?;
    let context_length = description.config.context_length;
    let parts = Parts {
        config: description.config,
        naming: description.naming,
        source,
        context_length,
        kv_type,
        convert: &|_, _, tensor| match dtype {
            None => Ok(tensor),
            Some(dtype) => convert("a matrix", &tensor, dtype),
        },
        progress: &mut |_, _| (),
    };
    Decoder::load(backend, parts)
}

/// Logits of all positions, `[tokens, vocab]`, fed in chunks.
pub fn logits(model: &mut impl Model, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let pool = PagePool::new(64);
    let mut table = PageTable::new(&pool);
    let mut all = Vec::new();
    for tokens in tokens.chunks(chunk) {
        let start = table.len();
        table.extend(tokens.len()).unwrap();
        let row = |(index, &token)| Row { token, position: start + index, sequence: 0, wants_logits: true };
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        all.extend(model.forward(&Batch { rows: &rows, tables: &[&table] }).unwrap().values);
    }
    all
}
