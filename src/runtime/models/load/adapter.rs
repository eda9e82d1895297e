//! Reads LoRA adapters: folders as PEFT saves them, and GGUF files as llama.cpp's `convert_lora_to_gguf.py` writes them.
//!
//! PEFT's form: `adapter_config.json` (PEFT's `LoraConfig`) beside `adapter_model.safetensors`, whose tensors are
//! `base_model.model.<module>.lora_A.weight` `[rank, in]` and `lora_B.weight` `[out, rank]`. GGUF's: `general.type` is `adapter`,
//! `adapter.type` is `lora`, and each matrix has `<tensor>.lora_a` and `<tensor>.lora_b` of these shapes, with a dimension of
//! experts in front where the tensor has one; rows are in the order of the GGUF model's. PEFT's form has adapters of stacked experts
//! too (`target_parameters`), and those of a module for each expert. An adapter of one form fits models
//! of the same form alone. What a configuration asks for beyond that (DoRA, biases, whole modules) is refused by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::{Regex, RegexBuilder};
use serde_json::Value;

use super::ModelFiles;
use super::gguf::Gguf;
use super::hf::require_json;
use super::safetensors::Safetensors;
use crate::model::low_rank::{Adapter, LowRankMatrices};
use crate::model::weights::to_f32;
use crate::tensor::{HostTensor, TensorSource};
use llmctl_base::error::{LoadError, LoadResult};
use llmctl_kernel::Dtype;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Bytes of a compiled pattern.
const MAX_REGEX: usize = 1 << 16;

/// Parameters of stacked experts, in the order in which transformers' modules have them.
const PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Keys of PEFT's configuration that change what is computed, and are not supported where they are set.
const REFUSED: &str = "use_dora bias lora_bias modules_to_save fan_in_fan_out alora_invocation_tokens layer_replication \
                       trainable_token_indices use_qalora use_bdlora arrow_config";

/// An adapter to load with a model.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterFile {
    /// A GGUF file, a folder of PEFT, or its file of weights.
    pub path: PathBuf,
    /// Factor for requests that name no adapters; 0 leaves it out of them.
    pub scale: f32,
}

impl AdapterFile {
    /// Returns the bytes of its matrices, about as many as they take in memory; 0 if it cannot be read.
    pub fn bytes(&self) -> u64 {
        let file = if self.path.is_dir() { self.path.join(WEIGHTS) } else { self.path.clone() };
        file.metadata().map_or(0, |metadata| metadata.len())
    }
}

/// Side of a tensor in a pair of matrices: down is `lora_A`, up is `lora_B`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PairSide {
    Down,
    Up,
}

/// Reads adapters for the model of `files`, in their order.
///
/// # Errors
/// [`LoadError`] naming the file, and the key or tensor at fault; for two adapters of one name, too.
pub fn read_adapters(files: &ModelFiles, asked: &[AdapterFile]) -> LoadResult<Vec<Adapter>> {
    let mut adapters: Vec<Adapter> = Vec::with_capacity(asked.len());
    for file in asked {
        let adapter = read_adapter(files, file)?;
        let twin =
            |known: &&Adapter| known.spec.name == adapter.spec.name || known.spec.key == adapter.spec.key;
        if let Some(known) = adapters.iter().find(twin) {
            let message = format!("the same adapter or the same name as {}, given before", known.spec.name);
            return Err(unsupported(&file.path, message));
        }
        adapters.push(adapter);
    }
    Ok(adapters)
}

