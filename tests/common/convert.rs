//! Writes checkpoints of tests as GGUF files, as llama.cpp's converter does: what all families share. The names and the
//! rearrangements of a family are in its test.

use llmctl_models::model::weights::to_f32;

use super::gguf::F32;
use crate::common::prelude::*;

/// Shape and values.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// Returns the checkpoint's tensors under their names within the decoder.
pub fn checkpoint(folder: &Path) -> BTreeMap<String, Tensor> {
    let file = Safetensors::open(folder).expect("opens");
    let ours = |name: &str| {
        !name.contains("vision") && ["model.", "backbone.", "lm_head"].iter().any(|p| name.starts_with(p))
    };
    let tensors = file.names().into_iter().filter(|name| ours(name)).map(|name| {
        let tensor = file.tensor(&name).expect("reads").expect("is there");
        let name = name.replace("language_model.", "");
        let within = name.strip_prefix("model.").or(name.strip_prefix("backbone."));
        let name = within.unwrap_or(&name).to_owned();
        (name, (tensor.shape.clone(), to_f32(&tensor)))
    });
    tensors.collect()
}

/// Moves the experts of a layer into one tensor each for gate, up and down.
pub fn stack_experts(
    tensors: &mut BTreeMap<String, Tensor>,
    layer: usize,
    count: usize,
) -> Vec<(String, Tensor)> {
    let mut stack = |part: &str| {
        let (mut shape, mut all) = (Vec::new(), Vec::new());
        for expert in 0..count {
            let name = format!("layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            let (of_one, values) = tensors.remove(&name).unwrap_or_else(|| panic!("no {name}"));
            shape = [vec![count], of_one].concat();
            all.extend(values);
        }
        (format!("blk.{layer}.ffn_{part}_exps.weight"), (shape, all))
    };
    ["gate", "up", "down"].map(&mut stack).into()
}

/// Puts the rows of each head's rotary pairs side by side.
pub fn paired((shape, values): Tensor, head_dim: usize) -> Tensor {
    let (row, half) = (shape[1], head_dim / 2);
    let order = (0..shape[0]).map(|at| {
        let (head, within) = (at / head_dim, at % head_dim);
        head * head_dim + within % 2 * half + within / 2
    });
    let rows = order.flat_map(|source| values[source * row..(source + 1) * row].to_vec());
    (shape.clone(), rows.collect())
}

/// Begins a file of an architecture with the 384 tokens of the tiny checkpoints.
pub fn with_tokens(arch: &str) -> GgufBuilder {
    with_named_tokens(arch, &(0..384).map(|id| format!("<{id}>")).collect::<Vec<_>>())
}

/// As [`with_tokens`], with other names.
pub fn with_named_tokens(arch: &str, tokens: &[String]) -> GgufBuilder {
    GgufBuilder::new()
        .text("general.architecture", arch)
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", tokens)
        .f32s("tokenizer.ggml.scores", &[0.0; 384])
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1)
}

/// A written file in a folder of its own.
pub struct Written {
    _folder: TempDir,
    pub path: PathBuf,
}

impl AsRef<Path> for Written {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

/// Writes a file with these facts and tensors, in F32.
pub fn write(facts: GgufBuilder, tensors: &[(String, Tensor)]) -> Written {
    let folder = tempfile::tempdir().expect("tempdir");
    let path = folder.path().join("model.gguf");
    let add = |file: GgufBuilder, (name, (shape, values)): &(String, Tensor)| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        file.tensor(name, shape, F32, &bytes)
    };
    std::fs::write(&path, tensors.iter().fold(facts, add).build()).expect("write");
    Written { _folder: folder, path }
}

/// Returns the worst difference of a model's logits from those of the reference, which `folder` has, after checking that
/// chunks change no bit.
pub fn worst(folder: &Path, model: impl AsRef<Path>) -> f32 {
    let mut loaded = load_model(model.as_ref(), &exact()).unwrap_or_else(|error| panic!("{error}"));
    let mut worst = 0f32;
    for prompt in golden_prompts(folder) {
        let whole = Fed::new(&mut *loaded.model).feed(&prompt.tokens, usize::MAX);
        assert!(whole == Fed::new(&mut *loaded.model).feed(&prompt.tokens, 7), "{} in chunks", prompt.name);
        worst = worst.max(worst_difference(&prompt, &whole));
    }
    worst
}
