//! Adapters of low rank (LoRA, Hu et al. 2021): beside a product `x . weight^T`, a row gets `scale * factor * (x . down^T) . up^T`.
//!
//! The weights stay as they are, so a row without an adapter has the bits that it has without any adapter loaded.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};

use crate::adapters::{AdapterKey, AdapterSpec};
use crate::tensor::HostTensor;
use llmctl_base::error::{LoadError, LoadResult};

/// The change of one matrix `[out, in]` by an adapter.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// Index of the adapter.
    pub adapter: usize,
    pub matrices: LowRankMatrices,
}

/// The matrices of a product of low rank, `down` `[rank, in]` and `up` `[out, rank]`; those of all experts have a dimension more
/// in front.
#[derive(Debug, Clone)]
pub struct LowRankMatrices {
    pub down: HostTensor,
    pub up: HostTensor,
    /// Factor of the product: the adapter's alpha divided by the rank, or by its square root.
    pub factor: f32,
}

impl LowRankMatrices {
    /// Returns those of one expert.
    fn of_expert(&self, expert: usize) -> Self {
        Self { down: self.down.slice_outer(expert), up: self.up.slice_outer(expert), factor: self.factor }
    }
}

/// An adapter's matrices by the names of the model's tensors that they belong to.
#[derive(Debug)]
pub struct Adapter {
    pub spec: AdapterSpec,
    matrices: BTreeMap<String, LowRankMatrices>,
    taken: RefCell<BTreeSet<String>>,
}

impl Adapter {
    /// Makes an adapter. Names are those of [`super::weights::WeightFile`]'s tensors without `.weight`; of Hugging Face's, only
    /// the part from `layers.` on counts.
    pub fn new(name: String, scale: f32, matrices: BTreeMap<String, LowRankMatrices>) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"llmctl adapter 1");
        for (name, LowRankMatrices { down, up, factor }) in &matrices {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(factor.to_bits().to_le_bytes());
            for HostTensor { dtype, shape, bytes } in [down, up] {
                hash.update(format!("{} {shape:?}", dtype.name()));
                hash.update(bytes);
            }
        }
        let key = AdapterKey(hash.finalize().into());
        let matrices = matrices.into_iter().map(|(name, pair)| (place(&name).to_owned(), pair)).collect();
        let taken = RefCell::default();
        Self { spec: AdapterSpec { name, key, scale }, matrices, taken }
    }

    /// Returns what the adapter adds to a matrix, given the matrix's name without `.weight` and its shape: `[out, in]`, or
    /// `[experts, out, in]` for the one of `expert`.
    fn of(&self, name: &str, shape: &[usize], expert: Option<usize>) -> LoadResult<Option<LowRankMatrices>> {
        let Some(found) = self.matrices.get(place(name)) else { return Ok(None) };
        let (outer, [out, input]) = shape.split_last_chunk().expect("a matrix");
        let rank = found.up.shape.last().copied().unwrap_or(0);
        let fits = |tensor: &HostTensor, last: [usize; 2]| tensor.shape == [outer, &last].concat();
        if !fits(&found.down, [rank, *input]) || !fits(&found.up, [*out, rank]) {
            let (down, up) = (&found.down.shape, &found.up.shape);
            let message = format!(
                "adapter {}: matrices of {down:?} and {up:?} do not fit a tensor of {shape:?}",
                self.spec.name
            );
            return Err(LoadError::Tensor { tensor: name.to_owned(), message });
        }
        self.taken.borrow_mut().insert(place(name).to_owned());
        Ok(Some(expert.map_or_else(|| found.clone(), |expert| found.of_expert(expert))))
    }

    /// Checks that every matrix of the adapter was taken.
    ///
    /// # Errors
    /// [`LoadError::Tensor`] naming one that belongs to nothing that llmctl adapts.
    pub fn check_taken(&self) -> LoadResult<()> {
        let taken = self.taken.borrow();
        match self.matrices.keys().find(|name| !taken.contains(*name)) {
            None => Ok(()),
            Some(name) => Err(not_adapted(name, &self.spec.name)),
        }
    }
}

/// Returns what the adapters add to a matrix; see [`Adapter::of`].
pub fn find(
    adapters: &[Adapter],
    name: &str,
    shape: &[usize],
    expert: Option<usize>,
) -> LoadResult<Vec<LowRank>> {
    let mut found = Vec::new();
    for (index, adapter) in adapters.iter().enumerate() {
        found.extend(adapter.of(name, shape, expert)?.map(|matrices| LowRank { adapter: index, matrices }));
    }
    Ok(found)
}

/// Returns the error for an adapter's matrix that cannot be used.
pub fn not_adapted(tensor: &str, adapter: &str) -> LoadError {
    let message = format!(
        "adapter {adapter} changes it, and llmctl adapts the projections of attention and the matrices of feed-forward parts only"
    );
    LoadError::Tensor { tensor: tensor.to_owned(), message }
}

/// Returns the part of a name that does not depend on what a decoder is part of.
fn place(name: &str) -> &str {
    name.find("layers.").map_or(name, |start| &name[start..])
}
