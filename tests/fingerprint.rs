//! A model's fingerprint is the same wherever its files lie, and another as soon as anything differs that changes bits.

use std::fs::{self, FileTimes};

use llmctl_models::load::{DeviceKind, Fingerprint, KvType, fingerprint};
use llmctl_models::model::arch::parse_config;
use llmctl_models::model::config::DecoderConfig;

use crate::common::gguf::F32;
use crate::common::prelude::*;

/// The decoder's description is not what these tests vary.
fn config() -> DecoderConfig {
    let files = ModelFiles::open(&ModelSource::Folder(parity_folder().join("qwen3"))).expect("opens");
    parse_config(files.config_reader()).expect("described").expect("native").config
}

fn of(source: &ModelSource, options: &LoadOptions) -> Fingerprint {
    let files = ModelFiles::open(source).expect("opens");
    fingerprint(&files, &config(), 2048, options).expect("readable")
}

fn of_folder(folder: &Path) -> Fingerprint {
    of(&ModelSource::Folder(folder.to_owned()), &exact())
}

/// Copies a file with its time.
fn copy(from: &Path, to: &Path) {
    fs::copy(from, to).expect("copied");
    let modified = fs::metadata(from).and_then(|metadata| metadata.modified()).expect("known");
    set_modified(to, modified);
}

fn set_modified(path: &Path, time: std::time::SystemTime) {
    let file = File::options().write(true).open(path).expect("ours");
    file.set_times(FileTimes::new().set_modified(time)).expect("ours");
}

/// Changes a byte and nothing else, not even the time.
fn flip(path: &Path, at: usize) {
    let modified = fs::metadata(path).and_then(|metadata| metadata.modified()).expect("known");
    let mut bytes = fs::read(path).expect("there");
    bytes[at] ^= 1;
    fs::write(path, bytes).expect("ours");
    set_modified(path, modified);
}

fn copy_of_qwen3() -> TempDir {
    let folder = TempDir::new().expect("a scratch folder");
    for entry in fs::read_dir(parity_folder().join("qwen3")).expect("there") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            copy(&path, &folder.path().join(path.file_name().expect("a name")));
        }
    }
    folder
}

