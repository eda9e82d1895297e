//! Phi-3 as GGUF, which no fixture has: q, k, v in one matrix, gate and up in another, LongRoPE's divisors as tensors.
//! The file is written here from the checkpoint, under the names that llama.cpp's converter gives.

use llmctl_models::backend::cpu::Cpu;
use llmctl_models::load::quantize::convert;
use llmctl_models::model::arch::{Description, parse_config};
use llmctl_models::model::decoder::{Decoder, DecoderParts};

use crate::common::prelude::*;

const F32: u32 = 0;
const BF16: u32 = 30;

/// Where a context begins to be long.
const ORIGINAL: u32 = 512;

fn logits(source: &ModelSource, tokens: &[u32]) -> Vec<f32> {
    let files = ModelFiles::open(source).expect("opens");
    let Description { config, naming, .. } =
        parse_config(files.config_reader()).expect("describes").expect("native");
    let parts = DecoderParts {
        context_length: config.context_length,
        config,
        naming,
        source: files.tensors(),
        kv_type: KvType::F32,
        convert: &|name, _, tensor| convert(name, &tensor, Dtype::F32),
        progress: &mut |_, _| (),
    };
    let mut decoder = Decoder::load(Cpu::new(1).expect("threads"), parts).expect("loads");
    Fed::new(&mut decoder).feed(tokens, 64)
}

/// The name that the converter gives a tensor of the checkpoint.
fn gguf_name(name: &str) -> String {
    let fixed = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, gguf)) = fixed.iter().find(|(hf, _)| *hf == name) {
        return (*gguf).to_owned();
    }
    let within = name.strip_prefix("model.layers.").expect("a layer's tensor");
    let (layer, part) = within.split_once('.').expect("a layer's tensor");
    let part = match part {
        "input_layernorm.weight" => "attn_norm.weight",
        "post_attention_layernorm.weight" => "ffn_norm.weight",
        "self_attn.qkv_proj.weight" => "attn_qkv.weight",
        "self_attn.o_proj.weight" => "attn_output.weight",
        "mlp.gate_up_proj.weight" => "ffn_up.weight",
        "mlp.down_proj.weight" => "ffn_down.weight",
        other => panic!("{other} has no name in GGUF"),
    };
    format!("blk.{layer}.{part}")
}

fn write_gguf(folder: &Path, into: &Path, original_context: u32, factors: &[(&str, &[f32])]) {
    let mut file = GgufBuilder::new()
        .text("general.architecture", "phi3")
        .u32("phi3.context_length", 2048)
        .u32("phi3.embedding_length", 32)
        .u32("phi3.block_count", 4)
        .u32("phi3.feed_forward_length", 96)
        .u32("phi3.attention.head_count", 4)
        .u32("phi3.attention.head_count_kv", 2)
        .f32("phi3.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("phi3.rope.freq_base", 10_000.0)
        .u32("phi3.rope.dimension_count", 8)
        .u32("phi3.rope.scaling.original_context_length", original_context);
    let checkpoint = Safetensors::open(folder).expect("opens");
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(&name).expect("reads").expect("is there");
        assert_eq!(tensor.dtype, Dtype::Bf16);
        file = file.tensor(&gguf_name(&name), &tensor.shape, BF16, &tensor.bytes);
    }
    for (name, values) in factors {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        file = file.tensor(name, &[values.len()], F32, &bytes);
    }
    std::fs::write(into, file.build()).expect("write");
}

#[test]
fn fused_matrices_are_taken_apart() {
    let folder = parity_folder().join("phi3");
    let place = tempfile::tempdir().expect("tempdir");
    let gguf = place.path().join("phi3.gguf");
    write_gguf(&folder, &gguf, 4096, &[]);
    for prompt in golden_prompts(&folder) {
        let from_gguf = logits(&ModelSource::Gguf(gguf.clone()), &prompt.tokens);
        assert!(worst_difference(&prompt, &from_gguf) < 1e-4, "{}", prompt.name);
        assert_eq!(from_gguf, logits(&ModelSource::Folder(folder.clone()), &prompt.tokens));
    }
}

#[test]
fn long_rope_is_the_same_from_tensors_and_from_config() {
    let (short, long) = ([1.0f32, 1.1, 1.5, 2.0], [1.0f32, 2.0, 8.0, 32.0]);
    let folder = parity_folder().join("phi3");
    let place = tempfile::tempdir().expect("tempdir");
    for entry in std::fs::read_dir(&folder).expect("folder") {
        let entry = entry.expect("entry");
        std::fs::copy(entry.path(), place.path().join(entry.file_name())).expect("copy");
    }
    let path = place.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    config["original_max_position_embeddings"] = json!(ORIGINAL);
    config["rope_scaling"] = json!({"type": "longrope", "short_factor": short, "long_factor": long});
    std::fs::write(path, config.to_string()).expect("write");
    let gguf = place.path().join("phi3.gguf");
    let factors: [(&str, &[f32]); 2] =
        [("rope_factors_short.weight", &short), ("rope_factors_long.weight", &long)];
    write_gguf(&folder, &gguf, ORIGINAL, &factors);

    let tokens = golden_prompts(&folder).pop().expect("a prompt").tokens;
    let scaled = logits(&ModelSource::Folder(place.path().into()), &tokens);
    assert_eq!(scaled, logits(&ModelSource::Gguf(gguf), &tokens));
    assert_ne!(scaled, logits(&ModelSource::Folder(folder), &tokens));
}
