//! MiniMax M3, text: MiniMax M2 with norms of each head and experts beside a shared network; in most layers an indexer chooses the
//! blocks of tokens that each KV head sees. Sources: transformers `MiniMaxM3VLTextConfig`; llama.cpp's `minimax-m3` for GGUF.

use serde_json::{Map, Value, json};

use super::deepseek::{ExpertFacts, SharedNetwork, set_experts};
use super::dense::{ConfigDefaults, MAX_WIDTH};
use super::expert_families::{clamped_swish, rotated_fraction};
use super::experts::ExpertKeys;
use super::mimo::kinds;
use super::sparse_latent::MAX_TOP_K;
use super::{ConfigReader, Description, Family};
use crate::backend::PAGE_TOKENS;
use crate::model::config::{IndexerConfig, KeyBlocks, PartNames, QkNorm};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    defaults: ConfigDefaults {
        num_heads: Some(64),
        num_kv_heads: Some(4),
        head_dim: Some(128),
        context_length: 524_288,
        rope_theta: 5e6,
        tied: Some(false),
        experts: true,
        ..ConfigDefaults::CLASS
    },
    qk_norm: QkNorm::PerHead,
    adjust,
    parse: |family, reader| {
        if reader.is_gguf() {
            return family.dense(family.defaults, reader);
        }
        let rotated = rotated_fraction(reader)?;
        family.dense(ConfigDefaults { rotated, ..family.defaults }, &reader.with(class_keys(reader)?))
    },
    ..Family::new("minimax-m3", &["minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3"], &["minimax-m3"])
};

const FACTS: ExpertFacts = ExpertFacts {
    keys: ExpertKeys { count: "num_local_experts", ..ExpertKeys::QWEN },
    shared: [
        SharedNetwork::Width("shared_intermediate_size"),
        SharedNetwork::Count("expert_shared_count", 0),
    ],
    parts: PartNames {
        mlp_beside_experts: [
            ["block_sparse_moe.shared_experts.gate_proj", "ffn_gate_shexp"],
            ["block_sparse_moe.shared_experts.up_proj", "ffn_up_shexp"],
            ["block_sparse_moe.shared_experts.down_proj", "ffn_down_shexp"],
        ],
        expert_bias: ["block_sparse_moe.e_score_correction_bias", "exp_probs_b.bias"],
        ..PartNames::MIXTRAL
    },
    ..ExpertFacts::DEEPSEEK
};

const SPARSE: &str = "sparse_attention_config";
const FREQUENCY: &str = "sparse_attention_freq";
const BLOCK_SIZE: [&str; 2] = ["index_block_size", "attention.indexer.block_size"];

fn adjust(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    set_experts(description, reader, &FACTS)?;
    let activation = clamped_swish(reader)?;
    description.networks_mut().for_each(|(_, network)| network.activation = activation);
    description.experts_mut().for_each(|experts| experts.mlp.activation = activation);
    if !reader.is_gguf() {
        (description.naming.norm_offset, description.naming.last_norm_offset) = (1.0, 1.0);
    }
    let indexed = indexed_layers(reader, description.config.layers.len())?;
    let rotated = description.config.ropes[0].dim;
    for (layer, attention) in description.config.attentions_mut().filter(|(layer, _)| indexed[*layer]) {
        let indexer = indexer(reader, rotated)?;
        if indexer.num_heads != attention.num_kv_heads {
            let key = reader.pick("index_n_heads", "attention.indexer.head_count");
            let message =
                format!("{} is not the number of key-value heads of layer {layer}", indexer.num_heads);
            return Err(reader.error(key, message));
        }
        attention.indexer = Some(indexer);
    }
    description.leave_prediction_out(reader, "num_nextn_predict_layers")
}

/// Returns which layers have an indexer. GGUF leaves it to the tensors.
fn indexed_layers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    if reader.is_gguf() {
        let has_query = |layer| reader.value(&format!("blk.{layer}.indexer.q_proj.weight")).is_some();
        return Ok((0..num_layers).map(has_query).collect());
    }
    Ok(reader.layers_of_kind(num_layers, "minimax_m3_sparse")?.unwrap_or(vec![false; num_layers]))
}

