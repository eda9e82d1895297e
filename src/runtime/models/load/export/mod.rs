//! Writes a model as one GGUF file of another type: from a GGUF file or from a Hugging Face folder.
//!
//! [`Export::plan`] reads headers only and decides every tensor's name, shape and type; [`Export::write`]
//! then converts one piece of a tensor at a time, so that memory does not grow with the model. A file made
//! from a folder must describe the same decoder, which `check` verifies by reading the keys back.

mod check;
mod folder;
mod folder_keys;
mod folder_vocab;
mod head;
mod imatrix;
mod mix;
mod writer;

pub use imatrix::Imatrix;
pub use mix::{MIXES, QuantMix};
pub use writer::WriteEnd;

use folder_keys::ExportFamily;
use head::{GgufHead, GgufValue};
use mix::{MixFacts, MixTensor};

use super::files::ModelFiles;
use super::gguf::Gguf;
use crate::model::arch::parse_config;
use crate::tensor::{TensorSource, byte_len};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_base::{SAMPLING, TopK};
use llmctl_kernel::Dtype;

/// `general.quantization_version`: the block layouts since May 2023.
const QUANTIZATION_VERSION: u32 = 2;

/// Choices for a new file.
#[derive(Debug, Clone)]
pub struct ExportOptions<'a> {
    pub mix: QuantMix,
    pub imatrix: Option<&'a Imatrix>,
    /// `general.name` of a file that is made from a folder.
    pub name: &'a str,
}

/// A file to be written.
pub struct Export<'a> {
    files: &'a ModelFiles,
    imatrix: Option<&'a Imatrix>,
    head: GgufHead,
    tensors: Vec<PlannedTensor>,
    /// Values in a block of the mix's usual type.
    block_len: usize,
}

/// A tensor before its type is chosen.
#[derive(Debug, Clone)]
struct ExportTensor {
    /// Name in the new file.
    name: String,
    /// Row-major, outermost first.
    shape: Vec<usize>,
    /// Type in the source.
    stored: Dtype,
    origin: TensorOrigin,
}

/// A tensor with its type in the new file.
#[derive(Debug, Clone)]
struct PlannedTensor {
    tensor: ExportTensor,
    dtype: Dtype,
}

/// Source of a tensor's values; names are those of the source.
#[derive(Debug, Clone)]
enum TensorOrigin {
    /// A tensor of the file as it is.
    Whole(String),
    /// A norm with a number added to each weight.
    Offset { name: String, offset: f32 },
    /// A projection whose rotary pairs are put side by side.
    Interleaved { name: String, head_dim: usize },
    /// These rows of each matrix of a stack.
    Rows { name: String, start: usize, end: usize },
    /// Matrices to be stacked.
    Stack(Vec<String>),
    /// Numbers that the file does not have.
    Values(Vec<f32>),
}

/// Sizes of the weights before and after.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExportSizes {
    pub num_values: u64,
    pub bytes_before: u64,
    pub bytes_after: u64,
    /// Matrices that are quantised already and get another type, with a second rounding.
    pub num_requantized: usize,
    /// Converted matrices whose rows are not whole blocks of the chosen type, so that they get another, mostly larger one.
    pub num_narrow: usize,
    /// Converted matrices of block types without importance, although a matrix of importance was given.
    pub num_without_importance: usize,
}

