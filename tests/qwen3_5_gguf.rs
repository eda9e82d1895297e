//! Qwen 3.5 as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter does: its names, the
//! heads of values in turns over the heads of keys, `-exp(A_log)`, norms with their 1, vectors for matrices of one row, and a
//! block behind the others that predicts further tokens.

use crate::common::convert::{
    POST_NORM, Tensor, add_ones, assert_refused, checkpoint, facts, renamed, stack_experts, worst, write,
};
use crate::common::prelude::*;

const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
/// Of a head of keys and of values alike.
const HEAD: usize = 16;
const EXPERTS: usize = 8;

/// Heads of `len` values each, from groups that share a head of keys to turns.
fn in_turns(values: &[f32], len: usize) -> Vec<f32> {
    let each = VALUE_HEADS / KEY_HEADS;
    let order = (0..VALUE_HEADS).map(|place| place % KEY_HEADS * each + place / KEY_HEADS);
    order.flat_map(|head| values[head * len..(head + 1) * len].to_vec()).collect()
}

/// As `in_turns`, of the rows behind those of queries and keys.
fn values_in_turns(values: &[f32], row: usize) -> Vec<f32> {
    let (before, heads) = values.split_at(2 * KEY_HEADS * HEAD * row);
    [before, &in_turns(heads, HEAD * row)].concat()
}

/// Converts a tensor of a layer that is more than renamed.
pub fn converted(part: &str, (shape, values): &Tensor) -> Option<Vec<(String, Tensor)>> {
    let row = *shape.last().expect("a dimension");
    let same = |name, values| (name, (shape.clone(), values));
    let (name, tensor) = match part {
        "linear_attn.A_log" => same("ssm_a", in_turns(values, 1).iter().map(|log| -log.exp()).collect()),
        "linear_attn.dt_bias" => same("ssm_dt.bias", in_turns(values, 1)),
        "linear_attn.in_proj_a.weight" => same("ssm_alpha.weight", in_turns(values, row)),
        "linear_attn.in_proj_b.weight" => same("ssm_beta.weight", in_turns(values, row)),
        "linear_attn.in_proj_z.weight" => same("attn_gate.weight", in_turns(values, HEAD * row)),
        "linear_attn.in_proj_qkv.weight" => same("attn_qkv.weight", values_in_turns(values, row)),
        "linear_attn.conv1d.weight" => {
            ("ssm_conv1d.weight", (vec![shape[0], shape[2]], values_in_turns(values, row)))
        }
        "linear_attn.out_proj.weight" => {
            same("ssm_out.weight", values.chunks(row).flat_map(|row| in_turns(row, HEAD)).collect())
        }
        "mlp.shared_expert_gate.weight" => ("ffn_gate_inp_shexp.weight", (vec![row], values.clone())),
        _ => return None,
    };
    Some(vec![(name.to_owned(), tensor)])
}

/// All tensors of the checkpoint in `folder` as the converter has them.
pub fn tensors(folder: &Path, has_experts: bool) -> Vec<(String, Tensor)> {
    let mut tensors = checkpoint(folder);
    let mut found = Vec::new();
    for layer in (0..4).filter(|_| has_experts) {
        found.extend(stack_experts(&mut tensors, layer, EXPERTS));
    }
    add_ones(&mut tensors);
    found.extend(renamed(tensors, &POST_NORM, converted));
    // A block that lacks most of its tensors is left out.
    found.push(("blk.4.nextn.enorm.weight".to_owned(), (vec![32], vec![1.0; 32])));
    found
}

#[test]
fn both_kinds_give_the_references_logits() {
    for name in ["qwen3.5", "qwen3.5-moe"] {
        let folder = parity_folder().join(name);
        let difference = worst(&folder, write(facts(name, &[]), &tensors(&folder, name.ends_with("moe"))));
        assert!(difference < 1e-4, "{name}: logits differ by {difference}");
    }
}

#[test]
fn the_order_of_heads_matters() {
    // As if heads of values that share a head of keys followed each other: the wrong pairs, the wrong logits.
    let folder = parity_folder().join("qwen3.5");
    let mut tensors = tensors(&folder, false);
    for (name, (_, values)) in &mut tensors {
        if name.ends_with("ssm_alpha.weight") {
            *values = in_turns(values, 32);
        }
    }
    assert!(worst(&folder, write(facts("qwen3.5", &[]), &tensors)) > 1e-3);
}

#[test]
fn layers_that_recur_may_be_listed() {
    let folder = parity_folder().join("qwen3.5");
    let tensors = tensors(&folder, false);
    let listed = |list: &[u32]| facts("qwen3.5", &[]).u32s("qwen35.attention.recurrent_layers", list);
    assert!(worst(&folder, write(listed(&[1, 1, 1, 0, 0]), &tensors)) < 1e-4);
    assert_refused(listed(&[1, 1]), &tensors, "attention.recurrent_layers");
    // A list that contradicts the tensors names the first that is missing.
    assert_refused(listed(&[0, 1, 1, 1]), &tensors, "blk.0.attn_q");
}

#[test]
fn facts_that_cannot_be_are_refused_by_name() {
    let folder = parity_folder().join("qwen3.5");
    let tensors = tensors(&folder, false);
    for (key, value) in [
        ("nextn_predict_layers", 5),
        ("full_attention_interval", 0),
        ("ssm.group_count", 3),
        ("ssm.inner_size", 63),
        ("ssm.conv_kernel", 1),
    ] {
        assert_refused(facts("qwen3.5", &[(key, value)]), &tensors, key);
    }
    let scaled = facts("qwen3.5-moe", &[]).f32("qwen35moe.expert_weights_scale", 2.5);
    assert_refused(scaled, &tensors, "expert_weights_scale");
}
