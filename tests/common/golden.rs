//! The parity fixtures: tiny checkpoints with logits of their reference implementation, and how to run them.

use llmctl_base::Result;
use llmctl_models::adapters::by_default;
use llmctl_models::load;
use llmctl_models::load::DeviceKind;
use safetensors::SafeTensors;

use crate::common::prelude::*;

/// Iterates over the checkpoints of native families that this machine has: those of the repository, and those of `parity-next` of
/// the shared fixtures.
pub fn families() -> impl Iterator<Item = &'static str> {
    let others = natives().into_iter().filter(|(_, place, _)| *place == "fixtures");
    in_repository().chain(others.map(|(family, ..)| family).filter(|family| checkpoint(family).is_dir()))
}

/// Checkpoints whose families run natively, where they are, and what is special: `recurrent` layers keep a state, and sequences go
/// back only to where a state was left; `experts`: where a router is undecided, a rounding sends a token to another.
fn natives() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
    listed("checkpoints", "native")
}

/// Iterates over those that are in the repository.
pub fn in_repository() -> impl Iterator<Item = &'static str> {
    let ours = natives().into_iter().filter(|(_, place, _)| *place == "repository");
    ours.map(|(family, ..)| family)
}

fn has(family: &str, feature: &str) -> bool {
    natives().iter().any(|(name, _, features)| *name == family && features.contains(&feature))
}

/// Returns whether a checkpoint is one of those with recurrent layers.
pub fn is_recurrent(family: &str) -> bool {
    has(family, "recurrent")
}

/// Returns whether a checkpoint is one of those with experts.
pub fn has_experts(family: &str) -> bool {
    has(family, "experts")
}

/// One prompt with what the reference computed.
pub struct GoldenPrompt {
    pub name: &'static str,
    pub tokens: Vec<u32>,
    /// Positions whose logits are stored.
    pub positions: Vec<usize>,
    /// `[positions, vocab]`.
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

/// The folder of checkpoints: the shared fixtures, else the copy in the repository.
pub fn parity_folder() -> PathBuf {
    match fixtures() {
        Some(fixtures) => fixtures.join("parity"),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity"),
    }
}

/// Returns the folder of a checkpoint of [`families`].
pub fn checkpoint(family: &str) -> PathBuf {
    let copied = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity");
    let folders = next_folder().into_iter().chain([parity_folder(), copied]);
    let mut found = folders.map(|folder| folder.join(family));
    found.find(|folder| folder.is_dir()).unwrap_or_else(|| parity_folder().join(family))
}

/// Numbers in config.json by which a reference differed from the model, by checkpoint, key and value: transformers to
/// 5.23 takes Nemotron-H's least time step from `time_step_min` (its pull request 48989 corrects that).
const OF_REFERENCE: [(&str, &str, [Option<f32>; 2]); 1] =
    [("nemotron-h", "time_step_limit", [Some(0.001), None])];

/// Returns a checkpoint as its reference computed it, with the folder that holds a changed copy.
pub fn reference_checkpoint(family: &str) -> (PathBuf, Option<TempDir>) {
    let original = checkpoint(family);
    let Some((_, key, value)) = OF_REFERENCE.iter().find(|(name, ..)| *name == family) else {
        return (original, None);
    };
    let copy = tempfile::tempdir().expect("tempdir");
    for entry in std::fs::read_dir(&original).expect("checkpoint") {
        let path = entry.expect("entry").path();
        std::fs::copy(&path, copy.path().join(path.file_name().expect("name"))).expect("copied");
    }
    let json = std::fs::read(original.join("config.json")).expect("config.json");
    let mut config: Value = serde_json::from_slice(&json).expect("config.json");
    config[*key] = serde_json::json!(value);
    let path = copy.path().join("config.json");
    std::fs::remove_file(&path).expect("a copy of a read-only file");
    std::fs::write(path, config.to_string()).expect("written");
    (copy.path().to_owned(), Some(copy))
}

/// Returns the folder of the checkpoints that are not in the repository; `None` (with a note) without shared fixtures.
pub fn next_folder() -> Option<PathBuf> {
    fixtures().map(|fixtures| fixtures.join("parity-next")).filter(|folder| folder.is_dir())
}

/// The GGUF form of a checkpoint, where there is one: in the shared fixtures, or the copy in the repository.
pub fn parity_gguf(file: &str) -> Option<PathBuf> {
    let shared = fixtures().map(|fixtures| fixtures.join("parity-gguf").join(file));
    let copied = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity-gguf").join(file);
    shared.into_iter().chain([copied]).find(|path| path.exists())
}

/// All prompts of a checkpoint.
pub fn golden_prompts(folder: &Path) -> Vec<GoldenPrompt> {
    let bytes = std::fs::read(folder.join("golden.safetensors")).expect("golden.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("golden.safetensors");
    let json = std::fs::read(folder.join("golden.json")).expect("golden.json");
    let json: Value = serde_json::from_slice(&json).expect("golden.json");
    let tensor = |name: &str, part: &str| tensors.tensor(&format!("{name}.{part}")).expect("golden tensor");
    let prompt = |name: &'static str| GoldenPrompt {
        name,
        tokens: integers(&tensor(name, "tokens")).into_iter().map(|token| token as u32).collect(),
        positions: integers(&tensor(name, "positions")),
        logits: floats(&tensor(name, "logits")),
        greedy: serde_json::from_value(json["prompts"][name]["greedy"].clone()).expect("greedy ids"),
    };
    ["short", "medium", "long"].map(prompt).into()
}

fn integers(tensor: &TensorView<'_>) -> Vec<usize> {
    let width = tensor.data().len() / tensor.shape()[0];
    let integer = |bytes: &[u8]| bytes.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte));
    tensor.data().chunks(width).map(integer).collect()
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    tensor.data().chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("4 bytes"))).collect()
}

