//! Granite 4, Nemotron-H and Falcon-H1 as GGUF, which no fixture has. The files are written here from the checkpoints as
//! llama.cpp's converter writes them: `-exp(A_log)`, vectors of a mixer as matrices, rows of q and k with rotary pairs
//! side by side (not Falcon-H1), and Falcon-H1's multipliers within the matrices.

use crate::common::convert::{Tensor, Written, checkpoint, paired, with_tokens, worst, write};
use crate::common::prelude::*;

const INNER: usize = 64;
const STATE: usize = 16;
const EXPERTS: usize = 8;

/// Metadata that the converter writes for all checkpoints.
const COUNTS: [(&str, u32); 10] = [
    ("block_count", 4),
    ("context_length", 2048),
    ("embedding_length", 32),
    ("attention.head_count", 4),
    ("vocab_size", 384),
    ("ssm.conv_kernel", 4),
    ("ssm.state_size", STATE as u32),
    ("ssm.group_count", 1),
    ("ssm.inner_size", INNER as u32),
    ("ssm.time_step_rank", 4),
];

fn facts(arch: &str, counts: &[(&str, u32)], numbers: &[(&str, f32)]) -> GgufBuilder {
    let name = |key: &str| format!("{arch}.{key}");
    let counts = COUNTS.iter().chain(counts);
    let file = counts.fold(with_tokens(arch), |file, (key, count)| file.u32(&name(key), *count));
    numbers.iter().fold(file, |file, (key, number)| file.f32(&name(key), *number))
}

fn granite(folder: &Path, counts: &[(&str, u32)]) -> Written {
    let numbers = [
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("rope.freq_base", 10_000.0),
        ("attention.scale", 0.25),
        ("embedding_scale", 3.0),
        ("residual_scale", 0.6),
        ("logit_scale", 0.25),
    ];
    let file = facts("granitehybrid", counts, &numbers)
        .u32s("granitehybrid.attention.head_count_kv", &[0, 2, 0, 2])
        .bool("granitehybrid.rope.scaling.finetuned", false);
    write(file, &tensors(folder, |part, tensor| granite_layer(part, tensor, counts.len() > 3)))
}

fn nemotron(folder: &Path) -> Written {
    let counts = [("attention.key_length", 16), ("attention.value_length", 16)];
    let file = facts("nemotron_h", &counts, &[("attention.layer_norm_rms_epsilon", 1e-5)])
        .u32s("nemotron_h.attention.head_count_kv", &[0, 0, 2, 0])
        .u32s("nemotron_h.feed_forward_length", &[0, 96, 0, 96]);
    write(file, &tensors(folder, nemotron_layer))
}

fn falcon(folder: &Path) -> Written {
    let counts = [
        ("attention.head_count_kv", 2),
        ("feed_forward_length", 96),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
    ];
    let numbers = [("attention.layer_norm_rms_epsilon", 1e-5), ("rope.freq_base", 10_000.0)];
    write(facts("falcon-h1", &counts, &numbers), &tensors(folder, falcon_layer))
}

/// Returns the checkpoint's tensors under their names in GGUF; `of_layer` converts those of a layer.
fn tensors(folder: &Path, of_layer: impl Fn(&str, Tensor) -> Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    let all: BTreeMap<String, Tensor> = checkpoint(folder);
    // Only Falcon-H1 has multipliers here, and a norm of this name.
    let [embedding, head] = if all.contains_key("final_layernorm.weight") { [5.0, 0.5] } else { [1.0; 2] };
    let mut found = Vec::new();
    for (name, tensor) in all {
        match name.as_str() {
            "embed_tokens.weight" | "embeddings.weight" => {
                found.push(("token_embd.weight".to_owned(), scaled(tensor, embedding)));
            }
            "lm_head.weight" => found.push(("output.weight".to_owned(), scaled(tensor, head))),
            "norm.weight" | "norm_f.weight" | "final_layernorm.weight" => {
                found.push(("output_norm.weight".to_owned(), tensor));
            }
            _ => {
                let within = name.strip_prefix("layers.").expect("a layer's tensor");
                let (layer, part) = within.split_once('.').expect("a layer's tensor");
                let converted = of_layer(part, tensor).into_iter();
                found.extend(converted.map(|(part, tensor)| (format!("blk.{layer}.{part}"), tensor)));
            }
        }
    }
    found
}

fn scaled((shape, values): Tensor, factor: f32) -> Tensor {
    (shape, values.into_iter().map(|value| value * factor).collect())
}

/// Converts a tensor of a Mamba-2 mixer.
fn mixer(part: &str, (shape, values): Tensor) -> Vec<(String, Tensor)> {
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
        other => panic!("{other} has no name in GGUF"),
    };
    vec![(name.to_owned(), tensor)]
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

fn granite_layer(part: &str, tensor: Tensor, has_experts: bool) -> Vec<(String, Tensor)> {
    let shared = if has_experts { "_shexp" } else { "" };
    let gate_and_up = |ending: &str, tensor: &Tensor| {
        let [gate, up] = halves(tensor);
        vec![(format!("ffn_gate{ending}.weight"), gate), (format!("ffn_up{ending}.weight"), up)]
    };
    if let Some(part) = part.strip_prefix("mamba.") {
        return mixer(part, tensor);
    }
    let (name, tensor) = match part {
        "block_sparse_moe.input_linear.weight" => return gate_and_up("_exps", &tensor),
        "shared_mlp.input_linear.weight" => return gate_and_up(shared, &tensor),
        "block_sparse_moe.output_linear.weight" => ("ffn_down_exps.weight".to_owned(), tensor),
        "block_sparse_moe.router.layer.weight" => ("ffn_gate_inp.weight".to_owned(), tensor),
        "shared_mlp.output_linear.weight" => (format!("ffn_down{shared}.weight"), tensor),
        "input_layernorm.weight" => ("attn_norm.weight".to_owned(), tensor),
        "post_attention_layernorm.weight" => ("ffn_norm.weight".to_owned(), tensor),
        part => attention(part.strip_prefix("self_attn.").expect("attention"), tensor, Some(8)),
    };
    vec![(name, tensor)]
}

