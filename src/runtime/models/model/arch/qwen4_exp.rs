//! Qwen3.8-Flash-Next, text: Qwen 3.5 with experts, whose parts read mixes of several residual streams, whose attention sees blocks of
//! tokens that an indexer chooses, and one of whose layers adds embeddings of n-grams. Sources: transformers `Qwen4ExpTextConfig`;
//! llama.cpp's `qwen4exp` and its converter for GGUF.

use std::ops::Range;

use serde_json::{Map, Value};

use super::dense::{MAX_VOCAB, MAX_WIDTH};
use super::sparse_latent::MAX_TOP_K;
use super::{ConfigReader, Description, Family, qwen3_5};
use crate::model::config::{
    Activation, ExpertWeights, HyperConfig, IndexerConfig, KeyBlocks, MixerConfig, NgramConfig, RopeConfig,
};
use llmctl_base::error::LoadResult;

pub const FAMILY: Family = Family {
    name: "qwen4-exp",
    model_types: &["qwen4_exp", "qwen4_exp_text"],
    gguf_names: &["qwen4exp"],
    parse: |family, reader| {
        let sum_to_one = reader.flag("norm_topk_prob")?.unwrap_or(true) || reader.is_gguf();
        let reader = &reader.with(class_keys(reader));
        let mut description = qwen3_5::with_experts(family, reader, ExpertWeights::softmax(sum_to_one))?;
        set_layers(&mut description, reader)?;
        Ok(description)
    },
    ..qwen3_5::MOE_FAMILY
};

/// Limits, above those of any published model.
const MAX_STREAMS: usize = 64;
const MAX_NGRAM: usize = 8;
const MAX_HEADS: usize = 256;

/// Tokens are kept as floats, which hold every whole number below this.
const MAX_TOKENS: usize = 1 << 24;

/// Returns the kinds of layers as Qwen 3.5 names them: transformers writes of attention that it is indexed.
fn class_keys(reader: &ConfigReader) -> Map<String, Value> {
    const KEY: &str = "layer_types";
    let Some(Value::Array(mut kinds)) = reader.value(KEY) else { return Map::new() };
    kinds.iter_mut().filter(|kind| *kind == "indexed_attention").for_each(|kind| {
        *kind = "full_attention".into();
    });
    Map::from_iter([(KEY.to_owned(), kinds.into())])
}

fn set_layers(description: &mut Description, reader: &ConfigReader) -> LoadResult<()> {
    description.prediction = None;
    let config = &mut description.config;
    let size = |hugging_face, gguf, max| reader.size(reader.pick(hugging_face, gguf), max);
    let hyper = HyperConfig {
        num_streams: size("hc_count", "hyper_connection.count", MAX_STREAMS)?,
        rank: size("hc_lowrank", "hyper_connection.low_rank", MAX_WIDTH)?,
    };
    if hyper.num_streams < 2 {
        return Err(reader.error(reader.pick("hc_count", "hyper_connection.count"), "1 stream is not mixed"));
    }
    config.hyper = Some(hyper);
    let activation = gate(reader)?;
    let indexers = indexers(reader, config.layers.len(), config.ropes[0].dim)?;
    for (layer, indexer) in config.layers.iter_mut().zip(&indexers) {
        layer.pre_norms = false;
        match &mut layer.mixer {
            MixerConfig::Attention(attention) => attention.indexer = *indexer,
            MixerConfig::DeltaNet(net) => net.gate = activation,
            _ => {}
        }
    }
    let lag = indexers.iter().flatten().map(|indexer| indexer.blocks.size as u32 - 1).max().unwrap_or(0);
    config.ropes.push(RopeConfig { lag, ..config.ropes[0].clone() });
    let Some((at, ngrams)) = ngrams(reader, config.vocab_size, config.hidden_size)? else { return Ok(()) };
    match config.layers.get_mut(at) {
        Some(layer) if matches!(layer.mixer, MixerConfig::DeltaNet(_)) => {
            layer.ngrams = Some(ngrams);
            Ok(())
        }
        _ => Err(reader.error(reader.pick(LAYERS[0], LAYERS[1]), "names no layer with a delta net")),
    }
}

/// Returns the function of the delta nets' output gate. GGUF's files have the published one.
fn gate(reader: &ConfigReader) -> LoadResult<Activation> {
    const KEY: &str = "output_gate_type";
    if reader.is_gguf() {
        return Ok(Activation::Sigmoid);
    }
    match reader.string(KEY)?.or(reader.string("hidden_act")?).as_deref() {
        Some("sigmoid") => Ok(Activation::Sigmoid),
        None | Some("silu") => Ok(Activation::Silu),
        Some(other) => Err(reader.error(KEY, format!("activation {other:?} is not supported"))),
    }
}

const RATIO: [&str; 2] = ["indexer_compress_ratio", "attention.compress_ratios"];