fn indexer(reader: &ConfigReader, rotated: usize) -> LoadResult<IndexerConfig> {
    let pick = |[hugging_face, gguf]: [&'static str; 2]| reader.pick(hugging_face, gguf);
    let size = |names, default, max| match reader.is_gguf() {
        true => reader.size(pick(names), max),
        false => reader.size_or(pick(names), default, max),
    };
    let dim_names = ["index_head_dim", "attention.indexer.key_length"];
    let head_dim = size(dim_names, 128, MAX_WIDTH)?;
    if head_dim < rotated {
        let message = format!("{head_dim} values cannot hold {rotated} rotated ones");
        return Err(reader.error(pick(dim_names), message));
    }
    let num_heads = size(["index_n_heads", "attention.indexer.head_count"], 4, MAX_WIDTH / head_dim)?;
    let block = size(BLOCK_SIZE, 128, MAX_TOP_K)?;
    if !block.is_multiple_of(PAGE_TOKENS) {
        let message = format!("blocks of {block} positions are no multiple of {PAGE_TOKENS}");
        return Err(reader.error(pick(BLOCK_SIZE), message));
    }
    let num_blocks = size(["index_topk_blocks", "attention.indexer.top_k"], 16, MAX_TOP_K / block)?;
    let num_local = size(["index_local_blocks", "attention.indexer.local_blocks"], 1, num_blocks)?;
    let blocks = KeyBlocks { size: block, num_local };
    let top_k = num_blocks * block;
    Ok(IndexerConfig { num_heads, head_dim, top_k, blocks, interleaved: false, key_rope: None })
}

/// Returns the keys of a published file as the class names them.
fn class_keys(reader: &ConfigReader) -> LoadResult<Map<String, Value>> {
    const SCALE: &str = "routed_scaling_factor";
    let mut keys = sparse_keys(reader)?;
    let mut set = |key: &str, value: Option<Value>| value.map(|value| keys.insert(key.to_owned(), value));
    // The published name of the activation is that of gpt-oss's.
    set("hidden_act", Some(json!("silu")));
    set("moe_intermediate_size", reader.value("intermediate_size"));
    set("intermediate_size", Some(reader.value("dense_intermediate_size").unwrap_or(json!(12288))));
    set(SCALE, Some(reader.value(SCALE).unwrap_or(json!(2.0))));
    set("mlp_layer_types", kinds(reader, "moe_layer_freq", ["dense", "sparse"]));
    // As a list it says the same as `mlp_layer_types`.
    set("moe_layer_freq", Some(Value::Null));
    Ok(keys)
}

/// Returns the keys of the indexer, which published files have in an object of their own.
fn sparse_keys(reader: &ConfigReader) -> LoadResult<Map<String, Value>> {
    const NAMES: [(&str, &str); 5] = [
        ("sparse_num_index_heads", "index_n_heads"),
        ("sparse_index_dim", "index_head_dim"),
        ("sparse_block_size", "index_block_size"),
        ("sparse_topk_blocks", "index_topk_blocks"),
        ("sparse_local_block", "index_local_blocks"),
    ];
    let Some(sparse) = reader.value(SPARSE) else { return Ok(Map::new()) };
    let sparse = sparse.as_object().ok_or_else(|| reader.error(SPARSE, "is not an object"))?;
    let sparse = reader.with(sparse.clone());
    let named = NAMES.into_iter().filter_map(|(theirs, ours)| Some((ours.to_owned(), sparse.value(theirs)?)));
    let mut keys: Map<String, Value> = named.collect();
    if sparse.flag("use_sparse_attention")? == Some(false) {
        return Ok(keys);
    }
    if sparse.count("sparse_init_block")?.is_some_and(|count| count > 0) {
        return Err(reader.error("sparse_init_block", "first blocks that are always seen are not supported"));
    }
    if let Some(other) = sparse.string("sparse_score_type")?.filter(|kind| kind != "max") {
        return Err(reader.error("sparse_score_type", format!("{other:?} is not supported")));
    }
    if let Some(kinds) = kinds(&sparse, FREQUENCY, ["full_attention", "minimax_m3_sparse"]) {
        keys.insert("layer_types".to_owned(), kinds);
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KvType;
    use crate::model::config::Activation;
    use crate::model::decoder::kv_bytes_per_token;

    /// The published configuration, as far as it matters here.
    fn published() -> Value {
        let from_fourth: Vec<u8> = (0..60).map(|layer| u8::from(layer >= 3)).collect();
        json!({"model_type": "minimax_m3_vl", "text_config": {
            "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 200_064, "max_position_embeddings": 1_048_576,
            "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "rotary_dim": 64, "partial_rotary_factor": 0.5,
            "hidden_act": "swigluoai", "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
            "num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "num_nextn_predict_layers": 1,
            "moe_layer_freq": from_fourth, "tie_word_embeddings": false, "sparse_attention_config": {
                "use_sparse_attention": true, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
                "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0,
                "sparse_local_block": 1, "sparse_attention_freq": from_fourth,
                "sparse_disable_index_value": from_fourth,
            },
        }})
    }

    fn parse(config: Value) -> LoadResult<Description> {
        let reader = ConfigReader::hugging_face("config.json".into(), config);
        Ok(super::super::parse_config(&reader)?.expect("a native family"))
    }

    #[test]
    fn the_published_configuration_means_what_the_class_makes_of_it() {
        let config = parse(published()).expect("valid").config;
        let indexer = IndexerConfig {
            num_heads: 4,
            head_dim: 128,
            top_k: 2048,
            blocks: KeyBlocks { size: 128, num_local: 1 },
            interleaved: false,
            key_rope: None,
        };
        let found: Vec<_> = config.attentions().map(|attention| attention.indexer).collect();
        assert_eq!((found[2], found[3], found[59]), (None, Some(indexer), Some(indexer)));
        assert_eq!(config.ropes[0].dim, 64);
        let activation = Activation::ClampedSwish { alpha: 1.702, limit: 7.0 };
        let of_layer = |layer: usize| {
            let feed_forward = &config.layers[layer].feed_forward;
            let dense = feed_forward.dense.as_ref().map(|dense| (dense.intermediate_size, dense.activation));
            (
                dense,
                feed_forward.experts.as_ref().map(|experts| (experts.count, experts.mlp.intermediate_size)),
            )
        };
        assert_eq!(of_layer(2), (Some((12288, activation)), None));
        assert_eq!(of_layer(3), (Some((3072, activation)), Some((128, 3072))));
        // Two bytes for each of four keys and values, and of 57 keys of indexers.
        assert_eq!(kv_bytes_per_token(&config, KvType::F16), 2 * 128 * (60 * 8 + 57));
    }

    #[test]
    fn keys_of_the_class_stand_for_those_of_the_file() {
        let mut config = published();
        let text = &mut config["text_config"];
        text["sparse_attention_config"] = Value::Null;
        text["moe_layer_freq"] = Value::Null;
        let kinds = |name: &str, first: &str| -> Vec<String> {
            (0..60).map(|layer| if layer < 3 { first } else { name }.to_owned()).collect()
        };
        text["layer_types"] = json!(kinds("minimax_m3_sparse", "full_attention"));
        text["mlp_layer_types"] = json!(kinds("sparse", "dense"));
        (text["hidden_act"], text["routed_scaling_factor"]) = (json!("silu"), Value::Null);
        assert_eq!(parse(config).expect("valid"), parse(published()).expect("valid"));
    }

    #[test]
    fn facts_that_cannot_be_are_refused_by_name() {
        for (key, value, named) in [
            ("sparse_block_size", json!(48), "index_block_size"),
            ("sparse_topk_blocks", json!(0), "index_topk_blocks"),
            ("sparse_topk_blocks", json!(1 << 20), "index_topk_blocks"),
            ("sparse_local_block", json!(0), "index_local_blocks"),
            ("sparse_local_block", json!(17), "index_local_blocks"),
            ("sparse_num_index_heads", json!(8), "index_n_heads"),
            ("sparse_index_dim", json!(32), "index_head_dim"),
            ("sparse_init_block", json!(1), "sparse_init_block"),
            ("sparse_score_type", json!("mean"), "sparse_score_type"),
            ("sparse_attention_freq", json!([0, 1]), "layer_types"),
        ] {
            let mut config = published();
            config["text_config"]["sparse_attention_config"][key] = value;
            let error = parse(config).expect_err(key).to_string();
            assert!(error.contains(named), "{error} names {named}");
        }
    }

    #[test]
    fn a_limit_below_zero_is_refused() {
        let mut config = published();
        config["text_config"]["swiglu_limit"] = json!(-1);
        let error = parse(config).expect_err("no range").to_string();
        assert!(error.contains("swiglu_limit"), "{error}");
    }

    #[test]
    fn gguf_leaves_the_layers_with_an_indexer_to_the_tensors() {
        let reader = ConfigReader::gguf("model.gguf".into(), |key| {
            let layer = key.strip_prefix("blk.")?.strip_suffix(".indexer.q_proj.weight")?;
            (layer != "0").then(|| json!([16, 32]))
        });
        assert_eq!(indexed_layers(&reader, 3).expect("tensors"), [false, true, true]);
    }
}
