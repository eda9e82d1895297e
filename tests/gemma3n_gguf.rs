//! Gemma 3n as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter writes it: its
//! names, the projections of the residual streams in one tensor, cut-offs instead of parts of the gates.

use crate::common::convert::{POST_NORM, Tensor, assert_refused, checkpoint, facts, renamed, worst, write};
use crate::common::prelude::*;

const STREAMS: usize = 4;

fn facts_with(others: &[(&str, u32)]) -> GgufBuilder {
    // The quantile of 0.95, and of 0 for layers that keep all gates.
    let cutoffs = [[1.644_853_6; 4].as_slice(), &[f32::NEG_INFINITY; 6]].concat();
    facts("gemma3n", others).f32s("gemma3n.activation_sparsity_scale", &cutoffs)
}

fn tensors(folder: &Path) -> Vec<(String, Tensor)> {
    let mut tensors = checkpoint(folder);
    let mut found = Vec::new();
    for (name, gguf) in
        [("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")]
    {
        let each = (0..STREAMS - 1).map(|index| tensors.remove(&format!("{name}.{index}.weight")));
        let values = each.flat_map(|tensor| tensor.expect("a projection").1).collect();
        found.push((format!("{gguf}.weight"), (vec![STREAMS - 1, 32, 32], values)));
    }
    found.extend(renamed(tensors, &POST_NORM, |_, _| None));
    found
}

#[test]
fn a_converted_file_gives_the_logits_of_the_reference() {
    let Some(folder) = next_folder().map(|folder| folder.join("gemma3n")) else { return };
    let difference = worst(&folder, write(facts_with(&[]), &tensors(&folder)));
    assert!(difference < 1e-4, "logits differ by {difference}");
}

#[test]
fn facts_that_cannot_be_are_refused_by_name() {
    let Some(folder) = next_folder().map(|folder| folder.join("gemma3n")) else { return };
    for (key, value) in [
        ("altup.num_inputs", 1),
        ("altup.num_inputs", 1000),
        ("altup.active_idx", 4),
        ("attention.shared_kv_layers", 10),
    ] {
        assert_refused(facts_with(&[(key, value)]), &tensors(&folder), key);
    }
}
