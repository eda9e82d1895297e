//! Latent attention whose layers see the tokens that an indexer chooses: DeepSeek V3.2, and GLM-5, in which layers may share
//! the choice of one before them. The rest is DeepSeek V3's. Sources: transformers `DeepseekV32Config` and `GlmMoeDsaConfig`;
//! llama.cpp's `deepseek32` and `glm-dsa` for GGUF.

use serde_json::Value;

use super::deepseek::{ExpertFacts, parse_latent};
use super::dense::MAX_WIDTH;
use super::{ConfigReader, Description, Family};
use crate::model::config::{IndexerConfig, KeyBlocks, LatentConfig, MixerConfig, SeenKeys};
use llmctl_base::error::LoadResult;

pub const DEEPSEEK_FAMILY: Family = Family {
    parse: |family, reader| parse_config(family, reader, false),
    ..Family::new("deepseek3.2", &["deepseek_v32"], &["deepseek32"])
};

pub const GLM_FAMILY: Family = Family {
    parse: |family, reader| parse_config(family, reader, true),
    ..Family::new("glm-dsa", &["glm_moe_dsa"], &["glm-dsa"])
};

const FACTS: ExpertFacts = ExpertFacts { dense: ("first_k_dense_replace", 3), ..ExpertFacts::DEEPSEEK };

/// Most positions that a row may choose; every row of a step keeps as many numbers.
pub const MAX_TOP_K: usize = 1 << 17;

/// Parses a model of either family. GLM's indexers rotate pairs that lie side by side, and may be shared.
fn parse_config(family: &Family, reader: &ConfigReader, is_glm: bool) -> LoadResult<Description> {
    let mut description = parse_latent(family, reader, &FACTS)?;
    let layers = &mut description.config.layers;
    let is_own = if is_glm { own_indexers(reader, layers.len())? } else { vec![true; layers.len()] };
    for (layer, is_own) in layers.iter_mut().zip(is_own) {
        if let MixerConfig::Latent(latent) = &mut layer.mixer {
            latent.seen = match is_own {
                true => SeenKeys::Indexed(indexer(reader, latent, is_glm)?),
                false => SeenKeys::AsBefore,
            };
        }
    }
    Ok(description)
}

fn indexer(reader: &ConfigReader, latent: &LatentConfig, interleaved: bool) -> LoadResult<IndexerConfig> {
    let dim_key = reader.pick("index_head_dim", "attention.indexer.key_length");
    let head_dim = reader.size(dim_key, MAX_WIDTH)?;
    if head_dim < latent.rotary_dim {
        let message = format!("{head_dim} values cannot hold {} rotated ones", latent.rotary_dim);
        return Err(reader.error(dim_key, message));
    }
    if latent.query_rank.is_none() {
        let key = reader.pick("q_lora_rank", "attention.q_lora_rank");
        return Err(reader.error(key, "is missing: indexers read the queries' latent row"));
    }
    let heads_key = reader.pick("index_n_heads", "attention.indexer.head_count");
    let num_heads = reader.size(heads_key, MAX_WIDTH / head_dim)?;
    let top_key = reader.pick("index_topk", "attention.indexer.top_k");
    let top_k = reader.size(top_key, MAX_TOP_K)?;
    let blocks = KeyBlocks::SINGLE;
    Ok(IndexerConfig { num_heads, head_dim, top_k, blocks, interleaved, key_rope: None })
}

/// Returns which layers have an indexer of their own.
fn own_indexers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    const NAMES: [&[&str]; 2] = [&["full"], &["shared"]];
    const PATTERN: &str = "index_topk_pattern";
    let (key, is_own) = match reader.is_gguf() {
        true => ("attention.indexer.types", gguf_indexers(reader, num_layers)?),
        false => {
            let named = |key| Ok((key, reader.layers_named(key, num_layers, NAMES)?));
            match reader.value(PATTERN) {
                _ if reader.value("indexer_types").is_some() => named("indexer_types")?,
                Some(Value::String(letters)) => (PATTERN, Some(by_letters(reader, &letters, num_layers)?)),
                Some(_) => named(PATTERN)?,
                None => ("index_topk_freq", Some(by_period(reader, num_layers)?)),
            }
        }
    };
    match is_own {
        Some(is_own) if is_own.first() == Some(&true) => Ok(is_own),
        _ => Err(reader.error(key, "the first layer has no indexer of its own")),
    }
}

/// Reads a letter for each layer: F for an indexer of its own, S for the one before.
fn by_letters(reader: &ConfigReader, letters: &str, num_layers: usize) -> LoadResult<Vec<bool>> {
    let is_own: Option<Vec<bool>> = letters
        .chars()
        .map(|letter| match letter {
            'F' => Some(true),
            'S' => Some(false),
            _ => None,
        })
        .collect();
    is_own.filter(|is_own| is_own.len() == num_layers).ok_or_else(|| {
        reader
            .error("index_topk_pattern", format!("{letters:?} is not F or S for each of {num_layers} layers"))
    })
}

/// Every `index_topk_freq`th layer has an indexer, counted from the last of the first ones, which all have.
fn by_period(reader: &ConfigReader, num_layers: usize) -> LoadResult<Vec<bool>> {
    let period = reader.count("index_topk_freq")?.unwrap_or(1).max(1);
    let offset = reader.count("index_skip_topk_offset")?.unwrap_or(2);
    Ok((1..=num_layers).map(|number| number.saturating_sub(offset).is_multiple_of(period)).collect())
}

