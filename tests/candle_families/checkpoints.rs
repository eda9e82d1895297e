//! Tiny random checkpoints of every family that runs through candle-transformers, as Hugging Face's files are.

use safetensors::Dtype;

use crate::common::prelude::*;

/// As many as the tokenizer of the parity fixtures has.
pub const VOCAB: usize = 384;
pub const HIDDEN: usize = 32;
pub const LAYERS: usize = 2;

/// A checkpoint in memory, to be changed before it is written.
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// Names of all families, as their config.json says them.
pub const FAMILIES: [&str; 12] = [
    "falcon",
    "gemma",
    "helium",
    "mamba",
    "mamba2",
    "olmo",
    "phi",
    "qwen2_moe",
    "rwkv5",
    "rwkv6",
    "stablelm",
    "starcoder2",
];

/// Those that keep a state and no rows.
pub const RECURRENT: [&str; 4] = ["mamba", "mamba2", "rwkv5", "rwkv6"];

impl Checkpoint {
    pub fn tensor(&self, name: &str) -> &[f32] {
        &self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}")).1
    }

    /// Writes it beside the tokenizer of a fixture.
    pub fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().expect("tempdir");
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            let from = parity_folder().join("llama").join(file);
            std::fs::copy(from, folder.path().join(file)).expect("a copy");
        }
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).expect("writable");
        let bytes: BTreeMap<&str, Vec<u8>> = self
            .tensors
            .iter()
            .map(|(name, (_, values))| (&**name, values.iter().flat_map(|x| x.to_le_bytes()).collect()))
            .collect();
        let view = |(name, (shape, _)): (&String, &(Vec<usize>, Vec<f32>))| {
            let view = TensorView::new(Dtype::F32, shape.clone(), &bytes[&**name]).expect("as many bytes");
            (name.clone(), view)
        };
        let views: Vec<_> = self.tensors.iter().map(view).collect();
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors"))
            .expect("writable");
        folder
    }

    fn new(config: Value) -> Self {
        let mut common = json!({
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 1024,
        });
        let keys = config.as_object().expect("an object").clone();
        common.as_object_mut().expect("an object").extend(keys);
        Self { config: common, tensors: BTreeMap::new() }
    }

    /// Random values, the same in every run: around 1 for norms and small for the rest.
    fn add(&mut self, name: String, shape: &[usize]) {
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut state = seed | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let is_norm =
            ["norm.weight", "ln1.weight", "ln2.weight", "pre_ln.weight", "ln_x.weight", "ln_out.weight"]
                .iter()
                .chain(&["norm_f.weight", "ln_f.weight"])
                .any(|end| name.ends_with(end));
        let (middle, spread) = match () {
            () if is_norm && self.config["model_type"] != "gemma" => (1.0, 0.2),
            () if name.contains("embed") || name.contains("lm_head") || name == "head.weight" => (0.0, 0.8),
            () if name.contains("time_mix_") && !name.contains("_w") => (0.5, 0.5),
            () if name.contains("time_decay") || name.contains("A_log") => (0.0, 1.0),
            () => (0.0, 0.35),
        };
        let values = (0..shape.iter().product()).map(|_| middle + spread * uniform()).collect();
        self.tensors.insert(name, (shape.to_vec(), values));
    }

    fn weight(&mut self, name: &str, shape: &[usize]) {
        self.add(format!("{name}.weight"), shape);
    }

    fn with_bias(&mut self, name: &str, shape: &[usize]) {
        self.weight(name, shape);
        self.add(format!("{name}.bias"), &shape[..1]);
    }

    /// q, k, v and o of four heads and two for keys and values; `[qkv, o]` say which have a bias.
    fn attention(&mut self, layer: &str, names: [&str; 4], biases: [bool; 2]) {
        for (index, name) in names.into_iter().enumerate() {
            let shape = [if index % 3 == 0 { HIDDEN } else { HIDDEN / 2 }, HIDDEN];
            let name = format!("{layer}.self_attn.{name}");
            if biases[usize::from(index == 3)] {
                self.with_bias(&name, &shape)
            } else {
                self.weight(&name, &shape)
            }
        }
    }

    fn gated_mlp(&mut self, name: &str, names: [&str; 3], inner: usize) {
        self.weight(&format!("{name}.{}", names[0]), &[inner, HIDDEN]);
        self.weight(&format!("{name}.{}", names[1]), &[inner, HIDDEN]);
        self.weight(&format!("{name}.{}", names[2]), &[HIDDEN, inner]);
    }
}

const QKVO: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A checkpoint of a family.
pub fn checkpoint(family: &str) -> Checkpoint {
    match family {
        "falcon" => falcon(),
        "phi" => phi(),
        "mamba" => mamba(),
        "mamba2" => mamba2(),
        "rwkv5" | "rwkv6" => rwkv(family),
        "starcoder2" => starcoder2(),
        _ => llama_like(family),
    }
}

