//! Promise: candle-transformers' own models, where they load, agree with ours; a second opinion beside the stored logits.
//!
//! Where they disagree, the stored logits of transformers decide, and the table below says why candle-transformers is off.
//! A disagreement that disappears fails the test too, so that the table stays true.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models;
use llmctl::runtime::backend::KvType;
use llmctl::runtime::backend::cpu::Cpu;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::common::decoder::{from_folder, logits};
use crate::common::golden::{Golden, Prompt, deviation, goldens};

/// Largest absolute difference of a logit where both are right.
const TOLERANCE: f32 = 1e-4;

/// How far the measured size of a known disagreement may move before the entry is out of date.
const DRIFT: f32 = 0.05;

/// A family and prompt on which candle-transformers is wrong, and by how much.
struct Deviation {
    family: &'static str,
    prompt: &'static str,
    measured: f32,
    reason: &'static str,
}

const fn deviates(
    family: &'static str,
    prompt: &'static str,
    measured: f32,
    reason: &'static str,
) -> Deviation {
    Deviation { family, prompt, measured, reason }
}

const ONE_TOO_MANY: &str = "its mask lets a row see window + 1 tokens";
const ALL_LAYERS: &str = "it gives every layer the window, and window + 1 tokens of it";
const NO_MULTIPLIERS: &str = "it ignores the embedding, attention, residual and logits multipliers";

const DEVIATIONS: &[Deviation] = &[
    deviates("gemma2", "medium", 0.0, ALL_LAYERS),
    deviates("gemma2", "long", 0.0, ALL_LAYERS),
    deviates("gemma3", "medium", 0.0, ONE_TOO_MANY),
    deviates("gemma3", "long", 0.0, ONE_TOO_MANY),
    deviates("granite", "short", 0.0, NO_MULTIPLIERS),
    deviates("granite", "medium", 0.0, NO_MULTIPLIERS),
    deviates("granite", "long", 0.0, NO_MULTIPLIERS),
    deviates("mistral", "medium", 0.0, ONE_TOO_MANY),
    deviates("mistral", "long", 0.0, ONE_TOO_MANY),
];

/// Logits of the last of some tokens, each call from an empty cache.
type Oracle = Box<dyn FnMut(&Tensor) -> Result<Tensor>>;

#[test]
fn candle_transformers_agrees_or_is_known_not_to() {
    let Some(goldens) = goldens() else { return };
    let mut agreed = Vec::new();
    for golden in &goldens {
        let Some(mut oracle) = oracle(golden).unwrap() else {
            eprintln!("{:<13} no oracle", golden.name);
            continue;
        };
        let mut ours = from_folder(Cpu::new(1).unwrap(), &golden.folder, KvType::F32).unwrap();
        for prompt in &golden.prompts {
            let ours = logits(&mut ours, &prompt.tokens, usize::MAX);
            let (from_golden, from_ours) = compare(&mut oracle, prompt, &ours).unwrap();
            let known =
                DEVIATIONS.iter().find(|known| known.family == golden.name && known.prompt == prompt.name);
            let note = known.map_or("agrees", |known| known.reason);
            let name = format!("{} {}", golden.name, prompt.name);
            eprintln!("{name:<20} {from_golden:.3e} from the golden, {from_ours:.3e} from ours: {note}");
            match known {
                None => {
                    assert!(from_golden.max(from_ours) <= TOLERANCE, "{name}: {from_golden:e} {from_ours:e}")
                }
                Some(Deviation { measured, .. }) => assert!(
                    (from_golden / measured - 1.0).abs() <= DRIFT
                        && (from_ours / measured - 1.0).abs() <= DRIFT,
                    "{name} was {measured:e} off, now {from_golden:e}: bring the table up to date"
                ),
            }
            if known.is_none() {
                agreed.push(golden.name.as_str());
            }
        }
    }
    agreed.dedup();
    let families = [
        "gemma2",
        "gemma3",
        "llama",
        "llama-untied",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    ];
    assert_eq!(agreed, families, "families with at least one prompt on which all agree");
}

/// The oracle's largest distance from the stored logits and from ours, over the stored positions.
fn compare(oracle: &mut Oracle, prompt: &Prompt, ours: &[f32]) -> Result<(f32, f32)> {
    let vocab = ours.len() / prompt.tokens.len();
    let (mut from_golden, mut from_ours) = (0.0f32, 0.0f32);
    for (index, &position) in prompt.positions.iter().enumerate() {
        let tokens = Tensor::new(&prompt.tokens[..=position], &Device::Cpu)?.unsqueeze(0)?;
        let theirs = oracle(&tokens)?.flatten_all()?.to_vec1::<f32>()?;
        from_golden = from_golden.max(deviation(&theirs, prompt.logits(index)));
        from_ours = from_ours.max(deviation(&theirs, &ours[position * vocab..(position + 1) * vocab]));
    }
    Ok((from_golden, from_ours))
}

/// candle-transformers' model of a checkpoint in f32; `None` where it has none for the family or we have none yet.
fn oracle(golden: &Golden) -> Result<Option<Oracle>> {
    let mut tensors = candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu)?;
    let config = published_form(&golden.folder.join("config.json"));
    if config["model_type"] == "granite" {
        // It always wants an output matrix of its own.
        tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    }
    let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    macro_rules! with_cache_inside {
        ($model:expr) => {{
            let mut model = $model;
            Box::new(move |tokens: &Tensor| {
                model.clear_kv_cache();
                model.forward(tokens, 0)
            }) as Oracle
        }};
    }
    Ok(Some(match golden.name.as_str() {
        "llama" | "llama-untied" => {
            let config = read::<models::llama::LlamaConfig>(config).into_config(false);
            let model = models::llama::Llama::load(weights, &config)?;
            Box::new(move |tokens| {
                let mut cache = models::llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
                model.forward(tokens, 0, &mut cache)
            })
        }
        "granite" => {
            let config = read::<models::granite::GraniteConfig>(config).into_config(false);
            let model = models::granite::Granite::load(weights, &config)?;
            Box::new(move |tokens| {
                let mut cache = models::granite::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
                model.forward(tokens, 0, &mut cache)
            })
        }
        "gemma2" => with_cache_inside!(models::gemma2::Model::new(false, &read(config), weights)?),
        "gemma3" => with_cache_inside!(models::gemma3::Model::new(false, &read(config), weights)?),
        "mistral" => with_cache_inside!(models::mistral::Model::new(&read(config), weights)?),
        "olmo2" => with_cache_inside!(models::olmo2::Model::new(&read(config), weights)?),
        "phi3" => with_cache_inside!(models::phi3::Model::new(&read(config), weights)?),
        "qwen2" => with_cache_inside!(models::qwen2::ModelForCausalLM::new(&read(config), weights)?),
        "qwen3" => with_cache_inside!(models::qwen3::ModelForCausalLM::new(&read(config), weights)?),
        "smollm3" => {
            with_cache_inside!(models::smol::smollm3::ModelForCausalLM::new(&read(config), weights)?)
        }
        _ => return Ok(None),
    }))
}

/// The config in the form before transformers 5, which is the only one that candle-transformers reads.
fn published_form(path: &std::path::Path) -> Value {
    let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    if let Some(theta) = config["rope_parameters"].get("rope_theta").cloned() {
        config["rope_theta"] = theta;
    }
    if config["model_type"] == "qwen2" && config["sliding_window"].is_null() {
        config["sliding_window"] = json!(config["max_position_embeddings"]);
    }
    config
}

fn read<C: DeserializeOwned>(config: Value) -> C {
    serde_json::from_value(config).unwrap()
}
