//! Models of real shapes with arbitrary weights, made in memory: speed does not depend on values.

use std::borrow::Cow;
use std::collections::BTreeMap;

use llmctl_base::error::LoadError;
use llmctl_kernel::Dtype;
use llmctl_models::backend::{Backend, KvType};
use llmctl_models::model::arch::ConfigReader;
use llmctl_models::model::decoder::{Decoder, DecoderParts};
use llmctl_models::model::recognise::recognise;
use llmctl_models::tensor::{HostTensor, TensorSource, byte_len};
use serde_json::{Value, json};

use super::Failure;

/// A model of Qwen3's family; with experts if it has any.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Inner width of a layer's network, or of each expert's.
    inner: usize,
    pub vocab: usize,
    /// Number of experts, and how many a token uses.
    experts: [usize; 2],
}

/// Shapes that are measured; of Qwen3 30B-A3B a part of the layers.
pub const SHAPES: [Shape; 3] = [
    Shape {
        name: "0.6b",
        layers: 28,
        hidden: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        inner: 3072,
        vocab: 151_936,
        experts: [0; 2],
    },
    Shape {
        name: "8b",
        layers: 36,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        inner: 12_288,
        vocab: 151_936,
        experts: [0; 2],
    },
    Shape {
        name: "30b-a3b",
        layers: 8,
        hidden: 2048,
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        inner: 768,
        vocab: 151_936,
        experts: [128, 8],
    },
];

/// Small ones, for checks: heads wide enough for the kernels, which those of tests/parity are not.
pub const SMALL: [Shape; 2] = [
    Shape {
        name: "small",
        layers: 8,
        hidden: 512,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        inner: 768,
        vocab: 384,
        experts: [0; 2],
    },
    Shape {
        name: "small-experts",
        layers: 4,
        hidden: 256,
        heads: 4,
        kv_heads: 4,
        head_dim: 128,
        inner: 256,
        vocab: 384,
        experts: [8, 2],
    },
];

impl Shape {
    /// Returns all tensors as llama.cpp names them, with the types of its mix Q4_K_M.
    fn tensors(&self) -> BTreeMap<String, (Vec<usize>, Dtype)> {
        let Shape { layers, hidden, heads, kv_heads, head_dim, inner, vocab, experts: [experts, _], .. } =
            *self;
        let mut all = BTreeMap::new();
        let mut add = |name: String, shape: &[usize], dtype| drop(all.insert(name, (shape.to_vec(), dtype)));
        add("token_embd.weight".into(), &[vocab, hidden], Dtype::Q4K);
        add("output.weight".into(), &[vocab, hidden], Dtype::Q6K);
        add("output_norm.weight".into(), &[hidden], Dtype::F32);
        for layer in 0..layers {
            // The first and last eighth, and every third layer between them.
            let is_finer = layer < layers / 8 || layer >= layers * 7 / 8 || (layer - layers / 8) % 3 == 2;
            let finer = if is_finer { Dtype::Q6K } else { Dtype::Q4K };
            let mut add =
                |name: &str, shape: &[usize], dtype| add(format!("blk.{layer}.{name}.weight"), shape, dtype);
            for norm in ["attn_norm", "ffn_norm"] {
                add(norm, &[hidden], Dtype::F32);
            }
            for norm in ["attn_q_norm", "attn_k_norm"] {
                add(norm, &[head_dim], Dtype::F32);
            }
            add("attn_q", &[heads * head_dim, hidden], Dtype::Q4K);
            add("attn_k", &[kv_heads * head_dim, hidden], Dtype::Q4K);
            add("attn_v", &[kv_heads * head_dim, hidden], finer);
            add("attn_output", &[hidden, heads * head_dim], Dtype::Q4K);
            if experts == 0 {
                add("ffn_gate", &[inner, hidden], Dtype::Q4K);
                add("ffn_up", &[inner, hidden], Dtype::Q4K);
                add("ffn_down", &[hidden, inner], finer);
            } else {
                add("ffn_gate_inp", &[experts, hidden], Dtype::F32);
                add("ffn_gate_exps", &[experts, inner, hidden], Dtype::Q4K);
                add("ffn_up_exps", &[experts, inner, hidden], Dtype::Q4K);
                add("ffn_down_exps", &[experts, hidden, inner], finer);
            }
        }
        all
    }

    /// Returns the bytes of weights that decoding one token reads.
    pub fn bytes_per_token(&self) -> usize {
        let bytes = |(name, (shape, dtype)): (&String, &(Vec<usize>, Dtype))| {
            let all = byte_len(*dtype, shape).unwrap_or(0);
            match name.as_str() {
                "token_embd.weight" => 0,
                name if name.contains("_exps") => all / self.experts[0] * self.experts[1],
                _ => all,
            }
        };
        self.tensors().iter().map(bytes).sum()
    }

