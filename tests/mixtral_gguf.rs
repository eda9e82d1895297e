//! Mixtral as GGUF files of before April 2024, in which each expert has tensors of its own: no fixture has one. The file is
//! written here from the checkpoint as llama.cpp's converter wrote it then.

use crate::common::convert::{Tensor, checkpoint, facts, pair_heads, renamed, worst, write};
use crate::common::prelude::*;

fn expert(part: &str, tensor: &Tensor) -> Option<Vec<(String, Tensor)>> {
    let (index, part) = part.strip_prefix("block_sparse_moe.experts.")?.split_once('.')?;
    let part = match part {
        "w1.weight" => "gate",
        "w2.weight" => "down",
        "w3.weight" => "up",
        other => panic!("{other}"),
    };
    Some(vec![(format!("ffn_{part}.{index}.weight"), tensor.clone())])
}

#[test]
fn experts_with_tensors_of_their_own_give_the_reference_logits() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("mixtral");
    let mut tensors = checkpoint(&folder);
    pair_heads(&mut tensors, 8);
    let tensors = renamed(tensors, &[], expert);
    assert!(tensors.iter().any(|(name, _)| name == "blk.3.ffn_down.2.weight"));
    let worst = worst(&folder, write(facts("mixtral", &[]), &tensors));
    assert!(worst < 1e-4, "{worst}");
}
