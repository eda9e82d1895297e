//! llama.cpp's mixes: which type each tensor of a quantised file gets.
//!
//! The rules are those of llama.cpp's `src/llama-quant.cpp` (`llama_tensor_get_type_impl`,
//! `tensor_type_fallback`, `tensor_allows_quantization`), so that a file has the quality that its name
//! promises elsewhere. Counters run over layers, whatever the order of the file.

use llmctl_kernel::Dtype;

/// One way to quantise a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantMix {
    pub name: &'static str,
    /// `general.file_type`.
    pub file_type: u32,
    /// Type of the tensors that no rule mentions.
    pub base: Dtype,
    size: MixSize,
}

/// Size of a mix among those of its base type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MixSize {
    Only,
    Small,
    Medium,
    Large,
}

use MixSize::{Large, Medium, Only, Small};

/// Every mix. `Q2_K` is the medium one of its base type.
pub const MIXES: [QuantMix; 18] = [
    mix("F32", 0, Dtype::F32, Only),
    mix("F16", 1, Dtype::F16, Only),
    mix("BF16", 32, Dtype::Bf16, Only),
    mix("Q8_0", 7, Dtype::Q8_0, Only),
    mix("Q6_K", 18, Dtype::Q6K, Only),
    mix("Q5_K_M", 17, Dtype::Q5K, Medium),
    mix("Q5_K_S", 16, Dtype::Q5K, Small),
    mix("Q5_1", 9, Dtype::Q5_1, Only),
    mix("Q5_0", 8, Dtype::Q5_0, Only),
    mix("Q4_K_M", 15, Dtype::Q4K, Medium),
    mix("Q4_K_S", 14, Dtype::Q4K, Small),
    mix("Q4_1", 3, Dtype::Q4_1, Only),
    mix("Q4_0", 2, Dtype::Q4_0, Only),
    mix("Q3_K_L", 13, Dtype::Q3K, Large),
    mix("Q3_K_M", 12, Dtype::Q3K, Medium),
    mix("Q3_K_S", 11, Dtype::Q3K, Small),
    mix("Q2_K", 10, Dtype::Q2K, Medium),
    mix("Q2_K_S", 21, Dtype::Q2K, Small),
];

const fn mix(name: &'static str, file_type: u32, base: Dtype, size: MixSize) -> QuantMix {
    QuantMix { name, file_type, base, size }
}

/// Facts about a model that the rules ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MixFacts {
    /// `general.architecture` of GGUF.
    pub architecture: String,
    pub num_layers: usize,
    /// 0 without experts.
    pub num_experts: usize,
    /// Query heads that share one key-value head, in the first layer.
    pub heads_per_kv_head: usize,
    pub has_imatrix: bool,
}

/// A tensor that gets a type.
#[derive(Debug, Clone, Copy)]
pub struct MixTensor<'a> {
    pub name: &'a str,
    /// Row-major, outermost first.
    pub shape: &'a [usize],
    pub dtype: Dtype,
}

/// Parts of a model that the rules treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TensorRole {
    Output,
    Embedding,
    /// Values, alone or together with queries and keys.
    Value,
    Key,
    AttentionOutput,
    Down,
    Other,
}

fn role(name: &str) -> TensorRole {
    match name {
        "output.weight" => TensorRole::Output,
        "token_embd.weight" | "per_layer_token_embd.weight" => TensorRole::Embedding,
        _ if ["attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight"]
            .iter()
            .any(|part| name.contains(part)) =>
        {
            TensorRole::Value
        }
        _ if name.contains("attn_k.weight") => TensorRole::Key,
        _ if name.contains("attn_output.weight") => TensorRole::AttentionOutput,
        _ if name.contains("ffn_down") => TensorRole::Down,
        _ => TensorRole::Other,
    }
}

/// Returns the layer in a tensor's name.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Parts of names of small or sensitive matrices that keep their type.
const KEPT: [&str; 30] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "position_embd.weight",
];