/// GGUF lists the layers, also those that predict further tokens; older files leave it to the tensors.
fn gguf_indexers(reader: &ConfigReader, num_layers: usize) -> LoadResult<Option<Vec<bool>>> {
    const KEY: &str = "attention.indexer.types";
    let Some(listed) = reader.value(KEY) else {
        let has_key = |layer| reader.value(&format!("blk.{layer}.indexer.attn_k.weight")).is_some();
        return Ok(Some((0..num_layers).map(has_key).collect()));
    };
    let flag = |value: &Value| value.as_bool().or_else(|| Some(value.as_u64()? != 0));
    let listed = listed.as_array().filter(|list| list.len() >= num_layers);
    let is_own: Option<Vec<bool>> = listed.and_then(|list| list[..num_layers].iter().map(flag).collect());
    is_own.map(Some).ok_or_else(|| reader.error(KEY, format!("is not a list for {num_layers} layers")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KvType;
    use crate::model::decoder::kv_bytes_per_token;
    use serde_json::json;

    /// GLM-5.2's published configuration, as far as it matters here.
    fn glm() -> Value {
        json!({
            "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
            "num_key_value_heads": 64, "intermediate_size": 12288, "moe_intermediate_size": 2048, "vocab_size": 154880,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
            "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_topk_freq": 4,
            "index_skip_topk_offset": 3, "num_nextn_predict_layers": 1,
        })
    }

    fn parse(config: Value) -> LoadResult<Description> {
        let reader = ConfigReader::hugging_face("config.json".into(), config);
        Ok(super::super::parse_config(&reader)?.expect("a native family"))
    }

    fn own(config: Value) -> Vec<usize> {
        let config = parse(config).expect("valid").config;
        let is_own = |layer: &usize| match &config.layers[*layer].mixer {
            MixerConfig::Latent(latent) => latent.indexer().is_some(),
            other => panic!("{other:?}"),
        };
        (0..config.layers.len()).filter(is_own).collect()
    }

    #[test]
    fn pages_hold_a_latent_row_and_the_indexer_key_of_layers_that_have_one() {
        let listed = own(glm());
        assert_eq!(listed[..5], [0, 1, 2, 6, 10]);
        let config = parse(glm()).expect("valid").config;
        // Two bytes for each of 512 + 64 values, and of 128 in layers with an indexer.
        assert_eq!(kv_bytes_per_token(&config, KvType::F16), 2 * (78 * 576 + listed.len() * 128));
        let mut deepseek = glm();
        deepseek["model_type"] = json!("deepseek_v32");
        assert_eq!(own(deepseek).len(), 78, "DeepSeek's indexers are not shared");
    }

    #[test]
    fn layers_that_share_are_given_in_three_forms() {
        let mut config = glm();
        config["num_hidden_layers"] = json!(4);
        config["index_topk_pattern"] = json!("FSSF");
        assert_eq!(own(config.clone()), [0, 3]);
        config["index_topk_pattern"] = json!(["full", "full", "shared", "shared"]);
        assert_eq!(own(config.clone()), [0, 1]);
        config["indexer_types"] = json!(["full", "shared", "full", "shared"]);
        assert_eq!(own(config), [0, 2]);
        let mut all = glm();
        all["index_topk_freq"] = Value::Null;
        assert_eq!(own(all).len(), 78);
    }

    #[test]
    fn gguf_lists_the_layers_or_leaves_them_to_the_tensors() {
        let own = |types: Value, tensors: &'static [usize]| {
            let reader = ConfigReader::gguf("model.gguf".into(), move |key| match key {
                "glm-dsa.attention.indexer.types" => Some(types.clone()),
                "general.architecture" => Some(json!("glm-dsa")),
                _ => {
                    let layer = key.strip_prefix("blk.")?.strip_suffix(".indexer.attn_k.weight")?;
                    tensors.contains(&layer.parse().ok()?).then(|| json!([16, 32]))
                }
            });
            own_indexers(&reader, 3)
        };
        // The fourth layer predicts further tokens.
        for listed in [json!([true, false, true, true]), json!([1, 0, 1])] {
            assert_eq!(own(listed, &[0]).expect("a list"), [true, false, true]);
        }
        assert_eq!(own(Value::Null, &[0, 1]).expect("tensors"), [true, true, false]);
        for (listed, tensors) in [(json!([1, 0]), &[0][..]), (json!(["x", 1, 1]), &[0]), (Value::Null, &[])] {
            let error = own(listed, tensors).expect_err("refused").to_string();
            assert!(error.contains("attention.indexer.types"), "{error}");
        }
    }

    #[test]
    fn facts_that_cannot_be_are_refused_by_name() {
        for (key, value) in [
            ("index_topk", json!(0)),
            ("index_topk", json!(1 << 20)),
            ("index_n_heads", json!(1 << 20)),
            ("index_head_dim", json!(32)),
            ("q_lora_rank", Value::Null),
            ("indexer_types", json!(["full"])),
            ("indexer_types", json!(vec!["most"; 78])),
            ("indexer_types", json!(vec!["shared"; 78])),
            ("index_topk_pattern", json!("FSX")),
            ("index_topk_pattern", json!("S".repeat(78))),
        ] {
            let mut config = glm();
            config[key] = value;
            let error = parse(config).expect_err(key).to_string();
            assert!(error.contains(key), "{error} names {key}");
        }
    }
}
