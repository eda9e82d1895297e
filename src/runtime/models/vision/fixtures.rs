//! The checkpoints of `vision` in the shared fixtures, and what their references computed; for tests.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::Value;

/// The folder of the checkpoints; `None` (with a note) without shared fixtures.
pub fn folder() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/fixtures");
    let folder = std::env::var_os("LLMCTL_FIXTURES").map_or_else(beside, PathBuf::from).join("vision");
    if !folder.is_dir() {
        eprintln!("skipped: no fixtures at {}", folder.display());
    }
    folder.is_dir().then_some(folder)
}

/// Returns the prompts of a checkpoint's golden.json by name.
pub fn prompts(folder: &Path) -> serde_json::Map<String, Value> {
    let mut golden: Value = serde_json::from_slice(&fs::read(folder.join("golden.json")).unwrap()).unwrap();
    serde_json::from_value(golden["prompts"].take()).unwrap()
}

/// The numbers of golden.safetensors, by name; none where there is no such tensor.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn read(folder: &Path) -> Self {
        Self(fs::read(folder.join("golden.safetensors")).unwrap())
    }

    fn parts<const N: usize>(&self, name: &str) -> Vec<[u8; N]> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.tensor(name).map_or(Vec::new(), |tensor| tensor.data().as_chunks().0.to_vec())
    }

    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(SafeTensors::deserialize(&self.0).unwrap().tensor(name).ok()?.shape().to_vec())
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.parts(name).into_iter().map(f32::from_le_bytes).collect()
    }

    pub fn integers(&self, name: &str) -> Vec<u32> {
        self.parts(name).into_iter().map(|bytes| i64::from_le_bytes(bytes) as u32).collect()
    }
}

/// The largest difference between values of which there are equally many; more than any number if one is none.
pub fn largest_difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let larger =
        |most: f32, difference: f32| if difference.is_nan() { f32::INFINITY } else { most.max(difference) };
    got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, larger)
}
