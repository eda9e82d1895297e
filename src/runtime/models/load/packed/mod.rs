//! Quantised safetensors folders as a [`TensorSource`]: each packed matrix appears under its plain name,
//! `X.weight`.
//!
//! Integers become the block type that holds them exactly (see `values`); floats of 8 and 4 bits become f32,
//! so that nothing is rounded here. The tensors of scales and zero points are not listed. Which parts a
//! matrix has is decided by the tensors' names, so that layers that a folder leaves unquantised are read as
//! they are.

mod parts;
mod scheme;
mod values;

use std::borrow::Cow;
use std::path::Path;

use safetensors::Dtype as FileDtype;
use serde_json::Value;

use super::safetensors::{RawTensor, Safetensors};
use crate::tensor::{HostTensor, TensorSource, byte_len};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;
use parts::{MatrixParts, PartsForm};
use scheme::Scheme;

/// A quantised folder's tensors.
pub struct PackedTensors {
    files: Safetensors,
    scheme: Scheme,
}

/// The packed matrices of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedFacts {
    /// Name of the form.
    pub form: &'static str,
    pub count: usize,
    /// Values that no block type holds exactly, so that they are read as f32.
    pub floats: u64,
    /// Bytes of the others in their block types.
    pub bytes: u64,
}

/// Endings of the tensors that belong to a packed matrix, and those that only other programs use.
const PARTS: [&str; 19] = [
    ".qweight",
    ".qzeros",
    ".scales",
    ".biases",
    ".g_idx",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_global_scale",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".activation_scale",
];

impl PackedTensors {
    /// Takes a folder's files, or gives them back if config.json does not call them quantised.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming a form that is not read, and those that are.
    pub fn of(
        config_path: &Path,
        config: &Value,
        files: Safetensors,
    ) -> LoadResult<Result<Self, Safetensors>> {
        let Some(scheme) = Scheme::of(config_path, config)? else { return Ok(Err(files)) };
        if matches!(scheme, Scheme::Mlx { .. })
            && files.names().iter().any(|name| name.contains(".switch_mlp."))
        {
            let message = "MLX stacks the experts of this model, which llmctl does not read; a GGUF file or the \
                           unquantised folder works";
            return Err(LoadError::Unsupported { path: config_path.into(), message: message.to_owned() });
        }
        Ok(Ok(Self { files, scheme }))
    }

    pub fn files(&self) -> &Safetensors {
        &self.files
    }

    /// Sums up the packed matrices, from the headers alone.
    pub fn facts(&self) -> PackedFacts {
        let mut facts = PackedFacts { form: self.scheme.name(), count: 0, floats: 0, bytes: 0 };
        for name in self.names() {
            let Some((shape, dtype)) = self.matrix(&name).and_then(|parts| parts.describe()) else {
                continue;
            };
            let values = shape.iter().product::<usize>() as u64; // `describe` has checked it
            facts.count += 1;
            match dtype {
                Dtype::F32 => facts.floats += values,
                _ => facts.bytes += byte_len(dtype, &shape).unwrap_or(0) as u64,
            }
        }
        facts
    }

    /// Checks every packed matrix, from the headers alone.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming the first that cannot be read.
    pub fn check(&self) -> LoadResult<()> {
        for name in self.names() {
            let checked = self.matrix(&name).map_or(Ok(()), |parts| parts.checked().map(|_| ()));
            checked.map_err(|message| LoadError::Tensor { tensor: name.into_owned(), message })?;
        }
        Ok(())
    }

    /// Finds the parts of the matrix that appears as `name`; `None` for one that is stored plainly.
    fn matrix(&self, name: &str) -> Option<MatrixParts<'_>> {
        self.parts(name.strip_suffix(".weight")?)
    }

    fn part(&self, stem: &str, part: &str) -> Option<RawTensor<'_>> {
        self.files.raw(&format!("{stem}.{part}"))
    }

    fn parts(&self, stem: &str) -> Option<MatrixParts<'_>> {
        let part = |name| self.part(stem, name);
        let is_word = |raw: &RawTensor<'_>| matches!(raw.dtype, FileDtype::I32 | FileDtype::U32);
        match &self.scheme {
            Scheme::Awq { group } => Some(MatrixParts {
                words: part("qweight")?,
                scales: part("scales")?,
                zeros: part("qzeros"),
                form: PartsForm::Awq { group: *group },
            }),
            Scheme::Gptq { bits, zero_offset } => Some(MatrixParts {
                words: part("qweight")?,
                scales: part("scales")?,
                zeros: part("qzeros"),
                form: PartsForm::Gptq { order: part("g_idx"), bits: *bits, zero_offset: *zero_offset },
            }),
            Scheme::Mlx { group, bits } => Some(MatrixParts {
                words: part("weight").filter(is_word)?,
                scales: part("scales")?,
                zeros: None,
                form: PartsForm::Mlx { mins: part("biases")?, group: *group, bits: *bits },
            }),
            Scheme::Fp8 { block, qkv_parts } => {
                let parts = if stem.ends_with(".qkv_proj") { *qkv_parts } else { 1 };
                self.fp8_parts(stem, *block, parts)
            }
            Scheme::Compressed { bits } => self.compressed_parts(stem, *bits),
        }
    }

    fn fp8_parts(&self, stem: &str, block: Option<[usize; 2]>, parts: usize) -> Option<MatrixParts<'_>> {
        let words = self.part(stem, "weight").filter(|raw| raw.dtype == FileDtype::F8_E4M3)?;
        let scales = self.part(stem, "weight_scale_inv").or_else(|| self.part(stem, "weight_scale"))?;
        Some(MatrixParts { words, scales, zeros: None, form: PartsForm::Fp8 { block, parts } })
    }

    fn compressed_parts(&self, stem: &str, bits: u32) -> Option<MatrixParts<'_>> {
        let part = |name| self.part(stem, name);
        if let Some(words) = part("weight_packed") {
            let scales = part("weight_scale")?;
            let (zeros, form) = match part("weight_global_scale") {
                Some(global) => (None, PartsForm::Nvfp4 { global }),
                None => {
                    let (order, shape) = (part("weight_g_idx"), part("weight_shape")?);
                    (part("weight_zero_point"), PartsForm::Packed { order, shape, bits })
                }
            };
            return Some(MatrixParts { words, scales, zeros, form });
        }
        match part("weight").filter(|raw| raw.dtype == FileDtype::I8) {
            Some(words) => {
                let (scales, zeros) = (part("weight_scale")?, part("weight_zero_point"));
                Some(MatrixParts { words, scales, zeros, form: PartsForm::Bytes })
            }
            None => self.fp8_parts(stem, None, 1),
        }
    }
}

impl TensorSource for PackedTensors {
    fn tensor(&self, name: &str) -> LoadResult<Option<HostTensor>> {
        match self.matrix(name) {
            None => self.files.tensor(name),
            Some(parts) => parts
                .read()
                .map(Some)
                .map_err(|message| LoadError::Tensor { tensor: name.to_owned(), message }),
        }
    }

    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        match self.matrix(name) {
            None => self.files.describe(name),
            Some(parts) => parts.describe(),
        }
    }

    fn names(&self) -> Vec<Cow<'_, str>> {
        let mut names = Vec::new();
        for name in self.files.names() {
            let is_matrix = [".qweight", ".weight_packed"].iter().find_map(|end| name.strip_suffix(end));
            match is_matrix {
                Some(stem) => names.push(Cow::Owned(format!("{stem}.weight"))),
                None if PARTS.iter().any(|part| name.ends_with(part)) => {}
                None => names.push(name),
            }
        }
        names
    }
}
