//! Phi-3 as GGUF, which no fixture has: q, k, v in one matrix, gate and up in another, LongRoPE's divisors as tensors.
//! The file is written here from the checkpoint, under the names that llama.cpp's converter gives.

use crate::common::convert::{Tensor, Written, assert_same_bits, checkpoint, facts, renamed, worst, write};
use crate::common::prelude::*;

/// Where a context begins to be long.
const ORIGINAL: u32 = 512;

fn gguf(folder: &Path, original_context: u32, factors: &[(&str, &[f32])]) -> Written {
    let others = [("rope.scaling.original_context_length", original_context)];
    let factor =
        |(name, values): &(&str, &[f32])| ((*name).to_owned(), (vec![values.len()], values.to_vec()));
    let factors = factors.iter().map(factor);
    let tensors: Vec<(String, Tensor)> =
        renamed(checkpoint(folder), &[], |_, _| None).into_iter().chain(factors).collect();
    write(facts("phi3", &others), &tensors)
}

#[test]
fn fused_matrices_are_taken_apart() {
    let folder = parity_folder().join("phi3");
    let file = gguf(&folder, 4096, &[]);
    assert_same_bits(&folder, &file);
    assert!(worst(&folder, &file) < 1e-4);
}

#[test]
fn long_rope_is_the_same_from_tensors_and_from_config() {
    let (short, long) = ([1.0f32, 1.1, 1.5, 2.0], [1.0f32, 2.0, 8.0, 32.0]);
    let folder = parity_folder().join("phi3");
    let place = tempfile::tempdir().expect("tempdir");
    for entry in std::fs::read_dir(&folder).expect("folder") {
        let entry = entry.expect("entry");
        std::fs::copy(entry.path(), place.path().join(entry.file_name())).expect("copy");
    }
    let path = place.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    config["original_max_position_embeddings"] = json!(ORIGINAL);
    config["rope_scaling"] = json!({"type": "longrope", "short_factor": short, "long_factor": long});
    std::fs::write(path, config.to_string()).expect("write");
    let factors: [(&str, &[f32]); 2] =
        [("rope_factors_short.weight", &short), ("rope_factors_long.weight", &long)];
    let file = gguf(&folder, ORIGINAL, &factors);
    assert_same_bits(place.path(), &file);
    assert!(worst(&folder, &file) > 1e-4, "other logits than without");
}
