//! The tensors of a checkpoint for candle-transformers' constructors: in f32 on the device, under its names.
//!
//! Invariant: a checkpoint with an unused tensor is refused: a bias or norm unknown to candle-transformers
//! would silently be left out of every product.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::{SimpleBackend, VarBuilder, VarBuilderArgs};
use parking_lot::Mutex;

use crate::tensor::{HostTensor, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;

/// Differences between a family's files and the tensors that candle-transformers reads.
#[derive(Debug, Clone, Default)]
pub struct WeightAdaptation {
    /// Prefixes of names and candle-transformers' replacements; the first match counts.
    pub renamed: &'static [(&'static str, &'static str)],
    /// The embedding table's name, if it is also the output matrix.
    pub tied: Option<&'static str>,
    /// Suffix of the names of tensors to multiply, and the factor.
    pub scaled: Option<(&'static str, f64)>,
}

/// The output matrix, under Hugging Face's name.
const OUTPUT: &str = "lm_head.weight";

/// Constants in some checkpoints that no model needs.
const CONSTANTS: [&str; 3] = ["rotary_emb.inv_freq", "attn.masked_bias", "attn.bias"];

impl WeightAdaptation {
    fn name(&self, name: &str) -> String {
        let renamed = self.renamed.iter().find_map(|(from, to)| Some((to, name.strip_prefix(from)?)));
        renamed.map_or_else(|| name.to_owned(), |(to, rest)| format!("{to}{rest}"))
    }

    fn is_spare(&self, name: &str) -> bool {
        CONSTANTS.iter().any(|end| name.ends_with(end)) || (name == OUTPUT && self.tied.is_some())
    }
}

/// All tensors of a checkpoint.
pub struct CandleWeights {
    tensors: HashMap<String, Tensor>,
    read: Mutex<BTreeSet<String>>,
    /// The first tensor that a constructor could not get, and the reason.
    fault: Mutex<Option<(String, String)>>,
}

impl CandleWeights {
    /// Reads all tensors and widens them to f32. `progress` is called with the number of read tensors and their
    /// total.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] for a tensor that is damaged, quantised, or does not fit on the device.
    pub fn load(
        source: &dyn TensorSource,
        adaptation: &WeightAdaptation,
        device: &Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> LoadResult<Self> {
        let names = source.names();
        let mut tensors = HashMap::with_capacity(names.len());
        for (index, name) in names.iter().enumerate() {
            progress(index, names.len());
            let refused = |message: String| LoadError::Tensor { tensor: name.to_string(), message };
            let tensor = source.tensor(name)?.ok_or_else(|| refused("is missing".to_owned()))?;
            let scale = adaptation.scaled.filter(|(end, _)| name.ends_with(end)).map(|(_, scale)| scale);
            let tensor = widened(&tensor, scale, device).map_err(|error| refused(error.to_string()))?;
            tensors.insert(adaptation.name(name), tensor);
        }
        if let Some(table) = adaptation.tied.and_then(|name| tensors.get(name).cloned()) {
            tensors.entry(OUTPUT.to_owned()).or_insert(table);
        }
        progress(names.len(), names.len());
        Ok(Self { tensors, read: Mutex::default(), fault: Mutex::default() })
    }

    /// Returns a builder for constructors, which is used again for each new sequence.
    pub fn builder(self: &Arc<Self>, device: &Device) -> VarBuilder<'static> {
        let backend: Box<dyn SimpleBackend> = Box::new(Shelf(Arc::clone(self)));
        VarBuilderArgs::new_with_args(backend, DType::F32, device)
    }

    /// Converts a constructor's error: names the tensor that it lacked, if any, else repeats its message.
    pub fn fault(&self, error: candle_core::Error) -> LoadError {
        match self.fault.lock().take() {
            Some((tensor, message)) => LoadError::Tensor { tensor, message },
            None => LoadError::Device(format!("candle-transformers: {error}")),
        }
    }

    /// # Errors
    /// [`LoadError::Tensor`] naming a tensor that no constructor has read.
    pub fn check_all_read(&self, adaptation: &WeightAdaptation) -> LoadResult<()> {
        let read = self.read.lock();
        let mut left: Vec<_> = self.tensors.keys().filter(|name| !read.contains(*name)).collect();
        left.sort_unstable();
        match left.into_iter().find(|name| !adaptation.is_spare(name)) {
            Some(name) => Err(LoadError::Tensor {
                tensor: name.clone(),
                message: "candle-transformers does not read it: this is another kind of model".to_owned(),
            }),
            None => Ok(()),
        }
    }

    fn get(&self, name: &str, shape: Option<&Shape>) -> candle_core::Result<Tensor> {
        let found = match (self.tensors.get(name), shape) {
            (None, _) => Err("is missing".to_owned()),
            (Some(tensor), Some(shape)) if tensor.shape() != shape => {
                Err(format!("has the shape {:?} instead of {:?}", tensor.dims(), shape.dims()))
            }
            (Some(tensor), _) => Ok(tensor.clone()),
        };
        match found {
            Ok(tensor) => {
                self.read.lock().insert(name.to_owned());
                Ok(tensor)
            }
            Err(message) => {
                let error = candle_core::Error::msg(format!("tensor {name:?}: {message}"));
                self.fault.lock().get_or_insert_with(|| (name.to_owned(), message));
                Err(error)
            }
        }
    }
}

fn widened(tensor: &HostTensor, scale: Option<f64>, device: &Device) -> candle_core::Result<Tensor> {
    let dtype = match tensor.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        other => candle_core::bail!("{} weights do not run through candle-transformers", other.name()),
    };
    let stored =
        Tensor::from_raw_buffer(&tensor.bytes, dtype, &tensor.shape, device)?.to_dtype(DType::F32)?;
    match scale {
        Some(scale) => stored * scale,
        None => Ok(stored),
    }
}

/// Source of tensors for constructors; all tensors have the same type and device.
struct Shelf(Arc<CandleWeights>);

impl SimpleBackend for Shelf {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        _: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        self.0.get(name, Some(&shape))
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        self.0.get(name, None)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.tensors.contains_key(name)
    }
}
