//! DeepSeek V2 and V3 and GLM-4.7-Flash as GGUF, which no fixture has. The files are written here from the checkpoints as
//! llama.cpp's converter writes them: one KV head, widths of the absorbed form, keys transposed by head; in older files keys
//! and values of all heads are in one tensor.

use llmctl_models::load::PredictionUse;

use crate::common::convert::{
    Tensor, Written, assert_refused, checkpoint, facts, renamed, stack_experts, worst, write,
};
use crate::common::prelude::*;

const HEADS: usize = 4;
const PLAIN: usize = 16;
const ROTARY: usize = 8;
const VALUE: usize = 16;
const RANK: usize = 16;
const EXPERTS: usize = 8;

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

const KINDS: [&str; 3] = ["deepseek2-lite", "deepseek3", WITH_BLOCK];

/// The last of its blocks predicts further tokens.
const WITH_BLOCK: &str = "glm4-moe-lite";

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

fn tensors(folder: &Path, is_absorbed: bool) -> Vec<(String, Tensor)> {
    let mut tensors = checkpoint(folder);
    let mut found: Vec<_> = (1..4).flat_map(|layer| stack_experts(&mut tensors, layer, EXPERTS)).collect();
    found.extend(renamed(tensors, &[], |part, tensor| {
        let names = ["attn_k_b.weight", "attn_v_b.weight"].map(str::to_owned).into_iter();
        (is_absorbed && part == "self_attn.kv_b_proj.weight")
            .then(|| names.zip(split_heads(tensor)).collect())
    }));
    found
}

fn converted_file(folder: &Path, kind: &str, is_absorbed: bool) -> Written {
    let mut tensors = tensors(folder, is_absorbed);
    if kind == WITH_BLOCK {
        tensors.push(("blk.4.nextn.enorm.weight".to_owned(), (vec![32], vec![1.0; 32])));
    }
    let widths: &[_] = if is_absorbed { &ABSORBED } else { &EXPANDED };
    write(facts(kind, widths), &tensors)
}

#[test]
fn a_block_that_predicts_further_tokens_and_is_not_used_is_told() {
    let Some(next) = next_folder() else { return };
    for kind in KINDS {
        let file = converted_file(&next.join(kind), kind, true);
        let details = load_model(&file.path, &exact()).expect("loads").details;
        assert_eq!(details.len(), usize::from(kind == WITH_BLOCK), "{kind}: {details:?}");
        if kind == WITH_BLOCK {
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
        let folder = next.join(kind);
        for is_absorbed in [true, false] {
            let difference = worst(&folder, converted_file(&folder, kind, is_absorbed));
            assert!(difference < 1e-4, "{kind} absorbed {is_absorbed}: logits differ by {difference}");
        }
    }
}

#[test]
fn facts_that_cannot_be_are_refused_by_name() {
    let Some(next) = next_folder() else { return };
    let kind = KINDS[1];
    let tensors = tensors(&next.join(kind), true);
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
        assert_refused(facts(kind, &widths), &tensors, key);
    }
}
