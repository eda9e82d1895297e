//! DeepSeek V2 and V3 and GLM-4.7-Flash as GGUF, which no fixture has. The files are written here from the checkpoints as
//! llama.cpp's converter writes them: one KV head, widths of the absorbed form, keys transposed by head; in older files keys
//! and values of all heads are in one tensor.

use llmctl_models::load::PredictionUse;

use crate::common::convert::{Tensor, Written, checkpoint, stack_experts, with_tokens, worst, write};
use crate::common::prelude::*;

const HEADS: usize = 4;
const PLAIN: usize = 16;
const ROTARY: usize = 8;
const VALUE: usize = 16;
const RANK: usize = 16;
const EXPERTS: usize = 8;

/// Metadata that the converter writes for all three checkpoints.
const COUNTS: [(&str, u32); 13] = [
    ("context_length", 2048),
    ("embedding_length", 32),
    ("feed_forward_length", 96),
    ("attention.head_count", HEADS as u32),
    ("vocab_size", 384),
    ("attention.kv_lora_rank", RANK as u32),
    ("rope.dimension_count", ROTARY as u32),
    ("leading_dense_block_count", 1),
    ("expert_feed_forward_length", 32),
    ("expert_count", EXPERTS as u32),
    ("expert_used_count", 2),
    ("expert_shared_count", 1),
    ("expert_group_used_count", 1),
];

/// Widths of heads in the absorbed form, beside those of the model.
const ABSORBED: [(&str, u32); 5] = [
    ("attention.head_count_kv", 1),
    ("attention.key_length", (RANK + ROTARY) as u32),
    ("attention.value_length", RANK as u32),
    ("attention.key_length_mla", (PLAIN + ROTARY) as u32),
    ("attention.value_length_mla", VALUE as u32),
];

/// Widths of heads in older files.
const EXPANDED: [(&str, u32); 3] = [
    ("attention.head_count_kv", HEADS as u32),
    ("attention.key_length", (PLAIN + ROTARY) as u32),
    ("attention.value_length", VALUE as u32),
];

/// What distinguishes the checkpoints: counts, factor of the experts' weights, whether those sum to 1, and eps.
struct Kind {
    name: &'static str,
    counts: &'static [(&'static str, u32)],
    scale: f32,
    normalizes: bool,
    eps: f32,
}

const KINDS: [Kind; 3] = [
    Kind { name: "deepseek2-lite", counts: &[("block_count", 4)], scale: 1.0, normalizes: false, eps: 1e-6 },
    Kind {
        name: "deepseek3",
        counts: &[
            ("block_count", 4),
            ("attention.q_lora_rank", 16),
            ("expert_gating_func", 2),
            ("expert_group_count", 2),
        ],
        scale: 2.5,
        normalizes: true,
        eps: 1e-6,
    },
    Kind {
        name: "glm4-moe-lite",
        // The last of the blocks predicts further tokens.
        counts: &[
            ("block_count", 5),
            ("nextn_predict_layers", 1),
            ("attention.q_lora_rank", 16),
            ("expert_gating_func", 2),
            ("expert_group_count", 1),
        ],
        scale: 1.8,
        normalizes: true,
        eps: 1e-5,
    },
];

fn facts(kind: &Kind, widths: &[(&str, u32)]) -> GgufBuilder {
    let file = with_tokens("deepseek2")
        .f32("deepseek2.attention.layer_norm_rms_epsilon", kind.eps)
        .f32("deepseek2.rope.freq_base", 10_000.0)
        .f32("deepseek2.expert_weights_scale", kind.scale)
        .bool("deepseek2.expert_weights_norm", kind.normalizes);
    let counts: BTreeMap<&str, u32> = COUNTS.iter().chain(kind.counts).chain(widths).copied().collect();
    counts.into_iter().fold(file, |file, (key, count)| file.u32(&format!("deepseek2.{key}"), count))
}

/// Splits keys and values of the heads, and transposes the keys of each.
fn split_heads((shape, values): &Tensor) -> [Tensor; 2] {
    let rank = shape[1];
    let heads = values.chunks((PLAIN + VALUE) * rank);
    let transposed = |head: &[f32]| -> Vec<f32> {
        (0..rank * PLAIN).map(|at| head[at % PLAIN * rank + at / PLAIN]).collect()
    };
    let keys = heads.clone().flat_map(transposed).collect();
    let values = heads.flat_map(|head| head[PLAIN * rank..].to_vec()).collect();
    [(vec![HEADS, rank, PLAIN], keys), (vec![HEADS, VALUE, rank], values)]
}

