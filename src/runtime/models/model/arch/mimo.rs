//! MiMo V2 Flash: five of six layers have a window, more heads of keys and values, and learned scores without a value; values are
//! narrower than keys, and scaled; the first layer is dense, the others have experts weighed by sigmoids. MiMo V2.5 has queries,
//! keys and values in one matrix of as many parts as a full layer has heads of keys. Sources: transformers `MiMoV2FlashConfig`;
//! SGLang `mimo_v2.load_mimo_v2_qkv_proj_weight` and llama.cpp's converter for the parts; llama.cpp's `mimo2` for GGUF.

use serde_json::{Map, Value, json};

use super::deepseek::{ExpertFacts, set_experts};
use super::dense::ConfigDefaults;
use super::gated_families::set_tables;
use super::{ConfigReader, Description, Family};
use crate::model::config::{AttentionConfig, ExpertWeights, PartNames};
use llmctl_base::error::LoadResult;

const ROTATED: f32 = 0.334;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_kv_heads: Some(4),
        head_dim: Some(192),
        context_length: 131_072,
        rope_theta: 5e6,
        rotated: ROTATED,
        norm_eps: 1e-5,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    adjust,
    parse: |family, reader| {
        let keys = if reader.is_gguf() { gguf_keys(reader) } else { class_keys(reader)? };
        family.dense(family.defaults, &reader.with(keys))
    },
    ..Family::new("mimo-v2", &["mimo_v2_flash", "mimo_v2"], &["mimo2"])
};

const FACTS: ExpertFacts = ExpertFacts {
    dense: ("first_k_dense_replace", 1),
    parts: PartNames { sinks: ["self_attn.attention_sink_bias", "attn_sinks.weight"], ..PartNames::LLAMA },
    ..ExpertFacts::DEEPSEEK
};

/// Limit on the parts of one matrix.
const MAX_PARTS: usize = 1024;

/// Parts of one matrix where config.json does not say how many heads of keys there are.
pub const DEFAULT_PARTS: usize = 4;

const VALUE_DIM: &str = "v_head_dim";
const SLIDING_HEADS: &str = "swa_num_key_value_heads";

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    let num_layers = description.config.layers.len();
    set_experts(description, reader, &FACTS)?;
    if reader.is_gguf() {
        description.experts_mut().for_each(|experts| experts.weights = ExpertWeights::SigmoidOfUsed);
    }
    let slides = match reader.is_gguf() {
        true => reader.sliding_pattern(num_layers, 6)?,
        false => reader.sliding_or(num_layers, |layer| layer > 0 && !(layer + 1).is_multiple_of(6))?,
    };
    set_tables(description, reader, &slides, (reader.window()?.or(Some(129)), ROTATED.into()))?;
    set_kv_heads(description, reader, &slides)?;
    set_qkv_parts(description, reader)?;
    let head_dim = description.config.attentions().next().map_or(0, |attention| attention.head_dim);
    let value_dim = reader.size_or(VALUE_DIM, 128, head_dim)?;
    let scale_key = reader.pick("attention_value_scale", "attention.value_scale");
    let default = if reader.is_gguf() || !reader.is_absent(scale_key) { 1.0 } else { 0.707 };
    let value_scale = reader.number(scale_key)?.unwrap_or(default);
    let has_sinks = reader.flag("add_swa_attention_sink_bias")?.unwrap_or(true);
    for (layer, attention) in description.config.attentions_mut() {
        attention.narrow_values = Some(value_dim).filter(|dim| *dim < head_dim);
        attention.value_scale = value_scale;
        let is_stored = || reader.value(&format!("blk.{layer}.attn_sinks.weight")).is_some();
        attention.has_sinks = slides[layer] && has_sinks && (!reader.is_gguf() || is_stored());
    }
    description.leave_prediction_out(reader, "num_nextn_predict_layers")
}

