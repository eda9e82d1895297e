//! Qwen 3.5 as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter does: its names, the
//! heads of values in turns over the heads of keys, `-exp(A_log)`, norms with their 1, vectors for matrices of one row, and a
//! block behind the others that predicts further tokens.

use crate::common::convert::{Tensor, checkpoint, stack_experts, with_tokens, worst, write};
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

/// The name and the values that the converter gives a tensor of a layer.
pub fn converted(part: &str, (shape, values): &Tensor) -> (&'static str, Tensor) {
    let row = *shape.last().expect("a dimension");
    let same = |name| (name, (shape.clone(), values.clone()));
    let other = |name, values| (name, (shape.clone(), values));
    let norm = |name| (name, (shape.clone(), values.iter().map(|value| value + 1.0).collect()));
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
        "linear_attn.A_log" => other("ssm_a", in_turns(values, 1).iter().map(|log| -log.exp()).collect()),
        "linear_attn.dt_bias" => other("ssm_dt.bias", in_turns(values, 1)),
        "linear_attn.in_proj_a.weight" => other("ssm_alpha.weight", in_turns(values, row)),
        "linear_attn.in_proj_b.weight" => other("ssm_beta.weight", in_turns(values, row)),
        "linear_attn.in_proj_z.weight" => other("attn_gate.weight", in_turns(values, HEAD * row)),
        "linear_attn.in_proj_qkv.weight" => other("attn_qkv.weight", values_in_turns(values, row)),
        "linear_attn.conv1d.weight" => {
            ("ssm_conv1d.weight", (vec![shape[0], shape[2]], values_in_turns(values, row)))
        }
        "linear_attn.out_proj.weight" => {
            other("ssm_out.weight", values.chunks(row).flat_map(|row| in_turns(row, HEAD)).collect())
        }
        "mlp.gate_proj.weight" => same("ffn_gate.weight"),
        "mlp.up_proj.weight" => same("ffn_up.weight"),
        "mlp.down_proj.weight" => same("ffn_down.weight"),
        "mlp.gate.weight" => same("ffn_gate_inp.weight"),
        "mlp.shared_expert.gate_proj.weight" => same("ffn_gate_shexp.weight"),
        "mlp.shared_expert.up_proj.weight" => same("ffn_up_shexp.weight"),
        "mlp.shared_expert.down_proj.weight" => same("ffn_down_shexp.weight"),
        "mlp.shared_expert_gate.weight" => ("ffn_gate_inp_shexp.weight", (vec![row], values.clone())),
        other => panic!("{other} has no name in GGUF"),
    }
}

/// All tensors of the checkpoint in `folder` as the converter has them.
pub fn tensors(folder: &Path, has_experts: bool) -> Vec<(String, Tensor)> {
    let mut tensors = checkpoint(folder);
    let mut found = Vec::new();
    for layer in (0..4).filter(|_| has_experts) {
        found.extend(stack_experts(&mut tensors, layer, EXPERTS));
    }
    for (name, tensor) in tensors {
        found.push(match name.as_str() {
            "embed_tokens.weight" => ("token_embd.weight".to_owned(), tensor),
            "lm_head.weight" => ("output.weight".to_owned(), tensor),
            "norm.weight" => {
                let (shape, values) = tensor;
                ("output_norm.weight".to_owned(), (shape, values.iter().map(|value| value + 1.0).collect()))
            }
            _ => {
                let within = name.strip_prefix("layers.").expect("a layer's tensor");
                let (layer, part) = within.split_once('.').expect("a layer's tensor");
                let (part, tensor) = converted(part, &tensor);
                (format!("blk.{layer}.{part}"), tensor)
            }
        });
    }
    // A block that lacks most of its tensors is left out.
    found.push(("blk.4.nextn.enorm.weight".to_owned(), (vec![32], vec![1.0; 32])));
    found
}

/// Metadata that the converter writes for both checkpoints. Of the 5 blocks, the last predicts further tokens.
const COUNTS: [(&str, u32); 14] = [
    ("context_length", 2048),
    ("embedding_length", 32),
    ("block_count", 5),
    ("nextn_predict_layers", 1),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("attention.key_length", 16),
    ("attention.value_length", 16),
    ("rope.dimension_count", 4),
    ("ssm.conv_kernel", 4),
    ("ssm.state_size", HEAD as u32),
    ("ssm.group_count", KEY_HEADS as u32),
    ("ssm.time_step_rank", VALUE_HEADS as u32),
    ("ssm.inner_size", (VALUE_HEADS * HEAD) as u32),
];

/// The counts, of which `others` are others or more.
fn facts(arch: &str, others: &[(&str, u32)]) -> GgufBuilder {
    let counts: BTreeMap<&str, u32> = COUNTS.iter().chain(others).copied().collect();
    let file = with_tokens(arch)
        .f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6)
        .f32(&format!("{arch}.rope.freq_base"), 10_000.0)
        .u32s(&format!("{arch}.rope.dimension_sections"), &[1, 1, 0, 0]);
    counts.into_iter().fold(file, |file, (key, count)| file.u32(&format!("{arch}.{key}"), count))
}

pub fn dense() -> GgufBuilder {
    facts("qwen35", &[("feed_forward_length", 96)])
}

fn with_experts() -> GgufBuilder {
    let counts = [
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 32),
        ("expert_shared_feed_forward_length", 32),
    ];
    facts("qwen35moe", &counts)
}

fn refusal(facts: GgufBuilder, tensors: &[(String, Tensor)]) -> LoadError {
    load_model(&write(facts, tensors).path, &exact()).err().expect("a refusal")
}

#[test]
fn both_kinds_give_the_references_logits() {
    for (name, facts) in [("qwen3.5", dense()), ("qwen3.5-moe", with_experts())] {
        let folder = parity_folder().join(name);
        let difference = worst(&folder, write(facts, &tensors(&folder, name.ends_with("moe"))));
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
    assert!(worst(&folder, write(dense(), &tensors)) > 1e-3);
}

#[test]
fn layers_that_recur_may_be_listed() {
    let folder = parity_folder().join("qwen3.5");
    let tensors = tensors(&folder, false);
    let listed = |list: &[u32]| dense().u32s("qwen35.attention.recurrent_layers", list);
    assert!(worst(&folder, write(listed(&[1, 1, 1, 0, 0]), &tensors)) < 1e-4);
    let error = refusal(listed(&[1, 1]), &tensors).to_string();
    assert!(error.contains("attention.recurrent_layers"), "{error}");
    // A list that contradicts the tensors names the first that is missing.
    let error = refusal(listed(&[0, 1, 1, 1]), &tensors).to_string();
    assert!(error.contains("blk.0.attn_q"), "{error}");
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
        let facts = facts("qwen35", &[("feed_forward_length", 96), (key, value)]);
        let error = refusal(facts, &tensors).to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
    let scaled = with_experts().f32("qwen35moe.expert_weights_scale", 2.5);
    let error = refusal(scaled, &tensors).to_string();
    assert!(error.contains("expert_weights_scale"), "{error}");
}