impl<'a> Export<'a> {
    /// Plans a file from the headers alone.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a model that cannot be written, naming what can; [`LoadError::Tensor`] for a
    /// tensor without a name in GGUF, or one that needs importance and has none.
    pub fn plan(files: &'a ModelFiles, options: &ExportOptions<'a>) -> LoadResult<Self> {
        let (mut head, tensors) = match files.gguf() {
            Some(gguf) => (copied_head(gguf), gguf_tensors(gguf)?),
            None => folder_plan(files, options.name)?,
        };
        head.set("general.quantization_version", QUANTIZATION_VERSION);
        head.set("general.file_type", options.mix.file_type);
        let facts = facts(files, &tensors, options)?;
        let listed: Vec<MixTensor<'_>> = tensors.iter().map(ExportTensor::listed).collect();
        let types = mix::types(options.mix, &facts, &listed);
        let mut planned = Vec::with_capacity(tensors.len());
        for (tensor, dtype) in tensors.into_iter().zip(types) {
            let error = |message| LoadError::Tensor { tensor: tensor.name.clone(), message };
            let len = byte_len(dtype, &tensor.shape).map_err(error)?;
            head.add_tensor(&tensor.name, &tensor.shape, dtype, len);
            planned.push(PlannedTensor { tensor, dtype });
        }
        let block_len = options.mix.base.block_len();
        let export = Self { files, imatrix: options.imatrix, head, tensors: planned, block_len };
        export.check_importance(options.mix)?;
        Ok(export)
    }

    /// Iterates over the tensors' names with their types, in the order of the file.
    pub fn types(&self) -> impl Iterator<Item = (&str, Dtype)> {
        self.tensors.iter().map(|planned| (planned.tensor.name.as_str(), planned.dtype))
    }

    /// Returns the sizes of the weights.
    pub fn sizes(&self) -> ExportSizes {
        let mut sizes = ExportSizes::default();
        for PlannedTensor { tensor, dtype } in &self.tensors {
            let bytes = |dtype| byte_len(dtype, &tensor.shape).unwrap_or(0) as u64;
            sizes.num_values += tensor.shape.iter().product::<usize>() as u64;
            sizes.bytes_before += bytes(tensor.stored);
            sizes.bytes_after += bytes(*dtype);
            let is_converted = *dtype != tensor.stored && dtype.is_quantized();
            let columns = tensor.shape.last().copied().unwrap_or(1);
            sizes.num_narrow += usize::from(is_converted && !columns.is_multiple_of(self.block_len));
            sizes.num_requantized += usize::from(is_converted && tensor.stored.is_quantized());
            let is_known = self.imatrix.is_none_or(|imatrix| imatrix.has(&tensor.name));
            sizes.num_without_importance += usize::from(is_converted && !is_known);
        }
        sizes
    }

    /// Checks that every tensor of two bits that needs importance has it, and that what is given fits.
    fn check_importance(&self, mix: QuantMix) -> LoadResult<()> {
        for PlannedTensor { tensor, dtype } in &self.tensors {
            let columns = self.imatrix.map(|imatrix| imatrix.columns(&tensor.name, &tensor.shape));
            let has_importance = columns.transpose()?.flatten().is_some();
            if !has_importance && mix::needs_importance(mix, &tensor.name, *dtype) {
                let message = format!(
                    "would be useless as {} in {} without an importance matrix (--imatrix FILE); Q2_K works without one",
                    dtype.name(),
                    mix.name
                );
                return Err(LoadError::Tensor { tensor: tensor.name.clone(), message });
            }
        }
        Ok(())
    }
}

impl ExportTensor {
    fn listed(&self) -> MixTensor<'_> {
        MixTensor { name: &self.name, shape: &self.shape, dtype: self.kept_dtype() }
    }

    /// Returns the type of a tensor that no mix converts. From a folder, vectors and routers become f32, as
    /// llama.cpp's converter writes them.
    fn kept_dtype(&self) -> Dtype {
        let is_copied = matches!(&self.origin, TensorOrigin::Whole(name) if *name == self.name);
        let is_small = self.shape.len() == 1 || self.name.ends_with("ffn_gate_inp.weight");
        if is_small && !is_copied { Dtype::F32 } else { self.stored }
    }
}

/// Keys of a file that describe its layout, not the model.
const LAYOUT_KEYS: [&str; 4] = ["general.alignment", "split.no", "split.count", "split.tensors.count"];

