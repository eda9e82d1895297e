//! Qwen 3 Next as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter writes it:
//! its names, the fused projections of the delta nets split (and, in older files, left fused), norms with their 1.

use crate::common::convert::{Tensor, Written, checkpoint, stack_experts, with_tokens, worst, write};
use crate::common::prelude::*;

const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
/// Values of a head, of keys and of values alike.
const HEAD: usize = 16;
const EXPERTS: usize = 8;

const COUNTS: [(&str, u32); 18] = [
    ("context_length", 2048),
    ("embedding_length", 32),
    ("block_count", 4),
    ("feed_forward_length", 96),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("attention.key_length", 16),
    ("attention.value_length", 16),
    ("rope.dimension_count", 4),
    ("expert_count", EXPERTS as u32),
    ("expert_used_count", 2),
    ("expert_feed_forward_length", 32),
    ("expert_shared_feed_forward_length", 32),
    ("ssm.conv_kernel", 4),
    ("ssm.state_size", HEAD as u32),
    ("ssm.group_count", KEY_HEADS as u32),
    ("ssm.time_step_rank", VALUE_HEADS as u32),
    ("ssm.inner_size", (VALUE_HEADS * HEAD) as u32),
];

fn facts() -> GgufBuilder {
    let file = with_tokens("qwen3next")
        .f32("qwen3next.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("qwen3next.rope.freq_base", 10_000.0);
    COUNTS.iter().fold(file, |file, (key, count)| file.u32(&format!("qwen3next.{key}"), *count))
}

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

/// Returns the names and the values that the converter gives a tensor of a layer.
fn converted(part: &str, tensor: &Tensor, keeps_fused: bool) -> Vec<(&'static str, Tensor)> {
    let (shape, values) = tensor;
    let same = |name| vec![(name, tensor.clone())];
    let norm = |name| vec![(name, (shape.clone(), values.iter().map(|value| value + 1.0).collect()))];
    match part {
        "input_layernorm.weight" => norm("attn_norm.weight"),
        "post_attention_layernorm.weight" => norm("post_attention_norm.weight"),
        "self_attn.q_norm.weight" => norm("attn_q_norm.weight"),
        "self_attn.k_norm.weight" => norm("attn_k_norm.weight"),
        "self_attn.q_proj.weight" => same("attn_q.weight"),
        "self_attn.k_proj.weight" => same("attn_k.weight"),
        "self_attn.v_proj.weight" => same("attn_v.weight"),
        "self_attn.o_proj.weight" => same("attn_output.weight"),
        "linear_attn.norm.weight" => same("ssm_norm.weight"),
        "linear_attn.A_log" => {
            vec![("ssm_a", (shape.clone(), values.iter().map(|log| -log.exp()).collect()))]
        }
        "linear_attn.dt_bias" => same("ssm_dt.bias"),
        "linear_attn.in_proj_ba.weight" => same("ssm_ba.weight"),
        "linear_attn.in_proj_qkvz.weight" if keeps_fused => same("ssm_in.weight"),
        "linear_attn.in_proj_qkvz.weight" => {
            ["attn_qkv.weight", "attn_gate.weight"].into_iter().zip(split(tensor)).collect()
        }
        "linear_attn.conv1d.weight" => {
            vec![("ssm_conv1d.weight", (vec![shape[0], shape[2]], values.clone()))]
        }
        "linear_attn.out_proj.weight" => same("ssm_out.weight"),
        "mlp.gate.weight" => same("ffn_gate_inp.weight"),
        "mlp.shared_expert.gate_proj.weight" => same("ffn_gate_shexp.weight"),
        "mlp.shared_expert.up_proj.weight" => same("ffn_up_shexp.weight"),
        "mlp.shared_expert.down_proj.weight" => same("ffn_down_shexp.weight"),
        "mlp.shared_expert_gate.weight" => {
            vec![("ffn_gate_inp_shexp.weight", (vec![shape[1]], values.clone()))]
        }
        other => panic!("{other} has no name in GGUF"),
    }
}

fn converted_file(folder: &Path, keeps_fused: bool) -> Written {
    let mut tensors = checkpoint(folder);
    let mut found: Vec<_> = (0..4).flat_map(|layer| stack_experts(&mut tensors, layer, EXPERTS)).collect();
    for (name, tensor) in tensors {
        match name.as_str() {
            "embed_tokens.weight" => found.push(("token_embd.weight".to_owned(), tensor)),
            "lm_head.weight" => found.push(("output.weight".to_owned(), tensor)),
            "norm.weight" => {
                let (shape, values) = tensor;
                let values = values.iter().map(|value| value + 1.0).collect();
                found.push(("output_norm.weight".to_owned(), (shape, values)));
            }
            _ => {
                let (layer, part) = name
                    .strip_prefix("layers.")
                    .and_then(|name| name.split_once('.'))
                    .expect("a layer's tensor");
                let parts = converted(part, &tensor, keeps_fused);
                found.extend(parts.into_iter().map(|(part, tensor)| (format!("blk.{layer}.{part}"), tensor)));
            }
        }
    }
    write(facts(), &found)
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