    fn config(&self) -> Value {
        let name = if self.experts[0] > 0 { "qwen3moe" } else { "qwen3" };
        let mut config = json!({
            "general.architecture": name, "vocab_size": self.vocab, "block_count": self.layers,
            "context_length": 4096, "embedding_length": self.hidden, "feed_forward_length": self.inner,
            "attention.head_count": self.heads, "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim, "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        });
        if self.experts[0] > 0 {
            config["expert_count"] = json!(self.experts[0]);
            config["expert_used_count"] = json!(self.experts[1]);
            config["expert_feed_forward_length"] = json!(self.inner);
        }
        config
    }

    /// Makes the weights and loads them.
    pub fn load<B: Backend>(&self, backend: B, kv_type: KvType) -> Result<Decoder<B>, Failure> {
        let config = self.config();
        let lookup = move |key: &str| {
            let key = key
                .split_once('.')
                .filter(|(prefix, _)| prefix.starts_with("qwen3"))
                .map_or(key, |(_, key)| key);
            config.get(key).cloned()
        };
        let reader = ConfigReader::gguf("synthetic".into(), lookup);
        let recognised = recognise(&reader)?;
        let description = recognised.native().ok_or("a family of the decoder")?;
        let source = Synthetic(self.tensors());
        let parts = DecoderParts {
            config: description.config.clone(),
            naming: description.naming.clone(),
            source: &source,
            context_length: 4096,
            kv_type,
            convert: &|_, _, tensor| Ok(tensor),
            adapters: &[],
            progress: &mut |_, _| (),
        };
        Ok(Decoder::load(backend, parts)?)
    }
}

/// Tensors that are made when they are asked for.
struct Synthetic(BTreeMap<String, (Vec<usize>, Dtype)>);

impl TensorSource for Synthetic {
    fn tensor(&self, name: &str) -> Result<Option<HostTensor>, LoadError> {
        let Some((shape, dtype)) = self.0.get(name) else { return Ok(None) };
        let seed = name.bytes().fold(1, |seed: u32, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        Ok(Some(if shape.len() == 1 { ones(shape[0]) } else { matrix(shape, *dtype, seed) }))
    }

    fn describe(&self, name: &str) -> Option<(Vec<usize>, Dtype)> {
        self.0.get(name).cloned()
    }

    fn names(&self) -> Vec<Cow<'_, str>> {
        self.0.keys().map(|name| name.as_str().into()).collect()
    }
}

/// Random numbers (xorshift).
pub struct Random(pub u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// Returns numbers between -1 and 1.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
    }
}

fn ones(len: usize) -> HostTensor {
    let bytes: Vec<u8> = (0..len).flat_map(|_| 1f32.to_le_bytes()).collect();
    HostTensor { dtype: Dtype::F32, shape: vec![len], bytes: bytes.into() }
}

/// Makes a matrix whose rows have about the length 1: random bytes, with factors of the right size where blocks have f16.
pub fn matrix(shape: &[usize], dtype: Dtype, seed: u32) -> HostTensor {
    let mut random = Random(seed | 1);
    let cols = shape[shape.len() - 1];
    let scale = 1.0 / (cols as f32).sqrt();
    let len = byte_len(dtype, shape).expect("a possible shape");
    if dtype == Dtype::F32 {
        let values = random.floats(len / 4).into_iter().flat_map(|value| (value * scale).to_le_bytes());
        return HostTensor { dtype, shape: shape.to_vec(), bytes: values.collect::<Vec<_>>().into() };
    }
    // Bytes of a block, where its f16 factors are, and the largest product of its other numbers.
    let (block, factors, largest): (usize, &[usize], f32) = match dtype {
        Dtype::Q4_0 => (18, &[0], 8.0),
        Dtype::Q8_0 => (34, &[0], 128.0),
        Dtype::Q2K => (84, &[80, 82], 45.0),
        Dtype::Q3K => (110, &[108], 128.0),
        Dtype::Q4K => (144, &[0, 2], 945.0),
        Dtype::Q5K => (176, &[0, 2], 1953.0),
        Dtype::Q6K => (210, &[208], 4096.0),
        _ => unreachable!("no synthetic blocks of {dtype:?}"),
    };
    // A run of blocks is repeated: it is longer than a row, and shorter to make.
    let mut run: Vec<u8> = (0..block * 1021).map(|_| (random.next() >> 11) as u8).collect();
    let factor = half::f16::from_f32(2.0 * scale / largest).to_le_bytes();
    for block in run.chunks_exact_mut(block) {
        factors.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&factor));
    }
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        bytes.extend_from_slice(&run[..run.len().min(len - bytes.len())]);
    }
    HostTensor { dtype, shape: shape.to_vec(), bytes: bytes.into() }
}