/// Returns whether a tensor is converted at all: matrices of weights, except small and sensitive ones.
fn is_converted(tensor: &MixTensor<'_>) -> bool {
    // ggml counts dimensions up to the last that is not 1, from the innermost.
    let is_matrix = tensor.shape.iter().rev().skip(1).any(|&dim| dim > 1);
    let is_kept = KEPT.iter().any(|part| tensor.name.contains(part)) || tensor.name == "token_types.weight";
    is_matrix && tensor.name.ends_with("weight") && !is_kept
}

/// State of one pass over the tensors.
struct MixPass<'a> {
    mix: QuantMix,
    facts: &'a MixFacts,
    has_output: bool,
    num_values: usize,
    /// Numbers of the next tensors of values and of the feed-forward part.
    next_value: usize,
    next_down: usize,
}

/// Returns the type of each tensor.
pub fn types(mix: QuantMix, facts: &MixFacts, tensors: &[MixTensor<'_>]) -> Vec<Dtype> {
    let mut pass = MixPass {
        mix,
        facts,
        has_output: tensors.iter().any(|tensor| tensor.name == "output.weight"),
        num_values: tensors.iter().filter(|tensor| role(tensor.name) == TensorRole::Value).count(),
        next_value: 0,
        next_down: 0,
    };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&at| (layer_of(tensors[at].name), tensors[at].name));
    let mut types: Vec<Dtype> = tensors.iter().map(|tensor| tensor.dtype).collect();
    for at in order.into_iter().filter(|&at| is_converted(&tensors[at])) {
        types[at] = match mix.base.is_quantized() {
            true => fitting(pass.choose(&tensors[at]), &tensors[at]),
            false => mix.base,
        };
    }
    types
}

/// Returns the tensors' names that must have an importance matrix in this mix: at two bits the result would be
/// useless without one.
pub fn needs_importance(mix: QuantMix, name: &str, dtype: Dtype) -> bool {
    let is_table = matches!(role(name), TensorRole::Output | TensorRole::Embedding);
    (mix.base, mix.size, dtype) == (Dtype::Q2K, Small, Dtype::Q2K) && !is_table
}

/// Returns the type, or the nearest one whose blocks divide the tensor's rows.
fn fitting(dtype: Dtype, tensor: &MixTensor<'_>) -> Dtype {
    let cols = tensor.shape.last().copied().unwrap_or(1);
    let fits = |dtype: Dtype| cols.is_multiple_of(dtype.block_len());
    let substitute = match dtype {
        _ if fits(dtype) => return dtype,
        Dtype::Q2K | Dtype::Q3K => Dtype::Q4_0,
        Dtype::Q4K => Dtype::Q5_0,
        Dtype::Q5K => Dtype::Q5_1,
        _ => Dtype::Q8_0,
    };
    if fits(substitute) { substitute } else { Dtype::F16 }
}

