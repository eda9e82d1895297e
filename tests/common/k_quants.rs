//! A small Llama as GGUF with random weights in K-quants, whose blocks of 256 values no checkpoint of the parity table has room
//! for: Q4_K with Q6_K where llama.cpp's Q4_K_M has it, packed by the crate's own quantiser.

use llmctl_models::load::quantize::convert;
use llmctl_models::tensor::HostTensor;

use super::gguf::F32;
use crate::common::prelude::*;

const Q4_K: u32 = 12;
const Q6_K: u32 = 14;

const LAYERS: usize = 2;
const WIDTH: usize = 256;
const KV_WIDTH: usize = 64;
pub const VOCAB: usize = 96;

/// Numbers between -1 and 1, the same for the same seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Writes the model to `path`.
pub fn write_k_quants(path: &Path) {
    let mut noise = Noise(3);
    let mut file = header();
    let mut matrix = |file: GgufBuilder, name: &str, rows: usize, dtype: Dtype| {
        let scale = (3.0 / WIDTH as f32).sqrt();
        let values: Vec<f32> = (0..rows * WIDTH).map(|_| scale * noise.next()).collect();
        let floats = HostTensor::new(Dtype::F32, vec![rows, WIDTH], SharedBytes::from(bytes_of(&values)));
        let packed = convert(name, &floats.expect("a matrix"), dtype).expect("packs");
        assert_eq!(packed.dtype, dtype, "{name}");
        let kind = if dtype == Dtype::Q4K { Q4_K } else { Q6_K };
        file.tensor(&format!("{name}.weight"), &[rows, WIDTH], kind, &packed.bytes)
    };
    let norm = |file: GgufBuilder, name: &str| {
        file.tensor(&format!("{name}.weight"), &[WIDTH], F32, &bytes_of(&[1.0; WIDTH]))
    };
    file = matrix(file, "token_embd", VOCAB, Dtype::Q4K);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}");
        file = norm(file, &name("attn_norm"));
        file = norm(file, &name("ffn_norm"));
        for (part, rows, dtype) in [
            ("attn_q", WIDTH, Dtype::Q4K),
            ("attn_k", KV_WIDTH, Dtype::Q4K),
            ("attn_v", KV_WIDTH, Dtype::Q6K),
            ("attn_output", WIDTH, Dtype::Q4K),
            ("ffn_gate", WIDTH, Dtype::Q4K),
            ("ffn_up", WIDTH, Dtype::Q4K),
            ("ffn_down", WIDTH, Dtype::Q6K),
        ] {
            file = matrix(file, &name(part), rows, dtype);
        }
    }
    file = norm(file, "output_norm");
    file = matrix(file, "output", VOCAB, Dtype::Q6K);
    std::fs::write(path, file.build()).expect("writable");
}

fn header() -> GgufBuilder {
    let names: Vec<String> = (0..VOCAB).map(|id| format!("<{id}>")).collect();
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.context_length", 512)
        .u32("llama.embedding_length", WIDTH as u32)
        .u32("llama.block_count", LAYERS as u32)
        .u32("llama.feed_forward_length", WIDTH as u32)
        .u32("llama.attention.head_count", 8)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 10_000.0)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &names)
        .f32s("tokenizer.ggml.scores", &[0.0; VOCAB])
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1)
}
