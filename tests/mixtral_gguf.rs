//! Mixtral as GGUF files of before April 2024, in which each expert has tensors of its own: no fixture has one. The file is
//! written here from the checkpoint as llama.cpp's converter wrote it then.

use crate::common::convert::{Tensor, Written, checkpoint, paired, with_tokens, worst, write};
use crate::common::prelude::*;

const COUNTS: [(&str, u32); 9] = [
    ("context_length", 2048),
    ("embedding_length", 32),
    ("block_count", 4),
    ("feed_forward_length", 96),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("rope.dimension_count", 8),
    ("expert_count", 4),
    ("expert_used_count", 2),
];

fn mixtral(folder: &Path) -> Written {
    let file = with_tokens("llama")
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 1_000_000.0);
    let file = COUNTS.iter().fold(file, |file, (key, count)| file.u32(&format!("llama.{key}"), *count));
    let tensors: Vec<(String, Tensor)> = checkpoint(folder).into_iter().map(named).collect();
    assert!(tensors.iter().any(|(name, _)| name == "blk.3.ffn_down.2.weight"));
    write(file, &tensors)
}

/// Converts a tensor of the checkpoint to its name in GGUF.
fn named((name, tensor): (String, Tensor)) -> (String, Tensor) {
    let outer = match name.as_str() {
        "embed_tokens.weight" => Some("token_embd.weight"),
        "lm_head.weight" => Some("output.weight"),
        "norm.weight" => Some("output_norm.weight"),
        _ => None,
    };
    if let Some(outer) = outer {
        return (outer.to_owned(), tensor);
    }
    let (layer, part) =
        name.strip_prefix("layers.").and_then(|within| within.split_once('.')).expect("a layer");
    let (part, tensor) = match part {
        "self_attn.q_proj.weight" => ("attn_q.weight".to_owned(), paired(tensor, 8)),
        "self_attn.k_proj.weight" => ("attn_k.weight".to_owned(), paired(tensor, 8)),
        "self_attn.v_proj.weight" => ("attn_v.weight".to_owned(), tensor),
        "self_attn.o_proj.weight" => ("attn_output.weight".to_owned(), tensor),
        "input_layernorm.weight" => ("attn_norm.weight".to_owned(), tensor),
        "post_attention_layernorm.weight" => ("ffn_norm.weight".to_owned(), tensor),
        "block_sparse_moe.gate.weight" => ("ffn_gate_inp.weight".to_owned(), tensor),
        part => (expert(part), tensor),
    };
    (format!("blk.{layer}.{part}"), tensor)
}

fn expert(part: &str) -> String {
    let within = part.strip_prefix("block_sparse_moe.experts.").unwrap_or_else(|| panic!("{part}"));
    let (index, part) = within.split_once('.').expect("an expert");
    let part = match part {
        "w1.weight" => "gate",
        "w2.weight" => "down",
        "w3.weight" => "up",
        other => panic!("{other}"),
    };
    format!("ffn_{part}.{index}.weight")
}

#[test]
fn experts_with_tensors_of_their_own_give_the_reference_logits() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("mixtral");
    let worst = worst(&folder, mixtral(&folder));
    assert!(worst < 1e-4, "{worst}");
}