fn falcon() -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": "falcon", "layer_norm_epsilon": 1e-5, "multi_query": true, "parallel_attn": true,
        "bias": false, "alibi": false, "new_decoder_architecture": false,
    }));
    made.weight("transformer.word_embeddings", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("transformer.h.{layer}")) {
        made.with_bias(&format!("{layer}.input_layernorm"), &[HIDDEN]);
        made.weight(&format!("{layer}.self_attention.query_key_value"), &[HIDDEN + 2 * 8, HIDDEN]);
        made.weight(&format!("{layer}.self_attention.dense"), &[HIDDEN, HIDDEN]);
        made.weight(&format!("{layer}.mlp.dense_h_to_4h"), &[4 * HIDDEN, HIDDEN]);
        made.weight(&format!("{layer}.mlp.dense_4h_to_h"), &[HIDDEN, 4 * HIDDEN]);
    }
    made.with_bias("transformer.ln_f", &[HIDDEN]);
    made
}

fn phi() -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": "phi", "layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5,
        "tie_word_embeddings": false, "qk_layernorm": false, "rope_theta": 10000.0,
    }));
    made.weight("model.embed_tokens", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("model.layers.{layer}")) {
        made.with_bias(&format!("{layer}.input_layernorm"), &[HIDDEN]);
        made.attention(&layer, ["q_proj", "k_proj", "v_proj", "dense"], [true, true]);
        made.with_bias(&format!("{layer}.mlp.fc1"), &[48, HIDDEN]);
        made.with_bias(&format!("{layer}.mlp.fc2"), &[HIDDEN, 48]);
    }
    made.with_bias("model.final_layernorm", &[HIDDEN]);
    made.with_bias("lm_head", &[VOCAB, HIDDEN]);
    made
}

fn starcoder2() -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": "starcoder2", "norm_epsilon": 1e-5, "use_bias": true, "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "sliding_window": 900,
    }));
    made.weight("model.embed_tokens", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("model.layers.{layer}")) {
        made.with_bias(&format!("{layer}.input_layernorm"), &[HIDDEN]);
        made.attention(&layer, QKVO, [true, true]);
        made.with_bias(&format!("{layer}.post_attention_layernorm"), &[HIDDEN]);
        made.with_bias(&format!("{layer}.mlp.c_fc"), &[48, HIDDEN]);
        made.with_bias(&format!("{layer}.mlp.c_proj"), &[HIDDEN, 48]);
    }
    made.with_bias("model.norm", &[HIDDEN]);
    made
}

/// Those whose tensors are named as in Llama.
fn llama_like(family: &str) -> Checkpoint {
    let mut made = Checkpoint::new(match family {
        "gemma" => {
            json!({"model_type": "gemma", "head_dim": 8, "hidden_act": "gelu", "hidden_activation": null})
        }
        "helium" => json!({"model_type": "helium", "head_dim": 8, "rms_norm_eps": 1e-8}),
        "olmo" => json!({"model_type": "olmo", "clip_qkv": 0.9}),
        "qwen2_moe" => json!({
            "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24, "use_sliding_window": false, "sliding_window": 512,
        }),
        "stablelm" => json!({
            "model_type": "stablelm", "use_qkv_bias": true, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5,
        }),
        other => panic!("no checkpoint of {other}"),
    });
    made.weight("model.embed_tokens", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("model.layers.{layer}")) {
        for name in ["input_layernorm", "post_attention_layernorm"] {
            made.norm(family, &format!("{layer}.{name}"));
        }
        made.attention(&layer, QKVO, [matches!(family, "stablelm" | "qwen2_moe"), false]);
        match family {
            "qwen2_moe" => {
                made.weight(&format!("{layer}.mlp.gate"), &[4, HIDDEN]);
                made.weight(&format!("{layer}.mlp.shared_expert_gate"), &[1, HIDDEN]);
                made.gated_mlp(&format!("{layer}.mlp.shared_expert"), GATED, 24);
                for expert in 0..4 {
                    made.gated_mlp(&format!("{layer}.mlp.experts.{expert}"), GATED, 16);
                }
            }
            _ => made.gated_mlp(&format!("{layer}.mlp"), GATED, 48),
        }
    }
    made.norm(family, "model.norm");
    if family != "gemma" {
        made.weight("lm_head", &[VOCAB, HIDDEN]);
    }
    made
}

impl Checkpoint {
    fn norm(&mut self, family: &str, name: &str) {
        match family {
            "olmo" => {}
            "stablelm" => self.with_bias(name, &[HIDDEN]),
            _ => self.weight(name, &[HIDDEN]),
        }
    }
}