/// Load options of the parity table: everything in f32.
pub fn exact() -> LoadOptions {
    LoadOptions {
        device: Device::Cpu(cpu(2)),
        dtype: Some(Dtype::F32),
        kv_type: KvType::F32,
        ..LoadOptions::default()
    }
}

/// The same on candle's CPU device, which shares all of our code with its GPUs.
pub fn on_candle() -> LoadOptions {
    LoadOptions { device: Device::Candle(DeviceKind::Cpu), ..exact() }
}

/// Loads a checkpoint folder or a GGUF file.
pub fn load_model(path: &Path, options: &LoadOptions) -> Result<LoadedModel, LoadError> {
    let source = match path.is_dir() {
        true => ModelSource::Folder(path.into()),
        false => ModelSource::Gguf(path.into()),
    };
    let resolved = Resolved::new(path.display().to_string(), source);
    load::load(&resolved, options, &mut |_, _| ())
}

/// One sequence fed to a model in chunks, as the engine would.
pub struct Fed<'a> {
    model: &'a mut dyn Model,
    table: PageTable,
}

impl<'a> Fed<'a> {
    pub fn new(model: &'a mut dyn Model) -> Self {
        let pool = page_pool(&*model, 64);
        Self { model, table: PageTable::new(&pool) }
    }

    /// Logits of every token of `tokens`, `[tokens, vocab]`.
    pub fn feed(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let feed = |tokens| feed(&mut *self.model, &mut self.table, tokens);
        tokens.chunks(chunk).flat_map(feed).collect()
    }
}

/// Room for sequences of `num_pages` pages in all groups.
pub fn page_pool(model: &dyn Model, num_pages: usize) -> PagePool {
    let groups = &model.spec().groups;
    PagePool::new(groups, groups.iter().map(|group| num_pages * group.page_bytes).sum())
}

/// Appends tokens to a sequence in one step, with the adapters that the model was loaded with; logits of all of them.
pub fn feed(model: &mut dyn Model, table: &mut PageTable, tokens: &[u32]) -> Vec<f32> {
    let start = table.len();
    for copy in table.extend(tokens.len()).expect("enough pages") {
        model.copy_page(copy.from, copy.to).expect("copy");
    }
    let row = |(index, &token)| Row::known(token, start + index, 0, true);
    let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    let adapters = by_default(&model.spec().adapters);
    let batch = Batch { rows: &rows, tables: &[table], images: &[], adapters: &[&adapters] };
    model.forward(&batch).expect("forward").values
}

/// Logits of the last of `tokens`, fed in chunks of which all rows want logits or only the last row of the last one.
pub fn last_logits(model: &mut dyn Model, table: &mut PageTable, tokens: &[u32], all: bool) -> Vec<f32> {
    let (mut last, end) = (Vec::new(), table.len() + tokens.len());
    for chunk in tokens.chunks(29) {
        let start = table.len();
        for copy in table.extend(chunk.len()).expect("enough pages") {
            model.copy_page(copy.from, copy.to).expect("copied");
        }
        let row = |(index, &token)| Row::known(token, start + index, 0, all || start + index + 1 == end);
        let rows: Vec<Row> = chunk.iter().enumerate().map(row).collect();
        let logits = model.forward(&Batch::new(&rows, &[table])).expect("forward");
        last = logits.len().checked_sub(1).map_or(last, |row| logits.row(row).to_vec());
    }
    last
}

/// The largest difference between computed logits of all positions and the stored ones of some.
pub fn worst_difference(prompt: &GoldenPrompt, logits: &[f32]) -> f32 {
    let vocab = logits.len() / prompt.tokens.len();
    let rows = prompt.positions.iter().zip(prompt.logits.chunks(vocab));
    rows.flat_map(|(&position, stored)| logits[position * vocab..].iter().zip(stored))
        .map(|(computed, stored)| (computed - stored).abs())
        .fold(0.0, larger)
}

/// The largest difference between values that should be the same; infinite when there are more of one.
pub fn largest_difference(left: &[f32], right: &[f32]) -> f32 {
    if left.len() != right.len() {
        return f32::INFINITY;
    }
    left.iter().zip(right).map(|(left, right)| (left - right).abs()).fold(0.0, larger)
}

/// `f32::max`, except that what is not a number is the largest of all, where `f32::max` would drop it.
fn larger(worst: f32, difference: f32) -> f32 {
    if difference.is_nan() { f32::INFINITY } else { worst.max(difference) }
}

/// The most likely token and by how much it leads.
pub fn top_two(logits: &[f32]) -> (u32, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0] as u32, logits[order[0]] - logits[order[1]])
}

/// Whether numbers are the same, bit by bit.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Root mean square of the difference, relative to that of what was expected.
pub fn relative_distance(got: &[f32], expected: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>();
    assert_eq!(got.len(), expected.len());
    let difference = squares(&mut got.iter().zip(expected).map(|(got, expected)| got - expected));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}
