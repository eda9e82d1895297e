//! Granite 4, Nemotron-H and Falcon-H1 as GGUF, which no fixture has. The files are written here from the checkpoints as
//! llama.cpp's converter writes them: `-exp(A_log)`, vectors of a mixer as matrices, rows of q and k with rotary pairs
//! side by side (not Falcon-H1), and Falcon-H1's multipliers within the matrices.

use crate::common::convert::{
    Tensor, Written, assert_same_bits, checkpoint, facts, pair_heads, renamed, worst, write,
};
use crate::common::prelude::*;

const INNER: usize = 64;
const STATE: usize = 16;
const EXPERTS: usize = 8;

fn granite(folder: &Path, counts: &[(&str, u32)]) -> Written {
    let mut tensors = checkpoint(folder);
    pair_heads(&mut tensors, 8);
    let tensors = renamed(tensors, &[], |part, tensor| granite_part(part, tensor, counts.len() > 3));
    write(facts("granite4", counts), &tensors)
}

fn nemotron(folder: &Path) -> Written {
    let mut tensors = checkpoint(folder);
    pair_heads(&mut tensors, 16);
    let tensors = renamed(tensors, &[], |part, tensor| match part {
        "norm.weight" => Some(vec![("attn_norm.weight".to_owned(), tensor.clone())]),
        part => mixer(part.strip_prefix("mixer.")?, tensor.clone()),
    });
    write(facts("nemotron-h", &[]), &tensors)
}

/// Multipliers of Falcon-H1's config.json by the end of a tensor's name; keys have two.
const MULTIPLIERS: [(&str, f32); 11] = [
    ("embed_tokens.weight", 5.0),
    ("lm_head.weight", 0.5),
    ("feed_forward.gate_proj.weight", 0.9),
    ("feed_forward.down_proj.weight", 1.1),
    ("self_attn.k_proj.weight", 0.8),
    ("self_attn.k_proj.weight", 1.1),
    ("self_attn.o_proj.weight", 0.9),
    ("self_attn.q_proj.weight", 1.1),
    ("self_attn.v_proj.weight", 1.1),
    ("mamba.out_proj.weight", 0.7),
    ("mamba.in_proj.weight", 0.8),
];

fn falcon(folder: &Path) -> Written {
    let mut tensors = checkpoint(folder);
    for (name, (shape, values)) in &mut tensors {
        for (_, factor) in MULTIPLIERS.iter().filter(|(end, _)| name.ends_with(end)) {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        if name.ends_with("mamba.in_proj.weight") {
            let parts = [(INNER, 0.5), (INNER, 0.6), (STATE, 0.7), (STATE, 0.8), (4, 0.9)];
            let factors = parts.map(|(rows, factor)| vec![factor; rows * shape[1]]).concat();
            values.iter_mut().zip(factors).for_each(|(value, factor): (&mut f32, f32)| *value *= factor);
        }
    }
    let tensors = renamed(tensors, &[], |part, tensor| match part {
        "pre_ff_layernorm.weight" => Some(vec![("ffn_norm".to_owned(), tensor.clone())]),
        part => mixer(part.strip_prefix("mamba.")?, tensor.clone()),
    });
    write(facts("falcon-h1", &[]), &tensors)
}

/// Converts a tensor of a Mamba-2 mixer.
fn mixer(part: &str, (shape, values): Tensor) -> Option<Vec<(String, Tensor)>> {
    let heads = vec![shape[0], 1];
    let (name, tensor) = match part {
        "A_log" => ("ssm_a", (heads, values.iter().map(|log| -(f64::from(*log).exp() as f32)).collect())),
        "D" => ("ssm_d", (heads, values)),
        "dt_bias" => ("ssm_dt.bias", (shape, values)),
        "conv1d.bias" => ("ssm_conv1d.bias", (shape, values)),
        "conv1d.weight" => ("ssm_conv1d.weight", (vec![shape[0], shape[2]], values)),
        "in_proj.weight" => ("ssm_in.weight", (shape, values)),
        "out_proj.weight" => ("ssm_out.weight", (shape, values)),
        "norm.weight" => ("ssm_norm.weight", (vec![1, shape[0]], values)),
        _ => return None,
    };
    Some(vec![(name.to_owned(), tensor)])
}

/// Cuts rows, or rows within each expert, into gate and up.
fn halves((shape, values): &Tensor) -> [Tensor; 2] {
    let (outer, [rows, cols]) = match shape[..] {
        [rows, cols] => (vec![], [rows, cols]),
        [count, rows, cols] => (vec![count], [rows, cols]),
        _ => panic!("{shape:?}"),
    };
    [0, 1].map(|part| {
        let half = rows / 2 * cols;
        let of_each =
            values.chunks(rows * cols).flat_map(|each| each[part * half..(part + 1) * half].to_vec());
        ([&outer[..], &[rows / 2, cols]].concat(), of_each.collect())
    })
}

fn granite_part(part: &str, tensor: &Tensor, has_experts: bool) -> Option<Vec<(String, Tensor)>> {
    let shared = if has_experts { "_shexp" } else { "" };
    let gate_and_up = |ending: &str| {
        let names = ["gate", "up"].map(|part| format!("ffn_{part}{ending}.weight"));
        Some(names.into_iter().zip(halves(tensor)).collect())
    };
    match part {
        "block_sparse_moe.input_linear.weight" => gate_and_up("_exps"),
        "shared_mlp.input_linear.weight" => gate_and_up(shared),
        "shared_mlp.output_linear.weight" => Some(vec![(format!("ffn_down{shared}.weight"), tensor.clone())]),
        part => mixer(part.strip_prefix("mamba.")?, tensor.clone()),
    }
}

#[test]
fn granite_4_as_gguf_gives_the_bits_of_the_checkpoint() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("granite4-h-dense");
    let dense = [("feed_forward_length", 96), ("expert_shared_feed_forward_length", 96), ("expert_count", 0)];
    assert_same_bits(&folder, granite(&folder, &dense));
    let folder = next.join("granite4-h");
    let with_experts = [
        ("feed_forward_length", 96),
        ("expert_shared_feed_forward_length", 48),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
    ];
    assert_same_bits(&folder, granite(&folder, &with_experts));
}

#[test]
fn nemotron_h_as_gguf_gives_the_bits_of_the_checkpoint() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("nemotron-h");
    assert_same_bits(&folder, nemotron(&folder));
}

#[test]
fn falcon_h1_with_multipliers_within_its_matrices_gives_the_reference_logits() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("falcon-h1");
    let worst = worst(&folder, falcon(&folder));
    assert!(worst < 1e-4, "{worst}");
}
