//! Gemma 3n as GGUF, which no fixture has. The file is written here from the checkpoint as llama.cpp's converter writes it: its
//! names, the projections of the residual streams in one tensor, cut-offs instead of parts of the gates.

use crate::common::convert::{Tensor, Written, checkpoint, with_tokens, worst, write};
use crate::common::prelude::*;

const LAYERS: u32 = 10;
const STREAMS: usize = 4;

/// The type of an array's items in GGUF: a boolean.
const BOOL: u32 = 7;

const COUNTS: [(&str, u32); 14] = [
    ("context_length", 2048),
    ("embedding_length", 32),
    ("block_count", LAYERS),
    ("feed_forward_length", 96),
    ("attention.head_count", 4),
    ("attention.head_count_kv", 2),
    ("attention.key_length", 16),
    ("attention.value_length", 16),
    ("attention.sliding_window", 32),
    ("attention.shared_kv_layers", 5),
    ("embedding_length_per_layer_input", 16),
    ("altup.active_idx", 0),
    ("altup.num_inputs", STREAMS as u32),
    ("rope.dimension_count", 16),
];

fn facts(others: &[(&str, u32)]) -> GgufBuilder {
    let is_sliding: Vec<u8> = (1..=LAYERS).map(|layer| u8::from(!layer.is_multiple_of(5))).collect();
    // The quantile of 0.95, and of 0 for layers that keep all gates.
    let cutoffs: Vec<f32> =
        (0..LAYERS).map(|layer| if layer < 4 { 1.644_853_6 } else { f32::NEG_INFINITY }).collect();
    let file = with_tokens("gemma3n")
        .f32("gemma3n.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("gemma3n.rope.freq_base", 1e6)
        .f32("gemma3n.final_logit_softcapping", 30.0)
        .f32s("gemma3n.activation_sparsity_scale", &cutoffs)
        .array("gemma3n.attention.sliding_window_pattern", BOOL, u64::from(LAYERS), &is_sliding);
    let replaced = |key: &str| others.iter().any(|(other, _)| *other == key);
    let counts = COUNTS.iter().filter(|(key, _)| !replaced(key)).chain(others);
    counts.fold(file, |file, (key, count)| file.u32(&format!("gemma3n.{key}"), *count))
}

fn layer_name(part: &str) -> &'static str {
    match part {
        "input_layernorm.weight" => "attn_norm.weight",
        "post_attention_layernorm.weight" => "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight" => "ffn_norm.weight",
        "post_feedforward_layernorm.weight" => "post_ffw_norm.weight",
        "self_attn.q_proj.weight" => "attn_q.weight",
        "self_attn.k_proj.weight" => "attn_k.weight",
        "self_attn.v_proj.weight" => "attn_v.weight",
        "self_attn.o_proj.weight" => "attn_output.weight",
        "self_attn.q_norm.weight" => "attn_q_norm.weight",
        "self_attn.k_norm.weight" => "attn_k_norm.weight",
        "mlp.gate_proj.weight" => "ffn_gate.weight",
        "mlp.up_proj.weight" => "ffn_up.weight",
        "mlp.down_proj.weight" => "ffn_down.weight",
        "per_layer_input_gate.weight" => "inp_gate.weight",
        "per_layer_projection.weight" => "proj.weight",
        "post_per_layer_input_norm.weight" => "post_norm.weight",
        "altup.correct_output_scale" => "altup_correct_scale.weight",
        "altup.correction_coefs.weight" => "altup_correct_coef.weight",
        "altup.prediction_coefs.weight" => "altup_predict_coef.weight",
        "altup.modality_router.weight" => "altup_router.weight",
        "altup.router_norm.weight" => "altup_router_norm.weight",
        "laurel.linear_left.weight" => "laurel_l.weight",
        "laurel.linear_right.weight" => "laurel_r.weight",
        "laurel.post_laurel_norm.weight" => "laurel_post_norm.weight",
        other => panic!("{other} has no name in GGUF"),
    }
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
    for (name, tensor) in tensors {
        let name = match name.strip_prefix("layers.").and_then(|name| name.split_once('.')) {
            Some((layer, part)) => format!("blk.{layer}.{}", layer_name(part)),
            None => match name.as_str() {
                "embed_tokens.weight" => "token_embd.weight".to_owned(),
                "embed_tokens_per_layer.weight" => "per_layer_token_embd.weight".to_owned(),
                "per_layer_model_projection.weight" => "per_layer_model_proj.weight".to_owned(),
                "per_layer_projection_norm.weight" => "per_layer_proj_norm.weight".to_owned(),
                "norm.weight" => "output_norm.weight".to_owned(),
                other => panic!("{other} has no name in GGUF"),
            },
        };
        found.push((name, tensor));
    }
    found
}

fn file(folder: &Path, others: &[(&str, u32)]) -> Written {
    write(facts(others), &tensors(folder))
}

#[test]
fn a_converted_file_gives_the_logits_of_the_reference() {
    let Some(folder) = next_folder().map(|folder| folder.join("gemma3n")) else { return };
    let difference = worst(&folder, file(&folder, &[]));
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
        let error = load_model(&file(&folder, &[(key, value)]).path, &exact()).err().expect(key).to_string();
        assert!(error.contains(key), "{error} names {key}");
    }
}
