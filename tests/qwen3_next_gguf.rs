//! Qwen 3 Next as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter writes it:
//! its names, the fused projections of the delta nets split (and, in older files, left fused), norms with their 1.

use crate::common::convert::{
    POST_NORM, Tensor, Written, add_ones, checkpoint, facts, renamed, stack_experts, worst, write,
};
use crate::common::prelude::*;

const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
/// Values of a head, of keys and of values alike.
const HEAD: usize = 16;
const EXPERTS: usize = 8;

/// Splits the fused projection, in which each key head has its rows together, into queries, keys and values, and gates.
fn split((shape, values): &Tensor) -> [Tensor; 2] {
    let cols = shape[1];
    let of_values = VALUE_HEADS / KEY_HEADS * HEAD;
    let per_head = (2 * HEAD + 2 * of_values) * cols;
    let part = |start: usize, rows: usize| {
        let heads = values.chunks(per_head);
        heads.flat_map(|head| head[start * cols..(start + rows) * cols].to_vec()).collect::<Vec<f32>>()
    };
    let qkv = [part(0, HEAD), part(HEAD, HEAD), part(2 * HEAD, of_values)].concat();
    [qkv, part(2 * HEAD + of_values, of_values)].map(|values| (vec![values.len() / cols, cols], values))
}

fn converted_file(folder: &Path, keeps_fused: bool) -> Written {
    let mut tensors = checkpoint(folder);
    let mut found: Vec<_> = (0..4).flat_map(|layer| stack_experts(&mut tensors, layer, EXPERTS)).collect();
    add_ones(&mut tensors);
    found.extend(renamed(tensors, &POST_NORM, |part, tensor| {
        let (shape, values) = tensor;
        let one = |name: &str, shape, values| Some(vec![(name.to_owned(), (shape, values))]);
        match part {
            "linear_attn.A_log" => one("ssm_a", shape.clone(), values.iter().map(|log| -log.exp()).collect()),
            "linear_attn.in_proj_qkvz.weight" if !keeps_fused => {
                let names = ["attn_qkv.weight", "attn_gate.weight"].map(str::to_owned).into_iter();
                Some(names.zip(split(tensor)).collect())
            }
            "linear_attn.conv1d.weight" => one("ssm_conv1d.weight", vec![shape[0], shape[2]], values.clone()),
            "mlp.shared_expert_gate.weight" => {
                one("ffn_gate_inp_shexp.weight", vec![shape[1]], values.clone())
            }
            _ => None,
        }
    }));
    write(facts("qwen3-next", &[]), &found)
}

#[test]
fn split_and_fused_projections_give_the_logits_of_the_reference() {
    let Some(folder) = next_folder().map(|folder| folder.join("qwen3-next")) else { return };
    for keeps_fused in [false, true] {
        let difference = worst(&folder, converted_file(&folder, keeps_fused));
        // The reference's own rounding is beyond 1e-4; see the parity table.
        assert!(difference < 1e-3, "fused {keeps_fused}: logits differ by {difference}");
    }
}
