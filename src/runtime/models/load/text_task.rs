//! The task of a model for texts, as its files say it: vectors, or scores of pairs.
//!
//! Folders say it by sentence-transformers' modules.json, GGUF by `pooling_type` (llama.cpp's numbers: 0
//! none, 1 mean, 2 first token, 3 last token, 4 score). An encoder whose files do not say it is pooled by the
//! mean.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::files::ModelFiles;
use super::hf::{optional_json, require_json};
use super::safetensors::Safetensors;
use crate::model::arch::Description;
use crate::model::text_head::{Dense, DenseActivation, EmbeddingHead, Pooling, ScoreHead};
use crate::model::weights::{WeightFile, missing, to_f32};
use crate::tensor::TensorSource;
use llmctl_base::error::{LoadError, LoadResult};

/// Way from the hidden states of a text to its result.
#[derive(Debug, Clone, PartialEq)]
pub enum TextTask {
    Embedding(EmbeddingHead),
    Scores(ScoreHead),
}

/// Task that the user asks for instead of the files' task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedTask {
    /// Vectors, pooled as the files say.
    Embed,
    /// Vectors with this pooling.
    Pooling(Pooling),
    /// Scores of pairs.
    Rerank,
}

/// A task, and what belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct TextTaskFacts {
    pub task: TextTask,
    /// True if the files leave the pooling open.
    pub is_assumed: bool,
    /// Tokens per text that the model was trained with.
    pub max_tokens: Option<usize>,
    pub prompts: Prompts,
}

/// Texts that are put before others, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompts {
    pub by_name: BTreeMap<String, String>,
    /// Name of the one that is used if none is named.
    pub default: Option<String>,
}

/// Reads a folder's modules.json and the files that it names; `None` without one.
///
/// # Errors
/// [`LoadError::Malformed`] naming the file and key; [`LoadError::Unsupported`] for a module that llmctl does not compute.
pub fn folder_task(folder: &Path) -> LoadResult<Option<TextTaskFacts>> {
    let path = folder.join("modules.json");
    let Some(modules) = optional_json(&path)? else { return Ok(None) };
    let modules = modules.as_array().ok_or_else(|| LoadError::malformed(&path, "JSON", "is not a list"))?;
    let mut head = EmbeddingHead { pooling: Pooling::Mean, dense: Vec::new(), is_normalized: false };
    let mut max_tokens = None;
    for module in modules {
        let text = |key: &str| module[key].as_str().unwrap_or_default();
        let place = folder.join(inner_path(&path, text("path"))?);
        match text("type").rsplit('.').next().unwrap_or_default() {
            "Transformer" => {
                max_tokens = max_seq_length(&place.join("sentence_bert_config.json"))?;
            }
            "Pooling" => head.pooling = pooling(&place.join("config.json"))?,
            "Dense" => head.dense.push(dense(&place)?),
            "Normalize" => head.is_normalized = true,
            other => {
                let message = format!("module {other:?} of sentence-transformers is not supported");
                return Err(LoadError::Unsupported { path, message });
            }
        }
    }
    let task = TextTask::Embedding(head);
    Ok(Some(TextTaskFacts { task, is_assumed: false, max_tokens, prompts: folder_prompts(folder)? }))
}

/// Reads the limit of tokens per text; `None` if the file is missing or names none.
fn max_seq_length(path: &Path) -> LoadResult<Option<usize>> {
    let settings = optional_json(path)?.unwrap_or_default();
    match settings["max_seq_length"].as_u64() {
        Some(0) => Err(LoadError::malformed(path, "key \"max_seq_length\"", "is 0")),
        max => Ok(max.map(|max| usize::try_from(max).unwrap_or(usize::MAX))),
    }
}

/// Returns a path within a folder; one that leaves it is refused.
fn inner_path<'a>(file: &Path, path: &'a str) -> LoadResult<&'a Path> {
    let inner = Path::new(path);
    match inner.components().all(|part| matches!(part, std::path::Component::Normal(_))) {
        true => Ok(inner),
        false => Err(LoadError::malformed(file, "key \"path\"", format!("{path:?} leaves the folder"))),
    }
}

/// Reads the prompts of config_sentence_transformers.json. Empty prompts are dropped.
fn folder_prompts(folder: &Path) -> LoadResult<Prompts> {
    let settings = optional_json(&folder.join("config_sentence_transformers.json"))?.unwrap_or_default();
    let entry = |(name, text): (&String, &Value)| Some((name.clone(), text.as_str()?.to_owned()));
    let by_name = settings["prompts"].as_object().into_iter().flatten().filter_map(entry).collect();
    Ok(Prompts { by_name, default: settings["default_prompt_name"].as_str().map(str::to_owned) })
}

