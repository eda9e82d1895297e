//! Promise: an indexer that may choose every token or block changes nothing, one that chooses few does, and files without indexers
//! are refused by name. Parity, chunks, batches, restored pages and processors are in the tables of all families.

use crate::common::prelude::*;

const FAMILIES: [&str; 2] = ["deepseek3.2", "glm-dsa"];

/// Copies a checkpoint with other values in its config.json.
fn changed(family: &str, changes: &[(&str, Value)]) -> TempDir {
    let copy = tempfile::tempdir().expect("tempdir");
    let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity").join(family);
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(original.join(file), copy.path().join(file)).expect("copied");
    }
    let path = copy.path().join("config.json");
    let json = std::fs::read(&path).expect("config.json");
    let mut config: Value = serde_json::from_slice(&json).expect("config.json");
    let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    changes.iter().for_each(|(key, value)| text[*key] = value.clone());
    std::fs::write(path, config.to_string()).expect("written");
    copy
}

fn logits(folder: &TempDir, kv_type: KvType) -> Vec<f32> {
    let options = LoadOptions { kv_type, ..exact() };
    let mut loaded = load_model(folder.path(), &options).expect("loads");
    let tokens: Vec<u32> = (0..300).map(|n| (n * n * 7 + n) % 384).collect();
    Fed::new(&mut *loaded.model).feed(&tokens, 64)
}

#[test]
fn a_choice_of_every_token_is_attention_without_an_indexer() {
    for (family, kv_type) in FAMILIES.into_iter().zip([KvType::F32, KvType::Q8_0]) {
        // The same weights as DeepSeek V3, which reads no indexer.
        let without = logits(&changed(family, &[("model_type", json!("deepseek_v3"))]), kv_type);
        for top_k in [300, 4096] {
            let all = logits(&changed(family, &[("index_topk", json!(top_k))]), kv_type);
            assert!(same_bits(&all, &without), "{family} {top_k}");
        }
        let few = logits(&changed(family, &[]), kv_type);
        let vocab = few.len() / 300;
        assert!(same_bits(&few[..8 * vocab], &without[..8 * vocab]), "{family}: rows that see all");
        assert!(largest_difference(&few[8 * vocab..], &without[8 * vocab..]) > 0.1, "{family}");
    }
}

#[test]
fn layers_that_share_a_choice_do_not_read_an_indexer_of_their_own() {
    let shared = json!(["full", "shared", "shared", "shared"]);
    let first = logits(&changed("glm-dsa", &[("indexer_types", shared)]), KvType::F32);
    let as_published = logits(&changed("glm-dsa", &[]), KvType::F32);
    assert!(largest_difference(&first, &as_published) > 0.01, "the third layer chooses otherwise");
    let all = changed("glm-dsa", &[("indexer_types", json!(["full", "full", "full", "full"]))]);
    let error = load_model(all.path(), &exact()).err().expect("refused").to_string();
    assert!(error.contains("layers.1.self_attn.indexer"), "{error}");
}

/// Returns the choice of blocks of 32 tokens in the layers of MiniMax M3 that have an indexer.
fn blocks(num_blocks: usize, num_local: usize, layers: [u8; 4]) -> [(&'static str, Value); 1] {
    [(
        "sparse_attention_config",
        json!({
            "use_sparse_attention": true, "sparse_index_dim": 24, "sparse_num_index_heads": 2, "sparse_topk_blocks": num_blocks,
            "sparse_block_size": 32, "sparse_local_block": num_local, "sparse_attention_freq": layers,
        }),
    )]
}

#[test]
fn a_choice_of_every_block_is_attention_without_an_indexer() {
    for kv_type in KvType::ALL {
        let of = |choice: &[(&str, Value)]| logits(&changed("minimax-m3", choice), kv_type);
        let without = of(&blocks(2, 1, [0; 4]));
        for num_blocks in [10, 64] {
            assert!(same_bits(&of(&blocks(num_blocks, 1, [0, 1, 1, 1])), &without), "{num_blocks}");
        }
        let few = of(&blocks(2, 1, [0, 1, 1, 1]));
        let vocab = few.len() / 300;
        assert!(same_bits(&few[..64 * vocab], &without[..64 * vocab]), "rows that see all");
        assert!(largest_difference(&few[64 * vocab..], &without[64 * vocab..]) > 0.1);
        // The last blocks alone, in one layer, are a window that begins where a block does.
        let last = of(&blocks(2, 2, [0, 0, 0, 1]));
        assert!(same_bits(&last[..64 * vocab], &without[..64 * vocab]), "rows that see all");
        assert!(largest_difference(&last, &of(&blocks(2, 1, [0, 0, 0, 1]))) > 0.01, "chosen blocks");
    }
}

#[test]
fn whole_blocks_are_chosen_where_they_are_more_than_the_budget() {
    for kv_type in KvType::ALL {
        let of = |budget: usize| logits(&changed("qwen4-exp", &[("indexer_budget", json!(budget))]), kv_type);
        let all = of(300);
        let vocab = all.len() / 300;
        assert!(same_bits(&all, &of(4096)), "all blocks");
        for budget in [8, 128] {
            let few = of(budget);
            // Up to three tokens behind the budget are an unfinished block, which every row sees.
            let seeing_all = (budget + 3) * vocab;
            assert!(same_bits(&few[..seeing_all], &all[..seeing_all]), "{budget}: rows that see all");
            let others = |logits: &[f32]| logits[seeing_all..seeing_all + vocab].to_vec();
            assert!(
                largest_difference(&others(&few), &others(&all)) > 1e-6,
                "{budget}: the next row chooses"
            );
        }
    }
}

#[test]
fn facts_of_whole_blocks_and_ngrams_that_cannot_be_are_refused_by_name() {
    for (key, value) in [
        ("indexer_kv_heads", json!(2)),
        ("indexer_compress_ratio", json!(1)),
        ("indexer_budget", json!(10)),
        ("indexer_head_dim", json!(4)),
        ("hc_count", json!(1)),
        ("hc_lowrank", Value::Null),
        ("output_gate_type", json!("tanh")),
        ("ple_layer_ids", json!([1, 3])),
        ("ple_layer_ids", json!([2])),
        ("ple_layer_ids", json!([0])),
        ("ple_embed_dim", json!(30)),
        ("ngram_size", json!(1)),
        ("heads_per_ngram", json!(1 << 20)),
        ("eos_token_id", json!(384)),
    ] {
        let error = load_model(changed("qwen4-exp", &[(key, value)]).path(), &exact()).err().expect(key);
        assert!(error.to_string().contains(key), "{error} names {key}");
    }
    let few_rows = changed("qwen4-exp", &[("ngram_vocab_size_base", json!(300))]);
    let error = load_model(few_rows.path(), &exact()).err().expect("too few rows").to_string();
    assert!(error.contains("ngram_embedding.shard_3"), "{error}");
}