/// Converts a tensor of attention; `paired_dim` is the size of heads whose rows are paired.
fn attention(part: &str, tensor: Tensor, paired_dim: Option<usize>) -> (String, Tensor) {
    let rows = |tensor: Tensor| match paired_dim {
        Some(head_dim) => paired(tensor, head_dim),
        None => tensor,
    };
    let (name, tensor) = match part {
        "q_proj.weight" => ("attn_q.weight", rows(tensor)),
        "k_proj.weight" => ("attn_k.weight", rows(tensor)),
        "v_proj.weight" => ("attn_v.weight", tensor),
        "o_proj.weight" => ("attn_output.weight", tensor),
        other => panic!("{other} has no name in GGUF"),
    };
    (name.to_owned(), tensor)
}

fn nemotron_layer(part: &str, tensor: Tensor) -> Vec<(String, Tensor)> {
    let Some(part) = part.strip_prefix("mixer.") else {
        return vec![("attn_norm.weight".to_owned(), tensor)];
    };
    match part {
        "up_proj.weight" => vec![("ffn_up.weight".to_owned(), tensor)],
        "down_proj.weight" => vec![("ffn_down.weight".to_owned(), tensor)],
        part if part.ends_with("_proj.weight") && !part.starts_with(['i', 'o'])
            || part == "o_proj.weight" =>
        {
            vec![attention(part, tensor, Some(16))]
        }
        part => mixer(part, tensor),
    }
}

/// Converts a tensor, with the multipliers of the checkpoint's config.json.
fn falcon_layer(part: &str, tensor: Tensor) -> Vec<(String, Tensor)> {
    let name = |name: &str| name.to_owned();
    vec![match part {
        "input_layernorm.weight" => (name("attn_norm.weight"), tensor),
        "pre_ff_layernorm.weight" => (name("ffn_norm"), tensor),
        "feed_forward.gate_proj.weight" => (name("ffn_gate.weight"), scaled(tensor, 0.9)),
        "feed_forward.up_proj.weight" => (name("ffn_up.weight"), tensor),
        "feed_forward.down_proj.weight" => (name("ffn_down.weight"), scaled(tensor, 1.1)),
        "self_attn.k_proj.weight" => attention("k_proj.weight", scaled(scaled(tensor, 0.8), 1.1), None),
        "self_attn.o_proj.weight" => attention("o_proj.weight", scaled(tensor, 0.9), None),
        "self_attn.q_proj.weight" => attention("q_proj.weight", scaled(tensor, 1.1), None),
        "self_attn.v_proj.weight" => attention("v_proj.weight", scaled(tensor, 1.1), None),
        "mamba.out_proj.weight" => return mixer("out_proj.weight", scaled(tensor, 0.7)),
        "mamba.in_proj.weight" => {
            let (shape, mut values) = scaled(tensor, 0.8);
            let row = shape[1];
            let parts = [(INNER, 0.5), (INNER, 0.6), (STATE, 0.7), (STATE, 0.8), (4, 0.9)];
            let factors = parts.iter().flat_map(|(rows, factor)| std::iter::repeat_n(*factor, rows * row));
            values.iter_mut().zip(factors).for_each(|(value, factor): (&mut f32, f32)| *value *= factor);
            return mixer("in_proj.weight", (shape, values));
        }
        part => return mixer(part.strip_prefix("mamba.").expect("a mixer"), tensor),
    }]
}

/// Asserts that a file gives the bits of the folder's logits.
fn assert_same_bits(folder: &Path, file: &Written) {
    let load = |path: &Path| load_model(path, &exact()).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let (mut from_folder, mut from_file) = (load(folder), load(&file.path));
    for prompt in golden_prompts(folder) {
        let [expected, got] = [&mut from_folder, &mut from_file]
            .map(|loaded| Fed::new(&mut *loaded.model).feed(&prompt.tokens, 16));
        assert!(expected == got, "{folder:?} {}", prompt.name);
    }
}

#[test]
fn granite_4_as_gguf_gives_the_bits_of_the_checkpoint() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("granite4-h-dense");
    let dense = [("feed_forward_length", 96), ("expert_shared_feed_forward_length", 96), ("expert_count", 0)];
    assert_same_bits(&folder, &granite(&folder, &dense));
    let folder = next.join("granite4-h");
    let with_experts = [
        ("feed_forward_length", 96),
        ("expert_shared_feed_forward_length", 48),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
    ];
    assert_same_bits(&folder, &granite(&folder, &with_experts));
}

#[test]
fn nemotron_h_as_gguf_gives_the_bits_of_the_checkpoint() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("nemotron-h");
    assert_same_bits(&folder, &nemotron(&folder));
}

#[test]
fn falcon_h1_with_multipliers_within_its_matrices_gives_the_reference_logits() {
    let Some(next) = next_folder() else { return };
    let folder = next.join("falcon-h1");
    let worst = worst(&folder, falcon(&folder));
    assert!(worst < 1e-4, "{worst}");
}
