//! The parity fixtures: one small checkpoint per family, three prompts each, and the logits that transformers computed for
//! them in float32. `medium` and `long` are longer than every window.

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};

/// A folder of fixtures/parity.
pub struct Golden {
    pub name: String,
    pub folder: PathBuf,
    pub prompts: Vec<Prompt>,
}

pub struct Prompt {
    pub name: &'static str,
    pub tokens: Vec<u32>,
    /// Positions whose logits are stored, ascending; the last is the prompt's last.
    pub positions: Vec<usize>,
    /// `[positions, vocab]`.
    logits: Vec<f32>,
}

impl Prompt {
    /// The stored logits of the position with this index into `positions`.
    pub fn logits(&self, index: usize) -> &[f32] {
        let vocab = self.logits.len() / self.positions.len();
        &self.logits[index * vocab..(index + 1) * vocab]
    }

    /// How far logits of all positions, `[tokens, vocab]`, are from the stored ones.
    pub fn deviation(&self, logits: &[f32]) -> f32 {
        let vocab = logits.len() / self.tokens.len();
        let each = self.positions.iter().enumerate();
        each.map(|(index, at)| deviation(&logits[at * vocab..(at + 1) * vocab], self.logits(index)))
            .fold(0.0, f32::max)
    }
}

/// Largest absolute difference; infinite when the lengths differ or anything is not a number.
pub fn deviation(left: &[f32], right: &[f32]) -> f32 {
    if left.len() != right.len() {
        return f32::INFINITY;
    }
    let each = left.iter().zip(right).map(|(left, right)| (left - right).abs());
    each.fold(0.0, |worst, one| if one.is_nan() { f32::INFINITY } else { one.max(worst) })
}

/// All folders, by name; `None` without fixtures.
pub fn goldens() -> Option<Vec<Golden>> {
    let root = super::fixtures()?.join("parity");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    Some(folders.into_iter().map(golden).collect())
}

fn golden(folder: PathBuf) -> Golden {
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let prompt = |name| Prompt {
        name,
        tokens: integers(&file, &format!("{name}.tokens")).map(|id| u32::try_from(id).unwrap()).collect(),
        positions: integers(&file, &format!("{name}.positions")).collect(),
        logits: floats(&file, &format!("{name}.logits")),
    };
    let prompts = ["short", "medium", "long"].map(prompt).into();
    Golden { name: folder.file_name().unwrap().to_string_lossy().into_owned(), folder, prompts }
}

fn integers(file: &SafeTensors, name: &str) -> impl Iterator<Item = usize> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::I64, "{name}");
    let values = tensor.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    values.map(|value| usize::try_from(value).unwrap()).collect::<Vec<_>>().into_iter()
}

fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
    tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