/// Reads the choice of one pooling: flags in old files, a name in new ones.
fn pooling(path: &Path) -> LoadResult<Pooling> {
    let settings = require_json(path)?;
    let unsupported = |what: String| LoadError::Unsupported { path: path.to_owned(), message: what };
    if settings["include_prompt"] == Value::Bool(false) {
        return Err(unsupported("pooling without the prompt's tokens is not supported".to_owned()));
    }
    let by_flag = |(key, value): (&String, &Value)| {
        (*value == Value::Bool(true)).then(|| key.strip_prefix("pooling_mode_").map(str::to_owned)).flatten()
    };
    let names: Vec<String> = match settings["pooling_mode"].as_str() {
        Some(name) => vec![name.to_owned()],
        None => settings.as_object().into_iter().flatten().filter_map(by_flag).collect(),
    };
    match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        ["lasttoken"] => Ok(Pooling::Last),
        ["max" | "max_tokens"] => Ok(Pooling::Max),
        ref others => Err(unsupported(format!("pooling by {} is not supported", others.join(" and ")))),
    }
}

fn dense(folder: &Path) -> LoadResult<Dense> {
    let path = folder.join("config.json");
    let settings = require_json(&path)?;
    let size = |key: &str| {
        let size = settings[key].as_u64().filter(|size| (1..1 << 20).contains(size));
        size.map(|size| size as usize).ok_or_else(|| LoadError::malformed(&path, key, "is not a width"))
    };
    let (inputs, outputs) = (size("in_features")?, size("out_features")?);
    let name = settings["activation_function"].as_str().unwrap_or_default();
    let activation = match name.rsplit('.').next().unwrap_or_default() {
        "Identity" => DenseActivation::Identity,
        "Tanh" | "" => DenseActivation::Tanh, // sentence-transformers' default
        "GELU" => DenseActivation::Gelu,
        _ => {
            let message = format!("activation {name:?} is not supported");
            return Err(LoadError::Unsupported { path, message });
        }
    };
    let tensors = Safetensors::open(folder)?;
    dense_of(&tensors, ["linear.weight", "linear.bias"], [outputs, inputs], activation)
}

/// Reads a small layer whose bias may be missing.
fn dense_of(
    source: &dyn TensorSource,
    [weight, bias]: [&str; 2],
    [outputs, inputs]: [usize; 2],
    activation: DenseActivation,
) -> LoadResult<Dense> {
    let read = |name: &str, len: usize| -> LoadResult<Option<Vec<f32>>> {
        let Some(tensor) = source.tensor(name)? else { return Ok(None) };
        let values = to_f32(&tensor);
        let message = format!("has {} values, not {len}", values.len());
        let wrong = LoadError::Tensor { tensor: name.to_owned(), message };
        if values.len() == len { Ok(Some(values)) } else { Err(wrong) }
    };
    let bias = read(bias, outputs)?.unwrap_or_default();
    let weight = read(weight, outputs * inputs)?.ok_or_else(|| missing(weight))?;
    Ok(Dense { weight, bias, inputs, activation })
}

/// Reads GGUF's `pooling_type`; `None` if the file has none or leaves it open. `hidden` is the width of hidden states.
///
/// # Errors
/// [`LoadError::Unsupported`] for a kind that llmctl does not compute, [`LoadError::Tensor`] for a layer that is missing.
pub fn gguf_task(files: &ModelFiles, hidden: usize) -> LoadResult<Option<TextTaskFacts>> {
    let reader = files.config_reader();
    let pooling = match reader.count("pooling_type")? {
        None | Some(0) => return Ok(None),
        Some(1) => Pooling::Mean,
        Some(2) => Pooling::Cls,
        Some(3) => Pooling::Last,
        Some(4) => {
            let task = TextTask::Scores(gguf_scores(files.tensors(), hidden)?);
            return Ok(Some(plain_facts(task)));
        }
        Some(other) => return Err(reader.unsupported(format!("pooling_type {other}"))),
    };
    let mut dense = Vec::new();
    for name in ["dense_2.weight", "dense_3.weight"] {
        if let Some((shape, _)) = files.tensors().describe(name) {
            let [outputs, inputs] = shape[..] else { return Err(reader.error(name, "is no matrix")) };
            dense.push(dense_of(files.tensors(), [name, ""], [outputs, inputs], DenseActivation::Identity)?);
        }
    }
    let head = EmbeddingHead { pooling, dense, is_normalized: true };
    Ok(Some(plain_facts(TextTask::Embedding(head))))
}