#[test]
fn copies_with_their_times_have_the_same_fingerprint() {
    let original = of_folder(&parity_folder().join("qwen3"));
    let folder = copy_of_qwen3();
    assert_eq!(of_folder(folder.path()), original);
    fs::write(folder.path().join("README.md"), "about").expect("ours");
    fs::write(folder.path().join("tokenizer.model"), "not read beside tokenizer.json").expect("ours");
    fs::remove_file(folder.path().join("generation_config.json")).ok();
    assert_eq!(of_folder(folder.path()), original, "not what the weights or the texts are made of");
    assert_eq!(original.hex.len(), 64);
    assert!(original.hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
    assert!(!original.facts.to_string().contains("qwen3/"), "no path: {}", original.facts);
}

#[test]
fn every_change_of_a_file_is_another_fingerprint() {
    let mut seen = BTreeSet::new();
    let mut another = |change: &dyn Fn(&Path), what: &str| {
        let folder = copy_of_qwen3();
        change(folder.path());
        let found = of_folder(folder.path());
        assert!(seen.insert(found.hex), "{what}");
    };
    another(&|_| {}, "nothing changed");
    let insert = |name: &'static str, text: &'static str| {
        move |folder: &Path| {
            let path = folder.join(name);
            let json = fs::read_to_string(&path).expect("there");
            fs::write(&path, json.replacen('{', text, 1)).expect("ours");
        }
    };
    another(&insert("config.json", "{ "), "a space in config.json");
    another(&insert("tokenizer.json", "{ "), "a space in tokenizer.json");
    another(&|folder| fs::write(folder.join("chat_template.jinja"), "x").expect("ours"), "a template");
    another(&|folder| fs::write(folder.join("special_tokens_map.json"), "{}").expect("ours"), "a map");
    let in_place = |name: &'static str, content: &'static str| {
        move |folder: &Path| {
            fs::remove_file(folder.join("tokenizer.json")).expect("there");
            fs::write(folder.join(name), content).expect("ours");
        }
    };
    another(&in_place("tokenizer.model", "a"), "tokenizer.model in place of tokenizer.json");
    another(&in_place("tokenizer.model", "b"), "another tokenizer.model");
    another(&in_place("tekken.json", "a"), "tekken.json");
    let weights = |folder: &Path| folder.join("model.safetensors");
    let len = fs::metadata(weights(&parity_folder().join("qwen3"))).expect("there").len() as usize;
    for at in [len - 1, len / 2, len / 3] {
        another(&|folder| flip(&weights(folder), at), &format!("byte {at} of the weights"));
    }
    for step in [1, 1_000_000_000] {
        let later = |folder: &Path| {
            let path = weights(folder);
            let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("known");
            set_modified(&path, modified + Duration::from_nanos(step));
        };
        another(&later, &format!("{step} ns later"));
    }
}

#[test]
fn every_option_that_changes_bits_is_another_fingerprint() {
    let source = ModelSource::Folder(parity_folder().join("qwen3"));
    let plain = of(&source, &exact());
    assert_eq!(plain.facts["backend"], "cpu", "not which processor: tests/same_bits.rs");
    let same = [
        LoadOptions { context: Some(100), ..exact() },
        LoadOptions { available_memory: Some(1 << 40), ..exact() },
        LoadOptions { device: Device::Cpu(CpuOptions::new(7)), ..exact() },
    ];
    same.iter().for_each(|options| assert_eq!(of(&source, options), plain, "{options:?}"));
    let others = [
        LoadOptions { kv_type: KvType::F32, ..exact() },
        LoadOptions { kv_type: KvType::F16, ..exact() },
        LoadOptions { dtype: Some(Dtype::F16), ..exact() },
        LoadOptions { dtype: Some(Dtype::Bf16), ..exact() },
        LoadOptions { quantize: Some(Dtype::Q8_0), ..exact() },
        LoadOptions { quantize: Some(Dtype::F16), dtype: None, ..exact() },
        LoadOptions { device: Device::Candle(DeviceKind::Cpu), ..exact() },
        LoadOptions { device: Device::Candle(DeviceKind::Cuda(0)), ..exact() },
    ];
    let seen: BTreeSet<String> = others.iter().map(|options| of(&source, options).hex).collect();
    // `exact` has one of the two KV types itself.
    assert_eq!(seen.len(), others.len());
    assert!(seen.contains(&plain.hex));
}

/// A GGUF file of 8 MiB of weights, so that samples do not cover it.
fn gguf(folder: &Path, name: &str, context: u32) -> PathBuf {
    let data: Vec<u8> = (0..2u32 << 20).flat_map(|n| n.to_le_bytes()).collect();
    let file = GgufBuilder::new()
        .text("general.architecture", "qwen3")
        .u32("qwen3.context_length", context)
        .tensor("token_embd.weight", &[1 << 10, 2 << 10], F32, &data)
        .build();
    let path = folder.join(name);
    fs::write(&path, file).expect("ours");
    set_modified(&path, std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
    path
}

#[test]
fn a_gguf_file_is_known_by_header_size_time_and_samples() {
    let folder = TempDir::new().expect("a scratch folder");
    let of_file = |path: &Path| of(&ModelSource::Gguf(path.to_owned()), &exact()).hex;
    let plain = of_file(&gguf(folder.path(), "a.gguf", 64));
    assert_eq!(of_file(&gguf(folder.path(), "b.gguf", 64)), plain, "the name is no matter");
    assert_ne!(of_file(&gguf(folder.path(), "c.gguf", 65)), plain, "metadata");
    let path = gguf(folder.path(), "d.gguf", 64);
    let len = fs::metadata(&path).expect("there").len() as usize;
    let sample = 64 << 10;
    let second = (len - sample) / 63;
    for at in [len - 1, len - sample, second, second + sample - 1] {
        flip(&path, at);
        assert_ne!(of_file(&path), plain, "byte {at}");
        flip(&path, at);
        assert_eq!(of_file(&path), plain);
    }
    flip(&path, second + sample);
    assert_eq!(of_file(&path), plain, "what the header comment says it cannot see");
    set_modified(&path, std::time::SystemTime::now());
    assert_ne!(of_file(&path), plain, "but then the time tells");
}

#[test]
fn a_gigabyte_of_weights_is_sampled_to_its_last_byte() {
    use std::io::{Seek, SeekFrom, Write};
    let folder = copy_of_qwen3();
    let path = folder.path().join("model.safetensors");
    let data = 1u64 << 30;
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{data}],"data_offsets":[0,{data}]}}}}"#);
    let mut file = File::create(&path).expect("created");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
    file.write_all(header.as_bytes()).expect("written");
    let len = 8 + header.len() as u64 + data;
    file.set_len(len).expect("a sparse file");
    let mut seen = BTreeSet::new();
    let middle_sample = (len - (64 << 10)) * 31 / 63;
    for at in [None, Some(len - 1), Some(middle_sample), Some(middle_sample + (64 << 10))] {
        if let Some(at) = at {
            file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(&[1])).expect("written");
        }
        set_modified(&path, std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        seen.insert(of_folder(folder.path()).hex);
    }
    assert_eq!(seen.len(), 3, "all but the byte behind a sample are seen");
}
