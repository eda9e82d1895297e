//! Step 3.5 and 3.7, text: layers differ in windows, in the number of heads and in rotary tables; heads have norms of q and k, and
//! a sigmoid of their gates; experts are weighed by sigmoids, and the networks of some layers limit what they multiply. Sources:
//! transformers `Step3p7TextConfig`; llama.cpp's `step35` for GGUF.

use serde_json::{Map, Value};

use super::deepseek::{ExpertFacts, SharedNetwork, set_experts};
use super::dense::{ConfigDefaults, MAX_LAYERS};
use super::gated_families::{HEAD_GATE, set_heads, set_tables};
use super::{ConfigReader, Description, Family};
use crate::model::config::{Activation, OutputGate, PartNames, QkNorm};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(8),
        head_dim: Some(128),
        context_length: 128_000,
        norm_eps: 1e-5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    qk_norm: QkNorm::PerHead,
    adjust,
    parse: |family, reader| match reader.is_gguf() {
        true => family.dense(family.defaults, reader),
        false => family.dense(family.defaults, &reader.with(class_keys(reader)?)),
    },
    ..Family::new("step3.5", &["step3p5", "step3p7"], &["step35"])
};

const FACTS: ExpertFacts = ExpertFacts {
    shared: [SharedNetwork::Width("share_expert_dim"), SharedNetwork::GGUF_WIDTH],
    scale: "moe_router_scaling_factor",
    dense: ("first_k_dense_replace", 3),
    parts: PartNames {
        attention_gate: HEAD_GATE,
        mlp_beside_experts: [
            ["share_expert.gate_proj", "ffn_gate_shexp"],
            ["share_expert.up_proj", "ffn_up_shexp"],
            ["share_expert.down_proj", "ffn_down_shexp"],
        ],
        router: ["moe.gate", "ffn_gate_inp"],
        expert_bias: ["moe.router_bias", "exp_probs_b.bias"],
        experts: ["moe", "ffn"],
        ..PartNames::LLAMA
    },
    ..ExpertFacts::NUMBERED
};

const LIMITS: [&str; 2] = ["swiglu_limits", "swiglu_limits_shared"];
const SLIDING: &str = "sliding_attention";
const LAYER_KINDS: &str = "layer_types";
const HEADS: &str = "num_attention_heads_per_layer";

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    set_heads(description, reader, reader.pick(HEADS, "attention.head_count"))?;
    set_experts(description, reader, &FACTS)?;
    limit_networks(description, reader, LIMITS)?;
    let slides = match reader.is_gguf() {
        true => reader.sliding_pattern(num_layers, 4)?,
        false => reader.sliding_or(num_layers, |_| false)?,
    };
    if reader.is_gguf() {
        // The file gives a head's whole width.
        description.config.ropes[0].dim /= 2;
    } else {
        (description.naming.norm_offset, description.naming.last_norm_offset) = (1.0, 1.0);
    }
    set_tables(description, reader, &slides, (reader.window()?, 1.0))?;
    let gate = Some(OutputGate::Own(Activation::Sigmoid));
    description.config.attentions_mut().for_each(|(_, attention)| attention.output_gate = gate);
    description.leave_prediction_out(reader, "num_nextn_predict_layers")
}

/// Sets the limits of each layer's networks; 0 and `null` count as none.
pub fn limit_networks(
    description: &mut Description,
    reader: &ConfigReader,
    [experts_key, networks_key]: [&'static str; 2],
) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    let limits = |key| {
        let limit = |value: &Value| match value.is_null() {
            true => Some(0.0),
            false => value.as_f64().filter(|limit| *limit >= 0.0),
        };
        let list = reader.list(key, num_layers, &format!("limits of {num_layers} layers"), limit)?;
        let activation = |limit: f64| match limit > 0.0 {
            true => Activation::LimitedSilu { limit: limit as f32 },
            false => Activation::Silu,
        };
        Ok(list.unwrap_or(vec![0.0; num_layers]).into_iter().map(activation).collect::<Vec<_>>())
    };
    let of_experts = limits(reader.pick(experts_key, "swiglu_clamp_exp"))?;
    let of_networks = limits(reader.pick(networks_key, "swiglu_clamp_shexp"))?;
    for (layer, network) in description.networks_mut() {
        network.activation = of_networks[layer];
    }
    for (layer, activation) in description.config.layers.iter_mut().zip(of_experts) {
        if let Some(experts) = &mut layer.feed_forward.experts {
            experts.mlp.activation = activation;
        }
    }
    Ok(())
}

