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
}

/// A checkpoint of a family: its config.json and the shapes of its tensors are in a table.
pub fn checkpoint(family: &str) -> Checkpoint {
    let config = listed("candle_checkpoints", &format!("{family} config")).remove(0);
    let mut made = Checkpoint { config, tensors: BTreeMap::new() };
    for (name, shape) in listed::<(&str, Vec<usize>)>("candle_checkpoints", family) {
        let layers = if name.contains("{layer}") { 0..LAYERS } else { 0..1 };
        layers.for_each(|layer| made.add(name.replace("{layer}", &layer.to_string()), &shape));
    }
    made
}