fn plain_facts(task: TextTask) -> TextTaskFacts {
    TextTaskFacts { task, is_assumed: false, max_tokens: None, prompts: Prompts::default() }
}

/// Returns the task of an encoder whose files do not say it.
pub fn assumed_task() -> TextTaskFacts {
    let head = EmbeddingHead { pooling: Pooling::Mean, dense: Vec::new(), is_normalized: true };
    TextTaskFacts { is_assumed: true, ..plain_facts(TextTask::Embedding(head)) }
}

fn gguf_scores(source: &dyn TensorSource, hidden: usize) -> LoadResult<ScoreHead> {
    let outputs = source.describe("cls.output.weight").and_then(|(shape, _)| shape.first().copied());
    let outputs = outputs.filter(|outputs| *outputs == 2).unwrap_or(1);
    let mut dense = Vec::new();
    if source.describe("cls.weight").is_some() {
        let names = ["cls.weight", "cls.bias"];
        dense.push(dense_of(source, names, [hidden, hidden], DenseActivation::Tanh)?);
    }
    let names = ["cls.output.weight", "cls.output.bias"];
    dense.push(dense_of(source, names, [outputs, hidden], DenseActivation::Identity)?);
    // Two outputs are those of a decoder, whose last token answers.
    let pooling = if outputs == 2 { Pooling::Last } else { Pooling::Cls };
    Ok(ScoreHead { pooling, dense })
}

/// Reads the classification head of a folder's encoder with `prefix`; `None` if it is no classifier.
///
/// # Errors
/// [`LoadError::Unsupported`] for several classes or a head of another form.
pub fn folder_scores(files: &ModelFiles, prefix: &str, hidden: usize) -> LoadResult<Option<TextTaskFacts>> {
    let reader = files.config_reader();
    let architectures = reader.value("architectures").unwrap_or_default();
    let name = architectures[0].as_str().unwrap_or_default();
    if !name.ends_with("ForSequenceClassification") {
        return Ok(None);
    }
    let labels = reader.value("id2label").and_then(|labels| Some(labels.as_object()?.len()));
    let labels = labels.or(reader.count("num_labels")?).unwrap_or(2);
    if labels != 1 {
        return Err(reader.unsupported(format!("{name} with {labels} classes: only scores of pairs")));
    }
    let (source, square, last) = (files.tensors(), [hidden, hidden], [1, hidden]);
    let pooler = [format!("{prefix}pooler.dense.weight"), format!("{prefix}pooler.dense.bias")];
    let read = |names: [&str; 2], shape, activation| dense_of(source, names, shape, activation);
    let (tanh, identity) = (DenseActivation::Tanh, DenseActivation::Identity);
    let dense = if source.describe("classifier.out_proj.weight").is_some() {
        let first = read(["classifier.dense.weight", "classifier.dense.bias"], square, tanh)?;
        vec![first, read(["classifier.out_proj.weight", "classifier.out_proj.bias"], last, identity)?]
    } else if source.describe(&pooler[0]).is_some() {
        let first = read([&pooler[0], &pooler[1]], square, tanh)?;
        vec![first, read(["classifier.weight", "classifier.bias"], last, identity)?]
    } else {
        return Err(reader.unsupported(format!("{name}: the form of its classification head")));
    };
    Ok(Some(plain_facts(TextTask::Scores(ScoreHead { pooling: Pooling::Cls, dense }))))
}

/// Makes a head of the rows of the output matrix for two tokens, which a decoder answers with.
///
/// # Errors
/// [`LoadError::Tensor`] if the file has no such matrix, [`LoadError::Tokenizer`] if it has no row for a token.
pub fn yes_no_task(
    source: &dyn TensorSource,
    Description { config, naming, .. }: &Description,
    ids: [u32; 2],
) -> LoadResult<TextTaskFacts> {
    let file = WeightFile::new(source, naming)?;
    let (rows, inputs) = (config.vocab_size, config.hidden_size);
    let table = match file.head(rows, inputs)? {
        Some(head) => head,
        None => file.embedding(rows, inputs)?,
    };
    let row = |id: u32| match (id as usize) < rows {
        true => Ok(to_f32(&table.weight.slice_rows(id as usize, id as usize + 1))),
        false => Err(LoadError::Tokenizer(format!("token {id} has no row in the output matrix"))),
    };
    let weight = [row(ids[0])?, row(ids[1])?].concat();
    let dense = Dense { weight, bias: Vec::new(), inputs, activation: DenseActivation::Identity };
    Ok(plain_facts(TextTask::Scores(ScoreHead { pooling: Pooling::Last, dense: vec![dense] })))
}