/// Returns the indexer of each layer, if it is one with attention. In GGUF blocks of 0 tokens stand for none; all others have one size.
fn indexers(
    reader: &ConfigReader,
    num_layers: usize,
    rotated: usize,
) -> LoadResult<Vec<Option<IndexerConfig>>> {
    let pick = |[hugging_face, gguf]: [&'static str; 2]| reader.pick(hugging_face, gguf);
    if reader.count("indexer_kv_heads")?.is_some_and(|heads| heads != 1) {
        return Err(reader.error("indexer_kv_heads", "indexers have one head of keys"));
    }
    let sizes = match reader.value(pick(RATIO)) {
        Some(Value::Array(mut listed)) => {
            // Prediction blocks are listed too.
            listed.truncate(num_layers);
            let listed = reader.with(Map::from_iter([(pick(RATIO).to_owned(), listed.into())]));
            listed.counts(pick(RATIO), num_layers)?.unwrap_or_default()
        }
        _ => vec![reader.size(pick(RATIO), MAX_TOP_K)?; num_layers],
    };
    let largest = sizes.iter().copied().max().unwrap_or(0);
    if !(2..=MAX_TOP_K).contains(&largest) || sizes.iter().any(|size| *size != 0 && *size != largest) {
        return Err(reader.error(pick(RATIO), "is not one number of tokens, at least 2"));
    }
    let dim_names = ["indexer_head_dim", "attention.indexer.key_length"];
    let head_dim = reader.size(pick(dim_names), MAX_WIDTH)?;
    if head_dim < rotated {
        let message = format!("{head_dim} values cannot hold {rotated} rotated ones");
        return Err(reader.error(pick(dim_names), message));
    }
    let heads_key = pick(["indexer_n_heads", "attention.indexer.head_count"]);
    let num_heads = reader.size(heads_key, MAX_WIDTH / head_dim)?;
    let budget_key = pick(["indexer_budget", "attention.indexer.top_k"]);
    let budget = reader.size(budget_key, MAX_TOP_K)?;
    if !budget.is_multiple_of(largest) {
        return Err(reader.error(budget_key, format!("{budget} tokens are no blocks of {largest}")));
    }
    let (top_k, blocks) = (budget + largest, KeyBlocks { size: largest, num_local: 0 });
    let indexer = IndexerConfig { num_heads, head_dim, top_k, blocks, interleaved: false, key_rope: Some(1) };
    Ok(sizes.iter().map(|size| (*size > 0).then_some(indexer)).collect())
}

const LAYERS: [&str; 2] = ["ple_layer_ids", "ple.layers"];

/// Reads the embeddings of n-grams, and the layer that has them.
fn ngrams(reader: &ConfigReader, vocab: usize, hidden: usize) -> LoadResult<Option<(usize, NgramConfig)>> {
    let key = reader.pick(LAYERS[0], LAYERS[1]);
    let at = match reader.listed_layers(key)?.as_deref() {
        None | Some([]) => return Ok(None),
        // Hugging Face's numbers begin at 1.
        Some([layer]) => layer.wrapping_sub(usize::from(!reader.is_gguf())),
        Some(_) => return Err(reader.error(key, "n-grams in more layers than one are not supported")),
    };
    if vocab >= MAX_TOKENS {
        return Err(reader.error(key, format!("n-grams of {vocab} tokens are not supported")));
    }
    let size = |hugging_face, gguf, default, max| match reader.is_gguf() {
        true => reader.size(gguf, max),
        false => reader.size_or(hugging_face, default, max),
    };
    let length = size("ngram_size", "ple.ngram_size", 3, MAX_NGRAM)?;
    let count =
        length.saturating_sub(1) * size("heads_per_ngram", "ple.heads_per_ngram", 8, MAX_HEADS / MAX_NGRAM)?;
    if count == 0 {
        return Err(reader.error(reader.pick("ngram_size", "ple.ngram_size"), "1 token is no n-gram"));
    }
    let width = match reader.is_gguf() {
        true => table_dim(reader)? * count,
        false => reader.size_or("ple_embed_dim", hidden, MAX_WIDTH)?,
    };
    if !width.is_multiple_of(count) {
        return Err(reader.error("ple_embed_dim", format!("{width} values are no {count} rows")));
    }
    let end_key = reader.pick("eos_token_id", "ple.eos_token_id");
    let end = reader.first_count(end_key)?.filter(|end| *end < vocab);
    let (multipliers, heads) = match reader.is_gguf() {
        true => listed_hash(reader, length, count)?,
        false => hash(reader, length, count, vocab)?,
    };
    Ok(Some((
        at,
        NgramConfig {
            multipliers,
            heads,
            row_dim: width / count,
            end: end.ok_or_else(|| reader.error(end_key, "names no token at which n-grams end"))? as u32,
            kernel: reader.kernel(reader.pick("ple_conv_kernel_size", "ple.conv_kernel"), 4)?,
        },
    )))
}

/// Returns the width of the table's rows in GGUF.
fn table_dim(reader: &ConfigReader) -> LoadResult<usize> {
    const TABLE: &str = "per_layer_token_embd.weight";
    let shape: Option<[usize; 2]> = reader.value(TABLE).and_then(|shape| serde_json::from_value(shape).ok());
    let dim = shape.map(|[_, dim]| dim).filter(|dim| (1..=MAX_WIDTH).contains(dim));
    dim.ok_or_else(|| reader.error(TABLE, "is missing or no table"))
}

/// Multipliers of tokens, and rows of heads.
type Hash = (Vec<u64>, Vec<Range<u64>>);

/// Reads what GGUF lists.
fn listed_hash(reader: &ConfigReader, length: usize, count: usize) -> LoadResult<Hash> {
    let list = |key: &str, len, least: u64, most: u64| {
        let number = |value: &Value| value.as_u64().filter(|number| (least..=most).contains(number));
        let list = reader.list(key, len, &format!("{len} numbers"), number)?;
        list.ok_or_else(|| reader.error(key, "is missing"))
    };
    let multipliers = list("ple.layer_multipliers", length, 0, u64::MAX)?;
    let most = 1 << 40;
    let firsts = list("ple.head_offsets", count, 0, most)?;
    let counts = list("ple.head_vocab_sizes", count, 1, most)?;
    Ok((multipliers, firsts.into_iter().zip(counts).map(|(first, count)| first..first + count).collect()))
}

/// Computes what transformers derives: multipliers from a seed, and rows that are primes in number.
fn hash(reader: &ConfigReader, length: usize, count: usize, vocab: usize) -> LoadResult<Hash> {
    let seed = reader.count("seed")?.unwrap_or(1234) as u64;
    let half = (i64::MAX as u64 / vocab as u64 / 2).max(1);
    let multiplier = |index: u64| 2 * (split_mix(seed.wrapping_add(GAMMA.wrapping_mul(index))) % half) + 1;
    let base = reader.size_or("ngram_vocab_size_base", 20_000_000, MAX_VOCAB)? as u64;
    let primes = (base..).filter(|number| is_prime(*number)).take(count);
    let heads = primes.scan(0, |first, size| {
        *first += size;
        Some(*first - size..*first)
    });
    Ok(((1..=length as u64).map(multiplier).collect(), heads.collect()))
}

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64 (Steele et al. 2014).
fn split_mix(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

fn is_prime(number: u64) -> bool {
    number >= 2
        && (2..)
            .take_while(|divisor| divisor * divisor <= number)
            .all(|divisor| !number.is_multiple_of(divisor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::KvType;
    use crate::model::decoder::kv_bytes_per_token;
    use serde_json::json;

    /// The published configuration, as far as it matters here.
    fn published() -> Value {
        let kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"];
        json!({"model_type": "qwen4_exp", "image_token_id": 248_056, "text_config": {
            "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "output_gate_type": "sigmoid", "eos_token_id": 248_044,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10], "mrope_interleaved": true},
            "layer_types": kinds.repeat(12), "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
            "shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320, "indexer_n_heads": 4,
            "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
            "ple_layer_ids": [2], "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8,
            "ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 128, "mtp_num_hidden_layers": 1,
        }})
    }

    fn parse(config: Value) -> Description {
        let reader = ConfigReader::hugging_face("config.json".into(), config);
        super::super::parse_config(&reader).expect("valid").expect("a native family")
    }

    #[test]
    fn the_published_configuration_means_what_the_class_makes_of_it() {
        let Description { config, prediction, .. } = parse(published());
        assert_eq!((prediction, config.hyper), (None, Some(HyperConfig { num_streams: 4, rank: 320 })));
        let (indexed, plain) = (&config.layers[3], &config.layers[1]);
        let MixerConfig::Attention(attention) = &indexed.mixer else { panic!("attention") };
        let indexer = attention.indexer.expect("an indexer");
        assert_eq!((indexer.top_k, indexer.blocks), (2052, KeyBlocks { size: 4, num_local: 0 }));
        assert_eq!((config.ropes[0].dim, config.ropes[1].lag), (64, 3));
        let MixerConfig::DeltaNet(net) = &plain.mixer else { panic!("a delta net") };
        assert_eq!(net.gate, Activation::Sigmoid);
        assert_eq!(config.layers.iter().filter(|layer| layer.ngrams.is_some()).count(), 1);
        let ngrams = plain.ngrams.as_ref().expect("n-grams");
        // As transformers computes them.
        assert_eq!(ngrams.multipliers, [23703573157769, 20109073645365, 8052911324071]);
        assert_eq!(ngrams.heads[..2], [0..20_000_003, 20_000_003..40_000_026]);
        assert_eq!((ngrams.heads.len(), ngrams.row_dim, ngrams.end), (16, 160, 248_044));
        // Two bytes for each of two keys and values of 256, and for an indexer's key of 128, in 12 layers.
        assert_eq!(kv_bytes_per_token(&config, KvType::F16), 12 * 2 * (4 * 256 + 128));
    }

    #[test]
    fn the_class_names_indexed_attention() {
        let mut saved = published();
        for kind in saved["text_config"]["layer_types"].as_array_mut().expect("kinds") {
            if *kind == "full_attention" {
                *kind = json!("indexed_attention");
            }
        }
        assert_eq!(parse(saved), parse(published()));
    }
}
