//! The tensors of a checkpoint as candle-transformers' constructors look for them: in f32 on the device, under its names.
//!
//! Invariant: a checkpoint of which something is not read is refused: a bias or norm that candle-transformers does not know of
//! would be left out of every product without a word.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::{SimpleBackend, VarBuilder, VarBuilderArgs};

use crate::runtime::error::LoadError;
use crate::runtime::kernel::Dtype;
use crate::runtime::tensor::{HostTensor, TensorSource};

/// In what a family's files differ from what candle-transformers reads.
#[derive(Debug, Clone, Default)]
pub struct WeightAdaptation {
    /// Beginnings of names, and what candle-transformers says instead; the first that fits counts.
    pub renamed: &'static [(&'static str, &'static str)],
    /// The embedding table's name, where it serves as output matrix too.
    pub tied: Option<&'static str>,
    /// Tensors whose names end so are multiplied.
    pub scaled: Option<(&'static str, f64)>,
}

/// The output matrix, under Hugging Face's name.
const OUTPUT: &str = "lm_head.weight";

/// Constants that some checkpoints carry along and no model needs.
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
    /// The first tensor that could not be had, and why.
    fault: Mutex<Option<(String, String)>>,
}

/// Nothing is left half-done under these locks.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CandleWeights {
    /// Reads and widens all of them. `progress` is told how many are done, of how many.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] for a tensor that is damaged, quantised, or has no room on the device.
    pub fn load(
        source: &dyn TensorSource,
        adaptation: &WeightAdaptation,
        device: &Device,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
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

    /// Hands them to a constructor, which may ask again for each new sequence.
    pub fn builder(self: &Arc<Self>, device: &Device) -> VarBuilder<'static> {
        let backend: Box<dyn SimpleBackend> = Box::new(Shelf(Arc::clone(self)));
        VarBuilderArgs::new_with_args(backend, DType::F32, device)
    }

    /// Why a constructor failed: for want of a tensor, or else for what it says itself.
    pub fn fault(&self, error: candle_core::Error) -> LoadError {
        match locked(&self.fault).take() {
            Some((tensor, message)) => LoadError::Tensor { tensor, message },
            None => LoadError::Device(format!("candle-transformers: {error}")),
        }
    }

    /// # Errors
    /// [`LoadError::Tensor`] naming one that no constructor has asked for.
    pub fn check_all_read(&self, adaptation: &WeightAdaptation) -> Result<(), LoadError> {
        let read = locked(&self.read);
        let mut left: Vec<_> = self.tensors.keys().filter(|name| !read.contains(*name)).collect();
        left.sort_unstable();
        match left.into_iter().find(|name| !adaptation.is_spare(name)) {
            Some(name) => Err(LoadError::Tensor {
                tensor: name.clone(),
                message: "candle-transformers' model has no use for it: this is another kind of model"
                    .to_owned(),
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
                locked(&self.read).insert(name.to_owned());
                Ok(tensor)
            }
            Err(message) => {
                let error = candle_core::Error::msg(format!("tensor {name:?}: {message}"));
                locked(&self.fault).get_or_insert_with(|| (name.to_owned(), message));
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

/// What constructors take tensors from. Type and device are those that all of them have.
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