fn converted(part: &str, tensor: &Tensor, is_absorbed: bool) -> Vec<(&'static str, Tensor)> {
    let name = match part {
        "self_attn.kv_b_proj.weight" if is_absorbed => {
            return ["attn_k_b.weight", "attn_v_b.weight"].into_iter().zip(split_heads(tensor)).collect();
        }
        "self_attn.kv_b_proj.weight" => "attn_kv_b.weight",
        "input_layernorm.weight" => "attn_norm.weight",
        "post_attention_layernorm.weight" => "ffn_norm.weight",
        "self_attn.q_proj.weight" => "attn_q.weight",
        "self_attn.q_a_proj.weight" => "attn_q_a.weight",
        "self_attn.q_a_layernorm.weight" => "attn_q_a_norm.weight",
        "self_attn.q_b_proj.weight" => "attn_q_b.weight",
        "self_attn.kv_a_proj_with_mqa.weight" => "attn_kv_a_mqa.weight",
        "self_attn.kv_a_layernorm.weight" => "attn_kv_a_norm.weight",
        "self_attn.o_proj.weight" => "attn_output.weight",
        "mlp.gate_proj.weight" => "ffn_gate.weight",
        "mlp.up_proj.weight" => "ffn_up.weight",
        "mlp.down_proj.weight" => "ffn_down.weight",
        "mlp.gate.weight" => "ffn_gate_inp.weight",
        "mlp.gate.e_score_correction_bias" => "exp_probs_b.bias",
        "mlp.shared_experts.gate_proj.weight" => "ffn_gate_shexp.weight",
        "mlp.shared_experts.up_proj.weight" => "ffn_up_shexp.weight",
        "mlp.shared_experts.down_proj.weight" => "ffn_down_shexp.weight",
        other => panic!("{other} has no name in GGUF"),
    };
    vec![(name, tensor.clone())]
}

fn tensors(folder: &Path, is_absorbed: bool) -> Vec<(String, Tensor)> {
    let mut tensors = checkpoint(folder);
    let mut found: Vec<_> = (1..4).flat_map(|layer| stack_experts(&mut tensors, layer, EXPERTS)).collect();
    for (name, tensor) in tensors {
        match name.as_str() {
            "embed_tokens.weight" => found.push(("token_embd.weight".to_owned(), tensor)),
            "lm_head.weight" => found.push(("output.weight".to_owned(), tensor)),
            "norm.weight" => found.push(("output_norm.weight".to_owned(), tensor)),
            _ => {
                let within = name.strip_prefix("layers.").and_then(|name| name.split_once('.'));
                let (layer, part) = within.expect("a layer's tensor");
                let parts = converted(part, &tensor, is_absorbed);
                found.extend(parts.into_iter().map(|(part, tensor)| (format!("blk.{layer}.{part}"), tensor)));
            }
        }
    }
    found
}

fn converted_file(folder: &Path, kind: &Kind, is_absorbed: bool) -> Written {
    let mut tensors = tensors(folder, is_absorbed);
    if kind.counts.contains(&("nextn_predict_layers", 1)) {
        tensors.push(("blk.4.nextn.enorm.weight".to_owned(), (vec![32], vec![1.0; 32])));
    }
    write(facts(kind, if is_absorbed { &ABSORBED } else { &EXPANDED }), &tensors)
}

#[test]
fn a_block_that_predicts_further_tokens_and_is_not_used_is_told() {
    let Some(next) = next_folder() else { return };
    for kind in KINDS {
        let file = converted_file(&next.join(kind.name), &kind, true);
        let details = load_model(&file.path, &exact()).expect("loads").details;
        let has_block = kind.counts.contains(&("nextn_predict_layers", 1));
        assert_eq!(details.len(), usize::from(has_block), "{}: {details:?}", kind.name);
        if has_block {
            let asked = LoadOptions { prediction: PredictionUse::Required, ..exact() };
            let error = load_model(&file.path, &asked).err().expect("refused").to_string();
            assert!(error.contains(&details[0].to_string()), "{error}");
        }
    }
}

#[test]
fn newer_and_older_files_give_the_logits_of_the_reference() {
    let Some(next) = next_folder() else { return };
    for kind in KINDS {
        let folder = next.join(kind.name);
        for is_absorbed in [true, false] {
            let difference = worst(&folder, converted_file(&folder, &kind, is_absorbed));
            assert!(difference < 1e-4, "{} absorbed {is_absorbed}: logits differ by {difference}", kind.name);
        }
    }
}

#[test]
fn facts_that_cannot_be_are_refused_by_name() {
    let Some(next) = next_folder() else { return };
    let kind = &KINDS[1];
    let tensors = tensors(&next.join(kind.name), true);
    for (key, value) in [
        ("attention.kv_lora_rank", 0),
        ("rope.dimension_count", 7),
        ("attention.key_length_mla", 8),
        ("expert_group_count", 3),
        ("expert_group_used_count", 3),
        ("expert_gating_func", 9),
        ("expert_shared_count", 100_000),
        ("nextn_predict_layers", 4),
    ] {
        let widths: Vec<_> = ABSORBED.into_iter().chain([(key, value)]).collect();
        let error = load_model(&write(facts(kind, &widths), &tensors).path, &exact()).err().expect(key);
        assert!(error.to_string().contains(key), "{error} names {key}");
    }
}