fn read_adapter(files: &ModelFiles, AdapterFile { path, scale }: &AdapterFile) -> LoadResult<Adapter> {
    let folder = match path.is_dir() {
        true => Some(path.as_path()),
        false => path.parent().filter(|_| path.extension().is_some_and(|ending| ending == "safetensors")),
    };
    let matrices = match (folder, files.gguf()) {
        (Some(folder), None) => of_peft(&require_json(&folder.join(CONFIG))?, folder)?,
        (None, Some(model)) => of_gguf(&Gguf::open(path)?, path, architecture(model)?)?,
        (Some(_), Some(_)) => {
            let message = "an adapter in PEFT's form fits the model's folder; for a GGUF model, convert it with llama.cpp's convert_lora_to_gguf.py";
            return Err(unsupported(path, message.to_owned()));
        }
        (None, None) => {
            let message =
                "an adapter in GGUF's form fits a GGUF model; for a folder, give the adapter's own folder";
            return Err(unsupported(path, message.to_owned()));
        }
    };
    let named = folder.filter(|_| path.is_dir()).unwrap_or(path);
    let name = if path.is_dir() { named.file_name() } else { named.file_stem() };
    let name = name.map_or_else(|| "adapter".to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(Adapter::new(name, *scale, matrices))
}

fn architecture(model: &Gguf) -> LoadResult<Option<&str>> {
    model.metadata().get("general.architecture")
}

/// Reads the matrices of a GGUF file, for a model of an architecture.
///
/// # Errors
/// [`LoadError`] naming the key or tensor at fault.
pub fn of_gguf(
    gguf: &Gguf,
    path: &Path,
    model: Option<&str>,
) -> LoadResult<BTreeMap<String, LowRankMatrices>> {
    let metadata = gguf.metadata();
    let kind = |key| Ok::<_, LoadError>(metadata.get::<&str>(key)?.unwrap_or_default());
    if (kind("general.type")?, kind("adapter.type")?) != ("adapter", "lora") {
        return Err(unsupported(path, "no LoRA adapter (general.type, adapter.type)".to_owned()));
    }
    if metadata.contains("adapter.alora.invocation_tokens") {
        return Err(unsupported(
            path,
            "adapters with invocation tokens (aLoRA) are not supported".to_owned(),
        ));
    }
    let own = architecture(gguf)?;
    if own != model {
        let [own, model] = [own, model].map(Option::unwrap_or_default);
        return Err(unsupported(
            path,
            format!("made for architecture {own:?}, and the model's is {model:?}"),
        ));
    }
    let alpha: f32 = metadata.get("adapter.lora.alpha")?.unwrap_or(0.0);
    if !alpha.is_finite() {
        return Err(malformed(path, "adapter.lora.alpha", "is not finite"));
    }
    let split = |name: &str| {
        let sides = [(".lora_a", PairSide::Down), (".lora_b", PairSide::Up)];
        let found = sides.into_iter().find_map(|(ending, side)| Some((name.strip_suffix(ending)?, side)));
        found.map(|(tensor, side)| (tensor.strip_suffix(".weight").unwrap_or(tensor).to_owned(), side))
    };
    // Without alpha, llama.cpp multiplies by the scale alone.
    let factor = |_: &str, rank: usize| if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
    read_pairs(gguf, path, split, factor)
}

/// Reads the matrices of a folder of PEFT.
///
/// # Errors
/// [`LoadError`] naming the key or tensor at fault.
pub fn of_peft(config: &Value, folder: &Path) -> LoadResult<BTreeMap<String, LowRankMatrices>> {
    let path = folder.join(CONFIG);
    let config = PeftConfig::read(config, &path)?;
    let weights = folder.join(WEIGHTS);
    let tensors = Safetensors::open(&weights)?;
    let split = |name: &str| {
        let sides = [("lora_A", PairSide::Down), ("lora_B", PairSide::Up)];
        let module = name.strip_prefix("base_model.model.").unwrap_or(name);
        sides.into_iter().find_map(|(word, side)| {
            let (module, rest) = module.split_once(&format!(".{word}."))?;
            matches!(rest, "weight" | "default.weight").then(|| (module.to_owned(), side))
        })
    };
    let pairs = read_pairs(&tensors, &weights, split, |module, rank| config.factor(module, rank))?;
    let named = |(module, pair): (String, LowRankMatrices)| match config.parameter(&module) {
        None => Ok((module, pair)),
        Some(parameter) => {
            let pair = config
                .by_expert(&parameter, pair)
                .map_err(|message| malformed(&weights, &module, &message))?;
            Ok((parameter, pair))
        }
    };
    pairs.into_iter().map(named).collect()
}

/// What PEFT's configuration says of an adapter (`LoraConfig`, peft 0.21).
struct PeftConfig {
    rank: usize,
    alpha: f32,
    /// Divides by the root of the rank (rsLoRA).
    by_root: bool,
    /// Ranks and alphas of modules whose name a pattern fits.
    ranks: Vec<(Regex, f32)>,
    alphas: Vec<(Regex, f32)>,
    /// Parameters of stacked experts in the order in which modules have them: PEFT wraps the first one innermost.
    parameters: Vec<&'static str>,
}

impl PeftConfig {
    fn read(config: &Value, path: &Path) -> LoadResult<Self> {
        let refused = |key: &str, value: &Value| {
            let message =
                format!("{key} = {value} is not supported: llmctl runs LoRA on weights as they are");
            Err(unsupported(path, message))
        };
        if let Some(kind) = config.get("peft_type").filter(|kind| *kind != "LORA") {
            return refused("peft_type", kind);
        }
        // Keys that change what is computed, where they are set.
        let is_set = |value: &&Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(members) => !members.is_empty(),
            value => **value != "none",
        };
        for key in REFUSED.split(' ') {
            if let Some(value) = config.get(key).filter(is_set) {
                return refused(key, value);
            }
        }
        let number = |key: &str, value: &Value| {
            let number = value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
            number.ok_or_else(|| malformed(path, key, &format!("{value} is no number")))
        };
        let patterns = |key: &str| {
            let listed = config.get(key).and_then(Value::as_object).into_iter().flatten();
            let pattern = |(pattern, value): (&String, &Value)| {
                let regex = RegexBuilder::new(&format!(r"^(?:(?:.*\.)?(?:{pattern}))$"))
                    .size_limit(MAX_REGEX)
                    .build();
                let regex = regex.map_err(|_| malformed(path, key, &format!("{pattern:?} is no pattern")))?;
                Ok((regex, number(key, value)?))
            };
            listed.map(pattern).collect::<LoadResult<Vec<_>>>()
        };
        let targets = config.get("target_parameters").and_then(Value::as_array).into_iter().flatten();
        let targets: Vec<&str> = targets.filter_map(Value::as_str).collect();
        let is_target = |name: &str| targets.iter().any(|target| target.rsplit('.').next() == Some(name));
        let parameters: Vec<&str> = PARAMETERS.into_iter().filter(|name| is_target(name)).collect();
        // Before 0.20 the matrices changed sides, which square ones do not show.
        let version = config.get("peft_version").and_then(Value::as_str).unwrap_or_default();
        let minor = |version: &str| version.strip_prefix("0.")?.split('.').next()?.parse::<u32>().ok();
        let is_old = version.is_empty() || minor(version).is_some_and(|minor| minor < 20);
        if targets.len() != parameters.len() || !targets.is_empty() && is_old {
            let why = if is_old { ": load and save it with PEFT 0.20 or newer" } else { "" };
            let message =
                format!("target_parameters = {targets:?} of PEFT {version:?} are not supported{why}");
            return Err(unsupported(path, message));
        }
        Ok(Self {
            // PEFT's defaults.
            rank: config
                .get("r")
                .and_then(Value::as_u64)
                .map_or(8, |rank| usize::try_from(rank).unwrap_or(0)),
            alpha: config.get("lora_alpha").map_or(Ok(8.0), |value| number("lora_alpha", value))?,
            by_root: config.get("use_rslora").is_some_and(|value| *value == true),
            ranks: patterns("rank_pattern")?,
            alphas: patterns("alpha_pattern")?,
            parameters,
        })
    }

    /// Returns the factor of a module's product; the rank of stacked experts is that of one.
    fn factor(&self, module: &str, rank: usize) -> f32 {
        let parameter = self.parameter(module);
        let rank = parameter.as_ref().map_or(rank, |parameter| self.rank_of(parameter)) as f32;
        let alpha = fitting(&self.alphas, parameter.as_deref().unwrap_or(module)).unwrap_or(self.alpha);
        alpha / if self.by_root { rank.sqrt() } else { rank }
    }

    fn rank_of(&self, module: &str) -> usize {
        fitting(&self.ranks, module).map_or(self.rank, |rank| rank as usize)
    }

    /// Returns the name of the stacked experts' parameter that a wrapped module's matrices change, e.g. `layers.0.mlp.experts` of
    /// `down_proj`, and one level further in `layers.0.mlp.experts.base_layer` of `gate_up_proj`.
    fn parameter(&self, module: &str) -> Option<String> {
        let experts = module.trim_end_matches(".base_layer");
        let depth = (module.len() - experts.len()) / ".base_layer".len();
        let at = self.parameters.len().checked_sub(depth + 1).filter(|_| experts.ends_with(".experts"))?;
        Some(format!("{experts}.{}", self.parameters[at]))
    }

    /// Separates the matrices of experts: rows of the first are by expert and then by rank, columns of the second the other way
    /// round (peft's `ParamWrapper.get_delta_weight`).
    fn by_expert(&self, parameter: &str, pair: LowRankMatrices) -> Result<LowRankMatrices, String> {
        let LowRankMatrices { down, up, factor } = pair;
        let ([rows, input], [out, cols], rank) = match (&down.shape[..], &up.shape[..]) {
            (&[rows, input], &[out, cols]) => ([rows, input], [out, cols], self.rank_of(parameter)),
            _ => return Err("is no matrix".to_owned()),
        };
        if rank == 0 || rows != cols || !rows.is_multiple_of(rank) {
            return Err(format!("{rows} rows are no whole number of experts of rank {rank}"));
        }
        let experts = rows / rank;
        let size = up.dtype.block_bytes();
        let mut bytes = Vec::with_capacity(up.bytes.len());
        for expert in 0..experts {
            for row in 0..out {
                for index in 0..rank {
                    let at = (row * cols + index * experts + expert) * size;
                    bytes.extend_from_slice(&up.bytes[at..at + size]);
                }
            }
        }
        let up = HostTensor::new(up.dtype, vec![experts, out, rank], bytes.into())?;
        let down = HostTensor { shape: vec![experts, rank, input], ..down };
        Ok(LowRankMatrices { down, up, factor })
    }
}

