//! Writes checkpoints of tests as GGUF files, as llama.cpp's converter does: what all families share. The names and the
//! rearrangements of a family are in its test.

use llmctl_models::model::weights::to_f32;

use super::gguf::{F32, KIND_BOOL};
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

/// As [`paired`], of all queries and keys.
pub fn pair_heads(tensors: &mut BTreeMap<String, Tensor>, head_dim: usize) {
    for (name, tensor) in tensors {
        if name.ends_with(".q_proj.weight") || name.ends_with(".k_proj.weight") {
            *tensor = paired(std::mem::take(tensor), head_dim);
        }
    }
}

/// Gives norms the 1 that Qwen's checkpoints leave out, but not those of delta nets, which have it.
pub fn add_ones(tensors: &mut BTreeMap<String, Tensor>) {
    let is_norm = |name: &str| name.ends_with("norm.weight") && !name.contains("linear_attn");
    let norms = tensors.iter_mut().filter(|(name, _)| is_norm(name));
    norms.flat_map(|(_, (_, values))| values).for_each(|value| *value += 1.0);
}

/// Where a layer norms what attention gives, and not only what it takes.
pub const POST_NORM: [(&str, &str); 1] = [("post_attention_layernorm", "post_attention_norm")];

/// Returns tensors of a checkpoint under their names in GGUF: those of the table, or of `others`. `convert` makes the parts of a
/// layer, or of what is outside of layers, that are more than renamed.
pub fn renamed(
    tensors: BTreeMap<String, Tensor>,
    others: &[(&'static str, &'static str)],
    convert: impl Fn(&str, &Tensor) -> Option<Vec<(String, Tensor)>>,
) -> Vec<(String, Tensor)> {
    let mut names: BTreeMap<&str, &str> = listed("gguf", "names").into_iter().collect();
    names.extend(others.iter().copied());
    let name = |part: &str| {
        let (stem, ending) = part.strip_suffix(".weight").map_or((part, ""), |stem| (stem, ".weight"));
        let name = names.get(stem).unwrap_or_else(|| panic!("{part} has no name in GGUF"));
        format!("{name}{ending}")
    };
    let parts = |(whole, tensor): (String, Tensor)| {
        let layer = whole.strip_prefix("layers.").and_then(|within| within.split_once('.'));
        let (place, part) =
            layer.map_or((String::new(), &*whole), |(layer, part)| (format!("blk.{layer}."), part));
        let parts = convert(part, &tensor).unwrap_or_else(|| vec![(name(part), tensor)]);
        parts.into_iter().map(move |(name, tensor)| (format!("{place}{name}"), tensor)).collect::<Vec<_>>()
    };
    tensors.into_iter().flat_map(parts).collect()
}

/// Begins a file with what the table says of a checkpoint; `others` come on top or instead.
pub fn facts(checkpoint: &str, others: &[(&str, u32)]) -> GgufBuilder {
    facts_after(with_tokens, checkpoint, others)
}

/// As [`facts`], behind what `begin` writes of an architecture.
pub fn facts_after(
    begin: impl Fn(&str) -> GgufBuilder,
    checkpoint: &str,
    others: &[(&str, u32)],
) -> GgufBuilder {
    let mut facts: BTreeMap<&str, Value> = listed("gguf", checkpoint).into_iter().collect();
    facts.extend(others.iter().map(|(key, count)| (*key, json!(count))));
    let arch = facts.remove("architecture").expect("an architecture");
    let arch = arch.as_str().expect("a name");
    facts.iter().fold(begin(arch), |file, (key, fact)| {
        let key = format!("{arch}.{key}");
        match fact {
            Value::Bool(fact) => file.bool(&key, *fact),
            Value::String(fact) => file.text(&key, fact),
            Value::Array(facts) if facts.iter().all(Value::is_boolean) => {
                let bytes: Vec<u8> = facts.iter().map(|fact| u8::from(fact == true)).collect();
                file.array(&key, KIND_BOOL, facts.len() as u64, &bytes)
            }
            Value::Array(facts) => {
                let count = |fact: &Value| fact.as_u64().expect("a count") as u32;
                file.u32s(&key, &facts.iter().map(count).collect::<Vec<_>>())
            }
            fact if fact.is_f64() => file.f32(&key, fact.as_f64().expect("a number") as f32),
            fact => file.u32(&key, fact.as_u64().expect("a count") as u32),
        }
    })
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

/// Asserts that a file gives the bits of the folder's logits.
pub fn assert_same_bits(folder: &Path, file: impl AsRef<Path>) {
    let load = |path: &Path| load_model(path, &exact()).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let (mut from_folder, mut from_file) = (load(folder), load(file.as_ref()));
    for prompt in golden_prompts(folder) {
        let [expected, got] = [&mut from_folder, &mut from_file]
            .map(|loaded| Fed::new(&mut *loaded.model).feed(&prompt.tokens, 16));
        assert!(expected == got, "{folder:?} {}", prompt.name);
    }
}

/// Asserts that a file is refused with a word.
#[track_caller]
pub fn assert_refused(facts: GgufBuilder, tensors: &[(String, Tensor)], word: &str) {
    let error = load_model(&write(facts, tensors).path, &exact()).err().expect(word).to_string();
    assert!(error.contains(word), "{error} names {word}");
}