fn mamba() -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2, "intermediate_size": 64,
        "time_step_rank": 2, "layer_norm_epsilon": 1e-5, "use_bias": false, "use_conv_bias": true,
        "hidden_act": "silu",
    }));
    made.weight("backbone.embeddings", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("backbone.layers.{layer}")) {
        made.weight(&format!("{layer}.norm"), &[HIDDEN]);
        made.weight(&format!("{layer}.mixer.in_proj"), &[128, HIDDEN]);
        made.weight(&format!("{layer}.mixer.conv1d"), &[64, 1, 4]);
        made.add(format!("{layer}.mixer.conv1d.bias"), &[64]);
        made.weight(&format!("{layer}.mixer.x_proj"), &[2 + 2 * 16, 64]);
        made.with_bias(&format!("{layer}.mixer.dt_proj"), &[64, 2]);
        made.add(format!("{layer}.mixer.A_log"), &[64, 16]);
        made.add(format!("{layer}.mixer.D"), &[64]);
        made.weight(&format!("{layer}.mixer.out_proj"), &[HIDDEN, 64]);
    }
    made.weight("backbone.norm_f", &[HIDDEN]);
    made
}

fn mamba2() -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": "mamba2", "state_size": 8, "conv_kernel": 4, "expand": 2, "head_dim": 16, "num_heads": 4,
        "n_groups": 2, "layer_norm_epsilon": 1e-5, "use_bias": false, "use_conv_bias": true, "rms_norm": true,
        "hidden_act": "silu", "tie_word_embeddings": true,
    }));
    let conv = 64 + 2 * 2 * 8;
    made.weight("backbone.embeddings", &[VOCAB, HIDDEN]);
    for layer in (0..LAYERS).map(|layer| format!("backbone.layers.{layer}")) {
        made.weight(&format!("{layer}.norm"), &[HIDDEN]);
        made.weight(&format!("{layer}.mixer.in_proj"), &[64 + conv + 4, HIDDEN]);
        made.weight(&format!("{layer}.mixer.conv1d"), &[conv, 1, 4]);
        made.add(format!("{layer}.mixer.conv1d.bias"), &[conv]);
        for name in ["A_log", "D", "dt_bias"] {
            made.add(format!("{layer}.mixer.{name}"), &[4]);
        }
        made.weight(&format!("{layer}.mixer.norm"), &[64]);
        made.weight(&format!("{layer}.mixer.out_proj"), &[HIDDEN, 64]);
    }
    made.weight("backbone.norm_f", &[HIDDEN]);
    made
}

fn rwkv(family: &str) -> Checkpoint {
    let mut made = Checkpoint::new(json!({
        "model_type": family, "attention_hidden_size": HIDDEN, "head_size": 8, "layer_norm_epsilon": 1e-5,
        "rescale_every": 6, "head_size_divisor": 8, "intermediate_size": null, "tie_word_embeddings": false,
    }));
    made.weight("rwkv.embeddings", &[VOCAB, HIDDEN]);
    made.with_bias("rwkv.blocks.0.pre_ln", &[HIDDEN]);
    for block in (0..LAYERS).map(|block| format!("rwkv.blocks.{block}")) {
        made.with_bias(&format!("{block}.ln1"), &[HIDDEN]);
        made.with_bias(&format!("{block}.ln2"), &[HIDDEN]);
        let attention = format!("{block}.attention");
        for name in ["key", "receptance", "value", "gate", "output"] {
            made.weight(&format!("{attention}.{name}"), &[HIDDEN, HIDDEN]);
        }
        made.with_bias(&format!("{attention}.ln_x"), &[HIDDEN]);
        for name in ["key", "value", "receptance", "gate"] {
            made.add(format!("{attention}.time_mix_{name}"), &[1, 1, HIDDEN]);
        }
        made.add(format!("{attention}.time_faaaa"), &[4, 8]);
        if family == "rwkv5" {
            made.add(format!("{attention}.time_decay"), &[4, 8]);
        } else {
            for name in ["time_mix_x", "time_mix_w", "time_decay"] {
                made.add(format!("{attention}.{name}"), &[1, 1, HIDDEN]);
            }
            made.add(format!("{attention}.time_decay_w1"), &[HIDDEN, 8]);
            made.add(format!("{attention}.time_decay_w2"), &[8, HIDDEN]);
            made.add(format!("{attention}.time_mix_w1"), &[HIDDEN, 20]);
            made.add(format!("{attention}.time_mix_w2"), &[5, 4, HIDDEN]);
        }
        let feed_forward = format!("{block}.feed_forward");
        for name in ["key", "receptance"] {
            made.add(format!("{feed_forward}.time_mix_{name}"), &[1, 1, HIDDEN]);
        }
        made.weight(&format!("{feed_forward}.key"), &[96, HIDDEN]);
        made.weight(&format!("{feed_forward}.receptance"), &[HIDDEN, HIDDEN]);
        made.weight(&format!("{feed_forward}.value"), &[HIDDEN, 96]);
    }
    made.with_bias("rwkv.ln_out", &[HIDDEN]);
    made.weight("head", &[VOCAB, HIDDEN]);
    made
}