/// Returns the value of the first pattern that fits a module's name.
fn fitting(patterns: &[(Regex, f32)], module: &str) -> Option<f32> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

/// Reads pairs of matrices; `split` tells of a tensor which module and side it is.
fn read_pairs(
    source: &dyn TensorSource,
    path: &Path,
    split: impl Fn(&str) -> Option<(String, PairSide)>,
    factor: impl Fn(&str, usize) -> f32,
) -> LoadResult<BTreeMap<String, LowRankMatrices>> {
    let mut sides: BTreeMap<String, [Option<HostTensor>; 2]> = BTreeMap::new();
    for name in source.names() {
        let Some((module, side)) = split(&name) else {
            return Err(unsupported(path, format!("tensor {name:?} is no matrix of a LoRA adapter")));
        };
        let tensor = source.tensor(&name)?.ok_or_else(|| malformed(path, &name, "it cannot be read"))?;
        check(path, &name, &tensor)?;
        sides.entry(module).or_default()[usize::from(side == PairSide::Up)] = Some(tensor);
    }
    if sides.is_empty() {
        return Err(malformed(path, "tensors", "there are none"));
    }
    let pair = |(module, pair): (String, [Option<HostTensor>; 2])| {
        let [Some(down), Some(up)] = pair else {
            return Err(malformed(path, &module, "one matrix of the pair is missing"));
        };
        let (rank, _) = down.rows_cols();
        let rank = rank / if down.shape.len() == 3 { down.shape[0] } else { 1 };
        if up.shape.len() != down.shape.len() || up.shape.last() != Some(&rank) {
            let message = format!("matrices of {:?} and {:?} are no pair", down.shape, up.shape);
            return Err(malformed(path, &module, &message));
        }
        let factor = factor(&module, rank);
        Ok((module, LowRankMatrices { down, up, factor }))
    };
    sides.into_iter().map(pair).collect()
}

/// Checks that a tensor is a matrix, or one for each expert, of finite floats.
fn check(path: &Path, name: &str, tensor: &HostTensor) -> LoadResult<()> {
    if !matches!(tensor.shape.len(), 2 | 3) || !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
    {
        let message = format!("{} {:?}; a matrix of floats is expected", tensor.dtype.name(), tensor.shape);
        return Err(malformed(path, name, &message));
    }
    match to_f32(tensor).iter().all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(malformed(path, name, "has values that are not finite")),
    }
}

fn malformed(path: &Path, what: &str, message: &str) -> LoadError {
    LoadError::malformed(path, what, message.to_owned())
}

fn unsupported(path: &Path, message: String) -> LoadError {
    LoadError::Unsupported { path: path.into(), message }
}