/// Returns the keys of a published file as the class names them, without the values of layers that predict further tokens.
fn class_keys(reader: &ConfigReader) -> LoadResult<Map<String, Value>> {
    const NAMES: [(&str, &str); 4] = [
        ("num_attention_groups", "num_key_value_heads"),
        ("n_routed_experts", "num_experts"),
        ("moe_num_experts", "num_experts"),
        ("moe_top_k", "num_experts_per_tok"),
    ];
    let num_layers = reader.size("num_hidden_layers", MAX_LAYERS)?;
    let named = NAMES.into_iter().filter_map(|(theirs, ours)| Some((ours, reader.value(theirs)?)));
    let mut keys: Map<String, Value> = named.map(|(key, value)| (key.to_owned(), value)).collect();
    keys.extend(reader.cut_lists(&[LAYER_KINDS, "mlp_layer_types", LIMITS[0], LIMITS[1]], num_layers));
    if let Some(heads) = sliding_heads(reader)? {
        let of_all = reader.size("num_attention_heads", usize::MAX)?;
        let slides = reader.with(keys.clone()).sliding_or(num_layers, |_| false)?;
        let heads: Vec<_> = slides.into_iter().map(|slides| if slides { heads } else { of_all }).collect();
        keys.insert(HEADS.to_owned(), heads.into());
    }
    if let (Some(listed), None) = (sparse_layers(reader)?, keys.get("mlp_layer_types")) {
        let kind = |layer| if listed.contains(&layer) { "sparse" } else { "dense" };
        keys.insert("mlp_layer_types".to_owned(), (0..num_layers).map(kind).collect());
    }
    if reader.value("rope_parameters").is_none_or(|all| all.get("full_attention").is_none()) {
        keys.insert("rope_parameters".to_owned(), ropes(reader));
    }
    Ok(keys)
}

/// Returns the number of heads of the layers that slide.
fn sliding_heads(reader: &ConfigReader) -> LoadResult<Option<usize>> {
    const OTHER: &str = "attention_other_setting";
    let Some(other) = reader.value(OTHER) else { return reader.count("num_sliding_attention_heads") };
    for key in ["num_attention_groups", "head_dim"] {
        if other.get(key).is_some_and(|value| reader.value(key).is_some_and(|of_all| of_all != *value)) {
            return Err(reader.error(OTHER, format!("layers that differ in {key} are not supported")));
        }
    }
    let heads = other.get("num_attention_heads").filter(|heads| !heads.is_null());
    let count = heads.map(|heads| heads.as_u64().filter(|heads| *heads < 1 << 32));
    match count {
        None => Ok(None),
        Some(Some(heads)) => Ok(Some(heads as usize)),
        Some(None) => Err(reader.error(OTHER, "num_attention_heads is not a count")),
    }
}

/// Returns the layers with experts, which published files list in a string.
fn sparse_layers(reader: &ConfigReader) -> LoadResult<Option<Vec<usize>>> {
    const KEY: &str = "moe_layers_enum";
    let Some(Value::String(listed)) = reader.value(KEY) else { return reader.listed_layers(KEY) };
    let numbers = listed.split(',').map(str::trim).filter(|number| !number.is_empty());
    let numbers: Result<Vec<usize>, _> = numbers.map(str::parse).collect();
    numbers.map(Some).map_err(|_| reader.error(KEY, format!("{listed:?} is not a list of layers")))
}

/// Returns the rotary parameters of both kinds of layers, of which published files have lists by layer; only layers that see the
/// whole context are scaled.
fn ropes(reader: &ConfigReader) -> Value {
    let kinds = reader.value(LAYER_KINDS);
    let of_kind = |kind: &str| {
        let layers = kinds.as_ref().and_then(Value::as_array);
        let layer = layers.map_or(Some(0), |kinds| kinds.iter().position(|of_layer| of_layer == kind));
        let of_layer = |key| match reader.value(key)? {
            Value::Array(list) => list.get(layer?).cloned(),
            of_all => Some(of_all),
        };
        let parts = [
            ("rope_theta", of_layer("rope_theta")),
            ("partial_rotary_factor", of_layer("partial_rotary_factors")),
        ];
        let parts = parts.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        let scaling = reader.value("rope_scaling").filter(|_| kind != SLIDING);
        let scaling = scaling.and_then(|scaling| scaling.as_object().cloned()).unwrap_or_default();
        Value::Object(parts.chain(scaling).collect())
    };
    serde_json::json!({"full_attention": of_kind("full_attention"), SLIDING: of_kind(SLIDING)})
}