fn copied_head(gguf: &Gguf) -> GgufHead {
    let mut head = GgufHead::default();
    for (key, bytes) in gguf.metadata().encoded() {
        if !LAYOUT_KEYS.contains(&key) {
            head.set(key, GgufValue::encoded(bytes));
        }
    }
    head
}

fn gguf_tensors(gguf: &Gguf) -> LoadResult<Vec<ExportTensor>> {
    let tensor = |name: &str| {
        let Some((shape, stored)) = gguf.describe(name) else {
            // Names the type.
            let error = gguf.tensor(name).err();
            let missing = || LoadError::Tensor { tensor: name.to_owned(), message: "cannot be read".into() };
            return Err(error.unwrap_or_else(missing));
        };
        let origin = TensorOrigin::Whole(name.to_owned());
        Ok(ExportTensor { name: name.to_owned(), shape, stored, origin })
    };
    gguf.names().iter().map(|name| tensor(name)).collect()
}

/// Plans the keys and tensors of a folder.
fn folder_plan(files: &ModelFiles, name: &str) -> LoadResult<(GgufHead, Vec<ExportTensor>)> {
    let reader = files.config_reader();
    let Some(description) = parse_config(reader)? else {
        let message =
            format!("a folder of the family {:?} cannot be written as GGUF", reader.architecture()?);
        return Err(reader.unsupported(message));
    };
    let family = ExportFamily::of(reader, &description.config)?;
    let mut head = GgufHead::default();
    head.set("general.architecture", family.gguf_name);
    head.set("general.type", "model");
    head.set("general.name", name);
    folder_keys::write(&mut head, reader, &description, family)?;
    sampling_keys(&mut head, files)?;
    check::same_decoder(&head, reader, &description)?;
    let folder = files.folder().unwrap_or_else(|| std::path::Path::new(""));
    folder_vocab::write(&mut head, files, folder, description.config.vocab_size)?;
    let tensors = folder::tensors(files.tensors(), &description, family)?;
    Ok((head, tensors))
}

/// Writes the sampling that the publisher recommends, as llama.cpp's converter does.
fn sampling_keys(head: &mut GgufHead, files: &ModelFiles) -> LoadResult<()> {
    let defaults = files.generation()?.defaults;
    for number in SAMPLING {
        if let (Some(key), Some(value)) = (number.facts.gguf_key, number.given(&defaults.numbers)) {
            head.set(key, value);
        }
    }
    if let Some(TopK::Best(top_k)) = defaults.top_k {
        head.set("general.sampling.top_k", u32::try_from(top_k).unwrap_or(u32::MAX));
    }
    Ok(())
}

/// Collects what the mixes ask for, from a GGUF file's keys or a folder's configuration.
fn facts(files: &ModelFiles, tensors: &[ExportTensor], options: &ExportOptions<'_>) -> LoadResult<MixFacts> {
    let reader = files.config_reader();
    let count = |hugging_face, gguf| reader.first_count(reader.pick(hugging_face, gguf));
    let heads = count("num_attention_heads", "attention.head_count")?.unwrap_or(0);
    let kv_heads = count("num_key_value_heads", "attention.head_count_kv")?.unwrap_or(heads);
    let stacks = tensors.iter().filter(|tensor| tensor.name.ends_with("_exps.weight"));
    let architecture = match files.gguf() {
        Some(_) => reader.architecture()?,
        None => match parse_config(reader)? {
            Some(description) => ExportFamily::of(reader, &description.config)?.gguf_name.to_owned(),
            None => reader.architecture()?,
        },
    };
    Ok(MixFacts {
        architecture,
        num_layers: count("num_hidden_layers", "block_count")?.unwrap_or(0),
        num_experts: stacks.map(|tensor| tensor.shape[0]).max().unwrap_or(0),
        heads_per_kv_head: heads.checked_div(kv_heads).unwrap_or(0),
        has_imatrix: options.imatrix.is_some(),
    })
}