/// Sets the heads of keys and values, which layers with a window have more of.
fn set_kv_heads(description: &mut Description, reader: &ConfigReader, slides: &[bool]) -> LoadResult<()> {
    const LISTED: &str = "attention.head_count_kv";
    let listed = if reader.is_gguf() { reader.counts(LISTED, slides.len())? } else { None };
    let sliding = reader.count(SLIDING_HEADS)?;
    for (layer, attention) in description.config.attentions_mut() {
        let count = match &listed {
            Some(listed) => listed[layer],
            None if slides[layer] => sliding.unwrap_or(2 * attention.num_kv_heads),
            None => attention.num_kv_heads,
        };
        if count == 0 || !attention.num_heads.is_multiple_of(count) {
            let message =
                format!("{} query heads cannot share {count} key-value heads evenly", attention.num_heads);
            return Err(reader.error(reader.pick(SLIDING_HEADS, LISTED), message));
        }
        attention.num_kv_heads = count;
    }
    Ok(())
}

/// Sets the number of parts in which a published file stores queries, keys and values together.
fn set_qkv_parts(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    const LAYOUT: &str = "attention_projection_layout";
    let parts = match reader.string(LAYOUT)?.as_deref() {
        _ if reader.is_gguf() => 1,
        None | Some("split") => 1,
        Some("fused_qkv") => reader.size_or("num_key_value_heads", DEFAULT_PARTS, MAX_PARTS)?,
        Some(other) => return Err(reader.error(LAYOUT, format!("{other:?} is not supported"))),
    };
    let is_cut = |attention: &AttentionConfig| {
        attention.num_heads.is_multiple_of(parts) && attention.num_kv_heads.is_multiple_of(parts)
    };
    if !description.config.attentions().all(is_cut) {
        return Err(reader.error(LAYOUT, format!("not all heads can be cut into {parts} parts")));
    }
    description.naming.qkv_parts = parts;
    Ok(())
}

/// Returns keys of GGUF under names that say what they mean here: keys and values differ in width, tables do not.
fn gguf_keys(reader: &ConfigReader) -> Map<String, Value> {
    const WIDTH: &str = "attention.value_length";
    const ROTATED: &str = "rope.dimension_count";
    let found = [(VALUE_DIM, reader.value(WIDTH)), ("rope.dimension_count_swa", reader.value(ROTATED))];
    let found = found.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    found.chain([(WIDTH.to_owned(), Value::Null)]).collect()
}

/// Returns the keys of a published file as the class names them.
fn class_keys(reader: &ConfigReader) -> LoadResult<Map<String, Value>> {
    for (key, of_all) in [
        ("swa_num_attention_heads", "num_attention_heads"),
        ("swa_head_dim", "head_dim"),
        ("swa_v_head_dim", VALUE_DIM),
    ] {
        if reader.value(key).is_some_and(|value| reader.value(of_all).is_some_and(|of_all| of_all != value)) {
            return Err(reader.error(key, format!("differs from {of_all}, which is not supported")));
        }
    }
    if reader.flag("add_full_attention_sink_bias")? == Some(true) {
        return Err(reader.error("add_full_attention_sink_bias", "is not supported"));
    }
    let mut keys = Map::new();
    let mut set = |key: &str, value: Option<Value>| value.map(|value| keys.insert(key.to_owned(), value));
    set("rms_norm_eps", reader.value("layernorm_epsilon"));
    set("layer_types", kinds(reader, "hybrid_layer_pattern", ["full_attention", "sliding_attention"]));
    set("mlp_layer_types", kinds(reader, "moe_layer_freq", ["dense", "sparse"]));
    set("sliding_window", reader.count("sliding_window_size")?.map(|before| (before + 1).into()));
    if reader.value("rope_parameters").is_none_or(|all| all.get("full_attention").is_none()) {
        let factor = reader.value("partial_rotary_factor").unwrap_or(json!(ROTATED));
        let table = |theta, default: f64| {
            let theta = reader.value(theta).unwrap_or(json!(default));
            json!({"rope_theta": theta, "partial_rotary_factor": factor})
        };
        let (full, sliding) = (table("rope_theta", 5e6), table("swa_rope_theta", 1e4));
        set("rope_parameters", Some(json!({"full_attention": full, "sliding_attention": sliding})));
    }
    Ok(keys)
}

/// Returns the kinds of the layers that a list of 0 and 1 names.
pub fn kinds(reader: &ConfigReader, key: &str, names: [&str; 2]) -> Option<Value> {
    let listed = reader.value(key)?;
    Some(listed.as_array()?.iter().map(|kind| names[usize::from(kind.as_u64() != Some(0))]).collect())
}
