//! LoRA adapters as the engine, the KV pages and the decoder see them: plain data, without weights.

use std::fmt;

use llmctl_image::ImageHash;
use serde::{Deserialize, Serialize};

use super::images::hex;

/// Identifies the weights of an adapter: SHA-256 of its matrices, their names and factors.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AdapterKey(#[serde(with = "hex")] pub [u8; 32]);

impl fmt::Debug for AdapterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&ImageHash(self.0), f)
    }
}

/// An adapter of a sequence, and the factor of what it adds. A list of these is in the order of the keys, without repetition.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterUse {
    pub key: AdapterKey,
    /// Finite and not 0.
    pub scale: f32,
}

impl Eq for AdapterUse {}

impl AdapterUse {
    /// Returns the uses in the order of their keys. Scales of one adapter are added, and an adapter of scale 0 is left out.
    ///
    /// # Errors
    /// A scale that is not finite.
    pub fn list(uses: impl IntoIterator<Item = AdapterUse>) -> Result<Vec<AdapterUse>, f32> {
        let mut list: Vec<AdapterUse> = Vec::new();
        for AdapterUse { key, scale } in uses {
            match list.iter_mut().find(|known| known.key == key) {
                Some(known) => known.scale += scale,
                None => list.push(AdapterUse { key, scale }),
            }
        }
        if let Some(bad) = list.iter().find(|known| !known.scale.is_finite()) {
            return Err(bad.scale);
        }
        list.retain(|known| known.scale != 0.0);
        list.sort_by_key(|known| known.key);
        Ok(list)
    }

    /// Returns what stands for a list in the content that names pages: nine words for each, the key and the scale.
    pub fn words(list: &[AdapterUse]) -> impl Iterator<Item = u32> + '_ {
        list.iter().flat_map(|AdapterUse { key, scale }| {
            let (words, _) = key.0.as_chunks();
            words.iter().map(|bytes| u32::from_le_bytes(*bytes)).chain([scale.to_bits()])
        })
    }
}

/// A loaded adapter, as the engine and the frontends see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdapterSpec {
    /// Name of its file or folder, without ending; unique in a model.
    pub name: String,
    pub key: AdapterKey,
    /// Factor for requests that name no adapters; 0 leaves it out.
    pub scale: f32,
}

/// Returns the uses of requests that name no adapters.
pub fn by_default(specs: &[AdapterSpec]) -> Vec<AdapterUse> {
    let uses = specs.iter().map(|spec| AdapterUse { key: spec.key, scale: spec.scale });
    AdapterUse::list(uses).unwrap_or_default() // scales were checked when the adapters were loaded
}
