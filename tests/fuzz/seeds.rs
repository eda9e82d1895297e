//! Sound inputs for every target: where fuzzing begins, and what a target has to accept.

use std::collections::BTreeMap;
use std::path::Path;

use llmctl_template::{ReasoningFormat, ToolCallFormat};
use serde_json::json;

use super::targets::{PACKED_FORMS, UNCHANGED};
use crate::common::gguf::{F32, GgufBuilder};

/// The sound inputs of a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "gguf" => vec![gguf("llama"), gguf("gpt2")],
        "safetensors" => vec![safetensors()],
        "packed" => {
            (0..PACKED_FORMS.len() as u8).map(|form| [&[form][..], &[UNCHANGED; 16]].concat()).collect()
        }
        "config_json" => parity("config.json"),
        "tokenizer_json" => {
            let whole = parity("tokenizer.json").into_iter().take(1);
            whole.chain([tokenizer("Split"), tokenizer("Digits")]).collect()
        }
        "transcript" => [
            include_str!("transcript.jsonl"),
            include_str!("transcript_images.jsonl"),
            include_str!("transcript_receipts.jsonl"),
        ]
        .map(|text| [b"\x01", text.trim_end().as_bytes()].concat())
        .to_vec(),
        "kv_page" => vec![kv_page(0), kv_page(5)],
        "chat_template" | "gbnf" | "http_body" | "ollama_body" | "worker_line" => {
            texts(target).into_iter().map(String::into_bytes).collect()
        }
        "tool_call" => tool_calls(),
        "image" => images(),
        other => super::format_seeds::seeds(other),
    }
}

/// The texts of a target in seeds.json.
fn texts(target: &str) -> Vec<String> {
    let mut all: BTreeMap<String, Vec<String>> =
        serde_json::from_str(include_str!("seeds.json")).expect("lists by target");
    all.remove(target).expect("a target of the file")
}

/// A file of every parity checkpoint.
fn parity(file: &str) -> Vec<Vec<u8>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let roots = [here.join("tests/parity"), here.join("../tests/parity")]; // fuzz/ is a package of its own
    let folders =
        roots.iter().find_map(|root| std::fs::read_dir(root).ok()).expect("the parity checkpoints").flatten();
    let mut paths: Vec<_> = folders.map(|folder| folder.path().join(file)).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}

/// The pictures of tests/images.
fn images() -> Vec<Vec<u8>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let roots = [here.join("tests/images"), here.join("../tests/images")]; // fuzz/ is a package of its own
    let files = roots.iter().find_map(|root| std::fs::read_dir(root).ok()).expect("the pictures").flatten();
    let mut paths: Vec<_> = files.map(|file| file.path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a picture")).collect()
}

fn gguf(model: &str) -> Vec<u8> {
    let tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u{2581}", "\u{120}"];
    let kinds = [2_i32, 3, 3, 1, 1, 1, 1, 1];
    GgufBuilder::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", 32)
        .text("tokenizer.ggml.model", model)
        .text("tokenizer.ggml.pre", "default")
        .texts("tokenizer.ggml.tokens", &tokens)
        .texts("tokenizer.ggml.merges", &["a b"])
        .array("tokenizer.ggml.token_type", 5, 8, &kinds.map(i32::to_le_bytes).concat())
        .f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .tensor("token_embd.weight", &[2, 3], F32, &[0; 24])
        .build()
}

fn safetensors() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    });
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 32]].concat()
}

fn tokenizer(pre: &str) -> Vec<u8> {
    let pre = match pre {
        "Split" => {
            json!({"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}|[^\\s]+|\\s+"}, "behavior": "Isolated", "invert": false})
        }
        _ => json!({"type": "Digits", "individual_digits": true}),
    };
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0",
        "added_tokens": [{"id": 6, "content": "<|im_end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": true, "normalized": false}],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pre, level]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [6], "tokens": ["<|im_end|>"]}}},
        "decoder": level,
        "model": {"type": "BPE", "vocab": {"H": 0, "e": 1, "l": 2, "o": 3, "ll": 4, "\u{120}": 5}, "merges": [["l", "l"]], "byte_fallback": false, "ignore_merges": true},
    });
    file.to_string().into_bytes()
}

fn kv_page(num_tokens: u32) -> Vec<u8> {
    let mut header = vec![1u8];
    header.extend_from_slice(b"llmctlKV");
    let payload = b"payload";
    for number in [1, 3, num_tokens, 1, payload.len() as u32, 0] {
        header.extend_from_slice(&number.to_le_bytes());
    }
    header.extend_from_slice(&[7; 32]);
    header.extend_from_slice(&[9; 32]);
    (0..num_tokens).for_each(|token| header.extend_from_slice(&token.to_le_bytes()));
    [&header, &payload[..], &[0; 4]].concat()
}

/// A call in every notation, for the reader of every notation.
fn tool_calls() -> Vec<Vec<u8>> {
    let calls = texts("tool_call");
    let reasonings = ReasoningFormat::ALL.len() as u8;
    let readers =
        (0..ToolCallFormat::ALL.len() as u8).flat_map(|format| calls.iter().map(move |call| (format, call)));
    readers.map(|(format, call)| [&[format, (format % reasonings) << 2], call.as_bytes()].concat()).collect()
}