impl MixPass<'_> {
    /// Returns the type that the rules give a tensor, whatever its width.
    fn choose(&mut self, tensor: &MixTensor<'_>) -> Dtype {
        match role(tensor.name) {
            TensorRole::Output => self.output(tensor),
            TensorRole::Embedding if !self.has_output => self.output(tensor),
            TensorRole::Value => {
                self.next_value += 1;
                self.value(self.next_value - 1)
            }
            // A mixture of eight experts shares its attention, so more bits there cost little.
            TensorRole::Key if self.facts.num_experts == 8 => Dtype::Q8_0,
            TensorRole::Down => {
                self.next_down += 1;
                // Experts have several such tensors in a layer.
                let layer = layer_of(tensor.name).filter(|_| self.facts.num_experts > 1);
                self.down(layer.unwrap_or(self.next_down - 1))
            }
            TensorRole::AttentionOutput => self.attention_output(),
            TensorRole::Embedding | TensorRole::Key | TensorRole::Other => self.mix.base,
        }
    }

    fn is_falcon(&self) -> bool {
        self.facts.architecture == "falcon"
    }

    fn output(&self, tensor: &MixTensor<'_>) -> Dtype {
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let fits = cols.is_multiple_of(self.mix.base.block_len());
        if self.is_falcon() || !fits || self.mix.base == Dtype::Q8_0 { Dtype::Q8_0 } else { Dtype::Q6K }
    }

    fn value(&self, index: usize) -> Dtype {
        let shares_keys = self.facts.heads_per_kv_head >= 4;
        let dtype = match (self.mix.base, self.mix.size) {
            (Dtype::Q2K, _) if shares_keys => Dtype::Q4K,
            (Dtype::Q2K, Medium) => Dtype::Q3K,
            (Dtype::Q3K, Medium) if index < 2 => Dtype::Q5K,
            (Dtype::Q3K, Medium) => Dtype::Q4K,
            (Dtype::Q3K, Large) => Dtype::Q5K,
            (Dtype::Q4K | Dtype::Q5K, Medium) if wants_more_bits(index, self.num_values) => Dtype::Q6K,
            (Dtype::Q4K, Small) if index < 4 => Dtype::Q5K,
            (base, _) => base,
        };
        // With 80 layers, eight query heads share a key-value head.
        let is_70b = self.facts.num_layers == 80
            && self.facts.heads_per_kv_head > 1
            && ["llama", "qwen2"].contains(&self.facts.architecture.as_str());
        match dtype {
            _ if self.facts.num_experts == 8 => Dtype::Q8_0,
            Dtype::Q3K | Dtype::Q4K if is_70b => Dtype::Q5K,
            dtype => dtype,
        }
    }

    fn down(&self, layer: usize) -> Dtype {
        let count = self.facts.num_layers;
        let wants_more = wants_more_bits(layer, count);
        let is_early = layer < count / 8;
        match (self.mix.base, self.mix.size) {
            (Dtype::Q2K, Medium) => Dtype::Q3K,
            (Dtype::Q2K, Small) if is_early => Dtype::Q4K,
            (Dtype::Q3K, Medium) if layer < count / 16 => Dtype::Q5K,
            (Dtype::Q3K, Medium) if !self.is_falcon() || wants_more => Dtype::Q4K,
            (Dtype::Q3K, Large) => {
                if self.is_falcon() {
                    Dtype::Q4K
                } else {
                    Dtype::Q5K
                }
            }
            (Dtype::Q4K, Medium) if self.is_falcon() && layer >= count / 16 => {
                if wants_more {
                    Dtype::Q5K
                } else {
                    Dtype::Q4K
                }
            }
            (Dtype::Q4K, Medium) if self.is_falcon() || wants_more => Dtype::Q6K,
            (Dtype::Q5K, Medium) if wants_more => Dtype::Q6K,
            (Dtype::Q4K, Small) if is_early && !self.is_falcon() => Dtype::Q5K,
            // With importance, these layers are better off with a minimum.
            (Dtype::Q4_0, _) if is_early && self.facts.has_imatrix => Dtype::Q4_1,
            (Dtype::Q5_0, _) if is_early && self.facts.has_imatrix => Dtype::Q5_1,
            (base, _) => base,
        }
    }

    fn attention_output(&self) -> Dtype {
        let (base, size) = (self.mix.base, self.mix.size);
        if self.is_falcon() {
            return if (base, size) == (Dtype::Q3K, Large) { Dtype::Q4K } else { base };
        }
        let has_eight_experts = self.facts.num_experts == 8;
        match (base, size) {
            (Dtype::Q2K, Medium) | (Dtype::Q3K, Small | Medium) | (Dtype::Q4K, _) if has_eight_experts => {
                Dtype::Q5K
            }
            _ if has_eight_experts => base,
            (Dtype::Q2K, Medium) => Dtype::Q3K,
            (Dtype::Q3K, Medium) => Dtype::Q4K,
            (Dtype::Q3K, Large) => Dtype::Q5K,
            _ => base,
        }
    }
}

/// Returns whether a layer is among those that suffer most: the first and last eighth, and every third between.
fn wants_more_bits(layer: usize, count: usize) -> bool {
    let eighth = count / 8;
    layer < eighth || layer >= 7 * count / 8 || (layer - eighth) % 3 == 2
}
